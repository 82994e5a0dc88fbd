"""The commands of docs/tasks.md, trained as that page says: do tasks that nobody wrote a line for climb?

python -m lab.claims.known              # three runs each, some minutes; finished ones are kept and not run again.
                                          Needs requirements/tasks.txt
python -m lab.claims.known --table      # only the page
python -m lab.claims.known --rows-only  # only the two files of rows in learn/

pico_base has seen neither prompt. It was shown how to spell a string with a tally of single letters, so these are near relatives of what it
knows. Each command is run twice per seed, once with --updates 0: the same SFT to the last bit, so that what GRPO adds can be measured on
the held-out tasks, too.
"""

import json
import random
import re
import shlex
import string
from pathlib import Path

import tyro

import metrics
from lab.claims import as_share, interval
from lab.claims.study import STAGES, train_example
from lab.common import RESULTS, ROOT, read_json, read_lines, table, write_page

PAGE, RUNS, OUT = ROOT / "docs" / "tasks.md", Path("runs/known"), RESULTS / "known"
SEEDS, HELD_OUT = (0, 1, 2), 512
FEW = 32  # development tasks of the runs without GRPO: enough to see that their SFT is the same
ROWS = {"learn/vowels.jsonl": 200, "learn/vowels_held_out.jsonl": 256}
ARMS = {"rows": "jsonl:learn/vowels.jsonl,held_out=", "letter_counting": "reasoning_gym:letter_counting"}


# ------------------------------------------------------------------------------------------------ the rows
def row(rng: random.Random) -> dict[str, str]:
    """A row in GSM8K's format: a derivation, ####, the answer."""
    word = "".join(rng.choices("aeiou" + string.ascii_lowercase, k=rng.randint(5, 20)))
    seen, spelled = 0, []
    for c in word:
        seen += c in "aeiou"
        spelled.append(f"{c}{seen}" if c in "aeiou" else c)
    return {"question": f'How many vowels are there in "{word}"?', "answer": f"{' '.join(spelled)} #### {seen}"}


def rows() -> dict[str, str]:
    """{file: its text}."""
    rng = random.Random(2026)
    return {file: "".join(json.dumps(row(rng)) + "\n" for _ in range(n)) for file, n in ROWS.items()}


# ------------------------------------------------------------------------------------------------ the runs
def example() -> str:
    """The expert of the page."""
    return re.search(r"```python\n(# spells.py\n.*?)```", PAGE.read_text(), re.S)[1]


def command(arm: str) -> list[str]:
    """The flags of the page."""
    return shlex.split(re.search(rf"^python train.py (--env {re.escape(ARMS[arm])}.*)$", PAGE.read_text(), re.M)[1])


def run(arm: str, seed: int, updates: int | None, threads: int) -> None:
    """One run. updates: None is what the page says."""
    flags = [*command(arm), "--seed", str(seed)]
    if updates is not None:
        flags += ["--updates", str(updates), "--eval-n", str(FEW)]
    train_example(RUNS, OUT, named(arm, seed, updates), "spells.py", example(), flags, HELD_OUT, threads)


def named(arm: str, seed: int, updates: int | None) -> str:
    return f"{arm}-{seed}" if updates is None else f"{arm}-sft-{seed}"


# ------------------------------------------------------------------------------------------------ the page
def stages(arm: str, seed: int) -> dict[str, list[float]]:
    """{stage: exactly right or not, of every task}; those of held-out tasks as "sft, held-out" and "held-out"."""
    lines, only_sft = (read_lines(OUT / named(arm, seed, updates) / "evals.jsonl") for updates in (None, 0))
    held_out = lambda some: next(line["exact"] for line in some if "held-out" in line["tasks"])
    found = {line["stage"]: line["exact"] for line in lines if line["stage"] in STAGES}
    same = next(line["exact"] for line in only_sft if line["stage"] == "after_sft")[:FEW]
    assert found["after_sft"][:FEW] == same, "the same SFT"
    return found | {"sft, held-out": held_out(only_sft), "held-out": held_out(lines)}


def over(some: list[list[float]]) -> str:
    """A share with its interval over seeds and tasks."""
    share = as_share(interval(some)) if len({tuple(x) for x in some}) > 1 else metrics.mean(some[0])
    return f"**{share.percent()}**"


def section(arm: str) -> list[str]:
    runs = [stages(arm, seed) for seed in SEEDS]
    columns = (*STAGES, "sft, held-out", "held-out")
    gains = lambda a, b: interval([[after - before for before, after in zip(run[a], run[b])] for run in runs]).points()
    shown = [[f"seed {seed}", *(metrics.mean(run[stage]).percent() for stage in columns),
              metrics.gain(run["after_sft"], run["final"]).points(),
              metrics.gain(run["sft, held-out"], run["held-out"]).points()] for seed, run in zip(SEEDS, runs)]  # fmt: skip
    shown.append(["all", *(over([run[stage] for run in runs]) for stage in columns), f"**{gains('after_sft', 'final')}**",
                  f"**{gains('sft, held-out', 'held-out')}**"])  # fmt: skip
    head = ["", *STAGES.values(), "after SFT, held-out", "after GRPO, held-out", "GRPO's gain", "the same, held-out"]
    longest = max(read_json(OUT / named(arm, seed, None) / "summary.json")["seconds"]["total"] for seed in SEEDS) / 60
    n, m = len(runs[0]["final"]), len(runs[0]["held-out"])
    same = zip(*([line for line in read_lines(OUT / named(arm, seed, None) / "evals.jsonl") if line["trained"]] for seed in SEEDS))
    curve = [[lines[0]["update"], *(f"{100 * sum(line['exact']) / n:.1f}%" for line in lines)] for lines in same if lines[0]["update"] >= 0]
    return [
        f"## {arm}", "", f"`python train.py {' '.join(command(arm))}`", "",
        f"{n} development tasks and {m} held-out ones. Longest run: {longest:.1f} minutes on one thread, beside other work.", "",
        *table(head, shown), "", "Development tasks by update:", "", *table(["updates", *(f"seed {seed}" for seed in SEEDS)], curve), "",
    ]  # fmt: skip


def page() -> None:
    machine = read_json(OUT / named("rows", SEEDS[0], None) / "summary.json")["machine"]
    write_page(OUT / "README.md", [
        "# The tasks of docs/tasks.md, trained", "",
        f"`python -m lab.claims.known`, seeds {SEEDS[0]} to {SEEDS[-1]}; torch {machine['torch']}, {machine['device']}. Exactly right, "
        "greedy, with 95% intervals (over tasks; in the last row over seeds and tasks). The gain is GRPO's over SFT, in points, "
        "paired by task.", "",
        *(line for arm in ARMS for line in section(arm)),
    ])  # fmt: skip


def main(table: bool = False, rows_only: bool = False, threads: int = 1) -> None:
    if rows_only:
        for file, text in rows().items():
            (ROOT / file).write_text(text)
        return
    for arm in () if table else ARMS:
        for seed in SEEDS:
            for updates in (None, 0):
                run(arm, seed, updates, threads)
    page()


if __name__ == "__main__":
    tyro.cli(main)
