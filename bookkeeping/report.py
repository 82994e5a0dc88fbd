"""What a run leaves for a person: summary.json, report.md, curves.png and report.html.

Everything is computed from the run folder alone, so a report can be written again at any time, and
report.html while a run is still going:

    python -m bookkeeping.report runs/NAME
    python -m bookkeeping.report runs/NAME before 40    swarm: the behaviour of any two evaluations

    summary.json, metrics.jsonl, evals.jsonl -> collect -> one dict of facts, curves and sections
        (bookkeeping/tables.py) -> report.md, curves.png, and with episodes.jsonl report.html

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
from bookkeeping import doctor, records, tables
from metrics import Interval

STAGES = ("before", "after_sft", "final")  # evaluations that are results; the others are a curve
TRAJECTORY = ("exact", "payoff", "quality", "diversity", "reputation", "error_rate", "format")
HEALTH = (
    "reply_tokens", "groups_with_signal", "deviation", "entropy", "grad_norm", "mismatch",
    "off_policy_steps",
)  # fmt: skip
TEMPLATE = Path(__file__).parent / "viewer.html"


def summarize_run(folder: Path, config: dict, state: dict, machine: dict) -> dict:
    """summary.json: final numbers with 95% intervals.

    eval: {tasks: {stage: {measure: {"mean", "low", "high", "n"}}}}. gain: GRPO over SFT on the
    trained tasks, paired by task; an environment without exact answers (swarm) has none.
    """
    evals = [e for e in records.lines(folder / "evals.jsonl") if e["stage"] in STAGES]
    evals, results = records.with_exact(evals), {}
    for e in evals:
        means = {name: tables.average(tables.values(e, name)) for name in tables.measures(e)}
        found = {name: mean.dict() for name, mean in means.items()}
        results.setdefault(e["tasks"], {})[e["stage"]] = found
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


# ------------------------------------------------------------------------------ the numbers, once


def collect(folder: Path, which: tuple[str, str] | None = None) -> tuple[dict, list[dict]]:
    """(everything that the three pages of a run show; its episodes).

    which: the two evaluations of a swarm run to compare, see behaviour.find.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; give a run folder, such as runs/NAME")
    names = ("metrics", "evals", "episodes")
    lines, evals, episodes = (records.lines(folder / f"{n}.jsonl") for n in names)
    lines = [{k: v for k, v in line.items() if v is not None} for line in lines]
    evals = records.with_exact(evals)
    found = [folder / name for name in ("config.json", "summary.json")]  # at the end it has both
    config, summary = (records.read(f) if f.exists() else {} for f in found)
    if not (summary or lines or evals or episodes):
        files = "summary.json, metrics.jsonl, evals.jsonl or episodes.jsonl"
        raise ValueError(f"{folder} holds no {files}, so it is no run folder")
    summary = {"config": config, "env": config.get("env", "")} | summary
    env = summary["env"]
    later = [e for e in evals if e["stage"] == "eval_only"]  # they get their own table
    during = [e for e in evals if e["stage"] != "eval_only"]
    sections = tables.evaluations("Evaluation", during, env) + trajectory(lines, during, env)
    told = observations(summary, lines, during)
    sections.append(tables.section("Observations (computed)", told, listed=True))
    if env == "swarm":
        from bookkeeping import behaviour

        sections += behaviour.sections(evals, episodes, which)
    given = (summary.get("machine") or {}) | summary["config"]
    run = {
        "name": folder.resolve().name,
        "env": env,
        "api": "api" in summary,
        "facts": facts(summary, lines),
        "settings": {name: str(v) for name, v in given.items() if v not in ("", None)},
        "headline": headline(during),
        "notes": notes(summary),
        "charts": tables.of_evaluations(during, env) + tables.of_updates(lines, env),
        "tables": sections + tables.evaluations("Evaluated later (--eval-only)", later, env),
    }
    return run, episodes


def facts(summary: dict, lines: list[dict]) -> list[list[str]]:
    """[label, value] pairs, as far as they are known."""
    config, machine, sft = (summary.get(name) or {} for name in ("config", "machine", "sft"))
    seconds, peak = summary.get("seconds") or {}, summary.get("peak_rss_gb")
    tokens = [f"{count:,} {name}" for name, count in (summary.get("tokens") or {}).items()]
    pairs = {
        "environment": summary["env"],
        "trained on": summary.get("trained"),
        "model": summary.get("model") or config.get("model"),
        "seed": summary.get("seed", config.get("seed")),
        "SFT loss": f"{sft['loss_first']:.2f} → {sft['loss_last']:.2f}" if sft else None,
        "updates": summary.get("updates", lines[-1]["update"] if lines else None),
        "time": f"{seconds['total'] / 60:.1f} minutes" if seconds else None,
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
    moments = list(dict.fromkeys(map(tables.moment, ends)))
    cells = {}
    for e in sorted(ends, key=lambda e: not e["trained"]):
        cells.setdefault(tables.called(e), {})[tables.moment(e)] = shown(e)
    rows = [[tasks, *(found.get(m, "") for m in moments)] for tasks, found in cells.items()]
    what = "exact answers" if any("exact" in e for e in evals) else "mean reward"
    return tables.section(f"Result: {what}", [], ["", *moments], rows)


def shown(e: dict) -> str:
    """Exact answers, and the mean reward if it is another number."""
    names = [name for name in ("exact", "reward") if name in e]
    if e.get("exact") == e["reward"]:
        names = ["exact"]
    return ", reward ".join(tables.cell(name, tables.values(e, name)) for name in names)


def notes(summary: dict) -> list[str]:
    """Sentences under the headline: the gain, and what the doctor warned of."""
    gains = {"gain": ("exact answers", Interval.points)}
    if summary.get("gain_reward") != summary.get("gain"):
        gains["gain_reward"] = ("mean reward", Interval.signed)
    told = []
    for name in [name for name in gains if name in summary]:
        (what, form), gain = gains[name], Interval(**summary[name])
        lost = "lost" if gain.high < 0 else "neither gained nor lost measurably"
        verdict = "gained" if gain.low > 0 else lost
        told.append(f"GRPO {verdict} over SFT in {what}: {form(gain)}, n={gain.n}, paired by task.")
    return told + [f"{name.upper()} at {why}" for name, why in summary.get("warnings", {}).items()]


# ------------------------------------------------------------------------- trajectory, observations


def mean_of(lines: list[dict], key: str) -> float:
    """Of the updates that have the number: one without signal measures no entropy, say."""
    values = [line[key] for line in lines if key in line]
    return float(np.mean(values)) if values else float("nan")


def trajectory(lines: list[dict], evals: list[dict], env: str) -> list[dict]:
    """One section, of ten blocks of updates; none without updates."""
    known = dict.fromkeys(key for line in lines for key in line)
    own = tables.own_parts(dict.fromkeys(name for e in evals for name in tables.measures(e)), env)
    habits = [key for key in known if key.startswith("habit_")]
    names = [key for key in (*TRAJECTORY, *own, *habits, *HEALTH) if key in known]
    size, rows = max(1, len(lines) // 10), []
    for block in (lines[i : i + size] for i in range(0, len(lines), size)):
        rewards = [line["reward"] for line in block if "reward" in line]
        level = tables.level(rewards).text(2) if rewards else ""
        means = [mean_of(block, name) for name in names]
        cells = ["" if np.isnan(mean) else f"{mean:.3g}" for mean in means]
        rows.append([f"{block[0]['update']}–{block[-1]['update']}", level, *cells])
    text = "Means over blocks of updates; reward with the 95% interval of its level."
    head = ["updates", "reward", *map(tables.label, names)]
    return [tables.section("Trajectory", [text], head, rows, folded=True)] if lines else []


def observations(summary: dict, lines: list[dict], evals: list[dict]) -> list[str]:
    """What the data says, each sentence with its numbers."""
    found = summary.get("warnings")
    if found is None:  # the run is still going
        seen = doctor.look_at(lines, doctor.of_run(evals, summary["config"].get("sft_steps", 0)))
        found = {name: f"update {at}: {why}" for name, (at, why) in seen.items()}
    told = [f"Found wrong: {name} at {why}." for name, why in found.items()]
    if not lines:
        return ["No GRPO updates in this run.", *told]
    out = [f"Training reward. {tables.training_reward(lines)}"]
    began = {line["level"]: line["update"] for line in reversed(lines) if "level" in line}
    if len(began) > 1:
        steps = [f"{level} from update {update}" for level, update in reversed(began.items())]
        out.append(f"The curriculum: {', '.join(steps)}.")
    out += told or ["Nothing was found wrong with the run (bookkeeping/doctor.py)."]
    return [*out, about_time(lines)]


def about_time(lines: list[dict]) -> str:
    """Where an update's time went, and how long the trainer waited: in turn, for all but itself."""
    mean = {part: mean_of(lines, f"seconds_{part}") for part in tables.SECONDS}
    mean = {part: value for part, value in mean.items() if value > 0}
    others = mean.get("wait") or sum(mean.values()) - mean.get("train", 0.0)
    waits = 100 * others / max(others + mean.get("train", 0.0), 1e-9)
    parts = ", ".join(f"{part} {value:.2f} s" for part, value in mean.items())
    return f"An update, on average: {parts}; the trainer waits {waits:.0f}% of the time."


# ---------------------------------------------------------------------------------------- the pages


def write(folder: Path, which: tuple[str, str] | None = None) -> None:
    """report.html, and of a finished run report.md and curves.png, from what is in the folder."""
    run, episodes = collect(folder, which)
    # An evaluation over an API writes its own report.md (bridges/api.py).
    if (folder / "summary.json").exists() and not run["api"]:
        title = ", ".join(f"{label} {value}" for label, value in run["facts"][:4])
        tables.draw(folder / "curves.png", f"{run['name']}: {title}", run["charts"])
        records.write_whole(folder / "report.md", text(run))
    records.write_whole(folder / "report.html", page(run, episodes))


def text(run: dict) -> str:
    """report.md: the head, which is printed at the end of a run, the settings, the sections."""
    known = "; ".join(f"{label}: {value}" for label, value in run["facts"])
    lead = ["Greedy, development tasks, 95% intervals.", *run["notes"], known]
    config = tables.section("Config", [], ["flag", "value"], [*map(list, run["settings"].items())])
    sections = tables.markdown([run["headline"] | {"text": lead}, config, *run["tables"]])
    return f"# {records.clean(run['name'])}\n\n{sections}\n![curves](curves.png)\n"


def page(run: dict, episodes: list[dict]) -> str:
    """viewer.html with everything filled in. The same run gives the same bytes."""
    index, bodies = index_episodes(episodes, run["env"])
    template = TEMPLATE.read_text(encoding="utf-8")
    script = re.search("<script>(.*?)</script>", template, re.DOTALL)[1]
    compact = {"allow_nan": False, "separators": (",", ":")}
    packed = "\n".join(json.dumps(body, **compact) for body in bodies).encode()
    fill = {
        "title": html.escape(f"{run['name']}: a picoswarm run"),
        # Content security: this script runs, and no other.
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "run": json.dumps(run | index, **compact).replace("<", "\\u003c"),
        "episodes": base64.b64encode(gzip.compress(packed, mtime=0)).decode(),  # without any '<'
    }
    # One pass over the template: a placeholder's name inside a reply is not filled in again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], template)


def index_episodes(episodes: list[dict], env: str) -> tuple[dict, list[dict]]:
    """({"stops", "tasks", "episodes", "ratio"}, bodies) of episodes in order of time.

    stops: the moments at which episodes were saved. episodes: a short entry for each. bodies: the
    rest of it. ratio: how far the importance ratios of 99% of the tokens are from 1, in logs. Two
    episodes are of the same task if their seed and their prompt agree: several kinds of task may
    share their seeds.
    """
    stops, tasks, entries, bodies, ratios = {}, {}, [], [], []
    for e in episodes:
        messages, stage = e.get("messages") or [], e.get("stage") or ""
        prompt = next((str(m.get("content")) for m in messages if m.get("role") == "user"), "")
        stop = (e.get("source"), e.get("update") or 0, stage)
        task = (e.get("tasks") or "", e.get("seed"), prompt)
        entries.append({
            "at": stops.setdefault(stop, len(stops)), "task": tasks.setdefault(task, len(tasks)),
            "member": e.get("member", 0), "reward": e.get("reward"),
            "advantage": e.get("advantage"), "tokens": e.get("reply_tokens"),
            "end": e.get("stop_reason") or "",
        })  # fmt: skip
        body = {name: e.get(name) for name in ("components", "error", "policy_version")}
        segments = e.get("segments") or []
        body |= {"segments": segments} if segments else {"messages": messages}
        ratios += [r for s in segments for r in s.get("ratios") or [] if r]
        if env == "swarm":
            from bookkeeping import behaviour

            body["calls"] = behaviour.calls_of(messages)
        bodies.append(body)
    index = {
        "stops": [stop_of(*stop) for stop in stops],
        "tasks": [{"label": t[0], "seed": t[1], "prompt": title_of(*t[1:])[:160]} for t in tasks],
        "episodes": entries,
        "ratio": float(np.quantile(np.abs(np.log(ratios)), 0.99)) if ratios else None,
    }
    return index, bodies


def stop_of(source: str, update: int, stage: str) -> dict:
    e = {"update": update, "stage": stage}
    u = tables.time_of(e)
    return {
        "source": source,
        "u": u,
        "stage": stage,
        "key": f"{u}.{stage}",
        "name": tables.moment(e),
    }


def title_of(seed: int | None, prompt: str) -> str:
    """What tells a task from the others.

    In swarm every prompt begins with the same rules: take the scenario's number and first state.
    """
    state = prompt.partition("\n# step ")[2].partition(": ")[2]
    return f"scenario {(seed or 0) % 1_000_000_000}: {state}" if state else prompt


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
