"""The short form of `make soak`: some thousand requests with all that goes wrong, and nothing is left of them."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.fakes.running import in_loop, slack
from tests.gateway.served import ROOT

REQUESTS = 3000


@pytest.mark.skipif(sys.platform != "linux", reason="the figures come from /proc")
@in_loop
async def test_memory_descriptors_and_gauges_are_flat_after_thousands_of_requests() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.soak", "--check", "--clients", "16"),
        *("--requests", str(REQUESTS)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), 100 * slack())
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    text = said.decode()
    assert process.returncode == 0, text
    assert f"{REQUESTS} requests" in text
