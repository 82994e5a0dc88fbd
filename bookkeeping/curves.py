"""curves.png: what a run did, in four pictures or more; and where the seconds of an update go.

    summary.json, metrics.jsonl, evals.jsonl -> draw_curves -> curves.png

bookkeeping/report.py has it drawn, and takes its sentences on time and thinking from here, so that
page and picture say the same.
"""

from pathlib import Path

import numpy as np

import metrics
from bookkeeping import tables


def thinking_starts(lines: list[dict]) -> int | None:
    """The first of five updates in a row in which a majority of the replies derive the answer."""
    shares = [line.get("habit_derives", 0.0) for line in lines]
    starts = (i for i in range(len(shares) - 4) if min(shares[i : i + 5]) > 0.5)
    return next((lines[i]["update"] for i in starts), None)


# --------------------------------------------------------------------------- where the seconds go

BARS = {
    "rollout": "tab:blue", "environment": "tab:cyan", "sync": "tab:purple", "train": "tab:orange",
    "wait": "lightgray",
}  # fmt: skip


def time_bars(lines: list[dict]) -> dict[str, dict[str, float]]:
    """Mean seconds of an update by part, one bar per process.

    {"in turn": {...}}, or for a run that samples ahead {"trainer": {...}, "sampler": {...}}.
    """
    seconds = lambda part: [line.get(f"seconds_{part}", 0.0) for line in lines]
    mean = {part: float(np.mean(seconds(part))) for part in BARS}
    played = {part: mean[part] for part in ("rollout", "environment", "sync")}
    if not mean["wait"]:
        return {"in turn": played | {"train": mean["train"]}}
    rest = max(0.0, mean["wait"] + mean["train"] - sum(played.values()))
    return {
        "trainer": {part: mean[part] for part in ("train", "wait")},
        "sampler": played | {"wait": rest},
    }


def waiting(lines: list[dict]) -> float:
    """The share of an update in which the trainer waits: in turn, all but its own work."""
    bar = next(iter(time_bars(lines).values()))
    return 1 - bar["train"] / max(sum(bar.values()), 1e-9)


def where_time_goes(lines: list[dict]) -> list[str]:
    """One sentence for observations."""
    told = []
    for who, bar in time_bars(lines).items():
        whole = max(sum(bar.values()), 1e-9)
        parts = ", ".join(f"{part} {100 * s / whole:.0f}%" for part, s in bar.items())
        told.append(f"{who} {whole:.2f} s: {parts}")
    return [
        f"An update, on average: {'; '.join(told)}. "
        f"The trainer waits for samples {100 * waiting(lines):.0f}% of the time."
    ]


# -------------------------------------------------------------------------------------- curves.png


def draw_curves(path: Path, summary: dict, lines: list[dict], evals: list[dict]) -> None:
    """Four pictures: development tasks, training reward, habits, reply length.

    For swarm the last two are what the turns are used for, and how they go. Entries of the score
    that somebody has added have a picture of their own.
    """
    plt, swarm = tables.pyplot(), summary["env"] == "swarm"
    timed = bool(lines)
    own = tables.own_parts_of(summary, evals)
    heights = (1, 1, *[0.2] * timed, *[0.8] * bool(own))
    size = (13 if swarm else 11, 7.5 + 1.1 * timed + 3 * bool(own))
    fig = plt.figure(figsize=size, layout="constrained")
    grid = fig.add_gridspec(len(heights), 2, height_ratios=heights)
    evaluations, training, *lower = (fig.add_subplot(grid[i, j]) for i in (0, 1) for j in (0, 1))
    if timed:
        draw_time(fig.add_subplot(grid[2, :]), lines)
    if own:
        draw_own(fig.add_subplot(grid[-1, :]), own, lines, evals, summary["trained"])
    model, seed = Path(summary["model"]).name, summary["seed"]
    fig.suptitle(f"{summary['env']}, trained on {summary['trained']}, {model}, seed {seed}")
    draw_evaluations(evaluations, summary, evals)
    if not lines:
        for ax in (training, *lower):
            where = {"ha": "center", "transform": ax.transAxes}
            ax.text(0.5, 0.5, "no GRPO updates in this run", **where)
    else:
        shares = "gain" in summary and all(0 <= line["reward"] <= 1 for line in lines)
        draw_training(training, lines, shares)
        if swarm:
            from bookkeeping import behaviour

            behaviour.draw_tools(lower[0], lines)
            behaviour.draw_turns(lower[1], lines, min(10, len(lines)))
        else:
            draw_habits(*lower, lines)
    for ax in (evaluations, training, *lower):
        ax.grid(alpha=0.25)
    if path.is_symlink():  # somebody's: it is replaced, not followed
        path.unlink()
    fig.savefig(path, dpi=110)
    plt.close(fig)


def draw_own(ax, own: list[str], lines: list[dict], evals: list[dict], trained: str) -> None:
    """Entries of the score that somebody has added: of every update, and on development tasks."""
    during = [e for e in evals if e["tasks"] == trained and e["stage"] != "before"]
    for i, name in enumerate(own):
        here, color = [line for line in lines if name in line], f"C{i % 10}"
        ax.plot(
            [e["update"] for e in here], [e[name] for e in here], lw=0.7, alpha=0.5, color=color
        )
        here = [e for e in during if name in e]
        points = [tables.average(tables.values(e, name)) for e in here]
        x, ends = [max(e["update"], 0) for e in here], np.array([(p.low, p.high) for p in points])
        ax.plot(
            x, [p.mean for p in points], marker="o", ms=3, color=color, label=tables.label(name)
        )
        ax.fill_between(x, *ends.reshape(-1, 2).T, alpha=0.18, color=color)
    ax.grid(alpha=0.25)
    ax.set(title="further parts of the score (development with 95% bands; thin: training)")
    ax.set(xlabel="update")
    ax.legend(loc="best", fontsize=8)


def draw_time(ax, lines: list[dict]) -> None:
    """Where the seconds of an update go, one stacked bar per process."""
    draw_bars(ax, time_bars(lines))
    waits = f"the trainer waits for samples {100 * waiting(lines):.0f}% of the time"
    ax.set(title=f"where an update's seconds go ({waits})")


def draw_bars(ax, bars: dict[str, dict[str, float]]) -> None:
    """{name: {part of BARS: seconds}} as stacked bars, the first on top."""
    for y, bar in enumerate(bars.values()):
        left, whole = 0.0, max(sum(bar.values()), 1e-9)
        for part, seconds in bar.items():
            ax.barh(y, seconds, left=left, color=BARS[part], height=0.7, label=part)
            if seconds > 0.06 * whole:
                name = f"{part} {100 * seconds / whole:.0f}%"
                ax.text(left + seconds / 2, y, name, ha="center", va="center", fontsize=8)
            left += seconds
    ax.set_yticks(range(len(bars)), list(bars))
    ax.set(xlabel="s", ylim=(len(bars) - 0.5, -0.5))
    ax.margins(x=0)


def draw_evaluations(ax, summary: dict, evals: list[dict]) -> None:
    """Exact answers, or the mean reward if there is no such thing, with 95% bands."""
    (has_exact, has_reward), trained = tables.shown(summary), summary["trained"]
    factor, names = (100 if has_exact else 1), list(summary["eval"])
    exact, reward = (lambda e: metrics.mean(e["exact"])), (lambda e: metrics.mean(e["reward"]))
    of = lambda name: f", {name}" if len(names) > 1 else ""  # else the title says it
    curves = [(name, f"exact{of(name)}" if has_reward else name, exact) for name in names]
    if not has_exact:
        curves = [(name, f"reward, {name}", reward) for name in names]
    elif has_reward:
        curves.append((trained, f"mean reward{of(trained)}", reward))
    if summary["env"] == "swarm":
        from bookkeeping import behaviour

        of_trained = [e for e in evals if e["tasks"] == trained and e["stage"] != "before"]
        behaviour.draw_parts(ax, summary["config"], of_trained)
    for name, label, measure in curves:
        curve = [e for e in evals if e["tasks"] == name and e["stage"] != "before"]
        x, points = [max(e["update"], 0) for e in curve], [measure(e) for e in curve]
        mean, low, high = (
            [factor * getattr(p, end) for p in points] for end in ("mean", "low", "high")
        )
        wide = 2.2 if name == trained else 1
        (line,) = ax.plot(x, mean, marker="o", ms=3, lw=wide, label=label)
        ax.fill_between(x, low, high, alpha=0.18, color=line.get_color())
        before = tables.eval_of(evals, "before", name)
        if before:
            ax.plot(0, factor * measure(before).mean, marker="x", color=line.get_color())
    n, low, high = len(evals[0]["reward"]), ax.dataLim.y0, ax.dataLim.y1
    ax.set(title=f"development tasks (n={n}, 95% bands; × before SFT)", xlabel="update")
    if has_exact:
        ylabel = "% exact (reward x 100)" if has_reward else "% exactly right"
        ax.set(ylabel=ylabel, ylim=(min(-2, low), max(102, high)))
    else:
        ax.set(ylabel="reward, and its parts", ylim=(min(0, low), None))
    ax.legend(loc="lower right", fontsize=None if has_exact else 8)


def draw_training(ax, lines: list[dict], shares: bool) -> None:
    """The training reward. shares: it lies between 0 and 1."""
    x, rewards = [line["update"] for line in lines], [line["reward"] for line in lines]
    window = min(10, len(lines))
    ax.plot(x, rewards, lw=0.7, alpha=0.5, label="each update")
    rolling = np.convolve(rewards, np.ones(window) / window, mode="valid")
    ax.plot(x[window - 1 :], rolling, lw=2, label=f"mean of {window}")
    ax.set(title="training reward", xlabel="update")
    if shares:
        signal = [line["groups_with_signal"] for line in lines]
        ax.plot(x, signal, lw=0.7, color="grey", label="share of groups with signal")
        ax.set(ylim=(-0.02, 1.02))
    moves = [b for a, b in zip(lines, lines[1:]) if a.get("level") != b.get("level")]
    for i, line in enumerate(moves):  # the steps of a curriculum; names of close ones stand apart
        ax.axvline(line["update"], color="black", ls="--", lw=1)
        where = {"transform": ax.get_xaxis_transform(), "fontsize": 9}
        ax.text(line["update"], 0.02 + 0.05 * (i % 4), f" {line['level']}", **where)
    ax.legend(loc="lower right")


def draw_habits(left, right, lines: list[dict]) -> None:
    """What kinds of replies there are, and how long they are."""
    x = [line["update"] for line in lines]
    habits = dict.fromkeys(key for line in lines for key in line if key.startswith("habit_"))
    if habits:
        layers = [[100 * line.get(habit, 0.0) for line in lines] for habit in habits]
        names = [habit.removeprefix("habit_") for habit in habits]
        left.stackplot(x, layers, labels=names, alpha=0.8)
        left.legend(loc="center right")
    start = thinking_starts(lines)
    if start is not None:
        for ax in (left, right):
            ax.axvline(start, color="black", ls="--", lw=1)
        right.annotate(f" begins to think\n (update {start})", (start, 5), fontsize=9)
    percent = {"ylabel": "% of replies", "ylim": (0, 100)}
    left.set(title="habits of the sampled replies", xlabel="update", **percent)
    right.plot(x, [line["reply_tokens"] for line in lines], lw=1.2)
    right.set(title="reply length", xlabel="update", ylabel="tokens", ylim=(0, None))
