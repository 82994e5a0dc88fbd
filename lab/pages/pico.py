"""docs/pico.md: pico.py from its first line to its last, with what its lines make in one small run.

    python -m lab.pages.pico        # some seconds; the same page again on the same machine

STORY is the page, and is written like one. `@ text :: caption` stands for the lines of pico.py from
the one with this text down to the next `@`. The rows after it say what is shown below those lines:

    text :: name :: expression      # noted when the line with this text has run for the first time
    text :: name                    # the name is the expression
    text :: name :: name[0]         # the shape of all of it, the numbers of this part
    > name :: expression            # computed when the run is over

A row sees the variables of its line, what its function `returns`, and what `words_of` has.
"""

import ast
import contextlib
import io
import random
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import torch

import env_letters

ROOT = Path(__file__).resolve().parents[2]
FILE, PAGE = ROOT / "pico.py", ROOT / "docs" / "pico.md"
SEED = 24  # here the first task has right and wrong replies, and the second has wrong ones only
SMALL = dict(  # instead of the numbers at the top of pico.py
    SFT_STEPS=10, SFT_BATCH=4, K=4, MAX_TOKENS=200, TASKS=2,
    SFT_SEEDS=range(10**9, 10**9 + 20), DEV=range(2 * 10**9, 2 * 10**9 + 4),
)  # fmt: skip
EARLY = ("<module>", "new_lora", "main")  # noted from the start; the rest, from the update on
UPDATE = "groups = play("  # the line of main with which the update begins
Q = "model.layers.0.self_attn.q_proj.weight"
WIDTH = 98  # of what is shown

STORY = r"""
# pico.py, with its numbers

This page is `pico.py`, the whole book in one file, from its first line to its last. Below each
piece stands what its lines made in one small run. You need to know Python, but no RL.

The run is real, only small: ten steps of SFT (imitate), then one update of GRPO (try and compare),
with two tasks and four replies to each. Every value was noted when its line had run for the first
time, so of a loop you see the first pass. From left to right: the number of the line in `pico.py`,
a name (`returns` is what a function gave back), a shape, the first few values. A *tensor* is a
table of numbers: the shape `[2, 112]` says 2 rows of 112, which are float32 if nothing else is
said. Long things are cut (…).

`python -m lab.pages.pico` makes this page, on one CPU thread. On another machine the last digits
may differ, and with them a sampled word.

@ pico.py: the whole book

The numbers at the top of the file are the ones to play with. For this page they were smaller:

@ MODEL = Path :: on this page
SFT_STEPS, SFT_BATCH :: SFT_STEPS :: SMALL["SFT_STEPS"]
SFT_STEPS, SFT_BATCH :: SFT_BATCH :: SMALL["SFT_BATCH"]
K = 8 :: K :: SMALL["K"]
MAX_TOKENS = 320 :: MAX_TOKENS :: SMALL["MAX_TOKENS"]
TASKS, CLIP :: TASKS :: SMALL["TASKS"]
SFT_SEEDS, DEV :: len(SFT_SEEDS) :: len(SMALL["SFT_SEEDS"])
SFT_SEEDS, DEV :: len(DEV) :: len(SMALL["DEV"])

## Task

In the book: [env_letters.py](../env_letters.py).

A task is a question and its right answer, both drawn from one number, the *seed*: the same seed
gives the same task everywhere. This is the task that we follow down the page.

@ task (book :: the first task of the update
rng = random.Random(seed) :: seed
text = "".join(rng :: text
n_letters, share = :: n_letters
n_letters, share = :: share
rng.shuffle(absent) :: present :: " ".join(present)
rng.shuffle(absent) :: absent :: " ".join(absent)
ask = f'Count :: letters
ask += :: ask
return ask, {c: :: returns[1]

A *demonstration* is a reply that we write for the model to imitate. It thinks, and it is right, but
it does not show how anybody could find these counts.

@ def demonstration
> demonstration(counts) :: cut(demonstration(counts), 130)

The *reward* is one number that says how good a reply was. This one is strict: every count right, or
nothing.

@ def reward_of :: replies that we made up
> right
> reward_of(counts, right)
> reward_of(counts, one count wrong) :: reward_of(counts, wrong)
> reward_of(counts, "No idea.")

And this is the habit that pays, though nobody asks for it: to say the string letter by letter, and
at each letter that was asked for, how many there were so far.

@ def spells
> spelled
> spells(spelled)
> spells(demonstration(counts))

## Tokens

In the book: [policy.py](../policy.py), through transformers.

A model does not read letters but *tokens*: pieces of text, each with a number, its *id*. Below, a
space inside a piece is written ␣.

@ tokens (book
VOCAB = FILE :: len(VOCAB)
VOCAB = FILE :: VOCAB[415:418]
SCORES |= :: SCORES["<think>"]
PIECES = :: PIECES[449:453]
STOP = SCORES :: STOP

A random string has no long pieces in common with English, so it is cut into single letters. The
model can spell it because it sees each letter.

@ def encode :: the prompt of that task
for n in range(1 :: text :: cut(text, 110)
best.append(max( :: best[1]
return best[-1][2] :: returns :: ids(returns)
return best[-1][2] :: their pieces :: pieces(returns)

## Model

In the book: [policy.py](../policy.py), transformers and peft.

A model is a set of tables with names, its *weights*. They were trained before we came, and stay as
they are.

@ model: Qwen3
raw = bytearray :: len(raw)
start = 8 + :: start
flat = torch :: flat
header = {name :: the first of header :: list(header.items())[0]
BASE = {name :: BASE :: listed(BASE, 4)

What learns is small and lies beside them: *LoRA*. To a weight `[out, in]` is added the product of
two thin tables, B `[out, 32]` and A `[32, in]`. B begins as zeros, so at first nothing changes.

@ def new_lora :: the first pair
a = {n + ".A" :: a :: listed(a, 1)
b = {n + ".B" :: b :: listed(b, 1)
return {name: x.to :: numbers that learn :: Text(f"{sum(x.numel() for x in returns.values()):,}")

The model with this change is what plays, the *policy*. `Q` below stands for one of the names,
`model.layers.0.self_attn.q_proj.weight`. After ten steps its change hardly shows in three digits.

@ def policy_of :: after SFT
change = lambda :: lora[Q + ".B"]
change = lambda :: change(Q)
return {name: w + change :: BASE[Q]
return {name: w + change :: returns[Q]

The *forward pass* is the model at work. Token ids go in. What comes out says of each of the 1,024
tokens how likely it is to be the next, as a *log-prob*: the logarithm of its probability, 0 for
certain and far below 0 for unlikely. Both prompts go through it together, so the shorter one is
filled up in front, with ids that do not count (`pad`).

@ def forward :: both prompts of the update
(B, T), d, half, share = :: ids
(B, T), d, half, share = :: pad
seen = (keys <= :: seen :: -
seen = (keys <= :: seen[0, 2:8, 2:8]
speed = 10000.0 :: speed
turn = :: turn :: turn[0, 0, :, 0]

`seen` says which places (across) each place (down) may look at: none in the future, and no padding.
Padding places see only themselves, and their outputs are never used. `turn` grows from place to
place, so that the model can tell how far apart two of them are.

Now each token becomes a row of 128 numbers, `x`, and layer by layer the rows learn from each other:
each place asks the places it sees (`q`), compares with what they offer (`k`), and takes over what
they say (`v`). Then each row is worked on by itself (`mlp`). Shown is the end of our prompt,
`[0, -1]`.

@ x = F.embedding(ids :: the first layer
x = F.embedding(ids :: x :: x[0, -1]
h = norm(f"layers.{layer}.input :: h :: h[0, -1]
q = rope( :: q :: q[0, 0, -1]
k = rope( :: k :: k[0, 0, -1]
v = heads("v" :: v :: v[0, 0, -1]
cache[layer, :, :, :, start : :: cache :: cache[0, 0, 0, 0, -1]
q, mask = :: q :: -
q, mask = :: mask :: -
y = F.scaled :: y :: y[0, 0, -1]
linear("self_attn.o" :: x :: x[0, -1]
linear("mlp.down" :: x :: x[0, -1]
return (norm("norm" :: returns :: returns[0]
return (norm("norm" :: likeliest next :: likely(returns[0])

## Sample

In the book: [rollout.py](../rollout.py), [fast/sampler.py](../fast/sampler.py).

To *sample* is to draw the next token by these probabilities, write it behind the text, and ask
again. Each prompt is read once and answered four times; the keys and values of all earlier tokens
are kept in `cache`, so that each pass reads one new token per reply.

@ sample (book :: two tasks, and then four replies to each
pad = torch.tensor([P - :: pad
cache = torch.zeros :: cache :: -
logp = forward(w, ids, pad, cache :: logp :: logp[0]
pad = pad.repeat :: pad
cache = F.pad :: cache :: -

Now the first token of all eight replies is drawn. `cdf` adds up the probabilities from id 0 on: at
id 3 it jumps by the probability of `<think>`, at id 425 by that of `<answer>`. A reply gets the
token in whose jump its number of `chance` falls. *Greedy* would take the likeliest every time.

@ for t in range(MAX_TOKENS) :: the first token
token = logp.argmax :: token, greedy :: pieces(token.tolist())
cdf = logp.exp :: cdf :: cdf[0, [2, 3, 424, 425, 1023]]
token = torch.searchsorted :: chance[:, t]
token = torch.searchsorted :: token
tokens.append(token :: its pieces :: pieces(token.tolist())
logprobs.append(logp :: logprobs[0]
logp = forward(w, tokens :: next, reply 0 :: likely(logp[0])
logp = forward(w, tokens :: next, reply 1 :: likely(logp[1])

In the end there are eight replies. Two of the first four spell the string, and only these are
right. Nobody asked for it: it is a habit from pretraining, and a rare one.

@ groups = [[] for :: all replies
return groups :: groups :: replies(groups)

## Advantage and loss

In the book: [grpo.py](../grpo.py).

Is a reward of 1 good? It depends on the others. The *advantage* of a reply is its reward minus the
mean of its group, divided by how far the group is spread. In the second group all are equally
wrong: there is nothing to compare, and all its advantages are 0.

@ advantage and loss (book :: a row per task
better = rewards - :: rewards
better = rewards - :: better
return better / :: returns

The replies go through the model again, whole this time, each behind its prompt. `mask` picks the
places where the model spoke: prompts are not learnt. Most tokens were as good as certain, with a
log-prob of 0; a reply is decided in a few places, such as the first.

@ def logprobs_of :: the four replies to the first task
rows = [e.prompt :: their lengths :: [len(row) for row in rows]
ids = torch.tensor([row :: ids
mask = torch.tensor(mask :: mask :: -
logp = forward(w, ids[:, :-1] :: logp :: logp[0]
return logp.gather(1, ids[:, 1:] :: returns[0]

`now` and `then` are the same numbers, computed in two ways, so every ratio is 1, and the loss comes
out as 0: pluses and minuses cancel. That is as it should be. What counts is the *gradient*: for
each number that learns, which way to move it so that the tokens of good replies become likelier,
and those of bad replies less likely.

@ def grpo_loss :: the first task
now, row = :: now
then = torch :: then
length = torch :: length
ratio = (now :: ratio
ratio = (now :: its largest distance from 1 :: (ratio - 1).abs().max().item()
gain = torch :: advantages
gain = torch :: gain
return -(gain :: returns

Adam moves every number against its gradient, in this first step by the same small amount, `rate`.

@ def step :: the step of GRPO
optimizer.param_groups[0] :: rate
optimizer.param_groups[0] :: lora[Q + ".B"].grad
optimizer.param_groups[0] :: lora[Q + ".B"]
norm = torch.nn :: norm
optimizer.step() :: lora[Q + ".B"]

## Loop

In the book: [sft.py](../sft.py), [train.py](../train.py), [evaluate.py](../evaluate.py).

An *evaluation* plays tasks that were never trained on, greedily. From so few tasks hardly anything
follows: the interval says that the truth may lie anywhere between `low` and `high`.

@ loop (book :: after GRPO
played = [group :: rewards :: [e.reward for e in played]
low, high = :: low
low, high = :: high

*SFT* makes the tokens of demonstrations likelier; its loss is minus their mean log-prob. It falls a
little in ten steps.

@ def main :: SFT
loss = -logprobs_of(policy_of(lora), rng :: loss of four :: loss_of(lora, shown[:4])
step(optimizer, lora, SFT_LR :: after a step :: loss_of(lora, shown[:4])
evaluate(policy_of(lora), "after SFT") :: after ten :: loss_of(lora, shown[:4])

And here is all of it in one update: sample, compare, learn, look.

@ # GRPO: sample :: the update
first, chance = :: first
first, chance = :: chance
groups = play( :: chance of its replies :: chances(lora, groups[0])
groups = play( :: after <think>\n :: after_think(lora, groups[0])
rewards = torch.tensor([[e.reward :: rewards
for group, advantages in :: advantages
rate = LR * :: rate
norm = step(optimizer :: norm
norm = step(optimizer :: chance of its replies :: chances(lora, groups[0])
norm = step(optimizer :: after <think>\n :: after_think(lora, groups[0])

After this one small step the two right replies are likelier than before, and the two wrong ones
less. Nobody said what was good about them. Yet a thought now begins more often with `j`, the first
letter of our string, and less often with the `L` of `Let me count`. That is the whole of it.
`python pico.py` does it 150 times, with more tasks and more replies; after a single step, the four
development tasks below show nothing yet.

@ if __name__
> it printed :: Text(printed)
"""


# ------------------------------------------------------------------------------------------ the run
def run(rows: dict[int, list[tuple[str, str]]]) -> tuple[dict[int, list], dict]:
    """Run pico.py with small numbers; rows: {line: [(name, expression)]}.

    Returns {line: [(name, shape, text)]}, and what is left of pico.py: its own names, and `printed`.
    """
    text = FILE.read_text()
    update = line_with(UPDATE)
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    lines_of = {node.name: range(node.lineno, node.end_lineno + 1) for node in nodes}
    left = {name: {line for line in rows if line in lines} for name, lines in lines_of.items()}
    left["<module>"] = rows.keys() - set().union(*left.values())
    watched, found, running = set(EARLY), {}, {}  # running: {frame: the line that it is in}

    def look(frame, event, value):
        name = frame.f_code.co_name
        if name not in watched or frame.f_code.co_filename != str(FILE):
            return None
        line = running.get(frame)
        if event in ("line", "return") and line in left[name]:  # it has run to its end
            left[name].remove(line)
            scope = {**frame.f_globals, **frame.f_locals, "returns": value}
            found[line] = [(title, *shown(title, what, scope)) for title, what in rows[line]]
        running[frame] = frame.f_lineno
        if name == "main" and frame.f_lineno == update:
            watched.update(left)
        return look

    names, printed = {"__name__": "pico", "__file__": str(FILE)}, io.StringIO()
    threads, tracer = torch.get_num_threads(), sys.gettrace()
    torch.set_num_threads(1)
    sys.settrace(look)
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(text, str(FILE), "exec"), names)
            names |= SMALL
            names["main"](seed=SEED, updates=1)
    finally:
        sys.settrace(tracer)
        torch.set_num_threads(threads)
    if missing := rows.keys() - found.keys():
        raise SystemExit(f"these lines of pico.py did not run: {sorted(missing)}; change STORY")
    names["printed"] = printed.getvalue()
    return found, names | made_up()


def line_with(text: str) -> int:
    """The number of the one line of pico.py that has this text."""
    lines = enumerate(FILE.read_text().splitlines(), 1)
    found = [number for number, line in lines if text in line]
    if len(found) != 1:
        raise SystemExit(f"pico.py has {len(found)} lines with {text!r}; bring STORY up to date")
    return found[0]


# ----------------------------------------------------------------------------------- what rows show
class Text(str):
    """Shown as it is, and not as Python would write it."""


def words_of(pico: dict) -> dict:
    """What rows know in addition to the variables of pico.py."""

    def pieces(ids: list[int]) -> Text:
        said = [repr(pico["PIECES"][i])[1:-1].replace(" ", "␣") for i in ids]
        return Text(" ".join(said if len(said) < 70 else [*said[:46], "…", *said[-16:]]))

    def likely(logp: torch.Tensor) -> Text:
        """The likeliest tokens of logp [V], with their probabilities."""
        values, ids = logp.exp().topk(2)
        return Text("   ".join(f"{pieces([i])} {p:.4f}" for i, p in zip(ids.tolist(), values)))

    def replies(groups: list[list]) -> Text:
        lines, texts = [], {}
        for g, group in enumerate(groups):
            for i, e in enumerate(group):
                first = texts.setdefault(e.text, f"[{g}][{i}]")
                said = repr(cut(e.text, 220) if g == 0 else e.text[:40] + " …")
                lines.append(f"[{g}][{i}] reward {e.reward}, {len(e.reply)} tokens: ")
                lines[-1] += said if first == f"[{g}][{i}]" else f"word for word {first}"
        return Text("\n".join(lines))

    def listed(tensors: dict, most: int) -> Text:
        lines = [f"{name}  {list(x.shape)}" for name, x in tensors.items()]
        return Text("\n".join([*lines[:most], f"… {len(lines)} in all"]))

    @torch.no_grad()
    def loss_of(lora: dict, episodes: list) -> float:
        logprobs, _ = pico["logprobs_of"](pico["policy_of"](lora), episodes)
        return -logprobs.mean().item()

    @torch.no_grad()
    def chances(lora: dict, group: list) -> Text:
        """How likely the policy is to say each reply of the group, word for word."""
        logprobs, row = pico["logprobs_of"](pico["policy_of"](lora), group)
        each = [logprobs[row == i].sum().exp().item() for i in range(len(group))]
        return Text("   ".join(f"{100 * p:.4g}%" for p in each))

    @torch.no_grad()
    def after_think(lora: dict, group: list) -> Text:
        """How a thought about the first task begins."""
        ids = torch.tensor([group[0].prompt + pico["encode"]("<think>\n")])
        return likely(pico["forward"](pico["policy_of"](lora), ids, torch.zeros(1))[0])

    ids = lambda ids: Text(cut(" ".join(map(str, ids)), 150))
    known = (Text, cut, pieces, likely, replies, listed, loss_of, chances, after_think)
    return {f.__name__: f for f in known} | {"ids": ids, "SMALL": SMALL, "Q": Q}


def made_up() -> dict:
    """The right answer of the first task of the update, and three replies."""
    task = env_letters.make_task(random.Random(SEED * 100_000 * SMALL["TASKS"]), 6)
    right, spelled = (env_letters.write_reply(task, style) for style in ("bare", "derives"))
    wrong = right.replace(f": {task.counts[0]}", f": {task.counts[0] + 1}", 1)
    counts = dict(zip(task.letters, task.counts))
    return {"counts": counts, "right": right, "wrong": wrong, "spelled": spelled}


def shown(name: str, what: str, scope: dict) -> tuple[str, str]:
    """(the shape and kind of a tensor, its first values), or ("", what it is)."""
    scope = words_of(scope) | scope
    part = what == "-" or what.startswith(f"{name}[")
    whole = eval(name if part else what, scope)
    if not isinstance(whole, torch.Tensor):
        return "", written(whole)
    kind = str(whole.dtype).removeprefix("torch.").replace("float32", "")
    shape = f"{list(whole.shape) or ''} {kind}".strip()
    if what == "-":
        return shape, ""
    return shape, f"{what} = " * part + numbers(eval(what, scope).detach())


def numbers(x: torch.Tensor) -> str:
    """The first values of a tensor; all of a small table, row by row."""
    if x.ndim == 2 and x.numel() < 100:
        return "\n".join(map(numbers, x))
    values = x.flatten()[:24].tolist()
    if all(float(value).is_integer() for value in values):
        said = [f"{value:.0f}." if isinstance(value, float) else f"{value:d}" for value in values]
    else:
        form = ".3f" if max(map(abs, values)) > 0.01 else ".1e"
        said = [f"{value:{form}}".replace("-0.000", "0.000") for value in values]
    return " ".join(said + ["…"] * (x.numel() > len(values)))


def written(value) -> str:
    if isinstance(value, Text):
        return value
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.3f}" if value > 0.001 else f"{value:.0e}"
    return cut(repr(value), 230)


def cut(text: str, most: int) -> str:
    """Without its middle if it is longer."""
    return text if len(text) <= most else f"{text[: most - 50]} … {text[-50:]}"


# ----------------------------------------------------------------------------------------- the page
class Code(NamedTuple):
    """Lines of pico.py, and what is shown below them."""

    first: int  # they end where the next Code begins
    caption: str
    rows: list[tuple[int | None, str, str]]  # (line, name, expression); no line: when all is over


def parse(story: str) -> list[str | Code]:
    """Lines of Markdown, and Code in place of each `@`."""
    parts, rows = [], None  # rows: of the Code that has begun
    for line in story.strip().splitlines():
        words = [word.strip() for word in line.lstrip("@>").split(" :: ")]
        if line.startswith("@ "):
            rows = []
            parts.append(Code(line_with(words[0]), "".join(words[1:]), rows))
        elif rows is None or not line:
            rows = None
            parts.append(line)
        else:
            number, words = (None, words) if line[0] == ">" else (line_with(words[0]), words[1:])
            rows.append((number, words[0], words[-1]))
    return parts


def page() -> str:
    """The story, with the lines of pico.py and what they made."""
    lines, parts = FILE.read_text().splitlines(), parse(STORY)
    codes = [part for part in parts if isinstance(part, Code)]
    next_first = {a.first: b.first for a, b in zip(codes, codes[1:])}
    wanted = {}
    for number, name, what in (row for code in codes for row in code.rows):
        if number:
            wanted.setdefault(number, []).append((name, what))
    found, names = run(wanted)
    out = []
    for part in parts:
        if isinstance(part, str):
            out += [part] if part or out[-1] else []  # one empty line is enough
            continue
        until = next_first.get(part.first, len(lines) + 1)
        code = "\n".join(lines[part.first - 1 : until - 1]).rstrip().splitlines()
        out += [""] * bool(out[-1]) + ["```python", *code, "```"]
        if part.rows:
            where = f"lines {part.first} to {part.first + len(code) - 1}"
            where += f": {part.caption}" * bool(part.caption)
            out += ["```", f"── {where} ──", *columns(part.rows, found, names), "```"]
        out.append("")
    return "\n".join(out).rstrip() + "\n"


def columns(rows: list[tuple], found: dict[int, list], names: dict) -> list[str]:
    """Line number, name, shape, values: of a tensor as many as fit, of the rest all."""
    cells, before = [], None
    for number, name, what in rows:
        what = found[number].pop(0) if number else (name, *shown(name, what, names))
        cells.append(("" if number in (None, before) else str(number), *what))
        before = number
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    out = []
    for number, name, shape, values in cells:
        row = (number.rjust(widths[0]), name.ljust(widths[1]), shape.ljust(widths[2]))
        head = "  ".join(cell for cell in row if cell)  # without the columns that nobody fills
        room = WIDTH - len(head) - 2
        for line in values.splitlines() or [""]:
            most = 1 if shape else None
            for piece in textwrap.wrap(line, room, max_lines=most, placeholder=" …") or [""]:
                out.append(f"{head}  {piece}".rstrip())
                head = " " * len(head)
    return out


if __name__ == "__main__":
    text = page()
    PAGE.write_text(text)
    print(f"{PAGE.relative_to(ROOT)}: {len(text.splitlines())} lines")
    if "reward 0.25  spells  25%" not in text:
        print("other replies than before: does every word of STORY still hold?")
