"""Protects the doctor of our own runs: each symptom is told when it is there, once, with what to
do; a healthy run is left alone."""

import json
from pathlib import Path

import numpy as np
import pytest

import warm
from bookkeeping import doctor, progress, report
from bookkeeping.run import Run, State
from helpers import doctor_logs
from settings import Config

ROOT = Path(doctor.__file__).resolve().parents[1]
half = lambda before, after: np.repeat([before, after], 15).astype(float)


def made_up(**values) -> list[dict]:
    """30 updates of a healthy run, except for what is given as {metric: its values}."""
    columns = {
        "reward": 0.4 + 0.01 * np.arange(30) + np.random.default_rng(0).normal(0, 0.02, 30),
        "groups_with_signal": np.full(30, 0.8),
        "entropy": np.linspace(0.3, 0.1, 30),
        "truncated": np.zeros(30),
        "errors": np.zeros(30),
        "n": np.full(30, 64),
    } | values
    return [
        {"update": i + 1, **{name: float(column[i]) for name, column in columns.items()}}
        for i in range(30)
    ]


# {symptom: (the values that show it, the update that tells it, what the sentence must name)}
ILL = {
    "collapse": ({"reward": half(0.8, 0.1)}, 18, "learning rate"),
    "stuck": (
        {"reward": half(0.2, 0), "groups_with_signal": half(0.5, 0), "truncated": half(0.1, 1)},
        20,
        "learning rate",
    ),
    "no signal": ({"groups_with_signal": half(0.5, 0.0)}, 25, "--difficulty"),
    "few groups": (
        {"groups_with_signal": np.full(30, 0.2), "reward": np.tile([0.3, 0.32], 15)},
        30,
        "--sft-steps",
    ),
    "solved": (
        {"reward": np.minimum(1, np.linspace(0.5, 1.5, 30)), "groups_with_signal": half(0.5, 0)},
        25,
        "raise --difficulty",
    ),
    "no gradient": ({"grad_norm": half(0.1, 0)}, 20, "enable_input_require_grads"),
    "noise": ({"entropy": half(0.3, 4.0)}, 18, "learning rate"),
    "cut short": ({"truncated": half(0.1, 0.9)}, 20, "--max-tokens"),
    "errors": ({"errors": half(0, 8), "n": half(64, 56)}, 18, "environment"),
}


RISES = np.linspace(0.2, 0.9, 30)
TEN = {
    "exact": RISES,
    "reward": 10 * RISES,
    "reward_low": 10 * RISES - 0.2,
    "reward_high": 10 * RISES + 0.2,
    "exact_reward": np.full(30, 10.0),
}


@pytest.mark.parametrize("symptom", ILL)
def test_a_symptom_is_told_once_when_it_is_there(symptom):
    values, update, names = ILL[symptom]
    seen = doctor.look_at(made_up(**values))
    (told,) = [sentence for sentence in seen if f": {symptom}: " in sentence]
    assert told.startswith(f"update {update}: ") and names in told and "\n" not in told
    assert len(seen) == 1 or symptom == "stuck" and len(seen) == 2 and ": collapse: " in seen[0]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"groups_with_signal": np.tile([0.0] * 9 + [0.1], 3)},  # now and then there is one
        {"entropy": half(0.05, 0.4)},  # eight times as much, and still sure of itself
        {"entropy": half(2.0, 4.0)},  # it has always been like this
        {"truncated": half(0.0, 0.5)},
        {"groups_with_signal": np.full(30, 0.2)},  # few, and the reward rises
        {"errors": half(0, 1)},  # 1 of 65 may happen
        {"errors": np.tile([0.0, 0.0, 32.0], 10)},
        TEN,
        {"reward": half(0.95, 0.5), "level": half(5, 6)},  # a curriculum went up
    ],
)
def test_what_is_no_symptom_is_not_told(values):
    assert doctor.look_at(made_up(**values)) == []


def test_a_run_that_never_scored_is_not_stuck_but_has_no_signal():
    values = {
        "reward": np.where(np.arange(30) == 3, 0.05, 0.0),
        "groups_with_signal": np.where(np.arange(30) == 3, 0.1, 0.0),
    }
    (told,) = doctor.look_at(made_up(**values))
    assert "no signal" in told and "update 14" in told


def test_a_run_of_one_line_and_lines_without_an_entropy_are_survived():
    assert doctor.symptoms([], []) == {} and doctor.look_at(made_up()[:1]) == []
    quiet = [{k: v for k, v in line.items() if k != "entropy"} for line in made_up()]
    assert doctor.look_at(quiet) == []  # no group had a signal, so nothing was computed


# -------------------------------------------------------------------- exact, and paid


@pytest.mark.parametrize(
    "line, told",
    [
        ({"exact": 0.6, "fraction": 0.5}, True),  # correct is counted as reward > 0
        ({"exact": 1.0, "similarity": 0.9}, True),
        ({"exact": 0.5, "fraction": 0.7}, False),
        ({"exact": 0.5, "fraction": 0.7, "exact_reward": 0.6, "reward": 0.3}, False),  # pays half
        ({"exact": 0.7, "exact_reward": 4.5, "reward": 3.0}, False),  # names no parts
        ({"exact": 1.0, "fraction": 1.0}, False),
    ],
)
def test_more_exact_answers_than_right_parts_are_named(line, told):
    assert ("not exact" in doctor.symptoms([{"update": 1, **line}], [0.5])) == told


# -------------------------------------------------------------------- development evaluations

N = 256


def evaluation(
    stage: str,
    update: int,
    exact: float,
    reward: float | None = None,
    tokens: float = 100.0,
    n: int = N,
) -> dict:
    """A line of evals.jsonl: the first tasks are right.

    reward: what every task earns; None: 1 for an exact answer.
    """
    right = [float(i < round(exact * n)) for i in range(n)]
    paid = right if reward is None else [reward] * n
    return {"update": update, "stage": stage, "tasks": "tier 6", "trained": True, "reward": paid, "exact": right,
            "format": [1.0] * n, "reply_tokens": [tokens] * n}  # fmt: skip


BEFORE, SFT = evaluation("before", 0, 0.1, tokens=44), evaluation("after_sft", 0, 0.45)
FLAGS = {"sft_steps": 50}
FLAT = {"reward": np.full(30, 0.45)}

# {symptom: (evaluations after SFT, or all; the update that tells it; what the sentence must say)}
DEV = {
    "no SFT": ([evaluation("before", 0, 0.45), SFT], 0, ("+0.0 points [-1.5, +1.5]", "--sft-lr")),
    "bad SFT": ([evaluation("before", 0, 0.6), SFT], 0, ("-15.2 points [", "--sft-lr")),
    "pays something else": (
        [BEFORE, evaluation("after_sft", 0, 0.45, 0.3), evaluation("final", 30, 0.43, 0.416)], 30,
        ("+0.116 [", "-2.0 points [", "pays something else")),
    "lost": ([BEFORE, SFT, evaluation("final", 30, 0.37)], 30, ("from 44.9% to 37.1%, -7.8 points [", "n=256", "learning rate")),
    "past its best": ([BEFORE, SFT, evaluation("train", 10, 0.8), evaluation("train", 20, 0.7)], 20,
                      ("since update 10", "-10.2 points [", "--updates 10")),
    "length": ([BEFORE, evaluation("after_sft", 0, 0.45, tokens=104), evaluation("train", 20, 0.45, tokens=44)], 20,
               ("from 104 to 44 tokens", "+0.0 points [")),
    "only in training": ([BEFORE, SFT, evaluation("final", 30, 0.46)], 30, ("from 0.47 to 0.77", "+0.012 [", "reset(seed)")),
}  # fmt: skip


def rewards_of(symptom: str) -> dict:
    return {"reward": np.linspace(0.4, 0.84, 30)} if symptom == "only in training" else FLAT


@pytest.mark.parametrize("symptom", DEV)
def test_what_evaluations_show_is_told_with_its_interval(symptom):
    evals, update, says = DEV[symptom]
    (told,) = doctor.look_at(made_up(**rewards_of(symptom)), evals, FLAGS)
    assert told.startswith(f"update {update}: {symptom}: ") and "\n" not in told
    assert all(words in told for words in says), told


@pytest.mark.parametrize(
    "evals,rewards,flags",
    [
        ([BEFORE, SFT, evaluation("final", 30, 0.43)], FLAT, FLAGS),  # 2 points: nobody can tell
        ([BEFORE, SFT, evaluation("train", 20, 0.40)], FLAT, FLAGS),  # 13 tasks of 256: not often enough while a run trains
        ([BEFORE, SFT, evaluation("final", 30, 0.2) | {"trained": False}], FLAT, FLAGS),  # tasks that are not trained
        # four tasks show nothing, nor its absence
        ([evaluation("before", 0, 0.45, n=4), evaluation("after_sft", 0, 0.45, n=4)], FLAT, FLAGS),
        ([evaluation("before", 0, 0.45), SFT], FLAT, {"sft_steps": 0}),  # there was none
        ([BEFORE, evaluation("after_sft", 0, 0.97), evaluation("final", 30, 0.98, tokens=44)], FLAT, FLAGS),  # all right, and shorter
        ([BEFORE, SFT, evaluation("final", 30, 0.9, tokens=250)], FLAT, FLAGS),  # it has learnt to think
        # easier tasks in training, as asked
        ([BEFORE, SFT, evaluation("final", 30, 0.46)], rewards_of("only in training"), FLAGS | {"curriculum": True}),
        # samples catch up with greedy replies
        ([BEFORE, evaluation("after_sft", 0, 0.9), evaluation("final", 30, 0.9)], rewards_of("only in training"), FLAGS),
    ],
)  # fmt: skip
def test_what_evaluations_do_not_show_is_not_told(evals, rewards, flags):
    assert doctor.look_at(made_up(**rewards), evals, flags) == []


def save(file: Path, lines: list[dict]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_and_its_report_tell_what_evaluations_show(tmp_path, capsys):
    evals = DEV["lost"][0]
    save(tmp_path / "evals.jsonl", evals)
    run = Run(Config(sft_steps=50), tmp_path, None, State(update=30), [], tmp_path)
    run.log_evaluation({})
    said = capsys.readouterr().out
    assert run.state.warnings["lost"].startswith("update 30: since SFT exact answers went")
    assert "LOST at update 30" in said
    at_0 = [e | {"update": 0} for e in evals]
    found = report.observations({"config": {}}, [], at_0)[-1]
    assert "Found wrong at update 0: lost: since SFT" in found


def test_tasks_without_a_result_are_left_out_of_both():
    now = evaluation("final", 30, 0.37, n=N - 1) | {"missing": {"0": "it raised"}}
    now["exact"] = now["reward"] = SFT["exact"][1:]
    assert doctor.look_at(made_up(**FLAT), [BEFORE, SFT, now], FLAGS) == []


def test_an_environment_that_says_exact_only_now_and_then_does_not_end_a_run():
    whole = evaluation("before", 0, 0.2)
    bare = {name: v for name, v in whole.items() if name not in ("exact", "format")}
    evals = [bare, SFT, {**bare, "stage": "train", "update": 20}, evaluation("final", 30, 0.2)]
    (told,) = doctor.look_at(made_up(**FLAT), evals, FLAGS)
    assert "lost" in told and "the mean reward went from 0.449 to 0.199" in told


def flat_run(rng, n: int, looks: int, paid_in_parts: bool) -> tuple[list[dict], list[float]]:
    """A run that SFT helps and GRPO does nothing to.

    Every evaluation draws every task anew, more noise than greedy replies have.
    """
    hard = rng.beta(0.5, 0.5, n)

    def look(stage: str, update: int, known: float) -> dict:
        right = (rng.random(n) < known * hard).astype(float)
        paid = np.maximum(right, 0.9 * hard * rng.random(n)) if paid_in_parts else right
        tokens = rng.lognormal(4.5, 0.3, n)
        return {
            "update": update,
            "stage": stage,
            "trained": True,
            "reward": paid,
            "exact": right,
            "reply_tokens": tokens,
        }

    last = 20 * looks
    stages = [
        ("before", 0, 0.3),
        ("after_sft", 0, 1),
        *(("train", 20 * i, 1) for i in range(1, looks)),
        ("final", last, 1),
    ]
    return [look(*stage) for stage in stages], list(0.5 + 0.05 * rng.normal(size=last))


def test_flat_runs_are_rarely_told_anything_however_often_they_are_looked_at():
    """The docstring's rate, from fewer runs: of 120 runs of 20 looks each, four at most."""
    rng, told = np.random.default_rng(0), 0
    for i in range(120):
        evals, rewards = flat_run(rng, n=(32, 128, 256)[i % 3], looks=20, paid_in_parts=i % 2 == 0)
        told += any(
            progress.symptoms(evals[: k + 1], rewards[: 20 * (k - 1)], FLAGS)
            for k in range(1, len(evals))
        )
    assert told <= 4


# -------------------------------------------------------------------- runs that were made

MADE = {
    "letters/grpo-0": set(),
    "letters/no_think-0": {"few groups"},  # 0.12 at the start, 0.15 thirty updates later
    "alphabet/grpo-0": set(),
    "swarm/grpo-0": set(),
    "offpolicy/stale_sequence-0": set(),
    "offpolicy/stale_none-0": {"uncorrected", "broken", "collapse", "stuck"},
    "lora_rank/rank8_1e-2-0": {"broken", "stuck"},
    # it lost the format, and found it again twenty updates later
    "curriculum/fixed_bare-4": {"collapse", "broken"},
}


@pytest.mark.parametrize("run", MADE)
def test_runs_that_people_looked_at_are_told_what_they_have(run):
    lines = [json.loads(line) for line in doctor_logs()[1][f"ours/{run}"].splitlines()]
    assert {told.split(": ")[1] for told in doctor.look_at(lines)} == MADE[run]


def test_the_command_line(tmp_path):
    ask = lambda *words: warm.run(["-m", "bookkeeping.doctor", *words], ROOT)
    assert "nothing wrong" in ask().stdout
    save(tmp_path / "metrics.jsonl", made_up(**FLAT | ILL["noise"][0]))
    save(tmp_path / "evals.jsonl", DEV["lost"][0])
    told = ask(str(tmp_path))
    assert told.returncode == 1 and told.stdout.startswith("update 18: noise: ")
    assert "\nupdate 30: lost: " in told.stdout
    save(tmp_path / "metrics.jsonl", made_up())
    save(tmp_path / "evals.jsonl", [])
    told = ask(str(tmp_path))
    assert told.returncode == 0 and told.stdout.startswith("nothing wrong was found in 30 updates")
    assert "looked at: entropy, errors, groups_with_signal, reward, truncated" in told.stdout
    missing = ask(str(tmp_path / "no"))
    assert missing.returncode == 2 and "check the path" in missing.stderr


def test_a_sampler_that_falls_behind_late_is_named_although_the_beginning_is_far_back():
    """Such as a run that is resumed with another engine.

    The doctor is handed the newest 50 lines, and the gap that it began with.
    """
    gaps = [1e-6] * 100 + [0.8] * 5
    lines = [
        {"update": i + 1, "reward": 0.5, "mismatch": gap, "off_policy_steps": 0.0, "rounding": 1e-3}
        for i, gap in enumerate(gaps)
    ]
    known = {"reward_low": 0.4, "reward_high": 0.6, "n": 64}
    (told,) = doctor.look_at([line | known for line in lines])
    assert told.startswith("update 103: stale: ")


def test_samples_that_are_corrected_are_not_called_uncorrected_after_an_update_without_a_signal():
    """Such an update has measured nothing, so its line says nothing of the correction."""
    silent = {"off_policy_steps": 3.0}
    old = silent | {"mismatch": 0.1, "ratio": 1.0}
    assert "the ratio is 1.000" in doctor.uncorrected([silent, old, old, old], [])
    assert doctor.uncorrected([*[old | {"importance": 1.0}] * 3, silent], []) is None


def test_what_is_reported_only_when_it_is_right_may_be_missing_at_the_start():
    lines = [
        {"update": i, "reward": 0.1 + 0.02 * i, "reward_low": 0.1, "reward_high": 0.9, "n": 8}
        for i in range(30)
    ]
    lines = [line | ({"exact": 0.02} if line["update"] >= 5 else {}) for line in lines]
    assert "pays something else" in doctor.symptoms(lines, [line["reward"] for line in lines])


def test_a_reward_on_another_scale_is_not_held_against_a_share_before_anything_was_right():
    lines = [
        {"update": i, "reward": 22.75, "reward_low": 20, "reward_high": 25, "exact": 0.0, "n": 8}
        for i in range(30)
    ]
    assert "pays something else" not in doctor.symptoms(lines, [22.75] * 30)


def test_replies_that_a_harder_level_cuts_short_are_no_broken_policy():
    lines = made_up(truncated=half(0.0, 0.97), format=half(0.97, 0.03), level=half(7, 8))
    told = " ".join(doctor.look_at(lines))
    assert "cut short" in told and "broken" not in told
    assert "broken" in " ".join(doctor.look_at([line | {"level": 7} for line in lines]))


def test_a_fall_that_is_small_beside_the_reward_is_not_past_its_best():
    best, now = ({"update": u, "reward": [x] * 256} for u, x in ((20, -10.072), (40, -10.092)))
    assert progress.past_its_best(best, now) == {}
    assert progress.past_its_best(best, now | {"reward": [-12.0] * 256})
