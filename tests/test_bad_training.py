"""Protects a training that goes wrong: it is noticed, named, and survived, or it stops with the last good checkpoint;
never a checkpoint of broken weights."""

import errno
import json
import os
import re
import signal
import sys
from asyncio import CancelledError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import env_letters
import sft
import train
from bookkeeping import guard
from bookkeeping import run as run_records
from bookkeeping.checkpoint import load_checkpoint
from fast import decoder
from lab.common import read_lines as lines
from rollout import EnvironmentFailed
from settings import DEV_SEEDS, SFT_SEEDS, Config

pytestmark = pytest.mark.usefixtures("no_pictures")
SHORT = [
    "--sft-steps", "2", "--sft-examples", "4", "--sft-batch", "2", "--num-tasks", "2", "--k", "3", "--eval-n", "2", "--eval-every", "100",
    "--save-every", "1", "--max-tokens", "16", "--difficulty", "2", "--reward", "partial", "--no-wandb", "--threads", "1", "--warmup", "0",
    "--no-eval-other-tiers",
]  # fmt: skip


def run(monkeypatch, runs: Path, *flags: str) -> Path:
    monkeypatch.setattr(sys, "argv", ["train.py", *SHORT, "--runs", str(runs), "--name", "run", *flags])
    train.main()
    return runs / "run"


def saved(folder: Path) -> tuple[dict, dict]:
    """(weights, state) of the run's checkpoint."""
    return load_file(folder / "checkpoint" / "adapter_model.safetensors"), json.loads((folder / "checkpoint" / "state.json").read_text())


@pytest.mark.parametrize("lr", ["30", "1e30"])
def test_a_learning_rate_that_explodes_is_named_and_no_broken_weights_are_kept(monkeypatch, capsys, tmp_path, lr):
    try:
        folder = run(monkeypatch, tmp_path, "--lr", lr, "--updates", "12")
        told = capsys.readouterr().out
        assert "learning rate is too high" in told and told.count("STUCK at update") <= 1 and "NO SIGNAL" not in told
    except SystemExit as stopped:
        assert "training stopped" in str(stopped) and "lower --lr" in str(stopped)
        folder = tmp_path / "run"
    weights, state = saved(folder)
    assert all(w.isfinite().all() for w in weights.values()) and state["update"] <= 12
    policy = train.load_policy(str(train.choose_model("auto")[0]), 32, 64, "cpu")
    load_checkpoint(folder / "checkpoint", policy)
    with torch.no_grad():  # not only finite: they still give every token a probability
        assert policy.model(input_ids=torch.arange(5, 25)[None]).logits.isfinite().all()


def test_equal_rewards_teach_nothing_and_that_is_told_once(monkeypatch, capsys, tmp_path):
    score = env_letters.Letters.score
    monkeypatch.setattr(env_letters.Letters, "score", lambda self: score(self) | {"reward": 0.5})
    folder = run(monkeypatch, tmp_path, "--updates", "30", "--save-every", "15", "--num-tasks", "1", "--max-tokens", "4")
    told = capsys.readouterr().out
    assert told.count("NO SIGNAL at update 10") == told.count("NO SIGNAL") == 1
    metrics = lines(folder / "metrics.jsonl")
    assert len(metrics) == 30 and all(line["groups_with_signal"] == line["grad_norm"] == line["loss"] == 0 for line in metrics)
    before, after = load_file(folder / "checkpoint.old" / "adapter_model.safetensors"), saved(folder)[0]
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)  # not even a weight decay
    assert "no signal" in json.loads((folder / "summary.json").read_text())["warnings"]
    assert "Found wrong at update 10: no signal" in (folder / "report.md").read_text()


def test_nan_from_a_kernel_of_the_sampler_stops_the_run_with_the_last_good_checkpoint(monkeypatch, tmp_path):
    forward, asked = decoder.FastDecoder.forward, []

    def broken(self, ids, *rest):
        asked.append(1)
        logits = forward(self, ids, *rest)
        return (
            logits * float("nan") if (tmp_path / "run" / "metrics.jsonl").exists() and len(rest) == 2 else logits
        )  # a step: it asks for no `last`

    monkeypatch.setattr(decoder.FastDecoder, "forward", broken)
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, tmp_path, "--updates", "5")
    assert "training stopped: a token has probability NaN" in str(stopped.value) and "last good checkpoint" in str(stopped.value)
    weights, state = saved(tmp_path / "run")
    assert state["update"] == 1 and all(w.isfinite().all() for w in weights.values())


def test_weights_that_break_in_the_last_step_before_a_checkpoint_are_not_saved(monkeypatch, tmp_path):
    update, calls = train.update, []

    def breaks(policy, *given, **more):
        stats = update(policy, *given, **more)
        calls.append(1)
        if len(calls) == 3:
            next(p for name, p in policy.trainable().items() if "lora_B" in name).data.fill_(float("nan"))
        return stats

    monkeypatch.setattr(train, "update", breaks)
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, tmp_path, "--updates", "5")
    assert "after update 3 the policy's log-probs are not finite" in str(stopped.value)
    assert saved(tmp_path / "run")[1]["update"] == 2


def test_one_episode_of_64_that_hangs_is_left_out_and_the_run_goes_on(monkeypatch, capsys, tmp_path):
    step, asked = env_letters.Letters.step, []

    def hangs(self, reply):
        asked.append(1)
        if len(asked) == 3 * 2 + 64 + 10:  # after two evaluations (4 SFT demonstrations are steps as well): in the second update
            while True:
                pass
        return step(self, reply)

    monkeypatch.setattr(env_letters.Letters, "step", hangs)
    monkeypatch.setattr(env_letters.Letters, "seconds", 0.5, raising=False)
    folder = run(monkeypatch, tmp_path, "--updates", "3", "--num-tasks", "8", "--k", "8", "--max-tokens", "6")
    broken = [line for line in lines(folder / "metrics.jsonl") if line["errors"]]
    assert [(line["errors"], line["n"]) for line in broken] == [(1, 63)]
    assert (
        "1 of 64 episodes ended in an error and are left out: Hung: no answer within 0.5 seconds (test_bad_training.py:"
        in capsys.readouterr().out
    )
    assert json.loads((folder / "summary.json").read_text())["updates"] == 3


def test_a_finished_run_that_goes_on_and_is_stopped_has_no_summary_of_its_earlier_end(monkeypatch, tmp_path):
    folder = run(monkeypatch, tmp_path, "--updates", "1")
    assert (folder / "summary.json").exists()
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume", str(folder)])
    train.main()  # nothing is left to do
    assert (folder / "summary.json").exists()
    right = train.update

    def update(*given):
        os.kill(os.getpid(), signal.SIGINT)
        return right(*given)

    monkeypatch.setattr(train, "update", update)
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume", str(folder), "--updates", "3"])
    with pytest.raises(SystemExit, match="stopped; go on with"):
        train.main()
    assert saved(folder)[1]["update"] == 2 and not (folder / "summary.json").exists()


@pytest.mark.parametrize("method", ["reset", "expert_reply", "score"])
def test_a_demonstration_that_fails_ends_the_run_in_one_sentence(monkeypatch, tmp_path, method):
    right, env = getattr(env_letters.Letters, method), env_letters.Letters(2, "partial", True, "states")
    env.reset(SFT_SEEDS + 1)

    def fails(self, *given):
        its = given == (SFT_SEEDS + 1,) if method == "reset" else self.task == env.task
        return {}["row 3"] if its else right(self, *given)

    monkeypatch.setattr(env_letters.Letters, method, fails)
    with pytest.raises(SystemExit, match=f"the expert's episode of task {SFT_SEEDS + 1} failed: KeyError: 'row 3'"):
        run(monkeypatch, tmp_path, "--updates", "1")


def test_an_expert_that_hangs_ends_the_run_in_one_sentence(monkeypatch, tmp_path):
    def hangs(self):
        while True:
            pass

    monkeypatch.setattr(env_letters.Letters, "expert_reply", hangs)
    monkeypatch.setattr(env_letters.Letters, "seconds", 0.2, raising=False)
    with pytest.raises(SystemExit, match=f"task {SFT_SEEDS} failed: Hung: no answer within 0.2 seconds"):
        run(monkeypatch, tmp_path, "--updates", "1")


def test_where_every_episode_raises_the_run_stops_and_names_the_first(monkeypatch, tmp_path):
    def raises(self, reply):
        raise KeyError("answer")

    monkeypatch.setattr(env_letters.Letters, "score", lambda self: raises(self, ""))
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, tmp_path, "--updates", "3")
    assert "every episode of this evaluation ended in an error (KeyError: 'answer' (test_bad_training.py:" in str(stopped.value)


def test_a_task_whose_reset_raises_costs_its_own_episodes_and_neither_save_nor_resume(monkeypatch, capsys, tmp_path):
    """One task of the first update, one of the last before the end, and one of the development tasks."""
    reset, bad = env_letters.Letters.reset, {0, 7, DEV_SEEDS}

    def raises(self, seed):
        if seed in bad:
            raise KeyError(f"no task {seed}")
        return reset(self, seed)

    monkeypatch.setattr(env_letters.Letters, "reset", raises)
    folder = run(monkeypatch, tmp_path, "--updates", "2")
    assert "3 of 6 episodes ended in an error and are left out: KeyError: 'no task 0'" in capsys.readouterr().out
    assert saved(folder)[1]["update"] == 2
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume", str(folder), "--updates", "4"])
    train.main()
    assert [(line["errors"], line["n"]) for line in lines(folder / "metrics.jsonl")] == [(3, 3), (0, 6), (0, 6), (3, 3)]
    kept = {(e["update"], e["seed"]): e for e in lines(folder / "episodes.jsonl") if e["source"] == "rollout"}
    failed = kept[1, 0]
    assert failed["stop_reason"] == "error" and failed["segments"] == [] and "no task 0" in failed["error"]
    assert kept[1, 1]["segments"] and kept[4, 7]["segments"] == [] and kept[4, 6]["segments"]
    assert (folder / "report.html").exists() and (folder / "report.md").exists()
    on_the_way = [(e["update"], e["stage"]) for e in lines(folder / "evals.jsonl") if e["update"] > 0]
    assert on_the_way == [(2, "train"), (4, "final")]
    assert all(
        line["missing"] == {"0": f"KeyError: 'no task {DEV_SEEDS}' (test_bad_training.py:{raises.__code__.co_firstlineno + 2})"}
        for line in lines(folder / "evals.jsonl")
        if line["trained"]
    )


# ------------------------------------------------------------------------------------------------ before the first checkpoint


def stopped_in_sft(monkeypatch, runs: Path, happens) -> SystemExit:
    """Run until the first step of SFT, where something happens."""
    step = sft.sft_step

    def steps(*given):
        happens()
        return step(*given)

    monkeypatch.setattr(sft, "sft_step", steps)
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, runs)
    return stopped.value


@pytest.mark.parametrize(
    "error,cure",
    [
        (OSError(errno.ENOSPC, "No space left on device", "evals.jsonl"), "make room or mend the path, then start again"),
        (torch.OutOfMemoryError("no room"), "start again with a lower --micro-tokens"),
        (FloatingPointError("the SFT loss is nan"), "start again with a lower --sft-lr"),
    ],
)
def test_what_goes_wrong_before_there_is_a_checkpoint_speaks_of_none(monkeypatch, tmp_path, error, cure):
    def happens():
        raise error

    said = str(stopped_in_sft(monkeypatch, tmp_path, happens))
    assert cure in said and "\n" not in said and "is kept" not in said and "--resume" not in said


def test_an_error_that_is_not_told_by_us_says_where_it_was(monkeypatch, tmp_path):
    """A loss of one's own with too few values: Python's sentence alone would not help."""

    def happens():
        return dict([(1, 2, 3)])

    assert "has length 3; 2 is required" in (said := str(stopped_in_sft(monkeypatch, tmp_path, happens)))
    assert re.search(r"test_bad_training\.py:\d+\)$", said)


def test_ctrl_c_in_sft_names_the_folder_and_a_second_one_does_too(monkeypatch, capsys, tmp_path):
    interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
    once = stopped_in_sft(monkeypatch, tmp_path / "once", interrupt)
    assert str(once) == f"stopped; go on with: python train.py --resume {tmp_path}/once/run; SFT starts again"
    monkeypatch.undo()
    twice = stopped_in_sft(monkeypatch, tmp_path / "twice", lambda: (interrupt(), interrupt()))
    assert twice.code == 130
    assert capsys.readouterr().err.endswith(
        f"stopped at once; go on with: python train.py --resume {tmp_path}/twice/run, from its start: nothing was saved yet\n"
    )


def test_a_run_that_never_began_leaves_no_folder(monkeypatch, capsys, tmp_path):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "load_policy", interrupted)
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "new" / "runs")
    assert capsys.readouterr().err.endswith("stopped at once; nothing was written\n") and not list(tmp_path.iterdir())
    (tmp_path / "kept").mkdir()
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())  # nobody's folder goes but the run's own


def test_to_evaluate_a_run_that_was_cut_names_no_report(monkeypatch, capsys, tmp_path):
    folder = run(monkeypatch, tmp_path, "--updates", "1")
    for name in ("summary.json", "report.md"):
        (folder / name).unlink()
    monkeypatch.setattr(sys, "argv", ["train.py", "--eval-only", str(folder)])
    train.main()
    assert capsys.readouterr().out.endswith(f"\nkept in {folder}/evals.jsonl\n")


def test_runs_that_cannot_be_written_are_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=f"^--runs {tmp_path}/file: Not a directory: .*; give a folder that can be written$"):
        run(monkeypatch, tmp_path / "file")


@pytest.mark.parametrize("how", [SystemExit(0), CancelledError(), KeyError("x")], ids=["exit", "cancelled", "error"])
def test_an_environment_that_exits_costs_its_own_episode_and_ctrl_c_still_ends_the_run(how):
    class Ends:
        def step(self, reply):
            raise how if reply == "exit()" else KeyboardInterrupt

    with pytest.raises(EnvironmentFailed, match=type(how).__name__):
        guard.Guarded(Ends()).step("exit()")
    with pytest.raises(ValueError, match=type(how).__name__):  # as preflight asks
        guard.Guarded(Ends(), ValueError).step("exit()")
    with pytest.raises(KeyboardInterrupt):
        guard.Guarded(Ends()).step("")


def test_a_batch_whose_scores_lack_the_measure_of_a_curriculum_counts_as_not_right():
    state = SimpleNamespace(recent=[1.0, 1.0, 1.0], rewards=[], level=1)
    run_records.climb(Config(env="letters", difficulty=6, curriculum=True), state, {"reward": 1.0})
    assert state.recent == [1.0, 1.0, 1.0, 0.0] and state.level == 1
