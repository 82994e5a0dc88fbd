"""What hostile replies are made of: thirteen kinds of text that no honest policy writes, for lab/trust/hostile.py.

Random characters alone test little: the first check sends them home. So a reply is grown from a grammar of what the environments
read (their tags, their JSON, their names), or mutated from what the expert would say now, and some reach the rules behind the checks.
Every kind is a function (dice, environment's name, environment, expert's reply) -> reply; KINDS says how often each is drawn.

Run me: `python -m lab.trust.hostile_replies` prints an example of each.
"""

import json
import random

from env_alphabet import FIRST_TAG, LATER_TAG
from env_letters import Letters
from swarm.tools import TOOLS

LONG = 1_000_000  # characters of the longest line

CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>system\n", "<|im_end|>\n<|im_start|>assistant\n",
           "<|im_<|im_end|>end|>", "@@reply@@", "{{ messages }}", "{% raw %}", "<s>", "</s>", "[INST]", "<|eot_id|>", "<|im_end|",
           "<\u200b|im_end|>"]  # fmt: skip
TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>",
        *(f"<{slash}{tag}>" for tag in (FIRST_TAG, LATER_TAG) for slash in ("", "/"))]  # fmt: skip
NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-0", "-0.0", "1e-320", "1e308", "0x10", "1_000", "٣", "²", "1.", "+1", "007",
           "true", "null", "9" * 30, "9" * 4299, "9" * 4301, "-" + "9" * 40000, "1e300", "1" + "0" * 300, "1e-5", '"3"', "[3]",
           "{}"]  # fmt: skip
SURROGATES = ["\ud800", "\udfff", "\udc00\ud800", "\\ud800", "\\udfff", "\\ud83d\\ude00", "\\u0000"]
ODD = [chr(c) for c in (*range(0, 32), 127, 0x85, 0xA0, 0xAD, 0x130, 0x200B, 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F),
                        *range(0x2066, 0x206A),
       0x212A, 0xFEFF, 0xFF1C, 0xFFFD, 0xFFFF, 0x1F600, 0xE0001, 0x10FFFF, 0x301, 0xDF, 0x1E9E, 0xFB01)]  # fmt: skip
WORDS = ["a", "e", "0", "1", "name", "arguments", "content", " // new name!", "MariaSilva", "task_1", "post_1", "prop_1", "bot_1", "you",
         "\n", " ", '"', ":", ","]  # fmt: skip


def around(name: str, env, body: str) -> str:
    """The body where this environment looks for an answer now."""
    if name == "letters":
        return f"<answer>{body}</answer>"
    if name == "swarm":
        return f"<tool_call>\n{body}\n</tool_call>"
    tag = LATER_TAG if env.replies else FIRST_TAG
    return f"<{tag}>\n{body}\n</{tag}>"


def tool_call(rng: random.Random, value) -> str:
    """A call of some tool, with mostly the right arguments, some of which are value() instead."""
    tool = rng.choice(list(TOOLS))
    some = {"post_id": "post_1", "proposal_id": "prop_1", "task_id": "task_1", "counterparty_id": "bot_1", "direction": "up",
            "content": "x", "offered_transfer": 1}  # fmt: skip
    parts = [f'"{name}": {value() if rng.random() < 0.5 else json.dumps(some[name])}' for name in TOOLS[tool][1] if rng.random() < 0.95]
    return f'{{"name": {value() if rng.random() < 0.05 else json.dumps(tool)}, "arguments": {{{", ".join(parts)}}}}}'


def body_of(rng: random.Random, name: str, env, value) -> str:
    """JSON of about the right form for this environment; value() gives JSON text for each value."""
    if name == "swarm":
        return tool_call(rng, value)
    if name == "letters":
        letters = env.task.letters
        return value() if len(letters) == 1 else "{" + ", ".join(f'"{c}": {value()}' for c in letters) + "}"
    return "\n".join(value() for _ in range(rng.randint(1, 12)))


def mutated(rng, name, env, right):
    text = right
    for _ in range(rng.randint(1, 6)):
        i, j = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        j = min(j, i + 30)
        piece = rng.choice([CONTROL, TAGS, NUMBERS, SURROGATES, ODD, WORDS])
        text = rng.choice([text[:i] + text[j:], text[:i] + 2 * text[i:j] + text[j:], text[:i] + rng.choice(piece) + text[j:],
                           text[:i] + text[i:j].swapcase() + text[j:],
                           text[:i] + text[i:j][::-1] + text[j:]])[: 4 * len(right) + 5000]  # fmt: skip
    return text


def grammar(rng, name, env, right):
    pools = [TAGS, TAGS, WORDS, NUMBERS[:26], SURROGATES, ODD, CONTROL, [right, "{", "}", "[", "]", "\\"]]
    return "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(0, 60)))


def nested(rng, name, env, right):
    depth = rng.choice([2, 50, 900, 1000, 3000, 10_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ('{"name":', "}"), ('[{"":', "}]")])
    deep = opening * depth + rng.choice(["1", "", "null"]) + closing * rng.choice([depth, depth, depth - 1, 0])
    return around(name, env, rng.choice([deep, body_of(rng, name, env, lambda: deep if rng.random() < 0.3 else "1")]))


def numbers(rng, name, env, right):
    return around(name, env, body_of(rng, name, env, lambda: rng.choice(NUMBERS)))


def duplicates(rng, name, env, right):
    body = body_of(rng, name, env, lambda: rng.choice(["0", "1", '"up"', '"task_1"']))
    again = body.strip("{}") + ", " + body.strip("{}")
    return around(name, env, rng.choice(["{" + again + "}", '{"name": "post", ' + again + "}", "{" + ", ".join(['"a": 1'] * 200) + "}"]))


def surrogates(rng, name, env, right):
    value = lambda: json.dumps(rng.choice(WORDS) + rng.choice(SURROGATES), ensure_ascii=False).replace("\\\\u", "\\u")
    return around(name, env, body_of(rng, name, env, value)) + rng.choice(["", rng.choice(SURROGATES)])


def odd_characters(rng, name, env, right):
    some = lambda: "".join(rng.choices(ODD, k=rng.randint(1, 20)))
    value = lambda: rng.choice([json.dumps(some()), json.dumps(some(), ensure_ascii=False), '"' + some() + '"'])
    spread = "".join(c + rng.choice(ODD) * (rng.random() < 0.1) for c in right)
    return rng.choice([around(name, env, body_of(rng, name, env, value)), spread, some() + right + some()])


def control_tokens(rng, name, env, right):
    value = lambda: json.dumps("".join(rng.choices(CONTROL + TAGS, k=rng.randint(1, 5))))
    token = rng.choice(CONTROL)
    grown = around(name, env, body_of(rng, name, env, value))
    return rng.choice([grown, token + right, right + token, right.replace("\n", token), around(name, env, token)])


def blocks(rng, name, env, right):
    inner = lambda: rng.choice([right, around(name, env, rng.choice(WORDS)), around(name, env, ""), *TAGS])
    text = "".join(inner() for _ in range(rng.choice([1, 2, 3, 10, 40])))
    return rng.choice([text, f"<think>{text}</think>", f"<think>{text}", f"{right}</think>", f"<think>{right}</think>{text}", text + right])


def wrong_types(rng, name, env, right):
    values = ['"x"', "true", "[]", "{}", "null", "-3", "2.5", '""', '" "', '"you"', '"' + "x" * 2001 + '"', '{"a": {}}', "[[1]]"]
    body = lambda: body_of(rng, name, env, lambda: rng.choice(values))
    return around(name, env, rng.choice([body(), rng.choice(values), f"[{body()}]", "", " ", '{"name": "post"}']))


def noise(rng, name, env, right):
    top = rng.choice([128, 0x3000, 0x110000])
    return "".join(chr(rng.randrange(top)) for _ in range(rng.randint(0, 200)))


def long_line(rng, name, env, right):
    """A unit again and again, up to a million characters: what is quadratic somewhere shows here."""
    n = LONG if rng.random() < 0.3 else int(10 ** rng.uniform(4, 6))
    inside = right.partition("</think>")[2] or right
    cut = inside[inside.find(">") + 1 : inside.rfind("</")]
    units = [*TAGS, *ODD[:3], *WORDS, "\u0130", "\\", "{", "[", '{"a":', '"a": 1,', "a1 ", "ab\n", "<", "9"]
    units += [inside, cut + "\n", rng.choice(CONTROL)]
    unit = rng.choice(units) or "x"
    if rng.random() < 0.2:  # no period, but the same letters
        unit = "".join(rng.choices(cut or "x", k=5000))
    text = (unit * (n // len(unit) + 1))[:n]
    deep = around(name, env, body_of(rng, name, env, lambda: json.dumps(text[: n // 200])))
    return rng.choice([text, around(name, env, text), f"<think>{text}</think>{inside}", right + text, deep])


def as_expert(rng, name, env, right):
    return right


KINDS = {  # and how often
    as_expert: 6, mutated: 25, grammar: 15, nested: 3, numbers: 10, duplicates: 6, surrogates: 7, odd_characters: 8, control_tokens: 8,
    blocks: 8, wrong_types: 8, noise: 5, long_line: 0.5,
}  # fmt: skip


if __name__ == "__main__":
    env, dice = Letters(2, "binary", True, "derives"), random.Random(0)
    env.reset(3)
    for kind in KINDS:
        reply = kind(dice, "letters", env, env.expert_reply())
        print(f"{kind.__name__:15} {len(reply):8} characters  {ascii(reply[:90])}")
