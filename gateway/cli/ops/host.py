"""Whether this machine swaps, from the kernel's counters (Linux: /proc/vmstat, in pages)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway.cli.ops.finding import Finding

VMSTAT: Final = Path("/proc/vmstat")
LOOK_S: Final = 1.0
_MANY: Final = 100  # pages a second: 0.4 MB/s; a few are always on the move


async def swapped_pages(file: Path = VMSTAT, seconds: float = LOOK_S) -> float | None:
    """Pages a second that went to swap or came from it; None where the kernel does not say."""
    before = counted(_text(file))
    if before is None:
        return None
    await asyncio.sleep(seconds)
    after = counted(_text(file))
    return None if after is None else (after - before) / seconds


def counted(text: str) -> int | None:
    """Both counters, pswpin and pswpout, since the start; None when it is not such a file."""
    counters = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    told = [counters[name] for name in ("pswpin", "pswpout") if name in counters]
    return sum(map(int, told)) if told and all(one.isdecimal() for one in told) else None


def judge_host(pages_a_second: float | None) -> Iterator[Finding]:
    """Swapping is wrong; not knowing is nothing."""
    if pages_a_second is None or pages_a_second < _MANY:
        return
    yield Finding(
        code="swapping",
        about="host",
        seen=f"{pages_a_second:,.0f} pages a second go to swap or come from it",
        means="model and caches do not fit into the memory; every token waits for the disk",
        change="take a smaller model or quantisation, a smaller -c, fewer slots, or start llama-server with --mlock",
        then="`vmstat 1` shows 0 under si and so while requests run",
    )


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
