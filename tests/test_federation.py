"""A whole run: how it is judged, what it records and reports, and on which data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import isofed
from isofed.data import load
from isofed.engine.workers import Pool
from isofed.errors import UserError
from isofed.federation import Federation
from isofed.layout import Policy
from isofed.models import create
from isofed.progress import Watcher
from tests.engine.own_methods import HERE
from tests.engine.plain import Named, Plain, distance, participants, small

# Judging


class Judged:
    """Scores of weights by name, from a fresh network and a plain loop in float64."""

    def __init__(self, run: Federation, weights: Named, part: str) -> None:
        s, data = run.settings, run.world.dataset
        network = create(s.model, classes=len(data.classes), shape=data.shape, norm=s.norm).double()
        network.load_state_dict({k: v.double() for k, v in weights.items()})
        network.eval()
        inputs, self.labels = Plain(run).part(part)
        with torch.no_grad():
            logits = network(inputs).logits
        self.losses = cross_entropy(logits, self.labels, reduction="none").numpy()
        self.right = (logits.argmax(1) == self.labels).numpy()

    def accuracy(self, where: Any = slice(None)) -> float:
        return float(self.right[where].mean())


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("executor", ["serial", "workers"])
def test_scores_are_those_of_a_plain_network(model: str, executor: str, two_workers: Pool) -> None:
    # 1,100 test and 600 training samples: more than one piece of 512, and a last one that is not full.
    data = "synthetic:samples=600,test=1100,classes=5,channels=2"
    run = small(model=model, data=data, lr=0.05, executor=executor, pool=two_workers)
    result = run.fit()
    wanted = Judged(run, result.weights, "test")
    line = result.history[-1]
    assert result.accuracy == line["accuracy"] == pytest.approx(wanted.accuracy(), abs=1e-12)
    assert result.loss == line["loss"] == pytest.approx(float(wanted.losses.mean()), rel=1e-6)
    per_class = [wanted.accuracy(wanted.labels.numpy() == c) for c in range(5)]
    assert line["class_accuracy"] == result.class_accuracy == pytest.approx(per_class)
    train = Judged(run, result.weights, "train")
    assert line["train_loss"] == pytest.approx(float(train.losses.mean()), rel=1e-6)
    assert 0.2 < result.accuracy < 1  # neither guessing nor trivial


def test_scores_per_domain() -> None:
    data = "synthetic:samples=200,test=130,classes=4,domains=3"
    run = small(model="cnn", data=data, partition="domain", clients=3)
    result = run.fit()
    wanted = Judged(run, result.weights, "test")
    domains = run.world.dataset.test.domains
    assert domains is not None
    for number, name in enumerate(run.world.dataset.domains):
        found = result.history[-1]["domain_accuracy"][name]
        assert found == pytest.approx(wanted.accuracy((domains == number).numpy()))
    assert result.accuracy == pytest.approx(wanted.accuracy())


def test_a_class_without_test_samples_has_no_score() -> None:
    from isofed.data import Dataset

    base = load("synthetic:samples=60,test=30,classes=3")
    kept = (base.test.labels != 1).nonzero()[:, 0].numpy()
    data = Dataset.build("gap", base.classes, base.train, base.test.subset(kept))
    result = small(dataset=data, data=f"given:{data.name}", rounds=1).fit()
    assert result.class_accuracy[1] is None
    assert all(v is not None for i, v in enumerate(result.class_accuracy) if i != 1)


def test_training_loss_can_be_left_out_and_evaluation_be_rare() -> None:
    result = small(rounds=5, evaluate_every=2, train_loss=False).fit()
    assert ["accuracy" in line for line in result.history] == [False, True, False, True, True]  # the last one always
    assert not any("train_loss" in line for line in result.history)
    every = small(rounds=5).fit()
    assert all("train_loss" in line for line in every.history)
    assert every.accuracy == result.accuracy
    assert result.best_accuracy == max(line.get("accuracy", 0) for line in result.history)


def test_target() -> None:
    base = small(rounds=8, lr=0.05, data="synthetic:samples=300,test=200,classes=4").fit()
    curve = [line["accuracy"] for line in base.history]
    target = curve[3]
    wanted = next(i + 1 for i, a in enumerate(curve) if a >= target)
    settings: dict[str, Any] = {"rounds": 8, "lr": 0.05, "data": "synthetic:samples=300,test=200,classes=4"}
    counted = small(**settings, target=target).fit()
    assert (counted.rounds, counted.rounds_to_target) == (8, wanted)
    stopped = small(**settings, target=target, stop_at_target=True).fit()
    assert (stopped.rounds, stopped.rounds_to_target, len(stopped.history)) == (wanted, wanted, wanted)
    assert stopped.accuracy == curve[wanted - 1]
    assert base.rounds_to_target is None
    never = small(**(settings | {"rounds": 2}), target=1.0, stop_at_target=True).fit()
    assert (never.rounds, never.rounds_to_target) == (2, None)


def test_validation_judges_the_rounds_and_the_test_part_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from isofed.engine.serial import Serial

    asked: list[str] = []
    score = Serial.score

    def counted(self: Serial, part: str, *rest: Any) -> Any:
        asked.append(part)
        return score(self, part, *rest)

    monkeypatch.setattr(Serial, "score", counted)
    run = small(rounds=3, validation=0.3, data="synthetic:samples=200,test=150,classes=4")
    parts = run.world.parts
    assert (len(parts["train"]), len(parts["validation"]), len(parts["test"])) == (140, 60, 150)
    assert sum(len(c) for c in run.world.clients) == 140
    result = run.fit()
    assert asked.count("test") == 1 and asked[-1] == "test"
    assert asked.count("validation") == 3
    held_out = Judged(run, result.weights, "validation")
    assert result.validation_accuracy == result.history[-1]["accuracy"] == pytest.approx(held_out.accuracy())
    assert result.accuracy == pytest.approx(Judged(run, result.weights, "test").accuracy())

    asked.clear()
    never = small(rounds=2, validation=0.3, final_test=False, data="synthetic:samples=200,test=150,classes=4").fit()
    assert "test" not in asked
    assert never.accuracy == never.validation_accuracy == never.history[-1]["accuracy"]


def test_without_validation_the_training_part_is_whole() -> None:
    run = small()
    assert sorted(np.concatenate(run.world.clients).tolist()) == list(range(100))
    assert "validation" not in run.world.parts
    assert run.fit().validation_accuracy is None


# The record


def test_the_line_of_a_round() -> None:
    run = small(participation=0.75, rounds=2, lr_schedule="step:every=1,factor=0.5", model="cnn")
    result = run.fit()
    shared = run.layout.count(Policy.SHARED)
    state = create("cnn", classes=4, shape=(1, 8, 8)).state_dict()
    assert shared == sum(v.numel() for v in state.values())
    for number, line in enumerate(result.history, 1):
        who = participants(run, number)
        sizes = [len(run.world.clients[k]) for k in who]
        assert (line["round"], line["clients"]) == (number, 3)
        assert line["lr"] == pytest.approx(0.1 * 0.5 ** (number - 1))
        assert line["bytes_up"] == line["bytes_down"] == 3 * 4 * shared
        assert line["samples"] + line["skipped_batches"] == 2 * sum(sizes)
        assert line["events"] == []
        assert line["seconds"] > 0 and line["evaluate_seconds"] > 0
    assert result.bytes_up == sum(line["bytes_up"] for line in result.history)
    assert result.seconds == pytest.approx(sum(line["seconds"] for line in result.history))
    assert (result.method, result.seed, result.rounds, result.events) == ("fedavg", 0, 2, 0)


def test_the_learning_rate_of_a_round_is_the_one_used() -> None:
    # Plain SGD on one batch: the update is the gradient times the rate.
    def first(lr: float, schedule: str, rounds: int) -> torch.Tensor:
        run = small(lr=lr, lr_schedule=schedule, rounds=rounds, clients=1, partition="iid", batch_size=100,
                    local_epochs=1)  # fmt: skip
        before: list[torch.Tensor] = []

        class Look(Watcher):
            def round(self, line: dict[str, Any]) -> None:
                before.append(run.state.weights.clone())

        start = run.state.weights.clone()
        run.fit(Look())
        return torch.stack([b - a for a, b in zip([start, *before], before, strict=False)])

    slow, fast = first(0.01, "constant", 1), first(0.02, "constant", 1)
    torch.testing.assert_close(2 * slow, fast, rtol=1e-4, atol=1e-6)
    stepped = first(0.02, "step:every=1,factor=0.5", 2)
    constant = first(0.02, "constant", 2)
    torch.testing.assert_close(2 * stepped[1], constant[1], rtol=1e-4, atol=1e-6)


def test_the_mean_local_loss_is_weighted_like_the_clients() -> None:
    run = small(rounds=1, local_steps=1, local_epochs=None, batch_size=100)
    line = run.fit().history[0]
    plain = Plain(run)
    losses = []
    for k in range(4):
        ((inputs, labels),) = plain.batches(1, k)
        losses.append(float(cross_entropy(plain.network(inputs).logits, labels).detach()))
    wanted = sum(n * x for n, x in zip(plain.sizes, losses, strict=True)) / sum(plain.sizes)
    assert line["local_loss"] == pytest.approx(wanted, rel=1e-6)


def test_participation_takes_the_floor_and_at_least_one() -> None:
    for share, count in ((1.0, 4), (0.99, 3), (0.5, 2), (0.25, 1), (0.01, 1), (0.75, 3)):
        assert small(participation=share, rounds=1).fit().history[0]["clients"] == count
    # 0.29 * 100 is 28.999999999999996 in floating point, and means 29.
    run = small(clients=100, partition="iid", participation=0.29, rounds=1)
    assert run.fit().history[0]["clients"] == 29


def test_clients_are_drawn_evenly_and_anew() -> None:
    run = small(participation=0.5, rounds=200, local_steps=1, local_epochs=None, evaluate_every=200, train_loss=False)
    seen = np.zeros(4)
    for number in range(1, 201):
        for k in participants(run, number):
            seen[k] += 1
    # 200 draws of 2 out of 4: each about 100, with a standard deviation of 7.
    assert abs(seen - 100).max() < 30
    assert len({tuple(participants(run, n)) for n in range(1, 30)}) > 3


def test_the_result_names_every_tensor_of_the_network() -> None:
    run = small(model="cnn", rounds=1)
    result = run.fit()
    network = create("cnn", classes=4, shape=(1, 8, 8))
    assert sorted(result.weights) == sorted(network.state_dict())
    network.load_state_dict(result.weights)
    before = {k: v.clone() for k, v in result.weights.items()}
    run.state.weights.zero_()  # the result is a copy
    assert all(torch.equal(result.weights[k], before[k]) for k in before)


def test_watchers_hear_everything() -> None:
    heard: list[str] = []

    class Ear(Watcher):
        def start(self, run: Federation) -> None:
            heard.append(f"start {run.round}")

        def client(self, done: int, of: int) -> None:
            heard.append(f"{done}/{of}")

        def round(self, line: dict[str, Any]) -> None:
            heard.append(f"round {line['round']}")

        def end(self, result: isofed.Result) -> None:
            heard.append(f"end {result.rounds}")

    small(clients=2, partition="iid").fit(Ear())
    assert heard == ["start 0", "1/2", "2/2", "round 1", "1/2", "2/2", "round 2", "end 2"]


# Data, devices, learning


def test_fitting_twice_gives_the_same_result() -> None:
    run = small(method=f"{HERE}:Count+{HERE}:Twice", rounds=1)
    first, second = run.fit(), run.fit()
    assert distance(first.weights, second.weights) == 0
    assert first.accuracy == second.accuracy


def test_your_own_data() -> None:
    from isofed.data import Dataset, Part

    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.normal(2, 3, (60, 4, 5, 2)).astype(np.float32))
    labels = torch.arange(60) % 3
    data = Dataset.build("mine", ["a", "b", "c"], Part(images, labels), Part(images[:9], labels[:9]))
    run = small(dataset=data, data=f"given:{data.name}", rounds=1)
    assert run.world.dataset is data
    result = run.fit()
    wanted = Judged(run, result.weights, "test")
    assert result.accuracy == pytest.approx(wanted.accuracy())
    assert result.loss == pytest.approx(float(wanted.losses.mean()), rel=1e-6)


def test_devices_that_are_not_there() -> None:
    with pytest.raises(UserError, match="there is no device 'quantum'"):
        small(device="quantum")
    with pytest.raises(UserError, match="device=meta is not supported"):
        small(device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="needs a GPU"):
            small(device="cuda")


def test_learning_goes_somewhere() -> None:
    result = isofed.Federation(
        data="digits", partition="dirichlet:0.5", clients=5, rounds=6, local_epochs=2, model="cnn", executor="serial"
    ).fit()
    assert result.accuracy > 0.85
    assert result.history[-1]["train_loss"] < 0.5 * result.history[0]["train_loss"]
    assert math.isfinite(result.history[0]["local_loss"])
