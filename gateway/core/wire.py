"""The wires: the forms in which a path's request and answer are written."""

from __future__ import annotations

from enum import StrEnum


class Wire(StrEnum):
    """What a path speaks. It decides how a prompt, a stream event and a usage record are read."""

    CHAT = "chat"  # /v1/chat/completions
    COMPLETIONS = "completions"  # /v1/completions
    RESPONSES = "responses"  # /v1/responses
    MESSAGES = "messages"  # /v1/messages
    OLLAMA_NDJSON = "ollama_ndjson"  # /api/chat, /api/generate
    NATIVE = "native"  # llama-server's /completion and /infill
    JSON = "json"  # one JSON document each way: embeddings, rerank, tokenize, count_tokens…
