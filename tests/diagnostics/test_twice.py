"""Convolutions with quick second derivatives, against PyTorch's own and against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.nn.functional import conv1d, conv2d, conv3d

from isofed.diagnostics.twice import TwiceDifferentiable
from tests.functional.test_distance import DEVICES

WAYS: list[tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    (conv2d, (2, 2, 5, 4), (3, 2, 3, 3), {}),
    (conv2d, (2, 2, 5, 4), (3, 2, 3, 2), {"padding": (1, 0), "stride": [2, 1]}),
    (conv2d, (2, 4, 6, 6), (4, 2, 2, 2), {"groups": 2, "dilation": 2, "padding": (1,)}),
    (conv2d, (2, 3, 4, 4), (3, 1, 3, 3), {"groups": 3, "padding": 1, "stride": 2}),  # of each channel alone
    (conv1d, (2, 2, 6), (3, 2, 3), {"padding": 1, "stride": 2}),
    (conv3d, (1, 2, 3, 3, 3), (2, 2, 2, 2, 2), {"padding": 1}),
]


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _quick(convolve: Callable[..., Tensor], **way: Any) -> Callable[..., Tensor]:
    def computed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with TwiceDifferentiable():
            return convolve(x, weight, bias, **way)

    return computed


@pytest.mark.parametrize(("convolve", "pictures", "filters", "way"), WAYS)
def test_first_and_second_derivatives_are_those_of_finite_differences(
    convolve: Callable[..., Tensor], pictures: tuple[int, ...], filters: tuple[int, ...], way: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    inputs = (_drawn(*pictures), _drawn(*filters), _drawn(filters[0]))
    quick = _quick(convolve, **way)
    torch.testing.assert_close(quick(*inputs), convolve(*inputs, **way))
    assert "_Convolution" in str(quick(*inputs).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
    assert gradcheck(quick, inputs, fast_mode=True)
    assert gradgradcheck(quick, inputs, fast_mode=True)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("frozen", ["", "pictures", "weight"])
@pytest.mark.parametrize("device", DEVICES)
def test_products_with_the_hessian_are_pytorchs(device: str, frozen: str, order: torch.memory_format) -> None:
    """Through layers that are not linear, where what is not trained has no gradient, however numbers lie in memory."""
    torch.manual_seed(0)
    kind: dict[str, Any] = {"dtype": torch.float64, "device": device}
    first, second = layers = [nn.Conv2d(3, 3, 3, padding=1, **kind) for _ in range(2)]
    for layer in layers:
        layer.weight.data = layer.weight.data.contiguous(memory_format=order)
    x = torch.randn(2, 3, 4, 4, **kind).to(memory_format=order).requires_grad_(frozen != "pictures")
    first.weight.requires_grad_(frozen != "weight")
    wanted = [p for p in (x, *first.parameters(), *second.parameters()) if p.requires_grad]
    along = [torch.randn_like(p) for p in wanted]

    def product() -> list[Tensor]:
        value = second(first(x).tanh()).square().sum()
        slope = grad(value, wanted, create_graph=True)
        return list(grad(sum((g * a).sum() for g, a in zip(slope, along, strict=True)), wanted))  # type: ignore[arg-type]

    own = product()
    with TwiceDifferentiable():
        quick = product()
    torch.testing.assert_close(quick, own)


class _Shared(nn.Module):
    """A feature map that is used twice, once behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.conv(x)
        return made.tanh() + self.norm(made).tanh()


class _Between(_Shared):
    """Something is done between a convolution and a batch norm that would not be done to other weights."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        with torch.set_grad_enabled(self.what != "not trained"):
            made: Tensor = self.conv(x) if self.what != "pictures changed" else conv2d(x, self.conv.weight.detach())
        if self.what == "hook":
            made.register_hook(lambda g: 3 * g)
        if self.what == "pictures changed":
            x.relu_()
        return self.norm(made).tanh() + sum(p.square().sum() for p in self.conv.parameters())


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "behind a convolution": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.BatchNorm2d(3), nn.Tanh()),
    "without a bias": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, bias=False, groups=2), nn.BatchNorm2d(4), nn.Tanh()),
    "without weights": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=False), nn.Tanh()),
    "before a convolution": lambda: nn.Sequential(nn.BatchNorm2d(2), nn.Tanh(), nn.Conv2d(2, 3, 3), nn.Tanh()),
    "changed in between": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.BatchNorm2d(3), nn.Tanh()
    ),
    "its own statistics": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, track_running_stats=False), nn.Tanh()
    ),
    "of single numbers": lambda: nn.Sequential(nn.Flatten(), nn.Linear(50, 3), nn.BatchNorm1d(3), nn.Tanh()),
    "used twice": _Shared,
    "not trained": lambda: _Between("not trained"),
    "pictures changed": lambda: _Between("pictures changed"),
    "hook": lambda: _Between("hook"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NETWORKS)
def test_batch_norm_in_all_places_gives_pytorchs_products(name: str, device: str) -> None:
    torch.manual_seed(1)
    network = NETWORKS[name]().double().to(device).eval()
    for layer in network.modules():
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)) and layer.running_var is not None:
            assert layer.running_mean is not None
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
            if layer.affine:
                nn.init.normal_(layer.weight)
                nn.init.normal_(layer.bias)
    x, wanted = torch.randn(4, 2, 5, 5, dtype=torch.float64, device=device), list(network.parameters())
    along = [torch.randn_like(p) for p in wanted]

    def found() -> list[Tensor]:
        output = network(x)
        slope = grad(output.square().mean(), wanted, create_graph=True)
        turned = sum(((g * a).sum() for g, a in zip(slope, along, strict=True)), torch.zeros((), device=device))
        return [output, *slope, *grad(turned, wanted)]

    own = found()
    with TwiceDifferentiable():
        quick = found()
    torch.testing.assert_close(quick, own)


def test_few_channels_with_a_stride_do_not_end_the_process() -> None:
    """As the gradient of such a 1x1 convolution's weight does in float32, where channels lie last."""
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 16, 1, 2)
    x = torch.randn(8, 8, 64, 64).contiguous(memory_format=torch.channels_last)
    leaves = [p.detach().double().requires_grad_() for p in layer.parameters()]

    def products(y: Tensor, weights: list[Tensor]) -> list[Tensor]:
        slope = grad(y.tanh().mean(), weights, create_graph=True)
        return list(grad(sum(s.square().sum() for s in slope), weights))  # type: ignore[arg-type]

    with TwiceDifferentiable():
        found = products(layer(x), [*layer.parameters()])
    wanted = products(conv2d(x.double(), leaves[0], leaves[1], 2), leaves)
    torch.testing.assert_close(found, [w.float() for w in wanted], rtol=1e-3, atol=1e-9)


def test_nothing_is_lost_where_a_network_has_a_gradient_in_it() -> None:
    """That is one derivative more, of which PyTorch would leave out what it cannot find."""
    torch.manual_seed(0)
    x, weight = _drawn(2, 2, 5, 5), _drawn(2, 2, 3, 3)

    def twice() -> tuple[Tensor, ...]:
        inside = grad(conv2d(x, weight, padding=1).tanh().sum(), x, create_graph=True)[0]
        slope = grad(conv2d(x + inside, weight).tanh().sum(), (x, weight), create_graph=True)
        return grad(sum(s.square().sum() for s in slope), (x, weight))  # type: ignore[arg-type]

    own = twice()
    with TwiceDifferentiable():
        quick = twice()
    torch.testing.assert_close(quick, own)


def test_what_it_does_not_know_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, single = nn.Conv2d(2, 2, 3, padding="same"), torch.randn(2, 5, 5)
    with TwiceDifferentiable():
        assert torch.equal(layer(single), layer(single[None])[0])
        assert "_Convolution" not in str(layer(single[None]).grad_fn)
        # Without a batch.
        plain = nn.Conv2d(2, 2, 3, bias=False)
        assert "_Convolution" not in str(plain(single).grad_fn)
        assert "_Convolution" in str(plain(single[None]).grad_fn)
        # A compiled network would lose the second derivatives of a function that PyTorch does not know.
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert "_Convolution" not in str(plain(single[None]).grad_fn)
    assert "_Convolution" not in str(plain(single[None]).grad_fn)


def _through_vmap(x: Tensor, weight: Tensor) -> Tensor:
    return torch.vmap(lambda w: conv2d(x, w))(torch.stack([weight, 2 * weight])).sum(0)


def _in_half(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        made = conv2d(x, weight)
    assert made.dtype == torch.bfloat16
    return made.float()


OTHER_WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.func": _through_vmap,
    "autocast": _in_half,
    "complex": lambda x, weight: conv2d(torch.complex(x, x.tanh()), torch.complex(weight, weight)).abs(),
    "numpy": lambda x, weight: conv2d(x, weight, stride=np.int64(2)),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("how", OTHER_WAYS)
def test_convolutions_that_are_called_in_other_ways_have_pytorchs_second_derivatives(how: str) -> None:
    torch.manual_seed(0)
    conv, weight = OTHER_WAYS[how], torch.randn(2, 2, 3, 3, requires_grad=True)
    x = torch.randn(2, 2, 8, 8, requires_grad=True)

    def product() -> tuple[Tensor, ...]:
        made = conv(conv(x, weight).tanh(), weight).tanh().sum()
        slope = grad(made, (x, weight), create_graph=True)
        return grad(sum(s.square().sum() for s in slope), (x, weight))  # type: ignore[arg-type]

    own = product()
    with TwiceDifferentiable():
        quick = product()
    torch.testing.assert_close(quick, own)
