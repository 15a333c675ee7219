"""The part of `slotgate check` that asks the backends, and holds the config against what they say.

Law of this file: a check puts no load on a backend. It asks each once, all at the same time, and only what
is free; what an engine tells under traffic alone (llama-server's /slots and /metrics) is named, not asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.cli.advice import advice
from gateway.core.config import Backend, Config
from gateway.core.settings.rules import references
from gateway.engines.base import EngineReport, State
from gateway.runtime.probe import probe_once, target_of

_PATIENCE_S: Final = 15.0  # for one backend, however many questions it leaves unanswered
_SIGNALS: Final = (
    ("running", "running"),
    ("waiting", "waiting"),
    ("kv_used_ratio", "KV cache in use"),
    ("preemptions", "preemptions"),
)


@dataclass(frozen=True, slots=True)
class Answered:
    """What one backend said; None: nothing before our patience ended."""

    path: str  # backends[0]
    backend: Backend
    report: EngineReport | None

    @property
    def is_down(self) -> bool:
        return self.report is None or self.report.state is State.DOWN


async def ask_all(config: Config) -> tuple[Answered, ...]:
    """Ask every backend once. Takes at most 15 s."""
    reports = await asyncio.gather(*(_ask(backend) for backend in config.backends))
    return tuple(
        Answered(f"backends[{index}]", backend, report)
        for index, (backend, report) in enumerate(zip(config.backends, reports, strict=True))
    )


def lines(answers: Sequence[Answered]) -> Iterator[str]:
    """One line on each backend, for people."""
    for one in answers:
        if one.report is None or one.is_down:
            yield f"{one.backend.name}: down, {one.backend.url}"
        else:
            yield f"{one.backend.name}: {', '.join(_facts(one.backend, one.report))}"


def wrongs(config: Config, answers: Sequence[Answered]) -> Iterator[str]:
    """What keeps the gateway from serving as written: `path: words`."""
    for one in answers:
        if one.is_down:
            words = one.report.warnings if one.report else ("it does not answer in time",)
            yield f"{one.path}.url: {one.backend.url}: {'; '.join(words)}"
        elif one.report is not None and _refuses_key(one.report):
            yield f"{one.path}.api_key: the backend refuses it (401); write the key that it wants"
    served = _served(answers)
    if served is not None:
        yield from _unserved(config, served)


def warnings(answers: Sequence[Answered]) -> Iterator[str]:
    """What works, but is worth knowing: `path: words`."""
    for one in answers:
        report = one.report
        if report is None or one.is_down:
            continue
        for words in report.warnings:
            if not _is_settled(words, one.backend) and not _refuses_key(report, words):
                yield f"{one.path}: {words}"
        yield from (f"{one.path}{words}" for words in _contradictions(one.backend, report))
        yield from (f"{one.path}: {words}" for words in advice(one.backend, report))


async def _ask(backend: Backend) -> EngineReport | None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await probe_once(target_of(backend))
    except TimeoutError:
        return None


def _facts(backend: Backend, report: EngineReport) -> Iterator[str]:
    yield f"{report.engine} {report.version or '(version unknown)'}"
    yield report.state.value
    slots = backend.slots or report.slots
    origin = "as configured" if backend.slots else "assumed" if report.slots_assumed else ""
    if slots is not None:
        yield f"{slots} slot{'' if slots == 1 else 's'}{f' ({origin})' if origin else ''}"
    if report.context_per_slot:
        yield f"{report.context_per_slot} tokens of context each"
    if tokens := backend.kv_tokens or report.kv_tokens:
        yield f"{tokens} tokens of KV cache"
    models = backend.models or tuple(model.id for model in report.models or ())
    yield f"models {' '.join(models) or '(none listed)'}"
    yield f"load: {_load(report)}"


def _load(report: EngineReport) -> str:
    told = [words for name, words in _SIGNALS if getattr(report, name) is not None]
    if told:
        return " + ".join(told)
    if report.engine == "llama-server":
        return "told under traffic only"
    return "not told, so our own count is all there is"


def _unserved(config: Config, served: frozenset[str]) -> Iterator[str]:
    """The names in the config that lead nowhere."""
    for name, alias in config.models.items():
        if not served.intersection(alias.ids):
            yield f"models.{name}.ids: no backend serves any of these; they serve {_list(served)}"
    for path, name in references(config):
        if name not in served and name not in config.models:
            yield f"{path}: no backend serves `{name}`; they serve {_list(served)}"


def _refuses_key(report: EngineReport, words: str | None = None) -> bool:
    """Whether it wants another key than ours; with `words`, whether these say so."""
    said = report.warnings if words is None else (words,)
    return any("(401)" in one for one in said)


def _is_settled(words: str, backend: Backend) -> bool:
    """A warning that asks for a setting is settled once the config has it."""
    return any(
        f"set `{name}`" in words and getattr(backend, name) is not None
        for name in ("slots", "kv_tokens", "models")
    )


def _contradictions(backend: Backend, report: EngineReport) -> Iterator[str]:
    told = None if report.slots_assumed else report.slots
    if (
        backend.slots
        and told
        and backend.slots > told
        and report.engine in {"llama-server", "sglang"}
    ):
        yield f".slots: {backend.slots}, but the engine runs {told} at once; the rest waits inside it"
    listed = {name for model in report.models or () for name in (model.id, *model.aliases)}
    for name in backend.models or ():
        if listed and name not in listed:
            yield f".models: the engine does not list `{name}`; it lists {_list(listed)}"


def _served(answers: Sequence[Answered]) -> frozenset[str] | None:
    """Every id that is served; None when some backend did not say, so that nothing follows."""
    found: set[str] = set()
    for one in answers:
        if one.backend.models is not None:
            found.update(one.backend.models)
        elif one.report is None or one.is_down or one.report.models is None:
            return None
        else:
            found.update(name for model in one.report.models for name in (model.id, *model.aliases))
    return frozenset(found | {name.removesuffix(":latest") for name in found})


def _list(names: set[str] | frozenset[str]) -> str:
    shown = sorted(names)[:8]
    return ", ".join(shown) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
