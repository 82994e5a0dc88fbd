"""What a claim is made of and what it computes: numbers of a run, numbers of arms, and the arms that scripts play.
lab/claims/claims.py has the claims.

A number of a run is one float, or an array with one value for each development task. A number of arms is a list with one of these for each
seed: most often the differences of two arms at the same seed. What is missing gives an empty list. Units of a script (scenarios, or seeds
of a simulation) stand for seeds.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import comb
from pathlib import Path

import numpy as np

import metrics

SAMPLED, TASKS = 32, 64  # pass@k: samples a task, tasks


@dataclass(frozen=True)
class Run:
    """What is kept of one run of train.py."""

    summary: dict
    lines: list[dict]  # metrics.jsonl
    evals: list[dict]  # evals.jsonl, the trained tasks only
    samples: list[int]  # right answers of SAMPLED, by task; only where the claim asks for it


@dataclass(frozen=True)
class Script:
    """An arm without a model: play(i) -> {name: number}, for the units 0 … n - 1 (scenarios, or seeds of a simulation)."""

    play: Callable[[int], dict[str, float]]
    n: int


@dataclass(frozen=True)
class Check:
    text: str  # what the number is, as a reader needs it
    value: Callable[[dict], list | tuple]  # of the arms: a number or an array [tasks] a seed; or a pair of independent samples
    expect: str = ""  # above, below, equal; empty: only measured
    than: float = 0.0  # what is predicted: above, below or equal to this
    margin: float = 0.0  # equal: within so much; above, below: the smallest difference that would matter
    figure: float | None = None  # what the document says the number is
    most: float = 1.0  # how large the number can be, either way: what all units agree in is not certain
    decides: bool = True  # is this the claim, or does it stand beside it?
    scale: float = 1.0  # of the pages: they show scale times the number, in this unit
    unit: str = ""
    share: bool = False  # between 0 and 1, and so is its interval


@dataclass(frozen=True, eq=False)  # a claim is equal to itself alone
class Claim:
    name: str
    sentence: str
    source: str
    reading: str  # how the sentence became numbers, and what is ours in it
    arms: dict[str, str | Script]
    checks: tuple[Check, ...]
    shows: tuple[str, str] = ("exact", "exactly right at the end, development tasks")  # of every arm, in the table and in the picture
    curve: str = "exact"  # of every update; empty: no curves
    then: Callable[[Path, Path], None] | None = None  # after a run: (its folder, where it is kept)
    ours: str = ""  # if what is tested follows from rules that we wrote: which, and so what it cannot tell


# ------------------------------------------------------------------------------------------------ numbers of a run
def held(run: Run, stage: str | int = "final", what: str = "exact") -> np.ndarray:
    """[tasks] of the development tasks it is trained for, at a stage (before, after_sft, final) or after so many updates."""
    return next(np.array(e[what], float) for e in run.evals if stage in (e["stage"], e["update"]))


def gained(run: Run, what: str = "exact") -> np.ndarray:
    """[tasks] what GRPO added to the SFT."""
    return held(run, "final", what) - held(run, "after_sft", what)


def during(run: Run, what: str = "exact", first: int = 1, last: int | None = None) -> float:
    """Mean over the updates first to last (both included), of sampled replies."""
    return float(np.mean([line[what] for line in run.lines if first <= line["update"] <= (last or len(run.lines)) and what in line]))


early = partial(during, what="exact", first=1, last=20)  # how fast it learns


def first_ten(what: str) -> Callable:
    """A number of a run: the mean of `what` over the first ten updates, in which most of the learning happens."""
    return lambda run: during(run, what, 1, 10)


def rewards(run: Run) -> list[float]:
    return [line["reward"] for line in run.lines]


# Reply length in the updates 6 to 15, less that of the first three; groups with a signal for each episode, in the first ten updates.
longer = lambda run: during(run, "reply_tokens", 6, 15) - during(run, "reply_tokens", 1, 3)
signal_by_episode = lambda run: during(run, "groups_with_signal", 1, 10) / run.summary["config"]["k"]
# By what share of the mean reward its peak lies above it; at what share of the updates it turns around (2/3 in white noise).
overstated = lambda run: metrics.distribution(rewards(run)).overstates / 100
turned_around = lambda run: metrics.distribution(rewards(run)).flips


def updates_needed(run: Run, gain: float = 0.05) -> float:
    """How many updates on either side it takes to tell a gain of 5 points in four runs of five: n = 2 (2.8 sd / gain)^2, where 2.8 = 1.96 +
    0.84 (95% confidence, 80% power) and sd is around a line through the second half."""
    left = metrics.line(np.array(rewards(run)[len(run.lines) // 2 :]))[1]
    return 2 * (2.8 * left.std(ddof=2) / gain) ** 2


def halfway(run: Run) -> tuple[bool, bool]:
    """(had it settled, says the detector at half-way; did the reward move by more than 0.05 afterwards)."""
    values, half = rewards(run), len(run.lines) // 2
    return metrics.trend(values[:half]).settled, abs(np.mean(values[-20:]) - np.mean(values[half - 10 : half])) > 0.05


def pass_at(run: Run, k: int) -> np.ndarray:
    """[tasks] the chance that one of k samples is right, unbiased: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1)."""
    return np.array([1 - comb(SAMPLED - c, k) / comb(SAMPLED, k) for c in run.samples])


def all_seconds(run: Run) -> float:
    """Seconds of SFT, sampling and training; evaluations are left out."""
    return sum(run.summary["seconds"].get(part, 0.0) for part in ("sft", "rollout", "environment", "sync", "train"))


def work(run: Run) -> float:
    """Tokens that were sampled or trained; a trained one counts as three, because a backward pass is two forward ones. Unlike seconds it
    does not depend on what else the machine did."""
    return run.summary["tokens"]["sampled"] + 3 * run.summary["tokens"]["trained"]


# ------------------------------------------------------------------------------------------------ numbers of arms
def both(arms: dict, *names: str) -> list[int]:
    """The seeds that all of these arms have."""
    return sorted(set.intersection(*(set(arms.get(name, ())) for name in names)))


# a minus b, by seed; a number of one arm, by seed; one script minus another, by unit; a script's number itself, by unit.
less = lambda a, b, of=held: lambda arms: [of(arms[a][s]) - of(arms[b][s]) for s in both(arms, a, b)]
own = lambda a, of: lambda arms: [of(arms[a][s]) for s in both(arms, a)]
by_unit = lambda a, b, what: lambda arms: list(arms[a][what] - arms[b][what]) if {a, b} <= arms.keys() else []
alone = lambda a, what: lambda arms: list(arms[a][what]) if a in arms else []
# The numbers of two scripts whose units are not the same: independent samples.
apart = lambda a, b, what: lambda arms: (alone(a, what)(arms), alone(b, what)(arms)) if {a, b} <= arms.keys() else []


def at_best_rate(arms: dict, kind: str, seed: int, of: Callable = held) -> Run:
    """The run of this seed at the learning rate that was best in the *other* seeds, by the number that is judged:
    who is judged has no vote."""
    rates = [name for name in arms if name.startswith(f"{kind}_")]
    best = max(rates, key=lambda name: np.mean([np.mean(of(run)) for s, run in arms[name].items() if s != seed]))
    return arms[best][seed]


def at_best_rates(a: str, b: str, of: Callable = held) -> Callable:
    """a less b, by seed, each at its best learning rate. Arms are called KIND_RATE; two seeds at least, because the others choose."""

    def value(arms: dict) -> list:
        names = [name for name in arms if name.startswith((f"{a}_", f"{b}_"))]
        seeds = both(arms, *names) if any(n.startswith(a) for n in names) and any(n.startswith(b) for n in names) else []
        return [of(at_best_rate(arms, a, s, of)) - of(at_best_rate(arms, b, s, of)) for s in seeds] if len(seeds) > 1 else []

    return value


def share_of(names, of: Callable) -> Callable:
    """By seed, the share of these arms of which it is so."""
    return lambda arms: [np.mean([float(of(arms[name][s])) for name in names]) for s in both(arms, *names)]


def called_right(run: Run) -> bool:
    """Was the detector right at half-way: settled if nothing moved any more, and only then?"""
    settled, moved = halfway(run)
    return settled != moved


def too_soon(run: Run) -> bool:
    """Did the detector say settled, and the reward moved on?"""
    return all(halfway(run))


def cannot_tell(run: Run) -> bool:
    """Did the detector say at half-way that it cannot tell yet?"""
    return metrics.trend(rewards(run)[: len(run.lines) // 2]).verdict == "cannot tell"


def adaptive_less_best(arms: dict) -> list:
    """The adaptive window's error less that of the fixed window that turned out best: chosen afterwards, which favours the fixed."""
    if not (errors := arms.get("windows")):
        return []
    fixed = min((name for name in errors if name.startswith("last")), key=lambda name: errors[name].mean())
    return list(errors["adaptive"] - errors[fixed])


# ------------------------------------------------------------------------------------------------ scripts
def swarm_player(version: str, style: str, i: int) -> dict[str, float]:
    """Of the i-th scenario, easy, medium and hard in turn."""
    import env_swarm
    from swarm.bots import DIFFICULTIES

    nonsense, (number, difficulty) = style == "nonsense", divmod(i, len(DIFFICULTIES))
    env = env_swarm.Swarm(DIFFICULTIES[difficulty], version, style="grinder" if nonsense else style)
    marks = (play_nonsense if nonsense else env_swarm.play)(env, env_swarm.DEV_SEEDS + number)
    return {name: marks[name] for name in ("reward", "payoff", "quality", "gain")}


def play_nonsense(env, seed: int) -> dict[str, float]:
    """The grinder, but every submission is 80 times the letter x."""
    from swarm import tools

    env.reset(seed)
    done = False
    while not done:
        _, tool, arguments = env.player(env.seen, env.dice)
        if tool == "submit_work":
            arguments = {**arguments, "content": "x" * 80}
        done = env.step(tools.write_call(tool, arguments))[1]
    return env.score()


def one_sided(unseen: str, i: int) -> dict[str, float]:
    """The expert, blind on one side: without `incoming` it can only propose, without `bots` only accept."""
    import env_swarm
    from swarm import tools

    env, done = env_swarm.Swarm("medium", style="expert"), False
    env.reset(env_swarm.DEV_SEEDS + i)
    while not done:
        _, tool, arguments = env.player(env.seen | {unseen: []}, env.dice)
        done = env.step(tools.write_call(tool, arguments))[1]
    marks = env.score()
    return {name: marks[name] for name in ("reward", "reputation", "quality", "used_accept_proposal", "used_propose_trade")}


def talker(rate: float, ends: bool, i: int) -> dict[str, float]:
    """The expert, which now and then only writes text. ends: that ends the episode, as it did in the published environment at first."""
    import env_swarm

    env, dice, calls, done = env_swarm.Swarm("medium", style="expert"), random.Random(f"text {rate} {i}"), 0, False
    env.reset(env_swarm.DEV_SEEDS + i)
    while not done:
        talks = dice.random() < rate
        if talks and ends:
            break
        done = env.step("Let me look at the tasks first." if talks else env.expert_reply())[1]
        calls += not talks
    return {"reward": env.score()["reward"], "calls": float(calls)}


def hidden(rate: int) -> Callable:
    """Of the calls of an episode that goes on, the share that the stop rule cuts off."""
    a, b = f"ends_{rate}", f"passes_{rate}"
    return lambda arms: list(1 - arms[a]["calls"] / np.maximum(arms[b]["calls"], 1)) if {a, b} <= arms.keys() else []


def economy(adversaries: int, seed: int, world: dict | None = None, **stack) -> dict[str, float]:
    """One run of eight bots (lab/swarm/governance.py), `adversaries` of them deceptive; world and stack: what differs from the defaults."""
    from lab.swarm.governance import World, row
    from swarm.governance import Stack

    numbers = row(World(adversaries=adversaries, **(world or {})), Stack(**stack), seed)
    return {name: float(numbers[name]) for name in ("welfare", "toxicity", "thrash", "thrash_honest", "acceptance", "epochs")}


SHAPES = {  # what a window has to cope with: the true reward of 100 updates, and how alike the answers to one task are (0: least noise)
    "flat, noisy": (np.full(100, 0.5), 0.8),
    "fell 8 updates ago": (np.where(np.arange(100) < 92, 0.8, 0.4), 0.0),
    "fell 30 updates ago": (np.where(np.arange(100) < 70, 0.8, 0.4), 0.3),
    "rises by 0.02 in 10 updates": (0.3 + 0.002 * np.arange(100), 0.3),
}


FIXED = (5, 10, 20, 40)  # the windows that people choose by hand


def dice(*key) -> np.random.Generator:
    """A generator of its own for every made-up run."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def episodes(truth: np.ndarray, icc: float, rng: np.random.Generator, groups: int = 8, k: int = 8) -> np.ndarray:
    """[n] true rewards -> [n] mean rewards of groups x k episodes; tasks differ in difficulty (beta-binomial) if icc > 0."""
    p = np.repeat(np.clip(truth, 1e-3, 1 - 1e-3)[:, None], groups, axis=1)
    if icc > 0:
        p = rng.beta(p * (1 / icc - 1), (1 - p) * (1 / icc - 1))
    return rng.binomial(k, p).mean(axis=1) / k


def window_errors(i: int) -> dict[str, float]:
    """How far each window's mean is from the present, on average over SHAPES."""
    errors: dict[str, list] = {}
    for name, (truth, icc) in SHAPES.items():
        values = episodes(truth, icc, dice("ablate", name, i))
        for window, n in {"adaptive": metrics.adaptive_window(values), **{f"last {n}": n for n in FIXED}}.items():
            errors.setdefault(window, []).append(abs(values[-n:].mean() - truth[-1]))
    return {window: float(np.mean(some)) for window, some in errors.items()}


def sample_more(folder: Path, target: Path) -> None:
    """SAMPLED replies at temperature 1 to each of TASKS development tasks, by the run's checkpoint: how many are right,
    into samples.json."""
    import torch

    import settings
    from bookkeeping.folder import read_config
    from bookkeeping.records import write_json
    from bridges import serve
    from fast.engine import make_sampler
    from rollout import play
    from settings import DEV_SEEDS

    cfg = settings.Config(**read_config(folder, settings.Config))
    torch.set_num_threads(max(1, cfg.threads))  # other runs go on beside this
    policy = serve.load(str(folder))
    sampler, make_env, right = make_sampler(cfg, policy), partial(settings.make_env, cfg, cfg.difficulty), []
    sampler.sync(0)
    for first in range(0, TASKS, 8):  # 256 replies at a time
        seeds = [DEV_SEEDS + i for i in range(first, first + 8)]
        groups = play(policy, sampler, make_env, seeds, SAMPLED, cfg.max_tokens, 1.0, cfg.seed)
        right += [round(sum(e.components["exact"] for e in group)) for group in groups]
    write_json(target / "samples.json", {"right": right, "of": SAMPLED})
