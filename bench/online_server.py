"""A server that answers every chat completion after 50 ms, for benchmarks. It prints its port."""

from __future__ import annotations

import asyncio
import json
import socket

from aiohttp import web

from bench.batch_server import BODY

LATENCY_SECONDS = 0.05
_REPLY = json.dumps(BODY).encode()


async def answer(request: web.Request) -> web.Response:
    await request.read()
    await asyncio.sleep(LATENCY_SECONDS)
    return web.Response(body=_REPLY, content_type="application/json")


def main() -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    web.run_app(app, sock=listener, print=None, access_log=None)


if __name__ == "__main__":
    main()
