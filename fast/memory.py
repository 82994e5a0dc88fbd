"""Memory of a process: a folder that lives in it, and giving freed memory back to the system.

Adapters on their way to a sampler, and batches between processes, only have to live as long as a
process. They go into a folder in /dev/shm where there is room, which costs no disk.

Run me: `python -m fast.memory` makes such a folder, and gives memory back.
"""

import ctypes
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from fast.machine import shared_memory

PREFIX = "picoswarm-held-"


def memory_folder(needed: int = 0) -> tempfile.TemporaryDirectory:
    """A folder that goes when its owner does, in memory if `needed` bytes are free there."""
    memory = shared_memory()
    if memory is None:
        return tempfile.TemporaryDirectory(prefix=PREFIX)
    sweep()
    if shutil.disk_usage(memory).free <= needed:
        return tempfile.TemporaryDirectory(prefix=PREFIX)
    while True:
        home = tempfile.TemporaryDirectory(prefix=PREFIX, dir=memory)
        held = hold(home.name, wait=True)
        if held is not None and Path(home.name).exists():  # else swept before it was held
            weakref.finalize(home, os.close, held)
            return home


def hold(folder: str | Path, wait: bool = False) -> int | None:
    """Lock a folder; returns the handle that holds it, or None if another process does.

    The kernel releases it however the owner ends. A process id in the name would not do: containers
    that share /dev/shm have process ids of their own, and see each other's owners as dead.
    """
    import fcntl

    try:
        handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # it is gone, or another user's
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except OSError:
        os.close(handle)
        return None


def sweep() -> None:
    """Remove what killed processes left, and nobody holds; the adapter of a 4B takes 264 MB."""
    memory = shared_memory()
    for folder in memory.glob(f"{PREFIX}*") if memory else ():
        held = hold(folder)
        if held is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)


class CannotGoOn(RuntimeError):
    """Known to go wrong; its one sentence says what to do (bookkeeping/guard.py prints it)."""


# Only torch's own allocator on CUDA raises OutOfMemoryError. Apple's, the driver and the libraries,
# which ask for workspace of their own, raise RuntimeError (or AcceleratorError, a kind of it).
NO_ROOM = (
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def out_of_memory(error: Exception) -> bool:
    """Is this a GPU without room?"""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_ROOM)


def give_back_memory() -> bool:
    """Have the C library return freed memory to the system; True if it can (glibc).

    It keeps freed memory for later, and batches of ever new lengths leave more and more holes in
    it: two hours of swarm grew by 138 MB per hour although no object was left over. A process that
    held 1,199 MB after an update of swarm holds 481 after this call, and as much after the next
    ones. It takes 0.08 s, so it is called after long updates only.
    """
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return True
    except (OSError, AttributeError):
        return False


if __name__ == "__main__":
    with memory_folder() as name:
        print(f"{name} holds files until this process ends")
    assert not Path(name).exists()
    print("memory given back:", give_back_memory())
