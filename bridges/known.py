"""Known tasks as an environment: rows of a file, or a generator of the reasoning-gym package.

    python train.py --env jsonl:rows.jsonl
    python train.py --env jsonl:train.jsonl,held_out=test.jsonl,scorer=number
    python train.py --env reasoning_gym:letter_counting,min_words=2,max_words=4

Both ask one question, read the one answer inside <answer> and </answer>, and give it to a scorer.

Training, development and held-out tasks never meet. The range of a seed says for what it is
(settings.TRAIN_SEEDS and the others), and a hash of the question says on which side a task stands:
so a question that stands in a file twice, or that a generator draws again from another seed, is
always on one side, on any machine. SFT's demonstrations are training tasks too.

A scorer is somebody's code. If it raises, hangs or exits, its episode has reward 0 and
`scorer_failed` 1, and the first such error is printed. It is not left out, as the episode of a
broken environment is: what breaks a scorer is most often the reply, and a policy would learn to
break it.

    rows       One JSON object per line, in GSM8K's format: the answer stands after the last "####",
               what is before it is the derivation, and the expert of SFT thinks it before it
               answers. A file comes from anywhere, so it is read as if an enemy had written it:
               every refusal is a sentence with the line's number.
                   {"question": "Ann has 3 apples and buys 4. How many?", "answer": "3 + 4 #### 7"}
                   {"prompt": "What is the capital of France?", "answer": "Paris"}
    generators Question, answer and scorer are the package's (Stojanovski et al. 2025); many pay a
               part of 1, and `exact` is 1 only for full marks. A seed is tried again, with another
               number, until the question falls on the side that it is for. Python's own random
               numbers are seeded for the moment, because a generator draws from them. Some scorers
               run the answer as Python: such an answer is first read here, and what is more than a
               small sum, or a list of texts and numbers, is not shown to them.

Run me: `python -m bridges.known` shows a task of a small file, and what four replies earn; with the
words of an --env it shows a task of that, and with `reasoning_gym` the names of the generators.
"""

import ast
import hashlib
import json
import math
import random
import re
import runpy
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from functools import cache, lru_cache, partial
from pathlib import Path

from env_letters import split_thinking
from fast.machine import Hung, in_time

RANGE = 1_000_000_000  # seeds in each range of settings.py: training, SFT, development, …
SIDES = ("training", "training", "development", "held-out")  # … by range; all later are held out
TENTHS = 6 * ("training",) + 2 * ("development",) + 2 * ("held-out",)  # of all questions
LONGEST_ANSWER = 10_000  # characters; what is longer is no answer
OPTIONS = ("scorer", "expert", "held_out")  # of a file of rows
TRIES = 100  # for a generator's question on the right side: 0.8 ** 100 is nothing
# Scorers that run the answer as Python (eval, or sympy's parse_expr), by what an answer may be.
# coin_flip only reads a fraction, but 1e999999999 is one. A few integrals have "Integral(…)" for an
# answer, which is not let through: the question itself, so written, would earn full marks.
SUMS = """coin_flip countdown puzzle24 polynomial_multiplication simple_integration
intermediate_integration""".split()
LISTS = "n_queens string_insertion spiral_matrix binary_matrix".split()
DATA = (
    ast.Expression,
    ast.List,
    ast.Tuple,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.UnaryOp,
    ast.USub,
)
MOST_BITS = 5_000  # of a sum's largest number: 9**9**9 would never come back
NO_EXPERT = "give expert=FILE.py:FUNCTION, or --sft-steps 0"
HINT = "Think first inside <think> and </think> if that helps. Then give"
ASK = "the answer inside <answer> and </answer>."


@dataclass(frozen=True)
class Source:
    """Where tasks come from. A task is a dict with its "question"."""

    name: str  # of the set of tasks: the same name means the same tasks
    about: str  # a sentence to print before a run
    files: tuple[Path, ...]  # what decides the tasks: their hash is kept (checkpoint/state.json)
    draw: Callable[[int], dict]  # seed -> its task
    mark: Callable[[dict, str], object]  # task, answer -> a number, or a dict with "reward"
    say: Callable[[dict, bool], str]  # task, may it think? -> a right reply, or ValueError
    how_many: Callable[[str], int | None] = lambda side: None  # different ones; None: no end


# ------------------------------------------------------------------------------- the environment


class Known:
    """One question at a time."""

    tools = None
    max_turns = 1
    seconds = 20.0  # for a call: a regular expression may run away (bookkeeping/guard.py)

    def __init__(self, source: Source, think: bool):
        self.source, self.think = source, think

    def reset(self, seed: int) -> list[dict]:
        self.task, self.reply = self.source.draw(seed), ""
        question = self.task["question"].strip()
        gap = "\n\n" if "\n" in question else " "
        hint = HINT if self.think else "Do not think. Give"
        return [{"role": "user", "content": f"{question}{gap}{hint} {ASK}"}]

    def step(self, reply: str) -> tuple[list[dict], bool]:
        self.reply = reply
        return [], True

    def score(self) -> dict[str, float]:
        answer, failed = answer_of(self.reply, self.think), 0.0
        marks = {"reward": 0.0, "exact": 0.0, "format": float(answer is not None)}
        if answer is not None:
            try:
                marks |= marks_of(self.source.mark(self.task, answer))
            except (Exception, SystemExit, Hung) as error:  # any code, and any reply, may be in it
                failed = 1.0
                tell_once(f"a scorer failed ({type(error).__name__}: {str(error)[:200]!a})")
        return marks | {"scorer_failed": failed}

    def expert_reply(self) -> str:
        return self.source.say(self.task, self.think)

    def how_many(self, seed: int) -> int | None:
        """Different tasks in the range of this seed; None if there is no end of them."""
        return self.source.how_many(side_of_seed(seed))


def answer_of(reply: str, think: bool) -> str | None:
    """The text of the one answer after the thinking, or None. Never raises, whatever the reply."""
    rest = split_thinking(reply)[1]
    before, opened, inside = rest.partition("<answer>")
    body, closed, after = inside.partition("</answer>")
    if not (opened and closed) or "<answer>" in inside or "</answer>" in after:
        return None
    if not think and (before.strip() or after.strip() or "think>" in reply):
        return None
    body = body.strip()
    return body if 0 < len(body) <= LONGEST_ANSWER else None


def marks_of(value) -> dict[str, float]:
    """What a scorer returned as the entries of a score. Raises whatever if it cannot be one."""
    marks = dict(value) if isinstance(value, dict) else {"reward": value}
    marks = {str(name): float(mark) for name, mark in marks.items()}
    if not math.isfinite(marks["reward"]):
        raise ValueError(f"the reward is {marks['reward']}")
    return {"exact": float(marks["reward"] >= 1)} | marks


@cache
def tell_once(sentence: str) -> None:
    print(f"{sentence}; such a reply has reward 0", file=sys.stderr)


@cache
def different(env: str, first: int, n: int) -> list[int]:
    """Of a generator's n seeds, from `first` on, those whose task no earlier one has.

    Some have few, and a task that is played twice is one result, not two (of 256 that
    tower_of_hanoi gives, 19 differ). A seed whose task cannot be had stays: it costs its own
    episode, when it is played.
    """
    known, tasks = open_known(env, True), {}
    for seed in range(first, first + n):
        try:
            tasks.setdefault(in_time(known.seconds, known.reset, seed)[0]["content"], seed)
        except (Exception, Hung):
            tasks[seed] = seed
    return list(tasks.values())


@cache  # an environment is made for every episode
def open_source(env: str) -> Source:
    """The source that an --env names: 'jsonl:rows.jsonl,scorer=exact'.

    ValueError, in one sentence, if there is no such file, row, generator or scorer.
    """
    kind, _, rest = env.partition(":")
    name, *others = re.split(r",(?=\w+=)", rest)
    options = dict(other.split("=", 1) for other in others)
    try:
        return (open_rows if kind == "jsonl" else open_generator)(name, options)
    except (OSError, ValueError) as error:
        raise ValueError(f"--env {env}: {error}; see docs/tasks.md") from None


def open_known(env: str, think: bool) -> Known:
    return Known(open_source(env), think)


def side_of_seed(seed: int) -> str:
    return SIDES[min(seed // RANGE, len(SIDES) - 1)]


def side_of(question: str) -> str:
    """The side of a question, by its words: white space does not count."""
    digest = hashlib.sha256(" ".join(question.split()).encode()).digest()
    return TENTHS[int.from_bytes(digest[:8], "big") % 10]


def load_function(place: str, files: list[Path]) -> Callable:
    """The function of FILE.py:FUNCTION; its file joins the others. ValueError if there is none."""
    file, _, name = place.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"there is no file {file or place} of Python; give FILE.py:FUNCTION")
    files.append(Path(file))
    try:
        return runpy.run_path(file, run_name=f"yours_{Path(file).stem}")[name]
    except Exception as error:  # it may be any code
        raise ValueError(f"{place} cannot be used ({type(error).__name__}: {error})") from None


# ------------------------------------------------------------------------------------------ rows


# 72, 72.0, .5, 1e3, $72, \$72, -$72, 72% and 144/2: the sign, the number, what it is divided by.
NUMBER = re.compile(
    r"(?:\\?\$)?([-+]?)\s*(?:\\?\$)?\s*((?:\d{1,50}\.?\d{0,50}|\.\d{1,50})(?:e[-+]?\d{1,2})?)"
    r"(?:/([1-9]\d{0,49}))?\s*(?:\\?[$%])?\.?",
    re.ASCII | re.IGNORECASE,
)


def as_number(text: str) -> Fraction | None:
    """As NUMBER says, with commas (1,072) and a typographer's minus, too."""
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", text.strip().replace("\u2212", "-"))
    found = NUMBER.fullmatch(plain)
    return Fraction(found[1] + found[2].rstrip(".")) / int(found[3] or 1) if found else None


def as_words(text: str) -> list[str]:
    """An é is the same, whether it is one character or an e and its accent."""
    return unicodedata.normalize("NFC", text).split()


# How a scorer reads an answer: right is what reads as the row's answer does.
SCORERS = {"exact": as_words, "number": as_number}


def read_rows(file: str) -> list[dict]:
    """All rows of a file. ValueError names the line that is not one."""
    rows = []
    for line, raw in enumerate(Path(file).read_bytes().splitlines(), 1):
        try:
            if raw.strip(b"\xef\xbb\xbf \t"):  # a byte-order mark and white space are no row
                rows.append(read_row(line, raw))
        except ValueError as error:
            raise ValueError(f"{file}, line {line}: {error}") from None
    if not rows:
        raise ValueError(f"{file}: there is no row in it")
    return rows


def read_row(line: int, raw: bytes) -> dict:
    """A row from its line: question, thought (the derivation, or ""), answer, and the whole object.

    A scorer of one's own gets the whole object. ValueError says what is wrong with the line.
    """
    try:
        whole = json.loads(raw.decode("utf-8-sig"))
        json.dumps(whole, ensure_ascii=False).encode()  # half a character may be escaped in it
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON in UTF-8 ({str(error)[:200]})") from None
    if not isinstance(whole, dict) or ("question" in whole) == ("prompt" in whole):
        raise ValueError('a row is an object with one of "question" and "prompt", and an "answer"')
    question, answer = whole.get("question", whole.get("prompt")), whole.get("answer")
    if type(answer) in (int, float) and abs(answer) < 10**50:  # NaN is not
        answer = format(Decimal(repr(answer)), "f")  # 0.00001, not 1e-05
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ValueError("a question is a text, and an answer a text or a number")
    thought, _, right = answer.rpartition("####")
    if not question.strip() or not right.strip():
        raise ValueError("its question or its answer is empty")
    row = {"question": question, "thought": thought, "answer": right}
    return {name: text.strip() for name, text in row.items()} | {"line": line, "whole": whole}


def open_rows(file: str, options: dict[str, str]) -> Source:
    """The tasks of `--env jsonl:FILE`. ValueError if there are none, or if an option is wrong."""
    if unknown := [name for name in options if name not in OPTIONS]:
        raise ValueError(f"there is no option {unknown[0]}; {', '.join(OPTIONS)} are there")
    rows, held_out = read_rows(file), options.get("held_out")
    judged = read_rows(held_out) if held_out else []
    paths = [Path(file), *([Path(held_out)] if held_out else [])]
    kept, sides = without_repeats(rows, judged), {side: [] for side in TENTHS}
    sides["held-out"] += without_repeats(judged, [])
    for row in kept:
        side = side_of(row["question"])
        sides["training" if held_out and side == "held-out" else side].append(row)
    if not (sides["training"] and sides["development"]):
        raise ValueError(f"its {len(rows)} rows leave none to train on or none for development")
    numbers = all(as_number(row["answer"]) is not None for row in rows)
    scorer = options.get("scorer") or ("number" if numbers else "exact")
    expert = load_function(options["expert"], paths) if "expert" in options else None
    if read := SCORERS.get(scorer):
        for row in rows + judged:
            if read(row["answer"]) is None:
                told = f"the scorer {scorer} cannot read the answer {row['answer'][:40]!a}"
                raise ValueError(f"line {row['line']}: {told}")
        mark = lambda row, answer: read(answer) == read(row["answer"])
    else:
        function = load_function(scorer, paths)
        mark = lambda row, answer: function(answer, row["whole"])

    @lru_cache(maxsize=4)
    def order(side: str, which: int, turn: int) -> list[dict]:
        """The rows of a side in the order of a pass over them."""
        return random.Random(f"{which} {turn}").sample(sides[side], len(sides[side]))

    def say(row: dict, think: bool) -> str:
        """The expert's reply: it thinks the derivation, if there is one and it may, and answers."""
        if expert:
            return expert(row["whole"])
        thought = f"<think>\n{row['thought']}\n</think>\n" if think and row["thought"] else ""
        return f"{thought}<answer>{row['answer']}</answer>"

    def draw(seed: int) -> dict:
        side, (which, i) = side_of_seed(seed), divmod(seed, RANGE)
        turn, place = divmod(i, len(sides[side]))
        return order(side, which, turn)[place]

    counts = {side: len(some) for side, some in sides.items()}
    about = (
        f"{file}: {counts['training']} rows to train on, SFT's demonstrations among them; "
        f"{counts['development']} for development, {counts['held-out']} held out"
        f"{f' of {held_out}' if held_out else ''}; scored by {scorer}. "
        "Each is drawn once before any is drawn again, then in a new order. Left out: "
        f"{len(rows) - len(kept)} rows whose question was there before"
    )
    content = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    name = f"{Path(file).stem} {content[:8]}"
    return Source(name, about, tuple(paths), draw, mark, say, counts.get)


def without_repeats(rows: list[dict], others: list[dict]) -> list[dict]:
    """The rows whose question stands neither in the others nor further up."""
    words = lambda row: " ".join(row["question"].split())
    first = {words(row): row for row in reversed([*others, *rows])}
    return [row for row in rows if first[words(row)] is row]


# ------------------------------------------------------------------------------------ generators


def generators():
    """reasoning_gym's factory: DATASETS is {name: (its class, the class of its parameters)}."""
    try:
        from reasoning_gym import factory
    except ImportError:
        raise ValueError(
            "the package reasoning-gym is not installed; pip install reasoning-gym==0.1.25"
        ) from None
    return factory


def open_generator(name: str, options: dict[str, str]) -> Source:
    """The tasks of `--env reasoning_gym:NAME`. ValueError if there are none."""
    factory = generators()
    if name not in factory.DATASETS:
        raise ValueError(
            f"reasoning-gym has no {name or 'nameless generator'}; "
            "`python -m bridges.known reasoning_gym` lists all"
        )
    of_tasks, of_parameters = factory.DATASETS[name]
    files = [Path(sys.modules[of_tasks.__module__].__file__)]
    values = {option: read_value(value) for option, value in options.items()}
    expert = load_function(values.pop("expert"), files) if "expert" in values else None
    takes = [f.name for f in fields(of_parameters) if f.name not in ("seed", "size")]
    about = f"reasoning-gym's {name}({', '.join(takes)}), with its own scorer"
    try:
        make = partial(factory.create_dataset, name, size=1, **values)
        scorer = make(seed=0)
        scorer[0]
    except Exception as error:  # an assertion of the package, or a parameter that there is not
        raise ValueError(f"{about}, cannot be made ({type(error).__name__}: {error})") from None

    def say(entry: dict, think: bool) -> str:
        if expert:
            return expert(entry)
        if not isinstance(entry["answer"], str):
            raise ValueError(f"{name} tells no answer to show; {NO_EXPERT}")
        return f"<answer>{entry['answer']}</answer>"

    def mark(entry: dict, answer: str) -> float:
        """The package's marks; none for an answer that must not be run as Python."""
        if (name in SUMS and not is_small_sum(answer)) or (name in LISTS and not is_data(answer)):
            return 0.0
        return scorer.score_answer(answer, entry)

    @lru_cache(maxsize=64)  # the k episodes of a group ask for the same task
    def draw(seed: int) -> dict:
        """The first of the seed's tries that is on its side."""
        side, state = side_of_seed(seed), random.getstate()
        try:
            for i in range(TRIES):
                digest = hashlib.sha256(f"{seed} {i}".encode()).digest()
                number = int.from_bytes(digest[:4], "big")  # below 2**32, as NumPy wants its seeds
                random.seed(number)
                entry = make(seed=number)[0]
                if side_of(entry["question"]) == side:
                    return entry
        finally:
            random.setstate(state)
        raise ValueError(
            f"{name} has no {side} question in {TRIES} tries: it has too few questions"
        )

    shown_name = ",".join([name, *(f"{option}={value}" for option, value in values.items())])
    return Source(shown_name, about, tuple(files), draw, mark, say)


def read_value(text: str):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def is_data(answer: str) -> bool:
    """Is it no Python at all, or Python that is only lists, texts and numbers?"""
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return True  # eval would refuse it as well
    except (RecursionError, MemoryError):  # which eval might not run into
        return False
    return all(isinstance(node, DATA) for node in ast.walk(tree))


def is_small_sum(answer: str) -> bool:
    """Is it an expression of numbers, names and calls of a name, and is its value small?"""
    try:
        return bits(ast.parse(answer.strip(), mode="eval").body) <= MOST_BITS
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def bits(node) -> float:
    """At most so many bits has the value of an expression. ValueError if it is something else."""
    match node:
        case ast.Constant(value=int(x) | float(x)) if math.isfinite(x):
            return max(1, math.log2(abs(x) + 1))
        case ast.Name(id=name) if not name.startswith("_"):
            return 1
        case ast.Call(  # a pattern that does not name the keywords lets any of them through to eval
            func=ast.Name(id="sin" | "cos" | "tan" | "exp" | "log" | "sqrt"), args=[x], keywords=[]
        ):
            return bits(x) + 1
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=x):
            return bits(x)
        case ast.BinOp(left=x, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=y):
            return bits(x) + bits(y)
        case ast.BinOp(left=x, op=ast.Pow(), right=y):
            return bits(x) * 2 ** min(bits(y), 30)
    raise ValueError("not a sum")


if __name__ == "__main__":
    rows = Path(__file__).resolve().parents[1] / "learn/vowels.jsonl"
    words = sys.argv[1] if sys.argv[1:] else f"jsonl:{rows}"
    if words == "reasoning_gym":
        print(*sorted(generators().DATASETS), sep="\n")
        sys.exit()
    known = open_known(words, think=True)
    print(f"{known.source.about}\n\n{known.reset(0)[0]['content']}\n")
    said = known.expert_reply()
    right = answer_of(said, True)
    for reply in (said, f"<answer>{right}.00</answer>", "<answer>-1</answer>", right):
        known.step(reply)
        print(known.score()["reward"], repr(reply))
