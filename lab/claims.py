"""Sixteen lessons of the documents that this project grew out of, tested again.

    python -m lab.claims                    # every claim with its verdict
    python -m lab.claims thinking           # one: its source, its numbers, the commands of its runs

A claim is data, in lab/claims.toml: its sentence, its source, how we read it, the arms that test it
(flags of train.py), and its checks: each is one number with a prediction. results/claims.json has
that number for every seed, or for every unit that scripts played (a scenario, or a seed of a
simulation). Everything else is computed here: intervals, verdicts, and the tables of docs/trust.md.
docs/trust.md (Older evidence) says what made the numbers from run folders.

The verdict comes from the interval of a number, never from means alone:

    holds      above (below): the whole interval lies above (below) the number. equal: it lies
               within the margin (a test of equivalence: finding no difference does not show that
               there is none)
    fails      it lies on the other side; or below the smallest difference that would matter; or,
               for equal, outside the margin
    undecided  anything else; more seeds make the interval narrower

A claim of several parts is reported part by part. There is no correction for the number of checks:
of forty false predictions, one holds by luck.
"""

import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bookkeeping.compare import by_variance, variance_of_mean
from metrics import Interval

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = tomllib.loads((ROOT / "lab/claims.toml").read_text(encoding="utf8"))
# The rule for seeds, written down before they are run: 3 seeds; then 6 and then 12 while a part
# that decides is undecided. Three looks are three chances to be wrong, so each look uses the
# interval at 98.3%: three looks at 1.7% err in 5% of the cases at most, however they depend on each
# other (Bonferroni). On made-up claims with normal noise and a truth of 0, "above 0" was said to
# hold in 2.4% of 4,000 cases, and in 5.4% with three looks at 95%
# (docs/trust.md, Older evidence). Scripts play a number of units that was fixed beforehand: one look, at
# 95%.
LOOKS = (3, 6, 12)
LEVEL = 1 - 0.05 / len(LOOKS)


@dataclass(frozen=True)
class Check:  # lab/claims.toml explains the fields
    text: str
    rows: list | dict = ()  # see interval
    expect: str = ""
    than: float = 0.0
    margin: float = 0.0
    figure: float | None = None
    most: float = 1.0
    decides: bool = True
    scale: float = 1.0
    unit: str = ""
    share: bool = False

    @property
    def of_units(self) -> bool:
        """Are these units of a script? There are dozens of them, but at most LOOKS[-1] seeds."""
        return isinstance(self.rows, dict) or len(self.rows) > LOOKS[-1]

    def interval(self, level: float = 0.95) -> Interval:
        return interval(self.rows, level, self.most, 0.0 if self.share else None)

    @property
    def verdict(self) -> str:
        """More seeds may follow, so they are judged by a wider interval than the one shown."""
        return verdict(self, self.interval(0.95 if self.of_units else LEVEL))


def checks(name: str, beside: bool = False) -> list[Check]:
    """The checks of a claim with their rows, or the numbers that were measured besides."""
    kept = json.loads((ROOT / "results/claims.json").read_text(encoding="utf8"))["claims"][name]
    if beside:
        return [Check(text, decides=False, **how) for text, how in kept["beside"].items()]
    return [Check(rows=kept["checks"][check["text"]], **check) for check in CLAIMS[name]["checks"]]


# ------------------------------------------------------------------------------- verdicts
def interval(
    rows: list | dict, level: float = 0.95, most: float = 1.0, least: float | None = None
) -> Interval:
    """The mean of two or more seeds or units, with its interval.

    rows: a number per seed; or [tasks] per seed, the same tasks for all, also written as a sign per
    task ("-0+" is [-1, 0, 1]); or {"a": …, "b": …}, two independent samples, for a minus b. most:
    how large a number can be, if all values agree; least: how small, -most if not given.

        Var = Var_seeds(differences) / S + Var_tasks(difference averaged over seeds) / T

    with Student's t and Satterthwaite's degrees of freedom (1946). Variation within a run is
    counted in both terms, which errs on the safe side.
    """
    ends = (-most if least is None else least, most)
    if isinstance(rows, dict):
        a, b = (np.asarray(rows[side], float) for side in "ab")
        parts, n = [variance_of_mean(a), variance_of_mean(b)], min(len(a), len(b))
        return by_variance(float(a.mean() - b.mean()), parts, n, ends, level)[0]
    signs = lambda row: ["-0+".index(sign) - 1.0 for sign in row]
    rows = np.array([signs(row) if isinstance(row, str) else row for row in rows], float)
    means = rows.reshape(len(rows), -1).mean(axis=1)
    parts = [variance_of_mean(means)]
    if rows.ndim > 1:
        parts.append(variance_of_mean(rows.mean(axis=0)))
    # rows.shape[-1]: if all seeds agree in all tasks, the tasks say how sure that is
    return by_variance(float(means.mean()), parts, rows.shape[-1], ends, level)[0]


def verdict(check: Check, i: Interval) -> str:
    """holds, fails or undecided; empty if nothing is predicted."""
    low, high, margin = i.low - check.than, i.high - check.than, check.margin
    if check.expect == "below":
        low, high = -high, -low
    if check.expect == "equal":
        holds, fails = -margin < low and high < margin, low > margin or high < -margin
    else:
        holds, fails = low > 0, high < max(margin, 0.0)
    result = "fails" if fails else "holds" if holds else "undecided"
    return result if check.expect else ""


def parts(name: str) -> str:
    """The verdict of a claim: '2 hold, 1 fails' if its parts differ."""
    verdicts = [check.verdict for check in checks(name) if check.decides]
    counts = [(verdicts.count(v), v) for v in ("holds", "fails", "undecided") if v in verdicts]
    several = ", ".join(f"{n} {v if n == 1 else v.removesuffix('s')}" for n, v in counts)
    return several if len(counts) > 1 else verdicts[0]


# ------------------------------------------------------------------------------- words
def digits(x: float, check: Check) -> int:
    """One digit for points, percent and large numbers, else three."""
    return 1 if check.scale == 100 or abs(x) >= 10 else 3


def number(x: float, check: Check) -> str:
    return f"{check.scale * x:.{digits(x, check)}f}"


def measured(check: Check) -> str:
    """'+12.5 points [+3.0, +22.0]': a difference is written with its sign.

    A share is at most 1, and a difference of two shares at most 100 points. Student's t does not
    know that, so the interval ends there.
    """
    i = check.interval()
    i = i.within(0.0, 1.0) if check.share else i
    i = i.within(-1.0, 1.0) if check.unit == " points" else i
    sign = "+" if " minus " in check.text or "gain" in check.text else ""
    return i.text(digits(i.mean, check), check.scale, check.unit, sign)


def predicted(check: Check) -> str:
    than, margin = number(check.than, check), number(check.margin, check)
    if check.expect == "equal":
        return f"equal to {than} within {margin}"
    least = f"; {margin} would matter" if check.margin else ""
    return f"{check.expect} {than}{least}" if check.expect else "(measured)"


def many(check: Check) -> str:
    """'3 seeds', or '200 units' of a script."""
    n = min(map(len, check.rows.values())) if isinstance(check.rows, dict) else len(check.rows)
    return f"{n} {'units' if check.of_units else 'seeds'}"


def row(check: Check) -> list[str]:
    """A check in five columns."""
    return [check.text, predicted(check), measured(check), many(check), check.verdict]


def main(name: str = "") -> None:
    if name not in CLAIMS:
        for each, claim in CLAIMS.items():
            print(f"{each:15} {parts(each)}: {claim['sentence']}")
        sys.exit(bool(name))  # 1 if there is no such claim
    claim = CLAIMS[name]
    print(f"{claim['sentence']}\n\nSource: {claim['source']}.\nAs tested: {claim['reading']}")
    print(f"{claim.get('ours', '')}\n")
    print("results/claims.json (* decides): number | predicted | measured | n | verdict")
    for check in checks(name) + checks(name, beside=True):
        figure = "" if check.figure is None else f"the document: {number(check.figure, check)}"
        columns = " | ".join([*row(check), figure])
        print(f"  {'*' if check.decides else ' '} {columns}")
    runs = f"Its runs, for the seeds 0 to {LOOKS[0] - 1} (more: LOOKS in lab/claims.py):"
    print("\n" + (runs if "arms" in claim else "It has no runs: scripts played it."))
    for arm, flags in claim.get("arms", {}).items():
        print(f"  python train.py {claim['flags']} {flags} --name {name}-{arm}-SEED --seed SEED")


if __name__ == "__main__":
    main(*sys.argv[1:2])
