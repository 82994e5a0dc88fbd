"""An OpenAI-compatible endpoint on loopback: what test_api.py speaks to."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(behave):
    """(URL, requests seen) of a server while it serves. behave(handler, request) answers: it
    returns a dict, or (status, dict), or writes by itself."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(request | {"key": self.headers["Authorization"]})
            result = behave(self, request)
            if result is not None:
                status, value = result if isinstance(result, tuple) else (200, result)
                self.write(json.dumps(value).encode(), status)

        def write(self, raw: bytes, status: int = 200, **headers) -> None:
            self.send_response(status)
            headers = {"Content_Type": "application/json", "Content_Length": len(raw)} | headers
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            self.wfile.write(raw)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", seen
    server.shutdown()
    server.server_close()


def say(text, **more) -> dict:
    """A well-formed answer: two tokens asked, three spoken."""
    message = {"role": "assistant", "content": text, **more.pop("message", {})}
    choice = {"index": 0, "message": message, "finish_reason": "stop", **more}
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    head = {"id": "1", "object": "chat.completion", "created": 0, "model": "any"}
    return {**head, "choices": [choice], "usage": usage}
