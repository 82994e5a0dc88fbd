"""The curves of a run as data, and curves.png drawn from them. report.html draws the same data.

    metrics.jsonl, evals.jsonl -> [{"title", "unit", "low", "high", "series": [{"name", "points":
        [[update, value, low end, high end], …]}]}] -> draw -> curves.png

A chart may be "stacked" (the ends of a point are its layer's edges), "small", and have "marks":
[[update, words]]. A series may be "plain" (drawn thin) and have a "colour": a number, or a CSS
colour. A value that was not measured is None, because JSON has no NaN.

Run me: `python -m bookkeeping.report runs/NAME` draws them.
"""

from pathlib import Path

import numpy as np

from bookkeeping import tables
from bookkeeping.records import clean

SMALL = {  # title: (key, unit, end of the axis)
    "reply length": ("reply_tokens", "tokens", None),
    "entropy": ("entropy", "nats", None),
    "groups with signal": ("groups_with_signal", "", 1.0),
    "gradient norm": ("grad_norm", "", None),
    "turns used": ("turns_used", "", None),
    "turns in which something was done": ("turns_acted", "", None),
    "errors, of the turns": ("error_rate", "", None),
    "reputation": ("reputation", "", 1.0),
}
SECONDS = ("rollout", "environment", "sync", "train", "wait")
ROLLING = 10  # updates
GREY = "#808080"


def thinking_starts(lines: list[dict]) -> int | None:
    """The first of five updates in a row in which a majority of the replies derive the answer."""
    shares = [line.get("habit_derives", 0.0) for line in lines]
    starts = (i for i in range(len(shares) - 4) if min(shares[i : i + 5]) > 0.5)
    return next((lines[i]["update"] for i in starts), None)


def chart(
    title: str, series: list[dict], unit: str = "", top: float | None = None, **more
) -> list[dict]:
    """A chart in a list; an empty list if no series has a number. top: the end of the axis."""
    series = [s for s in series if any(point[1] is not None for point in s["points"])]
    if not series:
        return []
    values = [v for s in series for point in s["points"] for v in point[1:] if v is not None]
    low, high = min([0.0, *values]), top or 1.05 * max([0.0, *values]) or 1.0
    return [{"title": title, "unit": unit, "low": low, "high": high, "series": series, **more}]


def of_evaluations(evals: list[dict], env: str) -> list[dict]:
    """Charts of the development tasks: exact answers, mean reward, the parts of the reward."""
    trained = [e for e in evals if e["trained"]]
    names = dict.fromkeys(e["tasks"] for e in trained + evals)  # those that are trained come first

    def series(measure: str, tasks: str, factor: float = 1, digits: int = 3) -> dict:
        """Rounded here, so that page, picture and report.md agree."""
        points = []
        for e in evals:
            if e["tasks"] == tasks and measure in e:
                i = tables.average(tables.values(e, measure))
                ends = [round(factor * v, digits) for v in (i.mean, i.low, i.high)]
                x = -1 if e["stage"] == "before" else e["update"]  # left of what SFT made of it
                points.append([x, *(ends if i.n else [None] * 3)])
        return {"name": tasks, "plain": tasks not in names_trained, "points": points}

    names_trained = {e["tasks"] for e in trained}
    n = max((len(e["reward"]) for e in evals), default=0)
    same = all(e.get("exact") == e["reward"] for e in evals)
    title = f"development, exactly right{' (= mean reward)' if same else ''}, n={n}"
    out = chart(title, [series("exact", tasks, 100, 1) for tasks in names], "%", 100)
    if not same:
        reward = [series("reward", tasks) for tasks in names]
        out += chart(f"development, mean reward, n={n}", reward)
    own = tables.PARTS
    if env != "swarm":
        own = tables.own_parts(dict.fromkeys(x for e in trained for x in tables.measures(e)), env)
    parts = []
    for name in own:
        parts += [series(name, tasks) | {"name": tables.label(name)} for tasks in names_trained]
    return out + chart("development, the parts of the score", parts)


def stacked(title: str, updates: list[int], layers: dict[str, list], unit: str, **more) -> list:
    """A chart of layers {name: values} that lie on each other."""
    series, floor = [], np.zeros(len(updates))
    colours = more.pop("colours", {})
    for i, (name, values) in enumerate(layers.items()):
        edges = floor, floor + np.nan_to_num(np.array(values, dtype=float))
        floor = edges[1]
        points = [list(point) for point in zip(updates, values, *(edge.tolist() for edge in edges))]
        series.append({"name": name, "colour": colours.get(name, i), "points": points})
    return chart(title, series, unit, stacked=True, **more)


def of_updates(lines: list[dict], env: str) -> list[dict]:
    """Charts of metrics.jsonl: reward, habits or tools, seconds; then small ones, on health."""
    updates = [line["update"] for line in lines]
    column = lambda key: [line.get(key) for line in lines]
    plain = lambda key: [[line["update"], line.get(key), None, None] for line in lines]
    rewards = np.array(column("reward"), dtype=float)
    rolling = []
    for i, update in enumerate(updates):
        recent = rewards[max(0, i - ROLLING + 1) : i + 1]
        recent = recent[~np.isnan(recent)]
        rolling.append([update, float(recent.mean()) if len(recent) else None, None, None])
    each = zip(updates, column("reward"), column("reward_low"), column("reward_high"))
    moves = [b for a, b in zip(lines, lines[1:]) if a.get("level") != b.get("level")]
    out = chart(
        "training reward",
        [
            {"name": f"mean of the last {ROLLING}", "points": rolling},
            {"name": "each update", "points": list(map(list, each)), "plain": True, "colour": GREY},
        ],
        marks=[[line["update"], str(line["level"])] for line in moves],
    )
    habits = {}
    for key in dict.fromkeys(key for line in lines for key in line if key.startswith("habit_")):
        habits[tables.label(key)] = [100 * line.get(key, 0.0) for line in lines]
    start = thinking_starts(lines)
    marks = [] if start is None else [[start, "begins to think"]]
    out += stacked("habits of the samples", updates, habits, "%", top=100, marks=marks)
    if env == "swarm":
        from bookkeeping import behaviour

        tools = behaviour.tools_used(lines)
        title = "tool use of the samples, of the turns"
        out += stacked(title, updates, tools, "%", top=100, colours=behaviour.COLOURS)
    ahead = any(column("seconds_wait"))
    parts = ("train", "wait") if ahead else SECONDS[:4]  # the trainer's, if somebody else samples
    seconds = {part: column(f"seconds_{part}") for part in parts}
    out += stacked("where the seconds of an update go", updates, seconds, "s")
    for title, (key, unit, top) in SMALL.items():
        out += chart(title, [{"name": key, "points": plain(key)}], unit, top, small=True)
    return out


# -------------------------------------------------------------------------------------- curves.png


def draw(path: Path, title: str, charts: list[dict]) -> None:
    """All charts in one picture: two large ones to a row, then four small ones to a row."""
    plt, charts = tables.pyplot(), clean(charts)
    large = [i for i, chart in enumerate(charts) if not chart.get("small")]
    small = [i for i in range(len(charts)) if i not in large]
    mosaic = []
    for i in range(0, len(large), 2):  # "." is an empty place; a large one alone takes the row
        mosaic.append([large[i], large[i], *large[i : i + 2][-1:] * 2])
    for i in range(0, len(small), 4):
        mosaic.append([*small[i : i + 4], *["."] * 3][:4])
    heights = [1.0 if row[0] in large else 0.6 for row in mosaic]
    fig = plt.figure(figsize=(13, 3.6 * sum(heights)), layout="constrained")
    fig.suptitle(clean(title))
    for i, ax in fig.subplot_mosaic(mosaic, height_ratios=heights).items():
        draw_chart(ax, charts[i])
    if path.is_symlink():  # somebody's: it is replaced, not followed
        path.unlink()
    fig.savefig(path, dpi=100)
    plt.close(fig)


def draw_chart(ax, chart: dict) -> None:
    thin = chart.get("small")
    for i, s in enumerate(chart["series"]):
        x, y, low, high = np.array(s["points"], dtype=float).T
        colour = s.get("colour", i)
        look = {"color": colour if isinstance(colour, str) else f"C{colour}"}
        if chart.get("stacked"):
            ax.fill_between(x, low, high, alpha=0.8, lw=0, label=s["name"], **look)
            continue
        then = x >= 0  # the others are evaluations before SFT: a cross
        width = 0.9 if thin or s.get("plain") else 2.2
        ax.plot(
            x[then], y[then], lw=width, marker="o", ms=width, clip_on=False, label=s["name"], **look
        )
        ax.fill_between(x[then], low[then], high[then], alpha=0.16, **look)
        ax.plot(0 * x[~then], y[~then], "x", **look)
    for j, (update, words) in enumerate(chart.get("marks", [])):  # names of close ones stand apart
        ax.axvline(update, color="black", ls="--", lw=1)
        height = 0.02 + 0.07 * (j % 4)
        ax.text(update, height, f" {words}", fontsize=8, transform=ax.get_xaxis_transform())
    unit = f" ({chart['unit']})" if chart["unit"] else ""
    ax.set_title(f"{chart['title']}{unit}", fontsize=8 if thin else 10)
    ax.set_ylim(chart["low"], chart["high"])
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.25)
    if len(chart["series"]) > 1:
        ax.legend(fontsize=7, loc="lower right", ncols=1 + len(chart["series"]) // 5)
