"""The paths that Slotgate relays, and what a request's target means.

Law of this file: a path is forwarded only if it is literally here. A target with anything in it that another server
might read as another path (`%`, `..`, a backslash) is none of them; only the id in `/v1/models/{id…}`, which is
answered from memory, may hold encoded characters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

from gateway.core.errors import Family
from gateway.core.wire import Wire

MODELS: Final = "/v1/models/"  # and behind it a model's id, which may hold slashes
KEYED: Final = "/k/"  # and behind it a key, then the path


@dataclass(frozen=True, slots=True)
class Route:
    """One relayed path."""

    path: str
    family: Family
    wire: Wire
    generates: bool  # takes permits, may queue, and counts in `requests_total`
    native: bool = False  # one engine's own: only for backends that are known to serve it
    method: str = "POST"
    form: bool = False  # may come as a multipart form
    estimated: bool = False  # a token count, which the gateway estimates where no engine tells it
    makes_text: bool = field(init=False)  # token by token, which its answer may tell as they come

    def __post_init__(self) -> None:
        object.__setattr__(self, "makes_text", self.wire is not Wire.JSON)


def _openai(path: str, wire: Wire = Wire.JSON, *, form: bool = False) -> Route:
    return Route(path, Family.OPENAI, wire, generates=True, form=form)


def _llama(path: str, wire: Wire = Wire.JSON, *, generates: bool, method: str = "POST") -> Route:
    return Route(path, Family.OPENAI, wire, generates, native=True, method=method)


def _ollama(path: str, wire: Wire = Wire.JSON, *, generates: bool = True) -> Route:
    return Route(path, Family.OLLAMA, wire, generates, native=True)


ROUTES: Final[dict[str, Route]] = {
    route.path: route
    for route in (
        _openai("/v1/chat/completions", Wire.CHAT),
        _openai("/v1/completions", Wire.COMPLETIONS),
        _openai("/v1/embeddings"),
        _openai("/v1/responses", Wire.RESPONSES),
        _openai("/v1/rerank"),
        _openai("/v1/score"),
        _openai("/v1/moderations"),
        _openai("/v1/audio/transcriptions", form=True),
        _openai("/v1/audio/translations", form=True),
        _openai("/v1/audio/speech"),
        _openai("/v1/images/generations", form=True),
        Route("/v1/messages", Family.ANTHROPIC, Wire.MESSAGES, generates=True),
        Route(
            "/v1/messages/count_tokens",
            Family.ANTHROPIC,
            Wire.MESSAGES,
            generates=False,
            estimated=True,
        ),
        _llama("/infill", Wire.NATIVE, generates=True),
        _llama("/completion", Wire.NATIVE, generates=True),
        _llama("/tokenize", generates=False),
        _llama("/detokenize", generates=False),
        _llama("/apply-template", generates=False),
        _llama("/props", generates=False, method="GET"),
        _ollama("/api/chat", Wire.OLLAMA_NDJSON),
        _ollama("/api/generate", Wire.OLLAMA_NDJSON),
        _ollama("/api/embed"),
        _ollama("/api/embeddings"),
        _ollama("/api/show", generates=False),
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


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a request's target asks for. `path` never holds the key that stood in it."""

    path: str
    literal: bool = True  # False: no path of ours, whatever it looks like
    key: str | None = None
    route: Route | None = None  # where it is relayed


_PLAIN: Final = {path.encode(): Meaning(path, route=route) for path, route in ROUTES.items()}


def meaning_of(raw_path: bytes, *, key_in_path: bool) -> Meaning:
    """The path as it is known here, and the key in it if `/k/KEY/…` is allowed.

    `raw_path` is the target as it was sent, without its query. Of a path that looks as if it held a key, nothing is
    kept when that is not allowed: it would end up in a log.
    """
    plain = _PLAIN.get(raw_path)
    if plain is not None:
        return plain
    path = _collapsed(_origin_form(raw_path.decode("latin-1")))
    key = None
    if path.startswith(KEYED):
        secret, _, rest = path[len(KEYED) :].partition("/")
        if not key_in_path:
            return Meaning(KEYED + "…", literal=False)
        key = unquote(secret) or None
        path = "/" + rest
    path = normal(path)
    if path.startswith(MODELS):
        return Meaning(MODELS + unquote(path[len(MODELS) :]), key=key)
    literal = not ("%" in path or ".." in path or "\\" in path)
    return Meaning(path, literal, key, ROUTES.get(path) if literal else None)


def normal(path: str) -> str:
    """`//v1/x`, `/v1/x/`, `/v1/v1/x` and the bare `/chat/completions` and the like, as `/v1/x`."""
    path = _collapsed(path)
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


def _collapsed(path: str) -> str:
    return "/" + path.lstrip("/") if path.startswith("//") else path


def _origin_form(target: str) -> str:
    """`http://host/path`, as one may also ask (RFC 9112 section 3.2.2), is `/path`."""
    if target.startswith("/") or "://" not in target:
        return target
    _, slash, path = target.partition("://")[2].partition("/")
    return slash + path or "/"
