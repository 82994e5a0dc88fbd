"""A run's records: its logs, its state, its checkpoints, its signals. It drives nothing
but the level of a curriculum.

train.py tells it what happened (`log`, `save`, `finish`), and it writes that down, prints it, asks
the doctor whether something looks wrong, and sends it to wandb. It holds no policy. If torchrun has
started several processes, each has a Run, and only the first one's folder is kept.

Run me: `python -m bookkeeping.run` logs a made-up update.
"""

import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from tqdm import tqdm

import metrics
from bookkeeping import doctor, episodes, progress, records, tables
from bookkeeping.checkpoint import load_tensors, restore, save_checkpoint, save_tensors
from bookkeeping.folder import LOGS, code_hash, open_folder, trim
from bookkeeping.records import append, write_json
from evaluate import broken, headline, summarize
from fast import parallel
from fast.ahead import SECONDS
from fast.machine import flush, peak_memory
from fast.memory import memory_folder
from settings import PROMOTE_AFTER, eval_sets, levels_of, promote_of

ROOT = Path(__file__).resolve().parent.parent

# What the line of an update prints in addition to the reward, if the environment scores it.
PRINTED = {"exact": "exact", "payoff": "payoff", "error_rate": "errors"}

CLOCKS = ("total", *SECONDS, "eval", "sft")  # what a run's seconds are counted by


@dataclass
class State:
    """What a resumed run needs besides weights and optimizer: checkpoint/state.json."""

    update: int = -1  # updates done; -1: not even SFT
    level: int | str | None = None  # of a curriculum, or simply the difficulty
    recent: list[float] = field(default_factory=list)  # what the curriculum watches, at this level
    rewards: list[float] = field(default_factory=list)  # mean reward per update, at this level
    sft: dict = field(default_factory=dict)
    seconds: dict = field(default_factory=lambda: dict.fromkeys(CLOCKS, 0.0))
    tokens: dict = field(default_factory=lambda: {"sampled": 0, "trained": 0, "sft": 0})
    warnings: dict[str, str] = field(default_factory=dict)  # symptoms that were told (doctor.py)


@dataclass
class Run:
    cfg: object
    home: Path  # the run folder
    folder: Path  # where this process writes: the run folder, or one that is thrown away
    saved: Path | None  # the checkpoint to go on from
    state: State
    keep: object  # the folder's lock, or the throwaway folder: released when the Run goes
    started: float = field(default_factory=time.monotonic)  # time.time jumps with the clock
    spent_before: float = 0.0
    versions: list[dict] = field(default_factory=list)  # which code ran, from when on: note_code
    history: list[dict] = field(default_factory=list)  # the newest lines of metrics.jsonl
    first_gap: float | None = None  # of sampler and trainer, as the run began
    wandb: object = None
    bar: tqdm | None = None

    def open(self, policy, optimizer) -> State:
        """Write the config; put the checkpoint, if there is one, into policy and optimizer."""
        if self.saved:
            self.state = State(**restore(self.saved, policy, optimizer, asdict(self.state)))
            print(f"resumed {self.folder} after update {self.state.update}")
            if self.cfg.curriculum and self.state.level not in levels_of(self.cfg.env):
                level = f"it was at level {self.state.level}, which {self.cfg.env} has no more"
                raise ValueError(f"--resume {self.folder}: {level}; give it back, or start anew")
            # A file of rows names its tasks after its contents, and those of its scorer.
            trained = {name for name, (own, _) in eval_sets(self.cfg).items() if own}
            evals = records.lines(self.home / "evals.jsonl")  # .get: they may come from anywhere
            own = (e for e in evals if e.get("trained") and e.get("stage") != "eval_only")
            if {str(e.get("tasks")) for e in own} - trained:
                raise ValueError(
                    f"--resume {self.home}: the rows or the scorer of {self.cfg.env} are not what "
                    "they were; give them back, or start anew"
                )
        else:
            print(f"into {self.folder}")
        write_json(self.folder / "config.json", asdict(self.cfg))
        code = {"update": self.state.update, **code_of(self.cfg.env)}
        self.versions = note_code(self.folder / "code.jsonl", code)
        parallel.same_weights(policy.trainable().values())
        done = bool(self.saved) and finished(self.cfg, self.state)
        trim(self.folder, self.state.update, done)
        if not done:  # what an earlier end said is not true of the weights that follow
            (self.folder / "summary.json").unlink(missing_ok=True)
        lines = records.lines(self.folder / "metrics.jsonl")
        self.history, self.first_gap = lines[-doctor.LOOKS_BACK :], doctor.first_gap(lines)
        self.spent_before = self.state.seconds["total"]
        self.stop = StopSignal()
        first = self.folder == self.home
        self.wandb = open_wandb(replace(self.cfg, wandb=self.cfg.wandb and first), self.folder)
        return self.state

    def reference(self, policy) -> dict[str, torch.Tensor] | None:
        """With --kl: the weights after SFT, {name: weight}, kept in reference.pt."""
        if not self.cfg.kl:
            return None
        if self.state.update > 0:
            return load_tensors(self.home / "reference.pt", policy.device)
        weights = {name: p.detach().clone() for name, p in policy.trainable().items()}
        if self.folder == self.home:  # the others' folders are thrown away, and may be small
            save_tensors(self.folder / "reference.pt", weights)
        return weights

    def log(self, groups, stats: dict, rollouts) -> None:
        """The line of an update: into metrics.jsonl, to wandb, onto the screen, past the doctor."""
        state, level, seconds = self.state, rollouts.level, rollouts.seconds
        line = {"update": state.update, "level": level, **summarize(groups), **stats}
        line |= {f"seconds_{part}": seconds[part] for part in SECONDS}
        for part in SECONDS:
            state.seconds[part] += seconds[part]
        played = [e for group in groups for e in group if e.stop_reason != "error"]
        state.tokens["sampled"] += sum(e.reply_tokens for e in played)
        state.tokens["trained"] += stats["trained_tokens"]
        append(self.folder / "metrics.jsonl", line)
        self.wandb(line)
        self.bar = self.bar or tqdm(initial=state.update - 1, total=self.cfg.updates, desc="GRPO")
        names = dict.fromkeys(name for e in played for name in e.components)
        tqdm.write(one_line(line, tables.own_parts(names, self.cfg.env)) + broken(groups))
        if level == state.level:  # not one that was sampled ahead, before the level was climbed
            state.rewards.append(line["reward"])
        self.history = [*self.history, line][-doctor.LOOKS_BACK :]
        if self.first_gap is None:
            self.first_gap = doctor.first_gap([line])
        self.tell(doctor.symptoms(self.history, state.rewards, self.first_gap))
        if self.cfg.curriculum and level == state.level and level != self.cfg.difficulty:
            climb(self.cfg, state, line)
        self.bar.update()

    def log_sft(self, found: dict) -> None:
        """What sft() returns: first and last loss, tokens, seconds."""
        self.state.sft, self.state.seconds["sft"] = found["losses"], found["seconds"]
        self.state.tokens["sft"] += found["tokens"]
        self.state.tokens["trained"] += found["tokens"]

    def log_evaluation(self, results: dict[str, list]) -> None:
        """An evaluation to wandb, past the doctor; evaluate.py has written evals.jsonl.

        results: {tasks: episodes}.
        """
        state, line = self.state, {"update": self.state.update}
        for tasks, played in results.items():
            line |= {f"eval/{tasks}/{k}": v.mean for k, v in headline(played).items()}
        self.wandb(line)
        evals = records.lines(self.folder / "evals.jsonl")
        self.tell(progress.symptoms(evals, state.rewards, asdict(self.cfg)))

    def tell(self, symptoms: dict[str, str]) -> None:
        """Print each {symptom: sentence} that was not told before, and keep it in the state."""
        state = self.state
        for name, sentence in symptoms.items():
            if name in state.warnings:
                continue
            state.warnings[name] = f"update {state.update}: {sentence}"
            page = self.folder / "report.html"  # written at the end, or when somebody asks for it
            missing = page.name in sentence and not page.exists()
            how = f" (python -m bookkeeping.report {self.folder} writes it now)" if missing else ""
            tqdm.write(f"{name.upper()} at {state.warnings[name]}{how}")
            if name == "collapse" and parallel.rank() == 0:  # the next checkpoint is worse
                keep_copy(self.folder)

    @contextmanager
    def clock(self, part: str):
        """Add the seconds of a block to state.seconds[part]."""
        started = time.monotonic()
        yield
        self.state.seconds[part] += time.monotonic() - started

    def save(self, policy, optimizer, groups=None, advantages=None) -> None:
        """A checkpoint, and two groups of the last batch to read."""
        update = self.state.update
        if groups:
            episodes.save_rollout(self.folder, update, policy, groups[:2], advantages, self.cfg)
            episodes.thin(self.folder / "episodes.jsonl")
        self.count_seconds()
        if parallel.rank() == 0:
            for name in LOGS:  # Flush the logs first, so that after a power cut no checkpoint is
                #                newer than its log lines.
                if (self.folder / name).exists():
                    flush(self.folder / name)
            save_checkpoint(self.folder / "checkpoint", policy, optimizer, asdict(self.state))

    def count_seconds(self) -> None:
        self.state.seconds["total"] = self.spent_before + time.monotonic() - self.started

    def stop_asked(self) -> bool:
        """Did somebody ask this run to stop (Ctrl-C, SIGTERM), in any of its processes?"""
        return parallel.any_rank(self.stop.asked)

    def stop_if_asked(self) -> None:
        """SystemExit, if somebody did; what was saved before is where --resume goes on."""
        if self.stop_asked():
            again = "; SFT starts again" if self.state.update < 0 else ""
            raise SystemExit(f"stopped; go on with: python train.py --resume {self.home}{again}")

    def finish(self, policy) -> Path:
        """summary.json, the report and its pictures; returns the run folder."""
        from bookkeeping import report  # it draws: not needed before

        if self.bar:
            self.bar.close()
        self.count_seconds()
        if self.folder != self.home:
            return self.home
        where = machine(policy) | code_ran(self.versions)
        about = report.summarize_run(self.folder, asdict(self.cfg), asdict(self.state), where)
        write_json(self.folder / "summary.json", about)
        report.write(self.folder)
        self.wandb.finish()
        text = (self.folder / "report.md").read_text(encoding="utf-8").split("## Config")[0]
        pages = ("report.html", "report.md", "curves.png")
        print(f"\n{text}\nall of it: {', '.join(f'{self.folder}/{page}' for page in pages)}")
        print(f"next, was it luck? The same with another seed: {next_command(self.cfg)}")
        return self.folder


def next_command(cfg) -> str:
    """One command to try after a run, to be pasted: one run is an anecdote, three are a result.

    Its Python is this one: `make train` leaves no environment activated.
    """
    words, kept, own = sys.argv[1:], [], ("--seed", "--name")
    resumed = any(word.partition("=")[0] == "--resume" for word in words)
    if Path(sys.argv[0]).name != "train.py" or resumed:  # a script called train(), or an old run
        return f"the command that it began with, and --seed {cfg.seed + 1}"
    for before, word in zip(["", *words], words):
        if before not in own and word.partition("=")[0] not in own:
            kept.append(word)
    kept = kept or ["--env", cfg.env]
    python, here = Path(sys.executable), Path.cwd()
    python = python.relative_to(here) if python.is_relative_to(here) else "python"
    return f"{python} train.py {shlex.join(kept)} --seed {cfg.seed + 1}"


def open_run(cfg, typed: set[str]) -> Run:
    """The records of a new run or, with --resume, of an old one; its config then becomes cfg's.

    Raises SystemExit and ValueError with one sentence if the run cannot start or continue.
    """
    first = parallel.rank() == 0
    # What the others log nobody reads: it must not fill a small memory.
    room = 4 * episodes.MOST_BYTES
    home, saved, keep = open_folder(cfg, typed) if first else (None, None, memory_folder(room))
    saved_cfg, home, saved = parallel.from_first((cfg, home, saved))
    for name, value in asdict(saved_cfg).items():
        setattr(cfg, name, value)
    if first and cfg.engine == "vllm" and parallel.world() > 1 and not cfg.async_rollouts:
        raise ValueError(  # vLLM would take our process group for its own
            "--engine vllm in several processes needs one of its own beside each of them; "
            "add --async-rollouts 1 (for a 4B also --micro-tokens 4096: 94 GiB without)"
        )
    if cfg.api_base:
        raise ValueError(
            f"--resume {home}: it holds an evaluation over an API, there is nothing to train; "
            "start a run of its own"
        )
    folder = home if first else Path(keep.name)
    state = State(level=levels_of(cfg.env)[0] if cfg.curriculum else cfg.difficulty)
    return Run(cfg, home, folder, saved, state, keep)


def finished(cfg, state: State) -> bool:
    """Are the updates done? With --until-converged: has the training reward settled as well?"""
    if state.update < cfg.updates or not cfg.until_converged:
        return state.update >= cfg.updates
    settled = bool(state.rewards) and metrics.trend(state.rewards).settled
    return state.update >= cfg.max_updates or settled


def climb(cfg, state: State, line: dict) -> None:
    """One level up if the last updates of this one were good enough (settings.promote_of).

    A harder level pays less, and that is no collapse: its rewards are counted anew.
    """
    measure, enough = promote_of(cfg.env)
    state.recent = (state.recent + [line.get(measure, 0.0)])[-PROMOTE_AFTER:]
    mastered = sum(state.recent) / PROMOTE_AFTER >= enough
    if len(state.recent) == PROMOTE_AFTER and mastered:
        levels = levels_of(cfg.env)
        state.level = levels[levels.index(state.level) + 1]
        state.recent, state.rewards = [], []


def one_line(line: dict, own: list[str] = ()) -> str:
    """What is printed of an update. Without signal nothing was trained, and nothing measured.

    own: entries of the score that somebody has added (tables.own_parts).
    """
    interval = f"[{line['reward_low']:.2f}, {line['reward_high']:.2f}]"
    text = f"update {line['update']:4}  reward {line['reward']:.2f} {interval}"
    for name, title in (PRINTED | {name: tables.label(name) for name in own}).items():
        text += f"  {title} {line[name]:.2f}" if name in line else ""
    text += f"  length {line['reply_tokens']:5.1f}  signal {line['groups_with_signal']:.2f}"
    if "ratio" in line:
        text += f"  entropy {line['entropy']:.3f}  grad {line['grad_norm']:.2f}"
        text += f"  ratio {line['ratio']:.3f}  loss {line['loss']:+.4f}"
    waiting = sum(line[f"seconds_{part}"] for part in SECONDS if part != "train")
    return text + f"  {waiting:.1f}s + {line['seconds_train']:.1f}s"


class StopSignal:
    """Ctrl-C or SIGTERM asks for a clean stop at the next safe point; a second one is at once."""

    def __init__(self):
        self.asked = False
        with suppress(ValueError):  # not in the main thread, as in some tests
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.ask)

    def ask(self, signum, frame):
        # torchrun passes on what the terminal has sent already: under it a second one is the first.
        if self.asked and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        if not self.asked:
            tqdm.write("stopping at the next safe point (once more to stop at once)")
        self.asked = True


def machine(policy) -> dict:
    """Where a result was obtained."""
    import transformers

    try:
        peft = version("peft")
    except PackageNotFoundError:  # --lora-rank 0 needs none
        peft = "not installed"
    gpu = torch.cuda.get_device_name() if policy.device.type == "cuda" else None
    return {
        "device": gpu or f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft,
        "model": policy.name,
        "parameters": policy.n_parameters,
        "trainable": sum(p.numel() for p in policy.trainable().values()),
        "processes": parallel.world(),
        "peak_rss_gb": round(peak_memory(), 3),
    }


def code_of(env: str) -> dict:
    """Which code runs: the commit, whether files of it were changed, and a hash of the environment.

    Flags do not tell two rewards apart if somebody has edited score_reply between two runs;
    bookkeeping/compare.py asks the hash. Comments and layout do not count in it.
    """

    def git(*words: str) -> str | None:
        try:
            how = {"capture_output": True, "encoding": "utf-8", "timeout": 10, "check": True}
            return subprocess.run(["git", "-C", str(ROOT), *words], **how).stdout.strip()
        except (OSError, subprocess.SubprocessError):  # a copy without its history, or no git
            return None

    changes = git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": None if changes is None else bool(changes),
        "environment_code": code_hash(env),
    }


def note_code(file: Path, now: dict) -> list[dict]:
    """Add to code.jsonl which code runs from here on, if it is not the last one's; returns all.

    now: {"update": the update that it goes on from, …} of code_of. Code whose every update was lost
    with a kill has left nothing, and is forgotten.
    """
    known = [line for line in records.lines(file) if line["update"] < now["update"]]
    if known and known[-1]["environment_code"] != now["environment_code"]:
        after = max(now["update"], 0)
        print(f"the environment's code is not what it was before update {after}: {file} has both")
    if not known or known[-1] != now | {"update": known[-1]["update"]}:
        known.append(now)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in known)
    records.write_whole(file, text)
    return known


def code_ran(versions: list[dict]) -> dict:
    """What summary.json says of the code: the last, and all of them if there were several."""
    last = {name: value for name, value in versions[-1].items() if name != "update"}
    return last | ({"versions": versions} if len(versions) > 1 else {})


def open_wandb(cfg, folder: Path):
    """A function that logs a dict, with a `finish`. It never asks, and never stops a run."""
    silent = lambda line: None
    silent.finish = lambda: None
    if not cfg.wandb:
        return silent
    try:
        import wandb

        online = wandb.login(prompt=False)
        mode = os.environ.get("WANDB_MODE") or ("online" if online else "offline")
        run = wandb.init(
            project="picoswarm", name=folder.name, dir=str(folder), config=asdict(cfg), mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
    except Exception as error:  # logging must not decide whether a run runs
        print(f"wandb could not start ({error}); going on without it")
        return silent
    if mode == "offline":
        later = f"wandb sync {folder}/wandb/offline-run-*"
        print(f"wandb: not logged in, so logging offline; later: {later}")
    log = without_fail(run.log)
    log.finish = without_fail(run.finish)
    return log


def without_fail(call):
    """call, with its failures told and not raised: wandb's process may have died, or the disk."""

    def done(*given):
        try:
            call(*given)
        except Exception as error:
            tqdm.write(f"wandb failed ({error}); the run's own logs go on")

    return done


def keep_copy(folder: Path) -> None:
    """checkpoint -> checkpoint-at-collapse, if there is one and room for two; never stops a run."""
    places = (folder / "checkpoint", folder / "checkpoint.old")  # after a resume only the second
    saved, kept = next(filter(Path.exists, places), None), folder / "checkpoint-at-collapse"
    try:
        if saved:
            shutil.copytree(saved, kept, dirs_exist_ok=True)
    except OSError as error:
        shutil.rmtree(kept, ignore_errors=True)
        tqdm.write(f"{kept} could not be written ({error.strerror or str(error)[:200]})")


if __name__ == "__main__":
    line = {"update": 1, "reward": 0.25, "reward_low": 0.1, "reward_high": 0.4, "exact": 0.25}
    line |= {"reply_tokens": 120.5, "groups_with_signal": 0.5, "entropy": 0.21, "grad_norm": 0.9}
    line |= {"ratio": 1.0, "loss": 0.0} | {f"seconds_{part}": 0.1 for part in SECONDS}
    print(one_line(line))
