"""GRPO: episodes -> advantages -> loss -> optimizer step.

The whole idea in four numbers. One task, four answers, rewards

    [1, 0, 0, 1]   mean 0.5, so advantages   [+0.5, -0.5, -0.5, +0.5]
                   divided by the std:       [+1,   -1,   -1,   +1  ]

Make every token of the two good answers a little likelier, and every token of the two
bad ones a little less likely. That is all. The group's mean is the baseline, so no
second network has to predict rewards (PPO has one). A group whose answers all score the
same teaches nothing (its advantages are 0) and is skipped.

Why does this raise the reward? The *policy gradient* (Williams 1992) says so:

    expected reward   J = Σ p(reply) · reward        over all replies to a task
    its gradient     ∇J = Σ p(reply) · ∇log p(reply) · reward,   as ∇p = p · ∇log p
                        = mean of reward · ∇log p(reply) over replies drawn from p

log p(reply) is the sum of the log-probs of its tokens, so each token gets the reply's
reward. Subtracting the same number from all rewards of a task does not change that mean
(Σ p · ∇log p = Σ ∇p = ∇Σ p = ∇1 = 0), but makes it less noisy. The group's mean
contains the reply's own reward; that only shrinks the gradient, on average to 1 - 1/k
of it. The division by the std, and the weights below, then change how much each task
and each token counts.

Unlike in Shao et al. 2024, there is no reward model and, without --kl, no reference
policy. The *importance ratio* is p / p_old: how likely a token is now, over how likely
it was when it was sampled. By default each batch is used for one optimizer step. Then
the ratio is 1, apart from rounding, and nothing is clipped.

Watch the reward and grad_norm, not the printed loss. While the ratio is 1, grpo's loss
is minus the mean advantage, about 0 for any model. Its gradient is not 0: p_old is
constant, so at a ratio of 1 the gradient of ratio · advantage is that of
advantage · log p.

Every loss has this form:

    loss = - Σ weight · gain,   over all sampled tokens of the batch

The *gain* is what is to be maximised: with reinforce, a token's advantage times its
log-prob. The *weight* says how much a token counts, for example 1 / (number of sampled
tokens). LOSSES is the table of both.
Weights are computed once, over the whole batch, so cutting it into micro-batches cannot
change the gradient.

Run me: `python grpo.py` works the example through, number by number.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from batch import Batch, collate, set_off_policy_terms, split_by_tokens
from policy import PLAIN, Backend, Output, Policy, take_step, with_weights
from rollout import Episode

# --------------------------------------------------------------------------- advantages


def group_advantages(
    rewards: torch.Tensor, baseline: str = "group", normalize: str = "std"
) -> torch.Tensor:
    """rewards [G, k] -> advantages [G, k]: each reward minus a mean, then divided.

    By default that is (rewards - mean) / (std + 1e-6) of each row. The reward of a
    failed episode is NaN: it gets 0, and counts in no mean.

    baseline  "group": mean and std are those of the episode's group (Shao et al. 2024,
              §4.1.2); "batch": those of all episodes; "none": the reward itself;
              "best" (RAFT: Dong et al. 2023) is not a baseline but a selection: 1 for a
              reward that is above its group's mean and in the upper quarter (ties
              count), else 0. With "none" and "best" `normalize` is ignored
    normalize "std": divide by the standard deviation (the root of a mean over k; TRL's
              is over k - 1); "none" (--no-normalize); "mean": by the mean reward, so
              that rare successes weigh more (Tajwar et al. 2026, "Maximum Likelihood
              RL"; docs/recipe.md). ValueError if a mean is negative
    """
    rewards = rewards.double()
    valid = ~rewards.isnan()  # [G, k]
    if baseline == "none":
        return torch.where(valid, rewards, 0.0).float()
    # A mean is taken over each row, or over everything: n, mean and variance are [G, 1]
    # or [1, 1].
    dim = (0, 1) if baseline == "batch" else 1
    n = valid.sum(dim, keepdim=True).clamp(min=1)
    mean = rewards.nan_to_num(0).sum(dim, keepdim=True) / n
    difference = rewards - mean  # [G, k]
    # Where rewards are equal, rounding may leave 1e-17 (0.1 - mean([0.1] * 3)). Set
    # that to exactly 0, or choose_and_weigh would not skip the group. Failed episodes
    # become 0, too.
    tiny = difference.abs() < 1e-12 * rewards.abs().clamp(min=1)
    centered = difference.masked_fill(tiny | ~valid, 0.0)  # [G, k]
    if baseline == "best":
        # a failed episode is not above the threshold: comparisons with NaN are False
        threshold = rewards.nanquantile(0.75, dim=1, keepdim=True)  # [G, 1]
        return ((rewards >= threshold) & (centered > 0)).float()
    if normalize == "std":
        variance = (centered**2).sum(dim, keepdim=True) / n
        centered = centered / (variance.sqrt() + 1e-6)
    if normalize == "mean":
        if (mean < 0).any():
            raise ValueError("--loss maxrl needs rewards whose mean is at least 0")
        centered = centered / (mean + 1e-6)
    return centered.float()


def compute_advantages(groups: list[list[Episode]], cfg) -> None:
    """Set Episode.advantages, one number per sampled token, for a batch of groups.

    An episode's advantage is how much better it was than its group. All its tokens
    share it, over all turns. Failed episodes get 0, and do not count in the means.
    """
    # Each loss says what advantages are divided by (in LOSSES, further down): most say
    # the std, which gives more weight to tasks that nearly always or nearly never
    # succeed (Liu 2025). With --no-normalize nothing is divided, whatever the loss.
    normalize = LOSSES[cfg.loss].normalize if cfg.normalize else "none"
    episodes = [e for group in groups for e in group]
    if not any(e.turn_rewards for e in episodes):
        rewards = [[e.reward if has_score(e) else math.nan for e in g] for g in groups]
        rewards = torch.tensor(rewards, dtype=torch.float64)  # [G, k]
        advantages = group_advantages(rewards, cfg.baseline, normalize)  # [G, k]
        for e, advantage in zip(episodes, advantages.flatten().tolist()):
            e.advantages = [advantage] * e.reply_tokens
    else:  # rare: the environment pays each turn
        turn_advantages(groups, cfg.baseline, normalize)


def turn_advantages(groups: list[list[Episode]], baseline: str, normalize: str) -> None:
    """compute_advantages, but each turn has an advantage of its own.

    It is how much more the episode earned from that turn on than its group did.
    """
    episodes = [e for group in groups for e in group]
    lengths = [e.turn_lengths for e in episodes]  # [G · k][turns] sampled tokens
    for e in episodes:
        e.advantages = []
    for turn in range(max(map(len, lengths))):
        rewards = [[reward_to_go(e, turn) for e in group] for group in groups]
        rewards = torch.tensor(rewards, dtype=torch.float64)  # [G, k]
        advantages = group_advantages(rewards, baseline, normalize)  # [G, k]
        flat = advantages.flatten().tolist()  # [G · k]
        for e, length, advantage in zip(episodes, lengths, flat):
            if turn < len(length):
                e.advantages += [advantage] * length[turn]


def reward_to_go(e: Episode, turn: int) -> float:
    """What an episode earned from this turn on; NaN if its environment failed.

    With turn_rewards [3, 1] that is 4 in turn 0, the first, and 1 in turn 1: what came
    before a turn cannot be the merit of its tokens. An episode that ended earlier keeps
    the reward of its last turn: [3] counts as 3 in turn 1. So going on pays only if it
    earns more than stopping did. Without turn_rewards it is the episode's reward.

    (Shao et al. 2024, §4.1.3, compare each turn's reward and add up afterwards. We add
    up first, so that a reward which is all paid in the last turn counts in every turn.)
    """
    if not has_score(e):
        return math.nan
    if not e.turn_rewards:
        return e.reward
    last = len(e.turn_rewards) - 1
    return sum(e.turn_rewards[min(turn, last) :])


def has_score(episode: Episode) -> bool:
    """False if its environment failed: then its reward means nothing."""
    return episode.stop_reason != "error"


# ------------------------------------------------------------------------------- losses
# Each function returns the gain of every sampled token, [M]: what is maximised. All
# take the same four arguments, and some ignore the last two. A is a token's advantage.


def clipped_surrogate(
    batch: Batch, output: Output, ratio: torch.Tensor, clip
) -> torch.Tensor:
    """-> [M]: min(ratio · A, clipped ratio · A), Schulman 2017 (PPO), eq. 7.

    With the usual clip, a good token that has already become 20% likelier is pushed no
    further (its gradient is 0), nor is a bad one that has become 20% less likely.
    """
    low, high = clip
    clipped = ratio.clamp(1 - low, 1 + high)  # [M]
    return torch.minimum(ratio * batch.advantages, clipped * batch.advantages)


def reinforce(batch: Batch, output: Output, ratio: torch.Tensor, clip) -> torch.Tensor:
    """-> [M]: A · log p. It ignores the ratio, so it is only for fresh samples."""
    return batch.advantages * output.logprobs


def cispo(batch: Batch, output: Output, ratio: torch.Tensor, clip) -> torch.Tensor:
    """-> [M]: c · A · log p, with the clipped ratio c as a constant factor.

    Unlike in PPO, a token that is clipped keeps its gradient.
    """
    low, high = clip
    constant = ratio.detach().clamp(1 - low, 1 + high)  # [M]
    return constant * batch.advantages * output.logprobs


def dppo(batch: Batch, output: Output, ratio: torch.Tensor, clip) -> torch.Tensor:
    """-> [M]: ratio · A, or 0 if the token has moved too far in the direction of A.

    Qi et al. 2026, "Rethinking the Trust Region in LLM RL", eq. 11 to 13 (binary total
    variation). PPO bounds p / p_old, this bounds p - p_old. So a rare token may grow by
    a larger factor than in PPO, a likely one only by a smaller.
    """
    low, high = clip
    change = output.logprobs.detach().exp() - batch.old_logprobs.exp()  # [M]
    too_far = torch.where(batch.advantages > 0, change > high, change < -low)
    return (ratio * batch.advantages).masked_fill(too_far, 0.0)


@dataclass(frozen=True)
class LossRule:
    """A row of LOSSES: how a loss is computed.

    Episodes whose advantages are 0 are skipped, unless needs_logits or whole_groups is
    set, or --kl is on.
    """

    # One of the functions above, (batch, output, ratio, clip) -> [M]. It must be pure:
    # to_log calls it again, with NO_CLIP, to see which tokens were clipped.
    gain: Callable
    # The importance ratio: "token", one per token; "episode", the geometric mean over
    # an episode's tokens.
    ratio: str = "token"
    # (ε, ε_high): the ratio is clipped to [1 - ε, 1 + ε_high]. (dppo uses them to bound
    # a difference of probabilities.)
    clip: tuple[float, float] = (0.2, 0.2)
    # How much a token counts. The batch has N episodes with S sampled tokens, L of them
    # in the token's own episode:
    #     "episode"     1 / (N · L)           episodes weigh the same
    #     "token"       1 / S                 tokens weigh the same
    #     "max_tokens"  1 / (N · max_tokens)  whatever the lengths
    weight: str = "token"
    # What advantages are divided by: "std", "none" or "mean" (group_advantages).
    normalize: str = "std"
    # Rare: does gain read output.entropy, output.logits or output.hidden? That takes
    # memory for M · V numbers.
    needs_logits: bool = False
    # Rare: does gain compare the episodes of a group? Then a group is never cut into
    # micro-batches.
    whole_groups: bool = False


NO_CLIP = (math.inf, math.inf)

# To add a loss, add a row, and a function if none of those above fits; then use it with
# --loss NAME. If a loss is no sum of weight · gain, replace update: docs/fork.md.
LOSSES = {
    # Williams 1992, with GRPO's advantages; with --baseline none, the reward itself
    "reinforce": LossRule(reinforce, clip=NO_CLIP),
    # Shao 2024 (arXiv 2402.03300), eq. 3, with PPO's ε
    "grpo": LossRule(clipped_surrogate, weight="episode"),
    # Liu 2025 (arXiv 2503.20783), §3.2
    "dr_grpo": LossRule(clipped_surrogate, weight="max_tokens", normalize="none"),
    # Yu 2025 (arXiv 2503.14476), eq. 8: its clip and weights. DAPO also draws groups
    # again until they have a signal, and penalizes long replies; that is not here
    "dapo": LossRule(clipped_surrogate, clip=(0.2, 0.28)),
    # Zheng 2025 (arXiv 2507.18071), eq. 5
    "gspo": LossRule(
        clipped_surrogate, ratio="episode", clip=(3e-4, 4e-4), weight="episode"
    ),
    # MiniMax-M1 2025 (arXiv 2506.13585), eq. 4. ε = 1: no lower clip, as ratios are
    # positive; ε_high is dapo's
    "cispo": LossRule(cispo, clip=(1.0, 0.28)),
    # Tajwar 2026 (arXiv 2602.02710), with grpo's clip and weights, so that only the
    # division differs
    "maxrl": LossRule(clipped_surrogate, weight="episode", normalize="mean"),
    # Qi 2026 (arXiv 2602.04879), with prime-rl's limits
    "dppo": LossRule(dppo, clip=(0.1, 0.1)),
}


# ------------------------------------------------------------------------------- update


@dataclass
class UpdateResult:
    """For the log: loss and gradient of the last step, and what each epoch found."""

    loss: float = 0.0  # of the last step
    grad_norm: float = 0.0  # of the last step, before clipping
    # epochs[epoch][micro-batch]: the batch, and what to_log said about it
    epochs: list[list[tuple[Batch, dict]]] = field(default_factory=list)


def update(
    policy: Policy,
    optimizer,
    episodes: list[Episode],
    cfg,
    reference=None,
    backend: Backend = PLAIN,
) -> UpdateResult:
    """Train on one batch of episodes with advantages: cfg.epochs optimizer steps.

    cfg         a settings.Config
    reference   {name: weight} of the policy that --kl compares with
    backend     how it is computed (policy.py)

    Raises FloatingPointError before the step if the loss or the gradient is not finite.
    """
    rule = LOSSES[cfg.loss]  # a row of the table
    # [(episode, weight of each of its tokens)]
    weighted = choose_and_weigh(episodes, rule, cfg)
    if not weighted:  # nothing to learn: no step
        return UpdateResult()
    batches = micro_batches(policy, weighted, rule, cfg, backend)
    epochs = []
    for epoch in range(cfg.epochs):
        optimizer.zero_grad(set_to_none=True)
        total, logged = 0.0, []
        for batch in batches:
            ids, mask = batch.ids, batch.mask  # [N, T], [N, T-1]
            # backend.forward: policy.plain_forward, or a faster one of fast/
            output = backend.forward(
                policy, ids, mask, cfg.temperature, rule.needs_logits
            )
            if epoch == 0:
                # Sets batch.old_logprobs, what the ratio divides by, for all epochs,
                # and changes batch.weights if an older policy sampled the tokens.
                set_off_policy_terms(batch, output, cfg)
            ratio = RATIOS[rule.ratio](batch, output)  # [M]
            gain = rule.gain(batch, output, ratio, rule.clip)  # [M]
            kl = kl_to_reference(policy, reference, batch, output, cfg, backend)  # [M]
            loss = -(batch.weights * gain).sum()
            loss = loss + cfg.kl * (batch.weights * kl).sum()
            loss.backward()  # gradients of micro-batches add up
            total += loss.item()
            logged.append((batch, to_log(rule, batch, output, ratio, gain, kl)))
        # clip the gradient, then optimizer.step(): policy.py
        step_loss, grad_norm = take_step(policy, optimizer, total, backend)
        epochs.append(logged)
    return UpdateResult(step_loss, grad_norm, epochs)


# ------------------------------------ what update calls, in order: 1. before the epochs


def choose_and_weigh(
    episodes: list[Episode], rule: LossRule, cfg
) -> list[tuple[Episode, torch.Tensor]]:
    """The episodes to train on, each with the weight that each of its tokens gets."""
    scored = [e for e in episodes if has_score(e)]
    lengths = torch.tensor([e.reply_tokens for e in scored], dtype=torch.float32)
    weights = token_weights(rule.weight, lengths, cfg.max_tokens)  # [N]
    weighted = [*zip(scored, weights)]
    if cfg.kl > 0 or rule.needs_logits or rule.whole_groups:
        return weighted
    # Episodes whose advantages are 0 have no gradient, so they need no forward pass.
    # They are dropped only after weighing, because N and S must count them.
    return [(e, weight) for e, weight in weighted if any(e.advantages)]


def token_weights(
    weight_rule: str, lengths: torch.Tensor, max_tokens: int
) -> torch.Tensor:
    """For each episode, the weight that each of its tokens gets, [N] float32.

    weight_rule: a LossRule.weight. lengths [N]: sampled tokens per episode. max_tokens:
    the limit of a reply.
    """
    n = max(1, len(lengths))
    if weight_rule == "episode":
        return 1.0 / (n * lengths.clamp(min=1))
    if weight_rule == "max_tokens":
        total = n * max_tokens
    else:  # "token"
        total = max(1, int(lengths.sum()))
    return torch.full_like(lengths, 1.0 / total, dtype=torch.float32)


def micro_batches(
    policy: Policy,
    weighted: list[tuple[Episode, torch.Tensor]],
    rule: LossRule,
    cfg,
    backend: Backend,
) -> list[Batch]:
    """This process's part of the work, cut into pieces of cfg.micro_tokens."""
    # Sorted by length and dealt out, so that each of several processes gets short and
    # long ones.
    by_length = sorted(weighted, key=lambda pair: len(pair[0].token_ids))
    mine = backend.shard(by_length)
    # If prompts are shared, a group's prompt is computed once, and micro_tokens counts
    # it once. Passes that return logits cannot share it.
    shared = backend.shares_prompts and not rule.needs_logits
    pad, device = policy.tokenizer.pad_token_id, policy.device
    batches = []
    pieces = split_by_tokens(
        [e for e, _ in mine],
        cfg.micro_tokens,
        shared=shared,
        whole=rule.whole_groups,
    )
    for indices in pieces:
        part = [mine[i] for i in indices]
        batch = collate([e for e, _ in part], pad, device)
        advantages = [a for e, _ in part for a in e.advantages]
        weights = [weight.expand(e.reply_tokens) for e, weight in part]
        batch.advantages = torch.tensor(advantages, device=device)  # [M]
        batch.weights = torch.cat(weights).to(device)  # [M]
        batches.append(batch)
    return batches


# ------------------------------------------------------ what update calls: 2. the ratio


def token_ratio(batch: Batch, output: Output) -> torch.Tensor:
    """Each token's probability now, over the old one (batch.old_logprobs): [M]."""
    return (output.logprobs - batch.old_logprobs).exp()


def episode_ratio(batch: Batch, output: Output) -> torch.Tensor:
    """The geometric mean of the ratios of an episode's tokens, for each token: [M]."""
    log_ratio = output.logprobs - batch.old_logprobs  # [M]
    episode_of = batch.episode_of  # [M]
    n = episode_of.bincount().clamp(min=1)  # [N] tokens of each episode
    mean = log_ratio.new_zeros(len(n)).index_add(0, episode_of, log_ratio) / n  # [N]
    return mean[episode_of].exp()


RATIOS = {"token": token_ratio, "episode": episode_ratio}


# ----------------------------------------------------- what update calls: 3. KL and log


def kl_to_reference(
    policy: Policy, reference, batch: Batch, output: Output, cfg, backend
):
    """With --kl: an estimate of each sampled token's KL (k3, below), [M]; else zeros.

    It is the usual one (Shao et al. 2024, eq. 4). On average its value is that of
    KL(policy || reference), but its gradient is that of KL(reference || policy). Near
    the reference the two agree.
    """
    if not cfg.kl:
        return torch.zeros_like(output.logprobs)
    with torch.no_grad(), with_weights(policy, reference):
        ref_output = backend.forward(
            policy, batch.ids, batch.mask, cfg.temperature, need_logits=False
        )
    return k3(output.logprobs, ref_output.logprobs)


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy || reference), nats, at each token the policy sampled.

    log-probs [M], [M] -> [M]: r - log r - 1 with r = p_reference / p, of low variance
    and, apart from rounding, never negative (Schulman 2020, "Approximating KL
    divergence").
    """
    return (ref_logprobs - logprobs).exp() - (ref_logprobs - logprobs) - 1


@torch.no_grad()
def to_log(rule: LossRule, batch: Batch, output: Output, ratio, gain, kl) -> dict:
    """What to log about each sampled token of a pass, no gradients: {name: [M]}."""
    unclipped = rule.gain(batch, output, ratio, NO_CLIP)  # [M]
    return {
        "logprobs": output.logprobs.detach(),
        "entropy": output.entropy_for_log,
        "ratio": ratio.detach(),
        "clipped": gain != unclipped,  # does the clip act on it?
        "kl": kl.detach(),
    }


# -------------------------------------------------- in place of rewards: a teacher


def teacher_advantages(
    teacher: Policy, groups: list[list[Episode]], cfg, backend: Backend = PLAIN
) -> None:
    """On-policy distillation: set each token's advantage to log p_teacher - log p.

    The student sampled the tokens; a teacher judges each one. In expectation over
    samples, the sum of these advantages is -KL(student || teacher); raising it pulls
    the student towards the teacher: Agarwal et al. 2024, "On-Policy Distillation of
    Language Models", with the estimate of Lu 2025
    (thinkingmachines.ai/blog/on-policy-distillation). The reward is only logged. Both
    must have the same tokenizer and read the same prompt (--teacher refuses others).
    """
    episodes = [e for group in groups for e in group if has_score(e)]
    for rows in split_by_tokens(
        episodes, cfg.micro_tokens, shared=backend.shares_prompts
    ):
        part = [episodes[n] for n in rows]
        batch = collate(part, teacher.tokenizer.pad_token_id, teacher.device)
        ids, mask = batch.ids, batch.mask  # [N, T], [N, T-1]
        with torch.no_grad():
            judged = backend.forward(
                teacher, ids, mask, cfg.temperature, need_logits=False
            )
        gaps = judged.logprobs - batch.sampler_logprobs  # [M]
        for e, gap in zip(part, gaps.split([e.reply_tokens for e in part])):
            e.advantages = gap.tolist()


if __name__ == "__main__":
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    centered = group_advantages(rewards, normalize="none")
    print("rewards of one group        ", rewards[0])
    print("minus the mean              ", centered[0])
    print("divided by the std          ", group_advantages(rewards)[0])
    print("all equal: nothing to learn ", group_advantages(torch.ones(1, 4))[0])

    # Three answers: a good one of one token, bad ones of one and two. After a step some
    # of their tokens have left the clip range, 1 ± 0.2. The gradient is that of the
    # loss: where it is negative, the step makes the token likelier.
    old = torch.full((4,), 0.25).log()
    batch = Batch(
        episodes=[Episode(0, group=0)] * 3,
        ids=None,
        mask=None,
        episode_of=torch.tensor([0, 1, 2, 2]),
        sampler_logprobs=old,
        old_logprobs=old,
    )
    lengths = torch.tensor([1.0, 1.0, 2.0])  # [N]
    rewards = torch.tensor([[1.0, 0.0, 0.0]])  # [1, N], one group
    # zeros, for losses with needs_logits
    unused = {"entropy": torch.zeros(4), "logits": torch.zeros(4, 2)}
    cases = {
        "on-policy: no token has moved": [0.25, 0.25, 0.25, 0.25],
        "after a step": [0.36, 0.30, 0.19, 0.28],
    }
    for title, probabilities in cases.items():
        print(f"\n{title}; the first is the good answer's, the others the bad ones'")
        print(f"{'loss':10} {'ratio':24} value  gradient (minus: likelier)")
        for name, rule in LOSSES.items():
            logprobs = torch.tensor(probabilities).log().requires_grad_()
            output = Output(logprobs, torch.zeros(4), **unused)
            [advantages] = group_advantages(rewards, normalize=rule.normalize)  # [N]
            batch.advantages = advantages[batch.episode_of]  # [M]
            weights = token_weights(rule.weight, lengths, 4)[batch.episode_of]
            ratio = RATIOS[rule.ratio](batch, output)
            value = -(weights * rule.gain(batch, output, ratio, rule.clip)).sum()
            value.backward()
            ratios = " ".join(f"{x:.2f}" for x in ratio.tolist())
            gradient = " ".join(f"{x:+.2f}" for x in logprobs.grad.tolist())
            print(f"{name:10} {ratios:24} {value.item():+.2f}  {gradient}")
