"""Protects the machines: what Linux has and Windows or macOS has not is taken away here, and a run
still does what it promises. And what --model auto takes, which docs/hardware.md shows.

No Windows and no Mac was at hand (docs/hardware.md). What stands in for them is this Python, without
the modules, functions and signals that they lack.
"""

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bookkeeping.records import lines
from fast import machine
from helpers import put
from settings import Config
from warm import ROOT

# A Python like that of Windows. psutil comes first, because its half for Linux needs `resource`; a
# run calls it as on Windows.
LIKE_WINDOWS = """
import os, runpy, signal, sys
import psutil
for name in ("resource", "fcntl", "pwd", "grp", "syslog"):
    sys.modules[name] = None
for name in ("fork", "forkpty", "getuid", "geteuid", "getgid", "sync", "killpg", "getpgid", "setsid", "statvfs", "getloadavg", \
"sched_getaffinity",
             "chown", "wait4", "O_NOFOLLOW"):
    delattr(os, name)
for name in ("SIGALRM", "setitimer", "ITIMER_REAL", "alarm", "SIGKILL", "SIGHUP", "SIGUSR1", "SIGQUIT", "pthread_sigmask"):
    delattr(signal, name)
sys.argv, sys.path[0] = sys.argv[1:], os.path.dirname(sys.argv[1])
runpy.run_path(sys.argv[0], run_name="__main__")
"""

LOOPS = '''
import time


class Sums:
    """One more; the fourth task never answers."""

    seconds, think, tools, max_turns = 0.3, False, None, 1

    def reset(self, seed):
        self.seed = seed
        return [{"role": "user", "content": f"{seed} + 1?"}]

    def step(self, reply):
        while self.seed == 3:
            time.sleep(0.1)
        self.reply = reply
        return [], True

    def score(self):
        return {"reward": float(self.reply == str(self.seed + 1)) + len(self.reply) / 1e6}

    def expert_reply(self):
        return str(self.seed + 1)
'''


# -------------------------------------------------------------------- a Python like that of Windows


def test_without_resource_fork_and_alarms_a_run_is_whole(tmp_path):
    """Its output goes into a pipe that the system takes for code page 1252."""
    (tmp_path / "C:\\x\\loops.py").write_text(LOOPS)  # on Linux a name like any other
    flags = (
        "--env C:\\x\\loops.py:Sums --updates 2 --sft-steps 1 --sft-examples 2 --sft-batch 2 "
        "--num-tasks 2 --k 2 --eval-n 2 --eval-every 1 --max-tokens 8 --no-wandb --name there"
    ).split()
    said = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "cp1252"}
    env = os.environ | said | {"PYTHONUTF8": "0"}
    words = [sys.executable, "-c", LIKE_WINDOWS, str(ROOT / "train.py"), *flags]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-3000:]
    text, folder = done.stdout.decode("utf-8"), tmp_path / "runs" / "there"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["updates"] == 2 and 0.1 < summary["peak_rss_gb"] < 4
    for name in ("report.md", "report.html", "curves.png", "checkpoint/adapter_model.safetensors"):
        assert (folder / name).stat().st_size > 0, name
    assert " → " in text  # which code page 1252 does not have
    # It says what it chose and why.
    assert "\nno CUDA device, so the embedded pico_base (0.9M parameters) is the policy" in text
    why = "(vLLM is for NVIDIA cards)"
    assert f" CPU with 1 thread, float32, our own sampler {why}\n" in text.replace("\r", "")
    # An environment that loops costs its own episodes.
    errors = [e["error"] for e in lines(folder / "episodes.jsonl")]
    assert set(errors) == {"", "Hung: no answer within 0.3 seconds"}
    assert "episodes ended in an error and are left out: Hung: " in text


# ------------------------------------------------------------------------------ one thing at a time


@pytest.mark.parametrize(
    "text, cores", [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None), (None, None)]
)
def test_a_containers_quota_is_read(tmp_path, text, cores):
    if text is not None:
        (tmp_path / "cpu.max").write_text(text, encoding="utf-8")
    assert machine.quota(tmp_path) == cores


@pytest.mark.parametrize(
    "asked, said, limit, busy, width, threads",
    [
        (0, None, None, 0, 128, 8),
        (0, None, 2.5, 0, 128, 2),
        (0, None, 0.5, 0, 128, 1),  # never 0
        (0, None, 16, 0, 128, 8),
        (0, None, None, 0, 1024, 64),  # a wide model has work for all
        (0, None, 2, 0, 1024, 2),
        (0, None, None, 50, 1024, 32),  # half of the cores are busy
        (0, None, None, 100, 1024, 1),
        (0, None, 2, 90, 1024, 2),  # the others of a large machine are not ours
        (0, "64", 2, 50, 128, 64),  # who says how many gets them
        (3, None, 2, 50, 128, 3),
        (3, "64", 2, 50, 128, 3),
    ],
)
def test_a_run_takes_no_more_threads_than_it_may_use(
    monkeypatch, asked, said, limit, busy, width, threads
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(machine, "quota", lambda: limit)
    put(monkeypatch, machine.psutil, cpu_count=lambda: 64, cpu_percent=lambda interval: busy)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=width))
    policy = SimpleNamespace(lm=SimpleNamespace(config=config))
    assert machine.cpu_threads(Config(threads=asked), policy) == threads


@pytest.mark.parametrize(
    "device, digits, chosen",
    [
        ("cpu", torch.float32, ["medium", "medium"]),  # first to measure it
        ("cpu", torch.bfloat16, ["medium", "highest"]),
        ("cuda", None, []),
    ],
)
def test_onednns_products_are_taken_on_a_cpu_where_they_are_exact(
    monkeypatch, device, digits, chosen
):
    rounded = lambda y, dtype: y if dtype == torch.float64 else y.to(digits)
    product = lambda x, w: rounded(x.double() @ w.double().T, x.dtype)
    precisions, threads = [], []
    monkeypatch.setattr(torch.nn.functional, "linear", product)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    machine.use_cpu(device, 1)
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"  # else gigabytes of code
    assert (precisions, threads) == (chosen, [1])


NARROW = "vLLM needs bfloat16, and here it is float32"  # for which vLLM has no LoRA


@pytest.mark.parametrize(
    "device, size, capability, processes, has_vllm, more, engine, why",
    [
        ("cuda", 4e9, (8, 0), 1, True, {}, "vllm", "vLLM is installed"),
        ("cuda", 4e9, (7, 5), 1, True, {}, "torch", NARROW),
        ("cuda", 1e6, (8, 0), 1, True, {}, "torch", NARROW),
        ("cpu", 4e9, (8, 0), 1, True, {}, "torch", "vLLM is for NVIDIA cards"),
        # it would take our process group for its own
        ("cuda", 4e9, (8, 0), 2, True, {}, "torch", "several processes train"),
        ("cuda", 4e9, (8, 0), 2, True, {"async_rollouts": 1}, "vllm", "vLLM is installed"),
        ("cuda", 4e9, (8, 0), 1, True, {"plain": True}, "plain", "--plain"),
        ("cuda", 4e9, (8, 0), 1, True, {"engine": "torch"}, "torch", "--engine torch"),
        # who lacks it is told how to get it only if it would be used
        ("cuda", 4e9, (8, 0), 1, False, {}, "torch", "vLLM is not installed: pip install -r req"),
        ("cuda", 1e6, (8, 0), 1, False, {}, "torch", NARROW),
    ],
)
def test_vllm_samples_where_it_can(
    monkeypatch, device, size, capability, processes, has_vllm, more, engine, why
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: has_vllm)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(machine.parallel, "world", lambda: processes)
    found, said = machine.which(Config(**more), device, size)
    assert found == engine and said.startswith(why)


# --------------------------------------------------------------------------------- what fits a card

PAGE = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "more, tokens",
    [
        ({}, 2048 + 192 + 1024),
        ({"env": "alphabet"}, 3 * 2048 + 596 + 1024),
        ({"env": "swarm"}, 25 * 2048 + 4700 + 1024),
        # of these the longest conversation is not known
        ({"env": "alphabet", "set": ["max_turns=9"]}, 32768),
        ({"env": "mine.py:Mine"}, 32768),
        ({"env": "swarm", "set": ["version=0.2"]}, 25 * 2048 + 4700 + 1024),
    ],
)
def test_vllm_makes_room_for_the_longest_conversation_and_for_little_more(more, tokens):
    assert machine.room_for_talk(Config(max_tokens=2048, **more)) == tokens


@pytest.mark.parametrize(
    "name, room",
    [
        ("T4, 15 GB", 14.6 / 2),  # in float32
        ("Ampere, 16 GB", 15.7),
        ("Ampere, 24 GB", 23.6),
        ("A100, 40 GB", 39.4),
        ("Ampere, 48 GB", 47.4),
        ("A100, 80 GB", 79.1),
        ("H200, 141 GB", 139.7),
    ],
)
def test_the_pages_table_of_what_auto_takes_is_autos(name, room):
    [row] = [line for line in PAGE.splitlines() if line.startswith(f"| {name} |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
    for table, cell in zip((machine.AUTO, machine.AUTO_SWARM), cells, strict=True):
        fitting = (row for row in table if room >= row[0])
        _, model, fits = next(fitting, (0, "pico_swarm", {}))
        flags = f" `{machine.flags_of(fits)}`" if fits else ""
        assert cell == model.split("/")[-1].removesuffix("-Instruct-2507") + flags
