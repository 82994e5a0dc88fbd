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
from lab import claims
from swarm import governance

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
DECEPTIVE = ["0%", "12.5%", "25%", "37.5%", "50%", "62.5%"]  # of the eight bots
GAINS = {  # (better, worse): what the step from the second to the first is called
    ("soft", "hard"): "soft gate instead of hard",
    ("fast tier", "soft"): "fast tier on top of soft",
    ("fast + pairs", "fast tier"): "detection of pairs on top of the fast tier",
    ("fast + slow tier", "fast + pairs"): "vote on top of that",
    ("slow every epoch", "fast + slow tier"): "council every epoch instead of on a signal",
}


def governed() -> dict[str, list[dict]]:
    """{governance: [the numbers of each share, a value per seed]}"""
    arms = read("governance")["arms"]
    return {name: list(arm["shares"].values()) for name, arm in arms.items()}


def governance_welfare() -> str:
    """Per possible deal, in truth, of the last ten epochs."""
    welfare = lambda cells: [governance.words(governance.over(c["welfare"])) for c in cells]
    rows = [[name, *welfare(cells)] for name, cells in governed().items()]
    return table(" | ".join(["welfare, deceptive:", *DECEPTIVE]), rows)


def governance_gains() -> str:
    """Welfare at the same seeds: the first minus the second."""
    found, rows = governed(), []
    for (better, worse), text in GAINS.items():
        pairs = zip(found[worse], found[better])
        gains = [metrics.gain(a["welfare"], b["welfare"]) for a, b in pairs]
        rows.append([text, *(governance.words(gain) for gain in gains)])
    return table(" | ".join(["welfare gained by, deceptive:", *DECEPTIVE]), rows)


def governance_at_three() -> str:
    """All measures at 37.5% deceptive."""
    rows = []
    for name, cells in governed().items():
        cell = cells[3]
        mean = lambda key, digits, cell=cell: f"{governance.over(cell[key]).mean:.{digits}f}"
        seen = " / ".join(mean(f"toxicity_{how}", 2) for how in ("soft", "hard"))
        row = [name, governance.words(governance.over(cell["toxicity"])), seen, mean("tail", 2)]
        three = lambda key, cell=cell: governance.words(governance.over(cell[key]), 3)
        row += [three("quality_gap"), three("thrash")]
        collapsed = sum(welfare <= 0 for welfare in cell["welfare"])
        costs = [mean("audits", 1), mean("meetings", 1)]
        rows.append([*row, *costs, f"{collapsed} of {len(cell['welfare'])}"])
    return table(
        "37.5% deceptive | toxicity, in truth | as p says: soft / hard | worst 5% | "
        "quality gap, in truth | thrash | audits per epoch | meetings | collapsed",
        rows,
    )


# ------------------------------------------------------------------------------- hardware


# ------------------------------------------------------------------------------- trust
def detectors() -> str:
    """How often metrics.trend is wrong, on made-up runs whose truth is known."""
    rows = []
    for what, wrong, runs in read("metrics")["settled_too_soon"]:
        rows.append([what, metrics.proportion(wrong, runs).percent(), f"{runs:,}"])
    return table('the reward | said "settled", and it moved by 0.05 | made-up runs', rows)


def lessons() -> str:
    """The claims, each with the verdicts of its parts; those that hold whole come first."""
    rows = []
    for claim in claims.CLAIMS:
        ours = " *Under rules of our own.*" if claim.ours else ""
        rows.append([f"**{claims.parts(claim)}**", claim.sentence + ours])
    rows.sort(key=lambda row: 0 if row[0] == "**holds**" else 1 if "fail" in row[0] else 2)
    return table("verdict | lesson", rows)


def claim_numbers() -> str:
    """What decides each claim, and what a page cites beside it."""
    rows = []
    for claim in claims.CLAIMS:
        for check, numbers, said in claims.judge(claim, claims.kept(claim)):
            row = [claims.predicted(check), claims.measured(check, numbers), claims.many(numbers)]
            rows.append([claim.name, check.text, *row, f"**{said}**" if said else ""])
    return table("claim | number | predicted | measured | n | verdict", rows)


TABLES = {
    "governance_welfare": governance_welfare,
    "governance_gains": governance_gains,
    "governance_at_three": governance_at_three,
    "detectors": detectors,
    "lessons": lessons,
    "claim_numbers": claim_numbers,
}


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
