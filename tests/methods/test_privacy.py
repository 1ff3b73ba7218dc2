"""Noise on updates: its size, its draws, what it is divided by, what it amounts to, and who sees what."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm as normal
from torch import Tensor

from isofed import privacy
from isofed.config import settings
from isofed.draws import draw_clients
from isofed.engine.replica import Job, Replica
from isofed.engine.serial import Serial
from isofed.engine.world import World
from isofed.errors import UserError
from isofed.federation import Federation
from isofed.layout import Policy
from isofed.methods import find, names, parse
from isofed.methods.clip_update import clipped
from isofed.noise import normal_at
from isofed.privacy import exact_epsilon, sampled_epsilon
from tests.engine.own_methods import HERE
from tests.engine.plain import model_for, small

DOCS = Path(__file__).resolve().parents[2] / "docs"
BUILT_IN = [n for n in names() if find(n)[1].__module__.startswith("isofed.")]


def model(run: Federation) -> Tensor:
    """The trained weights after the run, as one vector in float64."""
    run.fit()
    return run.state.weights[run.layout.shared_trained].double()


def numbers(run: Federation) -> Tensor:
    """Which places of such a vector hold a weight, and not a gap."""
    marked = torch.zeros(run.layout.total)
    for view in run.layout.views(marked).values():
        view.fill_(1)
    return marked[run.layout.shared_trained] > 0


def looks_normal(sample: Tensor, std: float) -> None:
    """Mean, standard deviation and tails of independent normal numbers, each within five standard errors."""
    count = len(sample)
    assert abs(float(sample.mean())) < 5 * std / math.sqrt(count)
    assert abs(float(sample.std()) / std - 1) < 5 / math.sqrt(2 * count)
    beyond = float((sample.abs() > 2 * std).double().mean())
    assert abs(beyond - 0.0455) < 5 * math.sqrt(0.0455 / count)


# --- the noise


def test_noise_at_the_server_has_its_size_on_the_sum_of_those_drawn() -> None:
    quiet = small(method="clip_update:0.5", rounds=1, weighting="uniform")
    noisy = small(method="clip_update:0.5+gaussian:noise=0.3", rounds=1)
    added = model(noisy) - model(quiet)
    there = numbers(noisy)
    assert int(there.sum()) > 5000 and torch.equal(added[~there], torch.zeros(int((~there).sum())).double())
    looks_normal(added[there], 0.3 * 0.5 / 4)


def test_noise_at_the_client_is_added_to_each_clipped_update() -> None:
    run = small(method="gaussian:noise=2,norm=0.25,at=client", rounds=1)
    bare = small(rounds=1)
    jobs, _ = run._sample(1)
    drawn = []
    for one, other in zip(
        Serial(run.world, run.device).train(jobs, run.state.weights, {}, lambda _: None),
        Serial(bare.world, bare.device).train(jobs, bare.state.weights, {}, lambda _: None),
        strict=True,
    ):
        drawn.append((one.update.double() - clipped(other.update, 0.25).double())[numbers(run)])
        looks_normal(drawn[-1], 2 * 0.25)
    for i in range(1, 4):  # each client draws its own
        assert abs(float(torch.corrcoef(torch.stack([drawn[0], drawn[i]]))[0, 1])) < 5 / math.sqrt(len(drawn[0]))


@pytest.mark.parametrize("at", ["server", "client"])
def test_draws_are_the_seeds_or_the_systems(at: str) -> None:
    def end(seed: int = 0, **more: str) -> Tensor:
        extra = "".join(f",{k}={v}" for k, v in more.items())
        return model(small(method=f"gaussian:noise=0.1,at={at}{extra}", rounds=1, seed=seed))

    assert torch.equal(end(), end())
    assert not torch.equal(end(), end(seed=1))
    assert not torch.equal(end(draws="system"), end(draws="system"))


def test_each_round_draws_anew_and_other_parts_do_not_shift_it() -> None:
    run = small(method="gaussian:noise=0.1", rounds=1)
    assert torch.equal(model(run), model(small(method="fedprox:mu=0+gaussian:noise=0.1", rounds=1)))
    draws = [normal_at(run.layout, run.device, 0, number)("gaussian", False) for number in (1, 2)]
    assert float((draws[0] - draws[1]).norm()) > 1


def test_who_does_not_answer_counts_as_nothing() -> None:
    """The divisor is fixed: otherwise a client could be seen by its silence."""
    run = small(method=f"{HERE}:Spoil:client=2+gaussian:noise=1e-9,norm=0.5", rounds=1)
    start = run.state.weights[run.layout.shared_trained].double()
    bare = small(rounds=1)
    jobs, _ = bare._sample(1)
    outcomes = Serial(bare.world, bare.device).train(jobs, bare.state.weights, {}, lambda _: None)
    total = sum(clipped(o.update, 0.5).double() for o in outcomes if o.client != 2)
    assert isinstance(total, Tensor)
    # Three answer, and the sum, in which all count the same, is still divided by four.
    torch.testing.assert_close(model(run) - start, total / 4, rtol=0, atol=1e-7)
    assert [e["client"] for e in run.history[0]["events"]] == [2]


def test_the_bound_is_the_smallest_and_the_order_of_parts_does_not_matter() -> None:
    assert parse("gaussian").bound == 1.0 and parse("clip_update:3+gaussian").bound == 3.0
    assert parse("clip_update:3+gaussian:norm=2").bound == 2.0 and parse("fedavg").bound is None
    one = small(method="clip_update:0.3,at=client+gaussian:0.1,at=client", rounds=1)
    other = small(method="gaussian:0.1,at=client+clip_update:0.3,at=client", rounds=1)
    alone = small(method="gaussian:0.1,norm=0.3,at=client", rounds=1)
    assert torch.equal(model(one), model(other))
    torch.testing.assert_close(model(one), model(alone), rtol=0, atol=1e-7)  # clipped twice, or once


def test_the_server_step_sees_the_noised_mean() -> None:
    plain = small(method="gaussian:0.1", rounds=1)
    doubled = small(method="fedavgm:momentum=0,lr=2+gaussian:0.1", rounds=1)
    start = plain.state.weights[plain.layout.shared_trained].double()
    torch.testing.assert_close(model(doubled) - start, 2 * (model(plain) - start), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["gaussian:0.1", "gaussian:0.1,at=client", "median+gaussian:0.1,at=client"])
def test_an_interrupted_run_goes_on_with_the_same_noise(method: str, tmp_path: Path) -> None:
    whole = small(method=method, rounds=3, participation=0.75)
    wanted = model(whole)

    class Impatient(Federation):
        def _record(self, line: dict[str, Any], *rest: Any) -> None:
            super()._record(line, *rest)
            if line["round"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Impatient(out=tmp_path / "run", **whole.settings.to_dict()).fit()
    again = Federation.resume(tmp_path / "run")
    assert torch.equal(model(again), wanted)
    assert [line["epsilon"] for line in again.history] == [line["epsilon"] for line in whole.history]


# --- what it amounts to


def delta_of(epsilon: float, multiplier: float) -> float:
    """The exact curve of one Gaussian release (Balle and Wang 2018, Theorem 8)."""
    a, b = 1 / (2 * multiplier), epsilon * multiplier
    return float(normal.cdf(a - b) - math.exp(epsilon) * normal.cdf(-a - b))


@pytest.mark.parametrize("releases", [1, 3, 50])
@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5])
def test_epsilon_without_sampling_is_the_exact_curves(multiplier: float, releases: int, delta: float) -> None:
    together = multiplier / math.sqrt(releases)
    high = 10 + 2 * releases / multiplier**2
    if delta_of(0.0, together) < delta:
        assert exact_epsilon(multiplier, releases, delta) == 0
        return
    wanted = brentq(lambda e: delta_of(e, together) - delta, 0, min(high, 600), xtol=1e-10)
    assert exact_epsilon(multiplier, releases, delta) == pytest.approx(wanted, rel=1e-5)


def test_a_second_accountant_agrees() -> None:
    """Privacy loss distributions count the doubled sensitivity of replacing a client by themselves."""
    dp = pytest.importorskip("dp_accounting")
    other = dp.pld.PLDAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    other.compose(dp.GaussianDpEvent(4.0), 10)
    account = small(method="gaussian:noise=4", clients=4)._account
    assert account is not None
    assert account.epsilon(10) == pytest.approx(other.get_epsilon(1e-5), rel=1e-4)
    assert account.epsilon(10) == pytest.approx(7.5113, abs=1e-3)


def general_bound(multiplier: float, share: float, rounds: int, delta: float) -> float:
    """By hand: the bound for any mechanism sampled without replacement (Wang et al. 2019, Theorem 9)."""
    best = math.inf
    for order in range(2, 200):
        renyi = [j / (2 * multiplier**2) for j in range(order + 1)]
        second = min(4 * math.expm1(renyi[2]), 2 * math.exp(renyi[2]))
        terms = [0.0, math.log(share**2 * math.comb(order, 2)) + math.log(second)]
        terms += [
            j * math.log(share) + math.log(math.comb(order, j)) + (j - 1) * renyi[j] + math.log(2)
            for j in range(3, order + 1)
        ]
        top = max(terms)
        one = (top + math.log(sum(math.exp(t - top) for t in terms))) / (order - 1)
        best = min(best, rounds * one + math.log(1 / delta) / (order - 1))
    return best


def attained(multiplier: float, share: float, delta: float) -> float:
    """The epsilon of one release that no accounting may go below: one client at +C or -C, all others at zero."""
    x = np.linspace(-40, 40, 400_001)
    far = 1 / (2 * multiplier)  # of a sensitivity of 1 from -1/2 to 1/2, in standard deviations
    here, there = (share * normal.pdf(x - s * far) + (1 - share) * normal.pdf(x) for s in (1, -1))
    step = x[1] - x[0]
    return float(brentq(lambda e: float(np.maximum(here - math.exp(e) * there, 0).sum() * step) - delta, 0, 30))


@pytest.mark.parametrize(("multiplier", "clients", "sampled"), [(1.0, 100, 10), (2.0, 1000, 10), (0.6, 20, 10)])
def test_epsilon_with_sampling_lies_between_two_bounds_by_hand(multiplier: float, clients: int, sampled: int) -> None:
    share, delta = sampled / clients, 1e-5
    for rounds in (1, 20):
        found = sampled_epsilon(multiplier, clients, sampled, rounds, delta)
        assert attained(multiplier, share, delta) < found < 1.0001 * general_bound(multiplier, share, rounds, delta)
    account = small(method=f"gaussian:noise={2 * multiplier}", clients=4, participation=0.5)._account
    assert account is not None
    assert account.epsilon(5) <= exact_epsilon(multiplier, 5, delta)  # sampling never makes it worse


def test_at_the_client_only_real_visits_count() -> None:
    run = small(method="gaussian:noise=3,at=client", participation=0.5, rounds=6)
    run.fit()
    visits = np.zeros(4, int)
    for number in range(1, 7):
        visits[draw_clients(0, number, 4, 0.5)] += 1
        epsilon = run.history[number - 1]["epsilon"]
        assert epsilon == pytest.approx(exact_epsilon(1.5, int(visits.max()), 1e-5), rel=1e-12)
    assert visits.max() < 6
    assert run._account is not None and run._account.visits(2) <= 2 and run._account.visits(6) == visits.max()


def test_the_record_holds_what_it_amounts_to(tmp_path: Path) -> None:
    run = small(method="gaussian:noise=1.5,norm=0.4", participation=0.5, out=tmp_path / "run")
    result = run.fit()
    kept = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["privacy"]
    assert kept == result.privacy and kept["epsilon"] == run.history[-1]["epsilon"] > run.history[0]["epsilon"] > 0
    assert (kept["delta"], kept["noise"], kept["norm"], kept["releases"]) == (1e-5, 1.5, 0.4, 2)
    assert kept["sampling"].startswith("each round draws 2 of 4 clients without replacement")
    assert kept["neighbours"] == "the data of one client are replaced by any others" and "seed" in kept["draws"]
    assert kept["accountant"].startswith("dp-accounting ")
    assert all(line["local_loss"] is None for line in run.history)
    again = Federation.resume(tmp_path / "run").fit()
    assert again.privacy == result.privacy
    assert small(rounds=1).fit().privacy is None


# --- what is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "scaffold+gaussian"}, "'scaffold' sends 'scaffold.dc' beside its update, which 'gaussian' would"),
        ({"method": "gaussian+ccvr"}, "'ccvr' asks the clients a question after the last round, whose answers"),
        ({"method": "gaussian+ffc"}, "'ffc' asks the clients a question"),
        ({"method": "gaussian", "model": "cnn"}, "running statistics of batch norm"),
        ({"method": "median+gaussian"}, "use one of them, or gaussian:at=client"),
        ({"method": "clip_update+gaussian:at=client"}, "write clip_update:norm=1,at=client"),
        ({"method": "gaussian", "keep_clients": "last"}, "keep_clients=last asks clients for their models"),
        ({"method": "gaussian", "diagnose": "every:1"}, "diagnose=every:1 asks clients for their models"),
        ({"method": "gaussian:delta=0.25"}, "hides nobody among 4 clients"),
        ({"method": "gaussian:noise=0"}, "noise of method 'gaussian' must be above 0, not 0"),
    ],
)
def test_what_noise_would_not_hide_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        small(**given)
    assert message in str(error.value)


def test_without_the_accountant_noise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^gaussian needs an .*: pip install 'dp-accounting"):
        small(method="gaussian")


def test_an_older_accountant_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("dp_accounting.get_epsilon_gaussian")
    with pytest.raises(
        UserError, match=r"^gaussian needs .*the one that is installed is older: pip install 'dp-accounting"
    ):
        small(method="gaussian")


# --- who sees what


def test_flowers_secure_aggregation_is_not_for_apps_of_messages() -> None:
    """What the page says about the version that is installed; should this change, the page has to."""
    pytest.importorskip("flwr")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import flwr.clientapp.mod as mods
        from flwr.app import Context, RecordDict
        from flwr.common.secure_aggregation.quantization import quantize
        from flwr.server.workflow import SecAggPlusWorkflow
    assert not [name for name in mods.__all__ if "secagg" in name.lower()]
    nowhere: Any = None
    with pytest.raises(TypeError, match="LegacyContext"):
        SecAggPlusWorkflow(3, 2)(nowhere, Context(1, 1, {}, RecordDict(), {}))
    (made,) = quantize([np.array([9.0, 8.0, 0.0])], 8.0, 2**22)
    assert made[0] == made[1] == 2**22 and made[2] == 2**21  # clipped at 8, in steps of 2^-18


def traffic(name: str) -> list[str]:
    """What a client sends in a round and after the last one, what it gets and what it keeps, by making a visit."""
    method = parse(name)
    more: dict[str, Any] = {"norm": "group:2"} if "statistics" in method.guards else {}
    network = "resnet8" if model_for(name) == "resnet20" else "cnn"
    chosen = {"data": "synthetic:samples=40,test=8,classes=4", "clients": 5, "partition": "iid", "local_steps": 1}
    replica = Replica(World.create(settings(chosen | {"method": name, "model": network} | more)), torch.device("cpu"))
    sent = method.send(method.server_state(replica.run))
    outcome = replica.visit(Job(1, 0, 0.01, 0.5), replica.initial, sent, None)
    up = ["update"] + ["statistics"] * bool(outcome.statistics.numel())
    up += [f"`{k}`" for k in [*outcome.mean, *outcome.sum]]
    job = Job(2, 0, 0.01, 0.5)
    last = [f"`{k}`" for e, _ in method.exchanges for k in replica.answer(e, job, replica.initial, sent, None)]
    kept = ["batch norm" if k == "isofed.home" else f"`{k}`" for k in outcome.state]
    fixed = ["head once"] * bool(replica.run.layout.count(Policy.FIXED))
    down = ["model", *fixed, *(f"`{k}`" for k in sent)]
    return [f"`{name}`", *(", ".join(cell) or "-" for cell in (up, last, down, kept))]


def test_the_page_says_what_each_method_sends() -> None:
    text = (DOCS / "privacy.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| sees of \|.*\n\|[-| ]+\|\n((?:\|.*\n)*)", text, re.MULTILINE)
    wanted = [traffic(name) for name in BUILT_IN if name != "central"]
    written = "".join(f"| {' | '.join(row)} |\n" for row in wanted)
    assert table == written, f"the table should be\n{written}"


def test_methods_declare_all_that_they_send() -> None:
    for name in BUILT_IN:
        if name != "central":
            beside = [cell for cell in traffic(name)[1].split(", ") if cell not in ("update", "statistics")]
            assert beside == [f"`{extra}`" for extra in find(name)[1].extras], name
