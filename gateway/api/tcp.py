"""What the edge asks of a TCP socket beyond bytes.

Law of this file: a client that vanished without FIN or RST is noticed within 60 s, and one that merely does
not read is not taken for it. That is why TCP_USER_TIMEOUT is not used: Linux also kills a peer with it that
answers every probe but keeps its window shut (tcp_probe_timer), which is what a paused agent looks like.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from typing import Final

_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))  # seconds
_ACKED_AT: Final = 120  # tcpi_bytes_acked in Linux's struct tcp_info, since 4.1


def set_options(transport: asyncio.BaseTransport) -> None:
    """Keep-alive probes (a silent peer is dead after 35 s) and no Nagle delay."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):  # the peer may have left already; the read will tell
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEP_ALIVE:
            if hasattr(socket, name):  # Linux has all of them, others some
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def reset_on_close(transport: asyncio.BaseTransport) -> None:
    """Make the coming close an RST: unsent bytes are dropped and the peer sees a broken connection."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def is_unanswered(transport: asyncio.BaseTransport) -> bool:
    """Whether the peer's TCP owes us an answer to at least two retransmissions or probes in a row.

    Keep-alive is silent while data is in flight, so this is how a vanished peer shows in mid-stream.
    Always False where TCP_INFO is not that of Linux (tcp(7): bytes 2 and 3 are retransmits and probes).
    """
    sock = transport.get_extra_info("socket")
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
    except OSError:  # not TCP, or closed meanwhile
        return False
    return bool(info[2] >= 2 or info[3] >= 2)


def bytes_taken(transport: asyncio.BaseTransport) -> int:
    """How many bytes the peer's TCP has acknowledged so far; 0 where that cannot be known.

    The transport's own buffer is no measure: it moves in steps of a third of the kernel's, megabytes apart.
    """
    sock = transport.get_extra_info("socket")
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return 0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + 8)
    except OSError:
        return 0
    return int.from_bytes(info[_ACKED_AT : _ACKED_AT + 8], sys.byteorder)
