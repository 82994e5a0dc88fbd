"""Read the log of another trainer, a file or a folder, into lines like ours.

    trainer_state.json      TRL and Unsloth (transformers' Trainer); the longest of a run's
    console text            TRL, Unsloth, ms-swift, verl, prime-rl; of 2025 and of today, with
                            colours, progress bars, or rows that were broken when pasted
    *.jsonl                 verl's file logger, prime-rl's metrics.jsonl, ms-swift's logging.jsonl
    *.csv, *.tsv, tables    wandb's export of a chart or of a run; a table copied from a notebook,
                            or the notebook with it (.ipynb, or exported: .html, .md)

The contents decide which kind a file is: every reader tries, and the one that finds most rows
wins. A row counts only if it has names that a framework logs (NAMES), so a dict that a console
prints for another reason is not a row. The step is the log's own. Rows without one are numbered,
and if their epoch goes back (a resume), the number goes back with it.

A log is data: nothing in it is executed, and no path in it is followed. A file that is not a log,
or has more than MOST_BYTES, raises a ValueError of one sentence.

`python -m bookkeeping.doctor LOG` reads one and judges it.
"""

import csv
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

MOST_BYTES = 64 << 20  # of one file
KINDS = ("trainer_state.json", "metrics.jsonl", ".jsonl", ".csv", ".tsv", ".log", ".out", ".txt")

TRL, VERL, PRIME = "TRL", "verl", "prime-rl"

# {framework: {their name, a regular expression: our name}}. If two of theirs become one of ours,
# the upper one is read. Our names are those of metrics.jsonl, or are explained where doctor.py
# reads them. Taken from the sources of TRL 0.14 to 1.16 and transformers 5.19 (Unsloth and ms-swift
# write TRL's columns), verl of 2025 and 0.10.0.dev, prime-rl of 2025 and 0.8.0.
NAMES = {
    TRL: {
        "loss|Training Loss": "loss",  # the latter in a notebook
        "grad_norm": "grad_norm",
        "learning_rate": "lr",
        "reward": "reward",
        "reward_std": "reward_std",
        "frac_reward_zero_std": "groups_with_signal",  # 1 minus it
        r"rewards/([^/]+)/mean": "part",
        r"rewards/([^/]+)": "part",  # before 0.17
        "completions/mean_length|completion_length": "reply_tokens",
        "completions/clipped_ratio": "truncated",
        "completions/mean_terminated_length": "ended_tokens",  # 0: no reply ended by itself
        "entropy(?:/mean)?": "entropy",  # the latter in ms-swift
        "kl": "kl_ref",
        "clip_ratio/region_mean|clip_ratio": "clipped",
        "clip_ratio/high_mean": "clipped_high",
        "sampling/sampling_logp_difference/mean": "mismatch",
        "sampling/importance_sampling_ratio/mean|ratio": "kept_ratio",  # the latter: AsyncGRPO
        "eval_reward": "eval_reward",
    },
    VERL: {
        "critic/score/mean": "reward",
        "critic/rewards/mean": "reward",
        "critic/score/max": "reward_max",
        "critic/advantages/max": "advantage_max",
        "critic/advantages/min": "advantage_min",
        "response_length/mean": "reply_tokens",
        "response_length/clip_ratio": "truncated",
        "actor/entropy|actor/entropy_loss": "entropy",
        "actor/pg_loss": "loss",
        "actor/grad_norm": "grad_norm",
        "critic/grad_norm|critic/vf_loss": "critic",  # with PPO
        "actor/lr": "lr",
        "actor/kl_loss|actor/reward_kl_penalty": "kl_ref",
        "actor/pg_clipfrac": "clipped",
        "training/rollout_probs_diff_mean": "mismatch_probability",
        "rollout_corr/k3_kl": "mismatch_kl",
        "rollout_corr/rollout_is_mean": "kept_ratio",
        r"val-core/.+/(?:acc|reward)/mean@\d+|val/test_score/.+": "eval_reward",
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
        "Trainable": "groups_with_signal",  # the share of replies with an advantage
        "Truncation": "truncated",
        "Error": "errors_share",
        "Loss": "loss",
        "Entropy": "entropy",
        "Mismatch KL": "mismatch_kl",
        r"Grad\. Norm": "grad_norm",
        r"Max Off-Policy|Max\. Off-Policy Level": "off_policy_steps",
        "LR": "lr",
        r"Eval Reward|Val\. Reward": "eval_reward",
    },
}

# {framework: {our column: what to set so that it is logged}}
UNLOGGED = {
    TRL: {
        "mismatch": "use_vllm=True with vllm_importance_sampling_correction=True",
        "kl_ref": "beta above 0",
        "groups_with_signal": "TRL 0.18 or newer",
        "eval_reward": 'eval_strategy="steps" and an eval_dataset',
        "entropy": "TRL 0.19 or newer",
    },
    VERL: {
        "mismatch_probability": "actor_rollout_ref.rollout.calculate_log_probs=True",
        "kl_ref": "actor_rollout_ref.actor.use_kl_loss=True",
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
    "picoswarm": {
        "kl_ref": "--kl above 0",
        "mismatch": "updates with a signal",
        "entropy": "updates with a signal",
        "exact": "an environment whose score has that entry",
        "format": "an environment whose score has that entry",
        "prompts": "while it starts, a run itself compares them with those of SFT",
    },
}
# Names that many frameworks log: with no other one, a log may be anybody's.
ANYBODYS = re.compile(
    r"(?:train/)?(?:loss|kl|entropy|ratio)|train/grad_norm|reward|Loss|LR|Entropy"
)
# What a log of TRL is judged by if it has no reward: it is of SFT, DPO or KTO. Their kl and entropy
# are other numbers (KTO sums its kl over a reply), and healthy ones would look ill.
OF_ANY_TRAINER = ("loss", "grad_norm", "lr")
GOAL = re.compile(r"exact|correct|accura|\bacc\b|solved|pass(ed)?\b|answer|verif|match", re.I)
NO_GOAL = re.compile(r"format|length|tag|style|len\b|xml|think|short|long|repeat|language", re.I)

Row = dict[str, float]


@dataclass
class Log:
    """A log as read. lines: {our column: a number, "update": the step}, in the order of the run."""

    framework: str
    lines: list[Row]
    names: dict[str, str]  # our column, if it ever was finite -> its name in this log
    notes: list[str]
    files: list[str] = field(default_factory=list)
    evals: list[dict] = field(default_factory=list)  # of a run of ours
    told: dict[str, str] = field(default_factory=dict)  # what that run said itself was wrong
    run: str = ""  # its name, if the file has several runs
    others: list["Log"] = field(default_factory=list)  # those runs, in the first one's log


@lru_cache(maxsize=10_000)
def column_of(framework: str, name: str) -> tuple[int, str] | None:
    """(line of the table, our name) of one of their columns; None if we have no use for it.

    A reward function becomes "part:NAME".
    """
    if framework == TRL:  # wandb groups them
        name = re.sub("^eval/", "eval_", name.removeprefix("train/"))
    for line, (pattern, column) in enumerate(NAMES[framework].items()):
        if match := re.fullmatch(pattern, name):
            return line, f"part:{match[1]}" if column == "part" else column
    return None


# ------------------------------------------------------------------------------------------- files


def choose(folder: Path) -> list[Path]:
    """The files of one run in a folder, of the best kind there is."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for kind in KINDS:
        logs = [p for p in files if kind in (p.name, p.suffix) and p.name != "requirements.txt"]
        if {p.parent.name for p in logs} == {"trainer", "orchestrator"}:
            return logs  # prime-rl writes two
        if logs:  # each checkpoint's trainer_state.json has all that was logged until then
            return [max(logs, key=lambda p: p.stat().st_size)]
    raise ValueError(
        f"{folder} has no log in it ({', '.join(KINDS)}); give the folder of a run, or one file"
    )


def read(path: Path) -> Log:
    """The log in a file or folder. ValueError of one sentence if there is none."""
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder; check the path")
    files = choose(path) if path.is_dir() else [path]
    text = ""
    for file in files:
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"{file} has more than {MOST_BYTES >> 20} MiB; give its beginning")
        data = file.read_bytes()
        # The marks of UTF-16, which PowerShell's > writes
        coding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
        text += data.decode(coding, errors="replace") + "\n"
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)  # without colours
    rows = rows_of(plain.replace("\r", "\n"))
    runs = dict.fromkeys(row.get("run", "") for row in rows)
    logs = [collect([row for row in rows if row.get("run", "") == run], run, files) for run in runs]
    logs = [log for log in logs if log.lines]
    logged = {name for row in rows for name in row}
    if not logs or all(map(ANYBODYS.fullmatch, logged - BESIDES)):
        raise ValueError(
            f"{path} has no row of numbers that TRL, Unsloth, ms-swift, verl or prime-rl log; "
            "give trainer_state.json, a .jsonl, a .csv (of wandb: its export), or its text"
        )
    logs[0].others = logs[1:]
    return logs[0]


# ------------------------------------------------------------------------------------------- rows

FLAT = re.compile(r"\{[^{}]{2,100000}\}")  # across lines: pasting breaks long rows
# 'name': 0.5, "name": "0.5" (newer transformers quote numbers), 'name': np.float64(0.5)
PAIR = re.compile(
    r"""['"]([^'"]{1,200})['"]\s*:\s*(?:np\.float(?:32|64)\()?['"]?([^,'"{}()\s]{1,60})"""
)
# step:5 - actor/entropy:0.31 - critic/score/mean:np.float64(0.5)
# 12:00:00 SUCCESS Step 5 | 12.3s | Reward 0.5000 | Trainable 2/20 (10.0%) | Truncation 3.1%
# (in 2025: Reward: 0.5000)
# Evaluated aime (Step 5) | …
# {"message": "Step 5 | 12.3s | Reward 0.5000 | Truncation 3.1%", …  (prime-rl's log.json_logging)
STEP = re.compile(
    r"(?:^|[\s\"])(Evaluated \S{1,200} \()?[Ss]tep[: ](\d{1,12})\)?(?: [-|]|\s*\n(?=\s*- \S+:))"
)
# Detected 97/128 rollouts (gibberish=2, zero_advantage=95), enforced 95   (before the step's row)
FILTERED = re.compile(r"Detected \d+/([1-9]\d{0,8}) rollouts \([^()\n]*zero_advantage=(\d{1,9})")
BETWEEN = re.compile(r"[|\n] *(?:- )?|\s-\s")  # a row may be broken into several lines
SHOWN = re.compile(
    r"(.{1,200}?)(?:: ?| )(?:np\.\w+\(|\d+/\d+ \()?"  # a share is the one in the brackets
    r"([-+]?(?:nan|inf|\.?\d[\d.]*(?:e[-+]?\d+)?))(%?)(?=[\s/)\"\\]|$)"
)
ROUNDED = re.compile(r"[-+]?0\.0{2,3}")  # below 0.005 or 0.0005, and maybe not 0
STEPS = ("train/global_step", "global_step", "Step", "step", "_step", "global_step/max_steps")
BESIDES = {*STEPS, "epoch", "planned", "rounded", "run"}  # entries of a row that are not metrics


def row_of(pairs) -> Row:
    """[(name, number as text)] -> {name: number} for names that a framework logs, and "step".

    "rounded" says that a rate or a norm was left out because it is printed as 0.000.
    """
    row: Row = {}
    for name, text in pairs:
        name = re.sub(r" */ *", "/", name.strip())  # a notebook shows "rewards / x / mean"
        if name not in BESIDES and not any(column_of(framework, name) for framework in NAMES):
            continue
        if ROUNDED.fullmatch(text) and re.search(r"(norm|lr|learning_rate)$", name, re.I):
            name = "rounded"
        with suppress(ValueError):
            number = float(text.partition("/")[0])  # ms-swift's step is "5/3766"
            if name == "Trainable" and number == 1:  # in June 2026 it means that none was filtered
                continue
            row[name] = 1 - number if name.endswith("reward_zero_std") else number
    step = [row[name] for name in STEPS if name in row]
    return row | {"step": step[0]} if step else row


def table_rows(text: str) -> Iterator[Row]:
    """wandb's export: "Step", "RUN - train/reward", …__MIN, …__MAX; a row for each of its runs.

    A notebook's: Step | Training Loss | reward | completions / clipped_ratio
    """
    csv.field_size_limit(MOST_BYTES)
    names: list[tuple[str, str]] = []
    for line in text.split("\n"):
        delimiter = max(",\t|", key=line.count)
        cells = [cell.strip() for row in csv.reader([line], delimiter=delimiter) for cell in row]
        if len(cells) > 1 and {*STEPS} & {*cells}:
            names = [cell.rpartition(" - ")[::2] for cell in cells]  # (run or "", name)
        runs = dict.fromkeys(run for run, _ in names if run)
        for run in [*runs] or [""] * bool(names):
            pairs = [(name, x) for (whose, name), x in zip(names, cells) if whose in ("", run)]
            yield row_of(pairs) | ({"run": run} if run else {})


def html_rows(text: str) -> Iterator[Row]:
    """A notebook's table as the notebook keeps it (.ipynb), or as it is exported."""
    rows = text.replace("\n", " ").split("<tr")
    cells = (re.findall(r"<t[hd]\b[^>]{0,200}>([^<]*)</t[hd]>", row) for row in rows)
    yield from table_rows("\n".join(map("\t".join, cells)))


def console_rows(text: str) -> Iterator[Row]:
    """'Step 5 | 1.2s | Reward 0.5000 | Truncation 3.1%' -> {"step": 5, "Reward": 0.5, …}

    A name's first number counts: prime-rl goes on with each environment's.
    """
    before, *parts = STEP.split(text)
    for evaluated, step, body in zip(parts[::3], parts[1::3], parts[2::3]):
        filtered, before = FILTERED.findall(before), body
        prefix = "Eval " if evaluated else ""
        matches = filter(None, (SHOWN.match(part.strip()) for part in BETWEEN.split(body)))
        pairs = [
            (prefix + name, f"{number}e-2" if percent else number)
            for name, number, percent in (match.groups() for match in matches)
        ]
        pairs += [("Trainable", f"{1 - int(zero) / int(n)}") for n, zero in filtered[-1:]]
        yield row_of([*reversed(pairs), ("step", step)])


def broken_rows(text: str) -> Iterator[Row]:
    """The same if a terminal broke the rows at its width, even within a name or a number."""
    lines = text.split("\n")
    yield from console_rows("".join(f"\n{x}" if STEP.search(x) else x for x in lines))


def dict_rows(text: str) -> Iterator[Row]:
    """JSON, one object per line or trainer_state.json; or the dicts that the Trainer prints.

    There may be other dicts, too. So a dict counts if it has a step, an epoch, or three names that
    a framework logs; and if any has an epoch, it needs one. A file that was cut off gives the rows
    it has.
    """
    entries = FLAT.findall(re.sub(r'"data": ?\{', "", text))  # verl's are one level down
    rows = [row_of(PAIR.findall(entry.replace("\n", ""))) for entry in entries]
    rows = [row for row in rows if row.keys() & {"step", "epoch"} or len(row) > 2]
    yield from [row for row in rows if "epoch" in row] or rows


def rows_of(text: str) -> list[Row]:
    """The rows, from the reader that finds most numbers."""
    readings = [
        [row for row in reader(text) if row.keys() - BESIDES]
        for reader in (dict_rows, table_rows, html_rows, console_rows, broken_rows)
    ]
    rows = counted(max(readings, key=lambda rows: sum(map(len, rows))))
    if planned := re.findall(r'max_steps": *"?(?:\d{1,12}/)?(\d{1,12})', text):
        rows[-1:] = [row | {"planned": float(planned[0])} for row in rows[-1:]]
    return rows


def counted(rows: list[Row]) -> list[Row]:
    """Number the rows that have no step; an evaluation gets the step of the row before it.

    If the epoch goes back, the run was resumed there: the number goes back to that epoch's step.
    """
    epochs: list[float] = []  # of the rows counted so far
    for row in (row for row in rows if "step" not in row):
        epoch = row.get("epoch", epochs[-1] if epochs else 0.0)
        if epochs and epoch < epochs[-1]:
            epochs = [earlier for earlier in epochs if earlier < epoch]
        if "eval_reward" not in row:
            epochs.append(epoch)
        row["step"] = float(max(len(epochs), 1))
    return rows


# ------------------------------------------------------------------------------------------- a log


def collect(rows: list[Row], run: str, files: list[Path]) -> Log:
    """A run's rows in order -> one Log under our names. Rows of one step are joined.

    If one reward function, by its name, counts right answers, it becomes the column "goal".
    """
    logged = dict.fromkeys(name for row in rows for name in row)
    framework = max(NAMES, key=lambda one: sum(bool(column_of(one, name)) for name in logged))
    known = sorted((*column, name) for name in logged if (column := column_of(framework, name)))
    names = {column: name for _, column, name in reversed(known)}  # the table's upper line wins
    parts = [column for column in names if column.startswith("part:")]
    goals = [p for p in parts if GOAL.search(p.replace("_", " ")) and not NO_GOAL.search(p)]
    if len(goals) == 1 and len(parts) > 1:
        names["goal"] = names[goals[0]]
    # TRL's AsyncGRPOTrainer has no reference model, but a sampler that lags behind.
    lags = framework == TRL and {"ratio", "kl"} <= logged.keys()
    if lags:
        del names["kl_ref"]
    if framework == TRL and "reward" not in names:
        names = {column: name for column, name in names.items() if column in OF_ANY_TRAINER}
    columns = names | {"planned": "planned"}
    lines = [
        {column: row[name] for column, name in columns.items() if name in row}
        | {"update": int(row["step"])}
        for row in rows
        if math.isfinite(row["step"])
    ]
    lines, notes = one_run([line for line in lines if len(line) > 1])
    if lags:
        notes.append("kl is that of the trainer to its sampler, which is older: it was not judged")
    if any("rounded" in row for row in rows):
        notes.append("rates or norms of 0.000 were left out: below 0.0005, and maybe not 0")
    finite = {column for line in lines for column, value in line.items() if math.isfinite(value)}
    names = {column: name for column, name in names.items() if column in finite}
    gaps = {  # in loss, norm and reward they are a finding of the doctor
        name: sum(not math.isfinite(line.get(column, 0.0)) for line in lines)
        for column, name in names.items()
        if column not in ("loss", "grad_norm", "critic", "reward")
    }
    notes += [
        f"{name} is not a number in {n} rows: if loss and norm are, it had nothing to average"
        for name, n in gaps.items()
        if n
    ]
    return Log(framework, lines, names, notes, [*map(str, files)], run=run)


def one_run(lines: list[Row]) -> tuple[list[Row], list[str]]:
    """(the lines of the last run in a log, those of each step joined; notes).

    If the steps go back, the run was resumed: later lines are appended, and nothing is overwritten.
    If they go back to the first one, another run begins.
    """
    run: list[Row] = []
    at: dict[int, Row] = {}  # {step: its line}, since the last resume
    notes = []
    for line in lines:
        step = line["update"]
        twice = line.keys() & at.get(step, {}).keys() - {"update", "planned"}
        if twice and step < run[-1]["update"]:
            again = step <= run[0]["update"]
            note = f"a run {'began' if again else 'was resumed'} at step {step}"
            notes.append(note + "; what is before it was not read" * again)
            run, at = ([] if again else run), {}
        if step not in at:
            at[step] = {}
            run.append(at[step])
        at[step].update(line)
    return run, notes
