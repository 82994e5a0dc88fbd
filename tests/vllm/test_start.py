"""Protects the start of the vLLM engine, and its sleep: where it cannot run it says so in one
sentence, before a run has begun."""

from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch

from fast.machine import CannotGoOn
from fast.vllm_engine import VllmSampler


def sentence(caught) -> str:
    text = str(caught.value)
    assert "\n" not in text and not text.endswith(".")
    return text


def test_on_a_card_it_would_not_ask_for_flashinfer(monkeypatch):
    """The engine has set the variable above; without it, vLLM imports what is not here."""
    from vllm.v1.sample.ops import topk_topp_sampler as ops

    monkeypatch.setattr(ops, "current_platform", Mock(is_cuda=lambda: True))
    assert not ops.flashinfer_sampler_supported()


def test_too_little_memory_at_the_start_is_said(load):
    with pytest.raises(CannotGoOn) as caught:
        VllmSampler(load("qwen3_wide", 4), cpu_cache=2**18)
    said = sentence(caught)
    assert "vLLM cannot run" in said and "--vllm-memory" in said


@pytest.fixture
def on_a_card() -> VllmSampler:
    """A sampler whose vLLM is a mock, so that nothing asks for the card."""
    sampler = VllmSampler.__new__(VllmSampler)
    policy = SimpleNamespace(device=torch.device("cuda"))
    vars(sampler).update(policy=policy, sleeps=True, llm=Mock())
    return sampler


def test_after_an_error_in_the_update_the_engine_is_not_woken(on_a_card):
    with pytest.raises(FloatingPointError), on_a_card.asleep():
        raise FloatingPointError
    assert on_a_card.llm.mock_calls == [call.sleep(level=1)]


def test_a_card_too_full_to_wake_up_is_said(on_a_card):
    on_a_card.llm.wake_up.side_effect = RuntimeError("CUDA Error: out of memory at cumem:62")
    with pytest.raises(CannotGoOn) as caught, on_a_card.asleep():
        pass
    assert "too little of the card free to wake up" in sentence(caught)
