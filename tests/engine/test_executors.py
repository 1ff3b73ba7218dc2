"""Executors: whoever trains the clients, and in whatever order they finish, the bytes are the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isofed.engine.choose import executor_for
from isofed.engine.workers import Pool
from isofed.federation import Federation
from isofed.files import load_tensors
from isofed.methods import names, parse
from tests.engine.own_methods import HERE
from tests.engine.plain import small
from tests.run_tools import content, numbers


def same_everywhere(one_worker: Pool, two_workers: Pool, **settings: Any) -> Federation:
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # a serial run must not depend on it
    try:
        serial = small(**settings)
        wanted = serial.fit()
    finally:
        torch.set_num_threads(before)
    for pool in (one_worker, two_workers):
        run = small(**(settings | {"executor": "workers"}), pool=pool)
        found = run.fit()
        assert content(run) == content(serial)
        assert numbers(run) == numbers(serial)
        assert found.exchanges == wanted.exchanges
        assert (wanted.executor, found.executor) == ("serial", f"workers:{len(pool.processes)}")
        assert all(torch.equal(found.weights[k], wanted.weights[k]) for k in wanted.weights)
    return serial


EVERY = [
    "trimmed:0.34" if name == "trimmed" else name for name in names()
]  # of three clients, the smallest and largest


@pytest.mark.parametrize("method", [*EVERY, "scaffold:option=1", "gaussian:at=client", "clip_update:0.1,at=client"])
def test_every_method_gives_the_same_bytes(method: str, one_worker: Pool, two_workers: Pool) -> None:
    run = same_everywhere(
        *(one_worker, two_workers),
        method=method,
        model="resnet8" if method == "stochdepth" else "cnn",
        norm="group:2" if "statistics" in parse(method).guards else None,
        participation=0.75,
        rounds=2,
        momentum=0.9,
    )
    assert all(line["events"] == [] for line in run.history)
    assert run.round == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "persistent_momentum": True, "rounds": 3, "participation": 0.75},
        {"augment": "crop:1+flip", "model": "cnn"},
        {"method": "fedbn+scaffold+fedavgm", "model": "cnn", "augment": "flip", "rounds": 3, "participation": 0.5},
        {"method": "fednova+fedprox+fedbn", "model": "cnn", "weight_decay": 0.01, "clip": 1.0, "weighting": "uniform"},
        {"precision": "bf16", "model": "cnn"},
        {"norm": "group:2", "model": "cnn", "nesterov": True, "momentum": 0.5, "lr_schedule": "cosine"},
        {"validation": 0.2, "data": "synthetic:samples=120,test=20,classes=4"},
        {"data": "synthetic:samples=1300,test=1100,classes=4", "rounds": 1, "local_steps": 1, "local_epochs": None},
        {"data": "synthetic:samples=120,test=40,classes=4,domains=2", "partition": "domain", "method": "fedbn",
         "model": "cnn"},
    ],
    ids=str,
)  # fmt: skip
def test_every_setting_gives_the_same_bytes(settings: dict[str, Any], one_worker: Pool, two_workers: Pool) -> None:
    run = same_everywhere(one_worker, two_workers, **settings)
    assert run.round == run.settings.rounds


@pytest.mark.parametrize("method", ["Median", "Count", "Near", "Mix", "Ascend", "Noise", "Near+fedbn", "Mix+scaffold"])
def test_methods_of_ones_own_give_the_same_bytes(method: str, one_worker: Pool, two_workers: Pool) -> None:
    name, plus, rest = method.partition("+")
    run = same_everywhere(one_worker, two_workers, method=f"{HERE}:{name}{plus}{rest}", model="cnn")
    assert all(line["events"] == [] for line in run.history)


def test_a_message_may_have_any_name(one_worker: Pool, two_workers: Pool) -> None:
    run = same_everywhere(one_worker, two_workers, method=f"{HERE}:Shout")
    plain = small()
    plain.fit()
    assert content(run)["weights"] == content(plain)["weights"]


def test_a_question_comes_with_what_the_server_sends(two_workers: Pool) -> None:
    # One client a round, two workers: the second one has never been sent anything when the question comes.
    settings: dict[str, Any] = {"method": f"{HERE}:Echo", "participation": 0.25, "rounds": 3}
    results = [small(**settings).fit(), small(**settings, executor="workers", pool=two_workers).fit()]
    heard = [r.weights["head.bias"].tolist() for r in results]
    assert heard[0] == heard[1] == [4 * 3.0] * 4  # four clients, each after three rounds


def test_answers_draw_from_the_seed(two_workers: Pool) -> None:
    before = global_states()
    pools: list[dict[str, Any]] = [{}, {}, {"executor": "workers", "pool": two_workers}]
    drawn = [small(method=f"{HERE}:Guess", rounds=1, **more).fit().weights["head.bias"].tolist() for more in pools]
    assert drawn[0] == drawn[1] == drawn[2]
    assert global_states() == before


def test_a_full_gradient_waits_until_every_part_has_begun(one_worker: Pool, two_workers: Pool) -> None:
    # Its loss holds Near's term, which reads frozen copies: this client's, not those of whoever came before.
    run = same_everywhere(one_worker, two_workers, method=f"scaffold:option=1+{HERE}:Near", rounds=2)
    other = small(method=f"{HERE}:Near+scaffold:option=1", rounds=2)
    other.fit()
    assert content(run)["weights"] == content(other)["weights"]


def test_a_methods_file_is_the_same_in_every_process(tmp_path: Path, one_worker: Pool) -> None:
    # Edited between two runs of a session: workers must not run another version than this process does.
    file = tmp_path / "edited.py"
    text = Path(HERE).read_text()
    file.write_text(text)
    small(method=f"{file}:Ascend", rounds=1).fit()
    file.write_text(
        text.replace("rho: float = 0.05", "rho: float = 0.5").replace("step.weights.add_(up)", "step.weights.sub_(up)")
    )
    run, serial = (small(method=f"{file}:Ascend", executor=e, pool=one_worker) for e in ("workers", "serial"))
    run.fit(), serial.fit()
    assert content(run) == content(serial)


def test_a_careless_method_gives_the_same_bytes(one_worker: Pool, two_workers: Pool) -> None:
    run = same_everywhere(one_worker, two_workers, method=f"{HERE}:Alias")
    assert all(line["events"] == [] for line in run.history)


def test_kept_clients_are_the_same_files(tmp_path: Path, two_workers: Pool) -> None:
    settings: dict[str, Any] = {"model": "cnn", "keep": "every:1", "keep_clients": "every:2"}
    small(**settings, out=tmp_path / "serial").fit()
    small(**(settings | {"executor": "workers"}), out=tmp_path / "workers", pool=two_workers).fit()
    found = {p.name: p.read_bytes() for p in (tmp_path / "workers" / "kept").iterdir()}
    assert found == {p.name: p.read_bytes() for p in (tmp_path / "serial" / "kept").iterdir()}
    assert sorted(found) == [
        "round-000001.safetensors",
        *[f"round-000002-client-{k:06d}.safetensors" for k in range(4)],
        "round-000002.safetensors",
    ]
    # A kept client's model is what it sent: their weighted mean is the round's model.
    tensors = [
        load_tensors(tmp_path / "serial" / "kept" / f"round-000002-client-{k:06d}.safetensors")[0] for k in range(4)
    ]
    run = small(**settings)
    sizes = torch.tensor([len(c) for c in run.world.clients]).double()
    wanted, _ = load_tensors(tmp_path / "serial" / "kept" / "round-000002.safetensors")
    for name, value in wanted.items():
        mean = sum(s * t[name].double() for s, t in zip(sizes / sizes.sum(), tensors, strict=True))
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)


def test_one_seed_one_result_whatever_others_draw() -> None:
    def bytes_of(**settings: Any) -> dict[str, str]:
        run = small(model="cnn", augment="flip", method="scaffold", participation=0.5, **settings)
        run.fit()
        return content(run)

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = bytes_of()
    random.random(), np.random.random(9), torch.rand(9)
    assert bytes_of() == first
    assert bytes_of(seed=1) != first
    assert bytes_of(seed=1) == bytes_of(seed=1)


def global_states() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2:], torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("executor", ["serial", "workers"])
def test_nothing_global_changes(executor: str, one_worker: Pool) -> None:
    before, threads, grad = global_states(), torch.get_num_threads(), torch.is_grad_enabled()
    default = torch.get_default_dtype()
    run = small(model="cnn", augment="flip", method=f"{HERE}:Mix+scaffold", executor=executor, pool=one_worker)
    run.fit()
    assert global_states() == before
    assert (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()) == (threads, grad, default)


def test_the_seed_changes_everything_that_is_random() -> None:
    one, two = small(seed=0), small(seed=1)
    assert [c.tolist() for c in one.world.clients] != [c.tolist() for c in two.world.clients]
    assert not torch.equal(one.state.weights, two.state.weights)


def test_a_run_does_not_depend_on_where_a_methods_file_lies(tmp_path: Path) -> None:
    # A colleague, or a site of a real federation, has the file somewhere else.
    text = Path(HERE).read_text()
    results = []
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(text)
        run = small(method=f"{tmp_path / folder / 'own.py'}:Noise")
        run.fit()
        results.append(content(run))
    assert results[0] == results[1]


def test_parts_do_not_shift_each_others_draws() -> None:
    alone, together = small(method=f"{HERE}:Noise"), small(method=f"fedprox:mu=0+{HERE}:Noise")
    alone.fit(), together.fit()
    assert content(alone) == content(together)


def test_layers_that_a_method_adds_are_drawn_from_the_seed(one_worker: Pool) -> None:
    # nn.Linear draws from torch's own generator: a run's seed must reach it, and the caller's numbers be left alone.
    before = global_states()
    runs = [small(method=f"{HERE}:Extend", **more) for more in ({}, {}, {"executor": "workers", "pool": one_worker})]
    for run in runs:
        run.fit()
    assert content(runs[0]) == content(runs[1]) == content(runs[2])
    assert global_states() == before


MODELS = """
import torch
from torch import nn
from isofed.models import Network

def dropout(shape, classes):
    inside = shape[0] * shape[1] * shape[2]
    stages = {"one": nn.Sequential(nn.Flatten(), nn.Linear(inside, 16), nn.ReLU(), nn.Dropout(0.5))}
    return Network(stages, nn.Identity(), nn.Linear(16, classes), 16)

def cumulative(shape, classes):
    inside = shape[0] * shape[1] * shape[2]
    stages = {"one": nn.Sequential(nn.Flatten(), nn.Linear(inside, 16), nn.BatchNorm1d(16, momentum=None), nn.ReLU())}
    return Network(stages, nn.Identity(), nn.Linear(16, classes), 16)
"""


@pytest.mark.parametrize("name", ["dropout", "cumulative"])
def test_a_model_of_ones_own_is_reproducible_or_refused(name: str, tmp_path: Path, two_workers: Pool) -> None:
    # Dropout draws inside a step, and batch norm with momentum=None counts its batches in a buffer outside the layout.
    from isofed.errors import UserError

    (tmp_path / "models.py").write_text(MODELS)
    before = global_states()
    try:
        runs = [
            small(model=f"{tmp_path}/models.py:{name}", **more)
            for more in ({}, {}, {"executor": "workers", "pool": two_workers})
        ]
    except UserError:
        return
    for run in runs:
        run.fit()
    assert content(runs[0]) == content(runs[1])
    assert content(runs[0]) == content(runs[2])
    assert global_states() == before


def test_auto_takes_workers_only_where_they_pay(one_worker: Pool) -> None:
    def kind(pool: Pool | None = None, **settings: Any) -> str:
        run = small(**({"executor": "auto"} | settings))
        with executor_for(run.world, run.device, pool) as executor:
            return type(executor).__name__

    assert kind() == "Serial"
    assert kind(pool=one_worker, workers=2) == "Workers"
    assert kind(pool=one_worker, workers=2, clients=1, partition="iid") == "Serial"


def test_a_pool_serves_one_run_after_another(two_workers: Pool) -> None:
    for settings in (
        {"model": "mlp"},
        {"model": "cnn", "data": "synthetic:samples=300,test=30,classes=5"},
        {"model": "mlp"},
    ):
        run, alone = small(**settings, executor="workers", pool=two_workers), small(**settings)
        run.fit(), alone.fit()
        assert content(run) == content(alone)


def test_more_workers_than_clients(two_workers: Pool) -> None:
    run, alone = (small(clients=1, partition="iid", executor=e, pool=two_workers) for e in ("workers", "serial"))
    run.fit(), alone.fit()
    assert content(run) == content(alone)
