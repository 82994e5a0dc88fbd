"""Protects lab/speed/card.py where there is no card: every stage runs tiny on a CPU, is resumed, and the page puts figures beside goals."""

import json
import sys

import pytest
import torch

from lab.speed import card, limits
from lab.speed import memory as plans

sys.path.insert(0, str(card.ROOT))


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """The tiny model and its plans, for one test."""
    for name in ("PRODUCTS", "HOST"):
        monkeypatch.setattr(limits, name, getattr(limits, name))
    for name in ("MODELS", "ASKED"):
        monkeypatch.setattr(plans, name, dict(getattr(plans, name)))
    limits.measure.cache_clear()
    card.tiny_model()
    monkeypatch.setattr(card, "has", lambda name: name not in ("trl", "vllm"))  # whoever has them: not here
    yield
    limits.measure.cache_clear()


@pytest.mark.parametrize("name", [name for name in card.STAGES if name != "machine"])
def test_a_stage_writes_what_it_found(name, tmp_path):
    card.run_stage(name, card.TINY, tmp_path)
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert card.is_done(name, tmp_path) and found["sizes"]["model"] == "tiny"
    if name == "same":  # the CPU beside itself
        assert found["equal_replies"] == found["replies"] == 2
        assert found["gap_in_nats"]["card float32"]["most"] == 0 < found["gap_in_nats"]["card bfloat16"]["mean"]
    if name == "letters":
        assert (found["rank"], found["updates"], found["n"]) == (32, 1, 2)
    if name == "decode":
        assert set(found["rows"]) == {"1", "4"} and set(found["rows"]["4"]) == {"ours", "model.generate"}
    if name in ("lora", "full"):
        assert all(0 < sides["ours"]["mfu"] < 1 for sides in found["lengths"].values())
    if name == "update":
        assert all({"rollout", "update", "evaluation"} == found[plan]["peak_gib"].keys() for plan in card.TINY.plans)
    assert card.figures({name: found})


def test_without_peft_all_weights_learn_and_the_lora_stage_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(card, "has", lambda name: name not in ("peft", "trl", "vllm"))
    card.run_stage("lora", card.TINY, tmp_path)
    assert "peft is not installed" in json.loads((tmp_path / "lora.json").read_text())["left_out"]
    assert not card.is_done("lora", tmp_path)
    assert card.run_stage("update", card.TINY, tmp_path).keys() & set(card.TINY.plans) == {"tiny-full"}


def test_stages_are_processes_and_what_is_there_is_skipped(tmp_path, capsys):
    words = ["--tiny", "--out", str(tmp_path), "--only", "machine"]
    card.main(words)
    written = (tmp_path / "machine.json").read_text()
    assert json.loads(written)["tflops"]["float32"] and "# On a card" in (tmp_path / "README.md").read_text()
    card.main(words)
    assert "skipped" in capsys.readouterr().out and (tmp_path / "machine.json").read_text() == written


def test_a_stage_that_breaks_says_why_and_is_tried_again(tmp_path, capsys):
    card.run_all(["machine"], card.TINY, tmp_path, minutes=1e-6)
    assert json.loads((tmp_path / "machine.json").read_text())["failed"].startswith("not done after")
    assert not card.is_done("machine", tmp_path) and not (tmp_path / "README.md").exists()


def test_without_a_card_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises(SystemExit, match="there is none here"):
        card.main(["--only", "machine"])


def test_the_page_puts_each_figure_beside_its_goal():
    spread = lambda median: {"median": median, "low": median, "high": median}
    ours = {"of_bandwidth": 0.61, "tokens_per_second": 5000, "milliseconds_per_step": 12.8, "seconds": spread(1.0)}
    found = {
        "same": {"equal_replies": 15, "replies": 16, "over_the_cpus_spread": 1.2},
        "decode": {"rows": {"64": {"ours": ours, "model.generate": {"seconds": spread(2.5)}}, "1": {"ours": ours | {"of_bandwidth": 0.3}}}},
        "lora": {
            "lengths": {
                "2048": {"ours": {"mfu": 0.49, "tokens_per_second": 9, "peak_gib": 60.0}, "times_as_fast_as_trl": 2.6},
                "8192": {"ours": "out of memory"},
            }
        },
        "update": {
            "4b-full-torch": {"plan_gib": {"update": 87.0}, "failed_while": "learning: CUDA out of memory"},
            "4b-lora-torch": {
                "plan_gib": {"update": 70.0},
                "peak_gib": {"update": 66.0},
                "seconds_per_update": 50,
                "rollout_seconds": 30,
                "train_seconds": 20,
            },
        },
    }
    verdicts = {what: reached for what, _, _, reached in card.figures(found)}
    assert verdicts == {
        "greedy replies that CPU and card share, float32": False,
        "log-probs in bfloat16: the card's distance from float32, over the CPU's": True,
        "decoding, 64 rows: share of the bandwidth": True, "decoding, 64 rows: times model.generate": None,
        "decoding, 1 rows: share of the bandwidth": None,
        "training, LoRA 32, rows of 2,048 tokens: MFU": False, "training, LoRA 32, rows of 2,048 tokens: times TRL": True,
        "training, LoRA 32, rows of 8,192 tokens: MFU": False,
        "a whole update, 4b-full-torch": False, "a whole update, 4b-lora-torch: seconds": None,
        "4b-lora-torch: peak of memory in GiB (by the plan)": None,
    }  # fmt: skip


def test_weights_have_the_formats_of_a_run():
    config = plans.MODELS["tiny"]
    frozen, free = card.random_policy(config, 4, "meta"), card.random_policy(config, 0, "meta")
    assert {p.dtype for p in frozen.trainable().values()} == {p.dtype for p in free.trainable().values()} == {torch.float32}
    assert {p.dtype for name, p in frozen.lm.named_parameters() if "lora_" not in name} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_the_real_sizes_name_plans_and_a_model_that_exist():
    assert card.Sizes().model in plans.MODELS and set(card.Sizes().plans) <= plans.ASKED.keys()
