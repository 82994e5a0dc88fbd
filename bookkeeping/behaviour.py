"""How did the behaviour of a swarm run change, and what did its best episode do?

    python -m bookkeeping.behaviour runs/NAME              after SFT against the end
    python -m bookkeeping.behaviour runs/NAME before 40    any two: an update, or before, after_sft,
                                                           final
    python -m bookkeeping.behaviour                        a made-up run: scripted players in place
                                                           of checkpoints

    evals.jsonl -> averages with paired differences, rows per scenario, tool use over time, the best
                   episode -> sections (bookkeeping/tables.py) -> report.md and report.html

Why paired? Every evaluation plays the same scenarios, and a poor scenario is poor for
both. The p of a difference comes from flipping the signs of the scenarios' differences: if nothing
changed, each is as likely to be above zero as below. A table asks about some twenty measures at
once, and one of them would pass 0.05 by luck; so p is corrected by Holm's method (1979) over the
whole table.

The table in picoRL, from which this grew, compared 6 samples with 8, printed no interval, and read
a strategy off the best of the 8. Here the best episode is shown too, together with how far from the
mean it lies, and whether its habits go with reward in all the other episodes.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from scipy import stats

import metrics
from bookkeeping import records, significance, tables
from bookkeeping.tables import NAMES, PERCENT, average, interval, measures, scale, section, values
from env_swarm import DEV_SEEDS, WEIGHTS, Swarm, Turn, brief
from swarm.tools import Refused, read_call

COLOURS = {  # work is blue, trade orange, talk green, errors red, passing grey
    "claim_task": "#9cc5e8", "submit_work": "#2b74b3", "propose_trade": "#f7cf7a",
    "accept_proposal": "#e5861a", "reject_proposal": "#9a5418", "cancel_proposal": "#fbe6bd",
    "post": "#a5d79f", "reply": "#55ab5a", "vote": "#1f6d3a", "errors": "#c4203f",
    "pass_turn": "#bfbfbf",
}  # fmt: skip
SHOWN = 8  # scenarios with a row of their own: those whose episodes are saved


def trained(evals: list[dict]) -> list[dict]:
    """The evaluations of the trained tasks during the run, in order."""
    return [e for e in evals if e.get("trained") and e["stage"] != "eval_only"]


def find(evals: list[dict], which: str) -> dict:
    """The evaluation of the trained tasks after an update, or before, after_sft or final.

    Update -1 is before SFT, and 0 after it.
    """
    for e in trained(evals):
        if which == str(e["update"]) or (which == e["stage"] and which != "train"):
            return e
    names = [str(e["update"]) if e["stage"] == "train" else e["stage"] for e in trained(evals)]
    known = ", ".join(dict.fromkeys(names)) or "none: the run has not got that far"
    raise ValueError(f"there is no evaluation {which} of the trained tasks; choose two of {known}")


def moment(e: dict) -> str:
    """What an evaluation is called."""
    final = f"update {e['update']} (final)"
    named = {"before": "before SFT", "after_sft": "after SFT", "final": final}
    return named.get(e["stage"], f"update {e['update']}")


def tool_shares(line: dict) -> dict:
    """{tool: share of the turns}, errors and passing last.

    Of an evaluation ([n] each) or of a line of metrics.jsonl (numbers).
    """
    used = {}
    for name, count in line.items():
        if name.startswith("used_"):
            used[name.removeprefix("used_")] = np.array(count, dtype=float)
    errors, total = np.array(line.get("error_rate", 0.0), dtype=float), sum(used.values())
    calls = np.where(total > 0, total, 1)
    shares = {tool: (1 - errors) * count / calls for tool, count in used.items()}
    shares["errors"] = errors
    order = list(COLOURS)
    place = lambda tool: order.index(tool) if tool in COLOURS else 0
    return {tool: shares[tool] for tool in sorted(shares, key=place)}


# ------------------------------------------------------------------------------------ what changed


def changes(a: dict, b: dict) -> list[dict]:
    """A row for each measure that is not the same in every scenario.

    Both means, the paired difference b - a, p, and p corrected by Holm.
    """
    rows, differences = [], []
    for name in measures(a, b):
        x, y = values(a, name), values(b, name)
        both = ~np.isnan(x + y)
        if np.array_equal(x[both], y[both]):
            continue
        differences.append(np.where(both, y - x, 0.0))
        rows.append({
            "name": name, "a": average(x[both]), "b": average(y[both]),
            "gain": metrics.gain(x[both], y[both]),
        })  # fmt: skip
    if not rows:
        return []
    difference = np.stack(differences, axis=1)  # [n, measures]
    p = significance.permutation_test(difference)
    corrected = significance.holm(p)
    return [row | {"p": float(x), "corrected": y} for row, x, y in zip(rows, p, corrected)]


def averages(config: dict, a: dict, b: dict) -> dict:
    """The table of all measures."""
    rows, n = changes(a, b), len(b["reward"])
    gains = {row["name"]: row["gain"] for row in rows}
    same = [tables.label(name) for name in measures(a, b) if name not in gains]
    table = []
    for row in rows:
        name, gain = row["name"], row["gain"]
        digits, factor, _ = scale(name)
        unit = " points" if name in PERCENT else ""
        clearly = "up" if gain.mean > 0 else "down"
        table.append([
            tables.label(name), interval(name, row["a"]), interval(name, row["b"]),
            gain.text(digits, factor, sign="+") + unit, significance.small(row["corrected"]),
            clearly if row["corrected"] < 0.05 else "cannot tell",
        ])  # fmt: skip
    text = [
        f"Means over the same {n} scenarios ({b['tasks']}), greedy, with 95% intervals; "
        "the difference is paired by scenario. p is corrected by Holm's method for the "
        f"{len(rows)} rows; up and down are said where it is below 0.05."
    ]
    if same:
        text.append(f"The same in every scenario, and so left out: {', '.join(same)}.")
    text += [*parts_of_the_gain(config, gains), winners_and_losers(a, b)]
    head = ["", moment(a), moment(b), "difference", "p corrected", "clearly"]
    return section(f"Behaviour: {moment(a)} → {moment(b)}", text, head, table)


def weights(config: dict) -> dict[str, float]:
    """What each part of the reward is multiplied with: the flag, or else the version's."""
    version = WEIGHTS[str(config.get("swarm_version", "0.2"))]
    given = {name: config.get(f"swarm_{name}") for name in WEIGHTS["0.2"]}
    return {name: version[name] if w is None else w for name, w in given.items()}


def parts_of_the_gain(config: dict, gains: dict[str, metrics.Interval]) -> list[str]:
    """One sentence, if the parts add up to the gain in reward: with a penalty they do not."""
    parts = {name: (w, gains[name]) for name, w in weights(config).items() if w and name in gains}
    if "reward" not in gains:
        return []
    total = gains["reward"].mean
    if abs(sum(w * gain.mean for w, gain in parts.values()) - total) > 1e-3:  # evals.jsonl rounds
        return []
    told = ", ".join(f"{name} {g.text(scale=w, sign='+')}" for name, (w, g) in parts.items())
    return [f"Where the {total:+.3f} in reward comes from, each part times its weight: {told}."]


def winners_and_losers(a: dict, b: dict) -> str:
    d = values(b, "reward") - values(a, "reward")
    up, down = int((d > 1e-9).sum()), int((d < -1e-9).sum())
    worst = [i for i in np.argsort(np.nan_to_num(d))[:3] if d[i] < -1e-9]
    change = lambda i: f"({a['reward'][i]:.2f} → {b['reward'][i]:.2f})"
    furthest = ", ".join(f"scenario {i} {change(i)}" for i in worst)
    share = metrics.proportion(down, len(d)).percent()
    told = f"Reward rose in {up} of {len(d)} scenarios and fell in {down}, {share}"
    return f"{told}; furthest in {furthest}." if worst else f"{told}."


def by_scenario(a: dict, b: dict) -> dict:
    """The first scenarios, a row each."""
    columns = {  # title: (measures, format)
        "reward": (["reward"], ".2f"), "payoff": (["payoff"], ".2f"),
        "quality": (["quality"], ".2f"), "diversity": (["diversity"], ".2f"),
        "reputation": (["reputation"], ".2f"), "turns used": (["turns_used"], ".0f"),
        "claimed/submitted": (["used_claim_task", "used_submit_work"], ".0f"),
        "proposed/accepted": (["used_propose_trade", "used_accept_proposal"], ".0f"),
        "acted": (["turns_acted"], ".0f"), "errors": (["error_rate"], ".0%"),
    }  # fmt: skip
    known, n = set(measures(a, b)), len(b["reward"])
    columns = {title: column for title, column in columns.items() if set(column[0]) <= known}
    result = lambda e, i, names, form: "/".join(f"{values(e, name)[i]:{form}}" for name in names)
    rows = []
    for i in range(min(SHOWN, n)):
        rows.append(
            [str(i), *(f"{result(a, i, *c)} → {result(b, i, *c)}" for c in columns.values())]
        )
    first = f"the first {len(rows)} of {n} scenarios, one greedy episode each."
    text = [f"{moment(a)} → {moment(b)}, {first}"]
    return section("Scenario by scenario", text, ["scenario", *columns], rows)


def over_time(evals: list[dict]) -> list[dict]:
    """Measures and tool use of every evaluation: two tables."""
    n, known = len(evals[0]["reward"]), measures(*evals)
    names = [name for name in tables.OVER_TIME if name in known]
    text = [f"Means over the same {n} scenarios, with 95% intervals."]
    head = ["", *(name.replace("_", " ") for name in names)]
    rows = [[moment(e), *(tables.cell(e, name) for name in names)] for e in evals]
    results = section("Evaluations, over time", text, head, rows)

    shares = [tool_shares(e) for e in evals]
    used = [tool for tool in shares[0] if any(s[tool].any() for s in shares)]
    never = [tool for tool in shares[0] if tool not in used]
    text = (
        "Each tool's share of the turns that an episode took, in %, successful calls only; mean "
        f"over the same {n} scenarios with its 95% interval. "
        "pass_turn includes turns without a call."
    )
    if never:
        text += f" Never: {', '.join(never)}."
    percent = lambda share: metrics.mean(share).text(0, 100)
    rows = [[moment(e), *(percent(s[tool]) for tool in used)] for e, s in zip(evals, shares)]
    return [results, section("Tool use, over time", [text], ["", *used], rows)]


# ------------------------------------------------------------------------------- the best episode


def rank_correlation(x: np.ndarray, y: np.ndarray) -> metrics.Interval | None:
    """Spearman's, with the 95% interval of Bonett and Wright (2000); None if one never varies."""
    if len(x) < 5 or np.isnan(x + y).any() or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    r = float(stats.spearmanr(x, y).statistic)
    middle = np.arctanh(np.clip(r, -0.999999, 0.999999))
    reach = 1.96 * np.sqrt((1 + r**2 / 2) / (len(x) - 3))
    ends = float(np.tanh(middle - reach)), float(np.tanh(middle + reach))
    return metrics.Interval(r, *ends, len(x))


def best_episode(config: dict, a: dict, b: dict, episodes: list[dict]) -> list[dict]:
    """The episode of b with the highest reward: its numbers, what it did differently, its calls."""
    reward = values(b, "reward")
    best, n = int(np.nanargmax(reward)), len(reward)
    rows, odd = against_the_others(b, best)
    lead = []
    for name, w in weights(config).items():
        if w and name in b:
            v = values(b, name)
            lead.append(f"{name} {w * (v[best] - np.nanmean(v)):+.3f}")
    text = [
        f"Scenario {best} earned {reward[best]:.3f}, the most of {n}, {moment(b)}; "
        f"the same scenario {moment(a)}: {a['reward'][best]:.3f}. "
        f"Above the mean by {reward[best] - np.nanmean(reward):.3f}: {', '.join(lead)}."
    ]
    if odd:
        text.append(
            f"What it did differently: {', '.join(what for what, _ in odd)}. Does that pay in "
            f"general? Rank correlation with reward over all {n} episodes: "
            f"{', '.join(pays for _, pays in odd)}."
        )
    else:
        text.append(
            "It used no tool more or less often than others do, by a standard deviation or more."
        )
    text.append(
        "The most of many is luck as well, of the scenario above all: an idea to test, not a "
        "result."
    )
    distance = "standard deviations from it"
    head = ["", "this episode", f"mean of the {n}", distance, "rank correlation with reward"]
    when = ("eval", b["update"], b["stage"])
    for e in episodes:
        if (e.get("source"), e["update"], e["stage"]) != when or e["reward"] is None:
            continue
        if abs(e["reward"] - reward[best]) < 1e-4:  # evals.jsonl is rounded
            calls = [[str(i), *call] for i, call in enumerate(calls_of(e["messages"]), 1)]
            place = {"update": b["update"], "stage": b["stage"], "seed": e["seed"]}
            return [
                section("The best episode", text, head, rows, episode=place),
                section(
                    f"Its {len(calls)} calls", [], ["step", "call", "result"], calls, said=(1, 2)
                ),
            ]
    text.append("Its conversation is not among the saved episodes.")
    return [section("The best episode", text, head, rows)]


def against_the_others(b: dict, best: int) -> tuple[list[list[str]], list[tuple[str, str]]]:
    """(rows: every measure of the best episode against everybody's; up to four that stand out).

    Of a habit that stands out: what it did, and whether that goes with reward in general.
    """
    reward, rows, odd = values(b, "reward"), [], []
    for name in (name for name in measures(b) if name in NAMES):
        v = values(b, name)
        mean, spread = average(v), float(np.nanstd(v, ddof=1)) if len(v) > 1 else 0.0
        if spread == 0:
            continue
        z, r = (v[best] - mean.mean) / spread, rank_correlation(v, reward)
        pays = r.text(2, sign="+") if r else "—"
        digits, factor, unit = scale(name)
        mine = "—" if np.isnan(v[best]) else f"{factor * v[best]:.{digits}f}{unit}"
        distance = f"{z:+.1f}".replace("-0.0", "+0.0")
        last = "" if name == "reward" else pays
        rows.append([NAMES[name], mine, interval(name, mean), distance, last])
        is_habit = name.startswith("used_") or name in ("turns_used", "turns_acted", "error_rate")
        if is_habit and abs(z) >= 1:
            whole, decimal = (".0%", ".1%") if name in PERCENT else (".0f", ".1f")
            what = f"{NAMES[name]} {v[best]:{whole}} (mean {mean.mean:{decimal}})"
            odd.append((-abs(z), what, f"{NAMES[name]} {pays}"))
    return rows, [(what, pays) for _, what, pays in sorted(odd)[:4]]


def calls_of(messages: list[dict]) -> list[tuple[str, str]]:
    """(the call in short, what came of it) for every reply of a conversation."""
    out = []
    for i, m in enumerate(messages):
        if m["role"] != "assistant":
            continue
        try:
            tool, arguments, calls = read_call(m["content"], "0.2")
        except Refused:
            tool, arguments, calls = "(a call that cannot be read)", {}, 1
        answer = "(the end)"
        if i + 1 < len(messages):
            answer = messages[i + 1]["content"].split("\n")[0]
        call = brief(Turn(0, tool, arguments, True, "", calls))
        out.append((call, answer.removeprefix("# ").removeprefix("result: ")))
    return out


# ------------------------------------------------------------------------------------- all of it


def sections(
    config: dict, evals: list[dict], episodes: list[dict], which: tuple[str, str] | None = None
) -> list[dict]:
    """Everything above for two evaluations; by default after SFT (or the first) and the last.

    Empty while there is only one.
    """
    # Cut to the scenarios with a result in all of them; these are counted from 0.
    mine = records.same_tasks(*trained(evals))
    if len(mine) < 2:
        return []
    a, b = next((e for e in mine[:-1] if e["stage"] == "after_sft"), mine[0]), mine[-1]
    if which:
        a, b = (find(mine, name) for name in which)
    if a is b:
        raise ValueError(f"{which[0]} and {which[1]} are the same evaluation; choose two")
    if len(a["reward"]) != len(b["reward"]):
        sizes = f"{moment(a)} has {len(a['reward'])} scenarios and {moment(b)} {len(b['reward'])}"
        raise ValueError(f"{sizes}; only the same ones can be compared")
    best = best_episode(config, a, b, episodes)
    return [averages(config, a, b), by_scenario(a, b), *over_time(mine), *best]


def report(folder: Path, which: tuple[str, str] | None = None) -> str:
    """The sections of a run folder as markdown."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json, so it is no run folder; check the path")
    config = records.record(folder / "config.json")
    if config.get("env") != "swarm":
        why = f"{folder} is a run of {config.get('env')}; behaviour is told of swarm runs only"
        raise ValueError(f"{why}, see bookkeeping/report.py for the others")
    evals = records.clean(records.lines(folder / "evals.jsonl"))
    found = sections(config, evals, records.lines(folder / "episodes.jsonl"), which)
    if not found:
        why = "has fewer than two evaluations of the trained tasks; nothing can be compared yet"
        raise ValueError(f"{folder} {why}")
    return tables.markdown([*found, *tables.eval_only(evals)])


# ------------------------------------------------------------------------- panels of curves.png


def draw_parts(ax, config: dict, evals: list[dict]) -> None:
    """What the reward of the evaluations is made of: each part times its weight, stacked."""
    paid = {name: w for name, w in weights(config).items() if w and name in measures(*evals)}
    layers = [[w * np.nanmean(values(e, name)) for e in evals] for name, w in paid.items()]
    names = [f"{w:g} x {name}" for name, w in paid.items()]
    tints = ("#cfe0ee", "#f3dfc1", "#d6ead3", "#e6d9ea")
    if layers:
        x = [e["update"] for e in evals]
        ax.stackplot(x, layers, labels=names, colors=tints[: len(paid)])


def draw_tools(ax, lines: list[dict]) -> None:
    """What the sampled episodes used their turns for; passing on top, in grey."""
    x, shares = [line["update"] for line in lines], [tool_shares(line) for line in lines]
    tools = list(shares[0])
    layers = [[100 * s[tool] for s in shares] for tool in tools]
    ax.stackplot(x, layers, labels=tools, colors=[COLOURS.get(tool, "#888888") for tool in tools])
    title = "tool use of the sampled episodes"
    ax.set(title=title, xlabel="update", ylabel="% of the turns", ylim=(0, 100))
    handles, labels = ax.get_legend_handles_labels()
    beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    ax.legend(handles[::-1], labels[::-1], fontsize=8, **beside)  # in the layers' order


def draw_turns(ax, lines: list[dict], window: int) -> None:
    """How the sampled episodes go, all in percent."""
    curves = {
        "turns used, of 25": ("turns_used", 4, "C0", "-"),
        "turns in which something was done": ("turns_acted", 4, "C2", "-"),  # since it is logged
        "errors, of the turns": ("error_rate", 100, COLOURS["errors"], "-"),
        "cut short": ("truncated", 100, "black", "-"),
        "reputation": ("reputation", 100, "C4", "-"),
        "groups with signal": ("groups_with_signal", 100, "#bbbbbb", "--"),
    }
    x = [line["update"] for line in lines][window - 1 :]
    for name, (key, factor, colour, style) in curves.items():
        if all(key in line for line in lines):
            percent = [factor * line[key] for line in lines]
            rolling = np.convolve(percent, np.ones(window) / window, mode="valid")
            ax.plot(x, rolling, color=colour, ls=style, label=name)
    title = f"how the sampled episodes go, mean of {window} updates"
    ax.set(title=title, xlabel="update", ylabel="%", ylim=(-2, 102))
    ax.legend(fontsize=8)


# --------------------------------------------------------------------------- a run without a model


def made_up(folder: Path, n: int = 32, players=("idle", "random", "grinder", "expert")) -> Path:
    """The evaluations of a run whose checkpoints are scripted players, for the demo and tests."""

    def played(env: Swarm, seed: int) -> tuple[dict, list[dict]]:
        messages, done = env.reset(seed), False
        while not done:
            messages.append({"role": "assistant", "content": env.expert_reply()})
            new, done = env.step(messages[-1]["content"])
            messages += new
        return env.score(), messages

    config = {
        "env": "swarm", "difficulty": "medium", "swarm_version": "0.2", "seed": 0, "model": "auto",
        "updates": 40,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    evals, episodes = [], []
    when = ((-1, "before"), (0, "after_sft"), (20, "train"), (40, "final"))
    for (update, stage), style in zip(when, players):
        marks, talks = zip(*(played(Swarm(style=style), DEV_SEEDS + i) for i in range(n)))
        at = {"update": update, "stage": stage}
        measured = {name: [m[name] for m in marks] for name in marks[0]}
        measured["reply_tokens"] = [100] * n
        evals.append(at | {"tasks": "medium v0.2", "trained": True} | measured)
        for i in sorted({*range(min(SHOWN, n)), int(np.argmax(measured["reward"]))}):
            episodes.append({
                **at, "source": "eval", "group": i, "member": 0, "seed": DEV_SEEDS + i,
                "reward": marks[i]["reward"], "components": marks[i], "stop_reason": "done",
                "reply_tokens": 100, "messages": talks[i],
            })  # fmt: skip
    for name, written in (("evals", evals), ("episodes", episodes)):
        text = "".join(json.dumps(x) + "\n" for x in written)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def main(given: list[str]) -> None:
    if len(given) == 2 or len(given) > 3 or given[:1] in (["-h"], ["--help"]):
        raise SystemExit(
            "usage: python -m bookkeeping.behaviour [runs/NAME [ONE OTHER]]   (ONE and OTHER: "
            "an update, before, after_sft or final)"
        )
    with records.foreign(given[0] if given else ""):
        if given:
            print(report(Path(given[0]), tuple(given[1:]) or None))
            return
        with tempfile.TemporaryDirectory() as name:
            players = "the checkpoints are scripted players (idle, random, grinder, expert)"
            print(f"A made-up run: {players}.\n\n{report(made_up(Path(name)))}")


if __name__ == "__main__":
    main(sys.argv[1:])
