"""What a run leaves for a person: summary.json (numbers with intervals), report.md, curves.png and report.html (bookkeeping/viewer.py).

Everything here is computed from the run folder alone, so a report can be written again at any time:

    python -m bookkeeping.report runs/NAME
    python -m bookkeeping.report compare runs/A runs/B …     which is better? (bookkeeping/compare.py)

How the behaviour of a swarm run changed is told by bookkeeping/behaviour.py, whose sections stand at the end of its report.

The shape is that of a lab's training report: config, the SFT warm-up, the trajectory, the evaluations, observations, curves.
The observations are computed too; none is written by hand.
"""

import sys
from pathlib import Path

import numpy as np

import metrics
from bookkeeping import behaviour, compare, doctor, records, viewer

STAGES = ("before", "after_sft", "final")  # the evaluations that are results; those in between are a curve


def eval_of(evals: list[dict], stage: str, tasks: str) -> dict | None:
    return next((e for e in evals if e["stage"] == stage and e["tasks"] == tasks), None)


def summarize_run(folder: Path, config: dict, state: dict, machine: dict) -> dict:
    """summary.json: final numbers with 95% intervals. gain is GRPO over SFT on the trained tasks, paired by task.

    An environment without exact answers (swarm) has no exact, low, high and gain; every part of its reward has an interval instead.
    """
    evals = records.lines(folder / "evals.jsonl")
    trained = next(e["tasks"] for e in evals if e["trained"])
    table: dict = {}
    for e in evals:
        if e["stage"] in STAGES:
            n, reward, result = len(e["reward"]), metrics.mean(e["reward"]), {}
            if "exact" in e:
                exact = metrics.proportion(sum(e["exact"]), n)
                result = {"exact": exact.mean, "low": exact.low, "high": exact.high}
            table.setdefault(e["tasks"], {})[e["stage"]] = {
                "n": n, **result, "reward": reward.mean, "reward_low": reward.low, "reward_high": reward.high,
                **{name: float(np.mean(e[name])) for name in ("format", "reply_tokens", "truncated") if name in e},
                **({} if result else {"components": {k: behaviour.mean(k, behaviour.values(e, k)).dict() for k in behaviour.measures(e)}}),
            }  # fmt: skip
    sft, final = compare.same_tasks(*(eval_of(evals, stage, trained) for stage in ("after_sft", "final")))
    return {
        "env": config["env"], "model": config["model"] if config["model"] != "auto" else machine["model"], "seed": config["seed"],
        "trained": trained, "updates": state["update"], "eval": table,
        **({"gain": metrics.gain(sft["exact"], final["exact"]).dict()} if "exact" in final else {}), "gain_reward": metrics.gain(sft["reward"], final["reward"]).dict(),
        "sft": state["sft"], "warnings": state["warnings"],
        "seconds": {name: round(value, 2) for name, value in state["seconds"].items()},
        "tokens": state["tokens"], "peak_rss_gb": machine["peak_rss_gb"], "machine": machine, "config": config,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ report.md


def write(folder: Path) -> None:
    """report.md and curves.png from what is in the folder."""
    summary = records.record(folder / "summary.json")
    if "api" in summary:  # an evaluation over an API: bridges/api.py has written its report.md, and nothing was trained
        return viewer.write_html(folder)
    lines, evals = (records.clean(records.lines(folder / f"{name}.jsonl")) for name in ("metrics", "evals"))
    during = [e for e in evals if e["stage"] != "eval_only"]  # what --eval-only added later has a table of its own
    draw_curves(folder / "curves.png", summary, lines, during)
    more = behaviour.eval_only(evals)
    if summary["env"] == "swarm":
        more = behaviour.sections(summary["config"], evals, records.lines(folder / "episodes.jsonl")) + more
    (folder / "report.md").write_text(
        text(records.clean(folder.name), summary, lines, during) + ("\n" + behaviour.markdown(more) if more else "")
    )
    viewer.write_html(folder)


def cell(result: dict) -> str:
    return f"{100 * result['exact']:.1f}% [{100 * result['low']:.1f}, {100 * result['high']:.1f}]"


def reward_cell(result: dict) -> str:
    return f"{result['reward']:.3f} [{result['reward_low']:.3f}, {result['reward_high']:.3f}]"


def points(gain: dict) -> str:
    return f"{100 * gain['mean']:+.1f} points [{100 * gain['low']:+.1f}, {100 * gain['high']:+.1f}]"


def signed(gain: dict) -> str:
    return f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"


def shown(summary: dict) -> tuple[bool, bool]:
    """(exact, reward): what is there to show? Where the reward is the exactness itself, one of the two is enough."""
    stages = [stage for stages in summary["eval"].values() for stage in stages.values()]
    exact = "gain" in summary
    return exact, not exact or any(stage["reward"] != stage["exact"] for stage in stages)


def text(name: str, summary: dict, lines: list[dict], evals: list[dict]) -> str:
    config, m, trained = summary["config"], summary["machine"], summary["trained"]
    exact, reward = shown(summary)
    result = summary["eval"][trained]
    n = result["final"]["n"]
    answers, rewards = (" → ".join(form(result[s]) for s in STAGES) if has else "" for form, has in ((cell, exact), (reward_cell, reward)))
    out = [
        f"# {name}", "",
        f"{config['env']}, {trained}: {f'exact answers {answers}' if exact else f'mean reward {rewards}'} "
        f"(before → after SFT → after {summary['updates']} updates of GRPO; greedy, {n} held-out tasks, 95% intervals).",
        *([f"Mean reward {rewards}."] if exact and reward else []),
        *([f"Gain of GRPO over SFT in reward, on the same tasks: {signed(summary['gain_reward'])}."] if reward else []),
        *([f"Gain of GRPO over SFT in exact answers, on the same tasks: {points(summary['gain'])}."] if exact else []), "",
        f"{summary['seconds']['total'] / 60:.1f} minutes on {m['device']}; peak memory {summary['peak_rss_gb']:.2f} GB; "
        f"{summary['tokens']['sampled']:,} tokens sampled, {summary['tokens']['trained']:,} trained.", "",
        "Curves and episodes to click through: report.html.", "",
        "## Config", "", "| parameter | value |", "|---|---|",
        *(f"| {key} | {value} |" for key, value in config.items() if value not in ("", None)),
        f"| trainable parameters | {m['trainable']:,} of {m['parameters']:,} |",
        f"| versions | python {m['python']}, torch {m['torch']}, transformers {m['transformers']}, peft {m['peft']} |", "",
        "## SFT warm-up", "", "| metric | value |", "|---|---|",
    ]  # fmt: skip
    if summary["sft"]:
        out.append(f"| SFT loss | {summary['sft']['loss_first']:.2f} → {summary['sft']['loss_last']:.2f} ({config['sft_steps']} steps) |")
    after = eval_of(evals, "after_sft", trained)
    if "format" in after:  # an environment of one's own need not tell
        shape = compare.share(after["format"])
        out.append(f"| format compliance after SFT | {shape.percent()}, n={shape.n} |")
    out += [
        f"| mean reward after SFT | {metrics.mean(after['reward'])} |",
        "",
        "## Evaluation",
        "",
        f"Greedy, the same {n} held-out tasks every time; {'exact answers with their 95% Wilson interval, ' * exact}mean reward with its {'' if exact else '95% '}bootstrap interval.",
        "",
    ]
    names = list(summary["eval"])
    heads = [f"{name}, exact" for name in names if exact] + [f"{name}, reward" for name in names if reward]
    out += ["| update | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for done, stage in dict.fromkeys((e["update"], e["stage"]) for e in evals):
        mine = {e["tasks"]: e for e in evals if (e["update"], e["stage"]) == (done, stage)}
        row = [metrics.proportion(sum(mine[t]["exact"]), len(mine[t]["exact"])).percent() if t in mine else "" for t in names if exact]
        row += [str(metrics.mean(mine[t]["reward"])).partition(", n=")[0] if t in mine else "" for t in names if reward]
        label = {"before": "before SFT", "after_sft": "after SFT (0)", "final": f"{done} (final)"}.get(stage, str(done))
        out.append(f"| {label} | " + " | ".join(row) + " |")
    out += ["", "## Trajectory", ""]
    if lines:
        habits = [key for key in lines[0] if key.startswith("habit_")]
        means = [key for key in ("exact", "payoff", "quality", "diversity", "reputation", "error_rate", "format") if key in lines[0]]
        heads = ["reward", *means, "reply tokens", *(h[6:] for h in habits), "groups with signal", "entropy", "grad norm"]
        out += ["Means over blocks of updates; reward with a 95% bootstrap interval over updates.", ""]
        out += ["| updates | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
        size = max(1, len(lines) // 10)
        for block in (lines[i : i + size] for i in range(0, len(lines), size)):
            average = lambda key, block=block: mean_of(block, key)
            r = metrics.mean([line["reward"] for line in block])
            cells = [f"{r.mean:.2f} [{r.low:.2f}, {r.high:.2f}]", *(f"{average(key):.2f}" for key in means),
                     f"{average('reply_tokens'):.0f}", *(f"{100 * average(h):.0f}%" for h in habits),
                     *(f"{average(key):.2f}" for key in ("groups_with_signal", "entropy", "grad_norm"))]  # fmt: skip
            out.append(f"| {block[0]['update']}–{block[-1]['update']} | " + " | ".join(cells) + " |")
    out += ["", "## Observations (computed)", "", *(f"* {o}" for o in observations(summary, lines)), "", "![curves](curves.png)", ""]
    return "\n".join(out)


def observations(summary: dict, lines: list[dict]) -> list[str]:
    """What the data says, each sentence with its numbers."""
    trained, out = summary["trained"], []
    word = lambda gain: "gained" if gain["low"] > 0 else "lost" if gain["high"] < 0 else "neither gained nor lost measurably"
    exact, reward = shown(summary)
    if reward:
        gain = summary["gain_reward"]
        out.append(f"GRPO {word(gain)} in reward{'' if exact else f' on {trained}'}: {signed(gain)}, n={gain['n']}, paired.")
    if exact:
        gain = summary["gain"]
        out.append(f"GRPO {word(gain)} in exact answers on {trained}: {points(gain)}, n={gain['n']}, paired.")
    for other, stages in summary["eval"].items():
        if other != trained:
            told = " → ".join((cell if exact else reward_cell)(stages[s]) for s in STAGES[1:] if s in stages)
            out.append(f"{other.capitalize()}, which was not trained: {told}.")
    if not lines:
        return out + ["No GRPO updates in this run."]
    rewards = [line["reward"] for line in lines]
    out.append("Training reward, update by update: " + metrics.distribution(rewards).sentence() + ".")
    out.append("Has the training reward settled? " + metrics.trend(rewards).sentence().capitalize() + ".")
    if len(levels := {line["level"]: line["update"] for line in reversed(lines) if "level" in line}) > 1 and "gain" not in summary:
        out.append("The curriculum: " + ", ".join(f"{level} from update {update}" for level, update in reversed(levels.items())) + ".")
    lengths = [line["reply_tokens"] for line in lines]
    tenth = max(1, len(lines) // 10)
    out.append(
        f"Replies went from {np.mean(lengths[:tenth]):.0f} to {np.mean(lengths[-tenth:]):.0f} tokens (first and last tenth of the updates)."
    )
    if "habit_derives" in lines[0]:
        share = 100 * np.mean([line["habit_derives"] for line in lines[-tenth:]])
        if start := thinking_starts(lines):
            out.append(f"It begins to think at update {start}: in that update and the next four, most replies derive the answer; "
                       f"in the last tenth of the updates {share:.0f}% do.")  # fmt: skip
        else:
            out.append(
                f"No five updates in a row had a majority of replies that derive the answer (last tenth of the updates: {share:.0f}%)."
            )
    silent = float(np.mean([1 - line["groups_with_signal"] for line in lines]))
    out.append(f"{100 * silent:.0f}% of the groups had no signal: every advantage in them was 0.")
    out.append(f"Sampler and trainer disagree by {mean_of(lines, 'mismatch'):.1e} nats a token on average.")
    out += [f"Found wrong at {told}." for told in doctor.look_at(lines)] or [
        "Nothing was found wrong with the run (bookkeeping/doctor.py)."
    ]
    seconds = summary["seconds"]
    named = ("wait" if seconds.get("wait") else "rollout", "train", "eval", "sft")
    parts = ", ".join(f"{name} {100 * seconds[name] / max(seconds['total'], 1e-9):.0f}%" for name in named)
    out.append(f"Time: {parts}; the rest is loading and writing.")
    return out + where_time_goes(lines)


BARS = {"rollout": "tab:blue", "environment": "tab:cyan", "sync": "tab:purple", "train": "tab:orange", "wait": "lightgray"}


def time_bars(lines: list[dict]) -> dict[str, dict[str, float]]:
    """Mean seconds of an update by part, one bar a process: {"in turn": {...}}, or for a run ahead {"trainer": {...}, "sampler": {...}}."""
    mean = {part: float(np.mean([line.get(f"seconds_{part}", 0.0) for line in lines])) for part in BARS}
    if not mean["wait"]:
        return {"in turn": {part: mean[part] for part in ("rollout", "environment", "sync", "train")}}
    played = {part: mean[part] for part in ("rollout", "environment", "sync")}
    rest = max(0.0, mean["wait"] + mean["train"] - sum(played.values()))
    return {"trainer": {part: mean[part] for part in ("train", "wait")}, "sampler": played | {"wait": rest}}


def waiting(lines: list[dict]) -> float:
    """Share of an update's time in which the trainer has to wait for samples. In turn that is all but its own work."""
    bar = next(iter(time_bars(lines).values()))
    return 1 - bar["train"] / max(sum(bar.values()), 1e-9)


def where_time_goes(lines: list[dict]) -> list[str]:
    """One sentence for observations; none for runs older than this measurement."""
    if "seconds_environment" not in lines[0]:
        return []
    told = []
    for who, bar in time_bars(lines).items():
        whole = max(sum(bar.values()), 1e-9)
        told.append(f"{who} {whole:.2f} s: " + ", ".join(f"{part} {100 * s / whole:.0f}%" for part, s in bar.items()))
    return [f"An update, on average: {'; '.join(told)}. The trainer waits for samples {100 * waiting(lines):.0f}% of the time."]


def mean_of(lines: list[dict], key: str) -> float:
    """Mean over the updates that have the number: entropy, say, is not measured in an update without signal."""
    values = [line[key] for line in lines if key in line]
    return float(np.mean(values)) if values else float("nan")


def thinking_starts(lines: list[dict]) -> int | None:
    """The first update from which the next five all have a majority of deriving replies."""
    shares = [line.get("habit_derives", 0.0) for line in lines]
    return next((lines[i]["update"] for i in range(len(shares) - 4) if min(shares[i : i + 5]) > 0.5), None)


# ------------------------------------------------------------------------------------------------ curves.png


def draw_curves(path: Path, summary: dict, lines: list[dict], evals: list[dict]) -> None:
    """Four pictures: held-out tasks, training reward, then habits and reply length; for swarm what the turns are used for, and how they go."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rc("text", parse_math=False)  # a name may hold a $
    import matplotlib.pyplot as plt

    timed = bool(lines) and "seconds_environment" in lines[0]
    wide = 13 if summary["env"] == "swarm" else 11
    fig = plt.figure(figsize=(wide, 8.6 if timed else 7.5), layout="constrained")
    grid = fig.add_gridspec(3, 2, height_ratios=(1, 1, 0.2)) if timed else fig.add_gridspec(2, 2)
    axes = np.array([[fig.add_subplot(grid[i, j]) for j in (0, 1)] for i in (0, 1)])
    if timed:
        draw_time(fig.add_subplot(grid[2, :]), lines)
    fig.suptitle(f"{summary['env']}, trained on {summary['trained']}, {Path(summary['model']).name}, seed {summary['seed']}")
    draw_held_out(axes[0, 0], summary, evals)
    if lines:
        draw_training(axes[0, 1], lines, "gain" in summary)
        if summary["env"] == "swarm":
            behaviour.draw_tools(axes[1, 0], lines)
            behaviour.draw_turns(axes[1, 1], lines, min(10, len(lines)))
        else:
            draw_habits(axes[1, 0], axes[1, 1], lines)
    else:
        for ax in axes.flat[1:]:
            ax.text(0.5, 0.5, "no GRPO updates in this run", ha="center", transform=ax.transAxes)
    for ax in axes.flat:
        ax.grid(alpha=0.25)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def draw_time(ax, lines: list[dict]) -> None:
    """Where the seconds of an update go, one stacked bar a process."""
    draw_bars(ax, time_bars(lines))
    ax.set(title=f"where an update's seconds go (the trainer waits for samples {100 * waiting(lines):.0f}% of the time)")


def draw_bars(ax, bars: dict[str, dict[str, float]]) -> None:
    """{name: {part of BARS: seconds}} as stacked bars, the first on top."""
    for y, bar in enumerate(bars.values()):
        left, whole = 0.0, max(sum(bar.values()), 1e-9)
        for part, seconds in bar.items():
            ax.barh(y, seconds, left=left, color=BARS[part], height=0.7, label=part)
            if seconds > 0.06 * whole:
                ax.text(left + seconds / 2, y, f"{part} {100 * seconds / whole:.0f}%", ha="center", va="center", fontsize=8)
            left += seconds
    ax.set_yticks(range(len(bars)), list(bars))
    ax.set(xlabel="s", ylim=(len(bars) - 0.5, -0.5))
    ax.margins(x=0)


def draw_held_out(ax, summary: dict, evals: list[dict]) -> None:
    """Exact answers, or the mean reward where there is no such thing, with 95% bands."""
    (has_exact, has_reward), trained = shown(summary), summary["trained"]
    scale = 100 if has_exact else 1
    exact, reward = (lambda e: metrics.proportion(sum(e["exact"]), len(e["exact"]))), (lambda e: metrics.mean(e["reward"]))
    curves = [(name, "exact" if has_reward else name, exact) for name in summary["eval"] if has_exact]
    curves += [(trained, "mean reward", reward)] if has_exact and has_reward else []
    if not has_exact:
        behaviour.draw_parts(ax, summary["config"], [e for e in evals if e["tasks"] == trained and e["stage"] != "before"])
        curves = [(name, f"reward, {name}", reward) for name in summary["eval"]]
    for name, label, measure in curves:
        points = [(max(e["update"], 0), measure(e)) for e in evals if e["tasks"] == name and e["stage"] != "before"]
        x, p = [a for a, _ in points], [b for _, b in points]
        (line,) = ax.plot(x, [scale * i.mean for i in p], marker="o", ms=3, lw=2.2 if name == trained else 1, label=label)
        ax.fill_between(x, [scale * i.low for i in p], [scale * i.high for i in p], alpha=0.18, color=line.get_color())
        if before := eval_of(evals, "before", name):
            ax.plot(0, scale * measure(before).mean, marker="x", color=line.get_color())
    title, label = (
        f"held-out tasks (n={len(evals[0]['reward'])}, 95% bands; × before SFT)",
        "% exact (reward x 100)" if has_reward else "% exactly right",
    )
    ax.set(title=title, xlabel="update", ylabel=label if has_exact else "reward, and its parts", ylim=(-2, 102) if has_exact else (0, None))
    ax.legend(loc="lower right", fontsize=None if has_exact else 8)


def draw_training(ax, lines: list[dict], shares: bool) -> None:
    """The training reward. shares: it lies between 0 and 1."""
    x, window = [line["update"] for line in lines], min(10, len(lines))
    ax.plot(x, [line["reward"] for line in lines], lw=0.7, alpha=0.5, label="each update")
    rolling = np.convolve([line["reward"] for line in lines], np.ones(window) / window, mode="valid")
    ax.plot(x[window - 1 :], rolling, lw=2, label=f"mean of {window}")
    if shares:
        ax.plot(x, [line["groups_with_signal"] for line in lines], lw=0.7, color="grey", label="share of groups with signal")
        ax.set(title="training reward", xlabel="update", ylim=(-0.02, 1.02))
    else:
        ax.set(title="training reward", xlabel="update")
        for last, line in zip(lines, lines[1:]):  # a step of the curriculum
            if last.get("level") != line.get("level"):
                ax.axvline(line["update"], color="black", ls="--", lw=1)
                ax.text(line["update"], 0.02, f" {line['level']}", transform=ax.get_xaxis_transform(), fontsize=9)
    ax.legend(loc="lower right")


def draw_habits(left, right, lines: list[dict]) -> None:
    """What kind of replies there are, and how long they are."""
    x, habits = [line["update"] for line in lines], [key for key in lines[0] if key.startswith("habit_")]
    if habits:
        left.stackplot(x, [[100 * line[h] for line in lines] for h in habits], labels=[h[6:] for h in habits], alpha=0.8)
        left.legend(loc="center right")
    if start := thinking_starts(lines):
        for a in (left, right):
            a.axvline(start, color="black", ls="--", lw=1)
        right.annotate(f" begins to think\n (update {start})", (start, right.get_ylim()[0]), fontsize=9)
    left.set(title="habits of the sampled replies", xlabel="update", ylabel="% of replies", ylim=(0, 100))
    right.plot(x, [line["reply_tokens"] for line in lines], lw=1.2)
    right.set(title="reply length", xlabel="update", ylabel="tokens", ylim=(0, None))
    if start:
        right.texts[0].set_position((start, 5))


if __name__ == "__main__":
    if sys.argv[1:2] == ["compare"]:
        compare.main([Path(name) for name in sys.argv[2:]])
        sys.exit()
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "summary.json").exists():
        raise SystemExit(
            "usage: python -m bookkeeping.report runs/NAME   (a finished run: it has a summary.json), or: python -m bookkeeping.report compare runs/A runs/B …"
        )
    with records.foreign(sys.argv[1]):
        write(Path(sys.argv[1]))
    print((Path(sys.argv[1]) / "report.md").read_text())
