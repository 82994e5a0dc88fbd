"""Protects lab/trust/mutate.py, which says whether these tests would notice a mistake: it must know the two apart,
and leave the working tree alone."""

import json
import subprocess
from pathlib import Path

import pytest

import warm
from lab.trust import mistakes, mutate, mutate_page
from lab.trust.mistakes import Mistake

ROOT = Path(__file__).resolve().parents[1]

SOURCE = '''"""A docstring with 1 number."""
LIMIT = 3


def small(values: list[int], least: int = 0) -> bool:
    """Are there few values?"""
    print("looking at", 7)
    assert len(values) < 99
    if not values or min(values) < least:
        return False
    return len(values) <= LIMIT


if __name__ == "__main__":
    assert small([1, 2])
'''


def changed(source: str) -> set[tuple[str, str]]:
    """{(rule, the line afterwards)}"""
    return {(m.rule, m.after) for m in mistakes.mistakes("toy.py", source)}


def test_mistakes_are_made_where_they_should_be():
    assert changed(SOURCE) == {
        ("constant", "LIMIT = 4"),
        ("constant", "LIMIT = 2"),
        ("constant", "def small(values: list[int], least: int = 1) -> bool:"),
        ("negated", "if not (not values or min(values) < least):"),
        ("negated", "if (values) or min(values) < least:"),
        ("and/or", "if not values and min(values) < least:"),
        ("twin", "if not values or max(values) < least:"),
        ("comparison", "if not values or min(values) <= least:"),
        ("constant", "return True"),
        ("return", "return None"),
        ("comparison", "return len(values) < LIMIT"),
    }


@pytest.mark.parametrize(
    "code, after",
    [
        ("x = a.sum(dim=1) / n", ["x = a.mean(dim=1) / n", "x = a.sum(dim=1) * n"]),
        ("f(a, b, key=None)", ["f(b, a, key=None)", "f(a, b)", "pass"]),
        ("for i in range(n): total += a[i:k]", ["for i in range(n - 1): total += a[i:k]",
         "for i in range(n): total += a[i:k + 1]", "for i in range(n): total -= a[i:k]"]),
        ("x = y.detach() if a is not None else abs(y)", ["x = y if a is not None else abs(y)",
         "x = y.detach() if a is None else abs(y)"]),
        ("é = 'é' + (b) * 2.0", ["é = 'é' + (b) / 2.0", "é = 'é' + (b) * 2.5"]),
        ("self.x = 1", ["pass"]),
    ],
)  # fmt: skip
def test_a_rule_changes_what_it_should(code, after):
    made = {after for _, after in changed(f"def f():\n    {code}\n")}
    assert set(after) <= made, made
    assert not [m for m in made if "str.'é' -" in m]


def test_nothing_that_deletes_or_kills_is_changed():
    code = "def f(old, held):\n    if held is None and old:\n        shutil.rmtree(old, True)\n    os.kill(3, 0)\n"
    assert changed(code) == set()


def test_the_sample_is_that_of_its_seed_and_of_each_file_alone(tmp_path):
    files = ["sft.py", "rollout.py"]
    first = mistakes.sample(ROOT, files, 12, seed=0)
    assert first == mistakes.sample(ROOT, files, 12, seed=0) != mistakes.sample(ROOT, files, 12, seed=1)
    assert {m.file for m in first} == set(files) and len(first) >= 12
    assert len({(m.file, m.line) for m in first}) == len(first)
    for file in files:
        (tmp_path / file).write_text((ROOT / file).read_text())
    (tmp_path / "sft.py").write_text((ROOT / "sft.py").read_text() + "\nMORE = 1\n")
    again = mistakes.sample(tmp_path, files, 12, seed=0)
    same = lambda ms: [m for m in ms if m.file == "rollout.py"]
    assert same(again) == same(first)


def test_every_mistake_of_the_sample_is_python_and_another_program():
    for m in mistakes.sample(ROOT, mutate.FILES, 60, seed=3):
        source = (ROOT / m.file).read_text()
        made = m.made_in(source)
        compile(made, m.file, "exec")
        assert made != source and source.splitlines()[m.line - 1].strip() == m.before


# ------------------------------------------------------------------------------------------------ on a made-up package

TOY = '''"""Few or many."""
LIMIT = 3


def small(n):
    return n < LIMIT


def big(n):
    return n > 100


def endless(n):
    while n > 0:
        n -= 1
    return n


if __name__ == "__main__":
    print(big(5000))
'''
TESTS = """import subprocess, sys
from pathlib import Path

import pytest
import toy


@pytest.fixture(scope="module")
def judged():
    return [toy.small(n) for n in (2, 3, 4)]


def test_small(judged):
    assert judged == [True, False, False]


def test_big_in_a_process_of_its_own():
    code = "import toy; print(toy.big(1000), toy.big(1))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(toy.__file__).parent, capture_output=True, text=True)
    assert done.stdout == "True False\\n"


def test_main():
    done = subprocess.run([sys.executable, "toy.py"], cwd=Path(toy.__file__).parent, capture_output=True, text=True)
    assert done.stdout == "True\\n"


def test_endless():
    assert toy.endless(3) == 0


def test_nothing():
    pass


def test_fails():
    assert False
"""
DRIVER = """
import json, sys
from pathlib import Path
from lab.trust import forks, mutate
from lab.trust.mistakes import mistakes
root, out = Path(sys.argv[1]), Path(sys.argv[2])
forks.LIMIT_S, mutate.LIBRARIES = 3.0, ("pytest", "hypothesis")
some = ("return n <= LIMIT", "LIMIT = 4", "return n > 101", "n += 1")
chosen = [m for m in mistakes("toy.py", (root / "toy.py").read_text()) if m.after in some]
mutate.run(root, ["toy.py"], chosen, mutate.Flags(), out)
tests = mutate.recorded(root, ["toy.py"], root / mutate.WORK)[0]
given = mutate.Flags(tests=("tests/test_toy.py::test_big_in_a_process_of_its_own",), again=True)
mutate.run(root, ["toy.py"], chosen, given, out.with_suffix(".given"))
who = mutate.Who(root, ["toy.py"], tests)
who.tests = who.tests | {"tests/test_toy.py::test_fails": {}}
print(mutate.control(root, [{"by": test} for test in who.tests], who))
print(json.dumps({name.split("::")[1]: kept["ran"] for name, kept in tests.items()}))
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """(the results, which places each test runs, what git says afterwards, what fails anyway, the results with a test given) of a package
    in which one mistake in three is noticed."""
    root = tmp_path_factory.mktemp("toy")
    (root / "tests").mkdir()
    (root / "toy.py").write_text(TOY)
    (root / "tests" / "test_toy.py").write_text(TESTS)
    (root / ".gitignore").write_text("runs/\n")
    git = lambda *words: (
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *words], cwd=root, check=True, capture_output=True, text=True
        ).stdout
    )
    git("init"), git("add", "."), git("commit", "-m", "toy")
    out = tmp_path_factory.mktemp("out") / "mutate.jsonl"
    done = warm.run(["-c", DRIVER, root, out], ROOT)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    results, given = ([json.loads(line) for line in file.read_text().splitlines()] for file in (out, out.with_suffix(".given")))
    return (
        {r["after"]: r for r in results},
        json.loads(done.stdout.splitlines()[-1]),
        git("status", "--porcelain"),
        done.stdout.splitlines()[-2],
        {r["after"]: r for r in given},
    )


def test_it_is_known_which_test_runs_which_line(tried):
    ran = tried[1]
    small, big, endless = (TOY.splitlines().index(line) + 1 for line in ("    return n < LIMIT", "    return n > 100", "    return n"))
    assert ran["test_small"] == [small]  # by a fixture
    assert big in ran["test_big_in_a_process_of_its_own"] and big in ran["test_main"]
    assert endless in ran["test_endless"] and ran["test_nothing"] == []
    assert "test_fails" not in ran  # it can tell nothing


def test_what_is_noticed_and_what_is_not_are_told_apart(tried):
    results = tried[0]
    how = {after: r["how"] for after, r in results.items()}
    assert how == {"return n <= LIMIT": "failed", "LIMIT = 4": "failed", "return n > 101": "survived", "n += 1": "endless"}
    assert results["return n <= LIMIT"]["by"] == "tests/test_toy.py::test_small"
    assert "[True, True, False]" in results["return n <= LIMIT"]["said"]
    assert results["return n > 101"]["asked"] == 2 and results["return n > 101"]["left_out"] == 0


def test_with_tests_given_those_are_asked_and_no_others(tried):
    given = tried[4]
    asked = {after: (r["how"], r["asked"]) for after, r in given.items()}
    assert asked == {
        "return n <= LIMIT": ("survived", 1),
        "LIMIT = 4": ("survived", 1),
        "return n > 101": ("survived", 1),
        "n += 1": ("survived", 1),
    }
    assert all(r["given"] == ["tests/test_toy.py::test_big_in_a_process_of_its_own"] for r in given.values())


def test_a_result_that_is_not_the_first_says_so(tmp_path):
    file, line = tmp_path / "mutate.jsonl", {"file": "a.py", "where": "f", "before": "x", "after": "y"}
    lines = [line | {"how": "survived"}, line | {"how": "failed", "seed": 0}, line | {"after": "z", "how": "failed", "seed": 1}]
    file.write_text("".join(json.dumps(some) + "\n" for some in lines))
    first, second = mutate.read_results(file).values()
    assert (first["how"], first["seed"], first["again"]) == ("failed", 0, True)
    assert second["seed"] == 1 and "again" not in second


def test_a_test_that_fails_without_a_mistake_counts_for_nothing(tried):
    assert tried[3] == "['tests/test_toy.py::test_fails']"


def test_the_working_tree_is_never_touched(tried):
    assert tried[2] == ""


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_counts_what_could_be_noticed():
    base = {"file": "grpo.py", "where": "f", "line": 3, "rule": "constant", "said": "", "asked": 4, "seconds": 1.0, "seed": 0}
    results = [base | {"before": f"x = {n}", "after": f"x = {n + 1}", "how": "failed", "by": "t"} for n in range(18)]
    results += [base | {"before": "y = 1", "after": "y = 2", "how": "survived", "by": "", "left_out": 3}]
    results += [base | {"before": "z = 1", "after": "z = 2", "how": "survived", "by": "", "left_out": 0}]
    text = "\n".join(mutate.page(results, {("grpo.py", "f", "z = 1", "z = 2"): "z is not read"}))
    assert "Of the other 19, 18 were caught: 94.7% [75.4, 99.1]" in text
    assert "4 tests passed; 3 more beyond the budget" in text and "z is not read" in text
    assert "| grpo.py | 19 | 18 | 1 | 94.7% [75.4, 99.1] |" in text


def test_the_list_of_the_equivalent_is_about_lines_that_are_there():
    for name, why in mutate.reasons().items():
        made = {m.key for m in mistakes.mistakes(name[0], (ROOT / name[0]).read_text())}
        assert name in made and len(why) > 20, name


def test_a_mistake_is_called_by_its_text_and_not_by_its_line():
    shifted = mistakes.mistakes("toy.py", "\n\n" + SOURCE)
    assert [m.key for m in shifted] == [m.key for m in mistakes.mistakes("toy.py", SOURCE)]
    assert isinstance(shifted[0], Mistake) and shifted[0].line == 4


def test_a_mistake_keeps_its_result_when_its_function_gets_another_name(tmp_path):
    m = next(m for m in mistakes.mistakes("sft.py", (ROOT / "sft.py").read_text()) if m.where)
    out = tmp_path / "mutate.jsonl"
    result = {"file": m.file, "where": "its_old_name", "line": 1, "before": m.before, "after": m.after, "how": "failed", "seed": 0}
    out.write_text(json.dumps(result) + "\n" + json.dumps(result | {"before": "gone"}) + "\n")
    mutate.follow(out)
    (kept, gone) = (json.loads(line) for line in out.read_text().splitlines())
    assert mutate.key(kept) == m.key and gone["where"] == "its_old_name"


def test_what_only_tests_catch_that_were_written_for_it_is_no_part_of_the_share():
    base = {"file": "a.py", "where": "f", "before": "x", "seed": 1, "how": "failed"}
    results = [base | {"after": str(n)} for n in range(3)] + [base | {"after": "3", "written": True, "again": True}]
    (said, *_) = mutate_page.count_of(results + [base | {"after": "4", "how": "survived"}], {}, 1)
    assert "Of the other 5, 3 were caught: 60.0% [" in said and said.endswith(" written since, for what they break, catch 1 more.")
