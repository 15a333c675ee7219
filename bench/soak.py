"""Many requests and everything that goes wrong with them; and what is left in the gateway's process afterwards.

    python -m bench.soak [--requests 1000000] [--clients 32] [--check]

Requests are streams and whole answers, each with a prompt of its own; some leave in the middle, some are refused (a wrong
key, an unknown model, broken JSON, a full queue). Meanwhile the configuration is reloaded and engines die and come back.
Memory, descriptors and the gateway's own gauges are read twenty times, at equal numbers of requests; the first half is the
filling of bounded caches, the second half has to be flat. `--check`: exit status 1 when it is not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import uvloop

from bench import machine
from bench.client import Client, request

KEYS = {name: f"sk-sg-soak-{name}-0123456789abcdef" for name in ("ann", "bob", "ops")}
LOOKS = 20
RELOAD_EVERY_S, DEATH_EVERY_S = 2.0, 3.0
SLOPE_BYTES = 1024  # a request, over the last half
FLAT_MIB = 8.0  # and altogether: what an allocator moves by without a leak
GAUGES = re.compile(r"^slotgate_(in_flight|queue_depth|settling)\{.*?\} ([1-9]\S*)$", re.MULTILINE)


@dataclass(slots=True)
class Look:
    """The gateway's process at one moment."""

    requests: int
    rss_mib: float
    descriptors: int
    series: int


@dataclass(slots=True)
class Soak:
    """One run. Owner of the processes and of what was counted."""

    where: Path
    args: argparse.Namespace
    port: int = 0
    ports: list[int] = field(default_factory=list)
    gateway: subprocess.Popen[bytes] | None = None
    engines: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    sent: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    looks: list[Look] = field(default_factory=list)

    def start(self) -> None:
        self.port, *self.ports = (machine.free_port() for _ in range(4))
        for port in self.ports:
            self._engine(port)
        self.configure(0)
        keys = "".join(
            f"- {{name: {name}, hash: 'sha256:{sha256(key.encode()).hexdigest()}', admin: {str(name == 'ops').lower()}}}\n"
            for name, key in KEYS.items()
        )
        (self.where / "keys.yaml").write_text(keys)
        command = [sys.executable, "-m", "gateway", "serve", "--config", str(self._file)]
        log = self.where / "gateway.log"
        self.gateway = machine.start(command, machine.PROXY_CORE, log)
        if not machine.wait_until(self.port, "/readyz", self.gateway):
            raise RuntimeError(f"the gateway did not come up: {log.read_text()[-500:]}")

    def stop(self) -> None:
        for process in (self.gateway, *self.engines.values()):
            if process is not None:
                machine.stop(process)

    @property
    def _file(self) -> Path:
        return self.where / "slotgate.yaml"

    def _engine(self, port: int) -> None:
        command = [sys.executable, "-m", "bench.engines", str(port), "--tokens", "4"]
        self.engines[port] = machine.start(
            [*command, "--interval-ms", "0"], machine.LOAD_CORE, self.where / f"{port}.log"
        )
        machine.wait_until(port, "/v1/models", self.engines[port])

    def configure(self, turn: int) -> None:
        """Every reload changes something; every third takes a backend away, which then comes back."""
        lines = [
            f"listen: {{host: 127.0.0.1, port: {self.port}}}",
            "auth: {keys_file: keys.yaml}",
            "log: {level: error, format: json}",
            f"admission: {{queue: {4 + turn % 5}, max_wait_s: 5}}",
            "backends:",
        ]
        for n, port in enumerate(self.ports):
            if n != 2 or turn % 3 != 2:
                slots = 6 + turn % 2
                lines.append(f"  - {{name: e{n}, url: 'http://127.0.0.1:{port}', slots: {slots}}}")
        self._file.write_text("\n".join(lines) + "\n")

    # -- what goes on meanwhile

    async def reloads(self) -> None:
        turn = 0
        while True:
            await asyncio.sleep(RELOAD_EVERY_S)
            turn += 1
            self.configure(turn)
            self.gateway.send_signal(signal.SIGHUP)
            self.seen["reloads"] += 1

    async def deaths(self) -> None:
        while True:
            await asyncio.sleep(DEATH_EVERY_S)
            port = random.choice(self.ports[1:])
            self.engines[port].kill()
            self.engines[port].wait()
            await asyncio.sleep(0.3)
            await asyncio.to_thread(self._engine, port)
            self.seen["deaths"] += 1

    async def client(self, number: int) -> None:
        rng = random.Random(number)
        client = await Client.connect(self.port)
        while self.sent < self.args.requests:
            self.sent += 1
            if client.closed:
                client = await Client.connect(self.port)
            await self._one(client, rng)
        client.leave()

    async def _one(self, client: Client, rng: random.Random) -> None:
        dice = rng.random()
        asked = request(
            self.port,
            stream=dice < 0.4,
            key="sk-sg-nobody" if 0.94 < dice < 0.96 else KEYS[rng.choice(("ann", "bob"))],
            body_bytes=rng.choice((200, 2000, 8000)),
            who=f"{rng.getrandbits(64):x}",  # nobody has this prompt in a cache
        )
        if 0.96 < dice < 0.98:
            asked = asked.replace(b'"model": "m"', b'"model": "%c"' % rng.randrange(97, 123))
        elif dice > 0.98:
            asked = asked.replace(b'{"model"', b'["model"')
        leaves = rng.random() < 0.08
        after_s = rng.random() * 0.01 if leaves else 60
        leaving = asyncio.get_running_loop().call_later(after_s, client.leave)
        try:
            self.seen[str((await client.ask(asked)).status)] += 1
        except ConnectionError:
            self.seen["left" if leaves else "broken"] += 1
            client.closed = True
        finally:
            leaving.cancel()

    # -- looking

    def look(self) -> None:
        pid = self.gateway.pid
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        series = sum(not line.startswith("#") for line in self.metrics().splitlines())
        now = Look(self.sent, machine.rss_mib([pid]), descriptors, series)
        self.looks.append(now)
        print(
            f"{now.requests:>10} {now.rss_mib:>8.1f} {now.descriptors:>5} {now.series:>6}",
            flush=True,
        )

    async def looking(self) -> None:
        for n in range(1, LOOKS + 1):
            while self.sent < self.args.requests * n / LOOKS:  # noqa: ASYNC110 - a counter
                await asyncio.sleep(0.02)
            await asyncio.to_thread(self.look)

    def metrics(self) -> str:
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}/metrics")
        asked.add_header("Authorization", f"Bearer {KEYS['ops']}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return opener.open(asked, timeout=10).read().decode()

    async def held(self) -> list[str]:
        """Gauges that are not back to zero five seconds after the end."""
        for _ in range(50):
            found = [f"{name} {value}" for name, value in GAUGES.findall(self.metrics())]
            if not found:
                return []
            await asyncio.sleep(0.1)
        return found


async def run(soak: Soak) -> None:
    beside = [asyncio.create_task(one()) for one in (soak.reloads, soak.deaths)]
    looking = asyncio.create_task(soak.looking())
    try:
        await asyncio.gather(*(soak.client(n) for n in range(soak.args.clients)))
        await looking
    finally:
        for task in (*beside, looking):
            task.cancel()
        await asyncio.gather(*beside, looking, return_exceptions=True)


def slope_bytes(looks: list[Look]) -> float:
    """Bytes a request, by least squares: one look that is off does not decide."""
    x = [look.requests for look in looks]
    y = [look.rss_mib * 2**20 for look in looks]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    down = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / down if down else 0


def wrong(soak: Soak, held: list[str]) -> list[str]:
    """What is not as it must be."""
    half = soak.looks[len(soak.looks) // 2 :]
    slope, grown = slope_bytes(half), half[-1].rss_mib - half[0].rss_mib
    out = [f"not back to zero: {one}" for one in held]
    if slope > SLOPE_BYTES:
        out.append(f"memory grows by {slope:.0f} bytes a request")
    if soak.args.requests >= 200_000 and grown > FLAT_MIB:
        out.append(f"memory grew by {grown:.1f} MiB over the last half")
    most = max(look.descriptors for look in half)
    if most > 64 + 8 * soak.args.clients:
        out.append(f"{most} descriptors are open")
    if soak.seen["200"] < soak.sent / 2:
        out.append("fewer than half of the requests were served")
    return out


def verdict(soak: Soak, seconds: float) -> None:
    half = soak.looks[len(soak.looks) // 2 :]
    print(f"{soak.sent} requests in {seconds:.0f} s: {dict(sorted(soak.seen.items()))}")
    print(f"over the last half: {slope_bytes(half):.0f} bytes a request, "
          f"{half[-1].rss_mib - half[0].rss_mib:+.1f} MiB")  # fmt: skip


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    p.add_argument("--requests", type=int, default=1_000_000)
    p.add_argument("--clients", type=int, default=32)
    p.add_argument("--check", action="store_true")
    args = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="slotgate-soak-") as folder:
        soak = Soak(Path(folder), args)
        begun = time.monotonic()
        print(f"{'requests':>10} {'RSS MiB':>8} {'open':>5} {'series':>6}")
        try:
            soak.start()
            uvloop.run(run(soak))
            held = uvloop.run(soak.held())
        finally:
            soak.stop()
        verdict(soak, time.monotonic() - begun)
        log = (Path(folder) / "gateway.log").read_text()
    faults = wrong(soak, held)
    if "Traceback" in log:
        faults.append("the log holds a traceback:\n" + log[-2000:])
    for fault in faults:
        print(f"NOT AS IT MUST BE: {fault}")
    return 1 if args.check and faults else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
