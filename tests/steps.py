"""What tests of the mathematics share: one update as train.py makes it, and gradients to compare.

`naive_logprobs` is a log-prob written the slow, obvious way. tests/conftest.py has the same
functions as fixtures.
"""

from dataclasses import replace

import pytest
import torch

import grpo
from bookkeeping.columns import log_columns
from policy import MAX_GRAD_NORM
from settings import Config
from train import choose_backend

FLAGS = Config(temperature=1.0, max_tokens=20, micro_tokens=10**9, importance="clip")


def train_on(policy, optimizer, groups, reference=None, version=None, **flags) -> dict[str, float]:
    """One update, and its columns; flags of settings.Config, and max_grad_norm.

    version: how many updates the policy has seen; None: as many as the one that sampled.
    """
    longest = flags.pop("max_grad_norm", MAX_GRAD_NORM)
    cfg = replace(FLAGS, **flags)
    for e in (e for group in groups for e in group):
        e.age = 0 if version is None else version - e.policy_version
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("policy.MAX_GRAD_NORM", longest)
        grpo.compute_advantages(groups, cfg)
        backend = choose_backend(cfg, policy)
        done = grpo.update(policy, optimizer, sum(groups, []), cfg, reference, backend)
        return log_columns(done, groups, policy, cfg, backend)


def naive_logprobs(policy, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[T-1] float32: log-prob of tokens 1 … T-1, each given those before it.

    One unpadded row, the model's own full logits, one token after the other: nothing is shared
    with fast/logprobs.py.
    """
    ids = torch.tensor([token_ids])
    logits = policy.model(input_ids=ids, use_cache=False).logits[0].float()  # [T, V]
    each = []
    for t in range(1, len(token_ids)):
        logp = torch.log_softmax(logits[t - 1] / temperature, dim=0)  # [V]
        each.append(logp[token_ids[t]])
    return torch.stack(each)


def snapshot(policy) -> dict[str, torch.Tensor]:
    """A copy of every weight."""
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def gradients(policy) -> dict[str, torch.Tensor]:
    """A copy of every trainable weight's gradient; 0 where there is none."""
    of = lambda p: torch.zeros_like(p) if p.grad is None else p.grad.clone()
    return {name: of(p) for name, p in policy.trainable().items()}


def assert_close(a: dict, b: dict, share: float = 1e-4) -> None:
    """Two dicts of gradients agree to this share of the largest entry, and are not all zero."""
    assert a.keys() == b.keys()
    largest = max(g.abs().max().item() for g in b.values())
    assert largest > 0
    for name in b:
        assert (a[name] - b[name]).abs().max().item() <= share * largest, name


@torch.no_grad()
def stir(policy, scale: float, seed: int = 0) -> None:
    """Add noise to every trainable weight: LoRA's B starts at 0, which would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for p in policy.trainable().values():
        p.add_(scale * torch.randn(p.shape, generator=generator))
