"""MOON, whole, against three models kept by hand in float64."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isofed.draws import generator
from isofed.engine.replica import Job, Replica
from isofed.federation import Federation
from isofed.models import Network, Output, has_batch_norm
from tests.engine.plain import Correction, Gradients, Named, distance, participants, small
from tests.methods.test_decorrelated import decorrelation
from tests.methods.written import CPU, Written, after_steps, agree, cross, same_bytes, visit


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / (a.pow(2).sum().sqrt() * b.pow(2).sum().sqrt())


class Moons(Written):
    """Clients that keep the model of their last visit; a copy of it and of the received one are in eval mode."""

    def __init__(
        self,
        run: Federation,
        head: bool = True,
        mu: float = 1.0,
        tau: float = 0.5,
        beta: float = 0.0,
        train: bool = False,
        initial: bool = False,
        random: bool = False,
    ):
        super().__init__(run, self.contrastive)
        self.in_training, self.initial, self.random = train, initial or random, random
        self.first = {k: v.double() for k, v in run.layout.views(run.state.weights.clone()).items()}
        if head:
            self.network.projector = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 256)).double()
            self.network.head = nn.Linear(256, len(run.world.dataset.classes)).double()
            # Where its random weights come from is not this test's business, but that all get the same is.
            given = {k: v.double() for k, v in run.layout.views(run.state.weights).items()}
            self.network.load_state_dict(given)
        self.mu, self.tau, self.beta = mu, tau, beta
        self.last: dict[int, Named] = {}
        self.received, self.previous = copy.deepcopy(self.network), copy.deepcopy(self.network)
        self.known = False

    def contrastive(self, output: Output, inputs: Tensor, labels: Tensor) -> Tensor:
        loss = cross(output, inputs, labels)
        if self.known:
            with torch.no_grad():
                globals_, previous = self.received(inputs).features, self.previous(inputs).features
            terms = []
            for z, g, p in zip(output.features, globals_, previous, strict=True):
                near, far = torch.exp(cosine(z, g) / self.tau), torch.exp(cosine(z, p) / self.tau)
                terms.append(-torch.log(near / (near + far)))
            loss = loss + self.mu * torch.stack(terms).mean()
        return loss + self.beta * decorrelation(output.features) if self.beta else loss

    def own(self, client: int) -> Named:
        """The initial weights of a client's own network."""
        seed = generator(self.world.settings.seed, "another network", client).integers(2**62)
        return {k: v.double() for k, v in self.world.network(int(seed)).state_dict().items()}

    def local(
        self, start: Named, round: int, client: int, correct: Correction | None = None, lr: float | None = None
    ) -> tuple[Named, list[Gradients]]:
        self.known = client in self.last or self.initial
        self.received.load_state_dict(start)
        first = self.own(client) if self.random else self.first if self.initial else start
        self.previous.load_state_dict(self.last.get(client, first))
        self.received.train(self.in_training), self.previous.train(self.in_training)
        model, seen = super().local(start, round, client, correct, lr)
        self.last[client] = model
        return model, seen


@pytest.mark.parametrize(
    ("method", "settings", "known"),
    [
        ("moon", {"model": "cnn", "rounds": 3, "participation": 0.5}, {}),
        ("moon", {"rounds": 3}, {}),
        ("moon:mu=5,temperature=0.2", {"momentum": 0.9, "lr": 0.03}, {"mu": 5, "tau": 0.2}),
        ("moon:head=none", {"model": "cnn"}, {"head": False}),
        ("moon:head=on", {}, {}),
        ("moon+feddecorr", {"model": "cnn", "lr": 0.03}, {"beta": 0.1}),  # on the 256 projected features
        ("moon:frozen=train", {"model": "cnn", "rounds": 3, "participation": 0.5}, {"train": True}),
        ("moon:first=initial", {"rounds": 3, "participation": 0.5}, {"initial": True}),
        ("moon:first=initial,frozen=train", {"model": "cnn"}, {"initial": True, "train": True}),
        ("moon:first=random", {"rounds": 3, "participation": 0.5}, {"random": True}),
        ("moon:first=random", {"model": "cnn", "executor": "workers", "workers": 2}, {"random": True}),
    ],
)
def test_moon(method: str, settings: dict[str, Any], known: dict[str, Any]) -> None:
    run = small(method=method, local_epochs=1, **settings)
    plain = Moons(run, **known)
    assert has_batch_norm(plain.network) == (run.settings.model == "cnn")
    agree(run, plain)
    # What a client keeps for its next visit is its own model, running statistics included.
    assert sorted(run.state.clients) == sorted(plain.last)
    for client, model in plain.last.items():
        state = run.state.clients[client]
        assert float(state["moon.known"]) == 1
        assert distance(run.layout.views(state["moon.model"]), model) < 5e-6


def test_each_client_has_initial_weights_of_its_own() -> None:
    run = small(method="moon:first=random", model="cnn")
    plain = Moons(run, random=True)
    models = [plain.own(client) for client in (0, 1, 0)]
    for name, first in run.layout.views(run.state.weights).items():
        one, other, again = (model[name] for model in models)
        assert torch.equal(one, again)
        if first.std() > 0.01 and first.numel() > 100:  # drawn, not set: of the same spread, and each another
            assert not torch.allclose(one, other) and not torch.allclose(one, first.double())
            assert 0.7 < float(one.std() / first.std()) < 1.4
    assert not same_bytes(run, small(method="moon:first=initial", model="cnn"))


def test_some_clients_above_skipped_a_round_and_some_did_not() -> None:
    run = small(participation=0.5, rounds=3)
    assert [participants(run, r) for r in (1, 2, 3)] == [[0, 2], [1, 3], [0, 1]]


def test_a_first_visit_has_no_term() -> None:
    for settings in ({}, {"model": "cnn", "momentum": 0.9}):
        assert same_bytes(small(method="moon:head=none,mu=7", rounds=1, **settings), small(rounds=1, **settings))
        assert not same_bytes(small(method="moon:head=none,mu=7", **settings), small(**settings))
    first, base = small(method="moon:head=none", rounds=1), small(rounds=1)
    first.fit(), base.fit()
    assert first.history[0]["local_loss"] == base.history[0]["local_loss"]


def test_with_equal_models_the_term_is_log_two() -> None:
    run = small(method="moon:mu=3,head=none", model="cnn", local_epochs=1)
    base = small(model="cnn", local_epochs=1)
    known = {"moon.model": run.state.weights, "moon.known": torch.ones(1)}
    client = 2  # eleven samples: one step
    found = visit(run, client, state=known)
    assert found.loss - visit(base, client).loss == pytest.approx(3 * math.log(2), rel=1e-6)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_weight_of_zero_is_fedavg_and_the_default_is_not(model: str) -> None:
    base = small(model=model)
    assert same_bytes(small(method="moon:mu=0,head=none", model=model), base)
    assert distance(small(method="moon:head=none", model=model).fit().weights, base.fit().weights) > 1e-4
    # With the head there is something else to be equal to: the same network, mu = 0.
    with_head, without_term = small(method="moon", model=model), small(method="moon:mu=0", model=model)
    assert distance(with_head.fit().weights, without_term.fit().weights) > 1e-4


def test_nothing_more_is_sent() -> None:
    moon, base = small(method="moon:head=none").fit(), small().fit()
    assert (moon.bytes_up, moon.bytes_down) == (base.bytes_up, base.bytes_down)


def layers(network: Network) -> list[Any]:
    """A network's projector and head in words."""
    found: list[Any] = []
    for module in [*(network.projector or []), network.head]:  # type: ignore[misc]
        linear = isinstance(module, nn.Linear)
        found.append((module.in_features, module.out_features) if linear else type(module).__name__)
    return found


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_projection_head(model: str) -> None:
    def built(method: str) -> Network:
        return small(method=method, model=model).world.network()

    whole = [(64, 64), "ReLU", (64, 256), (256, 4)]
    for method in ("moon", "moon:head=auto", "moon:head=on", "moon:mu=0"):
        network = built(method)
        assert layers(network) == whole
        output = network(torch.zeros(3, 1, 8, 8))
        assert output.features.shape == (3, 256) and network.width == 256
        torch.testing.assert_close(network.head(output.features), output.logits)
    none = built("moon:head=none")
    assert none.projector is None and layers(none) == [(64, 4)] and none.width == 64
    # What was there before has the weights that it has without MOON, and the head depends on the seed.
    plain, moon = small(model=model).world.network(), built("moon")
    for name, value in plain.stages.state_dict().items():
        assert torch.equal(moon.stages.state_dict()[name], value)
    other = small(method="moon", model=model, seed=1).world.network()
    assert not torch.equal(other.head.weight, moon.head.weight)  # type: ignore[arg-type]
    assert torch.equal(moon.head.weight, built("moon").head.weight)  # type: ignore[arg-type]


PROJECTED = """
from torch import nn
from isofed.models import Network

def build(shape, classes):
    stages = {"one": nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 12), nn.ReLU())}
    return Network(stages, nn.Flatten(), nn.Linear(10, classes), 10, projector=nn.Sequential(nn.Linear(12, 10)))
"""


def test_a_network_with_a_projector_keeps_it(tmp_path: Path) -> None:
    file = tmp_path / "projected.py"
    file.write_text(PROJECTED)
    kept, added, none = (
        small(method=f"moon:head={head}", model=f"{file}:build").world.network() for head in ("auto", "on", "none")
    )
    assert layers(kept) == layers(none) == [(12, 10), (10, 4)]
    assert kept.width == 10
    assert kept(torch.zeros(2, 1, 8, 8)).features.shape == (2, 10)
    assert added.projector is not None
    all_linear = [m for m in added.projector.modules() if isinstance(m, nn.Linear)]  # the old one comes first
    assert [(m.in_features, m.out_features) for m in all_linear] == [(12, 10), (10, 10), (10, 256)]
    assert added(torch.zeros(2, 1, 8, 8)).features.shape == (2, 256) and layers(added)[-1] == (256, 4)
    run = small(method="moon", model=f"{file}:build")
    assert distance(run.fit().weights, small(model=f"{file}:build").fit().weights) > 1e-4


def test_decorrelation_acts_on_the_projected_features() -> None:
    # In a first visit MOON has no term: what a step's gradient gains is FedDecorr's, and it reaches the projector's
    # last layer, which it would not if it acted on the 64 features before it.
    both, alone = (after_steps(small(method=m, model="cnn")) for m in ("moon+feddecorr", "moon"))
    one, other = (r.local.step.named(r.local.step.grad) for r in (both, alone))
    gained = {n: one[n] - other[n] for n in one}
    assert float(gained["projector.2.weight"].norm()) > 1e-4
    assert float(gained["head.weight"].norm()) == 0
    plain = Moons(small(method="moon+feddecorr", model="cnn"))
    inputs, _ = plain.batches(1, 0)[0]
    z = plain.network.train()(inputs).features
    assert z.shape == (16, 256)
    wanted = torch.autograd.grad(0.1 * decorrelation(z), plain.network.projector[2].weight)[0]  # type: ignore[index]
    torch.testing.assert_close(gained["projector.2.weight"].double(), wanted, rtol=1e-4, atol=1e-7)


def test_copies_are_in_eval_mode_and_never_move() -> None:
    run = small(method="moon", model="cnn", local_epochs=1)
    replica = Replica(run.world, CPU)
    job = Job(2, 0, 0.1, 0.25)
    first = replica.visit(job, run.state.weights, {}, None)
    moved = run.state.weights.clone()
    moved[run.layout.shared_trained] += 0.01 * torch.sign(first.update)
    replica.visit(job, moved, {}, first.state)
    assert torch.equal(replica.local.copies["moon.global"], moved)
    assert torch.equal(replica.local.copies["moon.previous"], first.state["moon.model"])
    for network in replica.local.step.copies.values():
        assert not network.training and not any(m.training for m in network.modules())
        assert not any(p.requires_grad for p in network.parameters())


def test_a_network_that_cannot_stand_zero_weights_survives_its_first_visit(tmp_path: Path) -> None:
    # There is no previous model yet: a vector of zeros in its place would divide zero by zero in weight norm.
    (tmp_path / "net.py").write_text(
        "from torch import nn\nfrom isofed.models import Network\n"
        "from torch.nn.utils.parametrizations import weight_norm\n"
        "def build(shape, classes):\n"
        "    layer = weight_norm(nn.Linear(shape[0] * shape[1] * shape[2], 8))\n"
        "    stage = nn.Sequential(nn.Flatten(), layer, nn.ReLU())\n"
        "    return Network({'one': stage}, nn.Flatten(), nn.Linear(8, classes), width=8)\n"
    )
    model = f"{tmp_path / 'net.py'}:build"
    moon, plain = (small(method=m, model=model, rounds=1) for m in ("moon:head=none", "fedavg"))
    assert same_bytes(moon, plain)
