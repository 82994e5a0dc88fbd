"""Everything that only a card can show, in one command: stages of a few minutes, each of which writes its own JSON as soon as it is done.

    python -m lab.speed.card                       # all stages, into results/card/; a stage whose JSON is there is skipped
    python -m lab.speed.card --only decode lora    # some of them
    python -m lab.speed.card --page                # results/card/README.md again from the JSON that is there

    machine   what the card reaches: matrix products, copies; what is installed                   1 minute
    same      CPU and card: the same greedy tokens, log-probs within bfloat16's spread              1
    letters   train.py with pico_base on the card: does it learn?                                   5
    decode    Qwen3-4B, 1, 64 and 256 rows: share of the memory's bandwidth, beside model.generate  4
    lora      a LoRA step on rows of 2,048 and 8,192 tokens: share of the card's arithmetic, TRL     3
    full      the same with all weights                                                              4
    update    whole updates, LoRA and all weights: seconds, and the peak of memory beside the plan   6

Minutes are estimates for an H100: no card has been at hand so far. This file has been run on a CPU only, tiny (tests/test_card.py).

Weights are drawn at random, in the shapes of lab/speed/memory.py, except pico_base's: nothing is fetched. It needs torch, transformers,
numpy, tyro, and for `letters` what train.py needs; requirements/card.txt says what to carry to a machine without a network. What cannot run
there is left out, and said: without peft no `lora` (and `letters` trains all weights), without TRL or vLLM their columns are missing. Each
stage is a process of its own, so that what one leaves on the card, or breaks, is no matter to the next.

Not here: a step of decoding as a CUDA graph. Where a step waits for the start of its operations and not for the memory, a graph would pay;
`decode` at one row will say whether it does, and it should be written beside a card that can be asked.
"""

import argparse
import gc
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import torch

import metrics
import settings
from env_letters import Letters
from fast.logprobs import token_logprobs
from fast.memory import out_of_memory
from fast.sampler import TorchSampler
from lab.common import RESULTS, ROOT, read_json, read_lines, table, write_json
from lab.speed import limits
from lab.speed import memory as plans
from lab.speed.bench import learn, rows_of, versions
from policy import PICO, Policy, adam, attach_lora, checkpoint_activations, load_policy
from rollout import Episode, prompt_ids

OUT = RESULTS / "card"
FITS = 79.1  # GiB that a card of 80 GB has, as torch reports them (lab/speed/memory.py)
GOALS = {"decode": 0.6, "mfu": 0.5, "trl": 2.5}  # share of the bandwidth with 64 rows; of the arithmetic; times as fast
OPTIONAL = ("peft", "trl", "vllm", "statsmodels", "wandb")
GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """What is measured. TINY is for the tests: seconds on a CPU."""

    device: str = "cuda"
    model: str = "Qwen3-4B"
    rows: tuple[int, ...] = (1, 64, 256)  # decoded at once
    prompt: int = 192  # tokens
    reply: int = 256
    rounds: int = 3
    lengths: tuple[int, ...] = (2048, 8192)  # of the rows of a training step
    tokens: int = 32_768  # of a training step
    updates: int = 100  # of letters
    letters: tuple[tuple[str, object], ...] = (("eval_n", 256), ("eval_other_tiers", False))
    greedy: tuple[int, int] = (16, 128)  # prompts, tokens
    plans: tuple[str, ...] = ("4b-lora-torch", "4b-full-torch")  # rows of lab/speed/memory.py
    batch: tuple[int, int, int] = (8, 16, 2048)  # tasks, samples, tokens of a reply in a whole update
    micro: int = 8192


TINY = Sizes("cpu", "tiny", (1, 4), 12, 6, 1, (32, 64), 256, 1,
             (("num_tasks", 2), ("k", 2), ("max_tokens", 16), ("sft_steps", 1), ("sft_examples", 2), ("sft_batch", 2), ("eval_n", 2),
              ("eval_other_tiers", False)),
             (2, 8), ("tiny-lora", "tiny-full"), (2, 2, 8), 64)  # fmt: skip


def has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# ------------------------------------------------------------------------------------------------ models of random weights
def random_policy(config: dict, rank: int, device: str, dtype=None):
    """Random weights in this shape, in the formats of policy.load_policy: bfloat16 where a card holds them frozen, adapters in float32.
    dtype: of all weights, whatever a run would choose."""
    dtype, before = dtype or (torch.bfloat16 if device != "cpu" and rank else torch.float32), torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)  # made in it: 30 billion float32 weights would not fit on their way to bfloat16
    try:
        with torch.device(device):
            model = plans.build(config, rank, dtype)
    finally:
        torch.set_default_dtype(before)
    stub = SimpleNamespace(pad_token_id=0)  # nothing here reads or writes text
    policy = Policy(model.eval(), stub, frozenset([-1]), "random", rank, torch.device(device))
    policy.lm.generation_config.eos_token_id = None
    return policy


def on_disk(policy, folder: str):
    """The same policy with its base weights saved, for vLLM loads them from a folder."""
    base = policy.model.unload() if policy.lora_rank else policy.lm  # LoRA comes off, its weights stay as they are: random
    base.save_pretrained(folder)
    model = attach_lora(base, policy.lora_rank, 2 * policy.lora_rank) if policy.lora_rank else base
    base.name_or_path = folder
    return replace(policy, model=model.eval(), stop_ids=frozenset())  # vLLM knows no token -1


def config_of(s: Sizes) -> dict:
    return plans.MODELS[s.model]


def the_machine(s: Sizes):
    return limits.measure(s.device, torch.float32 if s.device == "cpu" else torch.bfloat16)


# ------------------------------------------------------------------------------------------------ stages
def machine(s: Sizes) -> dict:
    """Peaks in teraflops and bytes a second, measured: a data sheet's figures are reached by nothing."""
    peaks = {str(d).removeprefix("torch."): limits.arithmetic(s.device, d) for d in (torch.float32, torch.bfloat16)}
    found = the_machine(s)
    total = torch.cuda.get_device_properties(0).total_memory / GIB if s.device != "cpu" else None
    return {
        "tflops": {form: {way: round(rate / 1e12, 2) for way, rate in ways.items()} for form, ways in peaks.items()},
        "gigabytes_per_second": {f"{size / 2**20:g} MB": round(rate / 1e9, 1) for size, rate in found.copies.items()},
        "memory_gib": total and round(total, 1),
        "installed": {name: has(name) for name in OPTIONAL},
    }


def same(s: Sizes) -> dict:
    """pico_base on the CPU in float32 is the reference. The card's float32 has to give its greedy tokens; its bfloat16 may be off by as
    much as the CPU's own is."""
    count, length = s.greedy
    home = load_policy(str(PICO), 0, 64, "cpu")
    prompts = [prompt_ids(home, Letters(6, "binary", True, "states").reset(settings.DEV_SEEDS + i), None, True) for i in range(count)]
    greedy = lambda policy: TorchSampler(policy).sample(prompts, 1, length, 0.0, [[(0, i)] for i in range(count)])
    replies = [group[0].token_ids for group in greedy(home)]
    rows = [prompt + reply for prompt, reply in zip(prompts, replies)]
    widest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (widest - len(row)) for row in rows])  # [N, T]
    mask = torch.tensor([[len(p) - 1 <= t < len(row) - 1 for t in range(widest - 1)] for p, row in zip(prompts, rows)])  # [N, T-1]

    def logprobs(device: str, dtype) -> torch.Tensor:
        lm = load_policy(str(PICO), 0, 64, device).lm.to(dtype)
        with torch.no_grad():
            logits = lm(input_ids=ids.to(device)).logits[:, :-1].float().log_softmax(-1).cpu()
        return logits.gather(-1, ids[:, 1:, None])[..., 0][mask]

    exact = logprobs("cpu", torch.float32)
    gap = lambda other: {"mean": (other - exact).abs().mean().item(), "most": (other - exact).abs().max().item()}
    card = load_policy(str(PICO), 0, 64, s.device)
    again = [group[0].token_ids for group in greedy(card)]
    with torch.no_grad():
        trained, _ = token_logprobs(card, ids.to(s.device), mask.to(s.device))
    gaps = {
        "cpu bfloat16": gap(logprobs("cpu", torch.bfloat16)),
        "card float32": gap(logprobs(s.device, torch.float32)),
        "card bfloat16": gap(logprobs(s.device, torch.bfloat16)),
        "card, as training computes them": gap(trained.float().cpu()),
    }
    equal = sum(a == b for a, b in zip(replies, again))
    return {"replies": count, "equal_replies": equal,
            "gap_in_nats": {name: {k: round(v, 6) for k, v in g.items()} for name, g in gaps.items()},
            "over_the_cpus_spread": round(gaps["card bfloat16"]["mean"] / max(1e-12, gaps["cpu bfloat16"]["mean"]), 2)}  # fmt: skip


def letters(s: Sizes) -> dict:
    """train.py itself. Without peft all weights learn, at a tenth of the learning rates,
    as settings.ALL_WEIGHTS has it for large models."""
    from train import train

    rank = 32 if has("peft") else 0
    rates = {} if rank else {"lr": 3e-5, "sft_lr": 1e-5}
    with tempfile.TemporaryDirectory() as runs:
        cfg = settings.Config(env="letters", model="pico_base", device=s.device, engine="torch", updates=s.updates, lora_rank=rank,
                              wandb=False, runs=runs, name="card", **rates, **dict(s.letters))  # fmt: skip
        settings.check(cfg)
        folder = train(cfg)
        lines, evals = (read_lines(folder / f"{name}.jsonl") for name in ("metrics", "evals"))
    stages = {e["stage"]: e["exact"] for e in evals if e["trained"]}
    share = lambda values: {
        name: round(getattr(metrics.mean(values), at), 4) for name, at in (("share", "mean"), ("low", "low"), ("high", "high"))
    }
    seconds = [sum(v for name, v in line.items() if name.startswith("seconds_")) for line in lines[1:] or lines]
    return {"rank": rank, "updates": len(lines), "after_sft": share(stages["after_sft"]), "final": share(stages["final"]),
            "n": len(stages["final"]), "seconds_per_update": round(sum(seconds) / len(seconds), 3)}  # fmt: skip


def decode(s: Sizes) -> dict:
    """Tokens a second of replies that never end, and which share of the memory's bandwidth that is: bytes that a step has to read, over
    those that a copy moves in the same time."""
    policy = random_policy(config_of(s), 0, s.device, torch.float32 if s.device == "cpu" else torch.bfloat16)
    sampler = TorchSampler(policy)
    with tempfile.TemporaryDirectory() as folder:
        engine = None
        if has("vllm") and has("peft"):
            from fast.vllm_engine import VllmSampler

            engine = VllmSampler(on_disk(random_policy(config_of(s), 4, s.device), folder), 0.3)
        return {"decoder": sampler.decoder.why, "rows": {rows: decode_rows(s, policy, sampler, engine, rows) for rows in s.rows}}


def decode_rows(s: Sizes, policy, sampler, engine, rows: int) -> dict[str, dict]:
    """All sides in turn; {side: its row of the table}."""
    config, prompts, k = config_of(s), max(1, rows // 16), min(16, rows)
    ids = torch.randint(0, config["vocab_size"], (prompts, s.prompt)).tolist()
    seeds = [[(0, g, i) for i in range(k)] for g in range(prompts)]
    sides = {"ours": lambda: sampler.sample(ids, k, s.reply, 1.0, seeds), "model.generate": lambda: generate(policy, ids, k, s.reply)}
    if engine:
        sides["vllm"] = lambda: engine.sample(ids, k, s.reply, 1.0, seeds)
    times: dict = {side: [] for side in sides}
    for _ in range(s.rounds + 1):  # the first one warms up
        for side, work in sides.items():
            sampler.decoder.forget()  # its cache is not to be in another's way
            times[side].append(limits.seconds(work, s.device))
    work = limits.sampling(limits.shape_of(config), blank(prompts, k, s.prompt, s.reply), policy.lm.dtype.itemsize)
    found = {side: limits.of_limit(the_machine(s), work, seconds[1:], rows * s.reply) for side, seconds in times.items()}
    for side in found.values():
        side["of_bandwidth"] = round(side["memory_seconds"] / side["seconds"]["median"], 4)
        side["milliseconds_per_step"] = round(1000 * side["seconds"]["median"] / s.reply, 3)
    return found


def blank(prompts: int, k: int, prompt: int, reply: int) -> list:
    """Episodes to count with: groups of one prompt and k replies."""
    mask = [False] * prompt + [True] * reply
    return [[Episode(g, g, [0] * len(mask), mask, [])] * k for g in range(prompts)]


def generate(policy, ids: list[list[int]], k: int, reply: int) -> None:
    many = torch.tensor(ids, device=policy.device).repeat_interleave(k, 0)  # [rows, P]
    with torch.inference_mode():
        policy.lm.generate(many, attention_mask=torch.ones_like(many), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                           max_new_tokens=reply, min_new_tokens=reply, pad_token_id=0)  # fmt: skip


def steps(s: Sizes, rank: int) -> dict:
    """Seconds of one training step on rows of equal length, which share of the card's arithmetic that is, the peak of memory; TRL's step on
    the same rows."""
    config, peak = config_of(s), the_machine(s)
    policy = random_policy(config, rank, s.device)
    if rank == 0 and s.device != "cpu":  # by the plan all weights of a 4B leave no room for activations
        checkpoint_activations(policy)
    sides, shape = {"ours": our_step(policy, max(s.micro, *s.lengths))}, limits.shape_of(config, rank)
    if rank and has("trl"):  # all weights in float32 would not fit twice
        sides["trl"] = trl_step(config, rank, s.device, max(s.micro, *s.lengths))
    found: dict = {"peak_tflops": round(peak.flops / 1e12, 1), "checkpointing": policy.checkpointing, "lengths": {}}
    for length in s.lengths:
        rows = max(2, s.tokens // length // 2 * 2)
        groups, spent, most_taken = rows_of([length] * (rows // 2), config["vocab_size"]), {side: [] for side in sides}, {}
        for n in range(s.rounds + 1):
            for side, step in sides.items():
                try:
                    with peak_memory(s.device) if n == 0 else nullcontext({}) as taken:
                        spent[side].append(limits.seconds(partial(step, groups), s.device))
                    most_taken |= {side: taken["gib"]} if taken else {}
                except RuntimeError as error:
                    if not out_of_memory(error):
                        raise
                    spent[side].append(float("inf"))
                gc.collect()
        work = limits.training(shape, groups, 4 if s.device == "cpu" else 2, rank == 0)
        here: dict = {}
        for side, seconds in spent.items():
            if max(seconds) == float("inf"):
                here[side] = "out of memory"
                continue
            here[side] = limits.of_limit(peak, work, seconds[1:], rows * length) | {"peak_gib": most_taken[side]}
            here[side]["mfu"] = round(here[side]["arithmetic_seconds"] / here[side]["seconds"]["median"], 4)
        if isinstance(here.get("trl"), dict) and isinstance(here["ours"], dict):
            here["times_as_fast_as_trl"] = round(here["trl"]["seconds"]["median"] / here["ours"]["seconds"]["median"], 2)
        found["lengths"][length] = here
    return found


def our_step(policy, micro: int) -> Callable:
    optimizer = adam(policy, 1e-12)

    def step(groups: list) -> None:
        with policy.learning():
            learn(policy, optimizer, groups, len(groups[0][0].token_ids), micro)

    return step


def trl_step(config: dict, rank: int, device: str, micro: int) -> Callable:
    """TRL's own loss on the same rows, in pieces of as many tokens as ours, without checkpointing,
    with the autocast that its trainer would open."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer

    lm = random_policy(config, 0, device, torch.float32 if device == "cpu" else torch.bfloat16).lm
    args = trl.GRPOConfig(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=2, num_generations=2, use_cpu=device == "cpu",
                          bf16=device != "cpu", gradient_checkpointing=False, report_to="none", beta=0.0, loss_type="grpo")  # fmt: skip
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


def whole_update(s: Sizes) -> dict:
    """One update of each row of the plan: sample, learn; seconds of both, and the most memory in evaluation,
    rollout and update beside what was computed."""
    return {name: one_update(s, name) for name in s.plans if "full" in name or has("peft")}


def one_update(s: Sizes, name: str) -> dict:
    setting = plans.ASKED[name]
    full = setting.rank == 0
    plan = plans.plan(replace(setting, checkpointing=full))
    (tasks, k, length), config = s.batch, config_of(s)
    out: dict = {"plan_gib": {phase: round(size / GIB, 1) for phase, size in plan.phases.items()}, "checkpointing": full}
    doing = "loading"
    try:
        policy = random_policy(config, setting.rank, s.device)
        if full:
            checkpoint_activations(policy)
        sampler, step = TorchSampler(policy), our_step(policy, s.micro)
        ids = torch.randint(0, config["vocab_size"], (setting.eval_n if s.device != "cpu" else 2, s.prompt)).tolist()

        def sample(prompts: list, k: int) -> list:
            return sampler.sample(prompts, k, length, 1.0, [[(g, i) for i in range(k)] for g in range(len(prompts))])

        def timed(work) -> tuple[float, float, object]:
            box: list = []
            with peak_memory(s.device) as taken:
                spent = limits.seconds(lambda: box.append(work()), s.device)
            return round(spent, 2), taken["gib"], box[0]

        groups: list = []

        def learn() -> None:
            with sampler.asleep():
                step(groups)

        peaks = out["peak_gib"] = {}
        doing = "sampling"
        out["rollout_seconds"], peaks["rollout"], samples = timed(lambda: sample(ids[:tasks], k))
        for g, (prompt, some) in enumerate(zip(ids, samples)):
            mask = [False] * len(prompt) + [True] * length
            groups.append(
                [Episode(g, g, prompt + e.token_ids, mask, [0.0] * len(prompt) + e.logprobs, 1, float(i % 2)) for i, e in enumerate(some)]
            )
        doing = "learning"
        learn()  # the moments are made
        out["train_seconds"], peaks["update"], _ = timed(learn)
        doing = "copying the weights"
        out["sync_seconds"], _, _ = timed(sampler.sync)
        out["seconds_per_update"] = round(out["rollout_seconds"] + out["train_seconds"] + out["sync_seconds"], 2)
        # An evaluation holds as much as its prompts and longest replies ask for, however short they are: here most tokens end one.
        doing, policy.stop_ids = "evaluating", frozenset(range(0, config["vocab_size"], 64))
        _, peaks["evaluation"], _ = timed(lambda: sample(ids, 1))
    except (torch.OutOfMemoryError, RuntimeError) as error:
        out["failed_while"] = f"{doing}: {str(error).splitlines()[0][:200]}"
    policy = sampler = step = groups = samples = None
    gc.collect()
    return out


@contextmanager
def peak_memory(device: str):
    """`with peak_memory(device) as taken:` then taken["gib"] is the most that was held meanwhile, by whomever: vLLM's is not in torch's own
    account. Looked at 200 times a second. On a CPU: this process."""

    def held() -> float:
        if device == "cpu":
            import psutil

            return psutil.Process().memory_info().rss
        free, whole = torch.cuda.mem_get_info()
        return whole - free

    def watch() -> None:
        while not done.wait(0.005):
            seen.append(held())

    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()  # what torch keeps for later does not count
    seen, taken, done = [held()], {}, Event()
    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        done.set()
        thread.join()
        taken["gib"] = round(max(*seen, held()) / GIB, 2)


STAGES: dict[str, tuple[Callable[[Sizes], dict], tuple[str, ...]]] = {  # what it does, what it cannot do without
    "machine": (machine, ()),
    "same": (same, ()),
    "letters": (letters, ()),
    "decode": (decode, ()),
    "lora": (partial(steps, rank=32), ("peft",)),
    "full": (partial(steps, rank=0), ()),
    "update": (whole_update, ()),
}


# ------------------------------------------------------------------------------------------------ running them
def run_stage(name: str, s: Sizes, out: Path) -> dict:
    """One stage, here. Writes and returns what it found, or why it found nothing."""
    work, needs = STAGES[name]
    missing = [package for package in needs if not has(package)]
    if missing:
        found = {"left_out": f"{', '.join(missing)} is not installed (requirements/card.txt)"}
    else:
        start = time.perf_counter()
        found = work(s)
        of_card = {} if s.device == "cpu" else {"card": torch.cuda.get_device_name()}
        found = {
            **versions(torch.get_num_threads()),
            **of_card,
            "sizes": asdict(s),
            "stage_seconds": round(time.perf_counter() - start, 1),
            **found,
        }
    found = {"command": f"python -m lab.speed.card --only {name}", **found}
    write_json(out / f"{name}.json", found)
    return found


def is_done(name: str, out: Path) -> bool:
    """Is there a result? A stage that was left out or broke is tried again."""
    file = out / f"{name}.json"
    return file.exists() and not {"left_out", "failed"} & read_json(file).keys()


def run_all(names: list[str], s: Sizes, out: Path, minutes: float) -> None:
    """Each stage in a process of its own, then the page."""
    for name in names:
        if is_done(name, out):
            print(f"{name}: there already, skipped ({out / name}.json; delete it to measure again)", flush=True)
            continue
        start = time.perf_counter()
        words = [sys.executable, "-m", "lab.speed.card", "--stage", name, "--out", str(out), *(["--tiny"] if s == TINY else [])]
        try:
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60 * minutes)
            why = (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else ""
        except subprocess.TimeoutExpired:
            why = f"not done after {minutes:g} minutes"
        if why:
            write_json(out / f"{name}.json", {"command": f"python -m lab.speed.card --only {name}", "failed": why})
        found = read_json(out / f"{name}.json")
        print(f"{name}: {found.get('failed') or found.get('left_out') or 'done'}, {time.perf_counter() - start:.0f} s", flush=True)
    write_page(out)


# ------------------------------------------------------------------------------------------------ the page
def figures(found: dict[str, dict]) -> list[tuple[str, str, str, bool | None]]:
    """What the stages found: (what, measured, goal, is it reached? None: there is no goal). found: {stage: its JSON}, done ones only."""
    rows: list[tuple[str, str, str, bool | None]] = []

    def add(what: str, measured: str, goal: str = "", reached: bool | None = None) -> None:
        rows.append((what, measured, goal, reached))

    if r := found.get("machine"):
        copy = list(r["gigabytes_per_second"].values())[-1]
        add("bfloat16 matrix product; largest copy", f"{max(r['tflops']['bfloat16'].values(), default=0):.0f} TFLOP/s; {copy:,.0f} GB/s")
    if r := found.get("same"):
        equal, most = r["equal_replies"], 2.0
        add("greedy replies that CPU and card share, float32", f"{equal} of {r['replies']}", "all", equal == r["replies"])
        what, off = "log-probs in bfloat16: the card's distance from float32, over the CPU's", r["over_the_cpus_spread"]
        add(what, f"{off:.2f}", f"at most {most:g}", off <= most)
    if r := found.get("letters"):
        share = lambda e: f"{100 * e['share']:.1f}% [{100 * e['low']:.1f}, {100 * e['high']:.1f}]"
        what = (
            f"letters, pico_base, {r['updates']} updates, {'LoRA ' + str(r['rank']) if r['rank'] else 'all weights'}: after SFT, after GRPO"
        )
        add(what, f"{share(r['after_sft'])}, {share(r['final'])}", "intervals apart", r["final"]["low"] > r["after_sft"]["high"])
        add("letters: seconds per update", f"{r['seconds_per_update']:.2f}")
    for count, sides in found.get("decode", {}).get("rows", {}).items():
        ours, goal = sides["ours"], GOALS["decode"] if int(count) == 64 else None
        text = f"{ours['of_bandwidth']:.0%} ({ours['tokens_per_second']:,} tokens per second, {ours['milliseconds_per_step']} ms a step)"
        what = f"decoding, {count} rows: share of the bandwidth"
        add(what, text, f"at least {goal:.0%}" if goal else "", ours["of_bandwidth"] >= goal if goal else None)
        for side in sides.keys() & {"model.generate", "vllm"}:
            add(f"decoding, {count} rows: times {side}", f"{sides[side]['seconds']['median'] / ours['seconds']['median']:.1f}")
    for stage, name in (("lora", "LoRA 32"), ("full", "all weights")):
        for length, sides in found.get(stage, {}).get("lengths", {}).items():
            what, ours, goal = f"training, {name}, rows of {int(length):,} tokens", sides["ours"], GOALS["mfu"]
            if isinstance(ours, str):
                add(f"{what}: MFU", ours, f"at least {goal:.0%}", False)
                continue
            text = f"{ours['mfu']:.0%} ({ours['tokens_per_second']:,} tokens per second, {ours['peak_gib']} GiB)"
            add(f"{what}: MFU", text, f"at least {goal:.0%}", ours["mfu"] >= goal)
            if times := sides.get("times_as_fast_as_trl"):
                add(f"{what}: times TRL", f"{times:.1f}", f"at least {GOALS['trl']}", times >= GOALS["trl"])
    for name, r in found.get("update", {}).items():
        if not isinstance(r, dict) or "plan_gib" not in r:
            continue
        if "failed_while" in r:
            add(f"a whole update, {name}", f"failed while {r['failed_while']}", "fits", False)
            continue
        add(
            f"a whole update, {name}: seconds",
            f"{r['seconds_per_update']} (sampling {r['rollout_seconds']}, learning {r['train_seconds']})",
        )
        text = "; ".join(f"{phase} {r['peak_gib'][phase]} ({gib})" for phase, gib in r["plan_gib"].items() if phase in r["peak_gib"])
        fits = max(r["peak_gib"].values()) < FITS if "full" in name else None
        add(f"{name}: peak of memory in GiB (by the plan)", text, f"below {FITS}" if "full" in name else "", fits)
    return rows


def page(out: Path) -> list[str]:
    """Lines of README.md: each figure beside its goal, and what was left out."""
    read = {name: read_json(out / f"{name}.json") for name in STAGES if (out / f"{name}.json").exists()}
    found = {name: r for name, r in read.items() if is_done(name, out)}
    verdict = {None: "", True: "reached", False: "**missed**"}
    body = [[what, measured, goal, verdict[reached]] for what, measured, goal, reached in figures(found)]
    some = next(iter(found.values()))
    lines = ["# On a card", "",
             f"{some.get('card', some['machine'])}, torch {some['torch']}, transformers {some['transformers']}. `python -m lab.speed.card` "
             "makes it again; weights are random, but for pico_base's.", "", *table(["what", "measured", "goal", ""], body),
             ""]  # fmt: skip
    why = lambda r: r.get("left_out") or r.get("failed") or "not run"
    missing = [f"* `{name}`: {why(read.get(name, {}))}" for name in STAGES if name not in found]
    return [*lines, *(["Not measured:", "", *missing, ""] if missing else [])]


def write_page(out: Path) -> None:
    """Only if there is something to show."""
    if any(is_done(name, out) for name in STAGES):
        (out / "README.md").write_text("\n".join(page(out)))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.speed.card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES), help="these stages")
    parser.add_argument("--out", type=Path, default=OUT, help="where the JSON and the page go")
    parser.add_argument("--minutes", type=float, default=9.0, help="of one stage, at most")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU: does it run?")
    parser.add_argument("--stage", choices=STAGES, help="one stage in this process")
    flags = parser.parse_args(words)
    sizes = TINY if flags.tiny else Sizes()
    if flags.page:
        return write_page(flags.out)
    if not flags.tiny and not torch.cuda.is_available():
        raise SystemExit("lab.speed.card measures a card, and there is none here; --tiny shows on a CPU whether it runs")
    if flags.tiny:
        tiny_model()
    if flags.stage:
        run_stage(flags.stage, sizes, flags.out)
    else:
        run_all(flags.only, sizes, flags.out, flags.minutes)


def tiny_model() -> None:
    """A model and plans for TINY."""
    limits.PRODUCTS, limits.HOST = {"cpu": (64,)}, 2**22
    plans.MODELS["tiny"] = dict(vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
                                num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)  # fmt: skip
    for name, rank in (("tiny-lora", 32), ("tiny-full", 0)):
        plans.ASKED[name] = plans.Setting(
            "tiny", "16 GB", rank=rank, engine="torch", max_tokens=8, num_tasks=2, k=2, eval_n=2, micro_tokens=64
        )


if __name__ == "__main__":
    main()
