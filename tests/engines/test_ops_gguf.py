"""A real GGUF is read as what it is. The package gguf is optional; without it this is skipped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.local_engine import EngineUnavailable, find_model
from gateway.cli.ops.modelfile import read_model
from gateway.cli.ops.shape import ShapeUnknown
from gateway.cli.ops.sizing import kv_bytes_a_token

gguf: Any = pytest.importorskip("gguf", reason="the package gguf is not installed")


def test_the_small_model_is_read_correctly() -> None:
    """SmolLM2-135M: 30 layers, 9 heads of 64, 3 of them for keys and values (its published config)."""
    try:
        path = find_model({key: value for key, value in os.environ.items() if key != "MODEL_GGUF"})
    except EngineUnavailable as unavailable:
        pytest.skip(str(unavailable))
    shape = read_model(path)
    assert (shape.layers, shape.heads_a_layer, shape.key_size, shape.value_size) == (30, 3, 64, 64)
    assert kv_bytes_a_token(shape, "f16") == 2 * 30 * 3 * 64 * 2 == 23_040
    assert shape.quantisation == "Q4_1"
    assert shape.trained_context == 8192
    assert shape.weights_bytes == path.stat().st_size


def written(path: Path, arch: str = "odd", **fields: int | list[int]) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_uint32(f"{arch}.block_count", 4)
    writer.add_uint32(f"{arch}.embedding_length", 512)
    writer.add_uint32(f"{arch}.attention.head_count", 8)
    for name, value in fields.items():
        key = f"{arch}.{name.replace('__', '.')}"
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_layers_that_differ_are_added_up(tmp_path: Path) -> None:
    shape = read_model(
        written(
            tmp_path / "m.gguf", attention__head_count_kv=[1, 2, 2, 1], attention__key_length=96
        )
    )
    assert (shape.kv_heads, shape.key_size, shape.value_size) == (6, 96, 96)


@pytest.mark.parametrize(
    "fields",
    [
        {"attention__kv_lora_rank": 512},
        {"attention__sliding_window": 1024},
        {"ssm__state_size": 16},
        {"shortconv__l_cache": 3},
        {"kda__head_dim": 128},
        {"arch": "llama4"},
        {"attention__head_count_kv": [2, 0, 2, 0]},
    ],
)
def test_what_would_be_counted_wrong_is_refused_aloud(tmp_path: Path, fields: Any) -> None:
    with pytest.raises(ShapeUnknown, match="not counted yet"):
        read_model(written(tmp_path / "m.gguf", **fields))


def test_the_parts_of_a_split_model_are_weighed_together(tmp_path: Path) -> None:
    first = written(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"x" * 1000)
    assert read_model(first).weights_bytes == first.stat().st_size + 1000


def test_half_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "half.gguf"
    file.write_bytes(written(tmp_path / "m.gguf").read_bytes()[:40])
    with pytest.raises(ShapeUnknown):
        read_model(file)
