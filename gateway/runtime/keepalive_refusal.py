"""An engine's refusal in a stream whose head has left already: its words, in the form in which the wire tells errors.

Law of this file: what the engine said is kept, as far as the wire has a place for it; agents read codes and messages.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from gateway.core.errors import Family, response_failed
from gateway.core.json_scan import UNREADABLE

MOST_TEXT: Final = 2048  # characters of an error page that is no JSON


def refusal_event(
    status: int, body: bytes, family: Family, request_id: str, *, responses: bool
) -> bytes:
    """The last thing in the stream: an engine's answer with this status, of which `body` is (the beginning of) the body.

    `responses`: the OpenAI Responses wire, whose clients know a failure only as `response.failed`.
    """
    error = _error_in(status, body)
    if family is Family.OLLAMA:
        return json.dumps({"error": error["message"]}).encode() + b"\n"
    if family is Family.ANTHROPIC:
        told = {"type": error.get("type") or "api_error", "message": error["message"]}
        document: dict[str, Any] = {"type": "error", "error": told, "request_id": request_id}
        return b"event: error\ndata: " + json.dumps(document).encode() + b"\n\n"
    if responses:
        code = error.get("code") or error.get("type") or status
        return response_failed(request_id, str(code), error["message"])
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


def _error_in(status: int, body: bytes) -> dict[str, Any]:
    """The engine's error object; always with a `message`. Engines also send a bare text, a bare object, or a page."""
    try:
        document = msgspec.json.decode(body)
    except UNREADABLE:
        document = None
    found = document.get("error", document) if isinstance(document, dict) else None
    if isinstance(found, dict) and isinstance(found.get("message"), str):
        return found
    text = found if isinstance(found, str) else body.decode("utf-8", "replace")[:MOST_TEXT].strip()
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {
        "message": text or f"The backend answered with status {status}.",
        "type": kind,
        "param": None,
        "code": status,
    }
