"""The document of `/status` as tables for people."""

from __future__ import annotations

from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Document = dict[str, Any]

COLOURS: Final = {
    "up": "green", "busy": "green", "sleeping": "cyan", "loading": "yellow", "draining": "yellow",
    "failing": "red", "down": "red", "bad": "red", "warning": "yellow", "hint": "cyan",
}  # fmt: skip
MOST_CELLS: Final = 32
MOST_OTHERS: Final = 6
TERMS: Final = (
    ("cost_s", "expected time to its first token, with what it costs the others: the sum of"),
    ("wait_s", "until a slot is free there"),
    ("load_s", "until its model is loaded there"),
    ("backlog_s", "prompts of others that are ahead of it"),
    ("own_s", "its own prompt, without what is cached there"),
)


def overview(document: Document) -> RenderableType:
    """The whole state on one screen."""
    parts: list[RenderableType] = [_headline(document)]
    parts += [
        Text(f"! {one['text']}", style=COLOURS.get(one["level"], ""))
        for one in document["findings"]
    ]
    parts += [_backends(document["backends"]), _models(document)]
    if document["keys"]:
        parts.append(_keys(document["keys"]))
    return Group(*parts)


def explanation(decision: Document) -> RenderableType:
    """Why one request went where it went: what each backend was expected to cost, the chosen one first."""
    ended = decision["outcome"] or "still running"
    head = f"{decision['request_id']}  {decision['model']}  key {decision['key']}: {ended}"
    parts: list[RenderableType] = [Text(head, style="bold")]
    for number, attempt in enumerate(decision["attempts"], 1):
        parts.append(
            Text(
                f"Attempt {number}: after {_seconds(attempt['queued_s'])} in line to {attempt['backend']}, "
                f"affinity {attempt['affinity']}"
            )
        )
        parts.append(_costs(attempt))
    return Group(*parts, Text(_outcome(decision)))


def _costs(attempt: Document) -> Table:
    """The terms of the cost as rows, backends as columns."""
    columns = [attempt, *attempt["others"][:MOST_OTHERS]]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for one in columns:
        table.add_column(one["backend"], justify="right")
    table.add_column("")
    for name, text in TERMS:
        figures = (_seconds(one[name]) for one in columns)
        table.add_row(name.removesuffix("_s"), *figures, Text(text, style="dim"))
    table.add_row(
        "uncached",
        *(f"{one['uncached_tokens']:,}" for one in columns),
        Text("tokens of its prompt, by our reckoning", style="dim"),
    )
    table.add_row(
        "crowd",
        *(str(one["crowd"]) for one in columns),
        Text("others that wait for it", style="dim"),
    )
    return table


def _outcome(decision: Document) -> str:
    parts = [f"first token after {_seconds(decision['ttft_s'])}"] if decision["ttft_s"] else []
    if decision["seconds"] is not None:
        parts.append(f"ended after {_seconds(decision['seconds'])}")
    if decision["cached_tokens"] is not None:
        parts.append(
            f"{decision['cached_tokens']:,} of {decision['prompt_tokens']:,} prompt tokens were cached"
        )
    return "Then: " + (", ".join(parts) or "nothing yet")


def _headline(document: Document) -> Text:
    minute = document["last_minute"]
    ready = "ready" if document["ready"] else "draining" if document["draining"] else "not ready"
    line = Text.assemble(
        ("Slotgate ", "bold"),
        f"{document['version']}  ",
        (ready, "green" if document["ready"] else "red"),
        f"  served {minute['served_per_s']:g}/s  refused {minute['shed_per_s']:g}/s"
        f"  {minute['generated_tokens_per_s']:g} tokens/s  {document['queued']} waiting",
    )
    if minute["cached_share"] is not None:
        line.append(f"  cached {minute['cached_share']:.0%}")
    return line


def _backends(backends: list[Document]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("backend", "engine", "state", "slots", "cached", "KV", "report"):
        table.add_column(name)
    for one in backends:
        table.add_row(
            one["name"],
            one["engine"] or "?",
            Text(one["state"], style=COLOURS.get(one["state"], "")),
            _cells(one),
            _percent(one["cached_share"]),
            _percent(one["kv_used_ratio"]),
            "never" if one["report_age_s"] is None else f"{one['report_age_s']:.0f} s ago",
        )
    return table


def _cells(one: Document) -> Text:
    """A cell for each slot: ours, settling, others', free."""
    slots, ours, settling = one["slots"], one["in_flight"], one["settling"]
    others = min(round(one["others"]), max(0, slots - ours - settling))
    free = max(0, slots - ours - settling - others)
    count = f" {ours}/{slots}{' (assumed)' if one['slots_source'] == 'assumed' else ''}"
    if slots > MOST_CELLS:
        return Text(count.strip())
    return Text.assemble(
        ("■" * ours, "green"), ("▒" * settling, "yellow"), ("■" * others, "magenta"),
        ("□" * free, "dim"), count,
    )  # fmt: skip


def _models(document: Document) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model")
    for name in ("waiting", "TTFT p95 1m", "5m", "ITL p95 1m", "5m", "refused"):
        table.add_column(name, justify="right")
    shed = document["shed"]
    for name in [*document["models"], "all"]:
        p95 = document["p95"].get(name, {})
        model = document["models"].get(name)
        refused = sum(n for why, n in shed.items() if name in ("all", why.rpartition("/")[0]))
        table.add_row(
            name,
            f"{model['queued']}/{model['queue_limit']}" if model else str(document["queued"]),
            *(
                _seconds(p95.get(window, {}).get(what))
                for what in ("ttft", "itl")
                for window in ("1m", "5m")
            ),
            str(refused),
        )
    return table


def _keys(keys: Document) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("key")
    for name in ("requests", "served", "prompt tokens", "cached", "generated"):
        table.add_column(name, justify="right")
    for name, one in list(keys.items())[:10]:
        figures = ("requests", "served", "prompt_tokens", "cached_tokens", "generated_tokens")
        table.add_row(name, *(f"{one.get(figure, 0):,}" for figure in figures))
    return table


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
