"""The tables of README.md and docs/, made from results/*.json, so that the pages cannot drift.

    python -m lab.tables            # make every table again, in place, between its markers
    python -m lab.tables --check    # change nothing; say what does not agree

A page holds `<!-- table: NAME -->`, the table, `<!-- end -->`; the function NAME below makes it.
results/TABLE.json has one entry per arm and seed, with one digit or number per task, so that every
interval can be computed again. An interval in a page's prose must stand in one of these tables, on
any page: `wrong` names those that do not. tests/test_tables.py runs the check.
"""

import json
import re
import sys
from pathlib import Path

import metrics
from bookkeeping import cures, logs

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)
INTERVAL = re.compile(
    r"[-+]?\d[\d,]*(?:\.\d+)?%?(?: points| s)? \[[-+]?[\d.,]*\d%?, [-+]?[\d.,]*\d%?\]"
)


def read(name: str):
    """results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf8"))


def table(head: str, body: list[list]) -> str:
    """Markdown. head: the titles of the columns, with " | " between them."""
    lines = [head, " | ".join(["---"] * len(head.split(" | ")))]
    lines += [" | ".join(map(str, row)) for row in body]
    return "".join(f"| {line} |\n" for line in lines)


# ------------------------------------------------------------------------------- letters


# ------------------------------------------------------------------------------- alphabet


# ------------------------------------------------------------------------------- swarm, governance


# ------------------------------------------------------------------------------- hardware


# ------------------------------------------------------------------------------- trust


def trust() -> str:
    """What was tried, how often it happened, and Wilson's interval of that share."""
    rows = []
    for arm in read("trust")["arms"].values():
        share = metrics.proportion(arm["hits"], arm["n"]).percent()
        rows.append([arm["what"], f"{arm['hits']:,} of {arm['n']:,}", share])
    return table("what was tried | how many | share", rows)


def doctor() -> str:
    """What the doctor finds in others' logs, why, and the one thing to set first with TRL."""
    logged = {mine for names in logs.NAMES.values() for mine in names.values()}
    rows, seen = [], {}
    for name, illness in cures.ILLNESSES.items():
        if not logged.issuperset(illness.columns[:1]):
            continue  # only our own runs log what it looks at
        cure = illness.cures[logs.TRL]
        first = seen.setdefault(cure, name)
        rows.append([name, illness.causes[0], cure if first == name else f"as *{first}*"])
    return table("found | most often because | set, with TRL", rows)


TABLES = {"trust": trust, "doctor": doctor}


# ------------------------------------------------------------------------------- pages
def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def remake(text: str) -> str:
    """The page with each of its tables made again."""
    return MARK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def plain(text: str) -> str:
    """Without what bold type and units add to a number."""
    return re.sub(r"[*+%]| points", "", text)


def wrong(texts: dict[str, str]) -> list[str]:
    """Intervals in the prose of these pages ({name: text}) that stand in no table, a line each."""
    made = plain("".join(found[0] for text in texts.values() for found in MARK.finditer(text)))
    out = []
    for name, text in texts.items():
        prose = re.sub(r"```.*?```|`[^`]*`", "", MARK.sub("", text), flags=re.S)
        missing = [i for i in INTERVAL.findall(prose) if plain(i) not in made]
        out += [f"{name}: {interval} stands in no table" for interval in missing]
    return out


def main() -> None:
    check = sys.argv[1:] == ["--check"]
    texts, problems = {}, []
    for page in pages():
        text = page.read_text(encoding="utf8")
        texts[page.name] = again = remake(text)
        if check and again != text:
            problems.append(f"{page.name}: not what results/ gives; run python -m lab.tables")
        elif again != text:
            page.write_text(again, encoding="utf8")
    problems += wrong(texts)
    print("\n".join(problems) or "every table and every interval is that of results/")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
