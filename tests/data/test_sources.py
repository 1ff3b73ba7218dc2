"""Where data come from: the list of sources, and the sets that are made here."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from isofed import data
from isofed.data.sources import SOURCES
from isofed.errors import UserError
from tests.data.picture_tools import rows


def missing(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Behave as if a package were not installed."""
    for name in [n for n in sys.modules if n == module or n.startswith(module + ".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)


# The list of sources


def test_importing_the_package_imports_no_optional_package() -> None:
    code = (
        "import sys, isofed.data as d; d.summaries(); print([m for m in ('sklearn', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_source_has_a_line_about_it() -> None:
    lines = data.summaries()
    assert set(lines) == set(SOURCES)
    assert all(line.endswith(".") and len(line) < 120 for line in lines.values())


def test_names_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no data set, file or folder 'digit': did you mean 'digits'\? `isofed data` lists all"
    ):
        data.load("digit")
    with pytest.raises(UserError, match="no option of data set 'synthetic' called 'sample': did you mean 'samples'"):
        data.load("synthetic:sample=3")
    with pytest.raises(UserError, match="data set 'digits' has no options|one too many"):
        data.load("digits:3")
    with pytest.raises(UserError, match="takes one choice, not 2"):
        data.load("digits+synthetic")
    for text in (f"{tmp_path}/none", "./none", "none.npz", "~/surely-not-here"):
        with pytest.raises(UserError, match="there is no file or folder '.*': data must be a path that exists"):
            data.load(text)


# Digits


def test_digits_are_scikit_learns_pictures_divided_80_to_20() -> None:
    from sklearn.datasets import load_digits

    made = data.load("digits")
    assert made.shape == (1, 8, 8)
    assert made.classes == tuple("0123456789")
    assert (len(made.train), len(made.test)) == (1438, 359)
    assert made.train.images.dtype == torch.uint8
    original = load_digits()
    want = sorted((np.uint8(i * 15).tobytes(), int(t)) for i, t in zip(original.images, original.target, strict=True))
    both = [*zip(rows(made.train), made.train.labels.tolist(), strict=True)]
    both += zip(rows(made.test), made.test.labels.tolist(), strict=True)
    assert sorted(both) == want
    share = torch.bincount(made.test.labels) / torch.bincount(torch.cat([made.train.labels, made.test.labels]))
    assert float((share - 0.2).abs().max()) < 0.01


def test_digits_are_the_same_in_every_process() -> None:
    code = "import isofed.data as d; print(d.load('digits').fingerprint, d.load('digits-domains').fingerprint)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [data.load("digits").fingerprint, data.load("digits-domains").fingerprint]


@pytest.mark.parametrize("name", ["digits", "digits-domains"])
def test_digits_without_scikit_learn_say_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing(monkeypatch, "sklearn")
    with pytest.raises(UserError, match=rf"'{name}' comes with scikit-learn: pip install .*'scikit-learn>="):
        data.load(name)


def test_digit_domains_are_balanced_and_keep_the_parts_of_digits() -> None:
    plain, styled = data.load("digits"), data.load("digits-domains")
    assert styled.domains == ("plain", "inverted", "hazy", "turned")
    for before, after in ((plain.train, styled.train), (plain.test, styled.test)):
        assert after.domains is not None
        assert torch.equal(before.labels, after.labels)
        table = np.zeros((4, 10), dtype=int)
        np.add.at(table, (after.domains.numpy(), after.labels.numpy()), 1)
        assert (table.max(0) - table.min(0)).max() <= 1, "balanced in every class"
        assert np.ptp(table.sum(1)) <= 3
        first, second = after.domains == 0, after.domains == 1
        assert torch.equal(before.images[first], after.images[first])
        assert torch.equal(255 - before.images[second], after.images[second])


def test_digit_domains_differ_in_their_features_and_each_can_be_learnt() -> None:
    from sklearn.linear_model import LogisticRegression

    made = data.load("digits-domains")
    assert made.train.domains is not None and made.test.domains is not None
    moments: set[tuple[float, float]] = set()
    own: list[float] = []
    other: list[float] = []
    for domain in range(4):
        mine = made.train.domains == domain
        images = made.train.images[mine].flatten(1).numpy() / 255
        moments.add((round(float(images.mean()), 1), round(float(images.std()), 1)))
        model = LogisticRegression(max_iter=200).fit(images, made.train.labels[mine].numpy())
        for tested in range(4):
            there = made.test.domains == tested
            score = model.score(made.test.images[there].flatten(1).numpy() / 255, made.test.labels[there].numpy())
            (own if tested == domain else other).append(score)
    assert len(moments) == 4
    # A linear model on 360 pictures: the hazy and the turned ones are harder, none is beyond it.
    assert min(own) > 0.65 and np.mean(own) > 0.8
    assert np.mean(other) < 0.4


# Synthetic


def test_synthetic_options_are_obeyed() -> None:
    made = data.load("synthetic:samples=70,test=11,classes=7,size=5,channels=2,domains=3")
    assert made.shape == (2, 5, 5)
    assert (len(made.train), len(made.test), len(made.classes), len(made.domains)) == (70, 11, 7, 3)
    assert torch.bincount(made.train.labels).tolist() == [10] * 7
    assert made.train.domains is not None
    assert set(made.train.domains.tolist()) == {0, 1, 2}


def test_synthetic_depends_on_its_own_seed_only() -> None:
    one, two, other = (data.load(f"synthetic:samples=100,test=10,seed={seed}") for seed in (0, 0, 1))
    assert one.fingerprint == two.fingerprint != other.fingerprint
    assert not set(rows(one.train)) & set(rows(one.test))


@pytest.mark.parametrize("options", ["", ",size=16,channels=3"])
def test_synthetic_can_be_learnt_and_is_not_trivial(options: str) -> None:
    """Neighbours tell the classes well; a linear model, which sees one direction a class, clearly worse."""
    made = data.load("synthetic:samples=4000,test=1000" + options)
    (x, y), (a, b) = (((p.images.flatten(1).double() - 128) / 40, p.labels) for p in (made.train, made.test))
    nearest = torch.cdist(a, x).topk(15, largest=False).indices
    near = float((y[nearest].mode(1).values == b).double().mean())
    ridge = x.T @ x + 10 * torch.eye(x.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(ridge, x.T @ (torch.nn.functional.one_hot(y).double() - 0.1))
    line = float(((a @ weight).argmax(1) == b).double().mean())
    assert 0.9 < near < 0.995
    assert 0.5 < line < near - 0.02


def test_synthetic_domains_have_styles_of_their_own() -> None:
    made = data.load("synthetic:samples=4000,domains=4")
    assert made.train.domains is not None
    images = made.train.images.float()
    looks = {
        (
            round(float(images[made.train.domains == d].mean()) / 5),
            round(float(images[made.train.domains == d].std()) / 5),
        )
        for d in range(4)
    }
    assert len(looks) == 4


def test_synthetic_makes_many_samples_quickly() -> None:
    start = time.perf_counter()
    made = data.load("synthetic:samples=200000,test=10")
    assert len(made.train) == 200_000
    assert time.perf_counter() - start < 10


def test_synthetic_refuses_options_that_make_no_sense() -> None:
    cases = {
        "samples=9": "samples of data set 'synthetic' must be at least 10, one for every class",
        "samples=39,domains=4": "at least 40, one for every class of every domain",
        "test=0": "test of data set 'synthetic' must be at least 1",
        "classes=1": "classes of data set 'synthetic' must be at least 2, not 1",
        "size=0": "size of data set 'synthetic' must be at least 1",
        "channels=0": "channels of data set 'synthetic' must be at least 1",
        "domains=-1": "domains of data set 'synthetic' must be at least 0",
        "noise=-1": "noise of data set 'synthetic' must be zero or more, not -1",
        "noise=inf": "zero or more",
    }
    for options, message in cases.items():
        with pytest.raises(UserError, match=message):
            data.load(f"synthetic:{options}")
