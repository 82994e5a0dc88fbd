"""Protects the memory of a run: what the sampler or the trainer does not need is given back."""

import weakref
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import settings
import train
from bookkeeping.pretrained import load_checked
from fast import ahead, machine

FROZEN, LEARNS, EXACT = (False, torch.bfloat16), (True, torch.float32), (False, torch.float32)


@pytest.mark.parametrize(
    "small, rank, formats",
    [(0, 4, {FROZEN, LEARNS}), (0, 0, {LEARNS}), (machine.SMALL, 4, {EXACT, LEARNS})],
)
def test_a_cards_number_formats(model_folder, monkeypatch, small, rank, formats):
    """The meta device is no CPU, so a model there has a card's number formats."""
    monkeypatch.setattr(machine, "SMALL", small)
    policy = load_checked(model_folder("qwen3"), rank, 8, device="meta")
    assert {(p.requires_grad, p.dtype) for p in policy.model.parameters()} == formats
    assert policy.bfloat16 == (small == 0)


# ---------------------------------------------------------------------- what fits a CPU's memory


@pytest.mark.parametrize(
    "most, stat, free",
    [
        ("4294967296", "anon 1073741824\nfile 3221225472\n", 3.0),  # what was read of files is free
        ("max", "anon 1073741824\n", 8.0),
        ("99294967296", "anon 0\n", 8.0),
        (None, None, 8.0),
    ],
)
def test_free_memory_is_the_containers_if_that_is_less(tmp_path, monkeypatch, most, stat, free):
    for name, text in (("memory.max", most), ("memory.stat", stat)):
        if text:
            (tmp_path / name).write_text(text)
    machine_has = SimpleNamespace(available=8 * 2**30)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: machine_has)
    assert machine.free_memory(tmp_path) == free


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_what_a_token_keeps_is_what_an_update_keeps(load, monkeypatch, lora_rank):
    """Twice the tokens keep twice as much, and weights do not count."""
    policy = load("qwen3", lora_rank)
    # Attention that is written out keeps its scores, a number per pair of tokens.
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    kept = machine.kept_per_token(policy, 100)
    exact = 0.06 if lora_rank else 0.02  # our own layers keep a mask
    assert kept == pytest.approx(machine.kept_per_token(policy, 100, 64), rel=exact)
    # With LoRA, long conversations run other layers, which keep something else.
    assert (machine.kept_per_token(policy, 2000) != kept) == (lora_rank > 0)
    config = policy.lm.config
    floats = kept * 2**30 / 4 / config.num_hidden_layers
    assert 4 * config.hidden_size < floats < 100 * config.hidden_size


@pytest.mark.parametrize(
    "free, typed, chosen",
    [
        (8.0, None, (8192, False)),
        (0.65, None, (2048, False)),  # less memory: smaller pieces
        (0.56, None, (1900, True)),  # one conversation of 1,000 tokens does not fit as it is
        (0.56, 5000, (5000, False)),  # who says how many gets them
        (0.5, None, "needs .* lower --max-tokens"),
    ],
)
def test_an_update_is_cut_so_that_it_fits(tiny, monkeypatch, free, typed, chosen):
    per_token = 2**-14  # 16,384 tokens a GiB
    monkeypatch.setattr(machine, "kept_per_token", lambda policy, longest: per_token)
    weights = sum(p.nbytes for p in tiny.lm.parameters()) / 2**30
    learn = sum(p.nbytes for p in tiny.trainable().values()) / 2**30
    monkeypatch.setattr(machine, "free_memory", lambda: free + weights + 3 * learn)
    cfg = settings.Config(env="mine.py:Mine", max_tokens=250, micro_tokens=typed)
    if isinstance(chosen, str):
        with pytest.raises(ValueError, match=chosen):
            machine.fit_memory(cfg, tiny, opening=1000, turns=4)
    else:
        told = machine.fit_memory(cfg, tiny, opening=0, turns=4)
        found = cfg.micro_tokens, cfg.gradient_checkpointing
        assert found == pytest.approx(chosen, rel=0.3), told
        assert bool(told) == (chosen[0] not in (8192, 5000))


# ------------------------------------------------------------------ a run keeps nothing it need not


@pytest.mark.usefixtures("products")
def test_sampler_and_trainer_lend_each_other_their_memory(tmp_path, monkeypatch):
    """plays: (names of gradients, optimizers alive, training mode?). updates: (what the sampler
    holds, gradients?)."""
    seen = SimpleNamespace(sampler=None, plays=[], updates=[], closed=[])
    optimizers, real_init = weakref.WeakSet(), torch.optim.Optimizer.__init__

    def init(self, *args, **kwargs):
        real_init(self, *args, **kwargs)
        optimizers.add(self)

    def make_sampler(cfg, policy, real=ahead.make_sampler):
        seen.sampler = real(cfg, policy)
        seen.sampler.close = lambda: seen.closed.append(len(seen.updates))  # as vLLM's has one
        return seen.sampler

    def spied_play(policy, *args, real=ahead.play, **more):
        gradients = [name for name, p in policy.model.named_parameters() if p.grad is not None]
        seen.plays.append((gradients, len(optimizers), policy.model.training))
        groups = real(policy, *args, **more)
        for i, episode in ((i, e) for group in groups for i, e in enumerate(group)):
            episode.reward = float(i % 2)  # replies of 16 tokens earn nothing to train on
        return groups

    def update(policy, *args, real=train.update, **kwargs):
        decoder = seen.sampler.decoder
        held = [*decoder.caches, *decoder.row_caches, *(decoder.layers or [])]
        stats = real(policy, *args, **kwargs)
        seen.updates.append((held, any(p.grad is not None for p in policy.model.parameters())))
        return stats

    cfg = settings.Config(
        updates=2, num_tasks=2, k=2, eval_n=2, max_tokens=16, sft_steps=2, sft_examples=2,
        threads=1, wandb=False, eval_other_tiers=False, runs=str(tmp_path), name="tiny",
        device="cpu", difficulty=6, gradient_checkpointing=True,
    )  # fmt: skip
    monkeypatch.setattr(train, "update", update)
    rollouts = patch.multiple(ahead, make_sampler=make_sampler, play=spied_play)
    with rollouts, patch.object(torch.optim.Optimizer, "__init__", init):
        train.train(cfg)
    # Three evaluations, two rollouts: no gradients, one optimizer.
    assert seen.plays == [([], 1, False)] * (3 + 2)
    assert seen.updates == [([], True)] * 2  # nothing while the trainer works
    assert seen.closed == [2]  # before main ends the process group
