"""Protects the doctor: each symptom is told when it is there, once, with what to do; a healthy run is left alone, the committed ones included."""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import env_alphabet
import env_letters
import warm
from bookkeeping import doctor
from evaluate import summarize
from lab.pages import walk
from learn import failures
from rollout import Episode, finish

ROOT = Path(doctor.__file__).resolve().parents[1]
half = lambda before, after: np.repeat([before, after], 15).astype(float)

# {symptom: (the values that show it, the update that tells it, what the sentence must name)}
ILL = {
    "collapse": ({"reward": half(0.8, 0.1)}, 18, "learning rate"),
    "stuck": ({"reward": half(0.2, 0.0), "groups_with_signal": half(0.5, 0.0), "truncated": half(0.1, 1.0)}, 20, "learning rate"),
    "no signal": ({"groups_with_signal": half(0.5, 0.0)}, 25, "equal"),
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
    seen = doctor.look_at(doctor.made_up(**values))
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
        {"errors": half(0, 1)},  # 1 of 65 may happen
        {"errors": np.tile([0.0, 0.0, 32.0], 10)},
        TEN,
        {"reward": half(0.95, 0.5), "level": half(5, 6)},  # a curriculum went up
    ],
)
def test_what_is_no_symptom_is_not_told(values):
    assert doctor.look_at(doctor.made_up(**values)) == []


def test_nothing_right_and_everything_right_have_different_remedies():
    equal = {"groups_with_signal": np.zeros(30)}
    (hard,) = doctor.look_at(doctor.made_up(reward=np.zeros(30), **equal))
    (solved,) = doctor.look_at(doctor.made_up(reward=np.ones(30), **equal))
    assert "lower --difficulty" in hard and "raise --difficulty" in solved


def test_a_run_that_never_scored_is_not_stuck_but_has_no_signal():
    values = {"reward": np.where(np.arange(30) == 3, 0.05, 0.0), "groups_with_signal": np.where(np.arange(30) == 3, 0.1, 0.0)}
    (told,) = doctor.look_at(doctor.made_up(**values))
    assert "no signal" in told and "update 14" in told


def test_a_run_of_one_line_and_lines_without_an_entropy_are_survived():
    assert doctor.symptoms([], []) == {} and doctor.look_at(doctor.made_up()[:1]) == []
    quiet = [
        {k: v for k, v in line.items() if k != "entropy"} for line in doctor.made_up()
    ]  # no group had a signal, so nothing was computed
    assert doctor.look_at(quiet) == []


# ---------------------------------------------------------------------------------------------- exact, and paid


def wrong(reply: str) -> str:
    """The same reply with its last digit another one: one count of it is wrong."""
    at = max(i for i, c in enumerate(reply) if c.isdigit())
    return reply[:at] + str((int(reply[at]) + 1) % 10) + reply[at + 1 :]


def batch(make_env, *ways) -> dict:
    """A line of metrics.jsonl about 16 tasks, each answered in all these ways."""
    groups = []
    for seed in range(16):
        groups.append([])
        for way in ways:
            env, episode = make_env(), Episode(seed, seed, [], [], [])
            env.reset(seed)
            done = False
            while not done:
                _, done = env.step(way(env.expert_reply()))
            finish(episode, env)
            groups[-1].append(episode)
    return {"update": 1, **summarize(groups)}


def bare(reply: str) -> str:
    return reply.rpartition("</think>")[2].strip()


def without_last_line(reply: str) -> str:
    """An expert's list, but for its last name."""
    lines = reply.split("\n")
    return "\n".join([*lines[:-2], lines[-1]])


def letters(module=env_letters, reward: str = "partial"):
    return lambda: module.Letters(6, reward, True, "derives")


def forked(monkeypatch) -> ModuleType:
    """env_letters.py after the first fork of lab/pages/walk.py, which pays an exact answer that was not derived half."""
    ((old, new),) = walk.FORKS["a new reward: an answer that was not derived earns half"][1]
    module = ModuleType("env_letters_forked")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look there
    exec(Path(env_letters.__file__).read_text().replace(old, new), module.__dict__)
    return module


WAYS = (str, bare, wrong, lambda reply: bare(wrong(reply)), lambda reply: "no idea")


@pytest.mark.parametrize("ways", [WAYS, (wrong,), (str, wrong)])
def test_reward_counted_as_correct_is_named(monkeypatch, ways):
    monkeypatch.setattr(env_letters.Letters, "score", env_letters.Letters.score)  # undone after the test
    failures.paid_is_correct()
    line = batch(letters(), *ways)
    assert line["exact"] > 0 and "reward > 0" in doctor.symptoms([line], [line["reward"]])["not exact"]


def test_so_it_is_in_an_environment_of_several_turns(monkeypatch):
    right = env_alphabet.Alphabet.score
    monkeypatch.setattr(env_alphabet.Alphabet, "score", lambda self: (marks := right(self)) | {"exact": float(marks["reward"] > 0)})
    line = batch(lambda: env_alphabet.Alphabet(2, 2, 3, 3, 4, False, True, "states"), str, without_last_line)
    assert line["exact"] == 1 and "not exact" in doctor.symptoms([line], [line["reward"]])


@pytest.mark.parametrize("reward", ["binary", "partial"])
def test_exact_answers_that_are_paid_in_another_way_are_left_alone(monkeypatch, reward):
    line = batch(letters(forked(monkeypatch), reward), *WAYS)
    assert 0.5 < line["exact_reward"] < 1  # premise: some are paid half
    assert doctor.symptoms([line], [line["reward"]]) == {}


class Brief:
    """An environment of a user's: right answers earn ten, less what they ramble; it does not say how much of an answer is right."""

    think, tools, max_turns = True, None, 1
    reset = lambda self, seed: [{"role": "user", "content": "?"}]
    expert_reply = lambda self: "yes"

    def step(self, reply: str):
        self.reply = reply
        return [], True

    def score(self) -> dict:
        right = float(self.reply.startswith("yes"))
        return {"reward": right * (10 - len(self.reply)), "exact": right}


def test_an_environment_that_names_no_parts_may_pay_as_it_likes():
    line = batch(Brief, str, lambda reply: reply + ", yes", lambda reply: "no")
    assert line["exact_reward"] == 4.5 and doctor.symptoms([line], [line["reward"]]) == {}


TOO_FAST = ("full_1e-3", "rank1_3e-2", "rank8_1e-2", "rank32_3e-3")


@pytest.mark.parametrize(
    "run", sorted(p.parent.relative_to(ROOT).as_posix() for p in (ROOT / "results").glob("**/metrics.jsonl") if "failures" not in str(p))
)
def test_committed_runs_are_well(run):
    """All were looked at by people, and none had any of this: an alarm here would be a false one. But samples eight updates old, without a correction,
    fall apart, and so do policies at the highest learning rates of the ledger's claim about LoRA: there it has to be told."""
    told = doctor.look_at([json.loads(line) for line in (ROOT / run / "metrics.jsonl").read_text().splitlines()])
    if "eight_blind" in run:
        assert any(": uncorrected: " in sentence for sentence in told)
    elif any(f"lora_rank/{arm}" in run for arm in TOO_FAST):
        assert any("the learning rate is too high" in sentence for sentence in told)
    else:
        assert told == [] or "stale" in run


def test_the_command_line(tmp_path):
    ask = lambda *words: warm.run(["-m", "bookkeeping.doctor", *words], ROOT)
    assert "nothing to tell" in ask().stdout
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in doctor.made_up(**ILL["noise"][0])))
    assert ask(str(tmp_path)).stdout.startswith("update 18: noise: ")
    missing = ask(str(tmp_path / "no"))
    assert missing.returncode == 1 and "Traceback" not in missing.stderr and "check the path" in missing.stderr
