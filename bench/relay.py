"""A bare relay: uvicorn in front, an httptools client behind, and no feature at all. What the libraries alone cost.

python -m bench.relay PORT ENGINE_PORT
"""

from __future__ import annotations

import asyncio
import sys

import httptools
import uvicorn


class Answer(asyncio.Protocol):
    """One kept connection to the engine."""

    def connection_made(self, transport):
        self.transport = transport
        self.pieces: list[bytes] = []
        self.waiter: asyncio.Future[None] | None = None
        self.ended = True

    def ask(self, head: bytes, body: bytes) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.headers: list[tuple[bytes, bytes]] = []
        self.headed = self.ended = False
        self.transport.write(head + body)

    def data_received(self, data):
        self.parser.feed_data(data)
        self.wake()

    def connection_lost(self, _error):
        self.ended = self.headed = True
        self.wake()

    def on_header(self, name, value):
        self.headers.append((name.lower(), value))

    def on_headers_complete(self):
        self.headed = True

    def on_body(self, body):
        self.pieces.append(body)

    def on_message_complete(self):
        self.ended = True

    def wake(self):
        if self.waiter and not self.waiter.done():
            self.waiter.set_result(None)

    async def wait(self):
        self.waiter = asyncio.get_running_loop().create_future()
        await self.waiter


class Relay:
    def __init__(self, engine_port: int) -> None:
        self.engine_port = engine_port
        self.idle: list[Answer] = []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        answer = self.idle.pop() if self.idle else await self.connect()
        head = b"%s %s HTTP/1.1\r\nhost: engine\r\ncontent-length: %d\r\n\r\n" % (
            scope["method"].encode(),
            scope["raw_path"],
            len(body),
        )
        answer.ask(head, body)
        while not answer.headed:
            await answer.wait()
        kept = [h for h in answer.headers if h[0] != b"transfer-encoding"]
        status = answer.parser.get_status_code()
        await send({"type": "http.response.start", "status": status, "headers": kept})
        while True:
            ended = answer.ended
            data, answer.pieces = b"".join(answer.pieces), []
            await send({"type": "http.response.body", "body": data, "more_body": not ended})
            if ended:
                break
            if not answer.pieces and not answer.ended:
                await answer.wait()
        self.idle.append(answer)

    async def connect(self) -> Answer:
        loop = asyncio.get_running_loop()
        _, answer = await loop.create_connection(Answer, "127.0.0.1", self.engine_port)
        return answer


if __name__ == "__main__":
    uvicorn.run(
        Relay(int(sys.argv[2])),
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
    )
