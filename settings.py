"""Every flag with its default and its reason; then tasks and environments.

    python train.py --help      # the dataclass below *is* the command line

Each default is declared once. If it depends on the environment or on the model's size,
it is None in the dataclass and comes from the tables that follow ("by model size" in a
comment means this). PRESETS are the settings of whole runs that others published. Only
the chosen environment is imported.
"""

import importlib.util
import sys
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Annotated, get_args, get_type_hints

import tyro

# Every task is drawn from a seed. The ranges that start here never overlap. Pretraining
# uses seeds from 3e9 on, and held-out tasks those from evaluate.HELD_OUT_SEEDS on.
TRAIN_SEEDS = 0
SFT_SEEDS = 1_000_000_000
DEV_SEEDS = 2_000_000_000  # development: evaluations during a run, and every choice
MOST_UPDATES = 100_000  # of a run: after them the tasks of the next --seed begin
MODELS = Path(__file__).resolve().parent / "models"  # the embedded models


@dataclass
class Config:
    """RL post-training of a chat model: SFT warm-up on a scripted expert, then GRPO."""

    # the settings of a published run, from PRESETS: seed, swarm-published or
    # alphabet-published
    preset: str = ""
    # make a mistake on purpose and see what it looks like (learn/FAILURES.md)
    break_: Annotated[str, tyro.conf.arg(name="break")] = ""
    # task

    # letters, alphabet or swarm; FILE.py:CLASS is a class of yours; jsonl:FILE and
    # reasoning_gym:NAME are known tasks (docs/tasks.md)
    env: str = "letters"
    think: bool = True  # may the policy think before it answers?
    # letters: tier 1 to 10 (6: 40-80 random letters, 8-12 to count); swarm: easy,
    # medium, hard, or mixed; yours: one of its levels, by default the last
    difficulty: int | str | None = None
    # start at the easiest level and go up to --difficulty. The next level begins when
    # results on this one are surely good enough: 75% exact in letters, a reward of 1 in
    # swarm. Noisy results take longer (bookkeeping/settled.py)
    curriculum: bool = False
    # letters: binary pays only exact answers; partial pays every right letter
    reward: str = "binary"
    # a setting of the environment, NAME=VALUE, as often as you like: a field of its
    # dataclass (`--env alphabet --set max_turns=2`, `--env swarm --set version=0.1`, or
    # a field of your own class)
    set: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    # policy

    # folder or hub id of a causal LM; auto: the largest Qwen3 that fits the card, with
    # settings that make it fit (fast/machine.py); without a card, an embedded model
    model: str = "auto"
    lora_rank: int = 32  # 0 trains all weights
    lora_alpha: int = 64  # LoRA's product B A is scaled by alpha / rank
    # auto: cuda if there is one; a Mac's GPU (mps) for a model that is not small; else
    # cpu
    device: str = "auto"
    # the sampler: torch or vllm. auto: vllm if it is installed and there is a GPU
    engine: str = "auto"
    # sample and compute log-probs the plain way (policy.py): easy to read and to fork
    plain: bool = False
    # YYYY-MM-DD, for a chat template that writes the date; a run keeps its first day
    today: str = ""
    # share of the card's memory for vLLM; by default what the replies of an update need
    vllm_memory: float | None = None
    # a seed per request, so no sample depends on another; may be slow on CUDA
    vllm_seeds: bool = True
    # if an update does not fit beside vLLM, vLLM sleeps while the trainer works: this
    # lends the trainer memory, and costs seconds
    vllm_sleep: bool = True
    # vLLM compiles nothing and captures no CUDA graphs: it starts sooner and samples
    # slower. If a bug goes away with it, compilation or graph capture causes it
    vllm_eager: bool = False
    threads: int = 0  # CPU threads; 0: as many as there are free cores
    # on a CPU: float32, or bfloat16 for a wide model, which is faster if the processor
    # multiplies in bfloat16 (docs/hardware.md). On a card the choice is automatic
    dtype: str = "float32"
    # SFT

    # which expert to imitate; the default shows the format, not the algorithm
    sft_style: str | None = None
    # how many demonstrations; few, as in practice they are scarce and rewards are not
    sft_examples: int = 100
    sft_steps: int = 50  # optimizer steps; 0: no SFT
    sft_batch: int | None = None  # by environment
    sft_lr: float | None = None  # by model size
    # GRPO

    # batches that GRPO samples and trains on; by model size and environment
    updates: int | None = None
    # stop before --updates once this many tokens have been sampled, so that runs that
    # are compared sample equally many; 0: no limit
    sampled_tokens: int = 0
    # after --updates, go on until the training reward has settled (see
    # bookkeeping/settled.py), but not beyond --max-updates. The learning rate stays at
    # its last value
    until_converged: bool = False
    stop_when_settled: bool = False  # stop before --updates if it has settled already
    max_updates: int = 400  # the most updates of a run with --until-converged
    num_tasks: int | None = None  # groups per update; by environment
    # samples per group: more of them find a rare good answer more often; by model size
    k: int | None = None
    # reinforce, grpo, dr_grpo, dapo, gspo, cispo, maxrl or dppo (grpo.LOSSES)
    loss: str = "grpo"
    # what a reward is compared with: group, batch or none. best: the best quarter of a
    # group, ties included, gets 1 and the rest 0 (if all are equal, all get 0)
    baseline: str = "group"
    # divide advantages by the group's standard deviation (--loss maxrl: by its mean;
    # never with --loss dr_grpo, --baseline none or --baseline best)
    normalize: bool = True
    lr: float | None = None  # by model size and environment
    # updates over which the rate rises; Adam's first steps are its largest
    warmup: int = 5
    # the rate then falls linearly to this share of lr; 1 keeps it constant
    lr_end: float = 0.1
    # folder or hub id of a model that judges each sampled token, in place of the reward
    # (grpo.teacher_advantages)
    teacher: str = ""
    # weight of the KL to the policy after SFT; 0 needs no reference at all
    kl: float = 0.0
    # optimizer steps per batch; above 1 the importance ratio leaves 1 and is clipped
    epochs: int = 1
    # for sampling *and* for the trained log-probs: both use the same distribution
    temperature: float = 1.0
    # longest reply in a turn, in tokens; by model size and environment
    max_tokens: int | None = None
    # clip, none, token, sequence, token_mask or sequence_mask, as
    # batch.set_off_policy_terms says; by model size
    importance: str | None = None
    # batches sampled ahead by a second process; 0 is strictly on-policy
    async_rollouts: int = 0
    # 0: the lag of --async-rollouts is fixed. Above 0, with --async-rollouts 1: the
    # second process never waits, and batches older than this, in updates, are dropped.
    # The lag then depends on speed, so such a run is not reproducible to the bit
    max_staleness: int = 0
    # after how many updates the sampler gets the new weights. 1: online. A fifth of all
    # updates: five rounds (STaR). All of --updates: the sampler keeps its first weights
    # (RFT, if also --loss reinforce --baseline none --importance none)
    sync_every: int = 1
    # padded tokens per forward pass: changes memory use, never the gradient; by free
    # memory
    micro_tokens: int | None = None
    gradient_checkpointing: bool = False  # less memory, a third slower
    # draw one batch after SFT, say what GRPO could learn from it, and stop
    probe: bool = False
    # evaluation: fixed development tasks, which nothing is trained on, greedy
    eval_n: int | None = None  # tasks per set; 32 would give an interval 33 points wide
    eval_every: int = 20  # updates from one evaluation to the next
    # evaluate other levels, too: in letters tiers 3, 5 and 6; in a class of yours all;
    # in swarm all, but only with --eval-only
    eval_other_tiers: bool = True
    # evaluation over an API (bridges/api.py) instead of a checkpoint; --model is the
    # model's name there
    api_base: str = ""  # an OpenAI-compatible endpoint: https://HOST/v1
    api_concurrency: int = 8  # episodes at a time; the key is in OPENAI_API_KEY
    # run
    seed: int = 0  # of LoRA's start, SFT's order, the training tasks and the samples
    name: str = ""  # of the run folder; empty: env, tier and time
    runs: str = "runs"  # where run folders live
    resume: str = ""  # a run folder to continue
    # only evaluate the checkpoint in this run folder, with its adapter and without,
    # greedy and sampled. All levels are played, or the one of a typed --difficulty
    eval_only: str = ""
    # with --eval-only: tasks that no run has played, for a final table
    held_out: bool = False
    save_every: int = 10  # updates between checkpoints
    # log to wandb: online if you are logged in, else in the run folder, to sync later
    wandb: bool = True


# ------------------------------------- defaults that depend on the environment or model

SMALL_MODEL = 50e6  # the most parameters of a small model, such as pico_base
BY_ENV = {  # defaults that depend on the environment
    "letters": {"difficulty": 6, "sft_style": "states"},
    "alphabet": {"difficulty": 0, "sft_style": "states"},
    "swarm": {"difficulty": "medium", "sft_style": "expert"},
    "custom": {"sft_style": ""},
    "known": {"difficulty": 0, "sft_style": ""},
}
BATCHES = {"num_tasks": 8, "sft_batch": 8, "eval_n": 256}
# for swarm, which has 25 replies per episode
LONG_BATCHES = {"num_tasks": 4, "sft_batch": 2, "eval_n": 128}
# Small models: (lr, updates, max_tokens), what was stable on pico_base (results/).
SMALL = {
    "letters": (3e-4, 150, 320),
    "alphabet": (3e-4, 80, 640),
    "swarm": (5e-4, 150, 160),
    "custom": (3e-4, 80, 160),
    "known": (3e-4, 80, 160),
}
# The same for models of SmolLM2's size, on a CPU. SmolLM2 learned sums with the rate
# and the updates of "known", in replies of 16 tokens (docs/real.md). The rest are
# guesses.
# Replies are short: it does not think at length, and longer ones would take too long.
MEDIUM = {
    "letters": (1e-4, 60, 160),
    "alphabet": (1e-4, 40, 192),
    "swarm": (1e-4, 20, 128),
    "custom": (1e-4, 80, 128),
    "known": (1e-4, 80, 64),
}
RUN_HERE = (  # (the most parameters, settings, learning rate of SFT)
    (SMALL_MODEL, SMALL, 1e-4),
    (200e6, MEDIUM, 2e-4),
)
# Large models: settings of published recipes for these sizes. We have not run them on a
# card. prime-rl: github.com/PrimeIntellect-ai/prime-rl at 559b447, examples/basic/…;
# TRL: its page "LoRA Without Regret" (huggingface.co/docs/trl/lora_without_regret);
# Tinker: tinker-cookbook. Warm-up and decay of the rate are as for small models.
# (prime-rl's linear schedule has 10 steps of warm-up, Tinker's loop none.)
RATES = (  # (the most parameters, lr of LoRA with alpha 64)
    # ten times the 3e-6 at which prime-rl trains all weights of a 0.6B (reverse-text).
    # For LoRA on that model TRL and prime-rl's own test have 5e-5, both with alpha 32
    (1e9, 3e-5),
    # prime-rl's for LoRA of rank 32 and alpha 64 on Qwen3-4B (alphabet-sort,
    # wiki-search), and TRL's on a 3B. Tinker's is 4e-5 on an 8B (recipes/rl_loop.py),
    # with alpha 32 and 16 times our batch
    (float("inf"), 1e-5),
)
# Without LoRA the rates are a tenth: LoRA needs ten times the rate of full fine-tuning,
# whatever its rank. Schulman et al. 2025 (thinkingmachines.ai/blog/lora) found this for
# SFT and RL. TRL's pair of runs does the same: 1e-5 and 1e-6.
ALL_WEIGHTS = 0.1
LARGE = {
    # of LoRA: ten times the rate at which prime-rl trains all weights (wordle, 1.7B).
    # TRL's page has 2e-4
    "sft_lr": 1e-4,
    # the group size of all these prime-rl examples, and Tinker's. prime-rl's default
    # batch is 8 groups of 16
    "k": 16,
    # prime-rl's max_steps in alphabet-sort, wiki-search and wordle
    "updates": 200,
    "importance": "token",
}
LONGEST = {  # tokens of a reply
    # room to spell 80 letters with a tally. prime-rl's seq_len; TRL's run had 4096
    "letters": 2048,
    "alphabet": 768,  # prime-rl's for this very task
    # prime-rl's for a turn with tools (wiki-search); 25 times 2048 would not fit
    "swarm": 512,
    "custom": 512,  # TRL's default
    "known": 1024,  # room for a derivation; our choice
}
# swarm's error_penalty for a small model, which makes an error in one call of twelve
# while it samples. Without a penalty, a run that posted trades ended with 36% errors.
# At 0.67 or more, a policy with the base's error rate loses reward on average when it
# tries to accept a fair offer. (Measured at commit 22b9273.)
SMALL_ERROR_PENALTY = 0.5

# Other people's published runs, as far as they are described, but with a model that
# fits one A100 instead of a 30B. There is no SFT, and the rate is constant, as in
# prime-rl. The loss and the evaluations are our choice: their descriptions do not say.
PUBLISHED = {
    "model": "Qwen/Qwen3-4B-Instruct-2507",
    "lora_rank": 32,
    "lora_alpha": 64,
    "lr": 1e-5,
    "warmup": 0,
    "lr_end": 1.0,
    "sft_steps": 0,
    "temperature": 1.0,
}
PRESETS = {
    "seed": {  # picoRL's run: every setting that it relied on
        "think": False,
        "reward": "partial",
        "lr": 5e-6,
        "warmup": 0,
        "lr_end": 1.0,
        "updates": 200,
        "max_tokens": 2048,
        "eval_n": 32,
        "eval_every": 10,
        "k": 8,
        "sft_lr": 1e-5,
    },
    # SWARM v0.2 on Qwen3-30B-A3B-Thinking: batches of 64, 4 rollouts per example. Rank
    # and rate were not published; we took the alphabet's. A conversation may reach
    # 55,900 tokens (25 replies of 2048, and the text in between), so to train on it a
    # 4B needs gradient checkpointing.
    "swarm-published": PUBLISHED
    | {
        "env": "swarm",
        "difficulty": "medium",
        "think": True,
        "set": [
            "version=0.2",
            "payoff_scale=published",
            "text_ends=true",  # a reply without a call ends the episode
            "error_penalty=0.0",
        ],
        "num_tasks": 16,
        "k": 4,
        "updates": 200,
        "max_tokens": 2048,
        "gradient_checkpointing": True,
        "vllm_memory": 0.7,
    },
    # prime-rl's alphabet-sort, which trains this very model, but with the batches and
    # updates of the published run of the 30B. (In prime-rl's file there are 200 updates
    # of 16 x 16.) The tasks are the default ones.
    "alphabet-published": PUBLISHED
    | {
        "env": "alphabet",
        "think": False,
        "num_tasks": 32,
        "k": 8,
        "updates": 100,
        "max_tokens": 768,
    },
}


# ---------------------------------------------------------- what depends on the model


def model_request(cfg: Config, typed: set[str] = frozenset()) -> tuple:
    """(model, environment, device, fixed settings): what decides the choice of model.

    Fixed settings: {flag: value} of what was typed (even if it is the default), or set
    by a preset or by the caller of train(). "auto" and None leave the choice open.
    """
    defaults = vars(Config())
    fixed = {
        x: y
        for x, y in sorted(vars(cfg).items())
        if (x in typed or y != defaults[x]) and y not in ("auto", None)
    }
    return cfg.model, cfg.env, cfg.device, fixed


def complete(
    cfg: Config, n_parameters: int, model: str, fits: dict, today: str = ""
) -> Config:
    """A copy of cfg in which all settings that depend on the model are filled in.

    model: the one that --model auto chose. The run keeps it; otherwise --resume on
    another machine would continue with another model. An embedded model is kept by its
    name, because its path differs there. fits: settings that make the model fit the
    card. today: the date, if the chat template writes it.
    """
    cfg = replace(cfg, **fits, today=today)
    if cfg.model == "auto":
        cfg.model = Path(model).name if Path(model).parent == MODELS else model
    if cfg.async_rollouts:
        # learned fastest on old samples (results/offpolicy.json)
        fill(cfg, {"importance": "sequence"})
    if cfg.dtype == "bfloat16":
        # sampler and trainer round differently; with clip, the ratio would contain that
        # difference, as if the samples were old
        fill(cfg, {"importance": "token"})
    fill(cfg, by_size(n_parameters, env_kind(cfg.env), not cfg.lora_rank))
    small_swarm = cfg.env == "swarm" and n_parameters <= SMALL_MODEL
    if small_swarm and "error_penalty" not in parse_set(cfg):
        cfg.set = [*cfg.set, f"error_penalty={SMALL_ERROR_PENALTY}"]
    return cfg


def fill(cfg: Config, defaults: dict) -> None:
    """Set what is still None to its default."""
    missing = {name: x for name, x in defaults.items() if getattr(cfg, name) is None}
    vars(cfg).update(missing)


def by_env(env: str) -> dict:
    """Defaults that depend on the environment."""
    return BY_ENV[env_kind(env)] | (LONG_BATCHES if env == "swarm" else BATCHES)


def by_size(n_parameters: int, env: str, all_weights: bool = False) -> dict:
    """Defaults that depend on the model's size.

    Large models: published recipes (RATES …). Others: what was tried here (RUN_HERE).
    env: an env_kind(). all_weights: no LoRA.
    """
    for most, table, sft_lr in RUN_HERE:
        if n_parameters <= most:
            lr, updates, max_tokens = table[env]
            return {
                "lr": lr,
                "sft_lr": sft_lr,
                "updates": updates,
                "k": 8,
                "max_tokens": max_tokens,
                "importance": "clip",
            }
    lr = next(rate for most, rate in RATES if n_parameters <= most)
    share = ALL_WEIGHTS if all_weights else 1
    rates = {"lr": share * lr, "sft_lr": share * LARGE["sft_lr"]}
    return LARGE | rates | {"max_tokens": LONGEST[env]}


def learning_rate(cfg: Config, update: int) -> float:
    """An update's rate: up over cfg.warmup, then linearly down to lr_end · lr.

    lr |   /---___
       |  /       ---___        Adam's first steps are its largest, so they are taken
       | /              ---     slowly; the last ones let the policy settle
     0 +--------------------
       0 warmup       updates
    """
    rise = (update + 1) / max(1, cfg.warmup)
    fall = 1 - (1 - cfg.lr_end) * min(1, update / max(1, cfg.updates))
    return cfg.lr * min(rise, fall)


# ------------------------------------------------------------------------------- tasks


def task_seeds(cfg: Config, update: int) -> list[int]:
    """The tasks of an update: never the same twice, and different for each --seed."""
    # modulo, because with --max-staleness there may be more batches than MOST_UPDATES
    first = TRAIN_SEEDS + cfg.num_tasks * (
        cfg.seed * MOST_UPDATES + update % MOST_UPDATES
    )
    return [first + i for i in range(cfg.num_tasks)]


def sft_seeds(cfg: Config) -> list[int]:
    """The tasks of the demonstrations: the same for every --seed."""
    return seeds_from(cfg, SFT_SEEDS, cfg.sft_examples)


def dev_seeds(cfg: Config) -> list[int]:
    """The tasks of evaluations during a run: the same in all runs, never trained on."""
    return seeds_from(cfg, DEV_SEEDS, cfg.eval_n)


def seeds_from(cfg: Config, first: int, n: int) -> list[int]:
    """n seeds, or fewer if there are fewer tasks: a file has only its rows."""
    most = make_env(cfg, 0).how_many(first) if env_kind(cfg.env) == "known" else n
    if most is None:  # a generator of tasks
        return known_tasks().different(cfg.env, first, n)
    return [first + i for i in range(min(n, most))]


# ------------------------------------------------------------------------ environments

# {flag: the field of the environment's class that it sets}. Other fields are set with
# --set.
OF_ENVIRONMENTS = {
    "difficulty": "difficulty",
    "reward": "reward_kind",
    "think": "think",
    "sft_style": "style",
}
# The levels of a curriculum, the easiest first.
LEVELS = {"letters": list(range(1, 11)), "swarm": ["easy", "medium", "hard"]}
# {environment: (measure, bar)}: a curriculum goes up once the measure is surely as high
# as the bar (bookkeeping/settled.py).
PROMOTE = {"letters": ("exact", 0.75), "swarm": ("reward", 1.0)}


def env_kind(env: str) -> str:
    """An environment's key in the tables: its name, "known" or "custom" (FILE.py:…)."""
    if env.startswith(("jsonl:", "reasoning_gym:")):
        return "known"
    return "custom" if ".py:" in env else env


def env_name(env: str) -> str:
    """The name in run folders: CLASS of FILE.py:CLASS, ROWS of jsonl:ROWS.jsonl."""
    if env_kind(env) == "known":
        return Path(env.partition(":")[2].partition(",")[0]).stem
    return env.rpartition(":")[2]


def class_of(env: str) -> type | None:
    """The class of an environment; None for known tasks, which have no settings."""
    if env_kind(env) == "known":
        return None
    if env_kind(env) == "custom":
        return load_custom_env(env)
    return getattr(import_module(f"env_{env}"), env.capitalize())


@cache  # read the file once: an environment is made for every episode
def load_custom_env(env: str) -> type:
    """The class of `--env FILE.py:CLASS` (docs/fork.md has one).

    ValueError if it cannot be used.
    """
    file, _, name = env.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"--env {env}: there is no file {file}; give FILE.py:CLASS")
    # a prefix, so that your metrics.py does not replace ours
    module_name = f"yours_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found = getattr(module, name)
        for needed in ("think", "tools", "reset", "step", "score", "expert_reply"):
            getattr(found(), needed)
    except (Exception, SystemExit) as error:  # it may be any code
        raise ValueError(
            f"--env {env}: cannot be used ({type(error).__name__}: {error}); "
            "see docs/fork.md"
        ) from None
    return found


def levels_of(env: str) -> list:
    """The levels of a curriculum; a class of yours may have `levels`, too."""
    return LEVELS.get(env) or getattr(class_of(env), "levels", [])


def promote_of(env: str) -> tuple[str, float]:
    """(measure, how high it has to be); a class of yours may have `promote`."""
    return getattr(class_of(env), "promote", PROMOTE.get(env, PROMOTE["letters"]))


def settable(env: str) -> dict[str, type]:
    """{setting: its type}: what --set can change, the fields of the dataclass."""
    cls = class_of(env)
    own = fields(cls) if is_dataclass(cls) else ()
    flags = () if env_kind(env) == "custom" else OF_ENVIRONMENTS.values()
    return {f.name: get_type_hints(cls)[f.name] for f in own if f.name not in flags}


def parse_set(cfg: Config) -> dict:
    """{setting: value} of --set NAME=VALUE …; the last one counts.

    ValueError with one sentence if there is no such setting, or the value is wrong.
    """
    types, values = settable(cfg.env), {}
    for word in cfg.set:
        name, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"--set {word}: give NAME=VALUE")
        if name not in types:
            cure = f"choose {', '.join(types)}" if types else "leave it out"
            if name in OF_ENVIRONMENTS and env_kind(cfg.env) != "custom":
                cure = f"it is the flag {flag_name(name)}"
            raise ValueError(
                f"--set {word}: {env_name(cfg.env)} has no such setting; {cure}"
            )
        values[name] = read_value(types[name], text, word)
    return values


READERS = {  # {type of a field: how its text is read}
    NoneType: lambda text: {"none": None}[text.lower()],
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    int: int,
    float: float,
    str: str,
}


def read_value(kind_of: type, text: str, word: str):
    """'3' as an int, 'false' as a bool, 'none' as None: as the field's type says."""
    kinds = get_args(kind_of) or (kind_of,)
    for one in sorted(kinds, key=lambda one: one is str):  # str last: any text is one
        with suppress(KeyError, ValueError):
            return READERS[one](text)
    names = " or ".join("none" if one is NoneType else one.__name__ for one in kinds)
    raise ValueError(f"--set {word}: the value has to be of type {names}")


def make_env(cfg: Config, difficulty):
    """A fresh environment, set by the flags that it has fields for and by --set."""
    if env_kind(cfg.env) == "known":
        return known_tasks().open_known(cfg.env, cfg.think)
    cls = class_of(cfg.env)
    if env_kind(cfg.env) == "custom":
        env = cls(**parse_set(cfg))
        if levels_of(cfg.env):
            env.level = difficulty
        return env
    values = vars(cfg) | {"difficulty": difficulty}
    own = {f.name for f in fields(cls)}
    flags = {name: values[x] for x, name in OF_ENVIRONMENTS.items() if name in own}
    return cls(**flags, **parse_set(cfg))


def known_tasks():
    """The module of `--env jsonl:FILE` and `reasoning_gym:NAME`."""
    from bridges import known

    return known


# --------------------------------------------------------------------- the command line


def command_line(
    words: list[str], mistakes: dict[str, dict] | None = None
) -> tuple[Config, set[str]]:
    """(the Config that these words ask for, the names of the flags that were typed).

    mistakes: {a mistake that --break makes on purpose: its settings}.
    """
    cfg = tyro.cli(Config, args=words)
    defaults = PRESETS.get(cfg.preset, {}) | (mistakes or {}).get(cfg.break_, {})
    if defaults:  # read the words again, with these as defaults: a typed flag wins
        typed_settings = cfg.set
        cfg = tyro.cli(Config, args=words, default=replace(Config(), **defaults))
        if cfg.env != defaults.get("env", cfg.env):
            cfg.set = typed_settings  # the preset's are for another environment
    flags = {word.partition("=")[0].replace("_", "-") for word in words}
    ways = lambda name: {flag_name(name), flag_name(f"no_{name}")}
    return cfg, {name for name in vars(cfg) if ways(name) & flags}


def flag_name(name: str) -> str:
    """A field of Config as it is typed: lora_rank is --lora-rank."""
    return f"--{name.strip('_').replace('_', '-')}"
