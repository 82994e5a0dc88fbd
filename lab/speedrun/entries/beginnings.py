"""rate.py, but only the beginnings of replies are learnt: the first four tokens of each.

Whether a reply spells the string out is decided in its first few tokens, and who spells it out is nearly always right. So the reward is credited to those tokens.
The rest of a reply (130 tokens and more) is played, because it earns the reward, and then dropped: less to run forward and backward, and less noise in the gradient.
"""

from dataclasses import replace

from fast.sampler import TorchSampler
from grpo import advantages_of, update
from policy import adam, set_learning_rate
from rollout import play

LR, FIRST = 2e-3, 4
LOOK, TASKS, ENOUGH = 0.5, 128, 0.95  # as in reference.py


def share(groups):
    return sum(e.reward for g in groups for e in g) / sum(map(len, groups))


def beginning(e):
    """An episode without what comes after its first sampled tokens."""
    end = e.sampled.index(True) + FIRST
    return replace(e, token_ids=e.token_ids[:end], sampled=e.sampled[:end], logprobs=e.logprobs[:end])


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
        advantages = advantages_of(groups, cfg)
        with policy.learning():
            update(policy, optimizer, [[beginning(e) for e in g] for g in groups], advantages, cfg)
