"""Samples of another policy than the one that is trained, and what is done about them.

They come from an older policy (--async-rollouts), or from the same weights computed in another way
(vLLM in bfloat16). `--importance` says what is done. On-policy, where every ratio is 1, all four
are the same:

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

Run me: `python -m fast.off_policy` weighs two replies of three tokens.
"""

import math

import torch

IMPORTANCE = ("clip", "none", "token", "sequence")
CAP = 2.0  # C above. Too small is a bias towards the sampler, too large is noise; not tuned here


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


if __name__ == "__main__":
    row = torch.tensor([0, 0, 0, 1, 1, 1])
    log_ratio = torch.tensor([0.1, -0.2, 0.3, -1.0, -1.0, 0.0])
    for level in IMPORTANCE:
        weights = importance_weights(level, log_ratio, row)
        print(f"{level:9}", [f"{w:.2f}" for w in weights.tolist()])
