"""`slotgate demo` as a person runs it: it shows what it promises, ends by itself, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import httpx2
import pytest

from tests.engines.conftest import real_engine
from tests.fakes.running import eventually, in_loop, run, slack

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def on_real_engines() -> str:
    """What the demo said, run once on real engines."""

    async def main() -> str:
        async with real_engine():
            pass  # skips where none can run
        status, said = await demo()
        assert status == 0, said
        return said

    return run(main())


@pytest.fixture(scope="module")
def on_scripted_engines() -> str:
    """The same where no real engine can run."""
    status, said = run(demo(MODEL_GGUF="/no/such.gguf"))
    assert status == 0, said
    return said


@pytest.mark.engine("llama-server")
def test_the_demo_shows_tokens_refusals_and_figures_on_real_engines(on_real_engines: str) -> None:
    assert "scripted" not in on_real_engines
    assert "xllamacpp" in on_real_engines or "llama-server" in on_real_engines
    check_show(on_real_engines)


def test_the_demo_stops_the_engines_that_it_started(on_scripted_engines: str) -> None:
    urls = re.findall(r"engine-\d  (http://\S+)", on_scripted_engines)
    assert len(urls) == 2
    for url in urls:
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{url}/health", trust_env=False)


def test_without_a_real_engine_it_says_why_and_goes_on_with_a_scripted_one(
    on_scripted_engines: str,
) -> None:
    said = on_scripted_engines
    assert "No real engine can run here. $MODEL_GGUF names /no/such.gguf" in said
    assert said.count("scripted engine (no model") == 2
    check_show(said)
    # the line drains in two seconds; a first guess that nothing was learned from would say twelve or more
    most = int(re.findall(r"Retry-After between \d+ and (\d+) s", said)[0])
    assert most <= 8 * slack()


@pytest.mark.parametrize("show", ["on_real_engines", "on_scripted_engines"])
def test_the_conversation_goes_on_at_the_engine_that_has_it_cached(
    show: str, request: pytest.FixtureRequest
) -> None:
    said = request.getfixturevalue(show)
    assert re.search(r"went on at the same engine, (engine-\d) \(affinity: hit\)", said), said
    cached = re.search(r"had (\d+) of its (\d+) prompt tokens in its cache", said)
    assert cached is not None
    assert int(cached[1]) > int(cached[2]) // 2


@pytest.mark.parametrize("seen", ["Starting", "engine-1", "You:", "at once", "any API key"])
def test_ctrl_c_at_any_moment_leaves_nothing_behind(seen: str) -> None:
    interrupted_at(seen, MODEL_GGUF="/no/such.gguf")


@pytest.mark.engine("llama-server")
@pytest.mark.parametrize("seen", ["Starting", "You:"])
def test_ctrl_c_leaves_no_real_engine_behind(on_real_engines: str, seen: str) -> None:
    assert on_real_engines  # they can run here
    interrupted_at(seen)


def interrupted_at(seen: str, **environ: str) -> None:
    async def main() -> None:
        process = await start("--keep", **environ)
        said = await read_until(process, seen)
        children = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        said += (await process.stdout.read()).decode()
        assert await process.wait() == 0, said
        assert "nothing is left running" in said
        assert "Traceback" not in said
        await eventually(lambda: not any(map(is_running, children)))

    run(main())


@in_loop
async def test_keep_stays_up_and_serves_until_it_is_told_to_end() -> None:
    process = await start("--keep", MODEL_GGUF="/no/such.gguf")
    said = await read_until(process, "any API key")
    url = re.findall(r"base_url to (http://\S+)/v1", said)[0]
    async with httpx2.AsyncClient(base_url=url, trust_env=False) as client:
        assert (await client.get("/readyz")).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


@in_loop
async def test_a_demo_that_was_killed_takes_its_engines_along() -> None:
    process = await start("--keep", MODEL_GGUF="/no/such.gguf")
    await read_until(process, "You:")
    children = children_of(process.pid)
    assert len(children) >= 2
    process.kill()
    await process.wait()
    await eventually(lambda: not any(map(is_running, children)))


def check_show(said: str) -> None:
    """What a person must have seen."""
    assert len(re.findall(r"engine-[12]: first token after \d+ ms, \d+ tokens", said)) == 2
    served, refused = (
        int(re.findall(rf"(\d+) {word}", said)[0]) for word in ("were served", "got a 503")
    )
    assert (served, refused) == (8, 12), said
    assert re.search(r"p99 \d+ ms\), with Retry-After between \d+ and \d+ s", said)
    assert re.search(r"p95 time to first token \d+ ms, p95 between tokens \d+ ms", said)
    assert "set base_url to http://127.0.0.1:" in said
    assert "Traceback" not in said
    assert "\x1b" not in said


async def start(*arguments: str, **environ: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        "demo",
        *arguments,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


async def demo(**environ: str) -> tuple[int, str]:
    """Runs it to its end; its exit status and what it said."""
    process = await start(**environ)
    async with asyncio.timeout(100 * slack()):
        said, _ = await process.communicate()
    return process.returncode or 0, said.decode()


async def read_until(process: asyncio.subprocess.Process, words: str) -> str:
    assert process.stdout is not None
    said = ""
    async with asyncio.timeout(60 * slack()):
        while words not in said:
            piece = await process.stdout.read(4096)
            assert piece, f"it ended before it said {words!r}:\n{said}"
            said += piece.decode()
    return said


def children_of(pid: int) -> list[int]:
    """The processes that this one started and that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        fields = stat_of(entry)
        if fields is not None and int(fields[1]) == pid:
            found.append(int(entry.parent.name))
    return found


def is_running(pid: int) -> bool:
    fields = stat_of(Path(f"/proc/{pid}/stat"))
    return fields is not None and fields[0] != "Z"


def stat_of(path: Path) -> list[str] | None:
    """State, parent and so on, from after the name; None when there is no such process."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
