"""The ledger of leases, in Redis: one script, one round trip. What it decides is told in `core.lease`.

Law of this file: whatever Redis does, or fails to do, comes out as a `LedgerError` with a reason for people, within
`PATIENCE_S`; on one line answers come in the order of messages, and none is ever taken for another's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec
from redis.asyncio import Connection, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.core.lease import CALM_S, LEASE_S, SEEN_S, SHORT_CALM_S, Message, Reply, Standing

PATIENCE_S: Final = 12.0  # for a connection, and for an answer, before the line is given up
PREFIX: Final = "{slotgate}:"  # one hash tag: all keys are in one place of a Redis Cluster
KEYS_VERSION: Final = f"{PREFIX}keys:version"
_SCRIPT: Final = Path(__file__).with_suffix(".lua").read_text(encoding="utf-8")
_SHA: Final = sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
_LEDGER: Final = [
    f"{PREFIX}members",
    f"{PREFIX}told",
    f"{PREFIX}epoch",
    KEYS_VERSION,
    f"{PREFIX}awaited",
]

_Rows = Mapping[str, Sequence[Any]]


class LedgerError(Exception):
    """Redis could not be asked, or refused; the text says why."""


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer of the ledger, and what the other gateways tell."""

    reply: Reply
    told: Mapping[str, bytes]  # gateway: its own words
    keys_version: int


@dataclass(slots=True, eq=False)
class Line:
    """A connection on which messages leave without waiting for the answers to those before. Owned by `Ledger.line`."""

    connection: Connection
    unanswered: deque[Message] = field(default_factory=deque)
    sent_at: float = -1e9  # when the last message left, by its sender's clock
    knows_script: bool = False

    async def send(self, message: Message, told: bytes) -> None:
        """`told`: words for the others, empty where they have not changed. Raises LedgerError."""
        if not self.connection.is_connected:
            raise LedgerError("the connection is lost")
        self.unanswered.append(message)
        self.sent_at = message.sent_at
        how = ("EVALSHA", _SHA) if self.knows_script else ("EVAL", _SCRIPT)
        self.knows_script = True
        words = _words(message, _claims(message), told)
        async with translated():
            await self.connection.send_command(*how, len(_LEDGER), *_LEDGER, *words)

    async def answer(self) -> tuple[Message, Heard]:
        """The next one, and the message that it is to. Raises LedgerError."""
        async with translated():
            answer = await self.connection.read_response()
            message = self.unanswered.popleft()
            if answer[0] != b"granted":
                raise LedgerError("an answer to an older message came first")
            return message, _heard(message.sender, answer)


class Ledger:
    """Owner of the connections to Redis."""

    def __init__(self, url: str) -> None:
        """Connects when it is first asked. Raises ValueError for a URL that is none."""
        self.redis: Redis = Redis.from_url(
            url,
            socket_timeout=None,
            socket_connect_timeout=PATIENCE_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._ask = self.redis.register_script(_SCRIPT)

    @asynccontextmanager
    async def line(self) -> AsyncIterator[Line]:
        """A connection for messages, closed at the end. Raises LedgerError."""
        pool = self.redis.connection_pool
        async with translated():
            connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            yield Line(connection)
        finally:
            with suppress(RedisError, OSError):  # it is gone already
                await connection.disconnect(nowait=True)
            await pool.release(connection)

    async def leave(self, message: Message) -> None:
        """Give everything back at once. Raises LedgerError."""
        async with translated():
            await self._ask(keys=_LEDGER, args=_words(message, b"", b""))

    async def aclose(self) -> None:
        async with translated():
            await self.redis.aclose()


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Whatever goes wrong with a command inside becomes a LedgerError, in time."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield
    except (RedisError, OSError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise LedgerError(_why(error)) from error


def _claims(message: Message) -> bytes:
    claims = {
        name: (one.hold, one.used, one.need, one.peak, one.ask, one.slots, int(one.spare))
        for name, one in message.claims.items()
    }
    return msgspec.json.encode(claims)


def _words(message: Message, claims: bytes, told: bytes) -> list[Any]:
    """The arguments of the script."""
    fixed = (int(CALM_S * 1000), int(SHORT_CALM_S * 1000), int(SEEN_S * 1000))
    lease_ms = int(LEASE_S * 1000)
    said = (message.sender, message.number, message.epoch, lease_ms, claims, told)
    return [*said, uuid4().hex, *fixed, *message.peers]


def _heard(sender: str, answer: list[Any]) -> Heard:
    _, epoch, at_ms, granted, others, told, version = answer
    rows: _Rows = msgspec.json.decode(granted, type=dict[str, list[Any]])
    theirs = msgspec.json.decode(others, type=dict[str, dict[str, list[Any]]])
    reply = Reply(
        epoch.decode(),
        int(at_ms),
        {name: int(row[-1]) for name, row in rows.items()},
        {who: {name: _standing(row) for name, row in on.items()} for who, on in theirs.items()},
    )
    words = dict(zip((one.decode() for one in told[::2]), told[1::2], strict=True))
    words.pop(sender, None)
    return Heard(reply, words, int(version))


def _standing(row: Sequence[Any]) -> Standing:
    held, used, need, peak, spare, *_ = (int(one) for one in row)
    return Standing(held, used, need, peak, bool(spare))


def _why(error: Exception) -> str:
    """A reason without the URL, which may hold a password."""
    if isinstance(error, TimeoutError):
        return f"no answer within {PATIENCE_S:g} s"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    text = str(error).splitlines()[0][:200] if str(error) else ""
    return text if isinstance(error, RedisError) and text else type(error).__name__
