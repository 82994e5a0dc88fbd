"""Protects the real model: SFT and two updates of SmolLM2 are the same in the fast way and in the
plain one, what each samples is what it trains on, and a run of it ends with a report.
"""

import sys
from copy import deepcopy
from functools import partial

import pytest

import settings
import train
from bookkeeping.columns import log_columns
from bookkeeping.records import lines
from grpo import update
from policy import adam, copy_weights
from sft import sft

SHORT = (
    "--env letters --difficulty 1 --model smollm2 --device cpu --updates 1 --num-tasks 2 --k 2 "
    "--max-tokens 12 --sft-steps 2 --sft-batch 2 --eval-n 2 --no-eval-other-tiers --kl 0.1 "
    "--no-wandb --threads 1"
).split()


def test_the_fast_way_and_the_plain_one_train_smollm2_alike():
    """Both train on what the fast one sampled: after SFT their weights differ by rounding, so a
    draw near the border of two tokens may choose another. Advantages are set here, because replies
    of twelve tokens are all wrong.
    """
    found, greedy, groups = [], [], None
    for more in ([], ["--plain"]):
        cfg, flags = settings.command_line([*SHORT, *more])
        cfg, policy, new_env_at, collector, _ = train.prepare(cfg, flags)
        backend = train.choose_backend(cfg, policy)
        new_env = partial(new_env_at, cfg.difficulty)
        greedy.append([e.token_ids for [e] in collector.greedy(new_env, [1, 2], 0)])
        reference = copy_weights(policy)
        with policy.learning():
            shown = sft(policy, new_env, settings.sft_seeds(cfg), cfg, backend)
        own = collector.collect(0, cfg.difficulty)
        groups = groups or deepcopy(own)
        learn = partial(learn_by_hand, policy, cfg, backend, reference)
        with policy.learning():
            assert learn(own, lr=0.0)["mismatch"] < 1e-4  # nothing has moved
            first, second = learn(groups, lr=1e-4), learn(groups, lr=1e-4)
        # There is something to compare.
        assert first["grad_norm"] > 1 and first["kl_ref"] > 0.01 and second["clip_fraction"] > 0.1
        columns = ("loss", "grad_norm", "entropy", "ratio", "kl_ref")
        found.append([*shown["losses"], *(line[c] for line in (first, second) for c in columns)])
    assert greedy[0] == greedy[1]
    assert found[0] == pytest.approx(found[1], rel=0, abs=1e-3)


def learn_by_hand(policy, cfg, backend, reference, groups: list[list], lr: float) -> dict:
    """An update that makes every other reply likelier and the rest less likely; its columns."""
    episodes = sum(groups, [])
    for i, e in enumerate(episodes):
        e.advantages = [1.0 - 2 * (i % 2)] * e.reply_tokens
    result = update(policy, adam(policy, lr), episodes, cfg, reference, backend)
    return log_columns(result, groups, policy, cfg, backend)


def test_a_run_of_smollm2_ends_with_a_report(monkeypatch, tmp_path):
    words = ["train.py", *SHORT, "--runs", str(tmp_path), "--name", "run"]
    monkeypatch.setattr(sys, "argv", words)
    train.main()
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["mismatch"] < 1e-4
    assert line["kl_ref"] == pytest.approx(0, abs=1e-6)  # at first the policy is its reference
    assert "model: smollm2" in (tmp_path / "run" / "report.md").read_text()
