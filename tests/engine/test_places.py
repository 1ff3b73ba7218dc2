"""Places of a round, each by a small method of one's own, on both executors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from isofed.engine.workers import Pool
from isofed.errors import RunError
from isofed.federation import Federation
from isofed.methods import Method, Visit
from isofed.methods.base import Draws
from tests.engine.own import BOTH, own
from tests.engine.own_methods import HERE
from tests.engine.plain import TOLERANCE, Named, Plain, distance, mean, small


@BOTH
def test_combine_by_the_median(executor: str, two_workers: Pool) -> None:
    run = own("Median", two_workers, executor, model="cnn", rounds=2)
    found = run.fit().weights
    plain = Plain(run)
    server, names = plain.start(), plain.trained()
    statistics = [n for n, b in plain.network.named_buffers() if b.is_floating_point()]
    for round in (1, 2):
        models = [plain.local(server, round, k)[0] for k in range(4)]
        # Running statistics too: what clients send beside their weights must not go around the combination.
        server |= {k: torch.stack([m[k] for m in models]).quantile(0.5, dim=0) for k in [*names, *statistics]}
    assert distance(found, server) < TOLERANCE


@BOTH
def test_a_question_after_the_last_round(executor: str, two_workers: Pool) -> None:
    run = own("Count:factor=3", two_workers, executor, rounds=1)
    result = run.fit()
    labels = run.world.parts["train"].labels
    wanted = 3 * torch.bincount(labels, minlength=4).double() / len(labels)
    torch.testing.assert_close(result.weights["head.bias"].double(), wanted, rtol=1e-6, atol=0)
    plain = small(rounds=1).fit().weights
    assert all(torch.equal(result.weights[n], plain[n]) for n in plain if n != "head.bias")
    (line,) = result.exchanges
    assert line["exchange"] == "count"
    assert line["bytes_up"] == 4 * (4 + 1) * 8  # four clients, five numbers of eight bytes
    assert result.accuracy == line["accuracy"] != result.history[-1]["accuracy"]


def test_answers_do_not_change_what_is_trained_or_remembered() -> None:
    with_question, without = own("Count+scaffold"), small(method="scaffold")
    with_question.fit(), without.fit()
    assert torch.equal(with_question.state.weights, without.state.weights)
    for k in range(4):
        assert torch.equal(with_question.state.clients[k]["scaffold.ck"], without.state.clients[k]["scaffold.ck"])


@pytest.mark.parametrize("others", ["", "+feddyn:alpha=0.2", "+fedavgm"])
def test_the_final_model_is_the_one_after_all_questions(others: str, tmp_path: Path) -> None:
    run = small(method=f"{HERE}:Count+{HERE}:Twice{others}", rounds=2, out=tmp_path / "run")
    result = run.fit()
    labels = run.world.parts["train"].labels
    wanted = 2 * torch.bincount(labels, minlength=4).double() / len(labels)
    torch.testing.assert_close(result.weights["head.bias"].double(), wanted, rtol=1e-6, atol=0)
    assert [e["exchange"] for e in result.exchanges] == ["count", "twice"]
    plain = Plain(run)
    inputs, truth = plain.part("test")
    plain.network.load_state_dict({k: v.double() for k, v in result.weights.items()})
    plain.network.eval()
    right = (plain.network(inputs).logits.argmax(1) == truth).double().mean()
    assert result.accuracy == pytest.approx(float(right))
    from isofed.files import load_tensors

    stored, _ = load_tensors(tmp_path / "run" / "model.safetensors")
    assert torch.equal(stored["head.bias"], result.weights["head.bias"])


def test_questions_are_asked_once_however_often_the_run_is_taken_up(tmp_path: Path) -> None:
    text = f"{HERE}:Count+{HERE}:Twice"
    whole = small(method=text, rounds=2, out=tmp_path / "one").fit()
    run = small(method=text, rounds=2, out=tmp_path / "two")
    run.fit()
    (tmp_path / "two" / "result.json").unlink()  # killed just before the end
    (tmp_path / "two" / "model.safetensors").unlink()
    again = Federation.resume(tmp_path / "two").fit()
    assert torch.equal(again.weights["head.bias"], whole.weights["head.bias"])
    assert again.accuracy == whole.accuracy


def test_an_answer_that_fails_says_so() -> None:
    class Silent(Method):
        exchanges = ("why",)

        def answer(self, exchange: str, visit: Any) -> Any:
            raise ValueError("no answer")

    with pytest.raises(RunError, match="no answer"):
        small(method=Silent(), rounds=1).fit()


@BOTH
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_frozen_copies(model: str, executor: str, two_workers: Pool) -> None:
    import copy

    run = own("Near:strength=0.5", two_workers, executor, model=model, rounds=3, participation=0.75)
    found = run.fit().weights
    from tests.engine.plain import participants

    plain = Plain(run)
    server, last = plain.start(), dict[int, Named]()
    for round in (1, 2, 3):
        who = participants(run, round)
        models = []
        for k in who:
            frozen = []
            for weights in (server, last.get(k, server)):
                plain.network.load_state_dict(weights)
                frozen.append(copy.deepcopy(plain.network).eval())
            net = plain.network
            net.load_state_dict(server)
            net.train()
            optimiser = torch.optim.SGD(net.parameters(), lr=run.settings.lr)
            for inputs, labels in plain.batches(round, k):
                output = net(inputs)
                with torch.no_grad():
                    targets = [f(inputs).features for f in frozen]
                near = [(output.features - t).square().mean() for t in targets]
                loss = cross_entropy(output.logits, labels) + 0.5 * (near[0] + 2 * near[1])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            last[k] = plain.start()
            models.append(last[k])
        server = mean(models, [float(plain.sizes[k]) for k in who])
    assert distance(found, server) < TOLERANCE
    assert distance(found, small(model=model, rounds=3, participation=0.75).fit().weights) > 1e-4


def test_a_copy_that_is_not_filled_is_the_model_as_received_whoever_was_there_before() -> None:
    left, filled = own("Teacher", rounds=2), own("Teacher:fill=true", rounds=2)
    found = left.fit().weights
    assert distance(found, filled.fit().weights) == 0
    assert distance(found, small().fit().weights) > 0


def test_soft_labels_and_planned_draws() -> None:
    run = own("Mix", rounds=1, clients=1, partition="iid")
    found = run.fit().weights
    plain = Plain(run)
    net = plain.network
    data = plain.batches(1, 0)
    weights = np.linspace(0.6, 0.9, len(data), dtype=np.float32)
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), lr=run.settings.lr)
    for (inputs, labels), weight in zip(data, weights.tolist(), strict=True):
        hot = one_hot(labels, 4).double()
        mixed, soft = (weight * t + (1 - weight) * t.flip(0) for t in (inputs, hot))
        optimiser.zero_grad()
        (-(soft * net(mixed).logits.log_softmax(1)).sum(1).mean()).backward()
        optimiser.step()
    assert distance(found, plain.start()) < TOLERANCE


def test_a_plan_sees_the_client_that_it_is_for() -> None:
    seen: list[tuple[int, list[int], bool]] = []

    @dataclass(frozen=True)
    class Look(Method):
        def plan(self, visit: Visit, rng: np.random.Generator) -> Draws:
            seen.append((visit.client, visit.label_counts.tolist(), torch.equal(visit.start, visit.weights)))
            return {}

    run = small(method=Look(), rounds=2)
    run.fit()
    labels = run.world.parts["train"].labels.numpy()
    held = [np.bincount(labels[samples], minlength=4).tolist() for samples in run.world.clients]
    assert seen == [(client, held[client], True) for client in (0, 1, 2, 3) * 2]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_two_passes_around_a_step(momentum: float) -> None:
    run = own("Ascend:rho=0.1", rounds=1, clients=1, partition="iid", momentum=momentum)
    found = run.fit().weights
    plain = Plain(run)
    net = plain.network
    net.train()
    parameters = list(net.parameters())
    optimiser = torch.optim.SGD(parameters, lr=run.settings.lr, momentum=momentum)
    for inputs, labels in plain.batches(1, 0):
        first = torch.autograd.grad(cross_entropy(net(inputs).logits, labels), parameters)
        norm = torch.cat([g.reshape(-1) for g in first]).norm()
        with torch.no_grad():
            for p, g in zip(parameters, first, strict=True):
                p.add_(0.1 * g / norm)
        optimiser.zero_grad()
        cross_entropy(net(inputs).logits, labels).backward()
        with torch.no_grad():
            for p, g in zip(parameters, first, strict=True):
                p.sub_(0.1 * g / norm)
        optimiser.step()
    assert distance(found, plain.start()) < TOLERANCE
