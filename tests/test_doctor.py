"""Protects the doctor of our own runs: each symptom is told when it is there, once, with what to
do; a healthy run is left alone."""

import json

import numpy as np
import pytest

import warm
from bookkeeping import doctor, report
from bookkeeping.run import Run, State
from helpers import doctor_logs, lines_of, write_lines
from settings import Config

half = lambda before, after: np.repeat([before, after], 15).astype(float)


def made_up(**values) -> list[dict]:
    """30 updates of a healthy run, except for what is given as {metric: its values}."""
    columns = {
        "reward": 0.4 + 0.01 * np.arange(30) + np.random.default_rng(0).normal(0, 0.02, 30),
        "groups_with_signal": 0.8,
        "entropy": np.linspace(0.3, 0.1, 30),
        "truncated": 0.0,
        "errors": 0,
        "n": 64,
    }
    return lines_of({"update": np.arange(1, 31)} | columns | values, 30)


ONCE = np.where(np.arange(30) == 3, 0.05, 0.0)
CUT = {"truncated": half(0.0, 0.97), "format": half(0.97, 0.03)}
NOISE = {"entropy": half(0.3, 4.0)}
# (symptom, the values that show it, the update that tells it, what the sentence must name)
ILL = [
    ("collapse", {"reward": half(0.8, 0.1)}, 18, "learning rate"),
    (
        "stuck",
        {"reward": half(0.2, 0), "groups_with_signal": half(0.5, 0), "truncated": half(0.1, 1)},
        20,
        "learning rate",
    ),
    ("no signal", {"groups_with_signal": half(0.5, 0.0)}, 25, "--difficulty"),
    # it never scored, so it is not stuck
    ("no signal", {"groups_with_signal": ONCE, "reward": ONCE}, 14, "--difficulty"),
    (
        "few groups",
        {"groups_with_signal": np.full(30, 0.2), "reward": np.tile([0.3, 0.32], 15)},
        30,
        "--sft-steps",
    ),
    (
        "solved",
        {"reward": np.minimum(1, np.linspace(0.5, 1.5, 30)), "groups_with_signal": half(0.5, 0)},
        25,
        "raise --difficulty",
    ),
    ("no gradient", {"grad_norm": half(0.1, 0)}, 25, "enable_input_require_grads"),
    (
        "broken",
        {"format": np.repeat([0.02, 0.95, 0.02], [5, 15, 10])},  # learned, and lost again
        23,
        "learning rate",
    ),
    ("broken", CUT, 18, "learning rate"),
    ("noise", NOISE, 18, "learning rate"),
    ("cut short", {"truncated": half(0.1, 0.9)}, 20, "--max-tokens"),
    ("cut short", CUT | {"level": half(7, 8)}, 20, "--max-tokens"),  # by a harder level
    ("errors", {"errors": half(0, 8), "n": half(64, 56)}, 18, "environment"),
]


RISES = np.linspace(0.2, 0.9, 30)
TEN = {
    "exact": RISES,
    "reward": 10 * RISES,
    "reward_low": 10 * RISES - 0.2,
    "reward_high": 10 * RISES + 0.2,
    "exact_reward": np.full(30, 10.0),
}


def told(lines: list[dict], rules=None) -> dict[str, tuple[int, str]]:
    """What a run is told while it trains: {symptom: (update, sentence)}."""
    found = {}
    for k in range(1, len(lines) + 1):
        for name, sentence in doctor.symptoms(lines[:k], rules).items():
            found.setdefault(name, (lines[k - 1]["update"], sentence))
    return found


@pytest.mark.parametrize("symptom, values, update, names", ILL)
def test_a_symptom_is_told_when_it_is_there(symptom, values, update, names):
    found = told(made_up(**values))
    assert found[symptom][0] == update and names in found[symptom][1]
    assert found.keys() == {symptom} | ({"collapse"} if symptom == "stuck" else set())


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"groups_with_signal": np.tile([0.0] * 9 + [0.1], 3)},  # now and then there is one
        {"entropy": half(0.05, 0.4)},  # eight times as much, and still sure of itself
        {"entropy": half(2.0, 4.0)},  # it has always been like this
        {"truncated": half(0.0, 0.5)},
        {"format": half(0.06, 0.0)},  # it was never learned
        {"groups_with_signal": np.full(30, 0.2)},  # few, and the reward rises
        {"errors": half(0, 1)},  # 1 of 65 may happen
        {"reward": np.full(30, 0.3)},
        {"reward": np.repeat([0.8, 0.0, 0.8], [20, 1, 9])},  # one bad update
        {"errors": np.tile([0.0, 0.0, 32.0], 10)},
        TEN,
        {"reward": half(0.95, 0.5), "level": half(5, 6)},  # a curriculum went up
    ],
)
def test_what_is_no_symptom_is_not_told(values):
    assert told(made_up(**values)) == {} == doctor.look_at(made_up(**values))


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
    assert ("not exact" in doctor.symptoms([{"update": 1, "reward": 0.5} | line])) == told


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
    return {
        "update": update,
        "stage": stage,
        "tasks": "tier 6",
        "trained": True,
        "reward": right if reward is None else [reward] * n,
        "exact": right,
        "format": [1.0] * n,
        "reply_tokens": [tokens] * n,
    }


BEFORE, SFT = evaluation("before", 0, 0.1, tokens=44), evaluation("after_sft", 0, 0.45)
FLAT = {"reward": np.full(30, 0.45)}

# {symptom: (evaluations, the update that tells it, what the sentence must say)}
DEV = {
    "no SFT": ([evaluation("before", 0, 0.45), SFT], 0, ("+0.000 [-0.015, +0.015]", "--sft-lr")),
    "bad SFT": ([evaluation("before", 0, 0.6), SFT], 0, ("-0.152 [", "--sft-lr")),
    "pays something else": (
        [BEFORE, evaluation("after_sft", 0, 0.45, 0.3), evaluation("final", 30, 0.43, 0.416)],
        30,
        ("+0.116 [", "-0.020 [", "pays something else"),
    ),
    "lost": (
        [BEFORE, SFT, evaluation("final", 30, 0.37)],
        30,
        ("from 0.449 to 0.371, -0.078 [", "n=256", "learning rate"),
    ),
    "past its best": (
        [BEFORE, SFT, evaluation("train", 10, 0.8), evaluation("train", 20, 0.7)],
        20,
        ("since update 10", "-0.102 [", "fewer --updates"),
    ),
}


def evaluated(evals: list[dict], sft_steps: int = 50) -> dict[str, tuple[int, str]]:
    return told(doctor.of_run(evals, sft_steps), doctor.EVALUATED)


@pytest.mark.parametrize("symptom", DEV)
def test_what_evaluations_show_is_told_with_its_interval(symptom):
    evals, update, says = DEV[symptom]
    ((name, (when, sentence)),) = evaluated(evals).items()
    assert (name, when) == (symptom, update) and all(words in sentence for words in says)


MISSING = {"missing": {"0": "it raised"}} | {name: SFT[name][1:] for name in ("exact", "reward")}


@pytest.mark.parametrize(
    "evals, sft_steps",
    [
        ([BEFORE, SFT, evaluation("final", 30, 0.43)], 50),  # 2 points: nobody can tell
        ([BEFORE, SFT, evaluation("train", 20, 0.40)], 50),  # 13 tasks, while a run trains
        ([BEFORE, SFT, evaluation("final", 30, 0.2) | {"trained": False}], 50),
        # four tasks show nothing, nor its absence
        ([evaluation("before", 0, 0.45, n=4), evaluation("after_sft", 0, 0.45, n=4)], 50),
        ([evaluation("before", 0, 0.45), SFT], 0),  # there was none
        ([BEFORE, SFT, evaluation("final", 30, 0.9, tokens=250)], 50),  # it has learned to think
        # a task without a result is left out of both
        ([BEFORE, SFT, evaluation("final", 30, 0.37, n=N - 1) | MISSING], 50),
        # sure, and too small to act on
        ([SFT | {"reward": [-10.0] * N}, SFT | {"update": 9, "reward": [-10.02] * N}], 50),
    ],
)
def test_what_evaluations_do_not_show_is_not_told(evals, sft_steps):
    assert evaluated(evals, sft_steps) == {}


def test_what_only_training_earns_is_told_at_the_end():
    evals = [SFT, evaluation("train", 20, 0.46), evaluation("final", 30, 0.46)]
    rises = np.linspace(0.4, 0.84, 30)
    seen = doctor.look_at(made_up(reward=rises), evals)
    assert "evaluations went from 0.45 to 0.46" in seen["only in training"][1]
    for lines in (FLAT, {"reward": rises, "level": half(2, 3)}, {"reward": rises - 0.38}):
        assert doctor.look_at(made_up(**lines), evals) == {}


def test_a_run_and_its_report_tell_what_evaluations_show(tmp_path, capsys):
    write_lines(tmp_path / "evals.jsonl", DEV["lost"][0])
    run = Run(Config(sft_steps=50), tmp_path, None, State(updates=30), [], tmp_path)
    run.look_at_evaluations()
    assert run.state.warnings["lost"].startswith("update 30: since SFT exact answers went")
    assert "LOST at update 30" in capsys.readouterr().out
    found = report.observations({"warnings": run.state.warnings, "config": {}}, [], [])[-1]
    assert "Found wrong: lost at update 30: since SFT" in found


def test_what_a_run_said_itself_is_said_again_and_what_was_not_checked_is_listed(tmp_path):
    template = "the prompts are not written as those of SFT: token 3 on; make both alike"
    state = {"warnings": {"template": f"update 2: {template}", "solved": "update 25: all equal"}}
    write_lines(tmp_path / "metrics.jsonl", made_up())
    write_lines(tmp_path / "evals.jsonl", [])
    (tmp_path / "config.json").write_text(json.dumps(vars(Config())))
    assert doctor.answer(doctor.of_ours(tmp_path))["nothing_found"]
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "state.json").write_text(json.dumps(state))
    found = doctor.answer(doctor.of_ours(tmp_path))
    ((name, step, cure),) = [(one["name"], one["step"], one["cure"]) for one in found["symptoms"]]
    assert (name, step, cure) == ("template", 2, "make both alike")
    assert found["nothing_found"] == "" and {"kl_ref", "prompts"} <= found["not_logged"].keys()
    assert "step 2: template: the prompts are not" in doctor.text(found)


def flat_run(rng, n: int, looks: int, paid_in_parts: bool) -> list[dict]:
    """A run that SFT helps and GRPO does nothing to.

    Every evaluation draws every task anew, more noise than greedy replies have.
    """
    hard = rng.beta(0.5, 0.5, n)
    stages = [("before", 0), ("after_sft", 0), *(("train", 20 * i) for i in range(1, looks))]
    evals = []
    for stage, update in [*stages, ("final", 20 * looks)]:
        right = (rng.random(n) < (0.3 if stage == "before" else 1) * hard).astype(float)
        paid = np.maximum(right, 0.9 * hard * rng.random(n)) if paid_in_parts else right
        at = {"update": update, "stage": stage, "trained": True, "exact": right.tolist()}
        tokens = rng.lognormal(4.5, 0.3, n).tolist()
        evals.append(at | {"reward": paid.tolist(), "reply_tokens": tokens})
    return evals


def test_flat_runs_are_rarely_told_anything_however_often_they_are_looked_at():
    """The docstring's rate: of 40 runs of 20 looks each, two at most."""
    rng = np.random.default_rng(0)
    runs = [flat_run(rng, (32, 128, 256)[i % 3], 20, i % 2 == 0) for i in range(40)]
    assert sum(bool(evaluated(evals)) for evals in runs) <= 2


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
    assert told(lines).keys() == MADE[run]
    assert doctor.look_at(lines).keys() <= MADE[run] | {"still"}


def test_the_command_line(tmp_path):
    ask = lambda *words: warm.run(["-m", "bookkeeping.doctor", *words])
    assert "few groups" in ask().stdout
    (tmp_path / "config.json").write_text('{"sft_steps": 50}')
    write_lines(tmp_path / "metrics.jsonl", made_up(**FLAT | NOISE, loss=half(0, np.nan)))
    write_lines(tmp_path / "evals.jsonl", DEV["lost"][0])
    found = ask(str(tmp_path))
    assert found.returncode == 1 and "\nstep 18: noise: " in found.stdout
    assert "\nstep 30: lost: " in found.stdout
    found = json.loads(ask(str(tmp_path), "--json").stdout)
    assert [one["name"] for one in found["symptoms"]] == ["noise", "lost"]


def test_samples_that_are_corrected_are_not_called_uncorrected_after_an_update_without_a_signal():
    """Such an update has measured nothing, so its line says nothing of the correction."""
    silent = {"update": 1, "off_policy_steps": 3.0}
    old = silent | {"mismatch": 0.1, "ratio": 1.0}
    assert "uncorrected" in doctor.disagreement([silent, old, old, old])
    assert doctor.disagreement([*[old | {"importance": 1.0}] * 3, silent]) is None


@pytest.mark.parametrize(
    "exact, reward, seen",
    [
        (0.02, RISES, True),  # reported only when it is right, so it is missing at first
        (0.0, [22.75] * 30, False),  # another scale, and nothing was right yet
    ],
)
def test_a_reward_is_held_against_exact_answers_on_its_scale(exact, reward, seen):
    lines = made_up(reward=reward)
    lines = lines[:5] + [line | {"exact": exact} for line in lines[5:]]
    assert ("pays something else" in told(lines)) == seen


def alarms(rewards) -> list[int]:
    """After which updates a run would have heard of a collapse: it is asked after every one."""
    at = range(1, len(rewards) + 1)
    return [i for i in at if doctor.collapse([{"reward": reward} for reward in rewards[:i]])]


def test_a_healthy_run_is_no_collapse():
    """Noisy and flat, flat at a low reward, rising."""
    tripped = 0
    for seed in range(15):
        rng = np.random.default_rng(seed)
        assert alarms(np.clip(rng.normal(0.7, 0.08, 100), 0, 1)) == []
        rising = np.linspace(0.25, 0.9, 100) + rng.normal(0, 0.05, 100)
        assert alarms(np.clip(rising, 0, 1)) == []
        few, fewer = rng.binomial(64, 0.1, 150) / 64, rng.binomial(16, 0.3, 150) / 16
        tripped += bool(alarms(few)) + bool(alarms(fewer))
    assert tripped <= 1  # three standard errors would trip in most


@pytest.mark.parametrize("healthy", [5, 20, 100])
def test_a_fall_from_080_to_014_is_noticed_within_five_updates(healthy):
    assert alarms([0.8] * healthy + [0.14] * 5)[-1] == healthy + 5
    slow = np.r_[np.full(60, 0.8), np.linspace(0.67, 0.14, 5), np.full(5, 0.14)]
    heard = alarms(np.random.default_rng(healthy).normal(slow, 0.06))
    assert heard[0] > 60 and heard[-1] == 70
    assert alarms([-10.0] * 20 + [-16.0] * 20) and not alarms([-10.0] * 20 + [-10.6] * 20)
