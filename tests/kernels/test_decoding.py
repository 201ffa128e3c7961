"""What compiled searches are made of: products with stored weights, attention, cells, and what they refuse."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from contracts.threads import one_thread
from thalweg.energies import Monotonic, MonotonicConfig, Seq2Seq, Seq2SeqConfig, Transformer, TransformerConfig
from thalweg.errors import ShapeError
from thalweg.inference import Hypotheses, beam_search
from thalweg.layers.padded import Padded

extension: Any = pytest.importorskip("thalweg._kernels", reason="the extension is not compiled")
cpu: Any = pytest.importorskip("thalweg.kernels.cpu.search")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8])
def test_products(level: str, kind: torch.dtype) -> None:
    """Against float64, in every remainder of rows, inputs and outputs; a row gets what it gets alone."""
    for rows, inner, outer in ((1, 1, 1), (3, 15, 5), (4, 16, 4), (5, 100, 9), (49, 33, 18), (50, 64, 7)):
        x, weight, scale = numbers(rows, inner), (numbers(outer, inner, seed=1) * 20).to(kind), numbers(outer, seed=2)
        for shift, factor in ((None, None), (torch.ones(outer), scale)):
            truth = x.double() @ weight.double().T
            truth = truth if factor is None else truth * scale.double() + 1
            found = cpu.linear(x, weight, shift, factor)
            assert float((found - truth).abs().max()) < 1e-5 * max(1.0, float(truth.abs().max()))
            assert torch.equal(found[-1:], cpu.linear(x[-1:], weight, shift, factor))


@pytest.mark.usefixtures("two_threads")
def test_products_of_any_layout_and_number() -> None:
    x, weight = numbers(3, 8), numbers(40, 8, seed=1)
    beside = torch.cat([x, x], 1)[:, :8]
    torch.testing.assert_close(cpu.linear(beside, weight, None, None), x @ weight.T)
    torch.testing.assert_close(cpu.linear(x[:1].expand(3, 8), weight, None, None), (x @ weight.T)[:1].expand(3, 40))
    weight[2, 3] = math.nan
    x[1] = math.inf
    found = cpu.linear(x, weight, None, None)
    assert found.isnan().equal((x @ weight.T).isnan())
    with pytest.raises(ShapeError, match=r"`x` must be \(3, 8\)"):
        cpu.linear(x[:, 1:], weight, None, None)
    for wrong in (torch.zeros(4), torch.zeros(39)):
        with pytest.raises(ShapeError, match="must be 40 wide"):
            cpu.linear(x, weight, wrong, None)
        with pytest.raises(ShapeError, match="must be 40 wide"):
            cpu.linear(x, weight, None, wrong)
    for given in (numbers(40, 8).double(), numbers(40, 8).half()):
        with pytest.raises(ShapeError, match="float32, int8, or bfloat16"):
            cpu.linear(x, given, None, None)
    with pytest.raises(TypeError):
        cpu.linear(x.double(), weight, None, None)


@one_thread()
def forced(model: Any, source: Padded, found: Hypotheses) -> Tensor:
    """Scores of hypotheses by the modules themselves, symbol after symbol in float64."""
    scores = torch.zeros_like(found.scores, dtype=torch.float64)
    for b, k in np.ndindex(*found.scores.shape):
        state, token = model.begin(source.part(b, b + 1)), torch.tensor([model.bos])
        for symbol in found.tokens[b, k, : int(found.lengths[b, k])]:
            logs, state = model.step(token, state)
            scores[b, k] += logs[0, symbol].detach()
            token = symbol[None]
    return scores


def check(model: Any) -> None:
    """Sources of other lengths, whose padding is anything; more numbers than a vector has, and fewer."""
    lengths = torch.tensor([3, 9])
    source = Padded(torch.randint(4, 11, (2, 9)), lengths, torch.arange(9) < lengths[:, None])
    found = beam_search(model, source, width=2, max_length=5)
    wanted = forced(copy.deepcopy(model).double(), source, found)
    torch.testing.assert_close(found.scores.double(), wanted, atol=3e-5, rtol=1e-5)


SHAPES = [(24, 4, "rotary"), (66, 2, "sinusoidal"), (32, 1, "relative")]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("width", "heads", "positions"), SHAPES)
def test_attention_at_every_level(level: str, width: int, heads: int, positions: Any) -> None:
    sizes: dict[str, Any] = {"feedforward": 30, "encoder_layers": 1, "decoder_layers": 2}
    torch.manual_seed(0)
    config = TransformerConfig(width=width, heads=heads, positions=positions, **sizes)
    model = Transformer(config, source_size=11, target_size=9).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    check(model)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("cell", ["lstm", "gru", "gru-reset-before"])
@pytest.mark.parametrize(("hidden", "attention"), [(20, "additive"), (33, "general")])
def test_cells_at_every_level(level: str, hidden: int, attention: Any, cell: Any) -> None:
    torch.manual_seed(0)
    config = Seq2SeqConfig(hidden=hidden, embedding=7, cell=cell, attention=attention)
    model = Seq2Seq(config, source_size=11, target_size=9).eval()
    check(model)
    model.decoder.core.requires_grad_(False)
    for weight in model.decoder.core.parameters():
        weight.mul_(5.0)  # gates that are open or shut
    check(model)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("hidden", "size"), [(20, 9), (33, 40)])
@pytest.mark.parametrize("order", ["zeroth", "first", "edits"])
def test_readers_at_every_level(level: str, order: Any, hidden: int, size: int) -> None:
    torch.manual_seed(0)
    config = MonotonicConfig(order=order, hidden=hidden, embedding=7, jumps=3, decoder_layers=2)
    model = Monotonic(config, source_size=11, target_size=size).eval()
    check(model)
    for layer in (model.pull, model.output):
        layer.weight.data.mul_(8.0)  # readers who know where they are
    check(model)


def request(**other: Any) -> Any:
    plain = {"width": 2, "k": 2, "max_length": 3, "min_length": 0, "penalty": 0.0, "bos": 2, "eos": 3, "threads": 1}
    return extension.Request(**{**plain, "mask": np.zeros(5, np.float32), "barred": None, **other})


def recurrent(width: int = 4, **other: Any) -> Any:
    def linear(outer: int, inner: int) -> Any:
        return extension.Linear(numbers(outer, inner).numpy())

    def cell(inputs: int) -> Any:
        return extension.Cell(input=linear(3 * width, inputs), past=linear(3 * width, width), candidate=None)

    table = numbers(5, 6).numpy()
    parts = {"cell": "gru", "source_embedding": table, "target_embedding": table, "encoder": [[cell(6)]]}
    parts |= {"decoder": [cell(6)], "bridge": [], "own": None, "values": None, "keys": None, "query": None}
    return extension.Recurrent(**{**parts, "folded": False, "output": linear(5, width), **other})


def test_searches_check_what_they_follow() -> None:
    """Symbols, lengths and shapes, at the entry of the extension itself."""
    lengths, tokens = np.array([2, 1]), np.array([4, 0, 3])
    found = recurrent().search(request(), lengths=lengths, tokens=tokens, weights=None)
    assert found[0].shape[:2] == (2, 2)
    assert found[5] == -1
    for wrong, message in (
        ({"tokens": np.array([4, 5, 3])}, r"`tokens` must lie in 0\.\.4, got 5"),
        ({"tokens": np.array([4, -1, 3])}, "got -1"),
        ({"tokens": tokens[:2].copy()}, "`tokens` must be"),
        ({"lengths": np.array([2, 0])}, "`lengths` must lie in"),
        ({"lengths": np.array([2, 1 << 62])}, "`lengths` must lie in"),
        ({"weights": np.zeros(3, np.float32)}, "`weights` must be 4 wide"),
    ):
        with pytest.raises(ShapeError, match=message):
            recurrent().search(request(), **{"lengths": lengths, "tokens": tokens, "weights": None, **wrong})
    for wrong in ({"tokens": tokens.astype(np.int32)}, {"tokens": np.arange(6)[::2]}, {"lengths": [2, 1]}):
        with pytest.raises(TypeError):  # never converted
            recurrent().search(request(), **{"lengths": lengths, "tokens": tokens, "weights": None, **wrong})
    for wrong in ({"bos": 5}, {"bos": -1}, {"eos": 5}, {"eos": -2}, {"width": 0}, {"k": 0}, {"max_length": 0}):
        with pytest.raises(ShapeError):
            request(**wrong)
    for wrong in ({"width": 1 << 62}, {"k": 1 << 40}, {"barred": np.zeros(4, np.float32)}):
        with pytest.raises(ShapeError):
            request(**wrong)
    narrow = recurrent(output=extension.Linear(numbers(4, 4).numpy()))
    with pytest.raises(ShapeError, match="`output` must be 5 wide, got 4"):
        narrow.search(request(), lengths=lengths, tokens=tokens, weights=None)
    for wrong in ({"encoder": []}, {"encoder": [[]]}, {"folded": True}, {"cell": "lstm"}, {"cell": "gru-reset-before"}):
        with pytest.raises(ShapeError):
            recurrent(**wrong)
    with pytest.raises(ShapeError, match="`bias` must be 3 wide"):
        extension.Linear(numbers(3, 2).numpy(), numbers(4).numpy())
    with pytest.raises(ShapeError, match="one after the other"):
        extension.Linear(numbers(3, 4).numpy()[:, ::2])
