"""What the page of a diagnosis shows of image networks alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from thalweg.tasks.report.tables import Line, row_of, table_of
from thalweg.tasks.report.text import note

if TYPE_CHECKING:
    from thalweg.tasks.classify.measures import ImageLook

__all__ = ["layers_table", "norms_table", "stretch_lines"]


def stretch_lines(look: ImageLook) -> list[Line]:
    """Largest and mean singular values of each convolution's own Jacobian, by depth.

    >>> from thalweg.diagnostics.map_use import LayerStretch
    >>> from thalweg.tasks.classify.measures import ImageLook
    >>> one = LayerStretch("convolutions 1", "convolutions", 1, 64, 64, 1.2, 0.0, 0.4)
    >>> [line.label for line in stretch_lines(ImageLook((), (one,), (), 0.0))]
    ['convolutions, largest', 'convolutions, mean']
    """
    lines = []
    for stack in dict.fromkeys(row.stack for row in look.stretches):
        rows = [row for row in look.stretches if row.stack == stack]
        lines.append(Line(f"{stack}, largest", tuple((row.depth, row.largest) for row in rows)))
        lines.append(Line(f"{stack}, mean", tuple((row.depth, row.mean) for row in rows), dashed=True))
    return lines


def layers_table(look: ImageLook) -> str:
    """A row a layer: how many channels, how many of them vary, how it stretches what goes through.

    >>> from thalweg.tasks.classify.measures import ImageLook
    >>> "convolutions" in layers_table(ImageLook((), (), (), 0.0))
    False
    """
    found = {row.name: row for row in look.stretches}
    rows = []
    for row in look.channels:
        own = found.get(row.name)
        ends = ("", "") if own is None else (f"{own.largest:.3g} ± {own.error:.1g}", f"{own.mean:.3g}")
        low, high = row.deviation
        rows.append(row_of(row.name, f"{row.channels:,}", f"{row.constant:.1%}", f"{low:.2g} to {high:.2g}", *ends))
    heads = ("layer", "#channels", "#hardly vary", "#deviation of a channel", "#Jacobian, largest", "#mean")
    left = "" if look.stretches else note("Maps are too wide, or no numbers: their Jacobians were not taken.")
    return table_of(heads, rows) + left


def norms_table(look: ImageLook) -> str:
    """A row a norm of the network: what comes in, by how much it multiplies changes, its running statistics.

    >>> from thalweg.tasks.classify.measures import ImageLook
    >>> "has no norms" in norms_table(ImageLook((), (), (), 0.0))
    True
    """
    if not look.norms:
        return note("The network has no norms of its own.")
    rows = []
    for row in look.norms:
        spans = (f"{a:.2g} to {b:.2g}" for a, b in (row.mean, row.deviation, row.gain))
        running = ("", "") if math.isnan(row.shift) else (f"{row.shift:.2g}", f"{row.scale:.2g}")
        rows.append(row_of(f"{row.name}: {row.norm}", f"{row.groups:,}", *spans, f"{row.dead:.1%}", *running))
    heads = ("norm", "#groups", "#mean", "#deviation", "#gain", "#dead", "#running mean off", "#running variance")
    about = (
        "<p>Running means in standard deviations from those of the images, running variances relative to theirs.</p>"
        if any(not math.isnan(row.shift) for row in look.norms)
        else ""
    )
    return f"<h3>What its norms measure</h3>{about}{table_of(heads, rows)}"
