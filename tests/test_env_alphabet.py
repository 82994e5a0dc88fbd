"""Protects the alphabet-sort environment: its written rules, its tasks, its expert, and that no
reply cheats it.

Expected scores come from a second implementation of the rules, written differently (it reads the
names from the user's messages, finds blocks by a pattern, sorts by insertion), and from examples by
hand.
"""

import math
import random
import re
from collections import Counter
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

import pytest

from env_alphabet import (
    FIRST,
    HABITS,
    LAST,
    STYLES,
    Alphabet,
    Task,
    key_of,
    right_list,
    write_reply,
)

ROOT = Path(__file__).resolve().parent.parent
TAGS = ("alphabetical_sorted", "combined_alphabetical_sorted")  # of the first turn, of later ones
MARK = " // new name!"
ONE, TWO, THREE = ("AnnBo", "CyDe"), ("EvFo",), ("GigHu",)  # by first name already in order
SMALL = Task("first", (ONE, TWO, THREE))


def make_env(turns=(3, 3), names=(1, 4), power=8.0, per_turn=False, think=True, style="derives"):
    return Alphabet(*turns, *names, power, per_turn, think, style)


def play(task: Task, replies: list[str], power=1.0, per_turn=False, think=True) -> dict:
    """Score replies to a task of our own."""
    env = make_env(power=power, per_turn=per_turn, think=think)
    env.reset(0)
    env.task = task
    for n, reply in enumerate(replies):
        assert env.step(reply)[1] == (n + 1 == len(task.turns))
    return env.score()


def block(*lines: str, turn: int = 0) -> str:
    return "\n".join([f"<{TAGS[turn > 0]}>", *lines, f"</{TAGS[turn > 0]}>"])


# ------------------------------------------------------------------------ a second implementation


def parts_of(name: str) -> tuple[str, str]:
    """(first, last): a name is cut before its first capital, the very first letter not counted."""
    return re.fullmatch("(.?[^A-Z]*)(.*)", name).groups()


def asked(message: str) -> tuple[int, list[str]]:
    """(0 for first names or 1 for last names, the names given), read from what the user says."""
    head, *names = message.split("\n\n")[0].split("\n")
    return ("first", "last").index(head.split()[-2]), names


def expected_lists(messages: list[str]) -> list[list[str]]:
    """The right lines of every turn, by insertion."""
    answers, ordered = [], []
    for turn, message in enumerate(messages):
        which, names = asked(message)
        key = lambda name, which=which: parts_of(name)[which].lower()
        for name in names:
            ordered.insert(sum(key(other) < key(name) for other in ordered), name)
        answers.append([name + MARK * (turn > 0 and name in names) for name in ordered])
    return answers


def blocks_of(reply: str, tag: str) -> list[str]:
    """What stands between an opening tag and the next closing one, behind the last </think>."""
    answer = reply.split("</think>")[-1]
    ended = "<think>" not in answer and len(answer) <= 20_000
    return re.findall(f"(?s)<{tag}>(.*?)</{tag}>", answer) if ended else []


def difflib_ratio(a: list[str], b: list[str]) -> float:
    said, wanted = ("\n".join(line.strip().lower() for line in lines) for lines in (a, b))
    return SequenceMatcher(None, said, wanted).ratio()


def by_the_rules(messages: list[str], turns: int, replies: list[str], power, per_turn) -> dict:
    raw, blocks = [0.0] * turns, 0
    for turn, (reply, right) in enumerate(zip(replies, expected_lists(messages))):
        bodies = blocks_of(reply, TAGS[min(turn, 1)])
        lists = [[line for line in body.split("\n") if line.strip()] for body in bodies]
        values = [difflib_ratio(lines, right) if lines else 0.0 for lines in lists]
        if values and all(a < b for a, b in pairwise(values)):
            raw[turn] = values[-1]
        blocks += bool(values)
    mean = math.fsum(raw) / turns
    marks = {
        "reward": math.fsum(x**power for x in raw) / turns if per_turn else mean**power,
        "similarity": mean,
        "exact": float(raw.count(1.0) == turns),
        "format": blocks / turns,
    }
    return marks | {f"turn_{n}": value for n, value in enumerate(raw, 1)}


def check(env: Alphabet, messages: list[str], replies: list[str]) -> dict:
    """The marks are those of the rules, and what they must be in any case."""
    marks, n = env.score(), len(env.task.turns)
    wanted = by_the_rules(messages, n, replies, env.similarity_power, env.power_per_turn)
    habits = {f"habit_{name}" for name in HABITS}
    assert set(marks) == set(wanted) | habits and sum(marks[name] for name in habits) == 1.0
    for name, value in wanted.items():
        assert marks[name] == pytest.approx(value, abs=1e-12), (name, messages, replies)
    assert all(0.0 <= value <= 1.0 for value in marks.values())
    assert (marks["exact"] == 1.0) == (marks["reward"] == 1.0)
    return marks


# ----------------------------------------------------------------------------- generated replies

MISTAKES = [  # (the right lines, two places) -> other lines
    lambda lines, i, j: [*lines[:i], *lines[i + 1 :]],
    lambda lines, i, j: [*lines[:j], lines[i], *lines[j:]],
    lambda lines, i, j: [*lines[:i], lines[i] + MARK, *lines[i + 1 :]],
    lambda lines, i, j: [*lines[:i], "- " + lines[i], *lines[i + 1 :]],
    lambda lines, i, j: [*lines[:i], lines[i].replace("a", "\u0130"), *lines[i + 1 :]],
    lambda lines, i, j: [line.removesuffix(MARK) for line in lines],
    lambda lines, i, j: [*lines, "WeiKwon"],
    lambda lines, i, j: sorted(lines),
    lambda lines, i, j: lines[i:] + lines[:i],
]
LAYOUTS = [  # of the lines of a block; most do not matter
    "\n".join,
    lambda lines: "\n" + "\n".join(lines) + "\n",
    lambda lines: "\n".join(lines).upper(),
    lambda lines: "\r\n\n".join(f"\t{line} " for line in lines),
    lambda lines: "\u2028 \n\u3000".join(lines),
    lambda lines: ", ".join(lines),
    lambda lines: "\n".join(lines)[:-3],
    lambda lines: "<think/>\x00\ud800".join(lines),
    lambda lines: "",
]
WAYS = [  # (a good block, another, its tag) -> reply
    lambda good, other, tag: good,
    lambda good, other, tag: other,
    lambda good, other, tag: other + "\n" + good,
    lambda good, other, tag: good + other,
    lambda good, other, tag: f"<{tag}> </{tag}>" + other + good,
    lambda good, other, tag: f"<think>\n{other}\n</think>\n{good}",
    lambda good, other, tag: f"<think>{good}</think>{other}",
    lambda good, other, tag: f"<think>{good}",
    lambda good, other, tag: f"{good}<think>b",
    lambda good, other, tag: f"{good}</think>{other}",
    lambda good, other, tag: good.upper(),
    lambda good, other, tag: good[: len(good) * 2 // 3],
    lambda good, other, tag: f"</{tag}><{tag}>" + good,
    lambda good, other, tag: good.replace("combined_", ""),
    lambda good, other, tag: "",
]


def test_replies_are_scored_as_the_rules_say():
    rng, seen = random.Random(0), Counter()
    for _ in range(400):
        power, per_turn = rng.choice([1.0, 2.5, 8.0]), rng.random() < 0.5
        env = make_env((1, 4), rng.choice([(1, 2), (1, 8)]), power, per_turn)
        messages, done, said = [env.reset(rng.randrange(10**9))[0]["content"]], False, []
        honest = rng.random() < 0.2
        while not done and rng.random() < 0.95:
            right, tag = expected_lists(messages)[-1], TAGS[len(said) > 0]
            wrong = rng.choice(MISTAKES)(right, *rng.choices(range(len(right)), k=2))
            good, other = (
                f"<{tag}>{rng.choice(LAYOUTS)(lines)}</{tag}>" for lines in (right, wrong)
            )
            reply = rng.choice(WAYS)(good, other, tag)
            said.append(env.expert_reply() if honest else reply)
            new, done = env.step(said[-1])
            messages += [message["content"] for message in new]
        marks = check(env, messages, said)
        seen["perfect"] += marks["exact"] == 1.0
        seen["unplayed"] += len(said) < len(env.task.turns)
        seen["between"] += 0.0 < marks["turn_1"] < 1.0
        seen["several blocks"] += len(said) and len(blocks_of(said[0], TAGS[0])) > 1
        seen["long"] += len("".join(expected_lists(messages)[-1])) >= 200
    assert len(seen) == 5 and min(seen.values()) > 15, seen


# ------------------------------------------------------------------------ rules worked out by hand


@pytest.mark.parametrize(
    "name, first, last",
    [
        ("EnginDurgun", "Engin", "Durgun"),
        ("VanDeBerg", "Van", "DeBerg"),
        ("ABc", "A", "Bc"),
        ("mariaSilva", "maria", "Silva"),
        ("Maria", "Maria", ""),
        ("", "", ""),
    ],
)
def test_the_last_name_starts_at_the_first_capital_after_position_0(name, first, last):
    assert (key_of(name, "first"), key_of(name, "last")) == parts_of(name) == (first, last)


def test_only_the_names_of_the_turn_are_marked():
    by_last = Task("last", (("ZoeAbe", "AnaZola"), ("MiaLee",)))
    assert right_list(by_last, 1) == ["ZoeAbe", "MiaLee // new name!", "AnaZola"]
    assert right_list(SMALL, 2) == ["AnnBo", "CyDe", "EvFo", "GigHu" + MARK]
    # "annbo\ncyde\nevfo" has 15 letters, the mark 13 more: 2 * 15 / (15 + 28)
    said = [block("AnnBo", "CyDe"), block("AnnBo", "CyDe", "EvFo", turn=1)]
    assert play(SMALL, said)["turn_2"] == 30 / 43


# "cyde\nannbo" against "annbo\ncyde": the longest common piece is "annbo": 2 * 5 / (10 + 10)
HALF, RIGHT, EMPTY = block("CyDe", "AnnBo"), block("AnnBo", "CyDe"), block()


@pytest.mark.parametrize(
    "power, per_turn, reward",
    [
        (1, True, 0.75),
        (2, True, 0.625),  # (0.25 + 1) / 2
        (2, False, 0.5625),  # 0.75 squared
        (3, True, 0.5625),  # (0.125 + 1) / 2
        (3, False, 0.421875),  # 27 / 64
    ],
)
def test_both_ways_to_raise_to_the_power(power, per_turn, reward):
    right = block("AnnBo", "CyDe", "EvFo" + MARK, turn=1)
    marks = play(Task("first", (ONE, TWO)), [HALF, right], power, per_turn)
    told = [marks[name] for name in ("reward", "turn_1", "turn_2", "similarity", "exact", "format")]
    assert told == [reward, 0.5, 1.0, 0.75, 0.0, 1.0]


@pytest.mark.parametrize(
    "reply, score",
    [
        (RIGHT, 1.0),
        (HALF, 0.5),
        (HALF + RIGHT, 1.0),
        (EMPTY + HALF + RIGHT, 1.0),
        (RIGHT + RIGHT, 0.0),
        (RIGHT + HALF, 0.0),
        (RIGHT + EMPTY, 0.0),
        (HALF + HALF + RIGHT, 0.0),
        (HALF + RIGHT + HALF, 0.0),
        (HALF + RIGHT + "<alphabetical_sorted>\nCyDe", 1.0),  # the third is not closed: none
        (f"<think>{RIGHT}{HALF}</think>{RIGHT}", 1.0),  # thoughts are no attempts
        ("<think>" + "x" * 1_000_000 + f"</think>{RIGHT}", 1.0),
        (f"<think>{RIGHT}</think>", 0.0),
        (f"<think>{RIGHT}", 0.0),
        (f"{RIGHT}<think>", 0.0),
        (f"so:\n{RIGHT}\nthat is all", 1.0),
        (RIGHT + " " * 20_000, 0.0),  # longer than any list
        (block("AnnBo", "x" * 520), 0.0),  # no list is so much longer than the right one
        ("AnnBo\nCyDe", 0.0),
        ("", 0.0),
        (block("annbo", "CYDE"), 1.0),
        (block("", "  AnnBo\t", "", "\r", "CyDe\r", ""), 1.0),
        (block("AnnBo", "CyDe", turn=1), 0.0),  # the tag of later turns
        (RIGHT.upper(), 0.0),
    ],
)
def test_scores_of_one_turn_by_hand(reply, score):
    marks = play(Task("first", (ONE,)), [reply])
    assert marks["reward"] == marks["turn_1"] == score


@pytest.mark.parametrize(
    "reply, score",
    [
        (f"\n{RIGHT}\n", 1.0),
        (f"<think></think>{RIGHT}", 0.0),
        (f"A before C {RIGHT}", 0.0),
        (HALF + RIGHT, 0.0),
        (block("AnnBo" + " " * 8, "CyDe"), 0.0),  # white space can hold thoughts
    ],
)
def test_where_thinking_is_not_allowed_only_a_block_counts(reply, score):
    assert play(Task("first", (ONE,)), [reply], think=False)["reward"] == score


# ------------------------------------------------------------------------------------- the tasks


def tasks(n: int, turns=(1, 3), names=(1, 5)) -> list[Task]:
    env = make_env(turns, names)
    return [env.reset(seed) and env.task for seed in range(n)]


@pytest.mark.parametrize("pool", [FIRST, LAST])
def test_a_key_of_three_letters_tells_the_names_of_a_pool_apart(pool):
    assert all(re.fullmatch("[A-Z][a-z]{2,}", name) for name in pool) and len(pool) > 200
    assert max(Counter(name[:3] for name in pool).values()) == 1
    assert max(Counter(name[:2] for name in pool).values()) == 2


@pytest.mark.parametrize(
    "turns, names", [((1, 3), (1, 5)), ((3, 3), (1, 4)), ((1, 1), (1, 1)), ((3, 3), (70, 73))]
)
def test_counts_are_drawn_evenly_within_the_settings_and_names_are_disjoint(turns, names):
    drawn = tasks(300, turns, names)
    rounds = Counter(len(task.turns) for task in drawn)
    sizes = Counter(len(part) for task in drawn for part in task.turns)
    for counts, (low, high) in ((rounds, turns), (sizes, names)):
        total, share = sum(counts.values()), 1 / (high - low + 1)
        assert set(counts) == set(range(low, high + 1))
        assert all(abs(n / total - share) < 5 * (share / total) ** 0.5 for n in counts.values())
    for task in drawn:
        firsts, lasts = zip(*(parts_of(name) for part in task.turns for name in part))
        assert len(set(firsts)) == len(set(lasts)) == len(firsts)
        assert set(firsts) <= set(FIRST) and set(lasts) <= set(LAST)


def test_half_of_the_episodes_sort_by_first_name_and_names_come_in_no_order():
    drawn = tasks(2000, (1, 1), (4, 4))
    assert abs(sum(task.by == "first" for task in drawn) - 1000) < 4 * 500**0.5
    in_order = sum(list(task.turns[0]) == right_list(task, 0) for task in drawn)
    assert abs(in_order - 2000 / 24) < 4 * (2000 / 24) ** 0.5  # one order of 24


@pytest.mark.parametrize("think", [True, False])
def test_the_user_says_all_that_is_needed(think):
    env = make_env((3, 3), (2, 3), think=think)
    messages = env.reset(1) + env.step("x")[0] + env.step("y")[0]
    assert env.step("z") == ([], True)
    for turn, message in enumerate(messages):
        text = message["content"]
        assert asked(text) == (env.task.by == "last", list(env.task.turns[turn]))
        assert ("<think>" in text) == think and (MARK in text) == (turn == 1)
        shown = [f"<{tag}>" in text and f"</{tag}>" in text for tag in TAGS]
        assert shown == [turn == 0, turn == 1]  # each format is shown once


# ------------------------------------------------------------------------------------ the expert


@pytest.mark.parametrize("think", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_the_expert_scores_exactly_1(style, think):
    ranges = [((1, 3), (1, 5)), ((3, 3), (1, 4)), ((5, 5), (7, 9)), ((1, 1), (30, 40))]
    for seed in range(40):
        power, per_turn = ((8.0, False), (4.0, True), (0.3, seed % 2 == 0))[seed % 3]
        env, done = make_env(*ranges[seed % 4], power, per_turn, think, style), False
        env.reset(seed)
        while not done:
            done = env.step(env.expert_reply())[1]
        marks = env.score()
        assert all(value == 1.0 for name, value in marks.items() if "habit" not in name)
        assert (marks["habit_derives"] == 1.0) == (style == "derives" and think)
        assert all(("<think>" in said) == (think and style != "bare") for said in env.replies)


def test_the_deriving_expert_cuts_out_the_keys_and_sorts_by_them():
    task = Task("last", (("MariaSilva", "EnginDurgun"), ("ChenWei",)))
    assert write_reply(task, 0, "derives") == (
        "<think>\nSil MariaSilva\nDur EnginDurgun\n\nDur EnginDurgun\nSil MariaSilva\n</think>\n"
        "<alphabetical_sorted>\nEnginDurgun\nMariaSilva\n</alphabetical_sorted>"
    )
    assert write_reply(task, 1, "derives") == (
        "<think>\nWei ChenWei\n\nDur EnginDurgun\nSil MariaSilva\nWei ChenWei\n</think>\n"
        "<combined_alphabetical_sorted>\nEnginDurgun\nMariaSilva\nChenWei // new name!\n"
        "</combined_alphabetical_sorted>"
    )


GIVEN, STRING = ("MiaVogel", "AnaZola", "ZoeAbe"), ("AnaZola", "MiaVogel", "ZoeAbe")
SORTED = ("ZoeAbe", "MiaVogel", "AnaZola")
KEYS = "<think>\nVog MiaVogel\nZol AnaZola\nAbe ZoeAbe\n</think>"


@pytest.mark.parametrize(
    "replies, habit",
    [
        ([block(*GIVEN)], "given"),
        ([block(*STRING)], "string"),
        ([block(*SORTED)], "other"),
        ([block(*(f"  {name} " for name in GIVEN))], "given"),  # blanks are no habit
        ([f"<think>let me sort</think>{block(*STRING)}"], "string"),
        ([f"{KEYS}{block(*SORTED)}"], "derives"),
        ([f"{KEYS}{block(*GIVEN)}"], "derives"),
        ([f"<think>\nVog MiaVogel\n</think>{block(*GIVEN)}"], "given"),  # one key for three names
        ([f"{KEYS}nothing"], "other"),
        ([KEYS[:-8] + block(*GIVEN)], "other"),  # thoughts that never end hold no list
        ([], "other"),
        ([block(*GIVEN), "nothing"], "given"),
        ([block(*GIVEN), block(*STRING, "BorisCruz", turn=1)], "other"),
        ([block(*STRING), block(*GIVEN, "BorisCruz" + MARK, turn=1)], "given"),
        ([block(*GIVEN), block(*STRING)], "given"),  # the wrong tag is no list
        ([block(*SORTED) + block(*GIVEN)], "given"),  # the last of several
    ],
)
def test_habit_is_read_from_the_last_list(replies, habit):
    marks = play(Task("last", (GIVEN, ("BorisCruz",))), replies)
    assert {name for name in HABITS if marks[f"habit_{name}"] == 1.0} == {habit}


# -------------------------------------------------------------------------- arguments and script


@pytest.mark.parametrize(
    "flag, settings",
    [
        ("--set min_turns=", dict(turns=(0, 3))),
        ("--set min_turns=", dict(turns=(3, 2))),
        ("min_names=", dict(names=(0, 3))),
        ("min_names=", dict(names=(5, 4))),
        ("max_names=", dict(turns=(3, 3), names=(1, 74))),
        ("--set similarity_power=", dict(power=0.0)),
        ("--set similarity_power=", dict(power=math.nan)),
        ("--sft-style", dict(style="cot")),
    ],
)
def test_a_wrong_argument_is_refused_in_one_sentence_that_names_the_flag(flag, settings):
    with pytest.raises(ValueError) as caught:
        make_env(**settings)
    assert flag in str(caught.value) and re.fullmatch("--[^\n]*", str(caught.value))
