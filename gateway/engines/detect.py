"""Which engine is behind a URL: a few cheap questions, judged by the shape of the answers.

The order is that of engines.md section 7 and matters: SGLang and LM Studio imitate Ollama, gateways repeat the
`owned_by` of what is behind them, and LM Studio answers 200 to everything. LM Studio and TGI end as "openai",
which needs nothing that the list of models does not tell; so their own paths are not asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from gateway.engines import llama_server, ollama, openai_generic, sglang, vllm
from gateway.engines.base import Ask, Engine, Seen, unasked

ENGINES: Final[Mapping[str, Engine]] = MappingProxyType(
    {
        module.ENGINE.name: module.ENGINE
        for module in (llama_server, ollama, vllm, sglang, openai_generic)
    }
)
# /health first: llama.cpp signs every answer, and it is free everywhere but on SGLang (a token and a second).
_QUESTIONS: Final = (
    Ask("/health"),
    Ask("/v1/models"),
    Ask("/version"),
    Ask("/metrics"),
    Ask("/api/version"),
    Ask("/model_info"),
)
_ORDER: Final = (llama_server.ENGINE, vllm.ENGINE, ollama.ENGINE, sglang.ENGINE)


def next_question(seen: Seen) -> Ask | None:
    """What to ask next; None: enough is known, or nobody is there.

    /metrics is asked only for what may be a vLLM whose model list wants a key.
    """
    if _is_known(seen) or _is_deaf(seen):
        return None
    skip = "/version" in seen and not _says_version(seen)
    return unasked(seen, *(ask for ask in _QUESTIONS if not (skip and ask.path == "/metrics")))


def verdict(seen: Seen) -> Engine | None:
    """The engine; "openai" when it is none of the others; None when nobody answered."""
    if not any(seen.values()):
        return None
    return next((engine for engine in _ORDER if engine.recognises(seen)), openai_generic.ENGINE)


def is_certain(seen: Seen) -> bool:
    """False when a question went unanswered, so that another engine may hide behind "openai"."""
    return _is_known(seen) or all(answer is not None for answer in seen.values())


def _is_known(seen: Seen) -> bool:
    return any(engine.recognises(seen) for engine in _ORDER)


def _is_deaf(seen: Seen) -> bool:
    """Two questions without any answer: a third will not do better."""
    return len(seen) >= 2 and not any(seen.values())


def _says_version(seen: Seen) -> bool:
    answer = seen.get("/version")
    return answer is not None and answer.status == 200 and b'"version"' in answer.body
