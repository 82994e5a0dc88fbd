"""The machine that a run finds: its system, its memory, its engine, and the model that fits.

    what                    Linux            macOS            Windows
    most memory so far      resource, KiB    resource, bytes  psutil
    a call's limit in time  SIGALRM          SIGALRM          a thread, abandoned if late
    a file on the disk      fsync            fsync            fsync of what may be written
    a folder's names        fsync            fsync            the system's business
    a container's quota     cgroup           no such thing    no such thing

Only Linux is run by us; tests/test_machine.py takes away what the others lack. The second half of
the file plans the memory of a card, and chooses the model and settings that fit it.

Run me: `python -m fast.machine` says what this machine has, and what fits on which card.
"""

import ctypes
import importlib.util
import json
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

from fast import parallel
from policy import BIG, EMBEDDED, PICO, PICO_SWARM, Policy, in_bfloat16, pick_device

WINDOWS = os.name == "nt"


# -------------------------------------------------------------------------------------- the system


def peak_memory() -> float:
    """GiB that this process has held at once, at most; what it holds, if nobody counts that."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        memory = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """How many cores this container may use at a time (docker --cpus).

    None: no limit, or none that can be read. torch counts all cores that it sees.
    """
    try:
        if (root / "cpu.max").exists():  # version 2
            most, period = (root / "cpu.max").read_text(encoding="utf-8").split()
        else:
            files = (root / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            most, period = (file.read_text(encoding="utf-8") for file in files)
        return int(most) / int(period) if int(most) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # ValueError: "max"
        return None


def flush(path: Path) -> None:
    """Put a file's bytes, or a folder's names, on the disk and not only into memory."""
    if WINDOWS and path.is_dir():
        return  # there a folder cannot be opened
    handle = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def speak_utf8() -> None:
    """Print "→" and "±" also into a file or a pipe, where Windows would write its own code page."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not what a test or a notebook has put there
            stream.reconfigure(encoding="utf-8", errors="replace")


class Hung(BaseException):
    """No answer in time. No Exception, so that an environment's own `except` cannot swallow it."""


def in_time(seconds: float, call: Callable, *given):
    """call(*given), or Hung after so many seconds.

    In a main thread a timer signal interrupts whatever Python is doing, loops, sleeps and regular
    expressions included, but not C code that never comes back to Python. It rings again every
    second, in case the call swallows it.
    """
    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "setitimer") and hasattr(signal, "SIGALRM")):
        return in_thread(seconds, call, *given)
    armed = True

    def ring(*_):
        if armed:
            raise Hung(f"no answer within {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        return call(*given)
    finally:
        while True:  # it may ring in these very lines
            try:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
                break
            except Hung:
                pass


def in_thread(seconds: float, call: Callable, *given):
    """in_time where there are no timer signals: on Windows, and outside the main thread.

    Nobody can end a thread in Python. One that is late is left alone: a call that loops for ever
    goes on taking its share of this process, and only its result is ignored.
    """
    answers: list = []

    def work():
        try:
            answers.append((call(*given), None))
        except BaseException as error:  # whatever it is, it is the caller's
            answers.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise Hung(f"no answer within {seconds:g} seconds")
    answer, error = answers[0]
    if error is not None:
        raise error
    return answer


# ----------------------------------------------------------------------------------------- memory


class CannotGoOn(RuntimeError):
    """Known to go wrong; its one sentence says what to do (bookkeeping/guard.py prints it)."""


# Only torch's own allocator on CUDA raises OutOfMemoryError. Apple's, the driver and the libraries,
# which ask for workspace of their own, raise RuntimeError (or AcceleratorError, a kind of it).
NO_ROOM = (
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def out_of_memory(error: Exception) -> bool:
    """Is this a GPU without room?"""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_ROOM)


def give_back_memory() -> None:
    """Have the C library return freed memory to the system, if it can (glibc).

    It keeps freed memory for later, and batches of ever new lengths leave more and more holes in
    it: two hours of swarm grew by 138 MB per hour although no object was left over. It takes 0.08
    s, so it is called after long updates only.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


# --------------------------------------------------------------------------------- CPU and engine

NARROW, MOST_THREADS = 512, 8  # channels of a narrow model, and threads for it; a guess


def cpu_threads(cfg, policy: Policy) -> int:
    """--threads, or what OMP_NUM_THREADS says, or torch's choice within reason.

    More threads than cores wait for each other. A short run took 75 s with 64 threads on two cores,
    and 16 with two; 24 with two where a container may use one core, and 17 with one.
    """
    most = torch.get_num_threads()
    if cfg.threads or "OMP_NUM_THREADS" in os.environ:
        return cfg.threads or most
    if policy.lm.config.get_text_config().hidden_size <= NARROW:
        most = min(most, MOST_THREADS)
    return min(most, max(1, int(quota() or most)))


def use_cpu(device, threads: int) -> None:
    """Set torch's threads and, if the model is on a CPU, how it multiplies float32 matrices.

    torch's own choice is MKL, which takes AVX2 on AMD's CPUs even where they have AVX-512. With the
    precision "medium" it takes oneDNN, which there is 2.2 times as fast and as exact. On CPUs that
    multiply bfloat16 the same word means 3 digits in place of 7, and log-probs would not be those
    that were sampled: so its error is measured, here. (On a card it would mean TF32 or worse.)
    """
    torch.set_num_threads(threads)
    if torch.device(device).type == "cpu" and product_error("medium") < 1e-5:
        torch.set_float32_matmul_precision("medium")


def product_error(precision: str) -> float:
    """The relative error of a float32 product at one of torch's matmul precisions."""
    before = torch.get_float32_matmul_precision()
    x, weight = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
    exact = F.linear(x.double(), weight.double())
    torch.set_float32_matmul_precision(precision)
    found = F.linear(x, weight)
    torch.set_float32_matmul_precision(before)
    return ((found - exact).norm() / exact.norm()).item()


def engine_of(device) -> str:
    """What --engine auto means: vllm if it is installed, and the card computes in bfloat16."""
    has_vllm = torch.device(device).type == "cuda" and importlib.util.find_spec("vllm")
    return "vllm" if has_vllm and in_bfloat16(device) else "torch"


def which(cfg, device) -> tuple[str, str]:
    """(plain, torch or vllm, why) for cfg.engine on this device. ValueError if that cannot be."""
    if cfg.plain:
        return "plain", "--plain"
    on_card = torch.device(device).type == "cuda"
    if cfg.engine == "vllm" and on_card and not in_bfloat16(device) and cfg.lora_rank:
        raise ValueError(  # its kernels assert it (vllm/lora/ops/triton_ops/lora_shrink_op.py)
            "--engine vllm: this card has no bfloat16, and vLLM has no LoRA in float32; "
            "take --engine torch"
        )
    if cfg.engine != "auto":
        return cfg.engine, f"--engine {cfg.engine}"
    if engine_of(device) == "torch":
        if not on_card:
            return "torch", "vLLM is for NVIDIA cards"
        installed = importlib.util.find_spec("vllm")
        return "torch", "vLLM needs bfloat16" if installed else "vLLM is not installed"
    if parallel.world() > 1 and not cfg.async_rollouts:
        return "torch", "several processes train (--async-rollouts 1 uses vLLM)"
    return "vllm", "vLLM is installed"


def here(cfg, policy: Policy) -> str:
    """One line: on which device, in which number format and with which engine, and why."""
    engine, why = which(cfg, policy.device)
    kind, size = policy.device.type, f"{policy.n_parameters / 1e6:.1f}M parameters"
    wide = str(next(policy.lm.parameters()).dtype).removeprefix("torch.")
    reasons = [f"--device {cfg.device}"] if cfg.device != "auto" else []
    if kind == "cuda":
        name = torch.cuda.get_device_name(policy.device)
        where = f"{name} with {card_memory(policy.device):.0f} GB"
        if not in_bfloat16(policy.device):
            reasons.append("this card has no bfloat16")
        elif wide == "float32":
            reasons.append("all weights learn, and an Adam step is lost in bfloat16")
    elif kind == "mps":
        where = "Apple's GPU (MPS), on which we have not run it"
    else:
        n = torch.get_num_threads()
        where = f"{platform.machine()} CPU with {n} thread{'s' * (n != 1)}"
        if torch.backends.mps.is_available() and not reasons:
            reasons.append(f"a guess: {size} are faster here than on MPS, try --device mps")
        elif not reasons:
            reasons.append("no CUDA device")
    own = {"plain": "the plain sampler", "torch": "our own sampler", "vllm": "vLLM"}[engine]
    return f"here: {where}, {wide}, {own} ({'; '.join([*reasons, why])})"


# ------------------------------------------------------------------------------- what fits a card

# A run's peak is what it always holds (CUDA's context, the weights, what learns and its two moments
# in Adam) and the larger of sampling (a second copy of the weights, keys and values) and training
# (gradients, activations, the logits of a chunk). --model auto takes the largest model of ROOMY
# that fits and has room, and the first of MENDS that makes it fit. They change how an update is
# computed and never what is learnt; all that was typed stays as it is.
#
# GiB: weights in bfloat16; LoRA 32 in float32; and of 1,024 tokens the keys and values, an update's
# activations, and those with gradient checkpointing. Computed from the models' shapes by
# lab/speed/memory.py of commit 22b9273, which counted what autograd keeps; an H100 took less
# (docs/hardware.md).
SIZES = {
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (56.9, 0.1, 0.093, 7.15, 0.3),  # LoRA on attention only
    BIG: (7.5, 0.25, 0.141, 6.46, 0.41),
    "Qwen/Qwen3-1.7B": (3.21, 0.13, 0.11, 3.34, 0.24),
    "Qwen/Qwen3-0.6B": (1.11, 0.08, 0.11, 2.1, 0.11),
}
# GiB of the smallest card for which auto takes a model. By the plan each fits on less, but nobody
# has measured that, and it would be slow: activations computed twice, hardly any room to sample the
# 128 replies of a batch. Whoever wants that names the model, and is told what makes it fit.
ROOMY = {BIG: 32, "Qwen/Qwen3-1.7B": 20, "Qwen/Qwen3-0.6B": 0}
CONTEXT, LOGITS = 0.6, 1.4  # GiB: CUDA's own; the logits of a chunk and what goes with them
GRAPHS, VLLM_ROOM = 1.0, 2.3  # GiB: what vLLM keeps while it sleeps; what it needs beside its cache
ALL_WEIGHTS = 1.18  # times the activations if all weights learn: the norms' inputs are kept too
ROWS = 8  # conversations that our own sampler should play at once, at least
# The longest conversation: so many replies of so many tokens, and what is said between.
TALK = {
    "letters": (1, 2048, 192),
    "alphabet": (3, 768, 596),
    "swarm": (25, 512, 4700),
    "yours": (1, 512, 3584),
}
# What a run has unless it says otherwise: settings.py's defaults (a test compares).
DEFAULTS = {
    "lora_rank": 32,
    "k": 16,
    "micro_tokens": 8192,
    "gradient_checkpointing": False,
    "vllm_memory": 0.3,
    "vllm_sleep": True,
}
# What may be set to make it fit: the first that does is taken. A third of the speed is lost last.
MENDS = (
    {},
    {"micro_tokens": 4096},
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "micro_tokens": 4096},
)
SHARES = ({}, {"vllm_memory": 0.4}, {"vllm_memory": 0.5}, {"vllm_memory": 0.6})  # if vLLM samples
READ = {*DEFAULTS, "engine", "max_tokens", "async_rollouts", "plain"}  # flags that the plan reads


@dataclass(frozen=True)
class Card:
    gib: float  # usable, as torch reports it
    bfloat16: bool = True  # no: all of the plan in float32, twice as wide


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
    """GiB on a card, of a run of a model of SIZES."""

    sampling: float  # at the peak of sampling
    training: float  # at the peak of an update
    trainer: float  # … without what the sampler keeps meanwhile
    second: float  # of a second process on the same card, at its peak
    starts: bool  # False: vLLM has no room for its cache

    def peak(self, ahead: bool = False) -> float:
        """ahead: a second process samples while this one trains, and nothing is lent."""
        if not self.starts:
            return float("inf")
        return self.trainer + self.second if ahead else max(self.sampling, self.training)


def plan(model: str, env: str, card: Card, engine: str, settings: dict | None = None) -> Plan:
    """engine: torch or vllm; settings: what is not as in DEFAULTS."""
    s = DEFAULTS | (settings or {})
    weights, adapter, kv, plain, checkpointed = SIZES[model]
    wide = 1 if card.bfloat16 else 2
    talk = longest(env, s.get("max_tokens"))
    activations = checkpointed if s["gradient_checkpointing"] else plain
    activations *= max(s["micro_tokens"], talk) / 1024
    if s["lora_rank"]:
        learnt, copy = adapter * s["lora_rank"] / 32, wide * weights
        policy = copy + learnt
        update = wide * (LOGITS + activations)
    else:  # all weights learn, in float32; the forward pass makes a bfloat16 copy of them
        learnt = copy = policy = 2 * weights
        more = 1 if s["gradient_checkpointing"] else ALL_WEIGHTS
        update = wide * (LOGITS + weights + more * activations)
    held = CONTEXT + policy + 2 * learnt  # Adam has two moments of all that learns
    if engine == "vllm":
        rollout = s["vllm_memory"] * card.gib
        # Its cache needs room for 32,768 tokens, or for one conversation.
        least = wide * (weights + max(32, talk / 1024) * kv) + VLLM_ROOM
        starts = rollout >= least
        idle = GRAPHS if s["vllm_sleep"] else rollout
    else:  # our sampler's copy, and its keys and values, are as wide as the policy's weights
        starts, idle = True, copy
        tokens = sampled_at_once(env, s["k"], s.get("max_tokens"))
        rollout = copy + 1.08 * kv * tokens / 1024 * copy / weights + 0.3
    trainer = held + learnt + update  # a gradient is as large as what it is of
    second = rollout + CONTEXT + policy
    return Plan(held + rollout, trainer + idle, trainer, second, starts)


def longest(env: str, max_tokens: int | None = None) -> int:
    """Tokens of the longest conversation, with replies of up to max_tokens."""
    replies, usual, between = TALK.get(env, TALK["yours"])
    return replies * (max_tokens or usual) + between


def sampled_at_once(env: str, k: int, max_tokens: int | None = None) -> int:
    """Tokens that our own sampler must hold at least.

    A group's first replies, or a few whole conversations: from the second turn on each is sampled
    by itself.
    """
    _, usual, between = TALK.get(env, TALK["yours"])
    return max(int(k * (between + (max_tokens or usual))), ROWS * longest(env, max_tokens))


def card_memory(device) -> float:
    return torch.cuda.get_device_properties(device).total_memory / 2**30


def card_of(device) -> Card:
    return Card(card_memory(device), in_bfloat16(device))


def engines(device, asked: dict) -> list[str]:
    """Which engines may sample, the preferred one first (`which` takes it)."""
    if "engine" in asked:
        return [asked["engine"]]
    in_turn = parallel.world() > 1 and not asked.get("async_rollouts")
    if engine_of(device) == "torch" or in_turn or asked.get("plain"):
        return ["torch"]
    return ["vllm", "torch"]


def settings_that_fit(
    model: str, env: str, card: Card, engines: list[str], asked: dict | None = None
) -> tuple[dict, float] | None:
    """(what to set so that a run of this model fits the card, GiB at its peak). None: nothing does.

    engines: those that may sample, the preferred one first; asked: {flag: value} of what stays as
    it is.
    """
    asked, (first, *others) = asked or {}, engines
    tries = [share | mend for share, mend in product(SHARES if first == "vllm" else [{}], MENDS)]
    tries += [mend | {"engine": other} for other in others for mend in MENDS]
    for more in tries:
        if more.keys() & asked.keys():
            continue
        found = plan(model, env, card, more.get("engine", first), asked | more)
        peak = found.peak(bool(asked.get("async_rollouts")))
        if peak < card.gib:
            return more, peak
    return None


def fitting(env: str, card: Card, engines: list[str], asked: dict) -> dict[str, tuple[dict, float]]:
    """{model: settings_that_fit} of those that auto may take on this card, the largest first."""
    models = [model for model, least in ROOMY.items() if card.gib >= least]
    found = {model: settings_that_fit(model, env, card, engines, asked) for model in models}
    return {model: fits for model, fits in found.items() if fits}


def choose_model(
    name: str, env: str = "letters", device="auto", asked: dict | None = None
) -> tuple[str, str, dict]:
    """(path or hub id, one line that says why, what to set so that it fits).

    `auto` is the largest of ROOMY that fits here, else the embedded model. asked: {flag: value} of
    what stays as it is; None: nobody is going to train it. A model that was named gets no settings,
    but advice.
    """
    device, trained, asked = pick_device(device), asked is not None, asked or {}
    on_card = torch.device(device).type == "cuda"
    if name != "auto":
        advice = advise(name, env, device, asked) if on_card and trained and name in SIZES else ""
        return EMBEDDED.get(name, name), f"model {name}, as asked{advice}", {}
    small = PICO_SWARM if env == "swarm" else PICO
    fallback = f"so the embedded {small.name} (0.9M parameters) plays the policy"
    if not on_card:
        why = "a CPU was asked for" if torch.cuda.is_available() else "no CUDA device"
        return str(small), f"{why}, {fallback}", {}
    card, away = in_words(device), []
    found = fitting(env, card_of(device), engines(device, asked), asked)
    if not found:
        flags = typed({flag: value for flag, value in asked.items() if flag in READ})
        task = f"{list(ROOMY)[-1]} and --env {env} {flags}".strip()
        return str(small), f"{card} are too few for {task}, {fallback}", {}
    for model, (settings, peak) in found.items():
        if where := where_is(model):
            how = f"with {typed(settings)}" if settings else "as it is"
            why = f"{model} from {where}: the choice for {card}, {how}"
            why += f" (about {peak:.0f} GB, computed)"
            why += f"; the hub cannot be reached for {', '.join(away)}" if away else ""
            return model, why, settings
        away.append(model)
    return str(small), f"the hub cannot be reached for {', '.join(away)}, {fallback}", {}


def in_words(device) -> str:
    """A card's memory, and that it has no bfloat16."""
    there = f"{card_memory(device):.0f} GB of GPU memory"
    return there if in_bfloat16(device) else f"{there} in float32 (this card has no bfloat16)"


def advise(model: str, env: str, device, asked: dict) -> str:
    """What to say of a model that was named and does not fit; "" if it does."""
    found = settings_that_fit(model, env, card_of(device), engines(device, asked), asked)
    if found and not found[0]:
        return ""
    more = f"it fits with {typed(found[0])}" if found else "no setting that we know makes it fit"
    return f"; by the plan it does not fit {in_words(device)}: {more}"


def typed(settings: dict) -> str:
    """Settings as they are typed: --micro-tokens 4096 --gradient-checkpointing --no-vllm-sleep."""
    words = []
    for name, value in settings.items():
        no = "no-" if value is False else ""
        words.append(f"--{no}{name.replace('_', '-')}")
        if not isinstance(value, bool):
            words.append(str(value))
    return " ".join(words)


def where_is(model: str) -> str:
    """From where a model can be loaded; "" if it cannot."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    cached = lambda file: try_to_load_from_cache(model, file)  # a path, or something else
    index = cached("model.safetensors.index.json")
    weights = {"model.safetensors"}
    if isinstance(index, str):
        weights = {*json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()}
    # All of it: a download may have been broken off.
    if all(isinstance(cached(file), str) for file in ("config.json", "tokenizer.json", *weights)):
        return "the local cache"
    try:
        HfApi().model_info(model, timeout=5)
        return "the hub"
    except Exception:  # no network, a proxy that says no, a hub that is down: all the same here
        return ""


if __name__ == "__main__":
    print(f"{sys.platform}: at most {peak_memory():.2f} GiB held so far")
    print(f"cores: {os.cpu_count()}, of which a container may use: {quota() or 'all'}")
    for precision in ("highest", "medium"):
        print(f"float32 products at {precision}: relative error {product_error(precision):.0e}")
    for env in TALK:
        print(f"--env {env}:", choose_model("auto", env)[1])
    print("\nGiB of a run as --model auto takes it, with vLLM (on a T4 without):")
    for env, (name, card) in product(TALK, CARDS.items()):
        engine = "vllm" if card.bfloat16 else "torch"
        for model, (settings, _) in list(fitting(env, card, [engine], {}).items())[:1]:
            found = plan(model, env, card, engine, settings)
            sizes = f"sampling {found.sampling:5.1f}  training {found.training:5.1f}"
            print(f"  {env:9} {name:14} {sizes}  {model.split('/')[1]} {typed(settings)}")
