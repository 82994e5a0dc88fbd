"""Which governance holds against how many deceptive agents? The evidence, into results/governance/.

    python -m lab.swarm.governance_sweep              # everything: 52 minutes beside other work
    python -m lab.swarm.governance_sweep --seeds 4    # a quick look

Four questions, each by runs of lab/swarm/governance.py. Regimes: every stack at every share of deceptive agents. Soft against hard: gates alone, with
many bars, compared at equal toxicity, because a gate that lets nobody in is never wrong. The detector: how often it names an innocent. And the
choices: what was chosen for the world and the stack, changed one at a time. lab/swarm/governance_page.py makes the tables and the pictures.
"""

import json
import time
from dataclasses import replace

import numpy as np
import tyro
from tqdm import tqdm

import metrics
from lab.swarm.governance import SHARES, STACKS, World, row, simulate
from lab.swarm.governance_page import OUT, ROOT, plot_choices, plot_frontier, plot_regimes, write
from metrics import Interval
from swarm.governance import Stack, colluding, graph, measures, over, thrash

# ------------------------------------------------------------------------------------------------ regimes
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
    propose must be accepted, for nobody is calmer than a gate that lets nobody in. NaN if no bar does it. chosen: seeds."""
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
            # Looks that name an innocent, ring pairs named, ring pairs, looks with one.
            tally = {known: [0, 0, 0, 0] for known in (True, False)}
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


# ------------------------------------------------------------------------------------------------ all of it
def numbers(thing):
    """Intervals to lists, for JSON."""
    if isinstance(thing, Interval):
        return [None if x != x else round(x, 5) for x in (thing.mean, thing.low, thing.high)] + [thing.n]
    if isinstance(thing, dict):
        return {str(k): numbers(v) for k, v in thing.items()}
    return [numbers(x) for x in thing] if isinstance(thing, (list, tuple)) else thing


def sweep(seeds: int = 24) -> None:
    """Every stack at every share of adversaries, `seeds` runs of each kind; writes results/governance/."""
    if seeds < 2:
        raise SystemExit(f"--seeds {seeds}: an interval needs at least 2 runs of each kind")
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
    plot_choices(changed, len(WORLDS))
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


if __name__ == "__main__":
    tyro.cli(sweep)
