"""Speed, measured so that it can be believed: both sides in one process, interleaved, medians and ratios.

    python -m lab.speed.bench train              # trained tokens a second and memory, over lengths and vocabularies
    python -m lab.speed.bench scorer             # what a hostile reply can cost the alphabet environment
    python -m lab.speed.bench swarm              # episodes of the economy a minute, and how that grows

Ours against TRL, transformers and vLLM: lab/speed/bench_peers.py.

Timings on shared machines are noisy, so nothing here is a test; ratios of medians over interleaved rounds are stable to a
few percent. Results go to results/bench/ with machine and versions.
"""

import json
import os
import platform
import random
import string
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
import tyro
from tqdm import tqdm

from env_alphabet import LATER_TAG, Alphabet, right_list
from grpo import advantages_of, update
from lab.common import ROOT, cpu, write_json
from policy import PICO, Policy, attach_lora, load_policy
from rollout import Episode, encode
from settings import Config

BENCH_SEEDS = 2_600_000_000


def rows_of(lengths: list[int], vocabulary: int, device="cpu"):
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
    """In a process of its own: the seconds of updates on 8 rows, and the most memory above what the loaded model takes. Prints one JSON line."""
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
    print(json.dumps({"length": length, "vocabulary": vocabulary, "tokens": tokens, "seconds": round(middle, 3), "tokens_per_second": round(tokens / middle),
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
        # a token's multiplications: twice forward, twice for its inputs' gradient; attention to half of the length; the head three times
        case["work"] = round(case["tokens"] * 2 * (2 * linear + 3 * layers * q * length + 3 * D * vocabulary) / 1e9, 1)
        case["gflops_per_second"] = round(case["work"] / case["seconds"], 1)
        result["cases"].append(case)
        print(json.dumps(case), flush=True)
    small, large = (next(c for c in result["cases"] if (c["length"], c["vocabulary"]) == (2048, v)) for v in (512, 151_936))
    weights = large["weights_mb"]
    result["memory_ratio"] = round((large["above_the_model_mb"] + weights) / (small["above_the_model_mb"] + weights), 2)
    save("train", result)


def table(rates: dict[str, list[float]], reference: str) -> dict:
    """Median tokens/s with its range, and the ratio to the reference, round by round (same moment, same noise)."""
    out = {}
    for name, values in rates.items():
        ratios = np.array(values) / np.array(rates[reference])
        out[name] = {
            "tokens_per_second": round(float(np.median(values))), "low": round(min(values)), "high": round(max(values)),
            "ratio": round(float(np.median(ratios)), 2), "ratio_low": round(float(ratios.min()), 2), "ratio_high": round(float(ratios.max()), 2),
        }  # fmt: skip
    return out


def hostile(kind: str, names: list[str], rng: random.Random, n: int) -> str:
    """A reply of at least n characters before it is cut: the body of one block, or tags and blocks where the kind says so."""
    right = "\n".join(names) + "\n"
    common = sorted(set(right.lower()) - {"\n"}, key=right.lower().count, reverse=True)
    tag, end = f"<{LATER_TAG}>", f"</{LATER_TAG}>"
    times = lambda text: text * (n // len(text) + 1)
    if kind == "shuffled names":
        return "".join("\n".join(rng.sample(names, len(names))) + "\n" for _ in range(n // len(right) + 1))
    if kind == "near misses":
        return "".join("q" if rng.random() < 0.1 else c for c in times(right))
    if kind == "ever better blocks":  # of many blocks, all are scored only while each beats the one before
        return "".join(f"{tag}{right[: 1 + i * len(right) // 99]}{end}" for i in range(99))
    return {
        "one letter": lambda: times(common[0]),
        "two letters": lambda: times(common[0] + common[1]),
        "four letters": lambda: "".join(rng.choices(common[:4], k=n)),
        "random letters": lambda: "".join(rng.choices(string.ascii_lowercase + "\n", k=n)),
        "right list repeated": lambda: times(right),
        "right list backwards": lambda: times(right[::-1]),
        "small blocks": lambda: times(f"{tag}x{end}"),
        "tags never closed": lambda: times(tag),
        "tags never opened": lambda: times(end),
    }[kind]()


BLOCKS = ("one letter", "two letters", "four letters", "random letters", "right list repeated", "right list backwards", "near misses",
          "shuffled names")  # fmt: skip
MARKUP = ("small blocks", "ever better blocks", "tags never closed", "tags never opened")


def scorer(tokens: int = 2048, rounds: int = 5) -> None:
    """CPU milliseconds that Alphabet.score() takes where the last of three replies is hostile, `tokens` long. A reply has 4 or 8 characters
    a token (what large vocabularies give), or is cut by pico_base's tokenizer, where letters are tokens of their own but a tag of 30
    characters is one. The right list is just below and just above 200 characters, where difflib's autojunk begins. Rounds are interleaved;
    where chance has a part, each round draws anew."""
    policy = load_policy(str(PICO), 0, 64, "cpu")
    envs: dict[str, Alphabet] = {}
    for seed in range(BENCH_SEEDS, BENCH_SEEDS + 5000):
        env = Alphabet(3, 3, 1, 5, 8.0, False, True, "derives")
        env.reset(seed)
        length = len("\n".join(right_list(env.task, 2)))
        if length in (199, 200) and f"list of {length}" not in envs:
            envs[f"list of {length}"] = env
            for _ in range(2):
                env.step(env.expert_reply())
    envs = dict(sorted(envs.items()))
    spent: dict[tuple, list[float]] = {}
    for at in tqdm(range(rounds)):
        for name, env in envs.items():
            names, before = right_list(env.task, 2), env.replies[:2]
            for size, kind in ((size, kind) for size in ("4 a token", "8 a token", "pico") for kind in BLOCKS + MARKUP):
                n = tokens * (int(size[0]) if size != "pico" else 40)
                text = hostile(kind, names, random.Random(at), n)
                if size == "pico":
                    text = policy.tokenizer.decode(encode(policy, text)[: tokens - 2])
                text = text[:n] if kind in MARKUP else f"<{LATER_TAG}>{text[:n]}</{LATER_TAG}>"
                env.replies = [*before, text]
                start = time.process_time()
                env.score()
                spent.setdefault((name, size, kind), []).append(1000 * (time.process_time() - start))
    result = {"command": "python -m lab.speed.bench scorer", "tokens": tokens, "rounds": rounds}
    result |= versions(1) | {"python": platform.python_version()}
    print(f"{'CPU ms, median (max)':24}" + "".join(f"{f'{name}, {size}':>24}" for name in envs for size in ("4", "8", "pico")))
    for kind in BLOCKS + MARKUP:
        cells = {key[:2]: (float(np.median(values)), max(values)) for key, values in spent.items() if key[2] == kind}
        print(f"{kind:24}" + "".join(f"{f'{median:.1f} ({most:.1f})':>24}" for median, most in cells.values()))
        result[kind] = {", ".join(key): {"median_ms": round(a, 1), "max_ms": round(b, 1)} for key, (a, b) in cells.items()}
    result["worst_ms"] = round(max(max(values) for values in spent.values()), 1)
    save("scorer", result)


def swarm(rounds: int = 5) -> None:
    """Whole 25-turn episodes of the scripted expert a minute on one core, and how the time grows with bots and steps (lab/swarm/scripted.py)."""
    from lab.swarm.scripted import slope, speed

    rates = speed(rounds)
    (per_bot, fit_bots), (per_step, fit_steps) = slope(rates["seconds_by_bots"]), slope(rates["seconds_by_steps"])
    save("swarm", {
        **versions(1), "episodes_per_minute": round(rates["episodes_per_minute"]),
        "ms_by_bots": {bots: round(1000 * s, 2) for bots, s in rates["seconds_by_bots"].items()}, "ms_per_bot": round(1000 * per_bot, 3), "r2_bots": round(fit_bots, 4),
        "ms_by_steps": {steps: round(1000 * s, 2) for steps, s in rates["seconds_by_steps"].items()}, "ms_per_step": round(1000 * per_step, 3), "r2_steps": round(fit_steps, 4),
    })  # fmt: skip


def versions(threads: int) -> dict:
    machine = f"{platform.machine()}, {cpu()}, {threads} threads"
    return {"machine": machine, "torch": torch.__version__, "transformers": transformers.__version__}


def save(name: str, result: dict) -> None:
    write_json(ROOT / "results" / "bench" / f"{name}.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"train": train, "scorer": scorer, "swarm": swarm})
