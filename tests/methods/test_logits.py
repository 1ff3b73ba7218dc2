"""FedRS and FedLC: softmax over a client's own classes, against the loss written out class by class in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isofed.errors import UserError
from isofed.federation import Federation
from isofed.models import Output
from tests.engine.plain import Correction, Gradients, Named, distance, participants, small
from tests.methods.written import Written, after_steps, agree, same_bytes, visit

SKEWED = {"partition": "dirichlet:0.3,min=5"}  # here every client but one lacks a class
TWO = {"partition": "pathological:2"}  # and here everyone lacks two


class Logits(Written):
    """Cross-entropy of logits that the client's label counts have changed."""

    def __init__(self, run: Federation, alpha: float | None = None, tau: float = 0.1) -> None:
        super().__init__(run, self.changed)
        self.alpha, self.tau, self.own = alpha, tau, [0]

    def changed(self, output: Output, inputs: Tensor, labels: Tensor) -> Tensor:
        terms = []
        for logits, label in zip(output.logits, labels.tolist(), strict=True):
            if self.alpha is not None:  # FedRS
                scaled = [x if n else self.alpha * x for x, n in zip(logits, self.own, strict=True)]
                terms.append(torch.stack(scaled).exp().sum().log() - scaled[label])
            else:  # FedLC: a sum over the classes that are there
                there = [c for c, n in enumerate(self.own) if n]
                shifted = {c: logits[c] - self.tau * self.own[c] ** (-1 / 4) for c in there}
                terms.append(torch.stack([shifted[c].exp() for c in there]).sum().log() - shifted[label])
        return torch.stack(terms).mean()

    def local(
        self, start: Named, round: int, client: int, correct: Correction | None = None, lr: float | None = None
    ) -> tuple[Named, list[Gradients]]:
        self.own = self.counts(client)
        return super().local(start, round, client, correct, lr)


def lacks(run: Federation) -> list[int]:
    """How many classes each client does not have."""
    plain = Logits(run)
    return [plain.counts(k).count(0) for k in range(len(plain.sizes))]


@pytest.mark.parametrize(
    ("method", "settings", "known"),
    [
        ("fedrs", {**SKEWED, "rounds": 3}, {"alpha": 0.5}),
        ("fedrs", {**TWO, "model": "cnn", "participation": 0.5}, {"alpha": 0.5}),
        ("fedrs:alpha=0.1", {**TWO, "momentum": 0.9}, {"alpha": 0.1}),
        ("fedrs:alpha=0", TWO, {"alpha": 0.0}),
        ("fedlc", {**SKEWED, "rounds": 3}, {"tau": 0.1}),
        ("fedlc", {**TWO, "model": "cnn", "participation": 0.5}, {"tau": 0.1}),
        ("fedlc:tau=1.5", {**SKEWED, "momentum": 0.9}, {"tau": 1.5}),
        ("fedlc:tau=0", {**SKEWED, "seed": 1}, {"tau": 0.0}),
    ],
)
def test_a_federation(method: str, settings: dict[str, Any], known: dict[str, float]) -> None:
    run = small(method=method, **settings)
    assert max(lacks(run)) > 0
    agree(run, Logits(run, **known))
    assert distance(run.fit().weights, small(**settings).fit().weights) > 1e-3


def test_the_clients_above() -> None:
    assert sorted(lacks(small(**SKEWED))) == [0, 1, 1, 2]
    assert lacks(small(**TWO)) == [2, 2, 2, 2]
    assert participants(small(**TWO, participation=0.5), 2) == [1, 3]


@pytest.mark.parametrize("settings", [TWO, {**TWO, "model": "cnn"}, {}])
def test_alpha_of_one_is_fedavg(settings: dict[str, Any]) -> None:
    assert same_bytes(small(method="fedrs:alpha=1", **settings), small(**settings))


def test_fedrs_leaves_clients_with_all_classes_alone() -> None:
    run, base = small(method="fedrs", **SKEWED), small(**SKEWED)
    for client, missing in enumerate(lacks(run)):
        assert torch.equal(visit(run, client).update, visit(base, client).update) == (missing == 0)


def test_fedlc_with_all_classes_and_no_margin_is_fedavg() -> None:
    assert lacks(small()) == [0, 0, 0, 0]
    assert same_bytes(small(method="fedlc:tau=0"), small())
    assert not same_bytes(small(method="fedlc"), small())


def head_gradient(method: str, client: int) -> tuple[Tensor, Tensor, list[int]]:
    """The gradient of the first step in the head's rows, and which classes the client lacks."""
    run = small(method=method, **TWO)
    step = after_steps(run, client=client).local.step
    named = step.named(step.grad)
    absent = [c for c, n in enumerate(Logits(run).counts(client)) if not n]
    return named["head.weight"], named["head.bias"], absent


@pytest.mark.parametrize("client", range(4))
@pytest.mark.parametrize("method", ["fedlc", "fedlc:tau=3", "mixup:gamma=1+fedlc"])
def test_fedlc_gives_absent_classes_no_gradient_at_all(method: str, client: int) -> None:
    weight, bias, absent = head_gradient(method, client)
    assert len(absent) == 2
    for c in range(4):
        if c in absent:
            assert (weight[c] == 0).all() and bias[c] == 0
        else:
            assert float(weight[c].norm()) > 1e-3 and float(bias[c].abs()) > 1e-6


def test_fedlc_keeps_rows_of_absent_classes_through_a_visit() -> None:
    run, base = small(method="mixup:gamma=1+fedlc", **TWO), small(**TWO)
    for client in range(4):
        rows = run.layout.views(visit(run, client).update, run.layout.shared_trained)["head.weight"]
        others = run.layout.views(visit(base, client).update, run.layout.shared_trained)["head.weight"]
        for c, n in enumerate(Logits(run).counts(client)):
            assert bool((rows[c] == 0).all()) == (n == 0)
            assert float(others[c].norm()) > 1e-3  # without it they move


def test_fedlc_leaves_absent_classes_out_however_low_the_others_are() -> None:
    # A constant added to all logits changes no softmax; a class that is merely made small would now be the largest.
    losses = []
    for shift in (0.0, -64.0):
        run = small(method="fedlc", local_epochs=1, batch_size=32, **TWO)
        run.layout.views(run.state.weights)["head.bias"].add_(shift)
        outcome = visit(run, 0)
        assert outcome.steps == 1
        losses.append(outcome.loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_fedrs_scales_the_logits_of_absent_classes_only() -> None:
    run = small(method="fedrs:alpha=0.25", **TWO)
    for client in range(4):
        step = after_steps(run, client=client).local.step
        plain = Logits(run)
        own = plain.counts(client)
        inputs, labels = plain.batches(1, client)[0]
        logits = plain.network(inputs).logits.detach()
        for c, n in enumerate(own):
            logits[:, c] *= 1 if n else 0.25
        pushed = logits.softmax(1)
        for i, label in enumerate(labels.tolist()):
            pushed[i, label] -= 1
        # The bias of class c gets the mean of the factor times (probability minus label).
        wanted = torch.stack([(1 if n else 0.25) * pushed[:, c].mean() for c, n in enumerate(own)])
        torch.testing.assert_close(step.named(step.grad)["head.bias"].double(), wanted, rtol=1e-5, atol=1e-7)


def test_alpha_of_zero_gives_absent_rows_no_gradient() -> None:
    weight, bias, absent = head_gradient("fedrs:alpha=0", 0)
    assert all((weight[c] == 0).all() and bias[c] == 0 for c in absent)
    weight, bias, absent = head_gradient("fedrs", 0)
    assert all((weight[c] != 0).any() and bias[c] != 0 for c in absent)


def test_soft_labels_stay_finite() -> None:
    for method in ("mixup:gamma=1+fedlc", "mixup:gamma=1+fedrs:alpha=0"):
        run = small(method=method, **TWO)
        run.fit()
        assert torch.isfinite(run.state.weights).all()
        assert all(0 < line["local_loss"] < 5 for line in run.history)


def test_two_base_losses_are_refused() -> None:
    for method in ("fedrs+fedlc", "fedlc+spherefed"):
        with pytest.raises(UserError, match="both decide the base loss"):
            small(method=method)
