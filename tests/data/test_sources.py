"""Where data come from: the built-in sets, and a user's own files in every state they may be in."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from isofed import data
from isofed.data.sources import SOURCES
from isofed.data.sources import decode as decoding
from isofed.errors import UserError

Array = npt.NDArray[Any]


def missing(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Behave as if a package were not installed."""
    for name in [n for n in sys.modules if n == module or n.startswith(module + ".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)


def rows(part: data.Part) -> list[bytes]:
    return [image.tobytes() for image in part.images.numpy()]


# The list of sources


def test_importing_the_package_imports_no_optional_package() -> None:
    code = (
        "import sys, isofed.data as d; d.sources(); print([m for m in ('sklearn', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_source_has_a_line_about_it() -> None:
    lines = data.sources()
    assert set(lines) == set(SOURCES)
    assert all(line.endswith(".") and len(line) < 120 for line in lines.values())


def test_names_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no data set 'digit': did you mean 'digits'\? Known: .*, digits, digits"):
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
    with pytest.raises(UserError, match=rf"'{name}' comes with scikit-learn: pip install 'isofed\[plot\]'"):
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


# .npz files


def arrays(count: int = 20, shape: tuple[int, ...] = (6, 5, 3), dtype: str = "uint8") -> tuple[Array, Array]:
    rng = np.random.default_rng(count)
    return rng.integers(0, 256, (count, *shape)).astype(dtype), np.arange(count) % 2


def save(path: Path, **values: Any) -> str:
    np.savez(path, **values)
    return str(path)


def test_npz_with_both_parts(tmp_path: Path) -> None:
    (x, y), (a, b) = arrays(20), arrays(8)
    path = save(tmp_path / "mine.npz", x_train=x, y_train=y[:, None], x_test=a, y_test=b.astype(np.uint8))
    for made in (data.load(path), data.load("npz", root=path), data.load(Path(path))):
        assert made.name == "mine"
        assert made.classes == ("0", "1")
        np.testing.assert_array_equal(made.train.images.numpy(), x)
        np.testing.assert_array_equal(made.test.images.numpy(), a)
        assert made.train.labels.tolist() == y.tolist()
        assert made.test.labels.tolist() == b.tolist()


@pytest.mark.parametrize("keys", [("images", "labels"), ("x_train", "y_train")])
def test_npz_without_a_test_part_is_divided_the_same_way_every_time(tmp_path: Path, keys: tuple[str, str]) -> None:
    x, y = arrays(50)
    path = save(tmp_path / "mine.npz", **dict(zip(keys, (x, y), strict=True)))
    made = data.load(path)
    assert (len(made.train), len(made.test)) == (40, 10)
    assert torch.bincount(made.test.labels).tolist() == [5, 5]
    assert sorted(rows(made.train) + rows(made.test)) == sorted(image.tobytes() for image in x)
    assert made.fingerprint == data.load(path).fingerprint


@pytest.mark.parametrize(
    ("shape", "options", "channels_last"),
    [
        ((6, 5), "", lambda x: x[..., None]),
        ((6, 5, 1), "", lambda x: x),
        ((3, 6, 5), "", lambda x: x.transpose(0, 2, 3, 1)),
        ((3, 5, 3), ":layout=nchw", lambda x: x.transpose(0, 2, 3, 1)),
        ((3, 5, 3), ":nhwc", lambda x: x),
        ((6, 5, 12), ":nhwc", lambda x: x),
    ],
)
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64", "float16"])
def test_npz_layouts(tmp_path: Path, shape: tuple[int, ...], options: str, channels_last: Any, dtype: str) -> None:
    (x, y), (a, b) = arrays(20, shape, dtype), arrays(8, shape, dtype)
    path = save(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=a, y_test=b)
    made = data.load(path + options)
    assert made.train.images.dtype == (torch.uint8 if dtype == "uint8" else torch.float32)
    np.testing.assert_array_equal(made.train.images.numpy(), channels_last(x))
    assert made.train.images.is_contiguous()


def test_npz_names_and_domains(tmp_path: Path) -> None:
    x, y = arrays(40)
    text = np.array(["dog", "cat"])[y]
    place = np.array(["north", "south"])[np.arange(40) // 20]
    made = data.load(save(tmp_path / "a.npz", images=x, labels=text, domains=place))
    assert made.classes == ("cat", "dog")
    assert made.domains == ("north", "south")
    assert made.test.domains is not None
    assert torch.bincount(made.test.domains * 2 + made.test.labels).tolist() == [2, 2, 2, 2]
    named = {"classes": np.array(["dog", "cat"]), "domain_names": np.array(["up", "down"])}
    numbers = {"domains_train": np.arange(40) % 2, "domains_test": np.arange(40) // 20}
    path = save(tmp_path / "b.npz", x_train=x, y_train=y, x_test=x, y_test=y, **numbers, **named)
    made = data.load(path)
    assert (made.classes, made.domains) == (("dog", "cat"), ("up", "down"))
    assert made.test.domains is not None
    assert made.test.domains.tolist() == numbers["domains_test"].tolist()
    made = data.load(save(tmp_path / "c.npz", images=x, labels=text, classes=np.array(["dog", "cat"])))
    assert made.classes == ("dog", "cat")


def test_npz_that_is_wrong_is_refused(tmp_path: Path) -> None:
    x, y = arrays(20)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"pictures": x}, "holds pictures: it needs the keys x_train, y_train, x_test, y_test, or images"),
        ({"images": x}, "has no 'labels'"),
        ({"classes": np.array(["a"])}, "has no 'images'"),
        ({"x_train": x, "y_train": y, "x_test": x}, "has no 'y_test'"),
        ({"x_train": x, "labels": y}, "mixes two forms"),
        ({"images": x, "labels": y[:3]}, r"shapes \[20, 6, 5, 3\] and \[3\]: there must be one label a picture"),
        ({"images": x.astype(np.int64), "labels": y}, "'images' in 'mine.npz' is int64: pictures must be uint8"),
        ({"images": x[:, 0, 0], "labels": y}, r"has the shape \[20, 3\]: pictures must be \[N, H, W\]"),
        ({"images": x[:, :3, :3], "labels": y}, "both the second and the last number could count channels"),
        (
            {"images": np.repeat(x, 3, 3), "labels": y},
            "neither the second nor the last .* say which with 'npz:layout=nhwc'",
        ),
        ({"images": x, "labels": y + 0.5}, r"'labels' in 'mine.npz' is float64 \[20\]"),
        ({"images": x, "labels": np.stack([y, y], 1)}, r"is int64 \[20, 2\]"),
        ({"images": x, "labels": y + 1}, r"no training sample of class '0' \(number 0\)"),
        ({"images": x, "labels": y - 1}, "has the label -1"),
        ({"images": x, "labels": y * 10**9}, "has the label 1000000000 but only 20 training samples"),
        ({"images": x, "labels": y * 0}, "has 1 class: there is nothing to tell apart"),
        ({"images": x[:0], "labels": y[:0]}, "has no test part and only 0 samples"),
        ({"images": x, "labels": np.array([None] * 20)}, "cannot be read as an .npz file of plain arrays .*pickle"),
        (
            {"images": x, "labels": y, "classes": np.arange(2)},
            "names of the labels in 'mine.npz' must be a list of texts",
        ),
        (
            {"images": x, "labels": np.array(list("ab"))[y], "classes": np.array(["a"])},
            "'b' in .* is not among the names",
        ),
        ({"images": x, "labels": y, "domains": y[:4]}, "20 images but 4 domains"),
        ({"images": np.where(x > 9, x, np.nan), "labels": y}, "images with NaN or infinite"),
        (
            {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "domains_test": y},
            "has 'domains_test' but not 'domains_train'",
        ),
        (
            {"x_train": x, "y_train": y, "x_test": x, "y_test": y.astype(str)},
            "numbers in one part and names in the other",
        ),
        ({"x_train": x, "y_train": y, "x_test": x[:, :5], "y_test": y}, "test images uint8 .*: they must be alike"),
    ]
    for values, message in cases:
        with pytest.raises(UserError, match=message):
            data.load(save(tmp_path / "mine.npz", **values))


def test_npz_paths_that_are_wrong_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'npz' needs the path of an .npz file: give it as root=PATH"):
        data.load("npz")
    with pytest.raises(UserError, match="there is no file or folder '/nowhere/at.npz'"):
        data.load("npz", root="/nowhere/at.npz")
    with pytest.raises(UserError, match="is a folder: data set 'npz' needs an .npz file"):
        data.load("npz", root=str(tmp_path))
    (tmp_path / "bad.npz").write_bytes(b"no zip file at all")
    with pytest.raises(UserError, match=r"'bad.npz' cannot be read as an .npz file of plain arrays"):
        data.load(str(tmp_path / "bad.npz"))
    good = save(tmp_path / "good.npz", images=arrays()[0], labels=arrays()[1])
    (tmp_path / "cut.npz").write_bytes(Path(good).read_bytes()[:500])
    with pytest.raises(UserError, match="'cut.npz' cannot be read"):
        data.load(str(tmp_path / "cut.npz"))
    np.save(tmp_path / "one.npy", arrays()[0])
    with pytest.raises(UserError, match="'one.npy' holds one array, not several"):
        data.load("npz", root=str(tmp_path / "one.npy"))
    with pytest.raises(UserError, match=r"is a file isofed does not read: data can be an \.npz file or a folder"):
        data.load(str(tmp_path / "one.npy"))
    with pytest.raises(UserError, match="are a path already: leave out root"):
        data.load(good, root=good)
    with pytest.raises(UserError, match="layout of data set 'npz' must be one of auto, nhwc, nchw"):
        data.load(good + ":layout=hw")


# Folders of pictures


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
