"""Convolutional networks: parameter counts, energies against a definition, every option, edge sizes, errors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from oracles.convolution import flat_network
from thalweg.energies.convnet.config import ConvNetConfig
from thalweg.energies.convnet.model import ConvNet
from thalweg.errors import ConfigError, ShapeError

SMALL = {"channels": (4, 6), "hidden": (5,), "dropout": 0.0}
BEST = {
    "stem": 32,
    "channels": (32, 64, 128),
    "units": (3, 3, 2),
    "convolutions": 2,
    "norm": "batch",
    "order": "pre",
    "bias": False,
    "skip": "residual",
    "squeeze": 8,
    "pooling": "stride",
    "pool": (1, 2, 2),
    "dropout": 0.0,
    "head": "average",
    "hidden": (),
}


def count(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def small(**changes):
    return ConvNetConfig(**{**SMALL, **changes})


def test_published_parameter_counts():
    assert count(ConvNet(ConvNetConfig(), classes=6, channels=3, size=(48, 48))) == 5_340_742
    normed = ConvNetConfig(norm="batch", hidden_norm=True, head="average")
    assert count(ConvNet(normed, classes=6, channels=3, size=(48, 48))) == 756_742


def test_the_residual_network_is_under_a_million():
    model = ConvNet(ConvNetConfig(**BEST), classes=6)
    assert 700_000 < count(model) < 1_000_000
    assert model.maps(torch.zeros(1, 3, 48, 48)).shape == (1, 128, 12, 12)


def test_a_dense_network_is_the_published_one():
    """DenseNet-BC of depth 100 and growth 12 (Huang et al., 2017, table 2): 0.8 million parameters for 10 classes."""
    config = ConvNetConfig(
        stem=24,
        channels=(108, 150, 342),
        units=16,
        convolutions=2,
        kernel=(1, 3),
        expansion=4,
        growth=12,
        skip="dense",
        norm="batch",
        order="pre",
        bias=False,
        pooling="average",
        pool=(2, 2, 1),
        dropout=0,
        head="average",
        hidden=(),
    )
    model = ConvNet(config, classes=10, size=(32, 32))
    assert sum(isinstance(part, nn.Conv2d) for part in model.modules()) + 1 == 100
    assert count(model) == 769_162


def oracle_case():
    torch.manual_seed(0)
    model = ConvNet(ConvNetConfig(channels=(3, 4), hidden=(5, 6)), classes=3, channels=2, size=(6, 9)).double().eval()
    images = torch.randn(3, 2, 6, 9, dtype=torch.float64)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    return model, images, weights


def test_energies_are_their_definition():
    model, images, weights = oracle_case()
    expected = flat_network(images.numpy(), weights)
    with torch.no_grad():
        np.testing.assert_allclose(model(images).numpy(), expected, atol=1e-10)
        logs = model.log_probs(images)
    np.testing.assert_allclose(logs.exp().sum(1).numpy(), 1)
    np.testing.assert_array_equal(logs.argmax(1).numpy(), expected.argmin(1))


def test_the_oracle_can_fail():
    model, images, weights = oracle_case()
    weights["blocks.0.convolution.weight"] = weights["blocks.0.convolution.weight"][:, :, ::-1]
    with torch.no_grad():
        assert not np.allclose(model(images).numpy(), flat_network(images.numpy(), weights))


def test_gradients():
    model, images, _ = oracle_case()
    assert torch.autograd.gradcheck(model, (images[:2].clone().requires_grad_(),))


OPTIONS = [
    {"norm": norm, "skip": skip, "order": order, "stem": 4 if order == "pre" else 0}
    for norm, skip, order in itertools.product(
        ("none", "batch", "layer", "instance", "group", "weight"), ("none", "residual", "highway"), ("post", "pre")
    )
] + [
    {"pooling": "average"},
    {"pooling": "stride", "skip": "residual", "convolutions": 2, "units": (2, 1)},
    {"pooling": "none", "head": "max"},
    {"pool": (1, 3)},
    {"head": "attention"},
    {"head": "average_max", "hidden": ()},
    {"kernel": 5, "stem": 5, "stem_kernel": 7, "stem_stride": 2},
    {"separable": True, "squeeze": 2, "norm": "batch", "hidden_norm": True},
    {"norm": "weight", "hidden_norm": True},
    {"norm": "group", "hidden_norm": True},
    {"skip": "residual", "drop_path": 0.3, "units": 2, "zero_last": True, "norm": "batch"},
    {"dropout": 0.5, "hidden_dropout": 0.5, "head_dropout": 0.5},
    {"initialisation": "he", "separable": True, "channels": (8, 8)},
    {"mirror": True},
    {"kernel": (1, 3), "convolutions": 2, "expansion": 2, "skip": "residual", "separable": True},
    {"kernel": (1, 3, 1), "convolutions": 3, "expansion": 0.25, "skip": "residual", "norm": "batch", "zero_last": True},
    {"skip": "dense", "growth": 3, "units": 2, "pooling": "average", "norm": "batch", "order": "pre", "stem": 4},
    {"skip": "dense", "growth": 2, "units": (1, 2), "channels": (4, 8), "squeeze": 2},
    *({"activation": name} for name in ("gelu", "silu", "tanh", "leaky_relu", "elu", "mish")),
]


@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_every_option_trains(changes):
    """A step moves every parameter's gradient off nothing, all finite; evaluation does not see the batch."""
    torch.manual_seed(0)
    model = ConvNet(small(**changes), classes=3, channels=2, size=(12, 12))
    images, labels = torch.randn(4, 2, 12, 12), torch.tensor([0, 1, 2, 0])
    loss = nn.functional.cross_entropy(-model(images), labels)
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
    model.eval()
    with torch.no_grad():
        together, alone = model(images), torch.cat([model(images[i : i + 1]) for i in range(4)])
        assert model(images[:0]).shape == (0, 3)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    again = ConvNet(small(**changes), classes=3, channels=2, size=(12, 12)).eval()
    again.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(again(images), together)


@pytest.mark.parametrize("activation", ["relu", "tanh", "elu"])
def test_pooling_before_a_rising_activation_changes_nothing(activation):
    torch.manual_seed(0)
    model = ConvNet(small(activation=activation), classes=3, channels=2, size=(8, 8)).double()
    parts = [dict(block.named_children()) for block in model.blocks]
    assert [list(each) for each in parts] == [["convolution", "pool", "activation"]] * 2
    images = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    x = images.contiguous(memory_format=torch.channels_last)
    for each in parts:
        x = each["pool"](each["activation"](each["convolution"](x)))
    if activation == "relu":  # no rounding: the same numbers are chosen
        assert torch.equal(x, model.maps(images))
    # A vector of exponentials and those at its end may differ in their last digit.
    torch.testing.assert_close(x, model.maps(images), rtol=1e-12, atol=1e-14)


def test_a_mirror_makes_the_energy_symmetric_outside_training():
    torch.manual_seed(0)
    config = small()
    plain = ConvNet(config, classes=3, channels=2, size=(8, 8)).eval()
    both = ConvNet(small(mirror=True), classes=3, channels=2, size=(8, 8)).eval()
    both.load_state_dict(plain.state_dict())
    images = torch.randn(3, 2, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(both(images), (plain(images) + plain(images.flip(-1))) / 2)
        torch.testing.assert_close(both(images), both(images.flip(-1)))
        assert torch.equal(both.train()(images), plain.train()(images))


def test_zero_last_units_begin_as_the_identity():
    torch.manual_seed(0)
    for order, norm in (("pre", "batch"), ("pre", "none")):
        model = ConvNet(
            small(stem=4, channels=(4,), skip="residual", order=order, norm=norm, zero_last=True, pooling="none"),
            classes=3,
            channels=2,
            size=(6, 6),
        ).eval()
        images = torch.randn(2, 2, 6, 6)
        with torch.no_grad():
            torch.testing.assert_close(model.blocks(model.stem(images)), model.stem(images))


def test_he_initialisation_has_the_variance_it_promises():
    torch.manual_seed(0)
    model = ConvNet(ConvNetConfig(channels=(64,), stem=64, initialisation="he", hidden=()), classes=2)
    kernel = model.blocks[0].convolution.weight
    assert abs(float(kernel.detach().var()) / (2 / (64 * 9)) - 1) < 0.05


def test_training_with_one_image_of_one_pixel():
    for norm in ("none", "batch", "layer", "group", "weight"):
        config = ConvNetConfig(channels=(4,), pooling="stride", norm=norm, hidden=(3,), hidden_norm=norm != "none")
        model = ConvNet(config, classes=1, channels=1, size=(1, 1))
        energies = model(torch.ones(1, 1, 1, 1))
        energies.sum().backward()
        assert energies.shape == (1, 1)
        assert energies.isfinite().all()


def test_maps_stay_with_channels_last():
    model = ConvNet(small(norm="batch", skip="residual", dropout=0.5), classes=3, channels=2, size=(12, 12))
    assert model.maps(torch.randn(4, 2, 12, 12)).is_contiguous(memory_format=torch.channels_last)


def test_other_sizes_where_the_head_takes_them():
    model = ConvNet(small(head="average"), classes=3, channels=2, size=(8, 8)).eval()
    assert model(torch.zeros(1, 2, 20, 13)).shape == (1, 3)


def test_half_precision_gives_log_probabilities_in_float32():
    model = ConvNet(small(), classes=3, channels=2, size=(8, 8)).bfloat16().eval()
    assert model.log_probs(torch.zeros(1, 2, 8, 8, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "bacth"}, "did you mean `batch`"),
        ({"activation": "rellu"}, "did you mean `relu`"),
        ({"pooling": "maxx"}, "did you mean `max`"),
        ({"head": "flaten"}, "did you mean `flatten`"),
        ({"skip": "residul"}, "did you mean `residual`"),
        ({"order": "both"}, "choose one of: post, pre"),
        ({"initialisation": "xavier"}, "choose one of: default, he"),
        ({"kernel": 4}, "must be odd"),
        ({"stem_kernel": 0}, "must be odd"),
        ({"channels": ()}, "at least one block"),
        ({"channels": (4, 0)}, "at least 1"),
        ({"hidden": (-1,)}, "at least 1"),
        ({"units": (1, 2, 3)}, "one for each of the 2 blocks"),
        ({"pool": 0}, "at least 1"),
        ({"convolutions": 0}, "at least 1"),
        ({"kernel": (3, 3)}, "one for each of the 1 convolutions"),
        ({"kernel": (3, 2), "convolutions": 2}, "must be odd"),
        ({"expansion": 0.0}, "above 0"),
        ({"skip": "dense", "pooling": "stride"}, "set model.pooling"),
        ({"squeeze": -1}, "0 or more"),
        ({"dropout": 1.0}, r"in \[0, 1\)"),
        ({"drop_path": 0.1}, "model.skip=residual"),
        ({"hidden_norm": True}, "is no norm"),
        ({"hidden_norm": True, "norm": "instance"}, "nothing to average over"),
        ({"order": "pre"}, "set model.stem"),
        ({"zero_last": True}, "set model.zero_last=false"),
        ({"zero_last": True, "skip": "residual", "norm": "weight"}, "set model.zero_last=false"),
    ],
)
def test_mistakes_in_configs(changes, words):
    with pytest.raises(ConfigError, match=words):
        small(**changes)


def test_images_too_small_to_pool():
    with pytest.raises(ConfigError, match=r"block 3 of model\.channels gets maps of 1 x 1 from images of 5 x 4"):
        ConvNet(ConvNetConfig(), classes=6, size=(5, 4))
    with pytest.raises(ConfigError, match="instance norm in block 1"):
        ConvNet(small(norm="instance", pooling="stride"), classes=3, size=(2, 2))
    with pytest.raises(ConfigError, match="at least 1 class"):
        ConvNet(ConvNetConfig(), classes=0)


def test_mistakes_in_images():
    model = ConvNet(small(), classes=3, channels=3, size=(8, 8))
    for images in (torch.zeros(1, 1, 8, 8), torch.zeros(1, 3, 9, 8), torch.zeros(3, 8, 8)):
        with pytest.raises(ShapeError, match=r"must be \(B, 3, 8, 8\)"):
            model(images)
    with pytest.raises(ShapeError, match="divide by 255"):
        model(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
