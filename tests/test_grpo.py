"""Protects GRPO: advantages by hand, and for every loss the gradient of a second implementation, written from the
formulas as plain loops over episodes and tokens, with ratios away from 1 so that clipping is at work.

And samples that another policy drew: their weights one token at a time, and by a policy so small that every episode it can
play is in the batch, as often as it is played, so that an unbiased gradient is the true one and no estimate.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
from fast.batches import Batch, collate, cut
from fast import measure
from fast.measure import UpdateLog
from fast.off_policy import CAP, IMPORTANCE, importance_weights
from grpo import LOSSES, Output, group_advantages, token_weights
from policy import swapped
from rollout import Episode
from steps import FLAGS, train_on

NAN = float("nan")
HUGE = 10**9  # tokens a micro-batch: everything at once
MAX_TOKENS = 20  # dr_grpo's constant length


# ---------------------------------------------------------------------------------------------- advantages

R = math.sqrt(3 / 16)  # the standard deviation of [1, 0, 0, 0]


@pytest.mark.parametrize(
    "baseline, normalize, rewards, expected",
    [
        ("group", False, [[1, 0, 0, 1]], [[0.5, -0.5, -0.5, 0.5]]),
        ("group", True, [[1, 0, 0, 1]], [[1, -1, -1, 1]]),
        ("group", True, [[1, 0, 0, 0]], [[0.75 / R, -0.25 / R, -0.25 / R, -0.25 / R]]),
        ("group", False, [[1, 0], [3, 1]], [[0.5, -0.5], [1, -1]]),
        ("group", True, [[1, 0], [3, 1]], [[1, -1], [1, -1]]),  # each group by its own spread
        ("batch", False, [[1, 0], [0, 0]], [[0.75, -0.25], [-0.25, -0.25]]),
        ("batch", True, [[1, 0], [0, 0]], [[0.75 / R, -0.25 / R], [-0.25 / R, -0.25 / R]]),
        ("none", False, [[1, 0], [0.5, 2]], [[1, 0], [0.5, 2]]),
        ("none", True, [[1, 0, 0, 0]], [[1, 0, 0, 0]]),  # no baseline, so no spread around it to divide by
        ("group", False, [[1, NAN, 0, 0.5]], [[0.5, 0, -0.5, 0]]),  # an error counts neither here nor there
        ("group", True, [[1, NAN, 0]], [[1, 0, -1]]),
        ("group", True, [[NAN, NAN], [0, 2]], [[0, 0], [-1, 1]]),
        ("group", True, [[NAN, 1]], [[0, 0]]),
        ("batch", False, [[1, NAN], [NAN, 0]], [[0.5, 0], [0, -0.5]]),
        ("batch", True, [[1, NAN], [NAN, 0]], [[1, 0], [0, -1]]),
        ("none", False, [[1, NAN]], [[1, 0]]),
    ],
)
def test_advantages_by_hand(baseline, normalize, rewards, expected):
    advantages = group_advantages(torch.tensor(rewards), baseline, normalize)
    assert advantages.dtype == torch.float32
    assert torch.allclose(advantages, torch.tensor(expected).float(), atol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("baseline", ["group", "batch"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.7, 1 / 3, 0.1 + 0.9 * 4 / 11])
def test_equal_rewards_give_an_advantage_of_exactly_0(reward, baseline, normalize):
    for k in (2, 3, 7, 8):
        for dtype in (torch.float32, torch.float64):  # in float64, 0.1 - mean([0.1] * 3) is not 0 before it is made so
            assert group_advantages(torch.full((3, k), reward, dtype=dtype), baseline, normalize).eq(0).all()


def test_equal_rewards_without_a_baseline_are_not_blown_up():
    # which every answer is right gets advantages of 10^6.
    assert group_advantages(torch.ones(2, 4), "none", True).abs().max() <= 100


# ---------------------------------------------------------------------------------------------- weights, micro-batches, collate


def test_token_weights_by_hand():
    lengths = torch.tensor([2.0, 8.0])  # two episodes, 10 tokens
    for loss, expected in {
        "reinforce": [1 / 10, 1 / 10],
        "grpo": [1 / 4, 1 / 16],
        "dr_grpo": [1 / 40, 1 / 40],
        "dapo": [1 / 10, 1 / 10],
        "gspo": [1 / 4, 1 / 16],
        "cispo": [1 / 10, 1 / 10],
    }.items():
        assert torch.allclose(token_weights(loss, lengths, 20), torch.tensor(expected)), loss


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), max_size=30), st.integers(1, 120))
def test_micro_batches_hold_every_episode_once_within_the_budget(episodes, budget):
    """episodes: (group, length)."""
    lengths = [length for _, length in episodes]
    plan = cut([Episode(0, group, [0] * length, [], []) for group, length in episodes], budget)
    assert Counter(n for part in plan for n in part) == Counter(range(len(lengths)))
    for part in plan:
        assert len(part) == 1 or len(part) * max(lengths[n] for n in part) <= budget
    groups = [episodes[n][0] for part in plan for n in part]
    assert len([1 for a, b in zip(groups, groups[1:]) if a != b]) == max(0, len(set(groups)) - 1)  # a group's members follow each other


def test_collate_shifts_by_one_and_never_marks_prompt_or_padding():
    a = Episode(0, 0, [5, 6, 7, 2], [False, False, True, True], [0.0, 0.0, -0.3, -0.4])
    b = Episode(0, 0, [5, 8], [False, True], [0.0, -0.5])
    batch = collate([a, b], pad=9, device="cpu")
    assert isinstance(batch, Batch)
    assert batch.ids.tolist() == [[5, 6, 7, 2], [5, 8, 9, 9]]
    assert batch.mask.tolist() == [[False, True, True], [True, False, False]]  # the stop token 2 included
    assert batch.row.tolist() == [0, 0, 1]
    assert torch.allclose(batch.behaviour, torch.tensor([-0.3, -0.4, -0.5]))


# ---------------------------------------------------------------------------------------------- a batch, and the formulas


@pytest.fixture(scope="module")
def make_groups(naive_logprobs):
    """make_groups(policy, rewards, temperature, noise) -> groups of random episodes, two of three with two turns.

    They were sampled, so their log-probs say, by a policy that is `noise` away from this one.
    """

    def make(policy, rewards: list[list[float]], temperature: float = 1.0, noise: float = 0.4, seed: int = 0) -> list[list[Episode]]:
        g = torch.Generator().manual_seed(seed)
        number = lambda low, high: int(torch.randint(low, high, (), generator=g))
        groups = []
        for task, row in enumerate(rewards):
            groups.append([])
            for reward in row:
                sampled = [False] * number(2, 6) + [True] * number(1, 7)
                if number(0, 3):
                    sampled += [False] * number(1, 4) + [True] * number(1, 7)
                ids = torch.randint(11, 1024, (len(sampled),), generator=g).tolist()
                ids[-1] = policy.tokenizer.eos_token_id
                with torch.no_grad():
                    now = [0.0, *naive_logprobs(policy, ids, temperature).tolist()]
                shift = (noise * torch.randn(len(ids), generator=g)).tolist()
                old = [now[t] + shift[t] if s else 0.0 for t, s in enumerate(sampled)]
                groups[-1].append(Episode(task, task, ids, sampled, old, turns=1, reward=reward))
        return groups

    return make


def naive_advantages(groups: list[list[Episode]]) -> list[float]:
    """Reward minus the group's mean, errors left out: baseline "group", no division."""
    out = []
    for group in groups:
        valid = [e.reward for e in group if e.stop_reason != "error"]
        out += [e.reward - sum(valid) / len(valid) if e.stop_reason != "error" else 0.0 for e in group]
    return out


def naive_loss(naive_logprobs, policy, groups, loss, advantages, temperature=1.0, kl=0.0, reference=None, factors=None) -> torch.Tensor:
    """The table in grpo.py, read aloud: one episode at a time, one token at a time, over *all* episodes but errors.

    factors[n][t]: what token t of episode n weighs besides, for having been drawn by another policy.
    """
    eps, eps_high = grpo.CLIP.get(loss, (0, 0))
    factors = factors or [[1.0] * len(e.token_ids) for e in sum(groups, [])]
    pairs = [(e, a) for e, a in zip(sum(groups, []), advantages) if e.stop_reason != "error"]
    all_tokens = sum(e.reply_tokens for e, _ in pairs)
    total = torch.zeros(())
    for (e, advantage), factor in zip(pairs, [f for e, f in zip(sum(groups, []), factors) if e.stop_reason != "error"]):
        logp = naive_logprobs(policy, e.token_ids, temperature)  # [T-1]
        if kl:
            with torch.no_grad(), swapped(policy, reference):
                ref = naive_logprobs(policy, e.token_ids, temperature)  # [T-1]
        chosen = [t for t in range(1, len(e.token_ids)) if e.sampled[t]]
        log_ratios = [logp[t - 1] - e.logprobs[t] for t in chosen]
        sequence_ratio = torch.exp(sum(log_ratios) / len(chosen))
        for t, log_ratio in zip(chosen, log_ratios):
            ratio = sequence_ratio if loss == "gspo" else torch.exp(log_ratio)
            if loss == "reinforce":
                gain = advantage * logp[t - 1]
            elif loss == "cispo":
                gain = min(ratio.item(), 1 + eps_high) * advantage * logp[t - 1]
            else:
                low, high = 1 - eps, 1 + eps_high
                inside = low <= ratio.item() <= high
                held = ratio if inside else torch.tensor(low if ratio.item() < low else high)
                gain = ratio * advantage if ratio.item() * advantage <= held.item() * advantage else held * advantage
            if loss in ("grpo", "gspo"):
                weight = 1 / (len(pairs) * len(chosen))
            elif loss == "dr_grpo":
                weight = 1 / (len(pairs) * MAX_TOKENS)
            else:
                weight = 1 / all_tokens
            weight *= factor[t]
            total = total - weight * gain
            if kl:
                r = torch.exp(ref[t - 1] - logp[t - 1])
                total = total + kl * weight * (r - torch.log(r) - 1)
    return total


def frozen(policy) -> torch.optim.Optimizer:
    """An optimizer that moves nothing, so that the gradients can be read after `update`."""
    return torch.optim.SGD(policy.trainable().values(), lr=0.0)


def run(policy, groups, loss="grpo", optimizer=None, **changes) -> dict[str, float]:
    options = dict(normalize=False, max_tokens=MAX_TOKENS, micro_tokens=HUGE, max_grad_norm=1e9)
    return train_on(policy, optimizer or frozen(policy), groups, loss=loss, **(options | changes))


REWARDS = [[1.0, 0.0, 0.3, 1.0], [0.0, 0.2, 1.0, 0.1]]


# ---------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("lora_rank, temperature", [(4, 1.0), (0, 0.7)])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_that_of_the_formulas(load, make_groups, naive_logprobs, gradients, assert_close, loss, lora_rank, temperature):
    policy = load("qwen3", lora_rank, awake=True)
    groups = make_groups(policy, REWARDS, temperature)
    stats = run(policy, groups, loss, temperature=temperature)
    ours = gradients(policy)
    if loss != "reinforce":
        assert 0.1 < stats["clip_fraction"] < 0.9  # premise: some are clipped, some are not
    policy.model.zero_grad()
    expected = naive_loss(naive_logprobs, policy, groups, loss, naive_advantages(groups), temperature)
    expected.backward()
    assert stats["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert_close(ours, gradients(policy))


@pytest.mark.parametrize("baseline, normalize", [("group", True), ("batch", True), ("batch", False), ("none", False)])
def test_update_uses_the_baseline_it_is_given(load, make_groups, naive_logprobs, gradients, assert_close, baseline, normalize):
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, REWARDS)
    run(policy, groups, baseline=baseline, normalize=normalize)
    ours = gradients(policy)
    policy.model.zero_grad()
    sets = [sum(REWARDS, [])] * 2 if baseline == "batch" else REWARDS  # what each group is compared with
    advantages = []
    for rewards, everyone in zip(REWARDS, sets):
        mean = sum(everyone) / len(everyone)
        spread = math.sqrt(sum((r - mean) ** 2 for r in everyone) / len(everyone)) if normalize else 1.0
        advantages += [(r - (0.0 if baseline == "none" else mean)) / spread for r in rewards]
    naive_loss(naive_logprobs, policy, groups, "grpo", advantages).backward()
    assert_close(ours, gradients(policy))


@pytest.mark.parametrize("loss", LOSSES)
def test_cutting_into_micro_batches_changes_nothing(load, make_groups, gradients, assert_close, loss):
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, REWARDS)
    reference = {name: torch.zeros_like(p) for name, p in policy.trainable().items()}
    whole = run(policy, groups, loss, kl=0.1, reference=reference)
    expected = gradients(policy)
    for micro_tokens in (1, 40):
        cut = run(policy, groups, loss, kl=0.1, reference=reference, micro_tokens=micro_tokens)
        assert_close(gradients(policy), expected)
        assert cut == pytest.approx(whole, rel=1e-3, abs=1e-5)


@pytest.fixture
def rows_seen(monkeypatch) -> list[int]:
    """How many episodes each forward pass of grpo.update was given; not of the pass that only looks (twice),
    for these samples are made up."""
    rows, original = [], grpo.token_logprobs

    def spy(policy, ids, *rest):
        if torch.is_grad_enabled():
            rows.append(len(ids))
        return original(policy, ids, *rest)

    monkeypatch.setattr(grpo, "token_logprobs", spy)
    return rows


@pytest.mark.parametrize("loss", LOSSES)
def test_groups_without_signal_cost_no_forward_pass_and_stay_in_the_denominators(
    load, make_groups, naive_logprobs, gradients, assert_close, rows_seen, loss
):
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, [[1.0, 0.0, 1.0], [0.7, 0.7, 0.7], [0.0, 0.5, 1.0]])  # the last has a 0 of its own
    stats = run(policy, groups, loss)
    ours = gradients(policy)
    assert sum(rows_seen) == 3 + 2
    assert stats["groups_with_signal"] == pytest.approx(2 / 3)
    assert stats["trained_tokens"] == sum(e.reply_tokens for e in [*groups[0], groups[2][0], groups[2][2]])
    policy.model.zero_grad()
    naive_loss(naive_logprobs, policy, groups, loss, naive_advantages(groups)).backward()
    assert_close(ours, gradients(policy))


@pytest.mark.parametrize("loss", LOSSES)
def test_episodes_in_error_are_left_out(load, make_groups, naive_logprobs, gradients, assert_close, loss):
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, REWARDS)
    for broken in (groups[0][1], groups[1][3]):
        broken.stop_reason, broken.reward = "error", 99.0
        broken.logprobs = [NAN if s else 0.0 for s in broken.sampled]  # would poison everything it touched
    stats = run(policy, groups, loss)
    ours = gradients(policy)
    policy.model.zero_grad()
    naive_loss(naive_logprobs, policy, groups, loss, naive_advantages(groups)).backward()
    assert_close(ours, gradients(policy))
    assert all(math.isfinite(value) for value in stats.values())


@pytest.mark.parametrize("loss", LOSSES)
def test_unsampled_positions_change_nothing(load, make_groups, gradients, loss):
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, REWARDS)
    before = run(policy, groups, loss)
    expected = gradients(policy)
    for e in sum(groups, []):
        e.logprobs = [p if s else -50.0 for p, s in zip(e.logprobs, e.sampled)]
    stats = run(policy, groups, loss)
    assert stats == before and stats["trained_tokens"] > 0
    assert all(torch.equal(g, expected[name]) for name, g in gradients(policy).items())


def test_the_token_that_pads_changes_nothing(load, make_groups, gradients):
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, REWARDS)
    assert len({len(e.token_ids) for e in sum(groups, [])}) > 1  # premise: there is padding
    run(policy, groups)
    expected = gradients(policy)
    policy.tokenizer.pad_token = "<|im_end|>"
    run(policy, groups)
    assert all(torch.allclose(g, expected[name], atol=1e-7) for name, g in gradients(policy).items())


@pytest.mark.parametrize("loss", LOSSES)
def test_the_stop_token_is_trained(load, naive_logprobs, loss):
    policy = load("qwen3", 4, awake=True)
    ids = [20, 30, 40, policy.tokenizer.eos_token_id]
    with torch.no_grad():
        before = naive_logprobs(policy, ids)[-1].item()
    episode = Episode(0, 0, ids, [False, False, False, True], [0.0, 0.0, 0.0, before], reward=1.0)
    stats = run(policy, [[episode]], loss, torch.optim.SGD(policy.trainable().values(), lr=1e-3), baseline="none")
    assert stats["grad_norm"] > 0 and stats["trained_tokens"] == 1
    with torch.no_grad():
        assert naive_logprobs(policy, ids)[-1].item() > before


@pytest.mark.parametrize("loss", LOSSES)
def test_a_small_step_makes_a_good_episode_likelier_and_a_bad_one_less_likely(load, make_groups, naive_logprobs, loss):
    policy = load("qwen3", 4, awake=True)
    (good, bad) = make_groups(policy, [[1.0, 0.0]], noise=0.0)[0]

    def likelihood(e: Episode) -> float:
        with torch.no_grad():
            logp = naive_logprobs(policy, e.token_ids)  # [T-1]
        return sum(logp[t - 1].item() for t, s in enumerate(e.sampled) if s)

    before = likelihood(good), likelihood(bad)
    run(policy, [[good, bad]], loss, torch.optim.SGD(policy.trainable().values(), lr=1e-3))
    assert likelihood(good) > before[0] and likelihood(bad) < before[1]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("lora_rank, temperature", [(0, 0.7), (4, 1.0)])
def test_the_kl_term_is_k3(load, make_groups, naive_logprobs, gradients, assert_close, snapshot, loss, lora_rank, temperature):
    policy = load("qwen3", lora_rank, awake=True)
    g = torch.Generator().manual_seed(3)
    reference = {n: p.detach() + 0.05 * torch.randn(p.shape, generator=g) for n, p in policy.trainable().items()}
    groups = make_groups(policy, [[1.0, 0.0, 0.5], [0.5, 0.5, 0.5]], temperature)  # the KL term pulls at groups without signal, too
    before = snapshot(policy)
    stats = run(policy, groups, loss, kl=0.5, reference=reference, temperature=temperature)
    ours = gradients(policy)
    assert all(torch.equal(p, before[name]) for name, p in snapshot(policy).items())  # the reference has left again

    policy.model.zero_grad()
    expected = naive_loss(naive_logprobs, policy, groups, loss, naive_advantages(groups), temperature, kl=0.5, reference=reference)
    expected.backward()
    assert stats["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert_close(ours, gradients(policy))

    each = []  # k3 of every sampled token
    with torch.no_grad():
        for e in sum(groups, []):
            logp = naive_logprobs(policy, e.token_ids, temperature)
            with swapped(policy, reference):
                log_r = naive_logprobs(policy, e.token_ids, temperature) - logp
            each += [(log_r[t - 1].exp() - log_r[t - 1] - 1).item() for t, s in enumerate(e.sampled) if s]
    assert min(each) >= -1e-6 and stats["kl_ref"] == pytest.approx(sum(each) / len(each), rel=1e-3)


def test_the_kl_to_itself_is_0(load, make_groups):
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, [[0.5, 0.5]])
    stats = run(policy, groups, kl=1.0, reference={n: p.detach().clone() for n, p in policy.trainable().items()})
    assert stats["kl_ref"] == pytest.approx(0, abs=1e-6) and stats["grad_norm"] == pytest.approx(0, abs=1e-5)


# ---------------------------------------------------------------------------------------------- losses by hand


@pytest.mark.parametrize(
    "loss, ratio, advantage, slope",  # slope: d loss / d log-prob of the token
    [
        ("grpo", 1.1, 1.0, -1.1),  # inside: pushed up
        ("grpo", 1.3, 1.0, 0.0),  # good, and already much likelier: left alone
        ("grpo", 0.7, 1.0, -0.7),  # good, but less likely than it was: pushed up, no clipping
        ("grpo", 1.3, -1.0, 1.3),  # bad, and likelier than it was: pushed down, no clipping
        ("grpo", 0.7, -1.0, 0.0),  # bad, and already much less likely: left alone
        ("dapo", 1.25, 1.0, -1.25),  # DAPO clips higher up …
        ("dapo", 1.29, 1.0, 0.0),
        ("dapo", 0.79, -1.0, 0.0),  # … and as low down
        ("gspo", 1.0005, 1.0, 0.0),
        ("gspo", 1.0002, 1.0, -1.0002),
        ("cispo", 2.0, 1.0, -1.28),  # the weight is clipped, the gradient is not
        ("cispo", 0.1, -1.0, 0.1),  # no lower bound
        ("reinforce", 5.0, 2.0, -2.0),  # no ratio at all
    ],
)
def test_the_slope_of_one_token_by_hand(loss, ratio, advantage, slope):
    old = torch.tensor([-2.0])
    logprobs = (old + math.log(ratio)).requires_grad_()
    one = torch.tensor([1.0])
    batch = Batch([], None, None, torch.tensor([0]), old, advantage * one, one, proximal=old)
    LOSSES[loss](batch, Output(logprobs, entropy=None), None).backward()
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-4)


# ---------------------------------------------------------------------------------------------- steps


def test_on_policy_the_ratio_is_1_and_a_second_epoch_moves_it(load, make_groups):
    seen = []
    for epochs in (1, 2):
        policy = load("qwen3", 4, awake=True)
        optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-2)
        stats = run(policy, make_groups(policy, REWARDS, noise=0.0), optimizer=optimizer, epochs=epochs)
        assert {int(state["step"]) for state in optimizer.state.values()} == {epochs}
        assert stats["mismatch"] < 1e-5  # of the first epoch: the sampler against the trainer
        seen.append(stats)
    one, two = seen
    assert one["ratio"] == pytest.approx(1, abs=1e-5) and one["clip_fraction"] == 0 and abs(one["approx_kl"]) < 1e-6
    assert two["ratio_max"] > 1.01 and two["approx_kl"] > 1e-5
    assert two["trained_tokens"] == 2 * one["trained_tokens"]


def test_the_gradient_is_clipped_to_its_norm(load, make_groups, gradients):
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, REWARDS)
    free = run(policy, groups)["grad_norm"]
    norm = lambda: math.sqrt(sum(g.pow(2).sum().item() for g in gradients(policy).values()))
    assert norm() == pytest.approx(free, rel=1e-4)
    assert run(policy, groups, max_grad_norm=free / 4)["grad_norm"] == pytest.approx(free, rel=1e-4)  # told as it was
    assert norm() == pytest.approx(free / 4, rel=1e-3)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_with_all_rewards_equal_nothing_happens(load, make_groups, snapshot, rows_seen, loss, reward):
    policy = load("qwen3", 4, awake=True)
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=0.1, weight_decay=0.1)
    groups = make_groups(policy, [[reward] * 3] * 2)
    before = snapshot(policy)
    stats = run(policy, groups, loss, optimizer, normalize=True)
    assert stats["loss"] == stats["grad_norm"] == stats["groups_with_signal"] == stats["trained_tokens"] == 0
    assert rows_seen == [] and not optimizer.state
    assert all(torch.equal(p, before[name]) for name, p in snapshot(policy).items())


@pytest.mark.parametrize("what", ["reward", "old log-prob", "weight"])
def test_what_is_not_finite_raises_and_leaves_the_weights_untouched(load, make_groups, snapshot, what):
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, REWARDS)
    if what == "reward":
        groups[0][0].reward = float("inf")
    elif what == "old log-prob":
        groups[0][0].logprobs[-1] = NAN
    else:
        next(iter(policy.trainable().values())).data[0, 0] = NAN
    before = snapshot(policy)
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=0.1)
    with pytest.raises(FloatingPointError, match="not both finite"):
        run(policy, groups, optimizer=optimizer, micro_tokens=30)
    assert all(torch.equal(p.nan_to_num(7), before[name].nan_to_num(7)) for name, p in snapshot(policy).items())
    assert not optimizer.state and all(p.grad is None for p in policy.trainable().values())


# ---------------------------------------------------------------------------------------------- samples of another policy


def put(policy, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, p in policy.trainable().items():
            p.copy_(weights[name])


def trainable(policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.trainable().items()}


STEP = dict.fromkeys(LOSSES, 0.3) | {"gspo": 3e-4}  # a learning rate after which some ratios are beyond the clip, and some are not


@pytest.mark.parametrize("epochs, ways", [(1, IMPORTANCE), (2, IMPORTANCE[1:])])
@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_every_importance_is_the_same(load, make_groups, gradients, assert_close, loss, epochs, ways):
    policy = load("qwen3", 4, awake=True)
    groups, before, seen = make_groups(policy, REWARDS, noise=0.0), trainable(policy), []
    for importance in ways:
        put(policy, before)
        run(policy, groups, loss, torch.optim.SGD(policy.trainable().values(), lr=STEP[loss]), importance=importance, epochs=epochs)
        step = {name: p - before[name] for name, p in trainable(policy).items()}
        seen.append((gradients(policy), step))
    for gradient, step in seen[1:]:
        assert_close(gradient, seen[0][0])
        assert_close(step, seen[0][1], 1e-3)


def stale(policy, make_groups, stir) -> list[list[Episode]]:
    """Groups that this policy has sampled, before it moved."""
    groups = make_groups(policy, REWARDS, noise=0.0)
    stir(policy, 0.05, seed=9)
    return groups


def naive_factors(naive_logprobs, policy, groups, importance: str) -> list[list[float]]:
    """min(π / π_sampler, C) of every sampled token, or of its episode; π is the policy as it is now."""
    factors = []
    for e in sum(groups, []):
        with torch.no_grad():
            now = [0.0, *naive_logprobs(policy, e.token_ids).tolist()]
        ratios = [math.exp(now[t] - e.logprobs[t]) if s else 1.0 for t, s in enumerate(e.sampled)]
        if importance == "sequence":
            ratios = [math.prod(ratios)] * len(ratios)
        factors.append([1.0 if importance == "none" else min(ratio, CAP) for ratio in ratios])
    return factors


def as_if_sampled_now(naive_logprobs, policy, groups) -> list[list[Episode]]:
    with torch.no_grad():
        now = lambda e: [0.0, *naive_logprobs(policy, e.token_ids).tolist()]
        return [[replace(e, logprobs=[p if s else 0.0 for p, s in zip(now(e), e.sampled)]) for e in group] for group in groups]


@pytest.mark.parametrize("importance", IMPORTANCE[1:])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_of_stale_samples_is_that_of_the_formulas(
    load, make_groups, naive_logprobs, gradients, assert_close, stir, loss, importance
):
    policy = load("qwen3", 4, awake=True)
    groups = stale(policy, make_groups, stir)
    stats = run(policy, groups, loss, importance=importance)
    ours = gradients(policy)
    assert stats["clip_fraction"] == 0 and stats["ratio"] == pytest.approx(1, abs=1e-5)  # of the step, which has not begun
    assert stats["mismatch"] > 0.05 and (importance == "none" or 0 < stats["capped"] < 1)  # premise: stale, some of it too much so
    factors = naive_factors(naive_logprobs, policy, groups, importance)
    policy.model.zero_grad()
    now = as_if_sampled_now(naive_logprobs, policy, groups)
    naive_loss(naive_logprobs, policy, now, loss, naive_advantages(groups), factors=factors).backward()
    assert_close(ours, gradients(policy))
    if loss != "reinforce":  # which has no ratio to clip
        run(policy, groups, loss, importance="clip")
        assert any(not torch.allclose(g, ours[name], rtol=0.1) for name, g in gradients(policy).items())  # premise: it is not the same


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_the_kl_term_of_stale_samples_weighs_a_token_as_the_loss_does(
    load, make_groups, naive_logprobs, gradients, assert_close, stir, loss, importance
):
    policy = load("qwen3", 4, awake=True)
    groups = stale(policy, make_groups, stir)
    reference = {name: 0.9 * p.detach() for name, p in policy.trainable().items()}
    stats = run(policy, groups, loss, importance=importance, kl=0.5, reference=reference)
    ours = gradients(policy)
    factors = naive_factors(naive_logprobs, policy, groups, importance)
    policy.model.zero_grad()
    now = as_if_sampled_now(naive_logprobs, policy, groups)
    expected = naive_loss(
        naive_logprobs, policy, now, loss, naive_advantages(groups), kl=0.5, reference=reference, factors=factors
    )  # fmt: skip
    expected.backward()
    assert stats["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert_close(ours, gradients(policy))


def test_approx_kl_is_that_of_the_sampler_to_the_policy(load, make_groups, naive_logprobs, stir):
    """k3 of KL(sampler || policy): r - log r - 1 with r = policy / sampler. The other way round it is another number."""
    policy = load("qwen3", 4, awake=True)
    groups, ours, other = stale(policy, make_groups, stir), [], []
    for e in sum(groups, []):
        with torch.no_grad():
            now = [0.0, *naive_logprobs(policy, e.token_ids).tolist()]
        moved = [now[t] - e.logprobs[t] for t, s in enumerate(e.sampled) if s]
        ours += [math.exp(x) - x - 1 for x in moved]
        other += [math.exp(-x) + x - 1 for x in moved]
    told = run(policy, groups, importance="none")["approx_kl"]
    assert told == pytest.approx(sum(ours) / len(ours), rel=1e-3)
    assert told != pytest.approx(sum(other) / len(other), rel=0.05)  # premise


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_in_the_second_epoch_the_weights_are_still_those_of_the_start_and_the_ratio_is_to_the_start(
    load, make_groups, naive_logprobs, gradients, assert_close, stir, loss, importance
):
    policy, lr = load("qwen3", 4, awake=True), STEP[loss]
    groups = stale(policy, make_groups, stir)
    run(policy, groups, loss, importance=importance)
    start, first = trainable(policy), gradients(policy)
    now = as_if_sampled_now(naive_logprobs, policy, groups)
    factors = naive_factors(naive_logprobs, policy, groups, importance)
    stats = run(policy, groups, loss, torch.optim.SGD(policy.trainable().values(), lr=lr), importance=importance, epochs=2)
    second = gradients(policy)
    assert loss == "reinforce" or 0 < stats["clip_fraction"] < 1  # premise: the first step was long enough
    put(policy, {name: p - lr * first[name] for name, p in start.items()})
    policy.model.zero_grad()
    naive_loss(naive_logprobs, policy, now, loss, naive_advantages(groups), factors=factors).backward()
    assert_close(second, gradients(policy), 1e-3)


@pytest.mark.parametrize("importance", IMPORTANCE)
def test_cutting_stale_samples_into_micro_batches_changes_nothing(load, make_groups, gradients, assert_close, stir, importance):
    policy = load("qwen3", 4, awake=True)
    groups = stale(policy, make_groups, stir)
    reference, before = {name: torch.zeros_like(p) for name, p in policy.trainable().items()}, trainable(policy)
    seen = []
    for micro_tokens in (HUGE, 1, 40):
        put(policy, before)
        optimizer = torch.optim.SGD(policy.trainable().values(), lr=0.01)
        stats = run(
            policy, groups, "grpo", optimizer, kl=0.1, reference=reference, importance=importance, epochs=2, micro_tokens=micro_tokens
        )
        seen.append((gradients(policy), stats))
    for gradient, stats in seen[1:]:
        assert_close(gradient, seen[0][0], 1e-3)
        assert stats == pytest.approx(seen[0][1], rel=1e-3, abs=1e-5)


def test_importance_weights_by_hand():
    log_ratio, row = torch.tensor([0.5, 1.2, 0.0, -0.3]).log1p(), torch.tensor([0, 0, 2, 2])  # ratios 1.5, 2.2 | 1, 0.7
    assert importance_weights("token", log_ratio, row).tolist() == pytest.approx([1.5, 2.0, 1.0, 0.7])
    assert importance_weights("sequence", log_ratio, row).tolist() == pytest.approx([2.0, 2.0, 0.7, 0.7])  # 1.5 · 2.2 is above 2
    assert importance_weights("sequence", log_ratio, row, cap=5.0).tolist() == pytest.approx([3.3, 3.3, 0.7, 0.7])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(-(2.0**99), 2.0**99, width=32)), min_size=1, max_size=30),
    st.sampled_from(["token", "sequence"]),
    st.floats(1e-3, 1e3),
)
def test_no_log_ratio_makes_a_weight_above_the_cap_or_not_finite(tokens, level, cap):
    row, log_ratio = torch.tensor([r for r, _ in tokens]), torch.tensor([x for _, x in tokens])
    weights = importance_weights(level, log_ratio, row, cap)
    assert weights.isfinite().all() and (weights >= 0).all() and (weights <= cap * (1 + 1e-6)).all()
    if level == "sequence":
        assert all(len(set(weights[row == r].tolist())) == 1 for r in row.unique())


@pytest.mark.parametrize("loss", LOSSES)
def test_how_much_was_capped_and_the_mean_weight_are_told(load, make_groups, naive_logprobs, loss):
    policy = load("qwen3", 4, awake=True)
    groups = as_if_sampled_now(naive_logprobs, policy, make_groups(policy, REWARDS))
    gaps, token = [], itertools.cycle([-1.0, 0.0, 0.5, 40.0, 1.0])  # 40 and 1 are above log 2
    for e in sum(groups, []):
        gaps.append([next(token) if s else 0.0 for s in e.sampled])
        e.logprobs = [p - gap for p, gap in zip(e.logprobs, gaps[-1])]
    n = sum(e.reply_tokens for e in sum(groups, []))
    each = {
        "token": [min(math.exp(gap), 2) for e, row in zip(sum(groups, []), gaps) for s, gap in zip(e.sampled, row) if s],
        "sequence": [min(math.exp(sum(row)), 2) for e, row in zip(sum(groups, []), gaps) for s in e.sampled if s],
    }
    for importance, weights in each.items():
        stats = run(policy, groups, loss, importance=importance)
        assert len(weights) == n and stats["importance"] == pytest.approx(sum(weights) / n, rel=1e-3)
        assert stats["capped"] == pytest.approx(sum(w == 2 for w in weights) / n) and math.isfinite(stats["grad_norm"])
    assert each["token"] != each["sequence"]
    for importance in ("clip", "none"):
        assert not {"importance", "capped"} & set(run(policy, groups, loss, importance=importance))


def test_a_ratio_beyond_what_float32_can_hold_is_held_at_the_cap(load, make_groups, gradients):
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, REWARDS)
    for e in sum(groups, []):  # the sampler found them all but impossible: ratios of e^50 a token, of e^100 and more an episode
        e.logprobs = [-50.0 - 8 if s else 0.0 for s in e.sampled]
    for importance in ("token", "sequence"):
        stats = run(policy, groups, importance=importance)
        assert stats["capped"] == 1 and stats["importance"] == pytest.approx(2) and math.isfinite(stats["grad_norm"])
        assert all(g.isfinite().all() for g in gradients(policy).values())


# ---------------------------------------------------------------------------------------------- old


def test_the_oldest_are_kept_and_their_age_is_told(load, make_groups):
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, REWARDS)
    groups[0][0].stop_reason, groups[0][0].policy_version = "error", -1000  # counts nowhere
    stats = run(policy, groups, version=70)
    assert stats["off_policy_steps"] == 70 and stats["trained_tokens"] > 0


@pytest.mark.parametrize("loss", LOSSES)
def test_where_all_are_in_error_nothing_happens(load, make_groups, snapshot, rows_seen, loss):
    policy = load("qwen3", 4, awake=True)
    groups, before = make_groups(policy, REWARDS), snapshot(policy)
    for e in sum(groups, []):
        e.stop_reason = "error"
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=0.1, weight_decay=0.1)
    stats = run(policy, groups, loss, optimizer, version=3)
    assert stats["loss"] == stats["grad_norm"] == stats["trained_tokens"] == stats["off_policy_steps"] == 0
    assert rows_seen == [] and not optimizer.state
    assert all(torch.equal(p, before[name]) for name, p in snapshot(policy).items())


# ---------------------------------------------------------------------------------------------- the true gradient


class Table:
    """A policy that says two words of three: the first from three logits, the second from three that depend on the first."""

    device, tokenizer = torch.device("cpu"), SimpleNamespace(pad_token_id=0)

    def __init__(self, first: torch.Tensor, second: torch.Tensor):
        self.parameters = {"first": torch.nn.Parameter(first.clone()), "second": torch.nn.Parameter(second.clone())}

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return self.parameters

    def logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [N, 3], a 0 and two words from 1 on -> [N, 2]"""
        first, second = (p.log_softmax(-1) for p in self.parameters.values())
        return torch.stack([first[ids[:, 1] - 1], second[ids[:, 1] - 1, ids[:, 2] - 1]], 1)


WORDS = list(itertools.product((1, 2, 3), repeat=2))
PAYS = dict(zip(WORDS, (1.0, 0.0, 0.3, 0.0, 0.7, 0.2, 0.5, 0.0, 0.9)))
SAMPLER = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()


def every_episode(sampler: Table) -> list[list[Episode]]:
    """One group of 16: what the sampler can say, each as often as its probability."""
    with torch.no_grad():
        logprobs = sampler.logprobs(torch.tensor([[0, *words] for words in WORDS]))  # [9, 2]
    group = []
    for words, logp in zip(WORDS, logprobs.tolist()):
        one = Episode(0, 0, [0, *words], [False, True, True], [0.0, *logp], turns=1, reward=PAYS[words])
        group += [replace(one) for _ in range(round(16 * math.exp(sum(logp))))]
    assert len(group) == 16
    return [group]


def distance_from_the_truth(monkeypatch, gradients, loss: str, moved: list[float]) -> tuple[dict[str, float], dict[str, float]]:
    """({importance: |gradient - true gradient| / |true gradient|}, {importance: share that was capped}).

    The samples are those of SAMPLER, the policy is `moved` away from it: its logits, 3 + 9 of them.
    """
    of_table = lambda policy, ids, mask, _: (policy.logprobs(ids)[mask], torch.zeros(int(mask.sum())))
    for module in (grpo, measure):
        monkeypatch.setattr(module, "token_logprobs", of_table)
    away = torch.tensor(moved)
    policy = Table(SAMPLER[0] + away[:3], SAMPLER[1] + away[3:].view(3, 3))
    episodes = torch.tensor([[0, *words] for words in WORDS])
    worth = (policy.logprobs(episodes).sum(1).exp() * torch.tensor([PAYS[words] for words in WORDS])).sum()  # E[reward], exactly
    worth.backward()
    truth = torch.cat([g.flatten() for g in gradients(policy).values()])
    share = 1 / (16 * MAX_TOKENS) if loss == "dr_grpo" else 1 / 32  # of a token in the loss; it has 16 episodes
    far, capped = {}, {}
    for importance in IMPORTANCE[1:]:
        stats = run(policy, every_episode(Table(*SAMPLER)), loss, importance=importance)
        ours = -torch.cat([g.flatten() for g in gradients(policy).values()]) / (16 * share)
        far[importance], capped[importance] = ((ours - truth).norm() / truth.norm()).item(), stats.get("capped", 0.0)
    return far, capped


@pytest.mark.parametrize("loss", LOSSES)
def test_importance_by_episode_is_unbiased_up_to_the_cap_and_by_token_better_than_looking_away(monkeypatch, gradients, loss):
    moved = [0.2, -0.15, -0.1, 0.1, -0.2, 0.1, -0.1, 0.2, 0.0, 0.2, 0.0, -0.2]
    far, capped = distance_from_the_truth(monkeypatch, gradients, loss, moved)
    assert capped == {"none": 0, "token": 0, "sequence": 0}
    assert far["sequence"] < 1e-4 < far["token"] < 0.8 * far["none"]


@pytest.mark.parametrize("loss", LOSSES)
def test_where_only_the_last_word_counts_and_has_moved_a_token_is_an_episode(monkeypatch, gradients, loss):
    moved = [0.0] * 3 + [0.3, -0.1, 0.1] * 3
    far, capped = distance_from_the_truth(monkeypatch, gradients, loss, moved)
    assert capped["token"] == 0 and far["sequence"] < 1e-4
    assert far["token"] <= far["none"]


@pytest.mark.parametrize("loss", LOSSES)
def test_beyond_the_cap_importance_is_biased_and_still_better_than_looking_away(monkeypatch, gradients, loss):
    moved = [-1.2, 0.9, 0.3, -0.5, 0.2, 0.1, 0.3, 1.0, -0.8, -0.2, 0.4, 0.6]
    far, capped = distance_from_the_truth(monkeypatch, gradients, loss, moved)
    assert 0 < capped["token"] < 1 and 0 < capped["sequence"] < 1
    assert 1e-2 < far["sequence"] < far["none"] and far["token"] < far["none"]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(-0.15, 0.15), min_size=12, max_size=12))
def test_however_the_policy_moved_importance_by_episode_is_unbiased(gradients, moved):
    with pytest.MonkeyPatch.context() as monkeypatch:  # no ratio of an episode is above e^0.6 < 2
        far, capped = distance_from_the_truth(monkeypatch, gradients, "grpo", moved)
    assert capped["sequence"] == 0 and far["sequence"] < 1e-3


def test_dr_grpos_constant_is_one_number_for_a_run(load, make_groups, gradients, assert_close):
    """--max-tokens, whatever the turns of a batch's longest episode: else the step would depend on who else is in the batch."""
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, REWARDS)
    run(policy, groups, "dr_grpo")
    expected = gradients(policy)
    groups[1][0].turns = 3
    run(policy, groups, "dr_grpo")
    assert_close(gradients(policy), expected)


def test_episodes_of_one_length_share_a_micro_batch_that_may_be_full_to_the_last_token():
    episodes = [Episode(0, group, [0] * length, [], []) for group, length in enumerate((10, 100, 10, 100))]
    assert cut(episodes, 200) == [[0, 2], [1, 3]]
    assert cut(episodes, 199) == [[0, 2], [1], [3]]


def new_log() -> UpdateLog:
    policy, cfg = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(epochs=1, kl=0.0, importance="clip", plain=False)
    log = UpdateLog(policy, [[]], [[]], [], cfg)
    log.fresh = False  # nobody is here to be looked at twice
    return log


def one_token_each(log, logprobs: list[float], old: list[float]) -> None:
    """Add a micro-batch of two episodes of one sampled token."""
    episodes = [Episode(0, 0, [5, 6], [False, True], [0.0, was], stop_reason="done") for was in old]
    batch, now = collate(episodes, 0, "cpu"), torch.tensor(logprobs)
    batch.proximal, batch.importance = batch.behaviour, torch.ones(2)
    log.add(batch, Output(now, entropy=-now), torch.tensor(0.0))


def test_how_far_the_ratio_stretches_counts_tokens_that_became_likelier_and_less_likely():
    log = new_log()
    one_token_each(log, [-0.5, -1.5], [-1.0, -1.0])
    log.end_epoch()
    assert log.columns()["stretch"] == pytest.approx(1.0)


def test_entropy_and_mismatch_are_those_before_the_first_step():
    log = new_log()
    for now in ([-1.0, -1.2], [-3.0, -3.0]):
        one_token_each(log, now, [-1.0, -1.0])
        log.end_epoch()
    columns = log.columns()
    assert columns["entropy"] == pytest.approx(1.1) and columns["mismatch"] == pytest.approx(0.1)
    assert columns["approx_kl"] == pytest.approx(math.exp(-2) + 2 - 1)  # of the last


# ------------------------------------------------------- what a forker writes (docs/fork.md): an entropy bonus, a process
# reward, a teacher. Each is a function of at most ten statements in grpo.py


def with_entropy_bonus(batch, out, cfg):
    return grpo.grpo(batch, out, cfg) - 0.1 * (batch.weights * out.entropy).sum()


def test_an_entropy_bonus_is_a_loss_that_needs_logits(load, make_groups, naive_logprobs, gradients, assert_close, monkeypatch):
    """Also of groups without an advantage: they have an entropy."""
    monkeypatch.setitem(LOSSES, "bonus", with_entropy_bonus)
    monkeypatch.setattr(grpo, "NEEDS_LOGITS", {"bonus"})
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, [[1.0, 0.0], [0.5, 0.5]])
    run(policy, groups, "bonus")
    ours = gradients(policy)
    policy.model.zero_grad()
    expected = torch.zeros(())
    n = sum(e.reply_tokens for e in sum(groups, []))
    for e, advantage in zip(sum(groups, []), naive_advantages(groups)):
        ids = torch.tensor([e.token_ids])
        p = policy.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)  # [T-1, V]
        for t in (t for t in range(1, len(e.token_ids)) if e.sampled[t]):
            ratio = torch.exp(p[t - 1, e.token_ids[t]] - e.logprobs[t])
            gain = min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            expected = expected - gain / n + 0.1 * (p[t - 1].exp() * p[t - 1]).sum() / n
    expected.backward()
    assert_close(ours, gradients(policy))


def test_a_process_reward_is_an_advantage_per_token(load, make_groups, naive_logprobs, gradients, assert_close):
    """Every other token is paid. An episode whose tokens all have the same advantage is an episode with that advantage."""
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, REWARDS)
    by_episode = grpo.advantages_of(groups, replace(FLAGS, normalize=False))
    same = [[torch.full((e.reply_tokens,), float(a)) for e, a in zip(*pair)] for pair in zip(groups, by_episode)]
    alternate = [[a * (torch.arange(len(a)) % 2) for a in row] for row in same]
    found = []
    for advantages in (by_episode, same, alternate):
        cfg = replace(FLAGS, loss="reinforce", max_tokens=MAX_TOKENS)
        grpo.update(policy, frozen(policy), groups, advantages, cfg)
        found.append(gradients(policy))
    assert_close(found[1], found[0])
    policy.model.zero_grad()
    n, loss = sum(e.reply_tokens for e in sum(groups, [])), torch.zeros(())
    for e, advantage in zip(sum(groups, []), sum(alternate, [])):
        logp = naive_logprobs(policy, e.token_ids)[[t - 1 for t in range(len(e.token_ids)) if e.sampled[t]]]
        loss = loss - (advantage * logp).sum() / n
    loss.backward()
    scale = grpo.MAX_GRAD_NORM / max(grpo.MAX_GRAD_NORM, math.sqrt(sum(float((g**2).sum()) for g in gradients(policy).values())))
    assert_close(found[2], {name: scale * g for name, g in gradients(policy).items()})


def advantages_by_teacher(policy, teacher, groups, cfg) -> list[list[torch.Tensor]]:
    """log p_teacher - log p_policy of every sampled token: distillation on the policy's own samples."""
    out = []
    for group in groups:
        batch = collate(group, policy.tokenizer.pad_token_id, policy.device)
        with torch.no_grad():
            better = grpo.score(teacher, batch, cfg).logprobs - batch.behaviour  # [M]
        out.append(better.split([e.reply_tokens for e in group]))
    return out


def test_a_teacher_pulls_the_policy_towards_itself(load, make_groups, naive_logprobs):
    teacher, policy = load("qwen3", 0), load("qwen3", 4, awake=True)
    groups = make_groups(policy, [[0.0] * 4] * 2, noise=0.0)
    cfg = replace(FLAGS, loss="reinforce", max_tokens=MAX_TOKENS)
    advantages = advantages_by_teacher(policy, teacher, groups, cfg)

    def gain() -> float:
        """Σ advantage · log-prob: it rises if what the teacher finds likelier becomes likelier."""
        total = 0.0
        with torch.no_grad():
            for e, advantage in zip(sum(groups, []), sum(map(list, advantages), [])):
                total += float((advantage * naive_logprobs(policy, e.token_ids)[torch.tensor(e.sampled[1:])]).sum())
        return total

    before = gain()
    grpo.update(policy, torch.optim.SGD(policy.trainable().values(), lr=0.01), groups, advantages, cfg)
    assert gain() > before


def test_advantages_of_large_rewards_are_not_rounded_away():
    rewards = torch.tensor([[1e9 + 1, 1e9], [1e39, 0.0]], dtype=torch.float64)
    assert torch.allclose(group_advantages(rewards), torch.tensor([[1.0, -1.0], [1.0, -1.0]]), atol=1e-5)
    assert not group_advantages(torch.full((1, 3), 1e9 / 3, dtype=torch.float64)).any()
    groups = [[Episode(0, 0, [1], [False], [0.0], 1, reward) for reward in (1e9 + 1, 1e9)]]
    cfg = SimpleNamespace(normalize=True, loss="grpo", baseline="group")
    assert grpo.advantages_of(groups, cfg).tolist() == [[pytest.approx(1, abs=1e-5), pytest.approx(-1, abs=1e-5)]]
