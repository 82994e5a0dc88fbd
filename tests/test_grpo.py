"""Protects GRPO: advantages by hand, and for every loss the gradient of a second implementation.

That one is written from the formulas as plain loops over episodes and tokens, with ratios away
from 1, so that clipping is at work.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import grpo
from batch import IMPORTANCE, Batch, importance_weights, split_by_tokens
from fast import logprobs
from grpo import LOSSES, group_advantages, token_weights
from policy import Output, with_weights
from rollout import Episode
from steps import FLAGS, assert_close, gradients, naive_logprobs, snapshot, stir, train_on

NAN = float("nan")
HUGE = 10**9  # tokens per micro-batch: everything at once
MAX_TOKENS = 20  # dr_grpo's constant length
CAP = 2.0  # of an importance weight
REWARDS = [[1.0, 0.0, 0.3, 1.0], [0.0, 0.2, 1.0, 0.1]]
# Not LOSSES: a loss that somebody adds has formulas of its own.
OURS = ("reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "maxrl", "dppo")


# ------------------------------------------------------------------------------------- advantages

R = math.sqrt(3 / 16)  # the standard deviation of [1, 0, 0, 0]


@pytest.mark.parametrize(
    "baseline, normalize, rewards, expected",
    [
        ("group", "none", [[1, 0, 0, 1]], [[0.5, -0.5, -0.5, 0.5]]),
        ("group", "std", [[1, 0, 0, 1]], [[1, -1, -1, 1]]),
        ("group", "std", [[1, 0, 0, 0]], [[0.75 / R, -0.25 / R, -0.25 / R, -0.25 / R]]),
        ("group", "none", [[1, 0], [3, 1]], [[0.5, -0.5], [1, -1]]),
        ("group", "std", [[1, 0], [3, 1]], [[1, -1], [1, -1]]),  # each group by its own spread
        ("batch", "none", [[1, 0], [0, 0]], [[0.75, -0.25], [-0.25, -0.25]]),
        ("batch", "std", [[1, 0], [0, 0]], [[0.75 / R, -0.25 / R], [-0.25 / R, -0.25 / R]]),
        ("none", "none", [[1, 0], [0.5, 2]], [[1, 0], [0.5, 2]]),
        ("none", "std", [[1, 0, 0, 0]], [[1, 0, 0, 0]]),  # no baseline, no spread around it
        ("none", "std", [[1, 1]], [[1, 1]]),
        ("best", "std", [[4, 3, 2, 1, 8, 7, 6, 5]], [[0, 0, 0, 0, 1, 1, 0, 0]]),  # a quarter
        ("best", "std", [[1, 1, 1, 0], [0, 1, 0, 0]], [[1, 1, 1, 0], [0, 1, 0, 0]]),  # all that tie
        ("best", "none", [[2, NAN], [1, 3]], [[0, 0], [0, 1]]),
        ("group", "none", [[1, NAN, 0, 0.5]], [[0.5, 0, -0.5, 0]]),  # an error counts nowhere
        ("group", "std", [[NAN, NAN], [0, 2]], [[0, 0], [-1, 1]]),
        ("group", "std", [[NAN, 1]], [[0, 0]]),
        ("batch", "std", [[1, NAN], [NAN, 0]], [[1, 0], [0, -1]]),
        ("group", "mean", [[1, 0, 0, 0], [1, 1, 1, 0]], [[3, -1, -1, -1], [1 / 3] * 3 + [-1]]),
        ("group", "mean", [[0, 0], [1, NAN]], [[0, 0], [0, 0]]),
        ("batch", "mean", [[1, 0], [0, 0]], [[3, -1], [-1, -1]]),
        ("group", "std", [[1e9 + 1, 1e9], [1e39, 0.0]], [[1, -1], [1, -1]]),  # not rounded away
    ],
)
def test_advantages_by_hand(baseline, normalize, rewards, expected):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(rewards, baseline, normalize)
    assert advantages.dtype == torch.float32
    assert torch.allclose(advantages, torch.tensor(expected).float(), atol=1e-5)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 0.1 + 0.9 * 4 / 11, 1e9 / 3])
def test_equal_rewards_give_an_advantage_of_exactly_0(reward):
    """In floating point, 0.1 - mean([0.1] * 3) is not 0: the group would not be skipped."""
    for k, baseline in itertools.product((2, 3, 7, 8), ("group", "batch", "best")):
        rewards = torch.full((3, k), reward, dtype=torch.float64)
        for normalize in ("none", "std", "mean"):
            assert group_advantages(rewards, baseline, normalize).eq(0).all()


def test_a_mean_below_0_is_refused():
    """Divided by it, the better of two replies would become less likely."""
    with pytest.raises(ValueError, match="--loss maxrl needs rewards whose mean is at least 0"):
        group_advantages(torch.tensor([[-1.0, 0.0]]), normalize="mean")


def test_advantages_of_episodes_follow_the_flags():
    group = [Episode(0, 0, [1], [True], [0.0], 1, reward) for reward in (1.0, 0.5, 0.7)]
    group[2].stop_reason = "error"
    found = lambda **flags: sum(advantages_of(group, **flags), [])
    assert found(loss="dr_grpo") == found(normalize=False) == [0.25, -0.25, 0.0]
    assert found(loss="grpo") == pytest.approx([1, -1, 0], abs=1e-4)
    assert found(loss="maxrl") == pytest.approx([1 / 3, -1 / 3, 0], abs=1e-5)
    assert found(baseline="none") == [1.0, 0.5, 0.0]


def paid_by_turn(*turn_rewards: list[float], reward=None) -> list[Episode]:
    """A group with two sampled tokens per turn; reward: of each episode, by default the sum."""
    group = []
    for rewards in turn_rewards:
        sampled = [False, True, True] * len(rewards)
        total = sum(rewards) if reward is None else reward
        e = Episode(0, 0, [1] * len(sampled), sampled, [0.0] * len(sampled), len(rewards), total)
        group.append(replace(e, turn_rewards=rewards))
    return group


def advantages_of(group: list[Episode], **flags) -> list[list[float]]:
    grpo.compute_advantages([group], replace(FLAGS, **flags))
    assert all(len(e.advantages) == e.reply_tokens for e in group)
    return [e.advantages for e in group]


def test_a_turn_is_judged_by_what_was_earned_from_it_on():
    """By hand: from turn 0 on the group earned 3 and 1, from turn 1 on 1 and 1."""
    group = paid_by_turn([2.0, 1.0], [0.0, 1.0])
    assert advantages_of(group, normalize=False) == [[1, 1, 0, 0], [-1, -1, 0, 0]]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("baseline", ["group", "batch", "none", "best"])
def test_with_one_turn_or_all_credit_in_the_last_one_it_is_grpo(normalize, baseline):
    """Also if the episodes of a group have different numbers of turns."""
    flags = {"normalize": normalize, "baseline": baseline}
    for rows in ([[1.0], [0.0], [0.5]], [[0.0, 1.0], [0.0], [0.0, 0.0, 0.5]]):
        group = paid_by_turn(*rows)
        whole = [replace(e, turn_rewards=[]) for e in group]
        assert advantages_of(group, **flags) == advantages_of(whole, **flags)


def test_credit_per_turn_pays_nobody_for_going_on():
    """A baseline that adds up over the turns which an episode has would pay for stopping, or for
    going on (verl#7244). Ours does not: over all pairs of episodes, each with its probability, the
    gradient is half of the true one, as GRPO's is with k = 2, where an episode is half its own mean.

    The first turn pays 0 or 1 by luck. In the second the policy stops, or goes on to a third.
    """
    p = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)  # of going on
    choices = [([0.5], (1 - p).log()), ([0.0, 0.2], p.log())]  # (rewards from there on, log-prob)
    plays = [([luck, *rest], logp) for luck in (0.0, 1.0) for rest, logp in choices]
    reward = sum(0.5 * logp.exp() * sum(rewards) for rewards, logp in plays)
    slope_of = lambda y: torch.autograd.grad(y, p, retain_graph=True)[0].item()
    found = 0.0
    for (one, logp), (other, logp_other) in itertools.product(plays, repeat=2):
        advantages = advantages_of(paid_by_turn(one, other), normalize=False)[0]
        second_turn = advantages[2]  # two tokens per turn
        both = 0.25 * (logp + logp_other).exp().item()
        found += both * second_turn * slope_of(logp)
    assert found == pytest.approx(slope_of(reward) / 2)


# ------------------------------------------------------------------------ weights, micro-batches


def test_token_weights_by_hand():
    lengths = torch.tensor([2.0, 8.0])  # two episodes, 10 tokens
    expected = {
        "reinforce": [1 / 10, 1 / 10],
        "grpo": [1 / 4, 1 / 16],
        "dr_grpo": [1 / 40, 1 / 40],
        "dapo": [1 / 10, 1 / 10],
        "gspo": [1 / 4, 1 / 16],
        "cispo": [1 / 10, 1 / 10],
        "maxrl": [1 / 4, 1 / 16],
        "dppo": [1 / 10, 1 / 10],
    }
    found = {loss: token_weights(LOSSES[loss].weight, lengths, 20).tolist() for loss in OURS}
    assert found == {loss: pytest.approx(weights) for loss, weights in expected.items()}


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 9)), max_size=30),
    st.integers(1, 120),
    st.booleans(),
)
def test_micro_batches_hold_every_episode_once_within_the_budget(rows, budget, shared):
    """A prompt that a group shares may count once."""
    prompts = [(name,) * length for name, length, _ in rows]
    replies = [reply for _, _, reply in rows]
    episodes = []
    for prompt, reply in zip(prompts, replies):
        sampled = [False] * len(prompt) + [True] * reply
        episodes.append(Episode(0, hash(prompt), [*prompt, *[0] * reply], sampled, []))
    parts = split_by_tokens(episodes, budget, shared)
    assert Counter(n for part in parts for n in part) == Counter(range(len(rows)))
    for part in parts:
        size = len(part) * max(len(episodes[n].token_ids) for n in part)
        if shared:
            once = sum(map(len, {prompts[n] for n in part}))
            size = once + len(part) * max(replies[n] for n in part)
        assert len(part) == 1 or size <= budget
    for prompt in set(prompts) if shared else ():  # a group is cut only if it is too large
        own = {n for n, one in enumerate(prompts) if one == prompt}
        whole = len(prompt) + len(own) * max(replies[n] for n in own)
        assert sum(not own.isdisjoint(part) for part in parts) == 1 or whole > budget
    uncut = split_by_tokens(episodes, budget, shared, whole=True)
    assert sorted(sum(uncut, [])) == [*range(len(rows))]
    for prompt in set(prompts):
        own = {n for n, one in enumerate(prompts) if one == prompt}
        assert sum(not own.isdisjoint(part) for part in uncut) == 1


# ------------------------------------------------------------------- a batch, and the formulas


@pytest.fixture(autouse=True)
def narrow_dppo(request, monkeypatch):
    """With a model, dppo's clip is as narrow as the probabilities of random tokens ask for."""
    if "load" in request.fixturenames:
        monkeypatch.setitem(LOSSES, "dppo", replace(LOSSES["dppo"], clip=(2e-4, 2e-4)))


def make_groups(policy, rewards, temperature: float = 1.0, noise: float = 0.4):
    """Groups of random episodes of one or two turns.

    They were sampled, so their log-probs say, by a policy that is `noise` away from this one.
    """
    g = torch.Generator().manual_seed(0)
    number = lambda low, high: int(torch.randint(low, high, (), generator=g))

    def episode(task: int, reward: float) -> Episode:
        sampled = [False] * number(2, 6) + [True] * number(1, 7)
        turns = 1 + (number(0, 3) > 0)
        if turns == 2:
            sampled += [False] * number(1, 4) + [True] * number(1, 7)
        ids = torch.randint(11, 1024, (len(sampled),), generator=g).tolist()
        ids[-1] = policy.tokenizer.eos_token_id
        now = logprobs_now(policy, ids, temperature)
        shift = (noise * torch.randn(len(ids), generator=g)).tolist()
        old = [now[t] + shift[t] if s else 0.0 for t, s in enumerate(sampled)]
        return Episode(task, task, ids, sampled, old, turns, reward)

    return [[episode(task, reward) for reward in row] for task, row in enumerate(rewards)]


@pytest.fixture
def policy(load):
    return load("qwen3", 4, awake=True)


@torch.no_grad()
def logprobs_now(policy, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Of every token; 0 for the first."""
    return [0.0, *naive_logprobs(policy, ids, temperature).tolist()]


def naive_loss(policy, groups, loss, temperature=1.0, kl=0.0, reference=None, factors=None):
    """LOSSES read aloud: one episode at a time, one token at a time.

    Advantages are rewards minus the group's mean, without division. factors {id(episode): [T]}:
    what each token weighs besides, for having been drawn by another policy.
    """
    eps, eps_high = LOSSES[loss].clip
    trained = [[e for e in group if e.stop_reason != "error"] for group in groups]
    n, all_tokens = len(sum(trained, [])), sum(e.reply_tokens for e in sum(trained, []))
    total = torch.zeros(())
    for mates, e in ((group, e) for group in trained for e in group):
        advantage = e.reward - sum(other.reward for other in mates) / len(mates)
        logp = naive_logprobs(policy, e.token_ids, temperature)  # [T-1]
        if kl:
            with torch.no_grad(), with_weights(policy, reference):
                ref = naive_logprobs(policy, e.token_ids, temperature)  # [T-1]
        chosen = [t for t in range(1, len(e.token_ids)) if e.sampled[t]]
        log_ratios = [logp[t - 1] - e.logprobs[t] for t in chosen]
        sequence_ratio = torch.exp(sum(log_ratios) / len(chosen))
        for t, log_ratio in zip(chosen, log_ratios):
            ratio = sequence_ratio if loss == "gspo" else torch.exp(log_ratio)
            held = ratio.clamp(1 - eps, 1 + eps_high)
            if loss == "reinforce":
                gain = advantage * logp[t - 1]
            elif loss == "cispo":
                gain = held.item() * advantage * logp[t - 1]
            elif loss == "dppo":
                moved = math.exp(logp[t - 1].item()) - math.exp(e.logprobs[t])
                too_far = moved > eps_high if advantage > 0 else moved < -eps
                gain = 0.0 * ratio if too_far else ratio * advantage
            else:
                gain = min(ratio * advantage, held * advantage)
            if loss in ("grpo", "gspo", "maxrl"):
                weight = 1 / (n * len(chosen))
            elif loss == "dr_grpo":
                weight = 1 / (n * MAX_TOKENS)
            else:
                weight = 1 / all_tokens
            if factors:
                weight *= factors[id(e)][t]
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


def check_gradient(policy, groups, loss: str, told=None, share=1e-4, **options) -> None:
    """The gradients that the policy has now are those of naive_loss, and so is the loss."""
    ours = gradients(policy)
    policy.model.zero_grad()
    expected = naive_loss(policy, groups, loss, **options)
    expected.backward()
    assert told is None or told == pytest.approx(expected.item(), abs=1e-5)
    assert_close(ours, gradients(policy), share)


@pytest.fixture
def rows_seen(monkeypatch) -> list[int]:
    """How many episodes each forward pass of grpo.update was given, those for a log aside."""
    rows, original = [], logprobs.token_logprobs

    def spy(policy, ids, *rest):
        if torch.is_grad_enabled():
            rows.append(len(ids))
        return original(policy, ids, *rest)

    monkeypatch.setattr(logprobs, "token_logprobs", spy)
    return rows


# ------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("lora_rank, temperature", [(4, 1.0), (0, 0.7)])
@pytest.mark.parametrize("loss", OURS)
def test_the_gradient_is_that_of_the_formulas(load, rows_seen, loss, lora_rank, temperature):
    """Groups without a signal cost no forward pass and stay in the denominators. Errors do not."""
    policy = load("qwen3", lora_rank, awake=True)
    groups = make_groups(policy, [*REWARDS, [0.7] * 4, [0.0, 0.5, 1.0, 0.5]], temperature)
    broken = groups[0][1]
    broken.stop_reason, broken.reward, broken.policy_version = "error", 99.0, -1000
    broken.logprobs = [NAN if s else 0.0 for s in broken.sampled]  # would poison what it touched
    stats = run(policy, groups, loss, temperature=temperature, version=70)
    assert loss == "reinforce" or 0.1 < stats["clip_fraction"] < 0.9  # premise
    check_gradient(policy, groups, loss, stats["loss"], temperature=temperature)
    trained = [*groups[0][:1], *groups[0][2:], *groups[1], groups[3][0], groups[3][2]]
    assert sum(rows_seen) == len(trained)
    assert stats["trained_tokens"] == sum(e.reply_tokens for e in trained)
    assert stats["groups_with_signal"] == 3 / 4 and stats["off_policy_steps"] == 70
    assert all(math.isfinite(value) for value in stats.values())


@pytest.mark.parametrize("loss", OURS)
def test_cutting_into_micro_batches_changes_nothing(load, loss):
    seen = []
    for micro_tokens in (HUGE, 30, 1):
        policy = load("qwen3", 4, awake=True)
        groups = make_groups(policy, REWARDS)
        reference = {name: torch.zeros_like(p) for name, p in policy.trainable().items()}
        options = dict(kl=0.1, reference=reference, importance="sequence", epochs=2)
        optimizer = torch.optim.SGD(policy.trainable().values(), lr=0.01)
        stats = run(policy, groups, loss, optimizer, micro_tokens=micro_tokens, **options)
        seen.append((gradients(policy), stats))
    (whole, told), *others = seen
    for cut_up, told_too in others:
        assert_close(cut_up, whole, 1e-3)
        assert told_too == pytest.approx(told, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("lora_rank, temperature", [(4, 1.0), (0, 0.7)])
@pytest.mark.parametrize("loss", OURS)
def test_the_kl_term_is_k3(load, loss, lora_rank, temperature):
    """It pulls at groups without a signal, too."""
    policy = load("qwen3", lora_rank, awake=True)
    reference = {name: 0.9 * p.detach() for name, p in policy.trainable().items()}
    options = dict(kl=0.5, reference=reference, temperature=temperature)
    groups = make_groups(policy, [[1.0, 0.0, 0.5], [0.5, 0.5, 0.5]], temperature)
    before = snapshot(policy)
    stats = run(policy, groups, loss, **options)
    torch.testing.assert_close(snapshot(policy), before, rtol=0, atol=0)  # the reference has left
    check_gradient(policy, groups, loss, stats["loss"], **options)
    if loss == "dapo":  # which weighs all tokens alike: what is logged is the mean of k3
        alone = run(policy, groups, loss, temperature=temperature)["loss"]
        assert stats["kl_ref"] == pytest.approx((stats["loss"] - alone) / 0.5, rel=1e-3)


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
        # The token had probability 0.135. DPPO limits the difference to 0.1 …
        ("dppo", 1.5, 1.0, -1.5),  # … so a rare token's ratio may leave PPO's range,
        ("dppo", 1.8, 1.0, 0.0),  # up to 0.235, and
        ("dppo", 0.5, -1.0, 0.5),
        ("dppo", 0.2, -1.0, 0.0),  # down to 0.035;
        ("dppo", 1.8, -1.0, 1.8),  # what went the wrong way is pulled back
    ],
)
def test_the_slope_of_one_token_by_hand(loss, ratio, advantage, slope):
    old, one = torch.tensor([-2.0]), torch.tensor([1.0])
    logprobs = (old + math.log(ratio)).requires_grad_()
    batch = Batch([], None, None, torch.tensor([0]), old, advantage * one, old_logprobs=old)
    output, row = Output(logprobs, one), LOSSES[loss]
    (-row.gain(batch, output, grpo.RATIOS[row.ratio](batch, output), row.clip)).backward()
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-4)


def test_a_teacher_judges_each_token(load):
    """The advantage is log p_teacher - log p of the sampler, at the temperature of the samples."""
    policy, teacher = load("qwen3", 4, awake=True), load("qwen3", 4, awake=True)
    stir(teacher, 0.05, seed=3)
    groups = make_groups(policy, REWARDS, temperature=0.7, noise=0.0)
    groups[1][2].stop_reason = "error"
    for micro_tokens in (HUGE, 30):
        cfg = replace(FLAGS, temperature=0.7, micro_tokens=micro_tokens)
        grpo.compute_advantages(groups, cfg)
        grpo.teacher_advantages(teacher, groups, cfg)
        for e in sum(groups, []):
            there = logprobs_now(teacher, e.token_ids, 0.7)
            gaps = [there[t] - e.logprobs[t] for t, s in enumerate(e.sampled) if s]
            failed = e.stop_reason == "error"
            assert e.advantages == ([0.0] * len(gaps) if failed else pytest.approx(gaps, abs=1e-4))
    same = make_groups(teacher, REWARDS, noise=0.0)
    grpo.teacher_advantages(teacher, same, cfg=replace(FLAGS, micro_tokens=HUGE))
    assert max(abs(a) for e in sum(same, []) for a in e.advantages) < 1e-5


# ----------------------------------------------------------------------------------------- steps


def test_on_policy_the_ratio_is_1_and_a_second_epoch_moves_it(load):
    seen = []
    for epochs in (1, 2):
        policy = load("qwen3", 4, awake=True)
        optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-2)
        groups = make_groups(policy, REWARDS, noise=0.0)
        seen.append(run(policy, groups, optimizer=optimizer, epochs=epochs))
        assert {int(state["step"]) for state in optimizer.state.values()} == {epochs}
        assert seen[-1]["mismatch"] < 1e-5  # of the first epoch: the sampler against the trainer
    one, two = seen
    assert one["ratio"] == pytest.approx(1, abs=1e-5) and one["clip_fraction"] == 0
    assert abs(one["approx_kl"]) < 1e-6 and two["approx_kl"] > 1e-5 and two["ratio_max"] > 1.01
    assert two["trained_tokens"] == 2 * one["trained_tokens"]


def test_the_gradient_is_clipped_to_its_norm(policy):
    groups = make_groups(policy, REWARDS)
    free = run(policy, groups)["grad_norm"]
    norm = lambda: math.sqrt(sum(g.pow(2).sum().item() for g in gradients(policy).values()))
    assert norm() == pytest.approx(free, rel=1e-4)
    told = run(policy, groups, max_grad_norm=free / 4)["grad_norm"]
    assert told == pytest.approx(free, rel=1e-4)  # as it was before
    assert norm() == pytest.approx(free / 4, rel=1e-3)


@pytest.mark.parametrize("why", ["all rewards equal", "all in error"])
def test_where_nothing_can_be_learned_nothing_happens(policy, rows_seen, why):
    groups = make_groups(policy, [[0.1] * 3] * 2 if why == "all rewards equal" else REWARDS)
    for e in sum(groups, []):
        e.stop_reason = "error" if why == "all in error" else "done"
    before = snapshot(policy)
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=0.1, weight_decay=0.1)
    stats = run(policy, groups, optimizer=optimizer, normalize=True)
    columns = ("loss", "grad_norm", "groups_with_signal", "trained_tokens")
    assert [stats[name] for name in columns] == [0] * 4
    assert rows_seen == [] and not optimizer.state
    assert all(torch.equal(p, before[name]) for name, p in snapshot(policy).items())


@pytest.mark.parametrize("what", ["reward", "weight"])
def test_what_is_not_finite_raises_and_leaves_the_weights_untouched(policy, what):
    groups = make_groups(policy, REWARDS)
    if what == "reward":
        groups[0][0].reward = float("inf")
    else:
        next(iter(policy.trainable().values())).data[0, 0] = NAN
    before = snapshot(policy)
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=0.1)
    with pytest.raises(FloatingPointError, match="not both finite"):
        run(policy, groups, optimizer=optimizer, micro_tokens=30)
    for name, p in snapshot(policy).items():
        assert torch.equal(p.nan_to_num(7), before[name].nan_to_num(7))
    assert not optimizer.state and all(p.grad is None for p in policy.trainable().values())


# -------------------------------------------------------------------- samples of another policy


# A learning rate after which some ratios are beyond the clip, and some are not.
STEP = dict.fromkeys(OURS, 0.3) | {"gspo": 3e-4}


def naive_factors(policy, groups, importance: str) -> dict[int, list[float]]:
    """min(π / π_sampler, C) of every sampled token, or of its episode; π is the policy now.

    With a mask: the ratio, or 0 outside of what the mask lets through.
    """
    low, high = {"token_mask": (0.5, 5.0), "sequence_mask": (0.0, 3.0)}.get(importance, (0, 0))
    factors = {}
    for e in sum(groups, []):
        now = logprobs_now(policy, e.token_ids)
        ratios = [math.exp(a - b) if s else 1.0 for a, b, s in zip(now, e.logprobs, e.sampled)]
        if importance in ("sequence", "sequence_mask"):
            ratios = [math.prod(ratios)] * len(ratios)
        if high:
            factors[id(e)] = [r if low <= r <= high else 0.0 for r in ratios]
        else:
            factors[id(e)] = [1.0 if importance == "none" else min(r, CAP) for r in ratios]
    return factors


def as_if_sampled_now(policy, groups, factors) -> list[list[Episode]]:
    """The same episodes with the log-probs of today; `factors` gets entries for them."""

    def renewed(e: Episode) -> Episode:
        now = logprobs_now(policy, e.token_ids)
        new = replace(e, logprobs=[p if s else 0.0 for p, s in zip(now, e.sampled)])
        factors[id(new)] = factors[id(e)]
        return new

    return [[renewed(e) for e in group] for group in groups]


@pytest.mark.parametrize("importance", IMPORTANCE[1:])
@pytest.mark.parametrize("loss", OURS)
def test_the_gradient_of_stale_samples_is_that_of_the_formulas(load, loss, importance):
    """A weight is that of the start, also in the second epoch, and the ratio is to the start."""
    policy, lr = load("qwen3", 4, awake=True), STEP[loss]
    groups = make_groups(policy, REWARDS, noise=0.0)
    stir(policy, 0.05, seed=9)  # sampled by this policy, before it moved
    factors = naive_factors(policy, groups, importance)
    now = as_if_sampled_now(policy, groups, factors)
    stats = run(policy, groups, loss, importance=importance)
    assert stats["ratio"] == pytest.approx(1, abs=1e-5) and stats["clip_fraction"] == 0
    assert stats["mismatch"] > 0.05
    each = [f for e in sum(groups, []) for f, s in zip(factors[id(e)], e.sampled) if s]
    assert stats.get("importance", 1.0) == pytest.approx(sum(each) / len(each), rel=1e-3)
    assert stats.get("capped", 0.0) == pytest.approx(each.count(CAP) / len(each))
    assert stats.get("masked", 0.0) == pytest.approx(each.count(0.0) / len(each))
    # premise: some are too stale
    assert importance == "none" or 0 < stats.get("capped", 0) + stats.get("masked", 0) < 1
    check_gradient(policy, now, loss, factors=factors)
    if importance == "none":
        return
    first = {name: p.grad.clone() for name, p in policy.trainable().items()}
    again = load("qwen3", 4, awake=True)
    stir(again, 0.05, seed=9)
    optimizer = torch.optim.SGD(again.trainable().values(), lr=lr)
    stats = run(again, groups, loss, optimizer, importance=importance, epochs=2)
    assert loss == "reinforce" or 0 < stats["clip_fraction"] < 1  # premise: STEP is long enough
    with torch.no_grad():  # to where the first of the two steps leads
        for name, p in policy.trainable().items():
            p -= lr * first[name]
            p.grad = again.trainable()[name].grad
    check_gradient(policy, now, loss, share=1e-3, factors=factors)


RATIOS = [math.log(ratio) for ratio in (1.5, 2.2, 1.0, 0.7)]
INFINITE = [1e30, -1e30, 50.0, 80.0]  # what float32 cannot hold is held at the cap


@pytest.mark.parametrize(
    "level, log_ratio, cap, weights",
    [
        ("sequence", RATIOS, 2.0, pytest.approx([2.0, 2.0, 0.7, 0.7])),
        ("sequence", RATIOS, 5.0, pytest.approx([3.3, 3.3, 0.7, 0.7])),
        ("token", INFINITE, 2.0, pytest.approx([2.0, 0.0, 2.0, 2.0])),
        ("token_mask", INFINITE, 2.0, [0.0] * 4),
    ],
)
def test_importance_weights_by_hand(level, log_ratio, cap, weights):
    """Of two episodes. Others: test_the_gradient_of_stale_samples_is_that_of_the_formulas."""
    of = torch.tensor([0, 0, 2, 2])
    assert importance_weights(level, torch.tensor(log_ratio), of, cap).tolist() == weights


# --------------------------------------- what a forker writes (docs/fork.md), in at most ten lines


def with_entropy_bonus(batch, output, ratio, clip):
    return grpo.clipped_surrogate(batch, output, ratio, clip) + 0.1 * output.entropy


def test_an_entropy_bonus_is_a_loss_that_needs_logits(policy, monkeypatch):
    """Also of groups without an advantage: they have an entropy."""
    monkeypatch.setitem(LOSSES, "bonus", grpo.LossRule(with_entropy_bonus, needs_logits=True))
    groups = make_groups(policy, [[1.0, 0.0], [0.5, 0.5]])
    run(policy, groups, "bonus")
    ours = gradients(policy)
    policy.model.zero_grad()
    entropies = []
    for e in sum(groups, []):
        logits = policy.model(input_ids=torch.tensor([e.token_ids])).logits[0, :-1].float()
        entropy = torch.distributions.Categorical(logits=logits).entropy()  # [T-1]
        entropies.append(entropy[torch.tensor(e.sampled[1:])])
    (naive_loss(policy, groups, "bonus") - 0.1 * torch.cat(entropies).mean()).backward()
    assert_close(ours, gradients(policy))


def test_a_loss_that_compares_a_group_sees_all_of_it(load, monkeypatch):
    """Also episodes without an advantage, and however few tokens fit into a forward pass."""
    seen = []

    def compared(batch, output, ratio, clip):
        seen.append(Counter(e.group for e in batch.episodes))
        groups = torch.tensor([e.group for e in batch.episodes])[batch.episode_of]  # [M]
        sums = torch.zeros(9).index_add(0, groups, output.logprobs)
        return batch.advantages * sums[groups]

    monkeypatch.setitem(LOSSES, "compared", grpo.LossRule(compared, whole_groups=True))
    found = []
    for micro_tokens in (HUGE, 1):
        policy = load("qwen3", 4, awake=True)
        seen.clear()
        run(
            policy,
            make_groups(policy, [*REWARDS, [0.5] * 4]),
            "compared",
            micro_tokens=micro_tokens,
        )
        found.append(gradients(policy))
        sizes = sum(seen, Counter())
        assert {group: n // 2 for group, n in sizes.items()} == {0: 4, 1: 4, 2: 4}  # twice a pass
        assert len(seen) == (2 if micro_tokens == HUGE else 6)
    assert_close(found[1], found[0], 1e-3)


def test_a_loss_that_does_not_ask_for_logits_gets_no_entropy(policy, monkeypatch):
    """It would have no gradient, and nobody would notice."""
    monkeypatch.setitem(LOSSES, "bonus", grpo.LossRule(with_entropy_bonus))
    with pytest.raises(TypeError, match="NoneType"):
        run(policy, make_groups(policy, REWARDS), "bonus")


def test_a_process_reward_is_an_advantage_per_token(load, monkeypatch):
    """Every other token is paid: the same as weights of 0 and 1."""
    monkeypatch.setattr("policy.MAX_GRAD_NORM", 1e9)
    policy, factors = load("qwen3", 4, awake=True), {}
    groups = make_groups(policy, REWARDS)
    cfg = replace(FLAGS, loss="reinforce", normalize=False)
    grpo.compute_advantages(groups, cfg)
    for e in sum(groups, []):
        e.advantages = [a * (i % 2) for i, a in enumerate(e.advantages)]
    grpo.update(policy, frozen(policy), sum(groups, []), cfg)
    for e in sum(groups, []):
        number = itertools.count()
        factors[id(e)] = [next(number) % 2 if s else 0 for s in e.sampled]
    check_gradient(policy, groups, "reinforce", factors=factors)
