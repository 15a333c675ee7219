"""What the benches need of the machine: free ports, pinned processes, their CPU and memory. Linux only (/proc).

The proxy runs on one core, everything else on another; with one core all share it, and only CPU figures mean anything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

HZ = os.sysconf("SC_CLK_TCK")
CORES = sorted(os.sched_getaffinity(0))
PROXY_CORE, LOAD_CORE = CORES[0], CORES[-1]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(
    command: list[str], core: int, log: Path, env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A process of its own session on one core, its output in `log`."""
    pinned = ["taskset", "-c", str(core), *command] if shutil.which("taskset") else command
    with log.open("wb") as out:
        return subprocess.Popen(
            pinned,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End it and its children; by their group, which is ours alone."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def answers(port: int, path: str) -> bool:
    """Does GET `path` answer 200?"""
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as s:
            s.settimeout(2)
            s.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            return b" 200 " in s.recv(64)
    except OSError:
        return False


def wait_until(port: int, path: str, process: subprocess.Popen[bytes], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if answers(port, path):
            return True
        time.sleep(0.05)
    return False


def family(pid: int) -> list[int]:
    """The process and its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    out, todo = [], [pid]
    while todo:
        one = todo.pop()
        out.append(one)
        todo += parents.get(one, [])
    return out


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of all their threads."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
    return total / HZ


def rss_mib(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20
