"""docs/live: the trained model in a page, with the snapshots of one run to slide through.

    python -m lab.live             # write the page's data; first trains runs/live-0 if missing

The run is train.py's letters run, seed 0. A run overwrites its checkpoint, so the adapter is copied
at the updates that the slider shows. Adapters are shipped as int8 with a float32 scale for each of
the 32 directions, 0.3 MB each; a snapshot's accuracy and habits on the page are measured here on
exactly those rounded weights. tests/test_live.py compares the page's JavaScript with torch.

README's first picture, docs/live/group.svg, is computed from these snapshots by the same
JavaScript: `make picture`.
"""

import base64
import json
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file

import metrics
import settings
import train as recipe
from bookkeeping import folder, refusals
from env_letters import STYLES
from evaluate import parts
from fast.sampler import TorchSampler
from policy import PICO, Policy, load_policy
from rollout import play

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "live"
FLAGS = """--env letters --difficulty 6 --seed 0 --threads 1 --save-every 2 --no-wandb
--no-eval-other-tiers --name live-0"""
SHOWN = (0, 4, 8, 10, 12, 14, 16, 18, 20, 30, 60, 150)  # updates; it changes between 8 and 20
TASKS = 64  # development questions that the page can ask
EXACT = 256  # development tasks per snapshot, greedy
SAMPLED, K = 64, 8  # development tasks, and samples of each, for the share of habits


# ------------------------------------------------------------------------------- a run
def train_run() -> Path:
    """train.py as it is, in this process; the checkpoints to show are copied in time."""
    save = folder.save_checkpoint

    def save_and_keep(into, policy, optimizer, state, *more):
        save(into, policy, optimizer, state, *more)
        if state["updates"] in SHOWN:
            to = into.with_name("snapshots") / f"{state['updates']:04}.safetensors"
            to.parent.mkdir(exist_ok=True)
            shutil.copy(into / "adapter_model.safetensors", to)

    cfg, typed = settings.command_line(FLAGS.split())
    refusals.check(cfg)
    with mock.patch.object(folder, "save_checkpoint", save_and_keep):
        return recipe.train(cfg, typed)


# ------------------------------------------------------------------------------- weights as text
# {the page's name: the file's}, in the order of the page's bytes: what learns, then the norms
LINEAR = {
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
NORMS = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
MATRICES, SCALES = (
    {f"{i}.{name}": f"model.layers.{i}.{place}" for i in range(4) for name, place in part.items()}
    for part in (LINEAR, NORMS)
)


def lora_names(name: str) -> list[str]:
    """PEFT's names of A and B."""
    return [f"base_model.model.{MATRICES[name]}.lora_{part}.weight" for part in "AB"]


def base_weights() -> dict[str, torch.Tensor]:
    """The base under the page's short names, in the order of its bytes; bfloat16, as on disk."""
    w = load_file(PICO / "model.safetensors")  # the head is the embedding
    names = {"embed": "model.embed_tokens", "norm": "model.norm"} | MATRICES | SCALES
    return {name: w[place + ".weight"] for name, place in names.items()}


def rounded(adapter: dict[str, torch.Tensor]) -> dict[str, tuple[np.ndarray, ...]]:
    """{matrix: (scales [2 r] float32, A [r, in] int8, B [out, r] int8)} of PEFT's file.

    Each row of A and each column of B has a scale.
    """
    found = {}
    for name in MATRICES:
        A, B = (adapter[key].float().numpy() for key in lora_names(name))
        most = np.concatenate([np.abs(A).max(1), np.abs(B).max(0)]).astype(np.float32)
        scales, r = most / np.float32(127), len(A)
        safe = np.where(scales > 0, scales, 1)
        whole = (np.rint(A / safe[:r, None]), np.rint(B / safe[None, r:]))
        found[name] = (scales, *(x.astype(np.int8) for x in whole))
    return found


def as_shipped(adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PEFT's names again, with the numbers that the page computes with."""
    found = {}
    for name, (scales, A, B) in rounded(adapter).items():
        weights = (A * scales[: len(A), None], B * scales[None, len(A) :])
        found |= dict(zip(lora_names(name), map(torch.tensor, weights)))
    return found


def text_of(*arrays: np.ndarray) -> str:
    return base64.b64encode(b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)).decode()


def put(policy: Policy, adapter: dict[str, torch.Tensor] | None) -> None:
    """Give the policy these adapter weights; None: zeros, which change nothing."""
    for name, p in policy.trainable().items():
        key = name.replace(".default", "")
        p.data = torch.zeros_like(p) if adapter is None else adapter[key].clone()


# ------------------------------------------------------------------------------- what is measured
def measure(rollout) -> dict:
    """Exact answers, greedy, and each habit's share at temperature 1, on development tasks."""
    seeds = [settings.DEV_SEEDS + i for i in range(EXACT)]
    greedy = parts([g[0] for g in rollout(seeds, 1, temperature=0.0)])
    sampled = parts([e for g in rollout(seeds[:SAMPLED], K, temperature=1.0) for e in g])
    exact = metrics.mean(greedy["exact"])
    shares = {
        "exact": exact.mean,
        "low": exact.low,
        "high": exact.high,
        **{habit: float(np.mean(sampled[f"habit_{habit}"])) for habit in STYLES},
    }
    return {
        "n": exact.n,
        "sampled_n": len(sampled["exact"]),
        **{name: round(share, 4) for name, share in shares.items()},
    }


def facts(run: Path, cfg: dict) -> dict:
    """Which run the page shows."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    machine = json.loads((run / "summary.json").read_text())["machine"]
    return {
        "run": run.name,
        "tier": cfg["difficulty"],
        **{name: cfg[name] for name in ("seed", "updates", "lr", "num_tasks", "k", "max_tokens")},
        **{name: machine[name] for name in ("commit", "torch", "transformers", "python")},
        "eval_seeds": settings.DEV_SEEDS,
        # A batch of update u was sampled by the policy after u - 1 updates.
        "batches": [[x["update"] - 1, round(x["exact"], 4)] for x in lines],
    }


def tokenizer_data() -> dict:
    file = json.loads((PICO / "tokenizer.json").read_text(encoding="utf8"))
    vocab = file["model"]["vocab"]
    return {
        "vocab": vocab,
        "added": {t["content"]: t["id"] for t in file["added_tokens"]},
        "special": [t["content"] for t in file["added_tokens"] if t["special"]],
        "byteFrom": next(i for i, (piece, _) in enumerate(vocab) if piece == "<0x00>"),
    }


def tasks_of(make_env) -> list[list[str]]:
    """[text, letters] of the first development tasks."""
    envs = [make_env() for _ in range(TASKS)]
    for i, env in enumerate(envs):
        env.reset(settings.DEV_SEEDS + i)
    return [[env.task.text, "".join(env.task.letters)] for env in envs]


# ------------------------------------------------------------------------------- the page's files
def write(run: Path, data: Path) -> None:
    """Write the page's data/*.js from a finished run and its snapshots."""
    cfg = json.loads((run / "config.json").read_text())
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    policy = load_policy(str(PICO), 32, 64, "cpu", cfg["seed"])
    make_env = partial(settings.make_env, settings.Config(**cfg), cfg["difficulty"])
    sampler, stops = TorchSampler(policy), []
    rollout = partial(play, policy, sampler, make_env, max_tokens=cfg["max_tokens"], sample_seed=0)
    kept = sorted((run / "snapshots").iterdir())
    adapters = {"base": None} | {file.stem: load_file(file) for file in kept}
    for name, adapter in adapters.items():
        put(policy, adapter and as_shipped(adapter))
        sampler.sync()
        stops.append({"name": name, "update": int(name) if adapter else -1, **measure(rollout)})
        print(stops[-1], flush=True)
        if adapter:
            text = text_of(*(array for each in rounded(adapter).values() for array in each))
            (data / f"{name}.js").write_text(f'LIVE.adapters["{name}"] = "{text}";\n')
    base = base_weights()
    halves = [x.view(torch.uint16).numpy() for x in base.values()]  # bfloat16, bit by bit
    (data / "base.js").write_text(f'LIVE.base = "{text_of(*halves)}";\n')
    about = {
        **facts(run, cfg),
        "stops": stops,
        "entries": [[name, x.numel()] for name, x in base.items()],
        "tasks": tasks_of(make_env),
        "tokenizer": tokenizer_data(),
    }
    safe = json.dumps(about, separators=(",", ":")).replace("<", "\\u003c")
    (data / "run.js").write_text(f"var LIVE = {safe};\nLIVE.adapters = {{}};\n")


if __name__ == "__main__":
    run = ROOT / "runs" / "live-0"
    write(run if (run / "summary.json").exists() else train_run(), PAGE / "data")
