"""Folders of tiny images whose class can be seen: stripes across, stripes down, plain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("across", "down", "plain")
TINY = ["channels=4,8", "hidden=8", "dropout=0", "batch_size=16", "epochs=2", "device=cpu", "warmup=2", "workers=0"]


def draw(kind: str, rng: np.random.Generator, size: int = 8) -> np.ndarray:
    image = rng.integers(0, 60, size=(size, size, 3))
    if kind == "across":
        image[::2] += 150
    elif kind == "down":
        image[:, ::2] += 150
    else:
        image += 75
    return image.astype(np.uint8)


def write_images(root: Path, counts: dict[str, int], seed: int = 0, size: int = 8) -> Path:
    """``root/SPLIT/CLASS/N.png``, so many of each class; without a split where its name is empty."""
    rng = np.random.default_rng(seed)
    for split, count in counts.items():
        for kind in CLASSES:
            folder = root / split / kind if split else root / kind
            folder.mkdir(parents=True, exist_ok=True)
            for n in range(count):
                Image.fromarray(draw(kind, rng, size)).save(folder / f"{n}.png")
    return root
