"""RL beyond what was taught: strings of up to 150 letters, from a base that has never seen more than 80.

    python -m lab.claims.longer            # finished runs are kept and not run again; about three hours on two cores
    python -m lab.claims.longer --table    # only the page and the pictures, from what is committed

lab/base/long.py says what the base was taught, lab/claims/lengths.py what the levels are. GRPO climbs them by its own success and is
compared with GRPO on tier 7 from the start and with GRPO that stays on tier 6, the same number of updates each. Three seeds, planned before
the first run. Held-out tasks are played once, at the end: tier 7, tier 6, and one set for every tenth length.
"""

import json
from functools import partial
from pathlib import Path

import numpy as np
import tyro

from env_letters import Letters
from lab.claims import as_share, lengths, study
from lab.claims.letters import begun
from lab.claims.study import KEPT, Arm, Study, over_seeds, percent, played_runs, versions
from lab.common import RESULTS, pyplot, read_json, read_lines, save_picture, table, write_page

N, N_CURVE = 512, 128  # held-out tasks of a tier, and of a length
UPDATES = 250
GRPO = f"--updates {UPDATES} --eval-every 50"
ARMS = {
    "climbs": Arm("**GRPO that climbs**: tier 6, then longer and longer strings", f"{GRPO} --curriculum"),
    "tier7": Arm("GRPO on tier 7 from the start", GRPO),
    "tier6": Arm("GRPO that stays on tier 6", f"{GRPO} --difficulty 40-80"),
}
BASES = {"begun": "the base, with the first tokens of a derivation given: all that choosing a habit can reach", "base": "the base"}
WHAT = {arm: a.what for arm, a in ARMS.items()} | BASES
COLOURS = {"climbs": "C2", "tier7": "C0", "tier6": "C3", "begun": "C7"}
MODEL, MAX_TOKENS = "models/pico_long", 448
FLAGS = f"--env lab/claims/lengths.py:Lengths --model {MODEL} --sft-steps 0 --max-tokens {MAX_TOKENS} --eval-n 128"
SETS = {"tier 7": ("80-150", N), "tier 6": ("40-80", N)} | {str(n): (f"{n} letters", N_CURVE) for n in lengths.CURVE}
DECODINGS = {"greedy": 0.0, "sampled": 1.0}


def keeps(name: str) -> tuple[str, ...]:
    return (*KEPT, "metrics.jsonl") if name.startswith("climbs") else KEPT


STUDY = Study(Path("runs/longer"), RESULTS / "longer", ARMS, (0, 1, 2), "exact", lambda name: FLAGS, keeps)


def play_held_out(name: str, seed: int, threads: int) -> None:
    """Let a run's policy, or the base, play, unless it has, into held_out.json: {set of tasks: {how: [tasks] exactly right}}."""
    file = STUDY.out / name / "held_out.json"
    if file.exists():
        return
    import torch

    from rollout import play

    torch.set_num_threads(threads)
    (policy, sampler), found = study.player(MODEL, None if name in BASES else STUDY.runs / name), {}
    for tasks, (level, n) in SETS.items():
        make_env, seeds, found[tasks] = partial(lengths.Lengths, level), study.held_out_seeds(n), {}
        for how, heat in (DECODINGS if tasks == "tier 7" else {"greedy": 0.0}).items():
            player = begun(policy, partial(Letters, level, "binary", True, "derives"), seeds) if name == "begun" else sampler
            groups = play(policy, player, make_env, seeds, 1, MAX_TOKENS, heat, seed)
            found[tasks][how] = [group[0].reward for group in groups]
    write_page(file, [json.dumps(found, separators=(",", ":")), ""])


def read_scores(tasks: str, how: str = "greedy") -> dict[str, list[list[float]]]:
    """{arm: [seeds][tasks]}, 1 for an exact answer."""
    played = lambda name: read_json(STUDY.out / name / "held_out.json")[tasks][how]
    runs = played_runs(STUDY) | {name: [name] for name in BASES}
    return {arm: [played(name) for name in names] for arm, names in runs.items()}


def short() -> list[list]:
    """The table in brief: what, seeds, tier 7 greedy and sampled, climbs minus this, work."""
    runs, greedy, sampled = played_runs(STUDY), read_scores("tier 7"), read_scores("tier 7", "sampled")
    return [
        [
            WHAT[arm], len(scores), f"**{percent(scores)}**", percent(sampled[arm]),
            "" if arm == "climbs" else study.less(greedy["climbs"], scores).points(),
            "" if arm in BASES else f"{np.mean([study.work(STUDY, name) for name in runs[arm]]):.1f}",
        ]
        for arm, scores in greedy.items()
    ]  # fmt: skip


def page() -> None:
    runs, rows = played_runs(STUDY), []
    greedy, six = read_scores("tier 7"), read_scores("tier 6")
    for (arm, scores), row in zip(greedy.items(), short()):
        each = " ".join(f"{100 * np.mean(score):.1f}" for score in scores)
        rows.append([*row[:4], percent(six[arm]), each, *row[4:]])
    by_length = {n: read_scores(str(n)) for n in lengths.CURVE}
    lines = [
        "# RL beyond what was taught: from 80 letters to 150", "",
        f"`python -m lab.claims.longer`; {UPDATES} updates; seeds {STUDY.seeds[0]} to {STUDY.seeds[-1]}, planned before the first "
        f"run; {versions(STUDY, runs['climbs'][0])}. Exactly right on held-out tasks that no run looked at and nothing was chosen "
        f"by, n = {N}; 95% intervals over seeds and tasks. Tier 7: 80 to 150 letters, 12 to 20 of them asked; tier 6: 40 to 80, and "
        "8 to 12. The base was shown no string of more than 80 letters (lab/base/long.py). *Climbs minus this*: tier 7, greedy, in "
        "points, paired by seed and task. *Work*: millions of tokens, once when sampled, three times when trained on.", "",
    ]  # fmt: skip
    head = ("", "seeds", "tier 7, greedy", "sampled", "tier 6, greedy", "each seed, tier 7", "climbs minus this", "work")
    lines += table(head, rows)
    lines += ["", "![by length, and by update](longer.png)", "", "## By length", "",
              f"12 to 20 letters asked, greedy, held-out, n = {N_CURVE} a seed.", ""]  # fmt: skip
    lines += table(["letters", *greedy], [[n, *(percent(by_length[n][arm]) for arm in greedy)] for n in lengths.CURVE])
    lines += ["", "## When it climbed", "", "The first update of each level, by seed.", ""]
    began = [first_updates(name) for name in runs["climbs"]]
    lines += table(["level", *(f"seed {seed}" for seed, _ in zip(STUDY.seeds, began))], [
        [level, *(firsts.get(level, "") for firsts in began)] for level in lengths.Lengths.levels
    ])  # fmt: skip
    write_page(STUDY.out / "README.md", lines)
    draw(by_length)


def first_updates(name: str) -> dict[str, int]:
    """{level: the update that was the first on it}."""
    found: dict[str, int] = {}
    for line in read_lines(STUDY.out / name / "metrics.jsonl"):
        found.setdefault(line["level"], line["update"])
    return found


def draw(by_length: dict[int, dict[str, list]]) -> None:
    """Exactly right by length at the end, and on tier 7's development tasks by update."""
    fig, (length, curves) = pyplot().subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    runs = played_runs(STUDY)
    for arm, colour in COLOURS.items():
        if arm not in by_length[lengths.CURVE[0]]:  # not made yet
            continue
        x = list(by_length)
        points = [as_share(over_seeds(by_length[n][arm])) for n in x]
        mean, low, high = (np.array([100 * getattr(p, end) for p in points]) for end in ("mean", "low", "high"))
        length.plot(x, mean, "o-", ms=4, color=colour, label=WHAT[arm].replace("*", "").partition(":")[0])
        length.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        for i, name in enumerate(runs.get(arm, ())):
            evals = [e for e in read_lines(STUDY.out / name / "evals.jsonl") if e["tasks"] == "Lengths, level 80-150"]
            evals = [e for e in evals if e["stage"] in ("after_sft", "train", "final")]
            curves.plot([e["update"] for e in evals], [100 * np.mean(e["exact"]) for e in evals], "o-", ms=3, color=colour, lw=1.2,
                        label=WHAT[arm].replace("*", "").partition(":")[0] if i == 0 else None)  # fmt: skip
    length.axvline(80, color="black", ls="--", lw=1)
    length.text(81, 30, "longer than any string\nthat the base was shown", fontsize=8)
    length.set(title=f"held-out, greedy, n = {N_CURVE} a seed, 95% bands", xlabel="letters of the string", ylabel="% exactly right")
    curves.set(title="tier 7, development tasks, greedy, each seed", xlabel="update", ylabel="% exactly right")
    for ax in (length, curves):
        ax.set(ylim=(-2, 102))
        ax.grid(alpha=0.25)
        ax.legend(fontsize=8)
    save_picture(fig, STUDY.out / "longer.png", 110)


def main(table: bool = False, only: str = "", jobs: int = 2) -> None:
    """only: arms, by name, separated by spaces; all by default. jobs: runs at once, one thread each."""
    if not table:
        study.play_all(STUDY, BASES, play_held_out, jobs, only.split())
    page()


if __name__ == "__main__":
    tyro.cli(main)
