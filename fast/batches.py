"""Episodes as tensors, cut into pieces that fit into memory; and the statistics of an update.

    episodes  ->  cut  ->  collate  ->  ids [N, T], mask [N, T-1], and [M] of each sampled token

How a batch is cut changes memory and time but never the gradient: each token's weight is computed
over the whole batch first (grpo.token_weights).

An update is measured in the same pass:

    log = UpdateLog(policy, groups, advantages, cfg, forward)
    log.add(batch, out)    after every micro-batch: sums over its tokens
    log.end_epoch()        after an optimizer step: sums over all processes
    log.columns            means per token of the last epoch, for metrics.jsonl

The columns, means over tokens unless said otherwise:

    groups_with_signal, advantage_abs   share of groups whose rewards differ; mean |advantage|
    trained_tokens                      tokens trained on, in all epochs
    off_policy_steps                    age of the samples, in updates
    lr, loss, grad_norm                 of the last step; the norm before clipping
    ratio, ratio_max, clip_fraction     the loss's importance ratio; share of tokens clipped
    entropy, mismatch                   nats, before the first step: entropy; |log-prob now -
                                        when sampled|
    rounding, twice                     nats: the mismatch that rounding explains; only if
                                        mismatch is larger: how far two equal passes differ
    approx_kl, kl_ref                   nats: KL(sampler || policy); with kl, KL(policy ||
                                        reference)
    importance, capped                  importance weight; share of the tokens at the cap
    stop_trained                        share of the end-of-turn tokens that are in the loss
    stretch                             change of the loss's log-ratio per change of log-prob: 1,
                                        or more if each token counts with its reply's ratio

Samples are off-policy if they come from an older policy (--async-rollouts), or from the same
weights computed in another way (vLLM in bfloat16). `--importance` chooses the correction.
On-policy, when every ratio is 1, all four are the same:

    clip        the loss's own ratio is relative to the sampler, and its clip      Schulman 2017,
                cuts off what is too far away                                      eq. 7
    none        ignore it, treat the samples as on-policy: the loss's ratio is
                relative to the policy at the start of the update
    token       as none, but each token weighs min(π/π_sampler, C): truncated      Espeholt 2018,
                importance sampling                                                §4.1
    sequence    as token, with the ratio of the whole episode: unbiased up to
                the cap, and far noisier

π is the policy at the start of the update, so the weight is a constant and the clip still bounds
the *step* ("decoupled", Hilton et al. 2022, §3).

On samples 8 updates old, `none` and `token` fell to 0 within 30 updates, while `clip` and
`sequence` learnt (results/offpolicy). In the first two, the format of the replies falls apart
first. This seems to be why: replies in a habit that the policy has given up still have a negative
advantage, and they end with the same tokens as every good reply (`</think>`, `<answer>`). Taken one
by one, these tokens are as likely as ever, so `token` pushes them down at full weight. Only the
reply as a whole has become unlikely, and only `sequence` sees that. If nothing is stale and only
rounding differs, the ratio of 2,000 tokens is mostly noise, so `token` is the default there (not
measured).

Run me: `python -m fast.batches` shows a batch of two episodes.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch.nn.utils.rnn import pad_sequence

from fast import parallel

IMPORTANCE = ("clip", "none", "token", "sequence")
CAP = 2.0  # C above: too small adds bias towards the sampler, too large adds noise; not tuned

MEANS = (
    "entropy",
    "ratio",
    "clip_fraction",
    "approx_kl",
    "mismatch",
    "kl_ref",
    "importance",
    "capped",
)
COLUMNS = (
    *MEANS,
    "groups_with_signal",
    "advantage_abs",
    "trained_tokens",
    "off_policy_steps",
    "lr",
    "loss",
    "grad_norm",
    "ratio_max",
    "rounding",
    "twice",
    "stop_trained",
    "stretch",
)
SUMS = ("tokens", *MEANS, "log_ratio", "moved", "ended", "stops")


@dataclass
class Batch:
    """Some episodes, right-padded, in the order given, with M sampled tokens in all.

    Row n, position t is about token t+1, the causal shift:

        position   0    1    2    3
        token      <u>  how  many <a>
        predicts   how  many <a>  ...      so the entry for <a> stands at position 2

    Tensors [M] have an entry per sampled token, row after row. SFT needs the first four only.
    """

    episodes: list
    ids: torch.Tensor  # [N, T] int64
    mask: torch.Tensor  # [N, T-1] bool, True where token t+1 was sampled
    row: torch.Tensor  # [M] int64, which row the token is in
    behaviour: torch.Tensor  # [M] log-prob under the policy that sampled it
    advantages: torch.Tensor | None = None  # [M]
    weights: torch.Tensor | None = None  # [M] weight of the token in the loss
    # Filled in at the first forward pass of an update (grpo.proximal_and_importance):
    proximal: torch.Tensor | None = None  # [M] log-prob under the denominator of the ratio
    importance: torch.Tensor | None = None  # [M] extra weight of an older policy's sample


def collate(episodes: list, pad: int, device) -> Batch:
    """Episodes -> Batch. Padding (`pad`) is never in the mask."""
    padded = partial(pad_sequence, batch_first=True)
    ids = padded([torch.tensor(e.token_ids) for e in episodes], padding_value=pad)  # [N, T]
    mask = padded([torch.tensor(e.sampled[1:], dtype=torch.bool) for e in episodes])  # [N, T-1]
    drawn = [p for e in episodes for p, mine in zip(e.logprobs[1:], e.sampled[1:]) if mine]
    return Batch(
        episodes,
        ids.to(device),
        mask.to(device),
        row=mask.nonzero()[:, 0].to(device),
        behaviour=torch.tensor(drawn, device=device),
    )


def cut(episodes: list, max_tokens: int, shared: bool = False) -> list[list[int]]:
    """Indices of episodes, cut so that rows · longest <= max_tokens (one episode may be longer).

    shared: a prompt that rows share is run once (fast/logprobs.py), so it counts once, and each row
    counts only what follows it. A group is cut only if it is too large by itself, because each of
    its parts reads the prompt again.
    """
    starts = [e.sampled.index(True) if shared else 0 for e in episodes]
    rests = [len(e.token_ids) - start for e, start in zip(episodes, starts)]
    by_length = sorted(episodes, key=lambda e: len(e.token_ids))
    longest = {e.group: len(e.token_ids) for e in by_length}  # a group's last one is its longest

    def tokens(rows: list[int]) -> int:
        once = sum({episodes[n].group: starts[n] for n in rows}.values())
        return once + len(rows) * max(rests[n] for n in rows)

    by_group = lambda n: (longest[episodes[n].group], episodes[n].group, rests[n])
    unit = lambda n: episodes[n].group if shared else n
    units = groupby(sorted(range(len(episodes)), key=by_group), key=unit)
    together = pieces([list(x) for _, x in units], lambda some: tokens(sum(some, [])), max_tokens)
    return [part for some in together for part in pieces(sum(some, []), tokens, max_tokens)]


def pieces(rows: Iterable, tokens: Callable, most: int) -> list[list]:
    """Cut rows, in this order, so that tokens(piece) <= most; a single row may have more."""
    found = []
    for row in rows:
        if not found or tokens([*found[-1], row]) > most:
            found.append([])
        found[-1].append(row)
    return found


# ------------------------------------------------------------------- the statistics of an update


def importance_weights(
    level: str, log_ratio: torch.Tensor, row: torch.Tensor, cap: float = CAP
) -> torch.Tensor:
    """min(π / π_sampler, cap) of each sampled token, [M].

    log_ratio [M] is log π - log π_sampler, row [M] says which episode a token belongs to. level
    "token" takes the ratio of the token, "sequence" that of its whole episode (Espeholt et al.
    2018, §4.1). "clip" and "none" use no weights: every token counts 1.
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

    def __init__(self, policy, groups: list[list], advantages, cfg, forward: Callable):
        """advantages [G][k]: a number, or a tensor with one per sampled token.

        cfg: a settings.Config. forward(policy, batch, cfg): a pass, as grpo.forward.
        """
        self.policy, self.cfg, self.forward = policy, cfg, forward
        # Each episode with the size of its advantage, except those that ended in an error.
        sizes = [[torch.as_tensor(a).abs().mean().item() for a in row] for row in advantages]
        pairs = [
            (e, size)
            for group, row in zip(groups, sizes)
            for e, size in zip(group, row)
            if e.stop_reason != "error"
        ]
        n = max(1, len(pairs))
        self.found = {
            "groups_with_signal": sum(any(row) for row in sizes) / len(sizes),
            "advantage_abs": sum(size for _, size in pairs) / n,
            "off_policy_steps": sum(e.age for e, _ in pairs) / n,
            "trained_tokens": 0,
            # How much of `mismatch` the number format explains.
            "rounding": 0.03 if policy.bfloat16 else 1e-3,
        }
        self.look_twice = not any(e.age for group in groups for e in group)
        # All sums exist from the start: a process without episodes has to add zeros.
        self.sums, self.ratio_max = dict.fromkeys(SUMS, 0.0), 0.0
        self.columns = self.found  # if nothing is trained on

    def add(self, batch: Batch, out) -> None:
        """Add a micro-batch, and the policy's output for it (grpo.Output)."""
        logprobs, old = out.logprobs.detach(), batch.proximal
        ratio = (logprobs - old).exp() if out.ratio is None else out.ratio  # your own loss
        nothing = torch.zeros_like(logprobs)
        of_token = {
            "entropy": out.entropy_for_log,
            "ratio": ratio,
            "clip_fraction": nothing if out.clipped is None else out.clipped.float(),
            "mismatch": (logprobs - batch.behaviour).abs(),
            "approx_kl": k3(batch.behaviour, logprobs),  # KL(sampler || policy): how far it moved
            "kl_ref": nothing if out.kl is None else out.kl.detach(),
            "importance": batch.importance,
            "capped": (batch.importance >= CAP * (1 - 1e-6)).float(),
            # For doctor.py: is the loss's ratio per token? Is the end-of-turn token trained on?
            "log_ratio": ratio.clamp(min=1e-30).log().abs(),
            "moved": (logprobs - old).abs(),
        }
        done = [(n, e) for n, e in enumerate(batch.episodes) if e.stop_reason == "done"]
        sums = {name: values.sum().item() for name, values in of_token.items()} | {
            "tokens": len(logprobs),
            "ended": len(done),
            "stops": sum(batch.mask[n, len(e.token_ids) - 2].item() for n, e in done),
        }
        self.sums = {name: self.sums[name] + sums[name] for name in SUMS}
        self.ratio_max = max(self.ratio_max, ratio.max().item())
        # If log-probs differ from the sampler's, how far do two equal passes differ? Measured at
        # the first pass only, if no sample is stale; it costs a healthy run nothing.
        if self.look_twice and of_token["mismatch"].mean() > self.found["rounding"]:
            with torch.no_grad():
                again = self.forward(self.policy, batch, self.cfg).logprobs
            self.found["twice"] = (again - logprobs).abs().mean().item()
        self.look_twice = False

    def end_epoch(self) -> None:
        """Add up the sums of all processes, and divide."""
        sums = parallel.all_reduce_numbers(self.sums)
        n, corrected = sums["tokens"], self.cfg.importance in ("token", "sequence")
        known = {"kl_ref": self.cfg.kl > 0, "importance": corrected, "capped": corrected}
        means = {name: sums[name] / n for name in MEANS if known.get(name, True)}
        # Those of the first epoch: before the first step, a ratio other than 1 means that sampler
        # and trainer disagree.
        self.found = {name: means[name] for name in ("entropy", "mismatch")} | self.found
        stops = {"stop_trained": sums["stops"] / sums["ended"]} if sums["ended"] else {}
        moved = sums["moved"] > 1e-4 * n  # else stretch would be a quotient of rounding errors
        self.columns = {
            **means,
            **self.found,
            **stops,
            "trained_tokens": int(n) * self.cfg.epochs,
            "stretch": sums["log_ratio"] / sums["moved"] if moved else 1.0,
            "ratio_max": max(parallel.gather([self.ratio_max])),
        }
        self.sums, self.ratio_max = dict.fromkeys(SUMS, 0.0), 0.0


if __name__ == "__main__":
    from types import SimpleNamespace

    new = partial(SimpleNamespace, group=0)
    sampled, logprobs = [False, False, True, True], [0.0, 0.0, -1.0, -1.0]
    episodes = [
        new(token_ids=[5, 6, 7, 8], sampled=sampled, logprobs=logprobs),
        new(token_ids=[5, 6, 9], sampled=sampled[:3], logprobs=logprobs[:3]),
    ]
    batch = collate(episodes, 0, "cpu")
    print("ids\n", batch.ids, "\nmask: token t+1 was sampled\n", batch.mask.int())
    print("whose token:", batch.row.tolist(), "log-prob as sampled:", batch.behaviour.tolist())
    print("cut into pieces of at most 4 padded tokens:", cut(episodes, 4))
