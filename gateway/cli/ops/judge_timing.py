"""What the timed requests mean: is the wait a queue, the prefill or the decode? Pure: an Exam in, findings out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from gateway.cli.ops.exam import Exam
from gateway.cli.ops.finding import Finding
from gateway.cli.ops.judge_engine import cache_off, more_slots
from gateway.cli.ops.percentile import spread
from gateway.cli.ops.streamed import Sample
from gateway.cli.ops.timing import Timing, gaps_within, is_serial

_HALF: Final = 1.6  # times slower per token in company: one after the other would be as fast
_COLD_S: Final = 3.0
_LEAST_TOKENS: Final = (
    256  # of a repeated prompt before a cache must have it (vLLM on a CPU: blocks of 128)
)
_STALL_S: Final = 0.5
_FASTER_PREFILL: Final = {
    "llama-server": "put all layers on the GPU (-ngl 99), use flash attention (-fa on) and a larger -ub",
    "ollama": "see with `ollama ps` that it is on the GPU, and set OLLAMA_FLASH_ATTENTION=1",
    "vllm": "use a faster attention backend or quantisation, or --tensor-parallel-size",
}
_SMALLER_STEPS: Final = {
    "vllm": "start it with --enable-chunked-prefill and a smaller --max-num-batched-tokens (2048)",
    "llama-server": "start it with a smaller -b and -ub (512)",
    "sglang": "start it with a smaller --chunked-prefill-size (2048)",
}


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds that people can live with: to the first token of a prompt of some 500 tokens, and between tokens."""

    ttft_s: float = 2.0
    itl_s: float = 0.1


def judge_timing(exam: Exam, targets: Targets) -> Iterator[Finding]:
    """Nothing when nothing was timed."""
    timing = exam.timing
    if timing is None:
        return
    if timing.failed is not None:
        yield _failure(exam, timing.failed)
        return
    yield from _company(exam)
    yield from _alone(exam, timing, targets)
    if timing.first is not None and timing.second is not None:
        yield from _together(exam, timing, timing.first, timing.second)
    if timing.beside is not None and timing.intruder is not None:
        yield from _stalls(exam, timing, timing.beside, timing.intruder)


def figures(timing: Timing) -> str:
    """The measures in one line."""
    parts = []
    if timing.short is not None and timing.short.ttft_s is not None:
        parts.append(f"first token after {timing.short.ttft_s:.2f} s when idle")
    if timing.second is not None and timing.second.ttft_s is not None:
        parts.append(f"{timing.second.ttft_s:.2f} s beside another")
    if timing.prefill_tokens_per_s:
        parts.append(f"prefill {timing.prefill_tokens_per_s:,.0f} tokens/s")
    if timing.itl_s:
        parts.append(f"decode {1 / timing.itl_s:,.0f} tokens/s")
    return ", ".join(parts)


def _engine(exam: Exam) -> str:
    return exam.report.engine if exam.report else ""


def _failure(exam: Exam, failed: Sample) -> Finding:
    find = partial(Finding, about=exam.backend.name)
    if "maximum pending requests" in failed.detail:
        return find(
            code="ollama_queue",
            seen="it answers 503: server busy, maximum pending requests exceeded",
            means="512 requests (OLLAMA_MAX_QUEUE) already wait in it for a model to load; each will be answered long after "
            "its client has given up",
            change="let clients use the gateway, whose line is short, and set OLLAMA_MAX_QUEUE=16; keep the model loaded with "
            "OLLAMA_KEEP_ALIVE=-1",
            then="`slotgate doctor --probe` gets an answer",
        )
    if failed.error == "refused":
        return find(
            code="engine_full",
            seen=f"it answers 503 {failed.detail}".strip(),
            means="it is full or still loading, without a request of the gateway",
            change="wait until it is idle or loaded; see who else uses it",
            then="`slotgate doctor --probe` gets an answer",
        )
    return find(
        code="probe_failed",
        seen=f"a small request failed: {failed.error} {failed.detail}".strip(),
        means="so will those of people",
        change="read the engine's own log of this moment; see that `models` and `api_key` are right",
        then="`slotgate doctor --probe` gets an answer",
    )


def _company(exam: Exam) -> Iterator[Finding]:
    report = exam.report
    if report is not None and report.running:
        yield Finding(
            code="in_company",
            about=exam.backend.name,
            seen=f"requests of others at work when the probe began: {report.running}",
            means="the figures are those of a busy engine",
            change="run this again when it is idle",
            then="this note is gone",
            wrong=False,
        )


def _alone(exam: Exam, timing: Timing, targets: Targets) -> Iterator[Finding]:
    find = partial(Finding, about=exam.backend.name)
    long, short, engine = timing.long, timing.short, _engine(exam)
    usual = short.ttft_s if short is not None and short.ttft_s is not None else 0.0
    if timing.warm.ttft_s is not None and timing.warm.ttft_s > _COLD_S + 3 * usual:
        yield find(
            code="cold_start",
            seen=f"the first request waited {timing.warm.ttft_s:.1f} s, the next {usual:.2f} s",
            means="the model had to be loaded first",
            change="keep it loaded: OLLAMA_KEEP_ALIVE=-1, or llama-server without --sleep-idle-seconds",
            then="the first request after a pause is as fast as the others",
            wrong=False,
        )
    if long is not None and long.ttft_s is not None and long.ttft_s > targets.ttft_s:
        tokens = f" of {long.usage.prompt_tokens} tokens" if long.usage else ""
        rate = timing.prefill_tokens_per_s
        speed = f", {rate:,.0f} tokens/s" if rate else ""
        faster = _FASTER_PREFILL.get(engine, "put it on a faster device")
        yield find(
            code="slow_prefill",
            seen=f"{long.ttft_s:.1f} s to the first token of a prompt{tokens}, when idle{speed}",
            means="nobody else was there, so this is no queue: the engine is slow at reading prompts, and longer ones take "
            "longer in proportion",
            change=f"shorten prompts and keep their beginnings the same, so that the prefix cache has them; {faster}",
            then=f"`slotgate loadtest {exam.backend.url} --concurrency 1` shows a TTFT below {targets.ttft_s:g} s",
        )
    if timing.itl_s is not None and timing.itl_s > targets.itl_s:
        yield find(
            code="slow_decode",
            seen=f"{1 / timing.itl_s:.1f} tokens a second when alone",
            means="the memory is too slow for this model: every token reads all of its weights",
            change="take a smaller quantisation or model, or put all layers on the GPU (-ngl 99; `ollama ps` says 100% GPU)",
            then=f"`slotgate loadtest {exam.backend.url} --concurrency 1` shows an ITL below {targets.itl_s:g} s",
        )
    yield from _cache(exam, timing)


def _cache(exam: Exam, timing: Timing) -> Iterator[Finding]:
    usage = timing.again.usage if timing.again is not None else None
    if usage is not None and usage.cached_tokens == 0 and usage.prompt_tokens >= _LEAST_TOKENS:
        seen = f"the same prompt of {usage.prompt_tokens} tokens twice: 0 came from the cache"
        yield cache_off(exam, seen)


def _together(exam: Exam, timing: Timing, first: Sample, second: Sample) -> Iterator[Finding]:
    serial = is_serial(first, second)
    if serial:
        yield _one_at_a_time(exam, first, second)
    elif serial is False:
        yield from _shared(exam, timing, first, second)
        yield from _waits(exam, timing, second)


def _one_at_a_time(exam: Exam, first: Sample, second: Sample) -> Finding:
    slots = exam.slots or 1
    left_s = first.ended_s - second.started_s
    said = exam.report is not None and exam.report.slots_assumed and exam.backend.slots is None
    told = "how many it should run is not known" if said else f"it should run {slots} at once"
    return Finding(
        code="one_at_a_time",
        about=exam.backend.name,
        seen=f"of two requests, the second produced nothing for {left_s:.2f} s until the first had ended; {told}",
        means="the parallel setting never took effect: everybody waits for everybody"
        if slots > 1
        else "it runs one request at a time: everybody waits for everybody",
        change=f"{more_slots(_engine(exam), max(2, slots))}; see that the process that listens there has that setting",
        then="`slotgate doctor --probe` no longer finds this",
    )


def _shared(exam: Exam, timing: Timing, first: Sample, second: Sample) -> Iterator[Finding]:
    alone = timing.itl_s
    if alone is None or second.first_s is None:
        return
    until_s = min(first.ended_s, second.ended_s)
    gaps = [gap for one in (first, second) for gap in gaps_within(one, second.first_s, until_s)]
    both = spread(gaps)
    if both is not None and len(gaps) >= 4 and both.p50 >= _HALF * alone:
        yield Finding(
            code="shared_bandwidth",
            about=exam.backend.name,
            seen=f"{1 / alone:.1f} tokens a second alone, {1 / both.p50:.1f} each when there are two",
            means="both do run at once, but they share what the hardware can do: more slots serve more people at the same "
            "time, not more tokens",
            change="set no more `slots` than people can live with; more rate needs a faster device or another backend",
            then=f"`slotgate loadtest {exam.backend.url}` shows where its knee is",
            wrong=False,
        )


def _waits(exam: Exam, timing: Timing, second: Sample) -> Iterator[Finding]:
    idle = timing.short.ttft_s if timing.short is not None else None
    busy = second.ttft_s
    if idle is None or busy is None or busy <= max(4 * idle, idle + 1.0):
        return
    yield Finding(
        code="waits_when_busy",
        about=exam.backend.name,
        seen=f"{idle:.2f} s to the first token when idle, {busy:.2f} s beside one other request",
        means="a slot is free, and the request waits all the same: for the batch of the other, or for those of other clients",
        change=_SMALLER_STEPS.get(_engine(exam), "look for its batch size")
        + "; let clients use the gateway only",
        then="`slotgate doctor --probe` shows two similar times",
    )


def _stalls(exam: Exam, timing: Timing, beside: Sample, intruder: Sample) -> Iterator[Finding]:
    if intruder.first_s is None or timing.itl_s is None:
        return
    longest = max(gaps_within(beside, intruder.started_s, intruder.first_s + 1.0), default=0.0)
    if longest >= max(_STALL_S, 8 * timing.itl_s):
        yield Finding(
            code="prefill_stalls",
            about=exam.backend.name,
            seen=f"a stream stood still for {longest:.2f} s while the prompt of another was read",
            means="long prompts are read in steps that are too long, and everybody's stream waits for each",
            change=_SMALLER_STEPS.get(_engine(exam), "look for its setting of chunked prefill"),
            then="`slotgate loadtest` shows a p99 ITL close to its p50",
            wrong=False,
        )
