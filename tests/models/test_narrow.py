"""Networks whose last channels are zero, against networks that are smaller."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from isofed.models import Network, create
from isofed.models.fused import fuse
from isofed.models.narrow import narrow_forward, narrows
from isofed.models.residual import PadShortcut, Residual
from isofed.models.slim import slim_channels, slim_forward

SHAPE = (3, 20, 20)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def scattered(network: Network) -> Network:
    """With weights that are nowhere 0 or 1, as batch norm's are in the beginning."""
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight) / weight[0].numel() ** 0.5)
    return network.double().train()


def gradients(network: Network, logits: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype, device=logits.device).view(logits.shape)
    return [*torch.autograd.grad((weights * logits).sum(), [*network.parameters()])]


@pytest.mark.parametrize("multiple", [8, 1])
@pytest.mark.parametrize("width", [0.8, 0.55, 1.0])
@pytest.mark.parametrize("model", ["cnn", "mlp", "convnet7", "resnet56", "resnet18", "mobilenetv2", "feduv-resnet18"])
def test_as_smaller_networks(model: str, width: float, multiple: int) -> None:
    network = scattered(create(model, classes=5, shape=SHAPE))
    inputs = torch.randn(4, *SHAPE, dtype=torch.float64)
    before = {k: b.clone() for k, b in network.named_buffers()}
    counts = torch.tensor(slim_channels(network, width, multiple))
    found = narrow_forward(network, inputs, counts)
    assert all(torch.equal(b, before[k]) for k, b in network.named_buffers())  # statistics are the full pass's alone
    wanted = slim_forward(network, inputs, width, multiple)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-9, atol=1e-9)
    left = wanted.features.shape[1]
    torch.testing.assert_close(found.features[:, :left], wanted.features, rtol=1e-9, atol=1e-9)
    assert not found.features[:, left:].any()
    for one, two in zip(gradients(network, found.logits), gradients(network, wanted.logits), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("model", "norm", "same"),
    [
        ("cnn", "batch", True),
        ("cnn", "none", True),
        ("cnn", "group:2", False),  # zeros change the mean of a group
        ("mlp", None, True),
        ("resnet56", "batch", True),
        ("resnet18", "group:2", False),
        ("resnet8", "batch", False),  # its shortcuts put as many zeros before the channels as behind them
        ("pfl-cnn", None, False),  # drops channels by their places
        ("senet18", None, False),  # has layers of its own
        *((model, None, True) for model in ("vgg13", "mobilenetv2", "feduv-cnn", "feduv-resnet50", "moon-cnn")),
    ],
)
def test_where_both_are_the_same(model: str, norm: str | None, same: bool) -> None:
    network = create(model, classes=5, shape=(3, 32, 32), norm=norm)
    assert narrows(network) == same and narrows(network) == same  # as it is remembered


class Beside(nn.Module):
    """Two layers' channels one behind the other, so that the second ones' places depend on how many are first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(x)], 1)


def own(*layers: nn.Module, pool: nn.Module | None = None, head: nn.Module | None = None) -> Network:
    """A network of 32 features."""
    pool = pool or nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network = Network({"one": nn.Sequential(*layers)}, pool, head or nn.Linear(32, 5), 32)
    network.shape = SHAPE
    return network


def convolution(inside: int, outside: int, bias: bool = True, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, 3, bias=bias, groups=groups)


def block(before: bool = False, shortcut: nn.Module | None = None) -> Residual:
    branch = nn.Sequential(nn.Conv2d(32, 32, 1, bias=False), *([] if before else [nn.BatchNorm2d(32)]))
    return Residual(branch, shortcut, nn.Sequential(nn.BatchNorm2d(32), nn.ReLU()) if before else None)


class Scaled(nn.Linear):
    """A head that does something else than its weights tell."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


# Its 32 numbers are eight channels of four, and there is another layer of 32.
FLAT = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(32), nn.Linear(32, 32))
DENSE = nn.Sequential(nn.Flatten(), nn.Linear(1600, 32), nn.BatchNorm1d(32))
REFLECTING = nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect")
TWICE = block()
BARE = convolution(3, 32, bias=False)
WATCHED = convolution(3, 32)
WATCHED.register_forward_hook(lambda layer, inputs, output: output + 1)


@pytest.mark.parametrize(
    "network",
    [
        own(Beside()),
        own(BARE, nn.ReLU(), convolution(32, 32)),  # no norm makes zeros of what the first one gives
        own(BARE, nn.AdaptiveAvgPool2d(1)),
        own(BARE, nn.BatchNorm2d(32, affine=False)),  # which cannot
        own(BARE, nn.BatchNorm2d(32), nn.Dropout(0.1)),
        own(BARE, nn.BatchNorm2d(32), nn.Softmax(1)),
        own(nn.BatchNorm2d(3), convolution(3, 32), convolution(32, 3), convolution(3, 32)),
        own(convolution(3, 32), convolution(32, 32, groups=4)),
        own(convolution(3, 32), convolution(32, 64, groups=32), nn.Conv2d(64, 32, 1)),
        own(convolution(3, 32), TWICE, TWICE),
        own(convolution(3, 16), block(shortcut=PadShortcut(1))),
        own(WATCHED),
        own(convolution(3, 8), nn.AdaptiveAvgPool2d(2), pool=FLAT),
        own(convolution(3, 32), head=Scaled(32, 5)),
    ],
)
def test_own_networks_for_which_they_are_not(network: Network) -> None:
    assert not narrows(network)


@pytest.mark.parametrize("width", [0.8, 0.55])
@pytest.mark.parametrize(
    "network",
    [
        own(convolution(3, 24), nn.GELU(), convolution(24, 24, groups=24), nn.Tanh(), nn.Conv2d(24, 32, 1)),
        own(convolution(3, 32, bias=False), block(before=True), block(before=True), nn.BatchNorm2d(32), nn.SiLU()),
        own(convolution(3, 32), block(), block(shortcut=nn.Conv2d(32, 32, 1))),
        own(REFLECTING, nn.LeakyReLU(), nn.AvgPool2d(2), pool=DENSE),
    ],
)
def test_own_networks_for_which_they_are(network: Network, width: float) -> None:
    network = scattered(network)
    assert narrows(network)
    for layer in network.modules():  # as somebody may want it; at less than the full width that makes no difference
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    modes = [layer.training for layer in network.modules()]
    inputs = torch.randn(4, *SHAPE, dtype=torch.float64)
    counts = torch.tensor(slim_channels(network, width))
    found, wanted = narrow_forward(network, inputs, counts).logits, slim_forward(network, inputs, width).logits
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    for one, two in zip(gradients(network, found), gradients(network, wanted), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-9)
    assert [layer.training for layer in network.modules()] == modes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("model", ["cnn", "resnet18", "mobilenetv2"])
def test_on_a_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    network = scattered(create(model, classes=5, shape=SHAPE))
    inputs = torch.randn(8, *SHAPE)
    wanted = {width: slim_forward(network, inputs.double(), width).logits for width in (0.8, 0.6)}
    exact = {width: gradients(network, logits) for width, logits in wanted.items()}
    network = network.float().cuda()
    fuse(network)
    inputs = inputs.cuda().to(memory_format=torch.channels_last)
    for width in wanted:
        counts = torch.tensor(slim_channels(network, width), device="cuda")
        found = narrow_forward(network, inputs, counts).logits
        torch.testing.assert_close(found.cpu().double(), wanted[width], rtol=1e-3, atol=1e-3)
        for one, two in zip(gradients(network, found), exact[width], strict=True):
            assert float((one.cpu().double() - two).norm()) < 2e-2 * float(two.norm()) + 1e-4
