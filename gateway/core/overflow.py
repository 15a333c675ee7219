"""The one answer of an engine that is ever changed: its 400 for a prompt that does not fit its context.

Law of this file: only the error's `code` is set; its text and every other field stay as the engine said them. Agents
compact their conversation on this code, and only one engine in four sends it (clients.md section 3, engines.md 1.10
and 3.9).
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from gateway.core.errors import GatewayError

CODE: Final = "context_length_exceeded"
MOST: Final = 65_536  # bytes; a longer answer is no engine's word on this

# llama-server; vLLM (all its wordings speak of the prompt or the messages); SGLang; Ollama and its kin; LM Studio.
_TEXTS: Final = re.compile(
    r"exceeds? the available context size"
    r"|maximum context length is .*(?:prompt|input|messages)"
    r"|longer than (?:the|than the) (?:model'?s )?(?:maximum )?context"
    r"|longer than the maximum model length"
    r"|exceed(?:s|ed)? (?:the |max |maximum |model'?s )*(?:context|allowed) (?:length|window)"
    r"|prompt is too long"
    r"|greater than the context length",
    re.IGNORECASE | re.DOTALL,
)
_TYPES: Final = ("exceed_context_size_error", CODE)


CACHE_FULL: Final = b"Context size has been exceeded"


class CacheFullError(GatewayError):
    """The KV cache that an engine's slots share was full: this stream died, and every other one there (engines.md 0.4)."""


def with_code(body: bytes) -> bytes:
    """The body of a 400 with the code set, if it says that the prompt is too long; else the same bytes."""
    if len(body) > MOST:
        return body
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return body
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict) and isinstance(document, dict) and "message" in document:
        error = document  # SGLang's flat form
    if not isinstance(error, dict) or error.get("code") == CODE or not _is_overflow(error):
        return body
    error["code"] = CODE
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _is_overflow(error: dict[str, Any]) -> bool:
    if error.get("type") in _TYPES:
        return True
    text = error.get("message")
    return isinstance(text, str) and _TEXTS.search(text[:4096]) is not None
