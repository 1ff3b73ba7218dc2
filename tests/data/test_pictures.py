"""What published sets of pictures share: where they are looked for, how they are decoded and kept."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from isofed import data
from isofed.data.sources import decode as decoding
from isofed.data.sources import pictures
from isofed.data.sources.decode import decode
from isofed.errors import UserError
from tests.data.picture_tools import Painter, numbered

WNIDS = ("n001", "n002")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ISOFED_DATA", raising=False)


def small(root: Path) -> Painter:
    """The smallest set there is: ImageNet with two classes."""
    painter = Painter(root)
    for wnid in WNIDS:
        painter.paint(f"train/{wnid}", numbered(3, "JPEG"))
        painter.paint(f"val/{wnid}", numbered(2, "JPEG"))
    return painter


CHOICE = "imagenet-200:classes=2,per_class=3,size=8"


def test_a_set_is_found_in_the_folder_or_its_usual_sub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    painter = small(tmp_path / "all" / "imagenet")
    made = data.load(CHOICE, root=str(painter.root))
    assert data.load(CHOICE, root=str(tmp_path / "all")).fingerprint == made.fingerprint
    monkeypatch.setenv("ISOFED_DATA", str(tmp_path / "all"))
    assert data.load(CHOICE).fingerprint == made.fingerprint
    monkeypatch.setenv("ISOFED_DATA", str(painter.root))
    assert data.load(CHOICE).fingerprint == made.fingerprint
    monkeypatch.setenv("ISOFED_DATA", "/nowhere")
    assert data.load(CHOICE, root=str(painter.root)).fingerprint == made.fingerprint, "root comes before the variable"


def test_a_whole_set_in_a_sub_folder_comes_before_half_a_set(tmp_path: Path) -> None:
    small(tmp_path / "imagenet")
    (tmp_path / "train").mkdir()
    assert len(data.load(CHOICE, root=str(tmp_path)).train) == 6


def test_folders_that_hold_no_set_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = "data set 'pacs' needs the folder it was unpacked into: give root=PATH or set ISOFED_DATA"
    with pytest.raises(UserError, match=needs):
        data.load("pacs")
    monkeypatch.setenv("ISOFED_DATA", "")
    with pytest.raises(UserError, match=needs):
        data.load("pacs")
    monkeypatch.setenv("ISOFED_DATA", "/nowhere/at/all")
    with pytest.raises(UserError, match="'/nowhere/at/all' does not exist: ISOFED_DATA must be the folder that"):
        data.load("pacs")
    with pytest.raises(UserError, match="'/no/where' does not exist: root must be the folder that data set 'pacs'"):
        data.load("pacs", root="/no/where")
    with pytest.raises(
        UserError, match="does not hold data set 'pacs': there is no art_painting or .* sub-folder kfold"
    ):
        data.load("pacs", root=str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file' is a file: root must be the folder that data set 'pacs'"):
        data.load("pacs", root=str(tmp_path / "file"))


def test_sizes_are_checked_and_reached(tmp_path: Path) -> None:
    root = str(small(tmp_path).root)
    made = data.load("imagenet-200:classes=2,per_class=3,size=5", root=root)
    assert made.shape == (3, 5, 5)
    for size in (0, 5000):
        with pytest.raises(
            UserError, match=f"size of data set 'imagenet-200' must be from 1 to 4096 pixels, not {size}"
        ):
            data.load(f"imagenet-200:classes=2,per_class=3,size={size}", root=root)


def test_pictures_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    painter = small(tmp_path)
    told: list[tuple[int, int]] = []
    first = data.load(CHOICE, root=str(tmp_path), progress=lambda *done: told.append(done))
    assert told == [(10, 10)]

    def never(*_: object, **__: object) -> None:
        raise AssertionError("decoded again")

    with monkeypatch.context() as patch:
        patch.setattr(pictures, "decode", never)
        again = data.load(CHOICE, root=str(tmp_path))
        assert again.fingerprint == first.fingerprint
        with pytest.raises(AssertionError, match="decoded again"):
            data.load(CHOICE + ",split_seed=1", root=str(tmp_path))
    changed = tmp_path / painter.find(first.train)[0]
    Image.new("RGB", (9, 9), (255, 255, 255)).save(changed, format="PNG")
    assert int(data.load(CHOICE, root=str(tmp_path)).train.images[0].min()) == 255, "a file that changed is seen"


def test_progress_is_told_every_64_pictures(tmp_path: Path) -> None:
    painter = Painter(tmp_path)
    painter.paint("a", numbered(150))
    told: list[tuple[int, int]] = []
    out = np.zeros((150, 8, 8, 3), np.uint8)
    decode(list(zip(out, painter.files.values(), strict=True)), "rgb", lambda *done: told.append(done))
    assert told == [(64, 150), (128, 150), (150, 150)]
    np.testing.assert_array_equal(out[:, 3, 3], np.array(list(painter.files)))


def test_pictures_are_squashed_like_pillow_does(tmp_path: Path) -> None:
    value = np.random.default_rng(0).integers(0, 256, (9, 14, 3), dtype=np.uint8)
    Image.fromarray(value).save(tmp_path / "a.png")
    Image.fromarray(value[..., 0]).save(tmp_path / "grey.png")
    Image.fromarray(value).convert("CMYK").save(tmp_path / "print.jpg")
    out = np.zeros((3, 6, 6, 3), np.uint8)
    decode([(out[i], tmp_path / name) for i, name in enumerate(("a.png", "grey.png", "print.jpg"))], "rgb")
    np.testing.assert_array_equal(out[0], np.asarray(Image.fromarray(value).resize((6, 6), Image.Resampling.BILINEAR)))
    grey = np.asarray(Image.fromarray(value[..., 0]).resize((6, 6), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(out[1], np.stack([grey] * 3, axis=-1))
    assert out[2].std() > 5


# How a viewer shows what is stored with each EXIF orientation.
UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored.transpose(1, 0, 2), 2),
    8: np.rot90,
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_pictures_are_turned_as_the_camera_says(tmp_path: Path, orientation: int) -> None:
    stored = np.random.default_rng(0).integers(0, 256, (9, 14, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    files = [tmp_path / f"a.{kind}" for kind in ("png", "tif", "webp")]
    for file in files:
        Image.fromarray(stored).save(file, exif=exif.tobytes(), lossless=True)
    out = np.zeros((4, 6, 6, 3), np.uint8)
    decode(list(zip(out, files, strict=False)), "rgb")
    shown = Image.fromarray(np.ascontiguousarray(UPRIGHT[orientation](stored)))
    for one in out[:3]:
        np.testing.assert_array_equal(one, np.asarray(shown.resize((6, 6), Image.Resampling.BILINEAR)))
    decode([(out[3], files[0])], "rgb", published=True)  # as the code that the published numbers are from
    as_stored = Image.fromarray(stored).resize((6, 6), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(out[3], np.asarray(as_stored))


def test_damaged_exif_data_turn_nothing(tmp_path: Path) -> None:
    Image.new("RGB", (6, 6), (200, 100, 0)).save(tmp_path / "a.png", exif=b"Exif\0\0II*\0\xff\xff")
    out = np.zeros((6, 6, 3), np.uint8)
    decode([(out, tmp_path / "a.png")], "rgb")
    assert (out == (200, 100, 0)).all()


def png(side: int, bits: int, rows: bytes) -> bytes:
    """A square in colour, of such rows, as Pillow would not write it."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", side, side, bits, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_what_is_lost_of_pictures_is_found(tmp_path: Path) -> None:
    frames = [Image.new("L", (6, 6), level) for level in (10, 200)]
    deep = Image.fromarray(np.full((6, 6), 4000, dtype=np.uint16))
    frames[0].save(tmp_path / "flat.gif")
    frames[0].save(tmp_path / "flat.tif")
    deep.save(tmp_path / "deep.png")
    deep.save(tmp_path / "deep.tif")
    for kind in ("gif", "tif", "png", "webp"):
        frames[0].convert("RGB").save(tmp_path / f"two.{kind}", save_all=True, append_images=frames[1:], lossless=True)
    (tmp_path / "deep colour.png").write_bytes(png(6, 16, (b"\0" + struct.pack(">H", 4000) * 18) * 6))
    files = sorted(tmp_path.iterdir())
    out = np.zeros((len(files), 6, 6, 3), np.uint8)
    found = decode(list(zip(out, files, strict=True)), "rgb")
    assert [files[n].name for n in found.deep] == ["deep colour.png", "deep.png", "deep.tif"]
    assert [files[n].name for n in found.several] == ["two.gif", "two.png", "two.tif", "two.webp"]
    assert (out[found.several] == 10).all() and (out[found.deep] == 4000 >> 8).all()


def test_a_large_jpeg_is_nearly_what_it_is_when_decoded_in_full(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    coarse = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
    coarse.resize((1600, 1200), Image.Resampling.BICUBIC).save(tmp_path / "large.jpg", quality=90)
    out = np.zeros((96, 96, 3), np.uint8)
    decode([(out, tmp_path / "large.jpg")], "rgb", published=True)
    with Image.open(tmp_path / "large.jpg") as image:
        full = np.asarray(image.resize((96, 96), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(out.astype(int) - full).max() <= 8
    assert np.abs(out.astype(int) - full).mean() < 1


def test_a_broken_picture_is_named_and_nothing_is_kept(tmp_path: Path) -> None:
    root = str(small(tmp_path).root)
    broken = tmp_path / "val" / "n002" / "001.JPEG"
    good = broken.read_bytes()
    for content in (b"", b"text", good[:50]):
        broken.write_bytes(content)
        with pytest.raises(UserError, match=r"the picture '.*val/n002/001\.JPEG' cannot be read .*: replace or remove"):
            data.load(CHOICE, root=root)
    broken.write_bytes(good)
    assert len(data.load(CHOICE, root=root).test) == 4


def test_a_picture_that_vanishes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(small(tmp_path).root)

    def vanish(files: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/a/b.png")

    monkeypatch.setattr(pictures, "fingerprint", vanish)
    with pytest.raises(UserError, match=r"the picture '/a/b.png' cannot be read \(No such file or directory\)"):
        data.load(CHOICE, root=root)


def test_a_picture_that_claims_a_billion_pixels_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(small(tmp_path).root)
    bomb = tmp_path / "val" / "n001" / "000.JPEG"
    for side, message in (
        (40_000, "says it is larger than 100,000,000 pixels: remove it"),  # Pillow itself refuses to open it
        (11_000, "says it is 11000 x 11000 pixels, more than the 100,000,000 that are read"),
    ):
        bomb.write_bytes(png(side, 8, b"\0"))
        with pytest.raises(UserError, match=rf"'.*n001/000\.JPEG' {message}") as caught:
            data.load(CHOICE, root=root)
        assert "\n" not in str(caught.value)
    bomb.write_bytes((tmp_path / "val" / "n001" / "001.JPEG").read_bytes())
    monkeypatch.setattr(decoding, "MOST_PIXELS", 63)
    with pytest.raises(UserError, match="says it is 8 x 8 pixels, more than the 63 that are read"):
        data.load(CHOICE + ",split_seed=5", root=root)
