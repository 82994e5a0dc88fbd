"""Protects lab/claims.py: the verdict follows the interval, each claim has its numbers, and the
commands that it prints are ones that train.py accepts."""

import math
import shlex
from dataclasses import replace

import pytest

import settings
from bookkeeping import refusals
from lab import claims
from lab.claims import Check, interval, verdict
from metrics import Interval


# ------------------------------------------------------------------------------- verdicts
@pytest.mark.parametrize(
    ("expect", "margin", "low", "high", "said"),
    [
        ("above", 0.0, 0.01, 0.3, "holds"),
        ("above", 0.0, -0.01, 0.3, "undecided"),
        ("above", 0.0, -0.3, -0.01, "fails"),
        ("above", 0.05, -0.01, 0.04, "fails"),  # too little to matter
        ("above", 0.05, 0.01, 0.04, "fails"),  # even if it is surely above 0
        ("below", 0.0, -0.3, -0.01, "holds"),
        ("below", 0.0, 0.01, 0.3, "fails"),
        ("equal", 0.05, -0.04, 0.04, "holds"),
        ("equal", 0.05, -0.04, 0.06, "undecided"),  # to find no difference is no evidence
        ("equal", 0.05, 0.06, 0.2, "fails"),
        ("equal", 0.05, -0.2, -0.06, "fails"),
        ("", 0.0, 0.1, 0.2, ""),
    ],
)
def test_the_verdict_follows_the_interval(expect, margin, low, high, said):
    check = Check("", expect=expect, margin=margin)
    assert verdict(check, Interval(0.0, low, high, 3)) == said
    assert verdict(replace(check, than=0.5), Interval(0.5, low + 0.5, high + 0.5, 3)) == said


# ------------------------------------------------------------------------------- intervals
def test_three_seeds_give_the_textbook_interval():
    i = interval([1.0, 2.0, 3.0])  # mean 2, sd 1: 2 ± 4.303 / sqrt(3)
    assert i.mean == 2.0 and i.high - 2 == pytest.approx(4.30265 / math.sqrt(3))
    assert interval([1.0, 2.0, 3.0], level=0.99).high - 2 == pytest.approx(9.92484 / math.sqrt(3))
    assert interval(["-0+", "-++"]).mean == pytest.approx(1 / 6)  # a sign per task
    apart = interval({"a": [1.0, 2.0, 3.0], "b": [0.0, 1.0, 2.0]})  # Welch: 4 degrees of freedom
    assert apart.mean == 1 and apart.high - 1 == pytest.approx(2.776445 * math.sqrt(2 / 3))


def test_seeds_are_judged_at_the_wider_interval_and_units_at_95():
    few, many = [1.5, 2.0, 2.5], [1.5, 2.0, 2.5] * 10
    said = lambda rows, than: Check("", rows, "above", than=than).verdict
    assert interval(few).low > 0.7 and said(few, 0.7) == "undecided"
    assert said(many, interval(many).low - 1e-9) == "holds"


# ------------------------------------------------------------------------------- the claims
@pytest.mark.parametrize("name", claims.CLAIMS)
def test_each_claim_has_its_numbers_and_commands(name, capsys):
    claims.main(name)
    *_, runs = capsys.readouterr().out.partition("Its runs")
    for line in runs.splitlines():
        if "train.py" in line:
            words = line.replace("SEED", "1").split("train.py")[1]
            refusals.check(settings.command_line(shlex.split(words))[0])
    found = claims.checks(name)
    assert any(check.decides for check in found)
    for check in found + claims.checks(name, beside=True):
        i = interval(check.rows, most=check.most)
        assert i.low <= i.mean <= i.high and len(check.rows) >= 2
        assert check.verdict or not check.decides, f"{check.text} predicts nothing"
