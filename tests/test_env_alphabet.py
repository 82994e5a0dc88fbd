"""Protects the alphabet-sort environment: its written rules, its tasks, its expert, and that no reply can cheat or break it.

The scores expected here come from a second implementation of the rules, written differently (it reads the names from the
user's messages, walks for blocks instead of matching a pattern, sorts by insertion), and from examples worked out by hand.
"""

import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from env_alphabet import FIRST, HABITS, LAST, STYLES, Alphabet, Task, habit_of, key_of, right_list, score_turn, similarity, write_reply

ROOT = Path(__file__).resolve().parent.parent
TAGS = ("alphabetical_sorted", "combined_alphabetical_sorted")  # of the first turn, of every later one
MARK = " // new name!"
ONE, TWO, THREE = ("AnnBo", "CyDe"), ("EvFo",), ("GigHu",)  # by first name already in order
SMALL = Task("first", (ONE, TWO, THREE))


def make_env(turns=(3, 3), names=(1, 4), power=8.0, per_turn=False, think=True, style="derives") -> Alphabet:
    return Alphabet(*turns, *names, power, per_turn, think, style)


def play(task: Task, replies: list[str], power: float = 1.0, per_turn: bool = False) -> dict[str, float]:
    """Score replies to a task of our own."""
    env = make_env(power=power, per_turn=per_turn)
    env.reset(0)
    env.task = task
    for n, reply in enumerate(replies):
        assert env.step(reply)[1] == (n + 1 == len(task.turns))
    return env.score()


def block(*lines: str, turn: int = 0) -> str:
    return "\n".join([f"<{TAGS[turn > 0]}>", *lines, f"</{TAGS[turn > 0]}>"])


# ------------------------------------------------------------------------------------------------ a second implementation


def parts_of(name: str) -> tuple[str, str]:
    """(first, last): a name is cut before its first capital, the very first letter not counted."""
    first, last = name[:1], ""
    for c in name[1:]:
        if last or "A" <= c <= "Z":
            last += c
        else:
            first += c
    return first, last


def asked(message: str) -> tuple[int, list[str]]:
    """(0 for first names or 1 for last names, the names given), read from what the user says."""
    head, *names = message.split("\n\n")[0].split("\n")
    return {"first": 0, "last": 1}[head.split()[-2]], names


def expected_lists(messages: list[str]) -> list[list[str]]:
    """The right lines of every turn, by insertion."""
    answers, ordered = [], []
    for turn, message in enumerate(messages):
        which, names = asked(message)
        for name in names:
            key = parts_of(name)[which].lower()
            place = sum(parts_of(other)[which].lower() < key for other in ordered)
            ordered.insert(place, name)
        answers.append([name + (MARK if turn > 0 and name in names else "") for name in ordered])
    return answers


def blocks_of(reply: str, tag: str) -> list[str]:
    """What stands between each opening tag and the closing one after it, behind the last </think>."""
    answer = reply.split("</think>")[-1]
    found, at = [], 0
    if "<think>" in answer or len(answer) > 20_000:
        return []
    while True:
        start = answer.find(f"<{tag}>", at)
        end = answer.find(f"</{tag}>", start)
        if start < 0 or end < 0:
            return found
        found.append(answer[start + len(tag) + 2 : end])
        at = end + len(tag) + 3


def turn_similarity(reply: str, right: list[str], tag: str) -> tuple[float, bool]:
    """(raw similarity of a turn, was there a block?)"""
    wanted = "\n".join(line.lower() for line in right)
    values = []
    for body in blocks_of(reply, tag):
        said = "\n".join(filter(None, (line.strip().lower() for line in body.split("\n"))))
        values.append(SequenceMatcher(None, said, wanted).ratio() if said else 0.0)
    improving = all(a < b for a, b in pairwise(values))
    return (values[-1] if values and improving else 0.0), bool(values)


def by_the_rules(messages: list[str], turns: int, replies: list[str], power: float, per_turn: bool) -> dict[str, float]:
    raw, blocks = [0.0] * turns, 0
    for turn, (reply, right) in enumerate(zip(replies, expected_lists(messages))):
        raw[turn], found = turn_similarity(reply, right, TAGS[min(turn, 1)])
        blocks += found
    mean = math.fsum(raw) / turns
    reward = math.fsum(value**power for value in raw) / turns if per_turn else mean**power
    marks = {"reward": reward, "similarity": mean, "exact": float(raw.count(1.0) == turns), "format": blocks / turns}
    return marks | {f"turn_{n}": value for n, value in enumerate(raw, 1)}


def ratcliff_obershelp(a: str, b: str) -> float:
    """2 * matches / (len(a) + len(b)): take the longest common piece, then the same left and right of it. As difflib says: of several
    longest, the first in a, then the first in b; from 200 letters b on, letters that make up more than 1% of it (plus one) start no
    match, though one found without them is lengthened by them."""
    popular = {c for c, n in Counter(b).items() if len(b) >= 200 and n > len(b) // 100 + 1}

    def matches(a: str, b: str) -> int:
        if not a or not b:
            return 0
        size, i, j = 0, 0, 0
        above = [0] * (len(b) + 1)  # above[y]: length of the common piece that ends just before a[x], b[y]
        for x, c in enumerate(a):
            row = [0] * (len(b) + 1)
            for y, d in enumerate(b):
                if c == d and d not in popular:
                    n = row[y + 1] = above[y] + 1
                    if (n, -(x - n), -(y - n)) > (size, -(i - 1), -(j - 1)):
                        size, i, j = n, x - n + 1, y - n + 1
            above = row
        while i and j and a[i - 1] == b[j - 1]:
            i, j, size = i - 1, j - 1, size + 1
        while i + size < len(a) and j + size < len(b) and a[i + size] == b[j + size]:
            size += 1
        return size and size + matches(a[:i], b[:j]) + matches(a[i + size :], b[j + size :])

    return 2 * matches(a, b) / (len(a) + len(b)) if a or b else 1.0


# ------------------------------------------------------------------------------------------------ generated replies


def spoil(rng: random.Random, lines: list[str]) -> list[str]:
    """One mistake in a list."""
    lines = list(lines) or ["x"]
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    mistake = rng.randrange(9)
    if mistake == 0:
        lines[i], lines[j] = lines[j], lines[i]
    elif mistake == 1:
        lines.insert(j, lines.pop(i))
    elif mistake == 2:
        del lines[i]
    elif mistake == 3:
        lines.insert(j, lines[i])
    elif mistake == 4:
        lines[i] = lines[i].removesuffix(MARK) if lines[i].endswith(MARK) else lines[i] + MARK
    elif mistake == 5:
        lines[i] = lines[i].replace(rng.choice(lines[i]), rng.choice("aexQ \u00e9\u0130"), 1)
    elif mistake == 6:
        lines.append(rng.choice(FIRST) + rng.choice(LAST))
    elif mistake == 7:
        lines = [line.removesuffix(MARK) for line in lines]
    else:
        lines[i] = rng.choice(["1. ", "- ", "* "]) + lines[i]
    return lines


def write(rng: random.Random, lines: list[str], tag: str) -> str:
    """A block, in one of the many ways to lay it out; most of them do not matter."""
    way = rng.randrange(12)
    if way == 0:
        lines = [rng.choice([str.lower, str.upper, str.swapcase])(line) for line in lines]
    elif way == 1:
        lines = [rng.choice(["", " ", "\t", "\u3000", "\u2028"]) + line + rng.choice(["", "  ", "\t", "\x0b", "\x85"]) for line in lines]
    elif way == 2:
        lines = [part for line in lines for part in (line, *[rng.choice(["", " ", "\t", "\r"])] * rng.randrange(3))]
    elif way == 3:
        lines = [line + "\r" for line in lines]
    body = "\n".join(lines)
    if way == 4:
        body = rng.choice([" ", ", ", "\r", "\t", "\x0b", "\u2028", "\x00"]).join(lines)
    elif way == 5:
        body = body[: rng.randrange(len(body) + 1)]
    elif way == 6:
        at = rng.randrange(len(body) + 1)
        body = body[:at] + rng.choice(["\x00", "\ud800", "\U0001f642", f"<{tag}>", "<think/>", "\n\n\n", "// new name!"]) + body[at:]
    edge = "\n" if way != 7 else ""
    return f"<{tag}>{edge}{body}{edge}</{tag}>"


def make_reply(rng: random.Random, given: list[str], right: list[str], turn: int) -> str:
    """A reply of one of some thirty kinds, from right to hopeless."""
    tag, other = (TAGS[1], TAGS[0]) if turn else TAGS
    shuffled = rng.sample(right, len(right))
    near, far = spoil(rng, right), spoil(rng, spoil(rng, shuffled))
    good, bad = write(rng, right, tag), write(rng, shuffled, tag)
    close, worse = write(rng, near, tag), write(rng, far, tag)
    kinds = [
        lambda: good,
        lambda: bad,
        lambda: close,
        lambda: worse,
        lambda: write(rng, given, tag),
        lambda: write(rng, sorted(given), tag),
        lambda: worse + "\n" + close,
        lambda: worse + close + good,
        lambda: good + rng.choice([good, close, worse, f"<{tag}></{tag}>"]),
        lambda: f"<{tag}>{rng.choice(['', ' ', chr(10) * 3])}</{tag}> and then {rng.choice([good, close, f'<{tag}></{tag}>'])}",
        lambda: "".join(rng.choice([good, bad, close, worse]) for _ in range(rng.randint(2, 4))),
        lambda: write(rng, right, other),
        lambda: write(rng, right, other) + close,
        lambda: good.upper(),
        lambda: good.replace(">", " >", 1),
        lambda: f"<think>\n{bad}\n</think>\n{good}",
        lambda: f"<think>\n{good}\n</think>\n{close}",
        lambda: f"<think>{good}</think>",
        lambda: f"<think>{good}",
        lambda: f"<think>a</think>{good}<think>b",
        lambda: f"{good}<think>b</think>",
        lambda: f"{good}</think>{close}",
        lambda: f"<think><think>a</think>{close}",
        lambda: good[: rng.randrange(len(good))],
        lambda: good[rng.randrange(len(good)) :],
        lambda: f"</{tag}>{good}",
        lambda: f"<{tag}>{good}</{tag}>",
        lambda: f"<{tag}>\n" * 3 + good,
        lambda: "\n".join(right),
        lambda: rng.choice(["", "no", "\x00", "\ud800", "<|im_end|>", f"<{tag}>", f"</{tag}>", "\n"]),
        lambda: "".join(chr(rng.choice([10, 13, 60, 62, *range(32, 127), 0x130, 0x1F642])) for _ in range(rng.randrange(200))),
        lambda: "".join(rng.choice([good, close, "<think>", "</think>", f"<{tag}>", f"</{tag}>", "\n", "a"]) for _ in range(5)),
    ]
    return rng.choice(kinds)()


def test_ten_thousand_replies_are_scored_as_the_rules_say():
    rng = random.Random(0)
    replies_seen, seen = 0, Counter()
    while replies_seen < 10_000:
        power, per_turn = rng.choice([1.0, 2.5, 4.0, 8.0]), rng.random() < 0.5
        env = make_env((1, 4), rng.choice([(1, 2), (1, 3), (1, 5)]), power, per_turn)
        messages, done, said = [env.reset(rng.randrange(10**9))[0]["content"]], False, []
        all_right = rng.random() < 0.2
        while not done and rng.random() < 0.95:
            right, given = expected_lists(messages)[-1], [name for message in messages for name in asked(message)[1]]
            reply = write_reply(env.task, len(said), rng.choice(list(STYLES))) if all_right else make_reply(rng, given, right, len(said))
            new, done = env.step(reply)
            messages += [message["content"] for message in new]
            said.append(reply)
        marks = env.score()
        wanted = by_the_rules(messages, len(env.task.turns), said, power, per_turn)
        assert {name for name in marks if "habit" not in name} == set(wanted)
        for name, value in wanted.items():
            assert marks[name] == pytest.approx(value, abs=1e-12), (name, messages, said)
        assert marks["exact"] == wanted["exact"] == float(marks["reward"] == 1.0)
        replies_seen += len(said)
        for turn, reply in enumerate(said):
            several = len(blocks_of(reply, TAGS[turn > 0])) > 1
            value = wanted[f"turn_{turn + 1}"]
            seen["several blocks, " + ("paid" if value else "not paid") if several else "one block or none"] += 1
            seen["right" if value == 1.0 else "nothing" if value == 0.0 else "between"] += 1
            seen["long"] += len("\n".join(expected_lists(messages)[turn])) >= 200
        seen["perfect episodes"] += wanted["exact"] == 1.0
        seen["unplayed turns"] += len(said) < len(env.task.turns)
    assert all(seen[what] > 300 for what in ("several blocks, paid", "several blocks, not paid", "right", "nothing", "between")), seen
    assert all(seen[what] > 100 for what in ("long", "perfect episodes", "unplayed turns")), seen


def test_similarity_is_difflib_s_with_autojunk():
    rng = random.Random(1)
    long_pairs = 0
    for n in range(300):
        names = [rng.choice(FIRST) + rng.choice(LAST) + rng.choice(["", MARK]) for _ in range(rng.randint(1, 5) if n else 14)]
        names += names[: 10 * (n % 30 == 0)] * 2
        said = rng.sample(names, len(names)) if rng.random() < 0.5 else spoil(rng, spoil(rng, names))
        a, b = ("\n".join(line.strip().lower() for line in lines) for lines in (said, names))
        assert similarity(said, names) == pytest.approx(ratcliff_obershelp(a, b), abs=1e-12)
        assert similarity(said, names) == SequenceMatcher(None, a, b).ratio()
        long_pairs += len(b) >= 200
    assert long_pairs >= 5  # premise: autojunk is at work too


def test_similarity_of_dense_texts():
    """Few letters in any order: many longest pieces, where the choice among them matters, below and above 200 letters."""
    rng = random.Random(2)
    for _ in range(400):
        letters = rng.choice(["ab", "abc", "abcdefgh", "aB\x00"])
        length = rng.choice([3, 20, 50, 199, 200, 201])
        b = "".join(rng.choice(letters) for _ in range(length))
        if length >= 199:  # rare letters, or nothing could start a match
            b = b[:-3] + "xyz"
        a = b[rng.randrange(length) :] + "".join(rng.choice(letters + "xz") for _ in range(rng.randrange(60)))
        assert similarity([a], [b]) == SequenceMatcher(None, a.lower(), b.lower()).ratio()
        if length <= 50:
            assert similarity([a], [b]) == pytest.approx(ratcliff_obershelp(a.lower(), b.lower()), abs=1e-12)


# ------------------------------------------------------------------------------------------------ rules worked out by hand


def test_the_last_name_starts_at_the_first_capital_after_position_0():
    for name, first, last in [
        ("EnginDurgun", "Engin", "Durgun"),
        ("VanDeBerg", "Van", "DeBerg"),
        ("ABc", "A", "Bc"),
        ("mariaSilva", "maria", "Silva"),
        ("Maria", "Maria", ""),
        ("", "", ""),
    ]:
        assert (key_of(name, "first"), key_of(name, "last")) == parts_of(name) == (first, last)


def test_only_the_names_of_the_turn_are_marked():
    assert right_list(SMALL, 0) == ["AnnBo", "CyDe"]
    assert right_list(SMALL, 1) == ["AnnBo", "CyDe", "EvFo // new name!"]
    assert right_list(SMALL, 2) == ["AnnBo", "CyDe", "EvFo", "GigHu // new name!"]
    by_last = Task("last", (("ZoeAbe", "AnaZola"), ("MiaLee",)))
    assert right_list(by_last, 1) == ["ZoeAbe", "MiaLee // new name!", "AnaZola"]
    right = [block(*right_list(SMALL, turn), turn=turn) for turn in range(3)]
    assert play(SMALL, right)["reward"] == 1.0
    still_marked = block("AnnBo", "CyDe", "EvFo // new name!", "GigHu // new name!", turn=2)
    unmarked = block("AnnBo", "CyDe", "EvFo", "GigHu", turn=2)
    all_marked = block(*(name + MARK for name in ("AnnBo", "CyDe", "EvFo", "GigHu")), turn=2)
    for wrong in (still_marked, unmarked, all_marked):
        marks = play(SMALL, [*right[:2], wrong])
        assert marks["turn_1"] == marks["turn_2"] == 1.0 and 0 < marks["turn_3"] < 1 and marks["exact"] == 0.0
    # "annbo\ncyde\nevfo" has 15 letters, the mark 13 more: 2 * 15 / (15 + 28)
    assert play(SMALL, [right[0], block("AnnBo", "CyDe", "EvFo", turn=1), right[2]])["turn_2"] == 30 / 43


def test_both_ways_to_raise_to_the_power():
    # "cyde\nannbo" against "annbo\ncyde": the longest common piece is "annbo", nothing is left on either side: 2 * 5 / (10 + 10).
    half, right = block("CyDe", "AnnBo"), block("AnnBo", "CyDe", "EvFo // new name!", turn=1)
    task = Task("first", (ONE, TWO))
    assert play(task, [half, right], power=1, per_turn=True)["reward"] == 0.75
    assert play(task, [half, right], power=2, per_turn=True)["reward"] == 0.625  # (0.25 + 1) / 2
    assert play(task, [half, right], power=2, per_turn=False)["reward"] == 0.5625  # 0.75 squared
    assert play(task, [half, right], power=3, per_turn=True)["reward"] == 0.5625  # (0.125 + 1) / 2
    assert play(task, [half, right], power=3, per_turn=False)["reward"] == 0.421875  # 27 / 64
    for per_turn in (True, False):
        marks = play(task, [half, right], power=3, per_turn=per_turn)
        assert (marks["turn_1"], marks["turn_2"], marks["similarity"], marks["exact"], marks["format"]) == (0.5, 1.0, 0.75, 0.0, 1.0)


def test_a_turn_that_was_not_played_scores_0():
    right = [block(*right_list(SMALL, turn), turn=turn) for turn in range(3)]
    for played, per_turn, averaged in [(0, 0, 0), (1, 1 / 3, 1 / 9), (2, 2 / 3, 4 / 9), (3, 1, 1)]:
        for reward, flag in ((per_turn, True), (averaged, False)):
            marks = play(SMALL, right[:played], power=2, per_turn=flag)
            assert marks["reward"] == pytest.approx(reward, abs=1e-15) and marks["format"] == marks["similarity"] == played / 3
            assert [marks[f"turn_{n}"] for n in (1, 2, 3)] == [1.0] * played + [0.0] * (3 - played)


HALF, RIGHT, EMPTY = block("CyDe", "AnnBo"), block("AnnBo", "CyDe"), block()


@pytest.mark.parametrize(
    "reply, score",
    [
        (RIGHT, 1.0),
        (HALF, 0.5),
        (HALF + RIGHT, 1.0),
        (EMPTY + HALF + RIGHT, 1.0),
        (block("x") + HALF, 0.5),
        (RIGHT + RIGHT, 0.0),
        (HALF + HALF, 0.0),
        (RIGHT + HALF, 0.0),
        (RIGHT + EMPTY, 0.0),
        (EMPTY + EMPTY, 0.0),
        (HALF + HALF + RIGHT, 0.0),
        (HALF + EMPTY + RIGHT, 0.0),
        (HALF + RIGHT + HALF, 0.0),
        (HALF + RIGHT + "<alphabetical_sorted>\nCyDe", 1.0),  # the third is not closed, so it is none
        (f"<think>{RIGHT}{HALF}</think>{RIGHT}", 1.0),  # thoughts are no attempts
        (f"<think>{RIGHT}</think>", 0.0),
        (f"<think>{RIGHT}", 0.0),
        (f"{RIGHT}<think>", 0.0),
        (f"so:\n{RIGHT}\nthat is all", 1.0),
        ("AnnBo\nCyDe", 0.0),
        ("", 0.0),
        (block("annbo", "CYDE"), 1.0),
        (block("", "  AnnBo\t", "", "\r", "CyDe\r", ""), 1.0),
        ("<alphabetical_sorted>AnnBo\nCyDe</alphabetical_sorted>", 1.0),
        (block("AnnBo", "CyDe", turn=1), 0.0),  # the tag of later turns
        (RIGHT.upper(), 0.0),
    ],
)
def test_scores_of_one_turn_by_hand(reply, score):
    marks = play(Task("first", (ONE,)), [reply])
    assert marks["reward"] == marks["turn_1"] == score
    assert score_turn(reply, ["AnnBo", "CyDe"], 0)[0] == score


def test_each_turn_wants_its_own_tag():
    first = block("AnnBo", "CyDe")
    for turn in (1, 2):
        right = right_list(SMALL, turn)
        assert score_turn(block(*right, turn=0), right, turn) == (0.0, False)
        assert score_turn(block(*right, turn=1), right, turn) == (1.0, True)
    marks = play(SMALL, [first, first, first])
    assert (marks["turn_1"], marks["turn_2"], marks["turn_3"], marks["format"]) == (1.0, 0.0, 0.0, 1 / 3)


def test_format_counts_blocks_whatever_they_hold():
    assert play(SMALL, [block("x"), "nothing", RIGHT + RIGHT])["format"] == 1 / 3  # the last has the tag of turn 1
    assert play(SMALL, [RIGHT + RIGHT, block(turn=1), block("x", turn=2)])["format"] == 1.0


def test_a_power_pushes_down_what_is_nearly_right():
    values = [play(Task("first", (ONE,)), [HALF], power=p)["reward"] for p in (0.5, 1, 4, 8)]
    assert values == pytest.approx([0.5**0.5, 0.5, 0.0625, 0.00390625])


# ------------------------------------------------------------------------------------------------ any string is a legal reply


def check(env: Alphabet, replies: list[str]) -> dict[str, float]:
    """Play replies: nothing is raised, every mark is in [0, 1], and they are those of the rules."""
    messages, done = [env.reset(3)[0]["content"]], False
    for reply in replies:
        if not done:
            new, done = env.step(reply)
            messages += [message["content"] for message in new]
    marks = env.score()
    assert all(math.isfinite(value) and 0.0 <= value <= 1.0 for value in marks.values())
    assert sum(marks[f"habit_{name}"] for name in HABITS) == 1.0
    assert (marks["exact"] == 1.0) == (marks["reward"] == 1.0)
    for name, value in by_the_rules(messages, len(env.task.turns), env.replies, env.similarity_power, env.power_per_turn).items():
        assert marks[name] == pytest.approx(value, abs=1e-12), name
    return marks


anything = st.text(st.characters(exclude_categories=()), max_size=60)  # all of Unicode, lone surrogates and controls too
pieces = st.sampled_from(
    [
        "<think>",
        "</think>",
        "\n",
        "\r\n",
        "\t",
        "\x00",
        MARK,
        "AnnBo",
        "annBo",
        "EvFo",
        "\u0130",
        *(f"<{t}>" for t in TAGS),
        *(f"</{t}>" for t in TAGS),
    ]
)
soup = st.lists(st.one_of(pieces, pieces, anything), max_size=12).map("".join)
wrapped = st.tuples(st.sampled_from(TAGS), soup, anything).map(lambda p: f"{p[2]}<{p[0]}>{p[1]}</{p[0]}>{p[2]}")
thrifty = settings(max_examples=200, deadline=None, database=None, derandomize=True)


@given(replies=st.lists(st.one_of(anything, soup, wrapped), min_size=1, max_size=3))
@example(replies=["</alphabetical_sorted><alphabetical_sorted>AnnBo"])
@example(replies=["<alphabetical_sorted></alphabetical_sorted>", "<combined_alphabetical_sorted>\x85</combined_alphabetical_sorted>"])
@thrifty
def test_arbitrary_text_is_a_legal_reply(replies):
    for per_turn in (True, False):
        check(make_env(names=(2, 2), per_turn=per_turn), replies)


def long_text(kind: str) -> str:
    letters = random.Random(4)
    return {
        "foreign letters": "\u4e2d" * 1_000_000,
        "spaces": " " * 1_000_000,
        "empty lines": "\n" * 1_000_000,
        "lines of one letter": "x\n" * 50_000,
        "NUL bytes": "\x00" * 1_000_000,
        "random letters": "".join(letters.choices("abcdefghijklmnopqrstuvwxyz\n", k=100_000)),
        "closing thoughts": "</think>" * 100_000,
        "opening tags": f"<{TAGS[0]}>" * 30_000,
        "closing tags": f"</{TAGS[1]}>" * 5000,
        "small blocks": f"<{TAGS[0]}>x</{TAGS[0]}>" * 1000,
    }[kind]


LONG = (
    "foreign letters,spaces,empty lines,lines of one letter,NUL bytes,random letters,closing thoughts,opening tags,"
    "closing tags,small blocks"
)


@pytest.mark.parametrize("kind", LONG.split(","))
def test_long_replies_earn_next_to_nothing_and_raise_nothing(kind):
    text = long_text(kind)
    assert check(make_env((2, 2), (2, 2)), [text, text])["reward"] == 0.0
    assert check(make_env((2, 2), (2, 2)), [block(text), block(text, turn=1)])["similarity"] < 0.02


def test_a_long_thought_before_a_right_list_is_fine():
    env = make_env((1, 1))
    env.reset(5)
    env.step("<think>" + "x" * 1_000_000 + "</think>" + env.expert_reply().partition("</think>")[2])
    assert env.score()["reward"] == 1.0


# ------------------------------------------------------------------------------------------------ the tasks


def tasks(n: int, turns=(1, 3), names=(1, 5)) -> list[Task]:
    env = make_env(turns, names)
    return [env.reset(seed) and env.task for seed in range(n)]


def test_the_pool_is_large_and_its_names_can_be_told_apart():
    assert len(FIRST) * len(LAST) >= 2000
    for pool in (FIRST, LAST):
        assert len(set(pool)) == len(pool)
        assert all(re.fullmatch("[A-Z][a-z]{2,}", name) for name in pool)
        assert max(Counter(name[:3] for name in pool).values()) == 1
        assert max(Counter(name[:2] for name in pool).values()) == 2
        assert len({name[0] for name in pool}) >= 24  # varied: nearly every letter of the alphabet


def test_the_pool_s_size_is_the_one_that_its_comment_tells():
    source = (ROOT / "env_alphabet.py").read_text()
    assert f"{len(FIRST)} x {len(LAST)} = {len(FIRST) * len(LAST):,}" in source


def test_names_are_disjoint_and_have_exactly_two_capitals():
    seen = set()
    for task in tasks(500):
        names = [name for part in task.turns for name in part]
        firsts, lasts = zip(*map(parts_of, names))
        assert all(sum(c.isupper() for c in name) == 2 for name in names)
        assert len(set(firsts)) == len(set(lasts)) == len(names)
        assert set(firsts) <= set(FIRST) and set(lasts) <= set(LAST)
        seen.update(names)
    assert len(seen) > 2000


@pytest.mark.parametrize("turns, names", [((1, 3), (1, 5)), ((3, 3), (1, 4)), ((2, 5), (3, 3)), ((1, 1), (1, 1)), ((3, 3), (70, 73))])
def test_counts_stay_within_the_knobs_and_use_all_of_them(turns, names):
    drawn = tasks(300, turns, names)
    rounds = Counter(len(task.turns) for task in drawn)
    sizes = Counter(len(part) for task in drawn for part in task.turns)
    for counts, (low, high) in ((rounds, turns), (sizes, names)):
        assert set(counts) == set(range(low, high + 1))
        total, share = sum(counts.values()), 1 / (high - low + 1)
        assert all(abs(n / total - share) < 5 * (share / total) ** 0.5 for n in counts.values())


def test_half_of_the_episodes_sort_by_first_name():
    firsts = sum(task.by == "first" for task in tasks(2000))
    assert abs(firsts - 1000) < 4 * 500**0.5
    assert {task.by for task in tasks(50)} == {"first", "last"}


def test_a_turn_s_names_come_in_no_particular_order():
    big = [task for task in tasks(400, (1, 1), (4, 4))]
    in_order = [list(task.turns[0]) == right_list(task, 0) for task in big]
    assert abs(sum(in_order) - 400 / 24) < 4 * (400 / 24) ** 0.5  # one order of 24


def test_same_seed_same_episode_on_any_call_order():
    alone = make_env((1, 3), (1, 5))
    alone.reset(7)
    busy, other = make_env((1, 3), (1, 5), 4.0, True, False, "bare"), make_env((2, 2), (3, 3))
    for seed in (3, 7, 8):
        random.seed(seed)
        other.reset(seed)
        busy.reset(seed)
        busy.step("x")
    busy.reset(7)
    assert busy.task == alone.task and busy.replies == []
    assert len({task.turns for task in tasks(300)}) == 300
    assert busy.score()["reward"] == 0.0


def test_tasks_do_not_depend_on_the_hash_seed_of_the_process():
    code = "import random, env_alphabet as e; print([e.make_task(random.Random(s), (1, 3), (1, 5)) for s in range(50)])"
    run = lambda seed: subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    )
    assert run("1").stdout == run("2").stdout == f"{tasks(50)}\n"


def test_the_user_says_all_that_is_needed():
    for think in (True, False):
        env = make_env((3, 3), (2, 3), think=think)
        (first,) = env.reset(1)
        (second,), done = env.step("x")
        (third,), done_too = env.step("y")
        assert not done and not done_too and env.step("z") == ([], True)
        for turn, message in enumerate((first, second, third)):
            assert message["role"] == "user"
            which, names = asked(message["content"])
            assert ("first", "last")[which] == env.task.by and tuple(names) == env.task.turns[turn]
            assert ("<think>" in message["content"]) == think
        texts = [message["content"] for message in (first, second, third)]
        assert [f"<{TAGS[0]}>" in text and f"</{TAGS[0]}>" in text for text in texts] == [True, False, False]
        assert [f"<{TAGS[1]}>" in text and f"</{TAGS[1]}>" in text for text in texts] == [False, True, False]
        assert [MARK in text for text in texts] == [False, True, False]  # each format is shown once
        assert "ame format" in texts[2]
        assert not any(name in text.partition("\n\n")[2] for text in texts for part in env.task.turns for name in part)


# ------------------------------------------------------------------------------------------------ the expert


def speak(env: Alphabet, seed: int) -> dict[str, float]:
    env.reset(seed)
    done = False
    while not done:
        _, done = env.step(env.expert_reply())
    return env.score()


@pytest.mark.parametrize("turns, names", [((1, 3), (1, 5)), ((3, 3), (1, 4)), ((2, 2), (1, 1)), ((5, 5), (7, 9)), ((1, 1), (30, 40))])
@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_the_expert_scores_exactly_1(turns, names, style):
    for seed in range(40):
        power, per_turn = ((8.0, False), (4.0, True), (0.3, seed % 2 == 0))[seed % 3]
        env = make_env(turns, names, power, per_turn, True, style)
        marks = speak(env, seed)
        assert all(value == 1.0 for name, value in marks.items() if "habit" not in name)
        assert all(("<think>" in reply) == (style != "bare") for reply in env.replies)
        assert (marks["habit_derives"] == 1.0) == (style == "derives")


@pytest.mark.parametrize("style", STYLES)
def test_an_expert_told_not_to_think_does_not(style):
    env = make_env(think=False, style=style)
    for seed in range(40):
        assert speak(env, seed)["reward"] == 1.0
        assert not any("think" in reply for reply in env.replies)


def test_the_deriving_expert_cuts_out_the_keys_and_sorts_by_them():
    task = Task("last", (("MariaSilva", "EnginDurgun"), ("ChenWei",)))
    assert write_reply(task, 0, "derives") == (
        "<think>\nSil MariaSilva\nDur EnginDurgun\n\nDur EnginDurgun\nSil MariaSilva\n</think>\n"
        "<alphabetical_sorted>\nEnginDurgun\nMariaSilva\n</alphabetical_sorted>"
    )
    assert write_reply(task, 1, "derives") == (
        "<think>\nWei ChenWei\n\nDur EnginDurgun\nSil MariaSilva\nWei ChenWei\n</think>\n<combined_alphabetical_sorted>\n"
        "EnginDurgun\nMariaSilva\nChenWei // new name!\n</combined_alphabetical_sorted>"
    )
    for task in tasks(200):
        which, so_far = ("first", "last").index(task.by), []
        for turn, names in enumerate(task.turns):
            so_far += names
            thinking, _, answer = write_reply(task, turn, "derives").removeprefix("<think>\n").partition("</think>\n")
            cut, ordered = (part.strip("\n").split("\n") for part in thinking.split("\n\n"))
            assert cut == [f"{parts_of(name)[which][:3]} {name}" for name in names]
            assert all(line == f"{parts_of(line[4:])[which][:3]} {line[4:]}" for line in ordered)
            assert [line[:3].lower() for line in ordered] == sorted({line[:3].lower() for line in ordered})
            assert sorted(line[4:] for line in ordered) == sorted(so_far)
            assert [line.removesuffix(MARK) for line in answer.split("\n")[1:-1]] == [line[4:] for line in ordered]


def test_habit_is_read_from_the_last_list():
    given, string, right = ("MiaVogel", "AnaZola", "ZoeAbe"), ("AnaZola", "MiaVogel", "ZoeAbe"), ("ZoeAbe", "MiaVogel", "AnaZola")
    task = Task("last", (given, ("BorisCruz",)))
    thought = "<think>\nVog MiaVogel\nZol AnaZola\nAbe ZoeAbe\n</think>"
    for replies, habit in [
        ([block(*given)], "given"),
        ([block(*string)], "string"),
        ([block(*(f"  {name} " for name in given))], "given"),  # blanks around a name are no habit
        ([block(*right)], "other"),
        ([f"<think>let me sort</think>{block(*string)}"], "string"),
        ([f"{thought}{block(*right)}"], "derives"),
        ([f"{thought}{block(*given)}"], "derives"),
        ([f"<think>\nVog MiaVogel\n</think>{block(*given)}"], "given"),  # one key for three names is not the algorithm
        ([f"{thought}nothing"], "other"),
        ([thought[:-8] + block(*given)], "other"),  # thoughts that never end hold no list
        ([], "other"),
        (["nothing"], "other"),
        ([block()], "other"),
        ([block(*given), "nothing"], "given"),
        ([block(*given), block(*string, "BorisCruz", turn=1)], "other"),
        ([block(*string), block(*given, "BorisCruz // new name!", turn=1)], "given"),
        ([block(*given), block("AnaZola", "BorisCruz // new name!", "MiaVogel", "ZoeAbe", turn=1)], "string"),
        ([block(*given), block(*string, turn=0)], "given"),  # the wrong tag is no list
        ([block(*given), "<think>\nCru BorisCruz\n</think>" + block("x", turn=1)], "derives"),
        ([block(*right) + block(*given)], "given"),  # the last of several
    ]:
        assert habit_of(task, replies) == habit, replies
        marks = play(task, replies)
        assert {name for name in HABITS if marks[f"habit_{name}"] == 1.0} == {habit}


# ------------------------------------------------------------------------------------------------ arguments and script


@pytest.mark.parametrize(
    "flag, knobs",
    [
        ("--set min_turns=", dict(turns=(0, 3))),
        ("--set min_turns=", dict(turns=(3, 2))),
        ("max_turns=", dict(turns=(-2, -1))),
        ("--set min_names=", dict(names=(0, 3))),
        ("--set min_names=", dict(names=(5, 4))),
        ("max_names=", dict(turns=(1, 100), names=(1, 100))),
        ("max_names=", dict(turns=(3, 3), names=(1, 74))),
        ("--set similarity_power=", dict(power=0.0)),
        ("--set similarity_power=", dict(power=-1.0)),
        ("--set similarity_power=", dict(power=math.nan)),
        ("--sft-style", dict(style="cot")),
        ("--sft-style", dict(style="")),
    ],
)
def test_a_wrong_argument_is_refused_in_one_sentence_that_names_the_flag(flag, knobs):
    with pytest.raises(ValueError) as caught:
        make_env(**knobs)
    message = str(caught.value)
    assert flag in message and message.startswith("--")
    assert "\n" not in message and not re.search(r"[.!?]\s", message)


def test_the_module_runs_as_a_script():
    done = subprocess.run([sys.executable, "env_alphabet.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expert, *bad_players = [line for line in done.stdout.splitlines() if "'reward'" in line]
    assert "'reward': 1.0" in expert and len(bad_players) == 3
    assert all("'reward': 1.0" not in line and "'exact': 0.0" in line for line in bad_players)
