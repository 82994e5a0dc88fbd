"""Protects the run folder: one writer at a time, lines that a kill cut in two, a bound on what is
kept to read, links that are not followed."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bookkeeping import folder as folder_room
from bookkeeping import records
from bookkeeping import run as run_records
from bookkeeping.folder import claim, mend, trim
from bookkeeping.records import append, thin
from bookkeeping.run import State
from settings import Config

ROOT = Path(__file__).resolve().parent.parent


def starts(code: str) -> subprocess.Popen:
    """A Python that runs this code."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes)


# -------------------------------------------------------------------------------------- one writer


def test_a_folder_has_one_writer_and_a_killed_one_is_none(tmp_path):
    claims = f"from bookkeeping.folder import claim; lock = claim(Path({str(tmp_path)!r}))"
    code = f"from pathlib import Path; {claims}; print('mine', flush=True); input()"
    with starts(code) as other:
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(SystemExit) as error:
            claim(tmp_path)
        assert "another process" in str(error.value) and str(tmp_path) in str(error.value)
        other.send_signal(signal.SIGKILL)
    claim(tmp_path).release()  # no file to remove by hand


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_room.time, "strftime", lambda _: "0101-000000")
    made = [folder_room.make_folder(Config(runs=str(tmp_path)))[0] for _ in range(3)]
    assert [home.name.partition("0101-000000")[2] for home in made] == ["", "-2", "-3"]


def test_the_first_words_of_a_run_come_before_torch_is_imported():
    code = "import sys; from bookkeeping.folder import announce; announce([])\n"
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "torch is loading, which takes seconds\nFalse\n", done.stderr


# ------------------------------------------------------------------------------------------- lines


def record(update: int, **more) -> str:
    return json.dumps({"update": update, **more})


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_lines_after_the_checkpoint_and_lines_cut_in_two_are_dropped(tmp_path):
    whole = [record(1), record(2, stage="train")]
    looked = record(2, stage="eval_only")  # what was evaluated later stays with its checkpoint
    broken = ["7", "[]", "null", "\xed\xb3\xbf", "[" * 100_000, record(1)]  # no end: cut, perhaps
    late = [record(2, stage="final"), record(3, stage="eval_only"), *broken]
    log = tmp_path / "evals.jsonl"
    log.write_text("\n".join([*whole, looked, *late]))
    trim(tmp_path, 2)
    assert log.read_text().splitlines() == [*whole, looked]
    trim(tmp_path, None)  # killed before SFT was done
    assert log.read_text() == ""


@pytest.mark.parametrize("text", ["", '{"upd', '{"update": 1}\n', '{"update": 1}\n{"update": 2'])
def test_a_last_line_that_was_cut_is_dropped_before_more_is_written(tmp_path, text):
    (tmp_path / "evals.jsonl").write_text(text)
    mend(tmp_path)
    append(tmp_path / "evals.jsonl", {"update": 9})
    kept = [1, 9] if "\n" in text else [9]
    assert [line["update"] for line in read(tmp_path / "evals.jsonl")] == kept


def test_episodes_to_read_have_a_bound_and_the_first_and_last_updates_stay(tmp_path):
    path = tmp_path / "episodes.jsonl"
    for update in range(200):
        for _ in range(2):
            append(path, {"update": update, "text": "x" * 1000})
        thin(path, 50_000)
        assert path.stat().st_size <= 50_000
    updates = [line["update"] for line in read(path)]
    assert updates == sorted(updates) and updates[0] == 0 and updates[-1] == 199
    assert len(set(updates)) > 10
    assert all(updates.count(u) == 2 for u in updates)  # an update is kept whole or not at all
    thin(path, 10)  # the first and the last cannot go
    assert {line["update"] for line in read(path)} == {0, 199}


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


def test_a_wandb_that_dies_does_not_take_the_run_with_it(capsys):
    def lost(*given, **more):
        raise ConnectionResetError("Connection lost")

    run = SimpleNamespace(wandb=SimpleNamespace(log=lost))
    run_records.Run.to_wandb(run, {"update": 1, "reward": 1})
    assert "wandb failed (Connection lost)" in capsys.readouterr().out


def test_a_curriculum_climbs_by_its_measure_and_one_that_climbs_has_not_settled():
    flags = {"curriculum": True, "difficulty": 3, "until_converged": True, "max_updates": 100}
    cfg = Config(env="letters", updates=40, **flags)
    state = State(update=50, level=1, rewards=[0.8] * 50)
    assert run_records.finished(cfg, state)
    run_records.climb(cfg, state, {"reward": 1.0})  # scores without the measure: not right
    assert state.recent == [0.0] and state.level == 1
    for _ in range(run_records.PROMOTE_AFTER):
        run_records.climb(cfg, state, {"exact": 0.8})
    assert (state.level, state.recent, state.rewards) == (2, [], [])
    assert not run_records.finished(cfg, state)
