"""How did the behaviour of a swarm run change, and what did its best episode do?

    python -m bookkeeping.report runs/NAME              step 0, after SFT, against the end

    evals.jsonl -> averages with paired differences and tails, rows per scenario, the best
                   episode -> sections (bookkeeping/tables.py)

Why paired? Every evaluation plays the same scenarios, and a poor scenario is poor for both. The
p-value of a difference comes from flipping the signs of the scenarios' differences: if nothing
changed, each is as likely to be above zero as below. A table tests some twenty measures at once,
and one of them would pass 0.05 by luck, so p is corrected by Holm's method (1979) over the whole
table.

The table in picoRL, from which this grew, compared 6 samples with 8, printed no interval, and read
a strategy off the best of the 8. Here the best episode is shown too, together with its distance
from the mean, and with whether its habits go with reward over all episodes.
"""

import numpy as np
from scipy import stats

import metrics
from bookkeeping import compare, records, tables
from bookkeeping.tables import (
    NAMES,
    cell,
    label,
    measures,
    moment,
    number,
    paired,
    section,
    values,
)
from env_swarm import Turn, brief
from swarm.tools import Refused, read_call

SHOWN = 8  # scenarios that get a row each: those whose episodes are saved
BY_SCENARIO = (
    "reward",
    "payoff",
    "quality",
    "diversity",
    "reputation",
    "turns_used",
    "used_claim_task",
    "used_submit_work",
    "used_propose_trade",
    "used_accept_proposal",
    "waste",
    "turns_acted",
    "error_rate",
)


def sections(evals: list[dict], episodes: list[dict]) -> list[dict]:
    """The tables of two evaluations: after SFT, or else the first, and the last.

    Empty while there is only one.
    """
    during = [e for e in evals if e["trained"] and e["stage"] != "eval_only"]
    if len(during) < 2:
        return []
    first = next((e for e in during[:-1] if e["stage"] == "after_sft"), during[0])
    # Cut to the scenarios with a result in both; these are counted from 0.
    a, b = records.same_tasks(first, during[-1])
    return [averages(a, b), by_scenario(a, b), best_episode(a, b, episodes)]


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


def by_scenario(a: dict, b: dict) -> dict:
    """The first scenarios, one row each."""
    names, n = [name for name in BY_SCENARIO if name in measures(a, b)], len(b["reward"])
    cell = lambda name, i: f"{values(a, name)[i]:.3g} → {values(b, name)[i]:.3g}"
    rows = [[str(i), *(cell(name, i) for name in names)] for i in range(min(SHOWN, n))]
    text = [
        f"{moment(a)} → {moment(b)}, the first {len(rows)} of {n} scenarios, one greedy episode "
        "each."
    ]
    return section("Scenario by scenario", text, ["scenario", *map(label, names)], rows)


# ------------------------------------------------------------------------------- the best episode


def best_episode(a: dict, b: dict, episodes: list[dict]) -> dict:
    """The episode of b with the highest reward.

    Each of its measures is given in standard deviations from the mean; the rank correlation
    (Spearman's) says whether a high value pays in general.
    """
    reward = values(b, "reward")
    best, n = int(reward.argmax()), len(reward)
    rows = []
    for name in (name for name in measures(b) if name in NAMES and np.nanstd(values(b, name))):
        v = values(b, name)
        pays = stats.spearmanr(v, reward, nan_policy="omit")
        rows.append(
            [
                NAMES[name],
                number(name, v[best]),
                cell(name, v),
                f"{(v[best] - np.nanmean(v)) / np.nanstd(v, ddof=1):+.1f}",
                f"{pays.statistic:+.2f} (p {compare.small(pays.pvalue)})",
            ]
        )
    text = [
        f"Scenario {best} earned {reward[best]:.3f}, the most of {n}, {moment(b)}; "
        f"the same scenario {moment(a)}: {a['reward'][best]:.3f}. "
        f"Above the mean by {reward[best] - reward.mean():.3f}. "
        "The most of many is luck as well, of the scenario above all: an idea to test, not a "
        "result. report.html has its calls.",
    ]
    head = [
        "",
        "this episode",
        f"mean of the {n}",
        "standard deviations from it",
        "rank correlation with reward",
    ]
    at = ("eval", b["update"], b["stage"])
    saved = [
        i
        for i, e in enumerate(episodes)
        if (e["source"], e["update"], e["stage"]) == at
        and abs((e["reward"] or 0) - reward[best]) < 1e-4  # evals.jsonl is rounded
    ]
    return section("The best episode", text, head, rows, episode=next(iter(saved), None))


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
        out.append((brief(Turn(tool, arguments, True, "", calls)), answer))
    return out
