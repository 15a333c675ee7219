"""The shape of a model as far as its KV cache needs it, from the `config.json` that Hugging Face models come with.

Law of this file: a shape is right or it is refused aloud. Attention that keeps something else than a key and a value of
every token in every layer (MLA, sliding windows, chunks, recurrent and shared layers) is refused by name until it is counted right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final


class ShapeUnknown(Exception):  # noqa: N818 - a fact about the model
    """The KV cache of a model cannot be counted, and why in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What decides the size of a KV cache. `kv_heads`: of all layers together, for models whose layers differ."""

    name: str
    layers: int
    kv_heads: int  # layers x KV heads, where all layers are alike
    key_size: int  # of one head
    value_size: int
    quantisation: str | None = None  # of the weights
    trained_context: int | None = None  # tokens
    weights_bytes: int | None = None  # None: not known

    @property
    def heads_a_layer(self) -> float:
        """KV heads of a layer, on average."""
        return self.kv_heads / self.layers


EXAMPLE: Final = ModelShape(
    name="example: 36 layers, 8 KV heads of 128",
    layers=36,
    kv_heads=36 * 8,
    key_size=128,
    value_size=128,
    trained_context=32_768,
    weights_bytes=5_000_000_000,
)

_REFUSED: Final = (
    ("kv_lora_rank", "multi-head latent attention (MLA), which keeps one compressed vector a token"),
    ("attention_chunk_size", "chunked attention, whose layers keep only a part of the context"),
    ("num_kv_shared_layers", "layers that share the KV cache of others"),
    ("full_attention_interval", "linear attention in most layers"),
    ("linear_num_key_heads", "linear attention in some layers"),
    ("hybrid_override_pattern", "recurrent layers among those of attention"),
    ("layers_block_type", "recurrent layers among those of attention"),
    ("attn_layer_period", "recurrent layers among those of attention"),
    ("ssm_cfg", "recurrent layers"),
    ("mamba_d_state", "recurrent layers"),
    ("state_size", "recurrent layers"),
    ("cross_attention_layers", "cross attention, whose layers keep an image instead of the text"),
    ("index_topk", "sparse attention with an index of its own"),
)  # fmt: skip


def shape_of_config(document: Mapping[str, Any], name: str) -> ModelShape:
    """Read a `config.json`; of a model that also sees or hears, the part for text. Raises ShapeUnknown."""
    inner = document.get("text_config")
    config = inner if isinstance(inner, Mapping) else document
    _refuse(config, name)
    layers = _whole(config, "num_hidden_layers", name)
    heads = _whole(config, "num_attention_heads", name)
    kv_heads = _whole(config, "num_key_value_heads", name, default=heads)
    size = _head_size(config, heads, name)
    return ModelShape(
        name=name,
        layers=layers,
        kv_heads=layers * kv_heads,
        key_size=size,
        value_size=size,
        quantisation=_quantisation(document, config),
        trained_context=_trained(config),
    )


def _refuse(config: Mapping[str, Any], name: str) -> None:
    for why in _oddities(config):
        raise ShapeUnknown(f"{name} has {why}; its KV cache is not counted yet")


def _oddities(config: Mapping[str, Any]) -> Iterator[str]:
    for field, why in _REFUSED:
        if config.get(field):
            yield why
    kinds = config.get("layer_types")
    others = {str(kind) for kind in kinds or ()} - {"full_attention", "attention"}
    if others:
        yield f"layers of other kinds ({', '.join(sorted(others))})"
    if config.get("sliding_window") and config.get("use_sliding_window", True) and not kinds:
        yield f"a sliding window of {config['sliding_window']} tokens"
    if config.get("is_encoder_decoder"):
        yield "an encoder and a decoder, which keep two caches"


def _head_size(config: Mapping[str, Any], heads: int, name: str) -> int:
    if config.get("head_dim"):
        return _whole(config, "head_dim", name)
    hidden = _whole(config, "hidden_size", name)
    if hidden % heads:
        raise ShapeUnknown(
            f"{name}: {hidden} is not divisible by its {heads} heads, and there is no head_dim"
        )
    return hidden // heads


def _whole(config: Mapping[str, Any], field: str, name: str, default: int | None = None) -> int:
    value = config.get(field, default)
    if value is None and default is not None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ShapeUnknown(f"{name} does not say `{field}`, so its KV cache cannot be counted")
    return value


def _trained(config: Mapping[str, Any]) -> int | None:
    value = config.get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else None


def _quantisation(document: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    quantised = document.get("quantization_config") or config.get("quantization_config")
    if isinstance(quantised, Mapping) and isinstance(quantised.get("quant_method"), str):
        bits = quantised.get("bits")
        return f"{quantised['quant_method']}{f' {bits} bit' if bits else ''}"
    for one in (config, document):
        for field in ("dtype", "torch_dtype"):
            if isinstance(one.get(field), str):
                return str(one[field])
    return None
