from __future__ import annotations

import io
import struct
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from oracles import images as oracle
from thalweg import processes
from thalweg.data.images import decoding as image_decoding
from thalweg.data.images.decoding import FileSource, Form, decode, decode_files, look


def encoded(image: Image.Image, kind: str = "png", **how) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def random_pixels(height, width, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def png(width, height, depth, colour, rows) -> bytes:
    """A PNG written by hand, for what Pillow cannot write."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["png", "bmp", "tiff", "ppm", "webp"])
def test_lossless_kinds_come_back(kind):
    pixels = random_pixels(5, 7)
    data = encoded(Image.fromarray(pixels), kind, **({"lossless": True} if kind == "webp" else {}))
    assert np.array_equal(decode(data, Form(3, 5, 7)), pixels.transpose(2, 0, 1))
    assert look(data) == (5, 7, False)


def test_jpeg_is_near_and_grey_is_luma():
    pixels = np.full((16, 16, 3), (200, 100, 50), dtype=np.uint8)
    data = encoded(Image.fromarray(pixels), "jpeg", quality=95)
    assert np.abs(decode(data, Form(3, 16, 16)).astype(int) - pixels.transpose(2, 0, 1)).max() <= 3
    luma = oracle.grey((200, 100, 50))
    assert np.abs(decode(data, Form(1, 16, 16)) - luma).max() <= 2


def test_modes():
    one = np.array([[0, 255]], dtype=np.uint8)
    grey = Image.fromarray(one)
    for image in (grey, grey.convert("1"), grey.convert("P"), grey.convert("RGB")):
        data = encoded(image)
        assert decode(data, Form(3, 1, 2)).tolist() == [[[0, 255]]] * 3
        assert decode(data, Form(1, 1, 2)).tolist() == [[[0, 255]]]
    assert look(encoded(grey)).grey
    cmyk = Image.new("CMYK", (1, 1), (255, 0, 0, 0))
    assert decode(encoded(cmyk, "tiff"), Form(3, 1, 1)).ravel().tolist() == [0, 255, 255]


def test_transparent_lies_on_white():
    rgba = np.array([[[10, 20, 30, 255], [10, 20, 30, 0], [0, 0, 0, 128]]], dtype=np.uint8)
    assert decode(encoded(Image.fromarray(rgba)), Form(3, 1, 3)).transpose(1, 2, 0).tolist() == [
        [[10, 20, 30], [255, 255, 255], [127, 127, 127]]
    ]
    both = np.array([[[0, 255], [0, 0]]], dtype=np.uint8)
    assert decode(encoded(Image.fromarray(both, "LA")), Form(1, 1, 2)).tolist() == [[[0, 255]]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([9, 9, 9, 0, 0, 255])
    palette.putdata([0, 1])
    assert decode(encoded(palette, transparency=0), Form(3, 1, 2))[:, 0].T.tolist() == [[255] * 3, [0, 0, 255]]


def test_sixteen_bits():
    values = [0, 128, 129, 257, 32768, 65535]
    data = png(6, 1, 16, 0, [struct.pack(">6H", *values)])
    assert decode(data, Form(1, 1, 6)).ravel().tolist() == [round(v / 257) for v in values]
    assert decode(data, Form(3, 1, 6))[2].ravel().tolist() == [round(v / 257) for v in values]
    assert look(data).grey
    colour = png(1, 1, 16, 2, [struct.pack(">3H", 65535, 257 * 7, 0)])
    assert decode(colour, Form(3, 1, 1)).ravel().tolist() == [255, 7, 0]


def test_wide_pixels_are_refused():
    for array in (np.full((2, 2), 70000, dtype=np.int32), np.zeros((2, 2), dtype=np.float32)):
        with pytest.raises(ValueError, match="no range that is known; expected 8 or 16 bits"):
            decode(encoded(Image.fromarray(array), "tiff"), Form(1, 2, 2))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation):
    picture = random_pixels(2, 3, 1)[..., 0]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(picture), exif=exif)
    expected = oracle.upright(picture.tolist(), orientation)
    assert look(data)[:2] == (len(expected), len(expected[0]))
    assert decode(data, Form(1, len(expected), len(expected[0])))[0].tolist() == expected


def test_damaged_metadata_do_not_spoil_the_picture():
    exif = b"Exif\0\0II*\0\xff\xff\xff\x7f"
    data = encoded(Image.new("L", (8, 8), 77), "jpeg", exif=exif)
    assert (decode(data, Form(1, 8, 8)) == 77).all()


def test_other_sizes_are_covered_and_cut_at_the_centre():
    wide = np.zeros((10, 30, 3), dtype=np.uint8)
    wide[:, 10:20] = (0, 255, 0)
    wide[:, 20:] = (0, 0, 255)
    data = encoded(Image.fromarray(wide))
    inner = decode(data, Form(3, 10, 10))
    assert (inner == np.array([0, 255, 0])[:, None, None]).all()
    assert decode(encoded(Image.fromarray(wide.transpose(1, 0, 2))), Form(3, 10, 10)).tolist() == inner.tolist()
    assert decode(data, Form(3, 3, 9)).shape == (3, 3, 9)
    large = decode(data, Form(3, 40, 40))
    assert (large[1, :, 5:-5] == 255).all()
    # Averages survive scaling, which sampling every tenth pixel would not give.
    noise = random_pixels(200, 200, 1)[..., 0]
    small = decode(encoded(Image.fromarray(noise)), Form(1, 20, 20))
    assert abs(small.mean() - noise.mean()) < 1
    assert small.std() < 20
    assert decode(encoded(Image.new("RGB", (1, 1), "blue")), Form(3, 2, 2))[2].min() == 255


def test_large_photographs_are_drafted():
    y, x = np.mgrid[0:1200, 0:1600]
    photograph = np.stack([x * 255 / 1599, y * 255 / 1199, 0 * x], -1).astype(np.uint8)
    found = decode(encoded(Image.fromarray(photograph), "jpeg", quality=95), Form(3, 48, 48)).astype(float)
    inner = photograph[:, 200:1400].reshape(48, 25, 48, 25, 3).mean((1, 3)).transpose(2, 0, 1)
    assert np.abs(found - inner).mean() < 2


def test_animations_give_their_first_frame():
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "gif", save_all=True, append_images=frames[1:])
    assert decode(data, Form(3, 2, 2))[:, 0, 0].tolist() == [255, 0, 0]


def bad_files() -> dict[str, tuple[bytes, str]]:
    noise = Image.fromarray(random_pixels(64, 64))
    jpeg, whole = encoded(noise, "jpeg"), encoded(noise)
    bomb = bytearray(encoded(Image.new("1", (8, 8))))
    bomb[16:24] = struct.pack(">II", 20000, 20000)
    bomb[29:33] = struct.pack(">I", zlib.crc32(bytes(bomb[12:29])))
    return {
        "empty.png": (b"", "empty file"),
        "text.jpg": (b"hello", "not an image"),
        "truncated.jpg": (jpeg[: len(jpeg) // 2], "truncated"),
        "truncated.png": (whole[: len(whole) // 2], "truncated|Truncated|broken"),
        "head.jpg": (jpeg[:20], "truncated|not an image"),
        "bomb.png": (bytes(bomb), "pixels|bomb"),
        "vector.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    }


@pytest.mark.parametrize("name", list(bad_files()))
def test_bad_files_say_why(name):
    data, says = bad_files()[name]
    with pytest.raises(ValueError, match=says) as caught:
        decode(data, Form(3, 8, 8))
    assert "\n" not in str(caught.value)


def test_every_cut_of_a_file_is_an_error_or_an_image():
    for kind in ("jpeg", "png", "gif", "webp", "bmp", "tiff"):
        data = encoded(Image.fromarray(random_pixels(9, 9)), kind)
        for length in range(0, len(data), max(1, len(data) // 40)):
            try:
                assert decode(data[:length], Form(3, 9, 9)).shape == (3, 9, 9)
            except ValueError:
                continue


def test_long_files_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(image_decoding, "MAX_BYTES", 10)
    (tmp_path / "a.png").write_bytes(b"x" * 11)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", b"x" * 11)
    for path, is_archive in ((tmp_path, False), (tmp_path / "a.zip", True)):
        with FileSource(str(path), archive=is_archive) as source, pytest.raises(ValueError, match="at most 10 bytes"):
            source.read("a.png")


@pytest.fixture
def mixed(tmp_path):
    """Good and bad files, more than a chunk of them, in a folder and as an archive."""
    folder = tmp_path / "files"
    folder.mkdir()
    for n in range(70):
        (folder / f"{n:03d}.png").write_bytes(encoded(Image.fromarray(random_pixels(6, 6, seed=n))))
    for name, (data, _) in bad_files().items():
        (folder / name).write_bytes(data)
    names = [*sorted(path.name for path in folder.iterdir()), "absent.png"]
    with zipfile.ZipFile(tmp_path / "files.zip", "w") as archive:
        for name in names[:-1]:
            archive.write(folder / name, name)
    return folder, tmp_path / "files.zip", names


def test_processes_do_what_one_does(mixed, tmp_path):
    folder, archive, names = mixed
    form, seen = Form(3, 6, 6), []
    expected = np.zeros((len(names), *form), dtype=np.uint8)
    with FileSource(str(folder), archive=False) as source:
        bad = decode_files(source, names, form, expected)
    assert {names[row] for row in bad} == {*bad_files(), "absent.png"}
    good = [row for row in range(len(names)) if row not in bad]
    assert all(
        np.array_equal(expected[r], random_pixels(6, 6, seed=int(names[r][:3])).transpose(2, 0, 1)) for r in good
    )
    for path, is_archive, workers in ((folder, False, 2), (archive, True, 2), (archive, True, 0)):
        target = tmp_path / "out"
        target.write_bytes(bytes(expected.size))
        with FileSource(str(path), archive=is_archive) as source:
            found = decode_files(
                source, names, form, target, workers=workers, progress=lambda done, of: seen.append((done, of))
            )
        assert list(found) == list(bad)
        # An archive words it otherwise that a file is not there.
        assert list(found.values())[:-1] == list(bad.values())[:-1]
        assert np.array_equal(np.fromfile(target, np.uint8).reshape(expected.shape), expected)
        assert seen[-1] == (len(names), len(names))


def test_a_file_that_crashes_the_decoder_is_found(mixed, tmp_path, monkeypatch):
    folder, _, names = mixed

    class Fragile(processes.Worker):
        def tell(self, message):
            if "040.png" in message.get("names", ()):
                self.process.kill()
            super().tell(message)

    monkeypatch.setattr(processes, "Worker", Fragile)
    target = tmp_path / "out"
    target.write_bytes(bytes(len(names) * 108))
    with FileSource(str(folder), archive=False) as source:
        bad = decode_files(source, names, Form(3, 6, 6), target, workers=1)
    assert bad[names.index("040.png")] == "it crashed the decoder"
    assert len(bad) == len(bad_files()) + 2
    found = np.fromfile(target, np.uint8).reshape(-1, 3, 6, 6)
    assert np.array_equal(found[41], random_pixels(6, 6, seed=41).transpose(2, 0, 1))


def test_where_no_process_starts_the_work_is_done_here(mixed, tmp_path, monkeypatch):
    folder, _, names = mixed
    monkeypatch.setattr(image_decoding.sys, "executable", str(tmp_path / "absent"))
    target = tmp_path / "out"
    target.write_bytes(bytes(len(names) * 108))
    with FileSource(str(folder), archive=False) as source:
        bad = decode_files(source, names, Form(3, 6, 6), target, workers=2)
    assert len(bad) == len(bad_files()) + 1


def test_encrypted_members_are_named(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.png", encoded(Image.new("L", (2, 2))))
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + offset] |= 1
    path.write_bytes(data)
    out = np.zeros((1, 1, 2, 2), dtype=np.uint8)
    with FileSource(str(path), archive=True) as source:
        assert decode_files(source, ["a.png"], Form(1, 2, 2), out) == {0: "encrypted in the archive"}
