"""Routing over real HTTP: simulated engines, agents, Slotgate and its peers in the same run.

    python -m bench.routing [--seeds 5] [--only slotgate,nginx] [--scenarios A,C] [--in-turn] [--save FILE] [--peers DIR]

Engines (`bench.sim_engine`) behave in time like llama-server or vLLM and cost no compute. Each proxy gets four of its own,
and all proxies run at the same time, so that the machine's noise meets all alike; `--in-turn` runs one after the other.
A to C are each run with both kinds of engine. The others: engines of unequal speed; both kinds at once; one that dies after
8 s and is back, empty, after another 8; and everybody's first turn one by one with a long shared prompt, which gives all
the same home. Medians of the seeds. "failed": attempts that ended in an error or a broken stream; "lost": turns given up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import uvloop

from bench import agents, machine, proxies
from bench.agents import Crowd

NAMES = ("nginx", "sglang-router", "vllm-router", "slotgate")
LLAMA, VLLM = ("--engine", "llama-server"), ("--engine", "vllm")
A = Crowd()
B = Crowd(shared=2500, own=300)
C = Crowd(agents=32, turns=4, own=1200, think_s=1.0, max_tokens=64)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`engines`: arguments of each. `dies`: after how many seconds the last one dies, and is back."""

    crowd: Crowd
    engines: tuple[tuple[str, ...], ...]
    dies: tuple[float, float] | None = None


UNEVEN = tuple((*LLAMA, "--prefill", rate) for rate in ("1000", "2000", "2000", "4000"))
SCENARIOS = {
    "A llama-server": Scenario(A, (LLAMA,) * 4),
    "A vllm": Scenario(A, (VLLM,) * 4),
    "B llama-server": Scenario(B, (LLAMA,) * 4),
    "B vllm": Scenario(B, (VLLM,) * 4),
    "C llama-server": Scenario(C, (LLAMA,) * 4),
    "C vllm": Scenario(C, (VLLM,) * 4),
    "uneven": Scenario(A, UNEVEN),
    "mixed": Scenario(A, (LLAMA, LLAMA, VLLM, VLLM)),
    "one dies": Scenario(A, (LLAMA,) * 4, dies=(8.0, 16.0)),
    "one home": Scenario(replace(B, agents=24, gap_s=0.8, think_s=1.0, turns=5), (LLAMA,) * 4),
}


class Fleet:
    """Engines on ports of their own, a process for each."""

    def __init__(self, scenario: Scenario, where: Path) -> None:
        self.scenario, self.where = scenario, where
        self.ports = tuple(machine.free_port() for _ in scenario.engines)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for n in range(len(self.ports)):
            self.start(n)
        for n, port in enumerate(self.ports):
            if not machine.wait_until(port, "/health", self.processes[n]):
                raise RuntimeError("the engines did not come up")
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, n: int) -> None:
        log = self.where / f"engine-{self.ports[n]}.log"
        command = [
            sys.executable,
            "-m",
            "bench.sim_engine",
            str(self.ports[n]),
            *self.scenario.engines[n],
        ]
        self.processes[n] = machine.start(command, machine.LOAD_CORE, log)

    def kill(self, n: int) -> None:
        self.processes[n].kill()
        self.processes[n].wait()


async def measure(name: str, scenario: Scenario, seed: int, where: Path) -> dict[str, float]:
    """One proxy in front of engines of its own. Raises NotInstalled, RuntimeError."""
    where = where / f"{name}-{seed}"
    where.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as both:
        inner = both.enter_context(ExitStack())
        fleet = await asyncio.to_thread(inner.enter_context, Fleet(scenario, where))
        setup = proxies.Setup(fleet.ports, slots="auto")
        proxy = await asyncio.to_thread(inner.enter_context, proxies.running(name, setup, where))
        await asyncio.sleep(1.0)
        chaos = asyncio.ensure_future(dies(fleet, scenario)) if scenario.dies else None
        seen = await agents.run(
            f"http://127.0.0.1:{proxy.port}/v1", proxies.KEY, scenario.crowd, seed
        )
        if chaos is not None:
            await chaos
        out = figures(seen)
        both.pop_all()
        await asyncio.to_thread(inner.close)
    return out


async def dies(fleet: Fleet, scenario: Scenario) -> None:
    last = len(fleet.ports) - 1
    await asyncio.sleep(scenario.dies[0])
    fleet.kill(last)
    await asyncio.sleep(scenario.dies[1] - scenario.dies[0])
    fleet.start(last)


def figures(seen: agents.Seen) -> dict[str, float]:
    ordered = sorted(seen.ttft)
    return {
        "mean": statistics.fmean(ordered),
        "p50": ordered[len(ordered) // 2],
        "p95": ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))],
        "cached": seen.cached_share,
        "failed": sum(seen.status.values()),
        "lost": seen.lost,
        "status": dict(seen.status),
    }


async def race(names: list[str], scenario: Scenario, seed: int, where: Path, *, in_turn: bool):
    """Figures by proxy; what is not installed, or does not come up, is left out."""
    if in_turn:
        found = [await settle(measure(name, scenario, seed, where)) for name in names]
    else:
        found = await asyncio.gather(
            *(settle(measure(name, scenario, seed, where)) for name in names)
        )
    return dict(zip(names, found, strict=True))


async def settle(measured):
    try:
        return await measured
    except (proxies.NotInstalled, RuntimeError) as error:
        return str(error)


def show(title: str, rows: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    medians = {
        name: {w: statistics.median(one[w] for one in some) for w in some[0] if w != "status"}
        for name, some in rows.items()
        if some
    }
    print(f"\n{title}")
    print(f"  {'':14} {'mean':>7} {'p50':>7} {'p95':>7} {'cached':>7} {'failed':>7} {'lost':>5}")
    for name, one in medians.items():
        print(
            f"  {name:14} {one['mean']:7.3f} {one['p50']:7.3f} {one['p95']:7.3f} {one['cached']:7.3f} "
            f"{one['failed']:7.0f} {one['lost']:5.0f}"
        )
    others = [one for name, one in medians.items() if name != "slotgate"]
    if "slotgate" in medians and others:
        ratios = [medians["slotgate"][w] / min(one[w] for one in others) for w in ("mean", "p95")]
        print(f"  of the best peer: mean x {ratios[0]:.2f}, p95 x {ratios[1]:.2f}", flush=True)
    return medians


async def run(args: argparse.Namespace, where: Path) -> dict:
    names = args.only.split(",") if args.only else list(NAMES)
    wanted = args.scenarios.split(",") if args.scenarios else [""]
    results = {}
    for title, scenario in SCENARIOS.items():
        if not any(title.startswith(one) for one in wanted):
            continue
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for seed in range(1, args.seeds + 1):
            place = where / title.replace(" ", "-")
            found = await race(names, scenario, seed, place, in_turn=args.in_turn)
            for name, one in found.items():
                if isinstance(one, str):
                    print(f"{name}: {one}", file=sys.stderr)
                else:
                    rows[name].append(one)
        results[title] = {"medians": show(title, rows), "runs": rows}
    return results


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--only", help="names of proxies, with commas")
    p.add_argument("--scenarios", help="how their titles begin, with commas")
    p.add_argument("--in-turn", action="store_true")
    p.add_argument("--peers", help="virtual environment of sglang-router and vllm-router")
    p.add_argument("--save", type=Path)
    args = p.parse_args()
    if args.peers:
        os.environ["BENCH_PEERS"] = args.peers
    with tempfile.TemporaryDirectory(prefix="slotgate-routing-") as where:
        results = uvloop.run(run(args, Path(where)))
    if args.save:
        args.save.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
