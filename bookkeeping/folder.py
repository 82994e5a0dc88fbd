"""The run folder: where a run writes, how it is found again, and what a kill may cost.

    runs/NAME/  config.json  code.jsonl  metrics.jsonl  evals.jsonl  episodes.jsonl  summary.json
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
import re
import time
from pathlib import Path

from filelock import FileLock, Timeout

from bookkeeping.checkpoint import find_checkpoint, set_aside
from bookkeeping.forecast import name_of
from bookkeeping.records import append, lines, write_whole
from settings import sources

# On --resume these may change, because they do not change the experiment.
MAY_CHANGE = (
    "updates", "until_converged", "max_updates", "wandb", "threads", "device", "engine",
    "vllm_memory", "vllm_sleep", "vllm_seeds", "micro_tokens", "gradient_checkpointing",
)  # fmt: skip
LOGS = ("metrics.jsonl", "evals.jsonl", "episodes.jsonl")
LEFTOVERS = {"lock", "config.new"}  # of a run that ended before it had begun

# This process's run folder, then the folders above it that were made for it: how a run ends depends
# on what it has written (guard.one_sentence).
own: list[Path] = []


def claim(folder: Path) -> FileLock:
    """Keep other processes out of a run folder, for as long as the returned lock lives.

    SystemExit if one is in it already.
    """
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        own.clear()  # what is in it is the other's, and not ours to clear away
        raise SystemExit(
            f"{folder}: another process is working in this run folder; wait until it is done, "
            "or stop it"
        ) from None
    except NotImplementedError:  # a file system without locks: then nobody can know
        pass
    return lock


def open_folder(cfg, typed: set[str]) -> tuple[Path, Path | None, FileLock]:
    """(run folder, checkpoint to go on from, the folder's lock: keep it, or it is released).

    typed: the flags of the command line. With --resume, cfg becomes the saved config. SystemExit
    with one sentence if there is nothing to resume, a flag cannot change, or the folder is in use.
    """
    if cfg.resume:
        return resume_folder(cfg, typed)
    folder = Path(cfg.runs) / name_of(cfg, time.strftime("%m%d-%H%M%S"))
    try:
        if cfg.name and folder.exists() and {file.name for file in folder.iterdir()} - LEFTOVERS:
            raise SystemExit(
                f"{folder} exists; choose another --name, or continue it with --resume {folder}"
            )
        above = [parent for parent in folder.parents if not parent.exists()]
        folder = make(folder, shared=bool(cfg.name))
        own[:] = [folder, *above]
        return folder, None, claim(folder)
    except OSError as error:
        why = f"{error.strerror}: {error.filename}"
        raise SystemExit(f"--runs {cfg.runs}: {why}; give a folder that can be written") from None


def make(folder: Path, shared: bool) -> Path:
    """Make this folder, or NAME-2, NAME-3, … if somebody else has made it and it is not shared.

    Three seeds that are started in one line begin in the same second.
    """
    first = folder
    for n in itertools.count(2):
        try:
            folder.mkdir(parents=True, exist_ok=shared)
            return folder
        except FileExistsError:
            if shared:  # it is a file
                raise
            folder = first.with_name(f"{first.name}-{n}")


def has_checkpoint() -> bool:
    """Has this process's run saved one? What there is not must not be promised."""
    saved = ("checkpoint", "checkpoint.old")
    return bool(own) and any((own[0] / name / "state.json").exists() for name in saved)


def discard_unbegun() -> None:
    """Remove this process's run folder if its run ended before it had begun."""
    try:
        if own and all(file.name in LEFTOVERS for file in own[0].iterdir()):
            for file in own[0].iterdir():
                file.unlink()
            for folder in own:
                folder.rmdir()
    except OSError:  # somebody else is in it, or in a folder above it
        pass


def resume_folder(cfg, typed: set[str]) -> tuple[Path, Path | None, FileLock]:
    """open_folder for --resume: flags that do not change the experiment may be typed again."""
    folder = Path(cfg.resume)
    if not (folder / "config.json").exists():
        raise SystemExit(
            f"--resume {folder}: there is no config.json in it, so it is no run folder, or one "
            "that was stopped before it began; check the path, or start the same command again"
        )
    own[:] = [folder]
    lock = claim(folder)
    mend(folder)
    given = {name: getattr(cfg, name) for name in typed if name != "resume"}
    for name, value in read_config(folder, type(cfg)).items():
        setattr(cfg, name, value)
    planned = cfg.updates
    refuse_code(folder, cfg.env, given.get("env"))
    for name, value in sorted(given.items()):
        if name in MAY_CHANGE:
            setattr(cfg, name, value)
        elif value != getattr(cfg, name):
            raise SystemExit(
                f"--{name.strip('_').replace('_', '-')} cannot change on --resume; "
                "start a new run for another experiment"
            )
    if cfg.updates != planned:
        fall = f"the learning rate falls until the last of {cfg.updates}, so it jumps here"
        print(f"--updates was {planned} before: {fall}")
    cfg.resume, cfg.eval_only = "", ""
    saved = find_checkpoint(folder / "checkpoint")
    if saved and saved.name != "checkpoint":
        set_aside(folder / "checkpoint")
    return folder, saved, lock


def read_config(folder: Path, config: type) -> dict:
    """config.json of a folder that may come from anywhere: fields of the dataclass `config`.

    ValueError if it has others, or values of other types. A flag that is gone, and was not set, is
    left out: a run of an earlier version goes on.
    """
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        saved = None
    if not isinstance(saved, dict):
        raise ValueError(
            f"{folder}/config.json is not the config of a run; check the path, or restore it"
        )
    known = vars(config())
    saved = {name: value for name, value in saved.items() if name in known or value is not None}
    for name, value in saved.items():
        if name not in known or not is_plain(value, known[name]):
            raise ValueError(
                f"{folder}/config.json: there is no flag {name[:40]!a}, or not with that value; "
                "check the path, or restore it"
            )
    return saved


def is_plain(value, default) -> bool:
    """Has a saved value the type of its flag?"""
    if default is None:
        return isinstance(value, int | float | str | None)
    if isinstance(default, float):
        return value is None or type(value) in (int, float)
    words = all(type(word) is str for word in value) if isinstance(value, list) else True
    return type(value) is type(default) and words


# FILE:NAME. Commas and line ends may be part of a file's name.
CODE = re.compile(r"^(?!jsonl:|reasoning_gym:).*:|,(scorer|expert)=.*:", re.DOTALL)


def refuse_code(folder: Path, env: str, typed: str | None) -> None:
    """SystemExit if the config's environment is a file of code, or names one as its scorer, and the
    command line does not say the same: the folder may come from anywhere."""
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

    source = "".join(map(meaning, filter(Path.exists, sources(env))))
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def tell_changed(folder: Path, env: str) -> None:
    """Say so if the environment's code, or its file of rows, is not what the run ended with."""
    ran = [line.get("environment_code") for line in lines(folder / "code.jsonl")]
    if ran and ran[-1] != code_hash(env):
        print(f"{env}: its code or its rows are not what this run was trained with")


def trim(folder: Path, update: int, finished: bool = True) -> None:
    """Drop lines that a killed run wrote after its last checkpoint: they will be written again.

    So will a final evaluation, unless more updates follow: then it was one on the way.
    """
    for name in LOGS:
        if (folder / name).exists():
            with open(folder / name, encoding="utf-8", errors="replace") as old:
                logged = old if finished else map(on_the_way, old)
                kept = [line for line in logged if stays(line, update)]
            write_whole(folder / name, "".join(kept))


def mend(folder: Path) -> None:
    """Drop a last line that a kill cut in two: what is appended next would be glued to it.

    A log that is a link is replaced by a copy: nothing is cut or appended where it points to.
    """
    for path in (folder / name for name in LOGS):
        if path.is_symlink() and path.is_file():
            write_whole(path, path.read_text(encoding="utf-8", errors="replace"))
        if path.is_file():
            with open(path, "rb+") as f:
                f.truncate(f.read().rfind(b"\n") + 1)


def on_the_way(line: str) -> str:
    """The line of a final evaluation as that of one during the run; others as they are."""
    return re.sub('"stage": ?"final"', '"stage":"train"', line, count=1)


def stays(line: str, update: int) -> bool:
    """Is this line of a log whole, and from before the checkpoint after that update?"""
    try:
        record = json.loads(line)
        before = update >= 0 and record["update"] <= update  # update -1: there is no checkpoint
        return before and record.get("stage") != "final" and line.endswith("\n")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False  # cut in two by the kill; what is left may be valid JSON


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for update in (1, 2, 3):
            append(folder / "metrics.jsonl", {"update": update, "reward": update / 10})
        with open(folder / "metrics.jsonl", "a", encoding="utf-8") as f:
            f.write(
                '{"update": 4, "rew'
            )  # the kill came here; the last checkpoint was after update 2
        print("before\n" + (folder / "metrics.jsonl").read_text(encoding="utf-8"))
        trim(folder, update=2)
        print("\nafter --resume\n" + (folder / "metrics.jsonl").read_text(encoding="utf-8"))
