"""What a run leaves for people: summary.json, report.md, curves.png and report.html.

Everything is computed from the run folder alone, so a report can be written again at any time, and
report.html even while a run is still going:

    python -m bookkeeping.report runs/NAME

    summary.json, metrics.jsonl, evals.jsonl -> collect -> one dict of facts, charts and sections
        (bookkeeping/tables.py) -> report.md, curves.png, and with episodes.jsonl report.html

The observations are computed too, never written by hand. A run of swarm also gets the sections of
bookkeeping/behaviour.py, which is loaded only then: training letters loads no swarm.

report.html is every curve and every token in one file that opens from disk. The page only draws; it
computes nothing. It needs no network: the content security policy at its top forbids it to load
anything. A model's text may be hostile, so it is never read as HTML: every `<` is written as
`\\u003c`, so that nothing in a reply can end the script it is stored in, and the page inserts text
as text. It opens at once, because it parses an episode only when you look at it: `run` has a short
entry per episode, and `episodes` has the rest, a line of JSON each, packed (gzip, base64).
Unpacked, an episode of 25 turns with the numbers of every token is 60 kB.
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

import metrics
from bookkeeping import doctor, records, settled
from bookkeeping.tables import (
    HABITS,
    SPREAD,
    average,
    called,
    cell,
    chart,
    draw,
    label,
    layers,
    markdown,
    mean_of,
    measures,
    moment,
    number,
    own_parts,
    rolling,
    scale,
    section,
    values,
)

# Where the seconds of an update go in turn, besides "train".
SAMPLING = ("rollout", "environment", "sync", "sleep")
STAGES = ("before", "after_sft", "final")  # evaluations that are results; the others are a curve
TEMPLATE = Path(__file__).parent / "viewer.html"
OVER_TIME = (
    "payoff",
    "quality",
    "diversity",
    "reputation",
    "turns_used",
    "turns_acted",
    "used_claim_task",
    "used_submit_work",
    "used_propose_trade",
    "used_accept_proposal",
    "used_post",
    "used_vote",
    "used_pass_turn",
    "error_rate",
    "any_error",
    "waste",
    "format",
    "truncated",
    "reply_tokens",
)
TRAJECTORY = (
    "exact",
    "payoff",
    "quality",
    "diversity",
    "reputation",
    "error_rate",
    "any_error",
    "waste",
    "welfare",
    *SPREAD["welfare"],
    "toxicity",
    *SPREAD["toxicity"],
    "tail",
    "quality_gap",
    *SPREAD["quality_gap"],
    "quality_true",
    "proxy_error",
    "proxy_variance",
    "proxy_flagged",
    "format",
    "truncated",
    "reply_tokens",
    "groups_with_signal",
    "deviation",
    "entropy",
    "grad_norm",
    "mismatch",
    "off_policy_steps",
)
SHORT = ("member", "reward", "advantage", "reply_tokens", "stop_reason")  # of an episode
LONG = ("components", "error", "policy_version", "segments", "messages", "calls")  # the rest of it
# Columns whose peak is reported.
LARGEST = ("error_rate", "any_error", "waste", "off_policy_steps", "batches_dropped")
GREEDY = "Greedy, the same development tasks every time; means with 95% intervals."
BLOCKS = "Means over blocks of updates; reward with the 95% interval of its level."


def summarize_run(folder: Path, config: dict, state: dict, machine: dict) -> dict:
    """summary.json: final numbers with 95% intervals.

    eval: {tasks: {stage: {measure: {"mean", "low", "high", "n"}}}}. gain: GRPO over SFT on the
    trained tasks, paired by task; without exact answers (swarm) there is only gain_reward.
    """
    evals = records.with_exact(records.lines(folder / "evals.jsonl"))
    evals = [e for e in evals if e["stage"] in STAGES]
    results = {}
    for e in evals:
        results.setdefault(e["tasks"], {})[e["stage"]] = {
            name: vars(average(values(e, name))) for name in measures(e)
        }
    trained = [e for e in evals if e["trained"] and e["stage"] != "before"]
    sft, final = records.same_tasks(*trained)
    gains = {"gain": "exact", "gain_reward": "reward"}
    return {
        "env": config["env"],
        "model": config["model"] if config["model"] != "auto" else machine["model"],
        "seed": config["seed"],
        "trained": final["tasks"],
        "updates": state["updates"],
        "eval": results,
        **{k: vars(metrics.gain(sft[v], final[v])) for k, v in gains.items() if v in final},
        "sft": state["sft"],
        "warnings": state["warnings"],
        "seconds": {name: round(value, 2) for name, value in state["seconds"].items()},
        "tokens": state["tokens"],
        "peak_rss_gb": machine["peak_rss_gb"],
        "machine": machine,
        "config": config,
    }


# --------------------------------------------------------------------------- one dict of it all


def collect(folder: Path) -> tuple[dict, list[dict]]:
    """(everything that a run's three pages show, its episodes)."""
    config = records.config_of(folder)
    lines, evals, episodes, steps = (
        records.lines(folder / f"{name}.jsonl") for name in ("metrics", "evals", "episodes", "sft")
    )
    lines = [{k: v for k, v in line.items() if v is not None} for line in lines]
    evals = records.with_exact(evals)
    episodes.sort(key=time_of)  # an old checkpoint may be evaluated later
    sft = {
        "name": "loss",
        "points": [[step["step"], step["loss"], None, None] for step in steps],
    }
    end = folder / "summary.json"  # only a finished run has it
    summary = {"config": config, "env": config["env"]} | (records.read(end) if end.exists() else {})
    during = [e for e in evals if e["stage"] != "eval_only"]
    later = [e for e in evals if e["stage"] == "eval_only"]  # they get their own table
    sections = [
        *evaluations("Evaluation", during),
        *trajectory(lines, during),
        section("Observations (computed)", observations(summary, lines, during), listed=True),
    ]
    if summary["env"] == "swarm":
        from bookkeeping import behaviour

        sections += behaviour.sections(evals, episodes)
        for e in episodes:
            e["calls"] = behaviour.calls_of(e["messages"])
    machine_and_flags = (summary.get("machine") or {}) | summary["config"]
    run = {
        "name": folder.resolve().name,
        "env": summary["env"],
        "api": "api" in summary,
        "facts": facts(summary, lines),
        "settings": {name: str(v) for name, v in machine_and_flags.items() if v not in ("", None)},
        "headline": headline(during),
        "notes": notes(summary),
        "charts": charts(lines, during),
        "habits": {name: label(name) for name in HABITS},
        "sft": [chart("SFT loss", [sft], "nats", x="step of SFT")] if steps else [],
        "tables": sections + evaluations("Evaluated later (--eval-only)", later),
    }
    return run, episodes


def facts(summary: dict, lines: list[dict]) -> list[list[str]]:
    """[label, value] pairs, as far as they are known."""
    config, machine, sft = (summary.get(name) or {} for name in ("config", "machine", "sft"))
    seconds, peak = summary.get("seconds") or {}, summary.get("peak_rss_gb")
    parts = [f"{n} {value / 60:.1f}" for n, value in seconds.items() if value and n != "total"]
    # In turn, the trainer waits for everything but training.
    others = seconds.get("wait") or sum(seconds.get(part, 0.0) for part in SAMPLING)
    pairs = {
        "environment": summary["env"],
        "trained on": summary.get("trained"),
        "model": summary.get("model") or config.get("model"),
        "seed": summary.get("seed", config.get("seed")),
        "SFT loss": f"{sft['loss_first']:.2f} → {sft['loss_last']:.2f}" if sft else None,
        "updates": summary.get("updates", lines[-1]["update"] if lines else None),
        "time": f"{seconds['total'] / 60:.1f} minutes: {', '.join(parts)}" if seconds else None,
        "the trainer waits": f"{100 * others / (others + seconds['train']):.0f}% of an update"
        if others
        else None,
        "batches dropped": sum(line.get("batches_dropped", 0) for line in lines) or None,
        "machine": machine.get("device"),
        "peak memory": f"{peak:.2f} GB" if peak else None,
        "tokens": ", ".join(f"{n:,} {name}" for name, n in (summary.get("tokens") or {}).items()),
        "state": None if "updates" in summary else "not finished: there is no summary.json yet",
    }
    return [[label, str(value)] for label, value in pairs.items() if value not in (None, "")]


def headline(evals: list[dict]) -> dict:
    """Before SFT, after SFT and at the end: a row per task set, the trained one first."""
    ends = [e for e in evals if e["stage"] in STAGES[:2] or e["update"] == evals[-1]["update"]]
    moments, names = list(dict.fromkeys(map(moment, ends))), goals(evals)
    cells = {}
    for e in sorted(ends, key=lambda e: not e["trained"]):
        shown = ", reward ".join(cell(name, values(e, name)) for name in names)
        cells.setdefault(called(e), {})[moment(e)] = shown
    rows = [[tasks, *(row.get(m, "") for m in moments)] for tasks, row in cells.items()]
    title = "Result: exact answers" if "exact" in names else "Result: mean reward"
    return section(title, [], ["", *moments], rows)


def notes(summary: dict) -> list[str]:
    """Sentences under the headline: the gain, and the doctor's warnings."""
    warnings = [f"{name.upper()} at {why}" for name, why in summary.get("warnings", {}).items()]
    name, what = ("gain", "exact answers") if "gain" in summary else ("gain_reward", "mean reward")
    if name not in summary:  # GRPO has not ended, or there was none
        return warnings
    gain = metrics.Interval(**summary[name])
    lost = "lost" if gain.high < 0 else "neither gained nor lost measurably"
    verdict = "gained" if gain.low > 0 else lost
    change = gain.points() if name == "gain" else gain.signed()
    return [f"GRPO {verdict} over SFT in {what}: {change}, n={gain.n}, paired by task.", *warnings]


def goals(evals: list[dict]) -> list[str]:
    """What evaluations report: exact answers, and the mean reward if it differs from them."""
    if all(e.get("exact") == e["reward"] for e in evals):
        return ["exact"]
    return [name for name in ("exact", "reward") if name in evals[0]]


# ------------------------------------------------------------------- evaluations, trajectory, words


def evaluations(title: str, evals: list[dict]) -> list[dict]:
    """One section, with a row per evaluation and task set, a column per measure; or none."""
    known = dict.fromkeys(name for e in evals for name in measures(e))
    names = [*goals(evals), *(name for name in (*OVER_TIME, *own_parts(known)) if name in known)]
    cells = lambda e: [cell(name, values(e, name)) for name in names]
    rows = [[moment(e), called(e), str(len(e["reward"])), *cells(e)] for e in evals]
    head = ["", "tasks", "n", *map(label, names)]
    return [section(title, [GREEDY], head, rows, folded=True)] if evals else []


def trajectory(lines: list[dict], evals: list[dict]) -> list[dict]:
    """One section with ten blocks of updates; none without updates."""
    known = dict.fromkeys(key for line in lines for key in line)
    extra = own_parts(dict.fromkeys(name for e in evals for name in measures(e)))
    names = [key for key in (*TRAJECTORY, *extra, *HABITS) if key in known]
    size = max(1, len(lines) // 10)
    blocks = [lines[i : i + size] for i in range(0, len(lines), size)]
    rows = [
        [
            f"{block[0]['update']}–{block[-1]['update']}",
            metrics.level([line["reward"] for line in block]).text(2),
            *(f"{mean_of(block, name):.3g}".replace("nan", "") for name in names),
        ]
        for block in blocks
    ]
    head = ["updates", "reward", *map(label, names)]
    return [section("Trajectory", [BLOCKS], head, rows, folded=True)] if lines else []


def observations(summary: dict, lines: list[dict], evals: list[dict]) -> list[str]:
    """What the data shows, each sentence with its numbers."""
    warnings = summary.get("warnings")
    if warnings is None:  # the run is still going
        sft_steps = summary["config"].get("sft_steps", 0)
        symptoms = doctor.look_at(lines, doctor.of_run(evals, sft_steps))
        warnings = {name: f"update {update}: {why}" for name, (update, why) in symptoms.items()}
    sentences = [f"Found wrong: {name} at {why}." for name, why in warnings.items()]
    if not lines:
        return ["No GRPO updates in this run.", *sentences]
    return [
        f"Training reward. {training_reward(lines)}",
        *(largest(lines, name) for name in LARGEST if any(name in line for line in lines)),
        *(sentences or ["Nothing was found wrong with the run (bookkeeping/doctor.py)."]),
    ]


def largest(lines: list[dict], name: str) -> str:
    """A column's mean and peak."""
    most = max((line for line in lines if name in line), key=lambda line: line[name])
    lag = (
        ", fixed by design (--async-rollouts)"
        if name == "off_policy_steps" and "batches_dropped" not in most
        else ""
    )
    return (
        f"{label(name).capitalize()}: {number(name, mean_of(lines, name))} on average, at most "
        f"{number(name, most[name])}, in update {most['update']}{lag}."
    )


def training_reward(lines: list[dict]) -> str:
    """Its distribution, its current level, and whether it has settled."""
    rewards, level = [line["reward"] for line in lines], lines[-1].get("level")
    recent = [line["reward"] for line in lines if line.get("level") == level]
    at = f", at level {level}" if len(recent) < len(lines) else ""
    now = metrics.level(settled.present(recent))
    return (
        f"Update by update: {metrics.distribution(rewards)}. Now{at}: {now.text(2)}, the mean of "
        f"the last {now.n} updates, as many as describe the present. "
        f"Has it settled{at}? {settled.present_trend(recent).sentence.capitalize()}."
    )


# ------------------------------------------------------------------------------------------ curves


def charts(lines: list[dict], evals: list[dict]) -> list[dict]:
    """Of development tasks, then of updates, in the order in which they are shown."""
    is_old = any(line.get("off_policy_steps") for line in lines)
    units = {
        "reply_tokens": "tokens",
        "groups_with_signal": "of the groups",
        "entropy": "nats",
        **({"off_policy_steps": "updates"} if is_old else {}),
        "batches_waiting": "batches",
        "batches_dropped": "batches",
    }
    marks = [
        [line["update"], str(line["level"])]
        for before, line in zip(lines, lines[1:])
        if before.get("level") != line.get("level")
    ]
    out = [
        *(
            chart(f"development, {g}", curves(evals, g), scale(g)[2], x="update (−1: before SFT)")
            for g in goals(evals)
        ),
        chart(
            "training reward",
            [
                rolling(lines),
                {
                    "name": "each update",
                    "points": points(lines, "reward", "reward_low", "reward_high"),
                    "plain": True,
                },
            ],
            marks=marks,
        ),
        chart("habits of the sampled replies", layers(lines), "%", stacked=True),
        *(
            chart(label(key), [{"name": label(key), "points": points(lines, key)}], unit)
            for key, unit in units.items()
        ),
    ]
    measured = lambda s: any(point[1] is not None for point in s["points"])
    return [c for c in out if any(map(measured, c["series"]))]


def curves(evals: list[dict], measure: str) -> list[dict]:
    """A series per task set, rounded as in the tables: page, picture and report.md agree."""
    digits, factor, _ = scale(measure)
    series = {}
    for e in sorted(evals, key=lambda e: not e["trained"]):
        mean = average(values(e, measure))
        point = [round(factor * v, digits) for v in (mean.mean, mean.low, mean.high)]
        curve = {"name": e["tasks"], "plain": not e["trained"], "points": []}
        series.setdefault(called(e), curve)["points"].append([time_of(e), *point])
    return list(series.values())


def time_of(e: dict) -> int:
    """The place on the axis of updates; before SFT is at -1."""
    return -1 if e["stage"] == "before" else e["update"]


def points(lines: list[dict], name: str, low: str = "", high: str = "") -> list[list]:
    """A column of metrics.jsonl, with those of its interval."""
    return [[line["update"], *(line.get(key) for key in (name, low, high))] for line in lines]


# --------------------------------------------------------------------------------------- the pages


def write(folder: Path) -> None:
    """report.html, and for a finished run report.md and curves.png, from what is in the folder."""
    run, episodes = collect(folder)
    # An evaluation over an API writes its own report.md (bridges/api.py).
    if (folder / "summary.json").exists() and not run["api"]:
        title = ", ".join(f"{label} {value}" for label, value in run["facts"][:4])
        # SFT has another axis, which the page has not: the steps of SFT.
        draw(folder / "curves.png", f"{run['name']}: {title}", run["charts"] + run["sft"])
        records.write_whole(folder / "report.md", text(run))
    records.write_whole(folder / "report.html", page(run, episodes))


def text(run: dict) -> str:
    """report.md: the head, which a run prints at its end, the settings, the sections."""
    lead = ["Greedy, development tasks, 95% intervals.", *run["notes"]]
    sections = [
        run["headline"] | {"text": lead},
        section("Run", ["; ".join(f"{label}: {value}" for label, value in run["facts"])]),
        section("Config", [], ["flag", "value"], [*map(list, run["settings"].items())]),
        *run["tables"],
    ]
    return f"# {records.clean(run['name'])}\n\n{markdown(sections)}\n![curves](curves.png)\n"


def page(run: dict, episodes: list[dict]) -> str:
    """viewer.html with everything filled in. The same run gives the same bytes."""
    index, bodies = index_episodes(episodes)
    template = TEMPLATE.read_text(encoding="utf-8")
    script = re.search("<script>(.*?)</script>", template, re.DOTALL)[1]
    compact = {"allow_nan": False, "separators": (",", ":")}
    packed = "\n".join(json.dumps(body, **compact) for body in bodies).encode()
    fill = {
        "title": html.escape(f"{run['name']}: a picoswarm run"),
        # Content security: only this script may run.
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "run": json.dumps(run | index, **compact).replace("<", "\\u003c"),
        "episodes": base64.b64encode(gzip.compress(packed, mtime=0)).decode(),  # without any '<'
    }
    # One pass over the template: a placeholder's name inside a reply is not filled in again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], template)


def index_episodes(episodes: list[dict]) -> tuple[dict, list[dict]]:
    """({"stops", "tasks", "episodes", "ratio"}, bodies) of episodes in order of time.

    stops: the moments at which episodes were saved. episodes: a short entry for each. bodies: the
    rest of each. ratio: the importance ratios of 99% of the tokens are no further from 1, in logs.
    Two episodes have the same task if seed and prompt agree: kinds of tasks may share seeds.
    """
    stops, tasks, entries, bodies = {}, {}, [], []
    for e in episodes:
        prompt = next((str(m["content"]) for m in e["messages"] if m["role"] == "user"), "")
        at = stops.setdefault((e["source"], time_of(e), e["stage"], moment(e)), len(stops))
        task = tasks.setdefault((e.get("tasks", ""), e["seed"], prompt), len(tasks))
        entries.append({name: e.get(name) for name in SHORT} | {"at": at, "task": task})
        bodies.append({name: e[name] for name in LONG if name in e})
    segments = (s for body in bodies for s in body.get("segments") or [])
    ratios = [r for s in segments for r in s.get("ratios") or [] if r]
    return {
        "stops": [dict(zip(("source", "u", "stage", "name"), stop)) for stop in stops],
        "tasks": [{"label": t[0], "seed": t[1], "prompt": title_of(*t[1:])[:160]} for t in tasks],
        "episodes": entries,
        "ratio": float(np.quantile(np.abs(np.log(ratios)), 0.99)) if ratios else None,
    }, bodies


def title_of(seed: int | None, prompt: str) -> str:
    """The text that tells a task from the others.

    In swarm every prompt begins with the same rules: take the scenario's number and first state.
    """
    state = prompt.partition("\n# step ")[2].partition(": ")[2]
    return f"scenario {(seed or 0) % 1_000_000_000}: {state}" if state else prompt


def main(folder: tyro.conf.Positional[Path]) -> None:
    with records.foreign(folder):
        write(folder)
    if (folder / "report.md").exists():
        print((folder / "report.md").read_text(encoding="utf-8"))
    print(f"wrote {records.printable(str(folder))}/report.html")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
