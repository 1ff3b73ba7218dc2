"""Freeze and FedBABU: a head that stays, one that starts afresh, and one that clients fine-tune at the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from isofed.data import Dataset, Part, load
from isofed.draws import torch_seeded
from isofed.engine.replica import Job, Replica
from isofed.errors import UserError
from isofed.federation import Federation
from isofed.layout import Policy
from isofed.methods import parse
from isofed.models import Network
from tests.engine.plain import TOLERANCE, Named, Plain, distance, mean, participants, small

BODY, HEAD = 64 * 64 + 64 + 64 * 64 + 64, 4 * 64 + 4  # the mlp's parameters on 8x8 pictures


def is_head(name: str) -> bool:
    return name.startswith("head.")


def bytes_of(tensors: Named) -> dict[str, bytes]:
    return {k: v.detach().contiguous().numpy().tobytes() for k, v in tensors.items()}


def by_hand(run: Federation, reset: bool) -> Named:
    """All rounds in float64; the head is frozen, or is trained in each visit and forgotten after it."""
    plain = Plain(run)
    plain.network.head.requires_grad_(reset)
    first = server = plain.start()
    for round in range(1, run.settings.rounds + 1):
        who = participants(run, round)
        models = [plain.local(server, round, k)[0] for k in who]
        averaged = mean(models, [float(plain.sizes[k]) for k in who])
        server = averaged | {k: v for k, v in first.items() if is_head(k)}
    return server


SETTINGS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "weight_decay": 0.05},
    {"clip": 0.3, "participation": 0.5, "rounds": 3},
    {"model": "cnn", "weight_decay": 0.05},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("reset", [False, True])
def test_written_out(reset: bool, settings: dict[str, Any]) -> None:
    run = small(method="freeze:reset=true" if reset else "freeze", **settings)
    found = run.fit().weights
    assert distance(found, by_hand(run, reset)) < TOLERANCE * (2 if "model" in settings else 1)
    other = small(method="freeze" if reset else "freeze:reset=true", **settings).fit().weights
    assert distance(found, other) > 1e-4


@pytest.mark.parametrize("method", ["freeze", "freeze:reset=true", "fedbabu"])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_head_does_not_change_by_a_bit(method: str, model: str) -> None:
    run = small(method=method, model=model, momentum=0.9, weight_decay=0.1)
    before, after = bytes_of(Plain(run, torch.float32).start()), bytes_of(run.fit().weights)
    assert before.keys() == after.keys()
    for name in before:
        assert (before[name] == after[name]) == is_head(name), name


@pytest.mark.parametrize(
    ("method", "policy"), [("freeze", Policy.FIXED), ("freeze:reset=true", Policy.RESET), ("fedbabu", Policy.FIXED)]
)
def test_traffic(method: str, policy: Policy) -> None:
    run = small(method=method)
    assert {e.name for e in run.layout.entries if e.policy is policy} == {"head.weight", "head.bias"}
    assert run.layout.count(policy) == HEAD and run.layout.count(Policy.SHARED) == BODY
    run.fit()
    assert [line["bytes_up"] for line in run.history] == [4 * 4 * BODY] * 2
    assert [line["bytes_down"] for line in run.history] == [4 * 4 * (BODY + HEAD), 4 * 4 * BODY]


def test_with_reset_a_client_trains_its_head() -> None:
    # One step: the body's gradient is that of fedavg's, so the models differ in the head alone.
    reset, plain = (
        small(method=m, local_steps=1, local_epochs=None, rounds=1) for m in ("freeze:reset=true", "fedavg")
    )
    one, two = reset.fit().weights, plain.fit().weights
    assert distance(one, two | {k: v for k, v in one.items() if is_head(k)}) == 0
    # Two steps: the second body step sees the head that the first has trained, and is still fedavg's.
    reset, plain = (
        small(method=m, local_steps=2, local_epochs=None, rounds=1) for m in ("freeze:reset=true", "fedavg")
    )
    one, two = reset.fit().weights, plain.fit().weights
    assert distance(one, two | {k: v for k, v in one.items() if is_head(k)}) < 1e-7
    assert distance(one, two) > 1e-3


@pytest.mark.parametrize("settings", [{}, {"model": "cnn", "momentum": 0.9, "weight_decay": 0.01}], ids=str)
def test_fedbabu_trains_the_same_body_as_freeze_bit_for_bit(settings: dict[str, Any]) -> None:
    freeze, babu = small(method="freeze", **settings), small(method="fedbabu", **settings)
    one, two = freeze.fit(), babu.fit()
    assert freeze.state.weights.numpy().tobytes() == babu.state.weights.numpy().tobytes()
    assert bytes_of(one.weights) == bytes_of(two.weights)  # the global model keeps the initial head
    assert two.accuracy == one.accuracy == two.exchanges[0]["accuracy"]
    assert [line["accuracy"] for line in one.history] == [line["accuracy"] for line in two.history]


# Personal heads, fine-tuned in float64 by torch's own optimiser


def final_network(run: Federation, weights: Named) -> Network:
    network = run.world.network()
    network.load_state_dict(weights)
    return network.eval()


def personal(
    run: Federation, weights: Named, part: str = "test", epochs: int = 5, lr: float | None = None
) -> tuple[float, float]:
    """Accuracy before and after as the mean over clients of the mean over their classes, by their shares."""
    s, world, plain = run.settings, run.world, Plain(run, torch.float32)
    network, classes = final_network(run, weights), len(world.dataset.classes)
    (inputs, labels), (test_inputs, test_labels) = plain.part("train"), plain.part(part)
    with torch.no_grad():
        z, test_z = (network(x).features.double() for x in (inputs, test_inputs))
    before, after = [], []
    for client, places in enumerate(world.clients):
        own = torch.from_numpy(places)
        here = np.arange(len(test_labels))
        if run.world.dataset.domains:
            domain = int(world.parts["train"].domains[own][0])  # type: ignore[index]
            here = np.flatnonzero(world.parts[part].domains.numpy() == domain)  # type: ignore[union-attr]
        head = torch.nn.Linear(z.shape[1], classes).double()
        head.load_state_dict({k.removeprefix("head."): v.double() for k, v in weights.items() if is_head(k)})
        counts = np.bincount(labels[own].numpy(), minlength=classes)

        def judged(head: torch.nn.Linear = head, here: np.ndarray = here, counts: np.ndarray = counts) -> float | None:
            with torch.no_grad():
                said = head(test_z[here]).argmax(1).numpy()
            truth, right, weight = test_labels[here].numpy(), 0.0, 0
            for label in range(len(counts)):
                if (truth == label).any() and counts[label]:
                    right += counts[label] * (said[truth == label] == label).mean()
                    weight += counts[label]
            return right / weight if weight else None

        first = judged()
        optimiser = torch.optim.SGD(head.parameters(), lr=s.lr if lr is None else lr, momentum=s.momentum)
        with torch_seeded(s.seed, "torch/visit", s.rounds + 1, client):
            orders = [torch.randperm(len(own)) for _ in range(epochs)]
        for order in orders:
            for index in order.split(s.batch_size):
                optimiser.zero_grad()
                cross_entropy(head(z[own[index]]), labels[own[index]]).backward()
                optimiser.step()
        last = judged()
        if first is not None and last is not None:
            before.append(first)
            after.append(last)
    return float(np.mean(before)), float(np.mean(after))


LARGER = {"data": "synthetic:samples=240,test=200,classes=6", "clients": 5, "partition": "dirichlet:0.3"}


@pytest.mark.parametrize(
    ("method", "settings", "known"),
    [
        ("fedbabu", {}, {}),
        ("fedbabu", {"momentum": 0.9, "seed": 3}, {}),
        ("fedbabu:epochs=1,lr=0.5", {"batch_size": 7}, {"epochs": 1, "lr": 0.5}),
        ("fedbabu", {"model": "cnn", "partition": "pathological:2"}, {}),
        ("fedbabu:epochs=2", {"lr_schedule": "step:every=1,factor=0.1", "lr": 0.3}, {"lr": 0.3, "epochs": 2}),
    ],
)
def test_personal_accuracy(method: str, settings: dict[str, Any], known: dict[str, Any]) -> None:
    run = small(method=method, **(LARGER | settings))
    result = run.fit()
    before, after = personal(run, result.weights, **known)
    exchange = result.exchanges[0]
    assert exchange["exchange"] == "personal"
    assert exchange["personal_accuracy_before"] == pytest.approx(before, abs=1e-9)
    assert exchange["personal_accuracy"] == pytest.approx(after, abs=1e-9)
    assert abs(after - before) > 0.02 and before != pytest.approx(result.accuracy, abs=1e-9)
    assert exchange["bytes_up"] == 8 * 5 * 3  # three numbers a client


def test_a_fine_tuned_head_is_the_clients_own_copy() -> None:
    run = small(method="fedbabu")
    replica = Replica(run.world, torch.device("cpu"))
    said = replica.answer("personal", Job(3, 0, 0.1, 0.25), run.state.weights, {}, None)
    assert said.keys() == {"before", "after", "clients"} and float(said["clients"]) == 1
    assert replica.flat.numpy().tobytes() == run.state.weights.numpy().tobytes()


def test_more_epochs_help_clients_with_few_classes() -> None:
    settings = LARGER | {"partition": "pathological:2"}
    found = [small(method=f"fedbabu:epochs={e}", **settings).fit().exchanges[0] for e in (1, 20)]
    assert found[0]["personal_accuracy_before"] == found[1]["personal_accuracy_before"]
    assert found[1]["personal_accuracy"] > found[0]["personal_accuracy"] > found[0]["personal_accuracy_before"]


def test_clients_with_a_domain_are_judged_on_it() -> None:
    data = "synthetic:samples=180,test=120,classes=3,domains=3"
    run = small(method="fedbabu", data=data, partition="domain", clients=None)
    result = run.fit()
    before, after = personal(run, result.weights)
    assert result.exchanges[0]["personal_accuracy_before"] == pytest.approx(before, abs=1e-9)
    assert result.exchanges[0]["personal_accuracy"] == pytest.approx(after, abs=1e-9)
    domains = result.exchanges[0]["domain_accuracy"].values()
    assert len(set(domains)) > 1 and after > before


def test_without_a_look_at_the_test_part_the_validation_part_judges() -> None:
    data = "synthetic:samples=400,test=150,classes=6"
    settings = LARGER | {"data": data, "validation": 0.3}
    run = small(method="fedbabu", final_test=False, **settings)
    result = run.fit()
    validation, test = (personal(run, result.weights, part)[1] for part in ("validation", "test"))
    assert validation != pytest.approx(test, abs=1e-9)
    assert result.exchanges[0]["personal_accuracy"] == pytest.approx(validation, abs=1e-9)
    tested = small(method="fedbabu", **settings).fit()
    assert tested.exchanges[0]["personal_accuracy"] == pytest.approx(test, abs=1e-9)


def odd_classes(tmp_path: Any, keep: list[int]) -> Federation:
    """Three clients with classes 0 and 1, 1 and 2, and 2 and 3; the test part has only some classes."""
    base = load("synthetic:samples=120,test=80,classes=4")
    there = torch.isin(base.test.labels, torch.tensor(keep))
    dataset = Dataset.build("odd", base.classes, base.train, Part(base.test.images[there], base.test.labels[there]))
    places = [np.flatnonzero(base.train.labels.numpy() == label).tolist() for label in range(4)]
    held = [places[0] + places[1][:10], places[1][10:] + places[2][:5], places[2][5:] + places[3]]
    (tmp_path / "split.json").write_text(str(held))
    return small(dataset=dataset, data="given:odd", method="fedbabu", partition=f"from_file:{tmp_path}/split.json",
                 clients=3)  # fmt: skip


@pytest.mark.parametrize("keep", [[0, 1, 2, 3], [0, 2], [0, 1], [3]])
def test_classes_that_the_test_part_does_not_have_do_not_count(tmp_path: Any, keep: list[int]) -> None:
    run = odd_classes(tmp_path, keep)
    result = run.fit()
    before, after = personal(run, result.weights)
    assert result.exchanges[0]["personal_accuracy_before"] == pytest.approx(before, abs=1e-9)
    assert result.exchanges[0]["personal_accuracy"] == pytest.approx(after, abs=1e-9)
    assert after > 0.2


def test_a_domain_without_test_samples_does_not_count() -> None:
    base = load("synthetic:samples=90,test=60,classes=3,domains=2")
    assert base.test.domains is not None
    there = base.test.domains == 0
    test = Part(base.test.images[there], base.test.labels[there], base.test.domains[there])
    dataset = Dataset.build("half", base.classes, base.train, test, domains=base.domains)
    run = small(dataset=dataset, data="given:half", method="fedbabu", partition="domain", clients=2)
    result = run.fit()
    before, after = personal(run, result.weights)
    assert result.exchanges[0]["personal_accuracy_before"] == pytest.approx(before, abs=1e-9)
    assert result.exchanges[0]["personal_accuracy"] == pytest.approx(after, abs=1e-9)
    assert before == pytest.approx(result.accuracy)  # that of the one client that is judged


# With others


def test_the_head_that_moon_makes_is_the_one_that_is_frozen() -> None:
    for method in ("freeze+moon", "moon+freeze", "moon+fedbabu"):
        run = small(method=method)
        network = run.world.network()
        assert network.get_parameter("head.weight").shape == (4, 256)
        assert run.layout.count(Policy.FIXED) == 4 * 256 + 4
    run = small(method="freeze:reset=true+moon")
    assert run.layout.count(Policy.RESET) == 4 * 256 + 4
    before = bytes_of(run.world.network().state_dict())
    after = bytes_of(run.fit().weights)
    assert {k for k in before if before[k] == after[k]} == {"head.weight", "head.bias"}


@pytest.mark.parametrize("method", ["freeze+fedbabu", "fedbabu+spherefed", "spherefed+freeze:reset=true"])
def test_one_decides_the_head(method: str) -> None:
    with pytest.raises(UserError, match="both decide the classifier head; use one of them"):
        parse(method)


def test_a_frozen_head_can_be_refitted() -> None:
    run = small(method="freeze+ffc", rounds=3)
    result = run.fit()
    assert not torch.equal(result.weights["head.weight"], run.world.network().get_parameter("head.weight"))
    assert result.accuracy > run.history[-1]["accuracy"]


def test_a_head_that_starts_afresh_can_be_refitted_and_is_judged_as_it_is_kept() -> None:
    run = small(method="freeze:reset=true+ffc", rounds=3)
    result = run.fit()
    inputs, labels = Plain(run, torch.float32).part("test")
    said = final_network(run, result.weights)(inputs).logits.argmax(1)
    assert result.accuracy == pytest.approx(float((said == labels).float().mean()))
