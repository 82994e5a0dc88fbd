"""The evidence behind the README: four arms from the same base, several seeds each, into results/letters/.

python -m lab.letters --seeds 3        # about 40 minutes on two cores; finished runs are kept and not run again
python -m lab.letters --table          # only rebuild the table and the plot from the committed summaries

grpo      the default: SFT on 100 demonstrations that only show the format, then GRPO, thinking allowed
no_think  the same, thinking not allowed: the plateau of the run this project grew out of
more_sft  the control: the time that GRPO took, spent on more SFT over the same 100 demonstrations
cot_sft   demonstrations that derive the counts, then GRPO: the algorithm is shown, not found
"""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import metrics

OUT, RUNS = ROOT / "results" / "letters", Path("runs/letters-arms")  # RUNS relative: configs are committed
ARMS = {
    "grpo": [],
    "no_think": ["--no-think"],
    "more_sft": ["--updates", "0"],
    "cot_sft": ["--sft-style", "derives"],
}
KEPT = ("summary.json", "report.md", "curves.png", "metrics.jsonl", "evals.jsonl", "config.json")


def run(arm: str, seed: int, threads: int) -> None:
    """One run of one arm, unless it has finished before; resumed if it was cut."""
    folder = ROOT / RUNS / f"{arm}-{seed}"
    if (OUT / f"{arm}-{seed}" / "summary.json").exists():
        return
    flags = list(ARMS[arm])
    if arm == "more_sft":  # as many SFT steps as fit into the time that GRPO took for the same seed
        g = json.loads((OUT / f"grpo-{seed}" / "summary.json").read_text())
        per_step = g["seconds"]["sft"] / g["config"]["sft_steps"]
        flags += ["--sft-steps", str(g["config"]["sft_steps"] + round((g["seconds"]["rollout"] + g["seconds"]["train"]) / per_step))]
    if (folder / "config.json").exists():
        command = ["--resume", str(RUNS / f"{arm}-{seed}")]
    else:
        command = ["--env", "letters", "--difficulty", "6", *flags, "--seed", str(seed), "--threads", str(threads),
                   "--runs", str(RUNS), "--name", f"{arm}-{seed}", "--no-wandb"]  # fmt: skip
    log = ROOT / RUNS / f"{arm}-{seed}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as f:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run([sys.executable, "train.py", *command], cwd=ROOT, stdout=f, stderr=f, env=env)
    if done.returncode:
        raise RuntimeError(f"{arm}, seed {seed}, stopped with code {done.returncode}; see {log}")
    target = OUT / f"{arm}-{seed}"
    target.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (folder / name).exists():
            shutil.copy(folder / name, target / name)


def write_table() -> None:
    """results/letters/README.md and arms.png from the summaries there."""
    found = {arm: sorted(OUT.glob(f"{arm}-*/summary.json")) for arm in ARMS}
    rows = {arm: [json.loads(p.read_text()) for p in paths] for arm, paths in found.items() if paths}
    m = next(iter(rows.values()))[0]["machine"]
    lines = [
        "# Letters, tier 6: arms from the same base", "",
        f"`python -m lab.letters --seeds {max(map(len, rows.values()))}`; torch {m['torch']}, "
        f"transformers {m['transformers']}, peft {m['peft']}. Exact answers, greedy, the same held-out tasks for all; 95% Wilson "
        "intervals a run; the gain is GRPO (or more SFT) over the 50-step SFT, paired by task.", "",
        "| arm | seed | machine | n | before | after SFT | final | gain over SFT | reply tokens | updates | SFT steps | rollout + train, s | sft, s | total, min | peak GB |",
        "|---" * 15 + "|",
    ]  # fmt: skip
    cell = lambda r: f"{100 * r['exact']:.1f}% [{100 * r['low']:.1f}, {100 * r['high']:.1f}]"
    for arm, summaries in rows.items():
        for s in summaries:
            e, g, t = s["eval"]["6"], s["gain"], s["seconds"]
            after = cell(e["after_sft"])
            if arm == "more_sft":  # its own "after SFT" is its end; what 50 steps give is the GRPO arm's
                twin = next(r for r in rows["grpo"] if r["seed"] == s["seed"])
                after = cell(twin["eval"]["6"]["after_sft"])
                sft, final = (exact_by_task(a, s["seed"], stage) for a, stage in (("grpo", "after_sft"), ("more_sft", "final")))
                g = metrics.gain(sft, final).dict()
            lines.append(
                f"| {arm} | {s['seed']} | {s['machine']['device']} | {e['final']['n']} | {cell(e['before'])} | {after} | **{cell(e['final'])}** | "
                f"{100 * g['mean']:+.1f} [{100 * g['low']:+.1f}, {100 * g['high']:+.1f}] | {e['after_sft']['reply_tokens']:.0f} → "
                f"{e['final']['reply_tokens']:.0f} | {s['updates']} | {s['config']['sft_steps']} | {t['rollout'] + t['train']:.0f} | {t['sft']:.0f} | "
                f"{t['total'] / 60:.1f} | {s['peak_rss_gb']:.2f} |"
            )
    lines += ["", "## What wins", ""]
    for arm in [a for a in rows if a != "grpo"]:
        seeds = sorted({s["seed"] for s in rows[arm]} & {s["seed"] for s in rows["grpo"]})
        # Tasks are shared by all arms and seeds: average a task over the seeds, then bootstrap over tasks.
        ours = np.mean([exact_by_task("grpo", seed, "final") for seed in seeds], axis=0)
        other = np.mean([exact_by_task(arm, seed, "final") for seed in seeds], axis=0)
        d = metrics.gain(other, ours)
        verdict = "grpo wins" if d.low > 0 else f"{arm} wins" if d.high < 0 else "no difference can be told"
        lines.append(
            f"* grpo against {arm}: {100 * ours.mean():.1f}% against {100 * other.mean():.1f}%, difference {100 * d.mean:+.1f} points "
            f"[{100 * d.low:+.1f}, {100 * d.high:+.1f}] over {d.n} tasks x {len(seeds)} seeds: **{verdict}**."
        )
    lines += [
        "",
        "![four arms](arms.png)",
        "",
        "An arm of lab/letters.py that is missing here has not been run with this base yet. `more_sft` has the seconds that GRPO took on the same number of threads; for two threads that is the run in make-train/. Each folder here holds a run's report.md, curves.png, summary.json, metrics.jsonl and evals.jsonl.",
        "",
    ]
    (OUT / "README.md").write_text("\n".join(lines))
    draw(rows)
    print("\n".join(lines))


def exact_by_task(arm: str, seed: int, stage: str) -> list[float]:
    for line in (OUT / f"{arm}-{seed}" / "evals.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["stage"] == stage and record["tier"] == 6:
            return record["exact"]
    raise RuntimeError(f"{arm}-{seed}: no {stage} evaluation of tier 6")


def draw(rows: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    colors = dict(zip(ARMS, ("C0", "C3", "C7", "C2")))
    for arm, summaries in rows.items():
        for s in summaries:
            folder = OUT / f"{arm}-{s['seed']}"
            evals = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
            evals = [e for e in evals if e["tier"] == 6 and e["stage"] != "before"]
            if arm == "more_sft":
                p = metrics.proportion(sum(evals[-1]["exact"]), len(evals[-1]["exact"]))
                axes[0].axhline(100 * p.mean, color=colors[arm], lw=1, ls="--", label="more_sft (end)" if s is summaries[0] else None)
                continue
            p = [metrics.proportion(sum(e["exact"]), len(e["exact"])) for e in evals]
            x = [e["update"] for e in evals]
            axes[0].plot(x, [100 * i.mean for i in p], color=colors[arm], label=arm if s is summaries[0] else None)
            axes[0].fill_between(x, [100 * i.low for i in p], [100 * i.high for i in p], color=colors[arm], alpha=0.12)
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            u = [line["update"] for line in lines]
            axes[1].plot(u, [100 * line["habit_derives"] for line in lines], color=colors[arm], lw=1)
            axes[2].plot(u, [line["reply_tokens"] for line in lines], color=colors[arm], lw=1)
    axes[0].set(title="tier 6, exactly right on held-out tasks (95% bands)", xlabel="update", ylabel="%", ylim=(-2, 102))
    axes[0].legend(loc="center right")
    axes[1].set(title="replies that derive the answer", xlabel="update", ylabel="% of sampled replies", ylim=(-2, 102))
    axes[2].set(title="reply length", xlabel="update", ylabel="tokens", ylim=(0, None))
    for ax in axes:
        ax.grid(alpha=0.25)
    fig.savefig(OUT / "arms.png", dpi=110)


def main(seeds: int = 3, jobs: int = 2, table: bool = False) -> None:
    """Run what is missing, `jobs` runs at once with one thread each, then write the table."""
    if not table:
        for arms in (["grpo", "no_think", "cot_sft"], ["more_sft"]):  # the control needs to know how long GRPO took
            work = [(arm, seed) for seed in range(seeds) for arm in arms]
            with ThreadPoolExecutor(jobs) as pool:
                list(tqdm(pool.map(lambda w: run(*w, threads=max(1, 2 // jobs)), work), total=len(work), desc=" ".join(arms)))
    write_table()


if __name__ == "__main__":
    tyro.cli(main)
