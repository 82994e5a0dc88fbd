"""The verdicts of lab/swarm/findings.py, and the drill that pretraining shows for swarm: ids stay those of the observation above."""

import random
import re

import numpy as np
from scipy import stats

from lab.base import corpus
from lab.swarm.findings import between, correlation, ratio_change, verdict, within
from lab.swarm.trained import MEASURED
from metrics import Interval


def test_a_verdict_follows_the_interval_and_not_the_mean():
    up, down, open_ = Interval(0.2, 0.1, 0.3, 9), Interval(-0.2, -0.3, -0.1, 9), Interval(0.2, -0.1, 0.5, 9)
    assert verdict(up, 1) == verdict(down, -1) == "**came out**"
    assert verdict(up, -1) == verdict(down, 1) == "**came out the other way round**"
    assert verdict(open_, 1) == verdict(open_, -1) == verdict(None, 1) == "cannot be told"
    assert "did change" in verdict(down, 0) and "no change" in verdict(open_, 0)


def test_the_share_that_goes_unsubmitted():
    """Three quarters go unsubmitted before; a quarter and a half of two seeds after: -0.375, by two numbers that differ by 0.25."""
    before, after = np.array([[[4.0, 1.0]] * 30]), np.array([[[4.0, 3.0]] * 30, [[4.0, 2.0]] * 30])
    d = ratio_change(before, after)
    reach = stats.t.ppf(0.975, 1) * 0.125  # of two seeds whose scenarios are all alike
    assert np.allclose((d.mean, d.low, d.high), (-0.375, -0.375 - reach, -0.375 + reach)) and d.n == 2
    assert ratio_change(before, np.zeros((2, 30, 2))) is None


def test_scenarios_that_seeds_share_are_not_counted_as_many():
    """Three seeds whose correlations are 1, 1 and -1: nothing can be told, although 120 pooled pairs would agree."""
    rising = list(np.linspace(0, 1, 40))
    rows = {"used_post": [rising] * 3, "reward": [rising, rising, rising[::-1]]}
    d = correlation(rows, "used_post")
    assert np.isclose(d.mean, 1 / 3, atol=1e-5) and d.low < -1 and d.n == 3
    assert correlation(rows | {"used_post": [[1.0] * 40] * 3}, "used_post") is None


def made_up(worth: float, seeds: int) -> dict:
    """[seeds][40] of every measure: about `worth` times what it is worth in the base, from dice."""
    dice = np.random.default_rng(seeds)
    return {name: (worth * (i + 1) * dice.normal(1.0, 0.1, (seeds, 40))).tolist() for i, name in enumerate(MEASURED)}


def test_what_rises_everywhere_comes_out_and_what_should_have_fallen_came_the_other_way_round():
    rows = {text: found for text, _, _, found in within(made_up(1.0, 1), made_up(2.0, 3))}
    assert rows["reward rises"] == rows["more trades are proposed"] == "**came out**"
    assert rows["errors fall"] == "**came out the other way round**" and rows["reputation stagnates"] == "it did change here"
    same = {text: found for text, _, _, found in within(made_up(1.0, 1), made_up(1.0, 3))}
    assert same["reward rises"] == same["errors fall"] == "cannot be told"


def test_versions_are_compared_by_seeds():
    """Two seeds that differ by 1 and scenarios that differ by nothing: the interval is that of two numbers a side."""
    flat = lambda *levels: {name: [[level] * 40 for level in levels] for name in MEASURED}
    row = next(r for r in between(flat(1.0, 2.0), flat(1.2, 2.2)) if r[0].startswith("higher reward"))
    welch = stats.ttest_ind([1.2, 2.2], [1.0, 2.0], equal_var=False).confidence_interval(0.95)
    assert f"{welch.low:+.3f}, {welch.high:+.3f}" in row[2] and row[3] == "cannot be told"


def test_renumbered_ids_keep_their_order_and_who_is_who():
    given = ["- task_3 open\n- task_9 open\n- prop_1 from bot_2", '{"task_id": "task_9"} {"proposal_id": "prop_1"}']
    for seed in range(20):
        told, said = corpus.renumber(random.Random(seed), given)
        first, second = map(int, re.findall(r"task_(\d+)", told))
        assert first < second <= 16 and f'"task_{second}"' in said and "bot_2" in told
        assert re.search(r"prop_(\d+)", told)[0] in said
