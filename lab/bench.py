"""Speed, measured so that it can be believed: both sides in one process, interleaved, medians and ratios.

    python -m lab.bench sampler            # ours against model.generate on pico_base, 64 rows
    python -m lab.bench scorer             # what a hostile reply can cost the alphabet environment
    python -m lab.bench swarm              # episodes of the economy a minute, and how that grows

Timings on shared machines are noisy, so nothing here is a test; ratios of medians over interleaved rounds are stable to a
few percent. Results go to results/bench/ with machine and versions.
"""

import json
import platform
import random
import string
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from env_alphabet import LATER_TAG, Alphabet, right_list
from env_letters import Letters
from policy import PICO, load_policy
from rollout import encode, prompt_ids
from sampler import PlainDecoder, TorchSampler

BENCH_SEEDS = 2_600_000_000


def interleave(sides: dict, rounds: int) -> dict[str, list[float]]:
    """Run every side once a round, in turn, after one warm-up; each returns its tokens; gives tokens/s a round."""
    for run in sides.values():
        run()
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in tqdm(range(rounds)):
        for name, run in sides.items():
            start = time.perf_counter()
            tokens = run()
            rates[name].append(tokens / (time.perf_counter() - start))
    return rates


def sampler(rounds: int = 7, rows: int = 64, threads: int = 2) -> None:
    """Sampled tokens a second: our sampler, the same loop over the Hugging Face model, and model.generate.

    group: the shape of a GRPO update, 8 prompts x 8 samples, 256 tokens each, no stopping.
    stopping: 64 different prompts with real end-of-turn tokens. pico_base answers in 44 tokens when greedy, so here the
    prompts, of which each side must read 64, are two thirds of the tokens.
    Both are greedy, so that all sides write exactly the same tokens (checked).
    """
    torch.set_num_threads(threads)
    policy = load_policy(str(PICO), 0, 64, "cpu")
    env = Letters(6, "binary", True, "states")
    prompts = [prompt_ids(policy, env.reset(BENCH_SEEDS + i), None, True) for i in range(rows)]
    ours, plain = TorchSampler(policy), TorchSampler(policy)
    plain.decoder = PlainDecoder(policy)
    stops, pad = sorted(policy.stop_ids), policy.tokenizer.pad_token_id

    def generate(prompts, k, **kw) -> tuple[int, list]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = policy.lm.generate(input_ids=ids, attention_mask=mask, num_return_sequences=k, pad_token_id=pad, **kw)
        rows = []
        for row in out[:, longest:].tolist():
            end = next((i + 1 for i, t in enumerate(row) if t in stops), len(row)) if "eos_token_id" in kw else len(row)
            rows.append(row[:end])
        return sum(map(len, rows)), rows

    def with_sampler(s, prompts, k, limit, temperature, stop) -> tuple[int, list]:
        s.policy = policy if stop else type(policy)(**{**policy.__dict__, "stop_ids": frozenset([-1])})
        seeds = [[(0, g, i) for i in range(k)] for g in range(len(prompts))]
        rows = [x.token_ids for group in s.sample(prompts, k, limit, temperature, seeds) for x in group]
        return sum(map(len, rows)), rows

    few = prompts[:: max(1, rows // 8)][:8]
    many = [p for p in few for _ in range(rows // 8)]
    policy.lm.generation_config.eos_token_id = None  # stopping is asked for below, where it is wanted
    cases = {
        "stopping": {
            "ours": lambda: with_sampler(ours, prompts, 1, 320, 0.0, True),
            "plain loop": lambda: with_sampler(plain, prompts, 1, 320, 0.0, True),
            "model.generate": lambda: generate(prompts, 1, max_new_tokens=320, do_sample=False, eos_token_id=stops),
        },
        "group": {
            "ours": lambda: with_sampler(ours, few, rows // 8, 256, 0.0, False),
            "plain loop": lambda: with_sampler(plain, few, rows // 8, 256, 0.0, False),
            "model.generate": lambda: generate(many, 1, max_new_tokens=256, do_sample=False),
        },
    }
    result = {"command": "python -m lab.bench sampler", "rows": rows, "rounds": rounds, **versions(threads)}
    for case, sides in cases.items():
        written = {name: run()[1] for name, run in sides.items()}
        assert written["ours"] == written["plain loop"] == written["model.generate"], "the sides did not write the same tokens"
        rates = interleave({name: (lambda run=run: run()[0]) for name, run in sides.items()}, rounds)
        result[case] = table(rates, "model.generate")
    save("sampler", result)


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
    """CPU milliseconds that Alphabet.score() takes where the last of three replies is hostile, `tokens` long.

    A reply has 4 or 8 characters a token (what large vocabularies give), or is cut by pico_base's tokenizer, where letters are tokens of
    their own but a tag of 30 characters is one. The right list is just below and just above 200 characters, where difflib's autojunk
    begins. Rounds are interleaved; where chance has a part, each round draws anew.
    """
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
    result = {"command": "python -m lab.bench scorer", "tokens": tokens, "rounds": rounds}
    result |= versions(1) | {"python": platform.python_version()}
    print(f"{'CPU ms, median (max)':24}" + "".join(f"{f'{name}, {size}':>24}" for name in envs for size in ("4", "8", "pico")))
    for kind in BLOCKS + MARKUP:
        cells = {key[:2]: (float(np.median(values)), max(values)) for key, values in spent.items() if key[2] == kind}
        print(f"{kind:24}" + "".join(f"{f'{median:.1f} ({most:.1f})':>24}" for median, most in cells.values()))
        result[kind] = {", ".join(key): {"median_ms": round(a, 1), "max_ms": round(b, 1)} for key, (a, b) in cells.items()}
    result["worst_ms"] = round(max(max(values) for values in spent.values()), 1)
    save("scorer", result)


def swarm(rounds: int = 5) -> None:
    """Whole 25-turn episodes of the scripted expert a minute on one core, and how the time grows with bots and steps (lab/swarm.py)."""
    from lab.swarm import slope, speed

    rates = speed(rounds)
    (per_bot, fit_bots), (per_step, fit_steps) = slope(rates["seconds_by_bots"]), slope(rates["seconds_by_steps"])
    save("swarm", {
        **versions(1), "episodes_per_minute": round(rates["episodes_per_minute"]),
        "ms_by_bots": {bots: round(1000 * s, 2) for bots, s in rates["seconds_by_bots"].items()}, "ms_per_bot": round(1000 * per_bot, 3), "r2_bots": round(fit_bots, 4),
        "ms_by_steps": {steps: round(1000 * s, 2) for steps, s in rates["seconds_by_steps"].items()}, "ms_per_step": round(1000 * per_step, 3), "r2_steps": round(fit_steps, 4),
    })  # fmt: skip


def versions(threads: int) -> dict:
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    return {
        "machine": f"{platform.machine()}, {cpu}, {threads} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def save(name: str, result: dict) -> None:
    folder = ROOT / "results" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"sampler": sampler, "scorer": scorer, "swarm": swarm})
