"""What a run leaves for a person: summary.json (numbers with intervals), report.md, curves.png.

Everything here is computed from the run folder alone, so a report can be written again at any time:

    python report.py runs/NAME

The shape is that of a lab's training report: config, the SFT warm-up, the trajectory, the evaluations, observations, curves.
The observations are computed too; none is written by hand.
"""

import json
import sys
from pathlib import Path

import numpy as np

import metrics


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def eval_of(evals: list[dict], stage: str, tier: int) -> dict | None:
    return next((e for e in evals if e["stage"] == stage and e["tier"] == tier), None)


def summarize_run(folder: Path, config: dict, state: dict, machine: dict) -> dict:
    """summary.json: final numbers with 95% intervals. gain is GRPO over SFT on the trained tier, paired by task."""
    evals = read_lines(folder / "evals.jsonl")
    tiers = sorted({e["tier"] for e in evals})
    table: dict = {}
    for tier in tiers:
        for stage in ("before", "after_sft", "final"):
            if e := eval_of(evals, stage, tier):
                n = len(e["exact"])
                exact = metrics.proportion(sum(e["exact"]), n)
                table.setdefault(str(tier), {})[stage] = {
                    "n": n, "exact": exact.mean, "low": exact.low, "high": exact.high,
                    "reward": float(np.mean(e["reward"])), "format": float(np.mean(e["format"])),
                    "reply_tokens": float(np.mean(e["reply_tokens"])), "truncated": float(np.mean(e["truncated"])),
                }  # fmt: skip
    sft, final = (eval_of(evals, stage, config["difficulty"]) for stage in ("after_sft", "final"))
    return {
        "env": config["env"], "model": config["model"] if config["model"] != "auto" else machine["model"], "seed": config["seed"],
        "difficulty": config["difficulty"], "updates": state["update"], "eval": table,
        "gain": metrics.gain(sft["exact"], final["exact"]).dict(), "sft": state["sft"], "collapse": state["collapse"],
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


def cell(result: dict) -> str:
    return f"{100 * result['exact']:.1f}% [{100 * result['low']:.1f}, {100 * result['high']:.1f}]"


def text(name: str, summary: dict, lines: list[dict], evals: list[dict]) -> str:
    config, m, tier = summary["config"], summary["machine"], str(summary["difficulty"])
    stages = ("before", "after_sft", "final")
    n = summary["eval"][tier]["final"]["n"]
    gain = metrics.Interval(**summary["gain"])
    out = [
        f"# {name}", "",
        f"{config['env']}, tier {tier}: exact answers {' → '.join(cell(summary['eval'][tier][s]) for s in stages)} "
        f"(before → after SFT → after {summary['updates']} updates of GRPO; greedy, {n} held-out tasks, 95% intervals).",
        f"Gain of GRPO over SFT on the same tasks: {100 * gain.mean:+.1f} points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}].", "",
        f"{summary['seconds']['total'] / 60:.1f} minutes on {m['device']}; peak memory {summary['peak_rss_gb']:.2f} GB; "
        f"{summary['tokens']['sampled']:,} tokens sampled, {summary['tokens']['trained']:,} trained.", "",
        "## Config", "", "| parameter | value |", "|---|---|",
        *(f"| {key} | {value} |" for key, value in config.items() if value not in ("", None)),
        f"| trainable parameters | {m['trainable']:,} of {m['parameters']:,} |",
        f"| versions | python {m['python']}, torch {m['torch']}, transformers {m['transformers']}, peft {m['peft']} |", "",
        "## SFT warm-up", "", "| metric | value |", "|---|---|",
    ]  # fmt: skip
    if summary["sft"]:
        out.append(f"| SFT loss | {summary['sft']['loss_first']:.2f} → {summary['sft']['loss_last']:.2f} ({config['sft_steps']} steps) |")
    after = eval_of(evals, "after_sft", summary["difficulty"])
    reward, shape = metrics.mean(after["reward"]), metrics.proportion(sum(after["format"]), len(after["format"]))
    out += [
        f"| format compliance after SFT | {shape.percent()}, n={shape.n} |",
        f"| mean reward after SFT | {reward.mean:.3f} [{reward.low:.3f}, {reward.high:.3f}], n={reward.n} |",
        "",
        "## Evaluation",
        "",
        f"Greedy, the same {n} held-out tasks a tier every time; share of exactly right answers with its 95% Wilson interval.",
        "",
    ]
    tiers = sorted({e["tier"] for e in evals})
    out += ["| update | " + " | ".join(f"tier {t}" for t in tiers) + " |", "|---|" + "---|" * len(tiers)]
    seen = list(dict.fromkeys((e["update"], e["stage"]) for e in evals))
    for done, stage in seen:
        row = [metrics.proportion(sum(e["exact"]), len(e["exact"])).percent() for e in evals if (e["update"], e["stage"]) == (done, stage)]
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
    tier, out = str(summary["difficulty"]), []
    gain = metrics.Interval(**summary["gain"])
    verdict = "gained" if gain.low > 0 else "lost" if gain.high < 0 else "neither gained nor lost measurably"
    out.append(
        f"GRPO {verdict} on tier {tier}: {100 * gain.mean:+.1f} points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}], n={gain.n}, paired."
    )
    for other, stages in summary["eval"].items():
        if other != tier:
            out.append(f"Tier {other}, which was not trained: {cell(stages['after_sft'])} → {cell(stages['final'])}.")
    if not lines:
        return out + ["No GRPO updates in this run."]
    rewards = np.array([line["reward"] for line in lines])
    best = int(rewards.argmax())
    out.append(f"Training reward over {len(lines)} updates: mean {rewards.mean():.2f}, last tenth {rewards[-max(1, len(lines) // 10):].mean():.2f}; "
               f"the highest single update ({rewards[best]:.2f} at {lines[best]['update']}) is a peak, not a result.")  # fmt: skip
    lengths = [line["reply_tokens"] for line in lines]
    tenth = max(1, len(lines) // 10)
    out.append(
        f"Replies went from {np.mean(lengths[:tenth]):.0f} to {np.mean(lengths[-tenth:]):.0f} tokens (first and last tenth of the updates)."
    )
    if "habit_derives" in lines[0]:
        share = 100 * np.mean([line["habit_derives"] for line in lines[-tenth:]])
        if start := thinking_starts(lines):
            out.append(f"It begins to think at update {start}: in that update and the next four, most replies derive the answer letter by letter; "
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
    tier = summary["difficulty"]
    fig.suptitle(f"{summary['env']}, trained on tier {tier}, {Path(summary['model']).name}, seed {summary['seed']}")
    ax = axes[0, 0]
    for t in sorted({e["tier"] for e in evals}):
        points = [
            (max(e["update"], 0), metrics.proportion(sum(e["exact"]), len(e["exact"])))
            for e in evals
            if e["tier"] == t and e["stage"] != "before"
        ]
        x, p = [a for a, _ in points], [b for _, b in points]
        (line,) = ax.plot(x, [100 * i.mean for i in p], marker="o", ms=3, lw=2.2 if t == tier else 1, label=f"tier {t}")
        ax.fill_between(x, [100 * i.low for i in p], [100 * i.high for i in p], alpha=0.18, color=line.get_color())
        if before := eval_of(evals, "before", t):
            ax.plot(0, 100 * np.mean(before["exact"]), marker="x", color=line.get_color())
    n = len(evals[0]["exact"])
    ax.set(title=f"held-out, exactly right (n={n}, 95% bands; × before SFT)", xlabel="update", ylabel="%", ylim=(-2, 102))
    ax.legend(loc="lower right")
    x = [line["update"] for line in lines]
    if lines:
        ax = axes[0, 1]
        ax.plot(x, [line["reward"] for line in lines], lw=0.7, alpha=0.5, label="each update")
        window = min(10, len(lines))
        rolling = np.convolve([line["reward"] for line in lines], np.ones(window) / window, mode="valid")
        ax.plot(x[window - 1 :], rolling, lw=2, label=f"mean of {window}")
        ax.plot(x, [line["groups_with_signal"] for line in lines], lw=0.7, color="grey", label="share of groups with signal")
        ax.set(title=f"training reward ({summary['config']['reward']})", xlabel="update", ylim=(-0.02, 1.02))
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
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "summary.json").exists():
        raise SystemExit("usage: python report.py runs/NAME   (a finished run: it has a summary.json)")
    write(Path(sys.argv[1]))
    print((Path(sys.argv[1]) / "report.md").read_text())
