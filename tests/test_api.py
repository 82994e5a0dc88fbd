"""Protects evaluation over an API (bridges/api.py, bridges/endpoint.py): a server that is slow, wrong, hostile or gone costs its own
episodes and a bounded time, and is counted; the key stays in its header; what an endpoint says in fields reaches the environment as text,
and back. And that bridges/serve.py, our own endpoint, gives over HTTP exactly what rollout.play gives in process.
"""

import asyncio
import json
import os
import queue
import random
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import settings
import train
import warm
from bookkeeping import compare, records
from bridges import api, serve
from bridges import endpoint as endpoints
from bridges.endpoint import Answer, open_endpoint, put_back, read_answer, seconds_of
from bridges.replies import split_calls
from env_letters import Letters, write_reply
from env_swarm import Swarm
from fast.sampler import TorchSampler
from rollout import after_reply, play, prompt_ids
from settings import DEV_SEEDS
from swarm.tools import write_call

ROOT = Path(__file__).resolve().parent.parent
HANGS = 40  # seconds; nothing below needs a tenth of them


# ---------------------------------------------------------------------------------------------- an endpoint that does as it is told


def say(text, **more) -> dict:
    """A well-formed answer: two words asked, three spoken."""
    message = {"role": "assistant", "content": text, **more.pop("message", {})}
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", **more}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3},
    }


@pytest.fixture
def endpoint():
    """endpoint(behave) -> (URL, requests seen). behave(handler, request) answers: it returns a dict, or (status, dict),
    or writes by itself."""
    servers = []

    def start(behave):
        seen = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                seen.append({**body, "at": time.monotonic(), "key": self.headers.get("Authorization"), "path": self.path})
                result = behave(self, body)
                if result is not None:
                    status, value = result if isinstance(result, tuple) else (200, result)
                    write(self, json.dumps(value).encode(), status)

            def handle(self):
                try:
                    super().handle()
                except OSError:
                    pass  # the client has had enough

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/v1", seen

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def write(handler, raw: bytes, status: int = 200, length: int | None = None, kind: str = "application/json", **headers) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(raw) if length is None else length))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(raw)


def config(folder, url: str, **more) -> settings.Config:
    given = dict(
        env="letters", difficulty=2, eval_n=4, api_retries=1, api_timeout=20.0, api_concurrency=2, api_minutes=0.5, model="m", name="run"
    )
    return settings.Config(**given | more, runs=str(folder), api_base=url)


def evaluate(folder, url: str, **more) -> tuple[dict, dict | None]:
    """(summary.json, the line of evals.jsonl or None), whether or not the evaluation ended with an error."""
    started = time.monotonic()
    try:
        api.evaluate_api(config(folder, url, **more))
    except SystemExit as end:
        assert end.code == 1
    assert time.monotonic() - started < HANGS
    lines = records.lines(folder / "run" / "evals.jsonl")
    return json.loads((folder / "run" / "summary.json").read_text()), lines[0] if lines else None


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Tries again follow at once, and no key of the person who tests is used."""
    monkeypatch.setattr("bridges.endpoint.PAUSE", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def right(body: dict) -> str:
    """The right answer to a letters task, found from the question."""
    env = Letters(2, "binary", True, "bare")
    seed = next(DEV_SEEDS + i for i in range(50) if env.reset(DEV_SEEDS + i)[0]["content"] == body["messages"][0]["content"])
    env.reset(seed)
    return write_reply(env.task, "bare")


def number(body: dict) -> int:
    """Which of the development tasks is it?"""
    env = Letters(2, "binary", True, "bare")
    return next(i for i in range(50) if env.reset(DEV_SEEDS + i)[0]["content"] == body["messages"][0]["content"])


# ---------------------------------------------------------------------------------------------- faults


def drip(handler, body):
    """A byte now and then, for ever: no socket ever waits long."""
    write(handler, b"", length=10**6)
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.05)


def drip_headers(handler, body):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        handler.wfile.write(b"X: y\r\n")
        time.sleep(0.05)


def giant(handler, body):
    write(handler, b"", length=10**12)
    while True:
        handler.wfile.write(b'"' * 65536)


def hang_up(handler, body):
    handler.close_connection = True
    handler.connection.close()


def cut_off(handler, body):
    write(handler, b'{"choices": [{"mess', length=4000)
    handler.close_connection = True


FAULTS = {
    "says nothing": lambda h, b: time.sleep(HANGS),
    "drips": drip,
    "drips headers": drip_headers,
    "giant": giant,
    "hangs up": hang_up,
    "cut off": cut_off,
    "no HTTP": lambda h, b: h.wfile.write(b"\x00\xff SSH-2.0 hello\r\n\r\n") and hang_up(h, b),
    "500": lambda h, b: (500, {"error": {"message": "oops"}}),
    "500 without a body": lambda h, b: write(h, b"", 500),
    "429": lambda h, b: (429, {"error": "slow down"}),
    "a page": lambda h, b: write(h, b"<html>Please log in</html>", kind="text/html"),
    "a stream": lambda h, b: write(h, b'data: {"choices": []}\n\ndata: [DONE]\n\n', kind="text/event-stream"),
    "no bytes": lambda h, b: write(h, b""),
    "no text": lambda h, b: write(h, b"\xff\xfe\x00\xd8"),
    "wrong gzip": lambda h, b: write(h, b"this is not gzip", Content_Encoding="gzip"),
    "nested": lambda h, b: write(h, b"[" * 100_000),
    "a list": lambda h, b: write(h, b"[1, 2]"),
    "content null": lambda h, b: say(None),
    "content a number": lambda h, b: say(7),
    "no choices": lambda h, b: {"choices": []},
    "choices missing": lambda h, b: {"object": "chat.completion"},
    "choices a text": lambda h, b: {"choices": "yes"},
    "message a text": lambda h, b: {"choices": [{"message": "yes"}]},
    "calls a text": lambda h, b: say("", message={"tool_calls": "post"}),
    "calls without a function": lambda h, b: say("", message={"tool_calls": [{"id": "1"}]}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_tried_again_counted_and_comes_to_an_end(endpoint, tmp_path, monkeypatch, fault):
    monkeypatch.setattr("bridges.endpoint.LARGEST", 300_000)
    url, seen = endpoint(FAULTS[fault])
    summary, line = evaluate(tmp_path, url, eval_n=2, api_timeout=0.4)
    assert line is None  # nothing was answered, so there is no mean
    assert summary["api"] | {"notes": 0, "ended": 0} == {
        "n": 0, "failed": 2, "requests": 4, "retries": 2, "prompt_tokens": 0, "completion_tokens": 0, "notes": 0, "ended": 0,
    }  # fmt: skip
    assert len(seen) == 4
    saved = records.lines(tmp_path / "run" / "episodes.jsonl")
    assert [e["stop_reason"] for e in saved] == ["error", "error"] and all(e["error"] for e in saved)


def test_nobody_listens(tmp_path, capsys, monkeypatch):
    """Told at once, tried once more, and given up: with the default pauses five tries took 28 silent seconds."""
    monkeypatch.setattr("bridges.endpoint.PAUSE", 0.4)
    started = time.monotonic()
    summary, line = evaluate(tmp_path, "http://127.0.0.1:9/v1", eval_n=40, api_retries=5)
    assert line is None and summary["api"]["failed"] == 40 and time.monotonic() - started < 5
    assert 2 <= summary["api"]["requests"] <= 4  # two at a time
    said = capsys.readouterr()
    assert "m: nobody listens there (connection refused); start the server, or check --api-base" in said.err
    assert said.out.count("a request failed: nobody listens there") == 1
    assert said.out.index("a request failed") < said.out.index("development tasks")  # before it is over
    kept = next(line for line in said.out.splitlines() if line.startswith("kept in "))
    assert kept.endswith("report.md, report.html") and not (tmp_path / "run" / "episodes.jsonl").exists()  # and nothing to compare


def test_a_server_that_goes_for_a_moment_is_waited_for(monkeypatch):
    """Once it has answered, a refused connection is a restart, and all tries are made."""
    asked = []

    async def post(end, body):
        asked.append(body)
        raise endpoints.Failure("nobody", again=True, nobody=True)

    monkeypatch.setattr(endpoints, "post", post)
    env = Letters(2, "binary", True, "bare")
    for answers, tries in ((0, 2), (3, 6)):
        end = endpoints.open_endpoint(config("runs", "http://127.0.0.1:9/v1", api_retries=5))
        end.counts["answers"] = answers
        asked.clear()
        with pytest.raises(endpoints.Failure):
            asyncio.run(endpoints.ask(end, [], env, random.Random(0)))
        assert len(asked) == tries


def test_where_nothing_is_ever_answered_the_rest_is_not_tried(endpoint, tmp_path, capsys):
    url, _ = endpoint(lambda h, b: (500, {"error": {"message": "oops"}}))
    summary, line = evaluate(tmp_path, url, eval_n=40)
    assert line is None and summary["api"]["failed"] == 40
    assert 6 <= summary["api"]["requests"] <= 8  # three episodes fail, a fourth is under way; the rest is not tried
    assert "nothing was answered" in capsys.readouterr().err


def test_failed_episodes_are_in_no_mean_and_named(endpoint, tmp_path):
    def behave(handler, body):
        i = number(body)
        if i == 1:
            return 500, {"error": {"message": "oops"}}
        return say(right(body) if i != 3 else "no idea")

    url, _ = endpoint(behave)
    summary, line = evaluate(tmp_path, url, eval_n=6)
    assert line["reward"] == line["exact"] == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert line["missing"] == {"1": "HTTP 500: oops"}
    assert line["tasks"] == "tier 2" and line["stage"] == "final" and line["reply_tokens"] == [3] * 5
    assert summary["api"]["n"] == 5 and summary["api"]["failed"] == 1
    assert summary["eval"]["tier 2"]["final"]["reward"]["mean"] == pytest.approx(0.8)
    report = (tmp_path / "run" / "report.md").read_text()
    assert (
        "n = 5 development tasks; 1 more failed or were not played, and are in no mean." in report
        and "10 prompt and 15 completion tokens" in report
    )
    assert (tmp_path / "run" / "report.html").exists()


def test_what_passes_is_tried_again_and_not_before_the_server_said(endpoint, tmp_path):
    def behave(handler, body):
        if len(seen) == 1:
            return write(handler, b"{}", 429, Retry_After="1")
        return (503, {}) if len(seen) == 2 else say(right(body))

    url, seen = endpoint(behave)
    summary, line = evaluate(tmp_path, url, eval_n=1, api_retries=2)
    assert line["reward"] == [1.0] and "missing" not in line
    assert (summary["api"]["requests"], summary["api"]["retries"], summary["api"]["failed"]) == (3, 2, 0)
    assert seen[1]["at"] - seen[0]["at"] >= 0.95


def test_a_wait_past_the_time_limit_is_not_begun(endpoint, tmp_path):
    url, _ = endpoint(lambda h, b: write(h, b"{}", 429, Retry_After="3000"))
    summary, _ = evaluate(tmp_path, url, eval_n=1)
    assert (
        summary["api"]["requests"] == 1 and summary["api"]["failed"] == 1 and summary["api"]["ended"] == ""
    )  # no time limit had to end it


def test_retry_after_is_seconds_or_a_date():
    assert seconds_of("2.5") == 2.5
    assert [seconds_of(x) for x in (None, "", "-3", "nan", "inf", "1e999", "soon", "Wed, 99 Foo")] == [0.0] * 8
    from email.utils import formatdate

    assert 50 < seconds_of(formatdate(time.time() + 60, usegmt=True)) <= 60
    assert seconds_of(formatdate(time.time() - 60, usegmt=True)) == 0.0


@pytest.mark.parametrize(
    "status, tried, hint", [(401, 1, "missing or wrong"), (403, 1, "may not"), (404, 1, "--model"), (400, 3, "no such thing")]
)
def test_what_will_not_pass_is_not_tried_again_and_ends_it_with_a_sentence(endpoint, tmp_path, capsys, status, tried, hint):
    url, seen = endpoint(lambda h, b: (status, {"error": {"message": "no such thing"}}))
    summary, line = evaluate(tmp_path, url, eval_n=30, api_concurrency=1)
    assert len(seen) == tried and summary["api"]["retries"] == 0 and summary["api"]["failed"] == 30 and line is None
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"HTTP {status}: no such thing" in told and hint in told


def test_a_refusal_among_answers_costs_one_episode(endpoint, tmp_path):
    url, seen = endpoint(lambda h, b: (400, {"error": {"message": "filtered"}}) if number(b) == 2 else say(right(b)))
    summary, line = evaluate(tmp_path, url, eval_n=8, api_concurrency=1)
    assert len(seen) == 8 and list(line["missing"]) == ["2"] and line["reward"] == [1.0] * 7


@pytest.mark.parametrize("hangs, told", [(False, "ZeroDivisionError: oops (test_api.py:"), (True, "Hung: ")], ids=["raises", "hangs"])
def test_an_environment_that_breaks_costs_one_episode(endpoint, tmp_path, monkeypatch, hangs, told):
    honest = Letters.step

    def step(self, reply):
        while "poison" in reply:
            if not hangs:
                raise ZeroDivisionError("oops")
        return honest(self, reply)

    monkeypatch.setattr(Letters, "step", step)
    if hangs:
        monkeypatch.setattr(Letters, "seconds", 0.3, raising=False)
    url, _ = endpoint(lambda h, b: say("poison" if number(b) == 1 else right(b)))
    _, line = evaluate(tmp_path, url)
    assert list(line["missing"]) == ["1"] and line["missing"]["1"].startswith(told) and line["reward"] == [1.0] * 3


def test_the_time_limit_ends_it_and_keeps_what_was_done(endpoint, tmp_path):
    url, _ = endpoint(lambda h, b: time.sleep(HANGS) if number(b) >= 2 else say(right(b)))
    summary, line = evaluate(tmp_path, url, eval_n=5, api_minutes=2 / 60, api_timeout=600.0)
    assert line["reward"] == [1.0, 1.0] and sorted(line["missing"]) == ["2", "3", "4"]
    assert "--api-minutes" in summary["api"]["ended"] and all("--api-minutes" in why for why in line["missing"].values())


def test_a_ctrl_c_that_another_thread_receives_wakes_the_loop():
    """The system may give the signal to any thread. Here the main one refuses it, so it goes to the other;
    with asyncio.run this sleeps on."""
    code = """
import asyncio, os, signal, threading, time
from bridges import api
threading.Thread(target=lambda: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGINT), time.sleep(600)), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
try:
    api.run(asyncio.sleep(600))
except KeyboardInterrupt:
    print("stopped", flush=True)
    os._exit(0)
"""
    assert warm.run(["-c", code], ROOT, timeout=120).stdout == "stopped\n"


def test_control_c_leaves_what_was_evaluated(endpoint, tmp_path):
    url, seen = endpoint(lambda h, b: time.sleep(HANGS) if number(b) >= 3 else say(right(b)))
    words = ["--eval-only", "--api-base", url, "--model", "m", "--env", "letters", "--difficulty", "2", "--eval-n", "20"]
    words = ["train.py", *words, "--api-concurrency", "2", "--runs", str(tmp_path), "--name", "run"]
    run = warm.Run(words, ROOT, dict(os.environ), tmp_path, pictures=False)
    until = time.monotonic() + HANGS
    while len(seen) < 5 and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(run.process.pid, signal.SIGINT)
    run.end(HANGS)
    done = run.result()
    assert done.returncode == 130 and "stopped by you" in done.stderr and "Traceback" not in done.stderr
    (line,) = records.lines(tmp_path / "run" / "evals.jsonl")
    assert line["reward"] == [1.0] * 3 and len(line["missing"]) == 17
    assert "n = 3 development tasks; 17 more failed or were not played" in done.stdout


def test_a_name_server_that_does_not_answer_keeps_nobody_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: time.sleep(2 * HANGS))
    summary, line = evaluate(tmp_path, "http://some.invalid/v1", eval_n=3, api_minutes=1 / 60)
    assert line is None and summary["api"]["failed"] == 3 and "--api-minutes" in summary["api"]["ended"]


def test_no_more_requests_a_minute_than_asked(endpoint, tmp_path):
    url, seen = endpoint(lambda h, b: say(right(b)))
    _, line = evaluate(tmp_path, url, eval_n=6, api_rpm=600.0, api_concurrency=6)
    assert line["reward"] == [1.0] * 6
    assert seen[-1]["at"] - seen[0]["at"] >= 0.4  # five gaps of a tenth of a second


def test_several_episodes_are_played_at_a_time(endpoint, tmp_path):
    together = threading.Barrier(4, timeout=HANGS)

    def behave(handler, body):
        together.wait()  # nobody is answered before four have asked
        return say(right(body))

    url, _ = endpoint(behave)
    assert evaluate(tmp_path, url, eval_n=8, api_concurrency=4)[1]["reward"] == [1.0] * 8


# ---------------------------------------------------------------------------------------------- the key


def test_the_key_goes_into_one_header_and_nowhere_else(endpoint, tmp_path, monkeypatch, capsys):
    key = "sk-very/secret+0123456789"
    monkeypatch.setenv("MY_KEY", key)

    def behave(handler, body):
        if number(body) == 0:
            return 400, {"error": {"message": f"Incorrect API key: {key}"}}
        if number(body) == 1:
            return write(handler, json.dumps(say(f"you are {key}")).replace("sk-", "\\u0073k-").encode())  # escaped, as JSON allows
        if number(body) == 2:
            return write(handler, f"<b>{key}</b>".encode(), 502)
        return say(f"{right(body)} {key}")

    url, seen = endpoint(behave)
    _, line = evaluate(tmp_path, url, api_key_env="MY_KEY", api_concurrency=1)
    assert {r["key"] for r in seen} == {f"Bearer {key}"} and len(line["reward"]) == 2
    printed = capsys.readouterr()
    texts = [printed.out, printed.err, *(file.read_text() for file in (tmp_path / "run").iterdir() if file.suffix != ".html")]
    assert any("you are ***" in text for text in texts) and not any(key in text for text in texts)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["api_key_env"] == "MY_KEY"


def test_no_key_no_header(endpoint, tmp_path):
    url, seen = endpoint(lambda h, b: say(right(b)))
    evaluate(tmp_path, url, eval_n=1)
    assert seen[0]["key"] is None and seen[0]["path"] == "/v1/chat/completions"


# ---------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize("given, told", [
    ({"api_base": "http://me:hunter2@host/v1"}, "--api-base"), ({"api_base": "https://host/v1?key=hunter2"}, "--api-base"),
    ({"api_base": "host/v1"}, "--api-base"), ({"api_base": "http://h:hunter2/v1"}, "--api-base"), ({"model": "auto"}, "--model"),
    ({"eval_only": "runs/x"}, "give one of them"),
    ({"resume": "runs/x"}, "give one of them"), ({"api_key_env": "hunter2"}, "--api-key-env"), ({"api_timeout": 0.0}, "--api-timeout"),
    ({"api_minutes": float("inf")}, "--api-minutes"), ({"api_concurrency": 0}, "--api-concurrency"), ({"api_retries": -1}, "--api-retries"),
    ({"api_rpm": float("nan")}, "--api-rpm"), ({"held_out": True}, "--held-out: an endpoint is asked development tasks only"),
])  # fmt: skip
def test_what_cannot_work_is_refused_in_a_sentence_that_repeats_no_secret(tmp_path, given, told):
    cfg = config(tmp_path, "http://127.0.0.1:9/v1")
    for name, value in given.items():
        setattr(cfg, name, value)
    with pytest.raises(ValueError, match=told) as refusal:
        api.evaluate_api(cfg)
    assert "hunter2" not in str(refusal.value) and not list(tmp_path.iterdir())


def test_a_bare_eval_only_stands_beside_api_base():
    assert settings.without_bare_eval_only(["--eval-only", "--api-base", "U", "--model", "M"]) == ["--api-base", "U", "--model", "M"]
    assert settings.without_bare_eval_only(["--api-base=U", "--eval-only"]) == ["--api-base=U"]
    for words in (["--eval-only", "runs/x", "--env", "swarm"], ["--eval-only"], ["--eval-only", "runs/x", "--api-base", "U"]):
        assert settings.without_bare_eval_only(words) == words


def test_a_folder_of_an_api_cannot_be_trained_on(endpoint, tmp_path, capsys):
    url, _ = endpoint(lambda h, b: say(right(b)))
    evaluate(tmp_path, url, eval_n=1)
    with pytest.raises(ValueError, match="over an API"):
        train.train(settings.Config(resume=str(tmp_path / "run")))


def test_the_folder_is_compared_like_any_other(endpoint, tmp_path, capsys):
    for name, wrong in (("a", 0), ("b", 5)):
        url, _ = endpoint(lambda h, b, wrong=wrong: say(right(b) if number(b) >= wrong else "?"))
        api.evaluate_api(config(tmp_path, url, eval_n=8, name=name, model=name))
    compare.main([tmp_path / "a", tmp_path / "b"])
    (row,) = [line for line in (tmp_path / "compare" / "compare.md").read_text().splitlines() if line.startswith("| tier 2")]
    assert "| 100.0%, 37.5% |" in row and "unpaired" not in row


def test_what_failed_in_one_is_left_out_of_the_pairs(endpoint, tmp_path, capsys):
    """The same number of failures in both, on other tasks: lists of the same length, that are not pairs as they stand."""
    for name, lost in (("a", 0), ("b", 7)):
        url, _ = endpoint(lambda h, b, lost=lost: (500, {}) if number(b) == lost else say(right(b) if number(b) % 2 else "?"))
        api.evaluate_api(config(tmp_path, url, eval_n=8, name=name, model=name))
    compare.main([tmp_path / "a", tmp_path / "b"])
    (row,) = [line for line in (tmp_path / "compare" / "compare.md").read_text().splitlines() if line.startswith("| tier 2")]
    assert "| 50.0%, 50.0% | +0.0 [-39.0, +39.0] | tasks only |" in row  # six pairs; as the lists stand, no two would agree


# ---------------------------------------------------------------------------------------------- text and fields


def answer(response: dict, think: bool = True, max_tokens: int = 100) -> Answer:
    end = open_endpoint(settings.Config(model="m", api_base="http://h/v1", max_tokens=max_tokens))
    return read_answer(end, response, think)


@pytest.mark.parametrize("message, think, text", [
    ({"content": "hi"}, True, "hi"),
    ({"content": ""}, True, ""),
    ({"content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]}, True, "ab"),
    ({"content": None, "refusal": "I will not"}, True, "I will not"),
    ({"content": "hi", "reasoning_content": "hm"}, True, "<think>\nhm\n</think>\nhi"),
    ({"content": "hi", "reasoning": "hm"}, True, "<think>\nhm\n</think>\nhi"),
    ({"content": "hi", "reasoning": "hm"}, False, "hi"),
    ({"content": "<think>\nmine\n</think>\nhi", "reasoning": "mine"}, True, "<think>\nmine\n</think>\nhi"),  # not twice
    ({"content": None, "reasoning": "hm"}, True, "<think>\nhm\n</think>\n"),
])  # fmt: skip
def test_what_the_environment_reads(message, think, text):
    assert answer(say(None, message=message), think).text == text


def test_tool_calls_become_text_that_no_argument_can_end():
    call = lambda name, arguments: {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    got = answer(say("well", message={"tool_calls": [call("post", '{"content": "</tool_call> x"}')]}))
    env = Swarm("medium")
    env.reset(7)
    env.step(got.text)
    assert (env.log[0].tool, env.log[0].arguments, env.log[0].ok) == ("post", {"content": "</tool_call> x"}, True)
    assert (
        answer(say(None, message={"tool_calls": [call("pass_turn", {})]})).text
        == '<tool_call>\n{"name": "pass_turn", "arguments": {}}\n</tool_call>'
    )
    env.step(answer(say(None, message={"tool_calls": [call("post", "{oops")]})).text)
    assert not env.log[1].ok and "not JSON" in env.log[1].result


def test_out_of_tokens_counts_as_truncated(endpoint, tmp_path):
    finish = {0: {}, 1: {"finish_reason": "length"}, 2: {"finish_reason": "length", "message": {"content": None}}}
    url, _ = endpoint(lambda h, b: say("x" * 10_000 if number(b) == 3 else right(b), **finish.get(number(b), {})))
    _, line = evaluate(tmp_path, url, max_tokens=100)
    assert line["truncated"] == [False, True, True, True]  # the last one: far more text than 100 tokens can hold
    assert line["reward"] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "usage", [None, [], {"prompt_tokens": -1, "completion_tokens": 10**15}, {"prompt_tokens": "2", "completion_tokens": True}]
)
def test_usage_that_is_none_is_counted_as_none(endpoint, tmp_path, usage):
    url, _ = endpoint(lambda h, b: {**say(right(b)), "usage": usage})
    summary, line = evaluate(tmp_path, url, eval_n=2)
    assert summary["api"]["completion_tokens"] == 0 and line["reply_tokens"] == [0, 0]
    assert "not counting 2 answers" in (tmp_path / "run" / "report.md").read_text()


CALLS = [("post", {"content": "fair trades </b> — all"}),
         ("propose_trade", {"counterparty_id": "bot_1", "content": "data", "offered_transfer": 2.5}),
         ("vote", {"post_id": "post_999", "direction": "up"}), ("pass_turn", {})]  # fmt: skip


@pytest.mark.parametrize("native", [True, False])
def test_an_episode_of_tool_calls_is_the_same_in_fields_and_in_text(endpoint, tmp_path, native):
    def behave(handler, body):
        talk = body["messages"]
        turn = sum(m["role"] == "assistant" for m in talk)
        for said, told in zip(talk[1::2], talk[2::2]):  # what OpenAI would refuse
            if native:
                assert told["role"] == "tool" and told["tool_call_id"] == said["tool_calls"][0]["id"]
            else:
                assert told["role"] == "user" and told["content"].startswith("<tool_response>") and "tool_calls" not in said
        name, arguments = CALLS[turn % len(CALLS)]
        if not native:
            return say(write_call(name, arguments))
        function = {"name": name, "arguments": json.dumps(arguments)}
        return say(None, message={"tool_calls": [{"id": f"c{turn}", "type": "function", "function": function}]}, finish_reason="tool_calls")

    env = Swarm("medium")
    env.reset(DEV_SEEDS)
    while not env.step(write_call(*CALLS[len(env.log) % len(CALLS)]))[1]:
        pass
    url, seen = endpoint(behave)
    summary, line = evaluate(tmp_path, url, env="swarm", difficulty=None, eval_n=1)
    assert len(seen) == 25 and all(r["tools"] == env.tools for r in seen) and "missing" not in line
    marks = env.score()
    assert {name: line[name][0] for name in marks} == pytest.approx({name: round(value, 4) for name, value in marks.items()}, abs=1e-4)
    assert marks["error_rate"] > 0 and marks["used_post"] > 0  # it was no episode of nothing


def test_every_call_of_a_reply_is_answered():
    calls = [{"id": "a"}, {"id": "b"}]
    told = put_back([{"role": "tool", "content": "done"}], calls)
    assert [(m["role"], m["tool_call_id"]) for m in told] == [("tool", "a"), ("tool", "b")] and told[0]["content"] == "done"


def test_a_field_that_is_refused_by_name_is_asked_another_way(endpoint, tmp_path):
    def behave(handler, body):
        for name, why in (("max_tokens", "Use 'max_completion_tokens' instead."), ("temperature", "'temperature' does not support 0."),
                          ("chat_template_kwargs", "Unrecognized: chat_template_kwargs"),
                          ("tools", '"auto" tool choice is not enabled')):  # fmt: skip
            if name in body:
                return 400, {"error": {"message": why}}
        return say('<tool_call>\n{"name": "pass_turn", "arguments": {}}\n</tool_call>')

    url, seen = endpoint(behave)
    summary, line = evaluate(tmp_path, url, env="swarm", difficulty=None, eval_n=2, think=False, max_tokens=77)
    assert "missing" not in line and line["used_pass_turn"] == [25, 25] and len(summary["api"]["notes"]) == 4
    assert seen[-1]["max_completion_tokens"] == 77 and '"name": "claim_task"' in seen[-1]["messages"][0]["content"]
    assert summary["api"]["retries"] == 0 and summary["api"]["requests"] == len(seen)


def test_a_conversation_that_outgrows_the_context_is_truncated(endpoint, tmp_path):
    def behave(handler, body):
        if len(body["messages"]) > 3:
            return 400, {"error": {"message": "too long", "code": "context_length_exceeded"}}
        return say("no call")

    url, _ = endpoint(behave)
    _, line = evaluate(tmp_path, url, env="swarm", difficulty=None, eval_n=1)
    assert "missing" not in line and line["turns_used"] == [0] and line["reward"][0] > 0
    assert json.loads((tmp_path / "run" / "episodes.jsonl").read_text())["stop_reason"] == "truncated"


# ---------------------------------------------------------------------------------------------- bridges/serve.py


@pytest.fixture
def served(endpoint):
    """served(policy) -> URL of a server of ours."""
    running = []

    def start(policy, name: str = "ours") -> str:
        server = serve.serve_policy(policy, name)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("kind, more, n", [("pico", {"difficulty": 4}, 8), ("pico", {"env": "alphabet", "difficulty": None}, 3),
                                           ("pico_swarm", {"env": "swarm", "difficulty": None}, 1)])  # fmt: skip
def test_over_http_a_policy_says_and_gets_what_it_does_in_process(load, served, tmp_path, kind, more, n):
    policy = load(kind)
    cfg = config(tmp_path, served(policy), model="ours", eval_n=n, max_tokens=100, api_concurrency=4, **more)
    api.evaluate_api(cfg)
    (make_env,) = [env for trained, env in settings.eval_sets(cfg).values() if trained]
    groups = play(policy, TorchSampler(policy), make_env, [DEV_SEEDS + i for i in range(n)], 1, 100, 0.0, sample_seed=0)
    over_http = {e["seed"]: e for e in records.lines(tmp_path / "run" / "episodes.jsonl")}
    for (episode,) in groups:
        other = over_http[episode.seed]
        assert (other["messages"], other["reward"], other["components"]) == (episode.messages, episode.reward, episode.components)
        assert (other["reply_tokens"], other["stop_reason"]) == (episode.reply_tokens, episode.stop_reason)


@pytest.fixture
def desk(tiny):
    desk = serve.Desk(tiny, "ours", 32)
    threading.Thread(target=serve.work, args=(desk, TorchSampler(tiny)), daemon=True).start()
    return desk


USER = {"role": "user", "content": "hello"}
ASK = {"model": "ours", "messages": [USER], "seed": 5, "max_tokens": 12}


def test_a_reply_is_remembered_as_the_tokens_that_it_was(desk, tiny):
    """A random model writes what no tokenizer would cut the same way."""
    first = serve.complete(desk, ASK)
    reply = first["choices"][0]["message"]
    (sampled,) = desk.said.values()
    talk = [USER, reply, {"role": "user", "content": "and?"}]
    ids = serve.conversation_ids(desk, serve.read_messages({"messages": talk}), None, True)
    assert ids == prompt_ids(tiny, [USER], None, True) + sampled + after_reply(tiny, talk[2:], True)[1]
    asked = len(prompt_ids(tiny, [USER], None, True))
    assert first["usage"] == {"prompt_tokens": asked, "completion_tokens": 12, "total_tokens": asked + 12}
    desk.said.clear()
    again = serve.conversation_ids(desk, serve.read_messages({"messages": talk}), None, True)
    assert again != ids  # cut anew, it is another conversation: what the memory is for


def test_sampling_follows_the_request(desk):
    texts = lambda **more: [c["message"]["content"] for c in serve.complete(desk, {**ASK, "temperature": 1.0, **more})["choices"]]
    three = texts(n=3)
    assert len(set(three)) == 3 and three == texts(n=3) != texts(n=3, seed=6)
    assert texts() == three[:1]  # the first of n is what one alone would be
    assert texts(temperature=0) == texts(temperature=0, seed=9)
    whole = serve.complete(desk, ASK)["choices"][0]
    assert whole["finish_reason"] == "length"
    mark = whole["message"]["content"][3:6]
    cut = serve.complete(desk, {**ASK, "stop": [mark]})["choices"][0]
    assert cut["finish_reason"] == "stop" and cut["message"]["content"] == whole["message"]["content"].partition(mark)[0]
    scored = serve.complete(desk, {**ASK, "logprobs": True})["choices"][0]["logprobs"]["content"]
    assert len(scored) == 12 and all(token["logprob"] <= 0 for token in scored)


@pytest.mark.parametrize("change, told", [
    ({"model": "other"}, "no model 'other'"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
    ({"messages": [7]}, "messages"), ({"messages": [{"role": "wizard", "content": ""}]}, "wizard"),
    ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "last message"),
    ({"messages": [{"role": "assistant", "content": "x"}, USER]}, "message 0"), ({"messages": [{"role": "user", "content": 3}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"), ({"temperature": -1}, "temperature"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}, USER]}, "tool call"), ({"temperature": float("nan")}, "temperature"),
    ({"temperature": True}, "temperature"), ({"max_tokens": 0}, "max_tokens"), ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"max_tokens": 10**6}, "context length"), ({"n": 0}, "n must"), ({"seed": "x"}, "seed"), ({"stream": True}, "stream"),
    ({"top_p": 0.9}, "top_p"), ({"stop": 5}, "stop"), ({"tools": "all"}, "tools"), ({"top_k": 1}, "top_k"), ({"min_p": 0.9}, "min_p"),
    ({"repetition_penalty": 2}, "repetition_penalty"), ({"stop_token_ids": [1]}, "stop_token_ids"), ({"bad_words": ["a"]}, "bad_words"),
    ({"guided_json": {}}, "guided_json"), ({"best_of": 2}, "best_of"), ({"top_logprobs": 3}, "top_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"), ({"tool_choice": "required"}, "tool_choice"),
])  # fmt: skip
def test_nonsense_is_refused_in_a_sentence(desk, change, told):
    with pytest.raises(serve.Refused, match=told):
        serve.complete(desk, {**ASK, **change})


def test_refusals_and_models_over_http(served, tiny):
    import httpx2

    url = served(tiny)
    with httpx2.Client(trust_env=False) as client:
        assert [m["id"] for m in client.get(f"{url}/models").json()["data"]] == ["ours"]
        for path, body, status in (("/chat/completions", "{oops", 400), ("/chat/completions", "[]", 400), ("/completions", "{}", 404),
                                   ("/chat/completions", '{"model": "x"}', 404)):  # fmt: skip
            response = client.post(url + path, content=body)
            assert response.status_code == status and response.json()["error"]["message"]
        assert client.post(f"{url}/chat/completions", json=ASK).json()["usage"]["completion_tokens"] == 12  # it still serves


def test_requests_that_arrive_together_are_one_batch_and_a_broken_batch_is_told():
    class Counting:
        batches: list = []

        def sample(self, prompts, k, max_tokens, temperature, seeds, caches, keep):
            self.batches.append(len(prompts))
            if max_tokens == 13:
                raise RuntimeError("oops")
            return [[serve.Sample([1], [0.0], True)] * k for _ in prompts]

    desk = serve.Desk(None, "ours", 10)
    jobs = [serve.Job([1, 2], 1, limit, 1.0, [(0, 0)]) for limit in (10, 10, 13, 10)]
    for job in jobs:
        desk.jobs.put(job)
    threading.Thread(target=serve.work, args=(desk, Counting()), daemon=True).start()
    assert all(len(job.samples.result(timeout=HANGS)) == 1 for job in jobs if job.max_tokens == 10)
    with pytest.raises(RuntimeError, match="oops"):
        jobs[2].samples.result(timeout=HANGS)
    assert sorted(Counting.batches) == [1, 3] and isinstance(desk.jobs, queue.Queue)


@pytest.mark.parametrize("text, content, names", [
    ('<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>', "", ["a"]),
    ('<think>\nhm\n</think>\n<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>', "<think>\nhm\n</think>", ["a"]),
    ('so <tool_call>{"name": "a", "arguments": {}}</tool_call> <tool_call>{"name": "b", "arguments": {}}</tool_call>', "so", ["a", "b"]),
    ("no call", None, []),
    ("<tool_call>{oops}</tool_call>", None, []),
    ('<tool_call>{"name": "a"}</tool_call>', None, []),
    ('<tool_call>{"name": "a", "arguments": {}}</tool_call> and more', None, []),
    ('<think>\n<tool_call>{"name": "a", "arguments": {}}</tool_call>', None, []),  # thinking that never ends
])  # fmt: skip
def test_tool_calls_are_read_only_where_all_is_well_formed(text, content, names):
    kept, calls = split_calls(text)
    assert [call["function"]["name"] for call in calls] == names and kept.strip() == (text if content is None else content).strip()


def test_the_command_says_where_it_serves_and_ends_on_control_c(monkeypatch, capsys):
    def interrupted(server):
        server.server_close()
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", interrupted)
    serve.main("scripted", port=0)
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("serving scripted at http://127.0.0.1:") and "--eval-only --api-base http://127.0.0.1:" in told[1]
    assert told[-1] == "stopped"
