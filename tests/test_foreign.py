"""Protects the doctor of other people's runs: what it reads, what it says, how often it is wrong, and that no file can hurt it."""

import ast
import json
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import warm
from bookkeeping import cures, doctor, foreign, logs, names, protobufs, symptoms
from lab.trust import foreign_truth

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "results" / "doctor" / "samples"
TRUTH = json.loads((ROOT / "results" / "doctor" / "truth.json").read_text())


def told(log: logs.Log) -> list[str]:
    return [one["name"] for one in foreign.answer(log, doctor.symptoms)["symptoms"]]


# ------------------------------------------------------------------------------------------------ what it reads

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
def test_a_log_is_known_by_what_is_in_it(file, tmp_path):
    framework, kind, found = READ[file]
    copy = tmp_path / "a log of some kind"
    copy.write_bytes((SAMPLES / file).read_bytes())
    log = logs.read(copy)
    assert (log.framework, log.kind, told(log)) == (framework, kind, found)
    assert log.steps == list(range(1, 31 if file == "trl-plain.json" else 13)) and "reward" in log.columns


def test_each_writer_leaves_the_same_numbers():
    """TRL's own file, the real wandb and the real TensorBoard, which keeps float32."""
    state, wandb, events = (logs.read(SAMPLES / file) for file in ("trl-plain.json", "run.wandb", "events.out.tfevents.plain"))
    assert set(state.columns) == set(wandb.columns) == set(events.columns) and len(state.columns) > 9
    for name, values in state.columns.items():
        assert wandb.columns[name] == values[:12] and events.columns[name] == pytest.approx(values[:12], rel=1e-6)


def test_a_console_line_is_the_same_log_as_the_file_of_its_framework():
    for text, lines in (("verl-healthy.log", "verl-healthy.jsonl"), ("trl-healthy.log", "unsloth-healthy.json")):
        a, b = logs.read(SAMPLES / text), logs.read(SAMPLES / lines)
        shared = a.columns.keys() & b.columns.keys()
        assert len(shared) >= 7 and all(a.columns[name] == b.columns[name] for name in shared)


def test_prime_rl_writes_several_rows_per_step_and_they_become_one(tmp_path):
    for folder in ("trainer", "orchestrator"):
        (tmp_path / folder).mkdir()
    rows = (SAMPLES / "prime-healthy.jsonl").read_text().splitlines()
    for folder, wanted in (("orchestrator", "train/agg"), ("trainer", "/")):
        (tmp_path / folder / "metrics.jsonl").write_text(
            "\n".join(r for r in rows if wanted in r and (folder != "trainer" or "train/" not in r))
        )
    log = logs.read(tmp_path)
    assert len(log.files) == 2 and log.steps == list(range(1, 13))
    assert log.columns == logs.read(SAMPLES / "prime-healthy.jsonl").columns


def test_a_folder_gives_its_newest_checkpoint_and_follows_no_link(tmp_path):
    state = (SAMPLES / "trl-plain.json").read_text()
    for number in (5, 30):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}" / "trainer_state.json").write_text(state)
    assert logs.read(tmp_path).files == [str(tmp_path / "checkpoint-30" / "trainer_state.json")]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "trainer_state.json").symlink_to(tmp_path / "checkpoint-5" / "trainer_state.json")
    with pytest.raises(ValueError, match="has no log in it"):
        logs.read(elsewhere)


def test_of_wandbs_csv_of_several_runs_the_first_is_read():
    text = (
        'Step,"a - train/reward","a - train/reward__MIN","b - train/reward","a - train/frac_reward_zero_std"\n1,0.5,0.1,0.9,0.25\n'
        "2,0.6,,,0.5\n"
    )
    kind, rows, _ = logs.rows_of(text.encode())
    assert kind == "CSV (the first of 2 runs)"
    assert logs.collect(list(rows)).columns == {"reward": [0.5, 0.6], "groups_with_signal": [0.75, 0.5]}


def test_a_table_may_end_its_lines_as_an_old_mac_does():
    kind, rows, _ = logs.rows_of(b"step,reward\r1,0.5\r2,0.4\r")
    assert kind == "CSV" and logs.collect(list(rows)).columns == {"reward": [0.5, 0.4]}


def test_older_names_and_quoted_or_numpy_numbers_are_read():
    old = (
        "{'loss': '0.0', 'reward': 1.16, 'reward_std': 0.9, 'rewards/accuracy_reward': 0.33, 'completion_length': 834.3, 'kl': nan, "
        "'epoch': 0.01}"
    )
    log = logs.collect(list(logs.rows_of(old.encode())[1]))
    assert (log.columns["reply_tokens"], log.columns["part:accuracy_reward"], log.not_numbers) == ([834.3], [0.33], {"kl": 1})
    verl = "\x1b[36m(TaskRunner pid=3)\x1b[0m step:7 - actor/entropy:np.float64(0.31) - critic/score/mean:-0.5"
    log = logs.collect(list(logs.rows_of(verl.encode())[1]))
    assert (log.framework, log.steps, log.columns) == ("verl", [7], {"entropy": [0.31], "reward": [-0.5]})


def test_a_wandb_integer_may_be_negative():
    assert protobufs.history_item([(2, b"a"), (2, b"b"), (5, 5)]) == {"a/b": -3.0}


def test_every_name_of_the_table_is_found_by_its_own_line():
    for framework, table in names.NAMES.items():
        for theirs, mine, _ in table:
            found = names.ours(framework, theirs.replace("*", "some"))
            assert found and found[0].partition(":")[0] == mine, (framework, theirs)


# ------------------------------------------------------------------------------------------------ what it says


def made_up(n: int = 40, **columns) -> logs.Log:
    """A healthy run, but for what is given: {our column: its values}."""
    rng = np.random.default_rng(0)
    healthy = {"reward": 0.4 + 0.01 * np.arange(n) + rng.normal(0, 0.02, n), "groups_with_signal": np.full(n, 0.8),
               "entropy": np.linspace(0.3, 0.1, n), "grad_norm": np.full(n, 0.4), "reply_tokens": 100 + rng.normal(0, 3, n),
               "lr": np.full(n, 1e-6), "truncated": np.zeros(n)}  # fmt: skip
    values = {name: list(map(float, column)) for name, column in (healthy | columns).items()}
    return logs.Log(["made up"], "", names.TRL, list(range(1, n + 1)), values, dict.fromkeys(values, "theirs"))


def half(before: float, after: float, n: int = 40) -> np.ndarray:
    return np.repeat([before, after], n // 2)


RISES = 0.2 + 0.015 * np.arange(40) + np.random.default_rng(1).normal(0, 0.02, 40)
FLAT = 0.3 + np.random.default_rng(2).normal(0, 0.02, 40)
EVALS = np.where(np.arange(40) % 10 == 0, 0.3, np.nan)
# {symptom: (what makes it, a twin that must be told nothing)}
ILL = {
    "collapse": ({"reward": half(0.7, 0.1)}, {"reward": half(0.7, 0.6)}),
    "no signal": ({"groups_with_signal": half(0.8, 0)}, {"groups_with_signal": half(0.8, 0.3)}),
    "cut short": ({"truncated": np.full(40, 0.8)}, {"truncated": np.full(40, 0.3)}),
    "cut off more": ({"truncated": np.linspace(0, 0.45, 40)}, {"truncated": np.linspace(0.2, 0.3, 40)}),
    "noise": ({"entropy": half(0.3, 4)}, {"entropy": half(0.3, 0.8)}),
    "stale": ({"mismatch": np.linspace(1e-4, 0.2, 40)}, {"mismatch": np.linspace(1e-4, 0.01, 40)}),
    "two distributions": ({"mismatch": np.full(40, 0.2)}, {"mismatch": np.full(40, 0.01)}),
    "KL": ({"kl": np.geomspace(1e-3, 30, 40)}, {"kl": np.linspace(1e-3, 0.5, 40)}),
    "entropy collapse": ({"entropy": np.geomspace(1, 1e-3, 40), "reward": FLAT, "groups_with_signal": np.full(40, 0.2)},
                         {"entropy": np.geomspace(1, 1e-3, 40), "groups_with_signal": np.full(40, 0.3)}),
    "pays something else": ({"reward": RISES, "part:format": RISES, "part:accuracy": FLAT},
                            {"reward": RISES, "part:format": FLAT, "part:accuracy": RISES}),
    "pays length": ({"reward": RISES, "part:length": RISES, "part:accuracy": FLAT, "reply_tokens": np.linspace(100, 300, 40)},
                    {"reward": RISES, "part:length": FLAT, "part:accuracy": RISES, "reply_tokens": np.linspace(100, 300, 40)}),
    "only in training": ({"reward": RISES, "eval_reward": EVALS}, {"reward": RISES, "eval_reward": EVALS * (1 + np.arange(40) / 20)}),
    "still": ({"reward": FLAT, "entropy": FLAT}, {"reward": FLAT, "entropy": np.linspace(0.3, 0.2, 40)}),
    "learning rate": ({"lr": half(1e-6, 0)}, {"lr": half(1e-6, 1e-7)}),
    "warm-up": ({"lr": np.linspace(1e-9, 1e-7, 40)}, {"lr": [*np.linspace(1e-9, 1e-6, 20), *np.full(20, 1e-6)]}),
    "resumed": ({"lr": [*np.linspace(1e-6, 5e-7, 20), *np.linspace(1e-8, 1e-6, 20)]}, {"lr": np.linspace(1e-6, 1e-8, 40)}),
    "far off": ({"clip_fraction": np.full(40, 0.5)}, {"clip_fraction": np.full(40, 0.05)}),
    "engine": ({"mismatch_kl": np.full(40, 0.1)}, {"mismatch_kl": np.full(40, 0.002)}),
    "thrown away": ({"kept_ratio": np.full(40, 0.1)}, {"kept_ratio": np.full(40, 0.97)}),
    "errors": ({"errors_share": np.full(40, 0.4)}, {"errors_share": np.full(40, 0.02)}),
}  # fmt: skip


@pytest.mark.parametrize("symptom", ILL)
def test_a_symptom_is_told_and_its_healthy_twin_is_not(symptom):
    sick, well = ILL[symptom]
    found = foreign.answer(made_up(**sick), doctor.symptoms)
    (one,) = found["symptoms"]
    assert one["name"] == symptom and one["cure"] and one["causes"] and one["sure"] and re.search(r"\d", one["seen"])
    assert not found["nothing_found"] and "--" not in one["cure"] + one["seen"]  # TRL's own settings, not our flags
    assert told(made_up(**well)) == []


def test_a_number_that_is_none_is_told_with_its_step():
    text = "\n".join(f"{{'loss': {x}, 'reward': 0.5, 'reward_std': 0.5}}" for x in (0.1, "nan", 0.1))
    (one,) = foreign.answer(logs.collect(list(logs.rows_of(text.encode())[1])), doctor.symptoms)["symptoms"]
    assert (one["name"], one["step"], "loss" in one["seen"]) == ("not a number", 2, True)


def test_a_reward_function_that_has_nothing_to_say_of_a_batch_is_no_illness():
    rows = [{"loss": 0.01, "reward": 0.5, "rewards/code/mean": 0.5, "rewards/format/mean": 1.0, "epoch": i / 100} for i in range(12)]
    rows[7]["rewards/code/mean"] = float("nan")
    log = logs.collect(list(logs.rows_of("\n".join(map(str, rows)).encode())[1]))
    assert told(log) == []


def test_a_gradient_of_0_is_no_signal_where_groups_are_not_logged():
    log = made_up(grad_norm=half(0.4, 0))
    del log.columns["groups_with_signal"]
    (one,) = foreign.answer(log, doctor.symptoms)["symptoms"]
    assert one["name"] == "no signal" and "gradient was exactly 0" in one["seen"]


def test_a_reward_that_stands_high_while_right_answers_come_and_go_pays_something_else():
    """As in results/doctor's `generous`: nothing rises, for the format is perfect from the start."""
    come_and_go = 0.5 + np.random.default_rng(4).normal(0, 0.15, 40)
    high = {"reward": np.full(40, 0.98), "part:format": np.full(40, 0.98), "groups_with_signal": np.full(40, 0.1)}
    found = foreign.answer(made_up(**high, **{"part:exact": come_and_go}), doctor.symptoms)
    assert [one["name"] for one in found["symptoms"]] == ["pays something else"] and "solved" not in str(found["remarks"])
    assert told(made_up(**high | {"reward": 0.98 + come_and_go}, **{"part:exact": come_and_go})) == []


def test_what_is_solved_is_no_alarm():
    log = made_up(reward=np.ones(40), groups_with_signal=np.zeros(40))
    found = foreign.answer(log, doctor.symptoms)
    assert found["symptoms"] == [] and [one["name"] for one in found["remarks"]] == ["solved"]


def test_a_log_that_is_well_says_why_its_loss_is_near_0():
    found = foreign.answer(made_up(loss=np.full(40, 1e-8)), doctor.symptoms)
    assert "a loss near 0 is normal here" in found["nothing_found"] and "num_iterations=1" in found["nothing_found"]
    assert found["not_logged"]["kl"] == "beta above 0" and "entropy" not in found["not_logged"]


def test_rewards_below_0_are_no_collapse_by_themselves():
    noise = np.random.default_rng(3).normal(0, 0.05, 40)
    assert "collapse" not in told(made_up(reward=-3 + noise)) and "collapse" in told(made_up(reward=half(-1, -9) + noise))


def test_a_reward_that_pays_something_else_is_told_of_our_own_logs_too():
    """goal_of leaves a log with `exact` to the doctor's own rule."""
    log = logs.read(ROOT / "results" / "failures" / "generous-reward" / "metrics.jsonl")
    (one,) = foreign.answer(log, doctor.symptoms)["symptoms"]
    assert one["name"] == "pays something else" and "it pays" not in one["seen"]


def test_every_rule_has_its_words_and_every_page_of_the_journal_is_there():
    assert set(foreign_truth.NEEDS) == set(cures.ILLNESSES) - set(symptoms.REMARKS)
    ours = {
        "collapse", "stuck", "broken", "no signal", "noise", "cut short", "errors", "stop token", "sequence ratio", "not exact", "stale",
        "two distributions", "dropout", "uncorrected", "pays something else",
    }  # fmt: skip
    assert {name for name in ours if f'"{name}"' in Path(doctor.__file__).read_text()} == ours
    known = {*ours, *symptoms.RULES, *symptoms.REMARKS, "not a number", "warm-up", "resumed"}
    assert known == set(cures.ILLNESSES)
    journal = (ROOT / cures.JOURNAL).read_text()
    for name, illness in cures.ILLNESSES.items():
        assert {names.TRL, names.VERL, names.PRIME, names.OURS} == set(illness.cures), name
        assert not illness.journal or f"\n## {illness.journal}\n" in journal


def test_the_page_has_every_symptom_as_the_table_has_it():
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert cures.page() in page, "docs/doctor.md is older than bookkeeping/cures.py; python -m bookkeeping.cures writes its tables"


# ------------------------------------------------------------------------------------------------ how often it is wrong


def test_the_rates_that_are_told_are_those_that_were_measured():
    assert {rule: list(both) for rule, both in foreign.MEASURED.items()} == TRUTH["measured"]
    assert "no healthy TRL run" in foreign.sure("engine") and re.search(r"of \d+ in 1\d healthy", foreign.sure("collapse"))


def test_real_runs_of_trl_are_judged_as_the_results_say():
    made = {(run["arm"], run["seed"]) for run in TRUTH["runs"]}
    assert made == {(arm, seed) for arm in foreign_truth.ARMS for seed in foreign_truth.SEEDS}
    for run in TRUTH["runs"]:
        assert foreign_truth.judged(run["arm"], run["seed"]) == run


def test_our_own_runs_that_are_well_are_told_nothing_but_what_the_results_say():
    found, again = foreign_truth.ours(), "there are other runs by now: python -m lab.trust.foreign_truth --page, and docs/doctor.md"
    assert len(found) == TRUTH["our_runs"], again
    assert {name: told for name, told in found.items() if told} == TRUTH["our_alarms"], again


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_ends_with_0_1_or_2(capsys):
    ask = lambda file, as_json=False: foreign.main(SAMPLES / file, as_json, doctor.symptoms)
    assert ask("trl-healthy.log") == 0 and "nothing wrong was found" in capsys.readouterr().out
    assert ask("verl-no-variance.log") == 1
    said = capsys.readouterr().out
    assert "step 10: no signal: " in said and "algorithm.filter_groups.enable=True" in said and "learn/FAILURES.md#no-variance" in said
    assert ask("prime-learning-rate.jsonl", True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["framework"] == "prime-rl" and found["columns"]["reward"] == "train/agg/effective/policy/reward/mean"
    assert ask("README.md") == 2 and "No such file" in capsys.readouterr().out


def test_python_m_knows_our_runs_from_others(tmp_path):
    ask = lambda *words: warm.run(["-m", "bookkeeping.doctor", *map(str, words)], ROOT)
    ours = ask(ROOT / "results" / "failures" / "no-variance")
    assert ours.returncode == 0 and ours.stdout.startswith("update 10: no signal: ")
    theirs = ask(SAMPLES / "prime-no-variance.jsonl")
    assert theirs.returncode == 1 and "of prime-rl" in theirs.stdout
    assert json.loads(ask(ROOT / "results" / "failures" / "no-variance", "--json").stdout)["framework"] == "picoswarm"
    assert ask("a", "b").returncode == 2


# ------------------------------------------------------------------------------------------------ hostile files

SEEDS = [(SAMPLES / file).read_bytes() for file in READ]


def survives(data: bytes) -> None:
    """An answer that is JSON, or one sentence: nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(data)
        try:
            found = foreign.answer(logs.read(path), doctor.symptoms)
        except ValueError as error:
            assert "\n" not in str(error)
            return
    said = json.dumps(found, allow_nan=False) + foreign.text(found)
    assert all(c.isprintable() or c == "\n" for c in said)


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=400),
    st.sampled_from([b"", b":W&B\xe1\xbe\x00", b'{"log_history": [', b"Step,train/reward\n", b"step:1 - ", b"{'loss': "]),
)
def test_any_bytes_get_an_answer_or_a_sentence(data, start):
    survives(start + data)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(SEEDS), st.sampled_from(SEEDS), st.data())
def test_logs_that_are_cut_mixed_and_changed_get_an_answer_or_a_sentence(one, other, data):
    cut = data.draw(st.integers(0, len(one)))
    mixed = bytearray(one[:cut] + other[data.draw(st.integers(0, len(other))) :][:3000])
    for _ in range(data.draw(st.integers(0, 8))):
        if mixed:
            mixed[data.draw(st.integers(0, len(mixed) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(mixed))


NUMBERS = st.one_of(
    st.floats(), st.integers(-(10**400), 10**400), st.none(), st.text(max_size=5), st.booleans(), st.lists(st.integers(), max_size=2)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["step", "reward", "loss", "frac_reward_zero_std", "entropy", "kl", "grad_norm",
                                                 "learning_rate", "data",
                                                 "completions/clipped_ratio", "sampling/sampling_logp_difference/mean", "rewards/a/mean",
                                                 "update", "groups_with_signal", "exact", "n", "errors", "stretch", "fraction", "format",
                                                 "stop_trained"]), NUMBERS),
                max_size=40))  # fmt: skip
def test_any_numbers_get_an_answer_or_a_sentence(lines):
    survives("\n".join(json.dumps({"step": i, "update": i, **line}) for i, line in enumerate(lines)).encode())


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 100, b"{" * 100_000, b'{"log_history": [' + b"{" * 100_000, b'{"a":' * 50_000 + b"}" * 50_000, b"[" * 100_000,
     b'{"step": 1e999, "reward": 1}',
     b":W&B\xe1\xbe\x00" + b"\xff" * 70_000, b"\x20" + b"\0" * 7 + b"\0\0\0\0\x0a\x00brain.Event:2" + b"\xff" * 1000,
     b"step,reward\n" + b'"' * 300_000, b"step:1 - " + b"a:1 " * 100_000, b"{'reward': " + b"1" * 100_000 + b"}",
     "\u202e{'reward': 1, 'reward_std': 2, '\x1b[2J': 3}".encode(), b"\r" * 100_000],
)  # fmt: skip
def test_files_made_to_hurt_get_an_answer_or_a_sentence(data):
    survives(data)


def test_nothing_but_a_plain_file_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no plain file"):
        logs.read(tmp_path / "pipe")


def test_no_more_is_read_than_the_limits_say(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "MOST_BYTES", 1000)
    monkeypatch.setattr(logs, "MOST_ROWS", 20)
    file = tmp_path / "long.jsonl"
    file.write_text("".join(f'{{"step": {i}, "reward": 0.5, "reward_std": 1}}\n' for i in range(1000)))
    log = logs.read(file)
    assert len(log.steps) == 20 and any("only the first" in note for note in log.notes)


def test_a_long_log_is_looked_at_a_bounded_number_of_times():
    looks = []
    log = made_up(symptoms.LOOKS * 3)
    symptoms.look_at(log, None, lambda lines, rewards, _: looks.append((len(lines), len(rewards))) or {})
    assert len(looks) <= symptoms.LOOKS and max(looks) <= (symptoms.LOOKS_BACK, symptoms.LONGEST)


def test_nothing_of_a_file_can_be_executed_or_opened():
    """No pickle, no eval; and the readers open one file each time they are asked, the one that was given."""
    for module in (logs, names, protobufs, symptoms, foreign, cures):
        tree = ast.parse(Path(module.__file__).read_text())
        imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        allowed = {
            "csv",
            "io",
            "itertools",
            "json",
            "math",
            "re",
            "stat",
            "struct",
            "sys",
            "zlib",
            "numpy",
            "dataclasses",
            "functools",
            "pathlib",
            "collections.abc",
        }
        assert {name for name in imported if not name.startswith("bookkeeping")} <= allowed, module.__name__
        called = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        assert not {"eval", "exec", "compile", "__import__", "getattr"} & set(called), module.__name__
        assert called.count("open") == (module in (logs, protobufs))  # protobufs: in its demo
