"""Speed on a card: how near to what the card can do, and how far ahead of the usual way. Random weights in the shapes of Qwen3 (lab/speed/memory.py).

    python -m lab.speed.bench_gpu decode --model Qwen3-4B          # 64 rows: our sampler, vLLM and model.generate beside the limit of the memory
    python -m lab.speed.bench_gpu train --model Qwen3-4B           # a LoRA step, ours and TRL's, and how much of the card's arithmetic it uses
    python -m lab.speed.bench_gpu memory --row 4b-full-fits        # the peaks of evaluation, rollout and update of a row of results/bench/memory.md

Sides take turns in one run. The limits are measured on the same card in the same run, a copy for its memory and a matrix product for its arithmetic,
because a data sheet's figures are reached by nothing. vLLM and TRL take part where they are installed (requirements/gpu.txt, requirements/peers.txt).

No card has been at hand so far: this file has been run on a CPU only, tiny (tests/test_bench_gpu.py), and nothing of it stands in results/.
"""

import gc
import importlib.util
import json
import statistics
import tempfile
import time
from functools import partial
from threading import Event, Thread
from types import SimpleNamespace

import torch
import tyro
from tqdm import tqdm

from fast.sampler import TorchSampler
from lab.common import read_json, write_json
from lab.speed import memory as plans
from lab.speed.bench import learn, rows_of, save, table, versions
from policy import PICO, Policy, attach_lora

STUB = SimpleNamespace(pad_token_id=0)  # nothing here reads or writes text


def random_policy(config: dict, rank: int, device: str) -> Policy:
    """Random weights in this shape, in the formats of policy.load_policy: bfloat16 where a card holds them frozen, adapters in float32."""
    dtype, before = torch.bfloat16 if device != "cpu" and rank else torch.float32, torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)  # made in it: 30 billion float32 weights would not fit on their way to bfloat16
    try:
        with torch.device(device):
            model = plans.build(config, rank, dtype)
    finally:
        torch.set_default_dtype(before)
    policy = Policy(model.eval(), STUB, frozenset([-1]), "random", rank, torch.device(device))
    policy.lm.generation_config.eos_token_id = None
    return policy


def seconds(work, device: str) -> float:
    """Of one call of work, until the card has done it."""
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------ limits
def bandwidth(device: str, size: int = 2**30) -> float:
    """Bytes a second that the memory moves: a copy of `size` bytes reads and writes each once. Best of five."""
    a = torch.empty(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * size / min(seconds(lambda: b.copy_(a), device) for _ in range(6))


def arithmetic(device: str, n: int = 8192) -> float:
    """Floating-point operations a second of a bfloat16 matrix product [n, n] x [n, n]. Best of five."""
    a = torch.randn(n, n, dtype=torch.bfloat16, device=device)
    return 2 * n**3 / min(seconds(lambda: a @ a, device) for _ in range(6))


def step_bytes(config: dict, rows: int, prompts: int, prompt_tokens: int, replies: int, each: int) -> float:
    """The least that a decoding step has to read, on average over `replies` steps: weights, a prompt's keys and values once, each row's
    own. each: bytes a number. Of experts only those count that some row is sent to, if rows choose at random. An untied embedding is looked
    up, not read."""
    with torch.device("meta"):
        named = list(plans.build(config, 0).named_parameters())
    count = lambda *words: sum(p.numel() for name, p in named if any(word in name for word in words))
    weights, experts = count(""), count("experts.")
    if not config["tie_word_embeddings"]:
        weights -= count("embed_tokens")
    if experts:
        weights -= experts * (1 - config["num_experts_per_tok"] / config["num_experts"]) ** rows
    token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return each * (weights + token * (prompts * prompt_tokens + rows * replies / 2))


def step_flops(config: dict, rank: int, rows: int, length: int, trained: int) -> float:
    """Multiplications and additions of one training step that the mathematics asks for; what is computed twice to save memory does not
    count. A matrix of n numbers costs a token 2n forward, 2n for the gradient of its input, and 2n for its own where it learns. The head
    works on the trained tokens alone; attention sees half of the length on average."""
    with torch.device("meta"):
        named = [(name, p.numel()) for name, p in plans.build(config, rank).named_parameters() if p.ndim > 1]
    chosen = config.get("num_experts_per_tok", 0) / config.get("num_experts", 1)  # of the experts a token meets these
    frozen = sum(n * (chosen if "experts." in name else 1) for name, n in named if ".layers." in name and "lora_" not in name)
    lora, head = sum(n for name, n in named if "lora_" in name), config["vocab_size"] * config["hidden_size"]
    linear = rows * length * (frozen * (6 if rank == 0 else 4) + 6 * lora) + trained * head * (6 if rank == 0 else 4)
    wide = config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"]
    return linear + rows * length * 3 * 2 * 2 * wide * length / 2  # two products forward, four backward


# ------------------------------------------------------------------------------------------------ decode
def decode(
    model: str = "Qwen3-4B", rows: int = 64, prompts: int = 8, prompt_tokens: int = 192, replies: int = 256, rounds: int = 3, device: str = "cuda"
) -> None:  # fmt: skip
    """Tokens a second, every reply `replies` long, beside what the card's memory allows."""
    config = plans.MODELS[model]
    policy, k = random_policy(config, 4, device), rows // prompts  # a small adapter: vLLM and our sampler fold or add one, as in a run
    ids = torch.randint(0, config["vocab_size"], (prompts, prompt_tokens)).tolist()
    seeds = [[(0, g, i) for i in range(k)] for g in range(prompts)]
    sides = {"model.generate": lambda: generate(policy, ids, k, replies)}
    if "num_experts" not in config:  # there it would be the plain decoder, which is model.generate once more
        own = TorchSampler(policy)
        sides["ours"] = lambda: own.sample(ids, k, replies, 1.0, seeds)
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("vllm"):
            from fast.vllm_engine import VllmSampler

            served = on_disk(policy, folder)
            engine = VllmSampler(served, 0.5)
            sides["vllm"] = lambda: engine.sample(ids, k, replies, 1.0, seeds)
        rates = {side: [] for side in sides}
        for _ in tqdm(range(rounds + 1), desc=f"{model}, {rows} rows"):  # the first one warms up
            for side, work in sides.items():
                rates[side].append(rows * replies / seconds(work, device))
    element = 4 if device == "cpu" else 2
    limit = rows * bandwidth(device) / step_bytes(config, rows, prompts, prompt_tokens, replies, element)
    found = table({side: values[1:] for side, values in rates.items()}, "model.generate")
    for side in found.values():
        side["share_of_limit"] = round(side["tokens_per_second"] / limit, 3)
    command = f"python -m lab.speed.bench_gpu decode --model {model} --rows {rows} --prompts {prompts} --prompt-tokens {prompt_tokens} --replies {replies} --rounds {rounds}"
    save(f"gpu-decode-{model}", {"command": command, **card(device), "limit_tokens_per_second": round(limit), **found})


def generate(policy: Policy, ids: list[list[int]], k: int, replies: int) -> torch.Tensor:
    many = torch.tensor(ids, device=policy.device).repeat_interleave(k, 0)  # [rows, P]
    with torch.inference_mode():
        return policy.lm.generate(many, attention_mask=torch.ones_like(many), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=replies,
                                  min_new_tokens=replies, pad_token_id=0)  # fmt: skip


def on_disk(policy: Policy, folder: str) -> Policy:
    """The same policy with its base weights saved, for vLLM loads them from a folder."""
    base = policy.model.unload() if policy.lora_rank else policy.lm  # LoRA comes off, its weights stay as they are: random
    base.save_pretrained(folder)
    model = attach_lora(base, policy.lora_rank, 2 * policy.lora_rank) if policy.lora_rank else base
    base.name_or_path = folder
    return Policy(model.eval(), STUB, frozenset(), policy.name, policy.lora_rank, policy.device)  # vLLM knows no token -1


# ------------------------------------------------------------------------------------------------ train
def train(
    model: str = "Qwen3-4B", lengths: tuple[int, ...] = (2048, 4096, 8192), tokens: int = 32_768, rank: int = 32, rounds: int = 3, device: str = "cuda"
) -> None:  # fmt: skip
    """Seconds of one step on `tokens` tokens in rows of equal length, and which share of the card's arithmetic that is; TRL's step on the same rows."""
    config, peak = plans.MODELS[model], arithmetic(device, 8192 if device != "cpu" else 512)
    micro = max(8192, max(lengths)) if device != "cpu" else tokens
    policy = random_policy(config, rank, device)
    sides = {"ours": our_step(policy, micro)}
    if importlib.util.find_spec("trl"):
        sides["trl"] = trl_step(config, rank, device, micro)
    result = {"command": f"python -m lab.speed.bench_gpu train --model {model} --lengths {' '.join(map(str, lengths))} --tokens {tokens} --rank {rank} --rounds {rounds}",
              **card(device), "card_tflops": round(peak / 1e12, 1), "lengths": {}}  # fmt: skip
    for length in tqdm(lengths, desc=model):
        rows = max(2, tokens // length // 2 * 2)
        groups = rows_of([length] * (rows // 2), config["vocab_size"])
        flops, spent = step_flops(config, rank, rows, length, rows * (length - 8)), {side: [] for side in sides}
        for _ in range(rounds + 1):
            for side, step in sides.items():
                try:
                    spent[side].append(seconds(partial(step, groups), device))
                except torch.OutOfMemoryError:
                    spent[side].append(float("inf"))
                gc.collect()
        medians = {side: statistics.median(times[1:]) for side, times in spent.items()}
        result["lengths"][length] = {
            side: {"seconds": round(s, 3), "tokens_per_second": round(rows * length / s), "mfu": round(flops / s / peak, 3)}
            if s < float("inf") else "out of memory" for side, s in medians.items()
        }  # fmt: skip
        if "trl" in medians:
            result["lengths"][length]["times_as_fast_as_trl"] = round(medians["trl"] / medians["ours"], 2)
    save(f"gpu-train-{model}", result)


def our_step(policy: Policy, micro: int):
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-12, weight_decay=0.0)
    return lambda groups: learn(policy, optimizer, groups, len(groups[0][0].token_ids), micro)


def trl_step(config: dict, rank: int, device: str, micro: int):
    """TRL's own loss on the same rows, in pieces of as many tokens as ours, without checkpointing, with the autocast that its trainer would open."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer

    lm = random_policy(config, 0, device).lm.to(torch.float32 if device == "cpu" else torch.bfloat16)
    args = trl.GRPOConfig(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=2, num_generations=2, use_cpu=device == "cpu", bf16=device != "cpu",
                          gradient_checkpointing=False, report_to="none", beta=0.0, loss_type="grpo")  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=lm, args=args, processing_class=AutoTokenizer.from_pretrained(PICO), train_dataset=Dataset.from_list([{"prompt": "?"}] * 4),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    trainer.model.to(device).train()
    trainer.current_gradient_accumulation_steps = 1  # its train() would say so
    learn = [p for p in trainer.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learn, lr=1e-12, weight_decay=0.0)

    def step(groups) -> None:
        rows = [e for group in groups for e in group]
        ids = torch.tensor([e.token_ids for e in rows], device=device)  # [N, T]
        paid = torch.tensor([e.reward for e in rows], device=device)
        each = max(1, micro // ids.shape[1])
        for i in range(0, len(rows), each):
            some = ids[i : i + each]
            inputs = {"prompt_ids": some[:, :8], "completion_ids": some[:, 8:], "advantages": 2 * paid[i : i + each] - 1,
                      "num_items_in_batch": torch.tensor(ids[:, 8:].numel(), device=device)}  # fmt: skip
            inputs |= {name.replace("ids", "mask"): torch.ones_like(inputs[name]) for name in ("prompt_ids", "completion_ids")}
            with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
                loss = trainer.compute_loss(trainer.model, inputs)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(learn, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


# ------------------------------------------------------------------------------------------------ memory
def memory(row: str = "4b-full-fits") -> None:
    """Peaks in GiB, into results/bench/memory_measured.json, where `python -m lab.speed.memory` finds them. On the card that the row is about."""
    if not torch.cuda.is_available():
        raise SystemExit("lab.speed.bench_gpu memory measures a card, and there is none here; `python -m lab.speed.memory` computes it")
    plan = plans.cases().get(row)
    if plan is None:
        fit = ", ".join(key for key, p in plans.cases().items() if p)
        raise SystemExit(f"--row {row}: no such row, or no settings that fit; there are {fit}")
    s, config = plan.setting, plans.MODELS[plan.setting.model]
    with tempfile.TemporaryDirectory() as folder:
        policy = random_policy(config, s.rank, "cuda")
        if s.checkpointing:
            policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
        if s.engine == "vllm":
            from fast.vllm_engine import VllmSampler

            policy = on_disk(policy, folder)
            sampler = VllmSampler(policy, s.share)
        else:
            sampler = TorchSampler(policy)
        step = our_step(policy, s.micro_tokens)
        length = plans.PROMPT + s.max_tokens
        ask = lambda prompts, k: sampler.sample(torch.randint(0, config["vocab_size"], (prompts, plans.PROMPT)).tolist(), k, s.max_tokens, 1.0,
                                                [[(g, i) for i in range(k)] for g in range(prompts)])  # fmt: skip
        groups = rows_of([length] * (s.num_tasks * s.k // 2), config["vocab_size"])

        def trained():
            with sampler.asleep():
                step(groups)

        trained()  # the moments are made
        peaks = {"evaluation": most(lambda: ask(s.eval_n, 1)), "rollout": most(lambda: ask(s.num_tasks, s.k)), "update": most(trained)}
    file = plans.OUT / "memory_measured.json"
    measured = read_json(file) if file.exists() else {}
    measured[row] = {name: round(size / plans.GIB, 1) for name, size in peaks.items()} | card("cuda")
    write_json(file, measured)
    print(json.dumps({row: measured[row]}, indent=1))


def most(work) -> float:
    """Bytes of the card that are taken at most while work runs, by whomever: vLLM's are not in torch's own account. Looked at 200 times a second."""
    seen, done = [], Event()

    def watch() -> None:
        while not done.wait(0.005):
            free, whole = torch.cuda.mem_get_info()
            seen.append(whole - free)

    gc.collect()
    torch.cuda.empty_cache()  # what torch keeps for later does not count
    thread = Thread(target=watch)
    thread.start()
    try:
        work()
        torch.cuda.synchronize()
    finally:
        done.set()
        thread.join()
    return max(seen)


def card(device: str) -> dict:
    name = {} if device == "cpu" else {"card": torch.cuda.get_device_name()}
    return versions(torch.get_num_threads()) | name


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"decode": decode, "train": train, "memory": memory})
