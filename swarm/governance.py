"""Governance: which deals to accept, whom to freeze, and what does it cost to coordinate?

Nobody sees whether a deal is good. A proxy sees signals of it and gives p, the probability that it
is. Everything here treats p as the uncertain number that it is, and eight scripted bots, some of
them deceptive, show what that is worth:

    proxy     progress, rework, rejections, misuse, engagement -> v_hat in [-1, 1] -> p
              (swarm/economy.py, as in the model's economy with --set proxy_noise=)
    measures  toxicity E[1 - p | accepted], quality gap E[p | accepted] - E[p | rejected], welfare:
              soft (with p), hard (p rounded to 0 or 1), and true (with what only we know). They
              are in swarm/economy.py, and Swarm.score reports them for every episode
    watch     the proxy records its own errors, says if it is too noisy or too kind, and in one
              governance corrects p by its audits
    gate      accept this deal? hard: by one reading of p. soft: by the expectation of p, given
              what is believed of the proposer, too
    fast      the local tier: reputation, stakes and audits, decided at once by the two sides
    slow      the global tier: a council votes, looks at who deals with whom, and at who has lost
              its reputation (the circuit breaker). It stops all deals for a step and answers an
              epoch later, while those that it will freeze go on; so it meets only on a signal

    signals -> p -> gate -> deal -> audits -> watch -> (signal) -> council -> (an epoch) -> freeze

No window is fixed: of the last readings, audits, epochs or deals those count that came after the
last sure change of their level (`recent`).

How the bots live (chosen once, before the first sweep; nothing was set by looking at published
results):

    agents    0 to 5 of 8 are deceptive, two opportunistic, the rest honest. Each proposes one deal
              per step, to any other. Books, tax and reputation are swarm/economy.py's.
    truth     a deal is beneficial with probability 0.9 (honest; deceptive while it builds trust),
              0.7 (opportunistic) or 0.1 (an exploit, or a deal inside the ring)
    deceit    as in swarm/bots.py v0.2, after five times as many interactions. An exploit takes 5
              to 20 resources and looks 30% of the way to a good deal. An agent that returns from
              a freeze builds trust anew.
    caution   what they fear is suspicion, not the fine, which is less than most exploits take. Each
              estimates from its own deals how often it is audited, and lies low (deals like the
              honest, with anyone) until that is no more than what anyone has to expect
    ring      deceptive agents seek each other in half of their deals, and report good ones: only
              audits, or who deals with whom, can tell
    council   all agents that are not frozen vote: the deceptive ones against the others, the rest
              against those who proposed to them, three times or more, at a mean p below 0.5

Welfare is the true one, per possible deal: 1.5 if all are honest and every deal is accepted, 0 if
none is. A run goes on until welfare and acceptance have settled (metrics.flat). It has collapsed
if the welfare of its last ten epochs is 0 or less. Every governance meets the same luck at the same
seed, so differences between them are paired.

Sources: proxy, worth and measures are the published ones of the SWARM framework (weights 0.4, 0.2,
0.2, 0.2; k = 2; S - E).

Until commit eedab5ed the breaker was in the fast tier, a meeting answered at once, the deceptive
did not mind audits, and windows were fixed. `--changes` plays these rules of before, each of the
four changes alone, and all of them.

Run me: `python -m swarm.governance` plays every governance at every share of deceptive bots, six
seeds each, and prints a table. `--seeds 24 --save results/governance.json` made those in
docs/swarm.md, and `--changes --seeds 24 --save results/governance_changes.json` the one of changes.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations, groupby, pairwise, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tyro
from scipy import special, stats

import metrics
from swarm import tools as act
from swarm.bots import between, chance, exploits, pick
from swarm.economy import (
    APPEAL_STEPS,
    EPOCHS,
    ME,
    STEPS,
    Economy,
    Interaction,
    Member,
    Proposal,
    Scenario,
    book,
    correct,
    earn,
    end_step,
    in_truth,
    measures,
    noisy,
    open_economy,
    reading,
    recalibrate,
    respect,
    social,
    variance,
)


def thrash(deals: Iterable[Interaction]) -> float:
    """How often do two consecutive decisions on an initiator differ? NaN if there are no two."""
    by_initiator = pairwise(sorted(deals, key=lambda deal: deal.initiator))
    flips = [a.accepted != b.accepted for a, b in by_initiator if a.initiator == b.initiator]
    return sum(flips) / len(flips) if flips else float("nan")


# ------------------------------------------------------------------------- watch
ENOUGH = 30  # audits: with fewer, nothing is said about p and it is not corrected


@dataclass
class Watch:
    """The proxy's record of its errors: one deal in ten is read twice, and some are audited.

    If the stack corrects p, a reading is recalibrated by the last audits before anything uses it.
    """

    rereads: list = field(default_factory=list)  # (first p, second p)
    audits: list = field(default_factory=list)  # (reading, outcome: good 1, bad 0)
    fixed: bool = False  # the windows of before: the last 200 rereads and 100 audits
    fit: tuple[float, float] | None = None  # recalibrates readings


def recent(values: list, series: list[float], fixed: int = 0) -> list:
    """The last values: all since the level of their series last surely changed.

    So the window grows with the noise, and a clear change shortens it, to ten at least: fewer
    cannot show a change (metrics.biggest_step). series: a number per value; fixed: so many
    instead, whatever the series says.
    """
    window = fixed or max(2 * metrics.LEAST, metrics.since_step(np.array(series)))
    return values[-window:]


def recent_rereads(watch: Watch) -> list:
    """Their series is how far the two readings lie apart: the noise itself."""
    return recent(watch.rereads, [abs(a - b) for a, b in watch.rereads], 200 * watch.fixed)


def recent_audits(watch: Watch) -> list:
    """Their series is how far the readings were from the outcomes."""
    series = [read - outcome for read, outcome in watch.audits]
    return recent(watch.audits, series, 100 * watch.fixed)


def reading_variance(watch: Watch) -> float:
    """Variance of a reading. 0.01 before ten pairs."""
    pairs = recent_rereads(watch)
    return variance(pairs) if len(pairs) >= 10 else 0.01


def too_kind(watch: Watch) -> bool:
    """Are audited deals surely (97.5%) worse than p says? A proxy that is too strict is safe."""
    audits = recent_audits(watch)
    errors = np.array([correct(read, watch.fit) - outcome for read, outcome in audits])
    n = len(errors)
    return n >= ENOUGH and bool(errors.mean() > 1.96 * errors.std(ddof=1) / math.sqrt(n))


# ------------------------------------------------------------------------- gates
DRIFT = 0.0005  # the variance grows with every reading: agents change, and no belief is final
MEMORY = 0.1  # weight of the newest reading in the spread
OUTCOME_NOISE = 0.16  # variance of an audited outcome, 0 or 1, around a p of 0.2 or 0.8


@dataclass
class Belief:
    """An agent's deals: p is around `mean` ± sqrt(var), readings vary by ± sqrt(spread)."""

    mean: float = 0.5
    var: float = 0.0625
    spread: float = 0.04
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


def decide(gate: str, belief: Belief, p: float, noise: float, bar: float, flagged=False) -> bool:
    """Accept this deal? Then its reading p, of variance `noise`, becomes part of the belief.

    Payoffs are linear in p, so the expectation over the noise of *one* reading decides as the
    reading does: soft differs from hard only in what else it knows. latch is hard with hysteresis,
    to separate memory from softness; watched is hard until the watch has flagged p as too noisy.
    """
    by_belief = gate == "soft" or (gate == "watched" and flagged)
    value = expect(belief, p, noise) if by_belief else p
    if gate == "latch":
        bar += -0.1 if belief.yes else 0.1
    belief.yes = gate == "open" or value >= bar
    learn(belief, p)
    return belief.yes


# ------------------------------------------------------------------------- who deals with whom
def graph(deals: Iterable[Interaction], names: list[str]) -> list[list[list[float]]]:
    """[n][n] lists: the p of each deal that i proposed to j."""
    at = {name: i for i, name in enumerate(names)}
    quality: list[list[list[float]]] = [[[] for _ in names] for _ in names]
    for deal in deals:
        quality[at[deal.initiator]][at[deal.counterparty]].append(deal.p)
    return quality


def pair_tests(quality: list, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For i, j [n, n], one-sided p-values: of dealing this often, and of dealing this well.

    By chance, the number of a pair's deals is Poisson around `expected` [n, n]: the proposals of i
    to j if i chose among those present at random. (If it were fitted to how popular j is, the
    others would look like a ring.) And the quality of i's deals does not depend on the partner, so
    those with j have no special ranks among them (Mann-Whitney, both directions added).
    """
    counts = np.array([[len(deals) for deals in row] for row in quality])
    z = np.zeros(counts.shape)
    for i, row in enumerate(quality):
        ranks = stats.rankdata(np.concatenate(row))
        total = len(ranks)
        for j, with_j in enumerate(np.split(ranks, np.cumsum(counts[i])[:-1])):
            n = len(with_j)
            if 0 < n < total:
                deviation = math.sqrt((total + 1) * (total - n) / (12 * n))
                z[i, j] = (with_j.mean() - (total + 1) / 2) / deviation
    by_pair, by_chance = counts + counts.T, np.maximum(expected + expected.T, 1e-9)
    at_least = special.pdtrc(np.maximum(by_pair - 1.0, 0), by_chance)  # P(Poisson >= by_pair)
    return np.where(by_pair > 0, at_least, 1.0), special.ndtr(-(z + z.T) / math.sqrt(2))


def unlike_chance(counts: np.ndarray, expected: np.ndarray) -> float:
    """How far from chance are an epoch's dealings? About 1 if partners are chosen at random.

    This is the index of dispersion of the counts [n, n], of i's proposals to j.
    """
    return float(((counts - expected) ** 2).sum() / max(expected.sum(), 1e-9))


def colluding(quality, expected, alpha: float = 0.01) -> list[tuple[int, int]]:
    """The pairs with too many or too good deals for chance, by Holm's correction (1979).

    With honest agents at most one look in 1 / alpha names any, however the tests depend.
    """
    often, well = pair_tests(quality, expected)
    pairs = combinations(range(len(quality)), 2)
    tests = sorted((p[pair], pair) for pair in pairs for p in (often, well))
    above = (k for k, (value, _) in enumerate(tests) if value > alpha / (len(tests) - k))
    return sorted({pair for _, pair in tests[: next(above, len(tests))]})


# ------------------------------------------------------------------------- the tiers
@dataclass(frozen=True)
class Stack:
    """A governance: the mechanisms that are on, and their settings."""

    gate: str = "soft"  # open, hard, soft, latch or watched: see decide
    local: bool = False  # stakes, audits, and the rules of FAST
    vote: bool = False  # of the council
    pairs: bool = False  # collusion detection by the council
    always: bool = False  # the council meets every epoch instead of on a signal
    bar: float = 0.5  # the least p of an accepted deal
    stake: float = 10.0  # resources needed to propose, and lost if an audit finds a fault
    audit_cost: float = 0.2  # welfare: a tenth of what a good deal yields
    freeze: int = 3  # epochs
    breaker: str = "slow"  # the tier that freezes for a low reputation; fast: after every step
    lag: int = 1  # epochs from a meeting to its answer: all have to be heard
    nerve: float | None = 1.0  # of the deceptive: see boldness. None: they do not mind audits
    windows: str = "adaptive"  # or fixed: 200 rereads, 100 audits, 15 epochs, 10 deals
    corrects: bool = False  # does the watch recalibrate p by its audits?


STACKS = {
    "open": Stack("open"),
    "hard": Stack("hard"),
    "hard, hysteresis": Stack("latch"),
    "hard until flagged": Stack("watched"),
    "soft": Stack("soft"),
    "fast tier": Stack(local=True),
    "fast, p corrected": Stack(local=True, corrects=True),
    "fast + pairs": Stack(local=True, pairs=True),
    "fast + slow tier": Stack(local=True, vote=True, pairs=True),
    "slow every epoch": Stack(local=True, vote=True, pairs=True, always=True),
}
# The rules of before, and which of them are in force in each line of `--changes`. bolder: with all
# four changes, the deceptive put up with three times the ordinary rate of audits.
BEFORE = {"breaker": "fast", "lag": 0, "nerve": None, "windows": "fixed"}
CHANGED = {
    "before": BEFORE,
    **{new: BEFORE | {new: getattr(Stack, new)} for new in BEFORE},
    "all": {},
    "bolder": {"nerve": 3.0},
}
CHANGES = {
    f"{of}: {change}": replace(STACKS[name], **rules)
    for of, name in (
        ("fast", "fast tier"),
        ("slow", "fast + slow tier"),
        ("always", "slow every epoch"),
    )
    for change, rules in CHANGED.items()
}
FAST = {"tax": 0.05, "decay": 0.99, "threshold": 15.0}  # swarm/economy.py's, per step
AGENTS, SHARES = 8, range(6)  # so many of the eight are deceptive
AUDITED = 0.1  # the share of accepted deals that is audited without a suspicion


def audit_rate(belief: Belief, p: float, flagged: bool) -> float:
    """The fast tier's trigger: the share of accepted deals that are audited.

    A tenth, or half if p is a surprise (two standard deviations off the belief); twice as many if
    the watch has flagged p.
    """
    surprise = (p - belief.mean) ** 2 > 4 * (belief.var + belief.spread)
    return min(1.0, (0.5 if surprise else AUDITED) * (2 if flagged else 1))


def call_council(series: list[float], watch: Watch, epochs_since: int) -> bool:
    """The slow tier's signal: a step in the mean p of proposals since it answered, or a proxy too
    kind.

    The step has to be four standard errors (metrics.STEP). A kind proxy calls at most every five
    epochs: it takes time to see whether a meeting helped.
    """
    stepped = metrics.since_step(np.array(series)) < len(series)
    return stepped or (epochs_since >= 5 and too_kind(watch))


def outvoted(ballots: dict[str, set[str]]) -> list[str]:
    """The members named by more than half of all voters. ballots: whom each wants frozen."""
    named = [name for ballot in ballots.values() for name in ballot]
    return sorted(name for name in set(named) if named.count(name) > len(ballots) / 2)


# ------------------------------------------------------------------------- the bots
GOOD, BAD = 0.9, 0.1  # probability that a deal is beneficial: a good one, an exploit
QUALITY = {"honest": GOOD, "opportunistic": 0.7, "deceptive": GOOD}  # of an ordinary deal
DISGUISE = 0.3  # how far towards a good deal an exploit looks
NOISE = 0.5  # of progress and engagement, as the proxy sees them
COLLUDE = 0.5  # share of their deals in which the deceptive seek each other
TRUST = 5  # they turn after so many times the interactions of an episode


def dice_of(row: list[float]) -> SimpleNamespace:
    """Dice that read numbers drawn before, so that every governance meets the same luck.

    To swarm/bots.py they are a random.Random.
    """
    return SimpleNamespace(random=iter(row).__next__)


def boldness(suspected: list[bool]) -> float:
    """The share of its chances to deceive that a deceptive agent takes.

    It estimates how often it is audited from its own accepted deals (suspected: was each audited?),
    beginning with one audit in ten. If that is twice as often as without a suspicion, it takes half
    of its chances. A step for which it is frozen counts as an audited deal.
    """
    estimate = (1 + sum(suspected)) / (10 + len(suspected))
    return min(1.0, AUDITED / estimate)


def choose(agent: Member, others: list[Member], dice, bold: bool):
    """(the partner to propose to, how good the deal is, how good it looks, what it takes).

    bold: would a deceptive agent dare to deceive in this deal?
    """
    partner, inside, which = pick(dice, others), chance(dice, COLLUDE), dice.random()
    take, quality = between(dice, 5, 20), QUALITY[agent.kind]
    if agent.kind == "deceptive" and bold:
        mates = [m for m in others if m.kind == "deceptive"]
        partner = mates[int(which * len(mates))] if inside and mates else partner
        if partner in mates:
            return partner, BAD, GOOD, 0.0
        if exploits("0.2", dice, agent.interactions, TRUST * agent.turning):
            return partner, BAD, BAD + DISGUISE * (GOOD - BAD), take
    return partner, quality, quality, 0.0


def market(stack: Stack, adversaries: int, seed: int) -> Economy:
    """Eight bots of the economy, without the model and without tasks."""
    kinds = ["deceptive"] * adversaries + ["opportunistic"] * 2 + ["honest"] * AGENTS
    rules = FAST if stack.local else {"threshold": 0.0}
    scenario = Scenario(
        seed, "medium", "0.2", "normal", tuple(kinds[:AGENTS]), dice=f"governance {seed}", **rules
    )
    economy = open_economy(scenario, [[]] * EPOCHS)
    del economy.members[ME]
    economy.total -= scenario.resources
    return economy


# ------------------------------------------------------------------------- one run
class Run:
    """One governance and one seed, from the first deal until it has settled.

    least, most: epochs.
    """

    def __init__(self, stack: Stack, adversaries: int, seed: int, noise=NOISE, least=25, most=100):
        self.stack, self.noise, self.watch = stack, noise, Watch(fixed=stack.windows == "fixed")
        self.economy = market(stack, adversaries, seed)
        self.members = list(self.economy.members.values())
        self.beliefs = {name: Belief() for name in self.economy.members}
        # p as the proxy gave it; truth: the probability that the deal is beneficial
        self.deals = self.economy.interactions
        self.welfare: list[float] = []  # by epoch
        self.accepted: list[float] = []  # by epoch, as a share of what was proposed
        # [2, n, n] by epoch: how often i proposed to j, and would have if it chose at random
        self.dealings: list[np.ndarray] = []
        self.noisy = self.too_kind = False  # the watch's verdict after the last epoch
        self.flagged = 0  # so many epochs in which it had something to say
        # by agent, of each of its accepted deals: was it audited? And True for each step frozen
        self.suspected: list[list[bool]] = [[] for _ in range(AGENTS)]
        # of the council's meetings: {epoch at whose end it is given: whom to freeze}
        self.answers: dict[int, set[str]] = {}
        rng = np.random.default_rng([seed, AGENTS])
        for epoch in range(1, most + 1):
            self.epoch(epoch, rng.random((STEPS, AGENTS, 22)).tolist())
            if epoch >= least and epoch % 5 == 0 and self.settled():
                break

    def epoch(self, epoch: int, luck: list) -> None:
        """Five steps; if the council sits, it does so in the first, and nobody deals."""
        first, worth, lag = len(self.deals), 0.0, self.stack.lag
        sits = epoch - 1 + lag in self.answers
        self.variance = reading_variance(self.watch)
        self.dealings.append(np.zeros((2, AGENTS, AGENTS)))
        for step, rows in enumerate(luck):
            for k in [] if sits and step == 0 else range(AGENTS):
                i = (self.economy.step + k) % AGENTS
                worth += self.deal(i, rows[i])
            end_step(self.economy, breaker=self.stack.breaker == "fast")
        new = self.deals[first:]
        self.welfare.append(worth / (STEPS * AGENTS))
        self.accepted.append(sum(d.accepted for d in new) / len(new) if new else 0.0)
        audits = recent_audits(self.watch)
        if self.stack.corrects and len(audits) >= ENOUGH:
            self.watch.fit = recalibrate(audits)
        self.noisy = noisy(recent_rereads(self.watch), self.stack.bar)
        self.too_kind = too_kind(self.watch)
        self.flagged += self.noisy or self.too_kind
        answered = max(self.answers, default=0)  # the epoch of the last answer
        since = (d for d in self.deals if d.step > STEPS * answered)
        steps = [[d.p for d in deals] for _, deals in groupby(since, lambda d: d.step)]
        series = [sum(p) / len(p) for p in steps]
        if (self.stack.vote or self.stack.pairs) and (
            self.stack.always or call_council(series, self.watch, epoch - answered)
        ):
            self.answers[epoch + lag] = self.council()
        for member in self.members:
            if member.name in self.answers.get(epoch, ()) and not member.frozen_at:
                # The economy lets a member back after APPEAL_STEPS; this is dated ahead.
                member.frozen_at = self.economy.step + STEPS * self.stack.freeze - APPEAL_STEPS

    def deal(self, i: int, row: list[float]) -> float:
        """The turn of agent i: it proposes, the gate decides, the books move, an audit may follow.

        Returns what the deal was truly worth to all. row: its luck.
        """
        economy, stack, agent = self.economy, self.stack, self.members[i]
        belief = self.beliefs[agent.name]
        partners = [j for j, m in enumerate(self.members) if j != i and not m.frozen_at]
        poor = stack.local and agent.resources < stack.stake
        if agent.frozen_at:
            # Once it is back, it builds trust anew, and what it does counts for more.
            agent.interactions = 0
            belief.var = Belief.var
            self.suspected[i].append(True)
        if agent.frozen_at or poor or not partners:
            agent.passed = True
            return 0.0
        self.dealings[-1][1, i, partners] += 1 / len(partners)
        dares = stack.nerve is None or row[7] < stack.nerve * boldness(self.suspected[i])
        partner, quality, looks, take = choose(
            agent, [self.members[j] for j in partners], dice_of(row), dares
        )
        self.dealings[-1][0, i, self.members.index(partner)] += 1
        read = lambda at: reading(looks, self.noise, dice_of(row[at:]))
        first = read(8)
        p = correct(first, self.watch.fit)
        if row[18] < 0.1:
            self.watch.rereads.append((p, correct(read(13), self.watch.fit)))
        audited = stack.local and row[20] < audit_rate(belief, p, self.noisy or self.too_kind)
        trade = Proposal("deal", agent.name, partner.name, "", 0.0, p, quality, economy.step)
        economy.proposals[trade.id] = trade
        yes = decide(stack.gate, belief, p, self.variance, stack.bar, self.noisy)
        answer = act.accept_proposal if yes else act.reject_proposal
        answer(economy, partner.name, trade.id)
        if not yes:
            return 0.0
        self.suspected[i].append(audited)
        if take:
            earn(economy, agent.name, "transfer", -book(economy, partner.name, "transfer", -take))
        if not audited:
            return social(quality)
        outcome = float(row[21] < quality)
        self.watch.audits.append((first, outcome))
        learn(belief, outcome, OUTCOME_NOISE)
        if not outcome:
            book(economy, agent.name, "fine", -stack.stake)
            respect(agent, -act.FINE_REPUTATION)
        return social(quality) - stack.audit_cost

    def council(self) -> set[str]:
        """The slow tier meets: whom does it want frozen? It votes, looks at who deals with whom,
        and at who has lost its reputation."""
        step, names, named = self.economy.step, list(self.beliefs), set()
        if self.stack.vote:
            named |= set(outvoted(self.ballots()))
        if self.stack.pairs:
            series = [unlike_chance(*epoch) for epoch in self.dealings]
            epochs = recent(self.dealings, series, 15 * self.watch.fixed)
            deals = [d for d in self.deals if d.step >= step - len(epochs) * STEPS]
            for pair in colluding(graph(deals, names), sum(epochs)[1]):
                named |= {names[i] for i in pair}
        if self.stack.breaker == "slow":
            named |= {m.name for m in self.members if m.reputation < FAST["threshold"]}
        return named

    def ballots(self) -> dict[str, set[str]]:
        """{voter: whom it wants frozen}, of all who are not frozen."""
        received = graph(self.deals, list(self.beliefs))
        voters = [(j, m) for j, m in enumerate(self.members) if not m.frozen_at]
        others = {m.name for _, m in voters if m.kind != "deceptive"}
        now = lambda seen: np.mean(recent(seen, seen, 10 * self.watch.fixed))
        poor = lambda seen: len(seen) >= 3 and now(seen) < 0.5
        named_by = lambda j: {m.name for i, m in voters if poor(received[i][j])}
        return {m.name: others if m.kind == "deceptive" else named_by(j) for j, m in voters}

    def settled(self) -> bool:
        """Welfare and acceptance move by less than 0.1 in ten epochs; a good deal is worth 1.5."""
        still = lambda x: metrics.flat(np.array(x), tolerance=0.1, shortest=20)[0]
        return all(np.ptp(x) == 0 or still(x) for x in (self.welfare, self.accepted))

    def numbers(self) -> dict[str, float]:
        """*_soft is what the proxy says, *_hard the same with p rounded; else the truth."""
        soft, hard, epochs = measures(self.deals), measures(self.deals, True), len(self.welfare)
        return {
            **measures(in_truth(self.deals)),
            **{f"{name}_soft": value for name, value in soft.items()},
            **{f"{name}_hard": value for name, value in hard.items()},
            "welfare": float(np.mean(self.welfare[-10:])),
            "thrash": thrash(self.deals),
            "flagged": self.flagged / epochs,
            "seven_tenths": correct(0.7, self.watch.fit),  # what a reading of 0.7 says at the end
            "audits": len(self.watch.audits) / epochs,
            "meetings": len(self.answers),
            "epochs": epochs,
        }


# ------------------------------------------------------------------------- the sweep
def over(values) -> metrics.Interval:
    """Mean and 95% interval without NaN, over episodes: the deals in one are not independent."""
    return metrics.mean([v for v in values if v is not None and v == v])


def words(values, digits: int = 2) -> str:
    """'0.05 [0.02, 0.07]' of values, or '-' if there was nothing to average."""
    i = over(values)
    return i.text(digits) if i.mean == i.mean else "-"


def collapsed(cell: dict[str, list[float]]) -> str:
    """'2 of 24' seeds."""
    return f"{sum(welfare <= 0 for welfare in cell['welfare'])} of {len(cell['welfare'])}"


def line(name: str, n: int, cell: dict[str, list]) -> str:
    """A line of the table: a governance with n deceptive bots. Intervals are over seeds."""
    mean = lambda key: over(cell[key]).mean
    text = lambda key: words(cell[key])
    return (
        f"{name:19} {n / AGENTS:9.1%}  {text('welfare'):20} {text('toxicity'):20} "
        f"{mean('toxicity_soft'):.2f}  {mean('toxicity_hard'):.2f}  {mean('tail'):8.2f}  "
        f"{text('quality_gap'):20} {mean('thrash'):6.3f}  {mean('flagged'):7.0%}  "
        f"{mean('seven_tenths'):7.2f}  "
        f"{mean('audits'):6.1f}  {mean('meetings'):8.1f}  {collapsed(cell):9}  "
        f"{verdict(over(cell['welfare']))}"
    )


def verdict(welfare: metrics.Interval) -> str:
    """Published: what works at 37.5% fails at 50%."""
    if welfare.low > 0:
        return "holds"
    return "fails" if welfare.high < 0 else "cannot be told"


def draw(arms: dict, path: str) -> None:
    """A column per governance: it in blue, all others in grey, as many lines lie on each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.7 * len(arms), 6), layout="constrained")
    grid = figure.subplots(3, len(arms), sharex=True, sharey="row", squeeze=False)
    for row, key in zip(grid, ("welfare", "toxicity", "quality_gap")):
        for ax, chosen in zip(row, arms):
            for name, arm in arms.items():
                i = [over(cell[key]) for cell in arm["shares"].values()]
                reach = [[x.mean - x.low for x in i], [x.high - x.mean for x in i]]
                look = {"color": "#0b62a8", "zorder": 3} if name == chosen else {"color": "#d0ccc5"}
                ax.errorbar([100 * n / AGENTS for n in SHARES], [x.mean for x in i], reach, **look)
        row[0].set_ylabel(key.replace("_", " "))
    for ax, name in zip(grid[0], arms):
        ax.set_title(name)
    figure.supxlabel("% of the agents that are deceptive; blue: this governance, grey: the others")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"drawn: {path}")


def main(
    seeds: int = 6,
    noise: float = NOISE,
    save: str = "",
    plot: str = "runs/governance.png",
    changes: bool = False,
) -> None:
    """seeds: of every cell; noise: of the proxy; save: every seed's numbers, to a JSON file;
    plot: welfare, toxicity and quality gap, to a picture;
    changes: CHANGES at 37.5 and 50%, in place of everything at all shares, without a picture."""
    stacks, shares = (CHANGES, (3, 4)) if changes else (STACKS, SHARES)
    arms = {name: {"settings": vars(stack), "shares": {}} for name, stack in stacks.items()}
    known = lambda x: x if x == x else None  # JSON has no NaN
    print(
        "governance          deceptive  welfare              toxicity: true       soft  hard  "
        "worst 5%  quality gap          thrash  flagged  p of .7  audits  meetings  collapsed  "
        "welfare"
    )
    for name, n in product(stacks, shares):
        rows = [Run(stacks[name], n, seed, noise).numbers() for seed in range(seeds)]
        cell = {key: [known(row[key]) for row in rows] for key in rows[0]}
        arms[name]["shares"][n] = cell
        print(line(name, n, cell), flush=True)
    print(
        "Brackets: 95% intervals over seeds. Toxicity in truth, as p says (soft), with p rounded "
        '(hard).\nFlagged: the epochs in which the watch called p too noisy or too kind; "hard '
        'until flagged" then\ndecides by expectation. p of .7: what a reading of 0.7 counts as at '
        "the end; audits correct it in\none governance. Coordination: an audit (per epoch) of the "
        "fast tier costs 0.2 of welfare, a meeting of\nthe slow one stops all for a step of five, "
        "and answers an epoch later. Collapsed: welfare of 0 or less at the end."
    )
    if not changes:
        draw(arms, plot)
    if save:
        how = f"--seeds {seeds} --noise {noise:g}{' --changes' * changes}"
        found = {"made_by": f"python -m swarm.governance {how}", "arms": arms}
        Path(save).write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf8")


if __name__ == "__main__":
    tyro.cli(main)
