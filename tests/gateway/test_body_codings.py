"""Content codings of requests: decoded under the limit, forwarded plain. Case B071."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import brotli  # type: ignore[import-untyped]
import pytest
import zstandard

from gateway.core.errors import GatewayError
from gateway.runtime.inflate import inflate
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.raw_client import RawClient
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import chat_stream
from tests.gateway.line_talk import CHAT, body_for

MIB = 1 << 20
TEXT = random.Random(1).randbytes(1_500_000).hex()  # hard to compress: what comes in is large too


def _raw_deflate(data: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-15)
    return coder.compress(data) + coder.flush()


def _flushed_zstd(data: bytes) -> bytes:
    """A frame of unknown length in many blocks, as a streaming encoder writes it."""
    coder = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    parts = [
        coder.compress(data[at : at + 999]) + coder.flush(1) for at in range(0, len(data), 999)
    ]
    return b"".join(parts) + coder.flush()


CODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "two gzip members": ("gzip", lambda d: gzip.compress(d[:9]) + gzip.compress(d[9:])),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("deflate", _raw_deflate),
    "br": ("br", lambda d: brotli.compress(d, quality=4)),
    "zstd": ("zstd", zstandard.compress),
    "zstd in blocks": ("zstd", _flushed_zstd),
    "two zstd frames": ("ZSTD", lambda d: zstandard.compress(d[:9]) + zstandard.compress(d[9:])),
    "gzip in zstd": ("gzip, zstd", lambda d: zstandard.compress(gzip.compress(d))),
    "br in gzip": ("br,identity,gzip", lambda d: gzip.compress(brotli.compress(d, quality=4))),
}


async def _post(port: int, body: bytes, coding: str, **how: object) -> tuple[int, bytes]:
    async with await RawClient.connect(port) as client:
        headers = {"Content-Type": "application/json", "Content-Encoding": coding}
        await client.request("POST", CHAT, headers=headers, body=body, **how)
        answer = await client.response(patience_s=30 * slack())
        return answer.status, answer.body


@pytest.mark.parametrize("name", CODERS)
@in_loop
async def test_a_coded_body_reaches_the_engine_plain(name: str) -> None:
    coding, coder = CODERS[name]
    bodies = [json.dumps(body_for(CHAT) | {"user": words}).encode() for words in ("hello", TEXT)]
    coded = [coder(body) for body in bodies]
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.always(chat_stream(1))
        for body, sent in zip(bodies, coded, strict=True):
            status, told = await _post(slotgate.port, sent, coding)
            assert status == 200, told
            request = engine.requests[-1]
            assert request.body == body
            assert "content-encoding" not in request.headers
            assert request.headers["content-length"] == str(len(body))
        assert await slotgate.outcomes() == {"served": 2}


@pytest.mark.parametrize(
    "coding", ["compress", "gzip, snappy", "gzip,gzip,gzip,gzip,gzip", "aes\xff"]
)
@in_loop
async def test_an_unknown_coding_is_a_415_before_the_body_is_read(coding: str) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        async with await RawClient.connect(slotgate.port) as client:
            headers = {"Content-Encoding": coding, "Content-Length": "100000"}
            await client.request("POST", CHAT, headers=headers)
            answer = await client.response()
        assert answer.status == 415
        assert answer.json()["error"]["code"] == "unsupported_encoding"
        assert not engine.requests
        assert await slotgate.outcomes() == {"bad_request": 1}


def _damaged(whole: bytes) -> dict[str, bytes]:
    return {
        "nothing": b"",
        "its beginning": whole[:3],
        "its half": whole[: len(whole) // 2],
        "all but its end": whole[:-1],
        "other bytes": b"{this is no such thing}" * 9,
        "something behind it": whole + b"{}",
    }


@pytest.mark.parametrize("damage", list(_damaged(b"")))
@pytest.mark.parametrize("name", [name for name in CODERS if name != "x-gzip"])
def test_a_damaged_coding_is_an_error(name: str, damage: str) -> None:
    coding, coder = CODERS[name]
    codings = tuple(one for one in coding.lower().replace(" ", "").split(",") if one != "identity")
    body = _damaged(coder(b'{"model":"m"}' + bytes(range(256)) * 99))[damage]
    with pytest.raises(GatewayError) as refused:
        asyncio.run(inflate(body, codings, MIB, lambda: GatewayError("body_too_large", "")))
    assert refused.value.key == "invalid_json"


@in_loop
async def test_a_damaged_body_is_a_400_that_says_so() -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        status, told = await _post(slotgate.port, gzip.compress(b'{"model":"m"}' * 50)[:-9], "gzip")
        assert status == 400
        assert b"gzip" in told
        assert not engine.requests
        assert await slotgate.outcomes() == {"bad_request": 1}


def _bomb(coding: str, mib: int) -> bytes:
    zeros = bytes(MIB)
    if coding == "br":
        brotli_coder = brotli.Compressor(quality=5)
        return b"".join(brotli_coder.process(zeros) for _ in range(mib)) + brotli_coder.finish()
    coder = (
        zstandard.ZstdCompressor().compressobj()
        if coding == "zstd"
        else zlib.compressobj(9, zlib.DEFLATED, 31 if coding == "gzip" else 15)
    )
    return b"".join(coder.compress(zeros) for _ in range(mib)) + coder.flush()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
@in_loop
async def test_a_bomb_is_a_413_that_costs_no_more_than_the_limit(coding: str) -> None:
    """Many times the limit, of zeros; the largest resident size is looked at all the while."""
    bomb, limit_mib = _bomb(coding, 200), 32
    async with (
        FakeEngine() as engine,
        running_gateway(engine, limits={"body_mib": limit_mib}) as slotgate,
    ):
        before = peak = _resident()
        call = asyncio.create_task(_post(slotgate.port, bomb, coding))
        while not call.done():
            peak = max(peak, _resident())
            await asyncio.sleep(0.001)
        status, told = call.result()
        assert status == 413
        assert f"{limit_mib} MiB" in told.decode()
        assert b"limits.body_mib" in told
        assert peak - before < (limit_mib + 16) * MIB
        assert not engine.requests


@in_loop
async def test_a_bomb_inside_a_bomb_does_not_hold_the_loop() -> None:
    bomb = gzip.compress(_bomb("zstd", 1024))
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        status, _ = await _post(slotgate.port, bomb, "zstd, gzip")
        assert status == 413
        many = gzip.compress(b"") * 100_000  # each member costs time and brings nothing
        status, _ = await _post(slotgate.port, many, "gzip")
        assert status == 400


@in_loop
async def test_a_client_that_leaves_while_its_body_is_decoded_leaves_nothing_behind() -> None:
    bomb = _bomb("gzip", 60)
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        for _ in range(5):
            async with await RawClient.connect(slotgate.port) as client:
                headers = {"Content-Encoding": "gzip"}
                await client.request("POST", CHAT, headers=headers, body=bomb)
                client.rst()
        await eventually(lambda: slotgate.metric("requests_total"))
        assert (await slotgate.chat()).status_code == 200
        assert len(engine.requests) == 1
