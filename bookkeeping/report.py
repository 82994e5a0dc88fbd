"""What a run leaves for a person: summary.json, report.md, curves.png and report.html.

Everything is computed from the run folder alone, so a report can be written again at any time:

    python -m bookkeeping.report runs/NAME
    python -m bookkeeping.report compare runs/A runs/B …   which is better? (bookkeeping/compare.py)

It has the shape of a lab's training report: config, SFT warm-up, trajectory, evaluations,
observations, curves. The observations are computed too; nobody writes one by hand. A run of swarm
also gets the sections of bookkeeping/behaviour.py. report.html is bookkeeping/viewer.py's. Both are
loaded when they are needed, so that training letters loads no swarm and no HTML.
"""

import sys
from pathlib import Path

import numpy as np

import metrics
from bookkeeping import doctor, records, tables
from metrics import Interval

STAGES = ("before", "after_sft", "final")  # evaluations that are results; the others are a curve
TRAJECTORY = ("exact", "payoff", "quality", "diversity", "reputation", "error_rate", "format")


def eval_of(evals: list[dict], stage: str, tasks: str) -> dict | None:
    return next((e for e in evals if e["stage"] == stage and e["tasks"] == tasks), None)


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
    ends = [eval_of(evals, stage, trained) for stage in ("after_sft", "final")]
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


def shown(summary: dict) -> tuple[bool, bool]:
    """(exact, reward): what is there to show? If the reward is the exactness, one is enough."""
    results = [result for stages in summary["eval"].values() for result in stages.values()]
    exact = "gain" in summary
    return exact, not exact or any(result["reward"] != result["exact"] for result in results)


# --------------------------------------------------------------------------------------- report.md


def write(folder: Path) -> None:
    """report.md, curves.png and report.html from what is in the folder."""
    from bookkeeping import viewer

    summary = records.record(folder / "summary.json")
    if "api" not in summary:  # an evaluation over an API already has its report.md (bridges/api.py)
        lines = records.clean(records.lines(folder / "metrics.jsonl"))
        evals = records.with_exact(records.clean(records.lines(folder / "evals.jsonl")))
        during = [e for e in evals if e["stage"] != "eval_only"]  # the others get their own table
        draw_curves(folder / "curves.png", summary, lines, during)
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
        out += trajectory_table(lines, own_parts(summary, evals))
    told = (f"* {sentence}" for sentence in observations(summary, lines, evals))
    out += ["", "## Observations (computed)", "", *told, "", "![curves](curves.png)", ""]
    return "\n".join(out)


def head(summary: dict) -> list[str]:
    """The result in three or four sentences."""
    config, trained, tokens = summary["config"], summary["trained"], summary["tokens"]
    (exact, reward), results = shown(summary), summary["eval"][trained]
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
    after, rows = eval_of(evals, "after_sft", summary["trained"]), []
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
    (exact, reward), names = shown(summary), list(summary["eval"])
    n = summary["eval"][summary["trained"]]["final"]["n"]
    measured = "exact answers and mean reward" if exact else "mean reward"
    columns = [(name, "exact") for name in names if exact]
    columns += [(name, "reward") for name in names if reward]
    columns += [(summary["trained"], name) for name in own_parts(summary, evals)]
    rows = []
    for update, stage in dict.fromkeys((e["update"], e["stage"]) for e in evals):
        here = {e["tasks"]: e for e in evals if (e["update"], e["stage"]) == (update, stage)}
        titles = {
            "before": "before SFT",
            "after_sft": "after SFT (0)",
            "final": f"{update} (final)",
        }
        row = [titles.get(stage, str(update))]
        for name, what in columns:
            if name not in here:
                row.append("")
            elif what == "exact":
                row.append(metrics.mean(here[name]["exact"]).percent())
            else:
                row.append(tables.cell(here[name], what))
        rows.append(row)
    title = ["update", *(f"{name}, {tables.label(what)}" for name, what in columns)]
    sentence = f"Greedy, the same {n} development tasks every time; {measured}, with 95% intervals."
    return [sentence, "", *tables.grid(title, rows)]


def own_parts(summary: dict, evals: list[dict]) -> list[str]:
    """The entries of the score that somebody has added, of the tasks that are trained."""
    found = [tables.measures(e) for e in evals if e["tasks"] == summary["trained"]]
    names = dict.fromkeys(name for measures in found for name in measures)
    return tables.own_parts(names, summary["env"])


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
    out = about_gains(summary)
    if versions := records.edited(records.environments_of(summary.get("machine", {}))):
        out.append(f"It was {versions}.")
    told = doctor.look_at(lines, evals, summary["config"])
    told = [f"Found wrong at {symptom}." for symptom in told]
    if not lines:
        return [*out, "No GRPO updates in this run.", *told]
    rewards, lengths = ([line[key] for line in lines] for key in ("reward", "reply_tokens"))
    out.append(f"Training reward, update by update: {metrics.distribution(rewards).sentence()}.")
    settled = metrics.trend(rewards).sentence().capitalize()
    out.append(f"Has the training reward settled? {settled}.")
    out += about_levels(summary, lines)
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
    return out + where_time_goes(lines)


def about_gains(summary: dict) -> list[str]:
    """Did GRPO gain over SFT on the trained tasks, and what became of the others?"""
    (exact, reward), trained, out = shown(summary), summary["trained"], []

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
            out.append(f"{other.capitalize()}, which was not trained: {results}.")
    return out


def about_levels(summary: dict, lines: list[dict]) -> list[str]:
    """When a curriculum of named levels moved on."""
    began: dict = {}
    for line in lines:
        if "level" in line:
            began.setdefault(line["level"], line["update"])
    if len(began) < 2 or "gain" in summary:
        return []
    told = ", ".join(f"{level} from update {update}" for level, update in began.items())
    return [f"The curriculum: {told}."]


def about_thinking(lines: list[dict], tenth: int) -> list[str]:
    """When most replies began to derive the answer, if the environment tells."""
    if "habit_derives" not in lines[0]:
        return []
    share = 100 * np.mean([line["habit_derives"] for line in lines[-tenth:]])
    start = thinking_starts(lines)
    if start is None:
        return [
            "No five updates in a row had a majority of replies that derive the answer "
            f"(last tenth of the updates: {share:.0f}%)."
        ]
    return [
        f"It begins to think at update {start}: in that update and the next four, most replies "
        f"derive the answer; in the last tenth of the updates {share:.0f}% do."
    ]


def thinking_starts(lines: list[dict]) -> int | None:
    """The first of five updates in a row in which a majority of the replies derive the answer."""
    shares = [line.get("habit_derives", 0.0) for line in lines]
    starts = (i for i in range(len(shares) - 4) if min(shares[i : i + 5]) > 0.5)
    return next((lines[i]["update"] for i in starts), None)


# --------------------------------------------------------------------------- where the seconds go

BARS = {
    "rollout": "tab:blue", "environment": "tab:cyan", "sync": "tab:purple", "train": "tab:orange",
    "wait": "lightgray",
}  # fmt: skip


def time_bars(lines: list[dict]) -> dict[str, dict[str, float]]:
    """Mean seconds of an update by part, one bar per process.

    {"in turn": {...}}, or for a run that samples ahead {"trainer": {...}, "sampler": {...}}.
    """
    seconds = lambda part: [line.get(f"seconds_{part}", 0.0) for line in lines]
    mean = {part: float(np.mean(seconds(part))) for part in BARS}
    played = {part: mean[part] for part in ("rollout", "environment", "sync")}
    if not mean["wait"]:
        return {"in turn": played | {"train": mean["train"]}}
    rest = max(0.0, mean["wait"] + mean["train"] - sum(played.values()))
    return {
        "trainer": {part: mean[part] for part in ("train", "wait")},
        "sampler": played | {"wait": rest},
    }


def waiting(lines: list[dict]) -> float:
    """The share of an update in which the trainer waits: in turn, all but its own work."""
    bar = next(iter(time_bars(lines).values()))
    return 1 - bar["train"] / max(sum(bar.values()), 1e-9)


def where_time_goes(lines: list[dict]) -> list[str]:
    """One sentence for observations; none for runs older than this measurement."""
    if "seconds_environment" not in lines[0]:
        return []
    told = []
    for who, bar in time_bars(lines).items():
        whole = max(sum(bar.values()), 1e-9)
        parts = ", ".join(f"{part} {100 * s / whole:.0f}%" for part, s in bar.items())
        told.append(f"{who} {whole:.2f} s: {parts}")
    return [
        f"An update, on average: {'; '.join(told)}. "
        f"The trainer waits for samples {100 * waiting(lines):.0f}% of the time."
    ]


# -------------------------------------------------------------------------------------- curves.png


def draw_curves(path: Path, summary: dict, lines: list[dict], evals: list[dict]) -> None:
    """Four pictures: development tasks, training reward, habits, reply length.

    For swarm the last two are what the turns are used for, and how they go. Entries of the score
    that somebody has added have a picture of their own.
    """
    plt, swarm = tables.pyplot(), summary["env"] == "swarm"
    timed = bool(lines) and "seconds_environment" in lines[0]
    own = own_parts(summary, evals)
    heights = (1, 1, *[0.2] * timed, *[0.8] * bool(own))
    size = (13 if swarm else 11, 7.5 + 1.1 * timed + 3 * bool(own))
    fig = plt.figure(figsize=size, layout="constrained")
    grid = fig.add_gridspec(len(heights), 2, height_ratios=heights)
    evaluations, training, *lower = (fig.add_subplot(grid[i, j]) for i in (0, 1) for j in (0, 1))
    if timed:
        draw_time(fig.add_subplot(grid[2, :]), lines)
    if own:
        draw_own(fig.add_subplot(grid[-1, :]), own, lines, evals, summary["trained"])
    model, seed = Path(summary["model"]).name, summary["seed"]
    fig.suptitle(f"{summary['env']}, trained on {summary['trained']}, {model}, seed {seed}")
    draw_evaluations(evaluations, summary, evals)
    if not lines:
        for ax in (training, *lower):
            where = {"ha": "center", "transform": ax.transAxes}
            ax.text(0.5, 0.5, "no GRPO updates in this run", **where)
    else:
        shares = "gain" in summary and all(0 <= line["reward"] <= 1 for line in lines)
        draw_training(training, lines, shares)
        if swarm:
            from bookkeeping import behaviour

            behaviour.draw_tools(lower[0], lines)
            behaviour.draw_turns(lower[1], lines, min(10, len(lines)))
        else:
            draw_habits(*lower, lines)
    for ax in (evaluations, training, *lower):
        ax.grid(alpha=0.25)
    if path.is_symlink():  # somebody's: it is replaced, not followed
        path.unlink()
    fig.savefig(path, dpi=110)
    plt.close(fig)


def draw_own(ax, own: list[str], lines: list[dict], evals: list[dict], trained: str) -> None:
    """Entries of the score that somebody has added: of every update, and on development tasks."""
    during = [e for e in evals if e["tasks"] == trained and e["stage"] != "before"]
    for i, name in enumerate(own):
        here, color = [line for line in lines if name in line], f"C{i % 10}"
        ax.plot(
            [e["update"] for e in here], [e[name] for e in here], lw=0.7, alpha=0.5, color=color
        )
        here = [e for e in during if name in e]
        points = [tables.average(tables.values(e, name)) for e in here]
        x, ends = [max(e["update"], 0) for e in here], np.array([(p.low, p.high) for p in points])
        ax.plot(
            x, [p.mean for p in points], marker="o", ms=3, color=color, label=tables.label(name)
        )
        ax.fill_between(x, *ends.reshape(-1, 2).T, alpha=0.18, color=color)
    ax.grid(alpha=0.25)
    ax.set(title="further parts of the score (development with 95% bands; thin: training)")
    ax.set(xlabel="update")
    ax.legend(loc="best", fontsize=8)


def draw_time(ax, lines: list[dict]) -> None:
    """Where the seconds of an update go, one stacked bar per process."""
    draw_bars(ax, time_bars(lines))
    waits = f"the trainer waits for samples {100 * waiting(lines):.0f}% of the time"
    ax.set(title=f"where an update's seconds go ({waits})")


def draw_bars(ax, bars: dict[str, dict[str, float]]) -> None:
    """{name: {part of BARS: seconds}} as stacked bars, the first on top."""
    for y, bar in enumerate(bars.values()):
        left, whole = 0.0, max(sum(bar.values()), 1e-9)
        for part, seconds in bar.items():
            ax.barh(y, seconds, left=left, color=BARS[part], height=0.7, label=part)
            if seconds > 0.06 * whole:
                name = f"{part} {100 * seconds / whole:.0f}%"
                ax.text(left + seconds / 2, y, name, ha="center", va="center", fontsize=8)
            left += seconds
    ax.set_yticks(range(len(bars)), list(bars))
    ax.set(xlabel="s", ylim=(len(bars) - 0.5, -0.5))
    ax.margins(x=0)


def draw_evaluations(ax, summary: dict, evals: list[dict]) -> None:
    """Exact answers, or the mean reward if there is no such thing, with 95% bands."""
    (has_exact, has_reward), trained = shown(summary), summary["trained"]
    factor, names = (100 if has_exact else 1), list(summary["eval"])
    exact, reward = (lambda e: metrics.mean(e["exact"])), (lambda e: metrics.mean(e["reward"]))
    of = lambda name: f", {name}" if len(names) > 1 else ""  # else the title says it
    curves = [(name, f"exact{of(name)}" if has_reward else name, exact) for name in names]
    if not has_exact:
        curves = [(name, f"reward, {name}", reward) for name in names]
    elif has_reward:
        curves.append((trained, f"mean reward{of(trained)}", reward))
    if summary["env"] == "swarm":
        from bookkeeping import behaviour

        of_trained = [e for e in evals if e["tasks"] == trained and e["stage"] != "before"]
        behaviour.draw_parts(ax, summary["config"], of_trained)
    for name, label, measure in curves:
        curve = [e for e in evals if e["tasks"] == name and e["stage"] != "before"]
        x, points = [max(e["update"], 0) for e in curve], [measure(e) for e in curve]
        mean, low, high = (
            [factor * getattr(p, end) for p in points] for end in ("mean", "low", "high")
        )
        wide = 2.2 if name == trained else 1
        (line,) = ax.plot(x, mean, marker="o", ms=3, lw=wide, label=label)
        ax.fill_between(x, low, high, alpha=0.18, color=line.get_color())
        before = eval_of(evals, "before", name)
        if before:
            ax.plot(0, factor * measure(before).mean, marker="x", color=line.get_color())
    n = len(evals[0]["reward"])
    ax.set(title=f"development tasks (n={n}, 95% bands; × before SFT)", xlabel="update")
    if has_exact:
        ylabel = "% exact (reward x 100)" if has_reward else "% exactly right"
        ax.set(ylabel=ylabel, ylim=(-2, 102))
    else:
        ax.set(ylabel="reward, and its parts", ylim=(0, None))
    ax.legend(loc="lower right", fontsize=None if has_exact else 8)


def draw_training(ax, lines: list[dict], shares: bool) -> None:
    """The training reward. shares: it lies between 0 and 1."""
    x, rewards = [line["update"] for line in lines], [line["reward"] for line in lines]
    window = min(10, len(lines))
    ax.plot(x, rewards, lw=0.7, alpha=0.5, label="each update")
    rolling = np.convolve(rewards, np.ones(window) / window, mode="valid")
    ax.plot(x[window - 1 :], rolling, lw=2, label=f"mean of {window}")
    ax.set(title="training reward", xlabel="update")
    if shares:
        signal = [line["groups_with_signal"] for line in lines]
        ax.plot(x, signal, lw=0.7, color="grey", label="share of groups with signal")
        ax.set(ylim=(-0.02, 1.02))
    else:
        for before, line in zip(lines, lines[1:]):
            if before.get("level") != line.get("level"):  # a step of the curriculum
                ax.axvline(line["update"], color="black", ls="--", lw=1)
                where = {"transform": ax.get_xaxis_transform(), "fontsize": 9}
                ax.text(line["update"], 0.02, f" {line['level']}", **where)
    ax.legend(loc="lower right")


def draw_habits(left, right, lines: list[dict]) -> None:
    """What kinds of replies there are, and how long they are."""
    x = [line["update"] for line in lines]
    habits = [key for key in lines[0] if key.startswith("habit_")]
    if habits:
        layers = [[100 * line[habit] for line in lines] for habit in habits]
        names = [habit.removeprefix("habit_") for habit in habits]
        left.stackplot(x, layers, labels=names, alpha=0.8)
        left.legend(loc="center right")
    start = thinking_starts(lines)
    if start is not None:
        for ax in (left, right):
            ax.axvline(start, color="black", ls="--", lw=1)
        right.annotate(f" begins to think\n (update {start})", (start, 5), fontsize=9)
    percent = {"ylabel": "% of replies", "ylim": (0, 100)}
    left.set(title="habits of the sampled replies", xlabel="update", **percent)
    right.plot(x, [line["reply_tokens"] for line in lines], lw=1.2)
    right.set(title="reply length", xlabel="update", ylabel="tokens", ylim=(0, None))


def main(given: list[str]) -> None:
    if given[:1] == ["compare"]:
        from bookkeeping import compare

        compare.main([Path(name) for name in given[1:]])
        return
    if len(given) != 1 or not (Path(given[0]) / "summary.json").exists():
        raise SystemExit(
            "usage: python -m bookkeeping.report runs/NAME   (a finished run: it has a "
            "summary.json), or: python -m bookkeeping.report compare runs/A runs/B …"
        )
    with records.foreign(given[0]):
        write(Path(given[0]))
    print((Path(given[0]) / "report.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(sys.argv[1:])
