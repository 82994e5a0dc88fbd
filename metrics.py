"""Numbers with their uncertainty.

No mean reward and no share is reported without its interval and n.

Why so strict? An earlier project, picoRL, evaluated on 32 tasks. It saw 41% rise to 56%
and fall to 44%, and called it a gain and a regression. But the 95% interval of 41% on
32 tasks reaches from 26% to 58%: all three may be the same number.

    mean         the method depends only on the values, so the same numbers get the same
                 interval everywhere:
                 all 0 or 1: Wilson's interval (1927), right even near 0% and 100%,
                 where ± is wrong;
                 under 100 values between 0 and 1: Wilson's with the measured spread,
                 which is less than that of 0s and 1s (Korn and Graubard 1998, without
                 its survey weights);
                 under 100 other values: Student's t (1908);
                 100 or more: bootstrap, the middle 95% of the means of resamples
                 (Efron 1979)
    proportion   the same, from a count
    gain         the same for the *differences*, task by task, if before and after
                 played the same tasks: the difficulty cancels, so the interval is
                 narrower than that of two means. Never Wilson's: a difference may be
                 negative even if no observed one was

Do the intervals contain the truth in 95 of 100 cases? With 2 to 64 made-up values they
do in 91 to 100; in 88 to 99 if successes are rare and whole groups of episodes succeed
together. Wilson's does in 95 on average over true shares, in 83 at worst. The bootstrap
does in only 50 with 2 values and in 88 with 8, so it needs 100 values. Skewed values
that are not between 0 and 1 (counts, seconds) do worse: 88 to 93 for exponential ones.
tests/test_metrics.py measures all of this. One weak spot it does not measure: 72 to 87
if one value in 200 is 0 and the others are near 1 (n = 64 to 256).

No interval of a mean has width 0. If all n values are equal, a share of up to 3.84 / (n
+ 3.84) of the unseen values may still differ (Wilson's bound; compare the "rule of
three", Hanley and Lippman-Hand 1983), and be anything between 0 and 1: see `alike`.

The second half looks at a metric over the updates of a run. Neighbouring values
resemble each other, so a bootstrap that shuffles them gives intervals that are too
narrow; a peak flatters; and a run that stopped at a round number may still have been
rising.

    level            the mean of consecutive updates, allowing for autocorrelation
    distribution     mean, median, tails and peak, in one sentence
    trend            has it settled, is it moving, or is it too early to tell?
    adaptive_window  how many of the last updates describe the present; decisions during
                     a run are based on these:
    passed           is the present level surely above a bar? (a curriculum goes up)
    present_trend    has the present settled? (--until-converged, the report)
    cuts             where did the level drop or rise?

docs/trust.md says how often these were wrong, on made-up runs with a known truth.

Run me: `python metrics.py` shows how wide an interval is at 32, 128 and 256 tasks, and
asks a made-up run whether it has settled.
"""

from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

# scipy is imported where it is needed: the doctor for others' logs works without it.

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


FEW = 100  # values; with fewer the bootstrap covers too little
Z2 = NormalDist().inv_cdf(0.975) ** 2


def mean(values) -> Interval:
    """A mean with its 95% interval: equal values have equal intervals."""
    from scipy import special

    values = np.asarray(values, dtype=float)
    n = len(values)
    if n and np.isin(values, (0, 1)).all():
        return proportion(values.sum(), n)
    if n >= FEW or not are_shares(values) or is_constant(values):
        return of_any(values, (0.0, 1.0))
    middle = float(values.mean())
    spread = values.var(ddof=1) / (middle * (1 - middle))  # of 0s and 1s it would be 1
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
    how = {"n_resamples": 5000, "method": "percentile", "rng": np.random.default_rng(0)}
    low, high = stats.bootstrap((values,), np.mean, **how).confidence_interval
    return Interval(middle, float(low), float(high), n)


def are_shares(values: np.ndarray) -> bool:
    return len(values) > 0 and 0 <= np.min(values) and np.max(values) <= 1


def is_constant(values: np.ndarray) -> bool:
    """Are all values equal, up to rounding?"""
    return len(values) < 2 or np.ptp(values) <= 1e-9 * max(1.0, abs(values[0]))


def alike(value: float, n: int, ends: tuple[float, float] = (0.0, 1.0)) -> Interval:
    """The mean of n equal values (or of a single one): unseen values may still differ.

    How many may differ is Wilson's bound for 0 of n. They may be anything between the
    ends, which reach to twice the value if it lies outside.
    """
    low, high = ends
    if not low <= value <= high:
        low, high = min(low, 2 * value), max(high, 2 * value)
    others = Z2 / (n + Z2)  # the share of those that may differ
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

STEP = 4.0  # a step in the level is this many standard errors high (cuts says why)
LEAST = 5  # and has at least this many updates on either side


def slow_noise(residuals: np.ndarray, fitted: int) -> float:
    """How far slow noise can carry an average: its deviation times Student's 97.5%.

    In an average over many updates fast noise cancels, while slow waves move it. So we
    write the residuals as cosine waves (a DCT), skip the first `fitted` waves, which
    the fit has removed (1: a mean; 2: a mean and a slope, which looks much like the
    slowest wave), and take the power of the next few. White noise has the same power in
    all waves, and nothing changes; autocorrelated noise has more in the slow ones, and
    the interval widens.

    This is the EWC (equal-weighted cosine) estimator of Lazarus, Lewis, Stock and
    Watson (2018, JBES 36(4), section 3), with their 0.4 n^(2/3) waves, but at least 8.
    With all n-1 waves it is the textbook t-interval. In 100 updates with a correlation
    of 0.5, Newey-West's intervals of a slope contain the truth in 82% of the cases and
    the moving-block bootstrap's of a mean in 89%; these do in 96% and 95% (commit
    22b9273, results/metrics).
    """
    from scipy import fft, special

    waves = fft.dct(residuals, norm="ortho")[fitted:]
    count = min(len(waves), max(8, round(0.4 * len(residuals) ** (2 / 3))))
    return float(np.sqrt(np.mean(waves[:count] ** 2)) * special.stdtrit(count, 0.975))


def level(values) -> Interval:
    """The mean of consecutive updates; its interval allows for autocorrelation.

    A series that rises has no level, and gets a wide interval. So do two values
    (Student's t with one degree of freedom). Shares get one between 0 and 1.
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


@dataclass(frozen=True)
class Trend:
    settled: bool
    sentence: str  # settled at which level, still moving, or too early to tell, and why


SHORTEST = 30  # updates: in fewer, nothing counts as settled


def trend(values, tolerance: float = 0.01, shortest: int = SHORTEST) -> Trend:
    """Has a metric settled? Call it after every update, with all values so far.

    "No significant slope" proves nothing: ten noisy updates show none either. So the
    burden of proof is reversed, as in a test of equivalence (Schuirmann 1987). A metric
    has settled only if

    1. the window is long enough to judge: the 95% interval of its slope reaches at most
       0.6 tolerances to each side. Of the windows 30, 38, 48, … the first that is
       precise enough is taken, so noisy metrics get long windows;
    2. that whole interval lies within ±tolerance per 10 updates (0.01: the next 100
       updates bring less than 0.1);
    3. the spread around the line is the same in both halves of the window (Levene's
       test with medians, p > 0.01).

    A hump in the window counts as slow noise and widens the interval. No detector sees
    the future: a run that waits 150 updates before it takes off has settled, until it
    takes off.
    """
    values = np.asarray(values, dtype=float)
    n = len(values)
    if n < shortest:
        told = f"cannot tell yet: {n} updates are too few, {shortest} is the least"
        return Trend(False, told)
    from scipy import stats

    is_precise = lambda slope: slope.high - slope.low <= 1.2 * tolerance
    windows = [shortest]
    while windows[-1] < n:
        windows.append(min(n, round(1.25 * windows[-1])))
    precise = [w for w in windows if is_precise(line(values[-w:])[0])]
    # If none is, take the later half: all values would mix in an early rise.
    window = precise[0] if precise else max(shortest, n // 2)
    slope, residuals = line(values[-window:])
    within = -tolerance < slope.low and slope.high < tolerance
    shown = slope.text(unit=" per 10 updates", sign="+")
    over = f"over the last {window}"
    if not within and (slope.low > 0 or slope.high < 0):
        return Trend(False, f"still moving, {shown} {over}")
    if not (precise and within):
        ends = f"from {slope.low:+.3f} to {slope.high:+.3f} per 10 updates"
        return Trend(False, f"cannot tell yet: {over} the slope may be anything {ends}")
    early, late = residuals[: window // 2], residuals[window // 2 :]
    if np.ptp(residuals) > 1e-9 and stats.levene(early, late).pvalue < 0.01:
        went = f"from {early.std():.3f} to {late.std():.3f}"
        return Trend(False, f"cannot tell yet: {over} the spread went {went}")
    # Over the window, or longer: since the level last stepped.
    now = level(values[min(n - window, cuts(values)[-1]) :])
    held = f"{now.text(2)} over the last {now.n} updates"
    return Trend(True, f"settled at {held} ({shown}, within ±{tolerance:g})")


def line(values: np.ndarray) -> tuple[Interval, np.ndarray]:
    """Least squares through 3 values or more: (slope per 10 updates, residuals [n]).

    This interval alone may have width 0: a curve that never varied has settled, as far
    as anyone can see.
    """
    n = len(values)
    time = np.arange(n) - (n - 1) / 2
    slope = float(time @ values / (time @ time))
    residuals = values - values.mean() - slope * time
    reach = slow_noise(residuals, 2) / np.sqrt(time @ time)
    low, high = 10 * float(slope - reach), 10 * float(slope + reach)
    return Interval(10 * slope, low, high, n), residuals


def biggest_step(values: np.ndarray) -> tuple[float, int]:
    """The best split of the series in two, with at least LEAST values on each side.

    Returns (difference of the two means in standard errors, where the right part
    begins). The noise comes from differences of neighbours (von Neumann 1941), so that
    an old rise cannot hide a fall.
    """
    n = len(values)
    left = np.arange(LEAST, n - LEAST + 1)  # sizes of the left part
    if len(left) == 0 or np.ptp(values) == 0:
        return 0.0, 0
    sums = np.cumsum(values - values.mean())
    gap = np.abs(sums[left - 1] / left - (sums[-1] - sums[left - 1]) / (n - left))
    gap = gap / np.sqrt(1 / left + 1 / (n - left))
    noise = np.std(np.diff(values)) / np.sqrt(2)
    height = float(gap.max() / noise) if noise > 0 else float("inf")
    return height, int(left[gap.argmax()])


def cuts(values: np.ndarray, threshold: float = STEP) -> list[int]:
    """Where the level stepped: [0, …], each the index of the first value after a step.

    Cut at the biggest step if it exceeds the threshold, then look to the right of it: a
    test like Worsley's (1979, JASA 74), in the spirit of ADWIN (Bifet and Gavaldà
    2007). The threshold is 4 and not 2 because the best of all splits is taken, again
    after every update. About one flat run of 200 updates in ten is cut by mistake, and
    far more if neighbours are correlated.
    """
    found = [0]
    while True:
        height, size = biggest_step(values[found[-1] :])
        if height <= threshold:
            return found
        found.append(found[-1] + size)


def adaptive_window(values) -> int:
    """How many of the last updates describe the present.

    It starts with all of them, so that noise averages out, drops what lies before a
    step (cuts), and halves the rest while a line through it hints at a slope (p < 0.2).
    Too short a window is imprecise; too long a window is wrong. On a slow rise it still
    lags, and a fixed window of 10 describes the present better (commit 22b9273,
    results/metrics).
    """
    from scipy import stats

    values = np.asarray(values, dtype=float)
    window = len(values) - cuts(values)[-1]
    while window >= 2 * LEAST:
        recent = values[-window:]
        flat = np.ptp(recent) == 0
        if flat or stats.linregress(np.arange(window), recent).pvalue > 0.2:
            break
        window //= 2
    return window


def present(values):
    """The last updates: as many of them as describe the present."""
    return values[-adaptive_window(values) :]


def passed(values, bar: float) -> bool:
    """Is the present level surely (97.5%) above a bar? Call it after every update.

    A noisy level is watched for longer, and one far above the bar passes after a few
    updates. A mean of the last five above the bar proves much less. On 100 made-up
    levels that stay at 0.70, it passed a bar of 0.75 within 120 updates in all of them;
    this test, in 7. On 100 that rise through the bar slowly, it passed too early in 89;
    this test, in 5 (and half a rise later; tests/test_metrics.py has both). Equal
    values show no noise to judge by: five of them count as they are.
    """
    recent = present(values)
    if is_constant(recent):
        return bool(len(recent) >= LEAST and recent[0] >= bar)
    return level(recent).low >= bar


def present_trend(values) -> Trend:
    """Has the present settled? An old level does not count; a current rise does."""
    return trend(values[-max(SHORTEST, adaptive_window(values)) :])


if __name__ == "__main__":
    print("41% right. How sure are we?")
    for n in (32, 128, 256, 1024):
        p = proportion(round(0.41 * n), n)
        print(f"  n={n:5}  95% interval {100 * p.low:.0f}% to {100 * p.high:.0f}%")
    rng = np.random.default_rng(0)
    hard = rng.random(256)  # how hard each task is, for both policies
    before, after = rng.random(256) < hard * 0.6, rng.random(256) < hard * 0.8
    print("\nthe same 256 tasks before and after:", mean(before), "->", mean(after))
    print("gain, paired:", gain(before, after))
    # A run that learns, and then has learnt.
    rewards = rng.binomial(64, 0.93 - 0.78 * np.exp(-np.arange(150) / 15)) / 64
    print("\na made-up run:", distribution(rewards))
    for done in (20, 60, 150):
        print(f"  after {done:3} updates:", trend(rewards[:done]).sentence)
