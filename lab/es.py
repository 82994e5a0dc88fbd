"""Evolution strategies (learn/es.py) beside the arms of results/recipe.json.

    python -m lab.es

The same SFT, tasks and number of sampled tokens as the table's other arms. Sizes are swept with
seed 0 on development tasks; the best is played on held-out tasks with each of five seeds.
"""

from functools import partial

import torch
import tyro

import settings
from bookkeeping import refusals
from bookkeeping.run import commit
from evaluate import HELD_OUT_SEEDS
from fast.machine import cpu_name
from fast.sampler import TorchSampler
from lab.study import read_tables
from lab.tables import RESULTS, ROOT, digits, keep
from learn.es import evolve
from policy import PICO, load_policy
from rollout import play
from sft import sft

SIZES = [(0.003, 0.003), (0.01, 0.01), (0.03, 0.03), (0.01, 0.03)]  # (sigma, lr)
MEMBERS, TASKS = 16, 4  # perturbed policies per update, and tasks that each of them plays


def train(flags: str, seed: int, sigma: float, lr: float) -> tuple:
    """(play greedily: (first seed, n) -> exact answers, tokens that were sampled)."""
    cfg, _ = settings.command_line([*flags.split(), "--seed", f"{seed}"])
    refusals.check(cfg)  # fills in what depends on the environment
    policy = load_policy(str(PICO), cfg.lora_rank, cfg.lora_alpha, "cpu", seed)
    cfg = settings.complete(cfg, policy.n_parameters, str(PICO), {"micro_tokens": 4096})
    new_env = partial(settings.make_env, cfg, cfg.difficulty)
    with policy.learning():
        sft(policy, new_env, settings.sft_seeds(cfg), cfg)
    sampler, sampled, update = TorchSampler(policy), 0, 0

    def episodes_of(seeds: list[int], temperature: float) -> list:
        sampler.sync(update)
        groups = play(policy, sampler, new_env, seeds, 1, cfg.max_tokens, temperature, update)
        return sum(groups, [])

    def earn() -> float:
        nonlocal sampled
        episodes = episodes_of(settings.task_seeds(cfg, update)[:TASKS], cfg.temperature)
        sampled += sum(e.reply_tokens for e in episodes)
        return sum(e.reward for e in episodes) / len(episodes)

    while sampled < cfg.sampled_tokens:
        rewards = evolve(policy, earn, update, MEMBERS, sigma, lr)
        update += 1
        print(f"seed {seed}  update {update}  reward {rewards.mean():.2f}  {sampled} tokens")
    exact = lambda first, n: [
        e.components["exact"] for e in episodes_of([first + i for i in range(n)], 0.0)
    ]
    return exact, sampled


def main(threads: int = 1) -> None:
    """Sweep, then five seeds, into results/recipe.json."""
    torch.set_num_threads(threads)
    table = read_tables(ROOT / "runs")["recipe"]
    arm = {"what": "evolution strategies: no backward pass", "swept": {}, "seeds": []}
    for sigma, lr in SIZES:
        exact, _ = train(table.flags, 0, sigma, lr)
        found = exact(settings.DEV_SEEDS, 256)
        arm["swept"][f"sigma {sigma} lr {lr}"] = {"development": sum(found) / 256}
    means = [swept["development"] for swept in arm["swept"].values()]
    best = SIZES[means.index(max(means))]  # the first of equals
    arm |= {"settings": f"sigma {best[0]} lr {best[1]}", "planned": table.seeds}
    for seed in range(table.seeds):
        exact, sampled = train(table.flags, seed, *best)
        world = {"tier 6": {"greedy": {"exact": digits(exact(HELD_OUT_SEEDS, 512))}}}
        final = {"final": digits(exact(settings.DEV_SEEDS, 256))}
        told = {"tokens": {"sampled": sampled}, "machine": cpu_name(), "commit": commit()}
        arm["seeds"].append({"seed": seed, "held_out": world, "development": final} | told)
        keep(RESULTS / "recipe.json", {}, {"es": arm})


if __name__ == "__main__":
    tyro.cli(main)
