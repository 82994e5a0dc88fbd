"""Protects the machines: what Linux has and Windows or macOS has not is taken away here, and a run
still does what it promises. And the plan of a card's memory, which docs/hardware.md shows.

No Windows and no Mac was at hand (docs/hardware.md). What stands in for them is this Python, without
the modules, functions and signals that they lack.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bookkeeping import guard, presets
from bookkeeping.records import lines
from fast import machine
from fast.machine import BIG, CARDS, Hung
from settings import Config

ROOT = Path(__file__).resolve().parent.parent

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


@pytest.fixture(scope="module")
def on_windows(tmp_path_factory):
    """A whole run of train.py without what Windows lacks, its output into a pipe that the system
    takes for code page 1252: (output, run folder)."""
    home = tmp_path_factory.mktemp("home")
    (home / "C:\\x").write_text("")  # on Linux a name like any other
    (home / "C:\\x\\loops.py").write_text(LOOPS)
    flags = ["--env", "C:\\x\\loops.py:Sums", "--updates", "2", "--sft-steps", "1", "--sft-examples", "2", "--sft-batch", "2",
             "--num-tasks", "2", "--k", "2", "--eval-n", "2", "--eval-every", "1", "--max-tokens", "8", "--no-wandb",
             "--name", "there"]  # fmt: skip
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONIOENCODING": "cp1252",
        "PYTHONUTF8": "0",
    }
    (home / "preamble.py").write_text(LIKE_WINDOWS)
    words = [sys.executable, str(home / "preamble.py"), str(ROOT / "train.py"), *flags]
    done = subprocess.run(words, cwd=home, env=env, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-3000:]
    return done.stdout.decode("utf-8"), home / "runs" / "there"


def test_without_resource_fork_and_alarms_a_run_is_whole(on_windows):
    text, folder = on_windows
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["updates"] == 2 and 0.1 < summary["peak_rss_gb"] < 4
    for name in ("report.md", "report.html", "curves.png", "checkpoint/adapter_model.safetensors"):
        assert (folder / name).stat().st_size > 0, name
    assert " → " in text  # which code page 1252 does not have


def test_it_says_what_it_chose_and_why(on_windows):
    text, _ = on_windows
    said = text.splitlines()
    assert "no CUDA device, so the embedded pico_base (0.9M parameters) plays the policy" in said
    (here,) = [line for line in said if line.startswith("here: ")]
    why = "(no CUDA device; vLLM is for NVIDIA cards)"
    assert here.endswith(f" CPU with 1 thread, float32, our own sampler {why}")


def test_an_environment_that_loops_costs_its_own_episodes_there_too(on_windows):
    text, folder = on_windows
    errors = [e["error"] for e in lines(folder / "episodes.jsonl")]
    hung = [error for error in errors if error]
    assert hung and all(error == "Hung: no answer within 0.3 seconds" for error in hung)
    assert "episodes ended in an error and are left out: Hung: " in text and not all(errors)


# ------------------------------------------------------------------------------ one thing at a time


def test_the_unit_of_the_peak_is_the_systems(monkeypatch):
    held = {}
    for name in ("linux", "darwin"):
        monkeypatch.setattr(sys, "platform", name)
        held[name] = machine.peak_memory()
    assert 0.05 < held["linux"] < 64
    assert held["linux"] / held["darwin"] == pytest.approx(1024, rel=0.1)


def test_on_windows_a_file_is_flushed_through_a_handle_that_may_write_and_a_folder_is_left_alone(
    monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("x")
    real, opened, flushed = os.open, [], []

    def open_(path, flags):
        opened.append((Path(path).name, flags))
        return real(path, flags)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "fsync", flushed.append)
    for windows, expected in (
        (False, [("file", os.O_RDONLY), (tmp_path.name, os.O_RDONLY)]),
        (True, [("file", os.O_RDWR)]),
    ):
        monkeypatch.setattr(machine, "WINDOWS", windows)
        opened.clear()
        flushed.clear()
        for path in (tmp_path / "file", tmp_path):
            machine.flush(path)
        assert opened == expected and len(flushed) == len(expected)


@pytest.mark.parametrize("lacks", ["SIGALRM", "setitimer"])
def test_without_timer_signals_the_main_thread_has_a_limit_too(monkeypatch, lacks):
    monkeypatch.delattr(signal, lacks)
    late = SimpleNamespace(seconds=0.2)
    for _ in range(3):  # what is left of one must not reach the next
        with pytest.raises(Hung) as caught:
            guard.in_time(late, time.sleep, 2)
        assert guard.told(caught.value).startswith("Hung: no answer within 0.2 seconds")
        assert guard.in_time(late, sum, range(100_000)) == 4999950000
    with pytest.raises(SystemExit, match="its own"):
        guard.in_time(late, sys.exit, "its own")


@pytest.mark.parametrize(
    "files, cores",
    [
        ({"cpu.max": "150000 100000\n"}, 1.5), ({"cpu.max": "max 100000\n"}, None), ({"cpu.max": ""}, None), ({}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    ],
)  # fmt: skip
def test_a_containers_quota_is_read_in_both_versions_of_cgroups(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert machine.quota(tmp_path) == cores


@pytest.mark.parametrize(
    "asked, said, limit, width, threads",
    [
        # fewer, and never 0
        (0, None, None, 128, 8), (0, None, 2.5, 128, 2), (0, None, 0.5, 128, 1), (0, None, 16, 128, 8),
        (0, None, None, 1024, 64), (0, None, 2, 1024, 2),  # a wide model has work for all
        # who says how many gets them
        (0, "64", 2, 128, 64), (3, None, 2, 128, 3), (3, "64", 2, 128, 3),
    ],
)  # fmt: skip
def test_a_run_takes_no_more_threads_than_it_may_use(
    monkeypatch, asked, said, limit, width, threads
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(machine, "quota", lambda: limit)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=width))
    policy = SimpleNamespace(lm=SimpleNamespace(config=config))
    assert machine.cpu_threads(Config(threads=asked), policy) == threads


@pytest.mark.parametrize(
    "device, exact, chosen",
    [("cpu", True, "medium"), ("cpu", False, "highest"), ("cuda", True, "highest")],
)
def test_onednns_products_are_taken_on_a_cpu_where_they_are_exact(
    monkeypatch, device, exact, chosen
):
    assert machine.product_error("highest") < 1e-6
    monkeypatch.setattr(machine, "product_error", lambda _: 1e-6 if exact else 4e-3)
    before = torch.get_num_threads()
    try:
        machine.use_cpu(device, 1)
        assert torch.get_float32_matmul_precision() == chosen and torch.get_num_threads() == 1
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(before)


# --------------------------------------------------------------------------------- what fits a card

A100 = CARDS["A100, 80 GB"]
PAGE = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")


def test_the_plan_has_the_defaults_of_the_settings():
    """fast/ may not import settings.py, where each is declared."""
    turns_of = {"letters": 1, "alphabet": 3, "swarm": 25, "yours": 1}
    for env, (turns, tokens, between) in machine.TALK.items():
        large = presets.by_size(1e9, env)
        assert (turns, tokens) == (turns_of[env], large["max_tokens"])
        assert between > 150 and machine.longest(env) == turns * tokens + between
        defaults = {name: getattr(Config, name) for name in machine.DEFAULTS}
        assert machine.DEFAULTS == defaults | {name: large[name] for name in ("micro_tokens", "k")}
    assert machine.longest("letters", 100) == 292
    assert machine.longest("mine.py:Mine") == machine.longest("yours")
    assert {field.name for field in fields(Config)} >= machine.READ


def as_settings(flags: str) -> dict:
    """`--engine torch --micro-tokens 4096` -> {"engine": "torch", "micro_tokens": 4096}"""
    values = {}
    for name, value in re.findall(r"--([a-z-]+)(?: ([^-`][^ `]*))?", flags):
        number = re.fullmatch(r"[\d.]+", value)
        values[name.replace("-", "_")] = json.loads(value) if number else value or True
    return values


def test_the_pages_table_of_cards_is_the_plan():
    """Within 1.2 GiB. Our own sampler takes what is left; the plan has the least that it needs."""
    table = PAGE.split("<!-- table: card -->")[1].split("<!-- end -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.strip().splitlines()[2:]
    ]
    assert len(rows) == 5
    card_of = {
        "16 GB": CARDS["Ampere, 16 GB"],
        "A100 80 GB": A100,
        "H200 141 GB": CARDS["H200, 141 GB"],
    }
    for name, card, flags, sampling, training in rows:
        named = f"Qwen/{name.split(',')[0]}"
        model = next(model for model in machine.SIZES if model.startswith(named))
        asked = as_settings(flags)
        found = machine.plan(model, "letters", card_of[card], asked.get("engine", "vllm"), asked)
        assert found.peak() < card_of[card].gib
        assert found.training == pytest.approx(float(training), abs=1.2), name
        if "engine" in asked:
            assert found.sampling < float(sampling) + 0.3
        else:
            assert found.sampling == pytest.approx(float(sampling), abs=0.2)


def test_the_pages_table_of_what_auto_takes_is_the_plan(monkeypatch):
    rows = [
        line.strip("| ").split(" | ")
        for line in PAGE.splitlines()
        if line.startswith(tuple(f"| {card} |" for card in CARDS))
    ]
    assert [row[0] for row in rows] == list(CARDS)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "where_is", lambda model: "the hub")
    for name, *cells in rows:
        monkeypatch.setattr(machine, "card_memory", lambda _, name=name: CARDS[name].gib)
        capability = (8 if CARDS[name].bfloat16 else 7, 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, has=capability: has)
        for env, cell in zip(("letters", "alphabet", "swarm"), (cells[0], *cells), strict=True):
            path, _, fits = machine.choose_model("auto", env, "cuda", {})
            flags = f" `{machine.typed(fits)}`" if fits else ""
            model = path.split("/")[-1].removesuffix("-Instruct-2507")
            assert cell == model + flags, (name, env)


@pytest.mark.parametrize("preset", ["swarm-published", "alphabet-published"])
def test_a_published_preset_fits_a_card_of_80_gb(preset):
    p = presets.PRESETS[preset]
    asked = {name: p[name] for name in machine.READ & p.keys()}
    assert machine.settings_that_fit(p["model"], p["env"], A100, ["vllm"], asked)[0] == {}


def test_a_plan_adds_up():
    """By hand: vLLM samples in its share, beside the policy, Adam's moments and a context."""
    weights, adapter, kv, plain, checkpointed = machine.SIZES[BIG]
    held = machine.CONTEXT + weights + 3 * adapter
    found = machine.plan(BIG, "letters", A100, "vllm")
    assert found.sampling == pytest.approx(held + 0.3 * 79.1)
    assert found.trainer == pytest.approx(held + adapter + machine.LOGITS + 8 * plain)
    assert found.training == found.trainer + machine.GRAPHS
    second = 0.3 * 79.1 + machine.CONTEXT + weights + adapter
    assert found.peak(ahead=True) == pytest.approx(found.trainer + second)
    asked = {"gradient_checkpointing": True, "micro_tokens": 4096}
    less = machine.plan(BIG, "letters", A100, "vllm", asked)
    assert found.training - less.training == pytest.approx(8 * plain - 4 * checkpointed)
    # weights, copy, gradient, two moments: float32
    full = machine.plan(BIG, "letters", A100, "torch", {"lora_rank": 0})
    assert full.training > 5 * 2 * weights > A100.gib - 5


def test_vllm_needs_room_for_the_longest_conversation():
    """25 replies of 2,048 are longer than the 32,768 tokens that it has room for otherwise."""
    share = (7.5 + machine.VLLM_ROOM + 6) / A100.gib
    asked = {"gradient_checkpointing": True, "vllm_memory": share}
    short, long = (asked | {"max_tokens": n} for n in (512, 2048))
    assert machine.longest("swarm", 2048) == 55_900
    assert not machine.plan(BIG, "swarm", A100, "vllm", long).starts
    assert machine.plan(BIG, "swarm", A100, "vllm", short).peak() < A100.gib
