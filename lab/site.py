"""The docs as a site with a search: README.md, docs/ and what they link to, into site/.

    make docs                       # or, with requirements/entrance.txt: python -m lab.site
    python -m lab.site --into DIR   # what was in it goes

The generator is zensical, its configuration docs/zensical.toml. On GitHub the pages link to each
other and to code by relative paths. Here they are laid out in the same folders, so the same links
hold, and a link to a file of code, or to a line of it, leads to a page that shows it with line
numbers. The reading order is that of the tables in docs/README.md and README.md. A dead link in a
page of Markdown fails the build; tests/entrance/test_site.py reads the links of what was built.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
CODE = {".py": "python", ".toml": "toml", ".txt": "text", "": "make"}
LINK = re.compile(r'(\]\(|href=")([^)\s"#]+)(#[^)\s"]*)?(?=[)"])')  # of Markdown, of HTML
FENCE = re.compile(r"(^```.*?^```[ \t]*$|`[^`\n]+`)", re.S | re.M)
LIST = re.compile(r"(?m)^(?![*|>#\s-]|\d+\. )(.+)\n(?=(?:[*-]|\d+\.) )")  # right below a paragraph


def page_of(file: str) -> str:
    """Where a file is laid out: train.py as train.py.md."""
    if file.endswith(".ipynb"):
        return file.removesuffix(".ipynb") + ".md"
    return f"{file}.md" if Path(file).suffix in CODE else file


def built(file: str) -> str:
    """Where the site has it: README.md is the index.html of its folder."""
    return re.sub(r"README\.md$", "index.md", page_of(file)).replace(".md", ".html")


def linked(file: str, text: str, files: set[str], found: list[str]) -> str:
    """The text with its links as the site has them; where they lead is appended to `found`."""

    def link(match: re.Match) -> str:
        goal = os.path.normpath(os.path.join(os.path.dirname(file), match[2]))
        goal = f"{goal}/README.md" if f"{goal}/README.md" in files else goal
        if goal not in files:
            return match[0]
        found.append(goal)
        place = built(goal) if file.endswith(".html") else page_of(goal)
        line = re.sub(r"^#L(?=\d)", "#__codelineno-0-", match[3] or "")
        return match[1] + os.path.relpath(place, os.path.dirname(file) or ".") + line

    return LINK.sub(link, text)


def lay_out(folder: Path) -> list[str]:
    """Every file that is reached from README.md and the chapters, into `folder`; their names."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    files, done = set(listed.splitlines()), []
    waiting = ["docs/zensical.css", *(file for _, file in chapters())]
    waiting += [file for file in files if file.startswith("docs/live/")]
    while waiting:
        file = waiting.pop()
        place, found = folder / page_of(file), []
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.endswith(".ipynb"):
            convert = [sys.executable, "-m", "nbconvert", "--log-level", "ERROR"]
            convert += ["--to", "markdown", ROOT / file, "--output-dir", place.parent]
            subprocess.run(convert, check=True)
        elif place.name == Path(file).name:
            shutil.copy(ROOT / file, place)
        else:
            kind, code = CODE[Path(file).suffix], (ROOT / file).read_text()
            place.write_text(f'# {file}\n\n~~~~{kind} linenums="1"\n{code.rstrip()}\n~~~~\n')
        if place.suffix == ".html":
            place.write_text(linked(file, place.read_text(), files, found))
        if Path(file).suffix in (".md", ".ipynb"):
            parts = FENCE.split(place.read_text())  # code is every second one
            parts[::2] = [LIST.sub(r"\1\n\n", linked(file, p, files, found)) for p in parts[::2]]
            place.write_text("".join(parts))
        done.append(file)
        waiting += set(found) - {*done, *waiting}
    return done


def chapters() -> list[tuple[str, str]]:
    """(title, file) in reading order: the tables of docs/README.md, then that of README.md."""
    docs = re.findall(r"(?m)^\| \[(.+?)\]\((.+?)\) \|", (ROOT / "docs/README.md").read_text())
    book = re.findall(r"(?m)^\| (?:\*\*)?`(\w+\.py)`", (ROOT / "README.md").read_text())
    pages = [(title, os.path.normpath(f"docs/{link}")) for title, link in docs]
    return [("Start", "README.md"), *pages, *zip(book, book), ("every file", "docs/README.md")]


def main(into: Path = ROOT / "site") -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        lay_out(work / "pages")
        nav = ", ".join(f'{{ "{title}" = "{page_of(file)}" }}' for title, file in chapters())
        config = (ROOT / "docs" / "zensical.toml").read_text().replace("nav = []", f"nav = [{nav}]")
        (work / "zensical.toml").write_text(config)
        build = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        subprocess.run(build, cwd=work, check=True)  # it says what is wrong
        shutil.rmtree(into, ignore_errors=True)
        shutil.copytree(work / "site", into)


if __name__ == "__main__":
    tyro.cli(main)
