"""Protects lab/speed/bench_gpu.py where there is no card: its arithmetic against what torch counts, and its commands in small."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lab.speed import bench, bench_gpu
from lab.speed import memory as plans

TINY = dict(vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            tie_word_embeddings=True)  # fmt: skip
MIXTURE = TINY | dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, tie_word_embeddings=False)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setitem(plans.MODELS, "tiny", TINY)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench_gpu, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(bench_gpu.importlib.util, "find_spec", lambda name: None)  # whoever has vLLM or TRL: not here
    return tmp_path / "results" / "bench"


@pytest.mark.parametrize("rank", [0, 4])
def test_flops_are_those_that_torch_counts(rank):
    policy, (rows, length) = bench_gpu.random_policy(TINY, rank, "cpu"), (2, 96)
    policy.lm.set_attn_implementation("eager")  # the counter does not know a CPU's fused attention
    ids = torch.randint(0, 512, (rows, length))
    with FlopCounterMode(display=False) as counter:
        policy.model(input_ids=ids, use_cache=False).logits.sum().backward()
    attention = 3 * 2 * 2 * 4 * 64 * rows * length * length  # torch counts the masked half as well; ours is half of this
    counted, ours = counter.get_total_flops() - attention, bench_gpu.step_flops(TINY, rank, rows, length, rows * length) - attention / 2
    assert ours == pytest.approx(counted, rel=0.06)  # with LoRA the first layer's inputs need no gradient, which ours counts


def test_weights_have_the_formats_of_a_run():
    frozen, free = bench_gpu.random_policy(TINY, 4, "meta"), bench_gpu.random_policy(TINY, 0, "meta")
    assert {p.dtype for p in frozen.trainable().values()} == {p.dtype for p in free.trainable().values()} == {torch.float32}
    assert {p.dtype for name, p in frozen.lm.named_parameters() if "lora_" not in name} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_a_step_reads_the_weights_once_and_a_prompt_once():
    count = sum(p.numel() for p in plans.build(TINY, 0).parameters())
    token = 2 * 4 * 2 * 16
    assert bench_gpu.step_bytes(TINY, 8, 2, 100, 50, 2) == 2 * (count + token * (2 * 100 + 8 * 25))


def test_of_a_mixture_the_experts_count_that_some_row_meets():
    named = dict(plans.build(MIXTURE, 0).named_parameters())
    experts = sum(p.numel() for name, p in named.items() if "experts." in name)
    rest = sum(p.numel() for p in named.values()) - experts - 512 * 64  # the embedding is looked up
    assert experts == 4 * 8 * 3 * 64 * 32
    assert bench_gpu.step_bytes(MIXTURE, 1, 1, 0, 0, 1) == pytest.approx(rest + experts / 4)  # two of eight
    assert bench_gpu.step_bytes(MIXTURE, 1000, 1, 0, 0, 1) == pytest.approx(rest + experts)
    # And each token is multiplied by two of eight.
    many = bench_gpu.step_flops(MIXTURE | dict(num_experts_per_tok=8), 0, 1, 64, 0) - bench_gpu.step_flops(MIXTURE, 0, 1, 64, 0)
    assert many == pytest.approx(6 * 64 * experts * 6 / 8)


def test_decode_and_train_write_what_they_found(tiny):
    bench_gpu.decode("tiny", rows=4, prompts=2, prompt_tokens=12, replies=6, rounds=1, device="cpu")
    bench_gpu.train("tiny", lengths=(32, 64), tokens=256, rank=4, rounds=1, device="cpu")
    found = json.loads((tiny / "gpu-decode-tiny.json").read_text())
    assert found["ours"]["tokens_per_second"] > 0 and found["model.generate"]["ratio"] == 1
    assert found["ours"]["share_of_limit"] == pytest.approx(found["ours"]["tokens_per_second"] / found["limit_tokens_per_second"], abs=1e-3)
    trained = json.loads((tiny / "gpu-train-tiny.json").read_text())["lengths"]
    assert set(trained) == {"32", "64"} and all(0 < of["ours"]["mfu"] for of in trained.values())


def test_memory_says_that_there_is_no_card():
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises(SystemExit, match="no.*here"):
        bench_gpu.memory()


def test_the_limits_are_of_the_fastest_try(monkeypatch):
    times = iter([9.0, 4.0, 2.0, 5.0, 3.0, 4.0] * 2)
    monkeypatch.setattr(bench_gpu, "seconds", lambda work, device: (work(), next(times))[1])
    assert bench_gpu.bandwidth("cpu", 1000) == 2 * 1000 / 2  # read and written
    assert bench_gpu.arithmetic("cpu", 10) == 2 * 10**3 / 2
