"""Requests that want to be two, or to be somebody else's, through the whole gateway. B074.

Whatever a client sends: the engine sees well-formed requests only, at most one for each that the client was answered
200, and the connection either ends or serves the next request as if nothing had been.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import HangupError, RawClient, RawResponse
from tests.fakes.running import in_loop, slack

QUIET_S = 0.4
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
HIDDEN = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Hidden: 1\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def sized(body: bytes, *lines: bytes) -> bytes:
    return (
        CHAT
        + b"".join(x + b"\r\n" for x in lines)
        + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )


def chunked(*pieces: bytes, te: bytes = b"Transfer-Encoding: chunked", end: bytes = b"") -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(x), x) for x in pieces)
    return CHAT + te + b"\r\n\r\n" + body + b"0\r\n" + end + b"\r\n"


CORPUS = {
    "a length that hides the rest": sized(BODY, b"Content-Length: 0") + HIDDEN,
    "lengths as a list": CHAT + b"Content-Length: 3, 3\r\n\r\nabc" + HIDDEN,
    "a length with a sign": CHAT + b"Content-Length: +61\r\n\r\n" + BODY,
    "a length in hex": CHAT + b"Content-Length: 0x3d\r\n\r\n" + BODY,
    "a length with blanks inside": CHAT + b"Content-Length: 6 1\r\n\r\n" + BODY,
    "a negative length": CHAT + b"Content-Length: -1\r\n\r\n" + BODY + HIDDEN,
    "a length beyond 64 bits": CHAT + b"Content-Length: 18446744073709551677\r\n\r\n" + BODY,
    "chunked and a length": chunked(BODY, te=b"Content-Length: 4\r\nTransfer-Encoding: chunked"),
    "a length and chunked": chunked(BODY, te=b"Transfer-Encoding: chunked\r\nContent-Length: 4"),
    "chunked, twice": chunked(BODY, te=b"Transfer-Encoding: chunked, chunked"),
    "chunked by a tab": chunked(BODY, te=b"Transfer-Encoding:\tchunked"),
    "chunked by a vertical tab": chunked(BODY, te=b"Transfer-Encoding: \x0bchunked"),
    "chunked in capitals": chunked(BODY, te=b"TRANSFER-ENCODING: CHUNKED"),
    "chunked in a folded line": chunked(BODY, te=b"Transfer-Encoding:\r\n chunked"),
    "chunked with a comment": chunked(BODY, te=b"Transfer-Encoding: chunked;q=1"),
    "a colon after a blank": chunked(BODY, te=b"Transfer-Encoding : chunked"),
    "a body behind the last chunk": chunked(BODY) + HIDDEN,
    "framing in a trailer": chunked(BODY, end=b"Content-Length: 500\r\n") + HIDDEN,
    "a request in a chunk extension": CHAT
    + b"Transfer-Encoding: chunked\r\n\r\n%x;a=GET / HTTP/1.1\r\n" % len(BODY)
    + BODY
    + b"\r\n0\r\n\r\n",
    "a chunk size that overflows": CHAT
    + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n"
    + BODY,
    "a request as the body": sized(HIDDEN),
    "a request as a header": sized(BODY, b"X: a\r\n\r\n" + HIDDEN),
    "bare CR in a header": sized(BODY, b"X: a\rContent-Length: 0"),
    "bare LF in a header": sized(BODY, b"X: a\nContent-Length: 0"),
    "NUL in a header": sized(BODY, b"X: a\0b"),
    "a header without a name": sized(BODY, b": a"),
    "a name with a blank": sized(BODY, b"X Y: a"),
    "a line break in the target": b"POST /v1/chat/completions\r\nX: HTTP/1.1\r\n\r\n" + BODY,
    "a line break, encoded": b"POST /v1/chat/completions%0d%0aX:%20y HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "another host in the target": b"POST http://evil/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY),
    "a target with a user": b"POST http://a:b@h/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "two blanks in the line": b"POST  /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "an unknown method": b"SMUGGLE /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "an upgrade": sized(BODY, b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c") + HIDDEN,
    "Connection names what matters": sized(BODY, b"Connection: content-length, host, x") + HIDDEN,
    "an expectation": sized(BODY, b"Expect: 100-continue") + HIDDEN,
    "an unknown expectation": sized(BODY, b"Expect: 200-ok"),
    "the pipeline": sized(BODY) + sized(BODY) + HIDDEN,
    "HTTP/1.0 with more behind it": CHAT.replace(b"1.1", b"1.0")
    + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    + HIDDEN,
    "other lines where a backend splits": sized(BODY, b"X: a\xc2\x85Content-Length: 0"),
}


SERVED = {  # how many whole requests there really are in it, where that is not none
    "chunked by a tab": 1,
    "chunked in capitals": 1,
    "a body behind the last chunk": 2,
    "a request as a header": 1,  # the first one ended before it, and has no body
    "another host in the target": 1,
    "an upgrade": 2,
    "Connection names what matters": 2,
    "an expectation": 2,
    "an unknown expectation": 1,
    "the pipeline": 3,
    "HTTP/1.0 with more behind it": 1,
    "other lines where a backend splits": 1,
}


@pytest.mark.parametrize("name", CORPUS)
@in_loop
async def test_no_request_becomes_two_and_no_connection_loses_step(name: str) -> None:
    async with FakeEngine(slots=4) as engine, running_gateway(engine, check=False) as slotgate:
        expected = SERVED.get(name, 0)
        said = await _said(CORPUS[name], slotgate)
        assert said.served <= expected
        await engine.until(lambda: len(engine.requests) >= expected)
        assert len(engine.requests) == expected
        assert (await slotgate.chat()).status_code == 200, "the gateway and its engine go on"
        _are_ours(engine)


@pytest.mark.parametrize("seed", range(3))
@in_loop
async def test_no_random_damage_to_a_request_does_either(seed: int) -> None:
    rng = random.Random(seed)
    async with FakeEngine(slots=64) as engine, running_gateway(engine, check=False) as slotgate:
        damaged = [_damaged(rng.choice(list(CORPUS.values())), rng) for _ in range(100)]
        for at in range(0, len(damaged), 25):
            before = len(engine.requests)
            sent = damaged[at : at + 25]
            found = await asyncio.gather(*(_said(data, slotgate) for data in sent))
            served = sum(said.served for said in found)
            late = sum(
                said.silent for said in found
            )  # on a slow machine an answer may be on its way
            assert served <= len(engine.requests) - before <= served + late
            for data, said in zip(sent, found, strict=True):
                assert len(said.answers) <= data.count(b" HTTP/1") + 1, (data, said)
        assert (await slotgate.chat()).status_code == 200
        _are_ours(engine)
        assert await slotgate.metric("in_flight") == 0


def _are_ours(engine: FakeEngine) -> None:
    """What reached the engine is as the gateway writes it."""
    assert engine.bad_requests == []
    for request in engine.requests:
        assert request.path == "/v1/chat/completions"
        assert request.head.get("host") == f"127.0.0.1:{engine.port}"
        assert request.head.get("transfer-encoding") is None
        assert request.head.get("content-length") == str(len(request.body))


@dataclass(slots=True)
class Said:
    """All that came back, until the connection ended or nothing came any more (`silent`)."""

    answers: list[RawResponse] = field(default_factory=list)
    silent: bool = False

    @property
    def served(self) -> int:
        return sum(answer.status == 200 for answer in self.answers)


async def _said(data: bytes, slotgate: Running) -> Said:
    said = Said()
    async with await RawClient.connect(slotgate.port) as client:
        try:
            await client.send(data)
            while True:
                said.answers.append(await client.response(patience_s=QUIET_S * slack()))
        except TimeoutError:
            said.silent = True
        except HangupError:
            pass
    return said


def _damaged(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, dropped, doubled or swapped for what parsers stumble over."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out))
        how: Any = rng.randrange(4)
        if how == 0:
            out[at] = rng.randrange(256)
        elif how == 1:
            del out[at : at + rng.randint(1, 8)]
        elif how == 2:
            out[at:at] = out[at : at + rng.randint(1, 20)]
        else:
            out[at:at] = rng.choice([b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"\r\n\r\n"])
        if not out:
            return data
    return bytes(out)
