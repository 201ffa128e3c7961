"""The digits that come with scikit-learn."""

from __future__ import annotations

from typing import Any

from thalweg.errors import MissingDependencyError


def load_digit_images() -> tuple[Any, Any]:
    """1,797 digits, 8 x 8 pixels from 0 to 16: images ``(1797, 64)`` and labels ``(1797,)``, numpy.

    >>> images, labels = load_digit_images()
    >>> images.shape, int(labels[0])
    ((1797, 64), 0)
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingDependencyError(
            "the digits need the package `scikit-learn`; run: pip install scikit-learn"
        ) from None
    digits: Any = load_digits()
    return digits.data, digits.target
