"""On a GPU: every loss can be captured in a CUDA graph, and a replay gives the value and gradient of new inputs."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from isofed.functional import (
    classifier_variance,
    decorrelation,
    decov,
    hyperspherical_energy,
    model_contrast,
    spectral_norm,
    sphere_mse,
    stage_norm,
    structured_decov,
    transmitting_matrix,
    uniformity,
)
from isofed.functional.lipschitz import two_stage_norms
from tests.functional.tools import Loss, features, value_and_gradient

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
COUNT, WIDTH = 16, 32


def contrast(z: Tensor) -> Tensor:
    return model_contrast(z, z.detach() + 1, z.detach().flip(0))


def on_the_sphere(z: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, 5 * z.shape[1], device=z.device).view(5, -1).to(z).sin()
    return sphere_mse(z, weight, torch.arange(len(z), device=z.device) % 5)


def stretch(z: Tensor) -> Tensor:
    return spectral_norm(transmitting_matrix(z.reshape(2, 8, 8, 4), z.reshape(2, 16, 4, 4))).sum()


LOSSES: dict[str, Loss] = {
    "uniformity": uniformity,
    "uniformity, paper": partial(uniformity, form="paper"),
    "uniformity, detached": partial(uniformity, detach=True),
    "energy": hyperspherical_energy,
    "energy, diagonal": partial(hyperspherical_energy, diagonal=True),
    "variance": classifier_variance,
    "variance, squared": partial(classifier_variance, statistic="var", target=0.3, hinge="squared"),
    "decorrelation": decorrelation,
    "decorrelation, paper": partial(decorrelation, form="paper"),
    "decov": decov,
    "decov in groups": structured_decov,
    "contrast": contrast,
    "sphere": on_the_sphere,
    "stretch": stretch,
    "norm of a stage": lambda z: stage_norm(z.reshape(2, 8, 8, 4), z.reshape(2, 16, 4, 4)).sum(),
}


def batch(seed: int) -> Tensor:
    """Non-negative features, some of them twice, in float32 on the GPU."""
    z = features(COUNT, WIDTH, seed).relu()
    z[:3] = z[3:6]
    return z.float().cuda()


def assert_replays(loss: Loss) -> None:
    z = batch(0).requires_grad_()
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            torch.autograd.grad(loss(z), z)
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(z)
        (gradient,) = torch.autograd.grad(value, z)
    for seed in (1, 2):
        with torch.no_grad():
            z.copy_(batch(seed))
        graph.replay()
        torch.cuda.synchronize()
        wanted, exact = value_and_gradient(loss, batch(seed).cpu().double())
        torch.testing.assert_close(value.detach().cpu().double(), wanted, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradient.cpu().double(), exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


@pytest.mark.parametrize("name", LOSSES)
def test_a_captured_loss_replays(name: str) -> None:
    assert_replays(LOSSES[name])


def test_a_captured_loss_with_a_fixed_sigma_replays() -> None:
    assert_replays(partial(uniformity, sigma=20.0))


@pytest.mark.parametrize("name", LOSSES)
def test_matrix_products_in_tf32_do_not_reach_distances(name: str) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        value, gradient = value_and_gradient(LOSSES[name], batch(0))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    wanted, right = value_and_gradient(LOSSES[name], batch(0).cpu().double())
    # TF32 has ten bits behind the point: 5e-4 of each factor. Distances and cosines are float64 throughout.
    tolerance = 1e-5 if name.startswith(("uniformity", "energy", "variance", "contrast")) else 5e-3
    torch.testing.assert_close(value.cpu().double(), wanted, rtol=tolerance, atol=1e-6)
    assert (gradient.cpu().double() - right).norm() <= 10 * tolerance * right.norm() + 1e-9


@pytest.mark.parametrize("size", [3.0, 1e8, 1e-15])  # of the numbers
@pytest.mark.parametrize("channels", [80, 32, 3])  # more than places, and fewer
@pytest.mark.parametrize(("places", "iterations"), [((4, 4), 10), ((8, 8), 10), ((1, 1), 2), ((3, 5), 3), ((2, 2), 7)])
def test_the_norm_of_a_stage_agrees_with_float64(
    channels: int, places: tuple[int, int], iterations: int, size: float
) -> None:
    draws = torch.Generator("cuda").manual_seed(7)
    a = torch.randn((6, channels, *places), device="cuda", generator=draws).relu() * size
    b = torch.randn((6, 24, *places), device="cuda", generator=draws).relu()
    b[1], a[2] = 0, 0  # has no gradient
    found = [m.detach().requires_grad_() for m in (a, b)]
    exact = [m.double().cpu().requires_grad_() for m in (a, b)]
    ours = stage_norm(found[0], found[1], iterations)
    theirs = stage_norm(exact[0], exact[1], iterations)
    weights = torch.linspace(-1, 2, 6, dtype=torch.float64)
    (ours * weights.to(ours)).sum().backward()
    (theirs * weights).sum().backward()
    torch.testing.assert_close(ours.detach().cpu().double(), theirs.detach(), rtol=1e-5, atol=1e-9 * size)
    for one, two in zip(found, exact, strict=True):
        assert one.grad is not None and two.grad is not None and one.grad.isfinite().all()
        assert float((one.grad.cpu().double() - two.grad).norm()) <= 2e-5 * float(two.grad.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(((8, 8), (4, 4)), ((4, 4), (8, 8)), ((6, 2), (3, 4)), ((16, 16), (8, 8))),
        *(((5, 7), (3, 2)), ((12, 12), (9, 12)), ((32, 32), (4, 4))),  # places that do not divide, and large windows
    ],
)
def test_the_norm_of_a_stage_averages_as_float64_does(
    before: tuple[int, int], after: tuple[int, int], dtype: torch.dtype
) -> None:
    """Maps of several sizes, some of whose places do not divide, and of one of them a part of its channels."""
    draws = torch.Generator("cuda").manual_seed(8)
    whole = torch.rand((5, 40, *before), device="cuda", generator=draws).to(dtype, memory_format=torch.channels_last)
    b = torch.rand((5, 24, *after), device="cuda", generator=draws).to(dtype, memory_format=torch.channels_last)
    assert stage_norm(whole, b[:1]).isfinite().all() and not stage_norm(whole * math.nan, b).isfinite().any()
    for a in (whole, whole[:, :12]):
        found, exact = b.detach().requires_grad_(), b.double().cpu().requires_grad_()
        ours, theirs = stage_norm(a, found), stage_norm(a.double().cpu(), exact)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.detach().cpu().double(), theirs.detach(), rtol=1e-5, atol=0)
        (gradient,), (wanted,) = torch.autograd.grad(ours.sum(), found), torch.autograd.grad(theirs.sum(), exact)
        # A number of bf16 has 8 bits.
        limit = 2e-5 if dtype == torch.float32 else 4e-3
        assert float((gradient.cpu().double() - wanted).norm()) <= limit * float(wanted.norm())


@pytest.mark.parametrize("channels", [40, 3])  # more than places, and fewer
def test_the_norm_of_a_stage_can_be_differentiated_twice(channels: int) -> None:
    draws = torch.Generator().manual_seed(10)
    maps = [torch.rand((3, n, 4, 4), dtype=torch.float64, generator=draws) for n in (channels, 6)]
    found = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        a, b = (m.to(device, dtype).requires_grad_() for m in maps)
        slopes = torch.autograd.grad(stage_norm(a, b).square().sum(), (a, b), create_graph=True)
        again = torch.autograd.grad(sum((s.square().sum() for s in slopes), a.sum()), (a, b))
        two = two_stage_norms((a.detach(), b.detach()), (a, b))[1]
        (slope,) = torch.autograd.grad(two.square().sum(), b, create_graph=True)
        again += torch.autograd.grad(slope.square().sum(), (a, b))
        found.append([x.cpu().double() for x in again])
    for ours, exact in zip(*found, strict=True):
        assert float((ours - exact).norm()) <= 1e-3 * float(exact.norm())


@pytest.mark.parametrize("after", [(4, 4), (8, 8), (3, 4)])  # the last of which does not divide
def test_two_norms_are_those_of_each(after: tuple[int, int]) -> None:
    draws = torch.Generator("cuda").manual_seed(9)
    a, c = (torch.rand((5, n, 8, 8), device="cuda", generator=draws) for n in (40, 8))
    b, d = (torch.rand((5, n, *after), device="cuda", generator=draws).requires_grad_(n == 16) for n in (64, 16))
    teacher, student = two_stage_norms((a, b), (c, d))
    assert not teacher.requires_grad and torch.equal(teacher, stage_norm(a, b))
    alone = stage_norm(c, d)
    assert torch.equal(student, alone)
    weights = torch.linspace(-1, 2, 5, device="cuda")
    found, wanted = (torch.autograd.grad((s * weights).sum(), d)[0] for s in (student, alone))
    assert torch.equal(found, wanted)
    exact = stage_norm(a.double().cpu(), b.double().cpu())
    torch.testing.assert_close(teacher.cpu().double(), exact, rtol=1e-5, atol=0)


FUSED: dict[str, Loss] = {
    "uniformity": uniformity,
    "uniformity, paper": partial(uniformity, form="paper", detach=True),
    "uniformity, sigma": partial(uniformity, sigma=30.0),
    "energy": hyperspherical_energy,
    "energy, diagonal": partial(hyperspherical_energy, diagonal=True, eps=0.3),
    "decorrelation": decorrelation,
    "decorrelation, paper": partial(decorrelation, form="paper"),
    "sphere": on_the_sphere,
    "contrast": contrast,
    "deviation": lambda z: classifier_variance(z[:, :10], "std"),
    "variance, squared": lambda z: classifier_variance(z[:, :100], "var", hinge="squared"),
    "deviation, none": lambda z: classifier_variance(z[:, :10], "std", hinge="none"),
    "weighted": lambda z: (
        uniformity(z, weight=0.7)
        + hyperspherical_energy(z, weight=2.5)
        + decorrelation(z, weight=0.1)
        + classifier_variance(z[:, :10], weight=25.0)
    ),
}


@pytest.mark.parametrize("count", [2, 10, 64, 128])
@pytest.mark.parametrize("name", FUSED)
def test_a_loss_in_few_kernels_agrees_with_float64(name: str, count: int) -> None:
    loss = FUSED[name]
    z = torch.randn((count, 256), generator=torch.Generator().manual_seed(count)) * 1.5 + 0.5
    if count > 4:
        z[3], z[4] = z[1], 0
    here, exact = z.cuda().requires_grad_(), z.double().requires_grad_()
    value, wanted = loss(here), loss(exact)
    assert float(value.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5, abs=1e-7)
    (ours,) = torch.autograd.grad(3 * value, here, create_graph=count == 10)  # by the kernel, or to be differentiated
    (theirs,) = torch.autograd.grad(3 * wanted, exact)
    # Two standardised samples are the same two numbers whatever they were: what is left of their gradient is rounding.
    assert float((ours.detach().cpu().double() - theirs).norm()) <= 2e-5 * max(float(theirs.norm()), 2e-2)


@pytest.mark.parametrize("name", FUSED)
def test_a_loss_in_few_kernels_may_be_changed_in_place(name: str) -> None:
    z = torch.randn((10, 256), generator=torch.Generator().manual_seed(1)).cuda().requires_grad_()
    plain, changed = FUSED[name](z), FUSED[name](z)
    changed *= 3
    changed += 1
    assert torch.equal(*(torch.autograd.grad(value, z)[0] for value in (changed, 3 * plain + 1)))
