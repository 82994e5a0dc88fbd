"""The sides that lab/speed/bench_peers.py compares, and the processes in which they take turns.

    Ours, trl_trainer    one GRPO update after another        one_side runs either
    sampling             a function that samples: ours, transformers' two ways, vLLM
    Other                processes of one side that work when they are asked, and are stopped while it is not their turn

What is held equal: the weights (pico_base), float32, LoRA of rank 32, the tokenizer, the very token ids of the prompts, 8 tasks x 8
samples, temperature 1, top-k and top-p off, the longest reply, threads, AdamW, one optimizer step a batch, the loss (grpo, clip 0.2, no KL
term, rewards divided by the group's deviation). TRL is given what makes it faster: no gradient checkpointing, no dropout, a batch in one
piece, no logging; and both of its ways to generate are timed.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from env_letters import Letters
from fast import parallel
from fast.sampler import TorchSampler
from lab.common import ROOT
from lab.speed.bench import BENCH_SEEDS, learn
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
    groups: list = []  # of the last update

    def __init__(self, forced: bool, device: str = "cpu"):
        self.policy = load_policy(str(PICO), 32, 64, device)
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
        env, mine = partial(Coin, 6, "binary", True, "states"), parallel.share(seeds)
        groups = self.groups = parallel.gather(play(self.policy, self.sampler, env, mine, K, self.limit, 1.0, self.step))
        sampled = time.perf_counter()
        stats = learn(self.policy, self.optimizer, groups, self.limit)
        self.step += 1
        end = time.perf_counter()
        tokens = sum(e.reply_tokens for g in parallel.share(groups) for e in g)
        return {"seconds": end - start, "tokens": tokens, "trained": stats["trained_tokens"],
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
        output_dir=tempfile.mkdtemp(), max_steps=steps, num_generations=K, learning_rate=lr,
        per_device_train_batch_size=TASKS * K // int(os.environ.get("WORLD_SIZE", 1)),
        max_completion_length=FORCED if forced else LONGEST, temperature=1.0, top_k=0, top_p=1.0, loss_type="grpo", beta=0.0,
        scale_rewards="group", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
        logging_steps=10**6, disable_tqdm=True, seed=seed,
        use_transformers_continuous_batching=paged, lr_scheduler_type="constant", shuffle_dataset=False, weight_decay=0.0,
        generation_kwargs={"min_new_tokens": FORCED} if forced else None,
    )  # fmt: skip
    return trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32", use_safetensors=True), processing_class=tokenizer, args=args,
        train_dataset=Dataset.from_list(prompts), reward_funcs=reward, callbacks=[callback],
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


def one_side(side: str, forced: bool, updates: int, threads: int, each=None) -> list[dict]:
    """Updates of one side: "ours", "trl" or "trl, paged". each(its numbers) is called after every one, its time not counted."""
    torch.set_num_threads(threads)
    seen: list[dict] = []
    if side == "ours":
        parallel.start()
        ours = Ours(forced)
        for _ in range(updates):
            seen.append(ours.update())
            each and each(seen[-1])
        return seen

    def reward(completions, completion_ids, **_):
        seen.append({"tokens": sum(map(len, completion_ids))})
        return [coin(1, 64 * len(seen) + i) for i in range(len(completions))]

    def done(seconds):
        seen[-1]["seconds"] = seconds
        each and each(seen[-1])

    trl_trainer(forced, side == "trl, paged", updates, timed(done), reward).train()
    return seen


# ------------------------------------------------------------------------------------------------ sampling
def prompts_of(policy: Policy) -> list[list[int]]:
    return [prompt_ids(policy, LETTERS().reset(BENCH_SEEDS + i), None, True) for i in range(TASKS)]


def sampling(side: str, forced: bool, threads: int, part: int = 0, parts: int = 1):
    """A function that samples K replies to each prompt of this part, with the log-prob of every token where the library gives them,
    and returns how many tokens."""
    torch.set_num_threads(threads)
    policy, limit = load_policy(str(PICO), 0, 64, "cpu"), FORCED if forced else LONGEST
    prompts, stops, turn = prompts_of(policy)[part::parts], sorted(policy.stop_ids), iter(range(10**9))
    if side == "ours":
        sampler = TorchSampler(replace(policy, stop_ids=frozenset([-1])) if forced else policy)

        def ours():
            n = next(turn)
            samples = sampler.sample(prompts, K, limit, 1.0, [[(n, g, i) for i in range(K)] for g in range(part, TASKS, parts)])
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
        "max_new_tokens": limit, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
        "pad_token_id": policy.tokenizer.pad_token_id, "eos_token_id": -1 if forced else stops,  # -1: never
    }  # fmt: skip
    many = [p for p in prompts for _ in range(K)]
    if side == "generate_batch":
        from transformers import ContinuousBatchingConfig

        room = ContinuousBatchingConfig(max_memory_percent=0.1)  # its default takes 90% of the machine's memory, and is killed for it
        return lambda: sum(len(o.generated_tokens) for o in policy.lm.generate_batch(many, generation_config=GenerationConfig(**how),
                                                                                     continuous_batching_config=room,
                                                                                     progress_bar=False).values())  # fmt: skip
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


# ------------------------------------------------------------------------------------------------ taking turns
class Other:
    """Processes that work when they are asked, answer `DONE seconds tokens`, and are stopped (SIGSTOP) while it is not their turn: some
    libraries spin while they wait. One process runs each of `codes`; ranks: they train together."""

    def __init__(self, codes: list[str], threads: int, ranks: bool = False):
        self.codes, self.processes, self.ended = codes, [], []
        with socket.create_server(("localhost", 0)) as free:
            meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(len(codes))}
        for i, code in enumerate(codes):
            env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            if ranks:
                env |= {"RANK": str(i), "LOCAL_RANK": str(i), **meeting}
            self.processes.append(subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env))  # fmt: skip

    def answer(self) -> tuple[float, float]:
        """Let them go; the seconds of the slowest, and the tokens of all."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            with suppress(BrokenPipeError):  # it has ended, which is told below
                process.stdin.write("go\n")
                process.stdin.flush()
        with ThreadPoolExecutor(len(self.processes)) as pool:
            lines = list(pool.map(self.next_answer, range(len(self.processes))))
        if self.ended:
            raise SystemExit(f"a side has ended; run it alone to see why: yes | python -c {shlex.quote(self.ended[0])}")
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)
        _, seconds, tokens = zip(*(line.split()[:3] for line in lines))
        return max(map(float, seconds)), sum(map(float, tokens))

    def next_answer(self, i: int) -> str | None:
        """The next answer of a process. If it has ended all are killed, for a rank would wait hours for the other."""
        line = next((line for line in self.processes[i].stdout if line.startswith("DONE")), None)
        if line is None:
            self.ended.append(self.codes[i])  # first the one that ended by itself
            for process in self.processes:
                process.kill()
        return line

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()


def trainers(side: str, forced: bool, updates: int, threads: int, n: int = 1) -> Other:
    """A side that trains, as n processes of so many threads each."""
    return Other([f"from lab.speed.sides import pace; pace({side!r}, {forced}, {updates}, {threads})"] * n, threads, ranks=n > 1)


def samplers(side: str, forced: bool, threads: int, n: int = 1) -> Other:
    """A side that samples, as n processes; each has its part of the prompts."""
    code = "from lab.speed.sides import serve; serve({!r}, {}, {}, {}, {})"
    return Other([code.format(side, forced, threads, i, n) for i in range(n)], threads)


def pace(side: str, forced: bool, updates: int, threads: int) -> None:
    """One side in a process of its own: for each line in, an update and a line `DONE seconds tokens`."""
    out = sys.stdout  # where ranks meet, fast/parallel.py silences all but the first

    def each(row: dict) -> None:
        print("DONE", row["seconds"], row["tokens"], file=out, flush=True)
        sys.stdin.readline()

    sys.stdin.readline()
    one_side(side, forced, updates, threads, each)


def serve(side: str, forced: bool, threads: int, part: int, parts: int) -> None:
    """One side in a process of its own, because vLLM takes over the threads of its process: a line in, `DONE seconds tokens` out."""
    run = sampling(side, forced, threads, part, parts)
    for _ in sys.stdin:
        start = time.perf_counter()
        tokens = run()
        print("DONE", time.perf_counter() - start, tokens, flush=True)
