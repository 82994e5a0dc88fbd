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
    if cfg.engine == "vllm" and parallel.world() > 1:  # it would take our process group for its own
        raise ValueError(
            "--engine vllm in several processes needs one of its own beside each of them; "
            "add --async-rollouts 1"
        )
    has_vllm = policy.device.type == "cuda" and importlib.util.find_spec("vllm")
    if has_vllm and cfg.engine == "auto" and parallel.world() > 1:
        print("several processes train, so our own sampler samples (--async-rollouts 1 uses vLLM)")
        has_vllm = False
    if cfg.engine == "vllm" or (cfg.engine == "auto" and has_vllm):
        from fast.vllm_engine import VllmSampler

        return VllmSampler(policy, cfg.vllm_memory)
    sampler = TorchSampler(policy)
    if parallel.rank() == 0:
        print(sampler.decoder.why)
    return sampler


if __name__ == "__main__":
    from types import SimpleNamespace

    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    for plain in (False, True):
        cfg = SimpleNamespace(plain=plain, engine="auto", vllm_memory=0.3)
        print(f"--plain {plain}:", type(make_sampler(cfg, policy)).__name__)
