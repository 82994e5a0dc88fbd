"""Shared fixtures: small policies of several architectures, and the tools of steps.py.

Nothing here needs a network or a trained model: weights are random, only tokenizer and template
are pico_base's.
"""

import copy
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers: a wrong name must fail at once

import pytest
import torch

import steps
from browser import chromium  # noqa: F401  (a fixture)
from policy import PICO, PICO_SWARM, load_policy

# The files that take half a minute or more, the slowest first: begun last, one of them would keep
# one core busy while the other has nothing left. The Makefile asks pytest-xdist for this order.
SLOW = (
    "test_train.py",
    "test_sampler.py",
    "test_pico.py",
    "test_parallel.py",
    "test_book.py",
    "test_grpo.py",
    "test_rollout.py",
    "test_trust.py",
    "test_export.py",
    "test_bad_training.py",
    "test_api.py",
    "test_report.py",
    "test_ahead.py",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: [*SLOW, item.path.name].index(item.path.name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """pytest-xdist cannot send lone surrogates, which hostile files have, to another process."""
    report = yield
    sendable = lambda text: text.encode("utf-8", "replace").decode()
    report.sections = [(name, sendable(text)) for name, text in report.sections]
    return report


@pytest.fixture(autouse=True)
def exact_products():
    """A run chooses for its whole process how torch multiplies; the next test begins with the default."""
    torch.set_float32_matmul_precision("highest")


# Hidden 32, two layers, four query heads on two key heads: every reshape that can go wrong.
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MoE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
WINDOW = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
SIZES_OF_GPT2 = {"vocab_size": 1024, "n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 4}
# vLLM's attention on a CPU takes no heads that are less than 32 wide
WIDE = {"hidden_size": 64, "head_dim": 32, "max_position_embeddings": 4096}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONGROPE = SMALL | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4} | FACTORS}
GEMMA3 = SMALL | {"head_dim": 8, "sliding_window": 16}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LINEAR = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
ROUTER = {"output_router_logits": True}  # left behind by fine-tuning
SIZES_OF_OPT = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
MAMBA_AND_ATTENTION = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
CONFIGS = {  # kind: (transformers' config, its arguments)
    "qwen3": ("Qwen3", SMALL | TIED | {"head_dim": 8}),
    # experts are one tensor in memory, and one file entry each on the hub
    "qwen3_moe": ("Qwen3Moe", SMALL | TIED | MoE | {"head_dim": 8}),
    "qwen2": ("Qwen2", SMALL | TIED),  # biases on q, k, v
    "qwen2_window": ("Qwen2", SMALL | TIED | WINDOW),
    "llama": ("Llama", SMALL | UNTIED),
    # biases on every linear layer
    "llama_bias": ("Llama", SMALL | TIED | {"attention_bias": True, "mlp_bias": True}),
    # RoPE's angles change where a text gets longer than 512 tokens
    "llama_dynamic": ("Llama", SMALL | UNTIED | {"rope_parameters": DYNAMIC}),
    # as Llama, but no token sees further back than 24
    "mistral_window": ("Mistral", SMALL | UNTIED | {"sliding_window": 24}),
    # Llama's names, other norms, and logits squashed by a tanh
    "gemma2": (
        "Gemma2",
        SMALL
        | {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 16,
            "final_logit_softcapping": 2.0,
        },
    ),
    # divides its logits by a number
    "granite": ("Granite", SMALL | TIED | {"logits_scaling": 4.0}),
    # hybrid: a short convolution, then attention
    "lfm2": ("Lfm2", SMALL | TIED | {"layer_types": ["conv", "full_attention"]}),
    "qwen3_wide": ("Qwen3", SMALL | TIED | WIDE),
    "llama_wide": ("Llama", SMALL | UNTIED | WIDE),
    "gpt2": ("GPT2", SIZES_OF_GPT2),  # learned positions, LayerNorm, other names
    # ---- models whose log-probs could differ between sampling and training (test_policy.py)
    "longrope": ("Phi3", LONGROPE | {"original_max_position_embeddings": 64}),
    "longrope_far": ("Phi3", LONGROPE | {"original_max_position_embeddings": 400}),
    "dynamic_at_64": (
        "Llama",
        SMALL | UNTIED | {"rope_parameters": DYNAMIC | {"original_max_position_embeddings": 64}},
    ),
    "yarn": ("Qwen2", SMALL | TIED | {"rope_parameters": DYNAMIC | {"rope_type": "yarn"}}),
    "gpt_neox": ("GPTNeoX", SMALL | {"rotary_pct": 0.25}),  # a quarter of each head is rotated
    "bloom": ("Bloom", {"vocab_size": 1024, "hidden_size": 32, "n_layer": 2, "n_head": 4}),  # ALiBi
    "gemma3_text": ("Gemma3Text", GEMMA3),
    "gemma3": ("Gemma3", {"text_config": GEMMA3, "vision_config": VISION}),
    "qwen3_5": ("Qwen3_5", {"text_config": SMALL | LINEAR}),
    "moe_router_loss": ("Qwen3Moe", SMALL | TIED | MoE | {"head_dim": 8} | ROUTER),
    "mixtral_router_loss": ("Mixtral", SMALL | {"num_local_experts": 4} | ROUTER),
    "mixtral_jitter": ("Mixtral", SMALL | {"num_local_experts": 4, "router_jitter_noise": 0.1}),
    "opt": ("OPT", SIZES_OF_OPT | {"dropout": 0.1}),
    "opt_layerdrop": ("OPT", SIZES_OF_OPT | {"dropout": 0.0, "layerdrop": 0.1}),
    "granite_dropout": ("Granite", SMALL | TIED | {"attention_dropout": 0.1}),
    "mamba": ("Mamba", {"vocab_size": 1024, "hidden_size": 32, "num_hidden_layers": 2}),
    "falcon_h1": ("FalconH1", SMALL | MAMBA_AND_ATTENTION),
    "llama4": ("Llama4", {"text_config": SMALL | {"num_local_experts": 2, "head_dim": 8}}),
    "tuples": ("Llama", SMALL | UNTIED | {"return_dict": False}),
}
TOKENS = {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None, "initializer_range": 0.2}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """model_folder(kind) -> path of a random model, with pico_base's tokenizer and template."""
    made = {"pico": str(PICO), "pico_swarm": str(PICO_SWARM)}

    @torch.no_grad()
    def folder(kind: str) -> str:
        if kind in made:
            return made[kind]
        import transformers

        name, given = CONFIGS[kind]
        config = getattr(transformers, f"{name}Config")(**given, **TOKENS)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for p in model.parameters():
            if p.ndim == 1:  # biases start at 0, norms at 1: a forgotten one would not show
                p.add_(0.3 * torch.randn(p.shape))
        made[kind] = str(tmp_path_factory.mktemp(kind))
        model.save_pretrained(made[kind])
        transformers.AutoTokenizer.from_pretrained(str(PICO)).save_pretrained(made[kind])
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def load(model_folder):
    """load(kind, lora_rank, awake, seed) -> a policy of its own, on the CPU.

    `awake` gives LoRA's B numbers other than 0.
    """
    loaded = {}  # read once, and then copied: that takes a third of the time

    def make(kind: str = "qwen3", lora_rank: int = 0, awake: bool = False, seed: int = 0):
        if (kind, lora_rank, seed) not in loaded:
            given = (model_folder(kind), lora_rank, 2 * lora_rank)
            with warnings.catch_warnings():
                # PEFT on GPT-2's transposed linear layers
                warnings.filterwarnings("ignore", message="fan_in_fan_out")
                loaded[kind, lora_rank, seed] = load_policy(*given, device="cpu", seed=seed)
        policy = copy.deepcopy(loaded[kind, lora_rank, seed])
        torch.manual_seed(seed)  # as load_policy does
        if awake:
            steps.stir(policy, 0.1, seed)
        return policy

    return make


def shared(kind: str):
    """A model without LoRA as a fixture. Shared by all tests: read it, never train it."""
    return pytest.fixture(scope="session")(lambda load: load(kind))


tiny, pico, pico_swarm = map(shared, ("qwen3", "pico", "pico_swarm"))  # tiny: random weights


def tool(name: str):
    """A function of steps.py as a fixture."""
    return pytest.fixture(scope="session", name=name)(lambda: getattr(steps, name))


naive_logprobs, snapshot, stir = map(tool, ("naive_logprobs", "snapshot", "stir"))


# Where oneDNN multiplies ("medium"), attention is written out.
@pytest.fixture(params=["highest", "medium"])
def products(request, monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: request.param)
