"""RL without a backward pass: perturb the weights, play, move to where more was earned.

    python -m learn.es UPDATES

Evolution strategies (Salimans et al. 2017, arXiv 1703.03864; for language models Qiu et al. 2025,
arXiv 2509.24372). Nothing is differentiated, so any reward of a whole policy will do, and sampling
is all that it costs. docs/recipe.md says how many tokens that takes beside GRPO.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch

from env_letters import Letters
from policy import PICO, PlainSampler, Policy, load_policy
from rollout import play


def evolve(
    policy: Policy, earn: Callable[[], float], seed: int, members: int, sigma: float, lr: float
) -> torch.Tensor:
    """One update; returns the rewards of the perturbed policies, [members].

    earn      plays with the policy's present weights: the mean reward
    sigma     the standard deviation of a perturbation
    lr        how far to move along the perturbations, each weighted by its standardized reward
              (the papers' step, but for a constant that is part of lr)
    """
    seeds = [seed * members + n for n in range(members)]
    rewards = torch.zeros(members)
    for n, noise in enumerate(seeds):
        move(policy, noise, sigma)
        rewards[n] = earn()
        move(policy, noise, -sigma)
    scores = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)  # [members]
    for noise, score in zip(seeds, scores.tolist()):
        move(policy, noise, lr * score / members)
    return rewards


@torch.no_grad()
def move(policy: Policy, seed: int, step: float) -> None:
    """Add step · noise to all that learns. A seed's noise is drawn again, so none is stored."""
    generator = torch.Generator().manual_seed(seed)
    for p in policy.trainable().values():
        p += step * torch.randn(p.shape, generator=generator).to(p.device)


def main(updates: str = "5") -> None:
    policy = load_policy(str(PICO), lora_rank=32, lora_alpha=64)
    sampler = PlainSampler(policy)
    new_env = partial(Letters, difficulty=2, reward_kind="binary", think=True, style="states")

    def earn() -> float:
        groups = play(policy, sampler, new_env, tasks, 1, 64, 1.0, sample_seed=update)
        return sum(e.reward for group in groups for e in group) / len(groups)

    for update in range(int(updates)):
        tasks = [update * 4 + n for n in range(4)]
        rewards = evolve(policy, earn, update, members=4, sigma=0.01, lr=0.01)
        print(f"update {update + 1}  rewards {' '.join(f'{r:.2f}' for r in rewards.tolist())}")


if __name__ == "__main__":
    main(*sys.argv[1:])
