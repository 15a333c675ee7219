"""Simulated engines for the benches: they speak enough of the OpenAI API to be measured through, and cost no compute.

    python -m bench.engines PORT [PORT ...] [--kind fast|hold|flood|slots] [--tokens 64] [--interval-ms 10] [--slots 4]

One engine per port, all in this process.

fast   answers at once; a stream is `--tokens` events, one every `--interval-ms`. What remains is the proxy's own cost.
hold   begins a stream with one event, and then says nothing.
flood  writes a stream as fast as it is taken, without an end.
slots  `--slots` requests at a time, the others wait inside, in order and without a word, as in real engines. A request
       makes `--tokens` tokens, one every `--interval-ms`. It notices a client that leaves at the next token. It keeps the
       time of every token by the `who=` of the prompt: GET /made gives and forgets them, which shows whose work was for nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import re

import httptools
import uvloop

BASE = b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
EVENT = b"data: " + BASE + b'"delta":{"content":"tok"},"finish_reason":null}]}\n\n'
LAST = b"data: " + BASE + b'"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,'
    b'"completion_tokens":1,"total_tokens":6}}'
)
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"bench"}]}'
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WHO = re.compile(rb"who=([a-z0-9-]+)")  # in the prompt: routers write the rest of a body anew


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


class Slots:
    """The slots of one engine, and what it made. Owned by that engine's connections together."""

    def __init__(self, count: int) -> None:
        self.free = count
        self.line: collections.deque[asyncio.Future[None]] = collections.deque()
        self.made: dict[str, list[float]] = {}

    async def take(self) -> None:
        if self.free:
            self.free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self.line.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give()
            raise

    def give(self) -> None:
        while self.line:
            place = self.line.popleft()
            if not place.done():
                place.set_result(None)
                return
        self.free += 1


class Engine(asyncio.Protocol):
    def __init__(self, args: argparse.Namespace, slots: Slots) -> None:
        self.args, self.slots = args, slots
        self.task = None
        self.room = asyncio.Event()
        self.room.set()

    def connection_made(self, transport):
        self.transport, self.parser = transport, httptools.HttpRequestParser(self)

    def connection_lost(self, _error):
        if self.task:
            self.task.cancel()
        self.room.set()

    def eof_received(self):
        self.transport.abort()

    def pause_writing(self):
        self.room.clear()

    def resume_writing(self):
        self.room.set()

    def data_received(self, data):
        self.parser.feed_data(data)

    def on_message_begin(self):
        self.body, self.url = [], b""

    def on_url(self, url):
        self.url += url

    def on_body(self, body):
        self.body.append(body)

    def on_message_complete(self):
        if self.parser.get_method() != b"POST":
            self.transport.write(whole(self.page()))
            return
        body = b"".join(self.body)
        streams = b'"stream":true' in body or b'"stream": true' in body
        kind = self.args.kind
        if kind == "slots":
            self.task = asyncio.ensure_future(self.in_a_slot(body, streams))
        elif not streams:
            self.transport.write(whole(ANSWER))
        else:
            self.task = asyncio.ensure_future(getattr(self, kind)())

    def page(self) -> bytes:
        if self.url.startswith(b"/v1/models"):
            return MODELS
        if self.url == b"/made":
            made, self.slots.made = self.slots.made, {}
            return json.dumps(made).encode()
        return b"{}"

    async def fast(self):
        self.transport.write(STREAM)
        for _ in range(self.args.tokens):
            self.transport.write(chunk(EVENT))
            if self.args.interval_ms:
                await asyncio.sleep(self.args.interval_ms / 1000)
        self.transport.write(chunk(LAST) + chunk(DONE) + b"0\r\n\r\n")

    async def hold(self):
        self.transport.write(STREAM + chunk(EVENT))
        await asyncio.Event().wait()

    async def flood(self):
        self.transport.write(STREAM)
        many = chunk(EVENT * 100)
        while True:
            self.transport.write(many)
            await self.room.wait()
            await asyncio.sleep(0)

    async def in_a_slot(self, body: bytes, streams: bool):
        found = WHO.search(body)
        made = self.slots.made.setdefault(found.group(1).decode() if found else "", [])
        await self.slots.take()
        loop = asyncio.get_running_loop()
        try:
            for n in range(self.args.tokens):
                await asyncio.sleep(self.args.interval_ms / 1000)
                made.append(loop.time())
                if streams:
                    self.transport.write((b"" if n else STREAM) + chunk(EVENT))
            if streams:
                self.transport.write(chunk(LAST) + chunk(DONE) + b"0\r\n\r\n")
            else:
                self.transport.write(whole(ANSWER))
        finally:
            self.slots.give()


async def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    p.add_argument("ports", type=int, nargs="+")
    p.add_argument("--kind", choices=["fast", "hold", "flood", "slots"], default="fast")
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--interval-ms", type=float, default=10)
    p.add_argument("--slots", type=int, default=4)
    args = p.parse_args()
    loop = asyncio.get_running_loop()
    for port in args.ports:
        slots = Slots(args.slots)
        await loop.create_server(
            lambda slots=slots: Engine(args, slots), "127.0.0.1", port, backlog=4096
        )
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
