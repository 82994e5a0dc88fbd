"""Protects the numbers behind every claim: Wilson's interval, the bootstrap, the paired gain, the collapse alarm, and what is said
about a metric over updates: its level, its distribution, whether it has settled, when it changed.

Expected values come from the textbook formula written out again, from a published table, or from simulations whose truth is known.
"""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

import metrics
import warm
from bookkeeping import tables
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
        interval = metrics.mean(rng.normal(3.0, 2.0, 40))
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


def held(draw, truth: float, n: int, rng, runs: int = 600, gains: bool = False) -> float:
    """In what share of samples of n values does the interval hold the truth?"""
    of = (lambda x: metrics.gain(np.zeros(n), x)) if gains else metrics.mean
    found = (of(draw(rng, n)) for _ in range(runs))
    return float(np.mean([i.low <= truth + 1e-12 and truth - 1e-12 <= i.high for i in found]))


def groups(right: float, like: float = 4.0):
    """Mean rewards of groups of 8 episodes of a task each; tasks differ in how often they are got right."""
    return lambda rng, n: rng.binomial(8, rng.beta(like * right, like * (1 - right), n)) / 8


SIZES = [2, 3, 4, 8, 16, 29, 30, 64]


@pytest.mark.parametrize("n", SIZES)
def test_an_interval_holds_the_truth_in_95_of_100_cases(n):
    """600 samples each: 0.95 measures 0.926 to 0.974 (2.7 errors). Conservative is allowed, and what is said of it stands in the module."""
    rng = np.random.default_rng(n)
    assert 0.926 <= held(lambda rng, n: rng.normal(3.0, 2.0, n), 3.0, n, rng) <= 0.974  # Student's t is exact here
    assert 0.926 <= held(lambda rng, n: rng.normal(0.1, 2.0, n), 0.1, n, rng, gains=True) <= 0.974
    assert held(lambda rng, n: rng.random(n), 0.5, n, rng) >= 0.926
    assert held(lambda rng, n: np.clip(rng.normal(0.5, 0.1, n), 0, 1), 0.5, n, rng) >= 0.92
    for right in (0.02, 0.05, 0.2, 0.5, 0.8, 0.95):
        assert held(groups(right), right, n, rng) >= 0.895, right
    assert held(groups(0.05, 1.0), 0.05, n, rng) >= 0.85  # hardly any group is mixed
    assert held(lambda rng, n: rng.exponential(10, n), 10, n, rng) >= 0.85  # counts, seconds
    differences = lambda rng, n: rng.choice([-1.0, 0.0, 1.0], n, p=[0.05, 0.8, 0.15])
    assert held(differences, 0.1, n, rng, gains=True) >= 0.9


@pytest.mark.parametrize("n", SIZES)
def test_wilson_holds_the_truth_in_95_of_100_cases_over_shares(n):
    """Exactly, from the binomial distribution. At 0 and 1, where the sample never varies, always."""
    intervals = [metrics.mean([1.0] * k + [0.0] * (n - k)) for k in range(n + 1)]
    assert intervals == [metrics.proportion(k, n) for k in range(n + 1)]

    def coverage(p: float) -> float:
        inside = np.array([i.low <= p + 1e-12 and p - 1e-12 <= i.high for i in intervals])
        return float(stats.binom.pmf(np.arange(n + 1), n, p)[inside].sum())

    found = [coverage(p) for p in (np.arange(500) + 0.5) / 500]
    assert 0.94 <= np.mean(found) <= 0.96 and min(found) >= 0.82
    assert coverage(0.0) == coverage(1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("n", [1, *SIZES, 256])
@pytest.mark.parametrize("value", [0.0, 0.25, 1.0, 3.0, -0.5, 0.1 + 0.2])
def test_no_interval_has_no_width(n, value):
    """Of n values that agree at most a share z²/(n + z²) of all differ (Wilson's bound for 0 of n), by as much as they can."""
    others = Z**2 / (n + Z**2)
    for interval in (metrics.mean([value] * n), metrics.level([value] * n)):
        assert interval.mean == pytest.approx(value) and interval.n == n
        assert others * 0.49 < interval.high - interval.low < others * 8
        assert interval.low - 1e-12 <= value <= interval.high + 1e-12
    gain = metrics.gain([0.0] * n, [value] * n)
    assert gain.high - gain.low > others * 0.9
    assert metrics.gain([value] * n, [value] * n).high == pytest.approx(others, rel=1e-3)


def test_values_that_agree_have_the_width_of_a_share_that_may_differ():
    others = Z**2 / (8 + Z**2)
    found = metrics.mean([0.25] * 8)
    assert (found.low, found.high) == pytest.approx((0.25 - 0.25 * others, 0.25 + 0.75 * others), abs=1e-4)
    assert metrics.mean([0.1 + 0.2, 0.3]).high > 0.7, "a difference by rounding is none"
    empty = metrics.mean([])
    assert empty.n == 0 and all(math.isnan(x) for x in (empty.mean, empty.low, empty.high))


def test_a_gain_of_rewards_above_one_may_be_larger_than_one():
    found = metrics.gain([0.0, 1.6] * 100, [0.0, 1.6] * 100)  # nothing changed in 200 tasks
    others = Z**2 / (200 + Z**2)
    assert (found.low, found.high) == pytest.approx((-1.6 * others, 1.6 * others), rel=1e-3)


def test_a_gain_is_no_share_even_if_nothing_got_worse():
    """Wilson's interval of 1 better task of 64 lies above 0; but a difference may be negative."""
    found = metrics.gain([0.0] * 64, [1.0] + [0.0] * 63)
    assert found.low <= 0 < found.high


@given(st.lists(st.sampled_from([0.0, 1.0]) | st.floats(0, 1), min_size=1, max_size=120))
@settings(max_examples=30, deadline=None)
def test_two_intervals_of_one_number_never_differ(values):
    assert metrics.mean(values) == tables.average(np.array([*values, np.nan]))


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
    assert metrics.gain(before, before).mean == 0.0 and metrics.gain([0, 0], [1, 1]).mean == 1.0


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


# ------------------------------------------------------------------------------------------------ level and line

NUMBERS = st.lists(st.floats(-100, 100), min_size=1, max_size=60)
OVER_UPDATES = {
    "level": metrics.level, "distribution": metrics.distribution, "trend": metrics.trend,
    "adaptive_window": metrics.adaptive_window, "change": metrics.change,
}  # fmt: skip


def wander(n: int, r: float, rng) -> np.ndarray:
    """AR(1) noise of variance 1, written out."""
    x = [rng.normal()]
    for _ in range(n - 1):
        x.append(r * x[-1] + math.sqrt(1 - r * r) * rng.normal())
    return np.array(x)


def learning(seed: int, n: int, tau: float = 25.0, episodes: int = 64) -> np.ndarray:
    """A run that rises from 0.15 to 0.93 and stays there."""
    return np.random.default_rng(seed).binomial(episodes, 0.93 - 0.78 * np.exp(-np.arange(n) / tau)) / episodes


@pytest.mark.parametrize("name", OVER_UPDATES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_is_named(name, bad):
    with pytest.raises(ValueError, match=f"{name}: value 3 of 40") as caught:
        OVER_UPDATES[name]([0.5] * 3 + [bad] + [0.5] * 36)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", OVER_UPDATES)
def test_a_table_is_no_series(name):
    with pytest.raises(ValueError, match="one number per update"):
        OVER_UPDATES[name]([[0.5, 0.6], [0.7, 0.8]])


@given(NUMBERS)
def test_a_level_holds_its_mean(values):
    interval = metrics.level(values)
    assert interval.low <= interval.mean <= interval.high and interval.n == len(values)
    assert interval.mean == pytest.approx(np.mean(values), abs=1e-9)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=60), st.floats(-5, 5), st.floats(0.1, 10))
def test_a_level_moves_and_stretches_with_its_values(values, shift, scale):
    assume(np.ptp(values) > 1e-3)  # what values that agree may yet be does not depend on their scale
    one, two = metrics.level(values), metrics.level([shift + scale * v for v in values])
    for field in ("mean", "low", "high"):
        assert getattr(two, field) == pytest.approx(shift + scale * getattr(one, field), abs=1e-6)


def test_short_series_get_the_textbook_t_interval():
    """Up to nine values all waves are used, and the sum of all squared waves is the sum of squares (Parseval)."""
    for n in (2, 3, 5, 9):
        values = np.random.default_rng(n).normal(size=n)
        low, high = stats.t.interval(0.95, n - 1, values.mean(), values.std(ddof=1) / np.sqrt(n))
        interval = metrics.level(values)
        assert (interval.low, interval.high) == pytest.approx((low, high))


def test_a_slope_of_few_values_gets_the_textbook_interval():
    values = np.random.default_rng(1).normal(size=10)
    fit = stats.linregress(np.arange(10), values)
    slope, residuals = metrics.line(values)
    reach = 10 * fit.stderr * stats.t.ppf(0.975, 8)
    assert slope.mean == pytest.approx(10 * fit.slope)
    assert (slope.low, slope.high) == pytest.approx((10 * fit.slope - reach, 10 * fit.slope + reach), rel=0.01)
    assert residuals == pytest.approx(values - fit.intercept - fit.slope * np.arange(10))


@pytest.mark.parametrize("r,least", [(0.0, 0.91), (0.5, 0.90), (0.8, 0.83)])
def test_the_level_and_the_slope_are_covered_although_neighbours_resemble_each_other(r, least):
    """100 updates. A bootstrap that shuffles the values covers the mean in 73% (r = 0.5) and 50% (r = 0.8) of such series."""
    rng = np.random.default_rng(5)
    level = slope = 0
    for _ in range(400):
        x = wander(100, r, rng)
        level += metrics.level(x).low <= 0 <= metrics.level(x).high
        slope += metrics.line(x)[0].low <= 0 <= metrics.line(x)[0].high
    assert least <= level / 400 <= 0.985 and least <= slope / 400 <= 0.985


def test_levels_of_nothing_one_and_constants():
    nothing = metrics.level([])
    assert nothing.n == 0 and all(math.isnan(x) for x in (nothing.mean, nothing.low, nothing.high))
    assert metrics.level([0.3]) == metrics.alike(0.3, 1) and metrics.level([0.25] * 70) == metrics.alike(0.25, 70)
    two = metrics.level([0.4, 0.6])
    assert two.low < 0 and two.high > 1, "two values say next to nothing"


# ------------------------------------------------------------------------------------------------ distribution


def test_the_peak_of_the_blog_post_overstates_its_mean_by_a_third():
    """Mean 0.53, peak 0.70: reporting the peak misleads by 32%."""
    rewards = [0.53] * 87 + [0.70] + [0.53 - 0.17 / 12] * 12
    d = metrics.distribution(rewards)
    assert d.mean.mean == pytest.approx(0.53) and d.peak == 0.70 and d.peak_index == 87 and d.n == 100
    assert d.overstates == pytest.approx(100 * (0.70 / 0.53 - 1)) and round(d.overstates) == 32
    assert "the peak of 0.70 (update 88) overstates the mean by 32%" in d.sentence() and "\n" not in d.sentence()


def test_quantiles_against_a_known_list():
    d = metrics.distribution(np.arange(101) / 100)
    assert (d.median, d.q05, d.q95, d.peak, d.peak_index) == pytest.approx((0.5, 0.05, 0.95, 1.0, 100))
    assert d.flips == 0.0  # a straight line never turns around


def test_white_noise_turns_around_in_two_thirds_of_its_steps_and_a_zigzag_always():
    assert metrics.distribution(np.random.default_rng(0).normal(size=20000)).flips == pytest.approx(2 / 3, abs=0.01)
    assert metrics.distribution([0, 1] * 10).flips == 1.0
    assert math.isnan(metrics.distribution([0.5] * 9).flips)  # nothing moves, so nothing turns


@pytest.mark.parametrize("share", [0.5, 0.97, 0.99])
def test_so_does_noise_on_a_grid_where_neighbours_are_often_equal(share):
    batches = np.random.default_rng(1).binomial(64, share, size=20000) / 64
    assert metrics.distribution(batches).flips == pytest.approx(2 / 3, abs=0.01)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.randoms(use_true_random=False))
def test_order_matters_to_flips_and_intervals_but_not_to_the_rest(values, random):
    shuffled = list(values)
    random.shuffle(shuffled)
    one, two = metrics.distribution(values), metrics.distribution(shuffled)
    for field in ("median", "q05", "q95", "peak", "n"):
        assert getattr(one, field) == getattr(two, field)
    assert one.mean.mean == pytest.approx(two.mean.mean)
    assert one.q05 <= one.median <= one.q95 <= one.peak == values[one.peak_index]
    assert one.peak_index == values.index(max(values))
    assert math.isnan(one.flips) or 0 <= one.flips <= 1
    one.sentence()


def test_distributions_of_nothing_and_of_zeros():
    nothing = metrics.distribution([])
    assert nothing.n == 0 and nothing.peak_index == -1 and math.isnan(nothing.peak) and nothing.sentence() == "no updates"
    assert metrics.distribution([0.0, 0.0]).overstates == 0.0
    assert metrics.distribution([-1.0, 1.0]).overstates == math.inf  # a mean of 0 is overstated without bound
    single = metrics.distribution([0.4])
    assert single.mean == metrics.alike(0.4, 1) and math.isnan(single.flips) and "turn around" not in single.sentence()


# ------------------------------------------------------------------------------------------------ trend


def first_settled(rewards) -> int | None:
    """After which update `train.py --until-converged` would stop."""
    return next((n for n in range(1, len(rewards) + 1) if metrics.trend(rewards[:n]).settled), None)


def test_few_updates_are_never_called_settled():
    """Not significantly different from 0 is not the same as 0."""
    for n in range(30):
        t = metrics.trend([0.5] * n)
        assert not t.settled and t.verdict == "cannot tell" and f"{n} updates are too few" in t.sentence()
    assert metrics.trend([0.5] * 30).settled
    for seed in range(30):
        noisy = np.random.default_rng(seed).normal(0.5, 0.1, 30)
        t = metrics.trend(noisy)
        assert not t.settled and t.window == 30
        assert t.verdict == "moving" or "may be anything from" in t.sentence()


def test_a_run_that_has_learnt_is_called_settled_near_its_level():
    for seed in range(8):
        rewards = learning(seed, 220)
        stop = first_settled(rewards)
        assert stop is not None and 80 <= stop <= 220, stop
        t = metrics.trend(rewards[:stop])
        assert t.level.mean == pytest.approx(0.92, abs=0.03) and 20 <= t.since <= stop - 29
        assert -0.01 < t.slope.low <= t.slope.mean <= t.slope.high < 0.01
        assert t.sentence().startswith(
            f"settled at {t.level.mean:.2f} [{t.level.low:.2f}, {t.level.high:.2f}] since about update {t.since}"
        )


def test_a_rising_run_is_never_called_settled():
    """Twice the tolerance or more, asked after every update of 300."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        for slope in (0.002, 0.0025):
            assert first_settled(rng.binomial(64, 0.15 + slope * np.arange(300)) / 64) is None
    t = metrics.trend(0.1 + 0.005 * np.arange(100))
    assert t.verdict == "moving" and t.slope == Interval(pytest.approx(0.05), pytest.approx(0.05), pytest.approx(0.05), t.window)
    assert t.sentence().startswith("still moving, +0.050 per 10 updates [+0.050, +0.050] over the last")


def test_a_falling_run_is_moving_too():
    t = metrics.trend(learning(0, 100)[::-1])
    assert t.verdict == "moving" and t.slope.high < 0 and "still moving, -" in t.sentence()


def test_a_collapse_in_the_window_is_not_rest():
    rng = np.random.default_rng(0)
    rewards = np.r_[rng.binomial(64, 0.9, 60), rng.binomial(64, 0.15, 40)] / 64
    assert not any(metrics.trend(rewards[:n]).settled for n in range(61, 85))


def test_a_hump_without_a_slope_is_not_rest():
    """Up and down again within the window: the straight line is flat, the residuals are one slow wave."""
    rng = np.random.default_rng(0)
    for n in (30, 45, 60):
        hump = 0.5 + 0.3 * np.sin(np.pi * np.arange(n) / (n - 1)) + rng.normal(0, 0.02, n)
        assert abs(metrics.line(hump)[0].mean) < 0.02
        assert not metrics.trend(hump).settled


def test_a_spread_that_still_changes_is_not_rest():
    rng = np.random.default_rng(1)
    calm, wild = rng.normal(0.5, 0.004, 40), rng.normal(0.5, 0.03, 40)
    assert metrics.trend(np.r_[calm, calm[::-1]]).settled
    t = metrics.trend(np.r_[calm, wild][:55], tolerance=0.02)
    assert t.verdict == "cannot tell" and "the spread went from 0.00" in t.sentence()


def test_noisier_metrics_get_longer_windows():
    windows = [metrics.trend(np.random.default_rng(2).normal(0.5, sd, 400)).window for sd in (0.005, 0.03, 0.1)]
    assert windows[0] == 30 and windows[0] < windows[1] < windows[2]


def test_a_tolerance_is_a_tolerance():
    steady = 0.2 + 0.0008 * np.arange(100)  # 0.008 per 10 updates
    assert metrics.trend(steady).settled and not metrics.trend(steady, tolerance=0.005).settled
    for tolerance, shortest in ((0.0, 30), (-1.0, 30), (float("nan"), 30), (0.01, 9)):
        with pytest.raises(ValueError, match="tolerance"):
            metrics.trend(steady, tolerance, shortest)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 120), st.floats(0.0, 0.2), st.floats(-0.01, 0.01))
def test_a_trend_keeps_its_promises_whatever_the_series(seed, n, noise, slope):
    values = 0.5 + slope * np.arange(n) + np.random.default_rng(seed).normal(0, 1, n) * noise
    t = metrics.trend(values)
    assert t.verdict in ("settled", "moving", "cannot tell") and "\n" not in t.sentence()
    assert t.window <= n and (t.window >= 30 or t.window == n)
    if t.settled:
        assert n >= 30 and -t.tolerance < t.slope.low <= t.slope.high < t.tolerance
        assert 1 <= t.since <= n - t.window + 1 and t.level.n == n - t.since + 1
    if t.verdict == "moving":
        assert t.slope.low > 0 or t.slope.high < 0
    mirrored = metrics.trend(1 - values)
    assert mirrored.verdict == t.verdict and mirrored.window == t.window


# ------------------------------------------------------------------------------------------------ adaptive window, change


def test_the_biggest_step_against_the_formula():
    values = np.random.default_rng(0).normal(size=40)
    values[25:] += 3
    size, where = metrics.biggest_step(values)
    noise = math.sqrt(sum((b - a - np.mean(np.diff(values))) ** 2 for a, b in zip(values, values[1:])) / 39 / 2)
    every = {k: abs(values[:k].mean() - values[k:].mean()) / (noise * math.sqrt(1 / k + 1 / (40 - k))) for k in range(5, 36)}
    assert where == 25 == max(every, key=every.get) and size == pytest.approx(every[25])
    for shift in (1e6, -1e6):
        assert metrics.biggest_step(values + shift)[1] == 25  # no cancellation far from 0


def test_an_old_rise_does_not_hide_a_fall():
    """The variance of everything so far is large after a rise; the noise between neighbours is not."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rewards = np.r_[learning(seed, 60, tau=15), rng.binomial(64, 0.5, 6) / 64]
        seen = metrics.change(rewards)
        assert abs(seen.update - 61) <= 1 and seen.after.mean < seen.before.mean


def test_without_a_change_the_window_is_everything():
    whole = sum(metrics.adaptive_window(np.random.default_rng(seed).normal(0.5, 0.06, 150)) == 150 for seed in range(60))
    assert whole >= 40  # it is shortened at the hint of a slope, in a fifth of the cases
    for n in (0, 1, 5, 9):
        assert metrics.adaptive_window(np.random.default_rng(0).random(n)) == n
    assert metrics.adaptive_window([0.3] * 80) == 80


def test_a_hint_of_a_slope_halves_the_window():
    seen = set()
    for seed in range(30):
        values = 0.5 + 0.002 * np.arange(40) + np.random.default_rng(seed).normal(0, 0.05, 40)
        if metrics.cuts(values) == [0]:
            seen.add(metrics.adaptive_window(values))
    assert seen <= {40, 20, 10, 5} and len(seen) >= 3


def test_after_a_step_the_window_begins_at_the_step():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rewards = np.r_[rng.binomial(64, 0.8, 60), rng.binomial(64, 0.4, 30)] / 64
        assert metrics.adaptive_window(rewards) <= 32
        seen = metrics.change(rewards[:75])
        assert abs(seen.update - 61) <= 2 and seen.after.mean < 0.5 < 0.7 < seen.before.mean
        assert seen.before.n + seen.after.n <= 75 and seen.after.n == 75 - seen.update + 1
        assert seen.sentence().startswith("dropped from 0.") and f"at about update {seen.update}" in seen.sentence()
        assert metrics.change(1 - rewards[:75]).sentence().startswith("rose from 0.")


def test_more_noise_lengthens_the_window_and_a_steeper_trend_shortens_it():
    """The rule of the blog post: lengthen when the variance is high, shorten when a clear trend appears."""
    median = lambda slope, noise: np.median([
        metrics.adaptive_window(slope * np.arange(120) + np.random.default_rng(seed).normal(0, noise, 120)) for seed in range(15)
    ])  # fmt: skip
    assert median(0.002, 0.02) < median(0.002, 0.08) < median(0.002, 0.3)
    assert median(0.02, 0.05) < median(0.004, 0.05) < median(0.0, 0.05)


def test_a_flat_run_rarely_hears_a_change():
    """Asked after every update of 200: one run in ten is what the docstring promises."""
    heard = 0
    for seed in range(60):
        values = np.random.default_rng(seed).binomial(64, 0.6, 200) / 64
        heard += any(metrics.change(values[:n]) for n in range(10, 201))
    assert heard / 60 <= 0.2


def test_a_drop_from_080_to_040_is_heard_within_four_updates_of_the_least():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        values = np.r_[rng.binomial(64, 0.8, 60), rng.binomial(64, 0.4, 9)] / 64
        seen = metrics.change(values)
        assert seen is not None and seen.after.mean < seen.before.mean


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=60))
def test_cuts_leave_no_part_too_short(values):
    found = metrics.cuts(np.array(values))
    assert found[0] == 0 and all(b - a >= 5 for a, b in zip(found, found[1:])) and (len(found) == 1 or len(values) - found[-1] >= 5)
    window = metrics.adaptive_window(values)
    assert min(5, len(values)) <= window <= len(values)
    assert (metrics.change(values) is None) == (len(found) == 1)


def test_constant_pieces_are_cut_exactly():
    seen = metrics.change([0.2] * 12 + [0.7] * 8 + [0.1] * 6)
    assert seen == metrics.Change(21, metrics.level([0.7] * 8), metrics.level([0.1] * 6))
    assert metrics.change([0.2] * 5 + [0.7] * 4) is None  # five are needed on both sides


# ------------------------------------------------------------------------------------------------ the file itself


def test_the_module_runs_as_a_script():
    done = warm.run(["metrics.py"], ROOT)
    assert done.returncode == 0, done.stderr
    low, high = wilson(13, 32)
    assert f"{100 * low:.0f}% to {100 * high:.0f}%" in done.stdout and "gain, paired" in done.stdout


def test_values_that_differ_by_rounding_alone_are_constant_at_every_size():
    for size in (1e-3, 1.0, 1e6):
        rounding, real = 5e-10 * max(1.0, size), 2e-9 * max(1.0, size)
        assert metrics.is_constant(np.array([size, size + rounding]))
        assert not metrics.is_constant(np.array([size, size + real]))


def test_values_of_half_the_precision_are_computed_with_the_whole():
    values = np.random.default_rng(0).random(200).astype(np.float32)
    for some in (values[:9], values):
        assert metrics.mean(some) == metrics.mean(some.astype(float))


def test_a_gain_of_shares_never_leaves_what_is_possible():
    few = metrics.gain([1, 1, 0, 0], [0, 1, 0, 0])
    assert few.mean == -0.25 and few.low == -1.0 and few.high < 1
    points = metrics.gain([10.0, 20.0, 30.0, 5.0], [0.0, 20.0, 30.0, 5.0])  # of another scale: nothing is known of its ends
    assert points.low < -1
