"""What an update's log says: the columns of metrics.jsonl, from what grpo.update found.

Means over tokens unless said otherwise:

    groups_with_signal, advantage_abs   share of groups that have an advantage; mean |advantage|
    trained_tokens                      tokens trained on, in all epochs
    off_policy_steps                    age of the samples, in updates
    batches_dropped, batches_waiting    with max_staleness: before this batch, as too old; behind
                                        it, the one that is being sampled included
    loss, grad_norm                     of the last step; the norm before clipping
    ratio, ratio_max, clip_fraction     the loss's importance ratio; share of tokens on which the
                                        clip acts
    entropy, mismatch                   nats, before the first step: entropy; |log-prob now -
                                        when sampled|
    rounding, twice                     nats: the mismatch that rounding explains; only if
                                        mismatch is larger: how far two equal passes differ
    approx_kl, kl_ref                   nats: KL(sampler || policy); with kl, KL(policy ||
                                        reference)
    importance, capped, masked          importance weight; share of the tokens at the cap, and of
                                        those that a mask leaves out
    stop_trained                        share of the end-of-turn tokens that are in the loss
    welfare_5, toxicity_50, …           swarm: the quantile of 5%, 50%, 95% over the episodes
    stretch                             change of the loss's log-ratio per change of log-prob: 1,
                                        or more if each token counts with its reply's ratio
"""

import numpy as np
import torch

from batch import BANDS, CAP, CAPPED, Batch
from bookkeeping.tables import QUANTILES, SPREAD
from fast import parallel
from grpo import UpdateResult, k3
from policy import Backend, Policy

# Means over tokens: of an update's last epoch, or of its first (before the first step, a mismatch
# means that sampler and trainer disagree).
OF_LAST = ("ratio", "clip_fraction", "approx_kl", "kl_ref", "importance", "capped", "masked")
OF_FIRST = ("entropy", "mismatch")
COLUMNS = (
    *OF_LAST,
    *OF_FIRST,
    "groups_with_signal",
    "advantage_abs",
    "trained_tokens",
    "off_policy_steps",
    "batches_dropped",
    "batches_waiting",
    "lr",
    "loss",
    "grad_norm",
    "ratio_max",
    "rounding",
    "twice",
    "stop_trained",
    "stretch",
    *sum(SPREAD.values(), []),
)
SUMS = (*OF_LAST, *OF_FIRST, "tokens", "log_ratio", "moved", "ended", "stops")


def log_columns(
    result: UpdateResult, groups: list[list], policy: Policy, cfg, backend: Backend
) -> dict:
    """A line about one update on these groups [G][k]. Call it while the policy still learns."""
    scored = [e for group in groups for e in group if e.stop_reason != "error"]
    n = max(1, len(scored))
    size = lambda e: sum(map(abs, e.advantages)) / max(1, len(e.advantages))
    line = {
        "groups_with_signal": sum(any(map(size, group)) for group in groups) / len(groups),
        "advantage_abs": sum(map(size, scored)) / n,
        "off_policy_steps": sum(e.age for e in scored) / n,
        "trained_tokens": 0,
        # How much of `mismatch` the number format explains.
        "rounding": 0.03 if policy.bfloat16 else 1e-3,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
    }
    for name, columns in SPREAD.items():
        # An episode without a deal has no toxicity.
        values = [e.components[name] for e in scored if name in e.components]
        if values:
            line |= zip(columns, np.quantile(values, QUANTILES).tolist())
    if not result.epochs:
        return line
    first, last = (sums(result.epochs[i]) for i in (0, -1))
    tokens = last["tokens"]
    known = {
        "kl_ref": cfg.kl > 0,
        "importance": cfg.importance in {*CAPPED, *BANDS},
        "capped": cfg.importance in CAPPED,
        "masked": cfg.importance in BANDS,
    }
    line |= {name: last[name] / tokens for name in OF_LAST if known.get(name, True)}
    line |= {name: first[name] / tokens for name in OF_FIRST}
    if last["ended"]:
        line["stop_trained"] = last["stops"] / last["ended"]
    line["trained_tokens"] = int(tokens) * cfg.epochs
    moved = last["moved"] > 1e-4 * tokens  # else stretch would be a quotient of rounding errors
    line["stretch"] = last["log_ratio"] / last["moved"] if moved else 1.0
    ratios = (found["ratio"].max().item() for _, found in result.epochs[-1])
    line["ratio_max"] = max(parallel.gather([max(ratios, default=0.0)]))
    stale = any(e.age for group in groups for e in group)
    if line["mismatch"] > line["rounding"] and not stale:
        line["twice"] = two_passes(policy, result.epochs[0], cfg, backend)
    return line


def sums(epoch: list[tuple[Batch, dict]]) -> dict[str, float]:
    """Sums over the tokens of an epoch, in all processes."""
    total = dict.fromkeys(SUMS, 0.0)  # a process without episodes has to add zeros
    for batch, found in epoch:
        logprobs, ratio = found["logprobs"], found["ratio"]  # [M] each
        of_token = {
            "entropy": found["entropy"],
            "ratio": ratio,
            "clip_fraction": found["clipped"].float(),
            "mismatch": (logprobs - batch.sampler_logprobs).abs(),
            # KL(sampler || policy): how far it moved
            "approx_kl": k3(batch.sampler_logprobs, logprobs),
            "kl_ref": found["kl"],
            "importance": batch.importance,
            "capped": (batch.importance >= CAP * (1 - 1e-6)).float(),
            "masked": (batch.importance == 0).float(),
            # For doctor.py: is the loss's ratio per token?
            "log_ratio": ratio.clamp(min=1e-30).log().abs(),
            "moved": (logprobs - batch.old_logprobs).abs(),
        }
        # Also for doctor.py: is the end-of-turn token trained on?
        done = [(n, e) for n, e in enumerate(batch.episodes) if e.stop_reason == "done"]
        stops = sum(batch.mask[n, len(e.token_ids) - 2].item() for n, e in done)
        counts = {"tokens": len(logprobs), "ended": len(done), "stops": stops}
        found = {name: values.sum().item() for name, values in of_token.items()} | counts
        total = {name: total[name] + found[name] for name in SUMS}
    parts = parallel.gather([total])
    return {name: sum(part[name] for part in parts) for name in SUMS}


@torch.no_grad()
def two_passes(policy: Policy, epoch: list[tuple[Batch, dict]], cfg, backend: Backend) -> float:
    """How far two passes over the same tokens differ, in nats: more than 0 with dropout."""
    gap = 0.0
    for batch, _ in epoch[:1]:
        again = lambda: backend.forward(policy, batch.ids, batch.mask, cfg.temperature, False)  # noqa: B023
        gap = (again().logprobs - again().logprobs).abs().mean().item()
    return max(parallel.gather([gap]))
