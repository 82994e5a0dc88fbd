"""pico.py: the whole book in one file. A language model finds out that thinking pays.

    python pico.py              # two CPU cores, some minutes; needs torch and nothing else

The model (0.9M parameters, models/pico_base) is asked how often letters occur in a random string.
It can answer at once, and be wrong; or first spell the string out with a running tally, and be
right. Pretraining showed it both and made the good habit rare. Nobody says which is better: it
plays, each reply is scored, and replies above the mean of their group become likelier.

    task -> tokens -> model -> sample -> reward -> advantage -> loss -> loop

Each part names the file of the book that does the same, faster, safer, for more than one task.
tests/test_pico.py holds the two together; docs/pico.md shows the tensors of one update.
"""

import argparse
import json
import random
import re
import sys
from collections import namedtuple
from pathlib import Path
from string import ascii_lowercase

import torch
import torch.nn.functional as F

MODEL = Path(__file__).resolve().parent / "models" / "pico_base"
DEVICE = "cpu"  # or "cuda", or "mps" on a Mac: nothing else has to change
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4, 4, 2, 32  # of the model, as in its config.json
RANK, ALPHA = 32, 64  # LoRA: how many directions of each weight learn, and how strongly
SFT_STEPS, SFT_BATCH, SFT_LR = 50, 8, 1e-4
K = 8  # samples per task. Try 1: nothing to compare with, every advantage is 0, it learns nothing
MAX_TOKENS = 320  # of a reply. Try 64: every thought is cut off before it can pay: none is learnt
LR = 3e-4  # Try 0.1: after a few updates it babbles, and the reward stays at 0
WARMUP, LR_END = 5, 0.1  # the rate rises over 5 updates, then falls to a tenth
TASKS, CLIP = 8, 0.2  # per update; PPO's clip, which acts only from a batch's second step on
# A task is drawn from a seed. The ranges never meet: nobody is examined on what it trained on.
SFT_SEEDS, DEV = range(10**9, 10**9 + 100), range(2 * 10**9, 2 * 10**9 + 256)  # GRPO: from 0

if not (MODEL / "model.safetensors").exists():
    sys.exit(f"pico.py: there is no model in {MODEL}; run it inside a clone of the repository")
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4):
    sys.exit(f"pico.py: torch {torch.__version__} is too old; pip install --upgrade torch")


# -------------------------------------------------------------------- task (book: env_letters.py)
def make_task(seed: int) -> tuple[str, dict[str, int]]:
    """(the question, the right answer: {letter: how often it occurs in the string})."""
    rng = random.Random(seed)
    text = "".join(rng.choice(ascii_lowercase) for _ in range(rng.randint(40, 80)))
    rng.random()  # the book's easier tiers decide here whether to ask for one letter only
    n_letters, share = rng.randint(8, 12), rng.uniform(0.3, 0.9)
    present, absent = sorted(set(text)), sorted(set(ascii_lowercase) - set(text))
    rng.shuffle(present)
    rng.shuffle(absent)
    letters = []
    for _ in range(n_letters):
        wanted, other = (present, absent) if rng.random() < share else (absent, present)
        letters.append((wanted or other).pop())
    ask = f'Count the letters {", ".join(letters)} in "{text}". Think first inside <think> and '
    ask += "</think> if that helps. Then give the counts as JSON inside <answer> and </answer>."
    return ask, {c: text.count(c) for c in letters}


def demonstration(counts: dict[str, int]) -> str:
    """What SFT imitates: the form of a good reply. It states the counts, and not how to count."""
    stated = ", ".join(f"{c} occurs {n} times" for c, n in counts.items())
    return f"<think>\nLet me count. {stated}.\n</think>\n<answer>{json.dumps(counts)}</answer>"


def reward_of(counts: dict[str, int], reply: str) -> float:
    """1.0 if every count is right, else 0.0. Any reply is legal. Change this, and all changes."""
    said = reply.rpartition("</think>")[2]  # what follows the thinking
    found = re.findall("<answer>(.*?)</answer>", said, re.DOTALL)
    if len(found) != 1 or len(re.findall("</?answer>", said)) != 2 or "<think>" in said:
        return 0.0
    try:  # as pairs: a dict would hide that a letter was answered twice
        pairs = json.loads(found[0].strip(), object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return 0.0
    whole = type(pairs) is tuple and all(type(n) is int for _, n in pairs)  # to Python, true is 1
    return float(whole and len(pairs) == len(counts) and dict(pairs) == counts)


def spells(reply: str) -> bool:
    """Does it think letter by letter, "b a1 n1 a2"? For us to watch; it earns nothing."""
    thought, _, rest = reply.rpartition("</think>")
    items = (reply if "<think>" in rest else thought).replace("<think>", "", 1).split()
    return 2 * sum(bool(re.fullmatch("[a-z][0-9]*[,.:]?", item)) for item in items) > len(items)


# ------------------------------------------------- tokens (book: policy.py, through transformers)
FILE = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
VOCAB = FILE["model"]["vocab"]  # [piece, score] each; its place is its id
SCORES = {piece: (score, i) for i, (piece, score) in enumerate(VOCAB)}
SCORES |= {t["content"]: (10**6, t["id"]) for t in FILE["added_tokens"]}  # <think> is never cut
byte = lambda match: bytes([int(match[1], 16)]).decode(errors="replace")  # <0x41> stands for A
PIECES = [re.sub("^<0x(..)>$", byte, piece) for piece, _ in VOCAB]  # what each id says
STOP = SCORES["<|im_end|>"][1]  # ends each turn; the policy has to learn to say it, too
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # here the policy begins


def encode(text: str) -> list[int]:
    """Token ids: the cut whose pieces (of at most 31 letters) have the highest total score."""
    best = [(0.0, 0, [])]  # (score, minus where its last piece starts, ids) of the first n letters
    for n in range(1, len(text) + 1):
        cuts = ((best[m], m, SCORES.get(text[m:n])) for m in range(max(0, n - 31), n))
        best.append(max((b[0] + p[0], -m, b[2] + [p[1]]) for b, m, p in cuts if p))
    return best[-1][2]


# -------------------------------- model: Qwen3 and LoRA (book: policy.py, transformers and peft)
# A safetensors file: 8 bytes that tell the length of a JSON header, the header, then the numbers.
raw = bytearray((MODEL / "model.safetensors").read_bytes())
start = 8 + int.from_bytes(raw[:8], "little")
flat = torch.frombuffer(raw[start:], dtype=torch.bfloat16).float().to(DEVICE)  # 2 bytes each
header = {name: entry for name, entry in json.loads(raw[8:start]).items() if "." in name}
part = lambda begin, end: flat[begin // 2 : end // 2]
BASE = {name: part(*e["data_offsets"]).view(e["shape"]) for name, e in header.items()}  # frozen


def new_lora() -> dict[str, torch.Tensor]:
    """What learns: for each linear layer A [r, in], random, and B [out, r], zero to begin with."""
    shapes = {name: w.shape for name, w in BASE.items() if "_proj" in name}
    a = {n + ".A": (2 * torch.rand(RANK, i) - 1) / i**0.5 for n, (_, i) in shapes.items()}
    b = {n + ".B": torch.zeros(o, RANK) for n, (o, _) in shapes.items()}
    return {name: x.to(DEVICE).requires_grad_() for name, x in (a | b).items()}


def policy_of(lora: dict) -> dict[str, torch.Tensor]:
    """W + (alpha / r) · B A (Hu et al. 2021). Gradients flow through the sum into A and B."""
    change = lambda name: ALPHA / RANK * lora[name + ".B"] @ lora[name + ".A"]
    return {name: w + change(name) if "_proj" in name else w for name, w in BASE.items()}


def forward(w: dict, ids, pad, wanted=(slice(None), -1), cache=None, start=0) -> torch.Tensor:
    """Log-probs of every next token, [M, V], at M places: the end of each row, or where a mask is.

    ids [B, T]; the first pad[b] in row b do not count. cache [LAYERS, 2, B, KV_HEADS, places,
    HEAD_DIM]: keys and values of the `start` tokens before these; new ones are appended.
    """
    (B, T), d, half, share = ids.shape, HEAD_DIM, HEAD_DIM // 2, HEADS // KV_HEADS
    linear = lambda name, x: x @ w[f"model.layers.{layer}.{name}_proj.weight"].T
    heads = lambda name, x: linear("self_attn." + name, x).view(B, T, -1, d).transpose(1, 2)
    norm = lambda name, x: F.rms_norm(x, x.shape[-1:], w[f"model.{name}.weight"], 1e-6)
    keys = torch.arange(start + T, device=DEVICE)
    at = keys[start:, None]  # [T, 1]
    seen = (keys <= at) & (keys >= pad[:, None, None].minimum(at))  # [B, T, keys]: no future
    speed = 10000.0 ** (-torch.arange(0, d, 2, device=DEVICE) / d)  # [d/2]
    turn = ((at - pad[:, None, None]) * speed).repeat(1, 1, 2)[:, None]  # [B, 1, T, d]: its place
    rope = lambda x: x * turn.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * turn.sin()
    x = F.embedding(ids, w["model.embed_tokens.weight"])  # [B, T, D]
    for layer in range(LAYERS):
        h = norm(f"layers.{layer}.input_layernorm", x)
        q = rope(norm(f"layers.{layer}.self_attn.q_norm", heads("q", h)))  # [B, HEADS, T, d]
        k = rope(norm(f"layers.{layer}.self_attn.k_norm", heads("k", h)))  # [B, KV_HEADS, T, d]
        v = heads("v", h)
        if cache is not None:
            cache[layer, :, :, :, start : start + T] = torch.stack([k, v])
            k, v = cache[layer, :, :, :, : start + T]
        # Two heads of queries share one of keys (GQA): here, as one head with twice the queries.
        q, mask = q.reshape(B, KV_HEADS, share * T, d), seen.repeat(1, share, 1)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(B, HEADS, T, d)
        x = x + linear("self_attn.o", y.transpose(1, 2).reshape(B, T, HEADS * d))
        h = norm(f"layers.{layer}.post_attention_layernorm", x)
        x = x + linear("mlp.down", F.silu(linear("mlp.gate", h)) * linear("mlp.up", h))
    return (norm("norm", x[wanted]) @ w["model.embed_tokens.weight"].T).log_softmax(-1)


# ----------------------------------------------------- sample (book: rollout.py, fast/sampler.py)
# One play of one task. What is trained is, token for token, what was sampled: prompt and reply are
# token ids, the end-of-turn token included; logprobs say how likely each was when it was drawn.
Episode = namedtuple("Episode", "prompt reply logprobs text reward", defaults=("", 0.0))


@torch.no_grad()
def play(w: dict, seeds: range, k: int, chance: torch.Tensor | None = None) -> list[list[Episode]]:
    """k episodes of each task, [G][k], drawn by chance [G·k, MAX_TOKENS] in [0, 1), or greedy."""
    asks, answers = zip(*map(make_task, seeds))
    prompts = [encode(CHAT.format(ask)) for ask in asks]  # G of them
    P = max(map(len, prompts))
    ids = torch.tensor([[0] * (P - len(p)) + p for p in prompts], device=DEVICE)  # [G, P]
    pad = torch.tensor([P - len(p) for p in prompts], device=DEVICE)  # [G]
    cache = torch.zeros(LAYERS, 2, len(seeds), KV_HEADS, P, HEAD_DIM, device=DEVICE)
    logp = forward(w, ids, pad, cache=cache).repeat_interleave(k, 0)  # [B, V], B = G · k:
    pad = pad.repeat_interleave(k)  # each prompt is read once and answered k times
    cache = F.pad(cache.repeat_interleave(k, 2), (0, 0, 0, MAX_TOKENS))
    tokens, logprobs, over = [], [], torch.zeros_like(pad, dtype=torch.bool)
    for t in range(MAX_TOKENS):
        token = logp.argmax(-1)  # [B]
        if chance is not None:  # the token at which the probabilities add up to more than chance
            cdf = logp.exp().cumsum(-1)  # [B, V]
            token = torch.searchsorted(cdf, chance[:, t : t + 1] * cdf[:, -1:], right=True)[:, 0]
        tokens.append(token.clamp(max=len(PIECES) - 1))
        logprobs.append(logp.gather(1, tokens[-1][:, None])[:, 0])
        over = over | (token == STOP)
        if over.all():
            break
        logp = forward(w, tokens[-1][:, None], pad, cache=cache, start=P + t)
    groups = [[] for _ in asks]
    drawn = zip(torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist())
    for b, (reply, old) in enumerate(drawn):
        g, n = b // k, reply.index(STOP) + 1 if STOP in reply else MAX_TOKENS  # the rest is noise
        text = "".join(PIECES[i] for i in reply[:n] if i != STOP)
        groups[g].append(Episode(prompts[g], reply[:n], old[:n], text, reward_of(answers[g], text)))
    return groups


# ------------------------------------------------------------ advantage and loss (book: grpo.py)
def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards [G, k] -> advantages [G, k]: [1, 0, 0, 1] -> [+1, -1, -1, +1]; zeros if all agree."""
    better = rewards - rewards.mean(1, keepdim=True)
    return better / (rewards.std(1, keepdim=True, correction=0) + 1e-6)


def logprobs_of(w: dict, episodes: list[Episode]) -> tuple[torch.Tensor, torch.Tensor]:
    """(the log-prob of each token of the replies now, [M]; whose it is, [M]), reply after reply."""
    rows = [e.prompt + e.reply for e in episodes]
    T = max(map(len, rows))
    ids = torch.tensor([row + [0] * (T - len(row)) for row in rows], device=DEVICE)  # [N, T]
    mask = [[len(e.prompt) <= t < len(e.prompt + e.reply) for t in range(1, T)] for e in episodes]
    mask = torch.tensor(mask, device=DEVICE)  # [N, T-1]: place t predicts token t + 1
    logp = forward(w, ids[:, :-1], torch.zeros_like(ids[:, 0]), mask)  # [M, V]
    return logp.gather(1, ids[:, 1:][mask][:, None])[:, 0], mask.nonzero()[:, 0]


def grpo_loss(w: dict, group: list[Episode], advantages: torch.Tensor) -> torch.Tensor:
    """The loss of one group, advantages [k]. Its value is near 0; its gradient is what counts."""
    now, row = logprobs_of(w, group)  # [M], [M]
    then = torch.tensor([logp for e in group for logp in e.logprobs], device=DEVICE)  # [M]
    length = torch.tensor([len(e.reply) for e in group], device=DEVICE)  # [k]
    ratio = (now - then).exp()  # [M], all 1 here; its gradient is that of the log-prob
    gain = torch.minimum(ratio * advantages[row], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[row])
    return -(gain / length[row]).sum()  # every reply weighs the same, however long it is


def step(optimizer, lora: dict, rate: float) -> float:
    """One step of Adam; returns the gradient's norm. A gradient longer than 1 is shortened to 1."""
    optimizer.param_groups[0]["lr"] = rate
    norm = torch.nn.utils.clip_grad_norm_(lora.values(), 1.0).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


# ---------------------------------------------------- loop (book: sft.py, train.py, evaluate.py)
def evaluate(w: dict, stage: str) -> None:
    """New tasks, greedy: how many are exactly right, with Wilson's 95% interval (1927)."""
    played = [group[0] for group in play(w, DEV, 1)]
    n, z2, p = len(played), 1.96**2, sum(e.reward for e in played) / len(played)
    half = (z2 * (p * (1 - p) / n + z2 / (4 * n * n))) ** 0.5
    low, high = ((p + z2 / (2 * n) + sign * half) / (1 + z2 / n) for sign in (-1, 1))
    habit = f"spells {sum(spells(e.text) for e in played) / n:4.0%}"
    print(f"{stage:10}  exact {p:.1%} [{low:.1%}, {high:.1%}]  n = {n}  {habit}", flush=True)


def main(seed: int, updates: int) -> None:
    torch.manual_seed(seed)
    lora = new_lora()
    evaluate(policy_of(lora), "before")
    # SFT: make demonstrations likelier. It teaches the form of a reply; it cannot teach the trick.
    optimizer, rng = torch.optim.AdamW(lora.values(), weight_decay=0), random.Random(seed)
    tasks, said = map(make_task, SFT_SEEDS), lambda counts: encode(demonstration(counts))
    shown = [Episode(encode(CHAT.format(ask)), [*said(counts), STOP], []) for ask, counts in tasks]
    for i in range(SFT_STEPS):
        loss = -logprobs_of(policy_of(lora), rng.sample(shown, SFT_BATCH))[0].mean()
        loss.backward()
        step(optimizer, lora, SFT_LR * min((i + 1) / (SFT_STEPS / 10), 1 - i / SFT_STEPS))
    evaluate(policy_of(lora), "after SFT")
    # GRPO: sample, compare, learn, look.
    optimizer = torch.optim.AdamW(lora.values(), weight_decay=0)  # with fresh moments
    try:
        for i in range(updates):
            first, chance = (seed * 100_000 + i) * TASKS % 10**9, torch.rand(TASKS * K, MAX_TOKENS)
            groups = play(policy_of(lora), range(first, first + TASKS), K, chance.to(DEVICE))
            rewards = torch.tensor([[e.reward for e in group] for group in groups])  # [TASKS, K]
            for group, advantages in zip(groups, advantages_of(rewards).to(DEVICE)):
                if advantages.any():  # else all did equally well: there is nothing to learn
                    (grpo_loss(policy_of(lora), group, advantages) / rewards.numel()).backward()
            rate = LR * min((i + 1) / WARMUP, 1 - (1 - LR_END) * i / updates)
            norm = step(optimizer, lora, rate)
            habit = sum(spells(e.text) for group in groups for e in group) / rewards.numel()
            look = f"reward {rewards.mean():.2f}  spells {habit:4.0%}  gradient {norm:.2f}"
            print(f"update {i + 1:3}  {look}", flush=True)
    except KeyboardInterrupt:
        print("stopped early; what it has learnt so far:")
    evaluate(policy_of(lora), "after GRPO")


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("--seed", type=int, default=0, help="of LoRA, the tasks and the samples")
    flags.add_argument("--updates", type=int, default=150, help="of GRPO")
    try:
        main(**vars(flags.parse_args()))
    except (RuntimeError, MemoryError) as error:
        if "memory" not in repr(error).lower():
            raise
        sys.exit("pico.py: out of memory; lower TASKS, or shorten DEV, at the top of the file")
