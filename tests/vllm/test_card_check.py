"""Protects lab/card_check.py: what it is for needs a card, so here its steps run small."""

import json

from bookkeeping.records import lines
from tests.vllm.test_train import run

SMALL = "--num-tasks 2 --k 2 --max-tokens 16 --eval-n 2 --no-eval-other-tiers --name big --runs"


def test_start_says_after_each_part_how_far_vllm_is_from_transformers():
    said = run("-m", "lab.card_check", "start", "pico_base").splitlines()
    parts = [json.loads(line) for line in said if line.startswith("{")]
    assert [line["part"] for line in parts][-3:] == ["asleep", "awake", "greedy after sleep"]
    base, lora, woken = (line for line in parts if "tokens" in line)
    for line in (base, lora, woken):
        assert line["tokens"] > 100 and line["most_behind"] < 1e-4 and line["largest_gap"] < 1e-3
    assert base["mean_gap"] != lora["mean_gap"] == woken["mean_gap"]


def test_a_model_of_a_4bs_kind_learns_and_its_log_says_where_the_time_went(tmp_path):
    run("-m", "lab.card_check", "big", *SMALL.split(), str(tmp_path))
    first, _, last = lines(tmp_path / "big" / "metrics.jsonl")
    for line in (first, last):
        assert line["trained_tokens"] == 64 and line["grad_norm"] > 0 and line["mismatch"] < 1e-3
        assert line["seconds_rollout"] > 0 < line["seconds_train"] and line["seconds_sleep"] >= 0
