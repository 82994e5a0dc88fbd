"""Rollouts: a policy plays episodes. (chat.py turns messages into token ids.)

    seed -> env.reset -> messages -> prompt ids -> sampler
         -> reply ids -> text -> env.step -> messages -> …

One rule: we train on exactly the token ids that were sampled. So

* ids are kept as they were drawn;
* the environment reads a reply as text, but that text is never encoded again, which
  could give other ids;
* only the environment's next message goes through the chat template, and its ids are
  appended. To render the whole conversation again would, with Qwen3's template, drop
  the thinking of earlier turns.

batch.py turns `sampled` into the loss mask. tests/test_rollout.py tests the rule.

    token_ids   <|im_start|> user … <|im_end|> <|im_start|> assistant | <think> b a1 …
    sampled      0            0   0  0          0            0        | 1       1 1
                 given: the prompt                                    | policy's choice

The end-of-turn token is the policy's choice, too, so it is trained on.

A check: sampler and trainer should give a token the same log-prob, apart from rounding.
train.py logs the mean gap as `mismatch` (bookkeeping/columns.py). If both have the same
weights and the gap is larger than rounding makes it, there is a bug.

A group is k episodes of the *same* task: same seed, same prompt, different random
numbers.

Run me: `python rollout.py` plays an episode with pico_base and prints each token, who
chose it, and its log-prob.
"""

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from chat import (
    ids_until_next_reply,
    prompt_ids,
    start_of_thought,
)
from policy import Policy, Sample, rope_switch

UNLIMITED = 10**9  # tokens: more than any conversation has


@dataclass
class Episode:
    """One play of one task: what was said, token for token, and what it earned."""

    seed: int  # of the task
    group: int  # episodes of one group share the task and the prompt
    # Three parallel lists, with one entry per token of the conversation.
    token_ids: list[int] = field(default_factory=list)
    # True if the policy chose the token (in a demonstration, the expert).
    sampled: list[bool] = field(default_factory=list)
    # The token's log-prob in nats; 0.0 where it was not sampled.
    logprobs: list[float] = field(default_factory=list)
    turns: int = 0  # replies given
    # The next three come from the environment's score().
    reward: float = 0.0  # what GRPO trains on
    # Only logged.
    components: dict[str, float] = field(default_factory=dict)
    # One per reply. If the environment gives them, GRPO trains on them, not on reward.
    turn_rewards: list[float] = field(default_factory=list)
    # One per *sampled* token, so this is shorter than token_ids. Set by
    # grpo.compute_advantages or teacher_advantages, read by the loss.
    advantages: list[float] = field(default_factory=list)
    # How it ended: "done"; "truncated", out of tokens; "error", the environment failed.
    stop_reason: str = ""  # "": it has not ended
    error: str = ""  # with stop_reason "error": what happened, in one line
    messages: list[dict] = field(default_factory=list)  # as text, to read
    # For samples of an older policy (batch.py). Skip these two at first.
    policy_version: int = 0  # updates done when this was sampled
    age: int = 0  # updates between sampling and training; 0 unless it is sampled ahead

    @property
    def reply_tokens(self) -> int:
        """How many tokens the policy chose, over all turns."""
        return sum(self.sampled)

    @property
    def turn_lengths(self) -> list[int]:
        """How many tokens the policy chose in each turn: the runs of True."""
        runs = groupby(self.sampled)
        return [len([*run]) for sampled, run in runs if sampled]


class EnvironmentFailed(Exception):
    """An environment raised or gave no answer in time. Only that episode is lost."""


@contextmanager
def end_on_failure(episode: Episode):
    """A failure in this block ends only this episode, which then has no score."""
    try:
        yield
    # An environment or a chat template may also raise ValueError.
    except (EnvironmentFailed, ValueError) as error:
        episode.stop_reason, episode.error = "error", str(error)


# --------------------------------------------------------------------- playing a batch


@dataclass
class Player:
    """An episode that is being played."""

    episode: Episode
    env: object  # None: it could not be made
    member: int  # its number in the group, 0 … k-1
    reply: Sample | None = None  # sampled, but not yet given to the environment
    cache: object = None  # keys and values of earlier tokens, if the sampler keeps them


def play(
    policy: Policy,
    sampler,
    new_env: Callable[[], object],
    task_seeds: list[int],
    k: int,
    max_tokens: int,
    temperature: float,
    sample_seed: int,
) -> list[list[Episode]]:
    """Play k episodes of each task to the end: groups [len(task_seeds)][k].

    The sampler draws the tokens; play uses the policy only for its tokenizer and its
    context length. new_env() makes an environment, and each episode gets one of its
    own. max_tokens limits one turn.

    The same (sample_seed, task seed, member, turn) draws the same random numbers,
    whatever else is in the batch. An environment that raises EnvironmentFailed or
    ValueError ends only its own episode (Episode.error). Raises FloatingPointError if
    the policy's log-probs are no longer finite.
    """
    # A sampler with a max_len has a limit of its own.
    context = min(context_of(policy), getattr(sampler, "max_len", UNLIMITED))
    # how many tokens may come before a reply, so that max_tokens still fit
    max_before_reply = context - max_tokens
    groups = [
        open_group(policy, new_env, seed, g, k, max_before_reply)
        for g, seed in enumerate(task_seeds)
    ]
    players = sum(groups, [])
    while active := still_playing(players):
        sample_each(sampler, active, max_tokens, temperature, sample_seed)
        for player in active:
            sample = player.reply
            take_turn(policy, player.episode, player.env, sample, max_before_reply)
            # Only an episode that goes on keeps its cache. Drop every other reference
            # to the sample, so that its memory is freed now.
            over = player.episode.stop_reason != ""
            player.cache = None if over else sample.cache
            player.reply = None
            del sample
    for player in players:
        player.episode.policy_version = sampler.version
        score_episode(player.episode, player.env)
    return [[player.episode for player in group] for group in groups]


def sample_each(
    sampler,
    players: list[Player],
    max_tokens: int,
    temperature: float,
    sample_seed: int,
) -> None:
    """Sample the next reply of each player.

    Each reply has random numbers of its own, so it does not depend on its neighbours.
    """
    # May there be another turn? (All environments are of one kind, so ask the first.)
    # Then the sampler keeps its caches, so that the next turn reads only what is new.
    keep = getattr(players[0].env, "max_turns", None) != 1
    groups = group_by_prompt(players)
    # sampler.sample wants groups of one size, so it is called once per size. In the
    # first turn a group normally has k players; later some have ended. A player with a
    # cache is always a group of one, so group[0] has its group's cache.
    for size in sorted({len(group) for group in groups}):
        groups_of_size = [group for group in groups if len(group) == size]
        prompts = [group[0].episode.token_ids for group in groups_of_size]
        seeds = [
            [(sample_seed, p.episode.seed, p.member, p.episode.turns) for p in group]
            for group in groups_of_size
        ]
        caches = [group[0].cache for group in groups_of_size]
        rows = sampler.sample(
            prompts, size, max_tokens, temperature, seeds, caches=caches, keep=keep
        )
        for player, sample in zip(sum(groups_of_size, []), sum(rows, [])):
            player.reply = sample


def group_by_prompt(players: list[Player]) -> list[list[Player]]:
    """Group players whose tokens so far are the same: each prompt is read once.

    At first these are the k episodes of a task. A player who has a cache goes on from
    it, alone.
    """
    groups: dict[object, list[Player]] = {}
    for player in players:
        # no other player has the same id()
        key = id(player) if player.cache else tuple(player.episode.token_ids)
        groups.setdefault(key, []).append(player)
    return [*groups.values()]


def context_of(policy: Policy) -> int:
    """The longest text that the model can read, in tokens, if its config says.

    Some models read all tokens differently once a text passes a certain length
    (rope_switch), so an episode must end before it does.
    """
    config = policy.lm.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None), rope_switch(config)]
    return min([n for n in limits if n], default=UNLIMITED)


def still_playing(players: list[Player]) -> list[Player]:
    """Those whose episode has not ended."""
    return [p for p in players if p.episode.stop_reason == ""]


def open_group(
    policy: Policy,
    new_env: Callable,
    seed: int,
    group: int,
    k: int,
    max_before_reply: int,
) -> list[Player]:
    """k players of one task. Each has its prompt, or stop_reason "error".

    group: the group's number in this batch. max_before_reply: the most tokens that a
    prompt may have.
    """
    players = [Player(Episode(seed, group), env=None, member=n) for n in range(k)]
    for p in players:
        with end_on_failure(p.episode):
            p.env = new_env()
            p.episode.messages = list(p.env.reset(seed))
    ready = still_playing(players)
    if not ready:
        return players
    opening, env = ready[0].episode.messages, ready[0].env
    # This may raise, and end the run: a template that fails here fails for every task.
    ids = prompt_ids(policy, opening, env.tools, env.think)
    for p in ready:
        with end_on_failure(p.episode):
            if p.episode.messages != opening:
                raise ValueError(
                    f"task {seed}: reset() gave one episode a different opening; "
                    "a seed must always give the same task"
                )
            if len(ids) > max_before_reply:
                raise ValueError(
                    f"task {seed}: a prompt of {len(ids)} tokens leaves no room for a "
                    f"reply; the limit is {max(max_before_reply, 0)}: give a lower "
                    "--max-tokens or shorter tasks"
                )
            append_given(p.episode, ids)
    return players


def take_turn(
    policy: Policy, episode: Episode, env, sample: Sample, max_before_reply: int
) -> None:
    """Append one sampled reply, then the environment's messages; or end the episode.

    max_before_reply: the most tokens that may come before a reply. Raises
    FloatingPointError if a log-prob is not finite. A reply of "5<|im_end|>", answered
    by "And 2 + 2?", appends

        token_ids   5  <|im_end|>  ⏎ <|im_start|> user ⏎ And … <|im_start|> assistant ⏎
        sampled     1  1           0  0            0   0  0     0            0        0
    """
    if not all(map(math.isfinite, sample.logprobs)):
        raise FloatingPointError(
            "a sampled token's log-prob is NaN or infinite: the policy's weights are "
            "broken"
        )
    # 1 record what was sampled
    episode.token_ids += sample.token_ids
    episode.sampled += [True] * len(sample.token_ids)
    episode.logprobs += sample.logprobs
    episode.turns += 1
    # 2 tell the environment, without the end-of-turn token. Some templates end the
    # prompt with <think>. The environment then reads it in front of the reply, so that
    # thoughts are whole; token_ids stay as they are.
    reply_ids = sample.token_ids[:-1] if sample.finished else sample.token_ids
    prefix = start_of_thought(policy.tokenizer, env.think)
    reply = prefix + policy.tokenizer.decode(reply_ids, skip_special_tokens=False)
    episode.messages.append({"role": "assistant", "content": reply})
    with end_on_failure(episode):
        # A reply that was cut off is stepped and scored like any other, but then its
        # episode is over.
        new_messages, done = env.step(reply)
        # 3 is it over?
        if not sample.finished:
            episode.stop_reason = "truncated"  # the reply ran out of tokens
            return
        if done:
            episode.stop_reason = "done"
            return
        ids = ids_until_next_reply(policy, env, sample, new_messages)
        if len(episode.token_ids) + len(ids) > max_before_reply:
            episode.stop_reason = "truncated"  # the next reply would not fit
            return
        # 4 append what the environment says
        episode.messages += new_messages
        append_given(episode, ids)


def append_given(episode: Episode, ids: list[int]) -> None:
    """Append tokens that the policy did not choose: read, but never trained on."""
    episode.token_ids += ids
    episode.sampled += [False] * len(ids)
    episode.logprobs += [0.0] * len(ids)


def score_episode(episode: Episode, env) -> None:
    """Ask for the score. A failed episode has none: means and loss leave it out."""
    if episode.stop_reason == "error":
        return
    with end_on_failure(episode):
        scores = dict(env.score())
        turn_rewards = scores.pop("turn_rewards", None)
        if turn_rewards is not None:
            episode.turn_rewards = [float(reward) for reward in turn_rewards]
            if len(episode.turn_rewards) != episode.turns:
                raise ValueError(
                    f"score() has {len(episode.turn_rewards)} turn_rewards for "
                    f"{episode.turns} replies; give one per reply"
                )
        episode.reward = float(scores.pop("reward"))
        episode.components = {name: float(value) for name, value in scores.items()}


if __name__ == "__main__":
    from env_letters import Letters
    from policy import PICO, PlainSampler, load_policy

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    # A short word, which the base often spells; a longer string it seldom does.
    new_env = lambda: Letters(1, "binary", think=True, style="bare")
    options = {"k": 1, "max_tokens": 200, "temperature": 1.0, "sample_seed": 0}
    [[e]] = play(policy, PlainSampler(policy), new_env, [2], **options)
    print("token              sampled  log-prob")
    for token, sampled, logprob in zip(e.token_ids, e.sampled, e.logprobs):
        said = f"policy {logprob:9.3f}" if sampled else "."
        print(f"{policy.tokenizer.decode([token])!r:18} {said}")
    print(f"\nreward {e.reward:.2f}, {e.stop_reason}, {e.components}")
