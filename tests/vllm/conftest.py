"""Shared by the tests of fast/vllm_engine.py, which need the real vLLM.

`make test-vllm` gives them a .venv-vllm of their own. Weights are random, as in tests/. Heads are
32 wide, because vLLM's attention on a CPU takes no less.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported

import pytest
import torch

from policy import PICO, load_policy
from tests.conftest import SMALL, naive_logprobs, snapshot, stir  # noqa: F401  (fixtures)

MADE = {}


@pytest.fixture(scope="session")
def load(tmp_path_factory):
    """load(kind, lora_rank) -> a policy of random weights.

    qwen3 ties its output matrix to its embedding, llama does not.
    """
    import transformers as t

    def make(kind: str, lora_rank: int):
        if kind not in MADE:
            sizes = SMALL | {"hidden_size": 64, "max_position_embeddings": 4096}
            sizes |= {"initializer_range": 0.2, "eos_token_id": 2, "pad_token_id": 0}
            config = {
                "qwen3": lambda: t.Qwen3Config(**sizes, head_dim=32, tie_word_embeddings=True),
                "llama": lambda: t.LlamaConfig(**sizes, head_dim=32, tie_word_embeddings=False),
            }[kind]()
            torch.manual_seed(0)
            model = t.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for p in model.parameters():
                    if p.ndim == 1:  # norms start at 1, where a forgotten one would not show
                        p.add_(0.3 * torch.randn(p.shape))
            MADE[kind] = str(tmp_path_factory.mktemp(kind))
            model.save_pretrained(MADE[kind])
            t.AutoTokenizer.from_pretrained(str(PICO)).save_pretrained(MADE[kind])
        return load_policy(MADE[kind], lora_rank, 2 * lora_rank, device="cpu")

    return make


@pytest.fixture
def cached(monkeypatch):
    """How many tokens of its prompt came from vLLM's prefix cache, for each request from now on."""
    from fast.vllm_engine import VllmSampler

    counts, as_sample = [], VllmSampler._as_sample

    def spy(self, output):
        counts.append(output.num_cached_tokens)
        return as_sample(self, output)

    monkeypatch.setattr(VllmSampler, "_as_sample", spy)
    return counts


@pytest.fixture(scope="session")
def largest_gap(naive_logprobs):  # noqa: F811
    """largest_gap(policy, prompts, groups, temperature) -> nats from a plain forward pass each."""

    def compute(policy, prompts, groups, temperature) -> float:
        gaps = []
        for prompt, samples in zip(prompts, groups):
            for s in samples:
                assert len(s.logprobs) == len(s.token_ids) > 0
                with torch.no_grad():
                    logprobs = naive_logprobs(policy, prompt + s.token_ids, temperature)
                logprobs = logprobs[len(prompt) - 1 :]  # [sampled]
                gaps.append((logprobs - torch.tensor(s.logprobs)).abs().max().item())
        return max(gaps)

    return compute
