"""Large gradients are used where they were made: the same bits as from the vector of all, and where nobody looks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from isofed.engine import sgd
from isofed.engine.replica import Replica
from isofed.federation import Federation
from isofed.layout import Layout
from isofed.models import create, dense
from tests.engine.own_methods import HERE
from tests.engine.test_step import CPU, OPTIMISERS, federation, visit


def large(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    monkeypatch.setattr(sgd, "_LARGE", numbers)


def test_pieces_are_all_weights_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch, 1000)
    network = create("cnn", classes=4, shape=(1, 8, 8))
    trained = [e for e in Layout.of(network, {}).entries if e.trained]
    total = trained[-1].offset + trained[-1].size + 5  # and something behind the last
    vectors = [torch.arange(total) + start for start in (0, total, 2 * total)]
    made = sgd.pieces(trained, *vectors)
    for vector, name in zip(vectors, ("weights", "gradient", "momentum"), strict=True):
        rows = [getattr(piece, name) for piece in made]
        flat = [row.permute(0, 2, 3, 1).flatten() if row.dim() == 4 else row.flatten() for row in rows]
        assert torch.equal(torch.cat(flat), vector)
    alone = {piece.number: piece.weights.shape for piece in made if piece.number is not None}
    assert alone == {n: e.shape for n, e in enumerate(trained) if e.size >= 1000} and 1 < len(alone) < len(trained)
    assert len(sgd.pieces([], *vectors)) == 1


@pytest.mark.parametrize("method", ["fedavg", "feduv", "moon", "mixup+feddecorr"])
@pytest.mark.parametrize("optimiser", [k for k, v in OPTIMISERS.items() if "clip" not in v])
def test_a_visit_has_the_same_bits(optimiser: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    for numbers in (50, 10**9):
        large(monkeypatch, numbers)
        run = federation(model="cnn", method=method, **OPTIMISERS[optimiser])
        replica = Replica(run.world, CPU)
        visit(run, client=1, replica=replica)  # whatever it leaves
        models.append(visit(run, replica=replica).model)
        assert any(piece.number is not None for piece in replica.local._pieces) == (numbers == 50)
    one, other = models
    assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "fedprox"},
        {"method": "fedsam"},
        {"method": "scaffold"},
        {"method": "fedalign", "model": "cnn"},
        {"method": f"{HERE}:Count"},
        {"clip": 1.0},
    ],
)
def test_whoever_looks_at_the_gradient_finds_all_of_it(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    large(monkeypatch, 50)
    replica = Replica(federation(**({"model": "mlp"} | settings)).world, CPU)
    assert len(replica.local._pieces) == 1


@pytest.mark.skipif(not dense.goes_along(torch.zeros(4, 64)), reason="no AVX-512, no oneDNN or no C compiler")
@pytest.mark.parametrize(
    ("settings", "used"),
    [
        ({}, True),
        ({"method": "mixup"}, True),
        ({"momentum": 0.9}, False),
        ({"weight_decay": 0.01}, False),
        ({"clip": 1.0}, False),
        ({"method": "scaffold"}, False),
        ({"method": "fedprox"}, False),
    ],
)
def test_plain_sgd_goes_along_a_dense_layers_gradient_without_multiplying_it_out(
    settings: dict[str, Any], used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = "synthetic:samples=80,test=8,size=32,channels=3"
    run = federation(**({"data": data, "partition": "iid", "model": "pfl-cnn", "momentum": 0.0} | settings))
    seen: list[bool] = []

    def update(s: Any, pieces: list[sgd.Piece], *rest: Any) -> None:
        seen.append(any(piece.factors for piece in pieces))
        sgd.update(s, pieces, *rest)
        assert not any(piece.factors for piece in pieces)

    monkeypatch.setattr("isofed.engine.step.update", update)
    one = visit(run, replica=Replica(run.world, CPU)).model
    assert seen and set(seen) == {used}
    large(monkeypatch, 10**9)
    other = visit(run, replica=Replica(run.world, CPU)).model
    assert set(seen[len(seen) // 2 :]) == {False}
    assert one is not None and other is not None and (one - other).abs().max() < 1e-5


@pytest.mark.skipif(not dense.goes_along(torch.zeros(4, 64)), reason="no AVX-512, no oneDNN or no C compiler")
def test_what_else_depends_on_a_dense_layers_weight_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for factors in (True, False):
        run = federation(data="synthetic:samples=80,test=8,size=32,channels=3", model="pfl-cnn", momentum=0.0)
        local = Replica(run.world, CPU).local
        (pair,) = local._factored
        local._factored = [pair] if factors else []
        layer, piece = pair
        torch.manual_seed(0)
        local.set_batch(torch.randn(16, 3, 32, 32), torch.randint(4, (16,)))
        losses = local.method.losses
        own = lambda step: [*losses(step), layer.weight.square().sum()]  # noqa: B023, E731
        monkeypatch.setattr(local.method, "losses", own, raising=False)
        local.network.eval()  # without dropout
        local.pass_over(apart=True)
        assert not piece.factors and piece.found is not None and layer.factors is None
        found.append(piece.found)
    torch.testing.assert_close(*found)


def last_weights(model: str, monkeypatch: pytest.MonkeyPatch, fused: str) -> dict[str, torch.Tensor]:
    monkeypatch.setenv("ISOFED_FUSED", fused)
    data = "synthetic:samples=64,test=8,size=32,channels=3"
    short: dict[str, Any] = {"clients": 1, "rounds": 1, "local_steps": 2, "batch_size": 16, "momentum": 0.0}
    run = Federation(model=model, data=data, partition="iid", executor="serial", **short)
    run.fit()
    return run.layout.views(run.state.weights)


@pytest.mark.parametrize(
    "dense",
    [
        "weight_norm(nn.Linear(3072, 512))",
        "spectral_norm(nn.Linear(3072, 512))",
        "prune.l1_unstructured(nn.Linear(3072, 512), 'weight', 0.5)",
        "with_another(nn.Linear(3072, 512))",
        "hooked(nn.Linear(3072, 512))",
        "asked(nn.Sequential(nn.Linear(3072, 512)))",
        "nn.Sequential(nn.Linear(3072, 3072), nn.LayerNorm(3072), overwritten(nn.Sequential(nn.Linear(3072, 512))))",
        "replaced(nn.Sequential(nn.Linear(3072, 512)))",
    ],
)
def test_a_weight_that_is_not_multiplied_with_as_it_is(
    dense: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained is what a tensor is made of, or a gradient that a hook has changed: never the product's own.

    Nor is it if somebody asks for the gradient on the way, or writes over what the layer was given.
    """
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import autograd, is_grad_enabled, nn, no_grad, zeros\n"
        "from torch.nn.functional import linear\n"
        "from torch.nn.utils import prune, spectral_norm, weight_norm\n"
        "from isofed.models import adapt\n"
        "def with_another(layer):\n"
        "    layer.extra = nn.Parameter(zeros(512, 3072))\n"
        "    return layer\n"
        "def hooked(layer):\n"
        "    layer.weight.register_hook(lambda g: g * 0)\n"
        "    return layer\n"
        "def asked(layers):\n"
        "    def hook(module, given, made):\n"
        "        if not is_grad_enabled():\n"
        "            return made\n"
        "        g, = autograd.grad(made.square().mean(), module[0].weight, retain_graph=True, allow_unused=True)\n"
        "        return made if g is None else made + linear(given[0], -g.detach())\n"
        "    layers.register_forward_hook(hook)\n"
        "    return layers\n"
        "def overwritten(layers):\n"
        "    def hook(module, given, made):\n"
        "        if given[0].requires_grad:\n"
        "            given[0].register_hook(lambda g: given[0].data.zero_() * 0 + g)\n"
        "    layers.register_forward_hook(hook)\n"
        "    return layers\n"
        "def replaced(layers):\n"
        "    own = layers.forward\n"
        "    def forward(x):\n"
        "        made = own(x)\n"
        "        return made + autograd.grad(made.sum(), layers[0].weight, retain_graph=True)[0].sum() \\\n"
        "            if is_grad_enabled() else made\n"
        "    layers.forward = forward\n"
        "    return layers\n"
        "def build(shape, classes):\n"
        f"    return adapt(nn.Sequential(nn.Flatten(), {dense}, nn.ReLU(), nn.Linear(512, classes)), '3')\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch, which has newer ways for some of these
        found, wanted = (last_weights(f"{file}:build", monkeypatch, fused) for fused in "10")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.skipif(not dense.goes_along(torch.zeros(4, 64)), reason="no AVX-512, no oneDNN or no C compiler")
def test_a_hook_that_comes_later_gets_its_gradient() -> None:
    run = federation(data="synthetic:samples=80,test=8,size=32,channels=3", model="pfl-cnn", momentum=0.0)
    local = Replica(run.world, CPU).local
    ((layer, piece),) = local._factored
    seen: list[torch.Size] = []
    layer.weight.register_hook(lambda g: seen.append(g.shape))
    local.set_batch(torch.randn(16, 3, 32, 32), torch.randint(4, (16,)))
    local.pass_over(apart=True)
    assert seen == [layer.weight.shape] and not piece.factors and piece.found is not None
