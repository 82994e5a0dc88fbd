"""Several processes (fast/parallel.py): two ranks compute what one process computes, and a whole
run of theirs is one run.

Most ranks here are forks that have their imports behind them (warm.ranks); the run that Ctrl-C ends
is started by torchrun itself.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import warm
from bookkeeping.records import lines
from fast import parallel
from warm import ENV, ROOT

RUN = ["--env", "letters", "--updates", "3", "--sft-steps", "3", "--sft-examples", "6", "--eval-n", "6", "--num-tasks", "3", "--k", "4",
       "--max-tokens", "200", "--lr", "1e-3", "--difficulty", "2", "--reward", "partial", "--no-wandb", "--threads", "1",
       "--save-every", "1", "--no-eval-other-tiers"]  # fmt: skip


def call(processes: int, *words) -> subprocess.CompletedProcess:
    """A script and its flags, in one process or in several ranks."""
    return warm.ranks(processes, [*words], timeout=600)


def drop_seconds(line: dict) -> dict:
    return {name: value for name, value in line.items() if not name.startswith("seconds_")}


# --------------------------------------------------------------------------------------- the pieces


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of the one process, and of each of two ranks; see tests/ranks.py."""
    folder = tmp_path_factory.mktemp("ranks")
    for processes in (1, 2):
        done = call(processes, "tests/ranks.py", folder)
        assert done.returncode == 0, done.stderr
    names = ("1-0.pt", "2-0.pt", "2-1.pt")
    return [torch.load(folder / name, weights_only=False) for name in names]


def test_two_ranks_compute_the_gradient_of_one_process(ranks):
    alone, first, second = ranks
    for case, (stats, gradient, weights) in alone.items():
        for found in (first, second):
            theirs, their_gradient, their_weights = found[case]
            assert gradient.abs().max() > 1e-4, case
            near = dict(rtol=1e-4, atol=1e-6 * float(gradient.abs().max()))
            torch.testing.assert_close(their_gradient, gradient, **near, msg=case)
            torch.testing.assert_close(their_weights, weights, rtol=1e-5, atol=1e-6, msg=case)
            assert theirs == pytest.approx(stats, rel=1e-4, abs=1e-6), case
        assert torch.equal(first[case][2], second[case][2]), f"{case}: the ranks have drifted apart"
        assert first[case][0] == second[case][0], case


# --------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: (folder, what was printed)} of one run in one process and in two, in turn and ahead."""
    folder = tmp_path_factory.mktemp("runs")
    out = {}
    ahead = ["--async-rollouts", "1"]
    kinds = (("one", 1, []), ("two", 2, []), ("ahead", 2, ahead), ("ahead alone", 1, ahead))
    for name, processes, more in kinds:
        done = call(processes, "train.py", *RUN, *more, "--runs", folder, "--name", name)
        assert done.returncode == 0, done.stderr
        out[name] = folder / name, done.stdout
    return out


@pytest.mark.parametrize(("one", "two"), [("one", "two"), ("ahead alone", "ahead")])
def test_a_run_of_two_ranks_is_the_run_of_one(runs, one, two):
    (one, _), (two, _) = runs[one], runs[two]
    names = lambda folder: sorted(path.name for path in folder.iterdir())
    assert names(one) == names(two)
    a, b = lines(one / "metrics.jsonl"), lines(two / "metrics.jsonl")
    assert len(a) == len(b) == 3 and any(line["grad_norm"] > 0 for line in a)
    for mine, theirs in zip(a, b):
        assert drop_seconds(mine) == pytest.approx(drop_seconds(theirs), rel=1e-3, abs=1e-5)
    told = lambda file, *names: [[line[name] for name in names] for line in lines(file)]
    assert told(one / "evals.jsonl", "reward") == told(two / "evals.jsonl", "reward")
    what = ("update", "stage", "seed", "member", "messages")
    assert told(one / "episodes.jsonl", *what) == told(two / "episodes.jsonl", *what)
    assert json.loads((two / "summary.json").read_text())["machine"]["processes"] == 2


def test_only_one_of_them_prints_and_keeps(runs):
    folder, printed = runs["two"]
    assert printed.count("update    1 ") == printed.count("all of it:") == 1
    assert not list(Path("/dev/shm").glob(f"picoswarm-*-*/{folder.name}*"))
    assert (folder / "checkpoint" / "adapter_model.safetensors").exists()


def test_a_run_goes_on_with_another_number_of_ranks_and_with_more_than_there_are_tasks(
    runs, tmp_path
):
    for before, processes in (("one", 2), ("two", 1)):
        folder = tmp_path / f"from {before}"
        shutil.copytree(runs[before][0], folder)
        done = call(processes, "train.py", "--resume", folder, "--updates", "4")
        assert done.returncode == 0, done.stderr
        assert [line["update"] for line in lines(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    a, b = (lines(tmp_path / name / "metrics.jsonl")[-1] for name in ("from one", "from two"))
    assert drop_seconds(a) == pytest.approx(drop_seconds(b), rel=1e-3, abs=1e-5)
    done = call(2, "train.py", *RUN, "--num-tasks", "1", "--runs", tmp_path, "--name", "few")
    assert done.returncode == 0, done.stderr
    assert len(lines(tmp_path / "few" / "metrics.jsonl")) == 3


def test_ctrl_c_stops_all_of_them_at_the_same_update_and_leaves_nobody_behind(tmp_path):
    """And the processes that sample ahead for them."""
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 train.py".split()
    many = ["--updates", "500", "--async-rollouts", "1", "--runs", str(tmp_path)]
    command = [sys.executable, *torchrun, *RUN, *many, "--name", "stopped"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=ENV, start_new_session=True, **pipes)
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    until = time.time() + 300
    two_updates = lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2
    while time.time() < until and not two_updates():
        time.sleep(0.2)
    # What a terminal does: every process gets it, and torchrun passes it on once more.
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=300)  # waits for all who could still write
    assert f"go on with: python train.py --resume {tmp_path / 'stopped'}" in said
    done = len(metrics.read_text().splitlines())
    state = json.loads((tmp_path / "stopped" / "checkpoint" / "state.json").read_text())
    assert state["updates"] == done < 500


def test_what_cannot_work_is_refused_once_and_in_a_sentence(tmp_path):
    done = call(2, "train.py", *RUN, "--engine", "vllm", "--runs", tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("needs a second one next to each") == 1
    done = call(2, "train.py", "--eval-only", tmp_path)
    assert done.returncode != 0 and "leave torchrun out" in done.stderr


@pytest.mark.parametrize(
    "rank, named, n, backend, card",
    [
        (1, "4,5", 2, "cpu:gloo,cuda:nccl", "5"),
        (0, "", 2, "cpu:gloo,cuda:nccl", "0"),
        (1, "0,1", 0, "gloo", "0,1"),
        (1, "-1", 0, "gloo", "-1"),  # named, and not there
        (1, "", 1, "", "there are 1 cards; lower --nproc-per-node"),
    ],
)
def test_a_rank_has_a_card_of_its_own_or_a_sentence(monkeypatch, rank, named, n, backend, card):
    joined = []
    monkeypatch.setattr(parallel.dist, "init_process_group", lambda how, **_: joined.append(how))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # silenced, of all ranks but the first
    monkeypatch.setattr(parallel, "rank", lambda: rank)
    words = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "CUDA_VISIBLE_DEVICES": named}
    for name, value in words.items():
        monkeypatch.setenv(name, str(value))
    if not backend:
        with pytest.raises(SystemExit, match=card):
            parallel.start()
        return
    parallel.start()
    assert joined == [backend] and os.environ["CUDA_VISIBLE_DEVICES"] == card
