"""What the edge refuses by itself is refused as anything else is: in its family's form, under the client's own id."""

from __future__ import annotations

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import RawClient, RawResponse
from tests.fakes.running import in_loop

CHUNKED = b"Transfer-Encoding: chunked\r\n\r\nno size\r\n"
LARGE = b"X-Fill: " + b"a" * 70_000 + b"\r\n\r\n"


async def _ask(slotgate: Running, path: str, rest: bytes) -> RawResponse:
    async with await RawClient.connect(slotgate.port) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: mine\r\n".encode()
        await client.send(head + rest)
        return await client.response()


@pytest.mark.parametrize(("rest", "status"), [(CHUNKED, 400), (LARGE, 431)])
@in_loop
async def test_a_request_that_cannot_be_read_is_refused_under_its_own_id(
    rest: bytes, status: int
) -> None:
    async with FakeEngine() as engine, running_gateway(engine, check=False) as slotgate:
        answer = await _ask(slotgate, "/v1/messages", rest)
        assert answer.status == status
        assert answer.header("x-request-id") == "mine"
        assert answer.header("request-id") == answer.json()["request_id"] == "mine"


@pytest.mark.parametrize("path", ["/k/sk-sg-x/v1/messages", "http://127.0.0.1/v1/messages"])
@in_loop
async def test_the_family_is_that_of_the_path_behind_a_key_or_a_host(path: str) -> None:
    async with (
        FakeEngine() as engine,
        running_gateway(
            engine, keys=["alice"], auth={"key_in_path": True}, check=False
        ) as slotgate,
    ):
        answer = await _ask(slotgate, path, LARGE)
        assert answer.status == 431
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["type"] == "error"
