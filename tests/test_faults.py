"""Protects what a run has written from bad storage: a disk that is full, read-only or refuses; and
from a kill in the middle of a write.

Bad storage is always an OSError, which train.py tells in one sentence (tests/test_bad_training.py);
the last checkpoint and the lines before stay; and after the fault, the next write goes well.
"""

import errno
import itertools
import os
import resource
import shutil
from contextlib import contextmanager
from functools import partial
from unittest.mock import DEFAULT, Mock, patch

import pytest
import torch

from bookkeeping.folder import find_checkpoint, load_checkpoint, mend, save_checkpoint
from bookkeeping.records import append, lines
from helpers import write_lines


@contextmanager
def full(n: int):
    """No file can have more than n bytes: the kernel ends a write in the middle."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Killed(BaseException):
    """As a kill would: nothing in the code may catch it."""


def fails(error: BaseException, module, *names: str, nth: int = 1):
    """These functions raise, from their nth call on."""
    comes = itertools.chain([DEFAULT] * (nth - 1), itertools.repeat(error))
    spoilt = {name: Mock(wraps=getattr(module, name), side_effect=comes) for name in names}
    return patch.multiple(module, **spoilt)


def refuses(number: int, *names: str, nth: int = 1):
    """The system says no."""
    return fails(OSError(number, os.strerror(number)), os, *names, nth=nth)


killed = partial(fails, Killed())


FAULTS = {  # what fails, while a checkpoint of so many bytes of weights is written
    "full: not a byte fits": lambda weights: full(0),
    "full: in the settings": lambda weights: full(200),
    "full: in the weights": lambda weights: full(weights // 2),
    "full: in the optimizer": lambda weights: full(weights + 100),
    "read-only: no folder": lambda weights: refuses(errno.EROFS, "mkdir"),
    "a file is not flushed": lambda weights: refuses(errno.EIO, "fsync"),
    "the last file is not flushed": lambda weights: refuses(errno.EIO, "fsync", nth=5),
    "the old one cannot be removed": lambda weights: refuses(errno.EACCES, "unlink", "rmdir"),
    "the first rename fails": lambda weights: refuses(errno.EACCES, "rename", "replace"),
    "the second rename fails": lambda weights: refuses(errno.EIO, "rename", "replace", nth=2),
    "killed: the optimizer is written": lambda weights: killed(torch, "save"),
    "killed: a file is flushed": lambda weights: killed(os, "fsync", nth=2),
    "killed: the first rename": lambda weights: killed(os, "rename", "replace"),
    "killed: the second rename": lambda weights: killed(os, "rename", "replace", nth=2),
    "killed: the older one is removed": lambda weights: killed(shutil, "rmtree"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_storage_and_kills_leave_a_whole_checkpoint(load, tmp_path, fault):
    policy, folder = load("qwen3", lora_rank=8), tmp_path / "checkpoint"
    optimizer = torch.optim.AdamW(policy.trainable().values())
    for weight in policy.trainable().values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    save = lambda update: save_checkpoint(folder, policy, optimizer, {"update": update})
    found = lambda: load_checkpoint(find_checkpoint(folder), policy)[1]["update"]
    save(1)
    save(2)
    weights = (folder / "adapter_model.safetensors").stat().st_size
    with FAULTS[fault](weights), pytest.raises((OSError, Killed)) as error:
        save(3)
    assert fault.startswith("killed") or (error.value.errno and "\n" not in str(error.value))
    assert found() == 2
    assert not (tmp_path / "checkpoint.new").exists() or not fault.startswith("full")
    save(4)
    assert found() == 4
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "checkpoint.old"}


@pytest.mark.parametrize("written", [[], [1]])
@pytest.mark.parametrize("room", [0, 5], ids=["not a byte", "half a line"])
def test_a_full_disk_loses_no_line_that_was_written(tmp_path, written, room):
    log = write_lines(tmp_path / "metrics.jsonl", [{"update": update} for update in written])
    with full(log.stat().st_size + room), pytest.raises(OSError):
        append(log, {"update": 2})
    mend(tmp_path)
    append(log, {"update": 3})
    assert [line["update"] for line in lines(log)] == [*written, 3]
