"""Out again: a trained run becomes a folder that other people's tools read, with a card that says what it is and how sure we are of it.

    python -m bridges.export adapter runs/NAME out/                         the LoRA adapter alone, in PEFT's format: small, needs its base model
    python -m bridges.export merge   runs/NAME out/                         base and adapter as one model: what transformers, vLLM and all others load
    python -m bridges.export merge   runs/NAME out/ --push owner/name       and upload it to the hub (private, unless --public)

Merging is done once, in float32, from the checkpoint: W' = W + (alpha / rank) · B A. The result is saved in the type that the base had in
training, float32 on a CPU and bfloat16 on a GPU, unless --dtype says otherwise. What rounding costs is printed: the log-probs before and
after are compared on a text (pico_base, saved as bfloat16: up to 0.2 nats). (In training nothing is ever merged in place; policy.py says why.)

The card (README.md) is written from the run's summary.json and from nothing else: the base, the data, the evaluations with their intervals, the
flags, the machine. What was not measured is not in it.

Run me: `python -m bridges.export` prints the card of the committed letters run.
"""

import json
import shlex
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

import settings
from bookkeeping import doctor, records
from bookkeeping.checkpoint import find_checkpoint, load_checkpoint
from bookkeeping.report import STAGES, cell, points, reward_cell, shown, signed
from fast.logprobs import token_logprobs
from policy import BIG, PICO, PICO_SWARM, first_line, load_policy

TEXT = "RL reinforces what pays: the policy samples, the environment scores, and what scored above its group's mean becomes likelier."


def base_of(summary: dict) -> str:
    """Folder or hub id of the model that a run began with."""
    asked, was = summary["config"]["model"], summary["machine"]["model"]
    if asked != "auto":
        return asked
    return {PICO.name: str(PICO), PICO_SWARM.name: str(PICO_SWARM)}.get(was, BIG)


def flags(config: dict, n_parameters: int) -> str:
    """The command line that a config stands for: only what differs from what train.py would have chosen for n_parameters."""
    env = settings.kind(config["env"])
    default = {f.name: f.default for f in fields(settings.Config)} | settings.BY_ENV[env]
    by_itself = settings.by_size(n_parameters, env)
    out = ["--env", config["env"]]
    for name, value in config.items():
        if (
            name in ("env", "break_", "model", "name", "runs", "resume", "eval_only", "threads", "wandb", "device", "engine")
            or name not in default
        ):
            continue
        if value not in (default[name], by_itself.get(name)) and value is not None:
            flag = name.replace("_", "-")
            out += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", shlex.quote(str(value))]
    return " ".join(out)


def card(summary: dict, kind: str, hub: str = "") -> str:
    """README.md of an exported folder, with the hub's front matter. kind: adapter or merge."""
    config, m, base = summary["config"], summary["machine"], base_of(summary)
    base = records.clean(Path(base).resolve().name if Path(base).exists() else base)
    exact, reward = shown(summary)
    n = next(iter(summary["eval"].values()))["final"]["n"]
    front = ["---", *([f"base_model: {json.dumps(base)}"] if "/" in base else []), f"library_name: {'peft' if kind == 'adapter' else 'transformers'}",
             "pipeline_tag: text-generation", f"tags: [grpo, {'lora, ' * bool(config['lora_rank'])}picoswarm]", "---", ""]  # fmt: skip
    rows = []
    for tasks, stages in summary["eval"].items():
        rows += [f"| {tasks}, {what} | " + " | ".join(form(stages[s]) for s in STAGES) + f" | {stages['final']['n']} |"
                 for what, form, there in (("exact answers", cell, exact), ("mean reward", reward_cell, reward)) if there]  # fmt: skip
    where = hub or "THIS_FOLDER"
    use = {
        "adapter": ["from peft import PeftModel", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
                    f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({json.dumps(base)}), "{where}")',
                    f'tokenizer = AutoTokenizer.from_pretrained("{where}")'],
        "merge": ["from transformers import AutoModelForCausalLM, AutoTokenizer", "",
                  f'model = AutoModelForCausalLM.from_pretrained("{where}")', f'tokenizer = AutoTokenizer.from_pretrained("{where}")'],
    }[kind]  # fmt: skip
    serve = (
        f"vllm serve {shlex.quote(base)} --enable-lora --max-lora-rank {config['lora_rank']} --lora-modules trained={where}"
        if kind == "adapter"
        else f"vllm serve {where}"
    )
    how = f"LoRA of rank {config['lora_rank']}, alpha {config['lora_alpha']}" if config["lora_rank"] else "all weights"
    command = flags(config, m["parameters"])
    gain = points(summary["gain"]) if exact else signed(summary["gain_reward"])
    return "\n".join([
        *front, f"# {base}, trained on {config['env']}" + (", the adapter" if kind == "adapter" else ""), "",
        f"{base} after {config['sft_steps']} steps of SFT on {config['sft_examples']} scripted demonstrations and {summary['updates']} updates of GRPO ({how}), with picoswarm.",
        "", "## Evaluation", "", "Greedy, held-out tasks, 95% intervals (Wilson for shares, bootstrap for means). One training seed.", "",
        "| tasks | before | after SFT | after GRPO | n |", "|---|---|---|---|---|", *rows, "",
        f"GRPO over SFT, on the same {n} tasks of {summary['trained']}: {gain}.",
        *(f"The run reports, {name}: {sentence}." for name, sentence in doctor.kept(summary).items()), "",
        "## Data", "", f"No data set. Every task is generated from a seed by picoswarm's `{config['env']}` environment; training and evaluation draw from ranges "
        f"of seeds that never meet. {summary['tokens']['sampled']:,} tokens were sampled, {summary['tokens']['trained']:,} trained on.", "",
        "## Use", "", "```python", *use, "```", "", f"```\n{serve}\n```", "",
        "## Training", "", f"```\npython train.py {command} --model {shlex.quote(base)}\n```" if "/" in base else f"```\npython train.py {command}\n```", "",
        f"{summary['seconds']['total'] / 60:.1f} minutes on {m['device']}; python {m['python']}, torch {m['torch']}, transformers {m['transformers']}, peft {m['peft']}.", "",
        "All settings:", "", "```json", json.dumps({k: v for k, v in config.items() if v not in ("", None)}, indent=1), "```", "",
        "## Limits", "", f"It was trained for one thing, {config['env']} as set above, and measured on nothing else. It may have lost what the base could do besides.", "",
    ])  # fmt: skip


def export(
    kind: Annotated[Literal["adapter", "merge"], tyro.conf.Positional],
    run: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    push: str = "",
    public: bool = False,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
) -> None:
    """Export a finished run: `adapter` (PEFT's format) or `merge` (a model of its own), with a model card.

    push: owner/name of a repository of the hub to upload to; you have to be logged in (`hf auth login`).
    dtype: of a merged model's weights; auto is what the base was trained in.
    Raises SystemExit with one sentence where there is nothing to export, or `out` is in use.
    """
    if not (run / "summary.json").exists():
        raise SystemExit(f"{run}: there is no summary.json in it, so it is no finished run; train to the end first, or check the path")
    with records.foreign(run):
        summary = records.record(run / "summary.json")
        card(summary, kind, push)  # all that the card needs is there
    rank = summary["config"]["lora_rank"]
    saved = find_checkpoint(run / "checkpoint")
    if saved is None:
        raise SystemExit(f"{run}: it has no checkpoint, so there are no weights to export; check the path, or train it again")
    if kind == "adapter" and not rank:
        raise SystemExit(
            f"{run}: all weights were trained (--lora-rank 0), so there is no adapter; use: python -m bridges.export merge {run} {out}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"{out} is there already; choose a folder that is empty or new")
    if push and push.count("/") != 1:
        raise SystemExit(f"--push {push}: that is no repository of the hub; give owner/name")
    new = out.with_name(out.name + ".new")  # whole or not at all
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    policy = load_policy(base_of(summary), rank, summary["config"]["lora_alpha"], device="cpu")
    if kind == "adapter":
        shutil.copy(saved / "adapter_model.safetensors", new)
        config = json.loads((saved / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = policy.name  # not the path on the machine that trained it
        (new / "adapter_config.json").write_text(json.dumps(config, indent=2))
    else:
        load_checkpoint(saved, policy)
        ids = torch.tensor([policy.tokenizer(TEXT)["input_ids"]])
        before = logprobs(policy, ids)
        if rank:
            policy.model, policy.lora_rank = policy.model.merge_and_unload(), 0
        if dtype == "auto":
            dtype = "float32" if not rank or "CPU" in summary["machine"]["device"] else "bfloat16"  # as in load_policy
        policy.model.to(getattr(torch, dtype)).save_pretrained(new)
        after = logprobs(policy, ids)
        moved = (after - before).abs().max()
        print(f"merged in float32, saved as {dtype}: log-probs of a text of {ids.shape[1]} tokens move by at most {moved:.1g} nats")
    policy.tokenizer.save_pretrained(new)
    (new / "README.md").write_text(card(summary, kind, push))
    if out.exists():
        out.rmdir()
    new.rename(out)
    print(f"{kind} of {run}: {out}, {sum(f.stat().st_size for f in out.iterdir()) / 2**20:.1f} MB, with a card in {out / 'README.md'}")
    if push:
        upload(out, push, public)


def logprobs(policy, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of every token but the first, [T-1] float32 in nats, of a text given as ids [1, T]."""
    with torch.no_grad():
        return token_logprobs(policy, ids, torch.ones(1, ids.shape[1] - 1, dtype=torch.bool))[0]


def upload(folder: Path, hub: str, public: bool) -> None:
    """Upload a whole folder to the repository `hub` (owner/name). SystemExit with one sentence if the hub does not take it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        url = HfApi().create_repo(hub, private=not public, exist_ok=True)
        HfApi().upload_folder(repo_id=hub, folder_path=folder, commit_message="Upload from picoswarm")
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        raise SystemExit(
            f"--push {hub}: the hub did not take it ({first_line(error)}); {folder} is complete, log in with `hf auth login` and try again"
        ) from None
    print(f"uploaded to {url}")


def main(words: list[str]) -> None:
    tyro.cli(export, args=words, prog="python -m bridges.export")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1:])
    else:
        print(card(json.loads((Path(__file__).parents[1] / "results/letters/grpo-0/summary.json").read_text()), "adapter"))
