"""Every flag with its default and its reason, what of it is refused, and which environments there are.

    python train.py --help        # the same, from the dataclass below: it *is* the command line (tyro)

Each default is declared once. Where it depends on the environment or on the model's size it is None in the dataclass, and stands in BY_ENV or by_size.

Run me: `python settings.py` prints what each environment gets.
"""

import importlib.util
import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import tyro

from env_alphabet import Alphabet
from env_letters import Letters
from env_swarm import Swarm
from fast import parallel
from grpo import CLIP, IMPORTANCE

# A task is drawn from a number. These ranges never meet (check sees to it): training, SFT, and from 2e9 on the held-out tasks (evaluate.py), from 3e9
# on those of pretraining (lab/base/corpus.py).
TRAIN_SEEDS, SFT_SEEDS = 0, 1_000_000_000
MOST_UPDATES = 100_000  # of a run: where the training tasks of the next --seed begin
EVAL_TIERS = (3, 5, 6)  # evaluated beside the tier that is trained


@dataclass
class Config:
    """RL post-training of a chat model: SFT warm-up on a scripted expert, then GRPO."""

    preset: str = ""  # seed: the settings of the run this project grew out of (PRESETS below), which stood still at 44%
    break_: Annotated[str, tyro.conf.arg(name="break")] = ""  # make a mistake on purpose and see what it looks like (learn/FAILURES.md)
    # task
    env: str = "letters"  # which environment: letters, alphabet, swarm, or a class of yours as FILE.py:CLASS
    think: bool = True  # may the policy think before it answers? With --no-think letters stays about where SFT left it
    difficulty: int | str | None = None  # letters: tier 1 to 10 (6: 40-80 random letters, 8-12 of them asked); swarm: easy, medium, hard
    curriculum: bool = False  # begin at the easiest and go up when the last 5 updates were good enough (PROMOTE below)
    # letters
    reward: str = "binary"  # binary pays exact answers only; partial pays every right letter, and so also guessing
    # alphabet: the settings of the public single-GPU recipe
    min_turns: int = 3
    max_turns: int = 3
    min_names: int = 1  # new names a turn
    max_names: int = 4
    similarity_power: float = 8.0  # pushes the 0.66 that names as given get for nothing down to 0.08
    power_per_turn: bool = False  # False: average the turns, then power once; True: power each turn, then average
    # swarm: rules, and what is paid for (None: the weights of the version, see env_swarm.py)
    swarm_version: str = Swarm.version  # 0.1 has the loopholes that the published run found
    swarm_payoff: float | None = None
    swarm_reputation: float | None = None
    swarm_quality: float | None = None
    swarm_diversity: float | None = None
    swarm_floor: float = Swarm.floor  # ending with a reputation below it costs …
    swarm_floor_penalty: float = Swarm.floor_penalty  # … this times what is missing, as a share of 100
    swarm_error_penalty: float | None = None  # times the share of turns lost to errors. None: by model size (0 as published, or 2)
    # policy
    model: str = "auto"  # folder or hub id of a causal LM; auto: Qwen3-4B-Instruct-2507, or pico_base where it cannot run
    lora_rank: int = 32  # 0 trains all weights
    lora_alpha: int = 64  # the update is scaled by alpha / rank
    device: str = "auto"  # auto: cuda if there is one
    engine: str = (
        "auto"  # what samples: torch (fast/sampler.py) or vllm (fast/vllm_engine.py). auto: vllm where it is installed beside a GPU
    )
    vllm_memory: float = 0.3  # share of the card's memory that vLLM takes, and gives back while the trainer needs it
    threads: int = 0  # CPU threads; 0 leaves torch's choice
    # SFT
    sft_style: str | None = None  # whom to imitate; the default shows the format and not what does well: states; swarm: crowd
    sft_examples: int = 100  # demonstrations are scarce, rewards are not
    sft_steps: int = 50
    sft_batch: int | None = None  # None: 8, and 2 in swarm, where an episode has 25 replies to learn from
    sft_lr: float | None = None  # None: by model size (by_size below)
    # GRPO
    updates: int | None = None  # batches that GRPO samples and trains on. None: by model size and environment
    until_converged: bool = False  # after these, go on until the training reward has settled (metrics.trend) …
    max_updates: int = 400  # … or so many updates are done; the learning rate stays at its end
    num_tasks: int | None = None  # groups an update; None: 8, and 4 in swarm, whose episodes are long
    k: int = 8  # samples a group: more find a rare good answer more often
    loss: str = "grpo"  # reinforce, grpo, dr_grpo, dapo, gspo or cispo; grpo.py has them side by side
    baseline: str = "group"  # what a reward is compared with: group, batch or none
    normalize: bool = True  # divide advantages by the group's standard deviation (dr_grpo never does)
    lr: float | None = None  # None: by model size and environment
    warmup: int = 5  # updates over which the learning rate rises; Adam's first steps are its largest
    lr_end: float = 0.1  # from there it falls linearly to this share of lr at the last update; 1 keeps it constant
    kl: float = 0.0  # weight of the KL to the policy after SFT; 0 needs no reference at all
    epochs: int = 1  # optimizer steps a batch; above 1 the ratio leaves 1 and clipping acts
    temperature: float = 1.0  # of sampling *and* of the trained log-probs: they must be the same distribution
    max_tokens: int | None = None  # longest reply of a turn. None: by model size and environment
    importance: str | None = None  # samples of another policy: clip, none, token, sequence (grpo.py). None: sequence if ahead, else by size
    async_rollouts: int = 0  # batches sampled ahead by a second process while this one trains (fast/ahead.py); 0 is strictly on-policy
    max_off_policy_steps: int | None = None  # drop episodes whose sampler was more updates behind; None keeps all
    micro_tokens: int | None = None  # padded tokens a forward pass; changes memory, never the gradient. None: by model size
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, a third slower
    # evaluation: fixed held-out tasks, greedy
    eval_n: int | None = None  # tasks a tier; 32 would give an interval 34 points wide. None: 256, and 128 in swarm
    eval_every: int = 20  # updates
    eval_other_tiers: bool = True  # letters: tiers 3, 5 and 6 as well; without them a short run is quicker
    # evaluation over an API (bridges/api.py): any OpenAI-compatible endpoint instead of a checkpoint; --model is its name there
    api_base: str = ""  # such as https://HOST/v1
    api_key_env: str = "OPENAI_API_KEY"  # the environment variable that holds the key; the key itself is given nowhere else
    api_temperature: float | None = 0.0  # 0 is greedy, as all our evaluations; None leaves it to the endpoint
    api_concurrency: int = 8  # episodes at a time
    api_rpm: float = 0.0  # requests a minute, at most; 0: no limit
    api_timeout: float = 120.0  # seconds for one request, from its start to the answer's last byte
    api_retries: int = 5  # of a request that met 429, 5xx, a lost connection or an answer that is none
    api_minutes: float = 60.0  # for all of it; what is not done by then counts as failed
    # run
    seed: int = 0  # of LoRA's start, SFT's order, the training tasks and the samples; demonstrations and held-out tasks are always the same
    name: str = ""  # of the run folder; empty: env, tier and time
    runs: str = "runs"  # where run folders live
    resume: str = ""  # a run folder to continue
    eval_only: str = ""  # a run folder whose checkpoint to evaluate, and nothing else
    save_every: int = 10  # updates between checkpoints
    wandb: bool = True  # online if you are logged in, otherwise into the run folder, to sync later


BY_ENV = {  # defaults that depend on the environment
    "letters": {"difficulty": 6, "sft_style": "states", "num_tasks": 8, "eval_n": 256, "sft_batch": 8},
    "alphabet": {"difficulty": 0, "sft_style": "states", "num_tasks": 8, "eval_n": 256, "sft_batch": 8},
    "swarm": {"difficulty": Swarm.difficulty, "sft_style": "crowd", "num_tasks": 4, "eval_n": 128, "sft_batch": 2},
    "yours": {"difficulty": 0, "sft_style": "", "num_tasks": 8, "eval_n": 256, "sft_batch": 8},
}
PRESETS = {
    "seed": {
        "think": False, "reward": "partial", "lr": 5e-6, "warmup": 0, "lr_end": 1.0, "updates": 200, "max_tokens": 2048, "eval_n": 32, "eval_every": 10,
        "importance": "clip",
    },
}  # fmt: skip
LEVELS = {"letters": list(range(1, 11)), "swarm": ["easy", "medium", "hard"]}  # what a curriculum climbs …
PROMOTE = {"letters": ("exact", 0.75), "swarm": ("reward", 1.0)}  # … when the mean of the last 5 updates is so high


def by_size(n_parameters: int, env: str) -> dict:
    """Defaults that depend on the model. Large: those of the runs this project grew out of. Small: what was stable on pico_base (results/)."""
    micro_tokens = 8192  # a 4B then takes 63 of an A100's 80 GB, with 16,384 it would take 115 (computed, results/bench/memory.md)
    if n_parameters > 50e6:
        max_tokens = {"letters": 2048, "alphabet": 768, "swarm": 512, "yours": 512}[env]
        return {"lr": 5e-6, "sft_lr": 1e-5, "updates": 200, "max_tokens": max_tokens, "importance": "token", "micro_tokens": micro_tokens,
                **({"swarm_error_penalty": 0.0} if env == "swarm" else {})}  # fmt: skip
    # swarm: at 1e-3 (and an error penalty of 1) 20 updates end at as much reward, but what the base could copy suffers: 3.9% of errors against 0.7%
    lr, updates, max_tokens = {
        "letters": (3e-4, 150, 320),
        "alphabet": (3e-4, 80, 640),
        "swarm": (5e-4, 20, 160),
        "yours": (3e-4, 80, 160),
    }[env]
    # A small model slips in one call of ten while it samples. Without a price for that, a run that posted trades ended at 36% of errors.
    return {"lr": lr, "sft_lr": 1e-4, "updates": updates, "max_tokens": max_tokens, "importance": "clip", "micro_tokens": micro_tokens,
            **({"swarm_error_penalty": 2.0} if env == "swarm" else {})}  # fmt: skip


def kind(env: str) -> str:
    """The environment's name in the tables above: its own, or "yours" for FILE.py:CLASS."""
    return "yours" if ".py:" in env else env


def short(env: str) -> str:
    """Its name in a run's folder and in tables: of FILE.py:CLASS the class alone, because a path is no name."""
    return env.rpartition(":")[2]


@cache  # an environment is made for every episode
def yours(env: str) -> type:
    """The class of `--env FILE.py:CLASS`; the README's "Fork it" has a whole one. ValueError if it cannot be had."""
    file, _, name = env.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"--env {env}: there is no file {file}; give FILE.py:CLASS")
    spec = importlib.util.spec_from_file_location(f"yours_{Path(file).stem}", file)  # not our own metrics.py, if that is its name
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found = getattr(module, name)
        for needed in ("think", "tools", "reset", "step", "score", "expert_reply"):
            getattr(found(), needed)
    except Exception as error:  # it may be any code
        raise ValueError(f'--env {env}: cannot be used ({type(error).__name__}: {error}); see "Fork it" in the README') from None
    return found


def fill(cfg: Config, defaults: dict) -> None:
    """Set what is still None to its default."""
    for name, value in defaults.items():
        if getattr(cfg, name) is None:
            setattr(cfg, name, value)


def make_env(cfg: Config, difficulty):
    """A fresh environment. This, eval_sets and the tables above are the only places that know which environments there are."""
    if kind(cfg.env) == "yours":
        return yours(cfg.env)()
    if cfg.env == "letters":
        return Letters(difficulty, cfg.reward, cfg.think, cfg.sft_style)
    if cfg.env == "alphabet":
        return Alphabet(
            cfg.min_turns, cfg.max_turns, cfg.min_names, cfg.max_names, cfg.similarity_power, cfg.power_per_turn, cfg.think, cfg.sft_style
        )
    return Swarm(
        difficulty, cfg.swarm_version, cfg.think, cfg.sft_style, cfg.swarm_payoff, cfg.swarm_reputation, cfg.swarm_quality,
        cfg.swarm_diversity, cfg.swarm_floor, cfg.swarm_floor_penalty, cfg.swarm_error_penalty or 0.0,
    )  # fmt: skip


def eval_sets(cfg: Config) -> dict[str, tuple]:
    """What is evaluated: {name of a set of tasks: (is it the one trained on?, make_env)}. The same name means the same tasks."""
    if kind(cfg.env) == "yours":
        return {short(cfg.env): (True, partial(make_env, cfg, 0))}
    if cfg.env == "letters":
        tiers = sorted({*(EVAL_TIERS if cfg.eval_other_tiers else ()), cfg.difficulty})
        return {f"tier {tier}": (tier == cfg.difficulty, partial(make_env, cfg, tier)) for tier in tiers}
    if cfg.env == "swarm":
        return {f"{cfg.difficulty} v{cfg.swarm_version}": (True, partial(make_env, cfg, cfg.difficulty))}
    span = lambda low, high: str(low) if low == high else f"{low}-{high}"
    name = f"{span(cfg.min_turns, cfg.max_turns)} turns, {span(cfg.min_names, cfg.max_names)} names, power {cfg.similarity_power:g}"
    return {name + (" a turn" if cfg.power_per_turn else ""): (True, partial(make_env, cfg, 0))}


def check(cfg: Config) -> None:
    """Refuse what cannot work, with a ValueError of one sentence, before anything is loaded. Fills in what depends on the environment."""
    if kind(cfg.env) not in BY_ENV or cfg.env == "yours":
        known = ", ".join(name for name in BY_ENV if name != "yours")
        raise ValueError(f"--env {cfg.env}: there is no such environment; choose {known}, or FILE.py:CLASS for one of yours")
    if cfg.preset and cfg.preset not in PRESETS:
        raise ValueError(f"--preset {cfg.preset}: choose {', '.join(PRESETS)}, or leave it out")
    fill(cfg, BY_ENV[kind(cfg.env)])
    if cfg.env == "letters" and not isinstance(cfg.difficulty, int):
        raise ValueError(f"--difficulty {cfg.difficulty}: letters has tiers 1 to 10; choose one of them")
    make_env(cfg, cfg.difficulty)
    if cfg.curriculum and cfg.env not in LEVELS:
        raise ValueError(f"--curriculum: {cfg.env} has no tiers to climb; leave it out")
    if cfg.loss not in CLIP:
        raise ValueError(f"--loss {cfg.loss}: choose one of {', '.join(CLIP)}")
    if cfg.importance not in (None, *IMPORTANCE):
        raise ValueError(f"--importance {cfg.importance}: choose one of {', '.join(IMPORTANCE)}")
    if cfg.max_off_policy_steps is not None and cfg.max_off_policy_steps < cfg.async_rollouts:
        raise ValueError(f"--max-off-policy-steps {cfg.max_off_policy_steps}: with --async-rollouts {cfg.async_rollouts} every batch is that old, "
                         "and all would be dropped; allow as many")  # fmt: skip
    if cfg.engine not in ("auto", "torch", "vllm"):
        raise ValueError(f"--engine {cfg.engine}: choose auto, torch or vllm")
    if cfg.engine == "vllm" and parallel.world() > 1 and not cfg.async_rollouts:
        raise ValueError("--engine vllm in several processes needs one of its own beside each of them; add --async-rollouts 1")
    if cfg.baseline not in ("group", "batch", "none"):
        raise ValueError(f"--baseline {cfg.baseline}: choose group, batch or none")
    if cfg.k < 2 and cfg.baseline == "group":
        raise ValueError("--k 1: a group of one has no baseline, every advantage would be 0; use --k 2 or more, or --baseline batch")
    for name in ("num_tasks", "k", "epochs", "eval_n", "eval_every", "save_every", "sft_examples", "sft_batch"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be at least 1")
    seeds = (SFT_SEEDS - TRAIN_SEEDS) // (MOST_UPDATES * cfg.num_tasks)
    if not 0 <= cfg.seed < seeds:
        raise ValueError(
            f"--seed {cfg.seed}: must be 0 to {seeds - 1} (with --num-tasks {cfg.num_tasks}), or it would train on the tasks of SFT or of the evaluation"
        )
    if max(cfg.updates or 0, cfg.max_updates * cfg.until_converged) > MOST_UPDATES:
        raise ValueError(f"--updates {cfg.updates}: must be at most {MOST_UPDATES}, or the tasks of --seed {cfg.seed + 1} would begin")
    if cfg.until_converged and cfg.max_updates < (cfg.updates or 0):
        raise ValueError(f"--max-updates {cfg.max_updates}: must be at least --updates {cfg.updates}")
    from_zero = ("updates", "sft_steps", "lora_rank", "kl", "lr_end", "async_rollouts")
    for name in ("temperature", "lr", "sft_lr", "max_tokens", "micro_tokens", "lora_alpha", *from_zero):
        value, least = getattr(cfg, name), 0 if name in from_zero else 1e-12
        if value is not None and not value >= least:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be {'positive' if least else 'at least 0'}")


if __name__ == "__main__":
    for name in BY_ENV:
        shown = BY_ENV[name] | by_size(1e6, name)
        print(f"--env {name}:", ", ".join(f"{key} {value}" for key, value in shown.items()))
    try:
        check(Config(k=1))
    except ValueError as error:
        print("refused, for example:", error)
