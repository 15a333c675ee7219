"""Who the log says it was: believed of a trusted proxy, and never told to an engine."""

from __future__ import annotations

import json

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.running import in_loop


@pytest.mark.parametrize(
    ("trusted", "client"), [(["127.0.0.0/8"], "203.0.113.7"), ([], "127.0.0.1")]
)
@in_loop
async def test_the_client_in_the_log_is_who_a_trusted_proxy_names(
    trusted: list[str], client: str
) -> None:
    told = {"X-Forwarded-For": "198.51.100.9, 203.0.113.7", "Forwarded": "for=198.51.100.9"}
    async with (
        FakeEngine() as engine,
        running_gateway(engine, trusted_proxies=trusted) as slotgate,
    ):
        slotgate.client.headers.update(told | {"X-Real-IP": "198.51.100.9"})
        assert (await slotgate.chat()).status_code == 200
        named = {name for request in engine.requests for name in request.headers}
        assert not named & {"x-forwarded-for", "forwarded", "x-real-ip"}
    lines = [json.loads(x) for x in slotgate.log.getvalue().splitlines() if x.startswith("{")]
    [line] = [line for line in lines if line.get("outcome")]
    assert line["client"] == client
