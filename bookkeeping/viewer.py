"""A run as a page: report.html, every curve and every token, in one file that opens from disk.

    python -m bookkeeping.report runs/NAME

    the numbers of bookkeeping/report.py, episodes.jsonl
        -> bookkeeping/viewer.html with the numbers filled in -> runs/NAME/report.html

Nothing is counted here or on the page; it only draws. It needs no network: the content security
policy at its top forbids it to load anything. What a model said is hostile text, so it is never
read as HTML. Every `<` is written as `\\u003c`, so that nothing in a reply can end the script it is
stored in, and the page inserts text as text.

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
from pathlib import Path

import numpy as np

from bookkeeping import records, tables

TEMPLATE = Path(__file__).parent / "viewer.html"
# The order in time of stages that have the same update; "" is a rollout.
ORDER = ("before", "after_sft", "", "train", "final", "eval_only")


def write(folder: Path, run: dict, episodes: list[dict]) -> None:
    """folder/report.html. run: report.collect(folder)."""
    tasks, stops, index, bodies = index_episodes(episodes, run["env"])
    for table in run["tables"]:  # one that is about an episode leads there
        if "episode" in table:
            e = index[table["episode"]]
            place = f"u={stops[e['at']]['u']}&stage={stops[e['at']]['stage']}"
            table["view"] = f"source=eval&{place}&task={e['task']}&against="
    updates = [point[0] for c in run["charts"] for s in c["series"] for point in s["points"]]
    run = run | {"tasks": tasks, "stops": stops, "episodes": index, "scale": scale(episodes)}
    run["last"] = max([1, *(stop["u"] for stop in stops), *updates])
    template = TEMPLATE.read_text(encoding="utf-8")
    script = re.search("<script>(.*?)</script>", template, re.DOTALL)[1]
    compact = {"allow_nan": False, "separators": (",", ":")}
    text = "\n".join(json.dumps(body, **compact) for body in bodies)
    fill = {
        "title": html.escape(f"{run['name']}: a picoswarm run"),
        # Content security: this script runs, and no other.
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "run": json.dumps(run, **compact).replace("<", "\\u003c"),
        # There is no '<' in base64. The same text gives the same bytes.
        "episodes": base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode(),
    }
    # One pass over the template: a placeholder's name inside a reply is not filled in again.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], template)
    records.write_whole(folder / "report.html", page)


def moment(e: dict) -> tuple:
    """When an episode was played: in order of time if compared."""
    stage = e.get("stage") or ""
    update = -1 if stage == "before" else e.get("update") or 0  # a place on the curves
    source = "eval" if e.get("source") == "eval" else "rollout"
    return update, ORDER.index(stage if stage in ORDER else "train"), source, stage


def index_episodes(episodes: list[dict], env: str) -> tuple:
    """(tasks, stops, index, bodies), each a list of dicts.

    stops: the moments at which episodes were saved, in order. index: a short entry per episode.
    bodies: the rest of it. Two episodes are of the same task if their seed and their prompt agree:
    several kinds of task may share their seeds.
    """
    order, tasks, index, bodies = sorted({moment(e) for e in episodes}), {}, [], []
    for e in episodes:
        messages, when = e.get("messages") or [], moment(e)
        prompt = next((str(m.get("content")) for m in messages if m.get("role") == "user"), "")
        task = (when[2], e.get("tasks"), e.get("seed"), prompt)
        index.append({
            "at": order.index(when), "task": tasks.setdefault(task, len(tasks)),
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
    shown, stops = [], []
    for _, label, seed, prompt in tasks:
        title = title_of(env, seed, prompt)[:160]
        shown.append({"label": label or "", "seed": seed, "prompt": title})
    for update, _, source, stage in order:
        name = tables.moment({"update": update, "stage": stage})
        key = f"{update}.{stage}"
        stops.append({"source": source, "u": update, "stage": stage, "key": key, "name": name})
    return shown, stops, index, bodies


def title_of(env: str, seed: int | None, prompt: str) -> str:
    """What tells a task from the others.

    In swarm every prompt begins with the same rules: take the scenario's number and first state.
    """
    state = prompt.partition("\n# step ")[2].partition(": ")[2]
    if env == "swarm" and seed is not None and state:
        return f"scenario {seed % 1_000_000_000}: {state}"
    return prompt


def numbers(values) -> list[float]:
    """Without None: an episode in error has no reward."""
    return [float(v) for v in values or [] if v is not None]


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
