"""A server with OpenAI's chat completions, on loopback, for one of our policies: what speaks to GPT, Llama or Qwen can speak to pico_base.

    python -m bridges.serve pico_base --port 8000
    python -m bridges.serve runs/NAME                  # base + adapter, from the run's checkpoint
    python -m bridges.serve scripted                   # no model: every reply is "no"

    python train.py --eval-only --api-base http://127.0.0.1:8000/v1 --model pico_base --env letters --eval-n 64

It is there to check ourselves: an evaluation over HTTP (bridges/api.py) must give the scores that the same policy gets in process. Three things decide that.

    exact tokens     A client sends the conversation as text, every time from the start. The template would drop the thinking of earlier turns, and
                     cutting text into tokens again can cut elsewhere. So the server remembers the token ids of the replies it gave, by the
                     conversation they ended, and puts the same ids back; between them stands what rollout.delta_ids puts there in training.
                     An assistant's message that it did not write, or forgot, is cut into tokens as it stands, its thinking included.
    tool calls       Where the request has tools, a reply that ends in well-formed <tool_call>s gives them as `tool_calls`, as vLLM does for Qwen. Anything
                     else stays text, so that an environment can say what is wrong with it.
    our own sampler  Requests that arrive within 10 ms of each other are one batch: eight at a time cost little more than one. The keys and values of
                     the last conversations are kept, so that a next turn reads only what is new.

What is not offered (streaming, top_p, penalties) is refused in a sentence, rather than ignored: it would change what is sampled.
"""

import hashlib
import json
import queue
import re
import secrets
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bookkeeping.checkpoint import find_checkpoint, load_checkpoint
from env_letters import split_thinking
from fast.sampler import Sample, TorchSampler
from policy import PICO, Policy, choose_model, load_policy
from rollout import defang, delta_ids, encode, prompt_ids

GATHER = 0.01  # seconds to wait for company, once a request is there
REMEMBERED = 20_000  # replies whose token ids are kept
CACHED = 2**30  # bytes of keys and values that are kept; pico_base needs 2 kB a token, a 4B 147
LARGEST = 20_000_000  # bytes of a request


class Refused(ValueError):
    """What the client did wrong, in one sentence."""

    def __init__(self, sentence: str, status: int = 400, code: str | None = None):
        super().__init__(sentence)
        self.status, self.code = status, code


@dataclass
class Job:
    ids: list[int]  # the conversation up to where the policy speaks
    n: int
    max_tokens: int
    temperature: float
    seeds: list[tuple[int, ...]]
    cache: torch.Tensor | None = None  # keys and values of the first of these ids
    samples: Future = field(default_factory=Future)


@dataclass
class Desk:
    """What the requests share."""

    policy: Policy
    name: str
    default_tokens: int
    jobs: queue.Queue = field(default_factory=queue.Queue)
    said: OrderedDict = field(default_factory=OrderedDict)  # key of a conversation that ends in a reply of ours -> the reply's token ids
    caches: OrderedDict = field(default_factory=OrderedDict)  # the same key -> (the conversation's token ids, its keys and values)
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the tokenizer, which is not made for threads, and of `said`


# ------------------------------------------------------------------------------------------------ sampling, in batches


def work(desk: Desk, sampler: TorchSampler) -> None:
    """The one thread that samples: gather what arrives together, sample what is alike in one batch."""
    while True:
        batch, until = [desk.jobs.get()], time.monotonic() + GATHER
        while (left := until - time.monotonic()) > 0:
            try:
                batch.append(desk.jobs.get(timeout=left))
            except queue.Empty:
                break
        alike: dict[tuple, list[Job]] = {}
        for job in batch:
            alike.setdefault((job.n, job.max_tokens, job.temperature, job.cache is None), []).append(job)
        for (n, max_tokens, temperature, _), jobs in alike.items():
            try:
                prompts, seeds, caches = [job.ids for job in jobs], [job.seeds for job in jobs], [job.cache for job in jobs]
                groups = sampler.sample(prompts, n, max_tokens, temperature, seeds, caches, keep=n == 1)
                for job, samples in zip(jobs, groups):
                    job.samples.set_result(samples)
            except Exception as error:  # the server must outlive one bad batch; each of its clients is told
                for job in jobs:
                    job.samples.set_exception(error)


# ------------------------------------------------------------------------------------------------ messages and tokens


def text_of(message: dict) -> str:
    """A message's text. An assistant's tool calls are written as the policy writes them."""
    content = message.get("content")
    if isinstance(content, list):  # OpenAI's parts
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise Refused("a message's content may be text, or a list of parts of type text; nothing else can be read here")
        content = "".join(part["text"] for part in content)
    if not isinstance(content or "", str):
        raise Refused("a message's content must be text")
    calls = message.get("tool_calls") or []
    try:
        lines = [f'{{"name": {json.dumps(c["function"]["name"])}, "arguments": {c["function"]["arguments"]}}}' for c in calls]
    except (TypeError, KeyError):
        raise Refused('a tool call is {"id": …, "type": "function", "function": {"name": …, "arguments": "…"}}') from None
    return "\n".join([content] * bool(content) + [f"<tool_call>\n{line}\n</tool_call>" for line in lines])


def read_messages(body: dict) -> list[dict]:
    """The request's messages as {"role", "content"}; Refused says what is wrong with them."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise Refused("messages must be a list of at least one message")
    roles = [m.get("role") for m in messages]
    for i, role in enumerate(roles):
        if role not in ("system", "user", "assistant", "tool"):
            raise Refused(f"message {i} has the role {role!r}; system, user, assistant and tool are known")
        if role == "system" and i or role in ("assistant", "tool") and not i or role == "assistant" == roles[i - 1]:
            raise Refused(f"message {i} ({role}) cannot stand there: system comes first, and assistant answers user or tool")
    if roles[-1] not in ("user", "tool"):
        raise Refused("the last message must be from user or tool: that is what is answered")
    return [{"role": m["role"], "content": text_of(m)} for m in messages]


def key(messages: list[dict], tools, think: bool) -> str:
    return hashlib.sha256(json.dumps([messages, tools, think]).encode()).hexdigest()


def conversation_ids(desk: Desk, messages: list[dict], tools, think: bool) -> list[int]:
    """The token ids of a conversation, as training has them: replies as they were sampled, what stands between them as deltas."""
    policy, replies = desk.policy, [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    ids = prompt_ids(policy, messages[: replies[0] if replies else None], tools, think)
    for i, following in zip(replies, [*replies[1:], len(messages)]):
        said = desk.said.get(key(messages[: i + 1], tools, think))
        ids += said or [*encode(policy, defang(policy.tokenizer, messages[i]["content"])), policy.tokenizer.eos_token_id]
        ids += delta_ids(policy, messages[i + 1 : following], think)
    return ids


def split_calls(text: str) -> tuple[str, list[dict]]:
    """'thoughts<tool_call>{…}</tool_call>' -> ('thoughts', tool calls). No calls unless all that follows the thinking is well-formed."""
    rest = split_thinking(text)[1]
    found = re.fullmatch(r"(.*?)((?:\s*<tool_call>[^<]*</tool_call>)+)\s*", rest, re.DOTALL) if "<tool_call>" in rest else None
    calls = []
    for piece in re.findall(r"<tool_call>(.*?)</tool_call>", found[2], re.DOTALL) if found else ():
        try:
            call = json.loads(piece)
            if set(call) != {"name", "arguments"} or not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
                return text, []
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
        except (ValueError, TypeError, RecursionError):
            return text, []
        calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": {"name": call["name"], "arguments": arguments}})
    return (text[: len(text) - len(rest)] + found[1], calls) if calls else (text, [])


# ------------------------------------------------------------------------------------------------ one request


def number(body: dict, names: tuple[str, ...], default, low, high, kind=int):
    """The first of `names` that is set, checked."""
    name = next((n for n in names if body.get(n) is not None), None)
    value = default if name is None else body[name]
    if type(value) not in (int, kind) or not low <= value <= high:
        raise Refused(f"{name} must be {'a whole' if kind is int else 'a'} number from {low} to {high}")
    return value


def complete(desk: Desk, body: dict) -> dict:
    """A request for a chat completion -> its response."""
    if not isinstance(body, dict):
        raise Refused("the request must be a JSON object")
    if body.get("model") != desk.name:
        raise Refused(f"there is no model {body.get('model')!r} here, only {desk.name}", 404, "model_not_found")
    for name, harmless in (("stream", False), ("top_p", 1), ("presence_penalty", 0), ("frequency_penalty", 0), ("logit_bias", {})):
        if body.get(name) not in (None, harmless):
            raise Refused(f"{name} is not offered here; leave it out")
    messages, tools = read_messages(body), body.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise Refused("tools must be a list of JSON schemas")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise Refused("stop must be a text or a list of texts")
    extra = body.get("chat_template_kwargs") or {}
    think = not (isinstance(extra, dict) and extra.get("enable_thinking") is False)  # as vLLM spells it
    with desk.lock:
        ids = conversation_ids(desk, messages, tools, think)
        before = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        read, cache = desk.caches.get(key(messages[: before[-1] + 1], tools, think), ([], None)) if before else ([], None)
    limit = getattr(desk.policy.lm.config, "max_position_embeddings", None) or 10**9
    room = limit - len(ids)
    max_tokens = number(body, ("max_completion_tokens", "max_tokens"), max(1, min(desk.default_tokens, room)), 1, 10**9)
    if max_tokens > room:
        sentence = (
            f"the conversation has {len(ids)} tokens, and with {max_tokens} more it exceeds the model's maximum context length of {limit}"
        )
        raise Refused(sentence, code="context_length_exceeded")
    n = number(body, ("n",), 1, 1, 256)
    seed = number(body, ("seed",), secrets.randbits(32), 0, 2**63)
    cache = (
        cache if n == 1 and read and ids[: len(read)] == read else None
    )  # an earlier reply that was forgotten may have been cut otherwise
    job = Job(ids, n, max_tokens, number(body, ("temperature",), 1.0, 0, 100, float), [(seed, i) for i in range(n)], cache)
    desk.jobs.put(job)
    samples = job.samples.result()
    with desk.lock:
        choices = [
            choice(desk, i, sample, ids, messages, tools, think, stop, bool(body.get("logprobs"))) for i, sample in enumerate(samples)
        ]
    spoken = sum(len(sample.token_ids) for sample in samples)
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}", "object": "chat.completion", "created": int(time.time()), "model": desk.name, "choices": choices,
        "usage": {"prompt_tokens": len(ids), "completion_tokens": spoken, "total_tokens": len(ids) + spoken},
    }  # fmt: skip


def choice(
    desk: Desk, i: int, sample: Sample, asked: list[int], messages: list[dict], tools, think: bool, stop: list[str], logprobs: bool
) -> dict:
    """One sample as OpenAI writes it; its token ids are remembered for the next turn. asked: the ids it answers."""
    decode, why = desk.policy.tokenizer.decode, "stop" if sample.finished else "length"
    text = decode(sample.token_ids[:-1] if sample.finished else sample.token_ids, skip_special_tokens=False)
    ends = [at for s in stop if (at := text.find(s)) >= 0]
    message: dict = {"role": "assistant", "content": text[: min(ends)] if ends else text}
    if ends:
        why = "stop"
    elif tools and sample.finished:
        content, calls = split_calls(text)
        if calls:
            message, why = {"role": "assistant", "content": content or None, "tool_calls": calls}, "tool_calls"
    if not ends:  # a text that was cut is another one
        ids = sample.token_ids if sample.finished else [*sample.token_ids, desk.policy.tokenizer.eos_token_id]
        place = key([*messages, {"role": "assistant", "content": text_of(message)}], tools, think)
        desk.said[place] = ids
        if sample.cache is not None:
            desk.caches[place] = asked + ids, sample.cache
        while len(desk.said) > REMEMBERED:  # what was there first goes first
            desk.said.popitem(last=False)
        while sum(cache.nbytes for _, cache in desk.caches.values()) > CACHED:
            desk.caches.popitem(last=False)
    out = {"index": i, "message": message, "finish_reason": why, "logprobs": None}
    if logprobs:
        tokens = zip(sample.token_ids, sample.logprobs)
        out["logprobs"] = {"content": [{"token": decode([t]), "logprob": p, "bytes": None, "top_logprobs": []} for t, p in tokens]}
    return out


# ------------------------------------------------------------------------------------------------ HTTP


class JsonHandler(BaseHTTPRequestHandler):
    """Answers in JSON, over connections that are kept. Every server of ours on loopback is one of these."""

    protocol_version = "HTTP/1.1"

    def reply(self, status: int, value: dict) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def listen(answer: Callable[[dict], dict], name: str, port: int = 0) -> ThreadingHTTPServer:
    """A server on loopback that gives answer(request) -> response; port 0 takes a free one. The caller runs serve_forever()."""

    class Handler(JsonHandler):
        disable_nagle_algorithm = True
        timeout = 600  # of a connection that says nothing

        def refuse(self, status: int, sentence: str, code: str | None = None) -> None:
            self.reply(status, {"error": {"message": sentence, "type": "invalid_request_error", "param": None, "code": code}})

        def do_GET(self):
            if self.path.rstrip("/") != "/v1/models":
                return self.refuse(404, "there is only /v1/models and /v1/chat/completions")
            self.reply(200, {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "picoswarm"}]})

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

        def log_message(self, *args):
            pass  # main counts the replies instead

    class Server(ThreadingHTTPServer):
        daemon_threads, bar = True, None  # bar: counts replies
        request_queue_size = 256  # many clients may knock at once

    return Server(("127.0.0.1", port), Handler)


def serve_policy(policy: Policy, name: str, port: int = 0, default_tokens: int = 1024) -> ThreadingHTTPServer:
    """A server whose replies are sampled from the policy; the caller runs serve_forever()."""
    desk = Desk(policy, name, default_tokens)
    threading.Thread(target=work, args=(desk, TorchSampler(policy)), daemon=True).start()
    return listen(partial(complete, desk), name, port)


def scripted(say: Callable[[list[dict]], str]) -> Callable[[dict], dict]:
    """An answer without a model: say(messages) -> the reply's text. For tests and demonstrations; a word is a token."""

    def answer(body: dict) -> dict:
        messages = read_messages(body)
        text = say(messages)
        asked, spoken = sum(len(m["content"].split()) for m in messages), len(text.split())
        message = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": asked, "completion_tokens": spoken, "total_tokens": asked + spoken}
        return {
            "id": "scripted",
            "object": "chat.completion",
            "created": 0,
            "model": body.get("model"),
            "choices": [message],
            "usage": usage,
        }

    return answer


def load(name: str) -> Policy:
    """pico_base, pico_swarm, a folder or hub id of a model, or a run folder: then its base with the adapter of its checkpoint."""
    import settings

    folder = Path(name)
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
    if "lora_rank" not in config:  # a model's config, not a run's
        path = PICO.with_name(name) if not folder.exists() and PICO.with_name(name).is_dir() else name
        return load_policy(str(path), lora_rank=0, lora_alpha=64)
    saved = find_checkpoint(folder / "checkpoint")
    if saved is None:
        raise SystemExit(f"{folder}: it has no checkpoint yet; train first, or serve its base model")
    cfg = settings.Config(**config)
    path, _ = choose_model(cfg.model, cfg.env)
    policy = load_policy(path, cfg.lora_rank, cfg.lora_alpha, cfg.device, cfg.seed)
    load_checkpoint(saved, policy)
    return policy


def main(model: str = "pico_base", /, port: int = 8000, max_tokens: int = 1024) -> None:
    """Serve a policy at http://127.0.0.1:PORT/v1, until Ctrl-C.

    Args:
        model: pico_base, pico_swarm, a run folder, a folder or hub id of a causal LM; or the word scripted.
        port: 0 takes a free one, and says which.
        max_tokens: the longest reply where a request does not say.
    """
    name = Path(model).resolve().name if Path(model).exists() else model
    try:
        if model == "scripted":
            server = listen(scripted(lambda messages: "no"), name, port)
        else:
            policy = load(model)
            server = serve_policy(policy, name, port, max_tokens)
    except OSError as error:
        raise SystemExit(f"--port {port}: {error.strerror}; choose another one") from None
    url = f"http://127.0.0.1:{server.server_port}/v1"
    shown = "" if model == "scripted" else f" ({policy.n_parameters / 1e6:.1f}M parameters)"
    try:
        print(f"serving {name}{shown} at {url}; Ctrl-C ends it")
        print(f"try: python train.py --eval-only --api-base {url} --model {name} --env letters --eval-n 64", flush=True)
        server.bar = tqdm(unit=" replies", mininterval=1)
        server.serve_forever()
    except KeyboardInterrupt:
        print("\nstopped")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
