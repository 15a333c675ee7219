"""What a proxy costs: CPU per request and per event, added time to first token, memory. Slotgate beside its peers, in one run.

    python -m bench.overhead [--rounds 3] [--peers DIR] [--only slotgate,nginx] [--no-memory]

Rounds are interleaved (every proxy once, then again), and the medians are printed, because a small machine is noisy.
Slotgate runs with all features on: keys, admission, affinity, metrics, JSON log. CPU is that of the proxy's processes
(/proc), so it holds on a busy machine; TTFT does not, and wants a quiet one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

import uvloop

from bench import machine, proxies
from bench.client import Answered, Client, quantile, request

STREAMS = 64
TARGETS = (
    ("CPU per request, to sglang-router", "request_us", "sglang-router", 0.85),
    ("CPU per request, to vllm-router", "request_us", "vllm-router", 0.85),
    ("CPU per request, to nginx", "request_us", "nginx", 8.0),
    ("CPU per event, to sglang-router", "event_us", "sglang-router", 1.0),
    ("CPU per event, to nginx", "event_us", "nginx", 2.5),
    ("added p95 TTFT, to sglang-router", "added_p95_ms", "sglang-router", 0.15),
)


async def closed_loop(port: int, each: int, concurrency: int, *, stream: bool) -> list[Answered]:
    """`concurrency` clients, `each` requests of every one, without a pause."""
    asked = request(port, stream=stream, key=proxies.KEY)
    answers: list[Answered] = []

    async def one() -> None:
        client = await Client.connect(port)
        for _ in range(each):
            if client.closed:
                client = await Client.connect(port)
            try:
                answers.append(await client.ask(asked))
            except ConnectionError:
                answers.append(Answered())
        client.leave()

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return answers


async def measure(proxy: proxies.Proxy, args: argparse.Namespace) -> dict[str, float]:
    """The figures of one proxy in one round."""
    out: dict[str, float] = {}
    await closed_loop(proxy.port, 40, 16, stream=False)  # warm
    cpu, begun = machine.cpu_seconds(proxy.pids), time.monotonic()
    answers = await closed_loop(proxy.port, args.requests // 16, 16, stream=False)
    out["request_us"] = (machine.cpu_seconds(proxy.pids) - cpu) / len(answers) * 1e6
    out["per_s"] = len(answers) / (time.monotonic() - begun)
    out["failed"] = sum(a.status != 200 for a in answers)
    await closed_loop(proxy.port, 1, STREAMS, stream=True)  # warm
    cpu = machine.cpu_seconds(proxy.pids)
    answers = await closed_loop(proxy.port, args.streams, STREAMS, stream=True)
    events = sum(a.events for a in answers)
    out["event_us"] = (machine.cpu_seconds(proxy.pids) - cpu) / max(1, events) * 1e6
    out["failed"] += sum(a.status != 200 for a in answers)
    ttft = [a.first_s * 1e3 for a in answers if a.first_s is not None]
    out["ttft_p50_ms"], out["ttft_p95_ms"] = quantile(ttft, 0.5) or 0, quantile(ttft, 0.95) or 0
    gaps = [gap * 1e3 for a in answers for gap in a.gaps]
    out["gap_p99_ms"] = quantile(gaps, 0.99) or 0
    return out


async def idle_streams(where: Path, count: int) -> tuple[float, float]:
    """RSS of Slotgate in MiB: at start, and with `count` streams open that say nothing."""
    with proxies.engines(1, where, "--kind", "hold") as ports:
        setup = proxies.Setup(ports, slots=count + 64)
        with proxies.running("slotgate", setup, where) as proxy:
            before = machine.rss_mib(proxy.pids)
            asked = request(proxy.port, stream=True, key=proxies.KEY)
            clients = [await Client.connect(proxy.port) for _ in range(count)]
            tasks = [asyncio.ensure_future(client.ask(asked)) for client in clients]
            deadline = time.monotonic() + 60
            while not all(c.answer.events for c in clients):
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.1)
            opened = sum(c.answer.events > 0 for c in clients)
            after = machine.rss_mib(proxy.pids)
            for client, task in zip(clients, tasks, strict=True):
                client.leave()
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    if opened < count:
        print(f"  only {opened} of {count} streams opened")
    return before, after


async def clients_that_never_read(where: Path, count: int = 10, seconds: float = 8) -> float:
    """How much Slotgate's RSS grows in MiB at most while `count` clients read nothing of a flood."""
    with (
        proxies.engines(1, where, "--kind", "flood") as ports,
        proxies.running("slotgate", proxies.Setup(ports), where) as proxy,
    ):
        await closed_loop(proxy.port, 1, 1, stream=False)
        before = most = machine.rss_mib(proxy.pids)
        clients = [await Client.connect(proxy.port) for _ in range(count)]
        for client in clients:
            client.transport.pause_reading()
            client.transport.write(request(proxy.port, stream=True, key=proxies.KEY))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            most = max(most, machine.rss_mib(proxy.pids))
            await asyncio.sleep(0.1)
        for client in clients:
            client.leave()
    return most - before


def table(results: dict[str, dict[str, float]], absent: dict[str, str], *, direct: str) -> None:
    columns = [
        ("request_us", "CPU µs/request"), ("event_us", "CPU µs/event"), ("per_s", "requests/s"),
        ("ttft_p50_ms", "TTFT p50 ms"), ("ttft_p95_ms", "TTFT p95 ms"), ("gap_p99_ms", "gap p99 ms"),
        ("failed", "failed"),
    ]  # fmt: skip
    print("| one pinned core | " + " | ".join(title for _, title in columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for name, row in results.items():
        cells = [
            "-"
            if name == direct and key in ("request_us", "event_us")
            else f"{row[key]:.{1 if row[key] < 100 else 0}f}"
            for key, _ in columns
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    for name, reason in absent.items():
        print(f"| {name} | {reason} |" + " |" * (len(columns) - 1))


def ratios(results: dict[str, dict[str, float]], direct: str) -> None:
    ours = results.get("slotgate")
    if ours is None:
        return
    floor = results[direct]["ttft_p95_ms"]
    for row in results.values():
        row["added_p95_ms"] = max(0.0, row["ttft_p95_ms"] - floor)
    print("\n| Slotgate | ratio | target |\n| --- | --- | --- |")
    for title, key, peer, target in TARGETS:
        if peer in results and results[peer][key]:
            ratio = ours[key] / results[peer][key]
            print(
                f"| {title} | {ratio:.2f} | {'met' if ratio <= target else 'MISSED'}: at most {target} |"
            )


async def run(args: argparse.Namespace, where: Path) -> None:
    direct = "no proxy"
    names = [name for name in proxies.ALL if not args.only or name in args.only.split(",")]
    rounds: dict[str, list[dict[str, float]]] = {}
    absent: dict[str, str] = {}
    engine = ["--kind", "fast", "--tokens", "64", "--interval-ms", "10"]
    with proxies.engines(1, where, *engine) as ports:
        for n in range(args.rounds):
            straight = proxies.Proxy(direct, ports[0], [])
            rounds.setdefault(direct, []).append(await measure(straight, args))
            for name in names:
                try:
                    with proxies.running(name, proxies.Setup(ports), where) as proxy:
                        rounds.setdefault(name, []).append(await measure(proxy, args))
                except (proxies.NotInstalled, RuntimeError) as error:
                    absent[name] = str(error)
            print(f"round {n + 1} of {args.rounds} done", flush=True)
    results = {
        name: {key: statistics.median(one[key] for one in some) for key in some[0]}
        for name, some in rounds.items()
    }
    table(results, absent, direct=direct)
    ratios(results, direct)
    if not args.no_memory and (not args.only or "slotgate" in args.only):
        before, after = await idle_streams(where, 2000)
        print(
            f"\nmemory: {before:.0f} MiB at start, {after:.0f} MiB with 2,000 open idle streams (target: below 150 MB)"
        )
        grown = await clients_that_never_read(where)
        print(
            f"memory: grows by {grown:.1f} MiB with 10 clients that never read a flood (target: below 32 MiB)"
        )


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--requests", type=int, default=6400, help="not streamed, per proxy and round")
    p.add_argument(
        "--streams", type=int, default=4, help="by each of 64 clients, per proxy and round"
    )
    p.add_argument("--peers", help="virtual environment of sglang-router and vllm-router")
    p.add_argument("--only", help="names of proxies, with commas")
    p.add_argument("--no-memory", action="store_true")
    args = p.parse_args()
    if args.peers:
        os.environ["BENCH_PEERS"] = args.peers
    os.sched_setaffinity(0, {machine.LOAD_CORE})
    with tempfile.TemporaryDirectory(prefix="slotgate-bench-") as where:
        uvloop.run(run(args, Path(where)))


if __name__ == "__main__":
    main()
