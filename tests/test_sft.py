"""Protects the warm-up: its loss is the expert's mean negative log-likelihood, end-of-turn token
included and prompt left out, however the batch is cut; and every demonstration has its turn.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import sft
from bookkeeping.run import left_out
from env_letters import Letters
from rollout import Episode
from sft import expert_episode, sft_batches, sft_step
from steps import assert_close, gradients, naive_logprobs

HUGE = 10**9  # tokens per micro-batch: everything at once


def make_env() -> Letters:
    return Letters(difficulty=2, reward_kind="binary", think=True, style="states")


@pytest.fixture(scope="module")
def episodes(tiny) -> list[Episode]:
    episodes = [expert_episode(tiny, make_env, seed) for seed in range(1, 6)]
    assert [(e.seed, e.reward) for e in episodes] == [(seed, 1.0) for seed in range(1, 6)]
    assert len({len(e.token_ids) for e in episodes}) > 1  # premise: there is padding
    return episodes


@pytest.mark.parametrize("micro_tokens", [HUGE, 250, 1])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_loss_and_gradient_are_those_of_the_naive_mean(load, episodes, lora_rank, micro_tokens):
    policy, each = load("qwen3", lora_rank, awake=True), []
    frozen = torch.optim.SGD(policy.trainable().values(), lr=0.0)  # it moves nothing
    loss, grad_norm = sft_step(policy, frozen, episodes, micro_tokens)
    ours = gradients(policy)
    policy.model.zero_grad()
    for e in episodes:
        assert e.sampled[-1] and e.token_ids[-1] == policy.tokenizer.eos_token_id
        each.append(-naive_logprobs(policy, e.token_ids)[torch.tensor(e.sampled[1:])])
    expected = torch.cat(each).mean()
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.trainable().values(), 1.0)
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    assert grad_norm == pytest.approx(norm.item(), rel=1e-3)
    assert_close(ours, gradients(policy))


def test_the_rate_rises_over_a_tenth_of_the_steps_and_falls_to_the_last(tiny, monkeypatch):
    rates = []

    def step(policy, optimizer, *rest):
        rates.append(optimizer.param_groups[0]["lr"])
        return 1.0, 1.0

    monkeypatch.setattr(sft, "sft_step", step)
    cfg = SimpleNamespace(
        sft_steps=20,
        sft_batch=2,
        sft_lr=1.0,
        seed=0,
        micro_tokens=HUGE,
        max_tokens=HUGE,
    )
    sft.sft(tiny, make_env, [1, 2], cfg)
    assert rates == pytest.approx([0.5, *((20 - i) / 20 for i in range(1, 20))])


def test_what_rl_could_not_play_is_left_out_and_counted(tiny, episodes):
    endless = Episode(9, 0, [5] * 600, [False] * 599 + [True], [0.0] * 600)  # the context is 512
    longest = max(max(e.turn_lengths) for e in episodes)
    for shown, most, kept, told in (
        (episodes, longest, 5, ""),
        ([*episodes, endless], longest, 5, "1 of 6 demonstrations are longer than the model's"),
        (episodes, longest - 1, 2, "3 of 5 demonstrations have a reply longer than --max-tokens"),
        (episodes, 1, 5, "shown, as there are no others"),
    ):
        fit, counts = sft.select_demonstrations(tiny, shown, most)
        symptoms = left_out(counts, most)
        assert len(fit) == kept and endless not in fit
        assert bool(symptoms) == bool(told) and told in "".join(symptoms.values())
    with pytest.raises(ValueError, match="every demonstration is longer than the model's context"):
        sft.select_demonstrations(tiny, [endless], HUGE)


@pytest.mark.parametrize("n, size, steps", [(10, 5, 6), (10, 4, 5), (3, 8, 3), (5, 1, 10)])
def test_every_episode_comes_once_an_epoch_in_an_order_of_the_seed(n, size, steps):
    episodes = [Episode(seed, 0, [], [], []) for seed in range(n)]
    batches = sft_batches(episodes, size, steps, seed=0)
    assert [len(batch) for batch in batches] == [size] * steps
    order = [e.seed for batch in batches for e in batch]
    for start in range(0, len(order), n):  # the last epoch may be cut short
        assert max(Counter(order[start : start + n]).values()) == 1
    assert sft_batches(episodes, size, 2 * steps, seed=0)[:steps] == batches
    assert n < 10 or sft_batches(episodes, size, steps, seed=1) != batches


def test_without_demonstrations_there_is_a_sentence_and_no_endless_loop():
    with pytest.raises(ValueError, match="SFT: there are no demonstrations.*--sft-steps 0"):
        sft_batches([], 2, 1, seed=0)
    assert sft_batches([], 2, 0, seed=0) == []
