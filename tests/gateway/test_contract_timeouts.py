"""An engine that is too slow is told from one that broke off, whatever it had sent of its head by then."""

from __future__ import annotations

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.running import in_loop
from tests.fakes.scripts import hang
from tests.gateway.line_talk import CHAT, body_for


@pytest.mark.parametrize("early_headers_s", [0.1, 0])
@pytest.mark.parametrize("headers", [True, False], ids=["after its head", "before its head"])
@in_loop
async def test_a_stream_without_a_first_byte_in_time_is_a_timeout(
    headers: bool, early_headers_s: float
) -> None:
    async with (
        FakeEngine("openai", slots=1, models=["m"]) as engine,
        running_gateway(
            {"url": engine.url, "slots": 1, "models": ["m"]},
            timeouts={"first_byte_s": 0.3, "early_headers_s": early_headers_s},
        ) as slotgate,
    ):
        slotgate.models |= {"m"}
        engine.script(hang(headers=headers), path=CHAT)
        answer = await slotgate.client.post(CHAT, json=body_for(CHAT, stream=True))
        assert answer.status_code == (200 if headers or early_headers_s else 504)
        assert b'"upstream_timeout"' in answer.content
        assert b"[DONE]" not in answer.content
        assert await slotgate.outcomes() == {"upstream_timeout": 1}
