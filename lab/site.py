"""The docs as a site with a search, in site/: every page and every file of the repository.

    make docs                       # or, with requirements/all.txt: python -m lab.site

The generator is zensical; its configuration, docs/zensical.toml, has the reading order. On GitHub
the pages link to each other and to code by relative paths. Here they are laid out in the same
folders, so the same links work, and a link to a code file leads to a page that shows it with line
numbers. A dead link in a Markdown page fails the build;
tests/entrance/test_site.py checks the links of the built site.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = {".py": "python", ".toml": "toml", ".txt": "text", "": "make"}
LINK = re.compile(r'(\]\(|href=")([^)\s"#]+)(#[^)\s"]*)?(?=[)"])')  # of Markdown, of HTML
FENCE = re.compile(r"(^```.*?^```[ \t]*$|`[^`\n]+`)", re.S | re.M)
LIST = re.compile(r"(?m)^(?![*|>#\s-]|\d+\. )(.+)\n(?=(?:[*-]|\d+\.) )")  # right below a paragraph


def page_of(file: str) -> str:
    """Where a file is laid out: train.py becomes train.py.md."""
    if file.endswith(".ipynb"):
        return file.removesuffix(".ipynb") + ".md"
    return f"{file}.md" if Path(file).suffix in CODE else file


def built(file: str) -> str:
    """Where the site has a file: README.md is the index.html of its folder."""
    return re.sub(r"README\.md$", "index.md", page_of(file)).replace(".md", ".html")


def linked(file: str, text: str, files: set[str]) -> str:
    """The text, with its links to other files changed to those of the site."""

    def link(match: re.Match) -> str:
        goal = os.path.normpath(os.path.join(os.path.dirname(file), match[2]))
        if goal not in files:
            return match[0]
        place = built(goal) if file.endswith(".html") else page_of(goal)
        return match[1] + os.path.relpath(place, os.path.dirname(file) or ".") + (match[3] or "")

    return LINK.sub(link, text)


def lay_out(file: str, files: set[str], folder: Path) -> None:
    """Write one of the files into `folder`."""
    place = folder / page_of(file)
    place.parent.mkdir(parents=True, exist_ok=True)
    if file.endswith(".ipynb"):
        flags = ["--log-level", "ERROR", "--to", "markdown", "--output-dir", place.parent]
        subprocess.run([sys.executable, "-m", "nbconvert", *flags, ROOT / file], check=True)
    elif place.name == Path(file).name:
        shutil.copy(ROOT / file, place)
    else:
        kind, code = CODE[Path(file).suffix], (ROOT / file).read_text()
        place.write_text(f'# {file}\n\n~~~~{kind} linenums="1"\n{code.rstrip()}\n~~~~\n')
    if place.suffix == ".html":
        place.write_text(linked(file, place.read_text(), files))
    if Path(file).suffix in (".md", ".ipynb"):
        parts = FENCE.split(place.read_text())  # code is every second one
        parts[::2] = [LIST.sub(r"\1\n\n", linked(file, part, files)) for part in parts[::2]]
        place.write_text("".join(parts))


def main(into: Path = ROOT / "site") -> None:
    """Build the site; whatever was in the folder is removed."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    files = {file for file in listed.splitlines() if (ROOT / file).is_file()}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for file in files:
            lay_out(file, files, work / "pages")
        shutil.copy(ROOT / "docs" / "zensical.toml", work)
        build = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        subprocess.run(build, cwd=work, check=True)  # it prints what is wrong
        shutil.rmtree(into, ignore_errors=True)
        shutil.copytree(work / "site", into)


if __name__ == "__main__":
    main()
