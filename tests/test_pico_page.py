"""Protects docs/pico.md, which is kept by hand: its code is pico.py, line for line."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, CODE = (ROOT / "docs" / "pico.md").read_text(), (ROOT / "pico.py").read_text()


def test_the_page_is_the_file():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert lines == [line for line in CODE.splitlines() if line]
