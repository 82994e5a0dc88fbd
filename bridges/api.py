"""Evaluate any model: our tasks over any OpenAI-compatible endpoint, so that GPT, Llama and Qwen stand in one table with a run of ours.

    python train.py --eval-only --api-base https://HOST/v1 --model NAME --env letters
    python -m bookkeeping.report compare runs/NAME runs/my-run

    seed -> env.reset -> messages -> endpoint.ask -> text -> env.step -> … -> env.score -> the same evals.jsonl as any run

The other end may be slow, wrong, hostile or gone. bridges/endpoint.py gives every request an end; here the evaluation gets one, a time limit over all of them.
An episode that gets no answer counts as failed: it is in no mean, and the number of failed ones stands beside n. Answers cost money, so each episode
is written as soon as it is over: a time limit, a Ctrl-C or a kill loses none that had ended. If nothing is ever answered, one sentence says why, and
the rest is not tried.

Everything happens in one thread (asyncio): while one request waits, another is sent.

Run me: `python -m bridges.api` starts a scripted server that answers some tasks well, some badly and some not at all, and evaluates it.
"""

import asyncio
import math
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

import metrics
from bookkeeping import behaviour, compare, viewer
from bookkeeping.run import append, open_run, save_episodes, write_json
from bridges.endpoint import HINTS, Endpoint, Failure, ask, blank, connect, open_endpoint, put_back
from evaluate import EVAL_SEEDS, eval_line
from policy import first_line
from rollout import Episode, finish
from settings import Config, by_size, check, eval_sets, fill, kind, short


class Hopeless(Exception):
    """Every further request would fail the same way."""


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
    """--api-concurrency episodes at a time. Raises TimeoutError when the evaluation's time is over, Hopeless when nothing is ever answered."""
    loop, todo = asyncio.get_running_loop(), iter(enumerate(seeds))
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

    async with asyncio.timeout_at(end.deadline), connect(end) as end.client:
        try:
            async with asyncio.TaskGroup() as players:
                for _ in range(min(end.cfg.api_concurrency, len(seeds))):
                    players.create_task(player())
        except* (Hopeless, OSError) as several:  # OSError: the run folder cannot be written
            raise several.exceptions[0] from None


def run(work):
    """asyncio.run, apart from Ctrl-C. The system may give that signal to any thread, torch's included, and then the loop sleeps on until its
    next event: in a test it did so twice. A handler of the loop's own wakes it. After a Ctrl-C nobody waits for the tasks to be cancelled,
    because the process is over."""
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
    """Close the loop, and give Ctrl-C back to the handler that was there before."""
    loop.run_until_complete(loop.shutdown_asyncgens())
    with suppress(NotImplementedError, ValueError, RuntimeError):
        if loop.remove_signal_handler(signal.SIGINT):
            signal.signal(signal.SIGINT, handler)
    loop.close()


# ------------------------------------------------------------------------------------------------ train.py --api-base


def evaluate_api(cfg) -> Path:
    """Evaluate an endpoint on the held-out tasks that the flags describe; returns its run folder, which bookkeeping/compare.py takes like any other."""
    check(cfg)
    large = by_size(math.inf, kind(cfg.env))
    fill(cfg, {name: large[name] for name in ("max_tokens", "swarm_error_penalty") if name in large})
    end, started = open_endpoint(cfg), time.monotonic()
    level = f"-{cfg.difficulty}" if cfg.difficulty else ""
    cfg.name = cfg.name or f"{re.sub('[^A-Za-z0-9._-]+', '-', cfg.model)}-{short(cfg.env)}{level}-{time.strftime('%m%d-%H%M%S')}"
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
    print(
        f"\n{text}\nkept in {folder}: report.md, report.html, episodes.jsonl; beside a run: python -m bookkeeping.report compare {folder} runs/NAME"
    )
    if code or not episodes:
        print(f"{cfg.model}: {end_of_it or 'every task failed; report.md lists why'}", file=sys.stderr, flush=True)
        if code == 130:  # all is written, and an ordinary exit, which takes torch apart, needs a second or two
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
    import json
    import tempfile
    import threading

    from bridges import endpoint
    from bridges.serve import Refused, listen, scripted

    endpoint.PAUSE, seen = 0.05, Counter()

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
