"""The picture of ``scaling.py``: halos, temporaries and cycles of a chip, over the number of chips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PANELS: tuple[tuple[str, Callable[[Any], float | None]], ...] = (
    ("halos received a chip, MB", lambda row: row.purposes.get("halo", 0) / 1e6),
    ("temporaries a chip, MB", lambda row: row.temporaries / 1e6),
    ("estimated cycles, M", lambda row: row.mega_cycles),
)
# The second is thinner, so that the first is seen where both are the same.
STYLES: dict[str, dict[str, Any]] = {
    "XLA's partitioner": {"color": "#e08a4f", "lw": 2.6, "ms": 6},
    "ring_conv": {"color": "#0b5f70", "lw": 1.2, "ms": 3},
}
DASHES = {"stack cut in W": "-", "stack cut in H x W": (0, (4, 2))}


def draw(rows: Sequence[Any], path: Path) -> None:
    """One row of panels a kind of chip; flat lines are perfect weak scaling."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    families = list(dict.fromkeys(row.job.target.split(":")[1] for row in rows))
    if not families:
        return
    style = {"svg.fonttype": "none", "svg.hashsalt": "scaling", "font.family": "sans-serif", "font.size": 9}
    with mpl.rc_context(style):
        figure = Figure(figsize=(9, 2.5 * len(families) + 0.5), layout="constrained")
        grid = figure.subplots(len(families), len(PANELS), squeeze=False)
        for family, line in zip(families, grid, strict=True):
            some = [row for row in rows if row.job.target.split(":")[1] == family]
            for (title, of), axes in zip(PANELS, line, strict=True):
                _panel(axes, some, of)
                axes.set_title(f"TPU {family}: {title}", fontsize=9, loc="left")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
    if path.suffix == ".svg":  # a third of it is indentation and comments
        lines = (line.strip() for line in path.read_text().splitlines())
        path.write_text("\n".join(line for line in lines if line and not line.startswith("<!--")) + "\n")


def _panel(axes: Any, rows: Sequence[Any], of: Callable[[Any], float | None]) -> None:
    for program, dashes in DASHES.items():
        for form, style in STYLES.items():
            points = [(r.job.chips, of(r)) for r in rows if (r.job.program, r.job.form) == (program, form)]
            points = [point for point in points if point[1] is not None]
            if points:
                name = f"{form}, {program.removeprefix('stack ')}"
                axes.plot(*zip(*points, strict=True), ls=dashes, marker="o", label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks([8, 64, 256], ["8", "64", "256 chips"])
    axes.minorticks_off()
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", nbins=4)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", lw=0.6)
    axes.set_axisbelow(True)
