"""Cells, tables and charts for the report, the behaviour tables and the comparison.

    a line of evals.jsonl {"reward": [n], "format": [n], …} -> averages with intervals -> cells
    section: title, sentences, head, rows -> Markdown here, a table on the page
    chart: {"title", "unit", "low", "high", "series": [{"name", "points": [[update, value, low end,
        high end], …]}], "marks": [[update, words]]} -> drawn by draw here, by the page itself there

A series may be "plain" (drawn thin) and have a "colour" (on light paper, on dark). In a "stacked"
chart a point's ends are the edges of its layer. A value that was not measured is None, because JSON
has no NaN. An evaluation before SFT stands at -1 on the axis of updates.

`python -m bookkeeping.report runs/NAME` writes them. They serve every environment.
"""

import math
from pathlib import Path

import numpy as np

import metrics
from bookkeeping.records import clean

QUANTILES = (0.05, 0.5, 0.95)
# Columns of swarm's whole economy: over the episodes of a batch, a mean can hide a tail.
SPREAD = {
    name: [f"{name}_{100 * share:g}" for share in QUANTILES]
    for name in ("welfare", "toxicity", "quality_gap")
}
# Names in the order of the tables. A measure that is not listed comes last, under its own name.
NAMES = {
    "reward": "reward",
    "payoff": "payoff",
    "quality": "interaction quality",
    "diversity": "action diversity",
    "reputation": "reputation, of 1",
    "turns_used": "turns used",  # with a call
    "turns_acted": "turns in which something was done",
    "used_claim_task": "tasks claimed",
    "used_submit_work": "tasks submitted",
    "waste": "claims never submitted, of all",
    "used_propose_trade": "trades proposed",
    "used_accept_proposal": "trades accepted",
    "used_reject_proposal": "trades rejected",
    "used_cancel_proposal": "proposals cancelled",
    "used_post": "posts",
    "used_reply": "replies",
    "used_vote": "votes",
    "used_pass_turn": "turns passed",
    "error_rate": "errors, of the turns",
    "any_error": "episodes with an error",  # the unit of the published error rate
    "truncated": "cut short",
    "survival": "not frozen at the end",
    "gain": "resources gained",
    "welfare": "welfare of all, soft",
    "welfare_hard": "welfare of all, hard",
    "toxicity": "toxicity, soft",
    "toxicity_hard": "toxicity, hard",
    "tail": "toxicity of the worst 5%, soft",
    "tail_hard": "toxicity of the worst 5%, hard",
    "quality_gap": "quality gap, soft",
    "quality_gap_hard": "quality gap, hard",
    **{
        column: f"{name.replace('_', ' ')}, soft: {share:.0%} quantile"
        for name, columns in SPREAD.items()
        for column, share in zip(columns, QUANTILES)
    },
    # if the economy reads p through a proxy, or settles by a threshold on it
    "quality_true": "interaction quality, in truth",
    "welfare_true": "welfare of all, in truth",
    "toxicity_true": "toxicity, in truth",
    "tail_true": "toxicity of the worst 5%, in truth",
    "quality_gap_true": "quality gap, in truth",
    "proxy_error": "error of p as settled",
    "proxy_variance": "variance of a reading of p",
    "proxy_flagged": "episodes with p too noisy",
    "deviation": "deviation within groups",
    "found": "the right answer anywhere in the reply",
    "off_policy_steps": "off-policy level (age of the samples, in updates)",
    "batches_waiting": "batches waiting to be trained on",
    "batches_dropped": "batches too old, and dropped",
    # habits, in the words of pico.py and docs/live: of letters, then of alphabet
    "habit_derives": "spells it out",
    "habit_states": "states the counts",
    "habit_bare": "answers at once",
    "habit_keys": "sorts by keys",
    "habit_string": "sorts as plain strings",
    "habit_given": "keeps the given order",
    "habit_other": "none of these",
}
# A habit's colour on light and on dark paper, as on docs/live; the first one lies at the bottom.
BLUE, ORANGE, GREY = ("#8cc3ec", "#1f5f98"), ("#f4c48d", "#85501c"), ("#d8d5cf", "#474c53")
HABITS = {
    "habit_derives": BLUE,
    "habit_states": ORANGE,
    "habit_bare": GREY,
    "habit_keys": BLUE,
    "habit_string": ORANGE,
    "habit_given": GREY,
    "habit_other": ("#efedea", "#2b2f35"),
}
PERCENT = """error_rate any_error waste format truncated survival exact found
proxy_flagged""".split()
DIGITS = {
    "gain": 1,
    "reply_tokens": 1,
    "off_policy_steps": 1,
    "batches_dropped": 1,
    "welfare": 1,
    "welfare_hard": 1,
    "welfare_true": 1,
    "turns_used": 2,
    "turns_acted": 2,
    "extra_calls": 2,
    "self_proposal_errors": 2,
}
# Entries of our environments' scores that have a place in the report, or are left out of it.
OURS = (
    *NAMES,
    "exact",
    "format",
    "fraction",
    "similarity",
    "reply_tokens",
    "floor_missing",
    "self_proposal_errors",
    "extra_calls",
)
MOMENTS = {
    "before": "before SFT",
    "after_sft": "after SFT",
    "final": "update {} (final)",
    "eval_only": "update {} (evaluated later)",
}
ROLLING = 5  # updates, as in picoRL's report
STYLE = {  # of curves.png; the page's colours
    "font.size": 9,
    "figure.titlesize": 12,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9a968f",
    "axes.prop_cycle": "cycler('color', "
    "['#0b62a8', '#c05a00', '#00785a', '#a3478a', '#6b6b6b', '#8a6d00'])",
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "text.parse_math": False,  # a name may contain a $
}


def own_parts(names) -> list[str]:
    """Those entries of a score that a fork has added: a bonus, say."""
    return [name for name in names if name not in OURS and not name.startswith(("habit_", "turn_"))]


def moment(e: dict) -> str:
    """What an evaluation is called."""
    return MOMENTS.get(e["stage"], "update {}").format(e["update"])


def called(e: dict) -> str:
    """The name of an evaluation's tasks."""
    return f"{e['tasks']} (trained)" if e["trained"] else e["tasks"]


def values(e: dict, name: str) -> np.ndarray:
    """A measure as [n] floats; NaN for an episode without it."""
    return np.array(e.get(name, []), dtype=float)


def paired(a: dict, b: dict, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A measure in two evaluations of the same tasks, [n] each, of those that have it in both."""
    x, y = values(a, name), values(b, name)
    known = ~np.isnan(x + y)
    return x[known], y[known]


def measures(*evals: dict) -> list[str]:
    """The measures that all of these evaluations have, in the tables' order."""
    return [
        name
        for name in dict.fromkeys([*NAMES, *evals[0]])
        if all(isinstance(e.get(name), list) for e in evals)
    ]


def average(v: np.ndarray) -> metrics.Interval:
    """The mean over episodes that have a value."""
    return metrics.mean(v[~np.isnan(v)])


def label(name: str) -> str:
    return NAMES.get(name, name.replace("_", " "))


def scale(name: str) -> tuple[int, float, str]:
    """(digits, factor, unit) of a measure."""
    if name in PERCENT:
        return 1, 100, "%"
    return DIGITS.get(name, 2 if name.startswith("used_") else 3), 1, ""


def number(name: str, x: float) -> str:
    digits, factor, unit = scale(name)
    return f"{factor * x:.{digits}f}{unit}"


def cell(name: str, v: np.ndarray) -> str:
    """A measure's average. A count that never varies has no spread, and so no interval."""
    if len(v) and v.min() > 1 and metrics.is_constant(v):
        return f"{v[0]:g}, always"
    return average(v).text(*scale(name)) if len(v) else ""


def section(title: str, text: list[str], head: tuple = (), rows: tuple = (), **more) -> dict:
    """more: folded, on the page; listed: the sentences are a list; episode: the number of one that
    can be looked at."""
    return {"title": title, "text": text, "head": list(head), "rows": list(rows), **more}


def markdown(sections: list[dict]) -> str:
    out = []
    for s in clean(sections):
        table = [s["head"], ["---"] * len(s["head"]), *s["rows"]] if s["rows"] else []
        texts = [f"* {text}" if s.get("listed") else f"{text}\n" for text in s["text"]]
        out += [f"## {s['title']}", "", *texts, *(f"| {' | '.join(row)} |" for row in table), ""]
    return "\n".join(out)


def mean_of(lines: list[dict], key: str) -> float:
    """The mean over updates that have the number: one without a signal has no entropy, say."""
    values = [line[key] for line in lines if key in line]
    return float(np.mean(values)) if values else float("nan")


def chart(title: str, series: list[dict], unit="", marks=(), x="update", stacked=False) -> dict:
    values = [v for s in series for point in s["points"] for v in point[1:] if v is not None]
    return {
        "title": title,
        "series": series,
        "marks": list(marks),
        "unit": unit,
        "x": x,
        "stacked": stacked,
        "low": min([0.0, *values]),
        "high": 100 if unit == "%" else 1.05 * max([0.0, *values]) or 1.0,
    }


def rolling(lines: list[dict]) -> dict:
    """A series: the mean reward of the last updates."""
    return {
        "name": f"mean of the last {ROLLING}",
        "points": [
            [line["update"], mean_of(lines[max(0, n - ROLLING) : n], "reward"), None, None]
            for n, line in enumerate(lines, 1)
        ],
    }


def layers(lines: list[dict]) -> list[dict]:
    """A series per habit that these lines of metrics.jsonl have: its share, stacked, in percent."""
    names = [name for name in HABITS if any(line.get(name) for line in lines)]
    shares = [[100 * line.get(name, 0.0) for line in lines] for name in names]
    shares = np.array(shares).reshape(len(names), len(lines))
    tops = shares.cumsum(axis=0)
    updates = np.broadcast_to([line["update"] for line in lines], shares.shape)
    points = np.stack([updates, shares, tops - shares, tops], axis=-1)  # [habits, updates, 4]
    return [
        {"name": label(name), "colour": HABITS[name], "points": layer}
        for name, layer in zip(names, points.round(2).tolist())
    ]


def draw(path: Path, title: str, charts: list[dict]) -> None:
    """All charts in one picture, three to a row. matplotlib is loaded only here."""
    import matplotlib.figure

    rows, columns = math.ceil(max(1, len(charts)) / 3), max(1, min(3, len(charts)))
    with matplotlib.rc_context(STYLE):
        fig = matplotlib.figure.Figure(figsize=(4.8 * columns, 3.6 * rows), layout="constrained")
        fig.suptitle(clean(title))
        for i, chart in enumerate(clean(charts), 1):
            draw_chart(fig.add_subplot(rows, columns, i), chart)
        path.unlink(missing_ok=True)  # a link is replaced, not followed
        fig.savefig(path, dpi=100)


def draw_chart(ax, chart: dict) -> None:
    for i, s in enumerate(chart["series"]):
        x, y, low, high = np.array(s["points"], dtype=float).reshape(-1, 4).T
        width, colour = (0.8 if s.get("plain") else 1.7), s.get("colour", [f"C{i}"])[0]
        alpha, name = (1, s["name"]) if chart["stacked"] else (0.16, None)
        ax.fill_between(x, low, high, alpha=alpha, lw=0, color=colour, label=name)
        if not chart["stacked"]:  # its layers are all there is to see
            ax.plot(
                x,
                y,
                "o-" if len(x) <= 30 else "-",
                color=colour,
                lw=width,
                ms=2 * width,
                label=s["name"],
            )
    for update, words in chart["marks"]:
        ax.axvline(update, color="black", ls="--", lw=1)
        ax.text(update, 0.02, f" {words}", transform=ax.get_xaxis_transform())
    ax.set(
        title=chart["title"],
        xlabel=chart["x"],
        ylabel=chart["unit"],
        ylim=(chart["low"], chart["high"]),
    )
    # Below the axis, where it hides nothing; long names stand one per line.
    longest = max(len(s["name"]) for s in chart["series"])
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1 + 40 // longest)
