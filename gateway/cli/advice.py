"""What a backend's answers mean for the people who will use it: one sentence each, and what to do about it.

Law of this file: no word about what is as it should be, and none that the config has settled already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from gateway.core.config import Backend, is_loopback
from gateway.engines.base import EngineReport, State
from gateway.engines.llama_load import AUTOMATIC_SLOTS

SMALL_CONTEXT: Final = 4_096  # tokens; the tools of a coding agent alone take more
_LARGER: Final = {
    "llama-server": "longer prompts are refused; start it with a larger -c, which its slots share out",
    "ollama": "longer prompts are cut without a word; set OLLAMA_CONTEXT_LENGTH",
    "vllm": "longer prompts are refused; start it with a larger --max-model-len",
    "sglang": "longer prompts are refused; start it with a larger --context-length",
}
_OPEN: Final = {
    "llama-server": "use it past the gateway and read its /slots; start it with --api-key and set `api_key`",
    "ollama": "use it past the gateway, and load and delete its models; let only this machine reach it",
    "vllm": "use it past the gateway; start it with --api-key and set `api_key`",
    "sglang": "use it past the gateway; start it with --api-key and set `api_key`",
}


def advice(backend: Backend, report: EngineReport) -> Iterator[str]:
    """Sentences about a backend that answered."""
    for one in (_one_at_a_time, _context, _perhaps_shared, _openness, _later):
        words = one(backend, report)
        if words is not None:
            yield words


def _one_at_a_time(backend: Backend, report: EngineReport) -> str | None:
    """An assumed single slot has a warning of its own."""
    if (backend.slots or report.slots) != 1 or report.slots_assumed:
        return None
    more = " start it with -np 2 or more" if report.engine == "llama-server" else " raise `slots`"
    if report.engine == "llama-server" and report.slots != 1:
        more = f" raise `slots`, the engine has {report.slots}"
    return f"it answers one request at a time, everybody else waits;{more}"


def _context(_backend: Backend, report: EngineReport) -> str | None:
    tokens = report.context_per_slot
    if tokens is None or tokens >= SMALL_CONTEXT:
        return None
    each = "each slot has" if (report.slots or 1) > 1 else "it has"
    what = _LARGER.get(report.engine, "longer prompts fail")
    return f"{each} a context of only {tokens:,} tokens; {what}"


def _perhaps_shared(backend: Backend, report: EngineReport) -> str | None:
    """/props of a server with -np 4 and of one without -np look the same, unless the context says more."""
    tokens = report.context_per_slot
    if (
        report.engine != "llama-server"
        or report.slots != AUTOMATIC_SLOTS
        or report.kv_shared
        or backend.kv_tokens is not None
        or tokens is None
    ):
        return None
    return (
        f"if it was started without -np, its 4 slots share one KV cache of {tokens:,} tokens, and all streams die "
        f"when that is full; then set `kv_tokens: {tokens}`"
    )


def _openness(backend: Backend, report: EngineReport) -> str | None:
    host = urlsplit(backend.url).hostname or ""
    if backend.api_key is not None or host.endswith(".localhost") or is_loopback(host):
        return None
    what = _OPEN.get(report.engine, "use it past the gateway")
    return f"whoever can reach {host} may {what}"


def _later(_backend: Backend, report: EngineReport) -> str | None:
    if report.state is State.SLEEPING:
        return "it sleeps; its next request waits until it has woken"
    return None if report.state is State.UP else f"it is {report.state.value} and will serve later"
