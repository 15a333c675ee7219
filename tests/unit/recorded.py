"""Recorded answers of engines (tests/data/samples), as the bytes of their bodies."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.core.wire import Wire

SAMPLES = Path(__file__).parent.parent / "data" / "samples"

STREAMS = {
    "llama-server/chat_stream.http": Wire.CHAT,
    "llama-server/chat_stream_midstream_error_kv_full.http": Wire.CHAT,
    "llama-server/chat_stream_nousage.http": Wire.CHAT,
    "llama-server/chat_stream_sse_ping_interval1.http": Wire.CHAT,
    "llama-server/chat_stream_timings.http": Wire.CHAT,
    "llama-server/completions_stream.http": Wire.COMPLETIONS,
    "llama-server/messages_stream.http": Wire.MESSAGES,
    "llama-server/responses_stream.http": Wire.RESPONSES,
    "ollama/api_chat_stream.constructed.ndjson": Wire.OLLAMA_NDJSON,
    "ollama/api_chat_stream_midstream_error.constructed.ndjson": Wire.OLLAMA_NDJSON,
    "ollama/v1_chat_stream.constructed.sse": Wire.CHAT,
    "ollama/v1_chat_stream_midstream_error.constructed.sse": Wire.CHAT,
    "sglang/err_503_queue_full_stream.constructed.sse": Wire.CHAT,
    "vllm/chat_stream.http": Wire.CHAT,
    "vllm/chat_stream_continuous_usage.http": Wire.CHAT,
    "vllm/completions_stream.http": Wire.COMPLETIONS,
    "vllm/messages_stream.http": Wire.MESSAGES,
    "vllm/responses_stream.http": Wire.RESPONSES,
}


def body_of(sample: str) -> bytes:
    """The body of a recorded answer; chunked framing, where it was recorded, is taken off."""
    recorded = (SAMPLES / sample).read_bytes()
    if not sample.endswith(".http"):
        return recorded
    body = recorded.partition(b"\r\n\r\n")[2]
    # By its lines, not its lengths: the model's path was shortened in the recording.
    chunk = rb"(?:^|\r\n)[0-9a-f]+\r\n"
    return re.sub(chunk, b"", body) if re.match(chunk, body) else body
