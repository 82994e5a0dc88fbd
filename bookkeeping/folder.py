"""The run folder: what a run says first, where it writes, how it is found again, and what a kill
may cost.

    runs/NAME/  config.json  code.jsonl  metrics.jsonl  evals.jsonl  episodes.jsonl  summary.json
                report.md  report.html  curves.png  checkpoint/  lock

Three rules. A line is written when its number is known, and whole files are written beside the old
one and renamed, so that a kill at any moment leaves something to read. On --resume, lines written
after the last checkpoint are dropped: they will be written again. And only one process writes into
a folder: it holds a lock, which the kernel takes back however the process ends.

Run me: `python -m bookkeeping.folder` says what a run would do, and what a killed one keeps.
"""

import ast
import hashlib
import itertools
import json
import os
import re
import time
from pathlib import Path

from filelock import FileLock, Timeout

import settings
from bookkeeping import refusals
from bookkeeping.records import append, lines, write_whole
from fast.machine import speak_utf8

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


def announce(words: list[str]) -> None:
    """The first words of a new run, before torch is imported: that takes seconds, and on a busy
    machine a quarter of a minute. Nothing if the run will be refused, which is told later."""
    speak_utf8()
    try:
        cfg, _ = settings.read_flags(words)
        if cfg.api_base or cfg.eval_only or cfg.resume or int(os.environ.get("RANK", 0)):
            return
        refusals.check(cfg)
    except ValueError:
        return
    what = " ".join([settings.short(cfg.env), *([str(cfg.difficulty)] if cfg.difficulty else [])])
    updates = f"{cfg.updates} updates" if cfg.updates else "updates"  # else by the model's size
    print(
        f"{what}: {cfg.sft_steps} steps of SFT on {cfg.sft_examples} demonstrations, "
        f"then {updates} of GRPO on {cfg.num_tasks} tasks each\n"
        f"look into {cfg.runs}/{name_of(cfg, '*')}/: metrics.jsonl grows with every update, "
        "report.html comes at the end; torch is loading now",
        flush=True,
    )


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
        own.clear()  # what is in it is the other's, and not ours to clear away
        raise SystemExit(
            f"{folder}: another process is working in this run folder; wait until it is done, "
            "or stop it"
        ) from None
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
        raise SystemExit(
            f"--runs {cfg.runs}: {error.strerror}: {error.filename}; give a folder that can be "
            "written"
        ) from None


def make(folder: Path, shared: bool) -> Path:
    """Make this folder, or NAME-2, NAME-3, … if somebody else has made it and it is not shared.

    Three seeds that are started in one line begin in the same second.
    """
    others = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))
    for place in itertools.chain([folder], others):
        try:
            place.mkdir(parents=True, exist_ok=shared)
            return place
        except FileExistsError:
            if shared:  # it is a file
                raise


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
    from bookkeeping.checkpoint import find_checkpoint, set_aside  # torch, which announce must not

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
    if saved and saved.name != "checkpoint":
        set_aside(folder / "checkpoint")
    return folder, saved, lock


def read_config(folder: Path, config: type) -> dict:
    """config.json of a folder that may come from anywhere: fields of the dataclass `config`.

    ValueError if it has others, or values of other types.
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
    wrong = [n for n, value in saved.items() if n not in known or not is_plain(value, known[n])]
    if wrong:
        raise ValueError(
            f"{folder}/config.json: there is no flag {wrong[0][:40]!a}, or not with that value; "
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

    source = "".join(map(meaning, filter(Path.exists, settings.sources(env))))
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def tell_changed(folder: Path, env: str) -> None:
    """Say so if the environment's code, or its file of rows, is not what the run ended with."""
    ran = [line.get("environment_code") for line in lines(folder / "code.jsonl")]
    if ran and ran[-1] != code_hash(env):
        print(f"{env}: its code or its rows are not what this run was trained with")


def mend(folder: Path) -> None:
    """Drop a last line that a kill cut in two: what is appended next would be glued to it.

    A log that is a link is replaced by a copy: nothing is appended where it points to.
    """
    for path in (folder / name for name in LOGS):
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            whole = text[: text.rfind("\n") + 1]
            if path.is_symlink() or whole != text:
                write_whole(path, whole)


def trim(folder: Path, update: int, finished: bool = True) -> None:
    """Drop lines that a killed run wrote after its last checkpoint: they will be written again.

    So will a final evaluation, unless more updates follow: then it was one on the way.
    """
    for path in (folder / name for name in LOGS):
        if path.exists():
            with open(path, encoding="utf-8", errors="replace") as old:
                logged = old if finished else map(on_the_way, old)
                write_whole(path, "".join(line for line in logged if stays(line, update)))


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

    announce(["--env", "letters"])
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "metrics.jsonl"
        for update in (1, 2, 3):
            append(file, {"update": update, "reward": update / 10})
        with open(file, "a", encoding="utf-8") as f:
            f.write('{"update": 4, "rew')  # the kill; the last checkpoint was after update 2
        print("before\n" + file.read_text(encoding="utf-8"))
        trim(Path(name), update=2)
        print("\nafter --resume\n" + file.read_text(encoding="utf-8"))
