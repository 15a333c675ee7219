"""Every recorded answer: what each reader takes from it, and that it takes nothing from all others."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.engines.base import Answer, Look
from gateway.engines.body import document_of, listed_models
from gateway.engines.detect import ENGINES, next_question, verdict
from gateway.engines.llama_load import load_of
from gateway.engines.sglang import ENGINE as SGLANG
from gateway.engines.vllm import ENGINE as VLLM
from tests.unit.engines.talk import OK, SAMPLES, sample

FILES = sorted(
    str(path.relative_to(SAMPLES))
    for path in SAMPLES.rglob("*")
    if path.is_file() and path.name != "README.txt"
)
GGUF = "/models/SmolLM2-135M-Instruct.Q4_1.gguf"
EXPECTED: dict[str, dict[str, Any]] = {
    "llama-server/models.http": {"models": [GGUF]},
    "llama-server/models_noauth.http": {"models": [GGUF]},
    "llama-server/models_alias.http": {"models": ["smol"]},
    "llama-server/router_models.http": {"models": ["smol-a", "smol-b"]},
    "llama-server/router_models_loaded.http": {"models": ["smol-a", "smol-b"]},
    "llama-server/props.http": {"total_slots": 2},
    "llama-server/props_sleeping.json": {"total_slots": 1},
    "llama-server/router_props.http": {"role": "router"},
    "llama-server/router_props_model.http": {"total_slots": 2},
    "llama-server/slots_idle.http": {"idle": 2, "running": 0},
    "llama-server/fail_on_no_slot_idle.http": {"idle": 2, "running": 0},
    "llama-server/slots_busy_decoding.json": {"idle": 0, "running": 1},
    "llama-server/router_slots_loaded.http": {"idle": 2, "running": 0},
    "llama-server/metrics.http": {"deferred": 0, "processing": 0},
    "llama-server/metrics_busy_deferred.txt": {"deferred": 1, "processing": 1},
    "llama-server/metrics_sleeping.http": {"deferred": 0, "processing": 0},
    "llama-server/router_metrics_loaded.http": {"deferred": 0, "processing": 0},
    "llama-server/router_metrics_unloaded.http": {"deferred": 0, "processing": 0},
    "ollama/api_version.constructed.json": {"version": "0.31.0"},
    "ollama/v1_models.constructed.json": {"models": ["llama3.2:latest"]},
    "ollama/v1_models_empty.constructed.json": {"models": []},
    "sglang/metrics.constructed.txt": {"sglang_running": 3},
    "sglang/v1_loads.constructed.json": {"version": "0.5.23", "sglang_running": 3},
    "vllm/version.http": {"version": "0.32.0"},
    "vllm/models.http": {"models": ["smollm2"]},
    "vllm/metrics_idle.http": {"vllm_running": 0},
    "vllm/metrics_busy.txt": {"vllm_running": 4},
    "vllm/metrics_idle_after.txt": {"vllm_running": 0},
}


def _facts(answer: Answer) -> dict[str, Any]:
    """What every reader makes of this answer, whichever question it was meant for."""
    document = document_of(answer)
    models = listed_models(answer)
    slots, metrics = load_of(answer, None), load_of(None, answer)
    loads = {"/v1/loads?include=core": answer}
    found = {
        "models": None if models is None else [model.id for model in models],
        "total_slots": document.get("total_slots"),
        "role": document.get("role") if document.get("role") == "router" else None,
        "version": document.get("version"),
        "idle": slots.idle_slots,
        "running": slots.running,
        "processing": metrics.running,
        "deferred": metrics.waiting,
        "vllm_running": VLLM.read({"/health": OK, "/metrics": answer}, None).running,
        "sglang_running": SGLANG.read(
            loads | {"/model_info": OK, "/metrics": answer}, None
        ).running,
    }
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("name", FILES)
def test_a_recorded_answer_gives_what_it_holds_and_nothing_else(name: str) -> None:
    assert _facts(sample(name)) == EXPECTED.get(name, {})


def test_every_expectation_has_its_recording() -> None:
    assert set(EXPECTED) <= set(FILES)
    assert len(FILES) > 100


@pytest.mark.parametrize("name", FILES)
def test_no_recorded_answer_breaks_any_engine_whatever_it_was_asked(name: str) -> None:
    answer = sample(name)
    for engine in ENGINES.values():
        seen: dict[str, Answer | None] = {}
        while (ask := engine.next_ask(seen, Look(weigh=True))) is not None:
            seen[ask.path] = answer
        report = engine.read(seen, None)

        assert report.engine == engine.name
        assert report.slots is None or report.slots >= 1


@pytest.mark.parametrize("name", FILES)
def test_detection_ends_with_any_recorded_answer_to_every_question(name: str) -> None:
    seen: dict[str, Answer | None] = {}
    while (ask := next_question(seen)) is not None:
        seen[ask.path] = sample(name)

    assert verdict(seen) is not None
    assert len(seen) <= 6
