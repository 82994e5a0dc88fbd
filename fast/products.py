"""The matrix product of a CPU, twice as fast where torch's own choice is the wrong one.

torch gives float32 products to MKL, which takes AVX2 on AMD's CPUs even where they have AVX-512.
oneDNN, which torch carries too, takes what is there. One thread of an EPYC with AVX-512, in
billions of operations a second:

    x [M, K], weight [N, K]    1024, 128, 768    1024, 384, 128    64, 128, 768    8, 128, 768
    MKL                                   106               110             104             65
    oneDNN                                240               245             183             63

It starts more slowly, so a few rows stay with MKL. And it compiles a product for each new shape,
which takes 0.5 to 5 ms: so the number of rows is filled up to a multiple of 16 or 128. Elsewhere
(a card, other number formats, a torch without oneDNN) this is F.linear. bfloat16 would be twice as
fast again, and its log-probs would not be those that were sampled: 3 digits instead of 7.

Run me: `python -m fast.products` measures both.
"""

import torch
import torch.nn.functional as F

FEW = 32  # rows: oneDNN takes 15 µs to start, MKL 5


def has_onednn() -> bool:
    """Is its product there, and does it work on this machine?"""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        return bool((onednn(torch.ones(2, 2), torch.ones(3, 2)) == 2).all())
    except (AttributeError, RuntimeError):  # it is not part of torch's documented interface
        return False


def onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


ONEDNN = has_onednn()


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K], weight [N, K] -> x weightᵀ [M, N]. Autograd does not see it."""
    if not (ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and len(x) >= FEW):
        return F.linear(x, weight)
    more = -len(x) % (16 if len(x) < 512 else 128)
    return onednn(F.pad(x, (0, 0, 0, more)), weight)[: len(x)] if more else onednn(x, weight)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x weightᵀ + bias; x [M, K], weight [N, K], bias [N] or None."""
    out = product(x, weight)
    return out if bias is None else out.add_(bias)


if __name__ == "__main__":
    import time

    torch.set_num_threads(1)
    print("oneDNN is there" if ONEDNN else "no oneDNN here: everything goes to F.linear")
    for M, K, N in ((1024, 128, 768), (1024, 384, 128), (64, 128, 768), (8, 128, 768)):
        x, weight = torch.randn(M, K), torch.randn(N, K)
        best = {}
        for how in (F.linear, onednn) * 200 if ONEDNN else (F.linear,) * 200:
            started = time.perf_counter()
            how(x, weight)
            best[how] = min(best.get(how, 1.0), time.perf_counter() - started)
        rates = [f"{2 * M * K * N / seconds / 1e9:4.0f}" for seconds in best.values()]
        print(f"[{M}, {K}] x [{N}, {K}]: {' and '.join(rates)} billion operations a second")
    gap = (product(x, weight) - F.linear(x, weight)).abs().max()
    assert gap < 1e-4
