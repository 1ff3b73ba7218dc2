"""The distance of students' answers from a teacher's, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from isofed.functional.teaching import distance_from_teacher

_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
DEVICES = ["cpu", pytest.param("cuda", marks=_GPU)]


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def by_hand(z: Tensor, teacher: Tensor, weight: float) -> tuple[float, np.ndarray]:
    """Value, and gradient with respect to z."""
    t = np.tile(softmax(teacher.double().numpy()), (len(z) // len(teacher), 1))
    s = softmax(z.double().numpy())
    factor = weight / len(teacher)
    terms = np.where(t > 0, t * (np.log(np.where(t > 0, t, 1)) - np.log(np.maximum(s, 1e-300))), 0)
    return factor * float(terms.sum()), factor * (s - t)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("students", "batch", "classes"), [(1, 5, 10), (2, 64, 10), (3, 7, 100), (2, 1, 2)])
def test_value_and_gradient(device: str, kind: torch.dtype, students: int, batch: int, classes: int) -> None:
    draws = torch.Generator().manual_seed(batch)
    z = (4 * torch.randn(students * batch, classes, generator=draws)).to(kind)
    teacher = 4 * torch.randn(batch, classes, generator=draws)
    wanted, slope = by_hand(z, teacher, 1.75)
    here, other = z.to(device).requires_grad_(), teacher.to(device).requires_grad_()
    value = distance_from_teacher(here, other, 1.75)
    value.backward()
    assert value.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
    assert float(value.detach()) == pytest.approx(wanted, rel=2e-5)
    assert here.grad is not None and here.grad.dtype == kind and other.grad is None
    near = 1e-2 if kind == torch.bfloat16 else 1e-5
    torch.testing.assert_close(here.grad.cpu().double(), torch.from_numpy(slope), rtol=near, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_a_teacher_who_excludes_classes(device: str) -> None:
    """Of a class whose probability is exactly 0 nothing is taught, and what is said of it has a gradient."""
    teacher = torch.tensor([[200.0, 0.0, -300.0], [0.0, 0.0, -400.0]])
    z = torch.tensor([[1.0, 2.0, 3.0], [0.5, -0.5, 2.0]])
    wanted, slope = by_hand(z, teacher, 1.0)
    here = z.to(device).requires_grad_()
    value = distance_from_teacher(here, teacher.to(device))
    (gradient,) = torch.autograd.grad(value, here)
    assert float(value.detach()) == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(gradient.cpu().double(), torch.from_numpy(slope), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_times_a_number_and_twice(device: str) -> None:
    draws = torch.Generator().manual_seed(0)
    z, teacher = torch.randn(6, 4, generator=draws), torch.randn(3, 4, generator=draws).to(device)
    here = z.clone().to(device).requires_grad_()
    (once,) = torch.autograd.grad(3 * distance_from_teacher(here, teacher), here, create_graph=True)
    (twice,) = torch.autograd.grad(once.square().sum(), here)
    _, slope = by_hand(z, teacher.cpu(), 3.0)
    torch.testing.assert_close(once.detach().cpu().double(), torch.from_numpy(slope), rtol=1e-5, atol=1e-7)
    s = softmax(z.double().numpy())
    rows = [2 * (np.diag(p) - np.outer(p, p)) @ g for p, g in zip(s, slope, strict=True)]  # times 3 / 3
    torch.testing.assert_close(twice.cpu().double(), torch.from_numpy(np.array(rows)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 4), (2, 4), (6, 3), (6,)])
def test_students_of_another_batch_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are not those of students of"):
        distance_from_teacher(torch.zeros(shape), torch.zeros(3, 4))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("whose", ["student", "teacher"])
def test_what_is_no_number_is_handed_on(device: str, whose: str) -> None:
    z, teacher = torch.zeros(2, 3, device=device), torch.zeros(2, 3, device=device)
    (z if whose == "student" else teacher)[1, 2] = float("nan")
    assert distance_from_teacher(z.requires_grad_(), teacher).isnan()
