"""Protects the folders in memory: they go with their owner, and what a killed owner has left goes when the next one comes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runfolder import memory_folder, sweep

ROOT = Path(__file__).resolve().parent.parent
SHM = Path("/dev/shm")


def test_a_folder_goes_with_its_owner():
    home = memory_folder()
    path = Path(home.name)
    assert path.is_dir()
    del home
    assert not path.exists()


def test_where_memory_is_too_small_the_disk_is_taken():
    home = memory_folder(2**60)
    assert Path(home.name).is_dir() and Path(home.name).parent != SHM


@pytest.mark.skipif(not os.access(SHM, os.W_OK) or not Path("/proc/self").exists(), reason="needs /dev/shm and /proc")
def test_what_a_killed_process_left_is_swept_and_what_a_living_one_has_is_not():
    code = "import os, runfolder; home = runfolder.memory_folder(); print(home.name, flush=True); os._exit(9)"
    left = Path(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.strip())
    assert left.parent == SHM and left.is_dir()
    mine, other = memory_folder(), SHM / "picoswarm-not-a-number"
    other.mkdir(exist_ok=True)
    try:
        assert not left.exists()
        sweep()
        assert Path(mine.name).is_dir() and other.is_dir()
    finally:
        other.rmdir()
