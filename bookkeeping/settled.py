"""Has the reward settled? And how many of the last updates describe the present?

A run that stopped at a round number may still have been rising, and a run that has settled wastes
further updates. Which of the last updates should tell? Too short a window is imprecise; too long a
window is wrong. So no window here is fixed: it grows with the noise, and ends where the level
changed.

    trend            has it settled, is it still moving, or is it too early to tell?
    adaptive_window  how many of the last updates describe the present? Two decisions look at these:
    passed           is the present level surely above a bar? (a curriculum goes up)
    present_trend    has the present settled? (--until-converged, --stop-when-settled, the report)

The intervals are those of metrics.py. docs/trust.md says how often these decisions were wrong, on
made-up runs with a known truth.
"""

from dataclasses import dataclass

import numpy as np

import metrics

# scipy is imported where it is needed: that takes a second.

SHORTEST = 30  # updates: in fewer, nothing counts as settled


@dataclass(frozen=True)
class Trend:
    settled: bool
    sentence: str  # settled at which level, still moving, or too early to tell, and why


def trend(values, tolerance: float = 0.01) -> Trend:
    """Has a metric settled? Call it after every update, with all values so far.

    It has if its slope is surely within ±tolerance per 10 updates, in a window that is long enough
    to judge (metrics.flat). 0.01: the next 100 updates bring less than 0.1. A hump in the window
    counts as slow noise and widens the interval. No detector sees the future: a run that waits 150
    updates before it takes off has settled, until it takes off.
    """
    values = np.asarray(values, dtype=float)
    n = len(values)
    if n < SHORTEST:
        return Trend(False, f"cannot tell yet: {n} updates are too few, {SHORTEST} is the least")
    flat, slope, residuals = metrics.flat(values, tolerance, SHORTEST)
    shown = slope.text(unit=" per 10 updates", sign="+")
    if flat:
        # Its level is known best from all values since the last step, if they are more.
        now = metrics.level(values[-max(slope.n, metrics.since_step(values)) :])
        return Trend(
            True,
            f"settled at {now.text(2)} over the last {now.n} updates "
            f"({shown}, within ±{tolerance:g})",
        )
    if slope.low > 0 or slope.high < 0:
        return Trend(False, f"still moving, {shown} over the last {slope.n}")
    early, late = residuals[: slope.n // 2], residuals[slope.n // 2 :]
    return Trend(
        False,
        f"cannot tell yet: over the last {slope.n} the slope may be anything from "
        f"{slope.low:+.3f} to {slope.high:+.3f} per 10 updates, and the spread went from "
        f"{early.std():.3f} to {late.std():.3f}",
    )


def adaptive_window(values) -> int:
    """How many of the last updates describe the present.

    It starts with all since the last step (metrics.since_step), so that noise averages out, and
    halves them while a line through them hints at a slope (p < 0.2). On a slow rise it still lags,
    and a fixed window of 10 describes the present better.
    """
    from scipy import stats

    values = np.asarray(values, dtype=float)
    hints_at_slope = lambda y: stats.linregress(np.arange(len(y)), y).pvalue <= 0.2
    window = metrics.since_step(values)
    while window >= 2 * metrics.LEAST and hints_at_slope(values[-window:]):
        window //= 2
    return window


def present(values):
    """The last updates: as many of them as describe the present."""
    return values[-adaptive_window(values) :]


def passed(values, bar: float) -> bool:
    """Is the present level surely (97.5%) above a bar? Call it after every update.

    A noisy level is watched for longer, and one far above the bar passes after a few updates. A
    mean of the last five above the bar proves much less. On 100 made-up levels that stay at 0.70,
    it passed a bar of 0.75 within 120 updates in all of them; this test, in 7. On 100 that rise
    through the bar slowly, it passed too early in 89; this test, in 5 (and half a rise later;
    tests/test_settled.py has both). Equal values show no noise to judge by: five of them count as
    they are.
    """
    recent = present(values)
    if metrics.is_constant(recent):
        return bool(len(recent) >= metrics.LEAST and recent[0] >= bar)
    return metrics.level(recent).low >= bar


def present_trend(values) -> Trend:
    """Has the present settled? An old level does not count; a current rise does."""
    return trend(values[-max(SHORTEST, adaptive_window(values)) :])
