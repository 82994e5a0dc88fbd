"""Soft metrics and governance: how good is what agents do with each other, how sure is that, and who steps in when?

Nobody sees whether a deal is good. A proxy sees signals and gives p, the probability that it is. Everything here follows from
taking p as what it is, an uncertain number:

    proxy     progress, rework, rejections, misuse, engagement -> v in [-1, 1] -> p = sigmoid(2 v)
    measures  toxicity E[1 - p | accepted], quality gap E[p | accepted] - E[p | rejected], welfare: soft (with p) and hard (p cut
              at 0.5) side by side, with intervals over episodes
    watch     the proxy keeps book of its own misses and says when it is too noisy, or too kind, to govern by
    gate      accept this deal? hard: by one reading of p. soft: by the expectation of p, given also what is believed of the proposer
    local     fast: beliefs, stakes and audits, decided by those who deal. No meeting, no delay
    council   slow: a vote, and a look at who deals with whom. It stops everybody for a step, so it meets only on a signal

    signals -> p -> gate -> deal -> books of swarm_economy -> audits -> watch -> (signal) -> council -> freeze

Sources: proxy, payoff and metrics are those of the SWARM framework as published (weights 0.4/0.2/0.2/0.2, k = 2; pi = theta S - tau - c
- rho E + w r). The rest follows the advice of its authors: watch the proxy's variance, split fast from slow, decide by expectations.
Does that help? lab/swarm/governance.py lets eight bots live under such stacks, with 0 to 5 of them deceptive, and counts: results/governance/.

Run me: `python -m swarm.governance` works an example of every part; `python -m lab.swarm.governance_sweep` runs that experiment.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from scipy import special, stats

import metrics
from metrics import Interval
from swarm.economy import Economy, Interaction, sigmoid, soft_label

WEIGHTS = {"progress": 0.4, "rework": 0.2, "verifier": 0.2, "engagement": 0.2}
DECAYS = {"rework": 0.3, "rejections": 0.4, "misuse": 0.5}  # the first one costs most
THETA, S_PLUS, S_MINUS, HARM = 0.5, 2.0, 1.0, 2.0

# ------------------------------------------------------------------------------------------------ signals -> p -> payoff


@dataclass(frozen=True)
class Signals:
    progress: float  # of the task, in [-1, 1]
    rework: int  # how often it had to be done again
    rejections: int  # by a verifier
    misuse: int  # of tools
    engagement: float  # of the counterparty, in [-1, 1]


def from_count(n: int, decay: float) -> float:
    """2 decay^n - 1: none is +1, many are -1. from_count(1, 0.3) -> -0.4."""
    return 2 * decay**n - 1


def v_hat(signals: Signals) -> float:
    """The weighted signals, in [-1, 1]. The verifier's signal is the mean of those of rejections and misuse."""
    for name in ("progress", "engagement"):
        if not -1 <= getattr(signals, name) <= 1:
            raise ValueError(f"v_hat: {name} is {getattr(signals, name)}; scale it to [-1, 1] first")
    for name in DECAYS:
        if not getattr(signals, name) >= 0:
            raise ValueError(f"v_hat: {name} is {getattr(signals, name)}; it is a count and must be at least 0")
    rework, rejections, misuse = (from_count(getattr(signals, name), decay) for name, decay in DECAYS.items())
    values = {"progress": signals.progress, "rework": rework, "verifier": (rejections + misuse) / 2, "engagement": signals.engagement}
    return sum(weight * values[name] for name, weight in WEIGHTS.items())


def proxy(signals: Signals) -> float:
    """p = sigmoid(2 v): all signals perfect is 0.88, all as bad as can be 0.12. It is never sure."""
    return soft_label(v_hat(signals))


def surplus(p):
    """S, what both sides gain together."""
    return p * S_PLUS - (1 - p) * S_MINUS


def harm(p):
    """E, the externality: what a bad deal costs those who are no part of it."""
    return (1 - p) * HARM


def payoff(p, theta=THETA, tau=0.0, c=0.0, rho=0.0, w=0.0, r=0.0):
    """The initiator's theta S - tau - c - rho E + w r: its share, less what it gives, pays and answers for, plus what its reputation is worth.

    The counterparty's is payoff(p, 1 - theta, -tau, ...).
    """
    return theta * surplus(p) - tau - c - rho * harm(p) + w * r


def social(p):
    """What a deal is worth to everybody: both payoffs less the harm that neither answers for. 5p - 3, so it breaks even at p = 0.6."""
    return surplus(p) - harm(p)


# ------------------------------------------------------------------------------------------------ metrics, soft and hard


def measures(deals: Iterable[Interaction], hard: bool = False) -> dict[str, float]:
    """The metrics of one episode; hard: every p counts as 0 or 1. NaN where there is nothing to average.

    tail: the mean of 1 - p over the worst 5% of what was accepted. Two economies of one toxicity can differ in it.
    """
    deals = list(deals)
    p = np.array([deal.p for deal in deals], dtype=float)
    yes = np.array([deal.accepted for deal in deals], dtype=bool)
    if hard:
        p = (p >= 0.5).astype(float)
    mean = lambda x: float(x.mean()) if len(x) else float("nan")
    bad = np.sort(1 - p[yes])
    return {
        "acceptance": mean(yes),
        "toxicity": mean(bad),
        "tail": mean(bad[len(bad) - math.ceil(0.05 * len(bad)) :]),
        "quality_gap": mean(p[yes]) - mean(p[~yes]),  # below 0: adverse selection
        "welfare": float(social(p[yes]).sum()),  # summed over what was accepted
    }


def over(values) -> Interval:
    """Mean and 95% interval over episodes or seeds: those are independent, deals within one are not. NaN is left out; one has no interval."""
    values = np.asarray([v for v in values if v == v], dtype=float)
    return Interval(float(values[0]), float("nan"), float("nan"), 1) if len(values) == 1 else metrics.mean(values)


def side_by_side(episodes: list[list[Interaction]]) -> dict[str, dict[str, Interval]]:
    """{metric: {"soft": Interval, "hard": Interval}} over episodes."""
    rows = {name: [measures(deals, name == "hard") for deals in episodes] for name in ("soft", "hard")}
    return {metric: {name: over([row[metric] for row in rows[name]]) for name in rows} for metric in measures([])}


def of_economies(economies: list[Economy]) -> dict[str, dict[str, Interval]]:
    """The same for finished economies of swarm_economy, so that a training run can report it: of_economies([env.economy for env in envs])."""
    return side_by_side([economy.interactions for economy in economies])


def thrash(deals: Iterable[Interaction]) -> float:
    """Of two consecutive decisions on the same initiator, how often is one a yes and the other a no? NaN without two."""
    last: dict[str, bool] = {}
    flips = []
    for deal in deals:
        if deal.initiator in last:
            flips.append(last[deal.initiator] != deal.accepted)
        last[deal.initiator] = deal.accepted
    return sum(flips) / len(flips) if flips else float("nan")


# ------------------------------------------------------------------------------------------------ the proxy watches itself


@dataclass
class Watch:
    """What the proxy knows of its own misses. It reads one deal in ten twice, and audits tell it how deals really were."""

    rereads: deque = field(default_factory=lambda: deque(maxlen=200))  # (first p, second p) of the same deal
    audits: deque = field(default_factory=lambda: deque(maxlen=100))  # (p, outcome: 1 beneficial, 0 not)


def reading_variance(watch: Watch) -> float:
    """Of one reading around what the deal would show on average: half the mean squared difference of two. 0.01 until there are ten."""
    return sum((a - b) ** 2 for a, b in watch.rereads) / (2 * len(watch.rereads)) if len(watch.rereads) >= 10 else 0.01


def noisy(watch: Watch, bar: float = 0.5) -> str:
    """A sentence if surely (97.5%) more than a tenth of the decisions would be others on a second look; else ""."""
    n, flips = len(watch.rereads), sum((a >= bar) != (b >= bar) for a, b in watch.rereads)
    if flips > 0.1 * n and metrics.proportion(flips, n).low > 0.1:  # the first is only there to be fast
        return f"p is too noisy to govern by: {flips} of {n} deals read twice fell on both sides of {bar:g}"
    return ""


def too_kind(watch: Watch) -> str:
    """A sentence if what was let through is surely (97.5%) worse than p said; else "". Too strict is a waste, but no danger."""
    errors = np.array([p - outcome for p, outcome in watch.audits])
    if len(errors) >= 30 and errors.mean() > 1.96 * errors.std(ddof=1) / math.sqrt(len(errors)):
        return f"p is too kind to govern by: {len(errors)} audited deals were good {100 * errors.mean():.0f} points less often than it said"
    return ""


# ------------------------------------------------------------------------------------------------ the gate


@dataclass
class Belief:
    """What is believed of an agent: its deals have p around `mean`, known to ± sqrt(var), and vary by ± sqrt(spread) as read."""

    mean: float = 0.5
    var: float = 0.0625
    spread: float = 0.04
    recent: deque = field(default_factory=lambda: deque(maxlen=5))  # for the gate "mean", which adds the newest
    yes: bool = True  # the last decision, for the gate "latch"


DRIFT = 0.0005  # agents change: the variance grows by this with every reading, so that no belief is ever final
MEMORY = 0.1  # weight of the newest reading in the spread
OUTCOME_NOISE = 0.16  # variance of an audited outcome, 0 or 1, around a p of 0.2 or 0.8


def learn(belief: Belief, reading: float, noise: float | None = None) -> None:
    """Kalman's filter for one number: 0.5 ± 0.25, then a reading of 0.9 ± 0.25 -> 0.7. noise: the reading's variance; None: the spread."""
    if noise is None:
        belief.spread += MEMORY * ((reading - belief.mean) ** 2 - belief.spread)
    gain = belief.var / (belief.var + (belief.spread if noise is None else noise) + 1e-9)
    belief.mean += gain * (reading - belief.mean)
    belief.var = (1 - gain) * belief.var + DRIFT


def expect(belief: Belief, p: float, noise: float) -> float:
    """E[p of this deal | its reading, what is believed of the agent], before the reading is learnt.

    noise: the reading's variance. An agent whose deals vary no more than readings do is judged by its record; one whose deals vary more,
    deal by deal.
    """
    prior = belief.var + max(0.0, belief.spread - noise)
    return belief.mean + prior / (prior + noise + 1e-9) * (p - belief.mean)


# (belief before this reading, p, variance of a reading, bar for p, dice in [0, 1]) -> accept?
# Payoffs are linear in p, so an expectation over the noise of *one* reading decides just as the reading does: soft differs from hard only
# by what else it knows. "mean" and "latch" are hard rules that remember too, to see whether memory or softness makes the difference.
GATES: dict[str, Callable[[Belief, float, float, float, float], bool]] = {
    "open": lambda belief, p, noise, bar, dice: True,
    "hard": lambda belief, p, noise, bar, dice: p >= bar,
    "soft": lambda belief, p, noise, bar, dice: expect(belief, p, noise) >= bar,
    "agent": lambda belief, p, noise, bar, dice: belief.mean >= bar,  # by its record alone
    "mean": lambda belief, p, noise, bar, dice: (sum(belief.recent) + p) / (len(belief.recent) + 1) >= bar,  # of the last six readings
    "latch": lambda belief, p, noise, bar, dice: p >= (bar - 0.1 if belief.yes else bar + 0.1),  # hysteresis
    "chance": lambda belief, p, noise, bar, dice: dice < sigmoid((p - bar) / 0.1),  # a graded yes, drawn
}


def decide(gate: str, belief: Belief, p: float, noise: float, bar: float, dice: float) -> bool:
    """Accept this deal? Then the reading becomes part of the belief."""
    if gate not in GATES:
        raise ValueError(f"decide: there is no gate {gate!r}; choose {', '.join(GATES)}")
    belief.yes = GATES[gate](belief, p, noise, bar, dice)
    belief.recent.append(p)
    learn(belief, p)
    return belief.yes


# ------------------------------------------------------------------------------------------------ who deals with whom


def graph(deals: Iterable[Interaction], names: list[str]) -> tuple[np.ndarray, list[list[list[float]]]]:
    """Who proposed to whom: counts [n, n], and the p's behind them. Work is done for nobody in particular and left out."""
    at = {name: i for i, name in enumerate(names)}
    quality: list[list[list[float]]] = [[[] for _ in names] for _ in names]
    for deal in deals:
        if deal.counterparty:
            quality[at[deal.initiator]][at[deal.counterparty]].append(deal.p)
    return np.array([[len(x) for x in row] for row in quality], dtype=float), quality


def pair_tests(counts: np.ndarray, quality: list[list[list[float]]], expected: np.ndarray | None = None) -> dict:
    """{(i, j): (p-value of dealing this often, of dealing this well)} for every pair i < j, one-sided, if all deal independently.

    counts [n, n]: proposals of i to j. quality[i][j]: their p. Often: beyond `expected` [n, n] the counts are Poisson. Well: how good the
    deals of i are does not depend on the partner, so those with j have no special ranks among them (Mann-Whitney, both ways added).
    expected: proposals of i to j if i took anybody who was there. None: fit how busy i is and how sought after j is (quasi-independence,
    Goodman 1968). Some are sought after for good reasons; but fitted to a ring, it makes the others look like one: say it if you know it.
    """
    n = len(counts)
    if counts.shape != (n, n) or len(quality) != n or (expected is not None and expected.shape != (n, n)):
        raise ValueError(f"pair_tests: counts are {counts.shape}, quality is of {len(quality)} agents; give all for the same ones")
    if expected is None:
        expected = np.ones((n, n)) - np.eye(n)
        for _ in range(30):
            expected *= (counts.sum(1) / np.maximum(expected.sum(1), 1e-12))[:, None]
            expected *= (counts.sum(0) / np.maximum(expected.sum(0), 1e-12))[None]
    z = np.zeros((n, n))
    for i in range(n):
        flat = np.array([p for with_j in quality[i] for p in with_j])
        who = np.repeat(np.arange(n), [len(with_j) for with_j in quality[i]])
        ranks, total = stats.rankdata(flat), len(flat)
        for j in set(who.tolist()):
            m = (who == j).sum()
            if m < total:
                z[i, j] = (ranks[who == j].mean() - (total + 1) / 2) / math.sqrt((total + 1) * (total - m) / (12 * m))
    both, by_chance = counts + counts.T, np.maximum(expected + expected.T, 1e-9)
    often = np.where(both > 0, special.pdtrc(np.maximum(both - 1, 0), by_chance), 1.0)  # P(Poisson >= both)
    well = special.ndtr(-(z + z.T) / math.sqrt(2))
    return {(i, j): (float(often[i, j]), float(well[i, j])) for i in range(n) for j in range(i + 1, n)}


def colluding(counts: np.ndarray, quality: list, expected: np.ndarray | None = None, alpha: float = 0.01) -> list[tuple[int, int]]:
    """The pairs that deal too often or too well to be chance. Among honest agents at most one look in 1/alpha names anybody at all.

    The 56 tests of 8 agents are corrected by Holm (1979), who asks nothing about how they depend on each other.
    """
    tests = sorted((value, pair) for pair, values in pair_tests(counts, quality, expected).items() for value in values)
    found = set()
    for k, (value, pair) in enumerate(tests):
        if value > alpha / (len(tests) - k):
            break
        found.add(pair)
    return sorted(found)


# ------------------------------------------------------------------------------------------------ the tiers


@dataclass(frozen=True)
class Stack:
    """A governance: which mechanisms are on, and their levers."""

    gate: str = "soft"  # one of GATES
    bar: float = 0.5  # of p: from here on a deal is accepted
    local: bool = False  # stakes and audits, and the tax, decay and breaker of swarm_economy
    vote: bool = False  # by the council
    pairs: bool = False  # collusion detection, by the council
    always: bool = False  # the council meets every epoch instead of on a signal
    tax: float = 0.05
    decay: float = 0.99  # of reputation a step, 0.95 an epoch of five
    threshold: float = 15.0  # of reputation: the breaker
    stake: float = 10.0  # resources: who has less cannot propose, and a fault found costs it
    audit: float = 0.1  # of accepted deals
    surprised: float = 0.5  # of those whose reading lies two standard deviations off what was believed: whoever deals can ask for it
    audit_cost: float = 0.2  # welfare: a tenth of what a good deal yields
    confidence: float = 4.0  # standard errors of the step that calls the council
    freeze: int = 3  # epochs
    majority: float = 0.5  # of all voters: more than this share have to name somebody


def audit_rate(stack: Stack, belief: Belief, p: float, flagged: bool) -> float:
    """The fast tier's trigger, decided by the two who deal: more where p is a surprise, twice as much while the proxy does not trust itself."""
    surprise = (p - belief.mean) ** 2 > 4 * (belief.var + belief.spread)
    return min(1.0, (stack.surprised if surprise else stack.audit) * (2 if flagged else 1))


def call_council(stack: Stack, series: list[float], watch: Watch, epochs_since: int) -> bool:
    """The slow tier's signal: a step in the mean p of what is proposed since the last meeting (metrics.change), or a proxy that is too
    kind; the latter at most every five epochs, for it takes time to see whether a meeting helped."""
    return stack.always or metrics.change(series, stack.confidence) is not None or (epochs_since >= 5 and bool(too_kind(watch)))


def outvoted(ballots: dict[str, set[str]], majority: float) -> list[str]:
    """ballots: whom each member wants frozen. Named are those whom more than `majority` of all voters name, the accused among them."""
    accused = sorted(set().union(*ballots.values()))
    return [name for name in accused if sum(name in ballot for ballot in ballots.values()) > majority * len(ballots)]


# ------------------------------------------------------------------------------------------------ for people


def show() -> None:
    print("signals -> p -> payoff of the initiator, worth to all")
    for signals in (Signals(0.8, 0, 0, 0, 0.6), Signals(0.2, 1, 1, 0, 0.0), Signals(-0.6, 3, 2, 1, -0.4)):
        p = proxy(signals)
        print(f"  {signals}  v {v_hat(signals):+.2f}  p {p:.2f}  payoff {payoff(p):+.2f}  worth {social(p):+.2f}")

    rng, watch, names, deals = np.random.default_rng(0), Watch(), [f"bot_{i}" for i in range(8)], []
    readings = np.clip(0.6 + 0.15 * rng.standard_normal(60), 0, 1)  # an agent that never changes, and a proxy that is not sure
    print("\n60 readings of an agent whose p is 0.6, bar 0.5: how often does a yes follow a no, or a no a yes?")
    for gate in ("hard", "latch", "mean", "soft"):
        belief = Belief()
        said = [Interaction(i, "trade", "a", "b", decide(gate, belief, p, 0.15**2, 0.5, 0), p) for i, p in enumerate(readings)]
        soft, hard = measures(said), measures(said, hard=True)["toxicity"]
        print(f"  {gate:5} thrash {thrash(said):.2f}  accepted {soft['acceptance']:.2f}  toxicity {soft['toxicity']:.2f}, hard {hard:.2f}")
    watch.rereads.extend(zip(readings[:30], readings[30:]))
    watch.audits.extend((p, rng.random() < p - 0.3) for p in readings)
    print("  the watch:", noisy(watch), "/", too_kind(watch))

    for step in range(400):
        i = step % 8
        j = int(rng.integers(7))
        j, p = (7 - i + 6, 0.8) if i >= 6 and rng.random() < 0.5 else (j + (j >= i), 0.6)
        deals.append(Interaction(step, "trade", names[i], names[j], True, p + 0.1 * rng.standard_normal()))
    found = colluding(*graph(deals, names))
    print("\n400 deals, of which bot_6 and bot_7 do half of theirs with each other. Named:", [(names[i], names[j]) for i, j in found])
    assert found == [(6, 7)]


if __name__ == "__main__":
    show()
