"""Protects the house: who may import whom, no circle of files, and what a run loads.

Imports are read from the source, those inside functions and demos included. The table is the law:
a new import that it does not allow is either a mistake, or a reason to change the picture.
"""

import ast
import re
import shutil
import subprocess
import sys
from functools import cache

from warm import ROOT

ENVS = {"env_letters", "env_alphabet", "env_swarm"}
CORE = {"policy", "chat", "batch", "rollout", "sft", "grpo"}
CHAPTERS = ENVS | CORE | {"settings", "evaluate", "metrics"}  # and pico.py, and train.py
ROOMS = ("swarm", "fast", "bookkeeping", "bridges", "learn", "lab")

# Who may import whom. A room's name stands for all its files; "room/file" for one of them.
MAY = {
    "pico": set(),  # torch alone
    "env_letters": set(),
    "env_alphabet": {"env_letters"},
    "env_swarm": {"env_letters", "swarm", "metrics"},  # metrics: the intervals of `--evaluate`
    "swarm": {"swarm", "env_letters", "metrics"},
    "metrics": set(),
    "chat": set(),
    "policy": {"chat", "env_letters"},
    "rollout": {"policy", "chat", "env_letters"},
    "batch": {"policy", "rollout"},  # rollout: its demo
    "grpo": {"policy", "batch", "rollout"},
    "sft": {"policy", "batch", "chat", "rollout", "env_letters"},
    "settings": {*ENVS, "bridges/known"},  # the chosen environment; known tasks
    "evaluate": {"policy", "rollout", "metrics", "settings"},
    "fast": {"fast", *CORE - {"grpo", "sft"}},
    "bookkeeping": {*CHAPTERS, "swarm", "fast", "bookkeeping"},
    "bridges": {*CHAPTERS, "swarm", "fast", "bookkeeping", "bridges"},
    "train": {*CHAPTERS, "fast", "bookkeeping", "bridges/api"},
    "learn": {*CHAPTERS, "swarm", "learn"},
    "lab": {*CHAPTERS, "train", *ROOMS},  # and nobody but tests imports lab
}


PATHS = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
FILES = {  # of everything that is ours, tests aside
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PATHS
}


@cache
def nodes_of(module: str) -> list[ast.AST]:
    """All of a file's syntax."""
    return list(ast.walk(ast.parse(FILES[module].read_text())))


@cache
def imports(module: str) -> dict[str, set[str]]:
    """{module of ours: the names of it that are used} of what a file imports, wherever in it."""
    found, called = {}, {}  # called: {a name in this file: the module}
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            called |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (inner := f"{node.module}.{alias.name}") in FILES:
                    called[alias.asname or alias.name] = inner
                else:
                    found.setdefault(node.module, set()).add(alias.name)
    for name in called.values():
        found.setdefault(name, set())
    for node in nodes_of(module):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in called:
            found[called[node.value.id]].add(node.attr)
    return {name: names for name, names in found.items() if name in FILES}


@cache
def bound(module: str) -> set[str]:
    """Every name that a file gives to something."""
    nodes = nodes_of(module)
    names = {getattr(node, "name", getattr(node, "id", "")) for node in nodes}
    return names | {getattr(node, "asname", None) for node in nodes} | {"__file__", "__doc__"}


def test_a_file_imports_only_what_the_table_allows():
    wrong = [
        f"{module} imports {name}"
        for module in FILES
        for name in imports(module)
        if not MAY[module.split(".")[0]] & {name.split(".")[0], name.replace(".", "/")}
    ]
    assert wrong == []
    top = {module for module in FILES if (ROOT / f"{module}.py").exists()}
    assert top == CHAPTERS | {"pico", "train"} and set(MAY) == top | set(ROOMS)
    assert len(top) == 14  # as README says


ROOM_IN_TEXT = re.compile(r"(fast|bookkeeping|learn|lab|bridges|swarm)[./]\w+")


def test_chapters_name_no_room_in_a_string_that_is_code():
    """import_module("fast.sampler") and the like; docstrings and messages may mention a file."""
    named = [
        f"{module}: {node.value}"
        for module in CHAPTERS | {"pico"}
        for node in nodes_of(module)
        if isinstance(node, ast.Constant) and ROOM_IN_TEXT.fullmatch(str(node.value))
    ]
    assert named == []


def room(module: str) -> str:
    """The floor that a file is on: the book is one room, train.py another."""
    first = module.split(".")[0]
    return "book" if first in CHAPTERS | {"swarm", "pico"} else first


def circle(needs: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left when, over and over, those that need none of the others are taken away."""
    while free := [one for one, others in needs.items() if not others & needs.keys()]:
        for one in free:
            del needs[one]
    return needs


def test_rooms_stand_in_no_circle():
    """But for settings, which loads known tasks when such an --env is chosen."""
    needs = {room(module): set() for module in FILES}
    for module in FILES:
        names = set(imports(module)) - ({"bridges.known"} if module == "settings" else set())
        needs[room(module)] |= {room(name) for name in names} - {room(module)}
    assert circle(needs) == {}


def test_what_a_file_uses_of_another_is_there():
    """Also inside functions that no test calls: whoever runs that command would miss it."""
    missing = [
        f"{module}: {name}.{one}"
        for module in FILES
        for name, used in imports(module).items()
        for one in used - bound(name)
    ]
    assert missing == []


def test_no_files_stand_in_a_circle():
    assert circle({module: imports(module).keys() - {module} for module in FILES}) == {}


def test_of_the_book_and_its_rooms_only_the_final_evaluation_names_the_held_out_tasks():
    named = {module for module, path in FILES.items() if "HELD_OUT_SEEDS" in path.read_text()}
    assert {module for module in named if not module.startswith("lab.")} == {
        "settings",
        "evaluate",
        "bookkeeping.again",
    }


LOADS = """
import sys
import {modules}
{code}
bad = {bad}.split()
print([m for m in sys.modules if m in bad or m.split(".")[0] in bad])
"""
LETTERS = """
from bookkeeping import refusals
cfg, typed = settings.command_line(["--env", "letters"])
refusals.check(cfg)
settings.make_env(cfg, cfg.difficulty).reset(1)
"""
AWAY = (
    "swarm env_swarm env_alphabet bridges httpx2 openai lab matplotlib bookkeeping.behaviour "
    "bookkeeping.compare"
)


def test_an_environment_loads_no_torch_and_a_run_of_letters_loads_only_what_it_needs():
    for modules, code, bad in (
        (", ".join(sorted(ENVS)), "", "torch numpy scipy metrics"),
        ("bookkeeping.doctor", "", "torch scipy tqdm"),  # it may be installed alone
        ("train, settings", LETTERS, AWAY),
    ):
        code = LOADS.format(modules=modules, code=code, bad=repr(bad))
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert done.stdout == "[]\n", done.stdout + done.stderr


def test_the_chapters_stand_alone(tmp_path):
    """Without fast/, bookkeeping/ and train.py they train two updates, by learn/loop.py, which needs
    only the files that it names."""
    loop = (ROOT / "learn" / "loop.py").read_text(encoding="utf8")
    named = {module for module in CHAPTERS if f"{module}.py" in loop.split('"""')[1]}
    for module in named:
        shutil.copy(FILES[module], tmp_path)
    (tmp_path / "loop.py").write_text(loop, encoding="utf8")
    shutil.copytree(ROOT / "models" / "pico_base", tmp_path / "models" / "pico_base")
    code = """
import loop
real = loop.learn
def learn(policy, *given):
    before = [p.detach().clone() for p in policy.trainable().values()]
    result = real(policy, *given)
    print("moved", any((p != old).any().item() for p, old in zip(policy.trainable().values(), before)))
    return result
loop.learn = learn
loop.main("models/pico_base", 2)
"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line[:6] in ("update", "moved ")]
    assert done.returncode == 0, done.stderr[-800:]
    assert [line.split()[0] for line in lines] == ["moved", "update"] * 2
    assert "moved True" in lines and all("reward" in line for line in lines[1::2])
