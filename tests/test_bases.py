"""Protects the table of other bases: a base that never saw a derivation really saw none, and a row has its own base's numbers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tyro

from lab.base.pretrain import Pretrain, chat_batch
from lab.base.tokenizer import build
from lab.claims import bases

settings_of = lambda base: tyro.cli(Pretrain, args=bases.BASES[base][0].split())


def shown_by(cfg) -> list[str]:
    """The replies of twenty batches of the first round's chats."""
    tokenizer, texts = build(), []
    for step in range(20):
        parts, _ = chat_batch(cfg, tokenizer, step, polish=False)
        for ids, weights in parts:
            texts += [tokenizer.decode(row[1:][mask > 0]) for row, mask in zip(ids, weights)]
    return texts


def test_a_base_that_never_saw_a_derivation_saw_none():
    cfg = settings_of("never")
    assert cfg.skill_steps == 0 and cfg.stop_after == 1  # no tallies back to back, and no second round
    derives = lambda texts: sum("<think>" in text and "Let me count" not in text for text in texts)
    assert derives(shown_by(cfg)) == 0
    assert derives(shown_by(settings_of("s1400"))) > 400  # the same look finds them where they are


def test_the_other_seeds_have_the_recipe_of_pico_base():
    ours = Pretrain()
    for base in ("seed1", "seed2"):
        cfg = settings_of(base)
        assert cfg.stop_after == 3 and cfg.seed != ours.seed  # skill and chat, and twice polish
        same = ("skill_steps", "chat_steps", "batch", "lr", "habits", "shown", "polish_steps", "polish_shown", "polish_lr")
        assert all(getattr(cfg, name) == getattr(ours, name) for name in same)


@pytest.mark.parametrize("name, base", [("seed1_grpo-0", "seed1"), ("never_no_think-0", "never"), ("s1400_begun", "s1400"),
                                        ("seed2_sft_derives-lr1e-4-n100-2", "seed2")])  # fmt: skip
def test_a_run_has_its_own_base(name, base):
    assert bases.model_of(name) == f"runs/bases/{base}"
    assert f"--model runs/bases/{base}" in bases.STUDY.flags(name)


def test_a_row_compares_a_base_with_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(bases, "OUT", tmp_path)
    monkeypatch.setattr(bases, "STUDY", replace(bases.STUDY, out=tmp_path))

    def put(name: str, right: int) -> None:
        (tmp_path / name).mkdir()
        summary = {"trained": "t", "eval": {"t": {"final": {"exact": right / 100}}}}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
        (tmp_path / name / "held_out.json").write_text(
            json.dumps(
                {
                    "greedy": [1] * right + [0] * (100 - right),
                    "sampled": [0] * (102 - right) + [1] * (right - 2),
                    "derives, greedy": 0.0,
                    "derives, sampled": 0.1,
                }
            )
        )

    for base, begun, grpo in (("s1400", 50, 60), ("never", 5, 5)):
        (tmp_path / base).mkdir()
        habits = {"derives": {"often": 0.1, "right": 8, "n": 10}}
        (tmp_path / base / "card.json").write_text(json.dumps({"habits": habits}))
        put(f"{base}_base", 5)
        put(f"{base}_begun", begun)
        for seed in range(3):
            put(f"{base}_grpo-{seed}", grpo + seed)
    early, drawn, never, _ = bases.short()
    assert early[:3] == [bases.BASES["s1400"][1], "greedy", "0.0%"] and early[3].startswith("5.0%")
    assert drawn[:3] == [bases.BASES["s1400"][1], "sampled", "10.0%"] and drawn[3].startswith("3.0%")
    assert drawn[4].startswith("48.0%") and "59.0%" in drawn[5] and drawn[6].startswith("+11.0 points")
    assert early[4].startswith("50.0%") and "61.0%" in early[5] and early[6].startswith("+11.0 points")
    assert never[4].startswith("5.0%") and "6.0%" in never[5] and never[6].startswith("+1.0 points")
    assert early[7] == early[8] == ""  # what has not been made is left out
    assert np.mean(bases.rows_of("s1400")["grpo"]) == pytest.approx(0.61)
