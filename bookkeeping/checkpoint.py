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

Run me: `python -m bookkeeping.checkpoint` writes two checkpoints of pico_base, changes the newer,
and finds the older.
"""

import errno
import hashlib
import json
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
    """checkpoint -> checkpoint.old or .new, beside it."""
    return folder.with_name(f"{folder.name}.{ending}")


def checksum(folder: Path) -> str:
    """SHA-256 over names and contents of a checkpoint's files, except the checksum itself.

    What a file manager leaves does not count either (.DS_Store, .ipynb_checkpoints).
    """
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name != "checksum" and not file.name.startswith("."):
            with open(file, "rb") as f:  # in pieces: a 4B's weights are 16 GB
                content = hashlib.file_digest(f, "sha256").hexdigest()
            total.update(f"{file.name} {content}\n".encode())
    return total.hexdigest()


def readable(folder: Path, like: str) -> None:
    """Let all files be read by whoever may read `like`, of which the umask has decided.

    safetensors makes files that their owner alone can read.
    """
    for file in folder.iterdir():
        shutil.copymode(folder / like, file)


def save_checkpoint(
    folder: Path, policy: Policy, optimizer: Optimizer | None, state: dict, reference=None
) -> None:
    """Write weights, optimizer and `state`; the checkpoint before it stays as `folder`.old.

    reference: with --kl {name: weight} after SFT, kept in optimizer.pt (load_state_dict passes over
    what it does not know).

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
        moments = optimizer.state_dict() if optimizer else {}
        torch.save(moments | {"reference": reference}, new / "optimizer.pt")
        (new / "state.json").write_text(json.dumps(state), encoding="utf-8")
        (new / "checksum").write_text(checksum(new), encoding="utf-8")
        readable(new, "checksum")
        for path in (*new.iterdir(), new):
            flush(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)  # half a checkpoint is no use, and takes room
        if isinstance(error, OSError) and error.errno:
            raise
        # safetensors and torch.save report a full disk as SafetensorError and RuntimeError.
        why = f"the checkpoint could not be written ({type(error).__name__}), is the disk full?"
        raise OSError(errno.EIO, why, str(folder)) from error
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
    return load_moments(folder / "optimizer.pt"), state


def load_weights(folder: Path, policy: Policy) -> None:
    """Every weight that learns, exactly. An error if one is missing, or one is not the policy's."""
    if not policy.lora_rank:
        load_model(policy.model, folder / "model.safetensors")  # a tied head is one weight to it
        return
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    adapter = load_file(folder / "adapter_model.safetensors")
    own = get_peft_model_state_dict(policy.model, save_embedding_layers=False)
    alone = own.keys() ^ adapter.keys()
    if alone:  # peft would pass them over without a word
        one = min(alone)[:100]
        raise ValueError(f"{len(alone)} weights are only in it or in the policy, {one!a} for one")
    set_peft_model_state_dict(policy.model, adapter)


def restore(folder: Path, policy: Policy, optimizer: Optimizer, state: dict) -> tuple:
    """Load weights into `policy` and moments into `optimizer`; returns (saved state, reference).

    SystemExit if that does not have the entries of `state`, a state at the start of a run.
    """
    moments, saved = load_checkpoint(folder, policy)
    # A level may be a number or a word.
    types = lambda state: {name: type(x) for name, x in state.items() if name != "level"}
    try:
        for was, now in zip(moments["param_groups"], optimizer.param_groups):
            was["fused"] = now["fused"]  # of this device, and not of the one that it was saved on
        optimizer.load_state_dict(moments)
        ours = types(saved) == types(state) and saved["seconds"].keys() == state["seconds"].keys()
        kept = moments["reference"] or {}
        reference = {name: weight.to(policy.device) for name, weight in kept.items()}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        ours = False
    if not ours:
        raise SystemExit(
            f"{folder}: its optimizer.pt or state.json is not that of this run; start again or "
            "restore it"
        )
    return saved, reference


def load_moments(file: Path) -> dict:
    """The optimizer's state, of tensors and plain values only: a pickle can run any program.

    On the CPU: an evaluation needs no moments on its card, and an optimizer moves its own there.
    """
    try:
        return torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # UnpicklingError for other objects; bytes that are no pickle: any
        if isinstance(error, OSError) or out_of_memory(error):
            raise
        raise SystemExit(
            f"{file}: it is damaged, or holds more than tensors and numbers and was not written by "
            "a run; restore it, or start again"
        ) from None


if __name__ == "__main__":
    import tempfile

    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=8, lora_alpha=16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint"
        for update in (10, 20):
            save_checkpoint(folder, policy, None, {"update": update})
        (folder / "state.json").write_text('{"update": 30}', encoding="utf-8")
        state = load_checkpoint(find_checkpoint(folder), policy)[1]
        print("continues after update", state["update"])
