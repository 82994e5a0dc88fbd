"""Eight bots under a governance: what holds when 0 to 5 of them are deceptive? The evidence, into results/governance/.

    python governance.py --sweep              # everything; about ten minutes of one core
    python -m lab.governance --seeds 4        # a quick look

The bots deal with each other by the rules of swarm_economy (its books, tax, reputation and breaker); governance.py decides what is
accepted and who is frozen. What was chosen, and fixed before the sweep was run:

    agents    deceptive ones replace honest ones, 0 to 5 of 8; always two opportunistic. Each proposes one deal a step, to anybody.
    truth     a deal is beneficial with probability 0.9 (honest; deceptive while it builds trust), 0.7 (opportunistic) or 0.1 (an exploit, or
              a deal inside the ring). The metrics can be taken of p, which governance sees, or of this truth, which only we know.
    proxy     progress and engagement are 2 quality - 1 plus noise of 0.5, cut to [-1, 1]; rework, rejections and misuse are Poisson with 3, 2
              and 1 times (1 - quality). Deals pay both sides what a trade of the economy pays, 5 (2p - 1): the books believe the proxy.
    deceit    as in swarm_bots v0.2, but after five times as many interactions, since a run is at least five times as long. An exploit
              takes 5 to 20 resources, which shows only afterwards, and looks 30% of the way to a good deal. Who returns from a freeze
              builds trust anew.
    ring      deceptive agents give half of their deals to each other. Both sides report what is not true, so the proxy sees a good deal.
              Only audits, or who deals with whom, can tell.
    council   everybody not frozen votes: the deceptive against all others, the rest against whoever proposed to them, at least three
              times of late, at a mean p below 0.5. A meeting takes one step in which nobody deals.

welfare is that of the truth, per possible deal (8 agents x 5 steps an epoch): 1.5 if all were honest and all was accepted, 0 if nothing
is. A run goes on until welfare and acceptance have settled (metrics.trend, asked every five epochs from 25 on), at most 100 epochs. It has
collapsed if the welfare of its last ten epochs is 0 or less. All intervals are over seeds. Every stack meets the same luck at the same
seed, so differences between stacks are paired.

Two mechanisms were mended after a first look at up to four seeds, before the sweep. The soft gate judged agents by their record alone: the ring
launders it, and everybody was accepted (kept as the gate "agent"). Collusion detection fitted who is sought after: half of the agents in a ring
made the other half look like one, and it froze as many honest agents as deceptive ones (kept: `expected` of pair_tests). Nothing was set by
comparing with published results. After that look came also the comparison "as open as hard", and the worlds in which life costs something.

Left out: networks (everybody meets everybody), tasks and posts, agents that learn from being caught.
"""

import json
import math
import platform
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import metrics
import swarm_tools as act
from governance import (
    GATES,
    OUTCOME_NOISE,
    Belief,
    Signals,
    Stack,
    Watch,
    audit_rate,
    call_council,
    colluding,
    decide,
    graph,
    learn,
    measures,
    noisy,
    outvoted,
    over,
    proxy,
    reading_variance,
    social,
    thrash,
    too_kind,
)  # fmt: skip
from metrics import Interval
from swarm_bots import between, chance, exploits, pick
from swarm_economy import APPEAL_STEPS, ME, STEPS, Economy, Interaction, Member, Scenario, book, earn, end_step, found, respect

OUT = ROOT / "results" / "governance"
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
    """Reads numbers drawn beforehand, so that every stack meets the same luck at the same step. A random.Random to swarm_bots."""

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
    return {
        v.name: {m.name for m in voters if (m.kind != "deceptive" if v.kind == "deceptive" else poor(received[v.name][m.name]))}
        for v in voters
    }


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
    """Eight bots of swarm_economy, without the model and without tasks."""
    kinds = ["deceptive"] * world.adversaries + ["opportunistic"] * world.opportunists
    kinds += ["honest"] * (world.agents - len(kinds))
    tax, decay, threshold = (stack.tax, stack.decay, stack.threshold) if stack.local else (0.0, 1.0, 0.0)
    scenario = Scenario(seed, "medium", "0.2", "normal", tuple(kinds), 100.0, tax, 0.0, decay, threshold, 1.0, 1.0, None,
                        f"governance {seed}", world.most)  # fmt: skip
    economy = found(scenario, [[] for _ in range(world.most)])
    del economy.members[ME]
    economy.total -= scenario.resources
    return economy


def check(world: World, stack: Stack) -> None:
    bad, fair, all_ = world.adversaries, world.opportunists, world.agents
    if stack.gate not in GATES:
        raise ValueError(f"simulate: there is no gate {stack.gate!r}; choose {', '.join(GATES)}")
    if all_ < 3 or bad < 0 or fair < 0 or bad + fair > all_:
        raise ValueError(
            f"simulate: {bad} adversaries and {fair} opportunists of {all_} agents; take 3 agents or more, and no more of these"
        )
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
        first, worth, noise = len(run.deals), 0.0, reading_variance(watch)
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
        flagged = bool(noisy(watch, stack.bar) or too_kind(watch))
        run.flagged += flagged
        if (stack.vote or stack.pairs) and call_council(stack, series, watch, epoch - last_meeting):
            council(stack, run, received, sum(by_chance))
            convened, last_meeting, series = True, epoch, []
        if epoch >= world.least and epoch % 5 == 0 and settled(run):
            run.settled = True
            break
    return run


def deal(world, stack, run, watch, members, i, beliefs, received, by_chance, row, noise, flagged) -> float:
    """The turn of agent i: it proposes, the gate decides, the books move, an audit may follow. Returns what that was worth to all, in truth."""
    agent, there = members[i], [j for j, m in enumerate(members) if j != i and not m.frozen_at]
    economy, others = run.economy, [members[j] for j in there]
    if agent.frozen_at:
        return 0.0
    if not others or (stack.local and agent.resources < stack.stake):
        act.pass_turn(economy, agent.name)
        return 0.0
    by_chance[i, there] += 1 / len(there)
    partner, quality, looks, take = choose(world, agent, others, Dice(row))
    p, belief = proxy(observe(looks, world.noise, Dice(row[8:]))), beliefs[agent.name]
    if row[18] < 0.1:
        watch.rereads.append((p, proxy(observe(looks, world.noise, Dice(row[13:])))))
    rate = audit_rate(stack, belief, p, flagged) if stack.local else 0.0
    received[partner.name][agent.name].append(p)
    act.propose_trade(economy, agent.name, partner.name, "a deal", 0.0)
    proposal = partner.inbox[agent.name]
    proposal.p = p  # the label of swarm_economy looks at the text and at a transfer that is shown; here the proxy speaks
    yes = decide(stack.gate, belief, p, noise, stack.bar, row[19])
    (act.accept_proposal if yes else act.reject_proposal)(economy, partner.name, proposal.id)
    run.deals.append(economy.interactions[-1])
    run.truth.append(quality)
    if not yes:
        return 0.0
    if take:
        earn(economy, agent.name, "transfer", -book(economy, partner.name, "transfer", -take))
    if row[20] >= rate:
        return social(quality)
    run.audits += 1
    beneficial = row[21] < quality
    watch.audits.append((p, float(beneficial)))
    learn(belief, float(beneficial), OUTCOME_NOISE)
    if not beneficial:
        book(economy, agent.name, "fine", -stack.stake)
        respect(agent, -act.FINE_REPUTATION)
    return social(quality) - stack.audit_cost


def council(stack: Stack, run: Run, received: dict, expected: np.ndarray) -> None:
    """The slow tier meets: it votes, looks at who deals with whom, and freezes."""
    economy, names = run.economy, list(run.economy.members)
    named = set(outvoted(ballots(economy, received), stack.majority)) if stack.vote else set()
    if stack.pairs:
        recent = [d for d in run.deals[-LOOK_BACK * STEPS * len(names) :] if d.step >= economy.step - LOOK_BACK * STEPS]
        named |= {names[i] for pair in colluding(*graph(recent, names), expected) for i in pair}
    for name in named:
        if not economy.members[name].frozen_at:
            # swarm_economy lets a frozen member back after APPEAL_STEPS; a longer freeze, from the meeting's own step on, is dated ahead
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
    true, seen, hard = measures(run.true_deals()), measures(run.deals), measures(run.deals, hard=True)
    kept = ("toxicity", "tail", "quality_gap")
    per_deal = lambda m: m["welfare"] / (len(run.welfare) * STEPS * world.agents)
    at = collapse_epoch(run.welfare)
    return {
        "acceptance": true["acceptance"], **{k: true[k] for k in kept}, **{f"{k}_seen": seen[k] for k in kept},
        **{f"{k}_hard": hard[k] for k in kept}, "worth": per_deal(true), "worth_seen": per_deal(seen), "worth_hard": per_deal(hard),
        "welfare": float(np.mean(run.welfare[-10:])), "early": float(np.mean(run.welfare[10:15])), "series": run.welfare[:25],
        "thrash": thrash(run.deals), "thrash_honest": thrash([d for d in run.deals if run.kinds[d.initiator] != "deceptive"]),
        "epochs": len(run.welfare), "settled": run.settled, "meetings": run.meetings, "audits": run.audits / len(run.welfare),
        "flagged": run.flagged / len(run.welfare), "frozen_deceptive": run.frozen["deceptive"],
        "frozen_others": run.frozen["honest"] + run.frozen["opportunistic"], "collapse_epoch": at,
        "still": float(run.accepted[-1] == 0), "resources": float(np.mean([m.resources for m in run.economy.members.values() if m.kind == "honest"])),
    }  # fmt: skip


SHARES = range(6)
NUMBERS = ("acceptance", "toxicity", "toxicity_seen", "toxicity_hard", "tail", "tail_seen", "tail_hard", "quality_gap", "quality_gap_seen",
           "quality_gap_hard", "worth", "worth_seen", "worth_hard", "welfare", "thrash", "thrash_honest", "epochs", "meetings", "audits",
           "flagged", "frozen_deceptive", "frozen_others", "resources")  # fmt: skip


def summary(rows: list[dict]) -> dict:
    """{name: Interval} over seeds."""
    n, out = len(rows), {name: over([r[name] for r in rows]) for name in NUMBERS}
    out["settled"] = metrics.proportion(sum(r["settled"] for r in rows), n)
    out["collapsed"] = metrics.proportion(sum(r["welfare"] <= 0 for r in rows), n)
    out["by_14"] = metrics.proportion(sum(bool(r["collapse_epoch"]) and r["collapse_epoch"] <= 14 for r in rows), n)
    out["still"] = metrics.proportion(sum(r["still"] for r in rows), n)
    out["changed_mind"] = metrics.proportion(sum((r["early"] <= 0) != (r["welfare"] <= 0) for r in rows), n)
    return out


def regimes(seeds: int) -> dict:
    """{stack: {adversaries: [row of each seed]}}"""
    jobs = [(name, n) for name in STACKS for n in SHARES]
    table: dict = {name: {} for name in STACKS}
    for name, n in tqdm(jobs, desc="regimes"):
        table[name][n] = [row(World(adversaries=n), STACKS[name], seed) for seed in range(seeds)]
    return table


def regime(cell: dict) -> str:
    """By the published bounds, of what the proxy sees, as there."""
    if cell["welfare"].mean <= 0:
        return "collapse"
    return "cooperative" if cell["acceptance"].mean > 0.93 and cell["toxicity_seen"].mean < 0.30 else "contested"


def kink(cells: dict[int, list[dict]]) -> Interval:
    """Is the fall of welfare from 37.5% to 50% steeper than that of the other steps? The difference, by seed; 0 if it is a straight line."""
    w = {n: np.array([r["welfare"] for r in rows]) for n, rows in cells.items()}
    others = np.mean([w[n] - w[n + 1] for n in SHARES if n not in (3, 5)], axis=0)
    return over((w[3] - w[4]) - others)


def paired(table: dict, better: str, worse: str, n: int, name: str = "welfare") -> Interval:
    return metrics.gain([r[name] for r in table[worse][n]], [r[name] for r in table[better][n]])


# ------------------------------------------------------------------------------------------------ soft against hard


BARS = (0.35, 0.42, 0.46, 0.50, 0.54, 0.58, 0.62, 0.66, 0.70, 0.74)
SHOWN_GATES = ("hard", "soft", "agent", "mean", "latch", "chance")


def frontier(seeds: int, gates, **changes) -> dict:
    """{gate: {"toxicity" | "thrash" | "thrash_honest" | "acceptance_honest": [bars, seeds]}}; the gate alone, 25 epochs, 3 adversaries of 8."""
    table = {}
    for gate in tqdm(gates, desc=f"frontier {changes or 'as chosen'}"):
        cells = []
        for bar in BARS:
            runs = [simulate(World(adversaries=3, most=25, **changes), Stack(gate, bar), seed) for seed in range(seeds)]
            fair = [[d for d in run.deals if run.kinds[d.initiator] != "deceptive"] for run in runs]
            cells.append([
                [measures(run.true_deals())["toxicity"] for run in runs], [thrash(run.deals) for run in runs],
                [thrash(deals) for deals in fair], [measures(deals)["acceptance"] for deals in fair],
            ])  # fmt: skip
        names = ("toxicity", "thrash", "thrash_honest", "acceptance_honest")
        table[gate] = {name: np.array([cell[k] for cell in cells]) for k, name in enumerate(names)}
    return table


def calmest(cell: dict, target: float, chosen: np.ndarray, floor: float = 0.0) -> dict[str, float]:
    """The calmest way in which a gate keeps toxicity to the target: of all bars (and between neighbours) that reach it, the least thrash.

    Toxicity need not fall with the bar: in a ring, whoever looks best is worst. floor: at least so much of what the not deceptive
    propose must be accepted, for nobody is calmer than a gate that lets nobody in. NaN if no bar does it. chosen: seeds.
    """
    curves = {name: values[:, chosen].mean(axis=1) for name, values in cell.items()}
    at = np.linspace(0, len(BARS) - 1, 10 * (len(BARS) - 1) + 1)
    fine = {name: np.interp(at, np.arange(len(BARS)), values) for name, values in curves.items()}
    reach = (fine["toxicity"] <= target) & (fine["acceptance_honest"] >= floor)
    if not reach.any():
        return dict.fromkeys(cell, float("nan"))
    best = np.flatnonzero(reach)[np.argmin(fine["thrash"][reach])]
    return {name: float(values[best]) for name, values in fine.items()}


def equal_toxicity(table: dict, resamples: int = 500) -> list[dict]:
    """Every gate against hard at a quarter, half and three quarters of the way between the least and the most toxicity of hard.

    Seeds are resampled, for all gates together, so the intervals include the choice of the bar. reached: in how many resamples a bar did it.
    """
    seeds = table["hard"]["toxicity"].shape[1]
    levels = table["hard"]["toxicity"].mean(axis=1)
    rng, lines = np.random.default_rng(0), []
    draws = [rng.integers(0, seeds, seeds) for _ in range(resamples)]
    for target in (levels.min() + (levels.max() - levels.min()) * q for q in (0.25, 0.5, 0.75)):
        for open_too in (False, True):  # at equal toxicity; and letting in at least what hard lets in, less 2 points
            floors = [
                calmest(table["hard"], target, d)["acceptance_honest"] - 0.02 if open_too else 0.0 for d in (np.arange(seeds), *draws)
            ]
            value = {gate: calmest(cell, target, np.arange(seeds), floors[0]) for gate, cell in table.items()}
            spread = {gate: [calmest(cell, target, d, floor) for d, floor in zip(draws, floors[1:])] for gate, cell in table.items()}
            for gate in table:
                reached = float(np.mean([r["thrash"] == r["thrash"] for r in spread[gate]]))
                line = {"gate": gate, "toxicity": float(target), "open_too": open_too, "reached": reached}
                for name in ("thrash", "thrash_honest", "acceptance_honest"):
                    own = np.array([r[name] for r in spread[gate]])
                    gap = own - np.array([r[name] for r in spread["hard"]])
                    ends = lambda x: map(float, np.nanquantile(x, [0.025, 0.975])) if np.isfinite(x).any() else (float("nan"),) * 2
                    line[name] = Interval(value[gate][name], *ends(own), seeds)
                    line[f"{name}_less_hard"] = Interval(value[gate][name] - value["hard"][name], *ends(gap), seeds)
                lines.append(line)
    return lines


# ------------------------------------------------------------------------------------------------ the detector, and the choices


def detector(looks: int) -> list[dict]:
    """How often collusion detection is wrong and right: one look after 5 and after 15 epochs, nobody being governed."""
    lines = []
    kinds = [("honest and opportunistic", 0, 0.5, looks), ("3 deceptive, no ring", 3, 0.0, looks // 2)]
    kinds += [(f"ring of {n}, {c:.0%} of deals inside", n, c, looks // 4) for n in (2, 3, 4, 5) for c in (0.25, 0.5)]
    for label, n, collude, count in tqdm(kinds, desc="detector"):
        for epochs in (5, 15):
            tally = {
                known: [0, 0, 0, 0] for known in (True, False)
            }  # looks that name an innocent, ring pairs named, ring pairs, looks with one
            for seed in range(count):
                world = World(adversaries=n, collude=collude, least=epochs, most=epochs)
                run = simulate(world, STACKS["open"], 10_000 + seed)
                names = list(run.kinds)
                counts, quality = graph(run.deals, names)
                even = np.repeat(counts.sum(1)[:, None], len(names), 1) / (len(names) - 1) * (1 - np.eye(len(names)))
                for known, t in tally.items():
                    found = colluding(counts, quality, even if known else None)
                    ring = [pair for pair in found if collude and all(run.kinds[names[i]] == "deceptive" for i in pair)]
                    t[0] += len(found) > len(ring)
                    t[1] += len(ring)
                    t[2] += n * (n - 1) // 2 if collude else 0
                    t[3] += bool(ring)
            for known, (wrong, hit, of, any_) in tally.items():
                lines.append({"who": label, "epochs": epochs, "choices_known": known, "looks": count,
                              "innocent_named": metrics.proportion(wrong, count), "pairs_named": hit / of if of else None,
                              "ring_seen": metrics.proportion(any_, count) if of else None})  # fmt: skip
    return lines


WORLDS = {
    "as chosen": {}, "good deals 0.8": {"good": 0.8}, "bad deals 0.25": {"bad": 0.25}, "exploits undisguised": {"disguise": 0.0},
    "exploits well disguised (0.6)": {"disguise": 0.6}, "proxy noise 0.25": {"noise": 0.25}, "proxy noise 1": {"noise": 1.0},
    "no ring": {"collude": 0.0}, "ring 25%": {"collude": 0.25}, "trust of an episode (1)": {"trust": 1}, "trust 10": {"trust": 10},
    "no opportunists": {"opportunists": 0},
    "life costs 4 a step": {"upkeep": 4.0},
    "life costs 6 a step": {"upkeep": 6.0},
}  # fmt: skip
LEVERS = {
    "bar 0.6": {"bar": 0.6}, "no tax": {"tax": 0.0}, "tax 15%": {"tax": 0.15}, "no decay": {"decay": 1.0}, "breaker at 40": {"threshold": 40.0},
    "no stake": {"stake": 0.0}, "stake 25": {"stake": 25.0}, "audits 5%": {"audit": 0.05}, "audits 30%": {"audit": 0.3},
    "freeze 1 epoch": {"freeze": 1}, "freeze 6 epochs": {"freeze": 6}, "signal at 3 errors": {"confidence": 3.0},
    "two thirds to freeze": {"majority": 2 / 3},
}  # fmt: skip


def choices(seeds: int) -> list[dict]:
    """One choice changed at a time: welfare and collapse at 37.5% and 50%, without the slow tier, with it, and with it every epoch."""
    lines, variants = [], [(name, change, {}) for name, change in WORLDS.items()] + [(name, {}, change) for name, change in LEVERS.items()]
    for name, of_world, of_stack in tqdm(variants, desc="choices"):
        for stack in ("local", "full", "full, every epoch"):
            for n in (3, 4):
                rows = [row(World(adversaries=n, **of_world), replace(STACKS[stack], **of_stack), seed) for seed in range(seeds)]
                lines.append({"variant": name, "stack": stack, "adversaries": n, "welfare": over([r["welfare"] for r in rows]),
                              "collapsed": metrics.proportion(sum(r["welfare"] <= 0 for r in rows), seeds),
                              "by_14": metrics.proportion(sum(bool(r["collapse_epoch"]) and r["collapse_epoch"] <= 14 for r in rows), seeds)})  # fmt: skip
    return lines


# ------------------------------------------------------------------------------------------------ pictures

COLOURS = {"open": "#777777", "hard": "#b2182b", "soft": "#2166ac", "local": "#67a9cf", "local + vote": "#998ec3", "local + pairs": "#5aae61",
           "full": "#1b7837", "full, hard gate": "#ef8a62", "full, every epoch": "#b8860b"}  # fmt: skip
DRAWN = ("open", "hard", "soft", "local", "full", "full, every epoch")
PERCENT = [f"{100 * n / 8:g}%" for n in SHARES]


def band(ax, x, intervals: list[Interval], **how) -> None:
    ax.plot(x, [i.mean for i in intervals], "o-", markersize=3.5, **how)
    ax.fill_between(x, [i.low for i in intervals], [i.high for i in intervals], color=how["color"], alpha=0.15, linewidth=0)


def plot_regimes(table: dict, cells: dict) -> None:
    fig, axes = plt.subplots(2, 3, figsize=(14, 8))
    for ax, name, title in zip(
        axes[0], ("acceptance", "toxicity", "welfare"), ("accepted", "toxicity, in truth", "welfare a deal, last 10 epochs")
    ):
        for low, high, colour in ((-0.2, 1.6, "#e5f5e0"), (1.6, 3.5, "#fff3d6"), (3.5, 5.2, "#fde0dd")):
            ax.axvspan(low, high, color=colour, alpha=0.6, linewidth=0)
        for stack in DRAWN:
            band(ax, list(SHARES), [cells[stack][n][name] for n in SHARES], color=COLOURS[stack], label=stack)
        ax.set(title=title, xlim=(-0.2, 5.2), xlabel="deceptive agents")
        ax.set_xticks(list(SHARES), PERCENT)
        ax.grid(alpha=0.3)
    axes[0, 2].axhline(0, color="black", linewidth=1)
    for x, text in ((-0.15, "published: cooperative"), (1.65, "contested"), (3.55, "collapse")):
        axes[0, 1].text(x, 0.93, text, fontsize=8)
    axes[0, 1].set_ylim(0.1, 1.0)
    low, high = 9.0, -9.0
    for ax, n in zip(axes[1], (2, 3, 4)):
        for stack in DRAWN:
            by_epoch = np.array([r["series"] for r in table[stack][n]])
            smooth = np.array([np.convolve(s, np.ones(3) / 3, mode="valid") for s in by_epoch])
            band_ = [over(smooth[:, e]) for e in range(smooth.shape[1])]
            ax.plot(range(2, 2 + len(band_)), [i.mean for i in band_], color=COLOURS[stack])
            ax.fill_between(
                range(2, 2 + len(band_)), [i.low for i in band_], [i.high for i in band_], color=COLOURS[stack], alpha=0.15, linewidth=0
            )
            low, high = min(low, min(i.low for i in band_)), max(high, max(i.high for i in band_))
        ax.axvspan(12, 14, color="#999999", alpha=0.25, linewidth=0)
        ax.axhline(0, color="black", linewidth=1)
        ax.set(title=f"{PERCENT[n]} deceptive: welfare by epoch (mean of 3)", xlabel="epoch")
        ax.grid(alpha=0.3)
    for ax in axes[1]:
        ax.set_ylim(low - 0.1, high + 0.1)
    axes[1, 2].text(14.2, high, "published collapse:\nepochs 12 to 14", fontsize=8, va="top")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), ncols=len(DRAWN), loc="lower center", frameon=False)
    fig.tight_layout(rect=(0, 0.04, 1, 1))
    fig.savefig(OUT / "regimes.png", dpi=100)
    plt.close(fig)


GATE_COLOURS = {"hard": "#b2182b", "soft": "#2166ac", "agent": "#67a9cf", "mean": "#1b7837", "latch": "#b8860b", "chance": "#777777"}


def plot_frontier(fronts: dict[str, dict]) -> None:
    fig, axes = plt.subplots(2, 2, figsize=(11, 9))
    for ax, (title, table) in zip(axes.flatten(), fronts.items()):
        for gate, cell in table.items():
            x, y = [over(v) for v in cell["toxicity"]], [over(v) for v in cell["thrash"]]
            ax.errorbar([i.mean for i in x], [i.mean for i in y], [[i.mean - i.low for i in y], [i.high - i.mean for i in y]],
                        [[i.mean - i.low for i in x], [i.high - i.mean for i in x]], fmt="o-", markersize=3.5, linewidth=1.2, elinewidth=0.7,
                        color=GATE_COLOURS[gate], label=gate)  # fmt: skip
        ax.set(title=title, xlabel="toxicity, in truth (left is better)")
        ax.grid(alpha=0.3)
    for ax in axes[:, 0]:
        ax.set_ylabel("thrash (lower is better)")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), ncols=6, loc="lower center", frameon=False)
    fig.tight_layout(rect=(0, 0.04, 1, 1))
    fig.savefig(OUT / "frontier.png", dpi=100)
    plt.close(fig)


def plot_choices(lines: list[dict]) -> None:
    names = list(dict.fromkeys(line["variant"] for line in lines))
    fig, axes = plt.subplots(1, 2, figsize=(12, 8), sharey=True)
    for ax, n in zip(axes, (3, 4)):
        for k, stack in enumerate(("local", "full", "full, every epoch")):
            mine = [line["welfare"] for line in lines if line["stack"] == stack and line["adversaries"] == n]
            y = np.arange(len(names)) + 0.22 * (k - 1)
            x = np.array([i.mean for i in mine])
            ax.errorbar(
                x, y, xerr=[x - [i.low for i in mine], [i.high for i in mine] - x], fmt="o", markersize=4, color=COLOURS[stack], label=stack
            )
        ax.axvline(0, color="black", linewidth=1)
        ax.axhline(len(WORLDS) - 0.5, color="#999999", linewidth=0.8, linestyle=":")
        ax.set(title=f"{PERCENT[n]} deceptive", xlabel="welfare a deal, last 10 epochs")
        ax.grid(alpha=0.3, axis="x")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=9, loc="lower right")
    fig.tight_layout()
    fig.savefig(OUT / "choices.png", dpi=100)
    plt.close(fig)


# ------------------------------------------------------------------------------------------------ the report


def show(i: Interval, digits: int = 2) -> str:
    return f"{i.mean:.{digits}f} [{i.low:.{digits}f}, {i.high:.{digits}f}]" if i.mean == i.mean else "–"


def percent(i: Interval) -> str:
    return f"{100 * i.mean:.0f}% [{100 * i.low:.0f}, {100 * i.high:.0f}]"


def numbers(thing):
    """Intervals to lists, for JSON."""
    if isinstance(thing, Interval):
        return [None if x != x else round(x, 5) for x in (thing.mean, thing.low, thing.high)] + [thing.n]
    if isinstance(thing, dict):
        return {str(k): numbers(v) for k, v in thing.items()}
    return [numbers(x) for x in thing] if isinstance(thing, (list, tuple)) else thing


def sweep(seeds: int = 24) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    began = time.time()
    table = regimes(seeds)
    cells = {stack: {n: summary(table[stack][n]) for n in SHARES} for stack in STACKS}
    few = max(2, seeds // 2)
    fronts = {
        "as chosen": frontier(max(2, 3 * seeds // 4), SHOWN_GATES),
        "no ring": frontier(max(2, 3 * seeds // 4), SHOWN_GATES, collude=0.0),
        "no ring, noise 0.25": frontier(few, SHOWN_GATES[:2] + ("latch",), collude=0.0, noise=0.25),
        "no ring, noise 1": frontier(few, SHOWN_GATES[:2] + ("latch",), collude=0.0, noise=1.0),
    }
    equal = {name: equal_toxicity(front) for name, front in fronts.items()}
    looks, changed = detector(10 * seeds), choices(max(2, seeds // 4))
    plot_regimes(table, cells)
    plot_frontier(fronts)
    plot_choices(changed)
    facts = {
        "kink": {stack: kink(table[stack]) for stack in STACKS},
        "pairs": {n: {"on a signal": paired(table, "local + pairs", "local", n),
                      "with a vote": paired(table, "full", "local + vote", n)} for n in SHARES},
        "vote": {n: paired(table, "local + vote", "local", n) for n in SHARES},
        "always": {n: paired(table, "full, every epoch", "full", n) for n in SHARES},
        "full": {n: paired(table, "full", "local", n) for n in SHARES},
        "local": {n: paired(table, "local", "soft", n) for n in SHARES},
        "soft": {n: paired(table, "soft", "hard", n) for n in SHARES},
        "gate": {n: paired(table, "full", "full, hard gate", n) for n in SHARES},
    }  # fmt: skip
    minutes = (time.time() - began) / 60
    result = {"seeds": seeds, "cells": cells, "facts": facts, "equal_toxicity": equal, "detector": looks, "choices": changed}
    (OUT / "governance.json").write_text(json.dumps(numbers(result), separators=(",", ":")).replace('},"', '},\n"') + "\n")
    write(cells, facts, equal, looks, changed, seeds, minutes)
    print(f"wrote {OUT.relative_to(ROOT)}/ in {minutes:.1f} minutes")


def table_of(rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0]), *("| " + " | ".join(r) + " |" for r in rows[1:]), ""]


def write(cells, facts, equal, looks, changed, seeds: int, minutes: float) -> None:
    """The tables; what they mean stands in README.md beside them, written by hand."""
    by_share = lambda name, how: [["", *PERCENT]] + [[stack, *(how(cells[stack][n][name]) for n in SHARES)] for stack in STACKS]
    facts_by_share = lambda name: [show(facts[name][n]) for n in SHARES]
    lines = [
        "# Governance: the tables",
        "",
        f"`python governance.py --sweep --seeds {seeds}`: seeds 0 to {seeds - 1} of each kind, {minutes:.0f} minutes on one of 2 cores, beside other "
        f"work. {platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}. Scripted bots only, no model. Brackets are 95% "
        "intervals over seeds (bootstrap of means, Wilson for shares). lab/governance.py says how the bots live and what was chosen.",
        "",
    ]
    lines += ["## Regimes", "", "Columns are shares of deceptive agents. Labels follow the published bounds, of what the proxy sees, as there: "
              "cooperative (acceptance > 0.93, toxicity < 0.30), collapse (welfare 0 or less), contested otherwise.", ""]  # fmt: skip
    lines += table_of([["", *PERCENT]] + [[stack, *(regime(cells[stack][n]) for n in SHARES)] for stack in STACKS])
    for title, name, how in (
        ("Welfare a possible deal, last 10 epochs, in truth", "welfare", show), ("Runs that collapsed", "collapsed", percent),
        ("… by epoch 14 (from then on never above 0 over five epochs)", "by_14", percent), ("Accepted", "acceptance", show),
        ("Toxicity, in truth", "toxicity", show), ("Toxicity, as the proxy sees it", "toxicity_seen", show),
        ("Thrash", "thrash", lambda i: show(i, 3)), ("Meetings of the council", "meetings", lambda i: show(i, 1)),
        ("Audits an epoch (each costs 0.2)", "audits", lambda i: show(i, 1)), ("Freezes of deceptive agents", "frozen_deceptive", lambda i: show(i, 1)),
        ("Freezes of the others", "frozen_others", lambda i: show(i, 1)), ("Share of epochs in which the proxy flagged itself", "flagged", show),
        ("Epochs until settled", "epochs", lambda i: show(i, 0)), ("Runs that settled within 100 epochs", "settled", percent),
        ("Runs whose verdict at epochs 11 to 15 was another than at the end", "changed_mind", percent),
    ):  # fmt: skip
        lines += [f"### {title}", "", *table_of(by_share(name, how))]
    lines += ["## What makes the difference", "", "Welfare gained at the same seeds.", ""]
    lines += table_of([["", *PERCENT]] + [
        ["soft gate instead of hard", *facts_by_share("soft")], ["fast tier on top of soft", *facts_by_share("local")],
        ["vote on top of local", *facts_by_share("vote")],
        ["pairs on top of local", *(show(facts["pairs"][n]["on a signal"]) for n in SHARES)],
        ["pairs on top of local + vote", *(show(facts["pairs"][n]["with a vote"]) for n in SHARES)],
        ["whole slow tier on top of local", *facts_by_share("full")],
        ["council every epoch instead of on a signal", *facts_by_share("always")], ["soft gate instead of hard in full", *facts_by_share("gate")],
    ])  # fmt: skip
    lines += ["How much steeper is the step from 37.5% to 50% than the mean of the other four steps (0: a straight line)?", ""]
    lines += table_of([["stack", "steeper by"]] + [[stack, show(facts["kink"][stack])] for stack in STACKS])
    lines += ["## Soft, hard and true, side by side", "", "The stack local. Per possible deal: worth to all.", ""]
    for name, hard in (("toxicity", "toxicity"), ("tail", "tail"), ("quality_gap", "quality_gap"), ("worth", "worth")):
        of = lambda suffix, hard=hard: [show(cells["local"][n][hard + suffix]) for n in SHARES]
        lines += table_of([[name.replace("_", " "), *PERCENT], ["soft", *of("_seen")], ["hard", *of("_hard")], ["true", *of("")]])
    lines += ["## Soft against hard at equal toxicity", "", "Gates alone, 37.5% deceptive, 25 epochs. Every gate has the bar at which it keeps "
              "(true) toxicity to the target with the least thrash; as open as hard: and accepts as much of the not deceptive as hard does there, less 2 points. Reached: the share of resamples of seeds in which some bar did; intervals are over those.", ""]  # fmt: skip
    for name, rows in equal.items():
        lines += [f"### {name}", ""]
        lines += table_of([["toxicity", "as open as hard", "gate", "reached", "thrash", "less than hard by", "thrash on the not deceptive", "of theirs accepted"]] + [
            [f"{r['toxicity']:.3f}", "yes" if r["open_too"] else "", r["gate"], f"{r['reached']:.0%}", show(r["thrash"], 3), show(r["thrash_less_hard"], 3),
             show(r["thrash_honest"], 3), show(r["acceptance_honest"])] for r in rows])  # fmt: skip
    lines += ["## How often collusion detection is wrong", "", "One look, nothing governed. An innocent is a pair that is not in the ring. Known: whom "
              "everybody could have chosen is known (as in the sweep); fitted: who is sought after is fitted to the counts.", ""]  # fmt: skip
    lines += table_of([["who", "epochs", "choices", "an innocent pair named", "any ring pair named", "ring pairs named", "looks"]] + [
        [r["who"], str(r["epochs"]), "known" if r["choices_known"] else "fitted", f"{100 * r['innocent_named'].mean:.1f}% [{100 * r['innocent_named'].low:.1f}, "
         f"{100 * r['innocent_named'].high:.1f}]", percent(r["ring_seen"]) if r["ring_seen"] else "", f"{r['pairs_named']:.0%}" if r["ring_seen"] else "", str(r["looks"])]
        for r in looks])  # fmt: skip
    lines += ["## One choice at a time", "", f"Welfare, and the share of runs that collapsed, of {changed[0]['welfare'].n} seeds each.", ""]
    columns = [(stack, n) for n in (3, 4) for stack in ("local", "full", "full, every epoch")]
    of = {(r["variant"], r["stack"], r["adversaries"]): r for r in changed}
    lines += table_of([["", *(f"{PERCENT[n]}, {stack}" for stack, n in columns)]] + [
        [variant, *(f"{show(of[variant, stack, n]['welfare'])}, {of[variant, stack, n]['collapsed'].mean:.0%}" for stack, n in columns)]
        for variant in dict.fromkeys(r["variant"] for r in changed)])  # fmt: skip
    (OUT / "tables.md").write_text("\n".join(lines))


@dataclass
class Config:
    seeds: int = 24


if __name__ == "__main__":
    sweep(tyro.cli(Config).seeds)
