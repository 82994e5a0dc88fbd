"""What an update says about itself, measured in the same pass. Nothing here moves a weight.

    log = UpdateLog(policy, groups, advantages, chosen, cfg)
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

Run me: `python -m fast.measure` prints what k3 says of a token.
"""

import torch

from fast import parallel
from fast.logprobs import token_logprobs
from fast.off_policy import CAP
from policy import in_bfloat16, plain_logprobs

MEANS = (
    "entropy", "ratio", "clip_fraction", "approx_kl", "mismatch", "kl_ref", "importance", "capped"
)  # fmt: skip
COLUMNS = (
    *MEANS, "groups_with_signal", "advantage_abs", "trained_tokens", "off_policy_steps", "lr",
    "loss", "grad_norm", "ratio_max", "rounding", "twice", "stop_trained", "stretch",
)  # fmt: skip
SUMS = ("loss", "tokens", *MEANS, "log_ratio", "moved", "ended", "stops")


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy || reference), in nats, at each token that the policy sampled.

    log-probs [M], [M] -> [M]: r - log r - 1 with r = p_reference / p, of low variance and never
    negative (Schulman 2020, "Approximating KL divergence").
    """
    return (reference - logprobs).exp() - (reference - logprobs) - 1


class UpdateLog:
    """Sums over the tokens of an epoch; one optimizer step is one epoch."""

    def __init__(self, policy, groups: list[list], advantages, chosen: list, cfg):
        """advantages [G][k]: a number, or a tensor with one per sampled token; chosen: what is
        trained on, (episode, …) each; cfg: a settings.Config."""
        self.policy, self.cfg = policy, cfg
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
            logprobs_of = plain_logprobs if self.cfg.plain else token_logprobs
            again, _ = logprobs_of(self.policy, batch.ids, batch.mask, self.cfg.temperature)
            self.found["twice"] = (again - logprobs).abs().mean().item()

    def end_epoch(self) -> float:
        """Add up all processes' sums; returns the loss."""
        self.last = parallel.sum_numbers(self.sums)
        self.largest = max(parallel.gather([self.ratio_max]))
        self.sums, self.ratio_max = dict.fromkeys(SUMS, 0.0), 0.0
        if "mismatch" not in self.found:  # before the first step a ratio other than 1 can only
            #                               be the sampler against the trainer
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
    print(
        "k3 of a token that became 10% likelier:", k3(torch.tensor(0.0), torch.tensor(0.1)).item()
    )
