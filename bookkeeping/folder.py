"""The run folder: what a run writes, how it resumes after a crash, and what that may cost.

    runs/NAME/  config.json  metrics.jsonl  evals.jsonl  episodes.jsonl  summary.json
                report.md  report.html  curves.png  checkpoint/  checkpoint.old/  lock

    checkpoint/      adapter (PEFT's format; with --lora-rank 0 the whole model),
                     optimizer.pt, state.json, checksum
    checkpoint.old/  the previous one

Three rules for the logs. A line is written as soon as its numbers are known, and whole files are
written next to the old one and then renamed, so that a kill at any moment leaves something to read.
On --resume, lines written after the last checkpoint are dropped: they will be written again. And
only one process writes into a folder: it holds a lock, which the kernel releases however the
process ends.

Sooner or later a run dies in the middle of a write: a kill, a full disk, a lost node. So a new
checkpoint is written in full next to the old one, flushed to the disk, and only then renamed. At
every moment at least one whole checkpoint exists. A disk can also lie. A SHA-256 over all files
that were saved, which are listed with it, tells a damaged checkpoint from a good one; if it is
damaged, the previous one is taken, which costs `save_every` updates and not the run.

    old | current          old is removed first, so there are never more than two
          current | new    written, flushed
    old |           new    current renamed to old … after a kill here, find_checkpoint takes old
    old | current          … and new renamed to current

Loading runs no code: weights are safetensors, the optimizer is loaded with torch's weights_only,
the state is JSON.
"""

import ast
import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import get_type_hints

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model
from torch.optim import Optimizer

import settings
from bookkeeping.records import flush, foreign, lines, printable, read, write_lines
from fast.machine import out_of_memory
from policy import Policy

# On --resume these may change, because they do not change the experiment.
MAY_CHANGE = (
    "updates",
    "until_converged",
    "stop_when_settled",
    "max_updates",
    "wandb",
    "threads",
    "device",
    "engine",
    "vllm_memory",
    "vllm_sleep",
    "vllm_seeds",
    "vllm_eager",
    "model",  # it may have moved; the checkpoint knows its weights
    "micro_tokens",
    "gradient_checkpointing",
)
LOGS = ("metrics.jsonl", "evals.jsonl", "episodes.jsonl")
# {type of a flag: what config.json may hold for it}; other types are stored as they are
SAVED_AS = {float: int | float, float | None: int | float | None, list[str]: list}
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)

# This process's run folder, once it has one. If the run does not finish, its last sentence names it
# (refusals.errors_in_one_sentence).
own: list[Path] = []


# -------------------------------------------------------------------------------------- the folder


def claim(folder: Path) -> FileLock:
    """Keep other processes out of a run folder, for as long as the returned lock lives.

    SystemExit if another process already has it. Some clusters' disks have no locks: that is
    printed.
    """
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise SystemExit(
            f"{folder}: another process is working in this run folder; wait until it is done, "
            "or stop it"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(
            f"{folder}: this disk has no file locks ({error.strerror}), so nothing keeps a second "
            "process out: start none in this folder, or take --runs on another disk"
        )
    return lock


def refuse_taken(cfg) -> None:
    """SystemExit if --name is a folder that is not empty."""
    folder = Path(cfg.runs).absolute() / cfg.name
    if cfg.name and folder.is_dir() and any(file.name != "lock" for file in folder.iterdir()):
        raise SystemExit(
            f"{folder} exists; choose another --name, or continue it with --resume {folder}"
        )


def make_folder(cfg) -> tuple[Path, FileLock]:
    """(a new run folder, its lock). Keep the lock, or it is released."""
    refuse_taken(cfg)
    level = f"-{cfg.difficulty}" if cfg.difficulty else ""
    over_api = re.sub("[^A-Za-z0-9._-]+", "-", cfg.model) + "-" if cfg.api_base else ""
    name = cfg.name or f"{over_api}{settings.env_name(cfg.env)}{level}-{datetime.now():%m%d-%H%M%S}"
    # Three seeds started with one command line begin in the same second.
    runs = Path(cfg.runs).absolute()
    folders = [runs / f"{name}{more}" for more in ("", *(f"-{n}" for n in range(2, 100)))]
    folder = next(path for path in folders if cfg.name or not path.exists())
    folder.mkdir(parents=True, exist_ok=bool(cfg.name))
    flush(folder.parent)
    return folder, claim(folder)


def how_to_go_on() -> str:
    """The end of the message of a run that was stopped, before or after its first checkpoint."""
    if not any((home / "config.json").exists() for home in own):
        return "; nothing was written"
    return f"; go on with: python train.py --resume {own[0]}"


def resume_folder(cfg, typed: set[str]) -> tuple[Path, Path | None, FileLock]:
    """(run folder, checkpoint to go on from, the folder's lock).

    cfg becomes the saved config; flags that do not change the experiment may be typed again.
    SystemExit with one sentence if there is nothing to resume, a flag cannot change, or the folder
    is in use.
    """
    folder = Path(cfg.resume).absolute()
    saved_cfg, checkpoint, lock = open_saved("--resume", folder, cfg)
    own[:] = [folder]
    if saved_cfg.api_base:
        raise SystemExit(f"--resume {folder}: it holds an evaluation over an API, not training")
    planned = saved_cfg.updates
    take_typed("--resume", saved_cfg, cfg, typed - {"resume"}, MAY_CHANGE)
    if saved_cfg.updates != planned:
        print(
            f"--updates was {planned} before: the learning rate now falls until update "
            f"{saved_cfg.updates}, so it jumps here"
        )
    vars(cfg).update(vars(saved_cfg), resume="", eval_only="")
    if checkpoint and checkpoint.name != "checkpoint":  # else the next save would keep it
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    return folder, checkpoint, lock


def open_saved(flag: str, folder: Path, command_line) -> tuple:
    """(Config, newest whole checkpoint or None, lock) of a folder that may come from anywhere.

    command_line: the Config as typed. If the environment or a scorer is code, it has to be typed as
    well. Its files may have moved, if they are the same. SystemExit or ValueError with one sentence
    if this is not a run folder of ours, or is in use.
    """
    if not (folder / "config.json").exists():
        raise SystemExit(
            f"{flag} {folder}: it has no config.json, so it is not a run folder, or its run was "
            "stopped before it began; check the path, or start the same command again"
        )
    lock = claim(folder)
    saved = read(folder / "config.json")
    types = {name: SAVED_AS.get(of, of) for name, of in get_type_hints(type(command_line)).items()}
    unknown = [name for name, value in saved.items() if not isinstance(value, types.get(name, ()))]
    if unknown:
        raise ValueError(
            f"{folder}/config.json: there is no flag {unknown[0][:40]!a}, or not with that value; "
            "check the path, or restore the file"
        )
    cfg = type(command_line)(**saved)
    checkpoint = find_checkpoint(folder / "checkpoint")
    env = command_line.env
    same = env != cfg.env and FILES.sub(r"\1", env) == FILES.sub(r"\1", cfg.env)
    if same and checkpoint and trained_with(checkpoint, env):  # its files have moved
        cfg.env = env
    if CODE.search(cfg.env) and cfg.env != command_line.env:
        raise SystemExit(
            f"{folder}: this run's environment is code from a file, {cfg.env[:200]!a}; read it, "
            "and if you trust it, type that after --env (the new path, if the same file has moved)"
        )
    return cfg, checkpoint, lock


def take_typed(flag: str, cfg, command_line, names: set[str], may_change) -> None:
    """Put the settings with these names, as they were typed, into a saved config.

    SystemExit if one of them cannot change.
    """
    for name in sorted(names):
        value, saved = getattr(command_line, name), getattr(cfg, name)
        if name not in may_change and value != saved:
            raise SystemExit(
                f"{settings.flag_name(name)} cannot change on {flag}: this run has {saved!r}; "
                "leave it out, or start a new run for another experiment"
            )
        setattr(cfg, name, value)


# FILE:NAME. A file's name may contain commas and line ends.
CODE = re.compile(r"^(?!jsonl:|reasoning_gym:).*:|,(scorer|expert)=.*:", re.DOTALL)
FILES = re.compile(r"(jsonl:|held_out=)[^,]*|[^,=]*(?=:)", re.DOTALL)  # in an --env


def sources(env: str) -> list[Path]:
    """The files that decide what an environment's tasks are and what they pay."""
    here = Path(settings.__file__).resolve().parent
    # it also splits thoughts from answers, for all our environments
    letters = here / "env_letters.py"
    if settings.env_kind(env) == "custom":
        return [Path(env.rpartition(":")[0])]
    if settings.env_kind(env) == "known":
        known = settings.known_tasks()
        return [letters, Path(known.__file__), *known.open_source(env).files]
    rules = sorted((here / "swarm").glob("*.py")) if env == "swarm" else []
    return [*dict.fromkeys([letters, here / f"env_{env}.py"]), *rules]


def code_hash(env: str) -> str:
    """A hash of the files that determine an environment's tasks and rewards (sources).

    In Python files neither comments nor layout count; in others every byte does.
    """
    tree = lambda file: ast.dump(ast.parse(file.read_bytes())).encode()
    content = lambda file: tree(file) if file.suffix == ".py" else file.read_bytes()
    whole = b"".join(content(file) for file in sources(env) if file.exists())
    return hashlib.sha256(whole).hexdigest()[:16]


def trained_with(saved: Path, env: str) -> bool:
    """Are the environment's code and rows those that a checkpoint was trained with?"""
    return str(read(saved / "state.json").get("code", "")).endswith(code_hash(env))


def mend(folder: Path, keep: Callable = lambda line: True) -> None:
    """Rewrite the logs with the lines to keep, and without a last line that a kill cut in two.

    The next line would be glued to half a line. A log that is a link becomes a copy: nothing is
    written where it points to.
    """
    for path in filter(Path.exists, (folder / name for name in LOGS)):
        with foreign(path):
            kept = [line for line in lines(path) if keep(line)]
        write_lines(path, kept)


def trim(folder: Path, done: int) -> None:
    """Drop lines that a killed run wrote after its last checkpoint, and a final evaluation.

    They will be written again. done: updates at that checkpoint, and the one with 0 is made before
    SFT's evaluation; -1 if there is none.
    """
    again = ("final",) if done else ("final", "after_sft")
    mend(folder, lambda line: line["update"] <= done and line.get("stage") not in again)


# --------------------------------------------------------------------------------- its checkpoints


# Endings of the files that loading needs. A file manager may put others in while they are written.
SAVED = (".safetensors", ".pt", ".json", ".jinja", ".txt", ".model")


def checksum(files: Iterable[Path]) -> str:
    """SHA-256 over names and contents of files."""
    total = hashlib.sha256()
    for file in sorted(files):
        with open(file, "rb") as f:  # in pieces: a 4B model's weights are 16 GB
            content = hashlib.file_digest(f, "sha256").hexdigest()
        total.update(f"{file.name} {content}\n".encode())
    return total.hexdigest()


def is_whole(folder: Path) -> bool:
    """Are a checkpoint's files those that were saved? Others in the folder do not count.

    OSError if one is not there.
    """
    total, *names = (folder / "checksum").read_text(encoding="utf-8").split()
    return checksum(folder / Path(name).name for name in names) == total


def weights_hash(policy: Policy) -> str:
    """A hash of a base model: of the shape and about a thousand numbers of each weight.

    In bfloat16, so that it is the same whichever type and device the run computes on; without the
    weights' names, which may change with transformers.
    """
    base = [weight.detach() for name, weight in policy.lm.named_parameters() if "lora_" not in name]
    some = [weight.flatten()[:: 1 + weight.numel() // 1000].to(torch.bfloat16) for weight in base]
    told = sorted(f"{w.shape} {x.tolist()}" for w, x in zip(base, some))
    return hashlib.sha256("".join(told).encode()).hexdigest()[:16]


def refuse_base(saved: Path, policy: Policy) -> None:
    """SystemExit if a policy as it was loaded is not the base that a checkpoint belongs to."""
    if read(saved / "state.json").get("base") != weights_hash(policy):
        raise SystemExit(
            f"{saved}: {policy.name} is not the model that this run was trained on, its weights "
            "are others; give that one with --model"
        )


def readable(folder: Path, like: str) -> None:
    """Give all files the permissions of `like`, which has those of the umask.

    safetensors makes files that only their owner can read.
    """
    for file in folder.iterdir():
        shutil.copymode(folder / like, file)


def save_checkpoint(
    folder: Path, policy: Policy, optimizer: Optimizer | None, state: dict, reference=None
) -> None:
    """Write weights, optimizer and `state`; the previous checkpoint stays as `folder`.old.

    reference: with --kl {name: weight} after SFT, kept in optimizer.pt (load_state_dict ignores
    entries that it does not know).

    A kill at any moment leaves a whole checkpoint. So does a full or read-only disk, which raises
    OSError.
    """
    new, old = folder.with_suffix(".new"), folder.with_suffix(".old")
    shutil.rmtree(new, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        if policy.lora_rank:
            # Embeddings are frozen; the default, "auto", would ask the hub about them.
            policy.model.save_pretrained(new, save_embedding_layers=False)
        else:  # names as in memory: with the hub's, one per expert, loading would have to fuse them
            policy.model.save_pretrained(new, save_original_format=False, max_shard_size="1TB")
            policy.tokenizer.save_pretrained(new)  # so that the folder is a complete model
        moments = optimizer.state_dict() if optimizer else {}
        torch.save(moments | {"reference": reference}, new / "optimizer.pt")
        (new / "state.json").write_text(json.dumps(state), encoding="utf-8")
        files = [file for file in new.glob("[!.~]*") if file.suffix in SAVED]
        names = [checksum(files), *(file.name for file in files)]
        (new / "checksum").write_text("\n".join(names), encoding="utf-8")
        readable(new, "checksum")
        # The logs first, so that after a power cut no checkpoint is newer than its lines.
        for path in (*folder.parent.glob("*.jsonl"), *new.iterdir(), new):
            flush(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)  # half a checkpoint is useless, and takes space
        if isinstance(error, OSError) and error.errno:
            raise
        # safetensors and torch.save report a full disk as SafetensorError and RuntimeError.
        raise OSError(
            errno.EIO,
            f"the checkpoint could not be written ({type(error).__name__}); is the disk full?",
            str(folder),
        ) from error
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    flush(folder.parent)


def find_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint: `folder`, or `folder`.old with a printed reason.

    None if there never was one. SystemExit if all that exist are damaged.
    """
    checkpoints = [path for path in (folder, folder.with_suffix(".old")) if path.exists()]
    for path in checkpoints:
        with suppress(OSError, ValueError):  # one of its files cannot be read
            if is_whole(path):
                return path
        print(f"{path} is damaged (its checksum does not match); looking for the one before it")
    if checkpoints:
        raise SystemExit(f"{folder}: every checkpoint is damaged; restore one, or start again")
    return None


def load_checkpoint(folder: Path, policy: Policy, optimizer=None) -> tuple[dict, dict]:
    """Load the saved weights into `policy` and the moments into `optimizer`.

    Returns (the reference of --kl if there is an optimizer, the state), as they were saved.
    SystemExit with a one-sentence message if the files do not fit the policy.
    """
    reference = {}
    try:
        load_weights(folder, policy)
        state = read(folder / "state.json")
        if optimizer:
            # A pickle can run any program; weights_only reads only tensors and plain values.
            saved = torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu")
            for group, current in zip(saved["param_groups"], optimizer.param_groups):
                group["fused"] = current["fused"]  # of this device, not of the one it was saved on
            optimizer.load_state_dict(saved)
            for name, weight in (saved["reference"] or {}).items():
                reference[name] = weight.to(policy.device)
    except Exception as error:  # bytes that are not a pickle may raise anything
        if out_of_memory(error):
            raise
        reason = printable(" ".join(str(error).split()))[:200]
        raise SystemExit(
            f"{folder}: its weights, state.json or optimizer.pt are not those of a checkpoint of "
            f"this run ({reason}); start again or restore it"
        ) from None
    return reference, state


def load_weights(folder: Path, policy: Policy) -> None:
    """Load exactly the trainable weights. An error if one is missing, or is not the policy's."""
    if not policy.lora_rank:
        load_model(policy.model, folder / "model.safetensors")  # to it a tied head is one weight
        return
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    adapter = load_file(folder / "adapter_model.safetensors")
    expected = get_peft_model_state_dict(policy.model, save_embedding_layers=False)
    unmatched = expected.keys() ^ adapter.keys()
    if unmatched:  # peft would skip them silently
        raise ValueError(
            f"{len(unmatched)} weights are only in it or in the policy, "
            f"{min(unmatched)[:100]!a} for one"
        )
    set_peft_model_state_dict(policy.model, adapter)
