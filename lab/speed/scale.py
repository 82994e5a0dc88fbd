"""Scale: does a token cost the same in a large batch and in a long reply, what do more processes gain, and what would 64 cards do?

    python -m lab.speed.scale tokens          # 8 to 256 episodes, 64 to 4,096 tokens of reply: microseconds per token, and the limit's
    python -m lab.speed.scale processes       # one update of 1 to 8 processes: 1 and 2 for real, the others from what they send
    python -m lab.speed.scale cards           # on paper: one update of Qwen3-4B on 1, 8 and 64 cards; seconds, no GPU is needed

Each writes results/bench/scale-NAME.json; minutes, but for the last. The machine has two cores, so eight processes cannot be timed on it.
What can: how long one of them works (its share of the tasks, alone on a core), what it sends (fast/parallel.py's calls are counted), and
how long a call and a byte take between two real ones. The rest is arithmetic, and the two real processes say how far it is off.
"""

import json
import math
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import tyro
from tqdm import tqdm

import settings
from fast import parallel, plan
from fast.ahead import InTurn
from fast.sampler import TorchSampler
from grpo import advantages_of, update
from lab.common import RESULTS, ROOT, read_json
from lab.speed import limits
from lab.speed import memory as plans
from lab.speed.bench import learn, save, versions
from lab.speed.sides import Coin, prompts_of
from policy import PICO, Policy, load_policy
from rollout import Episode

GROUP = 8  # samples of one prompt
EPISODES = (8, 16, 32, 64, 128, 256)
REPLIES = (64, 256, 1024, 4096)  # tokens
PROCESSES = tuple(range(1, 9))
TASKS = 8  # of an update of letters, train.py's default


# ------------------------------------------------------------------------------------------------ tokens
def forced(policy: Policy, sampler: TorchSampler, episodes: int, reply: int, noise: int) -> list[list[Episode]]:
    """Episodes with replies of exactly so many tokens, sampled; half of a group is paid."""
    policy.stop_ids = frozenset([-1])
    prompts = [prompt for _, prompt in zip(range(episodes // GROUP), prompts_of(policy) * episodes)]
    seeds = [[(noise, g, i) for i in range(GROUP)] for g in range(len(prompts))]
    samples = sampler.sample(prompts, GROUP, reply, 1.0, seeds)
    return [
        [Episode(g, g, [*prompt, *s.token_ids], [False] * len(prompt) + [True] * reply, [0.0] * len(prompt) + s.logprobs, 1, float(i % 2))
         for i, s in enumerate(group)]
        for g, (prompt, group) in enumerate(zip(prompts, samples))
    ]  # fmt: skip


def tokens(
    episodes: tuple[int, ...] = EPISODES, replies: tuple[int, ...] = REPLIES, episodes_at: int = 16, reply_at: int = 256, rounds: int = 3,
    threads: int = 2, device: str = "cpu",
) -> None:  # fmt: skip
    """Microseconds per sampled and per trained token along both axes, the cases in turn;
    the limit says what attention to a longer text has to cost."""
    torch.set_num_threads(threads)
    policy = load_policy(str(PICO), 32, 64, device)
    machine = limits.measure(device, policy.lm.dtype)
    shape, element = limits.shape_of(policy.lm.config.to_dict(), 32), policy.lm.dtype.itemsize
    sampler, optimizer = TorchSampler(policy), torch.optim.AdamW(policy.trainable().values(), lr=1e-12, weight_decay=0.0)
    cases = list(dict.fromkeys([(n, reply_at) for n in episodes] + [(episodes_at, n) for n in replies]))
    spent: dict = {case: ([], []) for case in cases}
    work = {}
    for n in tqdm(range(rounds + 1)):
        for case in cases if n else cases[:1]:  # the first one warms up
            start = time.perf_counter()
            groups = forced(policy, sampler, *case, noise=n)
            middle = time.perf_counter()
            with sampler.asleep():
                learn(policy, optimizer, groups, case[1])
            if n:
                work[case] = limits.sampling(shape, groups, element), limits.training(shape, groups, element)
                spent[case][0].append(middle - start)
                spent[case][1].append(time.perf_counter() - middle)
    rows = []
    for (count, reply), times in spent.items():
        row, total = {"episodes": count, "reply": reply}, count * reply
        for what, some, seconds in zip(("sampling", "training"), work[count, reply], times):
            found = limits.of_limit(machine, some, seconds, total)
            middle, low, high, least = (
                round(1e6 * t / total, 2) for t in (found["seconds"]["median"], min(seconds), max(seconds), found["limit_seconds"])
            )
            row[what] = {"microseconds": middle, "low": low, "high": high, "limit_microseconds": least, "of_limit": found["of_limit"]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    words = lambda flag, values, usual: f" --{flag} {' '.join(map(str, values))}" if values != usual else ""
    command = (
        f"python -m lab.speed.scale tokens --rounds {rounds} --threads {threads}"
        + words("episodes", episodes, EPISODES)
        + words("replies", replies, REPLIES)
    )
    axes = {"episodes": [r for r in rows if r["reply"] == reply_at], "reply": [r for r in rows if r["episodes"] == episodes_at]}
    flat = {axis: {what: flatness([r[what] for r in some]) for what in ("sampling", "training")} for axis, some in axes.items()}
    save("scale-tokens", {"command": command, **versions(threads), "rows": rows, "largest_over_smallest": flat})


def flatness(cells: list[dict]) -> dict[str, float]:
    """By how much the dearest token costs more than the cheapest; and the same of the limit, which grows as texts do."""
    of = lambda name: [c[name] for c in cells]
    over = lambda values: round(max(values) / min(values), 2)
    return {"measured": over(of("microseconds")), "limit": over(of("limit_microseconds"))}


# ------------------------------------------------------------------------------------------------ processes
@contextmanager
def counted():
    """`with counted() as sent:` {call: [calls, bytes]} of what this process sends. Stands before torch.distributed's own functions."""
    sizes = {"all_reduce": lambda tensor: tensor.nbytes, "all_gather_object": lambda _, thing: len(pickle.dumps(thing))}
    own, sent = {name: getattr(dist, name) for name in sizes}, {name: [0, 0] for name in sizes}

    def call(name: str, *given, **named):
        sent[name][0] += 1
        sent[name][1] += sizes[name](*given)
        return own[name](*given, **named)

    for name in sizes:
        setattr(dist, name, partial(call, name))
    try:
        yield sent
    finally:
        for name, function in own.items():
            setattr(dist, name, function)


def one(out: Path, tasks: int = TASKS, updates: int = 6, threads: int = 1, max_tokens: int | None = None) -> None:
    """Updates of letters in this process, or in its share of them; rank 0 writes what they took into `out`. Rewards are drawn by chance, so
    that every group has a signal and the weights hardly move: the batches of 1 and of 8 processes are alike."""
    parallel.start()
    cfg = settings.Config(env="letters", num_tasks=tasks, lr=1e-12, threads=threads, device="cpu", max_tokens=max_tokens)
    settings.check(cfg)
    torch.set_num_threads(threads)
    policy = load_policy(str(PICO), cfg.lora_rank, cfg.lora_alpha, cfg.device)
    settings.complete(cfg, policy.n_parameters, "")
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=cfg.lr)
    env = lambda level: Coin(level, "binary", True, "states")
    rollouts, rows = InTurn(cfg, policy, TorchSampler(policy), env, partial(settings.task_seeds, cfg)), []
    for n in range(updates):
        start = time.perf_counter()
        with counted() as sent:
            groups = rollouts.batch(n, cfg.difficulty)
            with rollouts.paused(), policy.learning():
                update(policy, optimizer, groups, advantages_of(groups, cfg), cfg)
        seconds = time.perf_counter() - start
        episodes = sum(map(len, groups))
        rows.append({"seconds": seconds, **rollouts.seconds, "sent": sent, "episodes": episodes,
                     "tokens": sum(len(e.token_ids) for g in groups for e in g), "pickled": len(pickle.dumps(groups))})  # fmt: skip
    whole = timed(pickle.dumps, groups), timed(pickle.loads, pickle.dumps(groups))
    link = constants() if parallel.world() > 1 else {}
    if parallel.rank() == 0:
        tensors = [p.nbytes for p in policy.trainable().values()]
        found = {"world": parallel.world(), "tasks": tasks, "rows": rows[1:], "link": link, "pickle_seconds": whole[0],
                 "unpickle_seconds": whole[1], "trained_tensors": len(tensors), "trained_bytes": sum(tensors)}  # fmt: skip
        out.write_text(json.dumps(found))
    parallel.stop()


def timed(work, *given, times: int = 5) -> float:
    """Seconds of the fastest call."""
    return min(limits.seconds(lambda: work(*given), "cpu") for _ in range(times))


def constants(large: int = 2**24, times: int = 20) -> dict[str, float]:
    """Between these processes: seconds of a call that carries next to nothing, and bytes a second of one that carries a lot."""
    small, big = torch.zeros(1), torch.zeros(large // 4)
    found = {}
    for name, tiny, wide, size in (
        ("all_reduce", lambda: dist.all_reduce(small), lambda: dist.all_reduce(big), big.nbytes),
        ("all_gather_object", lambda: parallel.gather([0]), lambda: parallel.gather([bytes(large)]), large),
    ):
        dist.barrier()
        each = statistics.median(limits.seconds(tiny, "cpu") for _ in range(times))
        moved = min(limits.seconds(wide, "cpu") for _ in range(5))
        found[name] = {"seconds": each, "bytes_per_second": size / max(1e-9, moved - each)}
    return found


def alone(world: int, tasks: int, updates: int, threads: int, max_tokens: int | None) -> dict:
    """`one` in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = f"-m lab.speed.scale one --tasks {tasks} --updates {updates} --threads {threads} --out".split() + [str(out)]
        words += ["--max-tokens", str(max_tokens)] if max_tokens else []
        if world > 1:
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *words]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{world} processes of lab.speed.scale: {done.stderr[-800:]}")
        return read_json(out)


def exchange(
    world: int, sent: dict[str, list[float]], link: dict[str, dict[str, float]], pickled: float, pack: float, unpack: float
) -> dict[str, float]:
    """Seconds that `world` processes spend on talking in an update.

    sent: {call: [calls, bytes]} of one process; link: seconds of an empty call between two, and bytes a second. A ring of n processes moves
    2(n-1)/n of a sum's bytes through each link, and (n-1)/n of all that is gathered; an empty call takes as many rounds as a tree is high.
    pickled: bytes of all episodes, of which each process packs its share and unpacks everything; pack, unpack: seconds per byte.
    """
    if world == 1:
        return {"gradients": 0.0, "episodes": 0.0}
    rounds = math.ceil(math.log2(world))
    calls, size = sent["all_reduce"]
    gradients = calls * rounds * link["all_reduce"]["seconds"] + 2 * (world - 1) / world * size / link["all_reduce"]["bytes_per_second"]
    way = link["all_gather_object"]
    moved = (world - 1) / world * pickled / way["bytes_per_second"] + pickled * (pack / world + unpack)
    return {"gradients": gradients, "episodes": sent["all_gather_object"][0] * rounds * way["seconds"] + moved}


def simulate(world: int, by_tasks: dict[int, dict], sent: dict, link: dict, draws: int = 1000) -> dict[str, float]:
    """Seconds of an update of so many processes. by_tasks: {tasks: what one process alone took for them}, for the shares that occur."""
    rng, whole = np.random.default_rng(0), by_tasks[TASKS]
    shares = [len(range(r, TASKS, world)) for r in range(world)]
    rollouts = {n: [row["seconds"] - row["train"] for row in by_tasks[n]["rows"]] for n in set(shares)}
    slowest = float(np.mean([max(rng.choice(rollouts[n]) for n in shares) for _ in range(draws)]))  # all wait for the last one
    train = statistics.median(row["train"] for row in by_tasks[math.ceil(TASKS / world)]["rows"])  # split by tokens, not by tasks
    pickled = statistics.mean(row["pickled"] for row in whole["rows"])
    pack, unpack = (whole[name] / whole["rows"][-1]["pickled"] for name in ("pickle_seconds", "unpickle_seconds"))
    talk = exchange(world, sent, link, pickled, pack, unpack)
    return {"rollout": slowest, "train": train, **talk, "seconds": slowest + train + sum(talk.values())}


def processes(updates: int = 8, threads: int = 1, max_tokens: int | None = None) -> None:
    """An update of letters by 1 to 8 processes of one thread each: two for real, the others from one process's shares and what two send."""
    sizes = sorted({math.ceil(TASKS / n) for n in PROCESSES} | {TASKS // n for n in PROCESSES})
    by_tasks = {n: alone(1, n, updates, threads, max_tokens) for n in tqdm(sizes, desc="one process alone")}
    two = alone(2, TASKS, updates, threads, max_tokens)
    sent = {}
    for row in two["rows"]:
        for call, (calls, size) in row["sent"].items():
            entry = sent.setdefault(call, [0.0, 0.0])
            entry[0], entry[1] = entry[0] + calls / len(two["rows"]), entry[1] + size / len(two["rows"])
    real = {n: limits.spread([row["seconds"] for row in found["rows"]]) for n, found in ((1, by_tasks[TASKS]), (2, two))}
    found = {n: {name: round(s, 4) for name, s in simulate(n, by_tasks, sent, two["link"]).items()} for n in PROCESSES}
    one_alone = found[1]["seconds"]
    rows = [
        {"processes": n, "tasks": math.ceil(TASKS / n), **row, "times_as_fast": round(one_alone / row["seconds"], 2)}
        for n, row in found.items()
    ]
    mean = lambda name: statistics.mean(row[name] for row in by_tasks[TASKS]["rows"])
    whole = by_tasks[TASKS]
    result = {
        "command": f"python -m lab.speed.scale processes --updates {updates} --threads {threads}"
        + (f" --max-tokens {max_tokens}" if max_tokens else ""), **versions(threads),
        "real_seconds": real,
        "predicted_over_real_of_two": round(found[2]["seconds"] / real[2]["median"], 3),
        "sent_by_one_of_two": {call: {"calls": round(calls, 1), "bytes": round(size)} for call, (calls, size) in sent.items()},
        "link_of_two": two["link"],
        "trained_tensors": two["trained_tensors"], "trained_bytes": two["trained_bytes"],
        "pickled_bytes_per_token": round(mean("pickled") / mean("tokens"), 2),
        "pickle_seconds_per_byte": whole["pickle_seconds"] / whole["rows"][-1]["pickled"],
        "unpickle_seconds_per_byte": whole["unpickle_seconds"] / whole["rows"][-1]["pickled"],
        "environment_seconds_per_episode": round(mean("environment") / mean("episodes"), 6),
        "rows": rows,
    }  # fmt: skip
    save("scale-processes", result)


# ------------------------------------------------------------------------------------------------ cards
# Of an H100 SXM, from NVIDIA's data sheet: operations a second in bfloat16 without sparsity, bytes a second of its memory, and of NVLink in
# one direction; between machines, an InfiniBand port of 400 Gb/s for each card. Seconds of a call: assumed.
H100 = {
    "flops": 989e12,
    "memory": 3.35e12,
    "nvlink": 450e9,
    "network": 50e9,
    "call": 20e-6,
    "call_between_machines": 40e-6,
    "in_a_machine": 8,
}
REACHED = {"sampling": 0.6, "training": 0.5}  # of the limit: what lab/speed/card.py is to find; until it has, a goal and no measurement
REPLY = 1024  # tokens of a reply, all alike
CARDS = (1, 8, 64)


def one_update(cards: int, tasks: int, setting: plans.Setting, parts_of_a_row: tuple[int, ...], measured: dict) -> dict[str, float]:
    """Seconds of the parts of one update, `tasks` groups of setting.k conversations on so many cards,
    as fast/parallel.py would go about it.

    parts_of_a_row: tokens that are read, sampled, read, sampled, …; measured: what Python and the exchange take (processes). A card samples
    as many rows at once as its cache holds; the rows of an update are shared out by tokens, so cards without a task of their own train too.
    """
    full = setting.rank == 0
    shape, machine = shape_of(setting.model, setting.rank), limits.Machine(H100["flops"], {1: H100["memory"]})
    mask = [i % 2 == 1 for i, n in enumerate(parts_of_a_row) for _ in range(n)]
    row, mine = Episode(0, 0, [0] * len(mask), mask, []), math.ceil(tasks / cards) * setting.k
    at_once = min(mine, 256, plans.plan(setting).cache_tokens // len(mask))
    groups = [[row] * min(setting.k, at_once)] * max(1, at_once // setting.k)
    recomputed = (4 / 3 if full else 3 / 2) if setting.checkpointing else 1.0  # once more forward
    bytes_each, learnt = (4 if full else 2), trained_sizes(setting.model, setting.rank)
    parts = {
        "sampling": mine / sum(map(len, groups)) * machine.seconds(limits.sampling(shape, groups, 2))[0] / REACHED["sampling"],
        "training": recomputed
        * machine.seconds(limits.training(shape, [[row] * setting.k] * tasks, 2, full))[0]
        / cards
        / REACHED["training"],
        "copy of the weights": 3 * bytes_each * shape.weights / H100["memory"],  # read, add LoRA, write
        "environment": measured["environment_seconds_per_episode"] * mine,
    }
    inside = cards <= H100["in_a_machine"]
    link = {"seconds": H100["call" if inside else "call_between_machines"], "bytes_per_second": H100["nvlink" if inside else "network"]}
    sent = {"all_reduce": [len(learnt), sum(learnt)], "all_gather_object": [measured["gathers"], 0]}
    pickled = measured["pickled_bytes_per_token"] * tasks * setting.k * len(mask)
    python = (measured[f"{word}_seconds_per_byte"] for word in ("pickle", "unpickle"))
    talk = exchange(cards, sent, {"all_reduce": link, "all_gather_object": link}, pickled, *python)
    parts |= {f"exchange of {what}": seconds for what, seconds in talk.items()}
    return parts | {"seconds": sum(parts.values())}


shape_of = cache(lambda model, rank: limits.shape_of(plans.MODELS[model], rank))


@cache
def trained_sizes(model: str, rank: int) -> list[int]:
    """Bytes of the gradient of each tensor that learns."""
    with torch.device("meta"):
        return [4 * p.numel() for p in plans.build(plans.MODELS[model], rank).parameters() if p.requires_grad]


def conversation(preset: str, share: float) -> tuple[int, ...]:
    """Of a published run: its turns, with replies of this share of the longest; what is said between is fast/plan.py's."""
    p = settings.PRESETS[preset]
    replies, _, between = plan.TALK[p["env"]]
    return (between // replies, int(share * p["max_tokens"])) * replies


def cards() -> None:
    """The paper plan. From results/bench/scale-processes.json: what is sent, and what Python takes to pack and unpack it; from a data
    sheet: the card."""
    found = read_json(RESULTS / "bench" / "scale-processes.json")
    names = ("pickled_bytes_per_token", "pickle_seconds_per_byte", "unpickle_seconds_per_byte", "environment_seconds_per_episode")
    measured = {name: found[name] for name in names} | {"gathers": found["sent_by_one_of_two"]["all_gather_object"]["calls"]}
    settings_of = {32: plans.ASKED["4b-lora"], 0: replace(plans.ASKED["4b-full"], checkpointing=True)}
    shown = lambda seconds: {name: round(s, 3) for name, s in seconds.items()}
    rows, presets = [], {}
    for rank, setting in settings_of.items():
        for n in CARDS:
            for tasks in dict.fromkeys((TASKS, TASKS * n)):
                spent = one_update(n, tasks, setting, (plans.PROMPT, REPLY), measured)
                rate = round(tasks * setting.k / spent["seconds"], 2)
                rows.append(
                    {"cards": n, "rank": rank, "tasks": tasks, "episodes": tasks * setting.k, "episodes_per_second": rate, **shown(spent)}
                )
    for name in ("swarm-published", "alphabet-published"):
        p, setting = settings.PRESETS[name], plans.published(name)
        for share in (1.0, 0.25):
            spent = one_update(1, p["num_tasks"], setting, conversation(name, share), measured)
            hours = round(p["updates"] * spent["seconds"] / 3600, 1)
            presets.setdefault(name, {})[f"replies of {share:.0%}"] = {
                "tokens": sum(conversation(name, share)),
                "hours": hours,
                **shown(spent),
            }
    save("scale-cards", {"command": "python -m lab.speed.scale cards", "model": "Qwen3-4B", "card": H100, "reached": REACHED,
                         "reply": REPLY, "measured": measured, "rows": rows, "presets": presets})  # fmt: skip


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"tokens": tokens, "processes": processes, "cards": cards, "one": one})
