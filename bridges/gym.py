"""Tasks from the hundred generators of the reasoning-gym package (Stojanovski et al. 2025).

    pip install -r requirements/tasks.txt
    python -m bridges.gym                          # their names
    python -m bridges.gym letter_counting          # a task, and the parameters that it takes

A generator takes a seed and gives a question, an answer and whatever its scorer needs. The scorer
is the package's, and so is the reward: many pay a part of 1 for an answer that contains the right
one. `exact` is 1 only for full marks.

Three things are done about other people's code. A task's seed is tried again, with another number,
until the question falls on the side that it is for (bridges/task.py): some generators have few
questions. Python's own random numbers are seeded for the moment, because a generator draws from
them. And some scorers run the answer as Python: such an answer is first read here, and what is more
than a small sum, or a list of texts and numbers, has no marks.
"""

import ast
import difflib
import hashlib
import math
import random
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache, partial
from pathlib import Path

from bridges.task import Source, Task, load_function, side_of, side_of_seed

TRIES = 100  # for a question on the right side: 0.8 ** 100 is nothing
# Scorers that run the answer as Python (eval, or sympy's parse_expr), by what an answer may be.
# coin_flip only reads a fraction, but 1e999999999 is one. A few integrals have "Integral(…)" for an
# answer, which is not let through: the question itself, so written, would earn full marks.
SUMS = ("coin_flip", "countdown", "puzzle24", "polynomial_multiplication", "simple_integration",
        "intermediate_integration")  # fmt: skip
LISTS = ("n_queens", "string_insertion", "spiral_matrix", "binary_matrix")
MOST_BITS = 5_000  # of a sum's largest number: 9**9**9 would never come back
# Their tasks depend on the order of a set, which is another in every process: a resumed run goes on
# with other tasks than the one that was killed.
UNSTEADY = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note",
            "word_ladder")  # fmt: skip


def package():
    try:
        import reasoning_gym
    except ImportError:
        raise ValueError(
            "the package reasoning-gym is not installed; pip install -r requirements/tasks.txt"
        ) from None
    return reasoning_gym


def generators() -> dict[str, tuple[type, type]]:
    """{name: (its class, the class of its parameters)}."""
    package()
    from reasoning_gym.factory import DATASETS

    return DATASETS


def open_generator(name: str, options: dict[str, str]) -> Source:
    """The tasks of `--env reasoning_gym:NAME`. ValueError if there are none."""
    known = generators()
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"reasoning-gym has no {name}{meant} `python -m bridges.gym` lists all")
    options, expert, files = dict(options), None, [Path(__file__)]
    if "expert" in options:
        expert, path = load_function(options.pop("expert"))
        files.append(path)
    takes = parameters(known[name][1])
    for option in options:
        if option not in takes:
            raise ValueError(f"{name} has no {option}; it takes {', '.join(takes)}, or expert")
    values = {option: read_value(value) for option, value in options.items()}
    make = partial(package().create_dataset, name, **values)
    try:
        scorer = make(seed=0, size=1)
        scorer[0]
    except Exception as error:  # an assertion of the package, most often
        raise ValueError(f"{name} cannot be made ({type(error).__name__}: {error})") from None
    files.append(Path(sys.modules[type(scorer).__module__].__file__))

    @lru_cache(maxsize=64)  # the k episodes of a group ask for the same task
    def draw(seed: int) -> Task:
        entry = entry_of(make, name, seed)
        say = partial(expert, entry) if expert else partial(shown, name, entry)
        mark = partial(marked, name, scorer, entry)
        return Task(entry["question"].strip(), lambda think: say(), mark)

    about = f"reasoning-gym's {name}, with its own scorer"
    if name in UNSTEADY:
        about += "; its tasks are others in every process, so a resumed run goes on with others"
    shown_name = ",".join([name, *(f"{option}={value}" for option, value in options.items())])
    return Source(shown_name, about, tuple(files), draw)


def parameters(config: type) -> list[str]:
    return [f.name for f in fields(config) if f.name not in ("seed", "size")]


def read_value(text: str):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def entry_of(make: Callable, name: str, seed: int) -> dict:
    """The generator's entry for a seed: the first of its tries that is on the seed's side."""
    side, state = side_of_seed(seed), random.getstate()
    try:
        for i in range(TRIES):
            digest = hashlib.sha256(f"{seed} {i}".encode()).digest()
            number = int.from_bytes(digest[:4], "big")  # below 2**32, as NumPy wants its seeds
            random.seed(number)
            entry = make(seed=number, size=1)[0]
            if side_of(entry["question"]) == side:
                return entry
    finally:
        random.setstate(state)
    raise ValueError(f"{name} has no {side} question in {TRIES} tries: it has too few questions")


def shown(name: str, entry: dict) -> str:
    if not isinstance(entry["answer"], str):
        raise ValueError(
            f"{name} tells no answer to show; give expert=FILE.py:FUNCTION, or --sft-steps 0"
        )
    return f"<answer>{entry['answer']}</answer>"


def marked(name: str, scorer, entry: dict, answer: str) -> float:
    """The package's marks for an answer; none for an answer that must not be run as Python."""
    if (name in SUMS and not is_small_sum(answer)) or (name in LISTS and not is_data(answer)):
        return 0.0
    return scorer.score_answer(answer, entry)


# -------------------------------------------------------------- answers that would be run


def is_data(answer: str) -> bool:
    """Is it no Python at all, or Python that is only lists, texts and numbers?"""
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return True  # eval would refuse it as well
    except (RecursionError, MemoryError):
        return False
    fine = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.USub)
    fine += (ast.UnaryOp,)
    return all(isinstance(node, fine) for node in ast.walk(tree))


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
        case ast.BinOp(left=x, op=ast.Add() | ast.Sub(), right=y):
            return max(bits(x), bits(y)) + 1
        case ast.BinOp(left=x, op=ast.Mult() | ast.Div(), right=y):
            return bits(x) + bits(y)
        case ast.BinOp(left=x, op=ast.Pow(), right=y):
            return bits(x) * 2 ** min(bits(y), 30)
    raise ValueError("not a sum")


if __name__ == "__main__":
    try:
        for name in sys.argv[1:]:
            source = open_generator(name, {})
            task, takes = source.draw(0), parameters(generators()[name][1])
            print(f"{source.about}; it takes {', '.join(takes)}\n\n{task.question}\n")
            print(task.expert(False))
        if not sys.argv[1:]:
            print(*sorted(generators()), sep="\n")
    except ValueError as error:
        print(error)
        raise SystemExit(len(sys.argv) > 1) from None
