"""Chat templates: how a conversation becomes token ids.

    messages -> template -> text -> tokenizer -> token ids

A chat template is a program that comes with a model and writes a conversation as one
text. It silently decides whether RL can work. It may

    end a turn with a token that no config calls eos (end of sequence)
    open <think> itself
    leave out tools, their results or the system message
    write the date

`read_template` renders test messages once to find out which of these a template does,
and `render` takes it into account. What a template leaves out is said in another way
(`in_plain_words`), the same for SFT and RL. If that does not help, the conversation is
refused.

Run me: `python chat.py FOLDER` reads a model's template; by default pico_base's.
"""

import json
import re
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

from jinja2 import TemplateError

TOOLS_AS_TEXT = """# Tools

You may call one function a turn. Their signatures:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and arguments \
inside <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
# A test message. Its quotes and line break change if a template writes it as JSON.
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
    """What a chat template does."""

    end: int | None  # the token that ends a turn, whatever eos is; None: there is none
    # True if no end token follows a last reply. (In GLM's template the header of the
    # next message, <|user|>, ends a turn.)
    header: bool
    opens: str  # "<think>⏎" if the prompt opens the thought itself; else ""
    # does it show tools, tool messages, and calls in the form our environments read?
    tools: bool
    system: bool  # does it show system messages?
    dated: bool  # does it write the date?


# What we assume of a template that cannot be read because it is behind a server.
QWEN = Template(None, False, "", tools=True, system=True, dated=False)


def write(tokenizer, messages, tools=None, think=True, today="", prompt=True) -> str:
    """A conversation as the template writes it.

    prompt: go on to where the policy's next message begins. today: YYYY-MM-DD, the date
    that the template writes; "" is today's. Templates have two names for the switch
    that turns thinking on, so both are passed.
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
    """What a tokenizer's template does; read once, and again if it is replaced."""
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
    between = end(text(ask, said("assistant"), ask))  # after an earlier reply
    told = text(ask, said("assistant"), said("tool"), tools=[A_TOOL])
    # The template has to show the tool, calls in the only form that the environments
    # read, and the tool's message (MARK: the assistant's MARK is taken out below).
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
    """How a turn ends: (how many tokens end it, the last of them).

    behind: what a template writes after a reply. '<|im_end|>⏎<|im_start|>user …' gives
    (1, the id of <|im_end|>); 'user: …' gives (0, None). The end token may follow a
    space, and not every tokenizer calls it special.
    """
    added = tokenizer.added_tokens_decoder
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    for i, token in enumerate(ids):
        markup = added.get(token)
        if markup and (markup.special or markup.content.startswith("<")):
            return i + 1, token
        if tokenizer.decode([token]).strip():
            break
    return 0, None


def opened_thought(prompt: str) -> str:
    """'<think>⏎' if a prompt ends with it, so that replies begin inside it; else ''."""
    return re.search(r"(<think>\s*)?\Z", prompt)[0]


def start_of_thought(tokenizer, think: bool) -> str:
    """'<think>⏎' if the template itself writes it at the end of a prompt; else ''.

    think: may replies think?
    """
    return read_template(tokenizer).opens if think else ""


def without_start(reply: str, begun: str) -> str:
    """A whole reply, rewritten to continue a prompt that has begun the thought.

    If the prompt ends with "<think>⏎" (begun), the reply "<think>⏎so 2⏎</think>⏎2"
    becomes "so 2⏎</think>⏎2". A reply without a thought has to close the one that is
    open: "2" becomes "⏎</think>⏎⏎2".
    """
    if not begun:
        return reply
    if not reply.startswith("<think>"):
        reply = f"<think>\n\n</think>\n\n{reply}"
    return reply.removeprefix("<think>").removeprefix(begun.removeprefix("<think>"))


def in_plain_words(messages: list[dict], tools, template: Template) -> list[dict]:
    """The same conversation for a template that leaves tools or system messages out.

    Tools are described in the system message or, if the template shows none, in the
    user's first message. Tool results become user messages. Neighbouring messages of
    one role are joined, because some templates want roles to alternate.
    """
    given = list(messages)
    if tools:
        shown = TOOLS_AS_TEXT.format(tools="\n".join(map(json.dumps, tools)))
        at = 1 if given[0]["role"] == "system" else 0
        given.insert(at, {"role": "system", "content": shown})
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
    notes = {  # {what is done about it: is it needed?}
        f"a turn ends with {end}, and not with {eos}": end != eos,
        "the prompt opens <think>, so replies begin inside it": found.opens != "",
        "it leaves out tools or their results, or wants calls in another form than "
        "our environments read: tools are described in the system message, results "
        "come as messages of the user": not found.tools,
        "it takes no system message: the user's first begins with it": (
            not found.system
        ),
        f"it writes the date: {today} in this run": found.dated,
    }
    needed = [note for note, is_needed in notes.items() if is_needed]
    return f"chat template: {'; '.join(needed) or 'as it is'}"


# ------------------------------------------------------------ messages -> token ids


def render(policy, messages: list[dict], tools, think: bool) -> str:
    """A conversation as the chat template writes it, up to where the policy speaks.

    Control tokens inside a message are broken up, so text stays text. tools: JSON
    schemas, or None. What the template would leave out is said in another way
    (in_plain_words). Raises ValueError if the template refuses the conversation, or
    still leaves something out: a policy must not play blind.
    """
    tokenizer, template = policy.tokenizer, read_template(policy.tokenizer)
    added = tokenizer.added_tokens_decoder.values()
    control = {*tokenizer.all_special_tokens, *(t.content for t in added if t.special)}
    # In a tool's message all markup is broken up, or it could close its own
    # </tool_response>. A user's message may contain <think>, to ask for it.
    markup = {token.content for token in added} | control | {"</tool_response>"}
    unsafe = lambda m: markup if m["role"] == "tool" else control
    safe = [{**m, "content": broken_up(m["content"], unsafe(m))} for m in messages]
    if not (template.tools and template.system):
        safe, tools = in_plain_words(safe, tools, template), None
    whose = f"the chat template of {policy.name}"
    try:
        text = write(tokenizer, safe, tools, think, policy.today)
    except TemplateError as error:
        roles = ", ".join(m["role"] for m in messages)
        raise ValueError(
            f"{whose} refuses a conversation of {roles} ({error}); "
            "use a model that takes it"
        ) from None
    if opened_thought(text) and not think:
        raise ValueError(
            f"{whose} opens <think> even if told not to; leave --no-think out, "
            "or take another model"
        )
    # The assistant's messages are not checked: a template may leave out the thoughts of
    # earlier replies. The policy has those as token ids anyway.
    shown = [m for m in safe if m["role"] != "assistant"]
    if lost := [m["role"] for m in shown if m["content"].strip() not in text]:
        raise ValueError(
            f"{whose} leaves out or changes a message of role {lost[0]}; "
            "use a model that shows it"
        )
    return text


def broken_up(text: str, tokens: set[str]) -> str:
    """A text with a space in each of these tokens: '<|im_end|>' -> '< |im_end|>'."""
    for token in sorted(tokens):  # in the same order in every process
        text = text.replace(token, token[0] + " " + token[1:])
    return text


def encode(policy, text: str) -> list[int]:
    """Token ids of a text as it is: no token is added before or after it."""
    return policy.tokenizer(text, add_special_tokens=False)["input_ids"]


def prompt_ids(policy, messages: list[dict], tools, think: bool) -> list[int]:
    """Token ids of an opening prompt, up to where the policy begins to speak.

    [{"role": "user", "content": "What is 1 + 1?"}] gives the ids of

        <|im_start|>user⏎What is 1 + 1?<|im_end|>⏎<|im_start|>assistant⏎
    """
    return encode(policy, render(policy, messages, tools, think))


def after_reply(
    policy, new: list[dict], tools, think: bool
) -> tuple[list[int], list[int]]:
    """(end, rest): the ids that end a reply, and those from there to the next reply.

    The policy samples `end` itself, so usually only `rest` is appended. To find both,
    we let the chat template write a made-up conversation whose reply is a marker, and
    keep what follows the marker. If the user says "And 2 + 2?" after the reply:

        template       end           rest
        Qwen3's        <|im_end|>    ⏎<|im_start|>user⏎And 2 + 2?<|im_end|>⏎
                                     <|im_start|>assistant⏎
        a plain one    no tokens     ⏎user: And 2 + 2?⏎assistant:
    """
    if not read_template(policy.tokenizer).tools:
        tools = None  # the opening has already described them in words
    marker = "@@reply@@"
    made_up = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": marker},
    ]
    text = render(policy, made_up + new, tools, think)
    _, found, after = text.partition(marker)
    if not found:
        raise ValueError(
            "the chat template changes what the assistant said; take another model"
        )
    ids = encode(policy, after)
    n_end, _ = end_of_turn(policy.tokenizer, after)  # how many of the ids end the turn
    return ids[:n_end], ids[n_end:]  # end, rest


def ids_until_next_reply(policy, env, sample, new_messages: list[dict]) -> list[int]:
    """The token ids to append to a sampled reply, so that the policy can go on."""
    end, rest = after_reply(policy, new_messages, env.tools, env.think)
    # GLM ends a turn with the header of the next speaker, so the policy has to guess
    # who that is. After a wrong guess the right header is appended.
    if read_template(policy.tokenizer).header and end != sample.token_ids[-1:]:
        return end + rest
    return rest  # usually: the policy has sampled all of `end`


if __name__ == "__main__":
    import sys

    from transformers import AutoTokenizer

    pico = Path(__file__).resolve().parent / "models" / "pico_base"
    tokenizer = AutoTokenizer.from_pretrained([*sys.argv, str(pico)][1])
    print("how the template writes a question, up to where the policy speaks:\n")
    print(write(tokenizer, [{"role": "user", "content": "What is 1 + 1?"}]))
    print(about(tokenizer, "today"), read_template(tokenizer), sep="\n")
