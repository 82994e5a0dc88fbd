"""Protects the policy: LoRA that starts as the base and leaves it alone, memory that training gives
back, a model and a device that fit the machine, and errors in one sentence.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bookkeeping.pretrained import check_passes, load_checked
from fast import machine as plan
from fast.logprobs import knows, logit_scale, token_logprobs
from fast.machine import checkpoint_activations, choose_model, out_of_memory, pick_device
from fast.sampler import TorchSampler
from helpers import put, random_rows, refusal, write_folder
from policy import PICO, PICO_SWARM, PlainSampler
from settings import Config
from steps import assert_close, gradients, snapshot
from train import choose_backend


def loss_of(policy, seed: int = 0) -> torch.Tensor:
    mask = torch.ones(2, 9, dtype=torch.bool)
    return -token_logprobs(policy, random_rows(2, 10, seed), mask)[0].mean()


# ------------------------------------------------------------------------------------------ LoRA


@pytest.mark.parametrize("kind", ["pico", "llama_bias", "gpt2"])
@torch.no_grad()
def test_lora_starts_exactly_as_the_base_with_a_start_of_the_seed(load, kind):
    base, one, two = load(kind), load(kind, 4, seed=1), load(kind, 4, seed=2)
    ids = random_rows(2, 20)
    assert torch.equal(base.model(input_ids=ids).logits, one.model(input_ids=ids).logits)
    a, b, again = (policy.trainable() for policy in (one, two, load(kind, 4, seed=1)))
    assert all(torch.equal(a[name], again[name]) for name in a)
    assert not all(torch.equal(a[name], b[name]) for name in a)


def test_training_with_lora_leaves_the_base_bit_identical(load):
    policy = load("qwen3", lora_rank=4)
    before, learns = snapshot(policy), policy.trainable()
    # A and B, two layers, q k v o gate up down; none on the head
    assert len(learns) == 2 * 2 * 7 and all("lora_" in name for name in learns)
    assert {p.dtype for p in learns.values()} == {torch.float32}
    optimizer = torch.optim.AdamW(learns.values(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(policy, step).backward()
        optimizer.step()
    for name, p in policy.model.named_parameters():
        assert torch.equal(p, before[name]) != (name in learns), name
    everything = load("qwen3")
    assert everything.trainable().keys() == dict(everything.model.named_parameters()).keys()


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_checkpointing_runs_layers_again_and_learning_frees_what_it_needed(load, lora_rank):
    policy, found, runs = load("qwen3", lora_rank, awake=True), [], []
    logit_scale(policy.lm)  # runs the model, once
    ours = knows(policy.lm)  # too; without checkpoints, fast/layers.py runs in its place
    policy.lm.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt), policy.learning():
            loss_of(policy).backward()
            found.append(gradients(policy))
            raise KeyboardInterrupt
        assert sum(runs) == (0 if ours and times == 1 else times) and not policy.model.training
        assert not any(gradient.any() for gradient in gradients(policy).values())
        checkpoint_activations(policy)
        runs.clear()
    assert_close(*found)


# {kind of tests/conftest.py: (what its refusal must say, or "": it trains at rounding; does
# gradient checkpointing leave its log-probs alone?)}. {kind}_0: all weights learn.
ODD_MODELS = {
    "longrope": ("once a text has more than 64", True),
    "dynamic_at_64": ("once a text has more than 64", True),
    "longrope_far": ("", True),
    "llama_dynamic": ("", True),
    "yarn": ("", True),
    "gpt_neox": ("", True),
    "bloom": ("", True),
    "gemma2": ("", True),
    "gemma3_text": ("", True),
    "gemma3": ("", True),
    "qwen3_5": ("", True),
    "moe_router_loss": ("", True),
    "mixtral_router_loss": ("", True),
    "mixtral_jitter": ("", False),
    "opt": ("", False),
    "opt_layerdrop": ("", False),
    "granite_dropout": ("", False),
    "gpt2": ("", False),
    "lfm2": ("", True),
    "falcon_h1_0": ("", True),
    "mamba_0": ("take --plain", True),
    "llama4": ("it cannot read a text", True),
    "tuples": ("it cannot read a text", None),
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", ODD_MODELS)
def test_a_model_trains_on_what_it_samples_or_is_refused_in_one_sentence(load, name, plain):
    kind, _, rank = name.partition("_0")
    says, quiet = ODD_MODELS[name]
    policy = load(kind, 0 if name.endswith("_0") else 4)
    cfg = Config(env="mine.py:Mine", max_tokens=60, plain=plain)
    backend = choose_backend(cfg, policy)
    prompt = torch.randint(11, 1000, (40,)).tolist()
    if says and not (plain and kind in ("mamba", "llama4")):  # these may be sampled plainly
        assert says in refusal(ValueError, check_passes, policy, cfg, prompt, 1, backend)
        return
    check_passes(policy, cfg, prompt, 1, backend)
    # Rows of several lengths, as in a run: short of the longest, and with a group's prompt.
    sampler = PlainSampler(policy) if plain else TorchSampler(policy)
    prompts = [prompt, prompt[:7]]
    groups = sampler.sample(prompts, 2, 12, 1.0, [[(g, i) for i in range(2)] for g in range(2)])
    for prompt, samples in zip(prompts, groups):
        for sample in samples:
            ids = torch.tensor([prompt + sample.token_ids] * 2)
            mask = (torch.arange(ids.shape[1] - 1) >= len(prompt) - 1).repeat(2, 1)
            trained = backend.forward(policy, ids, mask, 1.0, False).logprobs
            assert (trained - torch.tensor(sample.logprobs * 2)).abs().max() < 1e-4
    if quiet:
        checkpoint_activations(policy)
        return
    with pytest.raises(ValueError, match="this model's dropout"):
        checkpoint_activations(policy)


# --------------------------------------------------------------------------------------- loading


def refused(name, **more) -> str:
    return refusal(SystemExit, load_checked, str(name), 4, 8, **({"device": "cpu"} | more))


WEIGHTS, TEMPLATE = "model.safetensors", "chat_template.jinja"


def without(name: str):
    return lambda files: files.pop(name)


def no_end(files):
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        said = json.loads(files[name])
        kept = {key: x for key, x in said.items() if key not in ("eos_token_id", "eos_token")}
        files[name] = json.dumps(kept).encode()
    files.pop("special_tokens_map.json", None)


@pytest.mark.parametrize(
    "change, told",
    [
        (without(TEMPLATE), "chat template"),
        (without("config.json"), ""),
        (without(WEIGHTS), ""),
        (lambda files: files.update({WEIGHTS: files[WEIGHTS][:-100]}), ""),
        (no_end, "end-of-turn token"),
        (
            lambda files: files.update({TEMPLATE: b"{{ raise_exception('not today') }}"}),
            "not today",
        ),
    ],
)
def test_a_folder_that_lacks_something_is_told(model_folder, tmp_path, change, told):
    files = {file.name: file.read_bytes() for file in Path(model_folder("qwen3")).iterdir()}
    change(files)
    folder = write_folder(tmp_path / "m", files)
    said = refused(folder)
    assert told in said and str(folder) in said


# ----------------------------------------------------------------- which model and which device

B16, T17, SIX = dict.fromkeys(model for _, model, _ in plan.AUTO)  # the 4B, the 1.7B, the 0.6B
CHECKED, HALF, TORCH = {"gradient_checkpointing": True}, {"micro_tokens": 4096}, {"engine": "torch"}


@pytest.fixture
def card(monkeypatch):
    """card(GiB, compute capability): this machine has such a card, and a hub."""

    def put_in(memory: float, capability=(8, 0), hub=lambda model: True):
        put(
            monkeypatch,
            torch.cuda,
            is_available=lambda: True,
            get_device_properties=lambda _: SimpleNamespace(total_memory=memory * 2**30),
            get_device_capability=lambda _: capability,
            get_device_name=lambda _: "a card",
        )
        monkeypatch.setattr(plan, "within_reach", hub)

    return put_in


@pytest.mark.parametrize(
    "memory, capability, env, asked, model, fits",
    [
        (14.6, (7, 5), "letters", {}, SIX, TORCH | CHECKED),  # a T4: float32, twice as wide
        (15.7, (8, 6), "letters", {}, SIX, HALF),
        (23.6, (8, 6), "letters", {}, T17, HALF),
        (39.4, (8, 0), "swarm", {}, B16, CHECKED),
        (79.1, (8, 0), "letters", {}, B16, {}),
        (5.0, (8, 6), "letters", {}, None, {}),
        (14.6, (7, 5), "swarm", {}, None, {}),
        # what was asked for is left as it is
        (39.4, (8, 0), "letters", {"micro_tokens": 8192}, B16, {}),
    ],
)
def test_auto_takes_the_largest_model_that_has_room_and_settings_that_fit(
    card, memory, capability, env, asked, model, fits
):
    card(memory, capability)
    path, why, found = choose_model("auto", env, "auto", asked)
    small = str(PICO_SWARM if env == "swarm" else PICO)
    assert (path, found) == (model or small, fits)
    assert why.startswith(f"{model}: the choice" if model else "no Qwen3 fits")


def test_without_card_or_hub_auto_takes_what_is_there_and_a_named_model_is_taken(card):
    taken = [choose_model("auto", env)[0] for env in ("letters", "swarm")]
    assert taken == [str(PICO), str(PICO_SWARM)]
    card(79.1, hub=lambda model: model == SIX)
    assert choose_model("auto", asked={})[0] == SIX
    assert choose_model("auto", "letters", "cpu", {})[0] == str(PICO)
    card(79.1, hub=lambda model: False)
    assert choose_model("auto", asked={})[::2] == (str(PICO), {})
    assert choose_model("owner/name", asked={}) == ("owner/name", "model owner/name, as asked", {})


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(plan, "nvidia_driver", lambda: "")


def test_a_card_is_chosen_by_itself_or_by_its_number(card, monkeypatch):
    card(23.6)
    assert pick_device("auto", 0.9e6) == "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == "cuda:1"
    with pytest.raises(SystemExit, match="--device cuda:2: torch finds none here"):
        pick_device("cuda:2")


UPDATE = "driver 550.54.15 answers, but torch .for CUDA 13.0. finds no card: .* update the driver"
REINSTALL = r"build without CUDA; on Linux, pip install --force-reinstall torch==2\.13\.0 brings"


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """smi(text, status): torch finds no card, and this is what nvidia-smi answers."""

    def put_in(text: str, status: int = 0):
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {status}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return put_in


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
@pytest.mark.parametrize("cuda, told", [("13.0", UPDATE), (None, REINSTALL)])
def test_a_card_that_torch_cannot_use_ends_the_run_and_no_cpu_takes_over(
    smi, monkeypatch, device, cuda, told
):
    smi("550.54.15\\n550.54.15\\n")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    said = refused(PICO, device=device)
    assert re.search(told, said) and said.startswith(f"--device {device}: ")
    with pytest.raises(SystemExit, match="or take --device cpu"):
        choose_model("auto", "letters", device, {})
    assert pick_device("cpu") == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # who hides the card wants none
    assert pick_device("auto") == "cpu"


def test_without_a_card_nothing_is_said(smi, monkeypatch, tmp_path):
    smi("NVIDIA-SMI has failed because it could not communicate with the driver", 9)
    assert pick_device("auto") == "cpu"
    monkeypatch.setenv("PATH", "")
    assert pick_device("auto") == "cpu"


def test_a_mac_has_its_gpu_for_a_model_that_is_not_small(no_card, monkeypatch):
    assert pick_device("auto", 0.6e9) == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto", 0.9e6) == pick_device("auto") == "cpu"
    assert pick_device("auto", 0.6e9) == pick_device("mps") == "mps"
    monkeypatch.setattr(plan.dist, "is_initialized", lambda: True)
    assert pick_device("auto", 0.6e9) == "cpu"  # gloo adds up no gradients on MPS


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", "gpu"])
def test_a_device_that_is_not_there_is_refused_before_a_model_is_loaded(no_card, device):
    words = f"--device {device}: torch finds none here; there is cpu"
    assert words in refused(PICO, device=device)
    with pytest.raises(SystemExit, match=words):
        choose_model("auto", "letters", device, {})


@pytest.mark.parametrize(
    "text, is_one",
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be reported later", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("MPS backend out of memory (MPS allocated: 9 GB)", True),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("shapes do not match", False),
    ],
)
def test_out_of_memory_is_known_by_its_text(text, is_one):
    assert out_of_memory(RuntimeError(text)) == is_one
    assert not out_of_memory(ValueError(text))  # it may quote a file
