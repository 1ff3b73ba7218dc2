"""The head refitted on everybody's real features."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isofed.draws import generator
from isofed.layout import Tensors
from isofed.methods import Final
from isofed.methods.oracle_head import OracleHead
from tests.engine.plain import distance, small
from tests.methods.refits import SAMPLES, Seen, features, trained_by_torch


@dataclass(frozen=True)
class SpyingOracle(OracleHead):
    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        Seen.totals.append({k: v.clone() for k, v in total.items()})
        super().finish(exchange, total, final)


@pytest.mark.parametrize(("model", "fewest", "epochs"), [("mlp", 10, 3), ("cnn", 10, 3), ("mlp", 30, 5)])
def test_the_oracle_sees_every_sample_once_and_trains_on_it(
    monkeypatch: pytest.MonkeyPatch, model: str, fewest: int, epochs: int
) -> None:
    monkeypatch.setattr("isofed.methods.oracle_head.FEWEST", fewest)  # steps; an epoch has seven
    run = small(method=[SpyingOracle(epochs=3, lr=0.1, batch_size=16)], model=model, rounds=1)
    result = run.fit()
    total, (z, labels) = Seen.totals[-1], features(run, result.weights)
    order = np.concatenate(run.world.clients)
    assert sorted(order) == list(range(SAMPLES))
    np.testing.assert_allclose(total["oracle.features"], z[order], atol=1e-5)
    np.testing.assert_array_equal(total["oracle.labels"], labels[order])
    fresh = small(model=model, rounds=1).fit().weights
    rng = generator(0, "finish/oracle_head")
    orders = [torch.from_numpy(rng.permutation(SAMPLES)) for _ in range(epochs)]
    head = (fresh["head.weight"], fresh["head.bias"])
    wanted = trained_by_torch(head, torch.from_numpy(z[order]), torch.from_numpy(labels[order]), orders, 0.1, 0.9, 16)
    assert distance({k: result.weights[k] for k in wanted}, wanted) < 1e-5
    assert distance({k: fresh[k] for k in wanted}, wanted) > 1e-3
    assert all(torch.equal(result.weights[k], fresh[k]) for k in fresh if not k.startswith("head."))


def test_the_oracle_takes_two_thousand_steps_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def counted(head: Any, z: Tensor, labels: Tensor, batches: Iterable[Tensor], **options: float) -> None:
        assert options == {"lr": 0.01, "momentum": 0.9}
        taken.append(sum(1 for _ in batches))

    monkeypatch.setattr("isofed.methods.oracle_head.train_head", counted)
    small(method="oracle_head", rounds=1).fit()
    small(method="oracle_head:epochs=1500", rounds=1).fit()
    assert taken == [2000, 3000]  # of 100 samples, in batches of 64 and 36
