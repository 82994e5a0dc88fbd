"""Protects the house: who may import whom, that no files stand in a circle, and that a run loads only what it needs.

Imports are read from the source, those inside functions and demos included. The table is the law: a new import that it does not
allow is either a mistake, or a reason to change the picture and say why.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENVS = {"env_letters", "env_alphabet", "env_swarm"}
STORY = ENVS | {"settings", "policy", "rollout", "sft", "grpo", "evaluate", "metrics", "train"}
ROOMS = ("swarm", "fast", "bookkeeping", "bridges", "learn", "lab")

# Who may import whom. A room's name stands for all its files; "room/file" for one of them.
MAY = {
    "pico": set(),  # torch alone
    "env_letters": set(),
    "env_alphabet": {"env_letters"},
    "env_swarm": {"env_letters", "swarm", "metrics"},  # metrics: intervals of `--evaluate`; it is a leaf of numpy and scipy
    "swarm": {"swarm", "env_letters", "metrics"},
    "metrics": set(),
    "settings": {*ENVS, "bridges/known", "learn/failures"},  # the chosen environment; the flags of --break
    "policy": {"env_letters"},  # in the demo
    "rollout": {"policy", "fast", "env_letters"},
    "grpo": {"policy", "fast", "rollout"},
    "sft": {"policy", "fast", "rollout", "grpo", "env_letters"},
    "evaluate": {*STORY - {"train"}, "fast", "bookkeeping"},
    "train": {*STORY, "fast", "bookkeeping", "learn/failures", "bridges/api"},
    "fast": {"fast", "policy", "rollout", "env_letters"},  # never grpo, settings, train: it changes how long an update takes
    "bookkeeping": {*STORY - {"train"}, "swarm", "fast", "bookkeeping"},
    "bridges": {*STORY - {"train"}, "swarm", "fast", "bookkeeping", "bridges"},
    "learn": {*STORY - {"train"}, "swarm", "fast", "bookkeeping", "learn"},
    "lab": {*STORY, *ROOMS},
}


def files() -> dict[str, Path]:
    """{module: file} of everything that is ours, tests aside."""
    found = {path.stem: path for path in ROOT.glob("*.py")}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


FILES = files()


def imports(path: Path) -> set[str]:
    """The modules of ours that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in FILES else node.module for alias in node.names}
    return {name for name in found if name in FILES}


def room_of(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("module", sorted(FILES))
def test_a_file_imports_only_what_the_table_allows(module):
    allowed = MAY[room_of(module)]
    wrong = [name for name in imports(FILES[module]) if room_of(name) not in allowed and name.replace(".", "/") not in allowed]
    assert not wrong, f"{module} imports {wrong}; the table in {Path(__file__).name} does not allow that"


def test_only_the_final_evaluation_can_reach_the_held_out_tasks():
    """Their first seed is written once, and used in one function, which plays them when it is asked to."""

    def knows(tree) -> bool:
        numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, int)]
        names = [getattr(node, "id", getattr(node, "attr", getattr(node, "name", ""))) for node in ast.walk(tree)]
        return "HELD_OUT_SEEDS" in names or any(4_000_000_000 <= x < 4_001_000_000 for x in numbers)

    found = {module for module, path in FILES.items() if knows(ast.parse(path.read_text()))}
    # lab/study.py is what makes final tables
    assert found == {"evaluate", "lab.study"}
    for module, function in (("evaluate", "evaluate_only"), ("lab.study", "held_out_seeds")):
        functions = [node for node in ast.parse(FILES[module].read_text()).body if isinstance(node, ast.FunctionDef)]
        assert [node.name for node in functions if knows(node)] == [function]


def test_the_table_names_every_file_of_the_top_level_and_every_room():
    assert set(MAY) == {room_of(module) for module in FILES}
    assert STORY | {"pico"} == {module for module in FILES if (ROOT / f"{module}.py").exists()}


def bound(path: Path) -> set[str]:
    """Every name that a file gives to something."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_what_is_imported_from_a_file_of_ours_is_there():
    """Also inside functions that no test calls: a name that has moved would be missed by the one who runs that command."""
    names, missing = {module: bound(path) for module, path in FILES.items()}, []
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in FILES:
                wanted = {alias.name for alias in node.names if f"{node.module}.{alias.name}" not in FILES}
                missing += [f"{module}:{node.lineno} {name}" for name in wanted - names[node.module]]
    assert not missing, missing


def test_no_files_stand_in_a_circle():
    left = {module: imports(path) - {module} for module, path in FILES.items()}
    while free := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"in a circle: {sorted(left)}"


def test_the_lab_is_imported_by_nobody_and_an_environment_imports_no_torch():
    assert not [m for m, path in FILES.items() if room_of(m) != "lab" and any(room_of(name) == "lab" for name in imports(path))]
    code = (
        "import sys, env_letters, env_alphabet, env_swarm; print([m for m in ('torch', 'numpy', 'scipy', 'metrics') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_a_run_of_letters_loads_neither_the_swarm_nor_http_nor_the_viewer():
    code = """
import sys, train, settings
cfg, typed = settings.command_line(["--env", "letters"])
refusals.check(cfg)
settings.make_env(cfg, cfg.difficulty).reset(1)
away = [m for m in sys.modules if m.split(".")[0] in ("swarm", "env_swarm", "env_alphabet", "bridges", "openai", "lab")
        or m in ("bookkeeping.behaviour", "bookkeeping.report", "bookkeeping.compare", "matplotlib")]
print(away)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr
