"""Protects GRPO: advantages by hand, and for every loss the gradient of a second implementation, written from the
formulas as plain loops over episodes and tokens, with ratios away from 1 so that clipping is at work.
"""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import grpo
from grpo import CLIP, Batch, collate, group_advantages, micro_batches, policy_loss, swapped, token_weights, update
from rollout import Episode

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


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_micro_batches_hold_every_episode_once_within_the_budget(lengths, budget):
    plan = micro_batches(lengths, budget)
    assert Counter(n for part in plan for n in part) == Counter(range(len(lengths)))
    for part in plan:
        assert len(part) == 1 or len(part) * max(lengths[n] for n in part) <= budget


def test_collate_shifts_by_one_and_never_marks_prompt_or_padding():
    a = Episode(0, 0, [5, 6, 7, 2], [False, False, True, True], [0.0, 0.0, -0.3, -0.4])
    b = Episode(0, 0, [5, 8], [False, True], [0.0, -0.5])
    batch = collate([a, b], torch.tensor([1.0, -1.0]), torch.tensor([0.1, 0.2]), pad=9, device="cpu")
    assert isinstance(batch, Batch)
    assert batch.ids.tolist() == [[5, 6, 7, 2], [5, 8, 9, 9]]
    assert batch.mask.tolist() == [[False, True, True], [True, False, False]]  # the stop token 2 included
    assert torch.allclose(batch.old_logprobs, torch.tensor([[0.0, -0.3, -0.4], [-0.5, 0.0, 0.0]]))


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


def naive_loss(naive_logprobs, policy, groups, loss, advantages, temperature=1.0, kl=0.0, reference=None) -> torch.Tensor:
    """The table in grpo.py, read aloud: one episode at a time, one token at a time, over *all* episodes but errors."""
    eps, eps_high = CLIP[loss]
    pairs = [(e, a) for e, a in zip(sum(groups, []), advantages) if e.stop_reason != "error"]
    all_tokens = sum(e.reply_tokens for e, _ in pairs)
    total = torch.zeros(())
    for e, advantage in pairs:
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
            total = total - weight * gain
            if kl:
                r = torch.exp(ref[t - 1] - logp[t - 1])
                total = total + kl * weight * (r - torch.log(r) - 1)
    return total


def frozen(policy) -> torch.optim.Optimizer:
    """An optimizer that moves nothing, so that the gradients can be read after `update`."""
    return torch.optim.SGD(policy.trainable().values(), lr=0.0)


def run(policy, groups, loss="grpo", optimizer=None, **changes) -> dict[str, float]:
    options = dict(baseline="group", normalize=False, temperature=1.0, max_tokens=MAX_TOKENS, micro_tokens=HUGE, max_grad_norm=1e9)
    return update(policy, optimizer or frozen(policy), groups, loss=loss, **(options | changes))


REWARDS = [[1.0, 0.0, 0.3, 1.0], [0.0, 0.2, 1.0, 0.1]]


# ---------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("lora_rank, temperature", [(4, 1.0), (0, 0.7)])
@pytest.mark.parametrize("loss", CLIP)
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


@pytest.mark.parametrize("loss", CLIP)
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
    """How many episodes each forward pass of grpo.update was given."""
    rows, original = [], grpo.token_logprobs

    def spy(policy, ids, *rest):
        rows.append(len(ids))
        return original(policy, ids, *rest)

    monkeypatch.setattr(grpo, "token_logprobs", spy)
    return rows


@pytest.mark.parametrize("loss", CLIP)
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


@pytest.mark.parametrize("loss", CLIP)
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


@pytest.mark.parametrize("loss", CLIP)
def test_a_batch_of_errors_only_does_nothing(load, make_groups, snapshot, loss):
    policy = load("qwen3", 4)
    groups = make_groups(policy, [[1.0, 0.0]])
    for e in groups[0]:
        e.stop_reason = "error"
    before = snapshot(policy)
    stats = run(policy, groups, loss, torch.optim.AdamW(policy.trainable().values(), lr=0.1))
    assert stats["loss"] == stats["grad_norm"] == stats["trained_tokens"] == 0
    assert all(torch.equal(p, before[name]) for name, p in snapshot(policy).items())


@pytest.mark.parametrize("loss", CLIP)
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


@pytest.mark.parametrize("loss", CLIP)
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


@pytest.mark.parametrize("loss", CLIP)
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


@pytest.mark.parametrize("loss", CLIP)
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_kl_term_is_k3(load, make_groups, naive_logprobs, gradients, assert_close, snapshot, loss, lora_rank):
    policy = load("qwen3", lora_rank, awake=True)
    g = torch.Generator().manual_seed(3)
    reference = {n: p.detach() + 0.05 * torch.randn(p.shape, generator=g) for n, p in policy.trainable().items()}
    groups = make_groups(policy, [[1.0, 0.0, 0.5], [0.5, 0.5, 0.5]])  # the KL term pulls at groups without signal, too
    before = snapshot(policy)
    stats = run(policy, groups, loss, kl=0.5, reference=reference)
    ours = gradients(policy)
    assert all(torch.equal(p, before[name]) for name, p in snapshot(policy).items())  # the reference has left again

    policy.model.zero_grad()
    expected = naive_loss(naive_logprobs, policy, groups, loss, naive_advantages(groups), kl=0.5, reference=reference)
    expected.backward()
    assert stats["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert_close(ours, gradients(policy))

    each = []  # k3 of every sampled token
    with torch.no_grad():
        for e in sum(groups, []):
            logp = naive_logprobs(policy, e.token_ids)
            with swapped(policy, reference):
                log_r = naive_logprobs(policy, e.token_ids) - logp
            each += [(log_r[t - 1].exp() - log_r[t - 1] - 1).item() for t, s in enumerate(e.sampled) if s]
    assert min(each) >= -1e-6 and stats["kl_ref"] == pytest.approx(sum(each) / len(each), rel=1e-3)


def test_the_kl_to_itself_is_0(load, make_groups):
    policy = load("qwen3", 4, awake=True)
    groups = make_groups(policy, [[0.5, 0.5]])
    stats = run(policy, groups, kl=1.0, reference={n: p.detach().clone() for n, p in policy.trainable().items()})
    assert stats["kl_ref"] == pytest.approx(0, abs=1e-6) and stats["grad_norm"] == pytest.approx(0, abs=1e-5)


# ---------------------------------------------------------------------------------------------- policy_loss by hand


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
    each, _, _ = policy_loss(loss, logprobs, old, torch.tensor([advantage]), torch.tensor([0]), *CLIP[loss])
    each.sum().backward()
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


@pytest.mark.parametrize("loss", CLIP)
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
