"""Protects the packaging: picoswarm and nothing beside it, holding the files as they are in the
checkout. From the wheel alone a run trains, a log is judged and every environment can be played, and
another package's `swarm` is neither used nor disturbed.
"""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("verifiers.v1", reason="not installed here; `make test-all` does it")

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"picoswarm/world/": ".", "picoswarm/": "bridges/verifiers"}  # the longer name first
ROOMS = ("swarm", "fast", "bookkeeping", "bridges")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, because setuptools leaves its build folder in the source."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]:
        shutil.copy(path, source)
    for folder in (*ROOMS, "models"):
        unbuilt = shutil.ignore_patterns("__pycache__", "smollm2")
        shutil.copytree(ROOT / folder, source / folder, ignore=unbuilt)
    flags = "--quiet --disable-pip-version-check --no-deps --no-build-isolation".split()
    command = [sys.executable, "-m", "pip", "wheel", *flags, "-w", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(program: str, cwd: Path, installed: Path, *first: Path, code: int = 0):
    """-S leaves out what is installed, the checkout among it; the rest of what is needed is put
    behind the wheel again, without it. code: how it has to end."""
    packages = [p for p in sys.path if "site-packages" in p]
    begin = (
        f"import sys; sys.path[:0] = {[str(installed), *map(str, first)]}; sys.path += {packages}"
    )
    command = [sys.executable, "-S", "-c", f"{begin}\n{program}"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == code, done.stderr[-3000:]
    return done


def test_it_is_one_package_and_what_it_holds_is_the_checkout(wheel):
    content = zipfile.ZipFile(wheel)
    names = [name for name in content.namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"picoswarm"}
    for name in names:
        package = next(package for package in FOLDERS if name.startswith(package))
        source = ROOT / FOLDERS[package] / name.removeprefix(package)
        assert content.read(name) == source.read_bytes(), name
    world = {name.removeprefix("picoswarm/world/") for name in names if "/world/" in name}
    assert {path.name for path in ROOT.glob("*.py")} < world
    assert {name.split("/")[0] for name in world if "/" in name} == {*ROOMS, "models"}
    data = ("models/pico_*/*", "bookkeeping/cures.toml", "bookkeeping/*.html")
    for place in (*(f"{room}/*.py" for room in ROOMS), *data):
        needed = {str(path.relative_to(ROOT)) for path in ROOT.glob(place)}
        assert needed and needed <= world, place


def without(*packages: str) -> str:
    return "".join(f"sys.modules[{name!r}] = None\n" for name in packages)


COMMAND = """
import picoswarm
sys.argv[:] = ["picoswarm", *{words}]
picoswarm.main()
"""
SMALL = (
    "--updates 1 --sft-steps 1 --sft-examples 2 --sft-batch 2 --num-tasks 2 --k 2 --eval-n 2 "
    "--no-eval-other-tiers --threads 1 --name tiny"
)


@pytest.mark.parametrize("env", ["letters", "swarm"])
def test_the_command_trains_where_one_stands_without_what_is_optional(installed, tmp_path, env):
    words = ["train", "--env", env, *SMALL.split()]
    program = without("verifiers", "wandb", "openai") + COMMAND.format(words=words)
    done = run(program, tmp_path, installed)
    assert "wandb is not installed" in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert (tmp_path / "runs" / "tiny" / "report.html").exists()


def test_an_endpoint_without_the_package_openai_is_one_sentence(installed, tmp_path):
    words = ["train", "--api-base", "http://127.0.0.1:9/v1", "--model", "x"]
    done = run(without("openai") + COMMAND.format(words=words), tmp_path, installed, code=1)
    assert done.stderr.strip().endswith("pip install openai")
    assert "Traceback" not in done.stderr


def test_the_doctor_of_another_trainers_log_needs_numpy_alone(installed, tmp_path):
    """Of its kind: rewards that never differ, as TRL logs them."""
    row = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "loss": 0.0}
    log = {"log_history": [{"step": step, **row} for step in range(1, 31)]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(log))
    program = without("verifiers", "torch", "scipy", "jinja2", "tqdm")
    program += COMMAND.format(words=["doctor", "trainer_state.json"])
    assert "no signal" in run(program, tmp_path, installed, code=1).stdout.lower()


def test_without_a_word_it_trains_and_a_wrong_word_is_refused(installed, tmp_path):
    stopped = "import runpy\nrunpy.run_module = lambda name, **how: print(name, sys.argv[1:])\n"
    done = run(stopped + COMMAND.format(words=[]), tmp_path, installed)
    assert done.stdout.endswith("train ['--env', 'letters', '--difficulty', '6']\n")
    done = run(COMMAND.format(words=["fly"]), tmp_path, installed, code=1)
    assert done.stderr.startswith("picoswarm has no command 'fly'")


def test_without_verifiers_the_environments_are_there_and_the_taskset_says_what_it_needs(
    installed, tmp_path
):
    program = """
import picoswarm
for name in picoswarm.WORLDS:
    env = picoswarm.make_env({"type": name})
    env.reset(1)
    env.step(env.expert_reply())
    print(name, 0 <= env.score()["reward"] <= 1)
try:
    from picoswarm import Seeds
except ImportError as error:
    print(error)
"""
    done = run(without("verifiers") + program, tmp_path, installed)
    *envs, needs = done.stdout.splitlines()
    assert envs == ["letters True", "alphabet True", "swarm True"]
    assert "verifiers" in needs


PROGRAM = """
import swarm
import verifiers.v1 as vf
for name in ("alphabet", "letters", "swarm"):
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "picoswarm", "environment": {"type": name}}}))
    task = next(iter(env.taskset))
    print(task.data.environment["type"], task.data.seed)
import picoswarm
folder = sys.path[0]
for thing in (picoswarm, picoswarm.taskset, picoswarm.taskset.chat, *picoswarm.WORLDS.values()):
    file = getattr(thing, "__file__", None) or thing.step.__code__.co_filename
    assert file.startswith(folder), file
swarm_env = lambda: picoswarm.make_env({"type": "swarm"})
assert swarm_env().reset(1) == swarm_env().reset(1)
assert sys.modules["swarm"] is swarm and swarm.Agent == "another package's"
import swarm.agents
assert not [name for name in sys.modules if name.startswith(("env_", "metrics", "chat", "swarm.tools"))]
assert folder + "/picoswarm/world" not in sys.path
"""


def test_the_environments_work_from_the_wheel_alone_beside_another_swarm(installed, tmp_path):
    other = tmp_path / "other"
    (other / "swarm").mkdir(parents=True)
    (other / "swarm" / "__init__.py").write_text('Agent = "another package\'s"\n')
    (other / "swarm" / "agents.py").write_text("")
    done = run(PROGRAM, tmp_path, installed, other)
    assert done.stdout.split("\n")[:3] == [
        "alphabet 2000000000",
        "letters 2000000000",
        "swarm 2000000000",
    ]
