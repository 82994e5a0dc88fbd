"""Settings that cannot work are refused before anything is loaded, in one sentence with the flag.

REFUSALS is the table: flags, when they are wrong, and why. A check that needs more than a line is a
function below it. What only an environment knows (which versions swarm has) its class checks
itself, and bookkeeping/guard.py plays an episode of it.
"""

import math
import re
from dataclasses import fields

from bookkeeping.presets import BY_ENV, PRESETS
from fast import parallel
from fast.batches import IMPORTANCE
from grpo import LOSSES
from settings import (
    MOST_UPDATES,
    OF_ENVIRONMENTS,
    SFT_SEEDS,
    TRAIN_SEEDS,
    Config,
    by_env,
    class_of,
    fill,
    given,
    kind,
    levels_of,
    make_env,
    mistake,
    option,
    short,
)

MOST_THREADS = 1024  # more is a typing error


def number(enough):
    """A row's test: is a number not enough? None passes: it is chosen later, by model size."""
    return lambda c, x: x is not None and not enough(x)


REFUSALS = [  # (flags, when a Config c and the flag's value x are wrong, why); {a flag's value}
    (
        "num_tasks epochs eval_n eval_every save_every sft_examples sft_batch api_concurrency",
        number(lambda x: x >= 1),
        "must be at least 1",
    ),
    (
        "updates sft_steps warmup lora_rank kl lr_end async_rollouts threads",
        number(lambda x: x >= 0),
        "must be at least 0",
    ),
    (
        "temperature lr sft_lr max_tokens micro_tokens lora_alpha",
        number(lambda x: 0 < x < math.inf),
        "must be positive, not inf",
    ),
    ("threads", lambda c, x: x > MOST_THREADS, f"must be at most {MOST_THREADS}"),
    ("today", lambda c, x: not re.fullmatch(r"(\d{4}-\d\d-\d\d)?", x), "give it as YYYY-MM-DD"),
    ("vllm_memory", lambda c, x: not 0 < x < 1, "must be a share of the card, between 0 and 1"),
    ("engine", lambda c, x: x not in ("auto", "torch", "vllm"), "choose auto, torch, vllm"),
    ("baseline", lambda c, x: x not in ("group", "batch", "none"), "choose group, batch, none"),
    ("loss", lambda c, x: x not in LOSSES, f"choose {', '.join(LOSSES)}"),
    ("importance", number(lambda x: x in IMPORTANCE), f"choose {', '.join(IMPORTANCE)}"),
    (
        "preset",
        lambda c, x: x and x not in PRESETS,
        f"choose {', '.join(PRESETS)}, or leave it out",
    ),
    (
        "loss",
        lambda c, x: c.loss == "reinforce" and is_stale(c),
        "it has no importance ratio, so nothing would correct for samples of an older policy; use "
        "another loss, or --epochs 1 and --importance sequence",
    ),
    (
        "env",
        lambda c, x: c.break_ and c.env != "letters",
        "--break makes its mistakes in letters; leave one of the two out",
    ),
    (
        "break_",
        lambda c, x: c.break_ and leaves_the_process(c),
        "the mistake is made in this process, in code that --plain does not use; leave out "
        "--plain, --engine vllm and --async-rollouts",
    ),
    (
        "difficulty",
        lambda c, x: c.env == "letters" and not isinstance(c.difficulty, int),
        "letters has tiers 1 to 10; choose one of them",
    ),
    (
        "curriculum",
        lambda c, x: c.curriculum and len(levels_of(c.env)) < 2,
        "{env} has no levels to climb; leave it out, or give your class two (docs/fork.md)",
    ),
    (
        "difficulty",
        lambda c, x: c.curriculum and x not in levels_of(c.env),
        "a curriculum climbs to one of the environment's levels; choose one, or leave it out",
    ),
    (
        "held_out",
        lambda c, x: x,  # evaluate.py takes it out of the Config of --eval-only
        "a training run uses development tasks only; use it with --eval-only",
    ),
    (
        "plain",
        lambda c, x: c.plain and c.engine == "vllm",
        "it has its own sampler; leave out --engine vllm",
    ),
    (
        "engine",  # vLLM would mistake our process group for its own
        lambda c, x: x == "vllm" and parallel.world() > 1 and not c.async_rollouts,
        "with several processes vLLM needs a second one next to each; add --async-rollouts 1 (for "
        "a 4B model also --micro-tokens 4096: it takes 94 GiB without)",
    ),
    (
        "k",
        lambda c, x: x is not None and x < 2 and c.baseline == "group",
        "must be at least 2: a group of one has no baseline, so every advantage would be 0; or use "
        "--baseline batch",
    ),
    ("k", number(lambda x: x >= 1), "must be at least 1"),
    (
        "k",
        lambda c, x: c.baseline == "batch" and (c.k or 0) * (c.num_tasks or 0) == 1,
        "a batch of one episode has no baseline; use --num-tasks 2 or more",
    ),
    (
        "updates",
        lambda c, x: c.until_converged and c.updates == 0,
        "--until-converged watches the rewards of updates; use 1 or more",
    ),
    (
        "updates",
        lambda c, x: c.probe and x == 0,
        "--probe draws the batch of the first update; use 1 or more",
    ),
    (
        "max_updates",
        lambda c, x: c.until_converged and c.max_updates < (c.updates or 0),
        "must be at least --updates {updates}",
    ),
    (
        "num_tasks",
        lambda c, x: seeds_of(c) < 1,
        f"there are not enough tasks for {MOST_UPDATES} updates; use fewer",
    ),
    (
        "updates",
        lambda c, x: max(c.updates or 0, c.max_updates * c.until_converged) > MOST_UPDATES,
        f"must be at most {MOST_UPDATES}; beyond it are the tasks of the next --seed",
    ),
    (
        "eval_n sft_examples",
        # by default every seed is another task
        lambda c, x: x > (getattr(make_env(c, c.difficulty), "most_tasks", None) or math.inf),
        "the environment does not have that many different tasks; use fewer",
    ),
    (
        "seed",
        lambda c, x: not 0 <= x < seeds_of(c),
        "must be 0 to {last_seed} (with --num-tasks {num_tasks}), or it would train on the tasks "
        "of SFT or of the evaluation",
    ),
]


def check(cfg: Config) -> None:
    """Raise a ValueError of one sentence if a run with these settings cannot work.

    Also fills in what depends on the environment, and lists every setting of --set once.
    """
    if kind(cfg.env) not in BY_ENV or cfg.env in ("yours", "known"):
        refuse(
            cfg,
            "env",
            "there is no such environment; choose letters, alphabet, swarm, jsonl:FILE, "
            "reasoning_gym:NAME, or FILE.py:CLASS",
        )
    fill(cfg, by_env(cfg.env))
    if kind(cfg.env) == "yours":
        check_level(cfg)
    for flags, wrong, why in REFUSALS:
        for flag in flags.split():
            if wrong(cfg, getattr(cfg, flag)):
                refuse(cfg, flag, why)
    cfg.set = [f"{name}={value}" for name, value in sorted(given(cfg).items())]


def refuse(cfg: Config, flag: str, why: str) -> None:
    """ValueError: the flag, its value unless it is a switch, and why."""
    value = getattr(cfg, flag)
    typed = "" if isinstance(value, bool) else f" {value}"
    why = why.format(**vars(cfg), last_seed=seeds_of(cfg) - 1)
    raise ValueError(f"{option(flag)}{typed}: {why}")


def is_stale(cfg: Config) -> bool:
    """Are some samples of an older policy, with only the loss's ratio to correct for it?"""
    return cfg.epochs > 1 or bool(cfg.async_rollouts and cfg.importance == "clip")


def leaves_the_process(cfg: Config) -> bool:
    """Would a mistake made on purpose have to be made where it cannot be?"""
    own = mistake(cfg.break_).get("async_rollouts", 0)
    return cfg.plain or cfg.engine == "vllm" or cfg.async_rollouts != own


def seeds_of(cfg: Config) -> int:
    """How many values --seed may have before training tasks run into those of SFT."""
    return (SFT_SEEDS - TRAIN_SEEDS) // (MOST_UPDATES * (cfg.num_tasks or 1))


def check_level(cfg: Config) -> None:
    """Your own class is trained at its last level, or at the one that you type."""
    levels = levels_of(cfg.env)
    if not isinstance(levels, list | tuple) or any(type(one) not in (int, str) for one in levels):
        raise ValueError(
            f"levels of {cfg.env} must be numbers or words in a list; see docs/fork.md"
        )
    found = {str(one): one for one in levels or [0]}
    fill(cfg, {"difficulty": list(found.values())[-1]})
    if str(cfg.difficulty) not in found:
        some = f"has {', '.join(found)}" if levels else "has no levels"
        refuse(cfg, "difficulty", f"{short(cfg.env)} {some}; see docs/fork.md")
    cfg.difficulty = found[str(cfg.difficulty)]  # "1" is a word if the class says so


def tell_unread(cfg: Config, typed: set[str]) -> None:
    """Print the flags of environments that were typed, and that this one does not read."""
    read = {"yours": {"difficulty"}, "known": {"think"}}.get(kind(cfg.env))
    if read is None:
        own = {field.name for field in fields(class_of(cfg.env))}
        read = {name for name, field in OF_ENVIRONMENTS.items() if field in own}
    useless = sorted(typed & OF_ENVIRONMENTS.keys() - read)
    if useless:
        print(f"--env {cfg.env} ignores {', '.join(map(option, useless))}")
