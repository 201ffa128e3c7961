from __future__ import annotations

import pytest
import torch
from torch import nn

from thalweg.data.images.augmentation import Augmentation
from thalweg.data.images.batches import ImageBatch, ImageBatches
from thalweg.data.images.reading import ImageSplit, channel_statistics, read_images
from thalweg.errors import ConfigError, ShapeError

FULL = {"augment": Augmentation(crop=2, colour=0.2, cutout=2), "mixup": 0.4}


def split_of(count=11, channels=3, side=6):
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8, generator=generator)
    return ImageSplit("train", images, torch.arange(count) % 4, [f"{n}.png" for n in range(count)])


def batches_of(split=None, **changes):
    split = split_of() if split is None else split
    C = split.images.shape[1]
    return ImageBatches(split, **{"size": 4, "mean": [0.5] * C, "std": [0.25] * C, "seed": 3, **changes})


def same(one: ImageBatch, two: ImageBatch) -> bool:
    mixed = (one.mixed is None) == (two.mixed is None)
    if mixed and one.mixed is not None and two.mixed is not None:
        mixed = all(torch.equal(a, b) for a, b in zip(one.mixed, two.mixed, strict=True))
    return (
        mixed and one.rows == two.rows and torch.equal(one.images, two.images) and torch.equal(one.labels, two.labels)
    )


def test_without_changes_images_are_only_normalised():
    split = split_of()
    for batch in batches_of(split).iterate(0):
        assert batch.images.dtype == torch.float32
        expected = (split.images[batch.rows] / 255 - 0.5) / 0.25
        torch.testing.assert_close(batch.images, expected)
        assert torch.equal(batch.labels, split.labels[batch.rows])
        assert batch.mixed is None
        assert batch.size == len(batch.rows) == len(batch.images)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (1, 4), (4, 4), (5, 4), (7, 3), (9, 4), (11, 4), (6, 1)])
def test_every_image_comes_once_and_none_is_left_alone(count, size):
    batches = batches_of(split_of(count), size=size)
    rows = [batch.rows for batch in batches.iterate(2)]
    assert len(rows) == len(batches)
    assert sorted(row for batch in rows for row in batch) == list(range(count))
    assert size == 1 or count == 1 or min(map(len, rows)) > 1
    assert [len(r) for r in rows[:-1]] == [size] * (len(rows) - 1)


def test_evaluation_keeps_the_order():
    batches = batches_of(split_of(9), shuffle=False)
    assert [batch.rows for batch in batches.iterate(5)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_seed_epoch_and_number_fix_a_batch(workers):
    whole = list(batches_of(**FULL).iterate(4))
    again = batches_of(workers=workers, **FULL)
    for start in range(len(again) + 1):
        rest = list(again.iterate(4, start))
        assert len(rest) == len(whole) - start
        assert all(same(one, two) for one, two in zip(rest, whole[start:], strict=True))
    others = [batches_of(**FULL).iterate(5), batches_of(**{**FULL, "seed": 4}).iterate(4)]
    assert not any(same(next(other), whole[0]) for other in others)


def test_every_batch_and_every_epoch_is_changed_in_its_own_way():
    one = split_of(1)
    split = ImageSplit(
        "train", one.images.expand(12, -1, -1, -1).contiguous(), torch.zeros(12, dtype=torch.long), ["x"] * 12
    )
    batches = batches_of(split, **FULL)
    found = [batch for n in range(2) for batch in batches.iterate(n)]
    assert len(found) == 6
    assert not any(torch.equal(a.images, b.images) for i, a in enumerate(found) for b in found[:i])
    weights = [batch.mixed[1] for batch in found if batch.mixed is not None]
    assert len(weights) == 6
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    list(batches_of(**FULL).iterate(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_mixing_weighs_two_images_of_the_batch():
    split = split_of(64)
    plain = next(batches_of(split, size=64).iterate(0))
    mixed = next(batches_of(split, size=64, mixup=1.0).iterate(0))
    assert mixed.rows == plain.rows
    assert mixed.mixed is not None
    others, weight = mixed.mixed
    assert ((weight >= 0) & (weight <= 1)).all()
    assert 0.4 < weight.mean() < 0.6  # Beta(1, 1) is uniform
    for b in range(64):
        w = weight[b]
        candidates = w * plain.images[b] + (1 - w) * plain.images
        near = (candidates - mixed.images[b]).abs().amax((1, 2, 3)) < 1e-5
        assert near.any()
        assert plain.labels[near.nonzero()[0, 0]] == others[b]


def test_a_reader_may_leave_early_and_errors_arrive():
    batches = batches_of(split_of(40), workers=2)
    iterator = batches.iterate(0)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    batches._images = torch.zeros(0, 3, 6, 6, dtype=torch.uint8)
    with pytest.raises((IndexError, RuntimeError)):
        list(batches.iterate(0))


class _Elsewhere(ImageBatches):
    """Images that no device holds, without a device: what a GPU with little memory would do."""

    def stay(self, device):
        super().stay(device)
        self.resident = False
        return self


def test_images_that_do_not_fit_are_gathered_ahead(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    ours = _Elsewhere(split_of(), size=4, mean=[0.5] * 3, std=[0.25] * 3, seed=3, **FULL)
    expected = batches_of(**FULL)
    for epoch in (0, 1):
        pairs = zip(ours.iterate(epoch, 1), expected.iterate(epoch, 1), strict=True)
        assert all(same(one, two) for one, two in pairs)


@pytest.mark.parametrize("group", [2, 3, 100])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_made_together_are_the_same(group, workers):
    for settings in (FULL, {}, {"mixup": 0.2}):
        alone = list(batches_of(split_of(33), **settings).iterate(1))
        together = batches_of(split_of(33), workers=workers, **settings)
        together._group = group
        for start in range(len(together) + 1):
            found = list(together.iterate(1, start))
            assert len(found) == len(alone) - start
            assert all(same(one, two) for one, two in zip(found, alone[start:], strict=True))


def test_the_images_are_not_changed():
    split = split_of()
    before = split.images.clone()
    list(batches_of(split, **FULL).iterate(0))
    assert torch.equal(split.images, before)


def test_moving():
    batches = batches_of().stay(torch.device("cpu"))
    batch = next(batches.iterate(0))
    assert batch.to("cpu") is batch
    away = batch.to("meta")
    assert away.images.device.type == away.labels.device.type == "meta"
    mixed = next(batches_of(mixup=1.0).iterate(0)).to("meta").mixed
    assert mixed is not None
    assert mixed[1].device.type == "meta"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"size": 0}, "`size` of image batches must be at least 1, got 0"),
        ({"seed": -1}, "`seed` of image batches"),
        ({"mixup": float("nan")}, "`mixup` of image batches"),
        ({"workers": -1}, "`workers` of image batches"),
    ],
)
def test_settings_are_checked(wrong, says):
    with pytest.raises(ConfigError, match=says):
        batches_of(**wrong)


def test_places_are_checked():
    with pytest.raises(ConfigError, match=r"must be in 0\.\.3"):
        batches_of().iterate(0, 4)
    with pytest.raises(ConfigError, match="count from 0"):
        next(batches_of().iterate(-1))
    with pytest.raises(ShapeError, match="one for each channel"):
        batches_of(mean=[0.5])
    with pytest.raises(ShapeError, match="at least one image"):
        batches_of(split_of(0))


def test_digits_are_learnt():
    data = read_images("digits")
    mean, std = channel_statistics(data.train)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = ImageBatches(data.train, size=32, mean=mean, std=std, augment=Augmentation(flip=False, crop=0))
    for epoch in range(3):
        for batch in batches.iterate(epoch):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(batch.images), batch.labels).backward()
            optimiser.step()
    assert data.test is not None
    test = ImageBatches(data.test, size=1000, mean=mean, std=std, shuffle=False)
    accuracy = sum((model(b.images).argmax(1) == b.labels).sum().item() for b in test.iterate(0)) / len(data.test)
    assert accuracy > 0.9
