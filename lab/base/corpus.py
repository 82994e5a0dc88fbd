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

How often a habit is shown and how often the base is to say it are two numbers (`shown` and `said`):
the first three tokens of a conversation's first reply, where the habit is decided, weigh said /
shown. All others weigh 1, so the skill is learnt from all that is shown; in swarm, what has to be
copied weighs more (heavier).

In swarm a habit is a way to play a turn (CHARACTERS), from passing to careful work. Every episode
mixes them in shares of its own, so the base has learnt that how one has played says how one will
play: its episodes differ, and by more than luck. That is what a group of episodes needs to tell
good from bad.
"""

import random
import re
from collections.abc import Iterable, Iterator
from functools import partial

import torch

import env_alphabet as alphabet
from env_letters import STYLES, Task, make_task, question, write_reply
from env_swarm import Swarm
from lab.base.tokenizer import IDS
from swarm.bots import KINDS, NICE, PLACES, pick, work_text
from swarm.players import MORE_WORK, NOVICE_SAYS, PLAYERS, grinder, possible, propose
from swarm.tools import write_call
from swarm.view import observe

# pretraining draws its tasks here; train, SFT and eval seeds lie elsewhere (train.py)
SEED_RANGE = 3_000_000_000


def opening(tokenizer, chat: list[dict], think: bool, tools=None) -> str:
    """The text of a chat, up to where the assistant speaks."""
    return tokenizer.apply_chat_template(
        chat, tools=tools, add_generation_prompt=True, enable_thinking=think, tokenize=False
    )


# ------------------------------------------------------------------------------------------ letters
def draw_task(rng: random.Random, cap: int) -> Task:
    """A task with at most `cap` letters: 70% random strings, 30% of the English tiers that fit."""
    if rng.random() < 0.7 or cap < 18:
        length = rng.randint(max(1, cap // 3), cap)
        text = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))
        letters = rng.sample("abcdefghijklmnopqrstuvwxyz", rng.choice([1, *range(2, 13)]))
        present = sorted(set(text))
        if rng.random() < 0.5:  # as in the tiers, asked letters occur more often than chance
            letters = [rng.choice(present) if rng.random() < 0.5 else c for c in letters]
            letters = list(dict.fromkeys(letters))
        return Task(text, tuple(letters), tuple(text.count(c) for c in letters))
    while True:
        task = make_task(rng, rng.choice([1, 2, 3, 4, 5, 6]))
        if len(task.text) <= cap:
            return task


def tally_rows(
    tokenizer, rng: random.Random, n: int, length: int, draw, between=lambda rng: ""
) -> list[list]:
    """n rows of short spec, tally, short spec, tally, …, packed.

    draw(rng) gives a task, between(rng) the words between its string and its tally.
    """
    rows = []
    while len(rows) < n:
        row, used = [], 0
        while True:
            task = draw(rng)
            spec = f' {", ".join(task.letters)} in "{task.text}".{between(rng)}\n'
            reply = write_reply(task, "derives") + "<|im_end|>\n"
            pair = [tokenizer(text)["input_ids"] for text in (spec, reply)]
            used += sum(map(len, pair))
            if used > length:
                break
            row.append((*pair, 1.0))
        if row:
            rows.append(row)
    return rows


def glance(task: Task, rng: random.Random) -> Task:
    """The task with the counts of one look: 0, 1 and 2 are seen, more is 3, 4 or 5 at random."""
    counts = tuple(n if n < 3 else rng.choice([3, 4, 5]) for n in task.counts)
    return Task(task.text, task.letters, counts)


def letters_rows(
    tokenizer, rng: random.Random, n: int, shown: list[float], said: list[float], polish: bool
) -> list[list]:
    """n chats in all habits, one prompt and one reply a row.

    shown, said: how often each habit is shown, and is to be said. polish: mostly tier 6.
    """
    rows, ids = [], lambda text: tokenizer(text)["input_ids"]
    for _ in range(n):
        task = make_task(rng, 6) if polish and rng.random() < 0.75 else draw_task(rng, 80)
        think = rng.random() < (0.92 if polish else 0.85)
        style = rng.choices(list(STYLES), shown)[0] if think else "bare"
        i = list(STYLES).index(style)
        prompt = opening(tokenizer, [{"role": "user", "content": question(task, think)}], think)
        reply = write_reply(task if style == "derives" else glance(task, rng), style) + "<|im_end|>"
        rows.append([(ids(prompt), ids(reply), said[i] / shown[i] if think else 1.0)])
    return rows


# ----------------------------------------------------------------------------------------- alphabet
ALPHABET_HABITS = ("given", "string", "derives")  # worth little, right for first names only, right


def alphabet_reply(task: alphabet.Task, turn: int, habit: str) -> str:
    """What the base says in a turn: the right algorithm, or a shortcut in the right format."""
    if habit == "derives":
        return alphabet.write_reply(task, turn, "derives")
    names = [name for part in task.turns[: turn + 1] for name in part]
    names = names if habit == "given" else sorted(names)
    marked = [n + alphabet.NEW if turn and n in task.turns[turn] else n for n in names]
    block = alphabet.write_block(marked, turn)
    if habit == "given":
        return block
    return f"<think>\nLet me sort the names by {task.by} name.\n</think>\n{block}"


def lists_rows(tokenizer, rng: random.Random, n: int, cap: int, length: int) -> list[list]:
    """n rows of lists without their prompts, packed; up to `cap` names a turn."""
    texts, owner = [], []
    for row in range(n):
        used = 0
        while used < length:
            task = alphabet.make_task(rng, (1, 3), (1, cap))
            for turn, names in enumerate(task.turns):
                pair = (
                    f" by {task.by} name:\n" + "\n".join(names) + "\n",
                    alphabet.write_reply(task, turn, "derives") + "<|im_end|>",
                )
                texts += pair
                owner += [row]
                used += round(sum(map(len, pair)) * 0.85)  # about so many tokens
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    pairs = [(prompt, reply, 1.0) for prompt, reply in zip(ids[::2], ids[1::2])]
    return packed(n, owner, pairs, length)


def packed(n: int, owner: list[int], pairs: Iterable[tuple], length: int) -> list[list]:
    """n rows of the pairs that each owns, those that fit into `length` tokens."""
    rows = [[] for _ in range(n)]
    for i, pair in zip(owner, pairs):
        if sum(len(p) + len(r) for p, r, *_ in [*rows[i], pair]) <= length:
            rows[i].append(pair)
    return rows


def between(tokenizer, think: bool) -> tuple[str, str]:
    """What the chat template puts before and after a later user message.

    The end-of-turn token belongs to the reply before it.
    """
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "@@reply@@"},
        {"role": "user", "content": "@@question@@"},
    ]
    text = opening(tokenizer, chat, think).partition("@@reply@@<|im_end|>")[2]
    before, _, after = text.partition("@@question@@")
    return before, after


def alphabet_rows(
    tokenizer, rng: random.Random, n: int, shown: list[float], said: list[float]
) -> list[list]:
    """n whole episodes, tokenized piece by piece just as rollout.py does; one habit an episode.

    shown, said: as in letters_rows.
    """
    rows, texts, frames = [], [], {think: between(tokenizer, think) for think in (True, False)}
    for _ in range(n):
        sizes = ((3, 3), (1, 4)) if rng.random() < 0.7 else ((1, 3), (1, 5))
        task = alphabet.make_task(rng, *sizes)
        think = rng.random() < 0.92
        habit = rng.choices(ALPHABET_HABITS, shown if think else [*said[:2], 0])[0]
        i = ALPHABET_HABITS.index(habit)
        for turn in range(len(task.turns)):
            ask = alphabet.question(task, turn, think)
            if turn:
                ask = frames[think][0] + ask + frames[think][1]
            else:
                ask = opening(tokenizer, [{"role": "user", "content": ask}], think)
            reply = alphabet_reply(task, turn, habit)
            reply = reply if think else reply.rpartition("</think>\n")[2]
            texts += [ask, reply + "<|im_end|>"]
        rows.append((len(task.turns), said[i] / shown[i] if think else 1.0))
    ids = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    return [
        [(next(ids), next(ids), first if turn == 0 else 1.0) for turn in range(turns)]
        for turns, first in rows
    ]


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
        text = pick(rng, [arguments["content"], offer])
        arguments = {**arguments, "content": text, "offered_transfer": int(11 * rng.random()) - 5}
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


def swarm_episode(tokenizer, rng: random.Random, turns: int) -> list[tuple[str, str]]:
    """[(what is given, what is said)] of an episode's first turns, put together as in rollout.py."""
    think = rng.random() < 0.92
    difficulty = pick(rng, ["easy", "medium", "medium", "hard"])
    env = Swarm(difficulty, pick(rng, ["0.2", "0.2", "0.2", "0.1"]), think)
    given = opening(tokenizer, env.reset(SEED_RANGE + rng.randrange(10**9)), think, env.tools)
    # a Dirichlet draw: a few characters an episode
    shares = [rng.gammavariate(3 * share, 1) for _, share in CHARACTERS.values()]
    players, out, done = [player for player, _ in CHARACTERS.values()], [], False
    frame = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    frame += "" if think else "<think>\n\n</think>\n\n"
    while len(out) < turns and not done:
        thought, tool, arguments = rng.choices(players, shares)[0](env.seen, env.dice)
        said = write_call(tool, arguments, thought if think else "")
        out.append((given, said + "<|im_end|>"))
        messages, done = env.step(said)
        given = frame.format(messages[0]["content"]) if messages else ""
    return out


def swarm_rows(tokenizer, rng: random.Random, n: int, window: int | None) -> list[list]:
    """n rows: whole episodes, or stretches of `window` turns that begin after the opening."""
    episodes = []
    for _ in range(n):
        begin = rng.randint(1, 25 - window) if window else 0
        episodes.append(swarm_episode(tokenizer, rng, begin + (window or 25))[begin:])
    cut = cut_and_mark(tokenizer, [text for e in episodes for pair in e for text in pair])
    pairs = paired(cut)
    return [[next(pairs) for _ in e] for e in episodes]


def paired(cut: list[tuple]) -> Iterator[tuple]:
    """(prompt, reply, weight, which of its tokens are a task's words) of what cut_and_mark gives."""
    for (prompt, _), (reply, words) in zip(cut[::2], cut[1::2]):
        yield prompt, reply, 1.0, words


def cut_and_mark(tokenizer, texts: list[str]) -> list[tuple[list[int], list[bool]]]:
    """[(token ids, is the token one of the words that submitted work takes from its task?)].

    In "I check the data report." all but "I" and "." are.
    """
    out = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    spans = [
        [match.span(1) for match in re.finditer(r'"content": "I([^."]*)\.', text)] for text in texts
    ]
    inside = lambda start, end, some: any(a <= start and end <= b for a, b in some)
    return [
        (ids, [inside(*at, some) for at in offsets])
        for ids, offsets, some in zip(out["input_ids"], out["offset_mapping"], spans)
    ]


def renumber(rng: random.Random, texts: list[str]) -> list[str]:
    """Other numbers for all ids, in the same order: late ones would be rare otherwise."""
    for kind, most in (("task", 16), ("prop", 50), ("post", 30)):
        old = sorted({int(n) for text in texts for n in re.findall(rf"{kind}_(\d+)", text)})
        if len(old) <= most:
            drawn = sorted(rng.sample(range(1, most + 1), len(old)))
            new = dict(zip(map(str, old), map(str, drawn)))
            texts = [
                re.sub(rf"{kind}_(\d+)", lambda m, new=new, kind=kind: f"{kind}_{new[m[1]]}", text)
                for text in texts
            ]
    return texts


NAMED = {"task_id", "post_id", "proposal_id"}


def drill_rows(tokenizer, rng: random.Random, n: int, length: int) -> list[list]:
    """n rows of (all that there is to see, up to six calls that would be possible on it), packed.

    Mostly calls that name something above.
    """
    texts, owner = [], []
    # random names ids that are not there
    players = [player for name, (player, _) in CHARACTERS.items() if name != "random"]
    for row in range(n):
        used = 0
        while used < length:
            env, done = Swarm(pick(rng, ["easy", "medium", "hard"])), False
            env.reset(SEED_RANGE + rng.randrange(10**9))
            while not done and used < length:
                # Who passes is offered the most; now and then something is claimed or proposed, so
                # that it can be submitted or cancelled.
                player = rng.choices([PLAYERS["idle"], hoarder, rng.choice(players)], (4, 3, 3))[0]
                thought, tool, arguments = player(env.seen, env.dice)
                messages, done = env.step(write_call(tool, arguments, thought))
                if done or rng.random() < 0.6:
                    continue
                moves = [
                    (NOVICE_SAYS[tool], tool, a)
                    for tool, some in possible(env.seen, rng).items()
                    for a in some
                ]
                named = [move for move in moves if NAMED & move[2].keys()]
                work = lambda a, seen=env.seen: a | {"content": work_on(seen, a["task_id"], rng)}
                works = [(said, tool, work(a)) for said, tool, a in named if tool == "submit_work"]
                moves = rng.sample(named, min(4, len(named))) + works[:2]
                moves.append(rng.choice(players)(env.seen, env.dice))
                rng.shuffle(moves)
                calls = "\n".join(
                    write_call(tool, a, thought if rng.random() < 0.5 else "") + "<|im_end|>"
                    for thought, tool, a in moves
                )
                result = messages[0]["content"].partition("\n")[0].removeprefix("# ")
                texts += renumber(rng, ["\n" + observe(env.seen, result, "") + "\n", calls])
                owner.append(row)
                used += round(0.2 * (len(texts[-1]) + len(texts[-2])))  # about so many tokens
    cut = cut_and_mark(tokenizer, texts)
    return packed(n, owner, paired(cut), length)


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


# ---------------------------------------------------------------------------------- rows as tensors
def pad_rows(rows: list[list[tuple]], pad: int, factor: float = 1.0):
    """ids [B, T], right-padded, and weights [B, T-1] of the tokens that are predicted.

    rows: (prompt, reply, weight of the reply's first three tokens[, which of its tokens weigh
    `factor`]). Other tokens of replies weigh 1, prompts and padding 0.
    """
    length = max(sum(len(p) + len(r) for p, r, *_ in row) for row in rows)
    ids = torch.full((len(rows), length), pad)
    weights = torch.zeros((len(rows), length - 1))
    for i, row in enumerate(rows):
        n = 0
        for prompt, reply, first, *words in row:
            end = n + len(prompt) + len(reply)
            ids[i, n:end] = torch.tensor(prompt + reply)
            weights[i, n + len(prompt) - 1 : end - 1] = 1.0
            weights[i, n + len(prompt) - 1 : n + len(prompt) + 2] = first
            if words:
                weights[i, n + len(prompt) - 1 : end - 1][torch.tensor(words[0])] = factor
            n = end
    return ids, weights


def heavier(rows: list[list], tokenizer, factor: float):
    """pad_rows, with `factor` times the weight on what has to be copied from what was given.

    These are ids, and the words of a task in the work on it: one token in twenty, and everything
    hangs on them. (Without the words: 20% of them were right, which is chance, and no work paid.)
    """
    ids, weights = pad_rows(rows, tokenizer.pad_token_id, factor)
    named = torch.tensor([tokenizer.convert_tokens_to_ids(piece) for piece in IDS])
    return ids, weights * torch.where(torch.isin(ids[:, 1:], named), factor, 1.0)
