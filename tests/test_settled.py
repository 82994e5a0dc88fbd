"""Protects what a run decides by: has its reward settled, which updates describe the present, and is
a level passed?

Expected values come from simulations whose truth is known.
"""

import re

import numpy as np
import pytest

import metrics
from bookkeeping import settled

# ----------------------------------------------------------------------------------------- trend


def learning(seed: int, n: int, tau: float = 25.0) -> np.ndarray:
    """A run that rises from 0.15 to 0.93 and stays there, 64 episodes an update."""
    chance = 0.93 - 0.78 * np.exp(-np.arange(n) / tau)
    return np.random.default_rng(seed).binomial(64, chance) / 64


def first_settled(rewards) -> int | None:
    """After which update `train.py --until-converged` would stop."""
    lengths = range(30, len(rewards) + 1)
    return next((n for n in lengths if settled.trend(rewards[:n]).settled), None)


def test_few_updates_are_never_called_settled():
    """Not significantly different from 0 is not the same as 0."""
    for n in (0, 1, 29):
        said = settled.trend([0.5] * n).sentence
        assert said.startswith(f"cannot tell yet: {n} updates are too few")
    assert settled.trend([0.5] * 30).settled
    for seed in range(10):
        assert not settled.trend(np.random.default_rng(seed).normal(0.5, 0.1, 30)).settled


def test_a_run_that_has_learned_is_called_settled_near_its_level():
    for seed in range(3):
        rewards = learning(seed, 220)
        stop = first_settled(rewards)
        t = settled.trend(rewards[:stop])
        n = int(re.search(r"over the last (\d+) updates \(", t.sentence)[1])
        now = metrics.level(rewards[stop - n : stop])
        assert 80 <= stop <= 220 and 30 <= n <= stop - 19
        assert now.mean == pytest.approx(0.92, abs=0.03)
        assert t.sentence.startswith(f"settled at {now.text(2)} over the last {n} updates")
        low, high = re.search(r"per 10 updates \[(.*), (.*)\]", t.sentence).groups()
        assert -0.01 <= float(low) < float(high) <= 0.01


def test_a_run_that_rises_falls_or_bends_is_never_called_settled():
    rng = np.random.default_rng(0)
    assert first_settled(rng.binomial(64, 0.15 + 0.002 * np.arange(250)) / 64) is None
    rising = settled.trend(0.1 + 0.005 * np.arange(100))
    assert rising.sentence.startswith("still moving, +0.050 per 10 updates [+0.050, +0.050] over")
    assert settled.trend(learning(0, 100)[::-1]).sentence.startswith("still moving, -")
    collapse = np.r_[rng.binomial(64, 0.9, 60), rng.binomial(64, 0.15, 40)] / 64
    assert not any(settled.trend(collapse[:n]).settled for n in range(61, 85))
    for n in (30, 45, 60):  # up and down again: the line is flat, the residuals are a slow wave
        hump = 0.5 + 0.3 * np.sin(np.pi * np.arange(n) / (n - 1)) + rng.normal(0, 0.02, n)
        assert abs(metrics.line(hump)[0].mean) < 0.02 and not settled.trend(hump).settled
    calm, wild = rng.normal(0.5, 0.004, 40), rng.normal(0.5, 0.03, 15)
    assert "the spread went from 0.00" in settled.trend(np.r_[calm, wild], tolerance=0.02).sentence


# ------------------------------------------------------------------------- steps and the present


def test_a_drop_is_found_where_it_was_and_the_window_begins_there():
    for seed in range(10):
        rng = np.random.default_rng(seed)
        before = learning(seed, 60, tau=8)  # the old rise does not hide it
        rewards = np.r_[before, rng.binomial(64, 0.4, 30) / 64]
        assert settled.adaptive_window(rewards) <= 32
        assert abs(metrics.since_step(rewards[:75]) - 15) <= 2
    assert metrics.since_step(np.array([0.2] * 12 + [0.7] * 8 + [0.1] * 6)) == 6
    assert metrics.since_step(np.array([0.2] * 5 + [0.7] * 4)) == 9  # five on both sides, or none


def batches(level: np.ndarray, seed: int) -> np.ndarray:
    """Exact answers of updates of 8 tasks, 8 samples each; some tasks are hard, some easy."""
    rng = np.random.default_rng([seed, 1])
    of_tasks = np.repeat(level[:, None], 8, axis=1)
    return rng.binomial(8, rng.beta(of_tasks, 1 - of_tasks)).mean(axis=1) / 8


def test_a_level_is_passed_when_it_surely_is_and_not_when_five_updates_were_lucky():
    """Beside the rule of before: the mean of the last five reaches the bar."""
    of_five = lambda rewards, bar: len(rewards) >= 5 and np.mean(rewards[-5:]) >= bar
    first = lambda rule, x: next((n for n in range(1, len(x) + 1) if rule(x[:n], 0.75)), None)
    time = np.arange(100)
    below, slow, mastered = (
        [
            [first(rule, batches(level, seed)) for seed in range(40)]
            for rule in (of_five, settled.passed)
        ]
        for level in (np.full(100, 0.7), 0.3 + 0.6 * (1 - np.exp(-time / 40)), np.full(9, 0.98))
    )
    promoted = [40 - found.count(None) for found in below]
    assert promoted[0] == 40 and promoted[1] <= 5  # it never reaches the bar
    early = [sum(n is not None and n < 57 for n in found) for found in slow]  # in update 57
    assert early[0] >= 30 and early[1] <= 5
    assert max(mastered[1]) <= 5
    assert not settled.passed([1.0] * 4, 0.75) and settled.passed([1.0] * 5, 0.75)


def test_the_present_settles_without_an_old_level_and_a_rise_of_now_moves():
    now = np.r_[batches(np.full(60, 0.3), 0), np.full(40, 0.8)]
    assert len(settled.present(now)) <= 41 and settled.present_trend(now).settled
    assert "still moving" in settled.present_trend(0.1 + 0.005 * np.arange(100)).sentence


def test_more_noise_lengthens_the_window_and_a_steeper_trend_shortens_it():
    """The rule: lengthen when the variance is high, shorten when a clear trend appears."""

    def median(slope: float, noise: float) -> float:
        series = lambda seed: np.random.default_rng(seed).normal(slope * np.arange(120), noise)
        return np.median([settled.adaptive_window(series(seed)) for seed in range(9)])

    assert median(0.002, 0.02) < median(0.002, 0.08) < median(0.002, 0.3)
    assert median(0.02, 0.05) < median(0.004, 0.05) < median(0.0, 0.05)
