"""Protects known tasks (bridges/known.py): bad rows are refused by their line, sides never meet, a
scorer cannot end a run. What needs reasoning-gym is in tests/verifiers/test_gym.py."""

import json
from pathlib import Path

import pytest

import settings
import warm
from bookkeeping import folder as run_folder
from bookkeeping import refusals
from bridges import known
from evaluate import HELD_OUT_SEEDS
from helpers import refusal
from helpers import write_lines as write
from settings import DEV_SEEDS, SFT_SEEDS, TRAIN_SEEDS

RANGES = {"training": TRAIN_SEEDS, "development": DEV_SEEDS, "held-out": HELD_OUT_SEEDS}
FAILED = {"reward": 0, "exact": 0, "format": 1, "found": 0, "scorer_failed": 1}


def sums(n: int, first: int = 0) -> list[dict]:
    numbers = range(first, first + n)
    return [{"question": f"{a} + {a}?", "answer": f"twice {a} #### {2 * a}"} for a in numbers]


def env_of(file: Path, options: str = "", think: bool = True) -> known.Known:
    known.open_source.cache_clear()
    return known.open_known(f"jsonl:{file}{options}", think)


def asked(env, seed: int) -> str:
    return env.reset(seed)[0]["content"]


def scored(env, answer: str) -> dict:
    env.step(f"<answer>{answer}</answer>")
    return env.score()


# ------------------------------------------------------------------------------------------- rows


def test_gsm8k_works_as_it_is_downloaded(tmp_path):
    """The derivation, calculator marks, ####, the number; the expert thinks the derivation."""
    answer = "3 + 4 = <<3+4=7>>7\nShe has 7.\n#### 7"
    rows = [{"question": f"Ann has 3 apples. ({i})", "answer": answer} for i in range(30)]
    file = write(tmp_path / "train.jsonl", rows)
    env, plain = env_of(file), env_of(file, think=False)
    assert asked(env, 0).startswith("Ann has 3 apples.") and "Do not think" in asked(plain, 0)
    derived = "<think>\n3 + 4 = <<3+4=7>>7\nShe has 7.\n</think>\n<answer>7</answer>"
    assert env.expert_reply() == derived and plain.expert_reply() == "<answer>7</answer>"
    right = {"reward": 1, "exact": 1, "format": 1, "found": 1, "scorer_failed": 0}
    assert scored(env, "7") == right == scored(env, "7.0")
    assert [scored(env, x)["reward"] for x in ("7.0", "8", "7 apples", "")] == [1, 0, 0, 0]
    plain.step(derived)
    assert plain.score()["reward"] == 0
    for reply, found in {
        "It is 7.": 1,
        "7, surely": 1,
        "17": 0,
        "7.5": 0,
        "-7": 0,
        "7x": 0,
    }.items():
        env.step(reply)
        assert env.score()["found"] == found and env.score()["exact"] == 0, reply


@pytest.mark.parametrize(
    "line",
    [
        b'{"question": "a", "answer": "b"',
        b"[1, 2]",
        b'{"question": "a"}',
        b'{"question": 3, "answer": "b"}',
        b'{"question": "  ", "answer": "b"}',
        b'{"question": "a", "answer": true}',
        b'{"question": "a", "answer": NaN}',
        b'{"question": "a", "answer": ' + b"9" * 5000 + b"}",
        b'{"question": "a", "answer": "why #### "}',
        b'{"question": "a", "answer": "</think> could never be right"}',
        b'{"question": "\\ud800", "answer": "b"}',
        b'{"question": "caf\xe9", "answer": "b"}',
        '{"question": "a", "answer": "b"}'.encode("utf-16"),
        b"[" * 100_000,
    ],
)
def test_a_bad_row_is_refused_with_its_line_number(tmp_path, line):
    file = tmp_path / "rows.jsonl"
    good = b'{"question": "1 + 1?", "answer": 2}'
    file.write_bytes(b"\xef\xbb\xbf" + good + b"\r\n\n" + line + b"\n")
    told = refusal(ValueError, refusals.check, settings.Config(env=f"jsonl:{file}"))
    assert f"{file}, line 3: {known.A_ROW} " in told


@pytest.mark.parametrize(
    "options, words",
    [
        ("empty.jsonl", "leave none"),
        ("nowhere.jsonl", "No such file"),
        ("some.jsonl,scores=exact", "unexpected keyword argument 'scores'"),
        ("some.jsonl,scorer=numbr", "No such file or directory: '.*numbr'"),
    ],
)
def test_a_file_without_rows_or_a_wrong_option_is_refused(tmp_path, options, words):
    (tmp_path / "empty.jsonl").write_bytes(b"\xef\xbb\xbf\n \r\n")
    write(tmp_path / "some.jsonl", sums(30))
    with pytest.raises(ValueError, match=words):
        env_of(tmp_path / options)


# ------------------------------------------------------------------------------------------ sides


def questions(env, side: str) -> list[str]:
    return [asked(env, RANGES[side] + i) for i in range(env.how_many(RANGES[side]))]


def test_training_development_and_held_out_rows_never_meet(tmp_path):
    env = env_of(write(tmp_path / "rows.jsonl", sums(200) + sums(50)))  # the first fifty twice
    assert "50 rows whose question was there before" in env.about
    found = {side: questions(env, side) for side in RANGES}
    n = len(found["training"])
    assert sum(map(len, found.values())) == 200 == len(set().union(*found.values()))
    shown = [asked(env, SFT_SEEDS + i) for i in range(n)]
    again = [asked(env, n + i) for i in range(n)]  # a second pass
    assert set(shown) == set(again) == set(found["training"])
    assert len({tuple(order) for order in (shown, again, found["training"])}) == 3
    few = env_of(write(tmp_path / "few.jsonl", sums(100)))  # a row stays on its side
    assert all(set(questions(few, side)) <= set(found[side]) for side in RANGES)


def test_rows_of_a_held_out_file_are_never_trained_on(tmp_path):
    train = write(tmp_path / "train.jsonl", sums(100))
    test = write(tmp_path / "test.jsonl", sums(60, first=80))
    env = env_of(train, f",held_out={test}")
    found = {side: set(questions(env, side)) for side in RANGES}
    assert len(found["held-out"]) == 60 and "20 rows" in env.about
    assert len(found["training"]) + len(found["development"]) == 80
    assert not found["held-out"] & (found["training"] | found["development"])


def test_a_generator_with_few_tasks_is_asked_each_once(monkeypatch):
    """Five tasks played 256 times are five results. One that does not come, costs no more than its
    own episode, later."""

    def draw(seed):
        while seed == DEV_SEEDS + 8:
            pass
        return {"question": f"{seed % 5} + 1?"}

    few = known.Known()
    few.draw, few.seconds = draw, 0.1
    monkeypatch.setattr(known, "open_known", lambda env, think: few)
    cfg = settings.Config(env="reasoning_gym:five", eval_n=64)
    assert settings.dev_seeds(cfg) == [DEV_SEEDS + i for i in (0, 1, 2, 3, 4, 8)]


# ---------------------------------------------------------------------------------------- scorers


@pytest.mark.parametrize(
    "scorer, right, earns, not_",
    [
        ("exact", "New  York", ["New York", " New\nYork "], ["new york", "NewYork"]),
        ("exact", "caf\u00e9", ["cafe\u0301"], ["cafe"]),
        (
            "number",
            "-1,072.50",
            [
                "-1072.5",
                "-$1,072.50",
                "\u22121072.5",
                "-2145/2",
                "-1.0725e3",
                "-1072.5%.",
                "**-€1072.5**",
            ],
            [
                "1072.5",
                "-1072,5",
                "-1072,500",
                "-1,0725",
                "-1072.5 apples",
                "-١٠٧٢.5",
                "-1/0",
                "-1e999",
                "9" * 9999,
            ],
        ),
        ("number", "0.5", [".5", "1/2", "50e-2", "\\$0.5", "$.5", "½"], ["5", ".", "$", "", "0,5"]),
        ("number", "125", ["125", "£125"], ["0,125", "1½", "12 5", "12 5/1", "\\frac{12}{5}"]),
        # as models of mathematics write
        (
            "exact",
            "C",
            ["\\boxed{C}", "$\\boxed{\\text{C}}$", "\\(C\\)"],
            ["\\boxed{D}", "\\boxed{}"],
        ),
        ("exact", "\\boxed{2\\text{ cm}}", ["2\\text{ cm}"], ["2 cm"]),
        ("exact", "\\left(\\frac{\\pi}{2}\\right)", ["**(\\dfrac{\\pi}{2})**"], ["(\\pi/2)"]),
        ("exact", "[0, \\infty)", ["[0,\\infty)", "\\left[ 0, \\infty \\right)"], ["[0,\\inf ty)"]),
        ("exact", "New York, 1 2", ["New  York ,1 2"], ["NewYork, 1 2", "New York, 12"]),
        ("exact", "x + 5 \\sqrt{3}", ["x+5\\sqrt{3}", "x + 5\\sqrt{ 3 }"], ["x +5 \\sqrt{3}"]),
        ("exact", "5 - 3 a", ["5-3 a"], ["5 -3 a", "5 -3a"]),
        ("exact", "v 1.5", ["v  1.5"], ["v 1. 5", "v 1 .5"]),
        ("number", "306,\\!956.63", ["306956.63", "306{,}956.63", "\\boxed{306,956.63}"], ["306"]),
        (
            "number",
            "-1\\frac{3}{10}",
            ["-1.3", "-13/10", "-1 3/10", "$-\\dfrac{13}{10}$", "**\\boxed{-\\frac{13}{10}}**"],
            ["1 3/10", "-13/100", "-1 3", "\\frac{-1}{}", "-1\\frac{3}{0}"],
        ),
        (
            "number",
            "7.3 \\times 10^{-1}",
            ["0.73", "7.3×10⁻¹", "7.3 x 10^-1", "73*10^-2"],
            ["7.3", "7.3 10^-1", "7.3^-1", "7.3×10", "7.31"],
        ),
        (
            "number",
            "10^4",
            ["10000", "10⁴", "1\\times10^4", "10\\,000", "10000,"],
            ["104", "10", "10^"],
        ),
        ("number", "540", ["**540**.", "\\boxed{540}.", "\\(540\\)."], ["54.0.", "540.1."]),
        ("number", "90^\\circ", ["90", "90°", "$90^{\\circ}$"], ["9", "90^", "90^1"]),
        (
            "number",
            "\\frac{-1}{2}",
            ["-.5", "-\\frac 1{2}"],
            ["\\frac12", "-\\frac{1}{2}3", "-12", "-\\frac{-1}{2}"],
        ),
    ],
)
def test_scorers(tmp_path, scorer, right, earns, not_):
    rows = [{"prompt": f"{i}?", "answer": right} for i in range(30)]
    env = env_of(write(tmp_path / "rows.jsonl", rows), f",scorer={scorer}")
    env.reset(0)
    assert [scored(env, x)["exact"] for x in earns] == [1] * len(earns)
    assert [scored(env, x)["reward"] for x in not_] == [0] * len(not_)


def test_the_scorer_is_guessed_from_the_answers_and_has_to_read_them(tmp_path):
    answers = [*range(28), 0.00001, 1e20]
    rows = [{"prompt": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
    assert "scored by number." in env_of(write(tmp_path / "b.jsonl", rows)).about
    file = write(tmp_path / "a.jsonl", [*rows, {"prompt": "?", "answer": "("}])
    mixed = env_of(file)
    assert f"scored by number, but 1 by exact ({file}, line 31 has no number)" in mixed.about
    paid = []
    for answer, reply in (("(", "("), ("(", ")"), ("18", "18.0"), ("18", "180")):
        mixed.task = {"answer": answer}
        paid.append(scored(mixed, reply)["exact"])
    assert paid == [1, 0, 1, 0], "each row by what its answer is"
    with pytest.raises(ValueError, match="number cannot read all answers .*line 31"):
        env_of(file, ",scorer=number")


@pytest.mark.parametrize(
    "reply, answer",
    [
        ("<answer>7</answer>", "7"),
        ("<think>8 <answer>8</answer></think> so <answer> 7 </answer>.", "7"),
        ("7", None),
        ("<answer>7", None),
        ("<answer>7</answer><answer>8</answer>", None),
        ("<think><answer>7</answer>", None),
        ("<answer></answer>", None),
        (f"<answer>{'7' * 10**5}</answer>", None),
    ],
)
def test_one_answer_after_the_thinking_is_read(reply, answer):
    assert known.answer_of(reply, True) == answer
    assert known.answer_of(f"so {reply}", False) is None


def test_a_scorer_of_ones_own_gets_the_row_and_cannot_end_a_run(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("""
from __future__ import annotations
from asyncio import CancelledError
from dataclasses import dataclass
@dataclass
class Mark:
    x: float
def half(answer, row):
    return {"reward": Mark(0.5 * (int(answer) == row["b"]["c"])).x, "close": 1}
async def later(answer, row):
    return half(answer, row)
def odd(answer, row):
    if answer in ("exit", "cancel"):
        raise SystemExit if answer == "exit" else CancelledError
    while answer == "hang":
        pass
    return {"nan": float("nan"), "text": "x", "list": [], "no reward": {"x": 1}}[answer]
""")
    rows = [{"prompt": f"{i}?", "answer": "?", "b": {"c": 3}} for i in range(30)]
    file = write(tmp_path / "rows.jsonl", rows)
    marks = {"reward": 0.5, "exact": 0, "close": 1, "format": 1, "found": 0, "scorer_failed": 0}
    for name in ("later", "half"):
        env = env_of(file, f",scorer={tmp_path}/mine.py:{name}")
        env.reset(0)
        assert scored(env, "3") == marks and scored(env, "three") == FAILED
    assert "ValueError" in capsys.readouterr().err
    env = refusals.guarded(lambda: env_of(file, f",scorer={tmp_path}/mine.py:odd"))
    env.env.seconds = 0.3
    env.reset(0)
    for answer in ("nan", "text", "list", "no reward", "missing", "exit", "cancel", "hang"):
        assert scored(env, answer) == FAILED, answer  # left out it would pay to break it
    with pytest.raises(ValueError, match="mine.py:whole: KeyError"):
        env_of(file, f",scorer={tmp_path}/mine.py:whole")


# ------------------------------------------------------------------- as any other environment


@pytest.mark.parametrize("code", ["jsonl:r.jsonl,scorer=a,b.py:f", "reasoning_gym:x,expert=a.py:f"])
def test_a_run_folder_cannot_bring_its_own_scorer(tmp_path, code):
    (tmp_path / "config.json").write_text(json.dumps({"env": code}))
    with pytest.raises(SystemExit, match="code from a file"):
        run_folder.open_saved("--resume", tmp_path, settings.Config())
    assert run_folder.open_saved("--resume", tmp_path, settings.Config(env=code))[0].env == code
    assert not run_folder.CODE.search("jsonl:r.jsonl,held_out=t.jsonl,scorer=number")


def test_a_run_on_rows_trains_resumes_and_is_evaluated(tmp_path):
    tiny = (
        "--updates 1 --sft-steps 1 --sft-examples 2 --sft-batch 2 --num-tasks 2 --k 2 --eval-n 4 "
        "--max-tokens 16 --threads 1 --no-wandb --name run --runs"
    )
    env, run = f"jsonl:{write(tmp_path / 'rows.jsonl', sums(30))}", str(tmp_path / "run")

    def call(*words: str):
        return warm.run(["train.py", *words], pictures=False)

    done = call("--env", env, *tiny.split(), str(tmp_path))
    assert done.returncode == 0 and "rows to train on" in done.stdout, done.stderr[-800:]
    done = call("--resume", run, "--updates", "2")
    assert done.returncode == 0 and "resumed" in done.stdout, done.stderr[-800:]
    done = call("--eval-only", run, "--held-out", "--eval-n", "100")
    assert done.returncode == 0, done.stderr[-800:]
    last = json.loads((tmp_path / "run" / "evals.jsonl").read_text().splitlines()[-1])
    assert "held-out" in last["tasks"] and "scorer_failed" in last
    assert len(last["reward"]) == env_of(tmp_path / "rows.jsonl").how_many(HELD_OUT_SEEDS)
    write(tmp_path / "rows.jsonl", sums(31))  # its second half would be of other tasks
    done = call("--resume", run, "--updates", "3")
    assert done.returncode == 1 and "are not what they were" in done.stderr


# -------------------------------------------------------------- answers that would be run as Python


SUMS = ["6*(98 - 54) - 34", "-2.5/4", "-5*X**9 - 2*X**6/3 + C", "exp(x)*cos(x)", "(x + 1)**12"]
NO_SUMS = [
    *("9**9**9**9", "((9**99)**99)**99", "__import__('os')", "x.real", "exit()", "a[0]", "_"),
    *("lambda: 1", "1e999", "9!", "'a'*9", "f(1)", "1 if 2 else 3", "sin(1, **x)", "sin(*x)"),
    *("sin(1, a=__import__('os'))", "(" * 500, "1," * 9, "1+" * 5000 + "1"),
]
DATA = ["[['Q', '_'], ['_', 'Q']]", "_ Q _\nQ _ _", "[1, -2]", "ABCDE", "0 1 0"]
NO_DATA = ["__import__('os').system('true')", "[x for x in y]", "9**9**9", "a.b", "f()"]


@pytest.mark.parametrize(
    "passes, good, bad",
    [(known.is_small_sum, SUMS, NO_SUMS), (known.is_data, DATA, [*NO_DATA, "1+" * 20_000 + "f()"])],
)
def test_only_small_sums_and_data_reach_a_scorer_that_runs_them(passes, good, bad):
    assert (
        [text for text in good if not passes(text)] == [text for text in bad if passes(text)] == []
    )
