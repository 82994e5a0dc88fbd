"""Protects sampling ahead: what the other process plays is, to the last bit, what this one would
have played with the weights of the moment it was asked; if it is killed the run ends with one
sentence; and nothing of it is left behind.
"""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import settings
from env_alphabet import Alphabet
from fast import ahead as ahead_room
from fast import machine
from fast.ahead import Job, SecondProcess
from fast.machine import CannotGoOn
from fast.sampler import TorchSampler
from helpers import assert_one_sentence
from policy import BIG, PICO, Sample, load_policy
from rollout import play

ROOT = Path(__file__).resolve().parent.parent
RULES = (2, 2, 1, 1, 8.0, False, True, "states")  # two turns, one name each
ENV = partial(Alphabet, *RULES)
LOAD = partial(load_policy, str(PICO), 4, 8, "cpu", 0)
NO_MODEL = partial(load_policy, "no_such_model", 4, 8)


# What the other process is given is found there by its name, so it stands in no test.


class Mute:
    """A tokenizer to which every text is the same token."""

    added_tokens_decoder, all_special_tokens = {}, []

    def __call__(self, text, **_):
        return {"input_ids": [1]}

    def apply_chat_template(self, *_, **__):
        return "?"

    def decode(self, *_, **__):
        return "!"


def load_nobody():
    """A policy without weights, loaded in no time."""
    lm, device = SimpleNamespace(config=None), torch.device("cpu")
    return SimpleNamespace(trainable=dict, tokenizer=Mute(), stop_ids={2}, lm=lm, device=device)


class Nod:
    """A sampler that always says the same."""

    def __init__(self, policy):
        self.version = 0

    def sync(self, version):
        self.version = version

    def sample(self, prompts, k, *_, **__):
        return [[Sample([2], [-0.5], True)] * k for _ in prompts]


def no_sampler(policy):
    raise ValueError("no room for a cache")


class Failing(Nod):
    def sync(self, version):
        raise KeyError(f"version {version}")


class Nan(Nod):
    def sample(self, prompts, k, *_, **__):
        return [[Sample([2], [float("nan")], True)] * k for _ in prompts]


class Endless(Nod):
    """A sampler that says that it was asked, and then takes for ever."""

    def __init__(self, begun: Path, policy):
        self.begun = begun

    def sync(self, version):
        self.begun.touch()
        time.sleep(3600)


# ------------------------------------------------------------------------------------------ helpers


@pytest.fixture(autouse=True)
def patience():
    """What waits for another process could wait for ever."""

    def give_up(*_):
        raise TimeoutError("ten minutes")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(600)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def until(happened) -> None:
    while not happened():
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """No such process, or a dead one that nobody has asked about."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def job(env=ENV, seeds=(3, 4), k=2, version=0, noise=5) -> Job:
    return Job(env, list(seeds), k, 60, 1.0, noise, version)


def here(policy, asked: Job) -> list:
    """The same, played in this process."""
    sampler = TorchSampler(policy)
    sampler.sync(asked.version)
    how = asked.k, asked.max_tokens, asked.temperature, asked.noise
    return play(policy, sampler, asked.make_env, asked.seeds, *how)


@pytest.fixture(scope="module")
def ahead():
    # As many threads as here: another number adds up in another order.
    one = SecondProcess(LOAD, TorchSampler, torch.get_num_threads())
    yield one
    one.close()


@pytest.fixture
def policy(stir):
    one = LOAD()
    stir(one, 0.02)
    return one


@pytest.fixture
def opened():
    """opened(load, make_sampler) -> a SecondProcess that is closed in the end."""
    made = []

    def make(load, make_sampler):
        made.append(SecondProcess(load, make_sampler, 1))
        return made[-1]

    yield make
    for one in made:
        one.close()


# ----------------------------------------------------------------------------------- what is played


def test_episodes_are_those_that_this_process_would_have_played_in_whatever_order_they_are_taken(
    ahead, policy
):
    jobs = {"a": job(seeds=[3, 4]), "b": job(seeds=[5], k=3), "c": job(seeds=[3, 4], noise=6)}
    for tag, one in jobs.items():
        ahead.ask(tag, policy, one)
    for tag in ("c", "a", "b"):
        groups, clock = ahead.take(tag)
        # every field of every episode: tokens, log-probs, rewards, texts
        assert groups == here(policy, jobs[tag])
        assert set(clock) == {"rollout", "environment", "sync"} and min(clock.values()) > 0
        episodes = [e for group in groups for e in group]
        assert max(e.turns for e in episodes) == 2
        assert all(e.stop_reason != "error" for e in episodes)
    assert ahead.asked == [] and ahead.played == {}  # nothing is kept of what was taken
    assert ahead.process.pid != os.getpid()


def test_a_batch_is_played_with_the_weights_of_the_moment_it_was_asked_for(ahead, policy, stir):
    # keeps the player busy while the weights change
    ahead.ask("first", policy, job(seeds=range(8)))
    ahead.ask("old", policy, job(version=7))
    old = here(policy, job(version=7))
    stir(policy, 0.05, seed=1)
    ahead.ask("new", policy, job(version=8))
    new = here(policy, job(version=8))
    stir(policy, 0.05, seed=2)
    assert ahead.take("old")[0] == old and ahead.take("new")[0] == new and ahead.take("first")
    versions = lambda groups: {e.policy_version for group in groups for e in group}
    assert versions(old) == {7} and versions(new) == {8}
    assert [e.logprobs for e in old[0]] != [e.logprobs for e in new[0]]


@pytest.mark.parametrize("turns, asked", [(2, [3, 3, 2]), (1, [8])])
def test_an_evaluation_of_conversations_is_played_in_slices_if_the_sampler_asks_for_it(
    policy, monkeypatch, turns, asked
):
    """On a card the caches of all its conversations would not fit; the episodes are the same."""
    env, seeds, seen = partial(Alphabet, turns, turns, *RULES[2:]), list(range(8)), []
    sampler = TorchSampler(policy)
    assert sampler.conversations is None  # a CPU plays all at once
    rollouts = ahead_room.InTurn(SimpleNamespace(max_tokens=60), policy, sampler, None, None)
    whole = rollouts.greedy(env, seeds, 1)
    sampler.conversations = 3
    real = ahead_room.play
    spy = lambda *given: seen.append(len(given[3])) or real(*given)
    monkeypatch.setattr(ahead_room, "play", spy)
    sliced = rollouts.greedy(env, seeds, 1)
    assert seen == asked
    played = lambda groups: [(e.seed, e.token_ids, e.reward) for (e,) in groups]
    assert played(sliced) == played(whole)


@pytest.fixture
def a100(monkeypatch):
    """Its 79 GiB."""
    properties = SimpleNamespace(total_memory=79.1 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def test_two_processes_that_do_not_fit_one_card_are_refused_with_the_numbers(a100):
    """Several cards with vLLM: each holds a trainer and a second process."""
    big = SimpleNamespace(device=torch.device("cuda"), name=BIG, lora_rank=32)
    cfg = settings.Config(
        async_rollouts=1, engine="vllm", micro_tokens=8192, max_tokens=2048, threads=1
    )
    told = r"about 94 GiB of 79 .computed.; try --micro-tokens 4096, which makes it 6\d$"
    with pytest.raises(ValueError, match=told) as caught:
        ahead_room.open_rollouts(cfg, big, None, None, None)
    assert "\n" not in str(caught.value)
    cfg.micro_tokens = 4096
    ahead_room.check_room_for_two(cfg, big)
    cfg.micro_tokens = 8192
    for spared in (dict(device=torch.device("cpu")), dict(name="owner/another")):
        ahead_room.check_room_for_two(cfg, SimpleNamespace(**vars(big) | spared))
    # The moments of all weights, twice the weights in float32: no mend is enough.
    cfg.micro_tokens, cfg.lora_rank = 4096, 0
    with pytest.raises(ValueError, match="GiB of 79"):
        ahead_room.check_room_for_two(cfg, big)


def test_our_own_sampler_leaves_the_trainer_its_part_of_a_card_that_two_processes_share(
    a100, monkeypatch
):
    """It decodes as many rows as there is memory for.

    Half a card for a model that nobody has planned; vLLM has its own share.
    """
    limits, ours = [], object.__new__(TorchSampler)
    limit = lambda share, device: limits.append((share, device))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    cfg = settings.Config(
        async_rollouts=1, engine="torch", micro_tokens=4096, max_tokens=2048, k=16
    )
    device = torch.device("cuda")
    for sampler, where, name in (
        (ours, device, "pico_base"),
        (object(), device, BIG),
        (ours, torch.device("cpu"), BIG),
        (ours, device, BIG),
    ):
        monkeypatch.setattr(ahead_room, "make_sampler", lambda *_, sampler=sampler: sampler)
        assert ahead_room.second_sampler(cfg, SimpleNamespace(device=where, name=name)) is sampler
    half, planned = limits
    assert half == (0.5, None) and planned[1] is None
    card = machine.card_of(device)
    trainer = machine.plan(BIG, "letters", card, "torch", ahead_room.planned(cfg)).trainer
    assert planned[0] * 79.1 + machine.CONTEXT == pytest.approx(79.1 - trainer)


# ------------------------------------------------------------------------------------------- killed


@pytest.mark.parametrize("playing", [True, False])
def test_a_player_that_is_killed_is_told_in_one_sentence(opened, tmp_path, playing):
    sampler = partial(Endless, tmp_path / "begun") if playing else Nod
    one = opened(load_nobody, sampler)
    one.ask(0, load_nobody(), job())
    if playing:
        until((tmp_path / "begun").exists)
    else:
        one.take(0)
    one.process.kill()
    one.ask(1, load_nobody(), job())
    with pytest.raises(CannotGoOn, match="killed by signal 9; .* go on with --resume") as caught:
        one.take(1)
    assert_one_sentence(caught)


@pytest.mark.parametrize(
    "load, make_sampler, refused, reason",
    [
        # train.py prints these as one sentence, as they are
        (load_nobody, no_sampler, ValueError, "no room for a cache"),
        (NO_MODEL, TorchSampler, SystemExit, "--model no_such_model: no such folder"),
        (load_nobody, Failing, RuntimeError, "KeyError: 'version 4'"),
        (load_nobody, Nan, FloatingPointError, "weights are broken"),
    ],
)
def test_what_another_try_would_not_mend_is_told_with_its_reason(
    opened, load, make_sampler, refused, reason
):
    one = opened(load, make_sampler)
    one.ask(0, load_nobody(), job(version=4))
    with pytest.raises(refused) as caught:
        one.take(0)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------ the end


def test_close_ends_a_player_that_is_playing(opened, tmp_path, capfd):
    one = opened(load_nobody, partial(Endless, tmp_path / "begun"))
    one.ask(0, load_nobody(), job())
    until((tmp_path / "begun").exists)
    one.close()
    assert not one.process.is_alive() and "Traceback" not in capfd.readouterr().err


def test_a_trainer_that_is_killed_leaves_no_process(tmp_path):
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from test_ahead import *
one = SecondProcess(load_nobody, Nod, 1)
one.ask(0, load_nobody(), job())
one.take(0)
print(one.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL and "Traceback" not in done.stderr, done.stderr
    until(lambda: gone(int(done.stdout)))
