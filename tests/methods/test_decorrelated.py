"""FedDecorr, DeCov and Structured-DeCov, whole, against correlations and covariances taken one by one in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from isofed.models import Output
from tests.engine.plain import TOLERANCE, distance, small
from tests.methods.written import Objective, Written, after_steps, agree, cross, same_bytes, visit

NOTHING = torch.zeros(()).double()


def covariance(z: Tensor) -> Tensor:
    """The biased covariance over a batch, as a mean of outer products."""
    away = z - z.mean(0)
    return torch.stack([torch.outer(row, row) for row in away]).mean(0)


def decorrelation(z: Tensor, form: str = "code") -> Tensor:
    """FedDecorr's loss from the correlation matrix.

    code: (N - 1)^2 / N times the mean of the squared correlations off the diagonal; paper: the sum over all entries of
    ((N - 1) / N correlation)^2, divided by d^2. Every variance has 1e-8 added, without which a dead unit would divide
    by zero.
    """
    count, width = z.shape
    if count < 2:
        return NOTHING
    unbiased = covariance(z) * count / (count - 1)
    length = (unbiased.diagonal() + 1e-8).sqrt()
    squared = (unbiased / length / length[:, None]) ** 2
    if form == "paper":
        return ((count - 1) / count) ** 2 * squared.mean()
    off = squared.sum() - squared.diagonal().sum()
    return (count - 1) ** 2 / count * off / (width * (width - 1))


def decov(z: Tensor, group: int = 1) -> Tensor:
    """Half the sum of squared covariances of units in different groups, row by row."""
    found = covariance(z)
    total = NOTHING
    for i in range(len(found)):
        first = i // group * group
        row = torch.cat([found[i, :first], found[i, first + group :]])
        total = total + row.pow(2).sum()
    return total / 2


def with_term(term: Callable[[Tensor], Tensor], weight: float) -> Objective:
    def objective(output: Output, inputs: Tensor, labels: Tensor) -> Tensor:
        return cross(output, inputs, labels) + weight * term(output.features)

    return objective


# On the pooled features of a cnn. A ReLU unit of the mlp that is barely alive in one sample of a batch has a deviation
# of 1e-4 and less, and its gradient, divided by that, is mostly rounding: there float32 and float64 part, in this
# library as in the plain federation.
@pytest.mark.parametrize(
    ("method", "settings", "form", "beta"),
    [
        ("feddecorr", {}, "code", 0.1),  # 64 features, 16 samples: the smaller product is taken
        ("feddecorr", {"batch_size": 38, "momentum": 0.9}, "code", 0.1),  # the other way
        ("feddecorr:beta=0.7", {"participation": 0.5, "rounds": 3, "lr": 0.01}, "code", 0.7),
        ("feddecorr:form=paper,beta=1.6", {}, "paper", 1.6),
        (
            "feddecorr:form=paper,beta=1.6",
            {"data": "synthetic:samples=300,test=9", "batch_size": 70, "rounds": 1},
            "paper",
            1.6,
        ),
        ("feddecorr", {"batch_size": 7, "norm": "group:2", "rounds": 1, "lr": 0.01}, "code", 0.1),  # a batch of one too
    ],
)
def test_feddecorr(method: str, settings: dict[str, Any], form: str, beta: float) -> None:
    run = small(method=method, model="cnn", **({"local_epochs": 1} | settings))
    plain = Written(run, with_term(lambda z: decorrelation(z, form), beta))
    assert "norm" not in settings or 1 in [len(labels) for k in range(4) for _, labels in plain.batches(1, k)]
    agree(run, plain)


@pytest.mark.parametrize(
    ("method", "settings", "group", "weight"),
    [
        ("decov", {}, 1, 0.001),
        ("decov:weight=0.01", {"model": "cnn", "rounds": 1}, 1, 0.01),
        ("structured_decov", {}, 8, 0.001),
        ("structured_decov:weight=0.02,group=5", {"rounds": 1}, 5, 0.02),  # 64 units: the last group has four
        ("structured_decov:group=1", {"rounds": 1}, 1, 0.001),
    ],
)
def test_decov(method: str, settings: dict[str, Any], group: int, weight: float) -> None:
    run = small(method=method, **settings)
    agree(run, Written(run, with_term(lambda z: decov(z, group), weight)))


@pytest.mark.parametrize("option", ["feddecorr:beta", "decov:weight", "structured_decov:weight"])
def test_a_weight_of_zero_is_fedavg_and_the_default_is_not(option: str) -> None:
    for model in ("mlp", "cnn"):
        base = small(model=model)
        assert same_bytes(small(method=f"{option}=0", model=model), base)
        default = small(method=option.split(":")[0], model=model)
        assert not same_bytes(default, base)
        if model == "mlp" or "corr" in option:  # a thousandth of the small covariances of a cnn's features is little
            assert distance(default.fit().weights, base.fit().weights) > 1e-5


def test_one_group_of_all_features_is_free() -> None:
    assert same_bytes(small(method="structured_decov:group=64,weight=1", rounds=1), small(rounds=1))
    assert not same_bytes(small(method="structured_decov:group=63,weight=1", rounds=1), small(rounds=1))
    assert same_bytes(small(method="structured_decov:group=1", rounds=1), small(method="decov", rounds=1))


def test_the_two_forms_differ_by_the_batch_and_a_constant() -> None:
    # Their gradients differ by the factor N d / (d - 1): the diagonal of the paper's form is a constant.
    settings: dict[str, Any] = {"partition": "iid", "batch_size": 25, "local_epochs": 1, "rounds": 1, "model": "cnn"}
    base, code, paper = (
        visit(small(method=m, **settings)) for m in ("fedavg", "feddecorr:beta=1", "feddecorr:beta=1,form=paper")
    )
    one, other = (code.update - base.update).double(), (paper.update - base.update).double()
    n, d = 25, 64
    assert float(one @ other / (other @ other)) == pytest.approx(n * d / (d - 1), rel=1e-3)
    value = (paper.loss - base.loss) * n * d / (d - 1) - (n - 1) ** 2 / n / (d - 1)
    assert code.loss - base.loss == pytest.approx(value, rel=1e-4)


def test_with_fedbn_and_nova_the_term_is_just_added() -> None:
    # What a step's gradient gains is the same under every base method that leaves the passes alone.
    def gained(base: str) -> Tensor:
        with_it, without = (after_steps(small(method=m, model="cnn")) for m in (f"{base}+feddecorr", base))
        network = with_it.local.network
        one, other = (r.local.step.named(r.local.step.grad) for r in (with_it, without))
        return torch.cat([(one[n] - other[n]).flatten() for n, _ in network.named_parameters()])

    plain = gained("fedavg")
    assert float(plain.norm()) > 1e-3
    for base in ("fednova", "fedbn", "fedprox", "scaffold", "fedavgm"):
        torch.testing.assert_close(gained(base), plain, rtol=0, atol=1e-6)


def test_tolerance_is_not_trivial() -> None:
    # The wrong form is seen at once: else agreement to TOLERANCE would say nothing.
    run = small(method="feddecorr:form=paper", rounds=1)
    wrong = small(method="feddecorr", rounds=1)
    assert distance(run.fit().weights, wrong.fit().weights) > 50 * TOLERANCE
