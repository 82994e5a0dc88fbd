"""Protects against other people's code, files and disks: tables of what public reports had, and its
kin. Scorers that turn our limit off, that raise anything, that leave a process changed; models and
rows that have moved; a disk without locks.
"""

import asyncio
import decimal
import errno
import json
import locale
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings

import numpy as np
import pytest
import torch

from bookkeeping import folder, refusals
from bookkeeping.refusals import Guarded
from bridges.known import open_known
from fast import machine
from helpers import ROOT
from rollout import EnvironmentFailed
from settings import Config

ROWS = ROOT / "learn" / "vowels.jsonl"


@pytest.fixture(autouse=True)
def nothing_of_theirs(monkeypatch):
    """No call before this test has left its random numbers behind."""
    monkeypatch.setattr(machine, "theirs", {})


def swallows(work, times=10**9):
    for _ in range(times):
        try:
            work()
        except BaseException:
            pass
    time.sleep(9)


HANGS = {
    "its own limit, then it hangs all the same": lambda: (
        signal.signal(signal.SIGALRM, lambda *_: None),
        signal.alarm(5),
        signal.alarm(0),
        signal.signal(signal.SIGALRM, signal.SIG_DFL),
        time.sleep(9),
    ),
    "no timer": lambda: (signal.setitimer(signal.ITIMER_REAL, 0), time.sleep(9)),
    "alarms ignored": lambda: (signal.signal(signal.SIGALRM, signal.SIG_IGN), time.sleep(9)),
    "an alarm without a handler": lambda: (
        signal.setitimer(signal.ITIMER_REAL, 0.02),
        time.sleep(9),
    ),
    "swallows sleeping": lambda: swallows(lambda: time.sleep(0.01)),
    "swallows once": lambda: swallows(lambda: time.sleep(9), times=1),
    "swallows working": lambda: swallows(lambda: sum(range(10**5))),
    "waits for a program": lambda: subprocess.run(["sleep", "9"]),
    "waits for a thread": lambda: threading.Event().wait(9),
    "asyncio": lambda: asyncio.run(asyncio.sleep(9)),
}


@pytest.mark.parametrize("case", HANGS)
def test_no_call_turns_the_limit_off(case):
    before = [signal.getsignal(n) for n in (signal.SIGALRM, signal.SIGURG)]
    with pytest.raises(machine.Hung):
        machine.in_time(0.1, HANGS[case])
    assert [signal.getsignal(n) for n in (signal.SIGALRM, signal.SIGURG)] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def broken(of: type, name: str) -> type:
    """A class whose text cannot be had; of BaseException, it is as pyo3's PanicException."""
    return type(name, (of,), {"__str__": lambda self: 1 / 0, "__repr__": lambda self: 1 / 0})


Panic, Says = broken(BaseException, "Panic"), broken(str, "Says")
ENDS = [
    Panic(),
    SystemExit(1),
    asyncio.CancelledError(),
    ValueError(),
    BaseExceptionGroup("a", [Panic()]),
]


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
def test_whatever_is_raised_costs_one_episode(error):
    def fails(*_):
        raise error

    with pytest.raises(EnvironmentFailed, match=f"^{type(error).__name__}: .*test_cases.py"):
        Guarded(type("Env", (), {"step": fails})()).step("")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an earlier run may have its own
    with pytest.raises(KeyboardInterrupt):
        refusals.attempt(9, signal.raise_signal, signal.SIGINT)
    with pytest.raises(EnvironmentFailed, match=type(error).__name__):
        refusals.guarded(fails)
    rows = open_known(f"jsonl:{ROWS}", True)
    rows.reset(0)
    rows.scorer = fails
    rows.step("<answer>1</answer>")
    assert rows.score()["scorer_failed"] == 1.0
    with pytest.raises(EnvironmentFailed, match="^step .* returned a Says that cannot be shown"):
        Guarded(type("Env", (), {"step": lambda *_: Says("x")})()).step("")


LEAVES = {
    "a working folder that is gone": lambda: [
        act(place) for place in [tempfile.mkdtemp()] for act in (os.chdir, os.rmdir)
    ],
    "another working folder": lambda: os.chdir("/"),
    "no gradients": lambda: torch.set_grad_enabled(False),
    "inference mode": lambda: torch.inference_mode().__enter__(),
    "no grad": lambda: torch.no_grad().__enter__(),
    "a type": lambda: torch.set_default_dtype(torch.float64),
    "a device": lambda: torch.set_default_device("meta"),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "seeds": lambda: (random.seed(1), np.random.seed(1), torch.manual_seed(1)),
    "draws": lambda: (random.random(), np.random.rand(), torch.rand(1)),
    "handlers": lambda: [signal.signal(n, signal.SIG_IGN) for n in (2, 15, signal.SIGALRM)],
    "an alarm": lambda: signal.alarm(100),
    "warnings": lambda: warnings.simplefilter("error"),
    "stdout": lambda: setattr(sys, "stdout", None),
    "decimals": lambda: setattr(decimal.getcontext(), "prec", 3),
    "a locale": lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"),
    "errors of NumPy": lambda: np.seterr(all="raise"),
    "a trace": lambda: sys.settrace(lambda *_: None),
    "a guard of HumanEval": lambda: (setattr(os, "chdir", None), setattr(shutil, "rmtree", None)),
}


@pytest.mark.parametrize("case", LEAVES)
def test_what_a_call_leaves_behind_is_put_back(case):
    reads = [torch.is_grad_enabled, torch.is_inference_mode_enabled]
    reads += [read for read, _ in machine.STATE]
    before = [read() for read in reads]
    for _ in range(2):  # the second time it finds its own again
        machine.in_time(9, LEAVES[case])
        assert [read() for read in reads] == before


def test_random_numbers_of_other_code_go_on_from_call_to_call():
    draw = lambda: (random.random(), float(np.random.rand()), float(torch.rand(1)))
    machine.in_time(9, lambda: (random.seed(5), np.random.seed(5), torch.manual_seed(5)))
    first, second = machine.in_time(9, draw), machine.in_time(9, draw)
    assert not {*first} & {*second}


def test_each_call_of_a_scorer_gets_a_row_of_its_own():
    rows = open_known(f"jsonl:{ROWS}", True)
    rows.scorer = rows.expert = lambda *given: float(given[-1].pop("answer") != "")
    for _ in range(2):
        rows.reset(0)
        rows.step("<answer>1</answer>")
        assert rows.score()["reward"] == rows.score()["reward"] == rows.expert_reply() == 1.0


ASK, AGAIN = {"role": "user", "content": "1 + 1?"}, {"role": "user", "content": "Again."}
SAID = {"role": "assistant", "content": "3"}


@pytest.mark.parametrize(
    "new, right",
    [
        ([AGAIN], True),
        ([{"role": "tool", "content": "3"}, AGAIN], True),
        ([ASK], True),
        ([ASK, SAID, AGAIN], False),
    ],
)
def test_a_step_gives_what_is_new(new, right):
    opening = [ASK]
    env = Guarded(type("E", (), {"reset": lambda *_: opening, "step": lambda *_: (new, False)})())
    assert env.reset(0) == [ASK]
    opening.append(SAID)  # its own list: nobody else's changes
    if right:
        assert env.step("3") == (new, False)
        new = None
        assert Guarded(type("E", (), {"step": lambda *_: (new, True)})()).step("") == (None, True)
    else:
        with pytest.raises(EnvironmentFailed, match="new ones only, so no replies"):
            env.step("3")


# ------------------------------------------------------------------------------- folders and disks


@pytest.fixture(scope="module")
def saved(load, tmp_path_factory):
    """(a checkpoint, its policy)."""
    policy, place = load("qwen3", lora_rank=4), tmp_path_factory.mktemp("run") / "checkpoint"
    kept = {
        "update": 1,
        "base": folder.weights_hash(policy),
        "code": folder.code_hash(f"jsonl:{ROWS}"),
    }
    folder.save_checkpoint(place, policy, None, kept)
    return place, policy


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_disk_without_locks_is_named_and_the_run_goes_on(tmp_path, monkeypatch, capsys, number):
    def refuses(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("filelock._unix.fcntl.flock", refuses)
    folder.claim(tmp_path)
    assert "has no file locks" in capsys.readouterr().out


def test_a_model_that_has_moved_is_known_by_its_weights(saved, load):
    folder.refuse_base(saved[0], load("qwen3", lora_rank=0))  # in another place, another LoRA
    with pytest.raises(SystemExit, match="is not the model that this run was trained on"):
        folder.refuse_base(saved[0], load("llama", lora_rank=4))


@pytest.mark.parametrize("other, is_same", [("", True), ("\n", False)])
@pytest.mark.parametrize("option", ["", ",scorer=exact"])
def test_rows_that_have_moved_may_be_named_again(
    saved, tmp_path, monkeypatch, other, is_same, option
):
    monkeypatch.setattr(folder, "find_checkpoint", lambda _: saved[0])
    there = tmp_path / "moved.jsonl"
    there.write_text(ROWS.read_text() + other)
    (tmp_path / "config.json").write_text(json.dumps({"env": "jsonl:/gone/rows.jsonl"}))
    typed = Config(env=f"jsonl:{there}{option}")
    cfg, _, lock = folder.open_saved("--resume", tmp_path, typed)
    assert (cfg.env == typed.env) == (is_same and not option)
