"""Protects docs/first_run.ipynb: every cell runs on a CPU, in order, and shows what the prose says it shows."""

import json

import pytest

from lab.pages import notebook

pytest.importorskip("nbclient", reason="nbclient is not installed here; `make test-all` installs it into a venv of its own")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the checkout in which the notebook has been executed; a cell that fails raises here."""
    place = notebook.copy_of_checkout(tmp_path_factory.mktemp("copy"))
    page = notebook.execute(place)
    (place / "executed.json").write_text(json.dumps(page))
    return place


def shares(folder, name: str) -> list[dict[str, float]]:
    """Of each evaluation from the end of SFT on: the means."""
    lines = map(json.loads, (folder / "runs" / name / "evals.jsonl").read_text().splitlines())
    mean = lambda values: sum(values) / len(values)
    return [{name: mean(line[name]) for name in ("reward", "exact", "reply_tokens")} for line in lines if line["update"] >= 0]


def test_every_code_cell_was_executed_in_order(folder):
    cells = [cell for cell in json.loads((folder / "executed.json").read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"]) == 2


def test_the_first_run_learns_to_count(folder):
    start, *_, end = shares(folder, "notebook-first")
    assert start["exact"] < 0.4 and end["exact"] > 0.8


def test_the_second_run_learns_what_it_is_paid_for(folder):
    start, *_, end = shares(folder, "notebook-short")
    assert end["reward"] > start["reward"] + 0.4 and end["exact"] < start["exact"] and end["reply_tokens"] < start["reply_tokens"] / 1.5
