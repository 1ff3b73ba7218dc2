"""Large dense layers on a processor: PyTorch's numbers to rounding, with all derivatives, and nothing else touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, vmap
from torch.fx import symbolic_trace
from torch.nn.functional import linear
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.flop_counter import FlopCounterMode

from isofed.models import dense
from isofed.models.dense import Dense
from isofed.models.quick import quicken

here = pytest.mark.skipif(not dense.available(), reason="this processor has no AVX-512, or this PyTorch no oneDNN")


def layer(inside: int, outside: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inside)
    made = nn.Linear(inside, outside, bias)
    made.__class__ = Dense
    return made


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max())


@here
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("batch", "inside", "outside"), [(10, 12544, 128), (64, 700, 51), (257, 129, 65), (2, 2048, 1024)]
)
def test_values_and_gradients_are_those_of_float64(batch: int, inside: int, outside: int, bias: bool) -> None:
    made, x = layer(inside, outside, bias), torch.randn(batch, inside, requires_grad=True)
    assert batch * inside * outside >= dense.LEAST
    exact = [t.detach().double().requires_grad_() for t in (x, *made.parameters())]
    y, wanted = made(x), linear(*exact)
    assert y.grad_fn is not None and "Product" in type(y.grad_fn).__name__
    assert error(y, wanted) < 1e-6 * inside**0.5
    found = torch.autograd.grad(y.square().sum(), [x, *made.parameters()])
    truth = torch.autograd.grad(wanted.square().sum(), exact)
    assert all(error(f, t) < 2e-6 * max(inside, outside, batch) ** 0.5 for f, t in zip(found, truth, strict=True))


@here
def test_it_can_be_differentiated_twice() -> None:
    made, x = layer(600, 60), torch.randn(64, 600, requires_grad=True)
    exact = [t.detach().double().requires_grad_() for t in (x, *made.parameters())]

    def penalty(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(y.pow(3).mean(), inputs, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))  # type: ignore[arg-type]

    found = penalty(made(x), [x, *made.parameters()])
    truth = penalty(linear(*exact), exact)
    assert all(error(f, t) < 1e-4 for f, t in zip(found, truth, strict=True))


@here
def test_inputs_and_gradients_may_lie_in_memory_as_they_like() -> None:
    made, wide = layer(2000, 128), torch.randn(64, 4000)
    overlapping, one = torch.randn(3000).unfold(0, 2000, 1)[:64], torch.randn(2000).expand(64, -1)
    for x in (wide[:, ::2], wide[:, 1:2001], torch.randn(2000, 64).t(), overlapping, one):
        x = x.detach().requires_grad_()
        y = made(x)
        assert error(y, linear(x.double(), made.weight.double(), made.bias.double())) < 1e-5
        (found,) = torch.autograd.grad(y.sum(), x)  # whose gradient is one number, expanded
        assert error(found, made.weight.double().sum(0).expand(64, -1)) < 1e-5


@here
@pytest.mark.parametrize("kind", ["expanded", "every second", "one", "one in a row", "in a row"])
def test_a_bias_may_be_whatever_pytorch_adds(kind: str) -> None:
    """oneDNN would read as many numbers as there are outputs, one behind the other, wherever they end."""
    made, x = layer(2000, 128), torch.randn(64, 2000)
    kinds = {
        "expanded": torch.randn(1).expand(128),
        "every second": torch.randn(256)[::2],
        "one": torch.randn(1),
        "one in a row": torch.randn(1, 1),
        "in a row": torch.randn(1, 128),
    }
    made.bias = nn.Parameter(kinds[kind])
    assert error(made(x), x.double() @ made.weight.double().t() + made.bias.double()) < 1e-5


@here
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_gradient_may_have_a_direction() -> None:
    made, x = layer(2000, 128), torch.randn(64, 2000, requires_grad=True)
    y = made(x)
    with forward_ad.dual_level():
        g = forward_ad.make_dual(torch.randn(64, 128), torch.ones(64, 128))
        (found,) = torch.autograd.grad(y, x, g)
        along = forward_ad.unpack_dual(found).tangent
    assert error(along, made.weight.double().sum(0).expand(64, -1)) < 1e-5


@here
def test_a_nan_is_handed_on() -> None:
    made, x = layer(2000, 128), torch.randn(64, 2000)
    x[3, 5] = float("nan")
    assert made(x)[3].isnan().all() and not made(x)[4].isnan().any()


@here
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # which PyTorch also uses by itself
def test_what_only_pytorchs_own_can_do_is_left_to_it() -> None:
    made, x = layer(2000, 128), torch.randn(64, 2000)
    own = linear(x, made.weight, made.bias)
    small = x[:4]
    assert torch.equal(made(small), linear(small, made.weight, made.bias))  # too little work
    cube = x.view(8, 8, 2000)
    assert torch.equal(made(cube), linear(cube, made.weight, made.bias))
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype == torch.bfloat16
    each = vmap(lambda row: functional_call(made, dict(made.named_parameters()), (row[None],))[0])(x)
    torch.testing.assert_close(each, own, rtol=1e-4, atol=1e-4)
    with forward_ad.dual_level():
        along = forward_ad.unpack_dual(made(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    torch.testing.assert_close(along, made.weight.sum(1).expand(64, -1), rtol=1e-3, atol=1e-3)
    assert torch.equal(made(x.to_sparse()), linear(x.to_sparse(), made.weight, made.bias))
    assert torch.equal(symbolic_trace(made)(x), own)
    assert torch.equal(torch.jit.trace(made, x)(x), own)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        made(x[:, 1:])
    assert made.double()(x.double()).dtype == torch.float64


@here
def test_what_no_derivative_needs_may_be_changed_in_place() -> None:
    frozen, x = layer(1000, 1000).requires_grad_(False), torch.randn(64, 1000, requires_grad=True)
    h = x * 2
    h += frozen(h)
    (found,) = torch.autograd.grad(h.sum(), x)
    assert error(found, 2 + 2 * frozen.weight.double().sum(0).expand(64, -1)) < 1e-5


@here
def test_layers_are_changed_in_place_and_those_that_somebody_made_are_not() -> None:
    class Own(nn.Linear):
        pass

    plain, own, other = nn.Linear(3, 2), Own(3, 2), nn.Linear(3, 2)
    register_parametrization(other, "weight", nn.Identity())
    network = nn.ModuleList([plain, own, other])
    names, weight = list(network.state_dict()), plain.weight
    quicken(network)
    assert type(plain) is Dense and network[0] is plain and plain.weight is weight
    assert type(own) is Own and type(other) is not Dense
    assert list(network.state_dict()) == names


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOFED_FUSED", "0")
    network = nn.Sequential(nn.Linear(3, 2))
    quicken(network)
    assert type(network[0]) is nn.Linear


@pytest.mark.skipif(dense._functions() is None, reason="there is no C compiler")
@pytest.mark.parametrize(("rows", "shape"), [(10, (40, 9024)), (16, (4, 64)), (1, (8, 512)), (64, (36, 576))])
def test_going_along_factors_is_going_along_their_product(rows: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(rows)
    factors = [(torch.randn(rows, shape[0]), torch.randn(rows, shape[1])) for _ in range(2)]
    weight, lr = torch.randn(shape), torch.tensor(0.3)
    product = sum((a.double().t() @ b.double() for a, b in factors), torch.zeros(()))
    wanted = weight.double() - lr.double() * product
    dense.go_along(weight, factors, lr)
    assert (weight.double() - wanted).norm() < 1e-6 * wanted.norm()
    assert (dense.multiplied(factors).double() - product).norm() < 1e-6 * product.norm()


@pytest.mark.skipif(dense._functions() is None, reason="there is no C compiler")
def test_small_parts_of_an_update_are_not_lost() -> None:
    """Each row of a batch alone may be too small to change a weight."""
    torch.manual_seed(0)
    a, b = torch.full((512, 128), 1e-6), torch.rand(512, 256)
    weight, lr = torch.rand(128, 256) + 1, torch.tensor(0.01)
    wanted = -lr.double() * (a.double().t() @ b.double())
    made = weight.clone()
    dense.go_along(made, [(a, b)], lr)
    assert abs(float((made.double() - weight.double()).sum() / wanted.sum()) - 1) < 0.01


@here
def test_batches_of_many_rows_are_multiplied_out() -> None:
    made = Dense(256, 128)
    for rows, few in ((dense.MOST, True), (dense.MOST + 1, False)):
        made.factors = []
        (found,) = torch.autograd.grad(made(torch.randn(rows, 256)).sum(), [made.weight], allow_unused=True)
        assert (found is None, len(made.factors)) == (few, int(few))


@here
def test_a_layer_that_is_used_twice_gives_two_pairs_of_factors() -> None:
    torch.manual_seed(0)
    layer = dense.Dense(1024, 1024)
    layer.factors = []
    x = torch.randn(16, 1024)
    (found,) = torch.autograd.grad(layer(layer(x)).square().sum(), [layer.weight], allow_unused=True)
    assert found is None and len(layer.factors) == 2
    made = dense.multiplied(layer.factors)
    layer.factors = None
    (wanted,) = torch.autograd.grad(layer(layer(x)).square().sum(), [layer.weight])
    assert (made - wanted).norm() < 1e-5 * wanted.norm()


@here
def test_whoever_counts_operations_sees_the_product() -> None:
    made, x = layer(2048, 1024), torch.randn(2, 2048)
    with FlopCounterMode(display=False) as counter:
        made(x)
    assert counter.get_total_flops() == 2 * 2 * 2048 * 1024
