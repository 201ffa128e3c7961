from __future__ import annotations

import math

import pytest
import torch

from oracles import images as oracle
from thalweg.data.images.augmentation import DRAWS, Augmentation, augment, normalisation_of
from thalweg.errors import ConfigError, ShapeError

SHAPES = [(4, 3, 5, 6), (3, 1, 8, 8), (2, 2, 1, 7), (2, 3, 6, 1), (1, 1, 1, 1)]
NOTHING = Augmentation(flip=False, crop=0)


def batch(shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draws_for(images, seed=1, dtype=torch.float64):
    return torch.rand(len(images), DRAWS, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def expected_move(images, config, draws):
    out = []
    for image, u in zip(images.tolist(), draws.tolist(), strict=True):
        down, right = (math.floor(v * (2 * config.crop + 1)) - config.crop for v in u[1:3])
        degrees, zoom = config.rotate * (2 * u[6] - 1), (1 + config.scale) ** (2 * u[7] - 1)
        flip = config.flip and u[0] < 0.5
        out.append(oracle.moved(image, flip=flip, down=down, right=right, degrees=degrees, zoom=zoom))
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "config",
    [
        Augmentation(crop=0),
        Augmentation(flip=False, crop=2),
        Augmentation(crop=20),
        Augmentation(crop=0, rotate=180.0),
        Augmentation(flip=False, crop=0, scale=0.5),
        Augmentation(crop=2, rotate=30.0, scale=0.3),
    ],
)
def test_moves_equal_the_oracle(shape, config):
    images = batch(shape)
    draws = draws_for(images)
    torch.testing.assert_close(augment(images, config, draws), expected_move(images, config, draws))


def test_a_broken_mirror_is_noticed(monkeypatch):
    # The border repeated, as in another kind of padding.
    monkeypatch.setattr(oracle, "mirrored", lambda place, size: min(size - 1, max(0, place)))
    images = batch((8, 1, 5, 5))
    config = Augmentation(flip=False, crop=2)
    draws = draws_for(images)
    assert not torch.allclose(augment(images, config, draws), expected_move(images, config, draws))


@pytest.mark.parametrize("shape", SHAPES)
def test_colour_equals_the_oracle(shape):
    images, config = batch(shape), Augmentation(flip=False, crop=0, colour=0.8)
    draws = draws_for(images)
    factors = 1 + 0.8 * (2 * draws[:, 3:6] - 1)
    expected = [oracle.recoloured(i, *f) for i, f in zip(images.tolist(), factors.tolist(), strict=True)]
    torch.testing.assert_close(augment(images, config, draws), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("side", [1, 2, 3, 50])
def test_cutout_equals_the_oracle(shape, side):
    images, config = batch(shape), Augmentation(flip=False, crop=0, cutout=side)
    draws, fill = draws_for(images), [0.1 * (c + 1) for c in range(shape[1])]
    H, W = shape[2:]
    expected = [
        oracle.cut(image, math.floor(u[8] * H), math.floor(u[9] * W), side, fill)
        for image, u in zip(images.tolist(), draws.tolist(), strict=True)
    ]
    found = augment(images, config, draws, fill=fill)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_bytes_and_numbers_agree():
    images = torch.randint(0, 256, (5, 3, 7, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for config in (Augmentation(), Augmentation(rotate=10, colour=0.3, cutout=2), NOTHING):
        draws = draws_for(images, dtype=torch.float32)
        one, two = (augment(each, config, draws) for each in (images, images.float() / 255))
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, two)
        assert 0 <= one.min() <= one.max() <= 1
    assert torch.equal(augment(images, NOTHING, draws_for(images)), images * (1 / 255))


def test_every_image_has_its_own_change_and_the_input_stays():
    images = batch((1, 1, 9, 9)).expand(64, 1, 9, 9)
    before = images.clone()
    found = augment(images, Augmentation(crop=3, colour=0.2, cutout=3), draws_for(images))
    assert torch.equal(images, before)
    assert len({tuple(image.flatten().tolist()) for image in found}) > 60


def test_shifts_reach_both_ends_alike():
    # A ramp tells the shift of every image at its centre.
    ramp = torch.arange(9.0).expand(3000, 1, 9, 9) / 8
    found = augment(ramp, Augmentation(flip=False, crop=1), draws_for(ramp))[:, 0, 4, 4] * 8 - 4
    counts = torch.bincount(found.round().long() + 1)
    assert counts.shape == (3,)
    assert (counts - 1000).abs().max() < 120


def test_gradients_pass():
    images = batch((2, 3, 4, 4)).requires_grad_()
    draws = draws_for(images)
    config = Augmentation(crop=1, rotate=20, scale=0.2, colour=0.1, cutout=1)
    assert torch.autograd.gradcheck(lambda x: augment(0.2 + 0.6 * x, config, draws), (images,))


def test_no_images():
    for config in (Augmentation(), Augmentation(rotate=10, colour=0.5, cutout=2)):
        assert augment(torch.zeros(0, 3, 4, 4), config, torch.zeros(0, DRAWS)).shape == (0, 3, 4, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"crop": -1},
        {"rotate": 181},
        {"colour": math.nan},
        {"colour": 1.5},
        {"scale": math.inf},
        {"cutout": -2},
        {"crop": 2.5},
    ],
)
def test_settings_are_checked(wrong):
    with pytest.raises(ConfigError, match=f"`{next(iter(wrong))}` of the augmentation must be"):
        Augmentation(**wrong)


def test_shapes_are_checked():
    with pytest.raises(ShapeError, match=r"must be \(B, C, H, W\)"):
        augment(torch.zeros(3, 4, 4), Augmentation(), torch.zeros(3, DRAWS))
    with pytest.raises(ShapeError, match=r"`draws` must be \(1, 10\)"):
        augment(torch.zeros(1, 3, 4, 4), Augmentation(), torch.zeros(2, DRAWS))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_normalisation(dtype):
    raw = torch.randint(0, 256, (3, 2, 4, 5), generator=torch.Generator().manual_seed(0))
    images = raw.to(dtype) if dtype == torch.uint8 else (raw / 255).to(dtype)
    mean, std = torch.tensor([0.4, 0.5]), torch.tensor([0.2, 0.0])
    slope, offset = normalisation_of(mean, std, in_bytes=dtype == torch.uint8)
    found = images * slope + offset
    for b, c, i, j in torch.cartesian_prod(*map(torch.arange, raw.shape)).tolist():
        expected = (raw[b, c, i, j].item() / 255 - (0.4, 0.5)[c]) / (0.2, 1.0)[c]
        assert found[b, c, i, j].item() == pytest.approx(expected, abs=1e-6)
