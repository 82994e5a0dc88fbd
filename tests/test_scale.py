"""Protects lab/speed/scale.py: its commands in small, and the arithmetic of who sends what."""

import json
import math
from dataclasses import replace

import pytest

from lab.speed import bench, limits, scale
from lab.speed import memory as plans

LINK = {"all_reduce": {"seconds": 0.001, "bytes_per_second": 1e6}, "all_gather_object": {"seconds": 0.002, "bytes_per_second": 1e6}}
SENT = {"all_reduce": [10, 5e5], "all_gather_object": [3, 100]}
MEASURED = {
    "gathers": 2,
    "pickled_bytes_per_token": 10.0,
    "pickle_seconds_per_byte": 1e-9,
    "unpickle_seconds_per_byte": 2e-9,
    "environment_seconds_per_episode": 1e-3,
}


@pytest.fixture
def out(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(scale, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(limits, "PRODUCTS", {"cpu": (64,)})
    monkeypatch.setattr(limits, "HOST", 2**22)
    limits.measure.cache_clear()
    yield tmp_path / "results" / "bench"
    limits.measure.cache_clear()


def test_tokens_of_both_axes_are_timed_beside_their_limit(out):
    scale.tokens(episodes=(8, 16), replies=(4, 12), episodes_at=8, reply_at=4, rounds=1, threads=1)
    found = json.loads((out / "scale-tokens.json").read_text())
    assert [(r["episodes"], r["reply"]) for r in found["rows"]] == [(8, 4), (16, 4), (8, 12)]
    assert all(0 < r[what]["limit_microseconds"] < r[what]["microseconds"] for r in found["rows"] for what in ("sampling", "training"))
    assert found["largest_over_smallest"]["reply"]["sampling"]["measured"] >= 1


def test_processes_are_timed_counted_and_put_together(out, monkeypatch, tmp_path):
    """Two processes really run, and send what fast/parallel.py says; one alone runs here."""
    apart = scale.alone

    def here(world: int, *how) -> dict:
        if world > 1:
            return apart(world, *how)
        scale.one(tmp_path / "one.json", *how)
        return json.loads((tmp_path / "one.json").read_text())

    monkeypatch.setattr(scale, "alone", here)
    scale.processes(updates=2, max_tokens=6)
    found = json.loads((out / "scale-processes.json").read_text())
    sent = found["sent_by_one_of_two"]
    assert sent["all_reduce"] == {"calls": found["trained_tensors"], "bytes": found["trained_bytes"]}  # a call for each tensor that learns
    assert sent["all_gather_object"]["calls"] >= 1 and sent["all_gather_object"]["bytes"] > 1000
    assert [row["processes"] for row in found["rows"]] == list(range(1, 9)) and set(found["real_seconds"]) == {"1", "2"}
    assert found["rows"][0]["gradients"] == 0 < found["rows"][1]["gradients"]
    assert all(value > 0 for way in found["link_of_two"].values() for value in way.values())
    scale.cards()  # reads it
    paper = json.loads((out / "scale-cards.json").read_text())
    assert {(r["cards"], r["rank"], r["tasks"]) for r in paper["rows"]} == {
        (n, rank, t) for n in (1, 8, 64) for rank in (0, 32) for t in (8, 8 * n)
    }
    assert set(paper["presets"]) == {"swarm-published", "alphabet-published"}


def test_an_exchange_costs_calls_and_bytes():
    assert scale.exchange(1, SENT, LINK, 1e6, 1, 1) == {"gradients": 0.0, "episodes": 0.0}
    two, eight = (scale.exchange(n, SENT, LINK, 1e6, 1e-6, 2e-6) for n in (2, 8))
    assert two == pytest.approx({"gradients": 10 * 0.001 + 0.5, "episodes": 3 * 0.002 + 0.5 + 0.5 + 2.0})
    assert eight == pytest.approx({"gradients": 10 * 3 * 0.001 + 2 * 7 / 8 * 0.5, "episodes": 3 * 3 * 0.002 + 7 / 8 + 1 / 8 + 2.0})


def test_the_slowest_process_sets_the_pace():
    fixed = {n: {"rows": [{"seconds": n + 0.5 * n, "train": 0.5 * n, "pickled": 0.0},
                          {"seconds": n + 0.5 * n, "train": 0.5 * n, "pickled": 1.0}],
                 "pickle_seconds": 0.0, "unpickle_seconds": 0.0} for n in (1, 2, 3, 4, 8)}  # fmt: skip
    free = {name: {"seconds": 0.0, "bytes_per_second": 1e30} for name in LINK}
    of = lambda n: scale.simulate(n, fixed, SENT, free)
    assert of(1)["seconds"] == 12 and of(8)["seconds"] == pytest.approx(1.5) and of(3)["rollout"] == 3  # of 8 tasks somebody has three
    wild = fixed | {1: fixed[1] | {"rows": [{"seconds": s + 0.5, "train": 0.5, "pickled": 0.0} for s in (1.0, 3.0)]}}
    assert 2.9 < scale.simulate(8, wild, SENT, free)["rollout"] <= 3  # one of eight is nearly always slow


def test_on_paper_tasks_are_shared_out_whole_and_rows_by_tokens():
    setting = plans.ASKED["4b-lora"]
    at = lambda cards, tasks, setting=setting: scale.one_update(cards, tasks, setting, (192, 64), MEASURED)
    one, eight, more = at(1, 8), at(8, 8), at(64, 8)
    assert eight["sampling"] == more["sampling"] < one["sampling"]  # 56 of 64 sample nothing
    assert one["training"] == pytest.approx(8 * eight["training"]) == pytest.approx(64 * more["training"])
    assert one["exchange of gradients"] == 0 < eight["exchange of gradients"] < more["exchange of gradients"]
    assert at(8, 64)["exchange of episodes"] > eight["exchange of episodes"]  # every card unpacks all of them
    full = replace(plans.ASKED["4b-full"], checkpointing=True)
    calls = 3 * scale.H100["call"]
    assert eight["exchange of gradients"] == pytest.approx(
        504 * calls, rel=0.05
    )  # LoRA's many small sums cost their calls, not their bytes
    assert at(8, 8, full)["exchange of gradients"] == pytest.approx(398 * calls + 2 * 7 / 8 * 15 * 2**30 / scale.H100["nvlink"], rel=0.01)
    assert len(scale.trained_sizes("Qwen3-4B", 0)) == 398 and math.isclose(
        sum(scale.trained_sizes("Qwen3-4B", 0)) / 2**30, 15, rel_tol=0.01
    )
    assert all(one[name] > 0 for name in ("sampling", "training", "copy of the weights", "environment"))


def test_a_preset_is_planned_with_its_conversations():
    parts = scale.conversation("swarm-published", 1.0)
    assert len(parts) == 50 and parts[1::2] == (2048,) * 25 and sum(parts) == 25 * 2048 + 4700
    assert scale.conversation("alphabet-published", 0.25)[1] == 192
