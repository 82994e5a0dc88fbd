"""Known tasks as an environment: rows of a file, or a generator of the reasoning-gym package.

    python train.py --env jsonl:rows.jsonl
    python train.py --env jsonl:train.jsonl,held_out=test.jsonl,scorer=number
    python train.py --env reasoning_gym:letter_counting,min_words=2,max_words=4

Both ask one question, read the one answer inside <answer> and </answer>, and give it to a scorer.

Training, development and held-out tasks never overlap. A seed's range says what it is for
(settings.TRAIN_SEEDS and the others), and a hash of the question decides which side a task is on.
So a question that is in a file twice, or that a generator draws again from another seed, is always
on the same side, on any machine. SFT's demonstrations are training tasks too.

A scorer may be anybody's code. If it raises, hangs or exits, its episode has reward 0 and
`scorer_failed` 1, and the first such error is printed. The episode is not left out, as that of a
broken environment is: what breaks a scorer is most often the reply, and a policy would learn to
break it.

    rows       One JSON object per line, in GSM8K's format: the answer comes after the last "####",
               and the derivation before it; SFT's expert thinks the derivation, then answers. A
               file may come from anywhere, so it is read as if an enemy had written it: every
               refusal is a sentence with the line's number.
                   {"question": "Ann has 3 apples and buys 4. How many?", "answer": "3 + 4 #### 7"}
                   {"prompt": "What is the capital of France?", "answer": "Paris"}
    generators Question, answer and scorer are the package's (Stojanovski et al. 2025); many pay a
               part of 1, and `exact` is 1 only for full marks. A seed is tried again, with another
               number, until its question is on the right side. Python's own random numbers are
               seeded during the draw, because generators use them. Some scorers run the answer as
               Python: such an answer is checked here first, and the scorer never sees more than a
               small sum, or a list of texts and numbers.

Run me: `python -m bridges.known` shows a task of a small file, and what four replies earn; with an
argument as for --env it shows a task of that, and with `reasoning_gym` the names of the generators.
"""

import ast
import asyncio
import copy
import hashlib
import json
import math
import random
import re
import runpy
import sys
import unicodedata
from codecs import BOM_UTF8
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import cache, lru_cache, partial
from pathlib import Path

from env_letters import split_thinking
from fast.machine import first_line, in_time, undisturbed

RANGE = 1_000_000_000  # seeds in each range of settings.py: training, SFT, development, …
SIDES = ("training", "training", "development", "held-out")  # by range; later ones are held-out
TENTHS = 6 * ("training",) + 2 * ("development",) + 2 * ("held-out",)  # of all questions
LONGEST_ANSWER = 10_000  # characters; a longer text is not an answer
A_ROW = 'a row is a JSON object in UTF-8 with a "question" or "prompt" and an "answer"'
TRIES = 100  # for a question on the right side: 0.8 ** 100 is practically 0
MOST_BITS = 5_000  # of a sum's largest number: 9**9**9 would never come back
A_LIST = re.compile(r"[\w\s,'\"\[\]-]*")  # of texts and numbers: nothing that could be called
HINT = {  # {may the policy think?: what follows the question}
    True: "Think first inside <think> and </think> if that helps. Then give the answer inside "
    "<answer> and </answer>.",
    False: "Do not think. Give the answer inside <answer> and </answer>.",
}


# ------------------------------------------------------------------------------- the environment


class Known:
    """One question at a time. Rows and Generator, below, say which, and what an answer is worth:

    name                of the set of tasks: the same name means the same tasks
    about               a sentence to print before a run
    files               those that decide the tasks: a hash of them is kept (checkpoint/state.json)
    draw(seed)          a seed's task, a dict with its "question"
    mark(task, answer)  a number, or a dict with "reward"
    expert_reply()      a right reply, or ValueError
    """

    tools = None
    max_turns = 1
    seconds = 20.0  # per call: a regular expression may run forever (bookkeeping/refusals.py)
    think = True

    def reset(self, seed: int) -> list[dict]:
        self.task, self.reply = self.draw(seed), ""
        question = self.task["question"].strip()
        gap = "\n\n" if "\n" in question else " "
        return [{"role": "user", "content": f"{question}{gap}{HINT[self.think]}"}]

    def step(self, reply: str) -> tuple[list[dict], bool]:
        self.reply = reply
        return [], True

    def score(self) -> dict[str, float]:
        answer, failed = answer_of(self.reply, self.think), 0.0
        marks = {"reward": 0.0, "exact": 0.0, "format": float(answer is not None)}
        if answer is not None:
            try:
                marks |= marks_of(self.mark(copy.deepcopy(self.task), answer))
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:
                failed = 1.0
                tell_once(f"a scorer failed ({ascii(first_line(error))[1:-1]})")
        found = marks["exact"] >= 1 or self.stands_somewhere()
        return marks | {"found": float(found), "scorer_failed": failed}

    def stands_somewhere(self) -> bool:
        """Is the right answer anywhere in the reply? It measures the skill, whatever the format."""
        answer = self.task.get("answer")
        if not answer or not isinstance(answer, str):
            return False  # no answer to look for
        return bool(re.search(rf"(?<![\w.-]){re.escape(answer)}(?![\w.]*\w)", self.reply))

    def how_many(self, seed: int) -> int | None:
        """Different tasks in the range of this seed; None if unknown."""
        return None


def answer_of(reply: str, think: bool) -> str | None:
    """The text of the one answer after the thinking, or None. Never raises, whatever the reply."""
    rest = split_thinking(reply)[1]
    before, _, inside = rest.partition("<answer>")
    body, end_tag, after = inside.partition("</answer>")
    once = end_tag and "<answer>" not in inside and "</answer>" not in after
    alone = not (before.strip() or after.strip() or "think>" in reply)
    body = body.strip()
    return body if once and (think or alone) and 0 < len(body) <= LONGEST_ANSWER else None


def marks_of(value) -> dict[str, float]:
    """What a scorer returned, as the entries of a score. Raises anything if it cannot be one."""
    if asyncio.iscoroutine(value):  # an async def, as TRL takes them
        value = asyncio.run(value)
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
    """Of a generator's n seeds, from `first` on, those whose task no earlier seed has.

    Some generators have few tasks, and a task that is played twice is one result, not two (of 256
    that tower_of_hanoi gives, 19 differ). A seed whose task cannot be drawn stays: it costs its own
    episode when it is played.
    """
    known, seeds = open_known(env, True), {}
    for seed in range(first, first + n):
        try:
            task = in_time(known.seconds, known.draw, seed)["question"]
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException:
            task = seed
        seeds.setdefault(task, seed)
    return list(seeds.values())


@cache  # an environment is made for every episode
def open_source(env: str) -> Known:
    """The tasks that an --env names: 'jsonl:rows.jsonl,scorer=exact'.

    ValueError, in one sentence, if there is no such file, row, generator or scorer.
    """
    kind, _, rest = env.partition(":")
    name, *pairs = re.split(r",(?=\w+=)", rest)
    options = dict(pair.split("=", 1) for pair in pairs)
    try:
        with undisturbed():
            return (Rows if kind == "jsonl" else Generator)(name, **options)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a scorer's file, or the package, may raise anything
        ours = isinstance(error, ValueError | OSError)
        problem = str(error) if ours else first_line(error)
        raise ValueError(f"--env {env}: {problem}; see docs/tasks.md") from None


def open_known(env: str, think: bool) -> Known:
    known = copy.copy(open_source(env))
    known.think = think
    return known


def side_of_seed(seed: int) -> str:
    return SIDES[min(seed // RANGE, len(SIDES) - 1)]


def side_of(question: str) -> str:
    """The side of a question, from its words: white space does not count."""
    digest = hashlib.sha256(" ".join(question.split()).encode()).digest()
    return TENTHS[int.from_bytes(digest[:8], "big") % 10]


def load_function(place: str, files: list[Path]) -> Callable:
    """The function FILE.py:FUNCTION; its file is added to `files`. Raises what its code raises."""
    file, _, name = place.rpartition(":")
    files.append(Path(file))
    return runpy.run_path(file or place, run_name=f"yours_{Path(file).stem}")[name]


# ------------------------------------------------------------------------------------------ rows


# 72, 72.0, .5, 1e3, $72, \$72, -$72, €72, 72%, 144/2 and 71 2/2: the sign, the whole number before
# a fraction, the number, what it is divided by.
NUMBER = re.compile(
    r"(?:\\?\$|[€£])?([-+]?)\s*(?:(?:\\?\$|[€£])\s*)?(?:(\d{1,50}) +(?=\d+/))?"
    r"((?:\d{1,50}\.?\d{0,50}|\.\d{1,50})(?:e[-+]?\d{1,2})?)"
    r"(?:/([1-9]\d{0,49}))?\s*(?:\\?[$%]|[€£])?[.,]?",
    re.ASCII | re.IGNORECASE,
)
# A typographer's minus and fractions; the space keeps 1½ from being read as 11/2.
PLAIN = {0x2212: "-", 0xBC: " 1/4", 0xBD: " 1/2", 0xBE: " 3/4", 0x2153: " 1/3", 0x2154: " 2/3"}
# How fractions, powers of ten and degrees are written in LaTeX or print, and what NUMBER reads.
POWER = r"\s*\^\s*\{?([-+]?\d{1,2})\}?\Z"
NOTATIONS = {
    re.compile(
        r"\\[cdt]?frac\s*(?:\{\s*([-+]?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))(?!\d)", re.ASCII
    ): lambda m: f" {m[1] or m[2]}/{m[3] or m[4]}",
    re.compile("(?<=10)[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+"): lambda m: "^" + m[0].translate(RAISED),
    re.compile(r"(?<=\d)\s*(?:[x×·*]|\\times|\\cdot)\s*10" + POWER, re.ASCII): r"e\1",
    re.compile(r"(?<![\d.])10" + POWER, re.ASCII): r"1e\1",
    re.compile(r"\s*(?:°|\^\s*\{?\\circ\}?|\\degree)\Z"): "",
    # Commas between thousands (1,072, in LaTeX 1,\!072 or 1\,072), but not those in 0,125 or 12,34.
    re.compile(
        r"(?<![\d.,])[1-9]\d{0,2}(?:(?:,|\{,\}|,?\\!|\\,|[\u2009\u202f])\d{3})+(?![\d,])", re.ASCII
    ): lambda m: re.sub(r"\D", "", m[0]),
}
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
# LaTeX that mathematical models put around an answer: \boxed{\text{C}}.
AROUND = re.compile(
    r"\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\\(?:boxed|text|textbf|mathbf|mathrm)\{(.*)\}", re.S
)


# White space that says nothing: beside brackets and commas, before a LaTeX command, and on both
# sides of an operator. "5 -3" stays two numbers, and "1. 5" is not 1.5.
LOOSE = re.compile(r"\s*([()\[\]{},;])\s*|\s+([+*/=<>-])\s+|\s+(?=\\)")


def as_number(text: str) -> Fraction | None:
    """A text as a number, by NUMBER, PLAIN and NOTATIONS; bold or not."""
    plain = unwrapped(text.strip().removesuffix(".").strip("*")).translate(PLAIN)
    for notation, number in NOTATIONS.items():
        plain = notation.sub(number, plain)
    found = NUMBER.fullmatch(plain.strip())
    if not found:
        return None
    sign, whole, number, divisor = found.groups()
    part = Fraction(sign + number.rstrip(".")) / int(divisor or 1)
    return Fraction(f"{sign}{whole or 0}") + part


def as_words(text: str) -> list[str]:
    """A text as words. An é may be one character, or an e and its accent; bold or not."""
    plain = re.sub(r"\\(?:left|right)\b", "", unwrapped(text.strip().strip("*")))
    plain = re.sub(r"\\[dt]frac\b", r"\\frac", plain)
    plain = unicodedata.normalize("NFC", plain)
    return LOOSE.sub(lambda found: found[1] or found[2] or "", plain).split()


def unwrapped(text: str) -> str:
    """\\boxed{\\text{C}} -> C"""
    while found := AROUND.fullmatch(text.strip()):
        text = found[found.lastindex]
    return text


# How a scorer reads an answer. It is right if the row's answer reads the same.
SCORERS = {"exact": as_words, "number": as_number}


def read_rows(file: str) -> list[dict]:
    """All rows of a file. ValueError names the line that is not a row."""
    rows = []
    for line, raw in enumerate(Path(file).read_bytes().removeprefix(BOM_UTF8).splitlines(), 1):
        try:
            if raw.strip():
                rows.append(read_row(raw) | {"file": file, "line": line})
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:80]}"
            raise ValueError(f"{file}, line {line}: {A_ROW} ({problem})") from None
    return rows


def read_row(raw: bytes) -> dict:
    """A row from its line: question, thought (the derivation, or ""), answer, and the whole object.

    Your own scorer gets the whole object. Raises anything if the line is not a row.
    """
    whole = json.loads(raw.decode())
    # no NaN, and no half character (it may be escaped)
    json.dumps(whole, ensure_ascii=False, allow_nan=False).encode()
    question, answer = whole["question" if "question" in whole else "prompt"], whole["answer"]
    if type(answer) in (int, float):
        answer = format(Decimal(repr(answer)), "f")  # 0.00001, not 1e-05
    if type(question) is not str or type(answer) is not str:
        raise ValueError("both must be text, and no list of messages or the like")
    thought, _, right = answer.rpartition("####")
    if not question.strip() or answer_of(f"<answer>{right}</answer>", True) is None:
        raise ValueError("it asks nothing, or its answer could not be given inside <answer>")
    row = {"question": question, "thought": thought, "answer": right}
    return {name: text.strip() for name, text in row.items()} | {"whole": whole}


class Rows(Known):
    """The tasks of `--env jsonl:FILE`. Raises anything if there are none, or an option is wrong."""

    def __init__(self, file: str, scorer: str = "", expert: str = "", held_out: str = ""):
        rows = [row for name in (held_out, file) if name for row in read_rows(name)]
        row_of = {}  # {question: its first row}
        for row in rows:
            row_of.setdefault(" ".join(row["question"].split()), row)
        self.sides = {side: [] for side in TENTHS}
        for question, row in row_of.items():
            side = side_of(question)
            if held_out:  # all rows of the held_out file, and no others
                side = "training" if side == "held-out" else side
                side = "held-out" if row["file"] == held_out else side
            self.sides[side].append(row)
        if not (self.sides["training"] and self.sides["development"]):
            raise ValueError(f"its {len(rows)} rows leave none to train on or none for development")
        texts = [row for row in rows if as_number(row["answer"]) is None]
        example = "".join(f" ({r['file']}, line {r['line']} has no number)" for r in texts[:1])
        if texts and scorer == "number":
            raise ValueError(f"the scorer number cannot read all answers{example}")
        self.files = [Path(name) for name in (file, held_out) if name]
        self.expert = load_function(expert, self.files) if expert else None
        self.read = SCORERS.get(scorer)
        self.scorer = load_function(scorer, self.files) if scorer and not self.read else None
        by_row = f"number, but {len(texts)} by exact{example}" if texts else "number"
        counts = {side: len(rows_of_side) for side, rows_of_side in self.sides.items()}
        self.about = (
            f"{file}: {counts['training']} rows to train on, SFT's demonstrations among them; "
            f"{counts['development']} for development, {counts['held-out']} held out"
            f"{f' of {held_out}' if held_out else ''}; scored by {scorer or by_row}. "
            "Each is drawn once before any is drawn again, then in a new order. Left out: "
            f"{len(rows) - sum(counts.values())} rows whose question was there before"
        )
        content = hashlib.sha256(b"".join(path.read_bytes() for path in self.files)).hexdigest()
        self.name = f"{Path(file).stem} {content[:8]}"

    def draw(self, seed: int) -> dict:
        rows, (which, i) = self.sides[side_of_seed(seed)], divmod(seed, RANGE)
        turn, place = divmod(i, len(rows))
        return rows[shuffled(len(rows), f"{which} {turn}")[place]]

    def mark(self, row: dict, answer: str):
        if self.scorer:
            return self.scorer(answer, row["whole"])
        read = self.read or (as_words if as_number(row["answer"]) is None else as_number)
        return read(answer) == read(row["answer"])

    def expert_reply(self) -> str:
        """It thinks the derivation, if there is one and thinking is allowed, and answers."""
        row = self.task
        if self.expert:
            return self.expert(copy.deepcopy(row["whole"]))
        thought = f"<think>\n{row['thought']}\n</think>\n" if self.think and row["thought"] else ""
        return f"{thought}<answer>{row['answer']}</answer>"

    def how_many(self, seed: int) -> int:
        return len(self.sides[side_of_seed(seed)])


@lru_cache(maxsize=4)
def shuffled(n: int, key: str) -> list[int]:
    """0 … n-1 in the order of a pass over n rows."""
    return random.Random(key).sample(range(n), n)


# ------------------------------------------------------------------------------------ generators


class Generator(Known):
    """The tasks of `--env reasoning_gym:NAME`. Raises anything if there are none."""

    def __init__(self, name: str, expert: str = "", pay: str = "part", **options: str):
        from reasoning_gym.factory import DATASETS, create_dataset

        if name not in DATASETS:
            raise ValueError(
                f"reasoning-gym has no {name or 'nameless generator'}; "
                "`python -m bridges.known reasoning_gym` lists all"
            )
        if pay not in ("part", "full"):
            raise ValueError(f"pay={pay}: choose part or full (only full marks are paid)")
        of_tasks, _ = DATASETS[name]
        values = {option: read_value(value) for option, value in options.items()}
        self.make = partial(create_dataset, name, size=1, **values)
        self.scorer = self.make(seed=0)
        self.files = [Path(sys.modules[of_tasks.__module__].__file__)]
        self.expert = load_function(expert, self.files) if expert else None
        self.about = f"{self.scorer.config}, of reasoning-gym, with its own scorer"
        self.generator, self.pay = name, pay
        self.name = ",".join([name, *(f"{option}={value}" for option, value in values.items())])
        self.draw = lru_cache(maxsize=64)(self.draw)  # the k episodes of a group share one task

    def draw(self, seed: int) -> dict:
        """The first of the seed's tries that is on its side."""
        side, state = side_of_seed(seed), random.getstate()
        try:
            for i in range(TRIES):
                digest = hashlib.sha256(f"{seed} {i}".encode()).digest()
                number = int.from_bytes(digest[:4], "big")  # below 2**32, as NumPy wants its seeds
                random.seed(number)
                entry = self.make(seed=number)[0]
                if side_of(entry["question"]) == side:
                    return entry
        finally:
            random.setstate(state)
        raise ValueError(
            f"{self.name} has no {side} question in {TRIES} tries: it has too few questions"
        )

    def mark(self, entry: dict, answer: str) -> float:
        """The package's marks; 0 for an answer that must not be run as Python.

        And no full marks for another number: coin_flip pays 0, which begins 0.625, in full.
        """
        if self.generator in CHECKS and not CHECKS[self.generator](answer):
            return 0.0
        value = self.scorer.score_answer(answer, entry)
        said, right = as_number(answer), as_number(str(entry["answer"]))
        if value >= 1 and None not in (said, right) and abs(said - right) > 0.01 * abs(right):
            return 0.0
        return float(value >= 1) if self.pay == "full" else value

    def expert_reply(self) -> str:
        if self.expert:
            return self.expert(copy.deepcopy(self.task))
        if not isinstance(self.task["answer"], str):
            raise ValueError(
                f"{self.name} tells no answer to show; give expert=FILE.py:FUNCTION, or "
                "--sft-steps 0"
            )
        return f"<answer>{self.task['answer']}</answer>"


def read_value(text: str):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def is_data(answer: str) -> bool:
    """Is it only words, numbers and lists of these, without a call or a loop?"""
    return bool(A_LIST.fullmatch(answer)) and "for" not in answer  # "['a'for a in'aa']" is a loop


def is_small_sum(answer: str) -> bool:
    """Is it an expression of numbers, names and calls of a name, and is its value small?"""
    try:
        return bits(ast.parse(answer.strip(), mode="eval").body) <= MOST_BITS
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def bits(node) -> float:
    """The most bits that the value of an expression can have. ValueError if it is not one."""
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


# {generator whose scorer runs the answer as Python (eval, or sympy's parse_expr): the check of the
# answer}. coin_flip only reads a fraction, but 1e999999999 is one. A few integrals have
# "Integral(…)" as the answer, which is not allowed: the question itself, written like that, would
# earn full marks.
SUMS = """coin_flip countdown puzzle24 polynomial_multiplication simple_integration
intermediate_integration""".split()
LISTS = "n_queens string_insertion spiral_matrix binary_matrix".split()
CHECKS = dict.fromkeys(SUMS, is_small_sum) | dict.fromkeys(LISTS, is_data)


if __name__ == "__main__":
    rows = Path(__file__).resolve().parents[1] / "learn/vowels.jsonl"
    words = sys.argv[1] if sys.argv[1:] else f"jsonl:{rows}"
    if words == "reasoning_gym":
        from reasoning_gym.factory import DATASETS

        print(*sorted(DATASETS), sep="\n")
        sys.exit()
    known = open_known(words, think=True)
    print(f"{known.about}\n\n{known.reset(0)[0]['content']}\n")
    right = known.expert_reply()
    for reply in (right, f"So: {right}", "<answer>-1</answer>", "no tags"):
        known.step(reply)
        print(known.score()["reward"], repr(reply))
