"""Robust combinations and clipped updates: against NumPy, against loops written by hand, and in whole rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isofed import Method, gathered
from isofed.collect import Collected
from isofed.diagnostics.cost import cost
from isofed.engine.serial import Serial
from isofed.engine.slots import Slots
from isofed.errors import RunError, UserError
from isofed.federation import Federation
from isofed.gathered import Gathered
from isofed.methods import Visit, parse, robust
from isofed.methods.clip_update import clipped
from isofed.methods.krum import Krum, krum_scores, squared_distances
from isofed.methods.median import Median
from isofed.methods.trimmed import Trimmed
from tests.engine.own_methods import HERE
from tests.engine.plain import TOLERANCE, Plain, distance, mean, small

SEVEN: dict[str, Any] = {"clients": 7, "data": "synthetic:samples=160,test=20,classes=4"}


def updates(clients: int, numbers: int = 300, seed: int = 0) -> Tensor:
    """Values on a coarse grid, so that there are ties, and some huge ones."""
    rng = np.random.default_rng(seed)
    made = np.round(rng.normal(size=(clients, numbers)), 1)
    made[0, :20] = 1e9
    return torch.from_numpy(made.astype(np.float32))


# --- the formulas


@pytest.mark.parametrize("clients", [1, 2, 3, 6, 11])
@pytest.mark.parametrize("at_once", [2**22, 7])
def test_median_and_trimmed_mean_are_numpys(clients: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "_AT_ONCE", at_once)  # a few columns at a time make no difference
    given = updates(clients)
    weights = torch.arange(1.0, clients + 1)  # which count for nothing
    wide = given.numpy().astype(np.float64)
    assert np.array_equal(Median().combine(given, weights).numpy(), np.median(wide, axis=0))
    for part in (0.0, 0.2, 0.34, 0.49):
        cut = int(part * clients + 1e-9)
        wanted = np.sort(wide, axis=0)[cut : clients - cut].mean(axis=0)
        if part and not cut:
            with pytest.raises(RunError, match="leaves out nobody"):
                Trimmed(part).combine(given, weights)
            continue
        np.testing.assert_allclose(Trimmed(part).combine(given, weights).numpy(), wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("clients", [3, 5, 6])
def test_distances_are_the_same_both_ways(clients: int) -> None:
    """Otherwise rounding decides which of the two that lie closest is taken: of equal scores the first is."""
    for seed in range(20):
        given = torch.from_numpy(np.random.default_rng(seed).normal(size=(clients, 5003)).astype(np.float32))
        apart = squared_distances(given)
        assert torch.equal(apart, apart.T)


def test_trimming_does_not_trip_over_binary_fractions() -> None:
    given = torch.arange(100.0)[:, None].repeat(1, 2)
    given[-29:] = 1e6
    assert float(Trimmed(0.29).combine(given, torch.ones(100))[0]) == np.arange(29, 71).mean()  # 0.29 * 100 < 29


def krum_by_hand(wide: np.ndarray, f: int) -> list[float]:
    scores = []
    for i in range(len(wide)):
        apart = sorted(float(((wide[i] - wide[j]) ** 2).sum()) for j in range(len(wide)) if j != i)
        scores.append(sum(apart[: len(wide) - f - 2]))
    return scores


@pytest.mark.parametrize(("clients", "f"), [(5, 1), (10, 2), (10, 3), (9, 0), (3, 0)])
def test_krum_is_what_loops_over_all_pairs_give(clients: int, f: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "_AT_ONCE", 64)
    given = torch.from_numpy(np.random.default_rng(clients + f).normal(size=(clients, 50)).astype(np.float32))
    wide = given.numpy().astype(np.float64)
    scores = krum_by_hand(wide, f)
    np.testing.assert_allclose(krum_scores(given, f).numpy(), scores, rtol=1e-12)
    ones = torch.ones(clients)
    assert np.array_equal(Krum(f).combine(given, ones).numpy(), wide[np.argmin(scores)])
    best = np.argsort(scores, kind="stable")[:2]
    if clients >= 2 * f + 4:
        np.testing.assert_allclose(Krum(f, keep=2).combine(given, ones).numpy(), wide[best].mean(0), rtol=1e-15)


def test_a_huge_update_does_not_blur_the_distances_of_the_others() -> None:
    rng = np.random.default_rng(3)
    wide = 1 + 1e-3 * rng.normal(size=(7, 400))
    wide[2] = 1e9 * rng.normal(size=400)
    given = torch.from_numpy(wide.astype(np.float32))
    wide = given.numpy().astype(np.float64)
    others = [0, 1, 3, 4, 5, 6]
    wanted = ((wide[others][:, None] - wide[others][None]) ** 2).sum(-1)
    np.testing.assert_allclose(squared_distances(given)[others][:, others].numpy(), wanted, rtol=1e-8, atol=1e-10)


def test_krum_takes_the_first_of_equals() -> None:
    given = torch.tensor([[1.0], [2.0], [3.0], [2.0]])
    assert Krum().combine(given, torch.ones(4)).tolist() == [2.0]


@pytest.mark.parametrize(
    ("method", "clients", "lacking"),
    [
        (Krum(1), 4, "krum:f=1,keep=1 needs the updates of 5 clients in a round, and there are 4"),
        (Krum(), 2, "krum:f=none,keep=1 needs the updates of 3 clients in a round, and there are 2"),
        (Krum(), 1, "krum:f=none,keep=1 needs the updates of 3 clients in a round, and there is 1"),
        (Krum(keep=5), 6, "krum:f=none,keep=5 needs the updates of 7 clients in a round, and there are 6"),
    ],
)
def test_krum_never_chooses_among_too_few(method: Krum, clients: int, lacking: str) -> None:
    with pytest.raises(RunError, match=lacking):
        method.combine(updates(clients), torch.ones(clients))
    with pytest.raises(UserError, match=lacking):
        small(method=method, clients=clients)


@pytest.mark.parametrize("norm", [1e-3, 0.3, 1.0, 7.77, 1e4])
def test_no_clipped_update_is_longer_than_its_bound(norm: float) -> None:
    for seed in range(20):
        given = torch.from_numpy(np.random.default_rng(seed).normal(size=501).astype(np.float32)) * 3**seed
        made = clipped(given, norm)
        length = float(np.linalg.norm(made.numpy().astype(np.float64)))
        assert made.dtype == torch.float32 and length <= norm
        if float(given.double().norm()) <= norm:
            assert torch.equal(made, given)
        else:
            assert length > norm * (1 - 1e-6)
            torch.testing.assert_close(made / made.norm(), given / given.norm(), rtol=1e-5, atol=1e-7)


# --- in whole rounds


def middle(stacked: Tensor) -> Tensor:
    return stacked.quantile(0.5, dim=0)


def inner(stacked: Tensor) -> Tensor:
    return stacked.sort(dim=0).values[1:-1].mean(0)


@pytest.mark.parametrize(("method", "combine"), [("median", middle), ("trimmed:0.2", inner)])
def test_rounds_by_hand_with_batch_norm(method: str, combine: Callable[[Tensor], Tensor]) -> None:
    run = small(method=method, model="cnn", **SEVEN)
    found = run.fit().weights
    plain = Plain(run)
    server = plain.start()
    floating = [k for k, v in server.items() if v.is_floating_point()]
    for round in (1, 2):
        models = [plain.local(server, round, k)[0] for k in range(7)]
        server |= {k: combine(torch.stack([m[k] for m in models])) for k in floating}
    assert distance(found, {k: server[k] for k in found}) < TOLERANCE


def test_krum_in_rounds_takes_one_clients_whole_model() -> None:
    run = small(method="krum:2", model="cnn", **SEVEN)
    found = run.fit().weights
    plain = Plain(run)
    server = plain.start()
    for round in (1, 2):
        models = [plain.local(server, round, k)[0] for k in range(7)]
        flat = np.stack([np.concatenate([m[k].numpy().ravel() for k in found]) for m in models])
        server = models[int(np.argmin(krum_by_hand(flat, 2)))]
    assert distance(found, {k: server[k] for k in found}) < TOLERANCE


def test_clipping_keeps_the_weighting_of_the_run() -> None:
    run = small(method="clip_update:0.2", rounds=2)
    found = run.fit().weights
    plain = Plain(run)
    server, long = plain.start(), set()
    for round in (1, 2):
        models = []
        for k in range(4):
            model = plain.local(server, round, k)[0]
            length = sum(float((model[n] - server[n]).norm() ** 2) for n in server) ** 0.5
            long.add(length > 0.2)
            models.append({n: server[n] + (model[n] - server[n]) * min(1, 0.2 / length) for n in server})
        server = mean(models, [float(n) for n in plain.sizes])
    assert long == {False, True} and distance(found, server) < TOLERANCE


def test_a_client_that_fails_is_left_out_of_the_median() -> None:
    run = small(method=f"{HERE}:Spoil:client=1+median", rounds=1)
    found = run.fit().weights
    assert [e["client"] for e in run.history[0]["events"]] == [1]
    plain = Plain(run)
    server = plain.start()
    models = [plain.local(server, 1, k)[0] for k in (0, 2, 3)]
    assert distance(found, {k: middle(torch.stack([m[k] for m in models])) for k in server}) < TOLERANCE


def test_too_few_answers_for_krum_end_the_run() -> None:
    run = small(method=f"{HERE}:Spoil:client=1+krum:1", clients=5, data="synthetic:samples=120,test=20,classes=4")
    with pytest.raises(RunError, match="needs the updates of 5 clients in a round, and there are 4"):
        run.fit()


@pytest.mark.parametrize("method", ["median", "krum", "trimmed+clip_update:0.1", "clip_update:0.1,at=client"])
def test_slots_hand_over_the_same(method: str) -> None:
    more = {"norm": "group:2"} if "clip" in method else {}
    run = small(method=method, model="cnn", **SEVEN, **more)
    made = []
    for executor in (Serial(run.world, run.device), Slots(run.world, run.device)):
        jobs, _ = run._sample(1)
        collected = Collected(run.world, run.layout, jobs)
        for outcome in executor.train(jobs, run.state.weights, {}, run.state.clients.get):
            collected.add(outcome)
        made.append(collected.combined(run.state.weights[run.layout.shared]))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    assert float(made[0][0].norm()) > 0


@pytest.mark.parametrize("method", ["krum:1,keep=2+fedavgm", "trimmed:0.2+clip_update:0.5"])
def test_an_interrupted_run_goes_on_with_the_same_bits(method: str, tmp_path: Path) -> None:
    more: dict[str, Any] = SEVEN | {"method": method, "rounds": 3}

    class Impatient(Federation):
        def _record(self, line: dict[str, Any], *rest: Any) -> None:
            super()._record(line, *rest)
            if line["round"] == 2:
                raise KeyboardInterrupt

    whole = small(**more)
    whole.fit()
    usual = whole.settings.to_dict()
    with pytest.raises(KeyboardInterrupt):
        Impatient(out=tmp_path / "run", **usual).fit()
    again = Federation.resume(tmp_path / "run")
    again.fit()
    assert [line["round"] for line in again.history] == [1, 2, 3]
    assert again.state.weights.numpy().tobytes() == whole.state.weights.numpy().tobytes()


# --- updates that do not fit in memory


def test_updates_in_a_file_are_the_same_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory = small(method="median", model="cnn", rounds=1, **SEVEN).fit().weights
    monkeypatch.setattr(gathered, "ROOM", 0)
    in_file = small(method="median", model="cnn", rounds=1, **SEVEN).fit().weights
    assert all(torch.equal(in_file[k], in_memory[k]) for k in in_memory)


def test_rows_close_the_gaps_of_those_that_did_not_answer() -> None:
    block = Gathered([9, 2, 5, 7])
    for client in (7, 2):
        block[client] = torch.full((3,), float(client))
    assert sorted(block) == [2, 7] and block[7].tolist() == [7.0] * 3 and 5 not in block
    assert block.rows().tolist() == [[2.0] * 3, [7.0] * 3]
    with pytest.raises(ValueError, match="nobody"):
        Gathered([1]).rows()


# --- what is refused


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("scaffold+median", "'scaffold' sends 'scaffold.dc' beside its update, which 'median' would not see"),
        ("krum+fednova", "'fednova' sends 'fednova.a' beside its update, which 'krum' would not see"),
        ("trimmed+fedexp", "'fedexp' sends 'fedexp.squared' beside its update"),
        ("median+ffc", "'ffc' asks the clients a question after the last round, whose answers 'median' would not see"),
        ("spherefed+clip_update", "use spherefed:calibrate=none"),
        ("median+krum", "'median' and 'krum' both decide how client updates are combined"),
    ],
)
def test_what_would_go_around_is_refused(method: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(method)
    assert message in str(error.value)


def test_statistics_that_would_go_around_a_clip_are_refused() -> None:
    with pytest.raises(UserError, match="running statistics of batch norm .* use norm=group:2 or norm=none, or keep"):
        small(method="clip_update", model="cnn")
    assert small(method="clip_update+fedbn", model="cnn", rounds=1).fit().rounds == 1


def test_krum_says_early_that_there_are_too_few() -> None:
    with pytest.raises(UserError, match="krum:f=2,keep=1 needs the updates of 7 clients in a round, and there are 5"):
        small(method="krum:2", clients=10, participation=0.5)


def test_trimming_nobody_is_refused_also_when_a_client_does_not_answer() -> None:
    run = small(method=f"{HERE}:Fail+trimmed", clients=5, partition="iid")
    with pytest.raises(
        RunError, match="trimmed:0.2 leaves out nobody of 4 clients in a round, which is the plain mean"
    ):
        run.fit()
    assert small(method=f"{HERE}:Fail+trimmed:0.25", clients=5, partition="iid", rounds=1).fit().rounds == 1


@pytest.mark.parametrize("method", ["krum", "trimmed"])
def test_too_few_domains_are_too_few_clients(method: str) -> None:
    data: dict[str, Any] = {"data": "synthetic:samples=100,test=20,domains=2", "partition": "domain", "clients": None}
    with pytest.raises(UserError, match=r"3 clients in a round, and there are 2|leaves out nobody of 2 clients"):
        small(method=method, **data)


@pytest.mark.parametrize(
    ("method", "clients", "participation", "instead"),
    [("trimmed", 4, 1.0, "trimmed:0.25"), ("trimmed:0.3", 30, 0.1, "trimmed:0.34"), ("trimmed", 1, 1.0, "3 clients")],
)
def test_trimming_nobody_is_refused(method: str, clients: int, participation: float, instead: str) -> None:
    with pytest.raises(UserError, match=f"leaves out nobody of .* which is the plain mean; use {instead}"):
        small(method=method, clients=clients, participation=participation)
    if instead.startswith("trimmed"):
        small(method=instead, clients=clients, participation=participation, partition="iid")
    small(method="trimmed:0", clients=clients, participation=participation, partition="iid")  # that is asked for


def test_the_cost_of_a_robust_combination_does_not_depend_on_how_many_clients_it_needs() -> None:
    assert cost("krum:f=2").macs == cost("krum").macs == cost("trimmed").macs == cost("fedavg").macs


@dataclass(frozen=True)
class Sly(Method):
    """Sends something without saying so in ``extras``."""

    def end(self, visit: Visit) -> None:
        visit.sum["sly.samples"] = torch.ones(1)


def test_what_a_method_sends_without_saying_so_is_stopped_at_the_client() -> None:
    assert small(method=Sly(), rounds=1).fit().rounds == 1
    with pytest.raises(RunError, match="a method sends 'sly.samples' beside its update, which 'median' would not see"):
        small(method=[Sly(), Median()], rounds=1).fit()
