"""Protects the vLLM engine with LoRA: what it says it sampled is what the policy would have said,
after every update and for prompts it has seen before; it keeps TorchSampler's conventions; episodes
and updates run through it; and where it fails it says so in a sentence.

One engine serves all tests of this file, in their order; the last one kills it.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from env_alphabet import Alphabet
from fast.sampler import TorchSampler
from fast.vllm_engine import VllmSampler
from rollout import play
from tests.test_sampler import assert_logprobs_are_the_models, grid, random_prompts

LONG = 100  # tokens: three blocks of vLLM's prefix cache, and some


@pytest.fixture(scope="module")
def policy(load):
    return load("qwen3_wide", 4)


@pytest.fixture(scope="module")
def sampler(policy):
    sampler = VllmSampler(policy)
    yield sampler
    sampler.close()


@pytest.fixture
def stops(policy, monkeypatch):
    """stops(ids): from now on these tokens end a reply."""
    return lambda ids: monkeypatch.setattr(policy, "stop_ids", frozenset(ids))


def tokens(groups) -> list[list[int]]:
    return [s.token_ids for samples in groups for s in samples]


def test_logprobs_equal_a_plain_forward_pass_for_the_base_and_after_each_of_three_updates(
    policy, sampler, stops, stir, naive_logprobs
):
    stops([])
    prompts, seen = random_prompts(3, LONG, 40), []
    for version in range(4):
        if version:
            stir(policy, 0.1, seed=version)
            sampler.sync(version)
        assert sampler.version == version
        for temperature in (1.0, 0.7, 0):
            groups = sampler.sample(prompts, 2, 24, temperature, grid(3, 2))
            # greedy: the log-prob of temperature 1
            given = policy, naive_logprobs, prompts, groups, temperature or 1.0
            assert_logprobs_are_the_models(*given)
        seen.append(tokens(groups))
        assert len(list(Path(sampler.home.name).iterdir())) == 1  # old adapters are gone
    assert len({str(s) for s in seen}) == 4  # else the updates would have tested nothing


def test_no_stale_answer_after_an_update_even_under_the_same_version(
    policy, sampler, stops, stir, naive_logprobs, cached
):
    stops([])
    prompts = random_prompts(LONG, seed=1)
    sampler.sample(prompts, 1, 8, 0, grid(1, 1))
    old = sampler.sample(prompts, 1, 8, 0, grid(1, 1))
    assert cached == [0, LONG // 32 * 32]  # there is a cache to be stale
    stir(policy, 0.2, seed=9)
    assert sampler.sample(prompts, 1, 8, 0, grid(1, 1)) == old  # not synced yet
    sampler.sync(sampler.version)  # as SFT does: other weights, the same number of updates
    new = sampler.sample(prompts, 1, 8, 0, grid(1, 1))
    assert cached[-1] == 0 and tokens(new) != tokens(old)
    assert_logprobs_are_the_models(policy, naive_logprobs, prompts, new, 1.0)


def test_greedy_tokens_stops_and_finished_are_torchsamplers(policy, sampler, stops):
    prompts, n = random_prompts(5, 14, 8, 21, 3), 12
    seeds = grid(5, 1)
    torch_sampler = TorchSampler(policy)
    stops([])
    free = sampler.sample(prompts, 1, n, 0, seeds)
    assert tokens(free) == tokens(torch_sampler.sample(prompts, 1, n, 0, seeds))
    assert all(len(t) == n for t in tokens(free)) and not any(s.finished for (s,) in free)
    # Stop tokens that do come: the first of one reply, and one amid another.
    stops({tokens(free)[0][0], tokens(free)[1][5]})
    ours, theirs = (s.sample(prompts, 1, n, 0, seeds) for s in (sampler, torch_sampler))
    for (a,), (b,) in zip(ours, theirs):
        assert (a.token_ids, a.finished) == (b.token_ids, b.finished)
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-4)
    assert len(tokens(ours)[0]) == 1 and {s.finished for (s,) in ours} == {True, False}
    # A stop token may be the last that max_tokens allows: then the reply is finished, and one token
    # earlier it is not.
    whole = max((s for (s,) in ours if s.finished), key=lambda s: len(s.token_ids))
    prompt, length = prompts[[s for (s,) in ours].index(whole)], len(whole.token_ids)
    assert length > 1
    assert sampler.sample([prompt], 1, length, 0, grid(1, 1))[0][0].finished
    assert not sampler.sample([prompt], 1, length - 1, 0, grid(1, 1))[0][0].finished


def test_a_sample_depends_on_prompt_and_seed_and_not_on_the_batch(sampler, stops):
    stops(range(0, 1024, 16))
    prompts, k, n = random_prompts(4, 23, 90, 9, 15), 3, 30
    seeds = grid(5, k)
    batch = sampler.sample(prompts, k, n, 1.0, seeds)
    assert len({tuple(s.token_ids) for s in batch[2]}) == k  # members of a group are no copies
    for g, i in ((0, 2), (2, 0), (4, 1)):
        alone = sampler.sample([prompts[g]], 1, n, 1.0, [[seeds[g][i]]])
        assert tokens(alone) == [batch[g][i].token_ids]
    assert tokens(sampler.sample(prompts, k, n, 1.0, grid(5, k, noise=1))) != tokens(batch)


def chi_square_excess(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """How many standard deviations the counts' chi-square statistic lies above its mean.

    Rare tokens are pooled.
    """
    expected = probabilities * len(tokens)  # [V]
    counts = np.bincount(tokens, minlength=len(expected))  # [V]
    common = expected >= 10
    expected = np.append(expected[common], expected[~common].sum())
    counts = np.append(counts[common], counts[~common].sum())
    assert len(expected) > 15  # premise: there is a distribution to compare
    freedom = len(expected) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_first_token_follows_the_policys_whole_distribution(
    policy, sampler, stops, temperature
):
    stops([])
    (prompt,), n = random_prompts(10), 4000
    first = np.array(tokens(sampler.sample([prompt], n, 1, temperature, grid(1, n))))[:, 0]
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    assert abs(chi_square_excess(first, (logits / temperature).softmax(-1).numpy())) < 4
    wrong = (logits / (1.5 * temperature)).softmax(-1)
    assert chi_square_excess(first, wrong.numpy()) > 20  # the test has teeth


def test_a_conversation_of_several_turns_is_token_exact(policy, sampler, stops, naive_logprobs):
    """Random weights never say <|im_end|>, so every eighth token ends a turn here."""
    stops({policy.tokenizer.eos_token_id, *range(16, 1024, 8)})
    make_env = lambda: Alphabet(3, 3, 1, 2, 8.0, False, True, "derives")
    seeds, k = [3, 4], 2
    groups = play(policy, sampler, make_env, seeds, k, 60, 1.0, sample_seed=5)
    episodes = [e for group in groups for e in group]
    assert any(e.turns == 3 and e.stop_reason == "done" for e in episodes)
    assert {e.stop_reason for e in episodes} <= {"done", "truncated"}
    assert {e.policy_version for e in episodes} == {sampler.version}
    for e in episodes:
        with torch.no_grad():
            again = naive_logprobs(policy, e.token_ids)
        mine = torch.tensor(e.sampled[1:])
        assert (again - torch.tensor(e.logprobs[1:]))[mine].abs().max() <= 1e-4
        assert not any(torch.tensor(e.logprobs[1:])[~mine])
    # Greedy, the two engines play the same episodes.
    ours, theirs = (
        play(policy, s, make_env, seeds, 1, 40, 0.0, sample_seed=0)
        for s in (sampler, TorchSampler(policy))
    )
    assert [g[0].token_ids for g in ours] == [g[0].token_ids for g in theirs]


# -------------------------------------------------------------------------------- what can go wrong


@pytest.fixture
def failing(sampler):
    """failing(error, more_than, after): vLLM's forward pass raises `error`.

    When more than so many rows are in it, from call `after` on.
    """
    handles = []

    def arm(error, more_than, after=0):
        calls = []

        def hook(module, args, kwargs):
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            calls.append(len(ids))
            if len(ids) > more_than and len(calls) > after:
                raise error

        sampler.llm.apply_model(
            lambda model: handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))
        )

    yield arm
    for handle in handles:
        handle.remove()


def test_an_engine_that_dies_mid_batch_says_when_and_how_to_go_on(sampler, failing):
    failing(RuntimeError("CUDA error: an illegal memory access\nand more"), more_than=0, after=2)
    with pytest.raises(RuntimeError) as caught:
        sampler.sample(random_prompts(5, 6), 2, 9, 1.0, grid(2, 2))
    assert str(caught.value) == (
        "vLLM died while sampling 2 replies to each of 2 prompts "
        f"at policy version {sampler.version} "
        "(RuntimeError: CUDA error: an illegal memory access); "
        "what was saved is kept, go on with --resume"
    )
