"""Which of the published swarm run's findings come out again here? Computed from the arms v02 and v01, into results/swarm/findings.md.

    python -m lab.claims.arms --env swarm --arms v02 v01      # the runs, if they are not there yet
    python -m lab.swarm.findings

The publication had one run a version, and compared 6 sampled episodes with 8. Here both ends of a run play the same development scenarios,
greedy, and every difference is paired by scenario with its 95% interval. A finding "came out" if its interval lies on the side that the
publication says, "came out the other way round" if it lies on the other, and otherwise "cannot be told". Nothing in this file knows the
answer beforehand.
"""

from dataclasses import dataclass

import numpy as np

import metrics
from bookkeeping import compare
from bookkeeping.behaviour import rank_correlation
from lab.common import RESULTS, ROOT, read_lines, table, write_page

OUT = RESULTS / "swarm"


@dataclass
class Run:
    before: dict  # lists by component, after SFT
    after: dict  # the same scenarios after GRPO
    training: list[dict]  # a line of metrics.jsonl an update: means over 32 episodes, sampled at temperature 1


def load(arm: str, seed: int) -> Run:
    folder = OUT / f"{arm}-{seed}"
    if not (folder / "evals.jsonl").exists():
        raise SystemExit(f"{folder.relative_to(ROOT)} is not there; run: python -m lab.claims.arms --env swarm --arms {arm}")
    stage = lambda name: next(e for e in read_lines(folder / "evals.jsonl") if e["stage"] == name and e["trained"])
    return Run(stage("after_sft"), stage("final"), read_lines(folder / "metrics.jsonl"))


def change(run: Run, name: str) -> metrics.Interval:
    return metrics.gain(run.before[name], run.after[name])


def verdict(interval: metrics.Interval | None, expected: int) -> str:
    """expected +1: the publication says more, -1: less, 0: no change (which can only be contradicted, or bounded)."""
    if interval is None:
        return "cannot be told"
    side = 1 if interval.low > 0 else -1 if interval.high < 0 else 0
    if expected == 0:
        return "it did change here" if side else "no change can be told here either"
    return "**came out**" if side == expected else "cannot be told" if side == 0 else "**came out the other way round**"


def waste(e: dict) -> np.ndarray:
    """[n, 2]: tasks claimed and submitted, by scenario."""
    return np.column_stack([e["used_claim_task"], e["used_submit_work"]])


def ratio_change(before: np.ndarray, after: np.ndarray, resamples: int = 5000) -> metrics.Interval | None:
    """Change of 1 - submitted / claimed, paired bootstrap over scenarios (a mean of ratios would drop who claimed nothing)."""
    rng, n = np.random.default_rng(0), len(before)
    if not before[:, 0].sum() or not after[:, 0].sum():  # nothing is claimed at one end: there is no such share
        return None
    share = lambda x: 1 - x[..., 1].sum(-1) / np.maximum(x[..., 0].sum(-1), 1e-9)
    picks = rng.integers(n, size=(resamples, n))
    low, high = np.quantile(share(after[picks]) - share(before[picks]), [0.025, 0.975])
    return metrics.Interval(float(share(after) - share(before)), float(low), float(high), n)


def show(i: metrics.Interval | None) -> str:
    return "it never happens at one end, so there is nothing to compare" if i is None else i.signed()


def within(run: Run) -> list[tuple[str, str, str, str]]:
    """(finding, what the publication says of its v0.2, here, verdict) about one run."""
    rows = []
    for text, said, name, expected in (
        ("reward rises", "0.888 → 1.377", "reward", 1),
        ("payoff rises", "0.652 → 0.998", "payoff", 1),
        ("interaction quality rises", "0.184 → 0.717", "quality", 1),
        ("reputation stagnates", "0.544 → 0.541", "reputation", 0),
        ("action diversity falls once the policy acts", "0.737 (step 20) → 0.596", "diversity", -1),
        ("more turns are used", "12.8 → 20.8", "turns_used", 1),
        ("more tasks are claimed", "2.7 → 5.6", "used_claim_task", 1),
        ("more work is submitted", "2.2 → 4.0", "used_submit_work", 1),
        ("more trades are proposed", "1.3 → 5.1", "used_propose_trade", 1),
        ("errors vanish", "9.4% → 0%, with spikes to 50%", "error_rate", -1),
        ("truncation vanishes", "68.8% → 0%", "truncated", -1),
    ):
        before, after = (metrics.mean(e[name]).mean for e in (run.before, run.after))
        rows.append((text, said, f"{before:.3f} → {after:.3f}: {show(change(run, name))}", verdict(change(run, name), expected)))
    names = ("payoff", "reputation", "quality", "diversity")
    parts = {name: change(run, name).mean / max(metrics.mean(run.before[name]).mean, 1e-9) for name in names}
    fastest = max(parts, key=parts.get)
    rows.append((
        "quality is the fastest mover", "+290%, payoff +53%", ", ".join(f"{name} {100 * x:+.0f}%" for name, x in parts.items()),
        "**came out**" if fastest == "quality" else f"no, {fastest} is (no interval: a ranking)",
    ))  # fmt: skip
    less = ratio_change(waste(run.before), waste(run.after))
    rows.append(("less of what is claimed goes unsubmitted", "41% → 28%", show(less), verdict(less, -1)))
    with_reward = lambda name: rank_correlation(np.array(run.after[name]), np.array(run.after["reward"]))
    accepted, proposed = with_reward("used_accept_proposal"), with_reward("used_propose_trade")
    rows.append((
        "who accepts scores higher", "the best of 8 accepted 8 and proposed 2",
        f"rank correlation with reward: accepted {show(accepted)}, proposed {show(proposed)}", verdict(accepted, 1),
    ))  # fmt: skip
    return rows


def between(old: Run, new: Run) -> list[tuple[str, str, str, str]]:
    """v0.1 against v0.2, each trained the same way. Scenarios differ, so these differences are not paired."""
    rows = []
    for text, said, name, expected in (
        ("fewer self-proposal errors in v0.2", "about 4 an episode → 0", "self_proposal_errors", -1),
        ("less trade spam in v0.2", "9.2 proposals → 5.1", "used_propose_trade", -1),
        ("higher interaction quality in v0.2", "0.619 → 0.717", "quality", 1),
        ("higher reward in v0.2 (other weights: 1.6 is the most in both)", "1.131 → 1.377", "reward", 1),
    ):
        d = difference(old.after[name], new.after[name])
        a, b = (metrics.mean(run.after[name]) for run in (old, new))
        rows.append((text, said, f"{a.mean:.3f} → {b.mean:.3f}: {show(d)}", verdict(d, expected)))
    top = [metrics.proportion(sum(p > 0.95 for p in run.after["payoff"]), len(run.after["payoff"])) for run in (old, new)]
    rows.append((
        "payoff is at its ceiling", "0.992 and 0.998 on average", f"episodes above 0.95: {top[0].percent()} in v0.1, {top[1].percent()} in v0.2",
        "depends on the scale: ours never saturates (env_swarm.py)",
    ))  # fmt: skip
    return rows


def sampled(old: Run, new: Run) -> list[str]:
    """What greedy evaluations hide: a policy that samples still tries what it would not do at its likeliest. Five updates at either end."""
    rows = []
    for text, name in (("trades proposed", "used_propose_trade"), ("trades accepted", "used_accept_proposal"),
                       ("self-proposal errors", "self_proposal_errors"), ("errors, share of the turns", "error_rate")):  # fmt: skip
        ends = [[[line[name] for line in some] for some in (run.training[:5], run.training[-5:])] for run in (old, new)]
        cells = [f"{np.mean(first):.3f} → {np.mean(last):.3f}: {show(difference(first, last))}" for first, last in ends]
        rows.append([text, *cells, show(difference(ends[0][1], ends[1][1]))])
    return [*table("| an episode's | v0.1 | v0.2 | v0.2 less v0.1, at the end |", rows), ""]


def difference(a, b) -> metrics.Interval:
    """Mean of b minus mean of a, independent samples: Welch's 95% interval."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    parts = [compare.variance_of_mean(a), compare.variance_of_mean(b)]
    return compare.by_variance(float(b.mean() - a.mean()), parts, min(len(a), len(b)))[0]


def main(seed: int = 0) -> None:
    new, old = load("v02", seed), load("v01", seed)
    n, findings = len(new.after["reward"]), lambda rows: [*table("| finding | published | here | verdict |", rows), ""]
    lines = [
        "# Which of the published findings come out again?", "",
        f"`python -m lab.swarm.findings`. Seed {seed}, medium scenarios, greedy, n = {n} development scenarios a version, 95% intervals. "
        "The published runs are of a 30B model; ours has 0.9M parameters and our payoff is scaled otherwise, so only directions are compared. "
        "Here an error costs 1/25 (both versions, `--swarm-error-penalty 1`), there it cost nothing; rewards are told with that price. "
        "One seed a version: the noise between seeds is not in these intervals.", "",
        "## v0.2, from after SFT to after GRPO", "", *findings(within(new)),
        "## v0.1 against v0.2, both after GRPO", "", *findings(between(old, new)),
        "## v0.1, from after SFT to after GRPO", "", *findings(within(old)[:11]),
        "## While it trains: sampled at temperature 1, the first five updates and the last five", "",
        "Greedy evaluations show what is likeliest; this is what is tried besides. Welch's intervals over the means of five updates.", "",
        *sampled(old, new),
    ]  # fmt: skip
    write_page(OUT / "findings.md", lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
