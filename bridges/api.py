"""Evaluate any model: our tasks over any OpenAI-compatible endpoint, so that GPT, Llama and Qwen
stand in one table with a run of ours.

    OPENAI_API_KEY=… python train.py --eval-only --api-base https://HOST/v1 --model NAME
    python -m bookkeeping.compare runs/NAME runs/my-run

    seed -> env.reset -> messages -> ask -> text -> env.step -> … -> env.score
         -> the same evals.jsonl as any run

A model of our own is evaluated this way, too, once it is served: `python -m bridges.export merge`,
then `vllm serve`, or `transformers serve`.

The endpoint may be slow, wrong, hostile or gone, so everything has an end: an answer has a largest
size, a reply a time limit over all its retries, and so has the evaluation. The openai client
retries what may pass (429, 5xx, a lost connection), waiting as long as Retry-After asks. An episode
whose reply does not come fails: it is in no mean, and the report counts it beside n. Answers cost
money, so each episode is written as soon as it is over. If nothing is ever answered, one sentence
says why, and the rest is not tried.

    text      Environments read text, endpoints may speak in fields. `tool_calls` become
              <tool_call>…</tool_call>, reasoning becomes <think>…</think> if the task allows
              thinking. The endpoint gets back what it sent, and the result as a tool message. If
              the model called in plain text, the result goes as <tool_response> in a user message,
              which is what Qwen's template makes of a tool message.
    options   An endpoint that refuses a field of the request by name (max_tokens, temperature,
              tools) is asked in another way, and a note in the report says so.
    the key   comes from OPENAI_API_KEY and is written nowhere; an echo of it is blanked.

Everything happens in one thread (asyncio): while one request waits, another is sent.

Run me: `python -m bridges.api` shows what an environment reads of two answers.
"""

import asyncio
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import openai
from tqdm import tqdm

import metrics
from bookkeeping import records, report
from bookkeeping.folder import code_hash, make_folder
from bookkeeping.guard import Guarded, preflight
from bookkeeping.presets import by_size, kind
from bookkeeping.records import append, write_json
from bookkeeping.refusals import check
from env_letters import split_thinking
from evaluate import eval_line, known, parts
from rollout import EnvironmentFailed, Episode, finish
from settings import Config, dev_seeds, eval_sets, fill
from swarm.tools import wrap_call

RETRIES = 5  # of a request; the client doubles its pause each time, from half a second on
SECONDS = 120.0  # that an endpoint may be silent, and …
REPLY_SECONDS = 300.0  # … for one reply, all its retries included
STOPPED = "stopped by you"
MINUTES = 60.0  # for the evaluation; what is not done by then counts as failed
LARGEST = 8_000_000  # bytes of an answer
ADDRESS = r"https?://(\[[\da-fA-F:]+\]|[^\s@?#/:\[\]]+)(:\d{1,5})?(/[^\s@?#]*)?"
HINTS = {
    401: "; the key in OPENAI_API_KEY is missing or wrong",
    403: "; the key in OPENAI_API_KEY may not do this",
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
    """No answer, and why, in one line."""


class Endpoint:
    """Where and how is asked, and what it has cost.

    ValueError in one sentence if the flags describe none; it does not repeat the address, because
    people put secrets there.
    """

    client: openai.AsyncOpenAI  # while its event loop runs

    def __init__(self, cfg: Config):
        if not re.fullmatch(ADDRESS, cfg.api_base):
            raise ValueError(
                "--api-base: give an address such as https://HOST/v1, "
                "without a user, a question mark or a key in it"
            )
        if cfg.model == "auto" or cfg.eval_only or cfg.resume or cfg.held_out:
            raise ValueError(
                "--api-base evaluates the endpoint's --model NAME, on development tasks; leave out "
                "--resume, --held-out and the folder of --eval-only"
            )
        self.cfg = cfg
        self.url = cfg.api_base.rstrip("/").removesuffix("/chat/completions")
        self.key = os.environ.get("OPENAI_API_KEY", "").strip() or "none"  # never printed
        # sent with every request
        self.options = {"max_tokens": cfg.max_tokens, "temperature": 0.0}
        if not cfg.think:  # vLLM's way to tell Qwen3
            self.options["chat_template_kwargs"] = {"enable_thinking": False}
        self.notes: list[str] = []  # fields that it refused, and what was done instead
        self.spent = Counter()  # answers, retries, prompt_tokens, completion_tokens
        self.ended = ""  # why the rest was not tried


# ------------------------------------------------------------------------------------ the endpoint


async def ask(end: Endpoint, talk: list[dict], env) -> tuple[str, dict, bool, int]:
    """The model's answer to a conversation, as read_answer has it. Raises whatever went wrong."""
    tools, messages = env.tools or [], talk
    if tools and OTHER_WAYS["tool"][1] in end.notes:
        shown = "\n".join(json.dumps(tool) for tool in tools)
        messages = [{"role": "system", "content": TOOLS_AS_TEXT.format(tools=shown)}, *talk]
        tools = []
    fields = end.options | ({"tools": tools} if tools else {})
    request = {"model": end.cfg.model, "messages": messages, "extra_body": fields}
    create, raw = end.client.chat.completions.with_streaming_response.create, bytearray()
    try:
        async with asyncio.timeout(REPLY_SECONDS), create(**request) as response:
            async for piece in response.iter_bytes():
                raw += piece
                if len(raw) > LARGEST:
                    raise Failure(f"an answer of more than {LARGEST / 1e6:g} MB")
    except TimeoutError:
        raise Failure(f"no whole answer within {REPLY_SECONDS:g} s") from None
    except openai.APIStatusError as refusal:
        if adapt(end, fields, refusal):
            return await ask(end, talk, env)
        raise
    answer = read_answer(end, raw, env.think)
    end.spent.update(answers=1, retries=response.retries_taken)
    return answer


def adapt(end: Endpoint, fields: dict, refusal: openai.APIStatusError) -> bool:
    """Was a field of this request refused by name, and is there another way?

    Then all further requests go that way.
    """
    about_fields = refusal.status_code in (400, 422) and not too_long(refusal)
    told = str(refusal.body) if about_fields else ""
    for word, (name, note) in OTHER_WAYS.items():
        if word in told and name in fields:
            if note not in end.notes:  # several requests may be refused at once
                end.notes.append(note)
            if end.options.pop(name, None) and name == "max_tokens":
                end.options["max_completion_tokens"] = end.cfg.max_tokens
            return True
    return False


def too_long(error: Exception) -> bool:
    """Does the conversation not fit into the model's context?"""
    told = str(error.body) if isinstance(error, openai.BadRequestError) else ""
    return bool(re.search("context[ _]length", told, re.IGNORECASE))


def why(end: Endpoint, error: Exception) -> str:
    """What went wrong, in one line without the key."""
    if isinstance(error, openai.APIStatusError):
        problem = error.body.get("message") if isinstance(error.body, dict) else error.body
        told = f"HTTP {error.status_code}: {str(problem)[:300]}{HINTS.get(error.status_code, '')}"
    elif isinstance(error.__cause__, httpx.ConnectError):
        told = f"nobody listens there ({error.__cause__}); start the server, or check --api-base"
    elif isinstance(error, Failure | EnvironmentFailed):
        told = str(error)
    else:
        told = f"{type(error).__name__}: {error.__cause__ or error}"[:300]
    return records.printable(blank(end, " ".join(told.split())))


def blank(end: Endpoint, text: str) -> str:
    """Without the key. A short one is a placeholder ("none") and no secret."""
    return text.replace(end.key, "***") if len(end.key) >= 8 else text


# --------------------------------------------------------------------------------- text and fields


def read_answer(end: Endpoint, raw: bytes, think: bool) -> tuple[str, dict, bool, int]:
    """b'{"choices": [{"message": …}], "usage": …}' -> (text, message, out of tokens?, tokens).

    The text is as the environment reads it, the message as the endpoint wants it back. Failure if
    there is no message in it that can be read.
    """
    try:
        # Decoded twice: the key, or half a character that no file can hold, may be escaped in it.
        plain = json.dumps(json.loads(raw), ensure_ascii=False).encode("utf-8", "replace")
        response = json.loads(blank(end, plain.decode()))
        choice = response["choices"][0]
        message, cut = choice["message"], choice.get("finish_reason") == "length"
        content = message.get("content")
        if isinstance(content, list):  # parts; we can only use text
            content = "".join(part["text"] for part in content if part.get("type") == "text")
        if content is None:
            content = message.get("refusal")
        thought = message.get("reasoning_content") or message.get("reasoning")
        calls = message.get("tool_calls") or []
        written = [(str(c["function"]["name"]), c["function"].get("arguments")) for c in calls]
        text = "" if content is None else "" + content  # TypeError if it is no text
        if thought and think and not split_thinking(text)[0]:
            text = f"<think>\n{thought.strip()}\n</think>\n{text}"
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        raise Failure("an answer that is no JSON, or has no readable message in choices") from None
    if content is None and not (calls or thought or cut):
        raise Failure("an answer whose message is empty (content is null)")
    for name, given in written:
        text += "\n" if text and text[-1] != "\n" else ""
        given = given if isinstance(given, str) else json.dumps(given or {})
        # `</` is written `<\/`, the same in JSON, so that no argument can end the call.
        text += wrap_call(name, given.replace("</", "<\\/"))
    back = {"role": "assistant", "content": content if calls else content or ""}
    back |= {"tool_calls": calls} if calls else {}
    usage = {name: count_of(response, name) for name in ("prompt_tokens", "completion_tokens")}
    end.spent.update(usage)
    return text, back, cut, usage["completion_tokens"]


def count_of(response: dict, name: str) -> int:
    """A number of tokens as the endpoint counts them; 0 if it does not say, or nothing sensible."""
    usage = response.get("usage")
    count = usage.get(name) if isinstance(usage, dict) else 0
    return count if type(count) is int and 0 <= count < 10**7 else 0


def put_back(new: list[dict], calls: list[dict]) -> list[dict]:
    """The environment's messages as the endpoint wants them.

    That is a tool message for every native call, and <tool_response> if there was none.
    """
    told = [m["content"] for m in new if m["role"] == "tool"]
    if calls:
        told = ["\n".join(told), *["not carried out: one call a turn"] * (len(calls) - 1)]
        tool = lambda call, text: {"role": "tool", "tool_call_id": call["id"], "content": text}
        answers = [tool(call, text) for call, text in zip(calls, told)]
    else:
        wrapped = [f"<tool_response>\n{text}\n</tool_response>" for text in told]
        answers = [{"role": "user", "content": text} for text in wrapped]
    return answers + [m for m in new if m["role"] != "tool"]


# ---------------------------------------------------------------------------------------- episodes


async def play_one(end: Endpoint, make_env: Callable, seed: int, group: int) -> Episode:
    """One whole episode, as rollout.play plays it.

    A foreign model's tokens are not known, only their number.
    """
    episode, env = Episode(seed, group, [], [], []), Guarded(make_env())
    try:
        episode.messages = list(env.reset(seed))
        talk, done = list(episode.messages), False
        while not done:
            text, said, cut, tokens = await ask(end, talk, env)
            episode.turns += 1
            episode.sampled += [True] * tokens  # so that reply_tokens counts them
            episode.messages.append({"role": "assistant", "content": text})
            new, done = env.step(text)
            if cut:
                episode.stop_reason, done = "truncated", True
            if not done:
                episode.messages += new
                talk += [said, *put_back(new, said.get("tool_calls", []))]
    except Exception as error:  # of the endpoint or the environment: it costs this episode only
        if not (episode.turns and too_long(error)):
            episode.stop_reason, episode.error = "error", why(end, error)
            return episode
        episode.stop_reason = "truncated"  # as in our loop
    finish(episode, env)
    return episode


async def play_all(
    end: Endpoint, make_env: Callable, seeds: list[int], finished: Callable[[Episode], None]
) -> None:
    """Plays --api-concurrency episodes at a time, until nothing is ever answered.

    Raises TimeoutError when the evaluation's time is over.
    """
    remaining, failed = iter(enumerate(seeds)), 0

    async def player() -> None:
        nonlocal failed
        for group, seed in remaining:
            episode = await play_one(end, make_env, seed, group)
            finished(episode)
            failed += episode.stop_reason == "error"
            if not end.spent["answers"] and failed >= max(3, end.cfg.api_concurrency):
                end.ended = f"nothing was answered in {failed} episodes, the rest is not tried"
            if end.ended:
                return

    local = httpx.URL(end.url).host in ("127.0.0.1", "localhost", "::1")  # needs no proxy
    end.client = openai.AsyncOpenAI(
        base_url=end.url,
        api_key=end.key,
        timeout=SECONDS,
        max_retries=RETRIES,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=not local),
    )
    async with asyncio.timeout(60 * MINUTES), end.client:
        await asyncio.gather(*(player() for _ in range(end.cfg.api_concurrency)))


# ----------------------------------------------------------------------------- train.py --api-base


def evaluate_api(cfg: Config) -> Path:
    """Evaluate an endpoint on the development tasks that the flags describe.

    Returns its run folder, which bookkeeping/compare.py takes like any other.
    """
    check(cfg)
    preflight(replace(cfg, sft_steps=0))  # before an answer is paid for; nobody is imitated here
    seeds = dev_seeds(cfg)
    cfg.eval_n = len(seeds)  # a file of rows may have fewer
    fill(cfg, by_size(math.inf, kind(cfg.env)))
    end, started = Endpoint(cfg), time.monotonic()
    folder, lock = make_folder(cfg)  # noqa: F841  (the lock is kept while it lives)
    write_json(folder / "config.json", asdict(cfg))
    tasks, make_env = next((name, env) for name, (own, env) in eval_sets(cfg).items() if own)
    print(
        f"{cfg.model} at {cfg.api_base}, {cfg.env}, {tasks}: {cfg.eval_n} tasks, "
        f"{cfg.api_concurrency} at a time, {MINUTES:g} minutes at most"
    )
    played = {}

    def finished(episode: Episode) -> None:
        played[episode.group] = episode
        records.save_episodes(folder, 0, "final", None, [[episode]])
        bar.update()

    with tqdm(total=cfg.eval_n, desc="eval", unit=" tasks") as bar:
        try:
            asyncio.run(play_all(end, make_env, seeds, finished))
        except TimeoutError:
            end.ended = f"the {MINUTES:g} minutes were over (MINUTES in bridges/api.py)"
        except (KeyboardInterrupt, asyncio.CancelledError):
            end.ended = STOPPED
    episodes = [e for _, e in sorted(played.items()) if e.stop_reason != "error"]
    left = set(range(cfg.eval_n)) - {e.group for e in episodes}
    missing = {i: played[i].error if i in played else end.ended for i in sorted(left)}
    columns = {"reward": [e.reward for e in episodes], **parts(episodes)} if episodes else {}
    means = {name: metrics.mean(known(values)) for name, values in columns.items()}
    if episodes:
        append(folder / "evals.jsonl", eval_line(0, "final", tasks, True, episodes, missing))
    api = {
        "n": len(episodes),
        "failed": len(missing),
        "truncated": sum(e.stop_reason == "truncated" for e in episodes),
        "retries": end.spent["retries"],
        "prompt_tokens": end.spent["prompt_tokens"],
        "completion_tokens": end.spent["completion_tokens"],
    }
    summary = {
        "env": cfg.env,
        "model": cfg.model,
        "seed": cfg.seed,
        "trained": tasks,
        "updates": 0,
        "api": {**api, "notes": end.notes, "ended": end.ended},
        "eval": {tasks: {"final": {p: mean.dict() for p, mean in means.items()}}} if means else {},
        "seconds": {"total": round(time.monotonic() - started, 2)},
        "tokens": {"prompt": api["prompt_tokens"], "sampled": api["completion_tokens"]},
        "machine": {"environment_code": code_hash(cfg.env)},
        "config": asdict(cfg),
    }
    write_json(folder / "summary.json", summary)
    text = tell(summary, means, missing)
    (folder / "report.md").write_text(text, encoding="utf-8")
    report.write(folder)
    print(f"\n{text}\nkept in {folder}")
    if end.ended == STOPPED or not episodes:
        first = next(iter(missing.values()), "")
        print(f"{cfg.model}: {end.ended or 'every task failed'}; {first}", file=sys.stderr)
        raise SystemExit(130 if end.ended == STOPPED else 1)
    return folder


def tell(summary: dict, means: dict, missing: dict[int, str]) -> str:
    """report.md of an evaluation over an API. missing: {a task that failed: why}."""
    api, reasons = summary["api"], Counter(missing.values()).most_common(12)
    lost = f"; {len(missing)} more failed or were not played, and are in no mean" if missing else ""
    out = [
        f"# {summary['model']}\n",
        f"{summary['env']}, {summary['trained']}, over an API (greedy, at most "
        f"{summary['config']['max_tokens']} tokens a reply): n = {api['n']} development tasks"
        f"{lost}.\n",
        "| | mean [95% interval] |",
        "|---|---|",
        *(f"| {part} | {mean.text()} |" for part, mean in means.items()),
        f"\n* {api['prompt_tokens']:,} prompt and {api['completion_tokens']:,} completion tokens, "
        f"as the endpoint counts them; {summary['seconds']['total']:.0f} s, "
        f"{api['retries']} retries before an answer came.",
        f"* {api['truncated']} of {api['n']} episodes were truncated: out of tokens.",
        *(f"* The endpoint was asked another way: {note}." for note in api["notes"]),
        *(f"* {times} failed: {records.quote(reason)}" for reason, times in reasons),
    ]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    end = Endpoint(Config(model="any", api_base="http://127.0.0.1/v1", max_tokens=64))
    call = {"function": {"name": "vote", "arguments": '{"post_id": "post_1"}'}}
    for message in (
        {"content": "<answer>3</answer>", "reasoning": "r1 r2 r3"},
        {"content": None, "tool_calls": [call]},
    ):
        raw = json.dumps({"choices": [{"message": message}]}).encode()
        print(f"{raw.decode()}\n  -> {read_answer(end, raw, think=True)[0]!r}\n")
