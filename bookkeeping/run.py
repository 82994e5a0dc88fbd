"""A run's records: its logs, its state, its checkpoints, its signals.

train.py reports what happened (`log`, `save`, `write_report`), and a Run writes it down, prints it,
asks the doctor whether something looks wrong, and sends it to wandb. It holds no policy. If
torchrun has started several processes, each has a Run, but only the first one's folder is kept.
"""

import os
import platform
import secrets
import signal
import subprocess
import tempfile
import time
import weakref
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from threading import Event

import numpy as np
import torch
from tqdm import tqdm

import metrics
from batch import collate
from bookkeeping import doctor, records, report, settled
from bookkeeping import folder as run_folder
from bookkeeping.refusals import is_stale
from evaluate import eval_line, eval_sets, headline, summarize, without_failed
from fast import parallel
from fast.ahead import SECONDS
from fast.machine import cpu_name, here, peak_memory
from policy import Backend, copy_weights
from rollout import Episode
from settings import Config, known_tasks, levels_of, promote_of

# What is printed of an update: a column of metrics.jsonl, its title, and its format. Without a
# signal nothing was trained, and there is no entropy and no ratio.
PRINTED = (
    ("exact", "exact", ".2f"),
    ("habit_derives", "spells", "4.0%"),  # letters: how many replies spell it out
    ("habit_keys", "by keys", "4.0%"),  # alphabet: how many sort by keys
    ("payoff", "payoff", ".2f"),
    ("error_rate", "errors per turn", ".2f"),
    ("reply_tokens", "length", "4.0f"),
    ("groups_with_signal", "signal", ".2f"),
    ("entropy", "entropy", ".3f"),
    ("grad_norm", "grad", ".2f"),
    ("ratio", "ratio", ".3f"),
    ("loss", "loss", "+.4f"),
)

MANY_PASSES = 10  # of SFT over its demonstrations; one to five are usual


@contextmanager
def may_fail():
    """Print a failure, and let the run go on: wandb may have died, or not be installed."""
    try:
        yield
    except ModuleNotFoundError:
        tqdm.write("wandb is not installed; the run's own logs have the same numbers")
    except Exception as error:
        tqdm.write(f"wandb failed ({error}); the run's own logs go on")


@dataclass
class State:
    """What a resumed run needs besides weights, optimizer and logs: checkpoint/state.json."""

    updates: int = 0  # updates done; the first checkpoint is after SFT
    level: int | str | None = None  # a curriculum's, or simply the difficulty
    sft: dict = field(default_factory=dict)
    seconds: dict = field(
        default_factory=lambda: dict.fromkeys(("total", *SECONDS, "eval", "sft"), 0.0)
    )
    # read: prompts and what environments answered, once per episode
    tokens: dict = field(
        default_factory=lambda: dict.fromkeys(("sampled", "read", "trained", "sft"), 0)
    )
    warnings: dict[str, str] = field(default_factory=dict)  # symptoms already reported (doctor.py)
    base: str = ""  # hash of the base model's weights
    code: str = ""  # hash of the environment's code; "OLD then NEW" if it was edited and resumed


@dataclass
class Run:
    cfg: object
    home: Path | None  # the run folder; None: it is made once everything is ready
    saved: Path | None  # the checkpoint to go on from; None: not even SFT is done
    state: State
    keep: object  # the folder's lock, or the throwaway folder: released when the Run goes
    folder: Path | None = None  # where this process writes: home, or a throwaway folder
    began: float = field(default_factory=time.monotonic)  # for a resumed run, as if never stopped
    stopping: Event = field(default_factory=Event)  # set by Ctrl-C or SIGTERM
    lines: list[dict] = field(default_factory=list)  # of metrics.jsonl
    after_sft: dict = field(default_factory=dict)  # with --kl: the reference, {name: weight}
    wandb: object = None  # with --wandb, its run; only the first process has one

    def start(self, cfg, policy, optimizer, collector) -> None:
        """Write the config; put the checkpoint, if there is one, into policy and optimizer.

        The collector goes on with tasks that the run has not played.

        cfg: the finished one, with all that depends on the model.
        """
        self.cfg, first = cfg, parallel.rank() == 0
        if first and not self.home:
            self.home, self.keep = run_folder.make_folder(cfg)
        self.home = self.folder = parallel.broadcast(self.home)
        run_folder.own[:] = [self.home]
        if not first:  # nobody reads what the others log
            self.keep = tempfile.TemporaryDirectory(prefix="picoswarm-")
            self.folder = Path(self.keep.name)
        self.state.base = run_folder.weights_hash(policy)
        if self.saved:
            self.go_on(policy, optimizer)
            # With --max-staleness some batches were played and dropped.
            collector.begun = sum(1 + line.get("batches_dropped", 0) for line in self.lines)
        else:
            run_folder.trim(self.folder, -1)
        records.write_json(self.folder / "config.json", asdict(cfg))  # on the disk, when it is said
        if not self.saved:
            print(f"into {self.folder}: metrics.jsonl grows, report.html comes at the end")
        self.machine = machine(policy)
        records.note(
            self.folder,
            "\n".join([here(cfg, policy), *(f"{x} {y}" for x, y in self.machine.items())]),
        )
        # An earlier summary is not true of the weights that follow.
        (self.folder / "summary.json").unlink(missing_ok=True)
        hear_signals(self.stopping)
        if first and cfg.wandb:
            self.wandb = open_wandb(cfg, self.folder)

    def go_on(self, policy, optimizer) -> None:
        """Take policy, optimizer and state from the checkpoint, and the lines that led to it.

        Flags cannot show that score_reply was edited between two runs, so the state keeps a hash of
        the environment's code; bookkeeping/compare.py uses it.
        """
        code = self.state.code
        run_folder.refuse_base(self.saved, policy)
        self.after_sft, state = run_folder.load_checkpoint(self.saved, policy, optimizer)
        with records.foreign(self.saved):
            self.state = State(**state)
            self.began -= self.state.seconds["total"]
            done, log = self.state.updates, self.home / "metrics.jsonl"
            with records.foreign(log):
                self.lines = [line for line in records.lines(log) if line["update"] <= done]
            self.refuse()
        run_folder.trim(self.folder, self.state.updates)
        self.lines = parallel.broadcast(records.lines(self.folder / "metrics.jsonl"))
        lost = sum(line.get("batches_waiting", 0) for line in self.lines[-1:])
        print(
            f"resumed {self.folder} after update {self.state.updates}"
            + f"; {lost} batches waited to be trained on, and are sampled again" * bool(lost)
        )
        if not self.state.code.endswith(code):
            self.state.code += f" then {code}"
            self.warn(
                {
                    "edited": "its environment's code was edited: rewards before and after are not "
                    "one measure"
                }
            )

    def refuse(self) -> None:
        """ValueError if the saved run cannot continue with this config or environment."""
        cfg, state = self.cfg, self.state
        most = max(cfg.updates, cfg.max_updates if cfg.until_converged else 0)
        evals = records.lines(self.home / "evals.jsonl")
        # The tasks of a file of rows are named after the file and its contents, and its scorer's.
        # A file with another name and the same contents goes on under the old one.
        rows = known_tasks().open_source(cfg.env) if cfg.env.startswith("jsonl:") else None
        for e in evals:
            if rows and e["trained"] and e["tasks"].split()[-1] == rows.name.split()[-1]:
                rows.name = e["tasks"]
        trained = {name for name, (own, _) in eval_sets(cfg).items() if own}
        for wrong, sentence in (
            (
                state.updates > most,
                f"it has done {state.updates} updates, more than the {most} that are asked for; "
                f"give --updates {state.updates} or more",
            ),
            (
                cfg.curriculum and state.level not in levels_of(cfg.env),
                f"it was at level {state.level}, which {cfg.env} has no more; give it back, or "
                "start anew",
            ),
            (
                state.updates % cfg.sync_every and not self.finished(),
                f"the weights that sampled update {state.updates} are not kept (--sync-every "
                f"{cfg.sync_every}); start anew",
            ),
            (
                {e["tasks"] for e in evals if e["trained"]} - trained,
                f"the rows or the scorer of {cfg.env} are not what they were; give them back, or "
                "start anew",
            ),
        ):
            if wrong:
                raise ValueError(f"--resume {self.home}: {sentence}")

    def reference(self, policy) -> dict[str, torch.Tensor] | None:
        """With --kl: the weights after SFT, {name: weight}; each checkpoint keeps them."""
        if self.cfg.kl and not self.after_sft:
            self.after_sft = copy_weights(policy)
        return self.after_sft or None

    def log(self, groups, columns: dict, collector) -> None:
        """Record an update: in metrics.jsonl, in wandb, on the screen; and let the doctor see it.

        columns: of the update (bookkeeping/columns.py).
        """
        state = self.state
        line = {
            "update": state.updates,
            "level": collector.level,
            **summarize(groups),
            **columns,
            **collector.counts,
        }
        for part, seconds in collector.seconds.items():
            line[f"seconds_{part}"] = seconds
            state.seconds[part] += seconds
        played = [e for group in groups for e in group if e.stop_reason != "error"]
        replies = sum(e.reply_tokens for e in played)
        state.tokens["sampled"] += replies
        state.tokens["read"] += sum(len(e.token_ids) for e in played) - replies
        state.tokens["trained"] += line["trained_tokens"]
        records.append(self.folder / "metrics.jsonl", line)
        self.lines.append(line)
        waiting = waited(line) / (waited(line) + line["seconds_train"])
        log_wandb(self.wandb, line | {"waiting": waiting}, self.cfg.sft_steps)
        minutes = self.minutes_left()
        left = f", {minutes:.0f} min left" if state.updates < self.cfg.updates else ""
        records.say(self.folder, one_line(line) + left + records.broken(groups))
        self.warn(doctor.symptoms(self.lines))
        if state.updates == 1:
            passed = (time.monotonic() - self.began) / 60
            print(
                f"{signal_verdict(groups)}\n{passed:.1f} min to here; about {passed + minutes:.1f} "
                "in all, evaluations included, if the replies keep their length"
            )

    def minutes_left(self) -> float:
        """Updates and evaluations still to come, each as long as the mean of those so far."""
        to_do, every = self.cfg.updates - self.state.updates, self.cfg.eval_every
        update = np.mean([waited(line) + line["seconds_train"] for line in self.lines])
        # before and after SFT, and every so often since
        evaluation = self.state.seconds["eval"] / (2 + self.state.updates // every)
        return (to_do * update + max(1, to_do / every) * evaluation) / 60

    def rewards(self, measure: str = "reward") -> list[float]:
        """The mean of a measure in every update so far, at this level.

        A harder level pays less, and that is no collapse. A batch that was sampled ahead, before
        the climb, belongs to the level below.
        """
        level = self.state.level
        return [line.get(measure, 0.0) for line in self.lines if line.get("level") == level]

    def next_level(self):
        """One level up if this one is surely good enough (settings.promote_of), else the same."""
        cfg, level = self.cfg, self.state.level
        measure, enough = promote_of(cfg.env)
        climbs = cfg.curriculum and level != cfg.difficulty
        if climbs and settled.passed(self.rewards(measure), enough):
            levels = levels_of(cfg.env)
            level = levels[levels.index(level) + 1]
        return level

    def finished(self) -> bool:
        """Are the updates done? Both ends may wait for the training reward to settle."""
        cfg, done = self.cfg, self.state.updates
        if done >= (cfg.max_updates if cfg.until_converged else cfg.updates):
            return True
        if 0 < cfg.sampled_tokens <= self.state.tokens["sampled"]:
            return True
        waits = cfg.until_converged if done >= cfg.updates else cfg.stop_when_settled
        return waits and settled.present_trend(self.rewards()).settled

    def log_sft(self, found: dict) -> None:
        """Record what sft() returns: each step's loss, and how many tokens were shown."""
        losses = found["losses"]
        self.state.tokens |= {"sft": found["tokens"], "trained": found["tokens"]}
        self.warn(left_out(found, self.cfg.max_tokens))
        if not losses:
            return
        records.write_lines(
            self.folder / "sft.jsonl",
            [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)],
        )
        self.state.sft = {"loss_first": losses[0], "loss_last": losses[-1]}
        for step, loss in enumerate(losses, 1):
            log_wandb(self.wandb, {"update": 0, "sft/step": step, "sft/loss": loss}, step)

    def log_evaluation(self, policy, groups, tasks: str, trained: bool, stage: str) -> None:
        """Record an evaluation of one set of tasks; also in wandb."""
        done = self.state.updates
        found = record_evaluation(self.folder, policy, groups, tasks, trained, stage, done)
        # Before and after SFT are both update 0.
        when, rows = ("before", 0) if stage == "before" else ("eval", self.cfg.sft_steps)
        means = {f"{when}/{tasks}/{name}": x.mean for name, x in found.items()}
        log_wandb(self.wandb, {"update": done, **means}, rows)

    def look_at_evaluations(self) -> None:
        """Let the doctor see them."""
        evals = records.lines(self.folder / "evals.jsonl")
        self.warn(doctor.symptoms(doctor.of_run(evals, self.cfg.sft_steps), doctor.EVALUATED))

    def warn(self, symptoms: dict[str, str]) -> None:
        """Print each {symptom: sentence} that was not printed before, and keep it in the state."""
        told = self.state.warnings
        for name, sentence in symptoms.items():
            if name not in told:
                told[name] = f"update {self.state.updates}: {sentence}"
                records.say(self.folder, f"{name.upper()} at {told[name]}")

    @contextmanager
    def clock(self, part: str):
        """Add the seconds of a block to state.seconds[part]."""
        started = time.monotonic()
        yield
        self.state.seconds[part] += time.monotonic() - started

    def bar(self, steps: list):
        """The steps, with a progress bar; between two of them, the run may be stopped."""
        for step in parallel.bar(steps, desc="SFT", disable=not steps):
            yield step
            self.stop_if_asked()

    def save(self, policy, optimizer, backend: Backend, groups=()) -> None:
        """Save a checkpoint, and two groups of the last batch to read."""
        update, shown = self.state.updates, groups[:2]
        ratios = [[ratios_of(policy, e, self.cfg, backend, update) for e in g] for g in shown]
        records.save_episodes(self.folder, update, "", policy, shown, ratios)
        self.state.seconds["total"] = time.monotonic() - self.began
        if parallel.rank() == 0:
            run_folder.save_checkpoint(
                self.home / "checkpoint", policy, optimizer, asdict(self.state), self.after_sft
            )

    def checkpoint_due(self) -> bool:
        """Every --save-every updates, and if this run was asked to stop.

        With --sync-every the sampler may have older weights, which no checkpoint has: a run cannot
        go on from there. So what is due between two syncs is saved at the next one.
        """
        done, sync, every = self.state.updates, self.cfg.sync_every, self.cfg.save_every
        if done % sync:
            return False
        return done // every > (done - sync) // every or self.stop_asked()

    def stop_asked(self) -> bool:
        """Was this run asked to stop (Ctrl-C, SIGTERM), in any of its processes?"""
        return any(parallel.gather([self.stopping.is_set()]))

    def stop_if_asked(self) -> None:
        """SystemExit if it was; --resume continues from what was saved before."""
        if self.stop_asked():
            raise SystemExit(f"stopped{run_folder.how_to_go_on()}")

    def write_report(self) -> Path:
        """Write summary.json, the report and its pictures; returns the run folder."""
        self.state.seconds["total"] = time.monotonic() - self.began
        if self.folder != self.home:
            return self.home
        self.machine |= {"environment_code": self.state.code, "peak_rss_gb": peak_memory()}
        about = report.summarize_run(
            self.folder, asdict(self.cfg), asdict(self.state), self.machine
        )
        records.write_json(self.folder / "summary.json", about)
        report.write(self.folder)
        if self.wandb:
            finish_wandb(self.wandb, self.folder, about)
        text = (self.folder / "report.md").read_text(encoding="utf-8").split("## Config")[0]
        wrong = ", ".join(self.state.warnings).upper()  # which another seed would only repeat
        print(
            f"\n{text}\nall of it: {self.folder}/report.html, report.md and curves.png",
            f"next, mend what is wrong: {wrong}"
            if wrong
            else f"next, was it luck? The same train.py command with --seed {self.cfg.seed + 1}",
            sep="\n",
        )
        return self.folder


def open_run(cfg, typed: set[str]) -> Run:
    """The records of a new run or, with --resume, of an old one; its config then becomes cfg's.

    Raises SystemExit and ValueError with one sentence if the run cannot start or continue.
    """
    home, saved, keep = None, None, None
    if parallel.rank() == 0:
        if cfg.resume:
            home, saved, keep = run_folder.resume_folder(cfg, typed)
        else:
            run_folder.refuse_taken(cfg)
    saved_cfg, home, saved = parallel.broadcast((cfg, home, saved))
    vars(cfg).update(asdict(saved_cfg))
    level = levels_of(cfg.env)[0] if cfg.curriculum else cfg.difficulty
    return Run(cfg, home, saved, State(level=level, code=run_folder.code_hash(cfg.env)), keep)


@torch.no_grad()
def ratios_of(policy, e: Episode, cfg, backend: Backend, update: int) -> list[float]:
    """The importance ratios of an episode's sampled tokens, under the current policy.

    Raises FloatingPointError if the policy's log-probs are no longer finite: such weights must not
    become a checkpoint.
    """
    if not e.token_ids:  # the environment gave no task
        return []
    batch = collate([e], policy.tokenizer.pad_token_id, policy.device)
    now = backend.forward(policy, batch.ids, batch.mask, cfg.temperature, False).logprobs  # [M]
    if not now.isfinite().all():
        raise FloatingPointError(f"after update {update} the policy's log-probs are not finite")
    return (now - batch.sampler_logprobs).exp().tolist()


def record_evaluation(
    folder: Path, policy, groups, tasks: str, trained: bool, stage: str, update: int
) -> dict[str, metrics.Interval]:
    """Write and print how one set of tasks was played, [n][1]; returns its headline.

    Each task's result goes to evals.jsonl; of the trained set, a few whole episodes to
    episodes.jsonl. stage: before, after_sft, train, final or eval_only. ValueError if all episodes
    failed.
    """
    played = [e for [e] in without_failed(groups)]
    failed = {i: e.error for i, [e] in enumerate(groups) if e.stop_reason == "error"}
    line = eval_line(update, stage, tasks, trained, played, failed)
    records.append(folder / "evals.jsonl", line)
    if trained:
        records.save_episodes(folder, update, stage, policy, worth_reading(groups))
    found = headline(played)
    shown = "  ".join(f"{name} {x}" for name, x in found.items())
    head = f"eval {stage:10} update {update:4}  {tasks}  {shown}"
    records.say(folder, head + records.broken(groups))
    return found


def worth_reading(groups: list[list[Episode]]) -> list[list[Episode]]:
    """The first eight groups; if the environment has no `exact`, also the best one."""
    played = without_failed(groups)
    first, best = groups[:8], max(played, key=lambda g: g[0].reward)
    graded = any("exact" not in g[0].components for g in played)
    return [*first, best] if graded and best not in first else first


def left_out(found: dict, max_tokens: int) -> dict[str, str]:
    """{symptom: sentence} about demonstrations that sft() did not show."""
    n, beyond, long = found["demonstrations"], found["beyond_context"], found["too_long"]
    fate = "left out" if long + beyond < n else "shown, as there are no others"
    warnings = {
        "beyond the context": (beyond, "are longer than the model's context and are left out"),
        "too long": (
            long,
            f"have a reply longer than --max-tokens {max_tokens}, which RL would cut; they are "
            f"{fate}",
        ),
    }
    return {x: f"{few} of {n} demonstrations {why}" for x, (few, why) in warnings.items() if few}


def one_line(line: dict) -> str:
    """The printed line of an update."""
    head = "update {update:4}  reward {reward:.2f} [{reward_low:.2f}, {reward_high:.2f}]"
    shown = [f"{title} {line[name]:{form}}" for name, title, form in PRINTED if name in line]
    return "  ".join(
        [head.format_map(line), *shown, f"{waited(line):.1f}s + {line['seconds_train']:.1f}s"]
    )


def waited(line: dict) -> float:
    """The seconds of an update that were not training: in turn, all of sampling."""
    return line["seconds_wait"] or sum(line[f"seconds_{part}"] for part in report.SAMPLING)


def hear_signals(stopping: Event) -> None:
    """Ctrl-C or SIGTERM asks for a clean stop at the next safe point; a second one stops now.

    So does the first one after the Run has gone, which the handler must not keep.
    """
    kept = weakref.ref(stopping)

    def stop_soon(signum, frame):
        asked = kept()
        # torchrun passes on what the terminal has already sent: there the second may be the first.
        twice = asked and asked.is_set() and "TORCHELASTIC_RUN_ID" not in os.environ
        if not asked or twice:
            raise KeyboardInterrupt
        asked.set()
        tqdm.write("stopping at the next safe point (once more to stop at once)")

    with suppress(ValueError):  # not in the main thread, as in some tests
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop_soon)


def machine(policy) -> dict:
    """Where a result was obtained, and by which code."""
    cpu = f"CPU ({cpu_name()}), {torch.get_num_threads()} threads"
    return {
        "device": torch.cuda.get_device_name() if policy.device.type == "cuda" else cpu,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "transformers", "peft")},
        "model": policy.name,
        "parameters": policy.n_parameters,
        "trainable": sum(p.numel() for p in policy.trainable().values()),
        "processes": parallel.world(),
        "commit": commit(),
    }


def commit() -> str | None:
    """This code's commit, with -dirty if it was edited; None if that is not known."""
    with suppress(OSError, subprocess.SubprocessError):  # a copy without its history, or no git
        return subprocess.check_output(
            "git describe --always --dirty --abbrev=40 --exclude=*".split(),
            cwd=Path(__file__).parent,
            # not the commit of a repository that this code is installed in
            env=os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(__file__).parents[2])},
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            timeout=10,
        ).strip()


@may_fail()
def open_wandb(cfg, folder: Path):
    """wandb's run for this folder, or None if that failed. It never asks, and never stops a run.

    The folder keeps wandb's id of it, so that a resumed run continues the same curves.
    WANDB_PROJECT, _NAME and _RUN_ID (which a sweep sets) are read here; _ENTITY, _TAGS, _NOTES and
    others by wandb.
    """
    import wandb

    kept = folder / "wandb_id"
    if not kept.exists():
        records.write_whole(kept, os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4))
    # seconds, instead of 15: a killed offline run keeps what led to its checkpoint
    os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "0.1")
    mode = "online" if wandb.login(prompt=False) else "offline"
    mode = os.environ.get("WANDB_MODE") or mode
    # uploads wait in the run folder, and not in the user's home
    os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb"))
    if mode == "offline":
        print(
            f"wandb is offline; later: wandb sync {folder}/wandb/offline-run-*; metrics.jsonl has "
            "the same numbers"
        )
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "picoswarm",
        name=os.environ.get("WANDB_NAME") or folder.name,
        dir=str(folder),
        mode=mode,
        id=kept.read_text(encoding="utf-8"),
        resume="allow",
        config=asdict(cfg),
        settings=wandb.Settings(silent=True, console="off"),
    )
    # wandb may renumber its own steps when a resumed run is synced
    run.define_metric("*", step_metric="update")
    run.define_metric("sft/loss", step_metric="sft/step")
    if mode == "online":
        print(f"wandb: {run.url}")
    return run


@may_fail()
def log_wandb(run, line: dict, rows: int = 0) -> None:
    """A row of wandb's, if there is a run of it.

    A curve's step is the update; SFT's rows stand before the first one.
    """
    if run:
        run.log(line, step=rows + line["update"])


@may_fail()
def finish_wandb(run, folder: Path, about: dict) -> None:
    """The final numbers, and the report, which has the episodes, as an artifact."""
    run.log_artifact(str(folder / "report.html"), name=f"report-{run.id}", type="report")
    run.summary.update(
        {
            name: about[name]
            for name in ("eval", "gain", "gain_reward", "seconds", "tokens", "peak_rss_gb")
            if name in about
        }
    )
    run.finish()


# ------------------------------------------------------------- is there a signal in a batch?


def signal_verdict(groups: list[list[Episode]]) -> str:
    """Does GRPO have something to learn from a batch [G][k]?"""
    played = without_failed(groups)
    signal = sum(any(any(e.advantages) for e in g) for g in played)
    now = f"{signal} of {len(played)} groups have a signal"
    if signal >= doctor.FEW * len(played):
        return f"{now}: GRPO has something to learn from"
    if np.mean([e.reward for g in played for e in g]) > 0.9:
        return f"{now}, and the tasks are solved: give it harder ones"
    cure = doctor.cure("few groups", doctor.OURS)
    return f"{now}: GRPO will hardly move; try {cure}"


def reading_guide(cfg: Config) -> str:
    """To print before the first update: how to read the lines of the log."""
    return (
        f"{healthy(cfg)}; …s + …s are the times to sample and to train\n"
        "signal, entropy and the other words: learn/glossary.md"
    )


def healthy(cfg: Config) -> str:
    """Which ratio and loss are healthy."""
    if is_stale(cfg):
        return "the ratio leaves 1.000 here: watch the reward, clip_fraction and approx_kl"
    if cfg.teacher:
        return "a ratio of 1.000 is healthy, and a falling loss: it estimates the KL to the teacher"
    fresh = not cfg.async_rollouts and cfg.sync_every == 1
    compared = cfg.loss in ("grpo", "gspo") and cfg.baseline in ("group", "batch")
    if fresh and compared and not cfg.kl:
        return "a loss near 0 and a ratio of 1.000 are healthy on-policy; watch the reward"
    # dr_grpo and dapo weight by length, old samples by --importance; the value of a log-prob is
    # nowhere near 0, nor is a KL term
    return "a ratio of 1.000 is healthy on-policy, any loss is; watch the reward"


def passes_of_sft(found: dict, cfg: Config) -> str:
    """How often SFT saw each demonstration, and whether that is much. found: what sft() returns."""
    n = max(1, found["demonstrations"])
    passes = cfg.sft_steps * cfg.sft_batch / n
    many = ": it may know them by heart; lower --sft-steps" if passes > MANY_PASSES else ""
    return f"SFT         {passes:.1f} passes over {n} demonstrations{many}"


def probe_report(groups: list[list[Episode]], cfg: Config) -> list[str]:
    """What GRPO could learn from a batch [G][k], in a few lines, the verdict last."""
    played = without_failed(groups)
    episodes = [e for g in played for e in g]
    right = [[e.components.get("exact", e.reward) == 1 for e in g] for g in played]
    lengths = [e.reply_tokens for e in episodes]
    line = summarize(groups)
    different = [len({tuple(e.token_ids) for e in g}) for g in played]
    texts = (m["content"] for m in episodes[0].messages if m["role"] == "assistant")
    reply = next(texts, "")[-200:]
    return [
        f"replies     {len(episodes)}, {line.get('format', 1):.0%} in the right format",
        f"length      {line['reply_tokens']:.0f} tokens, at most {max(lengths)}; "
        f"{line['truncated']:.0%} are cut at --max-tokens {cfg.max_tokens}",
        f"different   {np.mean(different):.1f} of {cfg.k} replies to a task",
        f"reward      {metrics.mean([np.mean([e.reward for e in g]) for g in played])}",
        f"pass@1      {metrics.mean([np.mean(g) for g in right])} of full marks",
        f"pass@{cfg.k:<7}{metrics.mean([float(any(g)) for g in right])}",
        f"a reply     {reply!r}, reward {episodes[0].reward:g}",
        signal_verdict(groups),
    ]
