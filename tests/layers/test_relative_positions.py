"""Relative positions: buckets beside plain Python, gradients, padding, and a Transformer that is made of them."""

from __future__ import annotations

import math

import pytest
import torch

from thalweg.data import pad
from thalweg.energies import Transformer, TransformerConfig
from thalweg.errors import ConfigError
from thalweg.inference import beam_search
from thalweg.layers.positions import RelativeBias


def bucket(distance: int, count: int, reach: int, both: bool) -> int:
    """One number at a time (Raffel et al., 2020)."""
    offset = 0
    if both:
        count //= 2
        offset = count if distance > 0 else 0
        back = abs(distance)
    else:
        back = max(-distance, 0)
    exact = count // 2
    if back < exact:
        return offset + back
    far = exact + int(math.log(back / exact) / math.log(reach / exact) * (count - exact))
    return offset + min(far, count - 1)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("count", "reach"), [(32, 128), (8, 20), (4, 5)])
def test_buckets(count: int, reach: int, both: bool) -> None:
    bias = RelativeBias(3, buckets=count, reach=reach, both=both)
    distances = torch.arange(-3 * reach, 3 * reach + 1)
    found, expected = bias.bucket(distances).tolist(), [bucket(d, count, reach, both) for d in distances.tolist()]
    # A logarithm that is a whole number may fall to either side of it in float32.
    apart = [d for d, a, b in zip(distances.tolist(), found, expected, strict=True) if a != b]
    assert all(abs(d) >= count // 4 for d in apart), apart
    assert len(apart) <= 4
    table = bias(torch.tensor([[0, 5]]), torch.tensor([[3, 4, 9]]))
    assert table.shape == (1, 3, 2, 3)
    row = bias.weight[bias.bucket(torch.tensor(4 - 5))]
    assert torch.equal(table[0, :, 1, 1], row)


@pytest.mark.parametrize(("buckets", "reach", "both"), [(1, 9, False), (6, 9, True), (32, 8, True), (7, 9, False)])
def test_sizes_that_have_no_buckets(buckets: int, reach: int, both: bool) -> None:
    with pytest.raises(ConfigError, match="relative positions need an even number of buckets"):
        RelativeBias(2, buckets=buckets, reach=reach, both=both)


def build(**options: object) -> Transformer:
    torch.manual_seed(0)
    shape = {"width": 12, "heads": 3, "head_width": 6, "feedforward": 16, "encoder_layers": 2, "decoder_layers": 2}
    more = {"positions": "relative", "activation": "geglu", "norm": "rms", "norm_eps": 1e-6, "dropout": 0.0, **options}
    model = Transformer(TransformerConfig(**shape, **more), source_size=12, target_size=12)  # type: ignore[arg-type]
    for bias in (model.source_bias, model.target_bias):
        if bias is not None:
            torch.nn.init.normal_(bias.weight)
    return model


def test_every_parameter_learns_and_padding_is_inert() -> None:
    model = build(output_block=True)
    source, target = pad([[4, 5, 6, 7], [8, 9]]), pad([[4, 9, 5], [5]], end=3)
    model.log_prob(source, target).sum().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert still == []
    alone = model.log_prob(pad([[8, 9]]), pad([[5]], end=3))
    torch.testing.assert_close(model.log_prob(source, target)[1:], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention_map", ["softmax", "entmax15"])
@pytest.mark.parametrize("options", [{}, {"output_block": True}, {"positions": "rotary"}, {"norm": "layer"}])
def test_scores_of_a_search_are_the_models(options: dict[str, object], attention_map: str) -> None:
    model = build(attention_map=attention_map, **options).eval()
    sources = [[4, 5, 6, 7, 8, 9, 10], [8, 9]]
    found = beam_search(model, pad(sources), width=3, max_length=20)
    ordinary = beam_search(model, pad(sources), width=3, max_length=20, rows_at_once=99)
    assert found.sequences() == ordinary.sequences()
    torch.testing.assert_close(found.scores, ordinary.scores, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        for source, rows, scores in zip(sources, found.sequences(), found.scores, strict=True):
            for row, score in zip(rows, scores, strict=False):
                torch.testing.assert_close(model.log_prob(pad([source]), pad([row]))[0], score, atol=1e-4, rtol=1e-5)


def test_what_it_cannot_be() -> None:
    with pytest.raises(ConfigError, match="needs an encoder-decoder, got a causal model"):
        TransformerConfig(kind="causal", positions="relative")
    with pytest.raises(ConfigError, match=r"model\.norm_eps must be in \(0, 1\)"):
        TransformerConfig(norm_eps=0.0)
    with pytest.raises(ConfigError, match=r"model\.head_width"):
        TransformerConfig(head_width=0)
    with pytest.raises(ConfigError, match="rotary positions need an even width"):
        TransformerConfig(head_width=3, positions="rotary")
