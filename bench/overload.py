"""More work than the engines can do: who is served, who is told what, and what is wasted. Slotgate beside its peers.

    python -m bench.overload [--seconds 12] [--loads 1,2,5,10,20] [--only slotgate] [--peers DIR]

Four engines of four slots; a request holds one for half a second. All in one run:

open     requests arrive at random, `load` times as many as the engines can serve, over at most 1,000 connections.
         A client gives up after `--patience` seconds and tries again twice, as the SDKs do; it waits as long as a
         Retry-After says, else 0.5 s, then 1 s. A lost request is nobody's fault at 10 x; a wasted token is.
closed   `load` times as many clients as slots, each with one request after the other.
hammer   clients that try again at once, whatever they are told, while streams run (not for peers that refuse nobody).
after    how long after a load of 10 x has dropped to a half until nobody is refused and first tokens come as they did before.

goodput: tokens of answers that came whole, as a share of what the engines can make. in vain: tokens of answers that did not, as a
share of all. wasted: those of them that were made after the client had left. fairness: Jain's index of what four keys got, one of which sends 7 of 10 requests (1 is equal).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from bench import machine, proxies
from bench.client import Answered, Client, quantile, request

ENGINES, SLOTS, TOKENS, INTERVAL_S = 4, 4, 32, 0.015
SERVICE_S = TOKENS * INTERVAL_S
CONNECTIONS = 1000
RETRIES = 2  # of the SDKs, by default
MAX_WAIT_S = 2.0  # for a slot, as Slotgate is told
SHARES = (0.7, 0.1, 0.1, 0.1)  # of the arrivals, by key
LIGHT = 0.4  # a load at which nobody waits


@dataclass(slots=True)
class Tally:
    """What the clients of one phase met. Times are CLOCK_MONOTONIC."""

    served: list[tuple[float, str, Answered]] = field(default_factory=list)  # end, key, answer
    refused: list[tuple[float, float]] = field(default_factory=list)  # end, seconds it took
    whole: set[str] = field(default_factory=set)  # who got an answer to its end
    left: dict[str, float] = field(default_factory=dict)  # who gave up, and when
    broken: int = 0
    lost: int = 0


class Connections:
    """At most CONNECTIONS, used again. Owned by the phase."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._idle: list[Client] = []
        self._room = asyncio.Semaphore(CONNECTIONS)

    async def ask(self, asked: bytes, patience_s: float) -> Answered:
        """Raises TimeoutError when the client gave up, ConnectionError when it broke."""
        async with self._room:
            client = self._idle.pop() if self._idle else await Client.connect(self.port)
            try:
                async with asyncio.timeout(patience_s):
                    return await client.ask(asked)
            except (TimeoutError, asyncio.CancelledError):
                client.leave()
                raise
            finally:
                if not client.closed:
                    self._idle.append(client)

    def close(self) -> None:
        for client in self._idle:
            client.leave()


class People:
    """Clients of one proxy, all of one kind. Owner of the tally."""

    def __init__(self, port: int, patience_s: float, seed: int) -> None:
        self.connections = Connections(port)
        self.port, self.patience_s = port, patience_s
        self.rng = random.Random(seed)
        self.tally = Tally()
        self._count = 0

    async def one(self, key: str, *, retries: int = RETRIES, obey: bool = True) -> None:
        """One request, with what an SDK does when it fails."""
        for attempt in range(retries + 1):
            self._count += 1
            user = f"{key}-{self._count}"
            asked = request(
                self.port, stream=True, key=proxies.KEYS[key], body_bytes=1024, who=user
            )
            pause = 0.5 * 2**attempt * self.rng.uniform(0.75, 1)
            try:
                answer = await self.connections.ask(asked, self.patience_s)
            except TimeoutError:
                self.tally.left[user] = time.monotonic()
            except ConnectionError:
                self.tally.broken += 1
            else:
                if answer.status == 200 and answer.complete:
                    self.tally.whole.add(user)
                    self.tally.served.append((time.monotonic(), key, answer))
                    return
                self.tally.refused.append((time.monotonic(), answer.whole_s or 0.0))
                if answer.retry_after_s is not None:
                    pause = answer.retry_after_s
            if obey:
                await asyncio.sleep(pause)
        self.tally.lost += 1

    def key(self) -> str:
        return self.rng.choices(list(proxies.KEYS), SHARES)[0]

    async def arrive(self, rate: float, seconds: float) -> set[asyncio.Task[None]]:
        """Poisson arrivals. The requests that are still under way at the end are handed back."""
        tasks: set[asyncio.Task[None]] = set()
        begun = due = time.monotonic()
        while (due := due + self.rng.expovariate(rate)) < begun + seconds:
            if (ahead := due - time.monotonic()) > 0:
                await asyncio.sleep(ahead)
            task = asyncio.ensure_future(self.one(self.key()))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return tasks

    async def repeat(self, clients: int, seconds: float, *, obey: bool) -> None:
        """A closed loop of so many clients."""
        until = time.monotonic() + seconds

        async def client(key: str) -> None:
            while time.monotonic() < until:
                await self.one(key, retries=RETRIES if obey else 0, obey=obey)

        keys = list(proxies.KEYS)
        tasks = [asyncio.ensure_future(client(keys[n % len(keys)])) for n in range(clients)]
        _, late = await asyncio.wait(tasks, timeout=seconds)
        await end(late)


async def end(tasks: set[asyncio.Task[None]]) -> None:
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def made_by(ports: tuple[int, ...]) -> dict[str, list[float]]:
    """The times of all tokens since the last call, by the request they were made for."""
    out: dict[str, list[float]] = {}
    for port in ports:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 28)
        writer.write(b"GET /made HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        for user, times in json.loads(await reader.readexactly(size)).items():
            out.setdefault(user, []).extend(times)
        writer.close()
    return out


def jain(values: list[float]) -> float:
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


def summary(
    tally: Tally, made: dict[str, list[float]], begun: float, until: float, capacity: float
) -> dict[str, float | None]:
    """The figures of one phase, from its second quarter until two services before its end.

    So that every token of that time has had the chance to belong to a whole answer.
    """
    begun, until = begun + (until - begun) / 4, until - 2 * SERVICE_S
    served = [one for one in tally.served if begun <= one[0] <= until]
    refused = [seconds for at, seconds in tally.refused if begun <= at <= until]
    ttft = [answer.first_s for _, _, answer in served if answer.first_s is not None]
    tokens = sum(len(times) for times in made.values())
    within = {user: sum(begun <= at <= until for at in times) for user, times in made.items()}
    good = sum(count for user, count in within.items() if user in tally.whole)
    wasted = sum(
        sum(at > tally.left[user] for at in times)
        for user, times in made.items()
        if user in tally.left
    )
    return {
        "goodput": good / TOKENS / (until - begun) / capacity,
        "in_vain": 1 - good / max(1, sum(within.values())),
        "ttft_p50": quantile(ttft, 0.5),
        "ttft_p95": quantile(ttft, 0.95),
        "ttft_p99": quantile(ttft, 0.99),
        "refusals_per_s": len(refused) / (until - begun),
        "refusal_p50_ms": _ms(quantile(refused, 0.5)),
        "refusal_p99_ms": _ms(quantile(refused, 0.99)),
        "wasted": wasted / max(1, tokens),
        "gave_up": len(tally.left),
        "lost": tally.lost,
        "broken": tally.broken,
        "fairness": jain([sum(key == k for _, k, _ in served) for key in proxies.KEYS]),
        "gap_p99_ms": _ms(quantile([gap for _, _, a in served for gap in a.gaps], 0.99)),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def back_to_normal(tally: Tally, dropped: float, until: float, usual: float) -> float | None:
    """Seconds after `dropped` from which on no second had a refusal or a p95 TTFT above `usual`; None: never."""
    since = None
    for second in range(int(until - dropped)):
        begun = dropped + second
        refused = any(begun <= at < begun + 1 for at, _ in tally.refused)
        ttft = [a.first_s for at, _, a in tally.served if begun <= at < begun + 1 and a.first_s]
        if refused or (quantile(ttft, 0.95) or 0) > usual:
            since = None
        elif since is None:
            since = float(second)
    return since


class Bench:
    """One proxy in front of the engines, phase after phase."""

    def __init__(self, proxy: proxies.Proxy, engines: tuple[int, ...], args: argparse.Namespace):
        self.proxy, self.engines, self.args = proxy, engines, args
        self.capacity: float = args.capacity
        self.seed = 1

    def people(self) -> People:
        self.seed += 1
        return People(self.proxy.port, self.args.patience, self.seed)

    async def settle(self) -> None:
        """Let the engines finish what they have, so that phases do not add up."""
        await asyncio.sleep(SERVICE_S * 2)
        for _ in range(60):
            before = await made_by(self.engines)
            await asyncio.sleep(0.3)
            if not before and not await made_by(self.engines):
                return

    async def open(self, load: float, seconds: float) -> dict[str, float | None]:
        await self.settle()
        people, begun = self.people(), time.monotonic()
        rest = await people.arrive(self.capacity * load, seconds)
        until = time.monotonic()
        await end(rest)
        people.connections.close()
        return summary(people.tally, await made_by(self.engines), begun, until, self.capacity)

    async def closed(self, clients: int, seconds: float, *, obey: bool) -> dict[str, float | None]:
        await self.settle()
        people, begun = self.people(), time.monotonic()
        cpu = machine.cpu_seconds(self.proxy.pids)
        await people.repeat(clients, seconds, obey=obey)
        until = time.monotonic()
        people.connections.close()
        out = summary(people.tally, await made_by(self.engines), begun, until, self.capacity)
        answers = len(people.tally.refused) + len(people.tally.served)
        out["answer_us"] = (machine.cpu_seconds(self.proxy.pids) - cpu) / max(1, answers) * 1e6
        return out

    async def after(self, usual_s: float) -> float | None:
        await self.settle()
        people = self.people()
        crowd = await people.arrive(self.capacity * 10, self.args.seconds / 2)
        dropped = time.monotonic()
        rest = await people.arrive(self.capacity * 0.5, 20)
        until = time.monotonic()
        await end(rest | crowd)
        people.connections.close()
        return back_to_normal(people.tally, dropped, until, usual_s)


COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("goodput", "goodput", "{:.0%}".format),
    ("ttft_p50", "TTFT p50 s", "{:.2f}".format),
    ("ttft_p95", "p95", "{:.2f}".format),
    ("ttft_p99", "p99", "{:.2f}".format),
    ("refusals_per_s", "refusals/s", "{:.0f}".format),
    ("refusal_p50_ms", "refusal p50 ms", "{:.1f}".format),
    ("refusal_p99_ms", "p99", "{:.1f}".format),
    ("in_vain", "in vain", "{:.0%}".format),
    ("wasted", "wasted", "{:.1%}".format),
    ("gave_up", "gave up", "{:.0f}".format),
    ("lost", "lost", "{:.0f}".format),
    ("broken", "broken", "{:.0f}".format),
    ("fairness", "fairness", "{:.2f}".format),
    ("gap_p99_ms", "gap p99 ms", "{:.0f}".format),
)


def line(name: str, phase: str, figures: dict[str, float | None]) -> None:
    cells = []
    for key, _, form in COLUMNS:
        value = figures.get(key)
        cells.append("-" if value is None else form(value))
    print(f"| {name} | {phase} | " + " | ".join(cells) + " |", flush=True)


async def measure(proxy: proxies.Proxy, engines: tuple[int, ...], args: argparse.Namespace) -> None:
    bench = Bench(proxy, engines, args)
    light = await bench.open(LIGHT, args.seconds / 2)
    line(proxy.name, f"open {LIGHT} x", light)
    unloaded = 1.5 * (light["ttft_p95"] or 0)
    for load in args.loads:
        line(proxy.name, f"open {load:g} x", await bench.open(load, args.seconds))
    for load in (2, 10):
        clients = load * ENGINES * SLOTS
        line(
            proxy.name,
            f"closed {load:g} x",
            await bench.closed(clients, args.seconds / 2, obey=True),
        )
    if proxy.name == "slotgate":
        hammer = await bench.closed(args.hammers, args.seconds / 2, obey=False)
        line(proxy.name, f"hammer, {args.hammers}", hammer)
        print(
            f"(CPU for an answer while they hammer, streams included: {hammer['answer_us']:.0f} µs)"
        )
    since = await bench.after(unloaded + SERVICE_S)
    took = "not within 20 s" if since is None else f"after {since:.0f} s"
    print(
        f"{proxy.name}: target for the p95 TTFT {unloaded + MAX_WAIT_S:.2f} s; back to normal {took}",
        flush=True,
    )


async def run(args: argparse.Namespace, where: Path) -> None:
    names = args.only.split(",") if args.only else ["nginx", "sglang-router", "slotgate"]
    engine = ("--kind", "slots", "--slots", str(SLOTS), "--tokens", str(TOKENS))
    pace = ("--interval-ms", str(INTERVAL_S * 1000))
    with proxies.engines(ENGINES, where, *engine, *pace) as ports:
        args.capacity = await capacity_of(ports)
        print(
            f"capacity {args.capacity:.1f} requests/s, {args.seconds} s a phase, patience {args.patience} s"
        )
        print("| proxy | load | " + " | ".join(title for _, title, _ in COLUMNS) + " |")
        print("| --- | --- |" + " --- |" * len(COLUMNS))
        setup = proxies.Setup(ports, slots=SLOTS, max_wait_s=MAX_WAIT_S)
        for name in names:
            try:
                with proxies.running(name, setup, where) as proxy:
                    await measure(proxy, ports, args)
            except (proxies.NotInstalled, RuntimeError) as error:
                print(f"| {name} | {error} |" + " |" * len(COLUMNS))


async def capacity_of(ports: tuple[int, ...]) -> float:
    """Requests a second that the engines serve when asked directly, every slot busy."""
    crowds = [People(port, 60, 0) for port in ports]
    begun = time.monotonic()
    await asyncio.gather(*(crowd.repeat(SLOTS, 6, obey=True) for crowd in crowds))
    took = [answer.whole_s for crowd in crowds for _, _, answer in crowd.tally.served]
    for crowd in crowds:
        crowd.connections.close()
    await asyncio.sleep(max(0.0, begun + 6 + 2 * SERVICE_S - time.monotonic()))
    await made_by(ports)
    return ENGINES * SLOTS / (quantile(took, 0.5) or SERVICE_S)


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seconds", type=float, default=12)
    p.add_argument(
        "--loads",
        type=lambda text: [float(one) for one in text.split(",")],
        default=[1.0, 2.0, 5.0, 10.0, 20.0],
    )
    p.add_argument("--patience", type=float, default=5, help="seconds until a client gives up")
    p.add_argument("--hammers", type=int, default=64)
    p.add_argument("--only", help="names of proxies, with commas")
    p.add_argument("--peers", help="virtual environment of sglang-router and vllm-router")
    args = p.parse_args()
    if args.peers:
        os.environ["BENCH_PEERS"] = args.peers
    os.sched_setaffinity(0, {machine.LOAD_CORE})
    with tempfile.TemporaryDirectory(prefix="slotgate-bench-") as where:
        uvloop.run(run(args, Path(where)))


if __name__ == "__main__":
    main()
