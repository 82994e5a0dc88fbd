"""The files of a run: how they are written, and how they are read again, whoever wrote them.

A run folder may come from anywhere: a colleague, the hub, a disk that was full. So its contents are
data and nothing else. If a line cannot be read, the error names it and its file. Text is made safe
to print and to put into Markdown. And a command that meets something that no run writes ends with
one sentence and no traceback. Nothing here needs torch: a report can be made on a machine where the
run could not run.

episodes.jsonl keeps episodes for a person to read in report.html: whole groups, each sampled token
with its log-prob, and with how much likelier the next update made it.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path

# Saved episodes may take so many bytes: a run of days would save gigabytes that nobody reads.
MOST_BYTES = 64 * 2**20
WINDOWS = os.name == "nt"


def an_object(text: bytes, place: str) -> dict:
    """The JSON object in `text`; ValueError names the place if it is no JSON.

    NaN, which a browser cannot read, becomes None.
    """
    try:
        return json.loads(text.decode("utf-8"), parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{place} is damaged ({error}); mend or restore it, or give another run"
        ) from None


def read(path: Path) -> dict:
    """config.json or summary.json, as it is."""
    return an_object(path.read_bytes(), str(path))


def config_of(folder: Path) -> dict:
    """A run's config.json; ValueError if there is none, so that this is no run folder."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json, so it is no run folder; check the path")
    return read(folder / "config.json")


def record(path: Path) -> dict:
    """config.json or summary.json, its text made safe."""
    return clean(read(path))


def lines(path: Path) -> list[dict]:
    """The lines of a run's .jsonl file; empty if there is none.

    The run may still be going, or have been killed: an unfinished last line is left out.
    """
    *whole, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    return [
        an_object(text, f"{path}, line {i},") for i, text in enumerate(whole, 1) if text.strip()
    ]


def answered(line: dict) -> list[int]:
    """The numbers of the tasks that a line of evals.jsonl has results for.

    If the environment or the endpoint failed, the line lists the task as missing.
    """
    missing = {int(i) for i in line.get("missing", {})}
    return [i for i in range(len(line["reward"]) + len(missing)) if i not in missing]


def same_tasks(*evals: dict) -> list[dict]:
    """These lines of evals.jsonl, cut to the tasks that all of them have a result for."""
    common = set.intersection(*(set(answered(e)) for e in evals))
    cut = lambda e, values: [v for i, v in zip(answered(e), values) if i in common]
    return [
        {
            name: cut(e, v) if isinstance(v, list) else v
            for name, v in e.items()
            if name != "missing"
        }
        for e in evals
    ]


# ---------------------------------------------------------------------------------- untrusted text


def printable(text: str) -> str:
    """On one line, without control characters: each becomes a question mark."""
    return "".join(c if c.isprintable() else "?" for c in text)


def clean(x):
    """Safe for Markdown and a terminal: one line, printable, no HTML, no link, no table cell.

    In a list or a dict, every text becomes safe.
    """
    if isinstance(x, str):
        text = printable(x).replace("](", "] (").replace("<", "&lt;")
        return text.replace("`", "'").replace("|", "¦")
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
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise SystemExit(
            f"{folder} holds what no run writes ({type(error).__name__}: "
            f"{ascii(str(error))[:100]}); restore it, or give another"
        ) from None


def with_exact(evals: list[dict]) -> list[dict]:
    """Evaluations, each with `exact` if any has it: 0 if nothing is reported to be right."""
    if not any("exact" in e for e in evals):
        return evals
    return [{"exact": [0.0] * len(e["reward"])} | e for e in evals]


# ----------------------------------------------------------------------------------------- writing


def as_line(record: dict) -> str:
    """A record as a line of a .jsonl file."""
    return json.dumps(record, separators=(",", ":")) + "\n"


def append(path: Path, record: dict) -> None:
    """Add one line to a .jsonl file."""
    with open(path, "a", encoding="utf-8") as f:
        f.write(as_line(record))


def say(folder: Path, text: str) -> None:
    """Print a line, and add it to the run's train.log."""
    from tqdm import tqdm  # here, because the doctor may be installed without it

    tqdm.write(text)  # above a progress bar
    note(folder, text)


def note(folder: Path, text: str) -> None:
    """Add lines to the run's train.log."""
    with open(folder / "train.log", "a", encoding="utf-8") as f:
        f.write(text + "\n")


def write_json(path: Path, value: dict) -> None:
    """write_whole of a value as JSON."""
    write_whole(path, json.dumps(value, indent=1))


def write_lines(path: Path, records: list[dict]) -> None:
    """write_whole of records as a .jsonl file."""
    write_whole(path, "".join(map(as_line, records)))


def write_whole(path: Path, text: str) -> None:
    """Write the whole text, or leave the old file as it is.

    The text is on the disk before it gets its name, so that a power cut leaves either the old file
    or the new one. A link in the file's place is replaced, not followed.
    """
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    new.write_text(text, encoding="utf-8", newline="\n")
    flush(new)
    new.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Put a file's bytes, or a folder's names, on the disk, not only in memory."""
    if WINDOWS and path.is_dir():
        return  # there a folder cannot be opened
    handle = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_episodes(folder: Path, update: int, stage: str, policy, groups, ratios=None):
    """Add groups of episodes to episodes.jsonl.

    stage: of an evaluation. If it is "", these are groups of a training batch, with advantages;
    ratios[g][i] has the importance ratio, after the update, of each token that episode i of group g
    sampled.
    """
    for g, group in enumerate(groups):
        for i, e in enumerate(group):
            record = {
                "update": update,
                "source": "eval" if stage else "rollout",
                "stage": stage,
                "group": g,
                "member": i,
                "seed": e.seed,
                "reward": e.reward,
                # the mean over its tokens, which usually have one number
                "advantage": None if stage else mean_of(e.advantages),
                "components": e.components,
                "stop_reason": e.stop_reason,
                "error": e.error,
                "policy_version": e.policy_version,
                "reply_tokens": e.reply_tokens,
                "logprob": round(sum(e.logprobs), 3),
                "messages": e.messages,
                "segments": [*segments(policy, e, None if stage else ratios[g][i])],
            }
            append(folder / "episodes.jsonl", record)
    thin(folder / "episodes.jsonl")


def mean_of(advantages: list[float]) -> float:
    """0 for an episode that failed before its first reply."""
    return round(sum(advantages) / max(1, len(advantages)), 4)


def segments(policy, episode, ratios: list[float] | None) -> Iterator[dict]:
    """An episode cut where the speaker changes: given text, and the policy's tokens with numbers.

    ratios: the importance ratio of each sampled token, [episode.reply_tokens], or None.
    """
    numbers = iter(ratios or [])
    # A process reward or credit per turn; if all tokens have one advantage, the episode says it.
    advantages = iter(episode.advantages if len(set(episode.advantages)) > 1 else [])
    tokens = zip(episode.token_ids, episode.sampled, episode.logprobs)  # none if played over an API
    for sampled, part in groupby(tokens, key=lambda token: token[1]):
        ids, _, logprobs = zip(*part)
        if sampled:
            yield {
                "role": "policy",
                "tokens": [policy.tokenizer.decode([t]) for t in ids],
                "logprobs": [round(x, 4) for x in logprobs],
                "ratios": ratios and [round(next(numbers), 4) for _ in ids],
                "advantages": [round(x, 4) for x in islice(advantages, len(ids))],
            }
        else:
            yield {"role": "given", "text": policy.tokenizer.decode(list(ids))}


def thin(path: Path, most: int = MOST_BYTES) -> None:
    """Keep episodes.jsonl under `most` bytes: drop every second update, but not the ends."""
    while path.exists() and path.stat().st_size > most:
        episodes = lines(path)
        updates = sorted({e["update"] for e in episodes})
        keep = {*updates[::2], updates[-1]}
        if len(keep) == len(updates):
            return  # only one or two updates, both large
        write_lines(path, [e for e in episodes if e["update"] in keep])


def broken(groups: list[list]) -> str:
    """The printed line about failed episodes: how many, and the first error."""
    errors = [e.error for group in groups for e in group if e.stop_reason == "error"]
    if not errors:
        return ""
    return (
        f"\n  {len(errors)} of {sum(map(len, groups))} episodes ended in an error and are left "
        f"out: {errors[0]}"
    )
