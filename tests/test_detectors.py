"""Protects lab/trust/windows.py: the made-up runs are what they claim to be, and mistakes are counted right."""

import numpy as np
import pytest

from lab.trust import windows as detectors


@pytest.mark.parametrize("icc", [0.0, 0.3, 0.8])
def test_made_up_updates_have_the_mean_and_the_variance_they_claim(icc):
    """Variance of a mean of 8 groups of 8: p(1-p)/64 (1 + 7 icc)."""
    values = detectors.episodes(np.full(20000, 0.3), icc, np.random.default_rng(0))
    assert values.mean() == pytest.approx(0.3, abs=0.005)
    assert values.var() == pytest.approx(0.3 * 0.7 / 64 * (1 + 7 * icc), rel=0.06)
    assert set(np.round(values * 64, 9) % 1) == {0.0}


def test_noise_that_remembers():
    x = detectors.wander(50000, 0.8, 0.05, np.random.default_rng(0))
    assert x.std() == pytest.approx(0.05, rel=0.05) and np.corrcoef(x[1:], x[:-1])[0, 1] == pytest.approx(0.8, abs=0.01)
    first = [detectors.wander(1, 0.8, 0.05, np.random.default_rng(seed))[0] for seed in range(2000)]
    assert np.std(first) == pytest.approx(0.05, rel=0.1)  # stationary from the start


def test_the_same_key_gives_the_same_run_and_another_key_another():
    one, two, other = (detectors.dice(*key).random(3).tolist() for key in (("a", 0.3, 1), ("a", 0.3, 1), ("a", 0.3, 2)))
    assert one == two != other


def test_calls_are_counted_too_soon_right_or_never():
    truth = np.r_[np.linspace(0, 0.5, 101), np.full(399, 0.5)]  # comes within 0.02 of its end at 97
    said = iter([30, 120, 150, None])
    rules = {"fake": lambda values: len(values) == answers[int(values[0])]}
    answers = list(said)
    (row,) = detectors.verdicts("fake", truth, "none", lambda run: np.full(400, float(run)), 4, rules)
    assert row["too_soon"]["mean"] == 0.25 and row["never"]["mean"] == 0.25 and row["right"] == 2
    assert row["plateau"] == 97 and row["said"][1] == 135


def test_false_alarms_are_counted_per_update_watched():
    paths = np.array([[1, 1, 5, 5], [1, 1, 1, 1]])  # heard after three updates; never in four
    assert detectors.rate(paths, 4.0) == pytest.approx(100 * 1 / 7)
    assert detectors.rate(paths, 9.0) == 0.0
    assert detectors.highest(lambda v: v[-1], np.array([3.0, 1.0, 2.0, 4.0]), 1).tolist() == [1.0, 2.0, 4.0]


def test_the_alarm_of_a_fixed_window_needs_both_sides():
    values = np.r_[np.tile([0.4, 0.6], 10), np.tile([0.9, 1.1], 5)]
    assert detectors.against_before(values, 20) == 0.0
    noise = np.std(np.diff(values)) / np.sqrt(2)
    assert detectors.against_before(values, 10) == pytest.approx(0.5 / (noise * np.sqrt(1 / 10 + 1 / 20)))
