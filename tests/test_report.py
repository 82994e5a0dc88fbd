"""Protects what a run leaves for a person: every number in summary.json and report.md must follow from the run folder.

A fake run folder is built here, line by line as train.py writes one, with random results whose statistics are worked out again.
"""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import env_letters
import metrics
import settings
import train
import warm
from bookkeeping import behaviour, curves, report
from helpers import write_lines
from lab.common import read_lines

ROOT = Path(__file__).resolve().parent.parent
N = 64  # tasks a tier
TIERS = (3, 5, 6)
STAGES = ("before", "after_sft", "final")
SHARES = {"before": 0.0, "after_sft": 0.3, "final": 0.75}  # exact answers on the trained tier
HABITS = ("bare", "states", "derives")


def make_config(**changes) -> dict:
    config = {
        "env": "letters", "difficulty": 6, "reward": "binary", "think": True, "curriculum": False, "model": "auto", "lora_rank": 32,
        "lora_alpha": 64, "device": "auto", "threads": 0, "sft_style": "states", "sft_examples": 100, "sft_steps": 50, "sft_batch": 8,
        "sft_lr": 1e-3, "updates": 30, "num_tasks": 8, "k": 8, "loss": "grpo", "baseline": "group", "normalize": True, "lr": 5e-4,
        "warmup": 5, "kl": 0.0, "epochs": 1, "temperature": 1.0, "max_tokens": 320, "micro_tokens": 16384,
        "gradient_checkpointing": False, "eval_n": N, "eval_every": 20, "seed": 5, "name": "", "runs": "runs", "resume": "",
        "save_every": 10, "wandb": False,
    }  # fmt: skip
    return config | changes


def make_state(updates: int, **changes) -> dict:
    state = {
        "update": updates, "level": 6, "recent": [], "rewards": [], "sft": {"loss_first": 3.25, "loss_last": 0.5}, "warnings": {},
        "seconds": {"total": 600.006, "rollout": 240.0, "train": 180.0, "eval": 90.0, "sft": 60.0},
        "tokens": {"sampled": 1234567, "trained": 765432, "sft": 4321},
    }  # fmt: skip
    return state | changes


MACHINE = {
    "device": "x86_64 CPU, 2 threads", "python": "3.11.0", "torch": "2.0", "transformers": "4.0", "peft": "0.1", "model": "pico_base",
    "parameters": 5_000_000, "trainable": 400_000, "peak_rss_gb": 1.234,
}  # fmt: skip


def eval_line(update: int, stage: str, tier: int, exact: list[float], seed: int = 0, trained: int = 6) -> dict:
    rng = np.random.default_rng((seed, tier, update + 1))
    return {
        "update": update, "stage": stage, "tasks": f"tier {tier}", "trained": tier == trained,
        "reward": [max(e, 0.1 * int(rng.integers(0, 5))) for e in exact],
        "exact": exact, "format": [max(e, float(rng.random() < 0.5)) for e in exact],
        "reply_tokens": [int(x) for x in rng.integers(5, 320, len(exact))], "truncated": [bool(x) for x in rng.random(len(exact)) < 0.1],
    }  # fmt: skip


def metric_line(update: int, reward: float = 0.5, derives: float = 0.0, silent: bool = False, **changes) -> dict:
    line = {
        "update": update, "level": 6, "reward": reward, "reward_low": reward - 0.05, "reward_high": reward + 0.05, "n": 64,
        "exact": reward, "format": 0.9, "fraction": reward, "habit_bare": 0.0, "habit_states": 1.0 - derives, "habit_derives": derives,
        "reply_tokens": 100.0 + update, "truncated": 0.0, "errors": 0,
    }  # fmt: skip
    if silent:  # no group had a signal, so nothing was trained: grpo.update has no more than this to say
        line |= {"groups_with_signal": 0.0, "advantage_abs": 0.0, "trained_tokens": 0, "loss": 0.0, "grad_norm": 0.0}
    else:
        line |= {
            "loss": 0.001, "entropy": 0.4, "ratio": 1.0, "clip_fraction": 0.0, "approx_kl": 1e-9, "mismatch": 2e-6,
            "groups_with_signal": 0.75, "advantage_abs": 0.6, "trained_tokens": 6000, "grad_norm": 0.8, "ratio_max": 1.0,
        }  # fmt: skip
    return line | {"seconds_rollout": 2.0, "seconds_train": 1.5} | changes


def make_run(folder: Path, lines: list[dict], config: dict | None = None, state: dict | None = None, shares: dict = SHARES) -> dict:
    """A finished run folder; returns its summary."""
    folder.mkdir()
    updates = len(lines)
    config, state = config or make_config(updates=updates), state or make_state(updates)
    rng = np.random.default_rng(config["seed"])
    hard = {tier: rng.random(N) for tier in TIERS}  # the same tasks every time
    evals = []
    for update, stage in [(-1, "before"), (0, "after_sft"), *([(20, "train")] if updates > 20 else []), (updates, "final")]:
        for tier in TIERS:
            share = shares.get(stage, 0.5) * (1.0 if tier == config["difficulty"] else 0.5)
            noisy = hard[tier] + rng.normal(0, 0.05, N)
            evals.append(
                eval_line(update, stage, tier, [float(h < share) if share else 0.0 for h in noisy], config["seed"], config["difficulty"])
            )
    write_lines(folder / "evals.jsonl", evals)
    if lines:
        write_lines(folder / "metrics.jsonl", lines)
    (folder / "config.json").write_text(json.dumps(config))
    summary = report.summarize_run(folder, config, state, MACHINE)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    return json.loads((folder / "summary.json").read_text())


def growing_lines(updates: int = 30, starts: int = 12) -> list[dict]:
    """Reward rises, and from update `starts` on most replies derive; every sixth update has no signal."""
    rng = np.random.default_rng(8)
    return [
        metric_line(i, float(0.1 + 0.02 * i + rng.normal(0, 0.02)), 0.2 if i < starts else 0.9, silent=i % 6 == 0)
        for i in range(1, updates + 1)
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "grown"
    make_run(folder, growing_lines())
    report.write(folder)
    return folder


def load(folder: Path) -> tuple[dict, list[dict], list[dict], str]:
    evals = read_lines(folder / "evals.jsonl")
    lines = read_lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    return json.loads((folder / "summary.json").read_text()), lines, evals, (folder / "report.md").read_text()


def wilson(successes: float, n: int) -> tuple[float, float]:
    z, p = 1.959963984540054, successes / n
    middle, reach = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return (middle - reach) / (1 + z**2 / n), (middle + reach) / (1 + z**2 / n)


def percent(successes: float, n: int) -> str:
    low, high = wilson(successes, n)
    return f"{100 * successes / n:.1f}% [{100 * low:.1f}, {100 * abs(high):.1f}]"


def section(text: str, title: str) -> list[str]:
    return text.split(f"## {title}\n")[1].split("\n## ")[0].strip().splitlines()


def table_rows(text: str, title: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section(text, title) if line.startswith("|")]
    return rows[:1] + rows[2:]  # without the dashes


# ------------------------------------------------------------------------------------------------ summary.json


def test_summary_has_every_evaluation_with_its_wilson_interval(run):
    summary, _, evals, _ = load(run)
    assert set(summary["eval"]) == {f"tier {tier}" for tier in TIERS}
    for tier in TIERS:
        assert set(summary["eval"][f"tier {tier}"]) == set(STAGES), "evaluations during training are no result"
        for stage in STAGES:
            (line,) = (e for e in evals if e["tasks"] == f"tier {tier}" and e["stage"] == stage)
            result, right = summary["eval"][f"tier {tier}"][stage], sum(line["exact"])
            low, high = wilson(right, N)
            assert result["n"] == N
            assert result["exact"] == right / N
            assert (result["low"], result["high"]) == pytest.approx((low, high), abs=1e-9)
            assert result["reward"] == pytest.approx(sum(line["reward"]) / N)
            assert result["format"] == pytest.approx(sum(line["format"]) / N)
            assert result["truncated"] == pytest.approx(sum(line["truncated"]) / N)
            assert result["reply_tokens"] == pytest.approx(sum(line["reply_tokens"]) / N)


def test_summary_s_gain_is_final_minus_sft_on_the_trained_tier_task_by_task(run):
    summary, _, evals, _ = load(run)
    after_sft, final = (np.array(next(e["exact"] for e in evals if e["stage"] == stage and e["tasks"] == "tier 6")) for stage in STAGES[1:])
    difference = final - after_sft
    gain = summary["gain"]
    assert gain["n"] == N
    assert gain["mean"] == pytest.approx(difference.mean())
    draws = np.random.default_rng(123).integers(0, N, (20_000, N))  # another bootstrap, with other random numbers
    low, high = np.quantile(difference[draws].mean(1), [0.025, 0.975])
    assert (gain["low"], gain["high"]) == pytest.approx((low, high), abs=1.01 / N)  # means move in steps of 1/N
    assert gain["low"] < gain["mean"] < gain["high"]


def test_summary_keeps_what_identifies_and_what_it_cost(run):
    summary, *_ = load(run)
    assert (summary["env"], summary["seed"], summary["trained"], summary["updates"]) == ("letters", 5, "tier 6", 30)
    assert summary["model"] == "pico_base", "auto is not a model: say which one it was"
    assert summary["seconds"] == {"total": 600.01, "rollout": 240.0, "train": 180.0, "eval": 90.0, "sft": 60.0}
    assert summary["tokens"]["sampled"] == 1234567 and summary["tokens"]["trained"] == 765432
    assert summary["peak_rss_gb"] == 1.234
    assert summary["sft"] == {"loss_first": 3.25, "loss_last": 0.5}
    assert summary["config"] == make_config() and summary["warnings"] == {}


def test_a_named_model_stays_named(tmp_path):
    assert make_run(tmp_path / "named", [], make_config(updates=0, model="some/model"))["model"] == "some/model"


def test_the_gain_is_that_of_the_trained_tier_whichever_it_is(tmp_path):
    folder = tmp_path / "five"
    summary = make_run(folder, [], make_config(updates=0, difficulty=5))
    evals = read_lines(folder / "evals.jsonl")
    after_sft, final = (next(np.mean(e["exact"]) for e in evals if e["stage"] == stage and e["tasks"] == "tier 5") for stage in STAGES[1:])
    assert summary["gain"]["mean"] == pytest.approx(final - after_sft)


# ------------------------------------------------------------------------------------------------ report.md and curves.png


def test_write_makes_a_report_and_a_picture(run):
    png = (run / "curves.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and len(png) > 20_000
    text = (run / "report.md").read_text()
    assert text.startswith("# grown\n") and "![curves](curves.png)" in text
    for title in ("Config", "SFT warm-up", "Evaluation", "Trajectory", "Observations (computed)"):
        assert f"## {title}\n" in text
    assert "nan" not in text.lower()


def test_the_head_of_the_report_gives_the_three_results_and_the_gain(run):
    summary, _, evals, text = load(run)
    right = {stage: next(sum(e["exact"]) for e in evals if e["stage"] == stage and e["tasks"] == "tier 6") for stage in STAGES}
    head = text.split("## Config")[0]
    assert " → ".join(percent(right[stage], N) for stage in STAGES) in head
    assert f"{N} development tasks" in head and "30 updates" in head
    assert f"{100 * (right['final'] - right['after_sft']) / N:+.1f} points" in head
    assert "10.0 minutes" in head and "1.23 GB" in head and "1,234,567 tokens sampled, 765,432 trained" in head


def test_the_evaluation_table_has_a_row_for_every_evaluation(run):
    _, _, evals, text = load(run)
    title, *rows = table_rows(text, "Evaluation")
    assert title == ["update", *(f"tier {tier}, {what}" for what in ("exact", "reward") for tier in TIERS)]
    assert [row[0] for row in rows] == ["before SFT", "after SFT (0)", "20", "30 (final)"]
    for row, stage in zip(rows, ("before", "after_sft", "train", "final")):
        mine = [e for tier in TIERS for e in evals if (e["stage"], e["tasks"]) == (stage, f"tier {tier}")]
        assert row[1:4] == [percent(sum(e["exact"]), N) for e in mine]
        assert [cell.split(" [")[0] for cell in row[4:]] == [f"{np.mean(e['reward']):.3f}" for e in mine]


def test_an_evaluation_in_which_nothing_is_reported_right_has_nothing_right(tmp_path):
    """An environment may report `exact` only when it is so."""
    folder = tmp_path / "silent"
    make_run(folder, growing_lines())
    evals = read_lines(folder / "evals.jsonl")
    for e in evals:
        if e["stage"] == "after_sft":
            del e["exact"]
    silent = [e for e in evals if "exact" not in e]
    assert silent and report.records.with_exact(silent) == silent  # where no evaluation has it, none is given it
    write_lines(folder / "evals.jsonl", evals)
    summary = report.summarize_run(folder, make_config(updates=30), make_state(30), MACHINE)
    assert summary["eval"][summary["trained"]]["after_sft"]["exact"] == 0 and summary["gain"]["mean"] > 0
    (folder / "summary.json").write_text(json.dumps(summary))
    report.write(folder)


def test_where_reward_is_exactness_it_is_shown_once(tmp_path):
    folder = tmp_path / "binary"
    make_run(folder, growing_lines())
    evals = read_lines(folder / "evals.jsonl")
    write_lines(folder / "evals.jsonl", [e | {"reward": e["exact"]} for e in evals])
    summary = report.summarize_run(folder, make_config(updates=30), make_state(30), MACHINE)
    (folder / "summary.json").write_text(json.dumps(summary))
    report.write(folder)
    text = (folder / "report.md").read_text()
    assert table_rows(text, "Evaluation")[0] == ["update", *(f"tier {tier}, exact" for tier in TIERS)]
    assert "in reward" not in text and summary["gain"] == summary["gain_reward"]


def test_the_gain_in_reward_is_paired_too(run):
    summary, _, evals, text = load(run)
    after_sft, final = (
        np.array(next(e["reward"] for e in evals if e["stage"] == stage and e["tasks"] == "tier 6")) for stage in STAGES[1:]
    )
    gain = summary["gain_reward"]
    assert gain["mean"] == pytest.approx((final - after_sft).mean()) and gain["low"] < gain["mean"] < gain["high"]
    assert f"in reward: {gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]" in text


def test_the_trajectory_averages_blocks_that_cover_every_update_once(run):
    _, lines, _, text = load(run)
    title, *rows = table_rows(text, "Trajectory")
    assert title[:5] == ["updates", "reward", "exact", "format", "reply tokens"]
    spans = [tuple(int(x) for x in row[0].split("–")) for row in rows]
    assert [i for first, last in spans for i in range(first, last + 1)] == list(range(1, 31))
    for (first, last), row in zip(spans, rows):
        block = lines[first - 1 : last]
        cells = dict(zip(title, row))
        average = {key: sum(line[key] for line in block) / len(block) for key in ("reward", "exact", "reply_tokens", "habit_derives")}
        assert cells["reward"].startswith(f"{average['reward']:.2f} [")
        assert cells["exact"] == f"{average['exact']:.2f}"
        assert cells["reply tokens"] == f"{average['reply_tokens']:.0f}"
        assert cells["derives"] == f"{100 * average['habit_derives']:.0f}%"


def test_the_report_tells_format_and_reward_after_sft(run):
    _, _, evals, text = load(run)
    after = next(e for e in evals if e["stage"] == "after_sft" and e["tasks"] == "tier 6")
    cells = dict(row for row in table_rows(text, "SFT warm-up"))
    assert cells["SFT loss"] == "3.25 → 0.50 (50 steps)"
    assert cells["format compliance after SFT"] == f"{percent(sum(after['format']), N)}, n={N}"
    assert cells["mean reward after SFT"].startswith(f"{np.mean(after['reward']):.3f} [")


def test_the_config_table_lists_what_was_set(run):
    cells = dict(table_rows((run / "report.md").read_text(), "Config"))
    assert cells["difficulty"] == "6" and cells["k"] == "8" and cells["curriculum"] == "False" and cells["kl"] == "0.0"
    assert "resume" not in cells, "an empty value says nothing"
    assert cells["trainable parameters"] == "400,000 of 5,000,000"


def test_a_run_without_grpo_reports_too(tmp_path):
    folder = tmp_path / "sft-only"
    summary = make_run(folder, [], make_config(updates=0), shares={"before": 0.0, "after_sft": 0.3, "final": 0.3})
    report.write(folder)
    text = (folder / "report.md").read_text()
    assert summary["updates"] == 0
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "No GRPO updates in this run." in text and "Training reward" not in text
    assert [row[0] for row in table_rows(text, "Evaluation")[1:]] == ["before SFT", "after SFT (0)", "0 (final)"]


def test_a_run_without_sft_or_with_one_update_reports_too(tmp_path):
    folder = tmp_path / "one"
    lines = [metric_line(1, silent=True)]
    make_run(folder, lines, make_config(updates=1, sft_steps=0), make_state(1, sft={}))
    report.write(folder)
    text = (folder / "report.md").read_text()
    assert "SFT loss" not in text and (folder / "curves.png").exists()
    assert len(table_rows(text, "Trajectory")) == 2


def test_a_report_can_be_written_again_from_the_folder_alone(run):
    before = (run / "report.md").read_text()
    (run / "report.md").write_text("lost")
    done = warm.run(["-m", "bookkeeping.report", str(run)], ROOT)
    assert done.returncode == 0, done.stderr
    assert (run / "report.md").read_text() == before
    assert before in done.stdout


def test_the_script_refuses_a_folder_that_is_no_finished_run(tmp_path):
    done = warm.run(["-m", "bookkeeping.report", str(tmp_path)], ROOT)
    assert done.returncode != 0 and "summary.json" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words, why", [
    ([], "it takes one run folder, and got 0"), (["runs/a", "runs/b"], "it takes one run folder, and got 2"),
    (["/nope"], "/nope: there is no such folder, check the path"),
])  # fmt: skip
def test_the_script_says_what_is_wrong_and_how_it_is_used(words, why):
    with pytest.raises(SystemExit, match=f"^{why}; python -m bookkeeping.report runs/NAME writes"):
        report.main(words)


def test_the_script_says_how_it_is_used_and_that_a_run_is_not_finished(capsys, tmp_path):
    report.main(["--help"])
    assert capsys.readouterr().out.startswith("python -m bookkeeping.report runs/NAME writes")
    with pytest.raises(SystemExit, match="has no summary.json yet: it is not finished, go on with --resume"):
        report.main([str(tmp_path)])


# ------------------------------------------------------------------------------------------------ when thinking starts


def shares(*values: float) -> list[dict]:
    return [{"update": i + 1, "habit_derives": v} for i, v in enumerate(values)]


@pytest.mark.parametrize(
    "values,expected",
    [
        ([0.0] * 7 + [0.9] * 5, 8),
        ([0.0] * 7 + [0.9] * 20, 8),
        ([0.9] * 5, 1),
        ([0.9] * 4 + [0.1] + [0.6] * 5, 6),  # four are not yet a habit
        ([0.1, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9], 4),
        ([0.0] * 20, None),
        ([0.5] * 20, None),  # half is no majority
        ([0.9] * 4, None),
        ([0.0] * 10 + [0.9] * 4, None),
        ([0.9, 0.9, 0.4] * 10, None),
        ([], None),
    ],
)
def test_thinking_starts_at_the_first_of_five_updates_with_a_majority(values, expected):
    assert curves.thinking_starts(shares(*values)) == expected


def test_thinking_starts_tells_the_update_and_not_the_line():
    lines = [{"update": i, "habit_derives": 0.9 if i >= 43 else 0.1} for i in range(41, 60)]
    assert curves.thinking_starts(lines) == 43


def test_an_environment_without_habits_never_starts_to_think():
    assert curves.thinking_starts([{"update": i} for i in range(1, 20)]) is None


# ------------------------------------------------------------------------------------------------ observations


def observed(tmp_path: Path, lines: list[dict], **state) -> str:
    summary = make_run(tmp_path / "run", lines, state=make_state(len(lines), **state))
    return "\n".join(report.observations(summary, lines))


@pytest.mark.parametrize(
    "before,after,verdict",
    [(0.3, 0.8, "gained"), (0.8, 0.3, "lost"), (0.5, 0.5, "neither gained nor lost measurably")],
)
def test_the_verdict_follows_the_interval(tmp_path, before, after, verdict):
    summary = make_run(tmp_path / "run", [], shares={"before": 0.1, "after_sft": before, "final": after})
    low, high = summary["gain"]["low"], summary["gain"]["high"]
    assert {"gained": low > 0, "lost": high < 0, "neither": low <= 0 <= high}[verdict.split()[0]], "the fake data must fit the verdict"
    first = next(o for o in report.observations(summary, []) if "exact answers" in o)
    assert (
        first.startswith(f"GRPO {verdict} in exact answers on tier 6: ")
        and f"{100 * summary['gain']['mean']:+.1f} points" in first
        and f"n={N}" in first
    )


def test_a_gain_of_exactly_nothing_is_not_a_gain(tmp_path):
    summary = make_run(tmp_path / "run", [])
    for low, high, word in ((0.0, 0.2, "neither"), (-0.2, 0.0, "neither"), (0.001, 0.2, "gained"), (-0.2, -0.001, "lost")):
        summary["gain"] = {"mean": (low + high) / 2, "low": low, "high": high, "n": N}
        assert next(o for o in report.observations(summary, []) if "exact answers" in o).split()[1] == word


def test_tiers_that_were_not_trained_are_told_apart(run):
    summary, lines, evals, _ = load(run)
    text = "\n".join(report.observations(summary, lines))
    for tier in (3, 5):
        sft, final = (next(sum(e["exact"]) for e in evals if (e["stage"], e["tasks"]) == (stage, f"tier {tier}")) for stage in STAGES[1:])
        assert f"Tier {tier}, which was not trained: {percent(sft, N)} → {percent(final, N)}." in text
    assert "Tier 6, which" not in text


def test_observations_about_reward_length_and_signal(run):
    summary, lines, _, _ = load(run)
    text = "\n".join(report.observations(summary, lines))
    rewards = [line["reward"] for line in lines]
    best = max(range(30), key=rewards.__getitem__)
    assert report.metrics.distribution(rewards).sentence() in text and f"{rewards[best]:.2f}" in text
    assert "Has the training reward settled? " + report.metrics.trend(rewards).sentence().capitalize() in text
    assert "from 102 to 129 tokens" in text  # 100 + update: means over updates 1-3 and 28-30
    assert "38% of the groups had no signal" in text  # 5 updates of 30 without, the others with 3 of 4 groups: 1 - 25/30 * 3/4
    assert "rollout 40%, train 30%, eval 15%, sft 10%" in text


def test_observations_say_when_thinking_began_or_that_it_did_not(tmp_path):
    assert "begins to think at update 12:" in observed(tmp_path, growing_lines(30, starts=12))
    never = "\n".join(report.observations(json.loads((tmp_path / "run/summary.json").read_text()), growing_lines(30, starts=99)))
    assert "begins to think" not in never
    assert "derive" in never and "(last tenth of the updates: 20%)" in never


def test_what_is_wrong_is_told_and_its_absence_too(tmp_path):
    lines = growing_lines(12)
    summary = make_run(tmp_path / "run", lines)
    assert "* Nothing was found wrong" in report.text("run", summary, lines, report.records.lines(tmp_path / "run" / "evals.jsonl"))
    silent = [line | {"groups_with_signal": 0.0, "reward": 0.0} for line in lines]
    text = "\n".join(report.observations(summary, silent))
    assert "Found wrong at update 10: no signal: " in text and "Nothing was found" not in text


def test_a_habit_that_was_lost_again_is_not_said_to_last(tmp_path):
    lines = [metric_line(i, derives=0.9 if 5 <= i < 12 else 0.0) for i in range(1, 61)]  # derives for 7 updates of 60
    text = observed(tmp_path, lines)
    assert "begins to think at update 5: in that update and the next four" in text and "in the last tenth of the updates 0% do" in text


def test_a_habit_too_young_to_date_is_not_said_to_be_absent(tmp_path):
    lines = [metric_line(i, derives=0.9 if i > 27 else 0.1) for i in range(1, 31)]  # the last three of thirty
    text = observed(tmp_path, lines)
    assert "No five updates in a row had a majority of replies that derive the answer (last tenth of the updates: 90%)" in text


def test_mismatch_and_entropy_are_averaged_over_the_updates_that_measured_them(tmp_path):
    lines = [metric_line(i, silent=i % 2 == 0) for i in range(1, 21)]
    summary = make_run(tmp_path / "run", lines)
    text = report.text("run", summary, lines, read_lines(tmp_path / "run/evals.jsonl"))
    assert "disagree by 2.0e-06 nats" in "\n".join(report.observations(summary, lines))
    title, *rows = table_rows(text, "Trajectory")
    assert {row[title.index("entropy")] for row in rows} == {"0.40"}


# ------------------------------------------------------------------------------------------------ where the seconds go


def timed(rollout: float, environment: float, sync: float, wait: float, train: float, **line) -> dict:
    seconds = {"rollout": rollout, "environment": environment, "sync": sync, "wait": wait, "train": train}
    return line | {f"seconds_{part}": value for part, value in seconds.items()}


IN_TURN = [timed(2.0, 0.5, 0.1, 0.0, 1.0), timed(4.0, 1.5, 0.3, 0.0, 2.0)]  # means 3, 1, 0.2, 1.5: 5.7 s
AHEAD = [timed(3.0, 1.0, 0.5, 3.0, 3.0), timed(2.0, 1.0, 0.5, 1.0, 3.0)]  # sampler 2.5, 1, 0.5 and idle 1; trainer 2 and 3


def test_in_turn_an_update_is_one_bar_and_the_trainer_waits_for_all_but_its_own_work():
    (name, bar), *others = curves.time_bars(IN_TURN).items()
    assert name == "in turn" and not others
    assert bar == pytest.approx({"rollout": 3.0, "environment": 1.0, "sync": 0.2, "train": 1.5})
    assert curves.waiting(IN_TURN) == pytest.approx(1 - 1.5 / 5.7)
    assert curves.where_time_goes(IN_TURN) == [
        "An update, on average: in turn 5.70 s: rollout 53%, environment 18%, sync 4%, train 26%. The trainer waits for samples "
        "74% of the time."
    ]


def test_ahead_trainer_and_sampler_have_a_bar_each_and_both_may_wait():
    bars = curves.time_bars(AHEAD)
    assert list(bars) == ["trainer", "sampler"]
    assert bars["trainer"] == pytest.approx({"train": 3.0, "wait": 2.0})
    assert bars["sampler"] == pytest.approx({"rollout": 2.5, "environment": 1.0, "sync": 0.5, "wait": 1.0})
    assert curves.waiting(AHEAD) == pytest.approx(2 / 5)
    assert curves.where_time_goes(AHEAD) == [
        "An update, on average: trainer 5.00 s: train 60%, wait 40%; sampler 5.00 s: rollout 50%, environment 20%, sync 10%, wait 20%. "
        "The trainer waits for samples 40% of the time."
    ]


def test_a_sampler_that_is_the_bottleneck_never_waits_less_than_not_at_all():
    lines = [timed(9.0, 1.0, 0.0, 0.5, 3.0)]  # it played on while something else, an evaluation, was waited for
    assert curves.time_bars(lines)["sampler"] == {"rollout": 9.0, "environment": 1.0, "sync": 0.0, "wait": 0.0}


@pytest.mark.parametrize("lines", [IN_TURN, AHEAD])
def test_the_drawn_bars_are_as_long_as_the_parts(lines):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots()
    curves.draw_time(ax, lines)
    bars = curves.time_bars(lines)
    assert [p.get_width() for p in ax.patches] == pytest.approx([s for bar in bars.values() for s in bar.values()])
    ends = [sum(list(bar.values())[:i]) for bar in bars.values() for i in range(len(bar))]
    assert [p.get_x() for p in ax.patches] == pytest.approx(ends)
    assert [label.get_text() for label in ax.get_yticklabels()] == list(bars)
    assert f"waits for samples {100 * curves.waiting(lines):.0f}% of the time" in ax.get_title()
    plt.close(fig)


@pytest.mark.parametrize("seconds, part", [(IN_TURN, "rollout"), (AHEAD, "wait")])
def test_the_report_tells_the_share_of_each_part_and_where_an_updates_seconds_go(tmp_path, seconds, part):
    lines = [metric_line(i + 1, **seconds[i % 2]) for i in range(10)]
    parts = ("rollout", "environment", "sync", "wait", "train")
    total = {part: sum(line[f"seconds_{part}"] for line in lines) for part in parts}
    folder = tmp_path / "timed"
    make_run(folder, lines, state=make_state(10, seconds=total | {"total": 100.0, "eval": 20.0, "sft": 5.0}))
    report.write(folder)
    observed = section((folder / "report.md").read_text(), "Observations (computed)")
    told = f"* Time: {part} {total[part]:.0f}%, train {total['train']:.0f}%, eval 20%, sft 5%; the rest is loading and writing."
    assert told in observed
    assert f"* {curves.where_time_goes(lines)[0]}" in observed
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------ a part of one's own


@pytest.mark.usefixtures("no_pictures")
def test_a_part_that_somebody_adds_to_the_score_is_printed_and_stands_in_tables_and_curves(monkeypatch, capsys, tmp_path):
    score, drawn = env_letters.Letters.score, []
    monkeypatch.setattr(env_letters.Letters, "score", lambda self: score(self) | {"bonus_for_rhyme": 0.25})
    draw = curves.draw_own
    monkeypatch.setattr(curves, "draw_own", lambda ax, *given: (draw(ax, *given), drawn.append(ax)))
    cfg = settings.Config(updates=2, num_tasks=2, k=2, eval_n=4, max_tokens=16, sft_steps=1, sft_examples=4, threads=1, wandb=False,
                          difficulty=2, eval_other_tiers=False, device="cpu", runs=str(tmp_path), name="run")  # fmt: skip
    settings.check(cfg)
    text = (train.train(cfg) / "report.md").read_text()
    assert capsys.readouterr().out.count("  bonus for rhyme 0.25  ") == 2
    trajectory, evaluation = table_rows(text, "Trajectory"), table_rows(text, "Evaluation")
    assert [row[trajectory[0].index("bonus for rhyme")] for row in trajectory[1:]] == ["0.25", "0.25"]
    assert [row[evaluation[0].index("tier 2, bonus for rhyme")][:6] for row in evaluation[1:]] == ["0.250 "] * 3
    shown = {line.get_label(): list(line.get_ydata()) for line in drawn[0].lines}
    assert shown["bonus for rhyme"] == [0.25, 0.25] and [0.25, 0.25] in list(shown.values())[:1]


# ------------------------------------------------------------------------------------------------ what must not change


@pytest.mark.parametrize("kept", ["showcase"])
def test_the_reports_of_committed_runs_come_out_the_same(tmp_path, kept):
    """Written again from the committed files: the same keys and numbers in the summary, the same report to the letter."""
    folder = shutil.copytree(ROOT / "results" / kept, tmp_path / kept.replace("/", "-"))
    was = json.loads((folder / "summary.json").read_text())
    again = report.summarize_run(folder, was["config"], was | {"update": was["updates"], "warnings": {}}, was["machine"])
    assert list(again) == ["warnings" if name == "collapse" else name for name in was] and again["gain"] == pytest.approx(was["gain"])
    for tasks, stages in was["eval"].items():
        assert list(again["eval"][tasks]) == list(stages)
        for stage, result in stages.items():
            assert list(again["eval"][tasks][stage]) == list(result) and again["eval"][tasks][stage] == pytest.approx(result)
    written = (ROOT / "results" / kept / "report.md").read_text()
    evals = [e for e in report.records.lines(folder / "evals.jsonl") if e["stage"] != "eval_only"]  # held-out tasks, played later
    text = report.text(written.partition("\n")[0].removeprefix("# "), was, report.records.lines(folder / "metrics.jsonl"), evals)
    assert text == written


# ------------------------------------------------------------------------------------------------ an environment without exact answers


def make_swarm(folder: Path, updates: int = 12, later: bool = True) -> dict:
    """A finished swarm run of scripted players; hard scenarios are looked at before and at the end only."""
    folder.mkdir()
    behaviour.made_up(folder, 12)
    evals = read_lines(folder / "evals.jsonl")
    hard = [evals[i] | {"tasks": "hard v0.2", "trained": False, "reward": [r - 0.1 for r in evals[i]["reward"]]} for i in (0, 3)]
    more = [hard[1] | {"stage": "eval_only", "reward": [5.0] * 12}] if later else []
    write_lines(folder / "evals.jsonl", [hard[0], *evals, hard[1], *more])
    parts = {name: float(np.mean(values)) for name, values in evals[3].items() if isinstance(values, list)}
    lines = [metric_line(u) | parts | {"reward": 0.7 + 0.02 * u, "level": "easy" if u < 5 else "medium"} for u in range(1, updates + 1)]
    unknown = ("habit_bare", "habit_states", "habit_derives", "exact", "fraction")
    write_lines(folder / "metrics.jsonl", [{k: v for k, v in line.items() if k not in unknown} for line in lines])
    config = make_config(**json.loads((folder / "config.json").read_text()), curriculum=True) if updates else make_config(env="swarm")
    state = make_state(40)
    (folder / "summary.json").write_text(json.dumps(report.summarize_run(folder, config, state, MACHINE)))
    report.write(folder)
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def swarm(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("swarm") / "traders"
    make_swarm(folder)
    return folder


def test_a_swarm_summary_has_no_exact_answers_but_its_parts(swarm):
    summary, _, evals, _ = load(swarm)
    assert "gain" not in summary and set(summary["eval"]) == {"medium v0.2", "hard v0.2"}
    for tasks, stages in summary["eval"].items():
        for stage, result in stages.items():
            assert not {"exact", "low", "high"} & set(result)
            (line,) = (e for e in evals if (e["tasks"], e["stage"]) == (tasks, stage))
            assert (
                result["reward"] == pytest.approx(np.mean(line["reward"]))
                and result["reward_low"] <= result["reward"] <= result["reward_high"]
            )
            for name in ("payoff", "quality", "used_vote", "error_rate"):
                part = result["components"][name]
                assert (
                    part["mean"] == pytest.approx(np.mean(line[name])) and part["n"] == 12 and part["low"] <= part["mean"] <= part["high"]
                )
    after, final = (next(np.array(e["reward"]) for e in evals if (e["tasks"], e["stage"]) == ("medium v0.2", s)) for s in STAGES[1:])
    assert summary["gain_reward"] == report.metrics.gain(after, final).dict()


def test_a_swarm_report_is_about_the_reward(swarm):
    summary, _, evals, text = load(swarm)
    means = [f"{np.mean(next(e['reward'] for e in evals if (e['tasks'], e['stage']) == ('medium v0.2', stage))):.3f} [" for stage in STAGES]
    head = text.split("## Config")[0]
    assert re.search("mean reward " + " → ".join(re.escape(mean) + "[^→]*" for mean in means), head), head
    assert "exact" not in text and not re.search(r"\bnan\b", text.lower())
    title, *rows = table_rows(text, "Evaluation")
    assert title == ["update", "hard v0.2, reward", "medium v0.2, reward"]
    assert [row[0] for row in rows] == ["before SFT", "after SFT (0)", "20", "40 (final)"], "evaluations of later are no part of the run"
    assert rows[1][1] == "" and all(row[2] for row in rows)
    assert "GRPO gained in reward on medium v0.2: " in text and "Hard v0.2, which was not trained: " in text
    assert "The curriculum: easy from update 1, medium from update 5." in text
    assert table_rows(text, "Trajectory")[0][:7] == ["updates", "reward", "payoff", "quality", "diversity", "reputation", "error_rate"]
    assert (swarm / "curves.png").read_bytes().startswith(b"\x89PNG") and (swarm / "curves.png").stat().st_size > 40_000


def test_a_swarm_report_has_the_behaviour_and_what_was_evaluated_later(swarm):
    *_, text = load(swarm)
    assert behaviour.report(swarm) in text
    assert table_rows(text, "Behaviour: after SFT → update 40 (final)")[0][1:3] == ["after SFT", "update 40 (final)"]
    ((_, later),) = [(head, row) for head, row in [table_rows(text, "Evaluated later")]]
    assert later[:4] == ["hard v0.2", "40", "12", metrics.alike(5.0, 12).text()]
    assert "## Behaviour" not in (ROOT / "results/showcase/report.md").read_text()


@pytest.mark.usefixtures("no_pictures")
def test_a_swarm_run_without_grpo_reports_too(tmp_path):
    summary = make_swarm(tmp_path / "still", updates=0, later=False)
    text = (tmp_path / "still" / "report.md").read_text()
    assert "No GRPO updates in this run." in text and "## Evaluated later" not in text and summary["env"] == "swarm"


@pytest.mark.usefixtures("no_pictures")
def test_a_letters_run_that_was_evaluated_later_tells_so(tmp_path):
    folder = tmp_path / "later"
    make_run(folder, growing_lines())
    report.write(folder)
    before = (folder / "report.md").read_text()
    with open(folder / "evals.jsonl", "a") as f:
        f.write(json.dumps(eval_line(30, "eval_only", 8, [1.0] * 16 + [0.0] * 48)) + "\n")
    report.write(folder)
    assert (folder / "report.md").read_text().startswith(before)
    title, row = table_rows((folder / "report.md").read_text(), "Evaluated later")
    assert title[:4] == ["tasks", "update", "n", "exact"] and row[:4] == ["tier 8", "30", "64", percent(16, 64)]


def test_a_report_of_letters_loads_nothing_of_the_swarm(tmp_path):
    """Neither the swarm nor what is told about it; the page and the comparison only when they are needed."""
    folder = tmp_path / "letters"
    make_run(folder, growing_lines())
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from bookkeeping import report
at_first = set(sys.modules)
report.write(Path({str(folder)!r}))
print(sorted(at_first & {{"bookkeeping.viewer", "bookkeeping.compare", "matplotlib", "statsmodels"}}))
print(sorted(name for name in sys.modules if "swarm" in name or name == "bookkeeping.behaviour"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stdout + done.stderr
    assert (folder / "report.html").exists()


# ------------------------------------------------------------------------------------------------ what is drawn


def axes():
    from matplotlib.figure import Figure

    return Figure().subplots()


def test_letters_shows_habits_and_lengths_where_swarm_shows_its_turns(run, monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    summary, lines, evals, _ = load(run)
    curves.draw_curves(tmp_path / "curves.png", summary, lines, evals)
    titles = [ax.get_title() for ax in drawn[0].axes]
    assert titles[0].startswith("development tasks (n=") and titles[1] == "training reward"
    assert titles[2:4] == ["habits of the sampled replies", "reply length"] and drawn[0].get_figwidth() == 11


def test_the_trained_tasks_are_drawn_thickest_and_what_they_were_before_sft_as_a_cross(run):
    summary, _, evals, _ = load(run)
    ax = axes()
    curves.draw_evaluations(ax, summary, evals)
    shown = {line.get_label(): line for line in ax.lines if line.get_marker() == "o"}
    assert {label: line.get_linewidth() for label, line in shown.items()} == {
        "exact, tier 3": 1, "exact, tier 5": 1, "exact, tier 6": 2.2, "mean reward, tier 6": 2.2,
    }  # fmt: skip
    one = summary | {"eval": {"tier 6": summary["eval"]["tier 6"]}}
    curves.draw_evaluations(alone := axes(), one, evals)
    assert [line.get_label() for line in alone.lines if line.get_marker() == "o"] == ["exact", "mean reward"]
    crosses = {line.get_color(): line.get_ydata()[0] for line in ax.lines if line.get_marker() == "x"}
    before = next(e for e in evals if e["stage"] == "before" and e["trained"])
    for label, what in (("exact, tier 6", "exact"), ("mean reward, tier 6", "reward")):
        assert crosses[shown[label].get_color()] == pytest.approx(100 * np.mean(before[what]))


def test_a_part_of_a_bar_is_named_if_there_is_room_for_its_name():
    ax = axes()
    curves.draw_bars(ax, {"trainer": {"train": 90.0, "wait": 5.0, "sync": 5.0}})
    assert [text.get_text() for text in ax.texts] == ["train 90%"] and len(ax.patches) == 3


def test_the_steps_of_a_curriculum_are_marked_with_the_new_level():
    ax = axes()
    levels = [1, 1, 2, 2, 2, 3]
    curves.draw_training(ax, [{"update": 10 * i, "reward": 0.5, "level": level} for i, level in enumerate(levels)], False)
    assert [text.get_text() for text in ax.texts] == [" 2", " 3"]
    assert [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == "--"] == [20, 50]


def test_a_curriculum_with_exact_answers_has_its_steps_beside_the_shares():
    ax = axes()
    lines = [{"update": i, "reward": 0.5, "groups_with_signal": 0.5, "level": level} for i, level in enumerate(["3", "3-5", "3-5"])]
    curves.draw_training(ax, lines, True)
    assert [text.get_text() for text in ax.texts] == [" 3-5"]


def test_a_level_that_a_curriculum_passed_was_trained_on():
    one = {"exact": 0.5, "low": 0.4, "high": 0.6, "reward": 0.5, "reward_low": 0.4, "reward_high": 0.6, "n": 8}
    stages = dict.fromkeys(STAGES, one)
    gain = {"mean": 0.0, "low": -0.1, "high": 0.1, "n": 8}
    names = ["Mine, level 3", "Mine, level 3-5", "tier 3", "easy v0.2", "Mine, level 5"]
    summary = {"trained": "Mine, level 5", "eval": dict.fromkeys(names, stages), "gain": gain}
    lines = [{"update": i, "level": level} for i, level in enumerate(["easy", "3", "3", "5"], 1)]
    told = [sentence.partition(": ")[0] for sentence in report.about_gains(summary, lines)[1:]]
    assert told == [
        "Mine, level 3, which was trained until update 3",
        "Mine, level 3-5, which was not trained",
        "Tier 3, which was trained until update 3",
        "Easy v0.2, which was trained until update 1",
    ]
    assert report.about_levels(lines) == ["The curriculum: easy from update 1, 3 from update 2, 5 from update 4."]


def test_the_length_of_replies_is_drawn_from_0():
    left, right = axes(), axes()
    curves.draw_habits(left, right, [{"update": i, "reply_tokens": 100.0 + i} for i in range(3)])
    assert right.get_ylim()[0] == 0


def test_habits_that_only_some_updates_report_are_drawn_and_told():
    lines = [{"update": i, "reply_tokens": 9} | ({"habit_derives": 0.9} if i > 2 else {}) for i in range(1, 10)]
    curves.draw_habits(axes(), axes(), lines)
    assert "begins to think at update 3" in report.about_thinking(lines, 1)[0]


def test_whether_a_curriculum_has_settled_is_asked_of_its_last_level(tmp_path):
    rng = np.random.default_rng(0)
    lines = growing_lines(200)
    for i, line in enumerate(lines):
        line |= {"level": 5 + (i >= 100), "reward": (0.8 if i < 100 else 0.3) + rng.normal(0, 0.005)}
    assert report.records.before_last_level(lines) == 100
    make_run(tmp_path / "climbed", lines)
    report.write(tmp_path / "climbed")
    text = (tmp_path / "climbed" / "report.md").read_text()
    assert re.search(r"Has the training reward settled at level 6\? Settled at 0\.30 .* since about update 1\d\d ", text)


def test_rewards_below_0_are_in_the_picture():
    ax, one = axes(), {"stage": "final", "tasks": "mine", "update": 5, "reward": [-68.0, -60.0]}
    summary = {"trained": "mine", "env": "x.py:X", "eval": {"mine": {"final": {"reward": -64.0}}}}
    curves.draw_evaluations(ax, summary, [one | {"update": 0, "stage": "after_sft"}, one])
    assert ax.get_ylim()[0] < -64
