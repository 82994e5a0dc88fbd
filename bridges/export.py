"""Turn a trained run into a folder that other tools read, with a card that says what it is.

    python -m bridges.export adapter runs/NAME out/     the LoRA adapter alone, in PEFT's format:
                                                        small, needs its base model
    python -m bridges.export merge   runs/NAME out/     base and adapter as one model, which
                                                        transformers, vLLM and all others load
    hf upload owner/name out/ --private                 the hub's own command uploads either, with
                                                        the card as its page

A merged model is served by vLLM (`vllm serve out/`) or by transformers (`transformers serve out/`);
bridges/api.py evaluates what is served.

Merging is done once, in float32, from the checkpoint: W' = W + (alpha / rank) · B A. The result is
saved in the type that the base had in training, float32 on a CPU and bfloat16 on a GPU, unless
--dtype says otherwise. Rounding has a price: in bfloat16 pico_base's log-probs move by up to 0.2
nats. (In training nothing is ever merged in place; policy.py says why.)

The card (README.md) says what the model is and how to use it. Below is the run's own report: the
evaluations with their intervals, the flags, the machine. It has nothing that was not measured.

Run me: `python -m bridges.export` prints the card of the committed letters run.
"""

import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from bookkeeping import folder, pretrained, records, report
from fast.vllm_engine import room_for
from policy import EMBEDDED


def base_of(summary: dict) -> str:
    """Folder or hub id of the model that a run started from."""
    return EMBEDDED.get(summary["model"], summary["model"])


CARD = """---
{front}
---

# {base}, trained on {env}

{base} after {updates} updates of GRPO ({how}), with picoswarm, which played {env} with it. Tasks \
come from seeds or from a file; training and evaluation share none. It was trained for this one \
thing, and measured on nothing else: it may have lost what the base could do besides.

## Use

```python
{use}
```

```
{serve}
```

{report}"""
USE_ADAPTER = """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base}), "THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")"""
USE_MERGED = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")"""


def card(run: Path, summary: dict, kind: str) -> str:
    """README.md of an exported folder, with the hub's front matter. kind: adapter or merge."""
    base, rank = base_of(summary), summary["config"]["lora_rank"]
    base = records.clean(Path(base).resolve().name if Path(base).exists() else base)
    clone = f"models/{base}" if base in EMBEDDED else base  # ours are in a clone, not on the hub
    front = [
        *([f"base_model: {json.dumps(base)}"] if "/" in base else []),
        f"library_name: {'peft' if kind == 'adapter' else 'transformers'}",
        "pipeline_tag: text-generation",
        f"tags: [grpo, {'lora, ' if rank else ''}picoswarm]",
    ]
    use, serve = USE_MERGED, "vllm serve THIS_FOLDER"
    if kind == "adapter":
        lora = f"--enable-lora --max-lora-rank {room_for(rank)} --lora-modules trained=THIS_FOLDER"
        use, serve = USE_ADAPTER, f"vllm serve {shlex.quote(clone)} {lora}"
    return CARD.format(
        front="\n".join(front),
        base=base,
        env=records.clean(summary["env"]),
        updates=summary["updates"],
        how=f"LoRA of rank {rank}" if rank else "all weights",
        use=use.format(base=json.dumps(clone)),
        serve=serve,
        report=report.text(report.collect(run)[0]),
    )


def export(
    kind: Annotated[Literal["adapter", "merge"], tyro.conf.Positional],
    run: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    model: str = "",
) -> None:
    """Export a finished run: `adapter` (PEFT's format) or `merge` (a model), with a model card.

    dtype: of a merged model's weights; auto is the type that the base had in training.
    model: the base, if it has moved since.
    Raises SystemExit with one sentence if there is nothing to export, or `out` is in use.
    """
    if not (run / "summary.json").exists():
        raise SystemExit(
            f"{run}: there is no summary.json in it, so it is no finished run; "
            "train to the end first, or check the path"
        )
    saved = folder.find_checkpoint(run / "checkpoint")
    if saved is None:
        raise SystemExit(f"{run}: it has no checkpoint; check the path, or train it again")
    with records.foreign(run):
        summary = records.record(run / "summary.json")
        text = card(run, summary, kind)
        rank, alpha = summary["config"]["lora_rank"], summary["config"]["lora_alpha"]
    if kind == "adapter" and not rank:
        raise SystemExit(
            f"{run}: all weights were trained (--lora-rank 0), so there is no adapter; "
            f"use: python -m bridges.export merge {run} {out}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"{out} is there already; choose a folder that is empty or new")
    policy = pretrained.load_checked(model or base_of(summary), rank, alpha, device="cpu")
    folder.refuse_base(saved, policy)
    if dtype == "auto":  # as in load_policy
        dtype = "bfloat16" if rank and "CPU" not in summary["machine"]["device"] else "float32"
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as room:
        made = Path(room) / "made"
        made.mkdir()
        folder.load_checkpoint(saved, policy)
        if kind == "adapter":
            # The name of its base, and no path on the training machine.
            policy.model.peft_config["default"].base_model_name_or_path = policy.name
            policy.model.save_pretrained(made, save_embedding_layers=False)
        else:
            merged = policy.model.merge_and_unload() if rank else policy.model  # in float32
            # a server has to stop where we did, also at the template's own end token
            merged.generation_config.eos_token_id = sorted(policy.stop_ids)
            merged.to(getattr(torch, dtype)).save_pretrained(made)
        policy.tokenizer.save_pretrained(made)
        (made / "README.md").write_text(text, encoding="utf-8")
        for picture in run.glob("curves.png"):
            shutil.copy(picture, made)
        folder.readable(made, "README.md")
        made.rename(out)  # whole or not at all
    print(f"{kind} of {run}: {out}, with a card in {out / 'README.md'}")


if __name__ == "__main__":
    if sys.argv[1:]:
        tyro.cli(export, prog="python -m bridges.export")
    else:
        example = Path(__file__).parents[1] / "results/showcase"
        print(card(example, records.record(example / "summary.json"), "adapter"))
