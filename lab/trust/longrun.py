"""Two hours of swarm training, watched from outside: does memory grow, does it get slower, do the logs stay small?

A leak of a megabyte an update is invisible in an hour of work and kills a run in its third day. So this starts train.py as a user would,
notes its memory and CPU time every few seconds from outside, and fits a line through what it has seen after the warm-up:

    memory       resident set (RSS): the mean of the samples of each update, which has two phases: sampling takes little, training much
    throughput   tokens sampled and trained per second of *CPU* time: by the clock, other work on the machine would count as well
    logs         bytes of the run folder without its checkpoints

A policy that learns to write more needs more memory for it, and that is no leak; and longer replies cost less CPU time per token. So both
lines are fitted twice: over time alone, and over time and the tokens of the update; and there is a control whose policy does not move at
all. The first quarter of the updates is warm-up, and updates after an evaluation are left out of the throughput. Neighbouring updates
resemble each other, so the slopes' intervals are HAC (Newey and West 1987, statsmodels), which widen with autocorrelation. "Flat" means
that the interval of the slope holds 0.

    python -m lab.trust.longrun --hours 2            # train and watch, then report: results/longrun/
    python -m lab.trust.longrun --frozen --hours 0.4 --runs runs/frozen     # the control: a policy that does not move
    python -m lab.trust.longrun --report             # report once more from what was kept
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import statsmodels.api as sm
import torch
import tyro
from tqdm import tqdm

from lab.common import RESULTS, ROOT, interval_of, pyplot, read_lines, save_picture, write_json

KEPT = RESULTS / "longrun"
EVAL_EVERY = 20
# The default run's settings but for its length: a small constant learning rate, so that what is played stays alike for hours.
FLAGS = "--env swarm --updates 100000 --lr 1e-4 --lr-end 1 --eval-n 16 --eval-every 20 --save-every 5 --threads 1".split()
# The control: a policy that does not move, so that only a leak can grow. Fewer episodes, because memory needs no speed.
FROZEN = ("--env swarm --updates 100000 --lr 1e-12 --lr-end 1 --num-tasks 1 --eval-n 4 --eval-every 100000 "
          "--save-every 5 --threads 1").split()  # fmt: skip
WARM_UP = 0.25  # of the updates


# ------------------------------------------------------------------------------------------------ watching
def log_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.glob("*") if p.is_file())


def watch(folder: Path, flags: list[str], hours: float, every: float) -> None:
    """Train into `folder` and write samples.jsonl beside it: seconds, updates done, RSS in MB, CPU seconds, bytes of logs."""
    words = [sys.executable, "train.py", *flags, "--runs", str(folder.parent), "--name", folder.name]
    with open(folder.with_name("train.log"), "w") as log, open(folder.with_name("samples.jsonl"), "w") as out:
        child, started = psutil.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT), time.monotonic()
        bar = tqdm(total=int(hours * 3600), unit="s", desc="long run")
        try:
            while child.poll() is None and time.monotonic() - started < hours * 3600:
                time.sleep(every)
                seconds = time.monotonic() - started
                bar.update(int(seconds) - bar.n)
                try:
                    with child.oneshot():
                        rss, cpu = child.memory_info().rss / 2**20, sum(child.cpu_times()[:2])
                except psutil.Error:
                    break
                lines = folder / "metrics.jsonl"
                sample = {"seconds": round(seconds, 1), "update": lines.read_text().count("\n") if lines.exists() else 0,
                          "rss_mb": round(rss, 1), "cpu": round(cpu, 2), "logs": log_bytes(folder) if folder.exists() else 0}  # fmt: skip
                out.write(json.dumps(sample) + "\n")
                out.flush()
        finally:
            bar.close()
            if child.poll() is None:
                os.kill(child.pid, signal.SIGTERM)  # a clean stop at the next safe point
                child.wait()
    print(f"train.py ended with status {child.returncode}: {(folder.with_name('train.log')).read_text().strip().splitlines()[-1]}")


# ------------------------------------------------------------------------------------------------ reporting
def by_update(samples: list[dict], lines: list[dict]) -> list[dict]:
    """A row an update: the mean of what was seen while it ran, and its tokens per CPU second."""
    rows = []
    for line in lines:
        u = line["update"]
        seen = [s for s in samples if s["update"] == u - 1]  # while update u runs, u - 1 lines are written
        after = next((s for s in samples if s["update"] >= u), None)
        if not seen or after is None:
            continue
        cpu, tokens = after["cpu"] - seen[0]["cpu"], line["reply_tokens"] * line["n"] + line["trained_tokens"]
        rows.append({"update": u, "hours": seen[0]["seconds"] / 3600, "rss_mb": float(np.mean([s["rss_mb"] for s in seen])),
                     "tokens": tokens, "tokens_per_cpu_second": tokens / cpu,
                     "logs_mb": after["logs"] / 2**20, "after_evaluation": u == 1 or (u - 1) % EVAL_EVERY == 0})  # fmt: skip
    return rows


def slope(x: np.ndarray, y: np.ndarray, *beside: np.ndarray) -> dict:
    """Of y over x, `beside` held equal, with its 95% HAC interval; lags by the rule of Newey and West (1994)."""
    lags = max(1, int(4 * (len(x) / 100) ** (2 / 9)))
    how = {"cov_type": "HAC", "cov_kwds": {"maxlags": lags, "use_correction": True}, "use_t": True}
    fit = sm.OLS(y, sm.add_constant(np.column_stack([x, *beside]))).fit(**how)
    low, high = fit.conf_int()[1]
    return {"slope": float(fit.params[1]), "low": float(low), "high": float(high), "n": len(x), "flat": bool(low <= 0 <= high)}


def in_words(slope: dict, digits: int) -> str:
    return interval_of(slope, "slope").signed(digits)


def report(runs: Path, frozen: bool = False) -> None:
    """longrun.json and its picture, or frozen.json, into results/longrun, beside what they are made from."""
    name = "frozen-" if frozen else ""
    samples, lines = read_lines(runs / f"{name}samples.jsonl"), read_lines(runs / f"{name}metrics.jsonl")
    rows = by_update(samples, lines)
    settled = rows[int(len(rows) * WARM_UP) :]
    plain = [r for r in settled if not r["after_evaluation"]]
    columns = lambda rows, *names: (np.array([r[name] for r in rows]) for name in names)
    hours, rss, tokens = columns(settled, "hours", "rss_mb", "tokens")
    when, speed, work = columns(plain, "hours", "tokens_per_cpu_second", "tokens")
    memory, leak, growth = slope(hours, rss), slope(hours, rss, tokens), slope(hours, 100 * tokens / tokens.mean())
    throughput, pace = slope(when, 100 * speed / speed.mean()), slope(when, 100 * speed / speed.mean(), work)
    result = {
        "command": "python -m lab.trust.longrun" + " --frozen" * frozen, "flags": FROZEN if frozen else FLAGS,
        "hours": round(samples[-1]["seconds"] / 3600, 2), "updates": len(lines), "warm_up_updates": len(rows) - len(settled),
        "rss_mb": {"median": float(np.median([r["rss_mb"] for r in settled])), "most": max(s["rss_mb"] for s in samples)},
        "rss_mb_per_hour": memory, "rss_mb_per_hour_at_equal_tokens": leak, "tokens_percent_per_hour": growth,
        "tokens_per_cpu_second": float(speed.mean()), "throughput_percent_per_hour": throughput,
        "throughput_percent_per_hour_at_equal_tokens": pace,
        "log_bytes_per_update":
            round((samples[-1]["logs"] - next(s["logs"] for s in samples if s["update"] >= 1)) / (samples[-1]["update"] - 1)),
        "machine": f"{platform.machine()} CPU, 1 thread of {os.cpu_count()}, other work beside it", "torch": torch.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    write_json(KEPT / ("frozen.json" if frozen else "longrun.json"), result)
    for file in (f"{name}samples.jsonl", f"{name}metrics.jsonl"):
        if runs != KEPT:
            shutil.copy(runs / file, KEPT / file)
    if not frozen:
        draw(KEPT / "longrun.png", samples, rows, settled[0]["hours"], memory, leak, throughput, pace)
    says = lambda s, unit: f"{in_words(s, 1)} {unit} an hour over {s['n']} updates"
    print(f"{result['hours']} hours, {result['updates']} updates\nmemory      {says(memory, 'MB')}\n  at equal tokens {says(leak, 'MB')}\n"
          f"  tokens    {says(growth, '%')}\n"
          f"throughput  {says(throughput, '%')}\n  at equal tokens {says(pace, '%')}\n"
          f"logs        {result['log_bytes_per_update'] / 1000:.0f} kB an update; episodes.jsonl stops growing at 64 MB")  # fmt: skip


def draw(path: Path, samples: list[dict], rows: list[dict], warm: float, memory: dict, leak: dict, throughput: dict, pace: dict) -> None:
    fig, (a, d, b, c) = pyplot().subplots(4, 1, figsize=(8, 9), sharex=True, layout="constrained")
    hours = [r["hours"] for r in rows]
    a.plot([s["seconds"] / 3600 for s in samples], [s["rss_mb"] for s in samples], color="0.8", lw=0.8, label="every 5 seconds")
    a.plot(hours, [r["rss_mb"] for r in rows], ".-", label="mean of an update")
    a.set(ylabel="RSS, MB", ylim=(0, None), title=f"memory: {in_words(memory, 0)} MB an hour, at equal tokens {in_words(leak, 0)}")
    d.plot(hours, [r["tokens"] / 1000 for r in rows], ".-")
    d.set(ylabel="thousand tokens", ylim=(0, None), title="tokens of an update, sampled and trained: replies get longer")
    a.legend(loc="lower right")
    plain = [r for r in rows if not r["after_evaluation"]]
    b.plot([r["hours"] for r in plain], [r["tokens_per_cpu_second"] for r in plain], ".-")
    b.set(ylabel="tokens / CPU second", ylim=(0, None))
    b.set_title(f"throughput: {in_words(throughput, 1)} % an hour, at equal tokens {in_words(pace, 1)}")
    c.plot(hours, [r["logs_mb"] for r in rows], ".-")
    c.set(ylabel="logs, MB", xlabel="hours", ylim=(0, None))
    c.set_title("bytes of the run folder without checkpoints; episodes are thinned at 64 MB")
    for axis in (a, b, c, d):
        axis.axvspan(0, warm, color="0.95")
    save_picture(fig, path, 110)


AgainOnly = Annotated[bool, tyro.conf.arg(name="report")]


def main(hours: float = 2.0, every: float = 5.0, runs: Path = Path("runs/longrun"), frozen: bool = False, again: AgainOnly = False) -> None:
    """every: seconds between two samples. runs: where the run folder lives. frozen: the control. report: from results/longrun,
    without training."""
    name = "frozen-" if frozen else ""
    if again:
        if not (KEPT / f"{name}samples.jsonl").exists():
            raise SystemExit(f"--report: {KEPT}/{name}samples.jsonl is not there; run python -m lab.trust.longrun first")
        return report(KEPT, frozen)
    if runs.exists():
        raise SystemExit(f"{runs} exists; remove it or choose another --runs")
    runs = runs.resolve()
    runs.mkdir(parents=True)
    watch(runs / "swarm", FROZEN if frozen else FLAGS, hours, every)
    shutil.copy(runs / "swarm" / "metrics.jsonl", runs / f"{name}metrics.jsonl")
    (runs / "samples.jsonl").rename(runs / f"{name}samples.jsonl")
    report(runs, frozen)


if __name__ == "__main__":
    tyro.cli(main)
