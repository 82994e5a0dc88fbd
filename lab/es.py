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
from rollout import Episode, play
from sft import sft

SIZES = [(0.003, 0.003), (0.01, 0.01), (0.03, 0.03), (0.01, 0.03)]  # (sigma, lr)
MADE_BY = "python -m lab.es; python -m lab.few"
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


def train(flags: str, seed: int, sigma: float, lr: float) -> tuple[Callable, dict]:
    """((temperature, seeds) -> episodes, how many tokens RL sampled and trained on)."""
    cfg = config_of(flags, seed)
    policy = load_policy(str(PICO), cfg.lora_rank, cfg.lora_alpha, "cpu", seed)
    new_env = partial(settings.make_env, cfg, cfg.difficulty)
    with policy.learning():
        sft(policy, new_env, settings.sft_seeds(cfg), cfg)
    sampler = TorchSampler(policy)
    tokens = []  # sampled, of each perturbed policy
    update = 0

    def played(temperature: float, seeds: list[int]) -> list[Episode]:
        sampler.sync(update)
        groups = play(policy, sampler, new_env, seeds, 1, cfg.max_tokens, temperature, update)
        return sum(groups, [])

    def earn() -> float:
        episodes = played(cfg.temperature, settings.task_seeds(cfg, update)[:TASKS])
        tokens.append(sum(e.reply_tokens for e in episodes))
        return sum(e.reward for e in episodes) / len(episodes)

    while sum(tokens) < cfg.sampled_tokens:
        evolve(policy, earn, update, sigma, lr)
        update += 1
    return played, {"sampled": sum(tokens), "trained": 0}


# ------------------------------------------------------------------ what lab/few.py needs as well
def config_of(flags: str, seed: int) -> settings.Config:
    """A finished config for pico_base."""
    cfg, _ = settings.command_line([*flags.split(), "--seed", f"{seed}"])
    refusals.check(cfg)  # fills in what depends on the environment
    return settings.complete(cfg, settings.SMALL_MODEL, str(PICO), {"micro_tokens": 4096})


def grow(name: str, what: str, sizes: dict[str, tuple], train: Callable) -> None:
    """Sweep the sizes with seed 0, then train the best with each of recipe.json's seeds.

    sizes: {how results/es.json calls them: what train gets after the flags and the seed}.
    """
    torch.set_num_threads(1)
    table = study.read_tables(tables.ROOT / "runs")["recipe"]
    arm = {"what": what, "swept": {}, "seeds": [], "planned": table.seeds}
    exact = lambda episodes: [e.components["exact"] for e in episodes]
    mean_of = lambda size: arm["swept"][size]["development"]
    for size, values in sizes.items():
        played, _ = train(table.flags, 0, *values)
        right = exact(played(0.0, range(settings.DEV_SEEDS, settings.DEV_SEEDS + 256)))
        arm["swept"][size] = {"development": sum(right) / 256}
    arm["settings"] = max(sizes, key=mean_of)  # the first of equals
    held_out = range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + 512)
    for seed in range(table.seeds):
        played, tokens = train(table.flags, seed, *sizes[arm["settings"]])
        marks = {how: exact(played(t, held_out)) for how, t in (("greedy", 0.0), ("sampled", 1.0))}
        found = {how: {"exact": tables.digits(right)} for how, right in marks.items()}
        entry = {"seed": seed, "held_out": {"tier 6": found}, "tokens": tokens}
        arm["seeds"].append(entry | {"commit": run.commit(), "machine": cpu_name()})
        tables.keep(tables.RESULTS / "es.json", {"made_by": MADE_BY}, {name: arm})


if __name__ == "__main__":
    named = {f"sigma {sigma} --lr {lr}": (sigma, lr) for sigma, lr in SIZES}
    grow("es", "evolution strategies: no backward pass", named, train)
