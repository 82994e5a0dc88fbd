"""Evaluate any model on our tasks over an OpenAI-compatible endpoint, in one table with our runs.

    OPENAI_API_KEY=… python train.py --api-base https://HOST/v1 --model NAME
    python -m bookkeeping.compare runs/NAME runs/my-run

    seed -> env.reset -> messages -> ask -> text -> env.step -> … -> env.score
         -> the same evals.jsonl as any run

A model of our own is evaluated this way, too, once it is served: `python -m bridges.export merge`,
then `vllm serve`, or `transformers serve`.

The endpoint may be slow, wrong or gone. The openai client retries errors that may pass (429, 5xx, a
lost connection), waiting as long as Retry-After asks, up to two minutes; a reply has a time limit
over all its retries. If a reply never comes, its episode fails: it counts in no mean, and the
report gives the number of failures next to n. Answers cost money, so each episode is written as
soon as it is over, and Ctrl-C keeps what was played. If no request is ever answered, one sentence
says why, and the rest is not tried.

    text      Environments read text, but endpoints may answer in fields. `tool_calls` become
              <tool_call>…</tool_call>, reasoning becomes <think>…</think> if the task allows
              thinking, a list of parts becomes the texts in it. The endpoint gets back what it
              sent, and the result as a tool message. If the model called in plain text, the result
              goes as <tool_response> in a user message, as Qwen's template would write a tool
              message.
    options   If an endpoint refuses a field of the request by name (max_tokens, temperature,
              tools), the request is made in another way, and a note in the report says so.
    errors    Some answer 200 with an error in it, or with no choice: that counts as the status
              that the error names, else as 502, and is tried again like it.
    the key   comes from OPENAI_API_KEY and is written nowhere; an echo of it is blanked out.

Everything happens in one thread (asyncio): while one request waits, another is sent.
"""

import asyncio
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

try:
    import openai
except ModuleNotFoundError:
    raise ValueError("--api-base needs the package openai; pip install openai") from None

from bookkeeping import records, refusals, report
from bookkeeping.folder import code_hash, make_folder
from chat import QWEN, in_plain_words
from env_letters import split_thinking
from evaluate import eval_line, eval_sets
from rollout import UNLIMITED, EnvironmentFailed, Episode, score_episode
from settings import Config, by_size, dev_seeds, env_kind, fill
from swarm.tools import arguments_of, written

RETRIES = 5  # per request; the client's pause starts at half a second and doubles each time
SECONDS = 300.0  # for one reply, all its retries included
HINTS = {
    "AuthenticationError": "; the key in OPENAI_API_KEY is missing or wrong",
    "PermissionDeniedError": "; the key in OPENAI_API_KEY may not do this",
    "NotFoundError": "; check --model, and whether --api-base should end in /v1",
    "APIConnectionError": "; start the server, or check --api-base",
    "TimeoutError": f"no whole answer within {SECONDS:g} s",
}
# {a word in a refusal: (our field that it is about, what is done instead)}
OTHER_WAYS = {
    "max_completion_tokens": ("max_tokens", "max_completion_tokens instead of max_tokens"),
    "tool": ("tools", "the tools as text in a system message"),
    "temperature": ("temperature", "at its own temperature"),
    "chat_template_kwargs": ("chat_template_kwargs", "without saying that it must not think"),
}


class Endpoint:
    """An endpoint: its address, how requests are made, and what they have cost.

    ValueError in one sentence if the flags describe none; it does not repeat the address, because
    people put secrets there.
    """

    def __init__(self, cfg: Config):
        if not re.fullmatch(r"https?://[^\s@?#/]+(/[^\s@?#]*)?", cfg.api_base):
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
        self.key = os.environ.get("OPENAI_API_KEY", "").strip() or "none"  # never printed
        self.client = openai.AsyncOpenAI(
            base_url=cfg.api_base.rstrip("/").removesuffix("/chat/completions"),
            api_key=self.key,
            timeout=SECONDS,
            max_retries=RETRIES,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks={"response": [as_it_is]}),
        )
        self.notes: dict[str, str] = {}  # {a field that it refused: what was done instead}
        self.spent = Counter()  # answers, retries, prompt_tokens, completion_tokens

    def safe(self, text: str) -> str:
        """Without the key (a short one is a placeholder, not a secret), and fit for a file."""
        text = text.replace(self.key, "***") if len(self.key) >= 8 else text
        return text.encode("utf-8", "replace").decode()


# ------------------------------------------------------------------------------------ the endpoint


async def as_it_is(response) -> None:
    """Give an answer of 200 that holds an error, or no choice, the error's own status, or 502."""
    await response.aread()
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        answer = json.loads(response.content)
        choice = (answer.get("choices") or [None])[0] or {}
        error = answer.get("error") or choice.get("error")
        if response.is_success and (error or not choice):
            code = str(error.get("code")) if isinstance(error, dict) else ""
            response.status_code = int(code) if re.fullmatch(r"[45]\d\d", code) else 502


async def ask(end: Endpoint, talk: list[dict], env) -> tuple[str, dict, bool, int]:
    """The model's answer to a conversation, as read_answer returns it. Raises any error."""
    fields = {"max_tokens": end.cfg.max_tokens, "temperature": 0.0}
    if env.tools:
        fields["tools"] = env.tools
    if not end.cfg.think:  # vLLM's way to tell Qwen3
        fields["chat_template_kwargs"] = {"enable_thinking": False}
    messages = talk
    for name in end.notes.keys() & fields.keys():
        refused = fields.pop(name)
        if name == "max_tokens":
            fields["max_completion_tokens"] = refused
        if name == "tools":
            messages = in_plain_words(talk, refused, QWEN)
    try:
        async with asyncio.timeout(SECONDS):
            response = await end.client.chat.completions.with_raw_response.create(
                model=end.cfg.model, messages=messages, extra_body=fields
            )
    except (openai.BadRequestError, openai.UnprocessableEntityError) as refusal:
        if adapt(end, fields, refusal):
            return await ask(end, talk, env)
        raise
    end.spent["retries"] += response.retries_taken
    return read_answer(end, response.content, env.think)


def adapt(end: Endpoint, fields: dict, refusal: openai.APIStatusError) -> bool:
    """Was a field of this request refused by name, and is there another way?

    If so, all further requests are made that way.
    """
    for word, (name, note) in OTHER_WAYS.items():
        if word in str(refusal) and name in fields and not too_long(refusal):
            end.notes[name] = note
            return True
    return False


def too_long(error: Exception) -> bool:
    """Does the conversation not fit into the model's context?"""
    told = re.search("context[ _]length", str(error), re.IGNORECASE)
    return isinstance(error, openai.BadRequestError) and bool(told)


def reason_of(end: Endpoint, error: Exception) -> str:
    """What went wrong, in one line without the key."""
    text = str(error.__cause__ or error)[:300]
    if not isinstance(error, ValueError | EnvironmentFailed):  # those explain themselves
        name = type(error).__name__
        text = f"{name}: {text}{HINTS.get(name, '')}"
    return records.printable(end.safe(" ".join(text.split())))


# --------------------------------------------------------------------------------- text and fields


def read_answer(end: Endpoint, raw: bytes, think: bool) -> tuple[str, dict, bool, int]:
    """b'{"choices": [{"message": …}], "usage": …}' -> (text, message, out of tokens?, tokens).

    The text is for the environment to read, the message to send back to the endpoint. ValueError if
    there is no readable message in it.
    """
    try:
        response = json.loads(raw)
        usage = response.get("usage")
        choice = response["choices"][0]
        cut = str(choice.get("finish_reason")).lower() in ("length", "max_tokens")
        message = choice["message"]
        calls = message.get("tool_calls") or []
        for number, call in enumerate(calls):
            called = call.get("function") or call
            # Some leave out what strict servers want back.
            call.update(
                id=call.get("id") or f"call_{end.spent['answers']}_{number}",
                type="function",
                function={"name": called["name"], "arguments": arguments_of(called)},
            )
        content = message.get("content")
        # Mistral's thinking models have thoughts among the parts of the content.
        parts = [part for part in content if isinstance(part, dict)] if content else []
        thought = text_of([part.get("thinking") for part in parts]) or text_of(
            message.get("reasoning_content") or message.get("reasoning")
        )
        content = text_of(content)
        if content is None:
            content = text_of(message.get("refusal"))
        reply = {"content": "" if content is None else content, "tool_calls": calls}
        if think and not split_thinking(reply["content"])[0]:
            reply["reasoning"] = thought
        text = end.safe(written(reply))
        spent = {
            "prompt_tokens": count(usage, "prompt_tokens", UNLIMITED),
            "completion_tokens": count(usage, "completion_tokens", end.cfg.max_tokens),
        }
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        raise ValueError("an answer that is no JSON, or has no readable message in it") from None
    if content is None and not (calls or thought or cut):
        raise ValueError("an answer whose message is empty (content is null)")
    end.spent.update(spent, answers=1)
    # DeepSeek and Kimi refuse a call that comes back without the thinking before it
    kept = ("tool_calls", "reasoning_content", "reasoning") if calls else ()
    back = {"role": "assistant", "content": content or ""}
    back |= {name: message[name] for name in kept if message.get(name) is not None}
    return text, back, cut, spent["completion_tokens"]


def text_of(content) -> str | None:
    """The text of a content: a text, {"text": …}, or a list of such parts; None if it has none."""
    if isinstance(content, dict):
        return text_of(content.get("text"))
    if isinstance(content, list):
        return "".join(text_of(part) or "" for part in content) or None
    return content


def count(usage, name: str, most: int) -> int:
    """A count of tokens as the endpoint says it, between 0 and `most`; 0 if it says no number."""
    try:
        return max(0, min(most, int(usage[name])))
    except (LookupError, TypeError, ValueError, OverflowError):
        return 0


def put_back(new: list[dict], calls: list[dict]) -> list[dict]:
    """The environment's messages as the endpoint wants them.

    That is a tool message for every native call, or <tool_response> text if there was none.
    """
    if not calls:
        return in_plain_words(new, None, QWEN)
    results = ["\n".join(m["content"] for m in new if m["role"] == "tool")]
    results += ["not carried out: one call a turn"] * (len(calls) - 1)
    told = [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call, result in zip(calls, results)
    ]
    return told + [m for m in new if m["role"] != "tool"]


# ---------------------------------------------------------------------------------------- episodes


async def play_one(end: Endpoint, make_env: Callable, seed: int, group: int) -> Episode:
    """One whole episode, as rollout.play plays it.

    An endpoint's tokens are not known, only their number.
    """
    episode = Episode(seed, group, [], [], [])
    try:
        env = refusals.guarded(make_env)
        episode.messages = list(env.reset(seed))
        talk, done = list(episode.messages), False
        while not done:
            text, message, cut, tokens = await ask(end, talk, env)
            episode.turns += 1
            episode.sampled += [True] * tokens  # so that reply_tokens counts them
            episode.messages.append({"role": "assistant", "content": text})
            new, done = env.step(text)
            if cut:
                episode.stop_reason, done = "truncated", True
            if not done:
                episode.messages += new
                talk += [message, *put_back(new, message.get("tool_calls", []))]
    except Exception as error:  # from endpoint or environment: it costs only this episode
        if not (episode.turns and too_long(error)):
            episode.stop_reason, episode.error = "error", reason_of(end, error)
            return episode
        episode.stop_reason = "truncated"  # as in our loop
    score_episode(episode, env)
    return episode


async def play_all(end: Endpoint, make_env: Callable, seeds: list[int], keep: Callable) -> None:
    """An episode of each seed, as many at a time as --api-concurrency says; keep(episode) when it
    is over."""
    remaining = iter(enumerate(seeds))

    async def player() -> None:
        for group, seed in remaining:
            keep(await play_one(end, make_env, seed, group))

    async with end.client:
        await asyncio.gather(*(player() for _ in range(end.cfg.api_concurrency)))


# ----------------------------------------------------------------------------- train.py --api-base


def evaluate_api(cfg: Config) -> Path:
    """Evaluate an endpoint on the development tasks that the flags describe.

    Returns its run folder, which bookkeeping/compare.py takes like any other.
    """
    refusals.check(cfg)
    refusals.preflight(replace(cfg, sft_steps=0))  # before an answer is paid for; without SFT
    seeds = dev_seeds(cfg)
    cfg.eval_n = len(seeds)  # a file of rows may have fewer
    fill(cfg, by_size(math.inf, env_kind(cfg.env)))
    end, started = Endpoint(cfg), time.monotonic()
    folder, lock = make_folder(cfg)  # noqa: F841  (the lock is kept while it lives)
    records.write_json(folder / "config.json", asdict(cfg))
    tasks, make_env = next((name, env) for name, (own, env) in eval_sets(cfg).items() if own)
    played, ended = {}, ""

    def keep(episode: Episode) -> None:
        played[episode.group] = episode
        records.save_episodes(folder, 0, "final", None, [[episode]])
        bar.update()
        if not end.spent["answers"] and len(played) >= max(3, cfg.api_concurrency):
            raise TimeoutError("nothing was ever answered, the rest is not tried")

    with tqdm(total=cfg.eval_n, desc=f"{cfg.model}, {tasks}", unit=" tasks") as bar:
        try:
            asyncio.run(play_all(end, make_env, seeds, keep))
        except (KeyboardInterrupt, TimeoutError) as stop:
            ended = str(stop) or "stopped by you"
    episodes = [e for _, e in sorted(played.items()) if e.stop_reason != "error"]
    errors = {i: e.error for i, e in played.items() if e.stop_reason == "error"}
    missing = {i: errors.get(i, ended) for i in range(cfg.eval_n) if i in errors or i not in played}
    if episodes:
        records.append(
            folder / "evals.jsonl", eval_line(0, "final", tasks, True, episodes, missing)
        )
    summary = {
        "env": cfg.env,
        "model": cfg.model,
        "seed": cfg.seed,
        "trained": tasks,
        "updates": 0,
        "api": {
            "n": len(episodes),
            "failed": len(missing),
            "retries": end.spent["retries"],
            "notes": list(end.notes.values()),
            "ended": ended,
        },
        "seconds": {"total": round(time.monotonic() - started, 2)},
        "tokens": {"prompt": end.spent["prompt_tokens"], "sampled": end.spent["completion_tokens"]},
        "machine": {"environment_code": code_hash(cfg.env)},
        "config": asdict(cfg),
    }
    records.write_json(folder / "summary.json", summary)
    report.write(folder)
    text = report.text(report.collect(folder)[0]).partition("## Config")[0]
    text += tell(summary["api"], missing)
    records.write_whole(folder / "report.md", text)
    print(f"\n{text}\nkept in {folder}")
    if ended or not episodes:
        reasons = [ended or "every task failed", *errors.values()][:2]
        raise SystemExit(f"{cfg.model}: {'; '.join(reasons)}")
    return folder


def tell(api: dict, missing: dict[int, str]) -> str:
    """What report.md says about an evaluation over an API. missing: {a task that failed: why}."""
    reasons = Counter(missing.values()).most_common(12)
    lines = [
        f"Over an API: n = {api['n']} development tasks; {api['failed']} more failed or were not "
        "played, and are in no mean. Tokens are as the endpoint counts them; "
        f"{api['retries']} retries before an answer came.\n",
        *(f"* The endpoint was asked another way: {note}." for note in api["notes"]),
        *(f"* {times} failed: {records.clean(reason)}" for reason, times in reasons),
    ]
    return "\n".join(lines) + "\n"
