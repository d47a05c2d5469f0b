"""A server on loopback that answers what a test has written down, and counts what reaches it."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """What the server does with one request: reply, or drop the connection without one."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_dropped: bool = False


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]

    @property
    def text(self) -> str:
        if "contents" in self.body:  # Gemini's form
            text: str = self.body["contents"][-1]["parts"][0]["text"]
        else:
            content = self.body["messages"][-1]["content"]
            text = content if isinstance(content, str) else content[-1]["text"]  # Converse's
        return text


class OnlineServer:
    """Replies by the text of a request's last message: its script in order, the last one forever.

    A text without a script gets ``default``. ``crowd`` is how many requests at once get a good
    reply; those above it get ``too_many``. With ``hold`` set, replies wait until it is released.
    """

    def __init__(self) -> None:
        self.script: dict[str, list[Reply]] = {}
        self.default = Reply()
        self.crowd: int | None = None
        self.too_many = Reply(429)
        self.latency_seconds = 0.0
        self.hold: threading.Event | None = None
        self.arrived = threading.Event()
        self.seen: list[Seen] = []
        self.peak = 0
        self.inside = 0
        self._tries: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                outer._handle(self)

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256
            daemon_threads = True

            def handle_error(self, *args: object) -> None:
                pass  # a client that was told to stop hangs up

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def sent(self) -> dict[str, int]:
        """Return how often each text has arrived."""
        counts: dict[str, int] = defaultdict(int)
        for seen in self.seen:
            counts[seen.text] += 1
        return dict(counts)

    def close(self) -> None:
        self._closing.set()
        if self.hold is not None:
            self.hold.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers["content-length"])
        body = json.loads(handler.rfile.read(length))
        headers = {name.lower(): value for name, value in handler.headers.items()}
        seen = Seen(handler.path, headers, body)
        with self._lock:
            self.seen.append(seen)
            self.inside += 1
            self.peak = max(self.peak, self.inside)
            is_crowded = self.crowd is not None and self.inside > self.crowd
            script = self.script.get(seen.text, [self.default])
            reply = script[min(self._tries[seen.text], len(script) - 1)]
            self._tries[seen.text] += 1
        self.arrived.set()
        try:
            if self.hold is not None:
                self.hold.wait()
            if self.latency_seconds:
                self._closing.wait(self.latency_seconds)
        finally:
            with self._lock:
                self.inside -= 1
        self._reply(handler, self.too_many if is_crowded else reply)

    def _reply(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        if reply.is_dropped:
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
            return
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        handler.send_response(reply.status)
        for name, value in {"Content-Type": "application/json", **reply.headers}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)
