"""OpenAI's chat completions over HTTP, on loopback, without a model: what a client may send, how an
answer is written, and the server around both.

    request (JSON) -> read_messages -> answer(request) -> response -> JSON
                            Refused: one sentence, as OpenAI writes an error

`listen` takes any function that answers. bridges/serve.py gives it one that samples from a policy,
`scripted` one that says what a function of the messages says, for tests and demonstrations.

Run me: `python -m bridges.chat` asks a scripted server, and is refused once.
"""

import json
import secrets
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bridges.replies import call_text

LARGEST = 20_000_000  # bytes of a request
# role: the roles that may stand before it; None is the beginning.
MAY_FOLLOW = {
    "system": (None,),
    "user": (None, "system", "user", "assistant", "tool"),
    "assistant": ("system", "user", "tool"),
    "tool": ("system", "user", "assistant", "tool"),
}


class Refused(ValueError):
    """What the client did wrong, in one sentence."""

    def __init__(self, sentence: str, status: int = 400, code: str | None = None):
        super().__init__(sentence)
        self.status, self.code = status, code


# ---------------------------------------------------------------------------------- messages


def text_of(message: dict) -> str:
    """A message's text. An assistant's tool calls are written as the policy writes them."""
    content = message.get("content")
    if isinstance(content, list):  # OpenAI's parts
        if not all(is_text(part) for part in content):
            raise Refused("a message's content must be text, or a list of parts of type text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content or "", str):
        raise Refused("a message's content must be text")
    calls = message.get("tool_calls") or []
    parts = [content] if content else []
    try:
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if not isinstance(arguments, str):  # some clients send an object
                raise TypeError
            parts.append(call_text(name, arguments))
    except (TypeError, KeyError):
        wanted = '{"id": …, "type": "function", "function": {"name": …, "arguments": "…"}}'
        raise Refused(f"a tool call is {wanted}") from None
    return "\n".join(parts)


def is_text(part) -> bool:
    """Is it one of OpenAI's parts of a message, and text?"""
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def read_messages(body: dict) -> list[dict]:
    """The request's messages as {"role", "content"}; Refused says what is wrong with them."""
    messages = body.get("messages")
    if not (messages and isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        raise Refused("messages must be a list of at least one message")
    roles = [m.get("role") for m in messages]
    for i, role in enumerate(roles):
        if role not in tuple(MAY_FOLLOW):  # it may be a list, which no table can look up
            known = "system, user, assistant and tool are known"
            raise Refused(f"message {i} has the role {role!r}; {known}")
        if (roles[i - 1] if i else None) not in MAY_FOLLOW[role]:
            rule = "system comes first, and assistant answers user or tool"
            raise Refused(f"message {i} ({role}) cannot stand there: {rule}")
    if roles[-1] not in ("user", "tool"):
        raise Refused("the last message must be from user or tool: that is what is answered")
    return [{"role": m["role"], "content": text_of(m)} for m in messages]


def response(model: str, choices: list[dict], asked: int, spoken: int) -> dict:
    """A chat completion as OpenAI writes it. asked, spoken: tokens of prompt and replies."""
    usage = {"prompt_tokens": asked, "completion_tokens": spoken, "total_tokens": asked + spoken}
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": "chat.completion"}
    return {**head, "created": int(time.time()), "model": model, "choices": choices, "usage": usage}


def scripted(say: Callable[[list[dict]], str]) -> Callable[[dict], dict]:
    """An answer without a model: say(messages) -> the reply's text. For tests and demonstrations;
    a word is a token."""

    def answer(body: dict) -> dict:
        messages = read_messages(body)
        text = say(messages)
        message = {"role": "assistant", "content": text}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        asked = sum(len(m["content"].split()) for m in messages)
        return response(body.get("model"), choices, asked, len(text.split()))

    return answer


# --------------------------------------------------------------------------------------------- HTTP


class JsonHandler(BaseHTTPRequestHandler):
    """Answers in JSON, over connections that are kept. Every server of ours is one of these."""

    protocol_version = "HTTP/1.1"

    def reply(self, status: int, value: dict) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass  # no line per request


def listen(answer: Callable[[dict], dict], name: str, port: int = 0) -> ThreadingHTTPServer:
    """A server on loopback that gives answer(request) -> response; port 0 takes a free one. The
    caller runs serve_forever()."""

    class Handler(JsonHandler):
        disable_nagle_algorithm = True
        timeout = 600  # of a connection that says nothing

        def refuse(self, status: int, sentence: str, code: str | None = None) -> None:
            error = {"message": sentence, "type": "invalid_request_error", "param": None}
            self.reply(status, {"error": {**error, "code": code}})

        def do_GET(self):
            if self.path.rstrip("/") != "/v1/models":
                return self.refuse(404, "there is only /v1/models and /v1/chat/completions")
            model = {"id": name, "object": "model", "created": 0, "owned_by": "picoswarm"}
            self.reply(200, {"object": "list", "data": [model]})

        def do_POST(self):
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > LARGEST:
                self.close_connection = True  # its body is not read
                return self.refuse(400, f"a request needs a Content-Length of at most {LARGEST}")
            raw = self.rfile.read(int(length))
            try:
                if self.path.rstrip("/") != "/v1/chat/completions":
                    raise Refused("there is only /v1/models and /v1/chat/completions", 404)
                try:
                    body = json.loads(raw)
                except (ValueError, RecursionError):
                    raise Refused("the request is not JSON") from None
                response = answer(body)
            except Refused as refusal:
                return self.refuse(refusal.status, str(refusal), refusal.code)
            except Exception as error:  # say it to the client, and go on serving the others
                return self.refuse(500, f"{type(error).__name__}: {error}")
            self.reply(200, response)
            if self.server.bar is not None:
                self.server.bar.update()

        def handle(self):
            try:
                super().handle()
            except (ConnectionError, TimeoutError):
                pass  # the client went away; what was sampled for it is lost

    class Server(ThreadingHTTPServer):
        daemon_threads, bar = True, None  # bar: counts replies
        request_queue_size = 256  # many clients may knock at once

    return Server(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    import threading
    import urllib.error
    import urllib.request

    server = listen(scripted(lambda messages: f"you said: {messages[-1]['content']}"), "parrot")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    for role in ("user", "poet"):
        body = json.dumps({"model": "parrot", "messages": [{"role": role, "content": "hello"}]})
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body.encode())) as answer:
                print(json.loads(answer.read())["choices"][0])
        except urllib.error.HTTPError as error:
            print(error.code, json.loads(error.read())["error"]["message"])
    server.shutdown()
