"""The seven invariants of cases.md, each a function that fails with what it saw. Checked after every gateway test.

Figures are read from the metrics text, so these hold for any gateway that keeps the metric names of the contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.fakes.engine import FakeEngine
from tests.fakes.running import slack

Labels = tuple[tuple[str, str], ...]
Series = dict[tuple[str, Labels], float]
ReadMetrics = Callable[[], Awaitable[str]]

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
MOST_SERIES = 3000  # the contract's bound

GAUGES = ("slotgate_in_flight", "slotgate_queue_depth")
_BAD_WORDS = (
    "Traceback (most recent call last)",
    "was never retrieved",
    "was never awaited",
    "Task was destroyed but it is pending",
    "Exception in callback",
    "ResourceWarning",
    "unclosed ",
    "Unclosed ",
)


def series_of(text: str) -> Series:
    """Prometheus text as a mapping from name and labels to value."""
    return {
        (name, tuple(_LABEL.findall(labels or ""))): float(value)
        for name, labels, value in _SAMPLE.findall(text)
    }


def total(series: Series, name: str, **labels: str) -> float:
    """The sum over all series of that name that carry these labels."""
    return sum(
        value
        for (found, pairs), value in series.items()
        if found == name and labels.items() <= dict(pairs).items()
    )


async def gauges_return_to_zero(
    read: ReadMetrics, engines: Sequence[FakeEngine], within_s: float = 1
) -> None:
    """1. In flight, queue depth, and requests inside engines are zero within a second."""
    deadline = time.monotonic() + within_s * slack()
    while True:
        series = series_of(await read())
        held = {
            f"{name}{dict(labels)}": value
            for (name, labels), value in series.items()
            if name in GAUGES and value
        }
        held |= {repr(engine): engine.inside for engine in engines if engine.inside}
        if not held:
            return
        assert time.monotonic() < deadline, f"not back to zero after {within_s} s: {held}"
        await asyncio.sleep(0.02)


def no_more_runs_than_requests(series: Series, engines: Iterable[FakeEngine]) -> None:
    """2. Engines ran no more requests than clients sent, and none twice."""
    engines = list(engines)
    runs = sum(engine.executions for engine in engines)
    asked = total(series, "slotgate_requests_total")
    assert runs <= asked, f"{runs:g} executions for {asked:g} client requests: {engines}"
    by_id: Counter[str] = Counter()
    for engine in engines:
        by_id.update(engine.executions_by_id)
    twice = {key: count for key, count in by_id.items() if key and count > 1}
    assert not twice, f"requests that ran more than once: {twice}"


def bytes_are_unchanged(at_client: bytes, from_engine: bytes) -> None:
    """3. What the client read is what the engine wrote. For the test to call: only it knows both."""
    if at_client == from_engine:
        return
    pairs = zip(at_client, from_engine, strict=False)
    same = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    same = min(len(at_client), len(from_engine)) if same is None else same
    raise AssertionError(
        f"{len(at_client)} bytes at the client, {len(from_engine)} from the engine; they part at byte {same}: "
        f"{at_client[same : same + 60]!r} instead of {from_engine[same : same + 60]!r}"
    )


async def one_outcome_per_request(
    read: ReadMetrics, read_log: Callable[[], str], sent: int | None = None
) -> None:
    """4. Every request ended in exactly one outcome: once in the metric, on one line of the log.

    `sent`: how many requests on generation and embedding paths the test sent, when it knows. Ids that clients chose may
    come twice; those that the gateway made (req-...) may not. The log is written by a thread, so it is waited for.
    """
    deadline = time.monotonic() + slack()
    while True:
        counted = total(series_of(await read()), "slotgate_requests_total")
        lines = [line for line in _json_lines(read_log()) if line.get("outcome") is not None]
        all_there = sent is None or counted >= sent
        if (all_there and (len(lines) >= counted or not lines)) or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.01)
    assert sent is None or counted == sent, f"{counted:g} outcomes for {sent} requests"
    assert len(lines) >= counted or not lines, f"{counted:g} outcomes on {len(lines)} log lines"
    made = Counter(str(line.get("request_id")) for line in lines)
    several = {key: n for key, n in made.items() if n > 1 and key.startswith("req-")}
    assert not several, f"requests with several outcomes in the log: {several}"


def log_is_clean(log: str) -> None:
    """5a. No traceback, lost exception or unclosed resource in the log."""
    bad = [line for line in log.splitlines() if any(word in line for word in _BAD_WORDS)]
    assert not bad, "the log holds:\n" + "\n".join(bad[:10])


def no_secret_in(secrets: Iterable[str], **texts: str) -> None:
    """5b. No key (nor any other canary) in the log, the metrics or the status."""
    for where, text in texts.items():
        found = [secret for secret in secrets if secret in text]
        assert not found, f"{where} holds the secret {found[0]!r}"


@dataclass(slots=True)
class Lag:
    """The longest stretch for which the loop did nothing else. CPU time is not disturbed by other processes."""

    wall_s: float = 0
    cpu_s: float = 0


@contextlib.asynccontextmanager
async def loop_is_never_blocked(limit_s: float = 0.1) -> AsyncIterator[Lag]:
    """6. The loop's thread never works for more than `limit_s` at a stretch, nor sleeps in it for ten times as long."""
    lag = Lag()
    task = asyncio.create_task(_watch(lag), name="loop-lag probe")
    try:
        yield lag
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert lag.cpu_s <= limit_s * slack(), f"the loop worked for {lag.cpu_s:.3f} s at a stretch"
    assert lag.wall_s <= 10 * limit_s * slack(), f"the loop stood for {lag.wall_s:.3f} s"


def labels_come_from_the_configuration(
    series: Series, allowed: Mapping[str, Iterable[str]]
) -> None:
    """7. Clients cannot make series: label values are those of the configuration, and the number is bounded."""
    known = {label: set(values) for label, values in allowed.items()}
    strange = {
        f"{label}={value}"
        for _, labels in series
        for label, value in labels
        if label in known and value not in known[label]
    }
    assert not strange, f"label values that no configuration holds: {sorted(strange)}"
    assert len(series) <= MOST_SERIES, f"{len(series)} series"


async def _watch(lag: Lag, every_s: float = 0.01) -> None:
    while True:
        wall, cpu = time.monotonic(), time.thread_time()
        await asyncio.sleep(every_s)
        lag.wall_s = max(lag.wall_s, time.monotonic() - wall - every_s)
        lag.cpu_s = max(lag.cpu_s, time.thread_time() - cpu)


def _json_lines(text: str) -> list[dict[str, object]]:
    out = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict):
                out.append(document)
    return out
