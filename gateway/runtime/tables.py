"""The families of what `Metrics` counts. What other parts own is in `runtime.gauges`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gateway.runtime.families import Family, Histogram, Rows
from gateway.runtime.metrics import WINDOWS, Metrics, Series

MODEL, BACKEND, BOTH = ("model",), ("backend",), ("model", "backend")


def families(metrics: Metrics) -> list[Family]:
    """All of them, in the order in which they are told."""
    return [
        *_requests(metrics),
        *_tokens(metrics),
        *_routing(metrics),
        *_histograms(metrics),
        *_quantiles(metrics),
    ]


def _table(values: Mapping[Any, float]) -> Callable[[], Rows]:
    return lambda: list(values.items())


def _by_backend(values: Mapping[str, float]) -> Callable[[], Rows]:
    return lambda: [((name,), value) for name, value in values.items()]


def _requests(metrics: Metrics) -> Iterator[Family]:
    yield Family(
        "requests",
        "Requests on generation and embedding paths, by how they ended.",
        ("model", "outcome"),
        _table(metrics.requests),
        "counter",
    )
    yield Family(
        "key_requests",
        "Relayed requests of each key, and those refused on any path, by how they ended.",
        ("key", "outcome"),
        _table(metrics.key_requests),
        "counter",
    )
    yield Family(
        "shed",
        "Requests answered 503 because nothing could take them.",
        ("model", "reason"),
        _table(metrics.shed),
        "counter",
    )


def _tokens(metrics: Metrics) -> Iterator[Family]:
    series = metrics.all_series

    def each(read: Callable[[Series], int]) -> Callable[[], Rows]:
        return lambda: [(labels, read(one)) for labels, one in series.items()]

    yield Family(
        "key_tokens",
        "Tokens of each key: prompt (of which cached) and generated.",
        ("key", "kind"),
        _table(metrics.key_tokens),
        "counter",
    )
    yield Family(
        "prompt_tokens",
        "Prompt tokens, cached ones included, as engines report them.",
        BOTH,
        each(lambda s: s.prompt_tokens),
        "counter",
    )
    yield Family(
        "cached_prompt_tokens",
        "Prompt tokens that the engine had cached, as it reports them.",
        BOTH,
        each(lambda s: s.cached_tokens),
        "counter",
    )
    yield Family(
        "generated_tokens",
        "Generated tokens as engines report them; content events where they do not.",
        BOTH,
        each(lambda s: s.generated_tokens),
        "counter",
    )


def _routing(metrics: Metrics) -> Iterator[Family]:
    yield Family(
        "affinity",
        "Where requests went: to the backend that holds most of their prefix (hit), elsewhere though one holds it "
        "(moved), nobody holds it (miss), or there is no prefix to speak of (none).",
        ("result",),
        _table(metrics.affinity),
        "counter",
    )
    yield Family(
        "affinity_predicted_tokens",
        "Prompt tokens that we expected to be cached; only requests whose engine reports what was.",
        BACKEND,
        _by_backend(metrics.affinity_predicted),
        "counter",
    )
    yield Family(
        "affinity_cached_tokens",
        "Prompt tokens of the same requests that were cached, as the engine reports.",
        BACKEND,
        _by_backend(metrics.affinity_cached),
        "counter",
    )
    yield Family(
        "retries",
        "Further attempts, by the backend that did not take the request.",
        ("backend", "reason"),
        _table(metrics.retries),
        "counter",
    )
    yield Family(
        "backend_errors",
        "Faults of each backend.",
        ("backend", "kind"),
        _table(metrics.backend_errors),
        "counter",
    )


def _histograms(metrics: Metrics) -> Iterator[Family]:
    series = metrics.all_series

    def each(read: Callable[[Series], Histogram]) -> Callable[[], Rows]:
        return lambda: [(labels, read(one)) for labels, one in series.items()]

    yield Family(
        "ttft_seconds",
        "From the whole request received to the first event with generated content; streams only.",
        BOTH,
        each(lambda s: s.ttft),
        "histogram",
    )
    yield Family(
        "itl_seconds",
        "Between events with generated content; a read that carries k of them is k gaps of 1/k.",
        BOTH,
        each(lambda s: s.itl),
        "histogram",
    )
    yield Family(
        "request_seconds",
        "From the whole request received to the last byte of a served answer.",
        BOTH,
        each(lambda s: s.request),
        "histogram",
    )
    yield Family(
        "queue_wait_seconds",
        "Waiting for a slot, of requests that got one.",
        MODEL,
        lambda: [((model,), one) for model, one in metrics.queue_wait.items()],
        "histogram",
    )
    yield Family(
        "affinity_idle_seconds",
        "How long a free slot was kept from a waiting request that is better off on its warm backend.",
        (),
        lambda: [((), metrics.affinity_idle)],
        "histogram",
    )


def _quantiles(metrics: Metrics) -> Iterator[Family]:
    """`all` is every model together."""
    for what, text in (("ttft", "time to first token"), ("itl", "inter-token latency")):
        yield Family(
            f"{what}_p95_seconds",
            f"p95 of the {text} over the last one and five minutes; `all` is every model together.",
            ("model", "window"),
            _p95_of(metrics, what),
            fold="drop",
        )


def _p95_of(metrics: Metrics, what: str) -> Callable[[], Rows]:
    def rows() -> Rows:
        for model, group in metrics.groups():
            for window, seconds in WINDOWS.items():
                if (value := metrics.quantile(what, group, seconds)) is not None:
                    yield (model, window), value

    return rows
