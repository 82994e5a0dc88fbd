"""The whole of RL for a chat model, by the chapters alone: what a forker starts from.

    python -m learn.loop MODEL UPDATES      (MODEL: a folder or a hub id)

train.py is this loop with speed (fast/) and records (bookkeeping/) plugged in. Copied beside the
chapters, swarm/ and models/pico_base, it runs in any folder: `python loop.py`.
"""

import sys
from functools import partial

from env_letters import Letters
from grpo import compute_advantages, update
from policy import PICO, PlainSampler, adam, load_policy, set_learning_rate
from rollout import play
from settings import Config, learning_rate, task_seeds

# What you might change first: the task, the number of answers to it, the loss.
new_env = partial(Letters, difficulty=2, reward_kind="binary", think=True, style="states")
cfg = Config(num_tasks=4, k=8, loss="grpo", lr=3e-4, max_tokens=64, micro_tokens=4096)
cfg.importance = "clip"


def main(model: str = str(PICO), updates: str = "20") -> None:
    cfg.updates = int(updates)
    policy = load_policy(model, cfg.lora_rank, cfg.lora_alpha)
    sampler, optimizer = PlainSampler(policy), adam(policy, cfg.lr)
    for number in range(cfg.updates):
        # 1 sample: k episodes of each task
        seeds = task_seeds(cfg, number)
        limits = (cfg.max_tokens, cfg.temperature)
        groups = play(policy, sampler, new_env, seeds, cfg.k, *limits, sample_seed=number)
        episodes = [e for group in groups for e in group]
        # 2 compare each with its group
        compute_advantages(groups, cfg)
        # 3 learn
        set_learning_rate(optimizer, learning_rate(cfg, number))
        with policy.learning():
            result = update(policy, optimizer, episodes, cfg)
        # 4 look
        reward = sum(e.reward for e in episodes) / len(episodes)
        print(f"update {number + 1}  reward {reward:.2f}  grad_norm {result.grad_norm:.2f}")
        failed = [e.error for e in episodes if e.stop_reason == "error"]
        if failed:  # an environment raised ValueError or EnvironmentFailed
            print(f"  {len(failed)} episodes failed: {failed[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
