"""`slotgate plan`: how many slots fit into the memory, how many are wanted, and what to type for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from gateway.cli.ops import recipe
from gateway.cli.ops.modelfile import NeedsPackage, read_model
from gateway.cli.ops.shape import EXAMPLE, ModelShape, ShapeUnknown
from gateway.cli.ops.sizing import CACHE_BYTES, USABLE, Demand, Sizing, size

Recipes = tuple[tuple[str, str, str], ...]  # engine, its command, our config

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_CONTEXT: Final = 8192
_EXAMPLE_MEMORY: Final = 24 << 30
_EXAMPLE_DEMAND: Final = Demand(users=20, gen_seconds=12, turn_seconds=90)


def _bytes(_ctx: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    """24GiB, 24GB, 512M or a plain number of bytes."""
    if value is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", value, re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise click.BadParameter(f"{value!r} is no size; write 24GiB, 24GB or bytes")
    return int(float(found[1]) * (_BINARY if found[3] else _UNITS)[found[2].upper()])


@click.command(
    short_help="How many slots fit, how many are wanted.",
    epilog="Nothing is sent anywhere. A GGUF file needs the package gguf: pip install gguf.",
)
@click.option("--model", "path", type=click.Path(path_type=Path), metavar="F",
              help="A GGUF file, a config.json, or the folder of one.")  # fmt: skip
@click.option("--example", is_flag=True, help="Work through an example instead.")
@click.option("--context", type=click.IntRange(min=1), metavar="TOKENS",
              help="Of one slot: the longest prompt and its answer.  [default: 8192]")  # fmt: skip
@click.option(
    "--memory",
    metavar="SIZE",
    callback=_bytes,
    help="Of the device that holds model and cache: 24GiB.",
)
@click.option(
    "--weights",
    metavar="SIZE",
    callback=_bytes,
    help="Of the model in memory, when its files do not tell.",
)
@click.option("--cache-type", "cache", type=click.Choice(list(CACHE_BYTES)), default="f16",
              show_default=True, help="How the KV cache keeps its numbers.")  # fmt: skip
@click.option(
    "--users", type=click.IntRange(min=1), help="People (or agents) at work at the same time."
)
@click.option(
    "--gen-seconds", type=click.FloatRange(min=0, min_open=True), help="That one answer takes."
)
@click.option("--turn-seconds", type=click.FloatRange(min=0, min_open=True),
              help="From one question of a person to the next.")  # fmt: skip
@click.option("--engine", "engines", type=click.Choice(recipe.ENGINES), multiple=True,
              help="Whose command to print. May be repeated; by default those that can run the file.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON.")
@click.pass_context
def plan(
    ctx: click.Context,
    *,
    path: Path | None,
    example: bool,
    context: int | None,
    memory: int | None,
    weights: int | None,
    cache: str,
    users: int | None,
    gen_seconds: float | None,
    turn_seconds: float | None,
    engines: tuple[str, ...],
    as_json: bool,
) -> None:
    """KV cache bytes a token, requests in flight, slots that fit, and the commands for them.

    \b
      slotgate plan --example
      slotgate plan --model qwen.gguf --memory 24GiB --context 8192 \\
                    --users 20 --gen-seconds 12 --turn-seconds 90
    """  # noqa: D301  (click's own mark for verbatim lines)
    shape = EXAMPLE if example else _shape(path)
    demand = _EXAMPLE_DEMAND if example else _demand(users, gen_seconds, turn_seconds)
    memory = memory or (_EXAMPLE_MEMORY if example else None)
    weights = weights if weights is not None else shape.weights_bytes
    if memory is not None and weights is None:
        raise click.UsageError(
            "Say how large the weights are with --weights; the files do not tell."
        )
    sizing = size(
        shape,
        cache=cache,
        context=context or _CONTEXT,
        memory_bytes=memory,
        weights_bytes=weights,
        demand=demand,
    )
    recipes = _recipes(sizing, path, cache, engines)
    if as_json:
        click.echo(json.dumps(document(shape, sizing, cache, recipes), indent=2))
    else:
        show(Console(highlight=False), shape, sizing, cache, recipes)
    if sizing.fit == 0:
        ctx.exit(1)


def document(
    shape: ModelShape, sizing: Sizing, cache: str, recipes: Recipes
) -> dict[str, dict[str, Any]]:
    """What --json prints: sizes in bytes, contexts in tokens."""
    return {
        "model": asdict(shape),
        "sizing": {"cache_type": cache, **asdict(sizing)},
        "recipes": {engine: {"command": one, "config": two} for engine, one, two in recipes},
    }


def show(console: Console, shape: ModelShape, sizing: Sizing, cache: str, recipes: Recipes) -> None:
    """The table, what it means, and what to type."""
    table = Table(title=shape.name, show_header=False, title_justify="left")
    for label, words in _rows(shape, sizing, cache):
        table.add_row(label, words)
    console.print(table)
    for words in verdict(shape, sizing):
        console.print(words, soft_wrap=True)
    for engine, command, config in recipes:
        console.print(f"\n[bold]{engine}[/bold]")
        console.print(f"{command}\n\n{config}", markup=False, soft_wrap=True)


def verdict(shape: ModelShape, sizing: Sizing) -> Iterator[str]:
    """What the figures mean, where they mean trouble."""
    if sizing.fit == 0:
        yield (
            "Not one slot fits: the weights and the cache of one sequence need more memory. Take a shorter --context, "
            "an 8-bit cache (--cache-type q8_0), a smaller quantisation or more memory."
        )
    elif sizing.fit is not None and sizing.wanted is not None and sizing.fit < sizing.wanted:
        more = (
            "Requests will wait"
            if (sizing.in_flight or 0) < sizing.fit
            else "The queue never empties"
        )
        yield (
            f"{more}: {sizing.wanted} slots are wanted and {sizing.fit} fit. Take a shorter --context, an 8-bit cache "
            "(--cache-type q8_0), or a second backend."
        )
    if shape.trained_context is not None and sizing.context > shape.trained_context:
        yield f"The model was trained for {shape.trained_context:,} tokens; beyond that its answers get worse."


def _rows(shape: ModelShape, sizing: Sizing, cache: str) -> Iterator[tuple[str, str]]:
    heads = f"{shape.heads_a_layer:g} KV heads of {shape.key_size}"
    yield "layers, heads", f"{shape.layers} layers, {heads}"
    weights = "" if shape.weights_bytes is None else f", {_gigabytes(shape.weights_bytes)}"
    if shape.quantisation or weights:
        yield "weights", f"{shape.quantisation or 'as they are'}{weights}"
    yield f"KV cache of a token ({cache})", f"{sizing.kv_bytes_a_token:,.0f} bytes"
    yield f"of a slot of {sizing.context:,} tokens", _gigabytes(sizing.kv_bytes_a_slot)
    if sizing.kv_room_bytes is not None:
        yield (
            f"room for KV ({USABLE:.0%} of memory, less weights)",
            _gigabytes(sizing.kv_room_bytes),
        )
        yield "slots that fit", str(sizing.fit)
    if sizing.in_flight is not None:
        yield "requests in flight, on average", f"{sizing.in_flight:.1f}"
        yield "slots wanted (one in ten may wait)", str(sizing.wanted)
    if sizing.slots is not None:
        yield "slots to set", str(sizing.slots)


def _gigabytes(count: float) -> str:
    if count < 10**8:
        return f"{count / 10**6:,.1f} MB"
    return f"{count / 10**9:,.1f} GB ({count / (1 << 30):,.1f} GiB)"


def _shape(path: Path | None) -> ModelShape:
    if path is None:
        raise click.UsageError(
            "Say which model: --model model.gguf or config.json; --example shows one."
        )
    try:
        return read_model(path)
    except (ShapeUnknown, NeedsPackage) as error:
        raise click.ClickException(str(error)) from error


def _demand(users: int | None, gen: float | None, turn: float | None) -> Demand | None:
    if users is None and gen is None and turn is None:
        return None
    if users is None or gen is None or turn is None:
        raise click.UsageError("--users, --gen-seconds and --turn-seconds go together.")
    if turn < gen:
        raise click.UsageError(
            "--turn-seconds counts from question to question, so it is no shorter than --gen-seconds."
        )
    return Demand(users=users, gen_seconds=gen, turn_seconds=turn)


def _recipes(sizing: Sizing, path: Path | None, cache: str, engines: tuple[str, ...]) -> Recipes:
    """Nothing when no number of slots follows: neither memory nor demand was told, or nothing fits."""
    if not sizing.slots:
        return ()
    setup = recipe.Setup(
        model=_typed(path), slots=sizing.slots, context=sizing.context, cache=cache
    )
    return tuple(
        (engine, recipe.command(engine, setup), recipe.config(engine, setup))
        for engine in engines or _engines_of(path)
    )


def _typed(path: Path | None) -> str:
    """How the model is named on a command line: vLLM takes the folder."""
    if path is None:
        return "model.gguf"
    return str(path.parent) if path.name == "config.json" else str(path)


def _engines_of(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return recipe.ENGINES
    return ("vllm",) if path.is_dir() or path.suffix == ".json" else ("llama-server", "ollama")
