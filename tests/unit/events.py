"""Events as engines write them, for the tests of the tap."""

from __future__ import annotations

import json
from typing import Any

from gateway.core.sse import Tap
from gateway.core.wire import Wire

DONE = b"data: [DONE]\n\n"


def event(document: object, name: str = "") -> bytes:
    line = f"event: {name}\n" if name else ""
    return f"{line}data: {json.dumps(document)}\n\n".encode()


def delta(**said: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": said, "finish_reason": None}]}


def finish(index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {}, "finish_reason": "stop"}]}


def tapped(wire: Wire, *reads: bytes) -> Tap:
    tap = Tap(wire)
    for read in reads:
        tap.feed(read)
    return tap
