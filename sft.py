"""Supervised fine-tuning (SFT): a warm-up on the scripted expert's episodes, before RL.

    loss = - mean log p(token | all before it), over the *expert's* tokens

The prompt is not trained on; the end-of-turn token is. In letters the default style,
`states`, shows the form of a reply (think, then answer inside <answer>), but not how to
count: that is left for RL. `--sft-style derives` shows the way, too. There are only 100
demonstrations, because in practice they are scarce.

Run me: `python sft.py` prints an expert episode and marks the tokens that are trained
on.
"""

import random
from collections.abc import Callable

from batch import collate, split_by_tokens
from chat import encode, read_template, start_of_thought, without_start
from policy import PLAIN, Backend, Policy, Sample, adam, set_learning_rate, take_step
from rollout import (
    UNLIMITED,
    Episode,
    context_of,
    end_on_failure,
    open_group,
    score_episode,
    take_turn,
)


def sft(
    policy: Policy, new_env: Callable, seeds: list[int], cfg, backend: Backend = PLAIN
) -> dict:
    """Train for cfg.sft_steps steps on the expert's episodes, one per seed.

    new_env() makes an environment. Call sft() inside `with policy.learning()`, which
    frees the gradients' memory afterwards. Returns a dict:

    losses          one per step
    tokens          how many tokens were trained on
    demonstrations  how many episodes the expert played
    beyond_context  demonstrations that are longer than the model's context
    too_long        demonstrations within the context with a reply of more than
                    cfg.max_tokens; left out, unless all are too long
    """
    if cfg.sft_steps == 0:
        seeds = []  # so no demonstrations are made, and no step is taken
    episodes = [expert_episode(policy, new_env, seed) for seed in seeds]
    demonstrations, counts = select_demonstrations(policy, episodes, cfg.max_tokens)
    optimizer = adam(policy, cfg.sft_lr)  # SFT's own: RL starts with fresh moments
    losses, tokens = [], 0
    batches = sft_batches(demonstrations, cfg.sft_batch, cfg.sft_steps, cfg.seed)
    for i, batch in enumerate(backend.bar(batches)):
        # The rate rises over about the first tenth of the steps, because Adam's first
        # steps are the largest; then it falls linearly.
        rise = (i + 1) / max(1, cfg.sft_steps / 10)
        fall = (cfg.sft_steps - i) / cfg.sft_steps
        set_learning_rate(optimizer, cfg.sft_lr * min(rise, fall))
        loss, _ = sft_step(policy, optimizer, batch, cfg.micro_tokens, backend)
        losses.append(loss)
        tokens += sum(e.reply_tokens for e in batch)
    return {"losses": losses, "tokens": tokens, **counts}


def expert_episode(policy: Policy, new_env: Callable, seed: int) -> Episode:
    """An Episode in which the scripted expert replies. ValueError if it fails.

    It is played like the policy's, but each reply is env.expert_reply(). It may be
    longer than the policy's context (select_demonstrations).
    """
    # open_group makes a group of k players; here it has one.
    [player] = open_group(
        policy, new_env, seed, group=0, k=1, max_before_reply=UNLIMITED
    )
    episode, env = player.episode, player.env
    # What ends a reply: the template's end-of-turn token or, if it has none, the
    # tokenizer's end of text.
    end = read_template(policy.tokenizer).end
    if end is None:
        end = policy.tokenizer.eos_token_id
    while episode.stop_reason == "":
        with end_on_failure(episode):
            # Some prompts end with <think>. Then the expert's tokens begin after it;
            # take_turn puts it back for env.
            prefix = start_of_thought(policy.tokenizer, env.think)
            reply = without_start(env.expert_reply(), prefix)
            reply_ids = [*encode(policy, reply), end]
            # SFT reads no log-probs of the sampler, so these are zeros.
            sample = Sample(reply_ids, [0.0] * len(reply_ids), finished=True)
            take_turn(policy, episode, env, sample, UNLIMITED)
    score_episode(episode, env)
    if episode.stop_reason == "error":
        raise ValueError(f"the expert's episode of task {seed} failed: {episode.error}")
    return episode


def select_demonstrations(
    policy: Policy, episodes: list[Episode], max_tokens: int
) -> tuple[list[Episode], dict[str, int]]:
    """(the demonstrations to train on, counts for the log).

    1. Those longer than the model's context are left out; ValueError if none is left.
    2. Of the others, those with a reply of more than max_tokens are left out, because
       RL cuts such replies off. If that leaves none, all the others are trained on.
    """
    context = context_of(policy)
    in_context = [e for e in episodes if len(e.token_ids) <= context]
    if episodes and not in_context:
        raise ValueError(
            f"SFT: every demonstration is longer than the model's context of {context} "
            "tokens; show shorter ones, or use --sft-steps 0"
        )
    within_max_tokens = [e for e in in_context if max(e.turn_lengths) <= max_tokens]
    counts = {
        "demonstrations": len(episodes),
        "beyond_context": len(episodes) - len(in_context),
        "too_long": len(in_context) - len(within_max_tokens),
    }
    return within_max_tokens or in_context, counts


def sft_step(
    policy: Policy,
    optimizer,
    episodes: list[Episode],
    micro_tokens: int,
    backend: Backend = PLAIN,
) -> tuple[float, float]:
    """One optimizer step; returns its loss and the norm of its gradient.

    The loss is the mean of -log p of the expert's tokens, in nats. micro_tokens: padded
    tokens per forward pass. Raises FloatingPointError if loss or gradient is not
    finite, before the optimizer step.
    """
    # n: all trained tokens of the batch. Each part divides its sum by n, so the
    # gradients of the parts add up to that of the mean.
    n = sum(e.reply_tokens for e in episodes)
    # Sorted by length and dealt out, so that each of several processes gets short and
    # long ones.
    by_length = sorted(episodes, key=lambda e: len(e.token_ids))
    mine = backend.shard(by_length)
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for indices in split_by_tokens(mine, micro_tokens):
        part = [mine[i] for i in indices]
        batch = collate(part, policy.tokenizer.pad_token_id, policy.device)
        output = backend.forward(policy, batch.ids, batch.mask, need_logits=False)
        loss = -output.logprobs.sum() / n
        loss.backward()  # gradients of the parts add up
        total += loss.item()
    return take_step(policy, optimizer, total, backend)  # the same step as in RL


def sft_batches(
    episodes: list[Episode], batch_size: int, steps: int, seed: int
) -> list[list[Episode]]:
    """`steps` batches: passes over all episodes, each in a new order, cut into batches.

    A batch may hold the end of one pass and the beginning of the next. ValueError if
    there are steps and no episodes.
    """
    if steps and not episodes:
        raise ValueError("SFT: there are no demonstrations; use --sft-steps 0")
    rng = random.Random(seed)
    queue = []  # shuffled passes, until there are enough for all steps
    while len(queue) < steps * batch_size:
        queue += rng.sample(episodes, len(episodes))
    return [queue[i * batch_size : (i + 1) * batch_size] for i in range(steps)]


if __name__ == "__main__":
    from env_letters import Letters
    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    new_env = lambda: Letters(3, "binary", think=True, style="states")
    episode = expert_episode(policy, new_env, seed=5)
    tokens = [policy.tokenizer.decode([t]) for t in episode.token_ids]
    print("the tokens in brackets are trained on:\n")
    print("".join(f"[{t}]" if s else t for t, s in zip(tokens, episode.sampled)))
