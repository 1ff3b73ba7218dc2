"""The head refitted by least squares, against least squares on everybody's samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.plain import Plain, small
from tests.methods.refits import WIDTH, features, network_of

NO_MOVE = 1e-30  # a learning rate with which no float32 weight moves


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("model", "ridge"), [("mlp", 1e-6), ("mlp", 1e-2), ("cnn", 1e-2), ("mlp", 0.0)])
def test_ffc_is_least_squares_on_the_pooled_samples(model: str, ridge: float, normalise: bool) -> None:
    data = "synthetic:samples=300,test=50,classes=4"
    run = small(method=f"fedavg+ffc:ridge={ridge},normalise={normalise}", model=model, data=data)
    result = run.fit()
    z, labels = features(run, result.weights)
    if normalise:
        z = z / np.linalg.norm(z, axis=1, keepdims=True)
    r = ridge * np.trace(z.T @ z) / WIDTH
    padded = np.concatenate([z, np.sqrt(r) * np.eye(WIDTH)])
    wanted, *_ = np.linalg.lstsq(padded, np.concatenate([np.eye(4)[labels], np.zeros((WIDTH, 4))]))
    found = result.weights["head.weight"].double().numpy().T
    np.testing.assert_allclose(z @ found, z @ wanted, atol=2e-5)
    assert not result.weights["head.bias"].any()
    if ridge == 1e-2:
        np.testing.assert_allclose(found, wanted, atol=2e-5)
        condition = np.linalg.cond(z.T @ z + r * np.eye(WIDTH))
        assert result.exchanges[0]["condition"] == pytest.approx(condition, rel=1e-4)
    plain = small(model=model, data=data).fit().weights
    assert all(torch.equal(result.weights[k], plain[k]) for k in plain if not k.startswith("head."))
    assert not torch.allclose(result.weights["head.weight"], plain["head.weight"], atol=1e-3)


def test_ffcs_predictions_do_not_depend_on_the_length_of_a_feature() -> None:
    run = small(method="ffc", data="synthetic:samples=100,test=80,classes=4")
    result = run.fit()
    z, labels = features(run, result.weights, "test")
    lengths = np.random.default_rng(0).uniform(0.01, 100, (len(z), 1))
    weight = result.weights["head.weight"].double().numpy()
    said = (z * lengths @ weight.T).argmax(1)
    assert result.accuracy == pytest.approx((said == labels).mean())
    inputs, _ = Plain(run, torch.float32).part("test")
    assert (network_of(run, result.weights)(inputs).logits.argmax(1).numpy() == said).all()


def test_ffc_does_not_depend_on_who_holds_what() -> None:
    splits = [("iid", 1), ("quantity:1,min=8", 4), ("pathological:1", 4)]
    found = [
        small(method="ffc:ridge=1e-3", partition=p, clients=c, rounds=1, local_epochs=1, lr=NO_MOVE).fit().weights
        for p, c in splits
    ]
    for weights in found[1:]:
        torch.testing.assert_close(weights["head.weight"], found[0]["head.weight"], rtol=0, atol=1e-5)
    assert float(found[0]["head.weight"].abs().max()) > 0.1
