"""Web pages: which may read our answers (CORS), and which must not even ask.

Law of this file: a gateway that asks for no key is for its own machine, not for the pages shown on it. There a page's
origin must be named in `cors.origins`, and the Host must be this machine: a page that has its own name resolve to a
loopback address (DNS rebinding) is met by the latter.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gateway.core.config import is_loopback
from gateway.core.errors import GatewayError, Headers

EXPOSED: Final = (
    b"x-request-id, request-id, retry-after, retry-after-ms, x-slotgate-backend, x-slotgate-queue-ms, "
    b"x-slotgate-affinity, x-slotgate-estimated"
)
METHODS: Final = b"GET, HEAD, POST, OPTIONS"
MAX_AGE_S: Final = b"600"


def shared_with(origin: bytes | None, origins: Collection[str]) -> Headers:
    """The headers that let a page of this origin read an answer; none for an origin that is not in `cors.origins`."""
    if origin is None or not origins:
        return []
    vary = (b"vary", b"Origin")
    if not _is_named(origin, origins):
        return [vary]
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", EXPOSED),
        vary,
    ]


def preflight(headers: Headers, origins: Collection[str]) -> Headers:
    """What a page is told that asks beforehand. The headers it asks for are echoed: `*` would not cover Authorization."""
    asked = dict(headers)
    origin = asked.get(b"origin")
    if origin is None or not _is_named(origin, origins):
        return []
    out = [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-max-age", MAX_AGE_S),
    ]
    wanted = asked.get(b"access-control-request-headers")
    if wanted:
        out.append((b"access-control-allow-headers", wanted))
    return out


def refuse_pages(headers: Headers, origins: Collection[str]) -> None:
    """For a request that presents no key where none is asked for. Raises GatewayError(origin_not_allowed)."""
    for name, value in headers:
        if name == b"origin" and not _is_named(value, origins):
            raise GatewayError(
                "origin_not_allowed",
                f"This gateway asks for no key, so web pages may not use it. Add {_shown(value)} to cors.origins to "
                "allow this one.",
            )
        if name == b"host" and not _is_this_machine(value.decode("latin-1")):
            raise GatewayError(
                "origin_not_allowed",
                f"This gateway asks for no key, so it answers only to this machine's own names, not to {_shown(value)}. "
                "Use localhost or 127.0.0.1.",
            )


def _is_named(origin: bytes, origins: Collection[str]) -> bool:
    text = origin.decode("latin-1").lower()
    return "*" in origins or any(text == one.lower().rstrip("/") for one in origins)


def _is_this_machine(host: str) -> bool:
    """`localhost`, a name below it, or a loopback address, each with or without a port."""
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    name = name.rstrip(".")
    return name.endswith(".localhost") or is_loopback(name)


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))
