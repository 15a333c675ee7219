"""How each agent is run once, without a person: its arguments, its settings, what it needs of the engine.

Law of this file: an agent's settings are those that docs/clients.md tells people, plus what keeps it short and off the internet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.connection import Script
from tests.fakes.scripts import stream
from tests.fakes.wires import typed

MODEL = "m"
SAID = "word3"  # of the scripted engine's answer
MOST_TOKENS = 64  # of an answer, where the agent would else ask for as many as there are
PYTHON = os.environ.get("AGENTS_PYTHON", "AGENTS_PYTHON")

# These ask twice, whole and streamed. Only a real model may answer otherwise the second time (SAMPLED).
AI_SDK = """
const { createOpenAICompatible } = require('@ai-sdk/openai-compatible');
const { generateText, streamText } = require('ai');
const gw = createOpenAICompatible({ name: 'gw', baseURL: process.env.BASE + '/v1', apiKey: process.env.KEY });
(async () => {
  const { text } = await generateText({ model: gw('m'), prompt: 'say hi' });
  let streamed = '';
  for await (const piece of streamText({ model: gw('m'), prompt: 'say hi' }).textStream) streamed += piece;
  const fine = process.env.SAMPLED ? text && streamed : text === streamed;
  if (!fine) throw new Error(`${text} is not ${streamed}`);
  console.log(streamed);
})();
"""

LANGCHAIN = """
import os
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(base_url=os.environ["BASE"] + "/v1", api_key=os.environ["KEY"], model="m")
whole = chat.invoke("say hi").content
streamed = "".join(part.content for part in chat.stream("say hi"))
assert whole and streamed if os.environ["SAMPLED"] else whole == streamed
print(whole)
"""

LITELLM = """
import os, litellm
asked = dict(model="openai/m", api_base=os.environ["BASE"] + "/v1", api_key=os.environ["KEY"],
             messages=[{"role": "user", "content": "say hi"}])
whole = litellm.completion(**asked).choices[0].message.content
parts = [part.choices[0].delta.content or "" for part in litellm.completion(**asked, stream=True)]
assert whole and any(parts) if os.environ["SAMPLED"] else whole == "".join(parts)
print(whole)
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """How to run one agent once. `prepare` writes its settings into its home."""

    program: str
    arguments: Callable[[Path], list[str]]
    environ: Callable[[Path, str, str], Mapping[str, str]] = lambda _home, _base, _key: {}
    prepare: Callable[[Path, str, str], None] = lambda _home, _base, _key: None
    answer: Script | None = None  # in place of the scripted engine's usual one
    leaves_first: bool = False  # closes at the last event, without waiting for the stream's end


def _codex(home: Path, base: str, _key: str) -> None:
    (home / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "gw"\n[model_providers.gw]\nname = "gw"\n'
        f'base_url = "{base}/v1"\nenv_key = "KEY"\nwire_api = "responses"\n'
    )


def _opencode(home: Path, base: str, key: str) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{base}/v1", "apiKey": key},
        "models": {MODEL: {"limit": {"context": 100_000, "output": MOST_TOKENS}}},
    }
    (home / "opencode.json").write_text(json.dumps({"provider": {"gw": provider}}))


def _aider(home: Path, _base: str, _key: str) -> None:
    """Without this file it looks for one on the internet."""
    caches = home / ".aider" / "caches"
    caches.mkdir(parents=True)
    (caches / "model_prices_and_context_window.json").write_text("{}")


def _continue(home: Path, base: str, key: str) -> None:
    model = {"name": MODEL, "provider": "openai", "model": MODEL, "roles": ["chat"]}
    models = [{**model, "apiBase": f"{base}/v1", "apiKey": key}]
    config = {"name": "gw", "version": "0.0.1", "schema": "v1", "models": models}
    (home / "config.yaml").write_text(json.dumps(config))


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
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(MOST_TOKENS),
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
        leaves_first=True,
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
    "aider": Trial(
        "aider",
        lambda _home: [
            *("--model", f"openai/{MODEL}", "--message", "say hi", "--map-tokens", "0"),
            *("--no-git", "--yes-always", "--no-pretty", "--no-show-model-warnings"),
            *("--no-check-update", "--analytics-disable"),
        ],
        lambda _home, base, key: {
            "OPENAI_API_BASE": f"{base}/v1",
            "OPENAI_API_KEY": key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        _aider,
    ),
    "continue": Trial(
        "cn",
        lambda home: ["-p", "say hi", "--config", str(home / "config.yaml")],
        lambda _home, _base, _key: {"CONTINUE_TELEMETRY_ENABLED": "0"},
        _continue,
    ),
    "ai-sdk": Trial("node", lambda _home: ["-e", AI_SDK]),
    "langchain": Trial(PYTHON, lambda _home: ["-c", LANGCHAIN]),
    "litellm": Trial(
        PYTHON,
        lambda _home: ["-c", LITELLM],
        lambda _home, _base, _key: {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
}
