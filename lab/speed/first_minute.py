"""The first minute of a run: how soon its first words come, and how good its guess of the time is.

    python -m lab.speed.first_minute                      # three runs, one after the other, into results/first_minute/
    python -m lab.speed.first_minute --env letters        # one run, with these flags

Each is train.py as a person starts it, watched from outside: when a line comes is when it can be read. How busy the machine was
(its load: processes that want a core) is noted, because other work makes a run slower than the guess, or the other way round.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bookkeeping.forecast import PACE
from lab.common import RESULTS, ROOT, read_json

HOME = RESULTS / "first_minute"
RUNS = (
    ["--env", "letters", "--updates", "20", "--eval-n", "64", "--no-eval-other-tiers", "--threads", "1"],
    ["--env", "alphabet", "--updates", "4", "--eval-n", "64", "--threads", "1"],
    ["--env", "letters", "--difficulty", "6"],  # make train; on a busy machine two threads wait for each other most of the time
)
GUESS = re.compile(r"about (\d+) (\w+) here, between (\d+) and (\d+) \(arithmetic takes ([\d.]+) times")
MARKS = {"first_line": ": ", "guess": "about ", "torch": "here: ", "sft": "eval before"}  # what a line has to hold


def measure(flags: list[str]) -> dict:
    """Run it; seconds until each of MARKS is printed, the guess, and what it took."""
    with tempfile.TemporaryDirectory() as runs:
        words = [sys.executable, "-u", "train.py", *flags, "--no-wandb", "--runs", runs, "--name", "run"]
        load, started, found = os.getloadavg()[0], time.monotonic(), {}
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            for line in process.stdout:
                for name, mark in MARKS.items():
                    if mark in line:
                        found.setdefault(name, round(time.monotonic() - started, 1))
                if match := GUESS.search(line):
                    unit = 60 if match[2] == "minutes" else 1
                    found |= {name: unit * int(match[i]) for name, i in (("likely", 1), ("low", 3), ("high", 4))}
                    found["slower"] = float(match[5])
        took = round(time.monotonic() - started, 1)
        summary = read_json(Path(runs) / "run" / "summary.json")
    parts = {name: summary["seconds"][name] for name in ("rollout", "environment", "train", "eval", "sft")}
    return {"flags": " ".join(flags), "load": round(load, 1), **found, "took": took, "updates": summary["updates"], "parts": parts}


def page(rows: list[dict]) -> str:
    out = ["# The first minute", "",
           "`python -m lab.speed.first_minute`: train.py watched from outside. Two cores, x86-64, Linux; *load* is how many processes",
           "wanted a core when it began, this run not counted. Seconds.", "",
           "| flags | load | first line | guess of the time | torch is there, the model loaded | guessed, and its range | took |",
           "|---|---|---|---|---|---|---|"]  # fmt: skip
    for r in rows:
        guess = f"{r['likely']}, {r['low']} to {r['high']}"
        within = "inside" if r["low"] <= r["took"] <= r["high"] else "**outside**"
        out.append(f"| `{r['flags']}` | {r['load']} | {r['first_line']} | {r['guess']} | {r['torch']} | {guess} | {r['took']} ({within}) |")
    return "\n".join([*out, "", f"The guess is `bookkeeping/forecast.py`'s: {PACE} ms per round of arithmetic is 1.0 times as slow.", ""])


def main(flags: list[str]) -> None:
    HOME.mkdir(parents=True, exist_ok=True)
    file = HOME / "runs.json"
    known = {row["flags"]: row for row in read_json(file)} if file.exists() else {}
    for one in [flags] if flags else RUNS:
        row = measure(one)
        known[row["flags"]] = row
        file.write_text(json.dumps(list(known.values()), indent=1) + "\n", encoding="utf-8")
        (HOME / "README.md").write_text(page(list(known.values())), encoding="utf-8")
        print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
