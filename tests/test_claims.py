"""Protects lab/claims.py: the verdict follows the interval, each claim has its numbers, and the
tables of docs/trust.md are made of them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import tyro

import settings
from lab import claims, tables
from lab.claims import CLAIMS, Check, interval, verdict
from metrics import Interval

BY_NAME = {claim.name: claim for claim in CLAIMS}


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
    check = Check("", None, expect, margin=margin)
    assert verdict(check, Interval(0.0, low, high, 3)) == said
    moved = Interval(0.5, low + 0.5, high + 0.5, 3)
    assert verdict(replace(check, than=0.5), moved) == said


def test_parts_are_counted():
    assert claims.in_parts(["holds", "fails", "holds"]) == "2 hold, 1 fails"
    assert claims.in_parts(["holds", "holds"]) == "holds"


# ------------------------------------------------------------------------------- intervals
def test_three_seeds_give_the_textbook_interval():
    i = interval([1.0, 2.0, 3.0])  # mean 2, sd 1: 2 ± 4.303 / sqrt(3)
    assert (i.mean, i.n) == (2.0, 3) and i.high - 2 == pytest.approx(4.30265 / math.sqrt(3))
    assert interval([1.0]).low == -math.inf


def test_seeds_and_tasks_are_both_in_the_interval():
    noise = np.random.default_rng(0).normal(0, 0.3, 200)
    alike, apart = interval([noise] * 3), interval([noise - 0.2, noise, noise + 0.2])
    tasks_alone = 2 * 1.972 * noise.std(ddof=1) / math.sqrt(200)
    assert alike.high - alike.low == pytest.approx(tasks_alone, 1e-3)
    assert apart.high - apart.low > 3 * tasks_alone


def test_three_looks_are_wrong_less_often_than_one_in_twenty():
    """Made-up claims, of which none is so; by the rule's level, and by 95% at every look."""
    rng, check = np.random.default_rng(7), Check("", None, "above")
    wrong = {claims.LEVEL: 0, 0.95: 0}
    for _ in range(400):
        values = list(rng.normal(size=claims.LOOKS[-1]))
        for level in wrong:
            said = [verdict(check, interval(values[:look], level)) for look in claims.LOOKS]
            decided = [v for v in said if v != "undecided"]
            wrong[level] += decided[:1] == ["holds"]
    assert wrong[claims.LEVEL] <= 20 and wrong[claims.LEVEL] < wrong[0.95]


def test_seeds_are_judged_at_the_wider_interval_and_units_at_95():
    check, few, units = Check("", None), [0.0, 1.0, 2.0], list(np.arange(30.0))
    assert claims.judged_by(check, few) == interval(few, claims.LEVEL)
    assert claims.judged_by(check, units) == interval(units, 0.95)


# ------------------------------------------------------------------------------- the claims
def test_there_are_sixteen_claims_and_each_check_has_its_numbers():
    assert len(BY_NAME) == 16
    for claim in CLAIMS:
        found = claims.judge(claim, claims.kept(claim))
        assert [check for check, _, _ in found] == list(claim.checks)
        assert any(check.decides for check in claim.checks)
        for check, rows, said in found + claims.beside(claim):
            i = interval(rows, most=check.most)
            assert i.low <= i.mean <= i.high and i.n >= 3
            assert said or not check.decides, f"{claim.name}: {check.text} predicts nothing"


FLAGS = sorted({flags for claim in CLAIMS for flags in claim.arms.values()})


@pytest.mark.parametrize("flags", FLAGS)
def test_every_arm_is_a_command_line_that_train_accepts(flags):
    settings.check(tyro.cli(settings.Config, args=[*flags.split(), "--seed", "1"]))


@pytest.mark.parametrize("name", ["lessons", "claim_numbers"])
def test_the_page_has_the_tables(name):
    page = (tables.ROOT / "docs/trust.md").read_text(encoding="utf8")
    assert f"<!-- table: {name} -->\n{tables.TABLES[name]()}<!-- end -->" in page


def test_a_number_is_made_again_from_run_folders(tmp_path, capsys):
    """k = 16 has a signal in 12 of 100 groups more than k = 4; it has no third seed."""
    for arm, signal, seeds in (("k4", 0.5, (0, 1, 2)), ("k16", 0.62, (0, 1))):
        for seed in seeds:
            folder = tmp_path / f"{claims.home(BY_NAME['larger_k'].arms[arm])}-{seed}"
            folder.mkdir()
            at = lambda u, signal=signal: {
                "update": u,
                "groups_with_signal": signal if u < 11 else 9,
            }
            lines = [at(u) for u in range(1, 41)]
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
            (folder / "evals.jsonl").write_text('{"trained": true, "stage": "final"}')
            (folder / "summary.json").write_text(json.dumps({"config": {"k": int(arm[1:])}}))
    rows = claims.from_runs(BY_NAME["larger_k"], tmp_path)
    share, per_episode = rows.values()
    assert share == pytest.approx([0.12, 0.12])
    assert per_episode == pytest.approx([0.62 / 16 - 0.5 / 4] * 2)
    claims.main("larger_k", str(tmp_path))
    told = capsys.readouterr().out
    assert "+12.0 points" in told and "+41.2 points [+21.4, +61.1], 3 seeds" in told
    assert "--k 16 --num-tasks 4 --runs runs --name larger_k-k16-SEED" in told


def test_differences_are_of_the_same_seed_and_task():
    """GRPO's gain, of two tasks: one learnt and one lost."""
    evals = [{"stage": "after_sft", "exact": [0, 1]}, {"stage": "final", "exact": [1, 0]}]
    run, none = (
        claims.Run({}, [], evals),
        claims.Run({}, [], evals[:1] + [{**evals[0], "stage": "final"}]),
    )
    assert claims.gained(run).tolist() == [1, -1] and claims.gained(none).tolist() == [0, 0]
    arms = {"a": {0: run, 1: run}, "b": {1: none, 2: none}}
    (row,) = claims.less("a", "b")(arms)
    assert row.tolist() == [1, -1]


def test_an_unknown_claim_is_refused_in_a_sentence():
    with pytest.raises(SystemExit, match="^nonsense: there is no such claim; choose one of think"):
        claims.main("nonsense")
