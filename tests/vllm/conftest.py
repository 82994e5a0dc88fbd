"""Shared by the tests of fast/vllm_engine.py, which need the real vLLM: `make test-vllm` gives them
a .venv-vllm of their own. Policies and tools are those of tests/conftest.py."""

import pytest


@pytest.fixture
def cached(monkeypatch):
    """How many tokens of its prompt came from vLLM's prefix cache, for each request from now on."""
    from fast import vllm_engine

    counts, answer = [], vllm_engine.answer

    def spy(*args):
        outputs = answer(*args)
        counts.extend(o.num_cached_tokens for o in outputs)
        return outputs

    monkeypatch.setattr(vllm_engine, "answer", spy)
    return counts
