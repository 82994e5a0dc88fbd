"""The run folder: where a run writes, how it is found again, and what a kill may cost.

    runs/NAME/  config.json  metrics.jsonl  evals.jsonl  episodes.jsonl  summary.json
                report.md  report.html  curves.png  checkpoint/  lock

Three rules. A line is written when its number is known, and whole files are written beside the old
one and renamed, so that a kill at any moment leaves something to read. On --resume, lines written
after the last checkpoint are dropped: they will be written again. And only one process writes into
a folder: it holds a lock, which the kernel takes back however the process ends.

Run me: `python -m bookkeeping.folder` shows what a killed run keeps.
"""

import ast
import hashlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

import settings
from bookkeeping.records import read, write_whole

# On --resume these may change, because they do not change the experiment.
MAY_CHANGE = (
    "updates", "until_converged", "max_updates", "wandb", "threads", "device", "engine",
    "vllm_memory", "vllm_sleep", "vllm_seeds", "micro_tokens", "gradient_checkpointing",
)  # fmt: skip
LOGS = ("metrics.jsonl", "evals.jsonl", "episodes.jsonl")

# This process's run folder, once it has one: what is said at the end of a run that did not finish
# depends on what is in it (guard.one_sentence).
own: list[Path] = []


def announce(words: list[str]) -> None:
    """The first words of a run, before torch is imported.

    That takes seconds, and on a busy machine a quarter of a minute, so nothing here needs torch.
    """
    first = not int(os.environ.get("RANK", 0))
    if first and not {"-h", "--help"} & set(words):
        print("torch is loading, which takes seconds", flush=True)


def name_of(cfg, when: str) -> str:
    """The name of a run's folder, if --name gives none."""
    level = f"-{cfg.difficulty}" if cfg.difficulty else ""
    asked = re.sub("[^A-Za-z0-9._-]+", "-", cfg.model) + "-" if cfg.api_base else ""
    return cfg.name or f"{asked}{settings.short(cfg.env)}{level}-{when}"


def claim(folder: Path) -> FileLock:
    """Keep other processes out of a run folder, for as long as the returned lock lives.

    SystemExit if one is in it already.
    """
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise SystemExit(
            f"{folder}: another process is working in this run folder; wait until it is done, "
            "or stop it"
        ) from None
    return lock


def refuse_taken(cfg) -> None:
    """SystemExit if --name is the name of a folder with something in it."""
    folder = Path(cfg.runs) / cfg.name
    if cfg.name and folder.is_dir() and any(file.name != "lock" for file in folder.iterdir()):
        raise SystemExit(
            f"{folder} exists; choose another --name, or continue it with --resume {folder}"
        )


def make_folder(cfg) -> tuple[Path, FileLock]:
    """(a new run folder, its lock: keep it, or it is released). SystemExit if it cannot be made.

    Three seeds that are started in one line begin in the same second: they are NAME, NAME-2, NAME-3
    unless --name was given.
    """
    refuse_taken(cfg)
    first = Path(cfg.runs) / name_of(cfg, time.strftime("%m%d-%H%M%S"))
    others = (first.with_name(f"{first.name}-{n}") for n in itertools.count(2))
    for folder in itertools.chain([first], others):
        try:
            folder.mkdir(parents=True, exist_ok=bool(cfg.name))
            return folder, claim(folder)
        except OSError as error:
            if isinstance(error, FileExistsError) and not cfg.name:
                continue
            raise SystemExit(
                f"--runs {cfg.runs}: {error.strerror}: {error.filename}; give a folder that can be "
                "written"
            ) from None


def has_checkpoint() -> bool:
    """Has this process's run saved one? What there is not must not be promised."""
    saved = ("checkpoint", "checkpoint.old")
    return bool(own) and any((own[0] / name / "state.json").exists() for name in saved)


def how_to_go_on() -> str:
    """The last words of a run that was stopped."""
    if not own:
        return "; nothing was written"
    start = "" if has_checkpoint() else ", from its start: nothing was saved yet"
    return f"; go on with: python train.py --resume {own[0]}{start}"


def resume_folder(cfg, typed: set[str]) -> tuple[Path, Path | None, FileLock]:
    """(run folder, checkpoint to go on from, the folder's lock).

    cfg becomes the saved config; flags that do not change the experiment may be typed again.
    SystemExit with one sentence if there is nothing to resume, a flag cannot change, or the folder
    is in use.
    """
    from bookkeeping.checkpoint import find_checkpoint  # torch, which announce must not import

    folder = Path(cfg.resume)
    if not (folder / "config.json").exists():
        raise SystemExit(
            f"--resume {folder}: there is no config.json in it, so it is no run folder, or one "
            "that was stopped before it began; check the path, or start the same command again"
        )
    lock = claim(folder)
    own[:] = [folder]
    mend(folder)
    given = {name: getattr(cfg, name) for name in typed if name != "resume"}
    vars(cfg).update(read_config(folder, type(cfg)))
    planned = cfg.updates
    refuse_code(folder, cfg.env, given.get("env"))
    for name, value in sorted(given.items()):
        if name not in MAY_CHANGE and value != getattr(cfg, name):
            raise SystemExit(
                f"--{name.strip('_').replace('_', '-')} cannot change on --resume; "
                "start a new run for another experiment"
            )
        setattr(cfg, name, value)
    if cfg.updates != planned:
        print(
            f"--updates was {planned} before: the learning rate falls until the last of "
            f"{cfg.updates}, so it jumps here"
        )
    cfg.resume, cfg.eval_only = "", ""
    saved = find_checkpoint(folder / "checkpoint")
    if saved and saved.name != "checkpoint":  # else the next save would keep the damaged one
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    return folder, saved, lock


def read_config(folder: Path, config: type) -> dict:
    """config.json of a folder that may come from anywhere: fields of the dataclass `config`.

    ValueError if it has others, or values of other types.
    """
    saved, known = read(folder / "config.json"), vars(config())
    for name, value in saved.items():
        if name not in known or not is_plain(value, known[name]):
            raise ValueError(
                f"{folder}/config.json: there is no flag {name[:40]!a}, or not with that value; "
                "check the path, or restore it"
            )
    return saved


def is_plain(value, default) -> bool:
    """Has a saved value the type of its flag?"""
    if isinstance(value, list):
        return isinstance(default, list) and all(type(word) is str for word in value)
    if default is None or isinstance(default, float):
        return isinstance(value, int | float | str | None)
    return type(value) is type(default)


# FILE:NAME. Commas and line ends may be part of a file's name.
CODE = re.compile(r"^(?!jsonl:|reasoning_gym:).*:|,(scorer|expert)=.*:", re.DOTALL)


def refuse_code(folder: Path, env: str, typed: str | None) -> None:
    """SystemExit if the environment or its scorer is somebody's code, and was not typed as well.

    The folder may come from anywhere.
    """
    if CODE.search(env) and env != typed:
        raise SystemExit(
            f"{folder}: this run's environment is somebody's code, {env[:200]!a}; read it, and if "
            "you trust it add --env and that"
        )


def code_hash(env: str) -> str:
    """A hash of the files that decide an environment's tasks and rewards (settings.sources).

    Of Python neither comments nor layout count, of anything else every byte does.
    """

    def meaning(file: Path) -> str:
        content = file.read_bytes()
        python = file.suffix == ".py"
        return ast.dump(ast.parse(content)) if python else hashlib.sha256(content).hexdigest()

    source = "".join(map(meaning, filter(Path.exists, settings.sources(env))))
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def tell_changed(saved: Path, env: str) -> None:
    """Say so if the environment's code or rows are not those that a checkpoint was trained with."""
    if not str(read(saved / "state.json").get("code", "")).endswith(code_hash(env)):
        print(f"{env}: its code or its rows are not what this run was trained with")


def mend(folder: Path, keep: Callable[[str], bool] = lambda line: line.endswith("\n")) -> None:
    """Drop lines of the logs: by default a last one that a kill cut in two.

    What is appended next would be glued to it.
    A log that is a link is replaced by a copy: nothing is appended where it points to.
    """
    for path in (folder / name for name in LOGS):
        if path.is_file():
            with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:
                kept = "".join(filter(keep, lines))
            write_whole(path, kept)


def trim(folder: Path, update: int | None) -> None:
    """Drop lines that a killed run wrote after its last checkpoint, and a final evaluation.

    They will be written again. update: of that checkpoint; None: there is none.
    """

    def stays(line: str) -> bool:
        try:
            record = json.loads(line)
            final = record.get("stage") == "final"
            before = update is not None and record["update"] <= update
            return before and not final and line.endswith("\n")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False  # cut in two by the kill; what is left may be valid JSON

    mend(folder, stays)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "metrics.jsonl"
        # The kill came while line 4 was written; the last checkpoint was after update 2.
        file.write_text('{"update": 1}\n{"update": 2}\n{"update": 3}\n{"upd', encoding="utf-8")
        print("after a kill\n" + file.read_text(encoding="utf-8"))
        trim(Path(name), update=2)
        print("after --resume\n" + file.read_text(encoding="utf-8"))
