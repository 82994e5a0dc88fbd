"""What the tests of bridges/verifiers share: a player that is good and bad, a server on loopback
behind which it (or a policy) stands, and vf-eval, as people run it."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from picoswarm import taskset

import endpoint
import settings
from settings import DEV_SEEDS

STYLE = {"letters": "derives", "alphabet": "derives", "swarm": "expert"}


def make_env(environment: str):
    """The environment as train.py makes it, with its defaults; nothing of the adapter's."""
    cfg = settings.Config(env=environment, sft_style=STYLE[environment])
    settings.fill(cfg, settings.by_env(environment))
    return settings.make_env(cfg, cfg.difficulty)


# ------------------------------------------------------------------------------------- a player

SPOIL = [
    lambda said: "",
    lambda said: said[: len(said) // 2],
    lambda said: said + "\n" + said,
    lambda said: said.replace('"', "'"),
    lambda said: said.replace("1", "2").replace("a", "b"),
    lambda said: "<think>\nI cannot stop.\n" + said.partition("</think>")[2],
    lambda said: "Well, \u00e9\u4e2d\U0001f600 <|im_end|> \u2028 " + said,
    lambda said: '<tool_call>\n{"name": "steal", "arguments": {}}\n</tool_call>',
    lambda said: '<tool_call>{"name": "submit_work", "arguments": {"task_id": "task_1"}}',
]


def player(environment: str, n: int):
    """say(conversation) -> the expert's reply three times in four, else one that is spoilt. Without
    memory: where an episode stands is found by playing its replies again."""
    env = make_env(environment)
    seeds = {env.reset(DEV_SEEDS + i)[0]["content"]: DEV_SEEDS + i for i in range(n)}

    def say(talk: list[dict]) -> str:
        env = make_env(environment)
        env.reset(seeds[talk[0]["content"]])
        for message in talk:
            if message["role"] == "assistant":
                env.step(message["content"])
        told = json.dumps([talk[0]["content"], talk[-1]["content"], len(talk)])
        number = int(hashlib.sha256(told.encode()).hexdigest(), 16)
        right = env.expert_reply()
        return right if number % 4 else SPOIL[number // 4 % len(SPOIL)](right)

    return say


def ours(environment: str, seed: int, say) -> tuple[dict, list[str]]:
    """The player in the environment itself: (score, replies)."""
    env, replies, done = make_env(environment), [], False
    talk = env.reset(seed)
    while not done:
        replies.append(say(talk))
        new, done = env.step(replies[-1])
        talk = [*talk, {"role": "assistant", "content": replies[-1]}, *new]
    return env.score(), replies


# ------------------------------------------------------------------------------------- a server


@contextmanager
def serving(answer):
    """The address of a server on loopback; answer(request) -> (status, JSON), one at a time."""
    alone = threading.Lock()

    def behave(_, request):
        with alone:
            return answer(request)

    with endpoint.serving(behave) as (url, _):
        yield url


def completion(text: str | None, reason: str = "stop", **more) -> dict:
    """An answer of /v1/chat/completions."""
    return endpoint.say(text, finish_reason=reason, message=more)


def chat(say):
    """say(conversation) as such a server."""

    def answer(body: dict) -> tuple[int, dict]:
        text = lambda m: taskset.tools.written(m) if m["role"] == "assistant" else m["content"]
        return 200, completion(say([{**m, "content": text(m)} for m in body["messages"]]))

    return answer


# -------------------------------------------------------------------------------------- vf-eval


def vf_eval(environment: str, n: int, url: str, *flags: str) -> list[dict]:
    """The traces of an evaluation of n tasks, in the order of the seeds."""
    program = Path(sys.executable).with_name("vf-eval")
    command = [
        *(program, "picoswarm", "-n", str(n), "-m", "policy", "--client.base-url", url),
        *("--env.taskset.environment.type", environment, "--no-push", *flags),
    ]
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    out = Path(flags[flags.index("-o") + 1])
    done = subprocess.run(command, cwd=out, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = out.rglob("traces.jsonl")
    lines = file.read_text().split("\n")
    traces = [trace for line in lines if line for trace in json.loads(line)["traces"]]
    assert not any(trace["errors"] for trace in traces)
    return sorted(traces, key=lambda trace: trace["task"]["data"]["seed"])


def theirs(trace: dict) -> tuple[dict, list[str]]:
    """(score, replies) of a trace."""
    reward = trace["rewards"]["reward"]["score"]
    return {"reward": reward, **trace["metrics"]}, trace["info"]["replies"]
