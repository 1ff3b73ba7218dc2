"""What methods cost, against the papers' own figures and against counting by hand."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from isofed.data import Dataset
from isofed.data.base import Part
from isofed.diagnostics.cost import Cost, cost, pass_macs
from isofed.methods import names
from isofed.models import create


@functools.cache
def plain() -> Cost:
    return cost("fedavg")


# A pass, the state and what is sent, in the units of A23 of the papers: models held, passes, state, server's state.
PUBLISHED = {
    **dict.fromkeys(("fedavg", "mixup", "feduv", "univarfl", "feddecorr", "decov", "stochdepth"), (1, 1, 0, 0)),
    "fedprox": (2, 1, 0, 0),
    "moon": (3, 3, 1, 0),
    "freeze": (1, 1, 0, 0),
    "spherefed": (1, 1, 0, 0),
    "fedalign": (1, 1, 0, 0),
    "gradaug": (1, 3, 0, 0),
    "gradaug:n=4": (1, 5, 0, 0),
    "fedavgm": (1, 1, 0, 1),
    "fedadam": (1, 1, 0, 2),
    "fednova": (1, 1, 0, 0),
    "scaffold": (3, 1, 1, 1),
    "feddyn": (3, 1, 1, 2),  # and the mean of the clients' models, which is what is judged
    "fedsam": (1, 2, 0, 0),
}


@pytest.mark.parametrize("method", PUBLISHED)
def test_models_passes_and_states_are_those_of_the_papers(method: str) -> None:
    found = cost(method)
    assert (round(found.models), found.passes) == PUBLISHED[method][:2]
    assert round(found.client_state / found.parameters) == PUBLISHED[method][2]
    assert round(found.server_state / found.parameters) == PUBLISHED[method][3]
    assert found.passes_per_round == 0


def test_option_1_of_scaffold_passes_over_the_data_once_more() -> None:
    assert cost("scaffold:option=1").passes_per_round == 1


@pytest.mark.parametrize("method", [n for n in names() if n not in ("fedavg", "central")])
def test_traffic_is_the_model_but_for_what_the_method_says(method: str) -> None:
    base, found = plain(), cost(method)
    head = 64 * 10 + 10
    batch_norm = sum(b.numel() for b in create("resnet8", classes=10).buffers())
    expected = {
        "scaffold": (found.parameters, found.parameters),
        "fednova": (1, 0),
        "fedexp": (1, 0),
        "fedbn": (-2 * batch_norm, -2 * batch_norm),  # as many weights and biases as running statistics
        **dict.fromkeys(("freeze", "fedbabu", "spherefed"), (-head, -head)),
        # Counted with group norm: they refuse running statistics.
        **dict.fromkeys(("clip_update", "gaussian"), (-batch_norm, -batch_norm)),
    }
    projection = 64 * 64 + 64 + 64 * 256 + 256 + (256 - 64) * 10
    up, down = expected.get(method, (projection, projection) if method == "moon" else (0, 0))
    assert (found.up - base.up, found.down - base.down) == (up, down)
    assert found.down_once == {"freeze": head, "fedbabu": head, "spherefed": 640}.get(method, 0)
    sums = {"ffc": 64 * 64 + 64 * 10, "ccvr": 10 * (1 + 64 + 64 * 64), "fedbabu": 3, "oracle_head": 8 * (64 + 1)}
    assert found.up_finally == (sums | {"spherefed": sums["ffc"]}).get(method, 0)
    assert (found.down_finally > 0) == (found.up_finally > 0)


def test_a_central_model_sends_nothing() -> None:
    assert (cost("central").up, cost("central").down) == (0, 0)


# --- FedAlign, Table 5: ResNet-56 on CIFAR-100; parameters without those of batch norm


@pytest.fixture(scope="module")
def table_5() -> dict[str, Cost]:
    pictures = "synthetic:samples=100,test=100,classes=100,channels=3,size=32"
    methods = ("fedavg", "fedprox", "moon", "fedalign", "mixup")
    return {m: cost(m, model="resnet56", data=pictures) for m in methods}


def weights(projection: int = 0) -> int:
    network = create("resnet56", classes=100)
    counted = [m for m in network.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    return sum(p.numel() for m in counted for p in m.parameters()) + projection


def test_fedalign_table_5(table_5: dict[str, Cost]) -> None:
    assert weights() == 605_460
    macs = {name: c.macs / 1e6 for name, c in table_5.items()}
    assert macs["fedavg"] == pytest.approx(87.24, abs=0.005)
    assert macs["mixup"] == macs["fedprox"] == macs["fedavg"]
    assert macs["moon"] == pytest.approx(262.1, abs=0.05)
    assert macs["fedalign"] == pytest.approx(89.1, abs=0.05)
    stored = {name: round(c.models) * weights() / 1e6 for name, c in table_5.items()}
    assert stored["fedavg"] == stored["fedalign"] == pytest.approx(0.61, abs=0.005)
    assert stored["fedprox"] == pytest.approx(1.21, abs=0.005)
    head = 256 * 256 + 256 + 256 * 256 + 256
    assert head == 131_584
    assert round(table_5["moon"].models) * weights(head) / 1e6 == pytest.approx(2.21, abs=0.005)
    assert table_5["moon"].parameters == 746_036


# --- SphereFed, Table 1: the classifier of MobileNetV2 on CIFAR-100, 100 rounds, no bias

CLASSIFIER = """
import torch
from torch import nn
from isofed.models import Network

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1280))

    def forward(self, x):
        return x.flatten(1) * self.factor

def build(shape, classes):
    return Network({"scale": Scale()}, nn.Flatten(), nn.Linear(1280, classes, bias=False), width=1280)
"""


def test_spherefed_table_1(tmp_path: Path) -> None:
    (tmp_path / "classifier.py").write_text(CLASSIFIER)
    model = f"{tmp_path / 'classifier.py'}:build"
    part = Part(torch.zeros(100, 16, 16, 5, dtype=torch.uint8), torch.arange(100))
    dataset = Dataset("features", tuple(map(str, range(100))), part, part, (0.0,) * 5, (1.0,) * 5)
    found = {
        m: cost(m, dataset=dataset, model=model, operations=True)
        for m in ("fedavg", "freeze", "ccvr", "ffc", "spherefed")
    }
    rounds, samples, megabyte, giga = 100, 50_000, 1e6, 1e9

    def classifier(name: str) -> float:
        """Megabytes that the classifier alone costs a client in the whole run, the first broadcast aside."""
        sent = rounds * (found[name].up + found[name].down - found["freeze"].up - found["freeze"].down)
        return 4 * (sent + found[name].up_finally) / megabyte

    assert classifier("fedavg") == pytest.approx(102.4, abs=0.05)
    assert classifier("ccvr") == pytest.approx(758.3, abs=0.05)
    assert classifier("spherefed") == pytest.approx(7.07, abs=0.005)
    fedavg, spherefed = found["fedavg"].flops, found["spherefed"].flops_finally
    assert fedavg is not None and spherefed is not None
    assert spherefed * samples / giga == pytest.approx(176.6, abs=0.1)
    assert found["ffc"].flops_finally == found["spherefed"].flops_finally
    # The paper counts one operation per multiply-accumulate here: ten clients, ten epochs, 100 rounds.
    visits = samples * 10 * rounds
    assert fedavg / 2 * visits / giga == pytest.approx(1.9e4, rel=0.02)


def test_costs_are_those_of_the_composition() -> None:
    both = cost("moon+fedprox+fedavgm")
    assert (round(both.models), both.passes, round(both.server_state / both.parameters)) == (4, 3, 1)


def test_a_step_costs_three_times_its_forward_pass() -> None:
    # Gradients by weights and by inputs, but for the first layer's inputs.
    found, first_layer = cost("fedavg", model="mlp", operations=True), 3 * 32 * 32 * 64
    assert cost("fedavg", model="mlp").flops is None
    assert found.flops == pytest.approx(2 * (3 * found.macs - first_layer), rel=1e-9)
    # Also where large dense layers have products of their own on a processor.
    found, first_layer = cost("fedavg", model="pfl-cnn", operations=True), 27 * 32 * 30 * 30
    assert found.flops == pytest.approx(2 * (3 * found.macs - first_layer), rel=1e-9)


def test_a_network_that_is_named_is_shown_the_pictures_it_is_made_for() -> None:
    """By default 16x16 pixels would leave FedUV's network, without padding, nothing to look at."""
    assert cost("fedavg", model="feduv-cnn").macs == pass_macs(create("feduv-cnn", classes=10, shape=(3, 32, 32)))
