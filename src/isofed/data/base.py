"""What a data set is: pictures, labels and, where there are several sources, the domain each picture is from.

Pictures stay as they were read (``uint8``, or ``float32`` for data that are not pictures of light), channels
last, so that a whole data set fits on the device and is augmented there in batches. ``mean`` and ``std`` say how
a step normalises them: of values scaled to [0, 1] for ``uint8``, of the values themselves for ``float32``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isofed import draws
from isofed.data.groups import whole_groups
from isofed.errors import UserError
from isofed.words import kind_of, many

Index = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

_CHANNELS = (1, 3, 4)  # of pictures as people have them
AS_PARTS = "it must be Part(images, labels), with images [N, H, W, C] and labels [N]"
AS_DATASET = (
    "make one with isofed.data.Dataset.build(NAME, classes=NAMES, train=Part(images, labels), test=Part(...)), where "
    "images are [N, H, W, C]; of a TensorDataset they are tensors[0].permute(0, 2, 3, 1), and the labels tensors[1]"
)
_CHUNK = 1 << 24  # values looked at in one go, so that a large data set is never copied whole


@dataclass(frozen=True, eq=False, init=False)
class Part:
    """One part (train, validation or test) of a data set, of tensors or of NumPy arrays."""

    images: Tensor  # uint8 or float32 [N, H, W, C], contiguous
    labels: Tensor  # int64 [N]
    domains: Tensor | None  # int64 [N]
    groups: Tensor | None  # int64 [N], such as patients: samples of one group are set aside together

    def __init__(
        self,
        images: Tensor | Array,
        labels: Tensor | Array,
        domains: Tensor | Array | None = None,
        groups: Tensor | Array | None = None,
    ) -> None:
        object.__setattr__(self, "images", _tensor("images", images))
        object.__setattr__(self, "labels", _tensor("labels", labels))
        object.__setattr__(self, "domains", None if domains is None else _tensor("domains", domains))
        object.__setattr__(self, "groups", None if groups is None else _tensor("groups", groups))
        self._check()

    def _check(self) -> None:
        if self.images.dim() != 4:
            raise UserError(f"images must have the shape [N, H, W, C], not {list(self.images.shape)}")
        if self.images.dtype not in (torch.uint8, torch.float32):
            raise UserError(f"images must be uint8 or float32, not {_dtype(self.images)}")
        for what, values in (("labels", self.labels), ("domains", self.domains), ("groups", self.groups)):
            if values is None:
                continue
            if values.dtype != torch.int64 or values.dim() != 1:
                raise UserError(f"{what} must be int64 [N], not {_dtype(values)} {list(values.shape)}")
            if len(values) != len(self.images):
                raise UserError(f"there are {len(self.images)} images but {len(values)} {what}: they must match")
        if not self.images.is_contiguous():
            object.__setattr__(self, "images", self.images.contiguous())

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Part({len(self):,} pictures, {_dtype(self.images)} {list(self.images.shape[1:])})"

    def subset(self, index: Index) -> Part:
        """The samples at these places, in this order."""
        where = torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64)).to(self.labels.device)
        domains, groups = (None if of is None else of[where] for of in (self.domains, self.groups))
        return Part(self.images[where], self.labels[where], domains, groups)

    def divided(self, fraction: float, rng: np.random.Generator) -> tuple[Index, Index]:
        """The places that are kept and those that are set aside: class by class, domain by domain, in whole groups."""
        labels, domains, groups = (
            None if of is None else of.cpu().numpy() for of in (self.labels, self.domains, self.groups)
        )
        assert labels is not None
        if groups is None:
            return stratified(labels, fraction, rng, domains)
        return whole_groups(labels, groups, fraction, rng, domains)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training part, a test part and what their numbers mean; make one with :meth:`build`, which checks it."""

    name: str
    classes: tuple[str, ...]
    train: Part
    test: Part
    mean: tuple[float, ...]
    std: tuple[float, ...]
    domains: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what a person should know about how the data were read

    @classmethod
    def build(
        cls,
        name: str,
        classes: Sequence[str] | int,
        train: Part,
        test: Part,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        domains: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> Dataset:
        """A checked data set; ``mean`` and ``std`` come from the training part where they are not given.

        ``classes`` are names, or a number of classes that then go by their numbers.
        """
        if isinstance(classes, int):
            classes = [str(number) for number in range(classes)]
        for kind, names in (("classes", classes), ("domains", domains)):
            if isinstance(names, str) or not all(isinstance(one, str) for one in names):
                raise UserError(f"the {kind} of data set '{name}' must be a list of names, not {names!r}")
        for what, part in (("train", train), ("test", test)):
            if not isinstance(part, Part):
                raise UserError(f"{what} of data set '{name}' is {kind_of(part)}: {AS_PARTS}")
        _check(name, classes, train, test, domains)
        if mean is None or std is None:
            own = moments(train.images)
            mean, std = mean or own[0], std or own[1]
        channels = train.images.shape[3]
        if len(mean) != channels or len(std) != channels:
            raise UserError(
                f"data set '{name}' has {channels} channels, so mean and std need {channels} numbers each, "
                f"not {len(mean)} and {len(std)}"
            )
        if not all(map(math.isfinite, [*mean, *std])) or min(std) <= 0:
            raise UserError(f"data set '{name}' needs a finite mean and a std above zero, not {mean} and {std}")
        notes = [*notes, *torn(train, test)]
        return cls(name, tuple(classes), train, test, tuple(mean), tuple(std), tuple(domains), tuple(notes))

    def __repr__(self) -> str:
        channels, height, width = self.shape
        domains = f", {len(self.domains)} domains" if self.domains else ""
        return (
            f"Dataset('{self.name}': {len(self.train):,} train, {len(self.test):,} test, "
            f"pictures {height}x{width}x{channels}, {many(len(self.classes), 'class')}{domains})"
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one picture."""
        height, width, channels = self.train.images.shape[1:]
        return channels, height, width

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of everything that can change a result; the name is not part of it."""
        digest = hashlib.blake2b(digest_size=16)
        names = [*self.classes, "", *self.domains]
        digest.update(repr((names, [float(v).hex() for v in (*self.mean, *self.std)])).encode())
        for part in (self.train, self.test):
            # Data without groups have the fingerprint that they had before there were any.
            for values in (part.images, part.labels, part.domains, *([] if part.groups is None else [part.groups])):
                if values is None:
                    digest.update(b"none")
                    continue
                digest.update(f"{values.dtype}{list(values.shape)}".encode())
                digest.update(values.detach().cpu().contiguous().numpy().reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def _tensor(what: str, values: object) -> Tensor:
    """A tensor of what may also be a NumPy array; labels of any whole numbers will do."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "uif":
        if what != "images" and values.dtype.kind in "ui":
            values = values.astype(np.int64)
        elif not values.dtype.isnative:
            values = values.astype(values.dtype.newbyteorder("="))
        return torch.from_numpy(np.ascontiguousarray(values))
    if isinstance(values, Tensor):
        return values
    found = f"a NumPy array of {values.dtype}" if isinstance(values, np.ndarray) else kind_of(values)
    wanted = "of uint8 or float32, [N, H, W, C]" if what == "images" else "of whole numbers, [N]"
    raise UserError(f"{what} must be a PyTorch tensor or a NumPy array {wanted}, not {found}")


def check_dataset(given: object) -> None:
    """Refuse what somebody hands over as a data set and is none."""
    if given is not None and not isinstance(given, Dataset):
        raise UserError(f"the data set is {kind_of(given)}: {AS_DATASET}")


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _check(name: str, classes: Sequence[str], train: Part, test: Part, domains: Sequence[str]) -> None:
    """Refuse a data set that would fail later, or train on nonsense."""
    of = f"data set '{name}'"
    for what, part in (("training", train), ("test", test)):
        if not len(part):
            raise UserError(f"{of} has no {what} samples: it needs at least one")
    if train.images.shape[1:] != test.images.shape[1:] or train.images.dtype != test.images.dtype:
        one, two = (f"{_dtype(p.images)} {list(p.images.shape[1:])}" for p in (train, test))
        raise UserError(f"{of} has training images {one} but test images {two}: they must be alike")
    _, first, *rest = train.images.shape
    if rest[1] not in _CHANNELS and first in _CHANNELS and first <= min(rest):
        raise UserError(
            f"{of} has images {list(train.images.shape)}, which look like [N, C, H, W]: isofed has the channels last, "
            "so give images.permute(0, 2, 3, 1)"
        )
    if not all(train.images.shape[1:]):
        raise UserError(f"{of} has images without a pixel: height, width and channels must be at least 1")
    if len(classes) < 2:
        raise UserError(f"{of} has {len(classes)} class: there is nothing to tell apart, it needs at least two")
    for names, kind in ((classes, "classes"), (domains, "domains")):
        if len(set(names)) != len(names):
            raise UserError(f"{of} names two of its {kind} the same: {', '.join(names)}")
    for part in (train, test):
        _check_range(of, "label", part.labels, len(classes))
    if (train.domains is None) != (not domains) or (test.domains is None) != (not domains):
        raise UserError(f"{of} must give domain names and a domain for every sample of both parts, or none of these")
    for part in (train, test):
        if part.domains is not None:
            _check_range(of, "domain", part.domains, len(domains))
    _check_present(of, "class", train.labels, classes)
    if train.domains is not None:
        _check_present(of, "domain", train.domains, domains)
    for what, part in (("training", train), ("test", test)):
        if part.images.dtype == torch.float32:
            for chunk in torch.split(part.images.view(-1), _CHUNK):
                if not bool(torch.isfinite(chunk).all()):
                    raise UserError(f"{of} has {what} images with NaN or infinite values: every value must be finite")


def _check_range(of: str, what: str, values: Tensor, count: int) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= count:
        wrong = low if low < 0 else high
        raise UserError(f"{of} has the {what} {wrong}: with {count} names they must be 0 to {count - 1}")


def _check_present(of: str, kind: str, values: Tensor, names: Sequence[str]) -> None:
    missing = (torch.bincount(values, minlength=len(names)) == 0).nonzero()
    if len(missing):
        number = int(missing[0])
        raise UserError(
            f"{of} has no training sample of {kind} '{names[number]}' (number {number}): "
            f"every {kind} needs at least one, numbered from 0 without gaps"
        )


def moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, of values in [0, 1] for uint8 and as they are for float32."""
    values = images.reshape(-1, images.shape[-1])
    means, stds = [], []
    for channel in values.unbind(1):
        if images.dtype == torch.uint8:
            # A histogram gives both exactly, with one pass and no copy in floating point.
            counts = torch.zeros(256, dtype=torch.float64)
            for chunk in torch.split(channel, _CHUNK):
                counts += torch.bincount(chunk.int().cpu(), minlength=256)
            levels = torch.arange(256, dtype=torch.float64) / 255
            mean = float((counts * levels).sum() / counts.sum())
            variance = float((counts * (levels - mean) ** 2).sum() / counts.sum())
            largest = float(levels[counts > 0].max())
        else:
            chunks = torch.split(channel, _CHUNK)
            # By NumPy: PyTorch's sums have other last bits with other threads, and a run goes on with equal data only.
            mean = sum(float(_doubles(c).sum()) for c in chunks) / len(channel)
            variance = sum(float(((_doubles(c) - mean) ** 2).sum()) for c in chunks) / len(channel)
            largest = max(float(c.abs().max()) for c in chunks)
        means.append(mean)
        # A channel that (nearly) never changes would be divided by (nearly) zero.
        stds.append(max(math.sqrt(variance), 1e-3 * largest) or 1.0)
    return tuple(means), tuple(stds)


def _doubles(values: Tensor) -> npt.NDArray[np.float64]:
    return np.ascontiguousarray(values.cpu().double().numpy())


def stratified(
    labels: Index, fraction: float, rng: np.random.Generator, domains: Index | None = None
) -> tuple[Index, Index]:
    """Divide places into (kept, taken) with about ``fraction`` of every class, and of every domain, taken.

    The shares of the groups are rounded so that their sum is right (largest remainder first), hence small groups
    are not all rounded down to nothing. At least one sample of every class, and of every domain, is kept.
    """
    key = labels if domains is None else labels * (int(domains.max(initial=0)) + 1) + domains
    names, group = np.unique(key, return_inverse=True)
    order = rng.permutation(len(labels))
    order = order[np.argsort(group[order], kind="stable")]  # each group together, at random inside
    sizes = np.bincount(group, minlength=len(names))
    share = fraction * sizes
    take = np.floor(share).astype(np.int64)
    by_remainder = rng.permutation(len(names))
    by_remainder = by_remainder[np.argsort((take - share)[by_remainder], kind="stable")]
    take[by_remainder[: round(fraction * len(labels)) - int(take.sum())]] += 1
    take = np.minimum(take, sizes)
    one_of = order[np.cumsum(sizes) - 1]
    for values in (labels,) if domains is None else (labels, domains):
        for value in np.unique(values[one_of]):
            mine = np.flatnonzero(values[one_of] == value)
            if take[mine].sum() == sizes[mine].sum():
                take[mine[np.argmax(take[mine])]] -= 1
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    taken = rank < np.repeat(take, sizes)
    return np.sort(order[~taken]), np.sort(order[taken])


def held_out(name: str, part: Part, fraction: float = 0.2) -> tuple[Part, Part]:
    """A training and a test part of data that come without one: always the same, whatever the seed of a run."""
    kept, taken = part.divided(fraction, draws.generator(0, "data/test"))
    if not len(taken):
        only = f"only {many(len(part), 'sample')}, too few"
        if part.groups is not None:
            only = f"{many(len(part.groups.unique()), 'group')} of samples, too few or too large"
        raise UserError(
            f"data set '{name}' has no test part and {only} to set {fraction:.0%} aside: "
            "add samples or give a test part"
        )
    return part.subset(kept), part.subset(taken)


def validation_split(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Part]:
    """Set a share of the training part aside, class by class and domain by domain, to choose settings on.

    Returns the data set with the rest as its training part (and its mean and std unchanged), and the part set aside.
    """
    train = dataset.train
    kept, taken = validation_places(train, fraction, seed)
    return dataclasses.replace(dataset, train=train.subset(kept)), train.subset(taken)


def torn(train: Part, test: Part) -> list[str]:
    """A sentence about groups that are in both parts of data which came divided."""
    if train.groups is None or test.groups is None:
        return []
    both = len(np.intersect1d(train.groups.cpu().numpy(), test.groups.cpu().numpy()))
    have = f"{many(both, 'group')} {'has' if both == 1 else 'have'}"
    told = f"{have} samples in both parts, so the test is not one of groups (such as patients) never seen"
    return [told] if both else []


def validation_places(train: Part, fraction: float, seed: int) -> tuple[Index, Index]:
    """The places in the training part that stay in training, and those that are set aside."""
    if not 0 < fraction < 1:
        raise UserError(f"the validation share must be between 0 and 1, like 0.1, not {fraction:g}")
    kept, taken = train.divided(fraction, draws.generator(seed, "data/validation"))
    if not len(taken):
        why = "a sample" if train.groups is None else "groups are set aside whole, and one"
        raise UserError(
            f"a validation share of {fraction:g} of {len(train)} training samples is empty, because {why} of every "
            "class must stay in training: ask for a larger share or use more data"
        )
    return kept, taken
