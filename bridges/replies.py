"""Replies as text and as OpenAI's fields.

Our environments read text, because a tool call that is broken must stay visible. Servers speak in
fields and take tool calls out of the text. Here are both directions; the world's imports suffice,
because the package for verifiers carries this file too.

    '<tool_call>\n{"name": "vote", "arguments": {…}}\n</tool_call>'  <->  {"tool_calls": [{…}]}
"""

import json
import re
import secrets

from env_letters import split_thinking
from swarm.tools import wrap_call as call_text

CALLS_AT_END = re.compile(r"(.*?)((?:\s*<tool_call>[^<]*</tool_call>)+)\s*", re.DOTALL)


def split_calls(text: str) -> tuple[str, list[dict]]:
    """'thoughts<tool_call>{…}</tool_call>' -> ('thoughts', tool calls).

    There are no calls unless everything after them, and each of them, is well-formed.
    """
    rest = split_thinking(text)[1]
    found = CALLS_AT_END.fullmatch(rest) if "<tool_call>" in rest else None
    if not found:
        return text, []
    calls = []
    for piece in re.findall(r"<tool_call>(.*?)</tool_call>", found[2], re.DOTALL):
        try:
            call = json.loads(piece)
            name, arguments = call["name"], call["arguments"]
            if len(call) > 2 or not isinstance(name, str) or not isinstance(arguments, dict):
                return text, []
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        except (ValueError, KeyError, TypeError, RecursionError):
            return text, []
        calls.append(
            {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}
        )
    return text[: len(text) - len(rest)] + found[1], calls


if __name__ == "__main__":
    said = "<think>\nit pays 14\n</think>\n" + call_text("claim_task", '{"task_id": "task_1"}')
    for reply in (said, said + " and more", said.replace(":", "")):
        content, calls = split_calls(reply)
        print(repr(reply), "->", [call["function"] for call in calls] or "text")
