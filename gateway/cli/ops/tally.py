"""What one step of a load test came to, and what a row of steps says.

Law of this file: only whole answers count as served, and only they give latencies and tokens. The knee is the least step that
reaches nine tenths of the best rate of generated tokens: beyond it, more slots only add latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from gateway.cli.ops.percentile import Spread, spread
from gateway.cli.ops.streamed import Sample

KNEE_SHARE: Final = 0.9
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The most that was seen of the engine meanwhile. None: it does not say."""

    running: int | None = None
    waiting: int | None = None  # in the engine (deferred, waiting) or in the gateway's line
    kv_used_ratio: float | None = None  # 0..1

    def joined(self, other: Load) -> Load:
        """The larger of each."""
        return Load(
            running=_larger(self.running, other.running),
            waiting=_larger(self.waiting, other.waiting),
            kv_used_ratio=_larger(self.kv_used_ratio, other.kv_used_ratio),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The figures of one step. Times in seconds."""

    level: float  # requests at once, or (open loop) a second
    open_loop: bool
    wall_s: float
    requests: int
    served: int
    slowest_s: float | None
    ttft: Spread | None
    itl: Spread | None
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    cached_share: float | None  # of the prompt tokens; None: the engine does not say
    refused: int  # 503s
    refusal: Spread | None  # how long they took
    errors: dict[str, int]  # how often, by kind
    details: dict[str, str]  # what was said of the first of a kind
    load: Load

    @property
    def label(self) -> str:
        return f"{self.level:g}/s" if self.open_loop else f"{self.level:g}"


def step_of(
    level: float, samples: Sequence[Sample], wall_s: float, load: Load, *, open_loop: bool = False
) -> Step:
    """Count one step."""
    served = [one for one in samples if one.error is None]
    usages = [one.usage for one in served if one.usage is not None]
    cached = [use.cached_tokens for use in usages if use.cached_tokens is not None]
    told = sum(use.prompt_tokens for use in usages if use.cached_tokens is not None)
    wall_s = max(wall_s, 1e-9)
    return Step(
        level=level,
        open_loop=open_loop,
        wall_s=wall_s,
        requests=len(samples),
        served=len(served),
        slowest_s=max((one.seconds for one in served), default=None),
        ttft=spread([one.ttft_s for one in served if one.ttft_s is not None]),
        itl=spread([gap for one in served for gap in one.gaps]),
        prompt_tokens_per_s=sum(use.prompt_tokens for use in usages) / wall_s,
        generated_tokens_per_s=sum(one.generated for one in served) / wall_s,
        cached_share=sum(cached) / told if told else None,
        refused=sum(len(one.refusals) for one in samples),
        refusal=spread([took for one in samples for took in one.refusals]),
        errors=dict(Counter(one.error for one in samples if one.error is not None)),
        details={one.error: one.detail for one in reversed(samples) if one.error is not None},
        load=load,
    )


def meets(step: Step, target_ttft: float | None, target_itl: float | None) -> bool:
    """Everything was served, and the p95s are within the targets."""
    return (
        step.served == step.requests > 0
        and (target_ttft is None or (step.ttft is not None and step.ttft.p95 <= target_ttft))
        and (target_itl is None or step.itl is None or step.itl.p95 <= target_itl)
    )


def knee(steps: Sequence[Step]) -> Step | None:
    """The least step that reaches nine tenths of the best rate; None when nothing was served."""
    best = max((step.generated_tokens_per_s for step in steps), default=0.0)
    good = [step for step in steps if best > 0 and step.generated_tokens_per_s >= KNEE_SHARE * best]
    return min(good, key=lambda step: step.level, default=None)


def advice(
    steps: Sequence[Step], target_ttft: float | None, target_itl: float | None
) -> Iterator[str]:
    """What the steps mean, in sentences."""
    bend = knee(steps)
    if bend is None:
        yield "Nothing was served."
    else:
        yield from _on_targets(steps, target_ttft, target_itl)
        yield from _on_knee(steps, bend)
    for step in steps:
        if step.errors:
            yield f"At {step.label}, {step.requests - step.served} of {step.requests} failed: {_failures(step)}."


def _failures(step: Step) -> str:
    return ", ".join(
        f"{count} x {kind}" + (f" ({step.details[kind]})" if step.details.get(kind) else "")
        for kind, count in sorted(step.errors.items())
    )


def _on_targets(
    steps: Sequence[Step], target_ttft: float | None, target_itl: float | None
) -> Iterator[str]:
    if target_ttft is None and target_itl is None:
        return
    words = " and ".join(
        f"p95 {name} within {target:g} s"
        for name, target in (("TTFT", target_ttft), ("ITL", target_itl))
        if target is not None
    )
    good = [step for step in steps if meets(step, target_ttft, target_itl)]
    if good:
        most = max(good, key=lambda step: step.generated_tokens_per_s)
        least = min(good, key=lambda step: step.level)
        yield (
            f"The smallest that meets the target ({words}): {least.label}. The fastest that does: {most.label}, "
            f"{most.generated_tokens_per_s:.1f} tokens/s."
        )
    else:
        yield f"No step meets the target ({words}): shorten prompts, take a smaller model or add a backend."


def _on_knee(steps: Sequence[Step], bend: Step) -> Iterator[str]:
    rate = f"{bend.generated_tokens_per_s:.1f} generated tokens/s"
    beyond = [step for step in steps if step.level > bend.level and step.slowest_s is not None]
    if not beyond:
        yield f"No knee yet: {bend.label} is the best so far ({rate}); try higher."
        return
    last = max(beyond, key=lambda step: step.level)
    change = last.generated_tokens_per_s / bend.generated_tokens_per_s - 1
    slower = ""
    if bend.slowest_s and last.slowest_s:
        slower = f", and the slowest answer takes {last.slowest_s:.1f} s instead of {bend.slowest_s:.1f} s"
    yield (
        f"The knee is at {bend.label} ({rate}): at {last.label} the rate is {change:+.0%}{slower}. "
        f"More than {bend.label} at once only adds latency."
    )


def _larger(one: _Number | None, other: _Number | None) -> _Number | None:
    return max((value for value in (one, other) if value is not None), default=None)
