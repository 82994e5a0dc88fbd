"""RL for a chat model, using only the top-level files: start a fork from this one.

    python -m learn.loop MODEL UPDATES      (MODEL: a folder or a hub id)

To take it with you, copy it to an empty folder, together with batch.py, chat.py,
env_letters.py, grpo.py, policy.py, rollout.py, settings.py and models/pico_base; then
run `python loop.py`. The loss here is the plainest: advantage times log-prob, every
token weighing the same. train.py is this loop with SFT before it, a table of losses
(grpo.LOSSES), speed (fast/) and records (bookkeeping/).
"""

import sys
from functools import partial

import torch

from batch import collate, split_by_tokens
from env_letters import Letters
from grpo import compute_advantages
from policy import (
    PICO,
    PlainSampler,
    adam,
    load_policy,
    plain_forward,
    set_learning_rate,
    take_step,
)
from rollout import play
from settings import Config, learning_rate, task_seeds

# What you might change first: the task, the number of answers to it, the rate.
new_env = partial(
    Letters,
    difficulty=2,
    reward_kind="binary",
    think=True,
    style="states",  # only SFT would use it
)
cfg = Config(num_tasks=4, k=8, lr=3e-4, max_tokens=64, micro_tokens=4096)


def main(model: str = str(PICO), updates: int = 20) -> None:
    cfg.updates = updates
    policy = load_policy(model, cfg.lora_rank, cfg.lora_alpha)
    sampler, optimizer = PlainSampler(policy), adam(policy, cfg.lr)
    for update in range(cfg.updates):
        # 1 sample: k episodes of each task
        groups = play(
            policy,
            sampler,
            new_env,
            task_seeds(cfg, update),
            k=cfg.k,
            max_tokens=cfg.max_tokens,
            temperature=cfg.temperature,
            sample_seed=update,
        )
        episodes = [e for group in groups for e in group]
        # 2 compare each with its group
        compute_advantages(groups, cfg)
        # 3 learn
        set_learning_rate(optimizer, learning_rate(cfg, update))
        with policy.learning():
            grad_norm = learn(policy, optimizer, episodes)
        # 4 look
        reward = sum(e.reward for e in episodes) / len(episodes)
        print(
            f"update {update + 1}  reward {reward:.2f}  grad_norm {grad_norm:.2f}",
            *{f"  an episode failed: {e.error}" for e in episodes if e.error},
            sep="\n",
        )


def learn(policy, optimizer, episodes: list) -> float:
    """One step of the optimizer; returns the norm of its gradient."""
    optimizer.zero_grad()
    # n counts the tokens of all episodes that did not fail, also of those that the next
    # line leaves out.
    n = sum(e.reply_tokens for e in episodes if not e.error)
    informative = [e for e in episodes if any(e.advantages)]  # the others teach nothing
    total = 0.0
    # in pieces that fit into memory
    for rows in split_by_tokens(informative, cfg.micro_tokens):
        batch = collate(
            [informative[i] for i in rows],
            policy.tokenizer.pad_token_id,
            policy.device,
        )
        output = plain_forward(policy, batch.ids, batch.mask, cfg.temperature)
        # One advantage per sampled token of the piece: M numbers, as in output.
        advantages = torch.tensor([a for e in batch.episodes for a in e.advantages])
        # Any loss can stand here: output has logprobs [M], entropy [M], logits [M, V]
        # and hidden [M, D].
        loss = -(advantages.to(policy.device) * output.logprobs).sum() / n
        loss.backward()  # the gradients of the pieces add up
        total += loss.item()
    return take_step(policy, optimizer, total)[1]


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:]))
