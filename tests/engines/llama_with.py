"""A real llama.cpp server with any option there is: sleep, one KV cache for all slots, a fixed port.

    async with llama_with(sleep_idle_seconds=3) as engine: engine.url, engine.pid

Run as a module it is the child: it takes one JSON object, attributes of the wheel's CommonParams.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.cli.child_server import ChildFailed, ChildServer, die_with_parent, say
from gateway.cli.llama_child import why_not
from gateway.cli.local_engine import MODEL_NAME, EngineUnavailable, find_model
from tests.engines.program import free_port


class Llama:
    """One engine that may be killed and started again at its old address."""

    def __init__(self, **params: Any) -> None:
        self._params = {"n_parallel": 2, "n_ctx": 4096, "kv_unified": False, **params}
        self._child: ChildServer | None = None
        self.url = ""

    async def start(self) -> None:
        """Skips the test where no such engine can run."""
        try:
            model = find_model(os.environ)
        except EngineUnavailable as unavailable:
            pytest.skip(f"no real llama.cpp server can run here: {unavailable}")
        self._params.setdefault("port", free_port())
        self._child = ChildServer(
            "tests.engines.llama_with", [str(model), json.dumps(self._params)]
        )
        try:
            self.url = await self._child.start()
        except ChildFailed as failed:
            pytest.skip(f"the llama.cpp wheel cannot run here: {failed.reason or failed.status}")

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop()
            self._child = None

    async def kill(self) -> None:
        """As by `kill -9`: nothing is said, every connection breaks."""
        assert self._child is not None
        assert self._child.pid is not None
        os.kill(self._child.pid, signal.SIGKILL)
        await self.stop()


@contextlib.asynccontextmanager
async def llama_with(**params: Any) -> AsyncIterator[Llama]:
    engine = Llama(**params)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def _serve(model: str, given: dict[str, Any]) -> int:
    die_with_parent()
    try:
        import xllamacpp  # noqa: PLC0415
    except ImportError as error:
        reason, remedy = why_not(error)
        say(reason=reason, remedy=remedy)
        return 1
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = {MODEL_NAME}
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.endpoint_slots = params.endpoint_metrics = True
    params.ui = False
    for name, value in given.items():
        if not hasattr(params, name):
            say(reason=f"this build of llama.cpp has no option {name}")
            return 1
        setattr(params, name, value)
    server = xllamacpp.Server(params)
    say(url=server.listening_address)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[1], json.loads(sys.argv[2])))
