"""How pico_base/ and pico_swarm/ were made: a 0.9M-parameter Qwen3 from nothing, on two CPU cores, seeded.

    python -m lab.pretrain --stop-after 6 --out pico_base                                    # two to three hours
    python -m lab.pretrain --start-from pico_base --skip-rounds 6 --out pico_swarm           # half an hour more

What the base has to be: a chat model that *can* do the right thing and mostly does not. Then RL has something
to find. It is trained on replies in three habits of different worth:

    letters                                                    alphabet
    bare      the answer at once, from a glance                given     the names as they came              most of the time
    states    thinks, but only states what the glance saw      string    sorts by what a line begins with    often
    derives   spells the string with a running tally: right    derives   cuts out keys, sorts, copies: right in a minority

The glance (none, one and two are seen, more is guessed) is a law, not laziness: shown the true counts, a model this small learns to count 60
letters without spelling them (62% of tier 6 exactly right, greedy), and there is little left to find by thinking.

RL picks among habits far faster than it repairs a skill: a base whose tally was 57% right capped the whole
GRPO run near 66%, one at 92% capped it at 90%. So the skill is trained to the end and only its *frequency*
is kept low. The two are taken apart by weights: `derives` is most of the examples, but the first three
tokens of a conversation's first reply, where the habit is decided, weigh as if it were 12%. (Fading the examples themselves from 90%
to 12% in the last third left the tally at 82%.)

Rounds, each from a fresh learning rate down to nothing:

    skill    tallies back to back with hardly any prompt, so that nearly every token teaches copying and counting; strings grow from 12 to
             80 letters. The loss stands still for some 250 steps, near what letters cost when guessed, and then falls: the heads that
             find "what came after this, last time" have formed. (Chat prompts from the start did arrive as well, but the fall came
             after 750 steps of twice the length: prompts are mostly words that teach nothing.) Its last steps are chats.
    polish   more chats, mostly long tallies. Before it a tally was right in 86% of the cases (greedy), its mistakes in copying where two
             letters in a row occur twice, and GRPO stood still at that ceiling.
    lists    the same idea for alphabet: lists back to back, growing from 2 to 5 names a turn, with a third of tallies so that
             they are not forgotten. Copying is there already: the loss falls after 250 steps.
    both     chats of both environments in all habits.
    calls    skill first again, for swarm: an observation, six calls that would be possible on it, the next observation, …, packed. Half of the
             tokens are said, and most of those are copied. (Stretches of episodes, with one call after each observation: after 220 steps
             hardly an id was copied right.)
    all      chats of all three, swarm's as whole episodes of 4,000 tokens and as stretches of eight turns.

In swarm a habit is a way to play a turn (CHARACTERS), from passing to careful work. Every episode mixes them in shares of its own, so the
base has learnt that how one has played says how one will play: its episodes differ, and by more than luck. That is what a group of
episodes needs to tell good from bad.

pico_swarm is a folder of its own because the last two rounds cost something: GRPO on alphabet, the same command, ends at 0.830 [0.800, 0.858] from it and at
0.948 [0.932, 0.964] from pico_base. More rehearsal in `calls` and `all` is the next thing to try; then one base can serve all three.

Neither was made in one go: every round was added when its environment came, with --start-from; pico_base keeps the tokenizer of its time, which cuts letters and
alphabet just as today's does. `calls` was run twice: in its first 300 steps an id weighed as much as any other token, and none was
copied; in the next 300, with the eightfold weight, that took some 80 steps.
"""

import json
import math
import random
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from tqdm import tqdm
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import env_alphabet as alphabet
from env_letters import STYLES, Task, make_task, question, write_reply
from env_swarm import Swarm
from lab.tokenizer import IDS, build
from swarm_bots import KINDS, NICE, PLACES, pick, work_text
from swarm_players import NOVICE_SAYS, PLAYERS, grinder, possible, propose
from swarm_tools import write_call

SEED_RANGE = 3_000_000_000  # pretraining draws its tasks here; train, SFT and eval seeds lie elsewhere (train.py)


@dataclass
class Pretrain:
    out: str = "pico_swarm"  # folder to write, in Hugging Face format
    seed: int = 0
    skill_steps: int = 2600  # optimizer steps of the first phase, about 0.32 s each
    chat_steps: int = 800  # and of the second, about 0.5 s each
    batch: int = 64  # replies a step (chat); the skill phase packs 32 rows of 256 to 320 tokens
    lr: float = 3e-3  # peak; linear warm-up over 100 steps, then cosine to zero over both phases
    habits: list[float] = field(default_factory=lambda: [0.60, 0.28, 0.12])  # how often it says: bare, states, derives
    shown: list[float] = field(default_factory=lambda: [0.20, 0.20, 0.60])  # how often each is shown in the chat phase
    polish_steps: list[int] = field(default_factory=lambda: [1000, 500])  # rounds of a third phase: mostly long tallies, each
    # from a fresh and smaller learning rate to zero
    polish_shown: list[float] = field(default_factory=lambda: [0.08, 0.08, 0.84])
    polish_lr: float = 2e-3
    lists_steps: int = 2000  # the same skill-first recipe for alphabet: lists packed back to back, with rows of tallies beside them …
    both_steps: list[int] = field(default_factory=lambda: [800, 600])  # … then chats of both environments
    calls_steps: int = 300  # swarm's tool calls, with some lists and tallies beside them
    all_steps: int = 200  # chats of all three environments
    start_from: str = ""  # a folder written by an earlier call: skip …
    skip_rounds: int = 0  # … so many rounds, those that it has been through (the first is skill and chat)
    stop_after: int = 0  # stop after so many rounds; 0 does all
    threads: int = 2


def draw_task(rng: random.Random, cap: int) -> Task:
    """A task with at most `cap` letters: 70% random strings, 30% of the English tiers that fit."""
    if rng.random() < 0.7 or cap < 18:
        length = rng.randint(max(1, cap // 3), cap)
        text = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))
        letters = rng.sample("abcdefghijklmnopqrstuvwxyz", rng.choice([1, *range(2, 13)]))
        present = sorted(set(text))
        if rng.random() < 0.5:  # as in the tiers, asked letters occur more often than chance
            letters = list(dict.fromkeys([rng.choice(present) if rng.random() < 0.5 else c for c in letters]))
        return Task(text, tuple(letters), tuple(text.count(c) for c in letters))
    while True:
        task = make_task(rng, rng.choice([1, 2, 3, 4, 5, 6]))
        if len(task.text) <= cap:
            return task


def skill_batch(cfg: Pretrain, tokenizer, step: int):
    """([(ids [16, T], weights [16, T-1])] x 2, longest string): short spec, tally, short spec, tally, …, packed."""
    rng = random.Random(SEED_RANGE + cfg.seed * 1_000_000 + step)
    cap = round(12 + 68 * min(1.0, step / (0.42 * cfg.skill_steps)))
    length = 256 if cap < 50 else 320
    rows = []
    while len(rows) < 32:
        row = []
        while True:
            task = draw_task(rng, cap)
            prompt = tokenizer(f' {", ".join(task.letters)} in "{task.text}".\n')["input_ids"]
            reply = tokenizer(write_reply(task, "derives") + "<|im_end|>\n")["input_ids"]
            if sum(len(p) + len(r) for p, r, _ in row) + len(prompt) + len(reply) > length:
                break
            row.append((prompt, reply, 1.0))
        rows.append(row)
    return [pad_rows(rows[:16], tokenizer.pad_token_id), pad_rows(rows[16:], tokenizer.pad_token_id)], cap


def glance(task: Task, rng: random.Random) -> Task:
    """The task with the counts that one look gives: 0, 1 and 2 are seen as they are, more is 3, 4 or 5 at random."""
    return Task(task.text, task.letters, tuple(n if n < 3 else rng.choice([3, 4, 5]) for n in task.counts))


def chat_batch(cfg: Pretrain, tokenizer, step: int, polish: bool):
    """([(ids [B/2, T], weights [B/2, T-1])] x 2, longest string): one prompt and one reply a row, in all habits."""
    rng = random.Random(SEED_RANGE + cfg.seed * 1_000_000 + 500_000 + step)
    shown = cfg.polish_shown if polish else cfg.shown
    prompts, replies, first = [], [], []
    for _ in range(cfg.batch):
        task = make_task(rng, 6) if polish and rng.random() < 0.75 else draw_task(rng, 80)
        think = rng.random() < (0.92 if polish else 0.85)
        style = rng.choices(list(STYLES), shown)[0] if think else "bare"
        i = list(STYLES).index(style)
        first.append(cfg.habits[i] / shown[i] if think else 1.0)
        prompts.append(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question(task, think)}],
                add_generation_prompt=True, enable_thinking=think, tokenize=False,
            )
        )  # fmt: skip
        replies.append(write_reply(task if style == "derives" else glance(task, rng), style) + "<|im_end|>")
    rows = [[pair] for pair in zip(tokenizer(prompts)["input_ids"], tokenizer(replies)["input_ids"], first)]
    rows.sort(key=lambda row: len(row[0][0]) + len(row[0][1]))
    half = len(rows) // 2  # the shorter half is padded less
    return [pad_rows(rows[:half], tokenizer.pad_token_id), pad_rows(rows[half:], tokenizer.pad_token_id)], 80


ALPHABET_HABITS = ("given", "string", "derives")  # worth little, right for first names only, right


def alphabet_reply(task: alphabet.Task, turn: int, habit: str) -> str:
    """What the base says in a turn: the right algorithm, or one of two shortcuts in the right format."""
    if habit == "derives":
        return alphabet.write_reply(task, turn, "derives")
    names = [name for part in task.turns[: turn + 1] for name in part]
    names = names if habit == "given" else sorted(names)
    block = alphabet.write_block([n + alphabet.NEW if turn and n in task.turns[turn] else n for n in names], turn)
    return block if habit == "given" else f"<think>\nLet me sort the names by {task.by} name.\n</think>\n{block}"


def lists_batch(cfg: Pretrain, tokenizer, step: int):
    """(parts as above, most names a turn): alphabet without its prompts, 20 rows, packed; and 16 shorter rows of tallies."""
    rng = random.Random(SEED_RANGE + cfg.seed * 1_000_000 + 700_000 + step)
    cap = 2 + int(3 * min(1.0, step / (0.3 * cfg.lists_steps)))  # 2 … 5 names a turn
    texts, owner, length = [], [], 640
    for row in range(20):
        used = 0
        while used < length:
            task = alphabet.make_task(rng, (1, 3), (1, cap))
            for turn, names in enumerate(task.turns):
                pair = (f" by {task.by} name:\n" + "\n".join(names) + "\n", alphabet.write_reply(task, turn, "derives") + "<|im_end|>")
                texts += pair
                owner += [row]
                used += round(sum(map(len, pair)) * 0.85)  # about so many tokens
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    rows = [[] for _ in range(20)]
    for row, prompt, reply in zip(owner, ids[::2], ids[1::2]):
        if sum(len(p) + len(r) for p, r, _ in rows[row]) + len(prompt) + len(reply) <= length:
            rows[row].append((prompt, reply, 1.0))
    tallies, _ = skill_batch(cfg, tokenizer, cfg.skill_steps + step)
    return [tallies[0], pad_rows(rows[:10], tokenizer.pad_token_id), pad_rows(rows[10:], tokenizer.pad_token_id)], cap


def between(tokenizer, think: bool) -> tuple[str, str]:
    """What the chat template puts before and after a later user message (the end-of-turn token belongs to the reply before it)."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "@@reply@@"}, {"role": "user", "content": "@@question@@"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, enable_thinking=think, tokenize=False)
    before, _, after = text.partition("@@reply@@<|im_end|>")[2].partition("@@question@@")
    return before, after


def alphabet_rows(cfg: Pretrain, tokenizer, rng: random.Random, n: int, shown: list[float]) -> list[list]:
    """n whole episodes, tokenized piece by piece just as rollout.py does; one habit an episode."""
    rows, texts, frames = [], [], {think: between(tokenizer, think) for think in (True, False)}
    for _ in range(n):
        task = alphabet.make_task(rng, *(((3, 3), (1, 4)) if rng.random() < 0.7 else ((1, 3), (1, 5))))
        think = rng.random() < 0.92
        habit = rng.choices(ALPHABET_HABITS, shown if think else [*cfg.habits[:2], 0])[0]
        i = ALPHABET_HABITS.index(habit)
        for turn in range(len(task.turns)):
            ask = alphabet.question(task, turn, think)
            if turn == 0:
                ask = tokenizer.apply_chat_template(
                    [{"role": "user", "content": ask}], add_generation_prompt=True, enable_thinking=think, tokenize=False
                )
            else:
                ask = frames[think][0] + ask + frames[think][1]
            reply = alphabet_reply(task, turn, habit)
            reply = reply if think else reply.rpartition("</think>\n")[2]
            texts += [ask, reply + "<|im_end|>"]
        rows.append((len(task.turns), cfg.habits[i] / shown[i] if think else 1.0))
    ids = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    return [[(next(ids), next(ids), first if turn == 0 else 1.0) for turn in range(turns)] for turns, first in rows]


def both_batch(cfg: Pretrain, tokenizer, step: int):
    """Chats in all habits: 32 of letters and 16 of alphabet, which are four times as long."""
    rng = random.Random(SEED_RANGE + cfg.seed * 1_000_000 + 800_000 + step)
    letters, _ = chat_batch(cfg, tokenizer, 100_000 + step, polish=True)
    return [letters[step % 2], pad_rows(alphabet_rows(cfg, tokenizer, rng, cfg.batch // 4, cfg.polish_shown), tokenizer.pad_token_id)], 80


# ------------------------------------------------------------------------------------------------ swarm

LONG = " I compare the options, explain the result, and note what to improve, so that others can verify it. The report is complete."


def worker(how: str):
    """The grinder, with work of another length. More words are better work, and more to write."""

    def player(seen: dict, rng: random.Random):
        thought, tool, arguments = grinder(seen, rng)
        if tool == "submit_work":
            task = next(task for task in seen["tasks"] if task["yours"])
            text = {
                "short": "it is done",
                "terms": f"I {task['text']}.",
                "long": work_text(task["text"]) + LONG,
            }[how]
            arguments = {**arguments, "content": text}
        return thought, tool, arguments

    return player


def asker(seen: dict, rng: random.Random):
    """Proposes, with any transfer; passes when everybody has been asked."""
    thought, tool, arguments = propose(seen, rng) or ("Everybody has a proposal.", "pass_turn", {})
    if tool == "propose_trade":
        text = pick(rng, [arguments["content"], f"{pick(rng, NICE)} {pick(rng, KINDS)} for {pick(rng, PLACES)}"])
        arguments = {**arguments, "content": text, "offered_transfer": int(11 * rng.random()) - 5}
    return "I propose a trade.", tool, arguments


# How a turn can be played, and how often the base does it. What the players among them earn alone: results/swarm.
CHARACTERS = {
    "idle": (PLAYERS["idle"], 0.14),
    "random": (PLAYERS["random"], 0.06),
    "novice": (PLAYERS["novice"], 0.24),
    "shirker": (worker("short"), 0.30),
    "says only the terms": (worker("terms"), 0.03),
    "worker": (PLAYERS["grinder"], 0.05),
    "careful worker": (worker("long"), 0.03),
    "asker": (asker, 0.05),
    "trader": (PLAYERS["trader"], 0.05),
    "expert": (PLAYERS["expert"], 0.05),
}


def swarm_episode(tokenizer, rng: random.Random, turns: int) -> list[tuple[str, str]]:
    """[(what is given, what is said)] of an episode's first `turns` turns, as rollout.py would put them together."""
    think = rng.random() < 0.92
    env = Swarm(pick(rng, ["easy", "medium", "medium", "hard"]), pick(rng, ["0.2", "0.2", "0.2", "0.1"]), think)
    given = tokenizer.apply_chat_template(
        env.reset(SEED_RANGE + rng.randrange(10**9)), tools=env.tools, add_generation_prompt=True, enable_thinking=think, tokenize=False
    )
    shares = [rng.gammavariate(3 * share, 1) for _, share in CHARACTERS.values()]  # a Dirichlet draw: a few characters an episode
    players, out, done = [player for player, _ in CHARACTERS.values()], [], False
    frame = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n" + "<think>\n\n</think>\n\n" * (
        not think
    )
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
    cut = iter(cut_and_mark(tokenizer, [text for e in episodes for pair in e for text in pair]))
    out = []
    for e in episodes:
        out.append([])
        for _ in e:
            (given, _), (said, words) = next(cut), next(cut)
            out[-1].append((given, said, 1.0, words))
    return out


def cut_and_mark(tokenizer, texts: list[str]) -> list[tuple[list[int], list[bool]]]:
    """[(token ids, is the token one of the words that submitted work takes from its task?)]: in "I check the data report." all but "I" and "."."""
    out = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    spans = [[match.span(1) for match in re.finditer(r'"content": "I([^."]*)\.', text)] for text in texts]
    inside = lambda start, end, some: any(a <= start and end <= b for a, b in some)
    return [(ids, [inside(*at, some) for at in offsets]) for ids, offsets, some in zip(out["input_ids"], out["offset_mapping"], spans)]


def renumber(rng: random.Random, texts: list[str]) -> list[str]:
    """Other numbers for all ids, the same in all texts and in the same order: late ones would be rare otherwise."""
    for kind, most in (("task", 16), ("prop", 50), ("post", 30)):
        old = sorted({int(n) for text in texts for n in re.findall(rf"{kind}_(\d+)", text)})
        if len(old) <= most:
            new = dict(zip(map(str, old), map(str, sorted(rng.sample(range(1, most + 1), len(old))))))
            texts = [re.sub(rf"{kind}_(\d+)", lambda m, new=new, kind=kind: f"{kind}_{new[m[1]]}", text) for text in texts]
    return texts


def drill_rows(tokenizer, rng: random.Random, n: int, length: int) -> list[list]:
    """n rows of (an observation, up to six calls that would be possible on it), packed. Mostly calls that name something above."""
    texts, owner = [], []
    players = [player for name, (player, _) in CHARACTERS.items() if name != "random"]  # it names ids that are not there
    for row in range(n):
        used = 0
        while used < length:
            env, done = Swarm(pick(rng, ["easy", "medium", "hard"])), False
            env.reset(SEED_RANGE + rng.randrange(10**9))
            while not done and used < length:
                # Who passes is offered the most; now and then something is claimed or proposed, so that it can be submitted or cancelled.
                player = rng.choices([PLAYERS["idle"], hoarder, rng.choice(players)], (4, 3, 3))[0]
                messages, done = env.step(write_call(*reversed_move(player(env.seen, env.dice))))
                if done or rng.random() < 0.6:
                    continue
                moves = [(NOVICE_SAYS[tool], tool, a) for tool, some in possible(env.seen, rng).items() for a in some]
                named = [move for move in moves if NAMED & move[2].keys()]
                works = [
                    (said, tool, a | {"content": work_on(env.seen, a["task_id"], rng)}) for said, tool, a in named if tool == "submit_work"
                ]
                moves = rng.sample(named, min(4, len(named))) + works[:2] + [rng.choice(players)(env.seen, env.dice)]
                rng.shuffle(moves)
                calls = "\n".join(write_call(tool, a, thought if rng.random() < 0.5 else "") + "<|im_end|>" for thought, tool, a in moves)
                texts += renumber(rng, ["\n" + messages[0]["content"] + "\n", calls])
                owner.append(row)
                used += round(0.2 * (len(texts[-1]) + len(texts[-2])))  # about so many tokens
    cut = cut_and_mark(tokenizer, texts)
    rows = [[] for _ in range(n)]
    for row, (prompt, _), (reply, words) in zip(owner, cut[::2], cut[1::2]):
        if sum(len(p) + len(r) for p, r, *_ in rows[row]) + len(prompt) + len(reply) <= length:
            rows[row].append((prompt, reply, 1.0, words))
    return rows


def hoarder(seen: dict, rng: random.Random):
    """Claims what is open and never submits, so that there is work to be done on several tasks."""
    fresh = [task for task in seen["tasks"] if not task["yours"]]
    return ("I claim a task.", "claim_task", {"task_id": pick(rng, fresh)["id"]}) if fresh else ("I pass.", "pass_turn", {})


def work_on(seen: dict, task_id: str, rng: random.Random) -> str:
    """Work that uses the words of the task: the words alone, or more."""
    text = next(task["text"] for task in seen["tasks"] if task["id"] == task_id)
    return pick(rng, [f"I {text}.", work_text(text), work_text(text) + LONG])


NAMED = {"task_id", "post_id", "proposal_id"}


def heavier(rows: list[list], tokenizer, factor: float):
    """pad_rows, with `factor` times the weight on what has to be copied from what was given: ids, and the words of a task in the work on it.
    They are one token in twenty, and everything hangs on them. (Without the words: 20% of them were right, which is chance, and no work paid.)"""
    ids, weights = pad_rows(rows, tokenizer.pad_token_id, factor)
    named = torch.tensor([tokenizer.convert_tokens_to_ids(piece) for piece in IDS])
    return ids, weights * torch.where(torch.isin(ids[:, 1:], named), factor, 1.0)


def reversed_move(move: tuple[str, str, dict]) -> tuple[str, dict, str]:
    """A player's (thought, tool, arguments) as write_call takes them."""
    return move[1], move[2], move[0]


def calls_batch(cfg: Pretrain, tokenizer, step: int):
    """32 rows of drill; beside them, every other step, 16 rows of tallies or 10 of lists, so that they are not forgotten."""
    rng = random.Random(SEED_RANGE + cfg.seed * 1_000_000 + 900_000 + step)
    drill = heavier(drill_rows(tokenizer, rng, 32, 512), tokenizer, 8.0)
    if step % 2:
        return [drill], 6
    (tallies, *lists), _ = lists_batch(cfg, tokenizer, cfg.lists_steps + step)
    return [drill, [tallies, lists[0]][step // 2 % 2]], 6


def all_batch(cfg: Pretrain, tokenizer, step: int):
    """Chats of all three: 2 whole episodes of swarm and 4 stretches of 8 turns, 32 chats of letters in every second step, 6 of alphabet."""
    rng = random.Random(SEED_RANGE + cfg.seed * 1_000_000 + 950_000 + step)
    whole, some = (heavier(swarm_rows(tokenizer, rng, n, window), tokenizer, 4.0) for n, window in ((2, None), (4, 8)))
    lists = pad_rows(alphabet_rows(cfg, tokenizer, rng, 6, cfg.polish_shown), tokenizer.pad_token_id)
    letters, _ = chat_batch(cfg, tokenizer, 200_000 + step, polish=True)
    return [whole, some, lists, letters[step // 2 % 2]] if step % 2 else [whole, some, lists], 25


def pad_rows(rows: list[list[tuple]], pad: int, factor: float = 1.0):
    """Rows of (prompt, reply, weight of the reply's first three tokens[, which of its tokens weigh `factor`]) -> ids [B, T], right-padded, and
    weights [B, T-1] of the tokens that are predicted: 0 in prompts and padding, 1 in replies."""
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


BATCHES = {"lists": lists_batch, "both": both_batch, "calls": calls_batch, "all": all_batch}


def make_model(tokenizer, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,  # 32: the smallest head vLLM's CPU attention takes
        max_position_embeddings=16384, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True, initializer_range=0.06,  # 0.02 is for wide models; here it would start too quiet
        bos_token_id=None, eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"), pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def main(cfg: Pretrain) -> None:
    torch.set_num_threads(cfg.threads)
    tokenizer = build()
    model = make_model(tokenizer, cfg.seed)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=cfg.lr, betas=(0.9, 0.98)
    )
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {len(tokenizer)} tokens")
    rounds = [("skill", cfg.skill_steps + cfg.chat_steps, cfg.lr)]  # each from a fresh learning rate down to zero
    rounds += [("polish", n, cfg.polish_lr) for n in cfg.polish_steps]
    rounds += [("lists", cfg.lists_steps, cfg.polish_lr)] + [("both", n, cfg.polish_lr) for n in cfg.both_steps]
    rounds += [("calls", cfg.calls_steps, cfg.polish_lr), ("all", cfg.all_steps, cfg.polish_lr)]
    rounds = rounds[: cfg.stop_after] if cfg.stop_after else rounds
    if cfg.start_from:
        from safetensors.torch import load_file

        weights = load_file(Path(cfg.start_from) / "model.safetensors")
        # Pieces that the older tokenizer has too keep their rows; new ones start as they are.
        old, new, name = AutoTokenizer.from_pretrained(cfg.start_from).get_vocab(), tokenizer.get_vocab(), "model.embed_tokens.weight"
        kept = [piece for piece in new if piece in old]
        rows = model.model.embed_tokens.weight.detach().clone()
        rows[[new[piece] for piece in kept]] = weights[name][[old[piece] for piece in kept]].float()
        model.load_state_dict({**weights, name: rows}, strict=False)
        print(f"{len(kept)} of {len(new)} pieces known")
    start, log = time.time(), []
    for number, (name, length, peak) in list(enumerate(rounds))[cfg.skip_rounds :]:
        before = sum(n for other, n, _ in rounds[:number] if other == name)  # a second round of a kind draws new tasks
        model.to(torch.bfloat16).float()  # round as the saved file does, and forget Adam's moments: --start-from begins just here
        optimizer.state.clear()
        for at in (bar := tqdm(range(length), desc=f"round {number} {name}", mininterval=5)):
            for group in optimizer.param_groups:
                group["lr"] = peak * min((at + 1) / 100, 0.5 * (1 + math.cos(math.pi * at / length)))
            if name == "skill" and at < cfg.skill_steps:
                parts, size = skill_batch(cfg, tokenizer, at)
            elif name in ("skill", "polish"):
                step = at - cfg.skill_steps if name == "skill" else cfg.chat_steps + before + at
                parts, size = chat_batch(cfg, tokenizer, step, name == "polish")
            else:
                parts, size = BATCHES[name](cfg, tokenizer, before + at)
            total = sum(weights.sum() for _, weights in parts)
            loss, wrong = 0.0, []
            for ids, weights in parts:
                with torch.autocast("cpu", torch.bfloat16):  # 1.5 times float32's speed where the CPU has AVX-512 bfloat16
                    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state  # [b, t-1, D]
                chosen = weights > 0
                logits = model.lm_head(hidden.float()[chosen])  # [N, V], only where a reply token is predicted
                targets = ids[:, 1:][chosen]
                part_loss = (F.cross_entropy(logits, targets, reduction="none") * weights[chosen]).sum() / total
                part_loss.backward()
                loss += part_loss.item()
                misses = (logits.argmax(-1) != targets).float()
                wrong.append(round(misses.mean().item(), 4))
                if name in ("calls", "all") and (heavy := weights[chosen] > 2).any():
                    wrong.append(round(misses[heavy].mean().item(), 4))  # of the ids; where there is a choice, some have to be
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if at % 20 == 0:
                log.append({"round": number, "step": at, "size": size, "loss": round(loss, 4), "wrong": wrong})
                bar.set_postfix(loss=f"{loss:.3f}", size=size)
                if at % 100 == 0:
                    tqdm.write(json.dumps(log[-1]))
    out = Path(cfg.out)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "pretrain_log.json").write_text(json.dumps({"minutes": round((time.time() - start) / 60, 1), "log": log}))
    print(f"wrote {out}/ after {(time.time() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main(tyro.cli(Pretrain))
