"""Protects the start of the vLLM engine, and its sleep: where it cannot run it says so in one
sentence, before a run has begun."""

import sys
from types import SimpleNamespace

import pytest
import torch

from fast.vllm_engine import VllmSampler


def sentence(caught) -> str:
    text = str(caught.value)
    assert "\n" not in text and not text.endswith(".")
    return text


def test_without_vllm_it_says_what_to_install(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not there
    with pytest.raises(SystemExit) as caught:
        VllmSampler(load("qwen3", 4))
    assert "vllm is not installed; pip install -r requirements/gpu.txt" in sentence(caught)


def test_too_little_memory_at_the_start_is_said(load):
    with pytest.raises(SystemExit) as caught:
        VllmSampler(load("qwen3", 4), cpu_cache=2**18)
    said = sentence(caught)
    assert "0 MB for its cache is not enough for vLLM" in said and "--engine torch" in said


class Card:
    """Stands in for vLLM on a card: it notes when it sleeps and wakes."""

    def __init__(self):
        self.said = []

    def sleep(self, level):
        self.said.append(f"sleep {level}")

    def wake_up(self):
        self.said.append("wake")


def on_a_card() -> VllmSampler:
    sampler = VllmSampler.__new__(VllmSampler)
    sampler.sleeps = sampler.seeded = True
    sampler.policy = SimpleNamespace(device=torch.device("cuda"))
    sampler.llm, sampler.awake = Card(), True
    return sampler


def test_after_an_error_in_the_update_the_engine_is_not_woken():
    sampler = on_a_card()
    with pytest.raises(FloatingPointError), sampler.asleep():
        raise FloatingPointError
    assert sampler.llm.said == ["sleep 1"] and not sampler.awake
