"""Rollouts in turn with training, or ahead of it in a process of their own.

    in turn     | sample 0 | train 0 | sample 1 | train 1 | …     the trainer waits for the samples,
                                                                  the sampler for the weights
    ahead by 1  | sample 0 | sample 1 | sample 2 | sample 3 | …   batch 2 is sampled while batch 1
    trainer                | train 0  | train 1  | train 2  | …   is trained, by weights that are
                                                                  one update old

`InTurn` and `Ahead` have the same four methods (batch, greedy, paused, close): train.py's loop does
not know which of them it has. The price of running ahead: from batch N = --async-rollouts on, every
batch is N updates old when it is trained (Episode.age), and --importance says what is done about it
(fast/off_policy.py). The lag is always the same, because batch u + N is asked for when update u
begins, whoever is faster: an async run with the same seed gives the same numbers. (After --resume
it does not: the batches that were under way are sampled by the weights of the checkpoint.)

A job, and what was played, travel as files, in memory if there is room; the pipe carries only their
names. So a message never fills the pipe, and a process that is killed in the middle of one leaves
nothing half read. It is started again and given its open jobs, and plays the very same episodes.

On a GPU the second process holds weights of its own. Nothing is lent between the two, so vLLM's
share of the card has to fit beside the trainer: 94 GiB for Qwen3-4B and the defaults, 68 with
--micro-tokens 4096 (computed). What would not fit is refused.

Run me: `python -m fast.ahead` plays three batches ahead, and kills the second process on the way.
"""

import multiprocessing
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from fast import parallel
from fast.engine import cpu_threads, here, make_sampler
from fast.memory import CannotGoOn, give_back_memory, memory_folder, sweep
from fast.plan import (
    CONTEXT,
    DEFAULTS,
    MENDS,
    SIZES,
    card_memory,
    engine_of,
    needed,
    training,
    typed,
)
from fast.sampler import TorchSampler
from policy import Policy, first_line
from rollout import Episode, play

# Where the seconds of an update go. In turn, all but "wait" come one after the other.
SECONDS = ("rollout", "environment", "sync", "wait", "train")
RESTARTS = 3  # of a process that was killed; more, and another try does not mend what is wrong


# ---------------------------------------------------------------------------------------- in turn


class InTurn:
    """Rollouts in the trainer's own process: sample, then train, then sample again.

    `Ahead`, below, has the same four methods, for --async-rollouts. After `batch`,
    `seconds` holds where this update's time went, and `level` the level that was played.
    """

    def __init__(self, cfg, policy: Policy, sampler, make_env: Callable, task_seeds: Callable):
        """make_env(level) -> an environment; task_seeds(update) -> the seeds of its tasks."""
        self.cfg, self.policy, self.sampler = cfg, policy, sampler
        self.make_env, self.task_seeds = make_env, task_seeds
        self.seconds = dict.fromkeys(SECONDS, 0.0)

    def batch(self, update: int, level) -> list[list[Episode]]:
        """The groups [num_tasks][k] of an update, played by the policy as it is now."""
        self.seconds, self.level = dict.fromkeys(SECONDS, 0.0), level
        cfg, started = self.cfg, time.monotonic()
        self.sampler.sync(update)
        self.seconds["sync"] = time.monotonic() - started
        seeds = parallel.share(self.task_seeds(update))
        groups = play(
            self.policy, self.sampler, lambda: self.make_env(level), seeds, cfg.k,
            cfg.max_tokens, cfg.temperature, cfg.seed, self.seconds,
        )  # fmt: skip
        started = time.monotonic()
        groups = numbered(parallel.gather(groups))
        if parallel.world() > 1:
            self.seconds["wait"] = time.monotonic() - started
        return groups

    def greedy(self, make_env: Callable, seeds: list[int], update: int) -> list[list[Episode]]:
        """One episode per seed by the policy as it is now, each token the likeliest."""
        self.sampler.sync(update)
        mine = parallel.share(seeds)
        max_tokens = self.cfg.max_tokens
        job = Job(make_env, mine, 1, max_tokens, 0.0, noise=0, version=update)
        return parallel.gather(in_slices(self.policy, self.sampler, job))

    @contextmanager
    def paused(self):
        """`with rollouts.paused():` the sampler lends its memory to the trainer."""
        with timed_training(self.seconds), self.sampler.asleep():  # falling asleep counts, too
            yield

    def close(self) -> None:
        """Nothing is left running."""


def numbered(groups: list[list[Episode]]) -> list[list[Episode]]:
    """Groups with their numbers in the whole batch: every process counted its own from 0."""
    for number, group in enumerate(groups):
        for episode in group:
            episode.group = number
    return groups


@contextmanager
def timed_training(seconds: dict[str, float]):
    """Clock the training step, and return freed memory to the system after a long update."""
    started = time.monotonic()
    yield
    seconds["train"] = time.monotonic() - started
    if sum(seconds.values()) > 10:  # it takes 0.08 s: too much for an update of letters
        give_back_memory()


# ------------------------------------------------------------------------------------------ ahead


@dataclass
class Job:
    """What to play. Whatever is in it has to be picklable: functools.partial, not lambda."""

    make_env: Callable[[], object]
    seeds: list[int]  # of the tasks
    k: int
    max_tokens: int  # of one turn
    temperature: float
    noise: int  # seeds the sampling (rollout.play)
    version: int  # how many updates the weights have seen
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # what learns, on the CPU


# The trainer's `except` knows them.
KINDS = (SystemExit, ValueError, FloatingPointError, CannotGoOn)


def player(pipe, home: str, load_policy: Callable, make_sampler: Callable, threads: int) -> None:
    """The second process: receive the name of a job, play it, write the result, say so.

    It ends when the trainer does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends this one
    torch.set_num_threads(threads)
    try:
        policy = load_policy()
        sampler = make_sampler(policy)
        while True:
            file = Path(pipe.recv())
            result = play_job(policy, sampler, pickle.loads(file.read_bytes()))
            new = file.with_suffix(".new")
            new.write_bytes(pickle.dumps(result))
            new.rename(file.with_suffix(".played"))  # whole or not at all
            pipe.send(None)
    except (EOFError, ConnectionError):  # the trainer is gone; a killed one has left its folder
        shutil.rmtree(home, ignore_errors=True)
    except KINDS as error:  # a model, a setting, weights or memory
        complain(pipe, next(kind for kind in KINDS if isinstance(error, kind)), str(error))
    except Exception as error:
        text = (
            f"the sampling process cannot go on ({first_line(error)}); "
            "what was saved is kept, mend that and --resume"
        )
        complain(pipe, CannotGoOn, text)


def in_slices(policy: Policy, sampler, job: Job) -> list[list[Episode]]:
    """Play an evaluation, so many tasks at a time as the sampler can keep the conversations of."""
    several_turns = getattr(job.make_env(), "max_turns", None) != 1
    most = getattr(sampler, "conversations", None) if several_turns else None
    size, groups = most or max(1, len(job.seeds)), []
    for first in range(0, len(job.seeds), size):
        some = job.seeds[first : first + size]
        groups += play(
            policy, sampler, job.make_env, some, job.k, job.max_tokens, job.temperature, job.noise
        )
    return groups


def play_job(policy: Policy, sampler, job: Job) -> tuple[list[list[Episode]], dict[str, float]]:
    """Play a job with its own weights: (groups, seconds by part)."""
    clock, started = {"rollout": 0.0, "environment": 0.0}, time.perf_counter()
    with torch.no_grad():
        for name, p in policy.trainable().items():
            p.copy_(job.weights[name])
    sampler.sync(job.version)
    clock["sync"] = time.perf_counter() - started
    if job.temperature == 0:  # an evaluation
        return in_slices(policy, sampler, job), clock
    groups = play(
        policy, sampler, job.make_env, job.seeds, job.k,
        job.max_tokens, job.temperature, job.noise, clock,
    )  # fmt: skip
    return groups, clock


def complain(pipe, kind: type, text: str) -> None:
    """Have the trainer raise kind(text), if it is still there."""
    with suppress(ConnectionError):
        pipe.send((kind, text))


class SecondProcess:
    """`ask` for a batch now, `take` it later, in the same order. `close` it when done."""

    def __init__(
        self, load_policy: Callable, make_sampler: Callable, threads: int, needed: int = 0
    ):
        """threads: of the other process. needed: bytes that the open jobs take; they go to disk if
        there is not so much memory to spare."""
        self.arguments = (load_policy, make_sampler, threads)
        self.home = memory_folder(needed)
        self.open: dict[object, Path] = {}  # {tag: file of its job}, in the order asked
        self.asked, self.starts = 0, 0
        self.start()

    def start(self) -> None:
        # A forked copy of a torch with threads, or of a CUDA context, does not work.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=player, args=(theirs, self.home.name, *self.arguments), daemon=True
        )
        self.process.start()
        theirs.close()  # so that its death closes the pipe
        self.starts += 1
        for file in self.open.values():
            if not file.with_suffix(".played").exists():
                self.send(file)

    def send(self, file: Path) -> None:
        try:
            self.pipe.send(str(file))
        except OSError:
            pass  # it is dead; take() notices, starts another, and that one gets all open jobs

    def ask(self, tag, policy: Policy, job: Job) -> None:
        """Have the job played with the policy's weights as they are now; `tag` names it."""
        job.weights = {name: p.detach().cpu() for name, p in policy.trainable().items()}
        file = Path(self.home.name) / f"{self.asked}.job"
        self.asked += 1
        file.write_bytes(pickle.dumps(job))
        self.open[tag] = file
        self.send(file)

    def take(self, tag) -> tuple[list[list[Episode]], dict[str, float]]:
        """(groups, seconds by part) of a batch that was asked for; waits for it.

        Raises what the player met: SystemExit, ValueError or FloatingPointError with a sentence
        that says what is wrong, else CannotGoOn.
        """
        file = self.open[tag]
        played = file.with_suffix(".played")
        while not played.exists():
            try:
                trouble = self.pipe.recv()
            except (EOFError, OSError):
                self.restart()
                continue
            if trouble:
                raise trouble[0](trouble[1])
        groups, clock = pickle.loads(played.read_bytes())
        file.unlink()
        played.unlink()
        del self.open[tag]
        return groups, clock

    def play(self, policy: Policy, job: Job) -> list[list[Episode]]:
        """Ask and take at once; it waits behind the batches that were asked for before."""
        self.ask("now", policy, job)
        return self.take("now")[0]

    def restart(self) -> None:
        """Start another process after one that died. CannotGoOn after RESTARTS of them."""
        self.process.join()
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if self.starts > RESTARTS:
            raise CannotGoOn(
                f"the sampling process {how} for the {self.starts}th time; is there enough memory? "
                "What was saved is kept; --resume it, or start again with fewer --num-tasks "
                "or without --async-rollouts"
            )
        again = f"it is started again and plays its {len(self.open)} open batches anew"
        print(f"the sampling process {how}; {again}", flush=True)
        self.start()

    def close(self) -> None:
        self.pipe.close()  # it ends by itself, unless it is playing
        self.process.join(timeout=1)
        self.process.kill()
        self.process.join()
        self.home.cleanup()
        sweep()  # what the player could not


class Ahead:
    """Rollouts that a second process plays, cfg.async_rollouts batches ahead of the trainer."""

    def __init__(
        self, cfg, policy: Policy, second: SecondProcess, make_env: Callable, task_seeds: Callable
    ):
        """make_env(level) -> an environment; task_seeds(update) -> the seeds of its tasks."""
        self.cfg, self.policy, self.second = cfg, policy, second
        self.make_env, self.task_seeds = make_env, task_seeds
        self.seconds = dict.fromkeys(SECONDS, 0.0)
        self.levels: dict[int, object] = {}  # {update whose batch is under way: its level}
        self.next_batch = None
        most = cfg.max_updates if cfg.until_converged else cfg.updates
        self.last_batch = most - 1

    def batch(self, update: int, level) -> list[list[Episode]]:
        """The groups [num_tasks][k] of an update; asks for the batches up to N updates ahead."""
        cfg, started = self.cfg, time.monotonic()
        self.next_batch = update if self.next_batch is None else self.next_batch
        while self.next_batch <= min(update + cfg.async_rollouts, self.last_batch):
            job = Job(
                partial(self.make_env, level), parallel.share(self.task_seeds(self.next_batch)),
                cfg.k, cfg.max_tokens, cfg.temperature, cfg.seed, update,
            )  # fmt: skip
            self.second.ask(self.next_batch, self.policy, job)
            self.levels[self.next_batch] = level
            self.next_batch += 1
        groups, spent = self.second.take(update)
        groups = numbered(parallel.gather(groups))
        self.level = self.levels.pop(update)  # a curriculum may have gone up since
        self.seconds = dict.fromkeys(SECONDS, 0.0) | spent
        self.seconds["wait"] = time.monotonic() - started
        for group in groups:
            for e in group:
                e.age = update - e.policy_version
        return groups

    def greedy(self, make_env: Callable, seeds: list[int], update: int) -> list[list[Episode]]:
        """One episode per seed by the policy as it is now, each token the likeliest."""
        job = Job(make_env, parallel.share(seeds), 1, self.cfg.max_tokens, 0.0, 0, update)
        return parallel.gather(self.second.play(self.policy, job))

    @contextmanager
    def paused(self):
        """The second process goes on sampling; only the clock is kept."""
        with timed_training(self.seconds):
            yield

    def close(self) -> None:
        self.second.close()


def check_room_for_two(cfg, policy: Policy) -> None:
    """ValueError if trainer and second process, on one card, take more than it has (computed)."""
    if policy.device.type != "cuda" or policy.name not in SIZES:
        return  # nobody has computed it
    engine = engine_of(policy.device) if cfg.engine == "auto" else cfg.engine
    gib = lambda more: needed(
        policy.name, cfg.env, policy.device, engine, planned(cfg) | more, ahead=True
    )
    card = card_memory(policy.device)
    if gib({}) > card:
        fits = next((mend for mend in MENDS if gib(mend) < card), None)
        advice = f"{typed(fits)}, which makes it {gib(fits):.0f}" if fits else "it without"
        raise ValueError(
            f"--async-rollouts {cfg.async_rollouts}: a second process on the same card needs "
            f"weights and a cache of its own, together about {gib({}):.0f} GiB of {card:.0f} "
            f"(computed); try {advice}"
        )


def planned(cfg) -> dict:
    """The settings that fast/plan.py reads."""
    return {name: getattr(cfg, name) for name in (*DEFAULTS, "max_tokens")}


def second_sampler(cfg, policy: Policy):
    """The sampler of a second process, which leaves the trainer its part of a card.

    Our own decodes as many rows as there is memory for: if none is left it takes fewer. A trainer
    cannot, so without a limit its first update would end the run. vLLM has a share of its own.
    """
    sampler = make_sampler(cfg, policy)
    if policy.device.type == "cuda" and isinstance(sampler, TorchSampler):
        share = second_share(cfg, policy)
        torch.cuda.set_per_process_memory_fraction(share, policy.device.index)
    return sampler


def second_share(cfg, policy: Policy) -> float:
    """The share of the card that trainer and CUDA leave by the plan; half, if there is none."""
    if policy.name not in SIZES:
        return 0.5
    *_, held, update = training(policy.name, cfg.env, policy.device, planned(cfg))
    return 1 - (held + update + CONTEXT) / card_memory(policy.device)


def open_rollouts(cfg, policy: Policy, load: Callable, make_env: Callable, task_seeds: Callable):
    """Who plays the episodes: this process (InTurn) or, with --async-rollouts, a second (Ahead).

    load() -> the same policy again; make_env(level) -> an environment; task_seeds(update) -> seeds.
    Also sets torch's CPU threads: half of them are for a second process.
    """
    threads = cpu_threads(cfg, policy)
    half = max(1, threads // 2)
    torch.set_num_threads(half if cfg.async_rollouts else threads)
    if cfg.async_rollouts:
        check_room_for_two(cfg, policy)
    print(here(cfg, policy))
    if not cfg.async_rollouts:
        return InTurn(cfg, policy, make_sampler(cfg, policy), make_env, task_seeds)
    weights = sum(p.numel() * p.element_size() for p in policy.trainable().values())
    needed = (cfg.async_rollouts + 2) * weights  # every open job carries them
    second = SecondProcess(load, partial(second_sampler, cfg), half, needed)
    return Ahead(cfg, policy, second, make_env, task_seeds)


def demo() -> None:
    """Three batches asked for at once, and a kill after the first."""
    from env_letters import Letters
    from policy import PICO, load_policy

    load = partial(load_policy, str(PICO), 32, 64)
    policy = load()
    second = SecondProcess(load, TorchSampler, threads=1)
    env = partial(Letters, 6, "binary", True, "states")
    for batch in range(3):
        second.ask(
            batch, policy, Job(env, [8 * batch + i for i in range(8)], 8, 320, 1.0, 0, version=0)
        )
    for batch in range(3):
        started = time.perf_counter()
        groups, clock = second.take(batch)
        waited = f"waited {time.perf_counter() - started:.1f} s"
        spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in clock.items())
        print(f"batch {batch}: {sum(map(len, groups))} episodes, {waited}, {spent}")
        if batch == 0:
            second.process.kill()
    second.close()


if __name__ == "__main__":
    demo()
