"""Protects the numbers behind every claim: Wilson's interval, the bootstrap, the paired gain and the collapse alarm.

Expected values come from the textbook formula written out again, from a published table, or from simulations whose truth is known.
"""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import metrics
from metrics import Interval

ROOT = Path(__file__).resolve().parent.parent
Z = 1.959963984540054  # the 97.5% quantile of the normal distribution


def wilson(successes: int, n: int) -> tuple[float, float]:
    """(p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)"""
    p = successes / n
    middle = p + Z**2 / (2 * n)
    reach = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    return (middle - reach) / (1 + Z**2 / n), (middle + reach) / (1 + Z**2 / n)


# ------------------------------------------------------------------------------------------------ proportion


@pytest.mark.parametrize("n", [1, 2, 7, 32, 100, 256, 1024])
def test_wilson_against_the_formula(n):
    for successes in {0, 1, n // 3, n // 2, n - 1, n}:
        interval = metrics.proportion(successes, n)
        assert interval.mean == successes / n and interval.n == n
        assert (interval.low, interval.high) == pytest.approx(wilson(successes, n), abs=1e-9)


@pytest.mark.parametrize(
    "successes,n,low,high",
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_the_published_table(successes, n, low, high):
    """Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    interval = metrics.proportion(successes, n)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


def test_wilson_at_the_edges_stays_inside_and_says_something():
    none, every = metrics.proportion(0, 50), metrics.proportion(50, 50)
    assert none.low == pytest.approx(0.0, abs=1e-12) and none.high == pytest.approx(Z**2 / (50 + Z**2))
    assert every.high == pytest.approx(1.0, abs=1e-12) and every.low == pytest.approx(50 / (50 + Z**2))
    for interval in (none, every):
        assert 0.0 <= interval.low < interval.high <= 1.0
    nothing = metrics.proportion(0, 0)
    assert math.isnan(nothing.mean) and (nothing.low, nothing.high, nothing.n) == (0.0, 1.0, 0)


def test_successes_may_come_as_a_sum_of_floats():
    """evals.jsonl holds 1.0 and 0.0; the sum is a float, and scipy wants an integer."""
    assert metrics.proportion(sum([1.0, 0.0, 1.0]), 3) == metrics.proportion(2, 3)


def test_thirty_two_tasks_cannot_tell_41_from_56_percent():
    """Why the module exists: the claim in its docstring."""
    assert metrics.proportion(13, 32).high > metrics.proportion(18, 32).low
    assert metrics.proportion(104, 256).high < metrics.proportion(144, 256).low  # 256 tasks can


def test_the_interval_quoted_in_the_docstring_is_right():
    low, high = wilson(13, 32)
    assert f"reaches from {100 * low:.0f}% to {100 * high:.0f}%" in metrics.__doc__


# ------------------------------------------------------------------------------------------------ mean


def test_the_bootstrap_interval_covers_the_truth_about_95_times_in_100():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        interval = metrics.mean(rng.normal(3.0, 2.0, 40), resamples=300)
        hits += interval.low <= 3.0 <= interval.high
    assert 0.90 <= hits / 300 <= 0.985


def test_the_bootstrap_interval_is_as_wide_as_theory_says():
    values = np.random.default_rng(2).normal(0.0, 1.0, 400)
    interval = metrics.mean(values)
    assert interval.mean == pytest.approx(values.mean())
    assert interval.low < interval.mean < interval.high
    assert interval.high - interval.low == pytest.approx(2 * Z * values.std() / 20, rel=0.1)
    assert interval.n == 400


def test_the_same_values_give_the_same_interval():
    values = list(np.random.default_rng(3).random(50))
    first = metrics.mean(values)
    np.random.seed(99)  # the global state has no say
    assert metrics.mean(values) == first == metrics.mean(np.array(values))


def test_values_that_do_not_vary_have_no_width():
    assert metrics.mean([0.25] * 8) == Interval(0.25, 0.25, 0.25, 8)
    assert metrics.mean([0.7]) == Interval(0.7, 0.7, 0.7, 1)
    assert metrics.mean([1, 1]) == Interval(1.0, 1.0, 1.0, 2)
    empty = metrics.mean([])
    assert empty.n == 0 and all(math.isnan(x) for x in (empty.mean, empty.low, empty.high))


def test_two_values_span_their_bootstrap():
    assert metrics.mean([0.0, 1.0]) == Interval(0.5, 0.0, 1.0, 2)  # of four resamples, one has only the low value, one only the high


# ------------------------------------------------------------------------------------------------ gain


def correlated(n: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """The same tasks before and after: what is hard stays hard."""
    rng = np.random.default_rng(4)
    hard = rng.random(n)
    return (hard < 0.40).astype(float), (hard + rng.normal(0, 0.05, n) < 0.50).astype(float)


def test_a_paired_interval_is_narrower_than_two_separate_ones():
    before, after = correlated()
    paired, one, two = metrics.gain(before, after), metrics.mean(before), metrics.mean(after)
    unpaired = math.hypot(one.high - one.low, two.high - two.low)
    assert paired.high - paired.low < 0.7 * unpaired
    assert paired.mean == pytest.approx(two.mean - one.mean)
    assert paired.high - paired.low == pytest.approx(2 * Z * (after - before).std() / 16, rel=0.15)
    assert paired.low > 0, "a gain that two separate intervals could not see"
    assert one.high > two.low


def test_gain_has_the_sign_of_the_change():
    before, after = correlated()
    up, down = metrics.gain(before, after), metrics.gain(after, before)
    assert up.mean == pytest.approx(-down.mean) and up.mean > 0
    assert metrics.gain(before, before) == Interval(0.0, 0.0, 0.0, 256)
    assert metrics.gain([0, 0], [1, 1]) == Interval(1.0, 1.0, 1.0, 2)


def test_gain_of_booleans_is_a_number():
    assert metrics.gain([True, True], [False, False]).mean == -1.0  # numpy cannot subtract booleans


def test_gain_over_different_tasks_is_refused():
    with pytest.raises(ValueError, match="same tasks") as caught:
        metrics.gain([0, 1, 1], [0, 1])
    assert "\n" not in str(caught.value) and "(3,)" in str(caught.value) and "(2,)" in str(caught.value)
    with pytest.raises(ValueError):
        metrics.gain([0, 1, 1], [1])  # numpy would broadcast this


def test_an_interval_prints_as_a_person_reads_it():
    interval = Interval(0.40625, 0.25, 0.5771, 32)
    assert str(interval) == "0.406 [0.250, 0.577], n=32"
    assert interval.percent() == "40.6% [25.0, 57.7]"
    assert Interval(**interval.dict()) == interval


# ------------------------------------------------------------------------------------------------ collapsed


def alarms(rewards) -> list[int]:
    """After which updates a run would have heard the alarm: it is asked after every one."""
    rewards = [float(r) for r in rewards]
    return [i for i in range(1, len(rewards) + 1) if metrics.collapsed(rewards[:i])]


def test_a_noisy_flat_run_is_no_collapse():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        assert alarms(np.clip(rng.normal(0.7, 0.08, 100), 0, 1)) == []
        assert alarms(rng.binomial(64, 0.5, 100) / 64) == []


def test_a_noisy_flat_run_at_a_low_reward_is_no_collapse():
    """64 independent episodes an update, each right with probability 0.1, for 150 updates: nothing ever changes.

    The last window is compared with the *best* of all windows so far, at every update: with that many chances, three standard
    errors are crossed by luck, and 60% of a best of 0.14 is soon undercut. A few alarms in 40 runs would be bearable.
    """
    tripped = sum(bool(alarms(np.random.default_rng(seed).binomial(64, 0.1, 150) / 64)) for seed in range(40))
    assert tripped <= 2


def test_a_rising_run_is_no_collapse():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        assert alarms(np.clip(np.linspace(0.25, 0.9, 100) + rng.normal(0, 0.05, 100), 0, 1)) == []
    assert alarms(np.linspace(0.0, 1.0, 100)) == []


def test_constant_runs_are_no_collapse():
    for level in (0.0, 0.3, 1.0):
        assert alarms([level] * 60) == []


def test_fewer_than_ten_updates_are_too_few_to_tell():
    assert metrics.collapsed([]) is None
    for seed in range(100):
        rewards = np.random.default_rng(seed).random(9)
        assert alarms(rewards) == []
    assert alarms([1, 1, 1, 1, 0, 0, 0, 0, 0]) == []
    assert metrics.collapsed([1.0] * 5 + [0.0] * 5) is not None  # ten are enough


@pytest.mark.parametrize("healthy", [5, 20, 100])
def test_a_fall_from_080_to_014_is_noticed_within_five_updates(healthy):
    rewards = [0.8] * healthy + [0.14] * 5
    sentence = metrics.collapsed(rewards)
    assert sentence is not None and "0.14" in sentence and "0.80" in sentence and "\n" not in sentence
    assert alarms([0.8] * healthy) == []


def test_a_noisy_fall_over_five_updates_is_noticed():
    for seed in range(40):
        noise = np.random.default_rng(seed).normal(0, 0.06, 70)
        fall = np.concatenate([np.full(60, 0.8), np.linspace(0.67, 0.14, 5), np.full(5, 0.14)])
        heard = alarms(np.clip(fall + noise, 0, 1))
        assert heard and heard[0] > 60 and heard[-1] == 70


def test_a_single_bad_update_is_no_collapse():
    assert alarms([0.8] * 30 + [0.0] + [0.8] * 10) == []


def test_the_module_runs_as_a_script():
    done = subprocess.run([sys.executable, "metrics.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    low, high = wilson(13, 32)
    assert f"{100 * low:.0f}% to {100 * high:.0f}%" in done.stdout and "gain, paired" in done.stdout
