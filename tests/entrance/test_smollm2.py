"""Protects the real model: SFT and two updates of SmolLM2 are the same in the fast way and in the
plain one, and what each samples is what it trains on.
"""

from copy import deepcopy
from functools import partial

import pytest

import settings
import train
from bookkeeping.columns import log_columns
from grpo import update
from policy import adam
from sft import sft

SHORT = (
    "--env letters --difficulty 1 --model smollm2 --device cpu --updates 2 --num-tasks 2 --k 2 "
    "--max-tokens 12 --sft-steps 2 --sft-batch 2 --no-wandb --threads 1"
)


def test_the_fast_way_and_the_plain_one_train_smollm2_alike():
    """Both train on what the fast one sampled: after SFT their weights differ by rounding, so a
    draw near the border of two tokens may choose another. Advantages are set here, because replies
    of twelve tokens are all wrong.
    """
    found, groups = {}, None
    for name, more in (("fast", []), ("plain", ["--plain"])):
        cfg, flags = settings.command_line([*SHORT.split(), *more])
        cfg, policy, env_at, rollouts, _ = train.prepare(cfg, flags)
        backend = train.choose_backend(cfg, policy)
        with policy.learning():
            new_env = partial(env_at, cfg.difficulty)
            shown = sft(policy, new_env, settings.sft_seeds(cfg), cfg, backend)["losses"]
        own = rollouts.play(0, cfg.difficulty)
        groups = groups or deepcopy(own)
        with policy.learning():
            mismatch = learn(policy, cfg, backend, own, lr=0.0)["mismatch"]  # nothing moves
            first, second = (learn(policy, cfg, backend, groups, lr=1e-4) for _ in range(2))
        assert mismatch < 1e-4
        found[name] = [
            *shown,
            *(
                line[c]
                for line in (first, second)
                for c in ("loss", "grad_norm", "entropy", "ratio")
            ),
        ]
    fast, plain = found.values()
    assert fast == pytest.approx(plain, abs=1e-3)
    assert (
        first["grad_norm"] > 1 and second["clip_fraction"] > 0.1
    )  # there was something to compare


def learn(policy, cfg, backend, groups: list[list], lr: float) -> dict[str, float]:
    """An update that makes every other reply likelier and the rest less likely; its columns."""
    episodes = sum(groups, [])
    for i, e in enumerate(episodes):
        e.advantages = [1.0 - 2 * (i % 2)] * e.reply_tokens
    result = update(policy, adam(policy, lr), episodes, cfg, None, backend)
    return log_columns(result, groups, policy, cfg, backend)
