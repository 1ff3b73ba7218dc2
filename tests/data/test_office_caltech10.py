"""Office-Caltech10: the sizes of the parts, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from isofed import data
from isofed.errors import UserError
from tests.data.picture_tools import Painter, numbered

# Pictures of each class, back_pack to projector; the sums, 958, 1123, 157 and 295, are those of the real set.
COUNTS = {
    "amazon": (92, 82, 94, 99, 100, 100, 99, 100, 94, 98),
    "caltech": (151, 110, 100, 138, 85, 128, 133, 94, 87, 97),
    "dslr": (12, 21, 12, 13, 10, 24, 22, 12, 8, 23),
    "webcam": (29, 21, 31, 27, 27, 30, 43, 30, 27, 30),
}
CLASSES = (
    "back_pack",
    "bike",
    "calculator",
    "headphones",
    "keyboard",
    "laptop_computer",
    "monitor",
    "mouse",
    "mug",
    "projector",
)


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Painter:
    painter = Painter(tmp_path_factory.mktemp("data") / "office_caltech_10")
    for domain, counts in COUNTS.items():
        for cls, count in zip(CLASSES, counts, strict=True):
            painter.paint(f"{domain}/{cls}", numbered(count, "jpg"))
    return painter


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ISOFED_DATA", raising=False)


def domains(files: list[Path]) -> list[int]:
    return [Counter(file.parts[0] for file in files)[domain] for domain in COUNTS]


def test_a_fifth_is_for_testing_and_domains_are_equal(painter: Painter) -> None:
    made = data.load("office-caltech10:size=8", root=str(painter.root.parent))
    assert (made.classes, made.domains) == (CLASSES, tuple(COUNTS))
    assert (made.mean, made.std) == ((0.0,) * 3, (1.0,) * 3)
    assert domains(painter.find(made.test)) == [192, 225, 32, 59]
    assert domains(painter.find(made.train)) == [62] * 4, "half of the 125 that dslr has for training"
    assert not set(painter.find(made.train)) & set(painter.find(made.test))


def test_a_test_set_is_spread_over_the_classes(painter: Painter) -> None:
    made = data.load("office-caltech10:size=8,split=feduv", root=str(painter.root))
    assert domains(painter.find(made.train)) == [766, 898, 125, 236]
    assert made.test.domains is not None
    for d, counts in enumerate(COUNTS.values()):
        held = torch.bincount(made.test.labels[made.test.domains == d], minlength=10).tolist()
        assert all(abs(h - 0.2 * n) <= 1 for h, n in zip(held, counts, strict=True))
    equal = data.load("office-caltech10:size=8", root=str(painter.root))
    assert painter.find(equal.test) == painter.find(made.test), "both splits have the same test set"
    assert set(painter.find(equal.train)) < set(painter.find(made.train))


def test_the_choice_is_that_of_the_split_seed(painter: Painter) -> None:
    one, again, other = (
        data.load(f"office-caltech10:size=8,split_seed={seed}", root=str(painter.root)) for seed in (0, 0, 1)
    )
    assert one.fingerprint == again.fingerprint
    assert painter.find(one.test) != painter.find(other.test)


def test_the_default_size_is_256(tmp_path: Path) -> None:
    painter = Painter(tmp_path)
    for domain in COUNTS:
        for cls in CLASSES:
            painter.paint(f"{domain}/{cls}", numbered(5))
    made = data.load("office-caltech10", root=str(tmp_path))
    assert made.shape == (3, 256, 256)
    assert (len(made.train), len(made.test)) == (80, 40)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    painter = Painter(tmp_path)
    painter.paint("amazon/bike", numbered(1))
    with pytest.raises(
        UserError, match="has no folder 'caltech': data set 'office-caltech10' has the domains amazon, ca"
    ):
        data.load("office-caltech10", root=str(tmp_path))
    for domain in ("caltech", "dslr", "webcam"):
        painter.paint(f"{domain}/bike", numbered(1))
    with pytest.raises(UserError, match="have 1 classes: data set 'office-caltech10' has 10"):
        data.load("office-caltech10", root=str(tmp_path))
    for cls in CLASSES:
        painter.paint(f"amazon/{cls}", numbered(1))
    with pytest.raises(UserError, match="there is no class folder '.*caltech/back_pack'"):
        data.load("office-caltech10", root=str(tmp_path))
    for domain in COUNTS:
        for cls in CLASSES:
            painter.paint(f"{domain}/{cls}", [] if (domain, cls) == ("dslr", "mug") else numbered(1))
    with pytest.raises(UserError, match="the class folder '.*dslr/mug' has no pictures"):
        data.load("office-caltech10", root=str(tmp_path))
