"""Linear layers in fewer bits: what they compute, how far it is from float32, and what stays as it was."""

from __future__ import annotations

import copy
import io
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ShapeError
from thalweg.layers import low_precision as reduced
from thalweg.layers.low_precision import Precision, ReducedLinear, reduce_precision

KINDS: tuple[Precision, ...] = ("int8", "bf16")
ROWS = (1, 5, 32, 33, 300)
BOUND = {"int8": 0.03, "bf16": 0.004}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(inner: int = 64, outer: int = 48, bias: bool = True) -> nn.Linear:
    made = nn.Linear(inner, outer, bias=bias)
    with torch.no_grad():
        made.weight.copy_(numbers(outer, inner, seed=1) / 8)
        if bias:
            made.bias.copy_(numbers(outer, seed=2))
    return made


class Tied(nn.Module):
    """An embedding, a norm, a block, and an output matrix that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.norm = nn.LayerNorm(16)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Dropout(0.5))
        self.again = self.block[0]
        self.output = nn.Linear(16, 30)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.output(x + self.block(self.norm(x))).log_softmax(-1)


def off(value: Tensor, truth: Tensor) -> float:
    return float((value - truth).detach().norm() / truth.detach().norm())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_near_the_layer(kind: Precision, rows: int) -> None:
    for bias in (True, False):
        own = layer(bias=bias)
        x = numbers(rows, 64)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            y = ReducedLinear(own, kind)(x)
        assert y.dtype == torch.float32
        assert off(y, own(x)) < BOUND[kind]
        assert off(y, own(x)) > 1e-5  # the bound is not met by computing in float32


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_stored_weights(kind: Precision) -> None:
    """Weights that need no rounding: a few rows are as exact as float32."""
    own = layer(16, 8)
    with torch.no_grad():
        own.weight.copy_(torch.randint(-127, 128, (8, 16), generator=torch.Generator().manual_seed(0)) / 64)
        own.weight[:, 0] = 127 / 64
    x = numbers(5, 16)
    torch.testing.assert_close(ReducedLinear(own, kind).weight, own.weight.detach())
    torch.testing.assert_close(ReducedLinear(own, kind)(x), own(x))


@pytest.mark.parametrize("low", [0.0, -1.0, 0.5])
def test_integer_products_do_not_overflow(low: float) -> None:
    """The largest inputs and weights together: pairs of products of full bytes would not fit 16 bits."""
    own = layer(256, 8, bias=False)
    with torch.no_grad():
        own.weight.fill_(1.0)
    x = torch.full((64, 256), 1.0)
    x[:, ::7] = low
    assert off(ReducedLinear(own, "int8")(x), own(x)) < 0.02  # overflow: a half


def test_many_rows_without_integer_products(monkeypatch: pytest.MonkeyPatch) -> None:
    own, x = layer(), numbers(300, 64)
    there = ReducedLinear(own, "int8")(x)
    monkeypatch.setattr(reduced, "_multiplies_int8", lambda: False)
    weights_only = ReducedLinear(own, "int8")(x)
    assert off(weights_only, own(x)) < 0.01
    assert off(there, weights_only) < 0.03


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 300])
def test_what_is_not_a_number_stays_visible(kind: Precision, rows: int) -> None:
    x = numbers(rows, 64)
    x[1, 3] = math.nan
    y = ReducedLinear(layer(), kind)(x)
    assert y[1].isnan().all()
    assert not y[2:].isnan().any()
    zeros = torch.zeros(rows, 64)
    torch.testing.assert_close(ReducedLinear(layer(), kind)(zeros), layer()(zeros))


@pytest.mark.parametrize("kind", KINDS)
def test_shapes(kind: Precision) -> None:
    own = ReducedLinear(layer(), kind)
    x = numbers(4, 25, 64)
    torch.testing.assert_close(own(x), own(x.reshape(100, 64)).reshape(4, 25, 48))
    assert own(x[:0]).shape == (0, 25, 48)
    assert own(x[0, 0]).shape == (48,)
    torch.testing.assert_close(own(x.transpose(0, 1)), own(x).transpose(0, 1), rtol=1e-3, atol=1e-3)
    with pytest.raises(ShapeError, match=r"\(\.\.\., 64\), got \(2, 3\)"):
        own(torch.zeros(2, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 300])
def test_gradients_reach_the_inputs(kind: Precision, rows: int) -> None:
    own, x = ReducedLinear(layer(), kind), numbers(rows, 64).requires_grad_()
    own(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, own.weight.sum(0).expand(rows, 64))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model(kind: Precision) -> None:
    model = Tied()
    kept = copy.deepcopy(model.state_dict())
    small = reduce_precision(model, kind)
    assert isinstance(small, Tied)
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name])
    assert type(model.output) is nn.Linear
    assert model.training
    assert model.output.weight is model.embedding.weight
    assert not small.training
    assert torch.equal(small.embedding.weight, model.embedding.weight)
    assert small.embedding.weight is not model.embedding.weight
    assert isinstance(small.output, ReducedLinear)
    assert small.again is small.block[0]  # one layer in two places stays one
    assert isinstance(small.norm, nn.LayerNorm)
    assert not any(p.requires_grad for p in small.parameters())
    for batch in (2, 40):
        tokens = torch.arange(batch * 3).reshape(batch, 3) % 30
        with torch.no_grad():
            exact, close = model.eval()(tokens), small(tokens)
        model.train()
        assert float((exact.exp() - close.exp()).abs().max()) < 3 * BOUND[kind]
        torch.testing.assert_close(close.exp().sum(-1), torch.ones(batch, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_files(kind: Precision) -> None:
    own, x = ReducedLinear(layer(), kind), numbers(300, 64)
    y = own(x)
    assert torch.equal(copy.deepcopy(own)(x), y)
    other = ReducedLinear(nn.Linear(64, 48), kind)
    file = io.BytesIO()
    torch.save(own.state_dict(), file)
    file.seek(0)
    other(x)  # what was packed before must not outlive the new weights
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), y)


def test_errors_say_what_was_expected() -> None:
    with pytest.raises(ConfigError, match="`int4` is not known"):
        reduce_precision(layer(), "int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="LayerNorm without any"):
        reduce_precision(nn.LayerNorm(3), "int8")
    with pytest.raises(ConfigError, match=r"float32 weights on the CPU, got torch.float64"):
        reduce_precision(layer().double(), "bf16")
    broken = layer()
    with torch.no_grad():
        broken.weight[0, 0] = math.inf
    with pytest.raises(ConfigError, match="finite"):
        reduce_precision(broken, "int8")


def test_one_layer_alone() -> None:
    assert isinstance(reduce_precision(layer(), "int8"), ReducedLinear)
