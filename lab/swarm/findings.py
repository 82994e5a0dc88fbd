"""Which of the published swarm runs' findings come out again here? From the policies of lab/swarm/trained.py,
into results/swarm/findings.md.

    python -m lab.swarm.trained --only grpo v01      # the runs, if they are not there yet
    python -m lab.swarm.findings

The publication had one run a version, and compared 6 sampled episodes of the untrained model with 8 of the trained one. Here the base and
three policies a version, each from a seed of its own, are sampled at temperature 1 on the same held-out scenarios; within a version every
difference is paired by scenario. A finding "came out" if its 95% interval, over seeds and scenarios, lies on the side that the publication
says, "came out the other way round" if it lies on the other, and otherwise "cannot be told". Nothing in this file knows the answer
beforehand.
"""

import numpy as np

import metrics
from bookkeeping import significance
from bookkeeping.behaviour import rank_correlation
from lab.claims import interval
from lab.common import read_lines, table, write_page
from lab.swarm.trained import PRICE, STUDY, N, runs_of, scores

VERSIONS = {"v0.2": ("grpo", "medium"), "v0.1": ("v01", "medium, v0.1")}  # {version: (its policies, their world)}
Rows = dict[str, list[list[float]]]  # {measure: [seeds][N]}; the base is one policy


def verdict(interval: metrics.Interval | None, expected: int) -> str:
    """expected +1: the publication says more, -1: less, 0: no change (which can only be contradicted, or bounded)."""
    if interval is None:
        return "cannot be told"
    side = 1 if interval.low > 0 else -1 if interval.high < 0 else 0
    if expected == 0:
        return "it did change here" if side else "no change can be told here either"
    return "**came out**" if side == expected else "cannot be told" if side == 0 else "**came out the other way round**"


def change(before: Rows, after: Rows, name: str) -> metrics.Interval | None:
    """From the base to the trained policies, paired by scenario. None of what never happens."""
    if not np.any(before[name]) and not np.any(after[name]):
        return None
    return interval([np.subtract(some, before[name][0]) for some in after[name]])


def waste(rows: Rows) -> np.ndarray:
    """[seeds, N, 2]: tasks claimed and submitted."""
    return np.stack([rows["used_claim_task"], rows["used_submit_work"]], axis=-1)


def ratio_change(before: np.ndarray, after: np.ndarray, resamples: int = 5000) -> metrics.Interval | None:
    """Change of 1 - submitted / claimed from one policy [1, N, 2] to those of several seeds.
    (A mean of ratios would drop who claimed nothing.)

    The interval adds up the variance between the seeds' changes and that over scenarios, by a bootstrap that is paired by scenario.
    """
    rng, (seeds, n, _) = np.random.default_rng(0), after.shape
    if not before[..., 0].sum() or not after[..., 0].sum(axis=1).all():  # nothing is claimed at one end: there is no such share
        return None
    share = lambda x: 1 - x[..., 1].sum(-1) / np.maximum(x[..., 0].sum(-1), 1e-9)
    changes = share(after) - share(before)  # [seeds]
    together, picks = after.mean(axis=0), rng.integers(n, size=(resamples, n))
    over_scenarios = float(np.var(share(together[picks]) - share(before[0][picks])))
    parts = [significance.variance_of_mean(changes), (over_scenarios, n - 1)]
    return significance.by_variance(float(changes.mean()), parts, seeds)[0]


def correlation(rows: Rows, name: str) -> metrics.Interval | None:
    """Spearman's between a measure and the reward: of each seed over scenarios, its mean and interval over seeds.
    None if it never varies."""
    found = [rank_correlation(np.array(x), np.array(y)) for x, y in zip(rows[name], rows["reward"])]
    return interval([r.mean for r in found]) if all(found) else None


def show(i: metrics.Interval | None) -> str:
    return "it never happens, so there is nothing to compare" if i is None else i.signed()


def within(before: Rows, after: Rows) -> list[tuple[str, str, str, str]]:
    """(finding, what the publication says of its v0.2, here, verdict) about one version."""
    rows = []
    for text, said, name, expected in (
        ("reward rises", "0.888 → 1.377", "reward", 1),
        ("payoff rises", "0.652 → 0.998", "payoff", 1),
        ("interaction quality rises", "0.184 → 0.717", "quality", 1),
        ("reputation stagnates", "0.544 → 0.541", "reputation", 0),
        ("action diversity falls once the policy acts", "0.737 (step 20) → 0.596", "diversity", -1),
        ("more turns are used", "12.8 → 20.8", "turns_acted", 1),
        ("more tasks are claimed", "2.7 → 5.6", "used_claim_task", 1),
        ("more work is submitted", "2.2 → 4.0", "used_submit_work", 1),
        ("more trades are proposed", "1.3 → 5.1", "used_propose_trade", 1),
        ("errors fall", "they vanish: 9.4% → 0%, with spikes to 50%", "error_rate", -1),
        ("truncation vanishes", "68.8% → 0%", "truncated", -1),
    ):
        d = change(before, after, name)
        rows.append((text, said, f"{np.mean(before[name]):.3f} → {np.mean(after[name]):.3f}: {show(d)}", verdict(d, expected)))
    names = ("payoff", "reputation", "quality", "diversity")
    parts = {name: np.mean(after[name]) / max(np.mean(before[name]), 1e-9) - 1 for name in names}
    fastest = max(parts, key=parts.get)
    rows.append((
        "quality is the fastest mover", "+290%, payoff +53%", ", ".join(f"{name} {100 * x:+.0f}%" for name, x in parts.items()),
        "**came out**" if fastest == "quality" else f"no, {fastest} is (no interval: a ranking)",
    ))  # fmt: skip
    less = ratio_change(waste(before), waste(after))
    rows.append(("less of what is claimed goes unsubmitted", "41% → 28%", show(less), verdict(less, -1)))
    accepted, proposed = (correlation(after, name) for name in ("used_accept_proposal", "used_propose_trade"))
    rows.append((
        "who accepts scores higher", "the best of 8 accepted 8 and proposed 2",
        f"rank correlation with reward: accepted {show(accepted)}, proposed {show(proposed)}", verdict(accepted, 1),
    ))  # fmt: skip
    return rows


def between(old: Rows, new: Rows) -> list[tuple[str, str, str, str]]:
    """v0.1 against v0.2, each trained the same way. Scenarios differ, so these differences are not paired: the units are the seeds."""
    rows = []
    for text, said, name, expected in (
        ("fewer self-proposal errors in v0.2", "about 4 an episode → 0", "self_proposal_errors", -1),
        ("less trade spam in v0.2", "9.2 proposals → 5.1", "used_propose_trade", -1),
        ("higher interaction quality in v0.2", "0.619 → 0.717", "quality", 1),
        ("higher reward in v0.2 (other weights: 1.6 is the most in both)", "1.131 → 1.377", "reward", 1),
    ):
        a, b = (np.mean(rows_of[name], axis=1) for rows_of in (old, new))  # [seeds] each
        d = interval((b, a))
        rows.append((text, said, f"{a.mean():.3f} → {b.mean():.3f}: {show(d)}", verdict(d, expected)))
    tops = [interval([np.array(row) >= 1 for row in found["payoff_published"]]).percent() for found in (old, new)]
    rows.append((
        "payoff is at its ceiling", "0.992 and 0.998 on average",
        f"episodes at 1 on the published scale: {tops[0]} in v0.1, {tops[1]} in v0.2", "on that scale; ours has no ceiling (env_swarm.py)",
    ))  # fmt: skip
    return rows


def spikes(arm: str) -> str:
    """Errors while it trains: the first five batches, the worst one, the last five, per seed."""
    out = []
    for name in runs_of(arm):
        errors = [100 * line["error_rate"] for line in read_lines(STUDY.out / name / "metrics.jsonl")]
        out.append(f"{np.mean(errors[:5]):.1f}% → {np.mean(errors[-5:]):.1f}%, at most {max(errors):.1f}%")
    return "; ".join(out)


def main() -> None:
    there = {version: found for version, found in VERSIONS.items() if len(runs_of(found[0])) == len(STUDY.seeds)}
    if "v0.2" not in there:
        raise SystemExit("not all seeds have played; run: python -m lab.swarm.trained --only grpo")
    base = {version: scores("base", world, "sampled") for version, (_, world) in there.items()}
    after = {version: scores(arm, world, "sampled") for version, (arm, world) in there.items()}
    findings = lambda rows, of="": [*table(f"| finding | published{of} | here | verdict |", rows), ""]
    lines = [
        "# Which of the published findings come out again?", "",
        f"`python -m lab.swarm.findings`. {len(STUDY.seeds)} seeds a version, medium scenarios, sampled at temperature 1 as published, n = "
        f"{N} held-out scenarios; 95% intervals over seeds and scenarios. The published runs are of a 30B model; ours has 1M parameters "
        f"and a payoff that is scaled otherwise, so only directions are compared. Here an error costs {PRICE:g}/25 (both versions), there "
        "it cost nothing; rewards are told with that price. *Before* is the base, before SFT and GRPO: the published runs had no SFT. "
        "*More turns* are those that did something: a pass is none.", "",
        "## v0.2, from the base to after GRPO", "", *findings(within(base["v0.2"], after["v0.2"])),
    ]  # fmt: skip
    if "v0.1" in there:
        lines += ["## v0.1 against v0.2, both after GRPO", "", *findings(between(after["v0.1"], after["v0.2"])),
                  "## v0.1, from the base to after GRPO", "",
                  *findings(within(base["v0.1"], after["v0.1"])[:11], ", of v0.2 (of v0.1 only the end is told)")]  # fmt: skip
    else:
        lines += [f"Of v0.1 {len(runs_of('v01'))} of {len(STUDY.seeds)} seeds have been run with this base, so nothing is said of it.", ""]
    lines += [
        "## Errors while it trains", "",
        "Share of the turns, batches of 32 sampled episodes; the first five, the last five and the worst one, per seed.", "",
        *(f"* {version}: {spikes(arm)}" for version, (arm, _) in there.items()), "",
    ]  # fmt: skip
    write_page(STUDY.out / "findings.md", lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
