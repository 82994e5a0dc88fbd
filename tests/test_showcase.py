"""Protects results/showcase: `make showcase` makes it, and what is there is of today's code."""

import json
import subprocess
import sys
from dataclasses import fields

from settings import Config
from warm import ROOT

FILES = (
    "config.json metrics.jsonl evals.jsonl summary.json report.md report.html curves.png".split()
)


def test_one_command_makes_it(tmp_path):
    """Small, and without the notebook, which `make test-all` executes."""
    flags = "--difficulty 2 --updates 1 --eval-n 2 --sft-steps 1 --max-tokens 24 --threads 1"
    folder = tmp_path / "shown"
    words = [f"PY={sys.executable}", f"RUNS={tmp_path}", f"SHOWCASE={folder}", "NOTEBOOK="]
    command = ["make", "showcase", "-o", ".venv-all/installed", *words, f"FLAGS={flags}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(file.name for file in folder.iterdir()) == sorted(FILES)
    assert "answers at once" in (folder / "report.html").read_text()


def test_what_is_there_has_todays_flags_and_the_habits():
    folder = ROOT / "results" / "showcase"
    assert sorted(file.name for file in folder.iterdir()) == sorted(FILES)
    config = json.loads((folder / "config.json").read_text())
    assert config.keys() <= {field.name for field in fields(Config)}
    assert "spells it out" in (folder / "report.html").read_text()
