"""The API paths of `spec.md` section 4 that each kind of engine is known to serve.

An engine's own 404 reaches the client as it is, so a path stands here when some build of that engine serves it
(embeddings on vLLM depend on the model it runs, for example). Sources: engines.md 1.2, 2.2, 3.2, 4, 5.
"""

from __future__ import annotations

from typing import Final

_CHAT: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_VECTORS: Final = frozenset({"/v1/embeddings"})
_RANKING: Final = frozenset({"/v1/rerank", "/v1/score"})
_HEARING: Final = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
_MESSAGES: Final = frozenset({"/v1/messages"})
_COUNTING: Final = frozenset({"/v1/messages/count_tokens"})

LLAMA_SERVER: Final = (
    _CHAT
    | _VECTORS
    | _MESSAGES
    | _COUNTING
    | {"/v1/rerank", "/v1/audio/transcriptions"}
    | {"/infill", "/completion", "/tokenize", "/detokenize", "/apply-template", "/props"}
)
OLLAMA: Final = (
    _CHAT
    | _VECTORS
    | _MESSAGES
    | {"/v1/audio/transcriptions"}
    | {"/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"}
    | {"/api/tags", "/api/ps", "/api/version"}
)
VLLM: Final = _CHAT | _VECTORS | _RANKING | _HEARING | _MESSAGES | _COUNTING
SGLANG: Final = VLLM
# Nobody can know what a generic server offers: everything of the OpenAI family, and /v1/messages because
# LM Studio and other gateways speak it. Not count_tokens: the gateway's own estimate beats a 404.
OPENAI: Final = (
    _CHAT
    | _VECTORS
    | _RANKING
    | _HEARING
    | _MESSAGES
    | {"/v1/moderations", "/v1/audio/speech", "/v1/images/generations"}
)
