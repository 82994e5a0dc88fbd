"""Protects results/reliability.md: it says what the results say, names tests that exist,
and the long run's line is fitted as its docstring promises."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lab.trust import longrun, reliability

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_is_what_the_results_say():
    assert reliability.OUT.read_text() == reliability.page()


@pytest.mark.parametrize("file, name", sorted({row[2:] for row in reliability.TRAINING + reliability.TRUST}))
def test_the_proof_exists(file, name):
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / f"{file}.py").read_text(), re.MULTILINE)


def test_what_failed_or_was_never_tried_cannot_hide(monkeypatch):
    results = {
        name: reliability.read(name)
        for name in (
            "faults/kill.json",
            "faults/storage.json",
            "hostile/fuzz.json",
            "hostile/attack.json",
            "longrun/longrun.json",
            "longrun/frozen.json",
        )
    }
    results["faults/kill.json"] |= {"equal": 48, "places_never_hit": ["backward"]}
    results["faults/storage.json"][0] |= {"ok": False, "equal": False}
    results["longrun/longrun.json"]["rss_mb_per_hour"] |= {"flat": False}
    monkeypatch.setattr(reliability, "read", results.__getitem__)
    page = reliability.page()
    assert "**48 of 50" in page and "Never hit: backward" in page and "1 did not" in page and "| NO |" in page and "does not hold 0" in page


# ------------------------------------------------------------------------------------------------ the long run


def test_a_leak_is_seen_and_noise_is_none():
    hours, dice = np.linspace(0.5, 2, 60), np.random.default_rng(0)
    noise = np.convolve(dice.normal(0, 40, 64), np.ones(5) / 5, "valid")  # neighbours resemble each other
    assert longrun.slope(hours, 2000 + noise)["flat"]
    leak = longrun.slope(hours, 2000 + 300 * hours + noise)
    assert leak["low"] < 300 < leak["high"] and not leak["flat"]


def test_a_slope_that_hugs_noise_is_called_flat_about_as_often_as_it_says():
    hours, dice = np.linspace(0.5, 2, 60), np.random.default_rng(1)
    flat = [longrun.slope(hours, np.convolve(dice.normal(0, 40, 62), np.ones(3) / 3, "valid"))["flat"] for _ in range(200)]
    assert 0.80 < np.mean(flat) < 0.99  # HAC intervals are a little short in small samples


def test_longer_replies_are_no_leak():
    hours, dice = np.linspace(0.5, 2, 60), np.random.default_rng(2)
    tokens = 30_000 + 4_000 * hours + dice.normal(0, 1_500, 60)
    rss = 1_000 + 0.05 * tokens + dice.normal(0, 30, 60)
    assert not longrun.slope(hours, rss)["flat"] and longrun.slope(hours, rss, tokens)["flat"]


def test_a_row_an_update_from_what_was_seen_while_it_ran():
    samples = [{"seconds": 10.0 * i, "update": i // 3, "rss_mb": 100.0 + i % 3, "cpu": 8.0 * i, "logs": 2**20 * i} for i in range(10)]
    lines = [{"update": u, "reply_tokens": 100.0, "n": 2, "trained_tokens": 160} for u in (1, 2, 3)]
    rows = longrun.by_update(samples, lines)
    assert [r["update"] for r in rows] == [1, 2, 3] and [r["rss_mb"] for r in rows] == [101.0] * 3
    assert [r["tokens_per_cpu_second"] for r in rows] == pytest.approx([360 / 24] * 3) and rows[1]["logs_mb"] == 6.0
    assert [r["after_evaluation"] for r in rows] == [True, False, False]
    assert longrun.by_update(samples[:4], lines)[-1]["update"] == 1  # one that has not ended has no row


def test_the_committed_report_comes_out_of_the_committed_samples(tmp_path, monkeypatch):
    kept = ROOT / "results" / "longrun"
    was = json.loads((kept / "longrun.json").read_text())
    monkeypatch.setattr(longrun, "KEPT", tmp_path)
    longrun.report(kept)
    again = json.loads((tmp_path / "longrun.json").read_text())
    for key in ("hours", "updates", "log_bytes_per_update"):
        assert again[key] == was[key]
    for key in (
        "rss_mb_per_hour",
        "rss_mb_per_hour_at_equal_tokens",
        "throughput_percent_per_hour",
        "throughput_percent_per_hour_at_equal_tokens",
    ):
        assert again[key] == pytest.approx(was[key])
