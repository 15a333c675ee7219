"""Routing policies on simulated engines in virtual time: the real `core.dispatch` beside what others do.

    python -m bench.simulate [--engines 4,16,64] [--loads 30,50,70,85,95] [--kinds llama-server,vllm] [--seeds 5]
                             [--trace PATH]... [--requests N] [--agents] [--plots docs/img] [--save FILE]

Deterministic: nothing here depends on the machine. Load 100 % is where least-in-flight's p95 queue wait reaches 10 s, found
for each trace, number of engines, kind and seed by bisection; at 50 % the same requests arrive half as fast. A seed is
another window of the trace. Figures are over all requests of all seeds. The traces are not in this repository (3 and 1 MB):
`--trace`, or `../shared/data` when it is there; without any, the agents alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench import traces
from bench.policies import PEERS, policy
from bench.virtual import Engine, Speed, World

NAMES = (*PEERS, "slotgate")
NEAR = Path(__file__).parents[2] / "shared" / "data"
FULL_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Cell:
    trace: str  # a path, or a scenario's name
    kind: str
    engines: int
    load: int  # percent; 0: closed loop
    requests: int
    uneven: bool = False
    cache: int = 60_000  # tokens of the KV pool, or of llama-server's RAM cache

    @property
    def label(self) -> str:
        name = Path(self.trace).name.split("_")[0] if self.load else self.trace
        return f"{name}, {self.kind}{', uneven' if self.uneven else ''}{self._size}"

    @property
    def _size(self) -> str:
        return f", cache of {self.cache:,} tokens" if self.cache != 60_000 else ""


@dataclass(frozen=True, slots=True)
class Result:
    ttft: list[float]
    cached: int
    tokens: int
    work: list[float]
    idle_s: float = 0.0
    predicted: int = 0
    wait_p95: float = 0.0


def q(values: Iterable[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else math.nan


def world_of(cell: Cell, name: str, seed: int) -> World:
    speeds = [_speed(cell, n) for n in range(cell.engines)]
    world = World([Engine(n, speed) for n, speed in enumerate(speeds)], None)
    policy(name, world, seed)
    return world


def _speed(cell: Cell, n: int) -> Speed:
    prefill = 2000.0 * _factor(cell, n)
    return Speed(cell.kind, prefill=prefill, kv_tokens=cell.cache, ram_tokens=cell.cache)


def _factor(cell: Cell, n: int) -> float:
    return (0.5, 1.0, 1.0, 2.0)[n % 4] if cell.uneven else 1.0


def run(cell: Cell, name: str, seed: int, stretch: float = 1.0) -> Result:
    world = world_of(cell, name, seed)
    if cell.load:
        lines = traces.window(_trace(cell.trace), cell.requests, seed)
        traces.replay(world, lines, stretch)
    else:
        traces.agents(world, traces.SCENARIOS[cell.trace], seed)
    world.run()
    jobs = world.done
    return Result(
        [job.first - job.came for job in jobs],
        sum(job.cached for job in jobs),
        sum(job.tokens for job in jobs),
        [engine.slot_seconds for engine in world.engines],
        predicted=getattr(world.policy, "predicted", 0),
        wait_p95=q([job.began - job.came for job in jobs], 0.95),
    )


_LOADED: dict[str, list[traces.Line]] = {}


def _trace(path: str) -> list[traces.Line]:
    if path not in _LOADED:
        _LOADED[path] = traces.load(Path(path))
    return _LOADED[path]


def full_load(cell: Cell, seed: int) -> float:
    """The stretch at which least-in-flight's p95 queue wait is 10 s."""
    low, high = 0.001, 1000.0  # the wait falls as the stretch grows
    for _ in range(14):
        middle = math.sqrt(low * high)
        if run(cell, "least in flight", seed, middle).wait_p95 > FULL_WAIT_S:
            low = middle
        else:
            high = middle
    return high


def measure(cell: Cell, names: tuple[str, ...], seed: int, full: float) -> dict[str, Result]:
    return {
        name: run(cell, name, seed, full * 100 / cell.load if cell.load else 1.0) for name in names
    }


def summary(results: list[Result]) -> dict[str, float]:
    ttft = [one for result in results for one in result.ttft]
    return {
        "mean": statistics.fmean(ttft),
        "p50": q(ttft, 0.5),
        "p95": q(ttft, 0.95),
        "p99": q(ttft, 0.99),
        "cached": sum(r.cached for r in results) / max(1, sum(r.tokens for r in results)),
        "balance": statistics.fmean(max(r.work) / statistics.fmean(r.work) for r in results),
        "predicted": sum(r.predicted for r in results) / max(1, sum(r.cached for r in results)),
    }


def verdict(row: dict[str, dict[str, float]]) -> tuple[float, float]:
    """Ours against the best of the others: mean and p95."""
    others = [name for name in row if name != "slotgate"]
    return tuple(
        row["slotgate"][what] / min(row[name][what] for name in others) for what in ("mean", "p95")
    )


def show(cell: Cell, row: dict[str, dict[str, float]]) -> None:
    load = f", load {cell.load} %" if cell.load else ""
    print(f"\n{cell.label}, {cell.engines} engines{load}")
    print(f"  {'':16} {'mean':>8} {'p50':>8} {'p95':>8} {'p99':>8} {'cached':>7} {'balance':>7}")
    for name, one in row.items():
        print(
            f"  {name:16} {one['mean']:8.3f} {one['p50']:8.3f} {one['p95']:8.3f} {one['p99']:8.3f} "
            f"{one['cached']:7.3f} {one['balance']:7.2f}"
        )
    if "slotgate" in row and len(row) > 1:
        mean, p95 = verdict(row)
        flag = "" if max(mean, p95) <= 1.03 else "   ABOVE 1.03"
        print(f"  of the best: mean x {mean:.3f}, p95 x {p95:.3f}{flag}", flush=True)


def _one(job: tuple[Cell, tuple[str, ...], int, float]) -> tuple[Cell, dict[str, Result]]:
    cell, names, seed, full = job
    return cell, measure(cell, names, seed, full)


def _full(job: tuple[Cell, int]) -> float:
    return full_load(*job)


def cells_of(args: argparse.Namespace) -> list[Cell]:
    kinds = args.kinds.split(",")
    engines = [int(n) for n in args.engines.split(",")]
    out = []
    for path in args.trace:
        for kind in kinds:
            for count in engines:
                requests = args.requests or max(1500, 60 * count)
                out += [
                    Cell(path, kind, count, int(load), requests, args.uneven, args.cache)
                    for load in args.loads.split(",")
                ]
    if args.agents or not args.trace:
        out += [
            Cell(name, kind, 4, 0, 0, args.uneven, args.cache)
            for name in traces.SCENARIOS
            for kind in kinds
        ]
    return out


def calibrate(
    cells: list[Cell], seeds: int, pool: ProcessPoolExecutor, memory: Path | None
) -> dict:
    """Stretch of full load by (cell without its load, seed); kept in `memory` between runs."""
    known = json.loads(memory.read_text()) if memory and memory.exists() else {}
    wanted = {}
    for cell in cells:
        for seed in range(seeds if cell.load else 0):
            key = f"{Path(cell.trace).name} {cell.kind} {cell.engines} {cell.requests} {cell.uneven} {cell.cache} {seed}"
            wanted[key] = (cell, seed)
    missing = [key for key in wanted if key not in known]
    for key, value in zip(missing, pool.map(_full, [wanted[k] for k in missing]), strict=True):
        known[key] = value
    if memory:
        memory.write_text(json.dumps(known, indent=1))
    return {(c.trace, c.kind, c.engines, c.requests, s): known[k] for k, (c, s) in wanted.items()}


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    near = sorted(map(str, NEAR.glob("*_trace.jsonl")))
    p.add_argument("--trace", action="append", help=f"default: {near or 'none found'}")
    p.add_argument("--engines", default="4,16,64")
    p.add_argument("--loads", default="30,50,70,85,95")
    p.add_argument("--kinds", default="llama-server,vllm")
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument(
        "--requests",
        type=int,
        default=0,
        help="of one run; default 60 for each engine, at least 1,500",
    )
    p.add_argument(
        "--agents", action="store_true", help="also agents in a closed loop, on four engines"
    )
    p.add_argument(
        "--uneven", action="store_true", help="engines of half, once and twice the speed"
    )
    p.add_argument(
        "--cache", type=int, default=60_000, help="tokens that an engine's pool or RAM cache holds"
    )
    p.add_argument("--only", help="names of policies, with commas")
    p.add_argument("--processes", type=int, default=2)
    p.add_argument("--memory", type=Path, help="keeps the calibration between runs")
    p.add_argument("--save", type=Path, help="all figures as JSON")
    p.add_argument("--plots", type=Path, help="directory for PNGs (needs matplotlib)")
    args = p.parse_args()
    args.trace = near if args.trace is None else [one for one in args.trace if one]
    if not args.trace:
        print("no trace given and none in ../shared/data: agents alone")
    names = tuple(args.only.split(",")) if args.only else NAMES
    rows = measure_all(args, names)
    if "slotgate" in names and len(names) > 1:
        conclude(rows)
    if args.save:
        args.save.write_text(json.dumps([[_plain(c), row] for c, row in rows.items()], indent=1))
    if args.plots:
        from bench.plots import plot  # noqa: PLC0415  (matplotlib is wanted only here)

        plot(rows, args.plots)


def measure_all(args: argparse.Namespace, names: tuple[str, ...]) -> dict[Cell, dict]:
    cells = cells_of(args)
    started = time.monotonic()
    with ProcessPoolExecutor(args.processes) as pool:
        full = calibrate(cells, args.seeds, pool, args.memory)
        print(f"calibrated in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        jobs = [
            (
                cell,
                names,
                seed,
                full.get((cell.trace, cell.kind, cell.engines, cell.requests, seed), 1.0),
            )
            for cell in cells
            for seed in range(args.seeds)
        ]
        collected: dict[Cell, list[dict[str, Result]]] = {}
        rows: dict[Cell, dict] = {}
        for cell, results in pool.map(_one, jobs):
            collected.setdefault(cell, []).append(results)
            if len(collected[cell]) == args.seeds:
                rows[cell] = {n: summary([one[n] for one in collected[cell]]) for n in names}
                show(cell, rows[cell])
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    return rows


def conclude(rows: dict[Cell, dict]) -> None:
    ratios = [verdict(row) for row in rows.values()]
    above = sum(max(one) > 1.03 for one in ratios)
    geo = [math.exp(statistics.fmean(math.log(one[i]) for one in ratios)) for i in (0, 1)]
    print(f"\n{len(rows)} cells, {above} above 1.03 x the best of the others in mean or p95")
    print(f"geometric mean against the best of each cell: mean x {geo[0]:.3f}, p95 x {geo[1]:.3f}")
    for name in next(iter(rows.values())):
        if name != "slotgate":
            each = [
                statistics.fmean(
                    math.log(row["slotgate"][w] / row[name][w]) for row in rows.values()
                )
                for w in ("mean", "p95")
            ]
            print(
                f"  against {name:16} mean x {math.exp(each[0]):.3f}, p95 x {math.exp(each[1]):.3f}"
            )


def _plain(cell: Cell) -> dict:
    return {
        "trace": Path(cell.trace).name, "kind": cell.kind, "engines": cell.engines, "load": cell.load,
        "requests": cell.requests, "uneven": cell.uneven, "cache": cell.cache,
    }  # fmt: skip


if __name__ == "__main__":
    main()
