"""HAM10000: institutions as domains, lesions kept whole, and tables in every state they may be in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from isofed import data
from isofed.data import partition
from isofed.errors import UserError
from tests.data.picture_tools import Painter

HEAD = "lesion_id,image_id,dx,dx_type,age,sex,localization,dataset"
DOMAINS = ("rosendahl", "vidir_modern", "vienna_dias")
CLASSES = ("bcc", "mel", "nv")
Row = tuple[str, str, str, str]  # lesion, picture, class, domain


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ISOFED_DATA", raising=False)


def rows() -> list[Row]:
    """Lesions of one to four pictures, one of which is in two domains."""
    rng = np.random.default_rng(5)
    made: list[Row] = []
    for d, domain in enumerate(DOMAINS):
        for c, label in enumerate(CLASSES):
            for lesion in range(12 + 5 * d):
                for _ in range(int(rng.integers(1, 5))):
                    made.append((f"HAM_{d}{c}{lesion:02}", f"ISIC_{len(made):04}", label, domain))
    made[0] = (made[0][0], made[0][1], made[0][2], "vienna_dias")
    return [made[i] for i in rng.permutation(len(made))]


def write(root: Path, table: list[Row], name: str = "HAM10000_metadata.csv", comma: str = ",") -> None:
    lines = [f"{lesion},{image},{dx},histo,50.0,male,back,{domain}" for lesion, image, dx, domain in table]
    (root / name).write_text("\n".join([HEAD, *lines]).replace(",", comma) + "\n")


@pytest.fixture
def painter(tmp_path: Path) -> Painter:
    painter = Painter(tmp_path / "HAM10000")
    names = sorted(f"{image}.jpg" for _, image, _, _ in rows())
    painter.paint("HAM10000_images_part_1", names[:100])
    painter.paint("HAM10000_images_part_2", names[100:])
    painter.paint("ISIC2018_Task3_Test_Images", ["ISIC_9999.jpg"])
    write(painter.root, rows())
    return painter


def test_classes_domains_and_labels_are_those_of_the_table(painter: Painter) -> None:
    made = data.load("ham10000:size=8", root=str(painter.root.parent))
    assert (made.classes, made.domains) == (CLASSES, DOMAINS)
    assert (made.mean, made.std) == ((0.5,) * 3, (0.5,) * 3)
    known = {image: (dx, domain) for _, image, dx, domain in rows()}
    seen = []
    for part in (made.train, made.test):
        assert part.domains is not None
        for file, label, domain in zip(painter.find(part), part.labels, part.domains, strict=True):
            assert known[file.stem] == (made.classes[label], made.domains[domain])
            seen.append(file.stem)
    assert sorted(seen) == sorted(known)
    places = partition.split("domain", made.train, None, 3, 0, made.domains)
    assert made.train.domains is not None
    assert [len(p) for p in places] == np.bincount(made.train.domains.numpy()).tolist()
    assert data.load("ham10000", root=str(painter.root)).shape == (3, 96, 96)


@pytest.mark.parametrize("split", ["feduv", "fedbn"])
@pytest.mark.parametrize("seed", range(5))
def test_a_lesion_is_on_one_side(painter: Painter, split: str, seed: int) -> None:
    made = data.load(f"ham10000:size=8,split={split},split_seed={seed}", root=str(painter.root))
    lesion = {image: name for name, image, _, _ in rows()}
    train, test = ({lesion[file.stem] for file in painter.find(part)} for part in (made.train, made.test))
    assert not train & test
    tested = Counter(lesion[file.stem] for file in painter.find(made.test))
    assert tested == {name: count for name, count in Counter(lesion.values()).items() if name in tested}, "whole ones"


def test_a_lesion_is_on_one_side_of_a_validation_part(painter: Painter) -> None:
    made, held = data.validation_split(data.load("ham10000:size=8", root=str(painter.root)), 0.2, seed=0)
    lesion = {image: name for name, image, _, _ in rows()}
    train, valid = ({lesion[file.stem] for file in painter.find(part)} for part in (made.train, held))
    assert train and valid and not train & valid


def test_about_a_fifth_of_each_class_and_domain_is_for_testing(painter: Painter) -> None:
    made = data.load("ham10000:size=8", root=str(painter.root))
    known = {image: (dx, domain) for _, image, dx, domain in rows()}
    total = Counter(known.values())
    tested = Counter(known[file.stem] for file in painter.find(made.test))
    moved = ("bcc", "rosendahl"), ("bcc", "vienna_dias")  # these share a lesion
    for group, count in total.items():
        assert abs(tested[group] - 0.2 * count) <= (4 if group in moved else 1), group
    assert 0.17 < len(made.test) / len(known) < 0.21


def test_the_choice_depends_on_the_split_seed_and_not_on_the_order_of_the_table(painter: Painter) -> None:
    made = data.load("ham10000:size=8", root=str(painter.root))
    write(painter.root, sorted(rows()))
    assert data.load("ham10000:size=8", root=str(painter.root)).fingerprint == made.fingerprint
    assert painter.find(data.load("ham10000:size=8,split_seed=1", root=str(painter.root)).test) != painter.find(
        made.test
    )


def test_equal_domains(painter: Painter) -> None:
    whole, made = (data.load(f"ham10000:size=8,split={split}", root=str(painter.root)) for split in ("feduv", "fedbn"))
    assert whole.train.domains is not None and made.train.domains is not None
    keep = int(0.5 * np.bincount(whole.train.domains.numpy()).min())
    assert np.bincount(made.train.domains.numpy()).tolist() == [keep] * 3
    assert painter.find(made.test) == painter.find(whole.test)


@pytest.mark.parametrize(("name", "comma"), [("HAM10000_metadata", ","), ("HAM10000_metadata.tab", "\t")])
def test_other_names_of_the_table_and_one_folder_of_pictures(painter: Painter, name: str, comma: str) -> None:
    made = data.load("ham10000:size=8", root=str(painter.root))
    (painter.root / "HAM10000_metadata.csv").unlink()
    write(painter.root, rows(), name, comma)
    (painter.root / "HAM10000_images_part_1").rename(painter.root / "images")
    assert data.load("ham10000:size=8", root=str(painter.root)).fingerprint == made.fingerprint


def test_tables_that_are_wrong_are_refused(painter: Painter) -> None:
    table = painter.root / "HAM10000_metadata.csv"
    good = table.read_text()
    first = good.splitlines()[1]
    image = first.split(",")[1]
    cases: list[tuple[str | bytes, str]] = [
        ("", "has no column 'lesion_id': it needs lesion_id, image_id, dx, dataset"),
        (HEAD, "HAM10000_metadata.csv' has no rows: it needs one for each picture"),
        (
            good.replace(",dataset\n", ",place\n", 1),
            "has no column 'dataset', which only the publishers' own table has",
        ),
        (good.replace("dx,", "diagnosis,", 1), "has no column 'dx': it needs"),
        (good + "HAM_1,ISIC_0000\n", "row .* of '.*csv' has nothing in the column 'dx'"),
        (good + ",ISIC_7,nv,,,,,rosendahl\n", "has nothing in the column 'lesion_id'"),
        (good + first + "\n", f"row {len(rows()) + 1} of '.*' names the picture {image} a second time"),
        (good + '"HAM_1" x,ISIC_8,nv,,,,,rosendahl\n', "cannot be read as a table with commas"),
        (
            good + "HAM_1,ISIC_7777,nv,,,,,rosendahl\n",
            "names the picture ISIC_7777, which is not in HAM10000_images_part_1",
        ),
        (b"\xff\xfe\x00", "csv' cannot be read as text"),
    ]
    for content, message in cases:
        table.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UserError, match=message):
            data.load("ham10000:size=8", root=str(painter.root))


def test_missing_pictures_are_named(painter: Painter) -> None:
    gone = painter.root / "HAM10000_images_part_2" / "ISIC_0150.jpg"
    gone.unlink()
    with pytest.raises(
        UserError, match="names the picture ISIC_0150, which is not in HAM10000_images_part_1 or HAM10000"
    ):
        data.load("ham10000", root=str(painter.root))
    for part in (1, 2):
        (painter.root / f"HAM10000_images_part_{part}").rename(painter.root / f"pictures_{part}")
    with pytest.raises(
        UserError, match="has no pictures: 'ham10000' needs HAM10000_images_part_1/ and _2/, or images/"
    ):
        data.load("ham10000", root=str(painter.root))
    (painter.root / "HAM10000_metadata.csv").unlink()
    with pytest.raises(UserError, match=r"does not hold data set 'ham10000': there is no HAM10000_metadata\.csv or"):
        data.load("ham10000", root=str(painter.root))
