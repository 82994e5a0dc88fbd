"""What only a card can show, into results/card.json.

    python -m lab.card same pico_base      # the CPU's numbers: log-probs, replies, gradients
    python -m lab.card big 2 16 256        # Qwen3-4B's shape: seconds and memory, and the plan's

`big` plays 2 tasks with 16 samples of 256 tokens. A 4B needs no download: its weights are random,
and no reply ends by itself. Our own sampler samples, and not vLLM. Without a card both run on the
CPU, and nothing is written.
"""

import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import tyro
from tyro.conf import Positional

import grpo
from fast import machine
from fast.logprobs import token_logprobs
from fast.sampler import TorchSampler
from lab.speed import SEEDS, new_env, tossed
from lab.tables import RESULTS, keep
from policy import PICO, adam, load_policy
from rollout import play
from settings import Config

ON_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_CARD else "cpu"
SHAPE = dict(  # Qwen3-4B's
    hidden_size=2560,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=9728,
    vocab_size=151_936,
    tie_word_embeddings=True,
    max_position_embeddings=40_960,
)


# ------------------------------------------------------------------------------- the same numbers
def same(model: str, rank: int, tasks: int = 8, k: int = 4, longest: int = 128) -> dict:
    """The CPU in float32 beside the card: greedy replies, log-probs [nats], each loss's gradient.

    A model of more than 200M parameters computes its updates in bfloat16 on the card, also with
    rank 0, whose weights are float32 (fast/logprobs.py). A smaller one should give the same.
    """
    home, there = (load_policy(model, rank, 2 * rank, device) for device in ("cpu", DEVICE))
    torch.set_float32_matmul_precision("highest")
    seeds = [SEEDS + i for i in range(tasks)]
    played = lambda policy, temperature, k: play(
        policy, TorchSampler(policy), new_env, seeds, k, longest, temperature, 0
    )
    groups = played(home, 1.0, k)
    both = [[group[0].token_ids for group in played(p, 0.0, 1)] for p in (home, there)]
    found = {"replies": tasks, "equal": sum(a == b for a, b in zip(*both))}
    gaps = torch.cat([gap(home, there, episode) for group in groups for episode in group])
    found |= {"tokens": len(gaps), "gap": gaps.mean().item(), "most": gaps.max().item()}
    found["gradients"] = {}
    for loss in grpo.LOSSES:
        ours, theirs = (gradient(policy, groups, loss) for policy in (home, there))
        found["gradients"][loss] = ((ours - theirs).norm() / ours.norm()).item()
    return found


def both_ranks(model: Positional[str]) -> dict:
    """`same` if all weights learn, and with LoRA: {arm: numbers}."""
    return {f"same {model} rank {rank}": same(model, rank) for rank in (0, 32)}


@torch.no_grad()
def gap(home, there, episode) -> torch.Tensor:
    """By how much the two differ about each sampled token's log-prob: [M]."""
    ids = torch.tensor([episode.token_ids])  # [1, T]
    mask = torch.tensor([episode.sampled])[:, 1:].bool()  # [1, T-1]
    ours = token_logprobs(home, ids, mask)[0]  # [M]
    theirs = token_logprobs(there, ids.to(DEVICE), mask.to(DEVICE))[0]  # [M]
    return (ours - theirs.float().cpu()).abs()


def gradient(policy, groups, loss: str) -> torch.Tensor:
    """Of one update, in one row [P]. The adapter's B is 0 at first, so A's part is 0."""
    cfg = Config(loss=loss, importance="clip", max_tokens=320, micro_tokens=8192)
    with policy.learning():
        advantages = tossed(len(groups), len(groups[0]))
        grpo.update(policy, adam(policy, 0.0), groups, advantages, cfg)
        found = [weight.grad.flatten().float().cpu() for weight in policy.trainable().values()]
    return torch.cat(found)


# ------------------------------------------------------------------------------- a 4B
def random_model(folder: Path) -> Path:
    """A chat model of SHAPE with random weights and pico_base's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(PICO, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = Qwen3Config(**SHAPE, eos_token_id=2, pad_token_id=0, dtype=torch.bfloat16)
    with torch.device(DEVICE):
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def clocked(act) -> tuple[object, dict]:
    """What it returns, and its seconds and GiB: what tensors took on the card, at most."""
    if ON_CARD:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found = act()
    if ON_CARD:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    most = torch.cuda.max_memory_allocated() / 2**30 if ON_CARD else machine.peak_memory()
    return found, {"seconds": seconds, "gib": most}


def big(tasks: Positional[int], k: Positional[int], longest: Positional[int]) -> dict:
    """An update with a large model's defaults for letters; then of one task, saving memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as room:
        policy = load_policy(str(random_model(Path(room) / "model")), 32, 64, DEVICE)
    sampler, optimizer = TorchSampler(policy), adam(policy, 1e-12)
    seeds = [SEEDS + i for i in range(tasks)]
    groups, sampling = clocked(partial(play, policy, sampler, new_env, seeds, k, longest, 1.0, 0))
    sampling["tokens"] = sum(sum(episode.sampled) for group in groups for episode in group)
    found = {"parameters": policy.n_parameters, "sampling": sampling, "training": []}
    card = machine.card_of(policy.device) if ON_CARD else machine.Card(80.0)
    flags = ({}, {}, {"micro_tokens": 4096}, {"gradient_checkpointing": True})
    for n, more in zip((tasks, 1, 1, 1), flags):
        cfg = Config(importance="clip", max_tokens=longest, k=k, **{"micro_tokens": 8192} | more)
        if cfg.gradient_checkpointing:
            machine.checkpoint_activations(policy)
        update = partial(grpo.update, policy, optimizer, groups[:n], tossed(n, k), cfg)
        with sampler.asleep(), policy.learning():
            stats, line = clocked(update)
        planned = machine.plan(machine.BIG, "letters", card, "torch", more | {"k": k})
        line |= {"settings": more, "tasks": n, "planned": planned.training}
        line |= {"tokens": stats["trained_tokens"], "mismatch": stats["mismatch"]}
        found["training"].append(line)
    return {f"big {tasks} x {k} x {longest}": found | {"planned_sampling": planned.sampling}}


if __name__ == "__main__":
    arms = tyro.extras.subcommand_cli_from_dict({"same": both_ranks, "big": big})
    print(arms)
    if ON_CARD:
        made = {"made_by": "python -m lab.card, with an arm's words", "torch": torch.__version__}
        keep(RESULTS / "card.json", made | {"machine": torch.cuda.get_device_name()}, arms)
