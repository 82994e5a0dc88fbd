"""Reading what a run left: metrics.jsonl, evals.jsonl, summary.json and the like, whoever wrote them.

A run folder may come from anywhere: a colleague, the hub, a disk that was full. So what stands in it is data and nothing else. A line that cannot be
read is named, with its file; text becomes safe to print and to put into Markdown; and a command that meets something that no run writes ends with one
sentence and without a traceback. Nothing here needs torch: a report of a run can be made where the run could not.

Run me: `python -m bookkeeping.records` reads a good line, a damaged file and a hostile name.
"""

import json
from contextlib import contextmanager
from pathlib import Path


def lines(path: Path) -> list[dict]:
    """A .jsonl file of a run; empty if there is none."""
    try:
        return [thing(json.loads(line)) for line in path.read_text().split("\n") if line] if path.exists() else []
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); mend or drop that line, or give another run") from None


def record(path: Path) -> dict:
    """config.json or summary.json."""
    try:
        return clean(thing(json.loads(path.read_text())))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); restore it, or give another run") from None


def thing(found) -> dict:
    """A JSON object, and nothing else that JSON can hold."""
    if not isinstance(found, dict):
        raise ValueError("an object is expected")
    return found


def printable(text: str) -> str:
    """On one line, without control characters: each becomes a question mark."""
    return "".join(c if c.isprintable() else "?" for c in text)


def clean(x):
    """Anybody's text, made safe for Markdown and a terminal: one line, printable, no HTML, no link, no table cell. Of a list or dict: all texts in it."""
    if isinstance(x, str):
        return printable(x).replace("<", "&lt;").replace("`", "'").replace("](", "] (").replace("|", "¦")
    return {clean(k): clean(v) for k, v in x.items()} if isinstance(x, dict) else [clean(v) for v in x] if isinstance(x, list) else x


@contextmanager
def foreign(folder):
    """A run folder may come from anywhere: if something in it is not what a run writes, the command ends with one sentence."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise SystemExit(printable(str(error))) from None
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        raise SystemExit(
            f"{folder} holds what no run writes ({type(error).__name__}: {ascii(str(error))[:100]}); restore it, or give another"
        ) from None


def append(path: Path, record: dict) -> None:
    """Add one line to a .jsonl file."""
    with open(path, "a") as f:
        f.write(json.dumps(record) + "\n")


def write_json(path: Path, value: dict) -> None:
    """Write a whole file, or leave the old one as it is."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1))
    new.replace(path)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "metrics.jsonl"
        file.write_text('{"update": 1, "reward": 0.25}\n{"update": 2, "reward": 0.5}\n')
        print("read:", lines(file))
        file.write_text('{"update": 1, "rew')
        try:
            with foreign(place):
                lines(file)
        except SystemExit as told:
            print("cut short:", told)
        name = "my\x1b[2Jrun | <img src=x> [click](http://x)"
        print("a hostile name:", repr(name), "becomes", repr(clean(name)))
    assert clean(name) == "my?[2Jrun ¦ &lt;img src=x> [click] (http://x)"
