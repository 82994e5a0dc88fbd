"""Protects lab/es.py: evolution strategies climb a reward of the weights and leave no perturbation
behind; thirteen numbers learn, and the sampler reads what the trainer learns."""

import torch

from fast.sampler import TorchSampler
from lab import es
from policy import plain_forward
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


def test_each_seed_perturbs_in_directions_of_its_own(monkeypatch):
    drawn = []
    monkeypatch.setattr(es, "sft", lambda *given: None)  # its SFT is not what is looked at
    monkeypatch.setattr(es, "move", lambda policy, noise, step: drawn.append(noise))
    flags = "--env letters --difficulty 1 --max-tokens 4 --sampled-tokens 1"
    for seed in (0, 1):
        es.evolution(flags, seed, sigma=0.01, lr=0.01)
    assert len(drawn) == 2 * 3 * es.MEMBERS and len({*drawn}) == 2 * es.MEMBERS


def test_equal_rewards_leave_the_weights_as_they_were(load):
    policy = load("qwen3", 4, awake=True)
    before = snapshot(policy)
    es.evolve(policy, lambda: 0.5, 0, sigma=0.01, lr=0.01)
    torch.testing.assert_close(snapshot(policy), before, rtol=1e-5, atol=1e-6)


def test_thirteen_parameters_learn_and_the_sampler_has_them():
    policy = es.tiny(seed=0)
    (v,) = policy.trainable().values()
    assert v.shape == (13,) and v.eq(0).all()
    with torch.no_grad():
        v += 0.5
    [[sample]] = TorchSampler(es.folded(policy)).sample([[5, 6, 7]], 1, 8, 1.0, [[(0, 0)]])
    ids = torch.tensor([[5, 6, 7, *sample.token_ids]])
    mask = torch.arange(ids.shape[1] - 1)[None] >= 2
    found = plain_forward(policy, ids, mask).logprobs
    torch.testing.assert_close(found, torch.tensor(sample.logprobs), rtol=1e-4, atol=1e-4)
    found.sum().backward()
    assert v.grad.abs().min() > 0
    with torch.no_grad():
        v.zero_()  # then it is the base, and says something else
    assert (plain_forward(policy, ids, mask).logprobs - found).abs().max() > 1e-3
