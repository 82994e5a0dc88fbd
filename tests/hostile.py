"""Replies that no honest policy writes, as a strategy of hypothesis: text that is grown from what
the environments read (tags, JSON, numbers, names), so that it gets past their first check."""

import json

from hypothesis import strategies as st

from env_alphabet import FIRST_TAG, LATER_TAG
from swarm.tools import TOOLS

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
