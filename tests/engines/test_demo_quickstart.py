"""README and quickstart as a newcomer follows them: their own command lines, in front of a real llama.cpp server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engines.conftest import real_engine
from tests.fakes.running import in_loop, slack

ROOT = Path(__file__).parents[2]
USUAL = "http://127.0.0.1:8088"  # what the documents say; the tests listen on a free port

pytestmark = [
    pytest.mark.engine("llama-server"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here"),
]


def curls(document: str) -> list[str]:
    """The curl commands of a document, each as one shell command."""
    text = (ROOT / document).read_text()
    shown = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return re.findall(r"^curl (?:.*\\\n)*.*", shown, re.MULTILINE)


@contextlib.asynccontextmanager
async def serving(engine: str, folder: Path) -> AsyncIterator[str]:
    """`slotgate serve --backend engine` in that folder; gives its address. Ends by Ctrl-C, with status 0."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "serve", "--backend", engine, "--port", "0"),
        cwd=folder,
        env=environment(),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(20 * slack()):
            line = (await process.stderr.readline()).decode()
        found = re.match(r"Slotgate is ready at (http://\S+)/v1 \| (.*)", line)
        assert found is not None, line
        assert "llama-server, 2 slots, smollm2-135m" in found[2]
        yield found[1]
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20 * slack()):
            _, said = await process.communicate()
        assert process.returncode == 0, said.decode()
        assert b"Traceback" not in said
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def shell(command: str, **environ: str) -> str:
    process = await asyncio.create_subprocess_shell(
        command, env=environment(**environ), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60 * slack()):
        said, _ = await process.communicate()
    return said.decode()


async def slotgate(folder: Path, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *arguments),
        cwd=folder,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode().strip()


def environment(**environ: str) -> dict[str, str]:
    ours = {name: text for name, text in os.environ.items() if not name.startswith("SLOTGATE_")}
    return {**ours, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environ}


@in_loop
async def test_the_curls_of_the_readme_get_a_whole_and_a_streamed_answer(tmp_path: Path) -> None:
    whole, streamed = curls("README.md")
    async with real_engine(n_predict=16) as engine, serving(engine.url, tmp_path) as url:
        answer = json.loads(await shell(whole.replace(USUAL, url)))
        assert answer["choices"][0]["message"]["content"]
        stream = await shell(streamed.replace(USUAL, url))
    assert stream.count("data: {") > 2
    assert stream.rstrip().endswith("data: [DONE]")


@in_loop
async def test_the_quickstart_leads_to_a_second_key_and_its_limit(tmp_path: Path) -> None:
    chat, models = curls("docs/quickstart.md")
    async with real_engine(n_predict=200) as engine:
        async with serving(engine.url, tmp_path) as url:
            assert (await shell(chat.replace(USUAL, url))).rstrip().endswith("data: [DONE]")
        text = (ROOT / "docs" / "quickstart.md").read_text()
        made = re.findall(r"^slotgate (keys new .+)$", text, re.MULTILINE)
        assert len(made) == 2
        alice, nightly = [await slotgate(tmp_path, *command.split()) for command in made]
        async with serving(engine.url, tmp_path) as url:
            ask = chat.replace(USUAL, url)
            assert "invalid_api_key" in await shell(ask)
            listed = json.loads(await shell(models.replace(USUAL, url), KEY=alice))
            assert [model["id"] for model in listed["data"]] == ["smollm2-135m"]
            mine = f'{ask} -H "x-api-key: {nightly}"'
            twice = await asyncio.gather(shell(mine), shell(mine))
            assert sorted("key_concurrency" in answer for answer in twice) == [False, True], twice
            theirs = await shell(f'{ask} -H "Authorization: Bearer {alice}"')
            assert theirs.rstrip().endswith("data: [DONE]")
