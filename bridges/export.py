"""A trained run becomes a folder that other people's tools read, with a card that says what it is
and how sure we are of it.

    python -m bridges.export adapter runs/NAME out/     the LoRA adapter alone, in PEFT's format:
                                                        small, needs its base model
    python -m bridges.export merge   runs/NAME out/     base and adapter as one model: what
                                                        transformers, vLLM and all others load
    hf upload owner/name out/ --private                 the hub's own command uploads either, with
                                                        the card as its page

A merged model is served by vLLM (`vllm serve out/`) or by transformers (`transformers serve out/`);
bridges/api.py evaluates what is served.

Merging is done once, in float32, from the checkpoint: W' = W + (alpha / rank) · B A. The result is
saved in the type that the base had in training, float32 on a CPU and bfloat16 on a GPU, unless
--dtype says otherwise. What rounding costs is printed: the log-probs before and after are compared
on a text (pico_base, saved as bfloat16: up to 0.2 nats). (In training nothing is ever merged in
place; policy.py says why.)

The card (README.md) is written from the run's summary.json and from nothing else: the base, the
data, the evaluations with their intervals, the flags, the machine. What was not measured is not in
it.

Run me: `python -m bridges.export` prints the card of the committed letters run.
"""

import json
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from safetensors import SafetensorError

from bookkeeping import presets, records
from bookkeeping.folder import find_checkpoint, load_checkpoint, readable
from fast.logprobs import token_logprobs
from fast.vllm_engine import RANKS
from metrics import Interval
from policy import EMBEDDED, first_line, load_policy
from settings import Config

TEXT = (
    "RL reinforces what pays: the policy samples, the environment scores, "
    "and what scored above its group's mean becomes likelier."
)
# Of the machine or of the moment: not part of the command that makes a run again.
LOCAL = "env break_ model name runs resume eval_only held_out threads wandb device engine".split()


def base_of(summary: dict) -> str:
    """Folder or hub id of the model that a run began with."""
    asked = summary["config"]["model"]
    name = asked if asked != "auto" else summary["machine"]["model"]
    return EMBEDDED.get(name, name)


def flags(config: dict) -> str:
    """The command line that a config stands for: all that differs from the defaults of Config.

    What was chosen by the model's size is among it.
    """
    out = ["--env", config["env"]]
    for name, default in asdict(Config()).items():
        value = config.get(name, default)
        given = value not in (None, "", default) and (name != "difficulty" or value)  # 0: no levels
        flag = name.replace("_", "-")
        if name in LOCAL or not given:
            continue
        if isinstance(value, bool):
            out.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, list) else [value]
            out += [word for one in values for word in (f"--{flag}", str(one))]
    return shlex.join(out)


# s, c, m: the run's summary, and the config and the machine in it.
CARD = """---
{front}
---

# {base}, trained on {c[env]}{suffix}

{base} after {c[sft_steps]} steps of SFT on {c[sft_examples]} scripted demonstrations and \
{s[updates]} updates of GRPO ({how}), with picoswarm.

## Evaluation

Greedy, on development tasks, with 95% intervals (Wilson for shares; Student's t or a bootstrap for
other means). One training seed.

| tasks | before | after SFT | after GRPO | n |
|---|---|---|---|---|
{rows}

GRPO over SFT, on the same {n} tasks of {s[trained]}: {gain}.
{warnings}
## Data

{data} {s[tokens][sampled]:,} tokens were sampled, {s[tokens][trained]:,} trained on.

## Use

```python
{use}
```

```
{serve}
```

## Training

```
{command}
```

{minutes:.1f} minutes on {m[device]}; python {m[python]}, torch {m[torch]}, \
transformers {m[transformers]}, peft {m[peft]}.

All settings:

```json
{settings}
```

## Limits

It was trained for one thing, {c[env]} as set above, and measured on nothing else. It may have \
lost what the base could do besides.
"""
USE_ADAPTER = """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base}), "{where}")
tokenizer = AutoTokenizer.from_pretrained("{where}")"""
USE_MERGED = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{where}")
tokenizer = AutoTokenizer.from_pretrained("{where}")"""


DATA = {  # where the tasks came from, by presets.kind; else they are ours
    "known": "The tasks are those of `{}`; a hash of each question keeps training and evaluation "
    "apart.",
    "ours": "No data set. Every task is generated from a seed by `{}`; training and evaluation "
    "draw from ranges of seeds that never meet.",
}


def card(summary: dict, kind: str) -> str:
    """README.md of an exported folder, with the hub's front matter. kind: adapter or merge."""
    config, machine, base = summary["config"], summary["machine"], base_of(summary)
    base = records.clean(Path(base).resolve().name if Path(base).exists() else base)
    clone = f"models/{base}" if base in EMBEDDED else base  # ours are on no hub, but in a clone
    is_adapter, rank, where = kind == "adapter", config["lora_rank"], "THIS_FOLDER"
    exact = "gain" in summary
    front = [
        *([f"base_model: {json.dumps(base)}"] if "/" in base else []),
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        f"tags: [grpo, {'lora, ' if rank else ''}picoswarm]",
    ]
    rows = []
    for tasks, stages in summary["eval"].items():
        reached = [stages[stage] for stage in ("before", "after_sft", "final")]
        n = reached[-1]["reward"]["n"]
        if exact:
            shares = [Interval(**found["exact"]).percent() for found in reached]
            rows.append(f"| {tasks}, exact answers | {' | '.join(shares)} | {n} |")
        means = [Interval(**found["reward"]).text() for found in reached]
        rows.append(f"| {tasks}, mean reward | {' | '.join(means)} | {n} |")
    use, serve = USE_MERGED, f"vllm serve {where}"
    if is_adapter:
        room = next((r for r in RANKS if r >= rank), rank)  # vLLM takes these
        lora = f"--enable-lora --max-lora-rank {room} --lora-modules trained={where}"
        use, serve = USE_ADAPTER, f"vllm serve {shlex.quote(clone)} {lora}"
    told = summary["warnings"].items()
    gain = Interval(**summary["gain" if exact else "gain_reward"])
    kept = {name: value for name, value in config.items() if value not in ("", None)}
    return CARD.format(
        s=summary,
        c=config,
        m=machine,
        front="\n".join(front),
        base=base,
        suffix=", the adapter" if is_adapter else "",
        how=f"LoRA of rank {rank}, alpha {config['lora_alpha']}" if rank else "all weights",
        rows="\n".join(rows),
        n=gain.n,
        gain=gain.points() if exact else gain.signed(),
        data=DATA.get(presets.kind(config["env"]), DATA["ours"]).format(config["env"]),
        warnings="".join(f"The run reports, {name}: {sentence}.\n" for name, sentence in told),
        use=use.format(base=json.dumps(clone), where=where),
        serve=serve,
        command=f"python train.py {flags(config)} --model {shlex.quote(base)}",
        minutes=summary["seconds"]["total"] / 60,
        settings=json.dumps(kept, indent=1),
    )


def export(
    kind: Annotated[Literal["adapter", "merge"], tyro.conf.Positional],
    run: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
) -> None:
    """Export a finished run: `adapter` (PEFT's format) or `merge` (a model), with a model card.

    dtype: of a merged model's weights; auto is what the base was trained in.
    Raises SystemExit with one sentence if there is nothing to export, or `out` is in use.
    """
    if not (run / "summary.json").exists():
        raise SystemExit(
            f"{run}: there is no summary.json in it, so it is no finished run; "
            "train to the end first, or check the path"
        )
    with records.foreign(run):
        summary = records.record(run / "summary.json")
        if "api" in summary:
            raise SystemExit(f"{run}: an evaluation over an API has no weights to export")
        card(summary, kind)  # all that the card needs is there
    rank = summary["config"]["lora_rank"]
    saved = find_checkpoint(run / "checkpoint")
    if saved is None:
        raise SystemExit(f"{run}: it has no checkpoint; check the path, or train it again")
    if kind == "adapter" and not rank:
        raise SystemExit(
            f"{run}: all weights were trained (--lora-rank 0), so there is no adapter; "
            f"use: python -m bridges.export merge {run} {out}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"{out} is there already; choose a folder that is empty or new")
    policy = load_policy(base_of(summary), rank, summary["config"]["lora_alpha"], device="cpu")
    if dtype == "auto":  # as in load_policy
        on_cpu = not rank or "CPU" in summary["machine"]["device"]
        dtype = "float32" if on_cpu else "bfloat16"
    new = out.with_name(out.name + ".new")  # whole or not at all
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        if kind == "adapter":
            save_adapter(saved, policy.name, new)
        else:
            load_checkpoint(saved, policy)
            save_merged(policy, dtype, new)
        policy.tokenizer.save_pretrained(new)
        (new / "README.md").write_text(card(summary, kind), encoding="utf-8")
        readable(new, "README.md")
        if out.exists():
            out.rmdir()
        new.rename(out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        cure = "make room, or choose another folder"
        raise SystemExit(f"{out}: {first_line(error)}; nothing was exported, {cure}") from None
    print(f"{kind} of {run}: {out}, with a card in {out / 'README.md'}")


def save_adapter(saved: Path, base: str, folder: Path) -> None:
    """The checkpoint's adapter. It names its base, not the path on the machine that trained it."""
    shutil.copy(saved / "adapter_model.safetensors", folder)
    config = json.loads((saved / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def save_merged(policy, dtype: str, folder: Path) -> None:
    """Merge in float32, save as dtype, and print what rounding does to the log-probs of a text."""
    ids = torch.tensor([policy.tokenizer(TEXT)["input_ids"]])  # [1, T]
    before = logprobs(policy, ids)
    if policy.lora_rank:
        policy.model, policy.lora_rank = policy.model.merge_and_unload(), 0
    policy.model.to(getattr(torch, dtype)).save_pretrained(folder)
    moved = (logprobs(policy, ids) - before).abs().max()
    print(
        f"merged in float32, saved as {dtype}: log-probs of a text of {ids.shape[1]} tokens "
        f"move by at most {moved:.1g} nats"
    )


def logprobs(policy, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs in nats of all tokens of a text but the first: ids [1, T] -> [T-1] float32."""
    everything = torch.ones(1, ids.shape[1] - 1, dtype=torch.bool)
    with torch.no_grad():
        return token_logprobs(policy, ids, everything)[0]


def main(words: list[str]) -> None:
    tyro.cli(export, args=words, prog="python -m bridges.export")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1:])
    else:
        example = Path(__file__).parents[1] / "results/showcase/summary.json"
        print(card(json.loads(example.read_text(encoding="utf-8")), "adapter"))
