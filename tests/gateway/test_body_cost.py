"""What large bodies cost the gateway, seen from outside its process: memory, and the gaps of a stream. Cases B080, B081."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fakes.raw_client import RawClient, encode
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import events_of
from tests.gateway.line_talk import CHAT
from tests.gateway.served import Served, serving

MIB = 1 << 20
EVERY_S = 0.05
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")


@dataclass
class Sink:
    """An engine that reads bodies and keeps nothing of them; a small one is answered with a stream without end."""

    url: str = ""
    sizes: list[int] = field(default_factory=list)
    stream_all: bool = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                left = size
                while left:
                    left -= len(await reader.read(min(left, MIB))) or left
                if head.startswith(b"POST") and (size < MIB or self.stream_all):
                    await self._stream(writer)
                    return
                if head.startswith(b"POST"):
                    self.sizes.append(size)
                body = b'{"data":[{"id":"m"}],"choices":[]}'
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        token = events_of(CHAT, 1)[1]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        while not writer.transport.is_closing():
            writer.write(token)
            await asyncio.sleep(EVERY_S)


@contextlib.asynccontextmanager
async def sink() -> AsyncIterator[Sink]:
    engine = Sink()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, limit=2 * MIB)
    async with server:
        engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield engine
        server.close()


@contextlib.asynccontextmanager
async def in_front_of(engine: Sink, folder: Path) -> AsyncIterator[Served]:
    backend = {"name": "b", "url": engine.url, "engine": "openai", "slots": 40, "models": ["m"]}
    async with serving(folder, {"backends": [backend]}) as served:
        await eventually(lambda: _is_ready(served))
        yield served


async def _is_ready(served: Served) -> bool:
    return (await served.get("/readyz")).status == 200


def _body(size: int) -> bytes:
    """A chat with an inline image, this long."""
    empty = json.dumps(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "@"}}]}
            ],
        }
    )
    filler = "data:image/png;base64," + "iVBORw0KGgo+/A9=" * (size // 16)
    return empty.replace("@", filler[: size - len(empty) + 1]).encode()


def _resident(served: Served) -> int:
    return int(Path(f"/proc/{served.process.pid}/statm").read_text().split()[1]) * 4096


async def _largest(served: Served, work: asyncio.Future[object]) -> int:
    """The largest resident size while the work goes on, in bytes."""
    peak = 0
    while not work.done():
        peak = max(peak, _resident(served))
        await asyncio.sleep(0.005)
    return peak


async def _send(served: Served, request: bytes) -> int:
    async with await RawClient.connect(served.port) as client:
        await client.send(request, patience_s=60 * slack())
        return (await client.response(patience_s=60 * slack())).status


async def _warm_up(served: Served) -> None:
    """Both directions once, so that what is measured is not the first use of everything."""
    for size in (MIB, 2 * MIB):
        assert await _send(served, encode("POST", CHAT, body=_body(size))) == 200


@in_loop
async def test_twenty_large_bodies_cost_little_more_than_their_size(tmp_path: Path) -> None:
    async with sink() as engine, in_front_of(engine, tmp_path) as served:
        await _warm_up(served)
        request = encode("POST", CHAT, body=_body(12 * MIB))
        before = _resident(served)
        work = asyncio.gather(*(_send(served, request) for _ in range(20)))
        peak = await _largest(served, work)
        assert set(await work) == {200}
        assert engine.sizes.count(12 * MIB) == 20
        assert peak - before <= 2.5 * 240 * MIB, f"{(peak - before) / MIB:.0f} MiB"
        deadline = time.monotonic() + 10 * slack()
        while _resident(served) - before > 64 * MIB:
            assert time.monotonic() < deadline, "the memory did not return"
            await asyncio.sleep(0.05)


@in_loop
async def test_a_prompt_is_forgotten_while_its_answer_is_still_being_made(tmp_path: Path) -> None:
    request = encode("POST", CHAT, body=_body(12 * MIB))
    async with sink() as engine, in_front_of(engine, tmp_path) as served:
        await _warm_up(served)
        engine.stream_all = True
        before = _resident(served)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(8):
                client = await stack.enter_async_context(await RawClient.connect(served.port))
                await client.send(request, patience_s=60 * slack())
                assert (await client.head()).status == 200
                await client.chunk()
            await eventually(lambda: _resident(served) - before < 40 * MIB)


@pytest.mark.parametrize("how", ["length", "chunked", "gzip"])
@in_loop
async def test_a_body_of_64_mib_costs_at_most_two_and_a_half_times_its_size(
    how: str, tmp_path: Path
) -> None:
    body = _body(64 * MIB)
    if how == "chunked":
        chunks = [body[at : at + 4096] for at in range(0, len(body), 4096)]
        request = encode("POST", CHAT, chunks=chunks)
    elif how == "gzip":
        packed = gzip.compress(body, 1)
        request = encode("POST", CHAT, {"Content-Encoding": "gzip"}, packed)
    else:
        request = encode("POST", CHAT, body=body)
    async with sink() as engine, in_front_of(engine, tmp_path) as served:
        await _warm_up(served)
        before = _resident(served)
        work = asyncio.ensure_future(_send(served, request))
        peak = await _largest(served, work)
        assert await work == 200
        assert engine.sizes[-1] == len(body)
        assert peak - before <= 2.5 * len(body), f"{(peak - before) / MIB:.0f} MiB"


@in_loop
async def test_large_bodies_do_not_hold_up_a_stream(tmp_path: Path) -> None:
    """The target is 100 ms for the largest extra gap; here ten times that, for other programs run too."""
    bodies = [_body(12 * MIB), _body(33 * MIB)]
    requests = [encode("POST", CHAT, body=body) for body in bodies]
    requests.append(encode("POST", CHAT, {"Content-Encoding": "gzip"}, gzip.compress(bodies[0], 1)))
    async with sink() as engine, in_front_of(engine, tmp_path) as served:
        await _warm_up(served)
        async with await served.asking(stream=True) as client:
            await client.head()
            for request in requests * 2:
                work = asyncio.ensure_future(_send(served, request))
                while not work.done():
                    await client.chunk()
                assert await work == 200
            times = [at for at, _ in client.log]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert max(gaps) - EVERY_S < 1.0 * slack(), f"{max(gaps):.3f} s"
