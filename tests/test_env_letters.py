"""Protects the letter-counting environment: the law of its tasks, its exact reward, and that no reply can cheat or break it.

The numbers expected here come from the environment's written rules, not from its code: a table of the tiers, rewards worked
out by hand, and a second checker that reads answers in another way.
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
from hypothesis import example, given, settings
from hypothesis import strategies as st
from spellchecker import SpellChecker

from bookkeeping.presets import by_size
from bookkeeping.refusals import check
from env_letters import STYLES, Letters, Task, habit_of, make_task, question, score_reply, words_between, write_reply
from settings import DEV_SEEDS, Config, fill, sft_seeds, task_seeds

ROOT = Path(__file__).resolve().parent.parent
N = 300  # seeds a tier

# tier: (source, shortest, longest string, P(several letters), fewest, most letters); the letters are capped at 26
LAW = {
    1: ("word", 3, 8, 0.0, 1, 1),
    2: ("word", 5, 12, 0.5, 1, 2),
    3: ("word", 8, 18, 0.6, 2, 3),
    4: ("word", 10, 25, 0.8, 3, 5),
    5: ("word", 15, 35, 0.9, 5, 8),
    6: ("random", 40, 80, 1.0, 8, 12),
    7: ("random", 80, 150, 1.0, 12, 20),
    8: ("random", 150, 250, 1.0, 18, 30),
    9: ("random", 250, 400, 1.0, 25, 40),
    10: ("random", 400, 500, 1.0, 35, 50),
}
ONE = Task("banana", ("a",), (3,))
THREE = Task("banana", ("a", "n", "q"), (3, 2, 0))
RIGHT_ONE = "<answer>3</answer>"
RIGHT_THREE = '<answer>{"a": 3, "n": 2, "q": 0}</answer>'
MARKS = {"reward", "exact", "format", "fraction", *(f"habit_{style}" for style in STYLES)}


def tasks_of(tier: int, n: int = N) -> list[Task]:
    return [make_task(random.Random(seed), tier) for seed in range(n)]


def reward_of(task: Task, reply: str, reward: str = "partial", think: bool = True) -> float:
    return score_reply(task, reply, reward, think)["reward"]


# ------------------------------------------------------------------------------------------------ the law of the tasks


@pytest.mark.parametrize("tier", LAW)
def test_strings_have_the_tier_s_length_and_only_small_letters(tier):
    source, shortest, longest, *_ = LAW[tier]
    lengths = [len(task.text) for task in tasks_of(tier)]
    assert shortest <= min(lengths) and max(lengths) <= longest
    assert all(set(task.text) <= set(string.ascii_lowercase) for task in tasks_of(tier, 50))
    if source == "random":  # the whole range is used, evenly
        assert min(lengths) <= shortest + 0.05 * (longest - shortest) and max(lengths) >= longest - 0.05 * (longest - shortest)
        assert abs(sum(lengths) / N - (shortest + longest) / 2) < 4 * (longest - shortest) / 12**0.5 / N**0.5


# tier: the first 200 tasks, and three of them. Whoever changes a tier changes every number that was measured on it.
DIGESTS = {
    1: "f2834184bf68", 2: "2434e58fb077", 3: "00957db37e29", 4: "14ccd06988b0", 5: "39ac13f94d90",
    6: "b3105f243fec", 7: "df6f6b212be1", 8: "032924eec78c", 9: "74db177ee2fe", 10: "a4c939cf70fe",
}  # fmt: skip
GOLDEN = {
    1: [("decibels", "d", (1,)), ("entity", "e", (1,)), ("dunks", "k", (1,))],
    2: [("policymaking", "ho", (0, 1)), ("plover", "e", (1,)), ("reimbursable", "ew", (2, 0))],
    3: [("salutarily", "s", (1,)), ("teaspoon", "wo", (0, 2)), ("gambetta", "tze", (2, 0, 1))],
    4: [("telekinetic", "zljk", (0, 1, 0, 1)), ("moratorium", "wou", (0, 2, 1)), ("delineated", "ncte", (1, 0, 1, 3))],
    5: [("hygrothermograph", "itzrdvcp", (0, 1, 0, 3, 0, 0, 0, 1)), ("incomparability", "wqhgu", (0,) * 5),
        ("controversially", "yxvltis", (1, 0, 1, 2, 1, 1, 1))],
}  # fmt: skip


@pytest.mark.parametrize("tier", LAW)
def test_the_tasks_of_a_tier_stay_what_they_are(tier):
    drawn = tasks_of(tier, 200)
    for task, (text, letters, counts) in zip(drawn, GOLDEN.get(tier, [])):
        assert (task.text, "".join(task.letters), task.counts) == (text, letters, counts)
    assert hashlib.sha256(repr(drawn).encode()).hexdigest()[:12] == DIGESTS[tier]


@pytest.mark.parametrize("tier", range(1, 6))
def test_a_word_tier_has_all_words_of_its_lengths_the_longest_included(tier):
    _, shortest, longest, *_ = LAW[tier]
    words = SpellChecker(language="en").word_frequency.words()
    expected = {w for w in words if set(w) <= set(string.ascii_lowercase) and shortest <= len(w) <= longest}
    assert set(words_between(shortest, longest)) == expected
    assert {len(w) for w in expected} >= {shortest, min(longest, 25)}  # there are words at both ends


def test_words_of_the_first_five_tiers_are_english():
    words = set(SpellChecker(language="en").word_frequency.words())
    for tier in range(1, 6):
        texts = {task.text for task in tasks_of(tier)}
        assert texts <= words
        assert len(texts) > 20, "a tier must not repeat a few words"  # even tier 5, with a thousand words, has many


def test_random_strings_use_every_letter_about_equally():
    text = "".join(task.text for task in tasks_of(6))
    shares = [text.count(c) / len(text) for c in string.ascii_lowercase]
    assert all(abs(share - 1 / 26) < 5 * (1 / 26 / len(text)) ** 0.5 for share in shares)


@pytest.mark.parametrize("tier", LAW)
def test_number_of_letters_follows_the_law(tier):
    *_, p_several, fewest, most = LAW[tier]
    asked = [len(task.letters) for task in tasks_of(tier)]
    several = [n for n in asked if n > 1]
    low, high = min(max(2, fewest), 26), min(max(2, most), 26)
    assert all(n == 1 or low <= n <= high for n in asked)
    if p_several > 0:
        assert {low, high} <= set(several), "both ends of the range are drawn"
    assert abs(len(several) / N - p_several) <= 4 * (p_several * (1 - p_several) / N) ** 0.5  # exact where p is 0 or 1


@pytest.mark.parametrize("tier", LAW)
def test_letters_are_distinct_and_the_counts_are_right(tier):
    for task in tasks_of(tier):
        assert len(set(task.letters)) == len(task.letters) == len(task.counts)
        assert set(task.letters) <= set(string.ascii_lowercase)
        tally = dict.fromkeys(task.letters, 0)  # counted by walking, not with str.count
        for c in task.text:
            if c in tally:
                tally[c] += 1
        assert tuple(tally.values()) == task.counts


# Words have letters enough on both sides, so the share is the mean of U(0.3, 0.9). Long random strings run out of absent letters:
# of 26, about 2.5 are missing in 60 draws, none in 450.
OCCURRING = {1: (0.5, 0.7), 2: (0.5, 0.7), 3: (0.52, 0.68), 4: (0.54, 0.66), 5: (0.52, 0.66), 6: (0.7, 0.88), 7: (0.93, 0.995)}


@pytest.mark.parametrize("tier", LAW)
def test_share_of_asked_letters_that_occur(tier):
    counts = [n for task in tasks_of(tier) for n in task.counts]
    share = sum(n > 0 for n in counts) / len(counts)
    low, high = OCCURRING.get(tier, (0.99, 1.0))
    assert low <= share <= high


def test_the_presence_bias_differs_from_task_to_task():
    # With m letters and a fixed b, the number that occur has variance m b (1 - b); with b ~ U(0.3, 0.9), another m (m - 1) 0.03.
    several = [task for task in tasks_of(4, 600) if len(task.letters) > 1]
    surplus = pairs = 0.0
    for task in several:
        m, occur = len(task.letters), sum(n > 0 for n in task.counts)
        surplus += (occur - 0.6 * m) ** 2 - m * 0.24
        pairs += m * (m - 1)
    assert 0.01 < surplus / pairs < 0.05


# ------------------------------------------------------------------------------------------------ determinism


def test_same_seed_same_task_and_same_message():
    for tier in LAW:
        one, two = (Letters(tier, "binary", True, "states") for _ in range(2))
        assert [one.reset(seed) for seed in range(20)] == [two.reset(seed) for seed in range(20)]
        assert one.task == two.task


def test_a_task_depends_on_its_seed_and_tier_alone():
    """Neither other environments, nor earlier episodes, nor the global random state, nor reward, style or thinking change it."""
    alone = Letters(5, "binary", True, "states")
    alone.reset(seed=7)
    crowded, other = Letters(5, "partial", False, "bare"), Letters(6, "partial", True, "derives")
    for seed in (3, 7, 8):
        random.seed(seed)
        other.reset(seed)
        crowded.reset(seed + 1)
    crowded.reset(seed=7)
    other.reset(seed=7)
    assert crowded.task == alone.task
    assert other.task != alone.task


def test_different_seeds_give_different_tasks():
    assert len({task.text for task in tasks_of(6)}) == N


def overlap(tier: int) -> tuple[int, int, int]:
    """How many development tasks have a text that a default run trained on; that GRPO alone trained
    on; and with the same letters asked for."""
    cfg = Config(difficulty=tier)
    check(cfg)
    fill(cfg, by_size(1e6, "letters"))
    tasks = lambda seeds: [make_task(random.Random(seed), tier) for seed in seeds]
    by_rl = tasks(seed for update in range(cfg.updates) for seed in task_seeds(cfg, update))
    trained = by_rl + tasks(sft_seeds(cfg))
    development = tasks(range(DEV_SEEDS, DEV_SEEDS + cfg.eval_n))
    text = lambda task: task.text
    whole = lambda task: (task.text, frozenset(task.letters))

    def shared(seen: list[Task], key) -> int:
        known = set(map(key, seen))
        return sum(key(task) in known for task in development)

    return shared(trained, text), shared(by_rl, text), shared(trained, whole)


def test_how_many_development_words_were_trained_on_is_what_the_page_says():
    page = " ".join((ROOT / "docs" / "letters.md").read_text().split())
    texts, by_rl, whole = overlap(5)
    assert f"It does in {texts} of tier 5's 256 (" in page
    assert f"({by_rl} by GRPO's tasks alone)" in page
    assert f"(tier 5's has {len(words_between(15, 35)):,})" in page
    assert "five or fewer of each tier below" in page
    below = [overlap(tier) for tier in (1, 2, 3, 4)]
    assert max(texts for texts, *_ in below) == 5 and overlap(6) == (0, 0, 0)
    assert whole == 0 and not any(whole for *_, whole in below)


def test_tasks_do_not_depend_on_the_hash_seed_of_the_process():
    """Sets of letters have another order in every process; a resumed run must still draw the same tasks."""
    code = "import random, env_letters as e; print([e.make_task(random.Random(s), t) for t in e.TIERS for s in range(5)])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and "Task(text=" in outputs.pop()


def test_the_question_says_all_that_is_needed():
    assert question(ONE, think=True).startswith('Count the letter a in "banana".')
    assert question(THREE, think=False).startswith('Count the letters a, n, q in "banana".')
    for task in (ONE, THREE):
        assert "<think>" in question(task, think=True) and "<think>" not in question(task, think=False)
        assert all("<answer> and </answer>" in question(task, think) for think in (True, False))
        assert ("JSON" in question(task, True)) == (task is THREE)


def test_an_episode_is_one_turn():
    env = Letters(4, "partial", True, "states")
    (message,) = env.reset(seed=1)
    assert message["role"] == "user" and f'"{env.task.text}"' in message["content"]
    assert env.score()["reward"] == 0.0  # nothing said yet
    assert env.step("no idea") == ([], True)
    assert env.score()["reward"] == 0.0
    assert env.step(env.expert_reply()) == ([], True)
    assert env.score()["reward"] == 1.0
    env.reset(seed=2)
    assert env.score()["reward"] == 0.0, "a reply must not outlive its episode"


# ------------------------------------------------------------------------------------------------ rewards worked out by hand

# reply, partial reward, binary reward
SINGLE = [
    ("<answer>3</answer>", 1.0, 1.0),
    ("<answer> 3\n</answer>", 1.0, 1.0),
    ("There are <answer>3</answer> of them.", 1.0, 1.0),
    ("<answer>2</answer>", 0.1, 0.0),
    ("<answer>0</answer>", 0.1, 0.0),
    ("<answer>999999</answer>", 0.1, 0.0),
    ("3", 0.0, 0.0),
    ("", 0.0, 0.0),
    ("<answer></answer>", 0.0, 0.0),
    ("<answer>three</answer>", 0.0, 0.0),
    ("<answer>3.0</answer>", 0.0, 0.0),
    ("<answer>3 a</answer>", 0.0, 0.0),
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
    ('<answer>{"a": 3, "n": 2, "q": false}</answer>', 0.0, 0.0),  # False == 0 in Python, and is no count
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
@pytest.mark.parametrize("task,reply,partial,binary", [(ONE, *row) for row in SINGLE] + [(THREE, *row) for row in SEVERAL])
def test_reward_worked_out_by_hand(task, reply, partial, binary, think):
    if not think and reply.startswith("There are"):
        partial = binary = 0.0  # told not to think: the answer and nothing else, or a tally could be written as prose
    assert reward_of(task, reply, "partial", think) == pytest.approx(partial, abs=1e-12)
    assert reward_of(task, reply, "binary", think) == binary


@pytest.mark.parametrize("n_right,expected", [(0, 0.1), (1, 0.325), (2, 0.55), (3, 0.775), (4, 1.0)])
def test_partial_reward_pays_every_right_letter_alike(n_right, expected):
    task = Task("mississippi", ("i", "m", "p", "z"), (4, 1, 2, 0))
    said = {c: n if i < n_right else n + 1 for i, (c, n) in enumerate(zip(task.letters, task.counts))}
    marks = score_reply(task, f"<answer>{json.dumps(said)}</answer>", "partial", True)
    assert marks["reward"] == pytest.approx(expected, abs=1e-12)
    assert marks["fraction"] == n_right / 4
    assert marks["format"] == 1.0


def test_exact_is_never_more_than_it_says():
    """ "Correct" once meant "reward above 0" and a run reported 95%. A partial reward is no right answer."""
    for task, rows in ((ONE, SINGLE), (THREE, SEVERAL)):
        for reply, partial, binary in rows:
            for mode in ("partial", "binary"):
                marks = score_reply(task, reply, mode, True)
                assert set(marks) == MARKS
                assert marks["exact"] == (1.0 if partial == 1.0 else 0.0) == binary
                assert marks["format"] == float(partial > 0)


def test_a_full_reward_is_exactly_one_for_every_number_of_letters():
    for n in range(2, 27):  # sums of tenths are not exact in floats; the reward of a right answer must be
        letters = string.ascii_lowercase[:n]
        task = Task(letters, tuple(letters), (1,) * n)
        assert reward_of(task, write_reply(task, "bare")) == 1.0
        wrong = Task(letters, tuple(letters), (2,) + (1,) * (n - 1))
        marks = score_reply(task, write_reply(wrong, "bare"), "partial", True)
        assert marks["reward"] < 1.0 and marks["exact"] == 0.0


# ------------------------------------------------------------------------------------------------ thinking


@pytest.mark.parametrize("task,right", [(ONE, RIGHT_ONE), (THREE, RIGHT_THREE)])
def test_an_answer_inside_the_thinking_does_not_count(task, right):
    assert reward_of(task, f"<think>{right}</think>") == 0.0
    assert reward_of(task, f"{right}<think>hm</think>") == 0.0  # what counts comes after the thinking
    assert reward_of(task, f"<think>is it {right}?</think>{right}") == 1.0  # rehearsing does no harm
    assert reward_of(task, f"<think><answer>7</answer></think>{right}") == 1.0
    assert reward_of(task, f"<think>a</think> no: <think>b</think>{right}") == 1.0


@pytest.mark.parametrize("task,right", [(ONE, RIGHT_ONE), (THREE, RIGHT_THREE)])
def test_thinking_that_never_ends_earns_nothing(task, right):
    for reply in (f"<think>b a1 {right}", f"{right}<think>", f"hm <think>\n\n{right}", f"<think><think>{right}"):
        for mode in ("partial", "binary"):
            marks = score_reply(task, reply, mode, True)
            assert marks["reward"] == marks["exact"] == marks["format"] == 0.0


@pytest.mark.parametrize("task,right", [(ONE, RIGHT_ONE), (THREE, RIGHT_THREE)])
def test_thinking_earns_nothing_where_it_is_not_allowed(task, right):
    for reply in (f"<think>b a1</think>{right}", f"<think></think>{right}", f"<think>{right}", f"{right}<think>"):
        for mode in ("partial", "binary"):
            marks = score_reply(task, reply, mode, False)
            assert marks["reward"] == marks["exact"] == marks["format"] == 0.0
    assert reward_of(task, right, "binary", think=False) == 1.0


def test_a_closing_tag_before_the_opening_one_makes_no_answer():
    assert reward_of(ONE, "</answer><answer>3") == 0.0


def test_a_second_thinking_that_never_ends_earns_nothing():
    assert reward_of(ONE, f"<think>a</think><think>b {RIGHT_ONE}") == 0.0


def test_thinking_without_an_opening_tag_earns_nothing_where_it_is_not_allowed():
    assert reward_of(ONE, f"b a1 n a2 n a3</think>{RIGHT_ONE}", think=False) == 0.0


def test_a_tally_written_as_prose_earns_nothing_where_thinking_is_not_allowed():
    assert reward_of(ONE, f"b a1 n a2 n a3 {RIGHT_ONE}", think=False) == 0.0
    assert reward_of(ONE, f"b a1 n a2 n a3 {RIGHT_ONE}", think=True) == 1.0


# ------------------------------------------------------------------------------------------------ hostile replies


def plainly_right(task: Task, reply: str, think: bool) -> bool:
    """A second opinion, by regular expressions: does the reply end its thinking and then give one right answer?"""
    if not think and not re.fullmatch(r"\s*<answer>[^<>]*</answer>\s*", reply):
        return False  # told not to think: the answer alone
    said = re.split("</think>", reply)[-1]
    if "<think>" in said:
        return False
    found = re.fullmatch(r"(?s)(.*)<answer>(.*)</answer>(.*)", said)
    if not found or any(re.search("</?answer>", part) for part in found.groups()):
        return False
    body = found[2].strip()
    if len(task.letters) == 1:
        return bool(re.fullmatch(f"0*{task.counts[0]}", body))
    item = r'\s*"([a-z])"\s*:\s*(-?[0-9]{1,9})\s*'
    if not re.fullmatch(r"\{" + item + "(," + item + r")*\}", body):
        return False
    pairs = [(key, int(value)) for key, value in re.findall(item, body)]
    return sorted(pairs) == sorted(zip(task.letters, task.counts))


def check_reply(task: Task, reply: str) -> None:
    for think in (True, False):
        right = plainly_right(task, reply, think)
        for mode in ("partial", "binary"):
            marks = score_reply(task, reply, mode, think)
            assert set(marks) == MARKS
            assert all(0.0 <= value <= 1.0 for value in marks.values())
            assert (marks["reward"] == 1.0) == (marks["exact"] == 1.0)
            assert right or marks["reward"] < 1.0, f"paid in full: {reply[:200]!r}"
            assert marks["format"] == 1.0 or marks["reward"] == 0.0
            assert sum(marks[f"habit_{style}"] for style in STYLES) == 1.0


anything = st.text(st.characters(exclude_categories=()), max_size=60)  # all of Unicode, lone surrogates and controls too
values = st.one_of(
    st.sampled_from([3, 2, 0]),
    st.integers(-5, 5),
    st.integers(10**300, 10**301),
    st.floats(),  # json.dumps writes NaN and Infinity as such
    st.booleans(),
    st.none(),
    anything,
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.sampled_from("anq"), st.integers(0, 3), max_size=3),
)
keys = st.one_of(st.sampled_from("anq"), st.sampled_from("anqz"), anything)
loose_json = st.lists(st.tuples(keys, values), max_size=5).map(  # pairs, not a dict: duplicate keys must occur
    lambda pairs: "{" + ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in pairs) + "}"
)
near_json = st.permutations([("a", 3), ("n", 2), ("q", 0)]).flatmap(
    lambda pairs: st.lists(st.sampled_from(pairs + [("q", 1), ("z", 0)]), min_size=2, max_size=4).map(
        lambda chosen: "{" + ", ".join(f'"{key}":{value}' for key, value in chosen) + "}"
    )
)
deep = st.tuples(st.sampled_from(['{"a": ', "[", '{"a":[']), st.sampled_from([2, 90, 140, 900, 10_000]), st.booleans()).map(
    lambda p: p[0] * p[1] + "1" + ("".join({"{": "}", "[": "]"}.get(c, "") for c in reversed(p[0])) * p[1] if p[2] else "")
)
bodies = st.one_of(
    st.sampled_from(["3", " 3 ", '{"a": 3, "n": 2, "q": 0}', "-3", "3.0", "NaN", "Infinity", "true", "9" * 5000, "1e400", "[]", "{}"]),
    near_json,
    loose_json,
    deep,
    anything,
)
answers = bodies.map(lambda body: f"<answer>{body}</answer>")
thoughts = st.one_of(anything, answers).map(lambda thought: f"<think>{thought}</think>")
fakes = st.sampled_from(
    ["<answer >", "< answer>", "<ANSWER>3</ANSWER>", "</ answer>", "<answer/>", "<|im_end|>", "<think/>", "\x00", "\ud800"]
)
built = st.tuples(
    st.lists(st.one_of(thoughts, fakes, anything), max_size=2), answers, st.lists(st.one_of(answers, fakes, anything), max_size=1)
)
soup = st.lists(
    st.one_of(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>"]), st.sampled_from(["3", RIGHT_THREE[8:-9]])), max_size=8
)
thrifty = settings(max_examples=150, deadline=None, database=None, derandomize=True)


@given(reply=anything)
@thrifty
def test_arbitrary_text_is_a_legal_reply(reply):
    for task in (ONE, THREE):
        check_reply(task, reply)


@given(parts=built)
@settings(thrifty, max_examples=400)
def test_built_answers_are_paid_in_full_only_when_right(parts):
    before, answer, after = parts
    for task in (ONE, THREE):
        check_reply(task, "".join([*before, answer, *after]))


@given(pieces=soup)
@example(pieces=["</answer>", "<answer>", "3"])
@example(pieces=["<think>", "</think>", "<think>", "<answer>", "3", "</answer>"])
@example(pieces=["3", "</think>", "<answer>", "3", "</answer>"])
@settings(thrifty, max_examples=400)
def test_tags_in_any_order_are_paid_in_full_only_when_right(pieces):
    for task in (ONE, THREE):
        check_reply(task, "".join(pieces))


MONSTERS = {
    "deep objects": "<answer>" + '{"a": ' * 10_000 + "1" + "}" * 10_000 + "</answer>",
    "deep lists, never closed": "<answer>" + "[" * 10_000 + "</answer>",
    "deep lists, short enough to parse": "<answer>" + "[" * 990 + "</answer>",
    "deep value": '<answer>{"a": ' + "[" * 480 + "]" * 480 + "}</answer>",
    "huge count": "<answer>" + "9" * 100_000 + "</answer>",
    "huge count in JSON": '<answer>{"a": ' + "9" * 100_000 + ', "n": 2, "q": 0}</answer>',
    "padded count": "<answer>" + "0" * 1_000_000 + "3</answer>",
    "long line": "x" * 1_000_000,
    "long line in the answer": "<answer>" + "x" * 1_000_000 + "</answer>",
    "many answers": RIGHT_ONE * 50_000,
    "many thoughts": "<think>" * 100_000 + "a " * 50_000,
    "many answer tags": "<answer>" * 100_000 + "3" + "</answer>" * 100_000,
    "lone surrogate": "<answer>\ud800</answer>",
    "surrogate key": '<answer>{"\ud800": 3, "\udfff": NaN}</answer>',
    "controls": "<answer>\x003\x1b[2J</answer>",
}


@pytest.mark.parametrize("name", MONSTERS)
def test_monstrous_replies_earn_nothing_and_raise_nothing(name):
    for task in (ONE, THREE):
        check_reply(task, MONSTERS[name])
        assert reward_of(task, MONSTERS[name]) == 0.0


def test_a_long_thought_before_a_right_answer_is_fine():
    assert reward_of(ONE, "<think>" + "x" * 1_000_000 + "</think>" + RIGHT_ONE) == 1.0


def test_the_longest_honest_answer_is_accepted():
    for task in tasks_of(10, 20):
        assert len(task.letters) == 26
        body = json.dumps(dict(zip(task.letters, task.counts)), indent=2)  # pretty-printed, so even longer
        assert reward_of(task, f"<answer>{body}</answer>", "binary") == 1.0


# ------------------------------------------------------------------------------------------------ the expert


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tier", LAW)
def test_every_expert_style_is_right_and_has_its_own_habit(tier, style):
    for mode in ("partial", "binary"):
        env = Letters(tier, mode, True, style)
        for seed in range(20):
            env.reset(seed)
            env.step(env.expert_reply())
            marks = env.score()
            assert marks["reward"] == marks["exact"] == marks["format"] == marks["fraction"] == 1.0
            assert habit_of(env.reply) == style
            assert {name for name in STYLES if marks[f"habit_{name}"]} == {style}
            assert plainly_right(env.task, env.reply, think=True)


@pytest.mark.parametrize("tier", LAW)
def test_an_expert_told_not_to_think_does_not(tier):
    for style in STYLES:
        env = Letters(tier, "binary", False, style)
        for seed in range(10):
            env.reset(seed)
            env.step(env.expert_reply())
            assert env.score()["reward"] == 1.0
            assert habit_of(env.reply) == "bare" and "think" not in env.reply


def test_the_deriving_expert_spells_the_string_with_a_running_tally():
    assert write_reply(THREE, "derives") == "<think>\nb a1 n1 a2 n2 a3\n</think>\n" + RIGHT_THREE
    for task in tasks_of(6, 30):
        items = write_reply(task, "derives").partition("</think>")[0].split()[1:]
        assert "".join(item[0] for item in items) == task.text
        last = {item[0]: int(item[1:]) for item in items if len(item) > 1}  # the last tally of a letter is its count
        assert tuple(last.get(c, 0) for c in task.letters) == task.counts


def test_habit_reads_the_thinking_and_nothing_else():
    assert habit_of("b a1 n1 a2 <answer>3</answer>") == "bare"  # no thinking at all
    assert habit_of("<think></think><answer>3</answer>") == "bare"
    assert habit_of("<think>I see three of them.</think>b a1 n1 a2 n2 a3") == "states"
    assert habit_of("<think>b a1 n a2 n a3") == "derives"  # cut off by the token limit, still the habit
    assert habit_of("<think>b, a1, n, a2, n, a3.</think>") == "derives"
    assert habit_of("<think>b a1 then some more words</think>") == "states"


# ------------------------------------------------------------------------------------------------ arguments and script


@pytest.mark.parametrize(
    "flag,arguments",
    [
        ("--difficulty", (0, "binary", True, "states")),
        ("--difficulty", (11, "binary", True, "states")),
        ("--difficulty", (-1, "partial", False, "bare")),
        ("--difficulty", (2.5, "partial", True, "bare")),
        ("--reward", (6, "Binary", True, "states")),
        ("--reward", (6, "", True, "states")),
        ("--sft-style", (6, "binary", True, "cot")),
        ("--sft-style", (6, "binary", True, "")),
    ],
)
def test_a_wrong_argument_is_refused_in_one_sentence_that_names_the_flag(flag, arguments):
    with pytest.raises(ValueError) as caught:
        Letters(*arguments)
    message = str(caught.value)
    assert message.startswith(flag)
    assert "\n" not in message and not re.search(r"[.!?]\s", message)
    assert "choose" in message  # it also says what to do


def run_bare(file: Path) -> subprocess.CompletedProcess:
    """Run it with a Python that has no packages installed, as a newcomer's may have none."""
    return subprocess.run([sys.executable, "-S", "-I", file], cwd=file.parent, capture_output=True, text=True)


def test_the_module_runs_as_a_script_without_any_package():
    done = run_bare(ROOT / "env_letters.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'reward': 1.0") == 3, "every expert style is right"
    assert "bad player, prose" in done.stdout and "'reward': 0.0" in done.stdout


@pytest.mark.parametrize(
    "old, new",
    [
        ('"reward": exact if reward == "binary" else partial,', '"reward": partial * (0.5 + 0.5 * (habit == "derives")),'),
        ('"reward": exact if reward == "binary" else partial,', '"reward": exact - len(reply) / 1000, "length": len(reply),'),
        ('        "exact": exact,\n', ""),
    ],
)
def test_the_script_survives_another_reward(old, new, tmp_path):
    """To change score_reply is the first fork that a reader tries, and this script is where the reader looks first."""
    source = (ROOT / "env_letters.py").read_text()
    assert source.count(old) == 1
    (tmp_path / "env_letters.py").write_text(source.replace(old, new))
    done = run_bare(tmp_path / "env_letters.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'reward': ") == 6 and done.stdout != run_bare(ROOT / "env_letters.py").stdout
