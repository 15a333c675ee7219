"""What an engine's own answers mean (engines.md: 0.4, 1.4, 1.5, 2.4, 2.5, 3.4). Pure: an Exam in, findings out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from gateway.cli.ops.exam import Exam
from gateway.cli.ops.finding import Finding
from gateway.engines.base import EngineReport, State, refuses_key
from gateway.engines.body import count, objects
from gateway.engines.prom_text import exposition, labels, series

SMALL_CONTEXT: Final = 4096  # tokens; the tools of a coding agent alone take more
FULL: Final = 0.9
_MANY_TOKENS: Final = 20_000
_MORE_SLOTS: Final = {
    "llama-server": "start it with --parallel {n} and a -c that is {n} times the context",
    "ollama": "set OLLAMA_NUM_PARALLEL={n} for the service and restart it",
    "vllm": "start it with --max-num-seqs {n}",
    "sglang": "start it with --max-running-requests {n}",
}
_LARGER_CONTEXT: Final = {
    "llama-server": "start it with a larger -c: its slots share it out",
    "ollama": "set OLLAMA_CONTEXT_LENGTH=8192; it cuts longer prompts without a word",
    "vllm": "start it with a larger --max-model-len",
    "sglang": "start it with a larger --context-length",
}


def more_slots(engine: str, slots: int) -> str:
    """The setting by which this kind of engine runs so many requests at once."""
    return _MORE_SLOTS.get(engine, "look for its setting of parallel requests, and set {n}").format(
        n=slots
    )


def judge_engine(exam: Exam) -> Iterator[Finding]:
    """All that can be said without sending a request."""
    if exam.report is None or exam.report.state is State.DOWN:
        yield _down(exam)
        return
    if refuses_key(exam.seen):
        yield _refuses(exam)
    report = exam.report
    yield from _load(exam, report)
    yield from _room(exam, report)
    yield from {"llama-server": _llama, "vllm": _vllm, "ollama": _ollama}.get(
        report.engine, _nothing
    )(exam, report)
    yield from _open(exam, report)


def _down(exam: Exam) -> Finding:
    return Finding(
        code="down",
        about=exam.backend.name,
        seen=f"{exam.backend.url}: {exam.silence}",
        means="no request can go there",
        change="start the engine, or correct `url` in the config",
        then="`slotgate check` prints its models",
    )


def _refuses(exam: Exam) -> Finding:
    return Finding(
        code="refuses_key",
        about=exam.backend.name,
        seen="it answers 401 to our key",
        means="requests will fail, and its slots and load cannot be read",
        change="set `api_key` of this backend to the key that the engine was started with",
        then="run this again: the warning is gone",
    )


def _load(exam: Exam, report: EngineReport) -> Iterator[Finding]:
    find = partial(Finding, about=exam.backend.name)
    if report.waiting:
        running = "" if report.running is None else f", running: {report.running}"
        yield find(
            code="engine_queue",
            seen=f"requests waiting inside the engine: {report.waiting}{running}",
            means="it gets more than it has slots for: from clients that go past the gateway, or by a `slots` that is too "
            "large. Nobody can refuse, reorder or cancel what waits in there",
            change=f"let clients use the gateway only, and set `slots: {report.slots or report.running or 1}` or `auto`",
            then="`slotgate status` shows 0 waiting in the engine under load",
        )
    if report.kv_used_ratio is not None and report.kv_used_ratio >= FULL:
        yield find(
            code="kv_full",
            seen=f"{report.kv_used_ratio:.0%} of the KV cache is in use",
            means="the next longer prompt waits for room, or pushes another one out",
            change="set a smaller `slots` for this backend, or give the engine more room or an 8-bit KV cache",
            then="`slotgate status` shows less than 90 % at the same number of requests",
        )
    told = None if report.slots_assumed else report.slots
    if exam.backend.slots and told and exam.backend.slots > told and report.engine != "vllm":
        yield find(
            code="too_many_slots",
            seen=f"`slots: {exam.backend.slots}` in the config, and the engine has {told}",
            means="the rest waits inside the engine, where it cannot be cancelled",
            change=f"set `slots: auto`, or {more_slots(report.engine, exam.backend.slots)}",
            then="`slotgate check` prints the same number from both",
        )


def _room(exam: Exam, report: EngineReport) -> Iterator[Finding]:
    find = partial(Finding, about=exam.backend.name)
    tokens = report.context_per_slot
    if tokens is not None and tokens < SMALL_CONTEXT:
        yield find(
            code="small_context",
            seen=f"{tokens:,} tokens of context in each of {report.slots or 1} slots",
            means="longer prompts are refused or cut; the tools of a coding agent alone take more",
            change=_LARGER_CONTEXT.get(report.engine, "raise its context length"),
            then="`slotgate check` prints at least 4096 tokens of context each",
        )
    if report.state is State.SLEEPING:
        yield find(
            code="asleep",
            seen="the engine has put its model to sleep",
            means="the next request waits until it is loaded again",
            change="start llama-server with a longer --sleep-idle-seconds, or without",
            then="`slotgate status` shows `up` after a pause",
            wrong=False,
        )
    if report.swaps:
        yield from _swaps(exam, report)


def _swaps(exam: Exam, report: EngineReport) -> Iterator[Finding]:
    listed = report.models or ()
    offered = [one for one in listed if not exam.backend.models or one.id in exam.backend.models]
    loaded = sum(one.loaded is True for one in offered)
    if loaded < len(offered) and len(offered) > 1:
        yield Finding(
            code="model_swaps",
            about=exam.backend.name,
            seen=f"{len(offered)} models are offered and {loaded} of them loaded",
            means="a request for another one waits for its load, and may push out the one in use, with its cache",
            change="list under `models` of this backend what fits together, raise OLLAMA_MAX_LOADED_MODELS (--models-max of "
            "a llama-server router), or give each model a backend of its own",
            then="`slotgate status` shows the same models loaded an hour later",
            wrong=False,
        )


def _llama(exam: Exam, report: EngineReport) -> Iterator[Finding]:
    find = partial(Finding, about=exam.backend.name)
    if report.kv_shared and exam.backend.kv_tokens is None:
        yield find(
            code="unified_kv",
            seen=f"{report.slots} slots over one KV cache of {report.kv_tokens:,} tokens",
            means="when what runs there outgrows it together, all streams die in the middle",
            change=f"start it with --parallel {report.slots} so that each slot has its own, or set `kv_tokens: {report.kv_tokens}`",
            then="`slotgate check` no longer warns of a shared cache",
        )
    computed = (report.prompt_tokens or 0) - (report.cached_tokens or 0)
    if report.cached_tokens == 0 and computed >= _MANY_TOKENS:
        yield cache_off(exam, f"none of {computed:,} prompt tokens came from the cache")
    if any("without --metrics" in words for words in report.warnings):
        yield find(
            code="metrics_off",
            seen="/metrics answers 501",
            means="whether requests wait inside the engine, and how much comes from its cache, cannot be seen",
            change="start it with --metrics",
            then="run this again: the note is gone",
            wrong=False,
        )


def _vllm(exam: Exam, report: EngineReport) -> Iterator[Finding]:
    if report.preemptions:
        yield Finding(
            code="preempting",
            about=exam.backend.name,
            seen=f"{report.preemptions:,} preemptions since its start",
            means="its KV cache is too small for what it runs: it throws requests out half-way and computes them again",
            change="start it with a smaller --max-num-seqs or --max-model-len, a larger --gpu-memory-utilization, or "
            "--kv-cache-dtype fp8; or set a smaller `slots` here",
            then="`vllm:num_preemptions_total` stands still under load",
        )
    text = exposition(exam.seen.get("/metrics"))
    for raw, _ in series(text, "vllm:cache_config_info"):
        if labels(raw).get("enable_prefix_caching") == "False":
            yield cache_off(exam, "`enable_prefix_caching` is False in its /metrics")
            return


def cache_off(exam: Exam, seen: str) -> Finding:
    engine = exam.report.engine if exam.report else ""
    change = {
        "llama-server": "start it without --no-cache-prompt and with a --cache-ram above 0",
        "vllm": "start it with --enable-prefix-caching",
        "sglang": "start it without --disable-radix-cache",
    }.get(engine, "switch its prefix cache on")
    return Finding(
        code="cache_off",
        about=exam.backend.name,
        seen=seen,
        means="every turn of a conversation is read from its beginning; the time to the first token grows with its length",
        change=change,
        then="`slotgate loadtest URL --agents` shows a cached share above 50 %",
    )


def _ollama(exam: Exam, report: EngineReport) -> Iterator[Finding]:
    find = partial(Finding, about=exam.backend.name)
    for row in objects(report.documents.get("/api/ps", {}).get("models")):
        size, on_gpu = count(row.get("size"), least=1), count(row.get("size_vram"))
        if size is not None and on_gpu is not None and on_gpu < size:
            yield find(
                code="partly_on_cpu",
                seen=f"{row.get('name')}: {on_gpu / size:.0%} of {size / 1e9:.1f} GB is on the GPU",
                means="the rest is computed by the processor, which slows every token down several times",
                change="take a smaller quantisation, a smaller OLLAMA_CONTEXT_LENGTH or OLLAMA_NUM_PARALLEL, or "
                "OLLAMA_KV_CACHE_TYPE=q8_0",
                then="`ollama ps` says 100% GPU",
            )
    if exam.backend.slots is None and exam.timing is None:
        yield find(
            code="slots_assumed",
            seen="Ollama does not say how many requests it runs at once",
            means="1 is assumed, so one at a time is sent to it",
            change="set `slots` of this backend to the service's OLLAMA_NUM_PARALLEL; `slotgate doctor --probe` tells whether "
            "it runs two at once",
            then="`slotgate check` prints the slots as configured",
            wrong=False,
        )


def _open(exam: Exam, report: EngineReport) -> Iterator[Finding]:
    lock = {
        "ollama": "set OLLAMA_HOST=127.0.0.1, or let a firewall allow only the gateway",
    }.get(
        report.engine,
        "start it with --host 127.0.0.1, or with --api-key and `api_key` here, or let a firewall allow only the gateway",
    )
    for one in exam.openings:
        if one.chat:
            yield Finding(
                code="open_engine",
                about=exam.backend.name,
                seen=f"it takes requests at {one.address} without a key",
                means="whoever reaches that address uses it past the gateway: no keys, no queue, no fairness",
                change=lock,
                then="run this again from here and from another machine",
            )
        if one.pages:
            yield Finding(
                code="open_pages",
                about=exam.backend.name,
                seen=f"{', '.join(one.pages)} at {one.address} need no key",
                means="others see what runs there; and who asks llama-server's /slots every second keeps it from noticing "
                "that clients have left",
                change=lock,
                then="those pages answer 401 there, or not at all",
                wrong=one.pages != ("/metrics",),
            )


def _nothing(_exam: Exam, _report: EngineReport) -> Iterator[Finding]:
    yield from ()
