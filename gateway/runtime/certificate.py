"""The certificate that clients of the gateway see, and its renewal.

Law of this file: a handshake sees one certificate with its own key, the old pair or the new one, never a mixture;
connections that stand are not touched.
"""

from __future__ import annotations

import ssl

from gateway.core.config import Tls


def context_of(tls: Tls) -> ssl.SSLContext:
    """For new connections. Reads both files; raises OSError (`ssl.SSLError` too)."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(tls.cert, tls.key)
    return context


class Certificate:
    """Owner of the context that a listener was given, and of the one that counts now."""

    def __init__(self, tls: Tls) -> None:
        """Raises OSError when the files cannot be used."""
        self.listening = self._current = context_of(tls)

    def renew(self, context: ssl.SSLContext) -> None:
        """From the next handshake on."""
        self._current = context
        self.listening.sni_callback = self._on_hello  # called for clients that name no host, too

    def _on_hello(
        self, handshake: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _: ssl.SSLContext
    ) -> None:
        handshake.context = self._current
