"""How a load test is shown: one row a step, the advice under it, and what changed since a saved run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.table import Table

from gateway.cli.ops.percentile import Spread
from gateway.cli.ops.tally import Step

_COLUMNS: Final[tuple[tuple[str, Callable[[Step], str]], ...]] = (
    ("served", lambda step: f"{step.served}/{step.requests}"),
    ("wall s", lambda step: f"{step.wall_s:.1f}"),
    ("slowest s", lambda step: _number(step.slowest_s, "{:.2f}")),
    ("TTFT s\np50 p95 p99", lambda step: _spread(step.ttft, "{:.2f}", 1)),
    ("ITL ms\np50 p95 p99", lambda step: _spread(step.itl, "{:.0f}", 1000)),
    ("prompt\ntok/s", lambda step: f"{step.prompt_tokens_per_s:.0f}"),
    ("predicted\ntok/s", lambda step: f"{step.generated_tokens_per_s:.1f}"),
    ("cached", lambda step: _number(step.cached_share, "{:.0%}")),
    ("most\nwaiting", lambda step: _number(step.load.waiting, "{}")),
    ("most\nKV", lambda step: _number(step.load.kv_used_ratio, "{:.0%}")),
    (
        "503s\n(p95 ms)",
        lambda step: f"{step.refused} ({step.refusal.p95 * 1000:.0f})" if step.refusal else "-",
    ),
    ("errors", lambda step: str(sum(step.errors.values())) if step.errors else "-"),
)


def overview(steps: Sequence[Step]) -> Table:
    """All steps. What an engine does not tell is a dash."""
    table = Table()
    table.add_column(
        "a second" if any(step.open_loop for step in steps) else "at\nonce", justify="right"
    )
    for title, _ in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for step in steps:
        table.add_row(step.label, *(cell(step) for _, cell in _COLUMNS))
    return table


def changes(pairs: Sequence[tuple[Step, Step]], name: str) -> Table:
    """The steps that both runs have, before and after."""
    table = Table(title=f"against {name}", title_justify="left")
    for title in ("at once", "TTFT p95 s", "ITL p95 ms", "predicted tok/s", "slowest s"):
        table.add_column(title, justify="right")
    for before, after in pairs:
        table.add_row(
            after.label,
            _change(_p95(before.ttft), _p95(after.ttft), "{:.2f}", 1),
            _change(_p95(before.itl), _p95(after.itl), "{:.0f}", 1000),
            _change(before.generated_tokens_per_s, after.generated_tokens_per_s, "{:.1f}", 1),
            _change(before.slowest_s, after.slowest_s, "{:.2f}", 1),
        )
    return table


def _p95(one: Spread | None) -> float | None:
    return None if one is None else one.p95


def _change(before: float | None, after: float | None, form: str, unit: float) -> str:
    if before is None or after is None:
        return "-"
    share = f" ({after / before - 1:+.0%})" if before else ""
    return f"{form.format(before * unit)} → {form.format(after * unit)}{share}"


def _spread(one: Spread | None, form: str, unit: float) -> str:
    if one is None:
        return "-"
    return " ".join(form.format(value * unit) for value in (one.p50, one.p95, one.p99))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
