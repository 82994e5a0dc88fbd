"""Protects lab/claims/study.py: seeds are paired with seeds, and what is not there is left out."""

import json
from pathlib import Path

from lab.claims.study import Arm, Study, best_runs, played_runs


def test_a_missing_seed_ends_an_arm_so_that_seeds_stay_paired(tmp_path):
    study = Study(
        Path("runs"),
        tmp_path,
        {"a": Arm("a"), "b": Arm("b", "", {"low": "--lr 1", "high": "--lr 2"})},
        (0, 1, 2),
        "reward",
        str,
        lambda name: (),
    )
    for name, reward in (("a-0", 1.0), ("a-1", 1.0), ("a-2", 1.0), ("b-low-0", 0.1), ("b-high-0", 0.2), ("b-high-2", 0.9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps({"trained": "t", "eval": {"t": {"final": {"reward": reward}}}}))
    assert best_runs(study) == {"a": ["a-0", "a-1", "a-2"], "b": ["b-high-0"]}
    (tmp_path / "b-high-1").mkdir()
    (tmp_path / "b-high-1" / "summary.json").write_text("{}")
    assert best_runs(study)["b"] == ["b-high-0", "b-high-1", "b-high-2"]
    assert played_runs(study) == {}
    for name in ("a-0", "a-2", "b-high-0", "b-high-1"):
        (tmp_path / name / "held_out.json").write_text("{}")
    assert played_runs(study) == {"a": ["a-0"], "b": ["b-high-0", "b-high-1"]}
