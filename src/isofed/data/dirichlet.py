"""Splits that are drawn from a Dirichlet distribution: of labels, as in most papers, and of sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isofed.data.base import Index
from isofed.data.splitting import Iid, Samples, by_owner, check_alpha, check_enough, check_least, even
from isofed.errors import UserError


@dataclass(frozen=True)
class Dirichlet:
    """Label shift: the share of each class a client gets is drawn from a Dirichlet distribution.

    With ``balance`` a client that already holds its even share of all samples gets no more, which is what the code
    of MOON, NIID-Bench, FedDecorr, FedAlign and FedUV does. Drawn again until every client has ``min`` samples,
    at most ``tries`` times (by default as often as a few seconds allow, up to 10,000). ``alpha=inf`` means ``iid``.
    With ``numpy_seed`` the split does not depend on the run's seed: it is, sample by sample, the one that such code has
    after ``numpy.random.seed``, so that published numbers can be compared on the very clients they were measured on.
    """

    alpha: float
    balance: bool = True
    min: int = 10
    tries: int | None = None
    numpy_seed: int | None = None

    def __post_init__(self) -> None:
        check_alpha("dirichlet", self.alpha)
        check_least("dirichlet", "min", self.min, 0)
        check_least("dirichlet", "tries", 1 if self.tries is None else self.tries, 1)
        if self.numpy_seed is not None and not 0 <= self.numpy_seed < 2**32:
            raise UserError(f"dirichlet: numpy_seed must be from 0 to {2**32 - 1}, not {self.numpy_seed}")

    def split(self, samples: Samples, rng: np.random.Generator) -> list[Index]:
        clients = samples.among()
        check_enough("dirichlet", self.min, clients, samples.count)
        if self.numpy_seed is not None:
            return self._as_public_code(samples, clients, np.random.RandomState(self.numpy_seed))
        if math.isinf(self.alpha):
            return Iid().split(samples, rng)
        sizes = np.bincount(samples.labels, minlength=samples.classes)
        shares = self._shares(sizes, clients, rng)
        owner = np.empty(samples.count, dtype=np.int64)
        for label, share in enumerate(shares):
            mine = rng.permutation(np.flatnonzero(samples.labels == label))
            owner[mine] = np.repeat(np.arange(clients), share)
        return [rng.permutation(places) for places in by_owner(owner, clients)]

    def _shares(self, sizes: Index, clients: int, rng: np.random.Generator) -> Index:
        """How many samples of each class each client gets, [classes, clients].

        Only these numbers decide whether a try is good, so samples are not moved before one is.
        """
        best = 0
        for _ in range(self._tries(len(sizes), clients)):
            shares = self._try(sizes, clients, rng)
            if shares is None:
                continue
            smallest = int(shares.sum(0).min())
            if smallest >= self.min:
                return shares
            best = max(best, smallest)
        raise self._not_found(len(sizes), clients, best)

    def _try(self, sizes: Index, clients: int, rng: np.random.Generator) -> Index | None:
        held = np.zeros(clients, dtype=np.int64)
        shares = np.zeros((len(sizes), clients), dtype=np.int64)
        for label, size in enumerate(sizes):
            share = self._share(rng.dirichlet(np.full(clients, self.alpha)), size, held, sizes.sum())
            if share is None:
                return None  # draw again
            shares[label] = share
            held += share
        return shares

    def _share(self, weights: npt.NDArray[np.float64], size: int, held: Index, total: int) -> Index | None:
        """How a class is divided after these weights; none if all the weight lies on clients that are full: 0/0."""
        if self.balance:
            weights = weights * (held < total / len(held))
        sum_ = weights.sum()
        if not (math.isfinite(sum_) and sum_ > 0):
            return None
        cuts = (np.cumsum(weights / sum_) * size).astype(np.int64)
        cuts[-1] = size  # so the last client also gets what rounding down leaves, as in the published code
        return np.diff(np.minimum(cuts, size), prepend=0)

    def _as_public_code(self, samples: Samples, clients: int, old: np.random.RandomState) -> list[Index]:
        """The draws of the public code in its order, from numpy's old generator."""
        if math.isinf(self.alpha):
            return even(old.permutation(samples.count), clients)
        best, owner = 0, np.empty(samples.count, dtype=np.int64)
        for _ in range(self._tries(samples.classes, clients)):
            held = np.zeros(clients, dtype=np.int64)
            for label in range(samples.classes):
                mine = np.flatnonzero(samples.labels == label)
                old.shuffle(mine)
                share = self._share(old.dirichlet(np.full(clients, self.alpha)), len(mine), held, samples.count)
                if share is None:  # it divides by zero there, and the last client gets them all
                    share = np.zeros_like(held)
                    share[-1] = len(mine)
                owner[mine] = np.repeat(np.arange(clients), share)
                held += share
            if held.min() >= self.min:
                return by_owner(owner, clients)
            best = max(best, int(held.min()))
        raise self._not_found(samples.classes, clients, best)

    def _tries(self, classes: int, clients: int) -> int:
        # A limit on work, not on time, so that whether a split is found does not depend on the machine.
        quick = max(50, min(10_000, 30_000_000 // (classes * (clients + 200))))
        return quick if self.tries is None else self.tries

    def _not_found(self, classes: int, clients: int, best: int) -> UserError:
        return UserError(
            f"no split 'dirichlet:{self.alpha:g}' in {self._tries(classes, clients):,} tries gave each of {clients} "
            f"clients {self.min} samples (the best left one with {best}): take a larger alpha, fewer clients or a "
            f"smaller min, like 'dirichlet:{self.alpha:g},min={best}'"
        )


@dataclass(frozen=True)
class Quantity:
    """Size shift: the sizes are drawn from a Dirichlet distribution, the labels at random.

    Every client gets ``min`` samples first and its share of the rest on top, so no drawing again is needed.
    """

    alpha: float
    min: int = 1

    def __post_init__(self) -> None:
        check_alpha("quantity", self.alpha)
        check_least("quantity", "min", self.min, 0)

    def split(self, samples: Samples, rng: np.random.Generator) -> list[Index]:
        clients = samples.among()
        check_enough("quantity", self.min, clients, samples.count)
        if math.isinf(self.alpha):
            return Iid().split(samples, rng)
        rest = samples.count - self.min * clients
        shares = np.cumsum(rng.dirichlet(np.full(clients, self.alpha)))
        if not math.isfinite(shares[-1]) or shares[-1] <= 0:
            raise UserError(f"alpha of split 'quantity' is too small to draw from, {self.alpha:g}: take 0.01 or more")
        cuts = (shares / shares[-1] * rest).astype(np.int64) + self.min * np.arange(1, clients + 1)
        return np.split(rng.permutation(samples.count), cuts[:-1])
