"""Protects docs/first_run.ipynb as it is committed: its outputs are of one execution in which no
cell failed, and nothing in it names a machine. `make test-all` executes it.
"""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[1] / "docs"
PAGE = json.loads((HOME / "first_run.ipynb").read_text())
CODE = [cell for cell in PAGE["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict) -> str:
    return "".join(
        "".join(output.get("text", "")) + "".join(output.get("data", {}).get("text/plain", ""))
        for output in cell["outputs"]
    )


def test_it_was_executed_once_from_top_to_bottom_and_no_cell_failed():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    assert not [
        output
        for cell in CODE
        for output in cell["outputs"]
        if output["output_type"] == "error" or output.get("name") == "stderr"
    ]
    first, second = (
        printed(cell) for cell in CODE if '\ntrain("' in "\n" + "".join(cell["source"])
    )
    assert "trained on: tier 6" in first and "Short" in second


def test_nothing_in_it_names_a_machine():
    words = " ".join(map(printed, CODE))
    assert not re.search(
        r"(?<![\w.])/(?:home|root|tmp|Users|work|opt|var|usr)/|[A-Z]:\\|site-packages", words
    )
    assert (
        not re.search(rf"\b{re.escape(platform.node())}\b", words)
        and os.path.expanduser("~") not in words
    )


def test_its_links_lead_to_files():
    prose = "".join(
        "".join(cell["source"]) for cell in PAGE["cells"] if cell["cell_type"] == "markdown"
    )
    links = re.findall(r"\]\(([^)]+)\)", prose)
    assert links and all((HOME / link).exists() for link in links)


def test_the_first_code_cells_clone_outside_a_checkout_and_do_nothing_inside(tmp_path):
    """A copy of two commits' worth of files is enough to be a repository."""
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "pico.py").write_text("")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", origin]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    cells = ["".join(cell["source"]) for cell in CODE[:2]]
    run = lambda code, cwd: subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    asked = run("\n".join(cells), elsewhere)
    assert asked.returncode and "fill in REPOSITORY" in asked.stderr
    address = re.sub('REPOSITORY = ""', f"REPOSITORY = {str(origin)!r}", cells[0])
    for cwd, code in ((elsewhere, address), (origin, cells[0])):
        done = run(f"{code}\n{cells[1]}", cwd)
        assert done.returncode == 0 and done.stdout == "the book: pico.py\n", done.stderr
    assert (elsewhere / "picoswarm" / "pico.py").exists() and not (origin / "picoswarm").exists()
