"""What the demo asks of the gateway, as any client of it would: over HTTP, with an OpenAI request."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from gateway.cli.ops.percentile import spread

CHAT = "/v1/chat/completions"
TIMEOUT_S = 300.0
READY_S = 60.0

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """A streamed answer, read to its end. Times in seconds at the client."""

    text: str
    backend: str
    affinity: str
    first_token_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Burst:
    """What became of requests that came all at once."""

    served: int
    refused: int
    failed: int  # anything else: must be none
    refusal_p99_ms: float
    retry_after_s: tuple[int, int] | None  # least and most


@dataclass(frozen=True, slots=True)
class Latency:
    """The gateway's own p95s over all models in the last five minutes, in seconds; None: no sample."""

    ttft_p95_s: float | None
    itl_p95_s: float | None


def client_for(base_url: str) -> httpx2.AsyncClient:
    """A client that no proxy of the environment comes between, with as many connections as it wants."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(base_url=base_url, trust_env=False, timeout=TIMEOUT_S, limits=limits)


async def until_ready(client: httpx2.AsyncClient, backends: int) -> None:
    """Wait until that many backends are up. Raises TimeoutError."""
    async with asyncio.timeout(READY_S):
        while True:
            text = (await client.get("/metrics")).text
            up = re.findall(r"^slotgate_backend_up\{.*?\} (\S+)$", text, re.MULTILINE)
            if sum(map(float, up)) >= backends:
                return
            await asyncio.sleep(0.05)


async def first_model(client: httpx2.AsyncClient) -> str:
    """The model that the gateway offers."""
    answer = await client.get("/v1/models")
    return str(answer.raise_for_status().json()["data"][0]["id"])


async def stream_chat(
    client: httpx2.AsyncClient,
    model: str,
    messages: list[Message],
    on_text: Callable[[str], None],
    *,
    max_tokens: int,
) -> Reply:
    """Stream a chat; `on_text` is given each piece when it arrives. Raises httpx2.HTTPError."""
    started = time.monotonic()
    first: float | None = None
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    body = _body(model, messages, max_tokens, stream=True)
    async with client.stream("POST", CHAT, json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            event = _event(line)
            usage = event.get("usage") or usage
            if text := _text(event):
                first = first or time.monotonic()
                pieces.append(text)
                on_text(text)
        ended = time.monotonic()
        return Reply(
            text="".join(pieces),
            backend=answer.headers.get("x-slotgate-backend", "?"),
            affinity=answer.headers.get("x-slotgate-affinity", "?"),
            first_token_s=(first or ended) - started,
            total_s=ended - started,
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)),
            generated_tokens=int(usage.get("completion_tokens", len(pieces))),
        )


async def burst(client: httpx2.AsyncClient, model: str, size: int, max_tokens: int) -> Burst:
    """Send `size` requests at once, on connections that are open already."""
    await asyncio.gather(*(client.get("/healthz") for _ in range(size)))
    answers = await asyncio.gather(
        *(_one_of_burst(client, model, number, max_tokens) for number in range(size))
    )
    refusals = [seconds for status, seconds, _ in answers if status == 503]
    times = spread(refusals)
    served = sum(status == 200 for status, _, _ in answers)
    waits = [wait for status, _, wait in answers if status == 503 and wait is not None]
    return Burst(
        served=served,
        refused=len(refusals),
        failed=size - served - len(refusals),
        refusal_p99_ms=1000 * times.p99 if times else 0.0,
        retry_after_s=(min(waits), max(waits)) if waits else None,
    )


async def latency(client: httpx2.AsyncClient) -> Latency:
    """The p95s that the gateway measured, from its /metrics."""
    text = (await client.get("/metrics")).raise_for_status().text
    return Latency(
        _gauge(text, "slotgate_ttft_p95_seconds"), _gauge(text, "slotgate_itl_p95_seconds")
    )


def _body(model: str, messages: list[Message], max_tokens: int, *, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": max_tokens}
    body |= {"temperature": 0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


async def _one_of_burst(
    client: httpx2.AsyncClient, model: str, number: int, max_tokens: int
) -> tuple[int, float, int | None]:
    """Status, seconds from the request sent to the answer's headers, and Retry-After."""
    messages: list[Message] = [
        {"role": "user", "content": f"Say a few words about the number {number}."}
    ]
    body = _body(model, messages, max_tokens, stream=True)
    clock = _Clock()
    try:
        answer = await client.post(CHAT, json=body, extensions={"trace": clock})
    except httpx2.HTTPError:  # counted as failed, and shown as such
        return 0, 0.0, None
    wait = answer.headers.get("retry-after", "")
    return answer.status_code, clock.seconds, int(wait) if wait.isdigit() else None


class _Clock:
    """Times one request on the wire; the client's own work for twenty requests at once is left out."""

    def __init__(self) -> None:
        self._sent = 0.0
        self.seconds = 0.0

    async def __call__(self, event: str, _: object) -> None:
        if event.endswith("send_request_body.complete"):
            self._sent = time.monotonic()
        elif event.endswith("receive_response_headers.complete"):
            self.seconds = time.monotonic() - self._sent


def _event(line: str) -> dict[str, Any]:
    if not line.startswith("data: {"):
        return {}
    event = json.loads(line[6:])
    return event if isinstance(event, dict) else {}


def _text(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def _gauge(text: str, name: str) -> float | None:
    for labels, value in re.findall(rf"^{name}\{{(.*?)\}} (\S+)$", text, re.MULTILINE):
        if 'model="all"' in labels and 'window="5m"' in labels and not math.isnan(float(value)):
            return float(value)
    return None
