"""How often are metrics.trend, metrics.change and metrics.adaptive_window wrong? Measured, into results/metrics/: the page and the picture.

python -m lab.trust.windows                # a few minutes on one core
python -m lab.trust.windows --runs 10      # a quick look; writes the same files

A detector is worth what its mistakes are worth, and those can only be counted where the truth is known. So runs are made up (a curve for
the true reward, then 8 groups of 8 episodes an update, noisier the more alike the answers to one task are), each detector is asked after
every update as train.py would, and its answer is compared with the curve. Seeded: the same call gives the same numbers. They stay in
windows.json; what the page says in short is computed from them.
"""

import zlib

import numpy as np
import statsmodels.api as sm
import tyro
from scipy import stats
from scipy.signal import lfilter
from tqdm import tqdm

import metrics
from lab.common import RESULTS, interval_of, pyplot, reach, save_picture, table, write_json, write_page

OUT = RESULTS / "metrics"
N = 400  # updates of a made-up run
# How alike the answers to one task are: 0 independent, 1 all the same (from their variance, grpo-0 has about 0.3 and no_think-0 0.7).
ICC = (0.0, 0.3, 0.8)
FIXED = (5, 10, 20, 40)  # the windows that people choose by hand
T = np.arange(N + 100)  # the truth is known further than any run sees


# ------------------------------------------------------------------------------------------------ made-up runs
rise = lambda tau: 0.93 - 0.78 * np.exp(-T / tau)
take_off = lambda middle: 0.15 + 0.78 / (1 + np.exp(-(T - middle) / 8))
CURVES = {  # name: (what it is, true reward of every update)
    "flat": ("0.5 all along", np.full(N + 100, 0.5)),
    "rise15": ("exponential approach, time constant 15", rise(15)),
    "rise30": ("exponential approach, time constant 30", rise(30)),
    "rise60": ("exponential approach, time constant 60", rise(60)),
    "take_off60": ("flat at 0.15, takes off at about 60", take_off(60)),
    "take_off150": ("flat at 0.15, takes off at about 150", take_off(150)),
    "line0.010": ("rises by 0.010 per 10 updates: the tolerance itself", 0.15 + 0.0010 * T),
    "line0.015": ("rises by 0.015 per 10 updates", 0.15 + 0.0015 * T),
    "line0.020": ("rises by 0.020 per 10 updates, up to 0.95", np.minimum(0.95, 0.15 + 0.0020 * T)),
    "wave": ("0.5 ± 0.1, period 60: never at rest", 0.5 + 0.1 * np.sin(2 * np.pi * T / 60)),
    "collapse": ("rises to 0.9, falls to 0.15 at 80", np.where(T < 80, 0.9 - 0.75 * np.exp(-T / 15), 0.15)),
}


def dice(*key) -> np.random.Generator:
    """A generator of its own for every made-up run, so that the order of the work does not matter."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def episodes(truth: np.ndarray, icc: float, rng: np.random.Generator, groups: int = 8, k: int = 8) -> np.ndarray:
    """[n] true rewards -> [n] mean rewards of groups x k episodes; tasks differ in difficulty (beta-binomial) if icc > 0."""
    p = np.repeat(np.clip(truth, 1e-3, 1 - 1e-3)[:, None], groups, axis=1)
    if icc > 0:
        p = rng.beta(p * (1 / icc - 1), (1 - p) * (1 / icc - 1))
    return rng.binomial(k, p).mean(axis=1) / k


def wander(n: int, r: float, sd: float, rng: np.random.Generator) -> np.ndarray:
    """[n] stationary AR(1) noise with that standard deviation and correlation r between neighbours."""
    shocks = rng.normal(0, sd * np.sqrt(1 - r * r), n)
    shocks[0] /= np.sqrt(1 - r * r)  # start in the stationary distribution
    return lfilter([1], [1, -r], shocks)


# ------------------------------------------------------------------------------------------------ 1. the intervals
def block_bootstrap(values: np.ndarray, rng: np.random.Generator, resamples: int = 400) -> tuple[float, float]:
    """Künsch's moving-block bootstrap of the mean (1989), blocks of 1.5 n^(1/3)."""
    n = len(values)
    length = max(1, round(1.5 * n ** (1 / 3)))
    starts = rng.integers(0, n - length + 1, (resamples, -(-n // length)))
    means = values[(starts[:, :, None] + np.arange(length)).reshape(resamples, -1)[:, :n]].mean(axis=1)
    return tuple(np.quantile(means, [0.025, 0.975]))


def coverage(runs: int) -> list[dict]:
    """How often do 95% intervals hold the truth (a level of 0, a slope of 0) in autocorrelated noise?"""
    rows = []
    for n in tqdm((30, 100, 300), desc="1 intervals"):
        for r in (0.0, 0.5, 0.8):
            hits = dict.fromkeys(("level", "metrics.mean", "block bootstrap", "slope", "Newey-West slope"), 0)
            for run in range(runs):
                rng = dice("coverage", n, r, run)
                x = wander(n, r, 1.0, rng)
                fit = sm.OLS(x, sm.add_constant(np.arange(n))).fit(cov_type="HAC", cov_kwds={"maxlags": int(1.3 * n**0.5)}, use_t=True)
                level, slope, plain = metrics.level(x), metrics.line(x)[0], metrics.mean(x)
                ends = (level.low, level.high), (plain.low, plain.high), block_bootstrap(x, rng), (slope.low, slope.high), fit.conf_int()[1]
                for name, (low, high) in zip(hits, ends):
                    hits[name] += low <= 0 <= high
            rows.append({"n": n, "r": r, "runs": runs, **{name: metrics.proportion(h, runs).dict() for name, h in hits.items()}})
    return rows


# ------------------------------------------------------------------------------------------------ 2. has it settled?
def no_slope(values: np.ndarray) -> bool:
    """The tempting rule: settled if the slope of the last 20 is not significant."""
    slope = metrics.line(values[-20:])[0]
    return slope.low <= 0 <= slope.high


def same_spread(values: np.ndarray) -> bool:
    """The rule of thumb of the blog post: settled once the trailing variance has stabilized (last 20 against the 20 before)."""
    return len(values) >= 40 and stats.levene(values[-20:], values[-40:-20]).pvalue > 0.05


RULES = {"trend": lambda v: metrics.trend(v).settled, "no slope": no_slope, "same spread": same_spread}


def first(rule, values: np.ndarray, start: int = 20) -> int | None:
    """The first update after which the rule says yes, when it is asked after each."""
    return next((n for n in range(start, len(values) + 1) if rule(values[:n])), None)


def verdicts(name: str, truth: np.ndarray, noise: str, make, runs: int, rules=RULES) -> list[dict]:
    """One line a rule: how often it spoke too soon, never, and how long after the plateau it spoke. Too soon: the truth later moves by more
    than 0.05 from where it was. The plateau begins where the truth stays within 0.02 of its end."""
    plateau = int(np.flatnonzero(np.abs(truth - truth[-1]) > 0.02)[-1]) + 1 if np.ptp(truth) > 0.02 else 0
    made, rows = [make(run) for run in range(runs)], []
    for label, rule in rules.items():
        said = [first(rule, values) for values in made]
        soon = [u for u in said if u and np.abs(truth[u - 1 :] - truth[u - 1]).max() > 0.05]
        right = [u for u in said if u and u not in soon]
        rows.append({
            "curve": name, "noise": noise, "rule": label, "runs": runs, "plateau": plateau,
            "too_soon": metrics.proportion(len(soon), runs).dict(), "never": metrics.proportion(sum(u is None for u in said), runs).dict(),
            "said": [float(q) for q in np.quantile(right, [0.05, 0.5, 0.95])] if right else None, "right": len(right),
        })  # fmt: skip
    return rows


def settling(runs: int) -> list[dict]:
    rows = []
    for name, (_, truth) in tqdm(CURVES.items(), desc="2 settled?"):
        for icc in ICC:
            rules = RULES if icc == 0.3 else {"trend": RULES["trend"]}
            make = lambda run, truth=truth, icc=icc, name=name: episodes(truth[:N], icc, dice("settling", name, icc, run))
            rows += verdicts(name, truth, f"icc {icc:g}", make, runs, rules)
    for r in (0.5, 0.8):  # noise that remembers, on the way to a plateau
        truth = rise(30)
        make = lambda run, r=r, truth=truth: truth[:N] + wander(N, r, 0.05, dice("settling-ar", r, run))
        rows += verdicts("rise30", truth, f"AR {r:g}", make, runs, {"trend": RULES["trend"]})
    return rows


# ------------------------------------------------------------------------------------------------ 3. has it dropped?
def against_before(values: np.ndarray, window: int) -> float:
    """The usual alarm: the mean of the last `window` against the mean of all before it, in standard errors."""
    if len(values) < 2 * window:
        return 0.0
    before, last = values[:-window], values[-window:]
    noise = np.std(np.diff(values)) / np.sqrt(2)
    return abs(last.mean() - before.mean()) / (noise * np.sqrt(1 / window + 1 / len(before)))


ALARMS = {"adaptive": lambda v: metrics.biggest_step(v)[0], **{f"last {w}": lambda v, w=w: against_before(v, w) for w in FIXED}}


def highest(alarm, values: np.ndarray, start: int) -> np.ndarray:
    """The alarm's highest statistic so far, after update start+1, start+2, …: it is heard once this exceeds the threshold."""
    return np.maximum.accumulate([alarm(values[:n]) for n in range(start + 1, len(values) + 1)])


def rate(paths: np.ndarray, threshold: float) -> float:
    """First false alarms per 100 updates watched. paths [runs, updates] of `highest`."""
    heard = paths > threshold
    watched = np.where(heard.any(axis=1), heard.argmax(axis=1) + 1, paths.shape[1]).sum()
    return 100 * heard.any(axis=1).sum() / watched


def dropping(runs: int) -> dict:
    """Delay after a drop against false alarms, each alarm with the threshold that gives it 0.05 false alarms per 100 updates."""
    horizon, at, kinds = 200, 100, [(0.5, 0.0), (0.5, 0.8), (0.9, 0.3)]  # (level, icc) of the runs that calibrate
    null, fresh = (
        {alarm: np.array([highest(f, episodes(np.full(horizon, level), icc, dice(part, level, icc, run)), 9)
                          for level, icc in kinds for run in range(2 * runs)])
         for alarm, f in tqdm(ALARMS.items(), desc=f"3 {part}")}
        for part in ("calibrate", "false alarms")
    )  # fmt: skip
    grid = np.linspace(2, 8, 601)
    threshold = {a: float(grid[np.argmax([rate(paths, t) <= 0.05 for t in grid])]) for a, paths in null.items()}
    result = {"runs": runs, "target": 0.05, "alarms": [], "drops": [], "curve": {}}
    remembering = [0.5 + wander(horizon, 0.5, 0.06, dice("ar", run)) for run in range(runs)]
    for alarm, paths in fresh.items():
        t, ar = threshold[alarm], np.array([highest(ALARMS[alarm], values, 9) for values in remembering])
        heard = metrics.proportion((paths[:, -1] > t).sum(), len(paths)).dict()
        line = {"alarm": alarm, "threshold": t, "rate": rate(paths, t), "runs_with_alarm": heard, "remembering": rate(ar, t)}
        result["alarms"].append(line)
    for drop in tqdm((0.05, 0.1, 0.2, 0.4, "slow 0.2"), desc="3 delays"):
        size = 0.2 if isinstance(drop, str) else drop
        fall = np.minimum(1, np.arange(1, 81) / 40) if isinstance(drop, str) else np.ones(80)  # slow: over 40 updates
        truth = np.r_[np.full(at, 0.6), 0.6 - size * fall]
        for icc in (0.0, 0.8):
            made = [episodes(truth, icc, dice("drop", drop, icc, run)) for run in range(runs)]
            for alarm, f in ALARMS.items():
                paths = np.array([highest(f, values, at) for values in made])  # [runs, 80], after the drop
                delay = lambda t, paths=paths: np.where((paths > t).any(axis=1), (paths > t).argmax(axis=1) + 1, 80)
                late, missed = metrics.mean(delay(threshold[alarm])), metrics.proportion((paths[:, -1] <= threshold[alarm]).sum(), runs)
                result["drops"].append({"drop": drop, "icc": icc, "alarm": alarm, "delay": late.dict(), "missed": missed.dict()})
                if drop == 0.1 and icc == 0.0:
                    result["curve"][alarm] = [(rate(fresh[alarm], t), float(delay(t).mean())) for t in np.linspace(2, 6, 41)]
    return result


# ------------------------------------------------------------------------------------------------ 4. the current level
def tracking(runs: int) -> list[dict]:
    """|window mean - truth| and coverage of metrics.level over the window, asked every 7 updates from 20 to 300."""
    rows, windows = [], {"adaptive": metrics.adaptive_window, **{f"last {w}": lambda v, w=w: w if len(v) > w else len(v) for w in FIXED}}
    for name in tqdm(("flat", "rise30", "rise60", "take_off60", "line0.020", "collapse"), desc="4 current level"):
        truth = CURVES[name][1]
        for icc in (0.0, 0.8):
            made = [episodes(truth[:300], icc, dice("tracking", name, icc, run)) for run in range(runs)]
            for label, window in windows.items():
                error, inside = [], []  # one number a run: the questions within a run are not independent
                for values in made:
                    asked = [(n, metrics.level(values[n - window(values[:n]) : n])) for n in range(20, 300, 7)]
                    error.append(np.mean([abs(i.mean - truth[n - 1]) for n, i in asked]))
                    inside.append(np.mean([i.low <= truth[n - 1] <= i.high for n, i in asked]))
                found = {"error": metrics.mean(error).dict(), "coverage": metrics.mean(inside).dict()}
                rows.append({"curve": name, "icc": icc, "window": label, "runs": runs, **found})
    return rows


# ------------------------------------------------------------------------------------------------ the page
rows_of = lambda head, rows: [*table(head, rows), ""]
percent = lambda c: interval_of(c).percent(0)


def write(found: dict) -> None:
    runs, drop = found["runs"], found["dropping"]
    out = [
        "# How often the detectors of metrics.py are wrong", "",
        f"`python -m lab.trust.windows --runs {runs}`, seeded; every number is from made-up runs whose truth is known. "
        "Brackets are 95% intervals: those of metrics.mean, over runs. "
        f"An update is the mean of 8 groups of 8 episodes; icc says how alike the answers to one task are. Runs have {N} updates.", "",
        *(f"* {line}" for line in in_short(found)), "", "![windows](windows.png)", "",
        "## Has it settled? `metrics.trend`, asked after every update", "",
        "**Too soon**: later, the truth moves by more than 0.05 from where it was. **Never**: not within 400 updates. "
        "**Said at**: median and 5% to 95% of the calls that were right; **after**: median minus the update at which the truth had come "
        "within 0.02 of its end (negative: it was called in the last slow part of the rise).", "",
        *rows_of(["truth", "noise", "n", "too soon", "never", "plateau from", "said at", "after"],
               [[CURVES[r["curve"]][0], r["noise"], r["runs"], percent(r["too_soon"]), percent(r["never"]), r["plateau"],
                 f"{r['said'][1]:.0f} ({r['said'][0]:.0f} to {r['said'][2]:.0f})" if r["said"] else "",
                 f"{r['said'][1] - r['plateau']:+.0f}" if r["said"] and "line" not in r["curve"] and r["curve"] != "wave" else ""]
                for r in found["settling"] if r["rule"] == "trend"]),
        "Two simpler rules on the same runs (icc 0.3), share of runs in which they spoke too soon: the slope of the last 20 updates is not "
        "significant; the variance of the last 20 does not differ from that of the 20 before (Levene, the rule of thumb that the blog "
        "post proposes).", "",
        *rows_of(["truth", "n", "trend", "no slope", "same spread"],
               [[CURVES[c][0], runs,
                 *(percent(next(r for r in found["settling"] if (r["curve"], r["noise"], r["rule"]) == (c, "icc 0.3", rule))["too_soon"])
                   for rule in RULES)] for c in CURVES if c != "flat"]),
        "## Has it dropped? `metrics.change` against fixed windows", "",
        f"Each alarm has the threshold that gave it {drop['target']} false alarms per 100 updates on flat runs of 200 updates (calibrated "
        "on other runs than the ones counted here). A fixed window compares its mean with that of everything before it.", "",
        *rows_of(["alarm", "threshold", "false alarms per 100 updates", "flat runs of 200 with one", "n", "per 100, AR(1) noise"],
               [[a["alarm"], f"{a['threshold']:.2f}", f"{a['rate']:.3f}", percent(a["runs_with_alarm"]), a["runs_with_alarm"]["n"],
                 f"{a['remembering']:.2f}"] for a in drop["alarms"]]),
        "`metrics.change` uses 4.0. In the last column the runs are as flat, but neighbours resemble each other (AR 0.5): all alarms take "
        "such wandering for steps. Rewards of real runs are not like that: every report says how often their steps turn around, and that "
        "is about as often as in white noise.", "",
        f"Mean delay in updates after a drop from 0.6 after update 100 (not heard within 80 counts as 80), n={drop['runs']} runs a cell; "
        "the best of a row in bold.", "",
        *rows_of(["drop", "icc", *ALARMS], [[d, icc, *best([c["delay"] for c in drop["drops"] if (c["drop"], c["icc"]) == (d, icc)])]
                                          for d in dict.fromkeys(c["drop"] for c in drop["drops"]) for icc in (0.0, 0.8)]),
        "## What is the current level? `metrics.level` over the last w updates", "",
        f"Mean distance between the window's mean and the truth, n={runs} runs a cell, asked every 7 updates from 20 to 300; "
        "the best of a row in bold.", "",
        *rows_of(["truth", "icc", "adaptive", *(f"last {w}" for w in FIXED)],
               [[CURVES[c][0], icc, *best([r["error"] for r in found["tracking"] if (r["curve"], r["icc"]) == (c, icc)])]
                for c in dict.fromkeys(r["curve"] for r in found["tracking"]) for icc in (0.0, 0.8)]),
        "Share of those questions in which the 95% interval holds the *current* truth. A window that lags behind a rise is precise "
        "about the past.", "",
        *rows_of(["truth", "icc", "adaptive", *(f"last {w}" for w in FIXED)],
               [[CURVES[c][0], icc, *(percent(r["coverage"]) for r in found["tracking"] if (r["curve"], r["icc"]) == (c, icc))]
                for c in dict.fromkeys(r["curve"] for r in found["tracking"]) for icc in (0.0, 0.8)]),
        "## The intervals themselves", "",
        "Share of 95% intervals that hold the truth, in AR(1) noise with correlation r. `metrics.mean` takes the values for independent; "
        "level and slope are those of metrics.py.", "",
        *rows_of(["updates", "r", "n", "level", "metrics.mean", "moving-block bootstrap", "slope", "Newey-West slope"],
               [[c["n"], c["r"], c["runs"],
                 *(percent(c[k]) for k in ("level", "metrics.mean", "block bootstrap", "slope", "Newey-West slope"))]
                for c in found["coverage"]]),
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
        f'trend says "settled" too soon in {wrong("rise15", "rise30", "rise60", "take_off60", "line0.020", "collapse")} that rise fast '
        "enough to matter or fall; "
        f"in {wrong('line0.015')} that rise by 1.5 tolerances per 10 updates, and in {wrong('line0.010')} that rise by one, where it is "
        f"meant to waver. It is helpless against what has not begun: {wrong('take_off150')} with a late take-off. A wave around a level "
        f"counts as settled ({wrong('wave')}).",
        f"It speaks {min(after):+.0f} to {max(after):+.0f} updates after the plateau begins (medians); more noise, later.",
        f"Hearing a drop: the adaptive alarm is the fastest in {wins(delays)} settings and at worst {cost(delays):.1f} times as slow as "
        f"the best fixed window of that setting; the fixed ones are at worst {worst(delays)}.",
        f"The current level: the adaptive window is the closest in {wins(errors)} settings, at worst {cost(errors):.1f} times as far off "
        f"as the best; the fixed ones at worst {worst(errors)}. "
        f"But on steady rises its interval holds the present in only {held('adaptive')}; "
        f"that of the last 10 in {held('last 10')}: there the fixed window wins.",
    ]


def best(cells: list[dict]) -> list[str]:
    """Cells of a row with the smallest in bold."""
    digits = 1 if max(c["mean"] for c in cells) > 1 else 3
    least = min(c["mean"] for c in cells)
    return [f"**{interval_of(c).text(digits)}**" if c["mean"] == least else interval_of(c).text(digits) for c in cells]


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
        ax.errorbar(x, y, xerr=100 * reach(map(interval_of, cells)), fmt="o", color=color, capsize=3, label=rule)
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
        ax.bar(x, [c["mean"] for c in cells], 0.14, yerr=reach(map(interval_of, cells)), label=label)
    ax.set_xticks(np.arange(len(curves)), curves)
    ax.set(title="distance of the window's mean from the current truth (icc 0)", ylabel="reward")
    ax.legend()
    for a in axes.flat:
        a.grid(alpha=0.25)
    save_picture(fig, OUT / "windows.png", 110)


def main(runs: int = 100) -> None:
    """Measure everything with `runs` made-up runs a setting, then write results/metrics/."""
    found = {"runs": runs, "coverage": coverage(4 * runs), "settling": settling(runs), "dropping": dropping(runs)}
    found["tracking"] = tracking(max(10, runs // 2))
    write_json(OUT / "windows.json", found)
    write(found)
    draw(found)
    print(f"wrote README.md, windows.json and windows.png into {OUT}")


if __name__ == "__main__":
    tyro.cli(main)
