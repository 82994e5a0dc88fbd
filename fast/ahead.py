"""Rollouts in turn with training, or ahead of it in a process of their own.

    in turn     | sample 0 | train 0 | sample 1 | train 1 | …     the trainer waits for the samples,
                                                                  the sampler for the weights
    ahead by 1  | sample 0 | sample 1 | sample 2 | sample 3 | …   batch 2 is sampled while batch 1
    trainer                | train 0  | train 1  | train 2  | …   is trained, by weights that are
                                                                  one update old

`SyncCollector`, `AsyncCollector` and `FreeCollector` have the same methods, so the loop in
train.py does not know which one it has. Running ahead has a price: from batch N = --async-rollouts
on, every batch is N updates old when it is trained on (Episode.age). --importance corrects for that
(grpo.py). The lag does not depend on which process is faster, because batch u + N is requested when
update u begins. So an async run with the same seed gives the same numbers. (Not after --resume: the
batches that were under way are then sampled with the weights of the checkpoint.)

With --max-staleness N the lag is what speed makes it, as in larger systems (FreeCollector): the
second process never waits. If the trainer is the slower one, finished batches queue up, and the
oldest, which is trained on next, gets older and older. What is more than N updates old is dropped.

    sampler     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | …   batch 4 begins while batch 1 is trained,
    trainer         | train 0 | train 1 | train 2 | …     with the weights of one update; when its
                                                          turn comes, they are three updates old

Only the age is bounded, never the queue: a bounded queue would make the sampler wait, and the lag
would again be a constant that somebody chose. Which weights a batch meets depends on the clock, so
such a run cannot be repeated to the bit.

Jobs and weights go to the second process through a pipe, and episodes come back through it. If that
process is killed, the pipe closes and the run stops with one sentence; --resume continues it. (A
pool of the standard library would wait for its batches at Ctrl-C, and outlive a killed trainer.)

On a GPU the second process holds its own copy of the weights. Neither process lends the other
memory, so vLLM's share of the card has to fit next to the trainer: with a share of 0.3, 94 GiB for
Qwen3-4B and the defaults, 68 with --micro-tokens 4096 (computed).
"""

import gc
import multiprocessing
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, partialmethod

import torch

from fast import machine, parallel
from fast.machine import CannotGoOn
from fast.sampler import PlainDecoder, TorchSampler
from policy import PlainSampler, Policy, copy_weights, with_weights
from rollout import Episode, play

# Where the seconds of an update go. In turn, all of them but "wait" follow each other.
SECONDS = ("rollout", "environment", "sync", "wait", "sleep", "train")


def make_sampler(cfg, policy: Policy):
    """The engine that machine.which chooses. All have TorchSampler's interface.

    If --engine auto chose vLLM and that cannot start, our own sampler takes its place.
    """
    engine, _ = machine.which(cfg, policy.device, policy.n_parameters)
    if engine == "plain":
        return PlainSampler(policy)
    if engine == "vllm":
        try:
            return start_vllm(cfg, policy)
        except CannotGoOn as error:
            if cfg.engine == "vllm":
                raise SystemExit(f"--engine vllm: {error}; else take --engine torch") from error
            print(f"our own sampler takes vLLM's place: {error}")
        gc.collect()  # what vLLM had loaded, now that the error no longer holds it
    sampler = TorchSampler(policy)
    if isinstance(sampler.decoder, PlainDecoder):
        print(f"{policy.name} is sampled many times slower than a Llama or a Qwen3 of its size")
    return sampler


def start_vllm(cfg, policy: Policy):
    """vLLM's sampler; CannotGoOn with one sentence if it cannot start."""
    from fast.vllm_engine import VllmSampler, vllm_share

    share, lends = 0.0, False  # on a CPU it takes none
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(policy.device))
        share, lends = vllm_share(cfg, policy, free, total)
        print(
            f"vLLM gets {share:.0%} of the card{', lent to the trainer in turn' * lends} "
            "(computed); it loads the weights, compiles and captures CUDA graphs, which takes "
            "minutes, most the first time (--vllm-eager compiles nothing; VLLM_LOGGING_LEVEL=INFO "
            "shows what it does)",
            flush=True,
        )
    return VllmSampler(
        policy,
        share,
        seeded=cfg.vllm_seeds,
        sleeps=lends,
        longest=machine.room_for_talk(cfg),
        eager=cfg.vllm_eager,
    )


class SyncCollector:
    """Collects rollouts in the trainer's own process: sample, then train, then sample again.

    After `collect`, `seconds` says where this update's time went, and `level` which level was
    played.
    """

    def __init__(self, cfg, policy: Policy, sampler, make_env: Callable, task_seeds: Callable):
        """make_env(level) -> an environment; task_seeds(update) -> the seeds of its tasks."""
        self.cfg, self.policy, self.sampler = cfg, policy, sampler
        self.make_env, self.task_seeds = make_env, task_seeds
        self.seconds: dict[str, float] = {}
        # Of each batch that was requested: (its level, a function that returns it), oldest first.
        self.requests: list[tuple] = []
        self.weights: dict[str, torch.Tensor] = {}  # with --sync-every: those that sample
        self.begun = 0  # with --max-staleness: the number of the next batch
        self.counts: dict[str, int] = {}  # columns of the log, with --max-staleness

    def collect(self, update: int, level) -> list[list[Episode]]:
        """The groups [num_tasks][k] of an update."""
        groups = parallel.gather(self.next_groups(update, level))
        for number, group in enumerate(groups):  # every process counted its groups from 0
            for episode in group:
                episode.group, episode.age = number, update - episode.policy_version
        return groups

    def next_groups(self, update: int, level) -> list[list[Episode]]:
        """This process's share of them; also requests those of the next N updates."""
        cfg = self.cfg
        end = cfg.max_updates if cfg.until_converged else cfg.updates
        for number in range(update + len(self.requests), min(update + cfg.async_rollouts + 1, end)):
            answer = self.ask(self.job(number, level), update - update % cfg.sync_every)
            self.requests.append((level, answer))
        self.level, answer = self.requests.pop(0)  # the curriculum may have moved up since
        if cfg.sync_every > 1 and update % cfg.sync_every == 0:
            self.weights = copy_weights(self.policy)
        with with_weights(self.policy, self.weights) if self.weights else nullcontext():
            groups, self.seconds = answer()
        return groups

    def job(self, number: int, level) -> tuple:
        """What play_job is given for this process's share of batch `number`."""
        return (
            partial(self.make_env, level),
            parallel.shard(self.task_seeds(number)),
            self.cfg.k,
            self.cfg.max_tokens,
            self.cfg.temperature,
            self.cfg.seed,
        )

    def once(self, make_env: Callable, seeds: list[int], update: int, temperature: float):
        """One episode per seed by the current policy: groups [len(seeds)][1]."""
        job = (make_env, parallel.shard(seeds), 1, self.cfg.max_tokens, temperature, 0)
        return parallel.gather(self.ask(job, update)()[0])

    greedy = partialmethod(once, temperature=0.0)  # always with the likeliest token

    def ask(self, job: tuple, version: int) -> Callable:
        """Return a function that plays the job when called, and returns (groups, seconds by part).

        version: how many updates the policy has had.
        """
        return partial(play_job, self.policy, self.sampler, job, version)

    @contextmanager
    def paused(self):
        """`with collector.paused():` the sampler lends its memory to the trainer."""
        started = time.monotonic()
        with self.sampler.asleep():
            asleep = time.monotonic()
            yield
            self.seconds["train"] = time.monotonic() - asleep
        self.seconds["sleep"] = time.monotonic() - started - self.seconds["train"]

    def close(self) -> None:
        """End what samples: vLLM, which holds a process group, or the second process."""
        if hasattr(self.sampler, "close"):  # our own samplers have nothing to end
            self.sampler.close()


def play_job(policy: Policy, sampler, job: tuple, version: int) -> tuple[list, dict[str, float]]:
    """Play a job with the current weights -> (groups, seconds by part).

    job: the arguments of rollout.play, from make_env to sample_seed. It has to be picklable, so use
    functools.partial and not lambda.
    """
    started = time.monotonic()
    sampler.sync(version)
    synced = time.monotonic()
    timed = Timed(sampler)
    groups = play(policy, timed, *job)
    return groups, dict.fromkeys(SECONDS, 0.0) | {
        "rollout": timed.seconds,
        "environment": time.monotonic() - synced - timed.seconds,
        "sync": synced - started,
    }


class Timed:
    """A sampler, with the seconds that it samples for."""

    def __init__(self, sampler):
        self.sampler, self.seconds = sampler, 0.0

    def __getattr__(self, name: str):
        return getattr(self.sampler, name)  # version, max_len

    def sample(self, *prompts, **how):
        started = time.monotonic()
        samples = self.sampler.sample(*prompts, **how)
        self.seconds += time.monotonic() - started
        return samples


# ------------------------------------------------------------------------------------------ ahead


def player(pipe, load_policy: Callable, make_sampler: Callable, threads: int) -> None:
    """The second process: play one job after another, and send back the result or the error.

    It ends when the trainer does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends this one
    with suppress(ConnectionError):  # the trainer is gone
        try:
            policy = load_policy()
            machine.use_cpu(policy.device, threads)
            sampler = make_sampler(policy)
            if policy.device.type == "cuda" and isinstance(sampler, TorchSampler):
                # The sampler takes what memory there is, and decodes fewer rows if it runs out.
                # The trainer cannot, so it gets half of the card. vLLM has its own share anyway.
                torch.cuda.set_per_process_memory_fraction(0.5, policy.device.index)
            while True:
                weights, job, version = pipe.recv()
                with torch.no_grad():
                    for name, p in policy.trainable().items():
                        p.copy_(torch.from_numpy(weights[name]))
                pipe.send(play_job(policy, sampler, job, version))
        except (Exception, SystemExit) as error:
            error.add_note(traceback.format_exc())  # it is raised in the trainer
            pipe.send(error)


class SecondProcess:
    """Plays in its own process. `ask` for a batch now, take the result later; `close` it."""

    asleep = nullcontext  # it keeps sampling while the trainer works

    def __init__(self, load_policy: Callable, make_sampler: Callable, threads: int):
        """threads: for the other process."""
        # Not fork: a copy of torch's threads or of a CUDA context does not work.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=player, args=(theirs, load_policy, make_sampler, threads), daemon=True
        )
        self.process.start()
        theirs.close()  # so that the pipe closes if the process dies
        self.jobs = queue.SimpleQueue()
        threading.Thread(target=self.converse, daemon=True).start()

    def ask(self, weights: dict, job: tuple, version: int) -> Future:
        """Have the job played with these weights (weights_of), after those before it.

        The result is (groups, seconds by part). It raises the player's error, or CannotGoOn if the
        player is dead.
        """
        answer = Future()
        self.jobs.put((answer, (weights, job, version)))
        return answer

    def converse(self) -> None:
        """Hand over one job after another, in a thread, so that the trainer need not wait."""
        while True:
            answer, job = self.jobs.get()
            try:
                self.pipe.send(job)
                found = self.pipe.recv()
            except Exception as error:  # EOFError or OSError: the other end is gone
                self.process.join(timeout=1)
                found = CannotGoOn(
                    "the sampling process was killed or cannot be reached "
                    f"({type(error).__name__}, exit code {self.process.exitcode}); is there enough "
                    "memory? What was saved is kept: go on with --resume, or start again with "
                    "fewer --num-tasks or without --async-rollouts"
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


def weights_of(policy: Policy) -> dict:
    """What a SecondProcess samples with: a copy of what learns.

    In NumPy, because torch sends tensors through /dev/shm, which may be small.
    """
    return {name: p.detach().cpu().numpy().copy() for name, p in policy.trainable().items()}


class AsyncCollector(SyncCollector):
    """Collects what a SecondProcess plays ahead of the trainer; `sampler` is that process."""

    def ask(self, job: tuple, version: int) -> Callable:
        """As above, but the job starts now, in the second process, after those before it."""
        return self.sampler.ask(weights_of(self.policy), job, version).result

    def collect(self, update: int, level) -> list[list[Episode]]:
        """As above; also measures how long the trainer waits for it."""
        started = time.monotonic()
        groups = super().collect(update, level)
        self.seconds["wait"] = time.monotonic() - started
        return groups


class FreeCollector(AsyncCollector):
    """Collects rollouts whose lag is what speed makes it, with --max-staleness.

    The second process plays one batch after the other, each with the weights that are the newest
    when it begins. The trainer takes the oldest batch that is young enough, and drops those before
    it: their tasks are not played again. A resumed run has lost its queue, and plays those anew.
    """

    def next_groups(self, update: int, level) -> list[list[Episode]]:
        self.newest = weights_of(self.policy), level, update
        if not self.counts:
            self.requests = queue.SimpleQueue()  # of those begun, finished or not
            self.begin()
        ages = []
        while not ages or ages[-1] > self.cfg.max_staleness:
            self.level, version, answer = self.requests.get()
            groups, self.seconds = answer.result()
            ages.append(update - version)
        self.counts = {"batches_dropped": len(ages) - 1, "batches_waiting": self.requests.qsize()}
        return groups

    def begin(self, before: Future | None = None) -> None:
        """Begin a batch, and the next one when it is done; not after one that failed."""
        if before and before.exception():
            return  # next_groups raises it
        weights, level, update = self.newest
        answer = self.sampler.ask(weights, self.job(self.begun, level), update)
        self.begun += 1
        self.requests.put((level, update, answer))
        answer.add_done_callback(self.begin)


def open_collector(cfg, policy: Policy, load=None, make_env=None, task_seeds=None):
    """What collects the episodes: this process or, with --async-rollouts, a second one.

    load() -> another copy of the policy; make_env(level) -> an environment; task_seeds(update) ->
    seeds; evaluations need none of these. Also sets torch's CPU threads: a second process gets half
    of them.
    """
    threads = max(1, machine.cpu_threads(cfg, policy) // (2 if cfg.async_rollouts else 1))
    machine.use_cpu(policy.device, threads)
    print(machine.here(cfg, policy))
    if cfg.async_rollouts:
        second = SecondProcess(load, partial(make_sampler, cfg), threads)
        kind = FreeCollector if cfg.max_staleness else AsyncCollector
        return kind(cfg, policy, second, make_env, task_seeds)
    return SyncCollector(cfg, policy, make_sampler(cfg, policy), make_env, task_seeds)
