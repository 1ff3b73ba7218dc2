"""How far students' answers are from a teacher's."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from isofed.functional.kernels import found_before, here, tl, triton

WIDEST = 8192  # classes


def distance_from_teacher(z: Tensor, teacher: Tensor, weight: float = 1.0) -> Tensor:
    """The mean over a batch of KL(softmax teacher || softmax z), times ``weight``; in at least float32.

    There may be several students, whose logits ``z`` lie one behind the other: [n * batch, classes] against [batch,
    classes]; then it is the sum over them. The teacher has no gradient.

    >>> float(distance_from_teacher(torch.zeros(3, 2), torch.zeros(3, 2)))
    0.0
    """
    teacher = teacher.detach()
    rows, classes = teacher.shape
    if z.shape[1:] != teacher.shape[1:] or not rows or len(z) % rows:
        raise ValueError(f"{list(z.shape)} logits are not those of students of {list(teacher.shape)}")
    if here(z) and z.dtype != torch.float64 and z.is_contiguous() and classes <= WIDEST:
        return _Distance.apply(z, teacher.contiguous(), weight)
    return _plain(z, teacher, weight)


def _plain(z: Tensor, teacher: Tensor, weight: float) -> Tensor:
    z, teacher = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (z, teacher))
    students = z.view(-1, *teacher.shape).log_softmax(2)
    return weight / len(teacher) * kl_div(students, teacher.softmax(1).expand_as(students), reduction="sum")


class _Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, teacher: Tensor, weight: float) -> Tensor:
        rows, classes = z.shape
        found, gradient = torch.empty(rows, device=z.device), torch.empty_like(z)
        block = triton.next_power_of_2(classes)
        _both[(rows,)](z, teacher, found, gradient, len(teacher), classes, weight / len(teacher), block)
        ctx.save_for_backward(z, gradient)
        ctx.plain = partial(_plain, teacher=teacher, weight=weight)
        return found.sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return found_before(ctx, g), None, None


if triton is not None:

    @triton.jit
    def _both(z, teacher, found, gradient, batch, classes, weight, BLOCK: tl.constexpr):
        """A student's distance for one sample, and its gradient."""
        row, c = tl.program_id(0), tl.arange(0, BLOCK)
        inside = c < classes
        s = tl.load(z + row * classes + c, inside, float("-inf")).to(tl.float32)
        t = tl.load(teacher + row % batch * classes + c, inside, float("-inf")).to(tl.float32)
        s -= tl.max(s, 0)
        t -= tl.max(t, 0)
        es, et = tl.exp(s), tl.exp(t)
        all_s, all_t = tl.sum(es, 0), tl.sum(et, 0)
        q, p = es / all_s, et / all_t
        apart = tl.where(inside & (p > 0), p * ((t - tl.log(all_t)) - (s - tl.log(all_s))), 0.0)
        # A NaN anywhere makes NaN of all sums; a comparison with it must not hide that.
        apart = tl.where(all_s + all_t == all_s + all_t, apart, all_s + all_t)
        tl.store(found + row, weight * tl.sum(apart, 0))
        tl.store(gradient + row * classes + c, (weight * (q - p)).to(gradient.dtype.element_ty), inside)
