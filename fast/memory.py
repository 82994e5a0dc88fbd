"""Memory that a process lends: a folder in it, and what the C library keeps after `free`.

Adapters on their way to a sampler, and batches between processes, only have to live as long as a
process. They go into a folder in /dev/shm where there is room, which costs no disk.

Run me: `python -m fast.memory` makes such a folder, and gives memory back.
"""

import ctypes
import os
import shutil
import tempfile
from pathlib import Path

SHM = Path("/dev/shm")  # Linux: files that exist in memory only


def memory_folder(needed: int = 0) -> tempfile.TemporaryDirectory:
    """A folder that goes when its owner does, in memory if `needed` bytes are free there."""
    fits = SHM.is_dir() and os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free > needed
    sweep()
    return tempfile.TemporaryDirectory(
        prefix=f"picoswarm-{os.getpid()}-", dir=SHM if fits else None
    )


def sweep() -> None:
    """Remove the folders of processes that were killed; the adapter of a 4B takes 264 MB."""
    if not Path("/proc/self").exists():
        return  # then nobody knows who is alive
    for folder in SHM.glob("picoswarm-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)


def give_back_memory() -> bool:
    """Have the C library return freed memory to the system; True if it can (glibc).

    It keeps freed memory for later, and batches of ever new lengths leave more and more holes in
    it: two hours of swarm grew by 138 MB per hour although no object was left over. A process that
    held 1,199 MB after an update of swarm holds 481 after this call, and as much after the next
    ones. It takes 0.08 s, so train.py calls it after long updates only.
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
