"""One answer of an OpenAI-compatible endpoint, which may be slow, wrong, hostile or gone.

    messages -> POST /chat/completions -> fields -> text, as an environment reads it

The other end is not ours, so everything has an end. A request has a time limit over the whole of it
(a server that drips a byte per second is cut off too) and a largest size. What may pass by itself
(429, 5xx, a lost connection, an unreadable answer) is tried again, after a longer pause each time
and not before the server's Retry-After; what will not pass (400, 401, 404) is not. A request that
fails raises Failure with one line; bridges/api.py decides what that costs an evaluation.

    text      Environments read text, endpoints may speak in fields. `tool_calls` become
              <tool_call>…</tool_call>, reasoning becomes <think>…</think> if the task allows
              thinking. The server gets back what it sent, and the result as a tool message. If the
              policy called in plain text, the result goes as <tool_response> in a user message,
              which is what Qwen's template makes of a tool message.
    options   An endpoint that refuses a field of the request by name (max_tokens, temperature,
              tools) is asked in another way, and a note in the report says so.
    the key   comes from an environment variable, goes into one header, and is written nowhere; if a
              server echoes it, it is blanked.

HTTP is done by httpx2, which huggingface_hub brings along. The openai package would add retries of
its own, which cannot be counted, and has no limit over a whole request.

Run me: `python -m bridges.endpoint` asks a scripted server that answers well, is busy, writes
garbage, refuses a field, and refuses the key.
"""

import asyncio
import json
import math
import os
import random
import re
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

import httpx2 as httpx
from tqdm import tqdm

from bridges.replies import call_text
from env_letters import split_thinking

LARGEST = 8_000_000  # bytes of an answer
LONGEST = 64  # characters of an answer per token of max_tokens, if a server ignores max_tokens
PAUSE = 1.0  # seconds before the first retry; doubled for each further one …
LONGEST_PAUSE = 30.0  # … up to this
HINTS = {
    401: "; the key in {key} is missing or wrong",
    403: "; the key in {key} may not do this",
    404: "; check --model, and whether --api-base should end in /v1",
}
# A word of a refusal: the field of ours that it is about, and what is done instead.
OTHER_WAYS = {
    "max_completion_tokens": ("max_tokens", "max_completion_tokens instead of max_tokens"),
    "tool": ("tools", "the tools as text in a system message"),
    "temperature": ("temperature", "at its own temperature"),
    "chat_template_kwargs": ("chat_template_kwargs", "without saying that it must not think"),
}
TOOLS_AS_TEXT = """# Tools

You may call one function a turn. Their signatures:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class Failure(Exception):
    """A request that failed, and why, in one line."""

    again = False  # may it be tried again? …
    nobody = False  # nobody listens there at all
    after = 0.0  # … after this many seconds at least
    status = 0  # of HTTP; 0 without an answer
    too_long = False  # the conversation does not fit into the model's context

    def __init__(self, why: str, **facts):
        super().__init__(why)
        self.__dict__.update(facts)


@dataclass
class Endpoint:
    cfg: object  # Config: the flags
    url: str  # …/chat/completions
    key: str  # the secret itself; never printed
    options: dict  # sent with every request: max_tokens, temperature
    client: httpx.AsyncClient | None = None
    deadline: float = math.inf  # on the loop's clock
    next_slot: float = 0.0  # when the next request may be sent
    # requests, answers, retries, refused, prompt_tokens, completion_tokens, without_usage
    counts: Counter = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


@dataclass
class Answer:
    text: str  # as the environment reads it
    message: dict  # as the server wants it back
    cut: bool  # it ran out of tokens
    tokens: int  # of the completion, as the server counts them; 0 if it does not say


# --------------------------------------------------------------------------- flags and connections


def open_endpoint(cfg) -> Endpoint:
    """The Endpoint that the flags describe. ValueError in one sentence if they do not; it repeats
    neither address nor key name, because people put secrets there."""
    address = r"https?://(\[[\da-fA-F:]+\]|[^\s@?#/:\[\]]+)(:\d{1,5})?(/[^\s@?#]*)?"
    if not re.fullmatch(address, cfg.api_base):
        raise ValueError(
            "--api-base: give an address such as https://HOST/v1, "
            "without a user, a question mark or a key in it"
        )
    if cfg.model == "auto":
        raise ValueError("--api-base: name the endpoint's model with --model NAME")
    if cfg.eval_only or cfg.resume:
        raise ValueError(
            "--api-base evaluates an endpoint, --eval-only runs/NAME and --resume take a run "
            "folder; give one of them"
        )
    smallest = {"concurrency": 1, "timeout": 1e-3, "minutes": 1e-3, "retries": 0, "rpm": 0}
    for name, least in smallest.items():
        value = getattr(cfg, f"api_{name}")
        if not least <= value < math.inf:
            raise ValueError(f"--api-{name} {value}: must be at least {least:g}")
    key = os.environ.get(cfg.api_key_env, "").strip()
    if not key and cfg.api_key_env != "OPENAI_API_KEY":
        raise ValueError(
            "--api-key-env: no environment variable of that name is set; "
            "give the name of the one that holds the key"
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"the key in {cfg.api_key_env} has characters that no key has")
    options: dict = {"max_tokens": cfg.max_tokens}
    if cfg.api_temperature is not None:
        options["temperature"] = cfg.api_temperature
    if not cfg.think:  # vLLM's way to tell Qwen3
        options["chat_template_kwargs"] = {"enable_thinking": False}
    base = cfg.api_base.rstrip("/").removesuffix("/chat/completions")
    return Endpoint(cfg, f"{base}/chat/completions", key, options)


def connect(end: Endpoint) -> httpx.AsyncClient:
    """Connections for the running event loop, to be kept as end.client."""
    asyncio.get_running_loop().getaddrinfo = lookup
    headers = {"Authorization": f"Bearer {end.key}"} if end.key else {}
    local = httpx.URL(end.url).host in ("127.0.0.1", "localhost", "::1")  # needs no proxy
    limits = httpx.Limits(max_connections=end.cfg.api_concurrency)
    return httpx.AsyncClient(headers=headers, timeout=None, limits=limits, trust_env=not local)


async def lookup(*args, **kwargs):
    """getaddrinfo in a thread that nobody joins: a name server that does not answer must not hold
    up Ctrl-C."""
    loop, found = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def work() -> None:
        try:
            tell, what = found.set_result, socket.getaddrinfo(*args, **kwargs)
        except OSError as error:
            tell, what = found.set_exception, error
        with suppress(RuntimeError):  # the loop is closed: nobody is interested any more
            loop.call_soon_threadsafe(lambda: found.done() or tell(what))

    threading.Thread(target=work, daemon=True).start()
    return await found


# ------------------------------------------------------------------------------------- one request


def seconds_of(header: str | None) -> float:
    """Retry-After: seconds or a date; 0 for anything else."""
    try:
        after = float(header or 0)
    except ValueError:
        try:
            after = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return after if 0 < after < math.inf else 0.0


async def post(end: Endpoint, body: dict) -> dict:
    """One request, one JSON object; Failure otherwise."""
    if end.cfg.api_rpm:
        now = asyncio.get_running_loop().time()
        slot = max(end.next_slot, now)
        end.next_slot = slot + 60 / end.cfg.api_rpm
        await asyncio.sleep(slot - now)
    end.counts["requests"] += 1
    raw, limit = bytearray(), asyncio.timeout(end.cfg.api_timeout)
    try:
        async with limit, end.client.stream("POST", end.url, json=body) as response:
            async for piece in response.aiter_bytes():
                raw += piece
                if len(raw) > LARGEST:
                    raise Failure(f"an answer of more than {LARGEST / 1e6:g} MB", again=True)
    except TimeoutError:
        raise Failure(f"no whole answer within {end.cfg.api_timeout:g} s", again=True) from None
    except httpx.HTTPError as error:
        if is_refused(error):
            why = "nobody listens there (connection refused); start the server, or check --api-base"
            raise Failure(why, again=True, nobody=True) from None
        why = blank(end, str(error)) or "the connection was lost"
        raise Failure(f"{type(error).__name__}: {why}", again=True) from None
    answer = read_json(end, raw)
    if response.status_code != 200:
        raise failure_of(end, response, answer, raw)
    if not isinstance(answer, dict):
        kind = response.headers.get("content-type", "no content type")[:60]
        raise Failure(f"an answer that is no JSON object ({kind})", again=True)
    return answer


def is_refused(error: BaseException | None) -> bool:
    """Did the other machine say that nobody listens at that port? A lost connection is another
    thing, and so is a name that nobody knows."""
    while error and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


def read_json(end: Endpoint, raw: bytearray):
    """The JSON of an answer, or None. It is read twice, because the key, or half a character that
    no file can hold, may be escaped in it."""
    try:
        plain = blank(end, json.dumps(json.loads(raw), ensure_ascii=False))
        return json.loads(plain.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def failure_of(end: Endpoint, response, answer, raw: bytearray) -> Failure:
    """What a status other than 200 means."""
    status = response.status_code
    problem = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(problem, dict):
        problem = {"message": problem or blank(end, raw[:1000].decode("utf-8", "replace"))}
    message = str(problem.get("message") or "no message")
    told = re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", message)[:300].strip()
    code = f"{problem.get('code')} {problem.get('type')}"
    passing = status in (408, 409, 425, 429) or status >= 500
    return Failure(
        f"HTTP {status}: {told}" + HINTS.get(status, "").format(key=end.cfg.api_key_env),
        status=status,
        again=passing and "insufficient_quota" not in code,
        after=seconds_of(response.headers.get("retry-after")),
        too_long="context_length" in code or "context length" in told.lower(),
    )


def blank(end: Endpoint, text: str) -> str:
    """Without the key. A short one is a placeholder ("none") and no secret."""
    return text.replace(end.key, "***") if len(end.key) >= 8 else text


def write_request(end: Endpoint, talk: list[dict], tools) -> dict:
    """The body of a request. If the endpoint has refused the field for tools, they go into a system
    message."""
    if tools and OTHER_WAYS["tool"][1] in end.notes:
        shown = TOOLS_AS_TEXT.format(tools="\n".join(json.dumps(tool) for tool in tools))
        talk, tools = [{"role": "system", "content": shown}, *talk], None
    body = {"model": end.cfg.model, "messages": talk, **end.options}
    return body | ({"tools": tools} if tools else {})


def adapt(end: Endpoint, body: dict, failure: Failure) -> bool:
    """Was a field of this request refused by name, and is there another way? Then all further
    requests go that way."""
    if failure.status not in (400, 422) or failure.too_long:
        return False
    for word, (name, note) in OTHER_WAYS.items():
        if word not in str(failure) or name not in body:
            continue
        if note in end.notes:  # several requests may be refused at once; the first one decides
            return True
        if name == "tools" and end.counts["answers"]:  # it took tools before: this is about others
            continue
        end.notes.append(note)
        value = end.options.pop(name, None)
        if name == "max_tokens":
            end.options["max_completion_tokens"] = value
        return True
    return False


async def ask(end: Endpoint, talk: list[dict], env, dice: random.Random) -> Answer:
    """The model's answer to a conversation. Raises the last Failure when no retry is left.

    The first failure of all is told at once: a wrong port should not look like a slow model. Where
    nobody has ever answered and nobody listens, one more try is enough.
    """
    loop, tries = asyncio.get_running_loop(), 0
    while True:
        body = write_request(end, talk, env.tools)
        try:
            answer = read_answer(end, await post(end, body), env.think)
            end.counts["answers"] += 1
            return answer
        except Failure as failure:
            if adapt(end, body, failure):
                continue
            pause = min(PAUSE * 2**tries, LONGEST_PAUSE)
            pause *= dice.uniform(0.5, 1)  # spread out, or all come back at once
            pause = max(failure.after, pause)
            out_of_time = loop.time() + pause > end.deadline
            most = end.cfg.api_retries
            if failure.nobody and not end.counts["answers"]:
                most = min(most, 1)
            if not failure.again or tries >= most or out_of_time:
                raise
            if not end.counts["retries"]:
                tqdm.write(f"a request failed: {failure}; trying again")
            tries += 1
            end.counts["retries"] += 1
            await asyncio.sleep(pause)


# --------------------------------------------------------------------------------- text and fields


def read_answer(end: Endpoint, response: dict, think: bool) -> Answer:
    """{"choices": [{"message": …}], "usage": …} -> Answer. Whatever is missing or of another type
    raises Failure, or is counted."""
    try:
        choice = response["choices"][0]
        message, cut = choice["message"], choice.get("finish_reason") == "length"
        content, calls = message.get("content"), message.get("tool_calls") or []
        if isinstance(content, list):  # parts; we can only use text
            content = "".join(part["text"] for part in content if part.get("type") == "text")
        content = content if content is not None else message.get("refusal")
        thought = message.get("reasoning_content") or message.get("reasoning")
        calls = [read_call(i, call) for i, call in enumerate(calls)]
        if not isinstance(content, str | None) or not isinstance(thought, str | None):
            raise TypeError
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Failure("an answer without a readable message in choices", again=True) from None
    if content is None and not (calls or thought or cut):
        raise Failure("an answer whose message is empty (content is null)", again=True)
    text = content or ""
    if thought and think and not split_thinking(text)[0]:
        text = f"<think>\n{thought.strip()}\n</think>\n{text}"
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text += "\n" if text and text[-1] != "\n" else ""
        # `</` is written `<\/`, the same in JSON, so that no argument can end the call.
        text += call_text(name, arguments.replace("</", "<\\/"))
    room = LONGEST * end.cfg.max_tokens
    back = {"role": "assistant", "content": content if calls else content or ""}
    back |= {"tool_calls": calls} if calls else {}
    tokens = count_usage(end, response.get("usage"))
    return Answer(text[:room], back, cut or len(text) > room, tokens)


def count_usage(end: Endpoint, usage) -> int:
    """Add to the counts what an answer says of its tokens; returns those of the completion."""
    usage = usage if isinstance(usage, dict) else {}
    numbers = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
    most = 10_000_000, 10 * end.cfg.max_tokens + 1000  # what is more is no count
    if not all(type(n) is int and 0 <= n < m for n, m in zip(numbers, most)):
        end.counts["without_usage"] += 1
        return 0
    end.counts["prompt_tokens"] += numbers[0]
    end.counts["completion_tokens"] += numbers[1]
    return numbers[1]


def read_call(i: int, call: dict) -> dict:
    """A native tool call with nothing but what the format has. Its arguments are text, which need
    not be JSON: the environment says so."""
    name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": str(name), "arguments": arguments}
    return {"id": str(call.get("id") or f"call_{i}"), "type": "function", "function": function}


def put_back(new: list[dict], calls: list[dict]) -> list[dict]:
    """The environment's messages as the server wants them: a tool message for every native call,
    <tool_response> if there was none."""
    told = [m["content"] for m in new if m["role"] == "tool"]
    rest = [m for m in new if m["role"] != "tool"]
    if not calls:
        texts = [f"<tool_response>\n{content}\n</tool_response>" for content in told]
        return [{"role": "user", "content": text} for text in texts] + rest
    told = ["\n".join(told), *["not carried out: one call a turn"] * (len(calls) - 1)]
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call, content in zip(calls, told)
    ]
    return answers + rest


if __name__ == "__main__":
    from http.server import ThreadingHTTPServer
    from types import SimpleNamespace

    from bridges.chat import JsonHandler
    from settings import Config

    key = os.environ["A_MADE_UP_KEY"] = "sk-made-up-0123456789"
    tokens = {"prompt_tokens": 9, "completion_tokens": 5}
    call = {"function": {"name": "count", "arguments": '{"letter": "r"}'}}

    def say(text, **fields):
        return 200, {"choices": [{"message": {"content": text, **fields}}], "usage": tokens}

    def no(status, why):
        return status, {"error": {"message": why}}

    well = say("<answer>3</answer>", reasoning="r1 r2 r3")
    cases = {
        "it answers, its thinking in a field": [well],
        "it calls a tool, in a field": [say(None, tool_calls=[call])],
        "it is busy": [no(503, "come back later"), well],
        "it writes garbage": [(200, "<html>Please log in</html>"), well],
        "it refuses a field": [
            no(400, "use 'max_completion_tokens' instead of 'max_tokens'"),
            well,
        ],
        "it refuses the key": [no(401, f"no such key: {key}")],
    }
    script, printed = [], []

    def show(*words) -> None:
        print(*words, flush=True)
        printed.append(" ".join(words))

    class Handler(JsonHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, value = script.pop(0)
            self.busy = status == 503
            show("  asked ", ", ".join(body))
            wait = "Retry-After: 2 " if self.busy else ""
            show(f"  came   {status} {wait}{json.dumps(value).replace(key, '(the key)')}")
            self.reply(status, value)

        def end_headers(self):
            if self.busy:
                self.send_header("Retry-After", "2")
            super().end_headers()

    async def demo() -> None:
        question = [{"role": "user", "content": 'Count the letter r in "strawberry".'}]
        async with connect(end) as end.client:
            for what, answers in cases.items():
                show(f"\n{what}")
                script[:] = answers
                started = time.monotonic()
                try:
                    answer = await ask(end, question, env, random.Random(0))
                    seconds = time.monotonic() - started
                    show("  became", repr(answer.text), f"after {seconds:.1f} s")
                except Failure as failure:
                    show("  became a failure:", str(failure))
        show("\nin all", str(dict(end.counts)), *end.notes)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env, url = SimpleNamespace(tools=None, think=True), f"http://127.0.0.1:{server.server_port}/v1"
    cfg = Config(model="scripted", api_base=url, api_key_env="A_MADE_UP_KEY", max_tokens=64)
    end = open_endpoint(cfg)
    asyncio.run(demo())
    assert {name: end.counts[name] for name in ("requests", "answers", "retries")} == {
        "requests": 9,
        "answers": 5,
        "retries": 2,
    }
    assert key not in "".join(printed)
