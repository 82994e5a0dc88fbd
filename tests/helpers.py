"""What several files of tests use: samplers that stand in for one, random tokens, files of a run,
and logs of other trainers."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from chat import encode
from policy import Sample
from warm import ROOT


class Scripted:
    """Stands in for a sampler: member i of a group says replies[turn], whatever the prompt. Keeps
    the prompts."""

    version = 7

    def __init__(self, *replies: Sample):
        self.replies, self.prompts = replies, []

    def sample(self, prompts, k, max_tokens, temperature, seeds, **_):
        reply = self.replies[len(self.prompts)]
        self.prompts.append([list(p) for p in prompts])
        return [[reply] * k for _ in prompts]


def spelled(policy, text: str) -> list[int]:
    """The text one character a token: legal, but not how the tokenizer would cut it, and no control
    token among them."""
    return [token for character in text for token in encode(policy, character)]


def random_rows(n: int, length: int, seed: int = 0) -> torch.Tensor:
    """[n, length] ids, none of a control token."""
    return torch.randint(11, 1024, (n, length), generator=torch.Generator().manual_seed(seed))


def refusal(error: type[BaseException], call, *given, **named) -> str:
    """What a call says that ends with this error: one line of a sentence's length."""
    with pytest.raises(error) as caught:
        call(*given, **named)
    text = str(caught.value)
    assert "\n" not in text and 20 < len(text) < 400, text
    return text


def put(monkeypatch, place, **values) -> None:
    """Names of a module or a class that have other values until the test ends."""
    for name, value in values.items():
        monkeypatch.setattr(place, name, value)


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    """A new folder of these files."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def write_lines(file: Path, records: list[dict]) -> Path:
    """A .jsonl file."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def lines_of(columns: dict[str, object], n: int) -> list[dict]:
    """n lines of a log. columns: {name: n values, or one for all lines}."""
    values = [np.broadcast_to(column, n).tolist() for column in columns.values()]
    return [dict(zip(columns, line)) for line in zip(*values)]


def doctor_logs() -> tuple[dict[str, dict], dict[str, bytes]]:
    """(arms, {name: the bytes of a log}) of tests/doctor_logs.json.gz, for the doctor.

    trl/ARM-SEED.json: what TRL 1.16.0 wrote in runs of 30 steps, with one mistake made on purpose
    or with none. arms says which, the symptoms that name the mistake, and what the doctor of
    commit 22b9273 told of seeds 0, 1, 2. Thresholds were chosen with seed 0 in view; 1 and 2 judge
    them. samples/: short logs in the other formats. docs/trust.md (Older evidence) says what made them.
    cases/: logs made up after public reports. ours/: metrics.jsonl of our own runs at 22b9273.
    """
    pack = json.loads(gzip.decompress((ROOT / "tests" / "doctor_logs.json.gz").read_bytes()))
    return pack["arms"], {name: log.encode() for name, log in pack["logs"].items()}
