"""The whole recipe on pico_base: a tiny run leaves what it promises, survives a kill to the last bit, and refuses bad input
in one sentence. These are subprocesses, as a user would start them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "--updates", "3", "--sft-steps", "4", "--sft-examples", "6", "--sft-batch", "2", "--num-tasks", "2", "--k", "3", "--eval-n", "4",
    "--eval-every", "2", "--save-every", "1", "--max-tokens", "24", "--difficulty", "2", "--reward", "partial", "--no-wandb",
]  # fmt: skip


def run(*flags: str, **extra_env: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", **extra_env}
    return subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT, env=env, capture_output=True, text=True)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(path: Path) -> list[dict]:
    """Metrics without what a clock says."""
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines(path)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    done = run(*TINY, "--runs", str(runs), "--name", "whole")
    assert done.returncode == 0, done.stderr[-3000:]
    return runs / "whole"


def test_a_run_leaves_the_folder_that_the_docs_promise(whole):
    for name in ("config.json", "metrics.jsonl", "evals.jsonl", "episodes.jsonl", "summary.json", "report.md", "curves.png", "report.html"):
        assert (whole / name).stat().st_size > 0, name
    summary = json.loads((whole / "summary.json").read_text())
    assert set(summary["eval"]) == {"tier 2", "tier 3", "tier 5", "tier 6"} and summary["trained"] == "tier 2"
    for tasks in summary["eval"]:
        for stage in ("before", "after_sft", "final"):
            result = summary["eval"][tasks][stage]
            assert result["n"] == 4 and 0 <= result["low"] <= result["exact"] <= result["high"] <= 1
            assert 0 <= result["reward_low"] <= result["reward"] <= result["reward_high"] <= 1
            assert {"reward", "format"} <= result.keys()
    assert summary["gain"].keys() >= {"mean", "low", "high"}
    assert summary["seconds"].keys() >= {"total", "rollout", "train", "eval"}
    assert summary["tokens"]["sampled"] > 0 and summary["tokens"]["trained"] > 0
    assert 0.1 < summary["peak_rss_gb"] < 4 and summary["env"] == "letters" and summary["seed"] == 0
    assert [line["update"] for line in lines(whole / "metrics.jsonl")] == [1, 2, 3]


def test_saved_episodes_are_whole_groups_of_one_task_with_a_number_for_every_sampled_token(whole):
    episodes = lines(whole / "episodes.jsonl")
    assert {e["source"] for e in episodes} == {"rollout", "eval"} and {e["stage"] for e in episodes} >= {"", "before", "after_sft", "final"}
    groups: dict = {}
    for e in episodes:
        groups.setdefault((e["source"], e["stage"], e["update"], e["group"]), []).append(e)
        mine = [part for part in e["segments"] if part["role"] == "policy"]
        assert sum(len(part["tokens"]) for part in mine) == e["reply_tokens"]
        assert all(len(part["tokens"]) == len(part["logprobs"]) for part in mine)
        assert sum(sum(part["logprobs"]) for part in mine) == pytest.approx(e["logprob"], abs=0.01)
        assert "".join(mine[-1]["tokens"]).startswith(e["messages"][-1]["content"])
        if e["source"] == "rollout":
            assert all(len(part["ratios"]) == len(part["tokens"]) for part in mine)
        else:
            assert e["advantage"] is None and all(part["ratios"] is None for part in mine)
    for (source, *_), group in groups.items():
        assert len({e["seed"] for e in group}) == 1
        if source == "rollout":
            assert sorted(e["member"] for e in group) == [0, 1, 2]
            assert sum(e["advantage"] for e in group) == pytest.approx(0, abs=1e-3)
    moved = [
        abs(r - 1)
        for e in episodes
        if e["source"] == "rollout"
        for part in e["segments"]
        if part["role"] == "policy"
        for r in part["ratios"]
    ]
    assert 0 < max(moved) < 1  # the update that followed has moved the policy, a little


def test_the_adapter_loads_with_peft_alone(whole):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(ROOT / "pico_base"), whole / "checkpoint")
    assert any(p.abs().sum() > 0 for name, p in model.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("kill_at", ["sft", "update", "save"])
def test_resume_after_a_kill_equals_the_undisturbed_run(whole, tmp_path, kill_at):
    # A hard os._exit in the middle of things: no cleanup code runs, as with SIGKILL.
    script = f"""
import os, sys, train
calls = 0
def bomb(real, at):
    def inner(*a, **k):
        global calls
        calls += 1
        if calls == at: os._exit(9)
        return real(*a, **k)
    return inner
kill = {kill_at!r}
if kill == "sft": train.sft_step = bomb(train.sft_step, 3)
if kill == "update": train.update = bomb(train.update, 3)
if kill == "save":
    import policy
    policy.checksum = bomb(policy.checksum, 2)  # the new checkpoint is written but not yet in place
sys.argv = ["train.py", *{TINY!r}, "--runs", {str(tmp_path)!r}, "--name", "cut"]
train.main()
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True)
    assert killed.returncode == 9, killed.stderr[-3000:]
    cut = tmp_path / "cut"
    resumed = run("--resume", str(cut), "--no-wandb")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    for name in ("metrics.jsonl", "evals.jsonl", "episodes.jsonl"):
        assert timeless(cut / name) == timeless(whole / name), name
    a, b = (json.loads((f / "summary.json").read_text()) for f in (cut, whole))
    assert a["eval"] == b["eval"] and a["gain"] == b["gain"] and a["tokens"] == b["tokens"]
    assert (cut / "checkpoint" / "adapter_model.safetensors").read_bytes() == (
        whole / "checkpoint" / "adapter_model.safetensors"
    ).read_bytes()


def test_the_seed_matters(whole, tmp_path):
    assert run(*TINY, "--runs", str(tmp_path), "--name", "other", "--seed", "1").returncode == 0
    assert timeless(tmp_path / "other" / "metrics.jsonl") != timeless(whole / "metrics.jsonl")
    # The held-out tasks stay the same: the base is evaluated on them before anything is learnt.
    before = lambda folder: [line for line in lines(folder / "evals.jsonl") if line["stage"] == "before"]
    assert before(tmp_path / "other") == before(whole)


@pytest.mark.parametrize(
    "flags, must_name",
    [
        (["--env", "chess"], "--env chess"),
        (["--difficulty", "0"], "--difficulty 0"),
        (["--difficulty", "11"], "--difficulty 11"),
        (["--k", "1"], "--k 1"),
        (["--loss", "ppo"], "--loss ppo"),
        (["--reward", "kind"], "--reward kind"),
        (["--sft-style", "poem"], "--sft-style poem"),
        (["--temperature", "0"], "--temperature"),
        (["--updates", "-1"], "--updates"),
        (["--model", "no_such_model"], "--model no_such_model"),
        (["--model", "nobody/nothing-here"], "--model nobody/nothing-here"),
        (["--resume", "runs/never-was"], "--resume runs/never-was"),
        (["--env", "alphabet", "--curriculum"], "--curriculum"),
        (["--env", "alphabet", "--min-names", "5"], "--min-names 5"),
        (["--env", "alphabet", "--max-turns", "0"], "--max-turns 0"),
        (["--env", "alphabet", "--similarity-power", "0"], "--similarity-power 0"),
        (["--until-converged", "--updates", "9", "--max-updates", "8"], "--max-updates 8"),
        (["--until-converged", "--max-updates", "8"], "--max-updates 8"),
        (["--engine", "magic"], "--engine magic"),
        (["--difficulty", "medium"], "--difficulty medium"),
        (["--env", "swarm", "--difficulty", "6"], "--difficulty 6"),
        (["--env", "swarm", "--swarm-version", "0.3"], "--swarm-version 0.3"),
        (["--env", "swarm", "--swarm-reputation", "-1"], "--swarm-reputation -1"),
        (["--env", "swarm", "--sft-style", "states"], "--sft-style states"),
        (["--eval-only", "runs/never-was"], "--eval-only runs/never-was"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_left_behind(tmp_path, flags, must_name):
    done = run(*flags, "--runs", str(tmp_path), "--no-wandb")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert must_name in last and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*/metrics.jsonl"))


def test_an_existing_run_is_never_overwritten(whole):
    before = (whole / "summary.json").read_text()
    done = run(*TINY, "--runs", str(whole.parent), "--name", "whole")
    assert done.returncode != 0 and "exists" in done.stderr and "--resume" in done.stderr
    assert (whole / "summary.json").read_text() == before


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    import shutil

    shutil.copytree(ROOT / "pico_base", tmp_path / "mute")
    (tmp_path / "mute" / "chat_template.jinja").unlink()
    done = run("--model", str(tmp_path / "mute"), "--runs", str(tmp_path / "runs"), "--no-wandb")
    assert done.returncode != 0 and "no chat template" in done.stderr and "Traceback" not in done.stderr


def test_a_damaged_checkpoint_is_named(whole, tmp_path):
    import shutil

    shutil.copytree(whole, tmp_path / "hurt")
    weights = tmp_path / "hurt" / "checkpoint" / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1  # one bit
    weights.write_bytes(bytes(data))
    done = run("--resume", str(tmp_path / "hurt"))
    assert done.returncode != 0 and "damaged" in done.stderr and "Traceback" not in done.stderr


def test_another_experiment_cannot_sneak_into_a_resumed_run(whole):
    done = run("--resume", str(whole), "--lr", "0.1")
    assert done.returncode != 0 and "--lr cannot change on --resume" in done.stderr


def test_a_nan_stops_the_run_with_the_last_good_checkpoint(tmp_path):
    script = f"""
import sys, train
real = train.update
def broken(policy, *a, **k):
    if train_calls.append(1) or len(train_calls) == 2:
        next(iter(policy.trainable().values())).data.fill_(float("nan"))
    return real(policy, *a, **k)
train_calls = []
train.update = broken
sys.argv = ["train.py", *{TINY!r}, "--runs", {str(tmp_path)!r}, "--name", "nan"]
train.main()
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode != 0 and "training stopped" in done.stderr and "Traceback" not in done.stderr
    state = json.loads((tmp_path / "nan" / "checkpoint" / "state.json").read_text())
    assert state["update"] == 1


def test_full_fine_tuning_curriculum_kl_and_every_loss_run(tmp_path):
    short = [*TINY, "--updates", "2", "--eval-n", "2", "--sft-steps", "2", "--eval-every", "9"]
    from grpo import CLIP

    for i, loss in enumerate(CLIP):
        extra = ["--lora-rank", "0", "--curriculum"] if i == 0 else ["--kl", "0.1", "--epochs", "2"] if i == 1 else []
        done = run(*short, "--loss", loss, *extra, "--runs", str(tmp_path), "--name", loss)
        assert done.returncode == 0, (loss, done.stderr[-2000:])
        assert len(lines(tmp_path / loss / "metrics.jsonl")) == 2


def test_wandb_logs_offline_without_asking(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    env |= {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}  # nobody is logged in here
    flags = [f for f in TINY if f != "--no-wandb"] + ["--updates", "1", "--runs", str(tmp_path), "--name", "w"]
    done = subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "wandb sync" in done.stdout and list((tmp_path / "w" / "wandb").glob("offline-run-*"))


def test_alphabet_plays_several_turns_through_the_whole_recipe(tmp_path):
    done = run("--env", "alphabet", *TINY, "--max-tokens", "60", "--max-names", "2", "--runs", str(tmp_path), "--name", "a")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["trained"] == "3 turns, 1-2 names, power 8" and set(summary["eval"]) == {summary["trained"]}
    line = lines(tmp_path / "a" / "metrics.jsonl")[0]
    assert {"similarity", "turn_1", "turn_3", "habit_derives"} <= line.keys() and 0 <= line["reward"] <= line["similarity"] <= 1
    episodes = lines(tmp_path / "a" / "episodes.jsonl")
    assert max(sum(part["role"] == "policy" for part in e["segments"]) for e in episodes) > 1, "no episode reached its second turn"


SWARM = [
    "--env", "swarm", "--updates", "2", "--sft-steps", "1", "--sft-examples", "2", "--num-tasks", "1", "--k", "2", "--eval-n", "2",
    "--eval-every", "2", "--save-every", "1", "--max-tokens", "12", "--no-wandb",
]  # fmt: skip


@pytest.fixture(scope="module")
def economy(tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    done = run(*SWARM, "--runs", str(runs), "--name", "s")
    assert done.returncode == 0, done.stderr[-3000:]
    return runs / "s"


def test_swarm_plays_twenty_five_turns_through_the_whole_recipe(economy):
    summary = json.loads((economy / "summary.json").read_text())
    assert summary["trained"] == "medium v0.2" and set(summary["eval"]) == {summary["trained"]}
    for record in lines(economy / "evals.jsonl"):
        assert len(record["reward"]) == len(record["used_claim_task"]) == len(record["reputation"]) == 2
        assert "exact" not in record
    line = lines(economy / "metrics.jsonl")[0]
    assert {"payoff", "diversity", "turns_used", "error_rate", "self_proposal_errors", "used_pass_turn"} <= line.keys()
    for name in ("report.md", "report.html", "curves.png"):
        assert (economy / name).stat().st_size > 0


def test_eval_only_plays_the_checkpoint_on_other_scenarios_and_keeps_the_result(economy):
    flags = ["--env", "swarm", "--difficulty", "hard", "--eval-n", "3", "--swarm-reputation", "0.5"]
    done = run("--eval-only", str(economy), *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    record = lines(economy / "evals.jsonl")[-1]
    assert record["stage"] == "eval_only" and record["tasks"] == "hard v0.2" and not record["trained"] and len(record["reward"]) == 3
    weights = {"payoff": 1.0, "reputation": 0.5, "quality": 0.2, "diversity": 0.1}
    for i, reward in enumerate(record["reward"]):
        assert reward == pytest.approx(sum(w * record[name][i] for name, w in weights.items()), abs=1e-3)
    assert "expert" in done.stdout and "n=3" in done.stdout and "payoff" in done.stdout
    done = run("--eval-only", str(economy), "--env", "swarm", "--lr", "0.5")
    assert done.returncode != 0 and "--lr" in done.stderr and "Traceback" not in done.stderr


def test_eval_only_gives_the_final_evaluation_again(whole):
    before = lines(whole / "evals.jsonl")
    done = run("--eval-only", str(whole))
    assert done.returncode == 0, done.stderr[-3000:]
    again, final = lines(whole / "evals.jsonl")[-1], next(e for e in before if e["stage"] == "final" and e["trained"])
    assert again["stage"] == "eval_only" and again["tasks"] == final["tasks"] and again["reward"] == final["reward"]


def test_a_curriculum_climbs_from_easy(tmp_path):
    script = f"""
import sys, train
train.PROMOTE["swarm"] = ("reward", 0.0)
sys.argv = ["train.py", *{SWARM!r}, "--updates", "6", "--curriculum", "--difficulty", "hard", "--eval-every", "9", "--sft-steps", "0",
            "--runs", {str(tmp_path)!r}, "--name", "c"]
train.main()
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line["level"] for line in lines(tmp_path / "c" / "metrics.jsonl")] == ["easy"] * 5 + ["medium"]
    assert {e["tasks"] for e in lines(tmp_path / "c" / "evals.jsonl")} == {"hard v0.2"}


def test_until_converged_goes_on_until_the_reward_has_settled_or_the_cap(tmp_path):
    flags = [*TINY, "--until-converged", "--eval-n", "2", "--sft-steps", "0", "--runs", str(tmp_path)]
    script = """
import dataclasses, sys, train
real = train.metrics.trend
def trend(values):  # settles after the sixth update
    result = real(values)
    return dataclasses.replace(result, verdict="settled" if len(values) >= 6 else "moving")
train.metrics.trend = trend
sys.argv = ["train.py"] + sys.argv[1:]
train.main()
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, extra, updates in (("settles", [], 6), ("cap", ["--max-updates", "5"], 5)):
        done = subprocess.run(
            [sys.executable, "-c", script, *flags, *extra, "--name", name], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads((tmp_path / name / "summary.json").read_text())["updates"] == updates
        assert lines(tmp_path / name / "evals.jsonl")[-1]["update"] == updates
