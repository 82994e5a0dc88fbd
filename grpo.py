"""GRPO: episodes -> advantages -> loss -> one optimizer step.

The whole idea in four numbers. One task, four answers, rewards

    [1, 0, 0, 1]   mean 0.5, so advantages   [+0.5, -0.5, -0.5, +0.5]   (divided by the std: [+1, -1, -1, +1])

Make every token of the two good answers a little likelier and of the two bad ones a little less likely. That is
all. The group's mean is the baseline, so there is no value network; a group whose answers all score the same says
nothing (its advantages are 0) and is skipped.

What is left out of the papers: no reward model, no value function, no reference model unless --kl asks for one, and
one optimizer step a batch by default, so that the importance ratio (how likely a token is now, over how likely it was
when it was sampled) is 1 and clipping never acts. That is why the printed loss is near 0 and the ratio 1.000 in a healthy
run: the *value* of mean(ratio · advantage) is about the mean advantage, which is 0 by construction; its *gradient* is not.
Watch the reward and grad_norm instead.

The losses differ in three things only: which ratio, how it is clipped, and how tokens are weighed.

    name        ratio        clip                weight of a token             source
    reinforce   none         none                1 / all tokens                Williams 1992
    grpo        token        [1-ε, 1+ε]          1 / (episodes · own length)   Shao et al. 2024, eq. 3 (DeepSeekMath)
    dr_grpo     token        [1-ε, 1+ε]          1 / (episodes · max length)   Liu et al. 2025, §3.2 (also drops the std)
    dapo        token        [1-ε, 1+ε_high]     1 / all tokens                Yu et al. 2025, eq. 8
    gspo        sequence     [1-ε, 1+ε], tiny    1 / (episodes · own length)   Zheng et al. 2025, eq. 5
    cispo       token, held  ratio <= 1+ε_high   1 / all tokens                MiniMax-M1 2025, eq. 4

The ratio is one token's or, in gspo, one for the whole episode ("sequence"); "held" means that it counts as a constant and gets no gradient.
Weights are worked out once over the whole batch, so cutting it into micro-batches cannot change the gradient.

Samples can come from another policy than the one that is trained: an older one (--async-rollouts), or the same weights computed in another way
(vLLM in bfloat16). `--importance` says what is done about it. On-policy, where every ratio is 1, all four are the same:

    clip        the loss's own ratio is to the sampler, and its clip cuts off what is too far away          Schulman et al. 2017, eq. 7
    none        look away: the samples count as the policy's own; the loss's ratio is to the policy at the start of the update
    token       as none, but each token weighs min(π/π_sampler, C): truncated importance sampling           Espeholt et al. 2018, §4.1
    sequence    as token, with the ratio of the whole episode: unbiased up to the cap, and far noisier

π is the policy at the start of the update, so the weight is a constant and the clip still bounds the *step* ("decoupled", Hilton et al. 2022, §3).
On samples that were 8 updates old, `none` and `token` fell to 0 within 30 updates, `clip` and `sequence` learnt (results/offpolicy). What
seems to break the first two, in which the format of the replies falls apart first: replies in a habit that the policy has left still have a
negative advantage, and their last tokens are those of every good reply (`</think>`, `<answer>`). Token by token these are as likely as
ever, so `token` pushes them down at full weight; the reply as a whole is not likely any more, and that only `sequence` sees. Where nothing is
stale and only rounding differs, the ratio of 2,000 tokens is mostly noise, so `token` is the default there (not measured by us).

Run me: `python grpo.py` works the example through, number by number.
"""

import math
from dataclasses import dataclass

import torch

from fast import parallel
from fast.logprobs import token_logprobs
from policy import Policy
from rollout import Episode

# loss name: (ε, ε_high), each paper's own; cispo's ε of 1 leaves the ratio without a lower bound
CLIP = {
    "reinforce": (0.0, 0.0),
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 0.28),
}
IMPORTANCE = ("clip", "none", "token", "sequence")
CAP = 2.0  # C above. Too small is a bias towards the sampler, too large is noise; not tuned here


@dataclass
class Batch:
    """Episodes as tensors, right-padded, in the order given. Row n, position t is about token t+1 (the shift)."""

    ids: torch.Tensor  # [N, T] int64
    mask: torch.Tensor  # [N, T-1] bool, True where token t+1 was sampled
    old_logprobs: torch.Tensor  # [N, T-1] float32, as sampled
    advantages: torch.Tensor  # [N] float32
    weights: torch.Tensor  # [N] float32: what each of its tokens weighs in the loss, over the *whole* batch


def group_advantages(rewards: torch.Tensor, baseline: str = "group", normalize: bool = True) -> torch.Tensor:
    """rewards [G, k] (NaN: episode in error) -> advantages [G, k]; NaN gives 0.

    baseline "group": minus the group's mean (Shao et al. 2024, §4.1.2); "batch": minus the mean of all; "none".
    normalize: divided by the standard deviation over the same set (group or batch; not with "none").
    """
    rewards = rewards.double()
    valid = ~rewards.isnan()
    dim = 1 if baseline == "group" else (0, 1)
    n = valid.sum(dim, keepdim=True).clamp(min=1)
    mean = rewards.nan_to_num(0).sum(dim, keepdim=True) / n
    centered = torch.where(valid, rewards - (0.0 if baseline == "none" else mean), 0.0)
    if normalize and baseline != "none":  # without a baseline there is no spread to measure against
        spread = (torch.where(valid, rewards - mean, 0.0) ** 2).sum(dim, keepdim=True) / n
        centered = centered / (spread.sqrt() + 1e-6)
    centered = torch.where(centered.abs() < 1e-9, 0.0, centered)  # 0.1 - mean([0.1] * 3) is not quite 0
    return centered.float()


def token_weights(loss: str, lengths: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """What each token of an episode weighs, [N] float32; lengths [N] are the sampled tokens of each episode. Σ weight · length <= 1."""
    if loss in ("grpo", "gspo"):
        return 1.0 / (len(lengths) * lengths.clamp(min=1))
    if loss == "dr_grpo":
        return torch.full_like(lengths, 1.0 / (len(lengths) * max_tokens), dtype=torch.float32)
    return torch.full_like(lengths, 1.0 / max(1, int(lengths.sum())), dtype=torch.float32)


def collate(episodes: list[Episode], advantages: torch.Tensor, weights: torch.Tensor, pad: int, device) -> Batch:
    """Episodes -> Batch; advantages [N], weights [N]. Padding, with the token `pad`, is on the right and never in the mask."""
    N, T = len(episodes), max(len(e.token_ids) for e in episodes)
    ids = torch.full((N, T), pad)
    mask = torch.zeros((N, T - 1), dtype=torch.bool)
    old = torch.zeros((N, T - 1))
    for n, e in enumerate(episodes):
        length = len(e.token_ids)
        assert len(e.sampled) == len(e.logprobs) == length and not e.sampled[0]
        ids[n, :length] = torch.tensor(e.token_ids)
        mask[n, : length - 1] = torch.tensor(e.sampled[1:])
        old[n, : length - 1] = torch.tensor(e.logprobs[1:])
    return Batch(ids.to(device), mask.to(device), old.to(device), advantages.to(device), weights.to(device))


def policy_loss(
    loss: str, logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, row: torch.Tensor,
    eps: float, eps_high: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Loss of each sampled token, before weighing.

    All tensors are [M], one entry a sampled token: its log-prob now and when sampled, the advantage of its episode, and
    which episode it belongs to (row, int64). The ratio may lie in [1 - eps, 1 + eps_high] (CLIP).
    Returns (loss [M], ratio [M], clipped [M] bool); minimise Σ weight · loss.
    """
    log_ratio = logprobs - old_logprobs  # [M]
    if loss == "gspo":  # one ratio an episode: the geometric mean over its tokens, with the gradient of each (eq. 5)
        n = torch.zeros(int(row.max()) + 1, device=row.device).index_add(0, row, torch.ones_like(log_ratio))
        mean = torch.zeros_like(n).index_add(0, row, log_ratio) / n.clamp(min=1)  # [rows]
        log_ratio = mean[row]
    ratio = log_ratio.exp()
    if loss == "reinforce":
        return -advantages * logprobs, ratio.detach(), torch.zeros_like(row, dtype=torch.bool)
    if loss == "cispo":  # the clipped ratio is a constant weight: clipped tokens keep their gradient
        held = ratio.detach().clamp(1 - eps, 1 + eps_high)
        return -held * advantages * logprobs, ratio.detach(), held != ratio.detach()
    surrogate = ratio * advantages
    clipped = ratio.clamp(1 - eps, 1 + eps_high) * advantages
    return -torch.minimum(surrogate, clipped), ratio.detach(), clipped < surrogate  # pessimistic: PPO, eq. 7


def importance_weights(level: str, log_ratio: torch.Tensor, row: torch.Tensor, cap: float = CAP) -> torch.Tensor:
    """min(π / π_sampler, cap) of each sampled token, [M]; log_ratio [M] is log π - log π_sampler, row [M] says whose token it is.

    level "token" takes the ratio of the token, "sequence" that of its whole episode (Espeholt et al. 2018, §4.1; the table above). "clip" and
    "none" weigh nothing: every token counts 1.
    """
    if level in ("clip", "none"):
        return torch.ones_like(log_ratio)
    if level == "sequence":  # the product over an episode's tokens, all its turns together
        total = log_ratio.new_zeros(int(row.max()) + 1).index_add(0, row, log_ratio)  # [rows]
        log_ratio = total[row]
    return log_ratio.clamp(max=math.log(cap)).exp()  # clamped before exp: a long episode's ratio overflows


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy || reference), in nats, at each token that the policy sampled: log-probs [M], [M] -> [M].

    r - log r - 1 with r = p_reference / p: of low variance and never negative (Schulman 2020, "Approximating KL divergence").
    """
    return (reference - logprobs).exp() - (reference - logprobs) - 1


def micro_batches(episodes: list[Episode], max_tokens: int) -> list[list[int]]:
    """Indices of episodes, cut so that rows · longest <= max_tokens (a single episode may be longer).

    Members of a group stay together: they share their prompt (logprobs.hidden_states), and answers to one task are alike in length, so
    there is little padding.
    """
    lengths, longest = [len(e.token_ids) for e in episodes], {}
    for e in episodes:
        longest[e.group] = max(longest.get(e.group, 0), len(e.token_ids))
    batches, current, width = [], [], 0
    for n in sorted(range(len(episodes)), key=lambda n: (longest[episodes[n].group], episodes[n].group, lengths[n])):
        width = max(width, lengths[n])
        if current and (len(current) + 1) * width > max_tokens:
            batches.append(current)
            current, width = [], lengths[n]
        current.append(n)
    return batches + [current] if current else batches


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    groups: list[list[Episode]],
    *,
    loss: str,
    baseline: str,
    normalize: bool,
    temperature: float,
    max_tokens: int,
    micro_tokens: int,
    epochs: int = 1,
    kl: float = 0.0,
    reference: dict[str, torch.Tensor] | None = None,
    max_grad_norm: float = 1.0,
    importance: str = "clip",
    version: int = 0,
    max_off_policy: int | None = None,
) -> dict[str, float]:
    """Train on one batch of groups [G][k], `epochs` optimizer steps; returns what to log, the columns of metrics.jsonl below.

    loss is a name in CLIP, importance one of IMPORTANCE; baseline and normalize are those of group_advantages. temperature: the one of the
    sampling. max_tokens: the longest reply of a turn (dr_grpo's weights need it). micro_tokens: padded tokens a forward pass.
    kl: weight of the KL to the policy whose trainable weights are in `reference`, {name: weight}. version: how many updates the policy has
    seen; episodes that a policy more than max_off_policy updates older has sampled are dropped.
    Raises FloatingPointError if loss or gradient is not finite, before the optimizer step that would have used them.

        groups_with_signal, advantage_abs   share of groups whose rewards differ; mean |advantage| of an episode
        trained_tokens, dropped             tokens in all epochs; episodes that were too old
        off_policy_steps                    age of the samples, in updates (mean)
        loss, grad_norm                     of the last step; the norm before it was clipped to max_grad_norm
        ratio, ratio_max, clip_fraction     of the loss's importance ratio: mean and largest; share of the tokens that are clipped
        entropy, mismatch                   nats a token, before the first step: entropy; mean |log-prob now - when sampled|
        rounding, twice                     nats: the mismatch that rounding explains; where it is larger, how far two equal passes differ
        approx_kl, kl_ref                   nats a token: k3 of KL(sampler || policy); with kl, of KL(policy || reference)
        importance, capped                  mean importance weight; share of the tokens whose weight is CAP
        stop_trained, stretch               what doctor.stop_token and doctor.sequence_ratio look at
    """
    episodes = [e for group in groups for e in group]
    age = torch.tensor([version - e.policy_version for e in episodes])  # [N], in updates
    fresh = torch.ones_like(age, dtype=torch.bool) if max_off_policy is None else age <= max_off_policy
    good = torch.tensor([e.stop_reason != "error" for e in episodes]) & fresh
    rewards = torch.tensor([e.reward for e in episodes]).masked_fill(~good, float("nan"))  # [N]
    advantages = group_advantages(rewards.view(len(groups), -1), baseline, normalize)  # [G, k]
    flat = advantages.flatten()  # [N]
    lengths = torch.tensor([e.reply_tokens for e in episodes]).float()
    weights = torch.zeros(len(episodes))
    if good.any():
        weights[good] = token_weights(loss, lengths[good], max_tokens)
    # Advantage 0 means gradient 0, so those episodes need no forward pass. They stay in the denominators: skipping
    # saves time and changes nothing. (With a KL term they have a gradient, and are kept.)
    keep = [n for n in range(len(episodes)) if good[n] and (kl > 0 or flat[n] != 0)]
    device, pad = policy.device, policy.tokenizer.pad_token_id
    stats = batch_columns(advantages, good, age, fresh, int(lengths[keep].sum()) * epochs, device)
    if not keep:
        return {**stats, "loss": 0.0, "grad_norm": 0.0}
    keep = parallel.share(sorted(keep, key=lambda n: len(episodes[n].token_ids)))  # where several processes train: this one's
    plan = [[keep[n] for n in part] for part in micro_batches([episodes[n] for n in keep], micro_tokens)]
    start: list[torch.Tensor] = []  # log-probs at the start of the update, [M] a micro-batch
    for epoch in range(epochs):
        optimizer.zero_grad(set_to_none=True)
        sums, ratio_max = dict.fromkeys(SUMS, 0.0), 0.0
        for i, chosen in enumerate(plan):
            part = [episodes[n] for n in chosen]
            batch = collate(part, flat[chosen], weights[chosen], pad, device)
            row = torch.nonzero(batch.mask)[:, 0]  # [M] which episode each sampled token belongs to
            sampled = batch.old_logprobs[batch.mask]  # [M]
            logprobs, entropy = token_logprobs(policy, batch.ids, batch.mask, temperature)  # [M], [M]
            if epoch == 0:
                start.append(logprobs.detach())
            old = sampled if importance == "clip" else start[i]  # [M] what the loss's ratio is to
            factor = importance_weights(importance, start[i] - sampled, row)  # [M]
            weight = batch.weights[row] * factor  # [M]
            each, ratio, clipped = policy_loss(loss, logprobs, old, batch.advantages[row], row, *CLIP[loss])
            total = (weight * each).sum()
            away = torch.zeros_like(sampled)  # [M] from the reference
            if kl > 0:
                with torch.no_grad(), swapped(policy, reference):
                    ref = token_logprobs(policy, batch.ids, batch.mask, temperature)[0]
                away = k3(logprobs, ref)
                total = total + kl * (weight * away).sum()
            total.backward()
            tally(sums, part, batch, total, logprobs, old, entropy, ratio, clipped, factor, away)
            ratio_max = max(ratio_max, ratio.max().item())
            if epoch == i == 0 and not age.any():
                stats |= second_look(policy, batch, logprobs, temperature, stats["rounding"])
        sums = parallel.sum_numbers(sums)
        grad_norm = take_step(policy, optimizer, sums["loss"], max_grad_norm)
        if epoch == 0:  # before the first step, ratio != 1 can only be sampler against trainer
            stats |= {name: sums[name] / sums["tokens"] for name in ("entropy", "mismatch")}
    return {**columns(sums, stats, kl, importance), "grad_norm": grad_norm, "ratio_max": max(parallel.gather([ratio_max]))}


def take_step(policy: Policy, optimizer: torch.optim.Optimizer, loss: float, max_grad_norm: float, what: str = "loss") -> float:
    """One optimizer step along the sum of all processes' gradients; returns its norm before it was clipped to max_grad_norm.

    loss: that of all processes, named `what` in the FloatingPointError that is raised, before the step, if it or the norm is not finite.
    """
    parameters = list(policy.trainable().values())
    parallel.sum_gradients(parameters)
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm).item()
    if not torch.isfinite(torch.tensor([loss, grad_norm])).all():
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(f"{what} {loss} and gradient norm {grad_norm} are not both finite")
    optimizer.step()
    return grad_norm


class swapped:
    """`with swapped(policy, weights):` computes with other trainable weights, such as the reference's."""

    def __init__(self, policy: Policy, weights: dict[str, torch.Tensor]):
        self.parameters, self.weights = policy.trainable(), weights

    def __enter__(self):
        self.mine = {name: p.data for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            p.data = self.weights[name]

    def __exit__(self, *_):
        for name, p in self.parameters.items():
            p.data = self.mine[name]


# ------------------------------------------------------------------------------------------------ what is logged: nothing here moves a weight

MEANS = ("entropy", "ratio", "clip_fraction", "approx_kl", "mismatch", "kl_ref", "importance", "capped")
# All of them are there from the start: a process that had nothing to train on has to add its zeros (parallel.sum_numbers).
SUMS = ("loss", "tokens", *MEANS, "log_ratio", "moved", "ended", "stops")


def batch_columns(advantages: torch.Tensor, good: torch.Tensor, age: torch.Tensor, fresh: torch.Tensor, trained: int, device) -> dict:
    """The columns that are known before the first pass; advantages [G, k], of each episode [N]: does it count, its age, is it new enough."""
    return {
        "groups_with_signal": float((advantages != 0).any(1).float().mean()),
        "advantage_abs": float(advantages.flatten()[good].abs().mean()) if good.any() else 0.0,
        "trained_tokens": trained,
        "off_policy_steps": float(age[good].float().mean()) if good.any() else 0.0,
        "dropped": int((~fresh).sum()),
        # What of `mismatch` number formats explain: float32 on a CPU, elsewhere bfloat16 and perhaps another engine.
        "rounding": 1e-3 if device.type == "cpu" else 0.03,
    }


def tally(
    sums: dict[str, float], episodes: list[Episode], batch: Batch, total: torch.Tensor, logprobs: torch.Tensor, old: torch.Tensor,
    entropy: torch.Tensor, ratio: torch.Tensor, clipped: torch.Tensor, factor: torch.Tensor, away: torch.Tensor,
) -> None:  # fmt: skip
    """Add a micro-batch to the sums of its epoch. total is its loss; all that follow are [M], with the names that they have in `update`."""
    sampled, logprobs = batch.old_logprobs[batch.mask], logprobs.detach()
    each = {
        "entropy": entropy, "ratio": ratio, "clip_fraction": clipped.float(), "mismatch": (logprobs - sampled).abs(), "kl_ref": away.detach(),
        "approx_kl": k3(sampled, logprobs),  # how far it has moved: KL(sampler || policy)
        "importance": factor, "capped": (factor >= CAP * (1 - 1e-6)).float(),
        # What bookkeeping/doctor.py reads off: is the loss's ratio one token's, and is the end-of-turn token learnt?
        "log_ratio": ratio.clamp(min=1e-30).log().abs(), "moved": (logprobs - old).abs(),
    }  # fmt: skip
    for name, values in each.items():
        sums[name] += values.sum().item()
    ends = [(row, len(e.token_ids) - 2) for row, e in enumerate(episodes) if e.stop_reason == "done"]
    sums["stops"] += batch.mask[tuple(zip(*ends))].sum().item() if ends else 0
    sums["ended"] += len(ends)
    sums["tokens"] += len(logprobs)
    sums["loss"] += total.item()


def second_look(policy: Policy, batch: Batch, logprobs: torch.Tensor, temperature: float, rounding: float) -> dict[str, float]:
    """How far two equal passes differ, if the first one's logprobs [M] are not the sampler's; else {}, so it costs a run that is well nothing."""
    with torch.no_grad():
        if (logprobs - batch.old_logprobs[batch.mask]).abs().mean() > rounding:
            again = token_logprobs(policy, batch.ids, batch.mask, temperature)[0]
            return {"twice": (again - logprobs).abs().mean().item()}
    return {}


def columns(sums: dict[str, float], stats: dict[str, float], kl: float, importance: str) -> dict[str, float]:
    """An epoch's sums, and what is known already, as columns: means over tokens (the loss is weighed already), and two quotients for bookkeeping/doctor.py."""
    n, ended = sums["tokens"], sums["ended"]
    moved = sums["moved"] > 1e-4 * n  # else stretch would be one rounding over another
    unasked = ("kl_ref",) * (kl == 0) + ("importance", "capped") * (importance in ("clip", "none"))
    means = {name: sums[name] / n for name in MEANS if name not in unasked}
    stops = {"stop_trained": sums["stops"] / ended} if ended else {}
    return {"loss": sums["loss"], **means, **stats, **stops, "stretch": sums["log_ratio"] / sums["moved"] if moved else 1.0}


if __name__ == "__main__":
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    print("rewards of one group        ", rewards.tolist()[0])
    plain = group_advantages(rewards, normalize=False)[0]
    print("minus the mean              ", plain.tolist())
    advantages = group_advantages(rewards)[0]
    print("divided by the std          ", [round(a, 3) for a in advantages.tolist()])
    print("all the same, nothing to say", group_advantages(torch.ones(1, 4))[0].tolist())
    assert plain.tolist() == [0.5, -0.5, -0.5, 0.5] and (advantages.abs() - 1).abs().max() < 1e-4

    row = torch.arange(4)  # one token an answer
    old = torch.full((4,), 0.25).log()
    weight = token_weights("grpo", torch.ones(4), 1)
    for title, now in (("on-policy: the policy is still the one that sampled", [0.25] * 4),
                       ("after a step: it has moved", [0.36, 0.30, 0.19, 0.28])):  # fmt: skip
        print(f"\n{title}")
        for loss, (eps, eps_high) in CLIP.items():
            logprobs = torch.tensor(now).log().requires_grad_()
            each, ratio, clipped = policy_loss(loss, logprobs, old, advantages, row, eps, eps_high)
            total = (weight * each).sum()
            total.backward()
            print(f"  {loss:10} ratio {[f'{r:.2f}' for r in ratio.tolist()]} clipped {clipped.int().tolist()}  loss {total.item():+.3f}"
                  f"  gradient {[f'{g:+.2f}' for g in logprobs.grad.tolist()]}")  # fmt: skip
            if now[0] == 0.25 and loss != "reinforce":
                assert abs(total.item()) < 1e-6 and logprobs.grad.norm() > 0.4  # a loss of 0 that teaches
