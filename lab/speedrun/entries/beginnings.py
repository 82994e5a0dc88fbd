"""Learn only how replies begin: the first eight tokens of each, at seven times the reference's rate, which falls as more is right.

Whether a reply spells the string out is decided in its first few tokens, and who spells it out is nearly always right. So the reward is credited to those tokens.
The rest of a reply (130 tokens and more) is played, because it earns the reward, and then dropped: less to run forward and backward, and less noise in the gradient.
"""

from dataclasses import replace

from fast.sampler import TorchSampler
from grpo import advantages_of, update
from policy import adam, set_learning_rate
from rollout import Episode, play

LR, FIRST, ENOUGH = 2e-3, 8, 0.92


def beginning(e: Episode) -> Episode:
    """An episode without what comes after its first tokens."""
    end = e.sampled.index(True) + FIRST
    return replace(e, token_ids=e.token_ids[:end], sampled=e.sampled[:end], logprobs=e.logprobs[:end])


def train(policy, game):
    cfg = game.config()
    sampler, optimizer = TorchSampler(policy), adam(policy, LR)
    for step in range(cfg.updates):
        sampler.sync(step)
        groups = play(policy, sampler, game.env, game.tasks(cfg.num_tasks), cfg.k, cfg.max_tokens, cfg.temperature, game.seed)
        right = sum(e.reward for g in groups for e in g) / (cfg.num_tasks * cfg.k)
        if right >= ENOUGH:
            return
        set_learning_rate(optimizer, LR * (1 - right))
        advantages = advantages_of(groups, cfg)
        with policy.learning():
            update(policy, optimizer, [[beginning(e) for e in g] for g in groups], advantages, cfg)
