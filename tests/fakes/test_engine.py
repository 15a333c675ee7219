"""The scripted engine keeps its promises: tests that stand on it may believe its counts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx2
import pytest

from tests.fakes.connection import Connection
from tests.fakes.engine import FakeEngine
from tests.fakes.running import eventually, in_loop, run
from tests.fakes.scripts import FIN, RST, chat_stream, drop, endless, events_of, hang, raw, respond

CHAT = "/v1/chat/completions"
KINDS = ["llama-server", "llama-router", "vllm", "ollama", "sglang", "openai"]


def client(engine: FakeEngine) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=engine.url, trust_env=False, timeout=30)


def hello(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hello " * 40}], **more}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [True, False])
def test_every_kind_answers_a_chat_without_a_script(kind: str, stream: bool) -> None:
    @in_loop
    async def check() -> None:
        async with FakeEngine(kind) as engine, client(engine) as http:
            answer = await http.post(CHAT, json=hello(stream=stream, max_tokens=3))
            assert answer.status_code == 200
            assert "word2" in answer.text
            assert "word3" not in answer.text
            assert answer.text.endswith("data: [DONE]\n\n") == stream
            assert bytes(engine.requests[0].sent) == answer.content
            assert (await http.get("/v1/models")).json()["data"][0]["id"] == "m"
            assert engine.executions == 1
            assert engine.inside == 0

    check()


@in_loop
async def test_a_client_that_leaves_is_seen_at_once_and_frees_its_slot() -> None:
    async with FakeEngine(slots=1) as engine:
        for script in (hang(), hang(headers=True), hang(comments_every_s=0.01)):
            engine.script(script)
            async with client(engine) as http:
                call = asyncio.create_task(http.post(CHAT, json=hello()))
                await engine.until(lambda: engine.running == 1)
                call.cancel()
                left_at = time.monotonic()
            await engine.until(lambda: engine.inside == 0)
            gone_at = engine.requests[-1].gone_at
            assert gone_at is not None
            assert abs(gone_at - left_at) < 0.5
            assert not engine.requests[-1].answered


@in_loop
async def test_a_slot_stays_busy_after_a_cancel_for_as_long_as_told() -> None:
    async with FakeEngine(slots=1) as engine, client(engine) as http:
        engine.behaviour.cancel_lag_s = 0.2
        engine.script(hang())
        call = asyncio.create_task(http.post(CHAT, json=hello()))
        await engine.until(lambda: engine.running == 1)
        call.cancel()
        await engine.until(lambda: engine.requests[0].gone_at is not None)
        assert (await http.get("/slots")).json()[0]["is_processing"] is True
        assert engine.inside == 1
        await engine.until(lambda: engine.inside == 0)
        assert (await http.get("/slots")).json()[0]["is_processing"] is False


@in_loop
async def test_requests_beyond_the_slots_wait_inside_and_are_counted() -> None:
    async with FakeEngine(slots=2) as engine, client(engine) as http:
        engine.behaviour.ttft_s = 0.05
        calls = [asyncio.create_task(http.post(CHAT, json=hello())) for _ in range(5)]
        await engine.until(lambda: engine.waiting == 3)
        assert engine.running == 2
        await asyncio.gather(*calls)
        assert engine.peak == 5
        assert engine.executions == 5


@in_loop
async def test_choices_and_lists_of_prompts_take_that_many_slots() -> None:
    async with FakeEngine(slots=4) as engine, client(engine) as http:
        engine.behaviour.ttft_s = 0.02
        await http.post(CHAT, json=hello(n=3))
        assert engine.peak_permits == 3
        await http.post("/v1/completions", json={"prompt": ["a", "b", "c", "d"]})
        assert engine.peak_permits == 4
        assert (await http.post(CHAT, json=hello(n=5))).status_code == 400


@in_loop
async def test_a_running_sequence_serves_nobody_else_in_llama_server_but_does_in_vllm() -> None:
    for kind, cached in (("llama-server", False), ("vllm", True)):
        async with FakeEngine(kind, slots=2) as engine, client(engine) as http:
            engine.script(hang())
            call = asyncio.create_task(http.post(CHAT, json=hello()))
            await engine.until(lambda engine=engine: engine.running == 1)
            usage = (await http.post(CHAT, json=hello())).json()["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == cached
            call.cancel()


@in_loop
async def test_the_next_turn_of_a_conversation_finds_its_prefix_cached() -> None:
    async with FakeEngine(slots=2) as engine, client(engine) as http:
        messages = [{"role": "user", "content": "long " * 100}]
        await http.post(CHAT, json={"messages": messages})
        messages += [{"role": "user", "content": "more"}]
        usage = (await http.post(CHAT, json={"messages": messages})).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 100


@in_loop
async def test_a_script_may_do_anything_to_the_socket() -> None:
    async with FakeEngine() as engine, client(engine) as http:
        engine.script(
            raw(b"HTTP/1.1 200 OK\r\nContent-Le", 0.01, b"ngth: 2\r\n\r\nok"),
            respond(503, {"busy": True}, [("Retry-After", "2")], framing="close", version="1.0"),
            drop(RST),
            chat_stream(2, whole=False, then=FIN),
        )
        assert (await http.post(CHAT, json=hello())).text == "ok"
        answer = await http.post(CHAT, json=hello())
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        with pytest.raises(httpx2.ReadError):
            await http.post(CHAT, json=hello())
        with pytest.raises(httpx2.RemoteProtocolError):
            await http.post(CHAT, json=hello())
        assert (await http.post(CHAT, json=hello())).status_code == 200  # no script left


@in_loop
async def test_an_answer_of_503_or_429_is_no_execution() -> None:
    async with FakeEngine() as engine, client(engine) as http:
        engine.script(respond(503, b""), respond(429, b""), respond(500, b""))
        for _ in range(3):
            await http.post(CHAT, json=hello(), headers={"x-request-id": "r"})
        assert engine.executions_by_id == {"r": 1}


@in_loop
async def test_a_script_may_answer_before_the_body_has_come() -> None:
    async with FakeEngine() as engine:
        engine.script(respond(413, b"too large"), when="head")
        reader, writer = await asyncio.open_connection(engine.host, engine.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nContent-Length: 10\r\n\r\n12345".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        assert engine.requests[0].whole_at is None
        writer.write(b"67890" + b"GET /health HTTP/1.1\r\n\r\n")
        rest = await reader.readuntil(b'{"status":"ok"}')
        assert b"200 OK" in rest
        assert engine.requests[0].body == b"1234567890"
        writer.close()


@in_loop
async def test_a_script_may_take_the_connection_over_before_anything_was_read() -> None:
    seen: list[bytes] = []

    async def script(connection: Connection) -> None:
        seen.append(await connection.read())
        await connection.write(b"garbage\r\n\r\n")

    async with FakeEngine() as engine, client(engine) as http:
        engine.script(script, when="accept")
        with pytest.raises(httpx2.RemoteProtocolError):
            await http.get("/health")
        assert seen[0].startswith(b"GET /health")
        assert engine.received == []


@in_loop
async def test_a_reader_that_stops_holds_the_engine_back() -> None:
    async with FakeEngine() as engine:
        engine.script(endless())
        _, writer = await asyncio.open_connection(engine.host, engine.port, limit=1024)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nContent-Length: 0\r\n\r\n".encode())
        request = await engine.until_requests(1)
        sizes: list[int] = []

        def settled() -> bool:
            sizes.append(len(request.sent))
            return len(sizes) > 40 and sizes[-1] == sizes[-40]

        await eventually(settled)
        assert 0 < len(request.sent) < 32 * 1024 * 1024
        writer.transport.abort()


@in_loop
async def test_down_means_refused_and_back_means_a_new_incarnation() -> None:
    async with FakeEngine("vllm") as engine:
        async with client(engine) as http:
            before = (await http.get("/metrics")).text
        await engine.go_down()
        async with client(engine) as http:
            with pytest.raises(httpx2.ConnectError):
                await http.get("/health")
            await engine.come_back()
            after = (await http.get("/metrics")).text
        assert "process_start_time_seconds 1\n" in before
        assert "process_start_time_seconds 2\n" in after


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("how", ["fin", "rst"])
def test_an_idle_or_reused_connection_is_closed_as_told(loop: str, how: str) -> None:
    async def main() -> None:
        async with FakeEngine() as engine:
            engine.behaviour.reused = how
            reader, writer = await asyncio.open_connection(engine.host, engine.port)
            writer.write(b"GET /health HTTP/1.1\r\n\r\n")
            await reader.readuntil(b'{"status":"ok"}')
            writer.write(b"GET /health HTTP/1.1\r\n\r\n")
            if how == "fin":
                assert await reader.read() == b""
            else:
                with pytest.raises(ConnectionResetError):
                    await reader.read()
            assert engine.calls["/health"] == 1
            writer.transport.abort()
            engine.behaviour.idle_close_s = 0.02
            engine.behaviour.idle_close_by_rst = how == "rst"
            _, writer = await asyncio.open_connection(engine.host, engine.port)
            await engine.until(lambda: engine.open_connections == 0)
            writer.transport.abort()

    run(main(), loop=loop)


@in_loop
async def test_slots_and_metrics_wake_a_sleeper_but_health_and_props_do_not() -> None:
    async with FakeEngine() as engine, client(engine) as http:
        engine.behaviour.sleep_idle_s = 0.05
        await engine.until(lambda: engine.asleep)
        for path in ("/health", "/props", "/v1/models"):
            await http.get(path)
        assert engine.asleep
        assert (await http.get("/props")).json()["is_sleeping"] is True
        await http.get("/slots")
        assert (engine.asleep, engine.wakes) == (False, 1)


@in_loop
async def test_a_router_loads_a_model_for_a_metrics_poll_unless_told_not_to() -> None:
    async with FakeEngine("llama-router", models=["a", "b"]) as engine, client(engine) as http:
        assert (await http.get("/metrics?model=a&autoload=false")).status_code == 400
        assert engine.loads == {}
        assert (await http.get("/metrics?model=a")).status_code == 200
        assert engine.loads == {"a": 1}
        assert (await http.get("/props")).json()["role"] == "router"


@in_loop
async def test_a_model_swap_aborts_what_runs() -> None:
    async with FakeEngine("ollama", models=["a", "b"]) as engine, client(engine) as http:
        engine.behaviour.swap_s = 0.01
        engine.behaviour.ttft_s = 0.2
        first = asyncio.create_task(http.post(CHAT, json=hello(model="a")))
        await engine.until(lambda: engine.running == 1)
        assert (await http.post(CHAT, json=hello(model="b"))).status_code == 200
        with pytest.raises(httpx2.HTTPError):
            await first
        assert engine.swaps == 1


@in_loop
async def test_badly_framed_requests_are_refused_and_remembered() -> None:
    async with FakeEngine() as engine:
        reader, writer = await asyncio.open_connection(engine.host, engine.port)
        writer.write(
            b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        assert len(engine.bad_requests) == 1
        writer.close()


def test_a_script_that_fails_fails_the_test() -> None:
    async def script(_: Connection) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        async with FakeEngine() as engine, client(engine) as http:
            engine.script(script)
            with pytest.raises(httpx2.ReadError):
                await http.post(CHAT, json=hello())

    with pytest.raises(AssertionError, match="a script failed"):
        run(main())


def test_a_lost_exception_or_task_fails_the_run() -> None:
    async def raises() -> None:
        raise ZeroDivisionError

    async def loses_an_exception() -> None:
        task = asyncio.create_task(raises())
        await asyncio.sleep(0.01)
        del task

    with pytest.raises(AssertionError, match="never retrieved"):
        run(loses_an_exception())

    async def leaves_a_task() -> None:
        leaves_a_task.__dict__["task"] = asyncio.create_task(asyncio.sleep(60))

    with pytest.raises(AssertionError, match="left running"):
        run(leaves_a_task())


def test_events_of_a_stream_are_one_per_token_and_an_end() -> None:
    assert len(events_of(tokens=5)) == 7
    assert events_of()[-1].endswith(b"data: [DONE]\n\n")
    assert b"response.completed" in events_of("/v1/responses")[-1]
    assert b"message_stop" in events_of("/v1/messages")[-1]
