"""The request set of a load test: conversations of one or more turns.

Law of this file: every step gets the same set. What the assistant said in earlier turns is fixed, so no answer changes a
later prompt. Each step marks its prompts at their very beginning with a mark of constant length, so that no step finds in a
prompt cache what an earlier one left there; within a step, prompts share what they share.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Message = dict[str, Any]

_WORDS: Final = (
    "gate river stone lamp winter paper garden signal table harbor mirror copper engine window bridge letter forest silver "
    "market candle anchor meadow thunder ribbon orchard compass velvet lantern granite pepper saddle whistle"
)
_SIZES: Final = (40, 120, 240)  # words of a prompt, in turn
_SHARED: Final = 300  # words that all agents have in common
_OWN: Final = 150
_TURN: Final = 30
TURNS: Final = 4
_REPLY: Final = "I have read it and made a note of every word of it."


class BadPrompts(Exception):  # noqa: N818 - a fact about a file
    """The file of prompts cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that are asked one after the other; each holds all messages up to it."""

    turns: tuple[tuple[Message, ...], ...]


def built_in(requests: int) -> tuple[Conversation, ...]:
    """That many single questions of three sizes, no two with a common beginning."""
    return tuple(_single(_question(number)) for number in range(requests))


def agents(requests: int) -> tuple[Conversation, ...]:
    """Conversations of four turns with one long system prompt in common, as coding agents have them."""
    count = max(1, -(-requests // TURNS))
    shared = _text(random.Random("shared"), _SHARED)  # noqa: S311 - filler, no secret
    return tuple(_agent(number, shared) for number in range(count))


def from_file(path: Path) -> tuple[Conversation, ...]:
    """One request a line: text, a JSON string, `{"prompt": …}` or `{"messages": […]}`. Raises BadPrompts."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise BadPrompts(f"{path} cannot be read: {error}") from error
    found = [_of_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise BadPrompts(f"{path} is empty; write one prompt a line")
    return tuple(found)


def cut(work: Sequence[Conversation], requests: int) -> tuple[Conversation, ...]:
    """As many requests, from the beginning again where there are too few; the last conversation may lose turns."""
    out: list[Conversation] = []
    left = requests
    while left > 0:
        one = work[len(out) % len(work)]
        out.append(Conversation(one.turns[:left]))
        left -= len(one.turns)
    return tuple(out)


def size(work: Sequence[Conversation]) -> int:
    """Requests in it."""
    return sum(len(one.turns) for one in work)


def marked(messages: Sequence[Message], mark: str) -> list[Message]:
    """The messages with the step's mark in front. `mark` has the same length in every step."""
    first = messages[0]
    if not mark or not isinstance(first.get("content"), str):
        return list(messages)
    return [{**first, "content": f"[{mark}] {first['content']}"}, *messages[1:]]


def _single(text: str) -> Conversation:
    return Conversation((({"role": "user", "content": text},),))


def _question(number: int) -> str:
    words = _text(random.Random(number), _SIZES[number % len(_SIZES)])  # noqa: S311 - filler
    return f"{number}. {words}. Tell a long story that uses these words in this order."


def _agent(number: int, shared: str) -> Conversation:
    rng = random.Random(f"agent {number}")  # noqa: S311 - filler
    messages: list[Message] = [{"role": "system", "content": f"Rules: {shared}."}]
    turns = []
    for turn in range(TURNS):
        words = _text(rng, _TURN if turn else _OWN)
        messages.append({"role": "user", "content": f"Agent {number}: {words}. What comes next?"})
        turns.append(tuple(messages))
        messages.append({"role": "assistant", "content": _REPLY})
    return Conversation(tuple(turns))


def _text(rng: random.Random, words: int) -> str:
    known = _WORDS.split()
    return " ".join(rng.choice(known) for _ in range(words))


def _of_line(path: Path, number: int, line: str) -> Conversation:
    if line.lstrip()[0] not in '{"':
        return _single(line.strip())
    try:
        value = json.loads(line)
    except ValueError:
        return _single(line.strip())
    if isinstance(value, str) and value:
        return _single(value)
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return _single(value["prompt"])
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
        return Conversation((tuple(messages),))
    raise BadPrompts(
        f'{path}:{number}: write text, a JSON string, {{"prompt": …}} or {{"messages": […]}}'
    )


def open_times(rate: float, seed: int) -> Iterator[float]:
    """When requests come that do not wait for each other: seconds from the start, at random, `rate` a second on average."""
    rng = random.Random(seed)  # noqa: S311 - arrivals, no secret
    at = 0.0
    while True:
        yield at
        at += rng.expovariate(rate)
