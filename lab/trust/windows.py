"""How often are metrics.trend, metrics.change and metrics.adaptive_window wrong? Measured, into results/metrics/: the page and the picture.

python -m lab.trust.windows                # a few minutes on one core
python -m lab.trust.windows --runs 10      # a quick look; writes the same files

How it is measured: lab/trust/detectors.py. The numbers stay in windows.json; what the page says in short is computed from them.
"""

import numpy as np
import tyro

import metrics
from lab.common import RESULTS, percent, pyplot, save_picture, table, told, write_json, write_page
from lab.trust.detectors import ALARMS, CURVES, FIXED, RULES, N, coverage, dice, dropping, episodes, first, recorded, settling, tracking

OUT = RESULTS / "metrics"


rows_of = lambda head, rows: [*table(head, rows), ""]


def write(found: dict) -> None:
    runs, drop = found["runs"], found["dropping"]
    out = [
        "# How often the detectors of metrics.py are wrong", "",
        f"`python -m lab.trust.windows --runs {runs}`, seeded; every number is from made-up runs whose truth is known, except the last section. "
        "Brackets are 95% intervals: Wilson for shares, bootstrap over runs for means. "
        f"An update is the mean of 8 groups of 8 episodes; icc says how alike the answers to one task are. Runs have {N} updates.", "",
        *(f"* {line}" for line in in_short(found)), "", "![windows](windows.png)", "",
        "## Has it settled? `metrics.trend`, asked after every update", "",
        "**Too soon**: later, the truth moves by more than 0.05 from where it was. **Never**: not within 400 updates. "
        "**Said at**: median and 5% to 95% of the calls that were right; **after**: median minus the update at which the truth had come within 0.02 of its end "
        "(negative: it was called in the last slow part of the rise).", "",
        *rows_of(["truth", "noise", "n", "too soon", "never", "plateau from", "said at", "after"],
               [[CURVES[r["curve"]][0], r["noise"], r["runs"], percent(r["too_soon"]), percent(r["never"]), r["plateau"],
                 f"{r['said'][1]:.0f} ({r['said'][0]:.0f} to {r['said'][2]:.0f})" if r["said"] else "",
                 f"{r['said'][1] - r['plateau']:+.0f}" if r["said"] and "line" not in r["curve"] and r["curve"] != "wave" else ""]
                for r in found["settling"] if r["rule"] == "trend"]),
        "Two simpler rules on the same runs (icc 0.3), share of runs in which they spoke too soon: the slope of the last 20 updates is not significant; "
        "the variance of the last 20 does not differ from that of the 20 before (Levene, the rule of thumb that the blog post proposes).", "",
        *rows_of(["truth", "n", "trend", "no slope", "same spread"],
               [[CURVES[c][0], runs, *(percent(next(r for r in found["settling"] if (r["curve"], r["noise"], r["rule"]) == (c, "icc 0.3", rule))["too_soon"])
                                      for rule in RULES)] for c in CURVES if c != "flat"]),
        "## Has it dropped? `metrics.change` against fixed windows", "",
        f"Each alarm has the threshold that gave it {drop['target']} false alarms per 100 updates on flat runs of 200 updates (calibrated on other runs than "
        "the ones counted here). A fixed window compares its mean with that of everything before it.", "",
        *rows_of(["alarm", "threshold", "false alarms per 100 updates", "flat runs of 200 with one", "n", "per 100, AR(1) noise"],
               [[a["alarm"], f"{a['threshold']:.2f}", f"{a['rate']:.3f}", percent(a["runs_with_alarm"]), a["runs_with_alarm"]["n"], f"{a['remembering']:.2f}"] for a in drop["alarms"]]),
        "`metrics.change` uses 4.0. In the last column the runs are as flat, but neighbours resemble each other (AR 0.5): all alarms take such wandering for steps. "
        "The recorded runs are not like that: their steps turn around as often as white noise does.", "",
        f"Mean delay in updates after a drop from 0.6 after update 100 (not heard within 80 counts as 80), n={drop['runs']} runs a cell; the best of a row in bold.", "",
        *rows_of(["drop", "icc", *ALARMS], [[d, icc, *best([c["delay"] for c in drop["drops"] if (c["drop"], c["icc"]) == (d, icc)])]
                                          for d in dict.fromkeys(c["drop"] for c in drop["drops"]) for icc in (0.0, 0.8)]),
        "## What is the current level? `metrics.level` over the last w updates", "",
        f"Mean distance between the window's mean and the truth, n={runs} runs a cell, asked every 7 updates from 20 to 300; the best of a row in bold.", "",
        *rows_of(["truth", "icc", "adaptive", *(f"last {w}" for w in FIXED)],
               [[CURVES[c][0], icc, *best([r["error"] for r in found["tracking"] if (r["curve"], r["icc"]) == (c, icc)])]
                for c in dict.fromkeys(r["curve"] for r in found["tracking"]) for icc in (0.0, 0.8)]),
        "Share of those questions in which the 95% interval holds the *current* truth. A window that lags behind a rise is precise about the past.", "",
        *rows_of(["truth", "icc", "adaptive", *(f"last {w}" for w in FIXED)],
               [[CURVES[c][0], icc, *(percent(r["coverage"]) for r in found["tracking"] if (r["curve"], r["icc"]) == (c, icc))]
                for c in dict.fromkeys(r["curve"] for r in found["tracking"]) for icc in (0.0, 0.8)]),
        "## The intervals themselves", "",
        "Share of 95% intervals that hold the truth, in AR(1) noise with correlation r. `metrics.mean` shuffles the values; level and slope are those of metrics.py.", "",
        *rows_of(["updates", "r", "n", "level", "metrics.mean", "moving-block bootstrap", "slope", "Newey-West slope"],
               [[c["n"], c["r"], c["runs"], *(percent(c[k]) for k in ("level", "shuffling bootstrap", "block bootstrap", "slope", "Newey-West slope"))]
                for c in found["coverage"]]),
        "## Recorded runs", "",
        "Nobody knows the truth here. Their learning rate falls to a tenth, so to settle is not to have reached all that could be reached.", "",
    ]  # fmt: skip
    for r in found["recorded"]:
        after = f"; the mean of the updates after that is {told(r['mean_after'], 2)}" if r["mean_after"] else ""
        out += [
            f"**{r['run']}** ({r['updates']} updates)", "",
            f"* {r['distribution']}",
            f"* first said to have settled at update {r['settled']}: {r['when_settled']}{after}" if r["settled"] else f"* never settled; at the end: {r['at_end']}",
            f"* {'the latest step: ' + r['change'] if r['change'] else 'no step'}; the last {r['window']} updates speak for the present", "",
        ]  # fmt: skip
    out += [
        "How far the window's mean lies from the mean of the next 10 updates (asked every 5 updates; neighbouring questions overlap, so the intervals are too narrow):", "",
        *rows_of(["run", "n", "adaptive", *(f"last {w}" for w in FIXED)], [[r["run"], r["asked"], *best(list(r["next10"].values()))] for r in found["recorded"]]),
    ]  # fmt: skip
    write_page(OUT / "README.md", out)


def in_short(found: dict) -> list[str]:
    """The findings, computed."""
    trend = [r for r in found["settling"] if r["rule"] == "trend"]
    soon = lambda *curves: sum((r["too_soon"]["mean"] * r["runs"] for r in trend if r["curve"] in curves), 0.0)
    asked = lambda *curves: sum(r["runs"] for r in trend if r["curve"] in curves)
    wrong = lambda *curves: metrics.proportion(soon(*curves), asked(*curves)).percent() + f" of {asked(*curves)} runs"
    rising = ("rise15", "rise30", "rise60", "take_off60", "collapse")
    after = [r["said"][1] - r["plateau"] for r in trend if r["said"] and r["curve"] in rising]
    rows, settings = found["tracking"], lambda rows, by, what: [
        [r[what]["mean"] for r in rows if (r[by], r["icc"]) == key] for key in dict.fromkeys((r[by], r["icc"]) for r in rows)]  # fmt: skip
    delays, errors = settings(found["dropping"]["drops"], "drop", "delay"), settings(rows, "curve", "error")
    worst = lambda table: ", ".join(f"{max(c[i + 1] / min(c) for c in table):.1f} (last {w})" for i, w in enumerate(FIXED))
    wins = lambda table: f"{sum(cells[0] == min(cells) for cells in table)} of {len(table)}"
    cost = lambda table: max(cells[0] / min(cells) for cells in table)
    lagging = lambda w: [r["coverage"]["mean"] for r in rows if r["window"] == w and r["curve"] in ("rise30", "rise60", "line0.020")]
    held = lambda w: f"{100 * min(lagging(w)):.0f}% to {100 * max(lagging(w)):.0f}%"
    return [
        f'trend says "settled" too soon in {wrong("rise15", "rise30", "rise60", "take_off60", "line0.020", "collapse")} that rise fast enough to matter or fall; '
        f"in {wrong('line0.015')} that rise by 1.5 tolerances per 10 updates, and in {wrong('line0.010')} that rise by one, where it is meant to waver. "
        f"It is helpless against what has not begun: {wrong('take_off150')} with a late take-off. A wave around a level counts as settled ({wrong('wave')}).",
        f"It speaks {min(after):+.0f} to {max(after):+.0f} updates after the plateau begins (medians); more noise, later.",
        f"Hearing a drop: the adaptive alarm is the fastest in {wins(delays)} settings and at worst {cost(delays):.1f} times as slow as the best fixed window "
        f"of that setting; the fixed ones are at worst {worst(delays)}.",
        f"The current level: the adaptive window is the closest in {wins(errors)} settings, at worst {cost(errors):.1f} times as far off as the best; "
        f"the fixed ones at worst {worst(errors)}. "
        f"But on steady rises its interval holds the present in only {held('adaptive')}; that of the last 10 in {held('last 10')}: there the fixed window wins.",
    ]


def best(cells: list[dict]) -> list[str]:
    """Cells of a row with the smallest in bold."""
    digits = 1 if max(c["mean"] for c in cells) > 1 else 3
    least = min(c["mean"] for c in cells)
    return [f"**{told(c, digits)}**" if c["mean"] == least else told(c, digits) for c in cells]


def errors(cells: list[dict]) -> list[list[float]]:
    """What errorbar takes."""
    return [[c["mean"] - c["low"] for c in cells], [c["high"] - c["mean"] for c in cells]]


def draw(found: dict) -> None:
    fig, axes = pyplot().subplots(2, 2, figsize=(14, 9.5), layout="constrained")
    ax = axes[0, 0]
    for name, color in (("rise30", "C0"), ("take_off150", "C3"), ("line0.020", "C2")):
        values = episodes(CURVES[name][1][:N], 0.3, dice("settling", name, 0.3, 0))
        ax.plot(values, lw=0.6, alpha=0.5, color=color)
        ax.plot(CURVES[name][1][:N], lw=2, color=color, label=CURVES[name][0])
        if said := first(RULES["trend"], values):
            ax.plot(said - 1, CURVES[name][1][said - 1], "o", ms=11, mfc="white", mec=color, mew=2.5)
    ax.set(title='where trend first says "settled" (circles)', xlabel="update", ylabel="reward", ylim=(0, 1))
    ax.legend(loc="lower right")
    ax = axes[0, 1]
    rows = [r for r in found["settling"] if r["noise"] == "icc 0.3" and r["curve"] != "flat"]
    names = list(dict.fromkeys(r["curve"] for r in rows))
    for i, (rule, color) in enumerate(zip(RULES, ("C0", "C1", "C7"))):
        cells = [r["too_soon"] for r in rows if r["rule"] == rule]
        x, y = [100 * c["mean"] for c in cells], np.arange(len(names))[::-1] + 0.22 * (1 - i)
        ax.errorbar(x, y, xerr=100 * np.array(errors(cells)), fmt="o", color=color, capsize=3, label=rule)
    ax.set(title=f'said "settled" too soon (icc 0.3, n={found["runs"]} runs, 95% intervals)', xlabel="% of runs", xlim=(-2, 102))
    ax.set_yticks(np.arange(len(names))[::-1], [CURVES[n][0].split(":")[0] for n in names])
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
    ax = axes[1, 0]
    for alarm, points in found["dropping"]["curve"].items():
        x, y = zip(*[p for p in points if p[0] > 0])
        ax.plot(x, y, lw=3 if alarm == "adaptive" else 1.3, label=alarm)
    ax.axvline(0.05, color="grey", ls=":", lw=1)
    ax.set_title("a drop by 0.1, icc 0: delay against false alarms")
    ax.set(xlabel="false alarms per 100 flat updates", ylabel="mean delay, updates")
    ax.set(xscale="log", xlim=(0.01, 3), ylim=(0, 35))
    ax.legend()
    ax = axes[1, 1]
    curves = list(dict.fromkeys(r["curve"] for r in found["tracking"]))
    for i, label in enumerate(("adaptive", *(f"last {w}" for w in FIXED))):
        cells = [r["error"] for r in found["tracking"] if r["window"] == label and r["icc"] == 0.0]
        x = np.arange(len(curves)) + 0.15 * (i - 2)
        ax.bar(x, [c["mean"] for c in cells], 0.14, yerr=errors(cells), label=label)
    ax.set_xticks(np.arange(len(curves)), curves)
    ax.set(title="distance of the window's mean from the current truth (icc 0)", ylabel="reward")
    ax.legend()
    for a in axes.flat:
        a.grid(alpha=0.25)
    save_picture(fig, OUT / "windows.png", 110)


def main(runs: int = 100) -> None:
    """Measure everything with `runs` made-up runs a setting, then write results/metrics/."""
    found = {"runs": runs, "coverage": coverage(4 * runs), "settling": settling(runs), "dropping": dropping(runs)}
    found |= {"tracking": tracking(max(10, runs // 2)), "recorded": recorded()}
    write_json(OUT / "windows.json", found)
    write(found)
    draw(found)
    print(f"wrote README.md, windows.json and windows.png into {OUT}")


if __name__ == "__main__":
    tyro.cli(main)
