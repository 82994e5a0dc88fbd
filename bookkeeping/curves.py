"""The curves of a run as data, and the pictures drawn from them. report.html draws the same data.

    metrics.jsonl, evals.jsonl -> [{"title", "unit", "low", "high", "series": [{"name", "points":
        [[update, value, low end, high end], …]}]}] -> draw -> curves.png

A chart may be "stacked" (the ends of a point are its layer's edges), "small" (on the page), and
have "marks": [[update, words]]. A series may be "plain" (drawn thin), "apart" (points that no line
joins) and have a "colour": a number, or a CSS colour. A value that was not measured is None,
because JSON has no NaN. An evaluation before SFT stands at -1 on the axis of updates.

Run me: `python -m bookkeeping.report runs/NAME` draws them.
"""

import math
from pathlib import Path

import numpy as np

from bookkeeping import tables
from bookkeeping.records import clean

SMALL = {  # title: (key, unit, end of the axis)
    "reply length": ("reply_tokens", "tokens", None),
    "entropy": ("entropy", "nats", None),
    "groups with signal": ("groups_with_signal", "", 1.0),
    "deviation of rewards within a group": ("deviation", "", None),
    "gradient norm": ("grad_norm", "", None),
    "turns used": ("turns_used", "", None),
    "turns in which something was done": ("turns_acted", "", None),
    "errors, of the turns": ("error_rate", "", None),
    "reputation": ("reputation", "", 1.0),
}
SECONDS = ("rollout", "environment", "sync", "train", "wait")
ROLLING = 10  # updates
GREY = "#808080"
COLOURS = {  # of swarm's tools: work is blue, trade orange, talk green, errors red, passing grey
    "claim_task": "#9cc5e8", "submit_work": "#2b74b3", "propose_trade": "#f7cf7a",
    "accept_proposal": "#e5861a", "reject_proposal": "#9a5418", "cancel_proposal": "#e8cf9a",
    "post": "#a5d79f", "reply": "#55ab5a", "vote": "#1f6d3a", "errors": "#c4203f",
    "pass_turn": "#a8a8a8",
}  # fmt: skip


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
    trained = dict.fromkeys(e["tasks"] for e in evals if e["trained"])
    names = dict.fromkeys([*trained, *(e["tasks"] for e in evals)])

    def series(measure: str, tasks: str, name: str, factor: float = 1, digits: int = 3) -> dict:
        """Rounded here, so that page, picture and report.md agree."""
        points = []
        for e in evals:
            if e["tasks"] == tasks and measure in e:
                i = tables.average(tables.values(e, measure))
                ends = [round(factor * v, digits) for v in (i.mean, i.low, i.high)]
                points.append([tables.time_of(e), *(ends if i.n else [None] * 3)])
        return {"name": name, "plain": tasks not in trained, "points": points}

    n = max((len(e["reward"]) for e in evals), default=0)
    same = all(e.get("exact") == e["reward"] for e in evals)
    title = f"development, exactly right{' (= mean reward)' if same else ''}, n={n}"
    out = chart(title, [series("exact", tasks, tasks, 100, 1) for tasks in names], "%", 100)
    if not same:
        reward = [series("reward", tasks, tasks) for tasks in names]
        out += chart(f"development, mean reward, n={n}", reward)
    measured = dict.fromkeys(name for e in evals if e["trained"] for name in tables.measures(e))
    own = tables.PARTS if env == "swarm" else tables.own_parts(measured, env)
    parts = [series(name, tasks, tables.label(name)) for name in own for tasks in trained]
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


def rolling(lines: list[dict], **look) -> dict:
    """A series: the mean reward of the last updates."""
    points = []
    for i, line in enumerate(lines, 1):
        recent = [e["reward"] for e in lines[max(0, i - ROLLING) : i] if "reward" in e]
        points.append([line["update"], float(np.mean(recent)) if recent else None, None, None])
    return {"name": f"mean of the last {ROLLING}", "points": points, **look}


def of_updates(lines: list[dict], env: str) -> list[dict]:
    """Charts of metrics.jsonl: reward, habits or tools, seconds; then small ones, on health."""
    updates = [line["update"] for line in lines]
    column = lambda key: [line.get(key) for line in lines]
    each = zip(updates, column("reward"), column("reward_low"), column("reward_high"))
    each = {"name": "each update", "points": list(map(list, each)), "plain": True, "colour": GREY}
    moves = [b for a, b in zip(lines, lines[1:]) if a.get("level") != b.get("level")]
    marks = [[line["update"], str(line["level"])] for line in moves]
    out = chart("training reward", [rolling(lines), each], marks=marks)
    habits = {}
    for key in dict.fromkeys(key for line in lines for key in line if key.startswith("habit_")):
        habits[tables.label(key)] = [100 * line.get(key, 0.0) for line in lines]
    start = thinking_starts(lines)
    marks = [] if start is None else [[start, "begins to think"]]
    out += stacked("habits of the samples", updates, habits, "%", top=100, marks=marks)
    if env == "swarm":
        tools = tools_used(lines)
        title = "tool use of the samples, of the turns"
        out += stacked(title, updates, tools, "%", top=100, colours=COLOURS)
    ahead = any(column("seconds_wait"))
    parts = ("train", "wait") if ahead else SECONDS[:4]  # the trainer's, if somebody else samples
    seconds = {part: column(f"seconds_{part}") for part in parts}
    out += stacked("where the seconds of an update go", updates, seconds, "s")
    for title, (key, unit, top) in SMALL.items():
        points = [[update, value, None, None] for update, value in zip(updates, column(key))]
        out += chart(title, [{"name": key, "points": points}], unit, top, small=True)
    return out


def tool_shares(line: dict) -> dict:
    """{tool: share of the turns}, errors and passing last.

    Of an evaluation ([n] each) or of a line of metrics.jsonl (numbers).
    """
    used = {name: np.array(x, dtype=float) for name, x in line.items() if name.startswith("used_")}
    errors, total = np.array(line.get("error_rate", 0.0), dtype=float), sum(used.values())
    calls = np.where(total > 0, total, 1)
    shares = {name.removeprefix("used_"): (1 - errors) * x / calls for name, x in used.items()}
    shares["errors"] = errors
    order = list(COLOURS)
    return dict(sorted(shares.items(), key=lambda s: order.index(s[0]) if s[0] in order else 0))


def tools_used(lines: list[dict]) -> dict[str, list[float]]:
    """{tool: % of the turns of the sampled episodes, update by update}"""
    shares = [tool_shares(line) for line in lines]
    tools = dict.fromkeys(tool for s in shares for tool in s)
    return {tool: [100 * float(np.nan_to_num(s.get(tool, 0.0))) for s in shares] for tool in tools}


# ------------------------------------------------------------------------------------ the pictures


def pyplot():
    """matplotlib.pyplot, loaded when something is drawn, for files and not for a screen."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rc("text", parse_math=False)  # a name may contain a $
    import matplotlib.pyplot as plt

    return plt


def draw(path: Path, title: str, charts: list[dict], columns: int = 3) -> None:
    """All charts in one picture, a few to a row."""
    plt, rows = pyplot(), math.ceil(len(charts) / columns)
    size = (4.8 * columns, 3.4 * max(1, rows))
    fig = plt.figure(figsize=size, layout="constrained")
    fig.suptitle(clean(title), fontsize=10)
    for i, chart in enumerate(clean(charts), 1):
        draw_chart(fig.add_subplot(rows, columns, i), chart)
    path.unlink(missing_ok=True)  # a link is somebody's: it is replaced, not followed
    fig.savefig(path, dpi=100)
    plt.close(fig)


def draw_chart(ax, chart: dict) -> None:
    for i, s in enumerate(chart["series"]):
        x, y, low, high = np.array(s["points"], dtype=float).T
        colour = s.get("colour", i)
        look = {"color": colour if isinstance(colour, str) else f"C{colour}", "label": s["name"]}
        then = x >= 0  # the others are evaluations before SFT: a cross
        if chart.get("stacked"):
            ax.fill_between(x, low, high, alpha=0.8, lw=0, **look)
        elif s.get("apart"):
            ax.errorbar(x, y, [y - low, high - y], fmt="o", ms=4, **look)
        else:
            width = 0.9 if s.get("plain") else 2.0
            ax.plot(x[then], y[then], lw=width, marker="o", ms=width, clip_on=False, **look)
            ax.fill_between(x[then], low[then], high[then], alpha=0.16, color=look["color"])
            ax.plot(0 * x[~then], y[~then], "x", color=look["color"])
    for j, (update, words) in enumerate(chart.get("marks", [])):  # names of close ones stand apart
        ax.axvline(update, color="black", ls="--", lw=1)
        height = 0.02 + 0.07 * (j % 4)
        ax.text(update, height, f" {words}", fontsize=8, transform=ax.get_xaxis_transform())
    unit = f" ({chart['unit']})" if chart["unit"] else ""
    ax.set_title(f"{chart['title']}{unit}", fontsize=9)
    ax.set_ylim(chart["low"], chart["high"])
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.25)
    if len(chart["series"]) > 1:
        ax.legend(fontsize=7, loc="lower right", ncols=1 + len(chart["series"]) // 5)
