"""What test_parallel.py runs under torchrun: every rank writes what it found into a folder. Also
runs alone, as the one process to compare with."""

import copy
import sys
from functools import lru_cache
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from batch import collate
from fast import parallel
from fast.logprobs import token_logprobs
from policy import PICO, load_policy
from rollout import Episode
from sft import sft_step
from steps import FLAGS, stir, train_on
from train import choose_backend

CASES = {
    "grpo": dict(loss="grpo"),
    "dapo": dict(loss="dapo"),
    "dr_grpo, small micro-batches": dict(loss="dr_grpo", micro_tokens=40),
    "gspo": dict(loss="gspo"),
    "batch baseline": dict(loss="grpo", baseline="batch"),
    "two epochs": dict(loss="grpo", epochs=2),
    # An episode's weight is the exp of a sum over its tokens, and with it rounding grows. Alone in
    # its micro-batch, a row is computed alike however many processes there are.
    "sequence weights": dict(loss="grpo", importance="sequence", micro_tokens=1),
    "token weights, old": dict(loss="cispo", importance="token", version=3),
    "reference": dict(loss="grpo", kl=0.1),
    "sft": {},
}


def batch() -> list[list[Episode]]:
    """3 groups of 4 episodes of different lengths and ages; one in error, one group that is all the
    same. The same episodes every time."""
    generator, groups = torch.Generator().manual_seed(0), [[], [], []]
    for g, i in product(range(3), range(4)):
        n = 14 + 5 * i + g
        ids = torch.randint(5, 900, (n,), generator=generator).tolist()
        episode = Episode(g, g, ids, [t >= 8 for t in range(n)], [0.0] * n, policy_version=i)
        episode.reward = 0.5 if g == 2 else float((i + g) % 3)
        groups[g].append(episode)
    groups[0][3].stop_reason = "error"
    everyone = [e for group in groups for e in group]
    with torch.no_grad():  # sampled by almost this policy: the ratio is near 1, on either side
        made = collate(everyone, 0, "cpu")
        now = token_logprobs(fresh(), made.ids, made.mask, 0.8)[0]
    now = (now + 0.05 * torch.randn(now.shape, generator=generator)).tolist()
    for e in everyone:
        mine, now = now[: e.reply_tokens], now[e.reply_tokens :]
        e.logprobs = [0.0] * 8 + mine
    return groups


@lru_cache
def load_once():
    policy = load_policy(str(PICO), lora_rank=4, lora_alpha=8)
    stir(policy, 0.02)  # B is zero at first, and then A has no gradient
    return policy


def fresh():
    """The policy with the weights of the beginning and without a gradient."""
    return copy.deepcopy(load_once())


def results() -> dict:
    """{case: (what update returned, the gradient of the last step, the weights after it)}"""
    out, flat = {}, lambda tensors: torch.cat([x.detach().flatten() for x in tensors])
    for name, settings in CASES.items():
        policy = fresh()
        weights, kept = policy.trainable(), []
        optimizer = torch.optim.SGD(weights.values(), lr=0.1)
        keep = lambda *_, w=weights, kept=kept: kept.append(flat(p.grad for p in w.values()))
        optimizer.register_step_pre_hook(keep)
        if name == "sft":
            backend = choose_backend(FLAGS, policy)
            loss, norm = sft_step(policy, optimizer, sum(batch(), []), 100, backend)
            stats = {"loss": loss, "grad_norm": norm}
        else:
            reference = {n: p.detach() * 0.9 for n, p in weights.items()}  # for a KL
            everything = {"temperature": 0.8, "max_tokens": 32, "micro_tokens": 200, **settings}
            stats = train_on(policy, optimizer, batch(), reference, **everything)
        out[name] = stats, kept[-1], flat(weights.values())
    return out


if __name__ == "__main__":
    parallel.start()
    name = f"{parallel.world()}-{parallel.rank()}.pt"
    torch.save(results(), Path(sys.argv[1]) / name)
    parallel.stop()
