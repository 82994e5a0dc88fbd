"""Protects the doctor: each symptom is told when it is there, once, with what to do; a healthy run is left alone, the committed ones included."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import doctor

ROOT = Path(doctor.__file__).resolve().parent
half = lambda before, after: np.repeat([before, after], 15).astype(float)

# {symptom: (the values that show it, the update that tells it, what the sentence must name)}
ILL = {
    "collapse": ({"reward": half(0.8, 0.1)}, 18, "learning rate"),
    "stuck": ({"reward": half(0.2, 0.0), "groups_with_signal": half(0.5, 0.0), "truncated": half(0.1, 1.0)}, 20, "learning rate"),
    "no signal": ({"groups_with_signal": half(0.5, 0.0)}, 25, "equal"),
    "noise": ({"entropy": half(0.3, 4.0)}, 18, "learning rate"),
    "cut short": ({"truncated": half(0.1, 0.9)}, 20, "--max-tokens"),
    "errors": ({"errors": half(0, 8), "n": half(64, 56)}, 18, "environment"),
}


@pytest.mark.parametrize("symptom", ILL)
def test_a_symptom_is_told_once_when_it_is_there(symptom):
    values, update, names = ILL[symptom]
    seen = doctor.look_at(doctor.made_up(**values))
    (told,) = [sentence for sentence in seen if f": {symptom}: " in sentence]
    assert told.startswith(f"update {update}: ") and names in told and "\n" not in told
    assert len(seen) == 1 or symptom == "stuck" and len(seen) == 2 and ": collapse: " in seen[0]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"groups_with_signal": np.tile([0.0] * 9 + [0.1], 3)},  # now and then there is one
        {"entropy": half(0.05, 0.4)},  # eight times as much, and still sure of itself
        {"entropy": half(2.0, 4.0)},  # it has always been like this
        {"truncated": half(0.0, 0.5)},
        {"errors": half(0, 1)},  # 1 of 65 may happen
        {"errors": np.tile([0.0, 0.0, 32.0], 10)},
    ],
)
def test_what_is_no_symptom_is_not_told(values):
    assert doctor.look_at(doctor.made_up(**values)) == []


def test_nothing_right_and_everything_right_have_different_remedies():
    equal = {"groups_with_signal": np.zeros(30)}
    (hard,) = doctor.look_at(doctor.made_up(reward=np.zeros(30), **equal))
    (solved,) = doctor.look_at(doctor.made_up(reward=np.ones(30), **equal))
    assert "lower --difficulty" in hard and "raise --difficulty" in solved


def test_a_run_that_never_scored_is_not_stuck_but_has_no_signal():
    values = {"reward": np.where(np.arange(30) == 3, 0.05, 0.0), "groups_with_signal": np.where(np.arange(30) == 3, 0.1, 0.0)}
    (told,) = doctor.look_at(doctor.made_up(**values))
    assert "no signal" in told and "update 14" in told


def test_a_run_of_one_line_and_lines_without_an_entropy_are_survived():
    assert doctor.symptoms([], []) == {} and doctor.look_at(doctor.made_up()[:1]) == []
    quiet = [
        {k: v for k, v in line.items() if k != "entropy"} for line in doctor.made_up()
    ]  # no group had a signal, so nothing was computed
    assert doctor.look_at(quiet) == []


@pytest.mark.parametrize(
    "run", sorted(p.parent.relative_to(ROOT).as_posix() for p in (ROOT / "results").glob("**/metrics.jsonl") if "failures" not in str(p))
)
def test_committed_runs_are_well(run):
    """All were looked at by people, and none had any of this: an alarm here would be a false one."""
    lines = [json.loads(line) for line in (ROOT / run / "metrics.jsonl").read_text().splitlines()]
    assert doctor.look_at(lines) == [] or "stale" in run  # samples eight updates old, without correction, may well fall apart


def test_the_command_line(tmp_path):
    ask = lambda *words: subprocess.run([sys.executable, "doctor.py", *words], cwd=ROOT, capture_output=True, text=True)
    assert "nothing to tell" in ask().stdout
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in doctor.made_up(**ILL["noise"][0])))
    assert ask(str(tmp_path)).stdout.startswith("update 18: noise: ")
    missing = ask(str(tmp_path / "no"))
    assert missing.returncode == 1 and "Traceback" not in missing.stderr and "check the path" in missing.stderr
