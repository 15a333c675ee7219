"""A client that stops reading: the engine is stopped too, nobody else notices, and it does not last for ever. Case B029."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from pathlib import Path

import pytest

from tests.fakes.connection import Connection
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.raw_client import RawClient, encode
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import chat_stream, endless
from tests.gateway.line_talk import CHAT
from tests.gateway.served import serving

MIB = 1 << 20
REQUEST = encode("POST", CHAT, body=b'{"model":"m","messages":[],"stream":true}')


async def _until_still(engine: FakeEngine) -> int:
    """Waits until no engine has got rid of a byte for 0.2 s; how many they have, into anything but their own buffers."""
    last, since = -1, 0.0
    while time.monotonic() - since < 0.2:
        poured = sum(
            sum(size for _, size in one.written) - one.buffered
            for one in engine.connections
            if one.is_open
        )
        if poured != last:
            last, since = poured, time.monotonic()
        await asyncio.sleep(0.02)
    return last


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
@in_loop
async def test_clients_that_never_read_stop_their_engines_and_nobody_else(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine(slots=11))
        config = {"backends": [{"name": "b", "url": engine.url}]}
        served = await stack.enter_async_context(serving(tmp_path, config))
        engine.script(*[endless(limit=200 * MIB)] * 10)
        before = _resident(served.process.pid)
        for _ in range(10):
            client = await RawClient.connect(served.port, rcvbuf=4096)
            stack.callback(client.close)
            await client.send(REQUEST)
        await engine.until_requests(10)
        poured = await _until_still(engine)
        assert poured < 10 * 8 * MIB, f"{poured / MIB:.0f} MiB"
        grown = _resident(served.process.pid) - before
        assert grown < 32 * MIB, f"{grown / MIB:.0f} MiB"
        engine.script(chat_stream(20, 0.02))
        async with await served.asking(stream=True) as normal:
            answer = await normal.response()
            times = [at for at, _ in normal.log]
        assert answer.ended == "whole"
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert max(gaps) < 0.5 * slack()


@in_loop
async def test_a_client_that_takes_no_byte_for_write_stall_s_is_gone_and_frees_its_slot() -> None:
    async with (
        FakeEngine(slots=1) as engine,
        running_gateway(engine, timeouts={"write_stall_s": 0.3}) as slotgate,
    ):
        engine.script(endless())
        async with await RawClient.connect(slotgate.port, rcvbuf=4096) as client:
            await client.send(REQUEST)
            request = await engine.until_requests(1)
            await engine.until(request.connection.left.is_set, within_s=5)
            await eventually(lambda: slotgate.metric("requests_total", outcome="client_gone"))
            assert await slotgate.metric("backend_errors_total") == 0
        assert (await slotgate.chat()).status_code == 200


@in_loop
async def test_a_slow_reader_gets_every_byte_and_is_not_taken_for_a_stalled_one() -> None:
    total = 3 * MIB
    async with (
        FakeEngine() as engine,
        running_gateway(
            engine, timeouts={"write_stall_s": 0.5, "between_bytes_s": 0.5}
        ) as slotgate,
    ):
        piece = b"data: " + b"x" * 65_000 + b"\n\n"

        async def whole(connection: Connection) -> None:
            await connection.begin()
            for _ in range(total // len(piece)):
                await connection.body(piece)
            await connection.body(b"data: [DONE]\n\n")
            await connection.end()

        engine.script(whole)
        async with await RawClient.connect(slotgate.port, rcvbuf=65_536) as client:
            await client.send(REQUEST)
            body = b""
            await client.head()
            while chunk := await client.chunk():
                body += chunk
                await asyncio.sleep(0.01)
        assert body == bytes(engine.requests[0].sent)
        assert await slotgate.outcomes() == {"served": 1}


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
