"""The machine that a run is on: its system, its memory, its engine, and the model that fits.

    what                    Linux            macOS            Windows
    peak memory             resource, KiB    resource, bytes  psutil: current memory
    time limit of a call    SIGALRM          SIGALRM          a thread, abandoned if late
    quota of a container    cgroup, v2       none             none

We run it on Linux only; tests/test_machine.py takes away what the others lack. The second half of
the file plans the memory of a card, and chooses the model and settings that fit it.

Run me: `python -m fast.machine` says what this machine has, and what fits on which card.
"""

import ctypes
import importlib.util
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
import torch.nn.functional as F

from fast import parallel
from fast.logprobs import token_logprobs
from policy import BIG, EMBEDDED, PICO, PICO_SWARM, Policy, in_bfloat16, pick_device

# -------------------------------------------------------------------------------------- the system


def peak_memory() -> float:
    """The most memory that this process has held, in GiB; on Windows, what it holds now."""
    try:
        import resource
    except ImportError:
        return psutil.Process().memory_info().rss / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """How many cores this container may use at a time (docker --cpus); None: no limit.

    torch itself counts all cores of the machine.
    """
    try:
        most, period = (root / "cpu.max").read_text(encoding="utf-8").split()
        return int(most) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return None


def free_memory(root: Path = Path("/sys/fs/cgroup")) -> float:
    """GiB that this process may still take: the machine's, or its container's if that is less."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError, TypeError):  # no such file, or "max"
        most = int((root / "memory.max").read_text(encoding="utf-8"))
        # Cached files count too, but are dropped when memory is needed: count only anon.
        held = re.search(r"^anon (\d+)", (root / "memory.stat").read_text(encoding="utf-8"), re.M)
        free = min(free, most - int(held[1]))
    return free / 2**30


def speak_utf8() -> None:
    """Print "→" and "±" into files and pipes too, where Windows would use its own code page."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a test or a notebook may have replaced it
            stream.reconfigure(encoding="utf-8", errors="replace")


class Hung(BaseException):
    """No answer in time. Not an Exception, or an environment's own `except` could swallow it."""


def in_time(seconds: float, call: Callable, *given):
    """call(*given); raises Hung after so many seconds.

    In a main thread a timer signal interrupts whatever Python is doing, loops, sleeps and regular
    expressions included, but not C code that never returns to Python. It fires again every second,
    in case the call swallows it.
    """
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        return in_thread(seconds, call, *given)

    def ring(*_):
        raise Hung(f"no answer within {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
            return call(*given)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # again, because it may have fired in the line above
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def in_thread(seconds: float, call: Callable, *given):
    """in_time without timer signals: on Windows, and outside the main thread.

    Python cannot end a thread, so one that is late is abandoned: a call that loops for ever keeps
    taking its share of this process, and only its result is ignored.
    """
    answer = Future()

    def work():
        try:
            answer.set_result(call(*given))
        except BaseException as error:  # whatever it is, the caller gets it
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        answer.exception(timeout=seconds)
    except TimeoutError:
        raise Hung(f"no answer within {seconds:g} seconds") from None
    return answer.result()


# ----------------------------------------------------------------------------------------- memory


class CannotGoOn(RuntimeError):
    """A known failure; its one sentence says what to do (bookkeeping/guard.py prints it)."""


# Only torch's own allocator on CUDA raises OutOfMemoryError. Apple's, the driver, and the libraries
# that allocate their own workspace raise RuntimeError (or its subclass AcceleratorError).
NO_ROOM = (
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def out_of_memory(error: Exception) -> bool:
    """Does this error say that a GPU is out of memory?"""
    said = isinstance(error, RuntimeError) and any(text in str(error) for text in NO_ROOM)
    return said or isinstance(error, torch.OutOfMemoryError)


def give_back_memory() -> None:
    """Have the C library return freed memory to the system, if it can (glibc).

    The library keeps freed memory for later, and batches of ever new lengths fragment it more and
    more: in two hours of swarm the process grew by 138 MB per hour although no object leaked. The
    call takes 0.08 s, so it is made after long updates only.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


# --------------------------------------------------------------------------------- CPU and engine

NARROW, MOST_THREADS = 512, 8  # most channels of a narrow model, most threads for it; a guess


def cpu_threads(cfg, policy: Policy) -> int:
    """--threads, else OMP_NUM_THREADS, else torch's choice, but no more than there are free cores.

    More threads than free cores wait for each other. On two cores, a short run took 75 s with 64
    threads, and 16 with two; in a container that may use one core, 24 with two, and 17 with one.
    """
    most = torch.get_num_threads()
    if cfg.threads or "OMP_NUM_THREADS" in os.environ:
        return cfg.threads or most
    if policy.lm.config.get_text_config().hidden_size <= NARROW:
        most = min(most, MOST_THREADS)
    # Cores that no other process keeps busy, measured for half a second.
    free = round(psutil.cpu_count() * (1 - psutil.cpu_percent(interval=0.5) / 100))
    return max(1, int(min(most, quota() or most, free)))


def use_cpu(device, threads: int) -> None:
    """Set torch's threads and, if the model is on a CPU, how it multiplies float32 matrices.

    By default torch uses MKL, which takes AVX2 on AMD's CPUs even if they have AVX-512. With
    precision "medium" it uses oneDNN, which is 2.2 times as fast there and as exact. But on CPUs
    that multiply in bfloat16, "medium" means 3 digits instead of 7, and log-probs would differ from
    those of the sampler. So its error is measured here. (On a card it would mean TF32 or worse.)
    """
    torch.set_num_threads(threads)
    if torch.device(device).type == "cpu":
        x, weight = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
        exact = F.linear(x.double(), weight.double())
        torch.set_float32_matmul_precision("medium")
        error = (F.linear(x, weight) - exact).norm() / exact.norm()
        torch.set_float32_matmul_precision("medium" if error < 1e-5 else "highest")


def which(cfg, device, n_parameters: float = inf) -> tuple[str, str]:
    """(plain, torch or vllm; why) for a model of this size. ValueError if that cannot work."""
    if cfg.plain:
        return "plain", "--plain"
    on_card = torch.device(device).type == "cuda"
    exact = not in_bfloat16(device, n_parameters)
    if cfg.engine == "vllm" and on_card and exact and cfg.lora_rank:
        raise ValueError(  # its kernels assert it (vllm/lora/ops/triton_ops/lora_shrink_op.py)
            "--engine vllm: it has no LoRA in float32, which small models, and cards without "
            "bfloat16, compute in; take --engine torch"
        )
    if cfg.engine != "auto":
        return cfg.engine, f"--engine {cfg.engine}"
    against = {
        "vLLM is for NVIDIA cards": not on_card,
        "vLLM is not installed": not importlib.util.find_spec("vllm"),
        "vLLM needs bfloat16, and here it is float32": exact,
        "several processes train (--async-rollouts 1 uses vLLM)": (
            parallel.world() > 1 and not cfg.async_rollouts
        ),
    }
    why = next((reason for reason, holds in against.items() if holds), "")
    return ("torch", why) if why else ("vllm", "vLLM is installed")


SAMPLERS = {"plain": "the plain sampler", "torch": "our own sampler", "vllm": "vLLM"}


def here(cfg, policy: Policy) -> str:
    """One line: on which device, in which number format and with which engine, and why."""
    engine, why = which(cfg, policy.device, policy.n_parameters)
    kind, n = policy.device.type, torch.get_num_threads()
    where = f"{platform.machine()} CPU with {n} thread{'s' * (n != 1)}"
    if kind == "cuda":
        where = f"{torch.cuda.get_device_name(policy.device)} with {card_of(policy.device)}"
    elif kind == "mps":
        where = "Apple's GPU (MPS), which we have not tested"
    wide = str(next(policy.lm.parameters()).dtype).removeprefix("torch.")
    return f"here: {where}, {wide}, {SAMPLERS[engine]} ({why})"


# ------------------------------------------------------------------------------- what fits a card

# A run's peak is what it always holds (CUDA's context, the weights, the trained weights and their
# two moments in Adam) plus the larger of sampling (a second copy of the weights, keys and values)
# and training (gradients, activations, the logits of a chunk). --model auto takes the largest model
# of ROOMY that fits and has room, with the first settings of TRIES that make it fit. These change
# how an update is computed and never what is learnt; flags that were typed stay as they are.
#
# GiB of: weights in bfloat16; LoRA of rank 32 in float32; and per 1,024 tokens the keys and values,
# an update's activations, and those with gradient checkpointing. Computed from the models' shapes
# by lab/speed/memory.py of commit 22b9273, which counted what autograd keeps; an H100 took less
# (docs/hardware.md).
SIZES = {
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (56.9, 0.1, 0.093, 7.15, 0.3),  # LoRA on attention only
    BIG: (7.5, 0.25, 0.141, 6.46, 0.41),
    "Qwen/Qwen3-1.7B": (3.21, 0.13, 0.11, 3.34, 0.24),
    "Qwen/Qwen3-0.6B": (1.11, 0.08, 0.11, 2.1, 0.11),
}
# GiB of the smallest card for which auto takes a model. By the plan each fits on less, but that is
# not measured, and it would be slow: activations computed twice, hardly any room to sample the 128
# replies of a batch. If you want that, name the model, and a line says what makes it fit.
ROOMY = {BIG: 32, "Qwen/Qwen3-1.7B": 20, "Qwen/Qwen3-0.6B": 0}
CONTEXT, LOGITS = 0.6, 1.4  # GiB: CUDA's context; a chunk's logits and what goes with them
GRAPHS, VLLM_ROOM = 1.0, 2.3  # GiB: what vLLM keeps asleep; what it needs besides its cache
ALL_WEIGHTS = 1.18  # factor on activations if all weights learn: norms keep their inputs too
ROWS = 8  # conversations that our own sampler should play at once, at least
# The longest conversation: (replies, tokens of each, all tokens in between).
TALK = {
    "letters": (1, 2048, 192),
    "alphabet": (3, 768, 596),
    "swarm": (25, 512, 4700),
    "yours": (1, 512, 3584),
}
# A 4B model then takes 63 of an A100's 80 GB; with 16,384 it would take 115 (computed).
MOST_TOKENS = 8192
# The settings of a run that the plan reads, with the defaults of settings.py (a test compares
# them).
DEFAULTS = {
    "lora_rank": 32,
    "k": 16,
    "max_tokens": None,
    "micro_tokens": MOST_TOKENS,
    "gradient_checkpointing": False,
    "engine": "auto",
    "plain": False,
    "vllm_memory": 0.3,
    "vllm_sleep": True,
    "async_rollouts": 0,
}
# Settings that may make a run fit: the first that do are taken. vLLM is given up last.
SHARES = [{"vllm_memory": share} for share in (0.4, 0.5, 0.6)]
MENDS = (
    {},
    {"micro_tokens": 4096},
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "micro_tokens": 4096},
)
TRIES = [first | mend for first, mend in product(({}, *SHARES, {"engine": "torch"}), MENDS)]


@dataclass(frozen=True)
class Card:
    gib: float  # usable, as torch reports it
    bfloat16: bool = True  # if not, all of the plan is in float32, twice as wide

    def __str__(self) -> str:
        return f"{self.gib:.0f} GB of GPU memory"


CARDS = {
    "T4, 15 GB": Card(14.6, bfloat16=False),
    "Ampere, 16 GB": Card(15.7),
    "Ampere, 24 GB": Card(23.6),
    "A100, 40 GB": Card(39.4),
    "Ampere, 48 GB": Card(47.4),
    "A100, 80 GB": Card(79.1),
    "H200, 141 GB": Card(139.7),
}


@dataclass(frozen=True)
class Plan:
    """GiB that a run of a model of SIZES takes on a card."""

    sampling: float  # at the peak of sampling; infinite if vLLM has no room for its cache
    training: float  # at the peak of an update
    peak: float  # the larger one; or both, if a second process samples on the same card


def plan(model: str, env: str, card: Card, engine: str, settings: dict | None = None) -> Plan:
    """engine: torch or vllm; settings: those that differ from DEFAULTS."""
    s = DEFAULTS | (settings or {})
    weights, adapter, kv, plain, checkpointed = SIZES[model]
    wide = 1 if card.bfloat16 else 2
    talk, opening = conversation(env, s["max_tokens"])
    if s["lora_rank"]:
        learnt, copy = adapter * s["lora_rank"] / 32, wide * weights
        policy, cast = copy + learnt, 0
    else:  # all weights learn, in float32; the forward pass casts them to bfloat16
        learnt = copy = policy = 2 * weights
        cast = weights
        plain *= ALL_WEIGHTS
    activations = checkpointed if s["gradient_checkpointing"] else plain
    update = wide * (LOGITS + cast + activations * max(s["micro_tokens"], talk) / 1024)
    held = CONTEXT + policy + 2 * learnt  # Adam has two moments of every trained weight
    if engine == "vllm":
        rollout = s["vllm_memory"] * card.gib
        idle = GRAPHS if s["vllm_sleep"] else rollout
        # Its cache needs room for 32,768 tokens, or for a longer conversation.
        if rollout < wide * (weights + max(32, talk / 1024) * kv) + VLLM_ROOM:
            rollout = inf
    else:  # our sampler's copy, and its keys and values, are as wide as the policy's weights
        # A group's first replies, or a few whole conversations: from the second turn on each is
        # sampled by itself.
        tokens = max(s["k"] * opening, ROWS * talk)
        rollout, idle = copy + 1.08 * kv * tokens / 1024 * copy / weights + 0.3, copy
    trainer = held + learnt + update  # gradients are as large as what learns
    peak = max(held + rollout, trainer + idle)
    if s["async_rollouts"]:  # neither process lends the other memory
        second = rollout + CONTEXT + policy
        # vLLM has its share of the card; our own sampler in a second process has half of it.
        peak = trainer + second if engine == "vllm" else 2 * max(trainer, second)
    return Plan(held + rollout, trainer + idle, peak)


def conversation(env: str, max_tokens: int | None = None) -> tuple[int, int]:
    """Tokens of the longest conversation, and of its first turn, with replies of max_tokens."""
    replies, usual, between = TALK.get(env, TALK["yours"])
    reply = max_tokens or usual
    return replies * reply + between, reply + between


def card_of(device) -> Card:
    memory = torch.cuda.get_device_properties(device).total_memory
    return Card(memory / 2**30, in_bfloat16(device))


def settings_that_fit(
    model: str, env: str, card: Card, engine: str, asked: dict
) -> tuple[dict, float] | None:
    """(settings that make a run of this model fit the card, GiB at its peak), or None.

    engine: the one that samples, unless the fit needs another; asked: {flag: value} that stay.
    """
    for more in TRIES:
        if not more.keys() & asked.keys():
            peak = plan(model, env, card, more.get("engine", engine), asked | more).peak
            if peak < card.gib:
                return more, peak
    return None


def choices(env: str, card: Card, engine: str, asked: dict) -> Iterator[tuple[str, dict, float]]:
    """(model, settings, GiB at the peak) of the models that auto may take, the largest first."""
    for model, least in ROOMY.items():
        found = settings_that_fit(model, env, card, engine, asked)
        if found and card.gib >= least:
            yield model, *found


def choose_model(
    name: str, env: str = "letters", device="auto", asked: dict | None = None
) -> tuple[str, str, dict]:
    """(path or hub id, one line that says why, settings that make it fit).

    `auto` is the largest of ROOMY that fits here, else the embedded model. asked: {flag: value}
    that stay as they are; None if the model will not be trained. A model that you name gets advice
    but no settings.
    """
    device = pick_device(device)
    on_card = torch.device(device).type == "cuda"
    if name != "auto":
        trained = on_card and asked is not None and name in SIZES
        advice = advise(name, env, device, asked) if trained else ""
        return EMBEDDED.get(name, name), f"model {name}, as asked{advice}", {}
    why = "a CPU was asked for" if torch.cuda.is_available() else "no CUDA device"
    if on_card:
        card, asked = card_of(device), asked or {}
        fitting = list(choices(env, card, engine_for(asked, device), asked))
        for model, settings, peak in fitting:
            if within_reach(model):
                how = f"with {typed(settings) or 'the defaults'} (about {peak:.0f} GB, computed)"
                return model, f"{model}: the choice for {card}, {how}", settings
        flags = typed({flag: value for flag, value in asked.items() if flag in DEFAULTS})
        why = f"no Qwen3 fits {card} with --env {env} {flags}".strip()
        if fitting:
            why = f"the hub cannot be reached for {model}, and the cache does not have it"
    small = PICO_SWARM if env == "swarm" else PICO
    return str(small), f"{why}, so the embedded {small.name} (0.9M parameters) is the policy", {}


def engine_for(asked: dict, device) -> str:
    """The engine that samples on a card if these flags were typed."""
    return which(SimpleNamespace(**DEFAULTS | asked), device)[0]


def advise(model: str, env: str, device, asked: dict) -> str:
    """Advice on a named model that does not fit; "" if it fits.

    ValueError if a second process would not fit next to it: the first update would end the run.
    """
    card = card_of(device)
    found = settings_that_fit(model, env, card, engine_for(asked, device), asked)
    if found and not found[0]:
        return ""
    more = f"it fits with {typed(found[0])}" if found else "no setting that we know makes it fit"
    misfit = f"by the plan it does not fit {card}: {more}"
    if asked.get("async_rollouts"):
        raise ValueError(f"{model} with --async-rollouts, a second process on the card; {misfit}")
    return f"; {misfit}"


def typed(settings: dict) -> str:
    """Settings as they are typed: --micro-tokens 4096 --gradient-checkpointing --no-vllm-sleep."""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        on_off = f"--{flag}" if value else f"--no-{flag}"
        words.append(on_off if isinstance(value, bool) else f"--{flag} {value}")
    return " ".join(words)


def within_reach(model: str) -> bool:
    """Is it in the local cache, or does the hub answer?"""
    from huggingface_hub import hf_hub_download

    with suppress(Exception):  # no network, a proxy that refuses, a hub that is down: all the same
        hf_hub_download(model, "config.json", etag_timeout=5)
        return True
    return False


# ------------------------------------------------------------------------- what fits a CPU's memory

# GiB of activations at once, 496 tokens of SmolLM2. With 992 an update of 64 replies of 64 tokens
# peaked at 4.8 GiB instead of 3.2, and took 41 s instead of 43. (python -m lab.speed --model
# models/smollm2 --reply 64 --micro-tokens 496, or 992; two cores, once each.)
ENOUGH = 0.75


def kept_per_token(policy: Policy, tokens: int = 32) -> float:
    """GiB that autograd keeps per token for the backward pass; measured on a text of `tokens`."""
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    kept = {}  # {address: the storage}, so that none is counted twice

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = torch.arange(tokens + 1, device=policy.device)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(policy, ids, torch.ones_like(ids[:, 1:], dtype=torch.bool))
    return sum(kept[place].nbytes() for place in kept.keys() - weights) / tokens / 2**30


def fit_memory(cfg, policy: Policy, opening: int, turns: int = 1) -> str:
    """Choose settings that make an update fit a CPU's memory, unless typed; returns a line on it.

    opening: tokens of the first prompt; turns: the most replies (1, if the environment does not
    say). ValueError if not even one conversation fits.
    """
    if policy.device.type != "cpu" or cfg.micro_tokens:
        cfg.micro_tokens = cfg.micro_tokens or MOST_TOKENS
        return ""
    free = free_memory() / parallel.world()
    width = lambda weights: sum(w.nbytes for w in weights) / 2**30
    # The sampler's copy; gradients and Adam's two moments; logits and other temporaries.
    room = free - width(policy.lm.parameters()) - 3 * width(policy.trainable().values()) - 0.5
    kept, longest = kept_per_token(policy), opening + turns * cfg.max_tokens
    if cfg.env in TALK:  # with what comes between the replies
        longest = conversation(cfg.env, cfg.max_tokens)[0]
    if kept * longest > room and not cfg.gradient_checkpointing:
        cfg.gradient_checkpointing = True
    if cfg.gradient_checkpointing:  # the input of each layer, and all of one layer
        shape = policy.lm.config.get_text_config()
        one = kept / shape.num_hidden_layers
        kept = one + shape.num_hidden_layers * shape.hidden_size * 4 / 2**30
    if kept * longest > room:
        raise ValueError(
            f"an update needs {free - room + kept * longest:.1f} GB for a conversation of "
            f"{longest} tokens, but only {free:.1f} are free; lower --max-tokens (now "
            f"{cfg.max_tokens}), or take a smaller model"
        )
    cfg.micro_tokens = int(min(MOST_TOKENS, max(256, min(ENOUGH, room) / kept)))
    if cfg.micro_tokens == MOST_TOKENS:
        return ""
    more = ", gradient_checkpointing" if cfg.gradient_checkpointing else ""
    return (
        f"chosen for this memory: micro_tokens {cfg.micro_tokens}{more} (a token takes "
        f"{1024 * kept:.1f} MB of an update, {free:.1f} GB are free)\n"
    )


def checkpoint_activations(policy: Policy) -> None:
    """Keep only each layer's input for the backward pass.

    ValueError if the model has dropout.
    """
    shares = [layer.p for layer in policy.lm.modules() if isinstance(layer, torch.nn.Dropout)]
    if any(shares) or getattr(policy.lm.config, "attention_dropout", 0):
        raise ValueError(
            "--gradient-checkpointing: it would also turn on this model's dropout; leave it out, "
            "or set dropout to 0"
        )
    policy.lm.gradient_checkpointing_enable()
    policy.lm.enable_input_require_grads()  # else a checkpoint passes no gradients on
    policy.checkpointing = True


if __name__ == "__main__":
    print(f"{sys.platform}: at most {peak_memory():.2f} GiB held so far")
    print(f"cores: {os.cpu_count()}, of which a container may use: {quota() or 'all'}")
    print("\nWhat --model auto takes, with vLLM (on a T4 without), and GiB at the peak:")
    for env, (name, card) in product(TALK, CARDS.items()):
        engine = "vllm" if card.bfloat16 else "torch"
        for model, settings, peak in list(choices(env, card, engine, {}))[:1]:
            print(f"  {env:9} {name:14} {peak:6.1f}  {model.split('/')[1]} {typed(settings)}")
