"""What a known task is, where tasks come from, and on which side each of them stands.

Training, development and held-out tasks never meet. The range of a seed says for what it is
(settings.TRAIN_SEEDS and the others), and a hash of the question says on which side a task stands:
so a question that stands in a file twice, or that a generator draws again from another seed, is
always on one side, on any machine. SFT's demonstrations are training tasks too.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RANGE = 1_000_000_000  # seeds in each range of settings.py: training, SFT, development, …
SIDES = ("training", "training", "development", "held-out")  # … by range; all later are held out
TENTHS = {"training": 6, "development": 2, "held-out": 2}  # of all questions


@dataclass(frozen=True)
class Task:
    question: str
    expert: Callable[[bool], str]  # (may it think?) -> a right reply; ValueError if none is known
    mark: Callable[[str], object]  # answer -> a number, or a dict with "reward"; it may raise


@dataclass(frozen=True)
class Source:
    """Where tasks come from."""

    name: str  # of the set of tasks: the same name means the same tasks
    about: str  # a sentence to print before a run
    files: tuple[Path, ...]  # what decides the tasks: their hash is kept (code.jsonl)
    draw: Callable[[int], Task]  # by seed
    how_many: Callable[[str], int | None] = lambda side: None  # different ones; None: no end


def side_of_seed(seed: int) -> str:
    return SIDES[min(seed // RANGE, len(SIDES) - 1)]


def side_of(question: str) -> str:
    """The side of a question, by its words: white space does not count."""
    digest = hashlib.sha256(" ".join(question.split()).encode()).digest()
    tenth, most = int.from_bytes(digest[:8], "big") % 10, 0
    for side, tenths in TENTHS.items():
        most += tenths
        if tenth < most:
            return side


def load_function(place: str) -> tuple[Callable, Path]:
    """The function of FILE.py:FUNCTION, and the file. ValueError if it cannot be had."""
    file, _, name = place.rpartition(":")
    if not Path(file).is_file() or Path(file).suffix != ".py":
        raise ValueError(f"there is no file {file or place} of Python; give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(f"yours_{Path(file).stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # for dataclasses
    try:
        spec.loader.exec_module(module)
        found = getattr(module, name)
    except Exception as error:  # it may be any code
        raise ValueError(f"{place} cannot be used ({type(error).__name__}: {error})") from None
    if not callable(found):
        raise ValueError(f"{place} is no function")
    return found, Path(file)
