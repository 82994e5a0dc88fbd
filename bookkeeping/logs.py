"""Reading a log of another trainer, whatever it is: a file or a folder becomes lines like ours.

    trainer_state.json      TRL and Unsloth (transformers' Trainer); the newest checkpoint's
    console text            TRL, Unsloth, ms-swift, verl, prime-rl; of 2025 and of today, with
                            colours, progress bars, or rows that somebody broke when pasting
    *.jsonl                 verl's file logger, prime-rl's metrics.jsonl, ms-swift's logging.jsonl
    *.csv, *.tsv, tables    wandb's export of a chart or of a run; a table copied from a notebook

Which of them a file is, is told by what is in it: every reader tries, and the one that finds most
rows wins. A row counts only if it has names that a framework logs (NAMES), so a dict that a
console prints for another reason is no row. The step is the log's own; rows without one are
counted, and where their epoch goes back (a resume), the count goes back with it.

Anybody may have written a log, so it is data and nothing else: nothing in it is executed, no path
in it is followed, links are left alone, and no more is read than the limits below. What nobody can
read is a ValueError of one sentence.

Run me: `python -m bookkeeping.logs FILE_OR_FOLDER` prints the last of what was read; without one,
three made-up logs.
"""

import csv
import json
import math
import os
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path

from bookkeeping.records import printable

MOST_BYTES = 64 << 20  # of one file; of a longer one, the beginning
MOST_LINE = 1 << 18  # characters of a line of JSON
MOST_ROWS, MOST_COLUMNS = 100_000, 2_000
MOST_FILES = 2_000  # that are looked at in a folder
KINDS = ("trainer_state.json", "metrics.jsonl", ".jsonl", ".csv", ".tsv", ".log", ".out", ".txt")

TRL, UNSLOTH, VERL, PRIME = "TRL", "Unsloth", "verl", "prime-rl"

# {framework: {their name, a regular expression: ours}}; where two of theirs become one of ours, the
# upper one is read. Ours are those of metrics.jsonl, or are explained where doctor.py reads them.
# Read in the sources of TRL 0.14 to 1.16 and transformers 5.19 (Unsloth and ms-swift write TRL's
# columns), verl of 2025 and 0.10.0.dev, prime-rl of 2025 and 0.8.0.
NAMES = {
    TRL: {
        "loss": "loss",
        "grad_norm": "grad_norm",
        "learning_rate": "lr",
        "reward": "reward",
        "reward_std": "reward_std",
        "frac_reward_zero_std": "groups_with_signal",  # 1 minus it
        r"rewards/([^/]+)/mean": "part",
        r"rewards/([^/]+)": "part",  # before 0.17
        "completions/mean_length|completion_length": "reply_tokens",
        "completions/clipped_ratio": "truncated",
        "entropy": "entropy",
        "kl": "kl",
        "clip_ratio/region_mean|clip_ratio": "clipped",
        "sampling/sampling_logp_difference/mean": "mismatch",
        "sampling/importance_sampling_ratio/mean": "kept_ratio",
        "eval_reward": "eval_reward",
    },
    VERL: {
        "critic/score/mean": "reward",
        "critic/rewards/mean": "reward",
        "critic/score/max": "reward_max",
        "critic/score/min": "reward_min",
        "critic/advantages/max": "advantage_max",
        "critic/advantages/min": "advantage_min",
        "response_length/mean": "reply_tokens",
        "response_length/clip_ratio": "truncated",
        "actor/entropy|actor/entropy_loss": "entropy",
        "actor/pg_loss": "loss",
        "actor/grad_norm": "grad_norm",
        "actor/lr": "lr",
        "actor/kl_loss|actor/reward_kl_penalty": "kl",
        "actor/pg_clipfrac": "clipped",
        "training/rollout_probs_diff_mean": "mismatch_probability",
        "rollout_corr/k3_kl": "mismatch_kl",
        "rollout_corr/rollout_is_mean": "kept_ratio",
        r"val-core/.+/(?:acc|reward)/mean@\d+": "eval_reward",
    },
    PRIME: {  # its files, then its console
        r"train/agg/effective/[^/]+/reward/mean": "reward",
        r"train/agg/all/[^/]+/reward/mean|reward/all/mean|reward/mean|train/reward/mean": "reward",
        r"train/agg/all/[^/]+/solved_some": "groups_with_signal",
        "effective_batch_size/all|batch/effective_batch_size": "groups_with_signal",
        r"(?:.+/)?advantages?/max": "advantage_max",
        r"(?:.+/)?advantages?/min": "advantage_min",
        r"(?:.+/)?advantages?/(?:std|abs_mean)": "advantage_std",
        r"(?:train/agg/all/[^/]+/)?reward(?:/all)?/max": "reward_max",
        r"(?:train/agg/all/[^/]+/)?reward(?:/all)?/min": "reward_min",
        r"train/agg/all/[^/]+/rewards/([^/]+)/mean": "part",
        r"(?:train/agg/all/(?:[^/]+/)?)?num_output_tokens/mean": "reply_tokens",
        r"decode_len(?:/all)?/mean": "reply_tokens",
        r"(?:train/agg/all/[^/]+/)?is_truncated(?:/all)?/mean": "truncated",
        "train/agg/all/has_error/mean|error/mean": "errors_share",
        "loss/mean": "loss",
        r"entropy(?:/all)?/mean": "entropy",
        r"mismatch_kl(?:/all)?/mean": "mismatch_kl",
        r"is_masked(?:/all)?/mean": "clipped",
        "off_policy/mean": "off_policy_steps",
        "optim/lr": "lr",
        "optim/grad_norm": "grad_norm",
        r"eval/[^/]+/effective/[^/]+/(?:reward/mean|avg@\d+)|val_reward/mean": "eval_reward",
        r"(?:Avg\. )?Reward": "reward",
        "Trainable": "trainable",
        "Truncation": "truncated",
        "Error": "errors_share",
        "Loss": "loss",
        "Entropy": "entropy",
        "Mismatch KL": "mismatch_kl",
        r"Grad\. Norm": "grad_norm",
        "LR": "lr",
        r"Eval Reward|Val\. Reward": "eval_reward",
    },
}
UNSLOTH_HAS = {"completion_length", "completions/mean_length"}  # it adds TRL's older name

# {framework: {our column: what to set, so that it is logged}}
UNLOGGED = {
    TRL: {
        "mismatch": "use_vllm=True with vllm_importance_sampling_correction=True",
        "kl": "beta above 0",
        "groups_with_signal": "TRL 0.18 or newer",
        "eval_reward": 'eval_strategy="steps" and an eval_dataset',
        "entropy": "TRL 0.19 or newer",
    },
    VERL: {
        "mismatch_probability": "actor_rollout_ref.rollout.calculate_log_probs=True",
        "kl": "actor_rollout_ref.actor.use_kl_loss=True",
        "groups_with_signal": "not logged; the largest and smallest advantage stand in for it",
        "eval_reward": "trainer.test_freq above 0",
        "entropy": "actor_rollout_ref.actor.calculate_entropy=True",
    },
    PRIME: {
        "mismatch_kl": "the trainer's log, which is another file than the orchestrator's",
        "groups_with_signal": "the orchestrator's metrics.jsonl (--orchestrator.monitors.file)",
        "reward": "the orchestrator's log, which is another file than the trainer's",
        "eval_reward": "[[orchestrator.eval.source]] and orchestrator.eval.interval",
    },
}
UNLOGGED[UNSLOTH] = UNLOGGED[TRL]

GOAL = re.compile(r"exact|correct|accura|\bacc\b|solved|pass(ed)?\b|answer|verif|match", re.I)
NO_GOAL = re.compile(r"format|length|tag|style|len\b|xml|think|short|long|repeat|language", re.I)


@dataclass
class Log:
    """What was read. lines: {our column: a number, "step": …}, in the order of the run."""

    framework: str
    lines: list[dict[str, float]]
    theirs: dict[str, str]  # our column, if it ever was a finite number -> its name in this log
    notes: list[str]
    planned: float = 0.0  # steps, if trainer_state.json or ms-swift says it
    files: list[str] = field(default_factory=list)
    kind: str = "made up"


def goal(log: Log) -> str | None:
    """The one reward function that counts right answers, by its name."""
    parts = [name for name in log.theirs if name.startswith("part:")]
    named = [p for p in parts if GOAL.search(p.replace("_", " ")) and not NO_GOAL.search(p)]
    return named[0] if len(named) == 1 and len(parts) > 1 else None


@lru_cache(maxsize=10_000)
def ours(framework: str, name: str) -> tuple[int, str] | None:
    """(line of the table, our name) of one of their columns; None if we have no use for it.

    A reward function becomes "part:NAME".
    """
    if framework == TRL:  # wandb groups them
        name = re.sub("^eval/", "eval_", name.removeprefix("train/"))
    for line, (theirs, mine) in enumerate(NAMES[framework].items()):
        if found := re.fullmatch(theirs, name):
            return line, f"part:{found[1]}" if mine == "part" else mine
    return None


# ------------------------------------------------------------------------------------------- files


def choose(folder: Path) -> list[Path]:
    """The files of one run in a folder, of the best kind that is there. Links are left alone."""
    inside = (Path(place, name) for place, _, names in os.walk(folder) for name in sorted(names))
    found = [
        path for path in islice(inside, MOST_FILES) if path.is_file() and not path.is_symlink()
    ]
    for kind in KINDS:
        logs = [p for p in found if kind in (p.name, p.suffix) and p.name != "requirements.txt"]
        if {p.parent.name for p in logs} == {"trainer", "orchestrator"}:
            return logs  # prime-rl writes two
        if logs:
            return [max(logs, key=lambda p: (checkpoint(p), p.stat().st_size))]
    raise ValueError(
        f"{folder} has no log in it ({', '.join(KINDS)}); give the folder of a run, or one file"
    )


def checkpoint(path: Path) -> int:
    """How new a trainer_state.json is: its checkpoint's number; of the run itself, the newest."""
    number = re.fullmatch(r"checkpoint-(\d{1,9})", path.parent.name)
    return int(number[1]) if number else 10**9


def content(path: Path) -> str:
    """The first MOST_BYTES of a file, without colours."""
    if not path.is_file():  # a pipe never ends
        raise ValueError(f"{path} is no plain file; give a log, or the folder that it is in")
    with open(path, "rb") as f:
        data = f.read(MOST_BYTES)
    if b"\0" in data[:4096]:
        advice = "of wandb or TensorBoard, give the run's CSV export or its console text"
        raise ValueError(f"{path} is binary; {advice}")
    text = data.decode("utf-8", "replace").removeprefix("\ufeff")
    return COLOUR.sub("", re.sub(r"\r\n?", "\n", text))


def read(path: Path) -> Log:
    """The log of a file or folder. ValueError of one sentence if there is none."""
    files = choose(path) if path.is_dir() else [path]
    found = [rows_of(content(file)) for file in files]
    log = collect([row for _, rows in found for row in rows])
    if not log.lines:
        what = "has no row of numbers that TRL, Unsloth, ms-swift, verl or prime-rl would log"
        raise ValueError(f"{path} {what}; give trainer_state.json, a .jsonl, a .csv, or its text")
    log.files, log.kind = [printable(str(file)) for file in files], found[0][0]
    if any(file.stat().st_size > MOST_BYTES or len(found[0][1]) == MOST_ROWS for file in files):
        log.notes.append(f"only the first {MOST_BYTES >> 20} MiB or {MOST_ROWS:,} rows were read")
    return log


# ------------------------------------------------------------------------------------------- rows

Row = dict[str, float]
FLAT = re.compile(r"\{[^{}]{2,100000}\}")  # across lines: people break long rows when they paste
# 'name': 0.5, "name": "0.5" (newer transformers quote numbers), 'name': np.float64(0.5)
PAIR = re.compile(
    r"""['"]([^'"]{1,200})['"]\s*:\s*(?:np\.float(?:32|64)\()?['"]?([^,'"{}()\s]{1,60})"""
)
# step:5 - actor/entropy:0.31 - critic/score/mean:np.float64(0.5)
VERL_LINE = re.compile(r"(?:^|\s)step:(\d{1,12}) - (.+)", re.M)
VERL_PAIR = re.compile(r"(?:^|\s)([\w./@-]{1,200}):(?:np\.\w+\()?([^\s()]{1,60})")
# 12:00:00 SUCCESS Step 5 | 12.3s | Reward 0.5000 | Truncation 3.1% (in 2025: Reward: 0.5000)
PRIME_LINE = re.compile(r"\b(?:Step (\d{1,12}) \||Evaluated \S{1,200} \(Step (\d{1,12})\) \|)(.+)")
PRIME_PAIR = re.compile(r"\s*([A-Z][\w. -]{0,40}?):? ([-+]?(?:nan|inf|[\d.]+(?:e[-+]?\d+)?))(%?)")
BROKEN = re.compile(r" ([-|]) ?\n *(?=[A-Za-z])| ?\n *([-|]) (?=[A-Za-z])")  # a line of either
COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
ROUNDED = re.compile(r"[-+]?0\.0{2,3}")  # below 0.005 or 0.0005, and nobody knows whether it is 0
STEPS = ("train/global_step", "global_step", "step", "_step", "global_step/max_steps")
BESIDES = {*STEPS, "epoch", "planned", "rounded"}  # what is in a row and no metric


@lru_cache(maxsize=10_000)
def is_known(name: str) -> bool:
    return name in BESIDES or any(ours(framework, name) for framework in NAMES)


def row_of(pairs) -> Row:
    """[(name, number as text)] -> {name: number}, of names that somebody logs, and its "step".

    "rounded" says that a rate or a norm was left out, because it is printed as 0.000.
    """
    row: Row = {}
    for name, value in pairs:
        name = re.sub(r" */ *", "/", name.strip()[:200])  # a notebook shows "rewards / x / mean"
        text, _, planned = str(value)[:60].strip().partition("/")  # ms-swift's step is "5/3766"
        if not is_known(name) or (planned and name not in STEPS):
            continue
        if ROUNDED.fullmatch(text) and re.search(r"(norm|lr|learning_rate)$", name, re.I):
            name = "rounded"
        with suppress(ValueError):
            row[name] = float(text)
            row |= {"planned": float(planned)} if planned else {}
    step = [row[name] for name in STEPS if name in row]
    return row | {"step": step[0]} if step else row


def metrics_in(row: Row) -> int:
    return len(row.keys() - BESIDES)


def json_rows(text: str) -> Iterator[Row]:
    """One object per line. verl keeps its numbers one level down, in "data"."""
    for line in text.split("\n"):
        if not line.startswith("{") or len(line) > MOST_LINE:
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        inner = found.get("data")
        row = row_of((found | inner if isinstance(inner, dict) else found).items())
        if metrics_in(row):
            yield row


def table_rows(text: str) -> Iterator[Row]:
    """wandb's export: "Step", "RUN - train/reward", …__MIN, …__MAX; of several runs, the first.

    A notebook's: Step | Training Loss | reward | completions / clipped_ratio
    """
    csv.field_size_limit(MOST_LINE)
    lines = text.split("\n")
    for at, line in enumerate(lines[:2_000]):
        for delimiter in (",", "\t", "|"):
            head = [cell.strip(' "') for cell in line[:MOST_LINE].split(delimiter)]
            if len(head) > 1 and {cell.lower() for cell in head} & set(STEPS):
                yield from body_rows(head, csv.reader(lines[at + 1 :], delimiter=delimiter))
                return


def body_rows(head: list[str], body) -> Iterator[Row]:
    run = next((cell.rpartition(" - ")[0] for cell in head if " - " in cell), "")
    shown = {"Training Loss": "loss", "Step": "step"}
    names = [shown.get(cell, cell).removeprefix(f"{run} - ") for cell in head]
    names = ["" if " - " in name else name for name in names]  # of another run
    with suppress(csv.Error):
        for cells in body:
            row = row_of(zip(names, cells))
            if "step" in row and metrics_in(row):
                yield row


def verl_rows(text: str) -> Iterator[Row]:
    for line in VERL_LINE.finditer(BROKEN.sub(r" \1\2 ", text)):
        yield row_of([("step", line[1]), *VERL_PAIR.findall(line[2])])


def prime_rows(text: str) -> Iterator[Row]:
    """'Step 5 | 1.2s | Reward 0.5000 | Truncation 3.1%' -> {"step": 5, "Reward": 0.5, …}"""
    for line in PRIME_LINE.finditer(BROKEN.sub(r" \1\2 ", text)):
        pairs = [("step", line[1] or line[2])]
        for part in line[3].split("|")[:50]:
            if pair := PRIME_PAIR.match(part):
                name = "Eval " * (line[2] is not None) + pair[1]
                pairs.append((name, f"{pair[2]}e-2" if pair[3] else pair[2]))
        yield row_of(pairs)


def dict_rows(text: str) -> Iterator[Row]:
    """The dicts of a trainer_state.json, or that transformers' Trainer prints.

    Other dicts stand there, too. So one counts with a step or with three names that TRL logs; and
    with an epoch, if any of them has one. A file that was cut off gives those it has.
    """
    if planned := re.search(r'"max_steps": *(\d{1,12})', text):
        yield {"step": 0.0, "planned": float(planned[1])}
    found = [row_of(PAIR.findall(entry.replace("\n", ""))) for entry in FLAT.findall(text)]
    is_row = lambda row: metrics_in(row) > 2 * ("step" not in row) or "eval_reward" in row
    rows = [row for row in found if is_row(row)]
    yield from [row for row in rows if "epoch" in row] or rows


READERS = [
    ("JSON lines", json_rows),
    ("table", table_rows),
    ("console text", verl_rows),
    ("console text", prime_rows),
    ("Trainer's rows", dict_rows),
]


def rows_of(text: str) -> tuple[str, list[Row]]:
    """(what kind of log this is, its rows): by the reader that finds most of them."""
    found = [(kind, list(islice(reader(text), MOST_ROWS))) for kind, reader in READERS]
    kind, rows = max(found, key=lambda one: len(one[1]))
    return kind, counted(rows)


def counted(rows: list[Row]) -> list[Row]:
    """Rows without a step of their own are counted, evaluations beside them.

    If the epoch goes back, the run was resumed there: the count goes back to that epoch's step.
    """
    epochs: list[float] = []  # of the rows counted so far
    for row in rows:
        if "step" in row:
            continue
        epoch = row.get("epoch", epochs[-1] if epochs else 0.0)
        if epochs and epoch < epochs[-1]:
            del epochs[bisect_left(epochs, epoch) :]
        if "eval_reward" not in row:
            epochs.append(epoch)
        row["step"] = float(max(len(epochs), 1))
    return rows


# ------------------------------------------------------------------------------------------- a log


def collect(rows: list[Row]) -> Log:
    """Rows in their order -> one Log under our names. Rows of one step are joined."""
    names = dict.fromkeys(name for row in rows for name in row)
    framework = max(NAMES, key=lambda one: sum(ours(one, name) is not None for name in names))
    best: dict[str, tuple[int, str]] = {}  # ours -> (line of the table, theirs)
    for name in list(names)[:MOST_COLUMNS]:
        if found := ours(framework, name):
            best[found[1]] = min((found[0], name), best.get(found[1], (found[0], name)))
    lines = [translated(row, best) for row in rows if 0 <= row["step"] < 1e12]
    lines, notes = one_run([line for line in lines if len(line) > 1])
    if any("rounded" in row for row in rows):
        notes.append("rates or norms of 0.000 were left out: below 0.0005, and maybe not 0")
    logged = {name for line in lines for name, value in line.items() if math.isfinite(value)}
    never = {name for line in lines for name in line} - logged
    if never:
        notes.append(f"never a number: {', '.join(best[mine][1] for mine in sorted(never))}")
    theirs = {mine: printable(name) for mine, (_, name) in best.items() if mine in logged}
    if framework == TRL and UNSLOTH_HAS <= {name.removeprefix("train/") for name in names}:
        framework = UNSLOTH
    planned = max((row.get("planned", 0.0) for row in rows), default=0.0)
    return Log(framework, lines, theirs, [printable(note) for note in notes], planned)


def translated(row: Row, best: dict[str, tuple[int, str]]) -> Row:
    """A row under our names, its step a whole number."""
    line: Row = {"step": int(row["step"])}
    for mine, (_, name) in best.items():
        if name in row:
            line[mine] = 1 - row[name] if name.endswith("reward_zero_std") else row[name]
    return line


def one_run(lines: list[Row]) -> tuple[list[Row], list[str]]:
    """(the lines of the last run in a log, each step's joined; notes).

    If the steps go back, the run was resumed: what follows stands behind what was there, and
    nothing is overwritten. If they go back to the first one, another run begins.
    """
    parts: list[dict[int, Row]] = [{}]  # of the run, {step: its line}: a part for each resume
    newest, notes = -1, []
    for line in lines:
        step = line["step"]
        if step < newest and len(line.keys() & parts[-1].get(step, {}).keys()) > 1:
            again = step <= min(parts[0])
            what = "began" if again else "was resumed"
            notes.append(f"a run {what} at step {step}")
            parts = [{}] if again else [*parts, {}]
            newest = step
        newest = max(newest, step)
        parts[-1].setdefault(step, {}).update(line)
    return [part[step] for part in parts for step in sorted(part)], notes[:10]


def demo() -> None:
    """The same two steps as verl, prime-rl and TRL print them."""
    verl = "step:1 - critic/score/mean:0.25 - actor/lr:1e-06\nstep:2 - critic/score/mean:0.5"
    prime = "12:00 Step 1 | 1s | Reward 0.25 | Max Off-Policy 0\nStep 2 | 1s | Reward: 0.5"
    trl = "{'loss': 0, 'reward': 0.25, 'kl': 0} 9%|# {'loss': nan, 'reward': '0.5', 'kl': 0}"
    for text in (verl, prime, trl):
        log = collect(rows_of(text)[1])
        print(f"{log.framework}:", *log.lines)


if __name__ == "__main__":
    for given in sys.argv[1:]:
        print(*read(Path(given)).lines[-3:], sep="\n")
    if len(sys.argv) == 1:
        demo()
