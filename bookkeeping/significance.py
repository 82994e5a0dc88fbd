"""Is one arm better than another? The statistics of bookkeeping/compare.py: runs in, verdicts out.

    run folders -> read -> group -> arms -> compare -> rows with an interval, p and a verdict

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
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests

import metrics
from bookkeeping import records, tables
from bookkeeping.records import answered, clean, lines, record
from metrics import Interval

# What arms are compared by, if both have it. swarm has no exact answers, but its reward has parts;
# those are compared on the trained tasks.
MEASURES, PARTS = ("exact", "reward"), tables.PARTS
EQUAL = 0.05  # a 95% interval that reaches no further to either side shows that two arms are equal
# Flags that do not make another arm.
SAME = {
    "seed", "name", "runs", "resume", "threads", "wandb", "device", "save_every", "eval_every",
    "eval_other_tiers", "micro_tokens", "gradient_checkpointing", "vllm_memory", "vllm_sleep",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    folder: Path
    config: dict
    final: dict  # label of a task set -> its line of evals.jsonl
    rewards: list[float]  # mean training reward of every update
    edited: str = ""  # a sentence, if its environment was edited while it trained
    before: int = 0  # updates before a curriculum's last level


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
        if line["stage"] == "final":
            final[line["tasks"]] = line
    if not final:
        raise ValueError(f"{folder}/evals.jsonl has no final evaluation; {cure}")
    logged = lines(folder / "metrics.jsonl")
    rewards, before = [line["reward"] for line in logged], records.before_last_level(logged)
    return Run(folder, config, final, rewards, records.edited(environments), before)


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


def permutation_test(difference, resamples: int = 9999):
    """Two-sided p that differences of paired values, [n, …], only look so by luck. -> p […]

    If nothing differs, every one could as well have the other sign. How often do such flips give a
    mean as far from 0 as the real one? If none of them does, p is Hoeffding's bound (1963) on how
    often one would: 1 / (resamples + 1) alone, corrected for 500 comparisons, could never be small.
    """
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (resamples, len(difference)))
    distance = np.abs(difference.sum(axis=0))
    as_far = (np.abs(signs @ difference) >= distance - 1e-9).sum(axis=0)  # […]; rounding
    bound = 2 * np.exp(-(distance**2) / np.maximum(2 * (difference**2).sum(axis=0), 1e-300))
    p = (1 + as_far) / (resamples + 1)
    return np.where(as_far == 0, np.minimum(p, bound), p)


def holm(p) -> list[float]:
    """p-values corrected for how many they are, by Holm's method (1979)."""
    return multipletests(p, method="holm")[1].tolist() if len(p) else []


def small(p: float) -> str:
    """A p-value as text: '0.012', or '<0.001'."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def by_variance(
    estimate: float, parts: list[tuple[float, float]], n: int, ends=(-1.0, 1.0), level=0.95
) -> tuple[Interval, float]:
    """Student's interval of an estimate, and the p that it is 0.

    parts: (variance, degrees of freedom), which add up (Satterthwaite 1946). ends: what values may
    be, if all that were seen agree.
    """
    total, rounding = sum(v for v, _ in parts), 1e-9 * max(1.0, abs(estimate))
    if total <= rounding**2:  # nothing varies; n tasks that all differ alike are n equal signs
        z2 = metrics.Z2 if level == 0.95 else float(stats.norm.ppf((1 + level) / 2)) ** 2
        p = 1.0 if abs(estimate) <= rounding else 0.5 ** (n - 1)
        return metrics.alike(estimate, n, ends, z2), p
    freedom, error = total**2 / sum(v**2 / df for v, df in parts if v), math.sqrt(total)
    reach = float(stats.t.ppf((1 + level) / 2, freedom)) * error
    p = float(2 * stats.t.sf(abs(estimate) / error, freedom))
    return Interval(estimate, estimate - reach, estimate + reach, n), p


def variance_of_mean(values: np.ndarray) -> tuple[float, int]:
    """(variance of their mean, degrees of freedom)"""
    n = len(values)
    return (float(np.var(values, ddof=1) / n) if n > 1 else 0.0), n - 1


def differ(a: np.ndarray, b: np.ndarray) -> Difference:
    """a, b [seeds, tasks] of the same tasks -> a - b, paired by task."""
    x, y = a.mean(axis=0), b.mean(axis=0)  # [tasks] each
    if min(len(a), len(b)) == 1:
        return Difference(metrics.gain(y, x), float(permutation_test(x - y)), "tasks only")
    parts = [variance_of_mean(values) for values in (a.mean(axis=1), b.mean(axis=1), x - y)]
    return Difference(*by_variance(float(x.mean() - y.mean()), parts, len(x)), "seeds and tasks")


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
    found = by_variance(float(table.mean()), parts, table.shape[1], (0.0, 1.0))[0]
    if what == "exact":  # a share: Student's interval does not know where it ends
        found = replace(found, low=max(0.0, found.low), high=min(1.0, found.high))
    return found


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
        rows.append(row | {"d": differ(x, y), "n": len(only)})
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
