"""The pictures and tables of the sweep (lab/swarm/governance_sweep.py), into results/governance/. What they mean stands there, written by hand."""

import platform
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from lab.swarm.governance import SHARES, STACKS
from metrics import Interval
from swarm.governance import over

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "results" / "governance"

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


def plot_choices(lines: list[dict], of_world: int) -> None:
    """of_world: so many variants change the world; below them stand those that change the stack."""
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
        ax.axhline(of_world - 0.5, color="#999999", linewidth=0.8, linestyle=":")
        ax.set(title=f"{PERCENT[n]} deceptive", xlabel="welfare a deal, last 10 epochs")
        ax.grid(alpha=0.3, axis="x")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=9, loc="lower right")
    fig.tight_layout()
    fig.savefig(OUT / "choices.png", dpi=100)
    plt.close(fig)


# ------------------------------------------------------------------------------------------------ tables
def show(i: Interval, digits: int = 2) -> str:
    return f"{i.mean:.{digits}f} [{i.low:.{digits}f}, {i.high:.{digits}f}]" if i.mean == i.mean else "–"


def percent(i: Interval) -> str:
    return f"{100 * i.mean:.0f}% [{100 * i.low:.0f}, {100 * i.high:.0f}]"


def regime(cell: dict) -> str:
    """By the published bounds, of what the proxy sees, as there."""
    if cell["welfare"].mean <= 0:
        return "collapse"
    return "cooperative" if cell["acceptance"].mean > 0.93 and cell["toxicity_seen"].mean < 0.30 else "contested"


def table_of(rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0]), *("| " + " | ".join(r) + " |" for r in rows[1:]), ""]


def write(cells, facts, equal, looks, changed, seeds: int, minutes: float) -> None:
    """The tables; what they mean stands in README.md beside them, written by hand."""
    by_share = lambda name, how: [["", *PERCENT]] + [[stack, *(how(cells[stack][n][name]) for n in SHARES)] for stack in STACKS]
    facts_by_share = lambda name: [show(facts[name][n]) for n in SHARES]
    lines = [
        "# Governance: the tables",
        "",
        f"`python -m lab.swarm.governance_sweep --seeds {seeds}`: seeds 0 to {seeds - 1} of each kind, {minutes:.0f} minutes on one of 2 cores, beside other "
        f"work. {platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}. Scripted bots only, no model. Brackets are 95% "
        "intervals over seeds (bootstrap of means, Wilson for shares). lab/swarm/governance.py says how the bots live and what was chosen.",
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
