"""Real agents against the gateway and a scripted engine: does each get an answer through it?

    PATH=…/node_modules/.bin:$PATH NODE_PATH=…/node_modules AGENTS_PYTHON=…/bin/python \
        .venv/bin/python -m tests.agents.agents [NAME…]

AGENTS_PYTHON is an interpreter that has langchain-openai and litellm.

Not part of `make test`: the agents are large and change weekly. One that is not installed is skipped with the reason.
Each runs with an empty home and only the environment given here, so that it touches nothing of the person's own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.connection import Script
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import run, slack
from tests.fakes.scripts import stream
from tests.fakes.wires import typed

MODEL = "m"
SAID = "word3"  # of the scripted engine's answer
PATIENCE_S = 120.0
PYTHON = os.environ.get("AGENTS_PYTHON", "AGENTS_PYTHON")

AI_SDK = """
const { createOpenAICompatible } = require('@ai-sdk/openai-compatible');
const { generateText, streamText } = require('ai');
const gw = createOpenAICompatible({ name: 'gw', baseURL: process.env.BASE + '/v1', apiKey: process.env.KEY });
(async () => {
  const { text } = await generateText({ model: gw('m'), prompt: 'say hi' });
  let streamed = '';
  for await (const piece of streamText({ model: gw('m'), prompt: 'say hi' }).textStream) streamed += piece;
  if (text !== streamed) throw new Error(`${text} is not ${streamed}`);
  console.log(streamed);
})();
"""

LANGCHAIN = """
import os
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(base_url=os.environ["BASE"] + "/v1", api_key=os.environ["KEY"], model="m")
whole = chat.invoke("say hi").content
assert whole == "".join(part.content for part in chat.stream("say hi"))
print(whole)
"""

LITELLM = """
import os, litellm
asked = dict(model="openai/m", api_base=os.environ["BASE"] + "/v1", api_key=os.environ["KEY"],
             messages=[{"role": "user", "content": "say hi"}])
whole = litellm.completion(**asked).choices[0].message.content
parts = [part.choices[0].delta.content or "" for part in litellm.completion(**asked, stream=True)]
assert whole == "".join(parts)
print(whole)
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """How to run one agent once. `prepare` writes its settings into its home."""

    program: str
    arguments: Callable[[Path], list[str]]
    environ: Callable[[Path, str, str], Mapping[str, str]] = lambda _home, _base, _key: {}
    prepare: Callable[[Path, str, str], None] = lambda _home, _base, _key: None
    answer: Script | None = None  # in place of the engine's usual one


def _codex(home: Path, base: str, _key: str) -> None:
    (home / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "gw"\n[model_providers.gw]\nname = "gw"\n'
        f'base_url = "{base}/v1"\nenv_key = "KEY"\nwire_api = "responses"\n'
    )


def _opencode(home: Path, base: str, key: str) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{base}/v1", "apiKey": key},
        "models": {MODEL: {"limit": {"context": 100_000, "output": 1000}}},
    }
    (home / "opencode.json").write_text(json.dumps({"provider": {"gw": provider}}))


def _items() -> Script:
    """A response with its items, which one agent insists on."""
    part = {"type": "output_text", "annotations": [], "text": SAID}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
    done = {**item, "content": [part]}
    usage = {"input_tokens": 5, "output_tokens": 1, "total_tokens": 6}
    response = {"id": "resp_1", "object": "response", "status": "completed"}
    where = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    events = [
        {"type": "response.created", "response": {**response, "status": "in_progress"}},
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}},
        {"type": "response.output_text.delta", **where, "delta": SAID},
        {"type": "response.output_item.done", "output_index": 0, "item": done},
        {"type": "response.completed", "response": {**response, "output": [done], "usage": usage}},
    ]
    return stream([typed(event) for event in events])


TRIALS: dict[str, Trial] = {
    "claude-code": Trial(
        "claude",
        lambda _home: ["-p", "say hi"],
        lambda home, base, key: {
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_AUTH_TOKEN": key,
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CONFIG_DIR": str(home),
        },
    ),
    "codex": Trial(
        "codex",
        lambda _home: ["exec", "--skip-git-repo-check", "say hi"],
        lambda home, _base, _key: {"CODEX_HOME": str(home)},
        _codex,
        _items(),
    ),
    "opencode": Trial(
        "opencode",
        lambda _home: ["run", "-m", f"gw/{MODEL}", "say hi"],
        lambda _home, _base, _key: {
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
        },
        _opencode,
    ),
    "ai-sdk": Trial("node", lambda _home: ["-e", AI_SDK]),
    "langchain": Trial(PYTHON, lambda _home: ["-c", LANGCHAIN]),
    "litellm": Trial(
        PYTHON,
        lambda _home: ["-c", LITELLM],
        lambda _home, _base, _key: {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
}


async def attempt(name: str, trial: Trial) -> str:
    """One agent, once: what became of it, in a line."""
    program = shutil.which(trial.program)
    if program is None:
        return f"skipped: {trial.program} is not on PATH"
    with tempfile.TemporaryDirectory(prefix=f"slotgate-{name}-") as folder:
        home = Path(folder)
        async with (
            FakeEngine(slots=4) as engine,
            running_gateway(engine, keys=["agent"], lag_limit_s=10) as slotgate,
        ):
            engine.behaviour.context_per_slot = 200_000
            if trial.answer is not None:
                engine.always(trial.answer)
            since = time.monotonic()
            status, told = await _run(trial, program, home, slotgate)
            seconds = time.monotonic() - since
            outcomes = await slotgate.outcomes()
            asked = Counter(request.path for request in engine.requests)
    if status != 0 or SAID not in told or set(outcomes) != {"served"}:
        return f"FAILED with status {status}, {outcomes}: {told[-600:]}"
    calls = ", ".join(f"{count} x {path}" for path, count in asked.items())
    return f"works: {seconds:.1f} s, {calls}"


async def _run(trial: Trial, program: str, home: Path, slotgate: Running) -> tuple[int, str]:
    base, key = slotgate.base_url, slotgate.keys["agent"]
    trial.prepare(home, base, key)
    environ = {
        "PATH": os.environ["PATH"],
        "NODE_PATH": os.environ.get("NODE_PATH", ""),
        "HOME": str(home),
        "BASE": base,
        "KEY": key,
        **trial.environ(home, base, key),
    }
    process = await asyncio.create_subprocess_exec(
        *(program, *trial.arguments(home)),
        cwd=home,
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S * slack())
    except TimeoutError:
        process.kill()
        out, _ = await process.communicate()
        return -1, "timed out: " + out.decode(errors="replace")
    return process.returncode or 0, out.decode(errors="replace")


def main(names: list[str]) -> int:
    """Exit status 1 when an agent that is there got no answer."""
    failed = False
    for name in names or list(TRIALS):
        told = run(attempt(name, TRIALS[name]))
        failed = failed or told.startswith("FAILED")
        print(f"{name}: {told}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
