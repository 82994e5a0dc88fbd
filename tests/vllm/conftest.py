"""Shared by the tests of fast/vllm_engine.py, which need the real vLLM: `make test-vllm` gives them
a .venv-vllm of their own. Policies and tools are those of tests/conftest.py."""

import pytest


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
