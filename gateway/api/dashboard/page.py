"""`GET /dashboard`: a static page that reads `/status` with the key that the person gives it.

Law of this file: the page asks nobody but this gateway, and the browser holds it to that (Content-Security-Policy). It
holds no data and needs no key itself; the key that it asks for stays in the tab.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from importlib.resources import files

from gateway.api.front import Local
from gateway.core.errors import Headers
from gateway.runtime.exchange import Exchange


class DashboardPage:
    """The page, read once at the start. It is told whether the gateway asks for keys, and nothing else."""

    def __init__(self, needs_key: Callable[[], bool]) -> None:
        self._needs_key = needs_key
        folder = files("gateway.api.dashboard")
        page, style, script = (
            folder.joinpath(name).read_text(encoding="utf-8")
            for name in ("page.html", "page.css", "page.js")
        )
        self._body = page.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script).encode()
        self._headers = _headers(style, script)

    def table(self) -> dict[str, Local]:
        """What `Front` looks paths up in."""
        return {"/dashboard": Local(self.page)}

    async def page(self, exchange: Exchange) -> None:
        body = self._body
        if self._needs_key():
            body = body.replace(b'data-needs-key="false"', b'data-needs-key="true"', 1)
        await exchange.respond(200, self._headers, body)


def _headers(style: str, script: str) -> Headers:
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    )
    return [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"content-security-policy", policy.encode()),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
    ]


def _digest(text: str) -> str:
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()
