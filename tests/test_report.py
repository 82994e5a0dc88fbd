"""Protects what a run leaves for a person: every number in summary.json and report.md must follow
from the run folder, and the three pages show the same ones."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import env_letters
import made_up
import metrics
import settings
import train
from bookkeeping import curves, records, refusals, report, tables
from helpers import write_lines
from made_up import CONFIG, MACHINE, TIERS, N, update_line

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("before", "after_sft", "final")


def finish(folder: Path, **state) -> Path:
    """What run.finish does with a folder: the summary and the pages."""
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


def observed(lines: list[dict], **summary) -> str:
    known = {"config": {}, **summary}
    exact = [{"tasks": "x", "stage": "train", "update": 0, "trained": True, "exact": [1.0],
              "reward": [1.0]}]  # fmt: skip
    return "\n".join(report.observations(known, lines, exact))


# ------------------------------------------------------------------------------------ summary.json


def test_the_summary_has_every_result_with_its_interval(run):
    summary, _, evals, _ = load(run)
    assert set(summary["eval"]) == {f"tier {tier}" for tier in TIERS}
    for tier in TIERS:
        assert set(summary["eval"][f"tier {tier}"]) == set(STAGES)
        for stage, result in summary["eval"][f"tier {tier}"].items():
            e = of(evals, stage, tier)
            exact, reward = metrics.proportion(sum(e["exact"]), N), metrics.mean(e["reward"])
            assert (result["exact"], result["low"], result["high"]) == (
                exact.mean, exact.low, exact.high)  # fmt: skip
            assert (result["reward"], result["reward_low"]) == (reward.mean, reward.low)
            for name in ("format", "truncated", "reply_tokens"):
                assert result[name] == pytest.approx(np.mean(e[name]))


def test_the_gain_is_final_minus_sft_on_the_trained_tasks_task_by_task(run):
    summary, _, evals, text = load(run)
    for name, what in (("gain", "exact"), ("gain_reward", "reward")):
        expected = metrics.gain(of(evals, "after_sft")[what], of(evals, "final")[what])
        assert summary[name] == expected.dict()
    assert (
        f"GRPO gained over SFT in exact answers: {metrics.Interval(**summary['gain']).points()}"
        in text
    )
    assert f"in mean reward: {metrics.Interval(**summary['gain_reward']).signed()}" in text


def test_the_summary_keeps_what_identifies_a_run_and_what_it_cost(run):
    summary, *_ = load(run)
    kept = (summary["env"], summary["seed"], summary["trained"], summary["updates"])
    assert kept == ("letters", 5, "tier 6", 30)
    assert summary["model"] == "pico_base", "auto is not a model: say which one it was"
    assert summary["seconds"]["total"] == 600.01 and summary["tokens"]["sampled"] == 1234567
    assert summary["config"] == CONFIG and summary["machine"] == MACHINE


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
    assert [row[0] for row in results] == ["tier 6 (trained)", "tier 3", "tier 5"]
    for row, tier in zip(results, (6, 3, 5)):
        for cell, stage in zip(row[1:], STAGES):
            e = of(evals, stage, tier)
            assert cell.startswith(metrics.proportion(sum(e["exact"]), N).percent())
            assert cell.endswith(f"reward {metrics.mean(e['reward']).text()}")
    head, *results = rows(text, "Evaluation")
    assert len(results) == len(evals)
    for row, e in zip(results, evals):
        cells = dict(zip(head, row))
        assert cells["exact"] == metrics.proportion(sum(e["exact"]), N).percent()
        assert cells["reply tokens"] == metrics.mean(e["reply_tokens"]).text(1)
    head, *results = rows(text, "Trajectory")
    spans = [tuple(map(int, row[0].split("–"))) for row in results]
    assert [i for a, b in spans for i in range(a, b + 1)] == list(range(1, 31))
    for (a, b), row in zip(spans, results):
        cells, block = dict(zip(head, row)), lines[a - 1 : b]
        mean = lambda name: np.mean([line[name] for line in block if name in line])  # noqa: B023
        assert cells["reward"].startswith(f"{mean('reward'):.2f} [")
        assert cells["derives"] == f"{mean('habit_derives'):.3g}" and cells["entropy"] == "0.4"
    settings_of_run = dict(rows(text, "Config"))
    assert settings_of_run["k"] == "8" and settings_of_run["trainable"] == "400000"
    assert "resume" not in settings_of_run, "an empty value says nothing"
    assert "SFT loss: 3.25 → 0.50" in text and "10.0 minutes" in text and "1.23 GB" in text
    assert "nan" not in text.lower() and (run / "curves.png").stat().st_size > 20_000


def test_the_page_shows_the_numbers_of_the_report(run):
    numbers, _ = report.collect(run)
    text = (run / "report.md").read_text()
    assert tables.markdown(numbers["tables"]) in text
    for row in numbers["headline"]["rows"]:
        assert all(", ".join(cell) in text for cell in row["cells"].values())
    exact = next(c for c in numbers["charts"] if "exactly right" in c["title"])
    for series in exact["series"]:
        results = [row for row in rows(text, "Evaluation") if row[1].startswith(series["name"])]
        said = [f"{v:.1f}% [{low:.1f}, {high:.1f}]" for _, v, low, high in series["points"]]
        assert said == [row[3] for row in results]


def test_where_reward_is_exactness_it_is_shown_once(tmp_path):
    folder = finish(made_up.letters(tmp_path / "binary", made_up.growing(), binary=True))
    *_, text = load(folder)
    assert "reward" not in section(text, "Evaluation") + section(text, "Result")
    numbers, _ = report.collect(folder)
    assert numbers["charts"][0]["title"] == f"development, exactly right (= mean reward), n={N}"


def test_an_evaluation_in_which_nothing_is_reported_right_has_nothing_right(tmp_path):
    """An environment may report `exact` only when it is so."""
    folder = made_up.letters(tmp_path / "silent", made_up.growing())
    evals = records.lines(folder / "evals.jsonl")
    for e in evals:
        if e["stage"] == "after_sft":
            del e["exact"]
    write_lines(folder / "evals.jsonl", evals)
    summary, *_ = load(finish(folder))
    assert summary["eval"]["tier 6"]["after_sft"]["exact"] == 0 and summary["gain"]["mean"] > 0


def test_a_run_without_sft_or_updates_reports_too(tmp_path):
    for lines in ([], [update_line(1)]):
        folder = made_up.letters(tmp_path / f"run-{len(lines)}", lines)
        *_, text = load(finish(folder, sft={}))
        assert "SFT loss" not in text and (folder / "curves.png").exists()
        assert ("No GRPO updates in this run." in text) == (not lines)


def test_a_report_can_be_written_again_and_an_unfinished_run_has_a_page(run, capsys, tmp_path):
    before = (run / "report.md").read_text()
    (run / "report.md").write_text("lost")
    report.main([str(run)])
    assert (run / "report.md").read_text() == before and before in capsys.readouterr().out
    going = made_up.letters(tmp_path / "going", made_up.growing())
    with open(going / "metrics.jsonl", "a") as f:
        f.write('{"update": 31, "rew')  # a kill cut the line in two: it is left out
    report.main([str(going)])
    assert (going / "report.html").exists() and not (going / "report.md").exists()
    numbers, _ = report.collect(going)
    state = ["state", "not finished: there is no summary.json yet"]
    assert state in numbers["facts"] and ["updates", "30"] in numbers["facts"]


@pytest.mark.parametrize(
    "words, why",
    [([], "one run folder"), (["a", "b"], "one run folder"), (["/nope"], "there is no such folder"),
     (["."], "it is no run folder")],
)  # fmt: skip
def test_errors_are_one_sentence(words, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=why) as told:
        report.main(words)
    assert "\n" not in str(told.value)


# ------------------------------------------------------------------------------------ observations


def test_now_is_the_level_of_the_adaptive_window():
    rng = np.random.default_rng(0)
    rewards = [*rng.normal(0.2, 0.02, 60), *rng.normal(0.8, 0.02, 25)]
    window = metrics.adaptive_window(rewards)
    assert 15 < window <= 27
    now = metrics.level(rewards[-window:]).text(2)
    text = observed([update_line(i, r) for i, r in enumerate(rewards, 1)])
    assert f"Now: {now}, the mean of the last {window} updates" in text


def test_the_interval_of_a_share_stays_between_0_and_1():
    """Student's does not: two updates of 0.9 and 1.0 reach from 0.3 to 1.6."""
    lines = [update_line(i, r) for i, r in enumerate((0.02, 0.9, 1.0), 1)]
    rewards = [line["reward"] for line in lines]
    assert metrics.level(rewards).high > 1 and metrics.level(rewards).low < 0
    exact = [{"trained": True, "exact": [1.0], "reward": [1.0]}]
    (table,) = report.trajectory([line | {"update": 1} for line in lines] * 10, exact, "letters")
    assert all(row[1].endswith("1.00]") and "[0.00" in row[1] for row in table["rows"])
    assert "mean 0.64 [0.00, 1.00]" in observed(lines) and "Now: 0.64 [0.00, 1.00]" in observed(
        lines
    )
    free = metrics.level(rewards)  # a reward that is no share may be above 1
    assert tables.within(free, rewards, False) == tables.within(free, [*rewards, 1.5], True) == free


def test_observations_tell_reward_length_signal_and_time(run):
    summary, lines, evals, text = load(run)
    rewards = [line["reward"] for line in lines]
    assert metrics.trend(rewards).sentence().capitalize() in text
    assert f"the peak of {max(rewards):.2f}" in text
    assert "from 102 to 129 tokens" in text  # 100 + update: updates 1 to 3 and 28 to 30
    assert "38% of the groups had no signal" in text  # 1 - 25/30 * 3/4
    assert "disagree by 2.0e-06 nats" in text  # of the updates that measured it
    assert "rollout 40%, train 30%, eval 15%, sft 10%" in text
    assert "rollout 2.00 s, train 1.50 s; the trainer waits 57% of the time" in text
    ahead = observed([update_line(1, seconds_wait=0.5)])
    assert "the trainer waits 25% of the time" in ahead


def test_what_is_wrong_is_told_and_its_absence_too():
    lines = made_up.growing(12)
    assert "Nothing was found wrong" in observed(lines)
    silent = [line | {"groups_with_signal": 0.0, "reward": 0.0} for line in lines]
    text = observed(silent)
    assert "Found wrong at update 10: no signal: " in text and "Nothing was found" not in text


@pytest.mark.parametrize(
    "shares, expected",
    [([0.0] * 7 + [0.9] * 5, 8), ([0.9] * 5, 1), ([0.9] * 4 + [0.1] + [0.6] * 5, 6),
     ([0.5] * 20, None), ([0.9] * 4, None), ([], None)],
)  # fmt: skip
def test_thinking_starts_at_the_first_of_five_updates_with_a_majority(shares, expected):
    lines = [update_line(i, derives=share) for i, share in enumerate(shares, 1)]
    assert curves.thinking_starts(lines) == expected
    if lines:
        assert (f"begins to think at update {expected}" in observed(lines)) == bool(expected)


def test_a_curriculum_is_told_and_only_its_last_level_settles():
    rng = np.random.default_rng(0)
    reward = lambda i: (0.8 if i < 100 else 0.3) + rng.normal(0, 0.005)
    lines = [update_line(i + 1, reward(i), level=5 + (i >= 100)) for i in range(200)]
    text = observed(lines)
    assert "The curriculum: 5 from update 1, 6 from update 101." in text
    assert "Has it settled, at level 6? Settled at 0.30" in text and "Now, at level 6: 0.30" in text
    chart = next(c for c in curves.of_updates(lines, "letters") if c["title"] == "training reward")
    assert chart["marks"] == [[101, "6"]]


# ------------------------------------------------------------------- the swarm, a part of one's own


def test_a_swarm_report_has_parts_behaviour_and_what_was_evaluated_later(tmp_path):
    folder = made_up.swarm(tmp_path / "traders")
    evals = records.lines(folder / "evals.jsonl")
    later = evals[3] | {"stage": "eval_only", "reward": [5.0] * 12}
    write_lines(folder / "evals.jsonl", [*evals, later])
    summary, _, _, text = load(finish(folder))
    assert "gain" not in summary
    for stage, e in zip(("before", "after_sft", "final"), (evals[0], evals[1], evals[3])):
        result = summary["eval"]["medium v0.2"][stage]
        assert result["reward"] == pytest.approx(np.mean(e["reward"])) and "exact" not in result
        for name in ("payoff", "quality", "used_vote"):
            assert result["components"][name]["mean"] == pytest.approx(np.mean(e[name]))
    assert "5.000" not in section(text, "Evaluation\n") and "5.000" in section(
        text, "Evaluated later"
    )
    assert "## Behaviour: after SFT → update 40 (final)" in text and "Its 25 calls" in text
    report.main([str(folder), "before", "20"])
    assert "## Behaviour: before SFT → update 20" in (folder / "report.md").read_text()


def test_a_report_of_letters_loads_nothing_of_the_swarm(run):
    code = (
        "import sys; from pathlib import Path; from bookkeeping import report; at = set(sys.modules); "
        f"report.write(Path({str(run)!r})); print(at & {{'bookkeeping.viewer', 'matplotlib'}}, "
        "[m for m in sys.modules if 'swarm' in m or m in ('bookkeeping.behaviour', 'statsmodels')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set() []\n", done.stdout + done.stderr


@pytest.mark.usefixtures("no_pictures")
def test_a_part_that_somebody_adds_to_the_score_is_printed_and_stands_in_tables_and_curves(
    monkeypatch, capsys, tmp_path
):
    score = env_letters.Letters.score
    monkeypatch.setattr(env_letters.Letters, "score", lambda self: score(self) | {"rhyme": 0.25})
    cfg = settings.Config(updates=2, num_tasks=2, k=2, eval_n=4, max_tokens=16, sft_steps=1,
                          sft_examples=4, threads=1, wandb=False, difficulty=2, device="cpu",
                          eval_other_tiers=False, runs=str(tmp_path), name="run")  # fmt: skip
    refusals.check(cfg)
    folder = train.train(cfg)
    assert capsys.readouterr().out.count("  rhyme 0.25  ") == 2
    text = (folder / "report.md").read_text()
    for title, value in (("Trajectory", "0.25"), ("Evaluation", "0.250 [")):
        head, *found = rows(text, title)
        assert all(row[head.index("rhyme")].startswith(value) for row in found)
    (chart,) = [c for c in report.collect(folder)[0]["charts"] if "parts" in c["title"]]
    assert {point[1] for point in chart["series"][0]["points"]} == {0.25}


# ------------------------------------------------------------------------------------ what is drawn


def test_curves_are_drawn_from_the_charts():
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    points = [[-1, 0.1, 0.0, 0.2], [0, 0.5, 0.4, 0.6], [10, -3.0, -4.0, -2.0]]
    (chart,) = curves.chart("t", [{"name": "a", "points": points}], marks=[[5, "harder"]])
    curves.draw_chart(ax, chart)
    curve, before, mark = ax.lines
    assert list(curve.get_ydata()) == [0.5, -3.0]
    assert (before.get_marker(), before.get_xdata()[0], before.get_ydata()[0]) == ("x", 0, 0.1)
    assert mark.get_xdata()[0] == 5 and ax.texts[0].get_text() == " harder"
    assert ax.get_ylim()[0] == -4.0  # rewards below 0 are in the picture
    assert curves.chart("nothing", [{"name": "a", "points": [[1, None, None, None]]}]) == []


def test_layers_lie_on_each_other():
    (chart,) = curves.stacked("t", [1, 2], {"a": [1.0, 2.0], "b": [3.0, None]}, "s")
    a, b = (s["points"] for s in chart["series"])
    assert a == [[1, 1.0, 0.0, 1.0], [2, 2.0, 0.0, 2.0]]
    assert b == [[1, 3.0, 1.0, 4.0], [2, None, 2.0, 2.0]]
