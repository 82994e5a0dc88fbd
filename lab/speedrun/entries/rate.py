"""The reference with seven times its learning rate, which falls as more of the samples are right.

While the right habit is rare, its few successes say plainly where to go, and a large step is safe. Once most samples are right, what is left is noise, and Adam
makes large steps of it: at this rate without the fall, accuracy went up and then back to 0.
"""

from fast.sampler import TorchSampler
from grpo import advantages_of, update
from policy import adam, set_learning_rate
from rollout import play

LR = 2e-3
LOOK, TASKS, ENOUGH = 0.5, 128, 0.95  # as in reference.py


def share(groups):
    return sum(e.reward for g in groups for e in g) / sum(map(len, groups))


def train(policy, game):
    cfg = game.config()
    sampler, optimizer = TorchSampler(policy), adam(policy, LR)

    def playing(n, k, heat):
        tasks = game.tasks(n)
        return play(policy, sampler, game.env, tasks, k, cfg.max_tokens, heat, game.seed)

    best = 0.0
    for step in range(cfg.updates):
        sampler.sync(step)
        groups = playing(cfg.num_tasks, cfg.k, cfg.temperature)
        right = share(groups)
        if right >= LOOK and share(playing(TASKS, 1, 0.0)) >= ENOUGH:
            return
        best = max(best, right)  # a bad batch must not raise the rate again
        set_learning_rate(optimizer, LR * (1 - best))
        with policy.learning():
            update(policy, optimizer, groups, advantages_of(groups, cfg), cfg)
