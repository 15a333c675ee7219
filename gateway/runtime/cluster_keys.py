"""Keys in Redis: made and revoked by `slotgate keys`, followed by every gateway.

Laws of this file: a key that was revoked stays so, in whatever file or memory a copy of it still is; and a Redis that
lost its memory gets back what gateways know, so that nobody is locked out by it.

    {slotgate}:keys           hash: name -> record, as in a keys file, as JSON
    {slotgate}:keys:revoked   hash: hash of a revoked key -> its name
    {slotgate}:keys:version   grows with each change
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from gateway.core.keys import Key, KeyRing
from gateway.core.settings import keyfile
from gateway.core.settings.nodes import ConfigErrors, Entries, Items, Node, Notes, Scalar
from gateway.runtime.cluster_ledger import KEYS_VERSION, PREFIX, Heard, Ledger, translated

KEYS: Final = f"{PREFIX}keys"
REVOKED: Final = f"{PREFIX}keys:revoked"
ALL: Final = [KEYS, REVOKED, KEYS_VERSION]
# ARGV: the version that is known, then how many keys, then name, record and hash of each, then hash and name of each
# revoked one. What is there wins; what was revoked there is not brought back.
_RESTORE: Final = """
local known, count, changed = tonumber(ARGV[1]), tonumber(ARGV[2]), 0
for i = 3 + 3 * count, #ARGV, 2 do changed = changed + redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[i + 1]) end
for i = 3, 2 + 3 * count, 3 do
  if redis.call('HEXISTS', KEYS[2], ARGV[i + 2]) == 0 then
    changed = changed + redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
local version = tonumber(redis.call('GET', KEYS[3]) or '0')
if changed > 0 or version < known then
  version = math.max(version, known) + 1
  redis.call('SET', KEYS[3], version)
end
return version
"""


class SharedKeys:
    """Owner of what this gateway knows of the keys in Redis; kept while Redis is away."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._restore = ledger.redis.register_script(_RESTORE)
        self._epoch = ""
        self._version = 0
        self._keys: tuple[Key, ...] = ()
        self._revoked: dict[str, str] = {}
        self._merged: tuple[KeyRing | None, KeyRing] | None = None  # the file's ring, and with ours

    @property
    def some(self) -> bool:
        """Are there keys in Redis, or were there?"""
        return bool(self._keys or self._revoked)

    def ring(self, own: KeyRing) -> KeyRing:
        """The keys in force: those of the file and those in Redis, without the revoked ones."""
        if self._merged is None or self._merged[0] is not own:
            self._merged = own, _merged(own.keys, self._keys, self._revoked)
        return self._merged[1]

    def is_behind(self, heard: Heard) -> bool:
        """Has anything changed since it was last taken up?"""
        return (heard.reply.epoch, heard.keys_version) != (self._epoch, self._version)

    async def follow(self, heard: Heard) -> None:
        """Take up what has changed. Raises LedgerError."""
        epoch, version = heard.reply.epoch, heard.keys_version
        is_other, before = epoch != self._epoch, self._version
        async with translated():
            if before and (version < before or (is_other and version == before)):
                version = await self._bring_back()
            if version != before:
                await self._fetch()
        self._epoch, self._version = epoch, version

    async def _fetch(self) -> None:
        redis = self._ledger.redis
        async with redis.pipeline(transaction=True) as both:
            both.hgetall(KEYS)
            both.hgetall(REVOKED)
            records, revoked = await both.execute()
        self._keys = keys_of(records)
        self._revoked = {one.decode(): name.decode() for one, name in revoked.items()}
        self._merged = None

    async def _bring_back(self) -> int:
        words: list[Any] = [self._version, len(self._keys)]
        for key in self._keys:
            words += [key.name, record_of(key), key.hash.hex()]
        for digest, name in self._revoked.items():
            words += [digest, name]
        return int(await self._restore(keys=ALL, args=words))


def record_of(key: Key) -> bytes:
    return msgspec.json.encode(keyfile.as_record(key))


def keys_of(records: Mapping[bytes, bytes]) -> tuple[Key, ...]:
    """The keys that these records hold; one that cannot be read opens nothing, and hides no other."""
    found: list[Key] = []
    for _, raw in sorted(records.items()):
        try:
            document = msgspec.json.decode(raw)
            notes = Notes("Redis")
            found += keyfile.read(Items(0, (_node(document),)), notes)
            notes.raise_mistakes()
        except (msgspec.DecodeError, ConfigErrors):
            continue
    return tuple(found)


def _merged(file: Iterable[Key], shared: Iterable[Key], revoked: Mapping[str, str]) -> KeyRing:
    keys = [key for key in file if key.hash.hex() not in revoked]
    names, hashes = {key.name for key in keys}, {key.hash for key in keys}
    keys += [
        key
        for key in shared
        if key.name not in names and key.hash not in hashes and key.hash.hex() not in revoked
    ]
    return KeyRing(tuple(keys))


def _node(value: object) -> Node:
    """A JSON value as a node of a keys file."""
    if isinstance(value, dict):
        return Entries(0, tuple((Scalar(0, k, k), _node(v)) for k, v in value.items()))
    if isinstance(value, list):
        return Items(0, tuple(_node(one) for one in value))
    return Scalar(0, "" if value is None else str(value), value)
