"""Keys in Redis as `slotgate keys` makes, lists and revokes them. What gateways do with them: `runtime.cluster_keys`.

Law of this file: each change is one step in Redis, so two operators at once never lose each other's work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from gateway.core.keys import Key
from gateway.core.settings.nodes import Notes, Scalar, child
from gateway.runtime import keystore
from gateway.runtime.cluster_keys import ALL, KEYS, keys_of, record_of
from gateway.runtime.yamlfile import compose

_PATIENCE_S: Final = 5.0
# KEYS as `cluster_keys.ALL`; ARGV: name, record. 0: the name is taken.
_ADD: Final = """
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
return redis.call('INCR', KEYS[3])
"""
# ARGV: name, then the hashes of keys to refuse from now on, wherever a copy of them is.
_REVOKE: Final = """
local changed = redis.call('HDEL', KEYS[1], ARGV[1])
for i = 2, #ARGV do changed = changed + redis.call('HSET', KEYS[2], ARGV[i], ARGV[1]) end
redis.call('INCR', KEYS[3])
return changed
"""


class RedisKeysError(Exception):
    """Redis could not be asked, or refused; the text is for people and holds no password."""


class RedisKeyStore:
    """The keys of a fleet. Of the keys file of this machine it knows too, so that a revoked key is gone there."""

    def __init__(self, url: str, file: Path) -> None:
        """Connects when it is first used. Raises RedisKeysError for a URL that is none."""
        self.file = file
        with _translated():
            self._redis: Redis = Redis.from_url(
                url,
                socket_timeout=_PATIENCE_S,
                socket_connect_timeout=_PATIENCE_S,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )

    def read(self) -> tuple[Key, ...]:
        """The keys in Redis, then those of the file that are not there. Raises RedisKeysError, ConfigErrors."""
        with _translated():
            shared = keys_of(_bytes(self._redis.hgetall(KEYS)))
        names = {key.name for key in shared}
        return (*shared, *(key for key in keystore.read_keys(self.file) if key.name not in names))

    def add(self, key: Key) -> None:
        """Raises NameTakenError, RedisKeysError, ConfigErrors."""
        if any(other.name == key.name for other in keystore.read_keys(self.file)):
            raise keystore.NameTakenError(key.name)
        with _translated():
            added = self._redis.register_script(_ADD)(keys=ALL, args=[key.name, record_of(key)])
        if not added:
            raise keystore.NameTakenError(key.name)

    def revoke(self, name: str) -> None:
        """In Redis, and in the file of this machine. Raises UnknownNameError, RedisKeysError, ConfigErrors, OSError."""
        known = [key for key in self._all(name) if key.name == name]
        if not known:
            raise keystore.UnknownNameError(name)
        with _translated():
            words = [name, *(key.hash.hex() for key in known)]
            self._redis.register_script(_REVOKE)(keys=ALL, args=words)
        if any(key.name == name for key in keystore.read_keys(self.file)):
            keystore.revoke(self.file, name)

    def close(self) -> None:
        self._redis.close()

    def _all(self, name: str) -> Sequence[Key]:
        with _translated():
            raw = _bytes(self._redis.hgetall(KEYS))
        found = [key for key in keys_of(raw) if key.name == name]
        return [*found, *keystore.read_keys(self.file)]


def redis_of(path: Path, environ: Mapping[str, str] | None = None) -> str | None:
    """The Redis that a config names; nothing else in it matters. Raises ConfigErrors if it is no YAML mapping."""
    notes = Notes(str(path))
    root = compose(path, notes, os.environ if environ is None else environ)
    url = child(child(root, "redis"), "url")
    if isinstance(url, Scalar) and url.text.strip():
        return url.text.strip()
    relevant = [one for one in notes.mistakes if one.path == "redis.url"]
    if relevant:
        notes.mistakes[:] = relevant
        notes.raise_mistakes()
    return None


def _bytes(found: Any) -> dict[bytes, bytes]:
    """What redis-py answers, whose types allow for its asyncio twin."""
    return dict(found)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # of the URL, which may hold a password
        raise RedisKeysError("redis.url is not the URL of a Redis") from error
    except (RedisError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        text = (cause.strerror if isinstance(cause, OSError) else "") or type(error).__name__
        detail = (
            ""
            if cause is not None
            else f": {str(error).splitlines()[0][:200]}"
            if str(error)
            else ""
        )
        raise RedisKeysError(f"{text}{detail}") from error
