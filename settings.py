"""Every flag with its default and its reason, what is refused, and the command line.

    python train.py --help        # the same, from the dataclass below: it *is* the command line

Each default is declared once. If it depends on the environment or on the model's size, it is None
in the dataclass and comes from by_env or by_size. Only the environment that is chosen is imported.

Run me: `python settings.py` prints what each environment gets.
"""

import importlib.util
import math
import re
import sys
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Annotated, get_args, get_type_hints

import tyro

# A task is drawn from a seed. These ranges never meet (check sees to it); pretraining draws from
# 3e9 on (lab/base/corpus.py), and held-out tasks from evaluate.HELD_OUT_SEEDS on.
TRAIN_SEEDS = 0
SFT_SEEDS = 1_000_000_000
DEV_SEEDS = 2_000_000_000  # development: evaluations during a run, and every choice
MOST_UPDATES = 100_000  # of a run: after so many the training tasks of the next --seed begin
MODELS = Path(__file__).resolve().parent / "models"  # the embedded ones
MOST_THREADS = 1024  # more is a slip of the finger
EVAL_TIERS = (3, 5, 6)  # of letters, evaluated in addition to the tier that is trained


@dataclass
class Config:
    """RL post-training of a chat model: SFT warm-up on a scripted expert, then GRPO."""

    preset: str = ""  # seed, swarm-published, alphabet-published: the settings of a run (PRESETS)
    # make a mistake on purpose and see what it looks like (learn/FAILURES.md)
    break_: Annotated[str, tyro.conf.arg(name="break")] = ""
    # task

    # letters, alphabet, swarm; a class of yours as FILE.py:CLASS; known tasks (docs/tasks.md) as
    # jsonl:FILE or reasoning_gym:NAME
    env: str = "letters"
    think: bool = True  # may the policy think before it answers?
    # letters: tier 1 to 10 (6: 40-80 random letters, 8-12 asked); swarm: easy, medium, hard;
    # yours: one of its levels, by default the last
    difficulty: int | str | None = None
    # start at the easiest level and go up to --difficulty; the next level begins when the last five
    # updates were good enough (letters: 75% exact; swarm: a reward of 1)
    curriculum: bool = False
    reward: str = "binary"  # letters: binary pays exact answers only; partial every right letter
    # a setting of the environment, NAME=VALUE, as often as you like: a field of its dataclass
    # (`--env alphabet --set max_turns=2`, `--env swarm --set version=0.1`, or one of your class)
    set: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    # policy

    # folder or hub id of a causal LM; auto: the largest Qwen3 for which the card has room, and what
    # makes it fit (fast/plan.py), or an embedded model without a card
    model: str = "auto"
    lora_rank: int = 32  # 0 trains all weights
    lora_alpha: int = 64  # the update is scaled by alpha / rank
    # auto: cuda if there is one; a Mac's GPU (mps) for a model that is not small; else cpu
    device: str = "auto"
    engine: str = "auto"  # what samples: torch or vllm. auto: vllm if it and a GPU are there
    plain: bool = False  # sample and compute log-probs the plain way (policy.py): to read, to fork
    vllm_memory: float = 0.3  # share of the card that vLLM takes, and lends to the trainer
    vllm_seeds: bool = True  # a seed per request: a sample depends on no other; may be slow on CUDA
    vllm_sleep: bool = True  # sleep while the trainer works: lends it memory, costs seconds
    threads: int = 0  # CPU threads; 0 leaves torch's choice
    # SFT
    sft_style: str | None = None  # whom to imitate; the default shows the format, not the algorithm
    sft_examples: int = 100  # how many demonstrations: they are scarce, rewards are not
    sft_steps: int = 50  # optimizer steps; 0: no SFT
    sft_batch: int | None = None  # by environment
    sft_lr: float | None = None  # by model size
    # GRPO
    updates: int | None = None  # batches that GRPO samples and trains on; by size and environment
    # after --updates, go on until the training reward has settled (metrics.trend), at most to
    # --max-updates; the learning rate stays at its end
    until_converged: bool = False
    max_updates: int = 400  # the most updates of a run with --until-converged
    num_tasks: int | None = None  # groups per update; by environment
    k: int | None = None  # samples per group: more find a rare good answer more often; by size
    loss: str = "grpo"  # reinforce, grpo, dr_grpo, dapo, gspo or cispo: side by side in grpo.py
    baseline: str = "group"  # what a reward is compared with: group, batch or none
    normalize: bool = True  # divide advantages by the group's deviation (dr_grpo never does)
    lr: float | None = None  # by model size and environment
    warmup: int = 5  # updates over which the rate rises; Adam's first steps are its largest
    lr_end: float = 0.1  # it then falls linearly to this share of lr; 1 keeps it constant
    kl: float = 0.0  # weight of the KL to the policy after SFT; 0 needs no reference at all
    epochs: int = 1  # optimizer steps per batch; above 1 the ratio leaves 1 and clipping acts
    temperature: float = 1.0  # of sampling *and* of the trained log-probs: the same distribution
    max_tokens: int | None = None  # longest reply of a turn; by model size and environment
    importance: str | None = None  # clip, none, token, sequence (fast/off_policy.py); by size
    async_rollouts: int = 0  # batches sampled ahead by a second process; 0 is strictly on-policy
    micro_tokens: int | None = None  # padded tokens per forward pass: memory, never the gradient
    gradient_checkpointing: bool = False  # less memory, a third slower
    # evaluation: fixed development tasks, which nothing is trained on, greedy
    eval_n: int | None = None  # tasks per set; 32 would give an interval 33 points wide
    eval_every: int = 20  # updates from one evaluation to the next
    eval_other_tiers: bool = True  # letters: tiers 3, 5 and 6 as well; yours: its other levels
    # evaluation over an API (bridges/api.py) instead of a checkpoint; --model is its name there
    api_base: str = ""  # of an OpenAI-compatible endpoint: https://HOST/v1
    api_concurrency: int = 8  # episodes at a time; the key is in OPENAI_API_KEY
    # run
    seed: int = 0  # of LoRA's start, SFT's order, the training tasks and the samples
    name: str = ""  # of the run folder; empty: env, tier and time
    runs: str = "runs"  # where run folders live
    resume: str = ""  # a run folder to continue
    eval_only: str = ""  # a run folder whose checkpoint to evaluate, and nothing else
    held_out: bool = False  # with --eval-only: tasks that no run has looked at, for a final table
    save_every: int = 10  # updates between checkpoints
    wandb: bool = True  # online if you are logged in, else into the run folder, to sync later


SMALL_MODEL = 50e6  # parameters; below it pico_base's defaults, above it those of published recipes
BY_ENV = {  # defaults that depend on the environment
    "letters": {"difficulty": 6, "sft_style": "states"},
    "alphabet": {"difficulty": 0, "sft_style": "states"},
    "swarm": {"difficulty": "medium", "sft_style": "expert"},
    "yours": {"sft_style": ""},
    "known": {"difficulty": 0, "sft_style": ""},
}
BATCHES = {"num_tasks": 8, "sft_batch": 8, "eval_n": 256}
LONG_BATCHES = {"num_tasks": 4, "sft_batch": 2, "eval_n": 128}  # an episode of swarm has 25 replies
# Small models: (lr, updates, max_tokens), what was stable on pico_base (results/).
SMALL = {
    "letters": (3e-4, 150, 320),
    "alphabet": (3e-4, 80, 640),
    "swarm": (5e-4, 150, 160),
    "yours": (3e-4, 80, 160),
    "known": (3e-4, 80, 160),
}
# Large models: what published recipes for models of these sizes take. No card has run it here.
# prime-rl: github.com/PrimeIntellect-ai/prime-rl at 559b447, examples/basic/…; TRL: its page "LoRA
# Without Regret" (huggingface.co/docs/trl/lora_without_regret); Tinker: tinker-cookbook.
RATES = (  # (up to so many parameters, lr of LoRA with alpha 64)
    # ten times the 3e-6 at which prime-rl trains all weights of a 0.6B (reverse-text); TRL trains
    # that model's LoRA at 5e-5, as prime-rl's own test does, both with alpha 32
    (1e9, 3e-5),
    # prime-rl's LoRA 32/64 on Qwen3-4B (alphabet-sort, wiki-search); TRL's on a 3B; Tinker's is
    # 4e-5 on an 8B (recipes/rl_loop.py), with alpha 32 and 16 times our batch
    (float("inf"), 1e-5),
)
SFT_RATE = 1e-4  # of LoRA: ten times prime-rl's for all weights (wordle, 1.7B); TRL's page has 2e-4
# LoRA wants ten times the rate of all weights, whatever its rank: found for SFT and RL by Schulman
# et al. 2025 (thinkingmachines.ai/blog/lora), and so in TRL's pair of runs, 1e-5 and 1e-6.
ALL_WEIGHTS = 0.1
# prime-rl's groups in all these examples, and Tinker's; 8 tasks of 16 are prime-rl's default batch
LARGE_K = 16
# prime-rl's max_steps in alphabet-sort, wiki-search and wordle. Warm-up and decay are as for small
# models: prime-rl's linear schedule has 10 steps of warm-up, Tinker's loop none
LARGE_UPDATES = 200
LONGEST = {  # tokens of a reply
    "letters": 2048,  # to spell 80 letters with a tally; prime-rl's seq_len, TRL's run had 4096
    "alphabet": 768,  # prime-rl's for this very task
    "swarm": 512,  # prime-rl's for a turn with tools (wiki-search); 25 times 2048 would not fit
    "yours": 512,  # TRL's default
    "known": 1024,  # room for a derivation; our choice
}
# Published runs of others, as far as they tell, with a model that fits one A100 instead of a 30B:
# no SFT, prime-rl's constant rate. What was left open is ours: the loss, the evaluations.
PUBLISHED = {
    "model": "Qwen/Qwen3-4B-Instruct-2507", "lora_rank": 32, "lora_alpha": 64, "lr": 1e-5,
    "warmup": 0, "lr_end": 1.0, "sft_steps": 0, "temperature": 1.0,
}  # fmt: skip
PRESETS = {
    "seed": {  # picoRL's run: all that it relied on
        "think": False, "reward": "partial", "lr": 5e-6, "warmup": 0, "lr_end": 1.0, "updates": 200,
        "max_tokens": 2048, "eval_n": 32, "eval_every": 10, "importance": "clip", "k": 8,
        "sft_lr": 1e-5,
    },
    # SWARM v0.2 on Qwen3-30B-A3B-Thinking: batches of 64, 4 rollouts per example. Rank and rate
    # were not told, and are the alphabet's. A conversation may reach 55,900 tokens (25 replies of
    # 2048, and what is said between): a 4B needs gradient checkpointing to be trained on it.
    "swarm-published": PUBLISHED | {
        "env": "swarm", "difficulty": "medium", "think": True,
        "set": ["version=0.2", "payoff_scale=published", "error_penalty=0.0"],
        "num_tasks": 16, "k": 4, "updates": 200, "max_tokens": 2048,
        "gradient_checkpointing": True, "vllm_memory": 0.7,
    },
    # prime-rl's alphabet-sort on this very model, with the rollouts of the published run of the 30B
    # (its own file has 200 updates of 16 x 16). Tasks as by default.
    "alphabet-published": PUBLISHED | {
        "env": "alphabet", "think": False, "num_tasks": 32, "k": 8, "updates": 100,
        "max_tokens": 768,
    },
}  # fmt: skip
# A flag of every environment and the field of its class that it sets; the others have --set.
OF_ENVIRONMENTS = {
    "difficulty": "difficulty",
    "reward": "reward",
    "think": "think",
    "sft_style": "style",
}
# A small model slips in one call of twelve while it samples. Without a price a run that posted
# trades ended at 36% of errors; from 0.67 on, trying to accept a fair offer does not pay for a
# policy that slips as often as the base does (measured at commit 22b9273).
SMALL_ERROR_PENALTY = 0.5
LEVELS = {"letters": list(range(1, 11)), "swarm": ["easy", "medium", "hard"]}  # of a curriculum
PROMOTE = {"letters": ("exact", 0.75), "swarm": ("reward", 1.0)}  # go up if the mean of this …
PROMOTE_AFTER = 5  # … over so many updates at this level is so high


def by_env(env: str) -> dict:
    """Defaults that depend on the environment: from the tables above."""
    return BY_ENV[kind(env)] | (LONG_BATCHES if env == "swarm" else BATCHES)


def by_size(n_parameters: int, env: str, lora_rank: int = Config.lora_rank) -> dict:
    """Defaults that depend on the model. Large: published recipes (RATES …). Small: see SMALL."""
    small = n_parameters <= SMALL_MODEL
    # 8192: a 4B then takes 63 of an A100's 80 GB, with 16,384 it would take 115 (computed,
    # results/bench/memory.md).
    defaults = {"micro_tokens": 8192, "importance": "clip" if small else "token"}
    if small:
        lr, updates, max_tokens = SMALL[env]
        defaults |= {"lr": lr, "updates": updates, "max_tokens": max_tokens}
        defaults |= {"k": 8, "sft_lr": 1e-4}
    else:
        lr = next(rate for most, rate in RATES if n_parameters <= most)
        share = 1 if lora_rank else ALL_WEIGHTS
        defaults |= {"lr": share * lr, "sft_lr": share * SFT_RATE, "k": LARGE_K}
        defaults |= {"updates": LARGE_UPDATES, "max_tokens": LONGEST[env]}
    return defaults


def asked(cfg: Config, typed: set[str] = frozenset()) -> tuple[str, str, str, dict]:
    """The arguments of fast.plan.choose_model: model, environment, device, settings to keep.

    That is {flag: value} of what was typed (also if it is the default), or set by a preset or by
    whoever calls train(). "auto" and None leave the choice.
    """
    values, defaults = vars(cfg), vars(Config())
    stays = {name for name in values if name in typed or values[name] != defaults[name]}
    fixed = {name: values[name] for name in sorted(stays) if values[name] not in ("auto", None)}
    return cfg.model, cfg.env, cfg.device, fixed


def complete(
    cfg: Config, n_parameters: int, why: str, path: str = "", fits: dict | None = None
) -> None:
    """Fill in what depends on the model, refuse what cannot work with it, say what was chosen.

    path: of the model that --model auto chose; the run keeps it, or on another machine --resume
    would go on with another model. An embedded one is kept by its name: its path differs there.
    fits: settings with which that model fits the card; the run keeps them, too.
    """
    for name, value in (fits or {}).items():
        setattr(cfg, name, value)
    if path and cfg.model == "auto":
        cfg.model = Path(path).name if Path(path).parent == MODELS else path
    if cfg.async_rollouts:
        fill(cfg, {"importance": "sequence"})  # learnt fastest on old samples (results/offpolicy)
    fill(cfg, by_size(n_parameters, kind(cfg.env), cfg.lora_rank))
    if cfg.env == "swarm" and n_parameters <= SMALL_MODEL and "error_penalty" not in given(cfg):
        cfg.set = [*cfg.set, f"error_penalty={SMALL_ERROR_PENALTY}"]
    check(cfg)
    chosen = f"lr {cfg.lr:g}, sft_lr {cfg.sft_lr:g}, updates {cfg.updates}"
    size = f"{n_parameters / 1e6:.1f}M parameters"
    print(f"{why}\nchosen for {size}: {chosen}, max_tokens {cfg.max_tokens}")


def healthy_loss(cfg: Config) -> str:
    """A line to print: loss and ratio of a healthy run, and that the reward is what to watch."""
    if cfg.epochs > 1 or cfg.async_rollouts:
        return "the ratio leaves 1.000 here: watch the reward, clip_fraction and approx_kl"
    if cfg.loss in ("grpo", "gspo") and cfg.baseline != "none" and not cfg.kl:
        return "a loss near 0 and a ratio of 1.000 are healthy on-policy; watch the reward"
    # dr_grpo and dapo weigh by length; the value of a log-prob is nowhere near 0, nor is a KL term
    return "a ratio of 1.000 is healthy on-policy, the loss has no such value; watch the reward"


def kind(env: str) -> str:
    """Its name in the tables above: its own, "known", or "yours" for FILE.py:CLASS."""
    if env.startswith(("jsonl:", "reasoning_gym:")):
        return "known"
    return "yours" if ".py:" in env else env


def short(env: str) -> str:
    """Its name in run folders and tables: of FILE.py:CLASS the class, of known tasks their name."""
    if kind(env) == "known":
        return Path(env.partition(":")[2].partition(",")[0]).stem
    return env.rpartition(":")[2]


def fill(cfg: Config, defaults: dict) -> None:
    """Set what is still None to its default."""
    for name, value in defaults.items():
        if getattr(cfg, name) is None:
            setattr(cfg, name, value)


def learning_rate(cfg: Config, update: int) -> float:
    """The learning rate of an update: up over cfg.warmup, then linearly down to lr_end · lr.

    lr |   /---___
       |  /       ---___        Adam's first steps are its largest, so they are taken slowly;
       | /              ---     the last ones let the policy settle
     0 +--------------------
       0 warmup       updates
    """
    rise = (update + 1) / max(1, cfg.warmup)
    fall = 1 - (1 - cfg.lr_end) * min(1, update / max(1, cfg.updates))
    return cfg.lr * min(rise, fall)


# --------------------------------------------------------------------------- tasks and environments


def task_seeds(cfg: Config, update: int) -> list[int]:
    """The tasks of an update: never the same twice, and others for another --seed."""
    first = TRAIN_SEEDS + (cfg.seed * MOST_UPDATES + update) * cfg.num_tasks
    return [first + i for i in range(cfg.num_tasks)]


def sft_seeds(cfg: Config) -> list[int]:
    """The tasks of the demonstrations: the same for every --seed."""
    return seeds_from(cfg, SFT_SEEDS, cfg.sft_examples)


def dev_seeds(cfg: Config) -> list[int]:
    """The tasks of every evaluation during a run: the same for all runs, and never trained on."""
    return seeds_from(cfg, DEV_SEEDS, cfg.eval_n)


def seeds_from(cfg: Config, first: int, n: int) -> list[int]:
    """n seeds, or as many as there are different tasks: a file of rows has only so many."""
    most = make_env(cfg, 0).how_many(first) if kind(cfg.env) == "known" else n
    if most is None:  # a generator
        from bridges.known import different

        return different(cfg.env, first, n)
    return [first + i for i in range(min(n, most))]


@cache  # an environment is made for every episode
def yours(env: str) -> type:
    """The class of `--env FILE.py:CLASS` (docs/fork.md has one). ValueError if it cannot be had."""
    file, _, name = env.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"--env {env}: there is no file {file}; give FILE.py:CLASS")
    module_name = f"yours_{Path(file).stem}"  # not our own metrics.py, if that is its name
    spec = importlib.util.spec_from_file_location(module_name, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found = getattr(module, name)
        for needed in ("think", "tools", "reset", "step", "score", "expert_reply"):
            getattr(found(), needed)
    except Exception as error:  # it may be any code
        raise ValueError(
            f"--env {env}: cannot be used ({type(error).__name__}: {error}); see docs/fork.md"
        ) from None
    return found


def levels_of(env: str) -> list:
    """What a curriculum climbs, the easiest first. A class of yours may have `levels`, too."""
    return getattr(yours(env), "levels", []) if kind(env) == "yours" else LEVELS.get(env, [])


def promote_of(env: str) -> tuple[str, float]:
    """Go up if the mean of this measure is so high. A class of yours may have `promote`."""
    usual = PROMOTE.get(env, ("exact", 0.75))
    return getattr(yours(env), "promote", usual) if kind(env) == "yours" else usual


def class_of(env: str) -> type | None:
    """The class of an environment; None for known tasks, which have no settings."""
    if kind(env) == "yours":
        return yours(env)
    if env == "letters":
        from env_letters import Letters

        return Letters
    if env == "alphabet":
        from env_alphabet import Alphabet

        return Alphabet
    if env == "swarm":
        from env_swarm import Swarm

        return Swarm
    return None


def settable(env: str) -> dict[str, type]:
    """{setting: its type} of what --set can give: the fields of the environment's dataclass."""
    cls = class_of(env)
    if not is_dataclass(cls):
        return {}
    hints, flags = get_type_hints(cls), OF_ENVIRONMENTS.values()
    ours = kind(env) != "yours"
    return {f.name: hints[f.name] for f in fields(cls) if not (ours and f.name in flags)}


def given(cfg: Config) -> dict:
    """{setting: value} of --set NAME=VALUE …; the last one counts. ValueError by one sentence."""
    types, values = settable(cfg.env), {}
    for word in cfg.set:
        name, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"--set {word}: give NAME=VALUE")
        if name not in types:
            cure = f"choose {', '.join(types)}" if types else "leave it out"
            flags = {field: flag for flag, field in OF_ENVIRONMENTS.items()}
            if name in flags and kind(cfg.env) != "yours":
                cure = f"it is the flag --{flags[name].replace('_', '-')}"
            raise ValueError(f"--set {word}: {short(cfg.env)} has no such setting; {cure}")
        values[name] = read_value(types[name], text, word)
    return values


def read_value(kind_of: type, text: str, word: str):
    """'3' as an int, 'false' as a bool, 'none' as None …: as the field's type says."""
    kinds = get_args(kind_of) or (kind_of,)
    if NoneType in kinds and text.lower() == "none":
        return None
    for one in kinds:
        if one is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if one in (int, float, str):
            try:
                return one(text)
            except ValueError:
                continue
    names = " or ".join("none" if one is NoneType else one.__name__ for one in kinds)
    raise ValueError(f"--set {word}: the value has to be of type {names}")


def make_env(cfg: Config, difficulty):
    """A fresh environment: its class with the flags that it has fields for, and with --set."""
    if kind(cfg.env) == "known":
        from bridges.known import open_known

        return open_known(cfg.env, cfg.think)
    cls = class_of(cfg.env)
    if kind(cfg.env) == "yours":
        env = cls(**given(cfg))
        if levels_of(cfg.env):
            env.level = difficulty
        return env
    values = {name: getattr(cfg, flag) for flag, name in OF_ENVIRONMENTS.items()}
    values |= {"difficulty": difficulty}
    own = {f.name for f in fields(cls)}
    return cls(**{name: x for name, x in values.items() if name in own}, **given(cfg))


def sources(env: str) -> list[Path]:
    """The files that decide what its tasks are and what they pay."""
    here = Path(__file__).resolve().parent
    letters = here / "env_letters.py"  # it also splits thoughts from answers, for all of ours
    if kind(env) == "yours":
        return [Path(env.rpartition(":")[0])]
    if kind(env) == "known":
        from bridges.known import open_source

        own = [here / "bridges" / f"{name}.py" for name in ("known", "task", "rows", "gym")]
        return list(dict.fromkeys([letters, *own, *open_source(env).files]))
    rules = sorted((here / "swarm").glob("*.py")) if env == "swarm" else []
    return [*dict.fromkeys([letters, here / f"env_{env}.py"]), *rules]


def eval_sets(cfg: Config) -> dict[str, tuple]:
    """What is evaluated: {name of a set of tasks: (is it the one trained on?, make_env)}.

    The same name means the same tasks.
    """
    name = short(cfg.env)
    if kind(cfg.env) == "yours" and not levels_of(cfg.env):
        return {name: (True, partial(make_env, cfg, 0))}
    if kind(cfg.env) == "known":
        return {make_env(cfg, 0).source.name: (True, partial(make_env, cfg, 0))}
    if cfg.env == "letters":
        tiers = sorted({*(EVAL_TIERS if cfg.eval_other_tiers else ()), cfg.difficulty})
        sets = {f"tier {tier}": tier for tier in tiers}
    elif kind(cfg.env) == "yours":
        others = levels_of(cfg.env) if cfg.eval_other_tiers else [cfg.difficulty]
        sets = {f"{name}, level {level}": level for level in others}
    elif cfg.env == "swarm":
        sets = {f"{cfg.difficulty} v{make_env(cfg, cfg.difficulty).version}": cfg.difficulty}
    else:
        env = make_env(cfg, 0)
        span = lambda low, high: str(low) if low == high else f"{low}-{high}"
        turns, names = span(env.min_turns, env.max_turns), span(env.min_names, env.max_names)
        name = f"{turns} turns, {names} names, power {env.similarity_power:g}"
        sets = {name + (" a turn" if env.power_per_turn else ""): 0}
    trained = 0 if cfg.env == "alphabet" else cfg.difficulty
    return {name: (level == trained, partial(make_env, cfg, level)) for name, level in sets.items()}


# ----------------------------------------------------------------------------------------- refusals


def check(cfg: Config) -> None:
    """Refuse what cannot work, with a ValueError of one sentence, before anything is loaded.

    Fills in what depends on the environment, and says every setting of --set once.
    """
    if cfg.env.endswith(".py") and Path(cfg.env).is_file():
        text = Path(cfg.env).read_text(encoding="utf-8", errors="replace")
        classes = ", ".join(re.findall(r"^class (\w+)", text, re.M))
        found = f"its classes are {classes}" if classes else "there is no class in it"
        refuse(cfg, "env", f"give FILE.py:CLASS; {found}")
    if kind(cfg.env) not in BY_ENV or cfg.env in ("yours", "known"):
        ours = ", ".join(name for name in BY_ENV if name not in ("yours", "known"))
        others = "jsonl:FILE, reasoning_gym:NAME, or FILE.py:CLASS"
        refuse(cfg, "env", f"there is no such environment; choose {ours}, {others}")
    stale = cfg.epochs > 1 or (cfg.async_rollouts and cfg.importance == "clip")
    if cfg.loss == "reinforce" and stale:
        why = "it has no importance ratio, so nothing would correct for samples of an older policy"
        refuse(cfg, "loss", f"{why}; take another loss, or --epochs 1 and --importance sequence")
    if cfg.break_ and cfg.env != "letters":
        refuse(cfg, "env", "--break makes its mistakes in letters; leave one of the two out")
    if cfg.preset and cfg.preset not in PRESETS:
        refuse(cfg, "preset", f"choose {', '.join(PRESETS)}, or leave it out")
    fill(cfg, by_env(cfg.env))
    if cfg.env == "letters" and not isinstance(cfg.difficulty, int):
        refuse(cfg, "difficulty", "letters has tiers 1 to 10; choose one of them")
    if kind(cfg.env) == "yours":
        check_level(cfg)
    check_tasks(cfg, make_env(cfg, cfg.difficulty))
    cfg.set = [f"{name}={value}" for name, value in sorted(given(cfg).items())]
    if cfg.curriculum and len(levels_of(cfg.env)) < 2:
        cures = {"yours": "give it two levels or more (docs/fork.md)"}
        cure = cures.get(kind(cfg.env), "leave it out")
        raise ValueError(f"--curriculum: {cfg.env} has no levels to climb; {cure}")
    choices = {"engine": ("auto", "torch", "vllm"), "baseline": ("group", "batch", "none")}
    for name, some in choices.items():
        if getattr(cfg, name) not in some:
            refuse(cfg, name, f"choose {', '.join(some)}")
    if cfg.break_:
        from learn import failures

        own = failures.settings(cfg.break_).get("async_rollouts", 0)
        if cfg.plain or cfg.engine == "vllm" or cfg.async_rollouts != own:
            why = "the mistake is in this process, and in what --plain leaves out"
            cure = "leave out --plain, --engine vllm and --async-rollouts"
            raise ValueError(f"--break {cfg.break_}: {why}; {cure}")
    if cfg.held_out:  # evaluate.py takes it out of the Config of --eval-only
        raise ValueError("--held-out: a run looks at development tasks; use it with --eval-only")
    if cfg.plain and cfg.engine == "vllm":
        raise ValueError("--plain has a sampler of its own; leave --engine vllm out")
    check_numbers(cfg)
    check_seeds(cfg)


def check_numbers(cfg: Config) -> None:
    """Refuse numbers that are too small, or that contradict each other."""
    if cfg.k is not None and cfg.k < 2 and cfg.baseline == "group":
        why = "a group of one has no baseline, every advantage would be 0"
        refuse(cfg, "k", f"must be at least 2, {why}; or use --baseline batch")
    if cfg.baseline == "batch" and (cfg.k or 0) * (cfg.num_tasks or 0) == 1:
        refuse(cfg, "k", "a batch of one episode has no baseline; use --num-tasks 2 or more")
    counts = "num_tasks k epochs eval_n eval_every save_every sft_examples sft_batch"
    from_zero = "updates sft_steps warmup lora_rank kl lr_end async_rollouts threads"
    positive = "temperature lr sft_lr max_tokens micro_tokens lora_alpha"
    for names, enough, must in (
        (counts, lambda x: x >= 1, "must be at least 1"),
        (from_zero, lambda x: x >= 0, "must be at least 0"),
        (positive, lambda x: 0 < x < math.inf, "must be positive, not inf"),
    ):
        for name in names.split():
            value = getattr(cfg, name)
            if value is not None and not enough(value):
                refuse(cfg, name, must)
    if cfg.threads > MOST_THREADS:
        refuse(cfg, "threads", f"must be at most {MOST_THREADS}")
    if not 0 < cfg.vllm_memory < 1:
        refuse(cfg, "vllm_memory", "must be a share of the card, between 0 and 1")
    if cfg.until_converged and cfg.updates == 0:
        refuse(cfg, "updates", "--until-converged watches the rewards of updates; use 1 or more")
    if cfg.until_converged and cfg.max_updates < (cfg.updates or 0):
        refuse(cfg, "max_updates", f"must be at least --updates {cfg.updates}")


def check_level(cfg: Config) -> None:
    """A class of yours is trained at its last level, or at the one that was asked for."""
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


def check_tasks(cfg: Config, env) -> None:
    """Refuse more tasks than an environment has: some would come twice, and count as two."""
    most = getattr(env, "most_tasks", None)  # None: every seed has another task
    for name in ("eval_n", "sft_examples"):
        if most is not None and getattr(cfg, name) > most:
            refuse(cfg, name, f"there are {most} different tasks; use as many or fewer")


def check_seeds(cfg: Config) -> None:
    """Refuse a seed or a length whose training tasks would meet other tasks."""
    seeds = (SFT_SEEDS - TRAIN_SEEDS) // (MOST_UPDATES * cfg.num_tasks)
    if seeds < 1:
        refuse(cfg, "num_tasks", f"there are not so many tasks for {MOST_UPDATES} updates")
    if not 0 <= cfg.seed < seeds:
        why = "or it would train on the tasks of SFT or of the evaluation"
        refuse(cfg, "seed", f"must be 0 to {seeds - 1} (with --num-tasks {cfg.num_tasks}), {why}")
    if max(cfg.updates or 0, cfg.max_updates * cfg.until_converged) > MOST_UPDATES:
        why = f"or the tasks of --seed {cfg.seed + 1} would begin"
        refuse(cfg, "updates", f"must be at most {MOST_UPDATES}, {why}")


def refuse(cfg: Config, name: str, why: str) -> None:
    raise ValueError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: {why}")


# --------------------------------------------------------------------------------- the command line


ONLY_WITH = {"max_updates": "until_converged", "lora_alpha": "lora_rank"}  # and api_… with api_base


def command_line(words: list[str]) -> tuple[Config, set[str]]:
    """read_flags; flags that this environment does not read are named."""
    cfg, typed = read_flags(words)
    if not (cfg.resume or cfg.eval_only):
        tell_unread(cfg.env, typed)
        for name in sorted(typed):
            other = "api_base" if name.startswith("api_") else ONLY_WITH.get(name, name)
            if other != name and not getattr(cfg, other):
                flag, without = (x.replace("_", "-") for x in (name, other))
                print(f"--{flag} changes nothing without --{without}")
    return cfg, typed


def read_flags(words: list[str]) -> tuple[Config, set[str]]:
    """The Config that these words ask for, and the names of the flags that were typed."""
    words = without_bare_eval_only(words)
    cfg = tyro.cli(Config, args=words)
    if cfg.preset in PRESETS or cfg.break_:  # again, with these as defaults: a typed flag wins
        defaults = PRESETS.get(cfg.preset, {})
        if cfg.break_:
            from learn import failures

            defaults = defaults | failures.settings(cfg.break_)
        typed_settings = cfg.set
        cfg = tyro.cli(Config, args=words, default=replace(Config(), **defaults))
        if cfg.env != defaults.get("env", cfg.env):
            cfg.set = typed_settings  # those of the preset are of another environment
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    flags = {flag.removeprefix("--").replace("-", "_") for flag in flags}
    return cfg, {f.name for f in fields(Config) if {f.name.rstrip("_"), f"no_{f.name}"} & flags}


def reads(env: str) -> set[str]:
    """Which of the flags that only some environments read this one does."""
    if kind(env) == "yours":
        return {"difficulty", "eval_other_tiers"}
    if kind(env) == "known":
        return {"think"}
    own = {f.name for f in fields(class_of(env))}
    found = {flag for flag, name in OF_ENVIRONMENTS.items() if name in own}
    return found | {"eval_other_tiers"} if env == "letters" else found


def tell_unread(env: str, typed: set[str]) -> None:
    """Name the flags that were typed and that this environment does not read."""
    if kind(env) not in BY_ENV:
        return  # check refuses it
    useless = sorted(typed & {*OF_ENVIRONMENTS, "eval_other_tiers"} - reads(env))
    if useless:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in useless)
        change = "they change" if len(useless) > 1 else "it changes"
        print(f"--env {env} does not read {names}; {change} nothing")


def without_bare_eval_only(words: list[str]) -> list[str]:
    """With --api-base a bare --eval-only is dropped: there is no run folder to name."""
    is_last = lambda i: i + 1 == len(words) or words[i + 1].startswith("--")
    bare = lambda i: words[i] == "--eval-only" and is_last(i)
    over_api = any(word.startswith(("--api-base", "--api_base")) for word in words)
    return [word for i, word in enumerate(words) if not (over_api and bare(i))]


if __name__ == "__main__":
    for name in BY_ENV:
        shown = by_env(name) | by_size(1e6, name)
        print(f"--env {name}:", ", ".join(f"{key} {value}" for key, value in shown.items()))
    try:
        check(Config(k=1))
    except ValueError as error:
        print("refused, for example:", error)
