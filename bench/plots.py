"""Pictures of what `bench.simulate` found. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "round robin": "#9aa0a6", "least in flight": "#5f6368", "power of two": "#c58af9", "bounded hash": "#f9ab00",
    "cache-aware": "#e8710a", "slotgate": "#1a73e8",
}  # fmt: skip


def plot(rows: dict, where: Path) -> None:
    """One PNG for each trace: mean TTFT over load, a panel for each kind of engine and size of fleet."""
    where.mkdir(parents=True, exist_ok=True)
    loaded = {cell: row for cell, row in rows.items() if cell.load}
    for trace in sorted({cell.trace for cell in loaded}):
        name = Path(trace).name.split("_")[0]
        _one(name, {c: row for c, row in loaded.items() if c.trace == trace}, where)


def _one(name: str, rows: dict, where: Path) -> None:
    kinds = sorted({cell.kind for cell in rows})
    sizes = sorted({cell.engines for cell in rows})
    figure, panels = plt.subplots(
        len(kinds), len(sizes), figsize=(4 * len(sizes), 3 * len(kinds)), squeeze=False, sharex=True
    )
    for line, kind in zip(panels, kinds, strict=True):
        for panel, size in zip(line, sizes, strict=True):
            here = sorted(
                ((c.load, row) for c, row in rows.items() if (c.kind, c.engines) == (kind, size)),
                key=lambda item: item[0],
            )
            for policy, colour in COLOURS.items():
                loads = [load for load, row in here if policy in row]
                means = [row[policy]["mean"] for _, row in here if policy in row]
                width = 2.4 if policy == "slotgate" else 1.2
                panel.plot(loads, means, color=colour, lw=width, marker="o", ms=3, label=policy)
            panel.set_title(f"{kind}, {size} engines", fontsize=10)
            panel.set_yscale("log")
            panel.grid(alpha=0.3, which="both")
    for panel in panels[-1]:
        panel.set_xlabel("load, %")
    for line in panels:
        line[0].set_ylabel("mean TTFT, s")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncol=6, loc="lower center", fontsize=9, frameon=False)
    figure.suptitle(f"{name} trace")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(where / f"routing-{name}.png", dpi=80)
    plt.close(figure)
