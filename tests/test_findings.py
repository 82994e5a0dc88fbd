"""The verdicts of lab/swarm/findings.py, and the drill that pretraining shows for swarm: ids stay those of the observation above."""

import random
import re

import numpy as np
from scipy import stats

from lab.base import corpus
from lab.swarm.findings import difference, ratio_change, verdict
from metrics import Interval


def test_a_verdict_follows_the_interval_and_not_the_mean():
    up, down, open_ = Interval(0.2, 0.1, 0.3, 9), Interval(-0.2, -0.3, -0.1, 9), Interval(0.2, -0.1, 0.5, 9)
    assert verdict(up, 1) == verdict(down, -1) == "**came out**"
    assert verdict(up, -1) == verdict(down, 1) == "**came out the other way round**"
    assert verdict(open_, 1) == verdict(open_, -1) == verdict(None, 1) == "cannot be told"
    assert "did change" in verdict(down, 0) and "no change" in verdict(open_, 0)


def test_the_share_that_goes_unsubmitted():
    before, after = np.array([[4.0, 1.0]] * 30), np.array([[4.0, 3.0]] * 30)
    d = ratio_change(before, after)
    assert np.allclose((d.mean, d.low, d.high), -0.5) and d.n == 30
    assert ratio_change(before, np.zeros((30, 2))) is None


def test_a_difference_is_welch_s_and_never_without_width():
    d, welch = difference([1.0, 2.0, 4.0], [5.0, 5.5]), stats.ttest_ind([5.0, 5.5], [1.0, 2.0, 4.0], equal_var=False)
    assert np.allclose((d.low, d.high), welch.confidence_interval(0.95))
    still = difference([0.0] * 5, [0.0] * 5)
    assert still.low < still.mean == 0.0 < still.high


def test_renumbered_ids_keep_their_order_and_who_is_who():
    given = ["- task_3 open\n- task_9 open\n- prop_1 from bot_2", '{"task_id": "task_9"} {"proposal_id": "prop_1"}']
    for seed in range(20):
        told, said = corpus.renumber(random.Random(seed), given)
        first, second = map(int, re.findall(r"task_(\d+)", told))
        assert first < second <= 16 and f'"task_{second}"' in said and "bot_2" in told
        assert re.search(r"prop_(\d+)", told)[0] in said
