"""A network and its sub-networks in one pass, against one after the other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from isofed.models import Network, create
from isofed.models.base import BatchNorm1d, BatchNorm2d
from isofed.models.beside import beside_forward, extents, first_rows, lies_beside
from isofed.models.fused import fuse
from isofed.models.residual import Residual
from isofed.models.resize import resized
from isofed.models.slim import channels, full_channels, slim_forward
from tests.models.test_narrow import block, convolution, own, scattered

SHAPE = (3, 28, 28)
MODELS = ["cnn", "resnet56", "resnet18", "mobilenetv2", "feduv-cnn"]
# Widths and sizes of the sub-networks.
SMALL = [(0.8, (24, 24)), (0.55, (28, 21)), (1.0, (25, 28)), (0.8, (28, 28))]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def drawn(network: Network, multiple: int = 8) -> tuple[Tensor, Tensor]:
    """The counts and places of the whole network, and of these sub-networks."""
    all_of_them = [(1.0, SHAPE[1:]), *SMALL]
    counts = [[channels(full, width, multiple) for full in full_channels(network)] for width, _ in all_of_them]
    return torch.tensor(counts), torch.tensor([extents(network, size) for _, size in all_of_them])


def apart(network: Network, inputs: Tensor, multiple: int = 8) -> list[Tensor]:
    """Logits one after the other, and then the features of the whole network."""
    whole = network(inputs)
    network = network.eval()  # so that nothing is stored; smaller ones have the statistics of their batch all the same
    students = [_student(network, resized(inputs, size), width, multiple) for width, size in SMALL]
    network.train()
    return [whole.logits, *students, whole.features]


def _student(network: Network, inputs: Tensor, width: float, multiple: int) -> Tensor:
    if width < 1:
        return slim_forward(network, inputs, width, multiple).logits
    network.train()
    before = {k: b.clone() for k, b in network.named_buffers()}
    logits = network(inputs).logits
    for name, buffer in network.named_buffers():
        buffer.data.copy_(before[name])
    return logits


def gradients(network: Network, outputs: list[Tensor]) -> list[Tensor]:
    weights = [torch.linspace(-1, 1 + n, z.numel(), dtype=z.dtype, device=z.device) for n, z in enumerate(outputs)]
    total = sum((w.view(z.shape) * z).sum() for w, z in zip(weights, outputs, strict=True))
    assert isinstance(total, Tensor)
    return [*torch.autograd.grad(total, [*network.parameters()])]


def compare(network: Network, inputs: Tensor, multiple: int, tolerance: float) -> None:
    other = copy.deepcopy(network)
    counts, places = (t.to(inputs.device) for t in drawn(network, multiple))
    output, students = first_rows(beside_forward(network, inputs, counts, places, whole=True), len(inputs))
    found, wanted = [output.logits, *students.chunk(len(SMALL)), output.features], apart(other, inputs, multiple)
    kept = {k: b for k, b in other.named_buffers() if b.is_floating_point()}
    pairs = list(zip(found, wanted, strict=True))
    pairs += [(b, kept[k]) for k, b in network.named_buffers() if b.is_floating_point()]  # statistics, of the first
    pairs += list(zip(gradients(network, found), gradients(other, wanted), strict=True))
    for one, two in pairs:
        one, two = one.detach().double(), two.detach().double()
        assert float((one - two).norm()) <= tolerance * (1 + float(two.norm()))
    assert all("forward" not in vars(layer) for layer in network.modules())


@pytest.mark.parametrize("multiple", [8, 1])
@pytest.mark.parametrize("model", MODELS)
def test_as_one_after_the_other(model: str, multiple: int) -> None:
    network = scattered(create(model, classes=5, shape=SHAPE))
    assert lies_beside(network)
    compare(network, torch.randn(4, *SHAPE, dtype=torch.float64), multiple, 1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("model", MODELS)
def test_on_a_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    network = scattered(create(model, classes=5, shape=SHAPE)).float().cuda()
    fuse(network)
    inputs = torch.randn(16, *SHAPE, device="cuda").to(memory_format=torch.channels_last)
    compare(network, inputs, 8, 5e-2)  # where a ReLU that is nearly shut opens, a gradient changes as a whole


def norm(channels: int = 32) -> nn.Module:
    return BatchNorm2d(channels)


@pytest.mark.parametrize(
    "network",
    [
        create("vgg13", classes=5, shape=(3, 32, 32)),  # looks for the largest of pixels, some of them not a picture's
        create("mlp", classes=5, shape=SHAPE),  # has a weight for each pixel
        create("cnn", classes=5, shape=SHAPE, norm="none"),  # makes no zeros around the pictures
        create("cnn", classes=5, shape=SHAPE, norm="group:2"),
        create("pfl-cnn", classes=5, shape=(3, 32, 32)),
        own(convolution(3, 32, bias=False), nn.BatchNorm2d(32)),  # not of this package
        own(convolution(3, 16), norm(16), nn.Conv2d(16, 32, 3, padding=1, padding_mode="reflect"), norm()),
        own(convolution(3, 16), norm(16), nn.Conv2d(16, 32, 3, padding="same"), norm()),
        own(convolution(3, 16), convolution(16, 32), norm()),  # the second would see the first one's around a picture
        own(convolution(3, 32), nn.ReLU(), norm()),
        own(convolution(3, 32), norm(), nn.AvgPool2d(2)),
        own(convolution(3, 32), norm(), pool=nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 32))),
        own(convolution(3, 32), norm(), pool=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32))),
        own(convolution(3, 32), norm(), block(shortcut=nn.Conv2d(32, 32, 1))),  # adds what no batch norm has seen
    ],
)
def test_networks_of_which_it_is_not_known(network: Network) -> None:
    assert not lies_beside(network) and not lies_beside(network)  # as it is remembered


def with_another_norm() -> Network:
    """Which its own pass does not come to."""
    network = own(convolution(3, 32), norm())
    network.aside = nn.Sequential(nn.Linear(32, 16), BatchNorm1d(16))
    return network


def with_changed_norm(name: str, value: object) -> Network:
    network = own(convolution(3, 32), norm())
    setattr(network.stages["one"][1], name, value)  # type: ignore[index]
    return network


@pytest.mark.parametrize(
    "network",
    [
        with_another_norm(),
        with_changed_norm("momentum", None),
        with_changed_norm("track_running_stats", False),
        with_changed_norm("running_mean", None),
    ],
)
def test_norms_that_are_not_as_they_were_made(network: Network) -> None:
    assert lies_beside(own(convolution(3, 32), norm())) and not lies_beside(network)


def test_layers_before_a_branch_and_without_relu() -> None:
    """Pre-activation, as in SENet, and linear bottlenecks; all of them with strides and bare 1x1 convolutions."""
    before = nn.Sequential(norm(16), nn.ReLU())
    branch = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1, bias=False), norm(), nn.SiLU(), nn.Conv2d(32, 32, 1), norm())
    shortcut = nn.Sequential(nn.Conv2d(16, 32, 1, 2), norm())
    network = own(convolution(3, 16), norm(16), Residual(branch, shortcut, before, relu=False), nn.Tanh())
    network.shape = SHAPE
    assert lies_beside(network)
    compare(scattered(network), torch.randn(4, *SHAPE, dtype=torch.float64), 8, 1e-9)


def test_extents() -> None:
    network = create("feduv-cnn", classes=5, shape=SHAPE)
    # 3x3 without padding, 1x1; 3x3 by steps of two, 3x3, 1x1; the same; their mean; and vectors.
    sides = [26, 26, 12, 10, 10, 4, 2, 2, 2, 1, 1]
    assert extents(network, (28, 28)) == [(28, 28), *((side, side) for side in sides)]
    assert extents(network, (24, 28))[3] == (10, 12)


@pytest.mark.parametrize("by", [1, 2, 3, 5, 7, 20, 24, 28, 32, 77, 224])
def test_the_quick_division_is_exact(by: int) -> None:
    """As the kernels divide: a product with an inverse that is rounded, and may be off by two units more."""
    r = torch.arange(2**20)
    for off in (-2, 0, 2):
        inverse = torch.tensor(1 / by, dtype=torch.float32)
        inverse += off * torch.finfo(torch.float32).eps * inverse / 2
        found = ((r.float() + 0.5) * inverse).to(torch.int32)
        assert torch.equal(found.long(), r // by)
