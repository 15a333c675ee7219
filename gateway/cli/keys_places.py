"""Where `slotgate keys` keeps keys, and how it speaks of the place."""

from __future__ import annotations

from pathlib import Path

from gateway.core.keys import Key
from gateway.runtime import keystore
from gateway.runtime.cluster_keystore import RedisKeyStore


class KeysFile:
    """The keys file of one gateway."""

    next_look = "a running gateway refuses it at its next look at the file"

    def __init__(self, path: Path) -> None:
        self._path = path
        self.place = str(path)
        self.has_been_used = path.exists()

    def read(self) -> tuple[Key, ...]:
        return keystore.read_keys(self._path)

    def add(self, key: Key) -> None:
        keystore.add(self._path, key)

    def revoke(self, name: str) -> None:
        keystore.revoke(self._path, name)


class FleetKeys(RedisKeyStore):
    """The Redis of several gateways."""

    place = "Redis"
    next_look = "every gateway refuses it within a second"

    @property
    def has_been_used(self) -> bool:
        return bool(self.read())
