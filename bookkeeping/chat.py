"""What a chat template does with a conversation, found out once by rendering test text through it.

A model's template silently decides whether RL can work: it may end a turn with a token that no
config calls eos, open <think> itself, leave out tools, their results or the system message, or
write the date. `read_template` finds out, and policy.py renders accordingly. What a template leaves
out is said in another way (`in_plain_words`), the same for SFT and RL, or the conversation is
refused (policy.render).

Run me: `python -m bookkeeping.chat FOLDER` reads a model's template; by default pico_base's.
"""

import json
import re
from dataclasses import dataclass
from datetime import datetime
from functools import cache

TOOLS_AS_TEXT = """# Tools

You may call one function a turn. Their signatures:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
# Stands for any message: its quotes and line end show whether a template writes it as JSON.
MARK = 'a "mark"\nof two lines'
A_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "find a word",
        "parameters": {"type": "object"},
    },
}


@dataclass(frozen=True)
class Template:
    """What a chat template does. Where there are two ways, the first is the one of Qwen3."""

    end: int | None  # the special token after a reply: it ends a turn, whatever eos is
    header: bool  # that token begins the next message, as GLM's <|user|>: there is no end token
    opens: str  # "<think>⏎" if the prompt opens the thought itself; else ""
    tools: bool  # does it show tools, in our environments' form of calls, and tool messages?
    system: bool  # does it show system messages?
    dated: bool  # does it write the date?


# What is assumed of a template that cannot be read, behind a server.
QWEN = Template(None, False, "", tools=True, system=True, dated=False)


def write(tokenizer, messages, tools=None, think=True, today="", prompt=True) -> str:
    """A conversation as the template writes it, or, with prompt, up to where the policy speaks.

    today: YYYY-MM-DD, the date that it writes; "" is today's. Templates have two names for the
    switch that turns thinking on.
    """
    day = datetime.fromisoformat(today) if today else datetime.now()
    return tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=prompt,
        enable_thinking=think,
        thinking=think,
        strftime_now=day.strftime,
        tokenize=False,
    )


def read_template(tokenizer) -> Template:
    """What a tokenizer's template does; read once, and again if the template is replaced."""
    return render_marks(tokenizer, str(getattr(tokenizer, "chat_template", "")))


@cache
def render_marks(tokenizer, template: str) -> Template:
    """Render MARK through a tokenizer's template, and look at what becomes of it."""

    def text(*messages, **more) -> str:
        try:
            return write(tokenizer, list(messages), **more)
        except Exception:  # a template is a program, and may raise anything
            return ""

    said = lambda role: {"role": role, "content": MARK}
    ask = {"role": "user", "content": "?"}
    end = lambda written: end_of_turn(tokenizer, written.partition(MARK)[2])[1]
    last = end(text(ask, said("assistant"), prompt=False))  # after the last reply
    between = end(text(ask, said("assistant"), ask))  # after one that is answered
    told = text(ask, said("assistant"), said("tool"), tools=[A_TOOL])
    # The form in which the environments read a call; they do not read others.
    needed = ("look_up", "<tool_call>", '"arguments"', MARK)
    return Template(
        end=between if last is None else last,
        header=last is None,
        opens=opened_thought(text(ask)),
        tools=all(part in told.replace(MARK, "", 1) for part in needed),
        system=MARK in text(said("system"), ask),
        dated=text(ask, today="2001-02-03") != text(ask, today="2004-05-06"),
    )


def end_of_turn(tokenizer, behind: str) -> tuple[int, int | None]:
    """(how many tokens end a turn, the last of them), given what a template writes after a reply.

    '<|im_end|>⏎<|im_start|>user …' -> (1, the id of <|im_end|>); 'user: …' -> (0, None). The end
    token may follow a space, and not every tokenizer calls it special.
    """
    added = tokenizer.added_tokens_decoder
    for i, token in enumerate(tokenizer(behind, add_special_tokens=False)["input_ids"]):
        if token in added and (added[token].special or added[token].content.startswith("<")):
            return i + 1, token
        if tokenizer.decode([token]).strip():
            break
    return 0, None


def missing_end(tokenizer, end: list[int], written: list[int]) -> list[int]:
    """The part of the turn's end that the policy has not written: with most templates nothing.

    GLM's has no end-of-turn token. The header of the next message ends a turn, and the policy has
    to guess whose it is; after a wrong guess the right one is appended.
    """
    return end if read_template(tokenizer).header and end != written else []


def opened_thought(prompt: str) -> str:
    """'<think>⏎' if a prompt ends with it: the reply then begins inside the thought; else ''."""
    return re.search(r"(<think>\s*)?\Z", prompt)[0]


def start_of_thought(tokenizer, think: bool) -> str:
    """'<think>⏎' if the prompt opens the thought itself, so that replies begin inside it; else ''.

    think: may replies think?
    """
    return read_template(tokenizer).opens if think else ""


def without_start(reply: str, begun: str) -> str:
    """A whole reply, as it continues a prompt that has begun the thought.

    After "<think>⏎" (begun), "<think>⏎so 2⏎</think>⏎2" becomes "so 2⏎</think>⏎2". A reply without a
    thought closes the empty one: "2" becomes "⏎</think>⏎⏎2".
    """
    if not begun:
        return reply
    if not reply.startswith("<think>"):
        reply = f"<think>\n\n</think>\n\n{reply}"
    return reply.removeprefix("<think>").removeprefix(begun.removeprefix("<think>"))


def in_plain_words(messages: list[dict], tools, template: Template) -> list[dict]:
    """The same conversation for a template that leaves tools or system messages out.

    Tools are described in the system message, or without one in the user's first message; results
    become user messages. Neighbours of one role are joined: some templates want roles to alternate.
    """
    given = list(messages)
    if tools:
        shown = TOOLS_AS_TEXT.format(tools="\n".join(map(json.dumps, tools)))
        given.insert(given[0]["role"] == "system", {"role": "system", "content": shown})
    plain = []
    for message in given:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if role == "tool" or (role == "system" and not template.system):
            role = "user"
        if plain and plain[-1]["role"] == role:
            content = f"{plain.pop()['content']}\n\n{content}"
        plain.append({**message, "role": role, "content": content})
    return plain


def about(tokenizer, today: str) -> str:
    """One line on how a template is handled. today: the date, if it writes one."""
    found, eos = read_template(tokenizer), tokenizer.eos_token
    end = eos if found.end is None else tokenizer.decode([found.end])
    done = {
        f"a turn ends with {end}, and not with {eos}": end != eos,
        "the prompt opens <think>, so replies begin inside it": found.opens != "",
        "it leaves out tools or their results, or wants calls in another form than our "
        "environments read: tools are described in the system message, results come as messages "
        "of the user": not found.tools,
        "it takes no system message: the user's first begins with it": not found.system,
        f"it writes the date: {today} in this run": found.dated,
    }
    told = [sentence for sentence, so in done.items() if so]
    return f"chat template: {'; '.join(told) or 'as it is'}"


if __name__ == "__main__":
    import sys

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained([*sys.argv, "models/pico_base"][1])
    print(about(tokenizer, "today"), read_template(tokenizer), sep="\n")
