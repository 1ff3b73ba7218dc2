"""The plain federation with a loss of the test's own, and what the tests of methods do with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from isofed.engine.replica import Job, Outcome, Replica
from isofed.federation import Federation
from isofed.layout import Tensors
from isofed.models import Output
from tests.engine.plain import (
    TOLERANCE,
    Correction,
    Gradients,
    Named,
    Plain,
    distance,
    mean,
    participants,
)

CPU = torch.device("cpu")
Objective = Callable[[Output, Tensor, Tensor], Tensor]  # of a pass, the inputs and the labels


class Written(Plain):
    """A plain federation in float64 that trains with a loss written out by the test."""

    def __init__(self, run: Federation, objective: Objective) -> None:
        super().__init__(run)
        self.objective = objective
        self.losses: dict[tuple[int, int], float] = {}  # of each visit (round, client): the mean over its samples

    def backward(self, inputs: Tensor, labels: Tensor) -> float:
        """Fill the gradients of one step, and give the loss."""
        loss = self.objective(self.network(inputs), inputs, labels)
        loss.backward()
        return float(loss.detach())

    def local(
        self, start: Named, round: int, client: int, correct: Correction | None = None, lr: float | None = None
    ) -> tuple[Named, list[Gradients]]:
        data, self.loss_sum = self.batches(round, client), 0.0
        model, seen = self.train(start, data, correct, lr)
        self.losses[round, client] = self.loss_sum / sum(len(labels) for _, labels in data)
        return model, seen

    def counts(self, client: int) -> list[int]:
        """How many samples of each class a client has."""
        own = self.part("train")[1][torch.from_numpy(self.world.clients[client])].tolist()
        return [own.count(c) for c in range(len(self.world.dataset.classes))]


def by_hand(plain: Written, run: Federation) -> Named:
    """All rounds, averaged by sample counts."""
    server = plain.start()
    for round in range(1, run.settings.rounds + 1):
        who = participants(run, round)
        models = [plain.local(server, round, client)[0] for client in who]
        server = mean(models, [float(plain.sizes[client]) for client in who])
    return server


def agree(run: Federation, plain: Written) -> None:
    """A federation's final model, and its recorded losses, are those computed by hand."""
    wanted = by_hand(plain, run)
    assert distance(run.fit().weights, wanted) < TOLERANCE
    for line in run.history:
        who = participants(run, line["round"])
        losses = [plain.sizes[k] * plain.losses[line["round"], k] for k in who]
        assert line["local_loss"] == pytest.approx(sum(losses) / sum(plain.sizes[k] for k in who), rel=1e-5)


def same_bytes(one: Federation, other: Federation) -> bool:
    """Whether two federations end with the same model, to the last bit."""
    for run in (one, other):
        run.fit()
    return torch.equal(one.state.weights, other.state.weights)


def visit(run: Federation, client: int = 0, round: int = 1, state: Tensors | None = None) -> Outcome:
    """One visit from the present weights; the model that it ends with is kept."""
    job = Job(round, client, run.settings.lr, 1 / len(run.world.clients), keep=True)
    sent = run.settings.method.send(run.state.server)
    outcome = Replica(run.world, CPU).visit(job, run.state.weights, sent, state)
    assert outcome.problem is None
    return outcome


def after_steps(run: Federation, count: int = 1, client: int = 0) -> Replica:
    """A replica that has taken the first steps of a visit; ``step.grad`` is the last one's direction."""
    replica = Replica(run.world, CPU)
    sent = run.settings.method.send(run.state.server)
    arrived = replica._arrive(Job(1, client, run.settings.lr, 0.25), run.state.weights, sent, None)
    replica.local.method.begin(arrived)
    replica.local.network.train()
    for size in arrived.sizes[:count]:
        replica.local.take(size)
    return replica


# The losses.


def cross(output: Output, inputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, sample by sample."""
    terms = [logits.logsumexp(0) - logits[label] for logits, label in zip(output.logits, labels, strict=True)]
    return torch.stack(terms).mean()
