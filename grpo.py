"""GRPO: episodes -> advantages -> loss -> one optimizer step.

The whole idea in four numbers. One task, four answers, rewards

    [1, 0, 0, 1]   mean 0.5, so advantages   [+0.5, -0.5, -0.5, +0.5]
                   divided by the std:       [+1,   -1,   -1,   +1  ]

Make every token of the two good answers a little likelier and of the two bad ones a little less
likely. That is all. The group's mean is the baseline, so there is no value network; a group whose
answers all score the same says nothing (its advantages are 0) and is skipped.

Unlike in Shao et al. 2024 there is no reward model and, without --kl, no reference policy either.
There is one optimizer step per batch by default, so the importance ratio (how likely a token is
now, over how likely it was when it was sampled) is 1 and clipping never acts. That is why the
printed loss is near 0 and the ratio 1.000 in a healthy run: the *value* of mean(ratio · advantage)
is about the mean advantage, which is 0 by construction; its *gradient* is not. Watch the reward and
grad_norm instead. (This holds for grpo and gspo, where all answers weigh the same. dapo and dr_grpo
weigh by length, reinforce and cispo multiply log-probs: their loss can have any value.)

The losses differ in the ratio, its clip and the weight of a token; dr_grpo also drops the std.

    name        ratio        clip               weight of a token            source
    reinforce   none         none               1 / all tokens               Williams 1992
    grpo        token        [1-ε, 1+ε]         1 / (episodes · own length)  Shao 2024, eq. 3
    dr_grpo     token        [1-ε, 1+ε]         1 / (episodes · max length)  Liu 2025, §3.2 (no std)
    dapo        token        [1-ε, 1+ε_high]    1 / all tokens               Yu 2025, eq. 8
    gspo        sequence     [1-ε, 1+ε_high]    1 / (episodes · own length)  Zheng 2025, eq. 5
    cispo       token, held  ratio <= 1+ε_high  1 / all tokens               MiniMax-M1 2025, eq. 4

The ratio is one token's or, in gspo, one for the whole episode ("sequence"); "held" means that it
counts as a constant and gets no gradient. Weights are worked out once over the whole batch, so
cutting it into micro-batches cannot change the gradient. Samples of an older policy, or of another
engine, get one more weight: fast/measure.py (--importance).

Run me: `python grpo.py` works the example through, number by number.
"""

import math

import torch

from fast import parallel
from fast.batches import collate, micro_batches
from fast.logprobs import token_logprobs
from fast.measure import (
    IMPORTANCE,
    UpdateLog,
    batch_columns,
    importance_weights,
    k3,
    second_look,
)
from policy import Policy, plain_logprobs, swapped
from rollout import Episode

# loss name: (ε, ε_high), the paper's where it names them; cispo's ε of 1 means no lower bound
CLIP = {
    "reinforce": (0.0, 0.0),
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 0.28),
}
MAX_GRAD_NORM = 1.0  # a longer gradient is shortened to this: one bad batch must not break a policy


def check_names(cfg) -> None:
    """ValueError if there is no such loss, or no such --importance."""
    if cfg.loss not in CLIP:
        raise ValueError(f"--loss {cfg.loss}: choose one of {', '.join(CLIP)}")
    if cfg.importance not in (None, *IMPORTANCE):
        raise ValueError(f"--importance {cfg.importance}: choose one of {', '.join(IMPORTANCE)}")


# -------------------------------------------------------------------------------------- advantages


def advantages_of(groups: list[list[Episode]], cfg) -> torch.Tensor:
    """Advantages of a batch [G, k]: how much better each episode was than the others of its group.

    This is where to drop the deviation (--no-normalize), or to try a baseline of your own. Episodes
    in error get 0, and do not count in the means.
    """
    rewards = [[e.reward if trainable(e) else float("nan") for e in g] for g in groups]
    normalize = cfg.normalize and cfg.loss != "dr_grpo"  # Liu 2025: it favours easy or hard tasks
    rewards = torch.tensor(rewards, dtype=torch.float64)
    return group_advantages(rewards, cfg.baseline, normalize)


def trainable(episode: Episode) -> bool:
    """False if its environment failed: then its reward says nothing."""
    return episode.stop_reason != "error"


def group_advantages(
    rewards: torch.Tensor, baseline: str = "group", normalize: bool = True
) -> torch.Tensor:
    """rewards [G, k] (NaN: episode in error) -> advantages [G, k]; NaN gives 0.

    baseline "group": minus the group's mean (Shao et al. 2024, §4.1.2); "batch": minus the mean of
    all; "none". normalize: divided by the standard deviation over the same set (group or batch; not
    with "none").
    """
    rewards = rewards.double()
    valid = ~rewards.isnan()
    dim = 1 if baseline == "group" else (0, 1)
    n = valid.sum(dim, keepdim=True).clamp(min=1)
    mean = rewards.nan_to_num(0).sum(dim, keepdim=True) / n
    centered = torch.where(valid, rewards - (0.0 if baseline == "none" else mean), 0.0)
    nothing = centered.abs() < 1e-12 * rewards.abs().clamp(min=1)  # 0.1 - mean([0.1] * 3) is not 0
    centered = torch.where(nothing, 0.0, centered)
    if normalize and baseline != "none":  # without a baseline there is no spread to measure against
        spread = (centered**2).sum(dim, keepdim=True) / n
        centered = centered / (spread.sqrt() + 1e-6)
    return centered.float()


# -------------------------------------------------------------------------------------------- loss


def token_weights(loss: str, lengths: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """What each token of an episode weighs, [N] float32. Σ weight · length <= 1.

    lengths [N]: sampled tokens per episode. max_tokens: the most that one could have (dr_grpo).
    """
    if loss in ("grpo", "gspo"):
        return 1.0 / (len(lengths) * lengths.clamp(min=1))
    if loss == "dr_grpo":
        return torch.full_like(lengths, 1.0 / (len(lengths) * max_tokens), dtype=torch.float32)
    return torch.full_like(lengths, 1.0 / max(1, int(lengths.sum())), dtype=torch.float32)


def policy_loss(
    loss: str, logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor,
    row: torch.Tensor, eps: float, eps_high: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Loss of each sampled token, before weighing.

    All tensors are [M], one entry per sampled token: its log-prob now and when sampled, the
    advantage of its episode, and which episode it belongs to (row, int64). The ratio may lie in
    [1 - eps, 1 + eps_high] (CLIP).
    Returns (loss [M], ratio [M], clipped [M] bool); minimise Σ weight · loss.
    """
    log_ratio = logprobs - old_logprobs  # [M]
    if loss == "gspo":  # one ratio per episode: the geometric mean over its tokens
        n = row.bincount().clamp(min=1)  # [rows]
        mean = log_ratio.new_zeros(len(n)).index_add(0, row, log_ratio) / n  # [rows]
        log_ratio = mean[row]
    ratio = log_ratio.exp()
    if loss == "reinforce":
        return -advantages * logprobs, ratio.detach(), torch.zeros_like(row, dtype=torch.bool)
    if loss == "cispo":  # the clipped ratio is a constant: clipped tokens keep their gradient
        held = ratio.detach().clamp(1 - eps, 1 + eps_high)
        return -held * advantages * logprobs, ratio.detach(), held != ratio.detach()
    surrogate = ratio * advantages
    clipped = ratio.clamp(1 - eps, 1 + eps_high) * advantages
    pessimistic = torch.minimum(surrogate, clipped)  # PPO, eq. 7
    return -pessimistic, ratio.detach(), clipped < surrogate


# ------------------------------------------------------------------------------------------ update


def update(
    policy: Policy, optimizer, groups: list[list[Episode]], advantages: torch.Tensor, cfg,
    reference: dict[str, torch.Tensor] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Train on one batch of groups [G][k], cfg.epochs optimizer steps.

    advantages [G, k] are those of advantages_of; cfg is a settings.Config. reference: {name:
    weight} of the policy that the KL penalty compares with. Returns what to log, the columns of
    fast/measure.py. Raises FloatingPointError if loss or gradient is not finite, before the step.
    """
    logprobs_of = plain_logprobs if cfg.plain else token_logprobs
    episodes = [e for group in groups for e in group]  # N of them
    flat, pad = advantages.flatten(), policy.tokenizer.pad_token_id  # [N]
    valid = torch.tensor([trainable(e) for e in episodes])  # [N] bool
    weights = torch.zeros(len(episodes))  # [N] of each token, over the whole batch
    if valid.any():
        lengths = torch.tensor([e.reply_tokens for e in episodes]).float()
        longest = cfg.max_tokens * max(1, *(e.turns for e in episodes))  # max_tokens is per turn
        weights[valid] = token_weights(cfg.loss, lengths[valid], longest)
    # An advantage of 0 is a gradient of 0: these episodes need no forward pass, unless a KL term
    # gives them one. They stay in the denominators, so skipping them changes nothing.
    keep = [n for n, e in enumerate(episodes) if valid[n] and (cfg.kl > 0 or flat[n] != 0)]
    log = UpdateLog(policy.device)
    stats = {
        **batch_columns(advantages, valid, episodes),
        "trained_tokens": sum(episodes[n].reply_tokens for n in keep) * cfg.epochs,
        "rounding": log.rounding,
        "lr": optimizer.param_groups[0]["lr"],
    }
    if not keep:
        return {**stats, "loss": 0.0, "grad_norm": 0.0}
    keep = parallel.share(sorted(keep, key=lambda n: len(episodes[n].token_ids)))  # this process's
    plan = micro_batches([episodes[n] for n in keep], cfg.micro_tokens)
    start: list[torch.Tensor] = []  # log-probs at the start of the update, [M] per micro-batch
    for epoch in range(cfg.epochs):
        optimizer.zero_grad(set_to_none=True)
        log.start_epoch()
        for i, part in enumerate(plan):
            chosen = [keep[n] for n in part]
            some = [episodes[n] for n in chosen]
            batch = collate(some, flat[chosen], weights[chosen], pad, policy.device)
            row = torch.nonzero(batch.mask)[:, 0]  # [M] whose token it is
            sampled = batch.old_logprobs[batch.mask]  # [M] log-probs as sampled

            logprobs, entropy = logprobs_of(policy, batch.ids, batch.mask, cfg.temperature)
            if epoch == 0:
                start.append(logprobs.detach())
            old = sampled if cfg.importance == "clip" else start[i]  # [M] the ratio's denominator
            factor = importance_weights(cfg.importance, start[i] - sampled, row)  # [M]
            weight = batch.weights[row] * factor  # [M]
            advantage = batch.advantages[row]  # [M]
            clip = CLIP[cfg.loss]
            token_loss, ratio, clipped = policy_loss(cfg.loss, logprobs, old, advantage, row, *clip)
            loss = (weight * token_loss).sum()
            kl_ref = torch.zeros_like(sampled)  # [M]
            if cfg.kl > 0:
                with torch.no_grad(), swapped(policy, reference):
                    ref = logprobs_of(policy, batch.ids, batch.mask, cfg.temperature)[0]
                kl_ref = k3(logprobs, ref)
                loss = loss + cfg.kl * (weight * kl_ref).sum()
            loss.backward()

            log.add(
                loss, batch, some, logprobs=logprobs, old=old, entropy=entropy,
                ratio=ratio, clipped=clipped, importance=factor, kl_ref=kl_ref,
            )  # fmt: skip
            if epoch == 0 and i == 0 and not any(e.age for e in episodes):
                again = lambda b=batch: logprobs_of(policy, b.ids, b.mask, cfg.temperature)[0]
                stats |= second_look(logprobs, sampled, log.rounding, again)
        grad_norm = take_step(policy, optimizer, log.end_epoch())
    return {**stats, **log.columns(cfg.kl, cfg.importance), "grad_norm": grad_norm}


def take_step(policy: Policy, optimizer, loss: float, what: str = "loss") -> float:
    """One optimizer step along the sum of all processes' gradients; returns the gradient's norm.

    The norm is measured before clipping to MAX_GRAD_NORM. loss: summed over all processes. Raises
    FloatingPointError before the step if loss or norm is not finite; its message says `what`.
    """
    parameters = list(policy.trainable().values())
    parallel.sum_gradients(parameters)
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM).item()
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(f"{what} {loss} and gradient norm {grad_norm} are not both finite")
    optimizer.step()
    return grad_norm


if __name__ == "__main__":
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    print("rewards of one group        ", rewards.tolist()[0])
    print("minus the mean              ", group_advantages(rewards, normalize=False)[0].tolist())
    advantages = group_advantages(rewards)[0]
    print("divided by the std          ", [round(a, 3) for a in advantages.tolist()])
    print("all the same, nothing to say", group_advantages(torch.ones(1, 4))[0].tolist())

    row = torch.arange(4)  # one token per answer
    old = torch.full((4,), 0.25).log()
    weight = token_weights("grpo", torch.ones(4), 1)
    numbers = lambda values, form: [format(x, form) for x in values.tolist()]
    now_likely = {"on-policy: nothing moved": [0.25] * 4, "after a step": [0.36, 0.3, 0.19, 0.28]}
    for title, now in now_likely.items():
        print(f"\n{title}")
        for loss, clip in CLIP.items():
            logprobs = torch.tensor(now).log().requires_grad_()
            token_loss, ratio, clipped = policy_loss(loss, logprobs, old, advantages, row, *clip)
            total = (weight * token_loss).sum()
            total.backward()
            ratios, gradient = numbers(ratio, ".2f"), numbers(logprobs.grad, "+.2f")
            print(f"  {loss:10} ratio {ratios} loss {total.item():+.3f} gradient {gradient}")
