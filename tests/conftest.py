"""Shared fixtures: small policies of several architectures, and a log-prob written the slow, obvious way.

Nothing here needs a network or a trained model: weights are random, only tokenizer and template are pico_base's.
"""

import copy
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: a wrong name must fail at once

import pytest
import torch

from policy import PICO, PICO_SWARM, load_policy

# The files that take half a minute or more, the slowest first: begun last, one of them would keep one core busy while the others have
# nothing left to do (3 of 17 minutes on a busy machine). The Makefile asks pytest-xdist to keep this order.
SLOW = (
    "test_train.py",
    "test_sampler.py",
    "test_pico.py",
    "test_parallel.py",
    "test_book.py",
    "test_grpo.py",
    "test_trust.py",
    "test_multiturn.py",
    "test_export.py",
    "test_viewer.py",
    "test_bad_training.py",
    "test_api.py",
    "test_report.py",
    "test_compare.py",
    "test_failures.py",
    "test_faults.py",
    "test_ahead.py",
    "test_behaviour.py",
    "test_rollout.py",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: SLOW.index(item.path.name) if item.path.name in SLOW else len(SLOW))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Captured output may hold lone surrogates, from hostile files; they cannot be sent from one process of pytest-xdist to another."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "replace").decode()) for name, text in report.sections]
    return report


# Hidden 32, two layers, four query heads on two key heads: every reshape that can go wrong, at no cost.
SMALL = dict(
    vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, initializer_range=0.2, eos_token_id=2, pad_token_id=0, bos_token_id=None,
)  # fmt: skip


def build_config(kind: str):
    import transformers as t

    if kind == "qwen3":
        return t.Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True)
    if kind == "qwen3_moe":  # experts are one tensor in memory, and one file entry each on the hub
        return t.Qwen3MoeConfig(
            **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=True
        )
    if kind == "qwen2":  # biases on q, k, v
        return t.Qwen2Config(**SMALL, tie_word_embeddings=True)
    if kind == "qwen2_window":
        return t.Qwen2Config(**SMALL, tie_word_embeddings=True, use_sliding_window=True, sliding_window=24, max_window_layers=1)
    if kind == "llama":
        return t.LlamaConfig(**SMALL, tie_word_embeddings=False)
    if kind == "llama_bias":  # biases on every linear layer
        return t.LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    if kind == "llama_dynamic":  # RoPE's angles change where a text gets longer than 512 tokens
        return t.LlamaConfig(
            **SMALL, tie_word_embeddings=False, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        )
    if kind == "mistral_window":  # as Llama, but no token sees further back than 24
        return t.MistralConfig(**SMALL, tie_word_embeddings=False, sliding_window=24)
    if kind == "gemma2":  # Llama's names, other norms, and logits squashed by a tanh
        return t.Gemma2Config(**SMALL, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=2.0, sliding_window=16)
    if kind == "granite":  # divides its logits by a number
        return t.GraniteConfig(**SMALL, tie_word_embeddings=True, logits_scaling=4.0)
    if kind == "llama_longrope":  # RoPE's angles are others for a text of over 32 tokens
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4, "factor": 16.0}
        return t.LlamaConfig(**SMALL, tie_word_embeddings=False, rope_parameters=rope | {"original_max_position_embeddings": 32})
    if kind == "lfm2":  # hybrid: a short convolution, then attention
        return t.Lfm2Config(**SMALL, tie_word_embeddings=True, layer_types=["conv", "full_attention"])
    if kind == "gpt2":  # learned positions, LayerNorm, other names
        return t.GPT2Config(
            vocab_size=1024, n_positions=512, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2,
            eos_token_id=2, pad_token_id=0, bos_token_id=None,
        )  # fmt: skip
    raise ValueError(kind)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """model_folder(kind) -> path of a random model of that architecture, with pico_base's tokenizer and template."""
    made = {"pico": str(PICO), "pico_swarm": str(PICO_SWARM)}

    def folder(kind: str) -> str:
        if kind not in made:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(build_config(kind))
            with torch.no_grad():
                for p in model.parameters():
                    if p.ndim == 1:  # biases start at 0 and norms at 1, where a forgotten one would not show
                        p.add_(0.3 * torch.randn(p.shape))
            path = tmp_path_factory.mktemp(kind)
            model.save_pretrained(path)
            AutoTokenizer.from_pretrained(str(PICO)).save_pretrained(path)
            made[kind] = str(path)
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def load(model_folder):
    """load(kind, lora_rank, awake, seed) -> a policy of its own, on the CPU. `awake` gives LoRA's B numbers other than 0."""
    loaded = {}  # read once, and then copied: that takes a third of the time, and the tests ask for hundreds

    def make(kind: str = "qwen3", lora_rank: int = 0, awake: bool = False, seed: int = 0):
        if (kind, lora_rank, seed) not in loaded:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="fan_in_fan_out")  # PEFT on GPT-2's transposed linear layers
                loaded[kind, lora_rank, seed] = load_policy(model_folder(kind), lora_rank, 2 * lora_rank, device="cpu", seed=seed)
        policy = copy.deepcopy(loaded[kind, lora_rank, seed])
        torch.manual_seed(seed)  # as load_policy does
        if awake:
            stir(policy, 0.1, seed)
        return policy

    return make


def stir(policy, scale: float, seed: int = 0) -> None:
    """Add noise to every trainable weight (and so to LoRA's B, which starts at 0 and would hide mistakes)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(scale * torch.randn(p.shape, generator=generator))


@pytest.fixture(scope="session", name="stir")
def stir_fixture():
    return stir


@pytest.fixture(scope="session")
def tiny(load):
    """A tiny random Qwen3 without LoRA. Shared: read it, never train it."""
    return load("qwen3")


@pytest.fixture(scope="session")
def pico(load):
    """pico_base without LoRA. Shared: read it, never train it."""
    return load("pico")


@pytest.fixture(scope="session")
def pico_swarm(load):
    """pico_swarm without LoRA. Shared: read it, never train it."""
    return load("pico_swarm")


@pytest.fixture(scope="session")
def naive_logprobs():
    """naive_logprobs(policy, token_ids, temperature) -> [T-1] float32: log-prob of tokens 1 … T-1, each given those before it.

    One unpadded row, the model's own full logits, one token after the other: nothing is shared with logprobs.token_logprobs.
    """

    def compute(policy, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        logits = policy.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()  # [T, V]
        each = []
        for t in range(1, len(token_ids)):
            logp = torch.log_softmax(logits[t - 1] / temperature, dim=0)  # [V]
            each.append(logp[token_ids[t]])
        return torch.stack(each)  # [T-1]

    return compute


@pytest.fixture(scope="session")
def snapshot():
    """snapshot(policy) -> a copy of every weight, by name."""
    return lambda policy: {name: p.detach().clone() for name, p in policy.model.named_parameters()}


@pytest.fixture(scope="session")
def gradients():
    """gradients(policy) -> a copy of every trainable weight's gradient, by name (0 where there is none)."""

    def copy(policy) -> dict[str, torch.Tensor]:
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in policy.trainable().items()}

    return copy


@pytest.fixture(scope="session")
def assert_close():
    """assert_close(a, b): two dicts of gradients agree to 1e-4 of the largest entry, and are not all zero."""

    def check(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], share: float = 1e-4) -> None:
        assert a.keys() == b.keys()
        largest = max(g.abs().max().item() for g in b.values())
        assert largest > 0
        for name in b:
            assert (a[name] - b[name]).abs().max().item() <= share * largest, name

    return check


@pytest.fixture
def no_pictures(monkeypatch):
    """For tests that do not look at a curve: to draw them takes as long as three updates."""
    import warm

    warm.draw_nothing(monkeypatch)


@pytest.fixture(scope="module")
def chromium():
    """A selenium driver of headless Chromium; without one, its tests are skipped and say why."""
    import browser

    try:
        with browser.driver() as chromium:
            yield chromium
    except browser.Missing as missing:
        pytest.skip(str(missing))
