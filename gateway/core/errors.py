"""Every way a request can end, and the one table that turns a refusal into bytes.

Law of this file: a gateway-made answer exists only as a row of SITUATIONS. The row gives its status, its
wire words in each API family and its Outcome; nothing else in the code writes an error body.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Outcome(StrEnum):
    """How a request ended: one closed set, the same word in metric, log line and test."""

    SERVED = "served"
    CLIENT_GONE = "client_gone"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    BAD_REQUEST = "bad_request"
    UNKNOWN_MODEL = "unknown_model"
    KEY_LIMIT = "key_limit"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    NO_BACKEND = "no_backend"
    DRAINING = "draining"
    UPSTREAM_REFUSED = "upstream_refused"
    UPSTREAM_FAILED = "upstream_failed"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    UPSTREAM_BROKE = "upstream_broke"


class Family(StrEnum):
    """The wire form of bodies and errors. llama-server natives use the OpenAI form."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


@dataclass(frozen=True, slots=True)
class Situation:
    """One row of the errors table: a kind of refusal, in all families."""

    status: int
    type: str
    code: str
    anthropic_type: str
    outcome: Outcome
    anthropic_status: int | None = (
        None  # where it differs: 529 says overloaded to Anthropic clients
    )
    may_have_run: bool = (
        False  # then `x-should-retry: false`, so that SDKs do not repeat a generation
    )


_BAD = "invalid_request_error"
_BUSY = "server_error"
_LIMIT = "rate_limit_error"

SITUATIONS: Final[dict[str, Situation]] = {
    "invalid_api_key": Situation(
        401, _BAD, "invalid_api_key", "authentication_error", Outcome.UNAUTHORIZED
    ),
    "model_not_allowed": Situation(
        403, _BAD, "model_not_allowed", "permission_error", Outcome.FORBIDDEN
    ),
    "admin_required": Situation(403, _BAD, "admin_required", "permission_error", Outcome.FORBIDDEN),
    "origin_not_allowed": Situation(
        403, _BAD, "origin_not_allowed", "permission_error", Outcome.FORBIDDEN
    ),
    "model_not_found": Situation(
        404, _BAD, "model_not_found", "not_found_error", Outcome.UNKNOWN_MODEL
    ),
    "not_found": Situation(404, _BAD, "not_found", "not_found_error", Outcome.BAD_REQUEST),
    "method_not_allowed": Situation(405, _BAD, "method_not_allowed", _BAD, Outcome.BAD_REQUEST),
    "request_timeout": Situation(408, _BAD, "request_timeout", _BAD, Outcome.BAD_REQUEST),
    "body_too_large": Situation(
        413, _BAD, "body_too_large", "request_too_large", Outcome.BAD_REQUEST
    ),
    "unsupported_encoding": Situation(415, _BAD, "unsupported_encoding", _BAD, Outcome.BAD_REQUEST),
    "upgrade_required": Situation(426, _BAD, "upgrade_required", _BAD, Outcome.BAD_REQUEST),
    "headers_too_large": Situation(431, _BAD, "headers_too_large", _BAD, Outcome.BAD_REQUEST),
    "invalid_json": Situation(400, _BAD, "invalid_json", _BAD, Outcome.BAD_REQUEST),
    "invalid_request": Situation(400, _BAD, "invalid_request", _BAD, Outcome.BAD_REQUEST),
    "too_many_choices": Situation(400, _BAD, "too_many_choices", _BAD, Outcome.BAD_REQUEST),
    "key_rate_limit": Situation(429, _LIMIT, "key_rate_limit", _LIMIT, Outcome.KEY_LIMIT),
    "key_concurrency": Situation(429, _LIMIT, "key_concurrency", _LIMIT, Outcome.KEY_LIMIT),
    "gateway_queue_full": Situation(
        503, _BUSY, "gateway_queue_full", "overloaded_error", Outcome.QUEUE_FULL, 529
    ),
    "gateway_queue_timeout": Situation(
        503, _BUSY, "gateway_queue_timeout", "overloaded_error", Outcome.QUEUE_TIMEOUT, 529
    ),
    "no_backend": Situation(503, _BUSY, "no_backend", "overloaded_error", Outcome.NO_BACKEND, 529),
    "draining": Situation(503, _BUSY, "draining", "overloaded_error", Outcome.DRAINING, 529),
    "upstream_failed": Situation(
        502, _BUSY, "upstream_failed", "api_error", Outcome.UPSTREAM_FAILED
    ),
    "upstream_failed_ran": Situation(
        502, _BUSY, "upstream_failed", "api_error", Outcome.UPSTREAM_FAILED, may_have_run=True
    ),
    "upstream_timeout": Situation(
        504, _BUSY, "upstream_timeout", "timeout_error", Outcome.UPSTREAM_TIMEOUT, may_have_run=True
    ),
    "upstream_auth": Situation(502, _BUSY, "upstream_auth", "api_error", Outcome.UPSTREAM_FAILED),
    "upstream_broke": Situation(502, _BUSY, "upstream_broke", "api_error", Outcome.UPSTREAM_BROKE),
    "internal_error": Situation(
        500, _BUSY, "internal_error", "api_error", Outcome.UPSTREAM_FAILED, may_have_run=True
    ),
}

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class GatewayError(Exception):
    """A refusal made by the gateway itself. `key` names its row in SITUATIONS."""

    key: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None  # exact seconds; the header rounds up
    headers: Headers = field(default_factory=list)

    def __post_init__(self) -> None:
        Exception.__init__(self, self.key, self.message)

    @property
    def situation(self) -> Situation:
        return SITUATIONS[self.key]


def status_of(error: GatewayError, family: Family) -> int:
    """The status this error has in this family (503 is 529 to Anthropic clients)."""
    row = error.situation
    if family is Family.ANTHROPIC and row.anthropic_status is not None:
        return row.anthropic_status
    return row.status


def body_of(error: GatewayError, family: Family, request_id: str) -> bytes:
    """The error as a JSON body in the family's own form."""
    return json.dumps(_document(error, family, request_id)).encode()


def headers_of(error: GatewayError) -> Headers:
    """The headers that belong to the situation, beside content type and length."""
    row = error.situation
    out = list(error.headers)
    if row.status == 401:
        out.append((b"www-authenticate", b"Bearer"))
    if row.may_have_run:
        out.append((b"x-should-retry", b"false"))
    if error.key == "draining":
        out.append((b"connection", b"close"))
    if error.retry_after_s is not None:
        out += retry_after(error.retry_after_s)
    return out


def retry_after(seconds: float) -> Headers:
    """When to come back: whole seconds in 1..60, rounded up, and beside it the exact figure in milliseconds."""
    seconds = min(max(seconds, 0.001), 60.0)
    return [
        (b"retry-after", str(max(1, -int(-seconds // 1))).encode()),
        (b"retry-after-ms", str(max(1, round(seconds * 1000))).encode()),
    ]


def stream_event(error: GatewayError, family: Family, request_id: str, *, responses: bool) -> bytes:
    """The error as the last thing in a stream that has already begun.

    Never followed by a terminal marker. `responses` selects the OpenAI Responses wire, whose clients
    know a failure only as `response.failed`.
    """
    if family is Family.OLLAMA:
        return body_of(error, family, request_id) + b"\n"
    if family is Family.ANTHROPIC:
        return b"event: error\ndata: " + body_of(error, family, request_id) + b"\n\n"
    if responses:
        return response_failed(request_id, error.situation.code, error.message)
    return b"data: " + body_of(error, family, request_id) + b"\n\n"


def response_failed(request_id: str, code: str, message: str) -> bytes:
    """How the Responses wire tells that nothing more will come."""
    failed = {
        "type": "response.failed",
        "response": {
            "id": f"resp_{request_id}",
            "object": "response",
            "status": "failed",
            "error": {"code": code, "message": message},
        },
    }
    return b"event: response.failed\ndata: " + json.dumps(failed).encode() + b"\n\n"


def _document(error: GatewayError, family: Family, request_id: str) -> dict[str, object]:
    row = error.situation
    if family is Family.OLLAMA:
        return {"error": error.message}
    if family is Family.ANTHROPIC:
        return {
            "type": "error",
            "error": {"type": row.anthropic_type, "message": error.message},
            "request_id": request_id,
        }
    return {
        "error": {
            "message": error.message,
            "type": row.type,
            "param": error.param,
            "code": row.code,
        }
    }
