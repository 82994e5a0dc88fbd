"""Which governance holds against how many deceptive agents? The evidence, into results/governance/.

    python -m lab.swarm.governance_sweep              # everything: 5 minutes beside other work
    python -m lab.swarm.governance_sweep --seeds 4    # a quick look

Four questions, each by runs of lab/swarm/governance.py. Regimes: every stack at every share of deceptive agents. Soft against hard: gates
alone, with many bars, compared at equal toxicity, because a gate that lets nobody in is never wrong. The detector: how often it names an
innocent. And the choices: what was chosen for the world and the stack, changed one at a time. What tables.md and the pictures mean stands
beside them, written by hand.
"""

import json
import platform
import time
from dataclasses import replace

import numpy as np
import tyro
from tqdm import tqdm

from lab.common import RESULTS, ROOT, ends, pyplot, reach, save_picture, table, write_page
from lab.swarm.governance import SHARES, STACKS, World, row, simulate
from metrics import Interval, gain, proportion
from swarm.governance import Stack, colluding, graph, measures, over, thrash

OUT = RESULTS / "governance"

# ------------------------------------------------------------------------------------------------ regimes
NUMBERS = ("acceptance", "toxicity", "toxicity_seen", "toxicity_hard", "tail", "tail_seen", "tail_hard", "quality_gap", "quality_gap_seen",
           "quality_gap_hard", "worth", "worth_seen", "worth_hard", "welfare", "thrash", "thrash_honest", "epochs", "meetings", "audits",
           "flagged", "frozen_deceptive", "frozen_others")  # fmt: skip


collapsed = lambda row: row["welfare"] <= 0
by_14 = lambda row: bool(row["collapse_epoch"]) and row["collapse_epoch"] <= 14  # and never above 0 from then on


def summary(rows: list[dict]) -> dict:
    """{name: Interval} over seeds."""
    n, out = len(rows), {name: over([r[name] for r in rows]) for name in NUMBERS}
    share = lambda so: proportion(sum(map(so, rows)), n)
    changed = lambda r: (r["early"] <= 0) != (r["welfare"] <= 0)
    so = {"settled": lambda r: r["settled"], "collapsed": collapsed, "by_14": by_14, "changed_mind": changed}
    return out | {name: share(of) for name, of in so.items()}


def regimes(seeds: int) -> dict:
    """{stack: {adversaries: [row of each seed]}}"""
    found: dict = {name: {} for name in STACKS}
    for name, n in tqdm([(name, n) for name in STACKS for n in SHARES], desc="regimes"):
        found[name][n] = [row(World(adversaries=n), STACKS[name], seed) for seed in range(seeds)]
    return found


def kink(cells: dict[int, list[dict]]) -> Interval:
    """Is the fall of welfare from 37.5% to 50% steeper than that of the other steps? The difference, by seed;
    0 if it is a straight line."""
    w = {n: np.array([r["welfare"] for r in rows]) for n, rows in cells.items()}
    others = np.mean([w[n] - w[n + 1] for n in SHARES if n not in (3, 5)], axis=0)
    return over((w[3] - w[4]) - others)


def paired(rows: dict, better: str, worse: str, n: int, name: str = "welfare") -> Interval:
    return gain([r[name] for r in rows[worse][n]], [r[name] for r in rows[better][n]])


# ------------------------------------------------------------------------------------------------ soft against hard
BARS = (0.35, 0.42, 0.46, 0.50, 0.54, 0.58, 0.62, 0.66, 0.70, 0.74)
SHOWN_GATES = ("hard", "soft", "agent", "mean", "latch", "chance")


def frontier(seeds: int, gates, **changes) -> dict:
    """{gate: {"toxicity" | "thrash" | "thrash_honest" | "acceptance_honest": [bars, seeds]}}; the gate alone, 25 epochs,
    3 adversaries of 8."""
    found = {}
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
        found[gate] = {name: np.array([cell[k] for cell in cells]) for k, name in enumerate(names)}
    return found


def calmest(cell: dict, target: float, chosen: np.ndarray, floor: float = 0.0) -> dict[str, float]:
    """The calmest way in which a gate keeps toxicity to the target: of all bars (and between neighbours) that reach it, the least thrash.
    Toxicity need not fall with the bar: in a ring, whoever looks best is worst. floor: at least so much of what the not deceptive propose
    must be accepted, for nobody is calmer than a gate that lets nobody in. NaN if no bar does it. chosen: seeds."""
    curves = {name: values[:, chosen].mean(axis=1) for name, values in cell.items()}
    at = np.linspace(0, len(BARS) - 1, 10 * (len(BARS) - 1) + 1)
    fine = {name: np.interp(at, np.arange(len(BARS)), values) for name, values in curves.items()}
    reach = (fine["toxicity"] <= target) & (fine["acceptance_honest"] >= floor)
    if not reach.any():
        return dict.fromkeys(cell, float("nan"))
    best = np.flatnonzero(reach)[np.argmin(fine["thrash"][reach])]
    return {name: float(values[best]) for name, values in fine.items()}


def equal_toxicity(cells: dict, resamples: int = 500) -> list[dict]:
    """Every gate against hard at a quarter, half and three quarters of the way between the least and the most toxicity of hard. Seeds are
    resampled, for all gates together, so the intervals include the choice of the bar. reached: in how many resamples a bar did it."""
    seeds = cells["hard"]["toxicity"].shape[1]
    levels = cells["hard"]["toxicity"].mean(axis=1)
    rng, lines = np.random.default_rng(0), []
    draws = [rng.integers(0, seeds, seeds) for _ in range(resamples)]
    for target in (levels.min() + (levels.max() - levels.min()) * q for q in (0.25, 0.5, 0.75)):
        for open_too in (False, True):  # at equal toxicity; and letting in at least what hard lets in, less 2 points
            accepts = [calmest(cells["hard"], target, d)["acceptance_honest"] for d in (np.arange(seeds), *draws)]
            floors = [accepted - 0.02 if open_too else 0.0 for accepted in accepts]
            value = {gate: calmest(cell, target, np.arange(seeds), floors[0]) for gate, cell in cells.items()}
            spread = {gate: [calmest(cell, target, d, floor) for d, floor in zip(draws, floors[1:])] for gate, cell in cells.items()}
            for gate in cells:
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
    kinds += [(f"ring of {n}, {c:.0%} of deals sought inside", n, c, looks // 4) for n in (2, 3, 4, 5) for c in (0.25, 0.5)]
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
                              "innocent_named": proportion(wrong, count), "pairs_named": hit / of if of else None,
                              "ring_seen": proportion(any_, count) if of else None})  # fmt: skip
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
    "bar 0.6": {"bar": 0.6}, "no tax": {"tax": 0.0}, "tax 15%": {"tax": 0.15}, "no decay": {"decay": 1.0},
    "breaker at 40": {"threshold": 40.0},
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
                shares = {"collapsed": proportion(sum(map(collapsed, rows)), seeds), "by_14": proportion(sum(map(by_14, rows)), seeds)}
                lines.append({"variant": name, "stack": stack, "adversaries": n, "welfare": over([r["welfare"] for r in rows]), **shares})
    return lines


# ------------------------------------------------------------------------------------------------ pictures
COLOURS = {"open": "#777777", "hard": "#b2182b", "soft": "#2166ac", "local": "#67a9cf", "local + vote": "#998ec3",
           "local + pairs": "#5aae61", "full": "#1b7837", "full, hard gate": "#ef8a62", "full, every epoch": "#b8860b"}  # fmt: skip
DRAWN = ("open", "hard", "soft", "local", "full", "full, every epoch")
PERCENT = [f"{100 * n / 8:g}%" for n in SHARES]


def band(ax, x, intervals: list[Interval], line: str = "o-", **how) -> None:
    ax.plot(x, [i.mean for i in intervals], line, markersize=3.5, **how)
    ax.fill_between(x, *ends(intervals), color=how["color"], alpha=0.15, linewidth=0)


def plot_regimes(rows: dict, cells: dict) -> None:
    fig, axes = pyplot().subplots(2, 3, figsize=(14, 8))
    titles = {"acceptance": "accepted", "toxicity": "toxicity, in truth", "welfare": "welfare a deal, last 10 epochs"}
    for ax, (name, title) in zip(axes[0], titles.items()):
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
            by_epoch = np.array([r["series"] for r in rows[stack][n]])
            smooth = np.array([np.convolve(s, np.ones(3) / 3, mode="valid") for s in by_epoch])
            band_ = [over(smooth[:, e]) for e in range(smooth.shape[1])]
            band(ax, range(2, 2 + len(band_)), band_, "-", color=COLOURS[stack])
            low, high = min(low, *ends(band_)[0]), max(high, *ends(band_)[1])
        ax.axvspan(12, 14, color="#999999", alpha=0.25, linewidth=0)
        ax.axhline(0, color="black", linewidth=1)
        ax.set(title=f"{PERCENT[n]} deceptive: welfare by epoch (mean of 3)", xlabel="epoch")
        ax.grid(alpha=0.3)
    for ax in axes[1]:
        ax.set_ylim(low - 0.1, high + 0.1)
    axes[1, 2].text(14.2, high, "published collapse:\nepochs 12 to 14", fontsize=8, va="top")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), ncols=len(DRAWN), loc="lower center", frameon=False)
    fig.tight_layout(rect=(0, 0.04, 1, 1))
    save_picture(fig, OUT / "regimes.png", 100)


GATE_COLOURS = {"hard": "#b2182b", "soft": "#2166ac", "agent": "#67a9cf", "mean": "#1b7837", "latch": "#b8860b", "chance": "#777777"}


def plot_frontier(fronts: dict[str, dict]) -> None:
    fig, axes = pyplot().subplots(2, 2, figsize=(11, 9))
    for ax, (title, cells) in zip(axes.flatten(), fronts.items()):
        for gate, cell in cells.items():
            x, y = [over(v) for v in cell["toxicity"]], [over(v) for v in cell["thrash"]]
            ax.errorbar([i.mean for i in x], [i.mean for i in y], reach(y), reach(x), fmt="o-", markersize=3.5, linewidth=1.2,
                        elinewidth=0.7, color=GATE_COLOURS[gate], label=gate)  # fmt: skip
        ax.set(title=title, xlabel="toxicity, in truth (left is better)")
        ax.grid(alpha=0.3)
    for ax in axes[:, 0]:
        ax.set_ylabel("thrash (lower is better)")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), ncols=6, loc="lower center", frameon=False)
    fig.tight_layout(rect=(0, 0.04, 1, 1))
    save_picture(fig, OUT / "frontier.png", 100)


def plot_choices(lines: list[dict], of_world: int) -> None:
    """of_world: so many variants change the world; below them stand those that change the stack."""
    names = list(dict.fromkeys(line["variant"] for line in lines))
    fig, axes = pyplot().subplots(1, 2, figsize=(12, 8), sharey=True)
    for ax, n in zip(axes, (3, 4)):
        for k, stack in enumerate(("local", "full", "full, every epoch")):
            mine = [line["welfare"] for line in lines if line["stack"] == stack and line["adversaries"] == n]
            y = np.arange(len(names)) + 0.22 * (k - 1)
            ax.errorbar([i.mean for i in mine], y, xerr=reach(mine), fmt="o", markersize=4, color=COLOURS[stack], label=stack)
        ax.axvline(0, color="black", linewidth=1)
        ax.axhline(of_world - 0.5, color="#999999", linewidth=0.8, linestyle=":")
        ax.set(title=f"{PERCENT[n]} deceptive", xlabel="welfare a deal, last 10 epochs")
        ax.grid(alpha=0.3, axis="x")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=9, loc="lower right")
    fig.tight_layout()
    save_picture(fig, OUT / "choices.png", 100)


# ------------------------------------------------------------------------------------------------ tables
def show(i: Interval, digits: int = 2) -> str:
    return i.text(digits) if i.mean == i.mean else "–"


percent = lambda i: i.percent(0)


def regime(cell: dict) -> str:
    """By the published bounds, of what the proxy sees, as there."""
    if cell["welfare"].mean <= 0:
        return "collapse"
    return "cooperative" if cell["acceptance"].mean > 0.93 and cell["toxicity_seen"].mean < 0.30 else "contested"


def write(cells, facts, equal, looks, changed, seeds: int, minutes: float) -> None:
    """The tables; what they mean stands in README.md beside them, written by hand."""
    tables = lambda rows: [*table(rows[0], rows[1:]), ""]
    by_share = lambda name, how: [["", *PERCENT]] + [[stack, *(how(cells[stack][n][name]) for n in SHARES)] for stack in STACKS]
    facts_by_share = lambda name: [show(facts[name][n]) for n in SHARES]
    lines = [
        "# Governance: the tables", "",
        f"`python -m lab.swarm.governance_sweep --seeds {seeds}`: seeds 0 to {seeds - 1} of each kind, {minutes:.0f} minutes on one of 2 "
        f"cores, beside other work. {platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}. Scripted bots only, "
        "no model. Brackets are 95% intervals over seeds. lab/swarm/governance.py says how the bots live and what was chosen.", "",
    ]  # fmt: skip
    lines += ["## Regimes", "",
              "Columns are shares of deceptive agents. Labels follow the published bounds, of what the proxy sees, as there: "
              "cooperative (acceptance > 0.93, toxicity < 0.30), collapse (welfare 0 or less), contested otherwise.", ""]  # fmt: skip
    lines += tables([["", *PERCENT]] + [[stack, *(regime(cells[stack][n]) for n in SHARES)] for stack in STACKS])
    for title, name, how in (
        ("Welfare a possible deal, last 10 epochs, in truth", "welfare", show), ("Runs that collapsed", "collapsed", percent),
        ("… by epoch 14 (from then on never above 0 over five epochs)", "by_14", percent), ("Accepted", "acceptance", show),
        ("Toxicity, in truth", "toxicity", show), ("Toxicity, as the proxy sees it", "toxicity_seen", show),
        ("Thrash", "thrash", lambda i: show(i, 3)), ("Meetings of the council", "meetings", lambda i: show(i, 1)),
        ("Audits an epoch (each costs 0.2)", "audits", lambda i: show(i, 1)),
        ("Freezes of deceptive agents", "frozen_deceptive", lambda i: show(i, 1)),
        ("Freezes of the others", "frozen_others", lambda i: show(i, 1)),
        ("Share of epochs in which the proxy flagged itself", "flagged", show),
        ("Epochs until settled", "epochs", lambda i: show(i, 0)), ("Runs that settled within 100 epochs", "settled", percent),
        ("Runs whose verdict at epochs 11 to 15 was another than at the end", "changed_mind", percent),
    ):  # fmt: skip
        lines += [f"### {title}", "", *tables(by_share(name, how))]
    lines += ["## What makes the difference", "", "Welfare gained at the same seeds.", ""]
    lines += tables([["", *PERCENT]] + [
        ["soft gate instead of hard", *facts_by_share("soft")], ["fast tier on top of soft", *facts_by_share("local")],
        ["vote on top of local", *facts_by_share("vote")],
        ["pairs on top of local", *(show(facts["pairs"][n]["on a signal"]) for n in SHARES)],
        ["pairs on top of local + vote", *(show(facts["pairs"][n]["with a vote"]) for n in SHARES)],
        ["whole slow tier on top of local", *facts_by_share("full")],
        ["council every epoch instead of on a signal", *facts_by_share("always")],
        ["soft gate instead of hard in full", *facts_by_share("gate")],
    ])  # fmt: skip
    lines += ["How much steeper is the step from 37.5% to 50% than the mean of the other four steps (0: a straight line)?", ""]
    lines += tables([["stack", "steeper by"]] + [[stack, show(facts["kink"][stack])] for stack in STACKS])
    lines += ["## Soft, hard and true, side by side", "", "The stack local. Per possible deal: worth to all.", ""]
    for name in ("toxicity", "tail", "quality_gap", "worth"):
        of = lambda suffix, name=name: [show(cells["local"][n][name + suffix]) for n in SHARES]
        lines += tables([[name.replace("_", " "), *PERCENT], ["soft", *of("_seen")], ["hard", *of("_hard")], ["true", *of("")]])
    lines += ["## Soft against hard at equal toxicity", "",
              "Gates alone, 37.5% deceptive, 25 epochs. Every gate has the bar at which it keeps "
              "(true) toxicity to the target with the least thrash; as open as hard: and accepts as much of the not deceptive as hard does "
              "there, less 2 points. Reached: the share of resamples of seeds in which some bar did; "
              "intervals are over those.", ""]  # fmt: skip
    for name, rows in equal.items():
        lines += [f"### {name}", ""]
        lines += tables([["toxicity", "as open as hard", "gate", "reached", "thrash", "less than hard by", "thrash on the not deceptive",
                          "of theirs accepted"]] + [
            [f"{r['toxicity']:.3f}", "yes" if r["open_too"] else "", r["gate"], f"{r['reached']:.0%}", show(r["thrash"], 3),
             show(r["thrash_less_hard"], 3), show(r["thrash_honest"], 3), show(r["acceptance_honest"])] for r in rows])  # fmt: skip
    lines += ["## How often collusion detection is wrong", "",
              "One look, nothing governed. An innocent is a pair that is not in the ring. Known: whom "
              "everybody could have chosen is known (as in the sweep); fitted: who is sought after is fitted to the counts.",
              ""]  # fmt: skip
    lines += tables([["who", "epochs", "choices", "an innocent pair named", "any ring pair named", "ring pairs named", "looks"]] + [
        [r["who"], str(r["epochs"]), "known" if r["choices_known"] else "fitted", r["innocent_named"].percent(),
         percent(r["ring_seen"]) if r["ring_seen"] else "", f"{r['pairs_named']:.0%}" if r["ring_seen"] else "", str(r["looks"])]
        for r in looks])  # fmt: skip
    lines += ["## One choice at a time", "", f"Welfare, and the share of runs that collapsed, of {changed[0]['welfare'].n} seeds each.", ""]
    columns = [(stack, n) for n in (3, 4) for stack in ("local", "full", "full, every epoch")]
    of = {(r["variant"], r["stack"], r["adversaries"]): r for r in changed}
    lines += tables([["", *(f"{PERCENT[n]}, {stack}" for stack, n in columns)]] + [
        [variant, *(f"{show(of[variant, stack, n]['welfare'])}, {of[variant, stack, n]['collapsed'].mean:.0%}" for stack, n in columns)]
        for variant in dict.fromkeys(r["variant"] for r in changed)])  # fmt: skip
    write_page(OUT / "tables.md", lines)


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
    rows = regimes(seeds)
    cells = {stack: {n: summary(rows[stack][n]) for n in SHARES} for stack in STACKS}
    few, many, two = max(2, seeds // 2), max(2, 3 * seeds // 4), ("hard", "soft", "latch")
    fronts = {"as chosen": frontier(many, SHOWN_GATES), "no ring": frontier(many, SHOWN_GATES, collude=0.0)}
    fronts |= {f"no ring, noise {noise:g}": frontier(few, two, collude=0.0, noise=noise) for noise in (0.25, 1.0)}
    equal = {name: equal_toxicity(front) for name, front in fronts.items()}
    looks, changed = detector(10 * seeds), choices(max(2, seeds // 4))
    plot_regimes(rows, cells)
    plot_frontier(fronts)
    plot_choices(changed, len(WORLDS))
    by_share = lambda better, worse: {n: paired(rows, better, worse, n) for n in SHARES}
    signal, vote = by_share("local + pairs", "local"), by_share("full", "local + vote")
    facts = {
        "kink": {stack: kink(rows[stack]) for stack in STACKS},
        "pairs": {n: {"on a signal": signal[n], "with a vote": vote[n]} for n in SHARES},
        "vote": by_share("local + vote", "local"), "always": by_share("full, every epoch", "full"), "full": by_share("full", "local"),
        "local": by_share("local", "soft"), "soft": by_share("soft", "hard"), "gate": by_share("full", "full, hard gate"),
    }  # fmt: skip
    minutes = (time.time() - began) / 60
    result = {"seeds": seeds, "cells": cells, "facts": facts, "equal_toxicity": equal, "detector": looks, "choices": changed}
    (OUT / "governance.json").write_text(json.dumps(numbers(result), separators=(",", ":")).replace('},"', '},\n"') + "\n")
    write(cells, facts, equal, looks, changed, seeds, minutes)
    print(f"wrote {OUT.relative_to(ROOT)}/ in {minutes:.1f} minutes")


if __name__ == "__main__":
    tyro.cli(sweep)
