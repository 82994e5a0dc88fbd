"""Tasks from a file of JSON Lines: a question and its answer in every row.

    {"question": "Ann has 3 apples and buys 4. How many has she?", "answer": "3 + 4 = 7 #### 7"}
    {"prompt": "What is the capital of France?", "answer": "Paris"}

The first is GSM8K's format, as it is downloaded: the answer stands after the last "####", what is
before it is the derivation, and the expert of SFT thinks it before it answers. A row may have more
keys; a scorer of one's own gets the whole row.

A file comes from anywhere, so it is read as if an enemy had written it: every refusal is a sentence
with the line's number.
"""

import hashlib
import json
import random
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path

from bridges.task import RANGE, Source, Task, load_function, side_of, side_of_seed

LONGEST_ROW = 1_000_000  # bytes
OPTIONS = ("scorer", "expert", "held_out")


@dataclass(frozen=True)
class Row:
    line: int
    question: str
    thought: str  # the derivation; "" if there is none
    answer: str
    whole: dict  # as it stands in the file


# ---------------------------------------------------------------------------------- scorers


def exact(answer: str, right: str) -> bool:
    """The same text; white space counts as one space."""
    return answer.split() == right.split()


def number(answer: str, right: str) -> bool:
    """The same number: 72, 72.0, $72, 72%, 1,072 and 144/2 are read."""
    said = as_number(answer)
    return said is not None and said == as_number(right)


def regex(answer: str, right: str) -> bool:
    """The row's answer is a regular expression, and fits the whole answer."""
    return re.fullmatch(right, answer) is not None


SCORERS = {"exact": exact, "number": number, "regex": regex}


def as_number(text: str) -> Fraction | None:
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", text.strip().strip("$%").strip().rstrip("."))
    digits = r"[-+]?\d{1,50}(\.\d{0,50})?(/[1-9]\d{0,49})?"
    if not re.fullmatch(digits, plain, re.ASCII):
        return None
    over, _, under = plain.partition("/")
    return Fraction(over.rstrip(".")) / int(under or 1)


# -------------------------------------------------------------------------------------- rows


def read_rows(file: str) -> list[Row]:
    """All rows of a file. ValueError names the line that is not one; OSError as open has it."""
    path, rows = Path(file), []
    if not path.is_file():
        raise ValueError(f"there is no file {file}")
    with open(path, "rb") as lines:
        number = 0
        while line := lines.readline(LONGEST_ROW + 1):
            number += 1
            place = f"{file}, line {number}"
            if len(line) > LONGEST_ROW:
                raise ValueError(f"{place}: it is longer than {LONGEST_ROW:,} bytes")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                raise ValueError(f"{place}: it is not UTF-8; save the file as UTF-8") from None
            if text:
                try:
                    rows.append(read_row(number, text))
                except ValueError as error:
                    raise ValueError(f"{place}: {error}") from None
    if not rows:
        raise ValueError(f"{file}: there is no row in it")
    return rows


def read_row(line: int, text: str) -> Row:
    """A row from its line. ValueError says what is wrong with it."""
    try:
        whole = json.loads(text, parse_constant=not_a_number)
        json.dumps(whole, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half a character (a lone surrogate) stands in it") from None
    except NaN:
        raise ValueError("NaN and Infinity are no JSON") from None
    except (ValueError, RecursionError) as error:
        why = getattr(error, "msg", "too large or too deep")
        raise ValueError(f"it is no JSON ({why})") from None
    if not isinstance(whole, dict):
        kind = type(whole).__name__
        raise ValueError(f'a row is an object such as {{"question": …, "answer": …}}, not a {kind}')
    asked = [key for key in ("question", "prompt") if key in whole]
    if len(asked) != 1:
        raise ValueError('a row has one of "question" and "prompt"')
    question = whole[asked[0]]
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f'"{asked[0]}" is not a text')
    if "answer" not in whole:
        raise ValueError('there is no "answer" in it')
    answer = whole["answer"]
    if type(answer) in (int, float) and abs(answer) < 10**50:
        answer = format(Decimal(repr(answer)), "f")  # 0.00001, not 1e-05
    if not isinstance(answer, str):
        raise ValueError('"answer" is neither a text nor a number')
    thought, _, right = answer.rpartition("####")
    if not right.strip():
        raise ValueError('"answer" is empty')
    return Row(line, question.strip(), thought.strip(), right.strip(), whole)


class NaN(Exception):
    pass


def not_a_number(name: str):
    raise NaN


# ------------------------------------------------------------------------------------ source


def open_rows(file: str, options: dict[str, str]) -> Source:
    """The tasks of `--env jsonl:FILE`. ValueError if there are none, or if an option is wrong."""
    for name in options:
        if name not in OPTIONS:
            raise ValueError(f"there is no option {name}; {', '.join(OPTIONS)} are there")
    rows, paths, said = read_rows(file), [Path(file)], []
    sides = {side: [] for side in ("training", "development", "held-out")}
    if held_out := options.get("held_out"):
        paths.append(Path(held_out))
        sides["held-out"] = without_repeats(read_rows(held_out), {}, said, held_out)
    known = {words(row): row for row in sides["held-out"]}
    for row in without_repeats(rows, known, said, file):
        side = side_of(row.question)
        sides["training" if held_out and side == "held-out" else side].append(row)
    for side in ("training", "development"):
        if not sides[side]:
            raise ValueError(f"its {len(rows)} rows leave none for {side}; give it more")
    scorer, expert = options.get("scorer", ""), None
    own = scorer not in ("", *SCORERS)
    if own:
        function, path = load_function(scorer)
        paths.append(path)
        mark = lambda row, answer: function(answer, row.whole)
    else:
        scorer = scorer or guess(rows)
        check_answers(scorer, [*rows, *sides["held-out"]])
        mark = lambda row, answer: SCORERS[scorer](answer, row.answer)
    if "expert" in options:
        expert, path = load_function(options["expert"])
        paths.append(path)
    elif scorer == "regex":
        expert = no_expert

    @lru_cache(maxsize=4)
    def order(side: str, which: int, turn: int) -> list[Row]:
        """The rows of a side in the order of a pass over them."""
        return random.Random(f"{which} {turn}").sample(sides[side], len(sides[side]))

    def draw(seed: int) -> Task:
        side, (which, i) = side_of_seed(seed), divmod(seed, RANGE)
        if not sides[side]:
            raise ValueError(f"{file} has no rows that are {side}")
        turn, place = divmod(i, len(sides[side]))
        row = order(side, which, turn)[place]
        say = partial(expert, row.whole) if expert else partial(shown, row)
        return Task(row.question, lambda think: say() if expert else say(think), partial(mark, row))

    counts = {side: len(some) for side, some in sides.items()}
    whose = f" of {held_out}" if held_out else ""
    about = (
        f"{file}: {counts['training']} rows to train on, SFT's demonstrations among them; "
        f"{counts['development']} for development, {counts['held-out']} held out{whose}; "
        f"scored by {scorer}. Each is drawn once before any is drawn again, then in a new order"
        f"{''.join(said)}"
    )
    content = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    name = f"{Path(file).stem} {content[:8]}"
    how_many = lambda side: counts[side]
    return Source(name, about, tuple(paths), draw, how_many)


def words(row: Row) -> str:
    return " ".join(row.question.split())


def without_repeats(rows: list[Row], known: dict[str, Row], said: list[str], file: str) -> list:
    """The rows whose question is not known yet; what is left out is told in `said`."""
    kept, known, other = [], dict(known), []
    for row in rows:
        first = known.setdefault(words(row), row)
        if first is row:
            kept.append(row)
        elif not (exact(first.answer, row.answer) or number(first.answer, row.answer)):
            other.append(row.line)
    if len(kept) < len(rows):
        told = f". Left out of {file}: {len(rows) - len(kept)} rows whose question was there before"
        if other:
            told += f", of which {len(other)} have another answer (the first is line {other[0]})"
        said.append(told)
    return kept


def guess(rows: list[Row]) -> str:
    """The scorer if none is named: number if all answers are numbers."""
    return "number" if all(as_number(row.answer) is not None for row in rows) else "exact"


def check_answers(scorer: str, rows: list[Row]) -> None:
    """Refuse rows whose answer this scorer cannot read."""
    for row in rows:
        if scorer == "number" and as_number(row.answer) is None:
            raise ValueError(f"line {row.line}: the answer {row.answer[:40]!a} is no number")
        if scorer == "regex":
            try:
                re.compile(row.answer)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"line {row.line}: no regular expression ({error})") from None


def shown(row: Row, think: bool) -> str:
    """The expert's reply: it thinks the derivation, if there is one and it may, and answers."""
    thought = f"<think>\n{row.thought}\n</think>\n" if think and row.thought else ""
    return f"{thought}<answer>{row.answer}</answer>"


def no_expert(row: dict) -> str:
    raise ValueError(
        "a regular expression is no reply to show; give expert=FILE.py:FUNCTION, or --sft-steps 0"
    )
