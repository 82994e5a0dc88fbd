"""Protects the policy: LoRA that starts as the base and leaves it alone, and errors in one sentence."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import policy as policy_module
from fast import machine as plan
from fast.logprobs import logit_scale, token_logprobs
from fast.machine import choose_model, here, out_of_memory
from helpers import assert_one_sentence, random_rows, write_folder
from policy import PICO, PICO_SWARM, PlainSampler, checkpoint_activations, load_policy, pick_device

ROOT = Path(policy_module.__file__).resolve().parent


# ---------------------------------------------------------------------------------------------- LoRA


@pytest.mark.parametrize("kind", ["pico", "llama_bias", "gpt2"])
def test_lora_starts_exactly_as_the_base(load, kind):
    base, with_lora = load(kind), load(kind, lora_rank=4)
    ids = random_rows(2, 20)
    with torch.no_grad():
        assert torch.equal(base.model(input_ids=ids).logits, with_lora.model(input_ids=ids).logits)


def test_only_lora_weights_learn_and_they_sit_on_every_linear_layer(load):
    policy = load("qwen3", lora_rank=4)
    names = policy.trainable()
    assert all("lora_" in name for name in names)
    assert len(names) == 2 * 2 * 7  # A and B, two layers, q k v o gate up down; none on the head
    assert not any("lm_head" in name or "embed" in name for name in names)
    assert all(p.dtype == torch.float32 for p in names.values())


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_with_rank_0_every_weight_learns(load, kind):
    policy = load(kind)
    assert policy.trainable().keys() == dict(policy.model.named_parameters()).keys()
    assert not any("lora_" in name for name in policy.trainable())


def test_training_with_lora_leaves_the_base_bit_identical(load, snapshot):
    policy = load("qwen3", lora_rank=4)
    before, optimizer = snapshot(policy), torch.optim.AdamW(policy.trainable().values(), lr=1e-2)
    for step in range(3):
        loss = -token_logprobs(policy, random_rows(2, 10, step), torch.ones(2, 9, dtype=torch.bool))[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    learnt = policy.trainable()
    for name, p in policy.model.named_parameters():
        assert torch.equal(p, before[name]) != (name in learnt), name  # every LoRA weight moved, no other did


def test_the_adapters_start_depends_on_the_seed_only(load):
    a, b, c = (load("qwen3", lora_rank=4, seed=seed).trainable() for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)


def test_the_stop_tokens_are_those_of_tokenizer_and_model(tiny):
    assert tiny.stop_ids == {tiny.tokenizer.convert_tokens_to_ids("<|im_end|>")}


# ---------------------------------------------------------------------------------------------- learning


def learn(policy) -> dict[str, torch.Tensor]:
    """One backward pass; the gradients before learning() frees them."""
    with policy.learning():
        token_logprobs(policy, random_rows(2, 10), torch.ones(2, 9, dtype=torch.bool))[0].sum().backward()
        return {name: p.grad.clone() for name, p in policy.trainable().items()}


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_learning_keeps_eval_mode_unless_activations_are_checkpointed_and_frees_the_gradients(load, assert_close, lora_rank):
    policy, found, runs = load("qwen3", lora_rank, awake=True), {}, []
    logit_scale(policy.lm)  # runs the model, once
    layer = policy.lm.model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda module, _: runs.append(module.training))
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_activations(policy)
        assert policy.checkpointing == checkpointing
        runs.clear()
        found[checkpointing] = learn(policy)
        assert runs == ([True] * 2 if checkpointing else [False])  # again in the backward pass
        assert not policy.model.training and all(p.grad is None for p in policy.trainable().values())
        runs.clear()
        PlainSampler(policy).sample([[5, 6, 7]], 1, 2, 1.0, [[(0,)]])
        assert True not in runs
    assert_close(found[True], found[False])


def test_an_error_while_learning_leaves_nothing_behind(load):
    policy = load("qwen3", 4)
    checkpoint_activations(policy)
    with pytest.raises(KeyboardInterrupt), policy.learning():
        token_logprobs(policy, random_rows(2, 10), torch.ones(2, 9, dtype=torch.bool))[0].sum().backward()
        raise KeyboardInterrupt
    assert not policy.model.training and all(p.grad is None for p in policy.trainable().values())


@pytest.mark.parametrize("where", ["attention_dropout", "layer"])
def test_checkpointing_refuses_a_model_with_dropout(load, where):
    policy = load("gpt2" if where == "layer" else "qwen3")
    if where == "attention_dropout":
        policy.lm.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="--gradient-checkpointing: this model has dropout") as error:
        checkpoint_activations(policy)
    assert_one_sentence(error)
    assert not policy.checkpointing and not policy.lm.is_gradient_checkpointing


# ---------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("name", ["no_such_model", "/no/such/folder", "owner/no-such-model"])
def test_a_model_that_does_not_exist_is_told_in_one_sentence(name):
    with pytest.raises(SystemExit) as error:
        load_policy(name, 4, 8, device="cpu")
    assert_one_sentence(error)
    assert name in str(error.value)


@pytest.mark.parametrize("missing", ["chat_template.jinja", "config.json", "model.safetensors"])
def test_a_folder_that_lacks_something_is_told_in_one_sentence(model_folder, tmp_path, missing):
    source = Path(model_folder("qwen3"))
    folder = write_folder(tmp_path / "m", {file.name: file.read_bytes() for file in source.iterdir() if file.name != missing})
    with pytest.raises(SystemExit) as error:
        load_policy(str(folder), 4, 8, device="cpu")
    assert_one_sentence(error)
    assert str(folder) in str(error.value)
    if missing == "chat_template.jinja":
        assert "chat template" in str(error.value)


def test_truncated_weights_are_told_in_one_sentence(model_folder, tmp_path):
    files = {file.name: file.read_bytes() for file in Path(model_folder("qwen3")).iterdir()}
    files["model.safetensors"] = files["model.safetensors"][:-100]  # a download that broke off
    folder = write_folder(tmp_path / "m", files)
    with pytest.raises(SystemExit) as error:
        load_policy(str(folder), 4, 8, device="cpu")
    assert_one_sentence(error)


def changed(model_folder, tmp_path, change) -> Path:
    """A copy of the small model's folder, its files as {name: text} gone through `change`."""
    files = {file.name: file.read_bytes() for file in Path(model_folder("qwen3")).iterdir()}
    change(files)
    return write_folder(tmp_path / "m", files)


def no_end(files):
    for name in ("generation_config.json", "config.json"):
        files[name] = json.dumps({k: v for k, v in json.loads(files[name]).items() if k != "eos_token_id"}).encode()
    files["tokenizer_config.json"] = json.dumps(
        {k: v for k, v in json.loads(files["tokenizer_config.json"]).items() if k != "eos_token"}
    ).encode()
    files.pop("special_tokens_map.json", None)


def no_digits(files):
    tokenizer = json.loads(files["tokenizer.json"])
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[0-9]"}, "content": ""}
    files["tokenizer.json"] = json.dumps(tokenizer).encode()


def too_many_tokens(files):
    tokenizer = json.loads(files["tokenizer.json"])
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": 5000, "content": "<|one more|>"})
    files["tokenizer.json"] = json.dumps(tokenizer).encode()


def bad_template(files):
    files["chat_template.jinja"] = b"{{ raise_exception('not today') }}"


@pytest.mark.parametrize(
    "change, told", [(no_end, "end-of-turn token"), (no_digits, "cannot write"), (too_many_tokens, "embeds"), (bad_template, "not today")]
)
def test_a_tokenizer_that_lacks_something_is_told_in_one_sentence(model_folder, tmp_path, change, told):
    folder = changed(model_folder, tmp_path, change)
    with pytest.raises(SystemExit) as error:
        load_policy(str(folder), 4, 8, device="cpu")
    assert_one_sentence(error)
    assert told in str(error.value) and str(folder) in str(error.value)


def test_a_tokenizer_without_an_end_takes_the_models(model_folder, tmp_path):
    def change(files):
        config = json.loads(files["generation_config.json"])
        no_end(files)
        files["generation_config.json"] = json.dumps({**config, "eos_token_id": 2}).encode()

    policy = load_policy(str(changed(model_folder, tmp_path, change)), 0, 8, device="cpu")
    assert policy.stop_ids == {2} and policy.tokenizer.eos_token_id == 2 and policy.tokenizer.pad_token_id is not None


def test_without_a_gpu_auto_means_pico_base(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path, why, _ = choose_model("auto")
    assert Path(path) == PICO and "pico_base" in why
    path, why, _ = choose_model("auto", "swarm")
    assert Path(path) == PICO_SWARM and "pico_swarm" in why


def test_a_model_named_by_folder_is_that_folder_from_wherever_we_start(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (model_folder("qwen3"), str(PICO), str(PICO_SWARM)):
        assert Path(choose_model(folder)[0]).samefile(folder)


# ---------------------------------------------------------------------------------------------- which model fits a card

B16, T17, SIX = plan.ROOMY  # the 4B, the 1.7B, the 0.6B
CHECKED, HALF = {"gradient_checkpointing": True}, {"micro_tokens": 4096}
share = lambda part: {"vllm_memory": part}
TORCH = {"engine": "torch"}


@pytest.fixture
def card(monkeypatch):
    """card(GiB, compute capability, vllm): this machine has such a card, a hub, and vLLM or not."""

    def put_in(memory: float, capability=(8, 0), vllm: bool = False, hub=lambda model: "the hub"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: vllm if name == "vllm" else None)
        monkeypatch.setattr(plan, "where_is", hub)

    return put_in


@pytest.mark.parametrize(
    "memory, capability, vllm, env, model, fits, peak",
    [
        # a T4: float32, and no vLLM although it is installed
        (14.6, (7, 5), True, "letters", SIX, CHECKED, 14),
        (14.6, (7, 5), True, "alphabet", SIX, CHECKED, 11),
        (14.6, (7, 5), True, "swarm", None, {}, None),
        # by the plan a 1.7B would fit 16 GB, and a 4B 24, with their activations computed twice: too little room (ROOMY)
        (15.7, (8, 6), False, "letters", SIX, HALF, 13),
        (15.7, (8, 6), False, "alphabet", SIX, HALF, 13),
        (15.7, (8, 6), False, "swarm", None, {}, None),
        (15.7, (8, 6), True, "letters", SIX, share(0.5) | HALF, 13),
        (15.7, (8, 6), True, "alphabet", SIX, share(0.5) | HALF, 13),
        (15.7, (8, 6), True, "swarm", SIX, share(0.5) | CHECKED, 10),
        (23.6, (8, 6), False, "letters", T17, HALF, 22),
        (23.6, (8, 6), False, "alphabet", T17, HALF, 22),
        (23.6, (8, 6), False, "swarm", SIX, CHECKED, 20),
        (23.6, (8, 6), True, "letters", T17, share(0.4) | HALF, 20),
        (23.6, (8, 6), True, "swarm", T17, share(0.4) | CHECKED, 14),
        (39.4, (8, 0), False, "letters", B16, CHECKED, 22),
        (39.4, (8, 0), True, "letters", B16, share(0.4) | HALF, 37),  # 0.3 of it are too few for vLLM
        (39.4, (8, 0), True, "alphabet", B16, share(0.4) | HALF, 37),
        (39.4, (8, 0), True, "swarm", B16, share(0.4) | CHECKED, 25),
        (47.4, (8, 6), True, "letters", B16, share(0.4) | HALF, 37),
        (47.4, (8, 6), True, "alphabet", B16, share(0.4) | HALF, 37),
        (47.4, (8, 6), True, "swarm", B16, share(0.4) | CHECKED, 28),
        (79.1, (8, 0), True, "letters", B16, {}, 63),
        (79.1, (8, 0), True, "alphabet", B16, {}, 63),
        (79.1, (8, 0), True, "swarm", B16, CHECKED, 33),  # an episode alone exceeds micro_tokens
        (79.1, (8, 0), False, "letters", B16, {}, 70),
        (139.7, (9, 0), True, "letters", B16, {}, 63),
        (139.7, (9, 0), True, "alphabet", B16, {}, 63),
        (139.7, (9, 0), True, "swarm", B16, {}, 122),
        (5.0, (8, 6), False, "letters", None, {}, None),
    ],
)
def test_auto_takes_the_largest_model_that_has_room_and_the_mildest_settings_that_fit(
    card, memory, capability, vllm, env, model, fits, peak
):
    card(memory, capability, vllm)
    there = f"{memory:.0f} GB of GPU memory" + (" in float32 (this card has no bfloat16)" if capability < (8, 0) else "")
    if model:
        how = f"with {plan.typed(fits)}" if fits else "as it is"
        line = f"{model} from the hub: the choice for {there}, {how} (about {peak} GB, computed)"
    else:
        model = str(PICO_SWARM if env == "swarm" else PICO)
        line = f"{there} are too few for {SIX} and --env {env}, so the embedded {Path(model).name} (0.9M parameters) plays the policy"
    assert choose_model("auto", env, "auto", {}) == (model, line, fits)


def test_settings_are_printed_as_they_are_typed():
    settings = share(0.4) | CHECKED | HALF | TORCH | {"vllm_sleep": False, "k": 1}
    assert plan.typed(settings) == "--vllm-memory 0.4 --gradient-checkpointing --micro-tokens 4096 --engine torch --no-vllm-sleep --k 1"


@pytest.mark.parametrize(
    "memory, asked, model, fits",
    [
        # all weights learn, in float32, with two moments: 72 of 80 with vLLM, which samples in bfloat16 …
        (79.1, {"lora_rank": 0}, B16, CHECKED),
        (79.1, {"lora_rank": 0} | TORCH, T17, {}),  # … and 87 with our sampler, whose copy is float32 (A23)
        (39.4, {"lora_rank": 0}, T17, CHECKED),
        (15.7, {"lora_rank": 0}, SIX, share(0.5) | CHECKED),
        (11.7, {"lora_rank": 0}, None, {}),
        (39.4, {"engine": "vllm"}, B16, share(0.4) | HALF),
        (23.6, {"engine": "vllm"}, T17, share(0.4) | HALF),  # the 4B would need our sampler
        (39.4, TORCH, B16, CHECKED),
        # what was typed is not set
        (39.4, {"gradient_checkpointing": False} | TORCH, T17, {}),
        (39.4, {"vllm_memory": 0.3}, B16, CHECKED | TORCH),
        (39.4, {"micro_tokens": 8192}, B16, share(0.4) | CHECKED),
        (79.1, {"micro_tokens": 16384}, B16, CHECKED),
        (79.1, {"max_tokens": 12000}, B16, CHECKED),  # a longer reply exceeds micro_tokens alone
        (79.1, {"vllm_sleep": False}, B16, HALF),  # vLLM keeps its 24
        (79.1, {"async_rollouts": 1}, B16, HALF),  # a second process: 94 of 79 (A8)
        (66, {"lora_rank": 32}, B16, {}),
        (66, {"lora_rank": 256}, B16, HALF),  # 8 times the adapter, its gradients and moments
        (23.6, {"k": 64} | TORCH, SIX, {}),  # the replies of a group are sampled together
    ],
)
def test_what_was_asked_for_is_planned_with_and_left_as_it_is(card, memory, asked, model, fits):
    card(memory, vllm=True)
    path, why, found = choose_model("auto", "letters", "auto", asked)
    assert (path, found) == (model or str(PICO), fits) and not found.keys() & asked.keys()
    assert model or why.startswith("12 GB of GPU memory are too few for Qwen/Qwen3-0.6B and --env letters --lora-rank 0, so")


def test_several_processes_in_turn_are_planned_with_our_sampler(card, monkeypatch):
    card(79.1, vllm=True)
    assert plan.engines("cuda", {}) == ["vllm", "torch"]
    monkeypatch.setattr(plan.parallel, "world", lambda: 2)
    assert plan.engines("cuda", {}) == ["torch"] == plan.engines("cuda", {"engine": "torch"})
    assert plan.engines("cuda", {"async_rollouts": 1}) == ["vllm", "torch"]
    monkeypatch.undo()
    assert plan.engines("cpu", {}) == ["torch"] and plan.engines("cpu", {"engine": "vllm"}) == ["vllm"]


def test_a_card_without_bfloat16_gets_float32_and_our_own_sampler(card, load):
    for capability, there in (((7, 5), False), ((8, 0), True)):
        card(14.6, capability, vllm=True)
        assert policy_module.in_bfloat16("cuda") == there
        assert plan.engine_of("cuda") == ("vllm" if there else "torch")
    assert not policy_module.in_bfloat16("mps") and not policy_module.in_bfloat16("cpu")
    assert plan.engine_of("cpu") == "torch"


def placed(device: str, asked: str = "auto", engine: str = "auto", n_parameters: float = 0.6e9, dtype=torch.float32) -> str:
    """The line that a run prints of the machine, for a policy that is said to be there."""
    lm = SimpleNamespace(parameters=lambda: iter([torch.zeros(1, dtype=dtype)]))
    there = SimpleNamespace(device=torch.device(device), lm=lm, n_parameters=n_parameters)
    return here(SimpleNamespace(device=asked, engine=engine, plain=False, lora_rank=32), there)


@pytest.mark.parametrize(
    "name, memory, capability, vllm, dtype, line",
    [
        ("Tesla T4", 14.6, (7, 5), True, torch.float32,
         "here: Tesla T4 with 15 GB, float32, our own sampler (this card has no bfloat16; vLLM needs bfloat16)"),
        ("Tesla T4", 14.6, (7, 5), False, torch.float32,
         "here: Tesla T4 with 15 GB, float32, our own sampler (this card has no bfloat16; vLLM is not installed)"),
        ("NVIDIA A10G", 23.6, (8, 6), True, torch.bfloat16, "here: NVIDIA A10G with 24 GB, bfloat16, vLLM (vLLM is installed)"),
        ("NVIDIA A10G", 23.6, (8, 6), False, torch.bfloat16,
         "here: NVIDIA A10G with 24 GB, bfloat16, our own sampler (vLLM is not installed)"),
        ("NVIDIA A10G", 23.6, (8, 6), True, torch.float32,
         "here: NVIDIA A10G with 24 GB, float32, vLLM (all weights learn, and an Adam step is lost in bfloat16; vLLM is installed)"),
    ],
)  # fmt: skip
def test_device_format_and_engine_of_a_card_are_said_in_one_line_with_the_reason(
    card, monkeypatch, name, memory, capability, vllm, dtype, line
):
    card(memory, capability, vllm)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert pick_device("auto", 0.9e6) == "cuda"
    assert placed("cuda", dtype=dtype) == line


def test_a_card_that_is_not_there_is_refused_by_its_number(card, monkeypatch):
    card(80, (9, 0), False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == "cuda:1"
    with pytest.raises(SystemExit, match="--device cuda:2: torch finds none here"):
        pick_device("cuda:2")


def test_vllm_is_refused_on_a_card_without_bfloat16_before_it_is_loaded(card):
    card(14.6, (7, 5), vllm=True)
    with pytest.raises(ValueError, match="--engine vllm: this card has no bfloat16") as error:
        placed("cuda", engine="vllm")
    assert_one_sentence(error)


def test_a_mac_has_its_gpu_for_a_model_that_is_not_small(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for there in (False, True):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=there: there)
        assert pick_device("auto", 0.9e6) == pick_device("auto") == "cpu"
        assert pick_device("auto", 0.6e9) == ("mps" if there else "cpu") and pick_device("cpu", 0.6e9) == "cpu"
        reason = "a guess: 0.9M parameters are faster here than on MPS, try --device mps" if there else "no CUDA device"
        assert placed("cpu", n_parameters=0.9e6).endswith(f"float32, our own sampler ({reason}; vLLM is for NVIDIA cards)")
        assert choose_model("auto")[1].startswith("no CUDA device, so the embedded pico_base")
    assert pick_device("mps") == "mps" and not policy_module.in_bfloat16("mps")
    assert placed("mps") == "here: Apple's GPU (MPS), on which we have not run it, float32, our own sampler (vLLM is for NVIDIA cards)"
    assert "(--device cpu; vLLM is for NVIDIA cards)" in placed("cpu", asked="cpu")
    monkeypatch.setattr(policy_module.dist, "is_initialized", lambda: True)
    assert pick_device("auto", 0.6e9) == "cpu"  # gloo adds up no gradients on MPS
    assert load_policy(str(PICO), 4, 8).device.type == "cpu"


@pytest.mark.parametrize("small, device", [(50e6, "cpu"), (1000, "mps")])
def test_a_model_goes_to_apples_gpu_by_its_size(monkeypatch, small, device):
    went = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *there, **_: went.extend(there) or module)
    monkeypatch.setattr(policy_module, "FOR_MPS", small)
    policy = load_policy(str(PICO), 4, 8)
    assert str(went[-1]) == device and policy.device.type == device and {p.dtype for p in policy.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", "gpu", "xpu"])
def test_a_device_that_is_not_there_is_refused_before_a_model_is_loaded(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for ask in (lambda: choose_model("auto", "letters", device, {}), lambda: load_policy(str(PICO), 4, 8, device=device)):
        with pytest.raises(SystemExit, match=f"--device {device}: torch finds none here; there is cpu") as error:
            ask()
        assert_one_sentence(error)


def test_on_a_card_cudnn_computes_no_attention(monkeypatch):
    asked: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    load_policy(str(PICO), 4, 8, device="cpu")
    assert asked == []
    monkeypatch.setattr(policy_module, "pick_device", lambda *_: "cuda")
    monkeypatch.setattr(policy_module, "in_bfloat16", lambda _: False)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)
    assert load_policy(str(PICO), 4, 8).device.type == "cuda" and asked == [False]


@pytest.mark.parametrize(
    "text, is_one",
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        ("CUDA driver error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED", False),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: unspecified launch failure", False),
    ],
)
def test_out_of_memory_of_the_driver_and_its_libraries_is_known_by_its_text(text, is_one):
    assert out_of_memory(RuntimeError(text)) == is_one
    if hasattr(torch, "AcceleratorError"):
        assert out_of_memory(torch.AcceleratorError(text, 2)) == is_one
    assert not out_of_memory(ValueError(text))  # it may quote a file


def test_out_of_memory_of_apples_gpu_is_known_by_its_text():
    assert out_of_memory(torch.OutOfMemoryError("x")) and out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"))
    assert not out_of_memory(RuntimeError("shapes do not match"))


def test_auto_on_the_cpu_of_a_machine_with_a_card_is_pico_base(card):
    card(79.1)
    path, why, fits = choose_model("auto", "letters", "cpu", {})
    assert path == str(PICO) and why.startswith("a CPU was asked for") and not fits


def test_without_a_hub_auto_takes_the_largest_that_is_in_the_cache(card):
    card(79.1, hub=lambda model: "the local cache" if model == SIX else "")
    path, why, _ = choose_model("auto", asked={})
    assert path == SIX and "from the local cache" in why and why.endswith(f"; the hub cannot be reached for {B16}, {T17}")
    card(79.1, hub=lambda model: "")
    path, why, fits = choose_model("auto", asked={})
    assert path == str(PICO) and why.startswith("the hub cannot be reached for") and "embedded pico_base" in why and not fits


def test_a_model_that_was_named_is_taken_and_what_would_make_it_fit_is_said(card):
    card(23.6)
    assert choose_model("auto", "letters", "auto", {})[0] == T17  # a 4B has too little room …
    assert choose_model(B16, "letters", "auto", {})[1].endswith("it fits with --gradient-checkpointing")  # … and may be named
    card(39.4)
    kept = "; by the plan it does not fit 39 GB of GPU memory: "
    for name, asked, advice in (
        (B16, {}, f"{kept}it fits with --gradient-checkpointing"),
        (B16, {"lora_rank": 0}, f"{kept}no setting that we know makes it fit"),
        (B16, CHECKED, ""),
        (T17, {}, ""),
        ("owner/name", {}, ""),  # nobody has computed it
        (B16, None, ""),  # it is only evaluated
    ):
        assert choose_model(name, "letters", "auto", asked) == (name, f"model {name}, as asked{advice}", {})
    assert choose_model(B16, "letters", "cpu", {})[1] == f"model {B16}, as asked"


def test_of_several_files_that_are_refused_the_first_by_name_is_told(tmp_path):
    for elsewhere in ("../x", "..\\x", "C:x"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"layer": f"{elsewhere}.safetensors"}}))
        with pytest.raises(ValueError, match="its weights are said to be in"):
            policy_module.refuse_pickles(tmp_path)
    weights = {f"layer {n}": f"{n}.bin" for n in "hgfedcb"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ValueError, match="said to be in b.bin"):
        policy_module.refuse_pickles(tmp_path)


def test_the_hub_is_not_waited_for(monkeypatch):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, model, timeout=None: asked.append(timeout))
    assert plan.where_is("nobody/nothing-here") == "the hub" and 0 < asked[0] <= 10


@pytest.mark.parametrize("sharded", [False, True])
def test_a_download_that_was_broken_off_is_no_model(monkeypatch, tmp_path, sharded):
    import huggingface_hub

    weights = ["a.safetensors", "b.safetensors"] if sharded else ["model.safetensors"]
    files = ["config.json", "tokenizer.json", *(["model.safetensors.index.json"] if sharded else []), *weights]

    def no_hub(self, model, timeout=None):
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_hub)
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda model, file: str(tmp_path / file) if (tmp_path / file).exists() else None
    )
    for i, file in enumerate(files):
        assert plan.where_is("owner/name") == "", files[:i]
        (tmp_path / file).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert plan.where_is("owner/name") == "the local cache"


def test_lora_without_peft_ends_in_a_sentence_and_all_weights_need_none(monkeypatch):
    import sys

    from bookkeeping import run

    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not there
    with pytest.raises(
        SystemExit, match="--lora-rank 4: LoRA needs peft, which is not installed here; .* or train all weights: --lora-rank 0"
    ):
        load_policy(str(PICO), 4, 8, "cpu")
    assert run.machine(load_policy(str(PICO), 0, 8, "cpu"))["peft"] == "not loaded"


@pytest.mark.parametrize("tokens, context", [(512, 32_768), (2048, 55_900), (8192, 131_072)])
def test_vllms_context_is_as_long_as_a_runs_longest_conversation(monkeypatch, tokens, context):
    """25 replies and what is said between, but no more than the model's own; 32,768 if that is enough."""
    import sys
    from types import SimpleNamespace

    from fast import ahead, machine

    class Started(Exception):
        pass

    def llm(**options):
        raise Started(options["max_model_len"])

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=llm))
    monkeypatch.setattr(machine, "which", lambda cfg, device: ("vllm", "asked for"))
    policy = load_policy(str(PICO), 0, 8, "cpu")
    policy.lm.config.max_position_embeddings = 131_072
    cfg = SimpleNamespace(env="swarm", max_tokens=tokens, vllm_memory=0.3, vllm_seeds=True, vllm_sleep=True)
    with pytest.raises(Started, match=f"^{context}$"):
        ahead.make_sampler(cfg, policy)
