"""What a run leaves for a person: summary.json, report.md, curves.png and report.html.

Everything is computed from the run folder alone, so a report can be written again at any time, and
report.html while a run is still going:

    python -m bookkeeping.report runs/NAME

    summary.json, metrics.jsonl, evals.jsonl -> collect -> one dict of facts, curves (bookkeeping/
        curves.py) and sections (bookkeeping/tables.py) -> report.md, curves.png, and with
        episodes.jsonl report.html (bookkeeping/viewer.py)

It has the shape of a lab's training report: config, SFT warm-up, evaluations, trajectory,
observations, curves. The observations are computed too; nobody writes one by hand. A run of swarm
also gets the sections of bookkeeping/behaviour.py. What only some runs need is loaded when it is
needed, so that training letters loads no swarm and no HTML.
"""

import sys
from pathlib import Path

import numpy as np

import metrics
from bookkeeping import curves, doctor, records, tables
from metrics import Interval

STAGES = ("before", "after_sft", "final")  # evaluations that are results; the others are a curve
TRAJECTORY = ("exact", "payoff", "quality", "diversity", "reputation", "error_rate", "format")
HEALTH = ("reply_tokens", "groups_with_signal", "entropy", "grad_norm")


def summarize_run(folder: Path, config: dict, state: dict, machine: dict) -> dict:
    """summary.json: final numbers with 95% intervals.

    gain: GRPO over SFT on the trained tasks, paired by task. An environment without exact answers
    (swarm) has no exact, low, high and gain; every part of its reward has an interval instead.
    """
    evals = records.with_exact(records.lines(folder / "evals.jsonl"))
    trained = next(e["tasks"] for e in evals if e["trained"])
    results: dict = {}
    for e in evals:
        if e["stage"] in STAGES:
            results.setdefault(e["tasks"], {})[e["stage"]] = result_of(e)
    ends = [e for e in evals if e["trained"] and e["stage"] in STAGES[1:]]
    sft, final = records.same_tasks(*ends)
    gains = {"gain": "exact", "gain_reward": "reward"}
    return {
        "env": config["env"],
        "model": config["model"] if config["model"] != "auto" else machine["model"],
        "seed": config["seed"],
        "trained": trained,
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
    """One evaluation in summary.json; cell and reward_cell write it."""
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


def cell(result: dict) -> str:
    return Interval(result["exact"], result["low"], result["high"], result["n"]).percent()


def reward_cell(result: dict) -> str:
    ends = result["reward_low"], result["reward_high"]
    return Interval(result["reward"], *ends, result["n"]).text()


# ------------------------------------------------------------------------------ the numbers, once


def collect(folder: Path, which: tuple[str, str] | None = None) -> tuple[dict, list[dict]]:
    """(everything that the three pages of a run show; its episodes).

    which: the two evaluations of a swarm run to compare, see behaviour.find.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; give a run folder, such as runs/NAME")
    read = lambda name: records.lines(folder / f"{name}.jsonl", for_page=True)
    lines, evals, episodes = read("metrics"), records.with_exact(read("evals")), read("episodes")
    lines = [{k: v for k, v in line.items() if v is not None} for line in lines]
    found = [folder / name for name in ("config.json", "summary.json")]  # at the end it has both
    config, summary = (records.read(f, nan=False) if f.exists() else {} for f in found)
    if not (summary or lines or evals or episodes):
        files = "summary.json, metrics.jsonl, evals.jsonl or episodes.jsonl"
        raise ValueError(f"{folder} holds no {files}, so it is no run folder")
    summary = {"config": config, "env": config.get("env", "")} | summary
    config, env = summary["config"], summary["env"]
    during = [e for e in evals if e["stage"] != "eval_only"]  # the others get their own table
    told = observations(summary, lines, during)
    sections = [
        *tables.evaluations("Evaluation", during, env),
        *trajectory(lines, during, env),
        tables.section("Observations (computed)", told, listed=True),
    ]
    if env == "swarm":
        from bookkeeping import behaviour

        sections += behaviour.sections(config, evals, episodes, which)
    later = [e for e in evals if e["stage"] == "eval_only"]
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
    exact, rows = any("exact" in e for e in evals), {}
    for e in sorted(ends, key=lambda e: not e["trained"]):
        row = {"tasks": e["tasks"], "trained": e["trained"], "cells": {}}
        result = result_of(e)
        found = [cell(result)] if exact else [reward_cell(result)]
        if exact and result["exact"] != result["reward"]:
            found.append(f"reward {reward_cell(result)}")
        rows.setdefault(e["tasks"], row)["cells"][tables.moment(e)] = found
    return {
        "what": "exact answers" if exact else "mean reward",
        "moments": list(dict.fromkeys(tables.moment(e) for e in ends)),
        "rows": list(rows.values()),
    }


def notes(summary: dict) -> list[str]:
    """Sentences under the headline: the gain, and what the doctor warned of."""
    exact, reward = summary.get("gain"), summary.get("gain_reward")
    told = []
    if exact:
        told.append(about_gain("exact answers", exact, Interval.points))
    if reward and reward != exact:
        told.append(about_gain("mean reward", reward, Interval.signed))
    return told + [f"{name.upper()} at {why}" for name, why in summary.get("warnings", {}).items()]


def about_gain(what: str, numbers: dict, form) -> str:
    gain, verdict = Interval(**numbers), "neither gained nor lost measurably"
    if gain.low > 0:
        verdict = "gained"
    if gain.high < 0:
        verdict = "lost"
    return f"GRPO {verdict} over SFT in {what}: {form(gain)}, n={gain.n}, paired by task."


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
        level = tables.within(metrics.level(rewards), rewards, exact).text(2) if rewards else ""
        means = [mean_of(block, name) for name in names]
        cells = ["" if np.isnan(mean) else f"{mean:.3g}" for mean in means]
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


def observations(summary: dict, lines: list[dict], evals: list[dict] = ()) -> list[str]:
    """What the data says, each sentence with its numbers."""
    out = []
    paid = [line for line in lines if "reward" in line]
    found = doctor.look_at(paid, evals, summary["config"])
    told = [f"Found wrong at {symptom}." for symptom in found]
    if not lines:
        return [*out, "No GRPO updates in this run.", *told]
    rewards, before = known_of(lines, "reward"), records.before_last_level(lines)
    at = f", at level {lines[-1]['level']}" if before else ""
    exact = any("exact" in e for e in evals)
    out.append(f"Training reward. {tables.training_reward(rewards, before, exact, at)}")
    out += about_levels(lines)
    tenth = max(1, len(lines) // 10)
    first, last = mean_of(lines[:tenth], "reply_tokens"), mean_of(lines[-tenth:], "reply_tokens")
    out.append(
        f"Replies went from {first:.0f} to {last:.0f} tokens (first and last tenth of the updates)."
    )
    out += about_thinking(lines, tenth)
    silent = 100 * (1 - mean_of(lines, "groups_with_signal"))
    out.append(f"{silent:.0f}% of the groups had no signal: every advantage in them was 0.")
    gap = mean_of(lines, "mismatch")
    out.append(f"Sampler and trainer disagree by {gap:.1e} nats a token on average.")
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


def about_levels(lines: list[dict]) -> list[str]:
    """When a curriculum moved on."""
    began: dict = {}
    for line in lines:
        if "level" in line:
            began.setdefault(line["level"], line["update"])
    if len(began) < 2:
        return []
    told = ", ".join(f"{level} from update {update}" for level, update in began.items())
    return [f"The curriculum: {told}."]


def about_thinking(lines: list[dict], tenth: int) -> list[str]:
    """When most replies began to derive the answer, if the environment tells."""
    if not any("habit_derives" in line for line in lines):
        return []
    share = 100 * np.mean([line.get("habit_derives", 0.0) for line in lines[-tenth:]])
    start = curves.thinking_starts(lines)
    if start is None:
        return [
            "No five updates in a row had a majority of replies that derive the answer "
            f"(last tenth of the updates: {share:.0f}%)."
        ]
    return [
        f"It begins to think at update {start}: in that update and the next four, most replies "
        f"derive the answer; in the last tenth of the updates {share:.0f}% do."
    ]


# --------------------------------------------------------------------------------------- the pages


def write(folder: Path, which: tuple[str, str] | None = None) -> None:
    """report.html, and of a finished run report.md and curves.png, from what is in the folder."""
    from bookkeeping import viewer

    run, episodes = collect(folder, which)
    # An evaluation over an API writes its own report.md (bridges/api.py).
    if (folder / "summary.json").exists() and not run["api"]:
        title = ", ".join(f"{label} {value}" for label, value in run["facts"][:4])
        curves.draw(folder / "curves.png", f"{run['name']}: {title}", run["charts"])
        records.write_whole(folder / "report.md", text(run))
    viewer.write(folder, run, episodes)


def text(run: dict) -> str:
    """report.md: the head, which is printed at the end of a run, the settings, the sections."""
    table, rows = run["headline"], []
    for row in table["rows"]:
        title = f"{row['tasks']} (trained)" if row["trained"] else row["tasks"]
        rows.append([title, *(", ".join(row["cells"].get(m, [])) for m in table["moments"])])
    known = [f"{label}: {value}" for label, value in run["facts"]]
    parts = [
        tables.section(
            f"Result: {table['what']}",
            ["Greedy, development tasks, 95% intervals.", *run["notes"], "; ".join(known)],
            ["", *table["moments"]],
            rows,
        ),
        tables.section("Config", [], ["flag", "value"], list(map(list, run["settings"].items()))),
        *run["tables"],
    ]
    name = records.clean(run["name"])
    return f"# {name}\n\n{tables.markdown(parts)}\n![curves](curves.png)\n"


def main(given: list[str]) -> None:
    usage = (
        "python -m bookkeeping.report runs/NAME writes the report of a run again; with two moments "
        "(an update, before, after_sft, final), their behaviour is compared; "
        "to compare runs: python -m bookkeeping.compare runs/A runs/B …"
    )
    if given in (["-h"], ["--help"]):
        print(usage)
        return
    if len(given) not in (1, 3):
        raise SystemExit(f"it takes one run folder, or one and two moments; {usage}")
    folder = Path(given[0])
    with records.foreign(folder):
        write(folder, tuple(given[1:]) or None)
    if (folder / "report.md").exists():
        print((folder / "report.md").read_text(encoding="utf-8"))
    print(f"wrote {records.printable(str(folder))}/report.html")


if __name__ == "__main__":
    main(sys.argv[1:])
