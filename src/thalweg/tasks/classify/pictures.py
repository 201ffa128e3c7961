"""Pictures of a classifier: its mistakes, confusions and calibration, what it looks at, its filters and maps."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from thalweg.data.images.reading import ImageSplit
from thalweg.diagnostics.saliency import (
    feature_maps,
    first_filters,
    grad_cam,
    heat,
    integrated_gradients,
    smooth_gradient,
)
from thalweg.files import write_atomically
from thalweg.tasks.classify.classifier import Classifier

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Mistakes on the contact sheet, images with their saliency, channels of a block's maps.
MISTAKES, EXAMPLES, CHANNELS = 24, 6, 32

# Pixels of a side at most in a page.
LARGEST = 160

# Beyond so many classes numbers no longer fit into the cells of a picture.
NUMBERED = 20


def as_uri(pixels: NDArray[Any]) -> str:
    """An image ``(H, W)`` or ``(H, W, 3)`` uint8 as a ``data:`` address of a PNG; large ones are made smaller.

    >>> as_uri(np.zeros((2, 2), dtype=np.uint8))[:22]
    'data:image/png;base64,'
    """
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels))
    if max(image.size) > 4 * LARGEST:
        image.thumbnail((4 * LARGEST, 4 * LARGEST))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def mosaic(tiles: NDArray[Any], columns: int, side: int = 24) -> NDArray[np.uint8]:
    """Tiles ``(N, H, W)`` or ``(N, H, W, 3)`` uint8 side by side, with white gaps between them.

    Small ones are enlarged by a whole number to about ``side`` pixels, so that the gaps are narrow beside them.

    >>> mosaic(np.zeros((3, 2, 2), dtype=np.uint8), columns=2, side=8).shape
    (18, 18)
    """
    by, gap = max(1, round(side / max(tiles.shape[1:3]))), 2
    tiles = tiles.repeat(by, axis=1).repeat(by, axis=2)
    N, H, W = tiles.shape[:3]
    rows, columns = math.ceil(N / columns), min(N, columns)
    sheet = np.full((rows * (H + gap) - gap, columns * (W + gap) - gap, *tiles.shape[3:]), 255, dtype=np.uint8)
    for n in range(N):
        y, x = (n // columns) * (H + gap), (n % columns) * (W + gap)
        sheet[y : y + H, x : x + W] = tiles[n]
    return sheet


def worst_mistakes(log_probs: Tensor, labels: Tensor, count: int = MISTAKES) -> list[int]:
    """Rows of the images that are taken for another class with the greatest probability, worst first.

    >>> import torch
    >>> worst_mistakes(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]]).log(), torch.tensor([1, 1, 0]))
    [0, 2]
    """
    best = log_probs.max(dim=1)
    wrong = (best.indices != labels).nonzero().squeeze(1)
    order = best.values[wrong].argsort(descending=True, stable=True)
    return wrong[order][:count].tolist()


def pictures(classifier: Classifier, split: ImageSplit, log_probs: Tensor) -> dict[str, Any]:
    """What the report shows as ``data:`` addresses: ``mistakes``, ``saliency``, ``filters`` and ``maps``."""
    wrong = worst_mistakes(log_probs, split.labels)
    examples = _examples(log_probs, split.labels, wrong)
    return {
        "mistakes": [_fact(classifier, split, log_probs, row) for row in wrong],
        "saliency": _saliency(classifier, split, log_probs, examples),
        "filters": _filters(classifier),
        "maps": _maps(classifier, split, log_probs, examples[:1]),
    }


def _examples(log_probs: Tensor, labels: Tensor, wrong: Sequence[int]) -> list[int]:
    """A few images that are right, of different classes where that can be, and the worst that are wrong."""
    right = (log_probs.argmax(1) == labels).nonzero().squeeze(1).tolist()
    firsts: dict[int, int] = {}
    for row in right:
        firsts.setdefault(int(labels[row]), row)
    chosen = list(firsts.values())
    chosen += [row for row in right[:EXAMPLES] if row not in chosen]
    half = max(EXAMPLES // 2, EXAMPLES - len(wrong))
    kept = chosen[:half]
    return kept + list(wrong[: EXAMPLES - len(kept)])


def _pixels(image: Tensor) -> NDArray[np.uint8]:
    """``(C, H, W)`` uint8 -> ``(H, W)`` or ``(H, W, 3)``."""
    array = image.cpu().numpy()
    return array[0] if len(array) == 1 else array.transpose(1, 2, 0)


def _fact(classifier: Classifier, split: ImageSplit, log_probs: Tensor, row: int) -> dict[str, Any]:
    label, best = int(split.labels[row]), int(log_probs[row].argmax())
    return {
        "file": split.files[row],
        "gold": classifier.classes[label],
        "predicted": classifier.classes[best],
        "probability": float(log_probs[row, best].exp()),
        "gold_probability": float(log_probs[row, label].exp()),
        "image": as_uri(_pixels(split.images[row])),
    }


def _saliency(classifier: Classifier, split: ImageSplit, log_probs: Tensor, rows: list[int]) -> list[dict[str, Any]]:
    if not rows:
        return []
    part = ImageSplit("shown", split.images[rows], split.labels[rows], [split.files[row] for row in rows])
    images = next(iter(classifier.batches(part).iterate(0))).images
    found = {
        "smooth": heat(smooth_gradient(classifier.model, images)),
        "integrated": heat(integrated_gradients(classifier.model, images)),
        "cam": heat(grad_cam(classifier.model, images), quantile=1.0),
    }
    facts = [_fact(classifier, split, log_probs, row) for row in rows]
    for n, fact in enumerate(facts):
        fact |= {key: as_uri(_coloured(values[n].cpu().numpy())) for key, values in found.items()}
    return facts


def _coloured(values: NDArray[Any]) -> NDArray[np.uint8]:
    """``(..., H, W)`` in [0, 1] as colours from black over violet and orange to yellow."""
    import matplotlib

    return (matplotlib.colormaps["inferno"](values)[..., :3] * 255).round().astype(np.uint8)


def _stretched(values: Tensor) -> NDArray[Any]:
    """Each of ``(N, ...)`` stretched to [0, 1]; one without any range is 0."""
    flat = values.float().cpu().flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    return ((flat - low) / (high - low).clamp(min=1e-12)).view(values.shape).numpy()


def _filters(classifier: Classifier) -> dict[str, Any]:
    kernels = first_filters(classifier.model)[:64]
    colour = kernels.size(1) == 3
    kernels = kernels if colour else kernels.mean(1, keepdim=True)
    tiles = (_stretched(kernels) * 255).round().astype(np.uint8)
    tiles = tiles.transpose(0, 2, 3, 1) if colour else tiles[:, 0]
    sheet = mosaic(tiles, columns=16)
    return {"image": as_uri(sheet), "count": len(tiles), "columns": min(16, len(tiles))}


def _maps(classifier: Classifier, split: ImageSplit, log_probs: Tensor, rows: list[int]) -> dict[str, Any]:
    if not rows:
        return {}
    part = ImageSplit("shown", split.images[rows], split.labels[rows], [split.files[row] for row in rows])
    images = next(iter(classifier.batches(part).iterate(0))).images
    blocks = []
    for name, maps in feature_maps(classifier.model, images).items():
        tiles = _coloured(_stretched(maps[0, :CHANNELS]))
        shape = [maps.size(1), maps.size(2), maps.size(3)]
        blocks.append({"name": name, "shape": shape, "shown": len(tiles), "image": as_uri(mosaic(tiles, columns=16))})
    return {**_fact(classifier, split, log_probs, rows[0]), "blocks": blocks}


def _save(path: Path, figure: Figure) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    write_atomically(path, buffer.getvalue())


def draw_confusion(path: Path, matrix: NDArray[Any], classes: Sequence[str]) -> None:
    """A picture of which class (down) is taken for which (across): counts, coloured by share of the row."""
    from matplotlib.figure import Figure

    C = len(classes)
    side = min(12.0, 2.2 + 0.55 * C)
    figure = Figure(figsize=(side + 0.6, side), layout="constrained")
    axes = figure.add_subplot()
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    shown = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    figure.colorbar(shown, ax=axes, label="share of the class", fraction=0.045)
    axes.set_xticks(range(C), classes, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(C), classes)
    axes.set_xlabel("predicted")
    axes.set_ylabel("right")
    if C <= NUMBERED:
        for i in range(C):
            for j in range(C):
                if matrix[i, j]:
                    ink = "white" if shares[i, j] > 0.5 else "black"
                    axes.text(j, i, str(int(matrix[i, j])), ha="center", va="center", color=ink, fontsize=8)
    _save(path, figure)


def draw_mistakes(path: Path, split: ImageSplit, log_probs: Tensor, classes: Sequence[str]) -> None:
    """A contact sheet of the most confident mistakes: what each was taken for, how surely, and what it is.

    Removed where there is none.
    """
    from matplotlib.figure import Figure

    rows = worst_mistakes(log_probs, split.labels)
    if not rows:
        path.unlink(missing_ok=True)
        return
    tiles = np.stack([_pixels(split.images[row]) for row in rows])
    H, W = tiles.shape[1:3]
    columns = min(6, len(rows))
    lines = math.ceil(len(rows) / columns)
    figure = Figure(figsize=(1.7 * columns, 2.1 * lines), layout="tight")
    # One pair of axes for all: a picture of its own for each would take seconds.
    axes = figure.add_subplot(xlim=(0, 1.2 * columns), ylim=(1.5 * lines, -0.3))
    for n, row in enumerate(rows):
        x, y = 1.2 * (n % columns) + 0.1, 1.5 * (n // columns)
        tall, wide = H / max(H, W), W / max(H, W)
        axes.imshow(tiles[n], cmap="gray", vmin=0, vmax=255, extent=(x, x + wide, y + tall, y))
        best = int(log_probs[row].argmax())
        words = f"{classes[best]} {float(log_probs[row, best].exp()):.3f}\nis {classes[int(split.labels[row])]}"
        axes.text(x + wide / 2, y - 0.04, words, ha="center", va="bottom", fontsize=8, parse_math=False)
    axes.set(xlim=(0, 1.2 * columns), ylim=(1.5 * lines - 0.4, -0.4), aspect="equal")
    axes.set_axis_off()
    _save(path, figure)


def draw_reliability(path: Path, tables: dict[str, Any]) -> None:
    """Accuracy against confidence, before and after the temperature; on the diagonal, confidence can be believed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
    for name, colour, marker in (("before", "#c2611f", "o"), ("after", "#0b6e82", "s")):
        table = tables.get(name)
        if table is not None:
            kept = [(x, y) for x, y in zip(table["confidence"], table["accuracy"], strict=True) if x is not None]
            label = f"{'with temperature' if name == 'after' else 'as trained'}, ECE {table['ece']:.3f}"
            axes.plot(*zip(*kept, strict=True), marker=marker, color=colour, label=label, markersize=4)
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(fontsize=8)
    _save(path, figure)
