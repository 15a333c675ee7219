"""Real engines for tests. A machine that cannot run one skips, and says why in the summary."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.cli.local_engine import EngineOptions, EngineUnavailable, LocalEngine


@contextlib.asynccontextmanager
async def real_engine(**options: Any) -> AsyncIterator[LocalEngine]:
    """A running llama.cpp server with the small model; options are those of EngineOptions."""
    engine = LocalEngine(EngineOptions(**options))
    try:
        await engine.start()
    except EngineUnavailable as unavailable:
        pytest.skip(f"no real llama.cpp server can run here: {unavailable}")
    try:
        yield engine
    finally:
        await engine.stop()
