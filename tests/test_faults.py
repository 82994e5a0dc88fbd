"""lab/trust/faults.py finds what is wrong, kills where it says, and a killed run ends as the undisturbed one.

Whole runs here are forks of one process that has imported everything: what is killed and continued is the same code, without the
seconds of imports. They train on one tier and draw nothing.
"""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch

import warm
from lab.trust import faults, places, storage

ROOT = Path(__file__).resolve().parent.parent

# Started once: runs and kills small cases, each start a fork. Prints what kill_case says.
DRIVER = """
import json, os, signal, sys, tempfile, time, traceback
from pathlib import Path
from types import SimpleNamespace
import torch
import train
from lab.trust import faults
from lab.trust import places

def launch(flags, plan=None, at=None):
    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    if not (pid := os.fork()):
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        status = 0
        torch.set_num_threads(1)  # makes the fork's own pool: weights are loaded by two threads, and if they were the first, \
one would find none
        try:
            places.child(plan or {"do": "none"}, flags)
        except SystemExit as stop:
            status = 1
            print(stop, file=sys.stderr)
        except BaseException:
            status = 1
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    if at is not None:
        time.sleep(at)
        os.kill(pid, signal.SIGKILL)
    status, text = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), []
    for file in (out, err):
        file.seek(0)
        text.append(file.read())
    return SimpleNamespace(status=status, out=text[0], err=text[1], said=faults.last_line(text[1]))

faults.launch = launch
faults.SHORT += ["--updates", "3", "--sft-steps", "2", "--sft-examples", "4", "--eval-n", "1", "--max-tokens", "8", "--lora-rank", "4",
                 "--no-eval-other-tiers"]
home = Path(sys.argv[1])
whole, seconds, counts = faults.undisturbed(home)
place = lambda place, moment, call: {"do": "kill", "place": place, "moment": moment, "call": call}
at = place("line of metrics", "half", 3)
cut = faults.launch([*faults.SHORT, "--runs", str(home / "half"), "--name", "run"], at)
cases = {
    "at once": [{"do": "clock", "share": 0.0}],
    "a line, then while lines are dropped": [at, place("resume: drop lines", "before", 2)],
    "a checkpoint": [place("checkpoint: rename", "after", 2)],
}
made = {name: faults.kill_case(name, kills, home, whole, seconds) for name, kills in cases.items()}
(home / "made.json").write_text(json.dumps({"counts": counts, "half": cut.status, "cases": made}))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("faults")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = warm.run(["-c", DRIVER, home], ROOT, env, timeout=600, pictures=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return home


def test_killed_runs_end_as_the_undisturbed_one(killed):
    cases = json.loads((killed / "made.json").read_text())["cases"]
    assert {name: case["wrong"] for name, case in cases.items()} == dict.fromkeys(cases, "")
    assert all(case["equal"] for case in cases.values())
    assert [len(case["kills"]) for case in cases.values()] == [1, 2, 1]
    assert "no config.json" in cases["at once"]["said"][0], "killed before there was anything, and told so"
    assert not any((killed / name).exists() for name in cases), "what ended well is removed"


def test_a_kill_comes_at_its_place(killed):
    assert json.loads((killed / "made.json").read_text())["half"] == -9
    full, cut = ((killed / name / "metrics.jsonl").read_text() for name in ("whole", "half/run"))
    at = [line for line in full.splitlines()]
    assert len(cut.splitlines()) == 3 and not cut.endswith("\n"), "the third line is half there"
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut.splitlines()[2])
    assert 0.3 < len(cut.splitlines()[2]) / len(at[2]) < 0.7
    assert json.loads((killed / "half" / "run" / "checkpoint" / "state.json").read_text())["update"] == 2


def test_every_place_is_called_by_a_run_and_drawn_by_50_cases(killed):
    counts = json.loads((killed / "made.json").read_text())["counts"]
    assert set(counts) == set(places.PLACES)
    cases = faults.schedule(50, 0, counts)
    assert {case[0].get("place") for case in cases} == {None, *places.PLACES}
    assert sum("share" in case[0] for case in cases) == 25 and 12 <= sum(len(case) == 2 for case in cases) <= 25
    assert all(case[0]["call"] <= counts[case[0]["place"]] for case in cases if "place" in case[0])
    assert faults.schedule(10, 0, counts) == cases[:10] != faults.schedule(10, 1, counts)


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_line(path: Path, change) -> None:
    first, *rest = path.read_text().splitlines(keepends=True)
    value = json.loads(first)
    change(value)
    path.write_text(json.dumps(value) + "\n" + "".join(rest))


def last_bit(path: Path) -> None:
    """Of one number of Adam's: the smallest difference there can be."""
    saved = torch.load(path, weights_only=True)
    moment = saved["state"][0]["exp_avg"]
    number = moment.flatten()[0].item()
    moment.view(-1)[0] = struct.unpack("f", struct.pack("I", struct.unpack("I", struct.pack("f", number))[0] ^ 1))[0]
    torch.save(saved, path)


def test_every_part_that_differs_is_found(killed, tmp_path):
    whole = killed / "whole"
    ways = {
        "metrics.jsonl": lambda f: edit_line(f / "metrics.jsonl", lambda v: v.update(reward=v["reward"] + 1e-12)),
        "evals.jsonl": lambda f: edit_line(f / "evals.jsonl", lambda v: v["reply_tokens"].append(1)),
        "episodes.jsonl": lambda f: edit_line(f / "episodes.jsonl", lambda v: v.update(logprob=0.5)),
        "metrics.jsonl cannot": lambda f: (f / "metrics.jsonl").write_text('{"update": 1'),
        "summary.json: eval": lambda f: edit(f / "summary.json", lambda v: v["eval"]["tier 2"]["final"].update(n=9)),
        "summary.json: gain ": lambda f: edit(f / "summary.json", lambda v: v["gain"].update(mean=2.0)),
        "summary.json: tokens": lambda f: edit(f / "summary.json", lambda v: v["tokens"].update(sampled=1)),
        "config.json": lambda f: edit(f / "config.json", lambda v: v.update(lr=1.0)),
        "adapter_model": lambda f: storage.damage(f / "checkpoint" / "adapter_model.safetensors", "one bit flipped"),
        "optimizer.pt": lambda f: last_bit(f / "checkpoint" / "optimizer.pt"),
        "state.json": lambda f: edit(f / "checkpoint" / "state.json", lambda v: v.update(update=2)),
        "report.md": lambda f: (f / "report.md").unlink(),
        "names of the files": lambda f: (f / "config.new").touch(),
    }
    for part, change in ways.items():
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "run")
        assert faults.differences(tmp_path / "run", whole) == []
        change(tmp_path / "run")
        found = faults.differences(tmp_path / "run", whole)
        assert any(f"{sentence} ".startswith(part) for sentence in found), (part, found)


def test_what_a_clock_says_may_differ(killed, tmp_path):
    shutil.copytree(killed / "whole", tmp_path / "run")
    edit(tmp_path / "run" / "summary.json", lambda v: v["seconds"].update(total=1e6))
    edit(tmp_path / "run" / "checkpoint" / "state.json", lambda v: v["seconds"].update(total=1e6))
    edit_line(tmp_path / "run" / "metrics.jsonl", lambda v: v.update(seconds_train=1e6))
    assert faults.differences(tmp_path / "run", killed / "whole") == []


def test_the_same_to_the_last_bit():
    nan = torch.tensor([float("nan"), 1.0])
    assert faults.same({"a": [nan, 1]}, {"a": [nan.clone(), 1]})
    assert not faults.same(torch.tensor([0.0]), torch.tensor([-0.0])) and not faults.same(nan, nan.double())
    assert not faults.same([1], [1.0]) and not faults.same({"a": 1}, {"a": 1, "b": 2}) and not faults.same([1], [1, 2])


def test_what_is_said_last_is_not_a_bar():
    text = (
        "x\rGRPO:  67%|######   | 4/6 [00:02<00:01,  1.91it/s]No room; make some\n"
        "\x1b[A\reval final: 100%|#| 4/4 [00:00<00:00,  4.15it/s]\n"
    )
    assert faults.last_line(text) == "No room; make some"
    assert faults.last_line("") == ""


@pytest.mark.parametrize("before, after, left", [(0, 10, 5), (10, 20, 15), (10, 13, 11)])
def test_half_of_what_a_call_has_written_is_cut(tmp_path, before, after, left):
    file = tmp_path / "file"
    file.write_bytes(bytes(before))
    sizes = places.written((file, "text"))
    file.write_bytes(bytes(after))
    places.cut((file, "text"), sizes)
    assert file.stat().st_size == left
