"""What a run leaves for a person: summary.json, report.md, curves.png and report.html.

Everything is computed from the run folder alone, so a report can be written again at any time, and
report.html while a run is still going:

    python -m bookkeeping.report runs/NAME
    python -m bookkeeping.report runs/NAME before 40    swarm: the behaviour of any two evaluations

    summary.json, metrics.jsonl, evals.jsonl -> collect -> one dict of facts, curves (bookkeeping/
        curves.py) and sections (bookkeeping/tables.py) -> report.md, curves.png, and with
        episodes.jsonl report.html

It has the shape of a lab's training report: config, SFT warm-up, evaluations, trajectory,
observations, curves. The observations are computed too; nobody writes one by hand. A run of swarm
also gets the sections of bookkeeping/behaviour.py, which is loaded only then: training letters
loads no swarm.

report.html is every curve and every token in one file that opens from disk. The page only draws;
nothing is counted there. It needs no network: the content security policy at its top forbids it to
load anything. What a model said is hostile text, so it is never read as HTML: every `<` is written
as `\\u003c`, so that nothing in a reply can end the script it is stored in, and the page inserts
text as text. It opens at once, because it parses an episode only when that is looked at: `run` has
a short entry per episode, and `episodes` has the rest, a line of JSON each, packed (gzip, base64).
An episode of 25 turns with the numbers of every token would otherwise be 60 kB.
"""

import base64
import gzip
import hashlib
import html
import json
import re
from pathlib import Path

import numpy as np
import tyro
from tyro.conf import Positional

import metrics
from bookkeeping import curves, doctor, records, tables
from metrics import Interval

STAGES = ("before", "after_sft", "final")  # evaluations that are results; the others are a curve
TRAJECTORY = ("exact", "payoff", "quality", "diversity", "reputation", "error_rate", "format")
HEALTH = ("reply_tokens", "groups_with_signal", "deviation", "entropy", "grad_norm")
TEMPLATE = Path(__file__).parent / "viewer.html"
# The order in time of stages that have the same update; "" is a rollout.
ORDER = ("before", "after_sft", "", "train", "final", "eval_only")


def summarize_run(folder: Path, config: dict, state: dict, machine: dict) -> dict:
    """summary.json: final numbers with 95% intervals.

    gain: GRPO over SFT on the trained tasks, paired by task. An environment without exact answers
    (swarm) has no exact, low, high and gain; every part of its reward has an interval instead.
    """
    evals = [e for e in records.lines(folder / "evals.jsonl") if e["stage"] in STAGES]
    evals, results = records.with_exact(evals), {}
    for e in evals:
        results.setdefault(e["tasks"], {})[e["stage"]] = result_of(e)
    ends = [e for e in evals if e["trained"] and e["stage"] != "before"]
    sft, final = records.same_tasks(*ends)
    gains = {"gain": "exact", "gain_reward": "reward"}
    return {
        "env": config["env"],
        "model": config["model"] if config["model"] != "auto" else machine["model"],
        "seed": config["seed"],
        "trained": final["tasks"],
        "updates": state["update"],
        "eval": results,
        **{k: metrics.gain(sft[v], final[v]).dict() for k, v in gains.items() if v in final},
        "sft": state["sft"],
        "warnings": state["warnings"],
        "seconds": {name: round(value, 2) for name, value in state["seconds"].items()},
        "tokens": state["tokens"],
        "peak_rss_gb": machine["peak_rss_gb"],
        "machine": machine,
        "config": config,
    }


def result_of(e: dict) -> dict:
    """One evaluation in summary.json; `shown` writes it."""
    reward, result = metrics.mean(e["reward"]), {"n": len(e["reward"])}
    if "exact" in e:
        exact = metrics.mean(e["exact"])
        result |= {"exact": exact.mean, "low": exact.low, "high": exact.high}
    result |= {"reward": reward.mean, "reward_low": reward.low, "reward_high": reward.high}
    for name in ("format", "reply_tokens", "truncated"):
        if name in e:
            result[name] = float(np.mean(e[name]))
    if "exact" not in e:
        mean = lambda name: tables.average(tables.values(e, name)).dict()
        result["components"] = {name: mean(name) for name in tables.measures(e)}
    return result


def shown(result: dict) -> list[str]:
    """Exact answers, and the mean reward if it is another number."""
    of = lambda *names: Interval(*(result[name] for name in names), result["n"])
    reward = of("reward", "reward_low", "reward_high").text()
    if "exact" not in result:
        return [reward]
    exact = of("exact", "low", "high").percent()
    return [exact] if result["exact"] == result["reward"] else [exact, f"reward {reward}"]


# ------------------------------------------------------------------------------ the numbers, once


def collect(folder: Path, which: tuple[str, str] | None = None) -> tuple[dict, list[dict]]:
    """(everything that the three pages of a run show; its episodes).

    which: the two evaluations of a swarm run to compare, see behaviour.find.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; give a run folder, such as runs/NAME")
    names = ("metrics", "evals", "episodes")
    lines, evals, episodes = (records.lines(folder / f"{n}.jsonl", for_page=True) for n in names)
    lines = [{k: v for k, v in line.items() if v is not None} for line in lines]
    evals = records.with_exact(evals)
    found = [folder / name for name in ("config.json", "summary.json")]  # at the end it has both
    config, summary = (records.read(f, nan=False) if f.exists() else {} for f in found)
    if not (summary or lines or evals or episodes):
        files = "summary.json, metrics.jsonl, evals.jsonl or episodes.jsonl"
        raise ValueError(f"{folder} holds no {files}, so it is no run folder")
    summary = {"config": config, "env": config.get("env", "")} | summary
    config, env = summary["config"], summary["env"]
    during = [e for e in evals if e["stage"] != "eval_only"]  # the others get their own table
    later = [e for e in evals if e["stage"] == "eval_only"]
    told = observations(summary, lines, during)
    sections = [
        *tables.evaluations("Evaluation", during, env),
        *trajectory(lines, during, env),
        tables.section("Observations (computed)", told, listed=True),
    ]
    if env == "swarm":
        from bookkeeping import behaviour

        sections += behaviour.sections(evals, episodes, which)
    given = (summary.get("machine") or {}) | config
    run = {
        "name": folder.resolve().name,
        "env": env,
        "api": "api" in summary,
        "facts": facts(summary, lines),
        "settings": {name: str(v) for name, v in given.items() if v not in ("", None)},
        "headline": headline(during),
        "notes": notes(summary),
        "charts": curves.of_evaluations(during, env) + curves.of_updates(lines, env),
        "tables": sections + tables.evaluations("Evaluated later (--eval-only)", later, env),
    }
    return run, episodes


def facts(summary: dict, lines: list[dict]) -> list[list[str]]:
    """[label, value] pairs, as far as they are known."""
    config, machine, sft = (summary.get(name) or {} for name in ("config", "machine", "sft"))
    seconds, peak = (summary.get("seconds") or {}).get("total"), summary.get("peak_rss_gb")
    tokens = [f"{count:,} {name}" for name, count in (summary.get("tokens") or {}).items()]
    pairs = {
        "environment": summary["env"],
        "trained on": summary.get("trained"),
        "model": summary.get("model") or config.get("model"),
        "seed": summary.get("seed", config.get("seed")),
        "SFT loss": f"{sft['loss_first']:.2f} → {sft['loss_last']:.2f}" if sft else None,
        "updates": summary.get("updates", lines[-1]["update"] if lines else None),
        "time": f"{seconds / 60:.1f} minutes" if seconds is not None else None,
        "machine": machine.get("device"),
        "peak memory": f"{peak:.2f} GB" if peak else None,
        "tokens": ", ".join(tokens),
        "state": None if "updates" in summary else "not finished: there is no summary.json yet",
    }
    return [[label, str(value)] for label, value in pairs.items() if value not in (None, "")]


def headline(evals: list[dict]) -> dict:
    """Before SFT, after SFT and the last evaluation: a row per task set, the trained one first."""
    last = max((e["update"] for e in evals), default=0)
    ends = [e for e in evals if e["stage"] in STAGES[:2] or e["update"] == last]
    rows: dict = {}
    for e in sorted(ends, key=lambda e: not e["trained"]):
        row = {"tasks": e["tasks"], "trained": e["trained"], "cells": {}}
        rows.setdefault(e["tasks"], row)["cells"][tables.moment(e)] = shown(result_of(e))
    return {
        "what": "exact answers" if any("exact" in e for e in evals) else "mean reward",
        "moments": list(dict.fromkeys(tables.moment(e) for e in ends)),
        "rows": list(rows.values()),
    }


def notes(summary: dict) -> list[str]:
    """Sentences under the headline: the gain, and what the doctor warned of."""
    exact, reward, told = summary.get("gain"), summary.get("gain_reward"), []
    gains = [("exact answers", exact, Interval.points)]
    if reward != exact:
        gains.append(("mean reward", reward, Interval.signed))
    for what, numbers, form in gains:
        if numbers:
            gain = Interval(**numbers)
            lost = "lost" if gain.high < 0 else "neither gained nor lost measurably"
            verdict = "gained" if gain.low > 0 else lost
            size = f"{form(gain)}, n={gain.n}, paired by task"
            told.append(f"GRPO {verdict} over SFT in {what}: {size}.")
    return told + [f"{name.upper()} at {why}" for name, why in summary.get("warnings", {}).items()]


# ------------------------------------------------------------------------- trajectory, observations


def trajectory(lines: list[dict], evals: list[dict], env: str) -> list[dict]:
    """One section, of ten blocks of updates; none without updates."""
    if not lines:
        return []
    known = dict.fromkeys(key for line in lines for key in line)
    own = [name for e in evals if e["trained"] for name in tables.measures(e)]
    habits = [key for key in known if key.startswith("habit_")]
    names = dict.fromkeys([*TRAJECTORY, *tables.own_parts(own, env), *habits, *HEALTH])
    names = [name for name in names if name in known]
    exact, size, rows = any("exact" in e for e in evals), max(1, len(lines) // 10), []
    for block in (lines[i : i + size] for i in range(0, len(lines), size)):
        rewards = known_of(block, "reward")
        means = [mean_of(block, name) for name in names]
        cells = ["" if np.isnan(mean) else f"{mean:.3g}" for mean in means]
        level = tables.level(rewards, exact) if rewards else ""
        rows.append([f"{block[0]['update']}–{block[-1]['update']}", level, *cells])
    text = "Means over blocks of updates; reward with the 95% interval of its level."
    head = ["updates", "reward", *map(tables.label, names)]
    return [tables.section("Trajectory", [text], head, rows, folded=True)]


def known_of(lines: list[dict], key: str) -> list[float]:
    """Of the updates that have the number: one without signal measures no entropy, say."""
    return [line[key] for line in lines if key in line]


def mean_of(lines: list[dict], key: str) -> float:
    values = known_of(lines, key)
    return float(np.mean(values)) if values else float("nan")


def observations(summary: dict, lines: list[dict], evals: list[dict]) -> list[str]:
    """What the data says, each sentence with its numbers."""
    paid = [line for line in lines if "reward" in line]
    found = doctor.look_at(paid, evals, summary["config"])
    told = [f"Found wrong at {symptom}." for symptom in found]
    if not lines:
        return ["No GRPO updates in this run.", *told]
    rewards, before = known_of(lines, "reward"), records.before_last_level(lines)
    at = f", at level {lines[-1]['level']}" if before else ""
    exact = any("exact" in e for e in evals)
    tenth = max(1, len(lines) // 10)
    ends = lines[:tenth], lines[-tenth:]
    length, deviation = ([mean_of(end, x) for end in ends] for x in ("reply_tokens", "deviation"))
    silent = 100 * (1 - mean_of(lines, "groups_with_signal"))
    gap, age = mean_of(lines, "mismatch"), known_of(lines, "off_policy_steps")
    out = [
        f"Training reward. {tables.training_reward(rewards, before, exact, at)}",
        *about_learning(lines, 100 * mean_of(ends[1], "habit_derives")),
        f"Replies went from {length[0]:.0f} to {length[1]:.0f} tokens (first and last tenth of "
        "the updates).",
        f"{silent:.0f}% of the groups had no signal: every advantage in them was 0.",
    ]
    if not np.isnan(gap):
        out.append(f"Sampler and trainer disagree by {gap:.1e} nats a token on average.")
    if not np.isnan(deviation).any():
        said = f"{deviation[0]:.3f} to {deviation[1]:.3f}"
        out.append(f"The deviation of rewards within a group went from {said}, on average.")
    if max(age, default=0):
        said = f"{np.mean(age):.1f} updates old on average, {max(age):.1f} at most"
        out.append(f"Batches were {said}; --async-rollouts sets the limit.")
    out += told or ["Nothing was found wrong with the run (bookkeeping/doctor.py)."]
    return out + about_time(lines, summary.get("seconds") or {})


def about_time(lines: list[dict], seconds: dict) -> list[str]:
    """Where the run's time went, and how long the trainer waited: in turn, for all but itself."""
    mean = {part: mean_of(lines, f"seconds_{part}") for part in curves.SECONDS}
    mean = {part: value for part, value in mean.items() if value > 0}
    others = mean.get("wait") or sum(mean.values()) - mean.get("train", 0.0)
    waits = others / max(others + mean.get("train", 0.0), 1e-9)
    parts = ", ".join(f"{part} {value:.2f} s" for part, value in mean.items())
    told = [f"An update, on average: {parts}; the trainer waits {100 * waits:.0f}% of the time."]
    if seconds:
        total = max(seconds["total"], 1e-9)
        names = [name for name in (*curves.SECONDS, "eval", "sft") if seconds.get(name)]
        parts = ", ".join(f"{name} {100 * seconds[name] / total:.0f}%" for name in names)
        told.append(f"The run: {parts}; the rest is loading and writing.")
    return told


def about_learning(lines: list[dict], derive: float) -> list[str]:
    """When a curriculum moved on, and when most replies began to derive the answer.

    derive: how many do in the last tenth of the updates, in %; NaN if the environment cannot tell.
    """
    began, told = {line["level"]: line["update"] for line in lines[::-1] if "level" in line}, []
    if len(began) > 1:
        steps = [f"{level} from update {update}" for level, update in reversed(began.items())]
        told.append(f"The curriculum: {', '.join(steps)}.")
    start, share = curves.thinking_starts(lines), f"in the last tenth of the updates {derive:.0f}%"
    if start is not None:
        told.append(
            f"It begins to think at update {start}: in that update and the next four, most "
            f"replies derive the answer; {share} do."
        )
    elif not np.isnan(derive):
        never = "No five updates in a row had a majority of replies that derive the answer"
        told.append(f"{never} ({share}).")
    return told


# --------------------------------------------------------------------------------------- report.md


def write(folder: Path, which: tuple[str, str] | None = None) -> None:
    """report.html, and of a finished run report.md and curves.png, from what is in the folder."""
    run, episodes = collect(folder, which)
    # An evaluation over an API writes its own report.md (bridges/api.py).
    if (folder / "summary.json").exists() and not run["api"]:
        title = ", ".join(f"{label} {value}" for label, value in run["facts"][:4])
        curves.draw(folder / "curves.png", f"{run['name']}: {title}", run["charts"])
        records.write_whole(folder / "report.md", text(run))
    records.write_whole(folder / "report.html", page(run, episodes))


def text(run: dict) -> str:
    """report.md: the head, which is printed at the end of a run, the settings, the sections."""
    table, known = run["headline"], [f"{label}: {value}" for label, value in run["facts"]]
    lead = ["Greedy, development tasks, 95% intervals.", *run["notes"], "; ".join(known)]
    cells = lambda row: [", ".join(row["cells"].get(m, [])) for m in table["moments"]]
    rows = [[tables.called(row), *cells(row)] for row in table["rows"]]
    parts = [
        tables.section(f"Result: {table['what']}", lead, ["", *table["moments"]], rows),
        tables.section("Config", [], ["flag", "value"], list(map(list, run["settings"].items()))),
        *run["tables"],
    ]
    name = records.clean(run["name"])
    return f"# {name}\n\n{tables.markdown(parts)}\n![curves](curves.png)\n"


# ------------------------------------------------------------------------------------- report.html


def page(run: dict, episodes: list[dict]) -> str:
    """viewer.html with everything filled in. The same run gives the same bytes."""
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
    packed = "\n".join(json.dumps(body, **compact) for body in bodies).encode()
    fill = {
        "title": html.escape(f"{run['name']}: a picoswarm run"),
        # Content security: this script runs, and no other.
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "run": json.dumps(run, **compact).replace("<", "\\u003c"),
        "episodes": base64.b64encode(gzip.compress(packed, mtime=0)).decode(),  # without any '<'
    }
    # One pass over the template: a placeholder's name inside a reply is not filled in again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], template)


def played_at(e: dict) -> tuple:
    """When an episode was played: in order of time if compared."""
    stage, source = e.get("stage") or "", "eval" if e.get("source") == "eval" else "rollout"
    update = tables.time_of({"stage": stage, "update": e.get("update") or 0})
    return update, ORDER.index(stage if stage in ORDER else "train"), source, stage


def index_episodes(episodes: list[dict], env: str) -> tuple:
    """(tasks, stops, index, bodies), each a list of dicts.

    stops: the moments at which episodes were saved, in order. index: a short entry per episode.
    bodies: the rest of it. Two episodes are of the same task if their seed and their prompt agree:
    several kinds of task may share their seeds.
    """
    order, tasks, index, bodies = sorted({played_at(e) for e in episodes}), {}, [], []
    for e in episodes:
        messages, when = e.get("messages") or [], played_at(e)
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
    titles = [
        {"label": label or "", "seed": seed, "prompt": title_of(env, seed, prompt)[:160]}
        for _, label, seed, prompt in tasks
    ]
    stops = []
    for update, _, source, stage in order:
        stop = {"source": source, "u": update, "stage": stage, "key": f"{update}.{stage}"}
        stops.append(stop | {"name": tables.moment({"update": update, "stage": stage})})
    return titles, stops, index, bodies


def title_of(env: str, seed: int | None, prompt: str) -> str:
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
    column = lambda es, name: [e[name] for e in es if e.get(name) is not None]
    rewards, advantages = column(episodes, "reward"), np.abs(column(episodes, "advantage"))
    segments = [segment for found in column(episodes, "segments") for segment in found]
    ratios = [r for found in column(segments, "ratios") for r in found if r is not None and r > 0]
    widest = max(1e-3, float(np.quantile(np.abs(np.log(ratios)), 0.99))) if ratios else None
    return {
        "reward": [min([0.0, *rewards]), max([1e-9, *rewards])],
        "advantage": float(advantages.max(initial=0)) or 1.0,
        "ratio": widest,
    }


def main(folder: Positional[Path], moments: Positional[tuple[str, str] | None] = None) -> None:
    """moments: of a swarm run, the two evaluations (an update, before, after_sft or final) whose
    behaviour is compared; by default after SFT and the last."""
    with records.foreign(folder):
        write(folder, moments)
    if (folder / "report.md").exists():
        print((folder / "report.md").read_text(encoding="utf-8"))
    print(f"wrote {records.printable(str(folder))}/report.html")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
