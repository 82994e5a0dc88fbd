"""Protects the numbers behind every claim: Wilson's interval, the bootstrap, the paired gain, and
what is said of a metric over updates: its level, whether it has settled, when it changed.

Expected values come from a published table, from the textbook, or from simulations whose truth is
known.
"""

import math
import re

import numpy as np
import pytest
from scipy import stats

import metrics
from metrics import Interval

Z = 1.959963984540054  # the 97.5% quantile of the normal distribution


def ends(interval: Interval) -> tuple[float, float]:
    return interval.low, interval.high


def holds(interval: Interval, truth: float) -> bool:
    return interval.low <= truth + 1e-12 and truth - 1e-12 <= interval.high


# --------------------------------------------------------------------------- proportion and mean


@pytest.mark.parametrize(
    "successes, n, low, high",
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_the_published_table(successes, n, low, high):
    """Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    assert ends(metrics.proportion(successes, n)) == pytest.approx((low, high), abs=5e-5)


def test_the_bootstrap_interval_is_as_wide_as_theory_says_and_always_the_same():
    values = np.random.default_rng(2).normal(0.0, 1.0, 400)
    interval = metrics.mean(values)
    assert interval.mean == pytest.approx(values.mean()) and interval.n == 400
    assert interval.high - interval.low == pytest.approx(2 * Z * values.std() / 20, rel=0.1)
    assert metrics.mean(list(values)) == interval


def coverage(draw, truth: float, of=metrics.mean, runs: int = 300) -> float:
    """In what share of samples does the interval hold the truth?"""
    return float(np.mean([holds(of(draw()), truth) for _ in range(runs)]))


@pytest.mark.parametrize("n", [2, 4, 16, 64])
def test_an_interval_holds_the_truth_in_95_of_100_cases(n):
    """300 samples each: 0.95 measures 0.916 to 0.984 (2.7 errors). Conservative is allowed."""
    rng = np.random.default_rng(n)
    gains = lambda values: metrics.gain(np.zeros(n), values)
    steps = lambda: rng.choice([-1.0, 0.0, 1.0], n, p=[0.05, 0.8, 0.15])
    assert 0.916 <= coverage(lambda: rng.normal(3.0, 2.0, n), 3.0) <= 0.984
    assert 0.916 <= coverage(lambda: rng.normal(0.1, 2.0, n), 0.1, gains) <= 0.984
    assert coverage(lambda: rng.random(n), 0.5) >= 0.926
    assert coverage(steps, 0.1, gains) >= 0.9
    for right in (0.05, 0.5, 0.95):  # groups of 8 episodes of a task each, whose difficulty differs
        draw = lambda: rng.binomial(8, rng.beta(4 * right, 4 * (1 - right), n)) / 8  # noqa: B023
        assert coverage(draw, right) >= 0.895, right
    assert coverage(lambda: rng.exponential(10, n), 10) >= 0.85  # counts, seconds


@pytest.mark.parametrize("n", [2, 8, 30, 64])
def test_wilson_holds_the_truth_in_95_of_100_cases_over_shares(n):
    """Exactly, from the binomial distribution. At 0 and 1, always."""
    intervals = [metrics.mean([1.0] * k + [0.0] * (n - k)) for k in range(n + 1)]
    assert intervals == [metrics.proportion(k, n) for k in range(n + 1)]

    def coverage(p: float) -> float:
        inside = np.array([holds(interval, p) for interval in intervals])
        return float(stats.binom.pmf(np.arange(n + 1), n, p)[inside].sum())

    found = [coverage(p) for p in (np.arange(500) + 0.5) / 500]
    assert 0.94 <= np.mean(found) <= 0.96 and min(found) >= 0.82
    assert coverage(0.0) == coverage(1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("n", [1, 2, 30, 256])
@pytest.mark.parametrize("value", [0.0, 0.25, 1.0, 3.0, -0.5, 0.1 + 0.2])
def test_no_interval_has_no_width(n, value):
    """Of n values that agree, a share z²/(n + z²) of all may differ: Wilson's bound for 0 of n."""
    others = Z**2 / (n + Z**2)
    for interval in (metrics.mean([value] * n), metrics.level([value] * n)):
        assert interval.mean == pytest.approx(value) and interval.n == n
        assert others * 0.49 < interval.high - interval.low < others * 8
        assert holds(interval, value)
    assert metrics.gain([value] * n, [value] * n).high == pytest.approx(others, rel=1e-3)


def test_no_values_have_no_mean_and_a_difference_by_rounding_is_none():
    assert metrics.mean([0.1 + 0.2, 0.3]).high > 0.7
    for empty in (metrics.mean([]), metrics.level([])):
        assert empty.n == 0 and all(map(math.isnan, (empty.mean, *ends(empty))))


# ------------------------------------------------------------------------------------------ gain


def test_a_paired_interval_sees_a_gain_that_two_separate_ones_do_not():
    """The same tasks before and after: what is hard stays hard."""
    rng = np.random.default_rng(4)
    hard = rng.random(256)
    before, after = hard < 0.40, hard + rng.normal(0, 0.05, 256) < 0.50
    paired, one, two = metrics.gain(before, after), metrics.mean(before), metrics.mean(after)
    unpaired = math.hypot(one.high - one.low, two.high - two.low)
    assert paired.high - paired.low < 0.7 * unpaired
    assert paired.mean == pytest.approx(two.mean - one.mean)
    spread = (after.astype(float) - before).std()
    assert paired.high - paired.low == pytest.approx(2 * Z * spread / 16, rel=0.15)
    assert paired.low > 0 and one.high > two.low
    down = metrics.gain(after, before)
    assert down.mean == pytest.approx(-paired.mean) and metrics.gain(before, before).mean == 0.0


def test_a_gain_stays_within_what_is_possible_and_says_that_it_may_be_a_loss():
    one_better = metrics.gain([0.0] * 64, [1.0] + [0.0] * 63)
    assert one_better.low <= 0 < one_better.high  # Wilson's interval of 1 of 64 lies above 0
    few = metrics.gain([1, 1, 0, 0], [0, 1, 0, 0])
    assert few.mean == -0.25 and few.low == -1.0 and few.high < 1
    points = metrics.gain([10.0, 20.0, 30.0, 5.0], [0.0, 20.0, 30.0, 5.0])
    assert points.low < -1  # of another scale: nothing is known of its ends
    rewards = [0.0, 1.6] * 100  # above 1; nothing changed in 200 tasks
    others = 1.6 * Z**2 / (200 + Z**2)
    assert ends(metrics.gain(rewards, rewards)) == pytest.approx((-others, others), rel=1e-3)


def test_gain_over_different_tasks_is_refused():
    with pytest.raises(ValueError, match=r"before has \(3,\) values .* must be the same tasks"):
        metrics.gain([0, 1, 1], [1])  # numpy would broadcast


def test_an_interval_prints_as_a_person_reads_it():
    """As percent and in points: the tables of tests/test_tables.py."""
    assert str(Interval(0.40625, 0.25, 0.5771, 32)) == "0.406 [0.250, 0.577], n=32"


# --------------------------------------------------------------------- level, line, distribution


def test_the_level_of_shares_lies_between_0_and_1():
    """Student's does not: two updates of 0.9 and 1.0 reach from 0.3 to 1.6."""
    assert ends(metrics.level([0.9, 1.0])) == (pytest.approx(0.315, abs=0.01), 1.0)
    assert metrics.level([1.5, 1.0]).high > 2  # a reward that is no share


def test_few_values_get_the_textbook_intervals_of_level_and_slope():
    """Up to nine values all waves are used: their squares sum to the sum of squares (Parseval)."""
    for n in (2, 3, 5, 9):
        values = np.random.default_rng(n).normal(size=n)
        expected = stats.t.interval(0.95, n - 1, values.mean(), values.std(ddof=1) / np.sqrt(n))
        assert ends(metrics.level(values)) == pytest.approx(expected)
    values = np.random.default_rng(1).normal(size=10)
    fit = stats.linregress(np.arange(10), values)
    slope, residuals = metrics.line(values)
    reach = 10 * fit.stderr * stats.t.ppf(0.975, 8)
    assert slope.mean == pytest.approx(10 * fit.slope)
    expected = (10 * fit.slope - reach, 10 * fit.slope + reach)
    assert ends(slope) == pytest.approx(expected, rel=0.01)
    assert residuals == pytest.approx(values - fit.intercept - fit.slope * np.arange(10))


@pytest.mark.parametrize("r, least", [(0.0, 0.91), (0.5, 0.90), (0.8, 0.83)])
def test_level_and_slope_are_covered_although_neighbours_resemble_each_other(r, least):
    """100 updates. A bootstrap that shuffles them covers the mean in 73% (r = 0.5), 50% (0.8)."""
    rng = np.random.default_rng(5)
    level = slope = 0
    for _ in range(200):
        x = rng.normal(size=100)
        for t in range(1, 100):  # AR(1) noise of variance 1, written out
            x[t] = r * x[t - 1] + math.sqrt(1 - r * r) * x[t]
        level += holds(metrics.level(x), 0)
        slope += holds(metrics.line(x)[0], 0)
    assert least <= level / 200 <= 0.985 and least <= slope / 200 <= 0.985


def test_the_peak_of_a_metric_overstates_its_mean():
    """Mean 0.53, peak 0.70: reporting the peak misleads by 32%, as in a published blog post."""
    said = metrics.distribution([0.53] * 87 + [0.70] + [0.53 - 0.17 / 12] * 12)
    assert said.startswith("mean 0.53 [") and "over 100 updates, median 0.53" in said
    assert "the peak of 0.70 (update 88) overstates the mean by 32%" in said
    assert "5% to 95%: 0.05 to 0.95" in metrics.distribution(np.arange(101) / 100)
    assert "overstates the mean by 0%" in metrics.distribution([0.0, 0.0])


# ----------------------------------------------------------------------------------------- trend


def learning(seed: int, n: int, tau: float = 25.0) -> np.ndarray:
    """A run that rises from 0.15 to 0.93 and stays there, 64 episodes an update."""
    chance = 0.93 - 0.78 * np.exp(-np.arange(n) / tau)
    return np.random.default_rng(seed).binomial(64, chance) / 64


def first_settled(rewards) -> int | None:
    """After which update `train.py --until-converged` would stop."""
    lengths = range(30, len(rewards) + 1)
    return next((n for n in lengths if metrics.trend(rewards[:n]).settled), None)


def test_few_updates_are_never_called_settled():
    """Not significantly different from 0 is not the same as 0."""
    for n in (0, 1, 29):
        said = metrics.trend([0.5] * n).sentence
        assert said.startswith(f"cannot tell yet: {n} updates are too few")
    assert metrics.trend([0.5] * 30).settled
    for seed in range(10):
        t = metrics.trend(np.random.default_rng(seed).normal(0.5, 0.1, 30))
        assert not t.settled
        assert "still moving" in t.sentence or "may be anything from" in t.sentence


def test_a_run_that_has_learnt_is_called_settled_near_its_level():
    for seed in range(3):
        rewards = learning(seed, 220)
        stop = first_settled(rewards)
        t = metrics.trend(rewards[:stop])
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
    rising = metrics.trend(0.1 + 0.005 * np.arange(100))
    assert rising.sentence.startswith("still moving, +0.050 per 10 updates [+0.050, +0.050] over")
    falling = metrics.trend(learning(0, 100)[::-1])
    assert falling.sentence.startswith("still moving, -")
    collapse = np.r_[rng.binomial(64, 0.9, 60), rng.binomial(64, 0.15, 40)] / 64
    assert not any(metrics.trend(collapse[:n]).settled for n in range(61, 85))
    for n in (30, 45, 60):  # up and down again: the line is flat, the residuals are a slow wave
        hump = 0.5 + 0.3 * np.sin(np.pi * np.arange(n) / (n - 1)) + rng.normal(0, 0.02, n)
        assert abs(metrics.line(hump)[0].mean) < 0.02 and not metrics.trend(hump).settled
    calm, wild = rng.normal(0.5, 0.004, 40), rng.normal(0.5, 0.03, 15)
    spread = metrics.trend(np.r_[calm, wild], tolerance=0.02)
    assert "the spread went from 0.00" in spread.sentence


# ------------------------------------------------------------------------- adaptive window, cuts


def test_a_drop_is_found_where_it_was_and_the_window_begins_there():
    for seed in range(10):
        rng = np.random.default_rng(seed)
        before = learning(seed, 60, tau=8)  # the old rise does not hide it
        rewards = np.r_[before, rng.binomial(64, 0.4, 30) / 64]
        assert metrics.adaptive_window(rewards) <= 32
        assert abs(metrics.cuts(rewards[:75])[-1] - 60) <= 2
    cuts = lambda *values: metrics.cuts(np.concatenate(values))
    assert cuts([0.2] * 12, [0.7] * 8, [0.1] * 6)[-1] == 20
    assert cuts([0.2] * 5, [0.7] * 4) == [0]  # five are needed on both sides


def batches(level: np.ndarray, seed: int) -> np.ndarray:
    """Exact answers of updates of 8 tasks, 8 samples each; some tasks are hard, some easy."""
    rng = np.random.default_rng([seed, 1])
    share = rng.beta(
        *np.broadcast_arrays(level[:, None], (1 - level)[:, None], np.ones((1, 8)))[:2]
    )
    return rng.binomial(8, share).mean(axis=1) / 8


def test_a_level_is_passed_when_it_surely_is_and_not_when_five_updates_were_lucky():
    """Beside the rule of before: the mean of the last five reaches the bar."""
    of_five = lambda rewards, bar: len(rewards) >= 5 and np.mean(rewards[-5:]) >= bar
    first = lambda rule, x: next((n for n in range(1, len(x) + 1) if rule(x[:n], 0.75)), None)
    time = np.arange(100)
    below, slow, mastered = (
        [
            [first(rule, batches(level, seed)) for seed in range(40)]
            for rule in (of_five, metrics.passed)
        ]
        for level in (np.full(100, 0.7), 0.3 + 0.6 * (1 - np.exp(-time / 40)), np.full(9, 0.98))
    )
    promoted = [40 - found.count(None) for found in below]
    assert promoted[0] == 40 and promoted[1] <= 5  # it never reaches the bar
    early = [sum(n is not None and n < 57 for n in found) for found in slow]  # in update 57
    assert early[0] >= 30 and early[1] <= 5
    assert max(mastered[1]) <= 5
    assert not metrics.passed([1.0] * 4, 0.75) and metrics.passed([1.0] * 5, 0.75)


def test_the_present_settles_without_an_old_level_and_a_rise_of_now_moves():
    now = np.r_[batches(np.full(60, 0.3), 0), np.full(40, 0.8)]
    assert len(metrics.present(now)) <= 41 and metrics.present_trend(now).settled
    assert "still moving" in metrics.present_trend(0.1 + 0.005 * np.arange(100)).sentence


def test_more_noise_lengthens_the_window_and_a_steeper_trend_shortens_it():
    """The rule: lengthen when the variance is high, shorten when a clear trend appears."""

    def median(slope: float, noise: float) -> float:
        series = lambda seed: np.random.default_rng(seed).normal(slope * np.arange(120), noise)
        return np.median([metrics.adaptive_window(series(seed)) for seed in range(9)])

    assert median(0.002, 0.02) < median(0.002, 0.08) < median(0.002, 0.3)
    assert median(0.02, 0.05) < median(0.004, 0.05) < median(0.0, 0.05)
