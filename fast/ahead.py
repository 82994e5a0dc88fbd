"""Rollouts in turn with training, or ahead of it in a process of their own.

    in turn     | sample 0 | train 0 | sample 1 | train 1 | …     the trainer waits for the samples,
                                                                  the sampler for the weights
    ahead by 1  | sample 0 | sample 1 | sample 2 | sample 3 | …   batch 2 is sampled while batch 1
    trainer                | train 0  | train 1  | train 2  | …   is trained, by weights that are
                                                                  one update old

`InTurn` and `Ahead` have the same four methods (batch, greedy, paused, close): train.py's loop does
not know which of them it has. The price of running ahead: from batch N = --async-rollouts on, every
batch is N updates old when it is trained (Episode.age), and --importance says what is done about it
(fast/batches.py). The lag is always the same, because batch u + N is asked for when update u
begins, whoever is faster: an async run with the same seed gives the same numbers. (After --resume
it does not: the batches that were under way are sampled by the weights of the checkpoint.)

Jobs go to the second process through a pipe, with their weights, and episodes come back through it.
If that process is killed, the pipe ends and so does the run, with one sentence; --resume goes on.

On a GPU the second process holds weights of its own. Nothing is lent between the two, so vLLM's
share of the card has to fit beside the trainer: 94 GiB for Qwen3-4B and the defaults, 68 with
--micro-tokens 4096 (computed). What would not fit is refused.

Run me: `python -m fast.ahead` plays two batches ahead.
"""

import multiprocessing
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from fast import machine, parallel
from fast.machine import CannotGoOn
from fast.sampler import FastDecoder, TorchSampler
from policy import PlainSampler, Policy, first_line
from rollout import Episode, play

# Where the seconds of an update go. In turn, all but "wait" come one after the other.
SECONDS = ("rollout", "environment", "sync", "wait", "train")


def make_sampler(cfg, policy: Policy):
    """The engine that machine.which names. All have TorchSampler's interface."""
    engine, _ = machine.which(cfg, policy.device)
    if engine == "plain":
        return PlainSampler(policy)
    if engine == "vllm":
        from fast.vllm_engine import VllmSampler

        return VllmSampler(
            policy,
            cfg.vllm_memory,
            seeded=cfg.vllm_seeds,
            sleeps=cfg.vllm_sleep,
            longest=machine.longest(cfg.env, cfg.max_tokens),
        )
    sampler = TorchSampler(policy)
    copies = isinstance(sampler.decoder, FastDecoder)
    if policy.device.type == "cuda" and policy.lora_rank == 0 and copies:
        size = policy.n_parameters * 4 / 2**30
        what = f"a float32 copy of the weights, {size:.1f} GiB more"
        print(f"--lora-rank 0: our sampler holds {what}")
    print(sampler.decoder.why)
    return sampler


# ---------------------------------------------------------------------------------------- in turn


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
        started = time.monotonic()
        self.sampler.sync(update)
        self.seconds["sync"] = time.monotonic() - started
        groups = play_job(self.policy, self.sampler, self.job(update, level), self.seconds)
        started = time.monotonic()
        groups = numbered(parallel.gather(groups))
        if parallel.world() > 1:
            self.seconds["wait"] = time.monotonic() - started
        return groups

    def job(self, update: int, level, version: int = 0) -> Job:
        """This process's share of the batch of an update."""
        cfg, env = self.cfg, partial(self.make_env, level)
        seeds = parallel.share(self.task_seeds(update))
        return Job(env, seeds, cfg.k, cfg.max_tokens, cfg.temperature, cfg.seed, version)

    def greedy(self, make_env: Callable, seeds: list[int], update: int) -> list[list[Episode]]:
        """One episode per seed by the policy as it is now, each token the likeliest."""
        job = Job(make_env, parallel.share(seeds), 1, self.cfg.max_tokens, 0.0, 0, update)
        return parallel.gather(self.play(job))

    def play(self, job: Job) -> list[list[Episode]]:
        self.sampler.sync(job.version)
        return play_job(self.policy, self.sampler, job)

    @contextmanager
    def paused(self):
        """`with rollouts.paused():` the sampler lends its memory to the trainer."""
        with timed_training(self.seconds), self.sampler.asleep():  # falling asleep counts, too
            yield

    def close(self) -> None:
        """Nothing is left running."""


def play_job(policy: Policy, sampler, job: Job, clock: dict | None = None) -> list[list[Episode]]:
    """Play a job with the weights as they are. clock: rollout.play adds its seconds to it.

    An evaluation (temperature 0) of conversations is played so many tasks at a time as the sampler
    can keep the caches of.
    """
    several_turns = getattr(job.make_env(), "max_turns", None) != 1
    most = getattr(sampler, "conversations", None)
    size = most if most and several_turns and job.temperature == 0 else max(1, len(job.seeds))
    how, groups = (job.k, job.max_tokens, job.temperature, job.noise, clock), []
    for first in range(0, len(job.seeds), size):
        groups += play(policy, sampler, job.make_env, job.seeds[first : first + size], *how)
    return groups


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
        machine.give_back_memory()


# ------------------------------------------------------------------------------------------ ahead

# The trainer's `except` knows them.
KINDS = (SystemExit, ValueError, FloatingPointError, CannotGoOn)


def player(pipe, load_policy: Callable, make_sampler: Callable, threads: int) -> None:
    """The second process: play one job after the other, and send what was played, or what failed.

    It ends when the trainer does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends this one
    jobs: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=receive, args=(pipe, jobs), daemon=True).start()
    send = lambda thing: pipe.send_bytes(pickle.dumps(thing))
    with suppress(ConnectionError):  # the trainer is gone
        try:
            policy = load_policy()
            machine.use_cpu(policy.device, threads)
            sampler = make_sampler(policy)
            while (job := jobs.get()) is not None:
                send(play_with_weights(policy, sampler, job))
        except KINDS as error:  # a model, a setting, weights or memory
            send(next(kind for kind in KINDS if isinstance(error, kind))(str(error)))
        except Exception as error:
            text = (
                f"the sampling process cannot go on ({first_line(error)}); "
                "what was saved is kept, mend that and --resume"
            )
            send(CannotGoOn(text))


def receive(pipe, jobs: queue.SimpleQueue) -> None:
    """Take jobs out of the pipe while another is played, so that the trainer need not wait."""
    with suppress(EOFError, OSError):
        while True:
            jobs.put(pickle.loads(pipe.recv_bytes()))
    jobs.put(None)


def play_with_weights(policy: Policy, sampler, job: Job) -> tuple[list, dict[str, float]]:
    """Play a job with its own weights: (groups, seconds by part)."""
    clock, started = {"rollout": 0.0, "environment": 0.0}, time.perf_counter()
    with torch.no_grad():
        for name, p in policy.trainable().items():
            p.copy_(job.weights[name])
    sampler.sync(job.version)
    clock["sync"] = time.perf_counter() - started
    return play_job(policy, sampler, job, clock), clock


class SecondProcess:
    """`ask` for a batch now, `take` it later. `close` it when done."""

    def __init__(self, load_policy: Callable, make_sampler: Callable, threads: int):
        """threads: of the other process."""
        # A forked copy of a torch with threads, or of a CUDA context, does not work.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, load_policy, make_sampler, threads)
        self.process = context.Process(target=player, args=arguments, daemon=True)
        self.process.start()
        theirs.close()  # so that its death ends the pipe
        self.asked: list = []  # tags, in the order asked, of what has not come back yet
        self.played: dict = {}  # {tag: (groups, seconds by part)} of what has, and was not taken

    def ask(self, tag, policy: Policy, job: Job) -> None:
        """Have the job played with the policy's weights as they are now; `tag` names it."""
        job.weights = {name: p.detach().cpu() for name, p in policy.trainable().items()}
        self.asked.append(tag)
        with suppress(OSError):  # it is dead: `take` says so
            self.pipe.send_bytes(pickle.dumps(job))

    def take(self, tag) -> tuple[list[list[Episode]], dict[str, float]]:
        """(groups, seconds by part) of a batch that was asked for; waits for it.

        Raises what the player met: SystemExit, ValueError or FloatingPointError with a sentence
        that says what is wrong, else CannotGoOn.
        """
        while tag not in self.played:
            try:
                result = pickle.loads(self.pipe.recv_bytes())
            except (EOFError, OSError):
                raise CannotGoOn(self.obituary()) from None
            if isinstance(result, BaseException):
                raise result
            self.played[self.asked.pop(0)] = result
        return self.played.pop(tag)

    def obituary(self) -> str:
        self.process.join()
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return (
            f"the sampling process {how}; is there enough memory? What was saved is kept: "
            "go on with --resume, or start again with fewer --num-tasks or without --async-rollouts"
        )

    def close(self) -> None:
        self.pipe.close()  # it ends by itself, unless it is playing
        self.process.join(timeout=1)
        self.process.kill()
        self.process.join()


class Ahead(InTurn):
    """Rollouts that a second process plays, cfg.async_rollouts batches ahead of the trainer."""

    def __init__(
        self, cfg, policy: Policy, second: SecondProcess, make_env: Callable, task_seeds: Callable
    ):
        super().__init__(cfg, policy, None, make_env, task_seeds)
        self.second = second
        self.levels: dict[int, object] = {}  # {update whose batch is under way: its level}
        self.next_batch = None
        most = cfg.max_updates if cfg.until_converged else cfg.updates
        self.last_batch = most - 1

    def batch(self, update: int, level) -> list[list[Episode]]:
        """The groups [num_tasks][k] of an update; asks for the batches up to N updates ahead."""
        started = time.monotonic()
        self.next_batch = update if self.next_batch is None else self.next_batch
        while self.next_batch <= min(update + self.cfg.async_rollouts, self.last_batch):
            self.second.ask(self.next_batch, self.policy, self.job(self.next_batch, level, update))
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

    def play(self, job: Job) -> list[list[Episode]]:
        """It waits behind the batches that were asked for before."""
        self.second.ask("evaluation", self.policy, job)
        return self.second.take("evaluation")[0]

    @contextmanager
    def paused(self):
        """The second process goes on sampling; only the clock is kept."""
        with timed_training(self.seconds):
            yield

    def close(self) -> None:
        self.second.close()


def planned(cfg) -> dict:
    """The settings that the plan of fast/machine.py reads."""
    return {name: getattr(cfg, name) for name in (*machine.DEFAULTS, "max_tokens")}


def check_room_for_two(cfg, policy: Policy) -> None:
    """ValueError if trainer and second process, on one card, take more than it has (computed)."""
    if policy.device.type != "cuda" or policy.name not in machine.SIZES:
        return  # nobody has computed it
    engine, card = machine.which(cfg, policy.device)[0], machine.card_of(policy.device)
    plan = lambda more: machine.plan(policy.name, cfg.env, card, engine, planned(cfg) | more)
    gib = lambda more: plan(more).peak(ahead=True)
    if gib({}) > card.gib:
        fits = next((mend for mend in machine.MENDS if gib(mend) < card.gib), None)
        advice = f"{machine.typed(fits)}, which makes it {gib(fits):.0f}" if fits else "it without"
        raise ValueError(
            f"--async-rollouts {cfg.async_rollouts}: a second process on the same card needs "
            f"weights and a cache of its own, together about {gib({}):.0f} GiB of {card.gib:.0f} "
            f"(computed); try {advice}"
        )


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
    if policy.name not in machine.SIZES:
        return 0.5
    card = machine.card_of(policy.device)
    trainer = machine.plan(policy.name, cfg.env, card, "torch", planned(cfg)).trainer
    return 1 - (trainer + machine.CONTEXT) / card.gib


def open_rollouts(cfg, policy: Policy, load: Callable, make_env: Callable, task_seeds: Callable):
    """Who plays the episodes: this process (InTurn) or, with --async-rollouts, a second (Ahead).

    load() -> the same policy again; make_env(level) -> an environment; task_seeds(update) -> seeds.
    Also sets up torch on a CPU: half of its threads are for a second process.
    """
    threads = machine.cpu_threads(cfg, policy)
    half = max(1, threads // 2)
    machine.use_cpu(policy.device, half if cfg.async_rollouts else threads)
    if cfg.async_rollouts:
        check_room_for_two(cfg, policy)
    print(machine.here(cfg, policy))
    if not cfg.async_rollouts:
        return InTurn(cfg, policy, make_sampler(cfg, policy), make_env, task_seeds)
    second = SecondProcess(load, partial(second_sampler, cfg), half)
    return Ahead(cfg, policy, second, make_env, task_seeds)


if __name__ == "__main__":
    from env_letters import Letters
    from policy import PICO, load_policy

    load = partial(load_policy, str(PICO), 32, 64)
    env = partial(Letters, 6, "binary", True, "states")
    second = SecondProcess(load, TorchSampler, threads=1)
    for batch in range(2):
        second.ask(batch, load(), Job(env, [batch], 8, 320, 1.0, noise=0, version=0))
    for batch in range(2):
        groups, clock = second.take(batch)
        spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in clock.items())
        print(f"batch {batch}: {len(groups[0])} episodes, {spent}")
    second.close()
