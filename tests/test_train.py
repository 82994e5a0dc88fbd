"""The whole recipe on pico_base: a tiny run leaves what it promises, survives a kill to the last bit, and refuses bad input
in one sentence. These are subprocesses, as a user would start them.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import env_letters
import evaluate
import grpo
import settings
import sft
import train
import warm
from bookkeeping import report
from bookkeeping import run as run_records
from bookkeeping.run import SECONDS
from fast import ahead as ahead_room
from lab.common import read_lines as lines
from rollout import Episode, play
from settings import DEV_SEEDS
from steps import train_on

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "--updates", "3", "--sft-steps", "4", "--sft-examples", "6", "--sft-batch", "2", "--num-tasks", "2", "--k", "3", "--eval-n", "4",
    "--eval-every", "2", "--save-every", "1", "--max-tokens", "24", "--difficulty", "2", "--reward", "partial", "--no-wandb",
]  # fmt: skip
ONE_TIER = [*TINY, "--no-eval-other-tiers"]


def run(*flags: str, pictures: bool = False) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
    return warm.run(["train.py", *flags], ROOT, env, pictures=pictures)


def python(code: str, *flags: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return warm.run(["-c", code, *flags], ROOT, env, pictures=False)


def timeless(path: Path) -> list[dict]:
    """Metrics without what a clock says."""
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines(path)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    done = run(*ONE_TIER, "--runs", str(runs), "--name", "whole", pictures=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return runs / "whole"


def check_evaluations(summary: dict, tiers: set[str], n: int) -> None:
    assert set(summary["eval"]) == tiers
    for tasks in tiers:
        for stage in ("before", "after_sft", "final"):
            result = summary["eval"][tasks][stage]
            assert result["n"] == n and 0 <= result["low"] <= result["exact"] <= result["high"] <= 1
            assert 0 <= result["reward_low"] <= result["reward"] <= result["reward_high"] <= 1
            assert {"reward", "format"} <= result.keys()


def test_other_tiers_are_evaluated_too(tmp_path):
    """Unless --no-eval-other-tiers says that they are not, as in the other runs here."""
    done = run(*TINY, "--updates", "1", "--eval-n", "2", "--runs", str(tmp_path), "--name", "tiers")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "tiers" / "summary.json").read_text())
    check_evaluations(summary, {"tier 2", "tier 3", "tier 5", "tier 6"}, n=2)


def test_a_run_leaves_the_folder_that_the_docs_promise(whole):
    for name in ("config.json", "metrics.jsonl", "evals.jsonl", "episodes.jsonl", "summary.json", "report.md", "curves.png", "report.html"):
        assert (whole / name).stat().st_size > 0, name
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["trained"] == "tier 2"
    check_evaluations(summary, {"tier 2"}, n=4)
    assert summary["gain"].keys() >= {"mean", "low", "high"}
    assert summary["seconds"].keys() >= {"total", "rollout", "train", "eval"}
    assert summary["tokens"]["sampled"] > 0 and summary["tokens"]["trained"] > 0
    assert 0.1 < summary["peak_rss_gb"] < 4 and summary["env"] == "letters" and summary["seed"] == 0
    assert [line["update"] for line in lines(whole / "metrics.jsonl")] == [1, 2, 3]
    evals = [(line["update"], line["stage"]) for line in lines(whole / "evals.jsonl") if line["trained"]]
    assert evals == [(-1, "before"), (0, "after_sft"), (2, "train"), (3, "final")]


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

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(ROOT / "models" / "pico_base"), whole / "checkpoint")
    assert any(p.abs().sum() > 0 for name, p in model.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("kill_at", ["sft", "update", "save"])
def test_resume_after_a_kill_equals_the_undisturbed_run(whole, tmp_path, kill_at):
    # A hard os._exit in the middle of things: no cleanup code runs, as with SIGKILL.
    script = f"""
import os, sys, sft, train
calls = 0
def bomb(real, at):
    def inner(*a, **k):
        global calls
        calls += 1
        if calls == at: os._exit(9)
        return real(*a, **k)
    return inner
kill = {kill_at!r}
if kill == "sft": sft.sft_step = bomb(sft.sft_step, 3)
if kill == "update": train.update = bomb(train.update, 3)
if kill == "save":
    from bookkeeping import checkpoint
    checkpoint.checksum = bomb(checkpoint.checksum, 2)  # the new checkpoint is written but not yet in place
sys.argv = ["train.py", *{ONE_TIER!r}, "--runs", {str(tmp_path)!r}, "--name", "cut"]
train.main()
"""
    killed = python(script)
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


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_asked_to_stop_a_run_saves_says_how_to_go_on_and_ends_equal(whole, tmp_path, name):
    script = f"""
import os, signal, sys, train
real = train.update
def update(*a, **k):
    os.kill(os.getpid(), signal.{name})  # in the middle of the first update
    return real(*a, **k)
train.update = update
sys.argv = ["train.py", *{ONE_TIER!r}, "--runs", {str(tmp_path)!r}, "--name", "cut"]
train.main()
"""
    done = python(script)
    cut = tmp_path / "cut"
    assert done.returncode == 1 and f"stopped; go on with: python train.py --resume {cut}" in done.stderr and "Traceback" not in done.stderr
    assert json.loads((cut / "checkpoint" / "state.json").read_text())["update"] == len(lines(cut / "metrics.jsonl")) == 1
    assert run("--resume", str(cut)).returncode == 0
    for file in ("metrics.jsonl", "evals.jsonl", "episodes.jsonl"):
        assert timeless(cut / file) == timeless(whole / file), file


def test_the_seed_matters(whole, tmp_path):
    assert run(*ONE_TIER, "--runs", str(tmp_path), "--name", "other", "--seed", "1").returncode == 0
    assert timeless(tmp_path / "other" / "metrics.jsonl") != timeless(whole / "metrics.jsonl")
    # The development tasks stay the same: the base is evaluated on them before anything is learnt.
    before = lambda folder: [line for line in lines(folder / "evals.jsonl") if line["stage"] == "before"]
    assert before(tmp_path / "other") == before(whole)


@pytest.mark.parametrize("num_tasks", [1, 4, 7, 8, 64, 1000])
def test_training_never_meets_the_tasks_of_sft_of_evaluation_or_of_another_seed(num_tasks):
    last = settings.Config(
        num_tasks=num_tasks, updates=settings.MOST_UPDATES, seed=settings.SFT_SEEDS // (settings.MOST_UPDATES * num_tasks) - 1
    )
    settings.check(last)
    assert settings.task_seeds(last, settings.MOST_UPDATES - 1)[-1] < settings.SFT_SEEDS < DEV_SEEDS
    next_one = replace(last, seed=last.seed + 1)
    assert settings.task_seeds(next_one, 0)[0] == settings.task_seeds(last, settings.MOST_UPDATES - 1)[-1] + 1
    with pytest.raises(ValueError, match=f"--seed {next_one.seed}: "):
        settings.check(next_one)


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
        (["--seed", "-1"], "--seed -1"),
        (["--seed", "1250"], "0 to 1249"),
        (["--seed", "156", "--num-tasks", "64"], "0 to 155"),
        (["--updates", "100001"], "--updates 100001"),
        (["--difficulty", "medium"], "--difficulty medium"),
        (["--env", "swarm", "--difficulty", "6"], "--difficulty 6"),
        (["--env", "swarm", "--swarm-version", "0.3"], "--swarm-version 0.3"),
        (["--env", "swarm", "--swarm-reputation", "-1"], "--swarm-reputation -1"),
        (["--env", "swarm", "--sft-style", "states"], "--sft-style states"),
        (["--eval-only", "runs/never-was"], "--eval-only runs/never-was"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_left_behind(monkeypatch, tmp_path, flags, must_name):
    """In this process, because starting 25 of them takes minutes; the next test starts one."""
    monkeypatch.setattr(sys, "argv", ["train.py", *flags, "--runs", str(tmp_path), "--no-wandb"])
    with pytest.raises(SystemExit) as stopped:
        train.main()
    assert must_name in str(stopped.value) and "\n" not in str(stopped.value)
    assert not list(tmp_path.iterdir())


def test_a_refusal_is_an_exit_code_and_a_line_on_stderr(tmp_path):
    done = run("--k", "1", "--runs", str(tmp_path), "--no-wandb")
    assert done.returncode == 1 and done.stderr.startswith("--k 1: ") and done.stderr.count("\n") == 1


def test_an_existing_run_is_never_overwritten(whole):
    before = (whole / "summary.json").read_text()
    done = run(*ONE_TIER, "--runs", str(whole.parent), "--name", "whole")
    assert done.returncode != 0 and "exists" in done.stderr and "--resume" in done.stderr
    assert (whole / "summary.json").read_text() == before


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    shutil.copytree(ROOT / "models" / "pico_base", tmp_path / "mute")
    (tmp_path / "mute" / "chat_template.jinja").unlink()
    done = run("--model", str(tmp_path / "mute"), "--runs", str(tmp_path / "runs"), "--no-wandb")
    assert done.returncode != 0 and "no chat template" in done.stderr and "Traceback" not in done.stderr


def flip_a_bit(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(bytes(data))


def test_from_a_damaged_checkpoint_the_run_goes_back_to_the_one_before_and_ends_equal(whole, tmp_path):
    hurt = shutil.copytree(whole, tmp_path / "hurt")
    flip_a_bit(hurt / "checkpoint" / "adapter_model.safetensors")
    done = run("--resume", str(hurt))
    assert done.returncode == 0 and "damaged" in done.stdout and "after update 2" in done.stdout, done.stderr[-2000:]
    for name in ("metrics.jsonl", "evals.jsonl"):
        assert timeless(hurt / name) == timeless(whole / name), name
    weights = "checkpoint/adapter_model.safetensors"
    assert (hurt / weights).read_bytes() == (whole / weights).read_bytes() and (hurt / "checkpoint.damaged").exists()

    for folder in ("checkpoint", "checkpoint.old"):
        flip_a_bit(hurt / folder / "adapter_model.safetensors")
    done = run("--resume", str(hurt))
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
sys.argv = ["train.py", *{ONE_TIER!r}, "--runs", {str(tmp_path)!r}, "--name", "nan"]
train.main()
"""
    done = python(script)
    assert done.returncode != 0 and "training stopped" in done.stderr and "Traceback" not in done.stderr
    state = json.loads((tmp_path / "nan" / "checkpoint" / "state.json").read_text())
    assert state["update"] == 1


def test_full_fine_tuning_curriculum_kl_and_every_loss_run(tmp_path):
    short = [*ONE_TIER, "--updates", "2", "--eval-n", "2", "--sft-steps", "2", "--eval-every", "9"]
    from grpo import CLIP

    for i, loss in enumerate(CLIP):
        extra = ["--lora-rank", "0", "--curriculum"] if i == 0 else ["--kl", "0.1", "--epochs", "2"] if i == 1 else []
        done = run(*short, "--loss", loss, *extra, "--runs", str(tmp_path), "--name", loss)
        assert done.returncode == 0, (loss, done.stderr[-2000:])
        assert len(lines(tmp_path / loss / "metrics.jsonl")) == 2


def test_wandb_logs_offline_without_asking(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    env |= {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}  # nobody is logged in here
    flags = [f for f in ONE_TIER if f != "--no-wandb"] + ["--updates", "1", "--runs", str(tmp_path), "--name", "w"]
    done = warm.run(["train.py", *flags], ROOT, env, pictures=False)  # wandb itself is imported in the fork
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
    done = run(*SWARM, "--runs", str(runs), "--name", "s", pictures=True)
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
    assert record["stage"] == "eval_only" and record["tasks"] == "hard v0.2, swarm reputation 0.5"
    assert not record["trained"] and len(record["reward"]) == 3
    weights = {"payoff": 1.0, "reputation": 0.5, "quality": 0.2, "diversity": 0.1}
    for i, reward in enumerate(record["reward"]):
        assert reward == pytest.approx(sum(w * record[name][i] for name, w in weights.items()) - 0.5 * record["error_rate"][i], abs=1e-3)
    assert "expert" in done.stdout and "n=3" in done.stdout and "payoff" in done.stdout
    done = run("--eval-only", str(economy), "--env", "swarm", "--lr", "0.5")
    assert done.returncode != 0 and "--lr" in done.stderr and "Traceback" not in done.stderr


def test_eval_only_gives_the_final_evaluation_again(whole):
    before = lines(whole / "evals.jsonl")
    done = run("--eval-only", str(whole))
    assert done.returncode == 0, done.stderr[-3000:]
    again, final = lines(whole / "evals.jsonl")[-1], next(e for e in before if e["stage"] == "final" and e["trained"])
    assert again["stage"] == "eval_only" and again["tasks"] == final["tasks"] and again["reward"] == final["reward"]
    assert "## Evaluated later" in (whole / "report.md").read_text() and f"{whole}/report.md" in done.stdout


def test_an_evaluation_by_other_rules_does_not_pass_for_the_runs_own(whole):
    done = run("--eval-only", str(whole), "--reward", "binary", "--eval-n", "3", "--threads", "1", "--swarm-payoff", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--env letters does not read --swarm-payoff; it changes nothing" in done.stdout
    again = lines(whole / "evals.jsonl")[-1]
    assert (again["tasks"], again["trained"], len(again["reward"])) == ("tier 2, reward binary", False, 3)


def test_held_out_tasks_stand_under_a_name_of_their_own(whole):
    before = lines(whole / "evals.jsonl")
    done = run("--eval-only", str(whole), "--held-out", "--eval-n", "3")
    assert done.returncode == 0, done.stderr[-3000:]
    again = lines(whole / "evals.jsonl")[len(before) :]
    assert [(e["stage"], e["tasks"], e["trained"], len(e["reward"])) for e in again] == [("eval_only", "tier 2, held-out", False, 3)]
    assert "choose nothing by them" in done.stdout and "tier 2, held-out" in (whole / "report.md").read_text()


def test_held_out_tasks_are_no_others_tasks(whole, monkeypatch):
    seen = []
    monkeypatch.setattr(evaluate, "evaluate_policy", lambda policy, roll, sets, seeds, *rest: seen.append(seeds) or {})
    evaluate.evaluate_only(settings.Config(eval_only=str(whole), held_out=True, eval_n=512), {"eval_only", "held_out", "eval_n"})
    evaluate.evaluate_only(settings.Config(eval_only=str(whole)), {"eval_only"})
    cfg = settings.Config(**json.loads((whole / "config.json").read_text()))
    (held_out, development), whose = seen, lambda seeds: {str(settings.make_env(cfg, 6).reset(seed)) for seed in seeds}
    assert len(held_out) == len(whose(held_out)) == 512 and development == settings.dev_seeds(cfg)
    first, last = (settings.task_seeds(cfg, update) for update in (0, settings.MOST_UPDATES - 1))
    others = [first, last, settings.sft_seeds(cfg), range(DEV_SEEDS, DEV_SEEDS + 512)]
    assert not whose(held_out) & set().union(*map(whose, others)) and min(held_out) > 10**9 + DEV_SEEDS


def test_a_run_refuses_to_look_at_held_out_tasks():
    done = run("--env", "letters", "--held-out")
    assert done.returncode != 0 and "--eval-only" in done.stderr and "Traceback" not in done.stderr


def test_a_curriculum_climbs_from_easy(tmp_path):
    script = f"""
import sys, settings, train
settings.PROMOTE["swarm"] = ("reward", 0.0)
sys.argv = ["train.py", *{SWARM!r}, "--updates", "6", "--curriculum", "--difficulty", "hard", "--eval-every", "9", "--sft-steps", "0",
            "--runs", {str(tmp_path)!r}, "--name", "c"]
train.main()
"""
    done = python(script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line["level"] for line in lines(tmp_path / "c" / "metrics.jsonl")] == ["easy"] * 5 + ["medium"]
    assert {e["tasks"] for e in lines(tmp_path / "c" / "evals.jsonl")} == {"hard v0.2"}


LEVELLED = """
class Echo:
    think, tools, max_turns, levels, promote = False, None, 1, ["short", "long"], ("format", 0.0)

    def reset(self, seed):
        self.word, self.reply = f"{seed:010d}"[-2 if self.level == "short" else -6 :], ""
        return [{"role": "user", "content": f"Say {self.word}."}]

    def step(self, reply):
        self.reply = reply
        return [], True

    def score(self):
        return {"reward": float(self.reply == self.word), "format": 1.0}

    def expert_reply(self):
        return self.word
"""


def test_an_environment_of_ones_own_can_have_levels_and_climb_them(tmp_path):
    file = tmp_path / "echo.py"
    file.write_text(LEVELLED)
    words = [
        "--env",
        f"{file}:Echo",
        "--updates",
        "6",
        "--num-tasks",
        "2",
        "--k",
        "2",
        "--eval-n",
        "2",
        "--max-tokens",
        "8",
        "--sft-steps",
        "0",
    ]
    done = run(*words, "--curriculum", "--eval-every", "9", "--runs", str(tmp_path), "--name", "c")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line["level"] for line in lines(tmp_path / "c" / "metrics.jsonl")] == ["short"] * 5 + ["long"]
    found = {e["tasks"]: e["trained"] for e in lines(tmp_path / "c" / "evals.jsonl")}
    assert found == {"Echo, level short": False, "Echo, level long": True}
    assert json.loads((tmp_path / "c" / "config.json").read_text())["difficulty"] == "long"
    wrong = run(*words, "--difficulty", "longer", "--runs", str(tmp_path))
    assert wrong.returncode != 0 and "--difficulty longer: Echo has short, long; see docs/fork.md" in wrong.stderr
    file.write_text(LEVELLED.replace(', ("format", 0.0)', ', ("exact", 0.0)'))
    wrong = run(*words, "--curriculum", "--runs", str(tmp_path))
    assert wrong.returncode != 0 and "score (echo.py:13) has no 'exact', by which a curriculum goes up" in wrong.stderr


def test_until_converged_goes_on_until_the_reward_has_settled_or_the_cap(tmp_path):
    flags = [*ONE_TIER, "--until-converged", "--eval-n", "2", "--sft-steps", "0", "--runs", str(tmp_path)]
    script = """
import dataclasses, sys, train
import metrics
real = metrics.trend
def trend(values):  # settles after the sixth update
    result = real(values)
    return dataclasses.replace(result, verdict="settled" if len(values) >= 6 else "moving")
metrics.trend = trend
sys.argv = ["train.py"] + sys.argv[1:]
train.main()
"""
    for name, extra, updates in (("settles", [], 6), ("cap", ["--max-updates", "5"], 5)):
        done = python(script, *flags, *extra, "--name", name)
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads((tmp_path / name / "summary.json").read_text())["updates"] == updates
        assert lines(tmp_path / name / "evals.jsonl")[-1]["update"] == updates


# ------------------------------------------------------------------------------------------------ flags that need no run


def refused(monkeypatch, *flags: str) -> str:
    """What main() says about these flags, before anything is loaded."""
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    monkeypatch.setattr(train, "train", lambda cfg, typed: pytest.fail("it was not refused"))
    with pytest.raises(SystemExit) as caught:
        train.main()
    return str(caught.value)


@pytest.mark.parametrize(
    "flags, must_name",
    [
        (["--async-rollouts", "-1"], "--async-rollouts -1"),
        (["--importance", "magic"], "--importance magic"),
        (["--preset", "nothing"], "--preset nothing"),
        (["--env", "swarm", "--swarm-error-penalty", "-1"], "--swarm-error-penalty -1"),
    ],
)
def test_flags_about_old_samples_are_refused_in_one_sentence(monkeypatch, flags, must_name):
    said = refused(monkeypatch, *flags)
    assert must_name in said and "\n" not in said


def configured(monkeypatch, *flags: str) -> settings.Config:
    """The Config that main() hands over for these flags."""
    seen = []
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    monkeypatch.setattr(train, "train", lambda cfg, typed: seen.append(cfg))
    train.main()
    return seen[0]


@pytest.mark.parametrize(
    "flags, name, value",
    [
        ([], "think", False),
        ([], "warmup", 0),
        (["--lr", "1e-3"], "lr", 1e-3),
        (["--eval-n", "64"], "eval_n", 64),
        (["--importance", "token"], "importance", "token"),
        (["--think"], "think", True),  # a flag that was set to what is the default elsewhere was set, too
        (["--warmup", "5"], "warmup", 5),
        (["--reward", "binary"], "reward", "binary"),
    ],
)
def test_a_preset_gives_way_to_every_flag_that_was_set(monkeypatch, flags, name, value):
    assert getattr(configured(monkeypatch, "--preset", "seed", *flags), name) == value


def test_the_error_penalty_reaches_the_environment(monkeypatch):
    cfg = configured(monkeypatch, "--env", "swarm", "--swarm-error-penalty", "0.5")
    assert settings.make_env(cfg, cfg.difficulty).error_penalty == 0.5
    (_, (_, evaluated)), *_ = settings.eval_sets(cfg).items()
    assert evaluated().error_penalty == 0.5
    for env, n_parameters, penalty in (
        ("swarm", 1e6, 0.5),
        ("swarm", 4e9, 0.0),
    ):  # a small model pays for slips, a large one is paid as published
        cfg = configured(monkeypatch, "--env", env)
        settings.fill(cfg, settings.by_size(n_parameters, env))
        assert settings.make_env(cfg, cfg.difficulty).error_penalty == penalty


def test_the_rules_of_the_swarm_reach_the_environment_and_a_config_from_before_them_means_the_defaults(monkeypatch):
    cfg = configured(monkeypatch, *"--env swarm --swarm-payoff-scale published --swarm-trade-credit both --swarm-post-worth 0.5".split())
    rules = lambda env: (env.payoff_scale, env.trade_credit, env.post_worth)
    assert rules(settings.make_env(cfg, cfg.difficulty)) == ("published", "both", 0.5)
    cfg = configured(monkeypatch, "--env", "swarm")
    assert (cfg.swarm_payoff_scale, cfg.swarm_trade_credit) == ("ours", "proposer")
    cfg.swarm_payoff_scale = cfg.swarm_trade_credit = None
    assert rules(settings.make_env(cfg, cfg.difficulty)) == ("ours", "proposer", 2.0)


# ------------------------------------------------------------------------------------------------ ahead


def test_in_turn_nobody_waits_and_the_summary_adds_the_seconds_up(whole):
    metrics, seconds = lines(whole / "metrics.jsonl"), json.loads((whole / "summary.json").read_text())["seconds"]
    for part in SECONDS:
        assert seconds[part] == pytest.approx(sum(line[f"seconds_{part}"] for line in metrics), abs=0.011)
    for line in metrics:
        assert line["seconds_wait"] == 0 and min(line[f"seconds_{part}"] for part in SECONDS if part != "wait") > 0
        assert line["off_policy_steps"] == 0 and line.get("mismatch", 0.0) < 1e-4


SHORT = [
    "--env", "alphabet", "--min-turns", "1", "--max-turns", "1", "--min-names", "2", "--max-names", "3", "--updates", "3",
    "--sft-steps", "0", "--num-tasks", "3", "--k", "4", "--eval-n", "1", "--eval-every", "9", "--save-every", "1", "--max-tokens", "40",
    "--lr", "0.01", "--warmup", "1", "--no-think", "--temperature", "1.5", "--no-wandb",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs_ahead(tmp_path_factory) -> Path:
    """Runs with one and with two batches ahead; the first goes on for two updates more, and of the second there is a twin
    whose player is killed while the first batch is trained: the two others are open then.
    """
    runs = tmp_path_factory.mktemp("runs")
    done = python(f"""
import shutil, sys, train
from pathlib import Path
from fast.ahead import SecondProcess
runs, opened, updates = Path({str(runs)!r}), [], []
real_start, real_update = SecondProcess.start, train.update
def start(self):
    real_start(self)
    opened.append(self)
def run(*flags):
    sys.argv = ["train.py", *flags]
    train.main()
    print(flags[-1], "is over after", len(opened), "starts", flush=True)
    opened.clear()
def update(*a, **k):
    updates.append(1)
    if len(updates) == 1:
        opened[-1].process.kill()
    return real_update(*a, **k)
SecondProcess.start = start
short = [*{SHORT!r}, "--runs", str(runs)]
two = ["--async-rollouts", "2", "--importance", "token"]
try:
    run(*short, "--max-tokens", "100000", "--async-rollouts", "1", "--name", "no")
except BaseException as stop:
    (runs / "too-long").write_text(f"{{type(stop).__name__}} {{stop}}")
opened.clear()
run(*short, "--async-rollouts", "1", "--name", "one")
run(*short, *two, "--name", "two")
shutil.copytree(runs / "one", runs / "longer")
run("--updates", "5", "--resume", str(runs / "longer"))
train.update = update
run(*short, *two, "--name", "killed")
""")
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line for line in done.stdout.splitlines() if "is over after" in line]
    assert [line.split()[-2] for line in said] == ["1", "1", "1", "2"] and done.stdout.count("was killed by signal 9") == 1
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return runs


def sampled(folder: Path, done: int) -> list[tuple]:
    """What was sampled before update `done`: who said what, and with which log-probs."""
    kept = [e for e in lines(folder / "episodes.jsonl") if not e["stage"] and e["update"] == done]
    assert kept
    return [(e["seed"], e["member"], e["messages"], e["logprob"]) for e in kept]


@pytest.mark.parametrize("name, ages, how", [("one", [0, 1, 1], "sequence"), ("two", [0, 1, 2], "token")])
def test_a_batch_is_as_old_as_it_was_asked_ahead(runs_ahead, name, ages, how):
    metrics = lines(runs_ahead / name / "metrics.jsonl")
    assert [line["off_policy_steps"] for line in metrics] == ages
    versions = {e["update"]: e["policy_version"] for e in lines(runs_ahead / name / "episodes.jsonl") if not e["stage"]}
    assert versions == {step + 1: step - age for step, age in enumerate(ages)}
    assert metrics[0]["mismatch"] < 1e-4 and metrics[1]["mismatch"] > 1e-2, "an old policy is another one"
    assert metrics[0]["seconds_wait"] > 0 and all(line["seconds_environment"] > 0 for line in metrics)
    assert 0 < metrics[1]["importance"] <= 2 and json.loads((runs_ahead / name / "config.json").read_text())["importance"] == how
    assert ", wait " in (runs_ahead / name / "report.md").read_text().split("An update, on average: ")[1]


def test_in_turn_a_small_model_needs_no_weights_for_old_samples(whole):
    assert json.loads((whole / "config.json").read_text())["importance"] == "clip"
    assert not any({"importance", "capped"} & line.keys() for line in lines(whole / "metrics.jsonl"))


def test_ahead_as_well_the_samples_depend_on_the_seed_and_the_weights_alone(runs_ahead):
    one, two = runs_ahead / "one", runs_ahead / "two"
    assert sampled(one, 1) == sampled(two, 1) and sampled(one, 2) == sampled(two, 2)  # by the weights after SFT, all of them
    assert sampled(one, 3) != sampled(two, 3)  # by those after one update, and by those after none
    assert [row[0] for row in sampled(one, 3)] == [row[0] for row in sampled(two, 3)]  # on the same tasks


def test_a_run_whose_player_is_killed_is_the_same_to_the_last_bit(runs_ahead):
    for name in ("metrics.jsonl", "evals.jsonl", "episodes.jsonl"):
        assert timeless(runs_ahead / "killed" / name) == timeless(runs_ahead / "two" / name), name
    adapter = lambda name: (runs_ahead / name / "checkpoint" / "adapter_model.safetensors").read_bytes()
    assert adapter("killed") == adapter("two") != adapter("one")


def test_resume_goes_on_ahead_with_tasks_that_were_not_seen_before(runs_ahead):
    one, longer = (timeless(runs_ahead / name / "metrics.jsonl") for name in ("one", "longer"))
    assert longer[:3] == one and [line["update"] for line in longer] == [1, 2, 3, 4, 5]
    assert [line["off_policy_steps"] for line in longer] == [0, 1, 1, 0, 1]  # what was under way is sampled by the checkpoint
    tasks = {done: {row[0] for row in sampled(runs_ahead / "longer", done)} for done in range(1, 6)}
    assert len(set.union(*tasks.values())) == sum(map(len, tasks.values())) == 10
    assert json.loads((runs_ahead / "longer" / "summary.json").read_text())["updates"] == 5


def processes(group: int) -> list[str]:
    """Whoever still runs in a process group."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().rsplit(")", 1)
        except OSError:  # it has just gone
            continue
        state, _, its_group = rest.split()[:3]
        if int(its_group) == group and state != "Z":
            alive.append(name)
    return alive


def test_ctrl_c_stops_a_run_ahead_cleanly_and_leaves_nobody_behind(tmp_path):
    code = f"""
import sys, train
from fast.ahead import SecondProcess
real = SecondProcess.start
def start(self):
    open({str(tmp_path / "home")!r}, "w").write(self.home.name)
    real(self)
SecondProcess.start = start
sys.argv = ["train.py", *{SHORT!r}, "--updates", "10000", "--async-rollouts", "2", "--runs", {str(tmp_path)!r}, "--name", "cut"]
train.main()
"""
    env, metrics = {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "cut" / "metrics.jsonl"
    with open(tmp_path / "said", "w") as said:
        run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stdout=said, stderr=said, start_new_session=True)
    try:
        while not metrics.exists() and run.poll() is None:
            time.sleep(0.1)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all of them
        assert run.wait(600) == 1
        text = (tmp_path / "said").read_text()
        assert "stopping at the next safe point" in text and f"go on with: python train.py --resume {tmp_path}/cut" in text
        assert "Traceback" not in text and "started again" not in text, text[-3000:]
        patience = time.time() + 120  # multiprocessing's own helper ends when it hears that nobody is left
        while processes(run.pid) and time.time() < patience:
            time.sleep(0.1)
        assert processes(run.pid) == [] and not Path((tmp_path / "home").read_text()).exists()
        state = json.loads((tmp_path / "cut" / "checkpoint" / "state.json").read_text())
        assert state["update"] == len(lines(metrics)) >= 1
    finally:
        if processes(run.pid):
            os.killpg(run.pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------ out of memory


@pytest.fixture(scope="module")
def out_of_memory(tmp_path_factory) -> tuple[Path, dict, str]:
    """(a run that ran out of memory in its second update and then went on with smaller pieces, its state in between, what it said)."""
    runs = tmp_path_factory.mktemp("runs")
    done = python(f"""
import json, shutil, sys, torch, train
from pathlib import Path
folder, real, updates = Path({str(runs)!r}) / "full", train.update, []
def update(*a, **k):
    updates.append(1)
    if len(updates) == 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\\nSee the documentation")
    return real(*a, **k)
train.update = update
sys.argv = ["train.py", *{SHORT!r}, "--preset", "seed", "--runs", {str(runs)!r}, "--name", "full"]
try:
    train.main()
except SystemExit as stop:
    print("SAID", repr(stop.code))
shutil.copy(folder / "checkpoint" / "state.json", folder / "state-between.json")
train.update = real
sys.argv = ["train.py", "--resume", str(folder), "--micro-tokens", "64"]
train.main()
""")
    assert done.returncode == 0, done.stderr[-3000:]
    said = next(line for line in done.stdout.splitlines() if line.startswith("SAID"))
    return runs / "full", json.loads((runs / "full" / "state-between.json").read_text()), said


def test_out_of_memory_is_one_sentence_and_the_run_goes_on_in_smaller_pieces(out_of_memory):
    folder, between, said = out_of_memory
    assert "out of GPU memory (CUDA out of memory. Tried to allocate 2.00 GiB.)" in said and "\\n" not in said
    assert "--micro-tokens" in said and "--resume" in said
    assert between["update"] == 1
    assert [line["update"] for line in lines(folder / "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((folder / "config.json").read_text())["micro_tokens"] == 64


def test_a_preset_is_written_down_and_a_flag_that_was_set_stays(out_of_memory):
    config = json.loads((out_of_memory[0] / "config.json").read_text())
    assert config["preset"] == "seed"
    preset = {"think": False, "reward": "partial", "lr_end": 1.0, "importance": "clip"}
    given = {"lr": 0.01, "warmup": 1, "updates": 3, "max_tokens": 40, "eval_n": 1, "eval_every": 9}
    assert {name: config[name] for name in preset | given} == preset | given
    assert set(settings.PRESETS["seed"]) - {"k", "sft_lr"} == set(preset | given)


@pytest.mark.parametrize("message", ["", "\n"])
def test_out_of_memory_without_a_word_is_one_sentence_too(monkeypatch, message):
    def full(cfg, typed):
        raise torch.OutOfMemoryError(message)

    monkeypatch.setattr(train, "train", full)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit, match="out of GPU memory"):
        train.main()


@pytest.mark.parametrize("words, rank, checks", [([], 0, 1), ([], 1, 0), (["--resume", "runs/x"], 0, 0), (["--resume", "runs/x"], 1, 0)])
def test_a_new_run_is_checked_once_and_a_resumed_one_by_its_own_settings(monkeypatch, words, rank, checks):
    """The settings of a resumed run stand in its folder: those of its command line are mostly defaults.
    A refusal of every rank would be printed twice."""
    seen, trained = [], []
    monkeypatch.setattr(train, "preflight", seen.append)
    monkeypatch.setattr(train, "train", lambda cfg, typed: trained.append(cfg))
    monkeypatch.setattr(train.parallel, "rank", lambda: rank)
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    train.main()
    assert len(seen) == checks and len(trained) == 1


# ------------------------------------------------------------------------------------------------ what must hold ahead as in turn


def test_what_cannot_be_sampled_is_one_sentence_ahead_as_in_turn(runs_ahead):
    kind, said = (runs_ahead / "too-long").read_text().split(maxsplit=1)
    assert kind == "SystemExit" and "lower --max-tokens" in said and "\n" not in said


class NotAhead:
    """As a second process, without a second process: the same batches, asked for as early."""

    def __init__(self, load, make_sampler, threads, needed):
        self.policy, self.jobs = load(), {}
        self.sampler = make_sampler(self.policy)

    def ask(self, tag, policy, job):
        self.jobs[tag] = job

    def play(self, policy, job):
        return play(self.policy, self.sampler, job.make_env, job.seeds, job.k, job.max_tokens, job.temperature, job.noise)

    def take(self, tag):
        return self.play(self.policy, self.jobs[tag]), {"rollout": 1.0, "environment": 1.0, "sync": 1.0}

    def close(self):
        asked_levels[:] = [job.make_env.args[-1] for tag, job in sorted(self.jobs.items())]


asked_levels: list[int] = []


def test_a_curriculum_ahead_says_the_level_that_was_played_and_climbs_by_that_alone(monkeypatch, tmp_path):
    nothing = {"groups_with_signal": 0.0, "trained_tokens": 0, "loss": 0.0, "grad_norm": 0.0}
    monkeypatch.setattr(ahead_room, "SecondProcess", NotAhead)
    monkeypatch.setattr(train, "update", lambda *a, **k: nothing)
    monkeypatch.setattr(run_records, "StopSignal", lambda: SimpleNamespace(asked=False))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(report, "write", lambda folder: (folder / "report.md").write_text(""))
    monkeypatch.setitem(settings.PROMOTE, "letters", ("exact", 0.0))  # five batches of a level are enough, however bad
    monkeypatch.setattr(sys, "argv", [
        "train.py", "--curriculum", "--difficulty", "6", "--async-rollouts", "2", "--updates", "15", "--sft-steps", "0", "--num-tasks", "1",
        "--k", "2", "--eval-n", "1", "--eval-every", "99", "--save-every", "99", "--max-tokens", "4", "--no-wandb", "--runs", str(tmp_path),
        "--name", "c",
    ])  # fmt: skip
    train.main()
    # Two batches are under way when a level is done with: they are of the old one, and do not speak for the new one.
    assert asked_levels == [1] * 7 + [2] * 7 + [3]
    assert [line["level"] for line in lines(tmp_path / "c" / "metrics.jsonl")] == asked_levels


# ------------------------------------------------------------------------------------------------ what the recipe hands on


@pytest.fixture(scope="module")
def handed_on(tmp_path_factory) -> SimpleNamespace:
    """A run of 24 + 24 steps under --loss dr_grpo, none of which learns: the seeds of its demonstrations, and of every step the rate
    that its optimizer has, the rewards and the advantages.
    """
    seen, number = SimpleNamespace(seeds=[], sft_rates=[], rates=[], rewards=[], advantages=[]), iter(range(10**6))
    demonstrations = sft.demonstrations

    def show(policy, make_env, seeds):
        seen.seeds += seeds
        return demonstrations(policy, make_env, seeds)

    def sft_step(policy, optimizer, episodes, *_):
        seen.sft_rates += [group["lr"] for group in optimizer.param_groups]
        return {"loss": 0.0}

    def update(policy, optimizer, groups, advantages, cfg, reference):
        seen.rates += [group["lr"] for group in optimizer.param_groups]
        seen.rewards.append([[e.reward for e in group] for group in groups])
        seen.advantages.append(advantages)
        return {"groups_with_signal": 0.0, "trained_tokens": 0, "loss": 0.0, "grad_norm": 0.0}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "demonstrations", show)
        patch.setattr(sft, "sft_step", sft_step)
        patch.setattr(train, "update", update)
        patch.setattr(env_letters.Letters, "score", lambda self: {"reward": next(number) * 7 % 10 / 10, "exact": 0.0})
        patch.setattr(run_records, "StopSignal", lambda: SimpleNamespace(asked=False))
        patch.setattr(report, "write", lambda folder: (folder / "report.md").write_text(""))
        patch.setattr(sys, "argv", [
            "train.py", "--difficulty", "6", "--loss", "dr_grpo", "--sft-steps", "24", "--sft-examples", "5", "--sft-batch", "2",
            "--sft-lr", "1e-2", "--updates", "24", "--warmup", "5", "--lr", "1e-3", "--lr-end", "0.1", "--num-tasks", "1", "--k", "3",
            "--eval-n", "1", "--eval-every", "99", "--save-every", "99", "--max-tokens", "4", "--no-eval-other-tiers", "--threads", "1",
            "--no-wandb", "--seed", "3", "--runs", str(tmp_path_factory.mktemp("runs")), "--name", "handed-on",
        ])  # fmt: skip
        train.main()
    return seen


def test_without_sft_a_run_is_whole_although_nobody_is_an_expert(tmp_path, monkeypatch):
    """What docs/tasks.md recommends for rows without demonstrations."""
    warm.draw_nothing(monkeypatch)
    rows = [{"prompt": f"Say {i}.", "answer": str(i % 2)} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = f"jsonl:{tmp_path}/rows.jsonl,scorer=regex"
    expert = settings.make_env(settings.Config(env=env), 0)
    expert.reset(0)
    with pytest.raises(ValueError, match="--sft-steps 0"):  # there is no expert indeed
        expert.expert_reply()
    monkeypatch.setattr(sys, "argv", [
        "train.py", *ONE_TIER[: ONE_TIER.index("--difficulty")], "--no-wandb", "--env", env, "--sft-steps", "0", "--updates", "1",
        "--runs", str(tmp_path), "--name", "alone",
    ])  # fmt: skip
    train.main()
    assert [e["stage"] for e in lines(tmp_path / "alone" / "evals.jsonl")] == ["before", "after_sft", "final"]


def test_demonstrations_are_of_tasks_that_are_neither_trained_on_nor_held_out(handed_on):
    assert handed_on.seeds == [1_000_000_000 + i for i in range(5)]  # the same for every --seed
    assert 1_000_000_000 + 5 < DEV_SEEDS


def test_the_rate_of_each_step_is_that_of_the_schedule_worked_by_hand(handed_on):
    falls = [round(1 - 0.9 * step / 24, 6) for step in range(24)]  # 1, 0.9625, … 0.1375: linearly to a tenth at the end of 24
    expected = [0.2, 0.4, 0.6, 0.8, *falls[4:]]  # up over five updates, and down from where the two lines meet
    assert falls[4] == 0.85 and falls[12] == 0.55 and falls[-1] == 0.1375
    assert handed_on.rates == pytest.approx([1e-3 * share for share in expected])
    expected = [10 / 24, 20 / 24, *((24 - step) / 24 for step in range(2, 24))]  # up over 2.4 steps, then to a 24th in the last one
    assert handed_on.sft_rates == pytest.approx([1e-2 * share for share in expected])


def test_dr_grpo_hands_advantages_on_that_are_not_divided_by_the_deviation(handed_on):
    assert len(handed_on.rewards) == 24
    for (rewards,), (advantages,) in zip(handed_on.rewards, handed_on.advantages):
        mean = sum(rewards) / 3
        assert len(set(rewards)) == 3 and advantages.tolist() == pytest.approx([r - mean for r in rewards], abs=1e-6)


def test_dr_grpo_is_not_divided_whoever_asks_for_its_advantages():
    """A12: not only train.py's loop, and with normalize left as it is."""
    groups = [[Episode(0, 0, [1], [True], [0.0], reward=r) for r in (0.25, 0.0, 0.0, 0.75)]]
    dr, normal = (grpo.advantages_of(groups, settings.Config(loss=loss)) for loss in ("dr_grpo", "grpo"))
    assert dr.tolist() == [[0.0, -0.25, -0.25, 0.5]] and normal[0, 3].item() == pytest.approx(0.5 / 0.09375**0.5, rel=1e-4)


def test_the_weights_of_dr_grpo_add_up_to_at_most_1_in_a_conversation_too(load, monkeypatch):
    turn = ([7] * 2 + [8] * 4, [False] * 2 + [True] * 4)  # two tokens given, four of the policy's: as long as a reply may be
    episodes = [Episode(0, 0, turn[0] * 3, turn[1] * 3, [0.0] * 18, turns=3, reward=float(i)) for i in range(2)]
    collate, total = grpo.collate, []

    def weigh(some, advantages, weights, *rest):
        total.append(sum(w * e.reply_tokens for w, e in zip(weights.tolist(), some)))
        return collate(some, advantages, weights, *rest)

    monkeypatch.setattr(grpo, "collate", weigh)
    policy = load("qwen3", 4)
    train_on(policy, torch.optim.SGD(policy.trainable().values(), lr=0.0), [episodes], loss="dr_grpo", max_tokens=4)
    assert sum(total) == pytest.approx(1.0)  # every reply is as long as it may be


@pytest.mark.parametrize(
    "flags", [{"loss": loss} for loss in grpo.CLIP] + [{"baseline": "batch"}, {"baseline": "none"}, {"kl": 0.5}], ids=str
)
def test_a_loss_near_0_is_called_healthy_where_it_is(load, naive_logprobs, flags):
    """F8: two tasks, six on-policy episodes of different lengths; the baseline leaves a mean advantage of 0."""
    policy = load("qwen3", 4, awake=True)
    groups = []
    for g, rewards in enumerate(([1.0, 0.0, 0.0], [0.5, 1.0, 0.0])):
        group = []
        for i, reward in enumerate(rewards):
            ids, n = [5 + g, *range(20, 23 + 4 * i + g)], 2 + 4 * i + g
            with torch.no_grad():
                logprobs = [0.0, 0.0, *naive_logprobs(policy, ids)[1:].tolist()]
            group.append(Episode(g, g, ids, [False] * 2 + [True] * n, logprobs, turns=1, reward=reward))
        groups.append(group)
    reference = {name: p.detach() * 0.5 for name, p in policy.trainable().items()}
    stats = train_on(policy, torch.optim.SGD(policy.trainable().values(), lr=0.0), groups, reference, **flags)
    said = settings.healthy_loss(settings.Config(**flags))
    assert stats["ratio"] == pytest.approx(1, abs=1e-4) and "ratio of 1.000" in said and "watch the reward" in said
    assert (abs(stats["loss"]) < 1e-4) == ("loss near 0" in said), stats["loss"]
