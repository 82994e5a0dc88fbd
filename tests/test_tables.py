"""Protects the pages' numbers: tables come out of results/ as they stand, an interval of the prose
stands in a table, and the intervals are what they say they are."""

import numpy as np
import pytest
from scipy import stats

import metrics
from lab import tables

ROOT = tables.ROOT
PAGES = {str(page.relative_to(ROOT)): page.read_text(encoding="utf8") for page in tables.pages()}


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_are_made_from_results(page):
    assert tables.remake(PAGES[page]) == PAGES[page]


def test_each_table_is_made_once_and_each_interval_of_the_prose_stands_in_one():
    made = [found[2] for text in PAGES.values() for found in tables.MARK.finditer(text)]
    assert sorted(made) == sorted(tables.TABLES) and tables.wrong(PAGES) == []


@pytest.mark.parametrize(
    "prose, missing",
    [
        ("It gains +81.6 points [+78.3, +84.9].", 0),
        ("It gains 81.6 [78.3, 84.9], says `97.1% [1.0, 2.0]`.", 0),
        ("It gains +81.6 points [+78.3,\n+85.1].", 1),
        ("It ended at 3.2% [1.1, 5.3], and took 12 s [10, 15].", 2),
    ],
)
def test_an_interval_that_stands_nowhere_is_noticed(prose, missing):
    lines = tables.wrong({**PAGES, "docs/new.md": prose})
    assert len([line for line in lines if line.startswith("docs/new.md: ")]) == missing


@pytest.mark.parametrize("name", sorted(f.stem for f in (ROOT / "results").glob("*.json")))
def test_each_result_says_how_it_was_made_and_where_its_runs_are(name):
    data = tables.read(name)
    assert data.get("raw", True), "of no commit: the command plays them again"
    assert data["made_by"].startswith("python") and (data.get("arms") or data["claims"])


def test_an_interval_over_seeds_and_tasks_by_hand():
    """Means of 1/2 and 3/4: a variance of their mean of 1/64, one degree of freedom. Task means of
    1, 1/2, 1, 0: a variance of 11/48, of their mean 11/192, three degrees of freedom."""
    rows = [[1, 0, 1, 0], [1, 1, 1, 0]]
    seeds, tasks = 1 / 64, 11 / 192
    freedom = (seeds + tasks) ** 2 / (seeds**2 / 1 + tasks**2 / 3)
    reach = stats.t.ppf(0.975, freedom) * (seeds + tasks) ** 0.5
    found = tables.over(rows)
    assert np.allclose((found.mean, found.low, found.high), (0.625, 0.625 - reach, 0.625 + reach))
    assert tables.percent(rows) == f"62.5% [{max(0, 62.5 - 100 * reach):.1f}, 100.0]"
    assert tables.over(rows[:1]) == metrics.mean(rows[0]), "of one policy: over tasks"
    wilson = metrics.proportion(32, 32).percent()
    assert tables.percent([[1] * 32] * 3) == wilson, "if all is right, as if it were one seed"


def test_what_was_gained_in_one_seed_is_a_difference_and_no_share():
    arm = {"seeds": [{"after_sft": "0" * 20, "final": "0" * 5 + "1" * 15}]}
    assert tables.gained(arm) == metrics.gain([0] * 20, [0] * 5 + [1] * 15)


def test_digits_are_short_and_differences_are_paired_by_seed_and_task():
    for values, short in (([1, 0.0, 1.0, 0], "1010"), ([0.5, 1], [0.5, 1])):
        assert tables.digits(values) == short and tables.numbers(short).tolist() == values
    ours, theirs = [np.array([1.0, 0, 1, 1]), np.array([1.0, 1, 1, 1])], [np.array([0.0, 0, 0, 0])]
    assert tables.less(ours, theirs) == tables.over(ours)
    same = tables.less(ours, ours)
    assert same.mean == 0 and same.high < 0.5
    assert tables.less(ours[:1], theirs) == metrics.gain(theirs[0], ours[0])
    assert tables.less(theirs, ours).mean == -tables.less(ours, theirs).mean, "with every seed"


@pytest.mark.parametrize(
    "low, high, said",
    [(0.1, 0.2, ("**came out**", "**came out the other way round**", "it did change here")),
     (-0.1, 0.2, ("cannot be told", "cannot be told", "no change can be told here either"))],
)  # fmt: skip
def test_a_verdict_follows_the_interval_and_not_the_mean(low, high, said):
    change = metrics.Interval(0.05, low, high, 9)
    assert tuple(tables.verdict(change, side) for side in (1, -1, 0)) == said
