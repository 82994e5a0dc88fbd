"""Places where something can happen to a run, and a train.py to which it happens: there, and at no other moment.

    python -m lab.trust.places '{"do": "kill", "place": "SFT step", "moment": "before", "call": 3}' --env letters …
        # as lab/trust/faults.py starts it

A kill by the clock hits a run where it spends its time, which is hardly ever where it could lose something: a rename takes microseconds. So
each place that matters is a function with a name in PLACES. It is wrapped, its calls are counted, and before, after or in the middle of one
of them the plan is carried out: a kill, or for lab/trust/storage.py a full or read-only disk, a clock that jumps. Nothing in the product
knows of this.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

CALL, WRITE = ("before", "after"), ("before", "half", "after")
# Where a process may be killed: {name: (function, only while this one runs, moments)}. Half: half of what the call writes is on the disk.
PLACES = {
    "load the model": ("train:load_policy", "", CALL),  # the run folder is there, its config.json is not
    "write config or summary": ("pathlib:Path.write_text", "bookkeeping.run:write_json", WRITE),
    "rename config or summary": ("os:replace", "bookkeeping.run:write_json", CALL),
    "sample": ("fast.sampler:TorchSampler.sample", "", CALL),
    "decode a token": ("fast.decoder:FastDecoder.step", "", CALL),
    "SFT step": ("sft:sft_step", "", CALL),
    "backward": ("torch:Tensor.backward", "", CALL),
    "optimizer step": ("torch:optim.AdamW.step", "", CALL),
    "evaluation": ("train:evaluate_policy", "", CALL),
    "line of metrics": ("bookkeeping.run:append", "", WRITE),
    "line of evals": ("bookkeeping.records:append", "", WRITE),
    "line of episodes": ("bookkeeping.episodes:append", "", WRITE),
    "checkpoint: weights": ("peft:PeftModel.save_pretrained", "bookkeeping.run:save_checkpoint", WRITE),
    "checkpoint: optimizer": ("torch:save", "bookkeeping.run:save_checkpoint", WRITE),
    "checkpoint: checksum": ("hashlib:sha256", "bookkeeping.run:save_checkpoint", CALL),
    "checkpoint: small files": ("pathlib:Path.write_text", "bookkeeping.run:save_checkpoint", WRITE),
    "checkpoint: fsync": ("os:fsync", "bookkeeping.run:save_checkpoint", CALL),
    "checkpoint: rename": ("os:rename", "bookkeeping.run:save_checkpoint", CALL),
    "checkpoint: remove a folder": ("shutil:rmtree", "bookkeeping.run:save_checkpoint", CALL),
    "checkpoint: remove a file": ("os:unlink", "bookkeeping.run:save_checkpoint", CALL),  # a folder of which some is gone
    "report": ("bookkeeping.report:write", "", CALL),
    "report: picture": ("matplotlib.figure:Figure.savefig", "bookkeeping.report:write", WRITE),
    "report: text": ("pathlib:Path.write_text", "bookkeeping.report:write", WRITE),
}
RESUMED = {  # what only a run that goes on does
    "resume: drop lines": ("os:replace", "bookkeeping.run:trim", CALL),
    "resume: load the checkpoint": ("bookkeeping.run:restore", "", CALL),
}
MENDED = {
    "set a damaged one aside": ("os:rename", "bookkeeping.folder:set_aside", CALL)
}  # what only a run does whose checkpoint is damaged
EVERY = PLACES | RESUMED | MENDED


def find(what: str) -> tuple[object, str]:
    """'os:fsync' -> (the module os, 'fsync')."""
    module, _, path = what.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    return owner, name


def wrap(places: dict, arrived, halfway: str = "") -> None:
    """Replace the functions of `places`: arrived(place, moment, call number) hears of every moment. halfway: the place whose half is asked
    for; its calls write in full, then what they wrote is cut in half, then arrived hears of it. Nothing is unwrapped: the process is ours
    alone.
    """
    running: Counter = Counter()  # how often each outer function is being run just now

    def outer(what: str) -> None:
        owner, name = find(what)
        real = getattr(owner, name)

        def inner(*args, **kwargs):
            running[what] += 1
            try:
                return real(*args, **kwargs)
            finally:
                running[what] -= 1

        setattr(owner, name, inner)

    def one(place: str, what: str, within: str) -> None:
        owner, name = find(what)
        real, calls = getattr(owner, name), Counter()

        def inner(*args, **kwargs):
            if within and not running[within]:
                return real(*args, **kwargs)
            calls[place] += 1
            number = calls[place]  # a call may call the same function again
            arrived(place, "before", number)
            sizes = written(args) if place == halfway else {}
            result = real(*args, **kwargs)
            if place == halfway:
                arrived(place, "half", number, lambda: cut(args, sizes))
            arrived(place, "after", number)
            return result

        setattr(owner, name, inner)

    for within in {within for _, within, _ in places.values() if within}:
        outer(within)
    for place, (what, within, _) in places.items():
        one(place, what, within)


def written(args: tuple) -> dict[Path, int]:
    """{file: bytes} of what a call with these arguments writes: its first path, or open file; of a folder all that is in it."""
    for arg in args:
        if hasattr(arg, "fileno"):
            arg.flush()
            arg = arg.name
        if isinstance(arg, (str, Path)):
            path = Path(arg)
            files = path.iterdir() if path.is_dir() else [path] if path.exists() else []
            return {file: file.stat().st_size for file in files if file.is_file()}
    return {}


def cut(args: tuple, before: dict[Path, int]) -> None:
    """Take away half of what the call has added, as if it had been killed there: of the largest file, where there are several."""
    grown = {file: (size - before.get(file, 0), size) for file, size in written(args).items()}
    for file, (by, size) in sorted(grown.items(), key=lambda item: item[1])[-1:]:
        if by <= 0:  # written anew, from nothing
            by = size
        os.truncate(file, size - (by + 1) // 2)


def fill(top: Path) -> None:
    """Write until there is no room left."""
    with open(top / "filler", "ab", buffering=0) as f:
        try:
            while True:
                f.write(bytes(4096))
        except OSError:
            return


def make_read_only(top: Path) -> None:
    """As a disk with errors turns read-only, for all that is opened from here on. A plain remount is refused while a file is open for
    writing, and the run's lock is; so the disk is mounted once more over itself, and that one is read-only."""
    subprocess.run(["mount", "--bind", str(top), str(top)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(top)], check=True)


def child(plan: dict, flags: list[str]) -> None:
    """train.py with these flags, and what `plan` wants to happen at a place: {"do", "place", "moment", "call", and what `do` needs}."""
    import train

    counted: Counter = Counter()

    def arrived(place: str, moment: str, call: int, halve=lambda: None) -> None:
        counted[place] = max(counted[place], call)
        if (place, moment, call) != (plan.get("place"), plan.get("moment"), plan.get("call")):
            return
        if plan["do"] == "kill":
            halve()
            os.kill(os.getpid(), signal.SIGKILL)
        elif plan["do"] == "fill":
            fill(Path(plan["top"]))
        elif plan["do"] == "read-only":
            make_read_only(Path(plan["top"]))
        elif plan["do"] == "clock":
            real = time.time
            time.time = lambda: real() + plan["by"]
        elif plan["do"] == "wait":
            Path(plan["here"]).touch()
            while not Path(plan["go"]).exists():
                time.sleep(0.05)

    places = EVERY if plan["do"] == "count" else {name: EVERY[name] for name in EVERY if name == plan.get("place")}
    wrap(places, arrived, plan["place"] if plan.get("moment") == "half" else "")
    sys.argv = ["train.py", *flags]
    train.main()
    if plan["do"] == "count":
        Path(plan["to"]).write_text(json.dumps(counted))


if __name__ == "__main__":
    child(json.loads(sys.argv[1]), sys.argv[2:])
