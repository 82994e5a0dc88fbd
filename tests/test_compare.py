"""Protects the verdicts: which runs are one arm, what the interval holds, how often a winner is
found where there is none."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import metrics
from bookkeeping import compare, records
from bookkeeping.folder import code_hash
from helpers import lines_of, refusal, write_folder, write_lines

CONFIG = {
    "env": "letters",
    "difficulty": 6,
    "reward": "partial",
    "think": True,
    "loss": "grpo",
    "lr": 3e-4,
    "updates": 30,
    "seed": 0,
    "name": "x",
    "runs": "runs",
    "threads": 1,
}


@pytest.fixture
def write(tmp_path):
    """write(name, lines of evals.jsonl, flags) -> a finished run folder."""

    def run(name: str, evals: list[dict], **flags) -> Path:
        config = CONFIG | {"name": name} | flags
        files = {"config.json": json.dumps(config).encode(), "summary.json": b"{}"}
        folder, n = write_folder(tmp_path / name, files), config["updates"]
        rewards = np.random.default_rng(len(name)).random(n)
        logged = lines_of({"update": np.arange(1, n + 1), "reward": rewards}, n)
        write_lines(folder / "metrics.jsonl", logged)
        return write_lines(folder / "evals.jsonl", evals).parent

    return run


@pytest.fixture
def make(write):
    """make(name, exact, flags) -> a finished run folder. exact: {label: right answers}, or those of
    tier 6."""

    def run(name: str, exact, **flags) -> Path:
        lines = []
        for label, right in (exact if isinstance(exact, dict) else {"tier 6": exact}).items():
            line = {"tasks": label, "trained": label == "tier 6", "exact": list(map(float, right))}
            line["reward"] = [0.2 + 0.6 * r for r in right]
            wrong = {"stage": "after_sft", "exact": [0.0] * len(right)}
            lines += [line | wrong | {"update": 0}, line | {"update": 30, "stage": "final"}]
        return write(name, lines, **flags)

    return run


def swarm_lines(payoff) -> list[dict]:
    """Final evaluations of an environment without exact answers."""
    n, noise = len(payoff), np.random.default_rng(99).random(len(payoff))  # the same for all
    line = {
        **{"update": 9, "stage": "final", "tasks": "medium v0.2", "trained": True},
        **{"payoff": list(payoff), "quality": [0.5] * n, "diversity": noise.tolist()},
        "reward": (np.array(payoff) + 0.3 * noise).tolist(),
    }
    later = {"stage": "eval_only", "reward": [9.0] * n}
    return [line, line | {"tasks": "hard v0.2", "trained": False}, line | later]


def draws(p: float, n: int = 200, seed: int = 0) -> list[float]:
    return (np.random.default_rng(seed).random(n) < p).astype(float).tolist()


def arms_of(*folders) -> list[compare.Arm]:
    return compare.group([compare.read(f) for f in folders])


def rows_of(*folders) -> list[dict]:
    return compare.compare(arms_of(*folders))


# -------------------------------------------------------------------------------------------- arms


def test_runs_that_differ_in_seed_and_name_are_one_arm(make):
    a = [make(f"a{s}", draws(0.9, seed=s), seed=s, runs=f"r{s}", threads=s) for s in range(3)]
    b = [make(f"b{s}", draws(0.5, seed=9 + s), seed=s, think=False) for s in range(2)]
    found = [(a.letter, a.label, list(a.runs)) for a in arms_of(a[0], b[0], a[1], b[1], a[2])]
    assert found == [("A", "think=True", [0, 1, 2]), ("B", "think=False", [0, 1])]


def test_of_two_runs_of_one_seed_the_later_counts(make):
    (arm,) = arms_of(
        make("a", [1, 1, 0, 0]),
        make("again", [1, 0, 0, 0], threads=2),
        make("b", [0, 0, 0, 0], seed=1),
    )
    (lines,) = compare.finals("tier 6", arm)
    assert compare.table(lines, "exact").tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]


# ------------------------------------------------------------------------------------- differences


def test_a_large_difference_is_found_and_its_sign_is_right(make):
    a, b = draws(0.3), draws(0.9, seed=1)
    rows = rows_of(make("a", a), make("b", b, think=False))
    found = [(row["what"], row["verdict"], row["over"]) for row in rows]
    assert found == [(what, "B better", "tasks only") for what in ("exact", "reward")]
    exact, reward = (row["difference"] for row in rows)
    assert exact == metrics.gain(b, a) and exact.high < 0
    assert reward.mean == pytest.approx(0.6 * exact.mean)


def test_pairing_finds_what_separate_means_cannot():
    """Eight tasks more and none less: by sign flips p = 2/2^8; as independent samples nothing."""
    before = np.array(draws(0.5))
    after = before.copy()
    after[np.flatnonzero(before == 0)[:8]] = 1
    difference, p, _ = compare.differ(after[None], before[None])
    assert p == pytest.approx(2 / 2**8, abs=0.004) and difference.low > 0
    assert stats.ttest_ind(after, before).pvalue > 0.2


def test_the_variance_of_seeds_and_tasks_against_welch():
    """Without any difference between tasks, it is Welch's test on the means of the seeds."""
    a, b = np.array([0.2, 0.3, 0.45]), np.array([0.6, 0.5, 0.9, 0.8])
    difference, p, over = compare.differ(*(np.repeat(x[:, None], 50, axis=1) for x in (a, b)))
    welch = stats.ttest_ind(a, b, equal_var=False)
    assert p == pytest.approx(welch.pvalue) and over == "seeds and tasks"
    assert (difference.low, difference.high) == pytest.approx(welch.confidence_interval(0.95))


def test_where_nothing_varies_the_interval_still_has_its_level():
    ends = lambda level: compare.by_variance(0.0, [(0.0, 2)], 100, level=level)[0]
    assert ends(0.95).high == pytest.approx(metrics.proportion(0, 100).high)
    assert ends(0.99).high == pytest.approx(6.635 / (100 + 6.635), rel=1e-3)


def test_the_bound_on_p_is_never_below_the_exact_p():
    """Every flip of few values, against what is said after no flip at all came as far."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        difference = rng.random(8) + rng.random() - rng.random(8)
        sums = np.array(list(product([-1, 1], repeat=8))) @ difference
        exact = np.mean(np.abs(sums) >= abs(sums[-1]) - 1e-9)
        assert exact <= compare.permutation_test(difference, resamples=0) <= 1.0


def test_where_seeds_differ_a_winner_is_rarely_found_by_mistake():
    """Arms without a difference: tasks are hard or easy, arms suit some tasks, seeds are lucky or
    not. Sign flips over tasks would find a winner in every third case and more."""
    rng, ours, flips = np.random.default_rng(0), 0, 0
    for _ in range(300):
        hard, arms = rng.normal(0, 1.5, 128), []
        for _ in "ab":
            logit = hard + rng.normal(0, 0.5, 128) + rng.normal(0, 0.5, (2, 1))
            arms.append((rng.random((2, 128)) < 1 / (1 + np.exp(-logit))) * 1.0)
        ours += compare.differ(*arms)[1] < 0.05
        flips += compare.permutation_test(arms[0].mean(axis=0) - arms[1].mean(axis=0), 300) < 0.05
    assert ours / 300 <= 0.08 and flips / 300 > 0.30


# -------------------------------------------------------------------------------- many comparisons


def test_holm_is_holm():
    """Written out: the smallest of n times n, the next times n - 1, and none below one before."""
    p = [0.01, 0.04, 0.03, 0.005, 0.6, 0.04]
    assert compare.holm(p) == pytest.approx([0.05, 0.12, 0.12, 0.03, 0.6, 0.12])
    assert compare.holm([]) == []


def test_the_verdict_comes_from_the_corrected_p(make):
    """Twelve task sets without a difference and one with p below 0.05, but not below 0.05/13."""
    few, more = [0.0] * 200, [1.0] * 8 + [0.0] * 192  # p = 2/2^8 = 0.008
    same = {f"tier {i}": draws(0.5, seed=i) for i in range(10, 22)}
    other = {tier: np.random.default_rng(3).permutation(v).tolist() for tier, v in same.items()}
    a, b = make("a", {"tier 6": more, **same}), make("b", {"tier 6": few, **other}, think=False)
    row = rows_of(a, b)[0]
    assert row["p"] < 0.012 and row["corrected"] > 0.05 and row["verdict"] == "cannot tell"
    assert rows_of(make("c", more), make("d", few, think=False))[0]["verdict"] == "A better"


def test_arms_that_cannot_differ_by_much_are_equal(make):
    right = draws(0.9, 1000)
    other = [1 - right[0], 1 - right[1], *right[2:]]
    exact, reward = rows_of(make("a", right), make("b", other, lr=1e-4))
    assert exact["verdict"] == reward["verdict"] == "equal"


# -------------------------------------------------------------- what is compared, and what is not


def drop(folder: Path, tasks: list[int]) -> Path:
    """As bridges/api.py writes it: the results of these tasks are missing; their numbers are told."""
    lines = records.lines(folder / "evals.jsonl")
    for line in lines:
        for name in ("reward", "exact"):
            line[name] = [v for i, v in enumerate(line[name]) if i not in tasks]
        line["missing"] = {str(i): "HTTP 503" for i in tasks}
    return write_lines(folder / "evals.jsonl", lines).parent


def test_tasks_that_one_of_two_could_not_answer_are_left_out_and_the_rest_stay_paired(make):
    right = draws(0.5)
    flipped = [1 - r if i < 5 else r for i, r in enumerate(right)]  # only dropped tasks differ
    a, b = drop(make("a", right), [0, 1, 2]), drop(make("b", flipped, lr=1.0), [3, 4, 100])
    row = rows_of(a, b)[0]
    assert row["difference"].n == 194 and row["difference"].mean == 0 and row["p"] == 1
    c, d = drop(make("c", [1, 1, 0]), [0, 1]), drop(make("d", [1, 1, 0], lr=1.0), [2])
    assert rows_of(c, d) == []


def test_the_first_tasks_of_the_larger_evaluation_are_paired_with_the_smaller(make):
    right = draws(0.9)
    small = [0.0, *right[1:150]]
    row = rows_of(make("a", right), make("b", small, eval_n=150))[0]
    assert row["difference"] == metrics.gain(small, right[:150])


def test_different_rewards_are_not_compared_and_equal_ones_not_twice(make):
    """Flags do not tell two rewards apart if somebody has edited the code."""
    a, b = make("a", draws(0.5)), make("b", draws(0.5, seed=1), reward="binary")
    edited = make("c", draws(0.6, seed=1))
    (edited / "summary.json").write_text('{"machine": {"environment_code": "1234"}}')
    c = make("d", draws(0.5, seed=1), think=False)
    assert [row["what"] for row in rows_of(a, c)] == ["exact", "reward"]
    for folder in (a, c):
        lines = records.lines(folder / "evals.jsonl")
        write_lines(folder / "evals.jsonl", [line | {"reward": line["exact"]} for line in lines])
    for other in (b, edited, c):
        assert [row["what"] for row in rows_of(a, other)] == ["exact"]


def test_swarm_runs_are_compared_by_reward_and_its_parts(write):
    base = np.random.default_rng(0).random(100)
    folders = [
        write("a", swarm_lines(base), env="swarm"),
        write("b", swarm_lines(base + 0.05), env="swarm", lr=1.0),
    ]
    assert {(row["tasks"], row["what"]): row["verdict"] for row in rows_of(*folders)} == {
        ("medium v0.2", "reward"): "B better",
        ("medium v0.2", "payoff"): "B better",
        ("medium v0.2", "quality"): "equal",
        ("medium v0.2", "diversity"): "equal",
        ("hard v0.2", "reward"): "B better",
    }
    text = (compare.main(folders) / "compare.md").read_text()
    assert "Mean reward at the end, with 95% intervals" in text and "9.000" not in text
    # A measure that one arm lacks is not compared, nor a task in which an episode lacks it.
    old = swarm_lines(base + 0.05)
    old = [{what: x for what, x in line.items() if what != "diversity"} for line in old]
    old[0]["quality"] = [None, *[0.5] * 98, 0.6]
    rows = rows_of(folders[0], write("old", old, env="swarm", lr=1.0))
    assert [row["what"] for row in rows] == ["reward", "payoff", "quality", "reward"]
    assert rows[2]["difference"].n == 99 and rows[2]["p"] == 1.0
    other = write("c", swarm_lines(base), env="swarm", set=["reputation=0.5"])
    assert [row["what"] for row in rows_of(folders[0], other)] == ["payoff", "quality", "diversity"]


def test_a_run_knows_which_code_it_ran(tmp_path):
    file, hashes = tmp_path / "mine.py", []
    for reward in ("1.0", "1.0  # a comment is no other reward", "1.0 + 0.1"):
        file.write_text(f"def score():\n    return {reward}\n")
        hashes.append(code_hash(f"{file}:Mine"))
    assert hashes[0] == hashes[1] != hashes[2]
    assert len({code_hash(e) for e in ("letters", "alphabet", "swarm")}) == 3


# ------------------------------------------------------------------------------------------- the page


def test_the_page_of_three_arms(make, tmp_path, capsys):
    both = lambda p, s: {"tier 3": draws(p, seed=s), "tier 6": draws(p, seed=5 + s)}
    folders = [
        *(make(f"grpo-{s}", both(0.8, s), seed=s) for s in range(2)),
        *(make(f"no_think-{s}", both(0.2, s), seed=s, think=False) for s in range(2)),
        make("more_sft-0", draws(0.5), loss="none", updates=0),
    ]
    out = compare.main(folders)
    assert out == tmp_path / "compare" and (out / "compare.png").stat().st_size > 10_000
    text = (out / "compare.md").read_text()
    assert text in capsys.readouterr().out
    assert "| **B** | loss=grpo, think=False, updates=30 | 0, 1 | no_think-0, no_think-1 |" in text
    table = [line for line in text.splitlines() if " − " in line]
    assert len(table) == 8  # tier 3 only for the first two arms
    assert sum("| seeds and tasks |" in line for line in table) == 4 and "single seed" in text
    (reward,) = compare.charts(arms_of(*folders))
    ours, theirs, sft = (s["points"] for s in reward["series"])  # each arm once
    assert [len(ours), len(theirs), sft] == [30, 30, []] and ours[-1][0] == 30
    assert all(low <= mean <= high for _, mean, low, high in ours)
    trained = next(line for line in table if line.startswith("| tier 6 (trained) | exact | A − C"))
    assert trained.endswith("**A better** |") and "tasks only" in trained
    again = compare.main([*folders, out], tmp_path / "second")  # an earlier comparison: passed over
    assert (again / "compare.md").read_text() == text


def test_an_arm_of_one_seed_gets_wilson_and_of_two_a_wide_interval_within_0_and_1(make):
    a, b = make("a", [1] * 30 + [0] * 10), make("b", [1] * 20 + [0] * 20, seed=1)
    (one,), (two,) = arms_of(a), arms_of(a, b)
    assert compare.final_mean(one, "tier 6", "exact") == metrics.proportion(30, 40)
    found = compare.final_mean(two, "tier 6", "exact")
    assert (found.mean, found.low, found.high) == (pytest.approx(25 / 40), 0, 1)  # of two seeds
    assert compare.final_mean(one, "tier 3", "exact") is None


@pytest.mark.parametrize("file", ["config.json", "summary.json", "evals.jsonl"])
def test_errors_are_one_sentence(make, tmp_path, file):
    good, bad = make("good", draws(0.5)), make("bad", draws(0.5), think=False)
    (bad / file).unlink()
    why = "no run folder; check the path" if file == "config.json" else "has not finished"
    for folders, said in (([good, bad], why), ([good], "two run folders")):
        assert said in refusal(SystemExit, compare.main, folders)
