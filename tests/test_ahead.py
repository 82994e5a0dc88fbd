"""Protects sampling ahead: what the other process plays is, to the last bit, what this one would
have played with the weights of the moment it was asked; if it is killed the run ends with one
sentence; and nothing of it is left behind.
"""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import settings
from env_alphabet import Alphabet
from env_letters import Letters
from fast.ahead import FreeCollector, SecondProcess, SyncCollector, weights_of
from fast.machine import CannotGoOn, use_cpu
from fast.sampler import TorchSampler
from helpers import ROOT, refusal
from policy import PICO, load_policy
from rollout import Episode, play

PLAYS = partial(Alphabet, 2, 2, 1, 1, 8.0, False, True, "states")  # two turns, one name each
LOAD = partial(load_policy, str(PICO), 4, 8, "cpu", 0)
NOTHING = (None, [], 1, 1, 1.0, 0)  # a job without tasks


# What the other process is given is found there by its name, so it stands in no test.


def nobody():
    """A policy without weights, loaded in no time."""
    config = SimpleNamespace()
    config.get_text_config = lambda: config
    lm = SimpleNamespace(config=config)
    return SimpleNamespace(lm=lm, trainable=dict, device=torch.device("cpu"))


class Stub:
    """A sampler for jobs without tasks: told of new weights, it does `what`."""

    def __init__(self, what, policy):
        self.what = what

    def sync(self, version):
        self.what(version)


def take_for_ever(begun: Path, version):
    if version:
        begun.touch()
        time.sleep(3600)


def fail(version):
    raise KeyError(f"version {version}")


def no_sampler(policy):
    raise ValueError("no room for a cache")


# ------------------------------------------------------------------------------------------ helpers


@pytest.fixture(autouse=True)
def patience():
    """What waits for another process could wait for ever."""
    signal.alarm(600)  # would end pytest's process
    yield
    signal.alarm(0)


def until(happened) -> None:
    while not happened():
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """No such process, or a dead one that nobody has asked about."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@pytest.fixture
def opened():
    """opened(load, make_sampler) -> a SecondProcess that is closed in the end."""
    made = []
    use_cpu("cpu", torch.get_num_threads())  # as there: the same products to the last bit

    def make(load, make_sampler):
        # As many threads as here: another number adds up in another order.
        made.append(SecondProcess(load, make_sampler, torch.get_num_threads()))
        return made[-1]

    yield make
    for one in made:
        one.close()


# ----------------------------------------------------------------------------------- what is played


def test_episodes_are_those_of_the_weights_of_the_moment_they_were_asked_for(opened, stir):
    policy, second, asked = LOAD(), opened(LOAD, TorchSampler), []
    for version, (seeds, k, seed) in enumerate([([3, 4], 2, 5), ([5], 3, 5), ([3, 4], 2, 6)]):
        stir(policy, 0.05, seed=version)
        job = (PLAYS, seeds, k, 60, 1.0, seed)
        sampler = TorchSampler(policy)
        sampler.sync(version)
        answer = second.ask(weights_of(policy), job, version)
        asked.append((answer, play(policy, sampler, *job)))
    for answer, mine in reversed(asked):  # in whatever order they are taken
        groups, seconds = answer.result()
        assert groups == mine  # every field of every episode: tokens, log-probs, rewards, texts
        assert min(seconds[part] for part in ("rollout", "environment", "sync")) > 0
        episodes = [e for group in groups for e in group]
        assert max(e.turns for e in episodes) == 2
        assert all(e.stop_reason != "error" for e in episodes)
    logprobs = [[e.logprobs for e in groups[0]] for _, groups in asked]
    assert logprobs[0] != logprobs[2] and second.process.pid != os.getpid()


# ------------------------------------------------------------------------------------------- killed


@pytest.mark.parametrize("playing", [True, False])
def test_a_player_that_is_killed_is_told_in_one_sentence(opened, tmp_path, playing):
    second = opened(nobody, partial(Stub, partial(take_for_ever, tmp_path / "begun")))
    second.ask({}, NOTHING, 0).result()
    if playing:
        second.ask({}, NOTHING, 1)
        until((tmp_path / "begun").exists)
    second.process.kill()
    told = refusal(CannotGoOn, lambda: second.ask({}, NOTHING, 2).result())
    assert re.search("was killed .* code -9.*; .* go on with --resume", told)


@pytest.mark.parametrize(
    "make_sampler, kind, reason",
    [(no_sampler, ValueError, "no room for a cache"), (partial(Stub, fail), KeyError, "version 4")],
)
def test_what_fails_over_there_is_raised_here_with_its_kind_and_place(
    opened, make_sampler, kind, reason
):
    """So train.py says in one sentence what it knows."""
    answer = opened(nobody, make_sampler).ask({}, NOTHING, 4)
    with pytest.raises(kind, match=reason) as caught:
        answer.result()
    assert "test_ahead.py" in caught.value.__notes__[0]


# ------------------------------------------------------------------------------------------ the end


def test_close_ends_a_player_that_is_playing(opened, tmp_path, capfd):
    second = opened(nobody, partial(Stub, partial(take_for_ever, tmp_path / "begun")))
    second.ask({}, NOTHING, 1)
    until((tmp_path / "begun").exists)
    second.close()
    # another thread of ours may have heard of its end first, and be about to write it down
    until(lambda: not second.process.is_alive())
    assert "Traceback" not in capfd.readouterr().err


def test_a_trainer_that_is_killed_leaves_no_process(tmp_path):
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from test_ahead import *
second = SecondProcess(nobody, partial(Stub, print), 1)
second.ask({{}}, NOTHING, 0).result()
print(second.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL and "Traceback" not in done.stderr, done.stderr
    until(lambda: gone(int(done.stdout.split()[-1])))


def test_a_sampler_that_keeps_its_weights_plays_by_those_of_its_last_sync(stir):
    """--sync-every 2: batches 0 and 1 by the weights of update 0; then the new ones."""
    cfg = settings.Config(sync_every=2, k=2, max_tokens=24, updates=3)
    policy = LOAD()
    make_env = lambda level: Letters(level, "binary", True, "states")
    collector = SyncCollector(cfg, policy, TorchSampler(policy), make_env, lambda update: [7])
    ids = lambda groups: [e.token_ids for e in groups[0]]
    fresh, found = [], []
    for update in range(3):
        job = (partial(make_env, 6), [7], 2, 24, 1.0, 0)
        fresh.append(ids(play(policy, TorchSampler(policy), *job)))
        found.append(collector.collect(update, 6))
        stir(policy, 0.1, seed=update)
    assert [ids(groups) for groups in found] == [fresh[0], fresh[0], fresh[2]]
    assert fresh[1] != fresh[0], "the weights did change"
    assert [groups[0][0].age for groups in found] == [0, 1, 0]


# ------------------------------------------------------------------------------- a free sampler


class ByHand:
    """Stands in for a second process. Batch 0 is played at once, the others when `end` says so."""

    def __init__(self):
        self.asked = []  # of (numbers of the tasks, weights, version, a Future)

    def ask(self, weights, job, version) -> Future:
        self.asked.append((job[1], weights, version, Future()))
        if len(self.asked) == 1:
            self.end(0)
        return self.asked[-1][-1]

    def end(self, number: int) -> None:
        seeds, _, version, answer = self.asked[number]
        answer.set_result(([[Episode(seeds[0], 0, policy_version=version)]], {"rollout": 1.0}))


@pytest.fixture
def free():
    """A collector of batches [n] with tasks [n], whose policy's weight counts its updates."""
    weight = torch.zeros(1)
    policy = SimpleNamespace(trainable=lambda: {"updates": weight}, device=torch.device("cpu"))
    cfg = settings.Config(async_rollouts=1, max_staleness=2, k=1, max_tokens=8)
    collector = FreeCollector(cfg, policy, ByHand(), str, lambda number: [number])
    collector.weight = weight
    return collector


def test_a_sampler_that_never_waits_gets_ahead_until_batches_are_too_old_and_are_dropped(free):
    """It plays two batches per update, each with the weights of the moment it begins."""
    taken, ages, counts = [], [], []
    for update in range(7):
        [[episode]] = free.collect(update, level=update)
        taken.append(episode.seed)
        ages.append(episode.age)
        counts.append(free.counts)
        assert free.level == update - episode.age and free.seconds["rollout"] == 1.0
        free.weight += 1  # the update
        for number in (2 * update + 1, 2 * update + 2):
            free.sampler.end(number)
    assert ages == [0, 1, 2, 2, 2, 2, 2]  # no batch is older than --max-staleness
    assert taken == [0, 1, 2, 4, 6, 8, 10]  # the oldest that is young enough
    assert [line["batches_dropped"] for line in counts] == [0, 0, 0, 1, 1, 1, 1]
    assert [line["batches_waiting"] for line in counts] == [1, 2, 3, 3, 3, 3, 3]
    for seeds, weights, version, _ in free.sampler.asked:
        assert weights == {"updates": [version]}, seeds


def test_an_error_of_the_second_process_reaches_the_trainer_and_no_other_batch_begins(free):
    free.collect(0, level=1)
    free.sampler.asked[1][-1].set_exception(CannotGoOn("it was killed"))
    with pytest.raises(CannotGoOn, match="it was killed"):
        free.collect(1, level=1)
    assert len(free.sampler.asked) == 2
