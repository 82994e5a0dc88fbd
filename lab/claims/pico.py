"""results/pico: what pico.py learns and costs, beside train.py on the same machine in the same hour.

    python -m lab.claims.pico            # three seeds of each, in turn; about 30 minutes on two quiet cores
    python -m lab.claims.pico --table    # only the page again, from the logs and summaries

Three seeds were planned before the first run. What is kept: the output of pico.py as it is printed, the summary of train.py, seconds by the
clock, and the process's peak memory as the system tells it. A run whose files are there is not run again.
"""

import os
import re
import subprocess
import sys
import time
from platform import python_version

import torch
import tyro

import metrics
from lab.common import RESULTS, ROOT, cpu, read_json, table, write_json, write_page

OUT, RUNS = RESULTS / "pico", ROOT / "runs" / "pico"
SEEDS, DEV = (0, 1, 2), 256
STAGES = {"before": "before", "after SFT": "after_sft", "after GRPO": "final"}  # in pico.py's words: in train.py's
COMMANDS = {
    "pico": ["pico.py"],
    "train": ["train.py", "--env", "letters", "--no-eval-other-tiers", "--eval-every", "1000", "--no-wandb", "--runs", str(RUNS)],
}


def run(which: str, seed: int) -> None:
    """One run, with its clock and its memory, unless it is kept already."""
    log, cost = OUT / f"{which}-{seed}.log", OUT / f"{which}-{seed}.json"
    if cost.exists():
        return
    name = ["--name", f"seed-{seed}"] if which == "train" else []
    words = [sys.executable, "-u", *COMMANDS[which], "--seed", str(seed), *name]
    RUNS.mkdir(parents=True, exist_ok=True)
    OUT.mkdir(parents=True, exist_ok=True)
    raw, started = RUNS / log.name, time.monotonic()
    with open(raw, "w") as f:
        process = subprocess.Popen(words, cwd=ROOT, stdout=f, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(words)} ended with status {status}; see {raw}")
    entry = {"seconds": time.monotonic() - started, "gigabytes": usage.ru_maxrss / 2**20}  # KiB on Linux
    if which == "pico":
        log.write_text(raw.read_text())
        entry["exact"] = shares(log.read_text())
    else:
        evals = read_json(RUNS / f"seed-{seed}" / "summary.json")["eval"]["tier 6"]
        entry["exact"] = {stage: evals[theirs]["exact"] for stage, theirs in STAGES.items()}
    write_json(cost, entry)


def shares(log: str) -> dict[str, float]:
    """{stage: share of exact answers} of pico.py's output."""
    return {stage: float(re.search(rf"^{stage} +exact ([\d.]+)%", log, re.M)[1]) / 100 for stage in STAGES}


def page() -> None:
    done = {which: [read_json(OUT / f"{which}-{seed}.json") for seed in SEEDS] for which in COMMANDS}
    lines = [
        "# pico.py beside train.py",
        "",
        "Made by `python -m lab.claims.pico`: the same task, base, demonstrations, rates and numbers of samples; each with its own",
        "random numbers. Exact answers on the same 256 development tasks, greedy, with the 95% interval over tasks. Seeds 0, 1 and 2,",
        "planned before the first run. The last row of each: the mean over seeds; all have the same tasks,",
        f"so its interval is that of one policy with so many right. {cpu()},",
        f"{os.cpu_count()} cores, torch {torch.__version__}, Python {python_version()}.",
        "",
    ]
    rows = []
    for which, runs in done.items():
        for seed, entry in zip(SEEDS, runs):
            exact = [metrics.proportion(entry["exact"][stage] * DEV, DEV).percent() for stage in STAGES]
            rows.append([f"`{which}.py`", seed, *exact, *cost(entry["seconds"], entry["gigabytes"])])
        middle = [sorted(entry[key] for entry in runs)[len(runs) // 2] for key in ("seconds", "gigabytes")]
        means = [over_seeds([entry["exact"][stage] for entry in runs]) for stage in STAGES]
        rows.append([f"**`{which}.py`**", "all", *means, *cost(*middle)])
    lines += table(["", "seed", *STAGES, "seconds", "peak memory"], rows)
    lines += ["", "Before GRPO, greedy, all seeds have as many right. Of seconds and memory, the last row has the median."]
    write_page(OUT / "README.md", [*lines, ""])


def over_seeds(shares: list[float]) -> str:
    """The mean, with the interval over the tasks that all seeds share; without one if all seeds are one policy."""
    share = sum(shares) / len(shares)
    return "the same" if len(set(shares)) == 1 else f"**{metrics.proportion(share * DEV, DEV).percent()}**"


def cost(seconds: float, gigabytes: float) -> list[str]:
    return [f"{seconds:.0f}", f"{gigabytes:.2f} GB"]


def main(table: bool = False) -> None:
    """table: only the page."""
    for seed in () if table else SEEDS:
        for which in COMMANDS:
            run(which, seed)
    page()


if __name__ == "__main__":
    tyro.cli(main)
