"""Protects the alphabet-sort environment: its written rules, its tasks, its expert, and that no
reply cheats it. Expected scores are worked out by hand, or by a second scorer, written differently.
"""

import hashlib
import random
import re
from collections import Counter
from difflib import SequenceMatcher
from statistics import fmean

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

TAGS = ("alphabetical_sorted", "combined_alphabetical_sorted")  # of the first turn, of later ones
MARK = " // new name!"
ONE, TWO = ("AnnBo", "CyDe"), ("EvFo",)  # by first name already in order


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


def parts_of(name: str) -> tuple[str, str]:
    """(first, last): a name is cut before its first capital, the very first letter not counted."""
    return re.fullmatch("(.?[^A-Z]*)(.*)", name).groups()


def asked(message: str) -> tuple[int, list[str]]:
    """(0 for first names or 1 for last names, the names given), read from what the user says."""
    head, *names = message.split("\n\n")[0].split("\n")
    return ("first", "last").index(head.split()[-2]), names


# ------------------------------------------------------------------------------- a second scorer


def by_the_rules(asks: list[dict], reply: str) -> float:
    """What a turn's reply scores, by what the user has said until then."""
    told = [asked(ask["content"]) for ask in asks]
    names, tag = [name for _, new in told for name in new], TAGS[len(told) > 1]
    ordered = sorted(names, key=lambda name: parts_of(name)[told[0][0]].lower())
    marked = [name + MARK * (len(told) > 1 and name in told[-1][1]) for name in ordered]
    answer = reply.split("</think>")[-1]
    blocks = re.findall(f"(?s)<{tag}>(.*?)</{tag}>", answer) if "<think>" not in answer else []
    texts = ["\n".join(filter(None, map(str.strip, b.lower().split("\n")))) for b in blocks]
    scores = [SequenceMatcher(None, text, "\n".join(marked).lower()).ratio() for text in texts]
    return scores[-1] if scores and scores == sorted(set(scores)) else 0.0


MISTAKES = [  # in the right lines; the first is none
    lambda lines: "\r\n\n".join(f"\t{line} " for line in lines).upper(),
    lambda lines: "\n".join(lines[1:] + lines[:1]),
    lambda lines: "\n".join(sorted(lines)),
    lambda lines: "\n".join(line.removesuffix(MARK) for line in lines),
    lambda lines: "\n".join(line.replace("a", "\u0130") + MARK for line in lines),
    lambda lines: "\u2028 \n\u3000".join(lines)[:-3] + "\x00\ud800",
    lambda lines: ", ".join([*lines, "WeiKwon"]),
    lambda lines: "",
]


def test_replies_are_scored_as_the_rules_say():
    rng = random.Random(0)
    for seed, power in enumerate([1.0, 2.5, 8.0] * 134):
        env = make_env((1, 4), (1, 8), power, per_turn=seed % 2 == 0)
        asks, raw = env.reset(seed), []
        for turn in range(min(len(env.task.turns), rng.randint(0, 9))):
            lines, tag = right_list(env.task, turn), TAGS[turn > 0]
            blocks = [f"<{tag}>{write(lines)}</{tag}>" for write in MISTAKES[:1] * 5 + MISTAKES]
            pieces = [*blocks, "<think>", "</think>", "so: ", f"<{tag}>", f"</{tag}>"]
            reply = "".join(rng.choices(pieces, k=rng.choice([1, 1, 2, 3])))
            raw.append(by_the_rules(asks, reply))
            asks = asks + env.step(reply)[0]
        raw += [0.0] * (len(env.task.turns) - len(raw))  # not played
        reward = fmean(x**power for x in raw) if env.power_per_turn else fmean(raw) ** power
        marks = [value for name, value in env.score().items() if re.match("reward|turn_", name)]
        assert marks == pytest.approx([reward, *raw], abs=1e-12), (asks, reply)


def test_credit_per_turn_adds_up_to_the_reward():
    env = Alphabet(power_per_turn=True, credit_per_turn=True, style="bare")
    env.reset(0)
    env.step(env.expert_reply())
    env.step("no list")
    assert env.score()["turn_rewards"] == [pytest.approx(1 / 3), 0.0]  # one per reply, so far
    env.step(env.expert_reply())
    marks = env.score()
    assert marks["turn_rewards"] == pytest.approx([1 / 3, 0.0, 1 / 3])
    assert sum(marks["turn_rewards"]) == pytest.approx(marks["reward"])


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
        (block("AnnBo", "x" * 514), 12 / 530),  # 520 letters, twice the right 10 and 500 more …
        (block("AnnBo", "x" * 515), 0.0),  # … but no list is longer
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


@pytest.mark.parametrize("pool", [FIRST, LAST])
def test_a_key_of_three_letters_tells_the_names_of_a_pool_apart(pool):
    assert all(re.fullmatch("[A-Z][a-z]{2,}", name) for name in pool) and len(pool) > 200
    assert max(Counter(name[:3] for name in pool).values()) == 1
    assert max(Counter(name[:2] for name in pool).values()) == 2


@pytest.mark.parametrize("turns, names", [((1, 3), (1, 5)), ((3, 3), (1, 4)), ((3, 3), (70, 73))])
def test_counts_are_within_the_settings_and_no_name_comes_twice(turns, names):
    env, rounds, sizes = make_env(turns, names), set(), set()
    for seed in range(100):
        env.reset(seed)
        rounds.add(len(env.task.turns))
        sizes |= set(map(len, env.task.turns))
        firsts, lasts = zip(*(parts_of(name) for part in env.task.turns for name in part))
        assert len(set(firsts)) == len(set(lasts)) == len(firsts)
        assert set(firsts) <= set(FIRST) and set(lasts) <= set(LAST)
    assert [(min(counts), max(counts)) for counts in (rounds, sizes)] == [turns, names]


def test_the_tasks_stay_what_they_are():
    """Whoever changes them changes every number that was measured."""
    env = make_env()
    drawn = repr([env.reset(seed) and env.task for seed in range(200)])
    assert hashlib.sha256(drawn.encode()).hexdigest()[:12] == "d312b6a3e721"


@pytest.mark.parametrize("think", [True, False])
def test_the_user_says_all_that_is_needed(think):
    env = make_env((3, 3), (2, 3), think=think)
    messages = env.reset(1) + env.step("x")[0] + env.step("y")[0]
    assert env.step("z") == ([], True)
    for turn, message in enumerate(messages):
        text = message["content"]
        assert asked(text) == (env.task.by == "last", list(env.task.turns[turn]))
        assert ("<think>" in text) == think and (MARK in text) == (turn == 1)
        # each format is shown once
        assert [f"<{t}>" in text and f"</{t}>" in text for t in TAGS] == [turn == 0, turn == 1]


# ------------------------------------------------------------------------------------ the expert


@pytest.mark.parametrize("think", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_the_expert_scores_exactly_1(style, think):
    for seed, names in enumerate([(1, 4), (30, 40)] * 20):
        env, done = make_env((1, 5), names, 4.0, seed % 3 == 0, think, style), False
        env.reset(seed)
        while not done:
            done = env.step(env.expert_reply())[1]
        marks = env.score()
        assert all(value == 1.0 for name, value in marks.items() if "habit" not in name)
        assert (marks["habit_keys"] == 1.0) == (style == "derives" and think)
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
        ([f"{KEYS}{block(*SORTED)}"], "keys"),
        ([f"{KEYS}{block(*GIVEN)}"], "keys"),
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
