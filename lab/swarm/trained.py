"""Swarm, trained to the end: GRPO beside everything that might do as well, over seeds, on held-out scenarios.

    python -m lab.swarm.trained            # finished runs are kept and not run again; about five hours on two cores
    python -m lab.swarm.trained --table    # only the pages and the picture, from what is committed

A control that could win gets what our own arm gets: its settings are swept with seed 0 on *development* scenarios, the best one is trained
with every seed, and only then every policy plays the same held-out scenarios, once, greedily and sampled. Three seeds, planned before the
first run; each trains on scenarios of its own.
"""

from dataclasses import dataclass, field
from pathlib import Path

import tyro

from lab.common import RESULTS, launch, read_json, side_by_side

RUNS, OUT = Path("runs/swarm"), RESULTS / "swarm"  # RUNS is relative: configs are committed
SEEDS, N = (0, 1, 2), 256
KEPT = ("summary.json", "evals.jsonl", "config.json")
REPORT = (*KEPT, "metrics.jsonl", "report.md", "curves.png")
SHOWN = {"grpo-0": (*REPORT, "report.html")}


@dataclass(frozen=True)
class Arm:
    what: str
    flags: str = ""
    sweep: dict[str, str] = field(default_factory=lambda: {"": ""})  # {label of a setting: its flags}


def grid(rates: str, steps: str) -> dict[str, str]:
    """SFT: every learning rate with every number of steps."""
    return {f"lr{rate}-n{n}": f"--sft-lr {rate} --sft-steps {n}" for n in steps.split() for rate in rates.split()}


LONG = "--until-converged --max-updates 250"
SFT = "--updates 0 --sft-style"
ARMS = {
    "grpo": Arm("**GRPO**, the default settings, until it has settled", LONG),
    "no_think": Arm("GRPO, thinking not allowed", f"{LONG} --no-think"),
    "v01": Arm("GRPO under the rules of v0.1", f"{LONG} --swarm-version 0.1"),
    "more_sft": Arm("more SFT on the 100 episodes of the expert that GRPO begins with", f"{SFT} expert", grid("1e-4 3e-4 1e-3", "200 1000")),
    "sft_tuned": Arm("SFT on 100 episodes of the best scripted player", f"{SFT} tuned", grid("1e-4 3e-4 1e-3", "200 1000")),
    "start": Arm("after the default SFT: where GRPO begins", "--updates 0"),
}


# ------------------------------------------------------------------------------------------------ runs
def named(arm: str, setting: str, seed: int) -> str:
    return "-".join(part for part in (arm, setting, str(seed)) if part)


def train(arm: str, setting: str, seed: int, threads: int) -> None:
    """One run, unless it is committed."""
    name = named(arm, setting, seed)
    if (OUT / name / "summary.json").exists() and read_json(OUT / name / "summary.json")["config"]["name"] == name:
        return
    flags = f"--env swarm {ARMS[arm].flags} {ARMS[arm].sweep[setting]} --seed {seed}".split()
    kept = REPORT if len(ARMS[arm].sweep) == 1 and arm != "start" else KEPT
    launch(flags, RUNS, name, OUT / name, SHOWN.get(name, kept), threads)


def development(name: str) -> float:
    """Mean greedy reward on the development scenarios at the end of a run."""
    summary = read_json(OUT / name / "summary.json")
    return summary["eval"][summary["trained"]]["final"]["reward"]


def best(arm: str) -> str:
    """The setting with which seed 0 earns most on development scenarios."""
    return max(ARMS[arm].sweep, key=lambda setting: development(named(arm, setting, 0)))


def main(only: str = "", jobs: int = 2) -> None:
    """only: arms, by name, separated by spaces; all by default. jobs: runs at once, one thread each."""
    arms = only.split() or list(ARMS)
    swept = [arm for arm in arms if len(ARMS[arm].sweep) > 1]
    plain = [(arm, "", seed, 1) for seed in SEEDS for arm in arms if arm not in swept]
    side_by_side(train, plain, jobs, "one setting")
    side_by_side(train, [(arm, setting, 0, 1) for arm in swept for setting in ARMS[arm].sweep], jobs, "seed 0, all settings")
    side_by_side(train, [(arm, best(arm), seed, 1) for seed in SEEDS[1:] for arm in swept], jobs, "the other seeds")


if __name__ == "__main__":
    tyro.cli(main)
