"""`slotgate check` in front of every kind of engine: what it found, and what that means."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli.check import check
from tests.fakes.behaviour import Behaviour
from tests.fakes.engine import FakeEngine
from tests.fakes.running import in_loop


async def told(folder: Path, engine: FakeEngine, more: str = "") -> str:
    """What it prints; it must find nothing wrong."""
    file = folder / "c.yaml"
    file.write_text(f"backends:\n  - {{name: gpu, url: '{engine.url}'{more}}}\n")
    result = await asyncio.to_thread(CliRunner().invoke, check, [str(file)])
    assert result.exit_code == 0, result.output
    return result.stdout


FOUND: dict[str, tuple[str, ...]] = {
    "llama-server": ("gpu: llama-server b1.0, up, 2 slots, 8192 tokens of context each",),
    "llama-router": ("gpu: llama-server", "assuming 4 slots, set `slots`"),
    "vllm": ("gpu: vllm 1.0, up, 8 slots,", "estimated by its KV cache, set `slots`"),
    "sglang": ("gpu: sglang", "2 slots", "load: running + waiting + KV cache in use"),
    "ollama": ("gpu: ollama 1.0, up, 1 slot (assumed)", "assuming 1, set `slots`"),
    "openai": ("gpu: openai", "4 slots (assumed)", "our own count is all there is"),
}


@pytest.mark.parametrize("kind", FOUND)
@in_loop
async def test_every_kind_of_engine_is_recognised_and_its_guesses_are_called_guesses(
    kind: str, tmp_path: Path
) -> None:
    async with FakeEngine(kind, behaviour=Behaviour(context_per_slot=8192)) as engine:
        text = await told(tmp_path, engine)
    assert "models m" in text
    for words in FOUND[kind]:
        assert words in text, text


@pytest.mark.parametrize(
    ("kind", "slots", "behaviour", "words"),
    [
        ("llama-server", 1, Behaviour(), "it answers one request at a time, everybody else waits;"),
        (
            "llama-server",
            2,
            Behaviour(context_per_slot=2048),
            "each slot has a context of only 2,048 tokens; longer prompts are refused; start it with a larger -c",
        ),
        (
            "ollama",
            1,
            Behaviour(context_per_slot=2048),
            "it has a context of only 2,048 tokens; longer prompts are cut without a word",
        ),
        ("llama-server", 2, Behaviour(metrics=False), "runs without --metrics"),
        ("llama-server", 2, Behaviour(slots_endpoint=False), "runs without --slots"),
        ("llama-server", 4, Behaviour(), "then set `kv_tokens: 4096`"),
        ("llama-server", 2, Behaviour(loading=True), "it is loading and will serve later"),
        ("llama-server", 2, Behaviour(sleep_idle_s=-1.0), "it sleeps; its next request waits"),
    ],
)
@in_loop
async def test_what_people_would_notice_is_said_in_their_words(
    kind: str, slots: int, behaviour: Behaviour, words: str, tmp_path: Path
) -> None:
    async with FakeEngine(kind, slots=slots, behaviour=behaviour) as engine:
        text = await told(tmp_path, engine)
    warnings = [line for line in text.splitlines() if "warning: backends[0]: " in line]
    assert [line for line in warnings if words in line], text


@in_loop
async def test_nothing_is_said_of_what_is_as_it_should_be_or_was_settled(tmp_path: Path) -> None:
    async with FakeEngine(slots=4, behaviour=Behaviour(context_per_slot=8192)) as engine:
        text = await told(tmp_path, engine, ", kv_tokens: 8192")
    assert [line for line in text.splitlines() if "backends[0]" in line] == []
