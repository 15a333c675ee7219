"""The dashboard, as a person sees it in a real Chromium: numbers that move, words for what is wrong, no complaint."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import pytest

from tests.fakes.behaviour import Behaviour
from tests.fakes.connection import Connection
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import ADMIN, Running, running_gateway
from tests.fakes.running import in_loop
from tests.gateway.browser import PROGRAM, WHY_NOT, Page, chromium
from tests.gateway.line_talk import CHAT, body_for

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
LAG_S = 1.0  # a browser starts beside the gateway, on the same processor


@in_loop
async def test_the_page_needs_no_key_holds_no_data_and_asks_nobody_else() -> None:
    async with FakeEngine() as engine, running_gateway(engine, keys=["alice"]) as slotgate:
        answer = await slotgate.client.get("/dashboard", headers={"Authorization": ""})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        assert "unsafe-inline" not in policy
        known = re.sub(r"http://www\.w3\.org/2000/svg", "", answer.text)
        assert not re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", known)
        assert "alice" not in answer.text
        assert "b1" not in answer.text
        assert len(answer.content) < 40_000
        assert (await slotgate.client.get("/status")).status_code == 403
        head = await slotgate.client.head("/dashboard")
        assert head.status_code == 200
        assert head.content == b""


@needs_chromium
@in_loop
async def test_numbers_move_and_a_planted_fault_gets_its_words() -> None:
    behaviour = Behaviour(ttft_s=0.05, itl_s=0.01, tokens=20)
    async with (
        FakeEngine(slots=2, behaviour=behaviour) as one,
        FakeEngine("vllm", slots=4, behaviour=behaviour) as other,
        running_gateway(
            {"name": "gpu1", "url": one.url},
            {"name": "gpu2", "url": other.url, "slots": 4},
            admission={"queue": 2},
            lag_limit_s=LAG_S,
            check=False,
        ) as slotgate,
        chromium() as page,
    ):
        other.always(_preempting(), path="/metrics")
        async with _under_load(slotgate, 12):
            await page.look_like(1200, 1000)
            await page.open(f"{slotgate.base_url}/dashboard")
            await page.until("!document.getElementById('main').hidden")
            await _numbers_move(page)
            await page.until("document.querySelectorAll('#backends .cell.ours').length > 0")
            assert await page.value("document.querySelectorAll('#backends .cell').length") == 6
            await page.until(
                "/^\\d+(\\.\\d+)? m?s$/.test(document.getElementById('ttft').innerText)"
            )
            await page.until(
                "/queue full \\d+ %/i.test(document.getElementById('findings').innerText)"
            )
            await page.until(
                "/gpu2 preempts .*lower its slots/.test(document.getElementById('findings').innerText)"
            )
            await page.until(
                "document.querySelector('#chart-ttft path').getAttribute('d').includes('L')"
            )
            await page.screenshot("dashboard.png")
            await one.go_down()
            await page.until(
                "/gpu1 is down: start it/.test(document.getElementById('findings').innerText)"
            )
            await page.until("document.querySelector('[data-name=gpu1] .state.down') !== null")
        assert page.errors == []
        assert {url.split("/", 3)[2] for url in page.asked} == {f"127.0.0.1:{slotgate.port}"}


@needs_chromium
@in_loop
async def test_it_asks_for_an_admin_key_and_keeps_it_in_the_tab() -> None:
    async with (
        FakeEngine() as engine,
        running_gateway(engine, keys=["alice"], lag_limit_s=LAG_S) as slotgate,
        chromium() as page,
    ):
        await page.open(f"{slotgate.base_url}/dashboard")
        await page.until("!document.getElementById('ask').hidden")
        assert page.errors == []
        assert not any(url.endswith("/status") for url in page.asked)

        await page.type_into("#key", slotgate.keys["alice"])
        await page.press_enter()
        await page.until("/not an admin key/.test(document.getElementById('ask-why').innerText)")
        assert await page.value("sessionStorage.length") == 0
        page.errors.clear()  # the browser tells of the 403, as it should

        await page.type_into("#key", slotgate.keys[ADMIN])
        await page.press_enter()
        await page.until("!document.getElementById('main').hidden")
        await page.until("document.getElementById('findings').innerText === 'All is well.'")
        kept = "sessionStorage.getItem('slotgate-key')"
        assert await page.value(kept) == slotgate.keys[ADMIN]
        assert await page.value("localStorage.length") == 0
        assert await page.value("document.cookie") == ""
        assert slotgate.keys[ADMIN] not in str(page.asked)
        assert slotgate.keys[ADMIN] not in await page.value("document.documentElement.outerHTML")

        await page.value("document.getElementById('forget').click()")
        await page.until("!document.getElementById('ask').hidden")
        assert await page.value(kept) is None
        assert page.errors == []


@needs_chromium
@in_loop
async def test_it_fits_a_phone_and_is_dark_for_who_likes_it_dark() -> None:
    async with (
        FakeEngine(slots=40) as engine,
        running_gateway(
            {"name": "a-backend-with-a-rather-long-name", "url": engine.url}, lag_limit_s=LAG_S
        ) as slotgate,
        chromium() as page,
    ):
        slotgate.models.add("m")
        await page.look_like(360, 740, dark=True)
        await page.open(f"{slotgate.base_url}/dashboard")
        await page.until("!document.getElementById('main').hidden")
        assert await page.value("document.documentElement.scrollWidth") <= 360
        assert await _brightness(page, "backgroundColor") < 60
        assert await _brightness(page, "color") > 180
        await page.screenshot("dashboard-phone-dark.png")
        await page.look_like(1200, 1000)
        assert await _brightness(page, "backgroundColor") > 200
        assert await _brightness(page, "color") < 80
        assert page.errors == []


def _preempting() -> object:
    """A vLLM whose KV cache is too small: its count of preemptions grows each time it is asked."""
    count = 0

    async def script(connection: Connection) -> None:
        nonlocal count
        count += 3
        at = '{engine="0",model_name="m"}'
        text = (
            f"vllm:num_requests_running{at} 4\nvllm:num_requests_waiting{at} 0\n"
            f"vllm:kv_cache_usage_perc{at} 0.99\nvllm:num_preemptions_total{at} {count}\n"
            "process_start_time_seconds 1\n"
        )
        await connection.respond(200, text, content_type="text/plain; version=0.0.4")

    return script


@contextlib.asynccontextmanager
async def _under_load(slotgate: Running, clients: int) -> AsyncIterator[None]:
    """Chats without a pause; refused ones come back soon."""

    async def chat() -> None:
        while True:
            answer = await slotgate.client.post(CHAT, json=body_for(CHAT, stream=True))
            await asyncio.sleep(0 if answer.status_code == 200 else 0.3)

    tasks = [asyncio.create_task(chat()) for _ in range(clients)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _numbers_move(page: Page) -> None:
    """The count of requests grows from one look to the next."""
    shown = (
        "Number(document.querySelector('#keys td:nth-child(2)')?.innerText.replace(/,/g, '') || 0)"
    )
    first = await page.value(shown)
    await page.until(f"{shown} > {first}")
    second = await page.value(shown)
    await page.until(f"{shown} > {second}")


async def _brightness(page: Page, what: str) -> float:
    """0 (black) to 255 of a colour of the page."""
    colour = await page.value(f"getComputedStyle(document.body).{what}")
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    return 0.3 * red + 0.6 * green + 0.1 * blue
