"""Protects the verdicts: which runs are one arm, what the interval holds, how often a winner is found where there is none."""

import json
import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import metrics
import warm
from bookkeeping import compare, records, report, significance
from bookkeeping.run import code_of, code_ran, note_code

ROOT = Path(__file__).resolve().parent.parent
CONFIG = {
    "env": "letters", "difficulty": 6, "reward": "partial", "think": True, "loss": "grpo", "lr": 3e-4, "updates": 30, "seed": 0,
    "name": "x", "runs": "runs", "resume": "", "threads": 1, "wandb": False, "device": "auto", "save_every": 10,
}  # fmt: skip


@pytest.fixture
def make(tmp_path):
    """make(name, exact, flags) -> a finished run folder. exact: {label: right answers} or a list for tier 6."""

    def run(name: str, exact, updates: int = 30, **flags) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**CONFIG, "name": name, "updates": updates, **flags}))
        (folder / "summary.json").write_text("{}")
        lines = []
        for label, right in (exact if isinstance(exact, dict) else {"tier 6": exact}).items():
            right = [float(r) for r in right]
            line = {"tasks": label, "trained": label == "tier 6", "reward": [0.2 + 0.6 * r for r in right], "exact": right}
            line["reply_tokens"] = [9] * len(right)
            lines += [
                {"update": 0, "stage": "after_sft", **line, "exact": [0.0] * len(right)},
                {"update": updates, "stage": "final", **line},
            ]
        (folder / "evals.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        rewards = np.random.default_rng(len(name)).random(updates).tolist()
        if updates:
            (folder / "metrics.jsonl").write_text("".join(json.dumps({"update": i + 1, "reward": r}) + "\n" for i, r in enumerate(rewards)))
        return folder

    return run


def draws(p: float, n: int = 200, seed: int = 0) -> list[float]:
    return (np.random.default_rng(seed).random(n) < p).astype(float).tolist()


def rows_of(folders) -> list[dict]:
    return significance.compare(significance.group([significance.read(f) for f in folders]))[0]


# ------------------------------------------------------------------------------------------------ tasks without an answer


def drop(folder: Path, tasks: list[int]) -> Path:
    """As bridges/api.py writes it: the results of these tasks are not there, and their numbers are."""
    lines = records.lines(folder / "evals.jsonl")
    for line in lines:
        for name in ("reward", "exact", "reply_tokens"):
            line[name] = [v for i, v in enumerate(line[name]) if i not in tasks]
        line["missing"] = {str(i): "HTTP 503" for i in tasks}
    (folder / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_tasks_that_one_of_two_could_not_answer_are_left_out_and_the_rest_stay_paired(make):
    right = draws(0.5)
    flipped = [1 - r if i < 5 else r for i, r in enumerate(right)]  # what differs, only the dropped tasks would show
    a, b = drop(make("a", right), [0, 1, 2]), drop(make("b", flipped, think=False), [3, 4, 100])  # as many, and others
    row = next(row for row in rows_of([a, b]) if row["what"] == "exact")
    assert row["d"].difference.n == 194 and row["d"].difference.mean == 0 and row["d"].p == 1
    assert row["x"] == row["y"] == pytest.approx(np.mean([r for i, r in enumerate(right) if i > 4 and i != 100]))
    again = drop(make("c", right, seed=1), [7])  # a second seed of the first arm, with another gap
    arm = significance.group([significance.read(a), significance.read(again)])[0]
    assert arm.table("tier 6", "exact").shape == (2, 196)


def test_an_evaluation_over_an_api_is_an_arm_called_by_its_model(make):
    api = {"api_base": "https://host/v1", "lr": None, "updates": 0}
    folders = [
        make("a", draws(0.5), lr=1e-3),
        make("b", draws(0.6), api_base=""),
        make("c", draws(0.7), model="gpt-x", **api),
        make("d", draws(0.7), model="gpt-y", **api),
    ]
    arms = significance.group([significance.read(f) for f in folders])
    assert [arm.label for arm in arms] == ["lr=0.001", "lr=0.0003", "gpt-x over an API", "gpt-y over an API"]
    alone = significance.group([significance.read(f) for f in folders[1:]])
    assert [arm.label for arm in alone] == ["all other runs", "gpt-x over an API", "gpt-y over an API"]


def test_evaluations_of_one_model_over_an_api_are_told_apart_by_temperature_and_thinking(make):
    api = {"api_base": "https://host/v1", "model": "gpt", "lr": None, "updates": 0}
    given = ({"api_temperature": 0.0}, {"api_temperature": 1.0}, {"api_temperature": 0.0, "think": False})
    arms = significance.group([significance.read(make(f"r{i}", draws(0.5), **api, **more)) for i, more in enumerate(given)])
    assert [arm.label for arm in arms] == [
        "gpt over an API, think=True, api_temperature=0.0", "gpt over an API, think=True, api_temperature=1.0",
        "gpt over an API, think=False, api_temperature=0.0",
    ]  # fmt: skip


def test_two_that_answered_no_task_in_common_are_not_compared(make):
    a, b = drop(make("a", [1, 1, 0, 0]), [0, 1]), drop(make("b", [1, 1, 0, 0], think=False), [2, 3])
    rows, notes = significance.compare(significance.group([significance.read(f) for f in (a, b)]))
    assert rows == [] and "no task of tier 6 that both had an answer to" in notes[0]


# ------------------------------------------------------------------------------------------------ arms


def test_runs_that_differ_in_seed_and_name_are_one_arm(make):
    a = [
        make(f"a{s}", draws(0.9, seed=s), seed=s, runs=f"elsewhere{s}", threads=s, device="cpu", save_every=s + 1, micro_tokens=2**s)
        for s in range(3)
    ]
    b = [make(f"b{s}", draws(0.5, seed=9 + s), seed=s, think=False) for s in range(2)]
    arms = significance.group([significance.read(f) for f in [a[0], b[0], a[1], b[1], a[2]]])
    assert [(arm.letter, arm.label, arm.seeds()) for arm in arms] == [("A", "think=True", [0, 1, 2]), ("B", "think=False", [0, 1])]


def test_an_arm_is_called_by_the_flags_in_which_the_arms_differ(make):
    folders = [make("a", draws(0.5)), make("b", draws(0.5), loss="gspo"), make("c", draws(0.5), lr=1e-3)]
    labels = [arm.label for arm in significance.group([significance.read(f) for f in folders])]
    assert labels == ["loss=grpo, lr=0.0003", "loss=gspo, lr=0.0003", "loss=grpo, lr=0.001"]


def test_a_flag_that_an_older_run_does_not_know_sets_it_apart(make):
    folders = [make("old", draws(0.5)), make("new", draws(0.5), turns=3)]
    assert [arm.label for arm in significance.group([significance.read(f) for f in folders])] == ["turns=not set", "turns=3"]
    assert len(significance.group([significance.read(f) for f in folders], ("turns",))) == 1
    with pytest.raises(ValueError, match="--ignore truns"):
        significance.group([significance.read(f) for f in folders], ("truns",))


def test_two_runs_of_one_seed_count_as_one(make):
    folders = [make("a", [1, 1, 0, 0]), make("again", [1, 0, 0, 0], threads=2), make("b", [0, 0, 0, 0], seed=1)]
    (arm,) = significance.group([significance.read(f) for f in folders])
    assert arm.table("tier 6", "exact").tolist() == [[1, 0.5, 0, 0], [0, 0, 0, 0]]


# ------------------------------------------------------------------------------------------------ differences


def test_a_large_difference_is_found_and_its_sign_is_right(make):
    rows = rows_of([make("a", draws(0.3)), make("b", draws(0.9, seed=1), think=False)])
    assert [(row["what"], row["verdict"]) for row in rows] == [("exact", "B better"), ("reward", "B better")]
    exact, reward = rows[0]["d"], rows[1]["d"]
    assert exact.difference.mean == pytest.approx(np.mean(draws(0.3)) - np.mean(draws(0.9, seed=1))) and exact.difference.high < 0
    assert reward.difference.mean == pytest.approx(0.6 * exact.difference.mean)
    assert exact.over == "tasks only" and rows[0]["trained"]


def test_few_tasks_cannot_tell(make):
    """13 of 32 against 18 of 32, the claim that this project began with."""
    rows = rows_of([make("a", [1] * 13 + [0] * 19), make("b", [0] * 14 + [1] * 18, loss="gspo")])
    assert {row["verdict"] for row in rows} == {"cannot tell"} and all(row["d"].p > 0.05 for row in rows)


def test_pairing_finds_what_separate_means_cannot(make):
    """Eight tasks more and none less: by sign flips p = 2/2^8; as independent samples far from significant."""
    before = draws(0.5, 200)
    after = list(before)
    for i in [i for i, right in enumerate(before) if not right][:8]:
        after[i] = 1.0
    paired = significance.differ(np.array([after]), np.array([before]))
    assert paired.p == pytest.approx(2 / 2**8, abs=0.004) and paired.difference.low > 0
    assert stats.ttest_ind(after, before).pvalue > 0.2


def test_the_order_of_tasks_does_not_matter_to_a_pair():
    rng = np.random.default_rng(0)
    a, b, order = rng.random((3, 40)), rng.random((2, 40)), rng.permutation(40)
    one, two = significance.differ(a, b), significance.differ(a[:, order], b[:, order])
    assert one.p == pytest.approx(two.p) and one.difference.low == pytest.approx(two.difference.low)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(2, 30))
def test_a_difference_turns_its_sign_when_the_arms_change_places(seed, arms_a, arms_b, tasks):
    rng = np.random.default_rng(seed)
    a, b = rng.random((arms_a, tasks)).round(1), rng.random((arms_b, tasks)).round(1)
    one, two = significance.differ(a, b), significance.differ(b, a)
    assert one.difference.mean == pytest.approx(-two.difference.mean, abs=1e-12)
    assert one.difference.low <= one.difference.mean + 1e-12 and one.difference.mean - 1e-12 <= one.difference.high
    # Rounded values make ties, and the last bit decides whether a tie counts: 0.92 and 0.886 have been seen, of one and the same pair.
    assert 0 <= one.p <= 1 and one.p == pytest.approx(two.p, abs=0.08)
    assert one.over == ("seeds and tasks" if min(arms_a, arms_b) > 1 else "tasks only")


def test_the_variance_of_seeds_and_tasks_against_welch():
    """Without any difference between tasks, it is Welch's test on the means of the seeds."""
    a, b = np.array([0.2, 0.3, 0.45]), np.array([0.6, 0.5, 0.9, 0.8])
    d = significance.differ(np.repeat(a[:, None], 50, axis=1), np.repeat(b[:, None], 50, axis=1))
    welch = stats.ttest_ind(a, b, equal_var=False)
    assert d.p == pytest.approx(welch.pvalue) and d.over == "seeds and tasks"
    low, high = welch.confidence_interval(0.95)
    assert (d.difference.low, d.difference.high) == pytest.approx((low, high))


def test_many_comparisons_of_single_seeds_can_still_find_a_winner():
    """Holm multiplies the smallest of 600 p-values by 600: 1 / (resamples + 1) would never do."""
    rng = np.random.default_rng(0)
    a, b = (rng.random((1, 128)) < 0.9).astype(float), (rng.random((1, 128)) < 0.3).astype(float)
    assert significance.holm([significance.differ(a, b).p] + [0.5] * 599)[0] < 0.05


def test_the_bound_on_p_is_never_below_the_exact_p():
    """Every flip of few values, against what is said after no flip at all came as far."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        difference = rng.random(8) + rng.random() - rng.random(8)
        sums = np.array(list(product([-1, 1], repeat=8))) @ difference
        exact = np.mean(np.abs(sums) >= abs(sums[-1]) - 1e-9)
        assert exact <= significance.permutation_test(difference, resamples=0) <= 1.0


@pytest.mark.parametrize("arms", [(3, 2), (5, 2), (7, 2), (5, 3)])
def test_rounding_makes_no_winner_of_arms_that_are_alike(arms):
    """Every seed of both has the same rewards: sums of floats in another order differ by 1e-17, with as small a variance."""
    for seed in range(60):
        row = np.random.default_rng(seed).random(12)
        found = significance.differ(*(np.tile(row, (n, 1)) for n in arms))
        assert found.p > 0.05 and found.difference.high > found.difference.low, seed


def test_what_never_varies():
    ones, zeros = np.ones((2, 30)), np.zeros((2, 30))
    for a in (ones, ones[:1]):
        same = significance.differ(a, a)
        assert same.p == 1.0 and same.difference == metrics.alike(0.0, 30, (-1.0, 1.0))
    for a, b in ((ones, zeros), (ones[:1], zeros[:1])):
        d = significance.differ(a, b)
        assert d.p < 0.001 and d.difference == metrics.alike(1.0, 30, (-1.0, 1.0)) and d.difference.low > 0.7


def crossed(rng, seeds: int, tasks: int, sd: float) -> list[np.ndarray]:
    """Two arms without a difference: tasks are hard or easy, arms suit some tasks, seeds are lucky or not. [seeds, tasks] each."""
    hard = rng.normal(0, 1.5, tasks)
    logit = lambda: hard + rng.normal(0, 0.5, tasks) + rng.normal(0, sd, (seeds, 1))
    return [(rng.random((seeds, tasks)) < 1 / (1 + np.exp(-logit()))).astype(float) for _ in range(2)]


def two_way_bootstrap(a: np.ndarray, b: np.ndarray, rng, resamples: int = 300) -> tuple[float, float]:
    """Resample seeds of each arm and tasks of both (Owen 2007), take the middle 95%."""
    pick = lambda n: rng.multinomial(n, np.full(n, 1 / n), resamples) / n
    tasks = pick(a.shape[1])
    return tuple(np.quantile(((pick(len(a)) @ a - pick(len(b)) @ b) * tasks).sum(axis=1), [0.025, 0.975]))


def test_where_seeds_differ_a_winner_is_rarely_found_by_mistake():
    """And why it is neither sign flips over tasks nor a two-way bootstrap: both were the first idea."""
    rng, wrong = np.random.default_rng(0), dict.fromkeys(("ours", "bootstrap", "flips"), 0)
    for _ in range(300):
        a, b = crossed(rng, 2, 128, 0.5)
        wrong["ours"] += significance.differ(a, b).p < 0.05
        low, high = two_way_bootstrap(a, b, rng)
        wrong["bootstrap"] += not low <= 0 <= high
        d = a.mean(axis=0) - b.mean(axis=0)
        flipped = (rng.choice([-1, 1], (300, 128)) @ d) / 128
        wrong["flips"] += np.mean(np.abs(flipped) >= abs(d.mean()) - 1e-12) < 0.05
    assert wrong["ours"] / 300 <= 0.08
    assert wrong["bootstrap"] / 300 > 0.10 and wrong["flips"] / 300 > 0.30


def test_a_difference_beyond_the_seeds_is_found():
    rng, found = np.random.default_rng(1), 0
    for _ in range(50):
        a, b = crossed(rng, 3, 128, 0.1)
        found += significance.differ(np.minimum(1, a + (rng.random(a.shape) < 0.6)), b).p < 0.05
    assert found >= 45


# ------------------------------------------------------------------------------------------------ many comparisons


def test_the_verdict_comes_from_holms_correction(make):
    """Twelve task sets without a difference and one where p is below 0.05, but not below 0.05/13."""
    n, rng = 200, np.random.default_rng(3)
    same = {f"tier {i}": draws(0.5, n, seed=i) for i in range(10, 22)}
    few = [0.0] * n
    more = list(few)
    for i in range(8):
        more[i] = 1.0  # eight more, none less: p = 2/2^8 = 0.008
    shuffled = {k: rng.permutation(v).tolist() for k, v in same.items()}
    rows = rows_of([make("a", {"tier 6": more, **same}), make("b", {"tier 6": few, **shuffled}, think=False)])
    row = rows[0]
    assert row["tasks"] == "tier 6" and row["d"].p < 0.012 and row["corrected"] > 0.05 and row["verdict"] == "cannot tell"
    ps = sorted((r["d"].p, r["corrected"]) for r in rows)
    running = 0.0
    for i, (p, corrected) in enumerate(ps):  # Holm 1979, written out
        running = max(running, min(1.0, (len(ps) - i) * p))
        assert corrected == pytest.approx(running)
    alone = rows_of([make("c", more), make("d", few, think=False)])
    assert alone[0]["verdict"] == "A better"


def test_different_rewards_are_not_compared_and_equal_ones_not_twice(make):
    a, b = make("a", draws(0.5)), make("b", draws(0.5, seed=1), reward="binary")
    rows, notes = significance.compare(significance.group([significance.read(a), significance.read(b)]))
    assert [row["what"] for row in rows] == ["exact"] and "different rewards" in notes[0]
    for folder in (a, b):
        lines = [json.loads(x) for x in (folder / "evals.jsonl").read_text().splitlines()]
        (folder / "evals.jsonl").write_text("".join(json.dumps({**x, "reward": x["exact"]}) + "\n" for x in lines))
        (folder / "config.json").write_text(json.dumps({**CONFIG, "reward": "binary", "think": folder.name == "a"}))
    rows, notes = significance.compare(significance.group([significance.read(a), significance.read(b)]))
    assert [row["what"] for row in rows] == ["exact"] and "not compared again" in notes[0]


# ------------------------------------------------------------------------------------------------ the report


def test_runs_whose_environment_was_edited_are_not_compared_by_reward(make):
    """The flags are the same; a bonus in score_reply is not among them."""
    folders = [make("a", draws(0.5)), make("b", draws(0.6, seed=1)), make("c", draws(0.5), seed=1)]
    for folder, code in zip(folders, ("1234", "5678", "1234")):
        (folder / "summary.json").write_text(json.dumps({"machine": {"environment_code": code}}))
    rows, notes = significance.compare(arms := significance.group([significance.read(f) for f in folders]))
    assert [arm.label for arm in arms] == ["environment_code=1234", "environment_code=5678"] and len(arms[0].runs) == 2
    assert [row["what"] for row in rows] == ["exact"]
    assert notes == ["A and B were paid by different rewards: their environments' code differs; only exact answers are compared."]


def test_a_run_knows_which_code_it_ran(tmp_path):
    file, hash_of = tmp_path / "mine.py", lambda: code_of(f"{file}:Mine")["environment_code"]
    file.write_text("def score():\n    return 1.0\n")
    before, known = hash_of(), code_of("letters")
    file.write_text("def score():  # a comment is no other reward\n    return 1.0\n")
    assert hash_of() == before
    file.write_text("def score():\n    return 1.0 + 0.1\n")
    assert hash_of() != before and known.keys() == {"commit", "uncommitted", "environment_code"}
    assert len({code_of(env)["environment_code"] for env in ("letters", "alphabet", "swarm")}) == 3


def test_a_run_that_goes_on_with_edited_code_has_both_versions_on_record(tmp_path, capsys):
    file, code = tmp_path / "code.jsonl", lambda update, name, commit="c0": {"update": update, "commit": commit, "environment_code": name}
    assert note_code(file, code(-1, "old")) == [code(-1, "old")]
    assert note_code(file, code(20, "old")) == [code(-1, "old")] and capsys.readouterr().out == ""  # resumed, nothing was edited
    both = [code(-1, "old"), code(40, "new")]
    assert note_code(file, code(40, "new")) == records.lines(file) == both
    assert f"not what it was before update 40: {file} has both" in capsys.readouterr().out
    assert note_code(file, code(30, "newer")) == [both[0], code(30, "newer")]  # a kill: the updates of "new" are lost, and it with them
    assert note_code(file, code(30, "old")) == both[:1]
    assert note_code(file, code(50, "old", "c1")) == [both[0], code(50, "old", "c1")]  # our own code counts too, and is no edited reward
    assert code_ran(both) == {"commit": "c0", "environment_code": "new", "versions": both} and "versions" not in code_ran(both[:1])
    assert records.environments_of(code_ran([both[0], code(50, "old", "c1")])) == [(0, "old")] and records.environments_of({}) == []


def test_two_versions_of_an_environment_in_one_run_are_told(make, tmp_path):
    folders = [make("a", draws(0.5)), make("b", draws(0.6, seed=1))]
    versions = [{"update": -1, "environment_code": "1234"}, {"update": 20, "environment_code": "5678"}]
    for folder, machine in zip(folders, ({"environment_code": "5678"}, code_ran(versions))):
        (folder / "summary.json").write_text(json.dumps({"machine": machine}))
    page = (compare.main(folders, tmp_path / "out") / "compare.md").read_text()
    told = "trained on 2 versions of its environment's code: 1234, then 5678 from update 20 on; its rewards may not be one measure."
    assert f"* b was {told}" in page and "a was trained" not in page
    assert "their environments' code differs" in page and "environment_code=1234 then 5678" in page and "| reward |" not in page
    summary = {
        "machine": code_ran(versions),
        "config": {},
        "trained": "tier 6",
        "eval": {},
        "gain": {"mean": 0, "low": -1, "high": 1, "n": 9},
    }
    assert f"It was {told}" in report.observations(summary, [])


def test_the_report_of_three_arms(make, tmp_path, capsys):
    folders = [make(f"grpo-{s}", {"tier 3": draws(0.9, seed=s), "tier 6": draws(0.8, seed=5 + s)}, seed=s) for s in range(2)]
    folders += [
        make(f"no_think-{s}", {"tier 3": draws(0.6, seed=s), "tier 6": draws(0.2, seed=5 + s)}, seed=s, think=False) for s in range(2)
    ]
    folders += [make("more_sft-0", {"tier 6": draws(0.5)}, loss="none", updates=0)]
    out = compare.main(folders)
    assert out == tmp_path / "compare" and (out / "compare.png").stat().st_size > 10_000
    text = (out / "compare.md").read_text()
    assert text in capsys.readouterr().out
    assert "# 5 runs, 3 arms" in text and "| **B** | loss=grpo, think=False, updates=30 | 0, 1 | no_think-0, no_think-1 |" in text
    table = [line for line in text.splitlines() if " − " in line]
    assert len(table) == 8 and "corrected by Holm's method for 8 comparisons" in text  # tier 3 only for the first two arms
    assert sum("| seeds and tasks |" in line for line in table) == 4 and "has a single seed" in text
    trained = next(line for line in table if line.startswith("| tier 6 (trained) | exact | A − C"))
    assert trained.endswith("**A better** |") and "tasks only" in trained
    assert "more_sft-0: no updates." in text and "too few, 30 is the least" not in text and "the peak of" in text
    again = compare.main([*folders, out], out=tmp_path / "second")  # runs/* holds an earlier comparison: it is passed over
    assert (again / "compare.md").read_text() == text


def test_one_arm_has_nothing_to_be_compared_with(make, tmp_path):
    out = compare.main([make("a", draws(0.5)), make("b", draws(0.5, seed=1), seed=1)], tmp_path / "out")
    assert "one arm, nothing to compare" in (out / "compare.md").read_text() and "all runs" in (out / "compare.md").read_text()


def test_tier_6_of_two_environments_is_not_the_same(make, tmp_path):
    out = compare.main([make("a", draws(0.5)), make("b", draws(0.9), env="alphabet")])
    text = (out / "compare.md").read_text()
    assert "A and B were evaluated on different task sets" in text and "letters tier 6" in text and "alphabet tier 6" in text


def test_the_first_tasks_of_the_larger_evaluation_are_paired_with_the_smaller(make):
    right = draws(0.9, 200)
    rows = rows_of([make("a", right), make("b", [0.0, *right[1:150]], eval_n=150)])
    assert [row["d"].over for row in rows] == ["tasks only"] * 2 and {row["n"] for row in rows} == {150}
    assert rows[0]["d"].difference == metrics.gain([0.0, *right[1:150]], right[:150])


def test_arms_that_cannot_differ_by_much_are_equal_within_that(make, tmp_path):
    right = draws(0.9, 1000)
    other = [1 - right[0], 1 - right[1], *right[2:]]
    folders = [make("a", right), make("b", other, lr=1e-4)]
    (exact, reward) = rows_of(folders)
    reach = max(abs(exact["d"].difference.low), abs(exact["d"].difference.high))
    said = float(exact["verdict"].removeprefix("equal within ").removesuffix(" points"))
    assert reach <= said / 100 <= reach + 0.001 and reward["verdict"].startswith("equal within 0.00")
    few = [make("few-a", right[:20]), make("few-b", other[:20], lr=1e-4)]
    assert {row["verdict"] for row in rows_of(few)} == {"cannot tell"}


def test_a_comparison_does_not_overwrite_another(make, tmp_path):
    a, b, c = make("a", draws(0.9)), make("b", draws(0.5), lr=1e-4), make("c", draws(0.1), lr=1e-5)
    first = compare.main([a, b])
    page = (first / "compare.md").read_text()
    assert compare.main([a, c]) == tmp_path / "compare-2" and (first / "compare.md").read_text() == page
    assert compare.main([a, b]) == first  # the same page again


def test_errors_are_one_sentence(make, tmp_path):
    good = make("good", draws(0.5))
    broken = {name: make(name, draws(0.5), think=False) for name in ("no_config", "running", "no_final", "damaged")}
    (broken["no_config"] / "config.json").unlink()
    (broken["running"] / "summary.json").unlink()
    (broken["no_final"] / "evals.jsonl").write_text('{"update": 0, "stage": "after_sft", "tasks": "tier 6"}\n')
    (broken["damaged"] / "evals.jsonl").write_text('{"update": 0, "sta')
    expected = {"no_config": "no run folder", "running": "has not finished", "no_final": "no final evaluation", "damaged": "is damaged"}
    for name, folder in broken.items():
        with pytest.raises(SystemExit, match=expected[name]) as caught:
            compare.main([good, folder])
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    for folders, words in (([good], "two run folders"), ([good, good], "given twice"), ([good, tmp_path / "nowhere"], "check the path")):
        with pytest.raises(SystemExit, match=words):
            compare.main(folders)
    assert not (tmp_path / "compare").exists()


def test_an_arm_of_one_seed_gets_wilson_and_of_two_a_wide_interval(make):
    arms = significance.group(
        [significance.read(make("a", [1] * 30 + [0] * 10)), significance.read(make("b", [1] * 20 + [0] * 20, think=False))]
    )
    assert significance.final_mean(arms[0], "tier 6", "exact") == compare.metrics.proportion(30, 40)
    both = significance.Arm("A", "", [arms[0].runs[0], significance.read(make("c", [1] * 20 + [0] * 20, seed=1))])
    interval = significance.final_mean(both, "tier 6", "exact")
    assert interval.mean == pytest.approx(25 / 40) and (interval.low, interval.high) == (0, 1)  # 0.75 and 0.5: two seeds say little
    assert not math.isnan(interval.low)


def test_the_file_runs_alone(make, tmp_path):
    a, b = make("a", draws(0.3)), make("b", draws(0.9, seed=1), think=False)
    done = warm.run(["-m", "bookkeeping.compare", str(a), str(b), "--out", str(tmp_path / "o")], ROOT)
    assert done.returncode == 0, done.stderr
    assert "**B better**" in done.stdout and (tmp_path / "o" / "compare.png").exists()
    bad = warm.run(["-m", "bookkeeping.compare", str(a)], ROOT)
    assert bad.returncode != 0 and "two run folders" in bad.stderr and "Traceback" not in bad.stderr


# ------------------------------------------------------------------------------------------------ swarm


@pytest.fixture
def make_swarm(tmp_path):
    """make_swarm(name, reward, flags) -> a finished run of an environment without exact answers; its parts add up to the reward."""

    def run(name: str, payoff, seed: int = 0, **flags) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = {"env": "swarm", "difficulty": "medium", "swarm_version": "0.2", "swarm_reputation": None, "seed": seed, "model": "auto"}
        (folder / "config.json").write_text(json.dumps({**config, **flags}))
        (folder / "summary.json").write_text("{}")
        noise = np.random.default_rng(99).random(len(payoff))  # the scenarios: the same for all runs
        line = {
            "payoff": list(payoff),
            "reputation": noise.tolist(),
            "quality": [0.5] * len(payoff),
            "diversity": noise.tolist(),
            "used_vote": [1] * len(payoff),
        }
        line |= {"reward": (np.array(payoff) + 0.3 * noise).tolist(), "error_rate": [0.0] * len(payoff)}
        evals = [{"update": 9, "stage": "final", "tasks": "medium v0.2", "trained": True, **line}]
        evals += [{"update": 9, "stage": "final", "tasks": "hard v0.2", "trained": False, **line}]
        evals += [{"update": 9, "stage": "eval_only", "tasks": "medium v0.2", "trained": True, **line, "reward": [9.0] * len(payoff)}]
        (folder / "evals.jsonl").write_text("".join(json.dumps(x) + "\n" for x in evals))
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"update": i, "reward": 1.0}) + "\n" for i in range(1, 10)))
        return folder

    return run


def test_swarm_runs_are_compared_by_reward_and_its_parts(make_swarm, tmp_path):
    base = np.random.default_rng(0).random(100)
    folders = [make_swarm("pico", base), make_swarm("qwen", base + 0.05 + 0.01 * np.sin(np.arange(100)), model="Qwen/Qwen3-4B")]
    rows = rows_of(folders)
    assert [(row["tasks"], row["what"]) for row in rows] == [
        *(("medium v0.2", what) for what in ("reward", "payoff", "reputation", "quality", "diversity")), ("hard v0.2", "reward"),
    ]  # fmt: skip
    verdicts = {(row["tasks"], row["what"]): row["verdict"] for row in rows}
    assert verdicts["medium v0.2", "reward"] == verdicts["medium v0.2", "payoff"] == verdicts["hard v0.2", "reward"] == "B better"
    assert verdicts["medium v0.2", "quality"] == "equal within 0.037" and rows[0]["d"].difference.mean == pytest.approx(-0.05, abs=0.002)
    out = compare.main(folders)
    text = (out / "compare.md").read_text()
    assert "Mean reward, with 95% intervals" in text and "xactly right" not in text and "9.000" not in text
    mean = compare.metrics.mean(json.loads((folders[0] / "evals.jsonl").read_text().splitlines()[0])["reward"])
    assert f"| A: model=pico_swarm | {str(mean).partition(', n=')[0]} |" in text
    assert "| medium v0.2 (trained) | payoff | A − B |" in text and (out / "compare.png").stat().st_size > 10_000


def test_swarm_arms_that_were_paid_differently_are_compared_by_parts(make_swarm):
    base = np.random.default_rng(0).random(50)
    folders = [make_swarm("a", base), make_swarm("b", base + 0.1, swarm_reputation=0.5)]
    rows, notes = significance.compare(significance.group([significance.read(f) for f in folders]))
    assert [row["what"] for row in rows] == ["payoff", "reputation", "quality", "diversity"]
    assert "different rewards; only its parts are compared, on the trained tasks" in notes[0]


def test_letters_and_swarm_stand_in_one_table_and_are_not_compared(make, make_swarm):
    out = compare.main([make("letters", draws(0.5)), make_swarm("swarm", np.random.default_rng(0).random(50))])
    text = (out / "compare.md").read_text()
    assert "evaluated on different task sets" in text and "Mean reward" in text and "swarm medium v0.2" in text


def test_flags_of_swarm_do_not_part_runs_of_letters(make):
    """An older letters run does not know them: its reward is the same all the same."""
    rows, notes = significance.compare(
        significance.group(
            [significance.read(f) for f in (make("old", draws(0.5)), make("new", draws(0.9), swarm_reputation=None, lr=1e-5))]
        )
    )
    assert [row["what"] for row in rows] == ["exact", "reward"] and not any("different rewards" in note for note in notes)


@pytest.mark.parametrize("seeds", [[0, 1], [0]])
def test_runs_of_different_lengths_are_drawn_to_the_end_and_their_mean_as_far_as_all_of_them_go(seeds):
    from matplotlib.figure import Figure

    runs = [SimpleNamespace(rewards=[0.6] * 15), SimpleNamespace(rewards=[0.2] * 12)]
    ax = Figure().subplots()
    compare.draw_training(ax, [SimpleNamespace(runs=runs, seeds=lambda: seeds)])
    long, short, mean = ax.lines
    assert (len(short.get_ydata()), len(long.get_ydata())) == (3, 6)
    assert mean.get_ydata() == pytest.approx([0.4] * 3) and list(mean.get_xdata()) == [10, 11, 12]


def test_final_results_stand_in_the_colour_of_their_arm_and_a_set_is_named_at_its_middle(make):
    from matplotlib.figure import Figure

    sets = lambda p: {"tier 6": draws(p), "tier 3": draws(1 - p)}
    arms = significance.group(
        [significance.read(make(f"{k}-{seed}", sets(0.2 + k / 5), k=k, seed=seed)) for k in (1, 2) for seed in (0, 1)]
    )
    ax = Figure().subplots()
    compare.draw_final(ax, arms)
    shown = lambda marker: [line for line in ax.lines if line.get_marker() == marker and len(line.get_ydata())]
    colour_at = {float(line.get_ydata()[0]): line.get_color() for line in shown("D")}
    assert sorted(colour_at.values()) == ["C0", "C0", "C1", "C1"] and len(shown("o")) == 8
    assert all(dot.get_color() == colour_at[float(dot.get_ydata()[0])] for dot in shown("o"))
    heights = sorted(colour_at, reverse=True)  # of two sets, two arms each
    assert list(ax.get_yticks()) == [sum(heights[:2]) / 2, sum(heights[2:]) / 2]
