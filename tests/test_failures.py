"""Protects the failure journal: every mistake can be made, and is named by the run that makes
it."""

import json
from pathlib import Path

import pytest

import settings
import warm
from bookkeeping import doctor, refusals
from bookkeeping.failures import FAILURES, SETTINGS
from warm import ROOT

KEPT = json.loads((ROOT / "results" / "failures.json").read_text())["arms"]
SMALL = """--sft-steps 2 --sft-examples 4 --sft-batch 2 --num-tasks 2 --k 4 --eval-n 2
--difficulty 2 --max-tokens 48 --threads 1 --warmup 0 --no-wandb --no-eval-other-tiers""".split()
MORE = {
    "learning-rate": ["--updates", "5", "--reward", "partial", "--warmup", "0"],
    "no-variance": ["--difficulty", "8", "--updates", "11", "--k", "2"],
    "stale-adapter": ["--lr", "1e-2", "--updates", "6", "--reward", "partial"],
    "reward-as-correct": ["--updates", "2"],
    "temperature": ["--updates", "6", "--k", "8", "--reward", "partial"],
}


def run(runs: Path, *flags: str) -> tuple[Path, str]:
    """The folder of a run, and what it printed. In a process of its own, where the mistake stays."""
    done = warm.run(["train.py", *SMALL, *flags, "--runs", runs, "--name", "run"], pictures=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return runs / "run", done.stdout


@pytest.mark.parametrize(
    "name", [name for name in FAILURES if name not in ("generous-reward", "off-policy")]
)
def test_the_run_that_makes_a_mistake_names_it(tmp_path, name):
    """In small, a few seconds each. The two that take longer are below, from runs that are kept."""
    flags = MORE.get(name, ["--updates", "4", "--reward", "partial"])
    folder, printed = run(tmp_path, "--break", name, *flags)
    sentence = json.loads((folder / "summary.json").read_text())["warnings"][FAILURES[name].told]
    assert f"{FAILURES[name].told.upper()} at {sentence}" in printed and "\n" not in sentence


def test_the_same_runs_without_a_mistake_are_told_nothing(tmp_path):
    folder, _ = run(tmp_path, *"--updates 4 --reward partial --epochs 2 --temperature 0.7".split())
    assert json.loads((folder / "summary.json").read_text())["warnings"] == {}
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["stop_trained"] == last["exact_reward"] == 1 and "twice" not in last
    assert last["stretch"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("name", ["generous-reward", "off-policy"])
def test_the_kept_run_names_it(name):
    kept, told = KEPT[name], FAILURES[name].told
    assert kept["settings"] == f"--break {name}" and told in kept["warnings"]
    assert told in doctor.look_at(kept["lines"]), "by the code as it is now"


@pytest.mark.parametrize("name", ["healthy", "healthy-epochs", "healthy-partial"])
def test_the_kept_runs_without_a_mistake_are_well(name):
    assert doctor.look_at(KEPT[name]["lines"]) == {}


@pytest.mark.parametrize("flags", [["--plain"], ["--engine", "vllm"], ["--async-rollouts", "1"]])
def test_a_mistake_that_would_not_be_made_is_refused(flags):
    """It is put into this process: a second one that samples, or another sampler, would not make
    it."""
    for name in ("stale-adapter", "off-policy"):
        with pytest.raises(
            ValueError,
            match=f"--break {name}: .* leave out --plain, --engine vllm and --async-rollouts",
        ):
            refusals.check(settings.command_line(["--break", name, *flags], SETTINGS)[0])
    refusals.check(
        settings.command_line(["--break", "off-policy"], SETTINGS)[0]
    )  # its own flag samples ahead
