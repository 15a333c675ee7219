"""The tap on an answer that is one JSON document: keeps what its figures can be read from.

Law of this file: the answer passes at once and unchanged; at most WHOLE bytes plus one read are kept of it.
"""

from __future__ import annotations

from gateway.core.figures import END, WHOLE, Figures, figures_of_ends, figures_of_json
from gateway.core.wire import Wire


class BodyTap:
    """Watches one whole answer. One owner: the relay of that answer."""

    __slots__ = ("_head", "_kept", "_wire")

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._kept = bytearray()
        self._head = b""  # its beginning, once the answer is too long to keep

    def feed(self, data: bytes) -> None:
        """Look at one read."""
        self._kept += data
        if len(self._kept) > WHOLE:
            self._head = self._head or bytes(self._kept[:END])
            del self._kept[:-END]

    @property
    def figures(self) -> Figures:
        """What the answer said, once it is over. Never raises."""
        kept = bytes(self._kept)
        if self._head:
            return figures_of_ends(self._head, kept[-END:], self._wire)
        return figures_of_json(kept, self._wire)
