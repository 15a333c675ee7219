"""Whatever an engine writes and however it ends: the client's answer is byte for byte the engine's, or honestly broken.

Real sockets, the real app, several requests at once. The law is core to a proxy: a cut answer never looks finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.connection import Connection
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import HangupError, RawClient, RawResponse
from tests.fakes.running import run
from tests.fakes.scripts import events_of
from tests.fakes.wires import WIRES
from tests.gateway.line_talk import STREAMING, body_for

COMMENT = b": keep-alive\n\n"
EARLY_S = 0.1
ODD_EVENTS = [
    b": a comment\n\n",
    b'data: {"zz":1}\n\n',
    b'data: {"choices":[{"delta":{"content":"\xe5\x8c"}}]}\n\n',
    b"retry: 3\n\n",
    b"data: " + b"x" * 300_000 + b"\n\n",
    b"\r\n\r\n",
    b"event: zz\r\ndata: not json\r\n\r\n",
]


@dataclass(slots=True)
class Plan:
    """One request: what its engine does, and what its client does."""

    path: str
    streams: bool
    status: int
    pieces: list[bytes]
    complete: bool | None  # its wire's own end is in it; None: half of it is
    framing: str
    end: str  # clean | fin | rst
    pause_s: float  # before the first byte
    version: str
    leaves: str  # stay | fin | rst
    sent: bytearray

    @property
    def ends_clean(self) -> bool:
        """The engine's own framing is satisfied."""
        return self.end == "clean" or (self.framing == "close" and self.end == "fin")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    path = draw(st.sampled_from(STREAMING))
    streams = draw(st.sampled_from([True, True, True, False]))
    if streams:
        data, complete = _stream(draw, path)
        status = 200
    else:
        data, complete = draw(st.binary(max_size=200)), True
        status = draw(st.sampled_from([200, 400, 404, 422, 500, 503]))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=5)))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return Plan(
        path,
        streams,
        status,
        [piece for piece in pieces if piece],
        complete,
        framing=draw(st.sampled_from(["chunked", "length", "close"])),
        end=draw(st.sampled_from(["clean", "clean", "fin", "rst"])),
        pause_s=draw(st.sampled_from([0, 0, 0, 2 * EARLY_S])),
        version=draw(st.sampled_from(["1.1", "1.1", "1.0"])),
        leaves=draw(st.sampled_from(["stay"] * 6 + ["fin", "rst"])),
        sent=bytearray(),
    )


def _stream(draw: st.DrawFn, path: str) -> tuple[bytes, bool | None]:
    """A stream of this path, with odd things between its events, perhaps cut off somewhere."""
    events = events_of(path, draw(st.integers(0, 3)))
    if WIRES[path].content_type == "text/event-stream":
        for odd in draw(st.lists(st.sampled_from(ODD_EVENTS), max_size=2)):
            events.insert(draw(st.integers(0, len(events) - 1)), odd)
    last = len(b"".join(events[:-1]))
    data = b"".join(events)
    cut = draw(st.sampled_from(["whole", "whole", "no end", "anywhere"]))
    if cut == "no end":
        return data[:last], False
    if cut == "anywhere":
        at = draw(st.integers(0, len(data) - 1))
        return data[:at], None if at > last else False
    return data, True


def _script(all_plans: list[Plan]) -> Any:
    async def script(connection: Connection) -> None:
        assert connection.request is not None
        plan = all_plans[int(connection.request.headers["x-plan"])]
        kind = WIRES[plan.path].content_type if plan.streams else "application/json"
        size = sum(map(len, plan.pieces)) + (0 if plan.ends_clean else 7)
        length = [("Content-Length", str(size))] if plan.framing == "length" else []
        await connection.pause(plan.pause_s)
        await connection.begin(plan.status, length, content_type=kind, framing=plan.framing)
        for piece in plan.pieces:
            plan.sent += piece
            await connection.body(piece, 0.001)
        if plan.end == "clean":
            await connection.end()
        else:
            (connection.fin if plan.end == "fin" else connection.rst)()

    return script


async def _play(slotgate: Running, number: int, plan: Plan) -> RawResponse | None:
    """What its client gets; None if it did not stay, or got no answer at all."""
    body = json.dumps(body_for(plan.path, stream=plan.streams)).encode()
    headers = {"X-Plan": str(number), "Content-Type": "application/json"}
    async with await RawClient.connect(slotgate.port) as client:
        await client.request("POST", plan.path, headers, body, version=plan.version)
        if plan.leaves != "stay":
            with contextlib.suppress(HangupError, TimeoutError):
                async with asyncio.timeout(0.01):
                    await client.head()
            (client.fin if plan.leaves == "fin" else client.rst)()
            return None
        try:
            return await client.response()
        except HangupError:
            return None


def _judge(plan: Plan, answer: RawResponse | None) -> None:
    try:
        _is_honest(plan, answer)
    except (AssertionError, ValueError) as error:
        got = answer and (answer.status, answer.ended, answer.body[-400:])
        short = replace(plan, pieces=[], sent=bytearray())
        raise AssertionError(f"{error}\n{short}\n{bytes(plan.sent)[-400:]!r}\n{got}") from error


def _is_honest(plan: Plan, answer: RawResponse | None) -> None:
    sent = bytes(plan.sent)
    if answer is None:
        assert not plan.ends_clean, "a whole answer did not arrive"
        return
    began = answer.body
    while began.startswith(COMMENT):  # also without a pause, on a machine that is busy
        began = began.removeprefix(COMMENT)
    if answer.ended != "whole":
        assert sent.startswith(began)
        assert not (plan.ends_clean and plan.complete), "broken without need"
        return
    if (
        answer.status == plan.status
        and began == sent
        and plan.ends_clean
        and plan.complete is not False
    ):
        return
    assert not (plan.ends_clean and plan.complete), "not what the engine said"
    _tells_an_error(plan, answer, began, sent)


def _tells_an_error(plan: Plan, answer: RawResponse, began: bytes, sent: bytes) -> None:
    """As a status of ours; or as the last event, behind whole events of the engine."""
    if answer.status != plan.status or not plan.streams:
        assert answer.status in (502, 504), answer.status
        assert "error" in answer.json()
        return
    common = next(
        (at for at, (one, other) in enumerate(zip(began, sent, strict=False)) if one != other),
        min(len(began), len(sent)),
    )
    mark = b'{"error"' if plan.path.startswith("/api/") else b"data: "
    event = began[began.rindex(mark) :]
    assert len(began) - len(event) <= common + len(b"event: response.failed\n")
    document = json.loads(event.removeprefix(b"data: "))
    assert "error" in json.dumps(document)
    assert b"[DONE]" not in began[common:]


async def _check(all_plans: list[Plan]) -> None:
    async with (
        FakeEngine("openai") as engine,
        running_gateway(
            {"url": engine.url, "slots": 8, "models": ["m"]},
            timeouts={"early_headers_s": EARLY_S},
        ) as slotgate,
    ):
        slotgate.models.add("m")
        engine.always(_script(all_plans))
        answers = await asyncio.gather(*(_play(slotgate, *one) for one in enumerate(all_plans)))
        for plan, answer in zip(all_plans, answers, strict=True):
            if plan.leaves == "stay":
                _judge(plan, answer)


@settings(max_examples=60)
@given(st.lists(plans(), min_size=1, max_size=6))
def test_an_answer_is_the_engines_byte_for_byte_or_honestly_broken(all_plans: list[Plan]) -> None:
    for plan in all_plans:
        plan.sent.clear()  # the same example may be played again
    run(_check(all_plans))
