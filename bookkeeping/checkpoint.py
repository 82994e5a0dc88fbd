"""Checkpoints: what a run needs to continue after any death. The last good one is never lost.

    runs/NAME/checkpoint/      adapter (PEFT's format; with --lora-rank 0 the whole model),
                               optimizer.pt, state.json, checksum
    runs/NAME/checkpoint.old/  the one before

Sooner or later a run dies in the middle of a write: a kill, a full disk, a lost node. So a new
checkpoint is written in full beside the old one, flushed to the disk, and only then renamed. At
every moment at least one whole checkpoint exists. A disk can also lie. A SHA-256 over all files
tells a damaged checkpoint from a good one, and then the one before is taken, which costs
`save_every` updates and not the run.

    old | current          the older one is removed first, so there are never more than two
          current | new    written, flushed
    old |           new    current renamed to old … after a kill here, find_checkpoint takes old
    old | current          … and new renamed to current

Loading runs no code: weights are safetensors, the optimizer goes through torch's weights_only, the
state is JSON.

Run me: `python -m bookkeeping.checkpoint` writes two checkpoints of pico_base, flips one bit of the
newer, and finds the older.
"""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model
from torch.optim import Optimizer

from bookkeeping.records import printable
from fast.machine import flush, out_of_memory
from policy import Policy


def sibling(folder: Path, ending: str) -> Path:
    """checkpoint -> checkpoint.old, .new or .damaged, beside it."""
    return folder.with_name(f"{folder.name}.{ending}")


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()  # in pieces: a 4B's weights are 16 GB


def checksum(folder: Path) -> str:
    """SHA-256 over names and contents of a checkpoint's files, except the checksum itself and what
    somebody's file manager leaves (.DS_Store, .ipynb_checkpoints)."""
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name != "checksum" and not file.name.startswith("."):
            total.update(f"{file.name} {digest(file)}\n".encode())
    return total.hexdigest()


def readable(folder: Path) -> None:
    """safetensors' files can be read by their owner alone. Here the umask decides, as elsewhere."""
    mask = os.umask(0o077)
    os.umask(mask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~mask)


def save_checkpoint(folder: Path, policy: Policy, optimizer: Optimizer | None, state: dict) -> None:
    """Write weights, optimizer and `state`; the checkpoint before it stays as `folder`.old.

    A kill at any moment leaves a whole checkpoint. So does a disk that is full or read-only: that
    raises OSError.
    """
    new, old = sibling(folder, "new"), sibling(folder, "old")
    shutil.rmtree(new, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        if policy.lora_rank:
            # Embeddings are frozen; the default, "auto", would ask the hub about them.
            policy.model.save_pretrained(new, save_embedding_layers=False)
        else:  # names as in memory: the hub's, one per expert, would have to be fused to be loaded
            policy.model.save_pretrained(new, save_original_format=False, max_shard_size="1TB")
            policy.tokenizer.save_pretrained(new)  # this makes the folder a model of its own
        torch.save(optimizer.state_dict() if optimizer else {}, new / "optimizer.pt")
        (new / "state.json").write_text(json.dumps(state), encoding="utf-8")
        (new / "checksum").write_text(checksum(new), encoding="utf-8")
        readable(new)
        for path in (*new.iterdir(), new):
            flush(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        room = shutil.disk_usage(folder.parent).free
        shutil.rmtree(new, ignore_errors=True)  # half a checkpoint is no use, and takes room
        if isinstance(error, OSError) and error.errno:
            raise
        # safetensors and torch.save report a full disk as SafetensorError and RuntimeError.
        why = errno.ENOSPC if room < 2**20 else errno.EIO
        told = f"{os.strerror(why)} while the checkpoint was written ({type(error).__name__})"
        raise OSError(why, told, str(folder)) from error
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    flush(folder.parent)


def is_whole(folder: Path) -> bool:
    """Does a checkpoint hold what its checksum says?"""
    try:
        return checksum(folder).encode() == (folder / "checksum").read_bytes()
    except OSError:  # no checksum file, or one of its files cannot be read
        return False


def find_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint: `folder`, or `folder`.old with a printed reason.

    None if there never was one. SystemExit if all that exist are damaged.
    """
    places = [place for place in (folder, sibling(folder, "old")) if place.exists()]
    found = next(filter(is_whole, places), None)
    if places and not found:
        older = "so is the one before" if len(places) > 1 else "there is no older one"
        raise SystemExit(
            f"{places[0]}: the checkpoint is damaged (its checksum does not match), and {older}; "
            "start again or restore it"
        )
    if places and found != places[0]:
        print(
            f"{places[0]} is damaged (its checksum does not match); the one before it is taken, "
            f"{found.name}"
        )
    return found


def set_aside(folder: Path) -> None:
    """Move a damaged `folder` to `folder`.damaged, before a run continues from `folder`.old.

    Otherwise the next save would keep the damaged one as `folder`.old, and lose the good one.
    """
    if folder.exists():
        shutil.rmtree(sibling(folder, "damaged"), ignore_errors=True)
        folder.rename(sibling(folder, "damaged"))


def load_checkpoint(folder: Path, policy: Policy) -> tuple[dict, dict]:
    """Load the saved weights into `policy`; returns (optimizer state, state) as they were saved.

    SystemExit with a one-sentence message if the files are not those of such a policy.
    """
    try:
        load_weights(folder, policy)
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if not (isinstance(state, dict) and isinstance(state.get("update"), int)):
            raise ValueError("state.json is not the state of a run")
    # RuntimeError: tensors of other shapes, and JSON that is nested too deeply.
    except (SafetensorError, FileNotFoundError, RuntimeError, ValueError) as error:
        if out_of_memory(error):
            raise
        told = printable(" ".join(str(error).split()))[:300]
        raise SystemExit(
            f"{folder}: not a checkpoint of this run ({told}); start again or restore it"
        ) from None
    # On the CPU: an evaluation needs no moments on its card, and an optimizer moves its own there.
    return load_tensors(folder / "optimizer.pt", "cpu"), state


def load_weights(folder: Path, policy: Policy) -> None:
    """Every weight that learns, exactly. An error if one is missing, or one is not the policy's."""
    if not policy.lora_rank:
        load_model(
            policy.model, folder / "model.safetensors"
        )  # knows that a tied head is one weight
        return
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    adapter = load_file(folder / "adapter_model.safetensors")
    own = get_peft_model_state_dict(policy.model, save_embedding_layers=False)
    alone = own.keys() ^ adapter.keys()
    if alone:  # peft would pass them over without a word
        one = min(alone)[:100]
        raise ValueError(f"{len(alone)} weights are only in it or in the policy, {one!a} for one")
    set_peft_model_state_dict(policy.model, adapter)


def restore(folder: Path, policy: Policy, optimizer: Optimizer, state: dict) -> dict:
    """Load weights into `policy` and moments into `optimizer`; returns the saved state.

    SystemExit if that does not have the entries of `state`, a state at the start of a run.
    """
    moments, saved = load_checkpoint(folder, policy)
    try:
        for was, now in zip(moments["param_groups"], optimizer.param_groups):
            was["fused"] = now["fused"]  # of this device, and not of the one that it was saved on
        optimizer.load_state_dict(moments)
        # A level may be a number or a word, and clocks may have been added.
        types = {name: type(value) for name, value in state.items() if name != "level"}
        ours = saved.keys() == state.keys() and state["seconds"].keys() <= saved["seconds"].keys()
        ours = ours and all(type(saved[name]) is types[name] for name in types)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        ours = False
    if not ours:
        raise SystemExit(
            f"{folder}: its optimizer.pt or state.json is not that of this run; start again or "
            "restore it"
        )
    return saved


def save_tensors(file: Path, tensors: dict) -> None:
    """A file of tensors and its SHA-256, both on the disk; load_tensors compares them."""
    new = sibling(file, "new")
    torch.save(tensors, new)
    file.with_suffix(".checksum").write_text(digest(new), encoding="utf-8")
    flush(new)
    new.rename(file)
    flush(file.parent)


def load_tensors(file: Path, device=None):
    """torch.load of tensors and plain values only: a pickle can run any program."""
    why = "it is damaged and cannot be read; restore it, or start again"
    try:
        known = file.with_suffix(".checksum")
        if known.exists() and known.read_bytes() != digest(file).encode():
            raise ValueError("another checksum")
        return torch.load(file, weights_only=True, map_location=device)
    except Exception as error:  # UnpicklingError for other objects; bytes that are no pickle: any
        if isinstance(error, OSError) or out_of_memory(error):
            raise
        if "Unsupported" in str(error):
            why = (
                "it holds more than tensors and numbers, so it was not written by a run and is not "
                "loaded; delete the run"
            )
        raise SystemExit(f"{file}: {why}") from None


if __name__ == "__main__":
    import tempfile

    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=8, lora_alpha=16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint"
        for update in (10, 20):
            save_checkpoint(folder, policy, None, {"update": update})
        weights = folder / "adapter_model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-5] ^= 1
        weights.write_bytes(data)
        state = load_checkpoint(find_checkpoint(folder), policy)[1]
        print("continues after update", state["update"])
