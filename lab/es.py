"""RL without a backward pass: perturb the weights, play, move to where more was earned.

    python -m lab.es        # results/es.json, beside recipe.json: the same SFT, tasks and tokens

Evolution strategies (Salimans et al. 2017, arXiv 1703.03864; for language models Qiu et al. 2025,
arXiv 2509.24372). Nothing is differentiated, so any reward of a whole policy will do, and sampling
is all that it costs. Sizes are swept with seed 0 on development tasks; the best is played on
held-out tasks with each of the table's seeds.
"""

from collections.abc import Callable
from functools import partial

import torch

import settings
from bookkeeping import refusals, run
from evaluate import HELD_OUT_SEEDS
from fast.machine import cpu_name
from fast.sampler import TorchSampler
from lab import study, tables
from policy import PICO, Policy, load_policy
from rollout import play
from sft import sft

SIZES = [(0.003, 0.003), (0.01, 0.01), (0.03, 0.03), (0.01, 0.03)]  # (sigma, lr)
MEMBERS, TASKS = 16, 4  # perturbed policies per update, and tasks that each of them plays


def evolve(policy: Policy, earn: Callable[[], float], seed: int, sigma: float, lr: float) -> None:
    """One update. earn() plays with the policy's present weights: the mean reward.

    sigma is a perturbation's standard deviation. lr is how far to move along the perturbations,
    each weighted by its standardized reward.
    """
    noises = [seed * MEMBERS + n for n in range(MEMBERS)]
    rewards = []
    for noise in noises:
        move(policy, noise, sigma)
        rewards.append(earn())
        move(policy, noise, -sigma)
    rewards = torch.tensor(rewards)  # [MEMBERS]
    scores = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
    for noise, score in zip(noises, scores.tolist()):
        move(policy, noise, lr * score / MEMBERS)


@torch.no_grad()
def move(policy: Policy, seed: int, step: float) -> None:
    """Add step · noise to all that learns. A seed's noise is drawn again, so none is stored."""
    generator = torch.Generator().manual_seed(seed)
    for p in policy.trainable().values():
        p += step * torch.randn(p.shape, generator=generator).to(p.device)


def train(flags: str, seed: int, sigma: float, lr: float) -> tuple[Callable, int]:
    """((first seed, n) -> n exact answers, greedy; how many tokens were sampled)."""
    cfg, _ = settings.command_line([*flags.split(), "--seed", f"{seed}"])
    refusals.check(cfg)  # fills in what depends on the environment
    policy = load_policy(str(PICO), cfg.lora_rank, cfg.lora_alpha, "cpu", seed)
    cfg = settings.complete(cfg, policy.n_parameters, str(PICO), {"micro_tokens": 4096})
    new_env = partial(settings.make_env, cfg, cfg.difficulty)
    with policy.learning():
        sft(policy, new_env, settings.sft_seeds(cfg), cfg)
    sampler = TorchSampler(policy)
    tokens = []  # sampled, of each perturbed policy
    update = 0

    def played(seeds: list[int], temperature: float) -> list:
        sampler.sync(update)
        groups = play(policy, sampler, new_env, seeds, 1, cfg.max_tokens, temperature, update)
        return sum(groups, [])

    def earn() -> float:
        episodes = played(settings.task_seeds(cfg, update)[:TASKS], cfg.temperature)
        tokens.append(sum(e.reply_tokens for e in episodes))
        return sum(e.reward for e in episodes) / len(episodes)

    while sum(tokens) < cfg.sampled_tokens:
        evolve(policy, earn, update, sigma, lr)
        update += 1
    exact = lambda e: e.components["exact"]
    return lambda first, n: [*map(exact, played(range(first, first + n), 0.0))], sum(tokens)


def main() -> None:
    torch.set_num_threads(1)
    table = study.read_tables(tables.ROOT / "runs")["recipe"]
    mean = lambda size: sum(train(table.flags, 0, *size)[0](settings.DEV_SEEDS, 256)) / 256
    swept = {size: mean(size) for size in SIZES}
    best = max(swept, key=swept.get)  # the first of equals
    name = "sigma {} --lr {}".format
    arm = {
        "what": "evolution strategies: no backward pass",
        "swept": {name(*size): {"development": x} for size, x in swept.items()},
        "seeds": [],
        "settings": name(*best),
        "planned": table.seeds,
    }
    for seed in range(table.seeds):
        exact, tokens = train(table.flags, seed, *best)
        entry = {
            "seed": seed,
            "held_out": {
                "tier 6": {"greedy": {"exact": tables.digits(exact(HELD_OUT_SEEDS, 512))}}
            },
            "commit": run.commit(),
            "tokens": {"sampled": tokens, "trained": 0},
            "machine": cpu_name(),
        }
        arm["seeds"].append(entry)
        tables.keep(tables.RESULTS / "es.json", {"made_by": "python -m lab.es"}, {"es": arm})


if __name__ == "__main__":
    main()
