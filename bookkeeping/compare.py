"""Is one arm better than another? Run folders in, a table of verdicts and two pictures out.

    python -m bookkeeping.compare runs/a runs/b runs/c …        (the same as: python -m bookkeeping.report compare runs/a runs/b …)

Runs that differ only in seed, name and the like are one arm; arms are told apart by the flags in which they differ. Every pair of arms
is compared on every task set that both were evaluated on at the end. Tasks of the same label are the same tasks in the same order, so
the comparison is paired: what is hard is hard for both, and cancels.

What the interval and the p-value hold depends on what there is:

    one seed in either arm   only the tasks vary: bootstrap over tasks, p by flipping the signs of the task differences. It says which of
                             these two *runs* is better. Whether another seed would agree is not in it, and the report says so.
    two seeds or more each   seeds and tasks vary: Var = Var_seeds(A)/S_A + Var_seeds(B)/S_B + Var_tasks(difference)/T, Student's t
                             with Satterthwaite's degrees of freedom (1946). Two seeds say little, so their t is wide, as it should be.

Why not sign flips, or a two-way bootstrap over seeds and tasks, in the second case too? Both were tried on arms that do not differ but whose
seeds do. With two seeds an arm, flips find a winner in 43% of the cases, the bootstrap in 17% (it cannot know how little two seeds
are), this in 6% (tests/test_compare.py has the simulation). Noise within a run is counted twice here, which errs to the safe side.

Many comparisons find a winner by luck: p-values are corrected by Holm's method (1979) over everything in the table, and the verdict
uses only the corrected ones.
"""

import json
import math
import string
import sys
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests

import metrics
from bookkeeping.records import clean, foreign, lines, record
from metrics import Interval

# What arms are compared by, where both have it. swarm has no exact answers, but its reward has parts; they are compared on the trained tasks.
MEASURES, PARTS = ("exact", "reward"), ("payoff", "reputation", "quality", "diversity")
# Flags that do not make another arm.
SAME = {"seed", "name", "runs", "resume", "threads", "wandb", "device", "save_every", "eval_other_tiers"}


@dataclass(frozen=True)
class Run:
    folder: Path
    config: dict
    final: dict  # label of a task set -> its line of evals.jsonl
    rewards: list[float]  # mean training reward of every update


@dataclass(frozen=True)
class Arm:
    letter: str
    label: str
    runs: list[Run]

    def seeds(self) -> list[int]:
        return sorted({run.config["seed"] for run in self.runs})

    def table(self, tasks: str, what: str, only: list[int] | None = None) -> np.ndarray:
        """[seeds, tasks] final results. Two runs of the same seed are not independent: their mean counts as one.

        only: numbers of the tasks to take. None: all that every run of the arm has an answer to.
        """
        gaps = any("missing" in run.final[tasks] for run in self.runs)
        only = common(self.runs, tasks) if only is None and gaps else only

        def results(run: Run) -> list[float]:
            values = run.final[tasks][what]
            return values if only is None else [dict(zip(answered(run.final[tasks]), values))[i] for i in only]

        by_seed = [[results(run) for run in self.runs if run.config["seed"] == seed] for seed in self.seeds()]
        return np.array([np.mean(runs, axis=0) for runs in by_seed], dtype=float)


@dataclass(frozen=True)
class Difference:
    """The first arm minus the second."""

    difference: Interval  # n: tasks of the first arm
    p: float
    over: str  # what varies in interval and p
    paired: bool


# ------------------------------------------------------------------------------------------------ reading


def read(folder: Path) -> Run:
    """A finished run; a sentence if it is none."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json, so it is no run folder; check the path")
    if not (folder / "summary.json").exists():
        raise ValueError(f"{folder} has no summary.json: the run has not finished; go on with python train.py --resume {folder}")
    config, final = record(folder / "config.json"), {}
    for line in clean(lines(folder / "evals.jsonl")):
        if line["stage"] == "final":
            trained = line.get("trained", line.get("tier") == config.get("difficulty"))
            final[line.get("tasks", f"tier {line.get('tier')}")] = {**line, "trained": trained}
    if not final:
        raise ValueError(f"{folder}/evals.jsonl has no final evaluation; go on with python train.py --resume {folder}")
    return Run(folder, config, final, [line["reward"] for line in lines(folder / "metrics.jsonl")])


def group(runs: list[Run], ignore: tuple[str, ...] = ()) -> list[Arm]:
    """Runs with the same flags, apart from SAME and `ignore`, are one arm. Arms come in the order of their first run.

    An evaluation over an API trained nothing: it is called by its model, and its flags do not tell the others apart.
    """
    flags = sorted(name for name in {name for run in runs for name in run.config} - SAME - set(ignore) if not name.startswith("api_"))
    over_api = lambda run: run.config.get("api_base") or ""
    if missing := [name for name in ignore if all(name not in run.config for run in runs)]:
        raise ValueError(f"--ignore {missing[0]}: no run has such a flag; config.json lists them")
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(json.dumps([over_api(run), *(run.config.get(name, "not set") for name in flags)]), []).append(run)
    if len(arms) > 26:
        raise ValueError(f"{len(arms)} arms are too many to read; give fewer runs, or --ignore the flag that sets them apart")
    ours = [members[0].config for members in arms.values() if not over_api(members[0])]
    differing = [name for name in flags if len({json.dumps(config.get(name, "not set")) for config in ours}) > 1]
    trained = lambda run: (
        ", ".join(f"{name}={run.config.get(name, 'not set')}" for name in differing) or f"all {'other ' * (len(arms) > len(ours))}runs"
    )
    label = lambda run: f"{run.config['model']} over an API" if over_api(run) else trained(run)
    return [Arm(letter, label(members[0]), members) for letter, members in zip(string.ascii_uppercase, arms.values())]


def answered(line: dict) -> list[int]:
    """The numbers of the tasks that a line of evals.jsonl has results of. Where environment or endpoint failed, a task is listed as missing."""
    missing = {int(i) for i in line.get("missing", {})}
    return [i for i in range(len(line["reward"]) + len(missing)) if i not in missing]


def same_tasks(*evals: dict) -> list[dict]:
    """These lines of evals.jsonl, cut to the tasks that all of them have a result of; as they are where nothing is missing."""
    if not any("missing" in e for e in evals):
        return list(evals)
    both = set.intersection(*(set(answered(e)) for e in evals))
    kept = lambda e, values: [v for i, v in zip(answered(e), values) if i in both]
    return [{key: kept(e, value) if isinstance(value, list) else value for key, value in e.items() if key != "missing"} for e in evals]


def common(runs: list[Run], tasks: str) -> list[int]:
    """The numbers of the tasks that every run has a result of."""
    return sorted(set.intersection(*(set(answered(run.final[tasks])) for run in runs)))


# ------------------------------------------------------------------------------------------------ comparing


def by_variance(estimate: float, parts: list[tuple[float, float]], n: int) -> tuple[Interval, float]:
    """Student's 95% interval of an estimate, and the p that it is 0. parts: (variance, degrees of freedom), which add up (Satterthwaite 1946)."""
    total = sum(v for v, _ in parts)
    if total == 0:  # nothing varies anywhere; n tasks that all differ the same way are n equal signs
        return Interval(estimate, estimate, estimate, n), 1.0 if estimate == 0 else 0.5 ** (n - 1)
    freedom = total**2 / sum(v**2 / df for v, df in parts if v)
    reach = float(stats.t.ppf(0.975, freedom)) * math.sqrt(total)
    return Interval(estimate, estimate - reach, estimate + reach, n), float(2 * stats.t.sf(abs(estimate) / math.sqrt(total), freedom))


def differ(a: np.ndarray, b: np.ndarray) -> Difference:
    """a, b [seeds, tasks] -> a - b. Paired by task if the numbers of tasks agree."""
    paired, seeds = a.shape[1] == b.shape[1], min(len(a), len(b)) > 1
    x, y = a.mean(axis=0), b.mean(axis=0)  # [tasks] each
    over = ("seeds and tasks" if seeds else "tasks only") + ("" if paired else ", unpaired")
    mean_difference = lambda x, y, axis=-1: np.mean(x, axis=axis) - np.mean(y, axis=axis)
    estimate, variance = float(x.mean() - y.mean()), lambda v: float(np.var(v, ddof=1) / len(v)) if len(v) > 1 else 0.0
    if seeds:
        tasks = [(variance(x - y), len(x) - 1)] if paired else [(variance(x), len(x) - 1), (variance(y), len(y) - 1)]
        parts = [(variance(a.mean(axis=1)), len(a) - 1), (variance(b.mean(axis=1)), len(b) - 1), *tasks]
        return Difference(*by_variance(estimate, parts, len(x)), over, paired)
    kind = "samples" if paired else "independent"
    with np.errstate(all="ignore"):
        p = stats.permutation_test((x, y), mean_difference, permutation_type=kind, vectorized=True, n_resamples=9999, batch=1000, rng=np.random.default_rng(0)).pvalue  # fmt: skip
    if paired:
        return Difference(metrics.gain(y, x), float(p), over, True)
    if np.ptp(x) == np.ptp(y) == 0:
        return Difference(Interval(estimate, estimate, estimate, len(x)), float(p), over, False)
    ends = stats.bootstrap((x, y), mean_difference, vectorized=True, n_resamples=5000, method="percentile", rng=np.random.default_rng(0)).confidence_interval  # fmt: skip
    return Difference(Interval(estimate, float(ends.low), float(ends.high), len(x)), float(p), over, False)


def paid_by(run: Run) -> dict:
    """The flags that decide what is paid: rewards under others are no longer the same measure."""
    swarm = run.config.get("env") == "swarm"
    return {name: value for name, value in run.config.items() if (name.startswith("swarm_") if swarm else name == "reward")}


def share(values) -> Interval:
    """Wilson's interval for a share of tasks where each is right or wrong, a bootstrap where a task can be partly right."""
    return metrics.proportion(sum(values), len(values)) if set(values) <= {0.0, 1.0} else metrics.mean(values)


def final_mean(arm: Arm, tasks: str, what: str) -> Interval:
    """An arm's final mean: Wilson or bootstrap over tasks for one seed, seeds and tasks for more."""
    table = arm.table(tasks, what)  # [seeds, tasks]
    if len(table) > 1:
        parts = [(float(np.var(m, ddof=1) / len(m)), len(m) - 1) for m in (table.mean(axis=1), table.mean(axis=0)) if len(m) > 1]
        return by_variance(float(table.mean()), parts, table.shape[1])[0]
    return share(table[0])


def compare(arms: list[Arm]) -> tuple[list[dict], list[str]]:
    """One row a pair of arms, task set and measure, with Holm's correction over all of them; and what was left out."""
    rows, notes = [], []
    for a, b in combinations(arms, 2):
        one, other = a.runs[0], b.runs[0]
        shared = [tasks for tasks in one.final if all(tasks in run.final for run in a.runs + b.runs)]
        if not shared:
            notes.append(f"{a.letter} and {b.letter} were evaluated on different task sets; nothing to compare.")
        for tasks in shared:
            has = {what for what in (*MEASURES, *PARTS) if all(what in run.final[tasks] for run in a.runs + b.runs)}
            for what in (m for m in (*MEASURES, *(PARTS if one.final[tasks]["trained"] else ())) if m in has):
                gaps = any("missing" in run.final[tasks] for run in a.runs + b.runs)
                only = common(a.runs + b.runs, tasks) if gaps else None  # both had an answer to these
                if only == []:
                    notes.append(f"{a.letter} and {b.letter} have no task of {tasks} that both had an answer to; nothing to compare.")
                    break
                x, y = a.table(tasks, what, only), b.table(tasks, what, only)
                if what == "reward" and paid_by(one) != paid_by(other):
                    rest = "only exact answers are compared" if "exact" in has else "only its parts are compared, on the trained tasks"
                    notes.append(f"{a.letter} and {b.letter} were paid by different rewards; {rest}.")
                    continue
                if (
                    what == "reward"
                    and "exact" in has
                    and all(np.array_equal(m.table(tasks, "exact"), m.table(tasks, what)) for m in (a, b))
                ):
                    notes.append("Where the reward is 1 for an exact answer and 0 otherwise, it is not compared again.")
                    continue
                rows.append({"a": a, "b": b, "tasks": tasks, "what": what, "trained": one.final[tasks]["trained"],
                             "x": float(x.mean()), "y": float(y.mean()), "d": differ(x, y), "n": sorted({x.shape[1], y.shape[1]})})  # fmt: skip
    corrected = multipletests([row["d"].p for row in rows], method="holm")[1] if rows else []
    for row, p in zip(rows, corrected):
        better = row["a"] if row["d"].difference.mean > 0 else row["b"]
        row |= {"corrected": float(p), "verdict": f"{better.letter} better" if p < 0.05 else "cannot tell"}
    return rows, list(dict.fromkeys(notes))


# ------------------------------------------------------------------------------------------------ what a person gets


def headline(arms: list[Arm]) -> str:
    """What the arms are shown by: exact answers, or the mean reward where an environment has no such thing."""
    return "exact" if all("exact" in line for arm in arms for run in arm.runs for line in run.final.values()) else "reward"


def small(p: float) -> str:
    """A p-value as text: '0.012', or '<0.001'."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def text(arms: list[Arm], rows: list[dict], notes: list[str]) -> str:
    """compare.md."""
    out = [
        f"# {sum(len(arm.runs) for arm in arms)} runs, {len(arms)} arm{'s' if len(arms) > 1 else ''}",
        "",
        "| | arm | seeds | runs |",
        "|---|---|---|---|",
    ]
    out += [
        f"| **{a.letter}** | {a.label} | {', '.join(map(str, a.seeds()))} | {', '.join(clean(run.folder.name) for run in a.runs)} |"
        for a in arms
    ]
    out += ["", "## Verdicts", ""]
    if rows:
        out += [
            f"First minus second, with its 95% interval; p corrected by Holm's method for {len(rows)} comparison{'s' if len(rows) > 1 else ''}, verdict at 0.05 from "
            "the corrected p alone. \"Cannot tell\" does not mean equal: the interval says how large a difference may be hiding.", "",
            "| tasks | measure | arms | means | difference | varies in the interval | n tasks | p | p corrected | verdict |", "|---" * 10 + "|",
        ]  # fmt: skip
        for row in rows:
            a, b, d = row["a"], row["b"], row["d"]
            scale, digits, unit = (100, 1, "%") if row["what"] == "exact" else (1, 3, "")
            i, n = d.difference, row["n"]
            out.append(
                f"| {row['tasks']}{' (trained)' if row['trained'] else ''} | {row['what']} | {a.letter} − {b.letter} | "
                f"{scale * row['x']:.{digits}f}{unit}, {scale * row['y']:.{digits}f}{unit} | "
                f"{scale * i.mean:+.{digits}f} [{scale * i.low:+.{digits}f}, {scale * i.high:+.{digits}f}] | {d.over} | {' and '.join(map(str, n))} | "
                f"{small(d.p)} | {small(row['corrected'])} | **{row['verdict']}** |"
            )
        if any(row["d"].over.startswith("tasks only") for row in rows):
            notes = [
                "Tasks only: an arm has a single seed, so how much another seed would change is not in the interval, the p or the verdict.",
                *notes,
            ]
    else:
        out.append("All runs have the same flags: one arm, nothing to compare." if len(arms) == 1 else "No two arms can be compared.")
    if any(len(arm.runs) > len(arm.seeds()) for arm in arms):
        notes = [*notes, "Several runs of one seed were averaged and count as one."]
    out += [*(["", *(f"* {note}" for note in notes)] if notes else []), "", "## Final results", ""]
    labels = list(dict.fromkeys(tasks for arm in arms for run in arm.runs for tasks in run.final))
    what = headline(arms)
    show = lambda i: i.percent() if what == "exact" else f"{i.mean:.3f} [{i.low:.3f}, {i.high:.3f}]"
    cell = lambda arm, tasks: show(final_mean(arm, tasks, what)) if all(tasks in run.final for run in arm.runs) else ""
    out += [f"{'Exactly right' if what == 'exact' else 'Mean reward'}, with 95% intervals (over tasks; over seeds and tasks where an arm has several seeds).", "",
            "| arm | " + " | ".join(labels) + " |", "|---" * (1 + len(labels)) + "|",
            *(f"| {arm.letter}: {arm.label} | " + " | ".join(cell(arm, tasks) for tasks in labels) + " |" for arm in arms), "",
            "![compare](compare.png)", "", "## Training reward", ""]  # fmt: skip
    for arm in arms:
        for run in arm.runs:
            told = (
                f"{metrics.distribution(run.rewards).sentence()}. At its end: {metrics.trend(run.rewards).sentence()}."
                if run.rewards
                else "no updates."
            )
            out.append(f"* {arm.letter}, {clean(run.folder.name)}: {told}")
    return "\n".join(out) + "\n"


def draw(path: Path, arms: list[Arm], window: int = 10) -> None:
    """compare.png: the training reward, a mean of `window` updates, and the final results."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rc("text", parse_math=False)  # a name may hold a $
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys(tasks for arm in arms for run in arm.runs for tasks in run.final))
    what = headline(arms)
    scale = 100 if what == "exact" else 1
    height = max(4.5, 1 + 0.3 * len(labels) * (len(arms) + 1))
    fig, (left, right) = plt.subplots(1, 2, figsize=(14, height), layout="constrained")
    for i, arm in enumerate(arms):
        color = f"C{i % 10}"
        rolled = [np.convolve(run.rewards, np.ones(window) / window, mode="valid") for run in arm.runs if len(run.rewards) >= window]
        for line in rolled:
            left.plot(np.arange(len(line)) + window, line, lw=0.8, alpha=0.6, color=color)
        if rolled:
            together = np.array([line[: min(map(len, rolled))] for line in rolled])  # [runs, updates]
            x, middle = np.arange(together.shape[1]) + window, together.mean(axis=0)
            low, high = together.min(axis=0), together.max(axis=0)
            if len(arm.seeds()) == 1:
                run = next(run for run in arm.runs if len(run.rewards) >= window)
                spread = np.lib.stride_tricks.sliding_window_view(run.rewards, window).std(axis=1, ddof=1)  # [updates]
                low, high = (middle + sign * stats.t.ppf(0.975, window - 1) * spread / math.sqrt(window) for sign in (-1, 1))
            left.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
            left.plot(x, middle, lw=2.2, color=color)
        right.plot([], [], "D-", color=color, label=f"{arm.letter}: {arm.label}")
        for j, tasks in enumerate(labels):
            y = -j * (len(arms) + 1) - i
            for run in (run for run in arm.runs if tasks in run.final):
                right.plot(scale * np.mean(run.final[tasks][what]), y, "o", ms=4, color=color, alpha=0.5)
            if all(tasks in run.final for run in arm.runs):
                p = final_mean(arm, tasks, what)
                ends = [max(0, p.low), min(1, p.high)] if what == "exact" else [p.low, p.high]
                right.plot([scale * end for end in ends], [y, y], lw=2.2, color=color)
                right.plot(scale * p.mean, y, "D", ms=7, color=color)
    left.set(
        title=f"training reward, mean of {window} updates (band: lowest to highest seed; 95% if there is one)",
        xlabel="update",
        xlim=(0, None),
    )
    trained = {tasks for arm in arms for run in arm.runs for tasks, line in run.final.items() if line["trained"]}
    right.set_yticks(
        [-j * (len(arms) + 1) - (len(arms) - 1) / 2 for j in range(len(labels))], [f"{t}\n(trained)" if t in trained else t for t in labels]
    )
    shown = "exactly right" if what == "exact" else "mean reward"
    right.set(
        title=f"final, {shown} on held-out tasks (diamond: arm, dots: runs, 95% intervals)", xlabel="%" if what == "exact" else "reward"
    )
    if what == "exact":
        right.set(xlim=(-2, 102))
    for ax in (left, right):
        ax.grid(alpha=0.25)
        ax.title.set_fontsize(10)
    fig.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def main(folders: list[Path], out: Path | None = None, ignore: tuple[str, ...] = ()) -> Path:
    """Write compare.md and compare.png into `out` (default: `compare` beside the first run) and return it.

    ignore: further flags that do not make another arm, such as sft_steps where they were counted in seconds.
    """
    with foreign(folders[0] if folders else ""):
        return write([Path(folder) for folder in folders], out, ignore)


def write(folders: list[Path], out: Path | None, ignore: tuple[str, ...]) -> Path:
    folders = [Path(folder) for folder in folders if not (Path(folder) / "compare.md").exists()]  # runs/* holds those too
    if len(folders) < 2:
        raise ValueError("compare needs two run folders or more: python -m bookkeeping.compare runs/a runs/b")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError("a run folder is given twice; a run cannot be compared with itself")
    runs = [read(folder) for folder in folders]
    if len({run.config.get("env") for run in runs}) > 1:  # tier 6 of one environment is not tier 6 of another
        runs = [replace(run, final={f"{run.config.get('env')} {tasks}": line for tasks, line in run.final.items()}) for run in runs]
    arms = group(runs, tuple(ignore))
    rows, notes = compare(arms)
    out = Path(out) if out else folders[0].parent / "compare"
    out.mkdir(parents=True, exist_ok=True)
    (out / "compare.md").write_text(text(arms, rows, notes))
    draw(out / "compare.png", arms)
    print((out / "compare.md").read_text() + f"\nwrote {out}/compare.md and {out}/compare.png")
    return out


if __name__ == "__main__":
    if "--help" in sys.argv or len(sys.argv) < 2:
        raise SystemExit(__doc__)
    import tyro

    def cli(folders: tyro.conf.Positional[list[Path]], out: Path | None = None, ignore: tuple[str, ...] = ()) -> None:
        main(folders, out, ignore)

    tyro.cli(cli)
