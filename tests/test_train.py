"""The whole recipe on pico_base: a tiny run leaves what it promises, survives a kill to the last
bit, goes on with --resume, and refuses bad input in one sentence. Most runs here are processes of
their own, as a user would start them.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import grpo
import metrics
import settings
import train
import warm
from bookkeeping import again, refusals
from bookkeeping.records import lines
from bookkeeping.run import SECONDS
from helpers import put, refusal
from settings import DEV_SEEDS

LOGS = ("metrics.jsonl", "evals.jsonl", "episodes.jsonl")
WEIGHTS = "checkpoint/adapter_model.safetensors"
TINY = (
    "--updates 3 --sft-steps 4 --sft-examples 6 --sft-batch 2 --num-tasks 2 --k 3 --eval-n 4 "
    "--eval-every 2 --save-every 1 --max-tokens 24 --difficulty 2 --reward partial --no-wandb"
).split()
ONE_TIER = [*TINY, "--no-eval-other-tiers"]


def run(*flags, code: str = "", pictures: bool = False) -> subprocess.CompletedProcess:
    """train.py with these flags, after this code has run in its process."""
    words = ["train.py", *map(str, flags)]
    text = f"import os, signal, sys, train\nsys.argv = {words!r}\n{code}\ntrain.main()"
    return warm.run(["-c", text], pictures=pictures)


def whole_run(runs: Path, name: str, *flags, **how) -> Path:
    """The folder of a run that ended well."""
    done = run(*flags, "--runs", runs, "--name", name, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return runs / name


def read(file: Path) -> dict:
    return json.loads(file.read_text())


def timeless(path: Path) -> list[dict]:
    """A log without what a clock says."""
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines(path)]


def assert_no_task_comes_twice(folder: Path) -> None:
    """Each update's saved episodes are of tasks that no other update played."""
    kept = {(e["update"], e["seed"]) for e in lines(folder / "episodes.jsonl") if not e["stage"]}
    assert len({seed for _, seed in kept}) == len(kept)
    assert {update for update, _ in kept} == {e["update"] for e in lines(folder / LOGS[0])}


def check_equal(one: Path, other: Path) -> None:
    for name in LOGS:
        assert timeless(one / name) == timeless(other / name), name
    assert (one / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return whole_run(tmp_path_factory.mktemp("runs"), "whole", *ONE_TIER, pictures=True)


# ------------------------------------------------------------------------------ what a run leaves


def test_a_budget_of_sampled_tokens_ends_a_run(whole, tmp_path):
    """After the update that reaches it; the updates before are those of a run without it."""
    tokens = [line["reply_tokens"] * 6 for line in lines(whole / "metrics.jsonl")]
    budget = round(tokens[0]) + 1  # more than the first update's
    ended = whole_run(tmp_path, "budget", *ONE_TIER, "--sampled-tokens", budget)
    assert timeless(ended / "metrics.jsonl") == timeless(whole / "metrics.jsonl")[:2]
    assert read(ended / "summary.json")["updates"] == 2


def test_a_teacher_like_the_policy_teaches_nothing_and_another_tokenizer_is_refused(tmp_path):
    same = ["--teacher", "pico_base", "--sft-steps", 0, "--updates", 1]
    folder = whole_run(tmp_path, "same", *ONE_TIER, *same)
    assert abs(read(folder / "metrics.jsonl")["loss"]) < 1e-5  # minus the mean of log p / p
    told = run(*ONE_TIER, "--teacher", "pico_swarm", "--runs", tmp_path)
    assert told.returncode == 1 and "--teacher pico_swarm: it has another tokeni" in told.stderr


def test_other_tiers_are_evaluated_too(tmp_path):
    folder = whole_run(tmp_path, "tiers", *TINY, "--updates", 1, "--eval-n", 2)
    assert set(read(folder / "summary.json")["eval"]) == {f"tier {t}" for t in (2, 3, 5, 6)}


def test_a_run_leaves_the_folder_that_the_docs_promise(whole):
    pages = ("summary.json", "config.json", "report.md", "curves.png", "report.html")
    for name in (*LOGS, *pages):
        assert (whole / name).stat().st_size > 0, name
    summary = read(whole / "summary.json")
    for stage in ("before", "after_sft", "final"):
        mean = summary["eval"]["tier 2"][stage]["exact"]
        assert mean["n"] == 4 and 0 <= mean["low"] <= mean["mean"] <= mean["high"] <= 1
    assert {"commit", "environment_code", "peak_rss_gb"} <= summary["machine"].keys()
    trained = lines(whole / "metrics.jsonl")
    assert [line["update"] for line in trained] == [1, 2, 3]
    for part in SECONDS:  # the summary adds the updates up
        total = sum(line[f"seconds_{part}"] for line in trained)
        assert summary["seconds"][part] == pytest.approx(total, abs=0.011)
    # What is trained is what was sampled, by the same policy.
    assert all(line.get("mismatch", 0.0) < 1e-4 for line in trained)
    assert not any(line["seconds_wait"] or line["off_policy_steps"] for line in trained)
    first, *_, last = lines(whole / "sft.jsonl")
    assert summary["sft"] == {"loss_first": first["loss"], "loss_last": last["loss"]}
    said = (whole / "train.log").read_text()
    for part in ("here: ", f"\ntorch {torch.__version__}\n", "eval before", "update    3  reward"):
        assert part in said
    evals = [(line["update"], line["stage"]) for line in lines(whole / "evals.jsonl")]
    assert evals == [(0, "before"), (0, "after_sft"), (2, "train"), (3, "final")]


def test_saved_episodes_are_whole_groups_with_a_number_for_every_sampled_token(whole):
    episodes, moved = lines(whole / "episodes.jsonl"), []
    assert {e["stage"] for e in episodes} >= {"", "before", "after_sft", "final"}
    for e in episodes:
        (mine,) = [part for part in e["segments"] if part["role"] == "policy"]
        assert len(mine["tokens"]) == len(mine["logprobs"]) == e["reply_tokens"]
        assert sum(mine["logprobs"]) == pytest.approx(e["logprob"], abs=0.01)
        assert "".join(mine["tokens"]).startswith(e["messages"][-1]["content"])
        assert (e["advantage"] is None) == (mine["ratios"] is None) == (e["source"] == "eval")
        moved += [abs(ratio - 1) for ratio in mine["ratios"] or ()]
    trained = [e for e in episodes if e["source"] == "rollout"]
    for group in (trained[i : i + 3] for i in range(0, len(trained), 3)):
        assert [e["member"] for e in group] == [0, 1, 2] and len({e["seed"] for e in group}) == 1
        assert sum(e["advantage"] for e in group) == pytest.approx(0, abs=1e-3)
    assert len(moved) == sum(e["reply_tokens"] for e in trained)
    assert 0 < max(moved) < 1  # the update that followed has moved the policy, a little


def test_the_seed_matters(whole, tmp_path):
    other = whole_run(tmp_path, "other", *ONE_TIER, "--seed", 1)
    assert timeless(other / "metrics.jsonl") != timeless(whole / "metrics.jsonl")
    # The development tasks stay the same: the base is evaluated on them before anything is learned.
    assert lines(other / "evals.jsonl")[0] == lines(whole / "evals.jsonl")[0]


# -------------------------------------------------------------------------------- kills and resume


@pytest.mark.parametrize("kill", [
    "import sft; sft.sft_step = bomb(sft.sft_step, 3)",
    "train.evaluate_stage = bomb(train.evaluate_stage, 2)",  # SFT is done, and not evaluated
    "train.update = bomb(train.update, 3)",
    # the new checkpoint is written and not yet in its place
    "from bookkeeping import folder; folder.checksum = bomb(folder.checksum, 2)",
])  # fmt: skip
def test_resume_after_a_kill_equals_the_undisturbed_run(whole, tmp_path, kill):
    """os._exit in the middle of things: no cleanup code runs, as with SIGKILL."""
    code = f"""
calls = []
def bomb(real, at):
    def inner(*given, **named):
        calls.append(1)
        return real(*given, **named) if len(calls) < at else os._exit(9)
    return inner
{kill}
"""
    killed = run(*ONE_TIER, "--runs", tmp_path, "--name", "cut", code=code)
    assert killed.returncode == 9, killed.stderr[-3000:]
    cut = tmp_path / "cut"
    resumed = run("--resume", cut, "--no-wandb")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert ("SFT" in resumed.stderr) == ("sft_step" in kill)  # its bar: what is saved is not redone
    check_equal(cut, whole)
    a, b = read(cut / "summary.json"), read(whole / "summary.json")
    assert all(a[name] == b[name] for name in ("eval", "gain", "tokens"))


@pytest.mark.parametrize(
    "name, flags, saved",
    [
        ("SIGINT", [], 1),
        ("SIGTERM", [], 1),
        ("SIGINT", ["--sync-every", 2], 0),  # the sampler's weights of update 0 are gone after 1
    ],
)
def test_asked_to_stop_a_run_saves_says_how_to_go_on_and_ends_equal(
    whole, tmp_path, name, flags, saved
):
    code = f"""
real = train.update
def update(*given, **more):
    os.kill(os.getpid(), signal.{name})  # in the middle of the first update
    return real(*given, **more)
train.update = update
"""
    done = run(*ONE_TIER, "--runs", tmp_path, "--name", "cut", *flags, code=code)
    cut = tmp_path / "cut"
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"stopped; go on with: python train.py --resume {cut}" in done.stderr
    assert read(cut / "checkpoint" / "state.json")["updates"] == saved
    assert len(lines(cut / "metrics.jsonl")) == 1
    assert run("--resume", cut).returncode == 0
    assert len(lines(cut / "metrics.jsonl")) == 3
    if not flags:
        check_equal(cut, whole)


def test_a_run_killed_after_its_last_update_ends_between_two_syncs_and_goes_no_further(tmp_path):
    """With --sync-every 2 the third update's weights are saved, although they sampled nothing."""
    code = """
real = train.evaluate_stage
def evaluate(*given):
    return sys.exit(9) if given[-1] == "final" else real(*given)
train.evaluate_stage = evaluate
"""
    flags = (*ONE_TIER, "--sync-every", 2, "--runs", tmp_path, "--name", "cut")
    assert run(*flags, code=code).returncode == 9
    cut = tmp_path / "cut"
    done = run("--resume", cut, "--updates", 4)
    assert done.returncode == 1 and "that sampled update 3 are not kept" in done.stderr
    assert run("--resume", cut).returncode == 0
    assert [line["update"] for line in lines(cut / "metrics.jsonl")] == [1, 2, 3]
    assert lines(cut / "evals.jsonl")[-1]["stage"] == "final"


def test_from_a_damaged_checkpoint_the_run_goes_back_to_the_one_before(whole, tmp_path):
    hurt = shutil.copytree(whole, tmp_path / "hurt")
    (hurt / WEIGHTS).write_bytes((hurt / WEIGHTS).read_bytes()[:-1] + b"?")
    done = run("--resume", hurt)
    assert "damaged" in done.stdout and "after update 2" in done.stdout, done.stderr[-2000:]
    check_equal(hurt, whole)


def test_what_is_refused_changes_nothing_in_the_folder(whole):
    kept = [(whole / name).read_text() for name in ("config.json", "summary.json")]
    for flags, why in (
        (["--resume", whole, "--lr", 0.1], "--lr cannot change on --resume"),
        (["--resume", whole, "--updates", 2], "it has done 3 updates, more than the 2 that are"),
        ([*ONE_TIER, "--runs", whole.parent, "--name", "whole"], "exists; choose another --name"),
    ):
        done = run(*flags)
        assert done.returncode == 1 and why in done.stderr and "Traceback" not in done.stderr
    assert [(whole / name).read_text() for name in ("config.json", "summary.json")] == kept


def test_out_of_memory_is_one_sentence_and_the_run_goes_on_in_smaller_pieces(tmp_path):
    code = """
import torch
real, updates = train.update, []
def update(*given, **more):
    updates.append(1)
    if len(updates) == 2:
        raise torch.OutOfMemoryError("CUDA out of memory.\\nSee the documentation")
    return real(*given, **more)
train.update = update
"""
    done = run(*ONE_TIER, "--kl", 0.1, "--runs", tmp_path, "--name", "full", code=code)
    folder, (*_, said) = tmp_path / "full", done.stderr.strip().splitlines()
    assert "out of GPU memory (CUDA out of memory.)" in said
    assert "--micro-tokens" in said and "--resume" in said and "Traceback" not in done.stderr
    assert run("--resume", folder, "--micro-tokens", 64).returncode == 0
    first, *rest = lines(folder / "metrics.jsonl")
    assert [line["update"] for line in rest] == [2, 3]
    assert read(folder / "config.json")["micro_tokens"] == 64
    # The reference is still the policy after SFT: its distance is measured, and grows from 0.
    assert first["kl_ref"] == pytest.approx(0, abs=1e-6) and rest[0]["kl_ref"] > 1e-6


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("flags, names", [
    ("--env chess", "--env chess"),
    ("--difficulty 0", "--difficulty 0"),
    ("--k 1", "--k 1"),
    ("--loss ppo", "--loss ppo"),
    ("--temperature 0", "--temperature"),
    ("--model no_such_model", "--model no_such_model"),
    ("--model /no/such/folder", "--model /no/such/folder"),
    ("--model nobody/nothing-here", "--model nobody/nothing-here"),
    ("--resume runs/never-was", "/runs/never-was"),  # as a whole path
    ("--eval-only runs/never-was", "/runs/never-was"),
    ("--held-out", "--eval-only"),
    ("--until-converged --updates 9 --max-updates 8", "--max-updates 8"),
    ("--seed 1250", "0 to 1249"),
    ("--importance magic", "--importance magic"),
    ("--preset nothing", "--preset nothing"),
])  # fmt: skip
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(monkeypatch, tmp_path, flags, names):
    words = ["train.py", *flags.split(), "--runs", str(tmp_path), "--no-wandb"]
    monkeypatch.setattr(sys, "argv", words)
    assert names in refusal(SystemExit, train.main)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_tasks", [1, 7, 8, 1000])
def test_training_never_meets_the_tasks_of_sft_of_evaluation_or_of_another_seed(num_tasks):
    most = settings.MOST_UPDATES
    seed = settings.SFT_SEEDS // (most * num_tasks) - 1
    last = settings.Config(num_tasks=num_tasks, updates=most, seed=seed)
    refusals.check(last)
    end, shown = settings.task_seeds(last, most - 1)[-1], settings.sft_seeds(last)
    assert end < settings.SFT_SEEDS == shown[0] and shown[-1] < DEV_SEEDS
    # A sampler that runs free may play more batches than there are updates.
    assert settings.task_seeds(last, most) == settings.task_seeds(last, 0)
    last.seed += 1
    assert settings.task_seeds(last, 0)[0] == end + 1


def test_the_learning_rate_rises_over_the_warm_up_and_falls_linearly_to_its_end():
    cfg = settings.Config(updates=8, warmup=4, lr=1e-3, lr_end=0.1)
    by_hand = [min((u + 1) / 4, 1 - 0.9 * u / 8) * 1e-3 for u in range(8)]
    assert [settings.learning_rate(cfg, u) for u in range(8)] == pytest.approx(by_hand)


# ------------------------------------------------------------------------------ every kind of run


def test_full_fine_tuning_curriculum_kl_and_every_loss_run(tmp_path):
    short = [*ONE_TIER, *"--updates 2 --eval-n 2 --sft-steps 2 --eval-every 9".split()]
    extra = {"grpo": "--lora-rank 0 --curriculum", "dr_grpo": "--kl 0.1 --epochs 2"}
    assert extra.keys() <= grpo.LOSSES.keys()
    for loss in grpo.LOSSES:
        flags = [*short, "--loss", loss, *extra.get(loss, "").split()]
        assert len(lines(whole_run(tmp_path, loss, *flags) / "metrics.jsonl")) == 2


def test_a_whole_plain_run_is_the_run_of_the_fast_way(whole, tmp_path):
    plain = whole_run(tmp_path, "plain", *ONE_TIER, "--plain")
    for fast, slow in zip(lines(whole / LOGS[0]), lines(plain / LOGS[0]), strict=True):
        # The same tokens.
        assert fast["reward"] == slow["reward"] and fast["reply_tokens"] == slow["reply_tokens"]
        for column in ("grad_norm", "entropy", "loss", "mismatch"):
            assert fast.get(column, 0) == pytest.approx(slow.get(column, 0), abs=1e-3)


def test_alphabet_plays_several_turns_through_the_whole_recipe(tmp_path):
    folder = whole_run(tmp_path, "a", "--env", "alphabet", *TINY, "--max-tokens", "60")
    line = lines(folder / "metrics.jsonl")[0]
    assert {"similarity", "turn_1", "turn_3", "habit_keys"} <= line.keys()
    assert 0 <= line["reward"] <= line["similarity"] <= 1
    parts = [[part["role"] for part in e["segments"]] for e in lines(folder / "episodes.jsonl")]
    assert max(roles.count("policy") for roles in parts) > 1, "nobody reached the second turn"


@pytest.fixture(scope="module")
def economy(tmp_path_factory) -> Path:
    flags = (
        "--env swarm --updates 2 --sft-steps 1 --sft-examples 2 --num-tasks 1 --k 2 --eval-n 2 "
        "--eval-every 2 --save-every 1 --max-tokens 12 --no-wandb"
    )
    return whole_run(tmp_path_factory.mktemp("runs"), "s", *flags.split(), pictures=True)


def test_swarm_plays_twenty_five_turns_through_the_whole_recipe(economy):
    for record in lines(economy / "evals.jsonl"):
        assert len(record["reward"]) == len(record["used_claim_task"]) == 2
        assert "exact" not in record and record["tasks"] == "medium v0.2"
    wanted = {"payoff", "diversity", "turns_used", "error_rate", "used_pass_turn", "welfare_5"}
    assert wanted <= lines(economy / "metrics.jsonl")[0].keys()
    assert "| welfare, soft: 95% quantile |" in (economy / "report.md").read_text()


LEVELLED = """
class Echo:
    think, tools, max_turns, levels = False, None, 1, ["short", "long"]
    promote = ("format", 0.0)

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
    flags = (
        f"--env {file}:Echo --curriculum --updates 6 --num-tasks 2 --k 2 --eval-n 2 "
        "--max-tokens 8 --sft-steps 0 --eval-every 9 --no-wandb"
    )
    folder = whole_run(tmp_path, "c", *flags.split())
    assert [line["level"] for line in lines(folder / "metrics.jsonl")] == ["short"] * 5 + ["long"]
    found = {e["tasks"]: e["trained"] for e in lines(folder / "evals.jsonl")}
    assert found == {"Echo, level short": False, "Echo, level long": True}


@pytest.mark.parametrize(
    "flags, updates",
    [
        (("--until-converged", "--max-updates", 400), 6),
        (("--until-converged", "--max-updates", 5), 5),
        (("--stop-when-settled", "--updates", 9), 6),
    ],
)
def test_a_run_goes_on_until_the_reward_has_settled_or_stops_then(tmp_path, flags, updates):
    code = """
import dataclasses
from bookkeeping import settled
real = settled.trend
def trend(values):  # settles after the sixth update
    return dataclasses.replace(real(values), settled=len(values) >= 6)
settled.trend = trend
"""
    flags = [*flags, "--eval-n", 2, "--sft-steps", 0]
    folder = whole_run(tmp_path, "c", *ONE_TIER, *flags, code=code)
    assert lines(folder / "evals.jsonl")[-1]["update"] == updates


# ------------------------------------------------------------------------------------ --eval-only


def evaluated(folder: Path, *flags) -> tuple[dict, str]:
    """(the line of the trained policy, greedy, that --eval-only adds to evals.jsonl, what it
    prints)."""
    before = len(lines(folder / "evals.jsonl"))
    done = run("--eval-only", folder, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    *base, line, sampled = lines(folder / "evals.jsonl")[before:]
    names = [line["tasks"] + way for way in (", base", ", sampled, base", ", sampled")]
    assert [e["tasks"] for e in (*base, sampled)] == names
    assert not any(e["trained"] for e in (*base, sampled))
    gain = metrics.gain(base[0]["reward"], line["reward"])
    assert f"| {gain.signed()} | {gain.n} |" in done.stdout
    return line, done.stdout


def test_eval_only_sweeps_the_levels(economy):
    before = len(lines(economy / "evals.jsonl"))
    done = run("--eval-only", economy, "--env", "swarm", "--eval-n", 2)
    assert done.returncode == 0, done.stderr[-3000:]
    added = lines(economy / "evals.jsonl")[before:]
    levels = [f"{level} v0.2" for level in ("easy", "medium", "hard")]
    assert [e["tasks"] for e in added[6:9]] == levels and len(added) == 12
    assert [e["tasks"] for e in added if e["trained"]] == ["medium v0.2"]
    assert "n=2" in done.stdout and "payoff" in done.stdout


def test_eval_only_gives_the_final_evaluation_again_and_tells_other_rules_apart(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    final = lines(folder / "evals.jsonl")[-1]
    again, _ = evaluated(folder)
    assert again == final | {"stage": "eval_only"}
    assert "## Evaluated later" in (folder / "report.md").read_text()
    for flags, tasks in (["--reward", "binary"], "reward binary"), (["--held-out"], "held-out"):
        other, said = evaluated(folder, *flags, "--eval-n", 3)
        assert (other["tasks"], other["trained"]) == (f"tier 2, {tasks}", False)
    assert "choose nothing by them" in said and len(other["reward"]) == 3


def test_held_out_tasks_are_no_others_tasks(whole, monkeypatch):
    seen = []
    take = lambda cfg, policy, collector, sets, seeds, *rest: seen.append(seeds)
    put(monkeypatch, again, play_ways=take, print_results=lambda lines: None)
    given = settings.Config(eval_only=str(whole), held_out=True, eval_n=512)
    again.evaluate_only(given, {"eval_only", "held_out", "eval_n"})
    cfg = settings.Config(**read(whole / "config.json"))
    whose = lambda seeds: {str(settings.make_env(cfg, 6).reset(seed)) for seed in seeds}
    held_out = whose(seen[0])
    assert len(held_out) == 512 and min(seen[0]) > 10**9 + DEV_SEEDS
    first, last = (settings.task_seeds(cfg, update) for update in (0, settings.MOST_UPDATES - 1))
    for others in (first, last, settings.sft_seeds(cfg), range(DEV_SEEDS, DEV_SEEDS + 512)):
        assert not held_out & whose(others)


# ------------------------------------------------------------------------------ sampling ahead

AHEAD = (
    "--env alphabet --updates 3 --sft-steps 0 --num-tasks 3 --k 4 --eval-n 1 --eval-every 9 "
    "--save-every 1 --max-tokens 40 --lr 0.01 --warmup 1 --no-think --temperature 1.5 --no-wandb"
).split()


@pytest.fixture(scope="module")
def ahead(tmp_path_factory) -> Path:
    """Runs with one and with two batches ahead; the first is copied and goes on."""
    runs = tmp_path_factory.mktemp("runs")
    whole_run(runs, "one", *AHEAD, "--async-rollouts", 1)
    whole_run(runs, "two", *AHEAD, "--async-rollouts", 2, "--importance", "token")
    longer = shutil.copytree(runs / "one", runs / "longer")
    assert run("--resume", longer, "--updates", 5).returncode == 0
    return runs


@pytest.mark.parametrize("name, ages, importance", [
    ("one", [0, 1, 1], "sequence"), ("two", [0, 1, 2], "token"),
])  # fmt: skip
def test_a_batch_is_as_old_as_it_was_asked_ahead(ahead, name, ages, importance):
    metrics = lines(ahead / name / "metrics.jsonl")
    assert [line["off_policy_steps"] for line in metrics] == ages
    assert metrics[0]["mismatch"] < 1e-4 and metrics[1]["mismatch"] > 1e-2  # another policy
    assert 0 < metrics[1]["importance"] <= 2
    assert read(ahead / name / "config.json")["importance"] == importance


def test_resume_goes_on_ahead_with_tasks_that_were_not_seen_before(ahead):
    one, longer = (timeless(ahead / name / "metrics.jsonl") for name in ("one", "longer"))
    assert longer[:3] == one and [line["update"] for line in longer] == [1, 2, 3, 4, 5]
    assert [line["off_policy_steps"] for line in longer] == [0, 1, 1, 0, 1]
    assert_no_task_comes_twice(ahead / "longer")


def test_a_curriculum_ahead_says_the_level_that_was_played_and_climbs_by_that_alone(tmp_path):
    """Two batches are under way when a level is done with: they do not speak for the new one."""
    flags = (
        "--curriculum --difficulty 6 --async-rollouts 2 --updates 15 --sft-steps 0 --num-tasks 1 "
        "--k 2 --eval-n 1 --eval-every 99 --save-every 99 --max-tokens 4 --no-wandb"
    ).split()
    code = "import settings; settings.PROMOTE['letters'] = ('errors', 0)"  # no episode fails
    folder = whole_run(tmp_path, "c", *flags, code=code)
    assert [line["level"] for line in lines(folder / "metrics.jsonl")] == [1] * 7 + [2] * 7 + [3]


FREE = (*AHEAD, "--async-rollouts", 1, "--max-staleness", 2, "--epochs", 2)
SLOW = """
import time
from contextlib import contextmanager
from fast.ahead import FreeCollector
real = FreeCollector.paused
@contextmanager
def paused(self):
    with real(self):
        enough = self.begun + 2
        while self.counts and self.begun < enough:  # not in SFT
            time.sleep(0.01)
        yield
FreeCollector.paused = paused
"""  # the trainer takes as long as two batches


def test_a_run_whose_lag_is_what_speed_makes_it(tmp_path):
    """And it goes on with tasks never seen before, without those that waited."""
    folder = whole_run(tmp_path, "free", *FREE, "--updates", 6, code=SLOW)
    longer = run("--resume", folder, "--updates", 8, code=SLOW)
    assert longer.returncode == 0, longer.stderr[-3000:]
    metrics = lines(folder / "metrics.jsonl")
    waiting = metrics[5]["batches_waiting"]
    assert waiting > 0 and f"{waiting} batches waited to be trained on, and" in longer.stdout
    ages = [line["off_policy_steps"] for line in metrics]
    assert ages[0] == ages[6] == 0 and max(ages) == ages[5] == 2  # it rises to its limit
    dropped = [line["batches_dropped"] for line in metrics]
    assert len(dropped) == 8 and dropped[0] == dropped[6] == 0 < sum(dropped)
    assert metrics[5]["seconds_wait"] > 0
    assert_no_task_comes_twice(folder)


def test_what_nobody_expected_keeps_its_traceback_in_the_log(tmp_path):
    code = "def update(*_, **__):\n    raise KeyError('\\x1b[2Jnobody')\ntrain.update = update"
    done = run(*ONE_TIER, "--sft-steps", 1, "--runs", tmp_path, "--name", "r", code=code)
    assert done.returncode == 1 and "KeyError" in done.stderr
    log = (tmp_path / "r" / "train.log").read_text()
    assert "Traceback (most recent call last):\n" in log and "KeyError: " in log
    assert "train.py" in log and "\x1b" not in log
