"""How did the behaviour of a swarm run change, and what was called in its episodes?

    python -m bookkeeping.report runs/NAME              step 0, after SFT, against the end

    evals.jsonl -> averages with paired differences and tails -> a section (bookkeeping/tables.py)

Why paired? Every evaluation plays the same scenarios, and a poor scenario is poor for both. The
p-value of a difference comes from flipping the signs of the scenarios' differences: if nothing
changed, each is as likely to be above zero as below. A table tests some twenty measures at once,
and one of them would pass 0.05 by luck, so p is corrected by Holm's method (1979) over the whole
table.

The table in picoRL, from which this grew, compared 6 samples with 8, printed no interval, and read
a strategy off the best of the 8. But the best of many is luck as well.
"""

import numpy as np

import metrics
from bookkeeping import compare, records, tables
from bookkeeping.tables import (
    cell,
    label,
    measures,
    moment,
    number,
    paired,
    section,
)
from env_swarm import Turn, brief
from swarm.tools import Refused, read_call


def sections(evals: list[dict]) -> list[dict]:
    """The table of two evaluations: after SFT, or else the first, and the last.

    Empty while there is only one.
    """
    during = [e for e in evals if e["trained"] and e["stage"] != "eval_only"]
    if len(during) < 2:
        return []
    first = next((e for e in during[:-1] if e["stage"] == "after_sft"), during[0])
    return [averages(*records.same_tasks(first, during[-1]))]


# ------------------------------------------------------------------------------------ what changed


def averages(a: dict, b: dict) -> dict:
    """The table of all measures that differ in some scenario: the difference is b - a."""
    pairs = {name: paired(a, b, name) for name in measures(a, b)}
    changed = {name: (x, y) for name, (x, y) in pairs.items() if not np.array_equal(x, y)}
    corrected = compare.holm([compare.permutation_test(y - x) for x, y in changed.values()])
    table = []
    for (name, (x, y)), p in zip(changed.items(), corrected):
        gain = metrics.gain(x, y)
        digits, factor, unit = tables.scale(name)
        direction = "up" if gain.mean > 0 else "down"
        table.append(
            [
                label(name),
                cell(name, x),
                cell(name, y),
                gain.text(digits, factor, sign="+") + " points" * (unit == "%"),
                compare.small(p),
                direction if p < 0.05 else "cannot tell",
                tails(name, x),
                tails(name, y),
            ]
        )
    same = [label(name) for name in pairs if name not in changed]
    text = [
        f"Means over the same {len(b['reward'])} scenarios ({b['tasks']}), greedy, with 95% "
        "intervals; the difference is paired by scenario. p is corrected by Holm's method for the "
        f"{len(table)} rows; up and down are said where it is below 0.05. Tails: 5% · 50% · 95% · "
        "the most, over the scenarios.",
        f"The same in every scenario, and so left out: {', '.join(same) or 'nothing'}.",
    ]
    head = [
        "",
        moment(a),
        moment(b),
        "difference",
        "p corrected",
        "clearly",
        f"tails, {moment(a)}",
        f"tails, {moment(b)}",
    ]
    return section(f"Behaviour: {moment(a)} → {moment(b)}", text, head, table)


def tails(name: str, v: np.ndarray) -> str:
    return " · ".join(number(name, x) for x in np.quantile(v, [0.05, 0.5, 0.95, 1]))


# ------------------------------------------------------------------------------- what was called


def calls_of(messages: list[dict]) -> list[tuple[str, str]]:
    """(the call in short, its result) for every reply of a conversation."""
    out = []
    for m, after in zip(messages, [*messages[1:], {"content": "(the end)"}]):
        if m["role"] != "assistant":
            continue
        try:
            tool, arguments, calls = read_call(m["content"], "0.2")
        except Refused:
            tool, arguments, calls = "(a call that cannot be read)", {}, 1
        answer = after["content"].split("\n")[0].removeprefix("# ").removeprefix("result: ")
        out.append((brief(Turn(0, tool, arguments, True, "", calls)), answer))
    return out
