"""The norm that is left to the network is `own` everywhere; `none` is a network without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from isofed import Federation
from isofed.config import Settings, in_todays_words, read_words, settings, show
from isofed.errors import UserError
from isofed.experiments import BatchWatcher, plan_comparison, run_all
from isofed.models import create, has_batch_norm, load
from isofed.records import RunFolder

SMALL: dict[str, Any] = {
    "data": "synthetic:samples=60,test=20",
    "partition": "iid",
    "clients": 2,
    "local_epochs": 1,
    "rounds": 1,
}
SMALL |= {"executor": "serial"}


def test_the_default_is_own_and_another_network_than_none() -> None:
    assert settings({}).norm == settings({"norm": None}).norm == settings(read_words(["norm=own"])).norm == "own"
    assert settings(read_words(["norm=none"])).norm == "none"
    own, none = (create("cnn", classes=3, norm=norm) for norm in ("own", "none"))
    assert has_batch_norm(own) and not has_batch_norm(none)
    assert list(own.state_dict()) == list(create("cnn", classes=3).state_dict())


def test_a_run_records_it_by_name_and_older_records_are_read(tmp_path: Path) -> None:
    result = Federation(out=tmp_path / "run", **SMALL).fit()
    file = tmp_path / "run" / "config.yaml"
    assert yaml.safe_load(file.read_text())["norm"] == "own"
    assert has_batch_norm(load(tmp_path / "run"))

    file.write_text(file.read_text().replace("norm: own", "norm: null"))  # as it was written before it had a name
    assert RunFolder.open(tmp_path / "run").config["norm"] == "own"
    assert settings(read_words([str(file)])).norm == "own"
    assert Federation.resume(tmp_path / "run").fit().accuracy == result.accuracy
    assert in_todays_words({"norm": None, "clip": None}) == {"norm": "own", "clip": None}


def test_a_comparison_that_finds_another_norm_says_which(tmp_path: Path) -> None:
    plans, _ = plan_comparison(["fedavg"], [0], SMALL, tmp_path)
    run_all(plans, BatchWatcher())
    other, _ = plan_comparison(["fedavg"], [0], SMALL | {"norm": "none"}, tmp_path)
    with pytest.raises(UserError, match="holds a run with norm=own, not none; choose another out="):
        run_all(other, BatchWatcher())
    fewer, _ = plan_comparison(["fedavg"], [0], SMALL | {"clients": None}, tmp_path)
    with pytest.raises(UserError, match="holds a run with clients=2, not auto; choose another out="):
        run_all(fewer, BatchWatcher())


@pytest.mark.parametrize("key", ["clients", "local_epochs", "workers", "slots", "actors"])
def test_what_is_left_to_isofed_is_auto_and_may_be_written_so(key: str) -> None:
    assert show(key, Settings.model_fields[key].default) == "auto"
    assert getattr(settings(read_words([f"{key}=auto"])), key) is None
    assert getattr(settings({key: "auto"}), key) is None
    assert show("clip", None) == "none"  # where nothing is what it means
