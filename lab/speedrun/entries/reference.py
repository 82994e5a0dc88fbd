"""The reference: train.py's own algorithm and settings, until a greedy look says that it is enough."""

from fast.sampler import TorchSampler
from grpo import advantages_of, update
from policy import adam, set_learning_rate
from rollout import play
from settings import learning_rate

LOOK = 0.5  # from this share of right samples on, look greedily: that is how the judge will play
TASKS, ENOUGH = 128, 0.95  # at so many new training tasks; this share of them is the end


def share(groups):
    return sum(e.reward for g in groups for e in g) / sum(map(len, groups))


def train(policy, game):
    cfg = game.config()
    sampler, optimizer = TorchSampler(policy), adam(policy, cfg.lr)

    def playing(n, k, heat):
        tasks = game.tasks(n)
        return play(policy, sampler, game.env, tasks, k, cfg.max_tokens, heat, game.seed)

    for step in range(cfg.updates):
        sampler.sync(step)
        groups = playing(cfg.num_tasks, cfg.k, cfg.temperature)
        if share(groups) >= LOOK and share(playing(TASKS, 1, 0.0)) >= ENOUGH:
            return
        set_learning_rate(optimizer, learning_rate(cfg, step))
        with policy.learning():
            update(policy, optimizer, groups, advantages_of(groups, cfg), cfg)
