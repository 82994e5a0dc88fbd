"""docs/pico.md is pico.py, line for line, and what `python -m lab.pages.pico` makes.

Numbers are not compared where they come from floats: another machine may differ in the last digits,
and so in a token that it samples. What plain Python makes is compared to the letter.
"""

import re

import pytest

from lab.pages import pico

TEXT = pico.PAGE.read_text()
PLAIN = ("pico.py, with its numbers", "Task", "Tokens")  # sections where no float decides anything
SAMPLED = ("Advantage and loss", "Loop")  # here the lengths of replies are in the shapes


@pytest.fixture(scope="module")
def again() -> str:
    return pico.page()


def sections(text: str) -> dict[str, str]:
    """{heading: its section}. A comment in code is no heading: no empty line follows it."""
    parts = re.split(r"(?m)^(?=##? [A-Zp].*\n\n)", text)
    return {part.partition("\n")[0].lstrip("# "): part for part in parts if part}


def form(text: str, lengths: bool) -> list:
    """Of a section: prose and code as they are; of what is shown (title, line, name, shape).

    Without lengths, [393, 1024] is [_, _]: how long a reply is depends on what is sampled.
    """
    out = []
    for i, part in enumerate(re.split(r"(?m)^```\n(── .*\n[^`]*)^```\n", text)):
        if i % 2 == 0:
            out.append(part)
            continue
        title, *lines = part.splitlines()
        column = re.match(r"( *\d+  )?", lines[0]).end()  # where names begin
        for line in lines:
            if line[column] != " ":  # else it goes on with a long value
                row = re.match(r"(\S+(?: \S+)*)(?: +(\[[\d, ]+\](?: [a-z]+\d*)?))?", line[column:])
                name, shape = row.groups(default="")
                shape = shape if lengths else re.sub(r"\b\d+\b", "_", shape)
                out.append((title, line[:column].strip(), name, shape))
    return out


def test_the_page_is_the_file():
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert lines == [line for line in pico.FILE.read_text().splitlines() if line]


def test_each_section_links_the_files_of_the_book_that_its_comment_names():
    named = re.findall(r"(?m)^# -{9,} .*\(book: (.*)\)$", pico.FILE.read_text())
    parts = list(sections(TEXT).values())[1:]
    assert len(named) == len(parts) == 6
    for names, part in zip(named, parts):
        for file in re.findall(r"[\w/]+\.py", names):
            assert f"[{file}](../{file})" in part.split("```")[0]


def test_the_command_makes_the_page(again):
    then, now = sections(TEXT), sections(again)
    assert then.keys() == now.keys() > {*PLAIN, *SAMPLED}
    for heading in then:
        if heading in PLAIN:
            assert now[heading] == then[heading]
            continue
        old, new = (form(text[heading], heading not in SAMPLED) for text in (then, now))
        assert new == old and len(old) > 10, heading


def test_a_row_shows_what_its_line_has_made(again):
    """And not what was there before: two prompts, one shorter by four; then each four times."""
    assert re.search(r"^\d+  pad +\[2\] int64 +4 0$", again, re.M)
    assert re.search(r"^\d+  pad +\[8\] int64 +4 4 4 4 0 0 0 0$", again, re.M)


def test_a_line_of_pico_that_changes_is_missed(monkeypatch, tmp_path):
    line, text = "    rng = random.Random(seed)\n", pico.FILE.read_text()
    monkeypatch.setattr(pico, "FILE", tmp_path / "pico.py")
    for now, times in (("", 0), (line * 2, 2)):
        pico.FILE.write_text(text.replace(line, now, 1))
        with pytest.raises(SystemExit, match=f"has {times} lines with 'rng = random.Random"):
            pico.parse(pico.STORY)


def test_it_reads_well():
    """No line is wide or ends in a space, and the page does not grow without end."""
    lines = TEXT.splitlines()
    assert max(map(len, lines)) <= 100 and not [line for line in lines if line != line.rstrip()]
    assert len(lines) <= 700 and TEXT.count("```") % 2 == 0 and "\n\n\n```" not in TEXT
