"""Protects docs/first_run.ipynb: every cell runs on a CPU, in order, and shows what the prose says
it shows.

The page is kept by hand. After a change of its story, `make showcase` makes its outputs again.
"""

import json
import subprocess
from pathlib import Path

import pytest

nbclient = pytest.importorskip(
    "nbclient",
    reason="nbclient is not installed here; `make test-all` installs it into a venv of its own",
)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """(a copy of what git has, the notebook executed in it); a cell that fails raises here."""
    import nbformat

    place = tmp_path_factory.mktemp("copy")
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={place}/"], cwd=ROOT, check=True)
    page = nbformat.read(place / "docs" / "first_run.ipynb", as_version=4)
    where = {"metadata": {"path": str(place / "docs")}}
    nbclient.NotebookClient(page, timeout=3600, resources=where).execute()
    return place, page


def shares(executed, name: str) -> list[dict[str, float]]:
    """Of each evaluation from the end of SFT on: the means."""
    lines = map(json.loads, (executed[0] / "runs" / name / "evals.jsonl").read_text().splitlines())
    mean = lambda values: sum(values) / len(values)
    return [
        {name: mean(line[name]) for name in ("reward", "exact", "reply_tokens")}
        for line in lines
        if line["stage"] != "before"
    ]


def test_the_first_run_learns_to_count(executed):
    start, *_, end = shares(executed, "notebook-first")
    assert start["exact"] < 0.4 and end["exact"] > 0.8


def test_the_second_run_learns_what_it_is_paid_for(executed):
    start, *_, end = shares(executed, "notebook-short")
    assert end["reward"] > start["reward"] + 0.4
    assert end["exact"] < start["exact"]
    assert end["reply_tokens"] < start["reply_tokens"] / 1.5
