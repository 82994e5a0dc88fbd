"""Which engine samples: ours, vLLM or, for readers, the plain one.

All three have the interface of fast/sampler.TorchSampler: sync, asleep, sample.

Run me: `python -m fast.engine` says which one samples from pico_base here.
"""

from fast import parallel
from fast.plan import engine_of
from fast.sampler import TorchSampler
from policy import PlainSampler, Policy


def make_sampler(cfg, policy: Policy):
    """The engine: plain, or vLLM if asked for (cfg.engine) or installed beside a GPU, or ours."""
    if cfg.plain:
        return PlainSampler(policy)
    has_vllm = engine_of(policy.device) == "vllm"
    if has_vllm and cfg.engine == "auto" and parallel.world() > 1:
        print("several processes train, so our own sampler samples (--async-rollouts 1 uses vLLM)")
        has_vllm = False
    if cfg.engine == "vllm" or (cfg.engine == "auto" and has_vllm):
        from fast.vllm_engine import VllmSampler

        return VllmSampler(policy, cfg.vllm_memory, seeded=cfg.vllm_seeds, sleeps=cfg.vllm_sleep)
    sampler = TorchSampler(policy)
    if policy.device.type == "cuda" and policy.lora_rank == 0:
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
        cfg = SimpleNamespace(plain=plain, engine="auto")
        cfg.vllm_memory, cfg.vllm_seeds, cfg.vllm_sleep = 0.3, True, True
        sampler = make_sampler(cfg, policy)
        sample = sampler.sample([prompt], 1, 8, 1.0, [[(0,)]])[0][0]
        said = policy.tokenizer.decode(sample.token_ids)
        print(f"--plain {plain}: {type(sampler).__name__} samples {said!r}")
