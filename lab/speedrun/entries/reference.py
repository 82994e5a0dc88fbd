"""The reference: train.py's own algorithm and settings, until nearly all samples are right."""

from fast.sampler import TorchSampler
from grpo import advantages_of, update
from policy import adam, set_learning_rate
from rollout import play
from settings import learning_rate

ENOUGH = 0.9  # of a batch's 64 samples


def train(policy, game):
    cfg = game.config()
    sampler, optimizer = TorchSampler(policy), adam(policy, cfg.lr)
    for step in range(cfg.updates):
        sampler.sync(step)
        tasks = game.tasks(cfg.num_tasks)
        groups = play(policy, sampler, game.env, tasks, cfg.k, cfg.max_tokens, cfg.temperature, game.seed)
        right = sum(e.reward for g in groups for e in g) / (cfg.num_tasks * cfg.k)
        if right >= ENOUGH:
            return
        set_learning_rate(optimizer, learning_rate(cfg, step))
        with policy.learning():
            update(policy, optimizer, groups, advantages_of(groups, cfg), cfg)
