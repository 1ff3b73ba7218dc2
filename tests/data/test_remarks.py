"""What a person should know about data that are read: what is left out is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from isofed import Federation
from isofed.config import settings
from isofed.data import load
from isofed.data.sources import items
from isofed.display import remarks
from isofed.engine.world import World
from isofed.errors import UserError
from tests.cli_tools import SMALL, succeeds


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4, 3), 7, dtype=np.uint8)).save(path)


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    for site in ("a", "b"):
        for label in ("cat", "dog"):
            for number in range(6):
                picture(tmp_path / "sites" / site / label / f"{number}.png")
    return tmp_path / "sites"


def test_samples_that_a_split_gives_to_nobody_are_counted(tmp_path: Path) -> None:
    (tmp_path / "split.json").write_text(json.dumps([list(range(100)), list(range(100, 160))]))
    words = [word for word in SMALL if not word.startswith(("partition", "clients"))]
    said = "note: 40 training samples are with nobody\n"
    shown = succeeds("data", SMALL[0].partition("=")[2], "partition=from_file:split.json", cwd=tmp_path)
    assert said in shown and said in succeeds("run", *words, "partition=from_file:split.json", "rounds=1", cwd=tmp_path)
    for partition, clients in (("iid", 3), ("dirichlet:0.5", 2)):
        s = settings({"data": "synthetic:samples=100,test=20", "partition": partition, "clients": clients})
        assert remarks(World.create(s)) == []


def test_one_sample_is_one_sample(tmp_path: Path) -> None:
    (tmp_path / "split.json").write_text(json.dumps([list(range(99))]))
    s = settings({"data": "synthetic:samples=100,test=20", "partition": f"from_file:{tmp_path / 'split.json'}"})
    assert remarks(World.create(s)) == ["1 training sample is with nobody"]


def test_a_picture_beside_the_folders_is_told(sites: Path) -> None:
    assert load(str(sites)).notes == load(str(sites / "a")).notes == ()
    picture(sites / "stray.png")
    picture(sites / "a" / "stray.png")
    picture(sites / "a" / "stray2.png")
    above = f"the picture '{sites / 'stray.png'}' lies beside the site folders and is not used"
    beside = f"2 pictures lie beside the class folders and are not used, the first is '{sites / 'a' / 'stray.png'}'"
    dataset = load(str(sites))
    assert dataset.notes == (above, beside) and load(str(sites / "a")).notes == (beside,)
    run = Federation(dataset=dataset, partition="domain", rounds=1, validation=0.25)
    assert remarks(run.world) == [above, beside]
    assert f"note: {above}\n" in succeeds("data", str(sites), "partition=domain")
    (sites / "stray.png").unlink()
    shutil.rmtree(sites / "a")
    assert load(str(sites)).notes == ()


def test_files_in_class_folders_that_are_not_used_are_told(sites: Path) -> None:
    for number in range(7):
        (sites / "a" / "cat" / f"scan{number}.dcm").write_bytes(b"no picture")
    (sites / "a" / "cat" / ".hidden.dcm").write_bytes(b"")
    first = f"the first '{sites / 'a' / 'cat' / 'scan0.dcm'}'"
    reads = "isofed reads .bmp, .gif, .jpeg, .jpg, .pgm, .png, .ppm, .tif, .tiff, .webp"
    unread = f"7 files in class folders, {first}, are not read: {reads}"
    assert load(str(sites)).notes == load(str(sites / "a")).notes == (unread,)
    for place in ("more", "more/still", ".cache"):
        picture(sites / "b" / "dog" / place / "1.png")
    first = f"the first '{sites / 'b' / 'dog' / 'more' / '1.png'}'"
    deeper = f"2 files in folders inside class folders, {first}, are not used: pictures belong into the class folder"
    dataset = load(str(sites))
    assert dataset.notes == (unread, f"{deeper} itself") and len(dataset.train) + len(dataset.test) == 24
    assert f"note: {unread}\n" in succeeds("data", str(sites), "partition=domain")
    shutil.rmtree(sites / "b" / "dog" / "more" / "still")
    for number in range(1, 7):
        (sites / "a" / "cat" / f"scan{number}.dcm").unlink()
    one, other = load(str(sites)).notes
    assert one == f"the file '{sites / 'a' / 'cat' / 'scan0.dcm'}' in a class folder is not read: {reads}"
    assert other.startswith(f"the file '{sites / 'b' / 'dog' / 'more' / '1.png'}' in a folder inside a class folder is")


@pytest.mark.parametrize("keep", [0, 1 << 20])
def test_what_is_lost_of_pictures_is_told_each_time(sites: Path, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    monkeypatch.setattr(items, "WORTH_KEEPING", keep)
    deep = Image.fromarray(np.full((4, 4), 4000, dtype=np.uint16))
    deep.save(sites / "a" / "cat" / "7.png")
    said = (
        f"the picture '{sites / 'a' / 'cat' / '7.png'}' has 16 bits a channel, of which the upper 8 are read, so that "
        "12-bit values become 0 to 15: floating point in an .npz file keeps them"
    )
    for _ in range(2):
        assert load(str(sites)).notes == (said,)
    frames = [Image.new("L", (4, 4), level) for level in (10, 200)]
    for number in range(3):
        frames[0].save(sites / "b" / "cat" / f"9{number}.tif", save_all=True, append_images=frames[1:])
        deep.save(sites / "a" / "cat" / f"8{number}.png")
    for _ in range(2):
        one, other = load(str(sites)).notes
        assert one.startswith("4 pictures, the first '") and one.endswith(said.split("7.png' has")[1])
        assert other.startswith("3 files, the first '")
        assert other.endswith("', hold several pictures (pages or frames), of which the first is read")


def test_classes_that_differ_by_case_or_blanks_are_told(sites: Path) -> None:
    (sites / "b" / "cat").rename(sites / "b" / "Cat ")
    said = "'Cat ' and 'cat' are two classes, though their names differ by case or blanks only"
    dataset = load(str(sites))
    assert dataset.classes == ("Cat ", "cat", "dog")
    (note,) = dataset.notes
    assert note.startswith(said) and note.endswith("rename the folders if they are the same")


def test_classes_and_sites_without_a_test_picture_are_told(tmp_path: Path, sites: Path) -> None:
    picture(sites / "a" / "rare" / "0.png")
    assert load(str(sites)).notes == ("there is no test picture of class 'rare', so no accuracy tells of it",)
    for n in range(7):
        picture(sites / "b" / f"rare{n}" / "0.png")
    said = "there is no test picture of class 'rare', 'rare0', 'rare1', 'rare2', 'rare3' and 3 more, so no accuracy"
    assert load(str(sites)).notes[0].startswith(said)
    for part, where in (("train", "ab"), ("test", "b")):
        for site in where:
            for label in ("cat", "dog"):
                picture(tmp_path / "own" / part / site / label / "0.png")
    assert load(str(tmp_path / "own")).notes == ("there is no test picture of site 'a', so no accuracy tells of it",)


def test_all_broken_pictures_are_counted_and_some_named(sites: Path) -> None:
    broken = [sites / "a" / "cat" / f"{number}.png" for number in range(5)]
    broken[0].write_bytes(b"nothing")
    with pytest.raises(
        UserError, match=rf"^the picture '{broken[0]}' cannot be read \(not a picture in a known format\)"
    ):
        load(str(sites))
    for file in broken:
        file.write_bytes(b"nothing")
    with pytest.raises(UserError) as caught:
        load(str(sites))
    said = str(caught.value)
    assert said.startswith("5 of 24 pictures are broken: '") and said.endswith(", ...; replace or remove them")
    assert said.count("(not a picture in a known format)") == 3
