"""Protects evaluation over an API (bridges/api.py): a server that is slow, wrong or gone costs its
own episodes and a bounded time, and is counted; the key stays in its header; what an endpoint says
in fields reaches the environment as text, and back."""

import json
import time
from contextlib import ExitStack, suppress

import pytest

import settings
from bookkeeping import records
from bridges import api
from endpoint import say, serving
from env_letters import Letters, write_reply
from env_swarm import Swarm
from swarm.tools import write_call

HANGS = 40  # seconds; nothing below needs a tenth of them


@pytest.fixture
def endpoint():
    """endpoint(behave) -> (URL, requests seen)."""
    with ExitStack() as servers:
        yield lambda behave: servers.enter_context(serving(behave))


def config(folder, url: str, **more) -> settings.Config:
    given = {"env": "letters", "difficulty": 2, "eval_n": 4, "api_concurrency": 2, "model": "m"}
    return settings.Config(**{**given, "name": "run", **more, "runs": str(folder), "api_base": url})


def evaluate(folder, url: str, **more) -> tuple[dict, dict | None]:
    """(summary.json, the line of evals.jsonl or None), whether or not it ended with an error."""
    with suppress(SystemExit):
        api.evaluate_api(config(folder, url, **more))
    lines = records.lines(folder / "run" / "evals.jsonl")
    return records.read(folder / "run" / "summary.json"), lines[0] if lines else None


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Tries again follow at once, and no key of the person who tests is used."""
    monkeypatch.setattr(api, "RETRIES", 0)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def task(body: dict) -> tuple[int, str]:
    """Which of the development tasks is it, and what is the right answer?"""
    env, asked = Letters(2, "binary", True, "bare"), body["messages"][0]["content"]
    number = next(i for i in range(50) if env.reset(settings.DEV_SEEDS + i)[0]["content"] == asked)
    return number, write_reply(env.task, "bare")


def right(body: dict) -> str:
    return task(body)[1]


# ------------------------------------------------------------------------------------------ faults


def hang_up(handler):
    handler.close_connection = True
    handler.connection.close()


FAULTS = {
    "says nothing": lambda h, b: time.sleep(HANGS),
    "hangs up": lambda h, b: hang_up(h),
    "cut off": lambda h, b: h.write(b'{"choices": [{"mess', Content_Length=4000) or hang_up(h),
    "no HTTP": lambda h, b: h.wfile.write(b"\x00\xff SSH-2.0 hello\r\n\r\n") and hang_up(h),
    "500 without a body": lambda h, b: h.write(b"", 500),
    "429": lambda h, b: (429, {"error": "slow down"}),
    "a page": lambda h, b: h.write(b"<html>Please log in</html>", Content_Type="text/html"),
    "no text": lambda h, b: h.write(b"\xff\xfe\x00\xd8"),
    "wrong gzip": lambda h, b: h.write(b"this is not gzip", Content_Encoding="gzip"),
    "nested": lambda h, b: h.write(b"[" * 100_000),
    "a list": lambda h, b: h.write(b"[1, 2]"),
    "content null": lambda h, b: say(None),
    "content a number": lambda h, b: say(0),
    "message a text": lambda h, b: {"choices": [{"message": "yes"}]},
    "calls without a function": lambda h, b: say("", message={"tool_calls": [{"id": "1"}]}),
    "parts without text": lambda h, b: say([{"type": "text", "text": None}, {"type": "audio"}]),
    "no choice": lambda h, b: {"choices": []},
    "choices null": lambda h, b: {"choices": None, "usage": None},
    "a choice of null": lambda h, b: {"choices": [None]},
    "an error that is a text": lambda h, b: {"error": "overloaded"},
    "refuses for ever": lambda h, b: (400, {"error": {"message": "max_completion_tokens, tool"}}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_counted_and_comes_to_an_end(endpoint, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(api, "SECONDS", 0.5)
    url, _ = endpoint(FAULTS[fault])
    summary, line = evaluate(tmp_path, url, eval_n=2)
    assert line is None  # nothing was answered, so there is no mean
    assert (summary["api"]["n"], summary["api"]["failed"]) == (0, 2)
    saved = records.lines(tmp_path / "run" / "episodes.jsonl")
    assert [e["stop_reason"] for e in saved] == ["error", "error"]
    assert all(e["error"].isprintable() and len(e["error"]) < 500 for e in saved)


@pytest.mark.parametrize(
    "status, hint",
    [(None, "start the server"), (401, "missing or wrong"), (404, "--model"), (500, "no such")],
)
def test_if_nothing_is_ever_answered_it_ends_with_a_sentence(endpoint, tmp_path, status, hint):
    url, seen = endpoint(lambda h, b: (status, {"error": {"message": "no such thing"}}))
    url = url if status else "http://127.0.0.1:9/v1"  # where nobody listens
    with pytest.raises(SystemExit, match=f"nothing was ever answered, the rest .*{hint}"):
        api.evaluate_api(config(tmp_path, url, eval_n=40))
    api_of = records.read(tmp_path / "run" / "summary.json")["api"]
    assert (api_of["n"], api_of["failed"]) == (0, 40) and len(seen) <= 4


def test_failed_episodes_are_in_no_mean_and_named(endpoint, tmp_path):
    answers = {1: (500, {"error": {"message": "oops"}}), 2: (400, {"error": "filtered"})}
    answers[3] = say("no idea")
    url, _ = endpoint(lambda h, b: answers.get(task(b)[0]) or say(right(b)))
    summary, line = evaluate(tmp_path, url, eval_n=6)
    assert line["reward"] == line["exact"] == [1.0, 0.0, 1.0, 1.0]
    assert list(line["missing"]) == ["1", "2"] and "oops" in line["missing"]["1"]
    assert line["tasks"] == "tier 2" and line["reply_tokens"] == [3] * 4
    assert (summary["api"]["n"], summary["api"]["failed"]) == (4, 2)
    report = (tmp_path / "run" / "report.md").read_text()
    assert "n = 4 development tasks; 2 more failed" in report and "75.0% [30.1, 95.4]" in report
    assert (tmp_path / "run" / "report.html").exists()


def test_control_c_leaves_what_was_evaluated(endpoint, tmp_path, monkeypatch):
    play = api.play_one

    async def interrupted(end, make_env, seed, group):
        if group == 3:
            raise KeyboardInterrupt
        return await play(end, make_env, seed, group)

    monkeypatch.setattr(api, "play_one", interrupted)
    url, _ = endpoint(lambda h, b: say(right(b)))
    with pytest.raises(SystemExit, match="stopped by you"):
        api.evaluate_api(config(tmp_path, url, eval_n=20, api_concurrency=1))
    (line,) = records.lines(tmp_path / "run" / "evals.jsonl")
    assert line["reward"] == [1.0] * 3 and len(line["missing"]) == 17


# ----------------------------------------------------------------------------- the key, the flags


def test_the_key_goes_into_one_header_and_nowhere_else(endpoint, tmp_path, monkeypatch, capsys):
    key = "sk-very/secret+0123456789"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    escaped = json.dumps(say(f"you are {key}")).replace("sk-", "\\u0073k-").encode()

    def behave(handler, body):
        if task(body)[0] == 0:
            return 400, {"error": {"message": f"Incorrect API key: {key}"}}
        return handler.write(escaped)

    url, seen = endpoint(behave)
    _, line = evaluate(tmp_path, url, api_concurrency=1)
    assert {r["key"] for r in seen} == {f"Bearer {key}"} and len(line["reward"]) == 3
    files = [file.read_text() for file in (tmp_path / "run").iterdir() if file.name != "lock"]
    text = "".join([*capsys.readouterr(), *files])
    assert "you are ***" in text and "Incorrect API key: ***" in text and key not in text


@pytest.mark.parametrize(
    "given, told",
    [
        ({"api_base": "http://me:hunter2@host/v1"}, "--api-base"),
        ({"api_base": "https://host/v1?key=hunter2"}, "--api-base"),
        ({"api_base": "host/v1"}, "--api-base"),
        ({"model": "auto"}, "--model"),
        ({"eval_only": "runs/x"}, "leave out"),
        ({"held_out": True}, "development tasks"),
        ({"api_concurrency": 0}, "--api-concurrency"),
    ],
)
def test_what_cannot_work_is_refused_without_a_secret(tmp_path, given, told):
    cfg = config(tmp_path, "http://127.0.0.1:9/v1")
    for name, value in given.items():
        setattr(cfg, name, value)
    with pytest.raises(ValueError, match=told) as refusal:
        api.evaluate_api(cfg)
    assert "hunter2" not in str(refusal.value) and not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------- text and fields


def read(response: dict, think: bool = True) -> str:
    end = api.Endpoint(settings.Config(model="m", api_base="http://h/v1", max_tokens=100))
    return api.read_answer(end, json.dumps(response).encode(), think)[0]


CALL = {"function": {"name": "post", "arguments": '{"content": "</tool_call>"}'}}
POST_OBJECT = {"name": "post", "arguments": {"content": "</tool_call>"}}
PASS = '<tool_call>\n{"name": "pass_turn", "arguments": {}}\n</tool_call>'
CHUNKS = [{"type": "thinking", "thinking": [{"text": "hm, "}, {"text": "hm"}]}, {"text": "hi"}]
POST = '<tool_call>\n{"name": "post", "arguments": {"content": "<\\/tool_call>"}}\n</tool_call>'


@pytest.mark.parametrize(
    "message, think, text",
    [
        ({"content": "hi"}, True, "hi"),
        ({"content": None, "refusal": "I will not"}, True, "I will not"),
        ({"content": "hi", "reasoning_content": "hm"}, True, "<think>\nhm\n</think>\nhi"),
        ({"content": "hi", "reasoning": "hm"}, False, "hi"),
        (
            {"content": "<think>\nI\n</think>\nhi", "reasoning": "I"},
            True,
            "<think>\nI\n</think>\nhi",
        ),
        ({"content": None, "reasoning": "hm"}, True, "<think>\nhm\n</think>"),
        ({"content": "well", "tool_calls": [CALL]}, True, f"well\n{POST}"),
        ({"content": None, "tool_calls": [{"function": {"name": "pass_turn"}}]}, True, PASS),
        ({"content": CHUNKS}, True, "<think>\nhm, hm\n</think>\nhi"),
        ({"content": CHUNKS}, False, "hi"),
        ({"content": {"type": "text", "text": "hi"}}, True, "hi"),
        ({"content": ["h", {"text": None}, {"type": "image_url"}, {"text": "i"}]}, True, "hi"),
        ({"content": [{"type": "thinking", "thinking": "hm"}, {"text": "hi"}]}, False, "hi"),
        ({"content": None, "refusal": [{"text": "no"}]}, True, "no"),
        ({"tool_calls": [{"function": {"name": "pass_turn", "arguments": {}}}]}, True, PASS),
        ({"tool_calls": [{"function": {"name": "pass_turn", "arguments": " "}}]}, True, PASS),
        ({"tool_calls": [{"name": "pass_turn", "arguments": None}]}, True, PASS),
        ({"tool_calls": [{"function": POST_OBJECT}]}, True, POST),
    ],
)
def test_what_the_environment_reads(message, think, text):
    assert read(say(None, message=message), think) == text


@pytest.mark.parametrize(
    "fault",
    [
        {"error": {"message": "at sk-very/secret, slow down", "code": 429}},
        {"error": {"message": "slow down", "code": "503"}, "choices": []},
        {"error": {"message": "slow down", "code": None}, "choices": None},
        {"choices": [{"error": {"message": "slow down"}, "message": {"content": ""}}]},
        {"choices": [], "note": "slow down"},
    ],
)
def test_an_error_in_a_200_is_tried_again_and_told(endpoint, tmp_path, monkeypatch, fault):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very/secret")
    url, seen = endpoint(lambda h, b: fault if len(seen) % 2 else say(right(b)))
    monkeypatch.setattr(api, "RETRIES", 1)
    summary, line = evaluate(tmp_path / "once", url, eval_n=2, api_concurrency=1)
    assert line["reward"] == [1.0, 1.0] and summary["api"]["retries"] == 2
    monkeypatch.setattr(api, "RETRIES", 0)
    url, seen = endpoint(lambda h, b: fault)
    evaluate(tmp_path / "always", url, eval_n=1)
    [episode] = records.lines(tmp_path / "always" / "run" / "episodes.jsonl")
    assert "slow down" in episode["error"] and "secret" not in episode["error"]


@pytest.mark.parametrize(
    "said, counted",
    [
        (5, 5),
        (-5, 0),
        (10**9, 100),
        ("7", 7),
        ("many", 0),
        (6.0, 6),
        (None, 0),
        ([], 0),
        (1e999, 0),
    ],
)
def test_a_count_of_tokens_is_one_that_can_be(said, counted):
    end = api.Endpoint(settings.Config(model="m", api_base="http://h/v1", max_tokens=100))
    for usage in ({"completion_tokens": said, "prompt_tokens": said}, said):
        raw = json.dumps(say("hi") | {"usage": usage}).encode()
        assert api.read_answer(end, raw, True)[3] == (counted if isinstance(usage, dict) else 0)
    assert end.spent["completion_tokens"] == counted and end.spent["prompt_tokens"] >= 0


def test_out_of_tokens_counts_as_truncated(endpoint, tmp_path):
    cut = {"finish_reason": "length"}
    ends = {1: cut, 2: {**cut, "message": {"content": None}}}
    url, _ = endpoint(lambda h, b: say(right(b), **ends.get(task(b)[0], {})))
    _, line = evaluate(tmp_path, url, eval_n=3)
    assert line["truncated"] == [False, True, True] and line["reward"] == [1.0, 1.0, 0.0]


CALLS = [
    ("post", {"content": "fair trades </b> — all"}),
    ("propose_trade", {"counterparty_id": "bot_1", "content": "data", "offered_transfer": 2.5}),
    ("vote", {"post_id": "post_999", "direction": "up"}),
    ("pass_turn", {}),
]


@pytest.mark.parametrize("native", [True, False])
def test_tool_calls_earn_the_same_in_fields_and_in_text(endpoint, tmp_path, native):
    def behave(handler, body):
        talk = body["messages"]
        for said, told in zip(talk[1::2], talk[2::2]):  # what OpenAI would refuse
            if native:
                (called,) = said["tool_calls"]
                assert told["tool_call_id"] == called["id"]
                assert called["type"] == "function"
                json.loads(called["function"]["arguments"])  # Databricks, too, refuses ""
                assert said["reasoning_content"] == "" and "reasoning" not in said  # DeepSeek
            else:
                assert told["role"] == "user" and told["content"].startswith("<tool_response>")
        name, arguments = CALLS[len(talk) // 2 % len(CALLS)]
        if not native:
            return say(write_call(name, arguments))
        function = {"name": name, "arguments": json.dumps(arguments) if arguments else ""}
        own = {"id": f"c{len(talk)}", "type": "function"} if len(talk) % 4 == 1 else {}
        call = {"function": function} | own  # Ollama leaves both out
        thought = {"reasoning_content": "", "reasoning": None}
        return say(None, message={"tool_calls": [call], **thought}, finish_reason="tool_calls")

    env, done = Swarm("medium"), False
    env.reset(settings.DEV_SEEDS)
    while not done:
        _, done = env.step(write_call(*CALLS[len(env.log) % len(CALLS)]))
    url, seen = endpoint(behave)
    _, line = evaluate(tmp_path, url, env="swarm", difficulty=None, eval_n=1)
    assert len(seen) == 25 and all(r["tools"] == env.tools for r in seen)
    marks = env.score()
    assert {name: line[name][0] for name in marks} == pytest.approx(marks, abs=1e-4)
    assert marks["error_rate"] > 0 and marks["used_post"] > 0  # it was no episode of nothing


def test_a_field_that_is_refused_by_name_is_asked_another_way(endpoint, tmp_path):
    refusals = {
        "max_tokens": "Use 'max_completion_tokens' instead.",
        "temperature": "'temperature' does not support 0.",
        "chat_template_kwargs": "Unrecognized: chat_template_kwargs",
        "tools": '"auto" tool choice is not enabled',
    }

    def behave(handler, body):
        for name, told in refusals.items():
            if name in body:
                return 400, {"error": {"message": told}}
        return say(write_call("pass_turn", {}))

    url, seen = endpoint(behave)
    more = {"env": "swarm", "difficulty": None, "think": False, "max_tokens": 77}
    summary, line = evaluate(tmp_path, url, eval_n=2, **more)
    assert "missing" not in line and line["used_pass_turn"] == [25, 25]
    assert len(summary["api"]["notes"]) == 4 and seen[-1]["max_completion_tokens"] == 77
    assert '"name": "claim_task"' in seen[-1]["messages"][0]["content"]


def test_a_conversation_that_outgrows_the_context_is_truncated(endpoint, tmp_path):
    def behave(handler, body):
        if len(body["messages"]) > 3:
            told = "'max_completion_tokens' is too large: the maximum context length is 9"
            return 400, {"error": {"message": told}}
        return say("no call")

    _, line = evaluate(tmp_path, endpoint(behave)[0], env="swarm", difficulty=None, eval_n=1)
    assert "missing" not in line and line["truncated"] == [True] and line["reward"][0] > 0
