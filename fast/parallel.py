"""Several processes, one policy: `torchrun --nproc-per-node 4 train.py --env letters`. One process is the same with nobody to talk to.

    every rank     plays its share of the tasks                                    8 tasks, 4 ranks: 2 each
    together       exchange the episodes: now each rank has all the groups         a few MB
    every rank     computes the advantages and weights of *all* episodes, and the gradient of its share of them
    together       add the gradients up; each rank takes the same optimizer step   as large as the weights that learn

The gradients are added, never averaged. A token's weight has the whole batch in its denominator (grpo.token_weights), so the parts add up to
what one process would have computed. The commoner way, each rank a mean over its own tokens and then the mean of the means, gives another gradient
whenever the ranks hold different numbers of tokens, which in RL is always.

And so nothing depends on how many ranks there are, but for rounding: the tasks, the samples and the gradient are those of one process, and a
run may be resumed with another number. All ranks run the same train.py, line by line. Only the first one's folder is kept, and only it prints
and logs.

Each rank sees one card (CUDA_VISIBLE_DEVICES), and so does what it starts. The run folder has to be on a disk that all ranks see.
What this is not: sharding of one model over cards (FSDP, tensor parallel). Each rank holds all of it.

Run me: `python -m fast.parallel` starts two processes that share one batch, and compares their gradient with that of one.
"""

import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from functools import partialmethod

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
    """Join the others, if torchrun started this process. Before anything touches CUDA. All but the first fall silent."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        return
    mine = int(os.environ["LOCAL_RANK"])
    cards = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = cards.split(",") if cards else [str(i) for i in range(torch.cuda.device_count())]
    if cards and mine >= len(cards):
        raise SystemExit(f"torchrun started a process number {mine + 1} here, and there are {len(cards)} cards; lower --nproc-per-node")
    if cards:
        os.environ["CUDA_VISIBLE_DEVICES"] = cards[mine]
    # Objects travel by gloo, tensors by what they lie on. A rank that dies takes torchrun and so the others with it: no need to time out early,
    # and a rollout may keep the others waiting for long.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cards else "gloo", timeout=timedelta(hours=3))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # a process that this one starts is no rank, and must not think so
        del os.environ[name]
    if rank():
        tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)
        sys.stdout = open(os.devnull, "w")
        from transformers.utils import logging

        logging.disable_progress_bar()


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def share(things: list) -> list:
    """This rank's share: every world-th of them, from the rank-th on. Strided, so that a list sorted by length is shared fairly."""
    return things[rank() :: world()]


def gather(mine: list) -> list:
    """What every rank has made of its share, in the order of the whole: gather([f(x) for x in share(xs)]) == [f(x) for x in xs]."""
    if world() == 1:
        return mine
    parts = [None] * world()
    dist.all_gather_object(parts, mine)
    whole = [None] * sum(map(len, parts))
    for r, part in enumerate(parts):
        whole[r :: world()] = part
    return whole


def from_first(thing):
    """The first rank's `thing`, on every rank; what the others pass in is ignored."""
    if world() == 1:
        return thing
    box = [thing]
    dist.broadcast_object_list(box)
    return box[0]


def any_rank(flag: bool) -> bool:
    """Does one of them say yes? All have to ask at the same place."""
    return flag if world() == 1 else any(gather([flag]))


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace every gradient by its sum over the ranks. A rank that had nothing to train on adds zeros."""
    if world() == 1:
        return
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)


def sum_numbers(numbers: dict[str, float]) -> dict[str, float]:
    """{name: its sum over the ranks}, in rank order on each of them, so that all have the same to the last bit."""
    if world() == 1:
        return numbers
    parts = gather([numbers])
    return {name: sum(part[name] for part in parts) for name in numbers}


def same_weights(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Give all ranks the first one's weights. RuntimeError is torch's, if the shapes differ."""
    if world() > 1:
        for p in parameters:
            dist.broadcast(p.data, 0)


def demo(file: str) -> None:
    """One process keeps its gradient in `file`; two processes that have played one task each compare theirs with it."""
    from grpo import update
    from policy import PICO, load_policy
    from rollout import Episode

    policy = load_policy(str(PICO), lora_rank=8, lora_alpha=16)
    ids = policy.tokenizer("Count the letters b and c in abcabc.")["input_ids"]

    def play(task: int) -> list[Episode]:
        """Three made-up episodes of a task: the longer the reply, the more of the ids count as sampled."""
        cuts = [len(ids) - 2 - 3 * i for i in range(3)]
        sampled = [[t >= cut for t in range(len(ids))] for cut in cuts]
        return [Episode(task, task, ids, mine, [-1.0 * s for s in mine], reward=float(i == task)) for i, mine in enumerate(sampled)]

    groups = gather([play(task) for task in share([0, 1])])
    found = []
    optimizer = torch.optim.SGD(policy.trainable().values(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: found.extend(p.grad.flatten() for p in policy.trainable().values()))
    stats = update(
        policy, optimizer, groups, loss="reinforce", baseline="group", normalize=True, temperature=1.0, max_tokens=8, micro_tokens=64
    )
    mine = torch.cat(found)
    print(
        f"{world()} process(es): {len(groups)} groups, {stats['trained_tokens']} tokens to train on, gradient norm {stats['grad_norm']:.6f}"
    )
    if world() == 1:
        torch.save(mine, file)
    else:
        difference = (mine - torch.load(file, weights_only=True)).abs().max().item()
        print(f"largest difference to the gradient of one process: {difference:.1e} of {mine.abs().max().item():.1e}")
        assert difference < 1e-5 * mine.abs().max().item() + 1e-8


if __name__ == "__main__":
    import subprocess
    import tempfile

    start()
    if world() == 1:
        with tempfile.TemporaryDirectory() as folder:
            demo(folder + "/gradient.pt")
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                __file__,
                folder + "/gradient.pt",
            ]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    else:
        demo(sys.argv[1])
    stop()
