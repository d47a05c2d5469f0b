"""A server that takes OpenAI's batches and has answered them at once, for benchmarks.

It checks nothing, so that what is measured is the client. Run as a process of its own; it prints
its port.
"""

from __future__ import annotations

import json
import re
import socket
import time
from typing import Any

from aiohttp import web

ANSWER = '{"category":"billing","urgency":3,"summary":"a ticket about a bill that came twice"}'
_CUSTOM_ID = re.compile(rb'"custom_id": ?"([^"]+)"')
BODY = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "gpt-5-mini-2025-08-07",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
}
_TAIL = (
    b'","response":{"status_code":200,"request_id":"r","body":'
    + json.dumps(BODY, separators=(",", ":")).encode()
    + b'},"error":null}\n'
)
_HEAD = b'{"id":"batch_req_1","custom_id":"'


class Server:
    """Holds the newest files and batches in memory."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}

    async def upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        file = form["file"]
        content = file.file.read() if isinstance(file, web.FileField) else bytes(file, "utf-8")
        name = f"file-in-{len(self.files)}"
        ids = _CUSTOM_ID.findall(content)
        self.files[name] = b""
        self.files[name + "-out"] = b"".join(_HEAD + each + _TAIL for each in ids)
        described = {
            "id": name, "object": "file", "bytes": len(content), "created_at": int(time.time()),
            "filename": "input.jsonl", "purpose": "batch", "status": "processed",
        }  # fmt: skip
        return web.json_response(described)

    async def create(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = f"batch_{len(self.batches)}"
        output = body["input_file_id"] + "-out"
        count = self.files[output].count(b"\n")
        now = int(time.time())
        self.batches[name] = {
            "id": name, "object": "batch", "endpoint": body["endpoint"], "errors": None,
            "input_file_id": body["input_file_id"], "completion_window": "24h",
            "status": "completed", "output_file_id": output, "error_file_id": None,
            "created_at": now, "completed_at": now, "expires_at": now + 86400,
            "request_counts": {"total": count, "completed": count, "failed": 0},
            "metadata": body.get("metadata"),
        }  # fmt: skip
        return web.json_response({**self.batches[name], "status": "validating"})

    async def retrieve(self, request: web.Request) -> web.Response:
        return web.json_response(self.batches[request.match_info["id"]])

    async def content(self, request: web.Request) -> web.Response:
        return web.Response(body=self.files[request.match_info["id"]])

    async def delete(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        return web.json_response({"id": name, "object": "file", "deleted": True})


def main() -> None:
    server = Server()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/files", server.upload)
    app.router.add_post("/v1/batches", server.create)
    app.router.add_get("/v1/batches/{id}", server.retrieve)
    app.router.add_get("/v1/files/{id}/content", server.content)
    app.router.add_delete("/v1/files/{id}", server.delete)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    web.run_app(app, sock=listener, print=None, access_log=None)


if __name__ == "__main__":
    main()
