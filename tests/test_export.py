"""Protects the way out (bridges/export.py): what is exported computes what was trained, the card
says what was measured."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import metrics
import settings
import train
from bookkeeping import refusals
from bookkeeping.folder import find_checkpoint, load_checkpoint
from bridges import export
from policy import PICO, load_policy, plain_forward
from warm import ROOT

TEXT = "Count the letters a and b in abcab. <think> a1"
TINY = {
    "updates": 2, "num_tasks": 2, "k": 4, "eval_n": 4, "max_tokens": 64, "sft_steps": 3,
    "sft_examples": 4, "threads": 1, "wandb": False, "device": "cpu", "lr": 3e-3, "sft_lr": 3e-3,
    "difficulty": 2, "reward": "partial",
}  # fmt: skip


def tiny_run(folder: Path, name: str, **flags) -> Path:
    cfg = settings.Config(**{**TINY, "runs": str(folder), "name": name, **flags})
    refusals.check(cfg)
    return train.train(cfg)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model_folder):
    """{name: folder} of a run with LoRA, one of all weights, one over a base in bfloat16."""
    folder = tmp_path_factory.mktemp("runs")
    half, qwen3 = str(folder / "half"), model_folder("qwen3")
    AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(qwen3).save_pretrained(half)
    return {
        "lora": tiny_run(folder, "lora"),
        "full": tiny_run(folder, "full", lora_rank=0),
        "half": tiny_run(folder, "half-run", model=half, lora_rank=4, lora_alpha=8),
    }


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def trained(run: Path):
    config, base = summary_of(run)["config"], export.base_of(summary_of(run))
    policy = load_policy(base, config["lora_rank"], config["lora_alpha"], "cpu")
    load_checkpoint(find_checkpoint(run / "checkpoint"), policy)
    return policy


@torch.no_grad()
def logprobs(policy) -> torch.Tensor:
    ids = torch.tensor([policy.tokenizer(TEXT)["input_ids"]])
    return plain_forward(policy, ids, torch.ones(1, ids.shape[1] - 1, dtype=torch.bool)).logprobs


@pytest.mark.parametrize("name", ["lora", "full", "half"])
def test_a_merged_model_computes_what_was_trained(runs, name, tmp_path):
    out, dtype = tmp_path / "out", "bfloat16" if name == "half" else "float32"
    export.export("merge", runs[name], out, dtype)
    base = logprobs(load_policy(export.base_of(summary_of(runs[name])), 0, 1, "cpu"))
    then, now = logprobs(trained(runs[name])), logprobs(load_policy(str(out), 0, 1, "cpu"))
    rounding = 0.05 if name == "half" else 1e-4
    torch.testing.assert_close(now, then, rtol=0, atol=rounding)
    assert (then - base).abs().max() > max(rounding, 1e-2), "the run has to have changed something"
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    plain = (out / "README.md").stat().st_mode  # as the umask says
    assert {file.stat().st_mode for file in out.iterdir()} == {plain}


def test_an_exported_adapter_is_loaded_by_peft_and_names_no_path(runs, tmp_path):
    out = tmp_path / "deep" / "out"
    export.export("adapter", runs["lora"], out)
    ours, theirs = trained(runs["lora"]), trained(runs["lora"])
    base = AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32)
    theirs.model = PeftModel.from_pretrained(base, out).eval()
    theirs.tokenizer = AutoTokenizer.from_pretrained(out)
    torch.testing.assert_close(logprobs(theirs), logprobs(ours), rtol=0, atol=1e-4)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "pico_base"
    assert not [file.name for file in out.iterdir() if str(ROOT).encode() in file.read_bytes()]
    assert {"optimizer.pt", "state.json"}.isdisjoint(file.name for file in out.iterdir())


def test_the_card_says_what_was_measured(runs):
    summary = summary_of(runs["lora"])
    text = export.card(runs["lora"], summary, "adapter")
    data = ModelCard(text).data
    assert data.library_name == "peft" and "lora" in data.tags
    interval = metrics.Interval(**summary["eval"]["tier 2"]["final"]["reward"]).text()
    assert interval in text and "| reward | partial |" in text and "| lr | 0.003 |" in text


def test_what_cannot_be_exported_is_said_in_a_sentence(runs, tmp_path):
    api, out = tmp_path / "api", tmp_path / "out"  # an evaluation over an API has no weights
    api.mkdir()
    (api / "summary.json").write_text(json.dumps({"api": {}, "config": {}, "machine": {}}))
    for words, why in (
        (["merge", tmp_path / "none", out], "there is no summary.json"),
        (["merge", api, out], "it has no checkpoint"),
        (["adapter", runs["full"], out], "no adapter; use: python -m bridges.export merge"),
        (["merge", runs["lora"], runs["full"]], "is there already"),
    ):
        with pytest.raises(SystemExit, match=why):
            export.export(*words)
    assert not list(tmp_path.glob("out*"))
