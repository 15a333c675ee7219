"""`slotgate loadtest` against engines that are scripted, a gateway, and a real llama.cpp server."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from rich.table import Table

from gateway.cli.loadtest import loadtest
from gateway.cli.loadtest_tables import overview
from gateway.cli.local_engine import MODEL_NAME
from gateway.cli.ops import work
from gateway.cli.ops.percentile import Spread
from gateway.cli.ops.steps import Trial, run_steps
from gateway.cli.ops.streamed import client_of
from gateway.cli.ops.tally import Step, advice, knee
from gateway.cli.ops.watch import Watch
from tests.engines.conftest import real_engine
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import in_loop, slack
from tests.fakes.scripts import FIN, chat_stream, hang, respond


async def run(url: str, *arguments: object) -> Result:
    """The command in a thread, so that this loop may be the engine meanwhile."""
    words = [url, *(str(one) for one in arguments)]
    return await asyncio.to_thread(CliRunner().invoke, loadtest, words, catch_exceptions=False)


async def figures(url: str, *arguments: object, status: int = 0) -> dict[str, Any]:
    result = await run(url, *arguments, "--json")
    assert result.exit_code == status, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@in_loop
async def test_every_step_sends_the_same_set_with_so_many_at_once() -> None:
    async with FakeEngine(slots=4) as engine:
        engine.behaviour.itl_s = 0.005
        found = await figures(engine.url, "--concurrency", "1,3", "--requests", 6)
        bodies = [json.loads(one.body) for one in engine.requests][1:]  # after the warm-up
    assert [one["served"] for one in found["steps"]] == [6, 6]
    assert engine.peak == 3
    prompts = [body["messages"][0]["content"].partition("] ")[2] for body in bodies]
    assert sorted(prompts[:6]) == sorted(prompts[6:])
    assert len(set(prompts)) == 6
    marks = {body["messages"][0]["content"].partition("] ")[0] for body in bodies}
    assert len(marks) == 2, "one mark a step"


@in_loop
async def test_the_waiting_inside_the_engine_is_seen() -> None:
    async with FakeEngine(slots=1) as engine:
        engine.behaviour.itl_s = 0.15
        found = await figures(engine.url, "--concurrency", 4, "--requests", 4, "--max-tokens", 5)
    assert found["what"] == "llama-server"
    assert found["steps"][0]["load"]["waiting"] >= 1


@in_loop
async def test_an_open_loop_does_not_wait_for_answers_and_ends_in_time() -> None:
    async with FakeEngine(slots=50) as engine:
        engine.behaviour.ttft_s = 0.4
        found = await figures(engine.url, "--rate", "20", "--duration", 1)
    step = found["steps"][0]
    assert step["open_loop"]
    assert step["served"] == step["requests"] >= 5
    assert engine.peak > 2


@in_loop
async def test_errors_are_told_by_kind_and_end_with_status_1() -> None:
    async with FakeEngine(slots=4) as engine:
        engine.script(
            chat_stream(1),  # the warm-up
            respond(500, {"error": {"message": "out of luck"}}),
            chat_stream(3, whole=False, then=FIN),
        )
        result = await run(engine.url, "--concurrency", 1, "--requests", 4)
    assert result.exit_code == 1
    assert "1 x HTTP 500" in result.output
    assert "2 of 4 failed" in result.output
    assert "out of luck" in result.output


@in_loop
async def test_a_full_gateway_is_asked_again_as_it_says_and_its_503s_are_counted() -> None:
    async with (
        FakeEngine(slots=1) as engine,
        running_gateway(engine, admission={"queue": 1}) as slotgate,
    ):
        engine.behaviour.itl_s = 0.05
        found = await figures(slotgate.base_url, "--concurrency", 4, "--requests", 8)
    step = found["steps"][0]
    assert found["what"] == "a Slotgate gateway"
    assert step["served"] == 8
    assert step["refused"] >= 1
    assert step["refusal"]["p95"] < 1
    assert step["errors"] == {}


@in_loop
async def test_runs_are_saved_compared_and_shown(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    async with FakeEngine(slots=2) as engine:
        await run(engine.url, "--concurrency", "1,2", "--requests", 4, "--save", file)
        result = await run(
            engine.url, "--concurrency", "2", "--requests", 4, "--compare", file, "--target-ttft", 9
        )
    assert result.exit_code == 0, result.output
    assert f"against {file}"[:20] in result.output
    assert "The smallest that meets the target (p95 TTFT within 9 s): 2" in result.output


@in_loop
async def test_what_fails_at_once_is_said_before_any_load() -> None:
    async with FakeEngine() as engine:
        engine.behaviour.api_key = "right"
        result = await run(engine.url, "--key", "wrong", "--model", "m")
    assert result.exit_code == 1
    assert "HTTP 401" in result.output
    assert len(engine.requests) == 1


@in_loop
async def test_ctrl_c_ends_the_run_and_shows_the_steps_that_ended() -> None:
    async with FakeEngine(slots=4) as engine:
        engine.script(*[chat_stream(3)] * 3, hang())  # the warm-up, a step of two, and no more
        words = ("loadtest", engine.url, "--concurrency", "1,2", "--requests", "2")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", *words,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        await engine.until_requests(4, within_s=30)
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), 30 * slack())
    assert process.returncode == 130, err.decode()
    assert b"2/2" in out
    assert err.decode().strip() == "Stopped; the steps that ended:"


@in_loop
async def test_a_gateway_with_keys_is_tested_with_a_plain_one_and_says_what_it_hides() -> None:
    async with FakeEngine() as engine, running_gateway(engine, keys=["ada"]) as slotgate:
        slotgate.sent = 3
        words = ("--concurrency", 1, "--requests", 2)
        found = await figures(slotgate.base_url, *words, "--key", slotgate.keys["ada"])
    assert "admin key" in found["what"]
    assert found["steps"][0]["served"] == 2
    assert found["steps"][0]["load"]["waiting"] is None


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the package matplotlib is not installed")
    file = tmp_path / "run.png"

    async def main() -> Result:
        async with FakeEngine() as engine:
            return await run(engine.url, "--concurrency", "1,2", "--requests", 2, "--plot", file)

    result = asyncio.run(main())
    assert result.exit_code == 0, result.output
    assert file.read_bytes().startswith(b"\x89PNG")


async def means(slotgate: Running) -> tuple[float, float, float]:
    """Mean TTFT and ITL by the gateway's histograms, and how many requests they are of."""
    text = await slotgate.metrics_text()

    def total(name: str) -> float:
        rows = re.findall(rf"^slotgate_{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
        return sum(map(float, rows))

    count = total("ttft_seconds_count")
    itl = total("itl_seconds_sum") / total("itl_seconds_count")
    return total("ttft_seconds_sum") / count, itl, count


def mean_of(steps: list[Step], name: str) -> float:
    """Over all samples of all steps."""
    spreads: list[Spread] = [getattr(step, name) for step in steps]
    return sum(one.mean * one.count for one in spreads) / sum(one.count for one in spreads)


@pytest.mark.engine("llama-server")
@in_loop
async def test_a_real_server_has_a_sane_knee_and_the_gateway_measures_the_same() -> None:
    """Steps of 1, 2 and 4 through a gateway with 2 slots: at 4, some wait."""
    async with (
        real_engine(slots=2, ctx=4096) as engine,
        running_gateway(engine.url, admission={"queue": 8}, check=False) as slotgate,
        client_of(slotgate.base_url, None, 300) as client,
    ):
        trial = Trial(
            levels=(1, 2, 4), work=work.built_in(4), model=MODEL_NAME, max_tokens=12, run="a1b2c3"
        )
        watch = Watch(slotgate.base_url, None)
        await watch.begin()
        steps = [step async for step in run_steps(client, trial, watch, lambda _: None)]
        ttft_s, itl_s, count = await means(slotgate)
    assert [step.served for step in steps] == [4, 4, 4], list(advice(steps, None, None))
    assert count == 12
    assert mean_of(steps, "ttft") == pytest.approx(ttft_s, rel=0.05, abs=0.01 * slack())
    assert mean_of(steps, "itl") == pytest.approx(itl_s, rel=0.05)
    assert steps[2].load.waiting is not None
    assert steps[2].load.waiting >= 1
    bend = knee(steps)
    assert bend is not None
    best = max(step.generated_tokens_per_s for step in steps)
    assert bend.generated_tokens_per_s >= 0.9 * best
    assert shown_rows(overview(steps)) == 3


def shown_rows(table: Table) -> int:
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return table.row_count
