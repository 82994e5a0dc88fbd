"""The environment of docs/fork.md, trained as that page says: does a reader's first fork climb?

python -m lab.claims.fork            # three runs, some minutes each; finished ones are kept and not run again
python -m lab.claims.fork --table    # only the page

pico_base was never shown this task: not the prompt, not the count of vowels. It was shown how to spell a string with a tally of single
letters, so this is a near relative of what it knows and no new skill from nothing.
"""

import re
import shlex
from pathlib import Path

import tyro

import metrics
from lab.claims import as_share, interval
from lab.claims.study import STAGES, train_example
from lab.common import RESULTS, ROOT, read_json, read_lines, table, write_page

PAGE, RUNS, OUT = ROOT / "docs" / "fork.md", Path("runs/fork"), RESULTS / "fork"
SEEDS, N = (0, 1, 2), 512


def example(page: Path = PAGE) -> str:
    """The file of the page."""
    return re.search(r"```python\n(# vowels.py\n.*?)```", page.read_text(), re.S)[1]


def command() -> list[str]:
    """The flags of the page."""
    return shlex.split(re.search(r"^python train.py (--env vowels.*)$", PAGE.read_text(), re.M)[1])


def stages(seed: int) -> dict[str, list[float]]:
    """{stage: exactly right or not, of every development task}, and the end on held-out ones."""
    lines = read_lines(OUT / f"vowels-{seed}" / "evals.jsonl")
    found = {line["stage"]: line["exact"] for line in lines if line["stage"] in STAGES}
    return found | {"held-out": next(line["exact"] for line in lines if "held-out" in line["tasks"])}


def page() -> None:
    runs = [stages(seed) for seed in SEEDS]
    rows = [[f"seed {seed}", *(metrics.mean(run[stage]).percent() for stage in (*STAGES, "held-out")),
             metrics.gain(run["after_sft"], run["final"]).points()]
            for seed, run in zip(SEEDS, runs)]  # fmt: skip
    over = lambda some: (
        f"**{as_share(interval(some)).percent()}**" if len({tuple(x) for x in some}) > 1 else metrics.mean(some[0]).percent()
    )
    gains = interval([[b - a for a, b in zip(run["after_sft"], run["final"])] for run in runs])
    rows.append(["all", *(over([run[stage] for run in runs]) for stage in (*STAGES, "held-out")), f"**{gains.points()}**"])
    s = read_json(OUT / "vowels-0" / "summary.json")
    m, n = s["machine"], len(runs[0]["final"])
    curve = [
        [f"{line['update']}", *(f"{100 * sum(e['exact']) / n:.1f}%" for e in same)]
        for same in zip(*([e for e in read_lines(OUT / f"vowels-{seed}" / "evals.jsonl") if e["trained"]] for seed in SEEDS))
        for line in [same[0]] if line["stage"] not in ("before", "eval_only")
    ]  # fmt: skip
    lines = [
        "# The environment of docs/fork.md, trained", "",
        f"`python -m lab.claims.fork`: `python train.py {' '.join(command())}`, seeds {SEEDS[0]} to {SEEDS[-1]}, planned before the first "
        f"of them; torch {m['torch']}, {m['device']}. Exactly right, greedy, {n} development tasks, with 95% intervals (over tasks; in the "
        f"last row over seeds and tasks); the last evaluation also on {N} held-out tasks. The gain is GRPO's over SFT, paired by task. "
        f"Longest run: {max(read_json(OUT / f'vowels-{seed}' / 'summary.json')['seconds']['total'] for seed in SEEDS) / 60:.1f} minutes on "
        "one thread, beside other work.", "",
        *table(["", *STAGES.values(), "after GRPO, held-out", "gain over SFT"], rows), "",
        "Development tasks by update:", "",
        *table(["updates", *(f"seed {seed}" for seed in SEEDS)], curve), "",
    ]  # fmt: skip
    write_page(OUT / "README.md", lines)


def main(table: bool = False, threads: int = 1) -> None:
    for seed in () if table else SEEDS:
        train_example(RUNS, OUT, f"vowels-{seed}", "vowels.py", example(), [*command(), "--seed", str(seed)], N, threads)
    page()


if __name__ == "__main__":
    tyro.cli(main)
