"""Protects the doctor of other people's runs: what it reads, what it says, how often it is wrong,
and that no file can hurt it."""

import io
import json
import os
import re
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bookkeeping import cures, doctor, logs
from helpers import doctor_logs, write_folder

ROOT = Path(__file__).resolve().parents[1]
ARMS, LOGS = doctor_logs()
SAMPLES = {name.removeprefix("samples/"): log for name, log in LOGS.items() if "samples" in name}


def run(path: Path, *flags: str) -> tuple[int, str]:
    """Exit status of `python -m bookkeeping.doctor PATH`, and what it prints."""
    out = io.StringIO()
    with mock.patch.object(sys, "argv", ["doctor", str(path), *flags]), redirect_stdout(out):
        with pytest.raises(SystemExit) as end:
            doctor.command()
    return end.value.code, out.getvalue()


def no_json(name: str):
    raise AssertionError(f"{name} is no JSON")


def ask(data: bytes) -> dict:
    """What the doctor says of a file with these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a log of some kind"
        path.write_bytes(data)
        return json.loads(run(path, "--json")[1], parse_constant=no_json)


def told(data: bytes) -> list[str]:
    return [one["name"] for one in ask(data)["symptoms"]]


def columns(folder: Path, data: bytes) -> dict[str, list[float]]:
    """Our columns of a log with these bytes."""
    (folder / "log").write_bytes(data)
    return logs.read(folder / "log").columns


# ------------------------------------------------------------------------------------ what it reads

WELL, SICK = [], ["no signal"]
READ = {
    "trl-healthy.log": ("TRL", "console text", WELL),
    "trl-no-variance.log": ("TRL", "console text", SICK),
    "trl-plain.json": ("TRL", "trainer_state.json", WELL),
    "unsloth-no-variance.json": ("Unsloth", "trainer_state.json", SICK),
    "verl-healthy.log": ("verl", "console text", WELL),
    "verl-no-variance.log": ("verl", "console text", SICK),
    "verl-no-variance.jsonl": ("verl", "JSON lines", SICK),
    "verl-learning-rate.jsonl": ("verl", "JSON lines", ["cut short", "no signal"]),
    "prime-healthy.log": ("prime-rl", "console text", WELL),
    "prime-no-variance.log": ("prime-rl", "console text", SICK),
    "prime-no-variance.jsonl": ("prime-rl", "JSON lines", SICK),
    "wandb-no-variance.csv": ("TRL", "CSV", SICK),
    "run.wandb": ("TRL", "wandb offline run", WELL),
    "events.out.tfevents.plain": ("TRL", "TensorBoard events", WELL),
}


@pytest.mark.parametrize("file", READ)
def test_a_log_is_known_by_what_is_in_it(file):
    found = ask(SAMPLES[file])
    symptoms = [one["name"] for one in found["symptoms"]]
    assert (found["framework"], found["format"], symptoms) == READ[file]
    assert found["steps"] == [1, 30 if file == "trl-plain.json" else 12]
    assert "reward" in found["columns"]


@pytest.mark.parametrize(
    "one, other",
    [
        ("trl-plain.json", "run.wandb"),
        ("trl-plain.json", "events.out.tfevents.plain"),  # TensorBoard keeps float32
        ("verl-healthy.log", "verl-healthy.jsonl"),
        ("trl-healthy.log", "unsloth-healthy.json"),
    ],
)
def test_two_writers_leave_the_same_numbers(tmp_path, one, other):
    a, b = columns(tmp_path, SAMPLES[one]), columns(tmp_path, SAMPLES[other])
    shared = a.keys() & b.keys()
    assert len(shared) >= 7
    for name in shared:
        assert b[name] == pytest.approx(a[name][:12], rel=1e-6)


def test_prime_rl_writes_several_rows_per_step_and_they_become_one(tmp_path):
    rows = SAMPLES["prime-healthy.jsonl"].splitlines(keepends=True)
    trainer = [row for row in rows if b"train/agg" not in row]
    orchestrator = [row for row in rows if b"train/agg" in row]
    for name, its in (("trainer", trainer), ("orchestrator", orchestrator)):
        write_folder(tmp_path / name, {"metrics.jsonl": b"".join(its)})
    log = logs.read(tmp_path)
    assert len(log.files) == 2
    assert log.columns == columns(tmp_path, b"".join(rows))


def test_a_folder_gives_its_newest_checkpoint_and_follows_no_link(tmp_path):
    for number in (5, 30):
        files = {"trainer_state.json": SAMPLES["trl-plain.json"]}
        newest = write_folder(tmp_path / f"checkpoint-{number}", files) / "trainer_state.json"
    assert logs.read(tmp_path).files == [str(newest)]
    elsewhere = write_folder(tmp_path / "elsewhere", {})
    (elsewhere / "trainer_state.json").symlink_to(newest)
    with pytest.raises(ValueError, match="has no log in it"):
        logs.read(elsewhere)


@pytest.mark.parametrize(
    "text, found",
    [
        # of wandb's CSV of several runs the first is read
        (
            'Step,"a - train/reward","a - train/reward__MIN","b - train/reward"\n1,0.5,0.1,0.9\n'
            "2,0.6,,,\n",
            {"reward": [0.5, 0.6]},
        ),
        # lines may end as on an old Mac
        ("step,reward\r1,0.5\r2,0.4\r", {"reward": [0.5, 0.4]}),
        # older names, quoted numbers
        (
            "{'loss': '0.0', 'reward': 1.16, 'reward_std': 0.9, 'completion_length': 834.3}",
            {"loss": [0.0], "reward": [1.16], "reward_std": [0.9],
             "reply_tokens": [834.3]},
        ),
        # NumPy's numbers, colours, and Ray's name of the process
        (
            "\x1b[36m(TaskRunner pid=3)\x1b[0m step:7 - actor/entropy:np.float64(0.31) - "
            "critic/score/mean:-0.5",
            {"entropy": [0.31], "reward": [-0.5]},
        ),
    ],
)  # fmt: skip
def test_odd_ways_to_write_a_log_are_read(tmp_path, text, found):
    assert columns(tmp_path, text.encode()) == found


# ------------------------------------------------------------------------------------ what it says

N = 40
RISES = 0.2 + 0.015 * np.arange(N) + np.random.default_rng(1).normal(0, 0.02, N)
FLAT = 0.3 + np.random.default_rng(2).normal(0, 0.02, N)
SHAKY = np.random.default_rng(3).normal(0, 0.05, N)
COME_AND_GO = 0.5 + np.random.default_rng(4).normal(0, 0.15, N)
RATE, SIGNAL, LENGTH = "learning_rate", "frac_reward_zero_std", "completions/mean_length"
CUT, MISMATCH = "completions/clipped_ratio", "sampling/sampling_logp_difference/mean"
GOAL, FORMAT = "rewards/accuracy/mean", "rewards/format/mean"
HEALTHY = {  # of TRL
    "reward": 0.4 + 0.01 * np.arange(N) + np.random.default_rng(0).normal(0, 0.02, N),
    SIGNAL: 0.2,
    "entropy": np.linspace(0.3, 0.1, N),
    "grad_norm": 0.4,
    LENGTH: 100 + np.random.default_rng(5).normal(0, 3, N),
    RATE: 1e-6,
    CUT: 0.0,
}


def half(before: float, after: float) -> np.ndarray:
    return np.repeat([before, after], N // 2)


def made_up(changed: dict, healthy: dict = HEALTHY) -> bytes:
    """A healthy run of TRL, but for the columns that are changed; None leaves one out."""
    given = {name: values for name, values in (healthy | changed).items() if values is not None}
    full = {name: np.broadcast_to(values, N) for name, values in given.items()}
    rows = []
    for i in range(N):
        row = {name: float(values[i]) for name, values in full.items() if values[i] == values[i]}
        rows.append(json.dumps({"step": i + 1, **row}))
    return "\n".join(rows).encode()


EVALS = np.where(np.arange(N) % 10 == 0, 0.3, np.nan)
HIGH = {"reward": 0.98, FORMAT: 0.98, SIGNAL: 0.9}
LONGER = {"reward": RISES, LENGTH: np.linspace(100, 300, N)}
# (symptom, what makes it, a twin that must be told nothing)
ILL = [
    ("collapse", {"reward": half(0.7, 0.1)}, {"reward": half(0.7, 0.6)}),
    ("collapse", {"reward": half(-1, -9) + SHAKY}, {"reward": -3 + np.arange(N) / 9 + SHAKY}),
    ("no signal", {SIGNAL: half(0.2, 1)}, {SIGNAL: half(0.2, 0.7)}),
    ("no signal", {"grad_norm": half(0.4, 0), SIGNAL: None}, {SIGNAL: None}),
    ("cut short", {CUT: 0.8}, {CUT: 0.3}),
    ("cut off more", {CUT: np.linspace(0, 0.45, N)}, {CUT: np.linspace(0.2, 0.3, N)}),
    ("noise", {"entropy": half(0.3, 4)}, {"entropy": half(0.3, 0.8)}),
    ("stale", {MISMATCH: np.linspace(1e-4, 0.2, N)}, {MISMATCH: np.linspace(1e-4, 0.01, N)}),
    ("two distributions", {MISMATCH: 0.2}, {MISMATCH: 0.01}),
    ("KL", {"kl": np.geomspace(1e-3, 30, N)}, {"kl": np.linspace(1e-3, 0.5, N)}),
    (
        "entropy collapse",
        {"entropy": np.geomspace(1, 1e-3, N), "reward": FLAT, SIGNAL: 0.8},
        {"entropy": np.geomspace(1, 1e-3, N), SIGNAL: 0.7},
    ),
    (
        "pays something else",
        {"reward": RISES, FORMAT: RISES, GOAL: FLAT},
        {"reward": RISES, FORMAT: FLAT, GOAL: RISES},
    ),
    (  # nothing rises: the format is perfect from the start
        "pays something else",
        {**HIGH, GOAL: COME_AND_GO},
        {**HIGH, GOAL: COME_AND_GO, "reward": 0.98 + COME_AND_GO},
    ),
    (
        "pays length",
        {**LONGER, "rewards/length/mean": RISES, GOAL: FLAT},
        {**LONGER, "rewards/length/mean": FLAT, GOAL: RISES},
    ),
    (
        "only in training",
        {"reward": RISES, "eval_reward": EVALS},
        {"reward": RISES, "eval_reward": EVALS * (1 + np.arange(N) / 20)},
    ),
    (
        "still",
        {"reward": FLAT, "entropy": FLAT},
        {"reward": FLAT, "entropy": np.linspace(0.3, 0.2, N)},
    ),
    ("learning rate", {RATE: half(1e-6, 0)}, {RATE: half(1e-6, 1e-7)}),
    (
        "warm-up",
        {RATE: np.linspace(1e-9, 1e-7, N)},
        {RATE: [*np.linspace(1e-9, 1e-6, 20), *np.full(20, 1e-6)]},
    ),
    (
        "resumed",
        {RATE: [*np.linspace(1e-6, 5e-7, 20), *np.linspace(1e-8, 1e-6, 20)]},
        {RATE: np.linspace(1e-6, 1e-8, N)},
    ),
    ("far off", {"clip_ratio/region_mean": 0.5}, {"clip_ratio/region_mean": 0.05}),
    (
        "thrown away",
        {"sampling/importance_sampling_ratio/mean": 0.1},
        {"sampling/importance_sampling_ratio/mean": 0.97},
    ),
]


@pytest.mark.parametrize("symptom, sick, well", ILL)
def test_a_symptom_is_told_and_its_healthy_twin_is_not(symptom, sick, well):
    found = ask(made_up(sick))
    (one,) = found["symptoms"]
    assert one["name"] == symptom and one["cure"] and one["causes"] and one["sure"]
    assert re.search(r"\d", one["seen"]) and not found["nothing_found"]
    assert "--" not in one["cure"] + one["seen"]  # TRL's own settings, not our flags
    page, _, heading = one["journal"].partition("#")
    assert not page or f"\n## {heading}\n" in (ROOT / page).read_text()
    assert told(made_up(well)) == []


@pytest.mark.parametrize(
    "symptom, column, sick, well",
    [
        ("engine", "mismatch_kl/all/mean", 0.1, 0.002),
        ("errors", "train/agg/all/has_error/mean", 0.4, 0.02),
    ],
)
def test_what_only_prime_rl_logs_is_told_too(symptom, column, sick, well):
    prime = {
        "train/agg/effective/a/reward/mean": HEALTHY["reward"],
        "entropy/all/mean": HEALTHY["entropy"],
    }
    assert told(made_up({column: sick}, prime)) == [symptom]
    assert told(made_up({column: well}, prime)) == []


def test_a_number_that_is_none_is_told_with_its_step():
    rows = [f"{{'loss': {loss}, 'reward': 0.5, 'reward_std': 0.5}}" for loss in (0.1, "nan", 0.1)]
    (one,) = ask("\n".join(rows).encode())["symptoms"]
    assert (one["name"], one["step"]) == ("not a number", 2) and "loss" in one["seen"]


def test_a_reward_function_that_has_nothing_to_say_of_a_batch_is_no_illness():
    row = {"loss": 0.01, "reward": 0.5, "rewards/code/mean": 0.5, "rewards/format/mean": 1.0}
    rows = [row | {"epoch": i / 100} for i in range(12)]
    rows[7]["rewards/code/mean"] = float("nan")
    assert told("\n".join(map(str, rows)).encode()) == []


def test_what_is_solved_is_no_alarm():
    found = ask(made_up({"reward": 1.0, SIGNAL: 1.0}))
    assert found["symptoms"] == [] and [one["name"] for one in found["remarks"]] == ["solved"]


def test_a_log_that_is_well_says_why_its_loss_is_near_0_and_what_it_lacks():
    found = ask(made_up({"loss": 1e-8}))
    assert "a loss near 0 is normal here" in found["nothing_found"]
    assert "num_iterations=1" in found["nothing_found"]
    assert found["not_logged"]["kl"] == "beta above 0" and "entropy" not in found["not_logged"]


def test_the_page_has_every_symptom_as_the_table_has_it():
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert cures.page() in page, "older than bookkeeping/cures.py; run python -m bookkeeping.cures"


# -------------------------------------------------------------------------- how often it is wrong

NEVER_NAMED = {"dropout", "off-policy"}  # what TRL logs of these does not show them


@pytest.mark.parametrize("arm", ARMS)
def test_real_runs_of_trl_7_of_9_mistakes_are_named_and_0_of_18_healthy_runs_alarmed(arm):
    """Each mistake in both of its test runs."""
    assert len(ARMS) == 18 and sum(facts["mistake"] for facts in ARMS.values()) == 9
    for seed in (1, 2):
        found = set(told(LOGS[f"trl/{arm}-{seed}.json"]))
        if ARMS[arm]["mistake"]:
            assert bool(found & set(ARMS[arm]["named_by"])) == (arm not in NEVER_NAMED), found
        else:
            assert not found


# ------------------------------------------------------------------------------------ the command


def test_the_command_ends_with_0_1_or_2(tmp_path):
    folder = write_folder(tmp_path / "logs", SAMPLES)
    status, said = run(folder / "trl-healthy.log")
    assert status == 0 and "nothing wrong was found" in said
    status, said = run(folder / "verl-no-variance.log")
    assert status == 1 and "step 10: no signal: " in said
    assert "algorithm.filter_groups.enable=True" in said
    assert run(folder / "prime-learning-rate.jsonl", "--json")[0] == 1
    assert run(folder / "nobody")[0] == 2
    assert run(folder / "trl-healthy.log", "too many words")[0] == 2


# ------------------------------------------------------------------------------------ hostile files


def survives(data: bytes) -> None:
    """An answer that is JSON and steers no terminal, or one sentence: nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(data)
        status, said = run(path, "--json")
        found = json.loads(said, parse_constant=no_json)
        assert (status == 2) == ("error" in found)
        said = run(path)[1]
    assert all(c.isprintable() or c == "\n" for c in said)


STARTS = [b"", b":W&B\xe1\xbe\x00", b'{"log_history": [', b"Step,train/reward\n", b"step:1 - "]


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=400), st.sampled_from([*STARTS, b"{'loss': "]))
def test_any_bytes_get_an_answer_or_a_sentence(data, start):
    survives(start + data)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(READ)), st.sampled_from(sorted(READ)), st.data())
def test_logs_that_are_cut_mixed_and_changed_get_an_answer_or_a_sentence(one, other, data):
    one, other = SAMPLES[one], SAMPLES[other]
    cut, begin = data.draw(st.integers(0, len(one))), data.draw(st.integers(0, len(other)))
    mixed = bytearray(one[:cut] + other[begin : begin + 3000] + b"\n")
    for _ in range(data.draw(st.integers(0, 8))):
        mixed[data.draw(st.integers(0, len(mixed) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(mixed))


NUMBERS = st.one_of(
    st.floats(),
    st.integers(-(10**400), 10**400),
    st.none(),
    st.text(max_size=5),
    st.booleans(),
    st.lists(st.integers(), max_size=2),
)
COLUMNS = [*HEALTHY, MISMATCH, GOAL, FORMAT, "loss", "kl", "data", "update", "exact", "errors"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(COLUMNS), NUMBERS), max_size=40))
def test_any_numbers_get_an_answer_or_a_sentence(rows):
    lines = [json.dumps({"step": i, **row}) for i, row in enumerate(rows)]
    survives("\n".join(lines).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100,
        b"{" * 100_000,
        b'{"log_history": [' + b"{" * 100_000,
        b'{"a":' * 50_000 + b"}" * 50_000,
        b'{"step": 1e999, "reward": 1}',
        b":W&B\xe1\xbe\x00" + b"\xff" * 70_000,
        b"\x20" + b"\0" * 7 + b"\0\0\0\0\x0a\x00brain.Event:2" + b"\xff" * 1000,
        b"step,reward\n" + b'"' * 300_000,
        b"step:1 - " + b"a:1 " * 100_000,
        b"{'reward': " + b"1" * 100_000 + b"}",
        "\u202e{'reward': 1, 'reward_std': 2, '\x1b[2J': 3}".encode(),
        b"\r" * 100_000,
    ],
)
def test_files_made_to_hurt_get_an_answer_or_a_sentence(data):
    survives(data)


def test_nothing_but_a_plain_file_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no plain file"):
        logs.read(tmp_path / "pipe")


def test_of_an_endless_log_only_the_beginning_is_read():
    row = b'{"step": %d, "reward": 0.5, "reward_std": 1}\n'
    found = ask(b"".join(row % i for i in range(110_000)))
    assert found["rows"] == 100_000 and any("only the first" in note for note in found["notes"])
