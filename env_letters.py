"""Counting letters: a small environment, hard at a glance and easy step by step.

The user asks how often some letters occur in a string. The model answers inside
<answer>…</answer>: a bare integer when one letter is asked for, a JSON object when
several are. One turn, exact reward.

    user       Count the letters a, q in "banana". Think first inside <think> and
               </think> if that helps. Then give the counts as JSON inside <answer> and
               </answer>.
    assistant  <think>
               b a1 n a2 n a3
               </think>
               <answer>{"a": 3, "q": 0}</answer>

Why this task: it is hard to count 60 letters at a glance, and easy if you spell the
string out with a running tally. So the reward rises when the model takes up the *habit
of spelling*, and we can watch it happen. Tasks have ten tiers, from short English words
to 500 random letters. The tiers are those of Atropos, a public collection of RL
environments.

An environment sets a task and scores how it was played; each play is an *episode*. It
is plain Python and knows nothing of tokens or tensors:

    reset(seed) -> messages                 the task
    step(reply) -> (new messages, done)     what the environment says back, and whether
                                            the episode is over (no reward yet)
    score() -> {"reward": …, …}             after the last reply
    expert_reply() -> str                   what SFT imitates

and three attributes:

    think                                   may a reply think?
    tools                                   JSON schemas, or None
    max_turns                               the most replies of an episode. Optional;
                                            1 saves memory when sampling

The reward is decided in score_reply. Any string is a legal reply: garbage lowers the
reward but is not an error. The same seed and the same replies give the same score on
any machine.

Run me: `python env_letters.py` plays one task with each expert and three bad players.
"""

import json
import random
import re
import string
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple


class Tier(NamedTuple):
    """How the tasks of one difficulty are drawn."""

    source: str  # "word" (English) or "random" (letters)
    shortest: int  # the string, in letters
    longest: int
    p_several: float  # the chance to ask for several letters, otherwise for one
    fewest: int  # if several: how many letters at least (never under 2)
    most: int  # and how many at most (never over 26)


# The numbers are Atropos's. Tier 10's 35 to 50 are cut to 26, all letters.
TIERS = {
    1: Tier("word", 3, 8, 0.0, 1, 1),
    2: Tier("word", 5, 12, 0.5, 1, 2),
    3: Tier("word", 8, 18, 0.6, 2, 3),
    4: Tier("word", 10, 25, 0.8, 3, 5),
    5: Tier("word", 15, 35, 0.9, 5, 8),
    6: Tier("random", 40, 80, 1.0, 8, 12),
    7: Tier("random", 80, 150, 1.0, 12, 20),
    8: Tier("random", 150, 250, 1.0, 18, 30),
    9: Tier("random", 250, 400, 1.0, 25, 40),
    10: Tier("random", 400, 500, 1.0, 35, 50),
}

# The expert's styles of answer; SFT, the warm-up before RL, imitates one of them. The
# style that the model's own reply resembles is its *habit*. (In reports and on pages:
# it answers at once, states the counts, spells it out.)
STYLES = {
    "bare": "the answer alone",
    "states": "thinks, but only states the counts: the format without the algorithm",
    "derives": "spells the string with a running tally and reads it off: the algorithm",
}

# In characters. An honest answer about 26 letters has under 300 characters.
LONGEST_ANSWER = 1000
# Only with --no-think, where a longer reply could hide its counting (is_one_block).
LONGEST_REPLY = 2000


@dataclass(frozen=True)
class Task:
    text: str  # the string to count in
    letters: tuple[str, ...]  # the distinct letters to count, in the question's order
    counts: tuple[int, ...]  # the right answer, same order


@lru_cache
def english_words() -> list[str]:
    """The a-z words of pyspellchecker's offline list, in a fixed order."""
    # imported here, so that tiers 6 to 10 need no package at all
    from spellchecker import SpellChecker

    words = SpellChecker(language="en").word_frequency.words()
    plain = [word for word in words if re.fullmatch("[a-z]+", word)]
    return sorted(plain, key=lambda word: (len(word), word))


@lru_cache
def words_between(shortest: int, longest: int) -> list[str]:
    """English words of these lengths, in the order of english_words."""
    return [word for word in english_words() if shortest <= len(word) <= longest]


def make_task(rng: random.Random, difficulty: int) -> Task:
    """Draw one task of a tier. The letters are distinct; some may not occur.

    Do not reorder the calls of rng: a seed would then give another task.
    """
    tier = TIERS[difficulty]
    if tier.source == "word":
        text = rng.choice(words_between(tier.shortest, tier.longest))
    else:
        length = rng.randint(tier.shortest, tier.longest)
        text = "".join(rng.choice(string.ascii_lowercase) for _ in range(length))
    n_letters = 1
    if rng.random() < tier.p_several:
        n_letters = max(2, min(rng.randint(tier.fewest, tier.most), 26))
    p_present = rng.uniform(0.3, 0.9)  # the chance that a requested letter occurs
    present, absent = sorted(set(text)), sorted(set(string.ascii_lowercase) - set(text))
    rng.shuffle(present)
    rng.shuffle(absent)
    letters = []
    for _ in range(n_letters):
        if rng.random() < p_present:
            pool = present or absent  # the other list, if this one is used up
        else:
            pool = absent or present
        letters.append(pool.pop())
    counts = [text.count(letter) for letter in letters]
    return Task(text, tuple(letters), tuple(counts))


def question(task: Task, think: bool) -> str:
    """The user's message."""
    what, answer = "letter", "count as a number"
    if len(task.letters) > 1:
        what, answer = "letters", "counts as JSON"
    ask = f'Count the {what} {", ".join(task.letters)} in "{task.text}".'
    if not think:
        return f"{ask} Do not think. Give the {answer} inside <answer> and </answer>."
    return (
        f"{ask} Think first inside <think> and </think> if that helps. "
        f"Then give the {answer} inside <answer> and </answer>."
    )


def write_reply(task: Task, style: str) -> str:
    """What the scripted expert says, in one of STYLES.

    In the style "derives", Task("banana", ("a", "q"), (3, 0)) gives the lines below. n
    gets no number, because the question does not ask for it.

        <think>
        b a1 n a2 n a3
        </think>
        <answer>{"a": 3, "q": 0}</answer>
    """
    counts = dict(zip(task.letters, task.counts))
    body = json.dumps(counts if len(counts) > 1 else task.counts[0])
    answer = f"<answer>{body}</answer>"
    if style == "bare":
        return answer
    if style == "states":
        thought = ", ".join(f"{c} occurs {n} times" for c, n in counts.items())
        return f"<think>\nLet me count. {thought}.\n</think>\n{answer}"
    # The style "derives": spell the string, with a running tally.
    tally = dict.fromkeys(task.text, 0)
    items = []
    for c in task.text:
        tally[c] += 1
        items.append(f"{c}{tally[c]}" if c in counts else c)
    return f"<think>\n{' '.join(items)}\n</think>\n{answer}"


def split_thinking(reply: str) -> tuple[str, str]:
    """(the thinking, the rest). The rest is what follows the last </think>.

    A reply that opens a thought and never closes it is all thinking: its rest is "".
    """
    # Without any </think>, thinking is "" and rest the whole reply.
    thinking, _, rest = reply.rpartition("</think>")
    if "<think>" in rest:
        thinking, rest = reply, ""
    # Only the first <think> is removed; a second one belongs to the thought.
    return thinking.replace("<think>", "", 1), rest


def parse_answer(reply: str, several: bool) -> int | dict[str, int] | None:
    """The one well-formed answer after the thinking, or None. Never raises."""
    rest = split_thinking(reply)[1]
    # 1. There is one <answer>, followed by one </answer>.
    if re.findall("</?answer>", rest) != ["<answer>", "</answer>"]:
        return None
    body = rest.partition("<answer>")[2].partition("</answer>")[0].strip()
    if len(body) > LONGEST_ANSWER:
        return None
    # 2. For a single letter, the answer is an integer. (More than six digits cannot be
    # a count, and int() is slow on thousands of digits.)
    if not several:
        return int(body) if re.fullmatch("[0-9]{1,6}", body) else None
    # 3. For several, a JSON object.
    try:
        answer = json.loads(body, object_pairs_hook=each_letter_once)
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return None
    if type(answer) is not dict:
        return None
    # 4. Each count is an integer. isinstance(True, int) is true, so exact types are
    # compared.
    return answer if all(type(n) is int for n in answer.values()) else None


def each_letter_once(pairs: list[tuple]) -> dict:
    """Build a JSON object; refuse a repeated letter.

    (json alone keeps the last: {"a": 3, "a": 4} would become {"a": 4}.)
    """
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a letter was answered twice")
    return dict(pairs)


def score_reply(
    task: Task, reply: str, reward_kind: str, think: bool
) -> dict[str, float]:
    """The reward and its components, all in [0, 1]. With --reward partial or binary:

        the reply                              partial              binary
        has no single well-formed answer       0                    0
        (--no-think) has more than the answer  0                    0
        answers about other letters            0.1                  0
        has n of the N counts right            0.1 + 0.9 · n / N    1 if n = N, else 0

    `exact` is 1 only if every count is right, whichever reward is paid.
    """
    truth = dict(zip(task.letters, task.counts))
    several = len(truth) > 1
    answer = parse_answer(reply, several)
    if not think and not is_one_block(reply, "answer", LONGEST_REPLY):
        answer = None
    # from here on, a single count is treated like an answer in JSON
    if answer is not None and not several:
        answer = {task.letters[0]: answer}
    fraction = 0.0  # the share of the counts that are right
    if answer is not None and answer.keys() == truth.keys():
        fraction = sum(answer[c] == truth[c] for c in truth) / len(truth)
    partial = 0.0 if answer is None else 0.1 + 0.9 * fraction
    exact = float(fraction == 1.0)
    habit = habit_of(reply)  # logged only: habits pay nothing
    habits = {f"habit_{style}": float(style == habit) for style in STYLES}
    return {
        "reward": exact if reward_kind == "binary" else partial,
        "exact": exact,
        "format": float(answer is not None),
        "fraction": fraction,
        **habits,
    }


def is_one_block(reply: str, tag: str, longest: int) -> bool:
    """Is a reply one block <tag>…</tag> and nothing else?

    For replies that are not allowed to think. A tally could hide in extra text or white
    space. So a reply may have at most `longest` characters, and at most 7 white-space
    characters in a row; no honest reply has more. (env_alphabet.py uses another tag.)
    """
    if len(reply) > longest or re.search(r"\s{8}", reply):
        return False
    return re.fullmatch(rf"\s*<{tag}>[^<]*</{tag}>\s*", reply) is not None


def habit_of(reply: str) -> str:
    """Which of STYLES a reply looks like: does it think, and letter by letter?

    Only the form is looked at: the tally may be wrong.
    """
    thinking = split_thinking(reply)[0]
    items = thinking[:10_000].split()  # an honest one has under 3,000 characters
    if not items:
        return "bare"
    letters = [item for item in items if re.fullmatch("[a-z][0-9]*[,.:]?", item)]
    return "derives" if len(letters) > len(items) / 2 else "states"


@dataclass
class Letters:
    """One letter-counting episode at a time. Defaults live in settings.py."""

    difficulty: int  # tier 1–10
    reward_kind: str  # --reward: "binary" or "partial"
    think: bool  # may the reply think before it answers?
    style: str  # --sft-style: how the expert answers, one of STYLES
    tools: ClassVar[None] = None  # there are none to call
    max_turns: ClassVar[int] = 1  # one reply, and the episode is over

    def __post_init__(self):
        for flag, value, choices in (
            ("--difficulty", self.difficulty, TIERS),
            ("--reward", self.reward_kind, ("binary", "partial")),
            ("--sft-style", self.style, STYLES),
        ):
            check_choice(f"{flag} {value}", value, choices, "letters")

    def reset(self, seed: int) -> list[dict]:
        """The opening messages of the task drawn with `seed`."""
        self.task = make_task(random.Random(seed), self.difficulty)
        self.reply = ""
        return [{"role": "user", "content": question(self.task, self.think)}]

    def step(self, reply: str) -> tuple[list[dict], bool]:
        """(new messages, is the episode over?): here always none, and yes."""
        self.reply = reply
        return [], True

    def score(self) -> dict[str, float]:
        return score_reply(self.task, self.reply, self.reward_kind, self.think)

    def expert_reply(self) -> str:
        """What SFT learns from. With --no-think the expert gives a bare answer."""
        return write_reply(self.task, self.style if self.think else "bare")


def check_choice(typed: str, value, choices, environment: str) -> None:
    """ValueError unless value is one of the choices. (All environments use it.)

    typed: the flag and its value, as the user typed them, such as "--difficulty 11".
    """
    if value not in choices:
        known = ", ".join(map(str, choices))
        raise ValueError(f"{typed}: {environment} accepts {known}; choose one of them")


if __name__ == "__main__":
    env = Letters(difficulty=6, reward_kind="binary", think=True, style="derives")
    print("user      ", env.reset(seed=7)[0]["content"])
    print("truth     ", dict(zip(env.task.letters, env.task.counts)))
    zeros = f"<answer>{json.dumps(dict.fromkeys(env.task.letters, 0))}</answer>"
    replies = {
        **{f"expert, {style}": write_reply(env.task, style) for style in STYLES},
        "bad player, all zeros": zeros,
        "bad player, two answers": zeros + zeros,
        "bad player, prose": "There are probably two of them.",
    }
    for player, reply in replies.items():
        env.step(reply)
        components = env.score().items()
        scores = {name: round(x, 2) for name, x in components if "habit" not in name}
        print(f"\n{player}, habit {habit_of(reply)!r}\n   {reply!r}\n   {scores}")
