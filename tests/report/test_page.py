"""The page holds what the runs hold, fetches nothing, lets no text of a run become code, and stays small."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isofed.data import Dataset, Part
from isofed.errors import UserError
from isofed.federation import Federation
from isofed.report import write_report
from isofed.report.gather import Reader
from isofed.report.measured import thin
from isofed.report.page import content, render, tidy
from tests.report.made import add_privacy, diagnose, make_comparison, make_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028\"'"


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[-1] += data


def page_of(path: Path) -> dict[str, Any]:
    return content(Reader().read([path]))


def test_the_page_holds_the_runs(tmp_path: Path) -> None:
    make_comparison(tmp_path / "runs", {"fedavg": [0.5, 0.6], "fedprox:mu=0.3": [0.7, 0.75]}, target=0.5)
    shown = write_report([tmp_path / "runs"], tmp_path / "page.html")
    held = json.loads(Elements((tmp_path / "page.html").read_text("utf-8")).scripts[0])
    assert held == json.loads(json.dumps(shown))
    assert [(row["method"], row["accuracy"]) for row in held["rows"]] == [("fedavg", 0.55), ("fedprox:mu=0.3", 0.725)]
    curves = held["runs"][3]["curves"]
    assert curves["round"] == [1, 2, 3] and curves["accuracy"] == [0.1, 0.375, 0.75]
    assert curves["megabytes"] == [1, 2, 3] and curves["seconds"] == [0.5, 1, 1.5] and "gflop" not in curves
    assert held["splits"][0]["clients"] == 4 and sum(map(sum, held["splits"][0]["counts"])) == 200
    assert ["target", "0.5"] in held["settings"]["chosen"] and ["rounds", "3"] in held["settings"]["chosen"]
    assert ["momentum", "0.9"] in held["settings"]["defaults"]
    assert dict(held["versions"]).keys() >= {"isofed", "python", "torch", "numpy", "platform", "device_name", "data"}


def test_the_command_to_repeat_gives_the_same_settings(tmp_path: Path) -> None:
    import shlex

    from isofed.commands import is_method
    from isofed.config import read_words
    from isofed.experiments import plan_comparison, seeds_of

    make_comparison(tmp_path, {"fedavg": [0.5, 0.6], "fedprox:mu=0.3": [0.7, 0.75]}, target=0.5, lr=0.07, clip=2.0)
    (command,) = page_of(tmp_path)["repeat"]
    assert command.startswith("isofed compare fedavg fedprox:mu=0.3 ")
    words = shlex.split(command)[2:]
    values = read_words(w for w in words if not is_method(w))
    plans, _ = plan_comparison([w for w in words if is_method(w)], seeds_of(values.pop("seeds")), values, None)
    recorded = [json.dumps(run.config, sort_keys=True) for run in Reader().read([tmp_path]).runs]
    assert sorted(json.dumps(p.settings.to_dict(), sort_keys=True) for p in plans) == sorted(recorded)


def test_what_no_command_can_repeat_is_not_offered(tmp_path: Path) -> None:
    """Data that were given in Python are there alone."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (60, 4, 4, 1), dtype=np.uint8), np.arange(60) % 3
    dataset = Dataset.build("mine", 3, Part(images[:40], labels[:40]), Part(images[40:], labels[40:]))
    given: dict[str, Any] = {"model": "mlp", "partition": "iid", "clients": 2, "rounds": 1, "executor": "serial"}
    for seed in range(2):
        Federation(dataset=dataset, seed=seed, out=tmp_path / str(seed), **given).fit()
    assert page_of(tmp_path)["repeat"] == []


def test_a_single_run_is_repeated_from_its_record(tmp_path: Path) -> None:
    make_run(tmp_path / "my run", [0.5])
    assert page_of(tmp_path)["repeat"] == [f"isofed run '{tmp_path / 'my run' / 'config.yaml'}'"]


def test_no_text_of_a_run_becomes_code(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.5])
    found = Reader().read([tmp_path])
    found.problems.append(EVIL)
    (run,) = found.runs
    run.config["data"], run.environment["platform"] = EVIL, EVIL
    run.diagnosis["tsne"] = {"points": [[0, 1]], "class": [EVIL]}
    split = {"name": EVIL, "classes": [EVIL], "counts": [[3]], "clients": 1}
    named = type(found)({EVIL: {0: run}}, None, found.problems)
    text = render(content(named, [split]))
    elements = Elements(text)
    plain = Elements(render(page_of(tmp_path)))
    tags = [tag for tag, _ in elements.all if tag != "p"]
    assert tags == [tag for tag, _ in plain.all if tag != "p"] and "img" not in tags
    assert len(elements.scripts) == 2 and json.loads(elements.scripts[0])["splits"][0]["classes"] == [EVIL]
    assert not any(name.startswith("on") for _, attributes in elements.all for name in attributes)


def test_only_the_page_s_own_script_may_run_and_nothing_is_fetched(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.5])
    text = render(page_of(tmp_path))
    elements = Elements(text)
    (policy,) = [a["content"] or "" for tag, a in elements.all if a.get("http-equiv") == "Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(elements.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy and "connect" not in policy
    links = [a[k] for _, a in elements.all for k in ("src", "href", "action") if a.get(k)]
    assert all(str(link).startswith(("#", "data:")) for link in links)
    assert re.findall(r"url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert "innerHTML" not in elements.scripts[1] and "eval(" not in elements.scripts[1]


def test_the_same_runs_give_the_same_page(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.5])
    write_report([tmp_path / "run"], tmp_path / "a.html")
    write_report([tmp_path / "run"], tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_diagnostics_are_shown_as_far_as_they_are_there(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.5])
    assert page_of(tmp_path)["runs"][0]["diagnostics"] == {}
    diagnose(tmp_path / "run", [10, 20], values=3)
    shown = page_of(tmp_path)["runs"][0]["diagnostics"]
    assert shown["round"] == shown["spectrum_round"] == [10, 20]
    assert shown["classifier_spectrum"][1] == [[1, 2], [2, 1], [3, 0.66667]]
    assert shown["cosine"] == [0.89, 0.88] and shown["distance"] == [1.5, 1.5] and shown["angle"] == [45, 45]
    odd = [{"round": 1, "alignment": 3, "drift": {"distance": []}}, {"round": 2, "classifier_spectrum": [None, "x", 2]}]
    (tmp_path / "run" / "diagnostics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in odd))
    shown = page_of(tmp_path)["runs"][0]["diagnostics"]
    assert set(shown) == {"round", "spectrum_round", "classifier_spectrum"}
    assert shown["classifier_spectrum"] == [[], [[1, 2]]]


def test_gflop_are_counted_where_the_cost_of_a_sample_is_known(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.5, 0.6])
    diagnose(tmp_path / "run", [1])
    assert page_of(tmp_path)["runs"][0]["curves"]["gflop"] == [2, 4]  # 200 samples of 1e7 operations in a round


def test_local_models_are_a_geometric_mean_and_their_gap_a_mean(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.5])
    diagnose(tmp_path / "run", [10], values=3)
    shown = page_of(tmp_path)["runs"][0]["diagnostics"]
    assert shown["local_spectrum"] == [[[1, 0.5], [2, 0.05]]] and shown["gap"] == [-0.05]
    line = {"round": 1, "local": [{"representation_spectrum": [4.0, 0.0]}, {"representation_spectrum": [1.0, 1.0]}, 3]}
    (tmp_path / "run" / "diagnostics.jsonl").write_text(json.dumps(line) + "\n")
    assert page_of(tmp_path)["runs"][0]["diagnostics"]["local_spectrum"] == [[[1, 2]]]


def test_what_was_found_on_kept_models_stands_in_for_what_was_not_recorded(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.5, 0.6])
    whole = {"classifier_spectrum": [3.0, 1.0], "representation_spectrum": [2.0, 1.0], "significant": 2}
    own = {"round": 2, "client": 4, "representation_spectrum": [1.0, 0.5], "gap": -0.7}
    content = {
        "spectra": {"models": [{"round": 1, "client": None, **whole}, {"round": 2, "client": None, **whole}, own, 7]},
        "alignment": [{"round": 2, "cosine": 0.9, "norm_difference": 0.1}],
    }
    (tmp_path / "run" / "diagnosis.json").write_text(json.dumps(content))
    shown = page_of(tmp_path)["runs"][0]["diagnostics"]
    assert shown["round"] == [1, 2] and shown["significant"] == [2, 2] and shown["cosine"] == [None, 0.9]
    assert shown["gap"] == [None, -0.7] and shown["local_spectrum"] == [[], [[1, 1], [2, 0.5]]]
    (tmp_path / "run" / "diagnostics.jsonl").write_text(json.dumps({"round": 2, "significant": 9}) + "\n")
    assert page_of(tmp_path)["runs"][0]["diagnostics"]["significant"] == [2, 9]  # what the run saw comes first


@pytest.mark.parametrize(("error", "known"), [(None, None), (3.3, None), (0.2, 3.0)])
def test_noise_is_not_shown_as_curvature(tmp_path: Path, error: float | None, known: float | None) -> None:
    make_run(tmp_path / "run", [0.5])
    diagnose(tmp_path / "run", [1], error=error)
    clients = page_of(tmp_path)["runs"][0]["diagnosis"]["curvature"]["clients"]
    assert clients["H_N"] == known and (clients["H_D"] is None) == clients["noise"] == (known is None)
    assert clients["H_N_traces"] == 17 and clients["H_D_traces"] == 0.9


def test_each_data_set_has_a_table_of_its_own(tmp_path: Path) -> None:
    make_comparison(tmp_path / "a", {"fedavg": [0.5, 0.6], "fedprox": [0.6, 0.75]})
    make_comparison(tmp_path / "b", {"fedavg": [0.9, 0.95], "scaffold": [0.9, 0.99]}, data="synthetic:samples=100")
    page = page_of(tmp_path)
    assert page["several"] and [row["data"].count("test=50") for row in page["rows"]] == [1, 1, 0, 0]
    assert [row["difference"] for row in page["rows"]] == [None, 0.125, None, 0.02]
    assert not page_of(tmp_path / "a")["several"]


def test_memory_is_that_of_a_gpu_or_none(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.5])
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    (tmp_path / "run" / "result.json").write_text(json.dumps(result | {"peak_memory": 911_000_000}))
    assert page_of(tmp_path)["rows"][0]["peak_memory_megabytes"] is None  # on a CPU it is the process with PyTorch
    environment = tmp_path / "run" / "environment.json"
    environment.write_text(environment.read_text().replace('"device": "cpu"', '"device": "cuda:1"'))
    assert page_of(tmp_path)["rows"][0]["peak_memory_megabytes"] == 911


def test_what_noise_amounts_to_is_in_the_table_and_with_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5])
    assert page_of(tmp_path)["rows"][0]["epsilon"] is None
    add_privacy(folder.path, 4.373)
    page = page_of(tmp_path)
    assert (page["rows"][0]["epsilon"], page["rows"][0]["delta"]) == (4.373, 1e-5)
    told = "privacy of a whole client: epsilon 4.37 at delta 1e-05, against whoever sees the models"
    told += "; result.json says what that rests on"
    assert page["runs"][0]["notes"] == [told]


def test_ten_runs_of_a_hundred_rounds_with_large_diagnostics_stay_under_five_megabytes(tmp_path: Path) -> None:
    for number in range(10):
        folder = tmp_path / "runs" / str(number)
        curve = [1 - math.exp(-n / 17 - number / 100) for n in range(1, 101)]
        make_run(folder, curve, "feduv" if number % 2 else "fedavg", seed=number // 2, rounds=100)
        diagnose(folder, range(1, 101), values=512)
        diagnosis = json.loads((folder / "diagnosis.json").read_text())
        diagnosis["tsne"] = {"points": [[n / 7, n / 11] for n in range(5000)], "class": [n % 100 for n in range(5000)]}
        diagnosis["landscape"] = {"losses": [[a * b / 3.7 + 1 for a in range(41)] for b in range(41)]}
        (folder / "diagnosis.json").write_text(json.dumps(diagnosis))
    page = write_report([tmp_path / "runs"], tmp_path / "page.html")
    assert len(page["runs"]) == 10 and len(page["runs"][0]["curves"]["round"]) == 100
    assert (tmp_path / "page.html").stat().st_size < 5_000_000


def test_long_runs_are_thinned_out_with_both_ends_kept() -> None:
    assert thin(list(range(1000)), 5) == [0, 250, 500, 749, 999]
    assert thin([1, 2, 3], 3) == [1, 2, 3]


def test_numbers_that_json_cannot_hold_are_null() -> None:
    assert tidy({"a": [float("nan"), float("inf"), 0.123456789], "b": True, 3: None, "p": Path("x")}) == {
        "a": [None, None, 0.12346],
        "b": True,
        "3": None,
        "p": "x",
    }


@pytest.mark.parametrize(
    ("run", "out", "message"),
    [
        ("nowhere", "page.html", "nowhere holds no run"),
        ("run", "no/such/page.html", "cannot be written"),
        (
            "run",
            "run/config.yaml",
            "the page is HTML: give it a name such as .*/run/config.html, not .*/run/config.yaml",
        ),
        ("run", "", "cannot be written"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_written(tmp_path: Path, run: str, out: str, message: str) -> None:
    make_run(tmp_path / "run", [0.5])
    with pytest.raises(UserError, match=message):
        write_report([tmp_path / run], tmp_path / out)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_page_of_an_earlier_time_is_written_over_and_nothing_else(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.5])
    other, page = tmp_path / "other.html", tmp_path / "page.html"
    other.write_text("<!doctype html><title>My own</title>")
    with pytest.raises(UserError, match="other.html holds something else than such a page, which would be lost"):
        write_report([tmp_path / "run"], other)
    assert other.read_text() == "<!doctype html><title>My own</title>"
    page.touch()
    for _ in range(2):
        write_report([tmp_path / "run"], page)
        assert page.stat().st_size > 10_000
