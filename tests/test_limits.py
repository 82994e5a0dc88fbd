"""Protects lab/speed/limits.py: operations are those that torch counts, bytes those that a step reads,
and a smaller copy is never the slower limit. And lab/speed/bench_peers.py: who is asked answers, and is
compared in its faster way."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lab.speed import bench_peers, card, limits, sides
from lab.speed import memory as plans
from rollout import Episode

TINY = dict(vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, tie_word_embeddings=True)  # fmt: skip
MIXTURE = TINY | dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, tie_word_embeddings=False)


def episode(*parts: int) -> Episode:
    """Tokens that are read, sampled, read, sampled, …"""
    mask = [i % 2 == 1 for i, n in enumerate(parts) for _ in range(n)]
    return Episode(0, 0, [0] * len(mask), mask, [])


def test_turns_say_what_was_read_and_what_was_sampled():
    assert limits.turns(episode(5, 3, 2, 4)).tolist() == [[0, 5, 8], [8, 10, 14]]
    assert limits.turns(episode(5, 3, 2)).tolist() == [[0, 5, 8]]


@pytest.mark.parametrize("rank", [0, 4])
def test_the_operations_of_a_training_step_are_those_that_torch_counts(rank):
    policy, (rows, length) = card.random_policy(TINY, rank, "cpu"), (2, 96)
    policy.lm.set_attn_implementation("eager")  # the counter does not know a CPU's fused attention
    ids = torch.randint(0, 512, (rows, length))
    with FlopCounterMode(display=False) as counter:
        policy.model(input_ids=ids, use_cache=False).logits.sum().backward()
    wide, seen = 4 * 64, length**2
    counted = counter.get_total_flops() - rows * 12 * wide * seen  # torch counts the masked half of attention as well
    groups = [[episode(1, length)] for _ in range(rows)]  # the last one predicts nothing, so `length` tokens are run
    flops, _ = limits.training(limits.shape_of(TINY, rank), groups, 4, rank == 0)[0]
    assert flops - rows * 12 * wide * seen / 2 == pytest.approx(counted, rel=0.06)  # with LoRA the first layer's inputs need no gradient


def test_a_groups_prompt_is_trained_on_once():
    """Two replies of 5 tokens to 100: the last token of each predicts nothing."""
    shape, group = limits.shape_of(TINY, 4), [episode(100, 5), episode(100, 5)]
    tokens = 100 + 2 * 4
    pairs = 100**2 / 2 + 2 * sum(range(100, 104)) + 2 * 4 / 2  # half a pair is a token with itself
    flops, size = limits.training(shape, [group], 4)[0]
    assert flops == tokens * (4 * shape.linear + 6 * shape.lora) + 4 * 10 * shape.head + 12 * shape.wide * pairs
    assert size == 2 * 4 * shape.weights + 32 * shape.lora


def test_the_operations_of_sampling_are_those_that_torch_counts():
    policy, (prompt, reply) = card.random_policy(TINY, 0, "cpu"), (40, 8)
    policy.lm.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        cache = policy.lm(input_ids=torch.zeros(1, prompt, dtype=torch.long), logits_to_keep=1).past_key_values
        for _ in range(reply - 1):
            cache = policy.lm(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache).past_key_values
    work = limits.sampling(limits.shape_of(TINY), [[episode(prompt, reply)]], 4)
    assert len(work) == reply
    masked = 2 * 4 * 64 * prompt**2  # half of the prompt's attention
    seen = sum(4 * 4 * 64 for _ in range(reply - 1))  # each token sees itself too, which ours leaves out
    assert sum(f for f, _ in work) == pytest.approx(counter.get_total_flops() - masked - seen, rel=1e-3)


def test_a_step_reads_the_weights_once_a_prompt_once_and_each_row_its_own():
    shape, prompt, reply = limits.shape_of(TINY), 100, 5
    assert shape.weights == sum(p.numel() for p in plans.build(TINY, 0).parameters())
    assert shape.cache == 2 * 4 * 2 * 16
    groups = [[episode(prompt, reply)] * 4 for _ in range(2)]
    read = [size for _, size in limits.sampling(shape, groups, 2)]
    assert read == [2 * (shape.weights + shape.cache * (2 * prompt + 8 * j)) for j in range(reply)]


def test_a_row_that_has_ended_costs_nothing_more():
    shape = limits.shape_of(TINY)
    short, long = limits.sampling(shape, [[episode(10, 3)]], 4), limits.sampling(shape, [[episode(10, 6)]], 4)
    both = limits.sampling(shape, [[episode(10, 3)], [episode(10, 6)]], 4)
    assert [f for f, _ in both] == pytest.approx([a[0] + b[0] for a, b in zip(short, long)] + [f for f, _ in long[3:]])


def test_a_second_turn_reads_only_what_is_new():
    shape = limits.shape_of(TINY)
    work = limits.sampling(shape, [[episode(10, 3, 4, 2)]], 1)
    assert len(work) == 5
    flops, size = work[3]
    assert flops == 2 * shape.linear * 4 + 2 * shape.wide * (17**2 - 13**2) + 2 * shape.head
    assert size == shape.weights + 17 * shape.cache


def test_of_a_mixture_the_experts_count_that_some_row_meets():
    named = dict(plans.build(MIXTURE, 0).named_parameters())
    experts = sum(p.numel() for name, p in named.items() if "experts." in name)
    rest = sum(p.numel() for p in named.values()) - experts - 512 * 64  # the embedding is looked up
    shape = limits.shape_of(MIXTURE)
    assert shape.experts == experts == 4 * 8 * 3 * 64 * 32
    assert shape.read(1) == pytest.approx(rest + experts / 4)  # two of eight
    assert shape.read(1000) == pytest.approx(rest + experts)
    many = limits.shape_of(MIXTURE | dict(num_experts_per_tok=8))
    assert many.linear - shape.linear == pytest.approx(experts * 6 / 8)  # and each token is multiplied by two of eight


def test_the_limit_is_each_steps_longer_time():
    machine = limits.Machine(100.0, {10: 5.0, 1000: 2.0})
    assert machine.at(4) == machine.at(10) == machine.at(999) == 5.0 and machine.at(1000) == 2.0
    assert machine.seconds([(300, 10), (100, 20), (0, 2000)]) == (3 + 4 + 1000, 3 + 1 + 0, 2 + 4 + 1000)
    row = limits.of_limit(machine, [(300, 10)], [12.0, 6.0, 7.0], 70)
    assert (row["of_limit"], row["limited_by"], row["tokens_per_second"]) == (round(3 / 7, 4), "arithmetic", 10)


def test_the_limits_are_of_the_fastest_try_and_of_the_best_product(monkeypatch):
    times = iter([9.0, 4.0, 2.0, 5.0, 3.0, 4.0])
    monkeypatch.setattr(limits, "seconds", lambda work, device: (work(), next(times))[1])
    assert limits.bandwidth("cpu", 1000) == 1000 / 2  # 500 read, 500 written
    x, w = torch.randn(8, 4), torch.randn(6, 4)
    for product in limits.products(x, w).values():  # all of them are the same product
        assert torch.allclose(product(), x @ w.T, atol=1e-5)
    times = iter([4.0] * limits.TRIES + [2.0] * limits.TRIES)
    found = limits.arithmetic("cpu", torch.float32, (10,))
    assert max(found.values()) == 2 * 10**3 / (2.0 if len(found) == 2 else 4.0)


def test_rows_of_swarm_and_letters_are_told_by_what_was_trained_on():
    """Groups whose rewards are all alike are sampled, and not trained on."""
    paid = lambda reward: Episode(0, 0, [0] * 14, [False] * 10 + [True] * 4, [], reward=reward)
    groups = [[paid(0.0), paid(1.0)], [paid(1.0), paid(1.0)]]
    rows = limits.both(limits.Machine(1e9, {1: 1e9}), limits.shape_of(TINY, 4), 4, [(2.0, 1.0, groups)])
    assert (rows["sampling"]["tokens"], rows["training"]["tokens"]) == (16, 8)
    assert rows["sampling"]["tokens_per_second"] == 8


def test_several_processes_answer_as_one_side():
    """The slowest one's seconds, everybody's tokens; and a line that is no answer is passed over."""
    code = "import sys\nfor line in sys.stdin: print('loading', flush=True); print('DONE {} {}', flush=True)"
    with sides.Other([code.format(0.5, 30), code.format(0.75, 10)], threads=1) as side:
        assert [side.answer() for _ in range(3)] == [(0.75, 40.0)] * 3


def test_a_side_that_ends_is_named_and_its_partner_does_not_wait():
    codes = ["import time; time.sleep(3600)", "'this one ends'"]
    with sides.Other(codes, threads=1) as side, pytest.raises(SystemExit, match="a side has ended; run it alone.*this one ends"):
        side.answer()
    assert all(process.returncode is not None for process in side.processes)


def test_each_side_is_compared_in_its_faster_way():
    rates = {("ours", 1): [8.0, 8.0, 9.0], ("ours", 2): [6.0, 6.0, 6.0], ("vllm", 1): [3.0, 3.0, 3.0], ("vllm", 2): [4.0, 4.0, 3.0]}
    found = bench_peers.best_against_best(rates)
    assert found["vllm"]["ours_is_faster"] == {"median": 2.0, "low": 2.0, "high": 3.0}
    assert found["ours"]["two_over_one"]["median"] == 0.75 and "ours_is_faster" not in found["ours"]
