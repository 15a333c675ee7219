"""`slotgate check` with backends that answer, refuse or are not there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from click.testing import CliRunner, Result

from gateway.cli.check import check
from tests.fakes.engine import FakeEngine
from tests.fakes.running import in_loop

DEAD = "http://127.0.0.1:1"


def entry(name: str, url: str, extra: str = "") -> str:
    return f"  - {{name: {name}, url: '{url}'{extra}}}\n"


async def checked(tmp_path: Path, backends: Sequence[str], rest: str = "") -> Result:
    file = tmp_path / "c.yaml"
    file.write_text("backends:\n" + "".join(backends) + rest)
    return await asyncio.to_thread(CliRunner().invoke, check, [str(file)])


@in_loop
async def test_each_backend_is_one_line_with_engine_slots_context_and_models(
    tmp_path: Path,
) -> None:
    async with FakeEngine("llama-server", slots=2) as llama, FakeEngine("ollama") as ollama:
        result = await checked(tmp_path, [entry("a", llama.url), entry("b", ollama.url)])
    assert result.exit_code == 0, result.output
    lines = {line.split(":")[0]: line for line in result.stdout.splitlines()}
    assert "llama-server" in lines["a"]
    assert "up, 2 slots, 4096 tokens of context each" in lines["a"]
    assert "models m" in lines["a"]
    assert "1 slot (assumed)" in lines["b"]
    warning = "backends[1]: Ollama does not say how many requests it runs at once; assuming 1, set `slots`"
    assert f"warning: {warning}" in result.stdout


@in_loop
async def test_a_warning_is_gone_once_the_config_has_the_setting(tmp_path: Path) -> None:
    async with FakeEngine("ollama") as ollama:
        result = await checked(tmp_path, [entry("b", ollama.url, ", slots: 3")])
    assert result.exit_code == 0
    assert "3 slots (as configured)" in result.stdout
    assert "set `slots`" not in result.stdout


@in_loop
async def test_a_dead_backend_and_a_refused_key_are_wrong(tmp_path: Path) -> None:
    async with FakeEngine("llama-server") as engine:
        engine.behaviour.api_key = "right"
        result = await checked(
            tmp_path, [entry("a", engine.url, ", api_key: canary-key"), entry("b", DEAD)]
        )
    assert result.exit_code == 1
    assert "c.yaml: backends[0].api_key: the backend refuses it (401)" in result.stdout
    assert f"c.yaml: backends[1].url: {DEAD}: " in result.stdout
    assert "canary-key" not in result.output


@in_loop
async def test_names_that_lead_to_no_model_are_wrong(tmp_path: Path) -> None:
    rest = (
        "models: {a: {ids: [m], fallback: zz}, b: {ids: [yy]}, c: {ids: [m], fallback: a}}\n"
        "default_model: xx\n"
    )
    async with FakeEngine("vllm") as engine:
        result = await checked(tmp_path, [entry("a", engine.url, ", slots: 2")], rest)
    wrong = [
        line.partition("c.yaml: ")[2] for line in result.stdout.splitlines() if "no backend" in line
    ]
    assert wrong == [
        "models.b.ids: no backend serves any of these; they serve m",
        "default_model: no backend serves `xx`; they serve m",
        "models.a.fallback: no backend serves `zz`; they serve m",
    ]
    assert result.exit_code == 1


@in_loop
async def test_a_config_that_contradicts_its_engine_is_warned_of(tmp_path: Path) -> None:
    async with FakeEngine("llama-server", slots=2) as engine:
        result = await checked(tmp_path, [entry("a", engine.url, ", slots: 5, models: [q]")])
    assert result.exit_code == 0
    assert "backends[0].slots: 5, but the engine runs 2 at once" in result.stdout
    assert "backends[0].models: the engine does not list `q`; it lists m" in result.stdout


@in_loop
async def test_a_check_asks_nothing_that_weighs_or_wakes(tmp_path: Path) -> None:
    async with FakeEngine("llama-server") as engine:
        await checked(tmp_path, [entry("a", engine.url)])
        asked = set(engine.calls)
    assert "/props" in asked
    assert not asked & {"/slots", "/metrics"}
    assert engine.requests == []


@in_loop
async def test_a_loading_backend_is_a_warning_and_not_wrong(tmp_path: Path) -> None:
    async with FakeEngine("llama-server") as engine:
        engine.behaviour.loading = True
        result = await checked(tmp_path, [entry("a", engine.url)], "default_model: m\n")
    assert result.exit_code == 0, result.output
    assert "warning: backends[0]: it is loading and will serve later" in result.stdout
