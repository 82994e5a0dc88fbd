"""The reference: train.py's own algorithm and settings, until enough of what it samples is right."""

from collections import deque

from fast.sampler import TorchSampler
from grpo import advantages_of, update
from policy import adam, set_learning_rate
from rollout import play
from settings import learning_rate

ENOUGH, OVER = 0.9, 1  # stop when this share of the samples is right, over so many batches of 64


def train(policy, game):
    cfg = game.config()
    sampler, optimizer = TorchSampler(policy), adam(policy, cfg.lr)
    rewards = deque(maxlen=OVER)
    for step in range(cfg.updates):
        sampler.sync(step)
        tasks = game.tasks(cfg.num_tasks)
        groups = play(policy, sampler, game.env, tasks, cfg.k, cfg.max_tokens, cfg.temperature, game.seed)
        rewards.append(sum(e.reward for g in groups for e in g) / (cfg.num_tasks * cfg.k))
        if len(rewards) == OVER and sum(rewards) / OVER >= ENOUGH:
            return
        set_learning_rate(optimizer, learning_rate(cfg, step))
        with policy.learning():
            update(policy, optimizer, groups, advantages_of(groups, cfg), cfg)
