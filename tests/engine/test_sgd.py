"""Large gradients are used where they were made: the same bits as from the vector of all, and where nobody looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isofed.engine import sgd
from isofed.engine.replica import Replica
from isofed.layout import Layout
from isofed.models import create
from tests.engine.own_methods import HERE
from tests.engine.test_step import CPU, OPTIMISERS, federation, visit


def large(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    monkeypatch.setattr(sgd, "_LARGE", numbers)


def test_pieces_are_all_weights_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch, 1000)
    network = create("cnn", classes=4, shape=(1, 8, 8))
    trained = [e for e in Layout.of(network, {}).entries if e.trained]
    total = trained[-1].offset + trained[-1].size + 5  # and something behind the last
    vectors = [torch.arange(total) + start for start in (0, total, 2 * total)]
    made = sgd.pieces(trained, *vectors)
    for vector, name in zip(vectors, ("weights", "gradient", "momentum"), strict=True):
        rows = [getattr(piece, name) for piece in made]
        flat = [row.permute(0, 2, 3, 1).flatten() if row.dim() == 4 else row.flatten() for row in rows]
        assert torch.equal(torch.cat(flat), vector)
    alone = {piece.number: piece.weights.shape for piece in made if piece.number is not None}
    assert alone == {n: e.shape for n, e in enumerate(trained) if e.size >= 1000} and 1 < len(alone) < len(trained)
    assert len(sgd.pieces([], *vectors)) == 1


@pytest.mark.parametrize("method", ["fedavg", "feduv", "moon", "mixup+feddecorr"])
@pytest.mark.parametrize("optimiser", [k for k, v in OPTIMISERS.items() if "clip" not in v])
def test_a_visit_has_the_same_bits(optimiser: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    for numbers in (50, 10**9):
        large(monkeypatch, numbers)
        run = federation(model="cnn", method=method, **OPTIMISERS[optimiser])
        replica = Replica(run.world, CPU)
        visit(run, client=1, replica=replica)  # whatever it leaves
        models.append(visit(run, replica=replica).model)
        assert any(piece.number is not None for piece in replica.local._pieces) == (numbers == 50)
    one, other = models
    assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "fedprox"},
        {"method": "fedsam"},
        {"method": "scaffold"},
        {"method": "fedalign", "model": "cnn"},
        {"method": f"{HERE}:Count"},
        {"clip": 1.0},
    ],
)
def test_whoever_looks_at_the_gradient_finds_all_of_it(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    large(monkeypatch, 50)
    replica = Replica(federation(**({"model": "mlp"} | settings)).world, CPU)
    assert len(replica.local._pieces) == 1
