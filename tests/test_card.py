"""Protects the start of vLLM on a card: what it lacks is said before it starts; where it cannot start,
`--engine auto` goes on with our own sampler and `--engine vllm` refuses; and it is closed at the
end. vLLM is a stand-in here, and so is the card: `make test-vllm` has the real one, on a CPU.
"""

import subprocess
import sys
import sysconfig
from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from fast import ahead, machine, vllm_engine
from fast.sampler import TorchSampler
from helpers import refusal
from settings import Config

CHOSEN = partial(Config, max_tokens=64)


def on_a_card(policy):
    """A policy like this one, on a card: enough of it to start vLLM."""
    device = torch.device("cuda")
    return SimpleNamespace(lm=policy.lm, lora_rank=4, device=device, bfloat16=True)


@pytest.fixture
def vllm(monkeypatch, tmp_path):
    """vllm(LLM): `from vllm import LLM` gives this; the machine has all that it needs to start."""

    def put_in(llm):
        module = ModuleType("vllm")
        if isinstance(llm, Exception):
            module.__getattr__ = Mock(side_effect=llm)
        else:
            module.LLM = llm
        monkeypatch.setitem(sys.modules, "vllm", module)
        monkeypatch.setenv("CC", "cc")
        (tmp_path / "Python.h").touch()
        monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})

    return put_in


@pytest.mark.parametrize(
    "lacks, told",
    [
        ("compiler", "vLLM needs a C compiler when it starts; apt-get install gcc, or set CC"),
        ("header", "/Python.h is missing; apt-get install "),
    ],
)
def test_what_vllm_lacks_to_compile_is_said_before_it_starts(
    tiny, vllm, monkeypatch, tmp_path, lacks, told
):
    llm = Mock()
    vllm(llm)
    if lacks == "compiler":
        monkeypatch.delenv("CC")
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        (tmp_path / "Python.h").unlink()
    assert told in refusal(machine.CannotGoOn, vllm_engine.VllmSampler, on_a_card(tiny))
    assert not llm.called


BROKEN = {
    "a library of another CUDA": (
        OSError("libcudart.so.13: cannot open shared object file"),
        "vllm cannot be imported (OSError: libcudart.so.13",
    ),
    "a compiler that fails": (
        Mock(side_effect=subprocess.CalledProcessError(1, ["gcc", "-o", "helper.so"])),
        "(CalledProcessError: Command '['gcc', '-o', 'helper.so']' returned",
    ),
    "too little memory": (
        Mock(side_effect=ValueError("No available memory\nfor the cache blocks")),
        "(ValueError: No available memory for the cache blocks)",
    ),
}


@pytest.mark.parametrize("llm, told", BROKEN.values(), ids=BROKEN)
def test_where_vllm_cannot_start_auto_goes_on_and_says_why_and_vllm_refuses(
    tiny, vllm, monkeypatch, capsys, llm, told
):
    vllm(llm)
    monkeypatch.setattr(machine, "which", lambda *_: ("vllm", "vLLM is installed"))
    start = vllm_engine.load_engine
    card = on_a_card(tiny)
    monkeypatch.setattr(vllm_engine, "load_engine", lambda policy, *given: start(card, *given))
    assert isinstance(ahead.make_sampler(CHOSEN(), tiny), TorchSampler)
    reason, *_ = capsys.readouterr().out.splitlines()
    assert reason.startswith("our own sampler takes vLLM's place: ") and told in reason
    said = refusal(SystemExit, ahead.make_sampler, CHOSEN(engine="vllm"), tiny)
    assert said.startswith("--engine vllm: ") and told in said
    assert said.endswith("; else take --engine torch")


@pytest.mark.parametrize("eager", [False, True])
def test_vllm_need_not_have_flashinfer_and_eager_compiles_nothing(tiny, vllm, monkeypatch, eager):
    """On a card, 0.26 and 0.32 import FlashInfer when they start, unless this variable says 0."""
    name, seen = "VLLM_USE_FLASHINFER_SAMPLER", []
    monkeypatch.delenv(name, raising=False)
    vllm(lambda **how: seen.append((how["enforce_eager"], vllm_engine.os.environ.get(name))))
    vllm_engine.load_engine(on_a_card(tiny), 0.3, 0, True, 100, eager)
    assert seen == [(eager, "0")]


# What fits a card: (parameters, layers) of two Qwen3 models, all with 8 heads of 128 channels.
QWEN3 = {"4B": (4.02e9, 36), "1.7B": (1.72e9, 28), "0.6B": (0.6e9, 28)}
TRAINED = torch.nn.Parameter(torch.empty(66_000_000, device="meta"))  # LoRA 32 of the 4B
LETTERS = {"max_tokens": 2048, "num_tasks": 8, "k": 16, "micro_tokens": 8192}


def planned(monkeypatch, model: str, total: float, **more) -> tuple[float, bool]:
    """vllm_share for a Qwen3 on a card of so many GiB, its weights already there."""
    parameters, layers = QWEN3[model]
    config = SimpleNamespace(
        num_hidden_layers=layers, num_key_value_heads=8, head_dim=128, hidden_size=2560
    )
    config.get_text_config = lambda: config
    lm = SimpleNamespace(config=config)
    trainable = partial(dict, lora=TRAINED)
    policy = SimpleNamespace(lm=lm, n_parameters=parameters, bfloat16=True, trainable=trainable)
    # GiB: 6.5 MB a token of the 4B (docs/hardware.md), and bfloat16 copies of what learns
    kept = lambda policy, longest, tokens: 6.5e-3 * parameters / 4e9 + 0.1 / tokens
    monkeypatch.setattr(vllm_engine, "kept_per_token", kept)
    free = total - 0.6 - 2 * parameters / 2**30
    return vllm_engine.vllm_share(Config(**LETTERS | more), policy, free, total)


NEEDED = 7.5 + 3 + 128 * 2240 * 147456 / 2**30  # GiB: weights, room, all replies of an update


@pytest.mark.parametrize(
    "model, total, more, least, most, lends",
    [
        ("4B", 79.1, {}, NEEDED - 0.1, NEEDED + 0.1, True),  # as much as all replies need
        ("4B", 139.7, {}, NEEDED - 0.1, NEEDED + 0.1, False),  # an update fits beside it
        ("4B", 39.4, {"micro_tokens": 4096}, 7.5 + 3 + 16, 39.4 - 7.5 - 3, True),
        ("1.7B", 23.6, {"micro_tokens": 4096}, 3.2 + 3 + 8, 23.6 - 3.2 - 3, True),
        ("0.6B", 15.7, {"micro_tokens": 4096}, 1.1 + 3 + 5, 15.7 - 1.1 - 3, True),
        # what is typed is taken, and decides whether an update fits beside it
        ("4B", 79.1, {"vllm_memory": 0.13}, 79.1 * 0.13, 79.1 * 0.13, False),
        ("4B", 79.1, {"vllm_memory": 0.5}, 79.1 * 0.5, 79.1 * 0.5, True),
        # it may not sleep, or the trainer never rests: what an update leaves
        ("4B", 79.1, {"vllm_sleep": False}, 1, 79.1 - 0.6 - 7.5 - 52, False),
        ("4B", 79.1, {"async_rollouts": 1}, 1, 79.1 - 0.6 - 7.5 - 52, False),
        ("4B", 79.1, {"vllm_sleep": False, "gradient_checkpointing": True}, 45, 79.1, False),
    ],
)
def test_vllms_share_of_a_card_and_whether_it_sleeps(
    monkeypatch, model, total, more, least, most, lends
):
    share, sleeps = planned(monkeypatch, model, total, **more)
    assert sleeps == lends and least - 1e-6 <= share * total <= most + 1e-6, share


def test_who_waits_for_vllm_is_told_before_it_starts(monkeypatch, capsys):
    seen = []

    def start(policy, share, **how):
        seen.append((capsys.readouterr().out, how["eager"]))

    monkeypatch.setattr(vllm_engine, "VllmSampler", start)
    monkeypatch.setattr(vllm_engine, "vllm_share", lambda *given: (0.62, given[2:] == (60, 80)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * 2**30, 80 * 2**30))
    ahead.start_vllm(CHOSEN(vllm_eager=True), SimpleNamespace(device=torch.device("cuda")))
    ahead.start_vllm(CHOSEN(), SimpleNamespace(device=torch.device("cpu")))
    [(told, eager), (nothing, _)] = seen
    assert told.startswith("vLLM gets 62% of the card, lent to the trainer in turn (computed); ")
    assert "which takes minutes" in told and "--vllm-eager" in told and eager and not nothing


def test_falling_asleep_and_waking_up_are_a_part_of_an_update(monkeypatch, tiny):
    clock = Mock(side_effect=[0.0, 10.0, 15.0, 17.0])
    monkeypatch.setattr(ahead, "time", SimpleNamespace(monotonic=clock))
    collector = ahead.SyncCollector(None, tiny, SimpleNamespace(asleep=nullcontext), None, None)
    with collector.paused():  # 10 seconds to fall asleep, 5 of training, 2 to wake up
        pass
    assert collector.seconds == {"train": 5.0, "sleep": 12.0}


def test_at_the_end_the_engine_is_closed_and_our_own_sampler_needs_nothing(tiny):
    engine = Mock()
    ahead.SyncCollector(None, tiny, engine, None, None).close()
    engine.close.assert_called_once_with()
    ahead.SyncCollector(None, tiny, TorchSampler(tiny), None, None).close()
