"""How did the behaviour change? Any two evaluations of one swarm run, scenario by scenario. And what did the best episode do?

    python -m bookkeeping.behaviour runs/NAME              after SFT against the end
    python -m bookkeeping.behaviour runs/NAME before 40    any two: an update, or before, after_sft, final
    python -m bookkeeping.behaviour                        a made-up run, with scripted players in place of checkpoints

    evals.jsonl -> averages with paired differences, rows per scenario, tool use over time, the best episode -> sections
    sections    -> report.md and report.html, both from the same {"title", "text": [sentences], "head": [cells], "rows": [[cells]]}

Why paired: every evaluation plays the same held-out scenarios, and a poor scenario is poor for both. The p of a difference comes from
flipping the signs of the scenarios' differences: if nothing changed, each is as likely to be above zero as below. Some twenty
measures are asked at once, so one would pass 0.05 by luck; p is corrected by Holm's method (1979) over the whole table.

The table that this grew out of compared 6 samples with 8 and printed no interval. It read a strategy off the best of the 8. The
best episode is shown here too, but beside how far from the mean it lies, and whether what it did goes with reward in all the other
episodes.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests

import metrics
from bookkeeping import compare, records
from env_swarm import EVAL_SEEDS, WEIGHTS, Swarm, Turn, brief
from swarm.tools import Refused, read_call

# The order and the names of the tables; a measure that is not listed comes last, under its own name.
NAMES = {
    "reward": "reward", "payoff": "payoff", "quality": "interaction quality", "diversity": "action diversity", "reputation": "reputation, of 1",
    "turns_used": "turns used", "used_claim_task": "tasks claimed", "used_submit_work": "tasks submitted", "used_propose_trade": "trades proposed",
    "used_accept_proposal": "trades accepted", "used_reject_proposal": "trades rejected", "used_cancel_proposal": "proposals cancelled",
    "used_post": "posts", "used_reply": "replies", "used_vote": "votes", "used_pass_turn": "turns passed",
    "error_rate": "errors, of the turns", "truncated": "cut short", "survival": "not frozen at the end", "gain": "resources gained",
}  # fmt: skip
PERCENT, YES_NO = ("error_rate", "truncated", "survival", "format", "exact"), ("truncated", "survival", "exact")
COLOURS = {  # work is blue, trade orange, talk green, errors red, passing grey
    "claim_task": "#9cc5e8", "submit_work": "#2b74b3", "propose_trade": "#f7cf7a", "accept_proposal": "#e5861a", "reject_proposal": "#9a5418",
    "cancel_proposal": "#fbe6bd", "post": "#a5d79f", "reply": "#55ab5a", "vote": "#1f6d3a", "errors": "#c4203f", "pass_turn": "#bfbfbf",
}  # fmt: skip
OVER_TIME = ("exact", "reward", "payoff", "quality", "diversity", "reputation", "turns_used", "error_rate", "truncated")
SHOWN = 8  # scenarios that get a row of their own: those whose episodes are saved


# ------------------------------------------------------------------------------------------------ reading


def trained(evals: list[dict]) -> list[dict]:
    """The evaluations of the trained tasks during the run, in order."""
    return [e for e in evals if e.get("trained") and e["stage"] != "eval_only"]


def find(evals: list[dict], which: str) -> dict:
    """The evaluation of the trained tasks that `which` names: an update (-1: before SFT, 0: after it), before, after_sft or final."""
    for e in trained(evals):
        if which == str(e["update"]) or which == e["stage"] != "train":
            return e
    known = ", ".join(dict.fromkeys(e["stage"] if e["stage"] != "train" else str(e["update"]) for e in trained(evals)))
    raise ValueError(f"there is no evaluation {which} of the trained tasks; choose two of {known or 'none: the run has not got that far'}")


def moment(e: dict) -> str:
    """What an evaluation is called."""
    named = {"before": "before SFT", "after_sft": "after SFT", "final": f"update {e['update']} (final)"}
    return named.get(e["stage"], f"update {e['update']}")


def values(e: dict, name: str) -> np.ndarray:
    """[n] floats; NaN where an episode has none."""
    return np.array([np.nan if v is None else v for v in e[name]], dtype=float)


def measures(*evals: dict) -> list[str]:
    """What all of them have, in the tables' order."""
    lists = [name for name, value in evals[0].items() if isinstance(value, list) and all(name in e for e in evals)]
    return sorted(lists, key=lambda name: list(NAMES).index(name) if name in NAMES else len(NAMES))


def tool_shares(line: dict) -> dict:
    """{tool: share of the turns}, errors and passing last; of an evaluation ([n] each) or of a line of metrics.jsonl (numbers)."""
    used = {name[5:]: np.array(line[name], dtype=float) for name in line if name.startswith("used_")}
    errors, total = np.array(line.get("error_rate", 0.0), dtype=float), sum(used.values())
    found = {tool: (1 - errors) * calls / np.where(total > 0, total, 1) for tool, calls in used.items()} | {"errors": errors}
    return {tool: found[tool] for tool in sorted(found, key=lambda tool: list(COLOURS).index(tool) if tool in COLOURS else 0)}


# ------------------------------------------------------------------------------------------------ numbers as text


def label(name: str) -> str:
    return NAMES.get(name, name.replace("_", " "))


def scale(name: str) -> tuple[float, int, str]:
    """(factor, digits, unit) of a measure."""
    if name in PERCENT:
        return 100, 1, "%"
    if name in ("gain", "reply_tokens"):
        return 1, 1, ""
    return 1, 2 if name.startswith("used_") or name in ("turns_used", "extra_calls", "self_proposal_errors") else 3, ""


def show(name: str, x: float) -> str:
    factor, digits, unit = scale(name)
    return "—" if np.isnan(x) else f"{factor * x:.{digits}f}{unit}"


def interval(name: str, i: metrics.Interval, difference: bool = False) -> str:
    factor, digits, unit = scale(name)
    f = lambda x: f"{factor * x:{'+' * difference}.{digits}f}"
    return f"{f(i.mean)}{'' if difference else unit} [{f(i.low)}, {f(i.high)}]"


def mean(name: str, v: np.ndarray) -> metrics.Interval:
    """Wilson's interval where an episode has it or not; a bootstrap for counts and amounts."""
    v = v[~np.isnan(v)]
    return metrics.proportion(v.sum(), len(v)) if name in YES_NO else metrics.mean(v)


def average(e: dict, name: str) -> str:
    return interval(name, mean(name, values(e, name)))


def section(title: str, text: list[str], head: list[str] | None = None, rows: list[list[str]] | None = None, **more) -> dict:
    return {"title": title, "text": text, "head": head or [], "rows": rows or [], **more}


def quote(text: str) -> str:
    """Anybody's text, made safe for Markdown and a terminal: one line, printable, in backticks."""
    return "`" + records.printable(" ".join(text.split())).replace("`", "'") + "`"


def markdown(sections: list[dict]) -> str:
    """What a model said stands in backticks, where neither HTML nor a link is read."""
    out = []
    for s in sections:
        cell = lambda i, text, s=s: quote(text) if i in s.get("said", ()) else text
        row = lambda cells, cell=cell: "| " + " | ".join(cell(i, text).replace("|", "\\|") for i, text in enumerate(cells)) + " |"
        out += [f"## {s['title']}", "", *(line for text in s["text"] for line in (text, ""))]
        if s["rows"]:
            out += ["| " + " | ".join(s["head"]) + " |", "|---" * len(s["head"]) + "|", *map(row, s["rows"]), ""]
    return "\n".join(out)


# ------------------------------------------------------------------------------------------------ what changed


def flip_test(differences: np.ndarray, flips: int = 9999) -> np.ndarray:
    """[n, measures] paired differences -> [measures] two-sided p that the mean is 0, by random signs (the same for all measures)."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (flips, len(differences)))
    sums = differences.sum(axis=0)
    return (1 + (np.abs(signs @ differences) >= np.abs(sums) - 1e-9).sum(axis=0)) / (flips + 1)


def changes(a: dict, b: dict) -> list[dict]:
    """A row a measure that is not the same in every scenario: both means, the paired difference b - a, p, and p corrected by Holm."""
    rows = []
    for name in measures(a, b):
        x, y = values(a, name), values(b, name)
        both = ~np.isnan(x + y)
        if not np.array_equal(x[both], y[both]):
            rows.append({"name": name, "a": mean(name, x[both]), "b": mean(name, y[both]), "gain": metrics.gain(x[both], y[both]),
                         "difference": np.where(both, y - x, 0.0)})  # fmt: skip
    p = flip_test(np.array([row["difference"] for row in rows]).T) if rows else []
    corrected = multipletests(p, method="holm")[1] if rows else []
    return [row | {"p": float(p), "corrected": float(c)} for row, p, c in zip(rows, p, corrected)]


def averages(config: dict, a: dict, b: dict) -> dict:
    rows, n = changes(a, b), len(b["reward"])
    clear = lambda row: "cannot tell" if row["corrected"] >= 0.05 else "up" if row["gain"].mean > 0 else "down"
    same = [label(name) for name in measures(a, b) if name not in {row["name"] for row in rows}]
    table = [[label(row["name"]), interval(row["name"], row["a"]), interval(row["name"], row["b"]),
              interval(row["name"], row["gain"], True) + " points" * (row["name"] in PERCENT), compare.small(row["corrected"]), clear(row)]
             for row in rows]  # fmt: skip
    text = [
        f"Means over the same {n} held-out scenarios ({b['tasks']}), greedy, with 95% intervals; the difference is paired by scenario. "
        f"p is corrected by Holm's method for the {len(rows)} rows; up and down are said where it is below 0.05.",
        *([f"The same in every scenario, and so left out: {', '.join(same)}."] if same else []),
        *parts_of_the_gain(config, {row["name"]: row["gain"] for row in rows}),
        winners_and_losers(a, b),
    ]
    return section(f"Behaviour: {moment(a)} → {moment(b)}", text, ["", moment(a), moment(b), "difference", "p corrected", "clearly"], table)


def weights(config: dict) -> dict[str, float]:
    """What each part of the reward is multiplied with. A flag that was not given is the version's."""
    given = {name: config.get(f"swarm_{name}") for name in WEIGHTS["0.2"]}
    return {name: WEIGHTS[str(config.get("swarm_version", "0.2"))][name] if w is None else w for name, w in given.items()}


def parts_of_the_gain(config: dict, gains: dict[str, metrics.Interval]) -> list[str]:
    """One sentence, if the parts add up to the gain in reward: with a penalty they do not."""
    parts = {name: (w, gains[name]) for name, w in weights(config).items() if w and name in gains}
    if "reward" not in gains or abs(sum(w * g.mean for w, g in parts.values()) - gains["reward"].mean) > 1e-3:  # evals.jsonl is rounded
        return []
    told = ", ".join(f"{name} {w * g.mean:+.3f} [{w * g.low:+.3f}, {w * g.high:+.3f}]" for name, (w, g) in parts.items())
    return [f"Where the {gains['reward'].mean:+.3f} in reward comes from, each part times its weight: {told}."]


def winners_and_losers(a: dict, b: dict) -> str:
    d = values(b, "reward") - values(a, "reward")
    up, down = int((d > 1e-9).sum()), int((d < -1e-9).sum())
    worst = [i for i in np.argsort(np.nan_to_num(d))[:3] if d[i] < -1e-9]
    named = ", ".join(f"scenario {i} ({a['reward'][i]:.2f} → {b['reward'][i]:.2f})" for i in worst)
    return (f"Reward rose in {up} of {len(d)} scenarios and fell in {down}, {metrics.proportion(down, len(d)).percent()}"
            + (f"; furthest in {named}." if worst else "."))  # fmt: skip


def by_scenario(a: dict, b: dict) -> dict:
    cells = {name: [name] for name in ("reward", "payoff", "quality", "diversity", "reputation", "turns_used")}
    cells |= {
        "claimed/submitted": ["used_claim_task", "used_submit_work"],
        "proposed/accepted": ["used_propose_trade", "used_accept_proposal"],
    }
    cells = {title: names for title, names in (cells | {"errors": ["error_rate"]}).items() if set(names) <= set(measures(a, b))}

    def cell(i: int, title: str, names: list[str]) -> str:
        form = ".0f" if "/" in title or title == "turns_used" else ".0%" if title == "errors" else ".2f"
        return " → ".join("/".join(f"{values(e, name)[i]:{form}}" for name in names) for e in (a, b))

    rows = [[str(i), *(cell(i, title, names) for title, names in cells.items())] for i in range(min(SHOWN, len(b["reward"])))]
    text = [f"{moment(a)} → {moment(b)}, the first {len(rows)} of {len(b['reward'])} scenarios, one greedy episode each."]
    return section("Scenario by scenario", text, ["scenario", *(title.replace("_", " ") for title in cells)], rows)


def over_time(evals: list[dict]) -> list[dict]:
    mine, n = trained(evals), len(trained(evals)[0]["reward"])
    names = [name for name in OVER_TIME if name in measures(*mine)]
    results = section("Held-out, over time", [f"Means over the same {n} scenarios, with 95% intervals."],
                      ["", *(name.replace("_", " ") for name in names)], [[moment(e), *(average(e, name) for name in names)] for e in mine])  # fmt: skip
    whole = lambda i: f"{100 * i.mean:.0f} [{100 * i.low:.0f}, {100 * i.high:.0f}]"
    shares = [(e, tool_shares(e)) for e in mine]
    used = [tool for tool in shares[0][1] if any(s[tool].any() for _, s in shares)]
    never = [tool for tool in shares[0][1] if tool not in used]
    text = [f"Each tool's share of the turns that an episode took, in %, successful calls only; mean over the same {n} scenarios with its 95% interval. "
            "pass_turn includes turns without a call." + (f" Never: {', '.join(never)}." if never else "")]  # fmt: skip
    table = [[moment(e), *(whole(metrics.mean(s[tool])) for tool in used)] for e, s in shares]
    return [results, section("Tool use, over time", text, ["", *used], table)]


def eval_only(evals: list[dict]) -> list[dict]:
    """What `train.py --eval-only` added: one section, or none. For every environment."""
    mine = [e for e in evals if e["stage"] == "eval_only"]
    names = [name for name in OVER_TIME if any(name in e for e in mine)]
    cell = lambda e, name: average(e, name) if name in e else ""
    rows = [
        [e["tasks"] + " (trained)" * e["trained"], str(e["update"]), str(len(e["reward"])), *(cell(e, name) for name in names)]
        for e in mine
    ]
    text = ["Added by train.py --eval-only, with the checkpoint of that update; means with 95% intervals."]
    return [section("Evaluated later", text, ["tasks", "update", "n", *map(label, names)], rows)] if rows else []


# ------------------------------------------------------------------------------------------------ the best episode


def rank_correlation(x: np.ndarray, y: np.ndarray) -> metrics.Interval | None:
    """Spearman's, with the 95% interval of Bonett and Wright (2000); None if one of them never varies."""
    if len(x) < 5 or np.isnan(x + y).any() or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    r = float(stats.spearmanr(x, y).statistic)
    middle, reach = np.arctanh(np.clip(r, -0.999999, 0.999999)), 1.96 * np.sqrt((1 + r**2 / 2) / (len(x) - 3))
    return metrics.Interval(r, float(np.tanh(middle - reach)), float(np.tanh(middle + reach)), len(x))


def best_episode(config: dict, a: dict, b: dict, episodes: list[dict]) -> list[dict]:
    """The episode of b with the highest reward: its numbers beside everybody's, what it did differently, and its calls."""
    reward = values(b, "reward")
    best, n, rows, odd = int(np.nanargmax(reward)), len(reward), [], []
    lead = [(name, w * (values(b, name)[best] - np.nanmean(values(b, name)))) for name, w in weights(config).items() if w and name in b]
    for name in (name for name in measures(b) if name in NAMES):
        v = values(b, name)
        spread, average = float(np.nanstd(v, ddof=1)) if n > 1 else 0.0, mean(name, v)
        if spread == 0:
            continue
        z, r = (v[best] - average.mean) / spread, rank_correlation(v, reward)
        goes = f"{r.mean:+.2f} [{r.low:+.2f}, {r.high:+.2f}]" if r else "—"
        away = f"{z:+.1f}".replace("-0.0", "+0.0")
        rows.append([NAMES[name], show(name, v[best]), interval(name, average), away, "" if name == "reward" else goes])
        if (name.startswith("used_") or name in ("turns_used", "error_rate")) and abs(z) >= 1:
            whole, decimal = (".0%", ".1%") if name in PERCENT else (".0f", ".1f")
            odd.append((-abs(z), f"{NAMES[name]} {v[best]:{whole}} (mean {average.mean:{decimal}})", f"{NAMES[name]} {goes}"))
    odd = sorted(odd)[:4]
    text = [
        f"Scenario {best} earned {reward[best]:.3f}, the most of {n}, {moment(b)}; the same scenario {moment(a)}: {a['reward'][best]:.3f}. "
        f"Above the mean by {reward[best] - np.nanmean(reward):.3f}: {', '.join(f'{name} {x:+.3f}' for name, x in lead)}.",
        f"What it did differently: {', '.join(what for _, what, _ in odd)}. Does that pay in general? Rank correlation with reward over all {n} "
        f"episodes: {', '.join(goes for _, _, goes in odd)}."
        if odd
        else "It used no tool more or less often than others do, by a standard deviation or more.",
        "The most of many is luck as well, of the scenario above all: an idea to test, not a result.",
    ]
    head = ["", "this episode", f"mean of the {n}", "standard deviations from it", "rank correlation with reward"]
    mine = [e for e in episodes if e.get("source") == "eval" and (e["update"], e["stage"]) == (b["update"], b["stage"])]
    found = next((e for e in mine if e["reward"] is not None and abs(e["reward"] - reward[best]) < 1e-4), None)  # evals.jsonl is rounded
    if found is None:
        return [section("The best episode", [*text, "Its conversation is not among the saved episodes."], head, rows)]
    calls = [[str(i + 1), *call] for i, call in enumerate(calls_of(found["messages"]))]
    where = {"update": b["update"], "stage": b["stage"], "seed": found["seed"]}
    return [
        section("The best episode", text, head, rows, episode=where),
        section(f"Its {len(calls)} calls", [], ["step", "call", "result"], calls, said=(1, 2)),
    ]


def calls_of(messages: list[dict]) -> list[tuple[str, str]]:
    """(call in short, what came of it) for every reply of a conversation."""
    out = []
    for i, m in enumerate(messages):
        if m["role"] != "assistant":
            continue
        try:
            tool, arguments, calls = read_call(m["content"], "0.2")
        except Refused:
            tool, arguments, calls = "(a call that cannot be read)", {}, 1
        answer = messages[i + 1]["content"].split("\n")[0] if i + 1 < len(messages) else "(the end)"
        out.append((brief(Turn(0, tool, arguments, True, "", calls)), answer.removeprefix("# ").removeprefix("result: ")))
    return out


# ------------------------------------------------------------------------------------------------ all of it, for a person


def sections(config: dict, evals: list[dict], episodes: list[dict], which: tuple[str, str] | None = None) -> list[dict]:
    """Everything above for two evaluations; by default after SFT (or the first) and the last. Empty while there is only one."""
    mine = compare.same_tasks(*trained(evals))  # so scenarios are counted among those that have a result in all
    if len(mine) < 2:
        return []
    a, b = (find(mine, name) for name in which) if which else (next((e for e in mine[:-1] if e["stage"] == "after_sft"), mine[0]), mine[-1])
    if a is b:
        raise ValueError(f"{which[0]} and {which[1]} are the same evaluation; choose two")
    if len(a["reward"]) != len(b["reward"]):
        raise ValueError(
            f"{moment(a)} has {len(a['reward'])} scenarios and {moment(b)} {len(b['reward'])}; only the same ones can be compared"
        )
    return [averages(config, a, b), by_scenario(a, b), *over_time(mine), *best_episode(config, a, b, episodes)]


def report(folder: Path, which: tuple[str, str] | None = None) -> str:
    """The sections of a run folder as markdown."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json, so it is no run folder; check the path")
    config = records.record(folder / "config.json")
    if config.get("env") != "swarm":
        raise ValueError(
            f"{folder} is a run of {config.get('env')}; behaviour is told of swarm runs only, see bookkeeping/report.py for the others"
        )
    evals, episodes = records.clean(records.lines(folder / "evals.jsonl")), records.lines(folder / "episodes.jsonl")
    found = sections(config, evals, episodes, which)
    if not found:
        raise ValueError(f"{folder} has fewer than two evaluations of the trained tasks; nothing can be compared yet")
    return markdown([*found, *eval_only(evals)])


# ------------------------------------------------------------------------------------------------ two panels of curves.png


def draw_parts(ax, config: dict, evals: list[dict]) -> None:
    """What the held-out reward is made of: each part times its weight, stacked."""
    paid = {name: w for name, w in weights(config).items() if w and name in measures(*evals)}
    layers = [[w * np.nanmean(values(e, name)) for e in evals] for name, w in paid.items()]
    tints = ("#cfe0ee", "#f3dfc1", "#d6ead3", "#e6d9ea")
    if layers:
        ax.stackplot(
            [e["update"] for e in evals], layers, labels=[f"{w:g} x {name}" for name, w in paid.items()], colors=tints[: len(paid)]
        )


def draw_tools(ax, lines: list[dict]) -> None:
    """What the sampled episodes used their turns for; passing on top, in grey."""
    x, shares = [line["update"] for line in lines], [tool_shares(line) for line in lines]
    tools = list(shares[0])
    ax.stackplot(
        x, [[100 * s[tool] for s in shares] for tool in tools], labels=tools, colors=[COLOURS.get(tool, "#888888") for tool in tools]
    )
    ax.set(title="tool use of the sampled episodes", xlabel="update", ylabel="% of the turns", ylim=(0, 100))
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))  # beside it, in the layers' order


def draw_turns(ax, lines: list[dict], window: int) -> None:
    """How the sampled episodes go, all in percent."""
    curves = {"turns used, of 25": ("turns_used", 4, "C0"), "errors, of the turns": ("error_rate", 100, COLOURS["errors"]), "cut short": ("truncated", 100, "black"),
              "reputation": ("reputation", 100, "C4"), "groups with signal": ("groups_with_signal", 100, "#bbbbbb")}  # fmt: skip
    for name, (key, factor, colour) in curves.items():
        if all(key in line for line in lines):
            rolling = np.convolve([factor * line[key] for line in lines], np.ones(window) / window, mode="valid")
            ax.plot(
                [line["update"] for line in lines][window - 1 :],
                rolling,
                color=colour,
                ls="--" if key == "groups_with_signal" else "-",
                label=name,
            )
    ax.set(title=f"how the sampled episodes go, mean of {window} updates", xlabel="update", ylabel="%", ylim=(-2, 102))
    ax.legend(fontsize=8)


# ------------------------------------------------------------------------------------------------ a run without a model


def made_up(folder: Path, n: int = 32, players: tuple[str, ...] = ("idle", "random", "grinder", "expert")) -> Path:
    """The evaluations of a run whose checkpoints are scripted players. For the demonstration below, and for tests."""

    def played(env: Swarm, seed: int) -> tuple[dict, list[dict]]:
        messages, done = env.reset(seed), False
        while not done:
            messages.append({"role": "assistant", "content": env.expert_reply()})
            new, done = env.step(messages[-1]["content"])
            messages += new
        return env.score(), messages

    config = {"env": "swarm", "difficulty": "medium", "swarm_version": "0.2", "seed": 0, "model": "auto", "updates": 40}
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "evals.jsonl", "w") as evals, open(folder / "episodes.jsonl", "w") as episodes:
        for (update, stage), style in zip(((-1, "before"), (0, "after_sft"), (20, "train"), (40, "final")), players):
            marks, talks = zip(*(played(Swarm(style=style), EVAL_SEEDS + i) for i in range(n)))
            line = {
                "update": update,
                "stage": stage,
                "tasks": "medium v0.2",
                "trained": True,
                **{name: [m[name] for m in marks] for name in marks[0]},
            }
            evals.write(json.dumps(line | {"reply_tokens": [100] * n}) + "\n")
            for i in sorted({*range(min(SHOWN, n)), int(np.argmax(line["reward"]))}):
                episode = {"update": update, "source": "eval", "stage": stage, "group": i, "member": 0, "seed": EVAL_SEEDS + i, "reward": marks[i]["reward"],
                           "components": marks[i], "stop_reason": "done", "reply_tokens": 100, "messages": talks[i]}  # fmt: skip
                episodes.write(json.dumps(episode) + "\n")
    return folder


if __name__ == "__main__":
    given = sys.argv[1:]
    if len(given) == 2 or len(given) > 3 or given[:1] in (["-h"], ["--help"]):
        raise SystemExit(
            "usage: python -m bookkeeping.behaviour [runs/NAME [ONE OTHER]]   (ONE and OTHER: an update, before, after_sft or final)"
        )
    with records.foreign(given[0] if given else ""):
        if given:
            print(report(Path(given[0]), tuple(given[1:]) or None))
        else:
            with tempfile.TemporaryDirectory() as name:
                print(
                    "A made-up run: the checkpoints are scripted players (idle, random, grinder, expert).\n\n" + report(made_up(Path(name)))
                )
