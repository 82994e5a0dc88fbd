"""results/trust/mutate.md: how many mistakes the tests caught, which survived, and why some change nothing.

What lab/trust/mutate.py tried stands in results/trust/mutate.jsonl, one line a mistake; the reasons
are in lab/trust/equivalent.toml, by hand.
"""

import json
import tomllib
from collections import Counter
from pathlib import Path

from lab.common import table
from lab.trust.marks import FILES, ROOT
from metrics import proportion

EQUIVALENT = ROOT / "lab" / "trust" / "equivalent.toml"
SAMPLES = {  # by seed: its flags, and how the page's number came about
    0: ("", "First pass: 60 seconds of tests or fewer for each, of those that run its line. Those that "
        "nobody noticed were then looked at one by one and tried again, against the tests that are "
        "most likely to notice. If none did, a test was written for what they break. So this is the "
        "share of a sample that the tests were improved on: a fresh one must be expected to do worse."),
    1: (" --n 60 --least 1", "A fresh sample, drawn when all those tests stood: no test had been written for "
        "any of it, and what stood in the first sample is left out. Each was tried against the tests "
        "that bear the file's name or a neighbour's, 60 seconds at most, and if nobody noticed, "
        "against more of them. So a mistake may count as survived that another test would catch."),
}  # fmt: skip


def key(result: dict) -> tuple[str, str, str, str]:
    return result["file"], result["where"], result["before"], result["after"]


def read_results(file: Path) -> dict[tuple, dict]:
    """The last result of each mistake; `again` if it is not the first."""
    found = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        result = {"seed": 0} | json.loads(line)
        if key(result) in found:
            result["again"] = True
        found[key(result)] = result
    return found


def reasons(file: Path = EQUIVALENT) -> dict[tuple[str, str, str, str], str]:
    """{(file, function, line before, line after): why nobody could notice}"""
    listed = tomllib.loads(file.read_text())["equivalent"] if file.exists() else []
    return {key(e): e["why"] for e in listed}


def count_of(results: list[dict], why: dict, seed: int) -> list[str]:
    """What the page says first of a sample."""
    some = [r for r in results if r["seed"] == seed]
    counted = [r for r in some if not changes_nothing(r, why)]
    since, caught = [r for r in counted if is_caught(r, since=True)], [r for r in counted if is_caught(r)]
    how = Counter(r["how"] for r in caught)
    again = sum(r.get("again", False) and not r.get("written") for r in counted)
    flags, told = SAMPLES.get(seed, ("", ""))
    command = f"`python -m lab.trust.mutate --seed {seed}{flags}`"
    lines = [
        f"{command}: {len(some)} mistakes, of which {len(some) - len(counted)} change nothing that "
        f"anybody could see. **Of the other {len(counted)}, {len(caught)} were caught: "
        f"{proportion(len(caught), len(counted)).percent()}** (Wilson's 95% interval): a test failed "
        f"({how['failed']}), did not end ({how['endless']}), or pytest ended with it ({how['ended']})."
    ]  # fmt: skip
    if again:
        lines[0] += f" {again} were tried more than once."
    if since:
        lines[0] += f" Tests that were written since, for what they break, catch {len(since)} more."
    return [*lines, "", told, ""]


def is_caught(r: dict, since: bool = False) -> bool:
    """since: by a test that was written for it."""
    return r["how"] != "survived" and r.get("written", False) == since


def changes_nothing(r: dict, why: dict) -> bool:
    return key(r) in why and r["how"] == "survived"


def page(results: list[dict], why: dict) -> list[str]:
    equivalent = [r for r in results if changes_nothing(r, why)]
    counted = [r for r in results if not changes_nothing(r, why)]
    left = [r for r in counted if r["how"] == "survived"]

    def row(name: str, some: list[dict]) -> list:
        caught = sum(map(is_caught, some))
        share = proportion(caught, len(some)).percent() if some else "–"
        return [name, len(some), caught, len(some) - caught, share]

    files = [file for file in FILES if any(r["file"] == file for r in counted)]
    rules = sorted({r["rule"] for r in counted})
    lines = [
        "# Would the tests notice a mistake?", "",
        "Small mistakes, made by rule and one at a time (lab/trust/mistakes.py), each tried against "
        "tests that may notice it. They are drawn per file and per rule, so a share is that of its "
        "sample, not of all mistakes that people make.", "",
        *[line for seed in sorted({r["seed"] for r in results}) for line in count_of(results, why, seed)],
        "Every test that caught something passes without a mistake, run in the same way. Not tried: "
        "fast/vllm_engine.py, whose tests need vLLM; demos, f-strings, what is printed; and what "
        "deletes files or ends processes.",
        "", "## By file", "", "Both samples together, without the tests that were written for survivors of the second.", "",
        *table("| file | mistakes | caught | survived | share caught |",
               [row(file, [r for r in counted if r["file"] == file]) for file in files]),
        "", "## By rule", "",
        *table("| rule | mistakes | caught | survived | share caught |",
               [row(rule, [r for r in counted if r["rule"] == rule]) for rule in rules]),
    ]  # fmt: skip
    lines += ["", "## Survivors", ""] if left else []
    for r in left:
        budget = f"; {r['left_out']} more beyond the budget" if r.get("left_out") else ""
        given = f", those of {', '.join(r['given'])}" if r.get("given") else ""
        lines += told(r, f"{r['asked']} tests passed{given}{budget}")
    since = [r for r in counted if is_caught(r, since=True)]
    lines += ["", "## Survivors for which a test was written", ""] if since else []
    for r in since:
        lines += told(r, f"caught by {r['by']}")
    lines += ["", "## Nobody could notice", ""] if equivalent else []
    for r in equivalent:
        lines += told(r, why[key(r)])
    return lines


def told(r: dict, why: str) -> list[str]:
    place = f"{r['file']}, {r['where']}" if r["where"] else r["file"]
    head = f"{place} ({r['rule']}): {why}"
    return [head, "", "```diff", f"- {r['before']}", f"+ {r['after']}", "```", ""]
