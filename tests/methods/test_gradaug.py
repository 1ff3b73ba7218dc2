"""GradAug against networks that are cut, resized and differentiated by hand, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from isofed.draws import generator
from isofed.errors import UserError
from isofed.federation import Federation
from isofed.methods import Method, Run, Step, Visit
from isofed.methods.gradaug import GradAug
from isofed.models import Network, Output
from isofed.models.base import BatchNorm2d
from isofed.models.narrow import narrows
from isofed.models.slim import Cut, slim_forward
from tests.engine.plain import TOLERANCE, Named, Plain, distance, mean, small


def visit_of(steps: int, shape: tuple[int, int, int] = (1, 8, 8)) -> Visit:
    run = SimpleNamespace(shape=shape, device=torch.device("cpu"), ours=False)
    return cast(Visit, SimpleNamespace(steps=steps, run=run, network=None))


# The plan


@pytest.mark.parametrize(("n", "lower"), [(1, 0.8), (2, 0.8), (3, 0.25), (4, 1.0)])
def test_widths(n: int, lower: float) -> None:
    widths = GradAug(n=n, lower=lower).plan(visit_of(400), np.random.default_rng(0))["gradaug.width"]
    assert widths.shape == (400, n)
    assert (widths[:, -1] == lower).all()  # the narrowest is always there, and comes last
    assert (np.diff(widths, axis=1) <= 0).all()
    assert widths.min() == lower and widths.max() <= 1
    if n > 1 and lower < 1:
        others = widths[:, :-1].reshape(-1)
        assert others.min() > lower and len(np.unique(others)) == len(others)
        # Uniform: the mean of 400 (n - 1) draws, and the share in the upper half.
        assert others.mean() == pytest.approx((1 + lower) / 2, abs=0.05 * (1 - lower))
        assert (others > (1 + lower) / 2).mean() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("n", [1, 3])
def test_widths_that_are_all_drawn(n: int) -> None:
    widths = GradAug(n=n, lower=0.5, widths="drawn").plan(visit_of(400), np.random.default_rng(0))["gradaug.width"]
    assert widths.shape == (400, n) and (np.diff(widths, axis=1) <= 0).all()
    assert 0.5 < widths.min() < 0.51 and 0.99 < widths.max() < 1 and len(np.unique(widths)) == 400 * n
    assert widths.mean() == pytest.approx(0.75, abs=0.02)
    usual = GradAug(n=n, lower=0.5).plan(visit_of(400), np.random.default_rng(0))["gradaug.width"]
    assert (widths != usual).any(1).all()


@pytest.mark.parametrize(
    ("sizes", "shape", "sides"),
    [
        ("auto", (3, 32, 32), [(32, 32), (28, 28), (24, 24), (20, 20)]),
        ("auto", (3, 224, 224), [(224, 224), (192, 192), (160, 160), (128, 128)]),
        ("auto", (1, 8, 8), [(8, 8), (7, 7), (6, 6), (5, 5)]),
        ("auto", (1, 16, 24), [(16, 24), (14, 21), (12, 18), (10, 15)]),
        ("auto", (1, 1, 1), [(1, 1)]),
        ("none", (3, 32, 30), [(32, 30)]),
        ("32/28/24/20", (3, 32, 32), [(32, 32), (28, 28), (24, 24), (20, 20)]),
        ("6", (1, 8, 8), [(6, 6)]),
    ],
)
def test_sizes(sizes: str, shape: tuple[int, int, int], sides: list[tuple[int, int]]) -> None:
    method = GradAug(sizes=sizes)
    found = method.sides(shape)
    assert len(found) == (4 if sizes == "auto" else len(sides)) and set(found) == set(sides)
    drawn = method.plan(visit_of(300, shape), np.random.default_rng(0))["gradaug.size"]
    assert drawn.shape == (300, 2, 2)
    counts = np.unique(drawn.reshape(-1, 2), axis=0, return_counts=True)
    assert {(int(h), int(w)) for h, w in counts[0]} == set(sides)
    assert (np.abs(counts[1] / 600 - 1 / len(sides)) < 0.08).all()  # each as often as the others


def test_the_plan_is_its_generators() -> None:
    one, two, other = (GradAug().plan(visit_of(20), np.random.default_rng(s)) for s in (0, 0, 1))
    assert one.keys() == {"gradaug.width", "gradaug.size"}
    for key in one:
        assert (one[key] == two[key]).all() and (one[key] != other[key]).any()


def test_defaults_are_fedaligns() -> None:
    assert GradAug() == GradAug(n=2, lower=0.8, mu=1.75, sizes="auto", multiple=8)


# A step, by hand

Forward = Callable[[Named, Tensor, float, int], tuple[Tensor, Named]]


def rounded(full: int, width: float, multiple: int) -> int:
    if width == 1:
        return full
    wanted = full * width
    near = max(1, int((wanted + multiple / 2) // multiple) * multiple)
    return min(full, near + multiple if near < 0.9 * wanted else near)


def cnn(weights: Named, x: Tensor, width: float, multiple: int) -> tuple[Tensor, Named]:
    """Logits, and the mean and unbiased variance of what each batch norm sees."""
    seen: Named = {}
    for stage, (full, stride) in {"stage1": (16, 1), "stage2": (32, 2), "stage3": (64, 2)}.items():
        name, out = f"stages.{stage}", rounded(full, width, multiple)
        x = F.conv2d(x, weights[f"{name}.0.weight"][:out, : x.shape[1]], None, stride, 1)
        centre, biased = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        count = x.numel() / x.shape[1]
        seen |= {f"{name}.1.running_mean": centre, f"{name}.1.running_var": biased * count / (count - 1)}
        x = (x - centre.view(-1, 1, 1)) / (biased + 1e-5).sqrt().view(-1, 1, 1)
        gain, shift = (weights[f"{name}.1.{k}"][:out].view(-1, 1, 1) for k in ("weight", "bias"))
        x = (x * gain + shift).clamp(min=0)
    z = x.mean((2, 3))
    return z @ weights["head.weight"][:, : z.shape[1]].T + weights["head.bias"], seen


def mlp(weights: Named, x: Tensor, width: float, multiple: int) -> tuple[Tensor, Named]:
    z = x.reshape(len(x), -1)
    for name in ("stages.stage1.1", "stages.stage2.0"):
        out = rounded(64, width, multiple)
        z = (z @ weights[f"{name}.weight"][:out, : z.shape[1]].T + weights[f"{name}.bias"][:out]).clamp(min=0)
    return z @ weights["head.weight"][:, : z.shape[1]].T + weights["head.bias"], {}


def resized(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear, with the corners on the corners."""

    def matrix(many: int, few: int) -> Tensor:
        at = np.linspace(0, many - 1, few)
        return torch.from_numpy(np.maximum(0, 1 - np.abs(at[:, None] - np.arange(many)[None])))

    return torch.einsum("hy,wx,ncyx->nchw", matrix(x.shape[2], size[0]), matrix(x.shape[3], size[1]), x)


def objective(
    forward: Forward,
    weights: Named,
    x: Tensor,
    labels: Tensor,
    subs: list[tuple[float, tuple[int, int]]],
    method: GradAug,
) -> tuple[Tensor, float, Named]:
    """The whole loss, cross-entropy alone, and the statistics of the full-width pass."""
    logits, seen = forward(weights, x, 1.0, 1)
    logs = logits - logits.logsumexp(1, keepdim=True)
    entropy = -logs[torch.arange(len(labels)), labels].mean()
    total, teacher = entropy, logs.detach()
    for width, size in subs:
        slim, _ = forward(weights, resized(x, size), width, method.multiple)
        student = slim - slim.logsumexp(1, keepdim=True)
        total = total + method.mu * (teacher.exp() * (teacher - student)).sum() / len(labels)
    return total, float(entropy.detach()), seen


def by_hand(run: Federation, forward: Forward) -> tuple[Named, float]:
    """All rounds in float64, without momentum: the model, and the last round's cross-entropy over the clients."""
    plain, s = Plain(run), run.settings
    method = next(m for _, m in s.method.parts if isinstance(m, GradAug))
    server, names, said = plain.start(), plain.trained(), 0.0
    for round in range(1, s.rounds + 1):
        models, losses = [], []
        for client in range(len(plain.sizes)):
            batches = plain.batches(round, client)
            rng = generator(s.seed, "method/gradaug", round, client)
            plan = method.plan(visit_of(len(batches), run.world.dataset.shape), rng)
            weights, total = {k: v.clone() for k, v in server.items()}, 0.0
            for number, (inputs, labels) in enumerate(batches):
                subs = [
                    (float(w), (int(h), int(v)))
                    for w, (h, v) in zip(plan["gradaug.width"][number], plan["gradaug.size"][number], strict=True)
                ]
                leaves = {k: v.clone().requires_grad_(k in names) for k, v in weights.items()}
                loss, entropy, seen = objective(forward, leaves, inputs, labels, subs, method)
                gradients = torch.autograd.grad(loss, [leaves[n] for n in names])
                weights |= {n: weights[n] - s.lr * g for n, g in zip(names, gradients, strict=True)}
                weights |= {k: 0.9 * weights[k] + 0.1 * v.detach() for k, v in seen.items()}
                total += entropy * len(labels)
            models.append(weights)
            losses.append(total / sum(len(labels) for _, labels in batches))
        server = mean(models, [float(n) for n in plain.sizes])
        said = float(np.average(losses, weights=plain.sizes))
    return server, said


def take(way: str, patch: pytest.MonkeyPatch) -> None:
    """Let sub-networks be made in one of three ways; the last two are a GPU's, and work on a processor as well."""

    def narrowed(self: GradAug, run: Run, network: Network | None) -> bool:
        return way != "smaller layers" and network is not None and narrows(network)

    patch.setattr(GradAug, "_narrows", narrowed)
    patch.setattr(GradAug, "_has_kernels", lambda self, run: way == "one pass")


@pytest.fixture(params=["smaller layers", "zeros", "one pass"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    take(request.param, monkeypatch)
    return str(request.param)


@pytest.mark.parametrize(
    ("method", "forward", "settings"),
    [
        ("gradaug", cnn, {}),
        ("gradaug:n=3,lower=0.25,mu=0.5,multiple=1", cnn, {"local_epochs": 1}),
        ("gradaug:n=1,sizes=6/4", cnn, {}),
        ("gradaug:sizes=12", cnn, {"rounds": 1}),  # larger than the pictures
        ("gradaug:sizes=none", mlp, {}),
        ("gradaug:sizes=none,n=3,lower=0.3,multiple=1,mu=1", mlp, {}),
        ("gradaug:sizes=none,lower=1", mlp, {}),
    ],
)
def test_whole_federations(
    method: str, forward: Forward, settings: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "cnn" if forward is cnn else "mlp"
    run = small(method=method, model=model, **settings)
    if way != "smaller layers":  # and no other way
        monkeypatch.delattr(GradAug, "_slim")
    if way == "one pass" and forward is cnn and "sizes=12" not in method:  # which no sheet would have room for
        monkeypatch.delattr(GradAug, "_narrow")
    found = run.fit().weights
    wanted, said = by_hand(run, forward)
    assert distance(found, wanted) < 2 * TOLERANCE
    assert run.history[-1]["local_loss"] == pytest.approx(said, rel=1e-5)  # the full pass's alone


@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_without_strength_it_is_its_base_to_the_last_bit(model: str) -> None:
    sizes = "none" if model == "mlp" else "auto"
    runs = [small(method=m, model=model, momentum=0.9) for m in (f"gradaug:mu=0,sizes={sizes}", "fedavg")]
    runs.append(small(method=f"gradaug:sizes={sizes}", model=model, momentum=0.9))
    for run in runs:
        run.fit()
    off, plain, on = (run.state.weights for run in runs)
    assert off.numpy().tobytes() == plain.numpy().tobytes()
    assert runs[0].history[-1]["local_loss"] == runs[1].history[-1]["local_loss"]
    body = runs[0].layout.shared_trained
    assert float((on - plain)[body].norm() / plain[body].norm()) > 1e-3


def test_without_strength_no_sub_network_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[float] = []

    def noted(network: Network, inputs: Tensor, width: float, multiple: int, cuts: list[Cut]) -> Output:
        ran.append(width)
        return slim_forward(network, inputs, width, multiple, cuts)

    monkeypatch.setattr("isofed.methods.gradaug.slim_forward", noted)
    small(method="gradaug:mu=0", model="cnn", rounds=1).fit()
    assert ran == []
    run = small(method="gradaug:mu=0.1", model="cnn", rounds=1)
    run.fit()
    assert len(ran) == 2 * run.history[0]["steps"]


def test_a_sub_network_that_is_the_whole_one_teaches_nothing() -> None:
    whole, plain = small(method="gradaug:lower=1,sizes=none").fit(), small().fit()
    assert distance(whole.weights, plain.weights) < 1e-6
    assert distance(small(method="gradaug:lower=0.8,sizes=none").fit().weights, plain.weights) > 1e-3


@pytest.mark.usefixtures("way")
def test_running_statistics_are_the_full_pass_alone() -> None:
    # With one step in one round the statistics do not depend on any gradient.
    settings: dict[str, Any] = {"model": "cnn", "rounds": 1, "local_steps": 1, "local_epochs": None}
    one, two = small(method="gradaug:n=3", **settings).fit().weights, small(**settings).fit().weights
    statistics = [k for k in one if "running" in k]
    assert len(statistics) == 6
    for name in statistics:  # of a sum over three batches in one pass
        torch.testing.assert_close(one[name], two[name], rtol=1e-6, atol=1e-6)
    assert distance(one, two) > 1e-4


def test_the_draws_of_a_run_come_from_its_seed() -> None:
    one, two, other = (small(method="gradaug", model="cnn", rounds=1, seed=s).fit().weights for s in (0, 0, 1))
    assert distance(one, two) == 0 and distance(one, other) > 1e-3


PARTS = ["fedprox", "feduv", "fedalign", "mixup", "spherefed", "moon", "fedsam"]


@pytest.mark.parametrize("method", [*(f"{part}+gradaug" for part in PARTS), "gradaug+fedsam", "stochdepth+gradaug"])
def test_one_pass_is_the_same_in_compositions(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOFED_FUSED", "0")  # layers of our own would round differently in the two
    settings: dict[str, Any] = {"model": "cnn", "rounds": 2, "local_epochs": None, "local_steps": 3}
    if "stochdepth" in method:
        settings |= {"model": "resnet18", "rounds": 1, "local_steps": 1}
    found = []
    for way in ("smaller layers", "one pass"):
        take(way, monkeypatch)
        if way == "one pass" and method != "moon+gradaug":  # whose projection head has no batch norm at its end
            monkeypatch.delattr(GradAug, "_slim")
            monkeypatch.delattr(GradAug, "_narrow")
        run = small(method=method, **settings)
        run.fit()
        found.append((run.state.weights, run.history[-1]["local_loss"]))
    (one, said), (two, also) = found
    assert float((one - two).norm() / one.norm()) < (2e-4 if "stochdepth" in method else 2e-5)  # 17 convolutions, or 3
    assert said == pytest.approx(also, rel=1e-5)


@dataclass(frozen=True)
class FrozenNorms(Method):
    """The whole network is normalised by what is stored, which its sub-networks never are."""

    def begin(self, visit: Visit) -> None:
        for layer in visit.network.modules():
            if isinstance(layer, BatchNorm2d):
                layer.eval()


@dataclass(frozen=True)
class LogitsInPlace(Method):
    def loss(self, step: Step) -> Tensor:
        step.logits[:, 0] = 0.0
        return step.logits.square().mean()


@pytest.mark.parametrize("own", [FrozenNorms(), LogitsInPlace()])
def test_beside_somebodys_own_method_it_is_not_one_pass(own: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for way in ("smaller layers", "one pass"):
        take(way, monkeypatch)
        run = small(method=[own, GradAug()], model="cnn", rounds=1, local_epochs=None, local_steps=3)
        run.fit()
        found.append(run.state.weights)
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-6


# What is refused


@pytest.mark.parametrize("sizes", ["", "big", "8/", "8//6", "0/8", "-8", "8x8", "8/auto", "7.5"])
def test_sizes_that_are_none(sizes: str) -> None:
    with pytest.raises(UserError) as caught:
        small(method=GradAug(sizes=sizes), model="cnn")
    assert str(caught.value) == f"sizes of method 'gradaug' must be auto, none or like 32/28/24/20, not '{sizes}'"


def said_by(**settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        small(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pictures_too_small_for_the_network_are_refused(tmp_path: Path) -> None:
    said = said_by(method="gradaug:lower=1", model="mlp")
    assert said.startswith("this network does not run on pictures of 7x7, to which gradaug would resize them; use")
    assert "gradaug:sizes=none" in said
    (tmp_path / "net.py").write_text(
        "from torch import nn\nfrom isofed.models import Network\n"
        "def build(shape, classes):\n"
        "    stage = nn.Sequential(nn.Conv2d(shape[0], 8, 6), nn.ReLU())\n"
        "    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
        "    return Network({'one': stage}, pool, nn.Linear(8, classes), 8)\n"
    )
    model = f"{tmp_path}/net.py:build"
    assert "5x5" in said_by(method="gradaug", model=model)
    assert "4x4" in said_by(method="gradaug:sizes=8/4/6", model=model)
    assert small(method="gradaug:sizes=8/7/6", model=model, rounds=1).fit().rounds == 1


def test_the_mlp_on_smaller_pictures_is_refused() -> None:
    assert "gradaug:sizes=none" in said_by(method="gradaug", model="mlp")


def test_the_mlp_on_larger_pictures_is_refused() -> None:
    assert "gradaug:sizes=none" in said_by(method="gradaug:sizes=8/12", model="mlp")


def test_layers_that_cannot_be_slim_are_refused(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\nfrom isofed.models import Network\n"
        "def build(shape, classes):\n"
        "    stage = nn.Sequential(nn.Conv2d(shape[0], 8, 3), nn.PReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
        "    return Network({'one': stage}, nn.Identity(), nn.Linear(8, classes), 8)\n"
    )
    said = said_by(method="gradaug", model=f"{tmp_path}/net.py:build")
    assert said == "gradaug cannot run the layer 'stages.one.1' (PReLU) at a smaller width"


@pytest.mark.parametrize(
    "method", ["gradaug:n=0", "gradaug:lower=0", "gradaug:lower=1.1", "gradaug:mu=-1", "gradaug:multiple=0"]
)
def test_values_that_make_no_sense(method: str) -> None:
    assert "must be" in said_by(method=method, model="cnn")
