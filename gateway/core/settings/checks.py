"""Checks of texts: each returns the text in its final form, or raises Wrong with what to write instead."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import SplitResult, urlsplit

from gateway.core.settings.kinds import Wrong

_T = TypeVar("_T")

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_BACKEND_NAME: Final = re.compile(r"[A-Za-z0-9._:/@\[\]-]{1,128}")
_HOSTNAME: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_VISIBLE: Final = re.compile(r"[!-~]+")
_API_PATH: Final = re.compile(
    r"/(?:v1|api)/[a-z_/]+$|/(?:chat/)?completions$|/(?:api|metrics|health|props|slots)/?$"
)


def key_name(text: str) -> str:
    """The name of a key: it becomes a label of metrics and a field of log lines."""
    if not _NAME.fullmatch(text):
        raise Wrong("is not a name: use 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    return text


def backend_name(text: str) -> str:
    """The name of a backend: it becomes a label of metrics and a response header."""
    if not _BACKEND_NAME.fullmatch(text):
        raise Wrong("is not a name: use 1 to 128 of the characters A-Z a-z 0-9 . _ : / @ -")
    return text


def model_id(text: str) -> str:
    """The name of a model, whatever the engine calls it, up to 256 printable characters."""
    if not text or text != text.strip():
        raise Wrong("is empty or begins or ends with a space; write the id as the engine lists it")
    if len(text) > 256 or not text.isprintable():
        raise Wrong("is not an id of at most 256 printable characters")
    return text


def api_key(text: str) -> str:
    """A key that goes into a header: visible ASCII, so that it can smuggle nothing."""
    if re.fullmatch(r"\$[A-Za-z_][A-Za-z0-9_]*", text):
        raise Wrong("it looks like a variable without braces; write ${NAME}")
    if not _VISIBLE.fullmatch(text):
        raise Wrong(
            "it must be one word of visible ASCII characters, without spaces or line breaks"
        )
    return text


def host(text: str) -> str:
    """An address or name to listen on, without port and brackets."""
    bare = text.removeprefix("[").removesuffix("]")
    if _is_address(bare):
        return bare
    if text == "*":
        raise Wrong("is not a host; write 0.0.0.0 for every IPv4 address, or :: for IPv6 too")
    if text.count(":") == 1 or "/" in text:
        raise Wrong(
            "is not a host; write the host alone, such as 127.0.0.1, and the port in `port`"
        )
    if not _HOSTNAME.fullmatch(text) or re.fullmatch(r"[0-9.]+", text):
        raise Wrong("is not a host; write an address such as 127.0.0.1 or a host name")
    return text


def backend_url(text: str) -> str:
    """The base URL of an engine, with or without /v1; trailing slashes go."""
    parts = _url(text, ("http", "https"), "http://127.0.0.1:8080")
    if parts.username is not None or parts.password is not None:
        raise Wrong(
            "holds a user or password; write it without and put the engine's key in `api_key`"
        )
    if parts.query or parts.fragment or "?" in text or "#" in text:
        raise Wrong("has something after `?` or `#`; write the base URL alone")
    if _API_PATH.search(parts.path):
        raise Wrong("is the address of one endpoint; write the base URL, with or without /v1")
    return text.rstrip("/")


def redis_url(text: str) -> str:
    """A redis://, rediss:// or unix:// URL; it may hold a password, so its text is never repeated."""
    if text.startswith("unix://"):
        return text
    _url(text, ("redis", "rediss"), "redis://127.0.0.1:6379/0")
    return text


def origin(text: str) -> str:
    """A web origin as browsers send it, or `*`."""
    if text == "*":
        return text
    parts = _url(text, ("http", "https"), "https://chat.example.org")
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        raise Wrong("is more than an origin", f"write {parts.scheme}://{parts.netloc}")
    return text.lower()


def network(text: str) -> str:
    """An address or a network of proxies, such as 10.0.0.0/8."""
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        pass
    try:
        whole = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise Wrong(
            "is not an address or network; write for example 10.0.0.5 or 10.0.0.0/8"
        ) from None
    raise Wrong("has bits set beyond its prefix", f"write {whole}")


def file_path(text: str) -> str:
    """A path as written; it is resolved against the folder of the file that names it."""
    if not text or "\0" in text:
        raise Wrong("is not a path; write the name of a file")
    if text.startswith("~"):
        raise Wrong("begins with ~, which is not expanded", f"write ${{HOME}}{text[1:]}")
    return text


def authority(url: str) -> str:
    """host:port of a checked URL: the name of a backend that was given none."""
    return _authority(urlsplit(url))


def one_engine(url: str) -> tuple[str, str, str]:
    """What makes two checked URLs the same engine: host, port and path without /v1."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return (parts.hostname or "", str(port), parts.path.rstrip("/").removesuffix("/v1"))


def _url(text: str, schemes: tuple[str, ...], example: str) -> SplitResult:
    if not _VISIBLE.fullmatch(text):
        raise Wrong(
            f"is not a URL (empty, or it holds a space or an odd character); write {example}"
        )
    scheme, found, _ = text.partition("://")
    if not found and schemes[0] == "http" and re.fullmatch(r"[\w.-]+(:\d+)?(/\S*)?", text):
        example = f"http://{text}"
    if not found or scheme.lower() not in schemes:
        begins = " or ".join(f"{one}://" for one in schemes)
        raise Wrong(f"does not begin with {begins}", f"write {example}")
    parts = _guarded(lambda: urlsplit(text), f"is not a URL; write {example}")
    port = _guarded(lambda: parts.port, "has a wrong port; ports go from 1 to 65535")
    name = parts.hostname or ""
    if port == 0 or parts.netloc.endswith(":"):
        raise Wrong("has a wrong port; ports go from 1 to 65535")
    if not (
        _is_address(name) or (_HOSTNAME.fullmatch(name) and not re.fullmatch(r"[0-9.]+", name))
    ):
        raise Wrong(f"has no proper host; write {example}")
    return parts


def _guarded(read: Callable[[], _T], otherwise: str) -> _T:
    try:
        return read()
    except ValueError:
        raise Wrong(otherwise) from None


def _authority(parts: SplitResult) -> str:
    name = parts.hostname or ""
    shown = f"[{name}]" if ":" in name else name
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{shown}:{port}"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
