"""Residual blocks with an open, a shut and no gate; shortcuts without weights; what a network gives its head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isofed.models import Network, create, fused
from isofed.models.base import BatchNorm2d, statistics_kept
from isofed.models.fused import _ends_with_norm
from isofed.models.residual import PadShortcut, Residual, is_closed, residual_blocks


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def made(keep: float = 0.6, shortcut: nn.Module | None = None, seed: int = 0) -> Residual:
    torch.manual_seed(seed)
    block = Residual(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), BatchNorm2d(3)), shortcut)
    block.keep = keep
    return block


def state(module: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in module.state_dict().items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(v, two[k]) for k, v in one.items())


X = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))


def test_a_plain_block() -> None:
    block = made(1.0)
    assert torch.equal(block(X), (X + block.branch(X)).relu())
    shortcut = nn.Conv2d(3, 3, 1)
    block = made(1.0, shortcut)
    assert torch.equal(block(X), (shortcut(X) + block.branch(X)).relu())


@pytest.mark.parametrize("shortcut", [None, nn.Conv2d(3, 3, 1), PadShortcut(1)])
def test_a_shut_gate_leaves_the_shortcut_and_no_trace(shortcut: nn.Module | None) -> None:
    block = made(shortcut=shortcut).train()
    block.gate = torch.tensor(0.0)
    before = state(block)
    x = X.clone().requires_grad_()
    found = block(x)
    assert torch.equal(found, (shortcut(x) if isinstance(shortcut, nn.Conv2d) else x).relu())
    assert same(state(block), before)
    found.sum().backward()
    for parameter in block.branch.parameters():
        assert parameter.grad is not None and not parameter.grad.any()
    if shortcut is None:
        assert x.grad is not None and torch.equal(x.grad, (X > 0).float())


def test_an_open_gate_is_the_plain_block() -> None:
    block, plain = made().train(), made(1.0).train()
    block.gate = torch.tensor(1.0)
    one, two = block(X), plain(X)
    assert torch.equal(one, two)
    assert same(state(block), state(plain))  # its statistics moved
    assert not torch.equal(state(block)["branch.1.running_mean"], torch.zeros(3))
    one.square().sum().backward(), two.square().sum().backward()
    for mine, its in zip(block.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None and torch.equal(mine.grad, its.grad)


@pytest.mark.parametrize("gate", [None, 0.0, 1.0])
def test_in_evaluation_the_branch_counts_as_often_as_it_is_there(gate: float | None) -> None:
    block = made(0.6).eval()
    block.gate = None if gate is None else torch.tensor(gate)
    torch.testing.assert_close(block(X), (X + 0.6 * block.branch(X)).relu())


def test_in_training_without_a_gate_too_and_its_statistics_move() -> None:
    block = made(0.25).train()
    found = block(X)
    inside = F.batch_norm(block.branch.get_submodule("0")(X), None, None, training=True)
    torch.testing.assert_close(found, (X + 0.25 * inside).relu())
    assert block.state_dict()["branch.1.running_mean"].any()


def test_a_gate_means_nothing_to_a_block_that_is_always_there() -> None:
    block = made(1.0).train()
    block.gate = torch.tensor(0.0)
    assert not torch.equal(block(X), X.relu())


def test_every_buffer_of_a_shut_branch_is_kept_and_integers_may_count() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    block = Residual(inner).train()
    block.keep, block.gate = 0.5, torch.tensor(0.0)
    before = state(block)
    block(X)
    changed = {k for k, v in state(block).items() if not torch.equal(v, before[k])}
    assert changed == {"branch.0.num_batches_tracked", "branch.1.1.num_batches_tracked"}


def test_pad_shortcut() -> None:
    x = torch.randn(2, 3, 5, 5)
    found = PadShortcut(2)(x, 8)
    assert found.shape == (2, 8, 3, 3)
    assert torch.equal(found[:, 2:5], x[:, :, [0, 2, 4]][:, :, :, [0, 2, 4]])  # five new: two before, three after
    assert not found[:, :2].any() and not found[:, 5:].any()
    assert torch.equal(PadShortcut(1)(x, 3), x)
    even = PadShortcut(2)(x, 5)
    assert torch.equal(even[:, 1:4], x[:, :, ::2, ::2]) and not even[:, 0].any() and not even[:, 4].any()


def test_blocks_are_found_in_the_order_of_the_pass() -> None:
    network = create("resnet20", classes=2, shape=(1, 8, 8))
    seen: list[nn.Module] = []
    for block in residual_blocks(network):
        block.register_forward_hook(lambda module, *_: seen.append(module))
    network(torch.zeros(2, 1, 8, 8))
    found = residual_blocks(network)
    assert len(found) == 9 and all(a is b for a, b in zip(seen, found, strict=True))
    assert [len(residual_blocks(create(n, classes=2))) for n in ("resnet32", "resnet56-basic", "resnet56")] == [
        15,
        27,
        18,
    ]
    assert residual_blocks(create("cnn", classes=2)) == []


# What a network is


def plain(**options: Any) -> Network:
    torch.manual_seed(3)
    stages = {"one": nn.Sequential(nn.Flatten(), nn.Linear(16, 6)), "two": nn.ReLU()}
    return Network(stages, nn.Identity(), nn.Linear(options.pop("inside", 6), 3), width=6, **options)


def test_a_projector_makes_the_features() -> None:
    projector = nn.Linear(6, 4)
    network = plain(inside=4, projector=projector)
    x = torch.randn(5, 1, 4, 4)
    output = network(x)
    assert list(output.stages) == ["one", "two"]
    assert torch.equal(output.stages["two"], output.stages["one"].relu())
    assert torch.equal(output.features, projector(output.stages["two"]))
    assert torch.equal(output.logits, network.head(output.features))


def test_normalise_is_what_the_head_sees_and_features_stay_as_they_are() -> None:
    network = plain()
    x = torch.randn(5, 1, 4, 4)
    before = network(x)
    assert torch.equal(network.head_input(before.features), before.features)
    network.normalise = True
    after = network(x)
    assert torch.equal(after.features, before.features)
    scaled = before.features / before.features.norm(dim=1, keepdim=True)
    torch.testing.assert_close(network.head_input(before.features), scaled)
    torch.testing.assert_close(after.logits, network.head(scaled))
    assert network.head_input(before.features.bfloat16()).dtype == torch.float32


def test_a_feature_without_direction_stays_zero_with_a_finite_gradient() -> None:
    network = plain()
    network.normalise = True
    z = torch.zeros(2, 6, requires_grad=True)
    network.head_input(z).sum().backward()
    assert not network.head_input(z).any()
    assert z.grad is not None and not z.grad.any()


@pytest.mark.parametrize("fails", [False, True])
def test_statistics_are_kept_for_the_time_of_a_block(fails: bool) -> None:
    layers = [BatchNorm2d(3), nn.BatchNorm2d(3, momentum=0.3), nn.BatchNorm2d(3, momentum=None)]
    network = nn.Sequential(layers[0], nn.Sequential(layers[1]), layers[2]).train()
    network(X)
    before = state(network)
    wanted = nn.Sequential(BatchNorm2d(3), nn.BatchNorm2d(3), nn.BatchNorm2d(3))(3 * X + 1)
    if fails:
        with pytest.raises(ZeroDivisionError), statistics_kept(network):
            network(3 * X + 1)
            raise ZeroDivisionError
    else:
        with statistics_kept(network):
            assert torch.allclose(network(3 * X + 1), wanted, atol=1e-5)  # still the batch's own in the pass
    now = state(network)
    assert all(torch.equal(v, now[k]) for k, v in before.items() if "running" in k)
    assert [layer.momentum for layer in layers] == [0.1, 0.3, None]
    network(3 * X + 1)
    assert not torch.equal(layers[0].get_buffer("running_mean"), before["0.running_mean"])


@pytest.mark.parametrize("position", [0, 2], ids=["no shortcut", "shortcut"])
def test_a_shut_pre_activation_block_keeps_what_only_its_branch_uses(position: int) -> None:
    block = residual_blocks(create("senet18", classes=3))[position]
    block.keep, block.gate = 0.5, torch.tensor(0.0)
    before = {k: v.clone() for k, v in block.named_buffers()}
    block.train()(torch.randn(4, 64, 8, 8))
    moved = {k.split(".")[0] for k, v in block.named_buffers() if not torch.equal(v, before[k])}
    # With a shortcut the norm before the branch is in use all the same.
    assert moved == ({"before"} if block.shortcut is not None else set())


class Weak(nn.Sequential):
    """Layers one after another, and then something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.1 * super().forward(x)


class Own(BatchNorm2d):
    """A norm of one's own, that takes nothing but its input."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * super().forward(x)


_ACT, _CONV = nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1)
BRANCHES: dict[str, list[nn.Module]] = {
    "two": [_CONV, BatchNorm2d(3)],
    "a layer twice": [_CONV, _ACT, _CONV, _ACT, nn.Conv2d(3, 3, 1), BatchNorm2d(3)],
    "one picture for all places": [nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 3, 1), BatchNorm2d(3)],
    "many for one place": [nn.Conv2d(3, 3, 1), BatchNorm2d(3)],
}


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("name", BRANCHES)
def test_a_block_that_joins_is_the_same_block(name: str, relu: bool) -> None:
    shortcut = nn.AdaptiveAvgPool2d(1) if name == "many for one place" else None
    block = Residual(nn.Sequential(*BRANCHES[name]), shortcut, relu=relu).train()
    assert _ends_with_norm(block.branch)
    expected = block(X)
    block.joins = True
    assert torch.equal(block(X), expected)


def test_a_block_that_joins_in_another_precision_than_its_input_is_wide() -> None:
    block = Residual(nn.Sequential(_CONV, BatchNorm2d(3))).float().train()
    found = []
    for block.joins in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(block(X))
    assert found[0].dtype == found[1].dtype == torch.float32 and torch.equal(*found)


def test_hooks_on_a_branch_and_its_norm_see_what_they_saw() -> None:
    block = Residual(nn.Sequential(_CONV, BatchNorm2d(3))).float().train()
    plain, norm = block.branch(X), block.branch.get_submodule("1")
    block.joins = True
    for module in (block.branch, norm):
        seen: list[Tensor] = []
        hook = module.register_forward_hook(lambda module, given, found, seen=seen: seen.append(found))
        found = block(X)
        hook.remove()
        assert len(seen) == 1 and torch.equal(seen[0], plain) and torch.equal(found, (X + plain).relu())
    hook = block.branch.register_forward_hook(lambda module, given, found: 0 * found)
    assert torch.equal(block(X), X.relu())
    hook.remove()


def test_what_ends_with_a_norm_of_ours_and_is_nothing_but_layers() -> None:
    layers = [nn.Conv2d(3, 3, 1), BatchNorm2d(3)]
    assert _ends_with_norm(nn.Sequential(*layers))
    for branch in (Weak(*layers), nn.Sequential(*layers, nn.ReLU()), nn.Sequential(Own(3)), nn.Sequential(), layers[1]):
        assert not _ends_with_norm(branch)


def test_a_relu_becomes_part_of_a_norm_that_stands_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """How a GPU's layers are chosen, which needs none: behind the norm's other place there may be no ReLU."""
    monkeypatch.setattr(fused, "available", lambda: True)
    norm, other = BatchNorm2d(4), BatchNorm2d(4)
    network = nn.Sequential(norm, nn.ReLU(), nn.Sequential(norm), other, nn.ReLU())
    fused.fuse(network)
    assert (norm.relu, other.relu) == (False, True)
    assert [type(layer) for layer in network][1:] == [nn.ReLU, nn.Sequential, BatchNorm2d, nn.Identity]


def watch(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda *_: None)


def replace(layer: nn.Module) -> None:
    layer.forward = layer.forward


@pytest.mark.parametrize("change", [watch, replace])
@pytest.mark.parametrize("place", ["", "stages", "stages.stage1", "stages.stage1.0.branch.0"])
def test_gradients_come_in_two_parts_where_nobody_can_see_them(
    place: str, change: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook of a module sees what those inside of it have made, and may ask for a gradient there."""
    monkeypatch.setattr(fused, "available", lambda: True)
    network = create("resnet8", classes=3)
    assert is_closed(network)
    change(network.get_submodule(place))
    assert not is_closed(network)
    fused.fuse(network, unseen=True)
    assert not any(block.twins for block in residual_blocks(network))
