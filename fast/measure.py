"""What an update says about itself, measured in the same pass; and samples of an older policy.

    log = UpdateLog(policy, groups, advantages, chosen, cfg, score)
    log.add(batch, out, loss)     after every micro-batch: sums over its tokens
    log.end_epoch()               after each optimizer step's passes: of all processes
    log.columns()                 at the end: means per token, the columns of metrics.jsonl

The columns, means over tokens unless said otherwise:

    groups_with_signal, advantage_abs   share of groups whose rewards differ; mean |advantage|
    trained_tokens                      tokens in all epochs
    off_policy_steps                    age of the samples, in updates
    lr, loss, grad_norm                 of the last step; the norm before clipping
    ratio, ratio_max, clip_fraction     the loss's importance ratio; share that is clipped
    entropy, mismatch                   nats, before the first step: entropy; |log-prob now -
                                        when sampled|
    rounding, twice                     nats: the mismatch that rounding explains; only where
                                        mismatch is larger: how far two equal passes differ
    approx_kl, kl_ref                   nats: KL(sampler || policy); with kl, KL(policy ||
                                        reference)
    importance, capped                  importance weight; share of the tokens at the cap
    stop_trained                        share of the ends of turns that are in the loss
    stretch                             change of the loss's log-ratio per change of log-prob: 1,
                                        or more where a reply's ratio counts as a token's

Samples of another policy than the one that is trained come from an older policy
(--async-rollouts), or from the same weights computed in another way (vLLM in bfloat16).
`--importance` says what is done. On-policy, where every ratio is 1, all four are the same:

    clip        the loss's own ratio is to the sampler, and its clip cuts off      Schulman 2017,
                what is too far away                                               eq. 7
    none        ignore it, treat the samples as on-policy: the loss's ratio is
                to the policy at the start of the update
    token       as none, but each token weighs min(π/π_sampler, C): truncated      Espeholt 2018,
                importance sampling                                                §4.1
    sequence    as token, with the ratio of the whole episode: unbiased up to
                the cap, and far noisier

π is the policy at the start of the update, so the weight is a constant and the clip still bounds
the *step* ("decoupled", Hilton et al. 2022, §3).

On samples that were 8 updates old, `none` and `token` fell to 0 within 30 updates; `clip` and
`sequence` learnt (results/offpolicy). What seems to break the first two, in which the format of the
replies falls apart first: replies in a habit that the policy has left still have a negative
advantage, and their last tokens are those of every good reply (`</think>`, `<answer>`). Token by
token these are as likely as ever, so `token` pushes them down at full weight. The reply as a whole
is not likely any more, and only `sequence` sees that. If nothing is stale and only rounding
differs, the ratio of 2,000 tokens is mostly noise, so `token` is the default there (not measured).

Run me: `python -m fast.measure` weighs two replies of three tokens.
"""

import math

import torch

from fast import parallel
from policy import in_bfloat16

IMPORTANCE = ("clip", "none", "token", "sequence")
CAP = 2.0  # C above. Too small is a bias towards the sampler, too large is noise; not tuned here

MEANS = (
    "entropy", "ratio", "clip_fraction", "approx_kl", "mismatch", "kl_ref", "importance", "capped"
)  # fmt: skip
COLUMNS = (
    *MEANS, "groups_with_signal", "advantage_abs", "trained_tokens", "off_policy_steps", "lr",
    "loss", "grad_norm", "ratio_max", "rounding", "twice", "stop_trained", "stretch",
)  # fmt: skip
SUMS = ("loss", "tokens", *MEANS, "log_ratio", "moved", "ended", "stops")


def importance_weights(
    level: str, log_ratio: torch.Tensor, row: torch.Tensor, cap: float = CAP
) -> torch.Tensor:
    """min(π / π_sampler, cap) of each sampled token, [M].

    log_ratio [M] is log π - log π_sampler, row [M] says which episode a token belongs to. level
    "token" takes the ratio of the token, "sequence" that of its whole episode (Espeholt et al.
    2018, §4.1). "clip" and "none" weigh nothing: every token counts 1.
    """
    if level in ("clip", "none"):
        return torch.ones_like(log_ratio)
    if level == "sequence":  # the product over an episode's tokens, all its turns together
        total = log_ratio.new_zeros(int(row.max()) + 1).index_add(0, row, log_ratio)  # [rows]
        log_ratio = total[row]
    return log_ratio.clamp(max=math.log(cap)).exp()  # before exp: a long episode's would overflow


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy || reference), in nats, at each token that the policy sampled.

    log-probs [M], [M] -> [M]: r - log r - 1 with r = p_reference / p, of low variance and never
    negative (Schulman 2020, "Approximating KL divergence").
    """
    return (reference - logprobs).exp() - (reference - logprobs) - 1


class UpdateLog:
    """Sums over the tokens of an epoch; one optimizer step is one epoch."""

    def __init__(self, policy, groups: list[list], advantages, chosen: list, cfg, score):
        """advantages [G][k]: a number, or a tensor with one per sampled token; chosen: what is
        trained on, (episode, …) each; cfg: a settings.Config; score: grpo's forward pass."""
        self.policy, self.cfg, self.score = policy, cfg, score
        # What of `mismatch` number formats explain: bfloat16 on a card, elsewhere float32.
        self.rounding = 0.03 if in_bfloat16(policy.device) else 1e-3
        self.found = signal_columns(groups, advantages) | {
            "trained_tokens": sum(e.reply_tokens for e, *_ in chosen) * cfg.epochs,
            "rounding": self.rounding,
        }
        self.fresh = not any(e.age for group in groups for e in group)
        self.first_pass = True  # … of the update
        # All sums exist from the start: a process without episodes has to add its zeros.
        self.sums, self.ratio_max = dict.fromkeys(SUMS, 0.0), 0.0
        self.last: dict[str, float] = {}  # the sums of the epoch before

    def add(self, batch, out, loss: torch.Tensor) -> None:
        """Add a micro-batch: what the policy said of it (grpo.Output), and its loss."""
        logprobs, old = out.logprobs.detach(), batch.proximal
        ratio = (logprobs - old).exp() if out.ratio is None else out.ratio  # a loss of yours
        nothing = torch.zeros_like(logprobs)
        of_token = {
            "entropy": out.entropy.detach(),
            "ratio": ratio,
            "clip_fraction": nothing if out.clipped is None else out.clipped.float(),
            "mismatch": (logprobs - batch.behaviour).abs(),
            "approx_kl": k3(batch.behaviour, logprobs),  # KL(sampler || policy): how far it moved
            "kl_ref": nothing if out.kl is None else out.kl.detach(),
            "importance": batch.importance,
            "capped": (batch.importance >= CAP * (1 - 1e-6)).float(),
            # For doctor.py: is the loss's ratio one token's, is the end-of-turn token trained?
            "log_ratio": ratio.clamp(min=1e-30).log().abs(),
            "moved": (logprobs - old).abs(),
        }
        for name, values in of_token.items():
            self.sums[name] += values.sum().item()
        for n, e in enumerate(batch.episodes):
            if e.stop_reason == "done":
                self.sums["stops"] += batch.mask[n, len(e.token_ids) - 2].item()
                self.sums["ended"] += 1
        self.sums["tokens"] += len(logprobs)
        self.sums["loss"] += loss.item()
        self.ratio_max = max(self.ratio_max, ratio.max().item())
        if self.first_pass and self.fresh:
            self.second_look(batch, logprobs)
        self.first_pass = False

    @torch.no_grad()
    def second_look(self, batch, logprobs: torch.Tensor) -> None:
        """If log-probs [M] are not those of the sampler: how far do two equal passes differ?

        It costs a healthy run nothing.
        """
        if (logprobs - batch.behaviour).abs().mean() > self.rounding:
            again = self.score(self.policy, batch, self.cfg).logprobs
            self.found["twice"] = (again - logprobs).abs().mean().item()

    def end_epoch(self) -> float:
        """Add up all processes' sums; returns the loss."""
        self.last = parallel.sum_numbers(self.sums)
        self.largest = max(parallel.gather([self.ratio_max]))
        self.sums, self.ratio_max = dict.fromkeys(SUMS, 0.0), 0.0
        # Before the first step a ratio other than 1 can only be the sampler against the trainer.
        if "mismatch" not in self.found:
            for name in ("entropy", "mismatch"):
                self.found[name] = self.last[name] / self.last["tokens"]
        return self.last["loss"]

    def columns(self) -> dict[str, float]:
        """Means per token of the last epoch, and two quotients for doctor.py."""
        if not self.last:
            return self.found | {"loss": 0.0}
        sums, n = self.last, self.last["tokens"]
        means = {name: sums[name] / n for name in MEANS}
        if self.cfg.kl == 0:
            del means["kl_ref"]
        if self.cfg.importance in ("clip", "none"):
            del means["importance"], means["capped"]
        moved = sums["moved"] > 1e-4 * n  # else stretch would be one rounding over another
        stops = {"stop_trained": sums["stops"] / sums["ended"]} if sums["ended"] else {}
        stretch = sums["log_ratio"] / sums["moved"] if moved else 1.0
        whole = {"loss": sums["loss"], "stretch": stretch, "ratio_max": self.largest}
        return means | self.found | stops | whole


def signal_columns(groups: list[list], advantages) -> dict[str, float]:
    """The columns that are known before the first pass; advantages [G][k] as in UpdateLog."""
    size = lambda advantage: float(torch.as_tensor(advantage).abs().mean())
    sizes = [[size(a) for a in row] for row in advantages]
    trained = [
        (e, a)
        for group, row in zip(groups, sizes)
        for e, a in zip(group, row)
        if e.stop_reason != "error"
    ]
    n = max(1, len(trained))
    return {
        "groups_with_signal": sum(any(row) for row in sizes) / len(sizes),
        "advantage_abs": sum(a for _, a in trained) / n,
        "off_policy_steps": sum(e.age for e, _ in trained) / n,
    }


if __name__ == "__main__":
    row = torch.tensor([0, 0, 0, 1, 1, 1])
    log_ratio = torch.tensor([0.1, -0.2, 0.3, -1.0, -1.0, 0.0])
    for level in IMPORTANCE:
        weights = importance_weights(level, log_ratio, row)
        print(f"{level:9}", [f"{w:.2f}" for w in weights.tolist()])
