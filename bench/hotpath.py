"""Where a request's CPU goes: the real gateway in this process, its engine and its clients in others, on another core.

    python -m bench.hotpath [--batches 20] [--requests 480] [--stream] [--calls] [--profile FILE]

CPU is that of the loop's own thread, batch by batch; the least is printed beside the median, because others use the
machine and only ever add. `--calls` counts Python and C calls per request instead, which nobody else can change.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import cProfile
import gc
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import uvloop

from bench import machine, proxies
from bench.client import Client, request

CLIENTS = 16
EVENTS = 66  # of one stream: the tokens, the finish and [DONE]


async def load() -> None:
    """The other process: for each line `COUNT STREAM` on stdin so many requests, then a line on stdout."""
    port = int(sys.argv[2])
    loop = asyncio.get_running_loop()
    clients = [await Client.connect(port) for _ in range(CLIENTS)]
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        count, stream = map(int, line.split())
        asked = request(port, stream=bool(stream), key=proxies.KEY)

        async def one(client: Client, asked: bytes = asked, each: int = count // CLIENTS) -> None:
            for _ in range(each):
                answer = await client.ask(asked)
                assert answer.status == 200, answer

        await asyncio.gather(*(one(client) for client in clients))
        print("done", flush=True)


class Calls:
    """Counts calls on this thread while it is set as the profiler."""

    def __init__(self) -> None:
        self.python: collections.Counter[str] = collections.Counter()
        self.c: collections.Counter[str] = collections.Counter()

    def __call__(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            code = frame.f_code
            self.python[f"{code.co_filename.rpartition('/')[2]}:{code.co_qualname}"] += 1
        elif event == "c_call":
            self.c[getattr(what, "__qualname__", str(what))] += 1

    def print(self, per: int, most: int) -> None:
        print(f"calls per request: {sum(self.python.values()) / per:.1f} Python, "
              f"{sum(self.c.values()) / per:.1f} C")  # fmt: skip
        for title, counter in (("Python", self.python), ("C", self.c)):
            print(f"-- {title}")
            for name, count in counter.most_common(most):
                print(f"{count / per:8.2f}  {name}")


class Load:
    """The process of the clients."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, port: int) -> Load:
        command = [sys.executable, "-m", "bench.hotpath", "--load", str(port)]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        os.sched_setaffinity(process.pid, {machine.LOAD_CORE})
        return cls(process)

    async def run(self, count: int, *, stream: bool) -> None:
        self._process.stdin.write(f"{count} {int(stream)}\n".encode())
        line = await self._process.stdout.readline()
        if line != b"done\n":
            raise RuntimeError("the clients failed")

    async def stop(self) -> None:
        self._process.stdin.close()
        await self._process.wait()


async def run(args: argparse.Namespace, where: Path) -> None:
    from gateway.app import Gateway  # noqa: PLC0415  (after the pinning)
    from gateway.runtime import configfile  # noqa: PLC0415

    engine = ["--kind", "fast", "--tokens", str(EVENTS - 2), "--interval-ms", args.interval_ms]
    with proxies.engines(1, where, *engine) as ports:
        proxies.slotgate(proxies.Setup(ports, slots=args.slots), 0, where)
        sys.stderr = (where / "log").open("w")
        async with Gateway.serving(configfile.load(str(where / "slotgate.yaml"))) as gateway:
            load = await Load.start(gateway.server.port)
            count = args.requests // 8 if args.stream else args.requests
            await load.run(count, stream=args.stream)
            gc.collect()
            gc.freeze()
            if args.calls:
                await count_calls(load, count, args)
            elif args.profile:
                await profile(load, count, args)
            else:
                await measure(load, count, args)
            await load.stop()


async def measure(load: Load, count: int, args: argparse.Namespace) -> None:
    costs, kernels = [], []
    for _ in range(args.batches):
        before = time.thread_time()
        kernel = resource.getrusage(resource.RUSAGE_THREAD).ru_stime
        await load.run(count, stream=args.stream)
        costs.append((time.thread_time() - before) / count * 1e6)
        kernels.append((resource.getrusage(resource.RUSAGE_THREAD).ru_stime - kernel) / count * 1e6)
    per = EVENTS if args.stream else 1
    what = "event" if args.stream else "request"
    print(
        f"CPU us per {what}: least {min(costs) / per:.1f}, median {statistics.median(costs) / per:.1f}, "
        f"of that in the kernel {statistics.median(kernels) / per:.1f}"
    )


async def count_calls(load: Load, count: int, args: argparse.Namespace) -> None:
    calls = Calls()
    sys.setprofile(calls)
    await load.run(count, stream=args.stream)
    sys.setprofile(None)
    calls.print(count * (EVENTS if args.stream else 1), args.most)


async def profile(load: Load, count: int, args: argparse.Namespace) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    await load.run(count * 4, stream=args.stream)
    profiler.disable()
    profiler.dump_stats(args.profile)


def main() -> None:
    if sys.argv[1:2] == ["--load"]:
        uvloop.run(load())
        return
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--batches", type=int, default=20)
    p.add_argument(
        "--requests", type=int, default=480, help="in one batch; an eighth of it with --stream"
    )
    p.add_argument("--slots", type=int, default=64)
    p.add_argument("--stream", action="store_true")
    p.add_argument("--interval-ms", default="5")
    p.add_argument("--calls", action="store_true")
    p.add_argument("--most", type=int, default=60, help="lines of calls")
    p.add_argument("--profile", help="a file for pstats")
    args = p.parse_args()
    os.sched_setaffinity(0, {machine.PROXY_CORE})
    with tempfile.TemporaryDirectory(prefix="slotgate-bench-") as where:
        uvloop.run(run(args, Path(where)))


if __name__ == "__main__":
    main()
