"""Protects a training that goes wrong: it is noticed, named, and survived, or it stops with the
last good checkpoint; never a checkpoint of broken weights."""

import errno
import json
import os
import re
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import sft
import train
import warm
from bookkeeping import refusals
from env_letters import Letters
from settings import SFT_SEEDS

SHORT = (
    "--sft-steps 2 --sft-examples 4 --sft-batch 2 --num-tasks 2 --k 3 --eval-n 2 --eval-every 100 "
    "--save-every 1 --max-tokens 16 --difficulty 2 --reward partial --no-wandb --threads 1 "
    "--warmup 0 --no-eval-other-tiers"
).split()


def command(monkeypatch, *words) -> None:
    warm.draw_nothing(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
    train.main()


def run(monkeypatch, runs: Path, *flags: str) -> Path:
    command(monkeypatch, *SHORT, "--runs", runs, "--name", "run", *flags)
    return runs / "run"


def saved(folder: Path, name: str = "checkpoint") -> tuple[dict, int]:
    """(weights, number of updates) of the run's checkpoint."""
    state = json.loads((folder / name / "state.json").read_text())
    return load_file(folder / name / "adapter_model.safetensors"), state["updates"]


def test_weights_that_break_just_before_a_checkpoint_are_not_saved(monkeypatch, tmp_path):
    update, calls = train.update, []

    def breaks(policy, *given):
        stats = update(policy, *given)
        calls.append(policy.trainable())
        if len(calls) == 3:
            max(calls[-1].items())[1].data.fill_(float("nan"))
        return stats

    monkeypatch.setattr(train, "update", breaks)
    with pytest.raises(SystemExit, match="after update 3 the policy's log-probs are not finite"):
        run(monkeypatch, tmp_path, "--updates", "5")
    assert saved(tmp_path / "run")[1] == 2


def test_a_finished_run_that_goes_on_and_is_stopped_has_no_summary(monkeypatch, tmp_path):
    folder, right = run(monkeypatch, tmp_path, "--updates", "1"), train.update
    command(monkeypatch, "--resume", folder)  # nothing is left to do
    assert (folder / "summary.json").exists()
    stops = lambda *given: (os.kill(os.getpid(), signal.SIGINT), right(*given))[1]
    monkeypatch.setattr(train, "update", stops)
    with pytest.raises(SystemExit, match="stopped; go on with"):
        command(monkeypatch, "--resume", folder, "--updates", "3")
    assert saved(folder)[1] == 2 and not (folder / "summary.json").exists()


# -------------------------------------------------------------------------------- bad environments


@pytest.mark.parametrize("method", ["reset", "expert_reply", "score"])
def test_a_demonstration_that_fails_ends_the_run_in_one_sentence(monkeypatch, tmp_path, method):
    right, env = getattr(Letters, method), Letters(2, "partial", True, "states")
    env.reset(SFT_SEEDS + 1)

    def fails(self, *given):
        its = given == (SFT_SEEDS + 1,) if method == "reset" else self.task == env.task
        return {}["row 3"] if its else right(self, *given)

    monkeypatch.setattr(refusals, "OURS", ())  # as an environment of somebody else
    monkeypatch.setattr(Letters, method, fails)
    with pytest.raises(SystemExit, match=f"task {SFT_SEEDS + 1} failed: KeyError: 'row 3'"):
        run(monkeypatch, tmp_path, "--updates", "1")


# ---------------------------------------------------------------------- before the first checkpoint


def stopped_in_sft(monkeypatch, runs: Path, happens) -> SystemExit:
    """Run until the first step of SFT, where something happens."""
    monkeypatch.setattr(sft, "sft_step", happens)
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, runs)
    return stopped.value


@pytest.mark.parametrize(
    "happens, told",
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "evals.jsonl"),
            "free some space or fix the path; go on with: python train.py --resume",
        ),
        (torch.OutOfMemoryError("full"), "give a lower --micro-tokens, or --gradient-checkp"),
        (FloatingPointError("a loss is nan"), "a lower --lr, or --sft-lr if it was in SFT"),
        # Python's own sentence does not say where it was: ours does
        (lambda *given: dict([(1, 2, 3)]), r"2 is required \(.*test_bad_training\.py:\d+\)$"),
    ],
    ids=["full disk", "no memory", "nan", "bug"],
)
def test_what_goes_wrong_before_a_checkpoint_speaks_of_none(monkeypatch, tmp_path, happens, told):
    happens = happens if callable(happens) else Mock(side_effect=happens)
    said = str(stopped_in_sft(monkeypatch, tmp_path, happens))
    assert re.search(told, said) and "\n" not in said and "last checkpoint" not in said


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_sft_names_the_folder_and_a_second_one_does_too(
    monkeypatch, capsys, tmp_path, times
):
    right = sft.sft_step

    def interrupted(*given):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        return right(*given)

    stopped = stopped_in_sft(monkeypatch, tmp_path, interrupted)
    said = str(stopped) + capsys.readouterr().err
    assert f"go on with: python train.py --resume {tmp_path}/run" in said
    assert (stopped.code == 130) == (times == 2)
