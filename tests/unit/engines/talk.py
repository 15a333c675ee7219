"""Answers for the engine files: recorded ones from tests/data/samples, and made-up ones; and a round of questions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.engines.base import Answer, Engine, EngineReport, Look

SAMPLES = Path(__file__).parents[2] / "data" / "samples"
NOTHING = Answer(404, {}, b"")
OK = Answer(200, {}, b"")
LLAMA = {"server": "llama.cpp"}


def sample(name: str, status: int = 200) -> Answer:
    """A recorded answer. Files that are bodies alone get this status."""
    raw = (SAMPLES / name).read_bytes()
    if not name.endswith(".http"):
        return Answer(status, {}, raw)
    head, _, body = re.split(rb"(\r?\n\r?\n)", raw, maxsplit=1)
    first, *lines = head.decode().splitlines()
    headers = dict(line.split(":", 1) for line in lines)
    lowered = {name.lower(): value.strip() for name, value in headers.items()}
    body = re.sub(rb"\n\[time_total [0-9.]+\]\s*$", b"", body)  # a line that curl wrote
    return Answer(int(first.split()[1]), lowered, body)


def said(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """An answer with this JSON value."""
    return Answer(status, headers or {}, json.dumps(value).encode())


def text(words: str, status: int = 200) -> Answer:
    """An answer with this text."""
    return Answer(status, {}, words.encode())


class Round:
    """One round with an engine that answers from a table: `asked` in order, and the report."""

    def __init__(
        self,
        engine: Engine,
        table: Mapping[str, Answer | None],
        look: Look | None = None,
        known: EngineReport | None = None,
    ) -> None:
        self.seen: dict[str, Answer | None] = {}
        while (ask := engine.next_ask(self.seen, look or Look())) is not None:
            assert ask.path not in self.seen, "asked twice in a round"
            self.seen[ask.path] = table.get(ask.path, NOTHING)
        self.asked = list(self.seen)
        self.report = engine.read(self.seen, known)
