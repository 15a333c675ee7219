"""API keys: what a key may do, which credentials a request presents, and whose they are.

Laws of this file: a key is kept as the SHA-256 of its secret only, and a refusal never says more about a
secret than its holder knows.

A fast hash is right here because secrets are random with at least 160 bits: there is nothing to guess, so
there is nothing to slow down (a password would need a slow hash). Hashing first is also what makes the
lookup constant-time where it matters: what is compared afterwards is a digest, which whoever tries secrets
cannot steer byte by byte, so the time of a dict lookup tells nothing about how close a secret was. No
secret is kept for longer than the head of its connection, and nothing but digests is handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from hashlib import sha256
from hmac import compare_digest

from gateway.core.errors import GatewayError

_CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"api-key"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One line of the keys file. None means no limit (`models`: every model).

    `hash` is the SHA-256 digest of the secret, `rpm` and `tpm` are requests and tokens a minute,
    `weight` is its share against other keys, `expires` is the first instant (UTC) at which it is invalid.
    """

    name: str
    hash: bytes
    models: frozenset[str] | None = None
    max_in_flight: int | None = None
    rpm: int | None = None
    tpm: int | None = None
    priority: str = "interactive"
    weight: float = 1
    expires: datetime | None = None
    admin: bool = False

    def is_valid(self, now: datetime) -> bool:
        return self.expires is None or now < self.expires


class Refusal(Enum):
    """Why credentials are not accepted; the value is the sentence for the person who sent them."""

    ABSENT = "No API key: send it as `Authorization: Bearer KEY`, `x-api-key` or `api-key`."
    UNKNOWN = "Incorrect API key: it is not one of this gateway's keys, or it was revoked."
    EXPIRED = "This API key has expired; ask the operator of this gateway for a new one."
    AMBIGUOUS = "Two different valid API keys were sent; send one."

    @property
    def error(self) -> GatewayError:
        """The refusal as the answer to the client: always the same 401."""
        return GatewayError("invalid_api_key", self.value)


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys of a gateway at one moment. Without a key every request is refused."""

    keys: tuple[Key, ...] = ()
    _by_hash: Mapping[bytes, Key] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_hash", {key.hash: key for key in self.keys})

    def find(self, digests: Sequence[bytes], clock: Callable[[], datetime]) -> Key | Refusal:
        """The one valid key among those presented, by their digests. `clock` gives an aware time, where a key has an end.

        1. Nothing presented: absent.
        2. One valid key, however often and whatever dummies are beside it: that key.
        3. Two different valid keys: refused, for nobody can say who pays.
        4. None valid: expired if one of them once was, else unknown.
        """
        if not digests:
            return Refusal.ABSENT
        if len(digests) == 1:  # nearly always
            key = self._known(digests[0])
            if key is None:
                return Refusal.UNKNOWN
            return key if key.expires is None or key.is_valid(clock()) else Refusal.EXPIRED
        now = clock()
        known = [key for digest in digests if (key := self._known(digest)) is not None]
        valid = {key.name: key for key in known if key.is_valid(now)}
        if len(valid) == 1:
            return next(iter(valid.values()))
        if valid:
            return Refusal.AMBIGUOUS
        return Refusal.EXPIRED if known else Refusal.UNKNOWN

    def _known(self, digest: bytes) -> Key | None:
        key = self._by_hash.get(digest)
        return key if key is not None and compare_digest(key.hash, digest) else None


def hash_of(secret: str) -> bytes:
    """The digest under which a secret is kept."""
    return sha256(secret.encode("utf-8", "surrogatepass")).digest()


def digests_in(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, ...]:
    """The digests of the secrets that `presented` finds in these headers."""
    return tuple(map(hash_of, presented(headers)))


def presented(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, ...]:
    """The secrets of a request, without repetition, in order. Header names are lower case, as in ASGI.

    An empty credential counts as absent (tools send `Bearer ` when none is set), and so does an `Authorization` of
    another scheme.
    """
    found: list[str] = []
    for name, value in headers:
        if name in _CREDENTIALS:
            secret = _bearer(value) if name == b"authorization" else value.strip().decode("latin-1")
            if secret and secret not in found:
                found.append(secret)
    return tuple(found)


def end_of_day(day: date) -> datetime:
    """The first instant after a day, UTC: a key that expires on a date is valid until that day is over.

    Raises OverflowError for the last day that there is.
    """
    return datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)


def _bearer(value: bytes) -> str:
    scheme, _, secret = value.strip().partition(b" ")
    return secret.strip().decode("latin-1") if scheme.lower() == b"bearer" else ""
