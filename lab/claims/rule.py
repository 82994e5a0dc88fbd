"""How often is the ledger's rule for seeds wrong, and what does it cost? Made-up claims whose truth is known, into results/claims/rule.md.

python -m lab.claims.rule    # a minute

The rule (lab/claims/ledger.py): look at 3 seeds; at 6 and at 12 while the verdict is undecided; each look asks for the interval at 98.3%.
Beside it stands what one is tempted to do: look as often, at 95% each time. A seed's number is the truth and noise of deviation 1 (normal,
or of heavier tails: Student's t with 3 degrees of freedom, scaled to the same deviation). Wrong: "above 0" is said to hold where the truth
is 0, or "equal within the margin" where the truth is the margin itself: the worst cases.
"""

import numpy as np
import tyro

import metrics
from lab.claims import ledger
from lab.common import RESULTS, table, write_page

TRUTHS = (0.0, 0.5, 1.0, 2.0, 4.0)  # in deviations of a seed
NOISE = {
    "normal": lambda rng, n: rng.normal(size=n),
    "heavy tails": lambda rng, n: rng.standard_t(3, size=n) / np.sqrt(3),
}


def decide(values: np.ndarray, expect: str, margin: float, level: float) -> tuple[str, int]:
    """(the verdict, after how many seeds) when one looks at values [LOOKS[-1]] as the rule does."""
    for look in ledger.LOOKS:
        said = ledger.verdict(expect, ledger.interval(list(values[:look]), level), 0.0, margin)
        if said != "undecided":
            break
    return said, look


def share(truth: float, noise: str, level: float, times: int, expect="above", margin=0.0) -> tuple[metrics.Interval, float]:
    """(how often "holds" is said, how many seeds it takes on average)"""
    rng = np.random.default_rng(7)
    found = [decide(truth + NOISE[noise](rng, ledger.LOOKS[-1]), expect, margin, level) for _ in range(times)]
    return metrics.proportion(sum(said == "holds" for said, _ in found), times), float(np.mean([seeds for _, seeds in found]))


def main(times: int = 4000) -> None:
    """times: made-up claims for each number."""
    rows = []
    for noise in NOISE:
        for expect, truth, margin in [("above", truth, 0.0) for truth in TRUTHS] + [("equal", 4.0, 4.0), ("equal", 0.0, 4.0)]:
            what = f"{expect} 0" if expect == "above" else f"{expect} to 0 within {margin:g}"
            wrong = truth == margin
            cells = []
            for level in (ledger.LEVEL, 0.95):
                said, seeds = share(truth, noise, level, times, expect, margin)
                cells += [f"**{said.percent()}**" if wrong else said.percent(), f"{seeds:.1f}"]
            rows.append([noise, what, f"{truth:g}", "no" if wrong else "yes", *cells])
    lines = [
        "# The rule for seeds, on made-up claims", "",
        f"`python -m lab.claims.rule`: {times} claims a row, seed 7. Looks at {', '.join(map(str, ledger.LOOKS))} seeds, each at "
        f"{100 * ledger.LEVEL:.1f}%; beside it the same looks at 95% each. The truth is in standard deviations between seeds. In bold: how "
        "often what is not so is said to hold. It should be 5% at most (one-sided errors: 2.5%).", "",
        *table(["noise of a seed", "claim", "truth", "is it so?", "said to hold, by the rule", "seeds", "said to hold, looking at 95%",
                "seeds"], rows), "",
    ]  # fmt: skip
    write_page(RESULTS / "claims" / "rule.md", lines)
    print(*lines[4:], sep="\n")


if __name__ == "__main__":
    tyro.cli(main)
