"""A new reader's walk through the book, with a clock: clone, `make train`, the reading order, three forks of one file each,
into results/walk.md.

    python -m lab.pages.walk            # five minutes on two quiet cores; needs a package index, as any installation does

What a person does between the commands is not measured but computed, from the number of words of each file at 200 a minute, which is slow
reading. The forks are made as docs/fork.md says, as text in one file; `git status` of the clone tells whether it was one.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro

from lab.common import ROOT, interval_of

STORY = ("README.md", "env_letters.py", "rollout.py", "grpo.py", "sft.py", "train.py")
WORDS = 200  # a minute
SMALL = "--updates 20 --eval-n 64 --eval-every 1000 --no-wandb"
REWARD = (
    '"reward": exact if reward == "binary" else partial,',
    '"reward": (exact if reward == "binary" else partial) * (0.5 + 0.5 * (habit == "derives")),',
)
LOSS = (
    ('    "cispo": (1.0, 0.28),\n', '    "cispo": (1.0, 0.28),\n    "sil": (0.0, 0.0),\n'),
    ('    if loss == "reinforce":\n',
     '    if loss == "sil":  # only what was good is learnt, and the better the more (Oh et al. 2018, eq. 2)\n'
     '        return -advantages.clamp(min=0) * logprobs, ratio.detach(), torch.zeros_like(row, dtype=torch.bool)\n'
     '    if loss == "reinforce":\n'),
)  # fmt: skip
FORKS = {
    "a new reward: an answer that was not derived earns half": ("env_letters.py", (REWARD,), "--env letters"),
    "a new environment: count the vowels, as it stands in docs/fork.md": (
        "vowels.py",
        (),
        "--env vowels.py:Vowels --sft-steps 100 --sft-lr 3e-4",
    ),
    "a new loss: only what was good is learnt": ("grpo.py", LOSS, "--env letters --loss sil"),
}


def timed(words: list[str], cwd: Path) -> tuple[float, str]:
    start = time.monotonic()
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} stopped with {done.returncode}: {done.stderr[-800:]}")
    return time.monotonic() - start, done.stdout


def result(clone: Path, name: str) -> str:
    """What a run measured on development tasks, after SFT and in the end; a run that lost is named."""
    s = json.loads((clone / "runs" / name / "summary.json").read_text())
    e = s["eval"][s["trained"]]
    show = lambda x: interval_of(x, "exact").percent()
    lost = "; **it lost**" if e["final"]["exact"] < e["after_sft"]["exact"] else ""
    return f"{show(e['after_sft'])} → {show(e['final'])} exact, n = {e['final']['n']}{lost}"


def fork(clone: Path, file: str, changes: tuple, flags: str, name: str) -> tuple[float, str, str]:
    """Make the change, run it; returns seconds, what git says has changed, and what came out. The clone is as before afterwards."""
    path = clone / file
    if changes:
        text = path.read_text()
        for old, new in changes:
            if text.count(old) != 1:
                raise SystemExit(
                    f"{file}: {old.strip()[:60]} is there {text.count(old)} times and not once; bring lab/pages/walk.py up to date"
                )
            text = text.replace(old, new)
    else:
        text = re.search(r"```python\n(# vowels.py\n.*?)```", (clone / "docs" / "fork.md").read_text(), re.S)[1]
    path.write_text(text)
    seconds, _ = timed([str(clone / ".venv/bin/python"), "train.py", *flags.split(), *SMALL.split(), "--name", name], clone)
    changed = timed(["git", "status", "--short"], clone)[1].split()[1::2]
    if changed != [file]:
        raise SystemExit(f"{name}: not only {file} has changed but {' '.join(changed)}")
    timed(["git", "checkout", "-q", "."], clone)
    timed(["git", "clean", "-fdq", "-e", "runs", "-e", ".venv"], clone)
    return seconds, " ".join(changed), result(clone, name)


def paced(clone: Path) -> float:
    """Milliseconds of a round of arithmetic, which the forecast of a run scales its seconds with."""
    code = "from bookkeeping.forecast import pace; print(pace(5))"
    return float(timed([str(clone / ".venv/bin/python"), "-c", code], clone)[1])


def main(python: str = sys.executable, keep: bool = False) -> None:
    folder = Path(tempfile.mkdtemp())
    clone = folder / "picoswarm"
    lines = ["# A walk through the book, with a clock", "",
             "`python -m lab.pages.walk`: a fresh clone, two CPU cores. Seconds are measured; "
             "reading is computed, at 200 words a minute.", "",
             "| step | what | seconds | reading, minutes |", "|---|---|---|---|"]  # fmt: skip
    say = lambda *cells: (lines.append("| " + " | ".join(map(str, cells)) + " |"), print(lines[-1], flush=True))
    try:
        say("clone", "`git clone`", f"{timed(['git', 'clone', '-q', str(ROOT), str(clone)], folder)[0]:.0f}", "")
        install, _ = timed(["make", f"PYTHON={python}", ".venv/installed"], clone)
        say("install", "the first half of `make train`", f"{install:.0f}", "")
        pace = paced(clone)
        took, _ = timed(["make", f"PYTHON={python}", "train"], clone)
        pace = (pace + paced(clone)) / 2
        run = next((clone / "runs").iterdir()).name
        say("`make train`", result(clone, run), f"{took:.0f}", "")
        total = 0.0
        for file in STORY:
            minutes = len((clone / file).read_text().split()) / WORDS
            total += minutes
            shows = "" if file in ("README.md", "train.py") else f"{timed([str(clone / '.venv/bin/python'), file], clone)[0]:.0f}"
            say("read", f"`{file}`" + (f", `python {file}`" if shows else ""), shows, f"{minutes:.0f}")
        for i, (what, (file, changes, flags)) in enumerate(FORKS.items()):
            seconds, changed, came = fork(clone, file, changes, flags, f"fork{i}")
            say("fork", f"{what}; touched: `{changed}`; `{flags} {SMALL}`: {came}", f"{seconds:.0f}", "")
        machine = json.loads((clone / "runs" / run / "summary.json").read_text())["machine"]
        lines += [
            "",
            f"Reading the story: {total:.0f} minutes in all. {machine['device']}, Python {machine['python']}, torch {machine['torch']}; "
            f"a round of `bookkeeping.forecast.pace` took {pace:.3f} ms.",
            "",
        ]
    finally:
        shutil.rmtree(folder) if not keep else print(folder)
    (ROOT / "results" / "walk.md").write_text("\n".join(lines))


if __name__ == "__main__":
    tyro.cli(main)
