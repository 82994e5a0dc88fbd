"""Protects the sampler and its decoders: what it says it sampled is what the model would have said,
for every architecture, whatever the batch; it stops where it must; it samples from the weights of
the last sync and never edits them.
"""

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fast import machine
from fast.ahead import make_sampler
from fast.sampler import FastDecoder, PlainDecoder, TorchSampler, folded, make_decoder
from policy import PlainSampler, Policy, draw, load_policy
from settings import Config

FAST = ["pico", "qwen3", "qwen2", "llama", "llama_bias"]
PLAIN = ["gpt2", "gemma2", "qwen2_window", "llama_dynamic"]


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


def assert_logprobs_are_the_models(policy, naive_logprobs, prompts, groups, temperature) -> None:
    for prompt, samples in zip(prompts, groups):
        for s in samples:
            with torch.no_grad():
                logprobs = naive_logprobs(policy, prompt + s.token_ids, temperature)
            logprobs = logprobs[len(prompt) - 1 :]  # [sampled]
            assert len(s.logprobs) == len(s.token_ids) == len(logprobs)
            assert (logprobs - torch.tensor(s.logprobs)).abs().max() < 1e-4


# ---------------------------------------------------------------------------------------- log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0])
@pytest.mark.parametrize("kind", FAST + PLAIN)
def test_logprobs_equal_a_plain_forward_pass(load, naive_logprobs, kind, temperature):
    policy = endless(load(kind, lora_rank=4, awake=True))
    prompts = random_prompts(3, 31, 12)
    groups = TorchSampler(policy).sample(prompts, 2, 16, temperature, grid(3, 2))
    # greedy: the log-prob of temperature 1
    assert_logprobs_are_the_models(policy, naive_logprobs, prompts, groups, temperature or 1.0)


# ----------------------------------------------------------------------------------------- decoders


@pytest.mark.parametrize("seed", range(3))
def test_rows_may_end_in_any_order(load, seed):
    """The logits stay those of the plain decoder, whatever the prompts' lengths."""
    policy, rng = load("qwen3", lora_rank=4, awake=True), np.random.default_rng(seed)
    prompts, copies, room, n = [rng.integers(1, 250, n).tolist() for n in (9, 4, 12)], 5, 24, 15
    ids = torch.tensor([[0] * (12 - len(p)) + p for p in prompts])
    given = ids, torch.tensor([12 - len(p) for p in prompts]), copies, room
    fast, plain = FastDecoder(policy), PlainDecoder(policy)
    with torch.inference_mode():
        assert (fast.prefill(*given) - plain.prefill(*given)).abs().max() < 1e-4
        full = sum(cache.nbytes for cache in fast.caches)
        for _ in range(room):
            said = torch.tensor(rng.integers(1, 250, n))
            assert (fast.run(said[:, None]) - plain.run(said[:, None])).abs().max() < 1e-4
            live = torch.nonzero(torch.tensor(rng.random(n) > 0.2))[:, 0]
            if len(live):
                fast.select(live)
                plain.select(live)
                n = len(live)
    assert n < 5 and sum(cache.nbytes for cache in fast.caches) == full * n // 15, "given back"


def deep(small):
    """The small one's architecture with 36 layers in bfloat16: what rounding does to a 4B."""
    sizes = small.lm.config.to_dict() | {
        "num_hidden_layers": 36,
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 16,
    }
    sizes.pop("layer_types", None)
    torch.manual_seed(0)
    lm = type(small.lm)(type(small.lm.config)(**sizes)).to(torch.bfloat16).eval()
    return Policy(lm, None, frozenset({2}), "deep", 0, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_rounding_alone_does_not_refuse_the_fast_decoder(load, kind):
    decoder = make_decoder(deep(load(kind)))
    assert isinstance(decoder, FastDecoder)
    assert decoder.why.startswith("fast decoder: its log-probs are 0.")


def forget_norm(decoder):
    w = decoder.layers[0]
    w["norm2"] = torch.ones_like(w["norm2"]) * 1.5


def turn_wrongly(decoder):
    n = decoder.layers[0]["qkv"][0]
    n[:8] = n[:8].flip(0)


@pytest.mark.parametrize("wrong", [forget_norm, turn_wrongly])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_in_bfloat16_a_mistake_in_one_of_36_layers_refuses_the_fast_decoder(
    load, monkeypatch, kind, wrong
):
    sync = FastDecoder.sync

    def mistaken(self):
        sync(self)
        wrong(self)

    monkeypatch.setattr(FastDecoder, "sync", mistaken)
    decoder = make_decoder(deep(load(kind)))
    assert isinstance(decoder, PlainDecoder), decoder.why
    assert "nats from the model's, rounding alone 0." in decoder.why


@pytest.mark.parametrize("kind", PLAIN)
def test_other_architectures_fall_back_on_the_plain_decoder(load, kind):
    assert isinstance(make_decoder(load(kind)), PlainDecoder)


def test_a_window_longer_than_the_test_prompt_is_not_overlooked(load, naive_logprobs):
    """FastDecoder attends to everything: it is wrong as soon as the text is longer."""
    policy = endless(load("mistral_window"))
    prompts = random_prompts(40)
    groups = TorchSampler(policy).sample(prompts, 1, 8, 1.0, grid(1, 1))
    assert_logprobs_are_the_models(policy, naive_logprobs, prompts, groups, 1.0)


@pytest.mark.parametrize("kind", ["pico", "qwen2", "llama", "gpt2"])
def test_greedy_is_what_generate_gives(load, kind):
    policy = load(kind)
    prompts = random_prompts(2, 30, 11, 17)
    ours = TorchSampler(policy).sample(prompts, 1, 24, 0, grid(4, 1))
    for prompt, (sample,) in zip(prompts, ours):
        ids = torch.tensor([prompt])
        theirs = policy.lm.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
        )
        assert sample.token_ids == theirs[0, len(prompt) :].tolist()


def test_a_prompt_is_prefilled_once_however_many_samples_it_gets(tiny):
    sampler = TorchSampler(endless(tiny))
    prefill, shapes = sampler.decoder.prefill, []

    def spy(ids, *rest):
        shapes.append(tuple(ids.shape))
        return prefill(ids, *rest)

    sampler.decoder.prefill = spy
    sampler.sample(random_prompts(7, 7), 8, 3, 1.0, grid(2, 8))
    assert shapes == [(2, 7)]


# --------------------------------------------------------------------------- same seed, same sample


@pytest.mark.parametrize("decoder", [FastDecoder, PlainDecoder])
def test_a_sample_depends_on_prompt_and_seed_and_not_on_the_batch(tiny, decoder):
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


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0])
@pytest.mark.parametrize(
    "kind, lora_rank",
    [
        ("pico", 4),
        ("qwen3", 0),
        ("llama_bias", 4),
        ("llama_dynamic", 0),
        ("gemma2", 4),
        ("gpt2", 0),
        ("lfm2", 0),
        ("granite", 4),
    ],
)
def test_the_plain_sampler_draws_the_same_tokens(load, kind, lora_rank, temperature):
    policy = with_stops(load(kind, lora_rank, awake=True), range(0, 1024, 12))
    prompts, seeds = random_prompts(4, 31, 9, 9), grid(4, 3)
    plain = sum(PlainSampler(policy).sample(prompts, 3, 12, temperature, seeds), [])
    fast = sum(TorchSampler(policy).sample(prompts, 3, 12, temperature, seeds), [])
    assert len(plain) == 12
    for a, b in zip(plain, fast, strict=True):
        assert (a.token_ids, a.finished) == (b.token_ids, b.finished)
        assert len(a.logprobs) == len(a.token_ids)
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-4)
    if temperature:
        assert {a.finished for a in plain} == {True, False}
        assert len({len(a.token_ids) for a in plain}) > 3


class FakeVllm:
    """Stands in for vLLM's LLM: keeps its options, its requests' seeds, and how often it slept."""

    made = None

    def __init__(self, **options):
        FakeVllm.made = self
        self.options, self.seeds, self.slept = options, [], 0
        self.model_config = SimpleNamespace(max_model_len=512)

    collective_rpc = wake_up = lambda self, *_, **__: None
    reset_prefix_cache = lambda self: True

    def sleep(self, level):
        self.slept += 1

    def enqueue(self, prompts, params, **_):
        self.seeds += [p.seed for p in params]

    def wait_for_completion(self, *_, **__):
        logprobs = SimpleNamespace(token_ids=[5], logprobs=[-1.0])
        reply = SimpleNamespace(token_ids=[5], logprobs=logprobs)
        return [SimpleNamespace(outputs=[reply])] * len(self.seeds)


# Of a run: what make_sampler reads.
settings_of = partial(Config, env="letters", max_tokens=64, engine="vllm")


@pytest.fixture
def fake_vllm(monkeypatch):
    """A machine with a card and an installed vLLM, so they say."""
    vllm = SimpleNamespace(
        LLM=FakeVllm,
        SamplingParams=lambda **how: SimpleNamespace(**how),
        RequestOutput=None,
        __spec__=object(),
    )
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # nothing really asks the card
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))


@pytest.mark.parametrize("seeds", [True, False])
@pytest.mark.parametrize("sleep", [True, False])
def test_vllms_seeds_and_its_sleep_are_choices(tiny, fake_vllm, seeds, sleep):
    on_card = replace(tiny, device=torch.device("cuda"))
    sampler = make_sampler(settings_of(vllm_seeds=seeds, vllm_sleep=sleep), on_card)
    options = FakeVllm.made.options
    assert options["enable_sleep_mode"] == sleep and options["dtype"] == "bfloat16"
    sampler.sample([[1, 2]], 2, 1, 1.0, grid(1, 2))
    assert (len(set(FakeVllm.made.seeds)) == 2) == seeds
    assert (FakeVllm.made.seeds == [None, None]) == (not seeds)
    with sampler.asleep():
        assert FakeVllm.made.slept == sleep and sampler.awake == (not sleep)
    assert sampler.awake
    sampler.close()


def test_on_a_card_without_bfloat16_vllm_is_asked_for_float32_which_its_lora_does_not_have(
    tiny, fake_vllm, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    on_card = replace(tiny, device=torch.device("cuda"))
    make_sampler(settings_of(lora_rank=0), on_card).close()
    assert FakeVllm.made.options["dtype"] == "float32"
    why = "this card has no bfloat16, and vLLM has no LoRA in float32; take --engine torch"
    with pytest.raises(ValueError, match=f"--engine vllm: {why}"):
        make_sampler(settings_of(lora_rank=32), on_card)


# ----------------------------------------------------------------------------------- where it stops


@pytest.mark.parametrize("decoder", [FastDecoder, PlainDecoder])
@pytest.mark.parametrize("temperature", [1.0, 0])
def test_a_reply_ends_with_the_first_stop_token_and_includes_it(tiny, decoder, temperature):
    prompts, k, n = random_prompts(5, 14, 8, 21), 4, 12
    seeds = grid(4, k)

    def sample(policy):
        sampler = TorchSampler(policy)
        sampler.decoder = decoder(policy)
        return sum(sampler.sample(prompts, k, n, temperature, seeds), [])

    free = sample(endless(tiny))
    assert all(len(s.token_ids) == n and not s.finished for s in free)  # max_tokens, exactly
    # Stop tokens that do come: first in one row, amid two others, and last in one.
    stops = {free[row].token_ids[place] for row, place in ((0, 0), (5, 4), (9, 7), (15, -1))}
    ended = sample(with_stops(tiny, stops))
    for a, b in zip(free, ended):
        first = next((t for t, token in enumerate(a.token_ids) if token in stops), None)
        length = n if first is None else first + 1
        assert b.token_ids == a.token_ids[:length]
        assert len(b.logprobs) == length and np.allclose(b.logprobs, a.logprobs[:length], atol=1e-4)
        assert b.finished == (first is not None)
    assert {s.finished for s in ended} == {True, False} or temperature == 0
    assert min(len(s.token_ids) for s in ended) == 1


# --------------------------------------------------------------------------------------------- draw


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
def test_draw_follows_the_models_distribution(tiny, temperature):
    with torch.no_grad():
        logits = tiny.model(input_ids=torch.tensor(random_prompts(10))).logits[0, -1]  # [V]
    n = 5000
    drawn = [np.random.default_rng((0, seed)).random() for seed in range(n)]
    uniform = torch.tensor(drawn).float()  # [n]
    tokens, logprobs = draw(logits.expand(n, -1), uniform, temperature)  # [n], [n]
    p = (logits.double() / temperature).softmax(-1)  # [V]
    assert torch.allclose(logprobs, p[tokens].log().float(), atol=1e-4)
    assert abs(chi_square_excess(tokens.numpy(), p.numpy())) < 4
    wrong = (logits.double() / (1.5 * temperature)).softmax(-1)
    assert chi_square_excess(tokens.numpy(), wrong.numpy()) > 20  # the test has teeth


def test_draw_is_the_inverse_cdf():
    logits = torch.tensor([0.2, 0.5, 0.0, 0.3]).log()  # cdf 0.2 0.7 0.7 1.0
    uniform = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-24])
    tokens, logprobs = draw(logits.expand(6, -1), uniform, 1.0)
    assert tokens.tolist() == [0, 0, 1, 1, 3, 3]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.2, 0.2, 0.5, 0.5, 0.3, 0.3]))


def test_a_token_without_probability_is_never_drawn():
    """Its uniform rounds to 1 and would pass the end of the CDF, as about 3 of 10^8 do."""
    logits = torch.tensor([0.0, 0.0, -float("inf")])
    uniform = torch.tensor([np.nextafter(1.0, 0.0)], dtype=torch.float32)
    token, logprob = draw(logits[None], uniform, 1.0)
    assert token.item() == 1 and torch.isfinite(logprob).all()


# ------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("kind, lora_rank", [("qwen3", 4), ("qwen3", 0), ("llama", 4), ("gpt2", 4)])
def test_sampling_never_edits_the_policys_weights(load, snapshot, kind, lora_rank):
    policy = endless(load(kind, lora_rank, awake=True))
    before = snapshot(policy)
    sampler = TorchSampler(policy)
    for noise in range(3):
        sampler.sync(1)
        sampler.sample(random_prompts(6, 3), 2, 5, 1.0, grid(2, 2, noise))
    after = snapshot(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(p.grad is not None for p in policy.model.parameters())


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_old_weights_until_sync_and_new_ones_after(load, naive_logprobs, stir, lora_rank):
    policy = endless(load("qwen3", lora_rank))
    sampler = TorchSampler(policy)
    prompts, seeds = random_prompts(6, 13), grid(2, 2)
    assert sampler.version == 0
    old = sampler.sample(prompts, 2, 12, 1.0, seeds)
    stir(policy, 0.2)  # all trainable weights: embeddings, norms and head too with rank 0
    assert sampler.sample(prompts, 2, 12, 1.0, seeds) == old
    sampler.sync(1)
    new = sampler.sample(prompts, 2, 12, 1.0, seeds)
    assert new != old and sampler.version == 1
    assert_logprobs_are_the_models(policy, naive_logprobs, prompts, new, 1.0)


def test_folding_again_and_again_does_not_drift(load):
    policy = load("qwen3", lora_rank=4, awake=True)
    layer = policy.lm.model.layers[0].self_attn.q_proj
    decoder = FastDecoder(policy)
    once = decoder.layers[0]["qkv"][0].clone()
    for _ in range(30):
        decoder.sync()
    assert torch.equal(decoder.layers[0]["qkv"][0], once)
    x = torch.randn(3, layer.in_features)  # [3, in]
    assert torch.allclose(x @ folded(layer).T, layer(x), atol=1e-5)
    assert not torch.allclose(folded(layer), layer.base_layer.weight, atol=1e-3)


@pytest.mark.parametrize("kind", FAST)
def test_a_conversation_resumed_from_its_cache_gives_the_logits_of_reading_it_whole(load, kind):
    """Rows of very different lengths; a new part may be longer than another row's whole."""
    policy = load(kind, lora_rank=4, awake=True)
    decoder, rng = FastDecoder(policy), np.random.default_rng(3)
    prompts = [rng.integers(1, 1000, n).tolist() for n in (9, 30, 31, 80, 64)]
    known = [4, 29, 10, 30, 63]  # tokens of each that have been read before

    def padded(rows):
        P = max(map(len, rows))
        ids = torch.tensor([[0] * (P - len(r)) + r for r in rows])
        return ids, torch.tensor([P - len(r) for r in rows]), 1, 3

    with torch.inference_mode():
        whole = decoder.prefill(*padded(prompts))
        whole = torch.cat([whole, decoder.run(whole.argmax(-1)[:, None])])
        decoder.prefill(*padded([p[:n] for p, n in zip(prompts, known)]))
        caches = [decoder.take(row) for row in range(5)]
        assert [{kept.shape[2] for kept in cache} for cache in caches] == [{n} for n in known]
        part = decoder.prefill(*padded(prompts), caches)
        part = torch.cat([part, decoder.run(part.argmax(-1)[:, None])])
    assert caches == [[]] * 5  # given back
    assert (whole - part).abs().max() < 1e-4 and whole.abs().max() > 1


def test_caches_are_given_only_when_asked_for_and_cover_all_but_the_last_token(load):
    base = load("pico", lora_rank=4)
    sampler = TorchSampler(with_stops(base, range(0, 1024, 20)))  # one token in twenty
    prompt = list(range(5, 25))
    seeds = [[(0, i) for i in range(6)]]
    assert all(s.cache is None for s in sampler.sample([prompt], 6, 12, 1.0, seeds)[0])
    kept = sampler.sample([prompt], 6, 12, 1.0, seeds, keep=True)[0]
    assert {s.finished for s in kept} == {True, False}, "choose another prompt"
    for s in kept:
        assert (s.cache is not None) == s.finished
        read = len(prompt) + len(s.token_ids) - 1
        assert s.cache is None or {layer.shape[2] for layer in s.cache} == {read}


@pytest.mark.parametrize("k, room", [(1, 3), (4, 8), (4, 5)])
def test_out_of_memory_is_answered_in_smaller_batches_with_the_same_samples(
    load, monkeypatch, k, room
):
    policy = load("pico", lora_rank=0)
    prompts = [[1 + i] * (2 + i) for i in range(7)]
    seeds = [[(5, g, i) for i in range(k)] for g in range(7)]
    calm, poor = TorchSampler(policy), TorchSampler(policy)
    expected = calm.sample(prompts, k, 6, 1.0, seeds)
    batch, rows = poor._batch, []

    def little_memory(prompts, k, *rest):
        rows.append(len(prompts) * k)
        if rows[-1] > room:
            raise torch.OutOfMemoryError("pretended")
        return batch(prompts, k, *rest)

    monkeypatch.setattr(poor, "_batch", little_memory)
    got = poor.sample(prompts, k, 6, 1.0, seeds)
    tokens = lambda groups: [[s.token_ids for s in group] for group in groups]
    assert tokens(got) == tokens(expected)
    assert max(rows) > room and poor.max_rows <= room  # it has learnt how much fits
    tried = len(rows)
    poor.sample(prompts, k, 6, 1.0, seeds)
    assert max(rows[tried:]) <= room


def test_out_of_memory_first_costs_the_kept_caches_and_then_rows(load, monkeypatch):
    sampler = TorchSampler(with_stops(load("pico"), range(1024)))
    prompts, seeds = random_prompts(*range(4, 12)), grid(8, 1)
    first = [s for (s,) in sampler.sample(prompts, 1, 30, 1.0, seeds, keep=True)]
    batch, tried = sampler._batch, []

    def little_memory(prompts, k, n, temperature, seeds, known, keep):
        tried.append((len(prompts), any(known), keep))
        if len(tried) < 3:
            raise torch.OutOfMemoryError("pretended")
        return batch(prompts, k, n, temperature, seeds, known, keep)

    monkeypatch.setattr(sampler, "_batch", little_memory)
    longer = [p + s.token_ids + [5] for p, s in zip(prompts, first)]
    caches = [s.cache for s in first]
    second = sampler.sample(longer, 1, 4, 1.0, seeds, caches, keep=True)
    assert tried == [(8, True, True), (8, False, False), (4, False, False), (4, False, False)]
    assert caches == [[]] * 8 and all(s.cache is None for (s,) in second)
    sampler.sample(longer, 1, 4, 1.0, seeds, keep=True)
    assert tried[-1] == (4, False, False)  # it has learnt that these are too long to be kept …
    sampler.sample(prompts, 1, 4, 1.0, seeds, keep=True)
    assert tried[-1] == (4, False, True)  # … and shorter ones are not


def test_one_prompt_that_does_not_fit_says_what_to_do(load, monkeypatch):
    sampler = TorchSampler(load("pico", lora_rank=0))

    def no_memory(*_):
        raise torch.OutOfMemoryError("pretended")

    monkeypatch.setattr(sampler, "_batch", no_memory)
    with pytest.raises(machine.CannotGoOn, match="lower --k or --max-tokens"):
        sampler.sample([[1, 2], [3]], 2, 4, 1.0, grid(2, 2))


def test_the_decoder_makes_its_tensors_where_the_weights_are(model_folder, monkeypatch):
    """On a card a table left on the CPU fails at the first prompt.

    The meta device stands in: it is another device, and computes shapes alone.
    """
    decoder = FastDecoder(load_policy(model_folder("qwen3"), 4, 8, device="meta"))
    there = dict(dtype=torch.long, device="meta")
    no_values = lambda tensor: [0] * len(tensor)
    monkeypatch.setattr(torch.Tensor, "tolist", no_values)
    with torch.inference_mode():
        read = decoder.prefill(torch.zeros((2, 5), **there), torch.zeros(2, **there), 3, 4)
        stepped = decoder.run(torch.zeros((6, 1), **there))
    assert read.shape == stepped.shape == (6, 1024)
    assert read.device.type == stepped.device.type == "meta"
