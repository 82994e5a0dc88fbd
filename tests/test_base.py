"""Protects the making of the bases: a round that starts from an older base starts from all of it."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab.base.pretrain import make_model, start_from
from lab.base.tokenizer import build
from policy import PICO


@pytest.fixture(scope="module")
def tokenizer():
    return build()


def changed(folder, change):
    """pico_base's folder, its weights gone through `change`."""
    shutil.copytree(PICO, folder)
    weights = load_file(PICO / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_an_older_base_is_loaded_whole_and_new_pieces_start_as_they_are(tokenizer):
    model, fresh = make_model(tokenizer, 0), make_model(tokenizer, 0)
    known = start_from(model, tokenizer, PICO)
    weights, embedding = load_file(PICO / "model.safetensors"), model.model.embed_tokens.weight
    for name, p in model.named_parameters():
        assert p is embedding or torch.equal(p, weights[name].float()), name
    moved = (embedding != fresh.model.embed_tokens.weight).any(1)  # [V]
    assert moved.sum() == known < len(tokenizer) and model.lm_head.weight is embedding


@pytest.mark.parametrize("change, told", [
    (lambda weights: weights.pop("model.norm.weight"), "Missing key.*model.norm.weight"),
    (lambda weights: weights.update(old_name=torch.zeros(1)), "Unexpected key.*old_name"),
])  # fmt: skip
def test_an_older_base_that_is_another_model_is_refused(tokenizer, tmp_path, change, told):
    """A sibling of A1: strict=False would drop what it does not know, without a word."""
    with pytest.raises(RuntimeError, match=f"(?s){told}"):
        start_from(make_model(tokenizer, 0), tokenizer, changed(tmp_path / "base", change))
