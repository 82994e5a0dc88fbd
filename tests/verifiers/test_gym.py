"""Protects reasoning-gym's generators as tasks (bridges/known.py): every generator gives tasks on
each side, scores its own answer, and no answer hangs it."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym", reason="not installed here; `make test-all` does it")

from reasoning_gym.factory import DATASETS

import settings
from bookkeeping import refusals
from bridges import known
from evaluate import HELD_OUT_SEEDS

ROOT = Path(__file__).resolve().parents[2]
NAMES = [name for name in sorted(DATASETS) if name != "composite"]
HOLES = {"complex_arithmetic", "game_of_life_halting"}  # docs/tasks.md says which; theirs to mend
NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
# Their tasks depend on the order of a set, which is another in every process.
UNSTEADY = {
    *("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"),
    *("word_ladder", "codeio"),
}
HOSTILE = [
    *("", " ", "0", "-1", "1/0", "nan", "inf", "9" * 5000, "9**9**9**9", "1e999999999", "[["),
    *("[" * 900, "{}", "null", "None", "\x00", "é🙂", "a\nb\nc", "exit()", "[0]*10**10", "(("),
    *("__import__('os').abort()", "((((9**9)**9)**9)**9)**9", "factorial(99999999)"),
    *("1" + "+1" * 3000, "x" * 9999, "0 " * 4000),
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """codeio makes its tasks by running programs, and some of them write files."""
    monkeypatch.chdir(tmp_path)


def env_of(name: str) -> known.Known:
    return known.open_known(f"reasoning_gym:{name}", True)


@pytest.mark.parametrize("name", NAMES)
def test_every_generator_gives_tasks_and_scores_its_own_answer(name):
    env, fresh, state = env_of(name), known.Generator(name), random.getstate()
    for seed in (settings.TRAIN_SEEDS, settings.SFT_SEEDS, settings.DEV_SEEDS, HELD_OUT_SEEDS):
        assert fresh.draw(seed)["question"].strip() in env.reset(seed)[0]["content"]
        assert known.side_of(env.task["question"]) == known.side_of_seed(seed)
        if name in NO_ANSWER:
            with pytest.raises(ValueError, match="--sft-steps 0"):
                env.expert_reply()
        elif "Integral(" not in env.expert_reply():  # bridges/known.py says why
            env.step(env.expert_reply())
            right = {"reward": 1, "exact": 1, "format": 1, "found": 1, "scorer_failed": 0}
            assert env.score() == right
    assert random.getstate() == state, "it draws from Python's own numbers, and puts them back"


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_hangs_or_ends_a_run(name, monkeypatch):
    """Marks or a failed episode, in seconds. In a process of its own this would be no proof:
    an abort or an endless sum must not be tried at all."""
    monkeypatch.setattr(known.Known, "seconds", 10.0)
    env = refusals.guarded(env_of, name)
    env.reset(settings.DEV_SEEDS)
    for answer in HOSTILE:
        env.step(f"<answer>{answer}</answer>")
        marks = env.score()
        assert 0 <= marks["reward"] < 1 or answer in ("0", "-1") or name in HOLES, (answer, marks)


@pytest.mark.parametrize(
    "env, words",
    [
        ("leter_counting", "reasoning-gym has no leter_counting; `python -m bridges.known"),
        ("letter_counting,words=3", "unexpected keyword argument 'words'"),
        ("letter_counting,min_words=0", "min_words must be positive"),
        ("chain_sum,pay=half", "pay=half: choose part or full"),
        ("composite", "at least one dataset"),
        ("", "reasoning-gym has no"),
    ],
)
def test_a_name_or_a_parameter_that_is_wrong_is_told_in_one_sentence(env, words):
    with pytest.raises(ValueError) as told:
        refusals.check(settings.Config(env=f"reasoning_gym:{env}"))
    assert words in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("pay, earned", [("part", 2 / 3), ("full", 0.0)])
def test_a_part_is_paid_unless_full_marks_alone_are(pay, earned):
    """chain_sum pays for a number that the right one is a part of."""
    env = known.open_known(f"reasoning_gym:chain_sum,min_digits=2,max_digits=2,pay={pay}", True)
    env.reset(next(seed for seed in range(99) if len(env.draw(seed)["answer"]) == 2))
    for answer, value in {env.task["answer"]: 1.0, f"1{env.task['answer']}": earned}.items():
        env.step(f"<answer>{answer}</answer>")
        assert env.score()["reward"] == pytest.approx(value)
        assert env.score()["exact"] == (value == 1)


def test_the_same_seed_is_the_same_task_in_another_process():
    code = (
        "import sys, json; from bridges.known import Generator; "
        "print(json.dumps([Generator(n).draw(7)['question'] for n in json.loads(sys.argv[1])]))"
    )
    names = [*[n for n in NAMES if n not in UNSTEADY][::5], "list_functions", "pool_matrix"]
    found = []
    for seed in ("1", "2"):
        command, env = [sys.executable, "-c", code, json.dumps(names)], {"PYTHONHASHSEED": seed}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, env=os.environ | env)
        found.append(json.loads(done.stdout))
    assert [name for name, a, b in zip(names, *found) if a != b] == []


def test_the_expert_of_the_page_earns_everything(tmp_path):
    page = (ROOT / "docs/tasks.md").read_text()
    (example,) = re.findall(r"```python\n(# spells.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "spells.py").write_text(example)
    env = env_of(f"letter_counting,min_words=2,max_words=5,expert={tmp_path}/spells.py:spell")
    for seed in range(30):
        env.reset(seed)
        env.step(env.expert_reply())
        assert env.score()["exact"] == 1 and "<think>" in env.reply
