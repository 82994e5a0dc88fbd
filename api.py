"""Evaluate any model: our tasks over any OpenAI-compatible endpoint, so that GPT, Llama and Qwen stand in one table with a run of ours.

    python train.py --eval-only --api-base https://HOST/v1 --model NAME --env letters
    python report.py compare runs/NAME runs/my-run

    seed -> env.reset -> messages -> POST /chat/completions -> text -> env.step -> … -> env.score -> the same evals.jsonl as any run

The other end is not ours: it may be slow, wrong, hostile or gone. So everything has an end. A request has a time limit over the whole of it (a
server that drips a byte a second is cut as well) and a largest size; the evaluation has a time limit over all requests. What may pass (429, 5xx, a lost
connection, an answer that is none) is tried again, later each time, and not before the server's Retry-After; what will not pass (400, 401, 404) is not.
An episode that still gets no answer counts as failed: it is in no mean, and the number of failed ones stands beside n. If nothing at all can be
had, one sentence says why.

    text      Environments read text, endpoints may speak in fields. `tool_calls` become <tool_call>…</tool_call>, reasoning becomes <think>…</think> where the
              task allows thinking; the server gets back what it sent, and the result as a tool message. Where the policy called in plain
              text, the result goes as <tool_response> in a user message, which is what Qwen's template makes of a tool message.
    options   An endpoint that refuses a field of the request by name (max_tokens, temperature, tools) is asked again in another way; it is noted.
    the key   comes from an environment variable, goes into one header, and is written nowhere; what a server echoes is blanked.

HTTP is done by httpx2, which huggingface_hub brings along. The openai package would add its own retries, not to be counted, and no limit over a whole
request. Everything happens in one thread (asyncio): while one request waits, another is sent.

Run me: `python api.py` starts a scripted server that answers some tasks well, some badly and some not at all, and evaluates it.
"""

import asyncio
import json
import math
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx2 as httpx
from tqdm import tqdm

import behaviour
import compare
import metrics
import viewer
from env_letters import split_thinking
from evaluate import EVAL_SEEDS, eval_line
from rollout import Episode, finish
from runfolder import append, open_run, save_episodes, write_json
from sampler import first_line
from settings import Config, by_size, check, eval_sets, fill, kind

LARGEST = 8_000_000  # bytes of an answer
LONGEST = 64  # characters a token of max_tokens may have; a server that ignores max_tokens is cut there
PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before the first try again; doubled each time up to the second
HINTS = {
    401: "; the key in {key} is missing or wrong", 403: "; the key in {key} may not do this",
    404: "; check --model, and whether --api-base should end in /v1",
}  # fmt: skip
OTHER_WAYS = {  # a word of a refusal: the field of ours that it is about, and what is done instead
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
    """A request that came to nothing. again: it may be tried again, after so many seconds at least."""

    def __init__(self, why: str, again: bool = False, after: float = 0.0, status: int = 0, too_long: bool = False):
        super().__init__(why)
        self.again, self.after, self.status, self.too_long = again, after, status, too_long


class Hopeless(Exception):
    """Every further request would fail the same way."""


@dataclass
class Endpoint:
    cfg: object  # Config: the flags
    url: str  # …/chat/completions
    key: str  # the secret itself; never printed
    options: dict  # of every request: max_tokens, temperature
    client: httpx.AsyncClient | None = None
    deadline: float = math.inf  # on the loop's clock
    next_slot: float = 0.0  # when the next request may be sent
    counts: Counter = field(default_factory=Counter)  # requests, answers, retries, prompt_tokens, completion_tokens, without_usage
    notes: list[str] = field(default_factory=list)


@dataclass
class Answer:
    text: str  # as the environment reads it
    message: dict  # as the server wants it back
    cut: bool  # it ran out of tokens
    tokens: int


# ------------------------------------------------------------------------------------------------ one request


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
    raw = bytearray()
    try:
        async with asyncio.timeout(end.cfg.api_timeout), end.client.stream("POST", end.url, json=body) as response:
            async for piece in response.aiter_bytes():
                raw += piece
                if len(raw) > LARGEST:
                    raise Failure(f"an answer of more than {LARGEST / 1e6:g} MB", again=True)
    except TimeoutError:
        raise Failure(f"no whole answer within {end.cfg.api_timeout:g} s", again=True) from None
    except httpx.HTTPError as error:
        raise Failure(f"{type(error).__name__}: {blank(end, str(error)) or 'the connection was lost'}", again=True) from None
    try:  # twice: escaped in the JSON may be the key, or half a character that no file can hold
        answer = json.loads(blank(end, json.dumps(json.loads(raw), ensure_ascii=False)).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        answer = None
    status = response.status_code
    if status == 200 and isinstance(answer, dict):
        return answer
    if status == 200:
        kind = response.headers.get("content-type", "no content type")[:60]
        raise Failure(f"an answer that is no JSON object ({kind})", again=True)
    problem = answer.get("error") if isinstance(answer, dict) else None
    problem = problem if isinstance(problem, dict) else {"message": problem or blank(end, raw[:1000].decode("utf-8", "replace"))}
    told = re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", str(problem.get("message") or "no message"))[:300].strip()
    code, again = f"{problem.get('code')} {problem.get('type')}", status in (408, 409, 425, 429) or status >= 500
    raise Failure(
        f"HTTP {status}: {told}" + HINTS.get(status, "").format(key=end.cfg.api_key_env), status=status, again=again and "insufficient_quota" not in code,
        after=seconds_of(response.headers.get("retry-after")), too_long="context_length" in code or "context length" in told.lower(),
    )  # fmt: skip


def blank(end: Endpoint, text: str) -> str:
    """Without the key. A short one is a stand-in ("none"), no secret, and may stand anywhere."""
    return text.replace(end.key, "***") if len(end.key) >= 8 else text


def write_request(end: Endpoint, talk: list[dict], tools) -> dict:
    if tools and OTHER_WAYS["tool"][1] in end.notes:
        shown = TOOLS_AS_TEXT.format(tools="\n".join(json.dumps(tool) for tool in tools))
        talk, tools = [{"role": "system", "content": shown}, *talk], None
    return {"model": end.cfg.model, "messages": talk, **end.options, **({"tools": tools} if tools else {})}


def adapt(end: Endpoint, body: dict, failure: Failure) -> bool:
    """Was a field of this request refused by name, and is there another way? Then the requests to come go that way."""
    for word, (name, note) in OTHER_WAYS.items():
        refused = failure.status in (400, 422) and not failure.too_long and word in str(failure) and name in body
        if refused and (
            note in end.notes or name != "tools" or not end.counts["answers"]
        ):  # who took tools once is refusing something else
            if note not in end.notes:  # several requests may be refused at once; the first one decides
                end.notes.append(note)
                value = end.options.pop(name, None)
                end.options |= {"max_completion_tokens": value} if name == "max_tokens" else {}
            return True
    return False


async def ask(end: Endpoint, talk: list[dict], env, dice: random.Random) -> Answer:
    """The model's answer to a conversation, tried as often as is allowed."""
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
            pause = max(failure.after, min(PAUSE * 2**tries, LONGEST_PAUSE) * dice.uniform(0.5, 1))  # apart, or all come back at once
            if not failure.again or tries == end.cfg.api_retries or loop.time() + pause > end.deadline:
                raise
            tries += 1
            end.counts["retries"] += 1
            await asyncio.sleep(pause)


# ------------------------------------------------------------------------------------------------ text and fields


def read_answer(end: Endpoint, response: dict, think: bool) -> Answer:
    """{"choices": [{"message": …}], "usage": …} -> Answer. Whatever may be missing or of another type is a Failure, or counted."""
    try:
        choice = response["choices"][0]
        message, cut = choice["message"], choice.get("finish_reason") == "length"
        content, calls = message.get("content"), message.get("tool_calls") or []
        if isinstance(content, list):  # parts; those that are no text are not for us
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
    usage = response.get("usage")
    asked, spoken = (usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens"))
    known = all(type(n) is int and 0 <= n < 10_000_000 for n in (asked, spoken))
    end.counts["prompt_tokens"] += asked if known else 0
    end.counts["completion_tokens"] += spoken if known else 0
    end.counts["without_usage"] += not known
    text = content or ""
    if thought and think and not split_thinking(text)[0]:
        text = f"<think>\n{thought.strip()}\n</think>\n{text}"
    for call in calls:  # `</` is written `<\/`, the same in JSON, so that no argument can end the call
        name, arguments = json.dumps(call["function"]["name"]), call["function"]["arguments"].replace("</", "<\\/")
        text += "\n" * bool(text and text[-1] != "\n") + f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    room = LONGEST * (end.options.get("max_tokens") or end.options["max_completion_tokens"])
    back = {"role": "assistant", "content": content if calls else content or "", **({"tool_calls": calls} if calls else {})}
    return Answer(text[:room], back, cut or len(text) > room, spoken if known else 0)


def read_call(i: int, call: dict) -> dict:
    """A native tool call with nothing but what the format has; arguments as text, which need not be JSON (the environment says so)."""
    name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": str(call.get("id") or f"call_{i}"), "type": "function", "function": {"name": str(name), "arguments": arguments}}


def put_back(new: list[dict], calls: list[dict]) -> list[dict]:
    """What the environment says, as the server wants it: a tool message for every native call, <tool_response> where there was none."""
    told = [m["content"] for m in new if m["role"] == "tool"]
    rest = [m for m in new if m["role"] != "tool"]
    if not calls:
        return [{"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"} for content in told] + rest
    told = ["\n".join(told), *["not carried out: one call a turn"] * (len(calls) - 1)]
    return [{"role": "tool", "tool_call_id": call["id"], "content": content} for call, content in zip(calls, told)] + rest


# ------------------------------------------------------------------------------------------------ episodes


async def play_one(end: Endpoint, make_env: Callable, seed: int, group: int) -> Episode:
    """One episode to its end, as rollout.play does it. Of a foreign model the tokens are not known, only how many they were."""
    episode, dice = Episode(seed, group, [], [], []), random.Random(seed)
    try:
        env = make_env()
        episode.messages = list(env.reset(seed))
        talk, done = list(episode.messages), False
        while not done:
            answer = await ask(end, talk, env, dice)
            episode.turns += 1
            episode.sampled += [True] * answer.tokens  # so that reply_tokens counts them
            episode.messages.append({"role": "assistant", "content": answer.text})
            new, done = env.step(answer.text)
            if answer.cut:
                episode.stop_reason, done = "truncated", True
            if not done:
                episode.messages += new
                talk += [answer.message, *put_back(new, answer.message.get("tool_calls", []))]
    except Failure as failure:
        if failure.too_long and episode.turns:  # the conversation outgrew the model's context, as it can in our own loop
            episode.stop_reason = "truncated"
        else:
            episode.stop_reason, episode.error = "error", str(failure)
            end.counts["refused"] += not failure.again
            if not end.counts["answers"] and (failure.status in HINTS or end.counts["refused"] >= 3):
                raise Hopeless(str(failure)) from None
    except Exception as error:  # a bug of the environment, or an answer that nobody thought of: one episode is lost, the others go on
        episode.stop_reason, episode.error = "error", blank(end, first_line(error))
    if episode.stop_reason != "error":
        finish(episode, env)
    return episode


async def play_all(end: Endpoint, make_env: Callable, seeds: list[int], ended: Callable[[Episode], None]) -> None:
    """`concurrency` episodes at a time. Raises TimeoutError when the evaluation's time is over, Hopeless when nothing can be had."""
    loop, todo = asyncio.get_running_loop(), iter(enumerate(seeds))
    loop.getaddrinfo = lookup
    end.deadline = loop.time() + 60 * end.cfg.api_minutes
    in_vain = 0

    async def player() -> None:
        nonlocal in_vain
        for group, seed in todo:
            episode = await play_one(end, make_env, seed, group)
            ended(episode)
            in_vain += episode.stop_reason == "error"
            if not end.counts["answers"] and in_vain >= max(3, end.cfg.api_concurrency):
                raise Hopeless(f"nothing was answered in {in_vain} episodes, the rest is not tried; the last one: {episode.error}")

    headers = {"Authorization": f"Bearer {end.key}"} if end.key else {}
    local = httpx.URL(end.url).host in ("127.0.0.1", "localhost", "::1")  # no proxy leads to this machine
    limits = httpx.Limits(max_connections=end.cfg.api_concurrency)
    client = httpx.AsyncClient(headers=headers, timeout=None, limits=limits, trust_env=not local)
    async with asyncio.timeout_at(end.deadline), client as end.client:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(end.cfg.api_concurrency, len(seeds))):
                    group.create_task(player())
        except* (Hopeless, OSError) as several:  # OSError: the run folder cannot be written
            raise several.exceptions[0] from None


def run(work):
    """As asyncio.run, but for Ctrl-C. The system may give that signal to any thread, torch's included, and then the loop sleeps on until its next event: twice in a test
    it did. A handler of the loop's own wakes it. And nobody waits for the tasks to be cancelled, because the process is over."""
    loop, before = asyncio.new_event_loop(), signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with suppress(NotImplementedError, ValueError, RuntimeError):  # Windows, or not the main thread
        loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        result = loop.run_until_complete(work)
    except KeyboardInterrupt:
        raise
    except BaseException:
        tidy(loop, before)
        raise
    tidy(loop, before)
    return result


def tidy(loop, handler) -> None:
    loop.run_until_complete(loop.shutdown_asyncgens())
    with suppress(NotImplementedError, ValueError, RuntimeError):
        if loop.remove_signal_handler(signal.SIGINT):
            signal.signal(signal.SIGINT, handler)
    loop.close()


async def lookup(*args, **kwargs):
    """getaddrinfo in a thread that nobody waits for: a name server that does not answer must not keep Ctrl-C waiting."""
    loop, found = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def work() -> None:
        try:
            tell, what = found.set_result, socket.getaddrinfo(*args, **kwargs)
        except OSError as error:
            tell, what = found.set_exception, error
        with suppress(RuntimeError):  # the loop is closed, and nobody wants to know any more
            loop.call_soon_threadsafe(lambda: found.done() or tell(what))

    threading.Thread(target=work, daemon=True).start()
    return await found


# ------------------------------------------------------------------------------------------------ train.py --api-base


def endpoint(cfg) -> Endpoint:
    """The Endpoint that the flags describe; ValueError in one sentence if they do not."""
    if not re.fullmatch(
        r"https?://(\[[\da-fA-F:]+\]|[^\s@?#/:\[\]]+)(:\d{1,5})?(/[^\s@?#]*)?", cfg.api_base
    ):  # not repeated: it may hold a password
        raise ValueError("--api-base: give an address such as https://HOST/v1, without a user, a question mark or a key in it")
    if cfg.model == "auto":
        raise ValueError("--api-base: name the model that the endpoint shall run, with --model NAME")
    if cfg.eval_only or cfg.resume:
        raise ValueError("--api-base evaluates an endpoint, --eval-only runs/NAME and --resume take a run folder; give one of them")
    for name, least in (("concurrency", 1), ("timeout", 1e-3), ("minutes", 1e-3), ("retries", 0), ("rpm", 0)):
        if not least <= getattr(cfg, f"api_{name}") < math.inf:
            raise ValueError(f"--api-{name} {getattr(cfg, f'api_{name}')}: must be at least {least:g}")
    key = os.environ.get(cfg.api_key_env, "").strip()
    if not key and cfg.api_key_env != "OPENAI_API_KEY":  # again not repeated: somebody may give the key itself
        raise ValueError("--api-key-env: no environment variable of that name is set; give the name of the one that holds the key")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"the key in {cfg.api_key_env} has characters that no key has; set it again")
    options = {"max_tokens": cfg.max_tokens} | ({} if cfg.api_temperature is None else {"temperature": cfg.api_temperature})
    options |= {} if cfg.think else {"chat_template_kwargs": {"enable_thinking": False}}  # vLLM's way to say it to Qwen3
    base = cfg.api_base.rstrip("/").removesuffix("/chat/completions")
    return Endpoint(cfg, f"{base}/chat/completions", key, options)


def evaluate_api(cfg) -> Path:
    """Evaluate an endpoint on the held-out tasks that the flags describe; returns its run folder, which compare.py takes like any other."""
    check(cfg)
    large = by_size(math.inf, kind(cfg.env))
    fill(cfg, {name: large[name] for name in ("max_tokens", "swarm_error_penalty") if name in large})
    end, started = endpoint(cfg), time.monotonic()
    level = f"-{cfg.difficulty}" if cfg.difficulty else ""
    cfg.name = (
        cfg.name or f"{re.sub('[^A-Za-z0-9._-]+', '-', cfg.model)}-{cfg.env.rpartition(':')[2]}{level}-{time.strftime('%m%d-%H%M%S')}"
    )
    folder, _, lock = open_run(cfg)
    write_json(folder / "config.json", asdict(cfg))
    tasks, make_env = next((name, env) for name, (trained, env) in eval_sets(cfg).items() if trained)
    played, end_of_it, code = {}, "", 0
    print(f"{cfg.model} at {cfg.api_base}, {cfg.env}, {tasks}: {cfg.eval_n} tasks, {cfg.api_concurrency} at a time, "
          f"{cfg.api_minutes:g} minutes at most")  # fmt: skip
    bar = tqdm(total=cfg.eval_n, desc="eval", unit=" tasks")

    def ended(episode: Episode) -> None:
        played[episode.group] = episode
        save_episodes(folder, 0, "final", None, [[episode]], temperature=1.0)  # at once: these cost money, and a kill may come
        bar.set_postfix({name: end.counts[name] for name in ("requests", "retries", "completion_tokens")}, refresh=False)
        bar.update()

    try:
        run(play_all(end, make_env, [EVAL_SEEDS + i for i in range(cfg.eval_n)], ended))
    except TimeoutError:
        end_of_it = f"the {cfg.api_minutes:g} minutes were over (--api-minutes)"
    except Hopeless as reason:
        end_of_it, code = str(reason), 1
    except KeyboardInterrupt:
        end_of_it, code = "stopped by you", 130
    bar.close()
    answered = {i for i, e in played.items() if e.stop_reason != "error"}
    missing = {i: played[i].error if i in played else end_of_it for i in range(cfg.eval_n) if i not in answered}
    episodes = [played[i] for i in sorted(answered)]
    if episodes:
        append(folder / "evals.jsonl", eval_line(0, "final", tasks, True, episodes, missing))
    counts = {name: end.counts[name] for name in ("requests", "retries", "prompt_tokens", "completion_tokens")}
    seconds = round(time.monotonic() - started, 2)
    means = {"reward": metrics.mean([e.reward for e in episodes])} if episodes else {}
    means |= {part: compare.share([e.components[part] for e in episodes]) for part in (episodes[0].components if episodes else ())}
    write_json(folder / "summary.json", {
        "env": cfg.env, "model": cfg.model, "seed": cfg.seed, "trained": tasks, "updates": 0, "api": {"n": len(episodes), "failed": len(missing), **counts, "notes": end.notes, "ended": end_of_it},
        "eval": {tasks: {"final": {part: mean.dict() for part, mean in means.items()}}} if means else {}, "seconds": {"total": seconds},
        "tokens": {"prompt": counts["prompt_tokens"], "sampled": counts["completion_tokens"]}, "config": asdict(cfg),
    })  # fmt: skip
    text = tell(cfg, end, tasks, means, episodes, list(missing.values()), seconds, end_of_it)
    (folder / "report.md").write_text(text)
    viewer.write_html(folder)
    lock.release()
    print(f"\n{text}\nkept in {folder}: report.md, report.html, episodes.jsonl; beside a run: python report.py compare {folder} runs/NAME")
    if code or not episodes:
        print(f"{cfg.model}: {end_of_it or 'every task failed; report.md lists why'}", file=sys.stderr, flush=True)
        if code == 130:  # all is written, and to take torch apart needs a second or two
            sys.stdout.flush()
            os._exit(code)
        raise SystemExit(1)
    return folder


def tell(cfg, end: Endpoint, tasks: str, means: dict, episodes: list[Episode], failed: list[str], seconds: float, why: str) -> str:
    """report.md of an evaluation over an API."""
    c, how = end.counts, f"temperature {end.options['temperature']:g}" if "temperature" in end.options else "the endpoint's temperature"
    out = [f"# {cfg.model}", "", f"{cfg.env}, {tasks}, over an API ({how}, at most {cfg.max_tokens} tokens a reply): n = {len(episodes)} held-out tasks"
           + (f"; {len(failed)} more failed or were not played, and are in no mean." if failed else "."), ""]  # fmt: skip
    out += ["| | mean | 95% interval |", "|---|---|---|", *(f"| {part} | {m.mean:.3f} | [{m.low:.3f}, {m.high:.3f}] |" for part, m in means.items()), ""]  # fmt: skip
    out += [f"* {c['requests']} requests, {c['retries']} of them to try again, in {seconds:.0f} s; {c['prompt_tokens']:,} prompt and {c['completion_tokens']:,} "
            f"completion tokens{', not counting ' + str(c['without_usage']) + ' answers that did not say' if c['without_usage'] else ''}.",
            f"* {sum(e.stop_reason == 'truncated' for e in episodes)} of {len(episodes)} episodes were truncated: out of tokens."]  # fmt: skip
    reasons = Counter(failed).most_common()
    out += [f"* {n} failed: {behaviour.quote(reason)}" for reason, n in reasons[:12]]
    out += [f"* {sum(n for _, n in reasons[12:])} failed for other reasons: episodes.jsonl has each"] * (len(reasons) > 12)
    out += [f"* The endpoint was asked another way: {note}." for note in end.notes]
    out += [f"* It ended early: {behaviour.quote(why)}"] * bool(why)
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    import tempfile

    from lab.serve import Refused, listen, scripted

    PAUSE, seen = 0.05, Counter()

    def say(messages: list[dict]) -> str:
        """Right for short words, wrong for longer ones; a 503 now and then, and always for a word of eleven letters."""
        letters, text = re.search(r'Count the letters? (.*) in "(.*)"\.', messages[0]["content"]).groups()
        seen[text] += 1
        if len(text) == 11 or len(text) % 7 == 0 and seen[text] < 3:
            raise Refused("too busy", 503)
        counts = {c: text.count(c) + (len(text) > 12) for c in letters.split(", ")}
        return f"<answer>{json.dumps(counts) if len(counts) > 1 else next(iter(counts.values()))}</answer>"

    server = listen(scripted(say), "scripted")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as runs:
        evaluate_api(Config(env="letters", difficulty=3, eval_n=24, api_retries=2, runs=runs, model="scripted",
                                  api_base=f"http://127.0.0.1:{server.server_port}/v1"))  # fmt: skip
