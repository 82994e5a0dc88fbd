"""Protects the plain way: a whole run with --plain is the run of the fast way."""

import sys

import pytest

import train
from bookkeeping.records import lines


def test_a_whole_plain_run_is_the_run_of_the_fast_way(monkeypatch, tmp_path):
    short = ["--updates", "2", "--sft-steps", "2", "--sft-examples", "4", "--sft-batch", "2", "--num-tasks", "2", "--k", "3",
             "--eval-n", "2", "--max-tokens", "12", "--difficulty", "2", "--reward", "partial", "--no-wandb", "--no-eval-other-tiers",
             "--threads", "1"]  # fmt: skip
    found = {}
    for name, flags in (("fast", []), ("plain", ["--plain"])):
        words = ["train.py", *short, *flags, "--runs", str(tmp_path), "--name", name]
        monkeypatch.setattr(sys, "argv", words)
        train.main()
        found[name] = lines(tmp_path / name / "metrics.jsonl")
    for fast, plain in zip(found["fast"], found["plain"], strict=True):
        # The same tokens.
        assert fast["reward"] == plain["reward"] and fast["reply_tokens"] == plain["reply_tokens"]
        for column in ("grad_norm", "entropy", "loss", "mismatch"):
            assert fast.get(column, 0) == pytest.approx(plain.get(column, 0), abs=1e-3)
