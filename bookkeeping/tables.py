"""Tables and curves of what a run measured, for report.md, report.html and curves.png alike.

    a line of evals.jsonl {"reward": [n], "format": [n], …} -> averages with intervals -> cells
    section(title, sentences, head, rows) -> Markdown here, HTML on the page
    metrics.jsonl, evals.jsonl -> [{"title", "unit", "low", "high", "series": [{"name", "points":
        [[update, value, low end, high end], …]}]}] -> drawn by draw here, by the page itself there

A chart may be "stacked" (the ends of a point are its layer's edges), "small" (on the page), and
have "marks": [[update, words]]. A series may be "plain" (drawn thin) and have a "colour": a number,
or a CSS colour. A value that was not measured is None, because JSON has no NaN. An evaluation
before SFT stands at -1 on the axis of updates.

`python -m bookkeeping.report runs/NAME` writes them. They serve every environment. What only the
swarm has is in bookkeeping/behaviour.py.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

import metrics
from bookkeeping import records
from bookkeeping.records import clean, quote

# Names in the order of the tables. A measure that is not listed comes last, under its own name.
NAMES = {
    "reward": "reward", "payoff": "payoff", "quality": "interaction quality",
    "diversity": "action diversity", "reputation": "reputation, of 1", "turns_used": "turns used",
    "turns_acted": "turns in which something was done",
    "used_claim_task": "tasks claimed", "used_submit_work": "tasks submitted",
    "waste": "claims never submitted",
    "used_propose_trade": "trades proposed", "used_accept_proposal": "trades accepted",
    "used_reject_proposal": "trades rejected", "used_cancel_proposal": "proposals cancelled",
    "used_post": "posts", "used_reply": "replies", "used_vote": "votes",
    "used_pass_turn": "turns passed", "error_rate": "errors, of the turns",
    "truncated": "cut short", "survival": "not frozen at the end", "gain": "resources gained",
}  # fmt: skip
PARTS = ("payoff", "reputation", "quality", "diversity")  # of the swarm's reward
PERCENT = ("error_rate", "format", "truncated", "survival", "exact")
TWO_DIGITS = ("waste", "turns_used", "turns_acted", "extra_calls", "self_proposal_errors")
OVER_TIME = (
    "exact", "reward", "payoff", "quality", "diversity", "reputation", "turns_used",
    "turns_acted", "error_rate", "format", "truncated", "reply_tokens",
)  # fmt: skip
# Entries of letters' and alphabet's scores: the report has places for them, or leaves them out.
OURS = ("reward", "exact", "format", "fraction", "similarity", "reply_tokens", "truncated")
MOMENTS = {
    "before": "before SFT",
    "after_sft": "after SFT",
    "final": "update {} (final)",
    "eval_only": "update {} (evaluated later)",
}
SMALL = {  # title of a small chart: (column of metrics.jsonl, unit, end of the axis)
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
STYLE = {  # of curves.png
    "font.size": 8, "figure.titlesize": 10, "axes.titlesize": 9, "legend.fontsize": 7,
    "legend.loc": "lower right", "axes.grid": True, "grid.alpha": 0.25,
    "text.parse_math": False,  # a name may contain a $
}  # fmt: skip
SECONDS = ("rollout", "environment", "sync", "train", "wait")
ROLLING = 10  # updates
GREY = "#808080"
COLOURS = {  # of swarm's tools: work is blue, trade orange, talk green, errors red, passing grey
    "claim_task": "#9cc5e8", "submit_work": "#2b74b3", "propose_trade": "#f7cf7a",
    "accept_proposal": "#e5861a", "reject_proposal": "#9a5418", "cancel_proposal": "#e8cf9a",
    "post": "#a5d79f", "reply": "#55ab5a", "vote": "#1f6d3a", "errors": "#c4203f",
    "pass_turn": "#a8a8a8",
}  # fmt: skip


def own_parts(names, env: str) -> list[str]:
    """Of the entries of a score, those that somebody has added: a bonus, say, in a fork.

    Swarm's tables have a row for every entry already (behaviour.sections).
    """
    if env == "swarm":
        return []
    return [name for name in names if name not in OURS and not name.startswith(("habit_", "turn_"))]


def moment(e: dict) -> str:
    """What an evaluation is called."""
    return MOMENTS.get(e["stage"], "update {}").format(e["update"])


def called(e: dict) -> str:
    """The name of its tasks."""
    return f"{e['tasks']} (trained)" if e["trained"] else e["tasks"]


def time_of(e: dict) -> int:
    """Its place on the axis of updates, where before SFT is -1."""
    return -1 if e["stage"] == "before" else e["update"]


def values(e: dict, name: str) -> np.ndarray:
    """[n] floats; NaN for an episode that has none."""
    return np.array(e[name], dtype=float)


def measures(*evals: dict) -> list[str]:
    """The measures that all of these evaluations have, in the tables' order."""
    order = dict.fromkeys([*NAMES, *evals[0]])
    return [name for name in order if all(isinstance(e.get(name), list) for e in evals)]


def average(v: np.ndarray) -> metrics.Interval:
    """The mean of those that have a value."""
    return metrics.mean(v[~np.isnan(v)])


def within(i: metrics.Interval, values) -> metrics.Interval:
    """The interval of shares lies between 0 and 1 as they do: Student's does not know that."""
    if not len(values) or min(values) < 0 or max(values) > 1:
        return i
    return replace(i, low=max(0.0, i.low), high=min(1.0, i.high))


def level(rewards: list[float]) -> metrics.Interval:
    """The mean of consecutive updates, with the interval of its level."""
    return within(metrics.level(rewards), rewards)


def training_reward(lines: list[dict]) -> str:
    """Its distribution, its present level, and whether it has settled."""
    lines = [line for line in lines if "reward" in line]
    if not lines:
        return "none."
    before = records.before_last_level(lines)
    rewards = [line["reward"] for line in lines]
    recent, at = rewards[before:], f", at level {lines[-1]['level']}" if before else ""
    spread = replace(metrics.distribution(rewards), mean=level(rewards))
    trend = metrics.trend(recent)
    trend = replace(trend, level=within(trend.level, recent))
    window = metrics.adaptive_window(recent)
    return (
        f"Update by update: {spread.sentence()}. Now{at}: {level(recent[-window:]).text(2)}, the "
        f"mean of the last {window} updates, as many as describe the present. "
        f"Has it settled{at}? {trend.sentence(before).capitalize()}."
    )


def label(name: str) -> str:
    return NAMES.get(name, name.removeprefix("habit_").replace("_", " "))


def scale(name: str) -> tuple[int, float, str]:
    """(digits, factor, unit) of a measure."""
    if name in PERCENT:
        return 1, 100, "%"
    if name in ("gain", "reply_tokens"):
        return 1, 1, ""
    return (2 if name.startswith("used_") or name in TWO_DIGITS else 3), 1, ""


def number(name: str, x: float) -> str:
    digits, factor, unit = scale(name)
    return f"{factor * x:.{digits}f}{unit}"


def cell(name: str, v: np.ndarray) -> str:
    """The average of a measure. A count that never varies has no spread, and so no interval."""
    if len(v) and v.min() > 1 and metrics.is_constant(v):
        return f"{v[0]:g}, always"
    return average(v).text(*scale(name))


def section(title: str, text: list[str], head: tuple = (), rows: tuple = (), **more) -> dict:
    """more: said, the columns that hold a model's words; folded, on the page; listed, the sentences
    are a list; episode, the number of one that can be looked at."""
    return {"title": title, "text": text, "head": list(head), "rows": list(rows), **more}


def markdown(sections: list[dict]) -> str:
    """What a model said stands in backticks, where neither HTML nor a link is read."""
    out = []
    for s in sections:
        texts, head, rows = clean(s["text"]), clean(s["head"]), [clean(row) for row in s["rows"]]
        for i in s.get("said", ()):
            for row, said in zip(rows, s["rows"]):
                row[i] = quote(said[i]).replace("|", "\\|")
        table = [head, ["---"] * len(head), *rows] if rows else []
        out += [f"## {clean(s['title'])}", ""]
        out += [f"* {text}" if s.get("listed") else f"{text}\n" for text in texts]
        out += [*(f"| {' | '.join(row)} |" for row in table), ""]
    return "\n".join(out)


def evaluations(title: str, evals: list[dict], env: str) -> list[dict]:
    """One section: a row per evaluation and task set, a column per measure. None without any."""
    found = dict.fromkeys(name for e in evals for name in measures(e))
    names = [name for name in (*OVER_TIME, *own_parts(found, env)) if name in found]
    if all(e.get("exact") == e["reward"] for e in evals):
        names = [name for name in names if name != "reward"]
    shown = lambda e, name: cell(name, values(e, name)) if name in e else ""
    about = lambda e: [moment(e), called(e), str(len(e["reward"]))]
    rows = [about(e) + [shown(e, name) for name in names] for e in evals]
    text = ["Greedy, the same development tasks every time; means with 95% intervals."]
    head = ["", "tasks", "n", *map(label, names)]
    return [section(title, text, head, rows, folded=True)] if evals else []


# ------------------------------------------------------------------------------------------ curves


def chart(
    title: str, series: list[dict], unit: str = "", top: float | None = None, **more
) -> list[dict]:
    """A chart in a list; an empty list if no series has a number. top: the end of the axis."""
    series = [s for s in series if any(point[1] is not None for point in s["points"])]
    values = [v for s in series for point in s["points"] for v in point[1:] if v is not None]
    low, high = min([0.0, *values]), top or 1.05 * max([0.0, *values]) or 1.0
    found = {"title": title, "unit": unit, "low": low, "high": high, "series": series, **more}
    return [found] if series else []


def curve(evals: list[dict], measure: str, name: str) -> dict:
    """A series of one task set, rounded as in the tables: page, picture and report.md agree."""
    digits, factor, _ = scale(measure)
    means = [(time_of(e), average(values(e, measure))) for e in evals if measure in e]
    ends = lambda i: [round(factor * v, digits) for v in (i.mean, i.low, i.high)]
    found = [[update, *ends(mean)] for update, mean in means if mean.n]
    return {"name": name, "plain": not evals[0]["trained"], "points": found}


def of_evaluations(evals: list[dict], env: str) -> list[dict]:
    """Charts of the development tasks: exact answers, mean reward, the parts of the reward."""
    sets = dict.fromkeys(e["tasks"] for e in sorted(evals, key=lambda e: not e["trained"]))
    sets = {tasks: [e for e in evals if e["tasks"] == tasks] for tasks in sets}
    of_all = lambda measure: [curve(found, measure, tasks) for tasks, found in sets.items()]
    n = max((len(e["reward"]) for e in evals), default=0)
    same = all(e.get("exact") == e["reward"] for e in evals)
    title = f"development, exactly right{' (= mean reward)' if same else ''}, n={n}"
    out = chart(title, of_all("exact"), "%", 100)
    if not same:
        out += chart(f"development, mean reward, n={n}", of_all("reward"))
    trained = [found for found in sets.values() if found[0]["trained"]]
    names = (
        PARTS if env == "swarm" else own_parts(dict.fromkeys(sum(map(measures, evals), [])), env)
    )
    parts = [curve(found, name, label(name)) for name in names for found in trained]
    return out + chart("development, the parts of the score", parts)


def points(lines: list[dict], name: str, low: str = "", high: str = "") -> list[list]:
    """A column of metrics.jsonl, and those of its interval."""
    return [[line["update"], *(line.get(key) for key in (name, low, high))] for line in lines]


def stacked(title: str, lines: list[dict], layers: dict[str, list], unit: str, **more) -> list:
    """A chart of layers {name: values} that lie on each other."""
    values = np.nan_to_num(np.array(list(layers.values()), dtype=float))
    series, tops = [], np.cumsum(values, axis=0)
    for i, (name, value, top) in enumerate(zip(layers, values, tops)):
        edges = np.transpose([[line["update"] for line in lines], value, top - value, top])
        series.append({"name": name, "colour": COLOURS.get(name, i), "points": edges.tolist()})
    return chart(title, series, unit, stacked=True, **more)


def rolling(lines: list[dict]) -> dict:
    """A series: the mean reward of the last updates."""
    known = [line for line in lines if "reward" in line]
    recent = [known[max(0, i - ROLLING) : i] for i in range(1, len(known) + 1)]
    means = [float(np.mean([line["reward"] for line in window])) for window in recent]
    found = [[line["update"], mean, None, None] for line, mean in zip(known, means)]
    return {"name": f"mean of the last {ROLLING}", "points": found}


def of_updates(lines: list[dict], env: str) -> list[dict]:
    """Charts of metrics.jsonl: reward, habits or tools, seconds; then small ones, on health."""
    each = points(lines, "reward", "reward_low", "reward_high")
    each = {"name": "each update", "points": each, "plain": True, "colour": GREY}
    moves = [b for a, b in zip(lines, lines[1:]) if a.get("level") != b.get("level")]
    marks = [[line["update"], str(line["level"])] for line in moves]
    out = chart("training reward", [rolling(lines), each], marks=marks)
    habits = dict.fromkeys(key for line in lines for key in line if key.startswith("habit_"))
    habits = {label(key): [100 * line.get(key, 0.0) for line in lines] for key in habits}
    out += stacked("habits of the samples", lines, habits, "%", top=100)
    if env == "swarm":
        title = "tool use of the samples, of the turns"
        out += stacked(title, lines, tools_used(lines), "%", top=100)
    ahead = any("seconds_wait" in line and line["seconds_wait"] for line in lines)
    parts = ("train", "wait") if ahead else SECONDS[:4]  # the trainer's, if somebody else samples
    seconds = {part: [line.get(f"seconds_{part}") for line in lines] for part in parts}
    out += stacked("where the seconds of an update go", lines, seconds, "s")
    for title, (key, unit, top) in SMALL.items():
        out += chart(title, [{"name": key, "points": points(lines, key)}], unit, top, small=True)
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
    return {tool: [100 * s.get(tool, np.nan) for s in shares] for tool in tools}


def draw(path: Path, title: str, charts: list[dict]) -> None:
    """All charts in one picture, three to a row. matplotlib is loaded when something is drawn."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = max(1, min(3, len(charts)))
    rows = max(1, math.ceil(len(charts) / columns))
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(4.8 * columns, 3.4 * rows), layout="constrained")
        fig.suptitle(clean(title))
        for i, chart in enumerate(clean(charts), 1):
            draw_chart(fig.add_subplot(rows, columns, i), chart)
        path.unlink(missing_ok=True)  # a link is somebody's: it is replaced, not followed
        fig.savefig(path, dpi=100)


def draw_chart(ax, chart: dict) -> None:
    stack, unit = chart.get("stacked"), f" ({chart['unit']})" if chart["unit"] else ""
    for i, s in enumerate(chart["series"]):
        x, y, low, high = np.array(s["points"], dtype=float).T
        colour = s.get("colour", i)
        look = {"color": colour if isinstance(colour, str) else f"C{colour}"}
        ax.fill_between(x, low, high, alpha=0.8 if stack else 0.16, lw=0, **look)
        width = 0.9 if stack or s.get("plain") else 2.0
        edge = high if stack else y
        ax.plot(x, edge, lw=width, marker="o", ms=width, clip_on=False, label=s["name"], **look)
    for update, words in chart.get("marks", []):
        ax.axvline(update, color="black", ls="--", lw=1)
        ax.text(update, 0.02, f" {words}", transform=ax.get_xaxis_transform())
    ax.set(title=f"{chart['title']}{unit}", ylim=(chart["low"], chart["high"]))
    if len(chart["series"]) > 1:
        ax.legend(ncols=1 + len(chart["series"]) // 5)
