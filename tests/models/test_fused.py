"""Fused layers on a GPU, against PyTorch's own in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from isofed.models import create, fused
from isofed.models.base import BatchNorm1d, BatchNorm2d
from isofed.models.batch_norm import twin_of
from isofed.models.convolution import FusedConv2d
from isofed.models.dropout import Dropout, dropouts, hashed, places
from isofed.models.parts import added, taken
from isofed.models.residual import residual_blocks
from isofed.models.resize import resized
from isofed.models.slim import slim_forward
from isofed.models.tiles import in_rows, rows_of, tickets

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


SHAPES = [
    (64, 64, 32, 32),
    (256, 64, 32, 32),
    (128, 256, 4, 4),
    (64, 512, 4, 4),
    (16, 3, 5, 7),
    (37, 96, 8, 8),
    (64, 512),
    (5, 10),
    (64, 1280, 4, 4),
    (64, 56, 28, 28),
    (9, 104, 7, 7),
]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_batch_norm_agrees_with_float64(shape: tuple[int, ...], offset: float, relu: bool, add: bool) -> None:
    if not fused.available():
        pytest.skip("no Triton here")
    draws = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(shape, device="cuda", generator=draws) * 1.7 + offset
    g, aside = (torch.randn(shape, device="cuda", generator=draws) for _ in range(2))
    if len(shape) == 4:
        x, g = x.to(memory_format=torch.channels_last), g.to(memory_format=torch.channels_last)
    layer = (BatchNorm2d if len(shape) == 4 else BatchNorm1d)(shape[1]).cuda()
    layer.weight.data.normal_(generator=draws)
    layer.bias.data.normal_(generator=draws)
    plain = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1]).cuda().double()
    plain.load_state_dict({k: v for k, v in layer.state_dict().items()} | {"num_batches_tracked": torch.tensor(0)})
    layer.ticket, layer.relu = tickets(shape[1], x.device), relu and not add

    def outputs(module: Any, inputs: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
        inputs = inputs.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        added = aside.to(inputs.dtype).requires_grad_()
        if module is plain:
            made = module(inputs) + added if add else module(inputs)
            made = made.relu() if relu else made
        else:
            made = module(inputs, added, relu) if add else module(inputs)
        of = [inputs, module.weight, module.bias, *([added] if add else [])]
        return [made.detach(), *torch.autograd.grad(made, of, gradient)]

    ours, again, theirs = outputs(layer, x, g), outputs(layer, x, g), outputs(plain, x.double(), g.double())
    outputs(plain, x.double(), g.double())
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    # float32 knows numbers near 100 to 7.6e-6, against a spread of 1.7.
    limit = 1e-5 if offset else 1e-6
    flips = 2e-2 if relu and offset else limit  # and so on which side of the ReLU a few of millions are
    running = [(layer.running_mean, plain.running_mean), (layer.running_var, plain.running_var)]
    for n, (a, b) in enumerate([*zip(ours, theirs, strict=True), *running]):
        assert a is not None and b is not None
        assert (a.double() - b).norm() <= (flips if 1 <= n <= 4 else limit) * max(float(b.norm()), 0.3 * len(b) ** 0.5)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_batch_norm_by_stored_statistics_agrees_with_float64(
    shape: tuple[int, ...], relu: bool, add: bool
) -> None:
    if not fused.available():
        pytest.skip("no Triton here")
    draws = torch.Generator("cuda").manual_seed(5)
    x = torch.randn(shape, device="cuda", generator=draws) * 1.7 + 3
    x = x.to(memory_format=torch.channels_last) if len(shape) == 4 else x
    layer = (BatchNorm2d if len(shape) == 4 else BatchNorm1d)(shape[1]).cuda().eval()
    for tensor in (layer.weight.data, layer.bias.data, layer.running_mean):
        assert tensor is not None
        tensor.normal_(generator=draws)
    assert layer.running_var is not None
    layer.running_var.uniform_(0.1, 4, generator=draws)
    layer.ticket, layer.relu = tickets(shape[1], x.device), relu and not add
    aside = torch.randn(shape, device="cuda", generator=draws) if add else None
    kept = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    places = [1, -1] + [1] * (len(shape) - 2)
    mean, var, weight, bias = (
        kept[name].double().view(places) for name in ("running_mean", "running_var", "weight", "bias")
    )
    wanted = (x.double() - mean) / (var + layer.eps).sqrt() * weight + bias
    wanted = wanted if aside is None else wanted + aside.double()
    wanted = wanted.clamp(min=0) if relu else wanted
    with torch.no_grad():
        found, half = layer(x, aside, relu), layer(x.bfloat16(), aside, relu)
    assert found.dtype == torch.float32 and half.dtype == torch.bfloat16
    assert float((found.double() - wanted).norm()) <= 1e-6 * float(wanted.norm())
    assert float((half.double() - wanted).norm()) <= 1e-2 * float(wanted.norm())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in layer.state_dict().items())
    with_gradient = layer(x.requires_grad_(), aside, relu)  # PyTorch's own, which can be differentiated twice
    torch.testing.assert_close(with_gradient, found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("read", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(64, 64, 32, 32), (9, 104, 7, 7), (5, 10)])
def test_the_gradient_of_a_batch_norm_may_come_in_two_parts(
    shape: tuple[int, ...], relu: bool, add: bool, read: tuple[bool, bool]
) -> None:
    if not fused.available():
        pytest.skip("no Triton here")
    draws = torch.Generator("cuda").manual_seed(3)
    x, aside, *parts = (rows_of(torch.randn(shape, device="cuda", generator=draws)) for _ in range(4))
    layer = (BatchNorm2d if len(shape) == 4 else BatchNorm1d)(shape[1]).cuda()
    layer.weight.data.normal_(generator=draws)
    layer.ticket, layer.relu = tickets(shape[1], x.device), relu and not add
    inputs = [x.requires_grad_(), layer.weight, layer.bias, *([aside.requires_grad_()] if add else [])]
    exact = [v.detach().double().requires_grad_() for v in inputs]
    made = nn.functional.batch_norm(exact[0], None, None, exact[1], exact[2], training=True)
    made = made + exact[3] if add else made
    if relu:  # where rounding does not decide
        parts = [rows_of(g * (made.detach().abs() > 1e-4)) for g in parts]
        made = made.relu()
    y = layer(x, aside, relu) if add else layer(x)
    twin = twin_of(y)
    assert twin is not y and twin.data_ptr() == y.data_ptr() and torch.equal(twin, y)
    of = [(v, g) for v, g, wanted in zip((y, twin), parts, read, strict=True) if wanted]
    found = torch.autograd.grad([v for v, _ in of], inputs, [g for _, g in of])
    together = torch.stack([g.double() for _, g in of]).sum(0)
    for a, b in zip(found, torch.autograd.grad(made, exact, together), strict=True):
        assert float((a.double() - b).norm()) <= 1e-5 * max(float(b.norm()), 1.0)


@pytest.mark.parametrize("model", ["pfl-cnn", "resnet20"])
def test_a_fused_network_judges_a_batch_without_pictures(model: str) -> None:
    network = create(model, classes=10).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fused.fuse(network)
    nothing = torch.empty(0, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    with torch.no_grad():
        assert network.eval()(nothing).logits.shape == (0, 10)


@pytest.mark.parametrize("shape", [(64, 64, 14, 14), (64, 128), (3, 5, 2, 7)])
def test_fused_dropout_drops_the_same_entries(shape: tuple[int, ...]) -> None:
    if not fused.available():
        pytest.skip("no Triton here")
    layer = Dropout(0.25)
    layer.key = torch.tensor(-(2**61) + 12345, device="cuda")
    x = torch.randn(shape, device="cuda")
    x = (x.to(memory_format=torch.channels_last) if len(shape) == 4 else x).requires_grad_()
    results = []
    for on in (False, True):
        layer.fused = on
        made = layer(x)
        results.append((made.detach(), torch.autograd.grad(made.sum(), x)[0]))
    for plain, ours in zip(*results, strict=True):
        assert int(((plain != 0) != (ours != 0)).sum()) == 0
        assert torch.equal(plain, ours), float((plain - ours).abs().max())
    assert 0.6 < float((results[1][0] != 0).float().mean()) < 0.9


@pytest.mark.parametrize("behind", ["", "relu", "relu, pool"])
@pytest.mark.parametrize(
    ("batch", "size", "layer"),
    [
        (64, (32, 32), (3, 32, 3, 1, 0)),  # pictures, then inputs, outputs, size, stride, padding
        (64, (30, 30), (32, 64, 3, 1, 0)),
        (64, (32, 32), (3, 64, 3, 1, 1)),
        (10, (28, 28), (1, 6, 5, 1, 0)),
        (3, (9, 13), (3, 70, 3, 2, 1)),
        (2, (5, 5), (4, 16, 4, 1, 1)),
    ],
)
def test_a_fused_convolution_agrees_with_float64(
    batch: int, size: tuple[int, int], layer: tuple[int, int, int, int, int], behind: str
) -> None:
    if not fused.available():
        pytest.skip("no Triton here")
    torch.manual_seed(7)
    plain, relu, pool = nn.Conv2d(*layer).cuda(), "relu" in behind, "pool" in behind
    plain.weight.data = plain.weight.data.to(memory_format=torch.channels_last)
    ours = FusedConv2d.of(plain, relu, pool)
    assert ours.thin == (layer[0] < 5)
    draws = torch.Generator("cuda").manual_seed(3)
    x = torch.randn((batch, layer[0], *size), device="cuda", generator=draws).to(memory_format=torch.channels_last)
    g = torch.randn(ours(x).shape, device="cuda", generator=draws).to(memory_format=torch.channels_last)
    parameters = [*ours.parameters()]
    twins = [p.detach().double().requires_grad_() for p in parameters]
    made = nn.functional.conv2d(x.double(), twins[0], twins[1], layer[3], layer[4])
    if relu:
        # Where rounding decides between a number and 0, or between two numbers, no gradient is the right one.
        g = g * _clear(made.detach(), pool)
    made = made.relu() if relu else made
    made = nn.functional.max_pool2d(made, 2) if pool else made
    exact = [made.detach(), *torch.autograd.grad(made, twins, g.double())]
    cudnn = torch.backends.cudnn
    before, cudnn.deterministic = (cudnn.allow_tf32, cudnn.deterministic), True
    try:
        # In tf32 a factor has 11 bits; where numbers are nearly equal or nearly 0, their maximum or ReLU is another's.
        for cudnn.allow_tf32, limit in [(False, 3e-6), (True, 3e-2 if behind else 1e-3)]:
            results = []
            for _ in range(2):
                found = ours(x)
                results.append([found.detach(), *torch.autograd.grad(found, parameters, g)])
            for a, b, c in zip(*results, exact, strict=True):
                assert torch.equal(a, b) and a.shape == c.shape
                assert float((a.double() - c).norm()) <= limit * float(c.norm())
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before


def _clear(made: torch.Tensor, pool: bool) -> torch.Tensor:
    """Which outputs of a ReLU, and a maximum behind it, are what they are by more than rounding."""
    margin = 1e-5
    if not pool:
        return made.abs() > margin
    squares = nn.functional.unfold(made.flatten(0, 1)[:, None], 2, stride=2)
    best, next_one = squares.topk(2, 1).values.unbind(1)
    clear = (best.abs() > margin) & ((best - next_one > margin) | (best < 0))
    return clear.view(*made.shape[:2], made.shape[2] // 2, made.shape[3] // 2)


def test_a_fused_network_has_the_parts_that_can_be_fused() -> None:
    if not fused.available():
        pytest.skip("no Triton here")
    network = create("pfl-cnn", classes=10).cuda()
    names_before, x = [*network.state_dict()], torch.rand(4, 3, 32, 32, device="cuda")
    x = x.contiguous(memory_format=torch.channels_last)
    expected = network.eval()(x).logits
    fused.fuse(network.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    parts = [(m.thin, m.relu, m.pool) for m in network.modules() if isinstance(m, FusedConv2d)]
    assert parts == [(True, True, False), (False, True, True)]
    assert [*network.state_dict()] == names_before
    torch.testing.assert_close(network(x).logits, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize("model", ["resnet20", "resnet18", "mobilenetv2", "senet18"])
def test_residual_blocks_that_join_are_the_same_blocks(model: str, unseen: bool) -> None:
    draws = torch.Generator("cuda").manual_seed(3)
    x = torch.rand(8, 3, 32, 32, device="cuda", generator=draws).contiguous(memory_format=torch.channels_last)
    found = []
    for fuses in (False, True):
        network = create(model, classes=10).cuda().double().train()
        blocks = residual_blocks(network)
        if fuses:
            fused.fuse(network.float().to(memory_format=torch.channels_last), unseen)  # type: ignore[call-overload]
            assert {block.joins for block in blocks} == {model != "senet18" and fused.available()}
            assert {block.twins for block in blocks} == {unseen and fused.available()}
        with torch.backends.cudnn.flags(allow_tf32=False):
            logits = network(x if fuses else x.double()).logits
            logits.square().mean().backward()
        with torch.no_grad():
            judged = network.eval()(x if fuses else x.double()).logits
        found.append([logits.detach(), judged, *(p.grad for p in network.parameters()), *network.buffers()])
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None
        # A number in millions that rounding puts on the other side of a ReLU is seen in a gradient.
        assert float((a - b).norm()) <= 3e-2 * max(float(a.norm()), 1e-3)


def test_whoever_may_look_between_blocks_finds_the_whole_gradient() -> None:
    """Of what a stage gives: it reaches the loss through the next block's branch and around it."""
    x = torch.rand(8, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    found = []
    for fuses in (False, True):
        network = create("resnet20", classes=10).cuda().train()
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if fuses:
            fused.fuse(network)
        with torch.backends.cudnn.flags(allow_tf32=False):
            made = network(x)
            found.append(torch.autograd.grad(made.logits.square().mean(), made.stages["stage1"])[0])
    assert float((found[0] - found[1]).norm()) <= 3e-2 * float(found[0].norm()) and found[0].norm() > 0
    theirs = nn.Sequential(create("resnet8", classes=10).cuda(), type("Theirs", (nn.Identity,), {})())
    fused.fuse(theirs, unseen=True)
    assert not any(block.twins for block in residual_blocks(theirs))


@pytest.mark.parametrize("size", [(28, 28), (20, 24), (1, 1), (45, 33)])
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_resized_as_float64_does(channels: int, size: tuple[int, int]) -> None:
    draws = torch.Generator("cuda").manual_seed(3)
    x = torch.rand(8, channels, 32, 32, device="cuda", generator=draws).contiguous(memory_format=torch.channels_last)
    found = resized(x, size)
    wanted = nn.functional.interpolate(x.double(), size, mode="bilinear", align_corners=True)
    assert found.is_contiguous(memory_format=torch.channels_last)
    # A place is known to some 32 * 6e-8.
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("whole", "part"),
    [
        ((64, 48, 3, 3), (56, 24, 3, 3)),
        ((64, 40, 1, 1), (48, 33, 1, 1)),
        ((512, 512, 3, 3), (416, 400, 3, 3)),
        ((10, 64), (10, 48)),
    ],
)
def test_a_part_of_a_weight_is_taken_and_gets_its_gradient(
    whole: tuple[int, ...], part: tuple[int, ...], dtype: torch.dtype
) -> None:
    if not fused.available():
        pytest.skip("no Triton here")
    draws = torch.Generator("cuda").manual_seed(3)
    place, gradient = (torch.randn(shape, device="cuda", generator=draws) for shape in (whole, part))
    place, gradient = rows_of(place), rows_of(gradient.to(dtype))
    wanted = place.clone()
    where = (slice(part[0]), slice(part[1]))
    wanted[where] += gradient
    half = place.to(dtype)
    assert torch.equal(taken(half[where]), half[where]) and in_rows(taken(half[where])) and taken(half) is half
    assert added(place[where], gradient)
    assert torch.equal(place, wanted)


@pytest.mark.parametrize("model", ["pfl-cnn", "resnet20"])
def test_a_fused_network_is_slimmed_like_a_plain_one(model: str) -> None:
    draws = torch.Generator("cuda").manual_seed(3)
    x = torch.rand(8, 3, 32, 32, device="cuda", generator=draws).contiguous(memory_format=torch.channels_last)
    found = []
    for fuses in (False, True):
        network = create(model, classes=10).cuda().train()
        for drop in dropouts(network):
            drop.p = 0.0
        if fuses:
            fused.fuse(network.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
        with torch.backends.cudnn.flags(allow_tf32=False):  # whose rounding would hide what differs
            logits = slim_forward(network, x, 0.5).logits
            logits.square().mean().backward()
        found.append([logits.detach(), *(p.grad for p in network.parameters()), *network.buffers()])
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None
        # A number in millions that rounding puts on the other side of a ReLU is seen in a gradient.
        assert float((a - b).norm()) <= 2e-3 * max(float(a.norm()), 1e-3)


def test_a_gpu_drops_the_same_entries_as_a_cpu() -> None:
    for key in (3, -(2**60)):
        here = hashed(torch.tensor(key), places(torch.empty(50, 300)))
        there = hashed(torch.tensor(key, device="cuda"), places(torch.empty(50, 300, device="cuda")))
        assert torch.equal(there.cpu(), here)
