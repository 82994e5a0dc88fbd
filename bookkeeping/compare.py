"""Is one arm better than another? Run folders in, a table of verdicts and two pictures out.

    python -m bookkeeping.compare runs/a runs/b runs/c …
    python -m bookkeeping.report compare runs/a runs/b …      (the same)

Runs that differ only in seed, name and the like are one arm; arms are told apart by the flags in
which they differ. Every pair of arms is compared on every task set that both were evaluated on at
the end. Tasks of the same label are the same tasks in the same order, so the comparison is paired:
a hard task is hard for both, and cancels. If one arm has more of them, the first ones are taken.

What the interval and the p-value cover depends on the seeds:

    one seed in either arm   only the tasks vary: metrics.gain, p from permutation_test. It
                             says which of these two *runs* is better. Whether another seed would
                             agree is not covered, and the report says so.
    two seeds or more each   seeds and tasks vary: Var = Var_seeds(A)/S_A + Var_seeds(B)/S_B +
                             Var_tasks(difference)/T, Student's t with Satterthwaite's degrees of
                             freedom (1946). Two seeds say little, so their t is wide, as it should
                             be.

Why not sign flips, or a two-way bootstrap over seeds and tasks, in the second case too? Both were
tried on arms that do not differ but whose seeds do. With two seeds per arm, flips find a winner in
43% of the cases and the bootstrap in 17% (it cannot know how little two seeds are); this finds one
in 6% (tests/test_compare.py has the simulation). Noise within a run is counted twice here, which
errs on the safe side.

Many comparisons find a winner by luck. So p-values are corrected by Holm's method (1979) over the
whole table, and the verdict uses only the corrected ones. A p that no shuffle reached is a bound,
so that a table of hundreds of rows can still have a winner.
"""

import json
import math
import string
import sys
from dataclasses import dataclass, replace
from itertools import combinations, count
from pathlib import Path

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests

import metrics
from bookkeeping import records, tables
from bookkeeping.records import answered, clean, foreign, lines, record
from metrics import Interval

# What arms are compared by, if both have it. swarm has no exact answers, but its reward has parts;
# those are compared on the trained tasks.
MEASURES, PARTS = ("exact", "reward"), tables.PARTS
EQUAL = 0.05  # a 95% interval that reaches no further to either side shows that two arms are equal
# Flags that do not make another arm.
SAME = {
    "seed", "name", "runs", "resume", "threads", "wandb", "device", "save_every",
    "eval_other_tiers", "micro_tokens", "gradient_checkpointing", "vllm_memory", "vllm_sleep",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    folder: Path
    config: dict
    final: dict  # label of a task set -> its line of evals.jsonl
    rewards: list[float]  # mean training reward of every update
    edited: str = ""  # a sentence, if its environment was edited while it trained


@dataclass(frozen=True)
class Arm:
    letter: str
    label: str
    runs: list[Run]

    def seeds(self) -> list[int]:
        return sorted({run.config["seed"] for run in self.runs})

    def table(self, tasks: str, what: str, only: list[int] | None = None) -> np.ndarray:
        """[seeds, tasks] final results. Runs of the same seed are not independent: take their mean.

        only: numbers of the tasks to take. None: all that every run of the arm has an answer to.
        """
        if only is None:
            only = common(self.runs, tasks)

        def results(run: Run) -> list[float]:
            line = run.final[tasks]
            by_task = dict(zip(answered(line), line[what]))
            return [by_task[i] for i in only]

        of_seed = lambda seed: [results(run) for run in self.runs if run.config["seed"] == seed]
        return np.array([np.mean(of_seed(seed), axis=0) for seed in self.seeds()], dtype=float)


@dataclass(frozen=True)
class Difference:
    """The first arm minus the second."""

    difference: Interval  # n: tasks of the first arm
    p: float
    over: str  # what varies in interval and p
    paired: bool


# ----------------------------------------------------------------------------------------- reading


def read(folder: Path) -> Run:
    """A finished run. ValueError with a sentence if it is none."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json, so it is no run folder; check the path")
    cure = f"go on with python train.py --resume {folder}"
    if not (folder / "summary.json").exists():
        raise ValueError(f"{folder} has no summary.json: the run has not finished; {cure}")
    config, final = record(folder / "config.json"), {}
    environments = records.environments_of(record(folder / "summary.json").get("machine", {}))
    if environments:  # older runs do not know
        config["environment_code"] = " then ".join(code for _, code in environments)
    for line in clean(lines(folder / "evals.jsonl")):
        if line["stage"] == "final":  # old files say "tier"
            trained = line.get("trained", line.get("tier") == config.get("difficulty"))
            tasks = line.get("tasks", f"tier {line.get('tier')}")
            final[tasks] = {**line, "trained": trained}
    if not final:
        raise ValueError(f"{folder}/evals.jsonl has no final evaluation; {cure}")
    rewards = [line["reward"] for line in lines(folder / "metrics.jsonl")]
    return Run(folder, config, final, rewards, records.edited(environments))


# What a run that is older than a flag did.
BEFORE = {"plain": False}


def flag(run: Run, name: str):
    """The value of a flag in a run, so that runs of older versions stay in their arm."""
    config = run.config
    if name.startswith("swarm_") and config.get("env") != "swarm":
        return "not set"  # once every run wrote these down
    value = config.get(name, BEFORE.get(name, "not set"))
    if name == "model" and value == "auto":  # once the model that was chosen was not written down
        return "pico_swarm" if config.get("env") == "swarm" else "pico_base"
    return value


def group(runs: list[Run], ignore: tuple[str, ...] = ()) -> list[Arm]:
    """Runs with the same flags, apart from SAME and `ignore`, are one arm, in order of first run.

    An evaluation over an API trained nothing. It is called by its model, and its flags do not tell
    the others apart.
    """
    known = {name for run in runs for name in run.config}
    unknown = [name for name in ignore if name not in known]
    if unknown:
        raise ValueError(f"--ignore {unknown[0]}: no run has such a flag; config.json lists them")
    names = known - SAME - set(ignore)
    flags = sorted(name for name in names if not name.startswith("api_"))
    over_api = lambda run: run.config.get("api_base") or ""
    members: dict[str, list[Run]] = {}
    for run in runs:
        heat = over_api(run) and run.config.get("api_temperature")
        key = json.dumps([over_api(run), heat, *(flag(run, name) for name in flags)])
        members.setdefault(key, []).append(run)
    if len(members) > 26:
        cure = "give fewer runs, or --ignore the flag that sets them apart"
        raise ValueError(f"{len(members)} arms are too many to read; {cure}")
    firsts = [runs[0] for runs in members.values()]
    ours = [run for run in firsts if not over_api(run)]
    differs = lambda name: len({json.dumps(flag(run, name)) for run in ours}) > 1
    differing = [name for name in flags if differs(name)]

    def label(run: Run) -> str:
        if over_api(run):
            like = [r for r in firsts if over_api(r) and r.config["model"] == run.config["model"]]
            names = [*flags, "api_base", "api_temperature"]
            names = [n for n in names if len({json.dumps(r.config.get(n)) for r in like}) > 1]
            told = [f"{n}={run.config.get(n)}" for n in names]
            return ", ".join([f"{run.config['model']} over an API", *told])
        told = ", ".join(f"{name}={flag(run, name)}" for name in differing)
        return told or ("all other runs" if len(firsts) > len(ours) else "all runs")

    labels = map(label, firsts)
    return [Arm(*arm) for arm in zip(string.ascii_uppercase, labels, members.values())]


def common(runs: list[Run], tasks: str) -> list[int]:
    """The numbers of the tasks that every run has a result of."""
    return sorted(set.intersection(*(set(answered(run.final[tasks])) for run in runs)))


# --------------------------------------------------------------------------------------- comparing


def permutation_test(a, b, paired: bool = True, resamples: int = 9999):
    """Two-sided p that the means of a and b differ only by luck. a [n, …], b [m, …] -> p […]

    Paired (n = m, the same tasks): if nothing differs, every a - b could as well have the other
    sign. Unpaired: every value could as well be in the other sample. How often does such a shuffle
    give means as far apart as the real ones? If none of the shuffles does, p is Hoeffding's bound
    (1963) on how often one would: 1 / (resamples + 1) alone, corrected for 500 comparisons, could
    never be small.
    """
    rng = np.random.default_rng(0)
    n, m = len(a), len(a) if paired else len(b)
    if paired:
        values, real = a - b, np.ones(n)
        shuffled = rng.choice([-1.0, 1.0], (resamples, n))
    else:
        values = np.concatenate([a, b])
        real = np.concatenate([np.full(n, 1 / n), np.full(m, -1 / m)])
        shuffled = rng.permuted(np.tile(real, (resamples, 1)), axis=1)
    distance = np.abs(real @ values)
    as_far = (np.abs(shuffled @ values) >= distance - 1e-9).sum(axis=0)  # […]; rounding
    if paired:
        variance = (values**2).sum(axis=0)
    else:  # a mean of n of n + m values, drawn without replacement, each in a range of ptp
        variance = np.ptp(values, axis=0) ** 2 * (n + m) ** 2 / (4 * n * m * max(n, m))
    bound = 2 * np.exp(-(distance**2) / np.maximum(2 * variance, 1e-300))
    p = (1 + as_far) / (resamples + 1)
    return np.where(as_far == 0, np.minimum(p, bound), p)


def holm(p) -> list[float]:
    """p-values corrected for how many they are, by Holm's method (1979)."""
    return multipletests(p, method="holm")[1].tolist() if len(p) else []


def by_variance(
    estimate: float, parts: list[tuple[float, float]], n: int, ends=(-1.0, 1.0), level=0.95
) -> tuple[Interval, float]:
    """Student's interval of an estimate, and the p that it is 0.

    parts: (variance, degrees of freedom), which add up (Satterthwaite 1946). ends: what values may
    be, if all that were seen agree.
    """
    total = sum(v for v, _ in parts)
    if total == 0:  # nothing varies; n tasks that all differ the same way are n equal signs
        z2 = metrics.Z2 if level == 0.95 else float(stats.norm.ppf((1 + level) / 2)) ** 2
        return metrics.alike(estimate, n, ends, z2), 1.0 if estimate == 0 else 0.5 ** (n - 1)
    freedom, error = total**2 / sum(v**2 / df for v, df in parts if v), math.sqrt(total)
    reach = float(stats.t.ppf((1 + level) / 2, freedom)) * error
    p = float(2 * stats.t.sf(abs(estimate) / error, freedom))
    return Interval(estimate, estimate - reach, estimate + reach, n), p


def variance_of_mean(values: np.ndarray) -> tuple[float, int]:
    """(variance of their mean, degrees of freedom)"""
    n = len(values)
    return (float(np.var(values, ddof=1) / n) if n > 1 else 0.0), n - 1


def differ(a: np.ndarray, b: np.ndarray) -> Difference:
    """a, b [seeds, tasks] -> a - b. Paired by task if the numbers of tasks agree."""
    paired, seeds = a.shape[1] == b.shape[1], min(len(a), len(b)) > 1
    x, y = a.mean(axis=0), b.mean(axis=0)  # [tasks] each
    over = ("seeds and tasks" if seeds else "tasks only") + ("" if paired else ", unpaired")
    estimate, n = float(x.mean() - y.mean()), len(x)
    if seeds:
        varies = [a.mean(axis=1), b.mean(axis=1), *([x - y] if paired else [x, y])]
        found = by_variance(estimate, [variance_of_mean(values) for values in varies], n)
        return Difference(*found, over, paired)
    p = float(permutation_test(x, y, paired))
    if paired:
        return Difference(metrics.gain(y, x), p, over, True)
    interval, _ = by_variance(estimate, [variance_of_mean(x), variance_of_mean(y)], n)  # Welch
    return Difference(interval, p, over, False)


def paid_by(run: Run) -> dict:
    """The flags that decide what is paid: rewards under others are no longer the same measure."""
    swarm = run.config.get("env") == "swarm"
    pays = lambda name: name.startswith("swarm_") if swarm else name == "reward"
    return {name: value for name, value in run.config.items() if pays(name)}


def final_mean(arm: Arm, tasks: str, what: str) -> Interval:
    """An arm's final mean, over tasks for one seed, over seeds and tasks for more."""
    table = arm.table(tasks, what)  # [seeds, tasks]
    if len(table) == 1:
        return metrics.mean(table[0])
    parts = [variance_of_mean(table.mean(axis=axis)) for axis in (1, 0)]
    return by_variance(float(table.mean()), parts, table.shape[1], (0.0, 1.0))[0]


def compare(arms: list[Arm]) -> tuple[list[dict], list[str]]:
    """A row per pair of arms, task set and measure, corrected by Holm; notes on what is missing."""
    rows, notes = [], []
    for a, b in combinations(arms, 2):
        shared = [t for t in a.runs[0].final if all(t in run.final for run in a.runs + b.runs)]
        if not shared:
            both = f"{a.letter} and {b.letter}"
            notes.append(f"{both} were evaluated on different task sets; nothing to compare.")
        for tasks in shared:
            found, told = compare_on(tasks, a, b)
            rows += found
            notes += told
    for row, p in zip(rows, holm([row["d"].p for row in rows])):
        better = row["a"] if row["d"].difference.mean > 0 else row["b"]
        unsure = equal_within(row["d"].difference, row["what"])
        row |= {"corrected": p, "verdict": f"{better.letter} better" if p < 0.05 else unsure}
    return rows, list(dict.fromkeys(notes))


def equal_within(difference: Interval, what: str) -> str:
    """The verdict if no difference was found: the whole interval may be too narrow to hide one."""
    reach = max(abs(difference.low), abs(difference.high))
    if not reach <= EQUAL:
        return "cannot tell"
    points = math.ceil(1000 * reach - 1e-6) / 10
    within = f"{points:g} points" if what == "exact" else f"{points / 100:g}"
    return f"equal within {within}"


def compare_on(tasks: str, a: Arm, b: Arm) -> tuple[list[dict], list[str]]:
    """The rows of two arms on one task set, a row per measure, and notes."""
    finals = [run.final[tasks] for run in a.runs + b.runs]
    trained, both = finals[0]["trained"], f"{a.letter} and {b.letter}"
    has = lambda what: all(what in line for line in finals)
    measures = [what for what in (*MEASURES, *(PARTS if trained else ())) if has(what)]
    only = None
    if any("missing" in line for line in finals) or len({len(e["reward"]) for e in finals}) > 1:
        only = common(a.runs + b.runs, tasks)
        if not only:
            why = f"have no task of {tasks} that both had an answer to"
            return [], [f"{both} {why}; nothing to compare."]
    rows, notes = [], []
    for what in measures:
        if what == "reward":
            why = same_reward(tasks, a, b, has("exact"))
            if why:
                notes.append(why)
                continue
        x, y = a.table(tasks, what, only), b.table(tasks, what, only)
        means = {"x": float(x.mean()), "y": float(y.mean())}
        row = {"a": a, "b": b, "tasks": tasks, "what": what, "trained": trained, **means}
        rows.append(row | {"d": differ(x, y), "n": sorted({x.shape[1], y.shape[1]})})
    return rows, notes


def same_reward(tasks: str, a: Arm, b: Arm, exact: bool) -> str:
    """Why the reward of two arms is not compared, or "". exact: exact answers are."""
    codes = {run.config.get("environment_code") for run in a.runs + b.runs} - {None}
    if paid_by(a.runs[0]) != paid_by(b.runs[0]) or len(codes) > 1:
        rest = "only its parts are compared, on the trained tasks"
        if exact:
            rest = "only exact answers are compared"
        edited = ": their environments' code differs" if len(codes) > 1 else ""
        return f"{a.letter} and {b.letter} were paid by different rewards{edited}; {rest}."
    is_exact = lambda arm: np.array_equal(arm.table(tasks, "exact"), arm.table(tasks, "reward"))
    if exact and is_exact(a) and is_exact(b):
        return (
            "Where the reward is 1 for an exact answer and 0 otherwise, it is not compared again."
        )
    return ""


# ------------------------------------------------------------------------------ what a person gets


def headline(arms: list[Arm]) -> str:
    """What the arms are shown by: exact answers, or the mean reward if one has no such thing."""
    finals = [line for arm in arms for run in arm.runs for line in run.final.values()]
    return "exact" if all("exact" in line for line in finals) else "reward"


def task_sets(arms: list[Arm]) -> list[str]:
    return list(dict.fromkeys(tasks for arm in arms for run in arm.runs for tasks in run.final))


def small(p: float) -> str:
    """A p-value as text: '0.012', or '<0.001'."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def plural(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' if n > 1 else ''}"


def text(arms: list[Arm], rows: list[dict], notes: list[str]) -> str:
    """compare.md."""
    names = lambda arm: ", ".join(clean(run.folder.name) for run in arm.runs)
    title = f"# {sum(len(arm.runs) for arm in arms)} runs, {plural(len(arms), 'arm')}"
    table = [[f"**{a.letter}**", a.label, ", ".join(map(str, a.seeds())), names(a)] for a in arms]
    out = [title, "", *tables.grid(["", "arm", "seeds", "runs"], table), "", "## Verdicts", ""]
    if rows:
        out += verdicts(rows)
        if any(row["d"].over.startswith("tasks only") for row in rows):
            alone = "an arm has a single seed, so how much another seed would change is not in"
            notes = [f"Tasks only: {alone} the interval, the p or the verdict.", *notes]
    elif len(arms) == 1:
        out.append("All runs have the same flags: one arm, nothing to compare.")
    else:
        out.append("No two arms can be compared.")
    if any(len(arm.runs) > len(arm.seeds()) for arm in arms):
        notes = [*notes, "Several runs of one seed were averaged and count as one."]
    mixed = [run for arm in arms for run in arm.runs if run.edited]
    notes = [*notes, *(f"{clean(run.folder.name)} was {run.edited}." for run in mixed)]
    if notes:
        out += ["", *(f"* {note}" for note in notes)]
    out += ["", "## Final results", "", *final_results(arms), "", "![compare](compare.png)", ""]
    out += ["## Training reward", ""]
    for arm in arms:
        for run in arm.runs:
            told = "no updates."
            if run.rewards:
                end = metrics.trend(run.rewards).sentence()
                told = f"{metrics.distribution(run.rewards).sentence()}. At its end: {end}."
            out.append(f"* {arm.letter}, {clean(run.folder.name)}: {told}")
    return "\n".join(out) + "\n"


def verdicts(rows: list[dict]) -> list[str]:
    """The table of all comparisons."""
    head = (
        "tasks", "measure", "arms", "means", "difference", "varies in the interval", "n tasks", "p",
        "p corrected", "verdict",
    )  # fmt: skip
    table = []
    for row in rows:
        digits, scale, unit = (1, 100, "%") if row["what"] == "exact" else (3, 1, "")
        d, mean = row["d"], lambda x: f"{scale * x:.{digits}f}{unit}"  # noqa: B023
        table.append([
            row["tasks"] + (" (trained)" if row["trained"] else ""), row["what"],
            f"{row['a'].letter} − {row['b'].letter}", f"{mean(row['x'])}, {mean(row['y'])}",
            d.difference.text(digits, scale, sign="+"), d.over, " and ".join(map(str, row["n"])),
            small(d.p), small(row["corrected"]), f"**{row['verdict']}**",
        ])  # fmt: skip
    sentence = (
        "First minus second, with its 95% interval; p corrected by Holm's method for "
        f'{plural(len(rows), "comparison")}, winner at 0.05 from the corrected p alone. "Cannot '
        'tell" does not mean equal: the interval says how large a difference may be hiding. '
        f'"Equal" does: its whole interval lies within {100 * EQUAL:g} points (rewards: {EQUAL}).'
    )
    return [sentence, "", *tables.grid(list(head), table)]


def final_results(arms: list[Arm]) -> list[str]:
    what, sets = headline(arms), task_sets(arms)

    def cell(arm: Arm, tasks: str) -> str:
        if not all(tasks in run.final for run in arm.runs):
            return ""
        mean = final_mean(arm, tasks, what)
        return mean.percent() if what == "exact" else mean.text()

    table = [[f"{arm.letter}: {arm.label}", *(cell(arm, t) for t in sets)] for arm in arms]
    measure = "Exactly right" if what == "exact" else "Mean reward"
    over = "over tasks; over seeds and tasks where an arm has several seeds"
    sentence = f"{measure}, with 95% intervals ({over})."
    return [sentence, "", *tables.grid(["arm", *sets], table)]


def draw(path: Path, arms: list[Arm]) -> None:
    """compare.png: the training reward, and the final results."""
    plt = tables.pyplot()
    height = max(4.5, 1 + 0.3 * len(task_sets(arms)) * (len(arms) + 1))
    fig, (left, right) = plt.subplots(1, 2, figsize=(14, height), layout="constrained")
    draw_training(left, arms)
    draw_final(right, arms)
    for ax in (left, right):
        ax.grid(alpha=0.25)
        ax.title.set_fontsize(10)
    handles, labels = right.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def draw_training(ax, arms: list[Arm], window: int = 10) -> None:
    """Means of `window` updates: thin lines for runs, a thick one with a band for the arm."""
    for i, arm in enumerate(arms):
        color = f"C{i % 10}"
        long = [run.rewards for run in arm.runs if len(run.rewards) >= window]
        rolled = [np.convolve(r, np.ones(window) / window, mode="valid") for r in long]
        for line in rolled:
            ax.plot(np.arange(len(line)) + window, line, lw=0.8, alpha=0.6, color=color)
        if not rolled:
            continue
        together = np.array([line[: min(map(len, rolled))] for line in rolled])  # [runs, updates]
        x, middle = np.arange(together.shape[1]) + window, together.mean(axis=0)
        low, high = together.min(axis=0), together.max(axis=0)
        if len(arm.seeds()) == 1:
            windows = np.lib.stride_tricks.sliding_window_view(long[0], window)
            spread = windows.std(axis=1, ddof=1)  # [updates]
            reach = stats.t.ppf(0.975, window - 1) * spread / math.sqrt(window)
            low, high = middle - reach, middle + reach
        ax.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
        ax.plot(x, middle, lw=2.2, color=color)
    band = "band: lowest to highest seed; 95% if there is one"
    title = f"training reward, mean of {window} updates ({band})"
    ax.set(title=title, xlabel="update", xlim=(0, None))


def draw_final(ax, arms: list[Arm]) -> None:
    """A row per task set and arm: its mean as a diamond with the interval, its runs as dots."""
    sets, what, rows = task_sets(arms), headline(arms), len(arms) + 1
    scale = 100 if what == "exact" else 1
    for i, arm in enumerate(arms):
        color = f"C{i % 10}"
        ax.plot([], [], "D-", color=color, label=f"{arm.letter}: {arm.label}")
        for j, tasks in enumerate(sets):
            y, runs = -j * rows - i, [run for run in arm.runs if tasks in run.final]
            for run in runs:
                x = scale * np.mean(run.final[tasks][what])
                ax.plot(x, y, "o", ms=4, color=color, alpha=0.5)
            if len(runs) == len(arm.runs):
                p = final_mean(arm, tasks, what)
                ends = [max(0, p.low), min(1, p.high)] if what == "exact" else [p.low, p.high]
                ax.plot([scale * end for end in ends], [y, y], lw=2.2, color=color)
                ax.plot(scale * p.mean, y, "D", ms=7, color=color)
    finals = [run.final for arm in arms for run in arm.runs]
    is_trained = lambda t: any(t in final and final[t]["trained"] for final in finals)
    middles = [-j * rows - (len(arms) - 1) / 2 for j in range(len(sets))]
    ax.set_yticks(middles, [f"{t}\n(trained)" if is_trained(t) else t for t in sets])
    shown, unit = ("exactly right", "%") if what == "exact" else ("mean reward", "reward")
    marks = "diamond: arm, dots: runs, 95% intervals"
    ax.set(title=f"final, {shown} on development tasks ({marks})", xlabel=unit)
    if what == "exact":
        ax.set(xlim=(-2, 102))


def main(folders: list[Path], out: Path | None = None, ignore: tuple[str, ...] = ()) -> Path:
    """Write compare.md and compare.png into `out` and return it.

    out: by default the folder `compare` beside the first run, or `compare-2` and so on if that
    holds another comparison. ignore: further flags that do not
    make another arm, such as sft_steps if they were counted in seconds.
    """
    with foreign(folders[0] if folders else ""):
        return write([Path(folder) for folder in folders], out, ignore)


def write(folders: list[Path], out: Path | None, ignore: tuple[str, ...]) -> Path:
    # runs/* contains earlier comparisons too.
    folders = [folder for folder in folders if not (folder / "compare.md").exists()]
    if len(folders) < 2:
        usage = "python -m bookkeeping.compare runs/a runs/b"
        raise ValueError(f"compare needs two run folders or more: {usage}")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError("a run folder is given twice; a run cannot be compared with itself")
    runs = [read(folder) for folder in folders]
    if len({run.config.get("env") for run in runs}) > 1:
        runs = [with_env_in_labels(run) for run in runs]
    arms = group(runs, tuple(ignore))
    rows, notes = compare(arms)
    page = text(arms, rows, notes)
    out = Path(out) if out else new_folder(folders[0].parent, page)
    out.mkdir(parents=True, exist_ok=True)
    (out / "compare.md").write_text(page, encoding="utf-8")
    draw(out / "compare.png", arms)
    print((out / "compare.md").read_text(encoding="utf-8"))
    print(f"wrote {out}/compare.md and {out}/compare.png")
    return out


def new_folder(place: Path, page: str) -> Path:
    """compare, compare-2, … : the first that holds no other page."""
    for number in count(1):
        out = place / (f"compare-{number}" if number > 1 else "compare")
        file = out / "compare.md"
        if not file.exists() or file.read_text(encoding="utf-8") == page:
            return out


def with_env_in_labels(run: Run) -> Run:
    """Tier 6 of one environment is not tier 6 of another."""
    env = run.config.get("env")
    return replace(run, final={f"{env} {tasks}": line for tasks, line in run.final.items()})


if __name__ == "__main__":
    if "--help" in sys.argv or len(sys.argv) < 2:
        raise SystemExit(__doc__)
    import tyro

    def cli(
        folders: tyro.conf.Positional[list[Path]],
        out: Path | None = None,
        ignore: tuple[str, ...] = (),
    ) -> None:
        main(folders, out, ignore)

    tyro.cli(cli)
