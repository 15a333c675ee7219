"""Where a backend is: the parts of its URL, ready for the wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit


@dataclass(frozen=True, slots=True)
class Target:
    """One backend's address. `base_path` never ends in "/" or "/v1"; `authority` is the Host header."""

    name: str
    scheme: str
    host: str
    port: int
    base_path: str
    authority: bytes
    api_key: str | None = field(default=None, repr=False)
    ca: str | None = None  # PEM file that vouches for it, instead of the system's

    @staticmethod
    def parse(name: str, url: str, api_key: str | None = None, ca: str | None = None) -> Target:
        """Read `http(s)://host[:port][/prefix][/v1][/]`.

        Raises ValueError with a message that says what is wrong and holds no secret.
        """
        parts = _split(url)
        host, shown = _host(parts)
        port = parts.port
        authority = shown if port is None else f"{shown}:{port}"
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key must consist of printable ASCII characters")
        return Target(
            name=name,
            scheme=parts.scheme,
            host=host,
            port=port or (443 if parts.scheme == "https" else 80),
            base_path=_base_path(parts.path),
            authority=authority.encode("ascii"),
            api_key=api_key or None,
            ca=ca,
        )


def _split(url: str) -> SplitResult:
    parts = urlsplit(url.strip())
    if parts.scheme not in {"http", "https"}:
        raise ValueError("url must begin with http:// or https://")
    if parts.username is not None or parts.password is not None:
        raise ValueError("url must not hold a user or password; use api_key")
    if parts.query or parts.fragment:
        raise ValueError("url must not have a query or fragment")
    try:
        port = parts.port
    except ValueError:
        raise ValueError("url has a port that is not a number in 1..65535") from None
    if port == 0:
        raise ValueError("url has a port that is not a number in 1..65535")
    return parts


def _host(parts: SplitResult) -> tuple[str, str]:
    """The host to connect to and the host to show (an IPv6 address in brackets, without its zone)."""
    host = parts.hostname or ""
    if ":" in host:
        return host.replace("%25", "%"), f"[{host.partition('%')[0]}]"
    try:
        host = host.encode("idna").decode("ascii")
    except UnicodeError:
        raise ValueError("url has a host name that is not valid") from None
    if not host or not host.isprintable() or any(c in " %\\" for c in host):
        raise ValueError("url has no valid host")
    return host, host


def _base_path(path: str) -> str:
    if not (path.isascii() and path.isprintable()) or " " in path:
        raise ValueError("url has a path with characters that must be percent-encoded")
    path = path.rstrip("/")
    while path.endswith("/v1"):
        path = path.removesuffix("/v1").rstrip("/")
    return path
