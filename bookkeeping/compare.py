"""Is one arm better than another? Run folders in, a table of verdicts and a picture out.

    python -m bookkeeping.compare runs/a runs/b runs/c …       writes compare.md and compare.png

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
about 40% of the cases, the bootstrap in 15% (it cannot know how little two seeds are) and this in
6%. tests/test_compare.py has the simulation, without the bootstrap, which was in it at commit
22b9273. Noise within a run is counted twice here, which errs on the safe side.

Many comparisons find a winner by luck. So p-values are corrected by Holm's method (1979) over the
whole table, and the verdict uses only the corrected ones. A p that no shuffle reached is a bound,
so that a table of hundreds of rows can still have a winner.
"""

import json
import math
import sys
from dataclasses import dataclass
from itertools import combinations, count
from pathlib import Path

import numpy as np
import tyro
from scipy import stats
from tyro.conf import Positional

import metrics
from bookkeeping import records, tables
from bookkeeping.records import answered, clean
from metrics import Interval

EQUAL = 0.05  # a 95% interval that reaches no further to either side shows that two arms are equal
# Flags that do not make another arm.
SAME = {
    "seed", "name", "runs", "resume", "threads", "wandb", "device", "save_every", "eval_every",
    "eval_other_tiers", "micro_tokens", "gradient_checkpointing", "vllm_memory", "vllm_sleep",
    "api_concurrency",
}  # fmt: skip
# Those that do, of an evaluation over an API, which trained nothing.
API = {"model", "api_base", "env", "difficulty", "think", "max_tokens", "set", "environment_code"}


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
    runs: list[Run]

    def seeds(self) -> list[int]:
        return sorted({run.config["seed"] for run in self.runs})

    def table(self, tasks: str, what: str, only: list[int] | None = None) -> np.ndarray:
        """[seeds, tasks] final results. Runs of the same seed are not independent: take their mean.

        only: numbers of the tasks to take. None: all that every run of the arm has an answer to.
        """
        only = common(self.runs, tasks) if only is None else only
        by_seed: dict[int, list] = {seed: [] for seed in self.seeds()}
        for run in self.runs:
            by_task = dict(zip(answered(run.final[tasks]), run.final[tasks][what]))
            by_seed[run.config["seed"]].append([by_task[i] for i in only])
        return np.array([np.mean(rows, axis=0) for rows in by_seed.values()], dtype=float)


# ----------------------------------------------------------------------------------------- reading


def read(folder: Path) -> Run:
    """A finished run. ValueError with a sentence if it is none."""
    cure = f"go on with python train.py --resume {folder}"
    needed = {
        "config.json": "it is no run folder; check the path",
        "summary.json": f"the run has not finished; {cure}",
    }
    for name, why in needed.items():
        if not (folder / name).exists():
            raise ValueError(f"{folder} has no {name}, so {why}")
    config, summary = (records.record(folder / f"{name}.json") for name in ("config", "summary"))
    config["environment_code"] = summary.get("machine", {}).get("environment_code")
    evals = clean(records.lines(folder / "evals.jsonl"))
    final = {line["tasks"]: line for line in evals if line["stage"] == "final"}
    if not final:
        raise ValueError(f"{folder}/evals.jsonl has no final evaluation; {cure}")
    return Run(clean(folder.name), config, final, records.lines(folder / "metrics.jsonl"))


def group(runs: list[Run], ignore: tuple[str, ...] = ()) -> list[Arm]:
    """Runs with the same flags, apart from SAME and `ignore`, are one arm, in order of first run.

    An arm is called by the flags in which the arms differ.
    """
    for name in ignore:
        if not any(name in run.config for run in runs):
            raise ValueError(f"--ignore {name}: no run has such a flag; config.json lists them")
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(json.dumps(flags_of(run, ignore), sort_keys=True), []).append(run)
    flags, arms = [json.loads(key) for key in members], []
    for letter, mine, others in zip(map(chr, count(ord("A"))), flags, members.values()):
        differ = lambda name: len({str(f[name]) for f in flags if name in f}) > 1
        words = [f"{name}={mine[name]}" for name in sorted(mine) if differ(name)]
        arms.append(Arm(letter, ", ".join(words) or "all runs", others))
    return arms


def flags_of(run: Run, ignore: tuple[str, ...]) -> dict:
    """The flags that make another arm."""
    names = API if run.config.get("api_base") else run.config.keys() - SAME
    return {k: v for k, v in run.config.items() if k in names and k not in ignore}


def common(runs: list[Run], tasks: str) -> list[int]:
    """The numbers of the tasks that every run has a result of."""
    return sorted(set.intersection(*(set(answered(run.final[tasks])) for run in runs)))


# -------------------------------------------------------------------------------------- statistics


def permutation_test(difference: np.ndarray, resamples: int = 9999) -> float:
    """Paired differences [n] -> p of the sign-flip test.

    If nothing differs, each difference could as well be its negative. How often do such flips give
    a mean as far from 0 as the real one? If none of them does, p is Hoeffding's bound (1963) on how
    often one would: 1 / (resamples + 1) alone, corrected for 500 comparisons, could never be small.
    """
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (resamples, len(difference)))
    distance = abs(difference.sum())
    as_far = int((np.abs(signs @ difference) >= distance - 1e-9).sum())  # 1e-9: rounding
    p = (1 + as_far) / (resamples + 1)
    if as_far:
        return p
    return min(p, float(2 * np.exp(-(distance**2) / (2 * (difference**2).sum()))))


def holm(p) -> list[float]:
    """p-values corrected for how many they are, by Holm's method (1979).

    The smallest of n is multiplied by n, the next by n - 1, …; none falls below one before it.
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
) -> tuple[Interval, float]:
    """Student's interval of an estimate, and the p that it is 0.

    parts: (variance, degrees of freedom), which add up (Satterthwaite 1946). ends: what values may
    be, if all that were seen agree.
    """
    total, rounding = sum(v for v, _ in parts), 1e-9 * max(1.0, abs(estimate))
    if total <= rounding**2:  # nothing varies; n tasks that all differ alike are n equal signs
        p = 1.0 if abs(estimate) <= rounding else 0.5 ** (n - 1)
        return metrics.alike(estimate, n, ends), p
    freedom, error = total**2 / sum(v**2 / df for v, df in parts if v), math.sqrt(total)
    reach = float(stats.t.ppf((1 + level) / 2, freedom)) * error
    p = float(2 * stats.t.sf(abs(estimate) / error, freedom))
    return Interval(estimate, estimate - reach, estimate + reach, n), p


def variance_of_mean(values: np.ndarray) -> tuple[float, int]:
    """(variance of their mean, degrees of freedom)"""
    n = len(values)
    return (float(np.var(values, ddof=1) / n) if n > 1 else 0.0), n - 1


def differ(a: np.ndarray, b: np.ndarray) -> tuple[Interval, float, str]:
    """a, b [seeds, tasks] of the same tasks -> (a - b, paired by task; p; what varies in both)."""
    x, y = a.mean(axis=0), b.mean(axis=0)  # [tasks] each
    if min(len(a), len(b)) == 1:
        return metrics.gain(y, x), permutation_test(x - y), "tasks only"
    parts = [variance_of_mean(values) for values in (a.mean(axis=1), b.mean(axis=1), x - y)]
    return *by_variance(float(x.mean() - y.mean()), parts, len(x)), "seeds and tasks"


def final_mean(arm: Arm, tasks: str, what: str) -> Interval | None:
    """An arm's final mean, over tasks for one seed, over seeds and tasks for more.

    None if not every run was evaluated on them.
    """
    if not all(tasks in run.final for run in arm.runs):
        return None
    table = arm.table(tasks, what)  # [seeds, tasks]
    if len(table) == 1:
        return metrics.mean(table[0])
    parts = [variance_of_mean(table.mean(axis=axis)) for axis in (1, 0)]
    found = by_variance(float(table.mean()), parts, table.shape[1], (0.0, 1.0))[0]
    return tables.within(found, table.ravel())


# --------------------------------------------------------------------------------------- comparing


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
    for row, p in zip(rows, holm([row["p"] for row in rows])):
        better = row["a"] if row["difference"].mean > 0 else row["b"]
        unsure = equal_within(row["difference"], row["what"])
        row |= {"corrected": p, "verdict": f"{better.letter} better" if p < 0.05 else unsure}
    return rows, list(dict.fromkeys(notes))


def equal_within(difference: Interval, what: str) -> str:
    """The verdict if no difference was found: the whole interval may be too narrow to hide one."""
    reach = max(abs(difference.low), abs(difference.high))
    if not reach <= EQUAL:
        return "cannot tell"
    points = math.ceil(1000 * reach - 1e-6) / 10
    return (
        f"equal within {points:g} points" if what == "exact" else f"equal within {points / 100:g}"
    )


def compare_on(tasks: str, a: Arm, b: Arm) -> tuple[list[dict], list[str]]:
    """The rows of two arms on one task set, a row per measure, and notes."""
    runs, both = a.runs + b.runs, f"{a.letter} and {b.letter}"
    finals, only = [run.final[tasks] for run in runs], common(runs, tasks)
    if not only:
        why = f"have no task of {tasks} that both had an answer to; nothing to compare."
        return [], [f"{both} {why}"]
    measures = ["exact", "reward", *(tables.PARTS if finals[0]["trained"] else ())]
    measures = [what for what in measures if all(what in line for line in finals)]
    is_paid_alike = all(paid_by(run) == paid_by(runs[0]) for run in runs)
    if not is_paid_alike or all(line["reward"] == line.get("exact") for line in finals):
        measures.remove("reward")
    rows = []
    for what in measures:
        x, y = a.table(tasks, what, only), b.table(tasks, what, only)
        difference, p, over = differ(x, y)
        rows.append({
            "a": a, "b": b, "tasks": tasks, "what": what, "trained": finals[0]["trained"],
            "n": len(only), "x": float(x.mean()), "y": float(y.mean()), "difference": difference,
            "p": p, "over": over,
        })  # fmt: skip
    note = (
        f"{both} were paid by different rewards (--reward, --set, or the environment's code): "
        f"compared by {', '.join(measures) or 'nothing'}."
    )
    return rows, [] if is_paid_alike else [note]


def paid_by(run: Run) -> list:
    """What decides how much is paid: rewards under others are no longer the same measure."""
    what = (run.config.get(name) for name in ("reward", "environment_code"))
    return [*what, sorted(run.config.get("set") or [])]


# ---------------------------------------------------------------------------------------- the page


def headline(arms: list[Arm]) -> str:
    """What the arms are shown by: exact answers, or the mean reward if one has no such thing."""
    finals = [line for arm in arms for run in arm.runs for line in run.final.values()]
    return "exact" if all("exact" in line for line in finals) else "reward"


def task_sets(arms: list[Arm]) -> list[str]:
    return list(dict.fromkeys(tasks for arm in arms for run in arm.runs for tasks in run.final))


def text(arms: list[Arm], rows: list[dict], notes: list[str]) -> str:
    """compare.md."""
    runs, what = [run for arm in arms for run in arm.runs], headline(arms)
    members, finals = [], []
    for arm in arms:
        seeds, names = map(str, arm.seeds()), [run.name for run in arm.runs]
        members.append([f"**{arm.letter}**", arm.label, ", ".join(seeds), ", ".join(names)])
        means = [final_mean(arm, tasks, what) for tasks in task_sets(arms)]
        cells = [mean.text(*tables.scale(what)) if mean else "" for mean in means]
        finals.append([f"{arm.letter}: {arm.label}", *cells])
    told = [f"{run.name}: {tables.training_reward(run.lines)}" for run in runs]
    if len(arms) == 1:
        notes = ["All runs have the same flags: one arm, nothing to compare."]
    if any(row["over"] == "tasks only" for row in rows):
        alone = "an arm has a single seed, so how much another seed would change is not in"
        notes = [f"Tasks only: {alone} the interval, the p or the verdict.", *notes]
    if any(len(arm.runs) > len(arm.seeds()) for arm in arms):
        notes = [*notes, "Several runs of one seed were averaged and count as one."]
    measure = "Exactly right" if what == "exact" else "Mean reward"
    over = f"{measure}, with 95% intervals (over tasks; over seeds too where an arm has several)."
    page = [
        tables.section("Arms", [], ["", "arm", "seeds", "runs"], members),
        verdicts(rows),
        tables.section("Notes", notes, listed=True),
        tables.section("Final results", [over], ["arm", *task_sets(arms)], finals),
        tables.section("Training reward", told, listed=True),
    ]
    title = f"# Runs: {len(runs)}, arms: {len(arms)}"
    return f"{title}\n\n{tables.markdown(page)}\n![compare](compare.png)\n"


def verdicts(rows: list[dict]) -> dict:
    """The table of all comparisons."""
    head = [
        "tasks", "measure", "arms", "means", "difference", "varies in the interval", "n tasks", "p",
        "p corrected", "verdict",
    ]  # fmt: skip
    table = []
    for row in rows:
        means = [tables.number(row["what"], mean) for mean in (row["x"], row["y"])]
        digits, scale, _ = tables.scale(row["what"])
        table.append([
            tables.called(row), row["what"], f"{row['a'].letter} − {row['b'].letter}",
            ", ".join(means), row["difference"].text(digits, scale, sign="+"), row["over"],
            str(row["n"]), small(row["p"]), small(row["corrected"]), f"**{row['verdict']}**",
        ])  # fmt: skip
    sentence = (
        "First minus second, with its 95% interval; p corrected by Holm's method for the number of "
        f'comparisons ({len(rows)}), winner at 0.05 from the corrected p alone. "Cannot '
        'tell" does not mean equal: the interval says how large a difference may be hiding. '
        f'"Equal" does: its whole interval lies within {100 * EQUAL:g} points (rewards: {EQUAL}).'
    )
    return tables.section("Verdicts", [sentence], head, table)


def charts(arms: list[Arm]) -> list[dict]:
    """compare.png: the training reward of every run, an arm in one colour."""
    series = []
    for i, arm in enumerate(arms):
        look = {"name": f"{arm.letter}: {arm.label}", "colour": i}
        series += [tables.rolling(run.lines) | look for run in arm.runs]
    return tables.chart(f"training reward, mean of the last {tables.ROLLING} updates", series)


def main(
    folders: Positional[list[Path]], out: Path | None = None, ignore: tuple[str, ...] = ()
) -> Path:
    """Write compare.md and compare.png into `out` and return it.

    out: by default the folder `compare` beside the first run. ignore: further flags that do not
    make another arm, such as sft_steps if they were counted in seconds.
    """
    # runs/* contains earlier comparisons too.
    is_run = lambda folder: (folder / "config.json").exists()
    folders = [f for f in folders if is_run(f) or not (f / "compare.md").exists()]
    if len(folders) < 2:
        usage = "python -m bookkeeping.compare runs/a runs/b"
        raise SystemExit(f"compare needs two run folders or more: {usage}")
    out = out or folders[0].parent / "compare"
    with records.foreign(folders[0]):
        runs = [read(folder) for folder in folders]
        envs = sorted({run.config["env"] for run in runs})
        if len(envs) > 1:
            raise ValueError(f"runs of {' and '.join(envs)} share no task; compare one of them")
        arms = group(runs, tuple(ignore))
        page = text(arms, *compare(arms))
        out.mkdir(parents=True, exist_ok=True)
        records.write_whole(out / "compare.md", page)
        tables.draw(out / "compare.png", f"Runs: {len(runs)}, arms: {len(arms)}", charts(arms))
    print(page)
    print(f"wrote {out}/compare.md and {out}/compare.png")
    return out


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    tyro.cli(main, description=__doc__)
