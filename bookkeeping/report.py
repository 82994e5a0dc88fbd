"""What a run leaves for a person: summary.json, report.md, curves.png and report.html.

Everything is computed from the run folder alone, so a report can be written again at any time:

    python -m bookkeeping.report runs/NAME

It has the shape of a lab's training report: config, SFT warm-up, trajectory, evaluations,
observations, curves. The observations are computed too; nobody writes one by hand. A run of swarm
also gets the sections of bookkeeping/behaviour.py. curves.png is drawn by bookkeeping/curves.py,
report.html by bookkeeping/viewer.py. What only some runs need is loaded when it is needed, so that
training letters loads no swarm and no HTML.
"""

import re
import sys
from pathlib import Path

import numpy as np

import metrics
from bookkeeping import curves, doctor, records, tables
from metrics import Interval

STAGES = ("before", "after_sft", "final")  # evaluations that are results; the others are a curve
TRAJECTORY = ("exact", "payoff", "quality", "diversity", "reputation", "error_rate", "format")


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
    ends = [tables.eval_of(evals, stage, trained) for stage in ("after_sft", "final")]
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


# --------------------------------------------------------------------------------------- report.md


def write(folder: Path) -> None:
    """report.md, curves.png and report.html from what is in the folder."""
    from bookkeeping import viewer

    summary = records.record(folder / "summary.json")
    if "api" not in summary:  # an evaluation over an API already has its report.md (bridges/api.py)
        lines = records.clean(records.lines(folder / "metrics.jsonl"))
        evals = records.with_exact(records.clean(records.lines(folder / "evals.jsonl")))
        during = [e for e in evals if e["stage"] != "eval_only"]  # the others get their own table
        curves.draw_curves(folder / "curves.png", summary, lines, during)
        more = tables.eval_only(evals)
        if summary["env"] == "swarm":
            from bookkeeping import behaviour

            episodes = records.lines(folder / "episodes.jsonl")
            more = behaviour.sections(summary["config"], evals, episodes) + more
        pages = [text(records.clean(folder.name), summary, lines, during)]
        if more:
            pages.append(tables.markdown(more))
        records.write_whole(folder / "report.md", "\n".join(pages))
    viewer.write_html(folder)


def text(name: str, summary: dict, lines: list[dict], evals: list[dict]) -> str:
    """report.md, up to the sections that only some runs have."""
    out = [
        *(f"# {name}", "", *head(summary), ""),
        *("Curves and episodes to click through: report.html.", ""),
        *("## Config", "", *config_table(summary), ""),
        *("## SFT warm-up", "", *sft_table(summary, evals), ""),
        *("## Evaluation", "", *evaluation_table(summary, evals), ""),
        *("## Trajectory", ""),
    ]
    if lines:
        out += trajectory_table(lines, tables.own_parts_of(summary, evals))
    told = (f"* {sentence}" for sentence in observations(summary, lines, evals))
    out += ["", "## Observations (computed)", "", *told, "", "![curves](curves.png)", ""]
    return "\n".join(out)


def head(summary: dict) -> list[str]:
    """The result in three or four sentences."""
    config, trained, tokens = summary["config"], summary["trained"], summary["tokens"]
    (exact, reward), results = tables.shown(summary), summary["eval"][trained]
    three = lambda form: " → ".join(form(results[stage]) for stage in STAGES)
    what = f"exact answers {three(cell)}" if exact else f"mean reward {three(reward_cell)}"
    out = [
        f"{config['env']}, {trained}: {what} "
        f"(before → after SFT → after {summary['updates']} updates of GRPO; greedy, "
        f"{results['final']['n']} development tasks, 95% intervals)."
    ]
    over = "Gain of GRPO over SFT in {}, on the same tasks: {}."
    if exact and reward:
        out.append(f"Mean reward {three(reward_cell)}.")
    if reward:
        out.append(over.format("reward", Interval(**summary["gain_reward"]).signed()))
    if exact:
        out.append(over.format("exact answers", Interval(**summary["gain"]).points()))
    minutes, device = summary["seconds"]["total"] / 60, summary["machine"]["device"]
    return [
        *out,
        "",
        f"{minutes:.1f} minutes on {device}; peak memory {summary['peak_rss_gb']:.2f} GB; "
        f"{tokens['sampled']:,} tokens sampled, {tokens['trained']:,} trained.",
    ]


def config_table(summary: dict) -> list[str]:
    m = summary["machine"]
    versions = f"python {m['python']}, torch {m['torch']}, transformers {m['transformers']}"
    rows = [[key, str(v)] for key, v in summary["config"].items() if v not in ("", None)]
    rows.append(["trainable parameters", f"{m['trainable']:,} of {m['parameters']:,}"])
    rows.append(["versions", f"{versions}, peft {m['peft']}"])
    return tables.grid(["parameter", "value"], rows)


def sft_table(summary: dict, evals: list[dict]) -> list[str]:
    after, rows = tables.eval_of(evals, "after_sft", summary["trained"]), []
    if sft := summary["sft"]:
        steps = summary["config"]["sft_steps"]
        loss = f"{sft['loss_first']:.2f} → {sft['loss_last']:.2f} ({steps} steps)"
        rows.append(["SFT loss", loss])
    if "format" in after:  # an environment of one's own need not report it
        share = metrics.mean(after["format"])
        rows.append(["format compliance after SFT", f"{share.percent()}, n={share.n}"])
    rows.append(["mean reward after SFT", str(metrics.mean(after["reward"]))])
    return tables.grid(["metric", "value"], rows)


def evaluation_table(summary: dict, evals: list[dict]) -> list[str]:
    """A row per evaluation, a column per task set and measure."""
    (exact, reward), names = tables.shown(summary), list(summary["eval"])
    n = summary["eval"][summary["trained"]]["final"]["n"]
    measured = "exact answers and mean reward" if exact else "mean reward"
    columns = [(name, "exact") for name in names if exact]
    columns += [(name, "reward") for name in names if reward]
    columns += [(summary["trained"], name) for name in tables.own_parts_of(summary, evals)]
    rows = []
    for update, stage in dict.fromkeys((e["update"], e["stage"]) for e in evals):
        here = {e["tasks"]: e for e in evals if (e["update"], e["stage"]) == (update, stage)}
        titles = {
            "before": "before SFT",
            "after_sft": "after SFT (0)",
            "final": f"{update} (final)",
        }
        cells = [tables.cell(here.get(name, {}), what) for name, what in columns]
        rows.append([titles.get(stage, str(update)), *cells])
    title = ["update", *(f"{name}, {tables.label(what)}" for name, what in columns)]
    sentence = f"Greedy, the same {n} development tasks every time; {measured}, with 95% intervals."
    return [sentence, "", *tables.grid(title, rows)]


def trajectory_table(lines: list[dict], own: list[str] = ()) -> list[str]:
    """Ten blocks of updates. own: entries of the score that somebody has added."""
    habits = [key for key in lines[0] if key.startswith("habit_")]
    known = {key for line in lines for key in line}
    shown = [key for key in dict.fromkeys((*TRAJECTORY, *own)) if key in known]
    digits = dict.fromkeys(shown, 2) | {"reply_tokens": 0}
    health = ("groups_with_signal", "entropy", "grad_norm")
    size, rows = max(1, len(lines) // 10), []
    for block in (lines[i : i + size] for i in range(0, len(lines), size)):
        rows.append([
            f"{block[0]['update']}–{block[-1]['update']}",
            metrics.level([line["reward"] for line in block]).text(2),
            *(f"{mean_of(block, key):.{d}f}" for key, d in digits.items()),
            *(f"{100 * mean_of(block, habit):.0f}%" for habit in habits),
            *(f"{mean_of(block, key):.2f}" for key in health),
        ])  # fmt: skip
    means = [
        *(key.replace("_", " ") if key in own else key for key in shown),
        "reply tokens",
        *(habit.removeprefix("habit_") for habit in habits),
    ]
    title = ["updates", "reward", *means, *(key.replace("_", " ") for key in health)]
    what = "Means over blocks of updates; reward with the 95% interval of its level."
    return [what, "", *tables.grid(title, rows)]


def mean_of(lines: list[dict], key: str) -> float:
    """Mean over the updates that have the number: one without signal measures no entropy, say."""
    values = [line[key] for line in lines if key in line]
    return float(np.mean(values)) if values else float("nan")


# ------------------------------------------------------------------------------------ observations


def observations(summary: dict, lines: list[dict], evals: list[dict] = ()) -> list[str]:
    """What the data says, each sentence with its numbers."""
    out = about_gains(summary, lines)
    if versions := records.edited(records.environments_of(summary.get("machine", {}))):
        out.append(f"It was {versions}.")
    told = doctor.look_at(lines, evals, summary["config"])
    told = [f"Found wrong at {symptom}." for symptom in told]
    if not lines:
        return [*out, "No GRPO updates in this run.", *told]
    rewards, lengths = ([line[key] for line in lines] for key in ("reward", "reply_tokens"))
    out.append(f"Training reward, update by update: {metrics.distribution(rewards).sentence()}.")
    before = records.before_last_level(lines)
    settled = metrics.trend(rewards[before:]).sentence(before).capitalize()
    at = f" at level {lines[-1]['level']}" if before else ""
    out.append(f"Has the training reward settled{at}? {settled}.")
    out += about_levels(lines)
    tenth = max(1, len(lines) // 10)
    first, last = np.mean(lengths[:tenth]), np.mean(lengths[-tenth:])
    out.append(
        f"Replies went from {first:.0f} to {last:.0f} tokens (first and last tenth of the updates)."
    )
    out += about_thinking(lines, tenth)
    silent = 100 * float(np.mean([1 - line["groups_with_signal"] for line in lines]))
    out.append(f"{silent:.0f}% of the groups had no signal: every advantage in them was 0.")
    gap = mean_of(lines, "mismatch")
    out.append(f"Sampler and trainer disagree by {gap:.1e} nats a token on average.")
    out += told or ["Nothing was found wrong with the run (bookkeeping/doctor.py)."]
    seconds = summary["seconds"]
    named = ("wait" if seconds.get("wait") else "rollout", "train", "eval", "sft")
    total = max(seconds["total"], 1e-9)
    parts = ", ".join(f"{name} {100 * seconds[name] / total:.0f}%" for name in named)
    out.append(f"Time: {parts}; the rest is loading and writing.")
    return out + curves.where_time_goes(lines)


def about_gains(summary: dict, lines: list[dict]) -> list[str]:
    """Did GRPO gain over SFT on the trained tasks, and what became of the others?"""
    (exact, reward), trained, out = tables.shown(summary), summary["trained"], []

    def verdict(gain: Interval) -> str:
        if gain.low > 0:
            return "gained"
        return "lost" if gain.high < 0 else "neither gained nor lost measurably"

    if reward:
        gain = Interval(**summary["gain_reward"])
        where = "in reward" if exact else f"in reward on {trained}"
        out.append(f"GRPO {verdict(gain)} {where}: {gain.signed()}, n={gain.n}, paired.")
    if exact:
        gain = Interval(**summary["gain"])
        where = f"in exact answers on {trained}"
        out.append(f"GRPO {verdict(gain)} {where}: {gain.points()}, n={gain.n}, paired.")
    form = cell if exact else reward_cell
    for other, stages in summary["eval"].items():
        if other != trained:
            results = " → ".join(form(stages[s]) for s in STAGES[1:] if s in stages)
            update = last_update_on(other, lines)
            what = f"trained until update {update}" if update else "not trained"
            out.append(f"{other[0].upper()}{other[1:]}, which was {what}: {results}.")
    return out


def last_update_on(tasks: str, lines: list[dict]) -> int | None:
    """The last update on a level that a curriculum passed. None if it never trained on these tasks.

    A level is named "tier 6", "hard v0.2" or "Mine, level 3-5" in evaluations.
    """
    last = {str(line["level"]): line["update"] for line in lines if "level" in line}
    for level, update in last.items():
        if re.fullmatch(rf"(tier |.*, level )?{re.escape(level)}( v.*)?", tasks):
            return update
    return None


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


def main(given: list[str]) -> None:
    usage = (
        "python -m bookkeeping.report runs/NAME writes the report of a finished run again; "
        "to compare runs: python -m bookkeeping.compare runs/A runs/B …"
    )
    if given in (["-h"], ["--help"]):
        print(usage)
        return
    if len(given) != 1:
        raise SystemExit(f"it takes one run folder, and got {len(given)}; {usage}")
    if not (Path(given[0]) / "summary.json").exists():
        why = "has no summary.json yet: it is not finished, go on with --resume"
        why = why if Path(given[0]).is_dir() else "there is no such folder, check the path"
        raise SystemExit(f"{given[0]}: {why}; {usage}")
    with records.foreign(given[0]):
        write(Path(given[0]))
    print((Path(given[0]) / "report.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(sys.argv[1:])
