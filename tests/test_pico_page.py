"""Protects docs/pico.md, which is kept by hand: its code is pico.py, line for line, and its
sections link the files that pico.py names."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, CODE = (ROOT / "docs" / "pico.md").read_text(), (ROOT / "pico.py").read_text()


def test_the_page_is_the_file():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert lines == [line for line in CODE.splitlines() if line]


def test_each_section_links_the_files_of_the_book_that_its_comment_names():
    named = re.findall(r"(?m)^# -{9,} .*\(book: (.*)\)$", CODE)
    # a comment in code has no empty line behind it
    parts = re.split(r"(?m)^(?=## .*\n\n)", PAGE)[1:]
    assert len(named) == len(parts) == 6
    for names, part in zip(named, parts):
        for file in re.findall(r"[\w/]+\.py", names):
            assert f"[{file}](../{file})" in part.split("```")[0]
