"""A real headless Chromium for tests of the dashboard, driven by its own DevTools protocol over a pipe.

    async with chromium() as page:
        await page.open(url)
        assert await page.value("document.title") == "Slotgate"

`page.errors`: what the console, uncaught exceptions and the browser itself complained about. `page.asked`: every URL
that was fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from base64 import b64decode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.fakes.running import eventually, slack

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WHY_NOT = "no chromium on PATH (apt-get install chromium)"
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)
_START = """
import os, sys
pipes = [os.dup(os.dup(os.dup(int(one)))) for one in sys.argv[1:3]]  # above 3 and 4, which are to be overwritten
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""  # the browser reads commands from 3 and answers on 4


class Page:
    """One tab."""

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe
        self.errors: list[str] = []
        self.asked: list[str] = []
        pipe.on_event = self._hear

    async def open(self, url: str) -> None:
        await self._pipe.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression is worth; promises are awaited."""
        answer = await self._pipe.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, within_s: float = 15) -> None:
        """Polls until the expression is true."""

        async def is_true() -> bool:
            return bool(await self.value(expression))

        await eventually(is_true, within_s, why=f"not true in the page: {expression}")

    async def text(self, selector: str = "body") -> str:
        return str(await self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def type_into(self, selector: str, text: str) -> None:
        """Types as a person does, into the field that gets the focus."""
        await self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        await self._pipe.call("Input.insertText", text=text)

    async def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        await self._pipe.call("Input.dispatchKeyEvent", type="keyDown", **key)
        await self._pipe.call("Input.dispatchKeyEvent", type="keyUp", **key)

    async def look_like(self, width: int, height: int, *, dark: bool = False) -> None:
        """The screen, and whether its owner likes it dark."""
        phone = width < 600
        await self._pipe.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._pipe.call("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self, name: str) -> None:
        """Kept only when SLOTGATE_TEST_SHOTS names a folder."""
        folder = os.environ.get("SLOTGATE_TEST_SHOTS")
        if folder:
            shot = await self._pipe.call("Page.captureScreenshot", format="png")
            (Path(folder) / name).write_bytes(b64decode(shot["data"]))

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(json.dumps(params["entry"])[:500])
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Page]:
    """A browser with a fresh profile and one empty tab; killed at the end."""
    assert PROGRAM is not None, WHY_NOT
    to_browser, ours = os.pipe()
    theirs, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(
        prefix="slotgate-chromium-", ignore_cleanup_errors=True
    ) as home:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _START,
            str(to_browser),
            str(from_browser),
            PROGRAM,
            *_FLAGS,
            f"--user-data-dir={home}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(to_browser, from_browser),
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            async with _Pipe.between(theirs, ours) as pipe:
                await pipe.attach()
                yield Page(pipe)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own group: it has many children
            await process.wait()


class _Pipe:
    """The protocol: JSON messages, each ended by a zero byte."""

    def __init__(self, reader: asyncio.StreamReader, ours: int) -> None:
        self._reader = reader
        self._ours = ours
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._session: str | None = None
        self.on_event = lambda _method, _params: None

    @classmethod
    @contextlib.asynccontextmanager
    async def between(cls, theirs: int, ours: int) -> AsyncIterator[_Pipe]:
        reader = asyncio.StreamReader(limit=1 << 26)
        file = os.fdopen(theirs, "rb")
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), file
        )
        pipe = cls(reader, ours)
        task = asyncio.create_task(pipe._listen())
        try:
            yield pipe
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            transport.close()
            os.close(ours)

    async def attach(self) -> None:
        """Take the empty tab, and ask to be told what happens in it."""
        target = await self.call("Target.createTarget", url="about:blank")
        session = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        future = self._waiting[self._count] = asyncio.get_running_loop().create_future()
        os.write(self._ours, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(30 * slack()):
            answer = await future
        assert "error" not in answer, f"{method}: {answer}"
        return dict(answer["result"])

    async def _listen(self) -> None:
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            future = self._waiting.pop(message.get("id", 0), None)
            if future is not None:
                future.set_result(message)
            elif "method" in message:
                self.on_event(message["method"], message["params"])
