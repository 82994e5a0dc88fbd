"""Which engine samples: ours, vLLM or, for readers, the plain one.

All three have the interface of fast/sampler.TorchSampler: sync, asleep, sample.

Run me: `python -m fast.engine` says which one samples from pico_base here, and why.
"""

import importlib.util
import os
import platform

import torch

from fast import parallel
from fast.decoder import FastDecoder
from fast.machine import quota
from fast.plan import card_memory, engine_of, longest
from fast.sampler import TorchSampler
from fast.trunk import WIDEST
from policy import PlainSampler, Policy, in_bfloat16

MOST_THREADS = 8  # for a narrow model; nobody has run it on more than two


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


def cpu_threads(cfg, policy: Policy) -> int:
    """--threads, or what OMP_NUM_THREADS says, or torch's choice within reason.

    More threads than cores wait for each other. A short run took 75 s with 64 threads on two cores,
    and 16 with two; 24 with two where a container may use one core, and 17 with one.
    """
    most = torch.get_num_threads()
    if cfg.threads or "OMP_NUM_THREADS" in os.environ:
        return cfg.threads or most
    if policy.lm.config.get_text_config().hidden_size <= WIDEST:
        most = min(most, MOST_THREADS)
    return min(most, max(1, int(quota() or most)))


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


def make_sampler(cfg, policy: Policy):
    """The engine that `which` names."""
    engine, _ = which(cfg, policy.device)
    if engine == "plain":
        return PlainSampler(policy)
    if engine == "vllm":
        from fast.vllm_engine import VllmSampler

        return VllmSampler(
            policy, cfg.vllm_memory, seeded=cfg.vllm_seeds, sleeps=cfg.vllm_sleep,
            longest=longest(cfg.env, cfg.max_tokens),
        )  # fmt: skip
    sampler = TorchSampler(policy)
    copies = isinstance(sampler.decoder, FastDecoder)
    if policy.device.type == "cuda" and policy.lora_rank == 0 and copies:
        size = policy.n_parameters * 4 / 2**30
        print(
            f"--lora-rank 0: our sampler holds a float32 copy of the weights, {size:.1f} GiB more"
        )
    print(sampler.decoder.why)
    return sampler


if __name__ == "__main__":
    from types import SimpleNamespace

    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    prompt = policy.tokenizer("Count the letters")["input_ids"]
    for plain in (False, True):
        cfg = SimpleNamespace(
            plain=plain, engine="auto", device="auto", lora_rank=0, async_rollouts=0
        )
        cfg.vllm_memory, cfg.vllm_seeds, cfg.vllm_sleep = 0.3, True, True
        print(here(cfg, policy))
        sampler = make_sampler(cfg, policy)
        sample = sampler.sample([prompt], 1, 8, 1.0, [[(0,)]])[0][0]
        said = policy.tokenizer.decode(sample.token_ids)
        print(f"--plain {plain}: {type(sampler).__name__} samples {said!r}")
