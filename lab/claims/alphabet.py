"""The alphabet table: GRPO beside everything that might do as well, over seeds, on held-out lists.

    python -m lab.claims.alphabet            # finished runs are kept and not run again; about four hours on two cores
    python -m lab.claims.alphabet --table    # only the page and the picture, from what is committed

As for letters (lab/claims/study.py): settings are swept with seed 0 on development lists, the best one is trained with every seed, and
only then every policy sorts the same held-out lists, once, greedily and sampled. Three seeds, planned before the first run; all share one
base and the same 100 demonstrations. Held-out lists are new, but their names come from the one pool that the base was pretrained on.
"""

import json
import re
from pathlib import Path

import numpy as np
import tyro

import metrics
from lab.claims import study
from lab.claims.study import (
    KEPT,
    REPORT,
    Arm,
    Study,
    development,
    dots,
    grid,
    less,
    over_seeds,
    percent,
    played_runs,
    setting_of,
    sweep_tables,
    versions,
)
from lab.common import RESULTS, pyplot, read_json, read_lines, save_picture, table, write_page

N = 256
SFT = "--updates 0 --sft-style"  # 1,000 steps are about GRPO's work (work)
ARMS = {
    "grpo": Arm("**GRPO**, the default command"),
    "no_think": Arm("GRPO, thinking not allowed", "--no-think"),
    "sft_derives": Arm("SFT on 100 demonstrations that derive", f"{SFT} derives", grid("1e-4 3e-4 1e-3", "100 300")),
    "sft_states": Arm(
        "SFT on the 100 demonstrations that GRPO begins with, which state", f"{SFT} states", grid("1e-4 3e-4 1e-3", "300 1000")
    ),
    "start": Arm("after the default SFT: where GRPO begins", SFT.replace(" --sft-style", "")),
}  # fmt: skip
BASES = {  # what no run gives
    "base": "the base, before anything",
    "begun": "the base, with its derivation begun in each turn (the first key)",
}
DECODINGS = {"greedy": 0.0, "sampled": 1.0}


def keeps(name: str) -> tuple[str, ...]:
    return (*REPORT, "report.html") if name == "grpo-0" else REPORT if name == "no_think-0" else KEPT


STUDY = Study(Path("runs/alphabet"), RESULTS / "alphabet", ARMS, (0, 1, 2), "reward", lambda name: "--env alphabet", keeps)


# ------------------------------------------------------------------------------------------------ held-out lists
def play_held_out(name: str, seed: int, threads: int) -> None:
    """Let a run's policy, or the base, sort them, unless it has, into its held_out.json: {how: {measure: [lists]}}."""
    file = STUDY.out / name / "held_out.json"
    if file.exists():
        return
    import torch

    import settings
    from policy import PICO
    from rollout import play

    torch.set_num_threads(threads)
    cfg = settings.Config(env="alphabet", think=not name.startswith("no_think"))
    policy, sampler = study.player(str(PICO), None if name in BASES else STUDY.runs / name)
    player = begun(policy) if name == "begun" else sampler
    settings.check(cfg)
    settings.complete(cfg, policy.n_parameters, "alphabet with pico_base")
    make_env, found = next(iter(settings.eval_sets(cfg).values()))[1], {}
    for how, heat in DECODINGS.items():
        groups = play(policy, player, make_env, study.held_out_seeds(N), 1, cfg.max_tokens, heat, seed)
        episodes = [episode for group in groups for episode in group]
        found[how] = {"reward": [round(e.reward, 4) for e in episodes], "exact": [e.components["exact"] for e in episodes]}
    write_page(file, [json.dumps(found, separators=(",", ":")), ""])


def begun(policy) -> study.Begun:
    """A sampler whose replies begin as the method does: "<think>", a line's end, and the key of the name that the user gave first (three
    letters). So the base is told which part of a name to cut out, too: this is the most that choosing the habit can reach."""
    from env_alphabet import key_of
    from policy import encode

    def start_of(prompt: list[int]) -> list[int]:
        by, name = re.findall(r"names by (first|last) name:\n(\w+)\n", policy.tokenizer.decode(prompt))[-1]
        start = f"<think>\n{key_of(name, by)[:3]}"
        ids = encode(policy, start)
        assert encode(policy, f"{start} {name}")[: len(ids)] == ids
        return ids

    return study.Begun(policy, start_of)


def read_scores(measure: str, how: str = "greedy") -> dict[str, list[list[float]]]:
    """{arm: [seeds][lists] of the held-out lists}."""
    runs = played_runs(STUDY) | {name: [name] for name in BASES}
    return {arm: [read_json(STUDY.out / name / "held_out.json")[how][measure] for name in names] for arm, names in runs.items()}


def short() -> list[list]:
    """The table in brief: what, seeds, mean reward, greedy and sampled, GRPO minus this, work."""
    greedy, sampled = read_scores("reward"), read_scores("reward", "sampled")
    runs = played_runs(STUDY)
    return [
        [
            ARMS[arm].what if arm in ARMS else BASES[arm], len(scores), over_seeds(scores).text(), over_seeds(sampled[arm]).text(),
            "" if arm == "grpo" else less(greedy["grpo"], scores).signed(),
            f"{np.mean([study.work(STUDY, name) for name in runs[arm]]):.1f}" if arm in ARMS else "",
        ]
        for arm, scores in greedy.items()
    ]  # fmt: skip


# What prime-rl's page prints of its trained Qwen3-4B: three sampled replies to each of 20 lists, their rewards
# (github.com/PrimeIntellect-ai/prime-rl at 559b447, examples/basic/alphabet-sort).
PRIME_RL = (
    (1, 1, 1, 1, 1, 0.035, 0.635, 1, 1, 1, 1, 0.2, 1, 1, 0.24, 1, 1, 1, 1, 0.987),
    (1, 1, 1, 1, 1, 0.035, 0.027, 1, 1, 0.416, 1, 0.2, 0.292, 1, 0.24, 1, 1, 1, 1, 0.987),
    (1, 1, 1, 1, 1, 0.047, 0.027, 1, 1, 1, 1, 0.2, 0.505, 1, 0.24, 1, 1, 1, 1, 0.987),
)


def beside_theirs() -> str:
    """The published rewards by our method: over lists, since replies to one list are alike."""
    rewards = np.array(PRIME_RL)  # [3, 20]
    alike, right = int((np.ptp(rewards, 0) == 0).sum()), int((rewards == 1).sum())
    return (
        f"The published run, from the {rewards.size} rewards that its page prints: {metrics.mean(rewards.mean(0)).text()} over its "
        f"{rewards.shape[1]} lists, of which {alike} earn the same in all three replies; {right} rewards are 1."
    )


def page() -> None:
    runs, rows = played_runs(STUDY), []
    rewards, exact = ({how: read_scores(measure, how) for how in DECODINGS} for measure in ("reward", "exact"))
    for (arm, scores), (what, seeds, mean, drawn, *rest) in zip(rewards["greedy"].items(), short()):
        setting = setting_of(STUDY, arm) if arm in ARMS else ""
        each = " ".join(f"{np.mean(row):.3f}" for row in scores)
        rows.append([what, setting, seeds, f"**{mean}**", drawn, *(percent(exact[how][arm]) for how in DECODINGS), each, *rest])
    lines = [
        "# Alphabet: GRPO beside everything that might do as well", "",
        f"`python -m lab.claims.alphabet`; three turns, 1 to 4 names, power 8; seeds {STUDY.seeds[0]} to {STUDY.seeds[-1]}, planned before "
        f"the first run; {versions(STUDY, runs['grpo'][0])}. {N} held-out lists that no run looked at and nothing was chosen by; 95% "
        "intervals over seeds and lists (of one policy: over lists). *Perfect*: all three turns right. *GRPO minus this*: mean reward, "
        "greedy, paired by seed and list. *Work*: millions of tokens, once when sampled, three times when trained on.", "",
    ]  # fmt: skip
    head = (
        "",
        "settings",
        "seeds",
        "mean reward, greedy",
        "sampled",
        "perfect, greedy",
        "sampled",
        "each seed, greedy",
        "GRPO minus this",
        "work",
    )
    lines += [*table(head, rows), "", beside_theirs()]
    lines += ["", "Sampled, GRPO minus this:", ""]
    for arm in ("begun", "sft_derives"):
        reward, perfect = (less(found["sampled"]["grpo"], found["sampled"][arm]) for found in (rewards, exact))
        lines.append(f"* {ARMS[arm].what if arm in ARMS else BASES[arm]}: reward {reward.signed()}, perfect {perfect.points()}")
    lines += ["", "![each seed](arms.png)", "", "## What was swept", "", "Seed 0, development lists (n = 256), mean reward at the end.", ""]
    lines += sweep_tables(STUDY, "reward | work", lambda name: [f"{development(STUDY, name):.3f}", f"{study.work(STUDY, name):.1f}"])
    write_page(STUDY.out / "README.md", lines)
    draw(rewards["greedy"])


def draw(scores: dict[str, list]) -> None:
    """Greedy reward by update, and where each arm ends."""
    fig, (curves, end) = pyplot().subplots(1, 2, figsize=(13, 4.4), layout="constrained")
    for arm, colour in (("grpo", "C2"), ("no_think", "C3")):
        for name in played_runs(STUDY)[arm]:
            evals = [
                e for e in read_lines(STUDY.out / name / "evals.jsonl") if e["trained"] and e["stage"] in ("after_sft", "train", "final")
            ]
            label = ARMS[arm].what.replace("*", "") if name.endswith("-0") else None
            curves.plot([e["update"] for e in evals], [np.mean(e["reward"]) for e in evals], color=colour, lw=1.2, label=label)
    curves.set(title="mean reward on development lists, greedy", xlabel="update", ylim=(-0.02, 1.02))
    curves.legend(fontsize=8)
    curves.grid(alpha=0.25)
    dots(end, STUDY, scores, BASES, width=40)
    end.set(title=f"mean reward, greedy, {N} held-out lists (95%; ticks: seeds)", xlabel="reward", xlim=(-0.02, 1.02))
    save_picture(fig, STUDY.out / "arms.png", 110)


def main(table: bool = False, only: str = "", jobs: int = 2) -> None:
    """only: arms, by name, separated by spaces; all by default. jobs: runs at once, one thread each."""
    if not table:
        study.play_all(STUDY, BASES, play_held_out, jobs, only.split())
    page()


if __name__ == "__main__":
    tyro.cli(main)
