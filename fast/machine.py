"""The machine that a run is on: its system, its memory, its engine, and the model that fits.

    what                    Linux            macOS            Windows
    peak memory             resource, KiB    resource, bytes  psutil: current memory
    time limit of a call    SIGURG           SIGURG           a thread, abandoned if late
    quota of a container    cgroup, v2       none             none

We run it on Linux only; tests/test_machine.py takes away what the others lack. The second half of
the file chooses a model that fits a card, and settings that fit a CPU's memory.

Run me: `python -m fast.machine` says what this machine has, and what fits on which card.
"""

import decimal
import importlib.util
import locale
import os
import pickle
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import cache, partial
from math import inf
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fast import parallel
from fast.logprobs import SHORT, token_logprobs
from policy import EMBEDDED, PICO, PICO_SWARM, Policy

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
    with suppress(OSError, ValueError):  # no such file, or "max"
        most, period = (root / "cpu.max").read_text(encoding="utf-8").split()
        return int(most) / int(period)


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
    """call(*given), which is other people's code; raises Hung after so many seconds.

    What it changes for the whole process is put back (STATE).
    """
    in_main = threading.current_thread() is threading.main_thread()
    limited = by_signal if in_main and hasattr(signal, "SIGALRM") else in_thread
    with undisturbed():
        return limited(seconds, call, *given)


def by_signal(seconds: float, call: Callable, *given):
    """in_time in a main thread.

    A signal interrupts whatever Python is doing, loops, sleeps and regular expressions included,
    but not C code that never returns to Python. A thread of ours sends it: SIGALRM and its timer
    belong to the call, which may have a limit of its own. It comes again every second, because the
    call may swallow Hung. From the second time on, Hung is also raised in the line after the one
    that swallowed it, which ends `while True: try: … except: pass`.
    """
    over, rung = threading.Event(), []
    late = partial(Hung, f"no answer within {seconds:g} seconds")

    def ring(number, frame):
        if over.is_set():
            return
        if rung:
            sys.settrace(trap)
        while rung and frame.f_code.co_filename != __file__:
            frame.f_trace = trap
            frame = frame.f_back
        rung.append(number)
        raise late()

    def trap(frame, event, _):  # as a debugger's, for each line
        ours = over.is_set() or frame.f_code.co_filename == __file__
        if event in ("line", "call") and not ours:
            raise late()

    def watch():
        pause = seconds
        while not over.wait(pause):
            pause = 1.0
            signal.pthread_kill(threading.main_thread().ident, signal.SIGURG)

    signal.signal(signal.SIGURG, ring)  # if nobody handles it, it does nothing
    signal.signal(signal.SIGALRM, ring)  # else an alarm without a handler ends the process
    try:
        try:
            threading.Thread(target=watch, daemon=True).start()
            return call(*given)
        finally:
            over.set()
    finally:  # again, because it may have rung in the line above
        over.set()
        signal.alarm(0)  # it may have forgotten its own


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
    if not wait([answer], seconds).done:
        raise Hung(f"no answer within {seconds:g} seconds")
    return answer.result()


def working_folder() -> str | None:
    with suppress(OSError):  # it may have been removed
        return os.getcwd()


SIGNALS = "INT TERM ALRM URG HUP QUIT CHLD PIPE USR1 USR2 VTALRM PROF XCPU".split()
# What other people's code may change for the whole process: (how it is read, how it is put back).
# Environment variables, sys.path and imported modules are not here: by them it finds its things.
STATE = (
    *(
        (partial(signal.getsignal, number), partial(signal.signal, number))
        for number in (getattr(signal, f"SIG{name}", None) for name in SIGNALS)
        if number
    ),
    *(
        (partial(getattr, sys, name), partial(setattr, sys, name))
        for name in ("stdin", "stdout", "stderr", "excepthook")
    ),
    # HumanEval's reliability_guard leaves os.chdir, shutil.rmtree and thirty others None.
    *((partial(dict, vars(module)), vars(module).update) for module in (os, shutil, subprocess)),
    (working_folder, os.chdir),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.gettrace, sys.settrace),
    (partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
    (lambda: warnings.filters[:], partial(setattr, warnings, "filters")),
    (lambda: decimal.getcontext().prec, lambda prec: setattr(decimal.getcontext(), "prec", prec)),
    (random.getstate, random.setstate),
    (np.geterr, lambda how: np.seterr(**how)),
    (lambda: pickle.dumps(np.random.get_state()), lambda s: np.random.set_state(pickle.loads(s))),
    (
        lambda: torch.default_generator.get_state().numpy().tobytes(),
        lambda state: torch.set_rng_state(torch.tensor([*state], dtype=torch.uint8, device="cpu")),
    ),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    *(
        (partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind))
        for kind in ("cpu", "cuda")
    ),
    # None and not "cpu", which would slow down every call of torch.
    (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
)
theirs: dict[tuple, object] = {}  # {row of STATE: what other people's code has set it to}


@contextmanager
def undisturbed():
    """A context for other people's code: STATE and torch's modes are put back at its end.

    The code finds its own settings again the next time. So its random numbers go on, and not one of
    ours is drawn.
    """
    ours = [read() for read, _ in STATE]
    for (_, put), value in reversed(theirs.items()):
        with suppress(Exception):  # a folder may be gone
            put(value)
    try:
        with torch.inference_mode(False):  # its end also puts back whether there are gradients
            yield
    finally:
        for (read, put), own in zip(STATE, ours):
            theirs.pop((read, put), None)
            found = read()
            if found != own:
                theirs[read, put] = found
                with suppress(Exception):
                    put(own)


# ----------------------------------------------------------------------------------------- memory


class CannotGoOn(RuntimeError):
    """A known failure; its one sentence says what to do (bookkeeping/refusals.py prints it)."""


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


def first_line(error: BaseException) -> str:
    """An error in one line, to be quoted in a sentence of ours."""
    # A line that ends with a colon says nothing without the next one.
    said = re.sub(r":\s*\n", ": ", shown(error, str).strip())
    line = (said or "no message").splitlines()[0]
    return f"{type(error).__name__}: {line}"[:300]


def shown(value, how: Callable = repr) -> str:
    """repr or str of anything, even if other people's own raises."""
    try:
        return how(value)
    except BaseException:
        return f"a {type(value).__name__} that cannot be shown"


# ---------------------------------------------------------------------------------------- devices

FOR_MPS = 50e6  # parameters from which a Mac's GPU is used: a guess, not measured


def pick_device(device: str, n_parameters: float = 0) -> str:
    """What --device means here, for a model of that size.

    auto: an NVIDIA card; else a Mac's GPU (MPS), but not for a model as small as the embedded ones,
    whose steps are dominated by the time it takes to start each operation; else the CPU. SystemExit
    if there is no such device, or if torch cannot use the card that this machine has: a run on the
    CPU instead would look right and take days.
    """
    there = ["cpu"]
    if torch.backends.mps.is_available():
        there.append("mps")
    if torch.cuda.is_available():
        there += ["cuda", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
    elif device.startswith(("auto", "cuda")):
        refuse_hidden_card(device)
    if device == "auto":
        # gloo, which adds up gradients of several processes, cannot do so on MPS
        on_mac = "mps" in there and n_parameters > FOR_MPS and not dist.is_initialized()
        return "cuda" if "cuda" in there else "mps" if on_mac else "cpu"
    if device not in (*there, "meta"):  # meta holds no numbers: tests plan on it
        raise SystemExit(f"--device {device}: torch finds none here; there is {', '.join(there)}")
    return device


def refuse_hidden_card(device: str) -> None:
    """SystemExit with what helps if this machine has an NVIDIA card and torch finds none."""
    driver = nvidia_driver()
    if not driver or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):  # hidden on purpose
        return
    if not torch.version.cuda:
        raise SystemExit(
            f"--device {device}: this machine has an NVIDIA card (driver {driver}), but torch "
            f"{torch.__version__} is a build without CUDA; on Linux, pip install "
            f"--force-reinstall torch=={torch.__version__.split('+')[0]} brings the other (with "
            "uv, see docs/hardware.md), or take --device cpu"
        )
    raise SystemExit(
        f"--device {device}: the NVIDIA driver {driver} answers, but torch (for CUDA "
        f"{torch.version.cuda}) finds no card: the driver is probably too old (nvidia-smi names "
        "the newest CUDA that it runs); update the driver, take a torch for an older CUDA "
        "(pytorch.org; vLLM will not fit it), or take --device cpu"
    )


def nvidia_driver() -> str:
    """The version of NVIDIA's driver, as nvidia-smi says it; "" without a card."""
    with suppress(OSError, subprocess.SubprocessError):  # mostly: there is no nvidia-smi
        lines = subprocess.check_output(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            text=True,
            timeout=30,
            stderr=subprocess.DEVNULL,
        )
        return lines.partition("\n")[0].strip()  # a line per card
    return ""


# Parameters up to which a model computes in float32 on every card. SmolLM2 (135M) took no more time
# in it on an H200, and clip, the default of --importance for its size, goes wrong in bfloat16
# (docs/hardware.md, results/card.json). 200M is a guess from that one model.
SMALL = 200e6


def in_bfloat16(device, n_parameters: float = inf) -> bool:
    """Does a model of this size compute in bfloat16 on this device?

    Not on CPUs (where --dtype decides), Macs, or cards older than Ampere (a T4): those use float32.
    float16, which a T4 would compute faster, ends at 65,504: its gradients would need to be scaled,
    and nothing here does that.
    """
    kind = torch.device(device).type
    ampere = kind == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
    return (ampere or kind == "meta") and n_parameters > SMALL


# --------------------------------------------------------------------------------- CPU and engine

NARROW, MOST_THREADS = 512, 8  # most channels of a narrow model, most threads for it; a guess


def cpu_name() -> str:
    """As the kernel knows it; on another system than Linux, its architecture."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        return text.partition("model name\t: ")[2].partition("\n")[0]
    return platform.machine()


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

    oneDNN keeps code for each shape that it has multiplied, by default for 1,024. In two runs of
    letters that was 1.4 and 2.9 GB more than with 64, and no faster. (Then each step of the sampler
    had its own shapes; now 32 steps share them. pico_base samples as fast either way.)
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # read at its first product
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
        "vLLM needs bfloat16, and here it is float32": exact,
        "several processes train (--async-rollouts 1 uses vLLM)": (
            parallel.world() > 1 and not cfg.async_rollouts
        ),
        # Last: it names gigabytes to install, which none of the others would use.
        "vLLM is not installed: pip install -r requirements/gpu.txt": (
            not importlib.util.find_spec("vllm")
        ),
    }
    why = next((reason for reason, holds in against.items() if holds), "")
    return ("torch", why) if why else ("vllm", "vLLM is installed")


SAMPLERS = {"plain": "the plain sampler", "torch": "our own sampler", "vllm": "vLLM"}


def here(cfg, policy: Policy) -> str:
    """One line: on which device, in which number format and with which engine, and why."""
    engine, why = which(cfg, policy.device, policy.n_parameters)
    numbers = str(next(policy.lm.parameters()).dtype).removeprefix("torch.")
    where = "Apple's GPU (MPS), which we have not tested"
    if policy.device.type == "cuda":
        name = torch.cuda.get_device_name(policy.device)
        where = f"{name} with {card_of(policy.device):.0f} GB of GPU memory"
    if policy.device.type == "cpu":
        n = torch.get_num_threads()
        where = f"{platform.machine()} CPU with {n} thread{'s' * (n != 1)}"
        numbers = "products in bfloat16" if policy.bfloat16 else numbers
    return f"here: {where}, {numbers}, {SAMPLERS[engine]} ({why})"


# ------------------------------------------------------------------------------- what fits a card

# What --model auto takes on a card of at least so many GiB: the model, and settings that make an
# update of it fit, with vLLM (its share: fast/vllm_engine.py) or without. They change how an update
# is computed and never what is learned. All are computed from the models' shapes and none was
# measured; on an H200 a 4B took 42.4 GiB where 43.8 were computed (docs/hardware.md).
BIG = "Qwen/Qwen3-4B-Instruct-2507"
SMALLER, CHECKPOINTED = {"micro_tokens": 4096}, {"gradient_checkpointing": True}
AUTO = [
    (70, BIG, {}),
    (37, BIG, SMALLER),
    (21, "Qwen/Qwen3-1.7B", SMALLER),
    (14, "Qwen/Qwen3-0.6B", SMALLER),
    (7, "Qwen/Qwen3-0.6B", {"engine": "torch"} | CHECKPOINTED),
]
# In swarm one conversation can be longer than micro_tokens.
AUTO_SWARM = [
    (125, BIG, {}),
    (70, BIG, CHECKPOINTED),
    (37, BIG, CHECKPOINTED),
    (21, "Qwen/Qwen3-1.7B", CHECKPOINTED),
    (14, "Qwen/Qwen3-0.6B", CHECKPOINTED),
]
# The longest conversation: (replies, all tokens in between).
TALK = {"letters": (1, 192), "alphabet": (3, 596), "swarm": (25, 4700)}
MOST_TOKENS = 8192  # --micro-tokens, unless memory is short


def longest_conversation(env: str, max_tokens: int, opening=3584, turns: int | None = None) -> int:
    """Tokens of the longest conversation, with replies of max_tokens.

    Of your own environment only two things are known: opening, the tokens of its first prompt, and
    turns, the most replies, if it says so.
    """
    replies, between = TALK.get(env, (turns or 1, opening))
    return replies * max_tokens + between


# More tokens than TALK says: another tokenizer, or the hardest level (letters of tier 10: 593).
MARGIN = 1024
# Tokens of a conversation that may have any length. A model's own limit may be far more: for the
# 262,144 of Qwen3-4B vLLM would want 36 GiB of cache before it starts.
UNKNOWN = 32768


def room_for_talk(cfg) -> int:
    """Tokens of a conversation that vLLM has to make room for, or it does not start."""
    needed = longest_conversation(cfg.env, cfg.max_tokens) + MARGIN
    # A setting may change how many turns there are.
    return needed if cfg.env in TALK and not cfg.set else max(needed, UNKNOWN)


def card_of(device) -> float:
    """GiB of a card, as torch reports them."""
    return torch.cuda.get_device_properties(device).total_memory / 2**30


def flags_of(settings: dict) -> str:
    """Settings as one would type them."""
    typed = [name if x is True else f"{name} {x}" for name, x in settings.items()]
    return " ".join(f"--{text.replace('_', '-')}" for text in typed) or "the defaults"


def choose_model(
    name: str, env: str = "letters", device="auto", asked: dict | None = None
) -> tuple[str, str, dict]:
    """(path or hub id, one line that says why, settings that make it fit).

    `auto` is the largest model of AUTO that fits here and can be fetched, else the embedded one.
    asked: {flag: value} that stay as they are.
    """
    device = pick_device(device)
    if name != "auto":
        return EMBEDDED.get(name, name), f"model {name}, as asked", {}
    why = "a CPU was asked for" if torch.cuda.is_available() else "no CUDA device"
    if torch.device(device).type == "cuda":
        card = f"{card_of(device):.0f} GB of GPU memory"
        room = card_of(device) / (1 if in_bfloat16(device) else 2)  # float32 is twice as wide
        why = f"no Qwen3 fits {card} with --env {env}"
        for least, model, fits in AUTO_SWARM if env == "swarm" else AUTO:
            if room >= least and within_reach(model):
                settings = {flag: x for flag, x in fits.items() if flag not in (asked or {})}
                how = flags_of(settings)
                return model, f"{model}: the choice for {card}, with {how} (computed)", settings
            if room >= least:
                why = f"the hub cannot be reached for {model}, and the cache does not have it"
    small = PICO_SWARM if env == "swarm" else PICO
    return str(small), f"{why}, so the embedded {small.name} (0.9M parameters) is the policy", {}


@cache
def within_reach(model: str) -> bool:
    """Is it in the local cache, or does the hub answer?"""
    from huggingface_hub import hf_hub_download

    with suppress(Exception):  # no network, a proxy that refuses, a hub that is down: all the same
        hf_hub_download(model, "config.json", etag_timeout=5)
        return True
    return False


# ------------------------------------------------------------------------- what fits a CPU's memory

# GiB of activations at once, 680 tokens of SmolLM2: a group of eight replies of 64 tokens. Where a
# group was cut, and its prompt read twice, training on 64 such replies took 1.4 times as long, and
# the peak was the same (grpo.update timed by hand at commit 9f5bdb11, two cores, twice).
ENOUGH = 0.9


def kept_per_token(policy: Policy, longest: int, tokens: int = 32) -> float:
    """GiB that autograd keeps per token for the backward pass; measured on a text of `tokens`.

    longest: tokens of a conversation. Short ones run other layers (fast/logprobs.py).
    """
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    kept = {}  # {address: the storage}, so that none is counted twice

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = torch.arange(max(longest, tokens + 1), device=policy.device)[None] % 64
    mask = (torch.arange(ids.shape[1] - 1) < tokens)[None].to(policy.device)  # no more are run
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(policy, ids, mask)
    return sum(kept[place].nbytes() for place in kept.keys() - weights) / tokens / 2**30


def fit_memory(cfg, policy: Policy, opening: int, turns: int | None = None) -> str:
    """Choose settings that make an update fit a CPU's memory, unless typed; returns a line on it.

    opening: tokens of the first prompt; turns: the most replies. If the environment does not say
    (None), the plan is for one. ValueError if not even one conversation fits.
    """
    if policy.device.type != "cpu" or cfg.micro_tokens:
        cfg.micro_tokens = cfg.micro_tokens or MOST_TOKENS
        return ""
    free = free_memory() / parallel.world()
    width = lambda weights: sum(w.nbytes for w in weights) / 2**30
    # Copies with LoRA folded in: one, and one more of a second process or of a reference. Gradients
    # and Adam's two moments; logits and other temporaries.
    copies = (1 + bool(cfg.async_rollouts or cfg.kl)) * width(policy.lm.parameters())
    room = free - copies - 3 * width(policy.trainable().values()) - 0.5
    longest = longest_conversation(cfg.env, cfg.max_tokens, opening, turns)
    by_the_model = cfg.plain or cfg.gradient_checkpointing
    kept = kept_per_token(policy, SHORT + 1 if by_the_model else longest)
    if kept * longest > room and not differs_in_training(policy.lm):
        cfg.gradient_checkpointing = True
    if cfg.gradient_checkpointing:
        kept = checkpointed(policy, kept)
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


def checkpointed(policy: Policy, kept: float) -> float:
    """GiB per token with gradient checkpointing: the input of each layer, and all of one layer."""
    shape = policy.lm.config.get_text_config()
    one = kept / shape.num_hidden_layers
    return one + shape.num_hidden_layers * shape.hidden_size * 4 / 2**30


@torch.no_grad()
def differs_in_training(lm: torch.nn.Module) -> bool:
    """Does training mode change what the model computes, by dropout for example?

    Wherever it is written: a model that drops something draws random numbers, even in a pass that
    happens to drop nothing.
    """
    random_states = lambda: [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    before = random_states()
    lm.train()
    lm(input_ids=torch.arange(1, 17, device=lm.device)[None], use_cache=False)
    lm.eval()
    return not all(map(torch.equal, before, random_states()))


def checkpoint_activations(policy: Policy) -> None:
    """Keep only each layer's input for the backward pass.

    ValueError if the model has dropout.
    """
    if differs_in_training(policy.lm):
        raise ValueError(
            "--gradient-checkpointing: it would also turn on this model's dropout; leave it out, "
            "or set dropout to 0"
        )
    policy.lm.gradient_checkpointing_enable()
    policy.lm.enable_input_require_grads()  # else a checkpoint passes no gradients on
    policy.checkpointing = True


if __name__ == "__main__":
    print(f"cores: {os.cpu_count()}, of which a container may use: {quota() or 'all'}")
    print(
        f"NVIDIA driver: {nvidia_driver() or 'none answers'}; torch {torch.__version__}; "
        f"vLLM is {'' if importlib.util.find_spec('vllm') else 'not '}installed"
    )
    print(f"--model auto: {choose_model('auto')[1]}")  # or why torch cannot use the card
    for env, rows in {"letters": AUTO, "swarm": AUTO_SWARM}.items():
        print(f"\nWhat --model auto takes for {env}, on a card of at least so many GiB:")
        for least, model, fits in rows:
            print(f"{least:4}  {model:27}  {flags_of(fits)}")
