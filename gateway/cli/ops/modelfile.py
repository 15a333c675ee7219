"""A model file on this machine becomes a ModelShape: a GGUF by the `gguf` library, else a `config.json`.

Law of this file: what stands in the file decides; nothing is fetched. Only the head of a GGUF is used, but its
parts are added up, since the weights of a split model lie in all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from gateway.cli.ops.shape import ModelShape, ShapeUnknown, shape_of_config

_PART: Final = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_ODD: Final = (
    ("attention.kv_lora_rank", "multi-head latent attention (MLA), which keeps one compressed vector a token"),
    ("attention.key_length_mla", "multi-head latent attention (MLA), which keeps one compressed vector a token"),
    ("attention.sliding_window", "a sliding window in some layers"),
    ("attention.sliding_window_pattern", "a sliding window in some layers"),
    ("attention.shared_kv_layers", "layers that share the KV cache of others"),
    ("attention.indexer.top_k", "sparse attention with an index of its own"),
    ("full_attention_interval", "linear attention in most layers"),
    ("ssm.state_size", "recurrent layers"),
    ("ssm.conv_kernel", "recurrent layers"),
    ("wkv.head_size", "recurrent layers"),
    ("kda.head_dim", "linear attention in some layers"),
    ("shortconv.l_cache", "recurrent layers among those of attention"),
    ("decoder_block_count", "an encoder and a decoder, which keep two caches"),
)  # fmt: skip


# Built into llama.cpp for the architecture; no key of the file says it.
_ODD_ARCHITECTURES: Final = {
    "llama4": "chunked attention, whose layers keep only a part of the context",
}


class NeedsPackage(Exception):  # noqa: N818 - a fact about the installation
    """An optional package is missing; the message says how to install it."""


def read_model(path: Path) -> ModelShape:
    """The shape of a GGUF file, a `config.json`, or a folder that holds one. Raises ShapeUnknown, NeedsPackage."""
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ShapeUnknown(
            f"{path} is no file; name a GGUF file, a config.json or the folder of one"
        )
    if path.suffix == ".json":
        return _read_config(path)
    return _read_gguf(path)


def _read_config(path: Path) -> ModelShape:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ShapeUnknown(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ShapeUnknown(f"{path} is not a model's config.json")
    shape = shape_of_config(document, _name(document, path))
    weights = sum(file.stat().st_size for file in path.parent.glob("*.safetensors"))
    return replace(shape, weights_bytes=weights or None)


def _name(document: dict[str, Any], path: Path) -> str:
    said = document.get("_name_or_path")
    return said if isinstance(said, str) and said else path.absolute().parent.name


def _read_gguf(path: Path) -> ModelShape:
    try:
        gguf = import_module("gguf")
    except ImportError as error:
        raise NeedsPackage(
            "reading a GGUF file needs the package gguf: `pip install gguf`"
        ) from error
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ShapeUnknown(f"{path} is not a whole GGUF file: {error}") from error

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    return _shape(path, value, gguf)


def _shape(path: Path, value: Callable[[str], Any], gguf: Any) -> ModelShape:
    arch = value("general.architecture")

    def of(key: str) -> Any:
        return value(f"{arch}.{key}")

    odd = [why for key, why in _ODD if of(key)]
    if arch in _ODD_ARCHITECTURES:
        odd.append(_ODD_ARCHITECTURES[arch])
    if odd:
        raise ShapeUnknown(f"{path.name} has {odd[0]}; its KV cache is not counted yet")
    layers, heads = _count(path, of, "block_count"), _first(of("attention.head_count"))
    kv_heads = _kv_heads(path, of("attention.head_count_kv"), layers, heads)
    size = of("attention.key_length") or _count(path, of, "embedding_length") // (heads or 1)
    return ModelShape(
        name=str(value("general.name") or path.stem),
        layers=layers,
        kv_heads=kv_heads,
        key_size=int(size),
        value_size=int(of("attention.value_length") or size),
        quantisation=_file_type(gguf, value("general.file_type")),
        trained_context=of("context_length"),
        weights_bytes=_weights(path),
    )


def _count(path: Path, of: Callable[[str], Any], key: str) -> int:
    found = of(key)
    if not isinstance(found, int) or found < 1:
        raise ShapeUnknown(f"{path.name} does not say `{key}`, so its KV cache cannot be counted")
    return found


def _first(heads: Any) -> int | None:
    found = max(heads) if isinstance(heads, list) and heads else heads
    return found if isinstance(found, int) and found > 0 else None


def _kv_heads(path: Path, told: Any, layers: int, heads: int | None) -> int:
    """Of all layers. A list has one number a layer; a layer of none is a recurrent one."""
    if isinstance(told, list):
        if len(told) < layers or not all(told):
            raise ShapeUnknown(
                f"{path.name} has layers without attention; its KV cache is not counted yet"
            )
        return int(sum(told[:layers]))
    if told or heads:
        return layers * int(told or heads or 0)
    raise ShapeUnknown(f"{path.name} does not say how many attention heads it has")


def _file_type(gguf: Any, number: Any) -> str | None:
    try:
        return str(gguf.LlamaFileType(number).name).removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return None


def _weights(path: Path) -> int:
    """Bytes of the file, or of all parts that it is one of."""
    part = _PART.search(path.name)
    if part is None:
        return path.stat().st_size
    stem = path.name[: part.start()]
    return sum(file.stat().st_size for file in path.parent.glob(f"{stem}-*-of-{part[1]}.gguf"))
