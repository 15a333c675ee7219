"""Gateways that are away, break or are full, behind the proxies of deploy/: who is asked, how often, and what clients get."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.raw_client import RawClient, RawResponse
from tests.fakes.running import in_loop
from tests.gateway.fronts import KINDS, Front, front, host_of
from tests.gateway.line_talk import CHAT

every_front = pytest.mark.parametrize("kind", KINDS)


@every_front
@in_loop
async def test_without_a_gateway_clients_get_an_error_that_they_can_read(
    kind: str, tmp_path: Path
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        async with (
            front(kind, nobody.getsockname()[1], tmp_path) as at,
            await RawClient.connect(at.port) as client,
        ):
            await client.request("POST", CHAT, headers=host_of(at), body=b"{}")
            answer = await client.response()
    assert answer.status == 502
    assert answer.json()["error"]["type"] == "server_error"
    if kind == "nginx":
        assert answer.header("x-should-retry") == "true", "nobody was reached, so nothing ran"


@dataclass(slots=True)
class Peer:
    """What stands where a gateway would, and counts the requests that it took."""

    answer: bytes
    taken: int = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            self.taken += 1
            writer.write(self.answer)
        writer.close()


@contextlib.asynccontextmanager
async def listening(peer: Peer) -> AsyncIterator[int]:
    """Its port."""
    async with await asyncio.start_server(peer.take, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def _post(at: Front) -> RawResponse:
    async with await RawClient.connect(at.port) as client:
        await client.request("POST", CHAT, headers=host_of(at), body=b"{}")
        return await client.response()


@in_loop
async def test_what_broke_after_it_was_sent_is_sent_to_no_other_gateway(tmp_path: Path) -> None:
    first, second = Peer(b""), Peer(b"")
    async with (
        listening(first) as one,
        listening(second) as other,
        front("nginx", one, tmp_path, [other]) as at,
    ):
        for number in range(1, 5):
            answer = await _post(at)
            assert (answer.status, answer.header("x-should-retry")) == (502, "false")
            assert first.taken + second.taken == number, "a generation was sent twice"


@in_loop
async def test_a_gateway_that_is_away_costs_nobody_a_request_while_another_is_there(
    tmp_path: Path,
) -> None:
    there = Peer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with (
            listening(there) as other,
            front("nginx", nobody.getsockname()[1], tmp_path, [other]) as at,
        ):
            assert [(await _post(at)).status for _ in range(4)] == [200] * 4
    assert there.taken == 4


@in_loop
async def test_a_503_of_one_gateway_is_an_answer_and_not_a_reason_to_ask_another(
    tmp_path: Path,
) -> None:
    full = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\n{}"
    peers = Peer(full), Peer(full)
    async with (
        listening(peers[0]) as one,
        listening(peers[1]) as other,
        front("nginx", one, tmp_path, [other]) as at,
    ):
        answer = await _post(at)
    assert (answer.status, answer.header("retry-after"), answer.body) == (503, "7", b"{}")
    assert sum(peer.taken for peer in peers) == 1
