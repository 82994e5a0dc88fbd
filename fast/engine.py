"""Which engine samples: ours, vLLM or, for readers, the plain one.

All three have the interface of fast/sampler.TorchSampler: sync, asleep, sample.

Run me: `python -m fast.engine` says which one samples from pico_base here.
"""

import importlib.util

from fast import parallel
from fast.sampler import TorchSampler
from policy import PlainSampler, Policy


def make_sampler(cfg, policy: Policy):
    """The engine: plain, or vLLM if asked for (cfg.engine) or installed beside a GPU, or ours."""
    if cfg.plain:
        return PlainSampler(policy)
    has_vllm = policy.device.type == "cuda" and importlib.util.find_spec("vllm")
    if has_vllm and cfg.engine == "auto" and parallel.world() > 1:
        print("several processes train, so our own sampler samples (--async-rollouts 1 uses vLLM)")
        return TorchSampler(policy)
    if cfg.engine == "vllm" or (cfg.engine == "auto" and has_vllm):
        from fast.vllm_engine import VllmSampler

        return VllmSampler(policy, cfg.vllm_memory)
    return TorchSampler(policy)


if __name__ == "__main__":
    from types import SimpleNamespace

    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    prompt = policy.tokenizer("Count the letters")["input_ids"]
    for plain in (False, True):
        cfg = SimpleNamespace(plain=plain, engine="auto", vllm_memory=0.3)
        sampler = make_sampler(cfg, policy)
        sample = sampler.sample([prompt], 1, 8, 1.0, [[(0,)]])[0][0]
        said = policy.tokenizer.decode(sample.token_ids)
        print(f"--plain {plain}: {type(sampler).__name__} samples {said!r}")
