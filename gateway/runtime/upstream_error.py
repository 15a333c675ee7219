"""The one family of errors in which everything that can go wrong towards a backend is told.

Law of this file: only an error whose kind is in NEVER_RAN lets a caller try elsewhere. Those are the endings
before which the backend cannot have had the whole request on a living connection.
"""

from __future__ import annotations

from typing import Final, Literal

Kind = Literal[
    "refused",
    "connect_timeout",
    "unreachable",
    "exhausted",
    "tls",
    "stale",
    "closed",
    "protocol",
    "first_byte_timeout",
    "between_bytes_timeout",
    "broke",
]

NEVER_RAN: Final[frozenset[Kind]] = frozenset(
    {"refused", "connect_timeout", "unreachable", "exhausted", "tls", "stale"}
)

TIMEOUTS: Final[frozenset[Kind]] = frozenset({"first_byte_timeout", "between_bytes_timeout"})


class UpstreamError(Exception):
    """The exchange with a backend failed.

    `kind` says where; `detail` may name the host, so it is for logs and never for clients.
    `exhausted`: this machine could not even make a socket, which says nothing of the backend.
    `closed`: the connection ended before the response head; `broke`: after it, before the body's framed end.
    """

    def __init__(self, kind: Kind, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind: Kind = kind
        self.detail = detail

    @property
    def may_have_run(self) -> bool:
        """False only when the request provably never ran: not connected, or the idle connection was stale."""
        return self.kind not in NEVER_RAN

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind
