"""SCAFFOLD, whole, against control variates kept by hand as means of the gradients that were applied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from isofed.federation import Federation
from tests.engine.plain import (
    TOLERANCE,
    Gradients,
    Named,
    Plain,
    distance,
    mean,
    participants,
    small,
    vector,
    zeros,
)


def responses(steps: int, rho: float, nesterov: bool) -> list[float]:
    """How much of each step's gradient is in the distance travelled at learning rate 1."""
    tails = [sum(rho**j for j in range(steps - i)) for i in range(steps)]
    return [1 + rho * t for t in tails] if nesterov else tails


def full_gradient(plain: Plain, start: Named, client: int) -> Gradients:
    plain.network.load_state_dict(start)
    plain.network.train()
    inputs, labels = plain.part("train")
    index = torch.from_numpy(plain.world.clients[client])
    named = {n: p for n, p in plain.network.named_parameters()}
    loss = cross_entropy(plain.network(inputs[index]).logits, labels[index])
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def by_hand(
    run: Federation, option: int = 2, lr: float = 1.0, by_steps: bool = False
) -> tuple[Named, Named, dict[int, Named]]:
    plain, s = Plain(run), run.settings
    server, names = plain.start(), plain.trained()
    c = zeros(server, names)
    own = {k: zeros(server, names) for k in range(len(plain.sizes))}
    population = [n / sum(plain.sizes) for n in plain.sizes]
    if s.weighting == "uniform":
        population = [1 / len(plain.sizes)] * len(plain.sizes)
    for round in range(1, s.rounds + 1):
        who = participants(run, round)
        models, change = [], zeros(server, names)
        for k in who:

            def correct(weights: Named, gradients: Gradients, k: int = k, c: Named = c) -> None:
                for name, gradient in gradients.items():
                    gradient += c[name] - own[k][name]

            model, seen = plain.local(server, round, k, correct)
            models.append(model)
            if option == 1:
                new = full_gradient(plain, server, k)
            else:
                part = responses(len(seen), s.momentum, s.nesterov)
                weights = torch.tensor(part).double() / sum(part)
                new = {n: torch.einsum("k,k...->...", weights, torch.stack([g[n] for g in seen])) for n in names}
                if by_steps:  # the corrected gradients, so many times too large
                    times = sum(part) / len(seen)
                    new = {n: times * new[n] + (1 - times) * (own[k][n] - c[n]) for n in names}
            change = {n: change[n] + population[k] * (new[n] - own[k][n]) for n in names}
            own[k] = {n: new[n].clone() for n in names}
        counts = [1.0 if s.weighting == "uniform" else float(plain.sizes[k]) for k in who]
        averaged = mean(models, counts)
        server = averaged | {n: server[n] + lr * (averaged[n] - server[n]) for n in names}
        c = {n: c[n] + change[n] for n in names}
    return server, c, own


# A control variate is a difference of float32 weights (rounded to 6e-8 of a weight) divided by lr times steps, 0.1 to
# 1 here, and compared with gradients of 0.01 to 0.1 in size.
VARIATE = 3e-6


@pytest.mark.parametrize(
    ("method", "settings", "known"),
    [
        ("scaffold", {"rounds": 3}, {}),
        ("scaffold", {"rounds": 3, "participation": 0.5}, {}),
        ("scaffold", {"rounds": 3, "participation": 0.5, "weighting": "uniform"}, {}),
        ("scaffold", {"model": "cnn", "participation": 0.75}, {}),
        ("scaffold", {"momentum": 0.9}, {}),
        ("scaffold", {"momentum": 0.6, "nesterov": True, "participation": 0.5, "rounds": 3}, {}),
        ("scaffold:lr=0.5", {"participation": 0.5, "rounds": 3}, {"lr": 0.5}),
        ("scaffold:divisor=steps", {"momentum": 0.5, "participation": 0.5, "rounds": 3}, {"by_steps": True}),
        ("scaffold:divisor=steps", {"momentum": 0.5, "nesterov": True}, {"by_steps": True}),
        ("scaffold:option=1", {"rounds": 3, "participation": 0.5}, {"option": 1}),
        ("scaffold:option=1", {"momentum": 0.9}, {"option": 1}),
    ],
)
def test_scaffold(method: str, settings: dict[str, Any], known: dict[str, Any]) -> None:
    run = small(method=method, **settings)
    found = run.fit().weights
    server, c, own = by_hand(run, **known)
    assert distance(found, server) < TOLERANCE
    assert distance(vector(run, run.state.server["scaffold.c"]), c) < VARIATE
    visited = sorted(run.state.clients)
    assert visited == sorted(set().union(*(participants(run, r) for r in range(1, run.settings.rounds + 1))))
    for k in visited:
        assert distance(vector(run, run.state.clients[k]["scaffold.ck"]), own[k]) < VARIATE, k
    assert distance(found, small(**settings).fit().weights) > 1e-4  # the correction did something


def test_c_is_the_populations_mean_of_the_clients_own() -> None:
    run = small(method="scaffold", participation=0.5, rounds=4)
    run.fit()
    shares = run.world.fractions()
    assert shares.sum() == pytest.approx(1)
    wanted = sum(shares[k] * state["scaffold.ck"].double() for k, state in run.state.clients.items())
    torch.testing.assert_close(run.state.server["scaffold.c"].double(), wanted, rtol=1e-5, atol=1e-7)


def test_the_first_round_is_fedavgs() -> None:
    assert distance(small(method="scaffold", rounds=1).fit().weights, small(rounds=1).fit().weights) == 0


def same_data(method: str, tmp_path: Any, **settings: Any) -> Federation:
    """Three clients with the same samples: the file deals out a data set that holds everything three times."""
    from isofed.data import Dataset, Part, load

    base = load("synthetic:samples=30,test=20,classes=3")
    images, labels = (torch.cat([t] * 3) for t in (base.train.images, base.train.labels))
    dataset = Dataset.build("thrice", base.classes, Part(images, labels), base.test)
    file = tmp_path / "split.json"
    file.write_text(str([list(range(k * 30, (k + 1) * 30)) for k in range(3)]))
    return Federation(
        dataset=dataset, method=method, partition=f"from_file:{file}", executor="serial", model="mlp",
        batch_size=30, local_epochs=3, lr=0.1, momentum=0.0, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("option", [1, 2])
def test_clients_with_the_same_data_make_it_fedavg(tmp_path: Any, option: int) -> None:
    run = same_data(f"scaffold:option={option}", tmp_path, rounds=3)
    found = run.fit().weights
    assert distance(found, same_data("fedavg", tmp_path, rounds=3).fit().weights) < 1e-6
    for state in run.state.clients.values():
        torch.testing.assert_close(state["scaffold.ck"], run.state.server["scaffold.c"], rtol=0, atol=1e-6)


def test_one_client_makes_it_fedavg() -> None:
    settings = {"clients": 1, "partition": "iid", "rounds": 3}
    assert distance(small(method="scaffold", **settings).fit().weights, small(**settings).fit().weights) < 1e-6


def test_option_one_is_the_full_gradient_at_the_received_weights() -> None:
    run = small(method="scaffold:option=1", rounds=1)
    run.fit()
    plain = Plain(run)
    for k in range(4):
        wanted = full_gradient(plain, Plain(run).start(), k)
        assert distance(vector(run, run.state.clients[k]["scaffold.ck"]), wanted) < TOLERANCE


def test_option_one_leaves_statistics_and_training_alone() -> None:
    # In round 1 all variates are zero: the extra pass must not change a bit of the model, batch norm included.
    one, two = (small(method=f"scaffold:option={o}", model="cnn", rounds=1) for o in (1, 2))
    one.fit(), two.fit()
    assert one.state.weights.numpy().tobytes() == two.state.weights.numpy().tobytes()
    assert one.history[0]["local_loss"] == two.history[0]["local_loss"]


def test_variates_cover_trained_weights_only() -> None:
    run = small(method="scaffold", model="cnn", rounds=1)
    part = run.layout.shared_trained
    run.fit()
    assert run.state.server["scaffold.c"].numel() == part.stop - part.start
    assert not any("running" in e.name for e in run.layout.entries if e.offset < part.stop)


def test_twice_the_communication() -> None:
    avg, scaffold = small(rounds=1).fit(), small(rounds=1, method="scaffold").fit()
    assert (scaffold.bytes_up, scaffold.bytes_down) == (2 * avg.bytes_up, 2 * avg.bytes_down)
