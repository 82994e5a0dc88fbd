"""What differs between Linux, macOS and Windows, behind one small file; it imports nothing of ours.

    what                    Linux            macOS            Windows
    most memory so far      resource, KiB    resource, bytes  psutil
    a limit to a call's time  SIGALRM in a main thread; elsewhere a second thread
    files that are memory   /dev/shm         no such thing    no such thing
    a file on the disk      fsync            fsync            fsync of what may be written
    a folder's names        fsync            fsync            the system's business
    a container's quota     cgroup           no such thing    no such thing

Only Linux is run by us; tests/test_machine.py takes away what the others lack.

Run me: `python -m fast.machine` says what this machine has.
"""

import ctypes
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

WINDOWS = os.name == "nt"
SHM = Path("/dev/shm")  # Linux: files that exist in memory only

if sys.platform == "darwin":  # before torch is imported: what Apple's GPU lacks, the CPU computes
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")


def peak_memory() -> float:
    """GiB that this process has held at once, at most. Where nobody counts that: what it holds."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        memory = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def shared_memory() -> Path | None:
    """A folder whose files are in memory and whose folders can be locked, or None."""
    usable = SHM.is_dir() and os.access(SHM, os.W_OK) and importlib.util.find_spec("fcntl")
    return SHM if usable else None


def quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """How many cores this container may use at a time (docker --cpus), or None: no limit, or none
    that can be read. torch counts all cores that it sees."""
    try:
        if (root / "cpu.max").exists():  # version 2
            most, period = (root / "cpu.max").read_text(encoding="utf-8").split()
        else:
            files = (root / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            most, period = (file.read_text(encoding="utf-8") for file in files)
        return int(most) / int(period) if int(most) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # ValueError: "max"
        return None


def flush(path: Path) -> None:
    """Put a file's bytes, or a folder's names, on the disk and not only into memory."""
    if WINDOWS and path.is_dir():
        return  # there a folder cannot be opened
    handle = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def speak_utf8() -> None:
    """Print "→" and "±" also into a file or a pipe, where Windows would write its own code page."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not what a test or a notebook has put there
            stream.reconfigure(encoding="utf-8", errors="replace")


# -------------------------------------------------------------------------------- a limit in time


class Hung(BaseException):
    """No answer in time. No Exception, so that an environment's own `except` cannot swallow it."""


def in_time(seconds: float, call: Callable, *given):
    """call(*given), or Hung after so many seconds; again every second, if that is swallowed.

    In a main thread a timer signal interrupts whatever Python is doing, loops, sleeps and regular
    expressions included, but not C code that never comes back to Python. In another thread, and on
    Windows, there are no such signals: a second thread has Python raise Hung in this one. That ends
    a loop as well, but a sleep or a regular expression only once it is over.
    """
    main = threading.current_thread() is threading.main_thread()
    signals = main and hasattr(signal, "setitimer") and hasattr(signal, "SIGALRM")
    return (by_signal if signals else by_thread)(seconds, call, *given)


def by_signal(seconds: float, call: Callable, *given):
    """in_time in a main thread that has timer signals."""
    armed = True

    def ring(*_):
        if armed:
            raise Hung(f"no answer within {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        return call(*given)
    finally:
        while True:  # it may ring in these very lines
            try:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
                break
            except Hung:
                pass


def by_thread(seconds: float, call: Callable, *given):
    """in_time anywhere. A thread that ran the call itself would not do: nobody could end it."""
    told = {"__str__": lambda _: f"no answer within {seconds:g} seconds"}
    late = type("Hung", (Hung,), told)  # Python raises a class in another thread, not an object
    caller, over = ctypes.c_ulong(threading.get_ident()), threading.Event()
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def ring():
        wait = seconds
        while not over.wait(wait):
            throw(caller, ctypes.py_object(late))
            wait = 1.0

    bell = threading.Thread(target=ring, daemon=True)
    bell.start()
    try:
        return call(*given)
    finally:
        while True:  # it may ring in these very lines
            try:
                over.set()
                bell.join()
                for _ in range(10):  # what was thrown and has not arrived yet arrives here. Taken
                    pass  # back by throw(caller, None), it would leave Python 3.11 waiting for it,
                break  # and hang the next function that a debugger or coverage traces
            except Hung:
                pass


if __name__ == "__main__":
    print(f"{sys.platform}: at most {peak_memory():.2f} GiB held so far")
    print(f"files in memory: {shared_memory() or 'none here, so they go to the disk'}")
    print(f"cores: {os.cpu_count()}, of which a container may use: {quota() or 'all'}")

    def forever():
        while True:
            pass

    for how in (by_signal, by_thread):
        if how is by_signal and not hasattr(signal, "setitimer"):
            print("by_signal: there are no timer signals here")
            continue
        try:
            how(0.2, forever)
        except Hung as late:
            print(f"{how.__name__}: {type(late).__name__}, {late}")
