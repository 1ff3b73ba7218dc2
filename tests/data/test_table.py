"""A user's own table of pictures, in every state it may be in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from isofed import data
from isofed.errors import UserError

HEAD = "picture,label,site,patient"


def clinic(root: Path, count: int = 40) -> list[str]:
    """Pictures whose shade is their number, of two sites, two findings and patients with four pictures each."""
    lines = []
    (root / "scans").mkdir(parents=True)
    for n in range(count):
        Image.new("RGB", (6, 5), (n, 2 * n, 0)).save(root / "scans" / f"{n}.png")
        finding = ("benign", "malignant")[n // 4 % 2]
        lines.append(f"scans/{n}.png,{finding},{('north', 'south')[n // 8 % 2]},p{n // 4}")
    return lines


def write(root: Path, *lines: str, name: str = "scans.csv") -> Path:
    path = root / name
    path.write_text("\n".join(lines) + "\n")
    return path


def numbers(part: data.Part) -> list[int]:
    return part.images[:, 0, 0, 0].tolist()


def test_a_table_says_class_site_and_patient(tmp_path: Path) -> None:
    made = data.load(str(write(tmp_path, HEAD, *clinic(tmp_path))) + ":size=4")
    assert (made.name, made.classes, made.domains) == ("scans", ("benign", "malignant"), ("north", "south"))
    assert made.shape == (3, 4, 4) and not made.notes
    assert len(made.test) == 8 and sorted(numbers(made.train) + numbers(made.test)) == list(range(40))
    for part in (made.train, made.test):
        assert part.domains is not None and part.groups is not None
        assert part.labels.tolist() == [n // 4 % 2 for n in numbers(part)]
        assert part.domains.tolist() == [n // 8 % 2 for n in numbers(part)]
    assert not {n // 4 for n in numbers(made.train)} & {n // 4 for n in numbers(made.test)}, "whole patients"
    rest, held = data.validation_split(made, 0.25, seed=0)
    assert not {n // 4 for n in numbers(rest.train)} & {n // 4 for n in numbers(held)}
    assert data.load("table:size=4", root=str(tmp_path / "scans.csv")).fingerprint == made.fingerprint


def test_the_table_may_say_which_part(tmp_path: Path) -> None:
    lines = [f"{line},{'Test' if n % 4 == 0 else 'train'}" for n, line in enumerate(clinic(tmp_path))]
    made = data.load(write(tmp_path, f"{HEAD},part", *lines))
    assert numbers(made.test) == list(range(0, 40, 4)) and len(made.train) == 30
    assert made.notes == (
        "10 groups have samples in both parts, so the test is not one of groups (such as patients) never seen",
    )
    only = [line for line in lines if line.endswith("train")]
    assert len(data.load(write(tmp_path, f"{HEAD},part", *only)).test) == 6  # a fifth: two patients of three pictures
    with pytest.raises(UserError, match="has no picture whose part is 'train'"):
        data.load(write(tmp_path, f"{HEAD},part", *(line for line in lines if line.endswith("Test"))))


def test_columns_may_be_called_otherwise_and_names_lack_an_ending(tmp_path: Path) -> None:
    rows = [line.replace(".png", "").split(",") for line in clinic(tmp_path)]
    lines = [f"{age};{row[1]};{row[3]};{row[0]}" for age, row in enumerate(rows)]
    path = write(tmp_path, "age;dx;lesion_id;image_id", "", *lines, name="meta data.csv")
    made = data.load(f"{path}:picture=image_id,label=dx,patient=lesion_id,suffix=.png,channels=grey")
    assert made.classes == ("benign", "malignant") and made.domains == () and made.shape == (1, 32, 32)
    assert made.train.groups is not None
    assert made.notes == ("the column 'age' of 'meta data.csv' is not used",)


def test_a_tab_quotes_and_a_mark_at_the_beginning_do_no_harm(tmp_path: Path) -> None:
    lines = [line.replace(",", "\t").replace("benign", '"benign, or so"') for line in clinic(tmp_path)]
    path = write(tmp_path, "\ufeff" + HEAD.replace(",", "\t"), *lines, name="scans.tsv")
    assert data.load(path).classes == ("benign, or so", "malignant")


def test_cells_may_have_anything_in_quotes(tmp_path: Path) -> None:
    odd = '"a label, of\ntwo lines; and a\tpage\x0cor\u2028so"'
    lines = [line.replace("benign", odd) for line in clinic(tmp_path)]
    assert data.load(write(tmp_path, "", HEAD, *lines)).classes == (odd[1:-1], "malignant")
    lines = [line.replace("benign", odd[1:-1].partition("page")[2]) for line in clinic(tmp_path / "other")]
    assert data.load(write(tmp_path / "other", HEAD, *lines)).classes == ("malignant", "or\u2028so")


def test_without_patients_a_picture_stands_for_itself(tmp_path: Path) -> None:
    made = data.load(write(tmp_path, "picture,label", *(",".join(c.split(",")[:2]) for c in clinic(tmp_path))))
    assert made.train.groups is None and np.bincount(made.test.labels.numpy()).tolist() == [4, 4]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    good = clinic(tmp_path)
    cases = [
        ([HEAD], "has no pictures: it needs the names of the columns, and a line for each picture"),
        ([], "has no pictures"),
        (["file,label", *good], r"line 2 of .* has 4 cells, and the first line names 2 columns"),
        (
            ["file,label,site,patient", *good],
            "has no column 'picture': it has the columns 'file', 'label', .*; say which",
        ),
        (["picture,label,label,patient", *good], "has several columns 'label'"),
        ([HEAD, *good, "scans/1.png,,north,p1"], "line 42 of .* has nothing in the column 'label': fill it or leave"),
        ([HEAD, *good, ",,north,"], "line 42 .* nothing in the column 'picture', and 2 other cells are empty"),
        ([HEAD, *good, ",,north,p"], "line 42 .* nothing in the column 'picture', and 1 other cell is empty"),
        ([HEAD, *good, "scans/../scans/3.png,benign,north,p9"], "names the picture .* twice, in the lines 5 and 42"),
        (
            [HEAD, *good, "scans,benign,north,p9"],
            "is not there: paths begin .*, and this is a folder: name each picture",
        ),
        ([HEAD, *good, "scans\\\\9.png,benign,north,p9"], "is not there: paths begin .*, with / between folders"),
        ([HEAD, *good, good[0].replace("north", '"north')], "after line 41.: is a quotation mark open"),
        ([HEAD, *good, good[3]], r"names the picture 'scans/3\.png' twice, in the lines 5 and 42"),
        ([HEAD, *good, "scans/99.png,benign,north,p9"], r"scans/99\.png', which line 42 .* is not there: paths begin"),
        ([HEAD, *good, "a,benign,north,p", "b,benign,north,p"], "2 of the 42 pictures .* suffix=.jpg adds an ending"),
        ([HEAD, *good, f"{'9' * 300}.png,benign,north,p9"], "which line 42 .* names, is not there"),
        ([HEAD, *good, "~nobody/9.png,benign,north,p9"], "which line 42 .* names, is not there"),
        ([HEAD, *good, "9\0.png,benign,north,p9"], "which line 42 .* names, is not there"),
        ([f"{HEAD},part", *(f"{line},valid" for line in good)], "the part is 'valid': it must be train or test"),
        ([HEAD, *(line.replace("malignant", "benign") for line in good)], "has one class, 'benign'"),
        ([HEAD, '"scans/1.png,benign'], "cannot be read as a table"),
    ]
    for lines, message in cases:
        with pytest.raises(UserError, match=message):
            data.load(write(tmp_path, *lines))
    with pytest.raises(UserError, match="has no column 'dx', which label= names"):
        data.load(f"{write(tmp_path, HEAD, *good)}:label=dx")
    with pytest.raises(UserError, match="is a folder: data set 'table' needs a .csv file"):
        data.load("table", root=str(tmp_path))
    alike = [*good[:-1], good[-1].replace("benign", "Benign").replace("malignant", "Malignant")]
    assert "write them alike in the table if they are the same" in data.load(write(tmp_path, HEAD, *alike)).notes[0]
    (tmp_path / "scans.csv").write_bytes(b"picture,label\nb\xe4.png,x\n")
    with pytest.raises(UserError, match="cannot be read as text"):
        data.load(tmp_path / "scans.csv")
    (tmp_path / "scans.csv").write_bytes("picture,label".encode("utf-16"))
    with pytest.raises(UserError, match="cannot be read as text .it is not in UTF-8: save it in that encoding"):
        data.load(tmp_path / "scans.csv")


def test_names_of_columns_may_have_other_letters(tmp_path: Path) -> None:
    made = data.load(write(tmp_path, "Picture,LABEL,Site,Patient", *clinic(tmp_path)))
    assert made.domains == ("north", "south") and made.train.groups is not None and not made.notes
    lines = [f"{line},x" for line in clinic(tmp_path / "b")]
    both = write(tmp_path / "b", "Picture,LABEL,Site,Patient,site", *lines)
    assert data.load(f"{both}:site=Site").domains == ("north", "south")
    with pytest.raises(UserError, match="has several columns 'SITE'"):
        data.load(f"{both}:site=SITE")


def test_a_column_can_be_left_alone(tmp_path: Path) -> None:
    lines = [f"{line},arm" for line in clinic(tmp_path)]
    path = write(tmp_path, "picture,label,site,patient,part", *lines)
    with pytest.raises(UserError, match="the part is 'arm'"):
        data.load(path)
    made = data.load(f"{path}:part=none,patient=none")
    assert made.train.groups is None and made.domains == ("north", "south")
    assert made.notes == ("the columns 'patient', 'part' of 'scans.csv' are not used",)
    with pytest.raises(UserError, match="has no column 'none', which label= names"):
        data.load(f"{path}:label=none")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_separator_may_be_said_as_excel_does(tmp_path: Path, end: str) -> None:
    lines = [line.replace(",", ";") for line in [HEAD, *clinic(tmp_path)]]
    path = tmp_path / "scans.csv"
    path.write_bytes(end.join(["sep=;", *lines]).encode())
    assert data.load(path).classes == ("benign", "malignant")
    path.write_bytes(end.join(["sep=;", *lines, lines[1]]).encode())
    with pytest.raises(UserError, match="twice, in the lines 3 and 43"):
        data.load(path)
