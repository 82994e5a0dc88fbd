"""Episodes as tensors, and a batch cut into pieces that fit into memory.

    episodes  ->  micro_batches  ->  collate  ->  ids, mask, old log-probs  [N, T]

How the batch is cut changes memory and time, and never the gradient: what each token weighs is
worked out over the whole batch before (grpo.token_weights).

Run me: `python -m fast.batches` shows a batch of two episodes.
"""

from dataclasses import dataclass

import torch


@dataclass
class Batch:
    """Episodes, right-padded, in the order given. Row n, position t is about token t+1: the shift.

    position   0    1    2    3
    token      <u>  how  many <a>
    predicts   how  many <a>  ...      so the entry for <a> stands at position 2
    """

    ids: torch.Tensor  # [N, T] int64
    mask: torch.Tensor  # [N, T-1] bool, True where token t+1 was sampled
    old_logprobs: torch.Tensor  # [N, T-1] float32, as sampled
    advantages: torch.Tensor  # [N] float32
    weights: torch.Tensor  # [N] float32: what each of its tokens weighs in the loss


def collate(episodes: list, advantages: torch.Tensor, weights: torch.Tensor, pad: int, device):
    """Episodes -> Batch; advantages [N], weights [N]. Padding (`pad`) is never in the mask."""
    N, T = len(episodes), max(len(e.token_ids) for e in episodes)
    ids = torch.full((N, T), pad)
    mask = torch.zeros((N, T - 1), dtype=torch.bool)
    old = torch.zeros((N, T - 1))
    for n, e in enumerate(episodes):
        length = len(e.token_ids)
        assert len(e.sampled) == len(e.logprobs) and len(e.sampled) == length and not e.sampled[0]
        ids[n, :length] = torch.tensor(e.token_ids)
        mask[n, : length - 1] = torch.tensor(e.sampled[1:])
        old[n, : length - 1] = torch.tensor(e.logprobs[1:])
    tensors = (ids, mask, old, advantages, weights)
    return Batch(*(tensor.to(device) for tensor in tensors))


def micro_batches(episodes: list, max_tokens: int) -> list[list[int]]:
    """Indices of episodes, cut so that rows · longest <= max_tokens (one episode may be longer).

    Members of a group are neighbours: they share their prompt (fast/logprobs.py runs it once per
    batch), and answers to one task are alike in length, so there is little padding. Where a batch
    is full, a group is cut, and its prompt is run in both.
    """
    lengths, longest = [len(e.token_ids) for e in episodes], {}
    for e in episodes:
        longest[e.group] = max(longest.get(e.group, 0), len(e.token_ids))
    by_group = lambda n: (longest[episodes[n].group], episodes[n].group, lengths[n])
    batches, current, width = [], [], 0
    for n in sorted(range(len(episodes)), key=by_group):
        width = max(width, lengths[n])
        if current and (len(current) + 1) * width > max_tokens:
            batches.append(current)
            current, width = [], lengths[n]
        current.append(n)
    return batches + [current] if current else batches


if __name__ == "__main__":
    from types import SimpleNamespace

    episodes = []
    for ids in ([5, 6, 7, 8], [5, 6, 9]):  # two tokens of prompt each
        sampled = [t >= 2 for t in range(len(ids))]
        logprobs = [-1.0 * mine for mine in sampled]
        episodes.append(SimpleNamespace(token_ids=ids, sampled=sampled, logprobs=logprobs, group=0))
    batch = collate(episodes, torch.tensor([1.0, -1.0]), torch.full((2,), 1 / 3), 0, "cpu")
    print("ids\n", batch.ids, "\nmask: token t+1 was sampled\n", batch.mask.int())
    print("micro-batches of at most 4 padded tokens:", micro_batches(episodes, 4))
