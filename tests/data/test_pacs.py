"""PACS: FedUV's test set, FedBN's equal domains, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from isofed import data, draws
from isofed.data import partition
from isofed.errors import UserError
from tests.data.picture_tools import Painter, numbered

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
COUNTS = {(domain, cls): 41 + 2 * d + c % 3 for d, domain in enumerate(DOMAINS) for c, cls in enumerate(CLASSES)}


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Painter:
    painter = Painter(tmp_path_factory.mktemp("data") / "PACS" / "kfold")
    for (domain, cls), count in COUNTS.items():
        painter.paint(f"{domain}/{cls}", numbered(count))
    return painter


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ISOFED_DATA", raising=False)


def folders(files: list[Path]) -> Counter[tuple[str, str]]:
    return Counter((file.parts[0], file.parts[1]) for file in files)


def test_forty_of_each_class_and_domain_are_for_testing(painter: Painter) -> None:
    made = data.load("pacs:size=8", root=str(painter.root.parents[1]))
    assert (made.classes, made.domains, made.shape) == (CLASSES, DOMAINS, (3, 8, 8))
    assert (made.mean, made.std) == ((0.5,) * 3, (0.5,) * 3)
    train, test = painter.find(made.train), painter.find(made.test)
    assert folders(test) == dict.fromkeys(COUNTS, 40) and len(test) == 1120
    assert sorted(train + test) == sorted(f.relative_to(painter.root) for f in painter.files.values())
    for part, files in ((made.train, train), (made.test, test)):
        assert part.domains is not None
        named = [(made.domains[d], made.classes[c]) for d, c in zip(part.domains, part.labels, strict=True)]
        assert named == [(file.parts[0], file.parts[1]) for file in files]
    expected = []
    for d, domain in enumerate(DOMAINS):
        for c, cls in enumerate(CLASSES):
            order = draws.generator(0, "data/pacs/test", d, c).permutation(COUNTS[domain, cls])
            expected += [Path(domain, cls, f"{n:03}.png") for n in sorted(order[:40])]
    assert test == expected


def test_the_choice_depends_on_the_split_seed_alone(painter: Painter) -> None:
    root = str(painter.root)
    one, again, other = (data.load(f"pacs:size=8,split_seed={seed}", root=root) for seed in (0, 0, 7))
    assert one.fingerprint == again.fingerprint
    assert painter.find(one.test) != painter.find(other.test)
    assert data.load("pacs", root=root).shape == (3, 96, 96)
    larger = data.load("pacs:size=16", root=root)
    assert painter.find(larger.test) == painter.find(one.test)


def test_equal_domains(painter: Painter) -> None:
    whole = data.load("pacs:size=8", root=str(painter.root))
    made = data.load("pacs:size=8,split=fedbn", root=str(painter.root))
    assert painter.find(made.test) == painter.find(whole.test), "the test set is that of the other split"
    domains = whole.train.domains
    assert domains is not None
    keep = int(0.5 * np.bincount(domains.numpy()).min())
    assert keep > 0
    expected = []
    files = painter.find(whole.train)
    for d in range(4):
        mine = [file for file, domain in zip(files, domains, strict=True) if domain == d]
        order = draws.generator(0, "data/pacs/fedbn", d).permutation(len(mine))[:keep]
        expected += [mine[i] for i in sorted(order)]
    assert painter.find(made.train) == expected
    assert {len(p) for p in partition.split("domain", made.train, None, 7, 0, made.domains)} == {keep}


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    painter = Painter(tmp_path / "here")
    painter.paint("photo/dog", numbered(3))
    with pytest.raises(
        UserError, match="here' has no folder 'art_painting': data set 'pacs' has the domains art_paint"
    ):
        data.load("pacs", root=str(painter.root))
    for domain in DOMAINS:
        painter.paint(f"{domain}/dog", numbered(3))
    with pytest.raises(UserError, match="there is no class folder '.*art_painting/elephant', which data set 'pacs'"):
        data.load("pacs", root=str(painter.root))
    for domain in DOMAINS:
        for cls in CLASSES:
            painter.paint(f"{domain}/{cls}", numbered(40))
    with pytest.raises(UserError, match="art_painting/dog' has 40 pictures: the test set of 'pacs' takes 40 of each"):
        data.load("pacs", root=str(painter.root))
    for file in (painter.root / "cartoon" / "house").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="the class folder '.*cartoon/house' has no pictures"):
        data.load("pacs", root=str(painter.root))
    with pytest.raises(UserError, match="split of data set 'pacs' must be one of feduv, fedbn, not 'half'"):
        data.load("pacs:split=half", root=str(painter.root))
