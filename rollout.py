"""Rollouts: a policy plays episodes. A conversation becomes token ids here.

    seed -> env.reset -> messages -> prompt ids -> sampler -> reply ids -> text -> env.step -> …

The one rule is *token-exact*: what is trained is, token for token, what was sampled, and we measure
it. A reply is never decoded and tokenized again (the second cut can differ from the first), and
never rendered by the template again (Qwen3's drops the thinking of earlier turns). The text between
two turns, as the template writes it, is appended. grpo.py then compares the log-prob of every token
that it trains on with the one it was sampled at: the column `mismatch` of metrics.jsonl.

    token_ids   <|im_start|> user … <|im_end|> <|im_start|> assistant | <think> b a1 … <|im_end|>
    sampled      0            0   0  0          0            0          1       1 1  1 1
                 the prompt: nobody's choice           the policy's choices, its stop token included

A group is k episodes of the *same* task: same seed, same prompt, different random numbers.

Run me: `python rollout.py` plays an episode of pico_base: each token, its source and log-prob.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fast.sampler import sample_each
from policy import Policy, Sample, encode, render


@dataclass
class Episode:
    """One play of one task: what was said, token for token, and what it earned."""

    seed: int  # of the task
    group: int  # episodes of one group share the task and the prompt
    token_ids: list[int]  # the whole conversation
    sampled: list[bool]  # True exactly where the policy chose the token
    logprobs: list[float]  # of each token when it was sampled, in nats; 0.0 where it was not
    turns: int = 0  # replies given
    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)  # the rest of env.score()
    stop_reason: str = "done"  # truncated: out of tokens; error: environment failed; "": playing
    policy_version: int = 0  # updates that the policy had seen when it sampled this
    age: int = 0  # updates between that policy and the one trained on this episode
    messages: list[dict] = field(default_factory=list)  # the conversation as text, for people
    error: str = ""  # with stop_reason "error": what happened, in one line

    @property
    def reply_tokens(self) -> int:
        """How many tokens the policy chose, over all turns."""
        return sum(self.sampled)


class EnvironmentFailed(Exception):
    """An environment raised or gave no answer in time, told in one line (bookkeeping/guard.py)."""


# ------------------------------------------------------------------------------ chat <-> token ids


def prompt_ids(policy: Policy, messages: list[dict], tools, think: bool) -> list[int]:
    """Token ids of an opening prompt, up to where the policy begins to speak."""
    return encode(policy, render(policy, messages, tools, think))


def after_reply(policy: Policy, new: list[dict], think: bool) -> tuple[list[int], list[int]]:
    """What the template writes after a reply, as token ids: (the end-of-turn token, which a policy
    has sampled; the new messages, up to the next opening). A marker stands in for the reply.
    """
    marker = "@@reply@@"
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marker}]
    _, found, after = render(policy, history + new, None, think).partition(marker)
    if not found:
        raise ValueError("the chat template changes what the assistant said; take another model")
    ids = encode(policy, after)
    n = len(policy.stop_ids.intersection(ids[:1]))  # 0: the template writes no such token
    return ids[:n], ids[n:]


# --------------------------------------------------------------------------------- playing a batch


@dataclass
class Player:
    """An episode under way."""

    episode: Episode
    env: object
    member: int  # its number in the group, 0 … k-1
    cache: object = None  # keys and values of what was read so far, if the sampler keeps them


def play(
    policy: Policy, sampler, make_env: Callable[[], object], task_seeds: list[int], k: int,
    max_tokens: int, temperature: float, noise: int, clock: dict[str, float] | None = None,
) -> list[list[Episode]]:  # fmt: skip
    """Play k episodes of each task to the end; returns one group per task, [len(task_seeds)][k].

    max_tokens is for one turn. `noise` seeds the sampling: the same (noise, task seed, member,
    turn) draws the same random numbers, whatever else is in the batch. An environment that
    raises EnvironmentFailed (bookkeeping/guard.py) loses only that episode.
    Raises FloatingPointError if the policy gives no probabilities any more. clock: the seconds that
    sampling and the environment took are added to its entries "rollout" and "environment".
    """
    if not task_seeds:  # there are more processes than tasks
        return []
    started, sampling = time.perf_counter(), 0.0
    context = getattr(policy.lm.config, "max_position_embeddings", None) or 10**9
    room = min(context, getattr(sampler, "max_len", context)) - max_tokens  # most before a reply
    players = []  # of all episodes, group after group
    for g, seed in enumerate(task_seeds):
        envs = [make_env() for _ in range(k)]
        group = [Player(open_episode(env, seed, g), env, i) for i, env in enumerate(envs)]
        ask_first_question(policy, group, room)
        players += group
    keep = getattr(players[0].env, "max_turns", None) != 1  # the next turn reads only what is new
    active = [p for p in players if p.episode.stop_reason == ""]
    while active:
        now = time.perf_counter()
        prompts = [p.episode.token_ids for p in active]
        seeds = [(noise, p.episode.seed, p.member, p.episode.turns) for p in active]
        caches = [p.cache for p in active]
        samples = sample_each(sampler, prompts, seeds, caches, max_tokens, temperature, keep)
        sampling += time.perf_counter() - now
        for player, sample in zip(active, samples):
            take_turn(policy, player.episode, player.env, sample, room)
            player.cache = sample.cache if player.episode.stop_reason == "" else None
        del samples, sample  # with the caches of finished episodes: their memory is needed
        active = [p for p in active if p.episode.stop_reason == ""]
    for player in players:
        player.episode.policy_version = sampler.version
        finish(player.episode, player.env)
    if clock is not None:  # the rest of the time is spent in the environment and the tokenizer
        clock["rollout"] += sampling
        clock["environment"] += time.perf_counter() - started - sampling
    episodes = [p.episode for p in players]
    return [episodes[g * k : (g + 1) * k] for g in range(len(task_seeds))]


def open_episode(env, seed: int, group: int) -> Episode:
    """An episode whose task has been asked for; its tokens come later."""
    episode = Episode(seed, group, [], [], [], stop_reason="")
    try:
        episode.messages = list(env.reset(seed))
    except EnvironmentFailed as error:
        episode.stop_reason, episode.error = "error", str(error)
    return episode


def ask_first_question(policy: Policy, group: list[Player], room: int) -> None:
    """Give the members of a group their prompt. If it is too long or not shared, all fail."""
    group = [p for p in group if p.episode.stop_reason == ""]
    if not group:
        return
    first, env = group[0].episode, group[0].env
    ids, why = prompt_ids(policy, first.messages, env.tools, env.think), ""
    if any(p.episode.messages != first.messages for p in group):
        why = f"reset({first.seed}) gave two openings, and a group must share one task"
    elif len(ids) > room:
        why = f"task {first.seed}: a prompt of {len(ids)} tokens leaves no room for a reply; "
        why += f"at most {max(room, 0)} do: give a lower --max-tokens or shorter tasks"
    for p in group:
        append_given(p.episode, [] if why else ids)
        p.episode.stop_reason, p.episode.error = "error" if why else "", why


def take_turn(policy: Policy, episode: Episode, env, sample: Sample, room: int) -> None:
    """Append one sampled reply, then the environment's answer; set stop_reason if that ends it.

    room: the most tokens a conversation may have before a reply. Raises FloatingPointError if a
    log-prob is not finite.
    """
    if not all(map(math.isfinite, sample.logprobs)):
        raise FloatingPointError("a token has probability NaN: the policy's weights are broken")
    episode.token_ids += sample.token_ids
    episode.sampled += [True] * len(sample.token_ids)
    episode.logprobs += sample.logprobs
    episode.turns += 1
    said = sample.token_ids[:-1] if sample.finished else sample.token_ids  # no end-of-turn token
    reply = policy.tokenizer.decode(said, skip_special_tokens=False)
    episode.messages.append({"role": "assistant", "content": reply})
    try:
        new_messages, done = env.step(reply)
        over = done or not sample.finished
        delta = [] if over else after_reply(policy, new_messages, env.think)[1]
    except (EnvironmentFailed, ValueError) as error:  # ValueError: the template refused a message
        episode.stop_reason, episode.error = "error", str(error)
        return
    if over:
        episode.stop_reason = "done" if sample.finished else "truncated"
    elif len(episode.token_ids) + len(delta) > room:
        episode.stop_reason = "truncated"  # the next reply would not fit into the model's context
    else:
        episode.messages += new_messages
        append_given(episode, delta)


def append_given(episode: Episode, ids: list[int]) -> None:
    """Append tokens that the policy did not choose: read, and never trained."""
    episode.token_ids += ids
    episode.sampled += [False] * len(ids)
    episode.logprobs += [0.0] * len(ids)


def finish(episode: Episode, env) -> None:
    """Ask for the score. A failed episode gets none: it is in no mean, and not in the loss."""
    if episode.stop_reason == "error":
        return
    try:
        marks = dict(env.score())
    except EnvironmentFailed as error:
        episode.stop_reason, episode.error = "error", str(error)
        return
    episode.reward = float(marks.pop("reward"))
    episode.components = {name: float(value) for name, value in marks.items()}


def expert_episode(policy: Policy, env, seed: int) -> Episode:
    """An Episode spoken by the scripted expert: what SFT learns from. ValueError if it fails."""
    player = Player(open_episode(env, seed, 0), env, 0)
    ask_first_question(policy, [player], 10**9)
    episode = player.episode
    # Not always eos_token: Gemma ends a turn with one token and a text with another.
    end = after_reply(policy, [], env.think)[0] or [policy.tokenizer.eos_token_id]
    while episode.stop_reason == "":
        try:
            said = encode(policy, env.expert_reply()) + end
            take_turn(policy, episode, env, Sample(said, [0.0] * len(said), True), 10**9)
        except EnvironmentFailed as error:
            episode.stop_reason, episode.error = "error", str(error)
    finish(episode, env)
    if episode.stop_reason == "error":
        raise ValueError(f"the expert's episode of task {seed} failed: {episode.error}")
    return episode


if __name__ == "__main__":
    from env_letters import Letters
    from fast.sampler import TorchSampler
    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    make_env = lambda: Letters(difficulty=2, reward="partial", think=True, style="states")
    episode = play(policy, TorchSampler(policy), make_env, [3], 1, 200, 1.0, noise=0)[0][0]
    print("token              sampled  log-prob")
    for token, sampled, logprob in zip(episode.token_ids, episode.sampled, episode.logprobs):
        said = f"policy {logprob:9.3f}" if sampled else "."
        print(f"{policy.tokenizer.decode([token])!r:18} {said}")
    print(f"\nreward {episode.reward:.2f}, {episode.stop_reason}, {episode.components}")
