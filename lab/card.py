"""An update of Qwen3-4B's shape on a card: seconds and memory, into results/card.json.

    python -m lab.card 2 16 256        # 2 tasks, 16 samples of each, 256 tokens

The 4B model needs no download: its weights are random, and no reply ends by itself. Our own sampler
is used, not vLLM. Without a card it runs on the CPU, and nothing is written.
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


def random_model(folder: Path) -> Path:
    """A chat model of SHAPE with random weights and pico_base's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(PICO, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = Qwen3Config(**SHAPE, eos_token_id=2, pad_token_id=0, dtype=torch.bfloat16)
    with torch.device(DEVICE):
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def clocked(act) -> tuple[object, dict]:
    """(what it returns, {its seconds, GiB}): the most that tensors took on the card."""
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
    """An update with a large model's defaults for letters; then of one task, to save memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as room:
        policy = load_policy(str(random_model(Path(room) / "model")), 32, 64, DEVICE)
    sampler, optimizer = TorchSampler(policy), adam(policy, 1e-12)
    seeds = [SEEDS + i for i in range(tasks)]
    groups, sampling = clocked(partial(play, policy, sampler, new_env, seeds, k, longest, 1.0, 0))
    sampling["tokens"] = sum(sum(episode.sampled) for group in groups for episode in group)
    found = {"parameters": policy.n_parameters, "sampling": sampling, "training": []}
    for n, more in (
        (tasks, {}),
        (1, {}),
        (1, {"micro_tokens": 4096}),
        (1, {"gradient_checkpointing": True}),
    ):
        cfg = Config(importance="clip", max_tokens=longest, k=k, **{"micro_tokens": 8192} | more)
        if cfg.gradient_checkpointing:
            machine.checkpoint_activations(policy)
        update = partial(grpo.update, policy, optimizer, groups[:n], tossed(n, k), cfg)
        with sampler.asleep(), policy.learning():
            stats, line = clocked(update)
        found["training"].append(
            line
            | {"settings": more, "tasks": n}
            | {"tokens": stats["trained_tokens"], "mismatch": stats["mismatch"]}
        )
    return {f"big {tasks} x {k} x {longest}": found}


if __name__ == "__main__":
    arms = tyro.cli(big)
    print(arms)
    if ON_CARD:
        made = {"made_by": "python -m lab.card, with an arm's numbers", "torch": torch.__version__}
        keep(RESULTS / "card.json", made | {"machine": torch.cuda.get_device_name()}, arms)
