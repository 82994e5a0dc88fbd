"""What running ahead costs and what it buys: whole runs on letters, in turn and ahead, with old samples and new, into results/offpolicy/.

    python -m lab.claims.offpolicy                           # in turn against one batch ahead, alternating, on an otherwise idle machine
    python -m lab.claims.offpolicy --arms stale --jobs 2     # samples that are 8 updates old, with every way to weigh them
    python -m lab.claims.offpolicy --arms vllm --jobs 2 --python .venv-vllm/bin/python      # the same run, sampled by vLLM (on a CPU)
    python -m lab.claims.offpolicy --table                   # only rebuild the table and the picture

in_turn          the default: sample, then train, then sample …: strictly on-policy
ahead            --async-rollouts 1: a second process samples the next batch meanwhile (--importance sequence, its default then)
stale_NAME       --async-rollouts 8 --importance NAME: every batch is 8 updates old when it is trained
vllm             in turn, sampled by vLLM

Finished runs are kept and not run again. A run is one seed; tasks are the same 256 development ones everywhere.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import tyro

import metrics
from bookkeeping import records
from bookkeeping.curves import draw_bars, time_bars, waiting
from grpo import IMPORTANCE
from lab.common import RESULTS, ROOT, launch, pyplot, read_json, save_picture, side_by_side, table, write_page

OUT, RUNS = RESULTS / "offpolicy", Path("runs/offpolicy")
LAG = 8
ARMS = {
    "in_turn": [],
    "ahead": ["--async-rollouts", "1"],
    **{f"stale_{name}": ["--async-rollouts", str(LAG), "--importance", name] for name in IMPORTANCE},
    "vllm": ["--engine", "vllm"],
}
SETS = {"pace": ("in_turn", "ahead"), "stale": tuple(arm for arm in ARMS if arm.startswith("stale")), "vllm": ("vllm",)}
KEPT = ("summary.json", "metrics.jsonl", "evals.jsonl", "config.json")


def run(arm: str, seed: int, threads: int, python: str) -> None:
    """One run of one arm, unless it has finished before."""
    target, name = OUT / f"{arm}-{seed}", f"{arm}-{seed}"
    if (target / "summary.json").exists():
        return
    shutil.rmtree(ROOT / RUNS / name, ignore_errors=True)  # what was cut begins anew: a resumed run ahead is another run
    flags = ["--env", "letters", "--difficulty", "6", *ARMS[arm], "--seed", str(seed)]
    launch(flags, RUNS, name, target, KEPT, threads, python)


def final(folder: Path) -> list[float]:
    """Exact or not, of every development task of tier 6, after the last update."""
    return next(e["exact"] for e in records.lines(folder / "evals.jsonl") if e["stage"] == "final" and e["trained"])


def pace(lines: list[dict]) -> float:
    """Updates a minute, evaluations and writing not counted."""
    return 60 / sum(next(iter(time_bars(lines).values())).values())


def write_table() -> None:
    found = {arm: sorted(OUT.glob(f"{arm}-*/summary.json")) for arm in ARMS}
    found = {arm: [path.parent for path in paths] for arm, paths in found.items() if paths}
    if "in_turn" not in found:
        why = "results/offpolicy/in_turn-0 is not there, and all others are compared with it"
        raise SystemExit(f"{why}; run: python -m lab.claims.offpolicy")
    summary = read_json(found["in_turn"][0] / "summary.json")
    m = summary["machine"]
    mean = lambda lines, key: float(np.mean([line[key] for line in lines if key in line])) if any(key in line for line in lines) else None
    text = [
        "# Running ahead, and old samples", "",
        f"`python -m lab.claims.offpolicy` (its docstring has the commands); letters, tier 6, pico_base, {summary['updates']} updates, "
        f"greedy on the same 256 development tasks; {m['device'].partition(',')[0]}, torch {m['torch']}, transformers {m['transformers']}. "
        "Old: by how many updates the sampling policy is behind. Mismatch: mean |log-prob now - when sampled| of a token, nats. Capped: "
        "share of tokens whose weight is cut to 2. The trainer waits: share of the time of an update; "
        "evaluations and writing are in the minutes only. Arms that ran beside other work have no times.", "",
    ]  # fmt: skip
    rows = []
    for arm, folders in found.items():
        for folder in folders:
            seed = int(folder.name.rpartition("-")[2])
            s, lines = read_json(folder / "summary.json"), records.lines(folder / "metrics.jsonl")
            exact = final(folder)
            base = OUT / f"in_turn-{seed}"
            against = "" if arm == "in_turn" or not base.exists() else metrics.gain(final(base), exact).points()
            capped = mean(lines, "capped")
            timed = (f"{pace(lines):.1f}", f"{100 * waiting(lines):.0f}%", f"{s['seconds']['total'] / 60:.1f}")
            rows.append([arm, seed, s["config"]["threads"], f"**{metrics.proportion(sum(exact), len(exact)).percent()}**", against,
                         f"{mean(lines, 'off_policy_steps'):.1f}", f"{mean(lines, 'mismatch'):.1e}",
                         "" if capped is None else f"{100 * capped:.1f}%",
                         f"{mean(lines, 'grad_norm'):.2f}", *(timed if arm in SETS["pace"] else [" | | "])])  # fmt: skip
    text += table("| arm | seed | threads | final, exact | against in turn, same seed | old | mismatch | capped | mean grad norm | "
                  "updates a minute | the trainer waits | minutes |", rows)  # fmt: skip
    both = [seed for seed in range(100) if (OUT / f"in_turn-{seed}").exists() and (OUT / f"ahead-{seed}").exists()]
    if both:
        of = lambda arm, seed: pace(records.lines(OUT / f"{arm}-{seed}/metrics.jsonl"))
        ratios = [of("ahead", seed) / of("in_turn", seed) for seed in both]
        text += ["",
                 f"Ahead against in turn, pairs of runs that ran one after the other: {np.median(ratios):.2f} times the updates a minute "
                     f"(median of {len(ratios)}; {min(ratios):.2f} to {max(ratios):.2f})."]  # fmt: skip
    stale = {arm: [folder for folder in folders if arm.startswith("stale")] for arm, folders in found.items()}
    if none := stale.pop("stale_none", []):
        old = f"Samples that are {LAG} updates old, against looking away (stale_none), paired by task"
        text += ["", f"{old}, averaged over the seeds that both have:", ""]
        for arm, folders in stale.items():
            seeds = sorted({f.name.rpartition("-")[2] for f in folders} & {f.name.rpartition("-")[2] for f in none})
            if seeds:
                ours, theirs = (np.mean([final(OUT / f"{a}-{s}") for s in seeds], axis=0) for a in (arm, "stale_none"))
                text.append(f"* {arm}: {metrics.gain(theirs, ours).points()}, {len(seeds)} seeds.")
    text += ["", "![runs](offpolicy.png)", ""]
    write_page(OUT / "README.md", text)
    draw(found)
    print("\n".join(text))


def draw(found: dict[str, list[Path]]) -> None:
    """Reward by update, entropy by update, and where an update's seconds go."""
    fig, axes = pyplot().subplots(1, 3, figsize=(16, 4.6), layout="constrained")
    for color, (arm, folders) in enumerate(found.items()):
        for folder in folders:
            lines = records.lines(folder / "metrics.jsonl")
            x = [line["update"] for line in lines]
            smooth = np.convolve([line["reward"] for line in lines], np.ones(5) / 5, "same")
            axes[0].plot(x[2:-2], smooth[2:-2], color=f"C{color}", lw=1.2, label=arm if folder is folders[0] else None)
            axes[1].plot(x, [line.get("entropy", np.nan) for line in lines], color=f"C{color}", lw=0.9)
    axes[0].set(title="training reward, mean of 5 updates", xlabel="update", ylim=(-0.02, 1.02))
    axes[0].legend(fontsize=8)
    axes[1].set(title="entropy of the samples under the trained policy, nats a token", xlabel="update")
    axes[1].set_yscale("log")
    bars = {}
    for arm in (arm for arm in SETS["pace"] if arm in found):
        some = time_bars(records.lines(found[arm][0] / "metrics.jsonl"))
        bars |= {arm if len(some) == 1 else f"{arm}: {who}": bar for who, bar in some.items()}
    draw_bars(axes[2], bars)
    axes[2].set(title="where an update's seconds go, on average")
    for ax in axes[:2]:
        ax.grid(alpha=0.25)
    save_picture(fig, OUT / "offpolicy.png", 110)


def main(seeds: int = 1, arms: str = "pace", jobs: int = 1, python: str = sys.executable, table: bool = False) -> None:
    """arms: pace (in_turn, ahead), stale, vllm, or one arm's name. jobs: runs at once, on 2 threads in all."""
    if arms not in SETS and arms not in ARMS:
        raise SystemExit(f"--arms {arms}: choose {', '.join(SETS)}, or one of {', '.join(ARMS)}")
    if not table:
        side_by_side(run, [(arm, seed, max(1, 2 // jobs), python) for seed in range(seeds) for arm in SETS.get(arms, (arms,))], jobs, arms)
    write_table()


if __name__ == "__main__":
    tyro.cli(main)
