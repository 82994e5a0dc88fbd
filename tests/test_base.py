"""Protects the making of the bases: a short round leaves a model, one that starts from an older base
starts from all of it, the base of longer strings saw none of more than 80 letters, and the levels
that it is tried on have the lengths that they say."""

import random
import re

import pytest
import torch
from safetensors.torch import load_file

from lab.base import corpus
from lab.base.pretrain import POLISHED, Pretrain, main, make_model, start_from
from lab.base.tokenizer import build
from lab.environments import Exactly, Lengths
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


@pytest.mark.parametrize(
    "level, letters, asked",
    [
        ("40-80", (40, 80), (8, 12)),
        ("80-95", (80, 95), (12, 20)),
        ("95-110", (95, 110), (12, 20)),
        ("110-130", (110, 130), (12, 20)),
        ("80-150", (80, 150), (12, 20)),
        ("130", (130, 130), (12, 20)),
    ],
)
def test_a_level_has_strings_of_its_lengths(level, letters, asked):
    env = Exactly() if level in Exactly.levels else Lengths()
    env.level = level  # as a curriculum does it
    tasks = [(env.reset(seed), env.task)[1] for seed in range(300)]
    sizes, wanted = {len(task.text) for task in tasks}, {len(task.letters) for task in tasks}
    assert (min(sizes), max(sizes)) == letters and (min(wanted), max(wanted)) == asked


def test_the_base_was_shown_no_string_of_more_than_80_letters(tokenizer):
    rng = random.Random(0)
    tasks = [corpus.repeating_task(rng) for _ in range(3000)]
    assert max(len(task.text) for task in tasks) == 80
    assert max(len(task.letters) for task in tasks) == 20
    rows = corpus.tally_rows(tokenizer, rng, 20, 512, corpus.repeating_task, corpus.words_between)
    how = {"draw": corpus.third_of_tier_6, "reword": corpus.with_words}
    rows += [corpus.letters_row(tokenizer, rng, POLISHED, POLISHED, **how) for _ in range(100)]
    pairs = [(tokenizer.decode(p), tokenizer.decode(r)) for row in rows for p, r, *_ in row]
    quoted = [re.findall('"([a-z]+)"', prompt) for prompt, _ in pairs]
    spelled = [re.findall(r"(?<!\S)([a-z])\d*(?!\S)", reply) for _, reply in pairs]
    assert max(len(text) for (text,) in quoted) <= 80 and 70 < max(map(len, spelled)) <= 80
