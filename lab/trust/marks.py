"""Which test runs which line? So that a mistake is tried against the tests that can notice it.

    python -m lab.trust.marks rollout.py:100      # the tests that run that line, once recorded

Every statement of the watched files is compiled with a mark before it, `__seen__[place] = 1`.
`__seen__` is a file in memory that all processes share, so that marks made by a subprocess of a
test, or by a rank that is killed, count as well. The files on the disk stay as they are.

What a fixture of a module or session ran is counted for every test that uses it. What runs once per
process (the body of a module, a cached function) is not known by marks; lab/trust/mutate.py goes by
the names that are defined there.

`watch` is loaded by itself into every Python that a test starts (through sitecustomize), so this
file imports the standard library only.
"""

import ast
import builtins
import json
import mmap
import os
import runpy
import sys
import time
from collections import defaultdict
from importlib.machinery import SourceFileLoader
from pathlib import Path


class Marker(ast.NodeTransformer):
    """Puts a mark before every statement."""

    def __init__(self, offset: int):
        self.offset = offset

    def generic_visit(self, node):
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                setattr(node, field, [new for old in body for new in self.marked(old)])
        return node

    def marked(self, node: ast.AST) -> list[ast.AST]:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        late = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if docstring or late or not isinstance(node, ast.stmt):
            return [node]
        mark = ast.parse(f"__seen__[{self.offset + node.lineno}] = 1").body[0]
        for part in ast.walk(mark):
            ast.copy_location(part, node)
        return [mark, node]


def watch(root: str, offsets: dict[str, int], file: str) -> mmap.mmap:
    """From now on, every process that this one becomes or forks marks what it runs, in `file`."""
    with open(file, "r+b") as shared:
        seen = builtins.__seen__ = mmap.mmap(shared.fileno(), 0)
    paths = {os.path.join(root, name): offset for name, offset in offsets.items()}

    def compiled(path: str):
        tree = Marker(paths[path]).visit(ast.parse(Path(path).read_bytes()))
        return compile(ast.fix_missing_locations(tree), path, "exec")

    get_code, from_file = SourceFileLoader.get_code, runpy._get_code_from_file

    def trace(frame, event="call", _=None):
        offset = paths.get(frame.f_code.co_filename)
        if offset is None or "__seen__" in frame.f_code.co_names:  # another's, or marked
            return None
        seen[offset + frame.f_lineno] = 1
        return trace

    def get_marked_code(self, name):
        path = os.path.abspath(self.get_filename(name))
        return compiled(path) if path in paths else get_code(self, name)

    def marked_from_file(name, path):
        whole = os.path.abspath(os.fsdecode(path))
        return (compiled(whole), path) if whole in paths else from_file(name, path)

    SourceFileLoader.get_code, runpy._get_code_from_file = get_marked_code, marked_from_file
    if any(os.path.abspath(word) in paths for word in sys.orig_argv[1:3]):
        sys.settrace(lambda frame, *_: trace(frame))  # `python FILE`: no loader is asked for it
    return seen


SITE = """
import importlib.util
spec = importlib.util.spec_from_file_location("lab_trust_marks", {here!r})
marks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(marks)
marks.watch(*{arguments!r})
"""


def prepare(place: Path, root: Path, offsets: dict[str, int], size: int) -> dict[str, str]:
    """Make the shared file and a sitecustomize; returns the environment that loads it."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "seen").write_bytes(bytes(size))
    arguments = (str(root), offsets, str(place / "seen"))
    (place / "sitecustomize.py").write_text(SITE.format(here=__file__, arguments=arguments))
    return {"PYTHONPATH": str(place)}


class Recorder:
    """A plugin of pytest: what each test and each shared fixture ran, and how long it took."""

    def __init__(self, seen: mmap.mmap):
        self.seen, self.tests, self.fixtures = seen, {}, {}

    def take(self) -> set[int]:
        """The places that were marked since the last call."""
        marked = self.seen[:]
        self.seen[:] = bytes(len(marked))
        return {place for place, byte in enumerate(marked) if byte}

    def hooks(self):
        import pytest

        recorder = self

        class Hooks:
            @pytest.hookimpl(wrapper=True)
            def pytest_fixture_setup(self, fixturedef):
                if fixturedef.scope == "function":
                    return (yield)
                outside, start = recorder.take(), time.perf_counter()
                try:
                    return (yield)
                finally:
                    kept = recorder.fixtures.setdefault(name_of(fixturedef), [0.0, set()])
                    kept[0] = max(kept[0], time.perf_counter() - start)
                    kept[1] |= recorder.take()
                    for place in outside:
                        recorder.seen[place] = 1

            @pytest.hookimpl(wrapper=True)
            def pytest_runtest_protocol(self, item):
                recorder.take()
                known = sum(seconds for seconds, _ in recorder.fixtures.values())
                start = time.perf_counter()
                result = yield
                seconds = time.perf_counter() - start
                seconds -= sum(s for s, _ in recorder.fixtures.values()) - known
                used = [d for ds in item._fixtureinfo.name2fixturedefs.values() for d in ds]
                shared = sorted({name_of(d) for d in used if d.scope != "function"})
                found = {"seconds": round(max(0.0, seconds), 3), "fixtures": shared}
                recorder.tests[item.nodeid] = found | {"ran": recorder.take()}
                return result

        return Hooks()

    def record(self, good: set[str]) -> dict:
        """As JSON; the lines that a shared fixture ran are counted for its tests."""
        out = {}
        for test, kept in self.tests.items():
            some = [self.fixtures[name] for name in kept["fixtures"] if name in self.fixtures]
            ran = kept["ran"].union(*(places for _, places in some))
            shared = round(sum(seconds for seconds, _ in some), 3)
            out[test] = {"seconds": kept["seconds"], "shared": shared, "ran": sorted(ran)}
        return {test: found for test, found in out.items() if test in good}


def name_of(fixture) -> str:
    return f"{fixture.baseid}::{fixture.argname}"


def offsets_of(root: Path, files: list[str]) -> tuple[dict[str, int], int]:
    """Where the lines of each file begin in the shared file, and how long that is."""
    offsets, size = {}, 0
    for file in files:
        offsets[file] = size
        size += len((root / file).read_text().splitlines()) + 2
    return offsets, size


def by_place(tests: dict[str, dict]) -> dict[int, set[str]]:
    """{place: tests that ran it}"""
    out = defaultdict(set)
    for test, found in tests.items():
        for place in found["ran"]:
            out[place].add(test)
    return out


if __name__ == "__main__":
    from lab.trust.mutate import FILES, ROOT, WORK

    file, _, line = (sys.argv[1] if len(sys.argv) > 1 else "rollout.py:100").partition(":")
    place = offsets_of(ROOT, FILES)[0][file] + int(line)
    for record in sorted((ROOT / WORK).glob("ran/*.json")):
        for test, found in json.loads(record.read_text())["tests"].items():
            if place in found["ran"]:
                print(f"{found['seconds']:7.2f} s  {test}")
