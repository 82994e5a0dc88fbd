"""Protects the packaging: the wheel holds every module of the top level and the three ids, and from it alone an id can be played."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed here; `make test-verifiers` installs it into a venv of its own")

ROOT = Path(__file__).resolve().parents[2]
IDS = ["picoswarm_alphabet", "picoswarm_letters", "picoswarm_swarm"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, because setuptools leaves its build folder in the source."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]:
        shutil.copy(path, source)
    shutil.copytree(ROOT / "lab" / "verifiers_adapter", source / "lab" / "verifiers_adapter", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", str(out), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = out.glob("*.whl")
    return path


def test_it_lists_every_module(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    files = [path.name for path in ROOT.glob("*.py")]
    assert sorted(names) == sorted(files + [f"{name}/__init__.py" for name in IDS])


def test_every_id_is_the_one_adapter(wheel):
    content = zipfile.ZipFile(wheel)
    for name in IDS:
        assert content.read(f"{name}/__init__.py") == (ROOT / "lab" / "verifiers_adapter" / "__init__.py").read_bytes()


def test_the_ids_work_from_the_wheel_alone(wheel, tmp_path):
    """-S leaves out what is installed, the checkout among it; the rest of what an id needs is put behind the wheel again, without it."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}]
sys.path += {[p for p in sys.path if "site-packages" in p]!r}
import verifiers.v1 as vf
for name in {IDS!r}:
    config = vf.resolve_env_config({{"taskset": {{"id": name.replace("_", "-")}}}})
    env = vf.load_environment(config)
    task = next(iter(env.taskset))
    assert sys.modules[name].__file__.startswith({str(tmp_path)!r}), sys.modules[name].__file__
    assert sys.modules["env_" + task.data.environment].__file__.startswith({str(tmp_path)!r})
    print(task.data.environment, task.data.seed)
"""
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:3] == ["alphabet 2000000000", "letters 2000000000", "swarm 2000000000"]
