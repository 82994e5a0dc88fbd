"""`warm.run(["train.py", …])` is `subprocess.run([sys.executable, "train.py", …])` without the seconds that its imports take.

To import torch, transformers and peft takes 4 seconds of a run that trains for two, and the tests start dozens of such runs. A server
(multiprocessing's "forkserver") imports them once; each run is a fork of it: a process of its own, with its own files, environment and exit
code, that has imported nothing of ours. What libraries read from the environment while they are imported is the server's, so a test that
changes such a variable (HOME) starts a Python of its own.

`warm.ranks(2, ["train.py", …])` is torchrun with two ranks. And what a run "spawns", such as the player of --async-rollouts, is a fork of
the same server, too: `Spawned` stands in for multiprocessing's context "spawn".
"""

import atexit
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import types
from contextlib import ExitStack
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path

LIBRARIES = ["torch", "scipy.stats", "transformers.models.auto.modeling_auto",
             "transformers.models.auto.tokenization_auto",
             "transformers.models.qwen3.modeling_qwen3", "peft", "matplotlib.pyplot", "tyro", "httpx2"]  # fmt: skip
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(LIBRARIES)


def run(
    words: list, cwd: Path, env: dict[str, str] | None = None, timeout: float = 300, pictures: bool = True
) -> subprocess.CompletedProcess:
    """words: a script and its arguments, or ["-m", module, …], or ["-c", code, …]. Output is captured, as text;
    there is nothing to read from stdin.

    pictures=False: matplotlib's files are there and empty, for tests that do not look at them; to draw one takes as long as three updates.
    """
    with tempfile.TemporaryDirectory() as place:
        process = Run(words, cwd, dict(env or os.environ), Path(place), pictures)
        process.end(timeout)
        return process.result()


def ranks(n: int, words: list, cwd: Path, env: dict[str, str] | None = None, timeout: float = 300) -> subprocess.CompletedProcess:
    """The same words in n processes that find each other, as torchrun starts them. As with torchrun, one that fails ends them all, and what
    they say is one text."""
    with ExitStack() as stack:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        runs, until = [], time.monotonic() + timeout
        for rank in (str(i) for i in range(n)):
            here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            place = stack.enter_context(tempfile.TemporaryDirectory())
            runs.append(Run(words, cwd, dict(env or os.environ) | here, Path(place), pictures=False))
        open_ = list(runs)
        while open_ and time.monotonic() < until:
            wait([one.process.sentinel for one in open_], until - time.monotonic())
            open_ = [one for one in open_ if one.process.exitcode is None]
            if any(one.process.exitcode for one in runs):  # the others would wait for it
                until = min(until, time.monotonic() + 5)
        for one in open_:
            one.process.kill()
            one.process.join()
        done = [one.result() for one in runs]
        code = next((one.returncode for one in done if one.returncode), 0)
        return subprocess.CompletedProcess(done[0].args, code, "".join(one.stdout for one in done), "".join(one.stderr for one in done))


class Run:
    """A fork of the server that runs `words`; what it says stands in two files in `place`."""

    def __init__(self, words: list, cwd: Path, env: dict[str, str], place: Path, pictures: bool):
        self.words, self.said = [str(word) for word in words], [place / "stdout", place / "stderr"]
        self.process = SERVER.Process(target=work, args=(self.words, str(cwd), env, [str(file) for file in self.said], pictures))
        self.process.start()

    def end(self, timeout: float) -> None:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise subprocess.TimeoutExpired(self.words, timeout)

    def result(self) -> subprocess.CompletedProcess:
        said = (file.read_text(errors="replace") if file.exists() else "" for file in self.said)
        return subprocess.CompletedProcess(self.words, self.process.exitcode, *said)


def work(words: list[str], cwd: str, env: dict[str, str], said: list[str], pictures: bool) -> None:
    """In the fork: become that process."""
    become(cwd, env, [os.open(os.devnull, os.O_RDONLY), *(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for file in said)])
    share_server()
    if not pictures:
        draw_nothing()
    here = str(Path(__file__).parent)  # last, for those who are spawned: they find SpawnedProcess there
    sys.path = [cwd, *(path for path in sys.path if path not in (here, cwd, "")), here]
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), vars(main))
        else:
            sys.argv = words
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process leaves them out


def become(cwd: str, env: dict[str, str], files: list[int]) -> None:
    """Take over the folder, the environment and the three files of whoever asked for this process."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.stdin, sys.stdout, sys.stderr = (open(n, "w" if n else "r", buffering=1, encoding="utf-8", closefd=False) for n in range(3))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if threads := env.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))


def draw_nothing(patch=None) -> None:
    """With pytest's monkeypatch: until the test ends."""
    from matplotlib.figure import Figure
    from PIL import Image

    (patch.setattr if patch else setattr)(Figure, "savefig", lambda self, path, **_: Image.new("RGB", (1, 1)).save(path, "PNG"))


# ------------------------------------------------------------------------------------------------ what a run starts itself


class File:
    """A number of an open file that is the same file in the new process."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self):
        return received, (DupFd(self.number),)


def received(duplicate) -> int:
    return duplicate.detach()


class SpawnedProcess(ForkServerProcess):
    """multiprocessing's "spawn" gives the new process this one's folder, environment and files; the server has its own."""

    def run(self) -> None:
        *where, files, target = self._target
        become(*where, files)
        self._target = target
        super().run()

    def start(self) -> None:
        self._target = (os.getcwd(), dict(os.environ), [File(n) for n in range(3)], self._target)
        super().start()


class Spawned(ForkServerContext):
    _name, Process = "spawn", SpawnedProcess


def share_server() -> None:
    """Let this fork ask the server that it comes from for further ones, where it would spawn them."""
    server = multiprocessing.forkserver._forkserver
    server.ensure_running = lambda: None  # it is; without this, a fork would start a server of its own
    real = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: Spawned() if method == "spawn" else real(method)
