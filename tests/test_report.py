"""Protects what a run leaves for a person: every number in summary.json and report.md must follow
from the run folder, and the three pages show the same ones."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import env_letters
import made_up
import metrics
from bookkeeping import records, report, settled, tables
from bookkeeping.columns import log_columns
from helpers import refusal, write_lines
from made_up import CONFIG, MACHINE, TIERS, N, update_line
from rollout import Episode
from warm import ROOT

STAGES = ("before", "after_sft", "final")


def finish(folder: Path, **state) -> Path:
    """What run.write_report does with a folder: the summary and the pages."""
    config = json.loads((folder / "config.json").read_text())
    about = made_up.state(config["updates"], **state)
    summary = report.summarize_run(folder, config, about, MACHINE)
    (folder / "summary.json").write_text(json.dumps(summary))
    report.write(folder)
    return folder


def load(folder: Path) -> tuple[dict, list[dict], list[dict], str]:
    read = lambda name: records.lines(folder / f"{name}.jsonl")
    summary = json.loads((folder / "summary.json").read_text())
    return summary, read("metrics"), read("evals"), (folder / "report.md").read_text()


def of(evals: list[dict], stage: str, tier: int = 6) -> dict:
    return next(e for e in evals if (e["stage"], e["tasks"]) == (stage, f"tier {tier}"))


def section(text: str, title: str) -> str:
    return text.split(f"## {title}")[1].split("\n## ")[0]


def rows(text: str, title: str) -> list[list[str]]:
    lines = [line for line in section(text, title).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return cells[:1] + cells[2:]  # without the dashes


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return finish(made_up.letters(tmp_path_factory.mktemp("runs") / "grown", made_up.growing()))


def observed(lines: list[dict]) -> str:
    exact = [
        {
            "tasks": "x",
            "stage": "train",
            "update": 0,
            "trained": True,
            "exact": [1.0],
            "reward": [1.0],
        }
    ]
    return "\n".join(report.observations({"config": {}}, lines, exact))


# ------------------------------------------------------------------------------------ summary.json


def test_the_summary_has_every_result_with_its_interval_and_what_the_run_cost(run):
    summary, _, evals, text = load(run)
    assert set(summary["eval"]) == {f"tier {tier}" for tier in TIERS}
    for tier in TIERS:
        assert set(summary["eval"][f"tier {tier}"]) == set(STAGES)
        for stage, result in summary["eval"][f"tier {tier}"].items():
            e = of(evals, stage, tier)
            assert result["exact"] == vars(metrics.proportion(sum(e["exact"]), N))
            for name in ("reward", "format", "truncated", "reply_tokens"):
                assert result[name] == vars(metrics.mean(e[name]))
    for name, what in (("gain_reward", "reward"), ("gain", "exact")):
        gain = metrics.gain(of(evals, "after_sft")[what], of(evals, "final")[what])
        assert summary[name] == vars(gain)
    assert f"GRPO gained over SFT in exact answers: {gain.points()}" in text
    kept = [summary[name] for name in ("env", "seed", "trained", "updates", "model")]
    assert kept == ["letters", 5, "tier 6", 30, "pico_base"], "auto is not a model"
    assert summary["seconds"]["total"] == 600.01 and summary["config"] == CONFIG


@pytest.mark.parametrize(
    "low, high, verdict",
    [(0.0, 0.2, "neither"), (-0.2, 0.0, "neither"), (0.1, 0.2, "gained"), (-0.2, -0.1, "lost")],
)
def test_the_verdict_follows_the_interval(low, high, verdict):
    gain = {"mean": (low + high) / 2, "low": low, "high": high, "n": N}
    assert report.notes({"gain": gain})[0].startswith(f"GRPO {verdict}")


# ----------------------------------------------------------------------------- report.md, the page


def test_every_number_of_the_report_follows_from_the_run(run):
    _, lines, evals, text = load(run)
    head, *results = rows(text, "Result: exact answers")
    assert head == ["", "before SFT", "after SFT", "update 30 (final)"]
    for row, tier in zip(results, (6, 3, 5), strict=True):
        assert row[0] == f"tier {tier}{' (trained)' if tier == 6 else ''}"
        for cell, stage in zip(row[1:], STAGES):
            e = of(evals, stage, tier)
            exact, reward = metrics.proportion(sum(e["exact"]), N), metrics.mean(e["reward"])
            assert cell == f"{exact.percent()}, reward {reward.text()}"
    head, *results = rows(text, "Evaluation")
    for row, e in zip(results, evals, strict=True):
        cells = dict(zip(head, row))
        assert cells["exact"] == metrics.proportion(sum(e["exact"]), N).percent()
        assert cells["reply tokens"] == metrics.mean(e["reply_tokens"]).text(1)
    head, *results = rows(text, "Trajectory")
    for i, row in enumerate(results):
        cells, block = dict(zip(head, row)), lines[3 * i : 3 * i + 3]
        assert cells["updates"] == f"{3 * i + 1}–{3 * i + 3}" and cells["entropy"] == "0.4"
        assert cells["reward"].startswith(f"{np.mean([x['reward'] for x in block]):.2f} [")
        assert cells["reply tokens"] == str(102 + 3 * i) and cells["mismatch"] == "2e-06"
        assert cells["spells it out"] == f"{np.mean([x['habit_derives'] for x in block]):.3g}"
    assert dict(rows(text, "Config"))["k"] == "8"
    rewards = [line["reward"] for line in lines]
    now = metrics.level(rewards[-settled.adaptive_window(rewards) :])
    assert f"Now: {now.text(2)}, the mean of the last {now.n} updates" in text
    assert (
        settled.present_trend(rewards).sentence[1:] in text
        and f"peak of {max(rewards):.2f}" in text
    )
    for fact in ("SFT loss: 3.25 → 0.50", "10.0 minutes: rollout 4.0", "waits: 57% of", "1.23 GB"):
        assert fact in text
    assert "nan" not in text.lower() and (run / "curves.png").stat().st_size > 20_000


def test_the_page_shows_the_numbers_of_the_report(run):
    numbers, _ = report.collect(run)
    text = (run / "report.md").read_text()
    assert tables.markdown(numbers["tables"]) in text
    assert [c["title"] for c in numbers["charts"]] == [
        "development, exact",
        "development, reward",
        "training reward",
        "habits of the sampled replies",
        "reply tokens",
        "groups with signal",
        "entropy",
    ]
    for series in numbers["charts"][0]["series"]:
        results = [row for row in rows(text, "Evaluation") if row[1].startswith(series["name"])]
        said = [f"{v:.1f}% [{low:.1f}, {high:.1f}]" for _, v, low, high in series["points"]]
        assert said == [row[3] for row in results]
        assert [point[0] for point in series["points"]] == [-1, 0, 30]  # before SFT is no update


def test_habits_lie_on_each_other_in_the_colours_of_the_live_page(run):
    lines = records.lines(run / "metrics.jsonl")
    spells, at_once = tables.layers(lines)
    assert (spells["name"], at_once["name"]) == ("spells it out", "answers at once")
    for line, low, high in zip(lines, spells["points"], at_once["points"], strict=True):
        share = round(100 * line["habit_derives"], 2)
        assert low == [line["update"], share, 0, share]
        assert high[2:] == [share, pytest.approx(100)]
    page = (ROOT / "docs" / "live" / "index.html").read_text()
    script = (ROOT / "docs" / "live" / "page.js").read_text()
    for habit in env_letters.STYLES:
        colours = ", ".join(tables.HABITS[f"habit_{habit}"])
        assert f"--{habit}: light-dark({colours})" in page
        assert f'{habit}: "{tables.label(f"habit_{habit}")}"' in script
    assert not tables.layers([{"update": 1, "reward": 0.5}])  # no habits, no chart


def test_a_run_without_sft_or_updates_reports_too(tmp_path):
    for lines in ([], [update_line(1)]):
        folder = made_up.letters(tmp_path / f"run-{len(lines)}", lines)
        *_, text = load(finish(folder, sft={}))
        assert "SFT loss" not in text and (folder / "curves.png").exists()
        assert ("No GRPO updates in this run." in text) == (not lines)


def test_a_report_can_be_written_again_and_an_unfinished_run_has_a_page(run, capsys, tmp_path):
    before = (run / "report.md").read_text()
    (run / "report.md").write_text("lost")
    report.main(run)
    assert (run / "report.md").read_text() == before and before in capsys.readouterr().out
    going = made_up.letters(tmp_path / "going", made_up.growing())
    with open(going / "metrics.jsonl", "a") as f:
        f.write('{"update": 31, "rew')  # a kill cut the line in two: it is left out
    report.main(going)
    assert (going / "report.html").exists() and not (going / "report.md").exists()
    numbers, _ = report.collect(going)
    state = ["state", "not finished: there is no summary.json yet"]
    assert state in numbers["facts"] and ["updates", "30"] in numbers["facts"]


@pytest.mark.parametrize("name", ["none", "."])
def test_errors_are_one_sentence(name, tmp_path):
    told = refusal(SystemExit, report.main, tmp_path / name)
    assert "has no config.json, so it is no run folder" in told


# ------------------------------------------------------------------------------------ observations


def test_what_is_wrong_is_told_and_its_absence_too():
    lines = made_up.growing(12)
    assert "Nothing was found wrong" in observed(lines)
    silent = [line | {"groups_with_signal": 0.0, "reward": 0.0} for line in lines]
    text = observed(silent)
    assert "Found wrong: no signal at update 10: " in text and "Nothing was found" not in text
    measured = ("update", "reward", "groups_with_signal", "reply_tokens")
    bare = [{name: line[name] for name in measured} for line in silent]  # no gradient at all
    assert "nan" not in observed(bare)


def test_a_curriculum_is_marked_and_only_its_last_level_settles():
    rng = np.random.default_rng(0)
    reward = lambda i: (0.8 if i < 100 else 0.3) + rng.normal(0, 0.005)
    lines = [update_line(i + 1, reward(i), level=5 + (i >= 100)) for i in range(200)]
    text = observed(lines)
    assert "Has it settled, at level 6? Settled at 0.30" in text and "Now, at level 6: 0.30" in text
    assert report.charts(lines, [])[0]["marks"] == [[101, "6"]]


def test_a_lag_that_speed_made_is_shown_and_one_that_was_chosen_is_said_to_be():
    lines = [update_line(i, off_policy_steps=float(i), batches_dropped=i // 3) for i in range(1, 7)]
    for line in lines:
        line["batches_waiting"] = 2 * line["update"]
    charts = {c["title"].split(" (")[0]: c["series"][0]["points"] for c in report.charts(lines, [])}
    assert charts["off-policy level"] == [[i, float(i), None, None] for i in range(1, 7)]
    assert [point[1] for point in charts["batches too old, and dropped"]] == [0, 0, 1, 1, 1, 2]
    assert "batches waiting to be trained on" in charts
    assert dict(report.facts({"config": {}, "env": "letters"}, lines))["batches dropped"] == "5"
    text = observed(lines)
    assert "in updates): 3.5 on average, at most 6.0, in update 6." in text
    assert "dropped: 0.8 on average, at most 2.0, in update 6." in text
    chosen = [update_line(i, off_policy_steps=1.0) for i in range(1, 7)]
    assert "in update 1, fixed by design (--async-rollouts)." in observed(chosen)
    assert "batches dropped" not in dict(report.facts({"config": {}, "env": "letters"}, chosen))


# -------------------------------------------------------------------- the swarm


def test_the_trajectory_has_what_was_cut_and_the_spread_within_a_batch():
    """The quantiles of an update are over its episodes, and a block has their means."""
    episodes = [
        Episode(0, 0, components={"welfare": float(i), "quality_gap": i / 100}) for i in range(101)
    ]
    episodes[7].components["toxicity"] = 0.5  # the others have no accepted deal
    found = SimpleNamespace(loss=0.0, grad_norm=0.0, epochs=[])
    policy = SimpleNamespace(bfloat16=False)
    line = log_columns(found, [episodes], policy, None, None)
    assert [line[f"welfare_{percent}"] for percent in (5, 50, 95)] == pytest.approx([5, 50, 95])
    assert [line[f"quality_gap_{q}"] for q in (5, 50, 95)] == pytest.approx([0.05, 0.5, 0.95])
    assert [line[f"toxicity_{percent}"] for percent in (5, 50, 95)] == [0.5] * 3
    assert "welfare_5" not in log_columns(found, [[Episode(0, 0)]], policy, None, None)
    lines = [update_line(i, truncated=i / 100, deviation=0.25, **line) for i in range(1, 21)]
    [shown] = report.trajectory(lines, [])
    row = dict(zip(shown["head"], shown["rows"][1], strict=True))  # updates 3 and 4
    assert (row["updates"], row["cut short"], row["deviation within groups"]) == (
        ("3–4", "0.035", "0.25")
    )
    spread = [row[f"welfare, soft: {percent}% quantile"] for percent in (5, 50, 95)]
    assert spread == ["5", "50", "95"] and row["toxicity, soft: 95% quantile"] == "0.5"
    assert row["quality gap, soft: 5% quantile"] == "0.05"


def test_a_swarm_report_has_parts_behaviour_and_what_was_evaluated_later(tmp_path):
    folder = made_up.swarm(tmp_path / "traders")
    evals = records.lines(folder / "evals.jsonl")
    later = evals[3] | {"stage": "eval_only", "reward": [5.0] * 12}
    write_lines(folder / "evals.jsonl", [*evals, later])
    summary, _, _, text = load(finish(folder))
    assert "gain" not in summary and "in mean reward: " in text
    result = summary["eval"]["medium v0.2"]["final"]
    assert "exact" not in result
    for name in ("reward", "payoff", "quality", "used_vote"):
        assert result[name]["mean"] == pytest.approx(np.mean(evals[3][name]))
    assert "| 5, always" not in section(text, "Evaluation\n")
    assert "| 5, always" in section(text, "Evaluated later")
    assert "## Behaviour: after SFT → update 40 (final)" in text
