"""The knobs of the scripted engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Behaviour:
    """How requests without a script are answered, and how the engine is. Change it at any time."""

    ttft_s: float = 0  # from getting a slot to the first token
    itl_s: float = 0
    tokens: int = 5  # at most; a smaller max_tokens of the request wins
    prefill_tokens_per_s: float = (
        0  # 0: prompts cost nothing; else uncached tokens take their time before ttft_s
    )
    headers: str = ""  # at_once | at_start | at_first_token; "": as the kind does it
    cached_tokens: bool = True  # keep and report prompt caches
    cancel_lag_s: float = 0  # how long a slot stays busy after its client has left
    context_per_slot: int = 4096
    kv_tokens: int = 65_536  # what vLLM and SGLang say about their pool
    max_waiting: int | None = None  # more than this inside and not running: the kind's own 503
    api_key: str | None = None  # what this engine wants to see
    loading: bool = False  # 503 "Loading model" on every path (llama-server's way)
    metrics: bool = True  # /metrics is on
    slots_endpoint: bool = True
    sleep_idle_s: float | None = (
        None  # falls asleep after that long without a request that keeps it awake
    )
    wake_s: float = 0
    swap_s: float | None = (
        None  # holds one model at a time; another one costs that long and aborts what runs
    )
    idle_close_s: float | None = None  # closes idle connections after that long
    idle_close_by_rst: bool = False
    reused: str = "serve"  # serve | fin | rst: what a second request on a connection meets, unread and unexecuted
    version: str = "1.0"  # of the engine's software
