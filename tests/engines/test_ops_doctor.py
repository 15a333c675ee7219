"""`slotgate doctor` provoked: each finding by an engine that has the fault, and a clean bill for those that have none."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli.doctor import Diagnosis, diagnose, doctor
from gateway.cli.ops.judge_timing import Targets
from gateway.core.config import Backend
from tests.engines.conftest import real_engine
from tests.engines.llama_with import llama_with
from tests.fakes.engine import FakeEngine
from tests.fakes.running import in_loop
from tests.fakes.scripts import respond

SLOW = Targets(ttft_s=60, itl_s=5)  # nothing is too slow for them: these tests run on any machine
PAGE = "text/plain; version=0.0.4"


async def diagnosed(
    *engines: FakeEngine | str,
    probe: bool = False,
    targets: Targets = SLOW,
    addresses: tuple[str, ...] = (),
    vmstat: Path = Path("/nowhere"),
    **settings: Any,
) -> Diagnosis:
    backends = [
        Backend(f"b{number}", one if isinstance(one, str) else one.url, **settings)
        for number, one in enumerate(engines, 1)
    ]
    return await diagnose(backends, targets, probe=probe, addresses=addresses, vmstat=vmstat)


def wrong(diagnosis: Diagnosis) -> set[str]:
    return {one.code for one in diagnosis.findings if one.wrong}


def codes(diagnosis: Diagnosis) -> set[str]:
    return {one.code for one in diagnosis.findings}


def said(diagnosis: Diagnosis, code: str) -> str:
    """All that a finding says; it must say all four things."""
    found = next(one for one in diagnosis.findings if one.code == code)
    assert all((found.seen, found.means, found.change, found.then))
    return f"{found.seen} | {found.means} | {found.change} | {found.then}"


def lively(engine: FakeEngine) -> FakeEngine:
    """Answers at a speed at which two at once can be told from one at a time."""
    engine.behaviour.ttft_s, engine.behaviour.itl_s = 0.02, 0.02
    engine.behaviour.tokens = 24
    engine.behaviour.context_per_slot = 8192
    return engine


@pytest.mark.parametrize("kind", ["llama-server", "vllm", "sglang"])
@in_loop
async def test_a_healthy_engine_gets_a_clean_bill(kind: str) -> None:
    async with FakeEngine(kind, slots=2) as engine:
        found = await diagnosed(lively(engine), probe=True)
        sent = len(engine.requests)
    assert found.findings == ()
    assert 0 < sent <= 9


@in_loop
async def test_a_healthy_fleet_gets_a_clean_bill_and_status_0(tmp_path: Path) -> None:
    async with FakeEngine(slots=2) as one, FakeEngine("ollama", slots=2) as other:
        file = tmp_path / "c.yaml"
        file.write_text(
            f"backends: [{{name: a, url: '{lively(one).url}'}}, {{name: b, url: '{lively(other).url}', slots: 2}}]"
        )
        result = await run("--config", file, "--target-ttft", 60, "--target-itl", 5)
    assert result.exit_code == 0, result.output
    assert "Nothing wrong found" in result.output


@in_loop
async def test_without_probe_nothing_that_could_generate_is_sent() -> None:
    async with FakeEngine() as engine:
        await diagnosed(engine)
        assert engine.requests == []


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("llama-server", "--parallel 4"),
        ("ollama", "OLLAMA_NUM_PARALLEL=4"),
        ("vllm", "--max-num-seqs 4"),
    ],
)
@in_loop
async def test_a_parallel_setting_that_never_took_effect_is_named(kind: str, setting: str) -> None:
    async with FakeEngine(kind, slots=1) as engine:
        found = await diagnosed(lively(engine), probe=True, slots=4)
    assert "one_at_a_time" in wrong(found)
    words = said(found, "one_at_a_time")
    assert "the parallel setting never took effect" in words
    assert setting in words


@in_loop
async def test_two_that_run_at_half_speed_share_the_bandwidth() -> None:
    async with FakeEngine(slots=2) as engine:
        lively(engine)
        task = asyncio.create_task(slow_in_company(engine))
        try:
            found = await diagnosed(engine, probe=True)
        finally:
            task.cancel()
    assert wrong(found) == set()
    assert "each when there are two" in said(found, "shared_bandwidth")


async def slow_in_company(engine: FakeEngine) -> None:
    while True:
        engine.behaviour.itl_s = 0.02 * max(1, engine.running)
        await asyncio.sleep(0.001)


@in_loop
async def test_a_slow_prefill_is_told_from_a_queue_and_from_a_slow_decode() -> None:
    async with FakeEngine(slots=2) as engine:
        lively(engine).behaviour.prefill_tokens_per_s = 800
        found = await diagnosed(engine, probe=True, targets=Targets(ttft_s=0.3, itl_s=5))
        assert wrong(found) == {"slow_prefill"}
        assert "this is no queue" in said(found, "slow_prefill")
        engine.behaviour.prefill_tokens_per_s = 0
        engine.behaviour.itl_s = 0.05
        found = await diagnosed(engine, probe=True, targets=Targets(ttft_s=60, itl_s=0.03))
    assert wrong(found) == {"slow_decode"}


@in_loop
async def test_one_that_waits_although_a_slot_is_free_is_named() -> None:
    async with FakeEngine(slots=2) as engine:
        lively(engine).behaviour.itl_s = 0.08
        task = asyncio.create_task(late_in_company(engine))
        try:
            found = await diagnosed(engine, probe=True)
        finally:
            task.cancel()
    assert "waits_when_busy" in wrong(found)
    assert "when idle" in said(found, "waits_when_busy")


async def late_in_company(engine: FakeEngine) -> None:
    while True:
        engine.behaviour.ttft_s = 1.3 if engine.running else 0.02
        await asyncio.sleep(0.001)


@in_loop
async def test_a_cache_that_is_off_is_seen_by_asking_twice() -> None:
    async with FakeEngine(slots=2) as engine:
        lively(engine).behaviour.cached_tokens = False
        found = await diagnosed(engine, probe=True)
    assert wrong(found) == {"cache_off"}
    assert "--cache-ram" in said(found, "cache_off")


@in_loop
async def test_times_taken_beside_the_work_of_others_are_said_to_be() -> None:
    busy = [{"id": 0, "n_ctx": 8192, "is_processing": True}, {"id": 1, "n_ctx": 8192}]
    async with FakeEngine(slots=2) as engine:
        lively(engine).always(respond(200, busy), path="/slots")
        found = await diagnosed(engine, probe=True)
    assert codes(found) == {"in_company"}
    assert said(found, "in_company").startswith(
        "requests of others at work when the probe began: 1"
    )


@in_loop
async def test_a_model_that_had_to_be_loaded_is_a_note() -> None:
    async with FakeEngine("ollama", slots=2, models=["m:latest"]) as engine:
        lively(engine).loaded.clear()
        engine.behaviour.swap_s = 3.5
        found = await diagnosed(engine, probe=True, slots=2)
    assert wrong(found) == set()
    assert "OLLAMA_KEEP_ALIVE" in said(found, "cold_start")


@in_loop
async def test_the_queue_inside_llama_server_is_named() -> None:
    text = b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 7\n"
    async with FakeEngine(slots=2) as engine:
        engine.always(respond(200, text, content_type=PAGE), path="/metrics")
        found = await diagnosed(engine)
    assert wrong(found) == {"engine_queue"}
    assert said(found, "engine_queue").startswith("requests waiting inside the engine: 7")


@in_loop
async def test_a_small_context_is_named_with_its_flag() -> None:
    async with FakeEngine(slots=2) as engine:
        engine.behaviour.context_per_slot = 2048
        found = await diagnosed(engine)
    assert wrong(found) == {"small_context"}
    assert "larger -c" in said(found, "small_context")


@in_loop
async def test_one_kv_cache_for_all_slots_is_named_until_it_is_configured() -> None:
    entry = {"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx": 8192, "n_ctx_train": 8192}}
    async with FakeEngine(slots=4) as engine:
        engine.behaviour.context_per_slot = 8192
        engine.always(respond(200, {"object": "list", "data": [entry]}), path="/v1/models")
        found = await diagnosed(engine)
        assert wrong(found) == {"unified_kv"}
        assert "kv_tokens: 8192" in said(found, "unified_kv")
        assert wrong(await diagnosed(engine, kv_tokens=8192)) == set()


@in_loop
async def test_counters_without_a_cached_token_mean_the_cache_is_off() -> None:
    text = b"llamacpp:prompt_tokens_total 50000\nllamacpp:prompt_tokens_cached_total 0\n"
    async with FakeEngine(slots=2) as engine:
        engine.always(respond(200, text, content_type=PAGE), path="/metrics")
        found = await diagnosed(engine)
    assert wrong(found) == {"cache_off"}


@in_loop
async def test_metrics_that_are_off_and_a_sleeper_are_notes() -> None:
    async with FakeEngine(slots=2) as engine:
        engine.behaviour.metrics = False
        found = await diagnosed(engine)
        assert "--metrics" in said(found, "metrics_off")
        engine.behaviour.sleep_idle_s = 0
        found = await diagnosed(engine)
        assert "asleep" in codes(found)
    assert wrong(found) == set()


@in_loop
async def test_more_slots_in_the_config_than_in_the_engine_are_named() -> None:
    async with FakeEngine(slots=2) as engine:
        found = await diagnosed(engine, slots=6)
    assert wrong(found) == {"too_many_slots"}
    assert "--parallel 6" in said(found, "too_many_slots")


@in_loop
async def test_what_vllm_reports_is_read() -> None:
    at = '{engine="0",model_name="m"}'
    text = (
        f"vllm:num_requests_running{at} 8\nvllm:num_requests_waiting{at} 5\n"
        f"vllm:kv_cache_usage_perc{at} 0.97\nvllm:num_preemptions_total{at} 31\n"
        'vllm:cache_config_info{enable_prefix_caching="False",engine="0",kv_cache_size_tokens="65536"} 1\n'
    )
    async with FakeEngine("vllm", slots=8) as engine:
        engine.always(respond(200, text, content_type=PAGE), path="/metrics")
        found = await diagnosed(engine)
    assert wrong(found) == {"engine_queue", "kv_full", "preempting", "cache_off"}
    assert "31 preemptions" in said(found, "preempting")
    assert "--enable-prefix-caching" in said(found, "cache_off")
    assert "97%" in said(found, "kv_full")


@in_loop
async def test_streams_that_stand_still_while_a_prompt_is_read_are_noted() -> None:
    async with FakeEngine("vllm", slots=2) as engine:
        lively(engine).behaviour.prefill_tokens_per_s = 600
        engine.behaviour.tokens = 40
        task = asyncio.create_task(stalling(engine))
        try:
            found = await diagnosed(engine, probe=True)
        finally:
            task.cancel()
    assert wrong(found) == set()
    assert "--enable-chunked-prefill" in said(found, "prefill_stalls")


async def stalling(engine: FakeEngine) -> None:
    """When a long prompt comes beside another request, the next token of that other one takes long, once."""
    stalled_until = 0.0
    while True:
        now = time.monotonic()
        long = [len(one.body) > 1500 for one in engine.occupancy.requests()]
        if not stalled_until and len(long) == 2 and any(long):
            stalled_until = now + 0.5
        engine.behaviour.itl_s = 0.9 if now < stalled_until else 0.02
        await asyncio.sleep(0.001)


@in_loop
async def test_a_model_partly_on_the_processor_is_named() -> None:
    row = {"name": "m", "model": "m", "size": 8_000_000_000, "size_vram": 5_000_000_000}
    async with FakeEngine("ollama") as engine:
        engine.always(respond(200, {"models": [row]}), path="/api/ps")
        found = await diagnosed(engine, slots=1)
    assert wrong(found) == {"partly_on_cpu"}
    assert "62% of 8.0 GB" in said(found, "partly_on_cpu")


@in_loop
async def test_models_that_push_each_other_out_and_assumed_slots_are_notes() -> None:
    async with FakeEngine("ollama", models=["a", "b", "c"]) as engine:
        engine.loaded.clear()
        engine.loaded.add("a")
        found = await diagnosed(engine)
    assert wrong(found) == set()
    assert "3 models are offered and 1 of them loaded" in said(found, "model_swaps")
    assert "OLLAMA_NUM_PARALLEL" in said(found, "slots_assumed")


@in_loop
async def test_ollamas_queue_of_512_is_named_when_it_is_full() -> None:
    message = "server busy, please try again.  maximum pending requests exceeded"
    async with FakeEngine("ollama") as engine:
        engine.always(respond(503, {"error": {"message": message, "type": "api_error"}}))
        found = await diagnosed(engine, probe=True, slots=1)
        assert len(engine.requests) == 1, "it is left alone"
    assert wrong(found) == {"ollama_queue"}
    assert "OLLAMA_MAX_QUEUE" in said(found, "ollama_queue")


@pytest.mark.parametrize(
    ("status", "code"), [(503, "engine_full"), (500, "probe_failed"), (404, "probe_failed")]
)
@in_loop
async def test_a_probe_that_fails_says_what_the_engine_said(status: int, code: str) -> None:
    async with FakeEngine() as engine:
        engine.always(respond(status, {"error": {"message": "because"}}))
        found = await diagnosed(engine, probe=True)
    assert wrong(found) == {code}
    assert "because" in said(found, code)


@in_loop
async def test_an_engine_that_others_reach_without_a_key_is_named() -> None:
    async with FakeEngine(host="0.0.0.0") as engine:
        url = f"http://127.0.0.1:{engine.port}"
        found = await diagnosed(url, addresses=("127.0.0.2",))
        assert wrong(found) == {"open_engine", "open_pages"}
        assert "127.0.0.2" in said(found, "open_engine")
        assert "/slots" in said(found, "open_pages")
        assert wrong(await diagnosed(url, addresses=())) == set()


@in_loop
async def test_an_engine_with_a_key_or_on_loopback_alone_is_closed() -> None:
    async with FakeEngine(host="0.0.0.0") as engine, FakeEngine() as other:
        engine.behaviour.api_key = "right"
        found = await diagnosed(f"http://127.0.0.1:{engine.port}", addresses=("127.0.0.2",))
        assert "open_engine" not in codes(found)
        assert "refuses_key" in wrong(found)
        found = await diagnosed(other, addresses=("127.0.0.2",))
    assert found.findings == ()


@in_loop
async def test_a_machine_that_swaps_is_named(tmp_path: Path) -> None:
    file = tmp_path / "vmstat"
    file.write_text("nr_free_pages 7\npswpin 100\npswpout 100\n")

    async def swap() -> None:
        while True:
            await asyncio.sleep(0.05)
            counted = int(file.read_text().split()[3]) + 50
            fresh = tmp_path / "fresh"
            fresh.write_text(f"nr_free_pages 7\npswpin {counted}\npswpout 100\n")
            fresh.replace(file)

    async with FakeEngine() as engine:
        assert wrong(await diagnosed(engine, vmstat=file)) == set()
        task = asyncio.create_task(swap())
        try:
            found = await diagnosed(engine, vmstat=file)
        finally:
            task.cancel()
    assert wrong(found) == {"swapping"}


async def run(*arguments: object) -> Result:
    words = [str(one) for one in arguments]
    return await asyncio.to_thread(CliRunner().invoke, doctor, words, catch_exceptions=False)


@in_loop
async def test_what_is_wrong_makes_the_status_1_in_words_and_in_json() -> None:
    async with FakeEngine() as engine:
        engine.behaviour.context_per_slot = 1024
        shown = await run("--backend", engine.url, "--backend", "http://127.0.0.1:1")
        told = await run("--backend", engine.url, "--json")
    assert shown.exit_code == told.exit_code == 1
    for words in ("small_context", "seen", "means", "change", "then", "refused", "down"):
        assert words in shown.output
    document = json.loads(told.stdout)
    assert "small_context" in {one["code"] for one in document["findings"]}


@in_loop
async def test_the_probe_is_announced() -> None:
    async with FakeEngine() as engine:
        shown = await run("--backend", lively(engine).url, "--probe")
    assert "Sending at most 8 requests of at most 64 tokens" in shown.stderr


@pytest.mark.engine("llama-server")
@in_loop
async def test_a_real_server_with_one_slot_is_told_from_one_with_two() -> None:
    async with real_engine(slots=1, ctx=4096) as engine:
        found = await diagnosed(engine.url, probe=True)
        assert "one_at_a_time" in wrong(found), found.findings
        assert "never took effect" not in said(found, "one_at_a_time")
        assert "--parallel 2" in said(found, "one_at_a_time")
    async with real_engine(slots=2, ctx=8192) as engine:
        found = await diagnosed(engine.url, probe=True)
    assert not wrong(found) - {"waits_when_busy"}, (
        found.findings
    )  # which a busy test machine may be


@pytest.mark.engine("llama-server")
@in_loop
async def test_a_real_server_without_its_cache_is_found_out() -> None:
    async with llama_with(cache_prompt=False, n_ctx=8192) as engine:
        found = await diagnosed(engine.url, probe=True)
    assert "cache_off" in wrong(found)
