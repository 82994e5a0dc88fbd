"""How did the behaviour of a swarm run change, and what did its best episode do?

    python -m bookkeeping.report runs/NAME              after SFT against the end
    python -m bookkeeping.report runs/NAME before 40    any two: an update, or before, after_sft,
                                                        final

    evals.jsonl -> averages with paired differences, tails, rows per scenario, tool use over time,
                   the best episode -> sections (bookkeeping/tables.py) -> report.md, report.html

Why paired? Every evaluation plays the same scenarios, and a poor scenario is poor for both. The p
of a difference comes from flipping the signs of the scenarios' differences: if nothing changed,
each is as likely to be above zero as below. A table asks about some twenty measures at once, and
one of them would pass 0.05 by luck; so p is corrected by Holm's method (1979) over the whole table.

The table in picoRL, from which this grew, compared 6 samples with 8, printed no interval, and read
a strategy off the best of the 8. Here the best episode is shown too, together with how far from the
mean it lies, and whether its habits go with reward in all the other episodes.
"""

import numpy as np
from scipy import stats

import metrics
from bookkeeping import compare, records, tables
from bookkeeping.tables import NAMES, PERCENT, cell, measures, moment, section, tool_shares, values
from env_swarm import Turn, brief
from swarm.tools import Refused, read_call

SHOWN = 8  # scenarios with a row of their own: those whose episodes are saved
BY_SCENARIO = (
    "reward", "payoff", "quality", "diversity", "reputation", "turns_used", "used_claim_task",
    "used_submit_work", "used_propose_trade", "used_accept_proposal", "turns_acted", "error_rate",
)  # fmt: skip


def find(evals: list[dict], which: str) -> dict:
    """The evaluation of the trained tasks after an update, or before, after_sft or final."""
    names = {e["stage"]: e for e in evals if e["stage"] != "train"}
    names |= {str(e["update"]): e for e in reversed(evals) if e["stage"] != "before"}
    if which not in names:
        choice = f"choose of {', '.join(names)}"
        raise ValueError(f"there is no evaluation {which} of the trained tasks; {choice}")
    return names[which]


# ------------------------------------------------------------------------------------ what changed


def changes(a: dict, b: dict) -> list[dict]:
    """A row for each measure that is not the same in every scenario.

    The values of both, the paired difference b - a, p, and p corrected by Holm.
    """
    rows = []
    for name in measures(a, b):
        x, y = values(a, name), values(b, name)
        both = ~np.isnan(x + y)
        x, y = x[both], y[both]
        if not np.array_equal(x, y):
            p = compare.permutation_test(y - x)
            rows.append({"name": name, "a": x, "b": y, "gain": metrics.gain(x, y), "p": p})
    corrected = compare.holm([row["p"] for row in rows])
    return [row | {"corrected": p} for row, p in zip(rows, corrected)]


def averages(a: dict, b: dict) -> dict:
    """The table of all measures."""
    rows, table = changes(a, b), []
    for row in rows:
        name, gain = row["name"], row["gain"]
        digits, factor, _ = tables.scale(name)
        difference = gain.text(digits, factor, sign="+") + " points" * (name in PERCENT)
        direction = "up" if gain.mean > 0 else "down"
        clearly = direction if row["corrected"] < 0.05 else "cannot tell"
        p = compare.small(row["corrected"])
        means = [cell(name, row["a"]), cell(name, row["b"])]
        table.append([tables.label(name), *means, difference, p, clearly])
    differ = {row["name"] for row in rows}
    same = [tables.label(name) for name in measures(a, b) if name not in differ]
    text = [
        f"Means over the same {len(b['reward'])} scenarios ({b['tasks']}), greedy, with 95% "
        "intervals; the difference is paired by scenario. p is corrected by Holm's method for the "
        f"{len(rows)} rows; up and down are said where it is below 0.05.",
        f"The same in every scenario, and so left out: {', '.join(same) or 'nothing'}.",
    ]
    head = ["", moment(a), moment(b), "difference", "p corrected", "clearly"]
    return section(f"Behaviour: {moment(a)} → {moment(b)}", text, head, table)


def tails(a: dict, b: dict) -> dict:
    """How the scenarios spread around those means."""
    known = lambda e, name: not np.isnan(values(e, name)).all()
    ends = lambda e, name: np.nanquantile(values(e, name), [0.05, 0.5, 0.95, 1])
    spread = lambda e, name: " · ".join(tables.number(name, x) for x in ends(e, name))
    names = [name for name in measures(a, b) if known(a, name) and known(b, name)]
    rows = [[tables.label(name), spread(a, name), spread(b, name)] for name in names]
    text = ["5% · 50% · 95% · the most, over the scenarios of each evaluation."]
    return section("Tails", text, ["", moment(a), moment(b)], rows, folded=True)


def by_scenario(a: dict, b: dict) -> dict:
    """The first scenarios, a row each."""
    names, n = [name for name in BY_SCENARIO if name in measures(a, b)], len(b["reward"])
    cell = lambda name, i: f"{values(a, name)[i]:.3g} → {values(b, name)[i]:.3g}"
    rows = [[str(i), *(cell(name, i) for name in names)] for i in range(min(SHOWN, n))]
    first = f"the first {len(rows)} of {n} scenarios, one greedy episode each."
    text = [f"{moment(a)} → {moment(b)}, {first}"]
    return section("Scenario by scenario", text, ["scenario", *map(tables.label, names)], rows)


def tool_use(evals: list[dict]) -> dict:
    """What the turns of every evaluation were used for."""
    shares, n = [tool_shares(e) for e in evals], len(evals[0]["reward"])
    text = (
        "Each tool's share of the turns that an episode took, in %, successful calls only; mean "
        f"over the same {n} scenarios with its 95% interval. "
        "pass_turn includes turns without a call; a tool without a column was never used."
    )
    used = [tool for tool in shares[0] if any(s[tool].any() for s in shares)]
    percent = lambda share: metrics.mean(share).text(0, 100)
    rows = [[moment(e), *(percent(s[tool]) for tool in used)] for e, s in zip(evals, shares)]
    return section("Tool use, over time", [text], ["", *used], rows)


# ------------------------------------------------------------------------------- the best episode


def best_episode(a: dict, b: dict, episodes: list[dict]) -> list[dict]:
    """The episode of b with the highest reward: its numbers, and its calls.

    What it did differently stands some deviations from the mean; whether that pays in general, the
    rank correlation (Spearman's) says.
    """
    reward, rows = values(b, "reward"), []
    best, n = int(np.nanargmax(reward)), len(reward)
    for name in (name for name in measures(b) if name in NAMES and np.nanstd(values(b, name))):
        v = values(b, name)
        pays = stats.spearmanr(v, reward, nan_policy="omit")
        distance = f"{(v[best] - np.nanmean(v)) / np.nanstd(v, ddof=1):+.1f}"
        told = f"{pays.statistic:+.2f} (p {compare.small(pays.pvalue)})"
        rows.append([NAMES[name], tables.number(name, v[best]), cell(name, v), distance, told])
    text = [
        f"Scenario {best} earned {reward[best]:.3f}, the most of {n}, {moment(b)}; "
        f"the same scenario {moment(a)}: {a['reward'][best]:.3f}. "
        f"Above the mean by {reward[best] - np.nanmean(reward):.3f}. "
        "The most of many is luck as well, of the scenario above all: an idea to test, not a "
        "result.",
    ]
    distance = "standard deviations from it"
    head = ["", "this episode", f"mean of the {n}", distance, "rank correlation with reward"]
    found = section("The best episode", text, head, rows)
    for i, e in enumerate(episodes):
        saved = (e.get("source"), e["update"], e["stage"]) == ("eval", b["update"], b["stage"])
        # evals.jsonl is rounded
        if saved and e["reward"] is not None and abs(e["reward"] - reward[best]) < 1e-4:
            calls = [[str(step), *call] for step, call in enumerate(calls_of(e["messages"]), 1)]
            title, head = f"Its {len(calls)} calls", ["step", "call", "result"]
            return [found | {"episode": i}, section(title, [], head, calls, said=(1, 2))]
    text.append("Its conversation is not among the saved episodes.")
    return [found]


def calls_of(messages: list[dict]) -> list[tuple[str, str]]:
    """(the call in short, what came of it) for every reply of a conversation."""
    out = []
    for m, after in zip(messages, [*messages[1:], {"content": "(the end)"}]):
        if m["role"] != "assistant":
            continue
        try:
            tool, arguments, calls = read_call(m["content"], "0.2")
        except Refused:
            tool, arguments, calls = "(a call that cannot be read)", {}, 1
        answer = after["content"].split("\n")[0]
        call = brief(Turn(0, tool, arguments, True, "", calls))
        out.append((call, answer.removeprefix("# ").removeprefix("result: ")))
    return out


# ------------------------------------------------------------------------------------- all of it


def wasted(e: dict) -> dict:
    """One more measure: the tasks that were claimed and never submitted."""
    names = ("used_claim_task", "used_submit_work")
    if not all(name in e for name in names):
        return {}
    return {"waste": (values(e, names[0]) - values(e, names[1])).tolist()}


def sections(
    evals: list[dict], episodes: list[dict], which: tuple[str, str] | None = None
) -> list[dict]:
    """Everything above for two evaluations; by default after SFT (or the first) and the last.

    Empty while there is only one.
    """
    during = [e for e in evals if e["trained"] and e["stage"] != "eval_only"]
    # Cut to the scenarios with a result in all of them; these are counted from 0.
    mine = [e | wasted(e) for e in records.same_tasks(*during)]
    if len(mine) < 2:
        return []
    a, b = next((e for e in mine[:-1] if e["stage"] == "after_sft"), mine[0]), mine[-1]
    if which:
        a, b = (find(mine, name) for name in which)
    if a is b:
        raise ValueError(f"{which[0]} and {which[1]} are the same evaluation; choose two")
    best = best_episode(a, b, episodes)
    return [averages(a, b), tails(a, b), by_scenario(a, b), tool_use(mine), *best]
