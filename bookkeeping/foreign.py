"""The doctor for other people's runs: read a log, say what is wrong with it and what to set.

    python -m bookkeeping.doctor trainer_state.json       # or a folder, a console log, a .wandb …
    picoswarm-doctor FILE_OR_FOLDER                       # the same, installed by pip

    logs.py       what kind of log is it? its rows      protobufs.py  wandb's and TensorBoard's
    names.py      whose names are these, and what are they to us?
    symptoms.py   the rules                             cures.py      causes, cures, words

Exit status: 0 nothing was found (remarks are nothing), 1 a symptom was found, 2 the log cannot be
read. Our own runs (a folder with metrics.jsonl of ours) are told about by doctor.py itself.

How sure? MEASURED has, for each rule, of how many healthy runs it was told wrongly. They were made
for this, on the test seeds that no threshold was chosen with (results/doctor/README.md). A rule
that no run of ours could try says so.

Run me: `python -m bookkeeping.foreign` reads a made-up log of TRL.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bookkeeping import cures, logs, names
from bookkeeping.logs import Log
from bookkeeping.records import printable
from bookkeeping.symptoms import Finding, look_at

# {rule: (healthy test runs that were told it wrongly, those that log what it looks at)}. Made by
# lab/trust/foreign_truth.py; tests/test_foreign.py holds that these are the numbers of
# results/doctor/truth.json.
MEASURED: dict[str, tuple[int, int]] = {
    "collapse": (0, 18),
    "stuck": (0, 18),
    "no signal": (0, 18),
    "noise": (0, 18),
    "cut short": (0, 18),
    "stale": (0, 2),
    "two distributions": (0, 2),
    "not a number": (0, 18),
    "cut off more": (0, 18),
    "KL": (0, 2),
    "entropy collapse": (0, 18),
    "learning rate": (0, 18),
    "far off": (0, 18),
    "thrown away": (0, 2),
    "still": (0, 18),
    "warm-up": (0, 18),
    "resumed": (0, 18),
}


def sure(name: str) -> str:
    wrong, runs = MEASURED.get(name, (0, 0))
    if not runs:
        return "no healthy TRL run of ours logs what this rule looks at"
    return f"told wrongly of {wrong} in {runs} healthy TRL runs"


def answer(log: Log, symptoms: Callable) -> dict:
    """All that there is to say, as one JSON object."""
    goal = goal_of(log)
    found = look_at(log, goal, symptoms)
    return {
        "files": log.files,
        "format": log.kind,
        "framework": log.framework,
        "version_of_names": names.VERSIONS.get(log.framework, ""),
        "steps": [log.steps[0], log.steps[-1]],
        "rows": len(log.steps),
        "columns": log.theirs,
        "unread_columns": log.unread,
        "notes": log.notes,
        "not_logged": not_logged(log),
        "symptoms": [told(one, log) for one in found if not one.remark],
        "remarks": [told(one, log) for one in found if one.remark],
        "nothing_found": "" if any(not one.remark for one in found) else nothing_found(log),
    }


def goal_of(log: Log) -> str | None:
    """The column that counts right answers: of ours, `exact`; of others, by a reward's name."""
    if "exact" in log.columns:
        return None  # doctor.py has a better rule
    parts = [name.removeprefix("part:") for name in log.columns if name.startswith("part:")]
    goal = names.goal_of(parts)
    return f"part:{goal}" if goal and len(parts) > 1 else None


def not_logged(log: Log) -> dict[str, str]:
    """{what a rule would look at: what logs it}, for columns that are absent."""
    have = set(log.columns)
    return {
        column: how for column, how in names.UNLOGGED[log.framework].items() if column not in have
    }


def told(one: Finding, log: Log) -> dict:
    illness = cures.ILLNESSES[one.name]
    link = f"{cures.JOURNAL}#{illness.journal}" if illness.journal else ""
    return {
        "name": one.name,
        "step": one.step,
        "seen": printable(one.seen),
        "columns": [log.theirs.get(column, column) for column in one.columns],
        "causes": list(illness.causes),
        "cure": cures.cure(one.name, log.framework),
        "journal": link,
        "sure": "" if one.remark else sure(one.name),
    }


def nothing_found(log: Log) -> str:
    """Why a log that looks odd is well."""
    loss = np.array(log.columns.get("loss", []), dtype=float)
    loss = loss[np.isfinite(loss)]
    said = "nothing wrong was found"
    if "reward" not in log.columns:
        return said + "; but this log has no reward, so most rules had nothing to look at"
    if len(loss) and np.median(np.abs(loss)) < 0.1:
        said += "; " + cures.why_the_loss_is_near_0(log.framework)
        norms = np.array(log.columns.get("grad_norm", []), dtype=float)
        if np.nansum(norms) > 0:
            said += f" (its median is {np.nanmedian(norms):.2g})"
    return said


def text(found: dict) -> str:
    """For people."""
    first, last = found["steps"]
    out = [
        f"{', '.join(found['files'])}: {found['format']} of {found['framework']}, "
        f"steps {first} to {last} ({found['rows']} rows)",
        f"read: {', '.join(sorted(found['columns'].values()))}",
        f"{found['unread_columns']} more columns are not looked at",
        *(f"note: {note}" for note in found["notes"]),
    ]  # fmt: skip
    for one in found["symptoms"] + found["remarks"]:
        out += ["", f"step {one['step']}: {one['name']}: {one['seen']}"]
        if one["columns"]:
            out.append(f"  look at     {', '.join(one['columns'])}")
        out += [
            f"  {'because of' if i == 0 else 'or of':11} {c}" for i, c in enumerate(one["causes"])
        ]
        out.append(f"  set         {one['cure']}")
        if one["journal"]:
            out.append(f"  see it      {one['journal']}")
        if one["sure"]:
            out.append(f"  how sure    {one['sure']}")
    if found["nothing_found"]:
        out += ["", found["nothing_found"]]
    if found["not_logged"]:
        out += ["", "not in this log, so not looked at:"]
        out += [f"  {column}: {how}" for column, how in found["not_logged"].items()]
    return "\n".join(out)


def main(path: Path, as_json: bool, symptoms: Callable) -> int:
    """Print what is wrong with this log; returns the exit status."""
    try:
        found = answer(logs.read(path), symptoms)
    except (ValueError, OSError, RecursionError, MemoryError, OverflowError) as error:
        why = printable(str(error))[:500] or type(error).__name__
        print(json.dumps({"error": why}) if as_json else why)
        return 2
    print(json.dumps(found, indent=1, allow_nan=False) if as_json else text(found))
    return 1 if found["symptoms"] else 0


def demo() -> None:
    """TRL's console lines, of a run whose schedule has ended. Without doctor.py's own rules."""
    line = {"loss": 0.0, "learning_rate": 0.0, "reward": 0.5, "frac_reward_zero_std": 0.25}
    rows = "\n".join(str(line | {"epoch": i / 100}) for i in range(12)).encode()
    log = logs.collect(list(logs.rows_of(rows)[1]))
    found = answer(log, lambda *_: {})
    print(text(found))
    assert [one["name"] for one in found["symptoms"]] == ["learning rate"]


if __name__ == "__main__":
    demo()
