"""Is one arm better than another? Run folders in, a table of verdicts and a picture out.

    python -m bookkeeping.compare runs/a runs/b runs/c …       writes compare.md and compare.png

    run folders -> read -> group -> arms -> compare -> rows with an interval, p and a verdict

Runs that differ only in seed, name and the like form one arm; arms are labelled by the flags in
which they differ. Every pair of arms is compared on every task set that both were evaluated on at
the end. Tasks of the same label are the same tasks in the same order, so the comparison is paired:
a hard task is hard for both, and cancels. If one arm has more tasks, the first ones are taken. If
two runs of an arm have the same seed, the later one counts.

What the interval and the p-value cover depends on the seeds:

    one seed in either arm   only the tasks vary: metrics.gain, p from permutation_test. It
                             says which of these two *runs* is better. Whether another seed would
                             agree is not covered, and the report says so.
    two seeds or more each   seeds and tasks vary: Var = Var_seeds(A)/S_A + Var_seeds(B)/S_B +
                             Var_tasks(difference)/T, Student's t with Satterthwaite's degrees of
                             freedom (1946). Two seeds say little, so their interval is wide, as it
                             should be.

Why not sign flips, or a two-way bootstrap over seeds and tasks, in the second case too? Both were
tried on arms that do not differ although their seeds do. With two seeds per arm, sign flips find a
winner in about 40% of the cases, the bootstrap in 15% (it cannot know how little two seeds say) and
this method in 6%. tests/test_compare.py has the simulation; the bootstrap was part of it at commit
22b9273. Noise within a run is counted twice here, which errs on the safe side.

Many comparisons find a winner by luck. So p-values are corrected by Holm's method (1979) over the
whole table, and the verdict uses only the corrected ones. If no shuffle went as far as the data, p
is a bound, so that a table of hundreds of rows can still have a winner.
"""

import json
import math
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import tyro
from scipy import stats

import metrics
from bookkeeping import records, tables

EQUAL = 0.05  # two arms are equal if the 95% interval reaches no further than this to either side
PARTS = ("payoff", "reputation", "quality", "diversity")  # of the swarm's reward
# Flags that do not make another arm.
SAME = {
    "seed",
    "name",
    "runs",
    "resume",
    "threads",
    "wandb",
    "device",
    "save_every",
    "eval_every",
    "eval_other_tiers",
    "micro_tokens",
    "gradient_checkpointing",
    "vllm_memory",
    "vllm_sleep",
    "vllm_eager",
    "api_concurrency",
}
SENTENCE = (
    "First minus second, with its 95% interval; p corrected by Holm's method for the number of "
    "comparisons, winner at 0.05 from the corrected p alone. Tasks only: an arm has a single seed, "
    "so how much another seed would change is not in the interval. Cannot tell does not mean "
    "equal: the interval says how large a difference may be hiding. Equal does: its whole interval "
    f"lies within {100 * EQUAL:g} points (rewards: {EQUAL}). Rewards are compared only if both "
    "were paid alike (the same --reward, --set, and code of the environment)."
)
NOTHING = "Nothing to compare: all runs have the same flags, or no two arms have a task in common."


@dataclass
class Run:
    name: str
    config: dict
    final: dict  # label of a task set -> its line of evals.jsonl
    lines: list[dict]  # of metrics.jsonl


@dataclass
class Arm:
    letter: str
    label: str
    runs: dict[int, Run]  # by seed


# ----------------------------------------------------------------------------------------- reading


def read(folder: Path) -> Run:
    """A finished run. ValueError with one sentence if the folder is not one."""
    config = records.clean(records.config_of(folder))
    evals = records.clean(records.lines(folder / "evals.jsonl"))
    final = {line["tasks"]: line for line in evals if line["stage"] == "final"}
    if not final or not (folder / "summary.json").exists():
        raise ValueError(
            f"{folder}: the run has not finished; go on with python train.py --resume {folder}"
        )
    summary = records.record(folder / "summary.json")
    config["environment_code"] = summary.get("machine", {}).get("environment_code")
    return Run(records.clean(folder.name), config, final, records.lines(folder / "metrics.jsonl"))


def group(runs: list[Run]) -> list[Arm]:
    """Runs with the same flags, apart from SAME, are one arm, in order of first run.

    An arm is named after the flags in which the arms differ.
    """
    members: dict[str, dict[int, Run]] = {}
    for run in runs:
        flags = {name: value for name, value in run.config.items() if name not in SAME}
        key = json.dumps(flags, sort_keys=True)
        members.setdefault(key, {})[run.config["seed"]] = run
    flags = [json.loads(key) for key in members]
    names = {name for f in flags for name in f}
    varied = {name for name in names if len({str(f[name]) for f in flags if name in f}) > 1}
    arms = []
    for i, (own_flags, by_seed) in enumerate(zip(flags, members.values())):
        words = [f"{name}={own_flags[name]}" for name in sorted(own_flags) if name in varied]
        arms.append(Arm(chr(ord("A") + i), ", ".join(words) or "all runs", by_seed))
    return arms


def finals(tasks: str, *arms: Arm) -> list[list[dict]]:
    """The final results of each arm's runs, cut to the tasks that all have a result for.

    Empty if a run was not evaluated on them.
    """
    runs = [run for arm in arms for run in arm.runs.values()]
    if not all(tasks in run.final for run in runs):
        return []
    same = iter(records.same_tasks(*(run.final[tasks] for run in runs)))
    return [[next(same) for _ in arm.runs] for arm in arms]


def table(lines: list[dict], what: str) -> np.ndarray:
    """[seeds, tasks] of one measure."""
    return np.array([line[what] for line in lines], dtype=float)


# -------------------------------------------------------------------------------------- statistics


def permutation_test(difference: np.ndarray, resamples: int = 9999) -> float:
    """Paired differences [n] -> p of the sign-flip test.

    If nothing differs, each difference could just as well have the other sign. How often do random
    flips give a mean as far from 0 as the real one? If none does, p is Hoeffding's bound (1963) on
    how often one would: 1 / (resamples + 1), corrected for 500 comparisons, could never be small.
    """
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (resamples, len(difference)))
    distance = abs(difference.sum())
    as_far = int((np.abs(signs @ difference) >= distance - 1e-9).sum())  # 1e-9: rounding
    p = (1 + as_far) / (resamples + 1)
    if as_far:
        return p
    return min(p, float(2 * np.exp(-(distance**2) / (2 * (difference**2).sum()))))


def holm(p) -> list[float]:
    """p-values corrected for their number, by Holm's method (1979).

    The smallest of n is multiplied by n, the next by n - 1, …; none falls below the one before.
    """
    p = np.asarray(p, dtype=float)
    order, n = np.argsort(p), len(p)
    corrected = np.empty(n)
    corrected[order] = np.maximum.accumulate(p[order] * np.arange(n, 0, -1))
    return np.minimum(corrected, 1.0).tolist()


def small(p: float) -> str:
    """A p-value as text: '0.012', or '<0.001'."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def by_variance(
    estimate: float, parts: list[tuple[float, float]], n: int, ends=(-1.0, 1.0), level=0.95
) -> tuple[metrics.Interval, float]:
    """Student's interval of an estimate, and the p that it is 0.

    parts: (variance, degrees of freedom), which add up (Satterthwaite 1946). ends: the range that
    values may have, used if all of them agree.
    """
    total, rounding = sum(v for v, _ in parts), 1e-9 * max(1.0, abs(estimate))
    if total <= rounding**2:  # nothing varies: n equal differences are n equal signs
        p = 1.0 if abs(estimate) <= rounding else 0.5 ** (n - 1)
        return metrics.alike(estimate, n, ends, float(stats.chi2.ppf(level, 1))), p
    freedom, error = total**2 / sum(v**2 / df for v, df in parts if v), math.sqrt(total)
    reach = float(stats.t.ppf((1 + level) / 2, freedom)) * error
    p = float(2 * stats.t.sf(abs(estimate) / error, freedom))
    return metrics.Interval(estimate, estimate - reach, estimate + reach, n), p


def variance_of_mean(values: np.ndarray) -> tuple[float, int]:
    """(variance of their mean, degrees of freedom)"""
    n = len(values)
    return (float(np.var(values, ddof=1) / n) if n > 1 else 0.0), n - 1


def differ(a: np.ndarray, b: np.ndarray) -> tuple[metrics.Interval, float, str]:
    """a, b [seeds, tasks] of the same tasks -> (a - b, paired by task; p; what both cover)."""
    x, y = a.mean(axis=0), b.mean(axis=0)  # [tasks] each
    if min(len(a), len(b)) == 1:
        return metrics.gain(y, x), permutation_test(x - y), "tasks only"
    parts = [variance_of_mean(values) for values in (a.mean(axis=1), b.mean(axis=1), x - y)]
    return *by_variance(float(x.mean() - y.mean()), parts, len(x)), "seeds and tasks"


def final_mean(arm: Arm, tasks: str, what: str) -> metrics.Interval | None:
    """An arm's final mean: over tasks with one seed, over seeds and tasks with more.

    None if some run was not evaluated on them.
    """
    of_arms = finals(tasks, arm)
    if not of_arms:
        return None
    rows = table(of_arms[0], what)  # [seeds, tasks]
    if len(rows) == 1:
        return metrics.mean(rows[0])
    parts = [variance_of_mean(rows.mean(axis=axis)) for axis in (1, 0)]
    mean, _ = by_variance(float(rows.mean()), parts, rows.shape[1], (0.0, 1.0))
    return mean.within(0.0, 1.0) if metrics.are_shares(rows.ravel()) else mean


# --------------------------------------------------------------------------------------- comparing


def compare(arms: list[Arm]) -> list[dict]:
    """A row per pair of arms, task set and measure, corrected by Holm."""
    rows = []
    for a, b in combinations(arms, 2):
        for tasks in next(iter(a.runs.values())).final:
            rows += rows_of(tasks, a, b)
    for row, p in zip(rows, holm([row["p"] for row in rows])):
        difference = row["difference"]
        better = row["a"] if difference.mean > 0 else row["b"]
        is_equal = -EQUAL <= difference.low and difference.high <= EQUAL
        unsure = "equal" if is_equal else "cannot tell"
        row |= {"corrected": p, "verdict": f"{better.letter} better" if p < 0.05 else unsure}
    return rows


def rows_of(tasks: str, a: Arm, b: Arm) -> list[dict]:
    """A row for each measure of one task set; none if they have no task in common."""
    of_arms = finals(tasks, a, b)
    lines = [line for of_arm in of_arms for line in of_arm]
    if not lines or not lines[0]["reward"]:
        return []
    measures = [what for what in ("exact", "reward") if all(what in line for line in lines)]
    if lines[0]["trained"]:
        measures += [what for what in PARTS if all(what in line for line in lines)]
    if not paid_alike(a, b) or all(line["reward"] == line.get("exact") for line in lines):
        measures.remove("reward")
    rows = []
    for what in measures:
        of_both = [table(of_arm, what) for of_arm in of_arms]
        known = ~np.isnan(np.concatenate(of_both)).any(axis=0)  # [tasks]: all runs measured it
        if not known.any():
            continue
        difference, p, over = differ(*(values[:, known] for values in of_both))
        rows.append(
            {
                "a": a,
                "b": b,
                "tasks": tasks,
                "what": what,
                "trained": lines[0]["trained"],
                "difference": difference,
                "p": p,
                "over": over,
            }
        )
    return rows


def paid_alike(a: Arm, b: Arm) -> bool:
    """Were both arms paid alike? If not, their rewards are different measures."""
    names = ("reward", "environment_code", "set")
    runs = [*a.runs.values(), *b.runs.values()]
    return len({str([run.config.get(name) for name in names]) for run in runs}) == 1


# ---------------------------------------------------------------------------------------- the page


def text(arms: list[Arm], rows: list[dict]) -> str:
    """compare.md."""
    runs = [run for arm in arms for run in arm.runs.values()]
    lines = {tasks: line for run in runs for tasks, line in run.final.items()}
    what = "exact" if all("exact" in line for line in lines.values()) else "reward"
    means = [[final_mean(arm, tasks, what) for tasks in lines] for arm in arms]
    members = [
        [
            f"**{arm.letter}**",
            arm.label,
            ", ".join(map(str, arm.runs)),
            ", ".join(run.name for run in arm.runs.values()),
            *(mean.text(*tables.scale(what)) if mean else "" for mean in of_arm),
        ]
        for arm, of_arm in zip(arms, means)
    ]
    verdicts = [
        [
            tables.called(row),
            row["what"],
            f"{row['a'].letter} − {row['b'].letter}",
            row["difference"].text(*tables.scale(row["what"])[:2], sign="+"),
            row["over"],
            str(row["difference"].n),
            small(row["p"]),
            small(row["corrected"]),
            f"**{row['verdict']}**",
        ]
        for row in rows
    ]
    head = [
        "tasks",
        "measure",
        "arms",
        "difference",
        "varies in the interval",
        "n tasks",
        "p",
        "p corrected",
        "verdict",
    ]
    page = [
        tables.section(
            "Arms",
            [f"Mean {what} at the end, with 95% intervals over tasks; over seeds too if several."],
            ["", "arm", "seeds", "runs", *lines],
            members,
        ),
        tables.section("Verdicts", [SENTENCE if rows else NOTHING], head, verdicts),
    ]
    return f"# Arms: {len(arms)}\n\n{tables.markdown(page)}\n![compare](compare.png)\n"


def charts(arms: list[Arm]) -> list[dict]:
    """compare.png: each arm's training reward, its mean and from the lowest seed to the highest."""
    series = []
    for arm in arms:
        curves = [tables.rolling(run.lines)["points"] for run in arm.runs.values()]
        # [updates][seeds], as far as all seeds got
        rewards = [[point[1] for point in points] for points in zip(*curves)]
        points = [[u, np.mean(r), min(r), max(r)] for u, r in enumerate(rewards, 1)]
        series.append({"name": f"{arm.letter}: {arm.label}", "points": points})
    return [
        tables.chart(
            f"training reward, mean of the last {tables.ROLLING} updates; bands: all seeds", series
        )
    ]


def main(folders: tyro.conf.Positional[list[Path]], out: Path | None = None) -> Path:
    """Write compare.md and compare.png into `out` and return it.

    out: by default the folder `compare` next to the first run.
    """
    # runs/* also matches earlier comparisons.
    folders = [folder for folder in folders if not (folder / "compare.md").exists()]
    if len(folders) < 2:
        raise SystemExit(
            "compare needs two run folders or more: python -m bookkeeping.compare runs/a runs/b"
        )
    out = out or folders[0].parent / "compare"
    with records.foreign(folders[0]):
        arms = group([read(folder) for folder in folders])
        page = text(arms, compare(arms))
        out.mkdir(parents=True, exist_ok=True)
        records.write_whole(out / "compare.md", page)
        tables.draw(out / "compare.png", "Training", charts(arms))
    print(page)
    print(f"wrote {out}/compare.md and {out}/compare.png")
    return out


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
