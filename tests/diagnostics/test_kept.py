"""Models that a run kept are networks again with one call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isofed import models
from isofed.errors import UserError
from isofed.files import load_tensors
from tests.engine.plain import small


@pytest.mark.parametrize("method", ["fedavg", "spherefed"])
def test_a_kept_model_loads_as_it_was(tmp_path: Path, method: str) -> None:
    run = small(method=method, rounds=2, keep="every:1", keep_clients="last", out=tmp_path / "run")
    run.fit()
    last = models.load(tmp_path / "run/kept/round-000002.safetensors").state_dict()
    trained = run.layout.views(run.state.weights)  # spherefed refits the head of the final model
    assert set(last) == set(trained) and all(torch.equal(last[name], trained[name]) for name in last)
    clients = sorted((tmp_path / "run/kept").glob("round-000002-client-*"))
    inputs = torch.rand(3, *run.world.dataset.shape)
    seen = [models.load(file).eval()(inputs).logits for file in clients]
    assert len(seen) == len(run.world.clients) and not torch.equal(seen[0], seen[1])
    assert load_tensors(clients[1])[1]["client"] == 1


def test_weights_without_a_description_are_one_sentence(tmp_path: Path) -> None:
    small(rounds=1, out=tmp_path / "run").fit()
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("*.safetensors")
    with pytest.raises(UserError, match="does not say which network its weights are of; give a run's folder"):
        models.load(checkpoint)
