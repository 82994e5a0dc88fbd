"""Protects the plain way: with --plain a loss that needs more than log-probs is one line of grpo.py,
and a whole run is the run of the fast way.

The line is put into the source here, as a reader would, and its gradient compared with one that is computed by hand.
"""

import json
import math
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import grpo
import train
from rollout import Episode
from settings import Config

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "            loss.backward()\n"
BONUS = "            loss = loss - 0.1 * (batch.weights[row] * entropy).sum()\n"  # the lines of docs/fork.md
SKIPS = "    keep = [n for n, e in enumerate(episodes) if valid[n] and (cfg.kl > 0 or flat[n] != 0)]\n"
KEEPS = "    keep = [n for n, e in enumerate(episodes) if valid[n]]\n"
CFG = Config(max_tokens=20, micro_tokens=10**9, importance="clip")


@pytest.fixture
def with_entropy_bonus(monkeypatch):
    """grpo.py as docs/fork.md changes it, as a module of its own."""
    source = (ROOT / "grpo.py").read_text()
    assert source.count(BEFORE) == source.count(SKIPS) == 1
    module = types.ModuleType("grpo_with_entropy_bonus")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    source = source.replace(BEFORE, BONUS + BEFORE).replace(SKIPS, KEEPS)
    exec(compile(source, "grpo.py", "exec"), vars(module))
    module.MAX_GRAD_NORM = 1e9
    return module


def made_up() -> list[list[Episode]]:
    """Two groups of two: a prompt of three tokens, then four that the policy chose. All of the second earn the same."""
    rng = torch.Generator().manual_seed(3)
    groups = []
    for g in range(2):
        prompt = torch.randint(5, 1000, (3,), generator=rng).tolist()
        groups.append([])
        for member in range(2):
            ids = prompt + torch.randint(5, 1000, (4,), generator=rng).tolist()
            sampled, logprobs = [False] * 3 + [True] * 4, [0.0] * 3 + [-7.0] * 4
            groups[-1].append(Episode(g, g, ids, sampled, logprobs, turns=1, reward=float(member * (g == 0))))
    return groups


def test_an_entropy_bonus_is_two_lines_of_one_file_and_reaches_groups_without_advantages(load, gradients, assert_close, with_entropy_bonus):
    policy, groups, cfg = load("qwen3", 4, awake=True), made_up(), replace(CFG, plain=True, loss="reinforce")
    advantages = grpo.advantages_of(groups, cfg)
    frozen = torch.optim.SGD(policy.trainable().values(), lr=0.0)
    with_entropy_bonus.update(policy, frozen, groups, advantages, cfg)
    ours = gradients(policy)
    policy.model.zero_grad()
    total = torch.zeros(())
    for e, advantage in zip(sum(groups, []), advantages.flatten().tolist()):
        logits = policy.model(input_ids=torch.tensor([e.token_ids]), use_cache=False).logits[0].float()
        for t in range(3, 7):
            p = logits[t - 1].softmax(-1)
            entropy = -(p * p.log()).sum()
            total = total - (advantage * p[e.token_ids[t]].log() + 0.1 * entropy) / 16
    total.backward()
    assert_close(ours, gradients(policy))


def test_without_plain_the_entropy_has_no_gradient_so_the_bonus_would_do_nothing(load, gradients, with_entropy_bonus):
    """Why the line needs --plain: the fast head gives the entropy's value only."""
    policy, groups = load("qwen3", 4, awake=True), made_up()
    found = {}
    for name, module in (("bonus", with_entropy_bonus), ("none", grpo)):
        advantages = grpo.advantages_of(groups, CFG)
        module.update(policy, torch.optim.SGD(policy.trainable().values(), lr=0.0), groups, advantages, CFG)
        found[name] = gradients(policy)
    longest = math.sqrt(sum(float((g**2).sum()) for g in found["bonus"].values()))
    for name, g in found["none"].items():  # grpo.update clips, the module does not: compare directions
        norm = math.sqrt(sum(float((x**2).sum()) for x in found["none"].values()))
        assert torch.allclose(found["bonus"][name] / longest, g / norm, atol=1e-4)


def test_a_whole_plain_run_is_the_run_of_the_fast_way(monkeypatch, tmp_path):
    short = ["--updates", "2", "--sft-steps", "2", "--sft-examples", "4", "--sft-batch", "2", "--num-tasks", "2", "--k", "3",
             "--eval-n", "2", "--max-tokens", "12", "--difficulty", "2", "--reward", "partial", "--no-wandb", "--no-eval-other-tiers",
             "--threads", "1"]  # fmt: skip
    found = {}
    for name, flags in (("fast", []), ("plain", ["--plain"])):
        monkeypatch.setattr(sys, "argv", ["train.py", *short, *flags, "--runs", str(tmp_path), "--name", name])
        train.main()
        found[name] = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    for fast, plain in zip(found["fast"], found["plain"], strict=True):
        assert fast["reward"] == plain["reward"] and fast["reply_tokens"] == plain["reply_tokens"]  # the same tokens
        for column in ("grad_norm", "entropy", "loss", "mismatch"):
            assert fast.get(column, 0) == pytest.approx(plain.get(column, 0), abs=1e-3)
