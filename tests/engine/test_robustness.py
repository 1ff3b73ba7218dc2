"""What goes wrong at a client or at the server must not go wrong elsewhere."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isofed.engine.workers import Pool
from isofed.errors import RunError, UserError
from isofed.federation import Federation
from isofed.methods import Method
from tests.engine.own import BOTH, own
from tests.engine.own_methods import HERE
from tests.engine.plain import TOLERANCE, Plain, distance, mean, small

# Clients that fail


@BOTH
@pytest.mark.parametrize("clip", [None, 0.5])
def test_nan_at_one_client_is_recorded_and_left_out(clip: float | None, executor: str, two_workers: Pool) -> None:
    run = own("Spoil:client=1", two_workers, executor, clip=clip)
    result = run.fit()
    assert [line["events"] for line in result.history] == [
        [{"client": 1, "event": "gave NaN or numbers out of range"}]
    ] * 2
    assert [line["clients"] for line in result.history] == [3, 3]
    assert result.events == 2
    assert sorted(run.state.clients) == [0, 2, 3]  # what it remembered was not taken over
    assert all(float(s["spoil.visits"]) == 2 for s in run.state.clients.values())
    # The others are averaged as if it had never been asked.
    plain = Plain(run)
    server = plain.start()
    for round in (1, 2):
        models = [plain.local(server, round, k)[0] for k in (0, 2, 3)]
        server = mean(models, [float(plain.sizes[k]) for k in (0, 2, 3)])
    assert distance(result.weights, server) < TOLERANCE
    assert all(np.isfinite(line["local_loss"]) for line in result.history)


def test_a_failure_later_on_leaves_the_state_of_before() -> None:
    run = own("Spoil:client=1,since=2+scaffold", rounds=3)
    early = own("Spoil:client=1,since=2+scaffold", rounds=1)
    run.fit(), early.fit()
    assert float(run.state.clients[1]["spoil.visits"]) == 1
    assert torch.equal(run.state.clients[1]["scaffold.ck"], early.state.clients[1]["scaffold.ck"])
    assert [len(line["events"]) for line in run.history] == [0, 1, 1]
    # The server's c is still the mean of what the clients hold.
    shares = run.world.fractions()
    wanted = sum(shares[k] * s["scaffold.ck"].double() for k, s in run.state.clients.items())
    torch.testing.assert_close(run.state.server["scaffold.c"].double(), wanted, rtol=1e-5, atol=1e-7)


@BOTH
def test_all_clients_failing_ends_the_run_with_a_reason(executor: str, one_worker: Pool) -> None:
    with pytest.raises(RunError, match=r"round 2 has no client left to average: client \d gave NaN"):
        own("Spoil:every=true,since=2", one_worker, executor, rounds=3).fit()


def test_numbers_out_of_range_are_refused_like_nan() -> None:
    class Huge(Method):
        def gradient(self, step: Any) -> None:
            step.grad.fill_(1e20)

    with pytest.raises(RunError, match="gave NaN or numbers out of range"):
        small(method=Huge()).fit()


@BOTH
@pytest.mark.parametrize("place", ["begin", "gradient", "end"])
def test_an_exception_in_a_visit_is_an_event(place: str, executor: str, two_workers: Pool) -> None:
    run = own(f"Fail:client=2,place={place}", two_workers, executor, rounds=2)
    result = run.fit()
    assert [[event["client"] for event in line["events"]] for line in result.history] == [[2]] * 2
    for line in result.history:  # in one line, with the place in the file
        said = rf"failed with ValueError: broken in {place} \(own_methods.py, line \d+, in Fail\.\w+\)"
        assert re.fullmatch(said, line["events"][0]["event"])
    # What came before it in the same replica leaves no trace in what comes after.
    plain = Plain(run)
    server = plain.start()
    for round in (1, 2):
        server = mean([plain.local(server, round, k)[0] for k in (0, 1, 3)], [float(plain.sizes[k]) for k in (0, 1, 3)])
    assert distance(result.weights, server) < TOLERANCE


def test_a_killed_worker_is_replaced_and_the_visit_repeated(tmp_path: Path, two_workers: Pool) -> None:
    flag = tmp_path / "flag"
    run = own(f"Die:flag={flag},client=1,parent={os.getpid()}+scaffold", two_workers, "workers", model="cnn")
    result = run.fit()
    assert flag.exists()  # it really was killed
    assert result.events == 0
    calm = small(method="scaffold", model="cnn")
    calm.fit()
    assert run.state.weights.numpy().tobytes() == calm.state.weights.numpy().tobytes()
    assert torch.equal(run.state.clients[1]["scaffold.ck"], calm.state.clients[1]["scaffold.ck"])


def test_a_client_that_kills_every_worker_is_left_out(tmp_path: Path, two_workers: Pool) -> None:
    text = f"Die:flag={tmp_path / 'flag'},client=1,parent={os.getpid()},always=true"
    result = own(text, two_workers, "workers", rounds=1).fit()
    assert result.history[0]["events"] == [{"client": 1, "event": "its worker process was killed (signal 9)"}]
    assert result.history[0]["clients"] == 3
    assert own("Noise", two_workers, "workers", rounds=1).fit().events == 0  # and the pool is still of use


def split(tmp_path: Path, lists: list[list[int]]) -> str:
    (tmp_path / "split.json").write_text(json.dumps(lists))
    return f"from_file:{tmp_path / 'split.json'}"


@BOTH
def test_clients_without_data_are_an_event(executor: str, tmp_path: Path, one_worker: Pool) -> None:
    parts = [list(range(0, 40)), [], list(range(40, 100)), []]
    run = small(partition=split(tmp_path, parts), executor=executor, pool=one_worker, method="scaffold")
    result = run.fit()
    for line in result.history:
        assert line["events"] == [{"client": c, "event": "has no data"} for c in (1, 3)]
        assert line["clients"] == 2
    assert sorted(run.state.clients) == [0, 2]
    assert run.world.fractions().tolist() == [0.4, 0, 0.6, 0]
    uniform = small(partition=split(tmp_path, parts), weighting="uniform")
    assert uniform.world.fractions().tolist() == [0.5, 0, 0.5, 0]


def test_only_empty_clients_in_a_round_ends_it_with_a_reason(tmp_path: Path) -> None:
    run = small(partition=split(tmp_path, [[], [], [], list(range(100))]), participation=0.25, rounds=4)
    with pytest.raises(RunError, match=r"round \d has no client left to average: client \d has no data"):
        run.fit()


def test_a_client_that_cannot_take_a_step_is_told_of(tmp_path: Path) -> None:
    # With last_batch=drop and fewer samples than a batch a client never trains, yet it counts in every mean.
    run = small(
        partition=split(tmp_path, [list(range(5)), list(range(5, 100))]), clients=None, last_batch="drop", rounds=1
    )
    line = run.fit().history[0]
    assert line["steps"] == 2 * (95 // 16)
    assert {"client": 0} in [{"client": e["client"]} for e in line["events"]]


# The server


@pytest.mark.parametrize("error", ["interrupt", "value"])
@pytest.mark.parametrize("place", ["evaluated", "aggregate"])
def test_an_interruption_at_the_server_loses_nothing(place: str, error: str, tmp_path: Path) -> None:
    text = f"{HERE}:Stop:flag={tmp_path / 'flag'},round=2,error={error},place={place}+fedavgm+scaffold"
    run = small(method=text, rounds=2, out=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt if error == "interrupt" else ValueError):
        run.fit()
    assert (run.round, len(run.history)) == (1, 1)
    again = Federation.resume(tmp_path / "run")
    result = again.fit()
    whole = small(method=text, rounds=2)  # the flag is set by now
    wanted = whole.fit()
    assert [line["round"] for line in result.history] == [1, 2]
    assert (result.accuracy, result.rounds, result.bytes_up) == (wanted.accuracy, 2, wanted.bytes_up)
    assert again.state.weights.numpy().tobytes() == whole.state.weights.numpy().tobytes()
    for key, value in whole.state.server.items():
        assert torch.equal(again.state.server[key], value), key


def test_a_server_step_that_fails_leaves_the_state_of_before(tmp_path: Path) -> None:
    text = f"{HERE}:Explode:flag={tmp_path / 'flag'},round=3+fedavgm"
    run = small(method=text, rounds=4, out=tmp_path / "run")
    with pytest.raises(RunError, match="the server step of round 3 gave NaN or numbers out of range"):
        run.fit()
    assert run.round == 2
    assert float(run.state.server["explode.rounds"]) == 2
    again = Federation.resume(tmp_path / "run")
    again.fit()
    whole = small(method=text, rounds=4)
    whole.fit()
    assert again.state.weights.numpy().tobytes() == whole.state.weights.numpy().tobytes()
    assert float(again.state.server["explode.rounds"]) == 4


# Before any work


def test_a_domain_without_test_pictures_does_not_stop_the_run() -> None:
    from isofed.data import Dataset, Part, load

    base = load("synthetic:samples=90,test=60,classes=3,domains=3")
    assert base.test.domains is not None
    kept = (base.test.domains != 2).nonzero()[:, 0].numpy()
    data = Dataset.build("two", base.classes, base.train, base.test.subset(kept), domains=base.domains)
    assert isinstance(data.train, Part)
    for method in ("fedavg", "fedbn"):
        shared = {"model": "cnn", "partition": "domain", "clients": 3, "rounds": 1}
        run = small(dataset=data, data="given:two", method=method, **shared)
        assert 0 <= run.fit().accuracy <= 1


def test_refused_before_any_work() -> None:
    with pytest.raises(UserError, match="batch_size=1 cannot train batch norm"):
        small(model="cnn", batch_size=1)
    small(model="cnn", norm="group:2", batch_size=1)
    with pytest.raises(UserError, match="crop"):
        small(augment="crop:8")  # the pictures are 8 x 8
