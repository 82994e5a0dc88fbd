"""What a run leaves for a person: summary.json (numbers with intervals), report.md, curves.png and report.html (viewer.py).

Everything here is computed from the run folder alone, so a report can be written again at any time:

    python report.py runs/NAME
    python report.py compare runs/A runs/B …     which is better? (compare.py)

The shape is that of a lab's training report: config, the SFT warm-up, the trajectory, the evaluations, observations, curves.
The observations are computed too; none is written by hand.
"""

import json
import sys
from pathlib import Path

import numpy as np

import compare
import metrics
import viewer


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def eval_of(evals: list[dict], stage: str, tasks: str) -> dict | None:
    return next((e for e in evals if e["stage"] == stage and e["tasks"] == tasks), None)


def summarize_run(folder: Path, config: dict, state: dict, machine: dict) -> dict:
    """summary.json: final numbers with 95% intervals. gain is GRPO over SFT on the trained tasks, paired by task."""
    evals = read_lines(folder / "evals.jsonl")
    trained = next(e["tasks"] for e in evals if e["trained"])
    table: dict = {}
    for e in evals:
        if e["stage"] in ("before", "after_sft", "final"):
            n = len(e["exact"])
            exact, reward = metrics.proportion(sum(e["exact"]), n), metrics.mean(e["reward"])
            table.setdefault(e["tasks"], {})[e["stage"]] = {
                "n": n, "exact": exact.mean, "low": exact.low, "high": exact.high,
                "reward": reward.mean, "reward_low": reward.low, "reward_high": reward.high, "format": float(np.mean(e["format"])),
                "reply_tokens": float(np.mean(e["reply_tokens"])), "truncated": float(np.mean(e["truncated"])),
            }  # fmt: skip
    sft, final = (eval_of(evals, stage, trained) for stage in ("after_sft", "final"))
    return {
        "env": config["env"], "model": config["model"] if config["model"] != "auto" else machine["model"], "seed": config["seed"],
        "trained": trained, "updates": state["update"], "eval": table,
        "gain": metrics.gain(sft["exact"], final["exact"]).dict(), "gain_reward": metrics.gain(sft["reward"], final["reward"]).dict(),
        "sft": state["sft"], "collapse": state["collapse"],
        "seconds": {name: round(value, 2) for name, value in state["seconds"].items()},
        "tokens": state["tokens"], "peak_rss_gb": machine["peak_rss_gb"], "machine": machine, "config": config,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ report.md


def write(folder: Path) -> None:
    """report.md and curves.png from what is in the folder."""
    summary = json.loads((folder / "summary.json").read_text())
    lines, evals = read_lines(folder / "metrics.jsonl"), read_lines(folder / "evals.jsonl")
    draw_curves(folder / "curves.png", summary, lines, evals)
    (folder / "report.md").write_text(text(folder.name, summary, lines, evals))
    viewer.write_html(folder)


def cell(result: dict) -> str:
    return f"{100 * result['exact']:.1f}% [{100 * result['low']:.1f}, {100 * result['high']:.1f}]"


def reward_cell(result: dict) -> str:
    return f"{result['reward']:.3f} [{result['reward_low']:.3f}, {result['reward_high']:.3f}]"


def share(values: list[float]) -> metrics.Interval:
    """A share of tasks where each is right or wrong, a mean where a task can be partly right."""
    return metrics.proportion(sum(values), len(values)) if set(values) <= {0.0, 1.0} else metrics.mean(values)


def binary(summary: dict) -> bool:
    """Is the reward the exactness itself? Then one of the two is enough to show."""
    return all(stage["reward"] == stage["exact"] for stages in summary["eval"].values() for stage in stages.values())


def text(name: str, summary: dict, lines: list[dict], evals: list[dict]) -> str:
    config, m, trained = summary["config"], summary["machine"], summary["trained"]
    stages = ("before", "after_sft", "final")
    result = summary["eval"][trained]
    n = result["final"]["n"]
    gain, gain_reward = metrics.Interval(**summary["gain"]), metrics.Interval(**summary["gain_reward"])
    out = [
        f"# {name}", "",
        f"{config['env']}, {trained}: exact answers {' → '.join(cell(result[s]) for s in stages)} "
        f"(before → after SFT → after {summary['updates']} updates of GRPO; greedy, {n} held-out tasks, 95% intervals).",
        *([] if binary(summary) else [f"Mean reward {' → '.join(reward_cell(result[s]) for s in stages)}.",
          f"Gain of GRPO over SFT in reward, on the same tasks: {gain_reward.mean:+.3f} [{gain_reward.low:+.3f}, {gain_reward.high:+.3f}]."]),
        f"Gain of GRPO over SFT in exact answers, on the same tasks: {100 * gain.mean:+.1f} points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}].", "",
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
    reward, shape = metrics.mean(after["reward"]), share(after["format"])
    out += [
        f"| format compliance after SFT | {shape.percent()}, n={shape.n} |",
        f"| mean reward after SFT | {reward} |",
        "",
        "## Evaluation",
        "",
        f"Greedy, the same {n} held-out tasks every time; exact answers with their 95% Wilson interval, mean reward with its bootstrap interval.",
        "",
    ]
    names = list(summary["eval"])
    heads = [f"{name}, exact" for name in names] + ([] if binary(summary) else [f"{name}, reward" for name in names])
    out += ["| update | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for done, stage in dict.fromkeys((e["update"], e["stage"]) for e in evals):
        mine = [e for e in evals if (e["update"], e["stage"]) == (done, stage)]
        row = [metrics.proportion(sum(e["exact"]), len(e["exact"])).percent() for e in mine]
        row += [] if binary(summary) else [str(metrics.mean(e["reward"])).partition(", n=")[0] for e in mine]
        label = {"before": "before SFT", "after_sft": "after SFT (0)", "final": f"{done} (final)"}.get(stage, str(done))
        out.append(f"| {label} | " + " | ".join(row) + " |")
    out += ["", "## Trajectory", ""]
    if lines:
        habits = [key for key in lines[0] if key.startswith("habit_")]
        out += ["Means over blocks of updates; reward with a 95% bootstrap interval over updates.", ""]
        out += [
            "| updates | reward | exact | format | reply tokens | "
            + " | ".join(h[6:] for h in habits)
            + " | groups with signal | entropy | grad norm |"
        ]
        out += ["|---|" + "---|" * (7 + len(habits))]
        size = max(1, len(lines) // 10)
        for block in (lines[i : i + size] for i in range(0, len(lines), size)):
            average = lambda key, block=block: mean_of(block, key)
            r = metrics.mean([line["reward"] for line in block])
            cells = [f"{r.mean:.2f} [{r.low:.2f}, {r.high:.2f}]", *(f"{average(key):.2f}" for key in ("exact", "format")),
                     f"{average('reply_tokens'):.0f}", *(f"{100 * average(h):.0f}%" for h in habits),
                     *(f"{average(key):.2f}" for key in ("groups_with_signal", "entropy", "grad_norm"))]  # fmt: skip
            out.append(f"| {block[0]['update']}–{block[-1]['update']} | " + " | ".join(cells) + " |")
    out += ["", "## Observations (computed)", "", *(f"* {o}" for o in observations(summary, lines)), "", "![curves](curves.png)", ""]
    return "\n".join(out)


def observations(summary: dict, lines: list[dict]) -> list[str]:
    """What the data says, each sentence with its numbers."""
    trained, out = summary["trained"], []
    word = lambda gain: "gained" if gain.low > 0 else "lost" if gain.high < 0 else "neither gained nor lost measurably"
    gain, gain_reward = metrics.Interval(**summary["gain"]), metrics.Interval(**summary["gain_reward"])
    if not binary(summary):
        out.append(f"GRPO {word(gain_reward)} in reward: {gain_reward.mean:+.3f} [{gain_reward.low:+.3f}, {gain_reward.high:+.3f}], "
                   f"n={gain_reward.n}, paired.")  # fmt: skip
    out.append(f"GRPO {word(gain)} in exact answers on {trained}: {100 * gain.mean:+.1f} points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}], "
               f"n={gain.n}, paired.")  # fmt: skip
    for other, stages in summary["eval"].items():
        if other != trained:
            out.append(f"{other.capitalize()}, which was not trained: {cell(stages['after_sft'])} → {cell(stages['final'])}.")
    if not lines:
        return out + ["No GRPO updates in this run."]
    rewards = [line["reward"] for line in lines]
    out.append("Training reward, update by update: " + metrics.distribution(rewards).sentence() + ".")
    out.append("Has the training reward settled? " + metrics.trend(rewards).sentence().capitalize() + ".")
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
    out.append("COLLAPSE at " + summary["collapse"] if summary["collapse"] else "No collapse was noticed.")
    seconds = summary["seconds"]
    parts = ", ".join(f"{name} {100 * seconds[name] / max(seconds['total'], 1e-9):.0f}%" for name in ("rollout", "train", "eval", "sft"))
    out.append(f"Time: {parts}; the rest is loading and writing.")
    return out


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
    """Four pictures: exact answers on held-out tasks, training reward, habits, reply length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    trained = summary["trained"]
    fig.suptitle(f"{summary['env']}, trained on {trained}, {Path(summary['model']).name}, seed {summary['seed']}")
    ax = axes[0, 0]
    exact = lambda e: metrics.proportion(sum(e["exact"]), len(e["exact"]))
    curves = [(name, name if binary(summary) else "exact", exact) for name in summary["eval"]]
    curves += [] if binary(summary) else [(trained, "mean reward", lambda e: metrics.mean(e["reward"]))]
    for name, label, measure in curves:
        points = [(max(e["update"], 0), measure(e)) for e in evals if e["tasks"] == name and e["stage"] != "before"]
        x, p = [a for a, _ in points], [b for _, b in points]
        (line,) = ax.plot(x, [100 * i.mean for i in p], marker="o", ms=3, lw=2.2 if name == trained else 1, label=label)
        ax.fill_between(x, [100 * i.low for i in p], [100 * i.high for i in p], alpha=0.18, color=line.get_color())
        if before := eval_of(evals, "before", name):
            ax.plot(0, 100 * measure(before).mean, marker="x", color=line.get_color())
    n = len(evals[0]["exact"])
    ax.set(title=f"held-out tasks (n={n}, 95% bands; × before SFT)", xlabel="update", ylabel="% exact (reward x 100)" if not binary(summary) else
           "% exactly right", ylim=(-2, 102))  # fmt: skip
    ax.legend(loc="lower right")
    x = [line["update"] for line in lines]
    if lines:
        ax = axes[0, 1]
        ax.plot(x, [line["reward"] for line in lines], lw=0.7, alpha=0.5, label="each update")
        window = min(10, len(lines))
        rolling = np.convolve([line["reward"] for line in lines], np.ones(window) / window, mode="valid")
        ax.plot(x[window - 1 :], rolling, lw=2, label=f"mean of {window}")
        ax.plot(x, [line["groups_with_signal"] for line in lines], lw=0.7, color="grey", label="share of groups with signal")
        ax.set(title="training reward", xlabel="update", ylim=(-0.02, 1.02))
        ax.legend(loc="lower right")
        ax = axes[1, 0]
        habits = [key for key in lines[0] if key.startswith("habit_")]
        if habits:
            ax.stackplot(x, [[100 * line[h] for line in lines] for h in habits], labels=[h[6:] for h in habits], alpha=0.8)
            ax.legend(loc="center right")
        if start := thinking_starts(lines):
            for a in (axes[1, 0], axes[1, 1]):
                a.axvline(start, color="black", ls="--", lw=1)
            axes[1, 1].annotate(f" begins to think\n (update {start})", (start, axes[1, 1].get_ylim()[0]), fontsize=9)
        ax.set(title="habits of the sampled replies", xlabel="update", ylabel="% of replies", ylim=(0, 100))
        ax = axes[1, 1]
        ax.plot(x, [line["reply_tokens"] for line in lines], lw=1.2)
        ax.set(title="reply length", xlabel="update", ylabel="tokens", ylim=(0, None))
        if start:
            ax.texts[0].set_position((start, 5))
    else:
        for ax in axes.flat[1:]:
            ax.text(0.5, 0.5, "no GRPO updates in this run", ha="center", transform=ax.transAxes)
    for ax in axes.flat:
        ax.grid(alpha=0.25)
    fig.savefig(path, dpi=110)
    plt.close(fig)


if __name__ == "__main__":
    if sys.argv[1:2] == ["compare"]:
        compare.main([Path(name) for name in sys.argv[2:]])
        sys.exit()
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "summary.json").exists():
        raise SystemExit(
            "usage: python report.py runs/NAME   (a finished run: it has a summary.json), or: python report.py compare runs/A runs/B …"
        )
    write(Path(sys.argv[1]))
    print((Path(sys.argv[1]) / "report.md").read_text())
