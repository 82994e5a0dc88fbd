"""Protects a real model behind vLLM: SmolLM2's greedy replies are those of our own sampler."""

from chat import encode, render
from fast.sampler import TorchSampler
from fast.vllm_engine import VllmSampler
from policy import load_policy

ASKED = ("What is the capital of France?", "Count from one to ten.", "What is 2 + 2?")


def test_smollm2s_greedy_replies_are_our_samplers():
    policy = load_policy("smollm2", 4, 8, "cpu")
    ask = lambda text: render(policy, [{"role": "user", "content": text}], None, True)
    prompts = [encode(policy, ask(text)) for text in ASKED]
    seeds = [[(0, i)] for i in range(len(ASKED))]
    ours = TorchSampler(policy).sample(prompts, 1, 24, 0, seeds)
    engine = VllmSampler(policy, cpu_cache=2**29)
    theirs = engine.sample(prompts, 1, 24, 0, seeds)
    engine.close()
    tokens = lambda groups: [sample.token_ids for [sample] in groups]
    assert tokens(ours) == tokens(theirs)
    assert "Paris" in policy.tokenizer.decode(ours[0][0].token_ids)
