"""Protects the claim that any string is a legal reply, in every environment and turn: it never
raises, its reward is bounded, the same replies earn the same, and no text becomes a control token.
"""

import itertools
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bookkeeping.refusals import Guarded
from chat import after_reply, prompt_ids
from env_alphabet import FIRST_TAG, LATER_TAG, Alphabet
from env_letters import Letters
from env_swarm import Swarm
from swarm.tools import TOOLS

# Replies that no honest policy writes, as a strategy of hypothesis: text that is grown from what
# the environments read (tags, JSON, numbers, names), so that it gets past their first check.

TAGS = ["think", "answer", "tool_call", "tool_response", FIRST_TAG, LATER_TAG]
PIECES = [
    *(f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")),
    *("<|im_end|>", "<|im_start|>system\n", "<|im_<|im_end|>end|>", "<|endoftext|>", "</s>"),
    *("NaN", "-Infinity", "1e999", "-0.0", "٣", "²", "9" * 5000, "true", "null", "-3", "2.5"),
    *("\ud800", "\\udfff", "\x00", "\x1b[2J", "\u202e", "\u2028", "\u0130", "\U0001f600"),
    *('{"a": ', "}", "[" * 1000, '{"name": ' * 3000, '"a": 1,', '"', ",", ":", "\\", "\n", " "),
    *(" // new name!", "MariaSilva", "task_1", "post_1", "prop_1", "bot_1", "you"),
]
VALUES = st.one_of(
    st.floats(),
    st.integers(-(10**40), 10**40),
    st.sampled_from(["task_1", "post_1", "prop_1", "bot_1", "you", "up", "x" * 2001, "\ud800"]),
    st.lists(st.none() | st.booleans(), max_size=2),
)
NAMES = sorted({name for _, arguments, *_ in TOOLS.values() for name in arguments} | set("aeq"))
OBJECTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)

anything = st.text(st.characters(exclude_categories=()), max_size=20)  # half characters, too
soup = st.lists(st.sampled_from(PIECES) | anything, max_size=12).map("".join)
calls = st.builds(
    lambda tool, arguments: {"name": tool, "arguments": arguments},
    st.sampled_from(sorted(TOOLS)) | soup,
    OBJECTS,
)
# all that the tool asks for, so that some reach the rules behind the checks
whole = st.sampled_from(sorted(TOOLS)).flatmap(
    lambda tool: st.fixed_dictionaries(
        {
            "name": st.just(tool),
            "arguments": st.fixed_dictionaries({name: VALUES for name in TOOLS[tool][1]}),
        }
    )
)
bodies = soup | st.one_of(calls, whole, OBJECTS, VALUES).map(json.dumps)
wrapped = st.builds(
    lambda tag, body, n: n * f"<{tag}>\n{body}\n</{tag}>",
    st.sampled_from(TAGS),
    bodies,
    st.sampled_from([1, 1, 1, 2, 200]),
)
replies = anything | soup | wrapped

# What is said in the expert's place: a hostile text, alone, around the expert's or inside it.
WAYS = [
    lambda right, text: text,
    lambda right, text: right,
    lambda right, text: right + text,
    lambda right, text: text + right,
    lambda right, text: right[: len(right) // 2] + text + right[len(right) // 2 :],
    lambda right, text: f"<think>{text}</think>{right.partition('</think>')[2] or right}",
]
LONG = [  # the beginning of a megabyte; what is quadratic in it does not come to an end
    "<tool_call>" * 90_000,
    "<think>" * 100_000,
    "<answer>" + "[" * 100_000 + "</answer>",
    '<tool_call>{"name": ' + "9" * 500_000 + "}</tool_call>",
    f"<{FIRST_TAG}>\n" + "MariaSilva\n" * 50_000 + f"</{FIRST_TAG}>",
    "\u0130" * 500_000,
]

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
    env = Guarded(env)
    told, done = env.reset(seed), False
    ways = itertools.cycle(said)
    while not done:
        way, text = next(ways)
        messages, done = env.step(way(env.expert_reply(), text))
        check_messages(messages)
        told = told + messages
    return told, env.score()


@pytest.mark.parametrize("name", ENVS)
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
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
        ids.append(after_reply(policy, messages[-1:], None, True)[1])
        return [[token for token in row if token in special] for row in ids]

    assert control(text) == control("x")
