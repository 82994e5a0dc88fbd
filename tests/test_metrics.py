"""Protects the numbers behind every claim: Wilson's interval, the bootstrap, the paired gain, and
the level and slope of a metric over updates.

Expected values come from a published table, from the textbook, or from simulations whose truth is
known.
"""

import math

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
    assert paired.low > 0 and one.high > two.low


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
    x = np.random.default_rng(5).normal(size=(200, 100))
    for t in range(1, 100):  # AR(1) noise of variance 1, written out
        x[:, t] = r * x[:, t - 1] + math.sqrt(1 - r * r) * x[:, t]
    assert least <= np.mean([holds(metrics.level(row), 0) for row in x]) <= 0.985
    assert least <= np.mean([holds(metrics.line(row)[0], 0) for row in x]) <= 0.985


def test_the_peak_of_a_metric_overstates_its_mean():
    """Mean 0.53, peak 0.70: reporting the peak misleads by 32%, as in a published blog post."""
    said = metrics.distribution([0.53] * 87 + [0.70] + [0.53 - 0.17 / 12] * 12)
    assert said.startswith("mean 0.53 [") and "over 100 updates, median 0.53" in said
    assert "the peak of 0.70 (update 88) overstates the mean by 32%" in said
    assert "5% to 95%: 0.05 to 0.95" in metrics.distribution(np.arange(101) / 100)
    assert "overstates the mean by 0%" in metrics.distribution([0.0, 0.0])
