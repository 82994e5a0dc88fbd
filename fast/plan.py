"""What fits on a card: a plan of its memory, and the model and settings that `--model auto` takes.

    always       CUDA's context, the weights, what learns and its two moments in Adam
    sampling     a second copy of the weights; keys and values
    training     gradients, activations, the logits of a chunk

A run's peak is what it always holds and the larger of the other two (`needed`). auto takes the
largest model of SIZES that fits and has room (ROOMY), and the first of MENDS that makes it fit.
They change how an update is computed and never what is learnt: --max-tokens, --num-tasks and all
that was typed stay as they are. (Fewer --num-tasks would not help: a batch that is too large is
sampled in parts.)

The numbers are computed (lab/speed/memory.py, results/bench/memory.md); nothing of them has been
measured on a card yet.

Run me: `python -m fast.plan` says which model this machine would train in each environment.
"""

import importlib.util
import json
from itertools import product
from pathlib import Path

import torch

from fast import parallel
from policy import BIG, EMBEDDED, PICO, PICO_SWARM, in_bfloat16, pick_device

# GiB, computed by lab/speed/memory.py (a test compares): weights in bfloat16; LoRA 32 in float32;
# and of 1,024 tokens the keys and values, an update's activations, and those with gradient
# checkpointing. Largest first.
SIZES = {
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


def needed(model: str, env: str, device, engine: str, settings: dict, ahead: bool = False) -> float:
    """GiB at the peak of a run of a model of SIZES. inf: vLLM would not start.

    engine: torch or vllm; settings: what is not as in DEFAULTS; ahead: a second process samples on
    the same card.
    """
    s = DEFAULTS | settings
    weights, _, kv, *_ = SIZES[model]
    wide = 1 if in_bfloat16(device) else 2  # float32 takes twice as much
    own, copy, held, update = training(model, env, device, s)
    if engine == "vllm":
        rollout = s["vllm_memory"] * card_memory(device)
        room = max(32, longest(env, s.get("max_tokens")) / 1024)  # thousands of tokens
        if rollout < wide * (weights + room * kv) + VLLM_ROOM:  # for 32,768, or a conversation
            return float("inf")
        idle = GRAPHS if s["vllm_sleep"] else rollout
    else:  # our sampler's copy, and its keys and values, are as wide as the policy's weights
        idle = copy
        cache = kv * sampled_at_once(env, s["k"], s.get("max_tokens")) / 1024
        rollout = idle + 1.08 * cache * copy / weights + 0.3
    if ahead:  # nothing is lent, and the second process has a policy of its own
        return held + update + rollout + CONTEXT + own
    return held + max(update + idle, rollout)


def training(model: str, env: str, device, settings: dict) -> tuple[float, float, float, float]:
    """GiB of: the policy, a copy of it without adapter, all that a trainer always holds, and what
    an update takes in addition. Arguments as in `needed`."""
    s = DEFAULTS | settings
    weights, adapter, _, plain, checkpointed = SIZES[model]
    wide = 1 if in_bfloat16(device) else 2  # float32 takes twice as much
    per_thousand = checkpointed if s["gradient_checkpointing"] else plain
    thousands = max(s["micro_tokens"], longest(env, s.get("max_tokens"))) / 1024
    if s["lora_rank"]:
        learnt = adapter * s["lora_rank"] / 32
        copy, own = wide * weights, wide * weights + learnt
        activations = wide * (LOGITS + per_thousand * thousands)
    else:  # all weights learn, in float32; the forward pass makes a bfloat16 copy of them
        learnt = copy = own = 2 * weights
        per_thousand *= 1 if s["gradient_checkpointing"] else ALL_WEIGHTS
        activations = wide * (LOGITS + weights + per_thousand * thousands)
    held = CONTEXT + own + 2 * learnt  # Adam has two moments of all that learns
    return own, copy, held, learnt + activations  # a gradient is as large as what it is of


def longest(env: str, max_tokens: int | None = None) -> int:
    """Tokens of the longest conversation, with replies of up to max_tokens."""
    replies, usual, between = TALK.get(env, TALK["yours"])
    return replies * (max_tokens or usual) + between


def sampled_at_once(env: str, k: int, max_tokens: int | None = None) -> int:
    """Tokens that our own sampler must hold at least: a group's first replies, or a few whole
    conversations (from the second turn on each is sampled by itself)."""
    _, usual, between = TALK.get(env, TALK["yours"])
    whole = ROWS * longest(env, max_tokens)
    return max(int(k * (between + (max_tokens or usual))), whole)


def card_memory(device) -> float:
    return torch.cuda.get_device_properties(device).total_memory / 2**30


def engine_of(device) -> str:
    """What --engine auto means: vllm if it is installed, and the card computes in bfloat16."""
    has_vllm = torch.device(device).type == "cuda" and importlib.util.find_spec("vllm")
    return "vllm" if has_vllm and in_bfloat16(device) else "torch"


def engines(device, asked: dict) -> list[str]:
    """Which engines may sample, the preferred one first (fast/engine.py takes it)."""
    if "engine" in asked:
        return [asked["engine"]]
    in_turn = parallel.world() > 1 and not asked.get("async_rollouts")
    if engine_of(device) == "torch" or in_turn or asked.get("plain"):
        return ["torch"]
    return ["vllm", "torch"]


def settings_that_fit(
    model: str, env: str, device="auto", asked: dict | None = None
) -> tuple[dict, float] | None:
    """(what to set so that a run of this model fits its card, GiB at its peak). None: nothing does.

    asked: {flag: value} of what stays as it is.
    """
    device, asked = pick_device(device), asked or {}
    first, *others = engines(device, asked)
    tries = [share | mend for share, mend in product(SHARES if first == "vllm" else [{}], MENDS)]
    tries += [mend | {"engine": other} for other in others for mend in MENDS]
    for more in tries:
        if more.keys() & asked.keys():
            continue
        engine, ahead = more.get("engine", first), bool(asked.get("async_rollouts"))
        peak = needed(model, env, device, engine, asked | more, ahead)
        if peak < card_memory(device):
            return more, peak
    return None


def choose_model(
    name: str, env: str = "letters", device="auto", asked: dict | None = None
) -> tuple[str, str, dict]:
    """(path or hub id, one line that says why, what to set so that it fits).

    `auto` is the largest of SIZES that fits here, else the embedded model. asked: {flag: value} of
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
    sizes = [model for model, least in ROOMY.items() if card_memory(device) >= least]
    fitting = {model: settings_that_fit(model, env, device, asked) for model in sizes}
    fitting = {model: found for model, found in fitting.items() if found}
    if not fitting:
        flags = typed({flag: value for flag, value in asked.items() if flag in READ})
        task = f"{list(SIZES)[-1]} and --env {env} {flags}".strip()
        return str(small), f"{card} are too few for {task}, {fallback}", {}
    for model, (settings, peak) in fitting.items():
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
    found = settings_that_fit(model, env, device, asked)
    if found and not found[0]:
        return ""
    more = f"it fits with {typed(found[0])}" if found else "no setting that we know makes it fit"
    return f"; by the plan it does not fit {in_words(device)}: {more}"


def typed(settings: dict) -> str:
    """Settings as they are typed: --micro-tokens 4096 --gradient-checkpointing --no-vllm-sleep."""
    words = []
    for name, value in settings.items():
        no = "no-" if value is False else ""
        words += [f"--{no}{name.replace('_', '-')}"]
        words += [] if isinstance(value, bool) else [str(value)]
    return " ".join(words)


def where_is(model: str) -> str:
    """From where a model can be loaded; "" if it cannot."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    here = lambda file: isinstance(found := try_to_load_from_cache(model, file), str) and found
    index = here("model.safetensors.index.json")
    weights = {"model.safetensors"}
    if index:
        weights = {*json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()}
    # All of it: a download may have been broken off.
    if all(map(here, ("config.json", "tokenizer.json", *weights))):
        return "the local cache"
    try:
        HfApi().model_info(model, timeout=5)
        return "the hub"
    except Exception:  # no network, a proxy that says no, a hub that is down: all the same here
        return ""


if __name__ == "__main__":
    for env in TALK:
        print(f"--env {env}:", choose_model("auto", env)[1])
