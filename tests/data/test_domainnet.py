"""DomainNet: ten classes or all, with the publishers' lists and without."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from isofed import data, draws
from isofed.data.sources import domainnet
from isofed.errors import UserError
from tests.data.picture_tools import Painter, numbered

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
TEN = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
CLASSES = ("ant", *TEN)
SIZES = dict(zip(DOMAINS, (12, 9, 8, 10, 14, 7), strict=True))  # pictures of each class


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ISOFED_DATA", raising=False)


@pytest.fixture
def painter(tmp_path: Path) -> Painter:
    painter = Painter(tmp_path / "DomainNet")
    for domain, size in SIZES.items():
        for cls in CLASSES:
            painter.paint(f"{domain}/{cls}", numbered(size, "jpg"))
    return painter


def write_lists(root: Path, folder: str = ".") -> None:
    """The first picture of every class is for testing, the second is in no list, the others are for training."""
    (root / folder).mkdir(exist_ok=True)
    for domain, size in SIZES.items():
        for part, numbers in (("test", range(1)), ("train", range(2, size))):
            lines = [f"{domain}/{cls}/{n:03}.jpg {c}\n" for c, cls in enumerate(CLASSES) for n in numbers]
            (root / folder / f"{domain}_{part}.txt").write_text("".join(lines))


def by_domain(files: list[Path]) -> Counter[str]:
    return Counter(file.parts[0] for file in files)


def test_ten_classes_without_lists(painter: Painter) -> None:
    made = data.load("domainnet:size=8,split=feduv", root=str(painter.root.parent))
    assert (made.classes, made.domains) == (TEN, DOMAINS)
    assert (made.mean, made.std) == ((0.0,) * 3, (1.0,) * 3)
    train, test = painter.find(made.train), painter.find(made.test)
    assert by_domain(test) == {domain: 3 * size for domain, size in SIZES.items()}, "30 % of ten times as many"
    listed = sorted(file.relative_to(painter.root) for file in painter.files.values() if file.parent.name != "ant")
    assert sorted(train + test) == listed
    for part, files in ((made.train, train), (made.test, test)):
        assert part.domains is not None
        named = [(DOMAINS[d], TEN[c]) for d, c in zip(part.domains, part.labels, strict=True)]
        assert named == [(file.parts[0], file.parts[1]) for file in files]
    again = data.load("domainnet:size=8,split=feduv", root=str(painter.root))
    other = data.load("domainnet:size=8,split=feduv,split_seed=1", root=str(painter.root))
    assert again.fingerprint == made.fingerprint
    assert painter.find(other.test) != test


@pytest.mark.parametrize("folder", [".", "splits"])
def test_the_lists_of_the_publishers_are_honoured(painter: Painter, folder: str) -> None:
    write_lists(painter.root, folder)
    made = data.load("domainnet:size=8,split=feduv", root=str(painter.root))
    assert sorted(painter.find(made.test)) == sorted(Path(d, c, "000.jpg") for d in DOMAINS for c in TEN)
    wanted = [Path(d, c, f"{n:03}.jpg") for d, size in SIZES.items() for c in TEN for n in range(2, size)]
    assert sorted(painter.find(made.train)) == sorted(wanted)
    assert [TEN[c] for c in made.train.labels] == [file.parts[1] for file in painter.find(made.train)]
    every = data.load("domainnet:all,size=8,split=feduv", root=str(painter.root))
    assert every.classes == CLASSES
    assert len(every.test) == 66


def test_fedbn_takes_five_percent_of_the_smallest(painter: Painter, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lists(painter.root)
    monkeypatch.setattr(domainnet, "SHARE", 0.77)  # at 5 % these few pictures would lack classes
    whole = data.load("domainnet:size=8,split=feduv", root=str(painter.root))
    made = data.load("domainnet:size=8", root=str(painter.root))
    keep = int(0.77 * 10 * (7 - 2))
    expected = []
    for d, domain in enumerate(DOMAINS):
        mine = [file for file in painter.find(whole.train) if file.parts[0] == domain]
        order = draws.generator(0, "data/domainnet/fedbn", d).permutation(len(mine))[:keep]
        expected += [mine[i] for i in sorted(order)]
    assert painter.find(made.train) == expected
    assert painter.find(made.test) == painter.find(whole.test)
    monkeypatch.undo()
    assert domainnet.SHARE == 0.05


def test_all_classes_are_345(painter: Painter, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="have 11 classes: data set 'domainnet' has 345"):
        data.load("domainnet:classes=all", root=str(painter.root))
    monkeypatch.setattr(domainnet, "CLASSES", 11)
    assert data.load("domainnet:classes=all,size=8,split=feduv", root=str(painter.root)).classes == CLASSES


def test_the_default_is_256_pixels(painter: Painter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domainnet, "SHARE", 0.5)
    assert data.load("domainnet", root=str(painter.root)).shape == (3, 256, 256)


def test_lists_that_are_wrong_are_refused(painter: Painter) -> None:
    write_lists(painter.root)
    file = painter.root / "real_train.txt"
    good = file.read_text()
    cases = [
        (good + "real/tiger/999.jpg 5\n", r"line 133 of '.*real_train.txt' names the picture '.*real/tiger/999.jpg'"),
        (good + "real/tiger/000.jpg\n", "line 133 of '.*real_train.txt' is not 'real/class/picture number'"),
        (good + "sketch/tiger/002.jpg 5\n", "line 133 of '.*' is not 'real/class/picture number': 'sketch/tiger"),
        (good + "tiger/000.jpg 5\n", "line 133 of '.*' is not 'real/class/picture number'"),
        (
            good + "real/tiger/002.jpg 5\n",
            "the list '.*real_train.txt' names '.*real/tiger/002.jpg', which is in a list",
        ),
        (good + "real/tiger/000.jpg 5\n", "real_test.txt' names '.*real/tiger/000.jpg', which is in a list already"),
    ]
    for content, message in cases:
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            data.load("domainnet:size=8", root=str(painter.root))
    file.write_text("")
    (painter.root / "real_test.txt").write_text("real/ant/000.jpg 0\n")
    with pytest.raises(
        UserError, match="real_train.txt' and 'real_test.txt' name no picture of the classes that are re"
    ):
        data.load("domainnet:size=8", root=str(painter.root))
    file.unlink()
    with pytest.raises(
        UserError, match="real_train.txt' is missing: data set 'domainnet' needs the lists of every domain"
    ):
        data.load("domainnet:size=8", root=str(painter.root))


def test_what_is_missing_is_named(painter: Painter, tmp_path: Path) -> None:
    (painter.root / "real" / "zebra").rename(tmp_path / "zebra")
    with pytest.raises(UserError, match="there is no class folder '.*real/zebra', which data set 'domainnet' needs"):
        data.load("domainnet", root=str(painter.root))
    (painter.root / "real").rename(tmp_path / "away")
    with pytest.raises(
        UserError, match="has no folder 'real': data set 'domainnet' has the domains clipart, infograph"
    ):
        data.load("domainnet", root=str(painter.root))


def test_domains_too_small_for_a_share_are_named(tmp_path: Path) -> None:
    painter = Painter(tmp_path)
    for domain in DOMAINS:
        for cls in TEN:
            painter.paint(f"{domain}/{cls}", numbered(2))
    with pytest.raises(UserError, match="domain 'clipart' of data set 'domainnet' has 14 training pictures, of which"):
        data.load("domainnet", root=str(tmp_path))


def test_a_class_that_is_nowhere_in_training_is_named_before_decoding(painter: Painter) -> None:
    write_lists(painter.root)
    for file in painter.root.glob("*_train.txt"):
        file.write_text("".join(line for line in file.read_text().splitlines(True) if "/whale/" not in line))
    told: list[tuple[int, int]] = []
    with pytest.raises(UserError, match="the training part of data set 'domainnet' has no picture of class 'whale'"):
        data.load("domainnet:split=feduv", root=str(painter.root), progress=lambda *done: told.append(done))
    assert not told
