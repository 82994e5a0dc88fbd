"""`train_on(policy, optimizer, groups, **flags)`: one update as train.py's loop makes it, with settings that a test names."""

from dataclasses import replace

import grpo
from settings import Config

FLAGS = Config(
    baseline="group", normalize=True, temperature=1.0, max_tokens=20, micro_tokens=10**9, epochs=1, kl=0.0, importance="clip",
)  # fmt: skip


def train_on(policy, optimizer, groups, reference=None, version: int | None = None, max_grad_norm: float | None = None, **flags):
    """version: how many updates the policy has seen (None: as many as the one that sampled). Flags are those of settings.Config."""
    cfg = replace(FLAGS, **flags)
    for e in (e for group in groups for e in group):
        e.age = 0 if version is None else version - e.policy_version
    longest = grpo.MAX_GRAD_NORM
    grpo.MAX_GRAD_NORM = longest if max_grad_norm is None else max_grad_norm
    try:
        return grpo.update(policy, optimizer, groups, grpo.advantages_of(groups, cfg), cfg, reference)
    finally:
        grpo.MAX_GRAD_NORM = longest
