"""What fits on a card: a plan of its memory, and which model `--model auto` takes.

The numbers are computed (lab/speed/memory.py, results/bench/memory.md); nothing of them has been
measured on a card yet. A run's peak is the larger of sampling and training, plus what both hold.

Run me: `python -m fast.plan` says which model this machine would train in each environment.
"""

import importlib.util

import torch

from policy import BIG, EMBEDDED, PICO, PICO_SWARM, in_bfloat16, pick_device

# GiB, computed by lab/speed/memory.py (a test compares): weights in bfloat16; LoRA 32 with its
# gradients and moments; and of 1,024 tokens the keys and values, an update's activations, and those
# with gradient checkpointing. Largest first.
SIZES = {
    BIG: (7.5, 1.0, 0.141, 6.46, 0.41),
    "Qwen/Qwen3-1.7B": (3.21, 0.52, 0.11, 3.34, 0.24),
    "Qwen/Qwen3-0.6B": (1.11, 0.3, 0.11, 2.1, 0.1),
}
CONTEXT, LOGITS = 0.6, 1.4  # GiB: CUDA's own; the logits of a chunk and what goes with them
GRAPHS, VLLM_ROOM = 1.0, 2.3  # GiB: what vLLM keeps while it sleeps; what it needs beside its cache
# Tokens of the longest conversation: prompt, replies of --max-tokens, and what is said between.
LONGEST = {"letters": 2240, "alphabet": 2900, "swarm": 17500, "yours": 4096}
ROWS = 8  # conversations that our own sampler should play at once, at least
# What may be set to make it fit, the first that fits is taken. A third of the time is lost last.
MENDS = (
    {},
    {"micro_tokens": 4096},
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "micro_tokens": 4096},
)


def needed(model: str, env: str, device, engine: str, settings: dict, ahead: bool = False) -> float:
    """GiB at the peak of a run with LoRA of a model of SIZES. inf: vLLM would not start.

    engine: torch or vllm; settings: some of MENDS and vllm_memory; ahead: a second process samples
    on the same card.
    """
    weights, learnt, kv, plain, checkpointed = SIZES[model]
    wide = 1 if in_bfloat16(device) else 2  # float32 takes twice as much
    longest = LONGEST.get(env, LONGEST["yours"])
    thousands = max(settings.get("micro_tokens", 8192), longest) / 1024
    checkpoints = settings.get("gradient_checkpointing", False)
    update = wide * (LOGITS + (checkpointed if checkpoints else plain) * thousands)
    held = CONTEXT + wide * weights + learnt
    if engine == "vllm":
        rollout = settings.get("vllm_memory", 0.3) * card_memory(device)
        if rollout < wide * (weights + 32 * kv) + VLLM_ROOM:  # room for 32,768 tokens
            return float("inf")
        idle = GRAPHS
    else:
        idle = wide * weights
        rollout = idle + wide * 1.08 * (kv * ROWS * longest / 1024) + 0.3
    if ahead:  # nothing is lent, and the second process has weights of its own
        return held + update + rollout + CONTEXT + wide * weights + learnt / 4
    return held + max(update + idle, rollout)


def card_memory(device) -> float:
    return torch.cuda.get_device_properties(device).total_memory / 2**30


def engine_of(device) -> str:
    """What --engine auto means: vllm if it is installed, and the card computes in bfloat16."""
    has_vllm = torch.device(device).type == "cuda" and importlib.util.find_spec("vllm")
    return "vllm" if has_vllm and in_bfloat16(device) else "torch"


def settings_that_fit(model: str, env: str, device="auto") -> dict | None:
    """What to set so that a run of this model fits its card; {} if the defaults fit, None: nothing.

    A model that is not in SIZES gets {}: nobody has computed it.
    """
    device = pick_device(device)
    if torch.device(device).type != "cuda" or model not in SIZES:
        return {}
    tries = [({}, engine_of(device)), ({"engine": "torch"}, "torch")]
    for more, engine in tries:
        for mend in MENDS:
            if needed(model, env, device, engine, mend) < card_memory(device):
                return mend | (more if engine != engine_of(device) else {})
    return None


def choose_model(
    name: str, env: str = "letters", device="auto", adjust: bool = False
) -> tuple[str, str]:
    """(path or hub id, one line that says why). `auto` is the largest of SIZES that fits here.

    adjust: the caller will set what settings_that_fit says; else only what fits with the defaults.
    """
    if name != "auto":
        return EMBEDDED.get(name, name), f"model {name}, as asked"
    small, device = PICO_SWARM if env == "swarm" else PICO, pick_device(device)
    fallback = f"so the embedded {small.name} (0.9M parameters) plays the policy"
    if torch.device(device).type != "cuda":
        asked = "a CPU was asked for" if torch.cuda.is_available() else "no CUDA device"
        return str(small), f"{asked}, {fallback}"
    found = {model: settings_that_fit(model, env, device) for model in SIZES}
    fitting = {m: s for m, s in found.items() if s is not None and (adjust or not s)}
    card = f"{card_memory(device):.0f} GB of GPU memory"
    card += "" if in_bfloat16(device) else " in float32 (this card has no bfloat16)"
    if not fitting:
        return str(small), f"{card} are too few for {list(SIZES)[-1]} and {env}, {fallback}"
    for model, settings in fitting.items():
        if where := where_is(model):
            how = typed(settings) or "the defaults"
            return model, f"{model} from {where}: the largest that fits {card}, with {how}"
    return str(small), f"the hub cannot be reached for {', '.join(fitting)}, {fallback}"


def typed(settings: dict) -> str:
    """Settings as they are typed: --micro-tokens 4096 --gradient-checkpointing."""
    flags = (f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
    return " ".join(flags).replace(" True", "")


def where_is(model: str) -> str:
    """From where a model can be loaded; "" if it cannot."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return "the local cache"
    try:
        HfApi().model_info(model, timeout=5)
        return "the hub"
    except Exception:  # no network, a proxy that says no, a hub that is down: all the same here
        return ""


if __name__ == "__main__":
    for env in ("letters", "alphabet", "swarm"):
        print(f"--env {env}:", *choose_model("auto", env))
