"""Reading what a run left, whoever wrote it: metrics.jsonl, evals.jsonl, summary.json and the like.

A run folder may come from anywhere: a colleague, the hub, a disk that was full. So its contents are
data and nothing else. A line that cannot be read is named, with its file. Text is made safe to
print and to put into Markdown. And a command that meets something no run writes ends with one
sentence and no traceback. Nothing here needs torch: a report can be made on a machine where the run
could not run.

Run me: `python -m bookkeeping.records` reads a good line, a damaged file and a hostile name.
"""

import json
from contextlib import contextmanager
from pathlib import Path

# What code raises that meets a record no run has written.
NOT_OURS = (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError)


def an_object(text: str, nan: bool = True) -> dict:
    """A JSON object, and nothing else that JSON can hold. nan=False: NaN becomes None."""
    found = json.loads(text) if nan else json.loads(text, parse_constant=lambda _: None)
    if not isinstance(found, dict):
        raise ValueError("an object is expected")
    return found


def read(path: Path, nan: bool = True) -> dict:
    """config.json or summary.json as it is. ValueError if it is damaged."""
    try:
        return an_object(path.read_text(encoding="utf-8"), nan)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); restore it, or give another run") from None


def record(path: Path) -> dict:
    """config.json or summary.json, its text made safe."""
    return clean(read(path))


def lines(path: Path, for_page: bool = False) -> list[dict]:
    """A .jsonl file of a run; empty if there is none. ValueError names the line that is damaged.

    for_page: the run may still be going, so a last line that is cut in two is left out; and NaN,
    which a browser cannot read, becomes None.
    """
    texts = path.read_bytes().split(b"\n") if path.exists() else []
    texts = [text for text in texts if text.strip()]
    found = []
    for i, text in enumerate(texts, 1):
        try:
            found.append(an_object(text.decode("utf-8"), nan=not for_page))
        except (ValueError, RecursionError) as error:
            if for_page and i == len(texts):
                break
            cure = "mend or remove that line, or give another run"
            raise ValueError(f"{path} is damaged: line {i} is not JSON ({error}); {cure}") from None
    return found


def answered(line: dict) -> list[int]:
    """The numbers of the tasks that a line of evals.jsonl has results of.

    If the environment or the endpoint failed, the line lists the task as missing.
    """
    missing = {int(i) for i in line.get("missing", {})}
    return [i for i in range(len(line["reward"]) + len(missing)) if i not in missing]


def same_tasks(*evals: dict) -> list[dict]:
    """These lines of evals.jsonl, cut to the tasks that all of them have a result of."""
    if not any("missing" in e for e in evals):
        return list(evals)
    common = set.intersection(*(set(answered(e)) for e in evals))

    def cut(e: dict, value):
        if not isinstance(value, list):
            return value
        return [v for i, v in zip(answered(e), value) if i in common]

    return [{name: cut(e, v) for name, v in e.items() if name != "missing"} for e in evals]


def environments_of(machine: dict) -> list[tuple[int, str]]:
    """[(from which update on, hash of the environment's code)] of summary.json's machine.

    More than one if somebody edited the environment and resumed; empty for runs that are older than
    this record.
    """
    found: list[tuple[int, str]] = []
    for version in machine.get("versions", [{"update": -1, **machine}]):
        code = version.get("environment_code")
        if code and (not found or found[-1][1] != code):
            found.append((max(version["update"], 0), code))
    return found


def edited(environments: list[tuple[int, str]]) -> str:
    """A sentence on a run that was trained on several versions of its environment, or ""."""
    if len(environments) < 2:
        return ""
    later = ", ".join(f"{code} from update {update} on" for update, code in environments[1:])
    return (
        f"trained on {len(environments)} versions of its environment's code: "
        f"{environments[0][1]}, then {later}; its rewards may not be one measure"
    )


# ----------------------------------------------------------------------------------- anybody's text


def printable(text: str) -> str:
    """On one line, without control characters: each becomes a question mark."""
    return "".join(c if c.isprintable() else "?" for c in text)


def quote(text: str) -> str:
    """Safe for Markdown and a terminal: one line, printable, in backticks."""
    return "`" + printable(" ".join(text.split())).replace("`", "'") + "`"


def clean(x):
    """Safe for Markdown and a terminal: one line, printable, no HTML, no link, no table cell.

    Of a list or a dict, every text in it.
    """
    if isinstance(x, str):
        text = printable(x).replace("<", "&lt;").replace("`", "'")
        return text.replace("](", "] (").replace("|", "¦")
    if isinstance(x, dict):
        return {clean(k): clean(v) for k, v in x.items()}
    return [clean(v) for v in x] if isinstance(x, list) else x


@contextmanager
def foreign(folder):
    """A run folder may come from anywhere: an error in reading it becomes one sentence."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise SystemExit(printable(str(error))) from None
    except NOT_OURS as error:
        found = f"{type(error).__name__}: {ascii(str(error))[:100]}"
        advice = "restore it, or give another"
        raise SystemExit(f"{folder} holds what no run writes ({found}); {advice}") from None


def with_exact(evals: list[dict]) -> list[dict]:
    """Evaluations in which nothing is reported to be right, where others of this run have it."""
    if not any("exact" in e for e in evals):
        return evals
    return [{"exact": [0.0] * len(e["reward"])} | e for e in evals]


def before_last_level(lines: list[dict]) -> int:
    """How many lines of metrics.jsonl come before a curriculum's last level was all there is."""
    others = (i for i, e in enumerate(lines, 1) if e.get("level") != lines[-1].get("level"))
    return max(others, default=0)


def append(path: Path, record: dict) -> None:
    """Add one line to a .jsonl file."""
    with open(path, "a", encoding="utf-8") as f:
        f.write(json.dumps(record, separators=(",", ":")) + "\n")


def write_json(path: Path, value: dict) -> None:
    """Write a whole file, or leave the old one as it is."""
    write_whole(path, json.dumps(value, indent=1))


def write_whole(path: Path, text: str) -> None:
    """The same of a text. A link in the file's place is replaced, not followed."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    new.write_text(text, encoding="utf-8", newline="\n")
    new.replace(path)


def demo() -> None:
    """A good line, a line that was cut, and a hostile name."""
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "metrics.jsonl"
        for update in (1, 2):
            append(file, {"update": update, "reward": update / 4})
        print("read:", lines(file))
        file.write_text('{"update": 1, "rew', encoding="utf-8")
        try:
            with foreign(place):
                lines(file)
        except SystemExit as told:
            print("cut short:", told)
    name = "my\x1b[2Jrun | <img src=x> [click](http://x)"
    print("a hostile name:", repr(name), "becomes", repr(clean(name)))
    assert clean(name) == "my?[2Jrun ¦ &lt;img src=x> [click] (http://x)"


if __name__ == "__main__":
    demo()
