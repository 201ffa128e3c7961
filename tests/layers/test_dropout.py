"""Dropout: the right share is dropped, independently, scaled and with the right gradient; never outside training."""

import math

import pytest
import torch

from thalweg.errors import ConfigError
from thalweg.layers import Dropout

N = 200_000


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_the_share_and_the_scale(p):
    torch.manual_seed(0)
    result = Dropout(p)(torch.ones(N, dtype=torch.float64))
    assert set(result.unique().tolist()) == {0.0, 1 / (1 - p)}
    dropped = (result == 0).double().mean().item()
    assert abs(dropped - p) < 5 * math.sqrt(p * (1 - p) / N)


def test_neighbours_are_independent():
    # Four units come from one draw: each pair of the four must still be uncorrelated.
    torch.manual_seed(0)
    kept = (Dropout(0.3)(torch.ones(N)) != 0).double().view(-1, 4)
    correlation = torch.corrcoef(kept.t()) - torch.eye(4)
    assert correlation.abs().max() < 5 / math.sqrt(N / 4)
    ahead = torch.corrcoef(torch.stack((kept.flatten()[:-4], kept.flatten()[4:])))[0, 1]
    assert ahead.abs() < 5 / math.sqrt(N)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (4,), (5,), (2, 3, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_shape_and_type(shape, dtype):
    result = Dropout(0.5)(torch.ones(shape, dtype=dtype))
    assert result.shape == shape
    assert result.dtype == dtype
    assert set(result.flatten().tolist()) <= {0.0, 2.0}


def test_a_view_is_dropped_like_its_copy():
    x = torch.randn(6, 5).t()
    torch.manual_seed(0)
    one = Dropout(0.5)(x)
    torch.manual_seed(0)
    assert torch.equal(one, Dropout(0.5)(x.contiguous()))


def test_the_gradient_is_the_same_mask():
    x = torch.randn(1000, dtype=torch.float64, requires_grad=True)
    result = Dropout(0.4)(x)
    weights = torch.randn(1000, dtype=torch.float64)
    (result * weights).sum().backward()
    mask = (result != 0) / 0.6
    torch.testing.assert_close(x.grad, mask * weights)
    torch.testing.assert_close(result.detach(), mask * x.detach())


def test_seeds_repeat_and_draws_differ():
    layer, x = Dropout(0.5), torch.ones(100)
    torch.manual_seed(3)
    first, second = layer(x), layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)


def test_evaluation_and_zero_change_nothing_and_draw_nothing():
    x = torch.randn(10)
    before = torch.get_rng_state()
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0, math.nan])
def test_wrong_probability(p):
    with pytest.raises(ConfigError, match=r"dropout must be in \[0, 1\)"):
        Dropout(p)
