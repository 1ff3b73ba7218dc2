"""Dropout in C: the bits of PyTorch's operations, and of the kernel on a GPU, in one go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from isofed.functional import native
from isofed.models.dropout import Dropout

pytestmark = pytest.mark.skipif(native.compiled_by() == "none", reason="there is no C compiler")
LAST = torch.channels_last


def in_c(y: Tensor) -> bool:
    return "_Dropped" in type(y.grad_fn).__name__


def layer(p: float, key: int) -> Dropout:
    made = Dropout(p)
    made.key = torch.tensor(key)
    return made


@pytest.mark.parametrize("key", [0, -1, 2**63 - 1, -123456789])
@pytest.mark.parametrize("p", [0.5, 0.3, 1e-9])
@pytest.mark.parametrize("shape", [(64, 500), (10, 64, 14, 14), (3, 7, 5, 2), (1, 1, 1, 1), (130,), (0, 4), (2, 3, 4)])
def test_the_bits_are_those_of_pytorchs_operations(
    shape: tuple[int, ...], p: float, key: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws, drop = torch.Generator().manual_seed(1), layer(p, key)
    given, g = torch.randn(shape, generator=draws), torch.randn(shape, generator=draws)
    odd = torch.tensor([float("nan"), -float("inf"), -0.0])
    given.view(-1)[:3] = odd[: given.numel()]
    for x in [given, *([given.contiguous(memory_format=LAST)] if len(shape) == 4 else [])]:
        x.requires_grad_()
        found = []
        for switch in ("1", "0"):
            monkeypatch.setenv("ISOFED_FUSED", switch)
            y = drop(x)
            assert in_c(y) == (switch == "1") and y.stride() == x.stride()
            found.append([y.detach(), *torch.autograd.grad(y, x, g)])
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
            numbers = ~mine.isnan()
            assert torch.equal(mine.signbit()[numbers], theirs.signbit()[numbers])


def test_it_has_derivatives_of_any_order() -> None:
    drop, x = layer(0.5, 5), torch.rand(8, 6).add_(0.5).requires_grad_()
    kept = (drop(x) != 0).float() * 2
    (first,) = torch.autograd.grad(drop(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, 3 * x.square() * kept.pow(3))
    torch.testing.assert_close(second, 6 * x * kept.pow(3))
    (expanded,) = torch.autograd.grad(drop(x).sum(), x)  # whose gradient is one number, read again and again
    assert torch.equal(expanded, kept) and 0 < kept.mean() < 2


def test_what_only_pytorchs_operations_can_do_is_left_to_them() -> None:
    drop, x = layer(0.5, 7), torch.rand(8, 6).requires_grad_()
    assert in_c(drop(x)) and in_c(drop(x[::1]))
    others = (x.double(), x.bfloat16(), x[:, ::2], x.t(), x[:, :5])
    assert not any(in_c(drop(other)) for other in others)
    assert torch.equal(drop(x.t()), drop(x.t().contiguous()))
    with FakeTensorMode():
        drop.key = torch.tensor(7)
        assert drop(torch.rand(8, 6, requires_grad=True)).shape == (8, 6)


def test_without_a_key_or_outside_of_training_it_is_not_used() -> None:
    x = torch.rand(8, 6).requires_grad_()
    drop = Dropout(0.5)
    assert not in_c(nn.functional.relu(drop(x)))
    drop.key = torch.tensor(1)
    assert in_c(drop(x)) and drop.eval()(x) is x


@pytest.mark.parametrize("many", [torch.randn(3, 6, 9), torch.randn(3, 2, 5, 4, 3).permute(0, 1, 4, 2, 3)])
def test_many_gradients_at_once(many: torch.Tensor) -> None:
    drop, x = layer(0.5, 3), torch.randn_like(many[0]).requires_grad_()
    y = drop(x)
    assert in_c(y)
    (found,) = torch.autograd.grad(y, x, many, retain_graph=True, is_grads_batched=True)
    wanted = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in many]
    assert torch.equal(found, torch.stack(wanted))


def test_zeros_without_memory_stay_zeros() -> None:
    assert torch.equal(layer(0.5, 3)(torch._efficientzerotensor((4, 5))), torch.zeros(4, 5))
