"""Episodes as tensors, cut into pieces that fit into memory.

    episodes -> cut -> collate -> ids [N, T], mask [N, T-1], and [M] per sampled token

How episodes are cut changes memory and time but never the gradient, because each
token's weight is computed over the whole batch first (grpo.py). The end of the file is
about samples from a policy other than the one being trained: leave it for later.

Run me: `python batch.py` shows a batch of two episodes.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch.nn.utils.rnn import pad_sequence

from policy import Output


@dataclass
class Batch:
    """Some episodes, right-padded, in the order given, with M sampled tokens in all.

    Position t of a row is about token t+1 (the causal shift):

        position   0    1    2    3
        token      <u>  how  many <a>
        predicts   how  many <a>  ...      so the entry for <a> stands at position 2

    Tensors [M] have one entry per sampled token, row after row. SFT needs only ids and
    mask.
    """

    episodes: list
    ids: torch.Tensor  # [N, T] int64
    mask: torch.Tensor  # [N, T-1] bool, True if token t+1 was sampled
    episode_of: torch.Tensor  # [M] int64, which of the episodes the token is in
    sampler_logprobs: torch.Tensor  # [M] log-prob under the policy that sampled it
    # What an update adds (grpo.py):
    advantages: torch.Tensor | None = None  # [M]
    weights: torch.Tensor | None = None  # [M] weight of the token in the loss
    old_logprobs: torch.Tensor | None = None  # [M] what the importance ratio divides by
    importance: torch.Tensor | None = None  # [M] extra weight of an older sample


def collate(episodes: list, pad: int, device) -> Batch:
    """Episodes -> Batch. Padding (`pad`) is never in the mask."""
    padded = partial(pad_sequence, batch_first=True)
    texts = [torch.tensor(e.token_ids) for e in episodes]
    ids = padded(texts, padding_value=pad)  # [N, T]
    shifted = [torch.tensor(e.sampled[1:], dtype=torch.bool) for e in episodes]
    mask = padded(shifted)  # [N, T-1]
    # An episode's first token is never sampled, so `sampled` and `mask` pick the same
    # tokens, in the same order.
    logprobs = [
        logprob
        for e in episodes
        for logprob, sampled in zip(e.logprobs, e.sampled)
        if sampled
    ]
    return Batch(
        episodes,
        ids.to(device),
        mask.to(device),
        episode_of=mask.nonzero()[:, 0].to(device),
        sampler_logprobs=torch.tensor(logprobs, device=device),
    )


def split_by_tokens(
    episodes: list, max_tokens: int, shared: bool = False, whole: bool = False
) -> list[list[int]]:
    """Indices of episodes, cut into pieces with (rows · longest row) <= max_tokens.

    For example, three episodes of 5, 4 and 9 tokens with max_tokens = 10 give
    [[1, 0], [2]]: two rows padded to 5, then one of 9. A single episode may be longer
    than max_tokens.

    shared: a group's prompt is run once for all its rows. So it counts once, and each
    row adds only what follows the prompt. Each part of a group reads the prompt again,
    so a group is cut only if it is too large by itself. whole: a group is never cut.
    """
    # Tokens of each episode's prompt, if it is shared, and of the rest.
    starts = [e.sampled.index(True) if shared else 0 for e in episodes]
    rests = [len(e.token_ids) - start for e, start in zip(episodes, starts)]
    by_length = sorted(episodes, key=lambda e: len(e.token_ids))
    # {group: tokens of its longest episode}: the longest comes last, and is kept
    longest = {e.group: len(e.token_ids) for e in by_length}

    def tokens(rows: list[int]) -> int:
        prompts = {episodes[n].group: starts[n] for n in rows}
        return sum(prompts.values()) + len(rows) * max(rests[n] for n in rows)

    def by_group(n: int) -> tuple:
        return longest[episodes[n].group], episodes[n].group, rests[n]

    rows = sorted(range(len(episodes)), key=by_group)
    by_units = shared or whole
    units = groupby(rows, key=lambda n: episodes[n].group if by_units else n)
    units = [list(unit) for _, unit in units]  # each stays together if it can
    together = pieces(units, lambda some: tokens(sum(some, [])), max_tokens)
    together = [sum(some, []) for some in together]
    if whole:
        return together
    return [piece for some in together for piece in pieces(some, tokens, max_tokens)]


def pieces(rows: Iterable, tokens: Callable, most: int) -> list[list]:
    """Cut rows, in this order, so that tokens(piece) <= most.

    A single row may have more.
    """
    found = []
    for row in rows:
        if not found or tokens([*found[-1], row]) > most:
            found.append([])
        found[-1].append(row)
    return found


# ------------------------------------------------------ samples of another policy

# The choices of --importance, which set_off_policy_terms explains.
IMPORTANCE = ("clip", "none", "token", "sequence", "token_mask", "sequence_mask")
CAPPED = ("token", "sequence")
CAP = 2.0  # too small adds bias towards the sampler, too large adds noise; not tuned
# The ratios that a mask lets through. token_mask: IcePop's α and β (Ling team 2025,
# "Every Step Evolves", arXiv 2510.18855). sequence_mask: TRL 1.16's default.
BANDS = {"token_mask": (0.5, 5.0), "sequence_mask": (0.0, 3.0)}


def set_off_policy_terms(batch: Batch, output: Output, cfg) -> None:
    """Set batch.old_logprobs and batch.importance, and multiply batch.weights by it.

    All are [M]. old_logprobs: the log of what the importance ratio divides by.
    importance: an extra weight of each sampled token. Called at a batch's first pass;
    all three then hold for every epoch.

    If the policy that sampled is the one being trained, you can skip this: every ratio
    is 1, and all ways below are the same. But samples may also come from an older
    policy (--async-rollouts), or from the same weights computed in another way (vLLM in
    bfloat16). --importance chooses how they are corrected. A token's probability was
    p_sampler when it was sampled, and is p_start when this update starts:

        clip       the loss's ratio divides by p_sampler, and the loss's clip bounds
                   that ratio (Schulman 2017, eq. 7)
        none       the loss's ratio divides by p_start: no correction
        token      as none, but a token weighs min(p_start / p_sampler, CAP):
                   truncated importance sampling (Espeholt et al. 2018, §4.1)
        sequence   as token, but with the probabilities of the whole episode: unbiased
                   apart from the cap, but far noisier
        token_mask, sequence_mask
                   as token and sequence, but without a cap; if p_start / p_sampler is
                   outside BANDS, the token or the episode weighs nothing

    In all ways but the first, the loss's clip bounds only this update's own steps
    (Hilton et al. 2022, §3), and the weight is a constant: it has no gradient. The
    default depends on the model and on --async-rollouts; docs/hardware.md says what
    each did.
    """
    start = output.logprobs.detach()  # [M]
    batch.old_logprobs = batch.sampler_logprobs if cfg.importance == "clip" else start
    log_ratio = start - batch.sampler_logprobs
    batch.importance = importance_weights(cfg.importance, log_ratio, batch.episode_of)
    batch.weights = batch.weights * batch.importance


def importance_weights(
    importance: str, log_ratio: torch.Tensor, episode_of: torch.Tensor, cap: float = CAP
) -> torch.Tensor:
    """What a sampled token weighs: 1, min(ratio, cap), or a masked ratio. [M]

    The ratio is p_start / p_sampler, as in set_off_policy_terms; log_ratio [M] is its
    logarithm for each token. episode_of [M]: the episode a token is in. importance, as
    --importance: "token" takes the ratio of the token, "sequence" that of its whole
    episode (Espeholt et al. 2018, §4.1). With "_mask" at the end there is no cap, and a
    ratio outside BANDS weighs 0. With "clip" and "none" each token weighs 1.
    """
    if importance in ("clip", "none"):
        return torch.ones_like(log_ratio)
    if importance.startswith("sequence"):
        # the product over an episode's tokens, all turns together
        n = int(episode_of.max()) + 1
        total = log_ratio.new_zeros(n).index_add(0, episode_of, log_ratio)  # [n]
        log_ratio = total[episode_of]
    if importance in BANDS:
        low, high = BANDS[importance]
        ratio = log_ratio.exp()  # [M]; infinite is outside, too
        return ratio.where((low <= ratio) & (ratio <= high), 0.0)
    # clamp before exp, or the exp of a long episode's log-ratio would overflow
    return log_ratio.clamp(max=math.log(cap)).exp()


if __name__ == "__main__":
    from rollout import Episode

    sampled, logprobs = [False, False, True, True], [0.0, 0.0, -1.0, -2.0]
    episodes = [
        Episode(0, 0, [5, 6, 7, 8], sampled, logprobs),
        Episode(0, 0, [5, 6, 9], sampled[:3], logprobs[:3]),
    ]
    batch = collate(episodes, 0, "cpu")
    print("ids, the second row padded with 0:\n", batch.ids)
    print("mask, 1 if token t+1 was sampled:\n", batch.mask.int())
    print("the episode of each sampled token:", batch.episode_of.tolist())
    print("its log-prob when sampled:        ", batch.sampler_logprobs.tolist())
    print("cut into pieces of at most 4 padded tokens:", split_by_tokens(episodes, 4))
