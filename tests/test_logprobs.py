"""Protects the log-probs of training: those of the model, one token after the other, whatever is
shared, cut or thrown away on the way; and gradients alike."""

from functools import partial

import pytest
import torch

from fast import logprobs
from fast.logprobs import token_logprobs
from helpers import put, random_rows
from policy import plain_forward
from steps import assert_close, gradients, naive_logprobs


def mask_of(kind: str, n: int, t: int) -> torch.Tensor:
    if kind == "all":
        return torch.ones(n, t, dtype=torch.bool)
    if kind == "one":
        return torch.arange(n * t).view(n, t) == n * t - 1
    return torch.rand(n, t, generator=torch.Generator().manual_seed(3)) < 0.4  # "some"


def assert_naive(policy, ids, mask, lengths: list[int], found, temperature: float = 0.7) -> None:
    """Log-probs as found for each row alone, at its length; and their gradients."""
    rng = torch.Generator().manual_seed(1)
    pull = torch.randn(int(mask.sum()), generator=rng)  # [M], another weight per token
    policy.model.zero_grad()
    (pull * found).sum().backward()
    ours = gradients(policy)
    policy.model.zero_grad()
    rows = [naive_logprobs(policy, row[:n].tolist(), temperature) for row, n in zip(ids, lengths)]
    expected = torch.cat([row[m[: len(row)]] for row, m in zip(rows, mask)])  # [M]
    (pull * expected).sum().backward()
    assert (found - expected).abs().max() < 1e-4
    assert_close(ours, gradients(policy))


def plainly(*given):
    """policy.plain_forward's log-probs and entropies."""
    found = plain_forward(*given)
    return found.logprobs, found.entropy


def test_the_plain_head_sees_masked_positions_only(load):
    policy, seen = load("qwen3", 4), []
    head = policy.lm.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    mask = mask_of("some", 4, 39)
    assert plain_forward(policy, random_rows(4, 40), mask).logits.shape == seen[0]
    assert seen == [(int(mask.sum()), 1024)]


@pytest.mark.parametrize(
    "kind, lora_rank, chunk, temperature, which",
    [
        ("qwen3", 4, 1024, 1.0, "all"),
        ("qwen3", 4, 1, 0.7, "some"),
        ("qwen3", 0, 3, 1.0, "some"),
        ("qwen3", 0, 7, 1.5, "all"),
        ("qwen3", 4, 3, 0.7, "one"),
        ("pico", 4, 5, 0.7, "some"),
        ("llama", 0, 4, 0.7, "some"),  # untied head
        ("qwen2", 4, 4, 1.0, "some"),
        ("gemma2", 4, 4, 0.7, "some"),  # soft-capped logits
        ("gpt2", 0, 4, 0.7, "some"),  # another name for its layers
        ("llama_bias", 0, 4, 1.0, "some"),
        ("llama_dynamic", 0, 4, 0.7, "some"),
        ("qwen2_window", 0, 4, 1.0, "some"),
        ("mistral_window", 4, 4, 0.7, "some"),
        ("granite", 4, 4, 0.7, "some"),
        ("lfm2", 0, 4, 1.0, "some"),
    ],
)
@pytest.mark.parametrize("how", [token_logprobs, plainly])
def test_logprobs_of_both_ways_are_those_of_a_naive_forward(
    load, monkeypatch, how, kind, lora_rank, chunk, temperature, which
):
    put(monkeypatch, logprobs, CHUNK=chunk, FEW_TOKENS=chunk, ROWS=7 * chunk)
    policy = load(kind, lora_rank, awake=True)
    ids = random_rows(3, 12)  # [3, 12]
    mask = mask_of(which, 3, 11)  # [3, 11]
    found, entropies = how(policy, ids, mask, temperature)
    assert found.dtype == torch.float32 and found.shape == entropies.shape == (int(mask.sum()),)
    assert_naive(policy, ids, mask, [12] * 3, found, temperature)
    with torch.no_grad():
        logits = policy.model(input_ids=ids).logits[:, :-1].float()
    full = torch.log_softmax(logits / temperature, -1)  # [3, 11, V]
    assert torch.allclose(entropies, -(full.exp() * full).sum(-1)[mask], atol=1e-3)
    assert entropies.requires_grad == (how is plainly)  # a bonus for entropy needs that way


def four_prompts() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Nine rows: three with one prompt of 9 tokens, two with another, three with one of 14, one alone.

    Replies of 1 to 9 tokens, of which some are nobody's choice.
    """
    ids = torch.zeros(9, 24, dtype=torch.long)
    mask, lengths = torch.zeros(9, 23, dtype=torch.bool), []
    sizes = [(9, 5), (14, 9), (9, 1), (14, 2), (9, 8), (5, 6), (14, 1), (9, 3), (9, 7)]
    for n, (prompt, reply) in enumerate(sizes):
        ids[n, :prompt] = random_rows(1, prompt, seed=prompt + n // 7)[0]
        ids[n, prompt : prompt + reply] = random_rows(1, reply, seed=100 + n)[0]
        mask[n, prompt - 1 : prompt + reply - 1] = True
        if reply > 4:  # what an environment says between two turns
            mask[n, prompt + 1 : prompt + 3] = False
        lengths.append(prompt + reply)
    return ids, mask, lengths


def spy_on_layers(monkeypatch, seen: list) -> None:
    """seen: (whose layers ran, rows, [prompts, their length]) of each call."""

    def spied(name, run, lm, prompts, ids, prompt_of, read, **how):
        read_now = (0, 0) if read else (*prompts.shape,)  # read before: not again
        seen.append((name, len(ids), read_now))
        return run(lm, prompts, ids, prompt_of, read, **how)

    for name in ("by_the_model", "by_our_layers"):
        monkeypatch.setattr(logprobs, name, partial(spied, name, getattr(logprobs, name)))


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("piece", [1, 12, 1024])
@pytest.mark.parametrize(
    "kind, lora_rank",
    [
        ("qwen3", 4),
        ("pico", 4),
        ("pico", 0),
        ("llama_bias", 0),
        ("llama_bias", 4),
        ("qwen2", 4),
        ("gpt2", 0),
        ("gemma2", 4),
    ],
)
def test_a_prompt_that_rows_share_is_run_once_and_changes_nothing(
    load, monkeypatch, kind, lora_rank, piece
):
    monkeypatch.setattr(logprobs, "PIECE", piece)
    policy = load(kind, lora_rank, awake=True)
    ids, mask, lengths = four_prompts()
    ours, seen = logprobs.knows(policy.lm), []
    spy_on_layers(monkeypatch, seen)
    found = token_logprobs(policy, ids, mask, 0.7)[0]
    assert ours == (lora_rank > 0 and kind != "gemma2")
    assert {name for name, *_ in seen} == {"by_our_layers" if ours else "by_the_model"}
    assert_naive(policy, ids, mask, lengths, found)
    assert_naive(policy, ids, mask, lengths, plainly(policy, ids, mask, 0.7)[0])
    shapes = [shape for *_, shape in seen]
    if kind == "gemma2":  # sliding windows: whole rows
        assert sum(rows for _, rows, _ in seen) == 9 and {P for _, P in shapes} == {0}
    else:  # two prompts of one length run together where they fit
        nine = [(2, 9)] if piece == 1024 else [(1, 9), (1, 9)]
        assert [shape for shape in shapes if shape in ((2, 9), (1, 9), (1, 14))] == [*nine, (1, 14)]


def test_our_layers_see_every_change_of_the_weights(load):
    """Also one that torch's own counter of versions misses."""
    policy = load("qwen3", 4, awake=True)
    ids, mask, lengths = four_prompts()
    for change in (lambda p: p.data.neg_(), lambda p: p.data.view(-1)[0].add_(0.5)):
        token_logprobs(policy, ids, mask)
        change(list(policy.trainable().values())[-1])
        assert_naive(policy, ids, mask, lengths, token_logprobs(policy, ids, mask, 0.7)[0])


def test_long_texts_go_through_the_model(load, monkeypatch):
    policy, (ids, mask, _), seen = load("qwen3", 4, awake=True), four_prompts(), []
    assert logprobs.knows(policy.lm)
    spy_on_layers(monkeypatch, seen)
    for short, name in ((ids.shape[1], "by_our_layers"), (ids.shape[1] - 1, "by_the_model")):
        monkeypatch.setattr(logprobs, "SHORT", short)
        seen.clear()
        token_logprobs(policy, ids, mask)
        assert {who for who, *_ in seen} == {name}


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama_bias"])
def test_in_bfloat16_our_layers_round_a_little_and_their_gradients_point_the_same_way(load, kind):
    policy, (ids, mask, _) = load(kind, 4, awake=True), four_prompts()

    def trained(narrow: bool) -> tuple[torch.Tensor, torch.Tensor]:
        policy.bfloat16 = narrow
        policy.model.zero_grad()
        logprobs = token_logprobs(policy, ids, mask)[0]
        logprobs.sum().backward()
        found = gradients(policy).values()
        assert all(g.dtype == torch.float32 for g in found)
        return logprobs.detach(), torch.cat([g.flatten() for g in found])

    exact, rounded = trained(False), trained(True)
    assert 0 < (exact[0] - rounded[0]).abs().mean() < 0.03
    assert torch.cosine_similarity(exact[1], rounded[1], dim=0) > 0.99
    assert 0 < (exact[1] - rounded[1]).norm() < 0.1 * exact[1].norm()
    assert torch.equal(trained(False)[0], exact[0])  # and back again, to the bit


UNKNOWN = {
    "a norm learns": lambda policy: policy.lm.base_model.norm.weight.requires_grad_(True),
    "another activation": lambda policy: setattr(policy.lm.config, "hidden_act", "gelu"),
    "training mode": lambda policy: policy.model.train(),
    "nothing learns": lambda policy: policy.model.requires_grad_(False),
}


@pytest.mark.parametrize("change", UNKNOWN.values(), ids=UNKNOWN)
def test_a_model_that_our_layers_do_not_know_trains_by_itself(load, change):
    policy = load("qwen3", 4, awake=True)
    assert logprobs.knows(policy.lm)
    change(policy)
    assert not logprobs.knows(policy.lm)


@pytest.mark.parametrize("how", [token_logprobs, plainly])
def test_an_empty_mask_gives_no_logprobs(tiny, how):
    for tensor in how(tiny, random_rows(2, 6), torch.zeros(2, 5, dtype=torch.bool)):
        assert tensor.shape == (0,) and tensor.dtype == torch.float32


# Once if the head is frozen; else again in the backward pass.
@pytest.mark.parametrize("rank, head, times", [(4, "by_rows", 1), (0, "logprobs_and_entropy", 2)])
def test_the_head_never_sees_more_than_a_chunk_nor_unmasked_positions(
    load, monkeypatch, rank, head, times
):
    policy = load("qwen3", lora_rank=rank)
    seen, real = [], getattr(logprobs, head)
    monkeypatch.setattr(logprobs, head, lambda *given: seen.append(len(given[-1])) or real(*given))
    put(monkeypatch, logprobs, CHUNK=8, FEW_TOKENS=8)
    mask = mask_of("some", 4, 39)
    token_logprobs(policy, random_rows(4, 40), mask)[0].sum().backward()
    assert max(seen) == 8 and sum(seen) == times * int(mask.sum())


# Logits from -80 to 80, and every second token is the likeliest, so its gradient is tiny. In the
# second case the first rows are much smaller than the later ones.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["random", "rising"])
def test_a_head_in_parts_is_as_exact_as_all_logits_at_once(order, dtype):
    torch.manual_seed(0)
    head, hidden = (3 * torch.randn(n, 32, dtype=torch.float64) for n in (301, 40))
    if order == "rising":
        head = head[(head @ hidden[0]).argsort()]
    head, hidden = head.to(dtype), hidden.to(dtype).requires_grad_()
    tokens = torch.where(torch.arange(40) % 2 == 0, (hidden @ head.T).argmax(1), torch.arange(40))
    exact = [x.detach().double().requires_grad_() for x in (hidden, head)]

    def all_at_once(hidden, head):
        logp = 0.5 * (hidden @ head.T).to(torch.promote_types(head.dtype, torch.float32))
        logp = logp.log_softmax(-1)
        return logp.gather(1, tokens[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def results(logprobs, entropies, hidden):
        (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
        return [x.detach().double() for x in (logprobs, entropies, gradient)]

    right = results(*all_at_once(*exact), exact[0])
    plain = results(*all_at_once(hidden, head), hidden)
    parts = results(*logprobs.by_rows(head, 64, 0.5, hidden, tokens), hidden)
    for of_parts, of_plain, true in zip(parts, plain, right):
        error = lambda x: (x - true).abs().max()  # noqa: B023
        assert error(of_parts) <= 1.2 * error(of_plain) + 3e-5  # 80 is rounded by 4e-6
    of_its_size = lambda x: ((x - right[2]).norm(dim=1) / right[2].norm(dim=1))[::2].median()
    assert of_its_size(parts[2]) <= 1.2 * of_its_size(plain[2]) + 1e-5


@pytest.mark.parametrize(
    "kind, scale", [("granite", 0.25), ("qwen3", 1.0), ("gemma2", 1.0), ("gpt2", 1.0)]
)
def test_what_a_model_multiplies_its_logits_by_is_measured(load, kind, scale):
    assert logprobs.logit_scale(load(kind).lm) == pytest.approx(scale, rel=1e-4)
