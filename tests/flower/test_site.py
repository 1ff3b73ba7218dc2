"""A site: what it refuses, what it tells, and what it remembers."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Message, RecordDict

from isofed.data import Dataset, Part
from isofed.errors import UserError
from isofed.files import load_tensors, save_tensors
from isofed.flower import terms, wire
from isofed.flower.client_app import answer
from isofed.flower.data import site_world
from isofed.flower.site import Site
from isofed.flower.states import SiteStates
from isofed.flower.terms import Refusal
from tests.flower.loop import Loop, asked
from tests.flower.test_equal import deployed, simulated, table

RUN = "0123456789abcdef"


def problem(folder: Path, values: dict[str, Any], facts: dict[str, Any] | None = None, **node: Any) -> str:
    """What a site answers to a question."""
    grid = Loop(values, folder / "states", 1, nodes={0: node})
    context = Context(run_id=1, node_id=1, node_config=grid.nodes[100], state=RecordDict(), run_config=values)
    message = Message(wire.content(facts or {"do": "hello"}), 1, "query")
    return wire.text(wire.facts(answer(message, context)), "problem")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"method": "evil.py:Evil"}, "refuses the method 'evil.py:Evil', which would load code by path"),
        ({"method": "fedavg+/tmp/evil.py:Evil"}, "would load code by path"),
        ({"method": "fedavg+evil.py"}, "would load code by path"),
        ({"model": "net.py"}, "would load code by path"),
        ({"model": "net.py:build"}, "refuses the model 'net.py:build', which would load code by path"),
        ({"data": "/etc"}, "refuses data=/etc: a site names its own folder"),
        ({"data": "folder:size=8", "root": "/etc"}, "refuses data=folder:size=8"),
        ({"root": "/etc"}, "refuses root="),
        ({"partition": "from_file:/etc/passwd"}, "refuses root= and partition=from_file:"),
    ],
)
def test_a_site_runs_no_code_and_opens_no_file_that_the_server_names(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('it was run')")
    assert said in problem(tmp_path, table(tmp_path, **values))


def test_a_site_keeps_its_number_and_its_folder_to_itself(tmp_path: Path) -> None:
    values = table(tmp_path)
    assert problem(tmp_path, values) == ""
    beyond = problem(tmp_path, values, None, **{"partition-id": 7})
    assert beyond == "says it is site 7, and there are 2, counted from 0"
    other = problem(tmp_path, values, {"do": "train", "client": 1})
    assert other == "was sent what is meant for site 1"
    at_sites = values | {"data": "sites", "classes": "a,b", "shape": "1,8,8"}
    assert (
        problem(tmp_path, at_sites)
        == "has not named its folder: start it with --data FOLDER (data= in its node config)"
    )
    secret = problem(tmp_path, at_sites, data="/no/such/patient-names")
    assert secret == "failed with UserError; its own log says why"


@pytest.mark.parametrize("run", ["../../etc", "", "0123", "Z" * 32, "0" * 65])
def test_the_name_of_a_run_cannot_lead_elsewhere(tmp_path: Path, run: str) -> None:
    with pytest.raises(Refusal, match="without a proper name"):
        SiteStates(tmp_path, run)


def test_states_are_pending_until_the_server_says_which_one_counts(tmp_path: Path) -> None:
    states = SiteStates(tmp_path, RUN)
    with states.locked(1):
        assert states.get(0) is None
        states.put(1, 0, {"x": torch.tensor([1.0])})
        states.put(2, 1, {"x": torch.tensor([2.0])})  # 1 was accepted
        states.put(3, 1, {"x": torch.tensor([3.0])})  # 2 was not
        assert states.rounds() == [1, 3]
        states.put(4, 3, {"x": torch.tensor([4.0])})  # 3 was
        assert states.rounds() == [1, 3, 4]  # the server may have to go back to the checkpoint before
        states.put(5, 4, {"x": torch.tensor([5.0])})
        assert states.rounds() == [3, 4, 5]
        found = states.get(4)
        assert found is not None
        assert found["x"].item() == 4
        with pytest.raises(Refusal, match="has lost what it remembered after round 1"):
            states.get(1)


def test_a_damaged_state_is_not_used(tmp_path: Path) -> None:
    states = SiteStates(tmp_path, RUN)
    with states.locked(1):
        states.put(1, 0, {"x": torch.zeros(100)})
        path = next(states.folder.glob("round-*"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(Refusal, match="has lost"):
            states.get(1)


def test_what_a_site_remembers_is_on_its_disk_and_named_in_its_context(tmp_path: Path) -> None:
    values = table(tmp_path, method="scaffold")
    grid = Loop(values, tmp_path / "states", 2)
    deployed(tmp_path, values, grid)
    for number in range(2):
        noted = grid.contexts[100 + number].state["isofed"]
        assert isinstance(noted, ConfigRecord)
        assert noted["round"] == 2
        (path,) = (tmp_path / "states" / str(number)).glob("*/round-000002.safetensors")
        assert path.parent.name == noted["run"]
        assert load_tensors(path)[0]["scaffold.ck"].abs().max() > 0
    saved, _ = load_tensors(tmp_path / "run" / "checkpoints" / "round-000002.safetensors")
    assert not any("scaffold.ck" in name for name in saved), "the server has no business with it"


def pictures(folder: Path, classes: dict[str, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for number, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            noise = rng.integers(0, 60, (8, 8), np.uint8) + np.uint8(60 * (number + 1))
            Image.fromarray(noise).save(folder / name / f"{i}.png")


def sites(folder: Path, **changes: Any) -> tuple[dict[str, Any], Loop]:
    """Two sites with folders of their own, of which one has never seen a class."""
    pictures(folder / "data" / "0", {"benign": 12, "malignant": 8}, 0)
    pictures(folder / "data" / "1", {"malignant": 15, "unclear": 10}, 1)
    more = {"classes": "benign,malignant,unclear", "shape": "1,8,8", "mean": "0.5", "std": "0.5", "model": "mlp"}
    values = table(folder, **{"data": "sites", **more, **changes})
    nodes = {n: {"data": str(folder / "data" / str(n))} for n in range(2)}
    return values, Loop(values, folder / "states", 2, nodes=nodes)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedavg+ffc"])
def test_each_site_reads_its_own_folder_and_judges_the_model(tmp_path: Path, method: str) -> None:
    more = {"model": "cnn", "norm": "batch"} if method == "fedbn" else {}
    values, grid = sites(tmp_path, method=method, **more)
    result = deployed(tmp_path, values, grid)
    assert 0 <= result.accuracy <= 1
    assert sum(1 for m in grid.sent if asked(m)["do"] == "score") >= 4
    assert result.history[-1]["clients"] == 2


def test_a_federation_of_folders_is_that_of_the_pooled_data_set_split_alike(tmp_path: Path) -> None:
    """The independent computation: the sites' samples in one data set, divided by a file."""
    values, grid = sites(tmp_path, method="scaffold")
    there = deployed(tmp_path, values, grid)
    settings, given = terms.read(values)
    worlds = [site_world(settings, given, grid.nodes[100 + n], n, 0) for n in range(2)]
    train = Part(
        torch.cat([w.dataset.train.images for w in worlds]), torch.cat([w.dataset.train.labels for w in worlds])
    )
    test = Part(torch.cat([w.dataset.test.images for w in worlds]), torch.cat([w.dataset.test.labels for w in worlds]))
    pooled = Dataset("pooled", given.class_names, train, test, (0.5,), (0.5,))
    first, count = len(worlds[0].dataset.train), len(train)
    split = tmp_path / "split.json"
    split.write_text(str([list(range(first)), list(range(first, count))]))
    from isofed import Federation

    own = settings.to_dict() | {"partition": f"from_file:{split}"}
    del own["data"]
    here = Federation(dataset=pooled, **own).fit()
    assert there.accuracy == here.accuracy
    for name, value in here.weights.items():
        assert there.weights[name].equal(value), name


def test_a_site_is_told_what_of_its_folder_is_not_used_and_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values, grid = sites(tmp_path)
    scan = tmp_path / "data" / "0" / "benign" / "scan.dcm"
    scan.write_bytes(b"no picture")
    result = deployed(tmp_path, values, grid)
    said = [record.getMessage() for record in caplog.records]
    assert sum(text.startswith(f"isofed: the file '{scan}' in a class folder is not read") for text in said) == 1
    assert result.notes == [] and not any("scan" in str(message.content) for message in grid.sent)


def test_the_server_may_have_pictures_to_judge_by(tmp_path: Path) -> None:
    pictures(tmp_path / "judge", {"benign": 5, "malignant": 5, "unclear": 5}, 2)
    values, grid = sites(tmp_path, test_data=str(tmp_path / "judge"))
    result = deployed(tmp_path, values, grid)
    assert not any(asked(m)["do"] == "score" for m in grid.sent)
    assert result.accuracy * 15 == pytest.approx(round(result.accuracy * 15))


def test_folders_that_do_not_fit_the_federation(tmp_path: Path) -> None:
    values, _ = sites(tmp_path)
    pictures(tmp_path / "more", {"benign": 3, "odd": 3}, 0)
    said = problem(tmp_path, values, data=str(tmp_path / "more"))
    assert said == "has 1 class that the federation does not know; see classes= of the run"
    np.savez(tmp_path / "wide.npz", images=np.zeros((9, 12, 12, 1), np.uint8), labels=np.arange(9) % 3)
    assert "has pictures of shape [1, 12, 12]" in problem(tmp_path, values, data=str(tmp_path / "wide.npz"))
    assert simulated(table(tmp_path)).rounds == 2  # the same settings with data by name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": ""}, "clients is missing"),
        ({"data": "nowhere"}, "data=nowhere names files, which sites do not open for others; use data=sites"),
        ({"min_clients": 3}, "min_clients=3 cannot be met: only 2 sites take part in a round"),
        ({"deadline": 0}, "deadline=0 is not possible"),
        ({"method": "central"}, "pools all data"),
        ({"method": "fedavg+oracle_head"}, "sends features of single samples"),
        ({"keep_clients": "last"}, "keep_clients=last needs the clients' own models"),
        ({"diagnose": "every:1"}, "diagnose=every:1 needs the clients' own models"),
        ({"data": "sites"}, "data=sites needs the names of all classes"),
        ({"data": "sites", "classes": "a,b", "shape": "8,8"}, "shape=8,8 is not possible"),
        ({"data": "sites", "classes": "a,b", "validation": 0.1}, "validation= divides data that the server has"),
        ({"min_client": 2}, "there is no setting 'min_client': did you mean 'min_clients'?"),
    ],
)
def test_what_cannot_be_deployed_is_said_before_any_site_is_asked(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said.replace("?", "\\?").replace("(", "\\(")):
        terms.read(table(tmp_path) | changes)


def test_a_site_says_only_how_many_samples_it_has(tmp_path: Path) -> None:
    grid = Loop(table(tmp_path), tmp_path / "states", 2)
    facts = Site(grid.table, grid.nodes[100]).do({"do": "hello"}, lambda must, may: {}).facts
    assert facts.keys() == {"number", "name", "samples", "version", "torch"}


def test_saved_states_are_those_of_files(tmp_path: Path) -> None:
    """What a site writes can be read with the library's own reader, which never unpickles."""
    states = SiteStates(tmp_path, RUN)
    with states.locked(1):
        states.put(1, 0, {"x": torch.ones(3)})
    found, info = load_tensors(next(states.folder.glob("round-*")))
    assert info == {"round": 1}
    save_tensors(tmp_path / "again.safetensors", found, info)
    assert (tmp_path / "again.safetensors").read_bytes() == next(states.folder.glob("round-*")).read_bytes()


def test_with_noise_nothing_else_tells_of_a_site(tmp_path: Path) -> None:
    method = "gaussian:noise=1,norm=1,at=client,draws=system"
    values = table(tmp_path, method=method, rounds=1)
    told: list[dict[str, Any]] = []

    def listen(node: int, message: Message, content: RecordDict) -> RecordDict:
        told.append(dict(wire.facts(content)))
        return content

    deployed(tmp_path, values, Loop(values, tmp_path / "states", 2, listen))
    assert [facts["samples"] for facts in told] == [1, 1, 1, 1]  # two introductions, two visits
    assert [(facts["steps"], facts["loss"], facts["seconds"]) for facts in told[2:]] == [(1, 0.0, 0.0)] * 2
    said = problem(tmp_path, values, visit(part="test"))
    assert said.startswith("tells nobody how well a model does on its samples")


def visit(**more: Any) -> dict[str, Any]:
    return {"do": "score", "client": 0, "run": RUN, "round": 1, "accepted": 0, "samples": 240} | more


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "gaussian:at=client"}, "the server knows the seed"),
        ({"method": "gaussian:draws=system", "train_loss": True}, "train_loss=true asks sites for losses"),
        ({"method": "gaussian:draws=system", "data": "sites", "classes": "a,b"}, "name pictures at the server"),
    ],
)
def test_noise_that_would_not_protect_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        terms.read(table(tmp_path) | changes)


def test_a_site_that_falls_behind_does_not_pile_up_visits(tmp_path: Path) -> None:
    """At one that is always slower than the deadline, visits that wait for one another would fill the memory."""
    one, other = (SiteStates(tmp_path / "state", "ab" * 16) for _ in range(2))
    began = time.monotonic()
    with one.locked(1), pytest.raises(Refusal, match="was busy with an earlier request"), other.locked(0.1):
        pass
    assert 0.1 <= time.monotonic() - began < 5
    with other.locked(0.1):  # and it is free again
        assert stat.S_IMODE(other.folder.stat().st_mode) == 0o700
