"""The paths that Slotgate relays, and what each is. A path is forwarded only if it is literally here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gateway.core.errors import Family
from gateway.core.wire import Wire


@dataclass(frozen=True, slots=True)
class Route:
    """One relayed path."""

    path: str
    family: Family
    wire: Wire
    generates: bool  # takes permits, may queue, and counts in `requests_total`


def _openai(path: str, wire: Wire, *, generates: bool = True) -> Route:
    return Route(path, Family.OPENAI, wire, generates)


ROUTES: Final[dict[str, Route]] = {
    route.path: route
    for route in (
        _openai("/v1/chat/completions", Wire.CHAT),
        _openai("/v1/completions", Wire.COMPLETIONS),
        _openai("/v1/embeddings", Wire.JSON),
        _openai("/v1/responses", Wire.RESPONSES),
        _openai("/v1/rerank", Wire.JSON),
        _openai("/v1/score", Wire.JSON),
        _openai("/v1/moderations", Wire.JSON),
        Route("/v1/messages", Family.ANTHROPIC, Wire.MESSAGES, generates=True),
    )
}

BARE: Final = (
    "/chat/completions",
    "/completions",
    "/embeddings",
    "/responses",
    "/messages",
    "/models",
    "/rerank",
)


def normal(path: str) -> str:
    """`//v1/x`, `/v1/x/`, `/v1/v1/x` and the bare `/chat/completions` and the like, as `/v1/x`."""
    while path.startswith("//"):
        path = path[1:]
    if len(path) > 1 and path.endswith("/"):
        path = path.rstrip("/") or "/"
    if path.startswith("/v1/v1/"):
        path = path[3:]
    if path in BARE:
        return "/v1" + path
    return path


def family_of(path: str) -> Family:
    """The wire form in which to refuse a request for this path, known or not."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return Family.ANTHROPIC
    return Family.OLLAMA if path.startswith("/api/") else Family.OPENAI
