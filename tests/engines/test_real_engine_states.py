"""What real llama.cpp servers do to the gateway: sleep, share one KV cache, die and come back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner

from gateway.cli.check import check
from gateway.cli.local_engine import MODEL_NAME
from tests.engines.llama_with import Llama, llama_with
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, in_loop

CHAT = "/v1/chat/completions"
WORDS = "the quick brown fox jumps over the lazy dog and runs to the river " * 8  # some 120 tokens

pytestmark = pytest.mark.engine("llama-server")


def chat(content: str = "Tell a story.", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL_NAME, "messages": messages, "max_tokens": 16} | fields


async def ready(slotgate: Running, backends: int = 1) -> None:
    slotgate.models.add(MODEL_NAME)

    async def up() -> bool:
        return await slotgate.metric("backend_up") == backends

    await eventually(up, within_s=30)


async def state(slotgate: Running, number: int = 0) -> str:
    return str((await slotgate.status())["backends"][number]["state"])


async def is_asleep(engine: Llama) -> bool:
    """/props neither wakes it nor keeps it awake."""
    await asyncio.sleep(0.5)
    async with httpx2.AsyncClient(trust_env=False) as http:
        return (await http.get(f"{engine.url}/props")).json().get("is_sleeping") is True


@in_loop
async def test_an_engine_behind_the_gateway_falls_asleep_and_is_woken_by_a_request() -> None:
    async with (
        llama_with(sleep_idle_seconds=3) as engine,
        running_gateway(engine.url) as slotgate,
    ):
        await ready(slotgate)
        assert (await slotgate.client.post(CHAT, json=chat())).status_code == 200
        await eventually(lambda: is_asleep(engine), within_s=30)
        await eventually(lambda: _is(slotgate, "sleeping"), within_s=15)
        await asyncio.sleep(6)  # more than one look at an idle backend
        assert await is_asleep(engine), "looking at it has woken it"
        assert (await slotgate.client.post(CHAT, json=chat())).status_code == 200
        await eventually(lambda: _is(slotgate, "up"), within_s=15)


async def _is(slotgate: Running, wanted: str) -> bool:
    return await state(slotgate) == wanted


@in_loop
async def test_slots_that_share_one_cache_are_never_filled_beyond_it() -> None:
    """Without the limit all streams die together in the middle (engines.md 0.4)."""
    async with llama_with(n_parallel=4, n_ctx=768, kv_unified=True) as engine:
        body = chat(WORDS, max_tokens=150, stream=True, ignore_eos=True)
        alone = await _four_at_once(engine.url, body)
        assert any("exceeded" in text for text in alone), "this engine does not overflow"
        backend = {"url": engine.url, "kv_tokens": 768}
        async with running_gateway(backend, admission={"queue": 8}) as slotgate:
            await ready(slotgate)
            answers = await _four_at_once(slotgate.base_url, body)
            assert all(text.endswith("data: [DONE]\n\n") for text in answers)
            assert await slotgate.outcomes() == {"served": 4}


@in_loop
async def test_a_cache_that_nobody_said_is_shared_overflows_once_and_not_again() -> None:
    async with (
        llama_with(n_parallel=4, n_ctx=768, kv_unified=True) as engine,
        running_gateway(engine.url, admission={"queue": 8}) as slotgate,
    ):
        await ready(slotgate)
        body = chat(WORDS, max_tokens=150, stream=True, ignore_eos=True)
        first = await _four_at_once(slotgate.base_url, body)
        assert any("exceeded" in text for text in first)
        again = await _four_at_once(slotgate.base_url, body)
        assert all(text.endswith("data: [DONE]\n\n") for text in again)
        assert "its slots share one KV cache, which was full" in slotgate.log.getvalue()
        assert (await slotgate.status())["backends"][0]["breaker"] == "closed"


async def _four_at_once(url: str, body: dict[str, Any]) -> list[str]:
    async with httpx2.AsyncClient(trust_env=False, timeout=None) as http:
        calls = (http.post(f"{url}{CHAT}", json=body) for _ in range(4))
        return [answer.text for answer in await asyncio.gather(*calls)]


@in_loop
async def test_an_engine_started_without_a_number_of_slots_is_known_to_share_its_cache(
    tmp_path: Path,
) -> None:
    async with llama_with(n_parallel=4, n_ctx=0, kv_unified=True) as engine:
        file = tmp_path / "c.yaml"
        file.write_text(json.dumps({"backends": [{"name": "a", "url": engine.url}]}))
        result = await asyncio.to_thread(CliRunner().invoke, check, [str(file)])
        assert result.exit_code == 0, result.output
        assert "shares one KV cache between its slots" in result.stdout
        assert "a: llama-server b" in result.stdout
        async with running_gateway(engine.url) as slotgate:
            await ready(slotgate)
            backend = slotgate.gateway.dispatcher.dispatch.backends["b1"]
            assert backend.room.tokens == backend_context(slotgate)


def backend_context(slotgate: Running) -> int | None:
    report = slotgate.gateway.backends.known["b1"].report
    return report.context_per_slot if report is not None else None


@in_loop
async def test_an_engine_killed_under_load_costs_only_what_ran_there_and_comes_back() -> None:
    async with (
        llama_with() as one,
        llama_with() as other,
        running_gateway(one.url, other.url, admission={"queue": 20}) as slotgate,
    ):
        await ready(slotgate, 2)
        answers: list[int] = []
        stop = asyncio.Event()

        async def person(number: int) -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                body = chat(f"{number} {turn} Say something.", max_tokens=12)
                answers.append((await slotgate.client.post(CHAT, json=body)).status_code)

        crowd = [asyncio.create_task(person(number)) for number in range(6)]
        await eventually(lambda: len(answers) >= 8, within_s=60)
        await one.kill()
        lost_at = len(answers)
        await eventually(lambda: len(answers) >= lost_at + 8, within_s=60)
        assert sum(status != 200 for status in answers) <= 2, "only what was in its two slots"
        await one.start()
        await ready(slotgate, 2)
        back = len(answers)
        await eventually(lambda: len(answers) >= back + 12, within_s=60)
        stop.set()
        await asyncio.gather(*crowd)
        assert sum(status != 200 for status in answers) <= 2
        assert set(answers) <= {200, 502}
        async with httpx2.AsyncClient(trust_env=False) as http:
            text = (await http.get(f"{one.url}/metrics")).text
        made = [
            line
            for line in text.splitlines()
            if line.startswith("llamacpp:tokens_predicted_total ")
        ]
        assert float(made[0].split()[1]) > 0, "the new process has work again"
