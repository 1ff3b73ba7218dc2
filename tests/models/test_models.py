"""The networks: their shapes and sizes, what a forward pass gives, and how they are made."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from isofed import Method
from isofed.engine.step import Pictures
from isofed.errors import UserError
from isofed.federation import Federation
from isofed.files import load_tensors, save_tensors
from isofed.methods import Step
from isofed.models import Network, create, has_batch_norm, load, names
from tests.engine.plain import small


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_sizes_worked_out_by_hand() -> None:
    grey = create("cnn", classes=10, shape=(1, 8, 8))
    convolutions = 16 * 1 * 9 + 32 * 16 * 9 + 64 * 32 * 9
    assert count(grey) == convolutions + 2 * (16 + 32 + 64) + 64 * 10 + 10 == 24_058
    biased = create("cnn", classes=10, shape=(1, 8, 8), norm="none")
    assert count(biased) == convolutions + (16 + 32 + 64) + 650
    assert count(create("mlp", classes=3, shape=(3, 5, 7))) == (105 * 64 + 64) + (64 * 64 + 64) + (64 * 3 + 3)


TINY = ("cnn", "mlp", "resnet8", "resnet20", "resnet32", "resnet56", "resnet56-basic")  # run on any picture


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (2, 4, 4), (1, 5, 7)])
def test_forward_gives_logits_features_and_stages(name: str, shape: tuple[int, int, int]) -> None:
    network = create(name, classes=6, shape=shape)
    output = network(torch.randn(3, *shape))
    assert output.logits.shape == (3, 6)
    assert output.features.shape == (3, network.width)
    assert list(output.stages) == list(network.stages)
    torch.testing.assert_close(network.head(output.features), output.logits)
    torch.testing.assert_close(network.pool(list(output.stages.values())[-1]), output.features)


def test_the_cnn_halves_its_pictures_twice() -> None:
    stages = create("cnn", classes=2, shape=(1, 32, 32))(torch.zeros(2, 1, 32, 32)).stages
    assert [tuple(s.shape[1:]) for s in stages.values()] == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
    assert all(float(s.detach().min()) >= 0 for s in stages.values())  # after the ReLU


@pytest.mark.parametrize("name", TINY)
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        return torch.cat(
            [p.detach().reshape(-1) for p in create(name, classes=3, shape=(1, 8, 8), seed=seed).parameters()]
        )

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = weights(0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)


def test_norms() -> None:
    batch, group, none = (create("cnn", classes=3, norm=n) for n in ("batch", "group:4", "none"))
    assert has_batch_norm(batch) and not has_batch_norm(group) and not has_batch_norm(none)
    assert [m.num_groups for m in group.modules() if isinstance(m, nn.GroupNorm)] == [4, 4, 4]
    assert not any("num_batches" in n for n in batch.state_dict())
    assert has_batch_norm(create("cnn", classes=3))  # the cnn's own
    assert not has_batch_norm(create("mlp", classes=3))


@pytest.mark.parametrize("norm", ["group:5", "group:0", "group", "batch:1", "layer", "group:2,3", "none:1"])
def test_norms_that_cannot_be(norm: str) -> None:
    with pytest.raises(UserError, match="norm"):
        create("cnn", classes=3, norm=norm)


def test_a_norm_for_the_mlp_is_refused() -> None:
    with pytest.raises(UserError, match="norm=batch"):
        create("mlp", classes=3, norm="batch")


def test_batch_norm_is_pytorchs() -> None:
    ours, theirs = create("cnn", classes=3, shape=(1, 8, 8)).get_submodule("stages.stage1.1"), nn.BatchNorm2d(16)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    inputs = torch.randn(8, 16, 4, 4)
    for _ in range(3):
        assert torch.equal(ours(inputs), theirs(inputs))
    for name in ("running_mean", "running_var"):
        assert torch.equal(ours.get_buffer(name), theirs.get_buffer(name))
    ours.eval(), theirs.eval()
    assert torch.equal(ours(inputs), theirs(inputs))


def test_weights_of_an_ordinary_batch_norm_load() -> None:
    ours = create("cnn", classes=3, shape=(1, 8, 8))
    state = {k: torch.rand_like(v) for k, v in ours.state_dict().items()}
    ours.load_state_dict(state | {"stages.stage1.1.num_batches_tracked": torch.tensor(5)})
    assert torch.equal(ours.state_dict()["stages.stage1.1.running_var"], state["stages.stage1.1.running_var"])
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict({k: v for k, v in state.items() if "running_var" not in k})


def test_names_and_mistakes() -> None:
    assert {"cnn", "mlp"} <= set(names())
    with pytest.raises(UserError, match="there is no model 'cmn': did you mean 'cnn'"):
        create("cmn", classes=3)


MODELS = """
from torch import nn
from isofed.models import Network

def good(shape, classes):
    inside = shape[0] * shape[1] * shape[2]
    return Network({"one": nn.Sequential(nn.Flatten(), nn.Linear(inside, 5))}, nn.Identity(), nn.Linear(5, classes), 5)

def with_norm(shape, classes, norm="batch"):
    made = good(shape, classes)
    made.asked = norm
    return made

def wrong(shape, classes):
    return nn.Linear(3, classes)

def fails(shape, classes):
    raise RuntimeError("no such layer")

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "models.py").write_text(MODELS)
    return f"{tmp_path}/models.py"


def test_models_of_ones_own(file: str) -> None:
    network = create(f"{file}:good", classes=3, shape=(1, 2, 2))
    assert isinstance(network, Network)
    assert network(torch.zeros(2, 1, 2, 2)).logits.shape == (2, 3)
    again = create(f"{file}:good", classes=3, shape=(1, 2, 2))
    assert torch.equal(network.get_parameter("head.weight"), again.get_parameter("head.weight"))
    assert vars(create(f"{file}:with_norm", classes=3, norm="group:2"))["asked"] == "group:2"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong", "gave a Linear; wrap it: return adapt(net, 'NAME-OF-LAST-LAYER')"),
        ("goood", "called 'goood': did you mean 'good'"),
        ("number", "number"),
        ("fails", "no such layer"),
    ],
)
def test_mistakes_in_models_of_ones_own(file: str, name: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        create(f"{file}:{name}", classes=3)
    assert said in str(caught.value)


def test_a_norm_that_a_model_does_not_take_is_refused(file: str) -> None:
    with pytest.raises(UserError, match="norm"):
        create(f"{file}:good", classes=3, norm="batch")


class Unlisted(Method):
    """A method that only this session knows."""

    def loss(self, step: Step) -> Tensor | None:
        return None


def test_a_run_of_a_method_made_in_a_session_can_be_read_back(tmp_path: Path) -> None:
    result = small(method=[Unlisted(), "moon"], model="mlp", out=tmp_path / "run").fit()
    before = torch.get_rng_state()
    network = load(tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)  # reading draws nothing from the caller's generator
    assert all(torch.equal(v, result.weights[k]) for k, v in network.state_dict().items())


def test_a_layer_in_two_places_is_trained_as_one_and_read_back_in_both(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\nfrom isofed.models import adapt\n\n\ndef build(shape, classes):\n"
        "    first, again, norm = nn.Linear(64, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)\n"
        "    layers = [nn.Flatten(), first, norm, nn.ReLU(), again, norm, again]\n"
        "    return adapt(nn.Sequential(*layers), nn.Linear(8, classes))\n"
    )
    result = small(model=f"{file}:build", out=tmp_path / "run").fit()
    values = load(tmp_path / "run").state_dict()
    assert sorted(name for name in result.weights if "4." in name or "6." in name) == [
        "stages.4.bias",
        "stages.4.weight",
    ]
    for name, value in result.weights.items():
        assert torch.equal(values[name], value)
    assert torch.equal(values["stages.6.weight"], result.weights["stages.4.weight"])
    assert torch.equal(values["stages.5.running_mean"], result.weights["stages.2.running_mean"])


DRAWN = """
import torch
from torch import nn
from isofed.models import adapt


class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("index", torch.randperm(64))
        self.register_buffer("mask", torch.rand(64) < 0.7)
        self.register_buffer("scale", torch.rand(64), persistent=False)
        self.register_buffer("sign", torch.randint(0, 2, (64,)) * 2 - 1, persistent=False)

    def forward(self, x):
        return self.norm(x.flatten(1)[:, self.index] * self.mask * self.scale) * self.sign


def build(shape, classes):
    return adapt(Drawn(), nn.Linear(64, classes))
"""


def test_buffers_that_nobody_trains_are_those_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(DRAWN)
    settings: dict[str, Any] = {"model": f"{tmp_path}/drawn.py:build", "seed": 3, "rounds": 2, "out": tmp_path / "run"}
    run = small(keep="every:1", keep_clients="last", **settings)
    result = run.fit()
    inputs = Pictures(run.world.parts["test"], run.world.dataset, torch.device("cpu"))
    found = load(tmp_path / "run").eval()
    right = found(inputs.normalised(inputs.images)).logits.argmax(1) == inputs.labels
    assert float(right.double().mean()) == result.accuracy
    wanted = dict(run.world.network().named_buffers())
    for file in (tmp_path / "run/kept").iterdir():
        kept = dict(load(file).named_buffers())
        for name in ("index", "mask", "scale", "sign"):
            assert torch.equal(kept[f"stages.encoder.{name}"], wanted[f"stages.encoder.{name}"])
    assert len(list((tmp_path / "run/kept").iterdir())) == 2 + 4
    again = Federation.resume(tmp_path / "run").fit().weights
    assert again.keys() == result.weights.keys() >= {"stages.encoder.index", "stages.encoder.sign"}
    assert all(torch.equal(again[name], value) for name, value in result.weights.items())


@pytest.mark.parametrize("gone", ["norm.num_batches_tracked", "index"])
def test_a_file_without_constants_loads_where_the_network_needs_none(gone: str, tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(DRAWN)
    small(model=f"{tmp_path}/drawn.py:build", rounds=1, out=tmp_path / "run").fit()
    tensors, info = load_tensors(tmp_path / "run/model.safetensors")
    del tensors[f"stages.encoder.{gone}"]
    save_tensors(tmp_path / "run/model.safetensors", tensors, info)
    with nullcontext() if "norm" in gone else pytest.raises(UserError, match="do not fit the network"):
        load(tmp_path / "run")


def test_weights_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    class Wider(Method):
        def build(self, network: Network, classes: int, rng: np.random.Generator) -> None:
            network.head = torch.nn.Linear(network.width, classes, bias=False)

    small(method=[Wider()], model="mlp", out=tmp_path / "run").fit()
    with pytest.raises(UserError, match=r"do not fit the network 'mlp', perhaps because of 'wider'"):
        load(tmp_path / "run")
