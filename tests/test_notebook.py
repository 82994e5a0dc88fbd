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
