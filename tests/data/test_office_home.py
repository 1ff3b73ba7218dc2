"""Office-Home: seven of each class and domain for testing, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from isofed import data, draws
from isofed.errors import UserError
from tests.data.picture_tools import Painter, numbered

DOMAINS = ("Art", "Clipart", "Product", "Real World")
CLASSES = [f"Thing_{number:02}" for number in range(65)]


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Painter:
    painter = Painter(tmp_path_factory.mktemp("data") / "OfficeHomeDataset_10072016")
    for d, domain in enumerate(DOMAINS):
        for cls in CLASSES:
            painter.paint(f"{domain}/{cls}", numbered(11 + d, "jpg"))
    (painter.root / "ImageInfo.csv").write_text("not read")
    return painter


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ISOFED_DATA", raising=False)


def test_seven_of_each_class_and_domain_are_for_testing(painter: Painter) -> None:
    made = data.load("office-home:size=8", root=str(painter.root.parent))
    assert (list(made.classes), made.domains) == (CLASSES, DOMAINS)
    assert (made.mean, made.std) == ((0.5,) * 3, (0.5,) * 3)
    assert len(made.test) == 1820
    assert len(made.train) == 65 * (4 + 5 + 6 + 7)
    expected = []
    for d, domain in enumerate(DOMAINS):
        for c, cls in enumerate(CLASSES):
            order = draws.generator(0, "data/office-home/test", d, c).permutation(11 + d)
            expected += [Path(domain, cls, f"{n:03}.jpg") for n in sorted(order[:7])]
    assert painter.find(made.test) == expected
    assert not set(expected) & set(painter.find(made.train))


def test_equal_domains_and_the_default_size(painter: Painter) -> None:
    made = data.load("office-home:size=8,split=fedbn,split_seed=3", root=str(painter.root))
    assert Counter(file.parts[0] for file in painter.find(made.train)) == dict.fromkeys(DOMAINS, 130)
    assert data.load("office-home:split=fedbn,split_seed=3", root=str(painter.root)).shape == (3, 96, 96)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    painter = Painter(tmp_path)
    for domain in ("Art", "Clipart", "Product", "RealWorld"):
        painter.paint(f"{domain}/Bed", numbered(1))
    with pytest.raises(UserError, match="have 1 classes: data set 'office-home' has 65"):
        data.load("office-home", root=str(tmp_path))
    for cls in CLASSES[1:]:
        painter.paint(f"Art/{cls}", numbered(1))
    with pytest.raises(UserError, match="there is no class folder '.*Clipart/Thing_01', which data set 'office-home'"):
        data.load("office-home", root=str(tmp_path))
    (tmp_path / "RealWorld").rename(tmp_path / "Photos")
    with pytest.raises(UserError, match="has no folder 'Real World': data set 'office-home' has the domains Art, Clip"):
        data.load("office-home", root=str(tmp_path))
