"""Numbers with their uncertainty. Nothing in this project is reported without an interval and n.

Why so strict: the run this project grew out of evaluated on 32 tasks, saw 41% rise to 56% and fall to 44%, and called it
a gain and a regression. The 95% interval of 41% on 32 tasks reaches from 26% to 58%: all three numbers may be one.

    proportion   Wilson's interval (Wilson 1927): right near 0% and 100%, where the usual ± is wrong
    mean         bootstrap: resample the values, take the middle 95% of the means (Efron 1979)
    gain         bootstrap of the *differences*, task by task, when before and after saw the same tasks: the
                 difficulty of the tasks cancels, so the interval is narrower than that of two separate means

The second half is about a metric over the updates of a run. Its values resemble their neighbours, so a bootstrap that shuffles
them claims too much; a peak flatters; and a run that stopped at a round number may have been rising still:

    collapsed        has the reward fallen off a cliff? Asked after every update
    level            the mean of consecutive updates, with an interval that knows about autocorrelation
    distribution     mean, median, tails and peak, in one sentence
    trend            has it settled, is it still moving, or can nobody tell yet? Asked after every update
    adaptive_window  how many of the last updates speak for the present; change: when did it drop or rise?

How often each of these is wrong is measured by `python -m lab.trust.windows` (results/metrics/).

Run me: `python metrics.py` shows how wide an interval is at 32, 128 and 256 tasks, and asks a made-up run whether it has settled.
"""

from dataclasses import asdict, dataclass

import numpy as np
from scipy import fft, special, stats


@dataclass(frozen=True)
class Interval:
    """A number with its 95% interval, and of how many values it is."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}], n={self.n}"

    def percent(self) -> str:
        return f"{100 * self.mean:.1f}% [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    def dict(self) -> dict:
        return asdict(self)


def proportion(successes: float, n: int) -> Interval:
    """A share with Wilson's 95% interval. successes in [0, n]; n = 0 gives (nan, 0, 1)."""
    if n == 0:
        return Interval(float("nan"), 0.0, 1.0, 0)
    interval = stats.binomtest(round(successes), n).proportion_ci(0.95, method="wilson")
    return Interval(successes / n, float(interval.low), float(interval.high), n)


def mean(values, resamples: int = 5000) -> Interval:
    """A mean with its 95% percentile-bootstrap interval (seeded: the same values give the same interval)."""
    values = np.asarray(values, dtype=float)
    n = len(values)
    if n == 0:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    if n == 1 or np.all(values == values[0]):  # nothing varies: the bootstrap has nothing to say
        return Interval(float(values[0]), float(values[0]), float(values[0]), n)
    result = stats.bootstrap(
        (values,), np.mean, n_resamples=resamples, method="percentile", rng=np.random.default_rng(0)
    )
    low, high = result.confidence_interval
    return Interval(float(values.mean()), float(low), float(high), n)


def gain(before, after) -> Interval:
    """Mean of after - before over the same tasks in the same order, with its paired 95% bootstrap interval."""
    before, after = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    if before.shape != after.shape:
        raise ValueError(
            f"gain: before has {before.shape} values and after {after.shape}; both must be the same tasks"
        )
    return mean(after - before)


# ------------------------------------------------------------------------------------------------ over the updates of a run

STEP, LEAST = (
    4.0,
    5,
)  # a step of the level: its size in standard errors, and the fewest updates on either side (cuts says why)


def collapsed(rewards: list[float], window: int = 5) -> str | None:
    """Has a run fallen off a cliff? One sentence if the last `window` mean rewards lie far below the best `window`.

    Far: under 60% of the best, by more than 0.1 and by more than 5.5 standard errors. It is asked after every update and
    picks the best of all windows, so the usual three would cry wolf in most of the long noisy runs (31 of 40 simulated
    ones); with 5.5 none of 40 did in five settings, and a fall from 0.80 to 0.14 is still seen five updates later.
    """
    if len(rewards) < 2 * window:
        return None
    rolling = np.convolve(rewards, np.ones(window) / window, mode="valid")
    best, last = rolling.max(), rolling[-1]
    error = (
        np.std(np.diff(rewards)) / np.sqrt(2 * window) * np.sqrt(2)
    )  # noise of a difference of two window means
    if last < 0.6 * best and best - last > max(0.1, 5.5 * error):
        return (
            f"the mean reward of the last {window} updates is {last:.2f} and was {best:.2f} at its best: the policy has "
            "collapsed, most often because the learning rate is too high; try a third of it"
        )
    return None


def series(values, who: str) -> np.ndarray:
    """The values as [n] floats. NaN and infinity are refused: every number made from them would be NaN too."""
    values = np.asarray(values, dtype=float)
    if values.ndim != 1:
        raise ValueError(
            f"{who}: the values have shape {values.shape}; give one number an update, in order"
        )
    if not np.isfinite(values).all():
        bad = int(np.argmin(np.isfinite(values)))
        raise ValueError(
            f"{who}: value {bad} of {len(values)} is {values[bad]}; leave such updates out or mend what computes them"
        )
    return values


def slow_noise(residuals: np.ndarray, fitted: int) -> float:
    """How far the slow part of the noise can carry an average: standard deviation times Student's 97.5% quantile.

    An average over many updates lets fast noise cancel; what moves it are slow waves. So write the residuals as cosine waves (a DCT),
    skip the first `fitted` waves, which the fit has taken out (1: a mean; 2: a mean and a slope, which looks much like the slowest
    wave), and take the power of the next few. White noise has the same power in all waves and nothing changes; autocorrelated noise
    has more in the slow ones and the interval widens. This is the EWC (equal-weighted cosine) estimator of Lazarus, Lewis, Stock
    and Watson (2018, JBES 36(4), section 3), with their 0.4 n^(2/3) waves, but at least 8. With all n-1 waves it is exactly the
    textbook t-interval. In 100 updates with a correlation of 0.5, Newey-West's intervals of a slope hold the truth in 82%, the
    moving-block bootstrap's of a mean in 89%, these in 96% and 95% (results/metrics).
    """
    waves = fft.dct(residuals, norm="ortho")[fitted:]
    count = min(len(waves), max(8, round(0.4 * len(residuals) ** (2 / 3))))
    return float(np.sqrt(np.mean(waves[:count] ** 2)) * special.stdtrit(count, 0.975))


def level(values) -> Interval:
    """The mean of consecutive updates and its 95% interval, allowing for autocorrelation (slow_noise).

    A series that rises has no level, and gets a wide interval. So do two values (Student's t with one degree of freedom).
    """
    values = series(values, "level")
    n = len(values)
    middle = float(values.mean()) if n else float("nan")
    if n < 2 or np.ptp(values) == 0:
        return Interval(middle, middle, middle, n)
    reach = slow_noise(values - middle, 1) / np.sqrt(n)
    return Interval(middle, float(middle - reach), float(middle + reach), n)


@dataclass(frozen=True)
class Distribution:
    mean: Interval  # see level
    median: float
    q05: float
    q95: float
    peak: float
    peak_index: int  # from 0; -1 without values. Sentences count updates from 1
    overstates: float  # by how many percent of the mean the peak lies above it
    flips: float  # share of steps that turn around: up then down, or down then up. 2/3 if the values are white noise
    n: int

    def sentence(self) -> str:
        if self.n == 0:
            return "no updates"
        m = self.mean
        return (
            f"mean {m.mean:.2f} [{m.low:.2f}, {m.high:.2f}] over {self.n} updates, median {self.median:.2f}, 5% to 95%: "
            f"{self.q05:.2f} to {self.q95:.2f}; the peak of {self.peak:.2f} (update {self.peak_index + 1}) overstates the mean by {self.overstates:.0f}%"
            + (
                f"; {100 * self.flips:.0f}% of the steps turn around (67% is what pure noise does)"
                if self.flips == self.flips
                else ""
            )
        )


def distribution(values) -> Distribution:
    """Mean, median, tails and peak of a metric over updates.

    flips: of three independent values the middle one is highest or lowest in 4 of 6 orders, so white noise turns around in 2/3 of
    its steps (the turning-point test, Bienaymé 1874). Far below: a smooth curve. Near it: single updates say nothing.
    """
    values = series(values, "distribution")
    n, nan = len(values), float("nan")
    if n == 0:
        return Distribution(level([]), nan, nan, nan, nan, -1, nan, nan, 0)
    mean, peak = level(values), float(values.max())
    low, median, high = (float(q) for q in np.quantile(values, [0.05, 0.5, 0.95]))
    steps = np.diff(values)
    turns = (steps[1:] * steps[:-1])[steps[1:] * steps[:-1] != 0]  # a step of 0 has no direction
    overstates = (
        100 * (peak - mean.mean) / abs(mean.mean)
        if mean.mean
        else (0.0 if peak == 0 else float("inf"))
    )
    flips = float(np.mean(turns < 0)) if len(turns) else nan
    return Distribution(mean, median, low, high, peak, int(values.argmax()), overstates, flips, n)


@dataclass(frozen=True)
class Trend:
    verdict: str  # "settled", "moving" or "cannot tell"
    slope: Interval  # per 10 updates, over the last `window`
    window: int  # updates the slope was fitted to
    level: Interval  # if settled: since `since`; otherwise of the window
    since: int  # the update (from 1) since which the level holds, roughly
    tolerance: float
    why: str  # what is missing, if it cannot tell

    @property
    def settled(self) -> bool:
        return self.verdict == "settled"

    def sentence(self) -> str:
        s, m = self.slope, self.level
        slope = f"{s.mean:+.3f} per 10 updates [{s.low:+.3f}, {s.high:+.3f}]"
        if self.verdict == "settled":
            at = f"{m.mean:.2f} [{m.low:.2f}, {m.high:.2f}]"
            return f"settled at {at} since about update {self.since} ({slope}, within ±{self.tolerance:g})"
        if self.verdict == "moving":
            return f"still moving, {slope} over the last {self.window}"
        return f"cannot tell yet: {self.why}"


def trend(values, tolerance: float = 0.01, shortest: int = 30) -> Trend:
    """Has a metric settled? Made to be asked after every update, with all values so far.

    "No significant slope" is no evidence of rest: ten noisy updates show none either. So the burden of proof is turned round,
    as in a test of equivalence (Schuirmann 1987). It has settled only if

    1. the window is long enough to judge: its 95% interval for the slope reaches at most 0.6 tolerances to each side. Of the
       windows 30, 38, 48, … the first that is precise enough is taken: noisy metrics get long windows;
    2. that whole interval lies within ±tolerance per 10 updates (0.01: the next 100 updates bring less than 0.1);
    3. the spread around the line is the same in both halves of the window (Levene's test with medians, p > 0.01).

    A hump in the window counts as slow noise and widens the interval. No detector sees the future: a run that waits 150 updates
    before it takes off has settled, until it takes off.
    """
    values = series(values, "trend")
    if not tolerance > 0 or shortest < 10:
        raise ValueError(
            f"trend: tolerance {tolerance} must be positive and shortest {shortest} at least 10 updates"
        )
    n, window = len(values), shortest
    if n < shortest:
        none = Interval(float("nan"), float("nan"), float("nan"), n)
        return Trend(
            "cannot tell",
            none,
            n,
            level(values),
            1,
            tolerance,
            f"{n} updates are too few, {shortest} is the least",
        )
    slope, residuals = line(values[-window:])
    while window < n and slope.high - slope.low > 1.2 * tolerance:
        window = min(n, round(1.25 * window))
        slope, residuals = line(values[-window:])
    precise = slope.high - slope.low <= 1.2 * tolerance
    if (
        not precise
    ):  # say what the later half does: all of it would mix the rise of long ago with today
        window = max(shortest, n // 2)
        slope, residuals = line(values[-window:])
    within = -tolerance < slope.low and slope.high < tolerance
    early, late = residuals[: window // 2], residuals[window // 2 :]
    verdict, why = "cannot tell", ""
    if not within and (slope.low > 0 or slope.high < 0):
        verdict = "moving"
    elif not (precise and within):
        why = f"over the last {window} the slope may be anything from {slope.low:+.3f} to {slope.high:+.3f} per 10 updates"
    elif np.ptp(residuals) > 1e-9 and stats.levene(early, late).pvalue < 0.01:
        why = f"over the last {window} the spread went from {early.std():.3f} to {late.std():.3f}"
    else:
        since = min(n - window, cuts(values)[-1]) + 1
        return Trend("settled", slope, window, level(values[since - 1 :]), since, tolerance, "")
    return Trend(verdict, slope, window, level(values[-window:]), n - window + 1, tolerance, why)


def line(values: np.ndarray) -> tuple[Interval, np.ndarray]:
    """The straight line of least squares: its slope per 10 updates with 95% interval, and the residuals. Three values or more."""
    n = len(values)
    time = np.arange(n) - (n - 1) / 2
    slope = float(time @ values / (time @ time))
    residuals = values - values.mean() - slope * time
    reach = slow_noise(residuals, 2) / np.sqrt(time @ time)
    return Interval(10 * slope, 10 * float(slope - reach), 10 * float(slope + reach), n), residuals


def biggest_step(values: np.ndarray, least: int = LEAST) -> tuple[float, int]:
    """Split the series in two in every way that leaves `least` on each side: the largest difference of the two means in standard
    errors, and where. The noise comes from differences of neighbours (von Neumann 1941), so that an old rise cannot hide a fall."""
    n = len(values)
    left = np.arange(least, n - least + 1)  # sizes of the left part
    if len(left) == 0 or np.ptp(values) == 0:
        return 0.0, 0
    sums = np.cumsum(values - values.mean())
    gap = np.abs(sums[left - 1] / left - (sums[-1] - sums[left - 1]) / (n - left)) / np.sqrt(
        1 / left + 1 / (n - left)
    )
    noise = np.std(np.diff(values)) / np.sqrt(2)
    return float(gap.max() / noise) if noise > 0 else float("inf"), int(left[gap.argmax()])


def cuts(values: np.ndarray, threshold: float = STEP, least: int = LEAST) -> list[int]:
    """Where the level stepped: [0, …], each the index of the first value after a step.

    Cut at the biggest step if it exceeds the threshold, then go on with what is right of it: a test like Worsley's (1979, JASA
    74), in the spirit of ADWIN (Bifet and Gavaldà 2007). The threshold is 4 and not 2 because the best of all splits is taken,
    again after every update: about one flat run of 200 updates in ten is cut by mistake, far more if neighbours are correlated.
    """
    found = [0]
    while (step := biggest_step(values[found[-1] :], least))[0] > threshold:
        found.append(found[-1] + step[1])
    return found


def adaptive_window(values, threshold: float = STEP, least: int = LEAST) -> int:
    """How many of the last updates speak for the present. `level(values[-w:])` is then the current level.

    It starts with all of them, so that noise averages out, drops what lies before a step (cuts), and halves what is left while a line
    through it hints at a slope (p < 0.2: too short a window is imprecise, too long a one is wrong). On a slow rise it lags all the same,
    and a fixed window of 10 tells the present better: see results/metrics.
    """
    values = series(values, "adaptive_window")
    window = len(values) - cuts(values, threshold, least)[-1]
    while window >= 2 * least:
        recent = values[-window:]
        if np.ptp(recent) == 0 or stats.linregress(np.arange(window), recent).pvalue > 0.2:
            break
        window //= 2
    return window


@dataclass(frozen=True)
class Change:
    update: int  # the first update (from 1) at the new level, roughly
    before: Interval
    after: Interval

    def sentence(self) -> str:
        b, a = self.before, self.after
        verb = "dropped" if a.mean < b.mean else "rose"
        return f"{verb} from {b.mean:.2f} [{b.low:.2f}, {b.high:.2f}] to {a.mean:.2f} [{a.low:.2f}, {a.high:.2f}] at about update {self.update}"


def change(values, threshold: float = STEP, least: int = LEAST) -> Change | None:
    """The latest step of the level, a drop or a rise, or None. It needs `least` updates on both sides."""
    values = series(values, "change")
    last = cuts(values, threshold, least)[-1]
    if last == 0:
        return None
    earlier = cuts(values[:last], threshold, least)[
        -1
    ]  # what came before may have had its own steps
    return Change(last + 1, level(values[earlier:last]), level(values[last:]))


if __name__ == "__main__":
    print("41% right. How sure are we?")
    for n in (32, 128, 256, 1024):
        p = proportion(round(0.41 * n), n)
        print(f"  n={n:5}  95% interval {100 * p.low:.0f}% to {100 * p.high:.0f}%")
    print(
        "so on 32 tasks the first run's 41% -> 56% is",
        proportion(13, 32),
        "->",
        proportion(18, 32),
        "and they overlap.",
    )
    rng = np.random.default_rng(0)
    hard = rng.random(256)  # each task has its own difficulty, seen by both policies
    before, after = (rng.random(256) < hard * 0.6), (rng.random(256) < hard * 0.8)
    print(
        "\nthe same 256 tasks before and after:",
        proportion(before.sum(), 256),
        "->",
        proportion(after.sum(), 256),
    )
    print("gain, paired:", gain(before, after))
    assert proportion(13, 32).high > proportion(18, 32).low
    rewards = (
        rng.binomial(64, 0.93 - 0.78 * np.exp(-np.arange(150) / 15)) / 64
    )  # a run that learns and then has learnt
    print("\na made-up run:", distribution(rewards).sentence())
    for done in (20, 60, 150):
        print(f"  after {done:3} updates:", trend(rewards[:done]).sentence())
    print("  a fall:", change([*rewards, *rng.binomial(64, 0.3, 8) / 64]).sentence())
