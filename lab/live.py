"""docs/live: the trained model in a page, with the snapshots of one run to slide through.

    python -m lab.live --train         # train.py's letters run, seed 0, with snapshots: runs/live-0
    python -m lab.live runs/live-0 --into docs/live      # the data of the committed page
    python -m lab.live runs/NAME       # a page for a run of yours: runs/NAME/live/index.html
    python -m lab.live --lines         # the lines of the page's links, after a chapter has changed

A run overwrites its checkpoint, so a run of `train.py` alone has one snapshot, the last: the slider
then has the base and the end. --train runs the same train.py and copies the adapter at the updates
that the slider shows. Adapters are shipped as int8 with a float32 scale for each of the 32
directions, 0.3 MB each; what the page shows of a snapshot (accuracy, habits) is measured here on
exactly those rounded weights. tests/test_live.py holds the page's JavaScript to torch.
"""

import ast
import base64
import html
import json
import os
import platform
import re
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
import tyro
from safetensors.torch import load_file

import metrics
import settings
import train as recipe
from bookkeeping import refusals
from bookkeeping import run as records
from evaluate import parts
from fast.sampler import TorchSampler
from policy import PICO, Policy, load_policy
from rollout import play

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "live"
FLAGS = "--env letters --difficulty 6 --seed 0 --threads 1 --save-every 2 --no-wandb"
FLAGS += " --no-eval-other-tiers"
SHOWN = (0, 4, 8, 10, 12, 14, 16, 18, 20, 30, 60, 150)  # updates; it changes between 8 and 20
MUST = {"env": ["letters"], "think": [True], "lora_rank": [32], "lora_alpha": [64]}
MUST |= {"model": ["auto", "pico_base", str(PICO)]}
TASKS = 64  # development questions that the page can ask
SAMPLED, K = 64, 8  # development tasks, and samples of each, for the share of habits
HABITS = ("derives", "states", "bare")


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf8"))


# ------------------------------------------------------------------------------- a run
def train_run(name: str) -> Path:
    """train.py as it is, in this process; some checkpoints are copied before they go."""
    save = records.save_checkpoint

    def save_and_keep(folder, policy, optimizer, state, *more):
        save(folder, policy, optimizer, state, *more)
        if state["update"] in SHOWN:
            to = folder.with_name("snapshots") / f"{state['update']:04}.safetensors"
            to.parent.mkdir(exist_ok=True)
            shutil.copy(folder / "adapter_model.safetensors", to)

    cfg, typed = settings.command_line([*FLAGS.split(), "--name", name])
    refusals.check(cfg)
    with mock.patch.object(records, "save_checkpoint", save_and_keep):
        return recipe.train(cfg, typed)


def snapshots_of(run: Path) -> dict[int, Path]:
    """{update: adapter}: those that were kept, and the last. SystemExit if it is no such run."""
    last = run / "checkpoint" / "adapter_model.safetensors"
    if not (last.exists() and (run / "summary.json").exists()):
        raise SystemExit(f"{run}: it is no folder of a finished run; train one first (--train)")
    cfg = read_json(run / "config.json")
    wrong = [f"{name} {cfg[name]!r}" for name, values in MUST.items() if cfg[name] not in values]
    if wrong:
        raise SystemExit(f"{run}: the page cannot show a run with {', '.join(wrong)}")
    kept = {int(file.stem): file for file in (run / "snapshots").glob("*.safetensors")}
    kept[read_json(last.with_name("state.json"))["update"]] = last
    return dict(sorted(kept.items()))


# ------------------------------------------------------------------------------- weights as text
# {the page's name: the files'}, in the order of the page's bytes: what learns, then the norms
LINEAR = {name: f"self_attn.{name}_proj" for name in "qkvo"}
LINEAR |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
NORMS |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
MATRICES, SCALES = (
    {f"{i}.{name}": f"model.layers.{i}.{place}" for i in range(4) for name, place in some.items()}
    for some in (LINEAR, NORMS)
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
    """Give the policy these adapter weights; None: those that change nothing."""
    for name, p in policy.trainable().items():
        key = name.replace(".default", "")
        p.data = torch.zeros_like(p) if adapter is None else adapter[key].clone()


# ------------------------------------------------------------------------------- what is measured
def measure(rollout, n: int) -> dict:
    """Exact answers on n development tasks, greedy; the share of each habit at temperature 1."""
    seeds = [settings.DEV_SEEDS + i for i in range(n)]
    greedy = parts([g[0] for g in rollout(seeds, 1, temperature=0.0)])
    sampled = parts([e for g in rollout(seeds[:SAMPLED], K, temperature=1.0) for e in g])
    exact = metrics.mean(greedy["exact"])
    shares = {"exact": exact.mean, "low": exact.low, "high": exact.high}
    shares |= {habit: float(np.mean(sampled[f"habit_{habit}"])) for habit in HABITS}
    counts = {"n": exact.n, "sampled_n": len(sampled["exact"])}
    return counts | {name: round(share, 4) for name, share in shares.items()}


def facts(run: Path, cfg: dict) -> dict:
    """Which run the page shows."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {
        "run": run.name,
        "tier": cfg["difficulty"],
        **{name: cfg[name] for name in ("seed", "updates", "lr", "num_tasks", "k", "max_tokens")},
        "commit": read_json(run / "summary.json").get("machine", {}).get("commit"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "eval_seeds": settings.DEV_SEEDS,
        # A batch of update u was sampled by the policy after u - 1 updates.
        "batches": [[x["update"] - 1, round(x["exact"], 4)] for x in lines],
    }


def tokenizer_data() -> dict:
    file = read_json(PICO / "tokenizer.json")
    vocab = file["model"]["vocab"]
    return {
        "vocab": vocab,
        "added": {t["content"]: t["id"] for t in file["added_tokens"]},
        "special": [t["content"] for t in file["added_tokens"] if t["special"]],
        "byteFrom": next(i for i, (piece, _) in enumerate(vocab) if piece == "<0x00>"),
    }


def tasks_of(make_env, n: int) -> list[list[str]]:
    """[text, letters] of the first development tasks."""
    envs = [make_env() for _ in range(n)]
    for i, env in enumerate(envs):
        env.reset(settings.DEV_SEEDS + i)
    return [[env.task.text, "".join(env.task.letters)] for env in envs]


# ------------------------------------------------------------------------------- the page's files
def write(run: Path, into: Path, eval_n: int) -> None:
    """data/*.js of the page, and the page itself if it is not there."""
    kept, cfg, data = snapshots_of(run), read_json(run / "config.json"), into / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    if into.resolve() != PAGE:
        for file in ("index.html", "model.js", "page.js"):
            shutil.copy(PAGE / file, into / file)
        up = os.path.relpath(ROOT, into.resolve()).replace(os.sep, "/")
        page = (PAGE / "index.html").read_text().replace('"../../', f'"{up}/')
        (into / "index.html").write_text(page)
    policy = load_policy(str(PICO), 32, 64, "cpu", cfg["seed"])
    make_env = partial(settings.make_env, settings.Config(**cfg), cfg["difficulty"])
    sampler, stops = TorchSampler(policy), []
    how = {"max_tokens": cfg["max_tokens"], "sample_seed": 0}
    rollout = partial(play, policy, sampler, make_env, **how)
    for update, file in {-1: None, **kept}.items():
        name, adapter = f"{update:04}" if file else "base", file and load_file(file)
        put(policy, adapter and as_shipped(adapter))
        sampler.sync()
        stops.append({"name": name, "update": update, **measure(rollout, eval_n)})
        print(stops[-1], flush=True)
        if adapter:
            arrays = [array for each in rounded(adapter).values() for array in each]
            left = f'LIVE.adapters["{name}"]'
            (data / f"{name}.js").write_text(f'{left} = "{text_of(*arrays)}";\n')
    base = base_weights()
    halves = [x.view(torch.uint16).numpy() for x in base.values()]  # bfloat16, bit by bit
    (data / "base.js").write_text(f'LIVE.base = "{text_of(*halves)}";\n')
    about = {
        **facts(run, cfg),
        "stops": stops,
        "entries": [[name, x.numel()] for name, x in base.items()],
        "tasks": tasks_of(make_env, TASKS),
        "tokenizer": tokenizer_data(),
    }
    safe = json.dumps(about, separators=(",", ":")).replace("<", "\\u003c")
    (data / "run.js").write_text(f"var LIVE = {safe};\nLIVE.adapters = {{}};\n")
    print(f"{into}/index.html: {len(stops)} stops; open it in a browser")


# ------------------------------------------------------------------------------- links to lines
LINK = re.compile(r'(<a\s+data-line="([^"]*)"\s+href="\.\./\.\./([\w/]+\.py)#L)\d+(">)[^<]*(</a>)')


def with_lines(page: str) -> str:
    """The page with the number and the function of each line that its links name by its text.

    SystemExit if a line is not there, or not one.
    """

    def renew(link: re.Match) -> str:
        text, file = html.unescape(link[2]), link[3]
        source = (ROOT / file).read_text()
        lines = [i for i, line in enumerate(source.splitlines(), 1) if text in line]
        if len(lines) != 1:
            raise SystemExit(
                f"{file} has {len(lines)} lines with {text!r}; mend docs/live/index.html"
            )
        shown = f"{function_at(source, lines[0])}{file}:{lines[0]}"
        return f"{link[1]}{lines[0]}{link[4]}{shown}{link[5]}"

    return LINK.sub(renew, page)


def function_at(source: str, line: int) -> str:
    """The name of the innermost function or class around the line, as a link says it."""
    named = (ast.FunctionDef, ast.ClassDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, named)]
    around = [node for node in nodes if node.lineno <= line <= node.end_lineno]
    return max(around, key=lambda node: node.lineno).name + ",&nbsp;" if around else ""


def main(
    run: tyro.conf.Positional[str] = "",
    train: bool = False,
    into: str = "",
    eval_n: int = 256,
    lines: bool = False,
) -> None:
    """run: a run folder. --train: make one first, runs/live-0. into: where the page goes; empty:
    RUN/live. eval_n: development tasks per snapshot. --lines: only bring the links up to date."""
    if lines:
        page = PAGE / "index.html"
        page.write_text(with_lines(page.read_text()))
        return
    run = str(train_run("live-0")) if train else run
    write(Path(run), Path(into or f"{run}/live"), eval_n)


if __name__ == "__main__":
    tyro.cli(main)
