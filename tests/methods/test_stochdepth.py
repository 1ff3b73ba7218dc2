"""StochDepth against a ResNet-20 written out, with gates drawn by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

from isofed.draws import generator
from isofed.errors import UserError
from isofed.federation import Federation
from isofed.methods import Visit, parse
from isofed.methods.stochdepth import StochDepth
from isofed.models import create, load
from isofed.models.residual import residual_blocks
from tests.engine.plain import TOLERANCE, Named, Plain, distance, mean, small, vector

BLOCKS = 9  # of resnet20


def tiny(**settings: Any) -> Federation:
    """A ResNet-20 takes its time: small pictures, few clients, few steps."""
    usual: dict[str, Any] = {
        "data": "synthetic:samples=40,test=12,classes=3",
        "partition": "quantity:3,min=8",
        "model": "resnet20",
        "clients": 2,
        "rounds": 1,
        "local_epochs": 1,
        "batch_size": 8,
        "method": "stochdepth:keep=0.5",
        "train_loss": False,
    }
    return small(**(usual | settings))


# How likely a block is to be there


def test_the_codes_schedule() -> None:
    nine = StochDepth().chances(9)
    assert nine == pytest.approx([1, 0.9875, 0.975, 0.9625, 0.95, 0.9375, 0.925, 0.9125, 0.9])
    eighteen = StochDepth(keep=0.9).chances(18)
    assert eighteen[0] == 1 and eighteen[-1] == pytest.approx(0.9)
    assert np.diff(eighteen) == pytest.approx(-0.1 / 17)
    assert StochDepth(keep=0.5).chances(3) == pytest.approx([1, 0.75, 0.5])
    assert StochDepth(keep=0.5).chances(1) == [1]


def test_the_papers_schedule() -> None:
    paper = StochDepth(schedule="paper")
    assert paper.chances(9) == pytest.approx([1 - block / 90 for block in range(1, 10)])
    assert paper.chances(18)[0] == pytest.approx(1 - 0.1 / 18) and paper.chances(18)[-1] == pytest.approx(0.9)
    assert StochDepth(keep=0.2, schedule="paper").chances(4) == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert StochDepth(keep=0.2, schedule="paper").chances(1) == pytest.approx([0.2])


def test_defaults() -> None:
    assert StochDepth() == StochDepth(keep=0.9, schedule="code")


@pytest.mark.parametrize(("model", "blocks"), [("resnet20", 9), ("resnet56", 18)])
@pytest.mark.parametrize("schedule", ["code", "paper"])
def test_blocks_know_their_chances(model: str, blocks: int, schedule: str) -> None:
    network = create(model, classes=3, shape=(1, 8, 8))
    parse(f"stochdepth:keep=0.7,schedule={schedule}").build(network, 3, np.random.default_rng(0))
    found = [block.keep for block in residual_blocks(network)]
    step, first = (0.3 / (blocks - 1), 1.0) if schedule == "code" else (0.3 / blocks, 1 - 0.3 / blocks)
    assert found == pytest.approx([first - step * b for b in range(blocks)])
    assert found[-1] == pytest.approx(0.7)


# Which blocks are there


def planned(method: StochDepth, steps: int, seed: int = 0, model: str = "resnet20") -> np.ndarray:
    network = create(model, classes=3, shape=(1, 8, 8))
    visit = cast(Visit, SimpleNamespace(steps=steps, network=network))
    return method.plan(visit, np.random.default_rng(seed))["stochdepth.gates"]


def test_gates_are_open_as_often_as_they_should_be() -> None:
    gates = planned(StochDepth(keep=0.3), 4000)
    assert gates.shape == (4000, BLOCKS) and gates.dtype == np.float32
    assert set(np.unique(gates)) == {0, 1}
    assert (gates[:, 0] == 1).all()
    wanted = 1 - 0.7 * np.arange(BLOCKS) / 8
    assert np.abs(gates.mean(0) - wanted).max() < 0.03  # four standard errors of 4000 draws
    together = np.corrcoef(gates[:, 1:].T) - np.eye(BLOCKS - 1)
    assert np.abs(together).max() < 0.08  # each for itself


def test_gates_are_their_generators() -> None:
    one, two, other = (planned(StochDepth(keep=0.5), 30, seed) for seed in (0, 0, 1))
    assert (one == two).all() and (one != other).any()
    assert planned(StochDepth(keep=0.5), 3, model="resnet56").shape == (3, 18)


def test_a_plan_opens_what_the_last_visit_has_left() -> None:
    network = create("resnet20", classes=3, shape=(1, 8, 8))
    for block in residual_blocks(network):
        block.gate = torch.tensor(0.0)
    StochDepth().plan(cast(Visit, SimpleNamespace(steps=2, network=network)), np.random.default_rng(0))
    assert [block.gate for block in residual_blocks(network)] == [None] * BLOCKS


# Training and evaluation, by hand


def resnet20(weights: Named, x: Tensor, factors: list[float], training: bool) -> tuple[Tensor, Named]:
    """Logits of a network whose branches are multiplied, and the mean and unbiased variance that batch norms see."""
    seen: Named = {}

    def convolved(x: Tensor, name: str, number: int, stride: int = 1) -> Tensor:
        x = F.conv2d(x, weights[f"{name}.{number}.weight"], None, stride, 1)
        norm = f"{name}.{number + 1}"
        centre, biased = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        count = x.numel() / x.shape[1]
        seen[f"{norm}.running_mean"], seen[f"{norm}.running_var"] = centre, biased * count / (count - 1)
        if not training:
            centre, biased = weights[f"{norm}.running_mean"], weights[f"{norm}.running_var"]
        x = (x - centre.view(-1, 1, 1)) / (biased + 1e-5).sqrt().view(-1, 1, 1)
        return x * weights[f"{norm}.weight"].view(-1, 1, 1) + weights[f"{norm}.bias"].view(-1, 1, 1)

    x = convolved(x, "stages.stem", 0).relu()
    for number, factor in enumerate(factors):
        stage, block = divmod(number, 3)
        name, stride = f"stages.stage{stage + 1}.{block}.branch", 2 if stage and not block else 1
        inside = convolved(convolved(x, name, 0, stride).relu(), name, 3)
        if stride == 2:
            more = inside.shape[1] // 4
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, more, more))
        x = (x + factor * inside).relu()
        if training and factor == 0:
            for key in [k for k in seen if k.startswith(name)]:
                del seen[key]
    return x.mean((2, 3)) @ weights["head.weight"].T + weights["head.bias"], seen


def gates_of(run: Federation, round: int, client: int, steps: int, keep: list[float]) -> np.ndarray:
    rng = generator(run.settings.seed, "method/stochdepth", round, client)
    return (rng.random((steps, BLOCKS)) < np.array(keep)).astype(float)


def by_hand(run: Federation, keep: list[float]) -> tuple[Named, int]:
    """All rounds in float64, and how many branches were shut."""
    plain, s, shut = Plain(run), run.settings, 0
    server, names = plain.start(), plain.trained()
    for round in range(1, s.rounds + 1):
        models = []
        for client in range(len(plain.sizes)):
            batches, weights = plain.batches(round, client), dict(server)
            gates = gates_of(run, round, client, len(batches), keep)
            for row, (inputs, labels) in zip(gates.tolist(), batches, strict=True):
                leaves = {k: v.clone().requires_grad_(k in names) for k, v in weights.items()}
                logits, seen = resnet20(leaves, inputs, row, training=True)
                gradients = torch.autograd.grad(cross_entropy(logits, labels), [leaves[n] for n in names])
                weights |= {n: weights[n] - s.lr * g for n, g in zip(names, gradients, strict=True)}
                weights |= {k: 0.9 * weights[k] + 0.1 * v.detach() for k, v in seen.items()}
                shut += row.count(0)
            models.append(weights)
        server = mean(models, [float(n) for n in plain.sizes])
    return server, shut


CODE = [1 - 0.5 * b / 8 for b in range(9)]
PAPER = [1 - 0.5 * b / 9 for b in range(1, 10)]


@pytest.mark.parametrize(("schedule", "keep", "rounds"), [("code", CODE, 1), ("paper", PAPER, 2)])
def test_a_federation_written_out(schedule: str, keep: list[float], rounds: int) -> None:
    run = tiny(method=f"stochdepth:keep=0.5,schedule={schedule}", rounds=rounds)
    result = run.fit()
    wanted, shut = by_hand(run, keep)
    assert shut > 5
    # Nineteen batch norms over few pixels: rounding errors are amplified more than in the tolerance's small networks.
    assert distance(result.weights, wanted) < 2 * TOLERANCE
    inputs, labels = Plain(run).part("test")
    logits, _ = resnet20(wanted, inputs, keep, training=False)
    assert result.loss == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-3)
    open_, _ = resnet20(wanted, inputs, [1.0] * 9, training=False)
    assert result.loss != pytest.approx(float(cross_entropy(open_, labels)), rel=1e-2)


def test_keeping_all_is_fedavg_to_the_last_bit() -> None:
    off, plain = tiny(method="stochdepth:keep=1"), tiny(method="fedavg")
    one, two = off.fit(), plain.fit()
    assert off.state.weights.numpy().tobytes() == plain.state.weights.numpy().tobytes()
    assert (one.accuracy, one.loss) == (two.accuracy, two.loss)
    assert distance(tiny().fit().weights, two.weights) > 1e-3


def test_a_run_is_made_from_its_seed() -> None:
    one, two = tiny().fit(), tiny().fit()
    assert all(torch.equal(v, two.weights[k]) for k, v in one.weights.items())


@pytest.mark.parametrize("method", ["stochdepth:keep=0.5+scaffold:option=1", "scaffold:option=1+stochdepth:keep=0.5"])
def test_full_gradients_are_those_of_the_network_on_average(method: str) -> None:
    # The extra pass has no gates: each branch counts with its chance, whatever the client before has left.
    run = tiny(method=method)
    run.fit()
    plain, start = Plain(run), Plain(run).start()
    names = plain.trained()
    inputs, labels = plain.part("train")
    for client, places in enumerate(run.world.clients):
        total = {n: torch.zeros_like(start[n]) for n in names}
        for index in torch.from_numpy(places).split(8):
            if len(index) == 1:
                continue
            leaves = {k: v.clone().requires_grad_(k in names) for k, v in start.items()}
            logits, _ = resnet20(leaves, inputs[index], CODE, training=True)
            found = torch.autograd.grad(cross_entropy(logits, labels[index]), [leaves[n] for n in names])
            total = {n: total[n] + len(index) * g for n, g in zip(names, found, strict=True)}
        count = len(places) - (len(places) % 8 == 1)
        wanted = {n: t / count for n, t in total.items()}
        assert distance(vector(run, run.state.clients[client]["scaffold.ck"]), wanted) < 5 * TOLERANCE, client
    # In the first round all variates are zero: the extra pass leaves no trace.
    assert distance(run.layout.views(run.state.weights), by_hand(run, CODE)[0]) < 2 * TOLERANCE


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_networks_without_residual_blocks_are_refused(model: str) -> None:
    with pytest.raises(UserError) as caught:
        small(method="stochdepth", model=model)
    assert str(caught.value) == (
        "'stochdepth' drops residual blocks, and this network has none; use a ResNet, like resnet20, or build the "
        "blocks of your own with isofed.models.residual.Residual"
    )


@pytest.mark.parametrize("method", ["stochdepth:keep=0", "stochdepth:keep=1.1", "stochdepth:schedule=linear"])
def test_values_that_make_no_sense(method: str) -> None:
    with pytest.raises(UserError, match="must be"):
        parse(method)


def test_a_stored_model_predicts_as_it_was_judged(tmp_path: Any) -> None:
    run = tiny(out=tmp_path / "run")
    result = run.fit()
    inputs, labels = Plain(run, torch.float32).part("test")
    with torch.no_grad():
        logits = load(tmp_path / "run").eval()(inputs).logits
    assert float(cross_entropy(logits, labels)) == pytest.approx(result.loss or 0, rel=1e-4)
