"""The table and the picture of a split."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from isofed.data import describe
from isofed.errors import UserError

COUNTS = np.array([[30, 0, 10], [0, 0, 0], [1000, 2000, 1000]])
NAMES = ("cat", "dog", "emu")


def test_table_of_a_small_split() -> None:
    made = describe.table(COUNTS, NAMES)
    assert made.columns == ("client", "samples", "classes", "largest", "cat", "dog", "emu")
    assert made.rows == (
        ("0", "40", "2", "cat 75%", "30", ".", "10"),
        ("1", "0", "0", "-", ".", ".", "."),
        ("2", "4,000", "3", "dog 50%", "1,000", "2,000", "1,000"),
        ("all", "4,040", "3", "dog 50%", "1,030", "2,000", "1,010"),
    )


def test_table_with_domains_and_many_clients_and_classes() -> None:
    counts = np.ones((100, 40), dtype=np.int64)
    made = describe.table(counts, [f"c{i}" for i in range(40)], domains=["photo"] * 100, most_clients=5)
    assert made.columns == ("client", "domain", "samples", "classes", "largest")
    assert [row[0] for row in made.rows] == ["0", "1", "2", "...", "98", "99", "all"]
    assert made.rows[3] == ("...", "95 more", "", "", "")
    assert made.rows[0] == ("0", "photo", "40", "40", "c0 2%")
    assert made.rows[-1][2] == "4,000"
    assert {len(row) for row in made.rows} == {5}


def test_domains_of_clients() -> None:
    assert describe.domains_of(np.array([[0, 3], [2, 1], [0, 0]]), ("a", "b")) == ["b", "mixed", "-"]


@pytest.mark.parametrize("shape", [(3, 3), (1, 2), (100, 200), (300, 5)])
def test_picture_is_drawn_and_reads_in_grey(tmp_path: Path, shape: tuple[int, int]) -> None:
    counts = np.random.default_rng(0).integers(0, 50, shape)
    names = [f"class {i}" for i in range(shape[1])]
    path = describe.picture(counts, names, tmp_path / "split.png", title="a split")
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    assert pixels.shape[0] > 300 and pixels.shape[1] > 500
    grey = pixels.mean(2)
    assert (grey > 240).mean() > 0.2
    assert (grey < 110).mean() > 0.005
    assert np.ptp(pixels, axis=2).max() < 80, "one hue: nothing is said by colour alone"


def test_bubbles_are_where_the_samples_are(tmp_path: Path) -> None:
    counts = np.zeros((6, 6), dtype=np.int64)
    counts[0, 0] = 10
    ink = {}
    for label in (0, 5):
        moved = np.roll(counts, label, axis=1)
        pixels = np.asarray(Image.open(describe.picture(moved, list("abcdef"), tmp_path / "a.png")).convert("L"))
        ink[label] = (pixels < 90).astype(int)
    gone, come = (np.argwhere(ink[a] > ink[b]) for a, b in ((0, 5), (5, 0)))
    assert len(gone) > 20
    assert abs(len(gone) - len(come)) < 0.1 * len(gone)
    assert come[:, 0].mean() > gone[:, 0].mean() + 50, "a later class is drawn lower"
    assert abs(come[:, 1].mean() - gone[:, 1].mean()) < 2, "for the same client"


@pytest.mark.parametrize("suffix", ["svg", "pdf", "png"])
def test_the_same_split_gives_the_same_file(tmp_path: Path, suffix: str) -> None:
    one, two = (describe.picture(COUNTS, NAMES, tmp_path / f"{i}.{suffix}").read_bytes() for i in range(2))
    assert one == two
    if suffix == "svg":
        assert b"<svg" in one and b">dog<" in one


def test_an_empty_split_can_be_drawn(tmp_path: Path) -> None:
    assert describe.picture(np.zeros((2, 3), dtype=np.int64), NAMES, tmp_path / "a.png").stat().st_size > 1000


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"written as \.png, \.svg or \.pdf, not 'a\.xls'"):
        describe.picture(COUNTS, NAMES, tmp_path / "a.xls")
    with pytest.raises(UserError, match=r"there is no folder '.*none' to write 'a\.png' into"):
        describe.picture(COUNTS, NAMES, tmp_path / "none" / "a.png")
    with pytest.raises(UserError, match="nothing to draw"):
        describe.picture(np.zeros((0, 3), dtype=np.int64), NAMES, tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pictures need matplotlib: pip install 'matplotlib>="):
        describe.picture(COUNTS, NAMES, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
