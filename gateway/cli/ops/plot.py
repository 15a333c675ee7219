"""A picture of a load test: latency and rate over what was asked at once. Needs the package matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gateway.cli.ops.modelfile import NeedsPackage
from gateway.cli.ops.tally import Step, knee


def plotter() -> Any:
    """matplotlib, without a screen. Raises NeedsPackage; ask before the test, not after it."""
    try:
        import_module("matplotlib").use("Agg")
        return import_module("matplotlib.pyplot")
    except ImportError as error:
        raise NeedsPackage(
            "--plot needs the package matplotlib: `pip install matplotlib`"
        ) from error


def draw(pyplot: Any, steps: Sequence[Step], path: Path) -> None:
    """Write a PNG: TTFT and ITL by percentile, and tokens a second with the knee marked. Raises OSError."""
    figure, (ttft, itl, rate) = pyplot.subplots(1, 3, figsize=(13, 4))
    levels = [step.label for step in steps]
    for axes, title, spreads in (
        (ttft, "time to first token, s", [step.ttft for step in steps]),
        (itl, "inter-token latency, s", [step.itl for step in steps]),
    ):
        for name in ("p50", "p95", "p99"):
            values = [float("nan") if one is None else getattr(one, name) for one in spreads]
            axes.plot(levels, values, marker="o", label=name)
        _label(axes, title)
        axes.legend()
    rate.plot(levels, [step.generated_tokens_per_s for step in steps], marker="o", color="black")
    _label(rate, "generated tokens/s")
    bend = knee(steps)
    if bend is not None:
        rate.axvline(bend.label, linestyle=":", color="grey")
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)


def _label(axes: Any, title: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("requests at once")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
