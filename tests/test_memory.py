"""Protects memory: logits by the chunk, a sampler that lets go of its cache while others work, a run
that keeps nothing it need not, and a plan of a card (fast/plan.py) that docs/hardware.md shows as it is.
"""

import gc
import importlib.util
import json
from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import settings
import train
from fast import plan
from fast.logprobs import token_logprobs
from fast.sampler import TorchSampler
from helpers import SmallCard
from lab.tables import hardware

torch.set_num_threads(1)
PAGE = (Path(__file__).resolve().parents[1] / "docs" / "hardware.md").read_text()


def test_logits_cost_a_chunk_and_not_the_length(load):
    policy, peaks = load("qwen3", 4), {}
    ids = torch.randint(0, policy.lm.config.vocab_size, (2, 301))
    for chunk in (16, 600):
        with SmallCard(known=[ids, *policy.model.parameters()]) as card:
            logprobs, _ = token_logprobs(policy, ids, torch.ones(2, 300, dtype=torch.bool), chunk=chunk)
            logprobs.sum().backward()
        peaks[chunk] = card.peak
    assert peaks[600] - peaks[16] > 0.9 * (600 - 16) * 4 * policy.lm.config.vocab_size


def test_a_sampler_that_sleeps_holds_no_cache_and_wakes_up_by_itself(load):
    policy = load("qwen3")
    sampler = TorchSampler(policy)
    ask = lambda: sampler.sample([[5] * 10], 8, 200, 1.0, [[(0, i) for i in range(8)]])
    alive = lambda: gc.collect() * 0 + sum(t.nbytes for t in gc.get_objects() if torch.is_tensor(t))
    first, c = ask(), policy.lm.config
    awake = alive()
    with sampler.asleep():
        cache = 8 * 200 * 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 4
        assert alive() < awake - 0.9 * cache
    assert ask() == first


# ------------------------------------------------------------------------------- a run


def tiny_run(folder, checkpointing: bool) -> dict:
    """What a run of two updates left, and the weights' gradients that were there at each update's start."""
    held, checkpointed = [], []

    def update(policy, *args, real=train.update, **kwargs):
        held.append([name for name, p in policy.model.named_parameters() if p.grad is not None])
        checkpointed.append(policy.checkpointing)
        return real(policy, *args, **kwargs)

    cfg = settings.Config(
        updates=2, num_tasks=2, k=2, eval_n=2, max_tokens=16, sft_steps=1, sft_examples=2, threads=1, wandb=False,
        eval_other_tiers=False, runs=str(folder), name="tiny", device="cpu", temperature=1.0,
    )  # fmt: skip
    settings.check(cfg)
    fits = {"gradient_checkpointing": checkpointing}  # as --model auto does on a small card
    choose = lambda *_: ("pico_base", "as planned", fits)
    with patch.multiple(train, update=update, choose_model=choose):
        run = train.train(cfg, {"device"})
    config = json.loads((run / "config.json").read_text())
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return {"config": config, "lines": lines, "held": held, "checkpointed": checkpointed}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {how: tiny_run(tmp_path_factory.mktemp("runs"), how) for how in (False, True)}


def test_no_gradients_while_the_sampler_works(runs):
    assert [run["held"] for run in runs.values()] == [[[], []]] * 2


def test_what_auto_sets_is_what_runs_and_changes_no_number(runs):
    assert [run["config"]["gradient_checkpointing"] for run in runs.values()] == [False, True]
    assert [run["checkpointed"] for run in runs.values()] == [[False] * 2, [True] * 2]
    for a, b in zip(runs[False]["lines"], runs[True]["lines"], strict=True):
        for name in a:
            assert name.startswith("seconds_") or a[name] == pytest.approx(b[name], abs=1e-4), name


# ------------------------------------------------------------------------------- the plan
CARDS = {"T4, 15 GB": (14.6, (7, 5)), "Ampere, 16 GB": (15.7, (8, 6)), "Ampere, 24 GB": (23.6, (8, 6)), "A100, 40 GB": (39.4, (8, 0)),
         "Ampere, 48 GB": (47.4, (8, 6)), "A100, 80 GB": (79.1, (8, 0)), "H200, 141 GB": (139.7, (9, 0))}  # fmt: skip


@pytest.fixture
def card(monkeypatch):
    """card(name): this machine has it, with vLLM."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plan, "where_is", lambda model: "the hub")

    def choose(name: str) -> None:
        monkeypatch.setattr(plan, "card_memory", lambda _: CARDS[name][0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: CARDS[name][1])

    return choose


def test_the_page_s_table_of_what_auto_takes_is_the_plan(card):
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and line[2:].split(" |")[0] in CARDS]
    assert [row[0] for row in rows] == list(CARDS)
    for name, *cells in rows:
        card(name)
        for env, cell in zip(("letters", "alphabet", "swarm"), (cells[0], *cells), strict=True):
            path, _, fits = plan.choose_model("auto", env, "cuda", {})
            shown = path.split("/")[-1].removesuffix("-Instruct-2507") + (f" `{plan.typed(fits)}`" if fits else "")
            assert cell == shown, (name, env)


@pytest.mark.parametrize("row", [r for r in hardware("card") if "30B" not in r["model"]], ids=lambda r: r["model"])
def test_the_short_plan_agrees_with_the_whole_one(card, row):
    """It may say up to 2 GiB or 10% too much, and nothing too little."""
    card("Ampere, 16 GB" if row["card"] == "16 GB" else "A100, 80 GB")
    model = next(name for name in plan.SIZES if row["model"].split(",")[0] in name)
    words = row["flags"].split()
    asked = {"lora_rank": 0 if "--lora-rank" in words else 32, "gradient_checkpointing": "--gradient-checkpointing" in words}
    if "--micro-tokens" in words:
        asked["micro_tokens"] = int(words[words.index("--micro-tokens") + 1])
    peak = max(row["gib"].values())
    said = plan.needed(model, "letters", "cuda", "torch" if "--engine" in words else "vllm", asked)
    assert peak - 0.1 < said < max(peak + 2, 1.1 * peak)


def test_the_plan_has_the_defaults_of_the_settings():
    """fast/ may not import settings.py, where each is declared."""
    for env, (turns, tokens, _) in plan.TALK.items():
        large = settings.by_size(1e9, env)
        assert turns == {"letters": 1, "alphabet": settings.Config.max_turns, "swarm": 25, "yours": 1}[env]
        assert tokens == large["max_tokens"]
        defaults = {name: getattr(settings.Config, name) for name in plan.DEFAULTS}
        assert plan.DEFAULTS == defaults | {name: large[name] for name in ("micro_tokens", "k")}
    assert {f.name for f in fields(settings.Config)} >= plan.READ
