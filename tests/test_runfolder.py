"""Protects the run folder: one writer at a time, lines that a kill cut in two, a bound on what is
kept to read, links that are not followed."""

import json
import os
import re
import signal
import subprocess
import sys
from threading import Event
from types import SimpleNamespace

import pytest

import metrics
import warm
from bookkeeping import records
from bookkeeping import run as run_records
from bookkeeping.folder import claim, make_folder, mend, open_saved, trim
from bookkeeping.records import append, thin, write_lines
from bookkeeping.run import State
from settings import Config

# -------------------------------------------------------------------------------------- one writer


def test_a_folder_has_one_writer_and_a_killed_one_is_none(tmp_path):
    claims = f"from bookkeeping.folder import claim; lock = claim(Path({str(tmp_path)!r}))"
    code = f"from pathlib import Path; {claims}; print('mine', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=warm.ROOT, **pipes) as other:
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(SystemExit) as error:
            claim(tmp_path)
        assert "another process" in str(error.value) and str(tmp_path) in str(error.value)
        other.send_signal(signal.SIGKILL)
    claim(tmp_path).release()  # no file to remove by hand


@pytest.mark.parametrize("entry", [{"lr": "fast"}, {"k": [8]}, {"no": 1}])
def test_a_config_that_no_run_wrote_is_refused_in_one_sentence(tmp_path, entry):
    (tmp_path / "config.json").write_text(json.dumps(vars(Config()) | entry))
    with pytest.raises(ValueError, match=f"there is no flag '{[*entry][0]}'"):
        open_saved("--resume", tmp_path, Config())


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, *others = [make_folder(Config(runs="runs"))[0] for _ in range(3)]
    assert first.parent == tmp_path / "runs"  # a whole path
    assert len({first, *others}) == 3 and re.fullmatch(r"letters-\d{4}-\d{6}", first.name)


# ------------------------------------------------------------------------------------------- lines


def test_lines_after_the_checkpoint_are_dropped(tmp_path):
    log, late = tmp_path / "evals.jsonl", {"update": 2, "stage": "final"}
    # what was evaluated later stays with its checkpoint
    kept = [{"update": 1}, {"update": 2, "stage": "eval_only"}]
    write_lines(log, [*kept, late, {"update": 3}])
    trim(tmp_path, 2)
    assert records.lines(log) == kept
    trim(tmp_path, -1)  # killed before SFT was done
    assert log.read_text() == ""
    write_lines(log, [{"update": 0, "stage": stage} for stage in ("before", "after_sft")])
    trim(tmp_path, 0)  # the first checkpoint is made between the two
    assert [line["stage"] for line in records.lines(log)] == ["before"]


def test_episodes_to_read_have_a_bound_and_the_first_and_last_updates_stay(tmp_path):
    path = tmp_path / "episodes.jsonl"
    write_lines(path, [{"update": n // 2, "text": "x" * 1000} for n in range(200)])
    thin(path, 50_000)
    assert path.stat().st_size <= 50_000
    updates = [line["update"] for line in records.lines(path)]
    assert updates == sorted(updates) and updates[0] == 0 and updates[-1] == 99
    assert all(updates.count(u) == 2 for u in updates)  # an update is kept whole or not at all
    thin(path, 10)  # the first and the last cannot go
    assert {line["update"] for line in records.lines(path)} == {0, 99}


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path):
    """A run folder may come from anywhere, and link to anything."""
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine, without an end of line")
    run.mkdir()
    for name in ("page.html", "evals.jsonl"):
        (run / name).symlink_to(victim)
    records.write_whole(run / "page.html", "new")
    mend(run)
    append(run / "evals.jsonl", {"update": 1})
    assert victim.read_text() == "mine, without an end of line"
    assert (run / "page.html").read_text() == "new"


# ------------------------------------------------------------------------- a run while it goes on


OPEN_WANDB = """
import json, sys
from pathlib import Path
from bookkeeping.run import open_wandb
from settings import Config
run = open_wandb(Config(updates=int(sys.argv[2])), Path(sys.argv[1]))
told = run.id, run.name, run.project, run.entity, run.notes, *run.tags, run.config["updates"]
run.finish()
print(json.dumps(told))
"""


def test_wandb_has_one_run_of_a_run_that_was_resumed_offline(tmp_path):
    """By the real client. Nobody is asked, and the environment has its say."""
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("WANDB")},
        **{"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")},  # nobody is logged in here
        **{"WANDB_PROJECT": "ours", "WANDB_ENTITY": "us", "WANDB_TAGS": "a,b"},
        **{"WANDB_NOTES": "why", "WANDB_RUN_ID": "of-a-sweep"},
    }
    (tmp_path / "w").mkdir()
    for updates in (1, 2):
        done = warm.run(["-c", OPEN_WANDB, tmp_path / "w", updates], env)
        assert "wandb sync" in done.stdout, done.stderr[-2000:]
        told = json.loads(done.stdout.splitlines()[-1])
        assert told == ["of-a-sweep", "w", "ours", "us", "why", "a", "b", updates]
        env.pop("WANDB_RUN_ID", None)  # the folder keeps it
    assert not (tmp_path / ".local").exists()  # what is to be uploaded is in the run folder


def test_wandb_has_each_step_of_sft_on_an_axis_of_its_own(tmp_path, monkeypatch):
    """Its rows have to be in order, or wandb drops them."""
    rows, axes, cfg = [], {}, Config(sft_steps=3)
    client = SimpleNamespace(
        log=lambda line, step: rows.append((step, line)),
        define_metric=lambda name, step_metric: axes.update({name: step_metric}),
    )
    monkeypatch.setattr(os, "environ", {**os.environ, "WANDB_MODE": "offline"})
    monkeypatch.setattr("wandb.login", lambda prompt: False)
    monkeypatch.setattr("wandb.init", lambda **_: client)
    run = run_records.Run(cfg, tmp_path, None, State(), [], folder=tmp_path)
    run.wandb = run_records.open_wandb(cfg, tmp_path)
    run_records.log_wandb(run.wandb, {"update": 0, "before/tier 6/reward": 0.25})
    fine = {"demonstrations": 4, "beyond_context": 0, "too_long": 0, "tokens": 9}
    run.log_sft(fine | {"losses": [0.75, 0.5, 0.125]})
    run_records.log_wandb(run.wandb, {"update": 0, "eval/tier 6/reward": 0.5}, cfg.sft_steps)
    run_records.log_wandb(run.wandb, {"update": 1, "reward": 0.75}, cfg.sft_steps)
    assert axes == {"*": "update", "sft/loss": "sft/step"}
    losses = {line["sft/step"]: line["sft/loss"] for _, line in rows if "sft/loss" in line}
    assert losses == {1: 0.75, 2: 0.5, 3: 0.125}
    # the evaluation after SFT belongs to SFT's last row: both are update 0
    assert [step for step, _ in rows] == [0, 1, 2, 3, 3, 4]


def test_a_wandb_that_dies_does_not_take_the_run_with_it(capsys):
    steps = []

    def lost(line, step):
        steps.append(step)
        raise ConnectionResetError("Connection lost")

    run_records.log_wandb(SimpleNamespace(log=lost), {"update": 3, "reward": 1})
    assert "wandb failed (Connection lost)" in capsys.readouterr().out
    assert steps == [3]  # a curve's step is the update


def test_a_curriculum_climbs_by_its_measure_and_one_that_climbs_has_not_settled(tmp_path):
    flags = {"curriculum": True, "difficulty": 3, "until_converged": True, "max_updates": 100}
    cfg = Config(env="letters", updates=40, **flags)
    run = run_records.Run(cfg, tmp_path, None, State(updates=50, level=1), [])
    run.lines = [{"level": 1, "reward": 0.8}] * 50
    assert run.finished() and run.next_level() == 1  # scores without the measure: not right
    run.lines += [{"level": 1, "reward": 0.8, "exact": 0.8}] * metrics.LEAST
    run.state.level = run.next_level()
    assert run.state.level == 2 and run.rewards() == [] and not run.finished()


def test_ctrl_c_asks_a_run_to_stop_and_ends_what_comes_after_it():
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    event = Event()
    run_records.hear_signals(event)
    try:
        signal.raise_signal(signal.SIGINT)
        assert event.is_set()
        with pytest.raises(KeyboardInterrupt):  # the second time
            signal.raise_signal(signal.SIGINT)
        event.clear()
        del event  # with its run
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    "save_every, sync_every, saved",
    [
        (10, 1, [10, 20, 30]),
        (10, 3, [12, 21, 30]),  # between two syncs it could not be resumed
        (2, 5, [5, 10, 15, 20, 25, 30]),
    ],
)
def test_a_checkpoint_that_is_due_waits_for_the_sampler_s_new_weights(
    tmp_path, save_every, sync_every, saved
):
    cfg = Config(save_every=save_every, sync_every=sync_every)
    run = run_records.Run(cfg, tmp_path, None, State(), [])
    found = []
    for run.state.updates in range(1, 31):
        found += [run.state.updates] * run.checkpoint_due()
    assert found == saved


@pytest.mark.parametrize(
    "flags, said",
    [
        ({}, "a loss near 0 and a ratio of 1.000 are healthy on-policy"),
        ({"epochs": 2}, "the ratio leaves 1.000 here"),
        ({"sync_every": 2, "importance": "clip"}, "the ratio leaves 1.000 here"),
        (
            {"async_rollouts": 1, "importance": "sequence"},
            "a ratio of 1.000 is healthy on-policy, any",
        ),
        ({"teacher": "pico_base"}, "a ratio of 1.000 is healthy, and a falling loss"),
        ({"loss": "dapo"}, "a ratio of 1.000 is healthy on-policy, any loss is"),
    ],
)
def test_the_guide_says_which_ratio_and_loss_are_healthy_with_these_flags(flags, said):
    assert run_records.reading_guide(Config(**flags)).startswith(said)
