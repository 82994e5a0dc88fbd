"""Protects docs/first_run.ipynb as it is committed: its outputs are of one execution in which no
cell failed, and nothing in it names a machine. `make test-all` executes it.
"""

import json
import os
import platform
import re

from warm import ROOT

PAGE = json.loads((ROOT / "docs" / "first_run.ipynb").read_text())
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


def test_colab_and_kaggle_are_given_the_same_address_everywhere():
    """The first cell's links, what the notebook clones, and the page that explains it."""
    first = "".join(PAGE["cells"][0]["source"])
    clones = "".join(CODE[0]["source"])
    tools = (ROOT / "docs" / "tools.md").read_text()
    (repository,) = re.findall(r"https://github\.com/([\w-]+/picoswarm)\"", clones)
    notebook = f"{repository}/blob/main/docs/first_run.ipynb"
    assert (ROOT / notebook.partition("/blob/main/")[2]).exists() and repository in tools
    assert f"(https://colab.research.google.com/github/{notebook})" in first
    assert f"(https://kaggle.com/kernels/welcome?src=https://github.com/{notebook})" in first
