"""The child process of a local engine: becomes a llama.cpp server and says where it listens.

Run as `python -m gateway.cli.llama_child --model F ...` by local_engine. Writes one JSON line to stdout: `{"url": …}` when it
serves, or `{"reason": …, "remedy": …}` and status 1. Everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from gateway.cli.child_server import die_with_parent, say

HOST = "127.0.0.1"


def main() -> int:
    """Serve until told to end."""
    options = _options()
    die_with_parent()
    if options.program is not None:
        return _run_program(options)
    return _run_wheel(options)


def _run_wheel(options: argparse.Namespace) -> int:
    try:
        import xllamacpp  # noqa: PLC0415 - a heavy, optional package, wanted here only
    except ImportError as error:
        reason, remedy = why_not(error)
        say(reason=reason, remedy=remedy)
        return 1
    try:
        server = xllamacpp.Server(_params(xllamacpp, options))
    except RuntimeError as error:  # what its C++ raises when the model cannot be loaded
        say(
            reason=f"it cannot serve {Path(options.model).name} ({error})",
            remedy="Set $MODEL_GGUF to a whole GGUF model.",
        )
        return 1
    say(url=server.listening_address)
    while True:
        signal.pause()


def _params(xllamacpp: Any, options: argparse.Namespace) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = {options.alias}
    params.port = 0
    params.n_parallel = options.slots
    params.n_ctx = options.ctx
    params.kv_unified = False
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.endpoint_slots = True
    params.endpoint_metrics = options.metrics
    params.ui = False
    if options.batch is not None:
        params.n_batch = options.batch
        params.n_ubatch = min(options.batch, params.n_ubatch)
    if options.n_predict is not None:
        params.n_predict = options.n_predict
    return params


def why_not(error: ImportError) -> tuple[str, str]:
    """What an ImportError of the wheel means."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and error.name == "xllamacpp":
        return (
            "the package xllamacpp is not installed",
            f"Install it with `{sys.executable} -m pip install xllamacpp`, or install llama.cpp and set $LLAMA_SERVER to its llama-server.",
        )
    if "libgomp" in text:
        return (
            "the system library libgomp.so.1 is missing",
            "Install it with `apt-get install libgomp1` (Fedora: `dnf install libgomp`).",
        )
    if "GLIBC" in text or "GLIBCXX" in text:
        return (
            f"the C library of this system is too old for the wheel ({text})",
            "Build llama.cpp on this machine and set $LLAMA_SERVER to its llama-server.",
        )
    return (
        f"the wheel cannot be loaded ({text})",
        "Install llama.cpp and set $LLAMA_SERVER to its llama-server.",
    )


def _run_program(options: argparse.Namespace) -> int:
    """Supervise a llama-server: it cannot watch our parent itself."""
    port = _free_port()
    try:
        process = subprocess.Popen(  # noqa: S603 - the person's own program
            _command(options, port), stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
    except OSError as error:
        say(
            reason=f"it cannot be started ({error.strerror})",
            remedy="Set $LLAMA_SERVER to a llama-server program, or unset it.",
        )
        return 1
    # The group gets SIGTERM, so the program ends by itself; we wait for it and end with it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    if _becomes_healthy(process, port):
        say(url=f"http://{HOST}:{port}")
    status = process.wait()
    if status < 0:  # so that our parent sees the same signal
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _command(options: argparse.Namespace, port: int) -> list[str]:
    out = [options.program, "--model", options.model, "--alias", options.alias]
    out += ["--host", HOST, "--port", str(port), "--parallel", str(options.slots)]
    out += ["--ctx-size", str(options.ctx), "--threads", str(options.threads)]
    out += ["--metrics"] if options.metrics else []
    out += ["--batch-size", str(options.batch)] if options.batch is not None else []
    out += ["--n-predict", str(options.n_predict)] if options.n_predict is not None else []
    return out


def _becomes_healthy(process: subprocess.Popen[bytes], port: int) -> bool:
    """Waits until /health says ok, for as long as the program lives; our parent has the deadline."""
    while process.poll() is None:
        try:
            with _direct().open(f"http://{HOST}:{port}/health", timeout=2) as answer:
                if json.load(answer).get("status") == "ok":
                    return True
        except (urllib.error.URLError, OSError, ValueError):
            pass  # not listening yet, or 503 while the model loads
        time.sleep(0.05)
    return False


def _direct() -> urllib.request.OpenerDirector:
    """No proxy of the environment stands between this process and its own child."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gateway.cli.llama_child")
    parser.add_argument("--model", required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--program")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--n-predict", type=int)
    parser.add_argument("--metrics", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
