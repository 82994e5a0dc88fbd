"""Numbers with their uncertainty.

Every mean reward and every share is reported with its interval and its n, the number
of values.

Why so strict? An earlier project, picoRL, evaluated on 32 tasks. It saw 41% rise to 56%
and fall to 44%, and called it a gain and a regression. But the 95% interval of 41% on
32 tasks reaches from 26% to 58%: all three may be estimates of the same number.

    proportion    a share, with Wilson's interval (1927). It is right even near 0% and
                  100%, where the usual ± is wrong
    mean          only the values decide which method is used, so the same values
                  always get the same interval:
                    all are 0 or 1: as proportion;
                    fewer than 100, all between 0 and 1: Wilson's, with the measured
                    variance in place of p (1 - p) (Korn and Graubard 1998, without
                    survey weights);
                    fewer than 100, not all between 0 and 1: Student's t (1908);
                    100 or more: bootstrap, the middle 95% of the means of resamples
                    (Efron 1979)
    gain          the mean of after - before, task by task: paired. The difficulty of
                  the tasks cancels, so the interval is narrower than that of two means.
                  Wilson's is never used: a difference may be negative even if no
                  observed one was

Neighbouring updates of a run resemble each other, so a bootstrap that shuffles them
gives intervals that are too narrow. The following functions allow for that:

    level         the mean of consecutive updates
    line, flat    the slope over updates; is it surely near 0?
    biggest_step  did the level change suddenly, and where?
    since_step    how many updates ago did it last change?
    distribution  mean, median, tails and peak in one sentence: a peak alone flatters

bookkeeping/settled.py uses them to make decisions while a run trains.

Do the intervals contain the truth in 95 of 100 cases? Measured, of 100:

    91 to 100    2 to 64 made-up values
    88 to 99     successes are rare, and whole groups of episodes succeed together
    95, 83       Wilson's interval: on average over true shares; for the worst share
    50, 88       the bootstrap's: of 2 values; of 8. So it is used only from 100 on
    88 to 93     exponential values, which are skewed and not between 0 and 1, as counts
                 or seconds are
    72 to 87     a weak spot: one value in 200 is 0, the others are near 1 (n = 64 to
                 256)

tests/test_metrics.py measures all but the last.

No interval of a mean has width 0. If all n values are equal, a share of up to
3.84 / (n + 3.84) of the unseen values may still differ (Wilson's bound; compare the
"rule of three", Hanley and Lippman-Hand 1983) and be anything between 0 and 1.

Run me: `python metrics.py` shows how wide an interval is at 32, 128 and 256 tasks, and
how much narrower the interval of a paired gain is.
"""

from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

# scipy is imported inside the functions that need it, so that bookkeeping/doctor.py can
# check the logs of other tools without it.

NAN = float("nan")


@dataclass(frozen=True)
class Interval:
    """A number with its 95% interval, and how many values it was computed from."""

    mean: float
    low: float
    high: float
    n: int

    def text(
        self, digits: int = 3, scale: float = 1, unit: str = "", sign: str = ""
    ) -> str:
        """'0.406 [0.255, 0.577]'. sign "+": a positive number shows its sign, too."""
        number = lambda x: f"{scale * x:{sign}.{digits}f}"
        return f"{number(self.mean)}{unit} [{number(self.low)}, {number(self.high)}]"

    def __str__(self) -> str:
        """'0.406 [0.255, 0.577], n=32'"""
        return f"{self.text()}, n={self.n}"

    def percent(self, digits: int = 1) -> str:
        """'40.6% [25.5, 57.7]'"""
        return self.text(digits, 100, "%")

    def signed(self, digits: int = 3) -> str:
        """A difference: '+0.125 [-0.031, +0.281]'"""
        return self.text(digits, sign="+")

    def points(self) -> str:
        """A difference of two percentages: '+12.5 points [-3.1, +28.1]'"""
        return self.text(1, 100, " points", "+")

    def within(self, low: float, high: float) -> "Interval":
        """The same mean, with both ends cut to what is possible."""
        return replace(self, low=max(low, self.low), high=min(high, self.high))


def proportion(successes: float, n: int) -> Interval:
    """A share with Wilson's 95% interval. n = 0 gives (nan, 0, 1)."""
    if n == 0:
        return Interval(NAN, 0.0, 1.0, 0)
    share = successes / n
    low, high = score_interval(round(successes) / n, Z2 / n)
    # Rounding must not move an end away from a share of 0 or 1.
    return Interval(share, min(low, share), max(high, share), n).within(0.0, 1.0)


FEW = 100  # with fewer values, bootstrap intervals miss the truth too often
Z2 = NormalDist().inv_cdf(0.975) ** 2  # 3.84


def mean(values) -> Interval:
    """A mean with its 95% interval; the same values always get the same interval."""
    from scipy import special

    values = np.asarray(values, dtype=float)
    n = len(values)
    if n and np.isin(values, (0, 1)).all():
        return proportion(values.sum(), n)
    if n >= FEW or not are_shares(values) or is_constant(values):
        return of_any(values, (0.0, 1.0))
    middle = float(values.mean())
    # the variance, relative to that of zeros and ones with the same mean
    spread = values.var(ddof=1) / (middle * (1 - middle))
    low, high = score_interval(middle, special.stdtrit(n - 1, 0.975) ** 2 * spread / n)
    return Interval(middle, low, high, n)


def of_any(values: np.ndarray, ends: tuple[float, float]) -> Interval:
    """The mean of values of any size.

    ends: the least and the most that a value can be; used only if all values are equal.
    """
    from scipy import special, stats

    n = len(values)
    middle = float(values.mean()) if n else NAN
    if n == 0 or is_constant(values):
        return alike(middle, n, ends)
    if n < FEW:
        reach = float(special.stdtrit(n - 1, 0.975) * values.std(ddof=1) / np.sqrt(n))
        return Interval(middle, middle - reach, middle + reach, n)
    options = {
        "n_resamples": 5000,
        "method": "percentile",
        "rng": np.random.default_rng(0),
    }
    low, high = stats.bootstrap((values,), np.mean, **options).confidence_interval
    return Interval(middle, float(low), float(high), n)


def are_shares(values: np.ndarray) -> bool:
    return len(values) > 0 and 0 <= np.min(values) and np.max(values) <= 1


def is_constant(values: np.ndarray) -> bool:
    """Are all values equal, up to rounding?"""
    return len(values) < 2 or np.ptp(values) <= 1e-9 * max(1.0, abs(values[0]))


def alike(value: float, n: int, ends=(0.0, 1.0), z2: float = Z2) -> Interval:
    """The mean of n equal values (or of a single one): unseen values may still differ.

    Wilson's bound for 0 of n says how many may differ. They may be anything between the
    ends. If the value lies outside the ends, these are widened to twice the value.
    z2: the square of the normal quantile; its default is that of 95%.
    """
    low, high = ends
    if not low <= value <= high:
        low, high = min(low, 2 * value), max(high, 2 * value)
    others = z2 / (n + z2)  # the share of those that may differ
    reach = (value - others * (value - low), value + others * (high - value))
    return Interval(value, *reach, n)


def score_interval(share: float, q2: float) -> tuple[float, float]:
    """The shares p with (share - p)² <= q2 p (1 - p): Wilson's formula."""
    middle = (share + q2 / 2) / (1 + q2)
    reach = np.sqrt(q2 * share * (1 - share) + q2**2 / 4) / (1 + q2)
    return float(middle - reach), float(middle + reach)


def gain(before, after) -> Interval:
    """Mean of after - before with its interval, paired: the same tasks in one order."""
    before, after = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    if before.shape != after.shape:
        raise ValueError(
            f"gain: before has {before.shape} values and after {after.shape}; "
            "both must be the same tasks"
        )
    both = np.concatenate([before, after])
    # the most that a task may have changed by
    most = max(1.0, float(np.ptp(both))) if len(both) else 1.0
    found = of_any(after - before, (-most, most))
    return found.within(-1.0, 1.0) if are_shares(both) else found


# ---------------------------------------------------------- over the updates of a run


def slow_noise(residuals: np.ndarray, fitted: int) -> float:
    """The deviation of slow noise, times the 97.5% quantile of Student's t.

    Divided by sqrt(n), that is how far slow noise can move the mean of n updates.

    In an average over many updates fast noise cancels, but slow waves do not. So we
    write the residuals as cosine waves (a DCT) and take the power of the slowest. The
    first `fitted` waves are skipped, because the fit has removed them: one if it was a
    mean, two if a mean and a slope, which looks much like the slowest wave. White noise
    has the same power in all waves, so nothing changes. Autocorrelated noise has more
    power in the slow ones, so the interval widens.

    This is the EWC (equal-weighted cosine) estimator of Lazarus, Lewis, Stock and
    Watson (2018, JBES 36(4), section 3), with their 0.4 n^(2/3) waves, but at least 8.
    With all n-1 waves it would be the textbook t-interval.

    On 1,000 made-up series of 100 updates with a correlation of 0.5, Newey-West's
    intervals of a slope (4 lags) contain the truth in 85% of the cases, ours in 95%.
    The moving-block bootstrap's intervals of a mean (blocks of 5) contain it in 87%,
    ours in 93%. (tests/test_metrics.py checks ours.)
    """
    from scipy import fft, special

    waves = fft.dct(residuals, norm="ortho")[fitted:]
    count = min(len(waves), max(8, round(0.4 * len(residuals) ** (2 / 3))))
    return float(np.sqrt(np.mean(waves[:count] ** 2)) * special.stdtrit(count, 0.975))


def level(values) -> Interval:
    """The mean of consecutive updates; its interval allows for autocorrelation.

    A series that rises has no level, and gets a wide interval. Two values get a wide
    one, too: Student's t has one degree of freedom. Shares get one between 0 and 1.
    """
    values = np.asarray(values, dtype=float)
    n = len(values)
    middle = float(values.mean()) if n else NAN
    if is_constant(values):
        return alike(middle, n)
    reach = slow_noise(values - middle, 1) / np.sqrt(n)
    found = Interval(middle, float(middle - reach), float(middle + reach), n)
    return found.within(0.0, 1.0) if are_shares(values) else found


def distribution(values) -> str:
    """Mean, median, tails and peak of a metric over updates, in one sentence."""
    values = np.asarray(values, dtype=float)
    average, peak = level(values), values.max()
    low, median, high = np.quantile(values, [0.05, 0.5, 0.95])
    beyond = 100 * (peak - average.mean) / max(abs(average.mean), 1e-9)
    return (
        f"mean {average.text(2)} over {len(values)} updates, median {median:.2f}, "
        f"5% to 95%: {low:.2f} to {high:.2f}; the peak of {peak:.2f} "
        f"(update {values.argmax() + 1}) overstates the mean by {beyond:.0f}%"
    )


def line(values: np.ndarray) -> tuple[Interval, np.ndarray]:
    """Least squares through 3 values or more: (slope per 10 updates, residuals [n]).

    This is the only interval that may have width 0: a curve that never varied has
    settled, as far as anyone can see.
    """
    n = len(values)
    time = np.arange(n) - (n - 1) / 2
    slope = float(time @ values / (time @ time))
    residuals = values - values.mean() - slope * time
    reach = slow_noise(residuals, 2) / np.sqrt(time @ time)
    low, high = 10 * float(slope - reach), 10 * float(slope + reach)
    return Interval(10 * slope, low, high, n), residuals


def flat(
    values: np.ndarray, tolerance: float, shortest: int
) -> tuple[bool, Interval, np.ndarray]:
    """Is the slope surely within ±tolerance per 10 updates? (yes or no, *line(…)).

    "No significant slope" proves nothing: ten noisy updates do not show one either. So
    the burden of proof is reversed, as in a test of equivalence (Schuirmann 1987). The
    last values are flat only if

    1. there are enough to judge: the 95% interval of their slope reaches at most 0.6
       tolerances to each side. We try the last 30, 38, 48, … values (if `shortest` is
       30) and take the first precise window, so noisy values get a long one;
    2. that whole interval lies within ±tolerance;
    3. the spread around the line is the same in both halves of the window (Levene's
       test with medians, p > 0.01).
    """
    from scipy import stats

    n = len(values)
    is_precise = lambda slope: slope.high - slope.low <= 1.2 * tolerance
    windows = [shortest]
    while windows[-1] < n:
        windows.append(min(n, round(1.25 * windows[-1])))
    precise = [w for w in windows if is_precise(line(values[-w:])[0])]
    # If none is precise, look at the later half: all values would mix in an early rise.
    window = precise[0] if precise else max(shortest, n // 2)
    slope, residuals = line(values[-window:])
    within = max(-slope.low, slope.high) < tolerance
    early, late = residuals[: slope.n // 2], residuals[slope.n // 2 :]
    same_spread = is_constant(residuals) or stats.levene(early, late).pvalue > 0.01
    verdict = n >= shortest and bool(precise) and within and same_spread
    return verdict, slope, residuals


LEAST = 5  # fewest values on each side of a step
STEP = 4.0  # a step in the level is higher than this many standard errors (since_step)


def biggest_step(values: np.ndarray) -> tuple[float, int]:
    """The best split of the series in two, with at least LEAST values on each side.

    Returns (difference of the two means in standard errors, size of the left part). The
    noise is measured by differences of neighbours (von Neumann 1941), so that an old
    rise cannot hide a fall.
    """
    n = len(values)
    if n < 2 * LEAST:
        return 0.0, 0
    left = np.arange(LEAST, n - LEAST + 1)  # sizes of the left part
    sums = np.cumsum(values - np.mean(values))[left - 1]  # of the left part
    # the same as |mean of left - mean of right| / sqrt(1 / left + 1 / (n - left))
    gap = np.abs(sums) * np.sqrt(n / left / (n - left))
    noise = max(1e-12, np.std(np.diff(values)) / np.sqrt(2))
    return float(gap.max() / noise), int(left[gap.argmax()])


def since_step(values: np.ndarray) -> int:
    """How many updates since the level last stepped; all, if it never did.

    We cut at the biggest step if it is high enough, and search again to the right of
    it: a test like Worsley's (1979, JASA 74), in the spirit of ADWIN (Bifet and Gavaldà
    2007). High enough means 4 standard errors and not 2, because we take the best of
    all splits, and do so again after every update. About one in ten flat runs of 200
    updates is cut by mistake, and far more if neighbours are correlated.
    """
    height, left = biggest_step(values)
    return since_step(values[left:]) if height > STEP else len(values)


if __name__ == "__main__":
    print("41% right, with its 95% interval. How sure are we?")
    for n in (32, 128, 256, 1024):
        print(f"  n={n:5}  {proportion(round(0.41 * n), n).percent(0)}")
    rng = np.random.default_rng(0)
    hard = rng.random(256)  # how hard each task is, for both policies
    before, after = rng.random(256) < hard * 0.6, rng.random(256) < hard * 0.8
    print("\nthe same 256 tasks before and after:", mean(before), "->", mean(after))
    print("gain, paired:", gain(before, after))
