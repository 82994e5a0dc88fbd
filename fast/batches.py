"""Episodes as tensors, cut into pieces that fit into memory.

    episodes  ->  cut  ->  collate  ->  ids [N, T], mask [N, T-1], and [M] of each sampled token

How a batch is cut changes memory and time, and never the gradient: what each token weighs is
worked out over the whole batch before (grpo.token_weights).

Run me: `python -m fast.batches` shows a batch of two episodes.
"""

from dataclasses import dataclass

import torch


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
    row: torch.Tensor  # [M] int64, whose token it is
    behaviour: torch.Tensor  # [M] log-prob under the policy that sampled it
    advantages: torch.Tensor | None = None  # [M]
    weights: torch.Tensor | None = None  # [M] of the token in the loss
    # Filled in at the first forward pass of an update (grpo.remember_old_policies):
    proximal: torch.Tensor | None = None  # [M] log-prob under the denominator of the ratio
    importance: torch.Tensor | None = None  # [M] what a sample of an older policy weighs besides


def collate(episodes: list, pad: int, device) -> Batch:
    """Episodes -> Batch. Padding (`pad`) is never in the mask."""
    N, T = len(episodes), max(len(e.token_ids) for e in episodes)
    ids = torch.full((N, T), pad)
    mask = torch.zeros((N, T - 1), dtype=torch.bool)
    logprobs = torch.zeros((N, T - 1))
    for n, e in enumerate(episodes):
        length = len(e.token_ids)
        assert len(e.sampled) == len(e.logprobs) == length
        assert not e.sampled[0], "nothing predicts the first token"
        ids[n, :length] = torch.tensor(e.token_ids)
        mask[n, : length - 1] = torch.tensor(e.sampled[1:])
        logprobs[n, : length - 1] = torch.tensor(e.logprobs[1:])
    row = mask.nonzero()[:, 0]  # [M]
    tensors = (ids, mask, row, logprobs[mask])
    return Batch(episodes, *(tensor.to(device) for tensor in tensors))


def cut(episodes: list, max_tokens: int) -> list[list[int]]:
    """Indices of episodes, cut so that rows · longest <= max_tokens (one episode may be longer).

    A group's members follow each other, because fast/logprobs.py runs a prompt that they share
    once per piece. A group may still be cut in two.
    """
    lengths, longest = [len(e.token_ids) for e in episodes], {}
    for e in episodes:
        longest[e.group] = max(longest.get(e.group, 0), len(e.token_ids))
    by_group = lambda n: (longest[episodes[n].group], episodes[n].group, lengths[n])
    pieces, current, width = [], [], 0
    for n in sorted(range(len(episodes)), key=by_group):
        width = max(width, lengths[n])
        if current and (len(current) + 1) * width > max_tokens:
            pieces.append(current)
            current, width = [], lengths[n]
        current.append(n)
    return pieces + [current] if current else pieces


if __name__ == "__main__":
    from types import SimpleNamespace

    made_up = [([5, 6, 7, 8], 2), ([5, 6, 9], 2)]  # tokens, and how many of them are the prompt
    episodes = []
    for ids, n in made_up:
        sampled = [t >= n for t in range(len(ids))]
        logprobs = [-1.0 if mine else 0.0 for mine in sampled]
        episode = SimpleNamespace(token_ids=ids, sampled=sampled, logprobs=logprobs, group=0)
        episodes.append(episode)
    batch = collate(episodes, 0, "cpu")
    print("ids\n", batch.ids, "\nmask: token t+1 was sampled\n", batch.mask.int())
    print("whose token:", batch.row.tolist(), "log-prob as sampled:", batch.behaviour.tolist())
    print("cut into pieces of at most 4 padded tokens:", cut(episodes, 4))
