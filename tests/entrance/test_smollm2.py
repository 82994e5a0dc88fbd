"""Protects the real model: SFT and two updates of SmolLM2 are the same in the fast way and in the
plain one, and what it sampled is what it trains on.
"""

import sys

import pytest

import train
from bookkeeping.records import lines

SHORT = (
    "--env letters --difficulty 1 --model smollm2 --device cpu --updates 2 --num-tasks 2 --k 2 "
    "--max-tokens 12 --sft-steps 2 --sft-batch 2 --eval-n 2 --no-eval-other-tiers --reward partial "
    "--kl 0.1 --no-wandb --threads 1"  # with a KL every episode is trained on
)


def test_the_fast_way_and_the_plain_one_train_smollm2_alike(monkeypatch, tmp_path):
    found = {}
    for name, more in (("fast", []), ("plain", ["--plain"])):
        words = [*SHORT.split(), *more, "--runs", str(tmp_path), "--name", name]
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        train.main()
        found[name] = lines(tmp_path / name / "metrics.jsonl")
    for fast, plain in zip(found["fast"], found["plain"], strict=True):
        assert fast["reward"] == plain["reward"] and fast["reply_tokens"] == plain["reply_tokens"]
        assert fast["mismatch"] < 1e-4 and plain["mismatch"] < 1e-4
        for column in ("grad_norm", "entropy", "loss"):
            assert fast.get(column, 0) == pytest.approx(plain.get(column, 0), abs=1e-3)
