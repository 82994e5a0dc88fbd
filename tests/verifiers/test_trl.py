"""Protects bridges/trl.py: the real GRPOTrainer, as two processes of `accelerate launch`, trains on our episodes. Tokens, mask and reward
of what it is about to train on are those of our own loop, given the same replies.
"""

import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed here; `make test-verifiers` installs it into a venv of its own")

import grpo
import settings
from bridges import trl as bridge
from policy import PICO, PICO_SWARM, Sample, load_policy
from rollout import play

ROOT = Path(__file__).resolve().parents[2]
# Its flag for several processes on one machine; ACCELERATE_USE_CPU makes them processes of a CPU. (--cpu starts one alone, without mpirun.)
ACCELERATE = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
SIZES = {
    "letters": (3, 4, 320),
    "alphabet": (3, 4, 200),
    "swarm": (1, 2, 60),
}  # tasks, k, longest reply: three groups cannot be halved without a cut


class Said:
    """A sampler that says again what was said: the same replies, in our own loop."""

    version = 0

    def __init__(self, stop_ids, replies):
        self.stop_ids, self.replies = stop_ids, list(replies)

    def sample(self, prompts, k, max_tokens, temperature, seeds, caches=None, keep=False):
        ids = self.replies.pop(0)
        return [[Sample(ids, [0.0] * len(ids), ids[-1] in self.stop_ids)]]


def runs_of(tokens: list[int], mask: list[bool], stop_ids) -> list[list[int]]:
    """The replies in a conversation: stretches that were sampled, each up to its end-of-turn token."""
    replies, new = [], True
    for token, chosen in zip(tokens, mask):
        if chosen:
            if new:
                replies.append([])
            replies[-1].append(token)
        new = not chosen or token in stop_ids
    return replies


@pytest.fixture(scope="module", params=["letters", "alphabet", "swarm"])
def run(request, tmp_path_factory):
    """(environment, what each of the two processes saw)."""
    env, out = request.param, tmp_path_factory.mktemp("trl") / "out"
    num_tasks, k, longest = SIZES[env]
    words = f"--env {env} --updates 1 --num-tasks {num_tasks} --k {k} --max-tokens {longest} --device cpu --runs {out.parent}"
    words += " --reward partial" if env == "letters" else ""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *ACCELERATE.split(),
        str(Path(__file__).with_name("trl_two.py")),
        str(out),
        *words.split(),
    ]
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, "--", "--save_strategy", "no", "--warmup_steps", "0"], cwd=ROOT, env=quiet, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return env, [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_train_on_our_episodes(run):
    env, ranks = run
    episodes = [e for rank in ranks for e in rank["episodes"]]
    assert [rank["processes"] for rank in ranks] == [2, 2]
    cfg = settings.Config(env=env, reward="partial" if env == "letters" else "binary")
    settings.check(cfg)
    settings.fill(cfg, settings.by_size(1e6, env))
    policy = load_policy(str(PICO_SWARM if env == "swarm" else PICO), 0, 64, "cpu")
    turns = []
    for told in episodes:
        replies = runs_of(told["rest"], told["mask"], policy.stop_ids)
        (ours,) = play(
            policy, Said(policy.stop_ids, replies), partial(settings.make_env, cfg, cfg.difficulty), [told["seed"]], 1, 999, 1.0, 0
        )[0]
        assert ours.token_ids == told["given"] + told["rest"]
        assert ours.sampled == [False] * len(told["given"]) + told["mask"]
        assert ours.reward == told["reward"]
        turns.append(ours.turns)
    assert max(turns) == {"letters": 1, "alphabet": 3, "swarm": 25}[env]
    assert len({e["reward"] for e in episodes}) > 1  # not all nothing
    assert {tuple(e["mask"]) for e in episodes if 0 in e["mask"]} or env == "letters"  # something between replies is not trained


def test_groups_go_across_the_processes_and_advantages_are_those_of_the_group(run):
    env, ranks = run
    num_tasks, k, _ = SIZES[env]
    cfg = settings.Config(num_tasks=num_tasks)
    batch = [e for rank in ranks for e in rank["episodes"]]
    assert {e["seed"] for e in ranks[0]["episodes"]} & {e["seed"] for e in ranks[1]["episodes"]}
    for seed in settings.task_seeds(cfg, 0):
        group = [e for e in batch if e["seed"] == seed]
        rewards = [e["reward"] for e in group]
        mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
        assert len(group) == k and len(batch) == num_tasks * k
        assert [e["advantage"] for e in group] == pytest.approx([(r - mean) / (deviation + 1e-4) for r in rewards], abs=2e-3)


def test_both_processes_end_with_the_same_weights_and_they_have_moved(run):
    _, (one, other) = run
    assert one["weights"] == other["weights"] and one["moved"] > 0
    told = next(line["reward"] for line in one["log"] if "reward" in line)
    assert told == pytest.approx(statistics.mean(e["reward"] for rank in (one, other) for e in rank["episodes"]), abs=1e-3)  # four digits


@pytest.mark.parametrize("flags, told", [
    (["--loss", "reinforce"], "--loss reinforce: TRL has grpo, dr_grpo, dapo, gspo, cispo"),
    (["--baseline", "batch"], "--baseline, --epochs: TRL's are set behind"),
    (["--epochs", "2"], "--baseline, --epochs: TRL's are set behind"),
    (["--importance", "token"], "--importance: TRL's is vllm_importance_sampling_mode"),
    (["--env", "letters", "--difficulty", "11"], "--difficulty 11"),
])  # fmt: skip
def test_what_trl_has_not_is_refused_in_one_sentence(flags, told):
    with pytest.raises(SystemExit, match="^" + told):
        bridge.main(["--device", "cpu", *flags])


def test_a_batch_that_cannot_be_shared_is_refused():
    cfg = settings.Config(num_tasks=1, k=3)
    with pytest.raises(ValueError, match="--num-tasks 1: 3 episodes .* cannot be shared by 2 processes"):
        bridge.arguments(cfg, 2)


def test_our_settings_become_trls():
    trainer = bridge.make_trainer(
        "--env letters --k 4 --num-tasks 2 --loss gspo --lr 1e-4 --lora-rank 8 --lora-alpha 16 --device cpu".split(), ["--beta", "0.1"]
    )
    args, lora = trainer.args, trainer.model.peft_config["default"]
    assert (args.num_generations, args.generation_batch_size, args.learning_rate, args.max_steps) == (4, 8, 1e-4, 150)
    assert (args.loss_type, args.importance_sampling_level, args.beta) == ("grpo", "sequence", 0.1)  # what stands behind `--` wins
    assert args.max_grad_norm == grpo.MAX_GRAD_NORM and (args.top_k, args.top_p, args.temperature) == (0, 1.0, 1.0)
    assert (lora.r, lora.lora_alpha) == (8, 16)
    assert trainer.train_dataset["prompt"][:3] == ["0", "1", "2"]
    assert bridge.size_of(str(PICO)) == load_policy(str(PICO), 0, 64, "cpu").n_parameters
