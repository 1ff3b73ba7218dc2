"""AutoAugment's policy: every picture is what Pillow's operations, one after the other, make of it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from isofed.data.augment import Shape
from isofed.data.augment_geometry import fixed_point
from isofed.data.autoaugment import OPERATIONS, POLICY, _matrices, _stepped
from tests.data.test_augment_pillow import SHAPES, Array, apply, draw, from_pillow, grey_fill, pictures, to_pillow

Kinds = tuple[str, ...]


def by_pillow(picture: Image.Image, name: str, amount: float, fill: int) -> Image.Image:
    """One operation as torchvision makes it of a Pillow picture."""

    def affine(*matrix: float) -> Image.Image:
        return picture.transform(
            picture.size,
            Image.Transform.AFFINE,
            matrix,
            Image.Resampling.NEAREST,
            fillcolor=grey_fill(picture, fill),
        )

    width, height = picture.size
    match name:
        case "nothing":
            return picture
        case "shear_x":
            return affine(1, amount, 0, 0, 1, 0)
        case "shear_y":
            return affine(1, 0, 0, amount, 1, 0)
        case "translate_x":
            return affine(1, 0, -int(amount * width), 0, 1, 0)
        case "translate_y":
            return affine(1, 0, 0, 0, 1, -int(amount * height))
        case "rotate":
            return picture.rotate(amount, fillcolor=grey_fill(picture, fill))
        case "brightness":
            return ImageEnhance.Brightness(picture).enhance(amount)
        case "contrast":
            return ImageEnhance.Contrast(picture).enhance(amount)
        case "colour":
            return ImageEnhance.Color(picture).enhance(amount)
        case "sharpness":
            return ImageEnhance.Sharpness(picture).enhance(amount)
        case "posterize":
            return ImageOps.posterize(picture, {1: 8, 2: 7, 4: 6, 8: 5, 16: 4}[round(amount)])
        case "solarize":
            return ImageOps.solarize(picture, amount)  # type: ignore[arg-type]
        case "invert":
            return ImageOps.invert(picture)
        case "autocontrast":
            return ImageOps.autocontrast(picture)
        case "equalize":
            return ImageOps.equalize(picture)
    raise AssertionError(name)


def names(kinds: Array) -> Kinds:
    return tuple(OPERATIONS[kind] for kind in kinds)


def check(text: str, images: Array, drawn: dict[str, Array], fill: int) -> Counter[Kinds]:
    """Compare every picture of every step, and count the pairs of operations."""
    seen: Counter[Kinds] = Counter()
    for step in range(len(drawn["augment.auto.kind"])):
        found = apply(text, images, drawn, step)
        for i, out in enumerate(found):
            pair, amounts = names(drawn["augment.auto.kind"][step, i]), drawn["augment.auto.amount"][step, i]
            picture = to_pillow(images[i])
            for name, amount in zip(pair, amounts.tolist(), strict=True):
                picture = by_pillow(picture, name, amount, fill)
            np.testing.assert_array_equal(out, from_pillow(picture), err_msg=f"{pair} {amounts}")
            seen[pair] += 1
    return seen


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fill", [0, 128])
def test_every_pair_of_operations_is_pillows(shape: Shape, fill: int) -> None:
    text = f"autoaugment:fill={fill}"
    seen = check(text, pictures(100, shape), draw(text, 30, 100, shape), fill)
    both = {(one[0], two[0]) for one, two in POLICY if two[1]}
    assert both <= set(seen)  # all 25 pairs, but for the one whose second operation is never made


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 20, 20)], ids=str)
def test_every_operation_is_pillows_with_every_amount(name: str, place: int, shape: Shape) -> None:
    """Also those that the policy does not have, or has with one level only."""
    count = 200
    kind = np.zeros((1, count, 2), np.uint8)
    kind[..., place] = OPERATIONS.index(name)
    level = np.broadcast_to(np.arange(count)[:, None] % 10, (count, 2))[None]
    sign = np.broadcast_to(np.where(np.arange(count) % 20 < 10, 1, -1)[:, None], (count, 2))[None]
    amount = _stepped(kind, level, sign)
    drawn: dict[str, Array] = {
        "augment.auto.kind": kind,
        "augment.auto.amount": amount.astype(np.float32),
        "augment.auto.matrix": fixed_point(_matrices(kind, amount, shape, "torchvision")),
    }
    seen = check("autoaugment", pictures(count, shape), drawn, 0)
    assert sum(seen.values()) == count


def test_magnitudes_are_torchvisions() -> None:
    """Ten levels from nothing to the largest change: the numbers of torchvision's table, written out."""
    drawn = draw("autoaugment", 200, 100, (3, 32, 32))
    kinds, amounts = drawn["augment.auto.kind"].reshape(-1), drawn["augment.auto.amount"].reshape(-1)
    found = {
        name: sorted({round(float(a), 4) for a in amounts[kinds == number]}) for number, name in enumerate(OPERATIONS)
    }
    share = 150 / 331
    assert found["rotate"] == [-6.6667, 6.6667]
    assert found["shear_y"] == [-0.2667, -0.2333, 0.2333, 0.2667]
    assert found["translate_x"] == sorted(round(s * share * k / 9, 4) for s in (-1, 1) for k in (8, 9))
    assert found["translate_y"] == sorted(round(s * share * k / 9, 4) for s in (-1, 1) for k in (3, 9))
    assert found["colour"] == [0.1, 0.2, 0.3, 0.7, 1.0, 1.3, 1.7, 1.8, 1.9]
    assert found["contrast"] == [0.3, 0.4, 1.6, 1.7]
    assert found["posterize"] == [8.0]  # five bits
    assert found["solarize"] == [28.3333, 113.3333, 170.0, 198.3333]
    assert found["invert"] == found["equalize"] == found["autocontrast"] == [0.0]


def test_pairs_are_drawn_evenly_and_operations_with_their_probabilities() -> None:
    steps, batch = 250, 100
    drawn = draw("autoaugment", steps, batch, (3, 32, 32))
    seen = Counter(names(k) for k in drawn["augment.auto.kind"].reshape(-1, 2))
    wanted: Counter[Kinds] = Counter()
    for (one, p, _), (two, q, _) in POLICY:
        for first, a in ((one, p), ("nothing", 1 - p)):
            for second, b in ((two, q), ("nothing", 1 - q)):
                wanted[first, second] += a * b * steps * batch / len(POLICY)  # type: ignore[assignment]
    wanted = Counter({k: v for k, v in wanted.items() if v})
    assert set(seen) == set(wanted)
    assert sum((seen[k] - wanted[k]) ** 2 / wanted[k] for k in wanted) < 2 * len(wanted)  # about 1 each
    up = drawn["augment.auto.amount"][drawn["augment.auto.kind"] == OPERATIONS.index("rotate")] > 0
    assert abs(up.mean() - 0.5) < 0.06


def test_the_table_has_not_changed() -> None:
    """What was compared, entry by entry, with the tables of torchvision and of FedDecorr's code."""
    assert len(POLICY) == 25
    assert round(sum(p for pair in POLICY for _, p, _ in pair), 1) == 26.5
    assert sum((i + 1) * level for i, (_, (_, _, level)) in enumerate(POLICY)) == 1475
    assert sum((i + 1) * level for i, ((_, _, level), _) in enumerate(POLICY)) == 1850
    assert Counter(name for pair in POLICY for name, _, _ in pair) == {
        "equalize": 9, "autocontrast": 7, "colour": 5, "sharpness": 5, "translate_y": 5, "brightness": 4,
        "solarize": 4, "invert": 3, "contrast": 2, "shear_y": 2, "translate_x": 2, "posterize": 1, "rotate": 1,
    }  # fmt: skip


def feddecorr_source(name: str, amount: float, size: int) -> tuple[Array, Array]:
    """From where pixels come, as FedDecorr's code says it: in rows and columns, about size/2 + 1/2."""
    rows, columns = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    centre, turn = size / 2 + 0.5, np.deg2rad(amount)
    matrix = {
        "shear_y": np.array([[1, 0, 0], [amount, 1, 0], [0, 0, 1]]),
        "translate_x": np.array([[1, 0, 0], [0, 1, size * amount], [0, 0, 1]]),
        "translate_y": np.array([[1, 0, size * amount], [0, 1, 0], [0, 0, 1]]),
        "rotate": np.array([[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1]]),
    }[name]
    to, back = np.eye(3), np.eye(3)
    to[:2, 2], back[:2, 2] = centre, -centre
    where = to @ matrix @ back @ np.stack((rows.ravel(), columns.ravel(), np.ones(size * size)))
    return where[0].reshape(size, size), where[1].reshape(size, size)


def test_the_form_of_feddecorr_has_its_ranges_and_its_geometry() -> None:
    text, shape = "autoaugment:feddecorr", (3, 32, 32)
    images = pictures(100, shape)
    drawn = draw(text, 40, 100, shape)
    kinds, amounts = drawn["augment.auto.kind"], drawn["augment.auto.amount"].astype(np.float64)
    levels = {(name, place, level) for pair in POLICY for place, (name, _, level) in enumerate(pair)}
    ranges = {"rotate": (-30, 30), "shear_y": (-0.3, 0.3), "solarize": (0, 256)}
    ranges |= dict.fromkeys(("translate_x", "translate_y"), (-150 / 331, 150 / 331))
    ranges |= dict.fromkeys(("colour", "contrast", "brightness", "sharpness"), (0.1, 1.9))
    for name, ends in ranges.items():
        edges = np.linspace(*ends, 11)
        for place in (0, 1):
            found = amounts[..., place][kinds[..., place] == OPERATIONS.index(name)]
            allowed = [(edges[level], edges[level + 1]) for n, p, level in levels if (n, p) == (name, place)]
            assert all(any(a - 1e-5 <= value <= b + 1e-5 for a, b in allowed) for value in found)
            assert all(((found >= a) & (found <= b)).any() for a, b in allowed)
    assert set(amounts[kinds == OPERATIONS.index("posterize")]) == {2.0}  # seven bits

    compared = 0
    for step in range(40):
        out = apply(text, images, drawn, step)
        for i in range(100):
            pair = names(kinds[step, i])
            moved = [n for n in pair if n in ("rotate", "shear_y", "translate_x", "translate_y")]
            if len(moved) != 1 or "nothing" not in pair:
                continue
            y, x = feddecorr_source(moved[0], amounts[step, i].sum(), 32)
            near_a_half = (np.abs(y % 1 - 0.5) < 1e-3) | (np.abs(x % 1 - 0.5) < 1e-3)  # either pixel is as near
            y, x = np.floor(y + 0.5).astype(int), np.floor(x + 0.5).astype(int)
            inside = (y >= 0) & (y < 32) & (x >= 0) & (x < 32)
            wanted = np.where(inside[..., None], images[i][y.clip(0, 31), x.clip(0, 31)], 0)
            assert near_a_half.mean() < 0.1
            np.testing.assert_array_equal(out[i][~near_a_half], wanted[~near_a_half])
            compared += 1
    assert compared > 100


def test_two_moves_of_one_picture_cost_one_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = torch.Tensor.index_select

    def counted(self: torch.Tensor, *given: object) -> torch.Tensor:
        calls.append(self.shape)
        return real(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "index_select", counted)
    apply("autoaugment", pictures(8, (3, 16, 16)), draw("autoaugment", 1, 8, (3, 16, 16)))
    assert [len(shape) for shape in calls] == [2, 1, 1]  # pixels once, tables twice
