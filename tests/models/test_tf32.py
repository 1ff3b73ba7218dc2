"""Convolutions in tf32 on a GPU, against float64; and which layers they are for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from isofed.models import create, fused, tf32
from isofed.models.convolution import FusedConv2d

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
# A factor is cut off after 10 bits behind the first, which takes 3.5e-4 off it on average, and there are two.
CUT_OFF = 1e-3
CASES = [  # batch, channels, height, width, outputs, size, stride, padding
    (64, 32, 30, 30, 64, (3, 3), 1, 0),
    (64, 64, 32, 32, 64, (3, 3), 1, 1),
    (64, 512, 4, 4, 512, (3, 3), 1, 1),
    (64, 128, 16, 16, 256, (3, 3), 2, 1),
    (64, 64, 32, 32, 128, (1, 1), 2, 0),
    (7, 256, 8, 8, 512, (1, 1), 2, 0),
    (5, 32, 9, 13, 128, (3, 3), 1, 1),
    (3, 32, 8, 7, 64, (3, 3), 2, 1),
    (3, 32, 11, 8, 64, (3, 3), 3, 2),
    (2, 64, 7, 7, 32, (1, 1), 2, 1),
    (2, 32, 6, 6, 64, (2, 3), 1, 1),
    (1, 32, 5, 5, 96, (5, 5), 1, 2),
    (1, 32, 3, 3, 32, (3, 3), 1, 0),
]


@pytest.fixture
def allowed() -> Iterator[None]:
    if not fused.available():
        pytest.skip("no Triton here")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True, deterministic=True):
        yield


def material(case: tuple) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """An input, weights, what float64 gives, and a gradient for that."""
    batch, channels, height, width, outputs, size, stride, padding = case
    draws = torch.Generator("cuda").manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=draws).to(memory_format=torch.channels_last)

    x, weight = drawn(batch, channels, height, width), drawn(outputs, channels, *size)
    y = F.conv2d(x.double(), weight.double(), None, stride, padding)
    return x, weight, y, drawn(*y.shape)


def far(a: torch.Tensor, exact: torch.Tensor) -> float:
    assert a.shape == exact.shape and a.dtype == torch.float32
    return float((a.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("case", CASES, ids=str)
class TestOnAGpu:
    pytestmark = gpu

    def test_each_pass_agrees_with_float64_and_repeats_its_bits(self, case: tuple, allowed: None) -> None:
        *_, outputs, size, stride, padding = case
        x, weight, y, g = material(case)
        sides = [stride] * 2, [padding] * 2, [1, 1]
        rest = (*sides, False, [0, 0], 1, [True, True, False])
        dx, dweight, _ = torch.ops.aten.convolution_backward(g.double(), x.double(), weight.double(), None, *rest)
        found = [
            [tf32.forward(x, weight, stride, padding), tf32.input_gradient(g, weight, x.shape, stride, padding)]
            for _ in range(2)
        ]
        if size[1] == 3 and outputs % tf32.OUTPUTS == 0:
            for run in found:
                run.append(tf32.weight_gradient(g, x, weight.shape, stride, padding))
        for one, two, exact in zip(*found, (y, dx, dweight), strict=False):
            assert torch.equal(one, two) and one.is_contiguous(memory_format=torch.channels_last)
            assert 0 < far(one, exact) < CUT_OFF

    def test_a_layer_agrees_with_float64(self, case: tuple, allowed: None) -> None:
        *_, size, stride, padding = case
        x, weight, y, g = material(case)
        plain = nn.Conv2d(x.shape[1], len(weight), size, stride, padding).cuda()
        plain.weight.data = weight
        layer = FusedConv2d.of(plain, relu=False, pool=False)
        exact = [p.detach().double().requires_grad_() for p in (x, weight)]
        made = F.conv2d(exact[0], exact[1], None, stride, padding)
        x.requires_grad_()
        wanted = [*torch.autograd.grad(made, exact, g.double()), g.double().sum((0, 2, 3))]
        assert layer.thick and layer.bias is not None
        found = layer(x)
        assert far(found.detach() - layer.bias.detach()[:, None, None], y) < CUT_OFF
        for a, b in zip(torch.autograd.grad(found, [x, layer.weight, layer.bias], g), wanted, strict=True):
            assert far(a, b) < CUT_OFF
        (alone,) = torch.autograd.grad(layer(x), [layer.weight], g)  # nobody wants that of the input
        assert far(alone, wanted[1]) < CUT_OFF
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, deterministic=True):
            assert far(layer(x).detach() - layer.bias.detach()[:, None, None], y) < 1e-5  # sums of up to 4,608 products


@pytest.mark.parametrize("case", [CASES[0], CASES[6]], ids=str)
class TestTwice:
    pytestmark = gpu

    def test_a_gradient_can_be_differentiated_again(self, case: tuple, allowed: None) -> None:
        x, weight, _, g = material(case)
        found = []
        for kind in (torch.float32, torch.float64):
            a, w = x.to(kind, copy=True).requires_grad_(), weight.to(kind, copy=True).requires_grad_()
            convolve = tf32.convolution if kind == torch.float32 else F.conv2d
            y = convolve(a, w, None, case[-2], case[-1])
            (da,) = torch.autograd.grad(y.square().sum(), a, create_graph=True)
            found.append(torch.autograd.grad((da * g.new_ones(()).to(kind)).square().sum(), w)[0])
        assert far(*found) < 5 * CUT_OFF  # through six products


class TestWithoutAGpu:
    @pytest.mark.parametrize(
        ("layer", "wanted"),
        [
            (nn.Conv2d(32, 64, 3), True),
            (nn.Conv2d(64, 32, 1, stride=2), True),
            (nn.Conv2d(32, 64, 3, padding=1), True),
            (nn.Conv2d(3, 64, 3), False),
            (nn.Conv2d(32, 48, 3), False),
            (nn.Conv2d(32, 32, 3, groups=2), False),
            (nn.Conv2d(32, 32, 3, dilation=2), False),
            (nn.Conv2d(32, 32, 3, stride=(1, 2)), False),
            (nn.Conv2d(32, 32, 3, padding="same"), False),
            (nn.Conv2d(32, 32, 3, padding=(0, 1)), False),
            (nn.Conv2d(32, 32, 3, padding=1, padding_mode="circular"), False),
        ],
        ids=str,
    )
    def test_it_is_for_plain_convolutions_over_many_channels(self, layer: nn.Conv2d, wanted: bool) -> None:
        assert tf32.fits(layer) == wanted

    def test_a_processor_does_not_use_it(self) -> None:
        layer = nn.Conv2d(32, 64, 3)
        x = torch.rand(2, 32, 8, 8)
        assert not tf32.applies(x, layer.weight)
        assert torch.equal(FusedConv2d.of(layer, relu=False, pool=False)(x), F.conv2d(x, layer.weight, layer.bias))


@pytest.mark.parametrize("model", ["pfl-cnn", "resnet18", "resnet56"])
class TestNetworks:
    pytestmark = gpu

    def test_a_network_uses_it_in_tf32_alone(self, model: str, allowed: None, monkeypatch: pytest.MonkeyPatch) -> None:
        network = create(model, classes=10).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        fused.fuse(network)
        x = torch.rand(4, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
        calls, real = [], tf32.forward

        def counted(*rest: Any) -> torch.Tensor:
            calls.append(rest)
            return real(*rest)

        monkeypatch.setattr(tf32, "forward", counted)
        network(x)
        assert len(calls) == sum(isinstance(m, FusedConv2d) and m.thick for m in network.modules()) > 0
        calls.clear()
        with torch.autocast("cuda", torch.bfloat16):
            network(x)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            network(x)
        assert not calls
