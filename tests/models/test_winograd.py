"""Convolutions with fewer multiplications: float64's numbers to rounding, forward and back, nothing else touched."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, vmap
from torch.fx import symbolic_trace
from torch.nn.functional import conv2d, max_pool2d

from isofed.diagnostics.cost import multiplications
from isofed.diagnostics.twice import TwiceDifferentiable
from isofed.engine.replica import Job, Replica
from isofed.engine.world import World
from isofed.models import create, winograd
from isofed.models.quick import quicken
from isofed.models.winograd import Convolution, convolution
from tests.engine.plain import small

pytestmark = pytest.mark.skipif(
    not winograd.available(), reason="this processor has no AVX-512, or there is no C compiler"
)

# Sums of products in float32 are wrong by about 1e-7 times the root of their number. Transforms enlarge that about four
# times (PyTorch's own convolution of 64 channels is 3e-7 away, this one 1.2e-6); what is far above would be a mistake.
NEAR = 2e-5


def pictures(n: int, channels: int, high: int, wide: int) -> Tensor:
    return torch.randn(n, channels, high, wide).contiguous(memory_format=torch.channels_last)


def layer(inside: int, outside: int, padding: int = 1, bias: bool = True, pool: bool = False) -> Convolution:
    torch.manual_seed(inside)
    made = nn.Conv2d(inside, outside, 3, padding=padding, bias=bias).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    made.__class__ = Convolution
    return Convolution.of(made) if pool else made


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of the convolution, whether it is one with a maximum."""
    seen, own = [], winograd.convolution

    def called(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], pool: bool) -> Tensor:
        seen.append(pool)
        return own(x, weight, bias, padding, pool)

    monkeypatch.setattr(winograd, "convolution", called)
    return seen


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def exact(given: Sequence[Tensor | None], padding: int, pool: bool) -> tuple[Tensor, list[Tensor]]:
    """The definition in float64, and the leaves it was made from."""
    x, weight, bias = (None if t is None else t.detach().double().requires_grad_() for t in given)
    assert x is not None and weight is not None
    y = conv2d(x, weight, bias, padding=padding)
    return (max_pool2d(y, 2).relu() if pool else y), [t for t in (x, weight, bias) if t is not None]


SHAPES = [
    (10, 32, 64, 30, 30, 0),  # pfl-cnn's
    (3, 64, 64, 16, 16, 1),
    (2, 128, 128, 9, 14, 1),  # squares that stick out
    (1, 32, 32, 7, 6, 2),
    (2, 16, 48, 3, 3, 0),  # one pixel
    (4, 48, 16, 12, 3, 1),
    (5, 96, 112, 5, 8, 3),  # numbers of channels that are done in parts of each kind, and zeros alone in a square
    (70, 32, 64, 10, 10, 1),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("n", "inside", "outside", "high", "wide", "padding"), SHAPES)
def test_values_and_gradients_are_those_of_float64(
    n: int, inside: int, outside: int, high: int, wide: int, padding: int, bias: bool
) -> None:
    made, x = layer(inside, outside, padding, bias), pictures(n, inside, high, wide).requires_grad_()
    given = [x, made.weight, made.bias]
    y = convolution(x, made.weight, made.bias, (padding, padding), pool=False)
    wanted, leaves = exact(given, padding, pool=False)
    assert y.shape == wanted.shape and y.is_contiguous(memory_format=torch.channels_last)
    assert error(y, wanted) < NEAR
    g = torch.randn_like(wanted)
    found = torch.autograd.grad(y, [t for t in given if t is not None], g.float())
    truth = torch.autograd.grad(wanted, leaves, g)
    assert all(error(f, t) < NEAR for f, t in zip(found, truth, strict=True))
    with torch.no_grad():
        assert torch.equal(convolution(x, made.weight, made.bias, (padding, padding), pool=False), y)


@pytest.mark.parametrize(
    ("n", "inside", "outside", "high", "wide", "padding"), [s for s in SHAPES if s[3:] != (3, 3, 0)]
)
def test_maxima_are_those_of_float64(n: int, inside: int, outside: int, high: int, wide: int, padding: int) -> None:
    made, x = layer(inside, outside, padding), pictures(n, inside, high, wide).requires_grad_()
    y = convolution(x, made.weight, made.bias, (padding, padding), pool=True)
    wanted, leaves = exact([x, made.weight, made.bias], padding, pool=True)
    assert y.shape == wanted.shape and error(y, wanted) < NEAR
    g = torch.randn_like(wanted)
    found = torch.autograd.grad(y, [x, *made.parameters()], g.float())
    truth = torch.autograd.grad(wanted, leaves, g)
    # Where two of four are equal to rounding, the gradient may go to the other one.
    assert all(error(f, t) < 5e-3 for f, t in zip(found, truth, strict=True))


def amid_nans(x: Tensor) -> Tensor:
    """The same numbers, with NaN before and behind them in memory."""
    room = torch.full((x.numel() + 512,), float("nan"))
    flat = x.permute(0, 2, 3, 1).reshape(-1) if x.dim() == 4 else x
    room[256:-256] = flat
    here = room[256:-256]
    return here.view(len(x), *x.shape[2:], x.shape[1]).permute(0, 3, 1, 2) if x.dim() == 4 else here


@pytest.mark.parametrize("pool", [False, True])
def test_nothing_is_read_that_is_not_given_whatever_the_sizes(pool: bool) -> None:
    draws = torch.Generator().manual_seed(3)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draws))

    for _ in range(40):
        padding = number(0, 2)
        size = number(1, 9), 16 * number(1, 7), number(4, 17), number(4, 17)
        x, weight, bias = torch.randn(size), torch.randn(16 * number(1, 7), size[1], 3, 3), torch.randn(200)
        given = [amid_nans(t).requires_grad_() for t in (x, weight, bias[: len(weight)])]
        y = convolution(given[0], given[1], given[2], (padding, padding), pool)
        wanted, leaves = exact(given, padding, pool)
        g = amid_nans(torch.randn(y.shape))
        found = torch.autograd.grad(y, given, g)
        truth = torch.autograd.grad(wanted, leaves, g.double())
        assert error(y, wanted) < NEAR
        assert all(error(f, t) < (2e-2 if pool else NEAR) for f, t in zip(found, truth, strict=True))


def test_of_equal_numbers_the_first_is_the_largest_as_in_pytorch() -> None:
    x, weight, bias = pictures(2, 16, 9, 8).mul_(0).requires_grad_(), torch.ones(16, 16, 3, 3), torch.ones(16)
    y = convolution(x, weight, bias, (1, 1), pool=True)
    (found,) = torch.autograd.grad(y.sum(), x)
    (truth,) = torch.autograd.grad(max_pool2d(conv2d(x, weight, bias, padding=1), 2).relu().sum(), x)
    assert y.eq(1).all()
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("chosen", [[0], [1], [2], [0, 2], [1, 2]])
def test_gradients_are_made_for_those_who_want_them(chosen: list[int]) -> None:
    x, weight, bias = pictures(8, 32, 18, 18), torch.randn(64, 32, 3, 3), torch.randn(64)
    given = [t.requires_grad_(n in chosen) for n, t in enumerate((x, weight, bias))]
    found = torch.autograd.grad(convolution(x, weight, bias, (1, 1), False).sum(), [given[n] for n in chosen])
    wanted, leaves = exact(given, 1, pool=False)
    truth = torch.autograd.grad(wanted.sum(), [leaves[n] for n in chosen])
    assert all(error(f, t) < NEAR for f, t in zip(found, truth, strict=True))


def test_the_same_input_gives_the_same_bits() -> None:
    made, x = layer(64, 64), pictures(16, 64, 32, 32).requires_grad_()

    def once() -> list[Tensor]:
        y = convolution(x, made.weight, made.bias, (1, 1), pool=False)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *made.parameters()])]

    first = once()
    convolution(pictures(9, 32, 30, 30), torch.randn(64, 32, 3, 3), None, (0, 0), pool=True)  # in the same memory
    assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_two_passes_before_the_way_back_do_not_disturb_each_other() -> None:
    made, one, two = layer(32, 64, pool=True), *(pictures(10, 32, 30, 30).requires_grad_() for _ in range(2))
    first, second = (convolution(x, made.weight, made.bias, (1, 1), pool=True) for x in (one, two))
    found = torch.autograd.grad(first.sum() + second.sum(), [one, two])
    alone = [
        torch.autograd.grad(convolution(x, made.weight, made.bias, (1, 1), pool=True).sum(), x)[0] for x in (one, two)
    ]
    assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


@pytest.mark.parametrize("pool", [False, True])
def test_it_can_be_differentiated_twice(pool: bool) -> None:
    made, x = layer(32, 64, pool=pool), pictures(20, 32, 16, 16).requires_grad_()
    inputs = [x, *made.parameters()]
    y = made(x)
    assert "_Convolution" in type(y.grad_fn).__name__
    wanted, leaves = exact(inputs, 1, pool)

    def penalty(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(y.pow(3).mean(), inputs, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))  # type: ignore[arg-type]

    found, truth = penalty(y, inputs), penalty(wanted, leaves)
    assert all(error(f, t) < (5e-3 if pool else 1e-4) for f, t in zip(found, truth, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("pool", [False, True])
def test_what_has_diverged_is_handed_on(pool: bool, value: float) -> None:
    made, x = layer(32, 64, pool=pool), pictures(20, 32, 16, 16)
    x[3, 5, 6, 6] = value
    with np.errstate(all="raise"):
        y = made(x.requires_grad_())
        (found,) = torch.autograd.grad(y.sum(), made.weight)
    assert not y[3].isfinite().all() and y[4].isfinite().all()
    assert not found.isfinite().all()


def test_what_a_derivative_needs_may_not_be_changed_in_place_and_what_none_needs_may() -> None:
    made, x = layer(32, 64), pictures(20, 32, 16, 16)
    h = x.clone()
    y = made(h)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    frozen, x = layer(64, 64).requires_grad_(False), pictures(10, 64, 16, 16).requires_grad_()
    h = x * 2
    h += frozen(h)
    (found,) = torch.autograd.grad(h.sum(), x)
    leaf = x.detach().double().requires_grad_()
    twice = leaf * 2
    (truth,) = torch.autograd.grad((twice + conv2d(twice, frozen.weight.double(), padding=1)).sum(), leaf)
    assert error(found, truth) < NEAR


def test_inputs_and_gradients_may_lie_in_memory_as_they_like() -> None:
    made, wide = layer(32, 64), pictures(16, 64, 20, 20)
    for x in (wide[:, ::2], wide[:, :32], wide[:, :32, 2:18, ::1], wide[::2, 7:39].contiguous()):
        x = x.detach().requires_grad_()
        y = made(x)
        wanted, (leaf, *_) = exact([x, made.weight, made.bias], 1, pool=False)
        assert error(y, wanted) < NEAR
        (found,) = torch.autograd.grad(y.sum(), x)  # whose gradient is one number, expanded
        assert error(found, torch.autograd.grad(wanted.sum(), leaf)[0]) < NEAR
    used = made(wide[:, :32].detach().requires_grad_()).grad_fn
    assert "_Convolution" in type(used).__name__  # channels that lie next to each other


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # which PyTorch also uses by itself
@pytest.mark.parametrize("pool", [False, True])
def test_what_only_pytorchs_own_can_do_is_left_to_it(pool: bool) -> None:
    made, x = layer(32, 64, pool=pool), pictures(20, 32, 16, 16)

    def by_pytorch(x: Tensor) -> Tensor:
        y = conv2d(x, made.weight, made.bias, padding=1)
        return max_pool2d(y, 2).relu() if pool else y

    own = by_pytorch(x)
    assert not torch.equal(made(x), own)  # it is not PyTorch's, and one could tell
    little = x[:1, :, :6, :6]  # work
    assert torch.equal(made(little), by_pytorch(little))
    assert torch.equal(made(x[0]), by_pytorch(x[:1])[0])
    assert made(x[:0]).shape == by_pytorch(x[:0]).shape
    assert torch.equal(made(x.contiguous()), by_pytorch(x.contiguous()))
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype == torch.bfloat16
    each = vmap(lambda one: functional_call(made, dict(made.named_parameters()), (one[None],))[0])(x)
    torch.testing.assert_close(each, own, rtol=1e-4, atol=1e-4)
    with forward_ad.dual_level():
        along = forward_ad.unpack_dual(made(forward_ad.make_dual(x, x))).tangent
    assert along.shape == own.shape and along.isfinite().all()
    assert torch.equal(symbolic_trace(made)(x), own) or pool
    assert torch.equal(torch.jit.trace(made, x, check_trace=False)(x), own)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(made(x), by_pytorch(x))
    finally:
        torch.set_num_threads(before)
    with pytest.raises(RuntimeError, match="to have 32 channels"):
        made(x[:, 1:])
    with pytest.raises(RuntimeError, match="[Kk]ernel size|Output size|too small"):
        Convolution.of(layer(32, 64, padding=0))(pictures(10, 32, 2, 2))
    assert copy.deepcopy(made).double()(x.double()).dtype == torch.float64


def test_who_watches_pytorchs_operations_sees_a_convolution() -> None:
    made, x = layer(32, 64), pictures(20, 32, 16, 16)
    with TwiceDifferentiable():
        y = made(x)
    assert "isofed_made_by" in vars(y)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        made(x)
    assert counter.get_total_flops() == 2 * 20 * 64 * 16 * 16 * 32 * 9


def test_multiplications_are_counted_before_the_maximum() -> None:
    x = pictures(2, 32, 15, 15)
    found = [multiplications(made, x, made(x)) for made in (layer(32, 64), layer(32, 64, pool=True))]
    assert found == [2 * 64 * 15 * 15 * 32 * 9] * 2


def test_layers_are_changed_in_place_and_those_that_somebody_made_are_not() -> None:
    class Own(nn.Conv2d):
        pass

    others = [nn.Conv2d(32, 64, 1), nn.Conv2d(32, 64, 3, stride=2), nn.Conv2d(32, 64, 3, groups=2)]
    others += [nn.Conv2d(32, 64, 3, padding="same"), nn.Conv2d(32, 64, 3, padding=1, padding_mode="reflect")]
    plain, own = nn.Conv2d(32, 64, 3), Own(32, 64, 3)
    network = nn.ModuleList([plain, own, *others])
    names, weight = list(network.state_dict()), plain.weight
    quicken(network)
    assert type(plain) is Convolution and network[0] is plain and plain.weight is weight and not plain.pool
    assert type(own) is Own and all(type(other) is nn.Conv2d for other in others)
    assert list(network.state_dict()) == names


def test_what_stands_behind_a_convolution_becomes_a_part_of_it_in_its_place_alone() -> None:
    shared = nn.Conv2d(32, 64, 3)
    network = nn.Sequential(nn.Sequential(shared, nn.ReLU(), nn.MaxPool2d(2)), nn.Conv2d(64, 32, 1), shared)
    twin = copy.deepcopy(network)
    quicken(network)
    first, second, third = network[0].children()
    assert isinstance(first, Convolution) and first.pool and {type(second), type(third)} == {nn.Identity}
    assert network[2] is shared and not shared.pool and first.weight is shared.weight
    assert list(network.state_dict()) == list(twin.state_dict())
    x = pictures(10, 32, 30, 30)
    assert error(network(x), twin(x)) < NEAR
    for pool in (nn.MaxPool2d(3), nn.MaxPool2d(2, 1), nn.MaxPool2d(2, ceil_mode=True)):
        other = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), pool)
        quicken(other)
        assert not other[0].pool
    seen = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
    seen[1].register_forward_hook(lambda *_: None)
    quicken(seen)
    assert not seen[0].pool


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOFED_FUSED", "0")
    network = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
    quicken(network)
    assert type(network[0]) is nn.Conv2d


@pytest.mark.parametrize(("name", "used"), [("pfl-cnn", 1), ("cnn", 0), ("resnet20", 16), ("convnet7", 5)])
def test_networks_use_it_where_it_was_measured_to_be_faster(
    name: str, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, seen = create(name, classes=3, shape=(3, 32, 32)), count_calls(monkeypatch)
    quicken(network)
    network(pictures(10, 3, 32, 32))
    assert len(seen) == used


def test_the_engine_trains_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.create(
        small(model="pfl-cnn", data="synthetic:samples=80,size=32,channels=3", batch_size=10, partition="iid").settings
    )
    weights, seen, found = None, count_calls(monkeypatch), []
    for switch in ("1", "0"):
        monkeypatch.setenv("ISOFED_FUSED", switch)
        replica = Replica(world, torch.device("cpu"))
        weights = replica.flat.clone() if weights is None else weights
        found.append(replica.visit(Job(1, 0, 0.05, 0.5), weights, {}, None))
    assert seen == [True] * 4  # two epochs of two steps, with the maximum; none where it is switched off
    assert error(found[0].update, found[1].update) < 1e-3


@pytest.mark.parametrize("pool", [False, True])
def test_the_default_type_is_not_asked(pool: bool) -> None:
    """C writes float32, whatever new tensors are elsewhere."""
    made = layer(32, 32, pool=pool)
    x = pictures(4, 32, 12, 12).requires_grad_()
    leaves = [x, *made.parameters()]
    wanted = made(x)
    gradients = torch.autograd.grad(wanted.square().sum(), leaves)
    for kind in (torch.float64, torch.bfloat16):
        winograd._room.here = torch.empty(0)
        torch.set_default_dtype(kind)
        try:
            y = made(x)
            found = torch.autograd.grad(y.square().sum(), leaves)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(y, wanted) and all(torch.equal(f, g) for f, g in zip(found, gradients, strict=True))


@pytest.mark.parametrize("pool", [False, True])
def test_a_bias_may_change_where_no_derivative_needs_it(pool: bool) -> None:
    made, x = layer(32, 32, pool=pool), pictures(4, 32, 12, 12)
    y = made(x)
    with torch.no_grad():
        made.bias.zero_()  # type: ignore[union-attr]
    y.sum().backward()
    assert made.weight.grad is not None and "Convolution" in type(y.grad_fn).__name__


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("pool", [False, True])
def test_many_gradients_at_once(pool: bool, times: int) -> None:
    made, x = layer(32, 32, pool=pool), pictures(4, 32, 12, 12).requires_grad_()
    y = made(x) if times == 1 else made(made(x))
    many = torch.randn(3, *y.shape)
    (found,) = torch.autograd.grad(y, x, many, retain_graph=True, is_grads_batched=True)
    wanted = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in many]
    assert error(found, torch.stack(wanted)) < NEAR


@pytest.mark.parametrize("pool", [False, True])
def test_a_layer_that_is_used_twice_has_second_derivatives(pool: bool) -> None:
    """What it is given the second time was made of its own weight."""
    made, x = layer(32, 32, pool=pool), pictures(4, 32, 16, 16)
    assert made.bias is not None
    leaves = [t.detach().double().requires_grad_() for t in (made.weight, made.bias)]

    def twice(weight: Tensor, bias: Tensor) -> Tensor:
        y = x.double()
        for _ in range(2):
            y = conv2d(y, weight, bias, padding=1)
            y = max_pool2d(y, 2).relu() if pool else y
        return y

    given = [made.weight, made.bias]
    found = torch.autograd.grad(made(made(x)).square().sum(), given, create_graph=True)
    wanted = torch.autograd.grad(twice(*leaves).square().sum(), leaves, create_graph=True)
    assert all(error(f, w) < 1e-4 for f, w in zip(found, wanted, strict=True))
    found, wanted = (
        torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), of)
        for first, of in ((found, given), (wanted, leaves))
    )
    assert all(error(f, w) < (2e-2 if pool else 1e-4) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("kept", ["contiguous", "numpy", "a copy"])
def test_what_is_kept_for_the_way_back_may_be_packed(kept: str, pool: bool) -> None:
    """By hooks that give back another tensor with the same numbers, which may lie otherwise."""

    def packed(t: Tensor) -> object:
        if kept == "numpy":
            return t.detach().numpy().copy(order="C")
        return t.clone(memory_format=torch.contiguous_format) if kept == "contiguous" else t.clone()

    made, x = layer(32, 32, pool=pool), pictures(4, 32, 16, 16).requires_grad_()
    g = torch.randn_like(made(x))
    wanted = torch.autograd.grad(made(x), [x, *made.parameters()], g)
    unpacked = torch.from_numpy if kept == "numpy" else lambda t: t
    with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
        y = made(x)
    for found, want in zip(torch.autograd.grad(y, [x, *made.parameters()], g), wanted, strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("pool", [False, True])
def test_what_is_kept_may_be_another_tensor_by_then(pool: bool) -> None:
    """Memory was read that is not the weight's: setting ``data`` is seen by nobody."""
    for change in ("half", "double", "fewer"):
        made, x = layer(64, 64, pool=pool), pictures(16, 64, 32, 32).requires_grad_()
        first = nn.Conv2d(64, 64, 3, padding=1)
        first.load_state_dict(made.state_dict())
        plain = nn.Sequential(first, *([nn.MaxPool2d(2), nn.ReLU()] if pool else []))
        found: list[Tensor | None] = []
        for module, weight in ((made, made.weight), (plain, first.weight)):
            y = module(x)
            if change == "fewer":
                weight.data = weight.data[:16].clone()
            else:
                getattr(module, change)()
            try:
                found += torch.autograd.grad(y.sum(), [x])
            except RuntimeError:  # of types or shapes
                found.append(None)
        ours, wanted = found
        assert ours is None or (wanted is not None and error(ours, wanted) < NEAR), change


def test_a_negative_padding_is_refused_as_by_pytorch() -> None:
    made = layer(32, 32)
    made.padding = (-1, -1)
    with pytest.raises(RuntimeError, match="negative padding is not supported"):
        made(pictures(4, 32, 12, 12))


def test_what_is_changed_later_is_heeded() -> None:
    x, made = pictures(4, 32, 12, 12), layer(32, 32)
    made.stride = (2, 2)
    assert made(x).shape == (4, 32, 6, 6)
    made = layer(32, 32)
    made.padding = "same"
    assert made(x).shape == (4, 32, 12, 12)
    made = layer(32, 32)
    made.bias = nn.Parameter(torch.zeros(16))
    with pytest.raises(RuntimeError):
        made(x)
