"""Arms of alphabet from the same base, one or several seeds each, into results/alphabet/ (letters: lab/claims/letters.py; swarm:
lab/swarm/trained.py).

python -m lab.claims.arms --seeds 1    # finished runs are kept and not run again
python -m lab.claims.arms --table      # only rebuild the table and the plot from the committed runs

grpo        the default: SFT on 100 demonstrations that only show the format, then GRPO, thinking allowed
no_think    the same, thinking not allowed: the plateau of the run this project grew out of
more_sft    the control: the time that GRPO took, spent on more SFT over the same 100 demonstrations
"""

from pathlib import Path

import numpy as np
import tyro

import metrics
from bookkeeping import significance
from lab.common import RESULTS, ends, interval_of, launch, pyplot, read_json, read_lines, save_picture, side_by_side, table, write_page

RUNS = Path("runs/arms")  # relative: configs are committed
OUT = RESULTS / "alphabet"
ARMS = {"grpo": [], "no_think": ["--no-think"], "more_sft": ["--updates", "0"]}
KEPT = ("summary.json", "report.md", "curves.png", "metrics.jsonl", "evals.jsonl", "config.json")  # report.html: for seed 0 of grpo


def run(arm: str, seed: int, threads: int) -> None:
    """One run of one arm, unless it has finished before; resumed if it was cut."""
    if (OUT / f"{arm}-{seed}" / "summary.json").exists():
        return
    flags = list(ARMS[arm])
    if arm == "more_sft":  # as many SFT steps as fit into the time that GRPO took for the same seed
        g = read_json(OUT / f"grpo-{seed}" / "summary.json")
        per_step = g["seconds"]["sft"] / g["config"]["sft_steps"]
        flags += ["--sft-steps", str(g["config"]["sft_steps"] + round(grpo_seconds(g["seconds"]) / per_step))]
    kept = (*KEPT, *(["report.html"] if (arm, seed) == ("grpo", 0) else []))
    launch(["--env", "alphabet", *flags, "--seed", str(seed)], RUNS, f"alphabet-{arm}-{seed}", OUT / f"{arm}-{seed}", kept, threads)


def grpo_seconds(seconds: dict) -> float:
    """What the updates took. Runs before the time was split have the environment and the weight sync in their rollout."""
    return sum(seconds.get(part, 0.0) for part in ("rollout", "environment", "sync", "train"))


def by_task(arm: str, seed: int, stage: str) -> list[float]:
    """The reward of every development task of the trained set."""
    for record in read_lines(OUT / f"{arm}-{seed}" / "evals.jsonl"):
        if record["stage"] == stage and record["trained"]:
            return record["reward"]
    raise RuntimeError(f"{arm}-{seed}: no {stage} evaluation of the trained tasks")


def write_table() -> None:
    """results/alphabet/README.md and arms.png from the runs there."""
    found = {arm: sorted(OUT.glob(f"{arm}-*/summary.json")) for arm in ARMS}
    rows = {arm: [read_json(path) for path in paths] for arm, paths in found.items() if paths}
    m, trained = rows["grpo"][0]["machine"], rows["grpo"][0]["trained"]
    lines = [
        f"# Alphabet, {trained}: arms from the same base", "",
        f"`python -m lab.claims.arms --seeds {max(map(len, rows.values()))}`; torch {m['torch']}, "
        f"transformers {m['transformers']}, peft {m['peft']}. Mean reward, and perfect episodes, greedy, the same development tasks for "
        "all, with 95% intervals (over tasks: the seed's own noise is not in them); the gain is GRPO (or more SFT) over the 50-step SFT, "
        "paired by task.", "",
    ]  # fmt: skip
    cells = []
    for arm, summaries in rows.items():
        for s in summaries:
            e, t, seed = s["eval"][s["trained"]], s["seconds"], s["seed"]
            before, final = (metrics.mean(by_task(arm, seed, stage)) for stage in ("before", "final"))
            # more SFT's own "after SFT" is its end; what 50 steps give is the GRPO arm's.
            start = by_task("grpo" if arm == "more_sft" else arm, seed, "after_sft")
            gain = metrics.gain(start, by_task(arm, seed, "final"))
            x = e["final"]
            exact = interval_of(x, "exact").percent() if "exact" in x else ""
            cells.append([arm, seed, s["machine"]["device"], x["n"], before.text(), metrics.mean(start).text(), f"**{final.text()}**",
                          gain.signed(), exact, f"{e['after_sft']['reply_tokens']:.0f} → {x['reply_tokens']:.0f}", s["updates"],
                          s["config"]["sft_steps"], f"{grpo_seconds(t):.0f}", f"{t['sft']:.0f}", f"{t['total'] / 60:.1f}",
                          f"{s['peak_rss_gb']:.2f}"])  # fmt: skip
    lines += table("| arm | seed | machine | n | before | after SFT | final | gain over SFT | exact, final | reply tokens | updates | "
                   "SFT steps | rollout + train, s | sft, s | total, min | peak GB |", cells)  # fmt: skip
    lines += ["", "## What wins", ""] if {"no_think", "more_sft"} & rows.keys() else []
    paid = lambda arm: significance.paid_by(significance.read(OUT / f"{arm}-{rows[arm][0]['seed']}"))
    for arm in [a for a in rows if a != "grpo" and rows[a][0]["trained"] == trained and paid(a) == paid("grpo")]:
        seeds = sorted({s["seed"] for s in rows[arm]} & {s["seed"] for s in rows["grpo"]})
        # Tasks are shared by all arms and seeds: average a task over the seeds, then bootstrap over tasks.
        ours, other = (np.mean([by_task(a, seed, "final") for seed in seeds], axis=0) for a in ("grpo", arm))
        d = metrics.gain(other, ours)
        verdict = "grpo wins" if d.low > 0 else f"{arm} wins" if d.high < 0 else "no difference can be told"
        lines.append(f"* grpo against {arm}: difference {d.signed()} over {d.n} tasks x {len(seeds)} seeds: **{verdict}**.")
    missing = [arm for arm in ARMS if arm not in rows]
    lines += ["", "![arms](arms.png)", ""]
    lines += [f"Not run with this base yet: {', '.join(missing)}.", ""] if missing else []
    write_page(OUT / "README.md", lines)
    draw(rows)
    print("\n".join(lines))


def draw(rows: dict) -> None:
    fig, axes = pyplot().subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    colors = dict(zip(ARMS, ("C0", "C3", "C7", "C1", "C4")))
    for arm, summaries in rows.items():
        for s in summaries:
            folder, label = OUT / f"{arm}-{s['seed']}", arm if s is summaries[0] else None
            evals = [e for e in read_lines(folder / "evals.jsonl") if e["trained"] and e["stage"] != "before"]
            p = [metrics.mean(e["reward"]) for e in evals]
            if arm == "more_sft":
                axes[0].axhline(100 * p[-1].mean, color=colors[arm], lw=1, ls="--", label=label and "more_sft (end)")
                continue
            x = [e["update"] for e in evals]
            axes[0].plot(x, [100 * i.mean for i in p], color=colors[arm], label=label)
            axes[0].fill_between(x, *(100 * np.array(ends(p))), color=colors[arm], alpha=0.12)
            lines = read_lines(folder / "metrics.jsonl")
            u = [line["update"] for line in lines]
            axes[1].plot(u, [100 * line["habit_derives"] for line in lines], color=colors[arm], lw=1)
            axes[2].plot(u, [line["reply_tokens"] for line in lines], color=colors[arm], lw=1)
    axes[0].set(title="development tasks, mean reward x 100 (95% bands)", xlabel="update")
    axes[0].set_ylim(-2, 102)
    axes[0].legend(loc="center right")
    axes[1].set(title="replies that derive the answer", xlabel="update", ylabel="% of sampled replies", ylim=(0, None))
    axes[2].set(title="tokens said in an episode", xlabel="update", ylabel="tokens", ylim=(0, None))
    for ax in axes:
        ax.grid(alpha=0.25)
    save_picture(fig, OUT / "arms.png", 110)


def main(seeds: int = 1, jobs: int = 1, arms: tuple[str, ...] = (), table: bool = False) -> None:
    """Run what is missing of `arms` (none given: all), `jobs` runs at once on 2 threads in all, then write the table."""
    if set(arms) - set(ARMS):
        raise SystemExit(f"--arms {' '.join(arms)}: choose among {', '.join(ARMS)}")
    arms = arms or tuple(ARMS)
    if not table:
        for some in ([a for a in arms if a != "more_sft"], [a for a in arms if a == "more_sft"]):  # the control needs to know GRPO's time
            side_by_side(run, [(arm, seed, max(1, 2 // jobs)) for seed in range(seeds) for arm in some], jobs, " ".join(some))
    write_table()


if __name__ == "__main__":
    tyro.cli(main)
