"""Protects the claim that any string is a legal reply, in every environment and turn: it never
raises, its reward is bounded, the same replies earn the same, and no text becomes a control token.
"""

import itertools
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bookkeeping.guard import Guarded
from env_alphabet import Alphabet
from env_letters import Letters
from env_swarm import Swarm
from hostile import LONG, WAYS, replies, soup
from rollout import after_reply, prompt_ids

think, amounts = st.booleans(), st.sampled_from([0.0, 0.5, 2.0])
ENVS = {
    "letters": st.builds(
        Letters,
        difficulty=st.sampled_from([1, 3, 6, 10]),
        reward_kind=st.sampled_from(["binary", "partial"]),
        think=think,
        style=st.just("derives"),
    ),
    "alphabet": st.builds(
        Alphabet,
        min_turns=st.just(1),
        max_turns=st.integers(1, 3),
        min_names=st.just(1),
        max_names=st.integers(1, 4),
        similarity_power=st.sampled_from([0.5, 8.0]),
        power_per_turn=st.booleans(),
        think=think,
        style=st.just("derives"),
    ),
    "swarm": st.builds(
        Swarm,
        difficulty=st.sampled_from(["easy", "medium", "hard"]),
        version=st.sampled_from(["0.2", "0.1"]),
        think=think,
        payoff=amounts,
        diversity=amounts,
        floor_penalty=amounts,
        error_penalty=amounts,
    ),
}
said = st.lists(st.tuples(st.sampled_from(WAYS), replies), min_size=1, max_size=6)
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]


def bounds(env) -> tuple[float, float]:
    """The lowest and the highest reward that the rules allow."""
    if not isinstance(env, Swarm):
        return 0.0, 1.0
    penalties = env.floor_penalty * env.floor / 100 + env.error_penalty
    return -penalties, env.payoff + env.reputation + env.quality + env.diversity


def check_messages(messages: list[dict]) -> None:
    for message in messages:
        message["content"].encode("utf8")  # half a character would raise
        assert len(message["content"]) < 10_000
        assert message["role"] != "tool" or "<" not in message["content"]


def play(env, seed: int, said: list) -> tuple[list, dict]:
    """An episode of these replies, again and again; (all messages, the score).

    A run plays these environments without a guard, so here the guard has nothing to catch.
    """
    env = Guarded(env, AssertionError)
    told, done = env.reset(seed), False
    ways = itertools.cycle(said)
    while not done:
        way, text = next(ways)
        messages, done = env.step(way(env.expert_reply(), text))
        check_messages(messages)
        told = told + messages
    return told, env.score()


@pytest.mark.parametrize("name", ENVS)
@settings(max_examples=150, deadline=None, suppress_health_check=slow)
@given(data=st.data(), seed=st.integers(0, 2**32), said=said)
def test_any_string_is_a_legal_reply(name, data, seed, said):
    env = data.draw(ENVS[name])
    told, score = play(env, seed, said)
    low, high = bounds(env)
    assert all(math.isfinite(value) for value in score.values())
    assert low - 1e-9 <= score["reward"] <= high + 1e-9
    assert play(env, seed, said) == (told, score)


@pytest.mark.parametrize("name", ENVS)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_a_megabyte_comes_to_an_end(name, data):
    env = data.draw(ENVS[name])
    for text in LONG:
        play(env, 1, [(way, text) for way in WAYS])


@pytest.mark.parametrize("model", ["pico", "pico_swarm"])
@settings(max_examples=40, deadline=None)
@given(text=soup)
def test_text_never_becomes_a_control_token(pico, pico_swarm, model, text):
    policy = {"pico": pico, "pico_swarm": pico_swarm}[model]
    special = set(policy.tokenizer.all_special_ids)
    special |= {i for i, t in policy.tokenizer.added_tokens_decoder.items() if t.special}
    text = text.encode("utf8", "replace").decode() or "?"  # check_messages: no half characters

    def control(text: str) -> list[list[int]]:
        """The control tokens around this text in each role, and between two turns."""
        messages = [{"role": role, "content": text} for role in ("system", "user", "tool")]
        ids = [prompt_ids(policy, [message], None, True) for message in messages]
        ids.append(after_reply(policy, messages[-1:], True)[1])
        return [[token for token in row if token in special] for row in ids]

    assert control(text) == control("x")
