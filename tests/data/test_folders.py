"""A user's own folders of pictures, in every state they may be in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from isofed import data
from isofed.data.sources import decode as decoding
from isofed.errors import UserError


def draw(path: Path, level: int = 100, size: tuple[int, int] = (7, 5), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, level if mode != "RGB" else (level, level // 2, 0)).save(path)


def tree(root: Path, *places: str, count: int = 5) -> Path:
    """Pictures whose shade says where they are."""
    for number, place in enumerate(places):
        for i in range(count):
            draw(root / place / f"{i}.png", 10 + 40 * number + i)
    return root


def test_class_folders_become_classes_in_alphabetical_order(tmp_path: Path) -> None:
    root = tree(tmp_path / "pets", "dog", "cat", "emu", count=10)
    (root / ".cache").mkdir()
    (root / "cat" / "notes.txt").write_text("not a picture")
    (root / "cat" / ".hidden.png").write_bytes(b"not a picture either")
    made = data.load("folder:size=4", root=str(root))
    assert made.name == "pets"
    assert made.classes == ("cat", "dog", "emu")
    assert made.shape == (3, 4, 4)
    assert (len(made.train), len(made.test)) == (24, 6)
    shade = {"dog": 10, "cat": 50, "emu": 90}
    for part in (made.train, made.test):
        for image, label in zip(part.images, part.labels, strict=True):
            first = shade[made.classes[int(label)]]
            assert first <= int(image[0, 0, 0]) < first + 10
            assert int(image[..., 0].min()) == int(image[..., 0].max())
    assert data.load(str(root)).classes == made.classes
    assert data.load(f"{root}:size=4").fingerprint == made.fingerprint


def test_train_and_test_folders_are_the_parts(tmp_path: Path) -> None:
    tree(tmp_path, "train/cat", "train/dog", "test/dog", count=3)
    made = data.load(str(tmp_path))
    assert (len(made.train), len(made.test)) == (6, 3)
    assert made.test.labels.tolist() == [1, 1, 1]
    assert made.test.images[:, 0, 0, 0].tolist() == [90, 91, 92]


@pytest.mark.parametrize(("train", "test"), [("Train", "Test"), ("TRAIN", "test"), ("Training", "Testing")])
@pytest.mark.parametrize("sites", [False, True])
def test_the_parts_may_be_called_in_other_ways(tmp_path: Path, train: str, test: str, sites: bool) -> None:
    """They were two sites, one of which trained on the test pictures."""
    within = ("a/", "b/") if sites else ("",)
    places = [f"{part}/{site}{kind}" for part in (train, test) for site in within for kind in ("cat", "dog")]
    made = data.load(str(tree(tmp_path, *places, count=3)))
    assert (len(made.train), len(made.test)) == (6 * len(within), 6 * len(within))
    assert made.domains == (("a", "b") if sites else ()) and made.classes == ("cat", "dog") and not made.notes
    assert int(made.test.images[..., 0].min()) > int(made.train.images[..., 0].max())


def test_what_lies_beside_the_parts_is_told(tmp_path: Path) -> None:
    made = data.load(str(tree(tmp_path, "train/cat", "train/dog", "test/dog", "val/cat")))
    hint = "; validation=0.1 sets a part of the training pictures aside"
    assert made.notes[0] == f"the folder 'val' beside train/ and test/ is not used{hint}"
    tree(tmp_path, "extra/cat", "more/dog")
    assert (
        data.load(str(tmp_path)).notes[0].startswith("the folders 'extra', 'more', 'val' beside train/ and test/ are")
    )


@pytest.mark.parametrize("site", ["test", "Testing", "valid"])
def test_a_test_part_is_not_taken_for_a_site(tmp_path: Path, site: str) -> None:
    root = tree(tmp_path, "mine/cat", "mine/dog", f"{site}/cat", f"{site}/dog")
    with pytest.raises(UserError, match=f"{site}' would be read as a site: where a training and a test part are meant"):
        data.load(str(root))
    assert data.load("domain-folder", root=str(root)).domains == tuple(sorted(["mine", site]))
    tree(tmp_path, "train/cat", "Train/dog")
    with pytest.raises(UserError, match=r"has Train/ and train/: keep the one that is meant"):
        data.load(str(root))


def test_a_table_beside_pictures_is_pointed_to(tmp_path: Path) -> None:
    (tmp_path / "scans.csv").write_text("picture,label\n")
    with pytest.raises(UserError, match="or name the table that lists them, data=.*scans.csv"):
        data.load(str(tmp_path))
    draw(tmp_path / "1.png")
    with pytest.raises(UserError, match="holds pictures but no class folders: .*, or name the table .*scans.csv"):
        data.load(str(tmp_path))


def test_numbered_patients_in_classes_are_told_of(tmp_path: Path) -> None:
    places = [f"{kind}/p{n}" for kind in ("benign", "malignant") for n in range(1, 6)]
    made = data.load(str(tree(tmp_path / "pets", *places, count=2)))
    assert made.notes[0] == (
        "p1, p2, p3, ... are read as classes and benign, malignant as sites; "
        "if they are patients in classes, list them in a table"
    )
    assert not data.load(str(tree(tmp_path / "digits", "a/0", "a/1", "b/0", "b/1", count=10))).notes


def test_links_are_not_followed_in_search_of_what_is_not_used(tmp_path: Path) -> None:
    root = tree(tmp_path, "cat", "dog")
    for kind in ("cat", "dog"):
        (root / kind / "up").symlink_to(root)  # and round and round
    assert not data.load(str(root)).notes


def test_a_train_folder_alone_is_divided_and_train_can_be_a_class(tmp_path: Path) -> None:
    made = data.load(str(tree(tmp_path / "a", "train/cat", "train/dog")))
    assert (made.classes, len(made.train), len(made.test)) == (("cat", "dog"), 8, 2)
    made = data.load(str(tree(tmp_path / "b", "train", "plane")))
    assert (made.classes, len(made.train)) == (("plane", "train"), 8)


@pytest.mark.parametrize("parted", [False, True])
def test_domain_folders(tmp_path: Path, parted: bool) -> None:
    places = ["sketch/cat", "photo/dog", "photo/cat"]  # a domain may lack a class
    if parted:
        places = [f"{part}/{place}" for part in ("train", "test") for place in places]
    tree(tmp_path / "pets", *places)
    made = data.load(str(tmp_path / "pets"))
    assert made.fingerprint == data.load("domain-folder", root=str(tmp_path / "pets")).fingerprint
    assert (made.classes, made.domains) == (("cat", "dog"), ("photo", "sketch"))
    assert made.train.domains is not None and made.test.domains is not None
    count = [5, 5, 5] if parted else [4, 4, 4]
    # photo/cat, photo/dog, sketch/cat
    assert torch.bincount(made.train.domains * 2 + made.train.labels).tolist() == count
    assert len(made.test) == (15 if parted else 3)
    shade = made.train.images[:, 0, 0, 0]
    assert bool((shade[made.train.domains == 1] < 15).all())
    assert bool((shade[made.train.domains == 0] >= 50).all())


@pytest.mark.parametrize("parted", [False, True])
def test_patients_in_classes_are_not_taken_for_classes_at_sites(tmp_path: Path, parted: bool) -> None:
    places = [f"benign/patient{n}" for n in range(4)] + [f"malignant/patient{n}" for n in range(4, 6)]
    root = tree(tmp_path / "our clinic", *(f"{part}/{p}" for part in ("train", "test") for p in places if parted))
    tree(root, *places if not parted else [])
    with pytest.raises(UserError) as caught:
        data.load(str(root))
    assert str(caught.value) == (
        f"'{root}' would be read as site/class/picture, but no class is at two sites: 'benign' has patient0, patient1, "
        "... and 'malignant' has patient4, patient5. If 'benign' and 'malignant' are classes, put their pictures into "
        f"them directly, as class/picture; if they are sites, say so: data=domain-folder root='{root}'"
    )
    assert data.load("domain-folder", root=str(root)).domains == ("benign", "malignant")


def test_sites_of_one_class_each_can_be_said_to_be_sites(tmp_path: Path) -> None:
    root = tree(tmp_path, "a/cat", "b/dog")
    with pytest.raises(UserError, match="no class is at two sites: 'a' has cat and 'b' has dog"):
        data.load(str(root))
    made = data.load("domain-folder", root=str(root))
    assert (made.classes, made.domains) == (("cat", "dog"), ("a", "b"))
    assert data.load(str(tree(tmp_path / "one", "a/cat", "a/dog"))).domains == ("a",)
    assert data.load(str(tree(tmp_path / "case", "a/cat", "a/dog", "b/Cat"))).domains == ("a", "b")


def test_pictures_are_resized_like_pillow_does(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (2, 9, 14, 3), dtype=np.uint8)
    for name, value in zip(("cat", "dog"), values, strict=True):
        for part in ("train", "test"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(value).save(tmp_path / part / name / "1.png")
    colour, grey = data.load(f"{tmp_path}:size=6"), data.load(f"{tmp_path}:size=6,channels=grey")
    for place, value in enumerate(values):
        image = Image.fromarray(value)
        small = image.resize((6, 6), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(colour.train.images[place].numpy(), np.asarray(small))
        small = image.convert("L").resize((6, 6), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(grey.train.images[place, ..., 0].numpy(), np.asarray(small))


def test_other_kinds_of_pictures_are_read(tmp_path: Path) -> None:
    for folder in ("cat", "dog"):
        draw(tmp_path / folder / "a.JPG", 200)
        draw(tmp_path / folder / "b.png", 200, mode="L")
        draw(tmp_path / folder / "c.gif", 200, mode="P")
        draw(tmp_path / folder / "d.bmp", 200)
        draw(tmp_path / folder / "e.tif", 200, mode="L")
        Image.new("RGBA", (3, 3), (200, 200, 200, 10)).save(tmp_path / folder / "f.png")
        Image.fromarray(np.full((3, 3), 200 * 257, dtype=np.uint16)).save(tmp_path / folder / "g.png")
        Image.new("1", (3, 3), 1).save(tmp_path / folder / "h.png")
    made = data.load(f"{tmp_path}:channels=grey,size=3")
    assert len(made.train) + len(made.test) == 16
    levels = torch.cat([made.train.images, made.test.images])[:, 1, 1, 0].tolist()
    assert levels.count(255) == 2
    assert sum(abs(level - 200) <= 1 for level in levels) >= 8, "sixteen bits are scaled, transparency is dropped"


def test_progress_is_told(tmp_path: Path) -> None:
    tree(tmp_path, "train/cat", "train/dog", "test/dog", count=50)
    told: list[tuple[int, int]] = []
    data.load(str(tmp_path), progress=lambda done, total: told.append((done, total)))
    assert told == [(64, 150), (128, 150), (150, 150)]


def test_a_broken_picture_is_named(tmp_path: Path) -> None:
    tree(tmp_path, "cat", "dog")
    broken = tmp_path / "dog" / "9.png"
    good = (tmp_path / "dog" / "1.png").read_bytes()
    for content, why in ((b"", "not a picture in a known format"), (b"text", "not a picture"), (good[:50], "")):
        broken.write_bytes(content)
        with pytest.raises(
            UserError, match=rf"the picture '.*9\.png' cannot be read \(.*{why}.*\): replace or remove it"
        ):
            data.load(str(tmp_path))
    broken.unlink()
    Image.fromarray(np.zeros((3, 3), dtype=np.float32)).save(tmp_path / "dog" / "9.tif")
    with pytest.raises(UserError, match=r"9\.tif' cannot be read \(floating-point pictures have no fixed range"):
        data.load(str(tmp_path))


def test_a_picture_of_another_format_under_a_known_name_is_not_decoded(tmp_path: Path) -> None:
    tree(tmp_path, "cat", "dog")
    Image.new("RGB", (4, 4)).save(tmp_path / "dog" / "9.ico")
    (tmp_path / "dog" / "9.ico").rename(tmp_path / "dog" / "9.png")
    with pytest.raises(UserError, match="not a picture in a known format"):
        data.load(str(tmp_path))


def test_a_picture_too_large_to_unpack_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, "cat", "dog")
    draw(tmp_path / "dog" / "huge.png", size=(60, 50))
    monkeypatch.setattr(decoding, "MOST_PIXELS", 2000)
    with pytest.raises(UserError, match=r"huge\.png' says it is 60 x 50 pixels, more than the 2,000 that are read"):
        data.load(str(tmp_path))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow's own limit is reached first
    with pytest.raises(UserError, match=r"huge\.png' says it is larger than 2,000 pixels"):
        data.load(str(tmp_path))


def test_folders_that_are_wrong_are_refused(tmp_path: Path) -> None:
    def fresh(name: str, *places: str) -> str:
        (tmp_path / name).mkdir()
        return str(tree(tmp_path / name, *places))

    cases = [
        ("folder", None, "'folder' needs the path of a folder of class folders: give it as root=PATH"),
        ("domain-folder", None, "'domain-folder' needs the path of a folder of domain folders"),
        ("folder", "/nowhere", "there is no file or folder '/nowhere': root must be the path of a folder of class"),
        ("folder", fresh("a"), "has no class folders with pictures"),
        ("folder", fresh("b", "."), "has no class folders: put the pictures of each class into a folder"),
        ("folder", fresh("c", "cat"), "has one class, 'cat': there is nothing to tell apart"),
        ("folder", fresh("d", "photo/cat", "photo/dog"), "holds folders, not pictures: use 'domain-folder'"),
        ("domain-folder", fresh("e"), "has no folders in it: 'domain-folder' needs domain/class/picture"),
        ("domain-folder", fresh("f", "cat", "dog"), "cat' has no class folders: put the pictures of each class"),
        ("domain-folder", fresh("g", "x/photo/cat"), "holds folders, not pictures: it needs domain/class/picture"),
        ("folder", fresh("h", "train/cat", "train/dog", "val/cat"), r"has train/ but no test/ \(there is val\)"),
        (
            "folder",
            fresh("i", "train/cat", "train/dog", "test/emu"),
            "the class 'emu', which the training part does not",
        ),
        (
            "domain-folder",
            fresh("j", "train/a/cat", "train/a/dog", "test/b/cat"),
            "the domain 'b', which the training part does not have",
        ),
        ("folder:size=0", fresh("k", "cat", "dog"), "size of data set 'folder' must be from 1 to 4096 pixels, not 0"),
        ("domain-folder:size=9999", fresh("l", "a/cat"), "size of data set 'domain-folder' must be from 1 to 4096"),
        ("folder:channels=hsv", fresh("m", "cat", "dog"), "must be one of rgb, grey, not 'hsv'"),
    ]
    for text, root, message in cases:
        with pytest.raises(UserError, match=message):
            data.load(text, root=root)
    (tmp_path / "k" / "emu").mkdir()
    with pytest.raises(UserError, match="the class folder '.*emu' has no pictures: add some or remove it"):
        data.load(str(tmp_path / "k"))
    (tmp_path / "d" / "sketch" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match="the domain folder '.*sketch' has no pictures"):
        data.load(str(tmp_path / "d"))
    (tmp_path / "empty" / "photo" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match="no pictures in class/ or domain/class/ folders under"):
        data.load(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="holds pictures but no class folders"):
        data.load(str(tmp_path / "b"))
    with pytest.raises(UserError, match=r"0\.png' is a file: data set 'folder' needs"):
        data.load("folder", root=str(tmp_path / "c" / "cat" / "0.png"))


def test_a_folder_that_may_not_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, "cat", "dog")

    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match=r"the folder '.*' cannot be read \(Permission denied\)"):
        data.load("folder", root=str(tmp_path))
