"""A real Ollama behind the gateway, with the small model of the demo. `make test-ollama`.

`ollama` on PATH or $OLLAMA_PROGRAM is started on a port and in a folder of its own; without one these tests are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli.check import check
from gateway.cli.local_engine import EngineUnavailable, find_model
from tests.engines.program import free_port, running_program
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, in_loop

CHAT = "/v1/chat/completions"
ONE, OTHER = "one:latest", "other:latest"  # the same file under two names: two models to Ollama

pytestmark = [pytest.mark.engine("ollama"), pytest.mark.timeout(600)]


@contextlib.asynccontextmanager
async def ollama(folder: Path) -> AsyncIterator[str]:
    """Its address."""
    program = os.environ.get("OLLAMA_PROGRAM") or shutil.which("ollama")
    if program is None:
        pytest.skip("there is no `ollama` on PATH; install it, or set OLLAMA_PROGRAM")
    try:
        model = find_model(os.environ)
    except EngineUnavailable as unavailable:
        pytest.skip(f"there is no model for it: {unavailable}")
    address = f"127.0.0.1:{free_port()}"
    environ = {
        "OLLAMA_HOST": address,
        "OLLAMA_MODELS": str(folder / "models"),
        "OLLAMA_MAX_LOADED_MODELS": "1",
        "HOME": str(folder),
    }
    command = [program, "serve"]
    url = f"http://{address}"
    async with running_program(
        command, f"{url}/api/version", log=folder / "ollama.log", environ=environ
    ):
        for number, name in enumerate((ONE, OTHER)):
            file = folder / f"Modelfile{number}"
            file.write_text(f"FROM {model}\nPARAMETER num_ctx {4096 + number}\n")
            creating = await asyncio.create_subprocess_exec(
                *(program, "create", name, "-f", str(file)), env={**os.environ, **environ}
            )
            assert await creating.wait() == 0
        yield url


def chat(model: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Say something."}]
    return {"model": model, "messages": messages, "max_tokens": 8} | fields


async def ready(slotgate: Running) -> None:
    slotgate.models |= {ONE, OTHER, "one", "other"}
    await eventually(lambda: slotgate.metric("backend_up"), within_s=60)


@in_loop
async def test_a_real_ollama_is_recognised_and_serves_one_at_a_time(tmp_path: Path) -> None:
    async with ollama(tmp_path) as url:
        file = tmp_path / "c.yaml"
        file.write_text(json.dumps({"backends": [{"name": "a", "url": url}]}))
        result = await asyncio.to_thread(CliRunner().invoke, check, [str(file)])
        assert result.exit_code == 0, result.output
        assert "a: ollama" in result.stdout
        assert "1 slot (assumed)" in result.stdout
        async with running_gateway(url, admission={"queue": 20}) as slotgate:
            await ready(slotgate)
            names = ["one", ONE] * 3
            calls = [slotgate.client.post(CHAT, json=chat(name, stream=True)) for name in names]
            for answer in await asyncio.gather(*calls):
                assert answer.status_code == 200
                assert answer.content.endswith(b"data: [DONE]\n\n")
            native = {"model": "one", "messages": [{"role": "user", "content": "hi"}]}
            answer = await slotgate.client.post("/api/chat", json=native | {"stream": False})
            assert answer.json()["done"] is True


@in_loop
async def test_two_models_on_a_real_ollama_that_holds_one_are_served_in_groups(
    tmp_path: Path,
) -> None:
    async with ollama(tmp_path) as url, running_gateway(url, admission={"queue": 20}) as slotgate:
        await ready(slotgate)
        assert (await slotgate.client.post(CHAT, json=chat("one"))).status_code == 200
        order: list[str] = []

        async def ask(model: str) -> None:
            assert (await slotgate.client.post(CHAT, json=chat(model))).status_code == 200
            order.append(model)

        calls = []
        for model in ("one", "other", "one", "one", "other", "one"):
            calls.append(asyncio.create_task(ask(model)))
            await asyncio.sleep(0.02)
        await asyncio.gather(*calls)
        switches = sum(a != b for a, b in pairwise(order))
        assert switches <= 2, order
