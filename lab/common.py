"""What the experiments share: places, files, Markdown tables, intervals in words, pictures, and runs of train.py."""

import hashlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from bookkeeping.tables import pyplot
from metrics import Interval

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


# ------------------------------------------------------------------------------------------------ files
def read_json(path: Path):
    return json.loads(path.read_text())


def read_lines(path: Path) -> list[dict]:
    """A .jsonl file of our own; bookkeeping.records reads those of others."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_json(path: Path, value) -> None:
    write_page(path, [json.dumps(value, indent=1), ""])


def write_page(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))


def fingerprint(files: list[Path]) -> str:
    """Of the code that decides a result: what other code has made is made again."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:10]


# ------------------------------------------------------------------------------------------------ words
def table(head: list | str, rows) -> list[str]:
    """Lines of a Markdown table. head: its cells, or the whole line."""
    line = lambda cells: "| " + " | ".join(map(str, cells)) + " |"
    head = head if isinstance(head, str) else line(head)
    return [head, "|---" * (head.count("|") - 1) + "|", *map(line, rows)]


def interval_of(numbers: dict, mean: str = "mean") -> Interval:
    """An interval as it was written down. mean: the name of its middle."""
    return Interval(numbers[mean], numbers["low"], numbers["high"], numbers["n"])


def cpu() -> str:
    return next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")


# ------------------------------------------------------------------------------------------------ pictures
def save_picture(fig, path: Path, dpi: int) -> None:
    """As a PNG of 256 colours: one cannot see the difference, and it takes 60% less room in the repository."""
    from PIL import Image

    drawn = io.BytesIO()
    fig.savefig(drawn, dpi=dpi)
    pyplot().close(fig)
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def ends(intervals: list[Interval]) -> tuple[list[float], list[float]]:
    """The lower and the upper ends, as fill_between takes them."""
    return [i.low for i in intervals], [i.high for i in intervals]


def reach(intervals: list[Interval]) -> np.ndarray:
    """[2, n] how far the intervals go down and up, as errorbar takes them."""
    return np.array([(i.mean - i.low, i.high - i.mean) for i in intervals]).T


# ------------------------------------------------------------------------------------------------ runs of train.py
def launch(
    flags: list[str], runs: Path, name: str, target: Path, kept: tuple[str, ...], threads: int, python: str = sys.executable
) -> None:
    """train.py with these flags, or --resume if this run was begun and cut; its output in runs/NAME.log.
    Then copy what is `kept` to `target`."""
    log = ROOT / runs / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    flags = [*flags, "--threads", str(threads), "--runs", str(runs), "--name", name, "--no-wandb"]
    if (ROOT / runs / name / "config.json").exists():
        flags = ["--resume", str(runs / name)]
    if not (ROOT / runs / name / "summary.json").exists():  # to resume a finished run would evaluate it again, and add that to its time
        with open(log, "a") as f:
            env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            done = subprocess.run([python, "train.py", *flags], cwd=ROOT, stdout=f, stderr=f, env=env)
        if done.returncode:
            raise RuntimeError(f"{name} stopped with code {done.returncode}; see {log}")
    target.mkdir(parents=True, exist_ok=True)
    for file in kept:
        if file == "metrics.jsonl" and (ROOT / runs / name / file).exists():
            keep_metrics(ROOT / runs / name, target)
        elif (ROOT / runs / name / file).exists():
            shutil.copy(ROOT / runs / name / file, target / file)


def keep_metrics(folder: Path, target: Path) -> None:
    """Copy a run's metrics.jsonl with six digits per number, which takes a quarter less room."""
    whole = lambda x: int(x) if x.is_integer() else x
    short = lambda x: whole(float(f"{x:.6g}")) if isinstance(x, float) and math.isfinite(x) else x
    lines = [{k: short(v) for k, v in line.items()} for line in read_lines(folder / "metrics.jsonl")]
    write_page(target / "metrics.jsonl", [*(json.dumps(line, separators=(",", ":")) for line in lines), ""])
