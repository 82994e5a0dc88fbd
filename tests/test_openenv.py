"""Protects bridges/openenv_swarm.py against the real OpenEnv, server and client, over loopback: the
same seed and the same calls earn the same score to the last bit, and nothing that a client sends
stops the server. `make test-all` gives it a .venv-openenv of its own; without openenv it is
skipped."""

import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("openenv", reason="not installed here; `make test-all` does it")

import httpx
from openenv.core import GenericEnvClient, ListToolsAction, MCPToolClient

import settings
from bookkeeping import refusals
from env_swarm import Swarm
from swarm.tools import TOOLS, schemas, write_call
from warm import ENV, ROOT, free_port

PASS = {"type": "call_tool", "tool_name": "pass_turn", "arguments": {}}
# Calls that no honest player makes: unknown tools, wrong arguments, numbers that are none, control
# tokens, half characters.
WRONG = [
    ("steal", {}),
    ("</tool_call>", {}),
    ("post", {}),
    ("post", {"content": "very " * 200_000}),
    ("post", {"content": "</tool_call><think><|im_end|>"}),
    ("post", {"content": "\ud800 half a character"}),
    ("claim_task", {"task_id": ["task_1"]}),
    ("propose_trade", {"counterparty_id": "you", "content": "x", "offered_transfer": 10**400}),
    ("vote", {"post_id": {"a": [[[]]]}, "direction": None}),
    ("pass_turn", {"more": "than it takes"}),
]


@pytest.fixture(scope="module")
def url():
    """The server as people start it, in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "bridges.openenv_swarm", "--port", port]
    server = subprocess.Popen(command, cwd=ROOT, env=ENV)
    address, health = f"http://127.0.0.1:{port}", None
    while health is None and server.poll() is None:
        with suppress(httpx.TransportError):
            health = httpx.get(f"{address}/health")
        time.sleep(0.1)
    yield address
    assert server.poll() is None, "the server is still there after all that was sent to it"
    server.terminate()
    server.wait(30)


def client(url: str):
    return GenericEnvClient(base_url=url).sync()


def swarm(seed: int) -> Swarm:
    """As train.py makes it, with its defaults."""
    cfg = settings.Config(env="swarm")
    refusals.check(cfg)
    env = settings.make_env(cfg, cfg.difficulty)
    env.reset(seed)
    return env


def play(url: str, seed: int) -> float:
    """A whole episode there and here, of the scripted player, one in four of its calls spoilt."""
    ours, dice, done = swarm(seed), random.Random(seed), False
    with client(url) as theirs:
        theirs.reset(seed=seed)
        while not done:
            call = ours.player(ours.seen, ours.dice)[1:]
            tool, arguments = dice.choice(WRONG) if dice.random() < 0.25 else call
            messages, done = ours.step(write_call(tool, arguments))
            told = theirs.step({"type": "call_tool", "tool_name": tool, "arguments": arguments})
            if not done:
                assert (told.done, told.reward) == (False, 0)
                assert told.observation["result"] == messages[-1]["content"]
        assert told.done and told.metadata == ours.score()
        assert told.reward == ours.score()["reward"] and theirs.state()["score"] == ours.score()
    return told.reward


def test_the_same_seed_and_calls_earn_the_same_score_to_the_last_bit(url):
    """Two clients at a time, an economy for each."""
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda i: play(url, settings.DEV_SEEDS + i), range(30)))
    assert len(set(found)) > 20  # tasks differ, and so do their scores


def test_the_tools_are_those_of_the_swarm_and_asking_for_them_takes_no_turn(url):
    expected = [schema["function"] for schema in schemas("0.2")]
    with client(url) as env:
        found = env.step(ListToolsAction().model_dump()).observation["tools"]  # before any reset
        assert [t["input_schema"] for t in found] == [f["parameters"] for f in expected]
        env.reset(seed=3)
        env.step(ListToolsAction().model_dump())
        assert env.state()["step_count"] == 0
        for seed in (-1, "7", True, []):
            with pytest.raises(RuntimeError, match="must be a whole number of at least 0"):
                env.reset(seed=seed)
    with MCPToolClient(base_url=url).sync() as env:
        assert [tool.name for tool in env.list_tools()] == list(TOOLS)
        env.reset(seed=3)
        assert "# step 2: " in json.dumps(env.call_tool("pass_turn"), default=str)


def test_openenvs_own_check_passes(url):
    command = [Path(sys.executable).with_name("openenv"), "validate", url]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "Verdict: PASS" in done.stdout, done.stdout


def test_a_reset_in_the_middle_starts_anew(url):
    with client(url) as env:
        opening = env.reset(seed=5).observation["prompt"]
        env.step(PASS)
        ours = swarm(5)
        ours.step(write_call("pass_turn", {}))
        assert env.state()["score"] == ours.score()  # whoever stops here has this score
        assert env.reset(seed=5, episode_id="again").observation["prompt"] == opening
        state = env.state()
        assert (state["step_count"], state["seed"], state["episode_id"]) == (0, 5, "again")
        assert [env.step(PASS).done for _ in range(25)] == [False] * 24 + [True]
        with pytest.raises(RuntimeError, match="there is no episode, or it is over; call reset"):
            env.step(PASS)
