"""What an update says about itself, measured in the same pass; and samples of an older policy.

    log = UpdateLog(device)
    log.add(...)              after every micro-batch: sums over its tokens
    log.columns(...)          at the end: means per token, the columns of metrics.jsonl

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

    def __init__(self, device):
        # What of `mismatch` number formats explain: bfloat16 on a card, elsewhere float32.
        self.rounding = 0.03 if in_bfloat16(device) else 1e-3
        self.first: dict[str, float] = {}  # measured before the first step
        self.start_epoch()

    def start_epoch(self) -> None:
        # All sums exist from the start: a process without episodes has to add its zeros.
        self.sums, self.ratio_max = dict.fromkeys(SUMS, 0.0), 0.0

    def add(self, loss: torch.Tensor, batch, episodes: list, **of_token: torch.Tensor) -> None:
        """Add a micro-batch: its loss, its episodes, and of each sampled token [M] logprobs,
        old, entropy, ratio, clipped, importance, kl_ref."""
        t = of_token
        sampled, logprobs = batch.old_logprobs[batch.mask], t["logprobs"].detach()
        of_token = {
            "entropy": t["entropy"].detach(),
            "ratio": t["ratio"],
            "clip_fraction": t["clipped"].float(),
            "mismatch": (logprobs - sampled).abs(),
            "approx_kl": k3(sampled, logprobs),  # KL(sampler || policy): how far it has moved
            "kl_ref": t["kl_ref"].detach(),
            "importance": t["importance"],
            "capped": (t["importance"] >= CAP * (1 - 1e-6)).float(),
            # For doctor.py: is the loss's ratio one token's, is the end-of-turn token trained?
            "log_ratio": t["ratio"].clamp(min=1e-30).log().abs(),
            "moved": (logprobs - t["old"]).abs(),
        }
        for name, values in of_token.items():
            self.sums[name] += values.sum().item()
        done = [
            (n, len(e.token_ids) - 2) for n, e in enumerate(episodes) if e.stop_reason == "done"
        ]
        self.sums["stops"] += batch.mask[tuple(zip(*done))].sum().item() if done else 0
        self.sums["ended"] += len(done)
        self.sums["tokens"] += len(logprobs)
        self.sums["loss"] += loss.item()
        self.ratio_max = max(self.ratio_max, t["ratio"].max().item())

    def end_epoch(self) -> float:
        """Add up all processes' sums; returns the loss."""
        self.sums = parallel.sum_numbers(self.sums)
        if "mismatch" not in self.first:  # before the first step a ratio other than 1 can only
            #                               be the sampler against the trainer
            tokens = self.sums["tokens"]
            self.first |= {n: self.sums[n] / tokens for n in ("entropy", "mismatch")}
        return self.sums["loss"]

    def columns(self, kl: float, importance: str) -> dict[str, float]:
        """Means per token of the last epoch, and two quotients for doctor.py."""
        sums, n = self.sums, self.sums["tokens"]
        means = {name: sums[name] / n for name in MEANS}
        if kl == 0:
            del means["kl_ref"]
        if importance in ("clip", "none"):
            del means["importance"], means["capped"]
        moved = sums["moved"] > 1e-4 * n  # else stretch would be one rounding over another
        stops = {"stop_trained": sums["stops"] / sums["ended"]} if sums["ended"] else {}
        stretch = sums["log_ratio"] / sums["moved"] if moved else 1.0
        largest = max(parallel.gather([self.ratio_max]))
        found = {"loss": sums["loss"], **means, **self.first, **stops, "stretch": stretch}
        return {**found, "ratio_max": largest}


def second_look(logprobs: torch.Tensor, sampled: torch.Tensor, rounding: float, again) -> dict:
    """If log-probs [M] are not those of the sampler: how far do two equal passes differ?

    again() -> the log-probs once more. Else {}, so it costs a healthy run nothing.
    """
    with torch.no_grad():
        if (logprobs - sampled).abs().mean() <= rounding:
            return {}
        return {"twice": (again() - logprobs).abs().mean().item()}


def batch_columns(advantages: torch.Tensor, trains: torch.Tensor, episodes: list) -> dict:
    """The columns that are known before the first pass.

    advantages [G, k]; trains [N] bool: is the episode trained on (no error)?
    """
    trained = [e for e, yes in zip(episodes, trains.tolist()) if yes]
    age = torch.tensor([e.age for e in trained]).float()
    return {
        "groups_with_signal": float((advantages != 0).any(1).float().mean()),
        "advantage_abs": float(advantages.flatten()[trains].abs().mean()) if trained else 0.0,
        "off_policy_steps": float(age.mean()) if trained else 0.0,
    }


if __name__ == "__main__":
    row = torch.tensor([0, 0, 0, 1, 1, 1])
    log_ratio = torch.tensor([0.1, -0.2, 0.3, -1.0, -1.0, 0.0])
    for level in IMPORTANCE:
        weights = importance_weights(level, log_ratio, row)
        print(f"{level:9}", [f"{w:.2f}" for w in weights.tolist()])
