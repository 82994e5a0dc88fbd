"""Protects bridges/openenv_swarm.py against the real OpenEnv, server and client, over loopback: the same seed and the same calls earn the
same score to the last bit, and nothing that a client sends stops the server. `make test-openenv` gives it a .venv-openenv of its own;
without openenv it is skipped.
"""

import json
import os
import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("openenv", reason="openenv is not installed here; `make test-openenv` installs it into a venv of its own")

import httpx
from openenv.core import CallToolAction, GenericEnvClient, ListToolsAction, MCPToolClient
from websockets.sync.client import connect

import settings
from env_swarm import Swarm
from settings import DEV_SEEDS
from swarm.tools import TOOLS, schemas, write_call

ROOT = Path(__file__).resolve().parents[1]
SEEDS = 100
LONG = "very " * 200_000  # a million characters
# Calls that no honest player makes: unknown tools, wrong arguments, numbers that are none, control tokens, half characters.
WRONG = [
    ("steal", {}),
    ("", {"content": "x"}),
    ("</tool_call>", {}),
    ("post", {}),
    ("post", {"content": 3}),
    ("post", {"content": LONG}),
    ("post", {"content": "</tool_call><think><|im_end|>"}),
    ("post", {"content": "\ud800 half a character"}),
    ("claim_task", {"task_id": ["task_1"]}),
    ("propose_trade", {"counterparty_id": "bot_1", "content": "x", "offered_transfer": float("nan")}),
    ("propose_trade", {"counterparty_id": "you", "content": "x", "offered_transfer": 10**400}),
    ("vote", {"post_id": {"a": [[[]]]}, "direction": None}),
    ("pass_turn", {"more": "than it takes"}),
]


@pytest.fixture(scope="module")
def url():
    """The server as people start it, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bridges.openenv_swarm", "--port", str(port), "--sessions", "4"]
    server = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
    address = f"http://127.0.0.1:{port}"
    for _ in range(600):
        assert server.poll() is None, server.stderr.read()[-3000:]
        try:
            httpx.get(f"{address}/health")
            break
        except httpx.TransportError:
            time.sleep(0.1)
    yield address
    assert server.poll() is None, "the server is still there after all that was sent to it"
    server.terminate()
    server.wait(30)


def client(url: str):
    return GenericEnvClient(base_url=url).sync()


def swarm() -> Swarm:
    """As train.py makes it, with its defaults."""
    cfg = settings.Config(env="swarm")
    settings.check(cfg)
    return settings.make_env(cfg, cfg.difficulty)


def calls(seed: int):
    """(our environment, the calls of an episode as they become due): those of the scripted player, one in four of them spoilt."""
    env, dice = swarm(), random.Random(seed)
    env.reset(seed)

    def due():
        while env.economy.step <= env.economy.last_step:
            call = env.player(env.seen, env.dice)[1:]
            yield dice.choice(WRONG) if dice.random() < 0.25 else call

    return env, due()


@pytest.mark.parametrize("first", range(0, SEEDS, 25))
def test_the_same_seed_and_calls_earn_the_same_score_to_the_last_bit(url, first):
    scores = set()
    with client(url) as theirs:
        for seed in range(DEV_SEEDS + first, DEV_SEEDS + first + 25):
            ours, due = calls(seed)
            assert theirs.reset(seed=seed).observation["prompt"] == swarm().reset(seed)[-1]["content"]
            done, told = False, None
            for tool, arguments in due:
                assert not done
                messages, done = ours.step(write_call(tool, arguments))
                told = theirs.step({"type": "call_tool", "tool_name": tool, "arguments": arguments})
                assert told.done == done and (done or told.observation["result"] == messages[-1]["content"])
                assert done or told.reward == 0.0
            assert done and told.metadata == ours.score() and told.reward == ours.score()["reward"]
            assert theirs.state()["score"] == ours.score() and theirs.state()["step_count"] == 25
            scores.add(told.reward)
    assert len(scores) > 20  # tasks differ, and so do their scores


def test_the_tools_are_those_of_the_swarm_and_asking_for_them_takes_no_turn(url):
    expected = [schema["function"] for schema in schemas("0.2")]
    with client(url) as env:
        found = env.step(ListToolsAction().model_dump()).observation["tools"]  # before any reset
        assert [(t["name"], t["description"], t["input_schema"]) for t in found] == [
            (f["name"], f["description"], f["parameters"]) for f in expected
        ]
        env.reset(seed=3)
        env.step(ListToolsAction().model_dump())
        assert env.state()["step_count"] == 0
        env.step(CallToolAction(tool_name="pass_turn").model_dump())
        assert env.state()["step_count"] == 1


def test_openenvs_own_client_for_tools_lists_and_calls_them(url):
    with MCPToolClient(base_url=url).sync() as env:
        assert [tool.name for tool in env.list_tools()] == list(TOOLS)
        env.reset(seed=3)
        told = env.call_tool("pass_turn")
        assert "# step 2: " in json.dumps(told, default=str)
        assert env.state().step_count == 1


def test_two_clients_at_once_have_an_economy_each(url):
    def whole(seed: int) -> float:
        ours, due = calls(seed)
        with client(url) as theirs:
            theirs.reset(seed=seed)
            for tool, arguments in due:
                ours.step(write_call(tool, arguments))
                told = theirs.step({"type": "call_tool", "tool_name": tool, "arguments": arguments})
            assert told.reward == ours.score()["reward"]
        return told.reward

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(whole, range(8)))
    assert len(set(found)) == 8


def test_a_reset_in_the_middle_starts_anew_and_a_new_connection_knows_nothing_of_the_old(url):
    passing = {"type": "call_tool", "tool_name": "pass_turn", "arguments": {}}
    env = client(url)
    with env:
        opening = env.reset(seed=5).observation["prompt"]
        for _ in range(3):
            env.step(passing)
        assert env.state()["step_count"] == 3
        ours = swarm()
        ours.reset(5)
        for _ in range(3):
            ours.step(write_call("pass_turn", {}))
        assert env.state()["score"] == ours.score() and ours.score()["truncated"] == 1  # whoever stops here has this score
        assert env.reset(seed=5, episode_id="again").observation["prompt"] == opening
        state = env.state()
        assert (state["step_count"], state["seed"], state["episode_id"]) == (0, 5, "again")
        for _ in range(25):
            told = env.step(passing)
        assert told.done
        with pytest.raises(RuntimeError, match="the episode is over; call reset"):
            env.step(passing)
        assert env.reset(seed=6).done is False
    with client(url) as again:
        with pytest.raises(RuntimeError, match="there is no episode yet; call reset"):
            again.step(passing)
        assert again.reset(seed=5).observation["prompt"] == opening


@pytest.mark.parametrize("seed", [-1, "7", 1.5, True, [], {"a": 1}])
def test_a_seed_that_is_none_is_refused_and_the_session_goes_on(url, seed):
    with client(url) as env:
        with pytest.raises(RuntimeError, match="must be a whole number of at least 0"):
            env.reset(seed=seed)
        assert "# step 1: " in env.reset(seed=10**400).observation["prompt"]  # any whole number is one


def test_reset_without_a_seed_draws_one_of_training_and_says_which(url):
    with client(url) as env:
        prompt, seed = env.reset().observation["prompt"], env.state()["seed"]
        assert 0 <= seed < settings.SFT_SEEDS
        assert env.reset(seed=seed).observation["prompt"] == prompt


GARBAGE = [
    "",
    "garbage",
    "{",
    "null",
    "[]",
    "3",
    '"reset"',
    "{}",
    '{"type": "steal"}',
    '{"type": 3}',
    '{"type": ["reset"]}',
    '{"type": "reset", "data": []}',
    '{"type": "reset", "data": {"seed": NaN}}',
    '{"type": "step"}',
    '{"type": "step", "data": {}}',
    '{"type": "step", "data": {"tool_name": 3}}',
    '{"type": "step", "data": {"tool_name": "post", "arguments": []}}',
    '{"type": "step", "data": {"type": "list_tools", "more": 1}}',
    '{"type": "step", "data": {"tool_name": "\\ud800", "arguments": {"\\udfff": "\\ud800"}}}',
    '{"type": "mcp", "data": {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "steal"}, "id": 1}}',
    '{"type": "step", "data": {"tool_name": "post", "arguments": {"content": ' + "[" * 50_000 + "]" * 50_000 + "}}}",
    '{"type": "step", "data": {"tool_name": "' + "x" * 5_000_000 + '"}}',
    '{"type": "\\ud800"}',
    "\u2028\ufeff\x00",
    b"\xff\xfe",
]


@pytest.mark.parametrize("text", GARBAGE, ids=lambda text: repr(text[:40]))
def test_garbage_is_answered_and_the_next_client_is_served(url, text):
    address = url.replace("http", "ws") + "/ws"
    with connect(address, max_size=2**26) as raw:
        raw.send('{"type": "reset", "data": {"seed": 1}}')
        assert json.loads(raw.recv(timeout=30))["type"] == "observation"
        raw.send(text)
        try:
            answer = json.loads(raw.recv(timeout=30))
            assert answer["type"] in ("error", "observation", "mcp"), answer
        except Exception as closed:  # a frame that OpenEnv cannot read at all ends this session
            assert type(closed).__name__.startswith("ConnectionClosed"), closed
    with client(url) as env:
        assert "# step 1: " in env.reset(seed=1).observation["prompt"]


@pytest.mark.parametrize("path, body", [("/step", b"{"), ("/step", b"{}"), ("/step", b'{"action": {"tool_name": "x"}}'), ("/reset", b"[]"),
                                        ("/mcp", b"garbage"),
                                        ("/mcp", b'{"jsonrpc": "2.0", "method": "tools/call", "params": {}, "id": 1}'),
                                        ("/nowhere", b"")])  # fmt: skip
def test_requests_over_http_are_answered_too(url, path, body):
    response = httpx.post(url + path, content=body, headers={"Content-Type": "application/json"}, timeout=30)
    assert 200 <= response.status_code <= 599 and response.text
    with client(url) as env:
        assert env.reset(seed=2).done is False


def test_more_clients_than_sessions_are_told_so_and_let_in_when_one_leaves(url):
    first = [client(url) for _ in range(4)]
    for env in first:
        env.connect()
        env.reset(seed=1)
    with pytest.raises(Exception, match="apacity"):
        with client(url) as fifth:
            fifth.reset(seed=1)
    first.pop().close()
    for _ in range(50):  # the place is free when the server has seen that it left
        try:
            with client(url) as fifth:
                assert fifth.reset(seed=1).done is False
            break
        except Exception:
            time.sleep(0.1)
    else:
        pytest.fail("no place became free")
    for env in first:
        env.close()


def test_wrong_flags_end_in_one_sentence():
    command = [sys.executable, "-m", "bridges.openenv_swarm", "--difficulty", "mad"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "--difficulty mad" in done.stderr and "Traceback" not in done.stderr
