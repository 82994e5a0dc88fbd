"""Protects `uv run train.py --env letters --difficulty 6` from a clean clone: it installs what
uv.lock says, with the CPU build of torch, and trains. Where PyTorch's own index cannot be reached,
its wheel comes from where pip finds it, and has to be the one that uv.lock names.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
PINS = (ROOT / "requirements.txt").read_text().splitlines()
(TORCH,) = (line for line in PINS if line.startswith("torch=="))
INDEX = "https://download.pytorch.org/whl/cpu/torch/"
SMALL = (
    "--updates 1 --sft-steps 1 --sft-examples 2 --sft-batch 2 --num-tasks 2 --k 2 --eval-n 2 "
    "--threads 1 --no-wandb --name by-uv"
)

pytestmark = pytest.mark.skipif(
    not UV.exists(),
    reason="uv is not installed here; `make test-all` installs it into a venv of its own",
)


def call(words: list, cwd: Path) -> str:
    """What a command prints. It sees no virtual environment but the one that it makes."""
    hidden = ("VIRTUAL_ENV", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    words = [str(word) for word in words]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def reached(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=10):
            return True
    except OSError:
        return False


def put_torch_in_place(clone: Path, folder: Path) -> None:
    """Into the clone's .venv, from pip's places instead of PyTorch's.

    The file is the locked one, byte for byte.
    """
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    call([*download, TORCH], clone)
    (wheel,) = folder.glob("torch-*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest in (clone / "uv.lock").read_text(), f"uv.lock has another {wheel.name}"
    call([UV, "venv", "--quiet", "--python", sys.executable], clone)
    install = [UV, "pip", "install", "--quiet", "--no-deps", "--no-index", "--find-links", folder]
    call([*install, f"{TORCH}+cpu"], clone)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """What is committed, and nothing else."""
    folder = tmp_path_factory.mktemp("clone") / "picoswarm"
    call(["git", "clone", "--quiet", ROOT, folder], ROOT)
    if sys.platform == "linux" and not reached(INDEX):
        put_torch_in_place(folder, tmp_path_factory.mktemp("wheel"))
    yield folder
    shutil.rmtree(folder)


def test_one_command_installs_and_trains(clone):
    words = f"run --locked train.py --env letters --difficulty 6 {SMALL}"
    said = call([UV, *words.split()], clone)
    assert "trained on: tier 6" in said and (clone / "runs" / "by-uv" / "report.html").exists()


def test_it_has_left_the_clone_as_it_was(clone):
    call([UV, "lock", "--check"], clone)  # pyproject.toml and uv.lock belong together
    assert call(["git", "status", "--porcelain"], clone) == ""
