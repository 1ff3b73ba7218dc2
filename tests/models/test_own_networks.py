"""Networks in files of one's own: what they must give, and what is said where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isofed.errors import UserError
from isofed.methods import parse
from isofed.models import create

NETS = """
import torch
from torch import nn
from torch.nn import Linear
from isofed.models import Network, adapt

class Net(nn.Module):
    def __init__(self, shape, outputs, after=lambda z: z):
        super().__init__()
        self.fc1 = nn.Linear(shape[0] * shape[1] * shape[2], 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout()
        self.fc2 = nn.Linear(6, outputs)
        self.after = after

    def forward(self, x):
        return self.after(self.fc2(self.drop(self.norm(self.fc1(x.flatten(1))).relu())))

def good(shape, classes):
    return adapt(Net(shape, classes), "fc2")

def many(shape, classes):
    return adapt(Net(shape, 1000), "fc2")

def few(shape, classes):
    return adapt(Net(shape, classes - 1), "fc2")

def pictures(shape, classes):
    return Network({"one": nn.Conv2d(shape[0], classes, 1)}, nn.Identity(), nn.Identity(), classes)

def softmax(shape, classes):
    return adapt(Net(shape, classes, lambda z: z.softmax(1)), "fc2")

def log_softmax(shape, classes):
    return adapt(Net(shape, classes, lambda z: z.log_softmax(1)), "fc2")

def temperature(shape, classes):
    return adapt(Net(shape, classes, lambda z: z / 0.5), "fc2")

def in_a_row(shape, classes):
    return adapt(nn.Sequential(nn.Flatten(), nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, classes), nn.Softmax(1)), "3")

def not_the_last(shape, classes):
    return adapt(Net(shape, classes), "fc1")

def fails(shape, classes):
    return adapt(nn.Sequential(nn.Flatten(), nn.Linear(5, classes)), "1")

def plain(shape, classes):
    return Net(shape, classes)

def helper(x):
    return x

number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NETS)
    (tmp_path / "other.py").write_text("from isofed.models import adapt\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_network_that_gives_its_logits_is_taken_as_it_is(here: Path) -> None:
    before = torch.get_rng_state()
    network = create("net.py:good", classes=4, shape=(1, 3, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert network.get_buffer("stages.encoder.norm.running_mean").tolist() == [0] * 6  # looking leaves nothing behind
    assert network.training and network(torch.zeros(2, 1, 3, 3)).logits.shape == (2, 4)
    names = {name for name, _ in network.named_parameters()}
    assert {"head.weight", "head.bias"} <= names and not any("fc2" in name for name in names)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("many", "model 'net.py:many' gives 1000 outputs for a picture, and there are 4 classes: give its last layer"),
        ("few", "model 'net.py:few' gives 3 outputs for a picture, and there are 4 classes"),
        ("pictures", "gives 4x3x3 outputs for a picture, and there are 4 classes"),
        ("softmax", "model 'net.py:softmax' does something after the layer 'fc2', which adapt would not"),
        ("log_softmax", "does something after the layer 'fc2'"),
        ("temperature", "after the layer 'fc2', which adapt would not: the named layer must give the logits"),
        ("in_a_row", "does something after the layer '3'"),
        ("not_the_last", "'net.py:not_the_last' fails on a picture of the shape (1, 3, 3)"),
        ("fails", "model 'net.py:fails' fails on a picture of the shape (1, 3, 3): RuntimeError: mat1 and mat2"),
        ("plain", "model 'net.py:plain' gave a Net; wrap it: return adapt(net, 'fc2'), with adapt from isofed.models"),
        ("number", "model 'net.py:number' is an int; it must be a function of shape and classes"),
        ("god", "there is no model in net.py called 'god': did you mean 'good'?"),
    ],
)
def test_mistakes(here: Path, name: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        create(f"net.py:{name}", classes=4, shape=(1, 3, 3))
    assert said in str(caught.value)


def test_what_could_be_meant_is_what_could_build_a_network(here: Path) -> None:
    with pytest.raises(UserError) as caught:
        create("net.py:nothing_like_it", classes=4)
    known = str(caught.value).split("Known: ")[1].split(", ")
    assert "good" in known and not {"helper", "number", "torch", "nn", "Linear", "adapt", "Net"} & set(known)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("net.py", "there is no model 'net.py': name the function in the file, net.py:good or net.py:many or "),
        ("net:good", "there is no model 'net'; the function in the file is written net.py:FUNCTION"),
        ("other.py", "there is no model 'other.py', and the file other.py defines none"),
        ("other.py:build", "there is no model 'build' in other.py, which defines none"),
        ("gone.py", "which does not exist"),
    ],
)
def test_the_file_alone(here: Path, name: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        create(name, classes=4)
    assert said in str(caught.value)


def test_a_file_that_is_only_named_is_not_run(here: Path) -> None:
    (here / "loud.py").write_text("from pathlib import Path\nPath('ran').touch()\n\n\ndef build(shape, classes): ...\n")
    for ask in (lambda: create("loud.py", classes=4), lambda: parse("loud.py"), lambda: parse("fedavg+loud.py")):
        with pytest.raises(UserError, match=r"loud\.py"):
            ask()
    assert not (here / "ran").exists()
