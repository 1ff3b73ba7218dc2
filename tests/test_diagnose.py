"""``isofed diagnose``: what it finds on the models that runs kept, what it writes, and what it says."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from isofed import diagnostics
from isofed.diagnose import SECTIONS, Diagnosis, Options, diagnosed
from isofed.diagnose.command import diagnose
from isofed.errors import UserError
from isofed.federation import Federation
from isofed.models import create
from tests.cli_tools import complaint, isofed, succeeds
from tests.engine.plain import Plain, small
from tests.run_tools import Stop

QUICK = {"samples": "20", "probes": "8", "points": "3"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """A run that kept everything."""
    out = tmp_path_factory.mktemp("diagnose") / "run"
    made = small(rounds=4, keep="every:2", keep_clients="every:2", diagnose="every:2", out=out)
    made.fit()
    return made


def path(run: Federation) -> Path:
    assert run.folder is not None
    return run.folder.path


@pytest.fixture(scope="module")
def found(run: Federation) -> dict[str, Any]:
    """All sections, as they lie in the run folder."""
    diagnosed(Diagnosis(path(run), Options.of(QUICK)))
    content = json.loads((path(run) / "diagnosis.json").read_text())
    assert isinstance(content, dict)
    return content


def final(run: Federation) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A fresh network with the final weights, and the test part."""
    network = create("mlp", classes=4, shape=(1, 8, 8))
    network.load_state_dict(run.fit().weights)
    inputs, labels = Plain(run).part("test")
    return network.eval(), inputs.float(), labels


def test_all_sections_are_there(found: dict[str, Any]) -> None:
    assert set(found) == {*SECTIONS, "isofed", "method", "seed"}
    assert (found["method"], found["seed"]) == ("fedavg", 0)


def test_spectra_are_those_that_the_run_recorded(run: Federation, found: dict[str, Any]) -> None:
    whole = [m for m in found["spectra"]["models"] if m["client"] is None]
    assert [m["round"] for m in whole] == [2, 4]
    for model, line in zip(whole, run.diagnostics, strict=True):
        assert model["classifier_spectrum"] == line["classifier_spectrum"]
        assert model["representation_spectrum"] == line["representation_spectrum"]
        assert model["significant"] == line["significant"]
    local = {m["client"]: m for m in found["spectra"]["models"] if m["client"] is not None}
    assert sorted(local) == [0, 1, 2, 3]
    recorded = {one["client"]: one["gap"] for one in run.diagnostics[-1]["local"]}
    assert {c: local[c]["gap"] for c in recorded} == pytest.approx(recorded)


def test_alignment_is_that_which_the_run_recorded(run: Federation, found: dict[str, Any]) -> None:
    assert [a["round"] for a in found["alignment"]] == [2, 4]
    for line, model in zip(run.diagnostics, found["alignment"], strict=True):
        assert model["cosine"] == pytest.approx(line["alignment"]["cosine"])
        assert model["norm_difference"] == pytest.approx(line["alignment"]["norm_difference"])


def test_curvature_is_that_of_the_final_model_on_training_samples(run: Federation, found: dict[str, Any]) -> None:
    network, _, _ = final(run)
    inputs, labels = Plain(run).part("train")
    where = np.linspace(0, 99, 20).astype(int)
    top = diagnostics.hessian_top_eigenvalues(network, (inputs.float()[where], labels[where]), 2)
    assert found["curvature"]["eigenvalues"] == pytest.approx(top.values.tolist(), rel=1e-3)
    clients = found["curvature"]["clients"]
    assert clients["clients"] == [0, 1, 2, 3] and clients["H_N"] >= 0 and -1 <= clients["H_D"] <= 1


def test_calibration_is_that_of_the_final_model(run: Federation, found: dict[str, Any]) -> None:
    network, inputs, labels = final(run)
    with torch.no_grad():
        wanted = diagnostics.calibration(network(inputs).logits.softmax(1), labels)
    assert found["calibration"]["error"] == pytest.approx(wanted.error, abs=1e-6)
    assert sum(found["calibration"]["counts"]) == 20


def test_the_middle_of_the_landscape_is_the_training_loss_and_a_valley(found: dict[str, Any]) -> None:
    loss = np.asarray(found["landscape"]["loss"])
    assert loss.shape == (3, 3) and found["landscape"]["steps"] == [-1, 0, 1]
    assert loss[1, 1] < loss[0, 1] and loss[1, 1] < loss[2, 1]


def test_points_have_a_class_and_a_client(found: dict[str, Any]) -> None:
    tsne = found["tsne"]
    assert len(tsne["points"]) == len(tsne["class"]) == len(tsne["client"]) == 4 * 20
    assert set(tsne["client"]) == {0, 1, 2, 3} and set(tsne["class"]) <= {0, 1, 2, 3}


def test_labels_and_cost_are_those_of_the_run(run: Federation, found: dict[str, Any]) -> None:
    assert [sum(row) for row in found["labels"]["counts"]] == [len(c) for c in run.world.clients]
    result = run.fit()
    assert found["cost"]["total"]["megabytes"] == pytest.approx((result.bytes_up + result.bytes_down) / 1e6)
    assert found["cost"]["points_per"]["gflop"] > 0


def test_what_was_found_before_stays(run: Federation, found: dict[str, Any]) -> None:
    again = diagnosed(Diagnosis(path(run), Options.of(QUICK | {"only": "calibration", "samples": "10"})))
    assert sum(again["calibration"]["counts"]) == 10
    assert again["spectra"] == found["spectra"]
    diagnosed(Diagnosis(path(run), Options.of(QUICK | {"only": "calibration"})))


def test_a_run_that_kept_nothing_is_measured_by_its_final_model(tmp_path: Path) -> None:
    small(rounds=1, method="fedbn", model="cnn", out=tmp_path / "run").fit()
    found = diagnosed(Diagnosis(tmp_path / "run", Options.of(QUICK | {"only": "spectra,alignment,curvature,tsne"})))
    assert [(m["round"], m["client"]) for m in found["spectra"]["models"]] == [(1, None)]
    assert found["alignment"] == [] and "clients" not in found["curvature"] and found["tsne"]["client"] == []
    assert list(found) == ["isofed", "method", "seed", "spectra", "alignment", "curvature", "tsne"]


def test_a_run_that_goes_on_is_measured_by_its_newest_state(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        small(rounds=3, out=tmp_path / "run").fit(Stop(2))
    found = diagnosed(Diagnosis(tmp_path / "run", Options.of(QUICK | {"only": "spectra"})))
    assert [m["round"] for m in found["spectra"]["models"]] == [2]


def test_a_run_without_a_round_has_no_model(tmp_path: Path) -> None:
    small(out=tmp_path / "run")
    with pytest.raises(UserError, match="has no model yet"):
        diagnosed(Diagnosis(tmp_path / "run", Options.of({"only": "spectra"})))


def test_a_run_without_a_model_does_not_keep_the_others_from_being_measured(tmp_path: Path) -> None:
    small(rounds=1, out=tmp_path / "many" / "b" / "seed-0").fit()
    small(out=tmp_path / "many" / "a" / "seed-0")
    out = succeeds("diagnose", "many", "only=spectra", cwd=tmp_path)
    assert "note: many/a/seed-0 has no model yet and is left out" in out
    assert "[1/1] many/b/seed-0: spectra" in out and (tmp_path / "many/b/seed-0/diagnosis.json").exists()
    assert "has no model yet" in complaint(isofed("diagnose", tmp_path / "many" / "a"), 2)


def test_three_pictures_make_no_map_and_what_was_found_before_stays(tmp_path: Path) -> None:
    small(data="synthetic:samples=200,test=3,classes=4,size=4", rounds=1, out=tmp_path / "run").fit()
    text = complaint(isofed("diagnose", tmp_path / "run", "only=spectra,tsne"), 2)
    assert "a t-SNE needs at least 4 features" in text
    assert set(json.loads((tmp_path / "run" / "diagnosis.json").read_text())) >= {"spectra"}


def test_the_command(run: Federation) -> None:
    words = [f"{k}={v}" for k, v in QUICK.items()]
    out = succeeds("diagnose", path(run), *words, "only=spectra,curvature,alignment")
    assert "[1/3]" in out and "spectra" in out and "left" in out
    header, row = next((a, b) for a, b in zip(out.splitlines(), out.splitlines()[1:], strict=False) if "trace" in a)
    assert all(name in header for name in ("classifier rank", "significant", "gap R", "cosine", "H_N", "H_D"))
    row = row.replace(" ± ", "±")  # the trace with its error
    assert row.startswith("fedavg, seed 0 ") and len(row.split()) == 3 + 12  # what was found before is shown, too
    assert re.search(r" [-\d.]+±[\d.]+ ", row)
    assert f"diagnosis.json in {path(run)}" in out
    whole = succeeds("diagnose", path(run).parent, "only=labels")  # all runs below
    assert "[1/1]" in whole


@pytest.mark.parametrize(("error", "told"), [(None, ["-", "-"]), (3.3, ["-", "-"]), (0.2, ["2.96", "0.314"])])
def test_noise_is_not_printed_as_curvature(
    error: float | None, told: list[str], tmp_path: Path, run: Federation
) -> None:
    shutil.copytree(path(run), tmp_path / "copy")
    file = tmp_path / "copy" / "diagnosis.json"
    clients = {"H_N": 2.96, "H_D": 0.314, "error": error}
    file.write_text(json.dumps({"curvature": {"eigenvalues": [1.0], "trace": 5.0, "clients": clients}}))
    console = Console(width=200, record=True, file=io.StringIO())
    diagnose(console, [str(tmp_path / "copy"), "only=labels"])
    out = console.export_text()
    row = next(line for line in out.splitlines() if line.startswith("fedavg, seed 0")).split()
    assert row[-2:] == told and ("noise outweighs the estimate" in out) == (told[0] == "-")


def test_a_section_that_is_not_finite_is_left_out_and_the_others_are_measured(
    tmp_path: Path, run: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, console = tmp_path / "copy", Console(width=200, record=True, file=io.StringIO())
    shutil.copytree(path(run), folder)
    (folder / "diagnosis.json").unlink(missing_ok=True)
    words = [str(folder), "samples=20", "probes=8", "only=curvature,calibration"]
    measure = diagnostics.hessian_top_eigenvalues

    def overflowing(network: Any, data: Any, *given: Any, **more: Any) -> Any:
        return measure(network, (data[0] * math.inf, data[1]), *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(diagnostics, "hessian_top_eigenvalues", overflowing)
        diagnose(console, words)
    why = "the loss of this network has second derivatives that are not finite"
    assert f"note: curvature of {folder} is left out: {why}" in console.export_text()
    found = json.loads((folder / "diagnosis.json").read_text())
    assert found["curvature"] is None and found["not_finite"] == {"curvature": why} and found["calibration"]
    diagnose(console, words)  # what is found the next time counts
    found = json.loads((folder / "diagnosis.json").read_text())
    assert found["curvature"] and "not_finite" not in found


def test_what_is_known_of_the_global_model_stays_where_a_client_has_no_finite_hessian(
    tmp_path: Path, run: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, console = tmp_path / "copy", Console(width=200, record=True, file=io.StringIO())
    shutil.copytree(path(run), folder)
    (folder / "diagnosis.json").unlink(missing_ok=True)
    words = [str(folder), "samples=20", "probes=8", "only=curvature"]
    diagnose(console, words)
    whole = json.loads((folder / "diagnosis.json").read_text())["curvature"]
    measure, seen = diagnostics.hessian_diagonal, []

    def overflowing(network: Any, data: Any, *given: Any, **more: Any) -> Any:
        seen.append(network)
        return measure(network, (data[0] * (math.inf if len(seen) == 3 else 1), data[1]), *given, **more)

    monkeypatch.setattr(diagnostics, "hessian_diagonal", overflowing)
    diagnose(console, words)
    found = json.loads((folder / "diagnosis.json").read_text())
    why = "of client 2's model, the loss of this network has second derivatives that are not finite"
    assert f"note: curvature of {folder} is not complete: {why}" in console.export_text()
    assert found["not_finite"] == {"curvature": why} and "clients" not in found["curvature"]
    assert found["curvature"] == {k: v for k, v in whole.items() if k != "clients"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs at least one run folder"),
        (["missing"], "missing is not a run folder: it does not exist"),
        (["{run}", "only=spectrum"], "no diagnostic 'spectrum'.*did you mean 'spectra'"),
        (["{run}", "sample=3"], "no option of diagnose 'sample'.*did you mean 'samples'"),
        (["{run}", "samples=few"], "samples must be a whole number"),
        (["{run}", "samples=1"], "samples=1 is too few"),
        (["{run}", "only=tsne", "samples=3"], "samples=3 is too few: at least 4"),
        (["{run}", "device=tpu"], "no device 'tpu'|device=tpu"),
    ],
)
def test_what_is_asked_wrongly(words: list[str], said: str, run: Federation) -> None:
    text = complaint(isofed("diagnose", *(word.format(run=path(run)) for word in words)), 2)
    assert re.search(said, text), text
