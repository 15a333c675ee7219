"""Foreign JSON, read with suspicion: what has not the expected shape is None, never an exception.

Figures outside their plausible range (NaN, negative, absurdly large) are treated as not said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from gateway.engines.base import Answer, Document, Model

_MOST_MODELS = 2000  # an index of everything on a hub is not a model list that we serve
_LONGEST_TEXT = 512
_LONGEST_JSON = 1 << 20  # the worst JSON of this size takes some 20 ms to decode


def value_of(answer: Answer | None) -> Any:
    """The JSON value of a 200 answer; None when it is anything else, or was too long to read whole."""
    if answer is None or answer.status != 200 or answer.cut or len(answer.body) > _LONGEST_JSON:
        return None
    try:
        return msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def document_of(answer: Answer | None) -> Document:
    """The JSON object of a 200 answer; empty when it is anything else."""
    value = value_of(answer)
    return value if isinstance(value, dict) else {}


def objects(value: Any) -> Iterator[Document]:
    """The objects in a JSON list; nothing when it is not a list."""
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))


def child(document: Document, *names: str) -> Document:
    """The object found by following these names; empty when one of them is missing."""
    for name in names:
        found = document.get(name)
        if not isinstance(found, dict):
            return {}
        document = found
    return document


def text(value: Any) -> str | None:
    """A non-empty printable string of bearable length."""
    if isinstance(value, str) and 0 < len(value) <= _LONGEST_TEXT and value.isprintable():
        return value
    return None


def number(value: Any, most: float) -> float | None:
    """A finite number in 0..most."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and 0 <= value <= most else None


def count(value: Any, least: int = 0, most: int = 1 << 50) -> int | None:
    """A whole number in least..most."""
    found = number(value, most)
    return int(found) if found is not None and found >= least else None


def listed_models(answer: Answer | None) -> tuple[Model, ...] | None:
    """The models of an OpenAI-style list; None when the answer is not such a list.

    `"data": null` is an Ollama with no model installed (engines.md 2.2): a list, and empty.
    """
    document = document_of(answer)
    if "data" not in document or not isinstance(document["data"], list | None):
        return None
    found: dict[str, Model] = {}
    for entry in objects(document["data"]):
        name = text(entry.get("id"))
        if name is not None and len(found) < _MOST_MODELS:
            found.setdefault(name, Model(name, document=entry))
    return tuple(found.values())


def loaded_models(answer: Answer | None) -> tuple[Model, ...] | None:
    """The same list of an engine that has all its models in memory."""
    models = listed_models(answer)
    return None if models is None else tuple(replace(model, loaded=True) for model in models)


def least_context(models: tuple[Model, ...] | None) -> int | None:
    """The least context in tokens that the entries name, in the way of vLLM or of llama.cpp.

    Base models and their adapters share a limit; of different models, promise what all can hold.
    """
    told = [
        count(model.document.get("max_model_len"), least=1)
        or count(child(model.document, "meta").get("n_ctx"), least=1)
        for model in models or ()
    ]
    return min((tokens for tokens in told if tokens is not None), default=None)


def owner(answer: Answer | None) -> str | None:
    """`owned_by` of the first model in the list: which software wrote it, more or less."""
    models = listed_models(answer)
    return text(models[0].document.get("owned_by")) if models else None
