"""Speed, measured so that it can be believed: both sides in one process, interleaved, medians and ratios.

    python -m lab.speed.bench train              # trained tokens a second and memory, over lengths and vocabularies

Ours against TRL, transformers and vLLM: lab/speed/bench_peers.py. Episodes of the swarm a minute: lab/swarm/scripted.py.

Timings on shared machines are noisy, so nothing here is a test; ratios of medians over interleaved rounds are stable to a
few percent. Arms with other numbers of threads need processes of their own: beside other threads OpenMP's sleep between
operations, for the rest of the process (training in 1.3 s, where it took 0.7). Results go to results/bench/ with machine and versions.
"""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
import tyro
from tqdm import tqdm

from grpo import advantages_of, update
from lab.common import ROOT, cpu, write_json
from policy import PICO, Policy, attach_lora
from rollout import Episode
from settings import Config

BENCH_SEEDS = 2_600_000_000


def rows_of(lengths: list[int], vocabulary: int):
    """Groups of two episodes each, without a shared prompt, every token but the first eight sampled; one is paid, one is not."""
    rng, groups = np.random.default_rng(0), []
    for g, length in enumerate(lengths):
        ids = rng.integers(0, vocabulary, (2, length)).tolist()
        groups.append([Episode(g, g, row, [False] * 8 + [True] * (length - 8), [0.0] * 8 + [-6.0] * (length - 8), 1, float(i))
                       for i, row in enumerate(ids)])  # fmt: skip
    return groups


def learn(policy: Policy, optimizer, groups: list, max_tokens: int, micro_tokens: int = 8192) -> dict:
    """grpo.update as every comparison of speed has it: the plain loss, on-policy."""
    cfg = Config(importance="clip", max_tokens=max_tokens, micro_tokens=micro_tokens)
    return update(policy, optimizer, groups, advantages_of(groups, cfg), cfg)


def alone(code: str, threads: int) -> subprocess.CompletedProcess:
    """Python code in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=env)


def one_train(length: int, vocabulary: int, rounds: int, threads: int) -> None:
    """In a process of its own: the seconds of updates on 8 rows, and the most memory above what the loaded model takes.
    Prints one JSON line."""
    torch.set_num_threads(threads)
    config = transformers.AutoConfig.from_pretrained(PICO, vocab_size=vocabulary, max_position_embeddings=length)
    torch.manual_seed(0)
    lm = transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False)
    tokenizer = type("T", (), {"pad_token_id": 0})
    policy = Policy(attach_lora(lm, 32, 64).eval(), tokenizer, frozenset([2]), "random", 32, torch.device("cpu"))
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-12)
    groups, peak = rows_of([length] * 4, vocabulary), lambda: status("VmHWM")
    base, seconds = status("VmRSS"), []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        stats = learn(policy, optimizer, groups, length)
        seconds.append(time.perf_counter() - start)
    weights, middle, tokens = sum(p.nbytes for p in lm.parameters()) / 2**20, float(np.median(seconds[1:])), stats["trained_tokens"]
    print(json.dumps({"length": length, "vocabulary": vocabulary, "tokens": tokens, "seconds": round(middle, 3),
                      "tokens_per_second": round(tokens / middle),
                      "above_the_model_mb": round(peak() - base), "weights_mb": round(weights)}))  # fmt: skip


def status(name: str) -> float:
    """MB of this process, from Linux; VmHWM is the most it ever had (getrusage's would be its parent's, if that is more)."""
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)).split()[1]) / 1024


def train(rounds: int = 3, threads: int = 2) -> None:
    """Trained tokens a second and memory over lengths and vocabularies: 8 rows, pico_base's shapes with random weights, LoRA 32,
    grpo.update. Cost must grow linearly in tokens, but for attention, whose share grows with the length: `work` is the floating-point
    operations of both, computed, and seconds a unit of work must stay alike. Memory must not grow with vocabulary x length."""
    cases = [(length, 512) for length in (512, 1024, 2048, 4096, 8192)] + [(2048, v) for v in (1024, 32_000, 151_936)]
    command = f"python -m lab.speed.bench train --rounds {rounds} --threads {threads}"
    result = {"command": command, "rows": 8, **versions(threads), "cases": []}
    for length, vocabulary in tqdm(cases):
        code = f"from lab.speed.bench import one_train; one_train({length}, {vocabulary}, {rounds}, {threads})"
        out = alone(code, threads)
        if out.returncode:
            raise SystemExit(f"{code}: {out.stderr.strip().splitlines()[-1]}")
        case = json.loads(out.stdout.splitlines()[-1])
        D, layers, inner, q, kv, r = 128, 4, 384, 128, 64, 32  # pico_base
        linear = layers * (2 * D * q + 2 * D * kv + 3 * D * inner + r * (2 * (D + q) + 2 * (D + kv) + 3 * (D + inner)))
        # a token's multiplications: twice forward, twice for its inputs' gradient; attention to half of the length; the head twice
        case["work"] = round(case["tokens"] * 2 * (2 * linear + 3 * layers * q * length + 2 * D * vocabulary) / 1e9, 1)
        case["gflops_per_second"] = round(case["work"] / case["seconds"], 1)
        result["cases"].append(case)
        print(json.dumps(case), flush=True)
    small, large = (next(c for c in result["cases"] if (c["length"], c["vocabulary"]) == (2048, v)) for v in (512, 151_936))
    whole = lambda case: case["above_the_model_mb"] + case["weights_mb"]
    result["time_ratio"] = round(large["seconds"] / small["seconds"], 1)
    result["memory_ratio"] = round(whole(large) / whole(small), 2)
    save("train", result)


def table(rates: dict[str, list[float]], reference: str) -> dict:
    """Median tokens/s with its range, and the ratio to the reference, round by round (same moment, same noise)."""
    out = {}
    for name, values in rates.items():
        ratios = np.array(values) / np.array(rates[reference])
        out[name] = {
            "tokens_per_second": round(float(np.median(values))), "low": round(min(values)), "high": round(max(values)),
            "ratio": round(float(np.median(ratios)), 2), "ratio_low": round(float(ratios.min()), 2),
            "ratio_high": round(float(ratios.max()), 2),
        }  # fmt: skip
    return out


def versions(threads: int) -> dict:
    """Where a number was measured; load: how many others wanted the cores at that moment."""
    machine = f"{platform.machine()}, {cpu()}, {threads} threads"
    return {"machine": machine, "load": round(os.getloadavg()[0], 1), "torch": torch.__version__, "transformers": transformers.__version__}


def save(name: str, result: dict) -> None:
    write_json(ROOT / "results" / "bench" / f"{name}.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"train": train})
