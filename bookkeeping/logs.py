"""Reading a log of another trainer, whatever it is: a file or a folder becomes rows of numbers.

    trainer_state.json      TRL and Unsloth (transformers' Trainer), the newest checkpoint's
    console text            lines of TRL, Unsloth, verl and prime-rl, colours and progress bars
                            included
    *.jsonl                 verl's file logger, prime-rl's file monitor, our own metrics.jsonl
    *.csv, *.tsv            wandb's export of a chart or of a run; a table copied from a notebook
    run-*.wandb             wandb's offline runs          (bookkeeping/protobufs.py)
    events.out.tfevents.*   TensorBoard                   (bookkeeping/protobufs.py)

Which of them a file is, is told by what is in it. Anybody may have written it, so it is data and
nothing else: nothing in it is executed or imported, no path in it is followed, a link is not
followed, and no more is read than the limits below. A line that cannot be read is skipped and
counted. What nobody can read is a ValueError of one sentence.

A row is {column: number} of one step. Not a number (NaN, infinity) stays in, because that is a
symptom. One step may come in several rows (prime-rl writes one per topic); collect() joins them.

Run me: `python -m bookkeeping.logs FILE_OR_FOLDER` prints the last of what was read; without one,
three made-up logs.
"""

import csv
import io
import json
import math
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from bookkeeping import names, protobufs
from bookkeeping.records import printable

MOST_BYTES = 64 << 20  # of one file; of a longer one, the beginning
MOST_LINE = 1 << 18  # bytes of a line of text
MOST_ROWS, MOST_COLUMNS, MOST_NAME = 100_000, 2_000, 200
MOST_CELLS = 3_000_000  # numbers in all: 200 bytes each, at worst
MOST_FILES, DEEPEST = 2_000, 4  # that are looked at in a folder, and levels of folders

NUMBER = r"[-+]?(?:nan|inf(?:inity)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
# 'name': 0.5, "name": "0.5" (newer transformers quote numbers), 'name': np.float64(0.5)
PAIR = re.compile(
    rf"""['"]([^'"\n]{{1,{MOST_NAME}}})['"]\s*:\s*(?:np\.float(?:32|64)\()?['"]?({NUMBER})\b""",
    re.I,
)
FLAT = re.compile(r"\{[^{}]{2,100000}\}")
# step:5 - actor/entropy:0.31 - critic/score/mean:np.float64(0.5)
VERL_PAIR = re.compile(rf"(?:^|\s)([\w./@-]{{1,{MOST_NAME}}}):(?:np\.\w+\()?({NUMBER})\b", re.I)
VERL_LINE = re.compile(r"(?:^|\s)step:(\d+) - ")
# 12:00:00 SUCCESS Step 5 | 12.3s | Reward 0.5000 | Truncation 3.1% (loguru; a tag may stand before)
PRIME_LINE = re.compile(r"\b(?:Step (\d+) \||Evaluated \S{1,200} \(Step (\d+)\) \|)")
PRIME_PAIR = re.compile(rf"^\s*([A-Z][\w. -]{{0,40}}?) ({NUMBER})(%?)(?:\D|$)", re.I)
COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")


@dataclass
class Log:
    """What was read. columns: ours, [steps] each, NaN where a step has no such number."""

    files: list[str]
    kind: str
    framework: str
    steps: list[int]
    columns: dict[str, list[float]]
    theirs: dict[str, str]  # our column -> the name it has in this log
    unread: int = 0  # columns that we have no use for
    notes: list[str] = field(default_factory=list)
    planned: float = 0.0  # steps, if trainer_state.json says it
    backwards: list[int] = field(default_factory=list)  # steps at which the count went back
    not_numbers: dict[str, int] = field(default_factory=dict)  # their column -> first such step


# ------------------------------------------------------------------------------------------- files


def content(path: Path) -> tuple[bytes, bool]:
    """(the first MOST_BYTES of a file, is there more?). Only of a plain file: a pipe never ends."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is no plain file; give a log, or the folder that it is in")
    with open(path, "rb") as f:
        data = f.read(MOST_BYTES + 1)
    return data[:MOST_BYTES], len(data) > MOST_BYTES


def walk(folder: Path, depth: int = 0) -> Iterator[Path]:
    """The plain files in a folder, the nearest first. Links are left alone."""
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        return
    yield from (path for path in inside if not path.is_symlink() and path.is_file())
    for path in inside:
        if depth < DEEPEST and not path.is_symlink() and path.is_dir():
            yield from walk(path, depth + 1)


def checkpoint(path: Path) -> tuple[int, float]:
    """How new a trainer_state.json is: its checkpoint's number, and when it was written."""
    number = path.parent.name.rpartition("-")[2]
    newest = 10**9 if not path.parent.name.startswith("checkpoint-") else 0
    return int(number) if number.isdigit() and len(number) < 10 else newest, path.stat().st_mtime


def choose(folder: Path) -> tuple[list[Path], list[str]]:
    """(the files of one run in a folder, notes on what was left). The best kind of log first."""
    found = list(islice(walk(folder), MOST_FILES))
    kinds = [
        [p for p in found if p.name == "trainer_state.json"],
        [p for p in found if p.name == "metrics.jsonl"],
        [p for p in found if p.suffix == ".wandb"],
        [p for p in found if "tfevents" in p.name],
        [p for p in found if p.suffix == ".jsonl"],
        [p for p in found if p.suffix in (".csv", ".tsv")],
        [p for p in found if p.suffix in (".log", ".out", ".txt") and p.name != "requirements.txt"],
    ]
    for kind in filter(None, kinds):
        name = kind[0].name
        if name == "trainer_state.json":
            chosen = [max(kind, key=checkpoint)]
        elif kind[0].suffix == ".wandb":
            chosen = [max(kind, key=lambda p: p.stat().st_mtime)]
        elif "tfevents" in name:  # one run may have several, one per start
            home = max(kind, key=lambda p: p.stat().st_size).parent
            chosen = [p for p in kind if p.parent == home]
        elif name == "metrics.jsonl":  # prime-rl: the trainer's and the orchestrator's
            pair = [p for p in kind if p.parent.name in ("trainer", "orchestrator")]
            chosen = pair[:2] or kind[:1]
        else:
            chosen = [max(kind, key=lambda p: p.stat().st_size)]
        left = [p for p in kind if p not in chosen]
        some = ", ".join(printable(p.name) for p in left[:3])
        note = f"{len(left)} more of the same kind were not read ({some}); give one to read it"
        return chosen, [note] if left and name != "trainer_state.json" else []
    raise ValueError(
        f"{folder} has no log in it (trainer_state.json, *.jsonl, *.wandb, tfevents, *.csv, "
        "*.log); give the folder of a run, or one file"
    )


def read(path: Path) -> Log:
    """The log of a file or folder. ValueError of one sentence if there is none."""
    path = Path(path)
    chosen, notes = choose(path) if path.is_dir() else ([path], [])
    all_rows: list[dict[str, float]] = []
    kinds, planned, skipped, cells = [], 0.0, 0, 0
    for file in chosen:
        data, more = content(file)
        if more:
            notes.append(f"only the first {MOST_BYTES >> 20} MiB of {printable(file.name)}")
        kind, rows, header = rows_of(data)
        kinds.append(kind)
        planned = planned or header
        for row in rows:
            if "skipped" in row and len(row) == 1:
                skipped += 1
                continue
            all_rows.append(row)
            cells += len(row)
            if len(all_rows) >= MOST_ROWS or cells >= MOST_CELLS:
                notes.append(f"only the first {len(all_rows):,} rows were read")
                break
    if skipped:
        notes.append(f"{skipped} lines could not be read and were skipped")
    if not all_rows:
        what = "nothing in it is a log of numbers by step"
        raise ValueError(
            f"{path}: {what}; give trainer_state.json, a .jsonl, .csv, .wandb, or text"
        )
    log = collect(all_rows)
    log.files, log.kind, log.planned = [printable(str(f)) for f in chosen], kinds[0], planned
    log.notes = notes + log.notes
    return log


# ------------------------------------------------------------------------------------------ formats


def rows_of(data: bytes) -> tuple[str, Iterator[dict[str, float]], float]:
    """(what kind of log this is, its rows, the steps planned or 0). A row {"skipped": 1} is a line
    that could not be read."""
    if data[:4] == b":W&B":
        return "wandb offline run", protobufs.wandb_rows(data), 0.0
    if b"brain.Event:" in data[:64]:  # TensorBoard's first record names the version: brain.Event:2
        return "TensorBoard events", protobufs.tensorboard_rows(data), 0.0
    if b"\0" in data[:4096]:
        raise ValueError("the file is binary, and neither wandb's nor TensorBoard's; give a log")
    text = data.decode("utf-8", "replace").removeprefix("\ufeff")
    head = text[: MOST_LINE + 1].lstrip()
    if '"log_history"' in text:
        return "trainer_state.json", state_rows(text), planned_steps(text)
    first = re.split(r"[\r\n]", head, maxsplit=1)[0]
    if head.startswith("{") and first.rstrip().endswith("}") and '"' in first:
        return "JSON lines", jsonl_rows(text), 0.0
    delimiter = table_delimiter(first)
    if delimiter:
        csv.field_size_limit(MOST_LINE)
        cells = next(csv.reader([first[:MOST_LINE]], delimiter=delimiter))
        runs = len({run for run, _ in map(run_and_name, cells) if run})
        kind = f"CSV (the first of {runs} runs)" if runs > 1 else "CSV"
        return kind, csv_rows(text, delimiter), 0.0
    return "console text", console_rows(text), 0.0


def planned_steps(text: str) -> float:
    """max_steps, which stands before log_history or after it."""
    ends = text[-20_000:] + text[:20_000]
    hits = re.findall(rf'"max_steps":\s*({NUMBER})\s*[,}}\n]', ends, re.I)
    return float(hits[-1]) if hits else 0.0


def state_rows(text: str) -> Iterator[dict[str, float]]:
    """The entries of log_history, one by one: so a file that was cut off gives those it has."""
    for entry in FLAT.finditer(text, text.index('"log_history"')):
        row = pairs(entry.group())
        if "step" in row:
            yield row


def pairs(text: str) -> dict[str, float]:
    """{name: number} of a flat JSON object, or of the Python dict that TRL prints."""
    return {name: float(number) for name, number in PAIR.findall(text)[:MOST_COLUMNS]}


def jsonl_rows(text: str) -> Iterator[dict[str, float]]:
    """One object per line. verl keeps its numbers one level down, in "data"."""
    for line in text.split("\n"):
        if not line.strip():
            continue
        try:
            found = json.loads(line) if len(line) <= MOST_LINE else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            yield {"skipped": 1.0}
            continue
        inner = found.get("data")
        flat = found | inner if isinstance(inner, dict) else found
        row = {}
        for name, value in list(flat.items())[:MOST_COLUMNS]:
            number = as_number(value)
            if number is not None and len(name) <= MOST_NAME:
                row[name] = number
        for name in ("update", "global_step", "train/global_step", "_step"):
            if name in row:
                row.setdefault("step", row[name])
        if row:
            yield row


def as_number(value) -> float | None:
    """A JSON number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def table_delimiter(first: str) -> str | None:
    """What stands between the columns of a table, if its head names a step."""
    for delimiter in (",", "\t", "|"):
        cells = [cell.strip().strip('"').lower() for cell in first.split(delimiter)]
        if len(cells) > 1 and {"step", "_step", "global_step", "train/global_step"} & set(cells):
            return delimiter
    return None


def csv_rows(text: str, delimiter: str) -> Iterator[dict[str, float]]:
    """wandb's export: "Step", "RUN - train/reward", …__MIN, …__MAX. Of several runs, the first."""
    reader = csv.reader(io.StringIO(text, newline=None), delimiter=delimiter)
    try:
        head = [cell.strip() for cell in next(reader)][:MOST_COLUMNS]
        titles = [(i, run_and_name(cell)) for i, cell in enumerate(head)]
        first_run = next((run for _, (run, _) in titles if run), "")
        kept = [
            (i, name)
            for i, (run, name) in titles
            if name and run in ("", first_run) and not name.endswith(("__MIN", "__MAX"))
        ]
        for cells in reader:
            row = {}
            for i, name in kept:
                number = written_number(cells[i]) if i < len(cells) else None
                if number is not None:
                    row[name[:MOST_NAME]] = number
            step = [row[n] for n in row if n.lower() in ("step", "global_step", "_step")]
            if "train/global_step" in row:
                step = [row["train/global_step"]]
            if step:
                yield row | {"step": step[0]}
    except (csv.Error, StopIteration):
        yield {"skipped": 1.0}


def run_and_name(cell: str) -> tuple[str, str]:
    """'my-run - train/reward' -> ('my-run', 'train/reward')"""
    run, dash, name = cell.strip('"').rpartition(" - ")
    shown = {"Training Loss": "loss", "Validation Loss": "eval_loss"}  # in a notebook
    return (run, name) if dash else ("", shown.get(cell, cell))


def written_number(text: str) -> float | None:
    try:
        return float(text.strip()) if text.strip() and len(text) < 100 else None
    except ValueError:
        return None


def console_rows(text: str) -> Iterator[dict[str, float]]:
    """Lines that people paste. A progress bar may share a line with the numbers."""
    count, epoch = 0, -1.0
    for line in re.split(r"[\r\n]+", COLOUR.sub("", text)):
        line = line[:MOST_LINE]
        verl, prime = VERL_LINE.search(line), PRIME_LINE.search(line)
        if verl:
            found = VERL_PAIR.findall(line[verl.start() :])[:MOST_COLUMNS]
            yield {name: float(number) for name, number in found}
        elif prime:
            yield prime_row(line, prime)
        else:
            for entry in FLAT.finditer(line):
                row = pairs(entry.group())
                if len(row) > 1:
                    # TRL prints no step: the rows are counted, evaluations beside them. If the
                    # epoch goes back, another run begins.
                    if row.get("epoch", epoch) < epoch:
                        count = 0
                    epoch = row.get("epoch", epoch)
                    count += not any(name.startswith("eval_") for name in row)
                    yield {"step": float(max(count, 1))} | row


def prime_row(line: str, found: re.Match) -> dict[str, float]:
    """'Step 5 | 1.2s | Reward 0.5000 | Truncation 3.1%' -> {"step": 5, "Reward": 0.5, …}"""
    evaluation = found.group(2) is not None
    row = {"step": float((found.group(2) if evaluation else found.group(1))[:12])}
    for part in line[found.end() :].split("|")[:50]:
        pair = PRIME_PAIR.match(part)
        if pair:
            value = float(pair.group(2)) / (100 if pair.group(3) else 1)
            row[("Eval " if evaluation else "") + pair.group(1)] = value
    return row


# ------------------------------------------------------------------------------------------- a log


def collect(rows: list[dict[str, float]]) -> Log:
    """Rows in their order -> one Log under our names, a step each.

    If the count of steps goes back, the run was resumed (or two runs share a file): the later
    numbers of a step replace the earlier ones, and Log.backwards says where.
    """
    seen: dict[str, None] = {}  # the names, in their order; not more than MOST_COLUMNS
    for row in rows:
        if len(seen) < MOST_COLUMNS:
            seen |= dict.fromkeys(row)
    columns = sorted([name for name in seen if name != "step"][:MOST_COLUMNS])
    framework = names.whose(columns)
    best: dict[str, tuple[int, str]] = {}  # of several with one meaning, as for two environments
    for name in columns:
        if found := names.ours(framework, name):
            mine, line = found
            best[mine] = min((line, name), best.get(mine, (line, name)))
    used = dict(sorted((name, mine) for mine, (_, name) in best.items()))
    by_step: dict[int, dict[str, float]] = {}
    backwards, not_numbers, newest, unusable = [], {}, -1, 0
    for row in rows:
        step = row.get("step", math.nan)
        if not (0 <= step < 1e12):
            unusable += 1
            continue
        here = int(step)
        useful = {mine: row[name] for name, mine in used.items() if name in row}
        if not useful:
            continue
        if here < newest and useful.keys() & by_step.get(here, {}).keys():
            backwards.append(here)
            newest = here
        newest = max(newest, here)
        for name, mine in used.items():
            # A reward function may have nothing to say of a batch: TRL writes nan for it.
            if name in row and not math.isfinite(row[name]) and not mine.startswith("part:"):
                not_numbers.setdefault(name, here)
        by_step.setdefault(here, {}).update(useful)
    if not by_step:
        raise ValueError("none of its columns is one that a trainer of language models logs by RL")
    steps = sorted(by_step)
    mine = list(dict.fromkeys(used.values()))
    out = {name: [by_step[s].get(name, math.nan) for s in steps] for name in mine}
    if "no_signal" in out:
        out["groups_with_signal"] = [1 - x for x in out.pop("no_signal")]
    theirs = {m: printable(n) for n, m in used.items()}
    if "no_signal" in theirs:
        theirs["groups_with_signal"] = "1 - " + theirs.pop("no_signal")
    notes = [f"{unusable} rows without a step were left out"] if unusable else []
    return Log([], "", framework, steps, out, theirs, len(columns) - len(used), notes, 0.0,
               backwards[:10], not_numbers)  # fmt: skip


def show(log: Log) -> None:
    print(f"{log.framework}, {log.kind or 'made up'}, {len(log.steps)} steps", *log.notes, sep="; ")
    for column, values in log.columns.items():
        print(f"  {column:22} {log.theirs[column]:44}", *(f"{v:.4g}" for v in values[-3:]))


def demo() -> None:
    """The same two steps as verl, prime-rl and TRL print them."""
    verl = "step:1 - critic/score/mean:0.25 - actor/lr:1e-06\nstep:2 - critic/score/mean:0.5"
    prime = (
        "12:00:00 SUCCESS Step 1 | 1s | Reward 0.25 | Max Off-Policy 0\nStep 2 | 1s | Reward 0.5"
    )
    trl = "{'reward': 0.25, 'reward_std': 0.4}\n 20%|#  {'reward': '0.5', 'reward_std': nan}"
    for text in (verl, prime, trl):
        log = collect(list(rows_of(text.encode())[1]))
        show(log)
        assert log.columns["reward"] == [0.25, 0.5] and log.steps == [1, 2]


if __name__ == "__main__":
    for given in sys.argv[1:]:
        show(read(Path(given)))
    if len(sys.argv) == 1:
        demo()
