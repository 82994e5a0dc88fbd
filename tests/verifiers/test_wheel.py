"""Protects the packaging: picoswarm and its doctor's command and nothing beside them, holding the
files as they are in the checkout. From the wheel alone every environment can be played, and another
package's `swarm` is neither used nor disturbed.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("verifiers.v1", reason="not installed here; `make test-all` does it")

ROOT = Path(__file__).resolve().parents[2]
# As in pyproject.toml; the longer name first.
FOLDERS = {
    "picoswarm/world/": ".",
    "picoswarm/": "bridges/verifiers",
    "picoswarm_doctor/": "bridges/doctor",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, because setuptools leaves its build folder in the source."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]:
        shutil.copy(path, source)
    for folder in ("bridges", "swarm", "bookkeeping"):
        unbuilt = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=unbuilt)
    flags = "--quiet --disable-pip-version-check --no-deps --no-build-isolation".split()
    command = [sys.executable, "-m", "pip", "wheel", *flags, "-w", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = out.glob("*.whl")
    return path


def test_it_is_two_packages_and_what_they_hold_is_the_checkout(wheel):
    content = zipfile.ZipFile(wheel)
    names = [name for name in content.namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"picoswarm", "picoswarm_doctor"}
    for name in names:
        package = next(package for package in FOLDERS if name.startswith(package))
        source = ROOT / FOLDERS[package] / name.removeprefix(package)
        assert content.read(name) == source.read_bytes(), name
    worlds = {f"picoswarm/world/{path.name}" for path in ROOT.glob("env_*.py")}
    assert worlds | {"picoswarm_doctor/__init__.py"} <= set(names)


PROGRAM = """
import sys
sys.path[:0] = [{folder!r}, {other!r}]
sys.path += {packages!r}
import swarm
import verifiers.v1 as vf
for name in ("alphabet", "letters", "swarm"):
    env = vf.load_environment(vf.resolve_env_config({{"taskset": {{"id": "picoswarm", "environment": {{"type": name}}}}}}))
    task = next(iter(env.taskset))
    print(task.data.environment["type"], task.data.seed)
import picoswarm
for thing in (picoswarm, picoswarm.Letters, picoswarm.Alphabet, picoswarm.Swarm, picoswarm.written):
    file = thing.__file__ if thing is picoswarm else getattr(thing, "step", thing).__code__.co_filename
    assert file.startswith({folder!r}), file
swarm_env = lambda: picoswarm.make_env({{"type": "swarm"}})
assert swarm_env().reset(1) == swarm_env().reset(1)
assert sys.modules["swarm"] is swarm and swarm.Agent == "another package's"
import swarm.agents
assert not [name for name in sys.modules if name.startswith(("env_", "metrics", "swarm.tools"))]
assert {folder!r} + "/picoswarm/world" not in sys.path
"""


def test_the_environments_work_from_the_wheel_alone_beside_another_swarm(wheel, tmp_path):
    """-S leaves out what is installed, the checkout among it; the rest of what is needed is put
    behind the wheel again, without it."""
    folder, other = tmp_path / "installed", tmp_path / "other"
    zipfile.ZipFile(wheel).extractall(folder)
    (other / "swarm").mkdir(parents=True)
    (other / "swarm" / "__init__.py").write_text('Agent = "another package\'s"\n')
    (other / "swarm" / "agents.py").write_text("")
    packages = [p for p in sys.path if "site-packages" in p]
    program = PROGRAM.format(folder=str(folder), other=str(other), packages=packages)
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:3] == [
        "alphabet 2000000000",
        "letters 2000000000",
        "swarm 2000000000",
    ]
