"""The real llama.cpp server that the demo and the tests start: it serves, it ends, and it says why it cannot."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import httpx2
import pytest

from gateway.cli import llama_child
from gateway.cli.child_server import ChildServer
from gateway.cli.local_engine import (
    EngineOptions,
    EngineUnavailable,
    LocalEngine,
    find_model,
    find_sources,
)
from tests.engines.conftest import real_engine
from tests.fakes.running import eventually, in_loop

ROOT = Path(__file__).parents[2]


def client() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(trust_env=False, timeout=60)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.engine("llama-server")
@in_loop
async def test_a_real_engine_has_the_slots_and_figures_that_were_asked_for() -> None:
    async with real_engine(slots=2, ctx=4096, n_predict=4) as engine, client() as http:
        props = (await http.get(f"{engine.url}/props")).json()
        assert props["total_slots"] == 2
        assert props["default_generation_settings"]["n_ctx"] == 2048
        assert len((await http.get(f"{engine.url}/slots")).json()) == 2
        assert "llamacpp:requests_processing" in (await http.get(f"{engine.url}/metrics")).text
        body = {"messages": [{"role": "user", "content": "Say hello."}]}
        answer = (await http.post(f"{engine.url}/v1/chat/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] <= 4
        assert "SmolLM2" in engine.explain or os.environ.get("MODEL_GGUF")


@pytest.mark.engine("llama-server")
@in_loop
async def test_metrics_can_be_off_and_the_batch_can_be_small() -> None:
    async with real_engine(metrics=False, batch=32) as engine, client() as http:
        assert (await http.get(f"{engine.url}/metrics")).status_code == 501


@pytest.mark.engine("llama-server")
@in_loop
async def test_a_stopped_engine_is_gone_and_may_be_stopped_again() -> None:
    async with real_engine() as engine, client() as http:
        pid = engine.pid
        assert pid is not None
        assert is_running(pid)
        await engine.stop()
        assert not is_running(pid)
        with pytest.raises(httpx2.ConnectError):
            await http.get(f"{engine.url}/health")
        await engine.stop()


@pytest.mark.engine("llama-server")
@in_loop
async def test_an_engine_does_not_outlive_a_parent_that_was_killed() -> None:
    async with real_engine():
        pass  # skips where none can run
    code = textwrap.dedent("""
        import asyncio
        from gateway.cli.local_engine import LocalEngine
        async def main():
            engine = LocalEngine()
            await engine.start()
            print(engine.pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """)
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    await parent.wait()
    await eventually(lambda: not is_running(pid), why="the engine outlived its parent")


@in_loop
async def test_a_start_that_is_cancelled_leaves_no_child() -> None:
    child = ChildServer("tests.fakes.silent_child", [])
    starting = asyncio.ensure_future(child.start())
    await eventually(lambda: child.pid is not None)
    pid = child.pid
    assert pid is not None
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not is_running(pid)


@in_loop
async def test_a_child_that_ignores_sigterm_is_killed_when_stopping_is_cancelled() -> None:
    child = ChildServer("tests.fakes.silent_child", ["--stubborn", "--url"])
    assert await child.start() == "http://stubborn"
    pid = child.pid
    assert pid is not None
    stopping = asyncio.ensure_future(child.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not is_running(pid)


@in_loop
async def test_llama_server_of_the_environment_wins_and_gets_all_options(tmp_path: Path) -> None:
    program = llama_server(tmp_path, "serve")
    model = tmp_path / "tiny.gguf"
    model.touch()
    environ = {"LLAMA_SERVER": str(program), "MODEL_GGUF": str(model)}
    engine = LocalEngine(EngineOptions(slots=3, ctx=6144, batch=64, n_predict=9), environ=environ)
    async with engine, client() as http:
        assert str(program) in engine.explain
        arguments = " ".join((await http.get(f"{engine.url}/arguments")).json())
        supervisor = engine.pid
        served_by = int((await http.get(f"{engine.url}/pid")).text)
    for part in (
        "--parallel 3",
        "--ctx-size 6144",
        "--batch-size 64",
        "--n-predict 9",
        "--metrics",
    ):
        assert part in arguments
    assert f"--model {model} --alias tiny" in arguments
    assert supervisor is not None
    assert not is_running(supervisor)
    assert not is_running(served_by)


@pytest.mark.parametrize(
    ("how", "reason", "remedy"),
    [
        ("absent", "cannot be started (No such file or directory)", "$LLAMA_SERVER"),
        ("illegal", "instructions that this processor does not have", "Build llama.cpp"),
        ("broken", "ended with status 3 while it loaded tiny.gguf", "whole GGUF model"),
    ],
)
def test_an_engine_that_cannot_run_says_which_why_and_how_to_mend(
    how: str, reason: str, remedy: str, tmp_path: Path
) -> None:
    @in_loop
    async def check() -> None:
        program = tmp_path / "nothing" if how == "absent" else llama_server(tmp_path, how)
        model = tmp_path / "tiny.gguf"
        model.touch()
        environ = {"LLAMA_SERVER": str(program), "MODEL_GGUF": str(model)}
        with pytest.raises(EngineUnavailable) as caught:
            await LocalEngine(environ=environ).start()
        assert str(program) in caught.value.reason
        assert reason in caught.value.reason
        assert remedy in caught.value.remedy

    check()


@pytest.mark.engine("llama-server")
@in_loop
async def test_a_file_that_is_no_model_is_told_from_a_missing_engine(tmp_path: Path) -> None:
    async with real_engine():
        pass  # skips where none can run
    model = tmp_path / "not.gguf"
    model.write_bytes(b"this is not a model")
    with pytest.raises(EngineUnavailable) as caught:
        await LocalEngine(environ={"MODEL_GGUF": str(model), "PATH": ""}).start()
    assert "not.gguf" in caught.value.reason


def test_a_missing_model_file_is_named() -> None:
    with pytest.raises(EngineUnavailable, match=r"\$MODEL_GGUF names /no/model.gguf"):
        find_model({"MODEL_GGUF": "/no/model.gguf"})


def test_a_llama_server_on_the_path_comes_before_the_wheel(tmp_path: Path) -> None:
    program = llama_server(tmp_path, "serve")
    assert [source.program for source in find_sources({"PATH": str(tmp_path)})] == [
        str(program),
        None,
    ]
    assert [source.program for source in find_sources({"PATH": ""})] == [None]


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (ModuleNotFoundError("No module", name="xllamacpp"), "not installed", "pip install"),
        (ImportError("libgomp.so.1: cannot open shared object"), "libgomp", "libgomp1"),
        (ImportError("version `GLIBC_2.38' not found"), "too old", "$LLAMA_SERVER"),
        (ImportError("something else"), "something else", "$LLAMA_SERVER"),
    ],
)
def test_what_stops_the_wheel_is_said_in_plain_words(
    error: ImportError, reason: str, remedy: str
) -> None:
    why, mend = llama_child.why_not(error)
    assert reason in why
    assert remedy in mend


@in_loop
async def test_the_scripted_engine_streams_and_remembers_a_conversation() -> None:
    child = ChildServer("gateway.cli.scripted_engine", ["--slots", "2"])
    url = await child.start()
    try:
        async with client() as http:
            messages = [{"role": "user", "content": "hello " * 50}]
            body = {"messages": messages, "max_tokens": 3, "stream": True}
            lines = (await http.post(f"{url}/v1/chat/completions", json=body)).text.split("\n\n")
            assert lines[-2] == "data: [DONE]"
            usage = json.loads(lines[-3].removeprefix("data: "))["usage"]
            assert usage["completion_tokens"] == 3
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
            messages += [{"role": "user", "content": "more"}]
            again = await http.post(
                f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 1}
            )
            assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
            assert (await http.get(f"{url}/props")).json()["total_slots"] == 2
    finally:
        await child.stop()


def llama_server(folder: Path, how: str) -> Path:
    """A program of that name which serves, or fails in one way."""
    program = folder / "llama-server"
    program.write_text(
        textwrap.dedent(f"""\
        #!{sys.executable}
        import http.server, json, os, signal, sys
        how = {how!r}
        if how == "illegal":
            os.kill(os.getpid(), {int(signal.SIGILL)})
        if how == "broken":
            sys.exit(3)
        class Page(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                pages = {{"/health": {{"status": "ok"}}, "/arguments": sys.argv, "/pid": os.getpid()}}
                body = json.dumps(pages[self.path]).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
        port = int(sys.argv[sys.argv.index("--port") + 1])
        http.server.HTTPServer(("127.0.0.1", port), Page).serve_forever()
        """)
    )
    program.chmod(0o755)
    return program
