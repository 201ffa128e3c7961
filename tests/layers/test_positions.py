"""Positions: tables against their formulas, turns that depend on distances alone, tags that are not counted."""

import math

import pytest
import torch

from thalweg.errors import ConfigError
from thalweg.layers.positions import feature_positions, rotary_table, rotate, sinusoidal_table


@pytest.mark.parametrize("length", [1, 256, 257, 600])
def test_sinusoids(length):
    table = sinusoidal_table(length, 6, dtype=torch.float64, device="cpu")
    assert table.size(0) >= length
    for p in (0, 1, length - 1):
        angles = [p / 10000 ** (2 * i / 6) for i in range(3)]
        expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        assert table[p].tolist() == pytest.approx(expected, abs=1e-12)


def test_tables_are_and_prefixes_of_one_another():
    short = sinusoidal_table(10, 8, dtype=torch.float32, device="cpu")
    assert sinusoidal_table(200, 8, dtype=torch.float32, device="cpu") is short
    long = sinusoidal_table(1000, 8, dtype=torch.float32, device="cpu")
    assert torch.equal(long[:256], short)


def test_float64_tables_are_not_rounded_to_float32():
    wide = sinusoidal_table(50, 4, dtype=torch.float64, device="cpu")
    assert wide[7, 0].item() == pytest.approx(math.sin(7), rel=1e-14)


def test_products_depend_on_the_distance_alone():
    cos, sin = rotary_table(64, 8, dtype=torch.float64, device="cpu")
    q, k = torch.randn(2, 8, dtype=torch.float64)

    def product(i, j):
        return (rotate(q, cos[i], sin[i]) * rotate(k, cos[j], sin[j])).sum().item()

    assert product(3, 5) == pytest.approx(product(40, 42), abs=1e-12)
    assert product(0, 0) == pytest.approx((q * k).sum().item(), abs=1e-12)
    assert abs(product(3, 5) - product(3, 9)) > 1e-6


def test_tables_made_in_inference_mode_can_be_trained_with():
    with torch.inference_mode():
        cos, sin = rotary_table(5, 14, dtype=torch.float32, device="cpu")
        table = sinusoidal_table(5, 14, dtype=torch.float32, device="cpu")
    x = torch.randn(5, 14, requires_grad=True)
    (rotate(x, cos[:5], sin[:5]) * table[:5]).sum().backward()
    assert x.grad is not None


def test_features_are_not_counted():
    tags = torch.tensor([[True, True, False, False], [False, True, False, True], [True, True, True, True]])
    assert feature_positions(tags).tolist() == [[0, 0, 1, 2], [1, 0, 2, 0], [0, 0, 0, 0]]


def test_odd_widths():
    with pytest.raises(ConfigError, match="even width"):
        sinusoidal_table(4, 5, dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match="even width"):
        rotary_table(4, 3, dtype=torch.float32, device="cpu")
