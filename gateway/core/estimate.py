"""How many tokens a prompt has, where no engine can be asked: a stated guess."""

from __future__ import annotations

from typing import Final

from gateway.core.fleet import BYTES_PER_TOKEN
from gateway.core.request import ParsedRequest

LEAST: Final = 1


def estimated_tokens(request: ParsedRequest) -> int:
    """By the size of the prompt, images at a flat rate. A real tokenizer differs by up to a third either way."""
    return max(LEAST, round(request.prompt_bytes / BYTES_PER_TOKEN))
