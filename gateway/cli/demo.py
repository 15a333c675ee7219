"""`slotgate demo`: the main job, seen on this machine, on real engines if any can run here.

Law of this file: what it starts it stops, however it ends, and it says so honestly when an engine is only scripted.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Protocol

import click
import httpx2
import uvloop
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from gateway.api.server import StartupError
from gateway.app import Gateway
from gateway.cli import demo_chat
from gateway.cli.child_server import ChildFailed, ChildServer
from gateway.cli.demo_chat import Burst, Latency, Message, Reply
from gateway.cli.local_engine import EngineOptions, EngineUnavailable, LocalEngine
from gateway.core.config import Backend, Config, Listen, Log

ENGINES: Final = 2
SLOTS: Final = 2
BURST: Final = 20
HOST: Final = "127.0.0.1"
PORT: Final = 8088  # of `slotgate serve`; another one if it is taken

SYSTEM: Final = (
    "You are a patient teacher who explains how computers work to people who have never programmed. You use short "
    "sentences and everyday words. You compare new things with things in a kitchen, a post office or a garden, and you "
    "never use a technical word without saying what it means. You do not make lists. You answer what was asked and then "
    "stop. When you do not know something, you say that you do not know it. You never invent names, numbers or quotations."
)
QUESTIONS: Final = (
    "Why do people stand in queues?",
    "And why is a short queue better than a long one?",
)


@click.command(short_help="See it work, on small engines that it starts and stops.")
@click.option("--keep", is_flag=True, help="Stay up after the show, until Ctrl-C.")
def demo(keep: bool) -> None:
    """Start two small engines and the gateway in front of them, and show what it does.

    Needs nothing but the wheels of the `demo` extra. Takes about half a minute. Ctrl-C stops everything at any moment.
    """
    sys.exit(uvloop.run(_until_told_to_stop(keep)))


class Engine(Protocol):
    """An engine in a child process."""

    url: str
    explain: str

    async def stop(self) -> None: ...


@dataclass(slots=True)
class ScriptedEngine:
    """The stand-in; its child says where it listens."""

    child: ChildServer
    url: str
    explain: str = f"scripted engine (no model, fixed words), {SLOTS} slots"

    async def stop(self) -> None:
        await self.child.stop()


async def _until_told_to_stop(keep: bool) -> int:
    """The show as a task, which Ctrl-C or SIGTERM cancels. The exit status."""
    console = Console(highlight=False, soft_wrap=True)
    show = asyncio.ensure_future(_show(console, keep))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, show.cancel)
    try:
        await show
    except asyncio.CancelledError:
        console.print("\nStopped; nothing is left running.")
    except (httpx2.HTTPError, StartupError, TimeoutError) as error:
        console.print(f"[red]The demo failed:[/] {escape(repr(error))}")
        return 1
    except ChildFailed as failed:
        console.print(f"[red]Not even the scripted engine could start:[/] {escape(repr(failed))}")
        return 1
    return 0


async def _show(console: Console, keep: bool) -> None:
    async with contextlib.AsyncExitStack() as stack:
        engines = await stack.enter_async_context(_engines(console))
        gateway = await stack.enter_async_context(Gateway.serving(_config(engines)))
        client = await stack.enter_async_context(demo_chat.client_for(gateway.base_url))
        await demo_chat.until_ready(client, ENGINES)
        console.print(f"The gateway is in front of them at [bold]{gateway.base_url}[/].\n")
        await _scenes(console, client)
        _tell_base_url(console, gateway.base_url, keep)
        if keep:
            await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def _engines(console: Console) -> AsyncIterator[list[Engine]]:
    """Two engines, real ones if they can run here; stopped at the end."""
    started: list[Engine] = []
    try:
        try:
            console.print("Starting two llama.cpp servers with a small model ...")
            await _start_real(started)
        except EngineUnavailable as unavailable:
            await _stop(started)
            console.print(
                f"[yellow]No real engine can run here.[/] {escape(unavailable.reason)} "
                f"{escape(unavailable.remedy)}\nGoing on with scripted engines: their words are fixed, "
                "everything else is as with real ones."
            )
            await _start_scripted(started)
        for number, engine in enumerate(started, 1):
            console.print(f"  engine-{number}  {engine.url}  {escape(engine.explain)}")
        yield started
    finally:
        await _stop(started)


async def _start_real(started: list[Engine]) -> None:
    for _ in range(ENGINES):
        engine = LocalEngine(EngineOptions(slots=SLOTS))
        await engine.start()
        started.append(engine)


async def _start_scripted(started: list[Engine]) -> None:
    for _ in range(ENGINES):
        child = ChildServer("gateway.cli.scripted_engine", ["--slots", str(SLOTS)])
        started.append(ScriptedEngine(child, await child.start()))


async def _stop(started: list[Engine]) -> None:
    await asyncio.gather(*(engine.stop() for engine in started))
    started.clear()


def _config(engines: list[Engine]) -> Config:
    """Keyless on loopback; quiet, so that the log does not run into the show."""
    backends = tuple(
        Backend(name=f"engine-{number}", url=engine.url) for number, engine in enumerate(engines, 1)
    )
    return Config(
        backends=backends,
        listen=Listen(host=HOST, port=_port()),
        log=Log(level="error"),
        drain_s=2,
    )


def _port() -> int:
    """The usual port if nothing holds it, else any free one."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, PORT))
        except OSError:
            return 0
        return PORT


async def _scenes(console: Console, client: httpx2.AsyncClient) -> None:
    model = await demo_chat.first_model(client)
    first, messages = await _ask(console, client, model, [_said("system", SYSTEM)], QUESTIONS[0])
    _tell_reply(console, first)
    second, _ = await _ask(console, client, model, messages, QUESTIONS[1])
    _tell_reply(console, second)
    _tell_affinity(console, first, second)
    places = ENGINES * SLOTS
    console.print(f"[bold]{BURST} requests at once[/], for {places} slots and a queue of {places}:")
    _tell_burst(console, await demo_chat.burst(client, model, BURST, max_tokens=24))
    _tell_latency(console, await demo_chat.latency(client))


async def _ask(
    console: Console,
    client: httpx2.AsyncClient,
    model: str,
    messages: list[Message],
    question: str,
) -> tuple[Reply, list[Message]]:
    """One more turn; the reply, and the conversation with it."""
    console.print(f"[bold]You:[/] {question}\n[bold]{escape(model)}:[/] ", end="")
    asked = [*messages, _said("user", question)]

    def show(text: str) -> None:
        console.print(Text(text), end="")

    reply = await demo_chat.stream_chat(client, model, asked, show, max_tokens=60)
    console.print()
    return reply, [*asked, _said("assistant", reply.text)]


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _tell_reply(console: Console, reply: Reply) -> None:
    console.print(
        f"  {reply.backend}: first token after {1000 * reply.first_token_s:.0f} ms, "
        f"{reply.generated_tokens} tokens in {reply.total_s:.1f} s; "
        f"{reply.cached_tokens} of {reply.prompt_tokens} prompt tokens were cached\n"
    )


def _tell_affinity(console: Console, first: Reply, second: Reply) -> None:
    if first.backend == second.backend:
        where = f"The conversation went on at the same engine, {second.backend}"
    else:
        where = f"The conversation moved from {first.backend} to {second.backend}"
    console.print(
        f"{where} (affinity: {second.affinity}), which had {second.cached_tokens} of its "
        f"{second.prompt_tokens} prompt tokens in its cache.\n"
    )


def _tell_burst(console: Console, burst: Burst) -> None:
    console.print(f"  {burst.served} were served.")
    if burst.refused:
        least, most = burst.retry_after_s or (0, 0)
        console.print(
            f"  {burst.refused} got a 503 at once (p99 {burst.refusal_p99_ms:.0f} ms), "
            f"with Retry-After between {least} and {most} s."
        )
    if burst.failed:
        console.print(f"  [red]{burst.failed} failed otherwise.[/]")


def _tell_latency(console: Console, latency: Latency) -> None:
    console.print(
        f"\nWhat people got, by the gateway's own figures: p95 time to first token "
        f"[bold]{_ms(latency.ttft_p95_s)}[/], p95 between tokens [bold]{_ms(latency.itl_p95_s)}[/].\n"
    )


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1000 * seconds:.0f} ms"


def _tell_base_url(console: Console, base_url: str, keep: bool) -> None:
    if keep:
        console.print(
            f"It stays up until Ctrl-C. In your client set base_url to [bold]{base_url}/v1[/] (any API key), or try\n"
            f"  {escape(_curl(base_url))}\n"
            f"and in another terminal\n  slotgate status --watch --url {base_url}"
        )
    else:
        console.print(
            f"In your client set base_url to [bold]http://{HOST}:{PORT}/v1[/], while `slotgate demo --keep` "
            "runs, or `slotgate serve --backend URL` in front of your own engine."
        )


def _curl(base_url: str) -> str:
    body = '{"stream": true, "messages": [{"role": "user", "content": "Hello"}]}'
    return f"curl -N {base_url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
