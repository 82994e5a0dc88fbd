"""Bad storage: a disk that fills up or turns read-only, files that are damaged, two processes in one folder, a clock that jumps.

    python -m lab.trust.storage                  # writes results/faults/storage.json; full and read-only disks need root, for a tmpfs
    python -m lab.trust.storage --only full      # cases whose name holds this

Each case is a short run of train.py (lab/trust/faults.py) that something happens to, and that a user then continues. Asked is: one sentence
and no traceback where it cannot go on; the right checkpoint where it can; and at the end the same lines, numbers and weights as a run that
nothing happened to.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import tyro
from tqdm import tqdm

from lab.common import read_json, read_lines, write_json
from lab.trust import faults
from lab.trust.faults import LIMIT_S, OUT, SHORT, UPDATES, WORK, brief, differences, finish, launch, refusal, start
from lab.trust.places import make_read_only


def fresh(home: Path, name: str) -> Path:
    """home/name/run, with nothing there yet."""
    shutil.rmtree(home / name, ignore_errors=True)
    return home / name / "run"


def anew(folder: Path) -> list[str]:
    return [*SHORT, "--runs", str(folder.parent), "--name", folder.name]


def resume(folder: Path) -> list[str]:
    return ["--resume", str(folder)]


class NoDisk(Exception):
    """No disk of our own can be mounted here."""


@contextmanager
def disk(size: str):
    """A folder that has room for `size`, and no more. It is unmounted whatever happens; root alone may have one."""
    top = WORK / "disk"
    unmount(top)  # what a killed process has left
    top.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "faults", str(top)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoDisk(f"skipped: no tmpfs can be mounted here ({(getattr(error, 'stderr', '') or str(error)).strip()})") from None
    try:
        yield top
    finally:
        unmount(top)


def unmount(top: Path) -> None:
    while os.path.ismount(top):
        subprocess.run(["umount", str(top)], check=True)


def outcome(said: list[str], wrong: list[str], unlike: list[str] | None) -> dict:
    """unlike: what differs from the undisturbed run; None where the run was not meant to end."""
    equal = None if unlike is None else not unlike
    return {"said": said, "equal": equal, "ok": not wrong and not unlike, "wrong": [*wrong, *(unlike or [])]}


def went_on(folder: Path, done: SimpleNamespace, after: int | None = None) -> list[str]:
    """What is wrong with a --resume that should have gone on to the end, from the checkpoint after so many updates."""
    if done.status != 0:
        return [f"--resume ended with status {done.status}: {brief(done.said, folder)}"]
    if after is not None and f"after update {after}\n" not in done.out:
        return [f"--resume did not go on after update {after}"]
    return []


def stopped(folder: Path, done: SimpleNamespace, word: str = "") -> list[str]:
    """What is wrong with a run that should have ended with one sentence that holds `word`."""
    if not refusal(done):
        return [f"status {done.status}, {'a traceback' if 'Traceback' in done.err else 'nothing useful said'}: {brief(done.said, folder)}"]
    return [] if word.lower() in done.said.lower() else [f"it does not say {word!r}"]


def full_disk(whole: Path, size: str, plan: dict | None, after: int | None) -> dict:
    """A disk that fills up where the plan says (without one: by itself). The run stops, stops again without more room,
    and goes on with it."""
    with disk(size) as top:
        folder = top / "run"
        first = launch(anew(folder), plan and plan | {"do": "fill", "top": str(top)})
        wrong, said = stopped(folder, first, "no space left"), [brief(first.said, folder)]
        second = launch(resume(folder))  # a user who tries at once
        wrong += [f"without room: {w}" for w in stopped(folder, second)]
        said.append(brief(second.said, folder))
        subprocess.run(["mount", "-o", "remount,size=64m", str(top)], check=True)
        wrong += went_on(folder, launch(resume(folder)), after)
        (top / "filler").unlink(missing_ok=True)
        return outcome(said, wrong, differences(folder, whole))


def read_only(whole: Path, plan: dict, after: int) -> dict:
    """A disk that turns read-only at a place, and is still so when the run is resumed."""
    with disk("64m") as top:
        folder = top / "run"
        first, second = launch(anew(folder), plan | {"do": "read-only", "top": str(top)}), launch(resume(folder))
        wrong = stopped(folder, first, "read-only") + [f"--resume: {w}" for w in stopped(folder, second, "read-only")]
        subprocess.run(["umount", str(top)], check=True)  # the read-only one; below it lies the disk that can be written
        wrong += went_on(folder, launch(resume(folder)), after)
        return outcome([brief(first.said, folder), brief(second.said, folder)], wrong, differences(folder, whole))


def read_only_at_first(whole: Path) -> dict:
    with disk("1m") as top:
        make_read_only(top)
        done = launch(anew(top / "run"))
        return outcome([brief(done.said, top / "run")], stopped(top / "run", done, "read-only"), None)


def cut_run(home: Path) -> Path:
    """A run that was killed in its last update but one: checkpoint/ is that after update 4, checkpoint.old/ that after update 2.
    Made once."""
    made = home / "cut" / "made"
    if not made.exists():
        folder, plan = fresh(home, "cut"), {"do": "kill", "place": "line of metrics", "moment": "before", "call": 5}
        done = launch(anew(folder), plan)
        if done.status != -signal.SIGKILL:
            raise SystemExit(f"a run that should be cut ended with status {done.status}: {brief(done.said, folder)}")
        made.touch()
    return made.with_name("run")


def damage(file: Path, how: str) -> None:
    if how == "removed":
        file.unlink()
    elif how in ("emptied", "cut in half"):
        os.truncate(file, 0 if how == "emptied" else file.stat().st_size // 2)
    elif how == "one bit flipped":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))


def told(done: SimpleNamespace, word: str) -> str:
    """The line that holds a word, on either stream, or ""."""
    return next((line.strip() for line in re.split(r"[\r\n]+", done.out + "\n" + done.err) if word in line), "")


def damaged(home: Path, whole: Path, hurt, says: str = "damaged", after: int | None = 2, kill: dict | None = None) -> dict:
    """A copy of the cut run is damaged by hurt(its folder) and resumed; `kill`: killed once more on the way. after None:
    it cannot go on."""
    folder, wrong = fresh(home, "hurt"), []  # a name that no message holds
    shutil.copytree(cut_run(home), folder)
    try:
        hurt(folder)
    except FileNotFoundError as error:
        return outcome([], [f"there is nothing to damage: {brief(str(error.filename), folder)}"], None)
    done = launch(resume(folder), kill)
    if after is None:
        return outcome([brief(done.said, folder)], stopped(folder, done, says), None)
    said = [brief(told(done, "damaged"), folder)]
    if kill:
        wrong += [] if done.status == -signal.SIGKILL else [f"it was not killed there, but ended with status {done.status}"]
        done = launch(resume(folder))
        said.append(brief(told(done, "damaged"), folder))
        wrong += went_on(folder, done)
    else:
        wrong += went_on(folder, done, after)
        wrong += [] if not says or told(done, says) else [f"it does not say {says!r}"]
    return outcome([sentence for sentence in said if sentence], wrong, differences(folder, whole))


def beside(home: Path, whole: Path, second, says: str, resumed: bool = False) -> dict:
    """A training (resumed: the cut run that goes on) waits in an update while second(its folder) is started: that one is refused,
    the first goes on."""
    folder = fresh(home, "beside")
    here, go = folder.with_name("here"), folder.with_name("go")
    if resumed:
        shutil.copytree(cut_run(home), folder)
    folder.parent.mkdir(exist_ok=True)
    plan = {"do": "wait", "place": "line of metrics", "moment": "before", "call": 1 if resumed else 4, "here": str(here), "go": str(go)}
    first = start(resume(folder) if resumed else anew(folder), plan)
    try:
        patience = time.monotonic() + LIMIT_S
        while not here.exists() and first.process.poll() is None and time.monotonic() < patience:
            time.sleep(0.05)
        other = launch(second(folder))
        wrong = stopped(folder, other, says)
    finally:
        go.touch()
        done = finish(first)
    wrong += [f"the first: {brief(done.said, folder)}"] if done.status != 0 else []
    return outcome([brief(other.said, folder)], wrong, differences(folder, whole))


def clock(home: Path, whole: Path, by: float, place: str, call: int) -> dict:
    """The clock jumps by so many seconds in the middle. No time that a run notes may be negative, or longer than the run."""
    folder, t = fresh(home, "clock"), time.monotonic()
    done = launch(anew(folder), {"do": "clock", "place": place, "moment": "before", "call": call, "by": by})
    took, wrong = time.monotonic() - t, []
    if done.status != 0:
        return outcome([brief(done.said, folder)], [f"it ended with status {done.status}"], None)
    noted = {f"metrics.jsonl: {k}": v for line in read_lines(folder / "metrics.jsonl") for k, v in line.items() if k.startswith("seconds")}
    noted |= {f"summary.json: {k}": v for k, v in read_json(folder / "summary.json")["seconds"].items()}
    noted |= {f"state.json: {k}": v for k, v in read_json(folder / "checkpoint" / "state.json")["seconds"].items()}
    wrong += [f"{name} is {value:.0f}" for name, value in noted.items() if not 0 <= value <= took]
    return outcome([], wrong, differences(folder, whole))


def looked_at(home: Path, whole: Path, killed: bool) -> dict:
    """--eval-only on a finished run, the first time perhaps killed with half a line in evals.jsonl. The next one must not write on from
    there, and what it says must stay when the run is resumed."""
    folder = fresh(home, "looked")
    shutil.copytree(whole, folder)
    wrong, own = [], lambda: [line for line in read_lines(folder / "evals.jsonl") if line["stage"] == "eval_only"]
    if killed:
        first = launch(["--eval-only", str(folder)], {"do": "kill", "place": "line of evals", "moment": "half", "call": 1})
        wrong += [] if first.status == -signal.SIGKILL else ["it was not killed there"]
    done = launch(["--eval-only", str(folder)])
    wrong += [] if done.status == 0 else [f"--eval-only ended with status {done.status}: {brief(done.said, folder)}"]
    try:
        before = own()
        wrong += [] if len(before) == 1 else [f"{len(before)} lines of evals.jsonl are its own, and not one"]
        if not killed:
            wrong += went_on(folder, launch(resume(folder)), UPDATES)
            wrong += [] if own() == before else ["its line is gone after --resume"]
        kept = [line for line in read_lines(folder / "evals.jsonl") if line["stage"] != "eval_only"]
        unlike = [] if kept == read_lines(whole / "evals.jsonl") else ["the other lines of evals.jsonl differ"]
    except json.JSONDecodeError:
        unlike = ["evals.jsonl holds a broken line"]
    return outcome([brief(done.said, folder)] if done.status else [], wrong, unlike)


FILES = ("README.md", "adapter_config.json", "adapter_model.safetensors", "checksum", "optimizer.pt", "state.json")


def storage_cases(home: Path, whole: Path) -> dict:
    """{case: (what is expected, a function that does it)}."""
    at = lambda place, moment, call: {"place": place, "moment": moment, "call": call}
    stops = "one sentence; after there is room it goes on from the last good checkpoint"
    previous = "the previous checkpoint is used and said so"
    cases = {}
    for name, size, plan, after in (
        ("full by itself", "6m", None, 2),  # a checkpoint has 3.8 MB (the first 1.3), and the next one has to stand beside it
        ("full in a line of metrics", "32m", at("line of metrics", "before", 3), 2),
        ("full in a line of evals", "32m", at("line of evals", "before", 10), 0),
        ("full in a line of episodes", "32m", at("line of episodes", "before", 20), None),
        ("full in the checkpoint's weights", "32m", at("checkpoint: weights", "before", 3), 2),
        ("full in the checkpoint's optimizer", "32m", at("checkpoint: optimizer", "before", 3), 2),
        ("full in the checkpoint's small files", "32m", at("checkpoint: small files", "before", 5), 2),
        ("full in the summary", "32m", at("write config or summary", "before", 2), UPDATES),
        ("full in the report", "32m", at("report", "before", 1), UPDATES),
    ):
        cases[name] = stops, lambda size=size, plan=plan, after=after: full_disk(whole, size, plan, after)
    for name, plan, after in (
        ("read-only in a line of metrics", at("line of metrics", "before", 3), 2),
        ("read-only before a checkpoint", at("checkpoint: weights", "before", 3), 2),
        ("read-only in the report", at("report", "before", 1), UPDATES),
    ):
        cases[name] = "one sentence, also of --resume; once writable it goes on", lambda p=plan, after=after: read_only(whole, p, after)
    cases["read-only from the start"] = "one sentence", lambda: read_only_at_first(whole)
    for how in ("one bit flipped", "cut in half", "emptied", "removed"):
        files = FILES if how == "one bit flipped" else ("adapter_model.safetensors", "checksum")  # the others: tests/test_checkpoint.py
        for file in files:
            hurt = lambda folder, file=file, how=how: damage(folder / "checkpoint" / file, how)
            cases[f"checkpoint/{file} {how}"] = previous, lambda hurt=hurt: damaged(home, whole, hurt)
    both = lambda folder: [damage(folder / name / "optimizer.pt", "one bit flipped") for name in ("checkpoint", "checkpoint.old")]
    flip = lambda folder: damage(folder / "checkpoint" / "state.json", "one bit flipped")
    old = lambda folder: damage(folder / "checkpoint.old" / "state.json", "one bit flipped")
    gone = lambda folder: [(folder / "checkpoint.old").stat(), shutil.rmtree(folder / "checkpoint")]
    cases["both checkpoints damaged"] = "one sentence", lambda: damaged(home, whole, both, after=None)
    cases["checkpoint.old/ damaged"] = "nothing is lost", lambda: damaged(home, whole, old, says="", after=4)
    cases["checkpoint/ removed"] = "the previous checkpoint is used", lambda: damaged(home, whole, gone, says="")
    for moment, place, call in (
        ("before", "checkpoint: rename", 1), ("after", "checkpoint: rename", 1), ("after", "checkpoint: remove a folder", 1),
        ("after", "checkpoint: remove a folder", 2), ("after", "checkpoint: remove a file", 1), ("before", "set a damaged one aside", 1),
        ("after", "set a damaged one aside", 1),
    ):  # fmt: skip
        kill = {"do": "kill", **at(place, moment, call)}
        name = f"checkpoint/ damaged, and killed on the way ({moment} call {call} of '{place}')"
        cases[name] = "nothing is lost", lambda kill=kill: damaged(home, whole, flip, says="", kill=kill)
    refused = "refused in one sentence; the first ends as if alone"
    look = lambda folder: ["--eval-only", str(folder)]
    cases["two --resume at once"] = refused, lambda: beside(home, whole, resume, "another process", True)
    cases["--resume beside a training"] = refused, lambda: beside(home, whole, resume, "another process")
    cases["--eval-only beside a training"] = refused, lambda: beside(home, whole, look, "another process")
    cases["the same --name beside a training"] = refused, lambda: beside(home, whole, anew, "exists")
    cases["--eval-only killed in a line"] = "the next one works, and what was there stays", lambda: looked_at(home, whole, True)
    cases["--eval-only, then --resume"] = "the evaluation's line stays", lambda: looked_at(home, whole, False)
    for by, name in ((-86400.0, "back"), (86400.0, "forward")):
        for place, call in (("SFT step", 5), ("line of metrics", 3), ("backward", 15)):
            case = f"the clock jumps {name} by a day ({place} {call})"
            cases[case] = "no time is negative or longer than the run", lambda by=by, p=place, c=call: clock(home, whole, by, p, c)
    return cases


def storage_all(only: str) -> list[dict]:
    code = faults.fingerprint()
    home, record = WORK / code, WORK / "storage.jsonl"
    whole, _, _ = faults.undisturbed(home)
    cases, done, table = storage_cases(home, whole), faults.remembered(record, {"code": code}), []
    with tqdm([case for case in cases if only in case], desc="storage") as bar:
        for case in bar:
            expected, do = cases[case]
            if case not in done:
                began = time.monotonic()
                try:
                    result = do()
                except NoDisk as error:
                    result = {"said": [str(error)], "equal": None, "ok": None, "wrong": []}
                done[case] = {"code": code, "case": case, "expected": expected, **result, "seconds": round(time.monotonic() - began, 1)}
                faults.remember(record, done[case])
            if done[case]["ok"] is False:
                bar.write(f"{case}: {'; '.join(done[case]['wrong'])}")
            table.append({key: done[case][key] for key in ("case", "expected", "said", "equal", "ok", "wrong")})
    return table


def main(only: str = "") -> None:
    """Runs on storage that fails. only: cases whose name holds this; storage.json is not written then."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; start it again, it goes on"))  # so that a disk is unmounted
    table = storage_all(only)
    if not only:
        write_json(OUT / "storage.json", table)
    counts = Counter(row["ok"] for row in table)
    print(f"{counts[True]} of {len(table)} cases as they should be, {counts[False]} failed, {counts[None]} skipped")
    for row in table:
        word = {None: "skipped", True: "ok", False: "FAILED"}[row["ok"]]
        print(f"  {word:8} {row['case']}: {' / '.join(row['said'])} {'; '.join(row['wrong'])}")
    sys.exit(bool(counts[False]))


if __name__ == "__main__":
    tyro.cli(main)
