"""Whose request it is, by address, when a proxy of the operator's stands in between.

Law of this file: `X-Forwarded-For` is believed from trusted addresses only, and only as far as the chain of them
reaches: the client is the last address that no trusted proxy vouches for as one of them. Who is not trusted cannot
write anybody's address into the log but its own.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Final

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
MOST_HOPS: Final = 16  # looked at; more is nobody's chain of proxies


class TrustedProxies:
    """The networks of `trusted_proxies`."""

    __slots__ = ("_networks",)

    def __init__(self, networks: Sequence[str] = ()) -> None:
        """Each an address or network as a Config holds it."""
        self._networks: tuple[Network, ...] = tuple(map(ipaddress.ip_network, networks))

    def client(self, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The client's address: the peer's own, or what trusted proxies say of theirs."""
        if not self._networks or not self._trusts(peer):
            return peer
        named = b",".join(value for name, value in headers if name == b"x-forwarded-for")
        client = peer
        for hop in reversed(named.decode("latin-1").split(",")[-MOST_HOPS:]):
            address = _address(hop)
            if address is None:  # garbage: whoever wrote it is the last that is known
                return client
            client = address
            if not self._trusts(client):
                break
        return client

    def _trusts(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return any(parsed in network for network in self._networks)


def _address(hop: str) -> str | None:
    """An address as proxies write it, with a port or in brackets; in its usual form."""
    text = hop.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:  # IPv4 with a port
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None
