"""The scripted engine: one asyncio TCP server that can do anything to a socket, and remembers everything.

    async with FakeEngine("llama-server", slots=2, models=["m"]) as engine:
        engine.script(chat_stream(tokens=5, every_s=0.01))   # the next request; without a script: a sensible answer
        ...
        engine.requests[-1].headers, .body, .gone_at; engine.executions; engine.peak

Law of this file: what a test asserts about an engine is counted here, at the socket, and never told by the gateway.
Times are time.monotonic() seconds. It runs in the test's own loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

from tests.fakes import engine_kinds, generation
from tests.fakes.behaviour import Behaviour
from tests.fakes.connection import Connection, HeaderPairs, Request, Script
from tests.fakes.engine_slots import Lease, Slots
from tests.fakes.http_reader import FramingError
from tests.fakes.intake import Intake, Rule
from tests.fakes.occupancy import Occupancy
from tests.fakes.running import slack


@dataclass(eq=False)
class FakeEngine:
    """One engine of a kind: llama-server, llama-router, vllm, ollama, sglang or openai (says as little as allowed)."""

    kind: str = "llama-server"
    slots: int = 2
    models: Sequence[str] = ("m",)
    behaviour: Behaviour = field(default_factory=Behaviour)
    host: str = "127.0.0.1"
    port: int = 0
    receive_buffer: int | None = None  # SO_RCVBUF of what we accept, for back-pressure

    def __post_init__(self) -> None:
        self.occupancy = Occupancy()
        self.loads: Counter[str] = Counter()  # how often each model was loaded
        self.wakes = 0
        self.swaps = 0
        self.incarnation = 1
        self.prompt_tokens = 0  # counters of the default answers, as the engine's metrics say them
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.loaded: set[str] = set() if self.kind == "llama-router" else set(self.models)
        self.current_model: str | None = None
        self.places = Slots(self.slots, shared=self.kind in ("vllm", "sglang"))
        self.intake = Intake(self)
        self._server: asyncio.Server | None = None
        self._touched_at = time.monotonic()

    # What a test says

    def script(
        self,
        *scripts: Script,
        path: str | None = None,
        when: str = "whole",
        times: int | None = 1,
        deaf: bool = False,
    ) -> None:
        """The next requests are answered by these, one each, in order.

        `path`: only requests for it (by default any POST; "*" takes probes too). `when`: `head` starts with the body
        unread, `accept` before anything was read (nothing is parsed on that connection). `deaf`: the script goes on
        after the peer left.
        """
        self.intake.rules += [Rule(script, path, when, times, deaf) for script in scripts]

    def always(
        self, script: Script, *, path: str | None = None, when: str = "whole", deaf: bool = False
    ) -> None:
        """Every request from now on is answered by this one (after those given by `script`)."""
        self.intake.rules.append(Rule(script, path, when, None, deaf))

    def normal(self) -> None:
        """Forgets all scripts."""
        self.intake.rules.clear()

    async def stop_listening(self) -> None:
        """New connections are refused; old ones live on."""
        if self._server is not None:
            self._server.close()
            self._server = None
            await asyncio.sleep(0)

    async def listen(self) -> None:
        """Listens (again, on the same port)."""
        self._server = await asyncio.get_running_loop().create_server(
            self.intake.accept, self.host, self.port, backlog=4096
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def go_down(self, *, rst: bool = True) -> None:
        """Dies: refuses connections and breaks those it has; caches and slots are lost."""
        await self.stop_listening()
        for connection in list(self.connections):
            if not connection.lost.is_set():
                (connection.rst if rst else connection.fin)()
        await self.intake.end_tasks()
        self.places.forget()

    async def come_back(self) -> None:
        """A new process on the same port."""
        self.incarnation += 1
        await self.listen()

    def resize(self, slots: int) -> None:
        self.slots = slots
        self.places.resize(slots)

    # What a test asks

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def connections(self) -> list[Connection]:
        """Every connection ever accepted, in order."""
        return self.intake.connections

    @property
    def received(self) -> list[Request]:
        """Every request, probes too, in order of arrival."""
        return self.intake.received

    @property
    def bad_requests(self) -> list[FramingError]:
        """What came and was not well-framed HTTP."""
        return self.intake.bad_requests

    @property
    def calls(self) -> Counter[str]:
        """How often each path was asked for."""
        return Counter(request.path for request in self.received)

    @property
    def requests(self) -> list[Request]:
        """What clients sent (POSTs), in order of arrival."""
        return [request for request in self.received if request.method == "POST"]

    @property
    def probes(self) -> list[Request]:
        """Everything else."""
        return [request for request in self.received if request.method != "POST"]

    @property
    def executions(self) -> int:
        """How many requests began to run here (and were not answered with 429 or 503)."""
        return sum(self.executions_by_id.values())

    @property
    def executions_by_id(self) -> Counter[str]:
        """The same, by the x-request-id that came with them."""
        return self.occupancy.executions_by_id

    @property
    def peak(self) -> int:
        """Most requests on generation paths inside at one moment."""
        return self.occupancy.peak

    @property
    def peak_permits(self) -> int:
        """The same, each counted as the slots it takes."""
        return self.occupancy.peak_permits

    @property
    def inside(self) -> int:
        """Requests on generation paths in here now: running, waiting, or not yet noticed as left."""
        return len(self.occupancy.now)

    @property
    def running(self) -> int:
        return self.places.running

    @property
    def waiting(self) -> int:
        return len(self.places.waiting)

    @property
    def open_connections(self) -> int:
        return sum(not connection.lost.is_set() for connection in self.connections)

    @property
    def asleep(self) -> bool:
        limit = self.behaviour.sleep_idle_s
        return limit is not None and not self.inside and time.monotonic() - self._touched_at > limit

    async def until(self, condition: object, within_s: float = 10) -> None:
        """Waits until `condition()` holds; fails with what it looked at when it does not in time."""
        assert callable(condition)
        deadline = time.monotonic() + within_s * slack()
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {within_s} s; {self!r}")
            await asyncio.sleep(0.002)

    async def until_requests(self, count: int, within_s: float = 10) -> Request:
        """Waits for the count-th POST and returns it."""
        await self.until(lambda: len(self.requests) >= count, within_s)
        return self.requests[count - 1]

    def __repr__(self) -> str:
        return (
            f"<FakeEngine {self.kind} {self.url}: {len(self.requests)} requests, {self.executions} executions, "
            f"{self.inside} inside (peak {self.peak}), {self.open_connections} connections open>"
        )

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_listening()
        await self.intake.end_tasks()
        for connection in self.connections:
            if not connection.lost.is_set():
                connection.rst()
        await asyncio.sleep(0)
        if self.intake.errors:
            raise AssertionError("a script failed") from self.intake.errors[0]

    # What the default answers and the kinds use

    def common_headers(self) -> HeaderPairs:
        return engine_kinds.common_headers(self)

    def touch(self) -> None:
        """Something that keeps the engine awake has come."""
        self._touched_at = time.monotonic()

    async def wake(self) -> None:
        """Leaves sleep, which takes its time."""
        asleep = self.asleep
        self.touch()
        if asleep:
            self.wakes += 1
            await asyncio.sleep(self.behaviour.wake_s)

    @asynccontextmanager
    async def execution(
        self, request: Request, permits: int = 1, prompt: str = ""
    ) -> AsyncIterator[Lease]:
        """A generation: waits for slots, is counted, and gives them back."""
        self.places.caching = self.behaviour.cached_tokens
        lease = await self.places.take(permits, prompt)
        lag_s = 0.0
        request.started_at = time.monotonic()
        self.occupancy.ran(request)
        try:
            yield lease
        except asyncio.CancelledError:
            lag_s = self.behaviour.cancel_lag_s
            raise
        finally:
            if request.status in (429, 503):  # refused: it may run elsewhere
                self.occupancy.ran(request, -1)
            self.occupancy.leave(request)
            if lag_s:
                self.occupancy.enter(lease, permits, self.slots)
                asyncio.get_running_loop().call_later(lag_s, self._give, lease)
            else:
                self._give(lease)

    def abort(self, requests: Iterable[Request]) -> None:
        """What a model swap does to the requests that run."""
        for request in requests:
            request.connection.rst()

    async def answer(self, connection: Connection, request: Request, rule: Rule | None) -> None:
        """Answers one request, by its script or by default. Called by the intake in a task of its own."""
        if request.path not in generation.PATHS:
            await (rule.script if rule else engine_kinds.answer)(connection)
            return
        permits, prompt = generation.cost_of(request)
        self.touch()
        self.occupancy.enter(request, permits, self.slots)
        try:
            if rule is None:
                await generation.answer(self, connection, permits, prompt)
            elif rule.when == "head":
                await rule.script(connection)
            else:
                async with self.execution(request, min(permits, self.slots), prompt):
                    await rule.script(connection)
        finally:
            self.occupancy.leave(request)
            self.touch()

    def _give(self, lease: Lease) -> None:
        self.places.give(lease)
        self.occupancy.leave(lease)
