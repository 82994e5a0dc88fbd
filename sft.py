"""SFT: warm-up on the scripted expert's episodes, before RL.

    loss = - mean log p(token | all before it), over the *expert's* tokens

The prompt is not learnt; the end-of-turn token is. The default expert only shows the
format (think, then answer inside <answer>); it states counts without deriving them.
Demonstrations are scarce, as in practice: there are 100. `--sft-style derives` teaches
the algorithm instead.

Run me: `python sft.py` prints an expert episode and marks the tokens that are learnt.
"""

import random
from collections.abc import Callable
from itertools import groupby

from fast import parallel
from fast.batches import collate, cut
from fast.logprobs import token_logprobs
from grpo import take_step  # clips the gradient and steps: the same in SFT and RL
from policy import Policy, adam, plain_logprobs, set_learning_rate
from rollout import Episode, context_of, expert_episode


def sft(
    policy: Policy, make_env: Callable, seeds: list[int], cfg, end_if_asked: Callable
) -> dict:
    """Train for cfg.sft_steps steps on the expert's episodes, one per seed.

    make_env() -> an environment. end_if_asked() is called after every step, and raises
    if the run has been asked to stop. Call sft() inside `with policy.learning()`.

    Returns a dict: "losses", one per step; "tokens", how many were trained on;
    "warnings", for the run to print (select_demonstrations).
    """
    seeds = seeds if cfg.sft_steps else []  # 0 steps need no expert
    episodes = [expert_episode(policy, make_env(), seed) for seed in seeds]
    episodes, warnings = select_demonstrations(policy, episodes, cfg.max_tokens)
    optimizer = adam(policy, cfg.sft_lr)  # its own: RL starts with fresh moments
    losses, tokens = [], 0
    batches = sft_batches(episodes, cfg.sft_batch, cfg.sft_steps, cfg.seed)
    # with a progress bar, if there is something to do
    for i, batch in enumerate(parallel.bar(batches, desc="SFT", disable=not batches)):
        # Adam's first steps are its largest, so the rate rises over a tenth of the
        # steps; then it falls.
        rise = (i + 1) / max(1, cfg.sft_steps / 10)
        fall = (cfg.sft_steps - i) / cfg.sft_steps
        set_learning_rate(optimizer, cfg.sft_lr * min(rise, fall))
        stats = sft_step(policy, optimizer, batch, cfg.micro_tokens, cfg.plain)
        losses.append(stats["loss"])
        tokens += sum(e.reply_tokens for e in batch)
        end_if_asked()
    return {"losses": losses, "tokens": tokens, "warnings": warnings}


def select_demonstrations(
    policy: Policy, episodes: list[Episode], max_tokens: int
) -> tuple[list[Episode], dict[str, str]]:
    """(the demonstrations to show, {name: a warning about those left out}).

    1. Those longer than the model's context are left out; ValueError if none is left.
    2. Those with a reply of more than max_tokens, which RL would cut, are left out,
       too, unless that would leave none.
    """
    context = context_of(policy)
    in_context = [e for e in episodes if len(e.token_ids) <= context]
    if episodes and not in_context:
        raise ValueError(
            f"SFT: every demonstration is longer than the model's context of {context} "
            "tokens; show shorter ones, or use --sft-steps 0"
        )
    n, warnings = len(episodes), {}
    if len(in_context) < n:
        warnings["beyond the context"] = (
            f"{n - len(in_context)} of {n} demonstrations are longer than the model's "
            f"context of {context} tokens and are left out"
        )
    short = [e for e in in_context if longest_reply(e) <= max_tokens]
    if len(short) < len(in_context):
        fate = "left out" if short else "shown, as there are no others"
        warnings["too long"] = (
            f"{len(in_context) - len(short)} of {n} demonstrations have a reply longer "
            f"than --max-tokens {max_tokens}, which RL would cut; they are {fate}"
        )
    return (short or in_context), warnings


def longest_reply(episode: Episode) -> int:
    """The length of the longest run of True in `sampled`: tokens of one reply."""
    runs = groupby(episode.sampled)
    return max(len(list(run)) for sampled, run in runs if sampled)


def sft_step(
    policy: Policy,
    optimizer,
    episodes: list[Episode],
    micro_tokens: int,
    plain: bool = False,
) -> dict[str, float]:
    """One optimizer step; returns its loss, gradient norm and number of tokens.

    The loss is the mean of -log p of the expert's tokens, in nats. micro_tokens: padded
    tokens per forward pass. plain: compute the log-probs as in policy.py, not as in
    fast/logprobs.py. Raises FloatingPointError if loss or gradient is not finite,
    before the optimizer step.
    """
    optimizer.zero_grad(set_to_none=True)
    # The mean is over all n expert tokens of the batch, however it is divided: each
    # process takes its share of the episodes, cuts it into pieces that fit the memory,
    # and the gradients add up.
    n = sum(e.reply_tokens for e in episodes)
    by_length = sorted(episodes, key=lambda e: len(e.token_ids))
    own = parallel.shard(by_length)  # this process's
    logprobs_of = plain_logprobs if plain else token_logprobs
    loss = 0.0
    for indices in cut(own, micro_tokens):
        batch = collate(
            [own[i] for i in indices], policy.tokenizer.pad_token_id, policy.device
        )
        logprobs, _ = logprobs_of(policy, batch.ids, batch.mask)  # [M]
        part_loss = -logprobs.sum() / n
        part_loss.backward()
        loss += part_loss.item()
    loss, grad_norm = take_step(policy, optimizer, loss, "SFT loss")
    return {"loss": loss, "grad_norm": grad_norm, "trained_tokens": n}


def sft_batches(
    episodes: list[Episode], batch_size: int, steps: int, seed: int
) -> list[list[Episode]]:
    """`steps` batches: passes over all episodes, each in a new order, cut into batches.

    A batch may hold the end of one pass and the beginning of the next.
    """
    rng = random.Random(seed)
    queue = []
    while len(queue) < steps * batch_size:
        queue += rng.sample(episodes, len(episodes))
    return [queue[i * batch_size : (i + 1) * batch_size] for i in range(steps)]


if __name__ == "__main__":
    from env_letters import Letters
    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=32, lora_alpha=64)
    env = Letters(3, "binary", think=True, style="states")
    episode = expert_episode(policy, env, seed=5)
    tokens = [policy.tokenizer.decode([t]) for t in episode.token_ids]
    print("the tokens in brackets are learnt:\n")
    print("".join(f"[{t}]" if s else t for t, s in zip(tokens, episode.sampled)))
    optimizer = adam(policy, 1e-4)  # the default for models of this size
    for step in range(5):
        loss = sft_step(policy, optimizer, [episode], 8192)["loss"]
        print(f"step {step}  loss {loss:.3f}")
