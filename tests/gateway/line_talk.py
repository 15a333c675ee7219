"""What the tests of the whole line say to the gateway: a body for every route there is, and requests over raw sockets.

Law of this file: routes come from `core.routes`, so a route that is added is tested by every table-driven test.
"""

from __future__ import annotations

import json
from typing import Any

from gateway.core.routes import ROUTES
from tests.fakes.gateway import Running
from tests.fakes.raw_client import RawClient
from tests.fakes.wires import WIRES

CHAT = "/v1/chat/completions"
GENERATING = sorted(p for p, route in ROUTES.items() if route.generates and not route.native)
STREAMING = sorted(path for path in GENERATING if path in WIRES)

_HELLO = [{"role": "user", "content": "hello"}]
_FIELDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _HELLO},
    "/v1/messages": {"messages": _HELLO, "max_tokens": 5},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/rerank": {"query": "hello", "documents": ["a", "b"]},
    "/v1/score": {"text_1": "hello", "text_2": "hi"},
    "/v1/audio/speech": {"input": "hello", "voice": "v"},
    "/v1/images/generations": {"prompt": "hello"},
    "/completion": {"prompt": "hello"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/api/chat": {"messages": _HELLO},
    "/api/generate": {"prompt": "hello"},
}


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    """A body that this route takes. Ollama's streams by default are told not to, unless `stream` is given."""
    body = {"model": "m", **_FIELDS.get(path, {"input": "hello"})}
    if path.startswith("/api/"):
        body["stream"] = False
    return body | fields


async def asking(
    running: Running,
    path: str = CHAT,
    *,
    key: str | None = None,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> RawClient:
    """A client that has sent its whole request and has read nothing. The test leaves, reads, or both."""
    client = await RawClient.connect(running.port)
    pairs = {"Content-Type": "application/json", **running.header(key), **(headers or {})}
    await client.request(
        "POST", path, headers=pairs, body=json.dumps(body_for(path, **fields)).encode()
    )
    return client


def error_of(document: dict[str, Any]) -> dict[str, Any]:
    """The inner error of the OpenAI and Anthropic forms; Ollama's is a string."""
    error = document["error"]
    return error if isinstance(error, dict) else {"message": error}
