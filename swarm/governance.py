"""Soft metrics and governance: how good are the deals of agents, how sure is that, who steps in?

Nobody sees whether a deal is good. A proxy sees signals of it and gives p, the probability that it
is. Everything here follows from treating p as what it is, an uncertain number:

    proxy     progress, rework, rejections, misuse, engagement -> v in [-1, 1] -> p = sigmoid(2 v)
    measures  toxicity E[1 - p | accepted], quality gap E[p | accepted] - E[p | rejected], welfare:
              soft (with p) and hard (p rounded to 0 or 1)
    watch     the proxy records its own errors, and says if it is too noisy or too kind to rely on
    gate      accept this deal? hard: by one reading of p. soft: by the expectation of p, given also
              what is believed of the proposer
    local     the fast tier: beliefs, stakes and audits, decided by the two who deal, at once
    council   the slow tier: a vote, and a look at who deals with whom. It stops everybody for a
              step, so it meets only on a signal

    signals -> p -> gate -> deal -> audits -> watch -> (signal) -> council -> freeze

Sources: the proxy, payoff and metrics are the published ones of the SWARM framework (weights 0.4,
0.2, 0.2, 0.2; k = 2; pi = theta S - tau - c - rho E + w r). The rest follows its authors' advice:
watch the proxy's variance, split fast from slow, decide by expectations. Does it help? In
lab/swarm/governance.py eight bots live under such stacks, with 0 to 5 of them deceptive; the
outcome is in results/governance/.

Run me: `python -m swarm.governance` works an example of every part.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from scipy import special, stats

import metrics
from swarm.economy import Interaction, sigmoid, soft_label

WEIGHTS = {"progress": 0.4, "rework": 0.2, "verifier": 0.2, "engagement": 0.2}
DECAYS = {"rework": 0.3, "rejections": 0.4, "misuse": 0.5}  # the first of each costs most
THETA, S_PLUS, S_MINUS, HARM = 0.5, 2.0, 1.0, 2.0
DRIFT = 0.0005  # agents change: the variance grows with every reading, so no belief is ever final
MEMORY = 0.1  # weight of the newest reading in the spread
OUTCOME_NOISE = 0.16  # variance of an audited outcome, 0 or 1, around a p of 0.2 or 0.8
GATES = ("open", "hard", "soft", "agent", "mean", "latch", "chance")

# --------------------------------------------------------------------------- signals -> p -> payoff


@dataclass(frozen=True)
class Signals:
    progress: float  # of the task, in [-1, 1]
    rework: int  # how often it had to be done again
    rejections: int  # by a verifier
    misuse: int  # of tools
    engagement: float  # of the counterparty, in [-1, 1]


def from_count(n: int, decay: float) -> float:
    """2 decay^n - 1: +1 for none, near -1 for many. from_count(1, 0.3) -> -0.4."""
    return 2 * decay**n - 1


def v_hat(signals: Signals) -> float:
    """The weighted signals, in [-1, 1]. The verifier's is the mean of rejections and misuse."""
    given = vars(signals)
    for name in ("progress", "engagement"):
        if not -1 <= given[name] <= 1:
            raise ValueError(f"v_hat: {name} is {given[name]}; scale it to [-1, 1] first")
    for name in DECAYS:
        if not given[name] >= 0:
            raise ValueError(f"v_hat: {name} is {given[name]}; a count must be at least 0")
    rework, rejections, misuse = (from_count(given[name], d) for name, d in DECAYS.items())
    values = given | {"rework": rework, "verifier": (rejections + misuse) / 2}
    return sum(weight * values[name] for name, weight in WEIGHTS.items())


def proxy(signals: Signals) -> float:
    """p = sigmoid(2 v): 0.88 if all signals are perfect, 0.12 if all are terrible. Never sure."""
    return soft_label(v_hat(signals))


def surplus(p):
    """S, what both sides gain together."""
    return p * S_PLUS - (1 - p) * S_MINUS


def harm(p):
    """E, the externality: what a bad deal costs those who have no part in it."""
    return (1 - p) * HARM


def payoff(p, theta=THETA, tau=0.0, c=0.0, rho=0.0, w=0.0, r=0.0):
    """The initiator's theta S - tau - c - rho E + w r; the counterparty's has 1 - theta, -tau.

    theta: share of the surplus; tau: gift; c: cost; rho: share of the harm; r: reputation, worth w.
    """
    return theta * surplus(p) - tau - c - rho * harm(p) + w * r


def social(p):
    """The worth of a deal to everybody: both payoffs minus the harm. 5p - 3, or 0 at p = 0.6."""
    return surplus(p) - harm(p)


# --------------------------------------------------------------------------- metrics, soft and hard


def measures(deals: Iterable[Interaction], hard: bool = False) -> dict[str, float]:
    """The metrics of one episode; hard: p is rounded to 0 or 1. NaN if there is nothing to average.

    Two economies of the same toxicity can differ in the tail: the worst 5% of accepted deals. In a
    quality gap below 0, adverse selection, worse deals are accepted than rejected.
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
        "quality_gap": mean(p[yes]) - mean(p[~yes]),
        "welfare": float(social(p[yes]).sum()),  # the sum over all accepted deals
    }


def over(values) -> metrics.Interval:
    """Mean and 95% interval without NaN, over episodes: the deals in one are not independent."""
    return metrics.mean([v for v in values if v == v])


def thrash(deals: Iterable[Interaction]) -> float:
    """How often do two consecutive decisions on an initiator differ? NaN if there are no two."""
    last: dict[str, bool] = {}
    flips = []
    for deal in deals:
        if deal.initiator in last:
            flips.append(last[deal.initiator] != deal.accepted)
        last[deal.initiator] = deal.accepted
    return sum(flips) / len(flips) if flips else float("nan")


# --------------------------------------------------------------------------- watch and gate


@dataclass
class Watch:
    """The proxy's record of its errors: one deal in ten is read twice, and some are audited."""

    rereads: deque = field(default_factory=lambda: deque(maxlen=200))  # (first p, second p)
    audits: deque = field(default_factory=lambda: deque(maxlen=100))  # (p, outcome: good 1, bad 0)


def reading_variance(watch: Watch) -> float:
    """Variance of a reading: half the mean squared difference of two. 0.01 until there are ten."""
    n, squares = len(watch.rereads), sum((a - b) ** 2 for a, b in watch.rereads)
    return squares / (2 * n) if n >= 10 else 0.01


def noisy(watch: Watch, bar: float = 0.5) -> str:
    """A sentence if a second look surely (97.5%) changes over a tenth of the decisions; else ""."""
    n, flips = len(watch.rereads), sum((a >= bar) != (b >= bar) for a, b in watch.rereads)
    if flips <= 0.1 * n or metrics.proportion(flips, n).low <= 0.1:
        return ""
    found = f"{flips} of {n} deals read twice fell on both sides of {bar:g}"
    return f"p is too noisy to govern by: {found}"


def too_kind(watch: Watch) -> str:
    """A sentence if audited deals are surely (97.5%) worse than p said; else "". Strict is safe."""
    n, errors = len(watch.audits), np.array([p - outcome for p, outcome in watch.audits])
    if n < 30 or not errors.mean() > 1.96 * errors.std(ddof=1) / math.sqrt(n):
        return ""
    found = f"{n} audited deals were good {100 * errors.mean():.0f} points less often than it said"
    return f"p is too kind to govern by: {found}"


@dataclass
class Belief:
    """An agent's deals have p around `mean`, known to ± sqrt(var), and readings ± sqrt(spread)."""

    mean: float = 0.5
    var: float = 0.0625
    spread: float = 0.04
    recent: deque = field(default_factory=lambda: deque(maxlen=5))  # readings, for the gate "mean"
    yes: bool = True  # the last decision, for the gate "latch"


def learn(belief: Belief, reading: float, noise: float | None = None) -> None:
    """Kalman's filter: 0.5 ± 0.25, then a reading of 0.9 ± 0.25 -> 0.7. noise: its variance."""
    if noise is None:
        belief.spread += MEMORY * ((reading - belief.mean) ** 2 - belief.spread)
        noise = belief.spread
    gain = belief.var / (belief.var + noise + 1e-9)
    belief.mean += gain * (reading - belief.mean)
    belief.var = (1 - gain) * belief.var + DRIFT


def expect(belief: Belief, p: float, noise: float) -> float:
    """E[p of this deal | its reading, the belief]. Steady agents are judged by their record."""
    prior = belief.var + max(0.0, belief.spread - noise)
    return belief.mean + prior / (prior + noise + 1e-9) * (p - belief.mean)


def accepts(gate: str, belief: Belief, p: float, noise: float, bar: float, dice: float) -> bool:
    """Does a gate accept a deal? noise: variance of the reading p; dice: uniform in [0, 1].

    Payoffs are linear in p, so the expectation over the noise of *one* reading decides as the
    reading does: soft differs from hard only by what else it knows. "mean" and "latch" are hard
    rules with a memory, to tell whether memory or softness makes the difference.
    """
    if gate == "open":
        return True
    if gate == "chance":  # the further above the bar, the likelier
        return dice < sigmoid((p - bar) / 0.1)
    if gate == "soft":
        p = expect(belief, p, noise)
    if gate == "agent":  # its record alone
        p = belief.mean
    if gate == "mean":  # of the last six readings
        p = (sum(belief.recent) + p) / (len(belief.recent) + 1)
    if gate == "latch":  # hysteresis
        bar += -0.1 if belief.yes else 0.1
    return p >= bar


def decide(gate: str, belief: Belief, p: float, noise: float, bar: float, dice: float) -> bool:
    """Accept this deal? Then the reading becomes part of the belief."""
    if gate not in GATES:
        raise ValueError(f"decide: there is no gate {gate!r}; choose {', '.join(GATES)}")
    belief.yes = accepts(gate, belief, p, noise, bar, dice)
    belief.recent.append(p)
    learn(belief, p)
    return belief.yes


# --------------------------------------------------------------------------- who deals with whom


def graph(deals: Iterable[Interaction], names: list[str]) -> tuple[np.ndarray, list]:
    """(proposals of i to j [n, n], their p [n][n]). Work, which has no partner, is left out."""
    at = {name: i for i, name in enumerate(names)}
    quality: list[list[list[float]]] = [[[] for _ in names] for _ in names]
    for deal in deals:
        if deal.counterparty:
            quality[at[deal.initiator]][at[deal.counterparty]].append(deal.p)
    return np.array([[len(p) for p in row] for row in quality], dtype=float), quality


def pair_tests(counts: np.ndarray, quality: list, expected: np.ndarray | None = None) -> dict:
    """{(i, j): (p-value of dealing this often, of dealing this well)} for i < j, one-sided.

    By chance, the number of a pair's deals is Poisson around `expected` [n, n], and the quality of
    i's deals does not depend on the partner, so those with j have no special ranks among them
    (Mann-Whitney, both directions added). expected: proposals of i to j if i took anybody who was
    there. None: fitted to how busy i and how popular j is (quasi-independence, Goodman 1968). Give
    it if you know it: popularity can have good reasons, but fitted to a ring, it makes the others
    look like one.
    """
    n = len(counts)
    shapes = {counts.shape, (n, n) if expected is None else expected.shape}
    if shapes != {(n, n)} or len(quality) != n:
        agents = f"counts are {counts.shape}, quality is of {len(quality)} agents"
        raise ValueError(f"pair_tests: {agents}; give all for the same ones")
    if expected is None:
        expected = np.ones((n, n)) - np.eye(n)
        for _ in range(30):
            expected *= (counts.sum(1) / np.maximum(expected.sum(1), 1e-12))[:, None]
            expected *= (counts.sum(0) / np.maximum(expected.sum(0), 1e-12))[None]
    z = np.zeros((n, n))
    for i in range(n):
        flat = np.array([p for with_j in quality[i] for p in with_j])
        partner = np.repeat(np.arange(n), [len(with_j) for with_j in quality[i]])
        ranks, total = stats.rankdata(flat), len(flat)
        for j in set(partner.tolist()):
            m = (partner == j).sum()
            if m < total:
                deviation = math.sqrt((total + 1) * (total - m) / (12 * m))
                z[i, j] = (ranks[partner == j].mean() - (total + 1) / 2) / deviation
    both, by_chance = counts + counts.T, np.maximum(expected + expected.T, 1e-9)
    at_least = special.pdtrc(np.maximum(both - 1, 0), by_chance)  # P(Poisson >= both)
    often = np.where(both > 0, at_least, 1.0)
    well = special.ndtr(-(z + z.T) / math.sqrt(2))
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    return {pair: (float(often[pair]), float(well[pair])) for pair in pairs}


def colluding(counts, quality, expected=None, alpha: float = 0.01) -> list[tuple[int, int]]:
    """The pairs with too many or too good deals for chance, by Holm's correction (1979).

    Of honest agents at most one look in 1 / alpha names any, however the tests are dependent.
    """
    tests = pair_tests(counts, quality, expected)
    tests = sorted((value, pair) for pair, values in tests.items() for value in values)
    found = set()
    for k, (value, pair) in enumerate(tests):
        if value > alpha / (len(tests) - k):
            break
        found.add(pair)
    return sorted(found)


# --------------------------------------------------------------------------- the tiers


@dataclass(frozen=True)
class Stack:
    """A governance: the mechanisms that are on, and their settings."""

    gate: str = "soft"  # one of GATES
    bar: float = 0.5  # the least p of an accepted deal
    local: bool = False  # stakes and audits, and the tax, decay and breaker of swarm/economy.py
    vote: bool = False  # of the council
    pairs: bool = False  # collusion detection by the council
    always: bool = False  # the council meets every epoch instead of on a signal
    tax: float = 0.05
    decay: float = 0.99  # of reputation per step, 0.95 per epoch of five
    threshold: float = 15.0  # of reputation, for the breaker
    stake: float = 10.0  # resources needed to propose, and lost if an audit finds a fault
    audit: float = 0.1  # share of accepted deals that are audited
    surprised: float = 0.5  # the same for readings two standard deviations off the belief
    audit_cost: float = 0.2  # welfare: a tenth of what a good deal yields
    confidence: float = 4.0  # standard errors of the step that calls the council
    freeze: int = 3  # epochs
    majority: float = 0.5  # a larger share of all voters has to name a member


def audit_rate(stack: Stack, belief: Belief, p: float, flagged: bool) -> float:
    """The fast tier's trigger: higher if p is a surprise, doubled if the watch has flagged p."""
    surprise = (p - belief.mean) ** 2 > 4 * (belief.var + belief.spread)
    return min(1.0, (stack.surprised if surprise else stack.audit) * (2 if flagged else 1))


def call_council(stack: Stack, series: list[float], watch: Watch, epochs_since: int) -> bool:
    """The slow tier's signal: a step in the mean p of proposals since it met, or a proxy too kind.

    The latter at most every five epochs: it takes time to see whether a meeting helped.
    """
    if stack.always or metrics.change(series, stack.confidence) is not None:
        return True
    return epochs_since >= 5 and bool(too_kind(watch))


def outvoted(ballots: dict[str, set[str]], majority: float) -> list[str]:
    """The members named by more than `majority` of all voters. ballots: whom each wants frozen."""
    named = [name for ballot in ballots.values() for name in ballot]
    return sorted(name for name in set(named) if named.count(name) > majority * len(ballots))


if __name__ == "__main__":
    print("signals -> p -> payoff of the initiator, worth to all")
    for row in ((0.8, 0, 0, 0, 0.6), (0.2, 1, 1, 0, 0.0), (-0.6, 3, 2, 1, -0.4)):
        v, p = v_hat(Signals(*row)), proxy(Signals(*row))
        worth = f"payoff {payoff(p):+.2f}  worth {social(p):+.2f}"
        print(f"  {Signals(*row)}  v {v:+.2f}  p {p:.2f}  {worth}")

    # an agent that never changes, and a proxy that is not sure
    rng, watch = np.random.default_rng(0), Watch()
    readings = np.clip(0.6 + 0.15 * rng.standard_normal(60), 0, 1)
    print(
        "\n60 readings of an agent whose p is 0.6, bar 0.5. thrash: how often the decision changes"
    )
    for gate in ("hard", "latch", "mean", "soft"):
        belief = Belief()
        yes = [decide(gate, belief, p, 0.15**2, 0.5, 0) for p in readings]
        deals = [Interaction(0, "trade", "a", "b", *deal) for deal in zip(yes, readings)]
        soft, hard = measures(deals), measures(deals, hard=True)
        accepted = f"thrash {thrash(deals):.2f}  accepted {soft['acceptance']:.2f}"
        toxicity = f"toxicity {soft['toxicity']:.2f}, hard {hard['toxicity']:.2f}"
        print(f"  {gate:5} {accepted}  {toxicity}")
    watch.rereads.extend(zip(readings[:30], readings[30:]))
    watch.audits.extend((p, rng.random() < p - 0.3) for p in readings)
    print("  the watch:", noisy(watch), "/", too_kind(watch))

    names, deals = [f"bot_{i}" for i in range(8)], []
    for step in range(400):
        i, j, p = step % 8, int(rng.integers(7)), 0.6
        j += j >= i
        if i >= 6 and rng.random() < 0.5:
            j, p = 13 - i, 0.8
        p += 0.1 * rng.standard_normal()
        deals.append(Interaction(step, "trade", names[i], names[j], True, p))
    pairs = [(names[i], names[j]) for i, j in colluding(*graph(deals, names))]
    print("\n400 deals; bot_6 and bot_7 do half of theirs with each other. Named:", pairs)
    assert pairs == [("bot_6", "bot_7")]
