"""`slotgate plan`: bytes of a token, requests in flight, slots that fit and are wanted, and what to type."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli.ops import recipe
from gateway.cli.ops.modelfile import read_model
from gateway.cli.ops.shape import EXAMPLE, ShapeUnknown, shape_of_config
from gateway.cli.ops.sizing import (
    MAY_WAIT,
    Demand,
    chance_to_wait,
    kv_bytes_a_token,
    size,
    slots_wanted,
)
from gateway.cli.plan import plan
from gateway.runtime.configfile import load

MODELS = Path(__file__).parents[1] / "data" / "models"
GIB = 1 << 30
PLAIN = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
}


def planned(*arguments: object) -> Result:
    return CliRunner().invoke(plan, [str(one) for one in arguments])


def test_the_standard_example_comes_out_as_in_the_books() -> None:
    demand = Demand(users=20, gen_seconds=12, turn_seconds=90)
    found = size(EXAMPLE, cache="f16", context=8192, demand=demand)
    assert found.kv_bytes_a_token == 147_456
    assert found.kv_bytes_a_slot == pytest.approx(1.2e9, rel=0.01)
    assert found.in_flight == pytest.approx(2.7, abs=0.05)
    shown = planned("--example")
    assert shown.exit_code == 0, shown.output
    assert "147,456 bytes" in shown.output
    assert "1.2 GB" in shown.output
    assert "2.7" in shown.output


@pytest.mark.parametrize(
    ("name", "bytes_a_token"),
    [("llama-3.1-8b", 131_072), ("qwen3-4b", 147_456), ("qwen2.5-0.5b", 12_288)],
)
def test_published_models_cost_what_their_configs_say(name: str, bytes_a_token: int) -> None:
    shape = read_model(MODELS / name)
    assert kv_bytes_a_token(shape, "f16") == bytes_a_token
    assert kv_bytes_a_token(shape, "fp8") == bytes_a_token / 2
    assert kv_bytes_a_token(shape, "q8_0") == bytes_a_token / 2 * 34 / 32
    assert shape.quantisation == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"sliding_window": 4096}, "sliding window of 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"attention_chunk_size": 8192}, "chunked"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"mamba_d_state": 128}, "recurrent"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": 511}, "head_dim"),
    ],
)
def test_what_would_be_counted_wrong_is_refused_aloud(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ShapeUnknown, match=why):
        shape_of_config(PLAIN | fields, "m")


def test_a_window_that_is_switched_off_and_a_model_that_also_sees_are_read() -> None:
    windowed = PLAIN | {"sliding_window": 4096, "use_sliding_window": False}
    assert shape_of_config(windowed, "m").kv_heads == 8
    assert shape_of_config({"text_config": PLAIN, "vision_config": {}}, "m").key_size == 64
    assert shape_of_config(PLAIN | {"num_key_value_heads": None}, "m").kv_heads == 32


def test_slots_stay_below_memory_and_a_smaller_cache_fits_more() -> None:
    shape = read_model(MODELS / "qwen3-4b")
    wide = size(shape, cache="f16", context=8192, memory_bytes=24 * GIB, weights_bytes=8 * GIB)
    assert wide.fit is not None
    filled = 8 * GIB + wide.fit * wide.kv_bytes_a_slot
    assert 24 * GIB * 0.8 < filled <= 24 * GIB * 0.9
    narrow = size(shape, cache="q8_0", context=8192, memory_bytes=24 * GIB, weights_bytes=8 * GIB)
    assert narrow.fit == math.floor((24 * 0.9 - 8) * GIB / (8192 * 147_456 / 2 * 34 / 32))
    assert narrow.fit > wide.fit


def test_the_slots_wanted_are_the_fewest_with_which_one_in_ten_waits() -> None:
    for in_flight in (0.1, 1.0, 2.667, 10.0, 100.0):
        slots = slots_wanted(in_flight, most=1000)
        assert chance_to_wait(in_flight, slots) <= MAY_WAIT
        assert slots == 1 or chance_to_wait(in_flight, slots - 1) > MAY_WAIT
    assert chance_to_wait(1.0, 2) == pytest.approx(1 / 3)  # by hand
    assert chance_to_wait(3.0, 3) == 1.0
    assert slots_wanted(2.667, most=3) == 3, "never more than there are people"


@pytest.mark.parametrize("engine", recipe.ENGINES)
def test_every_recipe_names_the_slots_and_its_config_is_accepted(
    engine: str, tmp_path: Path
) -> None:
    setup = recipe.Setup(model="my model.gguf", slots=6, context=8192, cache="q8_0")
    typed = recipe.command(engine, setup)
    assert {
        "llama-server": "--parallel 6 -c 49152",
        "ollama": 'Environment="OLLAMA_NUM_PARALLEL=6"',
        "vllm": "--max-num-seqs 6 --max-model-len 8192",
    }[engine] in typed
    assert "q8_0" in typed or "fp8" in typed
    file = tmp_path / "slotgate.yaml"
    file.write_text(recipe.config(engine, setup))
    backend = load(file).backends[0]
    assert (backend.engine, backend.slots) == (engine, 6)


def test_json_holds_the_figures_and_the_recipes() -> None:
    shown = planned(
        "--model", MODELS / "qwen3-4b", "--memory", "24GiB", "--weights", "8GB",
        "--users", 20, "--gen-seconds", 12, "--turn-seconds", 90, "--json",
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    document = json.loads(shown.output)
    assert document["sizing"]["kv_bytes_a_token"] == 147_456
    assert document["sizing"]["slots"] == document["sizing"]["wanted"] == 6
    assert document["recipes"]["vllm"]["command"].startswith("vllm serve")


def test_what_does_not_fit_is_said_with_a_status_of_1() -> None:
    shown = planned("--model", MODELS / "qwen3-4b", "--memory", "8GiB", "--weights", "8GiB")
    assert shown.exit_code == 1
    assert "Not one slot fits" in shown.output
    few = planned(
        "--model", MODELS / "qwen3-4b", "--memory", "12GiB", "--weights", "8GB",
        "--users", 200, "--gen-seconds", 12, "--turn-seconds", 90,
    )  # fmt: skip
    assert few.exit_code == 0
    assert "The queue never empties" in few.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model"),
        (["--model", MODELS / "qwen3-4b", "--memory", "24GiB"], "--weights"),
        (["--example", "--memory", "much"], "24GiB"),
        (["--model", MODELS / "qwen3-4b", "--users", "3"], "go together"),
    ],
)
def test_wrong_usage_says_what_to_do(arguments: list[object], words: str) -> None:
    shown = planned(*arguments)
    assert shown.exit_code == 2
    assert words in shown.output


def test_a_file_that_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[]")
    for path in (file, tmp_path / "missing.gguf"):
        shown = planned("--model", path)
        assert shown.exit_code == 1
        assert len(shown.output.splitlines()) == 1
