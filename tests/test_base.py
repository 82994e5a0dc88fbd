"""Protects the making of the bases: a round that starts from an older base starts from all of it."""

import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab.base import card, corpus, pretrain
from lab.base.pretrain import make_model, start_from
from lab.base.tokenizer import build
from policy import PICO, PICO_SWARM


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


def test_the_cards_say_what_was_taught_and_with_the_numbers_it_was_taught_with():
    """Text of the template, and its numbers are the defaults of pretraining."""
    base, swarm = (Path(folder, "README.md").read_text() for folder in (PICO, PICO_SWARM))
    assert card.TAUGHT in base and card.TAUGHT in swarm and card.PLAYED in swarm and card.PLAYED not in base
    cfg, said = pretrain.Pretrain(), " ".join(card.TAUGHT.split())
    bare, states, derives = (round(100 * share) for share in cfg.habits)
    assert f"as if {bare}% of the replies answered at once, {states}% stated counts and {derives}% derived them" in said
    assert f"{100 * cfg.shown[2]:.0f}% and later {100 * cfg.polish_shown[2]:.0f}% spell the string" in said
    assert f"{cfg.skill_steps:,} steps of running tallies" in said
    assert f"then {cfg.chat_steps + sum(cfg.polish_steps):,} steps of {cfg.batch} chats" in said
    share = {name: round(100 * share) for name, (_, share) in corpus.CHARACTERS.items()}
    better = share["says only the terms"] + share["worker"] + share["careful worker"]
    assert sum(share.values()) == 100 and share["novice"] == max(share.values())
    played = " ".join(card.PLAYED.split())
    assert f"in {share['novice']}% of the turns by any legal call" in played and f"{share['shirker']}% hand in work" in played
    assert (
        f"{better}% work of three better lengths (the longest is the text of `tuned`, the best scripted player), {share['expert']}% are "
        f"the expert's, {share['idle']}% only pass" in played
    )


def test_renumbered_ids_keep_their_order_and_who_is_who():
    given = [
        "- task_3 open\n- task_9 open\n- prop_1 from bot_2",
        '{"task_id": "task_9"} {"proposal_id": "prop_1"}',
    ]
    for seed in range(20):
        told, said = corpus.renumber(random.Random(seed), given)
        first, second = map(int, re.findall(r"task_(\d+)", told))
        assert first < second <= 16 and f'"task_{second}"' in said and "bot_2" in told
        assert re.search(r"prop_(\d+)", told)[0] in said
