"""Do the conclusions about letters hold on other bases, or only on the one that we made?

    python -m lab.claims.bases            # finished runs are kept and not run again; about four hours on one core
    python -m lab.claims.bases --only "never s900"
    python -m lab.claims.bases --table    # only the page and the picture, from what is committed

Bases of letters alone, each from nothing, by lab/base/pretrain.py: two more seeds of pico_base's recipe, of which letters are 4,900
steps; three made in fewer and fewer, whose tally is seldom right (can RL repair a skill?); and one that never saw a derivation (can RL
invent it?). On each: GRPO by the default command, three seeds, planned before the first run; SFT on demonstrations that derive, swept with
seed 0; GRPO without thinking, one seed; and the base itself, alone and with its derivation begun for it. The table of pico_base, with more
controls, is lab/claims/letters.py.
"""

import json
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

import metrics
from env_letters import STYLES, Letters
from lab.claims import study
from lab.claims.letters import N, begun
from lab.claims.study import KEPT, Arm, Study, development, grid, percent, played_runs, setting_of, sweep_tables, versions
from lab.common import RESULTS, ROOT, pyplot, reach, read_json, read_lines, save_picture, side_by_side, table, write_page

LETTERS_ALONE = "--stop-after 3"  # pico_base's first three rounds; the others teach other tasks
EARLY = "--stop-after 1 --seed 3"
BASES = {  # how each is made, and what it is
    "seed1": (f"{LETTERS_ALONE} --seed 1", "pico_base's recipe, another seed"),
    "seed2": (f"{LETTERS_ALONE} --seed 2", "pico_base's recipe, a third seed"),
    "s1400": (f"{EARLY} --skill-steps 1000 --chat-steps 400", "made in 1,400 steps"),
    "s1150": (f"{EARLY} --skill-steps 800 --chat-steps 350", "made in 1,150 steps"),
    "s900": (f"{EARLY} --skill-steps 600 --chat-steps 300", "made in 900 steps"),
    "never": ("--stop-after 1 --seed 4 --skill-steps 0 --chat-steps 2000 --shown 0.5 0.5 0 --habits 0.68 0.32 0",
              "never saw a derivation"),
}  # fmt: skip
HOW = {
    "grpo": ("**GRPO**, the default command", "", {"": ""}),
    "sft_derives": ("SFT on 100 demonstrations that derive", "--updates 0 --sft-style derives", grid("1e-4 3e-4 1e-3", "100 300")),
    "no_think": ("GRPO, thinking not allowed", "--no-think", {"": ""}),
}
ARMS = {
    f"{base}_{how}": Arm(f"{what}: {BASES[base][1]}", flags, sweep, once=how == "no_think")
    for base in BASES
    for how, (what, flags, sweep) in HOW.items()
}
ALONE = {"begun": "the base, its derivation begun for it", "base": "the base, before anything"}
RUNS, OUT = Path("runs/bases"), RESULTS / "bases"
CARD_TASKS, CARD_K = 128, 8  # for what a base does when sampled

model_of = lambda name: str(RUNS / name.partition("_")[0])
STUDY = Study(
    RUNS, OUT, ARMS, (0, 1, 2), "exact",
    lambda name: f"--env letters --difficulty 6 --no-eval-other-tiers --eval-every 20 --model {model_of(name)}", lambda name: KEPT,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ the bases, and what they do
def make_base(name: str) -> None:
    """Pretrain it, unless it is there, and keep its log."""
    if not (ROOT / RUNS / name / "model.safetensors").exists():
        flags = [*BASES[name][0].split(), "--threads", "1", "--out", str(RUNS / name)]
        with open(ROOT / RUNS / f"{name}.log", "a") as log:
            subprocess.run([sys.executable, "-m", "lab.base.pretrain", *flags], cwd=ROOT, stdout=log, stderr=log, check=True)


def describe(name: str, threads: int) -> None:
    """What a base does, into its card.json: minutes of pretraining, {habit: how often it is sampled, how often right, n}."""
    import torch

    from rollout import play

    if (OUT / name / "card.json").exists():
        return
    torch.set_num_threads(threads)
    policy, sampler = study.player(model_of(name))
    env = partial(Letters, 6, "binary", True, "states")
    seeds = [2_500_000_000 + i for i in range(CARD_TASKS)]
    episodes = [e for group in play(policy, sampler, env, seeds, CARD_K, 320, 1.0, 0) for e in group]
    found = {}
    for habit in STYLES:
        mine = [e.components["exact"] for e in episodes if e.components[f"habit_{habit}"]]
        found[habit] = {"often": len(mine) / len(episodes), "right": sum(mine), "n": len(mine)}
    minutes = read_json(ROOT / RUNS / name / "pretrain_log.json")["minutes"]
    write_page(OUT / name / "card.json", [json.dumps({"flags": BASES[name][0], "minutes": minutes, "habits": found}, indent=1), ""])


def play_held_out(name: str, seed: int, threads: int) -> None:
    """Let a run's policy, or a base (BASE_begun, BASE_base), play the held-out tasks, unless it has: {how: [tasks] exactly right}."""
    import torch

    from rollout import play

    file = OUT / name / "held_out.json"
    if file.exists():
        return
    torch.set_num_threads(threads)
    alone, seeds, found = name.partition("_")[2] in ALONE, study.held_out_seeds(N), {}
    policy, sampler = study.player(model_of(name), None if alone else RUNS / name)
    env = partial(Letters, 6, "binary", "no_think" not in name, "derives")
    for how, heat in (("greedy", 0.0), ("sampled", 1.0)):
        player = begun(policy, env, seeds) if name.endswith("_begun") else sampler
        episodes = [e for group in play(policy, player, env, seeds, 1, 320, heat, seed) for e in group]
        found[how] = [int(e.components["exact"]) for e in episodes]
        found[f"derives, {how}"] = float(np.mean([e.components["habit_derives"] for e in episodes]))
    write_page(file, [json.dumps(found, separators=(",", ":")), ""])


# ------------------------------------------------------------------------------------------------ the page
def rows_of(base: str, decoding: str = "greedy") -> dict[str, list[list[float]]]:
    """{how: [seeds][tasks]} of one base, as far as it is there."""
    runs = played_runs(STUDY)
    names = {how: runs.get(f"{base}_{how}", []) for how in HOW}
    names |= {how: [f"{base}_{how}"] if (OUT / f"{base}_{how}" / "held_out.json").exists() else [] for how in ALONE}
    return {how: [read_json(OUT / name / "held_out.json")[decoding] for name in some] for how, some in names.items() if some}


there = lambda: [base for base in BASES if (OUT / base / "card.json").exists() and "grpo" in rows_of(base)]


def short() -> list[list]:
    """Two rows a base, greedy and sampled; the columns are HEAD."""
    rows = []
    for base, decoding in product(there(), ("greedy", "sampled")):
        derives, scores = read_json(OUT / f"{base}_base" / "held_out.json")[f"derives, {decoding}"], rows_of(base, decoding)
        cell = lambda how, scores=scores: percent(scores[how]) if how in scores else ""
        rows.append([
            BASES[base][1], decoding, f"{100 * derives:.1f}%", cell("base"), cell("begun"), f"**{cell('grpo')}**",
            study.less(scores["grpo"], scores["begun"]).points(), cell("sft_derives"),
            study.less(scores["grpo"], scores["sft_derives"]).points() if "sft_derives" in scores else "", cell("no_think"),
        ])  # fmt: skip
    return rows


HEAD = ("base", "decoding", "derives", "before", "begun for it", "after GRPO", "GRPO minus begun",
        "after SFT that derives", "GRPO minus SFT", "GRPO, no thinking")  # fmt: skip


def page() -> None:
    runs = played_runs(STUDY)
    if not runs:
        raise SystemExit(f"{OUT} has no run that has played the held-out tasks; leave --table out")
    one = next(iter(runs.values()))[0]
    lines = [
        "# Letters, tier 6, on other bases", "",
        f"`python -m lab.claims.bases`; seeds {STUDY.seeds[0]} to {STUDY.seeds[-1]} (without thinking: one), planned before the first run; "
        f"{versions(STUDY, one)}. Exactly right of {N} held-out tasks that no run looked at, each played once a decoding; 95% "
        "intervals over seeds and tasks (of one policy: over tasks). *Begun for it*: the base after two letters of a derivation, which is "
        f"all that choosing a habit can reach. The 900 and the 1,150 steps were chosen by looking at it, "
        "on these very tasks, before GRPO ran; all three are shown. "
        f"*Derives*, in this table: share of the {N} replies; in that of the bases: {CARD_TASKS} other tasks, "
        f"{CARD_K} samples each.", "",
        *table(HEAD, short()), "", "![before and after](bases.png)", "", "## The bases", "",
    ]  # fmt: skip
    made = []
    for base in there():
        card = read_json(OUT / base / "card.json")
        habits = [
            f"{100 * h['often']:.1f}%, {metrics.proportion(h['right'], h['n']).percent() if h['n'] else '-'}"
            for h in card["habits"].values()
        ]
        made.append([BASES[base][1], f"`python -m lab.base.pretrain {card['flags']} --threads 1`", card["minutes"], *habits])
    lines += table(["base", "made by", "minutes, one core"] + [f"{habit}: how often, how right" for habit in STYLES], made)
    lines += ["", "## Every run", ""]
    every = []
    for arm, names in runs.items():
        for name in names:
            played, swept = read_json(OUT / name / "held_out.json"), len(ARMS[arm].sweep) > 1
            cells = [f"{100 * np.mean(played['greedy']):.1f}%", f"{100 * np.mean(played['sampled']):.1f}%"]
            derives = f"{100 * played['derives, greedy']:.0f}%"
            every.append([ARMS[arm].what, name[-1], setting_of(STUDY, arm) if swept else "", *cells, derives])
    lines += table(["", "seed", "settings", "greedy", "sampled", "derives, greedy"], every)
    lines += ["", "## What was swept", "", "Seed 0, development tasks (n = 256), exactly right at the end.", ""]
    lines += sweep_tables(
        STUDY, "exactly right | work", lambda name: [f"{100 * development(STUDY, name):.1f}%", f"{study.work(STUDY, name):.1f}"]
    )
    write_page(OUT / "README.md", lines)
    draw()


def draw() -> None:
    """Each base before, begun, and after GRPO; and GRPO's curves."""
    fig, (ends, curves) = pyplot().subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    shown = {
        "base": ("C7", "before"),
        "begun": ("C1", ALONE["begun"]),
        "sft_derives": ("C0", "after SFT that derives"),
        "grpo": ("C2", "after GRPO"),
    }
    for y, base in enumerate(reversed(there())):
        scores = rows_of(base)
        for i, (how, (colour, label)) in enumerate(shown.items()):
            if how in scores:
                at = study.over_seeds(scores[how])
                place = y + 0.12 * (1.5 - i)
                ends.errorbar(
                    100 * at.mean, place, xerr=100 * reach([at]), fmt="o", ms=5, color=colour, capsize=2, label=label if y == 0 else None
                )
    ends.set_yticks(
        range(len(there())), [BASES[base][1].replace(": ", ":\n").replace(", ", ",\n") for base in reversed(there())], fontsize=8
    )
    for i, base in enumerate(there()):
        for j, name in enumerate(played_runs(STUDY)[f"{base}_grpo"]):
            evals = [e for e in read_lines(OUT / name / "evals.jsonl") if e["trained"] and e["stage"] in ("after_sft", "train", "final")]
            curves.plot([e["update"] for e in evals], [100 * np.mean(e["exact"]) for e in evals], "o-", ms=3, lw=1.2, color=f"C{i}",
                        label=BASES[base][1] if j == 0 else None)  # fmt: skip
    ends.set(title=f"held-out, greedy, n = {N}, 95%", xlabel="% exactly right", xlim=(-2, 102))
    curves.set(title="GRPO, development tasks, greedy, each seed", xlabel="update", ylabel="% exactly right", ylim=(-2, 102))
    for ax in (ends, curves):
        ax.grid(alpha=0.25)
        ax.legend(fontsize=8)
    save_picture(fig, OUT / "bases.png", 110)


def main(table: bool = False, only: str = "", jobs: int = 2) -> None:
    """only: bases, by name, separated by spaces; all by default. jobs: runs at once, one thread each."""
    if not table:
        bases = only.split() or list(BASES)
        (ROOT / RUNS).mkdir(parents=True, exist_ok=True)
        side_by_side(make_base, [(base,) for base in bases], jobs, "bases")
        for base in bases:
            describe(base, jobs)
        study.train_all(STUDY, jobs, [arm for arm in ARMS if arm.partition("_")[0] in bases])
        names = [name for arm, some in study.best_runs(STUDY).items() if arm.partition("_")[0] in bases for name in some]
        for name in tqdm([*(f"{base}_{how}" for base in bases for how in ALONE), *names], desc="held-out tasks"):
            play_held_out(name, 0 if "-" not in name else int(name.rpartition("-")[2]), jobs)
    page()


if __name__ == "__main__":
    tyro.cli(main)
