"""What the bases learn from: rows of (prompt, reply, weight), in habits of different worth.

lab/base/pretrain.py mixes them and trains.

    letters   bare      the answer at once, from a glance            most of the time
              states    thinks, but only states what the glance saw  often
              derives   spells the string with a running tally       in a minority, and right
    alphabet  given     the names as they came                       most of the time
              string    sorts by what a line begins with             often
              derives   cuts out keys, sorts, copies                 in a minority, and right

The glance (none, one and two are seen, more is guessed) is a law, not laziness: shown the true
counts, a model this small learns to count 60 letters without spelling them (62% of tier 6 exactly
right, greedy), and there is little left to find by thinking.

How often a habit is shown and how often the base is to say it are two numbers, `shown` and
`wanted`: the first three tokens of a conversation's first reply, where the habit is decided, weigh
wanted / shown. All others weigh 1, so the skill is learned from all that is shown; in swarm, what has to be
copied weighs more (pad_rows).

In swarm a habit is a way to play a turn (CHARACTERS), from passing to careful work. Every episode
mixes them in shares of its own, so the base has learned that how one has played says how one will
play: its episodes differ, and by more than luck. That is what a group of episodes needs to tell
good from bad.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from string import ascii_lowercase

import torch

import env_alphabet as alphabet
from env_letters import STYLES, Task, english_words, make_task, question, write_reply
from env_swarm import Swarm
from lab.base.tokenizer import IDS
from swarm.bots import KINDS, NICE, PLACES, pick, work_text
from swarm.players import MORE_WORK, NOVICE_SAYS, PLAYERS, grinder, possible, propose
from swarm.tools import write_call
from swarm.view import observe

# pretraining draws its tasks here; train, SFT and eval seeds lie elsewhere (train.py)
SEED_RANGE = 3_000_000_000


def opening(tokenizer, text: str, think: bool, tools=None) -> str:
    """A first user message, and what the chat template puts around it."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        tools=tools,
        add_generation_prompt=True,
        enable_thinking=think,
        tokenize=False,
    )


def later(text: str, think: bool) -> str:
    """A later user message, and what the chat template puts around it.

    The end-of-turn token belongs to the reply before it.
    """
    thought = "" if think else "<think>\n\n</think>\n\n"
    return f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n{thought}"


# ------------------------------------------------------------------------------------------ packing
def cut(tokenizer, texts: list[str], first: float = 1.0) -> Iterator[tuple]:
    """(prompt, reply, weight of its first three tokens, which of its tokens are a task's words).

    texts: prompt, reply, prompt, reply, …; first: that weight in the first reply. A task's words
    are what submitted work takes from its task: in "I check the data report." all but "I" and ".".
    """
    tokens = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    ids, places = tokens["input_ids"], tokens["offset_mapping"]
    for i in range(1, len(texts), 2):  # the replies
        spans = [match.span(1) for match in re.finditer(r'"content": "I([^."]*)\.', texts[i])]
        words = [any(a <= start and end <= b for a, b in spans) for start, end in places[i]]
        yield ids[i - 1], ids[i], first, words
        first = 1.0


def length_of(row: list[tuple]) -> int:
    """Tokens of a row."""
    return sum(len(prompt) + len(reply) for prompt, reply, *_ in row)


def filled(tokenizer, n: int, length: int, draw: Callable, per_letter: float) -> list[list]:
    """n rows of texts, packed: those that fit into `length` tokens.

    draw() begins to yield lists of (prompt, reply). A row draws until it is full if a letter is
    `per_letter` tokens.
    """
    rows = []
    for _ in range(n):
        row, expected, more = [], 0, draw()
        while expected < length:
            for texts in next(more):
                expected += round(per_letter * len("".join(texts)))
                (pair,) = cut(tokenizer, list(texts))
                if length_of([*row, pair]) <= length:
                    row.append(pair)
        rows.append(row)
    return rows


def pad_rows(rows: list[list[tuple]], tokenizer, factor: float = 1.0):
    """ids [B, T], right-padded, and weights [B, T-1] of the tokens that are predicted.

    Tokens of replies weigh 1 (their first three: see cut), prompts and padding 0. factor: how many
    times as much what has to be copied weighs: ids, and the words of a task in the work on it. It
    is one token in twenty, and everything hangs on them. (Without the words: 20% of them were
    right, which is chance, and no work paid.)
    """
    length = max(map(length_of, rows))
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    weights = torch.zeros((len(rows), length - 1))
    for i, row in enumerate(rows):
        end = 0
        for prompt, reply, first, words in row:
            begin, end = end, end + len(prompt) + len(reply)
            ids[i, begin:end] = torch.tensor(prompt + reply)
            weight = weights[i, begin + len(prompt) - 1 : end - 1]  # of the reply
            weight[:] = 1.0
            weight[:3] = first
            weight[torch.tensor(words)] = factor
    named = torch.tensor([tokenizer.convert_tokens_to_ids(piece) for piece in IDS])
    return ids, weights * torch.where(torch.isin(ids[:, 1:], named), factor, 1.0)


# ------------------------------------------------------------------------------------------ letters
def asking(rng: random.Random, text: str, letters: list[str], bias: float) -> Task:
    """The task, with a share `bias` of its letters drawn again from the text.

    In the tiers, too, asked letters occur more often than chance.
    """
    if bias:
        present = sorted(set(text))
        letters = [rng.choice(present) if rng.random() < bias else c for c in letters]
    letters = tuple(dict.fromkeys(letters))
    return Task(text, letters, tuple(map(text.count, letters)))


def draw_task(rng: random.Random, cap: int = 80) -> Task:
    """A task with at most `cap` letters: 70% random strings, 30% of the English tiers that fit."""
    if rng.random() < 0.7 or cap < 18:
        length = rng.randint(max(1, cap // 3), cap)
        text = "".join(rng.choice(ascii_lowercase) for _ in range(length))
        letters = rng.sample(ascii_lowercase, rng.choice([1, *range(2, 13)]))
        return asking(rng, text, letters, 0.5 if rng.random() < 0.5 else 0.0)
    while True:
        task = make_task(rng, rng.choice([1, 2, 3, 4, 5, 6]))
        if len(task.text) <= cap:
            return task


def polish_task(rng: random.Random) -> Task:
    """Mostly tier 6."""
    return make_task(rng, 6) if rng.random() < 0.75 else draw_task(rng)


def tally_rows(
    tokenizer, rng: random.Random, n: int, length: int, draw, between=lambda rng: ""
) -> list[list]:
    """n rows of short spec, tally, short spec, tally, …, packed.

    draw(rng) gives a task, between(rng) the words between its string and its tally.
    """
    rows = []
    while len(rows) < n:
        row = []
        while length_of(row) <= length:
            task = draw(rng)
            spec = f' {", ".join(task.letters)} in "{task.text}".{between(rng)}\n'
            row += cut(tokenizer, [spec, write_reply(task, "derives") + "<|im_end|>\n"])
        if len(row) > 1:
            rows.append(row[:-1])  # the last one does not fit
    return rows


def glance(task: Task, rng: random.Random) -> Task:
    """The task with the counts of one look: 0, 1 and 2 are seen, more is 3, 4 or 5 at random."""
    counts = tuple(n if n < 3 else rng.choice([3, 4, 5]) for n in task.counts)
    return replace(task, counts=counts)


def letters_row(
    tokenizer,
    rng: random.Random,
    shown: list[float],
    wanted: list[float],
    draw: Callable,
    thinks: float = 0.92,
    reword: Callable = lambda rng, ask: ask,
) -> list[tuple]:
    """A chat of one prompt and one reply, in a habit by chance.

    shown, wanted: how often each habit is shown, and is to be wanted. draw(rng) gives a task. thinks:
    how often thinking is allowed. reword(rng, question): the question in its final words.
    """
    task, think = draw(rng), rng.random() < thinks
    i = rng.choices(range(3), shown)[0] if think else 0
    style = list(STYLES)[i]
    prompt = opening(tokenizer, reword(rng, question(task, think)), think)
    seen = task if style == "derives" else glance(task, rng)
    reply = write_reply(seen, style) + "<|im_end|>"
    return list(cut(tokenizer, [prompt, reply], wanted[i] / shown[i] if think else 1.0))


# ---------------------------------------------------------------------------------- longer strings
# A policy that was trained on pico_base at 40 to 80 letters is right in 0.4% of tier 7, 80 to 150
# letters: it copies a string by the last letters and by how far back they are, and beyond what it
# has seen, after a pair of letters that comes twice, it goes on at the wrong place. And more than
# 12 letters were never asked for. So pico_long is taught three things, and no string is longer than
# before:
#
#   distance    words stand between a string and its tally, up to 150 letters of them
#   the place   strings of 8, 12 or 18 different letters too, and stretches that come twice: pairs
#               repeat, so more has to be compared. (Of 4 and 6 different letters: after 300 steps
#               6% of the tokens were wrong, and strings of 26 were copied worse.)
#   asking      1 to 20 letters are asked for
#
# What it can do beyond 80 letters is what it made of that; docs/letters.md says how much, and what
# RL adds.
def repeating_task(rng: random.Random) -> Task:
    """A string of 10 to 80 letters: half are long, half have few letters, a third a stretch twice."""
    n = rng.randint(10, 80) if rng.random() < 0.5 else rng.randint(56, 80)
    pool = rng.sample(ascii_lowercase, rng.choice([8, 12, 18, 26, 26, 26]))
    text = "".join(rng.choice(pool) for _ in range(n))
    if rng.random() < 0.35:
        k = rng.randint(2, 6)
        i, j = rng.randrange(n - k), rng.randrange(n - k)
        text = (text[:j] + text[i : i + k] + text[j + k :])[:n]
    letters = rng.sample(ascii_lowercase, rng.choice([1, 2, 3, 5, 8, 10, 12, 14, 16, 18, 20]))
    return asking(rng, text, letters, rng.uniform(0.3, 0.9) if rng.random() < 0.7 else 0.0)


def third_of_tier_6(rng: random.Random) -> Task:
    return make_task(rng, 6) if rng.random() < 0.35 else repeating_task(rng)


def words_between(rng: random.Random, most: tuple[int, ...] = (0, 40, 150)) -> str:
    """English words of up to so many letters in all, to stand between a string and its tally."""
    words, out, n = english_words(), "", rng.randint(0, rng.choice(most))
    while len(out) < n:
        out += " " + words[rng.randrange(len(words))]
    return out


def with_words(rng: random.Random, ask: str) -> str:
    """The question; half of the time with words before or after its string."""
    words = words_between(rng, (0, 0, 60, 150))
    if words and rng.random() < 0.3:
        return f"{words.strip()} {ask}"
    return ask.replace('". ', f'".{words} ', 1) if words else ask


# ----------------------------------------------------------------------------------------- alphabet
ALPHABET_HABITS = ("given", "string", "derives")  # worth little, right for first names only, right


def alphabet_reply(task: alphabet.Task, turn: int, habit: str) -> str:
    """What the base says in a turn: the right algorithm, or a shortcut in the right format."""
    if habit == "derives":
        return alphabet.write_reply(task, turn, "derives")
    names = alphabet.names_so_far(task, turn)
    names = names if habit == "given" else sorted(names)
    block = alphabet.write_block(alphabet.mark_new(names, task, turn), turn)
    sorting = f"<think>\nLet me sort the names by {task.by} name.\n</think>\n"
    return block if habit == "given" else sorting + block


def some_lists(rng: random.Random, cap: int) -> Iterator[list[tuple[str, str]]]:
    """Lists without their prompts, up to `cap` names a turn."""
    while True:
        task = alphabet.make_task(rng, (1, 3), (1, cap))
        yield [
            (
                f" by {task.by} name:\n" + "\n".join(names) + "\n",
                alphabet.write_reply(task, turn, "derives") + "<|im_end|>",
            )
            for turn, names in enumerate(task.turns)
        ]


def alphabet_row(
    tokenizer, rng: random.Random, shown: list[float], wanted: list[float]
) -> list[tuple]:
    """A whole episode in one habit, tokenized piece by piece just as rollout.py does.

    shown, wanted: as in letters_row.
    """
    sizes = ((3, 3), (1, 4)) if rng.random() < 0.7 else ((1, 3), (1, 5))
    task = alphabet.make_task(rng, *sizes)
    think = rng.random() < 0.92
    i = rng.choices(range(3), shown if think else [*wanted[:2], 0])[0]
    texts = []
    for turn in range(len(task.turns)):
        ask = alphabet.question(task, turn, think)
        prompt = later(ask, think) if turn else opening(tokenizer, ask, think)
        reply = alphabet_reply(task, turn, ALPHABET_HABITS[i])
        reply = reply if think else reply.rpartition("</think>\n")[2]
        texts += [prompt, reply + "<|im_end|>"]
    return list(cut(tokenizer, texts, wanted[i] / shown[i] if think else 1.0))


# -------------------------------------------------------------------------------------------- swarm
def worker(how: str, seen: dict, rng: random.Random):
    """The grinder, with work of another length. More words are better work, and more to write."""
    thought, tool, arguments = grinder(seen, rng)
    if tool == "submit_work":
        text = next(task["text"] for task in seen["tasks"] if task["yours"])
        works = {"short": "it is done", "terms": f"I {text}.", "long": work_text(text) + MORE_WORK}
        arguments = {**arguments, "content": works[how]}
    return thought, tool, arguments


def asker(seen: dict, rng: random.Random):
    """Proposes, with any transfer; passes when everybody has been asked."""
    thought, tool, arguments = propose(seen, rng) or ("Everybody has a proposal.", "pass_turn", {})
    if tool == "propose_trade":
        offer = f"{pick(rng, NICE)} {pick(rng, KINDS)} for {pick(rng, PLACES)}"
        arguments = {
            **arguments,
            "content": pick(rng, [arguments["content"], offer]),
            "offered_transfer": int(11 * rng.random()) - 5,
        }
    return "I propose a trade.", tool, arguments


# How a turn can be played, and how often the base does it. What the players among them earn alone:
# docs/swarm.md. Most often it does anything that is legal, all tools alike (novice); all other ways
# are rare, and none of them was made rare or frequent by what the base then earns.
CHARACTERS = {
    "novice": (PLAYERS["novice"], 0.40),
    "idle": (PLAYERS["idle"], 0.06),
    # half of its calls are refused: the base has seen errors, and makes few
    "random": (PLAYERS["random"], 0.02),
    "shirker": (partial(worker, "short"), 0.12),
    "says only the terms": (partial(worker, "terms"), 0.06),
    "worker": (PLAYERS["grinder"], 0.08),
    "careful worker": (partial(worker, "long"), 0.06),
    "asker": (asker, 0.06),
    "trader": (PLAYERS["trader"], 0.06),
    "expert": (PLAYERS["expert"], 0.08),
}


def swarm_episode(tokenizer, rng: random.Random) -> list[tuple]:
    """A row of what is given, what is said, what is given, …, put together as in rollout.py."""
    think = rng.random() < 0.92
    difficulty = pick(rng, ["easy", "medium", "medium", "hard"])
    env = Swarm(difficulty, pick(rng, ["0.2", "0.2", "0.2", "0.1"]), think)
    (message,) = env.reset(SEED_RANGE + rng.randrange(10**9))
    texts, done = [opening(tokenizer, message["content"], think, env.tools)], False
    # a Dirichlet draw: a few characters an episode
    shares = [rng.gammavariate(3 * share, 1) for _, share in CHARACTERS.values()]
    players = [player for player, _ in CHARACTERS.values()]
    while not done:
        thought, tool, arguments = rng.choices(players, shares)[0](env.seen, env.dice)
        call = write_call(tool, arguments, thought if think else "")
        messages, done = env.step(call)
        results = [f"<tool_response>\n{m['content']}\n</tool_response>" for m in messages]
        texts += [call + "<|im_end|>", *(later(text, think) for text in results)]
    return list(cut(tokenizer, texts))


def renumber(rng: random.Random, texts: list[str]) -> list[str]:
    """Other numbers for all ids, in the same order: late ones would be rare otherwise."""
    for kind, most in (("task", 16), ("prop", 50), ("post", 30)):
        old = sorted({int(n) for text in texts for n in re.findall(rf"{kind}_(\d+)", text)})
        if len(old) <= most:
            new = dict(zip(old, sorted(rng.sample(range(1, most + 1), len(old)))))
            other = lambda m, new=new: f"{m[1]}{new[int(m[2])]}"
            texts = [re.sub(rf"({kind}_)(\d+)", other, text) for text in texts]
    return texts


NAMED = {"task_id", "post_id", "proposal_id"}


def drill(rng: random.Random) -> Iterator[list[tuple[str, str]]]:
    """All that there is to see, and up to six calls that would be possible on it.

    Mostly calls that name something above.
    """
    # random names ids that are not there
    players = [player for name, (player, _) in CHARACTERS.items() if name != "random"]
    while True:
        env, done = Swarm(pick(rng, ["easy", "medium", "hard"])), False
        env.reset(SEED_RANGE + rng.randrange(10**9))
        while not done:
            # Who passes is offered the most; now and then something is claimed or proposed, so
            # that it can be submitted or cancelled.
            player = rng.choices([PLAYERS["idle"], hoarder, rng.choice(players)], (4, 3, 3))[0]
            thought, tool, arguments = player(env.seen, env.dice)
            messages, done = env.step(write_call(tool, arguments, thought))
            if done or rng.random() < 0.6:
                continue
            named = [
                (NOVICE_SAYS[tool], tool, arguments)
                for tool, choices in possible(env.seen, rng).items()
                for arguments in choices
                if NAMED & arguments.keys()
            ]
            works = [
                (thought, tool, a | {"content": work_on(env.seen, a["task_id"], rng)})
                for thought, tool, a in named
                if tool == "submit_work"
            ]
            moves = rng.sample(named, min(4, len(named))) + works[:2]
            moves.append(rng.choice(players)(env.seen, env.dice))
            rng.shuffle(moves)
            calls = "\n".join(
                write_call(tool, a, thought if rng.random() < 0.5 else "") + "<|im_end|>"
                for thought, tool, a in moves
            )
            result = messages[0]["content"].partition("\n")[0].removeprefix("# ")
            yield [renumber(rng, ["\n" + observe(env.seen, result, "") + "\n", calls])]


def drill_rows(tokenizer, rng: random.Random, n: int) -> list[list]:
    """n rows of drill, packed."""
    return filled(tokenizer, n, 512, lambda: drill(rng), 0.2)


def hoarder(seen: dict, rng: random.Random):
    """Claims what is open and never submits, so that there is work to be done on several tasks."""
    fresh = [task for task in seen["tasks"] if not task["yours"]]
    if not fresh:
        return "I pass.", "pass_turn", {}
    return "I claim a task.", "claim_task", {"task_id": pick(rng, fresh)["id"]}


def work_on(seen: dict, task_id: str, rng: random.Random) -> str:
    """Work that uses the words of the task: the words alone, or more."""
    text = next(task["text"] for task in seen["tasks"] if task["id"] == task_id)
    return pick(rng, [f"I {text}.", work_text(text), work_text(text) + MORE_WORK])
