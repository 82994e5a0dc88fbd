"""SFT: warm-up on the scripted expert's episodes, before RL.

    loss = - mean log p(token | all before it), over the *expert's* tokens

The prompt is not learnt; the end-of-turn token is. The default expert only shows the
format (think, then answer inside <answer>); it states counts without deriving them.
Demonstrations are scarce, as in practice: there are 100. `--sft-style derives` teaches
the algorithm instead.

Run me: `python sft.py` prints an expert episode and marks which tokens are learnt.
"""

import random
from collections.abc import Callable
from itertools import groupby

from fast import parallel
from fast.batches import collate, cut
from fast.logprobs import token_logprobs
from grpo import take_step
from policy import Policy, adam, plain_logprobs, set_learning_rate
from rollout import Episode, expert_episode, most_prompt_tokens


def sft(
    policy: Policy, make_env: Callable, seeds: list[int], cfg, stop_here: Callable
) -> dict:
    """cfg.sft_steps steps on one demonstration per seed -> all losses, and tokens.

    make_env() -> an environment; stop_here() is called after every step, and raises if
    somebody asked the run to stop. Call sft() inside `with policy.learning()`.
    """
    shown = seeds if cfg.sft_steps else []
    episodes = [expert_episode(policy, make_env(), seed) for seed in shown]
    episodes, too_long = fitting(policy, episodes, cfg.max_tokens)
    optimizer = adam(policy, cfg.sft_lr)  # its own: RL starts with fresh moments
    losses, tokens = [], 0
    batches = sft_batches(episodes, cfg.sft_batch, cfg.sft_steps, cfg.seed)
    for i, batch in enumerate(parallel.bar(batches, desc="SFT", disable=not batches)):
        # Adam's first steps are its largest: rise over a tenth of the steps, then fall.
        rise = (i + 1) / max(1, cfg.sft_steps / 10)
        fall = (cfg.sft_steps - i) / cfg.sft_steps
        set_learning_rate(optimizer, cfg.sft_lr * min(rise, fall))
        stats = sft_step(policy, optimizer, batch, cfg.micro_tokens, cfg.plain)
        losses.append(stats["loss"])
        tokens += sum(e.reply_tokens for e in batch)
        stop_here()
    return {"losses": losses, "tokens": tokens, "too_long": too_long}


def fitting(
    policy: Policy, episodes: list[Episode], max_tokens: int
) -> tuple[list[Episode], dict[str, str]]:
    """(the demonstrations that RL could play, {symptom: what is told of the others}).

    Left out: what is longer than the model's context, and what has a reply of more than
    max_tokens, because RL would cut it. If all replies are longer, they stay, and that
    is told. ValueError if none fits the context.
    """
    context = most_prompt_tokens(policy, None, 0)
    fit = [e for e in episodes if len(e.token_ids) <= context]
    if episodes and not fit:
        why = f"every demonstration is longer than the model's context of {context}"
        raise ValueError(f"SFT: {why} tokens; show shorter ones, or use --sft-steps 0")
    kept = [e for e in fit if longest_reply(e) <= max_tokens]
    beyond, cut = len(episodes) - len(fit), len(fit) - len(kept)
    sentence = (
        f"of {len(episodes)} demonstrations {beyond} are longer than the model's "
        f"context of {context} tokens and left out; {cut} have a reply longer than "
        f"--max-tokens {max_tokens}, which RL would cut, and are "
        f"{'left out' if kept else 'shown, as there are no others'}"
    )
    return kept or fit, {"too long": sentence} if beyond + cut else {}


def longest_reply(episode: Episode) -> int:
    """In tokens; between two replies stands what was read."""
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
    tokens per forward pass. plain: log-probs the plain way. Raises FloatingPointError
    if loss or gradient is not finite, before the optimizer step.
    """
    optimizer.zero_grad(set_to_none=True)
    # One denominator for the whole batch, however it is cut.
    n = sum(e.reply_tokens for e in episodes)
    by_length = sorted(episodes, key=lambda e: len(e.token_ids))
    own = parallel.share(by_length)  # this process's
    logprobs_of = plain_logprobs if plain else token_logprobs
    loss, pad = 0.0, policy.tokenizer.pad_token_id
    for piece in cut(own, micro_tokens):
        batch = collate([own[i] for i in piece], pad, policy.device)
        logprobs, _ = logprobs_of(policy, batch.ids, batch.mask)  # [M]
        part_loss = -logprobs.sum() / n
        part_loss.backward()
        loss += part_loss.item()
    loss = parallel.sum_numbers({"loss": loss})["loss"]
    grad_norm = take_step(policy, optimizer, loss, "SFT loss")
    return {"loss": loss, "grad_norm": grad_norm, "trained_tokens": n}


def sft_batches(
    episodes: list[Episode], batch_size: int, steps: int, seed: int
) -> list[list[Episode]]:
    """`steps` batches; each pass over the episodes takes each once, in a new order."""
    rng, queue, batches = random.Random(seed), [], []
    while len(batches) < steps:
        while len(queue) < batch_size:
            queue += rng.sample(episodes, len(episodes))
        batches.append(queue[:batch_size])
        queue = queue[batch_size:]
    return batches


if __name__ == "__main__":
    from env_letters import Letters
    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=32, lora_alpha=64)
    env = Letters(3, "binary", think=True, style="states")
    episode = expert_episode(policy, env, seed=5)
    tokens = [policy.tokenizer.decode([t]) for t in episode.token_ids]
    print("learnt tokens stand in brackets:\n")
    print("".join(f"[{t}]" if s else t for t, s in zip(tokens, episode.sampled)))
    optimizer = adam(policy, 1e-4)  # the default for models of this size
    for step in range(5):
        loss = sft_step(policy, optimizer, [episode], 8192)["loss"]
        print(f"step {step}  loss {loss:.3f}")
