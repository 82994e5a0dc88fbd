"""Attention of many rows that lie end to end, in tiles that fit a core's cache, on a CPU.

    queries   row 1 | row 2 | …      a tile: some queries of a row and a head, and all keys that
    keys      row 1 | row 2 | …      they may see; then the next tile. No padding, and no scores of
                                     all queries at once

The backward pass computes the scores again (as in FlashAttention, Dao et al. 2022, §3.1).
fast/trunk.py trains with it, and fast/decoder.py reads prompts with it.

oneDNN compiles a product for each new shape, which takes longer than a small product. So tiles come
in three heights, and their keys in multiples of 64. What a tile reads beyond its row is another
row's, or filled up: such keys are hidden, and the results of such queries are written over by the
next row's tiles, because rows come in order. Heights of 16 and 32 for the few tokens that a turn of
swarm adds: 3% of sampling, not worth it. Two tiles of 128 in place of one of 256 multiply a sixth
less, and take 1.03 (one thread) to 1.1 times as long (two): a tile's 14 operations have to start.

Scores are to base 2, because torch's exp2 takes a quarter of the time of its exp on a CPU, and exp
takes 30 times as long again where its result is tiny.

Run me: `python -m fast.tiles` compares two rows with torch's own attention.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fast.products import product

BLOCKS = (64, 128, 256)  # queries of a tile: all of a short row, 64 of a longer one
BLOCK = BLOCKS[-1]
ROUND = 128  # tokens are filled up to a multiple of this
SCALE = math.log2(math.e)


@dataclass
class Rows:
    """Where each row's tokens lie among the packed ones [M], and the keys that they attend to.

    A row's keys are those of its beginning, if that was run before, and then its own.
    """

    queries: list[tuple[int, int]]  # first, last + 1 of each row's tokens
    stretch: list[tuple[int, int]]  # and of its keys, in what `keys` picks
    keys: torch.Tensor | None = None  # [E] int64: where each is, in earlier and new ones end to end
    # If only some tokens attend: which of the packed ones they are, [m] int64, and which of its
    # row's keys is each one's own, [m]. `queries` then count these. None: all attend.
    some: torch.Tensor | None = None
    own: torch.Tensor | None = None


def rows_of(lengths: list[int], before: list[tuple[int, int]], earlier: int = 0) -> Rows:
    """Rows of these lengths, end to end.

    before: first, last + 1 of what each begins with among `earlier` tokens; (0, 0) is nothing.
    """
    queries, stretch, keys, at, seen = [], [], [], earlier, 0
    for length, (first, last) in zip(lengths, before):
        queries.append((at - earlier, at - earlier + length))
        stretch.append((seen, seen + last - first + length))
        keys += [torch.arange(first, last), torch.arange(at, at + length)]
        at, seen = at + length, stretch[-1][1]
    return Rows(queries, stretch, torch.cat(keys))


def rows_of_some(rows: Rows, wanted: torch.Tensor) -> Rows:
    """The same rows, but only the tokens that are wanted, [n] bool, attend.

    The last layer needs no more: of all others nobody reads anything but keys and values.
    """
    queries, own, seen = [], [], 0
    for (a, b), (k0, k1) in zip(rows.queries, rows.stretch):
        own.append(wanted[a:b].nonzero()[:, 0] + (k1 - k0) - (b - a))
        queries.append((seen, seen + len(own[-1])))
        seen = queries[-1][1]
    some = F.pad(wanted.nonzero()[:, 0], (0, -seen % ROUND))  # filled up with the first token
    return Rows(queries, rows.stretch, rows.keys, some, F.pad(torch.cat(own), (0, -seen % ROUND)))


def with_zeros(x: torch.Tensor, n: int) -> torch.Tensor:
    """x [H, M, …] with n more of M, zeros; contiguous."""
    out = x.new_zeros(len(x), x.shape[1] + n, *x.shape[2:])
    out[:, : x.shape[1]] = x
    return out


def tiles(rows: Rows, heads: int, g: int):
    """(head, queries, how many of them are the row's own, keys, what hides the last keys) of each.

    What hides is added to the scores, [b·g, late]: -inf where a key comes after a query, which has
    g lines.
    """
    one_by_one = causal_mask(torch.arange(BLOCK), BLOCK + 64, g)
    for (start, end), (k0, k1) in zip(rows.queries, rows.stretch):
        block = min((b for b in BLOCKS if b >= end - start), default=BLOCKS[0])
        for first in range(start, end, block):
            some, n_own = slice(first, first + block), min(block, end - first)
            if rows.own is None:
                sees = k1 - k0 - (end - first)  # keys before the first query's own
                late = -(sees + block) % 64 + block
                hide = one_by_one[: block * g, :late]
            else:
                own = rows.own[some]
                sees, last = int(own[0]), int(own[n_own - 1])
                late = -(last + 1) % 64 + last + 1 - sees
                hide = causal_mask(F.pad(own - sees, (0, block - len(own))), late, g)
            for h in range(heads):
                yield h, some, n_own, slice(k0, k0 + sees + late), hide


def causal_mask(own: torch.Tensor, n: int, g: int) -> torch.Tensor:
    """[b·g, n]: -inf where key j comes after query i, whose own key is own[i]; own [b]."""
    return torch.where(torch.arange(n) > own[:, None], -torch.inf, 0.0).repeat_interleave(g, 0)


def attend(q, keys, values, rows: Rows):
    """q [H, M + BLOCK, g, d], times SCALE / √d; keys, values [H, E + BLOCK + 64, d], row after row.

    Returns out [H, M + BLOCK, g, d], and log₂ Σ 2^score of each query [H, M + BLOCK, g].
    """
    H, M, g, d = q.shape
    out, total = torch.zeros_like(q), q.new_zeros(H, M, g)
    for h, some, _, seen, hide in tiles(rows, H, g):
        scores = product(q[h, some].view(-1, d), keys[h, seen])  # [b·g, n]
        scores[:, -hide.shape[1] :].add_(hide)  # += would copy it once more
        most = scores.amax(-1, keepdim=True)
        sums = scores.sub_(most).exp2_().sum(-1, keepdim=True)
        torch.div(product(scores, values[h, seen].t()), sums, out=out[h, some].view(-1, d))
        torch.add(sums.log2_(), most, out=total[h, some].view(-1, 1))
    return out, total


def attend_backward(grad, q, keys, values, out, total, rows: Rows):
    """The gradients of q times √d, of keys and of values, given that of out [H, M + BLOCK, g, d].

    With p = softmax(scores) and out = p v: dv = pᵀ grad, and the scores' gradient is
    p (grad vᵀ - Σ grad · out) (Dao et al. 2022, appendix B.2).
    """
    H, M, g, d = q.shape
    dq, dk, dv = torch.zeros_like(q), *keys.new_zeros(2, H, d, keys.shape[1])  # these transposed
    mean = (grad * out).sum(-1)  # [H, M, g]
    for h, some, own, seen, hide in tiles(rows, H, g):
        queries, up = q[h, some].view(-1, d), grad[h, some].view(-1, d)
        p = product(queries, keys[h, seen])  # [b·g, n]
        p[:, -hide.shape[1] :].add_(hide)
        p.sub_(total[h, some].view(-1, 1)).exp2_()
        p[own * g :].zero_()  # the others are another row's
        dv[h, :, seen].add_(product(up.t(), p.t()))
        p.mul_(product(up, values[h, seen]).sub_(mean[h, some].view(-1, 1)))
        dq[h, some] = product(p, keys[h, seen].t()).view(-1, g, d)
        dk[h, :, seen].add_(product(queries.t(), p.t()))
    return dq, dk.div_(SCALE).transpose(1, 2), dv.transpose(1, 2)


if __name__ == "__main__":
    (H, g, d), lengths, rng = (2, 2, 32), [300, 50], torch.Generator().manual_seed(0)
    rows, M = rows_of(lengths, [(0, 0)] * len(lengths)), sum(lengths)
    q, pull = torch.randn(2, H, M, g, d, generator=rng)
    keys, values = torch.randn(2, H, M, d, generator=rng).requires_grad_().unbind()
    asked = q.clone().requires_grad_()
    theirs = [
        F.scaled_dot_product_attention(
            asked[:, a:b].transpose(1, 2).flatten(0, 1)[None],  # [1, H·g, T, d]
            *(x[:, a:b].repeat_interleave(g, 0)[None] for x in (keys, values)),
            is_causal=True,
        )[0].unflatten(0, (H, g)).transpose(1, 2)
        for a, b in rows.queries
    ]  # fmt: skip
    theirs = torch.cat(theirs, 1)  # [H, M, g, d]
    expected = torch.autograd.grad((pull * theirs).sum(), [asked, keys, values])
    with torch.no_grad():
        ours = (
            with_zeros(q * (SCALE * d**-0.5), BLOCK),
            *(with_zeros(x, BLOCK + 64) for x in (keys, values)),
        )
        out, total = attend(*ours, rows)
        dq, *rest = attend_backward(with_zeros(pull, BLOCK), *ours, out, total, rows)
    found = dq[:, :M] * d**-0.5, *(grad[:, :M] for grad in rest)
    gaps = [
        (out[:, :M] - theirs).abs().max(),
        *((a - b).abs().max() for a, b in zip(found, expected)),
    ]
    print("out, dq, dk, dv differ by at most", ", ".join(f"{gap.item():.0e}" for gap in gaps))
    assert max(gaps) < 1e-4
