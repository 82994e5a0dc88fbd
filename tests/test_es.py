"""Protects lab/es.py: it climbs a reward of the weights, and leaves no perturbation behind."""

import torch

from lab import es
from steps import snapshot


def test_evolution_strategies_climb_without_a_gradient(load):
    policy = load("qwen3", 4)
    weights = list(policy.trainable().values())[:2]
    goal = [w.detach() + 0.05 * torch.randn_like(w) for w in weights]
    distance = lambda: sum((w - g).pow(2).sum() for w, g in zip(weights, goal)).item()
    before = distance()
    for update in range(100):
        es.evolve(policy, lambda: -distance(), update, sigma=0.01, lr=0.01)
    assert distance() < before / 2
    assert all(p.grad is None for p in policy.trainable().values())


def test_equal_rewards_leave_the_weights_as_they_were(load):
    policy = load("qwen3", 4, awake=True)
    before = snapshot(policy)
    es.evolve(policy, lambda: 0.5, 0, sigma=0.01, lr=0.01)
    torch.testing.assert_close(snapshot(policy), before, rtol=1e-5, atol=1e-6)
