"""Networks that are made quicker on a processor give the same bits, forward and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from isofed.methods import Method, Step
from isofed.models import create, dense, names, winograd
from isofed.models.quick import quicken
from tests.engine.plain import small


@pytest.fixture(autouse=True)
def pytorchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other products round differently; here it is about all the rest."""
    monkeypatch.setattr(dense, "available", lambda: False)
    monkeypatch.setattr(winograd, "available", lambda: False)


def bits(network: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs and all gradients."""
    x = x.clone().requires_grad_()
    y = network(x)
    y = y if isinstance(y, Tensor) else y.logits
    weights = [*network.parameters()]
    found = torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum(), [x, *weights])
    return [y.detach(), *found, *network.buffers()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", names())
def test_every_network_gives_the_same_bits(name: str) -> None:
    side = 32 if name in ("pfl-cnn", "vgg13", "moon-cnn") else 64
    if name in ("feduv-resnet50", "resnet50-imagenet", "moon-resnet50"):
        pytest.skip("made of the same blocks as ResNet-18 and 56, and slow")
    torch.manual_seed(0)
    network = create(name, classes=3, shape=(3, side, side))
    twin = copy.deepcopy(network)
    quicken(twin)
    assert list(twin.state_dict()) == list(network.state_dict())
    x = torch.randn(2, 3, side, side).contiguous(memory_format=torch.channels_last)
    torch.manual_seed(1)
    wanted = bits(network.train(), x)
    torch.manual_seed(1)
    assert same(bits(twin.train(), x), wanted)
    assert torch.equal(twin.eval()(x).logits, network.eval()(x).logits)


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, padding=1), nn.MaxPool2d(3, 2, ceil_mode=True)])
@pytest.mark.parametrize("kind", ["random", "equal", "negative", "nan"])
def test_a_maximum_before_the_relu_is_the_same(pool: nn.Module, kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    x = {"equal": x.round(), "negative": -x.abs() - 0.1}.get(kind, x)
    if kind == "nan":
        x[0, 0, 2, 3] = float("nan")
    network = nn.Sequential(nn.ReLU(), pool, nn.Flatten())
    twin = copy.deepcopy(network)
    quicken(twin)
    assert [type(m) for m in twin] == [nn.MaxPool2d, nn.ReLU, nn.Flatten]
    assert same(bits(twin, x), bits(network, x))


def test_a_relu_writes_over_nothing_that_somebody_else_reads() -> None:
    shared = nn.ReLU()
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), shared, nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), shared, nn.Sigmoid(), shared
    )
    quicken(network)
    assert [layer.inplace for layer in network if isinstance(layer, nn.ReLU)] == [True, True, False]
    assert not shared.inplace  # which may also be used elsewhere


def test_what_is_watched_stays() -> None:
    seen: list[Tensor] = []

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(output)

    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1), nn.ReLU())
    network[0].register_forward_hook(watch)
    network[2].register_forward_hook(watch)
    quicken(network)
    assert [type(m) for m in network] == [nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Conv2d, nn.ReLU]
    network(torch.randn(2, 3, 8, 8))
    assert float(seen[0].detach().min()) < 0 and [m.inplace for m in network if isinstance(m, nn.ReLU)] == [False, True]


class Looks(nn.Module):
    """Reads what each layer gives, as a network of somebody's own may."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        given = []
        for layer in self.layers:
            x = layer(x)
            given.append(x.sum())
        return torch.stack(given)


@pytest.mark.parametrize("wrap", [Looks, lambda layers: nn.Sequential(Looks(layers))])
def test_layers_inside_a_module_of_ones_own_stay(wrap: Callable[[nn.Sequential], nn.Module]) -> None:
    network = wrap(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)))
    twin, x = copy.deepcopy(network), torch.randn(2, 3, 8, 8)
    quicken(twin)
    assert same(bits(twin, x), bits(network, x))


@dataclass(frozen=True)
class Follows(Method):
    """Goes through the layers by itself, as a method of somebody's own may."""

    def loss(self, step: Step) -> Tensor:
        x, given = step.inputs, []
        for layer in step.network.stages["stage1"]:  # type: ignore[attr-defined]
            x = layer(x)
            given.append(x)
        assert float(given[1].detach().min()) < 0 <= float(given[2].detach().min())  # batch norm, and its ReLU
        return 0.01 * given[1].square().mean()


def test_layers_stay_where_a_method_of_ones_own_may_look_at_them() -> None:
    run = small(model="cnn", method=Follows(), rounds=1)
    assert run.fit().history[0]["clients"] == 4 and not run.history[0]["events"]


def test_layers_with_another_forward_and_hooks_on_all_stay() -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())

    own = network()
    own[0].forward = lambda x: x - 1
    quicken(own)
    assert not own[1].inplace
    watch = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        quicken(every := network())
    finally:
        watch.remove()
    assert not every[1].inplace
