"""Rollouts that run ahead: the sampler in a process of its own, so that nobody waits.

    in turn       | sample 0 | train 0 | sample 1 | train 1 | …       who trains waits for the samples, who samples for the weights

    ahead by 1    | sample 0 | sample 1 | sample 2 | sample 3 | …     batch 2 is sampled while batch 1 is trained, so by
    trainer                  | train 0  | train 1  | train 2  | …     weights that are one update old

The price: from batch N = --async-rollouts on, every batch is N updates old when it is trained (Episode.policy_version says so), and --importance
(grpo.py) says what is done about it. The lag is always the same, because batch s + N is asked for when update s begins, whoever is faster: so an
async run with the same seed gives the same numbers. (After --resume it does not: the batches that were under way are sampled by the weights of the
checkpoint.)

A job, and what was played, travel as files, in memory where there is room; the pipe carries only their names. So a message never fills the
pipe, and a process that is killed in the middle of one leaves nothing half read. It is started again and given its open jobs, from which it
plays the very same episodes.

On a GPU the second process holds weights of its own. Nothing is lent between the two, so vLLM's share of the card has to fit beside the trainer.

Run me: `python -m fast.ahead` plays three batches ahead, and kills the player on the way.
"""

import multiprocessing
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from bookkeeping.run import memory_folder, sweep
from policy import Policy, first_line
from rollout import Episode, play

RESTARTS = 3  # of a player that was killed; after that something is wrong that another try does not mend


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
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # name: trainable weight, on the CPU


def player(pipe, home: str, load_policy: Callable[[], Policy], make_sampler: Callable[[Policy], object], threads: int) -> None:
    """The other process: take the name of a job, play it, write what was played, say so. Ends when the trainer does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then ends this one
    torch.set_num_threads(threads)
    try:
        policy = load_policy()
        sampler = make_sampler(policy)
        while True:
            file = Path(pipe.recv())
            job = pickle.loads(file.read_bytes())
            clock = {"rollout": 0.0, "environment": 0.0}
            started = time.perf_counter()
            with torch.no_grad():
                for name, p in policy.trainable().items():
                    p.copy_(job.weights[name])
            sampler.sync(job.version)
            clock["sync"] = time.perf_counter() - started
            groups = play(policy, sampler, job.make_env, job.seeds, job.k, job.max_tokens, job.temperature, job.noise, clock)
            new = file.with_suffix(".new")
            new.write_bytes(pickle.dumps((groups, clock)))
            new.rename(file.with_suffix(".played"))  # whole or not at all
            pipe.send(None)
    except (EOFError, ConnectionError):  # the trainer is gone; if it was killed, its folder is still there
        shutil.rmtree(home, ignore_errors=True)
    except (SystemExit, ValueError, FloatingPointError) as error:  # a model, an engine, a setting or weights that cannot work
        complain(pipe, next(kind for kind in (SystemExit, ValueError, FloatingPointError) if isinstance(error, kind)), str(error))
    except Exception as error:
        complain(
            pipe,
            RuntimeError,
            f"the sampling process cannot go on ({first_line(error)}); the last checkpoint is kept, mend that and --resume",
        )


def complain(pipe, kind: type, text: str) -> None:
    """Have the trainer raise kind(text), if it is still there. As it ends its folder goes first, and what is then written in vain concerns nobody."""
    with suppress(ConnectionError):
        pipe.send((kind, text))


class Ahead:
    """`ask` for a batch now, `take` it later, in the same order. `close` it when done."""

    def __init__(self, load_policy: Callable[[], Policy], make_sampler: Callable[[Policy], object], threads: int = 1, needed: int = 0):
        """threads: of the other process. needed: bytes that the open jobs will take; without that much memory to spare they go to disk."""
        self.arguments = (load_policy, make_sampler, threads)
        self.home = memory_folder(needed)
        self.open: dict[object, Path] = {}  # {tag: file of its job}, in the order asked
        self.asked, self.starts = 0, 0
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked copy of a torch with threads, or of a CUDA context, does not work
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=player, args=(theirs, self.home.name, *self.arguments), daemon=True)
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
        """Have the job played with the policy's weights as they are now; `tag` is its name for take."""
        job.weights = {name: p.detach().cpu() for name, p in policy.trainable().items()}
        file = Path(self.home.name) / f"{self.asked}.job"
        self.asked += 1
        file.write_bytes(pickle.dumps(job))
        self.open[tag] = file
        self.send(file)

    def take(self, tag) -> tuple[list[list[Episode]], dict[str, float]]:
        """(groups, seconds by part) of a batch that was asked for; waits for it.

        Raises what the player met: SystemExit, ValueError or FloatingPointError where a sentence says what is wrong, else RuntimeError.
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
        """Ask and take at once, for a caller with nothing to do meanwhile. It waits behind the batches that were asked for before."""
        self.ask("now", policy, job)
        return self.take("now")[0]

    def restart(self) -> None:
        """Start another process after one that died. RuntimeError after RESTARTS of them."""
        self.process.join()
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if self.starts > RESTARTS:
            raise RuntimeError(f"the sampling process {how} for the {self.starts}th time; is there enough memory? The last checkpoint is "
                               "kept; --resume it, or start again with fewer --num-tasks or without --async-rollouts")  # fmt: skip
        print(f"the sampling process {how}; it is started again and plays its {len(self.open)} open batches anew", flush=True)
        self.start()

    def close(self) -> None:
        self.pipe.close()  # it ends by itself, unless it is playing
        self.process.join(timeout=1)
        self.process.kill()
        self.process.join()
        self.home.cleanup()
        sweep()  # what the player could not


def demo() -> None:
    """Three batches asked for at once, and a kill after the first."""
    from env_letters import Letters
    from fast.sampler import TorchSampler
    from policy import PICO, load_policy

    load = partial(load_policy, str(PICO), 32, 64)
    policy = load()
    ahead = Ahead(load, TorchSampler)
    env = partial(Letters, 6, "binary", True, "states")
    for batch in range(3):
        ahead.ask(batch, policy, Job(env, [8 * batch + i for i in range(8)], 8, 320, 1.0, 0, version=0))
    for batch in range(3):
        started = time.perf_counter()
        groups, clock = ahead.take(batch)
        print(f"batch {batch}: {sum(len(g) for g in groups)} episodes, waited {time.perf_counter() - started:.1f} s, "
              + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in clock.items()))  # fmt: skip
        if batch == 0:
            os.kill(ahead.process.pid, signal.SIGKILL)
    ahead.close()


if __name__ == "__main__":
    demo()
