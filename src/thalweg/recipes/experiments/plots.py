"""The look that the pictures of experiments share."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Colours that stay apart for the colour-blind, in the order in which they are given out.
COLOURS = ("#0b6e82", "#c2611f", "#2c7a4b", "#8a4f9e", "#b23b2a", "#8a7a1f", "#5f7076")

# Axes, ticks and what is beside the point.
MUTED = "#5f7076"

_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.8,
    "axes.edgecolor": "#9fb0b5",
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "text.usetex": False,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw in the shared look inside this context.

    >>> with house_style():
    ...     figure, axes = canvas(1, 2, (6, 3))
    """
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def canvas(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """A figure without a window and its axes, ``(rows, columns)``; size in inches.

    >>> figure, axes = canvas(1, 2, (6, 3))
    >>> axes.shape
    (1, 2)
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def panels(names: Sequence[str], columns: int, cell: tuple[float, float], more: float = 0.0, **options: Any) -> Any:
    """A figure, its axes, and one of them for each name, which is its title; those left over are hidden.

    Args:
        columns: at most; cell: size of one in inches; more: width beside them.
    """
    columns = min(columns, len(names))
    rows = -(-len(names) // columns)
    figure, axes = canvas(rows, columns, (cell[0] * columns + more, cell[1] * rows), **options)
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    for ax, name in zip(axes.flat, names, strict=False):
        ax.set_title(name, fontsize=9)
        ax.tick_params(length=2, labelsize=7)
    return figure, axes, list(axes.flat[: len(names)])


def shade(ax: Any, values: Any, extent: tuple[float, float, float, float], most: float) -> Any:
    """Values over a rectangle from dark (0) to light (``most`` and above); what a colour bar takes."""
    return ax.imshow(values.clip(max=most), extent=extent, vmin=0.0, vmax=most, cmap="viridis", origin="lower")


def to_png(figure: Figure, colours: int | None = None) -> bytes:
    """The figure as a PNG; the same figure gives the same bytes. Few ``colours`` make pictures full of shades small.

    >>> to_png(canvas(1, 1, (1, 1))[0])[1:4]
    b'PNG'
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None}, facecolor="white")
    if colours is None:
        return buffer.getvalue()
    from PIL import Image

    smaller = io.BytesIO()
    with Image.open(buffer) as image:
        image.convert("RGB").quantize(colours, method=Image.Quantize.MAXCOVERAGE).save(
            smaller, format="png", optimize=True
        )
    return smaller.getvalue()


def colour_of(name: str, names: tuple[str, ...] | list[str]) -> str:
    """The colour of one of several names, always the same for the same list.

    >>> colour_of("b", ["a", "b"])
    '#c2611f'
    """
    return COLOURS[list(names).index(name) % len(COLOURS)]


def tidy(axes: Axes) -> None:
    """A faint grid for reading values, and no box.

    >>> tidy(canvas(1, 1, (1, 1))[1][0, 0])
    """
    axes.grid(axis="y", color="#dfe5e3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)


def show_image(axes: Axes, pixels: Tensor, title: str = "") -> None:
    """A square image of ink from 0 (white) to 16 (black).

    >>> import torch
    >>> show_image(canvas(1, 1, (1, 1))[1][0, 0], torch.zeros(64))
    """
    side = round(pixels.numel() ** 0.5)
    image = pixels.detach().reshape(side, side).cpu().numpy()
    axes.imshow(image, cmap="gray_r", vmin=0, vmax=16, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color("#c9d2d0")
    if title:
        axes.set_title(title, fontsize=8, loc="center", color=MUTED)
