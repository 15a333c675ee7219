"""The limits of one client connection."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """In bytes and seconds. A time of 0 means no limit."""

    header_kib: int = 64  # request line and headers
    header_count: int = 256
    headers_s: float = 15.0  # from the first byte of a request to the end of its headers
    body_silence_s: float = 30.0  # without a byte, while the app waits for the body
    keepalive_s: float = 75.0  # an idle connection, also one that never sent anything
    write_stall_s: float = 300.0  # a client that takes no byte of its answer
    drain_bytes: int = 8 << 20  # read and dropped after an early answer…
    drain_s: float = 5.0  # …for at most so long
    backlog_bytes: int = 65536  # kept of what follows a request that is being answered
    body_high_water: int = 262_144  # body bytes held before the app takes them
    origins: tuple[str, ...] = ()  # of web pages that may read what the edge refuses
