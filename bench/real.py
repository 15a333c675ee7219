"""Three real llama.cpp servers and agents: mean TTFT and cached share, beside the peers; what we predict beside what engines say.

    python -m bench.real [--rounds 5] [--only slotgate,nginx] [--peers DIR]

The engines are those of `slotgate demo` (the `demo` extra): SmolLM2-135M, four slots, a thread each; fresh ones for each proxy and
round, one after the other, as they compute in earnest. Real engines on a small machine are noisy: medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import urllib.request
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path

import uvloop

from bench import agents, proxies
from bench.agents import Crowd
from bench.routing import NAMES, figures
from gateway.cli.local_engine import MODEL_NAME, EngineOptions, EngineUnavailable, LocalEngine

CROWD = Crowd(agents=9, turns=4, shared=400, own=400, max_tokens=24, think_s=0.5)
ENGINES = 3
TOKENS = re.compile(
    r"^slotgate_affinity_(predicted|cached)_tokens_total\{[^}]*\} (\S+)", re.MULTILINE
)


async def measure(name: str, seed: int, where: Path) -> dict[str, float]:
    """One proxy before fresh engines. Raises NotInstalled, RuntimeError, EngineUnavailable."""
    async with AsyncExitStack() as stack:
        options = EngineOptions(slots=4, ctx=16384)
        engines = [await stack.enter_async_context(LocalEngine(options)) for _ in range(ENGINES)]
        ports = tuple(int(engine.url.rsplit(":", 1)[1].rstrip("/")) for engine in engines)
        setup = proxies.Setup(ports, slots="auto")
        place = where / f"{name}-{seed}"
        place.mkdir()
        proxy = stack.enter_context(proxies.running(name, setup, place))
        key = admin_key(place) if name == "slotgate" else ""
        seen = await agents.run(
            f"http://127.0.0.1:{proxy.port}/v1", proxies.KEY, CROWD, seed, MODEL_NAME
        )
        out = figures(seen)
        if name == "slotgate":
            out["predicted"] = agreement(proxy.port, key)
        return out


def admin_key(place: Path) -> str:
    """One for /metrics, written beside the others: a changed keys file is read again."""
    key = "sk-sg-bench-ops-0123456789abcdef"
    with (place / "slotgate" / "keys.yaml").open("a") as file:
        file.write(
            f"- {{name: ops, hash: 'sha256:{sha256(key.encode()).hexdigest()}', admin: true}}\n"
        )
    return key


def agreement(port: int, key: str) -> float:
    """Predicted cached tokens over reported ones, all backends together."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    sums = {"predicted": 0.0, "cached": 0.0}
    for what, value in TOKENS.findall(text):
        print(f"  {what} {value}", file=sys.stderr)
        sums[what] += float(value)
    return sums["predicted"] / max(1.0, sums["cached"])


async def run(args: argparse.Namespace, where: Path) -> None:
    rows: dict[str, list[dict[str, float]]] = {}
    for seed in range(1, args.rounds + 1):
        for name in args.only.split(",") if args.only else NAMES:
            try:
                rows.setdefault(name, []).append(await measure(name, seed, where))
            except (proxies.NotInstalled, RuntimeError, EngineUnavailable) as error:
                print(f"{name}: {error}", file=sys.stderr)
    print(
        f"{'':14} {'mean':>7} {'p95':>7} {'cached':>7} {'failed':>6} {'lost':>5}  predicted / reported"
    )
    for name, some in rows.items():
        one = {w: statistics.median(o[w] for o in some) for w in some[0] if w != "status"}
        print(
            f"{name:14} {one['mean']:7.3f} {one['p95']:7.3f} {one['cached']:7.3f} {one['failed']:6.0f} "
            f"{one['lost']:5.0f}  {one.get('predicted', float('nan')):.3f}"
        )


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--only", help="names of proxies, with commas")
    p.add_argument("--peers", help="virtual environment of sglang-router and vllm-router")
    args = p.parse_args()
    if args.peers:
        os.environ["BENCH_PEERS"] = args.peers
    with tempfile.TemporaryDirectory(prefix="slotgate-real-") as where:
        uvloop.run(run(args, Path(where)))


if __name__ == "__main__":
    main()
