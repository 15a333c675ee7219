"""What to type and to write for a number of slots: the engine's command, and the gateway's config.

Flags: engines.md 1.5 (`-c` is shared out among the slots), 2.4 (OLLAMA_NUM_PARALLEL is 1 by default), 3.5.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

ENGINES: Final = ("llama-server", "ollama", "vllm")
_PORT: Final = {"llama-server": 8080, "ollama": 11434, "vllm": 8000}
_OLLAMA_CACHES: Final = ("q8_0", "q4_0")  # others than f16
_UTILIZATION: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the recipes are for. `model`: as it is typed; `context`: tokens of one slot."""

    model: str
    slots: int
    context: int
    cache: str


def command(engine: str, setup: Setup) -> str:
    """The engine's command, or for Ollama its systemd drop-in."""
    return {"llama-server": _llama_server, "ollama": _ollama, "vllm": _vllm}[engine](setup)


def config(engine: str, setup: Setup) -> str:
    """The matching section of a Slotgate config."""
    lines = [
        "backends:",
        "  - name: gpu1",
        f"    url: http://127.0.0.1:{_PORT[engine]}",
        f"    engine: {engine}",
        f"    slots: {setup.slots}",
    ]
    return "\n".join([*lines, "admission:", f"  queue: {setup.slots}", ""])


def _llama_server(setup: Setup) -> str:
    words = ["llama-server", "-m", setup.model, "--parallel", str(setup.slots)]
    words += ["-c", str(setup.slots * setup.context), "--metrics"]
    if setup.cache not in ("f16", "fp8"):
        words += ["-fa", "on", "--cache-type-k", setup.cache, "--cache-type-v", setup.cache]
    return shlex.join(words)


def _vllm(setup: Setup) -> str:
    words = ["vllm", "serve", setup.model, "--max-num-seqs", str(setup.slots)]
    words += ["--max-model-len", str(setup.context), "--gpu-memory-utilization", str(_UTILIZATION)]
    if setup.cache in ("fp8", "q8_0"):
        words += ["--kv-cache-dtype", "fp8"]
    return shlex.join([*words, "--enable-prompt-tokens-details"])


def _ollama(setup: Setup) -> str:
    return "\n".join(["# systemctl edit ollama", "[Service]", *_environment(setup)])


def _environment(setup: Setup) -> Iterator[str]:
    yield f'Environment="OLLAMA_NUM_PARALLEL={setup.slots}"'
    yield f'Environment="OLLAMA_CONTEXT_LENGTH={setup.context}"'
    if setup.cache in _OLLAMA_CACHES:
        yield 'Environment="OLLAMA_FLASH_ATTENTION=1"'
        yield f'Environment="OLLAMA_KV_CACHE_TYPE={setup.cache}"'
