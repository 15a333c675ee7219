"""Real agents against the gateway: does each get through a turn, through a refusal, and does one that dies give its slot back?

    PATH=…/node_modules/.bin:$PATH NODE_PATH=…/node_modules AGENTS_PYTHON=…/bin/python \
        .venv/bin/python -m tests.agents.agents [AGENT… | SITUATION…]

AGENTS_PYTHON is an interpreter that has langchain-openai and litellm.

Not part of `make test`: the agents are large and change weekly. One that is not installed is skipped with the reason.
Each runs with an empty home and only the environment given here, so that it touches nothing of the person's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.cli.local_engine import MODEL_NAME, EngineOptions, EngineUnavailable, LocalEngine
from tests.agents.recipes import MODEL, MOST_TOKENS, SAID, TRIALS, Trial
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, run, slack
from tests.fakes.scripts import HANG, raw

PATIENCE_S = 120.0
REAL_PATIENCE_S = 300.0  # a real engine reads thousands of tokens, and some agents ask it to go on
SLOTS = 4
CONTEXT = 32_768  # tokens, of the real engine: the longest first prompt of these agents, with room


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent that is about to be started, and where it lives meanwhile."""

    trial: Trial
    program: str
    home: Path

    @contextlib.asynccontextmanager
    async def started(
        self, slotgate: Running, *, sampled: bool = False
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """Its process, in a group of its own, none of which outlives the block."""
        base, key = slotgate.base_url, slotgate.keys["agent"]
        self.trial.prepare(self.home, base, key)
        environ = {
            "PATH": os.environ["PATH"],
            "NODE_PATH": os.environ.get("NODE_PATH", ""),
            "HOME": str(self.home),
            "BASE": base,
            "KEY": key,
            "SAMPLED": "1" if sampled else "",
            **self.trial.environ(self.home, base, key),
        }
        process = await asyncio.create_subprocess_exec(
            *(self.program, *self.trial.arguments(self.home)),
            cwd=self.home,
            env=environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill(process)
            await process.communicate()


def kill(process: asyncio.subprocess.Process) -> None:
    """The agent and what it started, without a word to the gateway."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def told_by(process: asyncio.subprocess.Process, within_s: float = PATIENCE_S) -> str:
    """What it said until it ended. Raises AssertionError when it failed or took too long."""
    try:
        out, _ = await asyncio.wait_for(process.communicate(), within_s * slack())
    except TimeoutError:
        raise AssertionError(f"it did not end within {within_s * slack():.0f} s") from None
    text = out.decode(errors="replace")
    assert process.returncode == 0, f"status {process.returncode}: {text[-600:]}"
    return text


async def turn(agent: Agent) -> str:
    """It asks, is answered, and shows the answer."""
    async with _scripted(agent.trial) as (engine, slotgate):
        async with agent.started(slotgate) as process:
            text = await told_by(process)
        outcomes = await slotgate.outcomes()
        asked = Counter(request.path for request in engine.requests)
    assert SAID in text, f"it did not show the answer: {text[-600:]}"
    assert set(outcomes) == {"served"}, outcomes
    return ", ".join(f"{count} x {path}" for path, count in asked.items())


async def refusal(agent: Agent) -> str:
    """Every slot is held and nobody may wait: it gets the gateway's own 503 (529) with Retry-After, and asks again."""
    async with _scripted(agent.trial, held=SLOTS, queue=0) as (engine, slotgate):
        others = [asyncio.create_task(slotgate.chat()) for _ in range(SLOTS)]
        await eventually(lambda: engine.running == SLOTS)
        async with agent.started(slotgate) as process:
            await eventually(lambda: _refused(slotgate), PATIENCE_S, "it was never refused")
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            text = await told_by(process)
        outcomes = await slotgate.outcomes()
    assert SAID in text, f"it did not show the answer: {text[-600:]}"
    assert set(outcomes) == {"queue_full", "served", "client_gone"}, outcomes
    assert outcomes["client_gone"] == SLOTS, outcomes
    return f"refused {outcomes['queue_full']:g} x, then served {outcomes['served']:g} x"


async def hang_up(agent: Agent) -> str:
    """It is killed in the middle of an answer: the engine is left at once, and every slot is free."""
    async with _scripted(None) as (engine, slotgate):
        engine.behaviour.itl_s = 3600
        async with agent.started(slotgate) as process:
            await eventually(lambda: engine.running > 0, PATIENCE_S, "it never asked")
            held = engine.running
            kill(process)
            since = time.monotonic()
            await eventually(lambda: engine.inside == 0, 5, "the engine still works for it")
            seconds = time.monotonic() - since
        await eventually(lambda: _idle(slotgate), 5, "the slot is not free")
        outcomes = await slotgate.outcomes()
        engine.behaviour.itl_s = 0
        assert (await slotgate.chat()).status_code == 200
    assert set(outcomes) == {"client_gone"}, outcomes
    return f"{held} slot{'s'[: held - 1]} free after {seconds * 1000:.0f} ms"


async def real_turn(agent: Agent) -> str:
    """One turn with a real llama.cpp server, whose small model says what it likes."""
    options = EngineOptions(slots=1, ctx=CONTEXT, threads=2, n_predict=MOST_TOKENS)
    try:
        async with (
            LocalEngine(options) as engine,
            running_gateway(
                engine.url, keys=["agent"], models={MODEL: {"ids": [MODEL_NAME]}}, lag_limit_s=10
            ) as slotgate,
        ):
            slotgate.models.add(MODEL_NAME)  # the harness knows the models of scripted engines only
            async with agent.started(slotgate, sampled=True) as process:
                text = await told_by(process, REAL_PATIENCE_S)
            outcomes = await slotgate.outcomes()
            read = await slotgate.metric("prompt_tokens_total")
    except EngineUnavailable as unavailable:
        return f"skipped: {unavailable}"
    assert text.strip(), "it showed nothing"
    fine = {"served", "client_gone"} if agent.trial.leaves_first else {"served"}
    assert outcomes, "it asked for nothing"
    assert set(outcomes) <= fine, outcomes
    ended = ", ".join(f"{outcome} {count:g} x" for outcome, count in outcomes.items())
    return f"{ended}, {read:g} prompt tokens"


SITUATIONS: dict[str, Callable[[Agent], Awaitable[str]]] = {
    "turn": turn,
    "refusal": refusal,
    "hang-up": hang_up,
    "real": real_turn,
}


async def attempt(name: str, situation: str) -> str:
    """One agent in one situation: what became of it, in a line."""
    trial = TRIALS[name]
    program = shutil.which(trial.program)
    if program is None:
        return f"skipped: {trial.program} is not on PATH"
    since = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"slotgate-{name}-") as folder:
        try:
            told = await SITUATIONS[situation](Agent(trial, program, Path(folder)))
        except AssertionError as failed:
            return f"FAILED: {failed}"
    if told.startswith("skipped"):
        return told
    return f"works: {time.monotonic() - since:.1f} s, {told}"


@contextlib.asynccontextmanager
async def _scripted(
    trial: Trial | None, held: int = 0, queue: int | str = "auto"
) -> AsyncIterator[tuple[FakeEngine, Running]]:
    """A scripted engine behind the gateway. The first `held` requests get no answer at all, the others the trial's."""
    async with FakeEngine(slots=SLOTS) as engine:
        engine.behaviour.context_per_slot = 200_000
        engine.script(*[raw(HANG)] * held)
        if trial is not None and trial.answer is not None:
            engine.always(trial.answer)
        async with running_gateway(
            engine, keys=["agent"], admission={"queue": queue}, lag_limit_s=10
        ) as slotgate:
            yield engine, slotgate


async def _refused(slotgate: Running) -> bool:
    return await slotgate.metric("requests_total", outcome="queue_full") > 0


async def _idle(slotgate: Running) -> bool:
    return await slotgate.metric("in_flight") == 0


def main(words: list[str]) -> int:
    """Exit status 1 when an agent that is there did not do well."""
    situations = [word for word in words if word in SITUATIONS] or list(SITUATIONS)
    names = [word for word in words if word not in SITUATIONS] or list(TRIALS)
    failed = False
    for name in names:
        for situation in situations:
            told = run(attempt(name, situation))
            failed = failed or told.startswith("FAILED")
            print(f"{name}, {situation}: {told}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
