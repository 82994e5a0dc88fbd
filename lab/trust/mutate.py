"""Would the tests notice? A few hundred small mistakes, one at a time, each tried against the tests.

    python -m lab.trust.mutate              # 300 mistakes; stop it and start it again, it goes on
    python -m lab.trust.mutate --again      # only those that nobody noticed, after new tests
    python -m lab.trust.mutate --again --only fast/plan.py --tests tests/test_memory.py
    python -m lab.trust.mutate --page       # only results/trust/mutate.md again

The mistakes are made by rule and drawn by a seed (lab/trust/mistakes.py). First every test runs once
and its lines are noted (lab/trust/marks.py). Then each mistake is put into a private copy of the
last commit, and the tests that run its line are run, the quick ones first, until one fails. The
working tree is read and never written, but for results/trust.

A mistake counts as caught if a test fails, does not end (LIMIT_S and five times its usual time), or
takes pytest down with it (lab/trust/forks.py), and in no other case: tests beyond --budget seconds are left out, and
the page says for which. Mistakes that change nothing that anybody could see are listed by hand, with
the reason, in lab/trust/equivalent.toml.

With --tests (files, or single tests) nothing is noted first: these tests run once without a
mistake, must pass, and are then all that is tried. It is cheaper than to note every line of every
test again, and it can only find less.

What makes it cheap is a fork: torch and the other libraries are imported once, and each mistake is
tried in a fork that has imported nothing of ours.
"""

import ast
import hashlib
import json
import os
import subprocess
import time
from collections import defaultdict
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import tyro

from lab.trust.forks import Copy, Outcome, Player
from lab.trust.marks import FILES, ROOT, WORK, Recorder, by_place, offsets_of, prepare, watch
from lab.trust.mistakes import Mistake, mistakes, sample
from lab.trust.mutate_page import key, page, read_results, reasons

OUT = ROOT / "results" / "trust"
LIBRARIES = ("torch", "transformers", "transformers.models.qwen3.modeling_qwen3", "peft", "pytest",
             "hypothesis", "scipy.stats", "statsmodels.stats.multitest", "matplotlib.pyplot",
             "tyro", "wandb", "openai", "tqdm", "filelock")  # fmt: skip
QUICK_S, QUICK_FILES = 1.5, 5  # what is tried first: tests that are done in a moment


@dataclass
class Flags:
    n: int = 300  # mistakes, about
    seed: int = 0
    least: int = 4  # of each file
    budget: float = 60.0  # seconds of tests for one mistake; those beyond are left out
    workers: int = 1  # mistakes tried at the same time
    again: bool = False  # try once more what nobody noticed
    page: bool = False  # only write the page
    only: tuple[str, ...] = ()  # only mistakes whose FILE:LINE: begins so (fast/ or grpo.py:7:)
    tests: tuple[str, ...] = ()  # ask these tests, and no others
    written: bool = False  # these tests were written for these mistakes: the share is without them
    pause: str = ""  # wait between two mistakes while this file exists: a timing is being taken


# ------------------------------------------------------------------------------- who runs which line


def fingerprint(root: Path, files: list[str], test: str) -> str:
    """A record holds while neither the watched files nor the tests have changed."""
    parts = [*files, test, "tests/conftest.py"]
    texts = [(root / part).read_bytes() for part in parts if (root / part).exists()]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def record(player: Player, test: str, offsets, seen, work: Path) -> None:
    """Run one file of tests and write down what each ran."""
    (work / "ran").mkdir(parents=True, exist_ok=True)
    recorder = Recorder(seen)
    made, start = player.copy.home / "ran.json", time.time()
    made.unlink(missing_ok=True)
    outcome = player.play([test], None, defaultdict(lambda: 400.0), recorder)
    tests = json.loads(made.read_text()) if made.exists() else {}
    player.copy.clean()
    hashed = fingerprint(player.copy.root, list(offsets), test)
    whole = {"of": hashed, "seconds": round(time.time() - start, 1), "tests": tests}
    (work / "ran" / f"{Path(test).stem}.json").write_text(json.dumps(whole))
    print(f"{test}: {len(tests)} tests in {whole['seconds']} s, {outcome.how} {outcome.by}", flush=True)


def recorded(root: Path, files: list[str], work: Path) -> tuple[dict[str, dict], list[str]]:
    """(what each test runs, the files of tests that have to be run once more to know)"""
    tests, missing = {}, []
    for path in sorted((root / "tests").glob("test_*.py")):
        test, file = f"tests/{path.name}", work / "ran" / f"{path.stem}.json"
        kept = json.loads(file.read_text()) if file.exists() else {}
        if kept.get("of") == fingerprint(root, files, test):
            tests |= kept["tests"]
        else:
            missing.append(test)
    return tests, missing


class Who:
    """Which tests can notice a mistake, and in which order to ask them."""

    def __init__(self, root: Path, files: list[str], tests: dict[str, dict]):
        self.tests, self.places = tests, by_place(tests)
        self.offsets, _ = offsets_of(root, files)
        self.usual = {test: found["seconds"] + found["shared"] for test, found in tests.items()}
        self.mentions, self.of_file = defaultdict(set), defaultdict(set)
        for file in files:
            tree = ast.parse((root / file).read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.stmt):
                    place = self.offsets[file] + node.lineno
                    self.of_file[file] |= self.places[place]
                    for name in names_in(node):
                        self.mentions[name] |= self.places[place]

    def select(self, mistake: Mistake) -> set[str]:
        if mistake.names:  # it runs once: ask those who run what uses it
            named = set().union(*(self.mentions[name] for name in mistake.names))
            return named or self.of_file[mistake.file]
        place = self.offsets[mistake.file] + mistake.statement
        return self.places[place] or self.of_file[mistake.file]

    def batches(self, mistake: Mistake, budget: float) -> tuple[list[list[str]], int]:
        """(lists of tests, to be run one after the other; how many were left out)"""
        chosen, own = self.select(mistake), f"tests/test_{Path(mistake.file).stem}.py"
        per_file = defaultdict(list)
        for test in sorted(chosen, key=lambda t: (self.usual[t], t)):
            per_file[test.split("::")[0]].append(test)
        quick = {f: [t for t in ts if self.usual[t] <= QUICK_S] for f, ts in per_file.items()}
        order = sorted(per_file, key=lambda f: (f != own, -len(quick[f]), f))
        some = [test for file in order[:QUICK_FILES] for test in quick[file]]
        rest = sorted(chosen - set(some), key=lambda t: (self.usual[t], t))
        paid: set[tuple[str, float]] = set()  # fixtures, by their file and what they cost
        first = self.affordable(some, budget, paid)
        spent = sum(self.tests[t]["seconds"] for t in first) + sum(cost for _, cost in paid)
        then = self.affordable([*rest, *sorted(set(some) - set(first))], budget - spent, paid)
        then = then or rest[: not first]  # one at least
        rank = {file: i for i, file in enumerate(dict.fromkeys(t.split("::")[0] for t in then))}
        then.sort(key=lambda t: rank[t.split("::")[0]])  # a file at a time: its fixtures live so long
        batches = [batch for batch in (first, then) if batch]
        return batches, len(chosen) - len(first) - len(then)

    def affordable(self, tests: list[str], seconds: float, paid: set) -> list[str]:
        """Those that can be run in so many seconds; a shared fixture is paid for once."""
        out = []
        for test in tests:
            fixtures = test.split("::")[0], self.tests[test]["shared"]
            cost = self.tests[test]["seconds"] + (0.0 if fixtures in paid else fixtures[1])
            if cost <= seconds:
                seconds -= cost
                paid.add(fixtures)
                out.append(test)
        return out


class Given:
    """The tests of --tests, for every mistake, the quick ones first."""

    def __init__(self, root: Path, words: tuple[str, ...]):
        """They are run without a mistake, in a fork: the servers that it starts must end with it."""
        copy = Copy(root)
        made = copy.home / "seconds.json"

        def one(number: int, some) -> None:
            for _ in some:
                outcome = Player(copy).play(list(words), None, defaultdict(lambda: 400.0))
                if outcome.how != "survived" or not outcome.passed:
                    print(f"without a mistake: {outcome.how} {outcome.by} {outcome.said}", flush=True)
                else:
                    made.write_text(json.dumps(outcome.seconds))

        try:
            share_out([words], 1, one)
            if not made.exists():
                raise SystemExit("choose other tests, or mend them: a mistake cannot be told by these")
            self.tests = self.usual = json.loads(made.read_text())
        finally:
            copy.close()

    def batches(self, mistake: Mistake, budget: float) -> tuple[list[list[str]], int]:
        order, spent = [], 0.0
        for test in sorted(self.usual, key=self.usual.get):
            spent += self.usual[test]
            order += [test] * (spent <= budget or not order)
        file_of = lambda test: test.split("::")[0]
        rank = {file: i for i, file in enumerate(dict.fromkeys(map(file_of, order)))}
        return [sorted(order, key=lambda test: rank[file_of(test)])], len(self.usual) - len(order)


def names_in(node) -> set[str]:
    """The names that a statement uses, those of the statements in it aside."""
    found, todo = set(), [node]
    while todo:
        here = todo.pop()
        if isinstance(here, ast.Name):
            found.add(here.id)
        elif isinstance(here, ast.Attribute):
            found.add(here.attr)
        elif isinstance(here, ast.keyword) and here.arg:
            found.add(here.arg)
        todo += [c for c in ast.iter_child_nodes(here) if not isinstance(c, ast.stmt)]
    return found


# ---------------------------------------------------------------------------------------- try them


def attempt(player: Player, mistake: Mistake, who: Who | Given, flags: Flags) -> dict:
    """Make the mistake in the copy, ask the tests, take it back."""
    start, source = time.time(), (player.copy.root / mistake.file).read_text()
    batches, left_out = who.batches(mistake, flags.budget)
    player.copy.write(mistake.file, mistake.made_in(source))
    asked, outcome = 0, Outcome()
    for tests in batches:
        files = list(dict.fromkeys(test.split("::")[0] for test in tests))
        outcome = player.play(files, tests, who.usual)
        asked += len(outcome.passed)
        if outcome.how != "survived":
            break
        if len(outcome.passed) < len(tests):
            outcome.said = f"{len(tests) - len(outcome.passed)} of the tests did not run"
    player.copy.write(mistake.file, source)
    player.copy.clean()
    result = {key: getattr(mistake, key) for key in ("file", "where", "line", "rule", "before", "after")}
    result |= {"how": outcome.how, "by": outcome.by, "said": outcome.said, "asked": asked}
    if outcome.how == "survived":
        result["left_out"] = left_out
    result |= {"seed": flags.seed} | ({"given": list(flags.tests)} if flags.tests else {})
    result |= {"written": True} if flags.written else {}
    return result | {"seconds": round(time.time() - start, 1)}


def share_out(things: list, workers: int, work) -> None:
    """work(number of the worker, the things, one by one) in so many processes."""
    ours, theirs = os.pipe()
    for i in range(len(things)):
        os.write(theirs, i.to_bytes(4, "big"))
    os.close(theirs)
    left = iter(lambda: os.read(ours, 4), b"")
    children = []
    for number in range(min(workers, len(things))):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                work(number, (things[int.from_bytes(i, "big")] for i in left))
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(pid)
    os.close(ours)
    failed = [pid for pid in children if os.waitpid(pid, 0)[1]]
    if failed:
        raise SystemExit("a worker ended early; start again to go on")


def wait_for(file: str) -> None:
    while file and Path(file).exists():
        time.sleep(5)


def record_all(root: Path, files: list[str], work: Path, workers: int, pause: str) -> dict:
    _, missing = recorded(root, files, work)

    def one(number: int, some) -> None:
        copy = Copy(root)
        offsets, size = offsets_of(copy.root, files)
        env = prepare(copy.home / "marks", copy.root, offsets, size)
        try:
            player = Player(copy, env)
            seen = watch(str(copy.root), offsets, str(copy.home / "marks" / "seen"))
            for test in some:
                wait_for(pause)
                record(player, test, offsets, seen, work)
        finally:
            copy.close()

    if missing:
        share_out(missing, workers, one)
    return recorded(root, files, work)[0]


def try_all(root: Path, todo: list[Mistake], who: Who | Given, flags: Flags, out: Path) -> None:
    def one(number: int, some) -> None:
        copy = Copy(root)
        try:
            player = Player(copy)
            for mistake in some:
                wait_for(flags.pause)
                result = attempt(player, mistake, who, flags)
                with open(out, "a") as f:
                    f.write(json.dumps(result) + "\n")
                print(f"{result['how']:9} {result['seconds']:6} s {mistake.file}:{mistake.line} "
                      f"{mistake.rule} {result['by']}", flush=True)  # fmt: skip
        finally:
            copy.close()

    if todo:
        share_out(todo, flags.workers, one)


def control(root: Path, results: list[dict], who: Who) -> list[str]:
    """Which of the tests that noticed a mistake fail without one, too, run in the same way?"""
    asked = sorted({r["by"] for r in results if r["by"] in who.tests})
    copy, failing = Copy(root), []
    try:
        player = Player(copy)
        while asked:
            files = list(dict.fromkeys(test.split("::")[0] for test in asked))
            outcome = player.play(files, asked, who.usual)
            if outcome.how == "survived":
                break
            failing.append(outcome.by)
            asked = [t for t in asked if t != outcome.by and t not in outcome.passed]
    finally:
        copy.close()
    return failing


# ------------------------------------------------------------------------------------- a whole run


def write(found: dict[tuple, dict]) -> None:
    """The page, and what it counts: the mistakes that can still be made."""
    keys = {m.key for m in possible()}
    results = [r for name, r in found.items() if name in keys]
    results.sort(key=lambda r: (r["seed"], FILES.index(r["file"]), r["line"]))
    (OUT / "mutate.md").write_text("\n".join(page(results, reasons())).rstrip() + "\n")
    (OUT / "mutate.jsonl").write_text("".join(json.dumps(r) + "\n" for r in results))


def run(root: Path, files: list[str], chosen: list[Mistake], flags: Flags, out: Path) -> None:
    """Try what has no result in `out` yet."""
    words = ["git", "status", "--porcelain", "--", *files, "tests"]
    if subprocess.run(words, cwd=root, capture_output=True, text=True, check=True).stdout:
        raise SystemExit("commit first: what is tried is the last commit, not what is typed")
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    for library in LIBRARIES:
        import_module(library)
    first = Copy(root)  # the others are copies of it, whatever happens to the working tree now
    try:
        if flags.tests:
            who = Given(first.root, flags.tests)
        else:
            tests = record_all(first.root, files, root / WORK, flags.workers, flags.pause)
            who = Who(first.root, files, tests)
        done, known = read_results(out), reasons()
        left = lambda m: done[m.key]["how"] == "survived" and m.key not in known
        again = lambda m: flags.again and left(m)
        todo = [m for m in chosen if m.key not in done or again(m)]
        print(f"{len(who.tests)} tests; {len(todo)} of {len(chosen)} mistakes to try", flush=True)
        try_all(first.root, todo, who, flags, out)
        if not flags.only and not flags.tests:
            failing = control(first.root, list(read_results(out).values()), who)
            kept = [r for r in read_results(out).values() if r["by"] not in failing]
            out.write_text("".join(json.dumps(r) + "\n" for r in kept))
            print(f"fail without a mistake, and count for nothing: {failing}", flush=True)
    finally:
        first.close()


def chosen_by(flags: Flags, done: dict[tuple, dict]) -> list[Mistake]:
    """The sample; or what was tried of it and can still be made, for the draw moves with the code."""
    if not (flags.again or flags.page):
        return sample(ROOT, FILES, flags.n, flags.seed, flags.least)
    found = {}
    for m in possible():
        if m.key in done and done[m.key]["seed"] == flags.seed:
            line = done[m.key]["line"]  # of two that are called the same, the nearer
            found[m.key] = min(m, found.get(m.key, m), key=lambda m: abs(m.line - line))
    return list(found.values())


def possible() -> list[Mistake]:
    """All that can be made today."""
    return [m for file in FILES for m in mistakes(file, (ROOT / file).read_text())]


def follow(out: Path) -> None:
    """A function may have another name since: its mistakes keep their results."""
    done, today = read_results(out), possible()
    keys, places = {m.key for m in today}, defaultdict(list)
    for m in today:
        places[m.file, m.before, m.after].append(m.where)
    for result in done.values():
        where = places[result["file"], result["before"], result["after"]]
        if key(result) not in keys and len(where) == 1:
            result["where"] = where[0]
    out.write_text("".join(json.dumps(result) + "\n" for result in done.values()))


def main(flags: Flags) -> None:
    out = OUT / "mutate.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    follow(out)
    chosen = chosen_by(flags, read_results(out))
    wanted = tuple(flags.only) or ("",)
    if not flags.page:
        some = [m for m in chosen if f"{m.file}:{m.line}:".startswith(wanted)]
        run(ROOT, FILES, some, flags, out)
    if flags.page or not flags.only:
        write(read_results(out))
    results = [r for r in read_results(out).values() if r["seed"] == flags.seed]
    left = [r for r in results if r["how"] == "survived" and key(r) not in reasons()]
    print(f"{len(results)} tried, {len(left)} survived")


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__.splitlines()[0]))
