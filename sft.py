"""SFT: warm-up on the scripted expert's episodes, before RL.

    loss = - mean log p(token | all before it), over the *expert's* tokens: the prompt is not learnt, the end-of-turn token is

The default expert only shows the format (think, then answer inside <answer>); it states counts without deriving
them. Demonstrations are scarce here, 100 of them, as they are in life. What a policy gains after that, it found
by itself. `--sft-style derives` teaches the algorithm instead.

Run me: `python sft.py` prints an expert episode and marks which tokens are learnt.
"""

import random
from collections.abc import Callable

import torch

from fast import parallel
from fast.logprobs import token_logprobs
from grpo import collate, micro_batches, take_step
from policy import Policy
from rollout import Episode, expert_episode


def demonstrations(policy: Policy, make_env: Callable[[], object], seeds: list[int]) -> list[Episode]:
    """One expert episode a seed."""
    return [expert_episode(policy, make_env(), seed) for seed in seeds]


def sft_step(policy: Policy, optimizer: torch.optim.Optimizer, episodes: list[Episode], micro_tokens: int) -> dict[str, float]:
    """One optimizer step on these episodes. Returns the loss (the mean of -log p over all their sampled tokens, in nats) and what else to log.

    micro_tokens: padded tokens a forward pass. Raises FloatingPointError if loss or gradient is not finite, before the optimizer step.
    """
    optimizer.zero_grad(set_to_none=True)
    n = sum(e.reply_tokens for e in episodes)  # one denominator for the whole batch, however it is cut
    loss = 0.0
    episodes = parallel.share(sorted(episodes, key=lambda e: len(e.token_ids)))  # where several processes train: this one's
    for part in micro_batches(episodes, micro_tokens):
        some = [episodes[i] for i in part]
        batch = collate(some, torch.zeros(len(some)), torch.zeros(len(some)), policy.tokenizer.pad_token_id, policy.device)
        logprobs, _ = token_logprobs(policy, batch.ids, batch.mask)
        total = -logprobs.sum() / n
        total.backward()
        loss += total.item()
    loss = parallel.sum_numbers({"loss": loss})["loss"]
    grad_norm = take_step(policy, optimizer, loss, 1.0, "SFT loss")
    return {"loss": loss, "grad_norm": grad_norm, "trained_tokens": n}


def sft_batches(episodes: list[Episode], batch_size: int, steps: int, seed: int) -> list[list[Episode]]:
    """`steps` batches of `batch_size`; in every pass over the episodes each comes once, in a new order."""
    rng, queue, batches = random.Random(seed), [], []
    while len(batches) < steps:
        while len(queue) < batch_size:
            queue += rng.sample(episodes, len(episodes))
        batches.append(queue[:batch_size])
        queue = queue[batch_size:]
    return batches


def other_opening(policy: Policy, env, episode: Episode) -> str | None:
    """One sentence if this episode's prompt is not the one that a demonstration of the same task begins with, else None.

    The cause is most often another chat template.
    """
    shown = expert_episode(policy, env, episode.seed).token_ids
    n = next((i for i, (a, b) in enumerate(zip(episode.token_ids, shown)) if a != b), len(shown))
    if n >= episode.sampled.index(True):
        return None
    text = lambda ids: repr(policy.tokenizer.decode(ids[n : n + 6]))
    return (f"the prompts that the policy samples from are not written as those of SFT: token {n} on, {text(episode.token_ids)} and not {text(shown)}; "
            "make both with the same chat template")  # fmt: skip


if __name__ == "__main__":
    from env_letters import Letters
    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=32, lora_alpha=64)
    make_env = lambda: Letters(difficulty=3, reward="binary", think=True, style="states")
    episode = demonstrations(policy, make_env, [5])[0]
    text = "".join(
        f"[{policy.tokenizer.decode([t])}]" if s else policy.tokenizer.decode([t]) for t, s in zip(episode.token_ids, episode.sampled)
    )
    print("learnt tokens stand in brackets:\n")
    print(text)
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-3)
    for step in range(5):
        print(f"step {step}  loss {sft_step(policy, optimizer, [episode], 8192)['loss']:.3f}")
