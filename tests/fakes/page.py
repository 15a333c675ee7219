"""What a page of a scripted engine is, and what all of them share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fakes.connection import Request
    from tests.fakes.engine import FakeEngine

Reply = tuple[int, Any] | tuple[int, Any, str]  # status, body (bytes, or a document), content type
Page = Callable[["FakeEngine", "Request"], Reply | Awaitable[Reply]]

PROM = "text/plain; version=0.0.4"


def error(code: int, message: str, kind: str) -> dict[str, Any]:
    """The error body of llama-server, near enough for all."""
    return {"error": {"code": code, "message": message, "type": kind}}


def prom(lines: Mapping[str, float]) -> bytes:
    """Prometheus text."""
    return "".join(f"{name} {value}\n" for name, value in lines.items()).encode()
