"""Protects full fine-tuning through vLLM: after every reload it samples from the policy's weights,
all of them, and from no old cache."""

import pytest

from fast.sampler import TorchSampler
from fast.vllm_engine import VllmSampler
from tests.test_sampler import assert_logprobs_are_the_models, grid, random_prompts


# With a tied output matrix, and with its own.
@pytest.fixture(scope="module", params=["qwen3_wide", "llama_wide"])
def pair(request, load, stir):
    policy = load(request.param, 0)
    policy.stop_ids = frozenset()
    # Learnt before the engine starts, as after --resume: the folder holds other weights.
    stir(policy, 0.05)
    sampler = VllmSampler(policy)
    yield policy, sampler
    sampler.close()


def test_logprobs_equal_a_plain_forward_pass_after_every_reload(
    pair, stir, snapshot, naive_logprobs, cached
):
    policy, sampler = pair
    prompts, seeds = random_prompts(100, 7), grid(2, 2)
    seen = []
    for version in range(4):
        if version:
            stir(policy, 0.05, seed=version)
            before = snapshot(policy)
            sampler.sync(version)
            assert all((before[name] == now).all() for name, now in snapshot(policy).items())
        del cached[:]
        groups = sampler.sample(prompts, 2, 16, 1.0, seeds)
        # A prompt that was seen before the update is read anew, once.
        assert cached == [0, 96, 0, 0]
        assert_logprobs_are_the_models(policy, naive_logprobs, prompts, groups, 1.0)
        greedy = sampler.sample(prompts, 1, 16, 0, seeds)
        ours = TorchSampler(policy).sample(prompts, 1, 16, 0, seeds)
        assert [g[0].token_ids for g in greedy] == [g[0].token_ids for g in ours]
        seen.append(str(greedy))
    assert len(set(seen)) == 4
