"""Eight bots under a governance, 0 to 5 of them deceptive: one run, from the first deal to its numbers.
lab/swarm/governance_sweep.py does many.

The bots deal with each other by the rules of swarm/economy.py (its books, tax, reputation and breaker); swarm/governance.py decides what is
accepted and who is frozen. What was chosen, and fixed before the sweep was run:

    agents    deceptive ones replace honest ones, 0 to 5 of 8; always two opportunistic. Each proposes one deal a step, to anybody.
    truth     a deal is beneficial with probability 0.9 (honest; deceptive while it builds trust), 0.7 (opportunistic) or 0.1 (an exploit,
              or a deal inside the ring). The metrics can be taken of p, which governance sees, or of this truth, which only we know.
    proxy     progress and engagement are 2 quality - 1 plus noise of 0.5, cut to [-1, 1]; rework, rejections and misuse are Poisson with 3,
              2 and 1 times (1 - quality). Deals pay both sides what a trade of the economy pays, 5 (2p - 1): the books believe the proxy.
    deceit    as in swarm/bots.py v0.2, but after five times as many interactions, since a run is at least five times as long. An exploit
              takes 5 to 20 resources, which shows only afterwards, and looks 30% of the way to a good deal. Who returns from a freeze
              builds trust anew.
    ring      deceptive agents seek each other in half of their deals, and meet by chance in some of the rest: of three, 62% stay inside.
              Both sides report what is not true, so the proxy sees a good deal. Only audits, or who deals with whom, can tell.
    council   everybody not frozen votes: the deceptive against all others, the rest against whoever proposed to them, at least three
              times of late, at a mean p below 0.5. A meeting takes one step in which nobody deals.

welfare is that of the truth, per possible deal (8 agents x 5 steps an epoch): 1.5 if all were honest and all was accepted, 0 if nothing
is. A run goes on until welfare and acceptance have settled (metrics.trend, asked every five epochs from 25 on), at most 100 epochs. It has
collapsed if the welfare of its last ten epochs is 0 or less. All intervals are over seeds. Every stack meets the same luck at the same
seed, so differences between stacks are paired.

Mended after a first look at up to four seeds, before the sweep: the soft gate judged agents by their record alone, which a ring launders
(kept as the gate "agent"); collusion detection fitted who is sought after, and froze as many honest agents as deceptive ones (kept:
`expected` of pair_tests). Then came also the comparison "as open as hard", and the worlds in which life costs something. Nothing was set by
comparing with published results. Left out: networks (everybody meets everybody), tasks and posts, agents that learn from being caught.
"""

import math
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

import metrics
from swarm import governance as rules
from swarm import tools as act
from swarm.bots import between, chance, exploits, pick
from swarm.economy import APPEAL_STEPS, ME, STEPS, Economy, Interaction, Member, Scenario, book, earn, end_step, open_economy, respect
from swarm.governance import Belief, Signals, Stack, Watch

SHARES = range(6)  # of the eight agents, so many are deceptive
LOOK_BACK = 15  # epochs of deals that collusion detection sees

STACKS = {
    "open": Stack("open"),
    "hard": Stack("hard"),
    "soft": Stack("soft"),
    "local": Stack(local=True),
    "local + vote": Stack(local=True, vote=True),
    "local + pairs": Stack(local=True, pairs=True),
    "full": Stack(local=True, vote=True, pairs=True),
    "full, hard gate": Stack("hard", local=True, vote=True, pairs=True),
    "full, every epoch": Stack(local=True, vote=True, pairs=True, always=True),
}


@dataclass(frozen=True)
class World:
    """Everything that governance does not choose. The docstring above says why these numbers."""

    adversaries: int = 0
    opportunists: int = 2
    agents: int = 8
    good: float = 0.9
    fair: float = 0.7
    bad: float = 0.1
    disguise: float = 0.3
    noise: float = 0.5
    collude: float = 0.5
    trust: int = 5
    upkeep: float = 0.0  # resources a step that everybody pays
    least: int = 25  # epochs
    most: int = 100


# ------------------------------------------------------------------------------------------------ agents
class Dice:
    """Reads numbers drawn beforehand, so that every stack meets the same luck at the same step. To swarm/bots.py it is a random.Random."""

    def __init__(self, row):
        self.random = iter(row).__next__


NORMAL = NormalDist()


def poisson(mean: float, u: float) -> int:
    """By inversion: the smallest n with P(N <= n) > u."""
    n, term = 0, math.exp(-mean)
    total = term
    while u >= total and n < 50:
        n += 1
        term *= mean / n
        total += term
    return n


def observe(quality: float, noise: float, dice: Dice) -> Signals:
    """What a deal of that (apparent) quality shows."""
    shown = [max(-1.0, min(1.0, 2 * quality - 1 + noise * NORMAL.inv_cdf(dice.random() * (1 - 2e-9) + 1e-9))) for _ in range(2)]
    rework, rejections, misuse = (poisson(rate * (1 - quality), dice.random()) for rate in (3, 2, 1))
    return Signals(shown[0], rework, rejections, misuse, shown[1])


def choose(world: World, agent: Member, others: list[Member], dice: Dice) -> tuple[Member, float, float, float]:
    """Whom to propose a deal, how good it is, how good it looks, and what it takes from the other."""
    partner, inside, which, take = pick(dice, others), chance(dice, world.collude), dice.random(), between(dice, 5, 20)
    if agent.kind != "deceptive":
        quality = world.good if agent.kind == "honest" else world.fair
        return partner, quality, quality, 0.0
    mates = [m for m in others if m.kind == "deceptive"]
    if inside and mates:
        partner = mates[int(which * len(mates))]
    if world.collude and partner in mates:
        return partner, world.bad, world.good, 0.0
    if exploits("0.2", dice, agent.interactions, world.trust * agent.turning):
        return partner, world.bad, world.bad + world.disguise * (world.good - world.bad), take
    return partner, world.good, world.good, 0.0


def ballots(economy: Economy, received: dict[str, dict[str, deque]]) -> dict[str, set[str]]:
    """Whom everybody who is not frozen wants frozen. received[voter][proposer]: the last p's."""
    voters = [m for m in economy.members.values() if not m.frozen_at]
    poor = lambda seen: len(seen) >= 3 and sum(seen) / len(seen) < 0.5
    wants = lambda v, m: m.kind != "deceptive" if v.kind == "deceptive" else poor(received[v.name][m.name])
    return {v.name: {m.name for m in voters if wants(v, m)} for v in voters}


# ------------------------------------------------------------------------------------------------ one run
@dataclass
class Run:
    economy: Economy
    kinds: dict[str, str]
    deals: list[Interaction] = field(default_factory=list)  # with p as the proxy gave it
    truth: list[float] = field(default_factory=list)  # of each deal, the probability that it is beneficial
    welfare: list[float] = field(default_factory=list)  # by epoch
    accepted: list[float] = field(default_factory=list)  # by epoch, the share of what was proposed
    settled: bool = False
    meetings: int = 0
    flagged: int = 0  # epochs in which the proxy said not to trust it
    audits: int = 0
    frozen: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("honest", "opportunistic", "deceptive"), 0))  # by the council

    def true_deals(self) -> list[Interaction]:
        return [replace(deal, p=q) for deal, q in zip(self.deals, self.truth)]


def start(world: World, stack: Stack, seed: int) -> Economy:
    """Eight bots of the economy, without the model and without tasks."""
    kinds = ["deceptive"] * world.adversaries + ["opportunistic"] * world.opportunists
    kinds += ["honest"] * (world.agents - len(kinds))
    tax, decay, threshold = (stack.tax, stack.decay, stack.threshold) if stack.local else (0.0, 1.0, 0.0)
    scenario = Scenario(seed, "medium", "0.2", "normal", tuple(kinds), 100.0, tax, 0.0, decay, threshold, 1.0, 1.0, None,
                        f"governance {seed}", world.most)  # fmt: skip
    economy = open_economy(scenario, [[] for _ in range(world.most)])
    del economy.members[ME]
    economy.total -= scenario.resources
    return economy


def check(world: World, stack: Stack) -> None:
    bad, fair, all_ = world.adversaries, world.opportunists, world.agents
    if stack.gate not in rules.GATES:
        raise ValueError(f"simulate: there is no gate {stack.gate!r}; choose {', '.join(rules.GATES)}")
    if all_ < 3 or bad < 0 or fair < 0 or bad + fair > all_:
        mixed = f"{bad} adversaries and {fair} opportunists of {all_} agents"
        raise ValueError(f"simulate: {mixed}; take 3 agents or more, and no more of these")
    if not 1 <= world.least <= world.most:
        raise ValueError(f"simulate: at least {world.least} and at most {world.most} epochs; the first must be from 1 to the second")
    if not 0 <= stack.bar <= 1:
        raise ValueError(f"simulate: the bar is {stack.bar}; p is compared with it, so it must be in [0, 1]")


def simulate(world: World, stack: Stack, seed: int) -> Run:
    check(world, stack)
    economy, watch = start(world, stack, seed), Watch()
    members = list(economy.members.values())
    rng = np.random.default_rng([seed, world.agents])
    beliefs = {m.name: Belief() for m in members}
    received = {m.name: {o.name: deque(maxlen=10) for o in members} for m in members}
    run = Run(economy, {m.name: m.kind for m in members})
    series: list[float] = []  # mean p of what was proposed, by step, since the last meeting
    by_chance: deque = deque(maxlen=LOOK_BACK)  # by epoch: proposals of i to j, had i taken anybody who was there
    away, convened, last_meeting, flagged = set(), False, 0, False
    for epoch in range(1, world.most + 1):
        first, worth, noise = len(run.deals), 0.0, rules.reading_variance(watch)
        by_chance.append(np.zeros((len(members), len(members))))
        luck = rng.random((STEPS, len(members), 22)).tolist()
        for step, rows in enumerate(luck, economy.step):
            for m in members:
                if m.frozen_at:
                    away.add(m.name)
                elif m.name in away:  # back: what it did is remembered, but what it does now counts for more
                    away.remove(m.name)
                    m.interactions, beliefs[m.name].var = 0, Belief().var
            before = len(run.deals)
            for k in range(len(members) if not convened else 0):  # while the council sits, nobody deals
                i = (step + k) % len(members)
                worth += deal(world, stack, run, watch, members, i, beliefs, received, by_chance[-1], rows[i], noise, flagged)
            convened = False
            for m in members if world.upkeep else ():
                book(economy, m.name, "task", -world.upkeep)
            end_step(economy)
            if new := run.deals[before:]:
                series.append(sum(d.p for d in new) / len(new))
        new = run.deals[first:]
        run.welfare.append(worth / (STEPS * len(members)))
        run.accepted.append(sum(d.accepted for d in new) / len(new) if new else 0.0)
        flagged = bool(rules.noisy(watch, stack.bar) or rules.too_kind(watch))
        run.flagged += flagged
        if (stack.vote or stack.pairs) and rules.call_council(stack, series, watch, epoch - last_meeting):
            council(stack, run, received, sum(by_chance))
            convened, last_meeting, series = True, epoch, []
        if epoch >= world.least and epoch % 5 == 0 and settled(run):
            run.settled = True
            break
    return run


def deal(world, stack, run, watch, members, i, beliefs, received, by_chance, row, noise, flagged) -> float:
    """The turn of agent i: it proposes, the gate decides, the books move, an audit may follow. Returns what that was worth to all,
    in truth."""
    agent, there = members[i], [j for j, m in enumerate(members) if j != i and not m.frozen_at]
    economy, others = run.economy, [members[j] for j in there]
    if agent.frozen_at:
        return 0.0
    if not others or (stack.local and agent.resources < stack.stake):
        act.pass_turn(economy, agent.name)
        return 0.0
    by_chance[i, there] += 1 / len(there)
    partner, quality, looks, take = choose(world, agent, others, Dice(row))
    p, belief = rules.proxy(observe(looks, world.noise, Dice(row[8:]))), beliefs[agent.name]
    if row[18] < 0.1:
        watch.rereads.append((p, rules.proxy(observe(looks, world.noise, Dice(row[13:])))))
    rate = rules.audit_rate(stack, belief, p, flagged) if stack.local else 0.0
    received[partner.name][agent.name].append(p)
    act.propose_trade(economy, agent.name, partner.name, "a deal", 0.0)
    proposal = partner.inbox[agent.name]
    proposal.p = p  # the label of swarm/economy.py looks at the text and at a transfer that is shown; here the proxy speaks
    yes = rules.decide(stack.gate, belief, p, noise, stack.bar, row[19])
    (act.accept_proposal if yes else act.reject_proposal)(economy, partner.name, proposal.id)
    run.deals.append(economy.interactions[-1])
    run.truth.append(quality)
    if not yes:
        return 0.0
    if take:
        earn(economy, agent.name, "transfer", -book(economy, partner.name, "transfer", -take))
    if row[20] >= rate:
        return rules.social(quality)
    run.audits += 1
    beneficial = row[21] < quality
    watch.audits.append((p, float(beneficial)))
    rules.learn(belief, float(beneficial), rules.OUTCOME_NOISE)
    if not beneficial:
        book(economy, agent.name, "fine", -stack.stake)
        respect(agent, -act.FINE_REPUTATION)
    return rules.social(quality) - stack.audit_cost


def council(stack: Stack, run: Run, received: dict, expected: np.ndarray) -> None:
    """The slow tier meets: it votes, looks at who deals with whom, and freezes."""
    economy, names = run.economy, list(run.economy.members)
    named = set(rules.outvoted(ballots(economy, received), stack.majority)) if stack.vote else set()
    if stack.pairs:
        recent = [d for d in run.deals[-LOOK_BACK * STEPS * len(names) :] if d.step >= economy.step - LOOK_BACK * STEPS]
        named |= {names[i] for pair in rules.colluding(*rules.graph(recent, names), expected) for i in pair}
    for name in named:
        if not economy.members[name].frozen_at:
            # the economy lets a frozen member back after APPEAL_STEPS; a longer freeze, from the meeting's own step on, is dated ahead
            economy.members[name].frozen_at = economy.step + STEPS * stack.freeze - APPEAL_STEPS
            run.frozen[run.kinds[name]] += 1
    run.meetings += 1


def settled(run: Run) -> bool:
    """Neither welfare nor acceptance moves by 0.1 in ten epochs (an honest deal is worth 1.5): metrics.trend."""
    return all(np.ptp(x) == 0 or metrics.trend(x, tolerance=0.1, shortest=20).settled for x in (run.welfare, run.accepted))


# ------------------------------------------------------------------------------------------------ what a run tells
def collapse_epoch(welfare: list[float]) -> int | None:
    """The first epoch from which every mean of five epochs is 0 or less, to the end of the run."""
    below = np.convolve(welfare, np.ones(5) / 5, mode="valid") <= 0
    return None if not below[-1] else int(len(below) - np.argmin(below[::-1]) + 1) if not below.all() else 1


def row(world: World, stack: Stack, seed: int) -> dict:
    """One run in numbers. *_seen is what the proxy says, *_hard the same with p cut at 0.5, without a suffix the truth."""
    run = simulate(world, stack, seed)
    true, seen, hard = rules.measures(run.true_deals()), rules.measures(run.deals), rules.measures(run.deals, hard=True)
    kept = ("toxicity", "tail", "quality_gap")
    per_deal = lambda m: m["welfare"] / (len(run.welfare) * STEPS * world.agents)
    at = collapse_epoch(run.welfare)
    return {
        "acceptance": true["acceptance"], **{k: true[k] for k in kept}, **{f"{k}_seen": seen[k] for k in kept},
        **{f"{k}_hard": hard[k] for k in kept}, "worth": per_deal(true), "worth_seen": per_deal(seen), "worth_hard": per_deal(hard),
        "welfare": float(np.mean(run.welfare[-10:])), "early": float(np.mean(run.welfare[10:15])), "series": run.welfare[:25],
        "thrash": rules.thrash(run.deals), "thrash_honest": rules.thrash([d for d in run.deals if run.kinds[d.initiator] != "deceptive"]),
        "epochs": len(run.welfare), "settled": run.settled, "meetings": run.meetings, "audits": run.audits / len(run.welfare),
        "flagged": run.flagged / len(run.welfare), "frozen_deceptive": run.frozen["deceptive"],
        "frozen_others": run.frozen["honest"] + run.frozen["opportunistic"], "collapse_epoch": at,
    }  # fmt: skip
