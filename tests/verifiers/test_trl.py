"""Protects bridges/trl.py: the real GRPOTrainer, as two processes of `accelerate launch`, trains on
our episodes. Tokens, mask and reward of what it is about to train on are those of our own loop,
given the same replies; and its losses are clipped where ours are."""

import json
import os
import subprocess
import sys
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest

trl = pytest.importorskip("trl", reason="not installed here; `make test-all` does it")


import grpo
import settings
from batch import BANDS
from bookkeeping import refusals
from bridges import trl as bridge
from helpers import Scripted
from policy import PICO, PICO_SWARM, Sample, load_policy
from rollout import play

ROOT = Path(__file__).resolve().parents[2]
# For several processes on one machine; ACCELERATE_USE_CPU makes them processes of a CPU. (--cpu
# starts one alone, without mpirun.)
ACCELERATE = """--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no
--dynamo_backend no --main_process_port 0"""
CPU = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
# tasks, k, longest reply: three groups cannot be halved without a cut
SIZES = {"letters": (3, 4, 320), "alphabet": (3, 4, 200), "swarm": (1, 2, 60)}


def said_again(told: dict, stop_ids) -> Scripted:
    """A sampler that says what an episode's policy said, reply after reply."""
    spans = groupby(zip(told["rest"], told["mask"]), key=lambda pair: pair[1])
    replies = [[token for token, _ in pairs] for chosen, pairs in spans if chosen]
    return Scripted(*(Sample(ids, [0.0] * len(ids), ids[-1] in stop_ids) for ids in replies))


@pytest.fixture(scope="module", params=SIZES)
def run(request, tmp_path_factory):
    """(environment, what each of the two processes saw)."""
    env, out = request.param, tmp_path_factory.mktemp("trl") / "out"
    num_tasks, k, longest = SIZES[env]
    words = f"--env {env} --updates 1 --num-tasks {num_tasks} --k {k} --max-tokens {longest}"
    words += f" --device cpu --runs {out.parent}" + " --reward partial" * (env == "letters")
    two = Path(__file__).with_name("trl_two.py")
    launch = [sys.executable, "-m", "accelerate.commands.launch", *ACCELERATE.split()]
    command = [*launch, two, out, *words.split(), *"-- --save_strategy no --warmup_steps 0".split()]
    quiet = os.environ | CPU | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return env, [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_train_on_our_episodes(run):
    env, ranks = run
    one, other = ranks
    assert one["processes"] == 2 and one["weights"] == other["weights"] and one["moved"] > 0
    cfg = settings.Config(env=env, reward="partial" if env == "letters" else "binary")
    refusals.check(cfg)
    cfg = settings.complete(cfg, 1e6, "", {})  # in swarm it pays for its errors
    policy = load_policy(str(PICO_SWARM if env == "swarm" else PICO), 0, 64, "cpu")
    make_env, turns, rewards = partial(settings.make_env, cfg, cfg.difficulty), set(), set()
    for told in [e for rank in ranks for e in rank["episodes"]]:
        said = said_again(told, policy.stop_ids)
        ((ours,),) = play(policy, said, make_env, [told["seed"]], 1, 999, 1.0, 0)
        assert ours.token_ids == told["given"] + told["rest"]
        assert ours.sampled == [False] * len(told["given"]) + told["mask"]
        assert ours.reward == told["reward"]
        turns.add(ours.turns)
        rewards.add(ours.reward)
    assert max(turns) == {"letters": 1, "alphabet": 3, "swarm": 25}[env] and len(rewards) > 1


@pytest.mark.parametrize("loss", bridge.LOSSES)
def test_a_loss_is_clipped_where_ours_is(loss):
    args = bridge.arguments(settings.Config(num_tasks=1, k=2, loss=loss, device="cpu"), 1)
    low, high = grpo.LOSSES[loss].clip
    top = args["epsilon_high"] if args["loss_type"] == "cispo" else 1 + args["epsilon_high"]
    assert (1 - args["epsilon"], top) == (1 - low, 1 + high)


def test_our_masks_are_trls_default():
    default = {name: f.default for name, f in trl.GRPOConfig.__dataclass_fields__.items()}
    mode = default["vllm_importance_sampling_mode"]
    low = default["vllm_importance_sampling_clip_min"] or 0.0
    assert BANDS[mode] == (low, default["vllm_importance_sampling_clip_max"])


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--loss", "reinforce"], "--loss reinforce: TRL has grpo, dr_grpo, dapo, gspo, cispo"),
        (["--baseline", "batch"], "--baseline batch: TRL has its own"),
        (["--lr-end", "0.5"], "--lr-end 0.5: TRL has its own, to be set behind `--`, or none"),
        (["--env", "letters", "--difficulty", "11"], "--difficulty 11"),
    ],
)
def test_what_trl_has_not_is_refused_in_one_sentence(flags, told):
    with pytest.raises(SystemExit, match="^" + told):
        bridge.main(["--device", "cpu", *flags])


def test_our_settings_become_trls():
    words = """--env letters --k 4 --num-tasks 2 --loss gspo --lr 1e-4 --device cpu --lora-rank 8
    --lora-alpha 16"""
    trainer = bridge.make_trainer(words.split(), ["--beta", "0.1"])
    args, lora = trainer.args, trainer.model.peft_config["default"]
    assert (args.num_generations, args.generation_batch_size, args.max_steps) == (4, 8, 150)
    assert (args.learning_rate, args.epsilon, args.epsilon_high) == (
        1e-4,
        *grpo.LOSSES["gspo"].clip,
    )
    assert (args.loss_type, args.importance_sampling_level) == ("grpo", "sequence")
    assert args.beta == 0.1 and (lora.r, lora.lora_alpha) == (8, 16)  # what is behind `--` wins
    assert (args.top_k, args.top_p, args.temperature) == (0, 1.0, 1.0)
    assert trainer.train_dataset["prompt"][:3] == ["0", "1", "2"]
    assert bridge.size_of(str(PICO)) == load_policy(str(PICO), 0, 64, "cpu").n_parameters
