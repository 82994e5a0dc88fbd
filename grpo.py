"""GRPO: episodes -> advantages -> loss -> one optimizer step.

The whole idea in four numbers. One task, four answers, rewards

    [1, 0, 0, 1]   mean 0.5, so advantages   [+0.5, -0.5, -0.5, +0.5]
                   divided by the std:       [+1,   -1,   -1,   +1  ]

Make every token of the two good answers a little likelier, and every token of the two
bad ones a little less likely. That is all. The group's mean is the baseline, so no
second network has to predict rewards (PPO has one). A group whose answers all score the
same teaches nothing (its advantages are 0) and is skipped.

Unlike in Shao et al. 2024 there is no reward model and, without --kl, no reference
policy either. There is one optimizer step per batch by default, so the importance ratio
(how likely a token is now, over how likely it was when it was sampled) is 1 and
clipping never acts.

Watch the reward and grad_norm, not the printed loss. With grpo that is minus the mean
advantage, so it is about 0 in every update, while its gradient is not. With most of the
other losses below it can be any number. All losses but two have this form:

    loss = - Σ weight · min(ratio · A, clipped ratio · A),   over all sampled tokens

where A is the advantage. The two are simpler; log p is the token's log-prob:

    reinforce   - Σ weight · A · log p
    cispo       - Σ weight · c · A · log p,   c: the clipped ratio, as a constant

The losses differ in three things:

    ratio    one per token, or one for the whole episode
    clip     the range that the ratio is clipped to: ε below 1, ε or ε_high above
    weight   of each token, made of
                 N     episodes in the batch
                 S     sampled tokens in the batch
                 L     sampled tokens in the token's own episode
                 max   --max-tokens

    name        ratio            clip               weight         source
    reinforce   none             none               1 / S          Williams 1992
    grpo        token            [1-ε, 1+ε]         1 / (N · L)    Shao 2024, eq. 3
    dr_grpo     token            [1-ε, 1+ε]         1 / (N · max)  Liu 2025, §3.2
    dapo        token            [1-ε, 1+ε_high]    1 / S          Yu 2025, eq. 8
    gspo        episode          [1-ε, 1+ε_high]    1 / (N · L)    Zheng 2025, eq. 5
    cispo       token            ratio <= 1+ε_high  1 / S          MiniMax 2025, eq. 4

dr_grpo also does not divide the advantages by the std. Weights are computed once, over
the whole batch, so cutting it into micro-batches cannot change the gradient. Samples
from an older policy, or from another engine, get one more weight: fast/batches.py
(--importance).

Run me: `python grpo.py` works the example through, number by number.
"""

import math
from dataclasses import dataclass

import torch

from fast import parallel
from fast.batches import Batch, UpdateLog, collate, cut, importance_weights, k3
from fast.logprobs import shares_prompts, token_logprobs
from policy import Policy, logprobs_and_entropy, plain_logits, with_weights
from rollout import Episode

MAX_GRAD_NORM = 1.0  # gradient clipping: one bad batch must not break the policy


# --------------------------------------------------------------------------- advantages


def compute_advantages(groups: list[list[Episode]], cfg) -> torch.Tensor:
    """Advantages of a batch [G, k]: how much better each episode was than its group.

    The arithmetic is in group_advantages. A baseline of your own that needs only
    rewards goes there; one that needs the episodes (their lengths, say) goes here.
    Failed episodes get 0, and do not count in the means.
    """
    # NaN stands for the reward of a failed episode.
    rewards = torch.tensor(
        [[e.reward if has_score(e) else math.nan for e in group] for group in groups],
        dtype=torch.float64,
    )
    # Dividing by the std gives more weight to tasks that nearly always or nearly never
    # succeed (Liu 2025). So dr_grpo, that paper's loss, never does it; --no-normalize
    # turns it off for the others.
    normalize = cfg.normalize and cfg.loss != "dr_grpo"
    return group_advantages(rewards, cfg.baseline, normalize)


def has_score(episode: Episode) -> bool:
    """False if its environment failed: then its reward means nothing."""
    return episode.stop_reason != "error"


def group_advantages(
    rewards: torch.Tensor, baseline: str = "group", normalize: bool = True
) -> torch.Tensor:
    """rewards [G, k] -> advantages [G, k]: each reward minus a mean, divided by a std.

    NaN marks a failed episode: it gets 0, and counts in no mean.
    baseline   "group": mean and std are those of the episode's group (Shao et al. 2024,
               §4.1.2); "batch": those of all episodes; "none": nothing is subtracted or
               divided
    normalize  False: only subtract the mean
    """
    rewards = rewards.double()
    valid = ~rewards.isnan()  # [G, k]
    if baseline == "none":
        return torch.where(valid, rewards, 0.0).float()
    # A mean is taken over each row, or over everything: n, mean and variance are [G, 1]
    # or [1, 1].
    dim = 1 if baseline == "group" else (0, 1)
    n = valid.sum(dim, keepdim=True).clamp(min=1)
    mean = rewards.nan_to_num(0).sum(dim, keepdim=True) / n
    difference = rewards - mean  # [G, k]
    # Rounding: 0.1 - mean([0.1] * 3) is 1e-17. A difference as small as that counts as
    # 0, or a group of equal rewards would not be skipped.
    tiny = difference.abs() < 1e-12 * rewards.abs().clamp(min=1)
    centered = difference.masked_fill(tiny | ~valid, 0.0)  # [G, k]
    if normalize:
        variance = (centered**2).sum(dim, keepdim=True) / n
        centered = centered / (variance.sqrt() + 1e-6)
    return centered.float()


# ------------------------------------------------------------------------------- update


def update(
    policy: Policy,
    optimizer,
    groups: list[list[Episode]],
    advantages,
    cfg,
    reference=None,
) -> dict[str, float]:
    """Train on one batch of groups [G][k]: cfg.epochs optimizer steps.

    advantages  [G][k], for each episode: one number, as compute_advantages returns; or
                a tensor [n], with one per sampled token
    cfg         a settings.Config
    reference   {name: weight} of the policy that --kl compares with

    Returns the columns to log (fast/batches.py). Raises FloatingPointError before the
    step if the loss or the gradient is not finite.
    """
    weighted = weigh_episodes(groups, advantages, cfg)  # advantage, weight per token
    batches = micro_batches(weighted, policy, cfg)  # as tensors that fit the memory
    epochs = cfg.epochs if weighted else 0  # nothing to learn: no step
    # If log-probs differ from the sampler's, the log calls forward once more.
    log = UpdateLog(policy, groups, advantages, cfg, forward)
    total = grad_norm = 0.0
    for epoch in range(epochs):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            out = forward(policy, batch, cfg)  # log-probs of its M sampled tokens, now
            if epoch == 0:  # what the ratio divides by, what old samples weigh
                found = proximal_and_importance(batch, out, cfg)
                batch.proximal, batch.importance = found  # [M], [M]; for all epochs
                batch.weights = batch.weights * batch.importance
            loss = LOSSES[cfg.loss](batch, out, cfg)  # a number
            if cfg.kl > 0:
                penalty = kl_to_reference(policy, reference, batch, out, cfg)
                loss = loss + cfg.kl * penalty
            loss.backward()
            total += loss.item()
            log.add(batch, out)
        total, grad_norm = take_step(policy, optimizer, total)  # of all processes
        log.end_epoch()
    return log.columns | {
        "loss": total,
        "grad_norm": grad_norm,
        "lr": optimizer.param_groups[0]["lr"],
    }


# ------------------------------------ what update calls, in order: 1. before the passes


@dataclass
class WeightedEpisode:
    """An episode to train on; the advantage and weight of each of its n tokens."""

    episode: Episode
    advantages: torch.Tensor  # [n]
    weights: torch.Tensor  # [n]


def weigh_episodes(
    groups: list[list[Episode]], advantages, cfg
) -> list[WeightedEpisode]:
    """The episodes to train on, each with its advantages and weights."""
    pairs = [
        (e, torch.as_tensor(advantage).float())
        for group, row in zip(groups, advantages)
        for e, advantage in zip(group, row)
        if has_score(e)
    ]
    lengths = torch.tensor([e.reply_tokens for e, _ in pairs], dtype=torch.float32)
    weights = token_weights(cfg.loss, lengths, cfg.max_tokens)  # [N]
    # One advantage per episode is repeated for its n tokens; an [n] stays as it is.
    weighted = [
        WeightedEpisode(
            e, advantage.expand(e.reply_tokens), weight.expand(e.reply_tokens)
        )
        for (e, advantage), weight in zip(pairs, weights)
    ]
    if cfg.kl > 0 or cfg.loss in NEEDS_LOGITS:
        return weighted
    # An advantage of 0 means a gradient of 0: without a KL or entropy term, such an
    # episode needs no forward pass. It did count when the weights were computed.
    return [w for w in weighted if w.advantages.any()]


def micro_batches(weighted: list[WeightedEpisode], policy: Policy, cfg) -> list[Batch]:
    """This process's part of the work, cut into pieces of cfg.micro_tokens."""
    # Dealt out in turn, the shortest first: each process gets some of every length.
    by_length = sorted(weighted, key=lambda one: len(one.episode.token_ids))
    mine = parallel.shard(by_length)
    pad, device = policy.tokenizer.pad_token_id, policy.device
    # fast/logprobs.py can read a prompt once for all replies to it. Then its tokens
    # count only once towards micro_tokens.
    count_prompt_once = not is_plain(cfg) and shares_prompts(policy.lm)
    batches = []
    for indices in cut(
        [one.episode for one in mine], cfg.micro_tokens, count_prompt_once
    ):
        part = [mine[i] for i in indices]
        batch = collate([one.episode for one in part], pad, device)
        batch.advantages = torch.cat([one.advantages for one in part]).to(device)  # [M]
        batch.weights = torch.cat([one.weights for one in part]).to(device)  # [M]
        batches.append(batch)
    return batches


# --------------------------------------------------- what update calls: 2. forward pass


@dataclass
class Output:
    """What the policy now says about a batch's M sampled tokens."""

    logprobs: torch.Tensor  # [M], differentiable
    # To be logged. It has no gradient: in a loss it would teach nothing.
    entropy_for_log: torch.Tensor | None = None  # [M]
    # For losses, with gradients. None unless the loss is in NEEDS_LOGITS (below), or
    # with --plain.
    entropy: torch.Tensor | None = None  # [M]
    logits: torch.Tensor | None = None  # [M, V]
    # A loss may set these, to have them logged.
    ratio: torch.Tensor | None = None  # [M]
    clipped: torch.Tensor | None = None  # [M] bool
    kl: torch.Tensor | None = None  # [M]


def is_plain(cfg) -> bool:
    """Are the log-probs computed the plain way (policy.py)?"""
    return cfg.plain or cfg.loss in NEEDS_LOGITS


def forward(policy: Policy, batch: Batch, cfg) -> Output:
    """One forward pass: log-probs and entropy of the sampled tokens, now."""
    if is_plain(cfg):
        logits = plain_logits(policy, batch.ids, batch.mask, cfg.temperature)  # [M, V]
        tokens = batch.ids[:, 1:][batch.mask]  # [M]
        logprobs, entropy = logprobs_and_entropy(logits, tokens)  # [M] each
        return Output(logprobs, entropy.detach(), entropy=entropy, logits=logits)
    logprobs, entropy = token_logprobs(policy, batch.ids, batch.mask, cfg.temperature)
    return Output(logprobs, entropy_for_log=entropy)


def proximal_and_importance(
    batch: Batch, out: Output, cfg
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the ratio divides by, and what old samples weigh: [M] and [M].

        --importance      the ratio divides by               extra weight
        clip              the policy that drew the samples   1
        none              the policy at this update's start  1
        token, sequence   the policy at this update's start  min(now / when drawn, CAP),
                                                             per token or per episode

    In the last two rows every ratio of the first pass is 1, so the clip bounds only
    this update's own steps (Hilton et al. 2022). In bfloat16, sampler and trainer round
    differently, and clip clips fresh samples, too: SmolLM2's sums then gained 5 points
    in place of 15 (docs/hardware.md). The default depends on the model (settings.py).

    fast/batches.py calls the policy that the ratio divides by *proximal*, and the one
    that drew the samples *behaviour*, and has CAP.
    """
    now = out.logprobs.detach()  # [M]
    proximal = batch.behaviour if cfg.importance == "clip" else now
    log_ratio = now - batch.behaviour
    return proximal, importance_weights(cfg.importance, log_ratio, batch.row)


# ----------------------------------------------------------- what update calls: 3. loss


# (ε, ε_high): the ratio is clipped to [1 - ε, 1 + ε_high]. dapo and gspo: from their
# papers. grpo and dr_grpo: PPO's 0.2. cispo: dapo's 0.28. reinforce has no ratio.
CLIP = {
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 0.28),  # 1 - 1.0: no lower bound
}


def reinforce(batch: Batch, out: Output, cfg) -> torch.Tensor:
    """Williams 1992: no ratio. Only --importance token or sequence corrects for age."""
    out.ratio = token_ratio(batch, out).detach()  # for the log only
    return -(batch.weights * batch.advantages * out.logprobs).sum()


def grpo(batch: Batch, out: Output, cfg) -> torch.Tensor:
    """Shao 2024, eq. 3: PPO's clipped ratio; every episode weighs the same."""
    return clipped_loss(batch, out, token_ratio(batch, out), *CLIP["grpo"])


def dr_grpo(batch: Batch, out: Output, cfg) -> torch.Tensor:
    """Liu 2025, §3.2: here the same as grpo. What differs is elsewhere: the weight of a
    token (token_weights), and advantages that are not divided (compute_advantages).
    """
    return clipped_loss(batch, out, token_ratio(batch, out), *CLIP["dr_grpo"])


def dapo(batch: Batch, out: Output, cfg) -> torch.Tensor:
    """Yu 2025, eq. 8: all tokens of the batch weigh the same; clips higher."""
    return clipped_loss(batch, out, token_ratio(batch, out), *CLIP["dapo"])


def gspo(batch: Batch, out: Output, cfg) -> torch.Tensor:
    """Zheng 2025, eq. 5: one ratio per episode."""
    return clipped_loss(batch, out, episode_ratio(batch, out), *CLIP["gspo"])


def cispo(batch: Batch, out: Output, cfg) -> torch.Tensor:
    """MiniMax-M1 2025, eq. 4: the clipped ratio is a constant.

    So clipped tokens keep their gradient.
    """
    eps, eps_high = CLIP["cispo"]
    out.ratio = token_ratio(batch, out).detach()
    constant = out.ratio.clamp(1 - eps, 1 + eps_high)  # [M]
    out.clipped = constant != out.ratio
    return -(batch.weights * constant * batch.advantages * out.logprobs).sum()


# To add a loss, write a function like these, and name it
#     in LOSSES                 always; then --loss NAME
#     in EPISODES_WEIGH_ALIKE   if every episode weighs the same, as in grpo, so that a
#                               token weighs 1 / (N · L); else it weighs 1 / S (for
#                               another weight, add a case to token_weights)
#     in NEEDS_LOGITS           if it reads out.entropy or out.logits. This takes memory
#                               for M · V numbers, and the loss then also sees the
#                               episodes whose advantage is 0
# It sees a micro-batch (Batch, in fast/batches.py), which may be only part of a group.
LOSSES = {
    "reinforce": reinforce,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
}
EPISODES_WEIGH_ALIKE = {"grpo", "gspo"}
NEEDS_LOGITS: set[str] = set()


def token_ratio(batch: Batch, out: Output) -> torch.Tensor:
    """Each token's probability now, over that under the proximal policy: [M].

    proximal_and_importance says which policy that is. With one epoch and fresh samples,
    the ratio is 1.
    """
    return (out.logprobs - batch.proximal).exp()


def episode_ratio(batch: Batch, out: Output) -> torch.Tensor:
    """The geometric mean of the ratios of an episode's tokens, for each token: [M]."""
    log_ratio = out.logprobs - batch.proximal  # [M]
    n = batch.row.bincount().clamp(min=1)  # [N]
    mean = log_ratio.new_zeros(len(n)).index_add(0, batch.row, log_ratio) / n  # [N]
    return mean[batch.row].exp()


def clipped_loss(
    batch: Batch, out: Output, ratio: torch.Tensor, eps: float, eps_high: float
) -> torch.Tensor:
    """-Σ weight · min(ratio · A, clipped ratio · A): Schulman 2017 (PPO), eq. 7."""
    gain = ratio * batch.advantages  # [M]
    clipped_gain = ratio.clamp(1 - eps, 1 + eps_high) * batch.advantages  # [M]
    out.ratio = ratio.detach()
    out.clipped = clipped_gain < gain
    return -(batch.weights * torch.minimum(gain, clipped_gain)).sum()


def token_weights(loss: str, lengths: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """The weight of each token of an episode, [N] float32.

    lengths [N]: sampled tokens per episode. max_tokens: the limit of a reply. dr_grpo
    divides by it because it is the same for every batch.
    """
    n = max(1, len(lengths))
    if loss in EPISODES_WEIGH_ALIKE:
        return 1.0 / (n * lengths.clamp(min=1))
    if loss == "dr_grpo":
        return torch.full_like(lengths, 1.0 / (n * max_tokens), dtype=torch.float32)
    # The others, and a loss of your own: all tokens of the batch weigh the same.
    all_tokens = max(1, int(lengths.sum()))
    return torch.full_like(lengths, 1.0 / all_tokens, dtype=torch.float32)


def kl_to_reference(policy: Policy, reference, batch: Batch, out: Output, cfg):
    """Σ weight · KL(policy || reference), a number.

    k3 (fast/batches.py) estimates KL(policy || reference) without bias (Schulman 2020).
    Differentiated with the samples fixed, as in Shao et al. 2024, eq. 4, it does not
    give that KL's gradient, but on average that of KL(reference || policy). Near the
    reference the two nearly agree.
    """
    with torch.no_grad(), with_weights(policy, reference):
        reference_logprobs = forward(policy, batch, cfg).logprobs  # [M]
    out.kl = k3(out.logprobs, reference_logprobs)  # [M]
    return (batch.weights * out.kl).sum()


# ----------------------------------------------------------- what update calls: 4. step


def take_step(
    policy: Policy, optimizer, loss: float, what: str = "loss"
) -> tuple[float, float]:
    """One optimizer step: (loss, norm of the gradient before it is clipped).

    Several processes add up their losses and gradients first; `loss` is this one's.
    Raises FloatingPointError before the step if loss or norm is not finite; `what`
    names the loss in its message.
    """
    parameters = list(policy.trainable().values())
    parallel.all_reduce_gradients(parameters)
    loss = parallel.all_reduce_numbers({"loss": loss})["loss"]
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM).item()
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(
            f"{what} {loss} and gradient norm {grad_norm} are not both finite"
        )
    optimizer.step()
    return loss, grad_norm


if __name__ == "__main__":
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    print("rewards of one group        ", rewards[0])
    print("minus the mean              ", group_advantages(rewards, normalize=False)[0])
    print("divided by the std          ", group_advantages(rewards)[0])
    print("all equal: nothing to learn ", group_advantages(torch.ones(1, 4))[0])

    # Two answers: a good one of one token, a bad one of three. After a step some of
    # their tokens have left the clip range, 1 ± 0.2.
    row = torch.tensor([0, 1, 1, 1])
    old = torch.full((4,), 0.25).log()
    cases = {
        "on-policy: no token has moved": [0.25, 0.25, 0.25, 0.25],
        "after a step": [0.36, 0.30, 0.19, 0.28],
    }
    for title, now in cases.items():
        print(f"\n{title}\n{'loss':10} {'ratio':24} value  gradient of each log-prob")
        for name, loss_of in LOSSES.items():
            logprobs = torch.tensor(now).log().requires_grad_()
            batch = Batch([], ids=None, mask=None, row=row, behaviour=old, proximal=old)
            batch.advantages = torch.tensor([1.0, -1.0])[row]
            batch.weights = token_weights(name, torch.tensor([1.0, 3.0]), 4)[row]
            # zeros, so that a loss of yours that uses the entropy runs here, too
            out = Output(logprobs, entropy=torch.zeros(4))
            loss = loss_of(batch, out, None)
            loss.backward()
            ratios = [] if out.ratio is None else out.ratio.tolist()
            ratio = " ".join(f"{x:.2f}" for x in ratios) or "none"
            gradient = " ".join(f"{x:+.2f}" for x in logprobs.grad.tolist())
            print(f"{name:10} {ratio:24} {loss.item():+.2f}  {gradient}")
