"""What methods ask of a network is checked before any work, and said in one sentence."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from isofed.errors import UserError
from isofed.methods import Method, find, names
from isofed.methods.needs import NEEDS, check_need
from isofed.models import Network, create
from isofed.models.base import BatchNorm2d
from tests.engine.plain import small

MODELS = '''
from torch import nn
from isofed.models import Network, Output


class Bare(Network):
    """A network that keeps its features to itself."""

    def forward(self, x):
        return Output(super().forward(x).logits, None, {})


class Maps(Network):
    """A network whose features are pictures."""

    def forward(self, x):
        output = super().forward(x)
        return Output(output.logits, output.stages["one"], output.stages)


def stage(shape):
    return nn.Sequential(nn.Conv2d(shape[0], 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


def pool():
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


def bare(shape, classes):
    return Bare({"one": stage(shape)}, pool(), nn.Linear(8, classes), 8)


def maps(shape, classes):
    return Maps({"one": stage(shape)}, pool(), nn.Linear(8, classes), 8)


def deep_head(shape, classes):
    head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, classes))
    return Network({"one": stage(shape), "two": nn.Conv2d(8, 8, 1)}, pool(), head, 8)


def nothing_behind(shape, classes):
    return Network({"one": stage(shape), "two": nn.Identity()}, pool(), nn.Linear(8, classes), 8)


def one_stage(shape, classes):
    return Network({"one": stage(shape)}, pool(), nn.Linear(8, classes), 8)
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "models.py").write_text(MODELS)
    return f"{tmp_path}/models.py"


def asking(need: str) -> list[str]:
    return [n for n in names() if need in find(n)[1].needs]


def said_by(**settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        small(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_who_asks_for_what() -> None:
    assert {
        "moon",
        "feduv",
        "univarfl",
        "feddecorr",
        "decov",
        "spherefed",
        "fedbabu",
        "ffc",
        "ccvr",
        "oracle_head",
    } <= set(asking("features"))
    assert {"spherefed", "fedbabu", "ffc", "ccvr", "oracle_head", "gradaug"} <= set(asking("linear head"))
    assert asking("two stages") == ["fedalign"] and asking("residual blocks") == ["stochdepth"]
    assert {need for n in names() for need in find(n)[1].needs} <= set(NEEDS)


@pytest.mark.parametrize("method", asking("features"))
@pytest.mark.parametrize("model", ["bare", "maps"])
def test_methods_on_features_are_refused_where_there_are_none(file: str, model: str, method: str) -> None:
    said = said_by(method=method, model=f"{file}:{model}")
    assert said == f"'{method}' works on features, one vector per sample, and this network gives none"


@pytest.mark.parametrize("model", ["bare", "maps"])
@pytest.mark.parametrize("method", ["fedavg", "fedprox+mixup", "freeze", "scaffold:option=1", "fedsam"])
def test_others_run_there(file: str, model: str, method: str) -> None:
    result = small(method=method, model=f"{file}:{model}", rounds=1, local_epochs=1).fit()
    assert result.rounds == 1 and 0 <= result.accuracy <= 1


@pytest.mark.parametrize("method", asking("linear head"))
def test_methods_on_a_linear_head_are_refused_on_another(file: str, method: str) -> None:
    said = said_by(method=method, model=f"{file}:deep_head")
    assert said == f"'{method}' needs a network whose head is one linear layer; this one has a Sequential"


@pytest.mark.parametrize("method", ["fedavg", "freeze", "freeze:reset=true", "feddecorr", "feduv", "fedalign"])
def test_others_run_on_any_head(file: str, method: str) -> None:
    run = small(method=method, model=f"{file}:deep_head", rounds=1, local_epochs=1)
    before = {k: v.clone() for k, v in run.world.network().state_dict().items()}
    after = run.fit().weights
    kept = {k for k in after if torch.equal(before[k], after[k])}
    heads = {f"head.{k}" for k in ("0.weight", "0.bias", "2.weight", "2.bias")}
    assert kept & heads == (heads if "freeze" in method else set())


def test_a_method_on_two_stages_is_refused_on_one(file: str) -> None:
    said = said_by(method="fedalign", model=f"{file}:one_stage")
    assert said == "'fedalign' compares the last two stages, and this network has 1"


def test_a_method_that_slims_the_last_stage_is_refused_where_nothing_comes_before_it(file: str) -> None:
    said = said_by(method="fedalign", model=f"{file}:nothing_behind")
    assert said == (
        "'fedalign' slims the last stage that has convolutions or linear layers and looks at what comes before it; "
        "this network has nothing before that one"
    )


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_method_on_residual_blocks_is_refused_without(model: str) -> None:
    said = said_by(method="fedprox+stochdepth", model=model)
    assert said == (
        "'stochdepth' drops residual blocks, and this network has none; use a ResNet, like resnet20, or build the "
        "blocks of your own with isofed.models.residual.Residual"
    )


@dataclass(frozen=True)
class Wishing(Method):
    """A user's method with a wish that nobody can grant."""

    needs: ClassVar[tuple[str, ...]] = ("feature",)


@dataclass(frozen=True)
class Asking(Method):
    """A user's method with a wish that a network may have."""

    needs: ClassVar[tuple[str, ...]] = ("features",)


def test_a_users_method_may_ask_too(file: str) -> None:
    said = said_by(method=Wishing())
    assert said == (
        "there is no thing that 'wishing' could have in `needs` called 'feature': did you mean 'features'? "
        "Known: features, linear head, residual blocks, two stages"
    )
    assert said_by(method=Asking(), model=f"{file}:bare").startswith("'asking' works on features")
    assert small(method=Asking(), rounds=1).fit().rounds == 1


@pytest.mark.parametrize("training", [True, False])
def test_a_look_at_the_features_leaves_the_network_as_it_was(training: bool) -> None:
    network = create("cnn", classes=3, shape=(1, 8, 8)).train(training)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    check_need("x", "features", network)
    assert network.training is training and all(m.training is training for m in network.modules())
    assert any(isinstance(m, BatchNorm2d) for m in network.modules())
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())


def test_a_network_of_unknown_input_is_believed() -> None:
    network = Network({"one": nn.Linear(4, 3)}, nn.Identity(), nn.Linear(3, 2), width=3)
    check_need("x", "features", network)
    network.shape = (1, 2, 4)  # features [2, 1, 2, 3]
    with pytest.raises(UserError, match="'x' works on features"):
        check_need("x", "features", network)


def test_the_networks_here_have_what_is_asked_for() -> None:
    assert "needs" in inspect.get_annotations(Method)
    for name in ("resnet20", "resnet56"):
        network = create(name, classes=3, shape=(1, 8, 8))
        for need in NEEDS:
            check_need("x", need, network)
    for name in ("cnn", "mlp"):
        network = create(name, classes=3, shape=(1, 8, 8))
        refused = []
        for need in NEEDS:
            try:
                check_need("x", need, network)
            except UserError:
                refused.append(need)
        assert refused == ["residual blocks"]
