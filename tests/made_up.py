"""Run folders for tests, written line by line as train.py writes them."""

import json
from pathlib import Path

import numpy as np

from env_swarm import DEV_SEEDS, Swarm
from helpers import write_lines

N = 64  # tasks of a tier of `letters`
TIERS = (3, 5, 6)
MACHINE = {
    "device": "x86_64 CPU, 2 threads",
    "python": "3.11.0",
    "torch": "2.0",
    "transformers": "4.0",
    "peft": "0.1",
    "model": "pico_base",
    "parameters": 5_000_000,
    "trainable": 400_000,
    "peak_rss_gb": 1.234,
}
CONFIG = {
    "env": "letters",
    "difficulty": 6,
    "reward": "binary",
    "curriculum": False,
    "model": "auto",
    "sft_steps": 50,
    "updates": 30,
    "num_tasks": 8,
    "k": 8,
    "lr": 5e-4,
    "seed": 5,
    "resume": "",
}


def state(updates: int, **changes) -> dict:
    return {
        "updates": updates,
        "sft": {"loss_first": 3.25, "loss_last": 0.5},
        "warnings": {},
        "seconds": {"total": 600.006, "rollout": 240.0, "train": 180.0, "eval": 90.0, "sft": 60.0},
        "tokens": {"sampled": 1234567, "trained": 765432},
    } | changes


def update_line(update: int, reward: float = 0.5, derives: float = 0.0, **changes) -> dict:
    """A line of metrics.jsonl."""
    return {
        "update": update,
        "level": 6,
        "reward": reward,
        "reward_low": reward - 0.05,
        "reward_high": reward + 0.05,
        "n": 64,
        "exact": reward,
        "format": 0.9,
        "habit_bare": 1.0 - derives,
        "habit_derives": derives,
        "reply_tokens": 100.0 + update,
        "truncated": 0.0,
        "errors": 0,
        "loss": 0.001,
        "entropy": 0.4,
        "mismatch": 2e-6,
        "groups_with_signal": 0.75,
        "grad_norm": 0.8,
        "seconds_rollout": 2.0,
        "seconds_train": 1.5,
    } | changes


def growing(updates: int = 30, starts: int = 12) -> list[dict]:
    """The reward rises, and from update `starts` on most replies derive the answer; every sixth
    update has no signal, and so measures no entropy."""
    rng = np.random.default_rng(8)
    lines = []
    for i in range(1, updates + 1):
        reward = float(0.1 + 0.02 * i + rng.normal(0, 0.02))
        lines.append(update_line(i, reward, 0.2 if i < starts else 0.9))
        if i % 6 == 0:
            lines[-1]["groups_with_signal"] = 0.0
            del lines[-1]["entropy"], lines[-1]["mismatch"]
    return lines


def letters(folder: Path, lines: list[dict], shares=(0.0, 0.3, 0.75)) -> Path:
    """evals.jsonl, metrics.jsonl and config.json of a run. shares: exact answers on the trained
    tier before SFT, after it, and at the end."""
    folder.mkdir(parents=True)
    rng, evals = np.random.default_rng(0), []
    hard = {tier: rng.random(N) for tier in TIERS}  # the same tasks every time
    for update, stage, share in zip((0, 0, len(lines)), ("before", "after_sft", "final"), shares):
        for tier in TIERS:
            right = hard[tier] + rng.normal(0, 0.05, N) < share * (1.0 if tier == 6 else 0.5)
            exact = (right & (share > 0)).astype(float)
            evals.append(
                {
                    "update": update,
                    "stage": stage,
                    "tasks": f"tier {tier}",
                    "trained": tier == 6,
                    "reward": np.maximum(exact, 0.1 * rng.integers(0, 5, N)).tolist(),
                    "exact": exact.tolist(),
                    "format": exact.tolist(),
                    "reply_tokens": rng.integers(5, 320, N).tolist(),
                    "truncated": [False] * N,
                }
            )
    write_lines(folder / "evals.jsonl", evals)
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"updates": len(lines)}))
    return folder


def swarm(folder: Path, n: int = 12, players=("idle", "random", "grinder", "expert")) -> Path:
    """The evaluations of a run whose checkpoints are scripted players."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"env": "swarm", "difficulty": "medium", "updates": 40}
    (folder / "config.json").write_text(json.dumps(config))
    evals, episodes = [], []
    moments = ((0, "before"), (0, "after_sft"), (20, "train"), (40, "final"))
    for (update, stage), style in zip(moments, players):
        scores, talks = zip(*(played(Swarm(style=style), DEV_SEEDS + i) for i in range(n)))
        at = {"update": update, "stage": stage}
        names = dict.fromkeys(name for score in scores for name in score)
        measured = {name: [score.get(name) for score in scores] for name in names}
        tasks = {"tasks": "medium v0.2", "trained": True, "reply_tokens": [100] * n}
        evals.append(at | tasks | measured)
        for i in sorted({*range(min(8, n)), int(np.argmax(measured["reward"]))}):
            episodes.append(
                {
                    **at,
                    "source": "eval",
                    "group": i,
                    "member": 0,
                    "seed": DEV_SEEDS + i,
                    "reward": scores[i]["reward"],
                    "components": scores[i],
                    "stop_reason": "done",
                    "reply_tokens": 100,
                    "messages": talks[i],
                }
            )
    write_lines(folder / "evals.jsonl", evals)
    write_lines(folder / "episodes.jsonl", episodes)
    return folder


def played(env: Swarm, seed: int) -> tuple[dict, list[dict]]:
    messages, done = env.reset(seed), False
    while not done:
        messages.append({"role": "assistant", "content": env.expert_reply()})
        new, done = env.step(messages[-1]["content"])
        messages += new
    return env.score(), messages
