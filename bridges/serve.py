"""One of our policies behind OpenAI's chat completions, on loopback: what speaks to GPT, Llama or
Qwen can speak to pico_base.

    python -m bridges.serve pico_base --port 8000
    python -m bridges.serve runs/NAME                  # base + adapter, from the run's checkpoint
    python -m bridges.serve scripted                   # no model: every reply is "no"

    python train.py --eval-only --api-base http://127.0.0.1:8000/v1 --model pico_base --env letters

It is there to check ourselves: an evaluation over HTTP (bridges/api.py) must give the scores that
the same policy gets in process. Three things decide that.

    exact tokens     A client sends the conversation as text, every time from the start. The
                     template would drop the thinking of earlier turns, and tokenizing text again
                     can cut it elsewhere. So the server remembers the token ids of its replies, by
                     the conversation that they ended, and puts the same ids back; between them
                     stands what rollout.after_reply puts there in training. An assistant's message
                     that it did not write, or forgot, is tokenized as it stands, its thinking
                     included.
    tool calls       If the request has tools, a reply that ends in well-formed <tool_call>s gives
                     them as `tool_calls`, as vLLM does for Qwen. Anything else stays text, so that
                     an environment can say what is wrong with it.
    our own sampler  Requests that arrive within 10 ms of each other are one batch: eight at a time
                     cost little more than one. The keys and values of the last conversations are
                     kept, so that a next turn reads only what is new.

What is not offered (streaming, top_p, penalties) is refused in a sentence rather than ignored: it
would change what is sampled.
"""

import hashlib
import json
import queue
import secrets
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import torch
from tqdm import tqdm

import settings
from bookkeeping import records
from bookkeeping.checkpoint import find_checkpoint, load_checkpoint
from bookkeeping.folder import read_config
from bridges.chat import Refused, listen, read_messages, response, scripted, text_of
from bridges.replies import split_calls
from fast.machine import choose_model
from fast.sampler import Sample, TorchSampler
from policy import Policy, defang, encode, load_policy
from rollout import after_reply, prompt_ids

GATHER = 0.01  # seconds to wait for company, once a request is there
REMEMBERED = 20_000  # replies whose token ids are kept
CACHED = 2**30  # bytes of keys and values that are kept; pico_base needs 2 kB per token, a 4B 147


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
    # The key of a conversation that ends in a reply of ours -> the reply's token ids …
    said: OrderedDict = field(default_factory=OrderedDict)
    # … and -> (the conversation's token ids, its keys and values).
    caches: OrderedDict = field(default_factory=OrderedDict)
    # Of the tokenizer, which is not made for threads, and of both memories.
    lock: threading.Lock = field(default_factory=threading.Lock)


# ----------------------------------------------------------------------------- sampling, in batches


def work(desk: Desk, sampler: TorchSampler) -> None:
    """The one thread that samples: it gathers what arrives together, and samples what is alike in
    one batch."""
    while True:
        batch, until = [desk.jobs.get()], time.monotonic() + GATHER
        while (left := until - time.monotonic()) > 0:
            try:
                batch.append(desk.jobs.get(timeout=left))
            except queue.Empty:
                break
        alike: dict[tuple, list[Job]] = {}
        for job in batch:
            kind = (job.n, job.max_tokens, job.temperature, job.cache is None)
            alike.setdefault(kind, []).append(job)
        for (n, *limits, _), jobs in alike.items():
            prompts, caches = [job.ids for job in jobs], [job.cache for job in jobs]
            seeds = [job.seeds for job in jobs]
            try:
                groups = sampler.sample(prompts, n, *limits, seeds, caches, keep=n == 1)
                for job, samples in zip(jobs, groups):
                    job.samples.set_result(samples)
            except Exception as error:  # the server outlives a bad batch; each client is told
                for job in jobs:
                    job.samples.set_exception(error)


# ------------------------------------------------------------------------- conversations and tokens


def key(messages: list[dict], tools, think: bool) -> str:
    return hashlib.sha256(json.dumps([messages, tools, think]).encode()).hexdigest()


def conversation_ids(desk: Desk, messages: list[dict], tools, think: bool) -> list[int]:
    """The token ids of a conversation, as training has them: replies as they were sampled, and
    rollout.after_reply between them."""
    policy, replies = desk.policy, [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    ids = prompt_ids(policy, messages[: replies[0] if replies else None], tools, think)
    for i, following in zip(replies, [*replies[1:], len(messages)]):
        said = desk.said.get(key(messages[: i + 1], tools, think))
        if said is None:
            text = defang(policy.tokenizer, messages[i]["content"])
            said = [*encode(policy, text), policy.tokenizer.eos_token_id]
        ids += said
        ids += after_reply(policy, messages[i + 1 : following], think)[1]
    return ids


# -------------------------------------------------------------------------------------- one request


def number(body: dict, names: tuple[str, ...], default, low, high, kind=int):
    """The first of `names` that is set, checked."""
    name = next((n for n in names if body.get(n) is not None), None)
    value = default if name is None else body[name]
    if type(value) not in (int, kind) or not low <= value <= high:
        whole = "whole " if kind is int else ""
        raise Refused(f"{name} must be a {whole}number from {low} to {high}")
    return value


@dataclass
class Request:
    """A request for a chat completion, read and checked."""

    messages: list[dict]
    tools: list[dict] | None
    stop: list[str]
    think: bool  # chat_template_kwargs.enable_thinking, as vLLM spells it
    logprobs: bool


NOT_OFFERED = {  # field: the values that change nothing
    "stream": (None, False),
    "top_p": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"),
    "stop_token_ids": (None, []),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "guided_json": (None,),
    "typical_p": (None, 1),
    "best_of": (None, 1),
    "top_logprobs": (None, 0),
}


def read_request(desk: Desk, body: dict) -> Request:
    """The parts of a request that are not numbers; Refused says what is wrong with them."""
    if not isinstance(body, dict):
        raise Refused("the request must be a JSON object")
    if body.get("model") != desk.name:
        sentence = f"there is no model {body.get('model')!r} here, only {desk.name}"
        raise Refused(sentence, 404, "model_not_found")
    for name, harmless in NOT_OFFERED.items():
        if body.get(name) not in harmless:
            raise Refused(f"{name} is not offered here; leave it out")
    messages, tools = read_messages(body), body.get("tools") or None
    if not isinstance(tools, list | None) or not all(isinstance(t, dict) for t in tools or ()):
        raise Refused("tools must be a list of JSON schemas")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise Refused("stop must be a text or a list of texts")
    extra = body.get("chat_template_kwargs") or {}
    think = not (isinstance(extra, dict) and extra.get("enable_thinking") is False)
    return Request(messages, tools, stop, think, bool(body.get("logprobs")))


def complete(desk: Desk, body: dict) -> dict:
    """A request for a chat completion -> its response."""
    request = read_request(desk, body)
    messages, tools, think = request.messages, request.tools, request.think
    with desk.lock:
        ids = conversation_ids(desk, messages, tools, think)
        replies = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        before = messages[: replies[-1] + 1] if replies else []
        read, cache = desk.caches.get(key(before, tools, think), ([], None))
    limit = getattr(desk.policy.lm.config, "max_position_embeddings", None) or 10**9
    room = limit - len(ids)
    default = max(1, min(desk.default_tokens, room))
    max_tokens = number(body, ("max_completion_tokens", "max_tokens"), default, 1, 10**9)
    if max_tokens > room:
        raise Refused(
            f"the conversation has {len(ids)} tokens, and with {max_tokens} more it exceeds the "
            f"model's maximum context length of {limit}",
            code="context_length_exceeded",
        )
    n = number(body, ("n",), 1, 1, 256)
    seed = number(body, ("seed",), secrets.randbits(32), 0, 2**63)
    temperature = number(body, ("temperature",), 1.0, 0, 100, float)
    if n > 1 or not read or ids[: len(read)] != read:  # forgotten replies may be cut otherwise
        cache = None
    job = Job(ids, n, max_tokens, temperature, [(seed, i) for i in range(n)], cache)
    desk.jobs.put(job)
    samples = job.samples.result()
    with desk.lock:
        choices = [{"index": i} | choice(desk, s, ids, request) for i, s in enumerate(samples)]
    return response(desk.name, choices, len(ids), sum(len(s.token_ids) for s in samples))


def choice(desk: Desk, sample: Sample, asked: list[int], request: Request) -> dict:
    """One sample as OpenAI writes it. Its token ids are remembered for the next turn.

    asked: the ids that it answers.
    """
    decode, end = desk.policy.tokenizer.decode, desk.policy.tokenizer.eos_token_id
    ids = sample.token_ids if sample.finished else [*sample.token_ids, end]
    text = decode(ids[:-1], skip_special_tokens=False)
    why = "stop" if sample.finished else "length"
    ends = [at for s in request.stop if (at := text.find(s)) >= 0]
    content, calls = text[: min(ends)] if ends else text, []
    if ends:
        why = "stop"
    elif request.tools and sample.finished:
        content, calls = split_calls(text)
    message: dict = {"role": "assistant", "content": content}
    if calls:
        message = {"role": "assistant", "content": content or None, "tool_calls": calls}
        why = "tool_calls"
    if not ends:  # a text that was cut is not what was sampled
        said = {"role": "assistant", "content": text_of(message)}
        remember(
            desk, key([*request.messages, said], request.tools, request.think), asked, ids, sample
        )
    logprobs = None
    if request.logprobs:
        logprobs = {
            "content": [
                {"token": decode([t]), "logprob": p, "bytes": None, "top_logprobs": []}
                for t, p in zip(sample.token_ids, sample.logprobs)
            ]
        }
    return {"message": message, "finish_reason": why, "logprobs": logprobs}


def remember(desk: Desk, place: str, asked: list[int], ids: list[int], sample: Sample) -> None:
    """Keep a reply's token ids, and what it leaves of keys and values. The oldest go first."""
    desk.said[place] = ids
    if sample.cache is not None:
        desk.caches[place] = asked + ids, sample.cache
    while len(desk.said) > REMEMBERED:
        desk.said.popitem(last=False)
    while sum(cache.nbytes for _, cache in desk.caches.values()) > CACHED:
        desk.caches.popitem(last=False)


# --------------------------------------------------------------------------------------- the server


def serve_policy(
    policy: Policy, name: str, port: int = 0, default_tokens: int = 1024
) -> ThreadingHTTPServer:
    """A server whose replies are sampled from the policy; the caller runs serve_forever()."""
    desk = Desk(policy, name, default_tokens)
    threading.Thread(target=work, args=(desk, TorchSampler(policy)), daemon=True).start()
    return listen(partial(complete, desk), name, port)


def load(name: str) -> Policy:
    """pico_base, pico_swarm, a folder or hub id of a model; or a run folder: then its base with the
    adapter of its checkpoint."""
    folder = Path(name)
    written = folder / "config.json"
    config = records.record(written) if written.exists() else {}
    if "lora_rank" not in config:  # a model's config, not a run's
        return load_policy(name, lora_rank=0, lora_alpha=64)
    saved = find_checkpoint(folder / "checkpoint")
    if saved is None:
        raise SystemExit(f"{folder}: it has no checkpoint yet; train first, or serve its base")
    cfg = settings.Config(**read_config(folder, settings.Config))
    base, *_ = choose_model(cfg.model, cfg.env, cfg.device)
    policy = load_policy(base, cfg.lora_rank, cfg.lora_alpha, cfg.device, cfg.seed)
    load_checkpoint(saved, policy)
    return policy


def main(model: str = "pico_base", /, port: int = 8000, max_tokens: int = 1024) -> None:
    """Serve a policy at http://127.0.0.1:PORT/v1, until Ctrl-C.

    Args:
        model: pico_base, pico_swarm, a run folder, a causal LM's folder or hub id; or scripted.
        port: 0 takes a free one, and says which.
        max_tokens: the longest reply if a request does not say.
    """
    name = Path(model).resolve().name if Path(model).exists() else model
    if model != "scripted":
        with records.foreign(model):
            policy = load(model)
    try:
        if model == "scripted":
            server = listen(scripted(lambda messages: "no"), name, port)
        else:
            server = serve_policy(policy, name, port, max_tokens)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise SystemExit(f"--port {port}: {why}; choose another one") from None
    url = f"http://127.0.0.1:{server.server_port}/v1"
    shown = "" if model == "scripted" else f" ({policy.n_parameters / 1e6:.1f}M parameters)"
    try:
        print(f"serving {name}{shown} at {url}; Ctrl-C ends it")
        words = f"--eval-only --api-base {url} --model {name} --env letters --eval-n 64"
        print(f"try: python train.py {words}", flush=True)
        server.bar = tqdm(unit=" replies", mininterval=1)
        server.serve_forever()
    except KeyboardInterrupt:
        print("\nstopped")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
