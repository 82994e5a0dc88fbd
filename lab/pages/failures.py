"""The failure journal's evidence: every mistake of learn/failures.py made once, what the run said about it, and learn/FAILURES.md.

    python -m lab.pages.failures                # the runs that are missing (a minute or two each on a core), then the page and its picture
    python -m lab.pages.failures --table        # the page and its picture again from what is kept; nothing is run

The grey curve beside each is of a run without the mistake (HEALTHY), with the settings that matter for it (BESIDE).
"""

from pathlib import Path

import tyro

from lab.common import RESULTS, ROOT, launch, pyplot, read_json, read_lines, save_picture, side_by_side, table
from learn.failures import FAILURES, SHORT

OUT, RUNS = RESULTS / "failures", Path("runs/failures")
KEPT = ("metrics.jsonl", "summary.json")
# The runs beside which the mistakes are shown.
HEALTHY = {"healthy": [], "healthy-epochs": ["--epochs", "4"], "healthy-partial": ["--reward", "partial"]}
BESIDE = {"sequence-ratio": "healthy-epochs", "reward-as-correct": "healthy-partial"}


def flags_of(name: str) -> list[str]:
    if name in FAILURES:
        return ["--break", name]
    words = [(f"--{key.replace('_', '-')}", str(value)) for key, value in SHORT.items() if key != "wandb"]
    return [word for pair in words for word in pair] + HEALTHY[name]


def run(name: str, threads: int) -> None:
    if not (OUT / name / "summary.json").exists():
        launch(flags_of(name), RUNS, name, OUT / name, KEPT, threads)


def page() -> str:
    """learn/FAILURES.md, from learn/failures.py and what the runs said."""
    found = {name: read_json(OUT / name / "summary.json") for name in FAILURES}
    machine = next(iter(found.values()))["machine"]
    out = [
        "# The failure journal", "",
        "None of these raises an error. Lines go by, the loss is near 0, the bar fills up. Each entry says what a person sees, which "
        "logged number gives it away, what is behind it and how to mend it, and each can be seen: `python train.py --break NAME` makes the "
        "mistake in a run of a minute or two on two CPU cores, and the run names its cause (`bookkeeping/doctor.py`). `learn/failures.py` "
        "has every mistake in a few lines.", "",
        f"What the runs said, and when: letters, {machine['model']}, seed 0, {machine['device']}, torch {machine['torch']}; "
        "made by `python -m lab.pages.failures`.", "",
        *table("| `--break` | you see |", [[f"[{name}](#{name})", f.symptom] for name, f in FAILURES.items()]), "",
        "![each mistake beside a run without it](../results/failures/failures.png)", "",
    ]  # fmt: skip
    for name, f in FAILURES.items():
        s = found[name]
        out += [
            f"## {name}", "", f"* **You see:** {f.symptom}.", f"* **Look at:** `{f.metric}`. It {f.shows}.",
            f"* **Because of:** {f.cause}.", f"* **Mend it:** {f.fix}.", "",
            f"`python train.py --break {name}` ({s['seconds']['total'] / 60:.1f} minutes, {s['updates']} updates) says", "",
            *(f"> {warning}" for warning in told(s, f.told)), "",
        ]  # fmt: skip
    return "\n".join(out)


def told(summary: dict, name: str) -> list[str]:
    """What names the cause, before what else was told."""
    warnings = summary["warnings"]
    return [f"**{key}**, {warnings[key]}" for key in sorted(warnings, key=lambda key: key != name)]


def draw() -> None:
    fig, axes = pyplot().subplots(3, 4, figsize=(15, 9), layout="constrained")
    lines_of = lambda name: read_lines(OUT / name / "metrics.jsonl")
    for ax, (name, f) in zip(axes.flat, FAILURES.items()):
        for who, color in ((BESIDE.get(name, "healthy"), "0.6"), (name, "C3")):
            some = [(line["update"], line[f.metric]) for line in lines_of(who) if f.metric in line]
            ax.plot(*zip(*some), color=color, label="without the mistake" if color == "0.6" else f"--break {name}", lw=1.6)
        ax.set(title=f"{name}: {f.metric}", xlabel="update", xlim=(0, len(lines_of(name)) + 1))
        if f.metric in ("mismatch", "stretch", "entropy"):
            ax.set_yscale("log")
        ax.grid(alpha=0.25)
        ax.legend(fontsize=8)
    for ax in axes.flat[len(FAILURES) :]:
        ax.axis("off")
    save_picture(fig, OUT / "failures.png", 90)


def main(names: tuple[str, ...] = (), jobs: int = 1, table: bool = False) -> None:
    """Run what is missing of `names` (none: all), `jobs` at once on 2 threads in all, then write the page and its picture."""
    if strange := set(names) - {*FAILURES, *HEALTHY}:
        raise SystemExit(f"--names {strange.pop()}: choose {', '.join([*FAILURES, *HEALTHY])}")
    todo = [] if table else list(names or [*HEALTHY, *FAILURES])
    side_by_side(run, [(name, max(1, 2 // jobs)) for name in todo], jobs)
    (ROOT / "learn/FAILURES.md").write_text(page())
    draw()


if __name__ == "__main__":
    tyro.cli(main)
