"""Would the tests notice? A few hundred small mistakes, one at a time, each tried against the tests.

    python -m lab.trust.mutate              # 300 mistakes; stop it and start it again, it goes on
    python -m lab.trust.mutate --again      # only those that nobody noticed, after new tests
    python -m lab.trust.mutate --again --only fast/plan.py --tests tests/test_memory.py
    python -m lab.trust.mutate --page       # only results/trust/mutate.md again

The mistakes are made by rule and drawn by a seed (lab/trust/mistakes.py). First every test runs once
and its lines are noted (lab/trust/marks.py). Then each mistake is put into a private copy of the
last commit, and the tests that run its line are run, the quick ones first, until one fails. The
working tree is read and never written, but for results/trust.

A mistake counts as caught if a test fails, does not end (LIMIT_S and five times its usual time), or
takes pytest down with it, and in no other case: tests beyond --budget seconds are left out, and
the page says for which. Mistakes that change nothing that anybody could see are listed by hand, with
the reason, in lab/trust/equivalent.toml.

With --tests (files, or single tests) nothing is noted first: these tests run once without a
mistake, must pass, and are then all that is tried. It is cheaper than to note every line of every
test again, and it can only find less.

What makes it cheap is a fork: torch and the other libraries are imported once, and each mistake is
tried in a fork that has imported nothing of ours.
"""

import ast
import ctypes
import hashlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import types
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import tyro

from lab.trust.marks import FILES, ROOT, WORK, Recorder, by_place, offsets_of, prepare, watch
from lab.trust.mistakes import Mistake, mistakes, sample

OUT = ROOT / "results" / "trust"
EQUIVALENT = ROOT / "lab" / "trust" / "equivalent.toml"
LIBRARIES = ("torch", "transformers", "transformers.models.qwen3.modeling_qwen3", "peft", "pytest",
             "hypothesis", "scipy.stats", "statsmodels.stats.multitest", "matplotlib.pyplot",
             "tyro", "wandb", "httpx2", "tqdm", "filelock")  # fmt: skip
LIMIT_S = 20.0  # a test that takes so much longer than five times its usual time does not end
COLLECT_S = 120.0
QUICK_S, QUICK_FILES = 1.5, 5  # what is tried first: tests that are done in a moment
SAMPLES = {  # by seed: its flags, and how the page's number came about
    0: ("", "First pass: 60 seconds of tests or fewer for each, of those that run its line. Those that "
        "nobody noticed were then looked at one by one and tried again, against the tests that are "
        "most likely to notice. If none did, a test was written for what they break. So this is the "
        "share of a sample that the tests were improved on: a fresh one must be expected to do worse."),
    1: (" --n 60 --least 1", "A fresh sample, drawn when all those tests stood: no test had been written for "
        "any of it, and what stood in the first sample is left out. Each was tried against the tests "
        "that bear the file's name or a neighbour's, 60 seconds at most, and if nobody noticed, "
        "against more of them. So a mistake may count as survived that another test would catch."),
}  # fmt: skip
MEMORY = 12 * 2**30  # bytes that a mistake may take; with more, Python raises


@dataclass
class Flags:
    n: int = 300  # mistakes, about
    seed: int = 0
    least: int = 4  # of each file
    budget: float = 60.0  # seconds of tests for one mistake; those beyond are left out
    workers: int = 1  # mistakes tried at the same time
    again: bool = False  # try once more what nobody noticed
    page: bool = False  # only write the page
    only: tuple[str, ...] = ()  # only mistakes whose FILE:LINE: begins so (fast/ or grpo.py:7:)
    tests: tuple[str, ...] = ()  # ask these tests, and no others
    written: bool = False  # these tests were written for these mistakes: the share is without them
    pause: str = ""  # wait between two mistakes while this file exists: a timing is being taken


# --------------------------------------------------------------------------------- a private copy


class Copy:
    """A clone of the last commit, in which files can be changed and tests be run."""

    def __init__(self, root: Path, name: str = "copy"):
        self.home = Path(tempfile.mkdtemp(prefix="mutate-"))
        self.root, self.changes = self.home / name, 0
        git = ["git", "clone", "--quiet", "--shared", str(root), str(self.root)]
        subprocess.run(git, check=True)

    def write(self, file: str, text: str) -> None:
        """Give the file a time of its own, or Python might take what it compiled for the last."""
        path = self.root / file
        path.write_text(text)
        self.changes += 1
        os.utime(path, (10**9 + self.changes, 10**9 + self.changes))

    def clean(self) -> None:
        """Take away what tests have left. What is compiled may stay."""
        for words in (["checkout", "--quiet", "."], ["clean", "-fdq", "-e", "__pycache__"]):
            subprocess.run(["git", *words], cwd=self.root, check=True)
        shutil.rmtree(self.home / "tmp", ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)


# ------------------------------------------------------------------------------ pytest, in a fork


@dataclass
class Outcome:
    how: str = "survived"  # or caught: "failed", "endless", "ended" (it took pytest down with it)
    by: str = ""  # the test
    said: str = ""  # what it said, in a line
    passed: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # how long those that passed took
    found: dict = field(default_factory=dict)  # what a Recorder found


class Telling:
    """A plugin of pytest: choose and order the tests, and tell the parent of each."""

    def __init__(self, tests: list[str] | None, pipe: int):
        self.rank = None if tests is None else {test: i for i, test in enumerate(tests)}
        self.pipe, self.passed = pipe, set()

    def tell(self, **what) -> None:
        os.write(self.pipe, (json.dumps(what) + "\n").encode())

    def hooks(self):
        import pytest

        telling = self

        class Hooks:
            @pytest.hookimpl(trylast=True)
            def pytest_collection_modifyitems(self, items):
                if telling.rank is not None:
                    items[:] = [item for item in items if item.nodeid in telling.rank]
                    items.sort(key=lambda item: telling.rank[item.nodeid])

            def pytest_collectreport(self, report):
                if report.failed:
                    telling.tell(failed=report.nodeid, said=last_line(str(report.longrepr)))

            def pytest_runtest_logstart(self, nodeid):
                telling.tell(start=nodeid)

            def pytest_runtest_logreport(self, report):
                if report.failed:
                    telling.passed.discard(report.nodeid)
                    telling.tell(failed=report.nodeid, said=last_line(str(report.longrepr)))
                elif report.when == "call" and report.passed:
                    telling.passed.add(report.nodeid)
                    telling.tell(passed=report.nodeid)

        return Hooks()


def last_line(text: str) -> str:
    said = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()
    return said[0].removeprefix("E").strip()[:200] if said else ""


def become_pytest(copy: Copy, files: list[str], tests, pipe: int, env: dict, recorder) -> None:
    """In the fork: run the tests of the copy, as `python -m pytest` there would."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for number, name in enumerate([os.devnull, copy.home / "out", copy.home / "out"]):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if number == 1 else 0)), number)
    os.chdir(copy.root)
    temporary = copy.home / "tmp"
    temporary.mkdir(exist_ok=True)
    os.environ.update(env, TMPDIR=str(temporary), OMP_NUM_THREADS="1")
    tempfile.tempdir = None
    forget(ROOT)
    sys.path[:] = [str(copy.root), *(p for p in sys.path if p not in ("", str(ROOT)))]
    sys.modules["__main__"] = types.ModuleType("__main__")  # else a child would import this file
    forkserver._forkserver.ensure_running = lambda: None  # the parent's does

    import hypothesis
    import pytest

    hypothesis.settings.register_profile("same", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("same")
    telling = Telling(tests, pipe)
    plugins = [telling.hooks()] + ([recorder.hooks()] if recorder else [])
    stop = [] if recorder else ["-x"]
    base = f"--basetemp={temporary / 'pytest'}"
    words = ["-q", *stop, "-p", "no:cacheprovider", "-p", "no:xdist", base, *files]
    status = int(pytest.main(words, plugins=plugins))
    if recorder:
        (copy.home / "ran.json").write_text(json.dumps(recorder.record(telling.passed)))
    telling.tell(end=status)


def forget(root: Path) -> None:
    """Leave nothing of ours among the modules that are imported."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(f"{root}/") and "site-packages" not in file:
            del sys.modules[name]


class Player:
    """Runs tests of a copy in forks, and leaves no process behind."""

    def __init__(self, copy: Copy, env: dict[str, str] | None = None):
        self.copy, self.env = copy, env or {}
        ctypes.CDLL(None).prctl(36, 1)  # Linux: orphans become ours (PR_SET_CHILD_SUBREAPER)
        os.environ.update(self.env)
        self.start_warm()
        self.keep = {p.pid for p in psutil.Process().children(recursive=True)}

    def start_warm(self) -> None:
        """The server of tests/warm.py, once for all mistakes: it has imported libraries only."""
        file = self.copy.root / "tests" / "warm.py"
        if file.exists():
            sys.path.insert(0, str(file.parent))
            import_module("warm")
            sys.path.pop(0)
            forkserver.ensure_running()
        resource_tracker.ensure_running()

    def play(self, files, tests, usual: dict[str, float], recorder=None) -> Outcome:
        """files: of tests. tests: their ids in order (None: all). usual: how long each takes."""
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(ours)
                become_pytest(self.copy, files, tests, theirs, self.env, recorder)
            except BaseException as error:
                os.write(theirs, (json.dumps({"broken": repr(error)}) + "\n").encode())
            finally:
                os._exit(0)
        os.close(theirs)
        try:
            return self.listen(ours, usual, stop=recorder is None)
        finally:
            os.close(ours)
            self.end_all()

    def listen(self, pipe: int, usual: dict[str, float], stop: bool) -> Outcome:
        out, now, since, rest = Outcome(), "", 0.0, b""
        until = time.monotonic() + COLLECT_S
        while True:
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                return Outcome("endless", now, "", out.passed)
            heard = os.read(pipe, 65536)
            if not heard:
                return Outcome("ended", now, "", out.passed)
            *lines, rest = (rest + heard).split(b"\n")
            for line in map(json.loads, lines):
                if "start" in line:
                    now, since = line["start"], time.monotonic()
                    until = time.monotonic() + LIMIT_S + 5 * usual.get(now, 60.0)
                elif "passed" in line:
                    out.passed.append(line["passed"])
                    out.seconds[now] = time.monotonic() - since
                elif "failed" in line and stop:
                    return Outcome("failed", line["failed"], line["said"], out.passed)
                elif "broken" in line:
                    raise RuntimeError(line["broken"])
                elif "end" in line:
                    return out

    def end_all(self) -> None:
        """Kill whatever a test has started, and the fork."""
        for _ in range(20):
            left = [p for p in psutil.Process().children(recursive=True) if p.pid not in self.keep]
            for process in left:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    pass
            while reaped():
                pass
            if not left:
                return
            time.sleep(0.05)


def reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


# ------------------------------------------------------------------------------- who runs which line


def fingerprint(root: Path, files: list[str], test: str) -> str:
    """A record holds while neither the watched files nor the tests have changed."""
    parts = [*files, test, "tests/conftest.py"]
    texts = [(root / part).read_bytes() for part in parts if (root / part).exists()]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def record(player: Player, test: str, offsets, seen, work: Path) -> None:
    """Run one file of tests and write down what each ran."""
    (work / "ran").mkdir(parents=True, exist_ok=True)
    recorder = Recorder(seen)
    made, start = player.copy.home / "ran.json", time.time()
    made.unlink(missing_ok=True)
    outcome = player.play([test], None, defaultdict(lambda: 400.0), recorder)
    tests = json.loads(made.read_text()) if made.exists() else {}
    player.copy.clean()
    hashed = fingerprint(player.copy.root, list(offsets), test)
    whole = {"of": hashed, "seconds": round(time.time() - start, 1), "tests": tests}
    (work / "ran" / f"{Path(test).stem}.json").write_text(json.dumps(whole))
    print(f"{test}: {len(tests)} tests in {whole['seconds']} s, {outcome.how} {outcome.by}", flush=True)


def recorded(root: Path, files: list[str], work: Path) -> tuple[dict[str, dict], list[str]]:
    """(what each test runs, the files of tests that have to be run once more to know)"""
    tests, missing = {}, []
    for path in sorted((root / "tests").glob("test_*.py")):
        test, file = f"tests/{path.name}", work / "ran" / f"{path.stem}.json"
        kept = json.loads(file.read_text()) if file.exists() else {}
        if kept.get("of") == fingerprint(root, files, test):
            tests |= kept["tests"]
        else:
            missing.append(test)
    return tests, missing


class Who:
    """Which tests can notice a mistake, and in which order to ask them."""

    def __init__(self, root: Path, files: list[str], tests: dict[str, dict]):
        self.tests, self.places = tests, by_place(tests)
        self.offsets, _ = offsets_of(root, files)
        self.usual = {test: found["seconds"] + found["shared"] for test, found in tests.items()}
        self.mentions, self.of_file = defaultdict(set), defaultdict(set)
        for file in files:
            tree = ast.parse((root / file).read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.stmt):
                    place = self.offsets[file] + node.lineno
                    self.of_file[file] |= self.places[place]
                    for name in names_in(node):
                        self.mentions[name] |= self.places[place]

    def select(self, mistake: Mistake) -> set[str]:
        if mistake.names:  # it runs once: ask those who run what uses it
            named = set().union(*(self.mentions[name] for name in mistake.names))
            return named or self.of_file[mistake.file]
        place = self.offsets[mistake.file] + mistake.statement
        return self.places[place] or self.of_file[mistake.file]

    def batches(self, mistake: Mistake, budget: float) -> tuple[list[list[str]], int]:
        """(lists of tests, to be run one after the other; how many were left out)"""
        chosen, own = self.select(mistake), f"tests/test_{Path(mistake.file).stem}.py"
        per_file = defaultdict(list)
        for test in sorted(chosen, key=lambda t: (self.usual[t], t)):
            per_file[test.split("::")[0]].append(test)
        quick = {f: [t for t in ts if self.usual[t] <= QUICK_S] for f, ts in per_file.items()}
        order = sorted(per_file, key=lambda f: (f != own, -len(quick[f]), f))
        some = [test for file in order[:QUICK_FILES] for test in quick[file]]
        rest = sorted(chosen - set(some), key=lambda t: (self.usual[t], t))
        paid: set[tuple[str, float]] = set()  # fixtures, by their file and what they cost
        first = self.affordable(some, budget, paid)
        spent = sum(self.tests[t]["seconds"] for t in first) + sum(cost for _, cost in paid)
        then = self.affordable([*rest, *sorted(set(some) - set(first))], budget - spent, paid)
        then = then or rest[: not first]  # one at least
        rank = {file: i for i, file in enumerate(dict.fromkeys(t.split("::")[0] for t in then))}
        then.sort(key=lambda t: rank[t.split("::")[0]])  # a file at a time: its fixtures live so long
        batches = [batch for batch in (first, then) if batch]
        return batches, len(chosen) - len(first) - len(then)

    def affordable(self, tests: list[str], seconds: float, paid: set) -> list[str]:
        """Those that can be run in so many seconds; a shared fixture is paid for once."""
        out = []
        for test in tests:
            fixtures = test.split("::")[0], self.tests[test]["shared"]
            cost = self.tests[test]["seconds"] + (0.0 if fixtures in paid else fixtures[1])
            if cost <= seconds:
                seconds -= cost
                paid.add(fixtures)
                out.append(test)
        return out


class Given:
    """The tests of --tests, for every mistake, the quick ones first."""

    def __init__(self, root: Path, words: tuple[str, ...]):
        """They are run without a mistake, in a fork: the servers that it starts must end with it."""
        copy = Copy(root)
        made = copy.home / "seconds.json"

        def one(number: int, some) -> None:
            for _ in some:
                outcome = Player(copy).play(list(words), None, defaultdict(lambda: 400.0))
                if outcome.how != "survived" or not outcome.passed:
                    print(f"without a mistake: {outcome.how} {outcome.by} {outcome.said}", flush=True)
                else:
                    made.write_text(json.dumps(outcome.seconds))

        try:
            share_out([words], 1, one)
            if not made.exists():
                raise SystemExit("choose other tests, or mend them: a mistake cannot be told by these")
            self.tests = self.usual = json.loads(made.read_text())
        finally:
            copy.close()

    def batches(self, mistake: Mistake, budget: float) -> tuple[list[list[str]], int]:
        order, spent = [], 0.0
        for test in sorted(self.usual, key=self.usual.get):
            spent += self.usual[test]
            order += [test] * (spent <= budget or not order)
        file_of = lambda test: test.split("::")[0]
        rank = {file: i for i, file in enumerate(dict.fromkeys(map(file_of, order)))}
        return [sorted(order, key=lambda test: rank[file_of(test)])], len(self.usual) - len(order)


def names_in(node) -> set[str]:
    """The names that a statement uses, those of the statements in it aside."""
    found, todo = set(), [node]
    while todo:
        here = todo.pop()
        if isinstance(here, ast.Name):
            found.add(here.id)
        elif isinstance(here, ast.Attribute):
            found.add(here.attr)
        elif isinstance(here, ast.keyword) and here.arg:
            found.add(here.arg)
        todo += [c for c in ast.iter_child_nodes(here) if not isinstance(c, ast.stmt)]
    return found


# ---------------------------------------------------------------------------------------- try them


def attempt(player: Player, mistake: Mistake, who: Who | Given, flags: Flags) -> dict:
    """Make the mistake in the copy, ask the tests, take it back."""
    start, source = time.time(), (player.copy.root / mistake.file).read_text()
    batches, left_out = who.batches(mistake, flags.budget)
    player.copy.write(mistake.file, mistake.made_in(source))
    asked, outcome = 0, Outcome()
    for tests in batches:
        files = list(dict.fromkeys(test.split("::")[0] for test in tests))
        outcome = player.play(files, tests, who.usual)
        asked += len(outcome.passed)
        if outcome.how != "survived":
            break
        if len(outcome.passed) < len(tests):
            outcome.said = f"{len(tests) - len(outcome.passed)} of the tests did not run"
    player.copy.write(mistake.file, source)
    player.copy.clean()
    result = {key: getattr(mistake, key) for key in ("file", "where", "line", "rule", "before", "after")}
    result |= {"how": outcome.how, "by": outcome.by, "said": outcome.said, "asked": asked}
    if outcome.how == "survived":
        result["left_out"] = left_out
    result |= {"seed": flags.seed} | ({"given": list(flags.tests)} if flags.tests else {})
    result |= {"written": True} if flags.written else {}
    return result | {"seconds": round(time.time() - start, 1)}


def share_out(things: list, workers: int, work) -> None:
    """work(number of the worker, the things, one by one) in so many processes."""
    ours, theirs = os.pipe()
    for i in range(len(things)):
        os.write(theirs, i.to_bytes(4, "big"))
    os.close(theirs)
    left = iter(lambda: os.read(ours, 4), b"")
    children = []
    for number in range(min(workers, len(things))):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                work(number, (things[int.from_bytes(i, "big")] for i in left))
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(pid)
    os.close(ours)
    failed = [pid for pid in children if os.waitpid(pid, 0)[1]]
    if failed:
        raise SystemExit("a worker ended early; start again to go on")


def wait_for(file: str) -> None:
    while file and Path(file).exists():
        time.sleep(5)


def record_all(root: Path, files: list[str], work: Path, workers: int, pause: str) -> dict:
    _, missing = recorded(root, files, work)

    def one(number: int, some) -> None:
        copy = Copy(root)
        offsets, size = offsets_of(copy.root, files)
        env = prepare(copy.home / "marks", copy.root, offsets, size)
        try:
            player = Player(copy, env)
            seen = watch(str(copy.root), offsets, str(copy.home / "marks" / "seen"))
            for test in some:
                wait_for(pause)
                record(player, test, offsets, seen, work)
        finally:
            copy.close()

    if missing:
        share_out(missing, workers, one)
    return recorded(root, files, work)[0]


def try_all(root: Path, todo: list[Mistake], who: Who | Given, flags: Flags, out: Path) -> None:
    def one(number: int, some) -> None:
        copy = Copy(root)
        try:
            player = Player(copy)
            for mistake in some:
                wait_for(flags.pause)
                result = attempt(player, mistake, who, flags)
                with open(out, "a") as f:
                    f.write(json.dumps(result) + "\n")
                print(f"{result['how']:9} {result['seconds']:6} s {mistake.file}:{mistake.line} "
                      f"{mistake.rule} {result['by']}", flush=True)  # fmt: skip
        finally:
            copy.close()

    if todo:
        share_out(todo, flags.workers, one)


def control(root: Path, results: list[dict], who: Who) -> list[str]:
    """Which of the tests that noticed a mistake fail without one, too, run in the same way?"""
    asked = sorted({r["by"] for r in results if r["by"] in who.tests})
    copy, failing = Copy(root), []
    try:
        player = Player(copy)
        while asked:
            files = list(dict.fromkeys(test.split("::")[0] for test in asked))
            outcome = player.play(files, asked, who.usual)
            if outcome.how == "survived":
                break
            failing.append(outcome.by)
            asked = [t for t in asked if t != outcome.by and t not in outcome.passed]
    finally:
        copy.close()
    return failing


# ----------------------------------------------------------------------------------------- the page


def key(result: dict) -> tuple[str, str, str, str]:
    return result["file"], result["where"], result["before"], result["after"]


def read_results(file: Path) -> dict[tuple, dict]:
    """The last result of each mistake; `again` if it is not the first."""
    found = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        result = {"seed": 0} | json.loads(line)
        if key(result) in found:
            result["again"] = True
        found[key(result)] = result
    return found


def reasons(file: Path = EQUIVALENT) -> dict[tuple[str, str, str, str], str]:
    """{(file, function, line before, line after): why nobody could notice}"""
    listed = tomllib.loads(file.read_text())["equivalent"] if file.exists() else []
    return {key(e): e["why"] for e in listed}


def count_of(results: list[dict], why: dict, seed: int) -> list[str]:
    """What the page says first of a sample."""
    from metrics import proportion

    some = [r for r in results if r["seed"] == seed]
    counted = [r for r in some if not changes_nothing(r, why)]
    since, caught = [r for r in counted if is_caught(r, since=True)], [r for r in counted if is_caught(r)]
    how = Counter(r["how"] for r in caught)
    again = sum(r.get("again", False) and not r.get("written") for r in counted)
    flags, told = SAMPLES.get(seed, ("", ""))
    command = f"`python -m lab.trust.mutate --seed {seed}{flags}`"
    lines = [
        f"{command}: {len(some)} mistakes, of which {len(some) - len(counted)} change nothing that "
        f"anybody could see. **Of the other {len(counted)}, {len(caught)} were caught: "
        f"{proportion(len(caught), len(counted)).percent()}** (Wilson's 95% interval): a test failed "
        f"({how['failed']}), did not end ({how['endless']}), or pytest ended with it ({how['ended']})."
    ]  # fmt: skip
    if again:
        lines[0] += f" {again} were tried more than once."
    if since:
        lines[0] += f" Tests that were written since, for what they break, catch {len(since)} more."
    return [*lines, "", told, ""]


def is_caught(r: dict, since: bool = False) -> bool:
    """since: by a test that was written for it."""
    return r["how"] != "survived" and r.get("written", False) == since


def changes_nothing(r: dict, why: dict) -> bool:
    return key(r) in why and r["how"] == "survived"


def page(results: list[dict], why: dict) -> list[str]:
    from lab.common import table
    from metrics import proportion

    equivalent = [r for r in results if changes_nothing(r, why)]
    counted = [r for r in results if not changes_nothing(r, why)]
    left = [r for r in counted if r["how"] == "survived"]

    def row(name: str, some: list[dict]) -> list:
        caught = sum(map(is_caught, some))
        share = proportion(caught, len(some)).percent() if some else "–"
        return [name, len(some), caught, len(some) - caught, share]

    files = [file for file in FILES if any(r["file"] == file for r in counted)]
    rules = sorted({r["rule"] for r in counted})
    lines = [
        "# Would the tests notice a mistake?", "",
        "Small mistakes, made by rule and one at a time (lab/trust/mistakes.py), each tried against "
        "tests that may notice it. They are drawn per file and per rule, so a share is that of its "
        "sample, not of all mistakes that people make.", "",
        *[line for seed in sorted({r["seed"] for r in results}) for line in count_of(results, why, seed)],
        "Every test that caught something passes without a mistake, run in the same way. Not tried: "
        "fast/vllm_engine.py, whose tests need vLLM; demos, f-strings, what is printed; and what "
        "deletes files or ends processes.",
        "", "## By file", "", "Both samples together, without the tests that were written for survivors of the second.", "",
        *table("| file | mistakes | caught | survived | share caught |",
               [row(file, [r for r in counted if r["file"] == file]) for file in files]),
        "", "## By rule", "",
        *table("| rule | mistakes | caught | survived | share caught |",
               [row(rule, [r for r in counted if r["rule"] == rule]) for rule in rules]),
    ]  # fmt: skip
    lines += ["", "## Survivors", ""] if left else []
    for r in left:
        budget = f"; {r['left_out']} more beyond the budget" if r.get("left_out") else ""
        given = f", those of {', '.join(r['given'])}" if r.get("given") else ""
        lines += told(r, f"{r['asked']} tests passed{given}{budget}")
    since = [r for r in counted if is_caught(r, since=True)]
    lines += ["", "## Survivors for which a test was written", ""] if since else []
    for r in since:
        lines += told(r, f"caught by {r['by']}")
    lines += ["", "## Nobody could notice", ""] if equivalent else []
    for r in equivalent:
        lines += told(r, why[key(r)])
    return lines


def told(r: dict, why: str) -> list[str]:
    place = f"{r['file']}, {r['where']}" if r["where"] else r["file"]
    head = f"{place} ({r['rule']}): {why}"
    return [head, "", "```diff", f"- {r['before']}", f"+ {r['after']}", "```", ""]


def write(found: dict[tuple, dict]) -> None:
    """The page, and what it counts: the mistakes that can still be made."""
    keys = {m.key for m in possible()}
    results = [r for name, r in found.items() if name in keys]
    results.sort(key=lambda r: (r["seed"], FILES.index(r["file"]), r["line"]))
    (OUT / "mutate.md").write_text("\n".join(page(results, reasons())).rstrip() + "\n")
    (OUT / "mutate.jsonl").write_text("".join(json.dumps(r) + "\n" for r in results))


def run(root: Path, files: list[str], chosen: list[Mistake], flags: Flags, out: Path) -> None:
    """Try what has no result in `out` yet."""
    words = ["git", "status", "--porcelain", "--", *files, "tests"]
    if subprocess.run(words, cwd=root, capture_output=True, text=True, check=True).stdout:
        raise SystemExit("commit first: what is tried is the last commit, not what is typed")
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    for library in LIBRARIES:
        import_module(library)
    first = Copy(root)  # the others are copies of it, whatever happens to the working tree now
    try:
        if flags.tests:
            who = Given(first.root, flags.tests)
        else:
            tests = record_all(first.root, files, root / WORK, flags.workers, flags.pause)
            who = Who(first.root, files, tests)
        done, known = read_results(out), reasons()
        left = lambda m: done[m.key]["how"] == "survived" and m.key not in known
        again = lambda m: flags.again and left(m)
        todo = [m for m in chosen if m.key not in done or again(m)]
        print(f"{len(who.tests)} tests; {len(todo)} of {len(chosen)} mistakes to try", flush=True)
        try_all(first.root, todo, who, flags, out)
        if not flags.only and not flags.tests:
            failing = control(first.root, list(read_results(out).values()), who)
            kept = [r for r in read_results(out).values() if r["by"] not in failing]
            out.write_text("".join(json.dumps(r) + "\n" for r in kept))
            print(f"fail without a mistake, and count for nothing: {failing}", flush=True)
    finally:
        first.close()


def chosen_by(flags: Flags, done: dict[tuple, dict]) -> list[Mistake]:
    """The sample; or what was tried of it and can still be made, for the draw moves with the code."""
    if not (flags.again or flags.page):
        return sample(ROOT, FILES, flags.n, flags.seed, flags.least)
    found = {}
    for m in possible():
        if m.key in done and done[m.key]["seed"] == flags.seed:
            line = done[m.key]["line"]  # of two that are called the same, the nearer
            found[m.key] = min(m, found.get(m.key, m), key=lambda m: abs(m.line - line))
    return list(found.values())


def possible() -> list[Mistake]:
    """All that can be made today."""
    return [m for file in FILES for m in mistakes(file, (ROOT / file).read_text())]


def follow(out: Path) -> None:
    """A function may have another name since: its mistakes keep their results."""
    done, today = read_results(out), possible()
    keys, places = {m.key for m in today}, defaultdict(list)
    for m in today:
        places[m.file, m.before, m.after].append(m.where)
    for result in done.values():
        where = places[result["file"], result["before"], result["after"]]
        if key(result) not in keys and len(where) == 1:
            result["where"] = where[0]
    out.write_text("".join(json.dumps(result) + "\n" for result in done.values()))


def main(flags: Flags) -> None:
    out = OUT / "mutate.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    follow(out)
    chosen = chosen_by(flags, read_results(out))
    wanted = tuple(flags.only) or ("",)
    if not flags.page:
        some = [m for m in chosen if f"{m.file}:{m.line}:".startswith(wanted)]
        run(ROOT, FILES, some, flags, out)
    if flags.page or not flags.only:
        write(read_results(out))
    results = [r for r in read_results(out).values() if r["seed"] == flags.seed]
    left = [r for r in results if r["how"] == "survived" and key(r) not in reasons()]
    print(f"{len(results)} tried, {len(left)} survived")


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__.splitlines()[0]))
