"""Checkpoints: what a run needs to go on after any death, and how to never lose the last good one.

    runs/NAME/checkpoint/        adapter (PEFT's format; with --lora-rank 0 the whole model), optimizer.pt, state.json, checksum
    runs/NAME/checkpoint.old/    the one before

A run dies in the middle of a write sooner or later: a kill, a full disk, a lost node. So a checkpoint is written in full beside the old one,
flushed to the disk, and only then renamed: at every moment at least one whole checkpoint stands. A disk can also lie: a SHA-256 over all files
tells a damaged checkpoint from a good one, and then the one before is taken, which costs `save_every` updates and not the run.

    old | current          the older one is removed first, so that there are never more than two
          current | new    written, flushed
    old |           new    current renamed to old … a kill here leaves old alone, and find_checkpoint takes it
    old | current          … and new renamed to current

Loading runs nothing: weights are safetensors, the optimizer goes through torch's weights_only, the state is JSON.

Run me: `python -m bookkeeping.checkpoint` writes two checkpoints of pico_base, flips one bit of the newer, and finds the older.
"""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from policy import Policy, first_line


def checksum(folder: Path) -> str:
    """SHA-256 over names and contents of a checkpoint's files, except the file that holds the sum."""
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.name != "checksum"):
        digest.update(file.name.encode())
        with open(file, "rb") as f:
            while block := f.read(2**24):  # all weights of a 4B at once would be 16 GB of memory
                digest.update(block)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk and not only in the machine's memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_checkpoint(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer | None, state: dict) -> None:
    """Write adapter (PEFT's format, or the whole model), optimizer and `state`; the checkpoint before stays as `folder`.old.

    A kill at any moment leaves a whole checkpoint. Raises OSError if the disk is full or read-only; then too the last one stands.
    """
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        policy.model.save_pretrained(new, safe_serialization=True)
        if not policy.lora_rank:
            policy.tokenizer.save_pretrained(new)  # then the folder is a model of its own
        torch.save(optimizer.state_dict() if optimizer else {}, new / "optimizer.pt")
        (new / "state.json").write_text(json.dumps(state))
        (new / "checksum").write_text(checksum(new))
        for path in (*new.iterdir(), new):
            flush(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        room = shutil.disk_usage(folder.parent).free
        shutil.rmtree(new, ignore_errors=True)  # half of one is good for nothing, and a full disk needs the room
        if isinstance(error, OSError) and error.errno:
            raise
        # safetensors and torch.save tell of a full disk in words of their own, as SafetensorError and RuntimeError.
        why = errno.ENOSPC if room < 2**20 else errno.EIO
        raise OSError(why, f"{os.strerror(why)} while the checkpoint was written ({type(error).__name__})", str(folder)) from error
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    flush(folder.parent)


def find_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint: `folder`, else `folder`.old, and then it says why. None if there never was one.

    SystemExit if there is none but damaged ones.
    """
    damaged = []
    for candidate in (folder, folder.with_name(folder.name + ".old")):
        if not candidate.exists():
            continue
        try:
            whole = checksum(candidate).encode() == (candidate / "checksum").read_bytes()
        except OSError:  # no checksum file, or one of its files cannot be read
            whole = False
        if whole:
            if damaged:
                print(f"{damaged[0]} is damaged (its checksum does not match); the one before it is taken, {candidate.name}")
            return candidate
        damaged.append(candidate)
    if damaged:
        older = "so is the one before" if len(damaged) > 1 else "there is no older one"
        raise SystemExit(f"{damaged[0]}: the checkpoint is damaged (its checksum does not match), and {older}; start again or restore it")
    return None


def set_aside(folder: Path) -> None:
    """Before a run goes on from `folder`.old: a damaged `folder` goes to `folder`.damaged, or the next save would push the good one out for it."""
    if folder.exists():
        away = folder.with_name(folder.name + ".damaged")
        shutil.rmtree(away, ignore_errors=True)
        folder.rename(away)


def load_checkpoint(folder: Path, policy: Policy) -> tuple[dict, dict]:
    """Put the saved weights into `policy`; returns (optimizer state, state) as they were given to save_checkpoint.

    SystemExit with one sentence if the files are not those of such a policy.
    """
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    try:
        if policy.lora_rank:
            set_peft_model_state_dict(policy.model, load_file(folder / "adapter_model.safetensors"))
        else:
            weights = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
            policy.model.load_state_dict(weights, strict=False)  # a tied head is stored once
        state = json.loads((folder / "state.json").read_text())
        if not (isinstance(state, dict) and isinstance(state.get("update"), int)):
            raise ValueError("state.json is not the state of a run")
    except (SafetensorError, FileNotFoundError, RuntimeError, ValueError) as error:  # RuntimeError: other shapes, and JSON that is too deep
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise SystemExit(f"{folder}: not a checkpoint of this run ({first_line(error)}); start again or restore it") from None
    return load_tensors(folder / "optimizer.pt", policy.device), state


def restore(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, state: dict) -> dict:
    """Weights into `policy`, moments into `optimizer`; returns the saved state. SystemExit if that is not one with the entries of `state`."""
    moments, saved = load_checkpoint(folder, policy)
    try:
        optimizer.load_state_dict(moments)
        ours = (
            all(type(saved[name]) is type(value) for name, value in state.items() if name != "level")
            and state["seconds"].keys() <= saved["seconds"].keys()
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        ours = False
    if not ours:
        raise SystemExit(f"{folder}: its optimizer.pt or state.json is not that of this run; start again or restore it")
    return saved


def load_tensors(file: Path, device=None):
    """torch.load of tensors and plain values. SystemExit if there is anything else in the file: a pickle can run any program."""
    try:
        return torch.load(file, weights_only=True, map_location=device)
    except (OSError, torch.OutOfMemoryError):
        raise
    except Exception:  # a pickle of something else is an UnpicklingError; bytes that are none can be any error
        raise SystemExit(
            f"{file}: it holds more than tensors and numbers, so it was not written by a run and is not loaded; delete the run"
        ) from None


def demo() -> None:
    """Two checkpoints, one of them damaged."""
    import tempfile

    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=8, lora_alpha=16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint"
        for update in (10, 20):
            save_checkpoint(folder, policy, None, {"update": update})
        print("written:", {p.name: sorted(f.name for f in p.iterdir()) for p in sorted(Path(name).iterdir())})
        weights = folder / "adapter_model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-5] ^= 1
        weights.write_bytes(data)
        found = find_checkpoint(folder)
        state = load_checkpoint(found, policy)[1]
        print("goes on after update", state["update"])
        assert state == {"update": 10}


if __name__ == "__main__":
    demo()
