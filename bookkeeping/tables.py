"""Tables of what evaluations measured, for report.md and report.html alike.

    a line of evals.jsonl {"reward": [n], "format": [n], …} -> averages with intervals -> cells
    section(title, sentences, head, rows) -> markdown here, HTML in bookkeeping/viewer.py

They serve every environment. What only the swarm has is in bookkeeping/behaviour.py.
"""

import numpy as np

import metrics
from bookkeeping.records import quote

# Names in the order of the tables. A measure that is not listed comes last, under its own name.
NAMES = {
    "reward": "reward", "payoff": "payoff", "quality": "interaction quality",
    "diversity": "action diversity", "reputation": "reputation, of 1", "turns_used": "turns used",
    "turns_acted": "turns in which something was done",
    "used_claim_task": "tasks claimed", "used_submit_work": "tasks submitted",
    "used_propose_trade": "trades proposed", "used_accept_proposal": "trades accepted",
    "used_reject_proposal": "trades rejected", "used_cancel_proposal": "proposals cancelled",
    "used_post": "posts", "used_reply": "replies", "used_vote": "votes",
    "used_pass_turn": "turns passed", "error_rate": "errors, of the turns",
    "truncated": "cut short", "survival": "not frozen at the end", "gain": "resources gained",
}  # fmt: skip
PARTS = ("payoff", "reputation", "quality", "diversity")  # of the swarm's reward
PERCENT = ("error_rate", "format", "truncated", "survival", "exact")
TWO_DIGITS = ("turns_used", "turns_acted", "extra_calls", "self_proposal_errors")
OVER_TIME = (
    "exact", "reward", "payoff", "quality", "diversity", "reputation", "turns_used",
    "turns_acted", "error_rate", "truncated",
)  # fmt: skip
# Entries of letters' and alphabet's scores: the report has places for them, or leaves them out.
OURS = ("reward", "exact", "format", "fraction", "similarity", "reply_tokens", "truncated")


def own_parts(names, env: str) -> list[str]:
    """Of the entries of a score, those that somebody has added: a bonus, say, in a fork.

    Swarm's tables have a row for every entry already (behaviour.sections).
    """
    if env == "swarm":
        return []
    return [name for name in names if name not in OURS and not name.startswith(("habit_", "turn_"))]


def own_parts_of(summary: dict, evals: list[dict]) -> list[str]:
    """The entries of the score that somebody has added, of the tasks that are trained."""
    found = [measures(e) for e in evals if e["tasks"] == summary["trained"]]
    names = dict.fromkeys(name for some in found for name in some)
    return own_parts(names, summary["env"])


def eval_of(evals: list[dict], stage: str, tasks: str) -> dict | None:
    return next((e for e in evals if e["stage"] == stage and e["tasks"] == tasks), None)


def shown(summary: dict) -> tuple[bool, bool]:
    """(exact, reward): what is there to show? If the reward is the exactness, one is enough."""
    results = [result for stages in summary["eval"].values() for result in stages.values()]
    exact = "gain" in summary
    return exact, not exact or any(result["reward"] != result["exact"] for result in results)


def values(e: dict, name: str) -> np.ndarray:
    """[n] floats; NaN for an episode that has none."""
    return np.array([np.nan if v is None else v for v in e[name]], dtype=float)


def measures(*evals: dict) -> list[str]:
    """The measures that all of these evaluations have, in the tables' order."""
    lists = [name for name, value in evals[0].items() if isinstance(value, list)]
    order = list(NAMES)
    place = lambda name: order.index(name) if name in NAMES else len(order)
    return sorted((name for name in lists if all(name in e for e in evals)), key=place)


def average(v: np.ndarray) -> metrics.Interval:
    """The mean of those that have a value."""
    return metrics.mean(v[~np.isnan(v)])


def label(name: str) -> str:
    return NAMES.get(name, name.replace("_", " "))


def scale(name: str) -> tuple[int, float, str]:
    """(digits, factor, unit) of a measure."""
    if name in PERCENT:
        return 1, 100, "%"
    if name in ("gain", "reply_tokens"):
        return 1, 1, ""
    return (2 if name.startswith("used_") or name in TWO_DIGITS else 3), 1, ""


def interval(name: str, i: metrics.Interval) -> str:
    return i.text(*scale(name))


def cell(e: dict, name: str) -> str:
    """The average of a measure over an evaluation, or "" if that has no such measure."""
    return interval(name, average(values(e, name))) if name in e else ""


def section(title: str, text: list[str], head: tuple = (), rows: tuple = (), **more) -> dict:
    """more: said, the columns that hold a model's words; episode, where one can be looked at."""
    return {"title": title, "text": text, "head": list(head), "rows": list(rows), **more}


def grid(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table, line by line."""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return [line(head), "|---" * len(head) + "|", *map(line, rows)]


def markdown(sections: list[dict]) -> str:
    """What a model said stands in backticks, where neither HTML nor a link is read."""
    out = []
    for s in sections:
        said = s.get("said", ())
        safe = lambda row, said=said: [
            (quote(text) if i in said else text).replace("|", "\\|") for i, text in enumerate(row)
        ]
        out += [f"## {s['title']}", "", *(line for text in s["text"] for line in (text, ""))]
        if s["rows"]:
            out += [*grid(s["head"], map(safe, s["rows"])), ""]
    return "\n".join(out)


def eval_only(evals: list[dict]) -> list[dict]:
    """What `train.py --eval-only` added: one section, or none."""
    later = [e for e in evals if e["stage"] == "eval_only"]
    if not later:
        return []
    names = [name for name in OVER_TIME if any(name in e for e in later)]
    rows = []
    for e in later:
        tasks = f"{e['tasks']} (trained)" if e["trained"] else e["tasks"]
        n = str(len(e["reward"]))
        rows.append([tasks, str(e["update"]), n, *(cell(e, name) for name in names)])
    text = "Added by train.py --eval-only, with the checkpoint of that update"
    head = ["tasks", "update", "n", *map(label, names)]
    return [section("Evaluated later", [f"{text}; means with 95% intervals."], head, rows)]


def pyplot():
    """matplotlib.pyplot, loaded when something is drawn, for files and not for a screen."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rc("text", parse_math=False)  # a name may contain a $
    import matplotlib.pyplot as plt

    return plt
