"""Networks at a fraction of their width, against weights cut by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isofed.errors import UserError
from isofed.models import Network, create
from isofed.models.base import BatchNorm2d
from isofed.models.convolution import FusedConv2d
from isofed.models.slim import channels, check_slimmable, runs_at, slim_forward, slimmed


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("width", "table"),
    [
        (0.25, {16: 8, 32: 8, 64: 16, 128: 32, 256: 64, 512: 128}),
        (0.8, {16: 16, 32: 24, 64: 48, 128: 104, 256: 208}),
        (1.0, {1: 1, 16: 16, 17: 17, 250: 250}),
        # Ten channels of 0.7 are 7: rounded to 8. Five of 0.5 are 2.5, rounded to 0, so 1, which is too few: 9 are more
        # than there are.
        (0.7, {10: 8}),
        (0.5, {5: 5}),
        (0.3, {44: 16}),  # 13.2: 16 is nearer than 8
        (0.26, {44: 16}),  # 11.44 would be rounded to 8, less than 90 % of it
        (0.2, {44: 8}),  # 8.8: 8 is more than 90 % of it
    ],
)
def test_channels_in_multiples_of_eight(width: float, table: dict[int, int]) -> None:
    assert {full: channels(full, width) for full in table} == table


@pytest.mark.parametrize(
    ("full", "width", "multiple", "left"),
    [
        (64, 0.8, 1, 51),
        (10, 0.25, 1, 3),
        (10, 0.22, 1, 2),
        (10, 0.24, 1, 3),
        (3, 0.1, 1, 1),
        (20, 0.5, 4, 12),
        (10, 0.99, 8, 10),
    ],
)
def test_channels_in_other_multiples(full: int, width: float, multiple: int, left: int) -> None:
    assert channels(full, width, multiple) == left


@pytest.mark.parametrize("multiple", [1, 4, 8])
def test_never_more_than_all_never_none_never_less_than_nine_tenths(multiple: int) -> None:
    for full in range(1, 70):
        for width in (0.01, 0.25, 0.5, 0.8, 0.99):
            left = channels(full, width, multiple)
            assert 1 <= left <= full
            assert left >= min(0.9 * width * full, full)
            assert left % multiple == 0 or left == full or width * full < 4.5  # at least 1, and one multiple more


def slim(module: nn.Module, x: Tensor, width: float = 0.5, multiple: int = 1) -> Tensor:
    with slimmed(module, width, multiple):
        found: Tensor = module(x)
    return found


def test_a_convolution() -> None:
    layer = nn.Conv2d(6, 10, 3, stride=2, padding=1)
    x = torch.randn(2, 4, 7, 7)  # four of the six channels arrive
    wanted = F.conv2d(x, layer.weight[:5, :4], layer.bias[:5] if layer.bias is not None else None, 2, 1)
    torch.testing.assert_close(slim(layer, x), wanted)
    assert slim(layer, x, multiple=8).shape[1] == channels(10, 0.5) == 8


def test_a_convolution_with_dilation_and_no_bias() -> None:
    layer = nn.Conv2d(4, 8, 3, padding=2, dilation=2, bias=False)
    x = torch.randn(2, 2, 7, 7)
    torch.testing.assert_close(slim(layer, x), F.conv2d(x, layer.weight[:4, :2], None, 1, 2, 2))


def test_a_convolution_that_pads_otherwise_keeps_what_became_a_part_of_it() -> None:
    layer = nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect")
    x = torch.randn(2, 3, 8, 8)
    with slimmed(nn.Sequential(layer), 0.5):
        wanted = F.max_pool2d(layer(x).relu(), 2)
    fused = nn.Sequential(FusedConv2d.of(layer, relu=True, pool=True))
    with slimmed(fused, 0.5):
        assert torch.equal(fused(x), wanted) and wanted.shape == (2, 8, 4, 4)


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
def test_a_convolution_that_pads_otherwise(mode: Literal["reflect", "circular", "replicate"]) -> None:
    layer = nn.Conv2d(4, 8, 3, padding=1, padding_mode=mode)
    x = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(slim(layer, x), layer(x)[:, :4])


def test_a_depthwise_convolution_has_a_filter_for_each_channel_that_arrives() -> None:
    layer = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    x = torch.randn(2, 3, 5, 5)
    assert layer.bias is not None
    wanted = torch.stack(
        [F.conv2d(x[:, [c]], layer.weight[[c]], layer.bias[[c]], padding=1)[:, 0] for c in range(3)], 1
    )
    torch.testing.assert_close(slim(layer, x), wanted)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer(bias: bool) -> None:
    layer = nn.Linear(6, 10, bias=bias)
    x = torch.randn(3, 4)
    wanted = x @ layer.weight[:5, :4].T + (layer.bias[:5] if bias else 0)
    torch.testing.assert_close(slim(layer, x), wanted)


@pytest.mark.parametrize("make", [nn.BatchNorm2d, BatchNorm2d])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_takes_the_batchs_own_statistics_and_stores_nothing(
    make: Callable[[int], nn.BatchNorm2d], training: bool
) -> None:
    layer = make(8).train(training)
    layer.eps = 0.01
    for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
        assert tensor is not None
        nn.init.uniform_(tensor, 1, 2)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    x = torch.randn(4, 3, 5, 5)
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    wanted = (x - mean) / (variance + 0.01).sqrt() * layer.weight[:3].view(-1, 1, 1) + layer.bias[:3].view(-1, 1, 1)
    torch.testing.assert_close(slim(layer, x), wanted)
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())


def test_batch_norm_of_vectors_and_without_weights() -> None:
    x = torch.randn(6, 3)
    wanted = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(slim(nn.BatchNorm1d(8, affine=False), x), wanted)


@pytest.mark.parametrize(("arriving", "groups"), [(8, 4), (6, 2), (5, 1)])
def test_group_norm_takes_as_many_groups_as_fit(arriving: int, groups: int) -> None:
    layer = nn.GroupNorm(4, 16, eps=0.01)
    nn.init.uniform_(layer.weight, 1, 2)
    nn.init.uniform_(layer.bias, 1, 2)
    x = torch.randn(3, arriving, 4, 4)
    split = x.reshape(3, groups, -1)
    normed = (split - split.mean(2, keepdim=True)) / (split.var(2, unbiased=False, keepdim=True) + 0.01).sqrt()
    wanted = normed.reshape(x.shape) * layer.weight[:arriving].view(-1, 1, 1) + layer.bias[:arriving].view(-1, 1, 1)
    torch.testing.assert_close(slim(layer, x), wanted)


def test_gradients_reach_the_slice_and_nothing_else() -> None:
    module = nn.Sequential(nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    slim(module, torch.randn(4, 2, 8, 8)).square().sum().backward()
    whole = {name: p.grad for name, p in module.named_parameters()}
    for name, gradient in whole.items():
        assert gradient is not None
        inside = gradient[:4, :4] if name == "3.weight" else gradient[:4]
        assert inside.count_nonzero() == inside.numel() == gradient.count_nonzero(), name


def test_at_full_width_nothing_is_touched() -> None:
    network = create("cnn", classes=3, shape=(1, 8, 8))
    other = create("cnn", classes=3, shape=(1, 8, 8))
    x = torch.randn(4, 1, 8, 8)
    with slimmed(network, 1.0):
        assert not any("forward" in vars(m) for m in network.modules())
        one = network(x)
    two, three = other(x), slim_forward(create("cnn", classes=3, shape=(1, 8, 8)), x, 1.0)
    assert torch.equal(one.logits, two.logits) and torch.equal(three.logits, two.logits)
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in network.state_dict().items())


def test_everything_is_put_back_also_after_an_error() -> None:
    network = create("cnn", classes=3, shape=(1, 8, 8)).eval()
    x = torch.randn(4, 1, 8, 8)
    before = network(x).logits
    slim_forward(network, x, 0.5)
    with pytest.raises(RuntimeError, match="own"), slimmed(network, 0.5):
        assert "forward" in vars(network.head)
        raise RuntimeError("own")
    with pytest.raises(RuntimeError):
        slim_forward(network, torch.randn(4, 5, 8, 8), 0.5)  # five channels do not fit
    assert not any("forward" in vars(m) for m in network.modules())
    assert torch.equal(network(x).logits, before)


def test_hooks_still_run() -> None:
    layer, seen = nn.Linear(4, 8), []
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    slim(layer, torch.zeros(2, 4))
    layer(torch.zeros(2, 4))
    assert seen == [4, 8]


def test_only_the_given_part_is_slim() -> None:
    network = create("cnn", classes=3, shape=(1, 8, 8))
    stage = network.stages["stage3"]
    with slimmed(stage, 0.25):
        given = [n for n, m in network.named_modules() if "forward" in vars(m)]
        found = stage(torch.randn(2, 8, 4, 4))
    assert given == ["stages.stage3.0", "stages.stage3.1"]
    assert found.shape == (2, 16, 2, 2)


@pytest.mark.parametrize("width", [0.25, 0.8])
@pytest.mark.parametrize("norm", ["batch", "group:2"])
@pytest.mark.parametrize("name", ["cnn", "resnet20", "resnet56"])
def test_networks_run_slim_with_all_their_classes(name: str, norm: str, width: float) -> None:
    network = create(name, classes=20, shape=(3, 8, 8), norm=norm)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    output = slim_forward(network, torch.randn(2, 3, 8, 8), width)
    assert output.logits.shape == (2, 20)
    wide = {"cnn": (16, 32, 64), "resnet20": (16, 16, 32, 64), "resnet56": (16, 64, 128, 256)}[name]
    assert [s.shape[1] for s in output.stages.values()] == [channels(c, width) for c in wide]
    weight = network.get_parameter("head.weight")
    torch.testing.assert_close(
        output.logits,
        F.linear(output.features, weight[:, : output.features.shape[1]], network.get_parameter("head.bias")),
    )
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())


def test_an_option_a_shortcut_at_a_smaller_width() -> None:
    network = create("resnet20", classes=2, shape=(1, 8, 8))
    block = network.get_submodule("stages.stage3.0")
    branch, x = block.get_submodule("branch"), torch.randn(2, 24, 8, 8)
    with slimmed(block, 0.8):
        found = block(x)
        inside = branch(x)
    assert inside.shape == (2, 48, 4, 4)
    wanted = torch.cat([torch.zeros(2, 12, 4, 4), x[:, :, ::2, ::2], torch.zeros(2, 12, 4, 4)], 1) + inside
    torch.testing.assert_close(found, wanted.relu())


def test_a_normalised_head_and_a_projector() -> None:
    network = create("mlp", classes=3, shape=(1, 4, 4))
    network.projector, network.head = nn.Linear(64, 32), nn.Linear(32, 3, bias=False)
    network.width, network.normalise = 32, True
    output = slim_forward(network, torch.randn(5, 1, 4, 4), 0.5)
    assert output.features.shape == (5, 16)
    wanted = F.normalize(output.features) @ network.head.weight[:, :16].T
    torch.testing.assert_close(output.logits, wanted)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.Conv2d(4, 8, 3, groups=2), "Conv2d"),
        (nn.ConvTranspose2d(4, 4, 3), "ConvTranspose2d"),
        (nn.PReLU(), "PReLU"),
        (nn.LayerNorm(4), "LayerNorm"),
        (Odd(), "Odd"),
    ],
)
def test_layers_that_have_no_smaller_width_are_refused(layer: nn.Module, kind: str) -> None:
    module = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Sequential(layer))
    with pytest.raises(UserError) as caught:
        check_slimmable(module, "who")
    assert str(caught.value) == f"who cannot run the layer '1.0' ({kind}) at a smaller width"


@pytest.mark.parametrize("name", ["cnn", "mlp", "resnet20", "resnet56"])
def test_the_networks_here_have_one(name: str) -> None:
    network = create(name, classes=3)
    assert any(True for _ in network.parameters())
    check_slimmable(network, "who")
    check_slimmable(nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Dropout(), nn.BatchNorm1d(3)), "who")


def test_whether_a_network_runs_on_smaller_pictures() -> None:
    fixed = Network({"one": nn.Sequential(nn.Conv2d(1, 4, 5), nn.Flatten())}, nn.Identity(), nn.Linear(64, 2), width=64)
    assert runs_at(fixed, 0.5, (2, 2))  # nothing is known about its pictures
    fixed.shape = (1, 8, 8)
    for training in (True, False):
        fixed.train(training)
        assert runs_at(fixed, 0.5, (8, 8)) and fixed.training is training
        assert not runs_at(fixed, 0.5, (4, 4)) and fixed.training is training
    assert not any("forward" in vars(m) for m in fixed.modules())
    network = create("cnn", classes=2, shape=(1, 8, 8))
    before = {k: v.clone() for k, v in network.state_dict().items()}
    assert runs_at(network, 0.25, (1, 1)) and runs_at(network, 1.0, (3, 5))
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
