"""Several processes, one policy: `torchrun --nproc-per-node 4 train.py --env letters`.

    every rank   plays its share of the tasks                          8 tasks, 4 ranks: 2 each
    together     exchange the episodes: each rank has all the groups   a few MB
    every rank   computes the advantages and weights of *all* episodes,
                 and the gradient of its share of them
    together     add the gradients up, take the same optimizer step    as large as what learns

One process does the same with nobody to talk to. A rank is one of the processes.

Gradients are added, never averaged. A token's weight has the whole batch in its denominator
(grpo.token_weights), so the parts add up to the gradient of one process. More commonly each rank
takes a mean, and then the means are averaged. That gives another gradient whenever ranks hold
different numbers of tokens, which in RL is always.

So apart from rounding nothing depends on the number of ranks: tasks, samples and gradient are those
of one process, and a run may be resumed with another number. All ranks run the same train.py, line
by line. Only the first one prints, logs and keeps its run folder.

Each rank sees one card (CUDA_VISIBLE_DEVICES), and so do the processes it starts. All need access
to the run folder's disk. Each holds the whole model: it is not sharded over cards (FSDP, tensor
parallel).
"""

import os
import sys
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from tqdm import tqdm


def rank() -> int:
    """Which of the processes this is, from 0 on."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def start() -> None:
    """Join the others, if torchrun started this process. All but the first stop printing.

    Call it before anything touches CUDA.
    """
    if "LOCAL_RANK" not in os.environ or os.environ["WORLD_SIZE"] == "1" or dist.is_initialized():
        return
    mine, n = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if n:
        if mine >= n:
            raise SystemExit(
                f"torchrun started a process number {mine + 1} here, and there are {n} cards; "
                "lower --nproc-per-node"
            )
        cards = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(n)))
        os.environ["CUDA_VISIBLE_DEVICES"] = cards.split(",")[mine]
    # A rollout may keep the others waiting for long. A rank that dies ends torchrun, and that ends
    # all the others, so nothing is gained by timing out early.
    dist.init_process_group("cpu:gloo,cuda:nccl" if n else "gloo", timeout=timedelta(hours=3))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # processes started from here are not ranks
        del os.environ[name]
    if rank():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        from transformers.utils import logging

        logging.disable_progress_bar()


def bar(*given, **named) -> tqdm:
    """tqdm's progress bar, but on the first rank only."""
    return tqdm(*given, **named | {"disable": named.get("disable", False) or rank() > 0})


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(things: list) -> list:
    """Every world-th thing, from the rank-th on: fair even if they are sorted by length."""
    return things[rank() :: world()]


def gather(mine: list) -> list:
    """All ranks' results in the original order.

    gather([f(x) for x in shard(xs)]) == [f(x) for x in xs]
    """
    if world() == 1:
        return mine
    parts = [None] * world()
    dist.all_gather_object(parts, mine)
    whole = [None] * sum(map(len, parts))
    for r, part in enumerate(parts):
        whole[r :: world()] = part
    return whole


def broadcast(thing):
    """The first rank's `thing`, on every rank; what the others pass in is ignored."""
    return gather([thing])[0]


def all_reduce(parameters: Iterable[torch.nn.Parameter], loss: float) -> float:
    """Replace every gradient by its sum over the ranks; returns the sum of their losses.

    A rank with nothing to train on adds zeros. Losses are added in the same order everywhere, so
    they are equal to the last bit.
    """
    if world() == 1:
        return loss
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
    return sum(gather([loss]))
