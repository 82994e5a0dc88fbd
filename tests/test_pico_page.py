"""Protects docs/pico.md, which is kept by hand: its code is pico.py, line for line."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, CODE = (ROOT / "docs" / "pico.md").read_text(), (ROOT / "pico.py").read_text()


def test_the_page_is_the_file():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert lines == [line for line in CODE.splitlines() if line]


def test_its_line_numbers_are_those_of_the_file():
    lines = CODE.splitlines()
    for first, last, rows in re.findall(r"^── lines (\d+) to (\d+).*\n([^`]*)", PAGE, re.M):
        numbers = [int(n) for n in re.findall(r"^(\d+)  ", rows, re.M)]
        assert all(int(first) <= number <= int(last) for number in numbers)
        for number, name in re.findall(r"^(\d+)  (\w+)(?= {2,}\[)", rows, re.M):
            assert re.search(rf"\b{name}\b|return ", lines[int(number) - 1])
