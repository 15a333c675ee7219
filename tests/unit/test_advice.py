"""Sentences about backends: who may reach them, and how many they serve at once."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cli.advice import advice
from gateway.core.config import Backend, Secret
from gateway.engines.base import EngineReport, State


def said(url: str, engine: str = "llama-server", key: str | None = None, **report: Any) -> str:
    backend = Backend(name="a", url=url, api_key=Secret(key) if key else None)
    fields = {"engine": engine, "state": State.UP, "slots": 2, "context_per_slot": 8192, **report}
    return "\n".join(advice(backend, EngineReport(**fields)))


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8080", "http://localhost:1", "http://[::1]:1/v1"]
)
def test_an_engine_that_only_this_machine_reaches_is_no_matter(url: str) -> None:
    assert said(url) == ""


@pytest.mark.parametrize("url", ["http://10.0.0.7:8080", "http://gpu1:8080", "http://[fd00::7]:1"])
@pytest.mark.parametrize("engine", ["llama-server", "ollama", "vllm", "openai"])
def test_an_engine_without_a_key_that_others_can_reach_is_open_to_them(
    url: str, engine: str
) -> None:
    assert "past the gateway" in said(url, engine)
    assert said(url, engine, key="secret") == ""


def test_a_single_slot_is_told_with_what_to_do() -> None:
    assert "start it with -np 2 or more" in said("http://127.0.0.1:1", slots=1)
    assert "raise `slots`" in said("http://127.0.0.1:1", "sglang", slots=1)
    assert said("http://127.0.0.1:1", "ollama", slots=1, slots_assumed=True) == ""
