"""Is one arm better than another? Run folders in, a table of verdicts and two pictures out.

    python -m bookkeeping.compare runs/a runs/b runs/c …

compare.md and compare.png say how runs differ, and whether that may be luck. How an arm is found
and a verdict reached is in bookkeeping/significance.py; this file writes the page and draws.
"""

import math
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import tyro
from scipy import stats
from tyro.conf import Positional

import metrics
from bookkeeping import tables
from bookkeeping.records import clean, foreign
from bookkeeping.significance import EQUAL, Arm, Run, compare, final_mean, group, read, small


def headline(arms: list[Arm]) -> str:
    """What the arms are shown by: exact answers, or the mean reward if one has no such thing."""
    finals = [line for arm in arms for run in arm.runs for line in run.final.values()]
    return "exact" if all("exact" in line for line in finals) else "reward"


def task_sets(arms: list[Arm]) -> list[str]:
    return list(dict.fromkeys(tasks for arm in arms for run in arm.runs for tasks in run.final))


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
                end = metrics.trend(run.rewards[run.before :]).sentence(run.before)
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
        digits, scale, unit = tables.scale(row["what"])
        d, mean = row["d"], lambda x: f"{scale * x:.{digits}f}{unit}"  # noqa: B023
        table.append([
            row["tasks"] + (" (trained)" if row["trained"] else ""), row["what"],
            f"{row['a'].letter} − {row['b'].letter}", f"{mean(row['x'])}, {mean(row['y'])}",
            d.difference.text(digits, scale, sign="+"), d.over, str(row["n"]),
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
        return tables.interval(what, final_mean(arm, tasks, what))

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
            spread = windows.std(axis=1, ddof=1)[: len(middle)]  # [updates]
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


def main(
    folders: Positional[list[Path]], out: Path | None = None, ignore: tuple[str, ...] = ()
) -> Path:
    """Write compare.md and compare.png into `out` and return it.

    out: by default the folder `compare` beside the first run, or `compare-2` and so on if that
    holds another comparison. ignore: further flags that do not
    make another arm, such as sft_steps if they were counted in seconds.
    """
    with foreign(folders[0] if folders else ""):
        return write([Path(folder) for folder in folders], out, ignore)


def write(folders: list[Path], out: Path | None, ignore: tuple[str, ...]) -> Path:
    # runs/* contains earlier comparisons too.
    is_run = lambda folder: (folder / "config.json").exists()
    folders = [f for f in folders if is_run(f) or not (f / "compare.md").exists()]
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
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: that is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)
    (out / "compare.md").write_text(page, encoding="utf-8")
    draw(out / "compare.png", arms)
    print(page)
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
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    tyro.cli(main, description=__doc__)
