from __future__ import annotations

import json
import os
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from oracles import images as oracle
from thalweg.data.images import store as image_store
from thalweg.data.images.cache import CacheEntry, cache_folder
from thalweg.data.images.reading import ImageSplit, channel_statistics, read_images, read_labelled, read_unlabelled
from thalweg.errors import ConfigError, DataError, MissingDependencyError, ShapeError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("THALWEG_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def no_decoding(monkeypatch):
    def refuse(*args, **settings):
        raise AssertionError("decoded again")

    return lambda: monkeypatch.setattr(image_store, "decode_files", refuse)


def pixels(seed, size=(4, 5)):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def save(path: Path, array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


@pytest.fixture
def folder(tmp_path):
    """Two classes of 10 images in train, 3 in test; no val."""
    path = tmp_path / "pictures"
    for seed in range(26):
        split, label = ("train", seed // 10) if seed < 20 else ("test", (seed - 20) // 3)
        save(path / split / "ab"[label] / f"{seed:02d}.png", pixels(seed))
    return path


def zipped(folder: Path) -> Path:
    path = folder.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*.png")):
            archive.write(file, file.relative_to(folder))
    return path


def check_all(data):
    for split in data.splits():
        for image, label, file in zip(split.images, split.labels.tolist(), split.files, strict=True):
            assert np.array_equal(image.numpy(), pixels(int(Path(file).stem)).transpose(2, 0, 1))
            assert data.classes[label] == Path(file).parent.name


@pytest.mark.parametrize("workers", [0, 2, None])
def test_folder_and_archive_give_the_same(folder, workers):
    one = read_images(folder, workers=workers)
    two = read_images(zipped(folder), workers=workers)
    for data in (one, two):
        assert data.classes == ("a", "b")
        assert data.shape == (3, 4, 5)
        assert data.skipped == []
        assert [(split.name, len(split)) for split in data.splits()] == [("train", 18), ("val", 2), ("test", 6)]
        assert all(split.labels.dtype == torch.int64 for split in data.splits())
        check_all(data)
    assert [split.files for split in one.splits()] == [split.files for split in two.splits()]


def test_what_is_held_out_is_settled_by_the_seed(folder):
    def held(**settings):
        val = read_images(folder, **settings).val
        return val and set(val.files)

    assert held() == held()
    assert len({frozenset(held(seed=seed)) for seed in range(5)}) > 1
    names = {label: [f"{n:02d}.png" for n in range(20) if (n >= 10) == (label == "b")] for label in "ab"}
    for seed in (0, 3):
        expected = {
            f"train/{label}/{name}" for label in "ab" for name in oracle.held_out(names[label], label, seed, (0.3,))[0]
        }
        assert held(held_out=0.3, seed=seed) == expected
    assert held(held_out=0.0) is None


def test_the_cache_is_found_again(folder, no_decoding):
    first = read_images(folder)
    assert len(list(cache_folder().glob("*.bin"))) == 1
    no_decoding()
    again = read_images(folder)
    check_all(again)
    assert again.train.entry == first.train.entry
    assert not list(cache_folder().glob("*.part"))


def test_other_settings_are_other_images(folder):
    read_images(folder)
    assert read_images(folder, size=2).shape == (3, 2, 2)
    assert read_images(folder, size=(3, 2), colour="grey").shape == (1, 3, 2)
    assert len(list(cache_folder().glob("*.bin"))) == 3


@pytest.mark.parametrize("change", ["longer", "newer", "more", "fewer"])
def test_changed_files_are_decoded_again(folder, change):
    read_images(folder)
    victim = folder / "train" / "a" / "03.png"
    if change == "longer":
        save(victim, pixels(77))
    elif change == "newer":
        facts = victim.stat()
        save(victim, pixels(77))
        os.utime(victim, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    elif change == "more":
        save(folder / "train" / "a" / "77.png", pixels(77))
    else:
        victim.unlink()
    data = read_images(folder, held_out=0.0)
    assert len(data.train) == 20 + (change == "more") - (change == "fewer")
    if change in ("longer", "newer"):
        assert np.array_equal(data.train.images[3].numpy(), pixels(77).transpose(2, 0, 1))


def spoil_index(entry: CacheEntry) -> None:
    entry.index.write_text("{", encoding="utf-8")


def spoil_version(entry: CacheEntry) -> None:
    facts = json.loads(entry.index.read_text(encoding="utf-8"))
    entry.index.write_text(json.dumps({**facts, "version": 0}), encoding="utf-8")


def spoil_length(entry: CacheEntry) -> None:
    entry.data.write_bytes(entry.data.read_bytes()[:-1])


def spoil_byte(entry: CacheEntry) -> None:
    data = bytearray(entry.data.read_bytes())
    data[100] ^= 1
    entry.data.write_bytes(data)


@pytest.mark.parametrize("spoil", [spoil_index, spoil_version, spoil_length, spoil_byte])
def test_a_damaged_cache_is_made_again(folder, spoil):
    entry = read_images(folder).train.entry
    spoil(entry)
    check_all(read_images(folder))
    assert entry.load() is not None


def test_a_cache_that_cannot_be_written_is_done_without(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    for settings in ({"cache": tmp_path / "file" / "cache"}, {"cache": False}):
        for workers in (0, 2):
            data = read_images(folder, workers=workers, **settings)
            assert data.train.entry is None
            check_all(data)
    monkeypatch.setattr(
        "thalweg.data.images.cache.reserve", lambda path, size: (_ for _ in ()).throw(OSError(28, "full"))
    )
    data = read_images(folder)
    assert data.train.entry is None
    check_all(data)
    monkeypatch.setenv("THALWEG_CACHE", "")
    assert cache_folder() is None


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("THALWEG_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "thalweg" / "images"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "thalweg" / "images"


def test_two_at_once(folder):
    found = []
    threads = [threading.Thread(target=lambda: found.append(read_images(folder, workers=0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for data in found:
        check_all(data)
    assert [path.suffix for path in sorted(cache_folder().iterdir())] == [".bin", ".json"]


def test_what_a_killed_process_left_is_removed(folder):
    cache_folder().mkdir(parents=True)
    old, new = cache_folder() / "x.1.bin.part", cache_folder() / "x.2.bin.part"
    old.write_bytes(b"")
    new.write_bytes(b"")
    os.utime(old, (0, 0))
    read_images(folder)
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cache", [None, False])
def test_bad_files_are_skipped_and_named(folder, workers, cache):
    (folder / "train" / "a" / "03.png").write_bytes(b"no image")
    half = folder / "test" / "b" / "24.png"
    half.write_bytes(half.read_bytes()[:60])
    for _ in range(2):  # decoded, then from the cache
        data = read_images(folder, workers=workers, cache=cache)
        assert [name for name, _ in data.skipped] == ["train/a/03.png", "test/b/24.png"]
        assert data.skipped[0][1] == "not an image of a known format"
        assert sum(map(len, data.splits())) == 24
        check_all(data)
    with pytest.raises(DataError, match=r"train/a/03.png: not an image of a known format \(and 1 more files\); mend"):
        read_images(folder, workers=workers, cache=cache, on_bad="fail")


def test_a_class_without_any_good_file(folder):
    for n in (23, 24, 25):
        (folder / "test" / "b" / f"{n}.png").write_bytes(b"no image")
    says = r"class `b` has no image in `test` that can be read \(test/b/23.png: not an image"
    with pytest.raises(DataError, match=says):
        read_images(folder)
    for file in folder.rglob("*.png"):
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match="no image can be read"):
        read_images(folder)
    with pytest.raises(DataError, match="class `a` has no image in `train`"):
        read_images(folder, size=8, colour="rgb")


def test_size_and_colour_follow_the_images(tmp_path):
    for n in range(12):
        size = (6, 8) if n % 3 else (9, 9)
        save(tmp_path / "common" / "ab"[n % 2] / f"{n}.png", pixels(n, size)[..., 0])
        save(tmp_path / "mixed" / "ab"[n % 2] / f"{n}.png", pixels(n, (10 + n, 30)))
        save(tmp_path / "large" / "ab"[n % 2] / f"{n}.png", np.zeros((300 + n, 310), dtype=np.uint8))
    shares = {"held_out": 0.2, "held_out_test": 0.2}
    assert read_images(tmp_path / "common", **shares).shape == (1, 6, 8)
    assert read_images(tmp_path / "common", colour="rgb", **shares).shape == (3, 6, 8)
    assert read_images(tmp_path / "mixed", **shares).shape == (3, 15, 15)
    assert read_images(tmp_path / "large", **shares).shape == (1, 256, 256)


def test_statistics_equal_the_oracle_and_are_kept(folder, monkeypatch):
    data = read_images(folder)
    monkeypatch.setattr("thalweg.data.images.reading._BLOCK", 200)  # three images at a time
    mean, std = channel_statistics(data.train)
    for c in range(3):
        expected = oracle.statistics(data.train.images[:, c].flatten().tolist())
        assert (mean[c].item(), std[c].item()) == pytest.approx(expected, abs=1e-6)
        wrong = oracle.statistics(data.train.images[:-1, c].flatten().tolist())
        assert (mean[c].item(), std[c].item()) != pytest.approx(wrong, abs=1e-6)
    monkeypatch.setattr("thalweg.data.images.reading._count", lambda images: pytest.fail("counted again"))
    again = channel_statistics(read_images(folder).train)
    assert torch.equal(again[0], mean)
    assert torch.equal(again[1], std)
    with pytest.raises(pytest.fail.Exception, match="counted again"):
        channel_statistics(data.test)


def test_labelled_images_for_a_model(folder, tmp_path):
    split, skipped = read_labelled(folder, ["b", "x", "a"], size=(4, 5))
    assert (split.name, len(split), skipped) == ("test", 6, [])
    assert split.labels.tolist() == [2, 2, 2, 0, 0, 0]
    assert len(read_labelled(folder, ["a", "b"], split="train")[0]) == 20
    assert len(read_labelled(folder / "test", ["a", "b"])[0]) == 6
    assert read_labelled(folder / "test", ["a", "b"])[0].name == "test"
    with pytest.raises(DataError, match="class `b` is none that the model knows; choose one of: a, c"):
        read_labelled(folder, ["a", "c"])
    with pytest.raises(DataError, match="expected a folder `val`, got train, test"):
        read_labelled(folder, ["a", "b"], split="val")
    with pytest.raises(ConfigError, match="did you mean `test`"):
        read_labelled(folder, ["a", "b"], split="tests")
    with pytest.raises(DataError, match="got 3 images in none"):
        read_labelled(folder / "test" / "a", ["a", "b"])
    with pytest.raises(DataError, match="expected a model of the classes 0 to 9"):
        read_labelled("digits", ["a", "b"])


def test_images_to_predict_keep_their_order(folder):
    single = folder / "train" / "b" / "15.png"
    split, skipped = read_unlabelled(
        [str(single), folder / "train" / "a" / "02.png", zipped(folder / "test"), folder / "train" / "a"],
        size=(4, 5),
        colour="rgb",
    )
    seeds = [15, 2, 20, 21, 22, 23, 24, 25, *range(10)]
    assert [int(Path(name).stem) for name in split.files] == seeds
    assert split.files[0] == str(single)
    assert split.files[2] == f"{folder / 'test.zip'}/a/20.png"
    assert split.labels.tolist() == [-1] * 18
    assert skipped == []
    for image, seed in zip(split.images, seeds, strict=True):
        assert np.array_equal(image.numpy(), pixels(seed).transpose(2, 0, 1))


def test_bad_images_to_predict(folder, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    good = folder / "test" / "a" / "20.png"
    with pytest.raises(DataError, match=r"bad\.png: empty file; expected an image"):
        read_unlabelled([good, bad], size=8, colour="grey")
    split, skipped = read_unlabelled([bad, good], size=8, colour="grey", on_bad="skip")
    assert split.files == [str(good)]
    assert skipped == [(str(bad), "empty file")]
    with pytest.raises(DataError, match=r"expected images, got none in .*bad\.png; the first"):
        read_unlabelled([bad], size=8, colour="grey", on_bad="skip")
    with pytest.raises(DataError, match="got none in no path"):
        read_unlabelled([], size=8, colour="grey")
    with pytest.raises(ConfigError, match="`size` must be given"):
        read_unlabelled([good], size=0, colour="grey")


def test_digits():
    data = read_images("digits")
    assert data.classes == tuple("0123456789")
    assert [len(split) for split in data.splits()] == [1259, 179, 359]
    assert all(torch.bincount(split.labels, minlength=10).min() >= 15 for split in data.splits())
    assert len({file for split in data.splits() for file in split.files}) == 1797
    from sklearn.datasets import load_digits

    bunch = load_digits()
    for split in data.splits():
        numbers = [int(file[-4:]) for file in split.files]
        assert split.labels.tolist() == bunch.target[numbers].tolist()
        assert np.abs(split.images[:, 0].numpy() * (16 / 255) - bunch.images[numbers]).max() < 0.04
    assert torch.equal(read_images("digits", seed=5, held_out=0.5).train.images, data.train.images)
    assert read_images("digits", size=(16, 12), colour="rgb").train.images.shape == (1259, 3, 16, 12)


def test_digits_need_their_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingDependencyError, match="pip install scikit-learn"):
        read_images("digits")


def test_images_need_pillow(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependencyError, match="pip install pillow"):
        read_images(folder)


def test_what_lies_here_goes_before_a_name(folder, monkeypatch):
    folder.rename(folder.parent / "digits")
    monkeypatch.chdir(folder.parent)
    assert read_images("digits").classes == ("a", "b")


@pytest.mark.parametrize(
    ("path", "settings", "kind", "says"),
    [
        ("digts", {}, DataError, "did you mean `digits`"),
        ("no/such.zip", {}, DataError, "got no such file; check the path"),
        ("digits", {"size": -1}, ConfigError, "`size` of images must be"),
        ("digits", {"size": (0, 3)}, ConfigError, "`size` of images must be"),
        ("digits", {"colour": "red"}, ConfigError, "`colour` of images must be one of"),
        ("digits", {"on_bad": "cry"}, ConfigError, "`on_bad` of images must be skip or fail"),
    ],
)
def test_wrong_settings(path, settings, kind, says):
    with pytest.raises(kind, match=says) as caught:
        read_images(path, **settings)
    assert "\n" not in str(caught.value)


def test_settings_of_a_folder(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("THALWEG_DATA", raising=False)
    with pytest.raises(ConfigError, match="`workers` must be 0 or more"):
        read_images(folder, workers=-1)
    with pytest.raises(ConfigError, match="together below 1"):
        read_images(folder, held_out=1.0)
    with pytest.raises(DataError, match=r"intel/intel48.zip: expected in the folder .*part of intel"):
        read_images("intel", root=tmp_path)


def test_splits_check_their_tensors():
    labels = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"`images` must be \(2, C, H, W\) uint8"):
        ImageSplit("train", torch.zeros(2, 3, 4, 4), labels, ["a", "b"])
    with pytest.raises(ShapeError, match=r"`labels` must be \(1,\)"):
        ImageSplit("train", torch.zeros(1, 3, 4, 4, dtype=torch.uint8), labels, ["a"])


def test_the_landscapes(shared_data):
    if not (shared_data / "intel" / "intel48.zip").is_file():
        pytest.skip(f"needs the images of the recipes: no intel/intel48.zip in {shared_data}; set THALWEG_DATA")
    split, skipped = read_labelled(
        "intel", ["buildings", "forest", "glacier", "mountain", "sea", "street"], split="val", root=shared_data
    )
    assert split.images.shape == (1403, 3, 48, 48)
    assert skipped == []
    assert torch.bincount(split.labels).tolist() == [217, 239, 245, 254, 211, 237]
    mean, std = channel_statistics(split)
    assert ((mean > 0.3) & (mean < 0.6)).all()
    assert ((std > 0.15) & (std < 0.35)).all()
