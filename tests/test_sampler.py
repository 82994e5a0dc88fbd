"""Protects the sampler and its decoders: what it says it sampled is what the model would have said,
for every architecture, whatever the batch; it stops where it must; it samples from the weights of
the last sync and never edits them.
"""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fast import machine
from fast.layers import folded_layers
from fast.logprobs import token_logprobs
from fast.sampler import FastDecoder, PlainDecoder, TorchSampler
from policy import PlainSampler, draw, load_policy
from rollout import Episode, Player, sample_each

# Other layers, or attention that is not to everything: the fast decoder does not know them.
PLAIN = ("gpt2", "gemma2", "qwen2_window", "mistral_window", "llama_dynamic", "lfm2", "granite")


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(11, 1024, n).tolist() for n in lengths]


def grid(groups: int, k: int, noise: int = 0) -> list[list[tuple[int, ...]]]:
    return [[(noise, g, i, 0) for i in range(k)] for g in range(groups)]


def with_stops(policy, stop_ids):
    return replace(policy, stop_ids=frozenset(stop_ids))


def endless(policy):
    """The same policy, but no token ends its reply."""
    return with_stops(policy, {-1})


@torch.no_grad()
def assert_logprobs_are_the_models(policy, naive_logprobs, prompts, groups, temperature) -> None:
    for prompt, samples in zip(prompts, groups):
        for s in samples:
            logprobs = naive_logprobs(policy, prompt + s.token_ids, temperature)
            logprobs = logprobs[len(prompt) - 1 :]  # [sampled]
            assert len(s.logprobs) == len(s.token_ids) == len(logprobs)
            assert (logprobs - torch.tensor(s.logprobs)).abs().max() < 1e-4


# ----------------------------------------------------------------------------------------- decoders


def test_products_in_bfloat16_are_sampled_from_as_they_are_trained_on(load):
    """Same layers, same roundings: the two differ by little, and both from float32 by more."""
    policy = load("qwen3", 4, awake=True)
    policy.bfloat16, (prompt,) = True, random_prompts(9)
    sampler = TorchSampler(policy)
    assert isinstance(sampler.decoder, FastDecoder) and sampler.decoder.head.dtype == torch.bfloat16
    samples = sampler.sample([prompt], 6, 12, 1.0, [[(0, i) for i in range(6)]])[0]
    gaps = {True: [], False: []}
    for sample in samples:
        ids = torch.tensor([prompt + sample.token_ids])
        mask = torch.arange(ids.shape[1] - 1)[None] >= len(prompt) - 1
        for policy.bfloat16 in gaps:
            again = token_logprobs(policy, ids, mask)[0].detach()
            gaps[policy.bfloat16] += (again - torch.tensor(sample.logprobs)).abs().tolist()
    mean = {narrow: sum(found) / len(found) for narrow, found in gaps.items()}
    assert mean[True] < mean[False] < 0.03


def test_one_prompt_sampled_k_times_is_read_once(tiny, monkeypatch):
    """Also if a batch asks for it k times. The shapes are [rows, new tokens]."""
    sampler, seen = TorchSampler(endless(tiny)), []
    spy = lambda ids, run=sampler.decoder.run: seen.append([*ids.shape]) or run(ids)
    monkeypatch.setattr(sampler.decoder, "run", spy)
    sampler.sample(random_prompts(7, 7), 8, 3, 1.0, grid(2, 8))
    players = [Player(Episode(0, 0, ids), None, n) for n, ids in enumerate(3 * random_prompts(5))]
    sample_each(sampler, players, 2, 1.0, 0)
    assert seen == [[2, 7], [16, 1], [16, 1], [1, 5], [3, 1]]


def test_a_cpu_decodes_as_many_rows_as_its_free_memory_has_room_for(tiny, monkeypatch):
    """Nothing is raised there if there is too little: the system would end the process."""
    whole = TorchSampler(endless(tiny)).sample(random_prompts(7, 7), 4, 3, 1.0, grid(2, 4))
    bytes_of = tiny.lm.config.num_hidden_layers * 2 * tiny.lm.config.num_key_value_heads
    bytes_of *= tiny.lm.config.head_dim * 4
    conversations = 4 * (7 + 3) * bytes_of  # of one group, whose replies have three tokens
    monkeypatch.setattr("fast.sampler.free_memory", lambda: 2 * conversations / 2**30)
    sampler, seen = TorchSampler(endless(tiny)), []
    spy = lambda ids, run=sampler.decoder.run: seen.append([*ids.shape]) or run(ids)
    monkeypatch.setattr(sampler.decoder, "run", spy)
    groups = sampler.sample(random_prompts(7, 7), 4, 3, 1.0, grid(2, 4))
    assert seen == 2 * [[1, 7], [4, 1], [4, 1]]
    ids = lambda groups: [[sample.token_ids for sample in group] for group in groups]
    assert ids(groups) == ids(whole)


# --------------------------------------------------------------------------- same seed, same sample


def on_a_card(policy) -> FastDecoder:
    """Each row has its own keys, also those of the prompt."""
    decoder = FastDecoder(policy)
    decoder.shares = False
    return decoder


@pytest.mark.parametrize("decoder", [FastDecoder, on_a_card, PlainDecoder])
def test_a_sample_depends_on_prompt_and_seed_and_not_on_the_batch(tiny, decoder, monkeypatch):
    monkeypatch.setattr("fast.sampler.GROWTH", 5)  # the rows' own caches grow often
    policy = with_stops(tiny, range(0, 1024, 16))  # rows end early and late
    prompts, k, n = random_prompts(4, 23, 9, 9, 15), 3, 30
    seeds = grid(5, k)

    def sample(prompts, k, seeds, max_rows=256):
        sampler = TorchSampler(policy, max_rows)
        sampler.decoder = decoder(policy)
        return [
            [s.token_ids for s in samples] for samples in sampler.sample(prompts, k, n, 1.0, seeds)
        ]

    batch = sample(prompts, k, seeds)
    lengths = [len(tokens) for group in batch for tokens in group]
    assert min(lengths) < 8 and max(lengths) > 20  # else this would test little
    assert len({tuple(tokens) for tokens in batch[1]}) == k  # members of a group are no copies
    assert sample(prompts, k, grid(5, k, noise=1)) != batch
    for g, prompt in enumerate(prompts):
        assert sample([prompt], k, [seeds[g]]) == [batch[g]]
    for g, i in ((0, 2), (1, 0), (4, 1)):
        assert sample([prompts[g]], 1, [[seeds[g][i]]]) == [[batch[g][i]]]
    assert sample(prompts[::-1], k, seeds[::-1]) == batch[::-1]
    for max_rows in (1, 4, 6):
        assert sample(prompts, k, seeds, max_rows) == batch


# ------------------------------------------------------------------------------------ the plain way


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0])
@pytest.mark.parametrize(
    "kind, lora_rank",
    [
        ("pico", 4),
        ("qwen3", 0),
        ("qwen3", 4),
        ("qwen2", 4),
        ("llama", 4),
        ("llama_bias", 4),
        ("gpt2", 0),
        ("gemma2", 4),
        ("qwen2_window", 4),
        ("mistral_window", 0),
        ("llama_dynamic", 0),
        ("lfm2", 0),
        ("granite", 4),
    ],
)
def test_it_draws_what_the_plain_sampler_draws(load, snapshot, kind, lora_rank, temperature):
    """The same tokens with the model's own log-probs, to the first stop token or to max_tokens.

    And the policy's weights are never edited.
    """
    policy = with_stops(load(kind, lora_rank, awake=True), range(0, 1024, 12))
    # noise 1: with 0, a draw of mistral_window falls so near the border of two tokens that the
    # rounding of log-probs, 5e-6, decides it, one way on one processor and the other on another.
    prompts, seeds, before = random_prompts(4, 31, 9, 9), grid(4, 3, noise=1), snapshot(policy)
    sampler = TorchSampler(policy)
    assert isinstance(sampler.decoder, PlainDecoder) == (kind in PLAIN)
    plain = sum(PlainSampler(policy).sample(prompts, 3, 12, temperature, seeds), [])
    fast = sum(sampler.sample(prompts, 3, 12, temperature, seeds), [])
    assert all(torch.equal(before[name], now) for name, now in snapshot(policy).items())
    assert len(plain) == 12
    for a, b in zip(plain, fast, strict=True):
        assert (a.token_ids, a.finished) == (b.token_ids, b.finished)
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-4)
        n = len(b.token_ids)
        assert len(b.logprobs) == n and (b.finished or n == 12)
        stops = [token in policy.stop_ids for token in b.token_ids]
        assert stops == [False] * (n - 1) + [b.finished]
    if temperature:
        assert {a.finished for a in plain} == {True, False}
        assert len({len(a.token_ids) for a in plain}) > 3


# --------------------------------------------------------------------------------------------- draw


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draw_is_the_inverse_cdf(temperature):
    logits = temperature * torch.tensor([0.2, 0.5, 0.0, 0.3]).log()  # cdf 0.2 0.7 0.7 1.0
    uniform = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-24])
    tokens, logprobs = draw(logits.expand(6, -1), uniform, temperature)
    assert tokens.tolist() == [0, 0, 1, 1, 3, 3]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.2, 0.2, 0.5, 0.5, 0.3, 0.3]))


def test_a_token_without_probability_is_never_drawn():
    """Its uniform rounds to 1 and would pass the end of the CDF, as about 3 of 10^8 do."""
    logits = torch.tensor([0.0, 0.0, -float("inf")])
    uniform = torch.tensor([np.nextafter(1.0, 0.0)], dtype=torch.float32)
    token, logprob = draw(logits[None], uniform, 1.0)
    assert token.item() == 1 and torch.isfinite(logprob).all()


# ------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_old_weights_until_sync_and_new_ones_after(load, naive_logprobs, stir, lora_rank):
    policy = endless(load("qwen3", lora_rank))
    sampler = TorchSampler(policy)
    prompts, seeds = random_prompts(6, 13), grid(2, 2)
    assert sampler.version == 0
    old = sampler.sample(prompts, 2, 12, 1.0, seeds)
    stir(policy, 0.2)  # all trainable weights: embeddings, norms and head too with rank 0
    token_logprobs(policy, torch.tensor(prompts[:1]), torch.ones(1, 5, dtype=torch.bool))
    assert sampler.sample(prompts, 2, 12, 1.0, seeds) == old
    sampler.sync(1)
    if lora_rank:  # sampler and trainer share one copy
        assert sampler.decoder.layers is folded_layers(policy.lm, torch.float32)
    new = sampler.sample(prompts, 2, 12, 1.0, seeds)
    assert new != old and sampler.version == 1
    assert_logprobs_are_the_models(policy, naive_logprobs, prompts, new, 1.0)


@pytest.mark.parametrize("k, room", [(1, 3), (4, 8), (4, 5)])
def test_out_of_memory_costs_the_kept_caches_and_then_rows_and_changes_no_sample(
    load, monkeypatch, k, room
):
    policy = with_stops(load("pico"), range(0, 1024, 20))
    prompts, seeds = random_prompts(*range(2, 9)), grid(7, k)
    calm, poor, tried = TorchSampler(policy), TorchSampler(policy), []
    expected = calm.sample(prompts, k, 6, 1.0, seeds)
    batch = poor._batch

    def little_memory(prompts, k, n, temperature, seeds, known, keep):
        tried.append((len(prompts) * k, keep))
        if keep or len(prompts) * k > room:
            raise torch.OutOfMemoryError("pretended")
        return batch(prompts, k, n, temperature, seeds, known, keep)

    monkeypatch.setattr(poor, "_batch", little_memory)
    for _ in range(2):
        got = poor.sample(prompts, k, 6, 1.0, seeds, keep=True)
        for a, b in zip(sum(got, []), sum(expected, [])):
            assert (a.token_ids, a.cache) == (b.token_ids, None)
    assert tried[:2] == [(7 * k, True), (7 * k, False)]
    assert max(tried[len(tried) // 2 :]) <= (room, False)  # it has learned how much fits


def test_one_prompt_that_does_not_fit_says_what_to_do(load, monkeypatch):
    sampler = TorchSampler(load("pico", lora_rank=0))
    monkeypatch.setattr(sampler, "_batch", Mock(side_effect=torch.OutOfMemoryError("pretended")))
    with pytest.raises(machine.CannotGoOn, match="lower --k or --max-tokens"):
        sampler.sample([[1, 2], [3]], 2, 4, 1.0, grid(2, 2))


def test_the_decoder_makes_its_tensors_where_the_weights_are(model_folder, monkeypatch):
    """On a card a table left on the CPU fails at the first prompt.

    The meta device stands in: it is another device, and computes shapes alone.
    """
    decoder = FastDecoder(load_policy(model_folder("qwen3"), 4, 8, device="meta"))
    there = dict(dtype=torch.long, device="meta")
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: [0] * len(tensor))
    with torch.inference_mode():
        read = decoder.prefill(torch.zeros((2, 5), **there), torch.zeros(2, **there), 3, 4)
        stepped = decoder.run(torch.zeros((6, 1), **there))
    assert read.shape == stepped.shape == (6, 1024)
    assert read.device.type == stepped.device.type == "meta"
