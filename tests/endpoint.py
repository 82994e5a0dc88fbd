"""An OpenAI-compatible endpoint, or a hub, on loopback: what test_api.py and test_export.py speak to."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JsonHandler(BaseHTTPRequestHandler):
    """Answers in JSON, over connections that are kept."""

    protocol_version = "HTTP/1.1"

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, status: int, value) -> None:
        self.write(json.dumps(value).encode(), status)

    def write(self, raw: bytes, status: int = 200, length: int | None = None, **headers) -> None:
        """length: what the header says, if not the truth."""
        self.send_response(status)
        headers = {"Content_Type": "application/json", **headers}
        headers["Content_Length"] = str(len(raw) if length is None else length)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(raw)

    def handle(self):
        try:
            super().handle()
        except OSError:
            pass  # the client has had enough

    def log_message(self, *args):
        pass


@contextmanager
def running(handler: type):
    """The address of a server of this handler, while it serves."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def say(text, **more) -> dict:
    """A well-formed answer: two tokens asked, three spoken."""
    message = {"role": "assistant", "content": text, **more.pop("message", {})}
    choice = {"index": 0, "message": message, "finish_reason": "stop", **more}
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    head = {"id": "1", "object": "chat.completion", "created": 0, "model": "any"}
    return {**head, "choices": [choice], "usage": usage}
