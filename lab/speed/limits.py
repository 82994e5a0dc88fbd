"""How far is the limit? What a machine could do, beside what we do: for sampling, training, and the long conversations of swarm.

    python -m lab.speed.limits                     # a CPU, two threads: a few minutes, into results/bench/limits.json
    python -m lab.speed.limits --device cuda       # the same on a card; lab/speed/card.py has a large model's

Two things limit a pass through a model. Its arithmetic: the multiplications and additions that the mathematics asks for, over what the best
matrix product of the same device reaches. And its memory traffic: the bytes that have to be read at least once in each step, over what a
copy of as many bytes moves (so what fits a cache is measured in that cache). The longer of the two is a step's least time, and the sum over
all steps is the limit. Nothing reaches it: a step of a small model is made of small products, a softmax is counted as free, and so is all
that is not the model (tokens to text, the environment). It says how much there is to gain,
which a ratio to somebody else's program does not.

On a CPU the product that torch takes by itself may be slower than another that it has: on this AMD, MKL's reaches half of oneDNN's. So the
peak is the best of both, over several sizes.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
import tyro
from tqdm import tqdm

import settings
from fast.products import onednn
from lab.common import table
from lab.speed import memory as plans
from lab.speed.bench import BENCH_SEEDS, learn, save, versions
from lab.speed.bench_peers import spread
from lab.speed.sides import Ours
from policy import PICO_SWARM, load_policy
from rollout import Episode, play

TRIES = 6  # of a copy or a product; the best one counts
PRODUCTS = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}  # [n, n] x [n, n]
COPIES = (2**22, 2**24, 2**26, 2**28, 2**30, 2**32)  # bytes that a copy touches: half are read, half written
HOST = 2**30  # of these, a CPU's copies go up to here


def seconds(work: Callable, device: str) -> float:
    """Of one call of work, until the device has done it."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------ what the machine can do
def bandwidth(device: str, size: int) -> float:
    """Bytes a second that a copy moves which reads size/2 bytes and writes as many. Best of TRIES."""
    a = torch.ones(size // 2, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return size / min(seconds(lambda: b.copy_(a), device) for _ in range(TRIES))


def products(x: torch.Tensor, w: torch.Tensor) -> dict[str, Callable]:
    """The matrix products x w' that torch has here, by name."""
    ways = {"torch": lambda: torch.nn.functional.linear(x, w)}
    if x.device.type == "cpu" and torch.backends.mkldnn.is_available():
        ways["oneDNN"] = lambda: onednn(x, w)
    return ways


@torch.inference_mode()
def arithmetic(device: str, dtype: torch.dtype, sizes: tuple[int, ...] = ()) -> dict[str, float]:
    """{way: floating-point operations a second of its best matrix product in this format}."""
    found: dict[str, float] = {}
    for n in sizes or PRODUCTS[torch.device(device).type]:
        x, w = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        for way, product in products(x, w).items():
            try:
                rate = 2 * n**3 / min(seconds(product, device) for _ in range(TRIES))
            except (RuntimeError, NotImplementedError, AttributeError):
                continue  # a torch without it
            found[way] = max(rate, found.get(way, 0.0))
    return found


@dataclass(frozen=True)
class Machine:
    flops: float  # floating-point operations a second
    copies: dict[int, float]  # {bytes that a copy touches: bytes a second}

    def seconds(self, work: list[tuple[float, float]]) -> tuple[float, float, float]:
        """The least for steps of (floating-point operations, bytes): (limit, of arithmetic alone, of memory alone)."""
        pairs = [(flops / self.flops, read / self.at(read)) for flops, read in work]
        return sum(map(max, pairs)), sum(a for a, _ in pairs), sum(b for _, b in pairs)

    def at(self, size: float) -> float:
        """Bytes a second of the largest copy that touches no more than so many: a smaller one is faster, so the limit stays one."""
        return self.copies[max((s for s in self.copies if s <= size), default=min(self.copies))]


@cache
def measure(device: str, dtype: torch.dtype) -> Machine:
    most = COPIES[-1] if device != "cpu" else HOST
    copies = {size: bandwidth(device, size) for size in COPIES if size <= most}
    return Machine(max(arithmetic(device, dtype).values()), copies)


# ------------------------------------------------------------------------------------------------ what a model asks for
@dataclass(frozen=True)
class Shape:
    """How many numbers a model has where it costs."""

    weights: int  # all that a step reads; an embedding that is not the head too is looked up, and does not count
    experts: int  # of these, in experts
    met: float  # share of the experts that one token is sent to
    linear: float  # in the matrices of the layers that a token is multiplied by
    lora: int
    head: int  # vocabulary x width
    wide: int  # layers x query heads x channels of a head
    cache: int  # keys and values of one token

    def read(self, tokens: float) -> float:
        """Weights that a step with so many tokens has to read, if each goes to experts at random."""
        return self.weights - self.experts * (1 - self.met) ** tokens


def shape_of(config: dict, rank: int = 0) -> Shape:
    """config: the numbers of a model's config.json; rank: of its LoRA, 0 for none."""
    with torch.device("meta"):
        named = list(plans.build(config, rank).named_parameters())
    count = lambda *words, least=1: sum(p.numel() for name, p in named if all(w in name for w in words) and p.ndim >= least)
    lora, experts, layers = count("lora_"), count("experts."), config["num_hidden_layers"]
    met = config["num_experts_per_tok"] / config["num_experts"] if experts else 1.0
    looked_up = 0 if config["tie_word_embeddings"] else count("embed_tokens")
    heads, d = config["num_attention_heads"], config["head_dim"]
    return Shape(
        weights=count("") - lora - looked_up,
        experts=experts,
        met=met,
        linear=count(".layers.", least=2) - lora - experts * (1 - met),
        lora=lora,
        head=config["vocab_size"] * config["hidden_size"],
        wide=layers * heads * d,
        cache=2 * layers * config["num_key_value_heads"] * d,
    )


def turns(episode: Episode) -> np.ndarray:
    """Of each reply: [read so far, where it begins, where it ends], in tokens. [turns, 3]"""
    edges = np.flatnonzero(np.diff(np.r_[False, episode.sampled, False]))
    return np.stack([np.r_[0, edges[1:-1:2]], edges[::2], edges[1::2]], 1)


def sampling(shape: Shape, groups: list[list[Episode]], element: int) -> list[tuple[float, float]]:
    """(floating-point operations, bytes) of every step that it takes to sample these episodes, all of them side by side.

    A group's prompt is read once, and its keys are read once in each step for all its live rows. Nothing else is shared: later turns
    differ. A row stops being counted with its reply. element: bytes of a number.
    """
    s, work = shape, []
    rows = [(g, turns(e)) for g, group in enumerate(groups) for e in group if any(e.sampled)]
    prompt = np.array([turns(group[0])[0, 1] for group in groups])
    for turn in range(max(len(t) for _, t in rows)):
        group, old, begin, end = np.array([(g, *t[turn]) for g, t in rows if len(t) > turn]).T
        new, old = (prompt, 0 * prompt) if turn == 0 else (begin, old)
        read = (new - old).sum()
        flops = 2 * s.linear * read + 2 * s.wide * (new**2 - old**2).sum() + 2 * s.head * len(new)
        work.append((flops, element * (s.read(read) + s.cache * new.sum())))
        for j in range(1, (end - begin).max()):  # the first token came out of the prompt
            live = end - begin > j
            seen, lines = (begin + j)[live], group[live]
            flops = 2 * (s.linear + s.head) * live.sum() + 4 * s.wide * seen.sum()
            keys = (seen - prompt[lines]).sum() + prompt[np.unique(lines)].sum()
            work.append((flops, element * (s.read(live.sum()) + s.cache * keys)))
    return work


def training(shape: Shape, groups: list[list[Episode]], element: int, full: bool = False) -> list[tuple[float, float]]:
    """The same of one training step on these episodes.

    A matrix of n numbers costs a token 2n forward, 2n for the gradient of its input, and 2n for its own if it learns. A group's prompt is
    run once. The head works on the sampled tokens alone; attention's backward pass is twice its forward pass. What is computed twice to
    save memory does not count. Bytes: the weights twice, and AdamW's reads and writes of 32 bytes for each weight that learns.
    """
    s, tokens, pairs, trained = shape, 0, 0.0, 0
    for group in groups:
        ends = [turns(e)[-1, 2] - 1 for e in group]  # the last sampled token predicts nothing
        shared = turns(group[0])[0, 1]
        tokens += shared + sum(ends) - shared * len(ends)
        pairs += shared**2 / 2 + sum(end**2 - shared**2 for end in ends) / 2
        trained += sum(e.reply_tokens for e in group)
    each = 6 if full else 4
    flops = tokens * (each * s.linear + 6 * s.lora) + each * trained * s.head + 12 * s.wide * pairs
    return [(flops, 2 * element * s.read(tokens) + 32 * (s.weights if full else s.lora))]


def of_limit(machine: Machine, work: list[tuple[float, float]], times: list[float], tokens: float) -> dict:
    """One row of the table: seconds and tokens a second, the limit, and the share of it that is reached."""
    limit, by_arithmetic, by_memory = machine.seconds(work)
    middle = statistics.median(times)
    return {
        "seconds": spread(times), "tokens": round(tokens), "tokens_per_second": round(tokens / middle),
        "gflop": round(sum(f for f, _ in work) / 1e9, 2), "gigabytes": round(sum(b for _, b in work) / 1e9, 3),
        "limit_seconds": round(limit, 4), "arithmetic_seconds": round(by_arithmetic, 4), "memory_seconds": round(by_memory, 4),
        "of_limit": round(limit / middle, 4), "limited_by": "arithmetic" if by_arithmetic > by_memory else "memory",
    }  # fmt: skip


def average(works: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Of several rounds, as one round: Machine.seconds adds up, so the steps of all, each by its share."""
    n = len(works)
    return [(f / n, b / n) for work in works for f, b in work]


# ------------------------------------------------------------------------------------------------ what we do
def letters(machine: Machine, forced: bool, rounds: int, device: str) -> dict[str, dict]:
    """64 episodes of letters, as lab/speed/bench_peers.py times them."""
    ours, seen = Ours(forced, device), []
    shape, element = shape_of(ours.policy.lm.config.to_dict(), 32), ours.policy.lm.dtype.itemsize
    for _ in tqdm(range(rounds + 1), desc=f"letters, {'forced' if forced else 'stopping'}"):
        row = ours.update()
        seen.append((row["rollout"], row["train"], ours.groups))
    return both(machine, shape, element, seen[1:])  # the first one warms up


def swarm(machine: Machine, rounds: int, device: str) -> dict[str, dict]:
    """Conversations of 25 turns: train.py's batch of 4 scenarios x 8 samples, and what it trains on."""
    policy = load_policy(str(PICO_SWARM), 32, 64, device)
    cfg = settings.Config(env="swarm", num_tasks=4)
    settings.check(cfg)
    settings.complete(cfg, policy.n_parameters, "swarm's long conversations, with pico_swarm")
    from fast.sampler import TorchSampler

    sampler, optimizer = TorchSampler(policy), torch.optim.AdamW(policy.trainable().values(), lr=1e-12, weight_decay=0.0)
    shape, element, seen = shape_of(policy.lm.config.to_dict(), 32), policy.lm.dtype.itemsize, []
    for n in tqdm(range(rounds), desc="swarm"):  # ten seconds each: what warming up takes is a small part
        start = time.perf_counter()
        seeds = [BENCH_SEEDS + n * cfg.num_tasks + i for i in range(cfg.num_tasks)]
        groups = play(policy, sampler, partial(settings.make_env, cfg, cfg.difficulty), seeds, cfg.k, cfg.max_tokens, 1.0, n)
        middle = time.perf_counter()
        with sampler.asleep():
            learn(policy, optimizer, groups, cfg.max_tokens)
        seen.append((middle - start, time.perf_counter() - middle, groups))
    return both(machine, shape, element, seen)


def both(machine: Machine, shape: Shape, element: int, seen: list[tuple[float, float, list]]) -> dict[str, dict]:
    """Sampling and training of some rounds: (seconds of each, the groups that were played)."""
    told = [[g for g in groups if len({e.reward for e in g}) > 1] for *_, groups in seen]  # the others are not trained on
    count = lambda batches: float(np.mean([sum(e.reply_tokens for g in groups for e in g) for groups in batches]))
    played = [groups for *_, groups in seen]
    return {
        "sampling": of_limit(machine, average([sampling(shape, g, element) for g in played]), [s for s, *_ in seen], count(played)),
        "training": of_limit(machine, average([training(shape, g, element) for g in told]), [t for _, t, _ in seen], count(told)),
    }  # fmt: skip


def lines(rows: dict[str, dict]) -> list[str]:
    """The table, in Markdown."""
    body = []
    for name, r in rows.items():
        body.append([name, f"{r['tokens']:,}", f"{r['seconds']['median']:.2f}", f"{r['tokens_per_second']:,}", r["limited_by"],
                     f"{r['limit_seconds']:.3f}", f"{r['of_limit']:.1%}"])  # fmt: skip
    return table("| what | tokens | seconds | tokens a second | limited by | its limit, seconds | of the limit |", body)


def main(device: str = "cpu", threads: int = 2, rounds: int = 5, swarm_rounds: int = 2) -> None:
    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    peaks = {str(d).removeprefix("torch."): arithmetic(device, d) for d in (torch.float32, torch.bfloat16)}
    machine = measure(device, dtype)
    rows = {}
    for forced, case in ((False, "real stopping"), (True, "256 forced tokens")):
        rows |= {f"{what}, letters, {case}": row for what, row in letters(machine, forced, rounds, device).items()}
    if swarm_rounds:
        rows |= {f"{what}, swarm, 25 turns": row for what, row in swarm(machine, swarm_rounds, device).items()}
    print("\n".join(lines(rows)))
    extra = "" if device == "cpu" else f" --device {device}"
    result = {
        "command": f"python -m lab.speed.limits{extra} --threads {threads} --rounds {rounds} --swarm-rounds {swarm_rounds}",
        **versions(threads),
        "gflops": {form: {way: round(rate / 1e9, 1) for way, rate in ways.items()} for form, ways in peaks.items()},
        "peak_gflops": round(machine.flops / 1e9, 1),
        "gigabytes_per_second": {f"{size / 2**20:g} MB": round(rate / 1e9, 1) for size, rate in machine.copies.items()},
        "rows": rows,
    }
    save("limits" if device == "cpu" else "limits-card", result)


if __name__ == "__main__":
    tyro.cli(main)
