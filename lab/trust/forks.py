"""Tests in a private copy of the last commit, run in forks: what lab/trust/mutate.py tries a mistake with.

A fork that has imported the libraries and nothing of ours becomes pytest in a moment. It tells its
parent of each test as it goes; a test that does not end is killed with all that it started, and so
is a fork that a mistake has made eat memory.
"""

import ctypes
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
import types
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

from lab.trust.marks import ROOT

LIMIT_S = 20.0  # a test that takes so much longer than five times its usual time does not end
COLLECT_S = 120.0  # until the first test begins
MEMORY = 12 * 2**30  # bytes that a mistake may take; with more, Python raises


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
            import warm  # noqa: F401 (it tells the server what to import)

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
