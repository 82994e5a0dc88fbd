"""Tables of what evaluations measured, for report.md and report.html alike.

    a line of evals.jsonl {"reward": [n], "format": [n], …} -> averages with intervals -> cells
    section(title, sentences, head, rows) -> Markdown here, HTML on the page

`python -m bookkeeping.report runs/NAME` writes them. They serve every environment. What only the
swarm has is in bookkeeping/behaviour.py.
"""

from dataclasses import replace

import numpy as np

import metrics
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


def within(i: metrics.Interval, values, is_share: bool) -> metrics.Interval:
    """A share lies between 0 and 1, and so does its interval: Student's does not know that."""
    if not is_share or min(values) < 0 or max(values) > 1:
        return i
    return replace(i, low=max(0.0, i.low), high=min(1.0, i.high))


def level(rewards: list[float], is_share: bool) -> str:
    """The mean of consecutive updates, with the interval of its level."""
    return within(metrics.level(rewards), rewards, is_share).text(2)


def training_reward(rewards: list[float], before: int, exact: bool, at: str = "") -> str:
    """Its distribution, its present level, and whether it has settled.

    before: updates before a curriculum's last level. exact: is there such a thing as an exact
    answer, so that rewards between 0 and 1 are shares?
    """
    recent = rewards[before:]
    all_of_it, end = metrics.distribution(rewards), metrics.trend(recent)
    all_of_it = replace(all_of_it, mean=within(all_of_it.mean, rewards, exact))
    end = replace(end, level=within(end.level, recent, exact))
    window = metrics.adaptive_window(recent)
    return (
        f"Update by update: {all_of_it.sentence()}. Now{at}: {level(recent[-window:], exact)}, the "
        f"mean of the last {window} updates, as many as describe the present. "
        f"Has it settled{at}? {end.sentence(before).capitalize()}."
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


def interval(name: str, i: metrics.Interval) -> str:
    return i.text(*scale(name))


def cell(name: str, v: np.ndarray) -> str:
    """The average of a measure.

    A count that never varies has no spread to tell an interval from.
    """
    known = v[~np.isnan(v)]
    if len(known) and known.min() > 1 and metrics.is_constant(known):
        return f"{known[0]:g}, always"
    return interval(name, average(known))


def section(title: str, text: list[str], head: tuple = (), rows: tuple = (), **more) -> dict:
    """more: said, the columns that hold a model's words; folded, on the page; listed, the sentences
    are a list; episode, the number of one that can be looked at."""
    return {"title": title, "text": text, "head": list(head), "rows": list(rows), **more}


def markdown(sections: list[dict]) -> str:
    """What a model said stands in backticks, where neither HTML nor a link is read."""
    out = []
    for s in sections:
        out += [f"## {clean(s['title'])}", ""]
        for text in clean(s["text"]):
            out += [f"* {text}"] if s.get("listed") else [text, ""]
        if s["rows"]:
            out += [f"| {' | '.join(clean(s['head']))} |", "|---" * len(s["head"]) + "|"]
        for row in s["rows"]:
            cells = clean(row)
            for i in s.get("said", ()):
                cells[i] = quote(row[i]).replace("|", "\\|")
            out.append(f"| {' | '.join(cells)} |")
        out.append("")
    return "\n".join(out)


def evaluations(title: str, evals: list[dict], env: str) -> list[dict]:
    """One section: a row per evaluation and task set, a column per measure. None without any."""
    if not evals:
        return []
    found = dict.fromkeys(name for e in evals for name in measures(e))
    names = [name for name in (*OVER_TIME, *own_parts(found, env)) if name in found]
    if all(e.get("exact") == e["reward"] for e in evals):
        names.remove("reward")
    about = lambda e: [moment(e), called(e), str(len(e["reward"]))]
    shown = lambda e, name: cell(name, values(e, name)) if name in e else ""
    rows = [about(e) + [shown(e, name) for name in names] for e in evals]
    text = ["Greedy, the same development tasks every time; means with 95% intervals."]
    return [section(title, text, ["", "tasks", "n", *map(label, names)], rows, folded=True)]
