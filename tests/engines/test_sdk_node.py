"""The SDKs for Node, where Node and the packages are: `npm install openai @anthropic-ai/sdk`, and NODE_PATH names the
folder `node_modules` that this made.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.running import in_loop, slack

SCRIPT = Path(__file__).with_name("sdk_node.cjs")
TEXT = " word0 word1 word2 word3 word4"


def node() -> str:
    """The program. Skips, with the reason, where it or a package is missing."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not installed")
    for package in ("openai", "@anthropic-ai/sdk"):
        asked = subprocess.run(
            [found, "-e", f"require.resolve('{package}')"], capture_output=True, check=False
        )
        if asked.returncode != 0:
            pytest.skip(f"the npm package {package} is not on NODE_PATH")
    return found


def test_the_sdks_for_node_understand_answers_streams_lists_and_refusals() -> None:
    program = node()

    @in_loop
    async def check() -> None:
        async with (
            FakeEngine() as engine,
            running_gateway(engine, keys=["alice"]) as slotgate,
        ):
            told = await _run(program, slotgate.base_url, slotgate.keys["alice"])
            for answer in ("chat", "streamed", "response", "message", "final"):
                assert told[answer] == TEXT, answer
            assert told["models"] == told["listed"] == ["m"]
            assert told["counted"] == 32
            assert told["unauthorized"]["name"] == "AuthenticationError"
            assert told["unknown"]["name"] == "NotFoundError"
            assert told["unknown"]["code"] == "model_not_found"
            assert told["unknown"]["id"]
            assert told["anthropicUnknown"]["name"] == "NotFoundError"
            assert told["anthropicUnknown"]["id"]

    check()


async def _run(program: str, base: str, key: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        *(program, str(SCRIPT)),
        env={**os.environ, "BASE": base, "KEY": key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await asyncio.wait_for(process.communicate(), 60 * slack())
    assert process.returncode == 0, errors.decode()
    return json.loads(out)
