"""A run as a page: report.html, every curve and every token, in one file that opens from disk.

    python -m bookkeeping.viewer runs/NAME

    summary.json, metrics.jsonl, evals.jsonl, episodes.jsonl
        -> bookkeeping/viewer.html with the numbers filled in -> runs/NAME/report.html

All counting happens here, with the same intervals as in the report; the page only draws. It needs
no network: the content security policy at its top forbids it to load anything. What a model said is
hostile text, so it is never read as HTML. Every `<` is written as `\\u003c`, so that nothing in a
reply can end the script it is stored in, and the page inserts text as text.

A run folder of tens of megabytes opens at once, because the page parses an episode only when it is
looked at: `run` below has a short entry per episode, and `bodies` has the rest, a line of JSON for
each. The bodies are packed (gzip, base64), and the browser unpacks them. An episode of 25 turns
with the numbers of every token would otherwise be 60 kB, and a run saves some two hundred.
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
from bookkeeping import records, tables
from metrics import Interval

TEMPLATE = Path(__file__).parent / "viewer.html"
# What the page calls the evaluations around SFT.
STAGES = {"before": "before SFT", "after_sft": "after SFT"}
# The order in time of stages that have the same update; "" is a rollout.
ORDER = ("before", "after_sft", "", "train", "final", "eval_only")


def write_html(folder: Path) -> Path:
    """Write folder/report.html and return its path. ValueError if the folder contains no run."""
    folder = Path(folder)
    run, bodies = collect(folder)
    template = TEMPLATE.read_text(encoding="utf-8")
    script = re.search("<script>(.*?)</script>", template, re.DOTALL)[1]
    compact = {"allow_nan": False, "separators": (",", ":")}
    fill = {
        "title": html.escape(f"{run['name']}: a picoswarm run"),
        # Content security: this script runs, and no other.
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "run": json.dumps(run, **compact).replace("<", "\\u003c"),
        "episodes": pack("\n".join(json.dumps(body, **compact) for body in bodies)),
    }
    # One pass over the template: a placeholder's name inside a reply is not filled in again.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], template)
    records.write_whole(folder / "report.html", page)
    return folder / "report.html"


def pack(text: str) -> str:
    """gzip and base64, in which there is no '<'; the same text gives the same bytes."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def collect(folder: Path) -> tuple[dict, list[dict]]:
    """(run: header, charts, an index of the episodes; the episodes' bodies in the same order)."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; give a run folder, such as runs/NAME")
    names = ("metrics", "evals", "episodes")
    lines, evals, episodes = (records.lines(folder / f"{x}.jsonl", for_page=True) for x in names)
    summary, config = read_json(folder / "summary.json"), read_json(folder / "config.json")
    if not (summary or lines or evals or episodes):
        files = "summary.json, metrics.jsonl, evals.jsonl or episodes.jsonl"
        raise ValueError(f"{folder} holds no {files}, so it is no run folder")
    config = summary.get("config") or config
    env = summary.get("env") or config.get("env")
    during = [e for e in evals if e.get("stage") != "eval_only"]
    results = [evaluation(e) for e in during]
    tasks, stops, index, bodies = index_episodes(episodes, env)
    charts = eval_charts(results)
    sections = tables.eval_only([e for e in evals if e.get("stage") == "eval_only"])
    if env == "swarm":
        from bookkeeping import behaviour

        charts += part_charts(during)
        sections = behaviour.sections(config, evals, episodes) + sections
    charts += train_charts(lines)
    for table in sections:
        if place := table.pop("episode", None):
            table["view"] = address(place, episodes, index)
    updates = [point[0] for chart in charts for s in chart["series"] for point in s["points"]]
    run = {
        "name": folder.resolve().name,
        "facts": facts(summary, config, lines),
        "settings": {name: str(value) for name, value in config.items()},
        "headline": headline(results),
        "notes": notes(summary),
        "charts": charts,
        "tables": sections,
        "tasks": tasks,
        "stops": stops,
        "episodes": index,
        "scale": scale(episodes),
        "last": max([1, *(stop["u"] for stop in stops), *updates]),
    }
    return run, bodies


def read_json(path: Path) -> dict:
    """A run that is still going has no summary.json: {}."""
    return records.read(path, nan=False) if path.exists() else {}


def address(place: dict, episodes: list[dict], index: list[dict]) -> str:
    """Where on the page the episode is that a table is about."""
    place = place | {"source": "eval"}
    is_it = lambda e: all(e.get(name) == value for name, value in place.items())
    at = next(i for i, e in enumerate(episodes) if is_it(e))
    when = f"u={place['update']}&stage={place['stage']}"
    return f"source=eval&{when}&task={index[at]['task']}&against="


def numbers(values) -> list[float]:
    """Without None: an episode in error has no reward."""
    return [float(v) for v in values or [] if v is not None]


# ------------------------------------------------------------------------------------------ header


def facts(summary: dict, config: dict, lines: list[dict]) -> list[list[str]]:
    """[label, value] pairs for the top of the page, as far as they are known."""
    machine = summary.get("machine") or {}
    seconds, peak = (summary.get("seconds") or {}).get("total"), summary.get("peak_rss_gb")
    pairs = {
        "environment": summary.get("env") or config.get("env"),
        "model": summary.get("model") or config.get("model"),
        "seed": summary.get("seed", config.get("seed")),
        "updates": summary.get("updates", lines[-1].get("update") if lines else None),
        "time": f"{seconds / 60:.1f} minutes" if seconds is not None else None,
        "machine": machine.get("device"),
        "peak memory": f"{peak:.2f} GB" if peak else None,
        "state": None if summary else "not finished: there is no summary.json yet",
    }
    return [[label, str(value)] for label, value in pairs.items() if value not in (None, "")]


def headline(results: list[dict]) -> dict:
    """Before SFT, after SFT and the last evaluation: a row per task set, the trained one first."""
    last = max((r["update"] for r in results), default=0)
    exact = any(r["exact"] for r in results)
    moments = {r["name"]: None for r in results if r["stage"] in STAGES or r["update"] == last}
    rows = {}
    for r in results:
        row = {"tasks": r["tasks"], "trained": r["trained"], "cells": dict(moments)}
        row = rows.setdefault(r["tasks"], row)
        if r["name"] in moments:
            row["cells"][r["name"]] = headline_cell(r, exact)
    return {
        "what": "exact" if exact else "mean reward",
        "moments": list(moments),
        "rows": sorted(rows.values(), key=lambda row: not row["trained"]),
    }


def headline_cell(r: dict, exact: bool) -> list[list[str]]:
    """[[number, interval]] of an evaluation: exact answers, and the reward if it is another."""
    cell = []
    if r["exact"]:
        cell.append(r["exact"].percent().split(" ", 1))
    if r["reward"] and (not r["exact"] or r["reward"].mean != r["exact"].mean):
        number, interval = r["reward"].text().split(" ", 1)
        cell.append([f"reward {number}" if exact else number, interval])
    return cell


def notes(summary: dict) -> list[str]:
    """Sentences under the headline."""
    gain, reward = (summary.get(name) or {} for name in ("gain", "gain_reward"))
    told = []
    if gain.get("mean") is not None:
        told.append(f"{Interval(**gain).points()} in exact answers")
        if reward.get("mean") not in (None, gain["mean"]):
            told.append(f"{Interval(**reward).signed()} in reward")
    elif reward.get("mean") is not None:  # an environment without exact answers
        told.append(f"{Interval(**reward).signed()} in mean reward")
    n = (gain or reward).get("n", "")
    paired = f"GRPO over SFT on the same {n} tasks: {', '.join(told)}, paired by task."
    warnings = [f"{name.upper()} at {text}" for name, text in summary.get("warnings", {}).items()]
    return [paired, *warnings] if told else warnings


# ------------------------------------------------------------------------------------------ charts


def evaluation(e: dict) -> dict:
    """One line of evals.jsonl with its 95% intervals; None where nothing was measured."""
    update, stage = e.get("update") or 0, e.get("stage", "")
    exact, reward = numbers(e.get("exact")), numbers(e.get("reward"))
    return {
        "update": update,
        "stage": stage,
        "name": STAGES.get(stage, f"update {update}"),
        "tasks": str(e.get("tasks") or "?"),
        "trained": bool(e.get("trained")),
        "exact": metrics.mean(exact) if exact else None,
        "reward": metrics.mean(reward) if reward else None,
    }


def chart(
    title: str, series: list[dict], unit: str = "", top: float | None = None, **more
) -> list[dict]:
    """A chart for the page, in a list; an empty list if no series has a number.

    top: the end of the axis if it is known. A series is {"name", "points": [[update, value, low,
    high], …]} and may be "plain" (drawn thin); low and high may be None.
    """
    series = [s for s in series if any(point[1] is not None for point in s["points"])]
    values = numbers(v for s in series for point in s["points"] for v in point[1:])
    low, high = min([0.0, *values]), top or 1.05 * max([0.0, *values]) or 1.0
    if not series:
        return []
    return [{"title": title, "unit": unit, "low": low, "high": high, "series": series, **more}]


def point(update: int, i: Interval, factor: float = 1, digits: int = 3) -> list:
    """Rounded here, so that the page and report.md agree."""
    return [update, *(round(factor * v, digits) for v in (i.mean, i.low, i.high))]


def eval_charts(results: list[dict]) -> list[dict]:
    """Development tasks: the share of exact answers and the mean reward, with bands."""
    kinds = sorted(
        {r["tasks"]: r["trained"] for r in results}.items(), key=lambda kind: not kind[1]
    )

    def series(key: str, factor: float, digits: int) -> list[dict]:
        out = []
        for tasks, trained in kinds:
            mine = [r for r in results if r["tasks"] == tasks and r[key]]
            points = [point(r["update"], r[key], factor, digits) for r in mine]
            out.append({"name": tasks, "plain": not trained, "points": points})
        return out

    n = max((r[key].n for r in results for key in ("exact", "reward") if r[key]), default=0)
    same = all(r["exact"] and r["reward"] and r["exact"].mean == r["reward"].mean for r in results)
    title = f"development, exactly right{' (= mean reward)' if same else ''}, n={n}"
    exact = chart(title, series("exact", 100, 1), "%", 100)
    if same and exact:
        return exact
    return exact + chart(f"development, mean reward, n={n}", series("reward", 1, 3))


def part_charts(evals: list[dict]) -> list[dict]:
    """What the reward of the trained development tasks is made of, each part before its weight."""
    trained, colours, series = [e for e in evals if e.get("trained")], (0, 3, 2, 1), []
    for name, colour in zip(tables.PARTS, colours):
        mine = [e for e in trained if e.get(name)]
        points = [point(e["update"], metrics.mean(numbers(e[name]))) for e in mine]
        series.append({"name": name, "colour": colour, "points": points})
    return chart("development, the parts of the reward", series, "", 1.0)


def stack(layers: list[dict]) -> list[dict]:
    """Points whose low and high are a layer's edges."""
    floor = dict.fromkeys((point[0] for layer in layers for point in layer["points"]), 0.0)
    for point in (point for layer in layers for point in layer["points"]):
        point[2:] = floor[point[0]], floor[point[0]] + (point[1] or 0.0)
        floor[point[0]] = point[3]
    return layers


def train_charts(lines: list[dict]) -> list[dict]:
    """metrics.jsonl: reward, habits and length, then small ones about the optimization's health."""
    updates = [line.get("update") or i for i, line in enumerate(lines, 1)]

    def series(key: str, factor: float = 1.0, ends: tuple = ("", "")) -> list[list]:
        scaled = lambda value: None if value is None else factor * value
        row = lambda line: [scaled(line.get(name)) for name in (key, *ends)]
        return [[x, *row(line)] for x, line in zip(updates, lines)]

    rolling = []
    for i, x in enumerate(updates):
        recent = numbers(line.get("reward") for line in lines[max(0, i - 9) : i + 1])
        rolling.append([x, float(np.mean(recent)) if recent else None, None, None])
    reward = {"name": "each update", "points": series("reward", 1.0, ("reward_low", "reward_high"))}
    thin = {"plain": True, "colour": 4}
    out = chart(
        "training reward", [{"name": "mean of the last 10", "points": rolling}, reward | thin]
    )
    habits = dict.fromkeys(key for line in lines for key in line if key.startswith("habit_"))
    layers = [{"name": h.removeprefix("habit_"), "points": series(h, 100)} for h in habits]
    out += chart("habits of the samples", stack(layers), "%", 100, stacked=True)
    if any(key.startswith("used_") for line in lines for key in line):
        out += tool_chart(updates, lines)
    small = {
        "reply length": ("reply_tokens", "tokens", None),
        "entropy": ("entropy", "nats", None),
        "groups with signal": ("groups_with_signal", "", 1.0),
        "gradient norm": ("grad_norm", "", None),
        "turns used": ("turns_used", "", None),
        "errors, of the turns": ("error_rate", "", None),
    }
    for title, (key, unit, top) in small.items():
        out += chart(title, [{"name": key, "points": series(key)}], unit, top, small=True)
    return out


def tool_chart(updates: list[int], lines: list[dict]) -> list[dict]:
    """What the sampled episodes of swarm used their turns for."""
    from bookkeeping import behaviour

    shares, layers = [behaviour.tool_shares(line) for line in lines], []
    for tool in dict.fromkeys(tool for s in shares for tool in s):
        percent = [100 * float(np.nan_to_num(s.get(tool, 0.0))) for s in shares]
        points = [[x, y, None, None] for x, y in zip(updates, percent)]
        colour = f"tool-{tool}" if tool in behaviour.COLOURS else 4
        layers.append({"name": tool, "colour": colour, "points": points})
    title = "tool use of the samples, of the turns"
    return chart(title, stack(layers), "%", 100, stacked=True)


# ---------------------------------------------------------------------------------------- episodes


def index_episodes(episodes: list[dict], env: str | None = None) -> tuple:
    """(tasks, stops, index, bodies), each a list of dicts.

    stops: the moments at which episodes were saved, in order. index: a short entry per episode.
    bodies: the rest of it. Two episodes are of the same task if their seed and their prompt agree:
    several kinds of task may share their seeds.
    """
    source = lambda e: "eval" if e.get("source") == "eval" else "rollout"
    moment = lambda e: (source(e), e.get("update") or 0, e.get("stage") or "")
    stage_order = lambda stage: ORDER.index(stage) if stage in ORDER else ORDER.index("train")
    order = sorted({moment(e) for e in episodes}, key=lambda m: (m[1], stage_order(m[2]), m[0]))
    stops, tasks, index, bodies = {m: i for i, m in enumerate(order)}, {}, [], []
    for e in episodes:
        messages = e.get("messages") or []
        opening = next((m for m in messages if m.get("role") == "user"), None)
        prompt = str(opening.get("content")) if opening else ""
        task = (source(e), e.get("tasks"), e.get("seed"), prompt)
        index.append({
            "at": stops[moment(e)], "task": tasks.setdefault(task, len(tasks)),
            "member": e.get("member", 0), "reward": e.get("reward"),
            "advantage": e.get("advantage"), "tokens": e.get("reply_tokens"),
            "end": e.get("stop_reason") or "",
        })  # fmt: skip
        body = {name: e.get(name) for name in ("components", "error", "policy_version")}
        body |= {"segments": e["segments"]} if e.get("segments") else {"messages": messages}
        if env == "swarm":
            from bookkeeping import behaviour

            body["calls"] = behaviour.calls_of(messages)
        bodies.append(body)
    shown = [
        {"label": label or "", "seed": seed, "prompt": title_of(env, seed, prompt)[:160]}
        for _, label, seed, prompt in tasks
    ]
    ending = {"final": " (final)", "eval_only": " (evaluated later)"}
    moments = []
    for source_, u, stage in order:
        name = STAGES.get(stage, f"update {u}{ending.get(stage, '')}")
        stop = {"source": source_, "u": u, "stage": stage, "key": f"{u}.{stage}", "name": name}
        moments.append(stop)
    return shown, moments, index, bodies


def title_of(env: str | None, seed: int | None, prompt: str) -> str:
    """What tells a task from the others.

    In swarm every prompt begins with the same rules: take the scenario's number and first state.
    """
    state = prompt.partition("\n# step ")[2].partition(": ")[2]
    if env == "swarm" and seed is not None and state:
        return f"scenario {seed % 1_000_000_000}: {state}"
    return prompt


def scale(episodes: list[dict]) -> dict:
    """What the colours range over, the same on the whole page.

    All rewards, all advantages, and the importance ratios that 99% of the tokens stay within.
    """
    rewards = numbers(e.get("reward") for e in episodes)
    advantages = np.abs(numbers(e.get("advantage") for e in episodes))
    segments = [segment for e in episodes for segment in e.get("segments") or []]
    ratios = [r for segment in segments for r in numbers(segment.get("ratios")) if r > 0]
    widest = max(1e-3, float(np.quantile(np.abs(np.log(ratios)), 0.99))) if ratios else None
    return {
        "reward": [min([0.0, *rewards]), max([1e-9, *rewards])],
        "advantage": float(advantages.max(initial=0)) or 1.0,
        "ratio": widest,
    }


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        usage = "usage: python -m bookkeeping.viewer runs/NAME"
        raise SystemExit(f"{usage}   (a run folder; the page is written to report.html in it)")
    with records.foreign(sys.argv[1]):
        print(write_html(Path(sys.argv[1])))
