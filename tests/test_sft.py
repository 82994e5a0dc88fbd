"""Protects the warm-up: the loss is the expert's mean negative log-likelihood, stop token included and prompt left out,
however the batch is cut; a few steps bring it down; and every demonstration has its turn.
"""

from collections import Counter

import pytest
import torch

import sft
from env_letters import Letters
from rollout import Episode
from sft import demonstrations, sft_batches, sft_step

HUGE = 10**9  # tokens a micro-batch: everything at once


def make_env() -> Letters:
    return Letters(difficulty=2, reward="binary", think=True, style="states")


@pytest.fixture(scope="module")
def episodes(tiny) -> list[Episode]:
    return demonstrations(tiny, make_env, [1, 2, 3, 4, 5])


def naive_mean_nll(naive_logprobs, policy, episodes) -> torch.Tensor:
    """- mean log p over the expert's tokens, one at a time."""
    each = []
    for e in episodes:
        logp = naive_logprobs(policy, e.token_ids)  # [T-1]
        each += [-logp[t - 1] for t in range(1, len(e.token_ids)) if e.sampled[t]]
    return sum(each) / len(each)


def step_nothing(policy, episodes, micro_tokens: int = HUGE) -> dict[str, float]:
    """One sft_step that moves nothing, so that the gradients can be read after it."""
    return sft_step(policy, torch.optim.SGD(policy.trainable().values(), lr=0.0), episodes, micro_tokens)


def test_a_demonstration_is_one_expert_episode_a_seed(episodes):
    assert [e.seed for e in episodes] == [1, 2, 3, 4, 5]
    assert all(e.reward == 1.0 for e in episodes)
    assert len({len(e.token_ids) for e in episodes}) > 1  # premise of the tests below: there is padding


def test_an_expert_that_fails_stops_the_run_and_is_not_learnt_from(tiny):
    class Fails(Letters):
        def step(self, reply):
            raise ValueError("no such move")

    with pytest.raises(ValueError, match="the expert's episode of task 2 failed: no such move"):
        demonstrations(tiny, lambda: Fails(2, "binary", True, "states"), [2])


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_loss_and_gradient_are_those_of_the_naive_mean(load, naive_logprobs, gradients, assert_close, episodes, lora_rank):
    policy = load("qwen3", lora_rank, awake=True)
    stats = step_nothing(policy, episodes)
    ours = gradients(policy)
    policy.model.zero_grad()
    expected = naive_mean_nll(naive_logprobs, policy, episodes)
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.trainable().values(), 1.0)
    assert stats["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert stats["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    assert stats["trained_tokens"] == sum(e.reply_tokens for e in episodes)
    assert_close(ours, gradients(policy))


def test_the_stop_token_is_learnt(load, naive_logprobs):
    policy = load("qwen3", 4)
    end = policy.tokenizer.eos_token_id
    episode = demonstrations(policy, make_env, [1])[0]
    assert episode.token_ids[-1] == end and episode.sampled[-1]
    only_stop = Episode(1, 0, episode.token_ids, [False] * (len(episode.token_ids) - 1) + [True], episode.logprobs)
    with torch.no_grad():
        before = naive_logprobs(policy, episode.token_ids)[-1].item()
    optimizer = torch.optim.SGD(policy.trainable().values(), lr=0.1)
    stats = sft_step(policy, optimizer, [only_stop], HUGE)
    assert stats["loss"] == pytest.approx(-before, abs=1e-4) and stats["trained_tokens"] == 1
    with torch.no_grad():
        assert naive_logprobs(policy, episode.token_ids)[-1].item() > before


def test_cutting_into_micro_batches_changes_nothing(load, gradients, assert_close, episodes):
    policy = load("qwen3", 4, awake=True)
    whole = step_nothing(policy, episodes)
    expected = gradients(policy)
    for micro_tokens in (1, 250):
        assert step_nothing(policy, episodes, micro_tokens) == pytest.approx(whole, rel=1e-4)
        assert_close(gradients(policy), expected)


@pytest.mark.parametrize("kind, lora_rank", [("qwen3", 4), ("qwen3", 0), ("gpt2", 4)])
def test_ten_steps_on_one_batch_bring_the_loss_down(load, episodes, kind, lora_rank):
    policy = load(kind, lora_rank)
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-2)
    losses = [sft_step(policy, optimizer, episodes, HUGE)["loss"] for _ in range(10)]
    assert losses[-1] < 0.9 * losses[0]


def test_what_is_not_finite_raises_and_leaves_the_weights_untouched(load, snapshot, episodes):
    policy = load("qwen3", 4)
    name = next(iter(policy.trainable()))
    policy.trainable()[name].data[0, 0] = float("nan")
    before = snapshot(policy)
    with pytest.raises(FloatingPointError, match="not both finite"):
        sft_step(policy, torch.optim.AdamW(policy.trainable().values(), lr=0.1), episodes, HUGE)
    assert all(torch.equal(p.nan_to_num(7), before[n].nan_to_num(7)) for n, p in snapshot(policy).items())


@pytest.mark.parametrize("n, size, steps", [(10, 5, 6), (10, 4, 5), (3, 8, 3), (7, 7, 2), (5, 1, 10)])
def test_every_episode_comes_once_an_epoch(n, size, steps):
    episodes = [Episode(seed, 0, [], [], []) for seed in range(n)]
    batches = sft_batches(episodes, size, steps, seed=0)
    assert [len(batch) for batch in batches] == [size] * steps
    order = [e.seed for batch in batches for e in batch]
    for start in range(0, len(order), n):
        epoch = order[start : start + n]
        assert max(Counter(epoch).values()) == 1  # the last epoch may be cut short, but repeats none either
        assert len(epoch) < n or sorted(epoch) == list(range(n))


def test_the_order_is_shuffled_anew_each_epoch_and_depends_on_the_seed_only():
    episodes = [Episode(seed, 0, [], [], []) for seed in range(20)]
    order = lambda seed: [e.seed for batch in sft_batches(episodes, 4, 10, seed) for e in batch]
    assert order(0) == order(0) != order(1)
    assert list(range(20)) != order(0)[:20] != order(0)[20:]
    assert sft_batches(episodes, 4, 3, 0) == sft_batches(episodes, 4, 10, 0)[:3]  # more steps do not change the first ones


def test_processes_share_demonstrations_by_length_so_that_none_waits_for_the_longest(load, monkeypatch, episodes):
    shared = []
    monkeypatch.setattr(sft.parallel, "share", lambda some: shared.extend(len(e.token_ids) for e in some) or some)
    step_nothing(load("qwen3", 4), sorted(episodes, key=lambda e: -len(e.token_ids)))
    assert shared == sorted(shared) and len(shared) == 5
