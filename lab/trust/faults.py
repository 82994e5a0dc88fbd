"""Nothing lost: runs that are killed anywhere must end as if nothing had happened.

    python -m lab.trust.faults --n 50 --seed 0     # writes results/faults/kill.json; stop it and start it again, it goes on

A short run of train.py is the measure of all others. It is done again n times, killed (SIGKILL, which no code can catch) and continued
with `python train.py --resume`, as a user would, until it ends. Every second kill comes by the clock, from outside. The others come by
place: the run kills itself at a random call of a function, before, after, or with half of what it writes on the disk (lab/trust/places.py).
Some resumed runs are killed once more. What happens to runs on storage that fails is lab/trust/storage.py.

After every end is asked: are the lines of metrics, evals and episodes the same, but for seconds? Are the numbers of the summary? Are
weights, optimizer and state the same to the last bit? A traceback, a run that never ends and a number that differs are failures.
"""

import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import tyro
from tqdm import tqdm

from lab import common
from lab.common import RESULTS, ROOT, read_json, read_lines, write_json
from lab.trust.places import EVERY, PLACES, RESUMED

OUT, WORK = RESULTS / "faults", ROOT / "runs" / "faults"
UPDATES = 6
SHORT = (
    "--env letters --difficulty 2 --reward partial --model models/pico_base --device cpu --threads 1 --no-wandb --sft-steps 10 "
    f"--sft-examples 12 --sft-batch 2 --updates {UPDATES} --num-tasks 2 --k 4 --max-tokens 40 --lr 0.001 --warmup 1 --eval-n 4 "
    "--eval-every 2 --save-every 2"
).split()
LIMIT_S = 900.0  # a start that takes longer counts as endless


# ------------------------------------------------------------------------------------------------ start one, and look at what it leaves
def start(flags: list[str], plan: dict | None = None) -> SimpleNamespace:
    """train.py itself, or with a plan as lab/trust/places.py runs it."""
    words = ["train.py"] if plan is None else ["-m", "lab.trust.places", json.dumps(plan)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    process = subprocess.Popen([sys.executable, *words, *flags], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    return SimpleNamespace(process=process, out=out, err=err)


def finish(run: SimpleNamespace, at: float | None = None) -> SimpleNamespace:
    """Wait for its end, and kill it after `at` seconds if that is a number. status: None if it did not end by itself in LIMIT_S."""
    try:
        run.process.wait(LIMIT_S if at is None else at)
        status = run.process.returncode
    except subprocess.TimeoutExpired:
        status = None if at is None else -signal.SIGKILL
    finally:
        run.process.kill()
        run.process.wait()
    text = []
    for file in (run.out, run.err):
        file.seek(0)
        text.append(file.read())
        file.close()
    return SimpleNamespace(status=status, out=text[0], err=text[1], said=last_line(text[1]))


def launch(flags: list[str], plan: dict | None = None, at: float | None = None) -> SimpleNamespace:
    return finish(start(flags, plan), at)


def last_line(text: str) -> str:
    """What was said last, without the bars that are drawn around it."""
    text = re.sub(r"[\w ]*:? *\d+%\|[^]\r\n]*\]|\x1b\[A", "\n", text)
    return next((line.strip() for line in reversed(re.split(r"[\r\n]+", text)) if line.strip()), "")


def refusal(done: SimpleNamespace) -> bool:
    """Did it end with a sentence, as it should where it cannot go on?"""
    return done.status is not None and done.status > 0 and "Traceback" not in done.err and bool(done.said)


def brief(text: str, folder: Path) -> str:
    """Without the paths of this machine. Run folders are called RUN."""
    text = re.sub(r"\d{4}-\d\d-\d\dT\S+", "TIME", text.replace(str(folder), "RUN").replace(str(folder.parent), "RUNS"))
    return text.replace(f"{ROOT}/", "").replace(tempfile.gettempdir(), "TMP")[:400]


def timeless(value):
    """Without what a clock says."""
    if isinstance(value, dict):
        return {key: timeless(each) for key, each in value.items() if not key.startswith("seconds")}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def same(a, b) -> bool:
    """Equal to the last bit, tensors too: a NaN equals itself, 0.0 is not -0.0."""
    import torch

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a and b != b)


def differences(run: Path, whole: Path) -> list[str]:
    """What is not the same in two finished run folders, in words. [] is right."""
    import torch

    found = []

    def compare(what: str, read) -> None:
        try:
            ours = read(run)
        except Exception as error:  # not there, or damaged: whatever it is, it is a difference
            found.append(f"{what} cannot be read ({type(error).__name__})")
            return
        if not same(ours, read(whole)):
            found.append(f"{what} differs")

    for name in ("metrics.jsonl", "evals.jsonl", "episodes.jsonl"):
        compare(name, lambda folder, name=name: timeless(read_lines(folder / name)))
    clocked = ("seconds", "peak_rss_gb", "machine", "config")
    for key in read_json(whole / "summary.json"):
        compare(f"summary.json: {key}", lambda folder, key=key: key in clocked or read_json(folder / "summary.json")[key])
    given = lambda folder: {k: v for k, v in read_json(folder / "config.json").items() if k not in ("name", "runs")}
    compare("config.json", given)
    compare("adapter_model.safetensors", lambda folder: (folder / "checkpoint" / "adapter_model.safetensors").read_bytes())
    compare("optimizer.pt", lambda folder: torch.load(folder / "checkpoint" / "optimizer.pt", weights_only=True))
    compare("state.json", lambda folder: timeless(read_json(folder / "checkpoint" / "state.json")))
    for name in ("report.md", "report.html", "curves.png"):  # they hold times
        compare(name, lambda folder, name=name: (folder / name).stat().st_size > 0)
    compare("names of the files", lambda folder: sorted({p.name for p in folder.iterdir()} - {"checkpoint.old", "checkpoint.damaged"}))
    return found


# ------------------------------------------------------------------------------------------------ the run that all others must equal
def fingerprint() -> str:
    rooms = [ROOT, ROOT / "fast", ROOT / "swarm", ROOT / "bookkeeping"]
    files = [file for room in rooms for file in sorted(room.glob("*.py"))] + [Path(__file__), Path(__file__).with_name("places.py")]
    return common.fingerprint(files)


def undisturbed(home: Path) -> tuple[Path, float, dict]:
    """(the folder of the run that nothing disturbs, its seconds, {place: how often it is called}). Made once."""
    whole, notes = home / "whole", home / "whole.json"
    if not notes.exists():
        shutil.rmtree(whole, ignore_errors=True)
        shutil.rmtree(home / "counted", ignore_errors=True)
        home.mkdir(parents=True, exist_ok=True)
        t = time.monotonic()
        done = launch([*SHORT, "--runs", str(home), "--name", "whole"])
        seconds = time.monotonic() - t
        if done.status != 0:
            raise SystemExit(f"the undisturbed run itself ended with status {done.status}: {brief(done.said, whole)}")
        plan = {"do": "count", "to": str(home / "counts.json")}
        if (done := launch([*SHORT, "--runs", str(home), "--name", "counted"], plan)).status != 0 or differences(home / "counted", whole):
            raise SystemExit(f"a run whose calls are only counted is not the undisturbed one: {brief(done.said, whole)}")
        notes.write_text(json.dumps({"seconds": seconds, "counts": read_json(home / "counts.json")}))
        shutil.rmtree(home / "counted")
    noted = read_json(notes)
    if missing := [place for place in PLACES if not noted["counts"].get(place)]:
        raise SystemExit(f"the run never calls what PLACES names {missing[0]!r}: {PLACES[missing[0]][0]}; mend PLACES")
    return whole, noted["seconds"], noted["counts"]


def remembered(path: Path, key: dict) -> dict:
    """{case: outcome} of the lines that belong to this code and seed."""
    kept = read_lines(path) if path.exists() else []
    return {line["case"]: line for line in kept if all(line.get(k) == v for k, v in key.items())}


def remember(path: Path, line: dict) -> None:
    with open(path, "a") as f:
        f.write(json.dumps(line) + "\n")


# ------------------------------------------------------------------------------------------------ kill anywhere
def schedule(n: int, seed: int, counts: dict) -> list[list[dict]]:
    """n cases: the first kill, and in a third of them a second one. Places come in turn, so that none is left out. A longer schedule begins
    like a shorter one."""
    dice, cases, first = random.Random(f"faults {seed}"), [], list(PLACES)
    dice.shuffle(first)
    firsts, agains = cycle(first), cycle([*RESUMED, *PLACES])
    by_clock = lambda least: {"do": "clock", "share": dice.uniform(least, 1)}

    def by_place(place: str, most: int) -> dict:
        return {"do": "kill", "place": place, "moment": dice.choice(EVERY[place][2]), "call": dice.randint(1, max(1, most))}

    for number in range(n):
        place = next(firsts) if number % 2 else ""
        kills = [by_place(place, counts[place]) if place else by_clock(0.25)]  # before that it imports torch
        if dice.random() < 0.45:  # some of them end before they are killed; a third is left
            place = next(agains) if dice.random() >= 0.4 else ""
            kills.append(by_place(place, counts.get(place, 2) // 3) if place else by_clock(0))
        cases.append(kills)
    return cases


def kill_case(name: str, kills: list[dict], home: Path, whole: Path, seconds: float) -> dict:
    """One run, killed as `kills` say and continued to its end: which kills hit, what was said, what is wrong."""
    runs = home / name
    shutil.rmtree(runs, ignore_errors=True)
    folder, began = runs / "run", time.monotonic()
    fresh = [*SHORT, "--runs", str(runs), "--name", "run"]
    flags, kills, hits, said, wrong, resumes, missed = fresh, [dict(kill) for kill in kills], [], [], "", 0, 0
    for _ in range(12):
        kill = kills.pop(0) if kills else {"do": "none"}
        resumes += flags is not fresh
        place = kill if kill["do"] == "kill" else None
        done = launch(flags, place, at=kill["share"] * seconds if kill["do"] == "clock" else None)
        if "Traceback" in done.err:
            wrong = f"a traceback: {brief(done.said, folder)}"
        elif done.status is None:
            wrong = f"it did not end in {LIMIT_S:.0f} seconds"
        elif done.status == -signal.SIGKILL:
            hits.append({"by": "clock" if place is None else "place", "resumed": flags is not fresh, "share": kill.get("share"),
                         "place": kill.get("place"), "moment": kill.get("moment"), "call": kill.get("call")})  # fmt: skip
            flags = ["--resume", str(folder)]
        elif done.status == 0 and not hits and kill["do"] == "clock" and missed < 9:  # it was faster than the undisturbed run
            shutil.rmtree(runs)
            missed += 1
            kills.insert(0, kill | {"share": 0.8 * kill["share"]})
        elif done.status == 0:
            wrong = "" if hits else f"it never came to {kill.get('place')}"
            break
        elif flags is not fresh and not (folder / "config.json").exists():
            said.append(f"--resume: {brief(done.said, folder)}")
            flags = fresh  # nothing was written yet, so the same command starts it anew
        elif flags is fresh and folder.exists() and not (folder / "config.json").exists() and "blocked" not in said:
            said += [f"started anew: {brief(done.said, folder)}", "blocked"]
            shutil.rmtree(folder)  # what a user would have to do
        else:
            wrong = f"status {done.status}: {brief(done.said, folder)}"
        if wrong:
            break
    else:
        wrong = "12 starts were not enough"
    unlike = differences(folder, whole) if not wrong else []
    if not wrong and not unlike:
        shutil.rmtree(runs)  # what failed stays to be looked at
    return {"kills": hits, "resumes": resumes, "said": [s for s in said if s != "blocked"], "blocked": "blocked" in said,
            "wrong": wrong or "; ".join(unlike), "equal": not (wrong or unlike), "seconds": round(time.monotonic() - began, 1)}  # fmt: skip


def machine() -> dict:
    versions = {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers", "peft", "safetensors")}
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    return {"machine": f"{platform.machine()}, {os.cpu_count()} cores, {system}, one thread a run", "versions": versions}


def summarize(cases: dict[str, dict], n: int, seed: int, seconds: float) -> dict:
    """What goes into kill.json."""
    hits = [hit for case in cases.values() for hit in case["kills"]]
    places: dict = {place: Counter() for place in (*PLACES, *RESUMED)}
    for hit in hits:
        if hit["by"] == "place":
            places[hit["place"]][hit["moment"]] += 1
    return {
        "seed": seed, "n": n, **machine(), "seconds_undisturbed": round(seconds, 1),
        "kills": len(hits), "by_clock": sum(hit["by"] == "clock" for hit in hits), "by_place": sum(hit["by"] == "place" for hit in hits),
        "kills_of_resumed_runs": sum(hit["resumed"] for hit in hits),
        "cases_killed_twice": sum(len(case["kills"]) > 1 for case in cases.values()),
        "resumes": sum(case["resumes"] for case in cases.values()), "equal": sum(case["equal"] for case in cases.values()),
        "failures": [{"case": name, "wrong": case["wrong"], "kills": case["kills"]} for name, case in cases.items() if not case["equal"]],
        "places": {place: {"all": sum(moments.values()), **moments} for place, moments in places.items()},
        "places_never_hit": [place for place, moments in places.items() if not moments],
        "folder_in_the_way": sum(case["blocked"] for case in cases.values()),
        "said": dict(Counter(sentence for case in cases.values() for sentence in case["said"])),
        "seconds_a_case": round(sum(case["seconds"] for case in cases.values()) / max(1, len(cases)), 1),
    }  # fmt: skip


def kill_all(n: int, seed: int) -> dict:
    """Every case that is not done yet, then the sum of all."""
    code = fingerprint()
    home, record = WORK / code, WORK / "kill.jsonl"
    whole, seconds, counts = undisturbed(home)
    key = {"code": code, "seed": seed}
    cases = {f"kill-{seed}-{number}": kills for number, kills in enumerate(schedule(n, seed, counts))}
    done = remembered(record, key)
    with tqdm(cases.items(), desc="kill") as bar:
        for name, kills in bar:
            if name not in done:
                done[name] = {**key, "case": name, **kill_case(name, kills, home, whole, seconds)}
                remember(record, done[name])
                if not done[name]["equal"]:
                    bar.write(f"{name}: {done[name]['wrong']}")
    return summarize({name: done[name] for name in cases}, n, seed, seconds)


def main(n: int = 50, seed: int = 0) -> None:
    """Runs that are killed, anywhere. n: how many; seed: of the moments."""
    result = kill_all(n, seed)
    write_json(OUT / "kill.json", result)
    print(f"{result['n']} runs, {result['kills']} kills ({result['by_clock']} by the clock, {result['by_place']} by place, "
          f"{result['kills_of_resumed_runs']} of resumed runs), {result['resumes']} resumes: {result['equal']} ended equal "
          "to the last bit")  # fmt: skip
    for place, moments in result["places"].items():
        print(f"  {place:28} {moments.pop('all'):3}   {', '.join(f'{moment} {count}' for moment, count in moments.items())}")
    for sentence, count in result["said"].items():
        print(f"  said {count} times: {sentence}")
    for failure in result["failures"]:
        print(f"  FAILED {failure['case']}: {failure['wrong']}")
    sys.exit(bool(result["failures"]))


if __name__ == "__main__":
    tyro.cli(main)
