"""Rollouts: a policy plays episodes. Chat becomes token ids here, and nowhere else.

    seed -> env.reset -> messages -> template -> prompt ids -> sampler -> reply ids -> text -> env.step -> …

The one rule is *token-exact*: what the trainer sees is, token for token, what was sampled. A reply is never decoded and
tokenized again (the second cut can differ from the first), and never rendered by the template again (Qwen3's drops
the thinking of earlier turns). Text that the template puts between two turns is appended as a delta.

    token_ids   <|im_start|> user … <|im_end|> <|im_start|> assistant | <think> b a1 … </answer> <|im_end|>
    sampled      0            0  0   0          0            0          1       1 1  1 1          1
                 the prompt: nobody's choice                          the policy's choices, its stop token included

A group is k episodes of the *same* task: same seed, same prompt, different random numbers.

Run me: `python rollout.py` plays one episode with pico_base and prints every token with its source and log-prob.
"""

import math
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import TemplateError

from bookkeeping.records import printable
from fast.sampler import Sample, TorchSampler
from policy import Policy

ENV_SECONDS = 60.0  # what one call of an environment may take; one that needs more (a judge over the network) sets `seconds` on itself


@dataclass
class Episode:
    seed: int  # of the task
    group: int  # episodes of one group share the task and the prompt
    token_ids: list[int]  # the whole conversation
    sampled: list[bool]  # True exactly where the policy chose the token
    logprobs: list[float]  # of each token when it was sampled, in nats; 0.0 where it was not
    turns: int = 0  # replies given
    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)  # everything else that env.score() tells
    stop_reason: str = "done"  # or "truncated" (out of tokens), "error" (the environment raised, or gave no answer in time), "" (goes on)
    policy_version: int = 0  # how many updates the policy had seen that sampled it
    messages: list[dict] = field(default_factory=list)  # the conversation as text, for people to read
    error: str = ""  # what happened, in one line, where stop_reason is "error"

    @property
    def reply_tokens(self) -> int:
        """How many tokens the policy chose, over all turns."""
        return sum(self.sampled)


def render(policy: Policy, messages: list[dict], tools, think: bool, generate: bool = True) -> str:
    """The chat template, as text. Control tokens inside a message's content are broken up: text stays text.

    tools: JSON schemas, or None. generate: end where the policy begins to speak. ValueError if the template refuses the conversation.
    """
    safe = [{**m, "content": defang(policy.tokenizer, m["content"])} for m in messages]
    try:
        return policy.tokenizer.apply_chat_template(
            safe, tools=tools, add_generation_prompt=generate, enable_thinking=think, tokenize=False
        )
    except TemplateError as error:
        roles = ", ".join(m["role"] for m in messages)
        raise ValueError(
            f"the chat template of {policy.name} refuses a conversation of {roles} ({error}); use a model that takes it"
        ) from None


def defang(tokenizer, text: str) -> str:
    """Put a space into anything that would be read as a control token: '<|im_end|>' -> '< |im_end|>'."""
    for token in {t.content for t in tokenizer.added_tokens_decoder.values() if t.special} | set(tokenizer.all_special_tokens):
        if token in text:
            text = text.replace(token, token[0] + " " + token[1:])
    return text


def encode(policy: Policy, text: str) -> list[int]:
    """Token ids of a text as it is: no token is added before or after it."""
    return policy.tokenizer(text, add_special_tokens=False)["input_ids"]


def prompt_ids(policy: Policy, messages: list[dict], tools, think: bool) -> list[int]:
    """Token ids of an opening prompt, up to where the policy begins to speak."""
    return encode(policy, render(policy, messages, tools, think))


def delta_ids(policy: Policy, new_messages: list[dict], think: bool) -> list[int]:
    """Token ids between a sampled reply and the next one: the end of the turn, the new messages, the next opening.

    Found by rendering a marker in the reply's place and keeping what follows it, so it holds for any template.
    The end-of-turn token itself is left out: the policy sampled it.
    """
    marker = "@@reply@@"
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marker}]
    after = render(policy, history + new_messages, None, think).partition(marker)[2]
    ids = encode(policy, after)
    return ids[1:] if ids and ids[0] in policy.stop_ids else ids


def play(
    policy: Policy,
    sampler: TorchSampler,
    make_env: Callable[[], object],
    task_seeds: list[int],
    k: int,
    max_tokens: int,
    temperature: float,
    noise: int,
    clock: dict[str, float] | None = None,
) -> list[list[Episode]]:
    """Play k episodes of each task to the end; returns one group a task, [len(task_seeds)][k].

    max_tokens is for one turn. `noise` seeds the sampling: the same (noise, task seed, member, turn) draws the same
    random numbers whatever else is in the batch. An environment that raises or hangs costs its own episode only.
    Raises FloatingPointError where the policy gives no probabilities any more, ValueError where a prompt does not fit.
    clock: the seconds that sampling and the environment took are added to its entries "rollout" and "environment".
    """
    if not task_seeds:  # there are more processes than tasks
        return []
    started, sampling = time.perf_counter(), 0.0
    envs = [[make_env() for _ in range(k)] for _ in task_seeds]
    think = [group[0].think for group in envs]
    limit = getattr(policy.lm.config, "max_position_embeddings", None) or 10**9
    limit = min(limit, getattr(sampler, "max_len", limit))  # an engine may have room for less
    groups = [[opened(env, seed, g) for env in group] for g, (seed, group) in enumerate(zip(task_seeds, envs))]
    able = []  # groups of which at least one member has begun
    for g, group in enumerate(groups):
        begun = [e for e in group if e.stop_reason != "error"]
        if not begun:
            continue
        assert all(e.messages == begun[0].messages for e in begun), "a group must share one task"
        ids = prompt_ids(policy, begun[0].messages, envs[g][0].tools, think[g])
        if len(ids) + max_tokens > limit:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and --max-tokens {max_tokens} exceed the model's context of {limit}; lower --max-tokens"
            )
        for e in group:
            e.token_ids, e.sampled, e.logprobs = list(ids), [False] * len(ids), [0.0] * len(ids)
        able.append(g)
    # First turn: one prompt a group, prefilled once and sampled k times. Later turns differ between members.
    prompts, seeds = [groups[g][0].token_ids for g in able], [[(noise, task_seeds[g], i, 0) for i in range(k)] for g in able]
    one_turn = getattr(envs[0][0], "max_turns", None) == 1
    t = time.perf_counter()
    replies = sampler.sample(prompts, k, max_tokens, temperature, seeds, keep=not one_turn) if able else []
    sampling += time.perf_counter() - t
    live = [(g, i, answers[i]) for g, answers in zip(able, replies) for i in range(k) if groups[g][i].stop_reason != "error"]
    while live:
        going_on = []
        for g, i, sample in live:
            episode, env = groups[g][i], envs[g][i]
            take_turn(policy, episode, env, sample, think[g], limit - max_tokens)
            if episode.stop_reason == "":
                going_on.append((g, i, sample.cache))  # what has been read is not read again
        if not going_on:
            break
        prompts = [groups[g][i].token_ids for g, i, _ in going_on]
        seeds = [[(noise, groups[g][i].seed, i, groups[g][i].turns)] for g, i, _ in going_on]
        t = time.perf_counter()
        answers = sampler.sample(prompts, 1, max_tokens, temperature, seeds, caches=[c for _, _, c in going_on], keep=True)
        sampling += time.perf_counter() - t
        live = [(g, i, answer[0]) for (g, i, _), answer in zip(going_on, answers)]
    for group, group_envs in zip(groups, envs):
        for episode, env in zip(group, group_envs):
            episode.policy_version = sampler.version
            finish(episode, env)
    if clock is not None:  # what is not sampling is the environment: its rules, and cutting its texts into tokens
        clock["rollout"] += sampling
        clock["environment"] += time.perf_counter() - started - sampling
    return groups


def opened(env, seed: int, group: int) -> Episode:
    """An episode whose task has been asked for; its tokens come later."""
    episode = Episode(seed, group, [], [], [])
    try:
        episode.messages = list(in_time(env, env.reset, seed))
    except (Exception, Hung) as error:
        fail(episode, error)
    return episode


def take_turn(policy: Policy, episode: Episode, env, sample: Sample, think: bool, room: int) -> None:
    """Append one sampled reply, let the environment answer, append that. stop_reason "" means: go on.

    room: the most tokens that a conversation may have before a reply. Raises FloatingPointError if a log-prob is not finite.
    """
    if not all(map(math.isfinite, sample.logprobs)):
        raise FloatingPointError("the policy gave a token no probability (NaN): its weights are broken")
    episode.token_ids += sample.token_ids
    episode.sampled += [True] * len(sample.token_ids)
    episode.logprobs += sample.logprobs
    episode.turns += 1
    said = sample.token_ids[:-1] if sample.finished else sample.token_ids  # without the end-of-turn token
    reply = policy.tokenizer.decode(said, skip_special_tokens=False)
    episode.messages.append({"role": "assistant", "content": reply})
    try:
        new_messages, done = in_time(env, env.step, reply)
        delta = [] if done or not sample.finished else delta_ids(policy, new_messages, think)
    except (Exception, Hung) as error:  # one broken episode must not end a run of days
        return fail(episode, error)
    if done or not sample.finished:
        episode.stop_reason = "done" if sample.finished else "truncated"
        return
    if len(episode.token_ids) + len(delta) > room:  # the next reply would not fit into the model's context
        episode.stop_reason = "truncated"
        return
    episode.stop_reason = ""
    episode.messages += new_messages
    episode.token_ids += delta
    episode.sampled += [False] * len(delta)
    episode.logprobs += [0.0] * len(delta)


def finish(episode: Episode, env) -> None:
    """Ask for the score. An episode in error gets none, and is left out of every mean and of the loss."""
    if episode.stop_reason == "error":
        return
    try:
        marks = dict(in_time(env, env.score))
        episode.reward = float(marks.pop("reward"))
        if not math.isfinite(episode.reward):
            raise ValueError(f"the reward is {episode.reward}")
        episode.components = {name: float(value) for name, value in marks.items()}
    except (Exception, Hung) as error:
        fail(episode, error)


class Hung(BaseException):
    """No answer in time. Not an Exception, so that an environment's own `except Exception` does not swallow it."""


def in_time(env, call: Callable, *given):
    """call(*given), or Hung after env.seconds (ENV_SECONDS). Outside a main thread, and on Windows, there is no time limit: signals need both.

    A timer signal interrupts whatever Python is doing, loops, sleeps and regular expressions included, but not C code that never comes back
    to Python. A thread with a deadline would not do: nobody can end it, and a loop in it would take every second turn of the interpreter
    from then on.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return call(*given)
    armed = True

    def ring(*_):
        if armed:
            raise Hung(f"no answer within {seconds:g} seconds")

    seconds, before = getattr(env, "seconds", ENV_SECONDS), signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # and every second again, if it is swallowed after all
        return call(*given)
    finally:
        while True:  # it may ring in these very lines
            try:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
                break
            except Hung:
                pass


def fail(episode: Episode, error: BaseException) -> None:
    """Mark an episode as broken, with what happened and where, in one line that is safe to print (a reply may stand in it)."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    own = [f for f in frames if f.filename == frames[0].filename and f.name != "ring"]  # the environment's, not those of what it calls
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    text = " ".join(str(error).split())[:300]
    episode.stop_reason = "error"
    episode.error = f"{type(error).__name__}: {printable(text)}{where}"


def segments(policy: Policy, episode: Episode, ratios: list[float] | None) -> list[dict]:
    """An episode cut where the speaker changes: text that was given, and the policy's own tokens with log-probs and ratios.

    ratios: the importance ratio of each sampled token, [episode.reply_tokens], or None.
    """
    out, at, used = [], 0, 0
    while at < len(episode.token_ids):
        mine, end = episode.sampled[at], at
        while end < len(episode.token_ids) and episode.sampled[end] == mine:
            end += 1
        ids = episode.token_ids[at:end]
        if mine:
            out.append({
                "role": "policy", "tokens": [policy.tokenizer.decode([t]) for t in ids], "logprobs": [round(x, 4) for x in episode.logprobs[at:end]],
                "ratios": ratios and [round(x, 4) for x in ratios[used : used + len(ids)]],
            })  # fmt: skip
            used += len(ids)
        else:
            out.append({"role": "given", "text": policy.tokenizer.decode(ids)})
        at = end
    return out


def expert_episode(policy: Policy, env, seed: int) -> Episode:
    """The same Episode, spoken by the environment's scripted expert: what SFT learns from. log-probs are 0.0."""
    messages = env.reset(seed)
    ids = prompt_ids(policy, messages, env.tools, env.think)
    episode = Episode(seed, 0, ids, [False] * len(ids), [0.0] * len(ids), messages=list(messages), stop_reason="")
    while episode.stop_reason == "":
        said = encode(policy, env.expert_reply()) + [policy.tokenizer.eos_token_id]
        take_turn(policy, episode, env, Sample(said, [0.0] * len(said), finished=True), env.think, 10**9)
    finish(episode, env)
    return episode


if __name__ == "__main__":
    from env_letters import Letters
    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    make_env = lambda: Letters(difficulty=2, reward="partial", think=True, style="states")
    episode = play(policy, TorchSampler(policy), make_env, [3], 1, 200, 1.0, noise=0)[0][0]
    print("token              sampled  log-prob")
    for token, mine, logprob in zip(episode.token_ids, episode.sampled, episode.logprobs):
        print(f"{policy.tokenizer.decode([token])!r:18} {'policy' if mine else '.':7} {f'{logprob:8.3f}' if mine else ''}")
    print(f"\nreward {episode.reward:.2f}, {episode.stop_reason}, {episode.reply_tokens} tokens of its own, {episode.components}")
