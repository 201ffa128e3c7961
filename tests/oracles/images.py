"""Image operations pixel by pixel in plain Python, from their definitions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

Image = list[list[list[float]]]
"""Channels of rows of values."""


def mirrored(place: int, size: int) -> int:
    """Walk from 0 to ``place`` along a corridor of ``size`` pixels, turning round at both ends."""
    if size == 1:
        return 0
    here, way = 0, 1 if place > 0 else -1
    for _ in range(abs(place)):
        if not 0 <= here + way < size:
            way = -way
        here += way
    return here


def bilinear(channel: list[list[float]], y: float, x: float) -> float:
    """Between the four nearest pixels, those beyond the border mirrored."""
    top, left = math.floor(y), math.floor(x)
    height, width = len(channel), len(channel[0])
    value = 0.0
    for row, by_row in ((top, 1 - (y - top)), (top + 1, y - top)):
        for column, by_column in ((left, 1 - (x - left)), (left + 1, x - left)):
            value += by_row * by_column * channel[mirrored(row, height)][mirrored(column, width)]
    return value


def moved(image: Image, *, flip: bool, down: int, right: int, degrees: float = 0.0, zoom: float = 1.0) -> Image:
    """Every pixel from where it comes from: flip, turn and zoom about the centre, shift."""
    height, width = len(image[0]), len(image[0][0])
    cy, cx, angle = (height - 1) / 2, (width - 1) / 2, math.radians(degrees)
    out = [[[0.0] * width for _ in range(height)] for _ in image]
    for c, channel in enumerate(image):
        for i in range(height):
            for j in range(width):
                y, x = i - cy, (width - 1 - j if flip else j) - cx
                from_y = (math.cos(angle) * y + math.sin(angle) * x) / zoom + cy + down
                from_x = (math.cos(angle) * x - math.sin(angle) * y) / zoom + cx + right
                out[c][i][j] = bilinear(channel, from_y, from_x)
    return out


def grey(pixel: Sequence[float]) -> float:
    if len(pixel) == 3:
        return 0.299 * pixel[0] + 0.587 * pixel[1] + 0.114 * pixel[2]
    return sum(pixel) / len(pixel)


def clipped(value: float) -> float:
    return min(1.0, max(0.0, value))


def recoloured(image: Image, brightness: float, contrast: float, saturation: float) -> Image:
    channels, height, width = len(image), len(image[0]), len(image[0][0])
    pixels = [
        [clipped(brightness * image[c][i][j]) for c in range(channels)] for i in range(height) for j in range(width)
    ]
    middle = sum(map(grey, pixels)) / len(pixels)
    pixels = [[clipped(middle + contrast * (v - middle)) for v in pixel] for pixel in pixels]
    pixels = [[clipped(grey(pixel) + saturation * (v - grey(pixel))) for v in pixel] for pixel in pixels]
    return [[[pixels[i * width + j][c] for j in range(width)] for i in range(height)] for c in range(channels)]


def cut(image: Image, row: int, column: int, side: int, fill: Sequence[float]) -> Image:
    """A square of ``side`` pixels about (row, column) painted over; an even one has one more before than after."""
    rows = range(row - side // 2, row - side // 2 + side)
    columns = range(column - side // 2, column - side // 2 + side)
    return [
        [[fill[c] if i in rows and j in columns else v for j, v in enumerate(line)] for i, line in enumerate(channel)]
        for c, channel in enumerate(image)
    ]


def statistics(values: Sequence[int]) -> tuple[float, float]:
    """Mean and standard deviation of bytes in units of [0, 1]."""
    mean = sum(values) / len(values) / 255
    return mean, math.sqrt(sum((v / 255 - mean) ** 2 for v in values) / len(values))


def upright(picture: list[list[int]], orientation: int) -> list[list[int]]:
    """A stored picture as it is to be seen: EXIF 2.3 says where the stored row 0 and column 0 belong.

    1 top and left, 2 top and right, 3 bottom and right, 4 bottom and left; with rows and columns exchanged:
    5 left and top, 6 right and top, 7 right and bottom, 8 left and bottom.
    """
    stored_rows, stored_columns = len(picture), len(picture[0])
    exchanged = orientation >= 5
    height, width = (stored_columns, stored_rows) if exchanged else (stored_rows, stored_columns)
    seen = [[-1] * width for _ in range(height)]
    first_row = {1: "top", 2: "top", 3: "bottom", 4: "bottom", 5: "left", 6: "right", 7: "right", 8: "left"}
    first_column = {1: "left", 2: "right", 3: "right", 4: "left", 5: "top", 6: "top", 7: "bottom", 8: "bottom"}
    for r in range(stored_rows):
        for c in range(stored_columns):
            place = {first_row[orientation]: r, first_column[orientation]: c}
            y = place["top"] if "top" in place else height - 1 - place["bottom"]
            x = place["left"] if "left" in place else width - 1 - place["right"]
            seen[y][x] = picture[r][c]
    return seen


def held_out(names: Sequence[str], label: str, seed: int, shares: Sequence[float]) -> list[list[str]]:
    """The files of one class that go to each split, lowest SHA-256 first."""
    ranked = sorted(names, key=lambda name: hashlib.sha256(f"{seed}:{label}/{name}".encode()).hexdigest())
    parts = []
    for share in shares:
        count = max(1, round(share * len(names))) if share else 0
        parts.append(ranked[:count])
        ranked = ranked[count:]
    return parts
