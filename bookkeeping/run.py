"""A run's records: its logs, its state, its checkpoints, its signals. It drives nothing
but the level of a curriculum.

train.py tells it what happened (`log`, `save`, `finish`), and it writes that down, prints it, asks
the doctor whether something looks wrong, and sends it to wandb. It holds no policy. If torchrun has
started several processes, each has a Run, and only the first one's folder is kept.

Run me: `python -m bookkeeping.run` prints the line of a made-up update.
"""

import json
import os
import platform
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from tqdm import tqdm

import metrics
from bookkeeping import doctor, progress, records, tables
from bookkeeping.checkpoint import load_tensors, restore, save_checkpoint, save_tensors
from bookkeeping.folder import LOGS, code_hash, open_folder, trim
from bookkeeping.records import append, write_json
from evaluate import broken, headline, summarize
from fast import parallel
from fast.ahead import SECONDS
from fast.logprobs import token_logprobs
from fast.machine import flush, peak_memory
from policy import plain_logprobs
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
    lines: list[dict] = field(default_factory=list)  # of metrics.jsonl, for the doctor
    wandb: object = None
    moments: list[float] = field(default_factory=list)  # when the updates were done

    def open(self, policy, optimizer) -> State:
        """Write the config; put the checkpoint, if there is one, into policy and optimizer."""
        if self.saved:
            self.state = State(**restore(self.saved, policy, optimizer, asdict(self.state)))
            self.refuse()
            print(f"resumed {self.folder} after update {self.state.update}")
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
        self.lines = records.lines(self.folder / "metrics.jsonl")
        self.spent_before = self.state.seconds["total"]
        self.stop = StopSignal()
        first = self.folder == self.home
        self.wandb = open_wandb(replace(self.cfg, wandb=self.cfg.wandb and first), self.folder)
        return self.state

    def refuse(self) -> None:
        """ValueError if the run that was saved cannot go on with this config, or in this world."""
        cfg, state = self.cfg, self.state
        most = max(cfg.updates, cfg.max_updates if cfg.until_converged else 0)
        # A file of rows names its tasks after its contents, and those of its scorer.
        trained = {name for name, (own, _) in eval_sets(cfg).items() if own}
        evals = records.lines(self.home / "evals.jsonl")  # .get: they may come from anywhere
        own = (e for e in evals if e.get("trained") and e.get("stage") != "eval_only")
        for wrong, why in (
            (
                state.update > most,
                f"it has done {state.update} updates, more than the {most} that are asked for; "
                f"give --updates {state.update} or more",
            ),
            (
                cfg.curriculum and state.level not in levels_of(cfg.env),
                f"it was at level {state.level}, which {cfg.env} has no more; give it back, or "
                "start anew",
            ),
            (
                {str(e.get("tasks")) for e in own} - trained,
                f"the rows or the scorer of {cfg.env} are not what they were; give them back, or "
                "start anew",
            ),
        ):
            if wrong:
                raise ValueError(f"--resume {self.home}: {why}")

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
        self.to_wandb(line)
        self.moments.append(time.monotonic())
        names = dict.fromkeys(name for e in played for name in e.components)
        text = one_line(line, tables.own_parts(names, self.cfg.env)) + self.time_left()
        tqdm.write(text + broken(groups))
        if level == state.level:  # not one that was sampled ahead, before the level was climbed
            state.rewards.append(line["reward"])
        self.lines.append(line)
        newest, first_gap = self.lines[-doctor.LOOKS_BACK :], doctor.first_gap(self.lines)
        self.tell(doctor.symptoms(newest, state.rewards, first_gap))
        if self.cfg.curriculum and level == state.level and level != self.cfg.difficulty:
            climb(self.cfg, state, line)

    def time_left(self) -> str:
        """How long the updates that are left will take, by those since the first one here."""
        left, moments = self.cfg.updates - self.state.update, self.moments
        each = (moments[-1] - moments[0]) / max(1, len(moments) - 1)
        return f", {left * each / 60:.0f} min left" if each and left > 0 else ""

    def log_sft(self, found: dict) -> None:
        """What sft() returns: first and last loss, tokens, seconds."""
        self.state.sft, self.state.seconds["sft"] = found["losses"], found["seconds"]
        self.state.tokens["sft"] += found["tokens"]
        self.state.tokens["trained"] += found["tokens"]

    def log_evaluation(self, results: dict[str, list]) -> None:
        """An evaluation to wandb, past the doctor; evaluate.py has written evals.jsonl.

        results: {tasks: episodes}.
        """
        line = {"update": self.state.update}
        for tasks, played in results.items():
            line |= {f"eval/{tasks}/{k}": v.mean for k, v in headline(played).items()}
        self.to_wandb(line)
        evals = records.lines(self.folder / "evals.jsonl")
        self.tell(progress.symptoms(evals, self.state.rewards, asdict(self.cfg)))

    def to_wandb(self, line: dict) -> None:
        if self.wandb:
            with may_fail():
                self.wandb.log(line)

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

    @contextmanager
    def clock(self, part: str):
        """Add the seconds of a block to state.seconds[part]."""
        started = time.monotonic()
        yield
        self.state.seconds[part] += time.monotonic() - started

    def save(self, policy, optimizer, groups=None, advantages=None) -> None:
        """A checkpoint, and two groups of the last batch to read."""
        update, shown = self.state.update, (groups or [])[:2]
        ratios = [ratios_of(policy, group, self.cfg, update) for group in shown]
        records.save_episodes(self.folder, update, "", policy, shown, advantages, ratios)
        records.thin(self.folder / "episodes.jsonl")
        self.count_seconds()
        if parallel.rank() == 0:
            # Flush the logs first, so that after a power cut no checkpoint is newer than its lines.
            for path in filter(Path.exists, (self.folder / name for name in LOGS)):
                flush(path)
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

        self.count_seconds()
        if self.folder != self.home:
            return self.home
        where = machine(policy) | code_ran(self.versions)
        about = report.summarize_run(self.folder, asdict(self.cfg), asdict(self.state), where)
        write_json(self.folder / "summary.json", about)
        report.write(self.folder)
        if self.wandb:
            with may_fail():
                self.wandb.finish()
        text = (self.folder / "report.md").read_text(encoding="utf-8").split("## Config")[0]
        print(f"\n{text}\nall of it: {self.folder}/report.html, report.md and curves.png")
        print(f"next, was it luck? The same command with --seed {self.cfg.seed + 1}")
        return self.folder


def open_run(cfg, typed: set[str]) -> Run:
    """The records of a new run or, with --resume, of an old one; its config then becomes cfg's.

    Raises SystemExit and ValueError with one sentence if the run cannot start or continue.
    """
    first = parallel.rank() == 0
    home, saved = None, None
    if first:
        home, saved, keep = open_folder(cfg, typed)
    else:  # what the others log nobody reads
        keep = tempfile.TemporaryDirectory(prefix="picoswarm-")
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


@torch.no_grad()
def ratios_of(policy, group: list, cfg, update: int) -> list[list[float]]:
    """Of each member, its sampled tokens' importance ratios by the policy as it is now.

    Raises FloatingPointError if the policy's log-probs are not finite any more: such weights must
    not become a checkpoint.
    """
    logprobs_of, found = plain_logprobs if cfg.plain else token_logprobs, []
    for e in group:
        if not e.token_ids:  # the environment gave no task
            found.append([])
            continue
        ids = torch.tensor([e.token_ids], device=policy.device)  # [1, T]
        mask = torch.tensor([e.sampled[1:]], device=policy.device)  # [1, T - 1]
        old = [logprob for logprob, sampled in zip(e.logprobs, e.sampled) if sampled]
        now, _ = logprobs_of(policy, ids, mask, cfg.temperature)  # [M]
        if not now.isfinite().all():
            raise FloatingPointError(f"after update {update} the policy's log-probs are not finite")
        found.append((now.cpu() - torch.tensor(old)).exp().tolist())
    return found


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

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:  # --lora-rank 0 needs no peft
            return "not installed"

    gpu = torch.cuda.get_device_name() if policy.device.type == "cuda" else None
    return {
        "device": gpu or f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        **{name: installed(name) for name in ("torch", "transformers", "peft")},
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
    """wandb's run, or None. It never asks, and never stops a run."""
    if not cfg.wandb:
        return None
    with may_fail():
        import wandb

        loggedin = wandb.login(prompt=False)
        mode = os.environ.get("WANDB_MODE") or ("online" if loggedin else "offline")
        if mode == "offline":
            later = f"wandb sync {folder}/wandb/offline-run-*"
            print(f"wandb: not logged in, so logging offline; later: {later}")
        quiet = wandb.Settings(silent=True, console="off")
        where = {"project": "picoswarm", "name": folder.name, "dir": str(folder), "mode": mode}
        return wandb.init(config=asdict(cfg), settings=quiet, **where)


@contextmanager
def may_fail():
    """A failure is told, and does not stop the run: wandb's process may have died."""
    try:
        yield
    except Exception as error:
        tqdm.write(f"wandb failed ({error}); the run's own logs go on")


if __name__ == "__main__":
    line = {"update": 1, "reward": 0.25, "reward_low": 0.1, "reward_high": 0.4, "exact": 0.25}
    line |= {"reply_tokens": 120.5, "groups_with_signal": 0.5, "entropy": 0.21, "grad_norm": 0.9}
    line |= {"ratio": 1.0, "loss": 0.0} | {f"seconds_{part}": 0.1 for part in SECONDS}
    print(one_line(line))
