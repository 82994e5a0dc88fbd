"""The docs as a site with a search: README.md, docs/ and every file that they link to, into site/ (which git ignores).

    make docs                       # or, with requirements/all.txt installed: python -m lab.pages.site
    python -m lab.pages.site --into DIR

On GitHub the pages link to each other and to code by relative paths. Here they are laid out in the same folders, so the same links hold:
what git tracks and a page links to is laid out too, and so on from there. Three things change on the way. A file of code becomes a page of
its own, `train.py` as `train.py.html`, with a line number to link to. A notebook becomes a page. A folder becomes its README, or a list of
what is in it. docs/zensical.toml is the configuration; the reading order comes from the tables of docs/README.md and README.md. `problems`
then reads the HTML that was built: a link that leads nowhere fails the build, and so does any warning of the generator.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import tyro

from lab.common import ROOT

CONFIG = ROOT / "docs" / "zensical.toml"
START = ("README.md", "docs/zensical.css")
COPIED = {".png", ".svg", ".jpg", ".html", ".js", ".css"}  # a browser shows these as they are
CODE = {".py": "python", ".toml": "toml", ".json": "json", ".jsonl": "json", ".txt": "text", "Makefile": "make"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)[ \t]*$|`[^`\n]+`)", re.S | re.M)


def tracked() -> set[str]:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {file for file in files.split("\0") if file}


def page_name(file: str) -> str:
    """The Markdown page that a file is laid out as: train.py as train.py.md."""
    return file if file.endswith(".md") else file + ".md"


def built_name(file: str) -> str:
    """Where the site has it: README.md is the index.html of its folder."""
    if Path(file).suffix in COPIED:
        return file
    name = page_name(file).removesuffix(".md")
    return re.sub(r"(^|/)README$", r"\1index", name) + ".html"


def target(page: str, link: str, files: set[str]) -> str | None:
    """The tracked file that a page links to: None for an address, an anchor of the page itself, or nothing that is tracked."""
    path = unquote(link.partition("#")[0])
    if not path or re.match(r"[a-z]+:", link):
        return None
    path = os.path.normpath(os.path.join(os.path.dirname(page), path))
    if path in files:
        return path
    if f"{path}/README.md" in files:
        return f"{path}/README.md"
    return f"{path}/" if any(file.startswith(f"{path}/") for file in files) else None


def outside_code(text: str, change) -> str:
    """change(part) for each part that is not in a fence or in backticks."""
    return "".join(part if k % 2 else change(part) for k, part in enumerate(FENCE.split(text)))


def rewritten(page: str, text: str, files: set[str], found: list[str]) -> str:
    """Markdown with its links as the site has them; the files they lead to are appended to `found`."""

    def link(match: re.Match) -> str:
        goal, (_, mark, anchor) = target(page, match[2], files), match[2].partition("#")
        if goal is None:
            return match[0]
        found.append(goal)
        if line := re.fullmatch(r"L(\d+)", anchor):
            anchor = f"__codelineno-0-{line[1]}"
        place = goal if Path(goal).suffix in COPIED else f"{goal}index.md" if goal.endswith("/") else page_name(goal)
        return match[1] + os.path.relpath(place, os.path.dirname(page) or ".") + mark + anchor + match[3]

    # GitHub begins a list right below a paragraph; here it needs an empty line.
    lists = lambda part: re.sub(r"(?m)^(?![*|>#\s-]|\d+\. )(.+)\n(?=(?:[*-]|\d+\.) )", r"\1\n\n", LINK.sub(link, part))
    return outside_code(text, lists)


def live_page(text: str, files: set[str], found: list[str], page: str) -> str:
    """An HTML page of ours, with its links to code and Markdown as the site has them."""

    def link(match: re.Match) -> str:
        goal, (_, mark, anchor) = target(page, match[1], files), match[1].partition("#")
        if goal is None or goal.endswith("/"):
            return match[0]
        found.append(goal)
        if line := re.fullmatch(r"L(\d+)", anchor):
            anchor = f"__codelineno-0-{line[1]}"
        return f'href="{os.path.relpath(built_name(goal), os.path.dirname(page))}{mark}{anchor}"'

    return re.sub(r'href="([^"]+)"', link, text)


def code_page(file: str) -> str:
    """A file of code as Markdown, with numbered lines."""
    text = (ROOT / file).read_text()
    fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", text)), default=0))
    language = CODE.get(Path(file).suffix) or CODE.get(Path(file).name, "text")
    return f'---\nhide: [toc]\n---\n# {file}\n\n{fence}{language} linenums="1"\n{text.rstrip()}\n{fence}\n'


def notebook_page(file: str, pictures: Path) -> str:
    """A notebook as Markdown: its prose, its code, what was printed, and its pictures, which are written into `pictures`."""
    parts = []
    for k, cell in enumerate(json.loads((ROOT / file).read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            printed = "".join(output.get("text", "")) or ("" if "image/png" in data else "".join(data.get("text/plain", "")))
            if printed.strip():
                parts.append(f"```text\n{printed.rstrip()}\n```")
            if "image/png" in data:
                pictures.mkdir(parents=True, exist_ok=True)
                (pictures / f"cell-{k}.png").write_bytes(base64.b64decode("".join(data["image/png"])))
                parts.append(f"![what the cell shows]({pictures.name}/cell-{k}.png)")
    return "\n\n".join(parts) + "\n"


def folder_page(folder: str, files: set[str], found: list[str]) -> str:
    """The list of what a folder has that a browser or a page can show."""
    inside = sorted(file for file in files if os.path.dirname(file) == folder.rstrip("/"))
    shown = [file for file in inside if file.endswith(".md") or Path(file).suffix in COPIED | CODE.keys()]
    found += shown
    rows = [f"* [{Path(file).name}]({file if Path(file).suffix in COPIED else page_name(file)})" for file in shown]
    return f"# {folder}\n\n" + "\n".join(rows).replace(f"]({folder}", "](") + "\n"


def lay_out(folder: Path) -> list[str]:
    """Every page that is reached from START, into `folder`; the files that were laid out."""
    files, waiting, done = tracked(), [*START, *(file for part in chapters().values() for _, file in part)], []
    while waiting:
        file = waiting.pop(0)
        if file in done:
            continue
        done.append(file)
        found: list[str] = []
        place = folder / (f"{file}index.md" if file.endswith("/") else file if Path(file).suffix in COPIED else page_name(file))
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.endswith("/"):
            place.write_text(folder_page(file, files, found))
        elif file.endswith(".md"):
            place.write_text(rewritten(file, (ROOT / file).read_text(), files, found))
        elif file == "docs/live/index.html":
            place.write_text(live_page((ROOT / file).read_text(), files, found, file))
            found += [other for other in files if other.startswith("docs/live/")]
        elif file.endswith(".ipynb"):
            text = notebook_page(file, place.with_name(Path(file).stem + "_pictures"))
            place.write_text(rewritten(file, text, files, found))
        elif Path(file).suffix in COPIED:
            shutil.copy(ROOT / file, place)
        else:
            place.write_text(code_page(file))
        waiting += found
    return done


def chapters() -> dict[str, list[tuple[str, str]]]:
    """{part: (title, file) in reading order}: the tables of docs/README.md and README.md."""
    contents = (ROOT / "docs" / "README.md").read_text()
    docs = re.findall(r"^\| \[(.+?)\]\((.+?)\) \|", contents, re.M)
    book = re.findall(r"^\| (?:\*\*)?`(\w+\.py)`", (ROOT / "README.md").read_text(), re.M)
    places = [(title, os.path.normpath(os.path.join("docs", link))) for title, link in docs]
    return {"Chapters": places, "The book": [(file, file) for file in book], "More": [("every file", "docs/README.md")]}


def nav() -> str:
    """The value of nav in the configuration."""
    entry = lambda title, file: f'{{ "{title}" = "{file if Path(file).suffix in COPIED else page_name(file)}" }}'
    parts = ['{ "Start" = "README.md" }']
    for part, places in chapters().items():
        parts.append(f'{{ "{part}" = [{", ".join(entry(title, file) for title, file in places)}] }}')
    return f"nav = [{', '.join(parts)}]"


class Links(HTMLParser):
    """What a page links to, and the places in it that can be linked to."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.places = [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name in ("id", "name") and value:
                self.places.add(value)


def problems(site: Path) -> list[str]:
    """Each link of each page that leads to no file of the site, or to a place that its page does not have."""
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            file, _, place = unquote(link).partition("#")
            goal = (path.parent / file).resolve() if file else path
            goal = goal / "index.html" if goal.is_dir() else goal
            if path.name == "404.html" and link.startswith("/"):
                goal = site / file.lstrip("/")
            if not goal.is_file():
                found.append(f"{path.relative_to(site)}: {link} leads nowhere")
            elif place and goal in pages and place not in pages[goal].places:
                found.append(f"{path.relative_to(site)}: {link}: no such place in that page")
    return found


def build(into: Path) -> None:
    """Raises SystemExit with the generator's words, or with every dead link."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        laid = lay_out(work / "pages")
        (work / "zensical.toml").write_text(re.sub(r"(?m)^nav = .*$", lambda _: nav(), CONFIG.read_text()))
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True)
        if done.returncode:
            said = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr).partition("Traceback (most recent call last)")[0]
            raise SystemExit(f"zensical build --strict says\n{said[-4000:]}")
        dead = problems(work / "site")
        if dead:
            raise SystemExit("\n".join(dead))
        shutil.rmtree(into, ignore_errors=True)
        shutil.copytree(work / "site", into)
    size = sum(path.stat().st_size for path in into.rglob("*") if path.is_file())
    print(f"{into}: {len(list(into.rglob('*.html')))} pages from {len(laid)} files, {size / 1e6:.0f} MB", file=sys.stderr)


def main(into: Path = ROOT / "site") -> None:
    """into: the folder of the site; what was in it goes."""
    try:
        import zensical  # noqa: F401
    except ImportError:
        raise SystemExit("zensical is not installed: `make docs`, or `pip install -r requirements/all.txt`") from None
    build(into)


if __name__ == "__main__":
    tyro.cli(main)
