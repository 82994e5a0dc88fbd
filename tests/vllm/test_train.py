"""Protects whole runs with vLLM: the recipe on pico_base as `train.py --engine vllm` runs it, in
one process, across --resume, and with vLLM in the process that samples ahead. On a CPU vLLM
computes in float32, as our own sampler does, so the two can be compared number by number.

These are subprocesses, as a user would start them. Starting vLLM takes a while, so every run serves
as many tests as it can.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bookkeeping.records import lines
from warm import ENV, ROOT

TINY = [
    "--updates", "3", "--sft-steps", "4", "--sft-examples", "6", "--sft-batch", "2",
    "--num-tasks", "2", "--k", "4", "--eval-n", "8", "--eval-every", "9", "--save-every", "1",
    "--max-tokens", "64", "--difficulty", "6", "--reward", "partial", "--no-wandb",
]  # fmt: skip
AHEAD = ["--engine", "vllm", "--async-rollouts", "1"]


def run(*command: str) -> str:
    """Run Python with these arguments to a good end; returns what it printed."""
    words = [sys.executable, *command]
    done = subprocess.run(words, cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def vllm(runs) -> Path:
    run("train.py", *TINY, "--engine", "vllm", "--runs", str(runs), "--name", "vllm")
    return runs / "vllm"


@pytest.fixture(scope="module")
def ours(runs) -> Path:
    run("train.py", *TINY, "--engine", "torch", "--runs", str(runs), "--name", "torch")
    return runs / "torch"


@pytest.fixture(scope="module")
def ahead(runs) -> Path:
    run("train.py", *TINY, *AHEAD, "--runs", str(runs), "--name", "ahead")
    return runs / "ahead"


def assert_whole(folder: Path, updates: int) -> None:
    logs = "config.json metrics.jsonl evals.jsonl episodes.jsonl summary.json"
    for name in (*logs.split(), "report.md", "curves.png", "report.html"):
        assert (folder / name).stat().st_size > 0, name
    found = [line["update"] for line in lines(folder / "metrics.jsonl")]
    assert found == list(range(1, updates + 1))
    assert json.loads((folder / "summary.json").read_text())["updates"] == updates
    assert json.loads((folder / "checkpoint" / "state.json").read_text())["updates"] == updates


def assert_on_policy(line: dict) -> None:
    """What vLLM says it sampled is what the trainer would have said.

    Weights that are one update old differ by 1e-3 here (AHEAD).
    """
    assert 0 < line["mismatch"] < 1e-4
    assert abs(line["ratio"] - 1) < 1e-4 and abs(line["ratio_max"] - 1) < 1e-3
    assert line["off_policy_steps"] == 0 and line["groups_with_signal"] > 0


def evaluated(folder: Path, stage: str) -> dict[str, dict]:
    """{set of tasks: its line of evals.jsonl}."""
    return {e["tasks"]: e for e in lines(folder / "evals.jsonl") if e["stage"] == stage}


def test_a_run_leaves_its_folder_and_every_update_is_on_policy(vllm):
    assert_whole(vllm, 3)
    for line in lines(vllm / "metrics.jsonl"):
        assert_on_policy(line)
    rollouts = [e for e in lines(vllm / "episodes.jsonl") if e["source"] == "rollout"]
    assert {e["policy_version"] for e in rollouts} == {0, 1, 2}


def test_greedy_it_is_evaluated_as_by_our_own_sampler(vllm, ours):
    for stage in ("before", "after_sft"):
        mine, theirs = evaluated(ours, stage), evaluated(vllm, stage)
        # A test of equal rewards would show little.
        assert any(len(set(e["reward"])) > 1 for e in mine.values())
        assert theirs == mine


def test_vllm_goes_on_with_a_run_of_our_own_sampler(ours, runs):
    """The engine starts before the checkpoint is loaded, and has to sample from the checkpoint."""
    folder = runs / "torch_then_vllm"
    shutil.copytree(ours, folder)
    run("train.py", "--resume", str(folder), "--engine", "vllm", "--updates", "4")
    assert_whole(folder, 4)
    assert_on_policy(lines(folder / "metrics.jsonl")[3])


def test_ahead_of_the_trainer_every_batch_but_the_first_is_one_update_old(ahead, vllm):
    assert_whole(ahead, 3)
    found = lines(ahead / "metrics.jsonl")
    assert [line["off_policy_steps"] for line in found] == [0, 1, 1]
    assert_on_policy(found[0])
    # older weights, and it shows
    assert all(line["mismatch"] > 10 * found[0]["mismatch"] for line in found[1:])
    for stage in ("before", "after_sft"):  # these are never ahead
        assert evaluated(ahead, stage) == evaluated(vllm, stage)
