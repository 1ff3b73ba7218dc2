"""The Hessian of a loss as something to multiply vectors with, and what follows from products alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isofed.diagnostics.sampling import Data, judging, logits_of, place, trained
from isofed.diagnostics.twice import TwiceDifferentiable
from isofed.draws import generator
from isofed.engine.lane import starved
from isofed.errors import NotFinite

Loss = Callable[[Tensor, Tensor], Tensor]  # of logits and labels: the mean over samples
Progress = Callable[[int, int], None]  # is told the products that are done, and how many there can still be with them

DEFLATE = 10  # top eigenvectors in which a Hessian is taken as it is, unless told otherwise
_TOGETHER = 8  # probes that share a forward pass, and after which it is asked whether they are enough


class Eigenvalues(NamedTuple):
    """The largest eigenvalues, the largest first."""

    values: Tensor  # [count], float64 on the CPU
    vectors: Tensor  # [count, parameters], of length 1
    errors: Tensor  # [count], length of H v - value v: an eigenvalue lies within this distance of the value
    products: int  # of the Hessian with a vector
    converged: bool  # whether the errors are within the tolerance


class Hessian:
    """Of the mean loss over a sample, in the parameters that are trained, as something to multiply with."""

    def __init__(self, network: nn.Module, data: Data, loss: Loss, batch_size: int) -> None:
        if len(data[0]) != len(data[1]) or not len(data[0]):
            raise ValueError("data are inputs and as many labels, at least one")
        self.network, self.data, self.loss, self.batch_size = network, data, loss, batch_size
        found = trained(network)
        self.names, self.parameters = tuple(found), list(found.values())
        self.sizes = [p.numel() for p in self.parameters]
        self.size, self.device, self.dtype = sum(self.sizes), place(network), self.parameters[0].dtype

    def times(self, vectors: Tensor) -> Tensor:
        """The products with the rows of ``vectors``, [count, parameters]; they share the forward passes."""
        while True:
            try:
                return self._times(vectors)
            except RuntimeError as error:
                if self.batch_size == 1 or not starved(error):
                    raise
            # Smaller batches change the result by rounding only.
            self.batch_size = min(self.batch_size, len(self.data[1])) // 2 or 1
            torch.cuda.empty_cache()

    def _times(self, vectors: Tensor) -> Tensor:
        result = torch.zeros_like(vectors)
        with judging(self.network), torch.enable_grad(), _full_precision(), TwiceDifferentiable():
            for inputs, labels in zip(*(d.split(self.batch_size) for d in self.data), strict=True):
                value = self.loss(logits_of(self.network(inputs.to(self.device))), labels.to(self.device))
                share = len(labels) / len(self.data[1])
                gradient = torch.autograd.grad(value, self.parameters, create_graph=True, materialize_grads=True)
                for row, vector in zip(result, vectors, strict=True):
                    parts = zip(gradient, vector.split(self.sizes), strict=True)
                    along = torch.stack([(g * v.view_as(g)).sum() for g, v in parts]).sum()
                    if along.requires_grad:  # otherwise the loss is linear
                        again = torch.autograd.grad(along, self.parameters, retain_graph=True, materialize_grads=True)
                        row += share * torch.cat([a.flatten() for a in again])
        if not bool(result.isfinite().all()):
            raise NotFinite("the loss of this network has second derivatives that are not finite")
        return result

    def top(
        self, count: int, tolerance: float, iterations: int, seed: int, progress: Progress | None = None
    ) -> Eigenvalues:
        """Lanczos' method: H in a basis of start, H start, H H start, ..., where it has three diagonals only."""
        iterations = min(max(iterations, count), self.size)
        diagonal: list[float] = []
        beside: list[float] = []
        basis = [_unit(self.normal(seed, 0))]
        while True:
            product = self.times(basis[-1][None])[0]
            diagonal.append(float(basis[-1] @ product))
            rest = _orthogonal(product, basis)
            length = float(rest.norm())
            if progress:
                progress(len(diagonal), iterations)
            values, mixing = torch.linalg.eigh(_tridiagonal(diagonal, beside))
            errors, largest = length * mixing[-1].abs(), float(values.abs().max())
            converged = len(values) >= count and bool((errors[-count:] <= tolerance * largest).all())
            if converged or len(diagonal) == iterations:
                break
            if length <= 1e-6 * largest:  # nothing new lies this way, but there may be more eigenvalues elsewhere
                rest, length = _orthogonal(self.normal(seed, len(diagonal)), basis), 0.0
            basis.append(_unit(rest))
            beside.append(length)
        top = slice(len(values) - count, None)
        vectors = torch.zeros(count, self.size, dtype=self.dtype, device=self.device)
        for q, row in zip(basis, mixing[:, top].flip(1).to(vectors), strict=True):
            vectors += row[:, None] * q
        return Eigenvalues(values[top].flip(0), vectors, errors[top].flip(0), len(diagonal), converged)

    def probed(self, probes: int, deflate: int, seed: int, progress: Progress | None) -> Iterator[Tensor]:
        """Independent estimates of the diagonal, in groups [probes, parameters] and double precision.

        v * H v of random signs v has the noise of all that lies beside the diagonal, most of it in a few directions.
        For any matrix A that does not depend on v, diag A + v * (H - A) v has the same mean; here A is H in its top
        eigenvectors.
        """
        most = -(-max(probes, _TOGETHER) // _TOGETHER) * _TOGETHER
        first = min(deflation_products(deflate), self.size)
        tell = progress or (lambda done, of: None)
        vectors, values, known = self.zeros()[None], self.zeros()[:1], self.zeros()
        if deflate:
            # They need not be exact.
            found = self.top(min(deflate, self.size), 0.05, first, seed, lambda n, _: tell(n, first + most))
            vectors, values, first = found.vectors.double(), found.values.to(self.device), found.products
            known = values @ vectors.square()
        for start in range(0, most, _TOGETHER):
            signs = torch.stack([self.signs(seed, start + n) for n in range(_TOGETHER)])
            products, signs = self.times(signs).double(), signs.double()
            tell(first + start + _TOGETHER, first + most)
            yield known + signs * (products - (signs @ vectors.T * values) @ vectors)

    def exact_diagonal(self, progress: Progress | None) -> Tensor:
        """One product for each axis."""
        values = self.zeros()
        for start in range(0, self.size, _TOGETHER):
            axes = torch.arange(start, min(start + _TOGETHER, self.size), device=self.device)
            rows = torch.nn.functional.one_hot(axes, self.size).to(self.dtype)
            values[axes] = self.times(rows).gather(1, axes[:, None])[:, 0].double()
            if progress:
                progress(int(axes[-1]) + 1, self.size)
        return values

    def signs(self, seed: int, number: int) -> Tensor:
        drawn = generator(seed, "hessian/signs", number).integers(0, 2, self.size, dtype="int8")
        return torch.from_numpy(2 * drawn - 1).to(self.device, self.dtype)

    def normal(self, seed: int, number: int) -> Tensor:
        drawn = generator(seed, "hessian/start", number).standard_normal(self.size)
        return torch.from_numpy(drawn).to(self.device, self.dtype)

    def zeros(self) -> Tensor:
        return torch.zeros(self.size, dtype=torch.float64, device=self.device)

    def by_tensor(self, rows: Tensor) -> Tensor:
        """Sums over each tensor of rows [count, parameters]."""
        return torch.stack([part.sum(1) for part in rows.split(self.sizes, 1)], 1).cpu()


def deflation_products(deflate: int) -> int:
    """How many products with the Hessian are made, at most, to find so many of its top eigenvectors roughly."""
    return 4 * deflate


@contextmanager
def _full_precision() -> Iterator[None]:
    """The GPU's kernels are deterministic and do not round to TF32: second derivatives are small differences."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = cudnn.benchmark = False
    cudnn.deterministic = True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


def _tridiagonal(diagonal: list[float], beside: list[float]) -> Tensor:
    one, two = (torch.tensor(values, dtype=torch.float64) for values in (diagonal, beside))
    return torch.diag(one) + torch.diag(two, 1) + torch.diag(two, -1)


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm()


def _orthogonal(vector: Tensor, basis: list[Tensor]) -> Tensor:
    """What is left of a vector beside a basis; twice, because once leaves rounding in."""
    vector = vector.clone()
    for _ in range(2):
        for q in basis:
            vector -= (q @ vector) * q
    return vector
