"""Protects rollouts: an episode holds, token for token, what the policy was shown and what it chose; a group shares one
task; a broken environment costs its own episode only; and the same seeds give the same episodes.
"""

import copy
import re
import signal
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rollout
from bookkeeping import guard
from bookkeeping.guard import Hung, guarded, in_time, told
from env_letters import STYLES, Letters
from fast.sampler import FastDecoder, Sample, TorchSampler
from helpers import Recorder, Scripted, SmallCard, spelled
from rollout import after_reply, encode, expert_episode, prompt_ids, render


def play(policy, sampler, make_env, *given, **more):
    """As train.py plays: every environment is guarded."""
    return rollout.play(policy, sampler, partial(guarded, make_env), *given, **more)


class Chat:
    """A tiny environment: a question, an echo after every reply, the end after `turns` replies."""

    tools = None
    think = True

    def __init__(self, turns: int = 2):
        self.turns, self.replies = turns, []

    def reset(self, seed):
        self.seed, self.replies = seed, []
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"What comes after {seed}?"}]

    def step(self, reply):
        self.replies.append(reply)
        if len(self.replies) == self.turns:
            return [], True
        return [{"role": "user", "content": f"And after that, number {len(self.replies)}?"}], False

    def score(self):
        return {"reward": 0.5, "letters": sum(map(len, self.replies))}


def said(token_ids: list[int], finished: bool = True) -> Sample:
    return Sample(token_ids, [-0.1 * (n + 1) for n in range(len(token_ids))], finished)


@pytest.fixture(scope="module")
def chatty(tiny):
    """A random policy whose replies are short: half of all tokens end one, the real end of turn among them."""
    return replace(tiny, stop_ids=frozenset(range(0, 1024, 2)))


@pytest.fixture(scope="module")
def end(tiny) -> int:
    return tiny.tokenizer.eos_token_id


# ---------------------------------------------------------------------------------------------- groups


def test_a_group_shares_task_seed_and_prompt_and_is_prefilled_once(chatty):
    recorder = Recorder(TorchSampler(chatty))
    seeds = [4, 11, 300]
    groups = play(chatty, recorder, Chat, seeds, 4, 8, 1.0, noise=0)
    prompts, k, _, _ = recorder.calls[0]
    assert len(prompts) == 3 and k == 4  # one prompt a group, not one a member
    for g, (group, seed, prompt) in enumerate(zip(groups, seeds, prompts)):
        assert len(group) == 4
        assert prompt == prompt_ids(chatty, Chat().reset(seed), None, True)
        for episode in group:
            assert (episode.seed, episode.group) == (seed, g)
            assert episode.token_ids[: len(prompt)] == prompt and not any(episode.sampled[: len(prompt)])
            assert episode.messages[:2] == Chat().reset(seed)
    assert len({tuple(p) for p in prompts}) == 3


def test_members_of_a_group_with_different_tasks_cost_their_group_only(tiny, end):
    made = []

    def make_env():
        env, n = Chat(1), len(made)
        same = env.reset
        env.reset = lambda seed: [{"role": "user", "content": f"task {seed} of member {n}"}] if seed == 1 else same(seed)
        made.append(env)
        return env

    torn, whole = play(tiny, Scripted(said([20, end])), make_env, [1, 2], 2, 8, 1.0, noise=0)
    assert all(e.stop_reason == "error" and e.error.startswith("reset(1) gave two openings") and e.token_ids == [] for e in torn)
    assert [e.stop_reason for e in whole] == ["done"] * 2


def test_members_differ_in_what_they_sample(chatty):
    (group,) = play(chatty, TorchSampler(chatty), Chat, [4], 6, 8, 1.0, noise=0)
    assert len({tuple(e.token_ids) for e in group}) > 1


# ---------------------------------------------------------------------------------------------- token-exact


def test_an_episode_is_prompt_sampled_delta_sampled_and_never_rendered_again(tiny, end):
    think = [*encode(tiny, "<think>"), *spelled(tiny, "\ncounting on\n"), *encode(tiny, "</think>")]
    first = [*think, *spelled(tiny, "the number five"), end]
    second = [*think, *spelled(tiny, "the number six"), end]
    sampler = Scripted(said(first), said(second))
    ((episode, twin),) = play(tiny, sampler, Chat, [4], 2, 100, 1.0, noise=0)

    opening = Chat().reset(4)
    prompt = prompt_ids(tiny, opening, None, True)
    question = {"role": "user", "content": "And after that, number 1?"}
    delta = after_reply(tiny, [question], True)[1]
    assert episode.token_ids == prompt + first + delta + second
    assert episode.sampled == [False] * len(prompt) + [True] * len(first) + [False] * len(delta) + [True] * len(second)
    assert episode.logprobs == [0.0] * len(prompt) + said(first).logprobs + [0.0] * len(delta) + said(second).logprobs
    assert sampler.prompts == [[prompt], [prompt + first + delta]]  # the second turn was shown the same tokens, once for both members

    # Premises: both ways of doing it again would have given other tokens.
    reply = tiny.tokenizer.decode(first[:-1])
    assert encode(tiny, reply) != first[:-1]
    again = render(tiny, [*opening, {"role": "assistant", "content": reply}, question], None, True)
    assert "counting on" not in again and "the number five" in again

    assert episode.messages == [
        *opening, {"role": "assistant", "content": reply}, question,
        {"role": "assistant", "content": tiny.tokenizer.decode(second[:-1])},
    ]  # fmt: skip
    assert "<|im_end|>" not in episode.messages[-1]["content"]
    assert (episode.turns, episode.stop_reason, episode.reward, episode.policy_version) == (2, "done", 0.5, 7)
    assert episode.components == {"letters": len(reply) + len(episode.messages[-1]["content"])}
    assert episode.reply_tokens == len(first) + len(second)
    assert twin.token_ids == episode.token_ids


def test_the_mask_is_true_exactly_on_what_a_real_sampler_sampled(chatty):
    recorder = Recorder(TorchSampler(chatty))
    groups = play(chatty, recorder, lambda: Chat(3), [4, 9], 3, 8, 1.0, noise=5)
    parts = {}  # (group, member) -> the samples of its turns, in order
    for prompts, k, seeds, answer in recorder.calls:
        for prompt, row_seeds, samples in zip(prompts, seeds, answer):
            assert len(samples) == k
            for (noise, seed, i, turn), sample in zip(row_seeds, samples):
                assert noise == 5
                parts.setdefault(([4, 9].index(seed), i), []).append((prompt, sample))
                assert len(parts[[4, 9].index(seed), i]) == turn + 1
    turns = set()
    for g, group in enumerate(groups):
        for i, episode in enumerate(group):
            turns.add(episode.turns)
            samples = [sample for _, sample in parts[g, i]]
            assert episode.turns == len(samples)
            assert len(episode.token_ids) == len(episode.sampled) == len(episode.logprobs)
            mine = [n for n, s in enumerate(episode.sampled) if s]
            assert [episode.token_ids[n] for n in mine] == sum((s.token_ids for s in samples), [])
            assert [episode.logprobs[n] for n in mine] == sum((s.logprobs for s in samples), [])
            assert all(episode.logprobs[n] == 0.0 for n, s in enumerate(episode.sampled) if not s)
            for prompt, sample in parts[g, i]:  # every reply follows exactly what the sampler was shown
                at = len(prompt)
                assert episode.token_ids[:at] == prompt
                assert episode.sampled[at : at + len(sample.token_ids)] == [True] * len(sample.token_ids)
    assert max(turns) == 3  # premise: some went all the way


@pytest.mark.parametrize(
    "new",
    [
        [{"role": "user", "content": "And then?"}],
        [{"role": "user", "content": "\n\n  spaces first"}],
        [{"role": "tool", "content": '{"n": 5}'}],
        [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}],
        [{"role": "tool", "content": "1"}, {"role": "user", "content": "And then?"}],
    ],
)
def test_the_delta_is_what_the_template_puts_between_two_turns(tiny, end, new):
    opening = [{"role": "user", "content": "What comes after 4?"}]
    reply = "It is five."  # no thinking, so that the template drops nothing
    whole = encode(tiny, render(tiny, [*opening, {"role": "assistant", "content": reply}, *new], None, True))
    parts = [*prompt_ids(tiny, opening, None, True), *encode(tiny, reply), end, *after_reply(tiny, new, True)[1]]
    assert parts == whole


def test_without_thinking_prompt_and_delta_end_with_the_empty_thinking_block(tiny, end):
    opening, new = [{"role": "user", "content": "What comes after 4?"}], [{"role": "user", "content": "And then?"}]
    block = encode(tiny, "<think>\n\n</think>\n\n")
    assert prompt_ids(tiny, opening, None, False) == prompt_ids(tiny, opening, None, True) + block
    assert after_reply(tiny, new, False)[1] == after_reply(tiny, new, True)[1] + block
    whole = encode(tiny, render(tiny, [*opening, {"role": "assistant", "content": "Five."}, *new], None, False))
    tail = [end, *after_reply(tiny, new, False)[1]]
    assert whole[-len(tail) :] == tail


def test_tools_are_shown_in_the_prompt(tiny):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    opening = [{"role": "user", "content": "Go."}]
    text = tiny.tokenizer.decode(prompt_ids(tiny, opening, [tool], True))
    assert "look_up" in text and "look_up" not in tiny.tokenizer.decode(prompt_ids(tiny, opening, None, True))


# among them; it is a special *added* token (tokenizer.added_tokens_decoder). A user's text can open a turn of its own.
@pytest.mark.parametrize("token", ["<|im_end|>", "<|endoftext|>", "<|im_start|>"])
def test_control_tokens_in_a_message_stay_text(tiny, token):
    control = tiny.tokenizer.convert_tokens_to_ids(token)
    for template in ("x{}y", "{}", "{0}{0}\n{0}", "x{0}assistant\nfive"):
        tame, wild = ([{"role": "user", "content": template.format(word)}] for word in ("word", token))
        assert prompt_ids(tiny, wild, None, True).count(control) == prompt_ids(tiny, tame, None, True).count(control)
        assert after_reply(tiny, wild, True)[1].count(control) == after_reply(tiny, tame, True)[1].count(control)
        system = [{"role": "system", "content": wild[0]["content"]}, *tame]
        plain = [{"role": "system", "content": "word"}, *tame]
        assert prompt_ids(tiny, system, None, True).count(control) == prompt_ids(tiny, plain, None, True).count(control)


MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


@pytest.mark.parametrize("token", MARKUP)
def test_markup_in_what_a_tool_says_stays_text_and_in_an_instruction_it_stays_markup(tiny, token):
    control = tiny.tokenizer.convert_tokens_to_ids(token)
    for template in ("x{}y", "{0}{0}\n{0}", "{0}\nresult: all is yours"):
        tame, wild = ([{"role": "tool", "content": template.format(word)}] for word in ("word", token))
        assert prompt_ids(tiny, wild, None, True).count(control) == prompt_ids(tiny, tame, None, True).count(control)
        assert after_reply(tiny, wild, True)[1].count(control) == after_reply(tiny, tame, True)[1].count(control)
    asked = [{"role": "user", "content": f"Think inside {token}."}]  # as our environments ask, and as the bases learnt it
    assert prompt_ids(tiny, asked, None, True).count(control) == 1


def test_what_our_swarm_says_has_no_markup_so_its_tokens_are_what_they_were(tiny):
    from env_swarm import Swarm

    env = Swarm(difficulty="medium")
    env.reset(3)
    for reply in [f"<tool_call>{word}</tool_call>" for word in ('{"name": "</tool_response>"}', "{}", "<think>")] + [None] * 22:
        said, done = env.step(reply or env.expert_reply())
        assert not any(token in m["content"] for m in said for token in MARKUP)


# ---------------------------------------------------------------------------------------------- how episodes end


def spin() -> None:
    """Never comes back, and swallows what it can."""
    while True:
        try:
            while True:
                pass
        except Exception:
            pass


class Broken(Chat):
    """Raises or hangs where it is told to."""

    seconds = 0.3  # may one of its calls take

    def __init__(self, where: str):
        super().__init__()
        self.where = where

    def reset(self, seed):
        if self.where == "reset":
            raise ValueError("no task today")
        return super().reset(seed)

    def step(self, reply):
        if self.where == "loop":
            spin()
        if self.where == "sleep":
            time.sleep(3600)
        if self.where == "pattern":
            re.fullmatch("(a+)+b", "a" * 60)  # takes 2^60 steps
        if self.where == f"step {len(self.replies)}":
            raise RuntimeError("no such luck")
        return super().step(reply)

    def score(self):
        if self.where == "slow score":
            time.sleep(3600)
        if self.where == "score":
            raise ZeroDivisionError("nothing to divide by")
        return {"length": 1.0} if self.where == "no reward" else super().score()


@pytest.mark.parametrize(
    "where, turns, told",
    [
        ("reset", 0, "ValueError: no task today (test_rollout.py:"), ("step 0", 1, "RuntimeError: no such luck (test_rollout.py:"),
        ("step 1", 2, "RuntimeError: no such luck"), ("score", 2, "ZeroDivisionError: nothing to divide by (test_rollout.py:"),
        ("no reward", 2, "score (test_rollout.py:"), ("loop", 1, "Hung: no answer within 0.3 seconds (test_rollout.py:"),
        ("sleep", 1, "Hung: "), ("pattern", 1, "Hung: "), ("slow score", 2, "Hung: "),
    ],
)  # fmt: skip
def test_an_environment_that_raises_or_hangs_costs_its_own_episode_only(chatty, where, turns, told):
    def run(broken: int):
        made = []

        def make_env():
            made.append(Broken(where if len(made) == broken else "nowhere"))
            return made[-1]

        return sum(play(chatty, TorchSampler(chatty), make_env, [4, 9], 3, 30, 1.0, noise=0), [])

    whole = run(broken=-1)
    assert all(e.stop_reason == "done" and e.turns == 2 for e in whole)  # premise: all would have ended well
    for n, (a, b) in enumerate(zip(whole, run(broken=1))):
        if n == 1:
            assert b.stop_reason == "error" and b.error.startswith(told) and b.reward == 0.0 and b.turns == turns
            assert len(b.token_ids) == len(b.sampled) == len(b.logprobs)
        else:
            assert (b.token_ids, b.sampled, b.reward, b.stop_reason) == (a.token_ids, a.sampled, a.reward, "done")
            assert np.allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_a_group_whose_task_cannot_be_had_at_all_is_left_out(chatty):
    made = []

    def make_env():
        made.append(Broken("reset" if len(made) < 3 else "nowhere"))
        return made[-1]

    lost, played = play(chatty, TorchSampler(chatty), make_env, [4, 9], 3, 30, 1.0, noise=0)
    assert [(e.stop_reason, e.token_ids, e.turns) for e in lost] == [("error", [], 0)] * 3
    (alone,) = play(chatty, TorchSampler(chatty), lambda: Broken("nowhere"), [9], 3, 30, 1.0, noise=0)
    assert [e.token_ids for e in played] == [e.token_ids for e in alone]
    everything = play(chatty, TorchSampler(chatty), lambda: Broken("reset"), [4, 9], 2, 30, 1.0, noise=0)
    assert {e.stop_reason for group in everything for e in group} == {"error"}


def test_a_call_that_is_done_in_time_is_not_interrupted_later_and_other_alarms_come_back():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        env = Broken("nowhere")
        assert in_time(env, lambda x: x + 1, 4) == 5
        with pytest.raises(Hung):
            in_time(env, spin)
        time.sleep(1.2)  # a timer that was left behind would ring after a second
        assert rung == []
        signal.raise_signal(signal.SIGALRM)
        assert rung == [1]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_in_another_thread_a_loop_is_ended_too_and_what_comes_after_it_is_not():
    """There are no timer signals there, nor on Windows. A sleep is not interrupted, but it is too late when it is over."""

    def seen(call) -> list:
        try:
            found = [in_time(Broken("nowhere"), call)]
        except Hung as late:
            found = [told(late)]
        until = time.monotonic() + 0.5
        while time.monotonic() < until:  # what was thrown twice or too late would arrive in here
            pass
        return found

    def stubborn():
        try:
            spin()
        except BaseException:
            spin()  # it swallows the first one, so that another has to come

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(seen, lambda: "done").result() == ["done"]
        assert pool.submit(seen, lambda: time.sleep(0.35) or sum(range(10))).result()[0].startswith("Hung: no answer within 0.3 seconds")
        for loop in (spin, stubborn):
            assert pool.submit(seen, loop).result()[0].startswith("Hung: no answer within 0.3 seconds (test_rollout.py:")


def test_an_error_is_one_line_that_is_safe_to_print():
    error = told(ValueError("bad\x1b[2J\n\u202ecall " + "x" * 1000))
    assert error.startswith("ValueError: bad?[2J ?call xxx") and len(error) < 400 and error.isprintable()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_policy_of_nan_is_noticed_when_it_speaks(load, temperature):
    policy = load("qwen3", lora_rank=2)
    next(p for name, p in policy.trainable().items() if "lora_B" in name).data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="weights are broken"):
        play(policy, TorchSampler(policy), Chat, [4], 2, 8, temperature, noise=0)


def test_one_token_without_a_probability_among_others_is_noticed(tiny):
    sample = Sample([20, 21], [-0.5, float("nan")], finished=False)
    with pytest.raises(FloatingPointError, match="weights are broken"):
        rollout.take_turn(tiny, rollout.Episode(4, 0, [], [], []), Chat(1), sample, 100)


def test_a_reply_that_runs_out_of_tokens_is_truncated_and_scored(tiny):
    policy = replace(tiny, stop_ids=frozenset({-1}))  # nothing ends a reply
    ((episode,),) = play(policy, TorchSampler(policy), lambda: Chat(2), [4], 1, 6, 1.0, noise=0)
    assert (episode.stop_reason, episode.turns, episode.reply_tokens) == ("truncated", 1, 6)
    assert episode.sampled[-6:] == [True] * 6 and episode.reward == 0.5
    assert episode.messages[-1]["content"] == policy.tokenizer.decode(episode.token_ids[-6:])  # no token of it is cut off


def test_a_reply_that_is_cut_is_truncated_even_if_the_environment_wanted_only_one(tiny, end):
    cut, whole = (play(tiny, Scripted(said([20, end], finished)), lambda: Chat(1), [4], 1, 2, 1.0, noise=0) for finished in (False, True))
    assert (cut[0][0].stop_reason, whole[0][0].stop_reason) == ("truncated", "done")
    assert cut[0][0].turns == 1 and cut[0][0].reward == 0.5  # it is scored all the same


@pytest.mark.parametrize("missing, turns, reason", [(0, 2, "done"), (1, 1, "truncated")])
def test_a_conversation_that_fits_exactly_is_played_on_and_with_a_token_more_it_is_cut(tiny, end, missing, turns, reason):
    """The window holds the opening, a reply, what is said to it, and a second reply of max_tokens, or one token less."""
    reply = said([20, 30, end])
    sampler = Scripted(reply, reply)
    delta = after_reply(tiny, Chat().step("")[0], True)[1]
    sampler.max_len = len(prompt_ids(tiny, Chat().reset(4), None, True)) + 3 + len(delta) + 3 - missing
    ((episode,),) = play(tiny, sampler, Chat, [4], 1, 3, 1.0, noise=0)
    assert (episode.turns, episode.stop_reason) == (turns, reason)
    assert len(episode.token_ids) == (sampler.max_len if turns == 2 else sampler.max_len + 1 - len(delta) - 3)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_prompt_that_fits_exactly_is_played_and_one_token_more_costs_its_group(tiny, end, missing):
    sampler = Scripted(said([20, 30, end]))
    sampler.max_len = len(prompt_ids(tiny, Chat().reset(4), None, True)) + 3 - missing
    episode = play(tiny, sampler, lambda: Chat(1), [4], 1, 3, 1.0, noise=0)[0][0]
    assert episode.stop_reason == ("error" if missing else "done")
    if missing:
        assert episode.error.startswith("task 4: a prompt of ") and "lower --max-tokens" in episode.error and not sampler.prompts


@pytest.fixture(scope="module")
def long_talk(tiny, end):
    """(episode, prompts shown to the sampler, context window): replies of 151 tokens until the window is full."""
    sampler = Scripted(*[said([*spelled(tiny, "a" * 150), end])] * 10)
    ((episode,),) = play(tiny, sampler, lambda: Chat(10), [4], 1, 151, 1.0, noise=0)
    return episode, [prompt for prompts in sampler.prompts for prompt in prompts], tiny.lm.config.max_position_embeddings


def test_an_episode_that_would_leave_the_context_window_is_truncated(long_talk):
    episode, prompts, limit = long_talk
    assert episode.stop_reason == "truncated" and 1 < episode.turns < 10 and episode.reward == 0.5
    assert all(len(prompt) + 151 <= limit for prompt in prompts)  # there was room for every reply


def test_what_the_trainer_gets_fits_into_the_context_window(long_talk):
    # that nobody answers and that passes the window: a waste with rotary positions, an IndexError in training with learned ones.
    episode, _, limit = long_talk
    assert len(episode.token_ids) <= limit


# ---------------------------------------------------------------------------------------------- same seeds, same episodes


def test_an_episode_does_not_depend_on_the_rest_of_the_batch(chatty):
    sampler = TorchSampler(chatty)
    run = lambda seeds, k, noise=3: play(chatty, sampler, lambda: Chat(3), seeds, k, 8, 1.0, noise)
    batch = run([4, 9, 123], 3)
    for g, seed in enumerate([4, 9, 123]):
        for other in (run([seed], 3)[0], run([123, 9, 4], 3)[2 - g], run([seed], 5)[0]):
            for a, b in zip(batch[g], other):
                assert (a.token_ids, a.sampled, a.stop_reason) == (b.token_ids, b.sampled, b.stop_reason)
                assert np.allclose(a.logprobs, b.logprobs, atol=1e-4)
    assert max(e.turns for group in batch for e in group) > 1  # premise: later turns are tested too
    assert [e.token_ids for e in run([4], 3, noise=4)[0]] != [e.token_ids for e in batch[0]]


# ---------------------------------------------------------------------------------------------- where the seconds go


def test_what_the_sampler_takes_is_rollout_and_the_rest_is_the_environment(tiny, end, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(rollout, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def takes(seconds, function):
        def slow(*args, **named):
            now[0] += seconds
            return function(*args, **named)

        return slow

    class Slow(Chat):
        reset, step, score = takes(1, Chat.reset), takes(10, Chat.step), takes(100, Chat.score)

    reply = said([*encode(tiny, "five"), end])
    sampler = Scripted(reply, reply, reply)
    sampler.sample = takes(1000, sampler.sample)
    clock = {"rollout": 0.5, "environment": 0.25, "sync": 7.0}  # is added to
    play(tiny, sampler, lambda: Slow(3), [4, 9], 2, 8, 1.0, 0, clock)
    assert clock == {"rollout": 0.5 + 3 * 1000, "environment": 0.25 + 4 * (1 + 3 * 10 + 100), "sync": 7.0}


def test_the_clock_changes_no_episode(chatty):
    clock = {"rollout": 0.0, "environment": 0.0}
    run = lambda *clock: play(chatty, TorchSampler(chatty), lambda: Chat(3), [4, 9], 3, 8, 1.0, 5, *clock)
    assert run(clock) == run() == run(None)
    assert clock["rollout"] > 0 and clock["environment"] > 0


# ---------------------------------------------------------------------------------------------- the expert


@pytest.mark.parametrize("think", [True, False])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("difficulty", [1, 4, 6])
def test_the_expert_scores_1_and_its_mask_covers_exactly_its_reply_and_the_stop_token(tiny, end, difficulty, style, think):
    env = Letters(difficulty=difficulty, reward="binary", think=think, style=style)
    episode = expert_episode(tiny, env, seed=difficulty)
    assert episode.reward == episode.components["exact"] == 1.0 and episode.stop_reason == "done"
    assert len(episode.token_ids) == len(episode.sampled) == len(episode.logprobs)
    mine = [token for token, s in zip(episode.token_ids, episode.sampled) if s]
    assert mine[-1] == end and mine.count(end) == 1
    assert tiny.tokenizer.decode(mine[:-1]) == env.expert_reply()
    prompt = prompt_ids(tiny, env.reset(difficulty), None, think)
    assert episode.token_ids == prompt + mine and episode.sampled == [False] * len(prompt) + [True] * len(mine)


def test_the_expert_ends_a_turn_with_what_the_template_ends_it_with(tiny, end):
    """Gemma's eos_token ends a text and another token a turn: SFT must teach the one that the template writes."""
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.eos_token = "<|endoftext|>"
    gemma = replace(tiny, tokenizer=tokenizer, stop_ids=frozenset([end, tokenizer.eos_token_id]))
    env = Letters(difficulty=1, reward="binary", think=True, style="states")
    assert tokenizer.eos_token_id != end and expert_episode(gemma, env, 1) == expert_episode(tiny, env, 1)


def test_an_expert_of_two_turns_learns_both_replies_and_not_what_stands_between(tiny, end):
    class Counting(Chat):
        def expert_reply(self):
            return f"<think>\nplus one\n</think>\n{self.seed + len(self.replies) + 1}"

    episode = expert_episode(tiny, Counting(), 4)
    mine = [token for token, s in zip(episode.token_ids, episode.sampled) if s]
    text = "<think>\nplus one\n</think>\n{}<|im_end|>"
    assert tiny.tokenizer.decode(mine) == text.format(5) + text.format(6)
    assert episode.turns == 2 and mine.count(end) == 2 and episode.reward == 0.5


# ---------------------------------------------------------------------------------------------- memory


@pytest.fixture(scope="module")
def long_conversations(load):
    """play(size, turns) -> (the card, episodes): 12 conversations of so many turns at once on a card of so many bytes."""
    policy = load("pico")
    policy = replace(policy, stop_ids=frozenset(range(0, 1024, 2)))

    def run(size: float = float("inf"), turns: int = 25):
        sampler = TorchSampler(policy)
        with SmallCard(size) as card:
            groups = play(policy, sampler, lambda: Chat(turns), range(12), 1, 16, 1.0, noise=0)
        return card, [g[0] for g in groups]

    return run


def test_the_caches_of_a_conversation_are_in_memory_once(long_conversations, pico):
    card, episodes = long_conversations()
    assert sum(e.turns == 25 for e in episodes) > 6  # premise
    config = pico.lm.config
    token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    once = 12 * max(len(e.token_ids) for e in episodes) * token  # bytes: keys and values of all, padded
    assert card.peak < 2.3 * once  # while rows finish, theirs are kept beside the batch's; it was 3 before they were given back


def test_resuming_holds_no_more_than_one_layer_twice(pico):
    decoder, ids, pad = FastDecoder(pico), torch.arange(1, 401).view(4, 100), torch.zeros(4, dtype=torch.long)
    with torch.inference_mode(), SmallCard() as card:
        decoder.prefill(ids, pad, 1, 1)
        caches = decoder.take(torch.arange(4))
        decoder.forget()
        held = card.peak = card.now
        decoder.prefill(torch.cat([ids, ids[:, :1]], 1), pad, 1, 1, caches)
    assert caches == [[]] * 4 and card.peak < held * (1 + 1.5 / len(decoder.layers))


def test_the_cache_of_an_episode_that_has_ended_is_not_kept(pico):
    """Task 4 ends after one reply, task 5 after two."""
    kept, alive = [], []

    class Watched(TorchSampler):
        def sample(self, *given, **more):
            alive.append([ref() is not None for ref in kept])
            groups = super().sample(*given, **more)
            kept.extend(weakref.ref(s.cache[0]) for samples in groups for s in samples if s.cache)
            return groups

    class Uneven(Chat):
        def step(self, reply):
            said, done = super().step(reply)
            return said, done or self.seed == 4

    policy = replace(pico, stop_ids=frozenset(range(1024)))  # every reply is a token
    play(policy, Watched(policy), Uneven, [4, 5], 1, 4, 1.0, noise=0)
    assert alive == [[], [False, True]]


def test_on_a_small_card_first_the_kept_caches_go_and_then_rows_and_all_is_played_to_the_end(long_conversations):
    roomy, expected = long_conversations(turns=10)
    for share in (0.6, 0.3):
        card, episodes = long_conversations(share * roomy.peak, turns=10)
        assert card.refused > 1  # premise
        assert [(e.token_ids, e.stop_reason) for e in episodes] == [(e.token_ids, e.stop_reason) for e in expected]


def test_prompts_that_begin_otherwise_in_sft_are_told_with_the_words_that_differ(monkeypatch):
    """The usual cause is two chat templates. The third token differs, and six of each are shown."""
    words = lambda text: [ord(letter) for letter in text]
    policy = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: "".join(map(chr, ids))))
    env = SimpleNamespace(reset=lambda seed: [], tools=None, think=True)
    monkeypatch.setattr(rollout, "prompt_ids", lambda *_: words("abCDEFGHIJ"))
    for shown, names in (("abcdefghijk", {"template"}), ("abCDEFGHIJklm", set())):
        monkeypatch.setattr(guard.sft, "expert_episode", lambda *_, shown=shown: SimpleNamespace(token_ids=words(shown)))
        found = guard.other_opening(policy, env, 0)
        assert set(found) == names
        assert not names or "token 2 on, 'CDEFGH' and not 'cdefgh'" in found["template"]
