"""A Transformer's decoder in fixed buffers equals the ordinary one: on a GPU, else in a process with the interpreter.

The interpreter must be chosen before Triton is imported, which other tests may have done already.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.triton_kernels import DEVICE, here_only, needs_triton
from thalweg.data import pad
from thalweg.energies import Transformer, TransformerConfig
from thalweg.energies.transformer.fixed import FixedTransformer, _encodes, _Halved, _Plain, fixed_plan
from thalweg.kernels import dispatch

SOURCES = [[4, 5, 6], [7, 8], [5]]

pytestmark = needs_triton


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels serve the CPU too."""
    from thalweg.kernels.gpu import decoding

    monkeypatch.setattr(dispatch, "fixed_kernels", lambda device: decoding)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that says there are kernels; what launches none can then be tried anywhere."""
    monkeypatch.setattr(dispatch, "fixed_kernels", lambda device: SimpleNamespace(suits=lambda rows: False))


def build(seed: int = 0, *, features=(), device: str = DEVICE, **settings) -> Transformer:
    torch.manual_seed(seed)
    small = {"width": 8, "heads": 2, "feedforward": 12, "encoder_layers": 1, "decoder_layers": 1}
    config = TransformerConfig(**(small | settings))
    copies = torch.tensor([-1, -1, -1, -1, 4, 5, 6, 4, 4, 4]) if config.pointer else None
    model = Transformer(config, source_size=10, target_size=7, features=features, copies=copies).to(device).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def counted() -> torch.Tensor:
    """Where the number of sources goes."""
    return torch.zeros(1, dtype=torch.int32, device=DEVICE)


def source(device: str = DEVICE):
    tokens, lengths, mask = pad(SOURCES)
    return type(pad(SOURCES))(tokens.to(device), lengths, mask.to(device))


def check_steps(model: Transformer) -> None:
    """Two rows a source over three steps; the second step's rows swap their pasts."""
    fixed = FixedTransformer(model, 4, 2, 4, 3)
    moves = torch.tensor([0, 0, 3, 2, 5, 4, 6, 7], device=DEVICE)  # the last source is not there
    fed = torch.tensor([[2] * 8, [4, 5, 6, 4, 5, 6, 4, 4], [5, 5, 4, 6, 6, 3, 4, 4]], device=DEVICE)
    with torch.no_grad():
        fixed.load(source(), counted())
        fixed.encode()
        fixed.lineage[:, 0] = torch.arange(8)
        state = model.select(model.begin(source()), torch.arange(3, device=DEVICE).repeat_interleave(2))
        for t, tokens in enumerate(fed):
            found = fixed.step(tokens, torch.tensor([t], device=DEVICE)).log_softmax(dim=1)[:6]
            expected, state = model.step(tokens[:6], state)
            torch.testing.assert_close(found, expected, rtol=5e-5, atol=5e-5)
            if t < 2:
                state = model.select(state, moves[:6])
                fixed.lineage.copy_(fixed.lineage[moves])
                fixed.lineage[:, t + 1] = torch.arange(8)


@here_only
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("norm", "positions", "activation"),
    [
        ("pre", "sinusoidal", "relu"),
        pytest.param("pre", "learned", "silu", marks=pytest.mark.slow),
        ("pre", "rotary", "swiglu"),
        ("post", "sinusoidal", "gelu"),
        ("post", "learned", "relu"),
        pytest.param("post", "rotary", "gelu", marks=pytest.mark.slow),
    ],
)
def test_step_by_step(norm: str, positions: str, activation: str) -> None:
    check_steps(build(norm=norm, positions=positions, activation=activation, max_positions=8))


HALVED = [
    {"norm": "pre", "positions": "rotary", "activation": "swiglu"},
    {"norm": "post", "activation": "gelu", "embedding_norm": True, "width": 32, "feedforward": 48, "heads": 2},
    {"norm": "pre", "activation": "silu", "tied": True},
    pytest.param({"norm": "post", "positions": "learned", "max_positions": 8}, marks=pytest.mark.slow),
    pytest.param({"norm": "rms", "decoder_norm": "layer", "embedding_norm": True}, marks=pytest.mark.slow),
]


@here_only
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("settings", HALVED, ids=str)
def test_matrices_in_two_halves(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from thalweg.kernels.gpu import decoding

    monkeypatch.setattr(decoding, "suits", lambda rows: True)
    model = build(**({"width": 16, "heads": 1, "feedforward": 32} | settings))
    assert type(FixedTransformer(model, 4, 2, 4, 3).products) is _Halved
    assert _encodes(model) != (settings.get("positions") == "rotary" or settings.get("norm") == "rms")
    check_steps(model)


@here_only
@pytest.mark.usefixtures("kernels")
def test_where_products_of_halves_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:

    def kind(rows: int = 32, dtype: torch.dtype = torch.float32, **settings: int) -> type:
        model = build(**({"width": 16, "heads": 1, "feedforward": 32} | settings)).to(dtype)
        return type(FixedTransformer(model, rows, 1, 4, 3).products)

    assert kind() is _Halved
    assert {kind(rows=16), kind(heads=2), kind(feedforward=24), kind(dtype=torch.bfloat16)} == {_Plain}
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert kind() is _Plain


@here_only
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("norm", "tied"), [("pre", False), ("post", True)])
def test_normed_embeddings_tied_or_not(norm: str, tied: bool) -> None:
    settings = {"embedding_scale": tied, "output_bias": tied, "decoder_layers": 1 if tied else 2}
    check_steps(build(1, norm=norm, embedding_norm=True, tied=tied, **settings))


@here_only
@pytest.mark.usefixtures("kernels")
def test_feature_tags_and_a_width_that_is_no_power_of_two() -> None:
    check_steps(build(2, features=(5,), width=12, heads=3, feedforward=20, positions="learned", max_positions=5))


@here_only
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "settings", [{"norm": "batch"}, {"norm": "instance"}, {"norm": "rms", "decoder_norm": "layer"}]
)
def test_other_norms_in_the_encoder(settings: dict[str, str]) -> None:
    check_steps(build(3, **settings))


# What follows launches nothing.


@here_only
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_long_sources(positions: str) -> None:
    """Longer than any table that is there from the start, and filling the learned one without a multiple of four."""
    model = build(positions=positions, max_positions=1027)
    fixed = FixedTransformer(model, 1, 1, 1028, 1)
    tokens = pad([torch.randint(4, 9, (1027,)).tolist()])
    long = type(tokens)(tokens.tokens.to(DEVICE), tokens.lengths, tokens.mask.to(DEVICE))
    with torch.no_grad():
        fixed.load(long, counted())
        fixed.encode()
        expected = model.encode(long).memories
    for found, wanted in zip(fixed.memories, expected, strict=True):
        torch.testing.assert_close(found[:, :1027], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("no_kernels")
def test_tables_of_a_recorded_encoder_stay() -> None:
    from thalweg.layers import positions as tables

    for kind in ("sinusoidal", "rotary"):
        fixed = FixedTransformer(build(positions=kind), 1, 1, 1028, 1)
        width = 8 if kind == "sinusoidal" else 4
        table = tables.sinusoidal_table if kind == "sinusoidal" else tables.rotary_table
        kept = table(1028, width, dtype=torch.float32, device=fixed.lengths.device)
        wanted = (kept,) if isinstance(kept, Tensor) else kept
        assert all(any(one is other for other in fixed.tables) for one in wanted)


@here_only
@pytest.mark.usefixtures("kernels")
def test_nothing_is_left_of_other_sources() -> None:
    model = build()
    fixed = FixedTransformer(model, 4, 1, 4, 2)
    fixed.load(source(), counted())
    few = counted()
    fixed.load(type(source())(*(part[:1, :2] if part.dim() == 2 else part[:1] for part in source())), few)
    assert few.tolist() == [1]
    assert fixed.sources.tokens.tolist() == [[4, 5, 1, 1], *[[1] * 4] * 3]
    fixed.encode()
    assert fixed.lengths.tolist() == [2, 1, 1, 1]


@pytest.mark.usefixtures("no_kernels")
def test_models_that_are_served() -> None:
    model = build()
    assert FixedTransformer.serves(model)
    assert fixed_plan(model, source()) is not None
    unserved = [build(kind="causal"), build(pointer=True), *(build(norm=norm) for norm in ("rms", "weight", "none"))]
    for other in (build().double(), build().half(), build().train(), *unserved):
        assert not FixedTransformer.serves(other)
        assert other.fixed(source()) is None
    model.ruled = True  # type: ignore[assignment]
    assert model.fixed(source()) is None


@pytest.mark.usefixtures("no_kernels")
def test_learned_positions_bound_sources_and_steps() -> None:
    model = build(positions="learned", max_positions=3)
    found = fixed_plan(model, source())
    assert found is not None
    assert found.most_steps == 3
    assert fixed_plan(build(positions="learned", max_positions=2), source()) is None
    assert fixed_plan(build(positions="learned", max_positions=3, features=(9,)), source()) is None


@pytest.mark.usefixtures("no_kernels")
def test_shapes_differ_by_sources_weights_and_types() -> None:
    model = build()
    first = fixed_plan(model, source())
    assert first is not None
    assert (first.size, first.device.type) == (3, DEVICE)
    assert first.part(1, 3).tokens.tolist() == source().tokens[1:].tolist()
    again = fixed_plan(model, first.part(0, 1))
    assert again is not None
    assert again.shape == first.shape
    with torch.no_grad():
        model.output.bias.zero_()  # in place: seen by whoever reads the weights where they are
    again = fixed_plan(model, source())
    assert again is not None
    assert again.shape == first.shape
    long = pad([[4] * 5])
    with_long = fixed_plan(model, long)
    assert with_long is not None
    assert with_long.shape != first.shape
    model.output.bias.data = model.output.bias.data.clone()
    moved = fixed_plan(model, source())
    assert moved is not None
    assert moved.shape != first.shape
    half = fixed_plan(model.bfloat16(), source())
    assert half is not None
    assert torch.bfloat16 in half.shape


def test_no_plan_without_kernels() -> None:
    assert fixed_plan(build(device="cpu"), source("cpu")) is None


def test_plans_follow_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "fixed_kernels", lambda device: SimpleNamespace(suits=lambda rows: False))
    model, seen = build(), []

    def changes(change: Callable[[], object]) -> None:
        change()
        plan = fixed_plan(model, source())
        assert plan is not None
        seen.append(plan.shape)

    changes(lambda: None)
    changes(lambda: setattr(model.output.weight, "data", torch.zeros(7, 8, device=DEVICE)))
    changes(lambda: setattr(model.decoder.each[0].feedforward.up, "weight", torch.nn.Parameter(torch.zeros(12, 8))))
    changes(lambda: model.output.register_buffer("more", torch.zeros(3)))
    assert len(set(seen)) == len(seen), "another for every change"
