"""FedAvgM and FedOpt: the server's step against the formulas, written with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from isofed.layout import Layout
from isofed.methods import Composition, Round, Run, parse
from tests.engine.plain import TOLERANCE, Named, Plain, distance, mean, participants, small

SIZE = 48
RUN = Run(10, 4, 100, 5, 0.9, False, Layout.of(torch.nn.Linear(SIZE - 16, 1)), torch.device("cpu"))


def updates(rounds: int = 5, seed: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 0.1, SIZE) * 10 ** rng.uniform(-3, 1, SIZE) for _ in range(rounds)]


def served(method: str | Composition, given: list[np.ndarray]) -> list[np.ndarray]:
    """What the server adds to the weights in each round."""
    composition = parse(method)
    state = composition.server_state(RUN)
    out = []
    for number, update in enumerate(given, 1):
        round = Round(
            number, torch.from_numpy(update.copy()), torch.zeros(SIZE).double(), {}, {}, state, 4, 4, 1.0
        )  # fmt: skip
        composition.aggregate(round)
        out.append(round.update.numpy().copy())
    return out


def close(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("damped", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_fedavgm(damped: bool, beta: float, lr: float) -> None:
    wanted, v = [], np.zeros(SIZE)
    for update in updates():
        delta = -update  # the papers' Delta = w - mean of w_k, and w <- w - v
        v = beta * v + ((1 - beta) if damped else 1) * delta
        wanted.append(-lr * v)
    close(served(f"fedavgm:momentum={beta},damped={str(damped).lower()},lr={lr}", updates()), wanted)


def test_fedavgm_forms_differ_by_the_factor() -> None:
    plain, damped = served("fedavgm:momentum=0.7", updates()), served("fedavgm:momentum=0.7,damped=true", updates())
    close(damped, [(1 - 0.7) * u for u in plain])


@pytest.mark.parametrize("damped", ["true", "false"])
def test_fedavgm_without_momentum_is_fedavg_to_the_bit(damped: str) -> None:
    run, other = (
        small(model="cnn", rounds=3),
        small(model="cnn", rounds=3, method=f"fedavgm:momentum=0,damped={damped}"),
    )
    run.fit(), other.fit()
    assert run.state.weights.numpy().tobytes() == other.state.weights.numpy().tobytes()


def adam(v: np.ndarray, d: np.ndarray, b2: float) -> np.ndarray:
    return b2 * v + (1 - b2) * d**2


def yogi(v: np.ndarray, d: np.ndarray, b2: float) -> np.ndarray:
    return v - (1 - b2) * d**2 * np.sign(v - d**2)


def adagrad(v: np.ndarray, d: np.ndarray, b2: float) -> np.ndarray:
    return v + d**2


def fedopt(
    kind: Any, given: list[np.ndarray], b1: float, b2: float, tau: float, lr: float, v0: float, bias: bool
) -> Any:
    m, v, out = np.zeros(SIZE), np.full(SIZE, v0), []
    for t, d in enumerate(given):
        m, v = b1 * m + (1 - b1) * d, kind(v, d, b2)
        step = lr * np.sqrt(1 - b2 ** (t + 1)) / (1 - b1 ** (t + 1)) if bias else lr
        out.append(step * m / (np.sqrt(v) + tau))
    return out


@pytest.mark.parametrize(("name", "kind"), [("fedadam", adam), ("fedyogi", yogi), ("fedadagrad", adagrad)])
@pytest.mark.parametrize("v0", [None, 0.0, 0.5])
@pytest.mark.parametrize("bias", [False, True])
def test_fedopt(name: str, kind: Any, v0: float | None, bias: bool) -> None:
    text = f"{name}:lr=0.3,beta1=0.8,beta2=0.95,tau=0.01,v0={'none' if v0 is None else v0},bias_correction={bias}"
    start = 0.01**2 if v0 is None else v0
    close(served(text, updates(8)), fedopt(kind, updates(8), 0.8, 0.95, 0.01, 0.3, start, bias))


@pytest.mark.parametrize(
    ("name", "kind", "b1"), [("fedadam", adam, 0.9), ("fedyogi", yogi, 0.9), ("fedadagrad", adagrad, 0.0)]
)
def test_fedopt_defaults_are_those_of_the_paper(name: str, kind: Any, b1: float) -> None:
    close(served(name, updates()), fedopt(kind, updates(), b1, 0.99, 1e-3, 0.1, 1e-6, False))


def test_yogi_differs_from_adam_and_stays_positive() -> None:
    given = [np.full(SIZE, 1.0), *[np.full(SIZE, 1e-3)] * 4]
    found, other = served("fedyogi:v0=0.5", given), served("fedadam:v0=0.5", given)
    assert np.isfinite(found).all()
    assert not np.allclose(found[-1], other[-1], rtol=1e-3)


def test_first_step_of_fedadam_from_zero() -> None:
    delta = updates(1)
    wanted = 0.2 * (1 - 0.9) * delta[0] / (np.sqrt(1 - 0.99) * np.abs(delta[0]) + 1e-3)
    close(served("fedadam:lr=0.2,v0=0", delta), [wanted])


def by_hand(run: Any, step: Any) -> Named:
    """A whole run with a server step on the trained weights; statistics are averaged plainly."""
    plain = Plain(run)
    server, names = plain.start(), plain.trained()
    for round in range(1, run.settings.rounds + 1):
        who = participants(run, round)
        models = [plain.local(server, round, c)[0] for c in who]
        new = mean(models, [float(plain.sizes[c]) for c in who])
        moves = step(round, {n: new[n] - server[n] for n in names})
        server = new | {n: server[n] + moves[n] for n in names}
    return server


def test_fedavgm_whole_with_batch_norm() -> None:
    v: Named = {}

    def heavy_ball(round: int, delta: Named) -> Named:
        for n, d in delta.items():
            v[n] = 0.6 * v.get(n, 0) + d
        return v

    run = small(method="fedavgm:momentum=0.6", model="cnn", rounds=3, participation=0.75)
    assert distance(run.fit().weights, by_hand(run, heavy_ball)) < TOLERANCE


def test_fedadam_whole_with_batch_norm() -> None:
    m: Named = {}
    v: Named = {}

    def step(round: int, delta: Named) -> Named:
        for n, d in delta.items():
            m[n] = 0.9 * m.get(n, 0) + 0.1 * d
            v[n] = 0.99 * v.get(n, 0.01**2) + 0.01 * d**2
        return {n: 0.05 * m[n] / (v[n].sqrt() + 0.01) for n in delta}

    run = small(method="fedadam:lr=0.05,tau=0.01", model="cnn", rounds=2)
    assert distance(run.fit().weights, by_hand(run, step)) < TOLERANCE
