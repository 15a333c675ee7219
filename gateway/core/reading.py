"""How a request names its model, by the kind of its path: in a JSON body, in a form, or in the query of a GET.

Law of this file: whatever the form, the answer is one ParsedRequest, and `with_model` puts another name where the
first one stood, by splicing.
"""

from __future__ import annotations

import json
from typing import Final
from urllib.parse import parse_qs, quote

from gateway.core.json_scan import Span, members, text_of
from gateway.core.multipart import is_multipart, multipart_model, replace_multipart_model
from gateway.core.request import ParsedRequest, parse, replace_model
from gateway.core.routes import Route

SHOW: Final = "/api/show"  # its older clients say `name` for `model`


def read_request(route: Route, body: bytes, content_type: str, query: bytes) -> ParsedRequest:
    """What the gateway needs to know of a request to this path. Raises GatewayError(invalid_json)."""
    if route.method == "GET":
        return _named(_of_query(query))
    if is_form(route, content_type):
        return _named(multipart_model(body, content_type))
    request = parse(body, route.wire)
    if route.path == SHOW and not request.model_present:
        return _named(_of_member(body, "name"))
    return request


def is_form(route: Route, content_type: str) -> bool:
    """Whether the body is a form in parts, on a path that takes one."""
    return route.form and is_multipart(content_type)


def with_model(
    route: Route, body: bytes, content_type: str, model: str, span: Span | None = None
) -> bytes:
    """The body with another model's name; every other byte stays. That of a GET names none.

    `span`: the `model_span` that was read from this very body, if at hand.
    """
    if route.method == "GET":
        return body
    if is_form(route, content_type):
        return replace_multipart_model(body, content_type, model)
    if route.path == SHOW:
        body, span = _replaced_member(body, "name", model), None
    return replace_model(body, model, span)


def query_with_model(query: bytes, model: str) -> bytes:
    """The query with another value for its `model`; every other byte stays."""
    parts = query.split(b"&")
    return b"&".join(
        b"model=" + quote(model, safe="").encode() if part.startswith(b"model=") else part
        for part in parts
    )


def _named(model: str | None) -> ParsedRequest:
    """A request of which nothing but the model's name matters."""
    return ParsedRequest(
        model=model,
        model_present=model is not None,
        model_span=None,
        stream=False,
        permits=1,
        max_tokens=None,
        prompt_cache_key=None,
        pieces=(),
        prompt_bytes=0,
    )


def _of_query(query: bytes) -> str | None:
    named = parse_qs(query.decode("latin-1"), max_num_fields=None).get("model", [])
    return named[0] if named else None


def _of_member(body: bytes, name: str) -> str | None:
    found = [member for member in members(body) if member.name == name]
    return text_of(memoryview(body)[found[-1].value : found[-1].end]) if found else None


def _replaced_member(body: bytes, name: str, value: str) -> bytes:
    for member in reversed([member for member in members(body) if member.name == name]):
        body = body[: member.value] + json.dumps(value).encode() + body[member.end :]
    return body
