"""The ledger of leases, in Redis: one script, one round trip. What it decides is told in `core.lease`.

Law of this file: whatever Redis does, or fails to do, comes out as a `LedgerError` with a reason for people, within
`ASK_S`; a connection on which an answer is overdue is never used again, so no late answer is taken for another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.core.lease import ASK_S, CALM_S, LEASE_S, SHORT_CALM_S, Message, Reply, Standing

CONNECT_S: Final = 1.0
PREFIX: Final = "{slotgate}:"  # one hash tag: all keys are in one place of a Redis Cluster
KEYS_VERSION: Final = f"{PREFIX}keys:version"
_SCRIPT: Final = Path(__file__).with_suffix(".lua").read_text(encoding="utf-8")
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


class Ledger:
    """Owner of the connections to Redis."""

    def __init__(self, url: str) -> None:
        """Connects when it is first asked. Raises ValueError for a URL that is none."""
        self.redis: Redis = Redis.from_url(
            url,
            socket_timeout=ASK_S,
            socket_connect_timeout=CONNECT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._ask = self.redis.register_script(_SCRIPT)

    async def tell(self, message: Message, told: bytes) -> Heard:
        """Send a message; `told`: words for the others, empty where they have not changed. Raises LedgerError."""
        claims = {
            name: (one.hold, one.used, one.need, one.peak, one.ask, one.slots, int(one.spare))
            for name, one in message.claims.items()
        }
        async with self.translated():
            answer = await self._run(message, msgspec.json.encode(claims), told)
            if answer[0] != b"granted":
                raise LedgerError("an answer to an older message came first")
            return _heard(message.sender, answer)

    async def connect(self) -> None:
        """Be connected, so that a message sent next has all of its time for itself. Raises LedgerError."""
        async with self.translated():
            pool = self.redis.connection_pool
            await pool.release(await pool.get_connection())  # type: ignore[no-untyped-call]

    async def leave(self, message: Message) -> None:
        """Give everything back at once. Raises LedgerError."""
        async with self.translated():
            await self._run(message, b"", b"")

    async def aclose(self) -> None:
        async with self.translated():
            await self.redis.aclose()

    @asynccontextmanager
    async def translated(self) -> AsyncIterator[None]:
        """Whatever goes wrong inside becomes a LedgerError, in time."""
        try:
            async with asyncio.timeout(ASK_S):
                yield
        except (RedisError, OSError, TimeoutError, ValueError, LookupError, TypeError) as error:
            await self._hang_up()
            raise LedgerError(_why(error)) from error
        except asyncio.CancelledError:
            await self._hang_up()
            raise

    async def _run(self, message: Message, claims: bytes, told: bytes) -> list[Any]:
        fixed = (int(CALM_S * 1000), int(SHORT_CALM_S * 1000))
        lease_ms = int(LEASE_S * 1000)
        answer: list[Any] = await self._ask(
            keys=_LEDGER,
            args=[
                message.sender,
                message.number,
                message.epoch,
                lease_ms,
                claims,
                told,
                uuid4().hex,
                *fixed,
                *message.peers,
            ],
        )
        return answer

    async def _hang_up(self) -> None:
        with suppress(RedisError, OSError):  # it is gone already
            await self.redis.connection_pool.disconnect(inuse_connections=True)


def _heard(sender: str, answer: list[Any]) -> Heard:
    _, epoch, at_ms, granted, others, told, version = answer
    rows: _Rows = msgspec.json.decode(granted, type=dict[str, list[Any]])
    theirs = msgspec.json.decode(others, type=dict[str, dict[str, list[Any]]])
    reply = Reply(
        epoch.decode(),
        int(at_ms),
        {name: int(row[0]) for name, row in rows.items()},
        {who: {name: _standing(row) for name, row in on.items()} for who, on in theirs.items()},
    )
    words = dict(zip((one.decode() for one in told[::2]), told[1::2], strict=True))
    words.pop(sender, None)
    return Heard(reply, words, int(version))


def _standing(row: Sequence[Any]) -> Standing:
    held, used, need, peak, spare = (int(one) for one in row)
    return Standing(held, used, need, peak, bool(spare))


def _why(error: Exception) -> str:
    """A reason without the URL, which may hold a password."""
    if isinstance(error, TimeoutError):
        return f"no answer within {ASK_S:g} s"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    text = str(error).splitlines()[0][:200] if str(error) else ""
    return text if isinstance(error, RedisError) and text else type(error).__name__
