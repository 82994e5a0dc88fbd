"""Rollouts in turn with training, or ahead of it in a process of their own.

    in turn     | sample 0 | train 0 | sample 1 | train 1 | …     the trainer waits for the samples,
                                                                  the sampler for the weights
    ahead by 1  | sample 0 | sample 1 | sample 2 | sample 3 | …   batch 2 is sampled while batch 1
    trainer                | train 0  | train 1  | train 2  | …   is trained, by weights that are
                                                                  one update old

`InTurn` and `Ahead` have the same methods: train.py's loop does not know which of them it has. The
price of running ahead: from batch N = --async-rollouts on, every batch is N updates old when it is
trained (Episode.age), and --importance says what is done about it (fast/batches.py). The lag is
always the same, because batch u + N is asked for when update u begins, whoever is faster: an async
run with the same seed gives the same numbers. (After --resume it does not: the batches that were
under way are sampled by the weights of the checkpoint.)

Jobs go to the second process through a pipe, with their weights, and episodes come back through it.
If that process is killed, the pipe ends and so does the run, with one sentence; --resume goes on.
(A pool of the standard library would wait for its batches at Ctrl-C, and outlive a killed trainer.)

On a GPU the second process holds weights of its own. Nothing is lent between the two, so vLLM's
share of the card has to fit beside the trainer: 94 GiB for Qwen3-4B and the defaults, 68 with
--micro-tokens 4096 (computed). What would not fit is refused (fast/machine.py).

Run me: `python -m fast.ahead` plays two batches ahead.
"""

import multiprocessing
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import torch

from fast import machine, parallel
from fast.machine import CannotGoOn
from fast.sampler import TorchSampler
from policy import PlainSampler, Policy
from rollout import Episode, play

# Where the seconds of an update go. In turn, all but "wait" come one after the other.
SECONDS = ("rollout", "environment", "sync", "wait", "train")


def make_sampler(cfg, policy: Policy):
    """The engine that machine.which names. All have TorchSampler's interface."""
    engine, _ = machine.which(cfg, policy.device, policy.n_parameters)
    if engine == "plain":
        return PlainSampler(policy)
    if engine == "vllm":
        from fast.vllm_engine import VllmSampler

        return VllmSampler(
            policy,
            cfg.vllm_memory,
            seeded=cfg.vllm_seeds,
            sleeps=cfg.vllm_sleep,
            longest=machine.conversation(cfg.env, cfg.max_tokens)[0],
        )
    sampler = TorchSampler(policy)
    print(sampler.decoder.why)
    return sampler


class InTurn:
    """Rollouts in the trainer's own process: sample, then train, then sample again.

    After `batch`, `seconds` holds where this update's time went, and `level` the level that was
    played.
    """

    def __init__(self, cfg, policy: Policy, sampler, make_env: Callable, task_seeds: Callable):
        """make_env(level) -> an environment; task_seeds(update) -> the seeds of its tasks."""
        self.cfg, self.policy, self.sampler = cfg, policy, sampler
        self.make_env, self.task_seeds = make_env, task_seeds
        self.seconds: dict[str, float] = {}
        self.asked: dict[int, tuple] = {}  # {update: (its level, a function that gives its batch)}

    def batch(self, update: int, level) -> list[list[Episode]]:
        """The groups [num_tasks][k] of an update; asks for those of the next N updates, too."""
        started = time.monotonic()
        cfg = self.cfg
        end = cfg.max_updates if cfg.until_converged else cfg.updates
        newest = max(self.asked, default=update - 1)
        for number in range(newest + 1, min(update + cfg.async_rollouts + 1, end)):
            env, seeds = partial(self.make_env, level), parallel.share(self.task_seeds(number))
            job = (env, seeds, cfg.k, cfg.max_tokens, cfg.temperature, cfg.seed)
            self.asked[number] = level, self.ask(job, update)
        self.level, answer = self.asked.pop(update)  # a curriculum may have gone up since
        groups, self.seconds = answer()
        answered = time.monotonic()
        groups = parallel.gather(groups)
        if cfg.async_rollouts or parallel.world() > 1:
            self.seconds["wait"] = time.monotonic() - (started if cfg.async_rollouts else answered)
        for number, group in enumerate(groups):  # every process counted its own from 0
            for episode in group:
                episode.group, episode.age = number, update - episode.policy_version
        return groups

    def greedy(self, make_env: Callable, seeds: list[int], update: int) -> list[list[Episode]]:
        """One episode per seed by the policy as it is now, each token the likeliest."""
        return self.once(make_env, seeds, update, 0.0)

    def once(self, make_env: Callable, seeds: list[int], update: int, temperature: float):
        """One episode per seed by the policy as it is now: groups [len(seeds)][1]."""
        job = (make_env, parallel.share(seeds), 1, self.cfg.max_tokens, temperature, 0)
        return parallel.gather(self.ask(job, update)()[0])

    def ask(self, job: tuple, version: int) -> Callable:
        """A function that plays a job when it is called. version: updates the policy has seen.

        It returns (groups, seconds by part).
        """
        return partial(play_job, self.policy, self.sampler, job, version)

    @contextmanager
    def paused(self):
        """`with rollouts.paused():` the sampler lends its memory to the trainer."""
        started = time.monotonic()
        with self.sampler.asleep():  # falling asleep counts, too
            yield
        self.seconds["train"] = time.monotonic() - started
        if sum(self.seconds.values()) > 5:  # it takes 0.08 s: too much for an update of letters
            machine.give_back_memory()

    def close(self) -> None:
        """Nothing is left running."""


def play_job(policy: Policy, sampler, job: tuple, version: int) -> tuple[list, dict[str, float]]:
    """Play a job with the weights as they are: (groups, seconds by part).

    job: what rollout.play takes, from make_env to sample_seed; it is picklable, so with
    functools.partial and not lambda. If conversations have several turns, no more tasks are played
    at a time than the sampler can keep the caches of.
    """
    started = time.monotonic()
    sampler.sync(version)
    synced = time.monotonic()
    make_env, seeds, *how = job
    size = getattr(sampler, "conversations", None)
    if not size or getattr(make_env(), "max_turns", None) == 1:
        size = max(1, len(seeds))  # all of them
    sampler.seconds, groups = 0.0, []  # in which it samples: sample_each counts them
    for first in range(0, len(seeds), size):
        groups += play(policy, sampler, make_env, seeds[first : first + size], *how)
    environment = time.monotonic() - synced - sampler.seconds
    seconds = {"rollout": sampler.seconds, "environment": environment, "sync": synced - started}
    return groups, dict.fromkeys(SECONDS, 0.0) | seconds


# ------------------------------------------------------------------------------------------ ahead


def player(pipe, load_policy: Callable, make_sampler: Callable, threads: int) -> None:
    """The second process: play one job after the other, and send what was played, or what failed.

    It ends when the trainer does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends this one
    with suppress(ConnectionError):  # the trainer is gone
        try:
            policy = load_policy()
            machine.use_cpu(policy.device, threads)
            sampler = make_sampler(policy)
            if policy.device.type == "cuda" and isinstance(sampler, TorchSampler):
                # It decodes as many rows as there is memory for, and takes fewer if there is none.
                # A trainer cannot, so half of the card is its own. vLLM has a share as it is.
                torch.cuda.set_per_process_memory_fraction(0.5, policy.device.index)
            while True:
                weights, job, version = pipe.recv()
                with torch.no_grad():
                    for name, p in policy.trainable().items():
                        p.copy_(torch.from_numpy(weights[name]))
                pipe.send(play_job(policy, sampler, job, version))
        except (Exception, SystemExit) as error:
            error.add_note(traceback.format_exc())  # it is raised over there
            pipe.send(error)


class SecondProcess:
    """Plays in a process of its own. `ask` for a batch now, call the answer later; `close` it."""

    asleep = nullcontext  # it goes on sampling while the trainer works

    def __init__(self, load_policy: Callable, make_sampler: Callable, threads: int):
        """threads: of the other process."""
        # A forked copy of a torch with threads, or of a CUDA context, does not work.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, load_policy, make_sampler, threads)
        self.process = context.Process(target=player, args=arguments, daemon=True)
        self.process.start()
        theirs.close()  # so that its death ends the pipe
        self.jobs = queue.SimpleQueue()
        threading.Thread(target=self.converse, daemon=True).start()

    def ask(self, policy: Policy, job: tuple, version: int) -> Callable:
        """Have the job played with the policy's weights as they are now.

        Returns a function that waits for (groups, seconds by part). It raises what the player met,
        or CannotGoOn if the player is dead.
        """
        # Copies, and no tensors: torch would send those through /dev/shm, which may be small.
        weights = {name: p.detach().cpu().numpy().copy() for name, p in policy.trainable().items()}
        answer = Future()
        self.jobs.put((answer, (weights, job, version)))
        return answer.result

    def converse(self) -> None:
        """Hand over one job after the other, in a thread: the trainer need not wait."""
        while True:
            answer, job = self.jobs.get()
            try:
                self.pipe.send(job)
                found = self.pipe.recv()
            except Exception as error:  # EOFError or OSError: nobody is at the other end
                self.process.join(timeout=1)
                how = f"{type(error).__name__}, exit code {self.process.exitcode}"
                found = CannotGoOn(
                    f"the sampling process was killed or cannot be reached ({how}); is there "
                    "enough memory? What was saved is kept: go on with --resume, or start again "
                    "with fewer --num-tasks or without --async-rollouts"
                )
            if isinstance(found, BaseException):
                answer.set_exception(found)
            else:
                answer.set_result(found)

    def close(self) -> None:
        self.pipe.close()  # it ends by itself, unless it is playing
        self.process.join(timeout=1)
        self.process.kill()
        self.process.join()


class Ahead(InTurn):
    """Rollouts that a SecondProcess plays ahead of the trainer; it is this one's `sampler`."""

    def ask(self, job: tuple, version: int) -> Callable:
        """As above, but the job is played now, after those that were asked for before."""
        return self.sampler.ask(self.policy, job, version)

    def close(self) -> None:
        self.sampler.close()


def open_rollouts(cfg, policy: Policy, load=None, make_env=None, task_seeds=None):
    """Who plays the episodes: this process (InTurn) or, with --async-rollouts, a second (Ahead).

    load() -> the same policy again; make_env(level) -> an environment; task_seeds(update) -> seeds;
    evaluations need none of them. Also sets up torch on a CPU: half of its threads are for a second
    process.
    """
    processes = 2 if cfg.async_rollouts else 1
    threads = max(1, machine.cpu_threads(cfg, policy) // processes)
    machine.use_cpu(policy.device, threads)
    print(machine.here(cfg, policy))
    if cfg.async_rollouts:
        second = SecondProcess(load, partial(make_sampler, cfg), threads)
        return Ahead(cfg, policy, second, make_env, task_seeds)
    return InTurn(cfg, policy, make_sampler(cfg, policy), make_env, task_seeds)


if __name__ == "__main__":
    from env_letters import Letters
    from policy import PICO, load_policy

    load = partial(load_policy, str(PICO), 32, 64)
    env, policy = partial(Letters, 6, "binary", True, "states"), load()
    second = SecondProcess(load, TorchSampler, threads=1)
    asked = [second.ask(policy, (env, [seed], 8, 320, 1.0, 0), version=0) for seed in (0, 1)]
    for answer in asked:
        groups, seconds = answer()
        print(f"{len(groups[0])} episodes, {seconds['rollout']:.2f} s of sampling")
    second.close()
