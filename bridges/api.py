"""Evaluate any model: our tasks over any OpenAI-compatible endpoint, so that GPT, Llama and Qwen
stand in one table with a run of ours.

    python train.py --eval-only --api-base https://HOST/v1 --model NAME --env letters
    python -m bookkeeping.compare runs/NAME runs/my-run

    seed -> env.reset -> messages -> endpoint.ask -> text -> env.step -> … -> env.score
         -> the same evals.jsonl as any run

The other end may be slow, wrong, hostile or gone. bridges/endpoint.py gives every request an end;
here the evaluation gets one, a time limit over all requests. An episode that gets no answer counts
as failed: it is in no mean, and the number of failed ones is reported with n. Answers cost money,
so each episode is written as soon as it is over: a time limit, Ctrl-C or a kill loses no finished
episode. If nothing is ever answered, one sentence says why, and the rest is not tried.

Everything happens in one thread (asyncio): while one request waits, another is sent.

Run me: `python -m bridges.api` starts a scripted server that answers some tasks well, some badly
and some not at all, and evaluates it.
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
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

import metrics
from bookkeeping import records, report
from bookkeeping.episodes import save_evaluation
from bookkeeping.folder import code_hash, open_folder
from bookkeeping.guard import Guarded, preflight
from bookkeeping.records import append, write_json
from bridges.endpoint import HINTS, Endpoint, Failure, ask, blank, connect, open_endpoint, put_back
from evaluate import eval_line, known, parts
from fast import parallel
from policy import first_line
from rollout import EnvironmentFailed, Episode, finish
from settings import Config, by_size, check, dev_seeds, eval_sets, fill, kind


class Hopeless(Exception):
    """Every further request would fail the same way."""


# ---------------------------------------------------------------------------------------- episodes


async def play_one(end: Endpoint, make_env: Callable, seed: int, group: int) -> Episode:
    """One whole episode, as rollout.play plays it. A foreign model's tokens are not known, only
    their number."""
    episode, dice = Episode(seed, group, [], [], []), random.Random(seed)
    try:
        env = Guarded(make_env())
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
        if failure.too_long and episode.turns:  # longer than the model's context, as in our loop
            episode.stop_reason = "truncated"
        else:
            episode.stop_reason, episode.error = "error", str(failure)
            end.counts["refused"] += not failure.again
            hopeless = failure.nobody or failure.status in HINTS or end.counts["refused"] >= 3
            if hopeless and not end.counts["answers"]:
                raise Hopeless(str(failure)) from None
    except EnvironmentFailed as error:
        episode.stop_reason, episode.error = "error", blank(end, str(error))
    except Exception as error:  # a strange answer: costs this episode only
        episode.stop_reason, episode.error = "error", blank(end, first_line(error))
    if episode.stop_reason != "error":
        finish(episode, env)
    return episode


async def play_all(
    end: Endpoint, make_env: Callable, seeds: list[int], finished: Callable[[Episode], None]
) -> None:
    """Plays --api-concurrency episodes at a time. Raises TimeoutError when the evaluation's time is
    over, Hopeless when nothing is ever answered."""
    loop, remaining = asyncio.get_running_loop(), iter(enumerate(seeds))
    end.deadline = loop.time() + 60 * end.cfg.api_minutes
    failed = 0

    async def player() -> None:
        nonlocal failed
        for group, seed in remaining:
            episode = await play_one(end, make_env, seed, group)
            finished(episode)
            failed += episode.stop_reason == "error"
            if not end.counts["answers"] and failed >= max(3, end.cfg.api_concurrency):
                raise Hopeless(
                    f"nothing was answered in {failed} episodes, the rest is not tried; "
                    f"the last one: {episode.error}"
                )

    async with asyncio.timeout_at(end.deadline), connect(end) as end.client:
        try:
            async with asyncio.TaskGroup() as players:
                for _ in range(min(end.cfg.api_concurrency, len(seeds))):
                    players.create_task(player())
        except* (Hopeless, OSError) as several:  # OSError: the run folder cannot be written
            raise several.exceptions[0] from None


def run(work):
    """asyncio.run, except for Ctrl-C. The system may give that signal to any thread, torch's
    included, and then the loop sleeps until its next event; a handler of the loop's own wakes it.
    After Ctrl-C nobody waits for the tasks to be cancelled, because the process is over."""
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
        close(loop, before)
        raise
    close(loop, before)
    return result


def close(loop, handler) -> None:
    """Close the loop, and give Ctrl-C back to the handler that was there before."""
    loop.run_until_complete(loop.shutdown_asyncgens())
    with suppress(NotImplementedError, ValueError, RuntimeError):
        if loop.remove_signal_handler(signal.SIGINT):
            signal.signal(signal.SIGINT, handler)
    loop.close()


# ----------------------------------------------------------------------------- train.py --api-base


def evaluate_api(cfg) -> Path:
    """Evaluate an endpoint on the development tasks that the flags describe. Returns its run
    folder, which bookkeeping/compare.py takes like any other."""
    if parallel.world() > 1:
        raise ValueError("--api-base is for one process; leave torchrun out")
    if cfg.held_out:
        raise ValueError("--held-out: an endpoint is asked development tasks only; leave it out")
    check(cfg)
    preflight(replace(cfg, sft_steps=0))  # before an answer is paid for; nobody is imitated here
    seeds = dev_seeds(cfg)
    cfg.eval_n = len(seeds)  # a file of rows may have fewer
    large = by_size(math.inf, kind(cfg.env))
    fill(
        cfg, {name: large[name] for name in ("max_tokens", "swarm_error_penalty") if name in large}
    )
    end, started = open_endpoint(cfg), time.monotonic()
    folder, _, lock = open_folder(cfg, set())
    write_json(folder / "config.json", asdict(cfg))
    tasks, make_env = next(
        (name, env) for name, (trained, env) in eval_sets(cfg).items() if trained
    )
    played, ended, code = {}, "", 0
    print(
        f"{cfg.model} at {cfg.api_base}, {cfg.env}, {tasks}: {cfg.eval_n} tasks, "
        f"{cfg.api_concurrency} at a time, {cfg.api_minutes:g} minutes at most"
    )
    bar = tqdm(total=cfg.eval_n, desc="eval", unit=" tasks")

    def finished(episode: Episode) -> None:
        played[episode.group] = episode
        save_evaluation(folder, 0, "final", None, [[episode]])
        shown = ("requests", "retries", "completion_tokens")
        bar.set_postfix({name: end.counts[name] for name in shown}, refresh=False)
        bar.update()

    try:
        run(play_all(end, make_env, seeds, finished))
    except TimeoutError:
        ended = f"the {cfg.api_minutes:g} minutes were over (--api-minutes)"
    except Hopeless as reason:
        ended, code = str(reason), 1
    except KeyboardInterrupt:
        ended, code = "stopped by you", 130
    bar.close()
    answered = {i for i, e in played.items() if e.stop_reason != "error"}
    left = [i for i in range(cfg.eval_n) if i not in answered]
    missing = {i: played[i].error if i in played else ended for i in left}
    episodes = [played[i] for i in sorted(answered)]
    means = {}
    if episodes:
        append(folder / "evals.jsonl", eval_line(0, "final", tasks, True, episodes, missing))
        means["reward"] = metrics.mean([e.reward for e in episodes])
        for part, values in parts(episodes).items():
            means[part] = metrics.mean(known(values))
    seconds = round(time.monotonic() - started, 2)
    write_json(
        folder / "summary.json", summary_of(cfg, end, tasks, means, len(episodes), ended, seconds)
    )
    text = tell(cfg, end, tasks, means, episodes, list(missing.values()), seconds, ended)
    (folder / "report.md").write_text(text, encoding="utf-8")
    report.write(folder)
    lock.release()
    pages = ["report.md", "report.html", *["episodes.jsonl"] * bool(played)]
    kept = f"kept in {folder}: {', '.join(pages)}"
    if episodes:  # there is something to compare
        kept += f"; beside a run: python -m bookkeeping.compare {folder} runs/NAME"
    print(f"\n{text}\n{kept}")
    if code or not episodes:
        why = ended or "every task failed; report.md lists why"
        print(f"{cfg.model}: {why}", file=sys.stderr, flush=True)
        if code == 130:  # all is written; an ordinary exit, which takes torch apart, needs seconds
            sys.stdout.flush()
            os._exit(code)
        raise SystemExit(1)
    return folder


def summary_of(
    cfg, end: Endpoint, tasks: str, means: dict, n: int, ended: str, seconds: float
) -> dict:
    """summary.json: n is how many episodes were answered."""
    counts = {name: end.counts[name] for name in ("requests", "retries")}
    tokens = {name: end.counts[f"{name}_tokens"] for name in ("prompt", "completion")}
    api = {"n": n, "failed": cfg.eval_n - n, **counts}
    api |= {f"{name}_tokens": count for name, count in tokens.items()}
    return {
        "env": cfg.env,
        "model": cfg.model,
        "seed": cfg.seed,
        "trained": tasks,
        "updates": 0,
        "api": {**api, "notes": end.notes, "ended": ended},
        "eval": {tasks: {"final": {p: mean.dict() for p, mean in means.items()}}} if means else {},
        "seconds": {"total": seconds},
        "tokens": {"prompt": tokens["prompt"], "sampled": tokens["completion"]},
        "machine": {"environment_code": code_hash(cfg.env)},
        "config": asdict(cfg),
    }


def tell(
    cfg,
    end: Endpoint,
    tasks: str,
    means: dict,
    episodes: list,
    failed: list[str],
    seconds: float,
    ended: str,
) -> str:
    """report.md of an evaluation over an API. failed: why, of each episode that failed."""
    counts, n = end.counts, len(episodes)
    how = "the endpoint's temperature"
    if "temperature" in end.options:
        how = f"temperature {end.options['temperature']:g}"
    lost = f"; {len(failed)} more failed or were not played, and are in no mean" if failed else ""
    silent = counts["without_usage"]
    uncounted = f", not counting {silent} answers that did not say" if silent else ""
    out = [
        f"# {cfg.model}\n",
        f"{cfg.env}, {tasks}, over an API ({how}, at most {cfg.max_tokens} tokens a reply): "
        f"n = {n} development tasks{lost}.\n",
        "| | mean [95% interval] |",
        "|---|---|",
    ]
    out += [f"| {part} | {m.text()} |" for part, m in means.items()]
    out += [
        f"\n* {counts['requests']} requests, {counts['retries']} of them to try again, in "
        f"{seconds:.0f} s; {counts['prompt_tokens']:,} prompt and "
        f"{counts['completion_tokens']:,} completion tokens{uncounted}.",
        f"* {sum(e.stop_reason == 'truncated' for e in episodes)} of {n} episodes were truncated: "
        "out of tokens.",
    ]
    reasons = Counter(failed).most_common()
    out += [f"* {times} failed: {records.quote(reason)}" for reason, times in reasons[:12]]
    if len(reasons) > 12:
        others = sum(times for _, times in reasons[12:])
        out.append(f"* {others} failed for other reasons: episodes.jsonl has each")
    out += [f"* The endpoint was asked another way: {note}." for note in end.notes]
    if ended:
        out.append(f"* It ended early: {records.quote(ended)}")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    import json
    import tempfile
    import threading

    from bridges import endpoint
    from bridges.chat import Refused, listen, scripted

    endpoint.PAUSE, seen = 0.05, Counter()

    def say(messages: list[dict]) -> str:
        """Right for short words, wrong for longer ones. A 503 now and then, and always for a word
        of eleven letters."""
        question = r'Count the letters? (.*) in "(.*)"\.'
        letters, text = re.search(question, messages[0]["content"]).groups()
        seen[text] += 1
        if len(text) == 11 or (len(text) % 7 == 0 and seen[text] < 3):
            raise Refused("too busy", 503)
        counts = {c: text.count(c) + (len(text) > 12) for c in letters.split(", ")}
        answer = json.dumps(counts) if len(counts) > 1 else next(iter(counts.values()))
        return f"<answer>{answer}</answer>"

    server = listen(scripted(say), "scripted")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    with tempfile.TemporaryDirectory() as runs:
        letters = {"env": "letters", "difficulty": 3, "eval_n": 24, "runs": runs}
        evaluate_api(Config(**letters, api_retries=2, model="scripted", api_base=url))
