"""The run folder: where a run writes, how it stops and goes on, and what it notes about the machine.

    runs/NAME/  config.json  metrics.jsonl  evals.jsonl  episodes.jsonl  summary.json  report.*  curves.png  checkpoint/  lock

Three rules. A line is written when its number is known, and whole files are written beside the old one and renamed, so that a kill at any
moment leaves something to read. On --resume, lines written after the last checkpoint are dropped: they will be written again. And only one
process writes into a folder: it holds a lock, which the kernel takes back however the process ends.

What only has to live as long as a process, adapters on their way to a sampler, goes into a folder in memory (`memory_folder`).

Run me: `python -m bookkeeping.run` shows what a killed run keeps.
"""

import ctypes
import json
import os
import platform
import resource
import shutil
import signal
import tempfile
import time
from dataclasses import asdict, fields
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from bookkeeping.checkpoint import find_checkpoint, set_aside
from fast import parallel
from fast.logprobs import token_logprobs
from grpo import collate, group_advantages
from rollout import segments
from settings import kind, short

# On --resume these may change, because they do not change the experiment.
MAY_CHANGE = ("updates", "until_converged", "max_updates", "wandb", "threads", "device", "engine", "vllm_memory", "micro_tokens")
LOGS = ("metrics.jsonl", "evals.jsonl", "episodes.jsonl")
# Episodes to read may take so many bytes of a run folder: a run of days would save gigabytes that nobody reads.
MOST_EPISODES = 64 * 2**20


def claim(folder: Path) -> FileLock:
    """Keep every other process out of a run folder, for as long as the returned lock lives. SystemExit if one is in it already."""
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise SystemExit(f"{folder}: another process is working in this run folder; wait until it is done, or stop it") from None
    except NotImplementedError:  # a file system without locks: then nobody can know
        pass
    return lock


def open_run(cfg) -> tuple[Path, Path | None, FileLock]:
    """The run folder, the checkpoint to go on from, and the lock on the folder. With --resume, cfg becomes the saved config.

    SystemExit with one sentence where there is nothing to resume, a flag cannot change, or the folder is in use or exists.
    """
    if cfg.resume:
        folder = Path(cfg.resume)
        if not (folder / "config.json").exists():
            raise SystemExit(f"--resume {folder}: there is no config.json in it, so it is no run folder, or one that was stopped before it began; "
                             "check the path, or start the same command again")  # fmt: skip
        lock = claim(folder)
        given = {f.name: getattr(cfg, f.name) for f in fields(cfg) if getattr(cfg, f.name) != f.default}
        for name, value in read_config(folder, type(cfg)).items():
            setattr(cfg, name, value)
        refuse_code(folder, cfg.env, given.get("env"))
        for name in MAY_CHANGE:
            if name in given:
                setattr(cfg, name, given.pop(name))
        given.pop("resume", None)
        changed = [name for name, value in given.items() if getattr(cfg, name) != value]
        if changed:
            raise SystemExit(
                f"--{changed[0].strip('_').replace('_', '-')} cannot change on --resume; start a new run for another experiment"
            )
        cfg.resume, cfg.eval_only = "", ""
        saved = find_checkpoint(folder / "checkpoint")
        if saved and saved.name != "checkpoint":
            set_aside(folder / "checkpoint")
        return folder, saved, lock
    level = f"-{cfg.difficulty}" if cfg.difficulty else ""
    folder = Path(cfg.runs) / (cfg.name or f"{short(cfg.env)}{level}-{time.strftime('%m%d-%H%M%S')}")
    if folder.exists() and any(file.name not in ("lock", "config.new") for file in folder.iterdir()):  # else: killed before it had begun
        raise SystemExit(f"{folder} exists; choose another --name, or continue it with --resume {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder, None, claim(folder)


def read_config(folder: Path, config: type) -> dict:
    """config.json of a folder that may come from anywhere: fields of the dataclass `config`, with values of their types. ValueError otherwise."""
    try:
        saved = json.loads((folder / "config.json").read_text())
    except (ValueError, RecursionError):
        saved = None
    known = {f.name: f.default for f in fields(config)}
    plain = lambda value, default: (
        isinstance(value, int | float | str | None) if default is None
        else type(value) is type(default) or (isinstance(default, float) and type(value) in (int, None.__class__))
    )  # fmt: skip
    if not isinstance(saved, dict):
        raise ValueError(f"{folder}/config.json is not the config of a run; check the path, or restore it")
    if wrong := [name for name, value in saved.items() if name not in known or not plain(value, known[name])]:
        raise ValueError(f"{folder}/config.json: there is no flag {wrong[0][:40]!a}, or not with that value; check the path, or restore it")
    return saved


def refuse_code(folder: Path, env: str, given: str | None) -> None:
    """SystemExit if a run's config names a file of code as its environment, and the command line does not: the folder may come from anywhere."""
    if kind(env) == "yours" and env != given:
        raise SystemExit(
            f"{folder}: this run's environment is code of somebody's, {env[:200]!a}; read it, and if you trust it add --env and that"
        )


def trim(folder: Path, done: int) -> None:
    """Drop lines that a killed run wrote after its last checkpoint: they will be written again."""
    for name in LOGS:
        if (folder / name).exists():
            new = folder / f"{name}.new"
            with open(folder / name, errors="replace") as old, open(new, "w") as out:
                out.writelines(line for line in old if stays(line, done))
            new.replace(folder / name)  # at once: a kill in the middle of writing would lose what is older than the checkpoint


def mend(folder: Path) -> None:
    """Drop a last line that a kill cut in two: what is appended next would be glued to it."""
    for name in LOGS:
        if (folder / name).exists():
            with open(folder / name, "rb+") as f:
                f.truncate(f.read().rfind(b"\n") + 1)


def stays(line: str, done: int) -> bool:
    """Is this line of a log whole, and from before the checkpoint after update `done`?"""
    try:
        record = json.loads(line)
        return line.endswith("\n") and 0 <= done >= record["update"] and record.get("stage") != "final"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # cut in two by the kill; what is left may be valid JSON
        return False


@torch.no_grad()
def save_episodes(folder: Path, done: int, stage: str, policy, groups, temperature: float) -> None:
    """Whole groups for a person to read: text, and each sampled token with its log-prob in nats.

    Groups of a rollout (stage "") also get their advantages and each token's importance ratio: how much likelier the update that followed
    has made it. temperature: at which they were sampled.
    Raises FloatingPointError where the policy's log-probs are not finite any more: such weights must not become a checkpoint.
    """
    for g, group in enumerate(groups):
        advantages, ratios = [None] * len(group), [None] * len(group)
        if not stage:
            rewards = torch.tensor([[float("nan") if e.stop_reason == "error" else e.reward for e in group]])
            advantages = [round(a, 4) for a in group_advantages(rewards)[0].tolist()]
            batch = collate(group, torch.zeros(len(group)), torch.zeros(len(group)), policy.tokenizer.pad_token_id, policy.device)
            now, _ = token_logprobs(policy, batch.ids, batch.mask, temperature)  # [M]
            if not now.isfinite().all():
                raise FloatingPointError(f"after update {done} the policy's log-probs are not finite")
            per_token = (now - batch.old_logprobs[batch.mask]).exp().tolist()
            for i, e in enumerate(group):
                ratios[i], per_token = per_token[: e.reply_tokens], per_token[e.reply_tokens :]
        for i, e in enumerate(group):
            append(folder / "episodes.jsonl", {
                "update": done, "source": "eval" if stage else "rollout", "stage": stage, "group": g, "member": i, "seed": e.seed,
                "reward": e.reward, "advantage": advantages[i], "components": e.components, "stop_reason": e.stop_reason, "error": e.error,
                "policy_version": e.policy_version, "reply_tokens": e.reply_tokens, "logprob": round(sum(e.logprobs), 3),
                "messages": e.messages, "segments": segments(policy, e, ratios[i]),
            })  # fmt: skip


def thin(path: Path, most: int = MOST_EPISODES) -> None:
    """Keep episodes.jsonl under `most` bytes: of the updates in it every second one goes, and the first and the last stay."""
    while path.exists() and path.stat().st_size > most:
        update_of = lambda line: json.loads(line)["update"]
        with open(path) as f:
            updates = sorted({update_of(line) for line in f})
        keep = {*updates[::2], updates[-1]}
        if len(keep) == len(updates):
            return  # one or two updates that are so large
        new = path.with_suffix(".new")
        with open(path) as f, open(new, "w") as out:
            out.writelines(line for line in f if update_of(line) in keep)
        new.replace(path)


def machine(policy) -> dict:
    """Where a result was obtained."""
    import peft
    import transformers

    gpu = torch.cuda.get_device_name() if policy.device.type == "cuda" else None
    return {
        "device": gpu or f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "peft": peft.__version__, "model": policy.name, "parameters": policy.n_parameters,
        "trainable": sum(p.numel() for p in policy.trainable().values()),
        "processes": parallel.world(), "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
    }  # fmt: skip


class StopSignal:
    """Ctrl-C or SIGTERM asks for a clean stop at the next safe point; a second Ctrl-C stops at once."""

    def __init__(self):
        self.asked = False
        if not hasattr(signal, "SIGTERM"):
            return
        for name in (signal.SIGINT, signal.SIGTERM):
            try:
                signal.signal(name, self.ask)
            except ValueError:  # not in the main thread, as in some tests
                return

    def ask(self, signum, frame):
        if self.asked and "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun passes on what the terminal has sent already
            raise KeyboardInterrupt
        if not self.asked:
            tqdm.write("stopping at the next safe point (once more to stop at once)")
        self.asked = True


def open_wandb(cfg, folder: Path):
    """A function that logs a dict, and its `finish`. wandb is online when logged in, else offline, and never asks."""
    silent = lambda line: None
    silent.finish = lambda: None
    if not cfg.wandb:
        return silent
    import wandb

    try:
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        run = wandb.init(project="picoswarm", name=folder.name, dir=str(folder), config=asdict(cfg), mode=mode,
                         settings=wandb.Settings(silent=True, console="off"))  # fmt: skip
    except Exception as error:  # logging must not decide whether a run runs
        print(f"wandb could not start ({error}); going on without it")
        return silent
    if mode == "offline":
        print(f"wandb: not logged in, so logging offline; later: wandb sync {folder}/wandb/offline-run-*")
    log = lambda line: run.log(line)
    log.finish = run.finish
    return log


def memory_folder(needed: int = 0) -> tempfile.TemporaryDirectory:
    """A folder that goes when its owner goes, in memory where there are `needed` bytes free. What a killed owner has left is removed first."""
    shm = Path("/dev/shm")
    fits = shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > needed
    sweep()
    return tempfile.TemporaryDirectory(prefix=f"picoswarm-{os.getpid()}-", dir=shm if fits else None)


def give_back_memory() -> bool:
    """Have the C library return to the system what was freed; True where it can be asked (glibc).

    It keeps freed memory for later, and batches whose lengths differ each time leave more and more holes in it: two hours of swarm grew by
    138 MB an hour although no object was left over. Once asked, a process that held 1,199 MB after an update of swarm holds 481, and as much
    after the next ones. It takes 0.08 s, so train.py does it after every update that takes long.
    """
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return True
    except (OSError, AttributeError):
        return False


def sweep() -> None:
    """Remove the memory folders of processes that are no more: a killed one cannot clean up, and adapters of a 4B are 264 MB."""
    if not Path("/proc/self").exists():
        return  # then nobody knows who is alive
    for folder in Path("/dev/shm").glob("picoswarm-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)


def append(path: Path, record: dict) -> None:
    """One line more of a .jsonl file."""
    with open(path, "a") as f:
        f.write(json.dumps(record) + "\n")


def write_json(path: Path, value: dict) -> None:
    """Write a whole file, or leave the old one as it is."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1))
    new.replace(path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for update in (1, 2, 3):
            append(folder / "metrics.jsonl", {"update": update, "reward": update / 10})
        with open(folder / "metrics.jsonl", "a") as f:
            f.write('{"update": 4, "rew')  # the kill came here; the last checkpoint was after update 2
        print("before\n" + (folder / "metrics.jsonl").read_text())
        trim(folder, done=2)
        print("\nafter --resume\n" + (folder / "metrics.jsonl").read_text())
