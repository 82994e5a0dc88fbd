"""Protects the making of the bases: a short round leaves a model, and one that starts from an older
base starts from all of it."""

import pytest
import torch
from safetensors.torch import load_file

from lab.base.pretrain import Pretrain, main, make_model, start_from
from lab.base.tokenizer import build
from policy import PICO, load_policy


@pytest.fixture(scope="module")
def tokenizer():
    return build()


def test_an_older_base_is_loaded_whole_and_new_pieces_start_as_they_are(tokenizer, load):
    model, fresh = make_model(tokenizer, 0), make_model(tokenizer, 0)
    start_from(model, tokenizer, PICO)
    weights, embedding = load_file(PICO / "model.safetensors"), model.model.embed_tokens.weight
    for name, p in model.named_parameters():
        assert p is embedding or torch.equal(p, weights[name].float()), name
    moved = (embedding != fresh.model.embed_tokens.weight).any(1)  # [V]
    known = load("pico").tokenizer.get_vocab().keys() & tokenizer.get_vocab()
    assert moved.sum() == len(known) and model.lm_head.weight is embedding


def test_a_short_round_leaves_a_model_to_chat_with(tokenizer, tmp_path):
    main(Pretrain(str(tmp_path), ("skill",), skill_steps=1, chat_steps=1, batch=4, threads=1))
    policy = load_policy(str(tmp_path), 4, 8, "cpu")
    assert policy.n_parameters == sum(p.numel() for p in make_model(tokenizer, 0).parameters())
