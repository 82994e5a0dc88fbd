"""`warm.run(["train.py", …])` is `subprocess.run([sys.executable, "train.py", …])` without the
seconds that its imports take.

To import torch, transformers and peft takes 4 seconds of a run that trains for two, and the tests
start dozens of such runs. A server (multiprocessing's "forkserver") imports them once; each run is
a fork of it: a process of its own, with its own files, environment and exit code, that has imported
nothing of ours. What libraries read from the environment while they are imported is the server's.

`warm.ranks(2, ["train.py", …])` is torchrun with two ranks.
"""

import atexit
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([
    "torch", "scipy.stats", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "transformers.models.qwen3.modeling_qwen3",
    "peft", "matplotlib.pyplot", "tyro",
])  # fmt: skip


class Run:
    """A fork of the server that runs `words`; what it says stands in two files in `place`."""

    def __init__(self, words: list, place: Path, env: dict = ENV, pictures: bool = True):
        self.words, self.said = [str(word) for word in words], [place / "stdout", place / "stderr"]
        given = (self.words, str(ROOT), env, self.said, pictures)
        self.process = SERVER.Process(target=work, args=given)
        self.process.start()

    def end(self, timeout: float) -> subprocess.CompletedProcess:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise subprocess.TimeoutExpired(self.words, timeout)
        said = [file.read_text(errors="replace") if file.exists() else "" for file in self.said]
        return subprocess.CompletedProcess(self.words, self.process.exitcode, *said)


def run(words: list, env: dict = ENV, timeout: float = 300, pictures: bool = True):
    """In the project's folder. words: a script and its arguments, or ["-m", module, …], or ["-c", code, …]. Output is
    captured, as text; there is nothing to read from stdin.

    pictures=False: matplotlib's files are there and empty, for tests that do not look at them.
    """
    with tempfile.TemporaryDirectory() as place:
        return Run(words, Path(place), env, pictures).end(timeout)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def ranks(n: int, words: list, timeout: float = 300):
    """The same words in n processes that find each other, as torchrun starts them. What they say is
    one text. (One that fails closes its connections, and with that ends the others.)"""
    world = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with tempfile.TemporaryDirectory() as place:
        started = []
        for rank in (str(i) for i in range(n)):
            own = ENV | world | {"RANK": rank, "LOCAL_RANK": rank}
            here = Path(tempfile.mkdtemp(dir=place))
            started.append(Run(words, here, own, pictures=False))
        done = [one.end(timeout) for one in started]
    code = max(one.returncode for one in done)
    said = ("".join(one.stdout for one in done), "".join(one.stderr for one in done))
    return subprocess.CompletedProcess(words, code, *said)


def work(words: list[str], cwd: str, env: dict[str, str], said: list[Path], pictures: bool) -> None:
    """In the fork: become that process."""
    for number, file in enumerate([os.devnull, *said]):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
        stream = open(number, "w" if number else "r", buffering=1, encoding="utf-8", closefd=False)
        setattr(sys, ("stdin", "stdout", "stderr")[number], stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if threads := env.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    if not pictures:
        draw_nothing()
    place = cwd if words[0] in ("-m", "-c") else str(Path(words[0]).resolve().parent)
    here = str(Path(__file__).parent)
    sys.path = [place, *(path for path in sys.path if path not in (here, cwd, ""))]
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
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process leaves them out


def draw_nothing(patch=None) -> None:
    """For tests that do not look at a curve: to draw them takes as long as three updates. With
    pytest's monkeypatch: until the test ends."""
    from matplotlib.figure import Figure
    from PIL import Image

    empty = lambda self, path, **_: Image.new("RGB", (1, 1)).save(path, "PNG")
    (patch.setattr if patch else setattr)(Figure, "savefig", empty)
