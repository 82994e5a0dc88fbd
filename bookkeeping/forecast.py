"""The first seconds: what a run will do, how long that takes here, and where to look.

To import torch takes seconds, on a busy machine a quarter of a minute. Nobody should wait so long
for the first word, so train.py calls `announce` before its other imports; nothing here needs torch.

How long: a piece of work is timed (`pace`), and the seconds of a committed run (RATES) are
multiplied by how much slower this machine is. That is rough, so a range is printed; once updates go
by, the progress bar knows better. It speaks of the embedded models on a CPU. Nobody has timed a
large model on a card.

Run me: `python -m bookkeeping.forecast` says what the three environments would take here.
"""

import os
import re
import shutil
import time
from pathlib import Path

import settings
from bookkeeping import refusals
from bookkeeping.presets import by_env, by_size, kind
from fast import machine
from settings import Config, eval_sets, short

# Seconds of an update, of an evaluation of one set of tasks and of a step of SFT by the defaults,
# in results/alphabet/grpo-0 (beside another run) and results/swarm/grpo-2; of letters so that
# `make train` takes what it took in results/walk.md at the pace measured there, shared out as in
# results/offpolicy/in_turn-0.
RATES = {"letters": (0.58, 1.28, 0.21), "alphabet": (9.4, 20.5, 0.39), "swarm": (9.0, 15.8, 0.29)}
START = 10  # seconds: imports, the model, the report
PACE = 0.26  # milliseconds of one round of `pace` there
EMBEDDED = 0.9e6  # parameters
BUSY = 4  # times as slow: hardly a slow machine alone
RANGE = 2  # the time is between estimate / RANGE and estimate * RANGE


def announce(words: list[str]) -> None:
    """Print it for this command line. Nothing if it starts no new run, or one that is refused."""
    machine.speak_utf8()
    try:
        cfg, _ = settings.read_flags(words)
        if cfg.api_base or cfg.eval_only or cfg.resume or int(os.environ.get("RANK", 0)):
            return
        refusals.check(cfg)
    except ValueError:
        return  # it is told when the run is about to begin
    settings.fill(cfg, by_size(size_of(cfg), kind(cfg.env), cfg.lora_rank))
    print(plan(cfg), flush=True)
    print(how_long(cfg, pace()), flush=True)


def plan(cfg: Config) -> str:
    """What the run will do, and where to look."""
    sets, evaluations = len(eval_sets(cfg)), number_of_evaluations(cfg)
    what = f"{short(cfg.env)}{f' {cfg.difficulty}' if cfg.difficulty else ''}: "
    if cfg.sft_steps:
        what += f"{cfg.sft_steps} steps of SFT on {cfg.sft_examples} demonstrations, then "
    what += f"{cfg.updates} updates of GRPO on {cfg.num_tasks} tasks x {cfg.k} samples"
    tasks = sets * len(settings.dev_seeds(cfg))
    judged = f"{evaluations} evaluations on the way, of {tasks} tasks not trained on"
    where = f"look into {cfg.runs}/{name_of(cfg, '*')}/: metrics.jsonl grows with every update, "
    return f"{what}\n{judged}\n{where}report.html comes at the end"


def how_long(cfg: Config, milliseconds: float) -> str:
    """What is said of the time. milliseconds: of a round of `pace`."""
    found = estimate(cfg, milliseconds)
    if found is None:
        return "how long that takes here, nobody has measured; the progress bar says it soon"
    unit, name = (60, "minutes") if found > 90 else (1, "seconds")
    low, likely, high = (found * factor / unit for factor in (1 / RANGE, 1, RANGE))
    slower = f"arithmetic takes {milliseconds / PACE:.1f} times as long as where we timed it"
    if milliseconds > BUSY * PACE and not cfg.threads:
        slower += "; if others work here, --threads 1 is faster"  # two would wait for each other
    return f"about {likely:.0f} {name} here, between {low:.0f} and {high:.0f} ({slower})"


def name_of(cfg: Config, when: str) -> str:
    """The name of a run's folder, if --name gives none."""
    level = f"-{cfg.difficulty}" if cfg.difficulty else ""
    asked = re.sub("[^A-Za-z0-9._-]+", "-", cfg.model) + "-" if cfg.api_base else ""
    return cfg.name or f"{asked}{short(cfg.env)}{level}-{when}"


def estimate(cfg: Config, milliseconds: float) -> float | None:
    """Seconds of a run of the embedded model; None for another, for which nobody knows."""
    unknown = cfg.env not in RATES or cfg.plain or cfg.engine == "vllm"
    if unknown or size_of(cfg) != EMBEDDED:
        return None
    usual, (update, evaluation, step) = by_env(cfg.env), RATES[cfg.env]
    batch = cfg.num_tasks * cfg.k / (usual["num_tasks"] * by_size(0, cfg.env)["k"])
    tasks = number_of_evaluations(cfg) * len(eval_sets(cfg)) * cfg.eval_n / usual["eval_n"]
    steps = cfg.sft_steps * cfg.sft_batch / usual["sft_batch"]
    total = cfg.updates * batch * update + tasks * evaluation + steps * step
    return (START + total) * milliseconds / PACE


def size_of(cfg: Config) -> float:
    """About how many parameters the policy will have. With a card, --model auto takes a large one.

    Whether there is a card is asked as the Makefile asks it.
    """
    if cfg.model in ("auto", "pico_base", "pico_swarm", "pico_long"):
        card = cfg.device.startswith(("auto", "cuda")) and shutil.which("nvidia-smi")
        return 1e9 if card and cfg.model == "auto" else EMBEDDED
    weights = sum(file.stat().st_size for file in Path(cfg.model).glob("*.safetensors"))
    return weights / 2 or 1e9  # bytes, of bfloat16; a model of the hub is large


def number_of_evaluations(cfg: Config) -> int:
    """Before, after SFT, every eval_every updates, and at the end."""
    return 3 + (max(cfg.updates, 1) - 1) // cfg.eval_every


def pace(seconds: float = 1.0) -> float:
    """Milliseconds of a round of small array operations, as sampling by a small model is made of.

    The mean and not the best of many rounds: on a busy machine a run has to wait, too. In less than
    a second, the one pause of a busy machine would decide.
    """
    import numpy as np

    x, rounds = np.full((64, 512), 0.5, np.float32), 0
    started = time.perf_counter()
    while time.perf_counter() < started + seconds:
        for _ in range(10):
            (x / (1 + np.exp(-x))).sum(-1)
        rounds += 1
    return 1000 * (time.perf_counter() - started) / rounds


if __name__ == "__main__":
    for env in RATES:
        announce(["--env", env])
