from __future__ import annotations

import os
import shutil
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from oracles import images as oracle
from thalweg.data.images.files import ImageFile, check_classes, list_images, split_off
from thalweg.errors import ConfigError, DataError

BOTH = pytest.mark.parametrize("archive", [False, True], ids=["folder", "zip"])


def made(tmp_path: Path, names: list[str], archive: bool) -> Path:
    """Empty files (``/`` at the end: folders) in a folder, or in a zip of the same."""
    if archive:
        path = tmp_path / "data.zip"
        with zipfile.ZipFile(path, "w") as file:
            for name in names:
                file.writestr(name, b"")
        return path
    path = tmp_path / "data"
    path.mkdir()
    for name in names:
        if name.endswith("/"):
            (path / name).mkdir(parents=True, exist_ok=True)
        else:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(b"")
    return path


def found(path: Path) -> list[tuple[str, str, str]]:
    return [(file.split, file.label, file.name) for file in list_images(path).files]


@BOTH
def test_splits_and_their_names(tmp_path, archive):
    names = ["Train/cat/1.JPG", "Train/dog/1.png", "valid/cat/1.webp", "valid/dog/1.bmp", "testing/cat/1.jpeg"]
    listing = list_images(made(tmp_path, [*names, "testing/dog/2.gif", "other/cat/9.png", "README.txt"], archive))
    assert listing.splits == ("train", "val", "test")
    assert [(f.split, f.label, f.inner) for f in listing.files] == [
        ("train", "cat", "1.JPG"),
        ("train", "dog", "1.png"),
        ("val", "cat", "1.webp"),
        ("val", "dog", "1.bmp"),
        ("test", "cat", "1.jpeg"),
        ("test", "dog", "2.gif"),
    ]
    assert check_classes(listing) == ("cat", "dog")


@BOTH
def test_classes_alone_and_what_is_ignored(tmp_path, archive):
    names = ["b/2.png", "b/deep/er/1.png", "a/1.png", "__MACOSX/a/._1.png", "a/.hidden.png", ".git/x/1.png", "a/n.txt"]
    path = made(tmp_path, names, archive)
    assert found(path) == [("", "a", "a/1.png"), ("", "b", "b/2.png"), ("", "b", "b/deep/er/1.png")]
    assert list_images(path).files[2].inner == "deep/er/1.png"
    assert list_images(path).splits == ()


@BOTH
def test_folders_around_everything(tmp_path, archive):
    path = made(tmp_path, ["my/data/train/a/1.png", "my/data/train/b/1.png", "my/data/notes.md"], archive)
    assert [file[:2] for file in found(path)] == [("train", "a"), ("train", "b")]


@BOTH
def test_a_class_may_be_called_train(tmp_path, archive):
    path = made(tmp_path, ["bus/1.png", "train/1.png", "tram/1.png"], archive)
    assert check_classes(list_images(path)) == ("bus", "train", "tram")


@BOTH
def test_images_in_no_class_are_named(tmp_path, archive):
    listing = list_images(made(tmp_path, ["a/1.png", "b/1.png", "stray.png"], archive))
    assert listing.refused == (("stray.png", "in no class's folder"),)
    assert len(listing.files) == 2


WRONG = [
    ([], "got none; check the path"),
    (["a/1.txt", "b/2.txt"], "got none; check the path"),
    (["1.png", "2.png"], "expected a folder for each class, got 2 images in none"),
    (["a/1.png"], "two classes or more, a folder for each, got `a` alone"),
    (["x/a/1.png"], "two classes or more"),
    (["train/a/1.png"], "two classes or more"),
    (["a/1.png", "b/1.png", "c/"], "class folder `c` has no images; put some there or remove it"),
    (["train/a/1.png", "train/b/"], "class folder `train/b` has no images"),
    (["train/a/1.png", "train/b/1.png", "val/a/1.png"], "class `b` is missing in `val`"),
    (
        ["train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/1.png", "val/c/1.png"],
        "class `c` is missing in `train`",
    ),
    (["test/a/1.png", "test/b/1.png"], "expected a folder `train`, got test alone"),
]


@BOTH
@pytest.mark.parametrize(("names", "says"), WRONG)
def test_wrong_folders_say_so(tmp_path, archive, names, says):
    path = made(tmp_path, names, archive)
    with pytest.raises(DataError) as caught:
        check_classes(list_images(path))
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_members_that_lead_outside_are_refused(tmp_path):
    names = ["a/1.png", "b/1.png", "../c/1.png", "/d/1.png", "a/../../e.png", "C:/f/1.png", "a\\2.png"]
    listing = list_images(made(tmp_path, names, archive=True))
    assert [file.inner for file in listing.files] == ["1.png", "2.png", "1.png"]
    assert {name for name, reason in listing.refused if reason == "its path leads outside"} == set(names[2:6])


def test_a_second_member_of_one_name_is_refused(tmp_path):
    path = made(tmp_path, ["a/1.png", "b/1.png"], archive=True)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("a/1.png", b"other")
    assert list_images(path).refused == (("a/1.png", "twice in the archive"),)


def test_what_is_no_archive(tmp_path):
    path = tmp_path / "data.zip"
    path.write_bytes(b"no zip")
    with pytest.raises(DataError, match="expected a zip archive"):
        list_images(path)
    whole = made(tmp_path, ["a/1.png", "b/1.png"], archive=True).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="expected a zip archive"):
        list_images(path)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links, which this system lacks")
def test_links_are_followed_but_not_in_circles(tmp_path):
    path = made(tmp_path, ["a/1.png", "b/1.png"], archive=False)
    shutil.move(path / "b", tmp_path / "elsewhere")
    (path / "b").symlink_to(tmp_path / "elsewhere")
    (path / "a" / "up").symlink_to(path)
    (path / "a" / "gone.png").symlink_to(path / "nowhere")
    assert [file[2] for file in found(path)] == ["a/1.png", "b/1.png"]


def files_of(counts: dict[str, int]) -> list[ImageFile]:
    return [ImageFile(f"x/{c}/{n}.png", f"{n}.png", c, "", 1, 0) for c, count in counts.items() for n in range(count)]


@pytest.mark.parametrize("seed", [0, 7])
def test_holding_out_equals_the_oracle(seed):
    counts = {"a": 40, "b": 3, "c": 17}
    found = split_off(files_of(counts), {"val": 0.1, "test": 0.25}, seed=seed)
    for label, count in counts.items():
        names = [f"{n}.png" for n in range(count)]
        for split, expected in zip(("val", "test"), oracle.held_out(names, label, seed, (0.1, 0.25)), strict=True):
            assert {f.inner for f in found if (f.split, f.label) == (split, label)} == set(expected)
    assert len(found) == 60
    assert [(f.split, f.label) for f in found] == sorted(
        ((f.split, f.label) for f in found), key=lambda x: (("train", "val", "test").index(x[0]), x[1])
    )


def test_holding_out_by_another_hash_is_noticed(monkeypatch):
    monkeypatch.setattr(oracle.hashlib, "sha256", oracle.hashlib.sha1)
    part = oracle.held_out([f"{n}.png" for n in range(40)], "a", 0, (0.5,))[0]
    monkeypatch.undo()
    assert {f.inner for f in split_off(files_of({"a": 40}), {"val": 0.5}) if f.split == "val"} != set(part)


def test_nothing_held_out_and_splits_that_exist_stay():
    assert Counter(f.split for f in split_off(files_of({"a": 2}), {"val": 0.0})) == {"train": 2}
    files = [ImageFile("test/a/1.png", "1.png", "a", "test", 1, 0), *files_of({"a": 4})]
    assert Counter(f.split for f in split_off(files, {"val": 0.1})) == {"train": 3, "val": 1, "test": 1}


def test_holding_out_too_much():
    with pytest.raises(DataError, match="class `a` has 2 images, too few to hold out 1 for val and 1 for test"):
        split_off(files_of({"a": 2}), {"val": 0.1, "test": 0.1})
    for shares in ({"val": 0.5, "test": 0.5}, {"val": -0.1}, {"val": float("nan")}):
        with pytest.raises(ConfigError, match="together below 1"):
            split_off(files_of({"a": 9}), shares)
