"""The same seed gives the same bits at sites as in a simulation, for every kind of method; here without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import ArrayRecord

from isofed import Federation, UserError
from isofed.flower import terms
from isofed.flower.server_app import federate
from isofed.result import Result
from tests.flower.loop import Loop, asked

TABLE: dict[str, Any] = {
    "data": "synthetic:samples=240,test=60,classes=4",
    "partition": "dirichlet:0.5",
    "model": "mlp",
    "rounds": 2,
    "local_epochs": 1,
    "lr": 0.05,
    "deadline": 5.0,
}


def table(folder: Path, **changes: Any) -> dict[str, Any]:
    return TABLE | {"clients": 2, "out": str(folder / "run")} | changes


def deployed(folder: Path, values: dict[str, Any], grid: Loop | None = None) -> Result:
    settings, given = terms.read(values)
    return federate(grid or Loop(values, folder / "states", values["clients"]), settings, given)


def simulated(values: dict[str, Any]) -> Result:
    return Federation(**terms.read(values)[0].to_dict()).fit()


DEPLOYED = ["fedavg", "scaffold", "fedavg+feduv", "fedbn", "fednova+spherefed"]
MORE = ["fedavg+ffc", "fedavg+ccvr", "moon", "feddyn", "fedavgm+fedbabu", "median", "fedprox+trimmed:0.34"]


@pytest.mark.parametrize(("method", "sites"), [(m, n) for m in DEPLOYED for n in (2, 5)] + [(m, 3) for m in MORE])
def test_the_model_and_the_record_are_those_of_the_simulation(tmp_path: Path, method: str, sites: int) -> None:
    more = {"model": "cnn", "norm": "batch"} if method == "fedbn" else {}
    values = table(tmp_path, method=method, clients=sites, **more)
    there, here = deployed(tmp_path, values), simulated(values)
    assert there.weights.keys() == here.weights.keys()
    for name, value in here.weights.items():
        assert there.weights[name].equal(value), name
    same = ("accuracy", "loss", "rounds", "bytes_up", "bytes_down", "events", "exchanges")
    assert [getattr(there, k) for k in same] == [getattr(here, k) for k in same]
    for one, other in zip(there.history, here.history, strict=True):
        assert one["sites"] == list(range(sites))
        assert [one[k] for k in ("local_loss", "steps", "samples")] == [
            other[k] for k in ("local_loss", "steps", "samples")
        ]


def test_sampling_is_by_the_numbers_of_sites_not_by_nodes(tmp_path: Path) -> None:
    values = table(tmp_path, clients=5, participation=0.6, rounds=3)
    grid = Loop(values, tmp_path / "states", 5)
    grid.nodes = dict(sorted(grid.nodes.items(), reverse=True))
    there, here = deployed(tmp_path, values, grid), simulated(values)
    assert all(there.weights[name].equal(value) for name, value in here.weights.items())
    assert {len(line["sites"]) for line in there.history} == {3}


def test_what_stays_at_home_is_never_sent_and_what_is_fixed_once(tmp_path: Path) -> None:
    values = table(tmp_path, method="fedbn+spherefed:calibrate=none", model="cnn", norm="batch", rounds=3)
    grid = Loop(values, tmp_path / "states", 2)
    deployed(tmp_path, values, grid)
    visits = [message for message in grid.sent if asked(message)["do"] == "train"]
    assert len(visits) == 6
    settings, _ = terms.read(values)
    layout = Federation(**settings.to_dict()).layout
    for message in visits:
        records = [one for one in message.content.values() if isinstance(one, ArrayRecord)]
        arrays = {name: array for one in records for name, array in one.items()}
        assert arrays["shared"].shape == (layout.shared.stop - layout.shared.start,)
        assert ("once" in arrays) == (asked(message)["round"] == 1)
        assert arrays.keys() <= {"shared", "once"}


def test_a_run_that_is_over_is_not_run_again_and_another_is_not_mixed_in(tmp_path: Path) -> None:
    values = table(tmp_path)
    first = deployed(tmp_path, values)
    grid = Loop(values, tmp_path / "states", 2)
    assert deployed(tmp_path, values, grid).accuracy == first.accuracy
    assert {asked(message)["do"] for message in grid.sent} == {"hello"}
    other = table(tmp_path, lr=0.1)
    with pytest.raises(UserError, match="holds a run with another lr"):
        deployed(tmp_path, other)


def test_the_server_goes_on_after_the_last_complete_round(tmp_path: Path) -> None:
    """Broken off in each round in turn, also after the sites have trained and before the server has recorded it."""
    values = table(tmp_path, method="scaffold", rounds=4)

    class Broken(Loop):
        at = 1

        def pull_messages(self, message_ids: Any) -> Any:
            found = super().pull_messages(message_ids)
            if self.sent and asked(self.sent[-1]).get("round") == self.at:
                raise httpx.ConnectError("the server is gone")
            return found

    for number in range(1, 5):
        grid = Broken(values, tmp_path / "states", 2)
        grid.at = number
        with pytest.raises(httpx.ConnectError, match="gone"):
            deployed(tmp_path, values, grid)
    result, here = deployed(tmp_path, values), simulated(values)
    assert [line["round"] for line in result.history] == [1, 2, 3, 4]
    assert all(result.weights[name].equal(value) for name, value in here.weights.items())
