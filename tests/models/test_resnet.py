"""The ResNets for small pictures: their sizes to the last parameter, their shapes, and a pass written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isofed.errors import UserError
from isofed.models import Network, create
from isofed.models.base import BatchNorm2d
from isofed.models.residual import PadShortcut, residual_blocks

NAMES = ("resnet8", "resnet20", "resnet32", "resnet56-basic", "resnet56")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    ("name", "ten", "hundred"),
    [
        ("resnet8", 432 + 32 + 4_672 + 13_952 + 55_552 + 650, 75_290 + 90 * 65),  # by hand: stem, stages, head
        ("resnet20", 269_722, 275_572),
        ("resnet32", 464_154, 470_004),
        ("resnet56-basic", 853_018, 853_018 + 90 * 65),
        ("resnet56", 591_322, 614_452),
    ],
)
def test_parameters_as_published(name: str, ten: int, hundred: int) -> None:
    assert count(create(name, classes=10)) == ten
    assert count(create(name, classes=100)) == hundred


def test_batch_norm_of_the_bottleneck_network() -> None:
    network = create("resnet56", classes=100)
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 58 and sum(count(m) for m in norms) == 8_992
    assert count(network) - 8_992 == 605_460  # FedAlign's 0.61 M


def macs(network: Network, shape: tuple[int, int, int]) -> int:
    """Multiplications of convolutions and linear layers for one picture."""
    total = 0

    def add(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        nonlocal total
        weight = layer.get_parameter("weight")
        pixels = output.shape[2] * output.shape[3] if isinstance(layer, nn.Conv2d) else 1
        total += weight.numel() * pixels

    for layer in network.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layer.register_forward_hook(add)
    with torch.no_grad():
        network.eval()(torch.zeros(1, *shape))
    return total


@pytest.mark.parametrize(
    ("name", "classes", "millions"),
    [("resnet20", 10, 40.55), ("resnet32", 10, 68.86), ("resnet56-basic", 10, 125.5), ("resnet56", 100, 87.24)],
)
def test_multiplications_as_published(name: str, classes: int, millions: float) -> None:
    assert macs(create(name, classes=classes), (3, 32, 32)) / 1e6 == pytest.approx(millions, rel=2e-3)


@pytest.mark.parametrize("norm", ["batch", "group:2"])
@pytest.mark.parametrize("side", [8, 32, 64])
@pytest.mark.parametrize("name", ["resnet20", "resnet56"])
def test_shapes_of_the_stages(name: str, side: int, norm: str) -> None:
    network = create(name, classes=7, shape=(3, side, side), norm=norm)
    with torch.no_grad():
        output = network(torch.randn(2, 3, side, side))
    wide = (16, 16, 32, 64) if name == "resnet20" else (16, 64, 128, 256)
    sides = (side, side, side // 2, side // 4)
    assert list(output.stages) == ["stem", "stage1", "stage2", "stage3"]
    assert [tuple(s.shape) for s in output.stages.values()] == [(2, c, p, p) for c, p in zip(wide, sides, strict=True)]
    assert output.features.shape == (2, network.width) == (2, wide[-1])
    assert output.logits.shape == (2, 7) and torch.isfinite(output.logits).all()
    torch.testing.assert_close(output.features, output.stages["stage3"].mean((2, 3)))
    assert all(float(s.min()) >= 0 for s in output.stages.values())


def test_group_norm_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="norm=group:3 cannot divide 16 channels"):
        create("resnet20", classes=2, norm="group:3")


def normed(x: Tensor, layer: nn.Module) -> Tensor:
    assert isinstance(layer, BatchNorm2d)
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * layer.weight.view(-1, 1, 1) + layer.bias.view(-1, 1, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_written_out(name: str) -> None:
    network = create(name, classes=3, shape=(2, 8, 8)).double()
    for layer in network.modules():
        if isinstance(layer, BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5), nn.init.normal_(layer.bias)
    convolutions = iter([m for m in network.modules() if isinstance(m, nn.Conv2d)])
    norms = iter([m for m in network.modules() if isinstance(m, BatchNorm2d)])

    def convolved(x: Tensor, stride: int = 1) -> Tensor:
        weight = next(convolutions).weight
        return normed(F.conv2d(x, weight, None, stride, weight.shape[2] // 2), next(norms))

    inputs = torch.randn(3, 2, 8, 8).double()
    x = convolved(inputs).relu()
    deep = {"resnet8": 1, "resnet20": 3, "resnet32": 5, "resnet56-basic": 9, "resnet56": 6}[name]
    for stage in range(3):
        for block in range(deep):
            stride = 2 if stage and not block else 1
            if name == "resnet56":
                inside = convolved(convolved(convolved(x).relu(), stride).relu())
                x = convolved(x, stride) if not block else x
            else:
                inside = convolved(convolved(x, stride).relu())
                if stride == 2:
                    more = torch.zeros(3, inside.shape[1] // 4, *inside.shape[2:]).double()
                    x = torch.cat([more, x[:, :, ::2, ::2], more], 1)
            x = (x + inside).relu()
    features = x.mean((2, 3))
    wanted = features @ network.get_parameter("head.weight").T + network.get_parameter("head.bias")
    torch.testing.assert_close(network(inputs).logits, wanted)
    assert next(convolutions, None) is None and next(norms, None) is None


def test_kernels_and_strides_of_a_bottleneck() -> None:
    blocks = residual_blocks(create("resnet56", classes=2))
    for number, block in enumerate(blocks):
        kernels = [(m.kernel_size[0], m.stride[0]) for m in block.branch.modules() if isinstance(m, nn.Conv2d)]
        assert kernels == [(1, 1), (3, 2 if number in (6, 12) else 1), (1, 1)]
        assert (block.shortcut is not None) == (number % 6 == 0)
    shortcuts = [b.shortcut for b in residual_blocks(create("resnet20", classes=2))]
    assert [isinstance(s, PadShortcut) for s in shortcuts] == [False] * 3 + [True, False, False] * 2
    assert not any(True for s in shortcuts if s is not None for _ in s.parameters())


def test_initial_weights() -> None:
    # Kaiming-normal: a spread of sqrt(2 / fan), fan in for the basic networks (heads too), fan out for the bottleneck.
    basic, wide = create("resnet56-basic", classes=100), create("resnet56", classes=100)
    for network, out in ((basic, False), (wide, True)):
        for layer in network.modules():
            if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 4_000:
                fan = (layer.out_channels if out else layer.in_channels) * layer.kernel_size[0] ** 2
                assert float(layer.weight.detach().std()) == pytest.approx(math.sqrt(2 / fan), rel=0.06)
            if isinstance(layer, BatchNorm2d):
                assert torch.equal(layer.weight, torch.ones_like(layer.weight)) and not layer.bias.any()
    assert float(basic.get_parameter("head.weight").detach().std()) == pytest.approx(math.sqrt(2 / 64), rel=0.06)
    assert float(wide.get_parameter("head.weight").detach().abs().max()) <= 1 / 16  # PyTorch's own, 1 / sqrt(256)


@pytest.mark.parametrize("name", ["feduv-resnet18", "feduv-resnet50", "resnet18"])
def test_some_start_from_the_weights_of_pytorch(name: str) -> None:
    # Even between +- 1 / sqrt(fan in). With Kaiming's larger ones FedUV's ResNet-18 ends 8 points lower on CIFAR-100.
    for layer in create(name, classes=100).modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 4_000:
            limit = (layer.in_channels * layer.kernel_size[0] ** 2) ** -0.5
            assert float(layer.weight.detach().abs().max()) == pytest.approx(limit, rel=0.02)
