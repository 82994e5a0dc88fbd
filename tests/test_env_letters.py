"""Protects the letter-counting environment: the law of its tasks, its exact reward, and that no
reply cheats it.

The numbers expected here come from the environment's written rules, not from its code: a table of
the tiers, and rewards worked out by hand.
"""

import hashlib
import json
import os
import random
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
from spellchecker import SpellChecker

from bookkeeping.refusals import check
from env_letters import (
    STYLES,
    Letters,
    Task,
    habit_of,
    make_task,
    score_reply,
    write_reply,
)
from settings import DEV_SEEDS, Config, by_size, fill, sft_seeds, task_seeds
from warm import ROOT

N = 300  # seeds a tier

# tier: (source, shortest, longest string, P(several letters), fewest, most letters, up to 26; the
# digest of its first 200 tasks: whoever changes a tier changes every number measured on it)
LAW = {
    1: ("word", 3, 8, 0.0, 1, 1, "f2834184bf68"),
    2: ("word", 5, 12, 0.5, 1, 2, "2434e58fb077"),
    3: ("word", 8, 18, 0.6, 2, 3, "00957db37e29"),
    4: ("word", 10, 25, 0.8, 3, 5, "14ccd06988b0"),
    5: ("word", 15, 35, 0.9, 5, 8, "39ac13f94d90"),
    6: ("random", 40, 80, 1.0, 8, 12, "b3105f243fec"),
    7: ("random", 80, 150, 1.0, 12, 20, "df6f6b212be1"),
    8: ("random", 150, 250, 1.0, 18, 30, "032924eec78c"),
    9: ("random", 250, 400, 1.0, 25, 40, "74db177ee2fe"),
    10: ("random", 400, 500, 1.0, 35, 50, "a4c939cf70fe"),
}
ONE = Task("banana", ("a",), (3,))
THREE = Task("banana", ("a", "n", "q"), (3, 2, 0))
RIGHT_THREE = '<answer>{"a": 3, "n": 2, "q": 0}</answer>'


def tasks_of(tier: int, n: int = N) -> list[Task]:
    return [make_task(random.Random(seed), tier) for seed in range(n)]


# ---------------------------------------------------------------------------- the law of the tasks


@pytest.mark.parametrize("tier", LAW)
def test_strings_and_letters_follow_the_law_and_the_counts_are_right(tier):
    source, shortest, longest, p_several, fewest, most, digest = LAW[tier]
    drawn = tasks_of(tier)
    assert hashlib.sha256(repr(drawn[:200]).encode()).hexdigest()[:12] == digest
    texts, asked = {task.text for task in drawn}, {len(task.letters) for task in drawn}
    assert shortest <= min(map(len, texts)) and max(map(len, texts)) <= longest
    assert len(texts) > (20 if source == "word" else N - 1)  # a tier repeats no few words
    if source == "word":
        assert texts <= set(SpellChecker(language="en").word_frequency.words())
    for task in drawn:
        assert len(set(task.letters)) == len(task.letters)
        assert set(task.letters) <= set(string.ascii_lowercase)
        assert [len(task.text.split(c)) - 1 for c in task.letters] == list(task.counts)
    low, high = min(max(2, fewest), 26), min(max(2, most), 26)
    assert asked - {1} <= set(range(low, high + 1))
    assert not p_several or {low, high} <= asked  # both ends of the range are drawn
    share = sum(len(task.letters) > 1 for task in drawn) / N
    assert abs(share - p_several) <= 4 * (p_several * (1 - p_several) / N) ** 0.5


# -------------------------------------------------------------------------------------- determinism


def test_the_tasks_of_every_environment_are_the_same_in_every_process():
    """Sets have another order in every process; a resumed run must still draw the same tasks."""
    code = (
        "from env_alphabet import *; from env_letters import *; from env_swarm import *\n"
        "words, random = (Letters(tier, 'binary', True, 'bare') for tier in (3, 6))\n"
        "envs = words, random, Alphabet(), Swarm('hard')\n"
        "print([env.reset(seed) for env in envs for seed in range(20)])\n"
        "print([play(Swarm(style='random'), seed) for seed in range(3)])"
    )

    envs = [os.environ | {"PYTHONHASHSEED": hash_seed} for hash_seed in "12"]
    words = [sys.executable, "-c", code]
    one, other = (subprocess.check_output(words, cwd=ROOT, env=env, text=True) for env in envs)
    assert one == other and one.count("content") == 80


@pytest.mark.parametrize("think", [True, False])
@pytest.mark.parametrize("tier", [1, 4])
def test_an_episode_is_one_turn_and_the_question_says_all_that_is_needed(tier, think):
    env = Letters(tier, "partial", think, "states")
    for seed, reply in ((1, "no idea"), (2, ""), (1, None)):
        (message,) = env.reset(seed)
        assert env.score()["reward"] == 0.0, "a reply must not outlive its episode"
        assert env.step(env.expert_reply() if reply is None else reply) == ([], True)
        assert env.score()["reward"] == float(reply is None)
    several = len(env.task.letters) > 1
    text, s = message["content"], "s" * several
    ask = f'Count the letter{s} {", ".join(env.task.letters)} in "{env.task.text}". '
    assert message["role"] == "user" and text.startswith(ask) and ("JSON" in text) == several
    assert "inside <answer> and </answer>" in text and ("<think>" in text) == think


# ---------------------------------------------------------------------- rewards worked out by hand

# reply, partial reward, binary reward
SINGLE = [
    ("<answer>3</answer>", 1.0, 1.0),
    ("<answer> 3\n</answer>", 1.0, 1.0),
    ("There are <answer>3</answer> of them.", 1.0, 1.0),
    ("<answer>2</answer>", 0.1, 0.0),
    ("<answer>999999</answer>", 0.1, 0.0),
    ("3", 0.0, 0.0),
    ("", 0.0, 0.0),
    ("<answer></answer>", 0.0, 0.0),
    ("<answer>three</answer>", 0.0, 0.0),
    ("<answer>3.0</answer>", 0.0, 0.0),
    ("<answer>3, 2</answer>", 0.0, 0.0),
    ("<answer>0x3</answer>", 0.0, 0.0),
    ("<answer>1_0</answer>", 0.0, 0.0),
    ("<answer>\u0663</answer>", 0.0, 0.0),  # an Arabic 3: int() would take it
    ('<answer>"3"</answer>', 0.0, 0.0),
    ('<answer>{"a": 3}</answer>', 0.0, 0.0),  # one letter wants a bare integer
    ("<answer>3</answer><answer>3</answer>", 0.0, 0.0),
    ("<answer>1</answer><answer>3</answer>", 0.0, 0.0),
    ("<answer>3", 0.0, 0.0),
    ("3</answer>", 0.0, 0.0),
    ("<ANSWER>3</ANSWER>", 0.0, 0.0),
    ("<answer><answer>3</answer></answer>", 0.0, 0.0),
]
SEVERAL = [
    ('<answer>{"a": 3, "n": 2, "q": 0}</answer>', 1.0, 1.0),
    ('<answer>\n{"q":0,"n":2,"a":3}\n</answer>', 1.0, 1.0),  # the order is free
    ('<answer>{"a": 3, "n": 2, "q": 1}</answer>', 0.7, 0.0),  # 0.1 + 0.9 * 2/3
    ('<answer>{"a": 3, "n": 1, "q": 1}</answer>', 0.4, 0.0),  # 0.1 + 0.9 * 1/3
    ('<answer>{"a": 0, "n": 0, "q": 1}</answer>', 0.1, 0.0),
    ('<answer>{"a": -3, "n": 2, "q": 0}</answer>', 0.7, 0.0),
    ('<answer>{"a": 3, "n": 2}</answer>', 0.1, 0.0),  # a letter too few
    ('<answer>{"a": 3, "n": 2, "q": 0, "b": 1}</answer>', 0.1, 0.0),  # a letter too many
    ('<answer>{"a": 3, "n": 2, "Q": 0}</answer>', 0.1, 0.0),
    ("<answer>3</answer>", 0.0, 0.0),
    ("<answer>[3, 2, 0]</answer>", 0.0, 0.0),
    ('<answer>[["a", 3], ["n", 2], ["q", 0]]</answer>', 0.0, 0.0),
    ('<answer>{"a": "3", "n": "2", "q": "0"}</answer>', 0.0, 0.0),
    ('<answer>{"a": 3.0, "n": 2, "q": 0}</answer>', 0.0, 0.0),
    ('<answer>{"a": 3, "n": 2, "q": false}</answer>', 0.0, 0.0),  # False == 0, but no count
    ('<answer>{"a": 3, "n": 2, "q": null}</answer>', 0.0, 0.0),
    ('<answer>{"a": 3, "n": 2, "q": NaN}</answer>', 0.0, 0.0),
    ('<answer>{"a": 3, "n": 2, "q": 0, "q": 0}</answer>', 0.0, 0.0),  # a letter answered twice
    ('<answer>{"a": 1, "a": 3, "n": 2, "q": 0}</answer>', 0.0, 0.0),
    ("<answer>{'a': 3, 'n': 2, 'q': 0}</answer>", 0.0, 0.0),
    ('<answer>{"a": 3, "n": 2, "q": 0,}</answer>', 0.0, 0.0),
    ('<answer>{"a": 3, "n": 2, "q": 0} ok</answer>', 0.0, 0.0),
    ('<answer>```json\n{"a": 3, "n": 2, "q": 0}\n```</answer>', 0.0, 0.0),
    ('{"a": 3, "n": 2, "q": 0}', 0.0, 0.0),
    (RIGHT_THREE + RIGHT_THREE, 0.0, 0.0),
    ("", 0.0, 0.0),
]


@pytest.mark.parametrize("think", [True, False])
@pytest.mark.parametrize(
    "task, reply, partial, binary",
    [(ONE, *row) for row in SINGLE] + [(THREE, *row) for row in SEVERAL],
)
def test_reward_worked_out_by_hand(task, reply, partial, binary, think):
    if not think and reply.startswith("There are"):
        partial = binary = 0.0  # the answer and nothing else, or a tally could be written as prose
    assert score_reply(task, reply, "binary", think)["reward"] == binary
    marks = score_reply(task, reply, "partial", think)
    assert marks["reward"] == pytest.approx(partial, abs=1e-12)
    # "correct" once meant "reward above 0": a partial reward is no right answer
    assert marks["exact"] == binary and marks["format"] == float(partial > 0)


@pytest.mark.parametrize(
    "reply, with_thinking, without",  # {}: a right answer
    [
        ("<think>{}</think>", 0.0, 0.0),
        ("{}<think>hm</think>", 0.0, 0.0),  # what counts comes after the thinking
        ("<think>is it {}?</think>{}", 1.0, 0.0),  # rehearsing does no harm
        ("<think><answer>7</answer></think>{}", 1.0, 0.0),
        ("<think>a</think> no: <think>b</think>{}", 1.0, 0.0),
        ("<think>" + "x" * 1_000_000 + "</think>{}", 1.0, 0.0),
        ("<think>b a1 {}", 0.0, 0.0),  # thinking that never ends
        ("{}<think>", 0.0, 0.0),
        ("<think>a</think><think>b {}", 0.0, 0.0),
        ("<think></think>{}", 1.0, 0.0),
        ("b a1 n a2 n a3</think>{}", 1.0, 0.0),
        ("b a1 n a2 n a3 {}", 1.0, 0.0),  # a tally in prose
        (" " * 8 + "{}", 1.0, 0.0),  # or in white space
        ("\n{}\n", 1.0, 1.0),
        ("{}{}", 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("task, right", [(ONE, "<answer>3</answer>"), (THREE, RIGHT_THREE)])
def test_what_counts_comes_after_the_thinking(task, right, reply, with_thinking, without):
    for think, reward in ((True, with_thinking), (False, without)):
        marks = score_reply(task, reply.replace("{}", right), "binary", think)
        assert marks["reward"] == marks["exact"] == marks["format"] == reward


# --------------------------------------------------------------------------------- hostile replies


def test_the_longest_honest_answer_is_accepted():
    task = next(task for task in tasks_of(10, 20) if len(task.letters) == 26)
    body = json.dumps(dict(zip(task.letters, task.counts)), indent=2)  # pretty-printed, so longer
    assert score_reply(task, f"<answer>{body}</answer>", "binary", True)["exact"] == 1.0


# -------------------------------------------------------------------------------------- the expert


@pytest.mark.parametrize("think", [True, False])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tier", LAW)
def test_every_expert_style_is_right_and_has_its_own_habit(tier, style, think):
    for kind, seed in [("binary", 0), ("partial", 0), *(("binary", seed) for seed in range(1, 12))]:
        env = Letters(tier, kind, think, style)
        env.reset(seed)
        env.step(env.expert_reply())
        marks, habit = env.score(), style if think else "bare"
        assert marks["reward"] == marks["exact"] == marks["format"] == marks["fraction"] == 1.0
        assert {name for name in STYLES if marks[f"habit_{name}"]} == {habit}
        assert think or "think" not in env.reply


def test_the_deriving_expert_spells_the_string_with_a_running_tally():
    assert write_reply(THREE, "derives") == "<think>\nb a1 n1 a2 n2 a3\n</think>\n" + RIGHT_THREE


@pytest.mark.parametrize(
    "reply, habit",
    [
        ("b a1 n1 a2 <answer>3</answer>", "bare"),  # no thinking at all
        ("<think></think><answer>3</answer>", "bare"),
        ("<think>I see three of them.</think>b a1 n1 a2 n2 a3", "states"),
        ("<think>b a1 n a2 n a3", "derives"),  # cut off by the token limit, still the habit
        ("<think>b, a1, n, a2, n, a3.</think>", "derives"),
        ("<think>b a1 then some more words</think>", "states"),
    ],
)
def test_habit_reads_the_thinking_and_nothing_else(reply, habit):
    assert habit_of(reply) == habit


# -------------------------------------------------------------------------------------- the script


def run_bare(file: Path) -> str:
    """What it prints with a Python that has no packages, as a newcomer's may have none."""
    return subprocess.check_output([sys.executable, "-S", "-I", file], text=True)


def test_the_module_runs_as_a_script_without_any_package():
    said = run_bare(ROOT / "env_letters.py")
    assert re.findall(r"'reward': ([\d.]+)", said) == ["1.0"] * 3 + ["0.0"] * 3


REWARD = '"reward": exact if reward_kind == "binary" else partial,'


@pytest.mark.parametrize(
    "new",
    [
        '"reward": partial * (0.5 + 0.5 * (habit == "derives")),',
        '"reward": exact - len(reply) / 1000, "length": len(reply),',
    ],
)
def test_the_script_survives_another_reward(new, tmp_path):
    """To change score_reply is the first fork that a reader tries."""
    fork, source = tmp_path / "env_letters.py", (ROOT / "env_letters.py").read_text()
    fork.write_text(source.replace(REWARD, new))
    assert fork.read_text() != source and run_bare(fork).count("'reward': ") == 6


def test_no_development_task_was_trained_on_and_the_page_counts_the_words_that_were():
    """A default run: a word may come again, never with the same letters asked for."""
    page = " ".join((ROOT / "docs" / "letters.md").read_text().split())
    known = {}
    for tier in range(1, 7):
        cfg = Config(difficulty=tier)
        check(cfg)
        fill(cfg, by_size(1e6, "letters"))
        seeds = [seed for update in range(cfg.updates) for seed in task_seeds(cfg, update)]
        pairs = lambda seeds, tier=tier: [
            (task.text, frozenset(task.letters))
            for task in (make_task(random.Random(seed), tier) for seed in seeds)
        ]
        trained = pairs([*seeds, *sft_seeds(cfg)])
        development = pairs(range(DEV_SEEDS, DEV_SEEDS + cfg.eval_n))
        known[tier] = sum(text in dict(trained) for text, _ in development)
        assert not set(trained) & set(development)
    assert f"it does in {known[5]} of tier 5's 256" in page
    assert "five or fewer of each tier below, and never with the same letters" in page
    assert max(known[tier] for tier in range(1, 5)) == 5 and known[6] == 0
