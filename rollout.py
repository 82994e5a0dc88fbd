"""Rollouts: a policy plays episodes. A conversation becomes token ids here.

    seed -> env.reset -> messages -> prompt ids -> sampler
         -> reply ids -> text -> env.step -> messages -> …

The one rule is *token-exact*: what is trained is, token for token, what was sampled.
A reply is never decoded and tokenized again (the second cut can differ from the first),
and never rendered by the template again (Qwen3's drops the thinking of earlier turns).
The text between two turns, as the template writes it, is appended. And we measure it:
each update compares the log-prob of every token that it trains on with the one it was
sampled at (fast/batches.py; the column `mismatch` of metrics.jsonl).

    token_ids   <|im_start|> user … <|im_end|> <|im_start|> assistant | <think> b a1 …
    sampled      0            0   0  0          0            0          1       1 1
                 the prompt: nobody's choice           the policy's choices, its
                                                       end-of-turn token included

A group is k episodes of the *same* task: same seed, same prompt, other random numbers.

Run me: `python rollout.py` plays an episode of pico_base: each token, who chose it, and
its log-prob.
"""

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

from bookkeeping.chat import end_of_turn, read_template
from fast.sampler import sample_each
from policy import Policy, Sample, encode, render


@dataclass
class Episode:
    """One play of one task: what was said, token for token, and what it earned."""

    seed: int  # of the task
    group: int  # episodes of one group share the task and the prompt
    # the whole conversation
    token_ids: list[int] = field(default_factory=list)
    # True exactly where the policy chose the token
    sampled: list[bool] = field(default_factory=list)
    # of each token when it was sampled, in nats; else 0.0
    logprobs: list[float] = field(default_factory=list)
    turns: int = 0  # replies given
    reward: float = 0.0
    # the rest of env.score()
    components: dict[str, float] = field(default_factory=dict)
    # truncated: out of tokens; error: the environment failed; "": still playing
    stop_reason: str = "done"
    policy_version: int = 0  # updates that the policy had seen when it sampled this
    age: int = 0  # updates between that policy and the one trained on this episode
    messages: list[dict] = field(default_factory=list)  # as text, for people
    error: str = ""  # with stop_reason "error": what happened, in one line

    @property
    def reply_tokens(self) -> int:
        """How many tokens the policy chose, over all turns."""
        return sum(self.sampled)


class EnvironmentFailed(Exception):
    """An environment raised or gave no answer in time (bookkeeping/guard.py)."""


@contextmanager
def failure_ends(episode: Episode):
    """What fails in this block ends its episode and no other: it has no score then."""
    try:
        yield
    except (EnvironmentFailed, ValueError) as error:  # the template raises ValueError
        episode.stop_reason, episode.error = "error", str(error)


# ------------------------------------------------------------------ chat <-> token ids


def prompt_ids(policy: Policy, messages: list[dict], tools, think: bool) -> list[int]:
    """Token ids of an opening prompt, up to where the policy begins to speak.

    [{"role": "user", "content": "What is 1 + 1?"}] gives the ids of

        <|im_start|>user⏎What is 1 + 1?<|im_end|>⏎<|im_start|>assistant⏎
    """
    return encode(policy, render(policy, messages, tools, think))


def after_reply(
    policy: Policy, new: list[dict], think: bool, tools=None
) -> tuple[list[int], list[int]]:
    """What the template writes after a reply, as token ids in two parts.

    For the new message "And 2 + 2?" of the user they are the ids of

        <|im_end|>                          the end-of-turn token, which was sampled
        ⏎<|im_start|>user⏎And 2 + 2?<|im_end|>⏎<|im_start|>assistant⏎

    A marker is rendered in the reply's place; what follows it is what we look for. The
    first part is [] if this template ends a turn without such a token. Some templates
    write a tool's result only if they are given the tools again.
    """
    tools = tools if read_template(policy.tokenizer).tools else None
    marker = "@@reply@@"
    asked = [{"role": "user", "content": "?"}]
    replied = [{"role": "assistant", "content": marker}]
    text = render(policy, asked + replied + new, tools, think)
    _, found, after = text.partition(marker)
    if not found:
        why = "the chat template changes what the assistant said"
        raise ValueError(f"{why}; take another model")
    ids = encode(policy, after)
    n, _ = end_of_turn(policy.tokenizer, after)
    return ids[:n], ids[n:]


def opened_by_prompt(policy: Policy, think: bool) -> str:
    """'<think>⏎' if the prompt opens the thought itself, so that replies begin in it.

    The environment is to read the whole thought, and no demonstration opens it twice.
    """
    return read_template(policy.tokenizer).opens if think else ""


def unopened(reply: str, opened: str) -> str:
    """An expert's reply as it goes on after a prompt that has opened the thought.

    After "<think>⏎" (opened), "<think>⏎so 2⏎</think>⏎2" becomes "so 2⏎</think>⏎2". A
    reply without a thought closes the empty one: "2" becomes "⏎</think>⏎⏎2".
    """
    if not opened:
        return reply
    if not reply.startswith("<think>"):
        reply = f"<think>\n\n</think>\n\n{reply}"
    inside = reply.removeprefix("<think>")
    return inside.removeprefix(opened.removeprefix("<think>"))


# --------------------------------------------------------------------- playing a batch


@dataclass
class Player:
    """An episode that is being played."""

    episode: Episode
    env: object
    member: int  # its number in the group, 0 … k-1
    cache: object = None  # keys and values of what was read, if the sampler keeps them


def play(
    policy: Policy,
    sampler,
    make_env: Callable[[], object],
    task_seeds: list[int],
    k: int,
    max_tokens: int,
    temperature: float,
    sample_seed: int,
) -> list[list[Episode]]:
    """Play k episodes of each task to the end: groups [len(task_seeds)][k].

    max_tokens is for one turn. The same (sample_seed, task seed, member, turn) draws
    the same random numbers, whatever else is in the batch. An environment that raises
    EnvironmentFailed loses only that episode. Raises FloatingPointError if the policy
    gives no probabilities any more.
    """
    if not task_seeds:  # there are more processes than tasks
        return []
    max_prompt = most_prompt_tokens(policy, sampler, max_tokens)
    players = []  # of all episodes, group after group
    for g, seed in enumerate(task_seeds):
        players += open_group(policy, make_env, seed, g, k, max_prompt)
    # With caches, the next turn reads only what is new.
    keep_cache = getattr(players[0].env, "max_turns", None) != 1
    active = still_playing(players)
    while active:
        prompts = [p.episode.token_ids for p in active]
        draws = [(p.episode.seed, p.member, p.episode.turns) for p in active]
        seeds = [(sample_seed, *draw) for draw in draws]
        caches = [p.cache for p in active]
        samples = sample_each(
            sampler, prompts, seeds, caches, max_tokens, temperature, keep_cache
        )
        for player, sample in zip(active, samples):
            take_turn(policy, player.episode, player.env, sample, max_prompt)
            player.cache = sample.cache if not player.episode.stop_reason else None
        del samples, sample  # with the caches of finished episodes: free their memory
        active = still_playing(active)
    for player in players:
        player.episode.policy_version = sampler.version
        finish(player.episode, player.env)
    episodes = [p.episode for p in players]
    return [episodes[g * k : (g + 1) * k] for g in range(len(task_seeds))]


def most_prompt_tokens(policy: Policy, sampler, max_tokens: int) -> int:
    """The most tokens a conversation may have if a reply of max_tokens is to follow."""
    context = getattr(policy.lm.config, "max_position_embeddings", None) or 10**9
    return min(context, getattr(sampler, "max_len", context)) - max_tokens


def still_playing(players: list[Player]) -> list[Player]:
    """Those whose episode has not ended."""
    return [p for p in players if p.episode.stop_reason == ""]


def open_group(
    policy: Policy, make_env: Callable, seed: int, number: int, k: int, max_prompt: int
) -> list[Player]:
    """k players of one task that have read its prompt.

    If the prompt is too long, or not the same for all of them, their episodes have
    failed.
    """
    group = [
        Player(Episode(seed, number, stop_reason=""), make_env(), n) for n in range(k)
    ]
    for p in group:
        with failure_ends(p.episode):
            p.episode.messages = list(p.env.reset(seed))
    ready = still_playing(group)
    if not ready:
        return group
    opening, env = ready[0].episode.messages, ready[0].env
    ids = prompt_ids(policy, opening, env.tools, env.think)
    why = ""
    if any(p.episode.messages != opening for p in ready):
        why = f"reset({seed}) gave two openings, and a group must share one task"
    elif len(ids) > max_prompt:
        full = f"a prompt of {len(ids)} tokens leaves no room for a reply"
        cure = "give a lower --max-tokens or shorter tasks"
        why = f"task {seed}: {full}; at most {max(max_prompt, 0)} do: {cure}"
    for p in ready:
        if why:
            p.episode.stop_reason, p.episode.error = "error", why
        else:
            append_given(p.episode, ids)
    return group


def take_turn(
    policy: Policy, episode: Episode, env, sample: Sample, max_prompt: int
) -> None:
    """Append one sampled reply, then the environment's answer; or end the episode.

    max_prompt: the most tokens before a reply. Raises FloatingPointError if a log-prob
    is not finite. A reply of "5<|im_end|>", answered by "And 2 + 2?", appends

        token_ids   5  <|im_end|>  ⏎ <|im_start|> user ⏎ And … <|im_start|> assistant ⏎
        sampled     1  1           0  0            0   0  0     0            0        0
    """
    opened = opened_by_prompt(policy, env.think)
    if not all(map(math.isfinite, sample.logprobs)):
        broken = "the policy's weights are broken"
        raise FloatingPointError(f"a token has probability NaN: {broken}")
    episode.token_ids += sample.token_ids
    episode.sampled += [True] * len(sample.token_ids)
    episode.logprobs += sample.logprobs
    episode.turns += 1
    # people need not read the end-of-turn token
    said = sample.token_ids[:-1] if sample.finished else sample.token_ids
    reply = opened + policy.tokenizer.decode(said, skip_special_tokens=False)
    episode.messages.append({"role": "assistant", "content": reply})
    with failure_ends(episode):
        new_messages, done = env.step(reply)
        if done or not sample.finished:  # over, or it ran out of tokens
            episode.stop_reason = "done" if sample.finished else "truncated"
            return
        end, ids = after_reply(policy, new_messages, env.think, env.tools)
        # The end of a turn is there already; a header that the reply did not end with
        # is not.
        headed = read_template(policy.tokenizer).header
        if headed and end != sample.token_ids[-1:]:
            ids = end + ids
        if len(episode.token_ids) + len(ids) > max_prompt:
            episode.stop_reason = "truncated"  # the next reply would not fit
            return
        episode.messages += new_messages
        append_given(episode, ids)


def append_given(episode: Episode, ids: list[int]) -> None:
    """Append tokens that the policy did not choose: read, and never trained."""
    episode.token_ids += ids
    episode.sampled += [False] * len(ids)
    episode.logprobs += [0.0] * len(ids)


def finish(episode: Episode, env) -> None:
    """Ask for the score. A failed episode has none: it is in no mean and in no loss."""
    if episode.stop_reason == "error":
        return
    with failure_ends(episode):
        marks = dict(env.score())
        episode.reward = float(marks.pop("reward"))
        episode.components = {name: float(value) for name, value in marks.items()}


def expert_episode(policy: Policy, env, seed: int) -> Episode:
    """An Episode spoken by the scripted expert, for SFT. ValueError if it fails."""
    endless = 10**9  # a demonstration may be as long as it likes
    (player,) = open_group(policy, lambda: env, seed, 0, 1, endless)
    episode = player.episode
    # Not always eos_token: Gemma ends a turn with one token and a text with another.
    end = read_template(policy.tokenizer).end
    end = policy.tokenizer.eos_token_id if end is None else end
    while episode.stop_reason == "":
        with failure_ends(episode):
            reply = unopened(env.expert_reply(), opened_by_prompt(policy, env.think))
            said = [*encode(policy, reply), end]
            sample = Sample(said, [0.0] * len(said), finished=True)
            take_turn(policy, episode, env, sample, endless)
    finish(episode, env)
    if episode.stop_reason == "error":
        raise ValueError(f"the expert's episode of task {seed} failed: {episode.error}")
    return episode


if __name__ == "__main__":
    from env_letters import Letters
    from fast.sampler import TorchSampler
    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    make_env = lambda: Letters(2, "binary", think=True, style="bare")
    [[e]] = play(policy, TorchSampler(policy), make_env, [3], 1, 200, 1.0, 0)
    print("token              sampled  log-prob")
    for token, sampled, logprob in zip(e.token_ids, e.sampled, e.logprobs):
        said = f"policy {logprob:9.3f}" if sampled else "."
        print(f"{policy.tokenizer.decode([token])!r:18} {said}")
    print(f"\nreward {e.reward:.2f}, {e.stop_reason}, {e.components}")
