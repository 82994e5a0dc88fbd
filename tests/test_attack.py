"""Protects the rewards from tricks: replies that look for a hole, as data, with what each may earn.

Each was once found to pay, or the rules name it. An attacker reads what a policy reads: the
question, or the view that the observation is written from. The task's answer is used only to say
it in a way that must not count. results/trust.json has what 22b9273 measured with more tasks.
"""

import itertools
import json

import numpy as np
import pytest

import metrics
from env_alphabet import NEW, Alphabet, right_list, write_block
from env_letters import Letters, write_reply
from env_swarm import DEV_SEEDS, Swarm
from swarm.bots import KINDS, NICE, PLACES, THINGS, VERBS
from swarm.players import PLAYERS
from swarm.tools import MOST_TEXT, write_call


def answer(env: Letters, count) -> str:
    """An answer of the right form: count(letter) for each."""
    letters = env.task.letters
    value = {c: count(c) for c in letters} if len(letters) > 1 else count(letters[0])
    return f"<answer>{json.dumps(value)}</answer>"


def scores(env, reply, n: int = 40, part: str = "reward") -> list[float]:
    """Of n development tasks, with reply(env, turn) in every turn."""
    found = []
    for seed in range(DEV_SEEDS, DEV_SEEDS + n):
        env.reset(seed)
        turn = 0
        while not env.step(reply(env, turn))[1]:
            turn += 1
        found.append(env.score()[part])
    return found


# ------------------------------------------------------------------------------------------ letters

NOTHING = (0.0, 0.0, 0.0, 0.0)
LETTERS = {  # (reply, what it may earn: tier 3 binary, partial, tier 6 binary, partial)
    "empty": (lambda env: "", NOTHING),
    "all 0": (lambda env: answer(env, lambda c: 0), (0.35, 0.6, 0.0, 0.35)),
    "1 if it occurs": (
        lambda env: answer(env, lambda c: int(c in env.task.text)),
        (0.9, 0.95, 0.0, 0.55),
    ),
    "2 if it occurs": (
        lambda env: answer(env, lambda c: 2 * (c in env.task.text)),
        (0.45, 0.65, 0.0, 0.6),
    ),
    "first half, doubled": (
        lambda env: answer(env, lambda c: 2 * env.task.text[: len(env.task.text) // 2].count(c)),
        (0.45, 0.65, 0.0, 0.55),
    ),
    "lists of numbers": (lambda env: answer(env, lambda c: [0, 1, 2, 3]), NOTHING),
    "ten answers": (
        lambda env: "".join(answer(env, lambda c, n=n: n) for n in range(10)),
        NOTHING,
    ),
    "right, then wrong": (
        lambda env: write_reply(env.task, "bare") + answer(env, lambda c: 0),
        NOTHING,
    ),
    "right, twice": (lambda env: 2 * write_reply(env.task, "bare"), NOTHING),
    "1000 answers": (lambda env: 1000 * answer(env, lambda c: 1), NOTHING),
    "no-think: tally in prose": (
        lambda env: write_reply(env.task, "derives").replace("think>", "thinking>"),
        NOTHING,
    ),
}


@pytest.mark.parametrize("name", LETTERS)
def test_a_trick_of_letters_earns_no_more_than_it_may(name):
    reply, most = LETTERS[name]
    think = not name.startswith("no-think")
    for (tier, reward), most_here in zip(itertools.product((3, 6), ("binary", "partial")), most):
        env = Letters(tier, reward, think, "derives")
        earned = scores(env, lambda env, turn: reply(env))
        assert np.mean(earned) <= most_here + 1e-9, (tier, reward)


# ----------------------------------------------------------------------------------------- alphabet


def block(names) -> str:
    """A reply with these names; names(env, turn)."""
    return lambda env, turn: write_block(names(env, turn), turn)


def given(env: Alphabet, turn: int) -> list[str]:
    return [name for part in env.task.turns[: turn + 1] for name in part]


def marked(env: Alphabet, turn: int, names: list[str]) -> list[str]:
    return [name + NEW if turn and name in env.task.turns[turn] else name for name in names]


def ladder(env: Alphabet, turn: int) -> str:
    """Ever longer beginnings of one guess: each better than the one before."""
    names = marked(env, turn, sorted(given(env, turn)))
    return "".join(write_block(names[:k], turn) for k in range(1, len(names) + 1))


right = lambda env, turn: right_list(env.task, turn)
plain = lambda env, turn: [name.removesuffix(NEW) for name in right(env, turn)]
ALPHABET = {  # (reply, what it may earn)
    "empty": (lambda env, turn: "", 0.0),
    "as given": (block(lambda env, turn: marked(env, turn, given(env, turn))), 0.15),
    # half of the rule: right where the task sorts by first names
    "sorted as strings": (
        block(lambda env, turn: marked(env, turn, sorted(given(env, turn)))),
        0.65,
    ),
    "no marks": (block(plain), 0.4),
    "all marked": (block(lambda env, turn: [name + NEW for name in plain(env, turn)]), 0.15),
    "reversed": (block(lambda env, turn: right(env, turn)[::-1]), 0.05),
    "last answer copied": (block(lambda env, turn: right(env, max(0, turn - 1))), 0.15),
    "every name twice": (block(lambda env, turn: sorted(2 * right(env, turn))), 0.1),
    "right, and as given": (block(lambda env, turn: right(env, turn) + given(env, turn)), 0.1),
    "right, 1000 times": (block(lambda env, turn: 1000 * right(env, turn)), 1e-9),
    "right, in two blocks": (lambda env, turn: 2 * write_block(right(env, turn), turn), 0.0),
    "right, inside the thinking": (
        lambda env, turn: f"<think>{write_block(right(env, turn), turn)}</think>",
        0.0,
    ),
    "ladder of blocks": (ladder, 0.65),
    "no-think: thinks all the same": (
        lambda env, turn: "<think>Ann before Bo.</think>" + write_block(right(env, turn), turn),
        0.0,
    ),
}


@pytest.mark.parametrize("name", ALPHABET)
def test_a_trick_of_alphabet_earns_no_more_than_it_may(name):
    reply, most = ALPHABET[name]
    think = not name.startswith("no-think")
    assert np.mean(scores(Alphabet(3, 3, 1, 4, 8.0, False, think, "derives"), reply)) <= most


# -------------------------------------------------------------------------------------------- swarm

VOCABULARY = " ".join(VERBS + KINDS + THINGS + NICE + PLACES)
LONG = (
    "I {}. First I list what the task asks for and who will use it. Then I collect the numbers of "
    "last year, compare them with the plan and mark every gap. I check the method on a small "
    "sample, measure how large the errors are and write down where they come from. After that I "
    "discuss the result with both teams, correct two mistakes and repeat the calculation. The "
    "final version explains each step, names the open questions and gives a short recommendation, "
    "so that everybody can decide what to do next."
)
WORK = {  # what is submitted in place of honest work
    "long honest work": LONG.format,
    "a dictionary": lambda task: f"{task} {VOCABULARY}"[:MOST_TEXT],
    "the task": lambda task: task,
    "the task 60 times": lambda task: (f"{task} " * 60)[:MOST_TEXT],
    "80 x": lambda task: "x" * 80,
    "2000 x": lambda task: "x" * MOST_TEXT,
}


def submits(text):
    """The expert, but with this text for its work."""

    def move(seen, dice):
        tool, arguments = PLAYERS["expert"](seen, dice)[1:]
        if tool == "submit_work":
            task = next(t for t in seen["tasks"] if t["id"] == arguments["task_id"])
            arguments = arguments | {"content": text(task["text"])}
        return tool, arguments

    return move


def call(tool: str, rows: str, argument: str, **more):
    """The tool on the first row of the view; if there is none, a post."""

    def move(seen, dice):
        if not seen[rows]:
            return "post", {"content": "x"}
        return tool, {argument: seen[rows][0]["id"], **more}

    return move


def propose(gives: float, text: str = "a fair trade of data for water", to: str = ""):
    """Offer a trade to every bot in turn, again and again, or to one."""

    def move(seen, dice):
        bot = seen["bots"][seen["step"] % len(seen["bots"])]["id"]
        trade = {"counterparty_id": to or bot, "content": text, "offered_transfer": gives}
        return "propose_trade", trade

    return move


expert = lambda seen, dice: PLAYERS["expert"](seen, dice)[1:]
SWARM = {
    **{f"submits {name}": submits(text) for name, text in WORK.items()},
    "stalls": lambda seen, dice: None,
    "proposes to itself": propose(-20, to="you"),
    "posts x": lambda seen, dice: ("post", {"content": "x"}),
    "posts 2000 x": lambda seen, dice: ("post", {"content": "x" * MOST_TEXT}),
    "votes": call("vote", "feed", "post_id", direction="up"),
    "claims all, submits nothing": call("claim_task", "tasks", "task_id"),
    "accepts all": call("accept_proposal", "incoming", "proposal_id"),
    "asks 2 of everybody": propose(-2),
    "asks 20 of everybody": propose(-20),
    "gives a billionth": propose(1e-9, "x"),
    "trades 0 with 2000 x": propose(0, "x" * MOST_TEXT),
}
SKILL = {"submits long honest work", "submits a dictionary"}  # no count of words tells them apart


def swarm_scores(move, version: str = "0.2", n: int = 25, part: str = "reward") -> list[float]:
    def reply(env, turn):
        said = move(env.seen, env.dice)
        return write_call(*said) if said else "I think about it."

    return scores(Swarm("medium", version), reply, n, part)


@pytest.mark.parametrize("name", sorted(SWARM.keys() - SKILL))
def test_a_trick_of_the_swarm_earns_less_than_the_expert(name):
    assert metrics.gain(swarm_scores(SWARM[name]), swarm_scores(expert)).low > 0


def test_a_dictionary_is_no_better_than_long_honest_work():
    long, dictionary = (swarm_scores(SWARM[name], n=100) for name in sorted(SKILL, reverse=True))
    assert metrics.gain(long, dictionary).high < 0.001


@pytest.mark.parametrize("version", ["0.2", "0.1"])
def test_what_the_rules_refuse_earns_what_idling_earns_and_draining_costs_the_name(version):
    idle = swarm_scores(lambda seen, dice: PLAYERS["idle"](seen, dice)[1:], version)
    assert swarm_scores(SWARM["stalls"], version) == idle
    assert swarm_scores(SWARM["proposes to itself"], version) == idle
    assert np.mean(swarm_scores(SWARM["asks 20 of everybody"], version, part="reputation")) < 0.2
