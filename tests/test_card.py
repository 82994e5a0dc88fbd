"""Protects the start of vLLM on a card: what it lacks is said before it starts; where it cannot start,
`--engine auto` goes on with our own sampler and `--engine vllm` refuses; and it is closed at the
end. vLLM is a stand-in here, and so is the card: `make test-vllm` has the real one, on a CPU.
"""

import subprocess
import sys
import sysconfig
from functools import partial
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from fast import ahead, machine, vllm_engine
from fast.machine import CannotGoOn
from fast.sampler import TorchSampler
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
    with pytest.raises(CannotGoOn) as caught:
        vllm_engine.VllmSampler(on_a_card(tiny))
    assert told in str(caught.value) and "\n" not in str(caught.value)
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
    sampler = ahead.make_sampler(CHOSEN(), tiny)
    assert isinstance(sampler, TorchSampler)
    reason, *_ = capsys.readouterr().out.splitlines()
    assert reason.startswith("our own sampler takes vLLM's place: ") and told in reason
    with pytest.raises(SystemExit) as caught:
        ahead.make_sampler(CHOSEN(engine="vllm"), tiny)
    said = str(caught.value)
    assert said.startswith("--engine vllm: ") and told in said and "\n" not in said
    assert said.endswith("; else take --engine torch")


@pytest.mark.parametrize("eager", [False, True])
def test_eager_compiles_nothing(tiny, vllm, eager):
    llm = Mock()
    vllm(llm)
    vllm_engine.load_engine(on_a_card(tiny), 0.3, 0, True, 100, eager)
    assert llm.call_args.kwargs["enforce_eager"] == eager


def test_who_waits_for_vllm_is_told_before_it_starts(monkeypatch, capsys):
    seen = []

    def start(policy, share, **how):
        seen.append((capsys.readouterr().out, how["eager"]))

    monkeypatch.setattr(vllm_engine, "VllmSampler", start)
    ahead.start_vllm(CHOSEN(vllm_eager=True), SimpleNamespace(device=torch.device("cuda")))
    ahead.start_vllm(CHOSEN(), SimpleNamespace(device=torch.device("cpu")))
    [(told, eager), (nothing, _)] = seen
    assert "which takes minutes" in told and "--vllm-eager" in told and eager and not nothing


def test_at_the_end_the_engine_is_closed_and_our_own_sampler_needs_nothing(tiny):
    engine = Mock()
    ahead.SyncRollouts(None, tiny, engine, None, None).close()
    engine.close.assert_called_once_with()
    ahead.SyncRollouts(None, tiny, TorchSampler(tiny), None, None).close()
