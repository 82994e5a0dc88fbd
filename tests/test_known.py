"""Protects known tasks (bridges/known.py, rows.py, task.py): bad rows are refused by their line, sides never meet,
a scorer cannot end a run.

What needs the reasoning-gym package is in tests/verifiers/test_gym.py.
"""

import ast
import json
import math
import re
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

import settings
from bookkeeping import folder as run_folder
from bookkeeping.guard import check_environment, guarded, preflight
from bridges import known, rows, task
from bridges.gym import bits, is_data, is_small_sum
from evaluate import HELD_OUT_SEEDS
from helpers import command
from helpers import write_lines as write
from settings import DEV_SEEDS, SFT_SEEDS, TRAIN_SEEDS

ROOT = Path(__file__).resolve().parents[1]
RANGES = {"training": TRAIN_SEEDS, "development": DEV_SEEDS, "held-out": HELD_OUT_SEEDS}
GSM8K = {"question": "Ann has 3 apples and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\nShe has 7.\n#### 7"}


def sums(n: int, first: int = 0) -> list[dict]:
    return [{"question": f"{a} + {a}?", "answer": f"twice {a} #### {2 * a}"} for a in range(first, first + n)]


def env_of(file: Path, options: str = "", think: bool = True) -> known.Known:
    return known.open_known(f"jsonl:{file}{options}", think)


def asked(env, seed: int) -> str:
    return env.reset(seed)[0]["content"]


def scored(env, reply: str) -> dict:
    env.step(reply)
    return env.score()


# ------------------------------------------------------------------------------------------------ rows


def test_gsm8k_works_as_it_is_downloaded(tmp_path):
    """Derivation, calculator marks, ####, the number; the expert thinks the derivation, and earns everything."""
    file = write(tmp_path / "train.jsonl", [{**GSM8K, "question": GSM8K["question"] + f" ({i})"} for i in range(30)])
    env = env_of(file)
    assert "Ann has 3 apples" in asked(env, 0) and asked(env, 0).endswith("Then give the answer inside <answer> and </answer>.")
    assert env.expert_reply() == "<think>\n3 + 4 = <<3+4=7>>7\nShe has 7.\n</think>\n<answer>7</answer>"
    assert scored(env, env.expert_reply()) == {"reward": 1, "exact": 1, "format": 1, "scorer_failed": 0}
    for answer, reward in (("7", 1), ("7.0", 1), ("$7", 1), ("14/2", 1), ("8", 0), ("7 apples", 0), ("", 0), ("7/0", 0), ("9" * 9999, 0)):
        assert scored(env, f"<answer>{answer}</answer>")["reward"] == reward, answer
    plain = env_of(file, think=False)
    assert "Do not think" in asked(plain, 0) and plain.expert_reply() == "<answer>7</answer>"
    assert scored(plain, env.expert_reply())["reward"] == 0 and scored(plain, "<answer>7</answer>")["reward"] == 1
    assert scored(plain, "3 + 4 is 7\n</think><answer>7</answer>")["reward"] == 0


@pytest.mark.parametrize(
    "line, words",
    [
        (b'{"question": "a", "answer": "b"', "no JSON"),
        (b"[1, 2]", "not a list"),
        (b'"text"', "not a str"),
        (b"{}", 'one of "question" and "prompt"'),
        (b'{"question": "a", "prompt": "a", "answer": "b"}', 'one of "question" and "prompt"'),
        (b'{"question": "a"}', 'no "answer"'),
        (b'{"question": 3, "answer": "b"}', "not a text"),
        (b'{"question": "  ", "answer": "b"}', "not a text"),
        (b'{"question": "a", "answer": null}', "neither a text nor a number"),
        (b'{"question": "a", "answer": true}', "neither a text nor a number"),
        (b'{"question": "a", "answer": ["b"]}', "neither a text nor a number"),
        (b'{"question": "a", "answer": NaN}', "NaN"),
        (b'{"question": "a", "answer": -Infinity}', "NaN"),
        (b'{"question": "a", "answer": 1e999}', "neither a text nor a number"),
        (b'{"question": "a", "answer": ' + b"9" * 5000 + b"}", "no JSON"),
        (b'{"question": "a", "answer": "why #### "}', "empty"),
        (b'{"question": "\\ud800", "answer": "b"}', "surrogate"),
        (b'{"question": "caf\xe9", "answer": "b"}', "not UTF-8"),
        ('{"question": "a", "answer": "b"}'.encode("utf-16"), "not UTF-8"),
        (b"[" * 100_000, "too deep"),
        (b'{"question": "' + b"a" * 1_000_000 + b'", "answer": "b"}', "longer than"),
    ],
)
def test_a_bad_row_is_refused_with_its_line_number(tmp_path, line, words):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"question": "1 + 1?", "answer": 2}\n\n' + line + b"\n")
    with pytest.raises(ValueError) as told:
        settings.check(settings.Config(env=f"jsonl:{file}"))
    assert words in str(told.value) and "line 3" in str(told.value) and "docs/tasks.md" in str(told.value)
    assert len(str(told.value)) < 400 and "\n" not in str(told.value)


def test_a_file_without_rows_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"\n \r\n")
    for name, words in (("empty.jsonl", "there is no row"), ("nowhere.jsonl", "there is no file"), ("", "there is no file")):
        with pytest.raises(ValueError, match=words):
            env_of(tmp_path / name)
    with pytest.raises(ValueError, match="leave none for"):
        env_of(write(tmp_path / "one.jsonl", sums(1)))
    with pytest.raises(ValueError, match="no option scores"):
        env_of(write(tmp_path / "some.jsonl", sums(30)), ",scores=exact")


@given(st.binary(max_size=200), st.integers(0, 400))
@how(max_examples=100, deadline=None)
def test_no_file_makes_anything_but_a_sentence(tmp_path_factory, junk, cut):
    """Whatever the bytes, cut off wherever: rows, or one sentence."""
    file = tmp_path_factory.getbasetemp() / "junk.jsonl"
    good = b'\xef\xbb\xbf{"prompt": "1?", "answer": 1.50}\r\n{"prompt": "\xc3\xa9", "answer": "x"}\r\n'
    file.write_bytes((good + junk)[:cut])
    try:
        found = rows.read_rows(str(file))
    except ValueError as error:
        assert str(error).startswith(str(file)) and "\n" not in str(error)
    else:
        assert all(row.question and row.answer for row in found)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                    lambda x: st.lists(x) | st.dictionaries(st.sampled_from(["question", "prompt", "answer", "x"]), x)))  # fmt: skip
@how(max_examples=100, deadline=None)
def test_no_json_makes_anything_but_a_row_or_a_sentence(value):
    try:
        row = rows.read_row(1, json.dumps(value))
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert isinstance(value, dict) and row.whole == value
        assert rows.exact(row.answer, row.answer) and rows.number(row.answer, row.answer) == (rows.as_number(row.answer) is not None)


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row).encode() for row in sums(30)))
    assert [row.question for row in rows.read_rows(str(tmp_path / "a.jsonl"))] == [row["question"] for row in sums(30)]


# ------------------------------------------------------------------------------------------------ sides


def questions(env, side: str, n: int) -> list[str]:
    return [asked(env, RANGES[side] + i) for i in range(n)]


def test_the_sides_are_those_of_the_ranges_of_seeds():
    starts = {**RANGES, "SFT": SFT_SEEDS}
    assert {name: task.side_of_seed(first) for name, first in starts.items()} == {**{side: side for side in RANGES}, "SFT": "training"}
    assert task.side_of_seed(SFT_SEEDS - 1) == "training" and sum(task.TENTHS.values()) == 10
    shares = Counter(task.side_of(f"question {i}") for i in range(3000))
    assert all(abs(shares[side] / 3000 - tenths / 10) < 0.04 for side, tenths in task.TENTHS.items())
    assert task.side_of("a  b\n") == task.side_of("a b")


def test_training_development_and_held_out_rows_never_meet(tmp_path):
    file = write(tmp_path / "rows.jsonl", sums(200) + sums(50))  # the first fifty twice
    env = env_of(file)
    n = {side: env.how_many(first) for side, first in RANGES.items()}
    assert sum(n.values()) == 200 and "50 rows whose question was there before" in env.source.about
    found = {side: questions(env, side, n[side]) for side in RANGES}
    found["SFT"] = [asked(env, SFT_SEEDS + i) for i in range(n["training"])]
    assert all(len(set(some)) == len(some) for some in found.values()), "every row once before any comes again"
    assert set(found["SFT"]) == set(found["training"]) and found["SFT"] != found["training"]
    assert len(set().union(*found.values())) == 200
    again = [asked(env, n["training"] + i) for i in range(n["training"])]
    assert again != found["training"] and set(again) == set(found["training"]), "a new order"
    assert questions(env_of(write(tmp_path / "more.jsonl", sums(200))), "development", 9) == found["development"][:9]


def test_a_generator_with_few_tasks_is_asked_each_once(monkeypatch):
    """Five tasks played 256 times are five results: an interval over 256 would be far too narrow."""
    draw = lambda seed: task.Task(f"{seed % 5} + 1?", lambda think: "", lambda answer: 0.0)
    few = known.Known(task.Source("few", "", (), draw), True)
    monkeypatch.setattr(known, "open_known", lambda env, think: few)
    cfg = settings.Config(env="reasoning_gym:five", eval_n=256, sft_examples=100)
    assert settings.dev_seeds(cfg) == [DEV_SEEDS + i for i in range(5)] and len(settings.sft_seeds(cfg)) == 5


def test_a_task_that_cannot_be_had_or_does_not_come_costs_no_more_than_its_own_episode(monkeypatch):
    def draw(seed):
        if seed == DEV_SEEDS + 1:
            raise KeyError("no task")
        while seed == DEV_SEEDS + 2:
            pass
        return task.Task("1 + 1?", lambda think: "", lambda answer: 0.0)

    monkeypatch.setattr(known.Known, "seconds", 0.1)
    monkeypatch.setattr(known, "open_known", lambda env, think: known.Known(task.Source("few", "", (), draw), True))
    assert settings.dev_seeds(settings.Config(env="reasoning_gym:ill", eval_n=9)) == [DEV_SEEDS + i for i in range(3)]


def test_a_row_stays_on_its_side_when_others_are_added(tmp_path):
    few, many = (env_of(write(tmp_path / f"{n}.jsonl", sums(n))) for n in (100, 200))
    for side, first in RANGES.items():
        assert set(questions(few, side, few.how_many(first))) <= set(questions(many, side, many.how_many(first)))


def test_rows_of_a_held_out_file_are_never_trained_on(tmp_path):
    train, test = write(tmp_path / "train.jsonl", sums(100)), write(tmp_path / "test.jsonl", sums(60, first=80))
    env = env_of(train, f",held_out={test}")
    found = {side: set(questions(env, side, env.how_many(first))) for side, first in RANGES.items()}
    assert [len(found[side]) for side in ("training", "development", "held-out")] == [
        80 - len(found["development"]),
        len(found["development"]),
        60,
    ]
    assert not found["held-out"] & (found["training"] | found["development"]) and "20 rows" in env.source.about


def test_rows_that_contradict_each_other_are_told(tmp_path):
    file = write(tmp_path / "rows.jsonl", [*sums(30), {"question": "3 + 3?", "answer": 7}, {"question": "4 + 4?", "answer": "8.0"}])
    assert "2 rows whose question was there before, of which 1 have another answer (the first is line 31)" in env_of(file).source.about


def test_an_evaluation_plays_as_many_tasks_as_there_are(tmp_path):
    cfg = settings.Config(env=f"jsonl:{write(tmp_path / 'rows.jsonl', sums(100))}")
    settings.check(cfg)
    most = settings.make_env(cfg, 0).how_many(DEV_SEEDS)
    assert cfg.eval_n == 256 and len(settings.dev_seeds(cfg)) == most < 40 and len(settings.sft_seeds(cfg)) < 100
    cfg.eval_n = 5
    assert len(settings.dev_seeds(cfg)) == 5 and len(settings.dev_seeds(settings.Config(eval_n=300))) == 300


def test_another_seed_sees_the_rows_in_another_order(tmp_path):
    env = env_of(write(tmp_path / "rows.jsonl", sums(100)))
    first = [[asked(env, seed) for seed in settings.task_seeds(settings.Config(seed=s, num_tasks=8), 0)] for s in (0, 1)]
    assert first[0] != first[1]


# ------------------------------------------------------------------------------------------------ scorers


@pytest.mark.parametrize("scorer, right, earns, not_", [
    ("exact", "New  York", ("New York", " New\nYork "), ("new york", "New York City", "NewYork")),
    ("number", "1,072.50", ("1072.5", "$1,072.50", "2145/2", "+1072.5"), ("1072", "1e3", "1072.5.1", "one", "1072,5", "١٠٧٢", "-1072.5")),
    ("regex", "colou?r|[a-c]{2,3}", ("color", "colour", "abc"), ("colours", "a", "abcd")),
])  # fmt: skip
def test_scorers(tmp_path, scorer, right, earns, not_):
    file = write(tmp_path / "rows.jsonl", [{"prompt": f"{i}?", "answer": right} for i in range(30)])
    env = env_of(file, f",scorer={scorer}")
    env.reset(0)
    assert [scored(env, f"<answer>{x}</answer>")["exact"] for x in earns] == [1] * len(earns)
    assert [scored(env, f"<answer>{x}</answer>")["reward"] for x in not_] == [0] * len(not_)


def test_the_scorer_is_guessed_from_the_answers(tmp_path):
    words = [{"prompt": f"{i}?", "answer": "x" if i == 29 else i} for i in range(30)]
    assert "scored by exact" in env_of(write(tmp_path / "a.jsonl", words)).source.about
    assert "scored by number" in env_of(write(tmp_path / "b.jsonl", words[:-1])).source.about
    with pytest.raises(ValueError, match="line 30: the answer 'x' is no number"):
        env_of(tmp_path / "a.jsonl", ",scorer=number")
    with pytest.raises(ValueError, match="line 2: no regular expression"):
        env_of(write(tmp_path / "c.jsonl", [{"prompt": f"{i}?", "answer": "(" if i == 1 else "a"} for i in range(30)]), ",scorer=regex")


def test_one_answer_after_the_thinking_is_read():
    for reply, answer in (("<answer>7</answer>", "7"), ("<think>8 <answer>8</answer></think> so <answer> 7 </answer>.", "7"), ("7", None),
                          ("", None), ("<answer>7", None), ("</answer><answer>7</answer>", "7"),
                          ("<answer>7</answer><answer>8</answer>", None), ("<think><answer>7</answer>", None),
                          ("<answer></answer>", None), (f"<answer>{'7' * 10**5}</answer>", None),
                          ("<answer><answer>7</answer></answer>", None)):  # fmt: skip
        assert known.answer_of(reply, True) == answer, reply
    assert known.answer_of("so <answer>7</answer>", False) is None and known.answer_of(" <answer>7</answer>\n", False) == "7"


@given(
    st.text()
    | st.lists(st.sampled_from(["<answer>", "</answer>", "<think>", "</think>", "7", " ", "\x00", "9" * 400, "/", ".", "-", ","])).map(
        "".join
    )
)
@how(max_examples=100, deadline=None)
def test_any_reply_is_scored(tmp_path_factory, reply):
    file = tmp_path_factory.getbasetemp() / "sums.jsonl"
    if not file.exists():
        write(file, sums(30))
    env = env_of(file)
    env.reset(3)
    marks = scored(env, reply)
    assert marks["reward"] in (0, 1) and marks["scorer_failed"] == 0


def test_a_scorers_file_may_hold_a_dataclass(tmp_path):
    code = "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass Mark:\n    x: float\n\n"
    (tmp_path / "marks.py").write_text(code + "def half(reply, row):\n    return Mark(0.5).x\n")
    function, file = task.load_function(f"{tmp_path}/marks.py:half")
    assert function("", {}) == 0.5 and file == tmp_path / "marks.py"


def test_a_scorer_of_ones_own_gets_the_row_and_costs_its_episode_when_it_fails(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("""
def half(answer, row):
    return {"reward": 0.5 * (int(answer) == row["b"]["c"]), "close": 1}
def odd(answer, row):
    return {"nan": float("nan"), "none": None, "text": "x", "list": [], "no reward": {"x": 1}, "inf": float("inf")}[answer]
""")
    file = write(tmp_path / "rows.jsonl", [{"prompt": f"{i}?", "answer": "", "b": {"c": 3}} | {"answer": "?"} for i in range(30)])
    env = env_of(file, f",scorer={tmp_path}/mine.py:half")
    env.reset(0)
    assert scored(env, "<answer>3</answer>") == {"reward": 0.5, "exact": 0, "close": 1, "format": 1, "scorer_failed": 0}
    assert scored(env, "<answer>three</answer>") == {"reward": 0, "exact": 0, "format": 1, "scorer_failed": 1}
    assert "ValueError" in capsys.readouterr().err
    assert scored(env, "<answer>three</answer>")["scorer_failed"] == 1 and not capsys.readouterr().err  # told once
    env = env_of(file, f",scorer={tmp_path}/mine.py:odd")
    env.reset(0)
    for answer in ("nan", "none", "text", "list", "no reward", "inf", "missing"):
        marks = scored(env, f"<answer>{answer}</answer>")
        assert marks == {"reward": 0, "exact": 0, "format": 1, "scorer_failed": 1}, answer
    for scorer, words in (
        ("nowhere.py:f", "there is no file nowhere.py"),
        (f"{tmp_path}/mine.py:whole", "AttributeError"),
        ("numbr", "there is no file numbr"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            env_of(file, f",scorer={scorer}")


def test_a_regular_expression_that_runs_away_costs_its_episode(tmp_path, monkeypatch):
    monkeypatch.setattr(known.Known, "seconds", 0.3)
    env = guarded(
        lambda: env_of(write(tmp_path / "rows.jsonl", [{"prompt": f"{i}?", "answer": "(a+)+b"} for i in range(30)]), ",scorer=regex")
    )
    env.reset(0)
    env.step(f"<answer>{'a' * 60}</answer>")
    assert env.score() == {"reward": 0, "exact": 0, "format": 1, "scorer_failed": 1}  # left out it would pay to break it
    with pytest.raises(ValueError, match="--sft-steps 0"):
        check_environment(lambda: env.env)
    check_environment(lambda: env.env, expert=False)


# ------------------------------------------------------------------------------------------------ as any other environment


def test_preflight_plays_it_and_says_what_it_is(tmp_path, capsys):
    cfg = settings.Config(env=f"jsonl:{write(tmp_path / 'rows.jsonl', sums(100))}")
    settings.check(cfg)
    preflight(cfg)
    assert "rows to train on" in capsys.readouterr().out
    (tmp_path / "mine.py").write_text("def show(row):\n    return 'no'\n")
    cfg.env += f",expert={tmp_path}/mine.py:show"
    with pytest.raises(ValueError, match="the expert earns 0 and an empty reply 0.*docs/tasks.md"):
        preflight(cfg)
    cfg.sft_steps = 0
    preflight(cfg)


def test_its_name_says_which_rows(tmp_path):
    envs = [f"jsonl:{write(tmp_path / 'rows.jsonl', sums(n))}{option}" for n, option in ((30, ""), (30, ",scorer=number"))]
    first, same = (next(iter(settings.eval_sets(settings.Config(env=env)))) for env in envs)
    known.open_source.cache_clear()
    write(tmp_path / "rows.jsonl", sums(31))
    other = next(iter(settings.eval_sets(settings.Config(env=envs[0]))))
    assert first == same != other and first.startswith("rows ") and [settings.short(env) for env in envs] == ["rows"] * 2
    assert settings.short("reasoning_gym:letter_counting,min_words=2") == "letter_counting"


def test_a_changed_file_is_another_environment(tmp_path, capsys):
    env = f"jsonl:{write(tmp_path / 'rows.jsonl', sums(30))}"
    before = run_folder.code_hash(env)
    (tmp_path / "code.jsonl").write_text(json.dumps({"update": 0, "environment_code": before}) + "\n")
    run_folder.tell_changed(tmp_path, env)
    assert not capsys.readouterr().out
    write(tmp_path / "rows.jsonl", sums(31))
    assert run_folder.code_hash(env) != before
    run_folder.tell_changed(tmp_path, env)
    assert "not what this run was trained with" in capsys.readouterr().out


@pytest.mark.parametrize("env", ["letters", "alphabet", "swarm", "jsonl:ROWS"])
def test_every_file_of_ours_that_an_environment_imports_is_in_its_hash(env, tmp_path):
    rows = write(tmp_path / "rows.jsonl", sums(30))
    files = [file for file in settings.sources(env.replace("ROWS", str(rows))) if file.suffix == ".py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [name.name for name in getattr(node, "names", [])]
            ours = [ROOT / f"{name.replace('.', '/')}.py" for name in names if name]
            pay_nothing = ("metrics.py", "machine.py")
            missing = [path.name for path in ours if path.exists() and path not in files and path.name not in pay_nothing]
            assert not missing, f"{file.name} imports {missing}"


def test_a_run_folder_cannot_bring_its_own_scorer(tmp_path):
    code = ["jsonl:rows.jsonl,scorer=evil.py:f", "jsonl:rows.jsonl,scorer=evil.pyc:f", "reasoning_gym:x,expert=evil.py:f", "evil.so:Env"]
    code += ["jsonl:rows.jsonl,scorer=a,b.py:f", "x\ny.py:Env"]
    none = ["jsonl:rows.jsonl", "jsonl:rows.jsonl,held_out=t.jsonl,scorer=number", "reasoning_gym:x,words=3", "letters"]
    for env in [*code, *none]:
        if env in code:
            with pytest.raises(SystemExit, match="somebody's code"):
                run_folder.refuse_code(tmp_path, env, None)
        run_folder.refuse_code(tmp_path, env, env if env in code else None)


def test_a_run_on_rows_trains_resumes_and_is_evaluated(tmp_path):
    import warm

    tiny = "--updates 1 --sft-steps 1 --sft-examples 2 --sft-batch 2 --num-tasks 2 --k 2 --eval-n 4 --max-tokens 16 --threads 1 --no-wandb"
    env = f"jsonl:{write(tmp_path / 'rows.jsonl', sums(30))}"
    call = lambda *words: warm.run(["train.py", *words], ROOT, {"OMP_NUM_THREADS": "1"}, pictures=False)
    done = call("--env", env, *tiny.split(), "--runs", str(tmp_path), "--name", "run")
    assert done.returncode == 0 and "rows to train on" in done.stdout, done.stderr[-800:]
    done = call("--resume", str(tmp_path / "run"), "--updates", "2")
    assert done.returncode == 0 and "resumed" in done.stdout and "--updates was 1 before" in done.stdout, done.stderr[-800:]
    done = call("--eval-only", str(tmp_path / "run"), "--held-out", "--eval-n", "100")
    assert done.returncode == 0, done.stderr[-800:]
    last = json.loads((tmp_path / "run" / "evals.jsonl").read_text().splitlines()[-1])
    assert "held-out" in last["tasks"] and len(last["reward"]) == known.open_known(env, True).how_many(HELD_OUT_SEEDS)
    assert "scorer_failed" in last and (tmp_path / "run" / "report.html").exists()
    none = "import evaluate, sys, train; evaluate.seeds_from = lambda *given: []; sys.argv[0] = 'train.py'; train.main()"
    done = warm.run(["-c", none, "--eval-only", str(tmp_path / "run"), "--held-out"], ROOT, {"OMP_NUM_THREADS": "1"}, pictures=False)
    assert done.returncode == 1 and "has no tasks for it" in done.stderr and "Traceback" not in done.stderr
    write(tmp_path / "rows.jsonl", sums(31))  # its second half would be of other tasks
    done = call("--resume", str(tmp_path / "run"), "--updates", "3")
    assert done.returncode == 1 and "are not what they were" in done.stderr and "Traceback" not in done.stderr


def test_without_the_package_it_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="pip install -r requirements/tasks.txt"):
        settings.check(settings.Config(env="reasoning_gym:letter_counting"))


def test_the_rows_of_the_page_are_there_to_train_on():
    name = command(ROOT / "docs" / "tasks.md", "--env jsonl:learn/vowels.jsonl,held_out=")[1]
    env = known.open_known(name.replace("learn/", f"{ROOT}/learn/"), True)
    assert sum(map(env.how_many, (TRAIN_SEEDS, DEV_SEEDS))) == 200 and env.how_many(HELD_OUT_SEEDS) == 256


@pytest.mark.parametrize(
    "answer, written", [(0.00001, "0.00001"), (1e20, "100000000000000000000"), (72, "72"), (72.0, "72.0"), (-0.5, "-0.5")]
)
def test_a_number_is_written_out_so_that_a_scorer_of_numbers_knows_it(answer, written):
    row = rows.read_row(1, json.dumps({"question": "a?", "answer": answer}))
    assert row.answer == written and rows.as_number(row.answer) == Fraction(str(answer)) and rows.guess([row]) == "number"


# ------------------------------------------------------------------------------------------------ answers that would be run as Python


def test_only_small_sums_reach_a_scorer_that_runs_them():
    for answer in ("6*(98 - 54) - 34 - 66", "1*3*5 + 9", "-2.5/4", "-5*X**9 - 2*X**6/3 + C", "exp(x)*cos(x) + C", "(x + 1)**12"):
        assert is_small_sum(answer), answer
    for answer in ("9**9**9**9", "((9**99)**99)**99", "(2**3**4**5)", "__import__('os')", "x.real", "exit()", "a[0]", "lambda: 1", "1e999",
                   "factorial(9)", "9!", "'a'*9", "f(1)", "_", "1 if 2 else 3", "sin(1, a=__import__('os'))", "sin(1, **x)", "exp(x, y=1)",
                   "sin(*x)", "print(1)", "(" * 500, "1," * 9, "1+" * 5000 + "1"):  # fmt: skip
        assert not is_small_sum(answer), answer


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 60))
@how(max_examples=50, deadline=None)
def test_a_sum_is_not_larger_than_its_bits_say(a, b, n):
    for text in (f"{a}*{b} + {a}", f"{a}**{n}", f"({a} - {b})**{n} * {b}", f"-{a}*(-{b})"):
        found = bits(ast.parse(text, mode="eval").body)
        assert math.log2(abs(eval(text)) + 1) <= found + 1


def test_only_data_reaches_a_scorer_that_evals_it():
    for answer in ("[['Q', '_'], ['_', 'Q']]", "_ Q _\nQ _ _", "[1, -2]", "ABCDE", "0 1 0"):
        assert is_data(answer), answer
    for answer in ("__import__('os').system('true')", "[x for x in y]", "9**9**9", "a.b", "[0]*10**9", "f()"):
        assert not is_data(answer), answer
