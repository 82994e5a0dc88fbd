"""A run as a page: report.html, every curve and every token of a run, in one file that opens from disk.

    python -m bookkeeping.viewer runs/NAME

    summary.json, metrics.jsonl, evals.jsonl, episodes.jsonl -> bookkeeping/viewer.html with the numbers filled in -> runs/NAME/report.html

All counting is done here, with the same intervals as in the report; the page only draws. It needs no network: its content
security policy (the meta tag at its top) forbids it to load anything. What a model said is hostile text. It is never read as HTML: every `<`
is written as `\\u003c`, so nothing in a reply can end the script it is stored in, and the page inserts text as text.

The page parses an episode when it is looked at, so a run folder of tens of megabytes opens at once: `run` below holds
a short line an episode, `bodies` the rest, a line of JSON each. The bodies are packed (gzip, base64), which the browser undoes: an episode of
25 turns with the numbers of every token is 60 kB otherwise, and a run saves some two hundred.
"""

import base64
import gzip
import hashlib
import html
import json
import re
import sys
from pathlib import Path

import numpy as np

import metrics
from bookkeeping import behaviour, compare, doctor, records

TEMPLATE = Path(__file__).parent / "viewer.html"
STAGES = {"before": "before SFT", "after_sft": "after SFT"}  # what the page calls the evaluations around SFT
ORDER = ("before", "after_sft", "", "train", "final", "eval_only")  # in time, of what has the same update


def write_html(folder: Path) -> Path:
    """Write folder/report.html and return its path. A folder that holds no run raises ValueError in one sentence."""
    folder = Path(folder)
    run, bodies = collect(folder)
    template = TEMPLATE.read_text(encoding="utf-8")
    script = re.search("<script>(.*?)</script>", template, re.DOTALL)[1]
    fill = {
        "title": html.escape(f"{run['name']}: a picoswarm run"),
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),  # content security: this script and no other
        "run": embed(run),
        "episodes": pack("\n".join(json.dumps(body, allow_nan=False, separators=(",", ":")) for body in bodies)),
    }
    # One pass over the template: a reply that holds a placeholder's name is not filled in again.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], template)
    (folder / "report.html").write_text(page, encoding="utf-8", newline="\n")
    return folder / "report.html"


def embed(value) -> str:
    """JSON that may stand inside a script tag: ASCII, on one line, without any '<'."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def pack(text: str) -> str:
    """gzip and base64, which holds no '<' at all; the same text gives the same bytes."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def collect(folder: Path) -> tuple[dict, list[dict]]:
    """What the page shows: the run (header, charts, an index of the episodes) and the episodes' bodies, in the index's order."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; give a run folder, such as runs/NAME")
    lines, evals, episodes = (read_lines(folder / f"{name}.jsonl") for name in ("metrics", "evals", "episodes"))
    summary, config = read_json(folder / "summary.json"), read_json(folder / "config.json")
    if not (summary or lines or evals or episodes):
        raise ValueError(f"{folder} holds no summary.json, metrics.jsonl, evals.jsonl or episodes.jsonl, so it is no run folder")
    config = summary.get("config") or config
    env, during = summary.get("env") or config.get("env"), [e for e in evals if e.get("stage") != "eval_only"]
    results = [evaluation(e, summary.get("difficulty", config.get("difficulty"))) for e in during]
    tasks, stops, index, bodies = index_episodes(episodes, env)
    charts = [*eval_charts(results), *(part_charts(during) if env == "swarm" else []), *train_charts(lines)]
    tables = [
        *(behaviour.sections(config, evals, episodes) if env == "swarm" else []),
        *behaviour.eval_only([e for e in evals if e not in during]),
    ]
    for table in tables:  # where the episode that a table is about is to be seen
        if place := table.pop("episode", None):
            at = next(i for i, e in enumerate(episodes) if all(e.get(k) == v for k, v in place.items()) and e.get("source") == "eval")
            table["view"] = f"source=eval&u={place['update']}&stage={place['stage']}&task={index[at]['task']}&against="
    run = {
        "name": folder.resolve().name, "facts": facts(summary, config, lines), "settings": {k: str(v) for k, v in config.items()},
        "headline": headline(results), "notes": notes(summary), "charts": charts, "tables": tables, "tasks": tasks, "stops": stops, "episodes": index,
        "scale": scale(episodes), "last": max([1, *(s["u"] for s in stops), *(p[0] for c in charts for s in c["series"] for p in s["points"])]),
    }  # fmt: skip
    return run, bodies


# ------------------------------------------------------------------------------------------------ reading


def read_json(path: Path) -> dict:
    """A JSON object, or {} where there is none (a run that is still going has no summary.json). NaN becomes None."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None) if path.exists() else {}
        if not isinstance(found, dict):
            raise ValueError("an object is expected")
        return found
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); write it again or remove it") from None


def read_lines(path: Path) -> list[dict]:
    """A JSON object a line. A last line that a kill cut in two is left out; any other broken line is an error."""
    found = []
    texts = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    texts = [text for text in texts if text.strip()]
    for i, text in enumerate(texts):
        try:
            record = json.loads(text, parse_constant=lambda _: None)  # NaN and Infinity have no place in JSON
            if not isinstance(record, dict):
                raise ValueError("an object is expected")
            found.append(record)
        except (ValueError, RecursionError) as error:
            if i + 1 < len(texts):
                raise ValueError(f"{path}, line {i + 1} is not JSON ({error}); remove that line") from None
    return found


def numbers(values) -> list[float]:
    """Without None: an episode in error has no reward."""
    return [float(v) for v in values or [] if v is not None]


# ------------------------------------------------------------------------------------------------ header


def facts(summary: dict, config: dict, lines: list[dict]) -> list[list[str]]:
    """[label, value] pairs for the top of the page, as far as they are known."""
    machine, seconds = summary.get("machine") or {}, (summary.get("seconds") or {}).get("total")
    pairs = {
        "environment": summary.get("env") or config.get("env"),
        "model": summary.get("model") or config.get("model"),
        "seed": summary.get("seed", config.get("seed")),
        "updates": summary.get("updates", lines[-1].get("update") if lines else None),
        "time": f"{seconds / 60:.1f} minutes" if seconds is not None else None,
        "machine": machine.get("device"),
        "peak memory": f"{summary['peak_rss_gb']:.2f} GB" if summary.get("peak_rss_gb") else None,
        "state": None if summary else "not finished: there is no summary.json yet",
    }
    return [[label, str(value)] for label, value in pairs.items() if value not in (None, "")]


def headline(results: list[dict]) -> dict:
    """Before SFT, after SFT and the last evaluation, a row for each kind of task; the trained one first.

    A cell is a list of [number, interval], as text: exact answers, then the mean reward where it is another number.
    """
    last, exact = max((r["update"] for r in results), default=0), any(r["exact"] for r in results)
    moments = {r["name"]: None for r in results if r["stage"] in STAGES or r["update"] == last}
    rows = {r["tasks"]: {"tasks": r["tasks"], "trained": r["trained"], "cells": dict(moments)} for r in results}
    for r in results:
        if r["name"] in moments:
            cell = [[f"{100 * x:.1f}%", f"[{100 * low:.1f}, {100 * high:.1f}]"] for x, low, high, _ in filter(None, [r["exact"]])]
            if r["reward"] and (not r["exact"] or r["reward"][0] != r["exact"][0]):
                cell.append([("reward " * exact) + "{:.3f}".format(*r["reward"]), "[{1:.3f}, {2:.3f}]".format(*r["reward"])])
            rows[r["tasks"]]["cells"][r["name"]] = cell
    return {
        "what": "exact" if exact else "mean reward",
        "moments": list(moments),
        "rows": sorted(rows.values(), key=lambda row: not row["trained"]),
    }


def notes(summary: dict) -> list[str]:
    """Sentences under the headline."""
    out, gain, reward = [], summary.get("gain") or {}, summary.get("gain_reward") or {}
    if gain.get("mean") is None and reward.get("mean") is not None:  # an environment without exact answers
        text = f"{reward['mean']:+.3f} [{reward['low']:+.3f}, {reward['high']:+.3f}] in mean reward"
        out.append(f"GRPO over SFT on the same {reward.get('n', '')} tasks: {text}, paired by task.")
    if gain.get("mean") is not None:
        text = f"{100 * gain['mean']:+.1f} points [{100 * gain['low']:+.1f}, {100 * gain['high']:+.1f}] in exact answers"
        if reward.get("mean") not in (None, gain["mean"]):
            text += f", {reward['mean']:+.3f} [{reward['low']:+.3f}, {reward['high']:+.3f}] in reward"
        out.append(f"GRPO over SFT on the same {gain.get('n', '')} tasks: {text}, paired by task.")
    return out + [f"{name.upper()} at {sentence}" for name, sentence in doctor.kept(summary).items()]


# ------------------------------------------------------------------------------------------------ charts


def evaluation(e: dict, difficulty) -> dict:
    """One line of evals.jsonl with its 95% intervals: [mean, low, high, n], or None where nothing was measured.

    Old files say "tier": 6 where newer ones say "tasks": "tier 6" and "trained": true.
    """
    update, stage, exact, reward = e.get("update") or 0, e.get("stage", ""), numbers(e.get("exact")), numbers(e.get("reward"))
    share, mean = metrics.proportion(sum(exact), len(exact)), metrics.mean(reward)
    return {
        "update": update, "stage": stage, "name": STAGES.get(stage, f"update {update}"),
        "tasks": str(e.get("tasks") or f"tier {e.get('tier', '?')}"), "trained": bool(e.get("trained", e.get("tier") == difficulty)),
        "exact": [share.mean, share.low, share.high, share.n] if exact else None,
        "reward": [mean.mean, mean.low, mean.high, mean.n] if reward else None,
    }  # fmt: skip


def chart(title: str, series: list[dict], unit: str = "", top: float | None = None, **more) -> list[dict]:
    """A chart for the page, in a list; an empty list if no series has a number. top is the end of the axis if it is known.

    A series is {"name", "points": [[update, value, low, high], …]} and may be "plain" (drawn thin); low and high may be None.
    """
    series = [s for s in series if any(point[1] is not None for point in s["points"])]
    values = numbers(v for s in series for point in s["points"] for v in point[1:])
    low, high = min([0.0, *values]), top or 1.05 * max([0.0, *values]) or 1.0
    return [{"title": title, "unit": unit, "low": low, "high": high, "series": series, **more}] if series else []


def eval_charts(results: list[dict]) -> list[dict]:
    """Held-out tasks: the share of exact answers and the mean reward, with bands."""

    def series(key: str, factor: float, digits: int) -> list[dict]:  # rounded here, so that the page and report.md agree
        found = sorted({r["tasks"]: r["trained"] for r in results}.items(), key=lambda item: not item[1])
        return [
            {"name": tasks, "plain": not trained,
             "points": [[r["update"], *(round(factor * v, digits) for v in r[key][:3])] for r in results if r["tasks"] == tasks and r[key]]}
            for tasks, trained in found
        ]  # fmt: skip

    n = max((r[key][3] for r in results for key in ("exact", "reward") if r[key]), default=0)
    same = all(r["exact"] and r["reward"] and r["exact"][0] == r["reward"][0] for r in results)
    exact = chart(f"held-out, exactly right{' (= mean reward)' if same else ''}, n={n}", series("exact", 100, 1), "%", 100)
    return exact if same and exact else exact + chart(f"held-out, mean reward, n={n}", series("reward", 1, 3))


def part_charts(evals: list[dict]) -> list[dict]:
    """What the reward of the trained held-out tasks is made of, each part before its weight."""
    mine, colours = [e for e in evals if e.get("trained")], (0, 3, 2, 1)
    point = lambda e, i: [e["update"], *(round(v, 3) for v in (i.mean, i.low, i.high))]
    series = [
        {"name": name, "colour": c, "points": [point(e, metrics.mean(numbers(e[name]))) for e in mine if e.get(name)]}
        for name, c in zip(compare.PARTS, colours)
    ]
    return chart("held-out, the parts of the reward", series, "", 1.0)


def stack(layers: list[dict]) -> list[dict]:
    """Points whose low and high are a layer's edges."""
    floor = dict.fromkeys((point[0] for layer in layers for point in layer["points"]), 0.0)
    for point in (point for layer in layers for point in layer["points"]):
        point[2:] = floor[point[0]], floor[point[0]] + (point[1] or 0.0)
        floor[point[0]] = point[3]
    return layers


def train_charts(lines: list[dict]) -> list[dict]:
    """metrics.jsonl: reward, habits and length, then small ones about the health of the optimization."""

    def series(key: str, name: str = "", factor: float = 1.0, low: str = "", high: str = "") -> dict:
        scaled = lambda line, k: None if line.get(k) is None else factor * line[k]
        return {"name": name or key, "points": [[x, *(scaled(line, k) for k in (key, low, high))] for x, line in zip(updates, lines)]}

    updates = [line.get("update") or i + 1 for i, line in enumerate(lines)]
    recent = [numbers(line.get("reward") for line in lines[max(0, i - 9) : i + 1]) for i in range(len(lines))]
    rolling = [[x, float(np.mean(r)) if r else None, None, None] for x, r in zip(updates, recent)]
    reward = {**series("reward", "each update", 1.0, "reward_low", "reward_high"), "plain": True, "colour": 4}
    habits = dict.fromkeys(key for line in lines for key in line if key.startswith("habit_"))
    out = chart("training reward", [{"name": "mean of the last 10", "points": rolling}, reward])
    out += chart("habits of the samples", stack([series(h, h[6:], 100) for h in habits]), "%", 100, stacked=True)
    if any(key.startswith("used_") for line in lines for key in line):
        shares, tools = [behaviour.tool_shares(line) for line in lines], list(behaviour.COLOURS)
        colour = lambda tool: f"tool-{tool}" if tool in tools else 4
        layers = [{"name": tool, "colour": colour(tool), "points": [[x, 100 * float(np.nan_to_num(s.get(tool, 0.0))), None, None] for x, s in zip(updates, shares)]}
                  for tool in dict.fromkeys(tool for s in shares for tool in s)]  # fmt: skip
        out += chart("tool use of the samples, of the turns", stack(layers), "%", 100, stacked=True)
    small = {
        "reply length": ("reply_tokens", "tokens", None), "entropy": ("entropy", "nats", None),
        "groups with signal": ("groups_with_signal", "", 1.0), "gradient norm": ("grad_norm", "", None),
        "turns used": ("turns_used", "", None), "errors, of the turns": ("error_rate", "", None),
    }  # fmt: skip
    for title, (key, unit, top) in small.items():
        out += chart(title, [series(key)], unit, top, small=True)
    return out


# ------------------------------------------------------------------------------------------------ episodes


def index_episodes(episodes: list[dict], env: str | None = None) -> tuple[list[dict], list[dict], list[dict], list[dict]]:
    """Tasks, stops (the moments at which episodes were saved, in order), a short line an episode, and the episodes' bodies.

    Two episodes are of the same task if their seed and their prompt agree: several kinds of task may share their seeds.
    """
    # Old files have no "source" and hold rollouts only.
    moment = lambda e: ("eval" if e.get("source") == "eval" else "rollout", e.get("update") or 0, e.get("stage") or "")
    order = sorted({moment(e) for e in episodes}, key=lambda m: (m[1], ORDER.index(m[2]) if m[2] in ORDER else 3, m[0]))
    stops, tasks = {m: i for i, m in enumerate(order)}, {}
    index, bodies = [], []
    for e in episodes:
        opening = [m for m in e.get("messages") or [] if m.get("role") == "user"]
        prompt = str(opening[0].get("content")) if opening else ""
        key = (moment(e)[0], e.get("tasks"), e.get("seed"), e.get("group") if e.get("seed") is None else None, prompt)
        index.append({
            "at": stops[moment(e)], "task": tasks.setdefault(key, len(tasks)), "member": e.get("member", 0),
            "reward": e.get("reward"), "advantage": e.get("advantage"), "tokens": e.get("reply_tokens"), "end": e.get("stop_reason") or "",
        })  # fmt: skip
        body = {key: e.get(key) for key in ("components", "error", "policy_version")}
        body |= {"segments": e["segments"]} if e.get("segments") else {"messages": e.get("messages") or []}
        body |= {"calls": behaviour.calls_of(e.get("messages") or [])} if env == "swarm" else {}
        bodies.append(body)
    named = lambda update, stage: STAGES.get(
        stage, f"update {update}" + {"final": " (final)", "eval_only": " (evaluated later)"}.get(stage, "")
    )
    shown = [{"label": label or "", "seed": seed, "prompt": title_of(env, seed, prompt)[:160]} for _, label, seed, _, prompt in tasks]
    moments = [{"source": source, "u": u, "stage": stage, "key": f"{u}.{stage}", "name": named(u, stage)} for source, u, stage in order]
    return shown, moments, index, bodies


def title_of(env: str | None, seed: int | None, prompt: str) -> str:
    """What tells a task from the others. In swarm all prompts begin with the same rules: the scenario's number and its first state do."""
    state = prompt.partition("\n# step ")[2].partition(": ")[2]
    return f"scenario {seed % 1_000_000_000}: {state}" if env == "swarm" and seed is not None and state else prompt


def scale(episodes: list[dict]) -> dict:
    """What the colours range over, the same on the whole page: all rewards, all advantages, the ratios that 99% stay within."""
    rewards = numbers(e.get("reward") for e in episodes)
    advantages = np.abs(numbers(e.get("advantage") for e in episodes))
    ratios = [r for e in episodes for s in e.get("segments") or [] for r in s.get("ratios") or [] if r is not None and r > 0]
    return {
        "reward": [min([0.0, *rewards]), max([1e-9, *rewards])],
        "advantage": float(advantages.max(initial=0)) or 1.0,
        "ratio": max(1e-3, float(np.quantile(np.abs(np.log(ratios)), 0.99))) if ratios else None,
    }


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python -m bookkeeping.viewer runs/NAME   (a run folder; the page is written to report.html in it)")
    with records.foreign(sys.argv[1]):
        print(write_html(Path(sys.argv[1])))
