"""Protects the doctor of other people's runs: what it reads, what it says, how often it is wrong,
and that no file can hurt it."""

import io
import json
import re
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from bookkeeping import doctor, logs
from helpers import ROOT, doctor_logs, lines_of, write_folder

ARMS, LOGS = doctor_logs()
FOLDER = tempfile.TemporaryDirectory()
PACKED = {name.removeprefix("cases/"): log for name, log in LOGS.items() if "cases/" in name}
SAMPLES = {name.removeprefix("samples/"): log for name, log in LOGS.items() if "samples" in name}


def run(path: Path, *flags: str) -> tuple[int, str]:
    """Exit status of `python -m bookkeeping.doctor PATH`, and what it prints."""
    out = io.StringIO()
    words = mock.patch.object(sys, "argv", ["doctor", str(path), *flags])
    with words, redirect_stdout(out), pytest.raises(SystemExit) as end:
        doctor.command()
    return end.value.code, out.getvalue()


def saved(data: bytes) -> Path:
    """A file with these bytes."""
    path = Path(FOLDER.name) / "a log of some kind"
    path.write_bytes(data)
    return path


def ask(data: bytes) -> dict:
    """What the doctor says of a file with these bytes."""
    return json.loads(run(saved(data), "--json")[1], parse_constant={}.__getitem__)  # NaN: no JSON


def told(data: bytes) -> list[str]:
    return [one["name"] for one in ask(data)["symptoms"]]


def columns(data: bytes) -> dict[str, list[float]]:
    """Our columns of a log with these bytes."""
    lines = logs.read(saved(data)).lines
    names = sorted({name for line in lines for name in line} - {"update"})
    return {name: [line[name] for line in lines if name in line] for name in names}


# ------------------------------------------------------------------------------------ what it reads

WELL, SICK = [], ["no signal"]
READ = {
    "trl-healthy.log": ("TRL", WELL),
    "trl-no-variance.log": ("TRL", SICK),
    "trl-plain.json": ("TRL", WELL),
    "unsloth-no-variance.json": ("TRL", SICK),
    "verl-healthy.log": ("verl", WELL),
    "verl-no-variance.log": ("verl", SICK),
    "verl-no-variance.jsonl": ("verl", SICK),
    "verl-learning-rate.jsonl": ("verl", ["cut short", "no signal"]),
    "prime-healthy.log": ("prime-rl", WELL),
    "prime-no-variance.log": ("prime-rl", SICK),
    "prime-no-variance.jsonl": ("prime-rl", SICK),
    "wandb-no-variance.csv": ("TRL", SICK),
}


@pytest.mark.parametrize("file", READ)
def test_a_log_is_known_by_what_is_in_it(file):
    found = ask(SAMPLES[file])
    assert (found["framework"], [one["name"] for one in found["symptoms"]]) == READ[file]
    assert found["steps"] == [1, 30 if file == "trl-plain.json" else 12]
    assert "reward" in found["columns"]


def test_prime_rl_writes_several_rows_per_step_and_they_become_one(tmp_path):
    rows = SAMPLES["prime-healthy.jsonl"].splitlines(keepends=True)
    for name, its in (("trainer", False), ("orchestrator", True)):
        mine = [row for row in rows if (b"train/agg" in row) == its]
        write_folder(tmp_path / name, {"metrics.jsonl": b"".join(mine)})
    log = logs.read(tmp_path)
    assert len(log.files) == 2 and len(log.lines) == 12
    assert all({"reward", "grad_norm", "entropy"} <= line.keys() for line in log.lines)


def test_a_folder_gives_its_newest_checkpoint(tmp_path):
    state = SAMPLES["trl-plain.json"]
    write_folder(tmp_path / "empty", {})
    for number, had in ((5, state[:9000]), (30, state)):
        newest = write_folder(tmp_path / f"checkpoint-{number}", {"trainer_state.json": had})
    assert logs.read(tmp_path).files == [str(newest / "trainer_state.json")]
    for name, problem in (("empty", "has no log in it"), ("nobody", "no such file or folder")):
        status, printed = run(tmp_path / name)
        assert status == 2 and problem in printed


@pytest.mark.parametrize(
    "text, found",
    [
        # of wandb's CSV of several runs the first is read, and the others beside it
        (
            'Step,"a - train/reward","a - train/reward__MIN","b - train/reward"\n1,0.5,0.1,0.9\n'
            "2,0.6,,,\n",
            {"reward": [0.5, 0.6]},
        ),
        # lines may end as on an old Mac
        ("step,train/reward\r1,0.5\r2,0.4\r", {"reward": [0.5, 0.4]}),
        # older names, quoted numbers
        (
            "{'loss': '0.0', 'reward': 1.16, 'reward_std': 0.9, 'completion_length': 834.3}",
            {"loss": [0.0], "reward": [1.16], "reward_std": [0.9], "reply_tokens": [834.3]},
        ),
        # NumPy's numbers, colours, Ray's name of the process, and a metric per line
        (
            "\x1b[36m(TaskRunner pid=3)\x1b[0m step:7 - actor/entropy:np.float64(0.31)\n - "
            "critic/score/mean:-0.5",
            {"entropy": [0.31], "reward": [-0.5]},
        ),
        # prime-rl's lines as JSON
        (
            '{"level": "INFO", "message": "Step 3 | 1.2s | Reward 0.5000 | Truncation 3.1%\\n\\t\\t '
            '\\u2570\\u2500 a | Reward 0.9000", "line": 880}\n{"message": "Evaluated a (Step 3) | Policy '
            'v1 | Reward 0.2500", "line": 9}',
            {"reward": [0.5], "truncated": [0.031], "eval_reward": [0.25]},
        ),
        # ... and a share of the replies, of which there are few
        (
            "22:43 SUCCESS Step 2 | 22.6s | Reward 0.5000 | Trainable 2/20 (10.0%) | Error 20.0%",
            {"errors_share": [0.2], "groups_with_signal": [0.1], "reward": [0.5]},
        ),
        # a table after other text, with tabs
        (
            "Unsloth 2025\n\nStep\tTraining Loss\trewards / exact / mean\n1\t0.5\tNo Log\n",
            {"loss": [0.5]},
        ),
        # dicts that a console prints for other reasons
        (
            "{'learning_rate': 1e-6, 'beta': 0.04}\n{'reward': 1, 'loss': 2, 'kl': 3}\n"
            "{'loss': 0.1, 'grad_norm': 0.2, 'reward': 0.3, 'epoch': 0.1}\n"
            "{'train_runtime': 9.1, 'train_loss': 0.1, 'epoch': 1.0}",
            {"loss": [0.1], "grad_norm": [0.2], "reward": [0.3]},
        ),
        # what is printed as 0.000 need not be 0; 0.0 is
        (
            "step:1 - actor/lr:0.000 - actor/grad_norm:0.0 - actor/pg_clipfrac:0.000",
            {"grad_norm": [0.0], "clipped": [0.0]},
        ),
    ],
)
def test_odd_ways_to_write_a_log_are_read(text, found):
    assert columns(text.encode()) == columns(text.encode("utf-16")) == found  # PowerShell's >


@pytest.mark.parametrize(
    "epochs, steps, note",
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], ""),
        ([1, 1, 2, 2], [1, 2, 3, 4], ""),  # each batch is used twice
        ([1, 2, 3, 4, 3, 4, 5], [1, 2, 3, 4, 3, 4, 5], "a run was resumed at step 3"),
        ([1, 2, 1, 2, 3], [1, 2, 3], "a run began at step 1; what is before it was not read"),
    ],
)
def test_a_resume_goes_on_at_the_step_whose_epoch_it_is(epochs, steps, note):
    rows = [{"loss": 0.1, "reward": 0.5, "kl": 0.0, "epoch": epoch} for epoch in epochs]
    log = logs.collect(logs.rows_of("\n".join(map(str, rows))), "", [])
    assert [line["update"] for line in log.lines] == steps
    assert log.notes == [note] * bool(note)


# --------------------------------------------------------------------------------- public reports

# {log in tests/doctor_logs.json.gz, made up after a public report: (the first symptoms that are
# told, or None if it is nobody's that we know; what must stand in the answer)}
CASES = {
    "d01-verl-three-decimals/control-truly-zero.log": (["learning rate"], "actor/lr"),
    "d01-verl-three-decimals/verl-2025-small-norm.log": ([], "0.000 were left out"),
    "d01-verl-three-decimals/verl-2025.log": ([], "0.000 were left out"),
    "d01-verl-three-decimals/verl-today.log": ([], "ppo_epochs=1"),
    "d02-gradient-zero-with-signal/control-small-gradient.log": (["still"], "three times"),
    "d02-gradient-zero-with-signal/trainer_state.json": (["no gradient"], "frozen adapter"),
    "d02-gradient-zero-with-signal/trl.log": (["no gradient"], "frozen adapter"),
    "d03-swift/console.log": (["no signal"], "steps 1 to 30"),
    "d03-swift/logging.jsonl": (["no signal"], "steps 1 to 30"),
    "d04-notebook-table/table-same-names-as-trl.txt": (["cut short"], "max_completion_length"),
    "d04-notebook-table/table-with-outer-bars.txt": (["cut short"], "max_completion_length"),
    "d04-notebook-table/table.txt": (["cut short"], "max_completion_length"),
    "d06-prime-rl-colons/orchestrator.log": (["collapse"], "prime-rl"),
    "d06-prime-rl-colons/trainer-as-today.log": (["no gradient"], "Grad. Norm"),
    "d06-prime-rl-colons/trainer.log": (["no gradient"], "Grad. Norm"),
    "d07-prime-rl-sft-nan/sft.log": (["not a number"], "grad_norm"),
    "d08-console-dicts-are-no-rows/with-a-completion-named-reward.log": ([], "steps 1 to 30"),
    "d08-console-dicts-are-no-rows/with-printed-completions.log": (
        ["two distributions"],
        "steps 1 to 30",
    ),
    "d08-console-dicts-are-no-rows/with-the-warning.log": (["two distributions"], "steps 1 to 30"),
    "d08-console-dicts-are-no-rows/without-the-warning.log": (
        ["two distributions"],
        "steps 1 to 30",
    ),
    "d09-wrapped-rows/one-line.log": (["no signal"], "steps 1 to 30"),
    "d09-wrapped-rows/pasted.log": (["no signal"], "steps 1 to 30"),
    "d10-healthy-loss-grows/open-r1.log": ([], "a loss near 0 is normal"),
    "d11-collapse/open-r1.log": (["collapse", "stuck", "KL"], "a third of learning_rate"),
    "d12-all-cut/trl.log": (["cut short", "no signal"], "max_completion_length"),
    "d13-sequence-ratio-of-the-engine/trl.log": (["thrown away"], "a product of many tokens"),
    "d14-two-rows-a-batch/trl.log": ([], "steps 1 to 80"),
    "d15-verl-negative-scores/collapse-of-negative-scores.log": (
        ["collapse", "cut short", "no signal"],
        "data.max_response_length",
    ),
    "d15-verl-negative-scores/verl.log": ([], "looked at: actor/entropy"),
    "d15-verl-negative-scores/one-row.log": ([], "too short to tell"),
    "d16-none-reward/console.log": (["not a number"], "returned None"),
    "d17-healthy-resume/trl-without-a-crash.log": ([], "steps 1 to 100 (100 rows)"),
    "d17-healthy-resume/trl.log": ([], "a run was resumed at step 51"),
    "d17-healthy-resume/verl-without-a-crash.log": ([], "steps 1 to 100 (100 rows)"),
    "d17-healthy-resume/verl.log": ([], "a run was resumed at step 51"),
    "d18-old-trl-no-variance/control-healthy.log": ([], "could not be looked at"),
    "d18-old-trl-no-variance/trl-0.16-constant-4.log": (["no signal"], "mean 4.00"),
    "d18-old-trl-no-variance/trl-0.16.log": (["no signal"], "easier prompts"),
    "d18-old-trl-no-variance/unsloth-table.txt": (["no signal"], "easier prompts"),
    "f01-rllm-54.log": (["no signal"], "critic/advantages/max"),
    "f02-agent-r1-30.log": (
        ["not a number", "collapse", "cut short", "no signal"],
        "in 31 rows, first at 60",
    ),
    "f03-video-r1-86.log": (["no signal"], "steps 1 to 30"),
    "f04-swift-9261.jsonl": (["cut short", "no signal"], "steps 1 to 60"),
    "f05-open-r1-255.log": (["pays something else"], "right answers went from 0.13 to 0.00"),
    "f06-swift-6550.log": (["KL", "collapse"], "entropy/mean"),
    "f07-unsloth-2291.txt": ([], "steps 1 to 60"),
    "f08-trl-4772.log": (["thrown away"], "a product of many tokens"),
    "f09-prime-rl-environments.log": ([], "Max Off-Policy"),
    "f10-prime-rl-debug.log": ([], "Mismatch KL"),
    "f11-prime-rl-reward-0.log": (["no signal"], "0.00 in all of 40 rows"),
    "g01-swift-4465.jsonl": ([], "kl is not a number in 9 rows"),
    "g02-verl-498.log": (["not a number"], "critic is not a finite number in 40 rows"),
    "g03-ttrl-33.log": (["not a number"], "grad_norm is not a finite number in 40 rows"),
    "g04-swift-4653.jsonl": ([], "rewards/CodeORM/mean is not a number in 28 rows"),
    "g05-wandb-6474.csv": (["collapse"], "looked at: train/frac_reward_zero_std"),
    "g06-rllm-116.log": (["noise"], "an entropy bonus"),
    "g07-swift-8343.jsonl": (["not a number"], "kl_ref is not a finite number in 20 rows"),
    "g08-mm-eureka-14.log": (["not a number"], "one reply per group"),
    "g09-verl-926.log": (["only in training"], "val/test_score/openai/gsm8k"),
    "h01-unsloth-maze.ipynb": ([], "steps 1 to 600 (13 rows)"),
    "h02-unsloth-openenv.txt": (["no signal", "cut short"], "max_completion_length"),
    "h03-verl-3159.log": (
        ["noise", "cut short", "no signal"],
        "weights that reach the engine broken",
    ),
    "h04-trl-every-tenth-step.log": (["few groups"], "the mean reward has not risen"),
    "i01-unsloth-kl-falls.log": (["cut short", "no signal"], "steps 1 to 22 (22 rows)"),
    "i02-tinyzero.log": ([], "steps 2 to 122 (61 rows)"),
    "i03-prime-rl-smoke.log": (["errors"], "looked at: Error, Reward, Trainable"),
    "i04-trl-3857.log": (["no signal"], "mean 4.20"),
    "j02-verl-1224-healthy.log": ([], "steps 1000 to 1039 (40 rows)"),  # broken at 62 columns
    "j02-verl-1224-wrapped.log": (["collapse", "cut short"], "response_length/clip_ratio"),
    "j03-trl-6945-healthy.log": ([], "its sampler, which is older"),
    "j03-trl-6945-stale.log": (["still"], "its sampler, which is older"),
    "j05-tinyzero-spent.log": (["entropy collapse"], "the policy says one thing"),
    "j06-swift-4146.log": ([], "it may be of SFT or DPO"),
    "j07-verl-ascend.log": ([], "steps 0 to 59 (60 rows)"),
    "k03-trl-cut-and-masked.md": (["cut short", "collapse"], "steps 1 to 43 (43 rows)"),
    "k06-prime-rl-2280-few.log": (["few groups"], "4% of the groups"),
    "k06-prime-rl-2280-none.log": (["no signal"], "every group's rewards were all equal"),
    "k06-prime-rl-2280.log": ([], "steps 0 to 29 (30 rows)"),
    "l01-trl-tail-of-a-dead-run.md": (["noise", "KL"], "steps 1 to 15 (15 rows)"),
    "l03-verl-retool-wrapped.log": ([], "looked at: actor/entropy"),
    "l04-verl-a-value-a-line.log": ([], "steps 1 to 40 (40 rows)"),
    "l05-verl-aime-2025.log": (["only in training"], "val-core/aime_2025/acc/mean@30"),
    "l06-trl-one-group-a-step.log": (["few groups"], "steps 1 to 1200 (1200 rows)"),
    "j08-verl-7356.log": (["far off"], "a ratio per reply (GSPO)"),
    "e1-entropy-collapse-without-a-clip/e1_entropy.log": (
        ["entropy collapse"],
        "entropy_coef above",
    ),
    "m01-clip-below-only.log": (["entropy collapse"], "the upper clip never acted here"),
    "m02-clip-that-acts.log": (["entropy collapse"], "set         epsilon_high=0.28\n"),
    "m03-verl-one-update-a-batch.log": (["entropy collapse"], "entropy_coeff above 0, or a higher"),
    "e2-replies-that-never-end/e2_clipped.log": (
        ["cut short", "no signal"],
        "because of  no reply ever ended: is the prompt a list of messages?",
    ),
    "m11-replies-that-ended-once.log": (["cut short"], "because of  the limit is shorter"),
    "m12-verl-never-ends.log": (["cut short"], "because of  no reply ever ended"),
    "e3-kto-is-no-grpo/e11_kto.log": ([], "this log has no reward"),
    "m06-trl-1236-dpo.log": ([], "this log has no reward"),
    "m07-axolotl-sft.log": ([], "looked at: grad_norm, learning_rate, loss"),
    "e4-wandb-chart-of-two-runs/e9_two.csv": (["collapse"], "grpo-a of TRL, steps 1 to 60"),
    "e4-wandb-chart-of-two-runs/e9_two_swapped.csv": (["collapse"], "grpo-a of TRL, steps 1 to 60"),
    "m05-wandb-three-runs.csv": (["collapse"], "Group: b - x of TRL"),
    "m04-verl-two-runs.log": ([], "a run began at step 1; what is before it was not read"),
    "e5-log-of-another-framework/e6_nanochat16.log": (None, "has no row of numbers"),
    "e5-log-of-another-framework/e7_lf_ppo.jsonl": (None, "has no row of numbers"),
    "e5-log-of-another-framework/e7_lf_sft.jsonl": (None, "has no row of numbers"),
    "m08-nanogpt.log": (None, "has no row of numbers"),
    "m09-slime.log": (None, "has no row of numbers"),
    "m10-accelerate.log": (None, "has no row of numbers"),
}


@pytest.mark.parametrize("case", sorted({*CASES, *PACKED}))
def test_public_reports_are_judged_as_their_answers_did(tmp_path, case):
    symptoms, says = CASES[case]
    (tmp_path / "a.log").write_bytes(PACKED[case])
    status, said = run(tmp_path / "a.log")
    assert re.findall(r"^step \d+: ([\w ]+):", said, re.M) == (symptoms or [])
    assert status == (2 if symptoms is None else bool(symptoms)) and says in said


def test_a_kl_is_left_out_only_of_an_asynchronous_log_of_trl():
    verl = {"critic/score/mean": 0.5, "actor/lr": 1e-6, "actor/kl_loss": 0.1, "step": 1.0}
    assert "kl_ref" in logs.collect([verl | {"kl": 0.1, "ratio": 1.0}], "", []).names


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
    columns = {"step": np.arange(1, N + 1)} | healthy | changed
    logged = {name: values for name, values in columns.items() if values is not None}
    return "\n".join(map(json.dumps, lines_of(logged, N))).encode()


EVALS = np.where(np.arange(N) % 10 == 0, 0.3, np.nan)  # NaN: a step without one
HIGH = {"reward": 0.98, FORMAT: 0.98, SIGNAL: 0.5}
LONGER = {"reward": RISES, LENGTH: np.linspace(100, 300, N)}
# (symptom, what makes it, a twin that must be told nothing)
ILL = [
    ("collapse", {"reward": half(0.7, 0.1)}, {"reward": half(0.7, 0.6)}),
    ("collapse", {"reward": half(-1, -9) + SHAKY}, {"reward": -3 + np.arange(N) / 9 + SHAKY}),
    ("no signal", {SIGNAL: half(0.2, 1)}, {SIGNAL: half(0.2, 0.7)}),
    ("no gradient", {"grad_norm": half(0.4, 0), SIGNAL: None}, {SIGNAL: None}),
    ("cut short", {CUT: 0.8}, {CUT: 0.3}),
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
        "pays something else",  # length
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
    ("few groups", {"reward": FLAT, SIGNAL: 0.85}, {SIGNAL: 0.85}),
    ("no gradient", {"grad_norm": half(0.4, 0)}, {"grad_norm": half(0.4, 1e-4)}),
    ("not a number", {"grad_norm": half(0.4, np.nan)}, {"reward": RISES, "grad_norm": np.nan}),
    ("learning rate", {RATE: half(1e-6, 0)}, {RATE: half(1e-6, 1e-7)}),
    (
        "warm-up",
        {RATE: np.linspace(1e-9, 1e-7, N)},
        {RATE: [*np.linspace(1e-9, 1e-6, 20), *np.full(20, 1e-6)]},
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
    assert one["name"] == symptom and one["cure"] and one["causes"]
    assert re.search(r"\d", one["seen"]) and not found["nothing_found"]
    assert "--" not in one["cure"] + one["seen"]  # TRL's own settings, not our flags
    page, _, heading = one["journal"].partition("#")
    assert not page or f"\n## {heading}\n" in (ROOT / page).read_text()
    assert told(made_up(well)) == []


def test_what_is_solved_is_no_alarm_but_a_reward_that_pays_everything_is():
    learned, late = np.minimum(1, 2 * RISES + 0.3), {SIGNAL: half(0.2, 1)}
    two = {FORMAT: learned, GOAL: learned, "reward": 2 * learned, **late}  # on a scale of its own
    for solved in ({"reward": learned, **late}, two):
        found = ask(made_up(solved))
        assert found["symptoms"] == [] and "solved, so no illness" in found["notes"][0]
    alone = told(made_up(two | {"reward": learned, GOAL: 0.0}))  # the format was learned
    assert {"no signal", "pays something else"} == set(alone)
    assert told(made_up({"reward": 1.0, SIGNAL: 1.0})) == ["no signal"]


FLAT_VERL = {"critic/score/mean": 0.5, "actor/grad_norm": 0.01}
PRIME = {"train/agg/effective/a/reward/mean": RISES, "entropy/all/mean": 0.3}


@pytest.mark.parametrize(
    "symptom, others, sick, well",
    [
        ("no signal", FLAT_VERL, {"critic/score/max": 0.5}, {"critic/score/max": 1.0}),
        (
            "no signal",
            FLAT_VERL,
            {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0},
            {"critic/advantages/max": 2.1, "critic/advantages/min": -1.0},
        ),
        ("no signal", PRIME, {"batch/effective_batch_size": 0}, {"batch/effective_batch_size": 1}),
        ("no signal", PRIME, {"train/advantage/abs_mean": 0}, {"train/advantage/abs_mean": 0.2}),
        ("engine", PRIME, {"mismatch_kl/all/mean": 0.1}, {"mismatch_kl/all/mean": 0.002}),
        (
            "errors",
            PRIME,
            {"train/agg/all/has_error/mean": 0.4},
            {"train/agg/all/has_error/mean": 0.02},
        ),
    ],
)
def test_what_only_verl_and_prime_rl_log_is_told_too(symptom, others, sick, well):
    assert told(made_up(sick, others)) == [symptom]
    assert told(made_up(well, others)) == []


def test_a_log_that_is_well_says_why_its_loss_is_near_0_and_what_it_lacks():
    found = ask(made_up({"loss": 1e-8}))
    assert "a loss near 0 is normal here" in found["nothing_found"]
    assert "num_iterations=1" in found["nothing_found"]
    assert found["not_logged"]["kl_ref"] == "beta above 0" and "entropy" not in found["not_logged"]
    assert "loss near 0" not in ask(made_up({"loss": 1e-8, "grad_norm": 0}))["nothing_found"]


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


# ------------------------------------------------------------------------------------ hostile files


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100,
        b'{"log_history": [' + b"{" * 100_000,
        b'{"step": 1e999, "reward": 1}',
        b"Step 1 | " + b"| Reward 1" * 50_000,
        b"step:1 - " + b" " * 200_000 + b"x",
        b"step,reward\n" + b'"' * 300_000,
        "\u202e{'reward': 1, 'reward_std': 2, '\x1b[2J': 3}".encode(),
        *(SAMPLES[name][:700] + b"\xff{'" + SAMPLES["verl-healthy.log"][:700] for name in READ),
    ],
)
def test_files_that_are_cut_or_no_log_get_an_answer_or_a_sentence(data):
    """JSON, and text that steers no terminal."""
    status, said = run(saved(data), "--json")
    assert (status == 2) == ("error" in json.loads(said, parse_constant={}.__getitem__))
    assert all(c.isprintable() or c == "\n" for c in run(saved(data))[1])
