"""`warm.run(["train.py", …])` is `subprocess.run([sys.executable, "train.py", …])` without the seconds that its imports take.

To import torch, transformers and peft takes 4 seconds of a run that trains for two, and the tests start dozens of such runs. A server (multiprocessing's
"forkserver") imports them once; each run is a fork of it: a process of its own, with its own files, environment and exit code, that has imported nothing of
ours. What libraries read from the environment while they are imported is the server's, so a test that changes such a variable (HOME) starts a Python of its own.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import types
from pathlib import Path

LIBRARIES = ["torch", "scipy.stats", "statsmodels.stats.multitest", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
             "transformers.models.qwen3.modeling_qwen3", "peft", "matplotlib.pyplot", "tyro", "httpx2"]  # fmt: skip
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(LIBRARIES)


def run(words: list, cwd: Path, env: dict[str, str] | None = None, timeout: float = 300) -> subprocess.CompletedProcess:
    """words: a script and its arguments, or ["-m", module, …], or ["-c", code, …]. Output is captured, as text; there is nothing to read from stdin."""
    words = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as place:
        said = [Path(place) / "stdout", Path(place) / "stderr"]
        process = SERVER.Process(target=work, args=(words, str(cwd), dict(env or os.environ), [str(file) for file in said]))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(words, timeout)
        return subprocess.CompletedProcess(words, process.exitcode, *(file.read_text(errors="replace") for file in said))


def work(words: list[str], cwd: str, env: dict[str, str], said: list[str]) -> None:
    """In the fork: become that process."""
    for number, file in enumerate([os.devnull, *said]):
        os.dup2(os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdin, sys.stdout, sys.stderr = (open(n, "w" if n else "r", buffering=1, encoding="utf-8", closefd=False) for n in range(3))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if threads := env.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    here = str(Path(__file__).parent)
    sys.path = [cwd, *(path for path in sys.path if path not in (here, cwd, ""))]
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
