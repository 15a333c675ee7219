"""What the service manager is told: ready, reloading, stopping. systemd's protocol (sd_notify(3)), where it is spoken.

Law of this file: without `NOTIFY_SOCKET`, or with one that does not listen, nothing happens and nothing waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

_PARTING_S: Final = 15.0  # after the drain: last words, and the end of the process


class ServiceManager:
    """Datagrams to the address that systemd gave this process. Knows nothing but that address."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Only a path or an abstract name is a datagram socket that can be told; anything else is as none."""
        address = (os.environ if environ is None else environ).get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        if not self._address.startswith(("/", "\0")):
            self._address = ""

    def ready(self, status: str) -> None:
        """Serving, for the first time or again after `reloading`. `status`: one line for `systemctl status`."""
        self._tell("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """The configuration is being read; `ready` follows. The time is what Type=notify-reload asks for."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str, drain_s: float) -> None:
        """It drains. Asked for more patience than the unit may have: who is killed cannot say goodbye."""
        patience_us = int((drain_s + _PARTING_S) * 1e6)
        self._tell("STOPPING=1", f"EXTEND_TIMEOUT_USEC={patience_us}", f"STATUS={status}")

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        message = "\n".join(line.replace("\n", " ") for line in lines)
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.setblocking(False)
            sock.sendto(message.encode(), self._address)
