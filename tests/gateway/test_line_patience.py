"""Long waits: only the documented limits end a request, and what ends by them says so. B049, B065."""

from __future__ import annotations

import pytest

from tests.fakes.behaviour import Behaviour
from tests.fakes.connection import Script
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.running import eventually, in_loop
from tests.fakes.scripts import HANG, events_of, hang, respond, stream
from tests.gateway.line_talk import CHAT


@pytest.mark.parametrize("silent", [True, False])
@in_loop
async def test_a_long_silence_before_the_first_byte_is_no_error_when_its_limits_are_off(
    silent: bool,
) -> None:
    """B049, with the clock scaled: every other limit is shorter than the silence."""
    timeouts = {"connect_s": 0.3, "first_byte_s": 0, "between_bytes_s": 0.3}
    async with (
        FakeEngine(behaviour=Behaviour(ttft_s=1.5)) as engine,
        running_gateway(engine, timeouts=timeouts, keepalive_s=1) as slotgate,
    ):
        answer = await slotgate.chat(stream=not silent)
        assert answer.status_code == 200
        assert await slotgate.outcomes() == {"served": 1}


@in_loop
async def test_silence_between_bytes_ends_a_stream_with_an_error_when_it_is_too_long() -> None:
    async with (
        FakeEngine() as engine,
        running_gateway(engine, timeouts={"between_bytes_s": 0.3}) as slotgate,
    ):
        from_engine = events_of(CHAT, 2)[:-1]
        engine.script(stream(from_engine, then=HANG))
        answer = await slotgate.chat(stream=True)
        assert answer.content.startswith(b"".join(from_engine))
        assert b'"error"' in answer.content
        assert b"[DONE]" not in answer.content
        assert (await slotgate.status())["backends"][0]["breaker"] == "closed"


LIES: dict[str, tuple[str, Script]] = {
    "hangs": ("/metrics", hang()),
    "fails": ("/metrics", respond(500, "oh")),
    "says NaN": (
        "/metrics",
        respond(200, "vllm:num_requests_running NaN\n", content_type="text/plain"),
    ),
    "says too much": (
        "/metrics",
        respond(200, "vllm:num_requests_running 1e300\nvllm:num_requests_waiting 1e300\n"),
    ),
    "says that it is full": (
        "/metrics",
        respond(200, "vllm:num_requests_running 999\nvllm:kv_cache_usage_perc 1.0\n"),
    ),
}


@pytest.mark.parametrize("lie", LIES)
@in_loop
async def test_missing_or_absurd_figures_of_an_engine_never_refuse_a_request(lie: str) -> None:
    """Our own count is truth: with a free slot, a request starts whatever the engine says of itself."""
    path, script = LIES[lie]

    async with FakeEngine("vllm", slots=2) as engine, running_gateway(engine) as slotgate:
        assert (await slotgate.chat()).status_code == 200
        engine.always(script, path=path)
        before = engine.calls[path]
        await eventually(lambda: engine.calls[path] > before, why="it was not polled")
        for _ in range(8):
            assert (await slotgate.chat()).status_code == 200
        assert await slotgate.outcomes() == {"served": 9}
        assert await slotgate.metric("backend_up") == 1
